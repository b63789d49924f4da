//! What is said to the page, in our words.
use super::names::Companions;
use crate::{
    Key,
    clock::Moment,
    store::{
        Claim, FencedWrite, Owner, Renewal,
        quorum::{Hold, Proposal},
    },
};
use std::{fmt, time::Duration};

/// The page: everything that is done in Redis.
pub(super) const PAGE: &str = include_str!("protocol.lua");

/// How much one call may ask for, counted in renewals. One takes the server some 3 µs, so it is never held for much more
/// than a millisecond.
pub(super) const LONGEST: usize = 256;

/// One operation of the page, ready to be sent.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) verb: Verb,
    pub(super) keys: Vec<String>,
    pub(super) args: Vec<Arg>,
    pub(super) sending: Sending,
}

/// How an operation is sent to a member of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sending {
    /// In one list with others of its slot.
    #[default]
    Listed,
    /// In a list of its own: its slot is being moved, and another's keys may be elsewhere.
    Alone,
    /// In a list of its own, to the server to which its slot is being moved.
    Asking {
        /// All keys are declared, so that the server looks whether it has them. Else only the first is: none is anywhere
        /// else.
        all_keys: bool,
    },
    /// In a list of its own, to either server: as much of it as can be done with the first key.
    Bare { asking: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Claim,
    Renew,
    Release,
    Force,
    Inspect,
    Write,
    Read,
    Propose,
    Hold,
}

impl Verb {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Verb::Claim => "claim",
            Verb::Renew => "renew",
            Verb::Release => "release",
            Verb::Force => "force",
            Verb::Inspect => "inspect",
            Verb::Write => "write",
            Verb::Read => "read",
            Verb::Propose => "propose",
            Verb::Hold => "hold",
        }
    }

    /// Whether it may be sent again while the first may be carried out yet: not what takes a lease that was released
    /// meanwhile, and not what ends one that began meanwhile.
    pub(super) fn may_be_sent_again(self) -> bool {
        !matches!(self, Verb::Claim | Verb::Propose | Verb::Hold | Verb::Force)
    }
}

/// An argument of an operation.
#[derive(Clone, PartialEq)]
pub(super) enum Arg {
    Text(String),
    Bytes(Vec<u8>),
    Number(u64),
    /// A moment on our clock, to be sent as the server's microseconds.
    Until(Moment),
}

impl fmt::Debug for Arg {
    /// Owners are secrets and values are nobody's business.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arg::Text(_) => f.write_str("text"),
            Arg::Bytes(b) => write!(f, "{} bytes", b.len()),
            Arg::Number(n) => write!(f, "{n}"),
            Arg::Until(at) => write!(f, "{at:?}"),
        }
    }
}

impl Op {
    fn new(verb: Verb, keys: Vec<String>, args: Vec<Arg>) -> Self {
        Op { verb, keys, args, sending: Sending::Listed }
    }

    /// Where its keys are in a cluster: all of them are in one slot.
    pub(super) fn slot(&self) -> u16 {
        self.keys.first().map_or(0, |key| fred::util::redis_keyslot(key.as_bytes()))
    }

    /// `asked` is when the claim was given to the store: its `not_after` counts from there.
    pub(super) fn claim(claim: &Claim, asked: Moment) -> Self {
        let ticket = claim.ticket.map_or_else(String::new, |t| t.0.to_string());
        let args = vec![
            Arg::Text(claim.owner.secret()),
            Arg::Number(millis(claim.ttl)),
            Arg::Number(millis(claim.presence)),
            Arg::Number(claim.line.into()),
            Arg::Text(ticket),
            Arg::Until(asked.after(claim.not_after)),
        ];
        Op::new(Verb::Claim, of_lease(&claim.key), args)
    }

    pub(super) fn renew(renewal: &Renewal) -> Self {
        let args =
            vec![Arg::Text(renewal.owner.secret()), Arg::Number(renewal.fence), Arg::Number(millis(renewal.ttl))];
        Op::new(Verb::Renew, vec![renewal.key.to_string()], args)
    }

    /// What it costs the server, counted in renewals.
    pub(super) fn weight(&self) -> usize {
        match self.verb {
            Verb::Renew => 1,
            _ => 2,
        }
    }

    /// Whose lease this renews, if that is what it does.
    pub(super) fn renews(&self) -> Option<&str> {
        match (self.verb, self.args.first()) {
            (Verb::Renew | Verb::Hold, Some(Arg::Text(owner))) => Some(owner),
            _ => None,
        }
    }

    /// What can be done of it with its first key alone, if anything: all but to take a key, to stand in line, to hand over and
    /// to keep a value.
    pub(super) fn bare(&self, asking: bool) -> Option<Op> {
        let mut op = Op { sending: Sending::Bare { asking }, ..self.clone() };
        match self.verb {
            // It would take a key that is free; one that the server has is not.
            Verb::Claim if asking => None,
            Verb::Claim => {
                *op.args.get_mut(LINE)? = Arg::Number(0);
                Some(op)
            }
            Verb::Release | Verb::Force | Verb::Inspect | Verb::Read => Some(op),
            Verb::Renew | Verb::Write | Verb::Propose | Verb::Hold => None,
        }
    }

