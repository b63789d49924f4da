//! A shutdown leaves nothing behind, whatever was going on.
#![allow(clippy::unwrap_used)]
mod support;
use leasehold::{Error, LeaseState, Leases, LossReason, Wait};
use std::thread;
use support::{
    scene::{SECOND, ms, scene, scene_with},
    server::Server,
    until,
};
use tokio::time::{sleep, timeout};

/// `main` returns right after a shutdown, and nobody says goodbye for those who waited: the place in the line stays, and a
/// release hands the key to a process that is gone.
#[tokio::test]
async fn a_shutdown_waits_until_those_who_waited_have_left_the_line() {
    let server = Server::start();
    server.cmd(&["SET", "k", "somebody else's", "PX", "60000"]);
    let leases = Leases::connect(&server.url()).await.unwrap();
    let waiter = tokio::spawn(leases.lease("k").wait(Wait::Forever).acquire());
    until("it stands in line", || server.cmd(&["ZCARD", "{k}:queue"]).int() == 1).await;
    leases.shutdown().await;
    assert_eq!(server.cmd(&["ZCARD", "{k}:queue"]).int(), 0, "still in line as the shutdown returns");
    assert!(matches!(waiter.await.unwrap(), Err(Error::Shutdown)));
}

/// The same with a key that was free: it stays held for a whole TTL by a process that is gone.
#[tokio::test]
async fn a_shutdown_waits_for_the_release_of_what_was_just_being_acquired() {
    let server = Server::start();
    let leases = Leases::connect(&server.url()).await.unwrap();
    let acquiring = tokio::spawn(leases.lease("k").acquire());
    tokio::task::yield_now().await; // the claim goes out
    while server.get("k").is_none() {
        thread::sleep(ms(1)); // and is answered, while this runtime does something else
    }
    leases.shutdown().await;
    assert_eq!(server.get("k"), None, "still held as the shutdown returns");
    assert!(matches!(acquiring.await.unwrap(), Err(Error::Shutdown)));
}

/// "Dropped midway, it goes on."
#[tokio::test(start_paused = true)]
async fn a_shutdown_that_is_dropped_midway_releases_also_what_its_holder_keeps() {
    let scene = scene();
    let kept = scene.leases.lease("k").acquire().await.unwrap();
    timeout(SECOND, scene.leases.shutdown()).await.unwrap_err();
    sleep(4 * SECOND).await;
    assert_eq!(kept.state(), LeaseState::Lost(LossReason::Shutdown));
    assert!(scene.store.is_free("k").await, "the shutdown did not go on");
}

/// "Then everything is released."
#[tokio::test(start_paused = true)]
async fn a_shutdown_releases_what_its_holder_keeps_for_whatever_reason_it_ended_meanwhile() {
    let scene = scene_with(|builder| builder.max_hold(10 * SECOND));
    let kept = scene.leases.lease("k").acquire().await.unwrap();
    sleep(8 * SECOND).await;
    scene.leases.shutdown().await;
    assert_eq!(kept.state(), LeaseState::Lost(LossReason::MaxHold));
    assert!(scene.store.is_free("k").await, "held by nobody for the rest of its TTL");
}
