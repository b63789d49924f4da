//! What a store says without being asked.
use crate::{Key, owner::Identity};
use std::{fmt, sync::Arc, time::Duration};

/// What a store may say without being asked. It only ever speeds things up: whoever waits also asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Push {
    /// Ownership was handed to a waiter.
    Granted { owner: String, fence: u64, length: Duration },
    /// An ownership was ended by force.
    Forced { key: Key, fence: u64 },
    /// Word may have been missed: everybody who waits should ask.
    Missed,
    /// Nothing: is anybody there?
    Nothing,
}

/// A sink for what a store says without being asked; see [`Store::listen`](crate::store::Store::listen). It never
/// blocks, and words for nobody are dropped.
#[derive(Clone)]
pub struct Pushes {
    identity: Identity,
    sink: Arc<dyn Fn(Push) -> bool + Send + Sync>,
}

impl Pushes {
    /// `sink` answers whether anybody still listens.
    pub(crate) fn new(identity: Identity, sink: impl Fn(Push) -> bool + Send + Sync + 'static) -> Self {
        Pushes { identity, sink: Arc::new(sink) }
    }

    /// Whether both are the same sink.
    pub(crate) fn is(&self, other: &Pushes) -> bool {
        Arc::ptr_eq(&self.sink, &other.sink)
    }

    /// The inbox whose words belong here: [`Owner::inbox`](crate::store::Owner::inbox) of every owner it draws.
    pub fn inbox(&self) -> &Arc<str> {
        self.identity.inbox()
    }

    /// Ownership was handed to the waiter with this secret, under `fence`, and lasts `length` unless renewed. `false`:
    /// nobody listens any more, and the sink can be forgotten.
    pub fn granted(&self, owner: &str, fence: u64, length: Duration) -> bool {
        (self.sink)(Push::Granted { owner: owner.to_owned(), fence, length })
    }

    /// The ownership of `key` under `fence` was ended by force. The answer is as in [`granted`](Pushes::granted).
    pub fn forced(&self, key: &Key, fence: u64) -> bool {
        (self.sink)(Push::Forced { key: key.clone(), fence })
    }

    /// Word may have been missed (a reconnect, a lagging channel). The answer is as in [`granted`](Pushes::granted).
    pub fn missed(&self) -> bool {
        (self.sink)(Push::Missed)
    }

    /// Nobody listens any more, and the sink can be forgotten.
    pub fn is_closed(&self) -> bool {
        !(self.sink)(Push::Nothing)
    }
}

impl fmt::Debug for Pushes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pushes").field("inbox", self.inbox()).finish_non_exhaustive()
    }
}
