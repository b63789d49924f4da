//! What can go wrong, by what the caller can do about it.
use crate::Key;
use std::{borrow::Cow, error::Error as StdError, fmt, sync::Arc, time::Duration};

/// The result of leasehold's calls.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// One error for every call, so that `?` works everywhere.
///
/// Its text says what was attempted; what the store said is its source. Print the chain (`{:#}` with anyhow), or
/// the `source` of [`Error::Store`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The wait is over and somebody else still holds the key. Try again later, or leave the work to the holder.
    #[error("`{key}` is held by {}{}; waited {waited:?}", holder.as_deref().unwrap_or("another program"), remaining.map(|r| format!(" for {r:?} more")).unwrap_or_default())]
    #[non_exhaustive]
    Contended {
        /// What was asked for.
        key: Key,
        /// How long the call waited.
        waited: Duration,
        /// The holder's label, when it is one of ours.
        holder: Option<Arc<str>>,
        /// How much longer its lease lasts if it is not renewed.
        remaining: Option<Duration>,
    },
    /// The lease was lost: stop the work, and start over with a new lease if it still has to be done.
    #[error(transparent)]
    Lost(#[from] Lost),
    /// The handle holds nothing: `lock()` first.
    #[error("`{key}` is not held by this handle; lock it first")]
    #[non_exhaustive]
    NotHeld {
        /// The handle's key.
        key: Key,
    },
    /// The lease is held, but not for as long as was asked without another renewal. Wait for the renewal, or take a longer
    /// TTL.
    #[error("the lease on `{key}` is certain for {valid_for:?} only, less than was asked for")]
    #[non_exhaustive]
    Expiring {
        /// The lease's key.
        key: Key,
        /// How long it is certain.
        valid_for: Duration,
    },
    /// A setting or an argument that cannot work. It says what to change.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A write under a fence that a newer one has overtaken: somebody else owns the key by now.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// The store did not do what was asked. [`StoreError`] says whether that may pass.
    #[error("could not {attempted}{}", key.as_ref().map(|k| format!(" `{k}`")).unwrap_or_default())]
    #[non_exhaustive]
    Store {
        /// What was attempted: `acquire`, `release`, `connect` and so on.
        attempted: &'static str,
        /// On which key, if on one.
        key: Option<Key>,
        /// What the store said.
        source: StoreError,
    },
    /// [`Leases::shutdown`](crate::Leases::shutdown) was called: nothing new is acquired.
    #[error("leasehold is shutting down")]
    Shutdown,
}

impl Error {
    /// Somebody else holds the key, and the wait is over.
    pub fn is_contended(&self) -> bool {
        matches!(self, Error::Contended { .. })
    }

    /// The loss, if that is what this is.
    pub fn lost(&self) -> Option<&Lost> {
        match self {
            Error::Lost(lost) => Some(lost),
            _ => None,
        }
    }

    pub(crate) fn store(attempted: &'static str, key: &Key, source: StoreError) -> Self {
        Error::Store { attempted, key: Some(key.clone()), source }
    }
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        use std::io::ErrorKind::*;
        let kind = match &error {
            Error::Contended { .. } => WouldBlock,
            Error::Invalid(_) | Error::NotHeld { .. } => InvalidInput,
            Error::Store { source: StoreError::Unavailable(_), .. } => ConnectionAborted,
            _ => Other,
        };
        std::io::Error::new(kind, error)
    }
}

/// A lease that can no longer be shown to be held.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease on `{key}` (fence {fence}) is lost: {reason}")]
#[non_exhaustive]
pub struct Lost {
    /// What the lease protected.
    pub key: Key,
    /// The fence of the lost lease. The next owner's is larger.
    pub fence: u64,
    /// Why it is lost.
    pub reason: LossReason,
}

impl Lost {
    pub(crate) fn new(key: &Key, fence: u64, reason: LossReason) -> Self {
        Lost { key: key.clone(), fence, reason }
    }
}

/// Why a lease was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// The store says the key is gone: it expired, was deleted, or the store lost its data.
    Expired,
    /// The store says the key has another owner.
    Taken,
    /// Somebody called `force_release` or `force_unlock`.
    Forced,
    /// No renewal was answered in time.
    #[non_exhaustive]
    Deadline {
        /// What the last failed renewal was told, if it was told anything.
        last: Option<StoreError>,
    },
    /// It was held for as long as `max_hold` allows.
    MaxHold,
    /// [`Leases::shutdown`](crate::Leases::shutdown) was called.
    Shutdown,
    /// It was released, by the handle that owned it.
    Released,
}

impl LossReason {
    /// The store has said that the key is not this owner's; otherwise it may still be, there.
    pub(crate) fn is_the_stores_word(&self) -> bool {
        matches!(self, LossReason::Expired | LossReason::Taken | LossReason::Forced)
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LossReason::Expired => f.write_str("the key is gone from the store"),
            LossReason::Taken => f.write_str("the key has another owner"),
            LossReason::Forced => f.write_str("it was released by force"),
            LossReason::Deadline { last: None } => f.write_str("it could not be renewed in time"),
            LossReason::Deadline { last: Some(e) } => write!(f, "it could not be renewed in time; last, {e}"),
            LossReason::MaxHold => f.write_str("it was held for as long as `max_hold` allows"),
            LossReason::Shutdown => f.write_str("leasehold is shutting down"),
            LossReason::Released => f.write_str("it was released"),
        }
    }
}

/// A setting or an argument that cannot work, and the rule it breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{setting}`: {rule}")]
#[non_exhaustive]
pub struct Invalid {
    /// The name of the setting.
    pub setting: &'static str,
    /// What it has to be.
    pub rule: &'static str,
}

