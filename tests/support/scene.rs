//! Leases on an embedded store behind a scripted network, with every exchange written down.
use super::faults::{Faults, Faulty, Verb};
use leasehold::{
    Clock, Invalid, Key, Leases, LeasesBuilder, StoreError,
    store::{Claim, Claimed, Freed, Holding, Identity, MemoryStore, Owner, Renewal, Renewed, Store},
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

pub const SECOND: Duration = Duration::from_secs(1);

pub const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// An error that may pass.
pub fn down() -> StoreError {
    StoreError::unavailable("the test says so")
}

/// Leases, what is behind them, and the test's hands on it.
pub struct Scene {
    pub clock: Clock,
    pub start: Instant,
    pub leases: Leases,
    pub faults: Faults,
    pub store: Arc<Spy>,
}

pub fn scene() -> Scene {
    scene_with(|builder| builder)
}

pub fn scene_with(settings: impl FnOnce(LeasesBuilder) -> LeasesBuilder) -> Scene {
    let clock = Clock::tokio();
    let memory = Arc::new(MemoryStore::with_clock(clock.clone()));
    let (network, faults) = Faulty::new(memory.clone());
    let start = Instant::now();
    let store = Arc::new(Spy {
        network: network.without_pushes(),
        memory,
        start,
        seen: Arc::default(),
        madness: Mutex::default(),
    });
    let leases = settings(Leases::builder().clock(clock.clone())).build(store.clone()).unwrap();
    Scene { clock, start, leases, faults, store }
}

impl Scene {
    /// Since the scene began.
    pub fn at(&self) -> Duration {
        self.start.elapsed()
    }
}

/// One exchange, by whom, and when it was answered or given up.
#[derive(Clone, Debug)]
pub struct Seen {
    pub verb: Verb,
    pub keys: Vec<Key>,
    pub secrets: Vec<String>,
    pub asked: Duration,
    pub over: Option<Duration>,
}

/// What a broken store does when leases are to be renewed.
#[derive(Clone, Copy, Debug)]
pub enum Madness {
    Panics,
    /// Panics when it is asked for a lane, so in the watchdog itself.
    PanicsOverLanes,
    /// Gives so many answers.
    Answers(usize),
}

/// Writes down what goes to the network.
pub struct Spy {
    network: Faulty<Arc<MemoryStore>>,
    memory: Arc<MemoryStore>,
    start: Instant,
    seen: Arc<Mutex<Vec<Seen>>>,
    madness: Mutex<Vec<Madness>>,
}

impl Spy {
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.seen).clone()
    }

    pub fn all(&self, verb: Verb) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.verb == verb).collect()
    }

    pub fn count(&self, verb: Verb) -> usize {
        self.all(verb).len()
    }

    /// The next lists of renewals meet this.
    pub fn go_mad(&self, madness: impl IntoIterator<Item = Madness>) {
        lock(&self.madness).extend(madness);
    }

    /// Who holds it, asked behind the network's back.
    pub async fn holding(&self, key: &str) -> Option<Holding> {
        self.memory.inspect(&key.into()).await.unwrap()
    }

    pub async fn is_free(&self, key: &str) -> bool {
        self.holding(key).await.is_none()
    }

    /// Deletes the key behind everybody's back.
    pub async fn delete(&self, key: &str) {
        assert!(self.memory.force_release(&key.into()).await.unwrap());
    }

    /// Gives the key to somebody else behind its holder's back. Returns the new fence.
    pub async fn give_away(&self, key: &str) -> u64 {
        self.delete(key).await;
        let thief = Owner::draw(&Identity::new("thief").unwrap()).unwrap();
        match self.memory.claim(&Claim::new(key.into(), thief, 3600 * SECOND)).await.unwrap() {
            Claimed::Held { fence, .. } => fence,
            other => panic!("{other:?}"),
        }
    }

    /// No two exchanges of one owner were under way at the same time.
    pub fn assert_none_overlap(&self) {
        let seen = self.seen();
        for (n, first) in seen.iter().enumerate() {
            for second in &seen[n + 1..] {
                let shared = first.secrets.iter().any(|secret| second.secrets.contains(secret));
                let apart = first.over.is_some_and(|over| over <= second.asked);
                assert!(!shared || apart, "{first:?} and {second:?} overlap");
            }
        }
    }

    fn note(&self, verb: Verb, keys: Vec<Key>, secrets: Vec<String>) -> Over {
        let mut seen = lock(&self.seen);
        seen.push(Seen { verb, keys, secrets, asked: self.start.elapsed(), over: None });
        Over { seen: self.seen.clone(), index: seen.len() - 1, start: self.start }
    }
}

