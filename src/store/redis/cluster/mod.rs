//! A Redis Cluster: to each primary links of its own, so that one primary's trouble stays its own.
mod journey;
mod lists;
pub(super) mod moving;
mod redirect;
mod shard;
mod slots;
mod topology;

use self::{journey::Journey, shard::Shards};
pub(super) use self::{lists::by_slot, shard::Way, topology::Topology};
use super::{address::Address, answer::Answer, protocol::Op};
use crate::{Key, error::StoreError, store::Pushes};
use fred::types::config::Server;
use futures_util::future::join_all;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};

/// How often one looks for servers that are silent, for they may no longer be the ones, and for those that are of no use any
/// more.
const LOOK: Duration = Duration::from_millis(200);

/// How much longer a server has to answer once another keeps the slot: if it lives, it says so at once.
const LAST_WORD: Duration = Duration::from_millis(25);

/// Sends each operation to the primary that keeps its slot.
pub(super) struct Cluster {
    topology: Arc<Topology>,
    shards: Arc<Shards>,
    patience: Duration,
    runtime: Handle,
    _open: DropGuard,
}

impl Cluster {
    /// Learns where the slots are, and connects to one of the primaries, to see whether we may.
    pub(super) async fn open(
        address: Address,
        topology: Arc<Topology>,
        patience: Duration,
    ) -> Result<Cluster, StoreError> {
        topology.learn().await?;
        let runtime = Handle::current();
        let shards = Arc::new(Shards::new(address, patience, runtime.clone()));
        let mut primaries = topology.slots().primaries().to_vec();
        fastrand::shuffle(&mut primaries);
        let mut trouble = over();
        let mut open = false;
        for primary in primaries {
            match shards.try_open(&primary).await {
                Ok(()) => open = true,
                Err(why) if why.may_pass() => {
                    trouble = why;
                    continue;
                }
                Err(refused) => return Err(refused),
            }
            break;
        }
        if !open {
            return Err(trouble);
        }
        let closed = CancellationToken::new();
        runtime.spawn({
            let (topology, shards, closed) = (topology.clone(), shards.clone(), closed.clone());
            let look = async move {
                loop {
                    tokio::time::sleep(LOOK).await;
                    shards.tidy(topology.slots().primaries());
                    if shards.is_any_silent() {
                        topology.doubt();
                    }
                }
            };
            async move { closed.run_until_cancelled(look).await }
        });
        Ok(Cluster { topology, shards, patience, runtime, _open: closed.drop_guard() })
    }

    /// Renewals of one primary's may share a list.
    pub(super) fn lane(&self, key: &Key) -> u32 {
        self.topology.slots().lane(fred::util::redis_keyslot(key.as_str().as_bytes()))
    }

    /// Leaves word of what the primaries say, each of whose keys are used.
    ///
    /// What is published at one node is told at all, so one subscription would do for a cluster; but what comes from another
    /// node may be late by some 40 ms, for the nodes' own connections wait for full packets. So there is one at each primary
    /// whose keys are used: it tells its own at once. What comes a second time is for nobody any more.
    pub(super) fn listen(&self, to: Pushes) {
        self.shards.listen(to);
    }

    /// As a link's.
    pub(super) async fn ask(&self, op: Op) -> Result<Answer, StoreError> {
        self.pursue(Journey::new(self, Way::Main, op)).await
    }

