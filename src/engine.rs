//! What all leases of one `Leases` share.
use crate::{
    Key,
    clock::{Clock, Moment},
    error::{Error, Result, Stale, StoreError},
    farewell::{Farewell, Partings},
    host::Host,
    schedule::Schedule,
    store::{FencedWrite, Identity, Wrote, erased::DynStore, pushes::Push},
    tenure::Tenure,
    waiting::Waiting,
};
use std::{
    future::Future,
    ops::Deref,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio_util::sync::CancellationToken;

pub(crate) struct Engine {
    pub(crate) store: Arc<dyn DynStore>,
    pub(crate) clock: Clock,
    pub(crate) identity: Identity,
    pub(crate) schedule: Schedule,
    pub(crate) waiting: Waiting,
    farewells: Mutex<Vec<Farewell>>,
    pub(crate) partings: Partings,
    /// Fires when `shutdown` is called: nothing is acquired any more.
    pub(crate) closing: CancellationToken,
    /// Nobody holds a handle or a lease any more: the watchdog may go once it has said goodbye for all.
    retired: AtomicBool,
    /// When the watchdog last looked.
    beat: AtomicU64,
    pub(crate) host: Host,
    /// How much longer than usual an answer of the store may take; see `Replicas`.
    pub(crate) slack: Duration,
}

impl Engine {
    pub(crate) fn new(
        store: Arc<dyn DynStore>,
        clock: Clock,
        identity: Identity,
        host: Host,
        slack: Duration,
    ) -> Arc<Engine> {
        Arc::new(Engine {
            beat: AtomicU64::new(clock.now().0),
            store,
            clock,
            identity,
            schedule: Schedule::default(),
            waiting: Waiting::default(),
            farewells: Mutex::default(),
            partings: Partings::default(),
            closing: CancellationToken::new(),
            retired: AtomicBool::new(false),
            host,
            slack,
        })
    }

    /// Makes sure that somebody watches, before anything is acquired.
    ///
    /// # Errors
    /// After a shutdown, and in a forked child.
    pub(crate) fn ready(self: &Arc<Self>) -> Result<()> {
        if self.closing.is_cancelled() {
            return Err(Error::Shutdown);
        }
        self.watched()
    }

    /// Makes sure that somebody watches and says what has to be said.
    ///
    /// # Errors
    /// In a forked child.
    pub(crate) fn watched(self: &Arc<Self>) -> Result<()> {
        self.host.ensure_watched(self)
    }

    /// Another watchdog has been set in the place of this one.
    pub(crate) fn is_superseded(&self, generation: u64) -> bool {
        self.host.generation() != generation
    }

    pub(crate) fn bid_farewell(&self, farewell: Farewell) {
        self.farewells.lock().unwrap_or_else(PoisonError::into_inner).push(farewell);
        self.schedule.wake();
    }

    pub(crate) fn take_farewells(&self) -> Vec<Farewell> {
        std::mem::take(&mut *self.farewells.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The store said something without being asked.
    pub(crate) fn hear(&self, push: &Push) {
        match push {
            Push::Forced { key, fence } => {
                if let Some(tenure) = self.schedule.find(key, *fence) {
                    tenure.forced();
                }
            }
            Push::Granted { owner, fence, length } => self.waiting.granted(owner, *fence, *length),
            Push::Missed => self.waiting.ask_all(),
            Push::Nothing => {}
        }
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }

    /// Lets the watchdog go as soon as nothing is left to do.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        self.schedule.wake();
    }

    pub(crate) fn beat(&self, now: Moment) {
        self.beat.store(now.0, Ordering::Relaxed);
    }

    pub(crate) fn last_beat(&self) -> Moment {
        Moment(self.beat.load(Ordering::Relaxed))
    }

    /// One exchange with the store, bounded.
    ///
    /// # Errors
    /// What the store said, or that it said nothing within `limit` and the slack.
    pub(crate) async fn bounded<T>(
        &self,
        limit: Duration,
        exchange: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let limit = limit + self.slack;
        tokio::time::timeout(limit, exchange)
            .await
            .unwrap_or_else(|_| Err(StoreError::unavailable(format!("no answer within {limit:?}"))))
    }
}

/// Keeps the engine running: held by every handle and every lease, but not by the watchdog. When the last one goes, the
/// watchdog follows.
pub(crate) struct Keeper(pub(crate) Arc<Engine>);

impl Keeper {
    pub(crate) fn clock(&self) -> &Clock {
        &self.0.clock
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.0.schedule.next_id()
    }

    pub(crate) fn schedule(&self, tenure: &Arc<Tenure>, from: Option<Moment>, to: Option<Moment>) {
        self.0.schedule.place(tenure, from, to, self.clock().now());
    }

    /// # Errors
    /// When the key is one that no store, or this store, can keep.
    pub(crate) fn check(&self, key: &Key) -> Result<()> {
        key.check()?;
        Ok(self.0.store.check(key)?)
    }
}

impl Keeper {
    /// # Errors
    /// When a larger fence has written, or the store failed.
    pub(crate) async fn write(&self, write: FencedWrite) -> Result<()> {
        self.check(&write.key)?;
        match self.bounded(EXCHANGE, self.store.write(&write)).await {
            Ok(Wrote::Written) => Ok(()),
            Ok(Wrote::Stale { newest }) => Err(Stale::new(write.fence, newest).into()),
            Err(error) => Err(Error::store("write", &write.key, error)),
        }
    }
}

/// How long a call that belongs to no lease waits for the store.
pub(crate) const EXCHANGE: Duration = Duration::from_secs(2);

impl Deref for Keeper {
    type Target = Arc<Engine>;
    fn deref(&self) -> &Arc<Engine> {
        &self.0
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.retire();
    }
}
