//! What it has found, each as a test of its own.
#[path = "../support/faults.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod faults;
use faults::{Fault, Faulty, Verb};
use leasehold::{Clock, Leases, LossReason, store::MemoryStore};
use std::{sync::Arc, time::Duration};
use tokio::time::sleep;

const MS: Duration = Duration::from_millis(1);

/// It was renewed as fast as the answers came: an answer that moves no deadline did not move the next renewal either.
#[tokio::test(start_paused = true)]
async fn a_lease_that_has_all_the_time_it_may_have_is_renewed_no_more_often_than_others() {
    let clock = Clock::tokio();
    let (store, faults) = Faulty::new(MemoryStore::with_clock(clock.clone()));
    faults.always(Verb::Renew, Fault::DelayReply(MS));
    let leases = Leases::builder().clock(clock).ttl(3000 * MS).build(store).unwrap();
    let lease = leases.lease("k").max_hold(3500 * MS).acquire().await.unwrap();
    assert_eq!(lease.lost().await.reason, LossReason::MaxHold);
    // One a second, the first of them early.
    assert!(faults.count(Verb::Renew) <= 4, "{} renewals", faults.count(Verb::Renew));
}

/// A grant is dated from the last answer in the line. When that is long ago, as good as nothing may be left of it, and the
/// lease was over before its first renewal was answered.
#[tokio::test(start_paused = true)]
async fn a_grant_that_is_nearly_over_is_asked_for_again_before_a_lease_is_made_of_it() {
    let clock = Clock::tokio();
    let (store, faults) = Faulty::new(MemoryStore::with_clock(clock.clone()));
    let store = Arc::new(store);
    let leases = || Leases::builder().clock(clock.clone()).ttl(3000 * MS).build(store.clone()).unwrap();
    let (here, there) = (leases(), leases());
    let held = here.lease("k").acquire().await.unwrap();
    let waiter = tokio::spawn(there.lease("k").acquire());
    sleep(MS).await;
    faults.always(Verb::Claim, Fault::LoseReply);
    sleep(2500 * MS).await;
    faults.always(Verb::Claim, Fault::Pass);
    faults.always(Verb::Renew, Fault::DelayReply(400 * MS));
    held.release().await.unwrap();
    let lease = waiter.await.unwrap().unwrap();
    assert!(lease.valid_for() > 2900 * MS, "{:?}", lease.valid_for());
    sleep(10_000 * MS).await;
    assert!(lease.is_held());
}

/// The watchdog's nap outlasts a suspension by up to a second, and a lease that was taken meanwhile did not end the nap: it
/// was due after the watchdog meant to look.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_taken_right_after_a_suspension_is_renewed_in_time() {
    let clock = Clock::tokio();
    let store = MemoryStore::with_clock(clock.clone());
    let leases = Leases::builder().clock(clock.clone()).ttl(600 * MS).build(store).unwrap();
    for suspended in [950 * MS, 2000 * MS] {
        leases.lease("before").acquire().await.unwrap().release().await.unwrap();
        sleep(MS).await;
        clock.suspend(suspended);
        let lease = leases.lease("after").acquire().await.unwrap();
        sleep(10_000 * MS).await;
        assert!(lease.is_held(), "{:?}", lease.state());
        lease.release().await.unwrap();
    }
}
