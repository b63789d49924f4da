//! How leases end: releases that are slow, late, repeated or stale, and what they leave to the next owner.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Error, LeaseState, Leases, LossReason, Released, Wait};
use std::time::{Duration, Instant};
use support::{
    proxy::{Flow, Proxy, RELEASE, RENEW, Then},
    server::Server,
    until, within,
};

const TTL: Duration = Duration::from_secs(2);

fn behind_proxy() -> (Server, Proxy) {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    (server, proxy)
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_released_as_a_renewal_falls_due_waits_for_no_answer_to_it() {
    let leases = Leases::in_memory();
    for _ in 0..20 {
        let held = leases.lease("k").acquire().await.unwrap();
        // It is to be renewed the moment it is handed over.
        let (next, ()) = tokio::join!(leases.lease("k").acquire(), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            held.release().await.unwrap();
        });
        let next = next.unwrap();
        let start = tokio::time::Instant::now();
        next.release().await.unwrap();
        assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_ran_out_goes_to_somebody_though_nobody_stays_in_line_until_it_would_ask() {
    let leases = Leases::in_memory();
    let mut gone = leases.lock("k");
    gone.lock_for(TTL).await.unwrap();
    // The line is never empty, and whoever is in it leaves before its next question.
    let mut waiters = tokio::task::JoinSet::new();
    for n in 0..8 {
        let leases = leases.clone();
        waiters.spawn(async move {
            tokio::time::sleep(Duration::from_millis(10 * n)).await;
            while leases.lease("k").wait(Duration::from_millis(50)).acquire().await.is_err() {}
        });
    }
    let turn = tokio::time::timeout(TTL + Duration::from_millis(200), waiters.join_next()).await;
    turn.expect("it is nobody's").unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_handle_does_not_unlock_its_successors_key() {
    let server = Server::start();
    let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    let mut stale = leases.lock("k");
    let fence = stale.lock_for(Duration::from_millis(200)).await.unwrap();
    let mut successor = leases.lock("k");
    assert!(within("its turn", successor.lock()).await.unwrap() > fence);
    let value = server.get("k");
    assert!(!stale.is_held() && stale.hold_count() == 0 && stale.fence().is_none());
    assert!(matches!(stale.lock().await, Err(Error::Lost(_))), "a silent new acquisition");
    let error = stale.unlock().await.unwrap_err();
    assert!(error.lost().is_some(), "{error}");
    assert!(matches!(stale.unlock().await, Err(Error::NotHeld { .. })));
    drop(stale);
    // The background release of the one that ran out has been answered when the next claim is.
    assert_eq!(leases.lock("k").try_lock().await.unwrap(), None);
    assert_eq!(server.get("k"), value);
    assert!(successor.is_held());
    successor.unlock().await.unwrap();
    assert_eq!(server.get("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unlock_whose_answer_was_lost_cannot_touch_a_later_acquisition_of_the_same_leases() {
    for then in [Then::Reset, Then::Silence] {
        let (server, proxy) = behind_proxy();
        let leases = Leases::builder().ttl(10 * TTL).attempt(TTL / 8).connect(&proxy.url()).await.unwrap();
        let mut old = leases.lock("k");
        old.lock().await.unwrap();
        proxy.lose_reply(RELEASE, then);
        // Whether it could be confirmed or not: the release was carried out, and the handle is done with.
        let first = within("an unlock", old.unlock()).await;
        assert!(matches!(first, Ok(()) | Err(Error::Store { .. })), "{first:?}");
        until("it was carried out", || server.get("k").is_none()).await;
        let mut new = leases.lock("k");
        within("a lock", new.lock()).await.unwrap();
        let value = server.get("k");
        assert!(matches!(old.unlock().await, Err(Error::NotHeld { .. })));
        drop(old);
        // Longer than any repetition of the old release takes.
        tokio::time::sleep(TTL / 2).await;
        assert_eq!(server.get("k"), value);
        assert!(new.is_held());
        within("an unlock", new.unlock()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_while_a_renewal_is_unanswered_is_the_last_that_is_said_of_its_owner() {
    let (server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(TTL).connect(&proxy.url()).await.unwrap();
    let mut monitor = server.connect();
    let lease = leases.lease("k").acquire().await.unwrap();
    let value = server.get("k").unwrap();
    let owner = value.split('#').next().unwrap();
    monitor.cmd(&["MONITOR"]);
    proxy.hold_reply(RENEW);
    proxy.until(|counts| counts.held > 0).await;
    let released = tokio::spawn(lease.release());
    // It waits for the renewal, and for no longer than one attempt.
    within("the release", released).await.unwrap().unwrap();
    proxy.pass();
    // Time for two more renewals, if there were any.
    tokio::time::sleep(TTL * 3 / 4).await;
    server.cmd(&["ECHO", "the end"]);
    let mut said = Vec::new();
    loop {
        let line = monitor.read().unwrap().text().unwrap();
        if line.contains("the end") {
            break;
        }
        if line.contains(owner) && line.to_lowercase().contains("evalsha") {
            said.push(if line.contains("\"release\"") { "release" } else { "renew" });
        }
    }
    assert_eq!(said.last(), Some(&"release"), "{said:?}");
    assert_eq!(said.iter().filter(|verb| **verb == "release").count(), 1, "{said:?}");
    assert_eq!(server.get("k"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_unlock_goes_on_and_the_handle_can_lock_again() {
    let (server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(10 * TTL).connect(&proxy.url()).await.unwrap();
    let mut lock = leases.lock("k");
    for _ in 0..10 {
        lock.lock().await.unwrap();
        proxy.requests(Flow::Hold);
        tokio::select! {
            biased;
            unlocked = lock.unlock() => panic!("{unlocked:?}"),
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
        assert!(!lock.is_held());
        proxy.pass();
        until("the key is free", || server.get("k").is_none()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_hold_ends_the_work_before_anybody_else_begins() {
    let server = Server::start();
    let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    let polls = support::work::Polls::default();
    let max_hold = Duration::from_millis(900);
    let start = Instant::now();
    let work = tokio::spawn(leases.lease("k").max_hold(max_hold).run({
        let polls = polls.clone();
        |lease| polls.stubborn(lease)
    }));
    polls.begun().await;
    let next = tokio::spawn(leases.lease("k").wait(Wait::Forever).acquire());
    let error = within("the end of the work", work).await.unwrap().unwrap_err();
    assert_eq!(error.lost().map(|lost| lost.reason.clone()), Some(LossReason::MaxHold));
    let next = within("the next one's turn", next).await.unwrap().unwrap();
    assert!(polls.is_dropped() && start.elapsed() >= max_hold - TTL / 10);
    assert!(polls.seen().iter().any(|poll| poll.told), "it was told before");
    assert_eq!(next.state(), LeaseState::Held);
    assert_eq!(next.release().await.unwrap(), Released::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_frees_what_it_can_though_some_keys_were_taken() {
    let server = Server::start();
    let leases = Leases::builder().ttl(10 * TTL).grace(TTL / 20).connect(&server.url()).await.unwrap();
    let mut held = Vec::new();
    for n in 0..50 {
        held.push(leases.lease(format!("k{n}")).acquire().await.unwrap());
    }
    for n in 0..5 {
        server.cmd(&["SET", &format!("k{n}"), "theirs"]);
        server.cmd(&["DEL", &format!("k{}", 10 + n)]);
        server.cmd(&["RPUSH", &format!("k{}", 10 + n), "a list"]);
    }
    within("the shutdown", leases.shutdown()).await;
    let left: Vec<_> = server.keys().into_iter().filter(|key| !key.ends_with(":fence")).collect();
    assert_eq!(left, ["k0", "k1", "k10", "k11", "k12", "k13", "k14", "k2", "k3", "k4"]);
    assert!(held.iter().all(|lease| !lease.is_held()));
    assert!(matches!(leases.lease("k").acquire().await, Err(Error::Shutdown)));
}
