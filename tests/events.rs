//! What is told to people who read logs, and what is not.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{LossReason, Wait};
use std::fmt::Write;
use support::{
    faults::{Fault, Verb},
    log::Log,
    scene::{Madness, SECOND, Scene, down, ms, scene},
};
use tokio::time::{sleep, timeout};
use tracing::Level;

#[tokio::test(start_paused = true)]
async fn a_lease_that_goes_well_warns_of_nothing() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    scene.leases.with_lease("k", |_| sleep(300 * SECOND)).await.unwrap();
    assert!(log.lines().iter().all(|(level, _)| *level >= Level::INFO), "{:#?}", log.lines());
    log.assert_once(Level::INFO, "span acquire key=k");
    log.assert_once(Level::INFO, "span lease key=k");
    log.assert_once(Level::DEBUG, "lease acquired");
    log.assert_once(Level::DEBUG, "lease released");
}

#[tokio::test(start_paused = true)]
async fn trouble_is_told_once_when_it_begins_and_once_when_it_is_over() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    scene.faults.next(Verb::Renew, [Fault::Fail(down()), Fault::Fail(down()), Fault::LoseRequest]);
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    sleep(600 * SECOND).await;
    log.assert_once(Level::WARN, "lease at risk");
    log.assert_once(Level::INFO, "lease renewed late");
    assert_eq!(log.count(Level::WARN, ""), 1, "{:#?}", log.lines());
    assert!(lease.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_told_once_with_its_reason_and_its_fence() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    scene.faults.always(Verb::Renew, Fault::Fail(down()));
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    lease.lost().await;
    log.assert_once(Level::WARN, "lease ending");
    log.assert_once(Level::WARN, "lease lost");
    log.assert_once(Level::WARN, "it could not be renewed in time; last, the store is unavailable: the test says so");
    assert!(
        log.lines().iter().any(|(_, line)| line.contains("lost") && line.contains(&format!("fence={}", lease.fence())))
    );

    scene.faults.heal();
    let lease = scene.leases.lease("l").acquire().await.unwrap();
    scene.store.delete("l").await;
    assert_eq!(lease.lost().await.reason, LossReason::Expired);
    log.assert_once(Level::WARN, "the key is gone from the store");
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_store_is_told_wherever_it_happens() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    let lease = scene.leases.lease("k").acquire().await.unwrap();
    scene.store.go_mad([Madness::Panics, Madness::PanicsOverLanes]);
    sleep(60 * SECOND).await;
    log.assert_once(Level::ERROR, "the watchdog panicked");
    log.assert_once(Level::ERROR, "a store panicked");
    assert!(lease.is_held());
}

#[tokio::test(start_paused = true)]
async fn work_that_is_done_but_not_released_is_told() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    scene.faults.always(Verb::Release, Fault::Fail(leasehold::StoreError::refused("no permission")));
    scene.leases.with_lease("k", async |_| ()).await.unwrap();
    log.assert_once(Level::WARN, "the work is done, but its lease could not be released");
    sleep(SECOND).await;
    log.assert_once(Level::WARN, "its TTL will free the key");
}

#[tokio::test(start_paused = true)]
async fn a_wait_without_end_is_told_once_each_ttl_and_a_bounded_one_is_not() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    let _held = scene.leases.lease("k").acquire().await.unwrap();
    assert!(timeout(100 * SECOND, scene.leases.lease("k").wait(Wait::Forever).acquire()).await.is_err());
    assert_eq!(log.count(Level::WARN, "still waiting for a lease"), 3);
    assert!(timeout(65 * SECOND, scene.leases.lock("k").lock()).await.is_err());
    assert_eq!(log.count(Level::WARN, "still waiting for a lease"), 5);
    assert!(log.count(Level::WARN, "holder=") >= 5, "{:#?}", log.lines());
    scene.leases.lease("k").wait(200 * SECOND).acquire().await.unwrap_err();
    assert_eq!(log.count(Level::WARN, "still waiting for a lease"), 5);
}

#[tokio::test(start_paused = true)]
async fn a_wait_without_end_on_a_store_that_does_not_answer_is_told_too() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    scene.faults.always(Verb::Claim, Fault::LoseRequest);
    assert!(timeout(100 * SECOND, scene.leases.lease("k").wait(Wait::Forever).acquire()).await.is_err());
    assert_eq!(log.count(Level::WARN, "still waiting for a lease"), 3);
}

/// The unique part of every owner that was seen; whoever can present it owns the lease.
fn secrets(scene: &Scene) -> Vec<String> {
    let all = scene.store.seen().into_iter().flat_map(|seen| seen.secrets);
    all.map(|secret| secret.rsplit_once('/').unwrap().1.to_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn no_secret_is_ever_told() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    scene.faults.next(Verb::Claim, [Fault::Fail(down()), Fault::LoseReply]);
    scene.faults.next(Verb::Renew, [Fault::Fail(down()), Fault::LoseReply]);
    scene.faults.next(Verb::Release, [Fault::Fail(down()), Fault::LoseReply]);
    let request = scene.leases.lease("k");
    let lease = request.clone().acquire().await.unwrap();
    let mut lock = scene.leases.lock("l");
    lock.lock().await.unwrap();
    sleep(60 * SECOND).await;
    let contended = scene.leases.lease("k").try_acquire().await;
    let waited = scene.leases.lease("k").wait(SECOND).acquire().await.unwrap_err();
    let guard = lease.guard(async {});
    let mut shown = format!("{:?}{request:?}{lease:?}{:?}{lock:?}", scene.leases, lease.view());
    write!(shown, "{guard:?}{contended:?}{waited:?}{waited}").unwrap();
    drop(guard);
    scene.store.delete("k").await;
    let lost = lease.lost().await;
    write!(shown, "{lease:?}{lost:?}{lost}").unwrap();
    write!(shown, "{:?}", lease.release().await).unwrap();
    drop(lock);
    sleep(60 * SECOND).await;
    for (_, line) in log.lines() {
        writeln!(shown, "{line}").unwrap();
    }
    let secrets = secrets(&scene);
    assert!(secrets.len() > 10 && shown.contains("lease at risk") && shown.contains("Owner("));
    for secret in secrets {
        assert!(!shown.contains(&secret) && !shown.contains(&secret.replace('-', "")), "{shown}");
        assert!(!shown.contains(&secret[9..]) && !shown.contains(&secret[..8]), "{shown}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_handle_that_is_dropped_is_not_trouble() {
    let (log, _guard) = Log::listen();
    let scene = scene();
    drop(scene.leases.lease("k").acquire().await.unwrap());
    sleep(ms(1)).await;
    assert!(scene.store.is_free("k").await);
    assert_eq!(log.count(Level::WARN, ""), 0, "{:#?}", log.lines());
}
