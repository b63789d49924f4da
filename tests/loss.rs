//! When a lease is lost, and when it is not: to the millisecond, on virtual time.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Error, LeaseState, Leases, LossReason};
use std::time::Duration;
use support::{
    faults::{Fault, Verb},
    scene::{SECOND, Scene, Seen, Steps, down, ms, scene, scene_with},
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};

/// For a TTL of 30 s and nothing but the acquisition at 0.
const CANCELLED: Duration = ms(26_698);
const OVER: Duration = ms(29_698);

fn reason<T>(result: Result<T, Error>) -> LossReason {
    match result {
        Err(Error::Lost(lost)) => lost.reason,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("the work ended by itself"),
    }
}

/// Work under `with_lease` that never ends by itself; when its token fired; and when it came back with which loss.
fn endless(scene: &Scene, steps: &Steps) -> (JoinHandle<Duration>, JoinHandle<(Duration, LossReason)>) {
    let (tell, told) = tokio::sync::oneshot::channel();
    let (start, steps) = (scene.start, steps.clone());
    let leased = scene.leases.with_lease("k", async move |cancel| {
        tell.send(cancel).unwrap();
        steps.take::<()>().await;
    });
    let back = tokio::spawn(async move {
        let end = reason(leased.await);
        (start.elapsed(), end)
    });
    let fired = tokio::spawn(async move {
        told.await.unwrap().cancelled().await;
        start.elapsed()
    });
    (fired, back)
}

