//! Acquisitions whose answer is lost or late, and acquisitions that nobody waits for any more.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Leases, Released, Wait};
use std::time::{Duration, Instant};
use support::{
    proxy::{CLAIM, Flow, Proxy, RELEASE, Then},
    server::Server,
    until, within,
};

/// Whatever is left behind would be in the way for so long.
const TTL: Duration = Duration::from_secs(30);

fn behind_proxy() -> (Server, Proxy) {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    (server, proxy)
}

fn fence_of(server: &Server) -> u64 {
    server.get("k").unwrap().rsplit_once('#').unwrap().1.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_is_lost_is_sent_again_and_is_one_lease() {
    for then in [Then::Reset, Then::Silence] {
        let (server, proxy) = behind_proxy();
        let leases =
            Leases::builder().ttl(TTL).attempt(Duration::from_millis(200)).connect(&proxy.url()).await.unwrap();
        proxy.lose_reply(CLAIM, then);
        let acquiring = tokio::spawn(leases.lease("k").acquire());
        until("the claim is carried out", || server.get("k").is_some()).await;
        let value = server.get("k");
        let lease = within("the lease", acquiring).await.unwrap().unwrap();
        assert_eq!(lease.fence(), fence_of(&server), "another fence for the same owner");
        assert_eq!(server.get("k"), value);
        assert_eq!(lease.release().await.unwrap(), Released::Released);
        assert_eq!(server.get("k"), None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_try_whose_answer_is_lost_is_an_error_and_leaves_nothing_behind() {
    for then in [Then::Reset, Then::Silence] {
        let (server, proxy) = behind_proxy();
        let leases =
            Leases::builder().ttl(TTL).attempt(Duration::from_millis(200)).connect(&proxy.url()).await.unwrap();
        proxy.lose_reply(CLAIM, then);
        let error = within("an end", leases.lease("k").try_acquire()).await.unwrap_err();
        assert!(matches!(&error, leasehold::Error::Store { source, .. } if source.may_pass()), "{error}");
        until("the key is free", || server.get("k").is_none() && server.cmd(&["GET", "{k}:fence"]).text().is_some())
            .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_whose_answer_came_late_counts_from_when_it_was_asked_for() {
    let (_server, proxy) = behind_proxy();
    let ttl = Duration::from_secs(12);
    // One claim, and time enough for its answer; a lock that is never renewed, for a renewal would be another date.
    let leases = Leases::builder().attempt(ttl / 3).connect(&proxy.url()).await.unwrap();
    let mut lock = leases.lock("k");
    proxy.hold_reply(CLAIM);
    let locking = tokio::spawn(async move { lock.lock_for(ttl).await.map(|_| lock) });
    proxy.until(|counts| counts.held == 1).await;
    let answered = Instant::now();
    tokio::time::sleep(ttl / 12).await;
    proxy.deliver();
    let mut lock = within("the lock", locking).await.unwrap().unwrap();
    let certain_until = Instant::now() + lock.view().unwrap().valid_for();
    assert!(certain_until < answered + ttl, "{:?} too long", certain_until - (answered + ttl));
    lock.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_comes_when_the_lease_is_over_hands_out_nothing_that_is_over() {
    let (server, proxy) = behind_proxy();
    let ttl = Duration::from_secs(1);
    let leases = Leases::builder().ttl(ttl).connect(&proxy.url()).await.unwrap();
    let start = Instant::now();
    proxy.replies(Flow::Hold);
    let acquiring = tokio::spawn(leases.lease("k").wait(support::PATIENCE).acquire());
    proxy.until(|counts| counts.held > 0).await;
    until("it has run out", || start.elapsed() > ttl * 2).await;
    proxy.pass();
    let lease = within("a lease that lasts", acquiring).await.unwrap().unwrap();
    assert!(lease.is_held(), "a lease that was over when it was handed out");
    assert_eq!(fence_of(&server), lease.fence());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquisition_that_lost_a_race_or_ran_out_of_time_is_free_a_round_trip_later() {
    let (server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(TTL).connect(&proxy.url()).await.unwrap();
    let mut lock = leases.lock("k");

    // The claim was carried out, its answer is on the way.
    proxy.hold_reply(CLAIM);
    tokio::select! {
        lease = leases.lease("k").acquire() => panic!("{lease:?}"),
        _ = proxy.until(|counts| counts.held == 1) => {}
    }
    proxy.deliver();
    until("the key is free", || server.get("k").is_none()).await;

    // The claim has not even arrived.
    proxy.requests(Flow::Hold);
    let timed_out = tokio::time::timeout(Duration::from_millis(50), lock.lock()).await;
    assert!(timed_out.is_err() && !lock.is_held());
    proxy.pass();
    let other = Leases::connect(&server.url()).await.unwrap();
    let lease = within("another's turn", other.lease("k").acquire()).await.unwrap();
    lease.release().await.unwrap();
    // The same handle works as before.
    within("a lock", lock.lock()).await.unwrap();
    lock.unlock().await.unwrap();

    // The connection breaks under it: what the server does with the claim is not known.
    proxy.cut_request(CLAIM, usize::MAX);
    let acquiring = tokio::spawn(leases.lease("k").acquire());
    until("the claim is carried out, or its loss is known", || server.get("k").is_some() || acquiring.is_finished())
        .await;
    acquiring.abort();
    until("the key is free", || server.get("k").is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acquisitions_aborted_at_any_moment_leave_the_key_free_and_are_never_renewed() {
    let server = Server::start();
    // Renewed for the first time after 1.5 to 3 s.
    let ttl = Duration::from_secs(9);
    let leases = Leases::builder().ttl(ttl).connect(&server.url()).await.unwrap();
    let mut monitor = server.connect();
    monitor.cmd(&["MONITOR"]);
    let mut caught = 0;
    let rounds = 400;
    for round in 0..rounds {
        let key = format!("k{}", round % 7);
        let acquiring = tokio::spawn(leases.lease(&key).wait(support::PATIENCE).acquire());
        let moment = Instant::now() + Duration::from_micros(spread(round) % 1500);
        while Instant::now() < moment {
            tokio::task::yield_now().await;
        }
        acquiring.abort();
        // Either nothing came of it, or a lease that is dropped here.
        if let Ok(lease) = acquiring.await {
            drop(lease.unwrap());
            caught += 1;
        }
    }
    assert!(caught > 0 && caught < rounds, "{caught} of {rounds} were faster");
    // They are all free long before their TTLs.
    let start = Instant::now();
    let free = until("no key but fences", || server.keys().iter().all(|key| key.ends_with(":fence")));
    tokio::time::timeout(ttl / 2, free).await.expect("free without a TTL's help");
    for key in server.keys() {
        assert!(server.pttl(&key) > 0, "{key} has no TTL");
    }
    // A renewal would have been sent by now.
    tokio::time::sleep((ttl / 3 + Duration::from_millis(200)).saturating_sub(start.elapsed())).await;
    server.cmd(&["ECHO", "the end"]);
    let (mut claims, mut releases) = (0, 0);
    loop {
        let line = monitor.read().unwrap().text().unwrap();
        if line.contains("the end") {
            break;
        }
        // Lists hold several operations, so this counts at least one for each.
        assert!(!line.contains("\"renew\""), "a renewal for nobody: {line}");
        claims += usize::from(line.contains("\"claim\""));
        releases += usize::from(line.contains("\"release\""));
    }
    assert!(claims > 0 && releases > 0, "{claims} claims, {releases} releases");
}

/// Spread over the range, and the same each time.
fn spread(n: u64) -> u64 {
    (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_that_give_up_leave_no_place_in_the_line_and_the_last_one_gets_the_key() {
    let server = Server::start();
    let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    let held = leases.lease("k").acquire().await.unwrap();
    let waiters: Vec<_> = (0..100).map(|_| tokio::spawn(leases.lease("k").wait(Wait::Forever).acquire())).collect();
    until("all stand in line", || server.cmd(&["ZCARD", "{k}:queue"]).int() == 100).await;
    let mut waiters = waiters.into_iter();
    let last = waiters.next_back().unwrap();
    for waiter in waiters {
        waiter.abort();
    }
    until("the others have left", || server.cmd(&["ZCARD", "{k}:queue"]).int() == 1).await;
    assert_eq!(server.cmd(&["HLEN", "{k}:waiters"]).int(), 1);
    held.release().await.unwrap();
    let lease = within("the last one's turn", last).await.unwrap().unwrap();
    lease.release().await.unwrap();
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_arrives_after_its_release_is_taken_back_or_refused() {
    let (server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(TTL).attempt(Duration::from_millis(200)).connect(&proxy.url()).await.unwrap();
    // What was written before the connection broke reaches the server after what is said on the next one: the claim
    // waits in the network, and the link gives the connection up.
    proxy.requests(Flow::Hold);
    let error = within("one try", leases.lease("k").try_acquire()).await.unwrap_err();
    assert!(matches!(error, leasehold::Error::Store { .. }), "{error}");
    proxy.pass();
    let other = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    let lease = within("another's turn", other.lease("k").acquire()).await.unwrap();
    lease.release().await.unwrap();
    until("nothing is left", || server.keys() == ["{k}:fence"]).await;
    // Nor does anything come of it later: the claim's time is over.
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_whose_answer_is_lost_is_sent_again_and_counts_as_done() {
    let (server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(TTL).attempt(Duration::from_millis(500)).connect(&proxy.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    proxy.lose_reply(RELEASE, Then::Reset);
    assert_eq!(within("a release", lease.release()).await.unwrap(), Released::Released);
    assert_eq!(server.get("k"), None);

    // Dropped at its first await, it goes on behind the caller's back.
    let lease = leases.lease("k").acquire().await.unwrap();
    proxy.hold_reply(RELEASE);
    tokio::select! {
        released = lease.release() => panic!("{released:?}"),
        _ = proxy.until(|counts| counts.held == 1) => {}
    }
    proxy.deliver();
    assert_eq!(server.get("k"), None);
}
