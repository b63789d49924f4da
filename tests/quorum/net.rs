//! The network between one client and one member, and what may be wrong with the member.
use leasehold::{
    Key, StoreError,
    store::{
        Claim, Claimed, Freed, Holding, MemoryStore, Owner, Renewal, Renewed, Store,
        quorum::{Hold, Kept, Member, Proposal, Proposed},
    },
};
use std::{
    cell::Cell,
    collections::HashMap,
    future::{Future, pending},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep, sleep_until};

/// A rule that is taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The second step writes no fence.
    NoWriteBack,
    /// The second step is answered before it is carried out.
    NotAwaited,
    /// The second step takes the key from whoever has it.
    NotOurs,
    /// A member that has started gives keys away at once.
    NoQuarantine,
}

impl Planted {
    pub const ALL: [Planted; 4] = [Planted::NoWriteBack, Planted::NotAwaited, Planted::NotOurs, Planted::NoQuarantine];
}

/// One member, as all clients share it.
pub struct Site {
    pub store: MemoryStore,
    planted: Option<Planted>,
    /// How much of a thousand messages goes wrong.
    faults: AtomicU64,
    /// Until then it answers nothing; what came meanwhile is carried out then.
    hangs_until: Mutex<Instant>,
    /// Who was given the key last, and under which proposal: what a planted fault needs to know.
    last: Mutex<HashMap<Key, (Owner, u64)>>,
}

impl Site {
    pub fn new(store: MemoryStore, planted: Option<Planted>) -> Arc<Self> {
        let (faults, last) = (AtomicU64::new(0), Mutex::default());
        Arc::new(Site { store, planted, faults, hangs_until: Mutex::new(Instant::now()), last })
    }

    pub fn set_faults(&self, of_a_thousand: u64) {
        self.faults.store(of_a_thousand, Relaxed);
    }

    pub fn hang(&self, length: Duration) {
        *self.hangs_until.lock().unwrap() = Instant::now() + length;
    }

    async fn awake(&self) {
        let until = *self.hangs_until.lock().unwrap();
        unless_past(until).await;
    }

    async fn propose(&self, proposal: &Proposal) -> Result<Proposed, StoreError> {
        let mut proposal = proposal.clone();
        if self.planted == Some(Planted::NoQuarantine) {
            proposal.settled = Duration::ZERO;
        }
        let answer = self.store.propose(&proposal).await;
        if let Ok(Proposed::Held { fence }) = &answer {
            self.last.lock().unwrap().insert(proposal.key.clone(), (proposal.owner.clone(), *fence));
        }
        answer
    }

    async fn hold(&self, hold: &Hold) -> Result<Kept, StoreError> {
        let last = self.last.lock().unwrap().get(&hold.key).cloned();
        let true_hold = async |hold: &Hold| self.store.hold_all(std::slice::from_ref(hold)).await.remove(0);
        match (self.planted, last) {
            (Some(Planted::NoWriteBack), Some((owner, proposed))) if !hold.create && owner == hold.owner => {
                let kept = self.store.renew(&Renewal::new(hold.key.clone(), owner, proposed, hold.ttl)).await?;
                Ok(if kept == Renewed::Renewed { Kept::Ours } else { Kept::Taken })
            }
            (Some(Planted::NotOurs), Some((owner, _))) if !hold.create && owner != hold.owner => {
                self.store.release(&hold.key, &owner).await?;
                true_hold(&with(hold, |hold| hold.create = true)).await
            }
            _ => true_hold(hold).await,
        }
    }
}

fn with<T: Clone>(one: &T, change: impl FnOnce(&mut T)) -> T {
    let mut other = one.clone();
    change(&mut other);
    other
}

/// The way of one client to one member.
pub struct Net {
    pub site: Arc<Site>,
    /// The client stands still until then: nothing of it goes out, nothing comes in.
    pub stopped_until: Arc<Mutex<Instant>>,
    /// Nothing of it goes out, and it is told so.
    pub cut: Arc<AtomicBool>,
}

thread_local! {
    /// What happens to messages.
    pub static DICE: Cell<fastrand::Rng> = const { Cell::new(fastrand::Rng::with_seed(0)) };
}

