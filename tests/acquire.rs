//! Acquiring: what a wait ends in, and what an acquisition leaves behind wherever it is dropped.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Error, Lease, LeaseRequest, LossReason, StoreError, Wait};
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Waker},
};
use support::{
    faults::{Fault, Verb},
    scene::{SECOND, Scene, down, ms, scene, scene_with},
};
use tokio::time::sleep;

type Acquiring = Pin<Box<dyn Future<Output = leasehold::Result<Lease>>>>;

fn acquiring(request: &LeaseRequest) -> Acquiring {
    Box::pin(request.clone().acquire())
}

/// Polls it that often, a while apart, and drops it, or the lease that came of it.
async fn polled_and_dropped(mut acquiring: Acquiring, polls: u64) {
    let mut context = Context::from_waker(Waker::noop());
    for n in 0..polls {
        if acquiring.as_mut().poll(&mut context).is_ready() {
            return;
        }
        // Now shorter than anything that takes its time here, now longer.
        sleep(ms(1 + n * 37 % 400)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquisition_dropped_at_any_point_leaves_the_key_free_and_is_never_renewed() {
    let faults = [
        Fault::Pass,
        Fault::LoseRequest,
        Fault::LoseReply,
        Fault::DelayRequest(ms(300)),
        Fault::DelayRequest(3 * SECOND),
        Fault::DelayRequest(5 * SECOND),
        Fault::DelayReply(ms(300)),
        Fault::DelayReply(3 * SECOND),
        Fault::FailAfter(down()),
    ];
    for fault in faults {
        for polls in 0..40 {
            let scene = scene();
            scene.faults.next(Verb::Claim, [fault.clone()]);
            polled_and_dropped(acquiring(&scene.leases.lease("k")), polls).await;
            let dropped = scene.at();
            let claims = scene.store.all(Verb::Claim);
            let unanswered = claims.first().is_some_and(|first| first.over == Some(dropped));
            sleep(ms(1)).await;
            // Only what is still on its way can take the key after the release.
            let on_its_way = matches!(fault, Fault::DelayRequest(d) if dropped < d);
            assert!(scene.store.is_free("k").await || on_its_way, "{fault:?}, {polls} polls");
            let releases = scene.store.count(Verb::Release);
            assert_eq!(releases, usize::from(!claims.is_empty()), "{fault:?}, {polls} polls");
            sleep(8 * SECOND).await;
            for _ in 0..10 {
                assert!(scene.store.is_free("k").await, "{fault:?}, {polls} polls");
                sleep(4 * SECOND).await;
            }
            if unanswered && polls == 1 && fault != Fault::Pass {
                assert_eq!(scene.store.count(Verb::Release), 2, "{fault:?}");
            }
            if matches!(fault, Fault::Pass) {
                assert_eq!(scene.store.count(Verb::Release), usize::from(polls > 0));
            }
            assert_eq!(scene.store.count(Verb::Renew), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_carried_out_after_its_release_is_released_again_and_until_then_delays_others_no_longer_than_two_windows()
 {
    let scene = scene();
    scene.faults.next(Verb::Claim, [Fault::DelayRequest(3 * SECOND)]);
    polled_and_dropped(acquiring(&scene.leases.lease("k")), 1).await;
    sleep(ms(3500)).await;
    assert!(!scene.store.is_free("k").await);
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    assert!(scene.at() <= ms(9200), "{:?}", scene.at());
    assert!(lease.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_dropped_at_any_point_leaves_the_line_and_does_not_hold_up_the_next() {
    for polls in (0..60).step_by(3) {
        let scene = scene();
        let held = scene.leases.lease("k").acquire().await.unwrap();
        polled_and_dropped(acquiring(&scene.leases.lease("k")), polls).await;
        sleep(ms(1)).await;
        assert_eq!(scene.store.holding("k").await.unwrap().waiters, 0, "{polls} polls");
        held.release().await.unwrap();
        assert!(scene.leases.lease("k").try_acquire().await.unwrap().is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_whose_earlier_claim_is_still_on_its_way_is_released_again_once_that_can_come_no_more() {
    let scene = scene();
    scene.faults.next(Verb::Claim, [Fault::DelayRequest(ms(3900))]);
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    assert_eq!(scene.store.count(Verb::Claim), 2);
    lease.release().await.unwrap();
    assert!(scene.at() < 2 * SECOND);
    sleep(10 * SECOND).await;
    assert!(scene.store.is_free("k").await);
    assert_eq!(scene.store.count(Verb::Renew), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_answered_too_late_to_be_of_use_is_sent_again() {
    let scene = scene();
    scene.faults.next(Verb::Claim, [Fault::DelayReply(ms(500))]);
    let acquiring = tokio::spawn(scene.leases.lease("k").wait(Wait::Forever).acquire());
    scene.faults.until_sent(Verb::Claim, 1).await;
    // By the answer, 27 s have gone by: the token would fire at once.
    scene.clock.suspend(27 * SECOND);
    let lease = acquiring.await.unwrap().unwrap();
    assert!(lease.valid_for() > 29 * SECOND, "{:?}", lease.valid_for());
    assert!(scene.store.count(Verb::Claim) >= 2);
}

#[tokio::test(start_paused = true)]
async fn a_try_that_is_answered_too_late_is_no_contention() {
    let scene = scene();
    scene.faults.next(Verb::Claim, [Fault::DelayReply(ms(500))]);
    let acquiring = tokio::spawn(scene.leases.lease("k").try_acquire());
    scene.faults.until_sent(Verb::Claim, 1).await;
    scene.clock.suspend(28 * SECOND);
    let error = acquiring.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Store { source: StoreError::Unavailable(_), .. }), "{error}");
    sleep(SECOND).await;
    assert!(scene.store.is_free("k").await);
}

async fn error_of(scene: &Scene, wait: impl Into<Wait>) -> Error {
    scene.leases.lease("k").wait(wait).acquire().await.unwrap_err()
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_in_time_however_the_store_fails_and_says_so() {
    for fault in [Fault::Fail(down()), Fault::FailAfter(down()), Fault::LoseRequest, Fault::DelayRequest(60 * SECOND)] {
        for wait in [3, 20, 45] {
            let scene = scene();
            scene.faults.always(Verb::Claim, fault.clone());
            let error = error_of(&scene, wait * SECOND).await;
            assert!(matches!(error, Error::Store { attempted: "acquire", .. }), "{error}");
            assert_eq!(scene.at(), wait * SECOND, "{fault:?}");
        }
        let scene = scene();
        scene.faults.always(Verb::Claim, fault.clone());
        assert!(matches!(error_of(&scene, Wait::No).await, Error::Store { .. }));
        assert!(scene.at() <= 2 * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn trouble_while_waiting_is_met_with_growing_pauses_that_differ() {
    let mut firsts = Vec::new();
    for _ in 0..5 {
        let scene = scene();
        scene.faults.always(Verb::Claim, Fault::Fail(down()));
        error_of(&scene, 20 * SECOND).await;
        let asked: Vec<_> = scene.store.all(Verb::Claim).iter().map(|claim| claim.asked).collect();
        let pauses: Vec<_> = asked.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses[0] <= ms(17), "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause >= ms(2) && *pause <= ms(1001)), "{pauses:?}");
        assert!(pauses[8..pauses.len() - 1].iter().all(|pause| *pause >= ms(499)), "{pauses:?}");
        assert!(asked.len() < 50, "{}", asked.len());
        firsts.push(asked[6]);
    }
    firsts.dedup();
    assert!(firsts.len() > 1);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_recovers_is_noticed_within_a_poll_interval() {
    for fault in [Fault::Fail(down()), Fault::LoseRequest] {
        let scene = scene();
        scene.faults.always(Verb::Claim, fault);
        let acquiring = tokio::spawn(scene.leases.lease("k").acquire());
        sleep(13 * SECOND).await;
        scene.faults.heal();
        drop(acquiring.await.unwrap().unwrap());
        assert!(scene.at() <= 14 * SECOND + ms(2), "{:?}", scene.at());
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_ends_the_wait_at_once() {
    let scene = scene();
    scene.faults.always(Verb::Claim, Fault::Fail(StoreError::refused("no permission")));
    let error = error_of(&scene, Wait::Forever).await;
    assert!(matches!(&error, Error::Store { source: StoreError::Refused(_), .. }), "{error}");
    assert_eq!((scene.at(), scene.store.count(Verb::Claim)), (ms(0), 1));
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_while_the_last_claim_travels_is_still_contention() {
    let scene = scene();
    let _held = scene.leases.lease("k").acquire().await.unwrap();
    scene.faults.always(Verb::Claim, Fault::DelayReply(ms(60)));
    for n in 0..60 {
        let began = scene.at();
        let error = error_of(&scene, SECOND + ms(20 * n)).await;
        assert!(error.is_contended(), "{error}");
        assert_eq!(scene.at() - began, SECOND + ms(20 * n));
    }
}

#[tokio::test(start_paused = true)]
async fn no_closure_is_called_without_a_lease() {
    let scene = scene_with(|all| all.wait(5 * SECOND));
    let _held = scene.leases.lease("k").acquire().await.unwrap();
    let mut called = false;
    assert!(
        scene
            .leases
            .with_lease("k", |_| {
                called = true;
                async {}
            })
            .await
            .unwrap_err()
            .is_contended()
    );
    scene.faults.always(Verb::Claim, Fault::Fail(down()));
    assert!(
        scene
            .leases
            .with_lease("l", |_| {
                called = true;
                async {}
            })
            .await
            .is_err()
    );
    assert!(!called);
}

#[tokio::test(start_paused = true)]
async fn a_wait_longer_than_the_ttl_sees_the_key_free_when_its_holder_is_gone() {
    let scene = scene();
    scene.faults.always(Verb::Renew, Fault::LoseRequest);
    scene.faults.always(Verb::Release, Fault::LoseRequest);
    let held = scene.leases.lease("k").acquire().await.unwrap();
    let next = scene.leases.lease("k").wait(60 * SECOND).acquire().await.unwrap();
    assert!(next.fence() > held.fence());
    assert!((30 * SECOND..ms(30_010)).contains(&scene.at()), "{:?}", scene.at());
}

/// A claim that was never answered travels for 3.9 s; a later one of the same owner got the lease. Somebody deletes the key,
/// and the old claim takes it again, under a fence that nobody here knows. The holder learns "taken" by its next renewal,
/// and must not take that for somebody else's.
#[tokio::test(start_paused = true)]
async fn a_key_that_an_old_claim_of_ours_took_again_is_released_however_late_that_shows() {
    for _ in 0..20 {
        let scene = scene();
        scene.faults.next(Verb::Claim, [Fault::DelayRequest(ms(3900))]);
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        sleep(SECOND).await;
        scene.store.delete("k").await;
        let lost = lease.lost().await;
        assert_eq!(lost.reason, LossReason::Taken, "by ourselves");
        drop(lease);
        sleep(9 * SECOND).await;
        assert!(scene.store.is_free("k").await, "held by nobody");
    }
}
