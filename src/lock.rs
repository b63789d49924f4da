//! Redisson-style handles over a lease.
use crate::{
    Key, Leases, Result,
    error::{Error, LossReason, Lost, StoreError},
    lease::{Lease, LeaseView, Released},
    request::LeaseRequest,
    settings::Wait,
};
use std::{fmt, time::Duration};
use tokio_util::sync::CancellationToken;

/// A handle that locks and unlocks a key, as Redisson's `RLock` does; made by [`Leases::lock`].
///
/// **The handle is the owner**, not the task or the thread: whoever can reach it is inside. So make a handle for each
/// task; `leases.lock(key)` costs nothing. Locking a handle that holds is re-entry, and has to be unlocked as often.
///
/// A handle does not stop your code by itself when the lease is lost: run the work in [`LeaseView::guard`] (from
/// [`view`](Lock::view)), watch [`cancel_token`](Lock::cancel_token), or ask [`is_held`](Lock::is_held) between steps.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> leasehold::Result<()> {
/// # let leases = leasehold::Leases::in_memory();
/// let mut lock = leases.lock("lock:order:1001");
/// let fence = lock.lock().await?;
/// // charge the order, with the fence
/// lock.unlock().await?;
/// # let _ = fence; Ok(()) }
/// ```
///
/// Dropping a handle that holds stops renewal and queues a release, as dropping a [`Lease`] does.
#[must_use = "a lock protects nothing until `lock().await`"]
pub struct Lock {
    leases: Leases,
    key: Key,
    hold: Option<Hold>,
}

struct Hold {
    lease: Lease,
    count: u32,
}

impl Lock {
    pub(crate) fn new(leases: Leases, key: Key) -> Self {
        Lock { leases, key, hold: None }
    }

    /// Locks, waiting for as long as it takes; a `warn` event says so once each TTL. Renewed in the background until
    /// unlocked. Returns the fence. Cancel-safe: dropped midway, nothing is held.
    ///
    /// # Errors
    /// [`Error::Lost`] when the handle's lease was lost: unlock first, for whoever locked it before believes in an older
    /// fence. Otherwise those of [`LeaseRequest::acquire`].
    pub async fn lock(&mut self) -> Result<u64> {
        self.enter(|request| request.wait(Wait::Forever)).await
    }

    /// Locks for `ttl` without renewal: the lease ends by itself then, as in Redisson. Waits for as long as it takes.
    ///
    /// # Errors
    /// As for [`lock`](Lock::lock).
    pub async fn lock_for(&mut self, ttl: Duration) -> Result<u64> {
        self.enter(|request| request.wait(Wait::Forever).ttl(ttl).fixed()).await
    }

    /// Tries once; the fence when it got in, `None` when somebody else holds the key.
    ///
    /// # Errors
    /// As for [`lock`](Lock::lock).
    pub async fn try_lock(&mut self) -> Result<Option<u64>> {
        self.try_enter(|request| request.wait(Wait::No)).await
    }

    /// Tries for up to `wait`.
    ///
    /// # Errors
    /// As for [`lock`](Lock::lock).
    pub async fn try_lock_for(&mut self, wait: Duration) -> Result<Option<u64>> {
        self.try_enter(|request| request.wait(wait)).await
    }

    /// Tries for up to `wait` to lock for `ttl` without renewal.
    ///
    /// # Errors
    /// As for [`lock`](Lock::lock).
    pub async fn try_lock_with(&mut self, wait: Duration, ttl: Duration) -> Result<Option<u64>> {
        self.try_enter(|request| request.wait(wait).ttl(ttl).fixed()).await
    }

