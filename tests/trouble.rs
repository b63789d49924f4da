//! One renewal goes wrong: the lease is at risk for a moment, and no work notices.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{LeaseState, Leases};
use std::{future::Future, time::Duration};
use support::{
    proxy::{Flow, Proxy, RENEW, Then},
    server::Server,
    within,
    work::Polls,
};
use tokio::sync::oneshot;

const TTL: Duration = Duration::from_secs(3);

/// Work goes on under a lease while `trouble` makes a renewal fail. It returns once the lease was seen at risk and held
/// again after that; `over` ends the trouble as soon as it was seen.
async fn unnoticed(url: &str, ttl: Duration, trouble: impl FnOnce(), over: impl Future<Output = ()>) {
    let leases = Leases::builder().ttl(ttl).connect(url).await.unwrap();
    let polls = Polls::default();
    let (view, seen) = oneshot::channel();
    let (finish, finished) = oneshot::channel();
    let work = tokio::spawn(leases.lease("k").run({
        let polls = polls.clone();
        |lease| async move {
            view.send(lease.clone()).unwrap();
            polls.note(lease, finished).await.unwrap();
            "done"
        }
    }));
    let lease = seen.await.unwrap();
    let mut watch = lease.watch();
    assert_eq!(*watch.borrow(), LeaseState::Held);
    trouble();
    within("it is seen at risk", watch.wait_for(|state| *state == LeaseState::AtRisk)).await.unwrap();
    over.await;
    within("it is renewed", watch.wait_for(|state| *state == LeaseState::Held)).await.unwrap();
    let next = lease.valid_until() + ttl / 6;
    support::until("renewals go on", || lease.valid_until() > next).await;
    assert_eq!(lease.state(), LeaseState::Held);
    finish.send(()).unwrap();
    assert_eq!(work.await.unwrap().unwrap(), "done");
    assert!(polls.seen().iter().all(|poll| !poll.told && !poll.left.is_zero()), "the work noticed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_whose_answer_is_lost_in_silence_is_sent_again() {
    let (_server, proxy) = behind_proxy();
    unnoticed(&proxy.url(), TTL, || proxy.lose_reply(RENEW, Then::Silence), async {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_answered_by_a_reset_is_sent_again() {
    let (_server, proxy) = behind_proxy();
    unnoticed(&proxy.url(), TTL, || proxy.lose_reply(RENEW, Then::Reset), async {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_cut_off_halfway_is_sent_again() {
    let (_server, proxy) = behind_proxy();
    unnoticed(&proxy.url(), TTL, || proxy.cut_request(RENEW, 40), async {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_whose_answer_comes_late_costs_nothing() {
    let (_server, proxy) = behind_proxy();
    let over = async {
        proxy.until(|counts| counts.held > 0).await;
        proxy.deliver();
    };
    unnoticed(&proxy.url(), TTL, || proxy.hold_reply(RENEW), over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_a_busy_server_refuses_is_sent_again() {
    let server = Server::start();
    server.cmd(&["CONFIG", "SET", "busy-reply-threshold", "20"]);
    let mut busy = server.connect();
    let trouble = || busy.send(&["EVAL", "while true do end", "0"]);
    let over = async {
        server.cmd(&["SCRIPT", "KILL"]);
    };
    unnoticed(&server.url(), TTL, trouble, over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_a_loading_server_refuses_is_sent_again() {
    let server = Server::with(&["--enable-debug-command", "yes"]);
    server.cmd(&["CONFIG", "SET", "loading-process-events-interval-bytes", "1024"]);
    server.cmd(&["DEBUG", "POPULATE", "2000", "filler", "64"]);
    let mut loading = server.connect();
    let trouble = || {
        // A millisecond for each key: two seconds, in which everybody is told LOADING.
        server.cmd(&["CONFIG", "SET", "key-load-delay", "1000"]);
        loading.send(&["DEBUG", "RELOAD"]);
    };
    let over = async {
        let told = server.try_cmd(&["GET", "filler:1"]);
        assert!(told.as_ref().is_err_and(|e| e.starts_with("LOADING")), "{told:?}");
    };
    unnoticed(&server.url(), 2 * TTL, trouble, over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_no_writes_for_a_moment_costs_nothing() {
    let server = Server::start();
    let trouble = || {
        server.cmd(&["CONFIG", "SET", "min-replicas-max-lag", "1"]);
        server.cmd(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    };
    let over = async {
        server.cmd(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    };
    unnoticed(&server.url(), TTL, trouble, over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_becomes_a_replica_for_a_moment_costs_nothing() {
    let server = Server::start();
    // A primary that nobody answers for: the data stays.
    let nowhere = support::server::free_port().to_string();
    let trouble = || {
        server.cmd(&["REPLICAOF", "127.0.0.1", &nowhere]);
    };
    let over = async {
        server.cmd(&["REPLICAOF", "NO", "ONE"]);
    };
    unnoticed(&server.url(), TTL, trouble, over).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_answers_within_the_margin_cost_nothing() {
    let (_server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(TTL).connect(&proxy.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let token = lease.cancel_token().clone();
    // Longer than an attempt, so that renewals overlap, each answered after the next was sent.
    proxy.replies(Flow::Delay(TTL / 5));
    for _ in 0..3 {
        let next = lease.valid_until() + TTL / 6;
        support::until("a renewal", || lease.valid_until() > next).await;
    }
    assert!(lease.is_held() && !token.is_cancelled());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_chance_to_renew_is_taken() {
    let (_server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(TTL).connect(&proxy.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let token = lease.cancel_token().clone();
    proxy.refuse();
    proxy.reset_all();
    support::until("most of the lease is over", || lease.valid_for() < TTL / 3).await;
    proxy.pass();
    support::until("a renewal", || lease.valid_for() > TTL / 2).await;
    assert!(!token.is_cancelled());
    lease.release().await.unwrap();
}

fn behind_proxy() -> (Server, Proxy) {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    (server, proxy)
}

/// What was not written yet when its next attempt was made is not written as well: a server that stood still for a while
/// gets one renewal for each lease when it goes on, not one for each attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_goes_on_is_not_met_by_every_renewal_that_was_tried_meanwhile() {
    const N: u64 = 2000;
    let server = Server::start();
    let leases = Leases::builder().ttl(Duration::from_secs(6)).connect(&server.url()).await.unwrap();
    let mut acquiring = tokio::task::JoinSet::new();
    for i in 0..N {
        acquiring.spawn(leases.lease(format!("k{i}")).acquire());
    }
    let mut held = Vec::new();
    while let Some(lease) = acquiring.join_next().await {
        held.push(lease.unwrap().unwrap());
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = server.calls("pexpire");
    server.cmd(&["CLIENT", "PAUSE", "2900"]);
    tokio::time::sleep(Duration::from_millis(3900)).await;
    assert!(held.iter().all(|lease| lease.is_held()));
    // One for each that fell due in the pause, and one for each that fell due after it.
    let sent = server.calls("pexpire") - before;
    assert!(sent <= 2 * N, "{sent} renewals for {N} leases");
}
