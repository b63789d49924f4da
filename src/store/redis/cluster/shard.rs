//! The links to the primaries of a cluster, each opened when it is first needed.
use super::super::{address::Address, inbox, link::Link};
use crate::{
    clock::{Clock, Moment},
    error::StoreError,
    store::Pushes,
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
use tokio_util::sync::CancellationToken;

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
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    shards: HashMap<Server, Arc<Shard>>,
    /// Who wants to hear of what each of them says.
    hearers: Vec<Pushes>,
}

#[derive(Default)]
struct Shard {
    main: Opening,
    renewals: Opening,
    used: AtomicU64,
    /// Exchanges that were begun, and those of them that were answered.
    begun: AtomicU64,
    answered: AtomicU64,
    /// Both as they were when last we looked.
    seen: Mutex<(u64, u64)>,
    /// Exchanges that were neither answered nor given up.
    under_way: AtomicU64,
    /// What is heard from it ends with it.
    left: CancellationToken,
}

impl Drop for Shard {
    fn drop(&mut self) {
        self.left.cancel();
    }
}

impl Shard {
    /// Nothing has been answered since the last look, though something was asked.
    fn is_silent(&self) -> bool {
        let now = (self.begun.load(Relaxed), self.answered.load(Relaxed));
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (begun, answered) = std::mem::replace(&mut *seen, now);
        answered == now.1 && (begun != now.0 || self.under_way.load(Relaxed) > 0)
    }
}

/// An exchange under way with a shard.
struct UnderWay(Arc<Shard>);

impl UnderWay {
    fn begin(shard: Arc<Shard>) -> UnderWay {
        shard.begun.fetch_add(1, Relaxed);
        shard.under_way.fetch_add(1, Relaxed);
        UnderWay(shard)
    }

    fn answered(self) {
        self.0.answered.fetch_add(1, Relaxed);
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Relaxed);
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
        let under_way = UnderWay::begin(self.shard(server));
        let opening = match way {
            Way::Main => &under_way.0.main,
            Way::Renewals => &under_way.0.renewals,
        };
        let mut opened = opening.get_or_init(|| self.open(server)).clone();
        let link = opened.wait_for(Option::is_some).await.map_err(|_| super::over())?.clone();
        let answer = exchange(&*link.ok_or_else(super::over)?).await;
        under_way.answered();
        Ok(answer)
    }

    /// Whether any server has been silent since the last look, with something to answer.
    pub(super) fn is_any_silent(&self) -> bool {
        // All are looked at.
        self.known().shards.values().filter(|shard| shard.is_silent()).count() > 0
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
        let Known { shards, hearers } = &mut *known;
        let shard = match shards.get(server) {
            Some(shard) => shard,
            None => {
                let shard: &Arc<Shard> = shards.entry(server.clone()).or_default();
                for to in hearers {
                    self.hear(server, shard, to);
                }
                shard
            }
        };
        shard.used.store(self.clock.now().0, Relaxed);
        shard.clone()
    }

    /// Leaves word of what each of them says.
    pub(super) fn listen(&self, to: Pushes) {
        let mut known = self.known();
        known.hearers.retain(|other| !other.is_closed());
        for (server, shard) in &known.shards {
            self.hear(server, shard, &to);
        }
        known.hearers.push(to);
    }

    fn hear(&self, server: &Server, shard: &Shard, to: &Pushes) {
        let address = self.cluster.member(server);
        self.runtime.spawn(inbox::hear(address, self.patience, to.clone(), shard.left.clone()));
    }

    /// Leaves those that are of no use any more.
    pub(super) fn tidy(&self, primaries: &[Server]) {
        let now = self.clock.now();
        self.known()
            .shards
            .retain(|server, shard| primaries.contains(server) || now.since(Moment(shard.used.load(Relaxed))) < IDLE);
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