pub fn dice<T>(draw: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
    DICE.with(|dice| {
        let mut rng = dice.replace(fastrand::Rng::with_seed(0));
        let drawn = draw(&mut rng);
        dice.set(rng);
        drawn
    })
}

/// Timers are what most of a run's time goes into.
async fn unless_past(until: Instant) {
    if until > Instant::now() {
        sleep_until(until).await;
    }
}

impl Net {
    async fn goes_on(&self) {
        let until = *self.stopped_until.lock().unwrap();
        unless_past(until).await;
    }

    async fn send<T: Send + 'static>(
        &self,
        message: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.goes_on().await;
        if self.cut.load(Relaxed) {
            return Err(StoreError::unavailable("cut off"));
        }
        let faults = self.site.faults.load(Relaxed);
        let (fault, there, back) = dice(|rng| {
            let fault = if rng.u64(0..1000) < faults { rng.u8(0..6) } else { 9 };
            (fault, rng.u64(0..3), rng.u64(0..3))
        });
        let (mut there, mut back) = (Duration::from_millis(there), Duration::from_millis(back));
        match fault {
            0 => pending().await,
            1 => there += Duration::from_millis(dice(|rng| rng.u64(5..900))),
            2 => back += Duration::from_millis(dice(|rng| rng.u64(5..900))),
            3 => return Err(StoreError::unavailable("lost on the way")),
            _ => {}
        }
        // What is on its way arrives though its sender has given up.
        let site = self.site.clone();
        let carried_out = tokio::spawn(async move {
            if !there.is_zero() {
                sleep(there).await;
            }
            site.awake().await;
            message.await
        });
        let answer = carried_out.await.unwrap();
        if !back.is_zero() {
            sleep(back).await;
        }
        self.goes_on().await;
        match fault {
            4 => pending().await,
            5 => Err(StoreError::unavailable("lost on the way back")),
            _ => answer,
        }
    }
}

impl Store for Net {
    async fn claim(&self, _: &Claim) -> Result<Claimed, StoreError> {
        unreachable!("a quorum makes proposals")
    }
    async fn renew(&self, _: &Renewal) -> Result<Renewed, StoreError> {
        unreachable!("a quorum renews with `hold`")
    }
    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        let (site, key, owner) = (self.site.clone(), key.clone(), owner.clone());
        self.send(async move { site.store.release(&key, &owner).await }).await
    }
    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        let (site, key) = (self.site.clone(), key.clone());
        self.send(async move { site.store.inspect(&key).await }).await
    }
    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        let (site, key) = (self.site.clone(), key.clone());
        self.send(async move { site.store.force_release(&key).await }).await
    }
}

impl Member for Net {
    async fn propose(&self, proposal: &Proposal) -> Result<Proposed, StoreError> {
        let (site, proposal, given) = (self.site.clone(), proposal.clone(), Instant::now());
        self.send(async move {
            // How late it is counts from when it was given to the member here.
            let left = proposal.not_after.checked_sub(given.elapsed());
            match left {
                Some(not_after) => site.propose(&with(&proposal, |proposal| proposal.not_after = not_after)).await,
                None => Ok(Proposed::Late),
            }
        })
        .await
    }

    async fn hold_all(&self, list: &[Hold]) -> Vec<Result<Kept, StoreError>> {
        let (site, list, given, count) = (self.site.clone(), list.to_vec(), Instant::now(), list.len());
        let late_answer = site.planted == Some(Planted::NotAwaited) && list.iter().all(|hold| !hold.create);
        let carried_out = self.send(async move {
            let mut answers = Vec::new();
            for hold in list {
                let (late, create) = (given.elapsed() > hold.not_after, hold.create);
                let answer = site.hold(&with(&hold, |hold| hold.create = create && !late)).await;
                answers.push(match answer {
                    Ok(Kept::Gone) if create && late => Ok(Kept::Late),
                    answer => answer,
                });
            }
            Ok(answers)
        });
        if late_answer {
            // As if it had been carried out: then it may be, or not.
            let _ = tokio::time::timeout(Duration::from_micros(500), carried_out).await;
            return vec![Ok(Kept::Ours); count];
        }
        carried_out.await.unwrap_or_else(|error| vec![Err(error); count])
    }
}
