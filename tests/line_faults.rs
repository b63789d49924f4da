//! The line when things go wrong: crashes, lost data, tampering, a full server.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Error, Lease, Leases, Result, StoreError, Wait};
use std::time::{Duration, Instant};
use support::{
    child::{self, Child},
    proxy::{Flow, Proxy},
    server::Server,
    until, within,
};
use tokio::task::{JoinHandle, JoinSet};

/// With the default TTL of 30 s: how long a place in the line, and a grant from it, lasts.
const PRESENCE: Duration = Duration::from_secs(3);
const TTL: Duration = Duration::from_secs(30);

async fn connect(server: &Server) -> Leases {
    Leases::connect(&server.url()).await.unwrap()
}

fn waits(leases: &Leases) -> JoinHandle<Result<Lease>> {
    tokio::spawn(leases.lease("k").wait(Wait::Forever).acquire())
}

async fn lease(waiting: JoinHandle<Result<Lease>>) -> Lease {
    within("the lease", waiting).await.unwrap().unwrap()
}

fn line(server: &Server) -> Vec<String> {
    let line = server.cmd(&["ZRANGE", "{k}:queue", "0", "-1"]).list();
    line.into_iter().map(|owner| owner.text().unwrap()).collect()
}

async fn until_waiting(server: &Server, count: usize) {
    until("so many wait", || line(server).len() == count).await;
}

/// Everybody works under the lease for a moment, one at a time; the fences in the order of service.
struct Crowd(JoinSet<u64>);

impl Crowd {
    async fn gather(server: &Server, leases: &[&Leases], count: usize) -> Crowd {
        let mut all = JoinSet::new();
        for n in 0..count {
            let request = leases[n % leases.len()].lease("k").wait(Wait::Forever);
            all.spawn(async move {
                let lease = request.acquire().await.unwrap();
                let fence = lease.fence();
                lease.release().await.unwrap();
                fence
            });
        }
        until_waiting(server, count).await;
        Crowd(all)
    }
    async fn served(mut self) {
        let mut fences = Vec::new();
        while let Some(fence) = within("everybody is served", self.0.join_next()).await {
            fences.push(fence.unwrap());
        }
        let count = fences.len();
        fences.sort_unstable();
        fences.dedup();
        assert_eq!(fences.len(), count, "each has its own fence");
    }
}

