//! The held lease: its state, its checks, its release.
use crate::{
    Key, Result,
    error::{Error, LossReason, Lost},
    guard::Guard,
    store::{FencedWrite, Freed},
    tenure::Tenure,
};
use std::{fmt, future::IntoFuture, ops::Deref, sync::Arc, time::Duration};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How a lease is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseState {
    /// Ownership is certain.
    Held,
    /// Ownership is certain, but the last renewal failed or wasn't answered in time, and another is being tried; or too few
    /// [replicas](crate::LeasesBuilder::replicas) have it.
    AtRisk,
    /// Ownership can't be shown any more.
    Lost(LossReason),
    /// It was released by its handle.
    Released,
}

/// What a release found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// It was ours, and is free or the next one's now.
    Released,
    /// It was not ours any more, although nobody had told us: it expired or was ended by force a moment ago.
    AlreadyGone,
    /// The store did not answer. The release is tried again in the background; at the latest the TTL frees the key.
    Unconfirmed,
}

/// A look at a lease: it can check the lease and guard work with it, and can't end it.
///
/// A function that may only run under a lease takes `&LeaseView` (`&Lease` coerces). Cloning is cheap, and a view may
/// outlive its lease: then it says so. Everything that isn't `async` here is local: no round trip, no lock that is held
/// for long, fit for blocking code.
#[derive(Clone)]
pub struct LeaseView {
    tenure: Arc<Tenure>,
}

impl LeaseView {
    /// What the lease protects.
    pub fn key(&self) -> &Key {
        &self.tenure.key
    }

    /// The fence: it grows with every ownership of the key, so that what the lease protects can refuse an older owner.
    /// Renewal doesn't change it.
    pub fn fence(&self) -> u64 {
        self.tenure.fence
    }

    /// Who we say we are.
    pub fn label(&self) -> &str {
        self.tenure.owner.label()
    }

    /// Fires when work has to stop: one grace before ownership ends if it can't be renewed, at once when the store says
    /// that it is lost, and when the lease is released. Cancelling it yourself ends no lease.
    pub fn cancel_token(&self) -> &CancellationToken {
        self.tenure.token()
    }

    /// How it is doing.
    pub fn state(&self) -> LeaseState {
        self.tenure.state()
    }

    /// Follows the state.
    pub fn watch(&self) -> watch::Receiver<LeaseState> {
        self.tenure.watch()
    }

    /// Waits until the lease has ended, and says why: a release counts, as [`LossReason::Released`]. May be dropped at
    /// any time.
    pub async fn lost(&self) -> Lost {
        self.tenure.over().await
    }

    /// How long ownership is certain without another renewal; zero when it is lost.
    pub fn valid_for(&self) -> Duration {
        self.tenure.valid_for()
    }

    /// The moment up to which ownership is certain without another renewal, on tokio's clock.
    pub fn valid_until(&self) -> tokio::time::Instant {
        tokio::time::Instant::now() + self.valid_for()
    }

    /// Whether ownership is certain now.
    pub fn is_held(&self) -> bool {
        self.tenure.is_valid()
    }

    /// For loops and blocking code: fails from the instant at which ownership isn't certain, though no task runs.
    ///
    /// ```
    /// # async fn doc() -> leasehold::Result<()> {
    /// # let leases = leasehold::Leases::in_memory();
    /// # let (rows, write) = (vec![1, 2, 3], |_: u32| {});
    /// let lease = leases.lease("import").acquire().await?;
    /// let view = lease.view();
    /// let import = tokio::task::spawn_blocking(move || -> leasehold::Result<()> {
    ///     for row in rows {
    ///         view.ensure_held()?;
    ///         write(row);
    ///     }
    ///     Ok(())
    /// });
    /// import.await.expect("it does not panic")?;
    /// lease.release().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Lost`], with the reason.
    pub fn ensure_held(&self) -> Result<()> {
        if self.tenure.is_valid() {
            return Ok(());
        }
        match self.tenure.loss() {
            Some(lost) => Err(lost.into()),
            None => Ok(()),
        }
    }

