//! How renewals travel: together, spread, lane by lane, past a store that misbehaves.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Lease, LeaseState, LossReason, Wait};
use std::{collections::HashSet, time::Duration};
use support::{
    faults::{Fault, Verb},
    scene::{Madness, SECOND, Scene, down, ms, scene},
};
use tokio::time::{sleep, timeout};

async fn acquire_all(scene: &Scene, count: usize) -> Vec<Lease> {
    let mut leases = Vec::new();
    for n in 0..count {
        leases.push(scene.leases.lease(format!("k{n}")).acquire().await.unwrap());
    }
    leases
}

fn all_held(leases: &[Lease]) -> bool {
    leases.iter().all(|lease| lease.state() == LeaseState::Held)
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_each_third_of_its_ttl() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    sleep(3600 * SECOND).await;
    let sent: Vec<_> = scene.store.all(Verb::Renew).iter().map(|renewal| renewal.asked).collect();
    assert!((5 * SECOND..=10 * SECOND).contains(&sent[0]), "{:?}", sent[0]);
    let gaps: Vec<Duration> = sent.windows(2).map(|pair| pair[1] - pair[0]).collect();
    // A renewal may be a little early, to travel with others; never late.
    assert!(gaps.iter().all(|gap| (ms(9989)..=ms(10_001)).contains(gap)), "{gaps:?}");
    assert!(lease.is_held());
}

#[tokio::test(start_paused = true)]
async fn leases_taken_together_are_renewed_in_lists_that_are_not_too_long_and_spread_over_time() {
    let scene = scene();
    let leases = acquire_all(&scene, 10_000).await;
    sleep(120 * SECOND).await;
    assert!(all_held(&leases));
    let lists = scene.store.all(Verb::Renew);
    assert!(lists.iter().all(|list| (1..=256).contains(&list.keys.len())));
    let sum: usize = lists.iter().map(|list| list.keys.len()).sum();
    // Each was renewed 11 or 12 times, mostly in company.
    assert!((110_000..=130_000).contains(&sum), "{sum}");
    assert!(lists.len() < sum / 8, "{} lists", lists.len());
    let mut in_second = [0; 121];
    for list in &lists {
        in_second[usize::try_from(list.asked.as_secs()).unwrap()] += list.keys.len();
    }
    let (first, settled) = (&in_second[5..10], &in_second[30..110]);
    assert!(first.iter().all(|n| (1500..2500).contains(n)), "{first:?}");
    assert!(settled.iter().all(|n| *n < 2500), "{settled:?}");
}

