//! Who waits in this process, and what the store says to them without being asked.
use crate::store::Owner;
use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::Notify;
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
    words: Arc<Words>,
}

/// What was said to one of them and not heard yet. Not a channel, for that wakes its receiver when its sender goes: most
/// acquisitions hear nothing, and each would wake itself as it ends.
#[derive(Default)]
struct Words {
    said: Mutex<VecDeque<Word>>,
    more: Notify,
}

impl Words {
    fn say(&self, word: Word) {
        self.said().push_back(word);
        self.more.notify_one();
    }

    fn said(&self) -> MutexGuard<'_, VecDeque<Word>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    /// Begins to listen for words to this owner, until the listener is dropped.
    pub(crate) fn listen(&self, owner: &Owner) -> Listener {
        let words = Arc::<Words>::default();
        let mut room = self.lock();
        room.came += 1;
        let waiter = Waiter { turn: room.came, words: words.clone() };
        room.waiters.insert(*owner.id(), waiter);
        drop(room);
        Listener { waiting: self.clone(), id: *owner.id(), words }
    }

    pub(crate) fn granted(&self, owner: &str, fence: u64, length: Duration) {
        let Some(id) = owner.rsplit('/').next().and_then(|id| Uuid::try_parse(id).ok()) else { return };
        // Said outside of the lock: to wake somebody is to run other people's code.
        let words = self.lock().waiters.get(&id).map(|waiter| waiter.words.clone());
        if let Some(words) = words {
            words.say(Word::Granted { fence, length });
        }
    }

    pub(crate) fn ask_all(&self) {
        let mut waiters: Vec<_> = self.lock().waiters.values().map(|w| (w.turn, w.words.clone())).collect();
        waiters.sort_unstable_by_key(|(turn, _)| *turn);
        for (_, words) in waiters {
            words.say(Word::Ask);
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
    words: Arc<Words>,
}

impl Listener {
    /// The next word. Cancel-safe.
    pub(crate) async fn word(&mut self) -> Word {
        loop {
            // Not in the condition of the loop, where the guard would live across the await.
            let word = self.words.said().pop_front();
            match word {
                Some(word) => return word,
                None => self.words.more.notified().await,
            }
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
