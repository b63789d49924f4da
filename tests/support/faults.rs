//! A store with a network in front of it that misbehaves on demand, in virtual time.
use leasehold::{
    Invalid, Key, StoreError,
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Wrote},
};
use std::{
    collections::{HashMap, VecDeque},
    future::{Future, pending},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    Claim,
    Renew,
    Release,
    Inspect,
    Force,
    Write,
    Read,
}

/// What happens to one message: to a call, or to a whole list of renewals.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// Nothing.
    Pass,
    /// It is not carried out, and there is no answer.
    LoseRequest,
    /// It is carried out, and there is no answer.
    LoseReply,
    /// It is carried out so much later, also when the caller has given up by then.
    DelayRequest(Duration),
    /// It is carried out, and the answer comes so much later.
    DelayReply(Duration),
    /// It is carried out when all is healed, also when the caller has given up by then.
    HoldRequest,
    /// It is carried out, and the answer comes when all is healed.
    HoldReply,
    /// It is not carried out, and the answer is this error.
    Fail(StoreError),
    /// It is carried out, and the answer is this error.
    FailAfter(StoreError),
}

/// One message that was sent.
#[derive(Clone, Debug)]
pub struct Sent {
    pub verb: Verb,
    /// One, or as many as a list has renewals.
    pub keys: Vec<Key>,
    pub at: Instant,
    pub fault: Fault,
}

/// `S` behind such a network. All messages pass until [`Faults`] says otherwise.
pub struct Faulty<S> {
    store: Arc<S>,
    faults: Faults,
    pushes: bool,
}

/// The test's hand on a [`Faulty`].
#[derive(Clone)]
pub struct Faults(Arc<Control>);

struct Control {
    script: Mutex<Script>,
    /// Messages that were sent.
    log: watch::Sender<Vec<Sent>>,
    /// Callers that wait for an answer.
    in_flight: watch::Sender<usize>,
    /// How often all was healed.
    heals: watch::Sender<u64>,
}

#[derive(Default)]
struct Script {
    next: HashMap<Verb, VecDeque<Fault>>,
    always: HashMap<Verb, Fault>,
    keys: HashMap<Key, Fault>,
    lanes: HashMap<Key, u32>,
}

impl Faults {
    /// What happens to the next messages of this verb, one after another.
    pub fn next(&self, verb: Verb, faults: impl IntoIterator<Item = Fault>) {
        self.script().next.entry(verb).or_default().extend(faults);
    }

    /// What happens to all messages of this verb, after those of [`next`](Faults::next).
    pub fn always(&self, verb: Verb, fault: Fault) {
        self.script().always.insert(verb, fault);
    }

    /// What happens to all messages in which this key comes first. It goes before the rest.
    pub fn on_key(&self, key: impl Into<Key>, fault: Fault) {
        self.script().keys.insert(key.into(), fault);
    }

    /// Puts a key into a lane.
    pub fn lane(&self, key: impl Into<Key>, lane: u32) {
        self.script().lanes.insert(key.into(), lane);
    }

    /// From now on all messages pass, and what was held goes on its way.
    pub fn heal(&self) {
        let lanes = std::mem::take(&mut self.script().lanes);
        *self.script() = Script { lanes, ..Script::default() };
        self.0.heals.send_modify(|heals| *heals += 1);
    }

    /// The messages of this verb so far.
    pub fn sent(&self, verb: Verb) -> Vec<Sent> {
        self.0.log.borrow().iter().filter(|sent| sent.verb == verb).cloned().collect()
    }

    /// How many messages of this verb were sent so far.
    pub fn count(&self, verb: Verb) -> usize {
        self.sent(verb).len()
    }

    /// How many callers wait for an answer.
    pub fn in_flight(&self) -> usize {
        *self.0.in_flight.borrow()
    }

    /// Returns once `count` messages of this verb were sent in all. Panics after an hour, which is no time when paused.
    pub async fn until_sent(&self, verb: Verb, count: usize) {
        let sent = |log: &Vec<Sent>| log.iter().filter(|sent| sent.verb == verb).count() >= count;
        let mut log = self.0.log.subscribe();
        let waited = timeout(Duration::from_secs(3600), log.wait_for(sent)).await;
        assert!(waited.is_ok(), "waited in vain for {count} of {verb:?}");
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.0.script.lock().unwrap()
    }

    fn draw(&self, verb: Verb, keys: &[Key]) -> Fault {
        let mut script = self.script();
        if let Some(fault) = keys.first().and_then(|key| script.keys.get(key)) {
            return fault.clone();
        }
        let next = script.next.get_mut(&verb).and_then(VecDeque::pop_front);
        next.or_else(|| script.always.get(&verb).cloned()).unwrap_or(Fault::Pass)
    }
}

/// A caller that waits, until this is dropped.
struct Waits(Arc<Control>);

impl Waits {
    fn new(control: &Arc<Control>) -> Self {
        control.in_flight.send_modify(|n| *n += 1);
        Waits(control.clone())
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.in_flight.send_modify(|n| *n -= 1);
    }
}

/// The way of a request to the store.
type Way = Pin<Box<dyn Future<Output = ()> + Send>>;

