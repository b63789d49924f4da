//! The embedded store: leases of one process, with the semantics of the Redis page.
use super::{
    Claim, Claimed, FencedWrite, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Wrote,
    quorum::{Hold, Kept, Member, Proposal, Proposed},
    sweep::Sweep,
};
use crate::{Clock, Key, clock::Moment, error::StoreError};
use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

mod member;
mod slot;
mod state;
use slot::{Now, Word};
use state::State;

/// Keeps leases in this process: for tests, examples, and programs that are one process.
///
/// It keeps to the rules of the Redis store, the line and the fences included. Every call is one step under a mutex,
/// carried out when its future is first polled, and none of them ever waits. Share one between several
/// [`Leases`](crate::Leases) by an [`Arc`].
///
/// Time follows `tokio::time`, so that `tokio::time::pause` works; [`with_clock`](MemoryStore::with_clock) takes
/// another clock. After a lease, all that stays is its fence, for seven days. Values that were written stay as long as
/// the store.
///
/// ```
/// use leasehold::store::{Claim, Claimed, Identity, MemoryStore, Owner, Store};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let owner = Owner::draw(&Identity::new("me")?)?;
/// let claim = Claim::new("report:monthly".into(), owner, std::time::Duration::from_secs(30));
/// assert!(matches!(store.claim(&claim).await?, Claimed::Held { .. }));
/// # Ok(()) }
/// ```
pub struct MemoryStore {
    clock: Clock,
    /// The wall time, in microseconds, at a moment of the clock. Fences count from it by the clock, so a step of the
    /// system's wall clock never takes them back.
    origin: (Moment, u64),
    /// Since when it has forgotten nothing.
    born: Mutex<Moment>,
    state: Mutex<State>,
    sinks: Mutex<Sinks>,
}

/// So few are not worth a sweep.
const SMALL: usize = 64;

/// Where to leave word.
#[derive(Default)]
struct Sinks {
    by_inbox: HashMap<Arc<str>, Pushes>,
    sweep: Sweep<SMALL>,
}

impl MemoryStore {
    /// An empty store that follows `tokio::time`.
    pub fn new() -> Self {
        Self::with_clock(Clock::tokio())
    }

    /// An empty store on another clock: the one of the [`Leases`](crate::Leases) above it, or no lease ends when it
    /// should.
    pub fn with_clock(clock: Clock) -> Self {
        Self::with_clocks(clock, SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default())
    }

    /// [`with_clock`](MemoryStore::with_clock), where fences count from a wall time other than the system's: for tests of
    /// members whose clocks differ.
    pub fn with_clocks(clock: Clock, wall: Duration) -> Self {
        let now = clock.now();
        let (origin, born) = ((now, micros(wall)), Mutex::new(now));
        MemoryStore { clock, origin, born, state: Mutex::default(), sinks: Mutex::default() }
    }

    /// Forgets everything, fences too, as a server does that starts again without its data: for tests.
    pub fn restart(&self) {
        let mut state = unpoisoned(&self.state);
        *state = State::default();
        *unpoisoned(&self.born) = self.clock.now();
    }

    fn now(&self) -> Now {
        let (origin, wall) = self.origin;
        let moment = self.clock.now();
        Now { moment, wall: wall.saturating_add(micros(moment.since(origin))) }
    }

    /// One atomic step, then the word that it leaves for others: a sink may call back into this store.
    fn step<T>(&self, step: impl FnOnce(&mut State, Now, &mut Vec<Word>) -> T) -> T {
        let mut words = Vec::new();
        let answer = {
            let mut state = unpoisoned(&self.state);
            // Read under the mutex, so that time never goes back from one step to the next.
            let now = self.now();
            step(&mut state, now, &mut words)
        };
        for word in &words {
            self.tell(word);
        }
        answer
    }

    fn tell(&self, word: &Word) {
        let (Word::Granted { owner, .. } | Word::Forced { owner, .. }) = word;
        let Some(sink) = unpoisoned(&self.sinks).by_inbox.get(owner.inbox()).cloned() else { return };
        let heard = match word {
            Word::Granted { owner, fence, length } => sink.granted(&owner.secret(), *fence, *length),
            Word::Forced { key, fence, .. } => sink.forced(key, *fence),
        };
        if !heard {
            self.forget(&[sink]);
        }
    }

