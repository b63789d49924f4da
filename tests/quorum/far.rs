//! An embedded store at the end of a way that is long, or only goes there.
use leasehold::{
    Clock, Key, StoreError,
    store::{
        Claim, Claimed, Freed, Holding, Identity, MemoryStore, Owner, Renewal, Renewed, Store,
        quorum::{Hold, Kept, Member, Proposal, Proposed, QuorumStore},
    },
};
use std::{
    future::{Future, pending},
    sync::{Arc, Mutex},
    time::Duration,
};

/// What becomes of a request.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// It is carried out so much later, and answered then.
    Takes(Duration),
    /// It is carried out so much later, though nobody waits for it any more, and never answered.
    Mute(Duration),
    /// It is not, and an error says so.
    Down,
    /// The member will not do it.
    Refused,
}

/// The way of each kind of request.
#[derive(Clone, Copy, Debug)]
pub struct Ways {
    pub propose: Way,
    pub hold: Way,
    pub release: Way,
    pub others: Way,
}

impl Ways {
    pub fn all(way: Way) -> Ways {
        Ways { propose: way, hold: way, release: way, others: way }
    }

    /// As near as may be.
    pub fn near() -> Ways {
        Ways::all(Way::Takes(Duration::ZERO))
    }
}

/// One member.
pub struct Far {
    pub store: Arc<MemoryStore>,
    ways: Mutex<Ways>,
    /// What was asked for so far.
    asked: Mutex<Vec<&'static str>>,
}

impl Far {
    pub fn set(&self, ways: Ways) {
        *self.ways.lock().unwrap() = ways;
    }

    pub fn asked(&self, what: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| **asked == what).count()
    }

    /// Whether anybody has the key there.
    pub async fn has(&self, key: &str) -> bool {
        self.store.inspect(&key.into()).await.unwrap().is_some()
    }

    async fn carry<T: Send + 'static>(
        &self,
        what: &'static str,
        way: impl FnOnce(&Ways) -> Way,
        step: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.asked.lock().unwrap().push(what);
        let way = way(&self.ways.lock().unwrap());
        let (there, answers) = match way {
            Way::Takes(there) => (there, true),
            Way::Mute(there) => (there, false),
            Way::Down => return Err(StoreError::unavailable("down")),
            Way::Refused => return Err(StoreError::refused("not for you")),
        };
        if there.is_zero() && answers {
            return step.await;
        }
        let carried_out = tokio::spawn(async move {
            tokio::time::sleep(there).await;
            step.await
        });
        if answers { carried_out.await.unwrap() } else { pending().await }
    }
}

impl Store for Far {
    async fn claim(&self, _: &Claim) -> Result<Claimed, StoreError> {
        unreachable!("a quorum makes proposals")
    }
    async fn renew(&self, _: &Renewal) -> Result<Renewed, StoreError> {
        unreachable!("a quorum renews with `hold`")
    }
    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        let (store, key, owner) = (self.store.clone(), key.clone(), owner.clone());
        self.carry("release", |ways| ways.release, async move { store.release(&key, &owner).await }).await
    }
    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        let (store, key) = (self.store.clone(), key.clone());
        self.carry("inspect", |ways| ways.others, async move { store.inspect(&key).await }).await
    }
    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        let (store, key) = (self.store.clone(), key.clone());
        self.carry("force", |ways| ways.others, async move { store.force_release(&key).await }).await
    }
}

impl Member for Far {
    async fn propose(&self, proposal: &Proposal) -> Result<Proposed, StoreError> {
        let (store, proposal, given) = (self.store.clone(), proposal.clone(), tokio::time::Instant::now());
        self.carry("propose", |ways| ways.propose, async move {
            // How late it is counts from when it was given to the member here.
            let Some(left) = proposal.not_after.checked_sub(given.elapsed()) else { return Ok(Proposed::Late) };
            let mut proposal = proposal;
            proposal.not_after = left;
            store.propose(&proposal).await
        })
        .await
    }

    async fn hold_all(&self, list: &[Hold]) -> Vec<Result<Kept, StoreError>> {
        let (store, list, given) = (self.store.clone(), list.to_vec(), tokio::time::Instant::now());
        let count = list.len();
        let step = async move {
            let mut answers = Vec::new();
            for mut hold in list {
                let late = given.elapsed() > hold.not_after;
                let create = hold.create;
                hold.create &= !late;
                let answer = store.hold_all(&[hold]).await.remove(0);
                answers.push(answer.map(|kept| if kept == Kept::Gone && create && late { Kept::Late } else { kept }));
            }
            Ok(answers)
        };
        let answers = self.carry("hold", |ways| ways.hold, step).await;
        answers.unwrap_or_else(|error| vec![Err(error); count])
    }
}

/// A quorum of so many that are near and old, and they themselves.
pub async fn quorum(members: usize, quarantine: Duration) -> (QuorumStore<Arc<Far>>, Vec<Arc<Far>>) {
    let clock = Clock::tokio();
    let far = |_| {
        let (ways, asked) = (Mutex::new(Ways::near()), Mutex::default());
        Arc::new(Far { store: Arc::new(MemoryStore::with_clock(clock.clone())), ways, asked })
    };
    let far: Vec<_> = (0..members).map(far).collect();
    let store = QuorumStore::with_clock(far.clone(), clock).unwrap().quarantine(quarantine);
    tokio::time::sleep(quarantine).await;
    (store, far)
}

pub fn claim(key: &str, ttl: Duration) -> Claim {
    Claim::new(key.into(), Owner::draw(&Identity::new("me").unwrap()).unwrap(), ttl)
}

pub fn fence(claimed: &Result<Claimed, StoreError>) -> u64 {
    match claimed {
        Ok(Claimed::Held { fence, .. }) => *fence,
        other => panic!("{other:?}"),
    }
}