    /// Whether whoever asks it asks again by itself when it fails.
    pub(super) fn is_asked_again(&self) -> bool {
        matches!(self.verb, Verb::Claim | Verb::Renew)
    }

    /// Whether this does what that would have done, though it be later.
    pub(super) fn asks_the_same(&self, that: &Op) -> bool {
        let same = |(this, that): (&Arg, &Arg)| this == that || matches!((this, that), (Arg::Until(_), Arg::Until(_)));
        let args = self.args.len() == that.args.len() && self.args.iter().zip(&that.args).all(same);
        self.verb == that.verb && self.keys == that.keys && args
    }

    pub(super) fn release(key: &Key, owner: &Owner) -> Self {
        Op::new(Verb::Release, of_lease(key), vec![Arg::Text(owner.secret())])
    }

    pub(super) fn force(key: &Key) -> Self {
        Op::new(Verb::Force, of_lease(key), vec![])
    }

    pub(super) fn inspect(key: &Key) -> Self {
        Op::new(Verb::Inspect, vec![key.to_string(), Companions::of(key).queue()], vec![])
    }

    pub(super) fn write(write: &FencedWrite) -> Self {
        let names = Companions::of(&write.key);
        let keys = vec![write.key.to_string(), names.mark(), names.fence()];
        Op::new(Verb::Write, keys, vec![Arg::Bytes(write.value.clone()), Arg::Number(write.fence)])
    }

    pub(super) fn read(key: &Key) -> Self {
        Op::new(Verb::Read, vec![key.to_string(), Companions::of(key).fence()], vec![])
    }

    /// `asked` as for a claim.
    pub(super) fn propose(proposal: &Proposal, asked: Moment) -> Self {
        let settled = if proposal.settled.is_zero() { 0 } else { millis(proposal.settled) };
        let args = vec![
            Arg::Text(proposal.owner.secret()),
            Arg::Number(millis(proposal.ttl)),
            Arg::Number(settled),
            Arg::Until(asked.after(proposal.not_after)),
        ];
        Op::new(Verb::Propose, with_fence(&proposal.key), args)
    }

    /// `asked` as for a claim.
    pub(super) fn hold(hold: &Hold, asked: Moment) -> Self {
        let args = vec![
            Arg::Text(hold.owner.secret()),
            Arg::Number(hold.fence),
            Arg::Number(millis(hold.ttl)),
            Arg::Number(hold.create.into()),
            Arg::Until(asked.after(hold.not_after)),
        ];
        Op::new(Verb::Hold, with_fence(&hold.key), args)
    }
}

/// Which argument of a claim says whether it stands in line.
const LINE: usize = 3;

fn with_fence(key: &Key) -> Vec<String> {
    vec![key.to_string(), Companions::of(key).fence()]
}

fn of_lease(key: &Key) -> Vec<String> {
    let names = Companions::of(key);
    vec![key.to_string(), names.fence(), names.queue(), names.waiters()]
}

/// Redis counts in milliseconds; a TTL is never shorter than what was asked for, and never nothing.
fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_is_rounded_up_to_whole_milliseconds() {
        assert_eq!(millis(Duration::from_micros(1_500_001)), 1501);
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }

    #[test]
    fn with_its_first_key_alone_a_claim_stands_in_no_line_and_takes_nothing() {
        let (key, ttl) = (Key::from("k"), Duration::from_secs(1));
        let owner = Owner::draw(&crate::store::Identity::new("me").unwrap()).unwrap();
        let claim = Op::claim(&Claim { line: true, ..Claim::new(key.clone(), owner.clone(), ttl) }, Moment(0));
        assert!(matches!(claim.args[LINE], Arg::Number(1)));
        let bare = claim.bare(false).unwrap();
        assert!(matches!(bare.args[LINE], Arg::Number(0)) && bare.keys == claim.keys);
        assert!(claim.bare(true).is_none());
        assert!(Op::release(&key, &owner).bare(true).is_some());
        assert!(Op::write(&FencedWrite::new(key, vec![], 1)).bare(false).is_none());
    }

    #[test]
    fn only_a_renewal_renews_and_it_is_told_by_its_owner() {
        let owner = Owner::draw(&crate::store::Identity::new("me").unwrap()).unwrap();
        let renewal = Renewal::new("k".into(), owner.clone(), 1, Duration::from_secs(1));
        assert_eq!(Op::renew(&renewal).renews(), Some(&*owner.secret()));
        assert_eq!(Op::release(&"k".into(), &owner).renews(), None);
    }

    #[test]
    fn debug_tells_neither_owner_nor_value() {
        let write = FencedWrite::new("v".into(), b"private".to_vec(), 1);
        let shown = format!("{:?}", Op::write(&write));
        assert!(!shown.contains("private") && shown.contains("7 bytes"), "{shown}");
    }
}
