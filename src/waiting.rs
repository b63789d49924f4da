//! Who waits in this process, and what the store says to them without being asked.
use crate::store::Owner;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::mpsc;
use uuid::Uuid;

/// What is said to one who waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The key is yours under this fence, for so long unless you renew.
    Granted { fence: u64, length: Duration },
    /// Something may have been missed: ask.
    Ask,
}

/// Everybody in this process who waits. A word only speeds things up: whoever waits also asks, so one for somebody who
/// isn't here can be dropped. Whoever left has sent a release, and that hands on what was granted meanwhile.
#[derive(Clone, Default)]
pub(crate) struct Waiting(Arc<Mutex<Room>>);

#[derive(Default)]
struct Room {
    waiters: HashMap<Uuid, Waiter>,
    came: u64,
}

struct Waiter {
    /// They are told in the order in which they came.
    turn: u64,
    words: mpsc::UnboundedSender<Word>,
}

impl Waiting {
    /// Begins to listen for words to this owner, until the listener is dropped.
    pub(crate) fn listen(&self, owner: &Owner) -> Listener {
        let (sender, words) = mpsc::unbounded_channel();
        let mut room = self.lock();
        room.came += 1;
        let waiter = Waiter { turn: room.came, words: sender };
        room.waiters.insert(*owner.id(), waiter);
        drop(room);
        Listener { waiting: self.clone(), id: *owner.id(), words }
    }

    pub(crate) fn granted(&self, owner: &str, fence: u64, length: Duration) {
        let Some(id) = owner.rsplit('/').next().and_then(|id| Uuid::try_parse(id).ok()) else { return };
        if let Some(waiter) = self.lock().waiters.get(&id) {
            // It fails when the waiter is just leaving.
            let _ = waiter.words.send(Word::Granted { fence, length });
        }
    }

    pub(crate) fn ask_all(&self) {
        let room = self.lock();
        let mut waiters: Vec<_> = room.waiters.values().collect();
        waiters.sort_unstable_by_key(|waiter| waiter.turn);
        for waiter in waiters {
            let _ = waiter.words.send(Word::Ask);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Room> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One who listens.
pub(crate) struct Listener {
    waiting: Waiting,
    id: Uuid,
    words: mpsc::UnboundedReceiver<Word>,
}

impl Listener {
    /// The next word. Cancel-safe.
    pub(crate) async fn word(&mut self) -> Word {
        match self.words.recv().await {
            Some(word) => word,
            // The sender stays in the map until this listener is dropped.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.waiting.lock().waiters.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Identity;

    #[tokio::test]
    async fn a_word_reaches_the_one_it_is_for_and_nothing_stays_of_one_who_left() {
        let identity = Identity::new("me").unwrap();
        let (a, b) = (Owner::draw(&identity).unwrap(), Owner::draw(&identity).unwrap());
        let waiting = Waiting::default();
        let (mut at_a, mut at_b) = (waiting.listen(&a), waiting.listen(&b));
        waiting.granted(&b.secret(), 7, Duration::from_secs(3));
        waiting.ask_all();
        assert_eq!(at_a.word().await, Word::Ask);
        assert_eq!(at_b.word().await, Word::Granted { fence: 7, length: Duration::from_secs(3) });
        assert_eq!(at_b.word().await, Word::Ask);
        drop((at_a, at_b));
        waiting.granted(&a.secret(), 8, Duration::from_secs(3));
        waiting.granted("nobody of ours", 8, Duration::from_secs(3));
        assert!(waiting.lock().waiters.is_empty());
    }
}
