//! What a store has to do besides to be a member of a quorum.
use crate::{
    Key,
    error::StoreError,
    store::{Owner, Store},
};
use std::{future::Future, sync::Arc, time::Duration};

/// The first of two steps: takes the key at one member, if it is free there.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Proposal {
    /// What is asked for.
    pub key: Key,
    /// By whom: an owner of this attempt alone.
    pub owner: Owner,
    /// How long the member is to keep it.
    pub ttl: Duration,
    /// A member that may have forgotten something less than this ago gives no key away.
    pub settled: Duration,
    /// It must not be carried out later than this after it was given to the member.
    pub not_after: Duration,
}

impl Proposal {
    /// A proposal to a member of any age, which may be carried out for 2 s. Every field can be changed.
    pub fn new(key: Key, owner: Owner, ttl: Duration) -> Self {
        Proposal { key, owner, ttl, settled: Duration::ZERO, not_after: Duration::from_secs(2) }
    }
}

/// The answer to a [`Proposal`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proposed {
    /// The owner has the key at this member.
    Held {
        /// A fence larger than any that was written back to this member. It isn't given: the member may propose it again.
        fence: u64,
    },
    /// Somebody else has it.
    Busy {
        /// When that ends, if it isn't renewed; `None` when the member cannot say.
        retry_in: Option<Duration>,
        /// The holder's label, when it is one of ours.
        holder: Option<Arc<str>>,
    },
    /// The member may have forgotten what it should remember, and takes part again later.
    Young {
        /// How much later.
        settled_in: Duration,
    },
    /// It came to be carried out after its `not_after`, so nothing was done.
    Late,
}

/// The second step, and every renewal: writes the fence back to one member, and keeps the key there.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Hold {
    /// What is held.
    pub key: Key,
    /// By whom.
    pub owner: Owner,
    /// Under which fence.
    pub fence: u64,
    /// How long it is to last from now.
    pub ttl: Duration,
    /// Whether the key is taken where it is free: only when a majority is known to have it.
    pub create: bool,
    /// The key must not be taken later than this after the request was given to the member. What the owner has is kept
    /// whenever.
    pub not_after: Duration,
}

impl Hold {
    /// A confirmation that takes nothing, and may be carried out for 2 s. Every field can be changed.
    pub fn new(key: Key, owner: Owner, fence: u64, ttl: Duration) -> Self {
        Hold { key, owner, fence, ttl, create: false, not_after: Duration::from_secs(2) }
    }
}

/// The answer to a [`Hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The owner has the key, under this fence and for at least the whole TTL; and the member will never propose this
    /// fence, or a smaller one, as long as it remembers.
    Ours,
    /// Nobody has the key. Nothing was changed: it was not to be taken, or a larger fence was written back.
    Gone,
    /// Somebody else has it, or a larger fence was written back. Nothing was changed.
    Taken,
    /// Nobody has the key, and it came too late to take it. Nothing was changed.
    Late,
}

/// A store that can be a member of a quorum.
///
/// Both operations are one atomic step, safe to repeat, and neither shortens a TTL.
pub trait Member: Store {
    /// Takes a free key without giving a fence away.
    fn propose(&self, proposal: &Proposal) -> impl Future<Output = Result<Proposed, StoreError>> + Send;

    /// Each as [`Hold`] says: [`Kept::Ours`] if and only if the key is the owner's (or is free, and to be taken) and no
    /// larger fence was written back. The fence is written before the key is. As many answers as requests, in their order.
    fn hold_all(&self, list: &[Hold]) -> impl Future<Output = Vec<Result<Kept, StoreError>>> + Send;
}

/// One member under several quorums.
impl<M: Member> Member for Arc<M> {
    fn propose(&self, proposal: &Proposal) -> impl Future<Output = Result<Proposed, StoreError>> + Send {
        M::propose(self, proposal)
    }
    fn hold_all(&self, list: &[Hold]) -> impl Future<Output = Vec<Result<Kept, StoreError>>> + Send {
        M::hold_all(self, list)
    }
}
