//! The promises about time, on virtual time.
use leasehold::{Clock, Error, LeaseState, Leases, LossReason, Wait, store::MemoryStore};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_day_of_renewals_keeps_the_lease_and_its_fence() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    let fence = lease.fence();
    for _ in 0..24 * 60 {
        sleep(60 * SECOND).await;
        assert!(lease.is_held());
        assert!(lease.valid_for() > 19 * SECOND);
    }
    assert_eq!(lease.state(), LeaseState::Held);
    assert_eq!(leases.inspect("k").await.unwrap().unwrap().fence, Some(fence));
    assert_eq!(lease.release().await.unwrap(), leasehold::Released::Released);
    assert_eq!(leases.inspect("k").await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn with_lease_gives_back_the_works_value_and_leaves_the_key_free() {
    let leases = Leases::in_memory();
    let got = leases
        .with_lease("k", |_cancel| async {
            sleep(100 * SECOND).await;
            7
        })
        .await
        .unwrap();
    assert_eq!(got, 7);
    assert_eq!(leases.inspect("k").await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn a_held_key_is_contended_and_says_who_holds_it() {
    let leases = Leases::in_memory();
    let _held = leases.lease("k").acquire().await.unwrap();
    let start = Instant::now();
    let error = leases.lease("k").wait(5 * SECOND).acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Contended { holder: Some(_), waited, .. } if *waited >= 5 * SECOND), "{error}");
    assert_eq!(start.elapsed(), 5 * SECOND);
    assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_lease_is_free_at_once() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    let first = lease.fence();
    drop(lease);
    let next = leases.lease("k").wait(SECOND).acquire().await.unwrap();
    assert!(next.fence() > first);
}

#[tokio::test(start_paused = true)]
async fn force_release_tells_the_holder() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    let token = lease.cancel_token().clone();
    assert!(leases.force_release("k").await.unwrap());
    token.cancelled().await;
    assert_eq!(lease.lost().await.reason, LossReason::Forced);
}

#[tokio::test(start_paused = true)]
async fn shutdown_stops_work_within_its_grace_and_releases() {
    let leases = Leases::in_memory();
    let polls = Arc::new(AtomicU64::new(0));
    let work = tokio::spawn({
        let polls = polls.clone();
        leases.with_lease("k", move |_| async move {
            loop {
                polls.fetch_add(1, Relaxed);
                sleep(SECOND / 10).await;
            }
        })
    });
    sleep(SECOND).await;
    let start = Instant::now();
    leases.shutdown().await;
    assert!(start.elapsed() <= 3 * SECOND + SECOND / 10, "{:?}", start.elapsed());
    let error: Error = work.await.unwrap().map(|_: ()| ()).unwrap_err();
    assert_eq!(error.lost().map(|lost| lost.reason.clone()), Some(LossReason::Shutdown));
    let seen = polls.load(Relaxed);
    sleep(10 * SECOND).await;
    assert_eq!(polls.load(Relaxed), seen);
    assert_eq!(leases.inspect("k").await.unwrap(), None);
    assert!(matches!(leases.lease("k").acquire().await, Err(Error::Shutdown)));
}

#[tokio::test(start_paused = true)]
async fn an_hours_suspension_ends_the_work_without_another_step() {
    let clock = Clock::tokio();
    let store = MemoryStore::with_clock(clock.clone());
    let leases = Leases::builder().clock(clock.clone()).build(store).unwrap();
    let steps = Arc::new(AtomicU64::new(0));
    let work = tokio::spawn({
        let steps = steps.clone();
        leases.with_lease("k", move |_| async move {
            loop {
                steps.fetch_add(1, Relaxed);
                sleep(SECOND * 5).await;
            }
        })
    });
    sleep(SECOND).await;
    clock.suspend(3600 * SECOND);
    let seen = steps.load(Relaxed);
    let error: Error = work.await.unwrap().map(|_: ()| ()).unwrap_err();
    assert!(error.lost().is_some());
    assert_eq!(steps.load(Relaxed), seen);
}

#[tokio::test(start_paused = true)]
async fn a_lock_counts_its_holds() {
    let leases = Leases::in_memory();
    let mut lock = leases.lock("k");
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
    let fence = lock.lock().await.unwrap();
    assert_eq!(lock.try_lock().await.unwrap(), Some(fence));
    assert_eq!(lock.hold_count(), 2);
    assert_eq!(leases.lock("k").try_lock().await.unwrap(), None);
    lock.unlock().await.unwrap();
    assert!(lock.is_locked().await.unwrap());
    lock.unlock().await.unwrap();
    assert!(!lock.is_locked().await.unwrap());
    let fence = lock.lock_for(2 * SECOND).await.unwrap();
    sleep(3 * SECOND).await;
    assert!(matches!(lock.lock().await, Err(Error::Lost(_))));
    assert!(matches!(lock.unlock().await, Err(Error::Lost(_))));
    assert!(lock.lock().await.unwrap() > fence);
}

#[tokio::test(start_paused = true)]
async fn no_wait_asks_once() {
    let leases = Leases::in_memory();
    let _held = leases.lease("k").acquire().await.unwrap();
    let start = Instant::now();
    assert!(leases.lease("k").wait(Wait::No).acquire().await.unwrap_err().is_contended());
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_comes_when_a_renewal_falls_due_waits_for_nothing() {
    let clock = Clock::tokio();
    let leases = Leases::builder().clock(clock.clone()).build(MemoryStore::with_clock(clock.clone())).unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    // The renewal is overdue, and the watchdog has not looked yet.
    clock.suspend(15 * SECOND);
    let start = Instant::now();
    lease.release().await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
}
