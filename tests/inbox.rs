//! The inbox: one subscription for each `Leases`, which only ever speeds things up.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Lease, LeaseState, Leases, LossReason, Result, Wait, store::redis::RedisStore};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use support::{
    PATIENCE,
    log::Log,
    proxy::{Flow, Proxy},
    server::Server,
    until, within,
};
use tokio::task::JoinHandle;

/// How often whoever waits asks, with the default TTL of 30 s.
const INTERVAL: Duration = Duration::from_secs(1);
/// A poll interval on the busiest of machines, and far from a TTL. That it is one interval is shown on paused time.
const SOON: Duration = Duration::from_secs(5);

fn waits(leases: &Leases, key: &str) -> JoinHandle<Result<Lease>> {
    tokio::spawn(leases.lease(key).wait(Wait::Forever).acquire())
}

async fn lease(waiting: JoinHandle<Result<Lease>>) -> Lease {
    within("the lease", waiting).await.unwrap().unwrap()
}

fn in_line(server: &Server, key: &str) -> i64 {
    server.cmd(&["ZCARD", &format!("{{{key}}}:queue")]).int()
}

fn channels(server: &Server) -> Vec<String> {
    let channels = server.cmd(&["PUBSUB", "CHANNELS"]).list();
    channels.into_iter().map(|channel| channel.text().unwrap()).collect()
}

async fn until_heard(server: &Server, inboxes: usize) {
    until("the inboxes are open", || channels(server).len() == inboxes).await;
}