    async fn try_enter(&mut self, how: impl FnOnce(LeaseRequest) -> LeaseRequest) -> Result<Option<u64>> {
        match self.enter(how).await {
            Ok(fence) => Ok(Some(fence)),
            Err(Error::Contended { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn enter(&mut self, how: impl FnOnce(LeaseRequest) -> LeaseRequest) -> Result<u64> {
        if let Some(hold) = &mut self.hold {
            hold.lease.ensure_held()?;
            hold.count = hold.count.saturating_add(1);
            return Ok(hold.lease.fence());
        }
        let lease = how(self.leases.lease(self.key.clone())).acquire().await?;
        let fence = lease.fence();
        self.hold = Some(Hold { lease, count: 1 });
        Ok(fence)
    }

    /// Undoes one `lock`; the last one releases the key. Whatever it returns, renewal has stopped then and the handle can
    /// be locked again. Dropped midway, the release goes on in the background.
    ///
    /// # Errors
    /// [`Error::NotHeld`] when the handle holds nothing (nothing is sent); [`Error::Lost`] when the lease was lost, or
    /// turned out to be gone (nothing of the next owner's is touched); [`Error::Store`] when the store didn't confirm the
    /// release: it is tried again in the background, and at the latest the TTL frees the key.
    pub async fn unlock(&mut self) -> Result<()> {
        let Some(hold) = &mut self.hold else {
            return Err(Error::NotHeld { key: self.key.clone() });
        };
        if hold.count > 1 && hold.lease.is_held() {
            hold.count -= 1;
            return Ok(());
        }
        // Taken out before anything is sent: a future that is dropped here leaves a handle that holds nothing.
        let Some(Hold { lease, .. }) = self.hold.take() else { return Ok(()) };
        let fence = lease.fence();
        match lease.release().await? {
            Released::Released => Ok(()),
            Released::AlreadyGone => Err(Lost::new(&self.key, fence, LossReason::Expired).into()),
            Released::Unconfirmed => {
                let silent =
                    StoreError::unavailable("the release was not confirmed; it is tried again in the background");
                Err(Error::store("unlock", &self.key, silent))
            }
        }
    }

    /// A look at the lease, to guard work with.
    ///
    /// # Errors
    /// [`Error::NotHeld`] or [`Error::Lost`].
    pub fn view(&self) -> Result<LeaseView> {
        let hold = self.hold.as_ref().ok_or_else(|| Error::NotHeld { key: self.key.clone() })?;
        hold.lease.ensure_held()?;
        Ok(hold.lease.view())
    }

    /// Whether this handle holds the key for certain. Local, no round trip.
    pub fn is_held(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.lease.is_held())
    }

    /// How many `unlock`s are due; 0 when nothing is held.
    pub fn hold_count(&self) -> u32 {
        self.hold.as_ref().filter(|hold| hold.lease.is_held()).map_or(0, |hold| hold.count)
    }

    /// The fence, while the handle holds.
    pub fn fence(&self) -> Option<u64> {
        self.hold.as_ref().filter(|hold| hold.lease.is_held()).map(|hold| hold.lease.fence())
    }

    /// Fires when work under this hold has to stop; `None` when nothing was locked.
    pub fn cancel_token(&self) -> Option<CancellationToken> {
        self.hold.as_ref().map(|hold| hold.lease.cancel_token().clone())
    }

    /// The handle's key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Whether anybody holds the key. One round trip.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Invalid`] for a key that can't be.
    pub async fn is_locked(&self) -> Result<bool> {
        Ok(self.leases.inspect(&self.key).await?.is_some())
    }

    /// How much longer whoever holds the key holds it without renewal, as the store sees it; `None` when it is free, or
    /// held by another program without a TTL. One round trip.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Invalid`] for a key that can't be.
    pub async fn remaining_ttl(&self) -> Result<Option<Duration>> {
        Ok(self.leases.inspect(&self.key).await?.and_then(|holding| holding.remaining))
    }

    /// Ends whatever hold there is on the key, whoever has it; whether there was one. One round trip. The holder learns of
    /// it, at the latest when it renews.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Invalid`] for a key that can't be.
    pub async fn force_unlock(&self) -> Result<bool> {
        self.leases.force_release(&self.key).await
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock")
            .field("key", &self.key)
            .field("hold_count", &self.hold_count())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}
