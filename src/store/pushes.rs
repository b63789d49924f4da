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

    /// Ownership was handed to the waiter with this secret, under `fence`, and lasts `length` unless renewed; a `length` of
    /// zero only has it ask at once. `false`: nobody listens any more, and the sink can be forgotten.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn a_sink_is_told_every_word_as_it_is_and_says_whether_anybody_listens() {
        let identity = Identity::new("me").unwrap();
        for listens in [true, false] {
            let heard = Arc::new(Mutex::new(Vec::new()));
            let to = heard.clone();
            let pushes = Pushes::new(identity.clone(), move |push| {
                to.lock().unwrap().push(push);
                listens
            });
            let second = Duration::from_secs(1);
            assert_eq!(pushes.granted("an owner", 7, second), listens);
            assert_eq!(pushes.forced(&"k".into(), 8), listens);
            assert_eq!(pushes.missed(), listens);
            assert_eq!(pushes.is_closed(), !listens);
            let granted = Push::Granted { owner: "an owner".into(), fence: 7, length: second };
            let forced = Push::Forced { key: "k".into(), fence: 8 };
            assert_eq!(*heard.lock().unwrap(), [granted, forced, Push::Missed, Push::Nothing]);
            assert!(format!("{pushes:?}").contains(&**identity.inbox()));
        }
    }
}