#[tokio::test(start_paused = true)]
async fn what_falls_due_at_once_after_a_suspension_is_renewed_at_once_in_lists_of_bounded_length() {
    for (count, in_lists) in [(1000, 4), (256, 1)] {
        let scene = scene();
        let leases = acquire_all(&scene, count).await;
        sleep(ms(500)).await;
        scene.clock.suspend(15 * SECOND);
        sleep(SECOND).await;
        let lists = scene.store.all(Verb::Renew);
        assert_eq!(lists.iter().map(|list| list.keys.len()).sum::<usize>(), count);
        assert!(lists.iter().all(|list| list.keys.len() <= 256) && lists.len() == in_lists, "{} lists", lists.len());
        assert!(all_held(&leases) && leases.iter().all(|lease| lease.valid_for() > 28 * SECOND));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_hangs_delays_no_other() {
    for fault in [Fault::LoseRequest, Fault::HoldReply, Fault::DelayReply(20 * SECOND)] {
        let scene = scene();
        for n in 0..20 {
            scene.faults.lane(format!("k{n}"), n % 2);
        }
        let leases = acquire_all(&scene, 20).await;
        for n in (1..20).step_by(2) {
            scene.faults.on_key(format!("k{n}"), fault.clone());
        }
        let (even, odd): (Vec<_>, Vec<_>) = leases.into_iter().enumerate().partition(|(n, _)| n % 2 == 0);
        for at in 1..300 {
            sleep(SECOND).await;
            assert!(even.iter().all(|(_, lease)| lease.state() == LeaseState::Held), "{fault:?}, {at} s");
        }
        assert!(odd.iter().all(|(_, lease)| !lease.is_held()));
        for list in scene.store.all(Verb::Renew) {
            let lanes: HashSet<_> = list.keys.iter().map(|key| key.as_str()[1..].parse::<u32>().unwrap() % 2).collect();
            assert_eq!(lanes.len(), 1, "{list:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_of_a_list_that_is_gone_costs_the_others_nothing() {
    let scene = scene();
    let leases = acquire_all(&scene, 100).await;
    scene.store.delete("k13").await;
    let fence = scene.store.give_away("k31").await;
    sleep(60 * SECOND).await;
    for (n, lease) in leases.iter().enumerate() {
        let state = match n {
            13 => LeaseState::Lost(LossReason::Expired),
            31 => LeaseState::Lost(LossReason::Taken),
            _ => LeaseState::Held,
        };
        assert_eq!(lease.state(), state, "{n}");
    }
    assert!(scene.store.is_free("k13").await);
    assert_eq!(scene.store.holding("k31").await.unwrap().fence, Some(fence));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_puts_leases_at_risk_and_the_watchdog_lives_on() {
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    scene.store.go_mad([Madness::Panics; 3]);
    let mut states = lease.watch();
    for state in [LeaseState::AtRisk, LeaseState::Held] {
        timeout(20 * SECOND, states.changed()).await.unwrap().unwrap();
        assert_eq!(*states.borrow_and_update(), state);
    }
    assert!(!lease.cancel_token().is_cancelled());

    scene.store.go_mad([Madness::Panics; 1000]);
    assert!(matches!(lease.lost().await.reason, LossReason::Deadline { last: Some(_), .. }));
    let other = scene.leases.lease("l").acquire().await.unwrap();
    sleep(7 * SECOND / 2).await;
    assert!(scene.leases.last_beat() <= SECOND);
    drop((lease, other));
    sleep(ms(1)).await;
    assert!(scene.store.is_free("k").await && scene.store.is_free("l").await);
}

#[tokio::test(start_paused = true)]
async fn a_watchdog_that_panics_starts_again_and_costs_no_lease() {
    let scene = scene();
    let leases = acquire_all(&scene, 10).await;
    scene.store.go_mad([Madness::PanicsOverLanes; 5]);
    sleep(300 * SECOND).await;
    assert!(all_held(&leases));
    assert!(scene.leases.last_beat() <= SECOND);
    // Nothing of what it was about to send counts as under way: no release waits for an answer to it.
    let end = scene.at();
    for lease in leases {
        lease.release().await.unwrap();
    }
    assert_eq!(scene.at(), end);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_gives_a_wrong_number_of_answers_costs_no_lease() {
    for answers in [0, 1, 5, 11, 1000] {
        let scene = scene();
        let leases = acquire_all(&scene, 10).await;
        scene.store.go_mad([Madness::Answers(answers); 5]);
        sleep(300 * SECOND).await;
        assert!(all_held(&leases), "{answers}");
    }
}

#[tokio::test(start_paused = true)]
async fn retries_of_a_failing_store_are_few_and_jittered_and_end_with_the_token() {
    let scene = scene();
    scene.faults.always(Verb::Renew, Fault::Fail(down()));
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    lease.cancel_token().cancelled().await;
    let sent = scene.store.count(Verb::Renew);
    assert!((10..80).contains(&sent), "{sent}");
    let asked: Vec<_> = scene.store.all(Verb::Renew).iter().map(|renewal| renewal.asked).collect();
    let gaps: HashSet<_> = asked.windows(2).take(8).map(|pair| pair[1] - pair[0]).collect();
    assert!(gaps.len() > 3 && gaps.iter().all(|gap| (ms(499)..=ms(1001)).contains(gap)), "{gaps:?}");
    lease.lost().await;
    sleep(60 * SECOND).await;
    assert_eq!(scene.store.count(Verb::Renew), sent);
}

#[tokio::test(start_paused = true)]
async fn a_handful_of_leases_at_risk_recovers_when_the_store_does() {
    let scene = scene();
    let leases = acquire_all(&scene, 300).await;
    for fault in [Fault::LoseRequest, Fault::LoseReply, Fault::Fail(down()), Fault::HoldRequest, Fault::HoldReply] {
        scene.faults.always(Verb::Renew, fault.clone());
        sleep(12 * SECOND).await;
        assert!(leases.iter().any(|lease| lease.state() == LeaseState::AtRisk), "{fault:?}");
        scene.faults.heal();
        sleep(3 * SECOND).await;
        assert!(all_held(&leases), "{fault:?}");
    }
    assert!(leases.iter().all(|lease| !lease.cancel_token().is_cancelled()));
}

#[tokio::test(start_paused = true)]
async fn a_lock_for_a_fixed_time_is_never_renewed_and_ends_with_it() {
    let scene = scene();
    let mut lock = scene.leases.lock("k");
    lock.lock_for(5 * SECOND).await.unwrap();
    let (view, token) = (lock.view().unwrap(), lock.cancel_token().unwrap());
    let sure = 5 * SECOND - ms(52);
    assert_eq!(view.valid_for(), sure);
    token.cancelled().await;
    assert_eq!(scene.at(), sure - ms(500));
    assert!(lock.is_held());
    assert!(matches!(view.lost().await.reason, LossReason::Deadline { last: None, .. }));
    assert_eq!((scene.at(), lock.is_held(), lock.hold_count(), lock.fence()), (sure, false, 0, None));
    assert_eq!(scene.store.count(Verb::Renew), 0);
    assert!(lock.unlock().await.unwrap_err().lost().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_fixed_lock_that_was_waited_for_lasts_for_its_time_too() {
    let scene = scene();
    let mut first = scene.leases.lock("k");
    first.lock().await.unwrap();
    let mut lock = scene.leases.lock("k");
    let locking = tokio::spawn(async move {
        lock.try_lock_with(60 * SECOND, 20 * SECOND).await.unwrap().unwrap();
        lock
    });
    sleep(10 * SECOND).await;
    first.unlock().await.unwrap();
    let lock = locking.await.unwrap();
    let began = scene.at();
    lock.view().unwrap().lost().await;
    let lasted = scene.at() - began;
    assert!((18 * SECOND..=20 * SECOND).contains(&lasted), "{lasted:?}");
}

#[tokio::test(start_paused = true)]
async fn leases_of_very_different_lengths_live_side_by_side() {
    let scene = scene();
    let mut leases = Vec::new();
    for ttl in [ms(100), ms(150), SECOND, 30 * SECOND, 86_400 * SECOND, 365 * 86_400 * SECOND] {
        leases.push(scene.leases.lease(format!("{ttl:?}")).ttl(ttl).wait(Wait::No).acquire().await.unwrap());
    }
    for _ in 0..600 {
        sleep(ms(77)).await;
        assert!(all_held(&leases));
    }
}