    fn forget(&self, deaf: &[Pushes]) {
        let by_inbox = &mut unpoisoned(&self.sinks).by_inbox;
        for sink in deaf {
            // Another may have come in its place meanwhile.
            if by_inbox.get(sink.inbox()).is_some_and(|now| now.is(sink)) {
                by_inbox.remove(sink.inbox());
            }
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("clock", &self.clock).finish_non_exhaustive()
    }
}

impl Store for MemoryStore {
    fn claim(&self, claim: &Claim) -> impl Future<Output = Result<Claimed, StoreError>> + Send {
        let given = self.clock.now();
        async move {
            Ok(self.step(|state, now, _| {
                let late = now.moment.since(given) > claim.not_after;
                state.claim(claim, late, now)
            }))
        }
    }

    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        Ok(self.step(|state, now, _| state.renew(renewal, now)))
    }

    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        Ok(self.step(|state, now, words| state.release(key, owner, now, words)))
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        Ok(self.step(|state, now, _| state.slots.get(key).and_then(|slot| slot.inspect(now))))
    }

    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        Ok(self.step(|state, now, words| state.force(key, now, words)))
    }

    async fn write(&self, write: &FencedWrite) -> Result<Wrote, StoreError> {
        self.step(|state, _, _| state.write(write))
    }

    async fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        self.step(|state, _, _| state.read(key))
    }

    fn listen(&self, to: Pushes) {
        let mut sinks = unpoisoned(&self.sinks);
        sinks.by_inbox.insert(to.inbox().clone(), to);
        // There is no word for whoever is gone, so all are given one now and then, to find the deaf.
        if sinks.sweep.is_due(sinks.by_inbox.len()) {
            let all: Vec<_> = sinks.by_inbox.values().cloned().collect();
            drop(sinks);
            let deaf: Vec<_> = all.into_iter().filter(|sink| !sink.missed()).collect();
            self.forget(&deaf);
            let Sinks { by_inbox, sweep } = &mut *unpoisoned(&self.sinks);
            sweep.done(by_inbox.len());
        }
    }
}