#[tokio::test(start_paused = true)]
async fn whatever_swallows_the_renewals_the_token_fires_a_grace_before_the_end_and_the_work_stops_at_it() {
    let faults = [
        Fault::LoseRequest,
        Fault::LoseReply,
        Fault::HoldRequest,
        Fault::HoldReply,
        Fault::DelayRequest(40 * SECOND),
        Fault::DelayReply(40 * SECOND),
        Fault::Fail(down()),
        Fault::FailAfter(down()),
    ];
    for fault in faults {
        let scene = scene();
        scene.faults.always(Verb::Renew, fault.clone());
        let steps = Steps::new(&scene);
        let (fired, back) = endless(&scene, &steps);
        assert_eq!(fired.await.unwrap(), CANCELLED, "{fault:?}");
        let (at, reason) = back.await.unwrap();
        assert_eq!(at, OVER, "{fault:?}");
        assert!(matches!(reason, LossReason::Deadline { last: Some(_), .. }), "{fault:?}: {reason:?}");
        assert!(steps.last() < OVER && steps.last() >= OVER - ms(100), "{fault:?}: {:?}", steps.last());
        assert!(steps.dropped().unwrap() <= OVER, "{fault:?}");
        let polls = steps.count();
        sleep(100 * SECOND).await;
        assert_eq!(steps.count(), polls, "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_attempt_always_fits_however_the_first_goes() {
    for fault in [Fault::LoseRequest, Fault::LoseReply, Fault::Fail(down())] {
        let scene = scene_with(|all| all.ttl(SECOND).attempt(SECOND / 3));
        scene.faults.next(Verb::Renew, [fault]);
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        sleep(10 * SECOND).await;
        assert!(lease.is_held() && !lease.cancel_token().is_cancelled());
    }
}

#[tokio::test(start_paused = true)]
async fn one_renewal_that_fails_is_seen_as_risk_and_no_work_notices() {
    let faults = [
        Fault::LoseRequest,
        Fault::LoseReply,
        Fault::HoldReply,
        Fault::DelayRequest(5 * SECOND),
        Fault::DelayReply(5 * SECOND),
        Fault::Fail(down()),
        Fault::FailAfter(down()),
        Fault::Fail(leasehold::StoreError::refused("out of memory")),
    ];
    for fault in faults {
        let scene = scene();
        scene.faults.next(Verb::Renew, [fault.clone()]);
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        let mut states = lease.watch();
        let seen = tokio::spawn(async move {
            let mut seen = Vec::new();
            while states.changed().await.is_ok() && seen.len() < 10 {
                seen.push(states.borrow_and_update().clone());
            }
            seen
        });
        let work = async {
            sleep(600 * SECOND).await;
            lease.cancel_token().is_cancelled()
        };
        assert!(!lease.guard(work).await.unwrap(), "{fault:?}");
        lease.release().await.unwrap();
        // Once at risk, once well again, and not another word until the end.
        assert_eq!(seen.await.unwrap(), [LeaseState::AtRisk, LeaseState::Held, LeaseState::Released], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_gone_or_taken_ends_the_work_at_the_next_renewal_without_a_grace() {
    for taken in [false, true] {
        let scene = scene();
        let steps = Steps::new(&scene);
        let (fired, back) = endless(&scene, &steps);
        sleep(SECOND).await;
        let fence = if taken { Some(scene.store.give_away("k").await) } else { None };
        if !taken {
            scene.store.delete("k").await;
        }
        let (at, reason) = back.await.unwrap();
        assert_eq!(fired.await.unwrap(), at);
        let renewals = scene.store.all(Verb::Renew);
        assert_eq!(renewals.iter().map(|renewal| renewal.asked).collect::<Vec<_>>(), [at]);
        assert!((5 * SECOND..=10 * SECOND).contains(&at), "{at:?}");
        assert_eq!(steps.dropped(), Some(at));
        assert_eq!(reason, if taken { LossReason::Taken } else { LossReason::Expired });
        sleep(100 * SECOND).await;
        assert_eq!(scene.store.holding("k").await.and_then(|holding| holding.fence), fence);
        // What is somebody else's is neither renewed nor released any more.
        assert_eq!((scene.store.count(Verb::Renew), scene.store.count(Verb::Release)), (1, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_force_release_that_the_store_tells_of_ends_the_work_at_once() {
    let leases = Leases::in_memory();
    let start = Instant::now();
    let work = tokio::spawn(leases.with_lease("k", |_| std::future::pending::<()>()));
    sleep(SECOND).await;
    assert!(leases.force_release("k").await.unwrap());
    assert_eq!(reason(work.await.unwrap()), LossReason::Forced);
    assert_eq!(start.elapsed(), SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_success_after_the_token_fired_revives_nothing() {
    let scene = scene();
    scene.faults.always(Verb::Renew, Fault::HoldReply);
    let steps = Steps::new(&scene);
    let (fired, back) = endless(&scene, &steps);
    assert_eq!(fired.await.unwrap(), CANCELLED);
    sleep(ms(500)).await;
    scene.faults.heal();
    assert_eq!(back.await.unwrap().0, OVER);
}

#[tokio::test(start_paused = true)]
async fn a_success_on_its_way_as_the_token_fires_revives_nothing() {
    // Sent before the token fires, as late as can be; carried out and answered in the grace, and after it.
    for delay in (5..70).map(|n| ms(50 * n)) {
        let scene = scene();
        scene.faults.always(Verb::Renew, Fault::LoseRequest);
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        sleep_until(scene.start + CANCELLED - ms(200)).await;
        scene.faults.always(Verb::Renew, Fault::DelayRequest(delay));
        lease.lost().await;
        assert_eq!(scene.at(), OVER, "{delay:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_success_in_a_list_whose_other_leases_still_wait_for_it_revives_nothing_either() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    // So many that whatever is sent for `k` travels with one of them, and they have all the time in the world.
    let mut others = Vec::new();
    for n in 0..2000 {
        others.push(scene.leases.lease(format!("k{n}")).ttl(60 * SECOND).acquire().await.unwrap());
    }
    scene.faults.always(Verb::Renew, Fault::LoseRequest);
    sleep_until(scene.start + ms(17_700)).await;
    scene.faults.always(Verb::Renew, Fault::DelayReply(9 * SECOND));
    lease.lost().await;
    assert_eq!(scene.at(), OVER);
    let last = |list: &Seen| list.keys.len() > 1 && list.keys.iter().any(|key| key.as_str() == "k");
    let answered_in_the_grace = |list: &&Seen| list.over.is_some_and(|over| over > CANCELLED && over < OVER);
    assert!(scene.store.all(Verb::Renew).iter().filter(answered_in_the_grace).any(last));
}

#[tokio::test(start_paused = true)]
async fn an_answer_counts_from_before_its_request_was_sent() {
    let scene = scene();
    scene.faults.next(Verb::Claim, [Fault::DelayReply(SECOND)]);
    scene.faults.always(Verb::Renew, Fault::DelayReply(ms(1500)));
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    assert_eq!(lease.valid_for(), OVER - SECOND);
    for n in 1..10 {
        scene.faults.until_sent(Verb::Renew, n).await;
        let before = lease.valid_for();
        sleep(ms(1499)).await;
        assert_eq!(lease.valid_for(), before - ms(1499));
        sleep(ms(2)).await;
        assert_eq!(lease.valid_for(), OVER - ms(1501));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_travels_long_counts_from_its_send_too() {
    let scene = scene();
    scene.faults.next(Verb::Claim, [Fault::DelayRequest(3 * SECOND)]);
    let lease = scene.leases.lease("k").wait(leasehold::Wait::No).attempt(5 * SECOND).acquire().await.unwrap();
    assert_eq!(lease.valid_for(), OVER - 3 * SECOND);
    assert_eq!(scene.store.holding("k").await.unwrap().remaining, Some(30 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn the_first_renewal_is_dated_from_the_send_of_a_slow_acquisition() {
    let scene = scene_with(|all| all.attempt(10 * SECOND));
    scene.faults.next(Verb::Claim, [Fault::DelayReply(ms(9900))]);
    let lease = scene.leases.lease("k").wait(leasehold::Wait::No).acquire().await.unwrap();
    sleep(60 * SECOND).await;
    assert!(lease.is_held());
    assert!(scene.store.all(Verb::Renew)[0].asked <= 10 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_poll_that_overran_validity_is_a_loss_though_it_returned() {
    let scene = scene();
    let clock = scene.clock.clone();
    let result = scene.leases.with_lease("k", async |_| clock.suspend(OVER)).await;
    assert!(matches!(reason(result), LossReason::Deadline { .. }));
    let clock = scene.clock.clone();
    let result = scene.leases.with_lease("l", async |_| clock.suspend(OVER - ms(1))).await;
    assert!(result.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_starved_watchdog_costs_neither_the_token_nor_the_end() {
    // No task but this one runs from here on.
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    let (token, states) = (lease.cancel_token().clone(), lease.watch());
    scene.clock.suspend(CANCELLED - ms(1));
    lease.ensure_held().unwrap();
    assert!(!token.is_cancelled());
    scene.clock.suspend(ms(1));
    lease.ensure_held().unwrap();
    assert!(token.is_cancelled());
    scene.clock.suspend(OVER - CANCELLED - ms(1));
    assert!(lease.is_held());
    assert_eq!(lease.valid_for(), ms(1));
    scene.clock.suspend(ms(1));
    assert!(lease.ensure_held().unwrap_err().lost().is_some());
    assert!(!lease.is_held());
    assert_eq!(lease.valid_for(), Duration::ZERO);
    assert!(matches!(*states.borrow(), LeaseState::Lost(LossReason::Deadline { last: None, .. })));
}

#[test]
fn a_guard_ends_on_its_own_when_the_watchdogs_runtime_is_gone() {
    let paused = || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let (scene, lease) = paused().block_on(async {
        let scene = scene();
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        (scene, lease)
    });
    let fired = paused().block_on(async {
        let token = lease.cancel_token().clone();
        let start = Instant::now();
        let fired = tokio::spawn(async move {
            token.cancelled().await;
            start.elapsed()
        });
        // In a task of its own, whose waker stays the same: its timer has to ring for the token, and once more for the end.
        let guarded = tokio::spawn(lease.guard(std::future::pending::<()>()));
        let end = timeout(60 * SECOND, guarded).await.unwrap().unwrap();
        assert!(matches!(reason(end), LossReason::Deadline { .. }));
        (fired.await.unwrap(), start.elapsed())
    });
    // The clocks of two runtimes are a little apart.
    assert!(fired.0 <= CANCELLED && fired.0 > CANCELLED - SECOND, "{fired:?}");
    assert!(fired.1 <= OVER && fired.1 > OVER - SECOND, "{fired:?}");
    drop(scene);
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_moves_to_another_task_is_woken_there() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    let mut guard = Box::pin(lease.guard(std::future::pending::<()>()));
    assert!(timeout(SECOND, guard.as_mut()).await.is_err());
    let work = tokio::spawn(guard);
    sleep(SECOND).await;
    let start = Instant::now();
    assert!(leases.force_release("k").await.unwrap());
    assert_eq!(reason(timeout(60 * SECOND, work).await.unwrap().unwrap()), LossReason::Forced);
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn max_hold_fires_the_token_a_grace_before_and_drops_the_work_at_it() {
    let scene = scene_with(|all| all.max_hold(100 * SECOND));
    let steps = Steps::new(&scene);
    let (fired, back) = endless(&scene, &steps);
    assert_eq!(fired.await.unwrap(), 97 * SECOND);
    let (at, reason) = back.await.unwrap();
    assert_eq!((at, reason), (100 * SECOND, LossReason::MaxHold));
    assert!(steps.last() < 100 * SECOND && steps.dropped() == Some(100 * SECOND));
    sleep(ms(1)).await;
    assert!(scene.store.is_free("k").await);
    // Renewed each 10 s until nothing more can be gained.
    assert!(scene.store.count(Verb::Renew) <= 11, "{}", scene.store.count(Verb::Renew));
}

#[tokio::test(start_paused = true)]
async fn a_max_hold_shorter_than_the_ttl_needs_no_renewal() {
    let scene = scene_with(|all| all.max_hold(20 * SECOND));
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    assert_eq!(lease.lost().await.reason, LossReason::MaxHold);
    assert_eq!((scene.at(), scene.store.count(Verb::Renew)), (20 * SECOND, 0));
}

#[tokio::test(start_paused = true)]
async fn after_an_outage_in_which_the_lease_expired_the_same_key_is_acquired_and_renewed_again() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    for verb in [Verb::Claim, Verb::Renew, Verb::Release] {
        scene.faults.always(verb, Fault::LoseRequest);
    }
    assert!(matches!(lease.lost().await.reason, LossReason::Deadline { .. }));
    scene.faults.heal();
    let next = scene.leases.lease("k").acquire().await.unwrap();
    assert!(next.fence() > lease.fence());
    drop(lease);
    sleep(300 * SECOND).await;
    assert!(next.is_held());
}
