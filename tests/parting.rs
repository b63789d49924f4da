//! How leases end by their holder's doing: released, dropped, aborted, panicked, shut down. And what stays: nothing.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Error, LeaseState, LossReason, Released, StoreError};
use std::{future::pending, panic::AssertUnwindSafe, pin::pin, task::Poll};
use support::{
    faults::{Fault, Verb},
    scene::{SECOND, Scene, Steps, down, ms, scene, scene_with},
};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    time::{sleep, timeout},
};

fn paused() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// The key is free soon, is never renewed again, and exchanges did not overlap.
async fn assert_ended(scene: &Scene) {
    sleep(ms(1)).await;
    assert!(scene.store.is_free("k").await);
    let renewals = scene.store.count(Verb::Renew);
    sleep(100 * SECOND).await;
    assert_eq!(scene.store.count(Verb::Renew), renewals);
    assert!(scene.store.is_free("k").await);
    scene.store.assert_none_overlap();
}

#[tokio::test(start_paused = true)]
async fn a_release_frees_the_key_in_one_exchange_and_says_so() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    let view = lease.view();
    assert_eq!(lease.release().await.unwrap(), Released::Released);
    assert_eq!((view.state(), view.is_held()), (LeaseState::Released, false));
    assert!(view.cancel_token().is_cancelled());
    assert_eq!(view.lost().await.reason, LossReason::Released);
    assert_ended(&scene).await;
    assert_eq!((scene.store.count(Verb::Claim), scene.store.count(Verb::Release)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_release_of_what_went_unnoticed_says_that_it_was_gone_and_touches_nobody_elses() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    let fence = scene.store.give_away("k").await;
    assert_eq!(lease.release().await.unwrap(), Released::AlreadyGone);
    assert_eq!(scene.store.holding("k").await.unwrap().fence, Some(fence));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_was_carried_out_and_not_answered_counts_as_released_when_asked_again() {
    for fault in [Fault::LoseReply, Fault::FailAfter(down())] {
        let scene = scene();
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        scene.faults.next(Verb::Release, [fault]);
        assert_eq!(lease.release().await.unwrap(), Released::Released);
        assert_ended(&scene).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_nobody_answers_returns_unconfirmed_and_goes_on_in_the_background() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    scene.faults.always(Verb::Release, Fault::LoseRequest);
    assert_eq!(lease.release().await.unwrap(), Released::Unconfirmed);
    assert_eq!(scene.at(), 4 * SECOND);
    assert!(!scene.store.is_free("k").await);
    scene.faults.heal();
    sleep(5 * SECOND).await;
    assert_ended(&scene).await;
}

#[tokio::test(start_paused = true)]
async fn a_background_release_gives_up_when_the_ttl_has_freed_the_key() {
    let scene = scene();
    scene.faults.always(Verb::Release, Fault::LoseRequest);
    drop(scene.leases.lease("k").acquire().await.unwrap());
    sleep(40 * SECOND).await;
    let releases = scene.store.count(Verb::Release);
    assert!((5..20).contains(&releases), "{releases}");
    sleep(400 * SECOND).await;
    assert_eq!(scene.store.count(Verb::Release), releases);
}

#[tokio::test(start_paused = true)]
async fn a_release_of_a_lost_lease_is_lost_and_touches_nobody_elses() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    let fence = scene.store.give_away("k").await;
    assert_eq!(lease.lost().await.reason, LossReason::Taken);
    let error = lease.release().await.unwrap_err();
    assert_eq!(error.lost().unwrap().reason, LossReason::Taken);
    sleep(SECOND).await;
    assert_eq!(scene.store.holding("k").await.unwrap().fence, Some(fence));
}

#[tokio::test(start_paused = true)]
async fn what_merely_ran_out_here_is_released_all_the_same() {
    let scene = scene();
    scene.faults.always(Verb::Renew, Fault::LoseRequest);
    let work = scene.leases.with_lease("k", |_| pending::<()>()).await;
    assert!(matches!(work.unwrap_err().lost().unwrap().reason, LossReason::Deadline { .. }));
    sleep(ms(1)).await;
    assert_eq!(scene.store.count(Verb::Release), 1);
}

#[tokio::test(start_paused = true)]
async fn the_works_result_wins_over_a_release_that_fails() {
    for fault in [Fault::Fail(down()), Fault::LoseRequest, Fault::Fail(StoreError::refused("no permission"))] {
        let scene = scene();
        scene.faults.always(Verb::Release, fault);
        assert_eq!(scene.leases.with_lease("k", async |_| 7).await.unwrap(), 7);
        let own: Result<(), Error> = scene.leases.lease("l").try_run(async |_| Err(Error::Shutdown)).await;
        assert!(matches!(own, Err(Error::Shutdown)));
        sleep(60 * SECOND).await;
        assert!(scene.store.is_free("k").await);
        assert_eq!(scene.store.count(Verb::Renew), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_release_is_an_error_for_who_asked_for_it() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    scene.faults.always(Verb::Release, Fault::Fail(StoreError::refused("no permission")));
    assert!(matches!(lease.release().await, Err(Error::Store { attempted: "release", .. })));
    scene.faults.heal();
    sleep(60 * SECOND).await;
    assert!(scene.store.is_free("k").await);
    assert_eq!(scene.store.count(Verb::Renew), 0);
}

/// Holds the first renewal's answer back, so that whatever ends the lease then finds it in flight.
async fn with_a_renewal_in_flight(fault: Fault) -> (Scene, leasehold::Lease) {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    scene.faults.next(Verb::Renew, [fault]);
    scene.faults.until_sent(Verb::Renew, 1).await;
    (scene, lease)
}

fn order(scene: &Scene) -> Vec<Verb> {
    scene.store.seen().iter().map(|seen| seen.verb).collect()
}

#[tokio::test(start_paused = true)]
async fn a_release_waits_for_the_renewal_in_flight() {
    for fault in [Fault::DelayRequest(SECOND), Fault::DelayReply(SECOND)] {
        for dropped in [false, true] {
            let (scene, lease) = with_a_renewal_in_flight(fault.clone()).await;
            let began = scene.at();
            if dropped {
                drop(lease);
                sleep(ms(1100)).await;
            } else {
                assert_eq!(lease.release().await.unwrap(), Released::Released);
                assert_eq!(scene.at() - began, SECOND);
            }
            assert_eq!(order(&scene), [Verb::Claim, Verb::Renew, Verb::Release]);
            assert_ended(&scene).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_waits_no_longer_than_an_attempt_for_a_renewal_that_hangs_and_the_key_stays_free() {
    for fault in [Fault::LoseReply, Fault::DelayRequest(6 * SECOND)] {
        let (scene, lease) = with_a_renewal_in_flight(fault).await;
        let began = scene.at();
        assert_eq!(lease.release().await.unwrap(), Released::Released);
        assert_eq!(scene.at() - began, 2 * SECOND);
        // What is still on its way renews what it owns, and that is nothing.
        sleep(100 * SECOND).await;
        assert!(scene.store.is_free("k").await);
        assert_eq!(order(&scene), [Verb::Claim, Verb::Renew, Verb::Release]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_dropped_midway_goes_on_in_the_background() {
    // Before anything is sent; while a renewal is waited for; while the release is under way.
    let scene = scene();
    drop(scene.leases.lease("k").acquire().await.unwrap().release());
    assert_ended(&scene).await;

    let (scene, lease) = with_a_renewal_in_flight(Fault::DelayReply(SECOND)).await;
    assert!(timeout(SECOND / 2, lease.release()).await.is_err());
    sleep(SECOND).await;
    assert_ended(&scene).await;

    for fault in [Fault::LoseRequest, Fault::LoseReply, Fault::DelayRequest(SECOND)] {
        let scene = self::scene();
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        scene.faults.next(Verb::Release, [fault]);
        assert!(timeout(SECOND / 2, lease.release()).await.is_err());
        sleep(ms(1)).await;
        assert!(scene.store.is_free("k").await);
        sleep(100 * SECOND).await;
        assert_eq!(scene.store.count(Verb::Renew), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_the_work_releases_and_goes_on() {
    type Scenario = fn(&Scene) -> tokio::task::JoinHandle<Result<(), Error>>;
    let at_the_call: Scenario = |scene| {
        tokio::spawn(scene.leases.with_lease("k", |_| {
            if true {
                panic!("at the call");
            }
            pending::<()>()
        }))
    };
    let at_the_first_poll: Scenario = |scene| tokio::spawn(scene.leases.with_lease("k", async |_| panic!("polled")));
    let after_an_await: Scenario = |scene| {
        tokio::spawn(scene.leases.with_lease("k", async |_| {
            sleep(SECOND).await;
            panic!("later")
        }))
    };
    for scenario in [at_the_call, at_the_first_poll, after_an_await] {
        let scene = scene();
        assert!(scenario(&scene).await.unwrap_err().is_panic());
        assert_ended(&scene).await;
        assert_eq!(scene.store.count(Verb::Release), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_aborted_or_timed_out_task_drops_its_work_and_then_releases() {
    let scene = scene();
    let steps = Steps::new(&scene);
    let task = tokio::spawn({
        let steps = steps.clone();
        scene.leases.with_lease("k", async move |_| steps.take::<()>().await)
    });
    sleep(SECOND).await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert!(steps.dropped().is_some());
    assert_ended(&scene).await;

    let steps = Steps::new(&scene);
    let leased = scene.leases.with_lease("k", async |_| steps.clone().take::<()>().await);
    assert!(timeout(SECOND, leased).await.is_err());
    assert!(steps.dropped().is_some());
    assert_ended(&scene).await;
}

#[test]
fn a_lease_dropped_outside_a_runtime_is_released_by_the_watchdog_when_it_runs() {
    let runtime = paused();
    let (scene, lease) = runtime.block_on(async {
        let scene = scene();
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        (scene, lease)
    });
    assert!(Handle::try_current().is_err());
    drop(lease);
    runtime.block_on(assert_ended(&scene));
}

#[test]
fn leases_shared_by_one_runtime_after_another_are_renewed_in_each() {
    let mut shared = None;
    for round in 0..3 {
        let runtime = paused();
        runtime.block_on(async {
            let scene: &mut Scene = shared.get_or_insert_with(scene);
            let lease = scene.leases.lease(format!("k{round}")).acquire().await.unwrap();
            // Each runtime's paused clock begins anew, so each round goes on for longer than all before.
            sleep((round + 1) * 120 * SECOND).await;
            assert!(lease.is_held(), "round {round}");
            // It stays held as its runtime ends, and is renewed by the next one's watchdog.
            std::mem::forget(lease);
            for earlier in 0..round {
                assert!(!scene.store.is_free(&format!("k{earlier}")).await, "{earlier} in round {round}");
            }
        });
    }
}

#[test]
fn a_release_cut_short_by_the_end_of_its_runtime_is_said_by_the_next_watchdog() {
    let runtime = paused();
    let scene = runtime.block_on(async {
        let scene = scene();
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        scene.faults.next(Verb::Release, [Fault::LoseRequest]);
        drop(lease);
        scene.faults.until_sent(Verb::Release, 1).await;
        scene
    });
    drop(runtime);
    paused().block_on(async {
        drop(scene.leases.lease("another").acquire().await.unwrap());
        sleep(SECOND).await;
        assert!(scene.store.is_free("k").await);
    });
}

#[tokio::test(start_paused = true)]
async fn a_watchdog_set_in_the_place_of_one_that_stood_still_loses_no_release() {
    let scene = scene();
    let held = scene.leases.lease("held").acquire().await.unwrap();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    scene.faults.next(Verb::Release, [Fault::LoseRequest]);
    drop(lease);
    scene.faults.until_sent(Verb::Release, 1).await;
    // It has not looked for 10 s, so whoever acquires puts another in its place.
    scene.clock.suspend(10 * SECOND);
    let next = scene.leases.lease("l").acquire().await.unwrap();
    sleep(4 * SECOND).await;
    assert!(scene.store.is_free("k").await);
    sleep(100 * SECOND).await;
    assert!(next.is_held() && held.is_held());
}

#[test]
fn a_watchdog_on_a_runtime_that_stands_still_does_not_sleep_through_its_successors_wakings() {
    let stuck = paused();
    let (scene, held) = stuck.block_on(async {
        let scene = scene();
        let held = scene.leases.lease("held").acquire().await.unwrap();
        sleep(SECOND).await;
        (scene, held)
    });
    paused().block_on(async {
        scene.clock.suspend(10 * SECOND);
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        sleep(SECOND).await;
        held.release().await.unwrap();
        lease.release().await.unwrap();
        sleep(SECOND).await;
        // Nobody looks any more until something is to be watched again.
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        sleep(100 * SECOND).await;
        assert!(lease.is_held());
    });
    drop(stuck);
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_who_waits_gives_work_its_grace_and_releases_after_it() {
    let scene = scene();
    let steps = Steps::new(&scene);
    let work = tokio::spawn({
        let steps = steps.clone();
        scene.leases.with_lease("k", async move |_| steps.take::<()>().await)
    });
    let polite = tokio::spawn(scene.leases.with_lease("l", async |cancel| {
        cancel.cancelled().await;
        sleep(SECOND).await;
        "said goodbye"
    }));
    let plain = scene.leases.lease("m").acquire().await.unwrap();
    sleep(SECOND).await;
    let waiter = tokio::spawn(scene.leases.lease("k").acquire());
    sleep(SECOND).await;
    let began = scene.at();
    let token = plain.cancel_token().clone();
    let closing = tokio::spawn({
        let leases = scene.leases.clone();
        async move { leases.shutdown().await }
    });
    sleep(ms(1)).await;
    assert!(matches!(waiter.await.unwrap(), Err(Error::Shutdown)));
    assert!(token.is_cancelled() && plain.is_held());
    closing.await.unwrap();
    assert!(scene.at() - began <= ms(3010), "{:?}", scene.at() - began);
    assert_eq!(polite.await.unwrap().unwrap(), "said goodbye");
    let lost = work.await.unwrap().unwrap_err();
    assert_eq!(lost.lost().unwrap().reason, LossReason::Shutdown);
    for key in ["k", "l", "m"] {
        assert!(scene.store.is_free(key).await, "{key}");
    }
    // The work was gone when its release was sent.
    let seen = scene.store.seen();
    let sent_for = |key: &str| {
        let claim = seen.iter().find(|seen| seen.keys[0].as_str() == key).unwrap();
        seen.iter().find(|seen| seen.verb == Verb::Release && seen.secrets == claim.secrets).unwrap().asked
    };
    let asked = sent_for("k");
    assert!(steps.dropped().unwrap() <= asked, "{:?} and {asked:?}", steps.dropped());
    assert!(steps.last() < began + 3 * SECOND, "{:?}", steps.last());
    assert_eq!(sent_for("l") - began, SECOND);
    assert!(matches!(scene.leases.lease("n").acquire().await, Err(Error::Shutdown)));
    assert!(matches!(scene.leases.lock("n").lock().await, Err(Error::Shutdown)));
    drop(plain);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_that_the_store_does_not_confirm_returns_all_the_same() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    scene.faults.always(Verb::Release, Fault::LoseRequest);
    timeout(12 * SECOND, scene.leases.shutdown()).await.unwrap();
    drop(lease);
}

#[test]
fn a_shutdown_on_another_runtime_than_the_watchdogs_releases() {
    let (scene, lease) = paused().block_on(async {
        let scene = scene();
        let lease = scene.leases.lease("k").acquire().await.unwrap();
        (scene, lease)
    });
    paused().block_on(async {
        timeout(4 * SECOND, scene.leases.shutdown()).await.unwrap();
        assert!(scene.store.is_free("k").await);
    });
    drop(lease);
}

#[tokio::test(start_paused = true)]
async fn after_a_thousand_leases_no_key_no_task_and_no_renewal_is_left() {
    let scene = scene_with(|all| all.ttl(9 * SECOND));
    drop(scene.leases.lease("warm").acquire().await.unwrap());
    sleep(SECOND).await;
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let mut held = Vec::new();
    for n in 0..1000 {
        let lease = scene.leases.lease(format!("k{n}")).acquire().await.unwrap();
        match n % 3 {
            0 => drop(lease),
            1 => assert_eq!(lease.release().await.unwrap(), Released::Released),
            _ => held.push(lease),
        }
    }
    sleep(20 * SECOND).await;
    assert!(held.iter().all(|lease| lease.is_held()));
    assert!(tasks() <= before, "no task for each lease: {} and {before}", tasks());
    held.clear();
    sleep(SECOND).await;
    for n in 0..1000 {
        assert!(scene.store.is_free(&format!("k{n}")).await);
    }
    let (renewals, beat) = (scene.store.count(Verb::Renew), scene.leases.last_beat());
    sleep(3600 * SECOND).await;
    assert_eq!(scene.store.count(Verb::Renew), renewals);
    assert_eq!(tasks(), before);
    // With nothing to watch it does not even look.
    assert_eq!(scene.leases.last_beat(), beat + 3600 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn the_watchdog_goes_with_the_last_handle_and_says_what_is_due_first() {
    let scene = scene();
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    let Scene { leases, store, .. } = scene;
    drop(leases);
    sleep(60 * SECOND).await;
    assert!(lease.is_held());
    drop(lease);
    sleep(SECOND).await;
    assert!(store.is_free("k").await);
    assert_eq!(tasks(), before);
}

#[tokio::test(start_paused = true)]
async fn a_guard_drops_its_work_the_moment_it_ends_though_it_is_kept() {
    let scene = scene();
    let steps = Steps::new(&scene);
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    let mut guard = pin!(lease.guard(steps.clone().take::<()>()));
    assert!(timeout(SECOND, guard.as_mut()).await.is_err());
    scene.store.delete("k").await;
    assert!(guard.as_mut().await.is_err());
    assert!(steps.dropped().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_panic_that_is_caught_leaves_the_lease_to_its_holder() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    let mut guard = Box::pin(lease.guard(async { panic!("caught") }));
    let polled = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        matches!(guard.as_mut().poll(&mut context), Poll::Pending)
    }));
    assert!(polled.is_err());
    drop(guard);
    sleep(60 * SECOND).await;
    assert!(lease.is_held());
}
