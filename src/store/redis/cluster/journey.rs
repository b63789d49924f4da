//! An operation's way through a cluster, from server to server.
//!
//! A redirected operation was certainly not carried out, so it may be sent again, also a claim. What happened to one that
//! was not answered is not known, and that is for whoever asked.
use super::{Cluster, Way, redirect::Redirect};
use crate::{
    clock::jittered,
    error::StoreError,
    store::redis::{
        answer::Answer,
        protocol::{Op, Sending},
    },
};
use fred::types::config::Server;
use std::time::Duration;
use tokio::time::Instant;

/// The first and the longest pause before an operation is sent again.
const PAUSE: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(64));

/// So often an operation is sent on without a pause: from a server that has just lost its slot.
const AT_ONCE: u32 = 2;

/// An operation on its way to the server that keeps its slot.
pub(super) struct Journey<'a> {
    cluster: &'a Cluster,
    pub(super) way: Way,
    pub(super) op: Op,
    /// How it is sent next.
    sending: Sending,
    began: Instant,
    /// How often it was sent on.
    turns: u32,
    /// Why it has to wait before it is sent again.
    waits: Option<StoreError>,
    /// The server to ask next, to which the slot is being moved.
    pub(super) asking: Option<Server>,
}

impl<'a> Journey<'a> {
    pub(super) fn new(cluster: &'a Cluster, way: Way, op: Op) -> Self {
        Journey {
            cluster,
            way,
            op,
            sending: Sending::Listed,
            began: Instant::now(),
            turns: 0,
            waits: None,
            asking: None,
        }
    }

    /// The answer, unless it only says where to go next.
    pub(super) fn met(
        &mut self,
        server: &Server,
        answer: Result<Answer, StoreError>,
    ) -> Option<Result<Answer, StoreError>> {
        let error = match answer {
            Err(error) => error,
            answered => return Some(answered),
        };
        let topology = &self.cluster.topology;
        match Redirect::of(&error, server) {
            None => {
                if error.may_pass() {
                    topology.doubt();
                }
                return Some(Err(error));
            }
            Some(Redirect::Moved(to)) => {
                topology.moved(self.op.slot(), &to);
                self.sending = Sending::Alone;
                self.turn(error);
            }
            Some(Redirect::Ask(to)) => {
                match self.sending {
                    // Some of its keys are here, but not the first.
                    Sending::Bare { asking: false } if self.op.bare(true).is_some() => {
                        self.sending = Sending::Bare { asking: true };
                    }
                    Sending::Bare { .. } => {
                        self.again(error);
                        return None;
                    }
                    // Not all that share a list with it may be elsewhere.
                    Sending::Listed if !topology.slots().exact => {
                        self.sending = Sending::Alone;
                        return None;
                    }
                    _ => self.sending = Sending::Asking { all_keys: !topology.slots().exact },
                }
                self.asking = Some(to);
                self.turn(error);
            }
            Some(Redirect::TryAgain) => match self.sending {
                Sending::Alone if self.op.bare(false).is_some() => {
                    self.sending = Sending::Bare { asking: false };
                    self.turn(error);
                }
                // In a list, it may have been another's keys.
                Sending::Listed => self.sending = Sending::Alone,
                _ => self.again(error),
            },
            Some(Redirect::Replica) => {
                topology.doubt();
                self.again(error);
            }
            Some(Redirect::Down) => {
                topology.doubt();
                // The client library tells everybody who waits what only one was told.
                if !self.op.verb.may_be_sent_again() {
                    return Some(Err(error));
                }
                self.again(error);
            }
        }
        None
    }

    /// What is to be sent.
    pub(super) fn next(&self) -> Op {
        match self.sending {
            Sending::Bare { asking } => self.op.bare(asking),
            _ => None,
        }
        .unwrap_or_else(|| Op { sending: self.sending, ..self.op.clone() })
    }

    /// It is to be sent elsewhere: at once, unless it has come around too often.
    fn turn(&mut self, why: StoreError) {
        self.turns += 1;
        if self.turns > AT_ONCE {
            self.waits = Some(why);
        }
    }

    /// It is to be sent again, after a pause.
    pub(super) fn again(&mut self, why: StoreError) {
        self.sending = Sending::Alone;
        self.turns += 1;
        self.waits = Some(why);
    }

    /// The pause before it is sent again. Whoever asks again by itself is told why there is no answer while there is time
    /// to.
    pub(super) async fn rest(&mut self) -> Result<(), StoreError> {
        let Some(why) = self.waits.take() else { return Ok(()) };
        let patience = if self.op.is_asked_again() { self.cluster.patience / 4 } else { self.cluster.patience };
        if self.began.elapsed() >= patience {
            return Err(why);
        }
        let pause = (PAUSE.0 * 2_u32.saturating_pow(self.turns.saturating_sub(1))).min(PAUSE.1);
        self.cluster.pause(jittered(pause)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{
        Claim, Identity, Owner,
        redis::{address::Address, cluster::Shards, protocol::Verb, server_error::ServerError},
    };
    use std::sync::Arc;
    use tokio::runtime::Handle;
    use tokio_util::sync::CancellationToken;

    #[tokio::test]
    async fn a_claim_is_sent_again_only_when_it_was_certainly_not_carried_out() {
        let address = Address::parse("redis-cluster://h").unwrap();
        let (topology, patience) = (address.cluster().unwrap().clone(), Duration::from_secs(1));
        let shards = Arc::new(Shards::new(address, patience, Handle::current()));
        let _open = CancellationToken::new().drop_guard();
        let cluster = Cluster { topology, shards, patience, runtime: Handle::current(), _open };
        let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
        let claim = Op::claim(&Claim::new("k".into(), owner.clone(), patience), crate::clock::Moment(0));
        let release = Op::release(&"k".into(), &owner);
        let again = |op: &Op, words: &str| {
            let told = Err(ServerError::new(words).classify());
            Journey::new(&cluster, Way::Main, op.clone()).met(&Server::new("h", 1), told).is_none()
        };
        // It alone was told so.
        assert!(again(&claim, "MOVED 1 h:2") && again(&release, "MOVED 1 h:2"));
        // The client library tells this to everybody who waits.
        assert!(
            !again(&claim, "CLUSTERDOWN The cluster is down") && again(&release, "CLUSTERDOWN The cluster is down")
        );
        let once = [Verb::Claim, Verb::Propose, Verb::Hold, Verb::Force];
        assert!(once.iter().all(|verb| !verb.may_be_sent_again()));
    }
}
