//! A request for a lease: its settings, and the ways to send it.
use crate::{
    Key, Result,
    engine::Keeper,
    error::Error,
    lease::{Lease, LeaseView},
    pursuit::Pursuit,
    settings::{Settings, Wait},
};
use std::{fmt, future::Future, sync::Arc, time::Duration};
use tracing::Instrument;

/// A request for a lease, to be configured and then sent with [`acquire`](LeaseRequest::acquire),
/// [`try_acquire`](LeaseRequest::try_acquire) or [`run`](LeaseRequest::run). It sends nothing by itself, borrows nothing,
/// and can be cloned and used again: each use is an acquisition of its own.
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run`"]
#[derive(Clone)]
pub struct LeaseRequest {
    keeper: Arc<Keeper>,
    defaults: Arc<Settings>,
    settings: Settings,
    key: Key,
}

impl LeaseRequest {
    pub(crate) fn new(keeper: Arc<Keeper>, defaults: Arc<Settings>, key: Key) -> Self {
        LeaseRequest { keeper, defaults, settings: Settings::default(), key }
    }

    /// How long the lease lasts without renewal: 100 ms to 365 days.
    #[doc(alias = "period")]
    #[doc(alias = "lease_time")]
    #[doc(alias = "expiry")]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = Some(ttl);
        self
    }

    /// How long before the end of validity the token fires, when the lease can't be renewed. Less than a third of the
    /// TTL; a tenth by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = Some(grace);
        self
    }

    /// How long one exchange with the store may take before it is tried again: 10 ms to a third of the TTL. By default a
    /// sixth of it, 2 s at most.
    pub fn attempt(mut self, attempt: Duration) -> Self {
        self.settings.attempt = Some(attempt);
        self
    }

    /// How long to wait for a key that somebody else holds: a duration, or a [`Wait`]. One TTL by default.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.settings.wait = Some(wait.into());
        self
    }

    /// Ends the lease after this long, however well it can be renewed: the token fires one grace before. Longer than the
    /// grace; no bound by default.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.settings.max_hold = Some(max_hold);
        self
    }

    /// Never renews: the lease ends with its TTL.
    pub(crate) fn fixed(mut self) -> Self {
        self.settings.fixed = true;
        self
    }

    /// Acquires the lease: one round trip when the key is free; otherwise it waits as [`wait`](LeaseRequest::wait) says.
    /// While the store is unavailable it keeps trying, for as long.
    ///
    /// May be dropped at any time, timed out, or lose a `select!`: whatever was acquired by then is released in the
    /// background.
    ///
    /// # Errors
    /// [`Error::Contended`] when the wait is over; [`Error::Store`] when the store refused, or was unavailable to the
    /// end; [`Error::Invalid`] for settings or a key that can't work; [`Error::Shutdown`].
    pub async fn acquire(self) -> Result<Lease> {
        let plan = self.settings.over(&self.defaults).plan()?;
        self.keeper.check(&self.key)?;
        self.keeper.ready()?;
        let span = tracing::info_span!("acquire", key = %self.key);
        Pursuit::new(self.keeper, self.key, plan)?.catch().instrument(span).await
    }

    /// Tries once: `None` when somebody else holds the key. One round trip. Cancel-safe as
    /// [`acquire`](LeaseRequest::acquire) is.
    ///
    /// # Errors
    /// As for [`acquire`](LeaseRequest::acquire), but for [`Error::Contended`].
    pub async fn try_acquire(self) -> Result<Option<Lease>> {
        match self.wait(Wait::No).acquire().await {
            Ok(lease) => Ok(Some(lease)),
            Err(Error::Contended { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acquires, does the work under guard with a look at the lease in hand, and releases. As
    /// [`with_lease`](crate::Leases::with_lease), which hands out the token alone.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> leasehold::Result<()> {
    /// # let leases = leasehold::Leases::in_memory();
    /// let fence = leases.lease("report:monthly").run(async |lease| lease.fence()).await?;
    /// assert!(fence > 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`acquire`](LeaseRequest::acquire), and [`Error::Lost`] when the lease was lost before the work was done:
    /// then the work has been dropped. What a release finds changes nothing about a finished work's result.
    pub async fn run<F, Fut>(self, work: F) -> Result<Fut::Output>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future,
    {
        let lease = self.acquire().await?;
        let view = lease.view();
        let span = tracing::info_span!("lease", key = %lease.key(), fence = lease.fence());
        // The call of the closure is inside the guard too; guard and work are gone before the release is sent.
        let out = lease.guard(async move { work(view).await }).instrument(span).await?;
        match lease.release().await {
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the work is done, but its lease could not be released"),
        }
        Ok(out)
    }

    /// [`run`](LeaseRequest::run) for work that returns a `Result`: both kinds of error come out as one.
    ///
    /// # Errors
    /// Those of [`run`](LeaseRequest::run), converted, and the work's own.
    pub async fn try_run<F, Fut, T, E>(self, work: F) -> Result<T, E>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        self.run(work).await?
    }
}

impl fmt::Debug for LeaseRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest").field("key", &self.key).field("settings", &self.settings).finish_non_exhaustive()
    }
}
