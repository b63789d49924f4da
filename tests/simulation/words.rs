//! How messages look in the log.
use crate::server::{Request, Word};
use leasehold::store::Owner;

impl Request {
    pub fn owner(&self) -> Option<&Owner> {
        match self {
            Request::Claim(claim, _) => Some(&claim.owner),
            Request::Release(_, owner) => Some(owner),
            Request::Renew(list) => list.first().map(|renewal| &renewal.owner),
            _ => None,
        }
    }

    pub fn told(&self) -> String {
        match self {
            Request::Claim(claim, _) => {
                format!("claim {} ttl {:?} line {} ticket {:?} ", claim.key, claim.ttl, claim.line, claim.ticket)
            }
            Request::Renew(list) => {
                let list: Vec<_> = list.iter().map(|r| format!("{} {}", r.key, r.fence)).collect();
                format!("renew {} ", list.join(", "))
            }
            Request::Release(key, _) => format!("release {key} "),
            Request::Inspect(key) => format!("inspect {key} "),
            Request::Force(key) => format!("force {key} "),
            Request::Write(write) => format!("write {} under {} ", write.key, write.fence),
            Request::Read(key) => format!("read {key} "),
        }
    }
}

impl Word {
    pub fn told(&self) -> String {
        match self {
            Word::Granted { owner, fence, length } => {
                format!("granted to {} under {fence} for {length:?}", owner.label())
            }
            Word::Forced { key, fence, .. } => format!("forced {key} under {fence}"),
        }
    }
}