    /// As a link's. What goes to one primary goes together.
    pub(super) async fn ask_all(&self, way: Way, ops: Vec<Op>) -> Vec<Result<Answer, StoreError>> {
        let slots = self.topology.slots();
        let mut lists: HashMap<Option<&Server>, (Vec<usize>, Vec<Journey<'_>>)> = HashMap::new();
        for (at, op) in ops.into_iter().enumerate() {
            let (places, journeys) = lists.entry(slots.owner(op.slot())).or_default();
            places.push(at);
            journeys.push(Journey::new(self, way, op));
        }
        let lists = lists.into_iter().map(|(server, (places, journeys))| async move {
            let answers = self.ask_one(way, server, journeys).await;
            places.into_iter().zip(answers).collect::<Vec<_>>()
        });
        let mut answers: Vec<_> = join_all(lists).await.into_iter().flatten().collect();
        answers.sort_by_key(|(at, _)| *at);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// What one primary is asked, and those whom it tells of the slots that it has lost.
    async fn ask_one(
        &self,
        way: Way,
        server: Option<&Server>,
        mut journeys: Vec<Journey<'_>>,
    ) -> Vec<Result<Answer, StoreError>> {
        let mut answers: Vec<Option<Result<Answer, StoreError>>> = vec![];
        if let Some(server) = server {
            let (ops, slots): (Vec<_>, Vec<_>) = journeys.iter().map(|j| (j.op.clone(), j.op.slot())).unzip();
            let asked = self.shards.exchange(server, way, async |link| link.ask_all(ops).await);
            if let Some(all) = self.unless_they_leave(&slots, server, asked).await {
                let all = all.unwrap_or_else(|over| journeys.iter().map(|_| Err(over.clone())).collect());
                answers = journeys.iter_mut().zip(all).map(|(journey, answer)| journey.met(server, answer)).collect();
            }
        }
        answers.resize_with(journeys.len(), || None);
        join_all(journeys.into_iter().zip(answers).map(|(journey, answer)| async {
            match answer {
                Some(answer) => answer,
                None if way == Way::Renewals => self.briefly(self.pursue(journey)).await,
                None => self.pursue(journey).await,
            }
        }))
        .await
    }

    /// For one that others wait for, who have their answers: it is asked again soon.
    async fn briefly(&self, asked: impl Future<Output = Result<Answer, StoreError>>) -> Result<Answer, StoreError> {
        tokio::select! {
            biased;
            answer = asked => answer,
            _ = self.pause(self.patience / 8) => Err(StoreError::unavailable("there was no answer where its slot was moved")),
        }
    }

    /// Asks wherever it is sent, until somebody answers.
    async fn pursue(&self, mut journey: Journey<'_>) -> Result<Answer, StoreError> {
        loop {
            journey.rest().await?;
            let slot = journey.op.slot();
            let (server, stays) = match journey.asking.take() {
                Some(server) => (server, false),
                None => match self.topology.owner(slot) {
                    Some(server) => (server, true),
                    None => {
                        self.topology.doubt();
                        journey.again(StoreError::unavailable(NOBODY));
                        continue;
                    }
                },
            };
            let op = journey.next();
            let asked = self.shards.exchange(&server, journey.way, async |link| link.ask(op).await);
            let answer = if stays { self.unless_they_leave(&[slot], &server, asked).await } else { Some(asked.await) };
            match answer {
                Some(answer) => {
                    if let Some(answer) = journey.met(&server, answer.flatten()) {
                        return answer;
                    }
                }
                None if journey.op.verb.may_be_sent_again() => {}
                // It may have been sent, and may be carried out yet.
                None => return Err(StoreError::unavailable("the key's primary was replaced before it answered")),
            }
        }
    }

    /// What comes of an exchange; nothing if the slots go to other servers before it is over.
    async fn unless_they_leave<T>(
        &self,
        slots: &[u16],
        server: &Server,
        exchange: impl Future<Output = T>,
    ) -> Option<T> {
        let leave = async {
            self.topology.leave(slots, server).await;
            // Over either way.
            let _ = self.pause(LAST_WORD).await;
        };
        tokio::select! {
            biased;
            outcome = exchange => Some(outcome),
            () = leave => None,
        }
    }

    /// By a timer of the store's own runtime: the caller's may have none.
    ///
    /// # Errors
    /// When that has ended: at once.
    async fn pause(&self, pause: Duration) -> Result<(), StoreError> {
        self.runtime.spawn(async move { tokio::time::sleep(pause).await }).await.map_err(|_| over())
    }
}

const NOBODY: &str = "no server of the cluster keeps this key's slot now; see CLUSTER INFO";

fn over() -> StoreError {
    StoreError::unavailable("the runtime on which the connections to Redis lived has ended; connect anew")
}