/// Notes the end of an exchange when it is dropped.
struct Over {
    seen: Arc<Mutex<Vec<Seen>>>,
    index: usize,
    start: Instant,
}

impl Drop for Over {
    fn drop(&mut self) {
        lock(&self.seen)[self.index].over = Some(self.start.elapsed());
    }
}

/// A scripted panic may have come by.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store for Spy {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        let _over = self.note(Verb::Claim, vec![claim.key.clone()], vec![claim.owner.secret()]);
        self.network.claim(claim).await
    }

    async fn renew(&self, _: &Renewal) -> Result<Renewed, StoreError> {
        unreachable!("renewals travel in lists")
    }

    async fn renew_all(&self, list: &[Renewal]) -> Vec<Result<Renewed, StoreError>> {
        let keys = list.iter().map(|renewal| renewal.key.clone()).collect();
        let _over = self.note(Verb::Renew, keys, list.iter().map(|renewal| renewal.owner.secret()).collect());
        let madness = lock(&self.madness).pop();
        match madness {
            None => self.network.renew_all(list).await,
            Some(Madness::Panics | Madness::PanicsOverLanes) => panic!("the store panics, as the test says"),
            Some(Madness::Answers(n)) => {
                let mut answers = self.network.renew_all(list).await;
                answers.resize(n, Ok(Renewed::Renewed));
                answers
            }
        }
    }

    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        let _over = self.note(Verb::Release, vec![key.clone()], vec![owner.secret()]);
        self.network.release(key, owner).await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        self.network.inspect(key).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        self.network.force_release(key).await
    }

    fn lane(&self, key: &Key) -> u32 {
        let mad = lock(&self.madness).pop_if(|madness| matches!(madness, Madness::PanicsOverLanes)).is_some();
        assert!(!mad, "the store panics over lanes, as the test says");
        self.network.lane(key)
    }

    fn check(&self, key: &Key) -> Result<(), Invalid> {
        self.network.check(key)
    }
}

/// Work that takes a step each 100 ms and notes when it was polled and dropped.
#[derive(Clone)]
pub struct Steps {
    start: Instant,
    notes: Arc<Mutex<Notes>>,
}

#[derive(Default)]
struct Notes {
    polls: Vec<Duration>,
    dropped: Option<Duration>,
}

impl Steps {
    pub fn new(scene: &Scene) -> Self {
        Steps { start: scene.start, notes: Arc::default() }
    }

    /// Never ends by itself.
    pub async fn take<T>(self) -> T {
        let steps = self.clone();
        let mut tick = tokio::time::interval(ms(100));
        let noted = Dropped(self);
        loop {
            lock(&steps.notes).polls.push(steps.start.elapsed());
            tick.tick().await;
            let _alive = &noted;
        }
    }

    pub fn last(&self) -> Duration {
        *lock(&self.notes).polls.last().unwrap()
    }

    pub fn count(&self) -> usize {
        lock(&self.notes).polls.len()
    }

    pub fn dropped(&self) -> Option<Duration> {
        lock(&self.notes).dropped
    }
}

struct Dropped(Steps);

impl Drop for Dropped {
    fn drop(&mut self) {
        lock(&self.0.notes).dropped = Some(self.0.start.elapsed());
    }
}