    /// Like [`ensure_held`](LeaseView::ensure_held), for a step that takes up to `d`.
    ///
    /// # Errors
    /// [`Error::Lost`], or [`Error::Expiring`] when the lease is held but not for so long without another renewal.
    pub fn ensure_held_for(&self, d: Duration) -> Result<()> {
        self.ensure_held()?;
        let valid_for = self.valid_for();
        if valid_for >= d {
            return Ok(());
        }
        Err(Error::Expiring { key: self.key().clone(), valid_for })
    }

    /// Guards work: the future that comes back runs `work` while ownership is certain, and never polls it past that. See
    /// [`Guard`]. May be called outside a runtime.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> leasehold::Result<()> {
    /// let leases = leasehold::Leases::in_memory();
    /// let lease = leases.lease("report:monthly").acquire().await?;
    /// let total = lease.guard(async { 40 + 2 }).await?;
    /// assert_eq!(total, 42);
    /// # lease.release().await?; Ok(()) }
    /// ```
    pub fn guard<F: IntoFuture>(&self, work: F) -> Guard<F::IntoFuture> {
        Guard::new(self.tenure.clone(), work.into_future())
    }

    /// Writes `value` under `key` into the store that keeps the lease, unless an owner with a larger fence has written
    /// there: check, write and mark are one step in the store. `key` is the value's own, not the lease's. One round trip;
    /// when dropped midway, the write may or may not take place.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is known to be lost (nothing is sent), [`Error::Stale`] when a newer owner has
    /// written, [`Error::Store`] when the store failed or keeps no values.
    pub async fn write(&self, key: impl Into<Key>, value: impl Into<Vec<u8>>) -> Result<()> {
        self.ensure_held()?;
        self.tenure.keeper.write(FencedWrite::new(key.into(), value.into(), self.fence())).await
    }
}

impl fmt::Debug for LeaseView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseView")
            .field("key", self.key())
            .field("owner", &self.tenure.owner)
            .field("fence", &self.fence())
            .field("state", &self.state())
            .field("valid_for", &self.valid_for())
            .finish()
    }
}

/// Exclusive ownership of a key, renewed in the background until it is released or dropped.
///
/// Dropping it stops renewal at once and queues a release; a drop never blocks and needs no runtime. A `Lease` that goes
/// out of scope as `main` returns may be dropped too late for its release to be sent: then the TTL frees the key.
#[must_use = "a lease that is dropped at once protects nothing: bind it with `let lease = ..` and end it with `lease.release().await`"]
pub struct Lease {
    view: LeaseView,
    /// The store has confirmed the end, so there is nothing to say any more.
    parted: bool,
}

impl Lease {
    pub(crate) fn new(tenure: Arc<Tenure>) -> Self {
        Lease { view: LeaseView { tenure }, parted: false }
    }

    /// A look at this lease, for functions and tasks that work under it.
    pub fn view(&self) -> LeaseView {
        self.view.clone()
    }

    /// Ends the lease: renewal stops, then the store is told. One round trip, a few attempts if the store doesn't answer.
    /// Dropped midway, it goes on in the background.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease was lost before; nothing of the next owner's is touched. [`Error::Store`] when the
    /// store refused.
    pub async fn release(self) -> Result<Released> {
        // Goes after the lease, whose drop may have more to send: a shutdown waits for the last of it.
        let _parting = self.view.tenure.keeper.partings.begin();
        let mut lease = self;
        let tenure = lease.view.tenure.clone();
        tenure.end().map_err(|reason| Lost::new(&tenure.key, tenure.fence, reason))?;
        if let Some(settling) = tenure.settling() {
            settling.wait().await;
        }
        let released = lease.ask(&tenure).await?;
        // A claim of ours that is still on its way would take the key again: the farewell in `drop` waits for it.
        lease.parted = released != Released::Unconfirmed && tenure.clock().now() >= tenure.echo_until;
        if released == Released::Unconfirmed {
            tracing::warn!(key = %tenure.key, fence = tenure.fence, "the release of a lease was not confirmed; trying on");
        } else {
            tracing::debug!(key = %tenure.key, fence = tenure.fence, ?released, "lease released");
        }
        Ok(released)
    }