impl<S: Store> Faulty<S> {
    pub fn new(store: S) -> (Self, Faults) {
        let control = Control {
            script: Mutex::default(),
            log: watch::Sender::default(),
            in_flight: watch::Sender::default(),
            heals: watch::Sender::default(),
        };
        let faults = Faults(Arc::new(control));
        (Faulty { store: Arc::new(store), faults: faults.clone(), pushes: true }, faults)
    }

    /// A store whose every push is lost.
    pub fn without_pushes(self) -> Self {
        Faulty { pushes: false, ..self }
    }

    /// Sends one message. `carry_out` goes the way to the store, then carries the message out.
    async fn send<T, Fut>(
        &self,
        verb: Verb,
        keys: Vec<Key>,
        carry_out: impl FnOnce(Arc<S>, Way) -> Fut + Send,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        Fut: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let _waits = Waits::new(&self.faults.0);
        let fault = self.faults.draw(verb, &keys);
        let heals = self.faults.0.heals.subscribe();
        let sent = Sent { verb, keys, at: Instant::now(), fault: fault.clone() };
        self.faults.0.log.send_modify(|log| log.push(sent));
        let carry_out_after = |way: Way| carry_out(self.store.clone(), way);
        let at_once = || Box::pin(std::future::ready(()));
        match fault {
            Fault::Pass => carry_out_after(at_once()).await,
            Fault::LoseRequest => pending().await,
            Fault::LoseReply => {
                let _lost = carry_out_after(at_once()).await;
                pending().await
            }
            Fault::DelayRequest(delay) => detached(carry_out_after(Box::pin(sleep(delay)))).await,
            Fault::DelayReply(delay) => {
                let answer = carry_out_after(at_once()).await;
                sleep(delay).await;
                answer
            }
            Fault::HoldRequest => detached(carry_out_after(Box::pin(next(heals)))).await,
            Fault::HoldReply => {
                let answer = carry_out_after(at_once()).await;
                next(heals).await;
                answer
            }
            Fault::Fail(error) => Err(error),
            Fault::FailAfter(error) => {
                let _lost = carry_out_after(at_once()).await;
                Err(error)
            }
        }
    }
}

async fn next(mut heals: watch::Receiver<u64>) {
    if heals.changed().await.is_err() {
        // The test is over, and nothing will be healed any more.
        pending().await
    }
}

/// What is on its way arrives though its caller has given up.
async fn detached<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    tokio::spawn(work).await.unwrap()
}

impl<S: Store> Store for Faulty<S> {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        let (keys, claim) = (vec![claim.key.clone()], claim.clone());
        // The call is made before the way, so that the store sees a claim that comes late.
        let carry_out = |store: Arc<S>, way: Way| async move {
            let call = store.claim(&claim);
            way.await;
            call.await
        };
        self.send(Verb::Claim, keys, carry_out).await
    }

    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        let (keys, renewal) = (vec![renewal.key.clone()], renewal.clone());
        let carry_out = |store: Arc<S>, way: Way| async move {
            way.await;
            store.renew(&renewal).await
        };
        self.send(Verb::Renew, keys, carry_out).await
    }

    async fn renew_all(&self, list: &[Renewal]) -> Vec<Result<Renewed, StoreError>> {
        let keys = list.iter().map(|renewal| renewal.key.clone()).collect();
        let (renewals, count) = (list.to_vec(), list.len());
        let carry_out = |store: Arc<S>, way: Way| async move {
            way.await;
            Ok(store.renew_all(&renewals).await)
        };
        self.send(Verb::Renew, keys, carry_out).await.unwrap_or_else(|error| vec![Err(error); count])
    }

    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        let (keys, key, owner) = (vec![key.clone()], key.clone(), owner.clone());
        let carry_out = |store: Arc<S>, way: Way| async move {
            way.await;
            store.release(&key, &owner).await
        };
        self.send(Verb::Release, keys, carry_out).await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        let (keys, key) = (vec![key.clone()], key.clone());
        let carry_out = |store: Arc<S>, way: Way| async move {
            way.await;
            store.inspect(&key).await
        };
        self.send(Verb::Inspect, keys, carry_out).await
    }

    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        let (keys, key) = (vec![key.clone()], key.clone());
        let carry_out = |store: Arc<S>, way: Way| async move {
            way.await;
            store.force_release(&key).await
        };
        self.send(Verb::Force, keys, carry_out).await
    }

    async fn write(&self, write: &FencedWrite) -> Result<Wrote, StoreError> {
        let (keys, write) = (vec![write.key.clone()], write.clone());
        let carry_out = |store: Arc<S>, way: Way| async move {
            way.await;
            store.write(&write).await
        };
        self.send(Verb::Write, keys, carry_out).await
    }

    async fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        let (keys, key) = (vec![key.clone()], key.clone());
        let carry_out = |store: Arc<S>, way: Way| async move {
            way.await;
            store.read(&key).await
        };
        self.send(Verb::Read, keys, carry_out).await
    }

    fn lane(&self, key: &Key) -> u32 {
        let lane = self.faults.script().lanes.get(key).copied();
        lane.unwrap_or_else(|| self.store.lane(key))
    }

    fn check(&self, key: &Key) -> Result<(), Invalid> {
        self.store.check(key)
    }

    fn listen(&self, to: Pushes) {
        if self.pushes {
            self.store.listen(to);
        }
    }
}