/// Hands the key over and back that often; the longest that a hand-over took.
async fn hand_overs(server: &Server, here: &Leases, there: &Leases, count: usize) -> Duration {
    let mut longest = Duration::ZERO;
    let mut held = here.lease("k").acquire().await.unwrap();
    for n in 0..count {
        let waiting = waits(if n % 2 == 0 { there } else { here }, "k");
        until("it stands in line", || in_line(server, "k") == 1).await;
        let began = Instant::now();
        held.release().await.unwrap();
        held = lease(waiting).await;
        longest = longest.max(began.elapsed());
    }
    held.release().await.unwrap();
    longest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn there_is_one_subscription_for_each_leases_however_many_keys_and_it_ends_with_it() {
    let server = Server::start();
    let (here, there) = (Leases::connect(&server.url()).await.unwrap(), Leases::connect(&server.url()).await.unwrap());
    until_heard(&server, 2).await;
    let mut held = Vec::new();
    for n in 0..50 {
        held.push(here.lease(format!("k{n}")).acquire().await.unwrap());
    }
    let waiting: Vec<_> = (0..50).map(|n| waits(&there, &format!("k{n}"))).collect();
    until("all wait", || (0..50).all(|n| in_line(&server, &format!("k{n}")) == 1)).await;
    assert_eq!(channels(&server).len(), 2);
    assert!(channels(&server).iter().all(|channel| channel.starts_with("leasehold:")));
    assert_eq!(server.clients().len(), 6, "three connections each: {:#?}", server.clients());
    drop(held);
    for waiting in waiting {
        drop(lease(waiting).await);
    }
    drop(there);
    until_heard(&server, 1).await;
    drop(here);
    until("no connection is left", || server.clients().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inbox_ends_with_its_leases_though_the_store_lives_on() {
    let server = Server::start();
    let store = Arc::new(RedisStore::connect(&server.url()).await.unwrap());
    let lives = Leases::builder().build(store.clone()).unwrap();
    let ends = Leases::builder().build(store).unwrap();
    until_heard(&server, 2).await;
    drop(ends);
    until_heard(&server, 1).await;
    assert!(lives.lease("k").acquire().await.unwrap().is_held());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_that_is_cut_comes_back() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let here = Leases::connect(&server.url()).await.unwrap();
    let there = Leases::connect(&proxy.url()).await.unwrap();
    until_heard(&server, 2).await;
    assert!(hand_overs(&server, &here, &there, 4).await < SOON);
    for _ in 0..3 {
        assert!(server.cmd(&["CLIENT", "KILL", "TYPE", "pubsub"]).int() >= 1);
        until_heard(&server, 2).await;
        let held = here.lease("k").acquire().await.unwrap();
        let waiting = waits(&there, "k");
        until("it stands in line", || in_line(&server, "k") == 1).await;
        held.release().await.unwrap();
        lease(waiting).await.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_killed_over_and_over_cost_no_busy_loop_and_every_waiter_is_served_within_a_poll() {
    let log = Log::of_all();
    let server = Server::start();
    let (here, there) = (Leases::connect(&server.url()).await.unwrap(), Leases::connect(&server.url()).await.unwrap());
    until_heard(&server, 2).await;
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let killer = std::thread::spawn({
        let (mut killer, stop) = (server.connect(), stop.clone());
        move || {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                killer.cmd(&["CLIENT", "KILL", "TYPE", "pubsub"]);
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    });
    let connections = || {
        server
            .cmd(&["INFO", "stats"])
            .text()
            .unwrap()
            .lines()
            .find_map(|line| line.strip_prefix("total_connections_received:")?.trim().parse::<u64>().ok())
    };
    let (claims, connected, began) = (server.calls("zadd"), connections().unwrap(), Instant::now());
    let longest = hand_overs(&server, &here, &there, 6).await;
    assert!(longest < SOON, "{longest:?}");
    let idle = waits(&there, "k");
    let _held = lease(idle).await;
    let waiting: Vec<_> = (0..20).map(|_| waits(&here, "k")).collect();
    tokio::time::sleep(2 * INTERVAL).await;
    let took = u64::try_from(began.elapsed().as_millis()).unwrap();
    let (claims, connected) = (server.calls("zadd") - claims, connections().unwrap() - connected);
    // Pauses double from 50 to 100 ms on, up to 5 s.
    assert!(connected <= 2 * (8 + took / 2500), "{connected} connections in {took} ms");
    assert!(claims < 20 * (8 + took / 500), "{claims} claims in {took} ms");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    killer.join().unwrap();
    for waiting in waiting {
        waiting.abort();
    }
    let said = log.warnings(&server, "cannot hear from Redis");
    assert!((1..=2).contains(&said), "once for each of the two, not {said} times");
}

/// From now on the inbox behind the proxy hears nothing, and nobody knows it: its connection stands.
async fn deafen(server: &Server, proxy: &Proxy, inbox: &str) {
    let lost = proxy.counts().lost;
    proxy.replies(Flow::Drop);
    // Nothing comes through a connection any more after what was lost on it.
    assert_eq!(server.cmd(&["PUBLISH", inbox, "noise"]).int(), 1);
    proxy.until(|counts| counts.lost > lost).await;
    proxy.pass();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_the_message_swallowed_every_waiter_is_still_served_within_a_poll_interval() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let deaf = Leases::connect(&proxy.url()).await.unwrap();
    until_heard(&server, 1).await;
    let inbox = channels(&server).remove(0);
    let here = Leases::connect(&server.url()).await.unwrap();
    deafen(&server, &proxy, &inbox).await;
    let lost = proxy.counts().lost;
    let mut longest = Duration::ZERO;
    let count = 4;
    for _ in 0..count {
        let held = here.lease("k").acquire().await.unwrap();
        let waiting = waits(&deaf, "k");
        until("it stands in line", || in_line(&server, "k") == 1).await;
        held.release().await.unwrap();
        let granted = Instant::now();
        let lease = lease(waiting).await;
        longest = longest.max(granted.elapsed());
        assert!(lease.is_held());
        lease.release().await.unwrap();
    }
    assert!(longest < SOON, "{longest:?}");
    assert!(proxy.counts().lost > lost, "{:?}", proxy.counts());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_who_may_not_subscribe_waits_at_the_pace_of_polls_and_is_told_so_once() {
    let log = Log::of_all();
    let server = Server::start();
    server.cmd(&["ACL", "SETUSER", "w", "on", ">p", "~*", "+@all", "-subscribe", "allchannels"]);
    let url = server.url_as("w", "p");
    let (here, there) = (Leases::connect(&url).await.unwrap(), Leases::connect(&url).await.unwrap());
    let longest = hand_overs(&server, &here, &there, 6).await;
    assert!(longest < SOON, "{longest:?}");
    assert!(channels(&server).is_empty());
    until("both are told what to permit", || log.warnings(&server, "+subscribe") == 2).await;
    assert_eq!(log.warnings(&server, "cannot hear from Redis"), 2, "once for each of the two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_who_may_not_publish_hands_over_at_the_pace_of_polls_and_is_told_so_once() {
    let log = Log::of_all();
    for denied in ["-publish", "resetchannels"] {
        let server = Server::start();
        server.cmd(&["ACL", "SETUSER", "w", "on", ">p", "~*", "allchannels", "+@all", denied]);
        let releases = Leases::connect(&server.url_as("w", "p")).await.unwrap();
        let waits_for = Leases::connect(&server.url()).await.unwrap();
        let mut longest = Duration::ZERO;
        for _ in 0..5 {
            let held = releases.lease("k").acquire().await.unwrap();
            let waiting = waits(&waits_for, "k");
            until("it stands in line", || in_line(&server, "k") == 1).await;
            held.release().await.unwrap();
            let granted = Instant::now();
            let lease = lease(waiting).await;
            longest = longest.max(granted.elapsed());
            lease.release().await.unwrap();
        }
        assert!(longest < SOON, "{denied}: {longest:?}");
        assert_eq!(log.warnings(&server, "tells nobody that it is their turn"), 1, "{denied}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_is_told_to_a_waiter_whose_questions_do_not_arrive() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let (here, there) = (Leases::connect(&server.url()).await.unwrap(), Leases::connect(&proxy.url()).await.unwrap());
    until_heard(&server, 2).await;
    let held = here.lease("k").acquire().await.unwrap();
    let waiting = waits(&there, "k");
    until("it stands in line", || in_line(&server, "k") == 1).await;
    proxy.requests(Flow::Hold);
    held.release().await.unwrap();
    let granted = lease(waiting).await;
    proxy.pass();
    granted.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_loss_is_told_at_once() {
    let server = Server::start();
    let (here, there) = (Leases::connect(&server.url()).await.unwrap(), Leases::connect(&server.url()).await.unwrap());
    until_heard(&server, 2).await;
    let held = here.lease("a key: with spaces").acquire().await.unwrap();
    let renewals = server.calls("evalsha");
    assert!(there.force_release("a key: with spaces").await.unwrap());
    let lost = within("word of it", held.lost()).await;
    assert_eq!(lost.reason, LossReason::Forced);
    assert!(held.cancel_token().is_cancelled());
    assert_eq!(held.state(), LeaseState::Lost(LossReason::Forced));
    assert_eq!(server.calls("evalsha"), renewals + 1, "no renewal had to find out");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inbox_that_went_deaf_in_silence_is_noticed_and_replaced() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let leases = Leases::builder().ttl(Duration::from_secs(3)).connect(&proxy.url()).await.unwrap();
    until_heard(&server, 1).await;
    let before = proxy.counts().accepted;
    deafen(&server, &proxy, &channels(&server)[0]).await;
    proxy.until(|counts| counts.accepted > before).await;
    until_heard(&server, 1).await;
    assert_eq!(proxy.counts().accepted, before + 1, "and nothing else is");
    assert!(leases.lease("k").acquire().await.unwrap().is_held());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_inbox_is_tried_now_and_then_and_stays_open() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let leases = Leases::connect(&proxy.url()).await.unwrap();
    until_heard(&server, 1).await;
    let before = proxy.counts();
    // Nobody asks anything but the inbox, twice.
    let after = proxy.until(|counts| counts.requests >= before.requests + 2).await;
    assert_eq!((after.accepted, after.open), (3, 3));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!((proxy.counts().accepted, channels(&server).len()), (3, 1));
    drop(leases);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_gap_whoever_waits_asks_for_what_it_may_have_missed() {
    let server = Server::start();
    let (here, there) = (Leases::connect(&server.url()).await.unwrap(), Leases::connect(&server.url()).await.unwrap());
    until_heard(&server, 2).await;
    let _held = here.lease("k").acquire().await.unwrap();
    let waiting = waits(&there, "k");
    until("it stands in line", || in_line(&server, "k") == 1).await;
    let mut soonest = PATIENCE;
    for _ in 0..3 {
        // Just after a poll, so that the next one is most of an interval away.
        let claims = server.calls("zadd");
        until("it asks", || server.calls("zadd") > claims).await;
        let claims = server.calls("zadd");
        server.cmd(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        let began = Instant::now();
        until("it asks again", || server.calls("zadd") > claims).await;
        soonest = soonest.min(began.elapsed());
        until_heard(&server, 2).await;
    }
    assert!(soonest < INTERVAL * 6 / 10, "{soonest:?}");
    waiting.abort();
}