/// Waits in line in a process of its own; says so when it has the lease, and what becomes of it.
async fn wait_as_child(url: &str) {
    let leases = Leases::connect(url).await.unwrap();
    child::says("ready");
    let lease = leases.lease("k").wait(Wait::Forever).acquire().await.unwrap();
    child::says(format_args!("held {}", lease.fence()));
    lease.release().await.unwrap();
    child::says("released");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_handed_to_a_process_that_was_just_killed_costs_the_next_one_presence_and_no_ttl() {
    const NAME: &str = "a_key_handed_to_a_process_that_was_just_killed_costs_the_next_one_presence_and_no_ttl";
    if let Some(url) = child::told() {
        return wait_as_child(&url).await;
    }
    let server = Server::start();
    let leases = connect(&server).await;
    let held = leases.lease("k").acquire().await.unwrap();
    let mut child = Child::of(NAME, &server.url());
    child.hears("ready").await;
    until_waiting(&server, 1).await;
    let next = waits(&leases);
    until_waiting(&server, 2).await;
    let dead = line(&server).remove(0);
    child.kill();
    held.release().await.unwrap();
    let began = Instant::now();
    // It lived a moment ago, so the key is its own.
    assert!(server.get("k").unwrap().starts_with(&dead));
    assert!(server.pttl("k") <= 3000);
    let lease = lease(next).await;
    assert!(began.elapsed() < PRESENCE * 2, "{:?}", began.elapsed());
    lease.release().await.unwrap();
    assert_eq!(server.keys(), ["{k}:fence"], "and it leaves nothing behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_was_stopped_when_its_turn_came_is_no_owner_when_it_wakes_and_goes_on_waiting() {
    const NAME: &str = "a_waiter_that_was_stopped_when_its_turn_came_is_no_owner_when_it_wakes_and_goes_on_waiting";
    if let Some(url) = child::told() {
        return wait_as_child(&url).await;
    }
    let server = Server::start();
    let leases = connect(&server).await;
    let held = leases.lease("k").acquire().await.unwrap();
    let mut child = Child::of(NAME, &server.url());
    child.hears("ready").await;
    until_waiting(&server, 1).await;
    let stopped = line(&server).remove(0);
    let next = waits(&leases);
    until_waiting(&server, 2).await;
    child.stop();
    held.release().await.unwrap();
    let began = Instant::now();
    assert!(server.get("k").unwrap().starts_with(&stopped));
    let lease = lease(next).await;
    assert!(began.elapsed() < PRESENCE * 2, "{:?}", began.elapsed());
    child.resume();
    // Word of its turn is there, and it stands in line again instead.
    until_waiting(&server, 1).await;
    assert_eq!(line(&server), std::slice::from_ref(&stopped));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(child.unheard(), Vec::<String>::new());
    let fence = lease.fence();
    assert!(lease.is_held());
    lease.release().await.unwrap();
    assert!(child.hears("held").await.parse::<u64>().unwrap() > fence);
    child.hears("released").await;
    child.succeeds().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_killed_in_the_line_hold_up_nobody_for_longer_than_one_presence() {
    const NAME: &str = "waiters_killed_in_the_line_hold_up_nobody_for_longer_than_one_presence";
    if let Some(url) = child::told() {
        let leases = Leases::connect(&url).await.unwrap();
        let all: Vec<_> = (0..100).map(|_| waits(&leases)).collect();
        for waiting in all {
            drop(waiting.await.unwrap().unwrap());
        }
        return;
    }
    let server = Server::start();
    let leases = connect(&server).await;
    let held = leases.lease("k").acquire().await.unwrap();
    let mut child = Child::of(NAME, &server.url());
    until_waiting(&server, 100).await;
    let next = waits(&leases);
    until_waiting(&server, 101).await;
    child.kill();
    held.release().await.unwrap();
    let began = Instant::now();
    // By the time that the first of the dead has had its presence, all the others are known to be dead.
    let lease = lease(next).await;
    assert!(began.elapsed() < PRESENCE * 2, "{:?}", began.elapsed());
    lease.release().await.unwrap();
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_without_its_data_serves_hundreds_of_waiters() {
    let mut server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    let held = here.lease("k").acquire().await.unwrap();
    let fence = held.fence();
    let crowd = Crowd::gather(&server, &[&here, &there], 300).await;
    server.restart();
    crowd.served().await;
    // Whoever held it learns of it by its next renewal, or by releasing.
    let _ = held.release().await;
    let after = here.lease("k").acquire().await.unwrap();
    assert!(after.fence() > fence);
    after.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_flush_hundreds_of_waiters_are_served_without_a_rush() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    let held = here.lease("k").acquire().await.unwrap();
    let fence = held.fence();
    let crowd = Crowd::gather(&server, &[&here, &there], 300).await;
    let lists = server.calls("evalsha");
    server.cmd(&["FLUSHALL"]);
    crowd.served().await;
    // For each of them a claim, a release, a renewal and the odd poll, at the most in a list of its own.
    let lists = server.calls("evalsha") - lists;
    assert!(lists < 300 * 6, "{lists} lists");
    let _ = held.release().await;
    let after = there.lease("k").acquire().await.unwrap();
    assert!(after.fence() > fence);
    after.release().await.unwrap();
}

/// Who asks first after the flush may be anybody, and gets the key. What is promised: the others have their places back
/// once each has asked, so within one poll interval.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_that_was_lost_is_put_together_again_in_its_old_order() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    let held = here.lease("k").acquire().await.unwrap();
    let mut all = Vec::new();
    for n in 0..30 {
        all.push(waits(if n % 2 == 0 { &here } else { &there }));
        until_waiting(&server, n + 1).await;
    }
    let came = line(&server);
    server.cmd(&["DEL", "{k}:queue"]);
    until_waiting(&server, 30).await;
    assert_eq!(line(&server), came, "the queue deleted by hand");
    server.cmd(&["DEL", "{k}:waiters", "{k}:queue", "{k}:fence"]);
    until_waiting(&server, 30).await;
    assert_eq!(line(&server), came, "all of the line deleted");

    server.cmd(&["FLUSHALL"]);
    until("one has the key", || server.get("k").is_some()).await;
    let value = server.get("k").unwrap();
    let lucky = came.iter().position(|owner| value.starts_with(owner.as_str())).unwrap();
    until_waiting(&server, 29).await;
    let mut rest = came;
    rest.remove(lucky);
    assert_eq!(line(&server), rest);
    // And that is the order of service.
    lease(all.remove(lucky)).await.release().await.unwrap();
    for (owner, waiting) in rest.iter().zip(all) {
        let lease = lease(waiting).await;
        assert!(server.get("k").unwrap().starts_with(owner.as_str()));
        lease.release().await.unwrap();
    }
    drop(held);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_companion_of_another_type_is_a_typed_error_to_those_who_wait_and_stops_no_release() {
    for companion in ["{k}:queue", "{k}:waiters", "{k}:fence"] {
        let server = Server::start();
        let leases = connect(&server).await;
        let held = leases.lease("k").acquire().await.unwrap();
        let waiting = waits(&leases);
        until_waiting(&server, 1).await;
        server.cmd(&["DEL", companion]);
        match companion {
            "{k}:fence" => server.cmd(&["RPUSH", companion, "x"]),
            _ => server.cmd(&["SET", companion, "x"]),
        };
        let error = within("it is told", waiting).await.unwrap().unwrap_err();
        assert!(
            matches!(&error, Error::Store { source: StoreError::Refused(_), .. })
                && format!("{error:?}").contains("another type"),
            "{companion}: {error:?}"
        );
        assert!(held.is_held());
        held.release().await.unwrap();
        assert_eq!(server.cmd(&["EXISTS", "k"]).int(), 0, "{companion}: released");
        // With the obstacle gone, all is well.
        server.cmd(&["DEL", companion]);
        let again = leases.lease("k").acquire().await.unwrap();
        again.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_companion_spoilt_just_before_the_release_leaves_the_key_free_or_the_next_one_served() {
    for companion in ["{k}:queue", "{k}:waiters", "{k}:fence"] {
        let server = Server::start();
        let leases = connect(&server).await;
        let held = leases.lease("k").acquire().await.unwrap();
        let waiting = waits(&leases);
        until_waiting(&server, 1).await;
        server.cmd(&["DEL", companion]);
        server.cmd(&["SADD", companion, "x"]);
        held.release().await.unwrap();
        let waited = within("it is told or served", waiting).await.unwrap();
        if let Err(error) = waited {
            assert!(matches!(&error, Error::Store { source: StoreError::Refused(_), .. }), "{companion}: {error:?}");
        }
        until("nobody has the key", || server.cmd(&["EXISTS", "k"]).int() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_memory_is_full_a_release_still_hands_over_and_who_asks_is_told_why_not() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let (here, there) = (connect(&server).await, Leases::connect(&proxy.url()).await.unwrap());
    until("the inboxes are open", || server.cmd(&["PUBSUB", "CHANNELS"]).list().len() == 2).await;
    let held = here.lease("k").acquire().await.unwrap();
    let waiting = waits(&there);
    until_waiting(&server, 1).await;
    let first = line(&server).remove(0);
    // The waiter asks nothing meanwhile: it would be told that there is no memory for it.
    proxy.requests(Flow::Hold);
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    held.release().await.unwrap();
    assert!(server.get("k").unwrap().starts_with(&first));
    let next = lease(waiting).await;
    let error = here.lease("k").acquire().await.unwrap_err();
    assert!(
        matches!(&error, Error::Store { source: StoreError::Refused(_), .. })
            && format!("{error:?}").contains("out of memory"),
        "{error:?}"
    );
    // It is renewed and released all the same.
    proxy.pass();
    until("it is renewed", || server.pttl("k") > 20_000).await;
    assert!(next.is_held());
    next.release().await.unwrap();
    assert_eq!(server.cmd(&["EXISTS", "k"]).int(), 0);
    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    here.lease("k").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_cut_off_for_longer_than_its_presence_comes_back_to_its_place() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let (here, far) = (connect(&server).await, Leases::connect(&proxy.url()).await.unwrap());
    let held = here.lease("k").acquire().await.unwrap();
    let first = waits(&far);
    until_waiting(&server, 1).await;
    let came = line(&server);
    let second = waits(&here);
    until_waiting(&server, 2).await;
    proxy.refuse();
    proxy.reset_all();
    tokio::time::sleep(PRESENCE + Duration::from_millis(500)).await;
    proxy.pass();
    until("it is back in its place", || {
        // Alive again by its own account: it was never dropped, for nobody looked at the front of the line.
        let record = server.cmd(&["HGET", "{k}:waiters", &came[0]]).text();
        let now = server.cmd(&["TIME"]).list()[0].int() * 1000;
        let deadline = record.and_then(|record| record.split(' ').next()?.parse::<i64>().ok());
        line(&server).first() == Some(&came[0]) && deadline.is_some_and(|deadline| deadline > now + 1000)
    })
    .await;
    held.release().await.unwrap();
    let lease_of_first = lease(first).await;
    assert!(!second.is_finished());
    lease_of_first.release().await.unwrap();
    lease(second).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_while_many_wait_serves_them_all_when_it_goes_on() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    let held = here.lease("k").acquire().await.unwrap();
    let crowd = Crowd::gather(&server, &[&here, &there], 100).await;
    server.stop();
    tokio::time::sleep(PRESENCE).await;
    server.cont();
    assert!(held.is_held(), "less than a TTL");
    held.release().await.unwrap();
    let began = Instant::now();
    crowd.served().await;
    assert!(began.elapsed() < TTL / 2, "{:?}", began.elapsed());
}

/// A process with many waiters was killed: the one who lives behind them is served as soon as it asks.
#[tokio::test]
async fn a_free_key_is_taken_within_a_poll_interval_however_many_dead_stand_before() {
    let server = Server::start();
    let leases = Leases::connect(&server.url()).await.unwrap();
    let held = leases.lease("k").acquire().await.unwrap();
    // Nobody counts as alive without a record.
    for start in (1..4000).step_by(500) {
        let dead: Vec<_> = (start..start + 500).flat_map(|n: u32| [n.to_string(), format!("dead {n}")]).collect();
        let mut words = vec!["ZADD", "{k}:queue"];
        words.extend(dead.iter().map(String::as_str));
        server.cmd(&words);
    }
    server.cmd(&["PEXPIRE", "{k}:queue", "60000"]);
    let waiting = tokio::spawn(leases.lease("k").wait(Wait::Forever).acquire());
    until("it waits too", || server.cmd(&["HLEN", "{k}:waiters"]).int() == 1).await;
    let released = Instant::now();
    held.release().await.unwrap();
    let lease = within("the lease", waiting).await.unwrap().unwrap();
    let took = released.elapsed();
    lease.release().await.unwrap();
    // Two poll intervals at most, where one would be needed for each five hundred of them.
    assert!(took < Duration::from_secs(3), "the key was free for {took:?} though somebody waited");
}