/// No step of ours can panic midway, so what a poisoned mutex holds is whole.
fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::slot::FENCE_LIFE;
    use super::*;
    use crate::{
        owner::Identity,
        store::{Ticket, pushes::Push},
    };
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use tokio::time::advance;

    const TTL: Duration = Duration::from_secs(30);

    fn owner() -> Owner {
        Owner::draw(&Identity::new("me").unwrap()).unwrap()
    }

    /// A sink that keeps what it hears, for as long as `open`.
    fn sink(identity: &Identity, open: &Arc<AtomicBool>) -> (Pushes, Arc<Mutex<Vec<Push>>>) {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (to, open) = (heard.clone(), open.clone());
        let pushes = Pushes::new(identity.clone(), move |push| {
            to.lock().unwrap().push(push);
            open.load(Relaxed)
        });
        (pushes, heard)
    }

    async fn held(store: &MemoryStore, claim: &Claim) -> u64 {
        match store.claim(claim).await.unwrap() {
            Claimed::Held { fence } => fence,
            other => panic!("not held: {other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_is_carried_out_late_does_nothing_and_one_of_the_holder_answers_held() {
        let store = MemoryStore::new();
        let claim = Claim::new("k".into(), owner(), TTL);
        let late = store.claim(&claim);
        advance(claim.not_after + Duration::from_millis(1)).await;
        assert_eq!(late.await, Ok(Claimed::Late));
        assert_eq!(unpoisoned(&store.state).slots.len(), 0);

        let last_moment = store.claim(&claim);
        advance(claim.not_after).await;
        let Ok(Claimed::Held { fence }) = last_moment.await else { panic!("it was in time") };
        let late = store.claim(&claim);
        advance(claim.not_after + Duration::from_millis(1)).await;
        assert_eq!(late.await, Ok(Claimed::held(fence)));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_happens_before_the_first_poll() {
        let store = MemoryStore::new();
        drop(store.claim(&Claim::new("k".into(), owner(), TTL)));
        assert_eq!(store.inspect(&"k".into()).await, Ok(None));
    }

    #[tokio::test(start_paused = true)]
    async fn fences_are_the_wall_time_at_creation_moved_on_by_the_clock() {
        let clock = Clock::tokio();
        let store = MemoryStore::with_clock(clock.clone());
        let (_, wall) = store.origin;
        assert_eq!(held(&store, &Claim::new("a".into(), owner(), TTL)).await, wall);
        clock.suspend(Duration::from_secs(3600));
        assert_eq!(held(&store, &Claim::new("b".into(), owner(), TTL)).await, wall + 3_600_000_000);
        assert_eq!(held(&store, &Claim::new("a".into(), owner(), TTL)).await, wall + 3_600_000_000);
        // And no two ownerships of one key share a fence, though the clock stands still; a force uses one up.
        assert!(store.force_release(&"a".into()).await.unwrap());
        assert_eq!(held(&store, &Claim::new("a".into(), owner(), TTL)).await, wall + 3_600_000_002);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_over_is_swept_and_fences_stay_for_seven_days() {
        let store = MemoryStore::new();
        let use_once = async |n: usize| {
            let claim = Claim::new(format!("k{n}").into(), owner(), TTL);
            held(&store, &claim).await;
            assert_eq!(store.release(&claim.key, &claim.owner).await, Ok(Freed::Released));
        };
        for n in 0..1000 {
            use_once(n).await;
        }
        let week = Duration::from_secs(604_800);
        advance(week - Duration::from_secs(1)).await;
        // Enough for a sweep, and for another one later.
        for n in 1000..1100 {
            use_once(n).await;
        }
        assert_eq!(unpoisoned(&store.state).slots.len(), 1100);
        advance(Duration::from_secs(1)).await;
        for n in 1100..3000 {
            use_once(n).await;
        }
        let state = unpoisoned(&store.state);
        assert_eq!(state.slots.len(), 2000);
        assert!(state.slots.values().all(|slot| slot.holder.is_none() && slot.line.is_empty()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_few_are_not_looked_through_and_a_sweep_that_leaves_nothing_gives_the_room_back() {
        let store = MemoryStore::new();
        let size = || unpoisoned(&store.state).slots.len();
        for n in 1..SMALL {
            held(&store, &Claim::new(format!("k{n}").into(), owner(), TTL)).await;
        }
        advance(FENCE_LIFE).await;
        held(&store, &Claim::new("one more".into(), owner(), TTL)).await;
        assert_eq!(size(), SMALL);
        advance(FENCE_LIFE).await;
        held(&store, &Claim::new("last".into(), owner(), TTL)).await;
        assert_eq!(size(), 1);
        let room = unpoisoned(&store.state).slots.capacity();
        assert!(room < SMALL, "{room}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_sweep_spares_who_holds_and_who_waits() {
        let store = MemoryStore::new();
        let held_alone = Claim::new("held".into(), owner(), 3 * FENCE_LIFE);
        held(&store, &held_alone).await;
        let mut waits = Claim::new("waits".into(), owner(), TTL);
        held(&store, &waits).await;
        (waits.owner, waits.line, waits.presence) = (owner(), true, 3 * FENCE_LIFE);
        assert!(matches!(store.claim(&waits).await, Ok(Claimed::Queued { .. })));
        // By now neither fence is remembered for its own sake, and what the one waits for is over.
        advance(2 * FENCE_LIFE).await;
        for n in 0..100 {
            held(&store, &Claim::new(format!("k{n}").into(), owner(), TTL)).await;
        }
        assert!(store.inspect(&held_alone.key).await.unwrap().is_some());
        let newcomer = Claim::new(waits.key.clone(), owner(), TTL);
        assert!(matches!(store.claim(&newcomer).await, Ok(Claimed::Busy { .. })), "it would jump the line");
        held(&store, &waits).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_deaf_sink_does_not_take_along_the_one_that_came_in_its_place() {
        let store = Arc::new(MemoryStore::new());
        let identity = Identity::new("a").unwrap();
        let (weak, successor) = (Arc::downgrade(&store), sink(&identity, &Arc::new(AtomicBool::new(true))).0);
        store.listen(Pushes::new(identity.clone(), move |_| {
            weak.upgrade().unwrap().listen(successor.clone());
            false
        }));
        held(&store, &Claim::new("k".into(), Owner::draw(&identity).unwrap(), TTL)).await;
        assert!(store.force_release(&"k".into()).await.unwrap());
        assert!(unpoisoned(&store.sinks).by_inbox.contains_key(identity.inbox()));
    }

    #[tokio::test(start_paused = true)]
    async fn places_with_the_same_ticket_have_an_order() {
        let store = MemoryStore::new();
        held(&store, &Claim::new("k".into(), owner(), TTL)).await;
        let mut claims: Vec<_> = (0..5).map(|_| Claim::new("k".into(), owner(), TTL)).collect();
        for claim in &mut claims {
            (claim.line, claim.ticket) = (true, Some(Ticket(u64::MAX)));
            store.claim(claim).await.unwrap();
        }
        claims.sort_by_key(|claim| *claim.owner.id());
        for (n, claim) in claims.iter().enumerate() {
            let place = store.claim(claim).await.unwrap();
            assert!(matches!(place, Claimed::Queued { ahead, .. } if ahead == n as u64), "{n}: {place:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_grant_is_pushed_to_the_winner_and_a_force_to_whom_it_ousted() {
        let store = MemoryStore::new();
        let open = Arc::new(AtomicBool::new(true));
        let [(a, heard_a), (b, heard_b)] = ["a", "b"].map(|label| {
            let identity = Identity::new(label).unwrap();
            let (pushes, heard) = sink(&identity, &open);
            store.listen(pushes);
            (Owner::draw(&identity).unwrap(), heard)
        });
        let mut claim = Claim::new("k".into(), a.clone(), TTL);
        let first = held(&store, &claim).await;
        (claim.owner, claim.line) = (b.clone(), true);
        store.claim(&claim).await.unwrap();
        assert!(store.force_release(&claim.key).await.unwrap());

        assert_eq!(*heard_a.lock().unwrap(), [Push::Forced { key: claim.key.clone(), fence: first }]);
        let fence = held(&store, &claim).await;
        assert!(fence > first);
        assert_eq!(*heard_b.lock().unwrap(), [Push::Granted { owner: b.secret(), fence, length: claim.presence }]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sink_may_call_the_store_and_is_forgotten_once_nobody_listens() {
        let store = Arc::new(MemoryStore::new());
        let identity = Identity::new("a").unwrap();
        let seen = Arc::new(Mutex::new(None));
        let (weak, to) = (Arc::downgrade(&store), seen.clone());
        store.listen(Pushes::new(identity.clone(), move |_| {
            // A step of this store is over as soon as it is polled.
            let (store, key) = (weak.upgrade().unwrap(), Key::from("k"));
            let mut inspect = std::pin::pin!(store.inspect(&key));
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            *to.lock().unwrap() = Some(inspect.as_mut().poll(&mut context));
            false
        }));
        held(&store, &Claim::new("k".into(), Owner::draw(&identity).unwrap(), TTL)).await;
        assert!(store.force_release(&"k".into()).await.unwrap());
        assert_eq!(seen.lock().unwrap().take(), Some(std::task::Poll::Ready(Ok(None))));
        assert_eq!(unpoisoned(&store.sinks).by_inbox.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_is_not_kept_under_the_key_of_a_lease() {
        let store = MemoryStore::new();
        held(&store, &Claim::new("k".into(), owner(), TTL)).await;
        assert!(matches!(store.write(&FencedWrite::new("k".into(), vec![1], 1)).await, Err(StoreError::Refused(_))));
        assert!(matches!(store.read(&"k".into()).await, Err(StoreError::Refused(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn sinks_of_those_who_left_without_a_word_do_not_pile_up() {
        let store = MemoryStore::new();
        let (open, shut) = (Arc::new(AtomicBool::new(true)), Arc::default());
        let stays = Identity::new("stays").unwrap();
        store.listen(sink(&stays, &open).0);
        for _ in 0..1000 {
            store.listen(sink(&Identity::new("leaves").unwrap(), &shut).0);
        }
        let by_inbox = &unpoisoned(&store.sinks).by_inbox;
        assert!(by_inbox.len() <= SMALL, "{}", by_inbox.len());
        assert!(by_inbox.contains_key(stays.inbox()));
    }
}
