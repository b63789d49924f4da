//! First come, first served, on a real server.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{Error, Lease, Leases, Result, Wait};
use std::{
    collections::HashSet,
    time::{Duration, Instant},
};
use support::{
    child::{self, Child},
    proxy::{Flow, Proxy},
    server::Server,
    until, within,
};
use tokio::task::JoinHandle;

/// How often whoever waits asks, with the default TTL of 30 s.
const INTERVAL: Duration = Duration::from_secs(1);

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

/// The inbox of a `Leases` is open.
async fn until_heard(server: &Server, inboxes: usize) {
    until("the inboxes are open", || server.cmd(&["PUBSUB", "CHANNELS"]).list().len() == inboxes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_hands_over_to_the_first_in_line_without_a_gap() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    until_heard(&server, 2).await;
    let mut held = here.lease("k").acquire().await.unwrap();
    for round in 0..20 {
        let waiting = waits(if round % 2 == 0 { &there } else { &here });
        until_waiting(&server, 1).await;
        let next = line(&server).remove(0);
        let fence = held.fence();
        held.release().await.unwrap();
        // The release itself has given the key away.
        let value = server.get("k").unwrap();
        assert!(value.starts_with(&format!("{next}#")), "{value}");
        held = lease(waiting).await;
        assert!(held.fence() > fence);
        assert_eq!(value, format!("{next}#{}", held.fence()));
    }
    held.release().await.unwrap();
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn word_of_a_hand_over_is_not_waited_for_by_asking() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    until_heard(&server, 2).await;
    let mut told = 0;
    let mut held = here.lease("k").acquire().await.unwrap();
    for _ in 0..8 {
        let waiting = waits(&there);
        until_waiting(&server, 1).await;
        let evals = server.calls("evalsha");
        held.release().await.unwrap();
        held = lease(waiting).await;
        // The release and the first renewal; a poll may have fallen in between.
        told += u32::from(server.calls("evalsha") - evals <= 2);
        held.release().await.unwrap();
        held = here.lease("k").acquire().await.unwrap();
    }
    assert!(told >= 4, "{told} of 8 hand-overs took no poll");
}

#[tokio::test]
async fn waiters_of_four_processes_are_served_in_the_order_in_which_they_came() {
    const NAME: &str = "waiters_of_four_processes_are_served_in_the_order_in_which_they_came";
    if let Some(url) = child::told() {
        let (url, me) = url.split_once(' ').unwrap();
        let leases = Leases::builder().label(me).connect(url).await.unwrap();
        let mut waiting = tokio::task::JoinSet::new();
        for round in 0..5 {
            // One after another, as the parent says: it writes the next one's name.
            let turn = format!("{me}-{round}");
            loop {
                if leases.read("turn").await.unwrap() == Some(turn.clone().into_bytes()) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            let request = leases.lease("k").wait(Wait::Forever);
            waiting.spawn(async move {
                let lease = request.acquire().await.unwrap();
                child::says(format_args!("served {turn} {}", lease.fence()));
                lease.release().await.unwrap();
            });
        }
        while let Some(done) = waiting.join_next().await {
            done.unwrap();
        }
        return;
    }
    let server = Server::start();
    let leases = connect(&server).await;
    let held = leases.lease("k").acquire().await.unwrap();
    let mut children: Vec<Child> = (0..4).map(|n| Child::of(NAME, &format!("{} c{n}", server.url()))).collect();
    let mut came = Vec::new();
    for round in 0..5 {
        for n in [2, 0, 3, 1] {
            let turn = format!("c{n}-{round}");
            server.cmd(&["SET", "turn", &turn]);
            came.push(turn);
            until_waiting(&server, came.len()).await;
        }
    }
    let owners = line(&server);
    held.release().await.unwrap();
    let mut served: Vec<(u64, String)> = Vec::new();
    for child in &mut children {
        for _ in 0..5 {
            let said = child.hears("served").await;
            let (turn, fence) = said.split_once(' ').unwrap();
            served.push((fence.parse().unwrap(), turn.to_owned()));
        }
        child.succeeds().await;
    }
    served.sort();
    let served: Vec<&String> = served.iter().map(|(_, turn)| turn).collect();
    assert_eq!(served, came.iter().collect::<Vec<_>>());
    assert_eq!(owners.iter().collect::<HashSet<_>>().len(), 20);
    assert_eq!(server.keys().len(), 2, "only the fence and the turn: {:?}", server.keys());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_try_never_jumps_the_line_nor_joins_it() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    let mut held = here.lease("k").acquire().await.unwrap();
    let impatient = tokio::spawn({
        let here = here.clone();
        async move {
            let mut tries = 0;
            while here.lease("k").try_acquire().await.unwrap().is_none() {
                tries += 1;
                tokio::task::yield_now().await;
            }
            tries
        }
    });
    for _ in 0..20 {
        let waiting = waits(&there);
        until_waiting(&server, 1).await;
        held.release().await.unwrap();
        held = lease(waiting).await;
        assert!(!impatient.is_finished(), "it got the key though somebody waited for it");
    }
    // Nor when the key is gone and nobody has asked since.
    let waiting = waits(&there);
    until_waiting(&server, 1).await;
    server.cmd(&["DEL", "k"]);
    let next = lease(waiting).await;
    assert!(!impatient.is_finished(), "it got the key though somebody waited for it");
    assert!(next.fence() > held.fence());
    drop(held);
    next.release().await.unwrap();
    assert!(within("the key is free at last", impatient).await.unwrap() > 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_keeps_its_place_while_it_asks_and_inspect_counts_those_who_wait() {
    let server = Server::start();
    let leases = Leases::builder().ttl(Duration::from_millis(900)).label("me").connect(&server.url()).await.unwrap();
    let held = leases.lease("k").acquire().await.unwrap();
    let mut all = Vec::new();
    for n in 1..=5 {
        all.push(waits(&leases));
        until_waiting(&server, n).await;
        let holding = leases.inspect("k").await.unwrap().unwrap();
        assert_eq!((holding.waiters, holding.label.as_deref()), (n as u64, Some("me")));
    }
    let came = line(&server);
    // Five asked more than twice each, past any presence.
    let zadds = server.calls("zadd");
    until("they have asked", || {
        assert_eq!(line(&server), came);
        server.calls("zadd") >= zadds + 20
    })
    .await;
    held.release().await.unwrap();
    for (n, waiting) in all.into_iter().enumerate() {
        let lease = lease(waiting).await;
        assert_eq!(leases.inspect("k").await.unwrap().unwrap().waiters, 4 - n as u64);
        assert!(server.get("k").unwrap().starts_with(&came[n]));
        lease.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_dropped_at_once_leave_nothing_and_disturb_nobody() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    let held = here.lease("k").acquire().await.unwrap();
    let all: Vec<_> = (0..1000).map(|_| waits(&there)).collect();
    until_waiting(&server, 1000).await;
    assert_eq!(here.inspect("k").await.unwrap().unwrap().waiters, 1000);
    let left = server.calls("zrem");
    for waiting in all {
        waiting.abort();
    }
    until("the line is gone", || server.keys() == ["k", "{k}:fence"]).await;
    assert!(server.calls("zrem") - left >= 1000, "each has left by itself, and was not forgotten after its presence");
    assert!(held.is_held());
    let waiting = waits(&there);
    until_waiting(&server, 1).await;
    held.release().await.unwrap();
    lease(waiting).await.release().await.unwrap();
    // What was left unanswered may be released once more; nothing comes of it.
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_leaves_just_as_it_is_served_hands_on_at_once() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let (here, deaf, next) =
        (connect(&server).await, Leases::connect(&proxy.url()).await.unwrap(), connect(&server).await);
    let held = here.lease("k").acquire().await.unwrap();
    let leaving = waits(&deaf);
    until_waiting(&server, 1).await;
    let waiting = waits(&next);
    until_waiting(&server, 2).await;
    let [first, second] = line(&server).try_into().unwrap();
    // It is served and does not know; its own poll would tell it.
    proxy.replies(Flow::Hold);
    held.release().await.unwrap();
    assert!(server.get("k").unwrap().starts_with(&first));
    leaving.abort();
    let began = Instant::now();
    let lease = lease(waiting).await;
    assert!(server.get("k").unwrap().starts_with(&second));
    assert!(began.elapsed() < 2 * INTERVAL, "long before a presence is over: {:?}", began.elapsed());
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_program_is_waited_for_like_any_other() {
    let server = Server::start();
    let leases = connect(&server).await;
    // With a TTL: until it ends.
    server.cmd(&["SET", "k", "token of another", "NX", "PX", "400"]);
    let (first, second) = (waits(&leases), {
        until_waiting(&server, 1).await;
        waits(&leases)
    });
    let held = lease(first).await;
    assert!(held.fence() > 0);
    held.release().await.unwrap();
    lease(second).await.release().await.unwrap();

    // Deleted by its owner: within a poll interval. Generous, for a busy machine.
    server.cmd(&["SET", "k", "token of another", "NX", "PX", "600000"]);
    let waiting = waits(&leases);
    until_waiting(&server, 1).await;
    server.cmd(&["DEL", "k"]);
    let began = Instant::now();
    lease(waiting).await.release().await.unwrap();
    assert!(began.elapsed() < 4 * INTERVAL, "{:?}", began.elapsed());

    // Without a TTL: asked for at the usual pace, and no faster.
    server.cmd(&["SET", "k", "token of another"]);
    let claims = server.calls("zadd");
    let error = within("the wait ends", leases.lease("k").wait(2 * INTERVAL).acquire()).await.unwrap_err();
    assert!(server.calls("zadd") - claims <= 4, "{}", server.calls("zadd") - claims);
    match &error {
        Error::Contended { holder: None, remaining: None, .. } => {}
        _ => panic!("{error:?}"),
    }
    let waiting = waits(&leases);
    until_waiting(&server, 1).await;
    server.cmd(&["DEL", "k"]);
    lease(waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_is_none_or_bounded_or_without_end() {
    let server = Server::start();
    let (holder, leases) =
        (Leases::builder().label("holder").connect(&server.url()).await.unwrap(), connect(&server).await);
    let held = holder.lease("k").acquire().await.unwrap();
    let claims = server.calls("zadd");
    let error = leases.lease("k").wait(Wait::No).acquire().await.unwrap_err();
    assert!(error.is_contended());
    assert_eq!(server.calls("zadd"), claims, "it never stood in line");

    let wait = Duration::from_millis(300);
    let began = Instant::now();
    let error = leases.lease("k").wait(Wait::UpTo(wait)).acquire().await.unwrap_err();
    assert!(began.elapsed() >= wait);
    let Error::Contended { waited, holder: Some(label), remaining: Some(remaining), .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!(&*label, "holder");
    assert!(waited >= wait && remaining < Duration::from_secs(30) && remaining > Duration::from_secs(1));
    until("it has left the line", || line(&server).is_empty()).await;

    let waiting = waits(&leases);
    until_waiting(&server, 1).await;
    held.release().await.unwrap();
    lease(waiting).await.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_a_crashed_holders_time_ends_the_first_takes_over_and_the_others_do_not_come() {
    const NAME: &str = "when_a_crashed_holders_time_ends_the_first_takes_over_and_the_others_do_not_come";
    const WAITERS: usize = 60;
    if let Some(url) = child::told() {
        let leases = Leases::builder().ttl(Duration::from_secs(4)).connect(&url).await.unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        child::says(format_args!("held {}", lease.fence()));
        lease.lost().await;
        return;
    }
    let server = Server::start();
    let mut holder = Child::of(NAME, &server.url());
    holder.hears("held").await;
    let leases = connect(&server).await;
    // They come over one interval, so that their usual polls are spread over it too.
    let mut all = Vec::new();
    for n in 0..WAITERS {
        all.push(waits(&leases));
        if n == 0 {
            until_waiting(&server, 1).await;
        }
        tokio::time::sleep(INTERVAL / WAITERS as u32).await;
    }
    until_waiting(&server, WAITERS).await;
    let first = line(&server).remove(0);
    holder.kill();
    // Each claim of a waiter is one ZADD.
    until("its time is nearly over", || server.pttl("k") < 50).await;
    let (before, began) = (server.calls("zadd"), Instant::now());
    until("it is over", || server.get("k").is_some_and(|value| value.starts_with(&first))).await;
    assert!(server.pttl("k") > 20_000, "taken by asking, for the whole TTL");
    tokio::time::sleep(Duration::from_millis(100)).await;
    let claims = server.calls("zadd") - before;
    // The usual polls go out in eight beats an interval, so up to two beats' more than their share.
    let usual = WAITERS as f64 * (began.elapsed().as_secs_f64() / 0.875 + 0.25);
    assert!(claims as f64 <= usual + 10.0, "{claims} claims of {WAITERS} waiters in {:?}", began.elapsed());
    for waiting in all {
        waiting.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_waiter_costs_one_poll_an_interval_and_a_thousand_of_a_process_travel_together() {
    let server = Server::start();
    let (here, there) = (connect(&server).await, connect(&server).await);
    let _held = here.lease("k").acquire().await.unwrap();
    let one = waits(&there);
    until_waiting(&server, 1).await;
    let span = 4 * INTERVAL;
    let polls = async |server: &Server| {
        let (zadds, evals) = (server.calls("zadd"), server.calls("evalsha"));
        tokio::time::sleep(span).await;
        (server.calls("zadd") - zadds, server.calls("evalsha") - evals)
    };
    let (claims, lists) = polls(&server).await;
    // A renewal of the holder's may fall into it.
    assert!((3..=6).contains(&claims) && lists <= 7, "{claims} claims in {lists} lists in {span:?}");

    let all: Vec<_> = (0..999).map(|_| waits(&there)).collect();
    until_waiting(&server, 1000).await;
    let (claims, lists) = polls(&server).await;
    println!("1,000 waiters: {claims} claims in {lists} lists in {span:?}");
    assert!(claims > 2000 && lists < claims / 10, "{claims} claims in {lists} lists in {span:?}");
    for waiting in all {
        waiting.abort();
    }
    one.abort();
}

/// Every time that is sent is a duration, but for one: until when a claim may be carried out. That one is on the server's
/// clock, as its answers show it. So two processes whose wall clocks differ stand in one line.
#[tokio::test]
async fn no_wall_clock_of_ours_is_ever_sent() {
    use support::fake::{Fake, Say};
    // A server that lives an hour after 1970 began: no wall clock of ours says that.
    const HOUR: u64 = 3_600_000_000;
    let fake = Fake::start(|before, _| {
        let queued = ["queued", "0", "5000", "7", "8", ""].map(str::to_owned).to_vec();
        Say::Answers(HOUR + before as u64 * 1000, vec![queued])
    });
    let leases = Leases::builder().ttl(Duration::from_secs(1)).connect(&fake.url()).await.unwrap();
    let error = leases.lease("k").wait(Duration::from_secs(2)).acquire().await.unwrap_err();
    assert!(error.is_contended(), "{error}");
    let claims: Vec<_> = fake.heard().into_iter().filter(|words| words.iter().any(|word| word == "claim")).collect();
    assert!(claims.len() > 4, "{claims:?}");
    for (n, words) in claims.iter().enumerate() {
        for word in words.iter().filter_map(|word| word.parse::<u64>().ok()) {
            let in_milliseconds = word <= 3000;
            let on_the_servers_clock = (1_000_000_000..HOUR + 60_000_000).contains(&word);
            assert!(in_milliseconds || on_the_servers_clock, "claim {n}: {words:?}");
        }
    }
}
