//! The seam: what keeps leases, and the words that cross it.
//!
//! Above it nothing knows Redis; below it nothing knows tokens, tasks or deadlines. All times that cross it are
//! durations: a store never sees a client's clock.
use crate::{
    Key,
    error::{Invalid, StoreError},
};
use std::{future::Future, sync::Arc, time::Duration};

pub mod contract;
pub(crate) mod erased;
mod memory;
pub(crate) mod pushes;
pub mod quorum;
pub mod redis;
mod sweep;

pub use crate::owner::{Identity, Owner};
pub use memory::MemoryStore;
pub use pushes::Pushes;

/// A request for ownership of a key.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// What is asked for.
    pub key: Key,
    /// By whom: the same owner asks again after an answer that got lost.
    pub owner: Owner,
    /// How long the lease is to last without renewal.
    pub ttl: Duration,
    /// How long a place in the line lasts without another claim, and how long a grant from the line does.
    pub presence: Duration,
    /// Whether to stand in line when the key isn't free.
    pub line: bool,
    /// The place that an earlier claim of this owner was given: it is given back should the store have lost it.
    pub ticket: Option<Ticket>,
    /// The claim must not be carried out later than this after it was given to the store.
    pub not_after: Duration,
}

impl Claim {
    /// A claim that does not stand in line, has no ticket, and may be carried out for 2 s. Every field can be changed.
    pub fn new(key: Key, owner: Owner, ttl: Duration) -> Self {
        let presence = (ttl / 3).min(Duration::from_secs(1)) * 3;
        Claim { key, owner, ttl, presence, line: false, ticket: None, not_after: Duration::from_secs(2) }
    }
}

/// A place in a key's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// The answer to a [`Claim`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Claimed {
    /// The owner has the key, for its whole TTL from now.
    #[non_exhaustive]
    Held {
        /// The fence of this ownership.
        fence: u64,
    },
    /// The owner stands in line.
    #[non_exhaustive]
    Queued {
        /// How many stand before it.
        ahead: u64,
        /// When asking again can first change something; `None` when the store cannot say.
        retry_in: Option<Duration>,
        /// The largest fence that the store had given for this key by then.
        seen: u64,
        /// The place.
        ticket: Ticket,
        /// The holder's label, when it is one of ours.
        holder: Option<Arc<str>>,
    },
    /// Somebody else has the key, or comes first, and the owner does not stand in line.
    #[non_exhaustive]
    Busy {
        /// When asking again can first change something; `None` when the store cannot say.
        retry_in: Option<Duration>,
        /// The holder's label, when it is one of ours.
        holder: Option<Arc<str>>,
    },
    /// The claim came to be carried out after its `not_after`, so nothing was done.
    Late,
}

/// For stores: the answers, made by name.
impl Claimed {
    /// [`Claimed::Held`].
    pub fn held(fence: u64) -> Self {
        Claimed::Held { fence }
    }
    /// [`Claimed::Queued`].
    pub fn queued(ahead: u64, retry_in: Option<Duration>, seen: u64, ticket: Ticket, holder: Option<Arc<str>>) -> Self {
        Claimed::Queued { ahead, retry_in, seen, ticket, holder }
    }
    /// [`Claimed::Busy`].
    pub fn busy(retry_in: Option<Duration>, holder: Option<Arc<str>>) -> Self {
        Claimed::Busy { retry_in, holder }
    }
}

/// A request to prolong an ownership: proved by owner and fence together.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Renewal {
    /// What is held.
    pub key: Key,
    /// By whom.
    pub owner: Owner,
    /// Under which fence.
    pub fence: u64,
    /// How long it is to last from now.
    pub ttl: Duration,
}

impl Renewal {
    /// A renewal.
    pub fn new(key: Key, owner: Owner, fence: u64, ttl: Duration) -> Self {
        Renewal { key, owner, fence, ttl }
    }
}

/// The answer to a [`Renewal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewed {
    /// Ours, and for at least the whole TTL from now.
    Renewed,
    /// The same, but fewer replicas than were asked for are known to have it. The lease goes on, at risk.
    #[non_exhaustive]
    Thin {
        /// How many were asked for.
        wanted: u32,
        /// How many are known to have it.
        had: u32,
    },
    /// Nobody has the key. Nothing was created.
    Gone,
    /// Somebody else has it, or this owner under another fence. Nothing was changed.
    Taken,
}

/// For stores: the answer that has something to say, made by name.
impl Renewed {
    /// [`Renewed::Thin`].
    pub fn thin(wanted: u32, had: u32) -> Self {
        Renewed::Thin { wanted, had }
    }
}

/// The answer to a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Freed {
    /// It was this owner's, and now is the next one's or nobody's.
    Released,
    /// It was not this owner's. Nothing was changed.
    Gone,
}

/// Who holds a key, as the store sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holding {
    /// The holder's label; `None` when another program holds the key with a plain `SET NX PX`.
    pub label: Option<Arc<str>>,
    /// The holder's fence; `None` likewise.
    pub fence: Option<u64>,
    /// How much longer the lease lasts if it isn't renewed; `None` when the key has no TTL.
    pub remaining: Option<Duration>,
    /// How many stand in line.
    pub waiters: u64,
}

impl Holding {
    /// A holding.
    pub fn new(label: Option<Arc<str>>, fence: Option<u64>, remaining: Option<Duration>, waiters: u64) -> Self {
        Holding { label, fence, remaining, waiters }
    }
}

