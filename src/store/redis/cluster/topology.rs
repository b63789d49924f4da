//! What is known of a cluster, and how it is learnt.
//!
//! Several nodes are asked at once for their map, and the one that knows of the last change is believed: a node that is cut
//! off keeps an old one. It is asked for when something happens that the map doesn't explain, and now and then.
use super::{
    super::{
        server_error::ServerError,
        server_info::ServerInfo,
        wire::{self, Wire},
    },
    slots::Slots,
};
use crate::{
    clock::jittered,
    error::{Invalid, StoreError},
};
use fred::{
    error::Error as FredError,
    interfaces::ClientLike,
    types::{
        ClusterHash, CustomCommand, Value,
        config::{Config, Server},
    },
};
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout, timeout_at},
};

/// How many nodes are asked at once.
const ASKED: usize = 3;

/// How long a node may take to answer.
const ANSWER: Duration = Duration::from_secs(1);

/// How much longer the others have once one has answered.
const OTHERS: Duration = Duration::from_millis(50);

/// How often the map is looked over though nothing has happened.
const EVERY: Duration = Duration::from_secs(15);

/// After so long without doubt all is well again.
const CALM: Duration = Duration::from_secs(2);

/// The shortest and the longest time between two looks at the map while something happens.
const PACE: (Duration, Duration) = (Duration::from_millis(25), Duration::from_millis(250));

/// The first version whose servers say `ASK` only when they have none of the keys.
const EXACT: (u32, u32) = (7, 0);

pub(in super::super) struct Topology {
    seeds: Vec<Server>,
    /// Credentials and TLS.
    login: Config,
    map: watch::Sender<Arc<Slots>>,
    /// Something has happened that the map doesn't explain.
    doubt: Notify,
    /// Connections to those who were asked, for as long as something happens.
    asked: Mutex<HashMap<Server, Wire>>,
}

/// A node's map, and how much it may be believed.
struct View {
    slots: Slots,
    /// Whether the node sees most of the cluster, and the last change that it knows of.
    standing: (bool, u64),
}

impl Topology {
    pub(in super::super) fn new(seeds: &[Server], login: Config) -> Result<Self, Invalid> {
        let mut distinct: Vec<Server> = vec![];
        for seed in seeds {
            if !distinct.contains(seed) {
                distinct.push(seed.clone());
            }
        }
        if distinct.is_empty() {
            return Err(Invalid::new("config", "names at least one node of the cluster"));
        }
        if login.database.is_some_and(|database| database > 0) {
            return Err(Invalid::new("config", "no database but 0: a cluster has no other"));
        }
        Ok(Topology {
            seeds: distinct,
            login,
            map: watch::Sender::default(),
            doubt: Notify::new(),
            asked: Mutex::default(),
        })
    }

    /// The primary that keeps a slot, as far as is known.
    pub(super) fn owner(&self, slot: u16) -> Option<Server> {
        self.map.borrow().owner(slot).cloned()
    }

    pub(super) fn slots(&self) -> Arc<Slots> {
        self.map.borrow().clone()
    }

    /// Until all these slots are kept by others than this server.
    pub(super) async fn leave(&self, slots: &[u16], server: &Server) {
        let mut map = self.map.subscribe();
        let left = |map: &Slots, slot: u16| map.owner(slot).is_some_and(|owner| owner != server);
        // The sender is ours, so it cannot be gone.
        map.wait_for(|map| slots.iter().all(|slot| left(map, *slot))).await.ok();
    }

    /// Its old primary says that a slot is elsewhere; it knows best.
    pub(super) fn moved(&self, slot: u16, to: &Server) {
        self.map.send_if_modified(|map| {
            let news = map.owner(slot) != Some(to);
            if news {
                Arc::make_mut(map).set(slot, to);
            }
            news
        });
        // Seldom does a slot come alone.
        self.doubt();
    }

    /// Something has happened that the map doesn't explain.
    pub(super) fn doubt(&self) {
        self.doubt.notify_one();
    }

    /// Learns the map from whichever nodes answer.
    pub(in super::super) async fn learn(&self) -> Result<(), StoreError> {
        let mut trouble: Option<StoreError> = None;
        let nodes = self.nodes();
        for nodes in nodes.chunks(ASKED) {
            let (mut best, mut exact): (Option<View>, bool) = (None, true);
            let mut asked: FuturesUnordered<_> = nodes.iter().map(|node| self.ask(node)).collect();
            let mut until = Instant::now() + 2 * ANSWER;
            while let Ok(Some(answer)) = timeout_at(until, asked.next()).await {
                match answer {
                    Ok(view) => {
                        // While servers are replaced by newer ones, it is the older who may say `ASK`.
                        exact &= view.slots.exact;
                        if best.as_ref().is_none_or(|best| view.standing > best.standing) {
                            best = Some(view);
                        }
                        until = until.min(Instant::now() + OTHERS);
                    }
                    // What won't pass by itself is told before what may.
                    Err(why) if trouble.as_ref().is_none_or(StoreError::may_pass) => trouble = Some(why),
                    Err(_) => {}
                }
            }
            if let Some(View { mut slots, .. }) = best {
                slots.exact = exact;
                self.map.send_replace(Arc::new(slots));
                return Ok(());
            }
        }
        match trouble {
            Some(refused) if !refused.may_pass() => Err(refused),
            trouble => {
                let none = StoreError::unavailable(format!("no node of the cluster answers, of {self}"));
                Err(match trouble {
                    Some(last) => none.with_source(last),
                    None => none,
                })
            }
        }
    }