    async fn ask(&self, tenure: &Tenure) -> Result<Released> {
        let keeper = &tenure.keeper;
        let mut unanswered = false;
        for _ in 0..2 {
            match keeper.bounded(tenure.plan.attempt, keeper.store.release(&tenure.key, &tenure.owner)).await {
                Ok(Freed::Released) => return Ok(Released::Released),
                // The first one did it, and its answer got lost.
                Ok(Freed::Gone) if unanswered => return Ok(Released::Released),
                Ok(Freed::Gone) => return Ok(Released::AlreadyGone),
                Err(error) if error.may_pass() => unanswered = true,
                Err(error) => return Err(Error::store("release", &tenure.key, error)),
            }
        }
        Ok(Released::Unconfirmed)
    }
}

impl Deref for Lease {
    type Target = LeaseView;
    fn deref(&self) -> &LeaseView {
        &self.view
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.parted {
            return;
        }
        let tenure = &self.view.tenure;
        // Before the end is told: a shutdown that hears of it waits for what follows.
        let _parting = tenure.keeper.partings.begin();
        let ended = tenure.end();
        let nothing_left = ended.is_err_and(|reason| !tenure.leaves_something(&reason));
        if !nothing_left {
            tenure.bid_farewell();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.view, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Leases, farewell::Partings, store::MemoryStore};
    use std::{
        pin::pin,
        sync::atomic::{AtomicBool, Ordering},
        task::{Context, Wake, Waker},
    };

    impl LeaseView {
        pub(crate) fn tenure(&self) -> &Arc<Tenure> {
            &self.tenure
        }
    }

    async fn held() -> Lease {
        let clock = Clock::tokio();
        let leases = Leases::builder().clock(clock.clone()).build(MemoryStore::with_clock(clock)).unwrap();
        leases.lease("k").acquire().await.unwrap()
    }

    /// Notes whether nothing was under way at the moment when it was woken.
    struct Early {
        partings: Partings,
        nothing_under_way: AtomicBool,
    }

    impl Wake for Early {
        fn wake(self: Arc<Self>) {
            let mut over = pin!(self.partings.over());
            let over = over.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            self.nothing_under_way.fetch_or(over, Ordering::SeqCst);
        }
    }

    /// What wakes a shutdown as this lease ends must not find that there is nothing to wait for.
    fn early(lease: &Lease) -> (Arc<Early>, Waker) {
        let partings = lease.tenure().keeper.partings.clone();
        let early = Arc::new(Early { partings, nothing_under_way: AtomicBool::new(false) });
        (early.clone(), early.into())
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_that_hears_of_a_dropped_lease_finds_its_release_under_way() {
        let lease = held().await;
        let (early, waker) = early(&lease);
        let view = lease.view();
        let mut lost = pin!(view.lost());
        assert!(lost.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(lease);
        assert!(!early.nothing_under_way.load(Ordering::SeqCst));
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_that_waits_for_a_release_goes_on_waiting_when_it_is_dropped_midway() {
        let lease = held().await;
        let (early, waker) = early(&lease);
        let partings = early.partings.clone();
        // A renewal in flight, for the store in this process would answer the release at once.
        lease.tenure().clock().suspend(Duration::from_secs(10));
        lease.tenure().tick(lease.tenure().clock().now());
        let mut release = Box::pin(lease.release());
        assert!(release.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let mut over = pin!(partings.over());
        assert!(over.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        drop(release);
        assert!(!early.nothing_under_way.load(Ordering::SeqCst));
    }
}
