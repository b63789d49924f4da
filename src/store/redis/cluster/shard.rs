//! The links to the primaries of a cluster, each opened when it is first needed.
use super::super::{address::Address, link::Link};
use crate::{
    clock::{Clock, Moment},
    error::StoreError,
};
use fred::types::config::Server;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::watch};

/// A server that keeps no slots is left when it wasn't needed for that long: one that slots are moved to is needed again.
const IDLE: Duration = Duration::from_secs(10);

/// Which of a server's links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Way {
    Main,
    Renewals,
}

pub(super) struct Shards {
    cluster: Address,
    patience: Duration,
    clock: Clock,
    /// Where the connections live.
    runtime: Handle,
    known: Mutex<HashMap<Server, Arc<Shard>>>,
}

#[derive(Default)]
struct Shard {
    main: Opening,
    renewals: Opening,
    used: AtomicU64,
    /// How many exchanges were begun, how many of them are over, and how many were so when last we looked.
    begun: AtomicU64,
    over: AtomicU64,
    seen: AtomicU64,
}

impl Shard {
    /// Nothing has been answered since the last look, though something is to be.
    fn is_silent(&self) -> bool {
        let over = self.over.load(Relaxed);
        self.seen.swap(over, Relaxed) == over && self.begun.load(Relaxed) > over
    }
}

/// An exchange under way with a shard.
struct UnderWay(Arc<Shard>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.over.fetch_add(1, Relaxed);
    }
}

/// A link that is being opened, by a task of its own: whoever waits for it may go.
type Opening = OnceLock<watch::Receiver<Option<Arc<Link>>>>;

impl Shards {
    pub(super) fn new(cluster: Address, patience: Duration, runtime: Handle) -> Self {
        Shards { cluster, patience, clock: Clock::system(), runtime, known: Mutex::default() }
    }

    /// A main link that works, or why there is none.
    pub(super) async fn try_open(&self, server: &Server) -> Result<(), StoreError> {
        let link = Link::open(self.cluster.member(server), self.patience).await?;
        // Nobody else knows of this store yet.
        self.shard(server).main.set(watch::channel(Some(Arc::new(link))).1).ok();
        Ok(())
    }

    /// An exchange on a link to this server.
    pub(super) async fn exchange<T>(
        &self,
        server: &Server,
        way: Way,
        exchange: impl AsyncFnOnce(&Link) -> T,
    ) -> Result<T, StoreError> {
        let shard = self.shard(server);
        shard.begun.fetch_add(1, Relaxed);
        let under_way = UnderWay(shard);
        let opening = match way {
            Way::Main => &under_way.0.main,
            Way::Renewals => &under_way.0.renewals,
        };
        let mut opened = opening.get_or_init(|| self.open(server)).clone();
        let link = opened.wait_for(Option::is_some).await.map_err(|_| super::over())?.clone();
        Ok(exchange(&*link.ok_or_else(super::over)?).await)
    }

    /// Whether any server has been silent since the last look, with something to answer.
    pub(super) fn is_any_silent(&self) -> bool {
        // All are looked at.
        self.known().values().filter(|shard| shard.is_silent()).count() > 0
    }

    fn open(&self, server: &Server) -> watch::Receiver<Option<Arc<Link>>> {
        let (opened, link) = watch::channel(None);
        let (address, patience) = (self.cluster.member(server), self.patience);
        self.runtime.spawn(async move {
            let (link, trouble) = Link::open_in_time(address.clone(), patience).await;
            if let Some(why) = trouble {
                tracing::debug!(server = %address, %why, "could not connect to a member of the cluster");
            }
            opened.send_replace(Some(Arc::new(link)));
        });
        link
    }

    fn shard(&self, server: &Server) -> Arc<Shard> {
        let mut known = self.known();
        let shard = match known.get(server) {
            Some(shard) => shard,
            None => known.entry(server.clone()).or_default(),
        };
        shard.used.store(self.clock.now().0, Relaxed);
        shard.clone()
    }

    /// Leaves those that are of no use any more.
    pub(super) fn tidy(&self, primaries: &[Server]) {
        let now = self.clock.now();
        self.known()
            .retain(|server, shard| primaries.contains(server) || now.since(Moment(shard.used.load(Relaxed))) < IDLE);
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Server, Arc<Shard>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