    async fn ask(&self, node: &Server) -> Result<View, StoreError> {
        let kept = self.asked().remove(node);
        let asked = async {
            if let Some(wire) = kept
                && let Ok(said) = self.question(node, wire).await
            {
                return Ok(said);
            }
            let wire = Wire::connect(self.login.clone(), node, 32).await.map_err(|error| not_learnt(node, error))?;
            self.question(node, wire).await
        };
        timeout(ANSWER, asked).await.unwrap_or_else(|_| {
            Err(StoreError::unavailable(format!("the node {node} gave no answer within {ANSWER:?}; does it hang?")))
        })
    }

    async fn question(&self, node: &Server, wire: Wire) -> Result<View, StoreError> {
        let say = |command, word: &'static str| {
            let command = CustomCommand::new_static(command, ClusterHash::Random, false);
            wire.client.custom::<Value, _>(command, vec![word])
        };
        let said = tokio::try_join!(say("CLUSTER", "SLOTS"), say("CLUSTER", "INFO"));
        let (map, state) = said.map_err(|error| not_learnt(node, error))?;
        // Who may not ask is as well served by what every version does.
        let info = say("INFO", "server").await.ok();
        self.asked().insert(node.clone(), wire);
        let mut slots = Slots::read(map, node).ok_or_else(|| {
            let odd = format!("what {node} says of its cluster is not understood; is there a proxy in between?");
            StoreError::unavailable(odd)
        })?;
        if slots.is_empty() {
            return Err(StoreError::unavailable(format!(
                "the node {node} knows of no server with slots; was its cluster created, and does it belong to one?"
            )));
        }
        let info = info.and_then(|info| info.as_str().map(|info| ServerInfo::read(&info)));
        slots.exact = info.and_then(|info| info.version).is_some_and(|version| version >= EXACT);
        Ok(View { slots, standing: standing(&state.as_str().unwrap_or_default()) })
    }

    fn asked(&self) -> MutexGuard<'_, HashMap<Server, Wire>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that are known, in any order, and then the seeds.
    fn nodes(&self) -> Vec<Server> {
        let slots = self.slots();
        let mut nodes: Vec<Server> = slots.nodes().cloned().collect();
        fastrand::shuffle(&mut nodes);
        for seed in &self.seeds {
            if !nodes.contains(seed) {
                nodes.push(seed.clone());
            }
        }
        nodes
    }

    /// Learns the map when there is doubt, and now and then. Never ends.
    pub(in super::super) async fn follow(&self) {
        let mut pace = PACE.0;
        loop {
            if timeout(CALM, self.doubt.notified()).await.is_err() {
                pace = PACE.0;
                self.asked().clear();
                // In time or not, it is asked for.
                timeout(jittered(EVERY), self.doubt.notified()).await.ok();
            }
            if let Err(why) = self.learn().await {
                tracing::debug!(cluster = %self, %why, "could not learn where the slots are");
            }
            sleep(jittered(pace)).await;
            pace = (pace * 2).min(PACE.1);
        }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the cluster of ")?;
        for (i, seed) in self.seeds.iter().enumerate() {
            write!(f, "{}{seed}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// From `CLUSTER INFO`: whether the node sees most of the cluster, and the last change that it knows of.
fn standing(info: &str) -> (bool, u64) {
    let of = |name: &str| info.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'));
    (of("cluster_state") == Some("ok"), of("cluster_current_epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0))
}

fn not_learnt(node: &Server, error: FredError) -> StoreError {
    let said = ServerError::new(error.details());
    match said.code() {
        Some("ERR") if error.details().contains("cluster support disabled") => StoreError::refused(format!(
            "the server {node} is a member of no cluster; name it alone: `redis://`"
        ))
        .with_source(said),
        Some("NOPERM") => StoreError::refused(
            "the Redis user may not ask where the slots are; in a cluster leasehold needs +cluster|slots +cluster|info too",
        )
        .with_source(said),
        Some(_) => said.classify(),
        None => wire::not_connected(node, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_sees_most_of_the_cluster_is_believed_before_one_that_does_not_and_then_the_one_that_knows_more() {
        let said =
            |state, epoch| format!("cluster_state:{state}\r\ncluster_slots_ok:1\r\ncluster_current_epoch:{epoch}\r\n");
        let (cut_off, old, new) = (standing(&said("fail", 9)), standing(&said("ok", 7)), standing(&said("ok", 8)));
        assert!(cut_off < old && old < new);
        assert_eq!(standing(""), (false, 0));
    }

    #[test]
    fn a_slot_that_has_moved_is_known_to_whoever_waits_for_it() {
        let h = |port| Server::new("h", port);
        let topology = Topology::new(&[h(1), h(2), h(1)], Config::default()).unwrap();
        assert_eq!(topology.to_string(), "the cluster of h:1, h:2");
        assert_eq!(topology.owner(3), None);
        let answer = vec![
            Value::Integer(0),
            Value::Integer(9),
            Value::Array(vec![Value::from_static_str("h"), Value::Integer(1)]),
        ];
        let slots = Slots::read(Value::Array(vec![Value::Array(answer)]), &h(9)).unwrap();
        topology.map.send_replace(Arc::new(slots));
        let old = h(1);
        let mut left = std::pin::pin!(topology.leave(&[3], &old));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(left.as_mut().poll(&mut cx).is_pending());
        topology.moved(4, &h(2));
        assert!(left.as_mut().poll(&mut cx).is_pending());
        topology.moved(3, &h(2));
        assert!(left.as_mut().poll(&mut cx).is_ready());
        assert_eq!((topology.owner(3), topology.owner(5)), (Some(h(2)), Some(h(1))));
    }
}
