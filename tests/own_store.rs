//! A store as somebody else would write one: a map, plain `async fn`, no line, no pushes. Leases on it keep their promises.
#![allow(clippy::unwrap_used, reason = "tests")]
use leasehold::{
    Clock, Error, Invalid, Key, Leases, LossReason, StoreError,
    store::{Claim, Claimed, Freed, Holding, Owner, Renewal, Renewed, Store, contract},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);

/// Every call is one step under the mutex.
#[derive(Default)]
struct Shelf(Mutex<Rows>);

#[derive(Default)]
struct Rows {
    held: HashMap<Key, Held>,
    fences: HashMap<Key, u64>,
}

struct Held {
    owner: Owner,
    fence: u64,
    until: Instant,
}

impl Held {
    /// Prolongs, never shortens.
    fn prolong(&mut self, ttl: Duration) {
        self.until = self.until.max(Instant::now() + ttl);
    }
    fn left(&self) -> Duration {
        self.until - Instant::now()
    }
}

impl Shelf {
    /// What is held; what has run out is forgotten first.
    fn rows(&self) -> MutexGuard<'_, Rows> {
        let mut rows = self.0.lock().unwrap();
        rows.held.retain(|_, held| held.until > Instant::now());
        rows
    }
}

impl Store for Shelf {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        let mut rows = self.rows();
        Ok(match rows.held.get_mut(&claim.key) {
            Some(held) if held.owner == claim.owner => {
                held.prolong(claim.ttl);
                Claimed::held(held.fence)
            }
            Some(held) => Claimed::busy(Some(held.left()), Some(held.owner.label().clone())),
            None => {
                let last = rows.fences.entry(claim.key.clone()).or_default();
                *last += 1;
                let fence = *last;
                let held = Held { owner: claim.owner.clone(), fence, until: Instant::now() + claim.ttl };
                rows.held.insert(claim.key.clone(), held);
                Claimed::held(fence)
            }
        })
    }

    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        Ok(match self.rows().held.get_mut(&renewal.key) {
            None => Renewed::Gone,
            Some(held) if held.owner == renewal.owner && held.fence == renewal.fence => {
                held.prolong(renewal.ttl);
                Renewed::Renewed
            }
            Some(_) => Renewed::Taken,
        })
    }

    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        let mut rows = self.rows();
        if rows.held.get(key).is_none_or(|held| held.owner != *owner) {
            return Ok(Freed::Gone);
        }
        rows.held.remove(key);
        Ok(Freed::Released)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        let describe =
            |held: &Held| Holding::new(Some(held.owner.label().clone()), Some(held.fence), Some(held.left()), 0);
        Ok(self.rows().held.get(key).map(describe))
    }

    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        Ok(self.rows().held.remove(key).is_some())
    }

    fn check(&self, key: &Key) -> Result<(), Invalid> {
        if key.as_str().contains('/') { Err(Invalid::new("key", "on a shelf, no slash")) } else { Ok(()) }
    }
}

fn leases(store: &Arc<Shelf>) -> Leases {
    Leases::builder().clock(Clock::tokio()).build(store.clone()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn it_keeps_the_contract_as_far_as_it_goes() {
    let verdict = contract::check(async || Shelf::default()).await;
    assert_eq!(verdict, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn two_processes_on_it_exclude_each_other_and_a_waiter_comes_in_soon() {
    let store = Arc::<Shelf>::default();
    let (here, there) = (leases(&store), leases(&store));
    let held = here.lease("k").acquire().await.unwrap();
    assert!(there.lease("k").try_acquire().await.unwrap().is_none());
    let waiter = tokio::spawn(there.lease("k").wait(3600 * SECOND).acquire());
    sleep(600 * SECOND).await;
    assert!(held.is_held());
    let start = Instant::now();
    held.release().await.unwrap();
    let next = waiter.await.unwrap().unwrap();
    assert!(start.elapsed() <= SECOND, "{:?}", start.elapsed());
    assert_eq!(there.inspect("k").await.unwrap().unwrap().fence, Some(next.fence()));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_tells_nobody_of_a_force_release_is_asked_at_the_next_renewal() {
    let store = Arc::<Shelf>::default();
    let leases = leases(&store);
    let work = tokio::spawn(leases.with_lease("k", |_| std::future::pending::<()>()));
    sleep(SECOND).await;
    assert!(leases.force_release("k").await.unwrap());
    let start = Instant::now();
    let error = work.await.unwrap().unwrap_err();
    assert_eq!(error.lost().unwrap().reason, LossReason::Expired);
    assert!(start.elapsed() <= 10 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_keeps_no_values_says_so() {
    let leases = leases(&Arc::default());
    assert!(matches!(leases.write("v", "x", 1).await, Err(Error::Store { source: StoreError::Refused(_), .. })));
    assert!(matches!(leases.read("v").await, Err(Error::Store { source: StoreError::Refused(_), .. })));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_the_store_cannot_keep_is_refused_with_its_rule_before_anything_is_sent() {
    let store = Arc::<Shelf>::default();
    let leases = leases(&store);
    let refused = [
        leases.lease("a/b").acquire().await.map(drop),
        leases.lock("a/b").lock().await.map(drop),
        leases.inspect("a/b").await.map(drop),
        leases.force_release("a/b").await.map(drop),
    ];
    for refusal in refused {
        assert!(
            matches!(&refusal, Err(Error::Invalid(Invalid { rule, .. })) if rule.contains("no slash")),
            "{refusal:?}"
        );
    }
    assert!(store.rows().fences.is_empty());
}