impl Invalid {
    /// For stores that refuse a key.
    pub const fn new(setting: &'static str, rule: &'static str) -> Self {
        Invalid { setting, rule }
    }
}

/// A write that came under an older fence than one that was already let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fence {fence} is stale: fence {newest} has written since")]
#[non_exhaustive]
pub struct Stale {
    /// The fence of the refused write.
    pub fence: u64,
    /// The largest fence that was let through.
    pub newest: u64,
}

impl Stale {
    /// For stores and gates that refuse a write.
    pub const fn new(fence: u64, newest: u64) -> Self {
        Stale { fence, newest }
    }
}

/// What the store said, or that it said nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// No answer, or one that may change by itself: a timeout, a reset, a server that is loading or busy.
    Unavailable(Cause),
    /// A refusal that will not pass by itself: permissions, a key of another type, no memory.
    Refused(Cause),
    /// It was done, but too few replicas are known to have it; see
    /// [`LeasesBuilder::replicas`](crate::LeasesBuilder::replicas). An acquisition is undone; a renewal stands.
    #[non_exhaustive]
    Replicas {
        /// How many were asked for.
        wanted: u32,
        /// How many are known to have it.
        had: u32,
        /// Why the store could not count them, if it could not.
        why: Option<Box<StoreError>>,
    },
}

impl StoreError {
    /// It may pass: try again.
    pub fn unavailable(what: impl Into<Cow<'static, str>>) -> Self {
        StoreError::Unavailable(Cause { what: what.into(), source: None })
    }

    /// It won't pass by itself: somebody has to change something, and `what` says what.
    pub fn refused(what: impl Into<Cow<'static, str>>) -> Self {
        StoreError::Refused(Cause { what: what.into(), source: None })
    }

    /// It was done, and of the `wanted` replicas `had` have it: try again when more of them follow.
    pub fn replicas(wanted: u32, had: u32) -> Self {
        StoreError::Replicas { wanted, had, why: None }
    }

    /// Keeps the store's own words.
    #[must_use]
    pub fn with_source(self, source: impl StdError + Send + Sync + 'static) -> Self {
        let with = |cause: Cause, source| Cause { source: Some(Arc::new(source)), ..cause };
        match self {
            StoreError::Unavailable(cause) => StoreError::Unavailable(with(cause, source)),
            StoreError::Refused(cause) => StoreError::Refused(with(cause, source)),
            StoreError::Replicas { wanted, had, .. } => {
                let why = StoreError::unavailable("the replicas could not be counted").with_source(source);
                StoreError::Replicas { wanted, had, why: Some(Box::new(why)) }
            }
        }
    }

    /// Whether it may pass by itself.
    pub fn may_pass(&self) -> bool {
        match self {
            StoreError::Unavailable(_) => true,
            StoreError::Refused(_) => false,
            StoreError::Replicas { why, .. } => why.as_ref().is_none_or(|why| why.may_pass()),
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Unavailable(cause) => write!(f, "the store is unavailable: {}", cause.what),
            StoreError::Refused(cause) => write!(f, "the store refused: {}", cause.what),
            StoreError::Replicas { wanted, had, .. } => {
                write!(f, "too few replicas have it: {had} of the {wanted} that were asked for")
            }
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            StoreError::Unavailable(cause) | StoreError::Refused(cause) => cause.source.as_deref().map(|s| s as _),
            StoreError::Replicas { why, .. } => why.as_deref().map(|why| why as _),
        }
    }
}

/// The words of a [`StoreError`]: what happened, what to do about it, and the store's own error as its source.
#[derive(Clone)]
pub struct Cause {
    what: Cow<'static, str>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        let text = |c: &Cause| c.source.as_ref().map(ToString::to_string);
        self.what == other.what && text(self) == text(other)
    }
}
impl Eq for Cause {}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.what)?;
        self.source.as_ref().map_or(Ok(()), |s| write!(f, " <- {:?}", s.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_was_attempted_and_keeps_the_stores_words_as_its_source() {
        let words = std::io::Error::other("NOPERM this user has no permissions");
        let refused = StoreError::refused("the user may not run scripts; grant +eval +evalsha").with_source(words);
        let error = Error::store("acquire", &Key::from("k"), refused);
        assert_eq!(error.to_string(), "could not acquire `k`");
        let source = error.source().unwrap();
        assert_eq!(source.to_string(), "the store refused: the user may not run scripts; grant +eval +evalsha");
        assert_eq!(source.source().unwrap().to_string(), "NOPERM this user has no permissions");
    }

    #[test]
    fn too_few_replicas_is_told_with_their_number_and_with_what_kept_them_from_being_counted() {
        let counted = StoreError::replicas(2, 1);
        assert_eq!(counted.to_string(), "too few replicas have it: 1 of the 2 that were asked for");
        assert!(counted.may_pass() && counted.source().is_none());
        let uncounted = StoreError::replicas(2, 0).with_source(std::io::Error::other("UNBLOCKED"));
        assert!(uncounted.may_pass(), "{uncounted:?}");
        assert_eq!(uncounted.source().unwrap().source().unwrap().to_string(), "UNBLOCKED");
        let why = Some(Box::new(StoreError::refused("no WAIT")));
        assert!(!StoreError::Replicas { wanted: 2, had: 0, why }.may_pass());
    }

    #[test]
    fn an_error_is_small() {
        assert!(size_of::<Error>() <= 80, "{}", size_of::<Error>());
    }
}
