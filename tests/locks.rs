//! Redisson-style handles, when things go wrong under them.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Error, LossReason, StoreError};
use support::{
    faults::{Fault, Verb},
    scene::{SECOND, ms, scene},
};
use tokio::time::{sleep, timeout};

#[tokio::test(start_paused = true)]
async fn unlocking_what_is_not_held_sends_nothing() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
    let mut other = scene.leases.lock("k");
    other.lock().await.unwrap();
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
    assert_eq!(lock.try_lock().await.unwrap(), None);
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
    assert_eq!(scene.store.count(Verb::Release), 0);
    assert!(other.is_held());
}

#[tokio::test(start_paused = true)]
async fn only_the_last_unlock_releases_and_re_entry_sends_nothing() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    let fence = lock.lock().await.unwrap();
    assert_eq!(lock.lock_for(SECOND).await.unwrap(), fence);
    assert_eq!(lock.try_lock_for(SECOND).await.unwrap(), Some(fence));
    assert_eq!((scene.store.count(Verb::Claim), lock.hold_count()), (1, 3));
    // What was locked first was to be renewed, and still is.
    sleep(100 * SECOND).await;
    for left in [2, 1, 0] {
        assert!(lock.is_held());
        assert_eq!(scene.store.count(Verb::Release), 0);
        lock.unlock().await.unwrap();
        assert_eq!(lock.hold_count(), left);
    }
    assert_eq!(scene.store.count(Verb::Release), 1);
    assert!(lock.lock().await.unwrap() > fence);
}

#[tokio::test(start_paused = true)]
async fn a_lost_handle_is_not_locked_again_before_it_was_unlocked_and_then_gets_a_larger_fence() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    let fence = lock.lock().await.unwrap();
    lock.lock().await.unwrap();
    let view = lock.view().unwrap();
    let thief = scene.store.give_away("k").await;
    assert_eq!(view.lost().await.reason, LossReason::Taken);
    assert_eq!((lock.is_held(), lock.hold_count(), lock.fence()), (false, 0, None));
    assert!(lock.cancel_token().unwrap().is_cancelled());
    assert!(matches!(lock.lock().await, Err(Error::Lost(_))));
    assert!(matches!(lock.try_lock().await, Err(Error::Lost(_))));
    assert!(matches!(lock.view(), Err(Error::Lost(_))));
    // However often it was locked, one unlock is the end of it, and touches nothing of the thief's.
    assert!(matches!(lock.unlock().await, Err(Error::Lost(_))));
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
    sleep(SECOND).await;
    assert_eq!(scene.store.holding("k").await.unwrap().fence, Some(thief));
    assert!(lock.force_unlock().await.unwrap());
    assert!(lock.lock().await.unwrap() > thief.max(fence));
}

#[tokio::test(start_paused = true)]
async fn an_unlock_dropped_midway_goes_on_and_leaves_a_handle_that_holds_nothing() {
    for fault in [Fault::LoseRequest, Fault::LoseReply, Fault::DelayRequest(SECOND)] {
        let scene = scene();
        let mut lock = scene.leases.lock("k");
        let fence = lock.lock().await.unwrap();
        scene.faults.next(Verb::Release, [fault]);
        assert!(timeout(SECOND / 2, lock.unlock()).await.is_err());
        assert_eq!((lock.is_held(), lock.hold_count()), (false, 0));
        assert!(timeout(SECOND, lock.lock()).await.unwrap().unwrap() > fence);
        sleep(100 * SECOND).await;
        assert!(lock.is_held());
    }
}

#[tokio::test(start_paused = true)]
async fn an_unlock_that_fails_says_so_and_leaves_a_handle_that_can_be_locked_again() {
    for (fault, passes) in [(Fault::LoseRequest, true), (Fault::Fail(StoreError::refused("no permission")), false)] {
        let scene = scene();
        let mut lock = scene.leases.lock("k");
        let fence = lock.lock().await.unwrap();
        scene.faults.always(Verb::Release, fault);
        match lock.unlock().await.unwrap_err() {
            Error::Store { source, .. } => assert_eq!(source.may_pass(), passes),
            other => panic!("{other}"),
        }
        assert_eq!(lock.hold_count(), 0);
        assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));
        scene.faults.heal();
        // Freed in the background, or by its TTL: nobody renews it.
        assert!(timeout(40 * SECOND, lock.lock()).await.unwrap().unwrap() > fence);
    }
}

#[tokio::test(start_paused = true)]
async fn an_unlock_of_what_went_unnoticed_is_lost_and_touches_nobody_elses() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    lock.lock().await.unwrap();
    let thief = scene.store.give_away("k").await;
    assert_eq!(lock.unlock().await.unwrap_err().lost().unwrap().reason, LossReason::Expired);
    assert_eq!(scene.store.holding("k").await.unwrap().fence, Some(thief));
}

#[tokio::test(start_paused = true)]
async fn a_handle_that_is_dropped_releases_however_often_it_was_locked() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    lock.lock().await.unwrap();
    lock.lock().await.unwrap();
    drop(lock);
    sleep(ms(1)).await;
    assert!(scene.store.is_free("k").await);
}

#[tokio::test(start_paused = true)]
async fn a_handle_moves_to_another_task_with_what_it_holds() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    lock.lock().await.unwrap();
    tokio::spawn(async move { lock.unlock().await }).await.unwrap().unwrap();
    assert!(scene.store.is_free("k").await);
}

#[tokio::test(start_paused = true)]
async fn one_handle_used_a_thousand_times_remembers_nothing_of_the_last_time() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    let mut last = 0;
    for n in 0..1000 {
        let fence = lock.lock().await.unwrap();
        assert!(fence > last && lock.is_held());
        last = fence;
        sleep(SECOND * (n % 50)).await;
        lock.unlock().await.unwrap();
        sleep(SECOND * (n % 7) * 5).await;
    }
    let mut secrets: Vec<_> = scene.store.all(Verb::Claim).into_iter().flat_map(|claim| claim.secrets).collect();
    secrets.sort();
    secrets.dedup();
    assert_eq!(secrets.len(), 1000);
}

#[tokio::test(start_paused = true)]
async fn anybody_can_see_whether_and_for_how_long_a_key_is_held() {
    let scene = scene();
    let (mut lock, onlooker) = (scene.leases.lock("k"), scene.leases.lock("k"));
    assert_eq!((onlooker.is_locked().await.unwrap(), onlooker.remaining_ttl().await.unwrap()), (false, None));
    lock.lock().await.unwrap();
    sleep(SECOND).await;
    assert!(onlooker.is_locked().await.unwrap() && !onlooker.is_held());
    assert_eq!(onlooker.remaining_ttl().await.unwrap(), Some(29 * SECOND));
    assert!(!scene.leases.lock("other").force_unlock().await.unwrap());
}