/// A value to be written only if no newer fence has written it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FencedWrite {
    /// The value's own key; not the lease's.
    pub key: Key,
    /// The value.
    pub value: Vec<u8>,
    /// The writer's fence.
    pub fence: u64,
}

impl FencedWrite {
    /// A write.
    pub fn new(key: Key, value: Vec<u8>, fence: u64) -> Self {
        FencedWrite { key, value, fence }
    }
}

/// The answer to a [`FencedWrite`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wrote {
    /// Checked, written and marked, in one step.
    Written,
    /// A newer fence has written. Nothing was changed.
    Stale {
        /// That fence.
        newest: u64,
    },
}

/// Keeps leases.
///
/// Every call is one atomic step in the store, safe to repeat: a claim by the holder answers [`Claimed::Held`] with the
/// same fence; a renewal only ever prolongs what it owns; a release of what isn't the owner's changes nothing. A call
/// may be dropped at any point; whether it then takes effect is not known to the caller, who will release.
/// [`contract::check`] runs these rules against any store.
///
/// The store needs no timeouts of its own: callers bound every call. It keeps every key with a TTL.
pub trait Store: Send + Sync + 'static {
    /// Asks for ownership. Takes a free key, or one whose TTL is over, with a fence larger than any given for this key
    /// before.
    fn claim(&self, claim: &Claim) -> impl Future<Output = Result<Claimed, StoreError>> + Send;

    /// Prolongs an ownership.
    fn renew(&self, renewal: &Renewal) -> impl Future<Output = Result<Renewed, StoreError>> + Send;

    /// Ends an ownership, and leaves the line.
    fn release(&self, key: &Key, owner: &Owner) -> impl Future<Output = Result<Freed, StoreError>> + Send;

    /// Who holds the key; `None` when it is free.
    fn inspect(&self, key: &Key) -> impl Future<Output = Result<Option<Holding>, StoreError>> + Send;

    /// Ends whatever ownership there is; whether there was one.
    fn force_release(&self, key: &Key) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Prolongs many ownerships of one [`lane`](Store::lane). As many answers as renewals, in their order: one may
    /// fail while the others succeed.
    fn renew_all(&self, list: &[Renewal]) -> impl Future<Output = Vec<Result<Renewed, StoreError>>> + Send {
        async move {
            let mut answers = Vec::with_capacity(list.len());
            for renewal in list {
                answers.push(self.renew(renewal).await);
            }
            answers
        }
    }

    /// Writes a value, unless a newer fence has written it: check, write and mark in one step.
    fn write(&self, write: &FencedWrite) -> impl Future<Output = Result<Wrote, StoreError>> + Send {
        let _ = write;
        async { Err(StoreError::refused("this store keeps leases, not values")) }
    }

    /// Reads what [`write`](Store::write) wrote.
    fn read(&self, key: &Key) -> impl Future<Output = Result<Option<Vec<u8>>, StoreError>> + Send {
        let _ = key;
        async { Err(StoreError::refused("this store keeps leases, not values")) }
    }

    /// Renewals of one lane may share a list; lanes never wait for each other.
    fn lane(&self, key: &Key) -> u32 {
        let _ = key;
        0
    }

    /// Refuses keys that this store cannot keep apart.
    ///
    /// # Errors
    /// [`Invalid`], with the rule that the key breaks.
    fn check(&self, key: &Key) -> Result<(), Invalid> {
        let _ = key;
        Ok(())
    }

    /// Where to leave word of grants and forced losses. A store that never does is polled instead.
    fn listen(&self, to: Pushes) {
        let _ = to;
    }
}

/// One store under several [`Leases`](crate::Leases).
impl<S: Store> Store for Arc<S> {
    fn claim(&self, claim: &Claim) -> impl Future<Output = Result<Claimed, StoreError>> + Send {
        S::claim(self, claim)
    }
    fn renew(&self, renewal: &Renewal) -> impl Future<Output = Result<Renewed, StoreError>> + Send {
        S::renew(self, renewal)
    }
    fn release(&self, key: &Key, owner: &Owner) -> impl Future<Output = Result<Freed, StoreError>> + Send {
        S::release(self, key, owner)
    }
    fn inspect(&self, key: &Key) -> impl Future<Output = Result<Option<Holding>, StoreError>> + Send {
        S::inspect(self, key)
    }
    fn force_release(&self, key: &Key) -> impl Future<Output = Result<bool, StoreError>> + Send {
        S::force_release(self, key)
    }
    fn renew_all(&self, list: &[Renewal]) -> impl Future<Output = Vec<Result<Renewed, StoreError>>> + Send {
        S::renew_all(self, list)
    }
    fn write(&self, write: &FencedWrite) -> impl Future<Output = Result<Wrote, StoreError>> + Send {
        S::write(self, write)
    }
    fn read(&self, key: &Key) -> impl Future<Output = Result<Option<Vec<u8>>, StoreError>> + Send {
        S::read(self, key)
    }
    fn lane(&self, key: &Key) -> u32 {
        S::lane(self, key)
    }
    fn check(&self, key: &Key) -> Result<(), Invalid> {
        S::check(self, key)
    }
    fn listen(&self, to: Pushes) {
        S::listen(self, to);
    }
}
