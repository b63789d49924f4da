//! Leases on the primary that sentinels name, whatever becomes of it and of them.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;

use leasehold::{
    LeaseState, Leases, LossReason, StoreError, Wait,
    store::{Store, contract, redis::RedisStore},
};
use std::{
    error::Error as _,
    time::{Duration, Instant},
};
use support::{
    PATIENCE,
    sentinels::{MadeUp, SERVICE, Says, Watched, info, look, url},
    server::{Reply, Server, free_port},
    suite::{self, Crowd},
    until, within,
};

const SECOND: Duration = Duration::from_secs(1);

async fn leases(url: &str, ttl: Duration) -> Leases {
    within("a connection", Leases::builder().ttl(ttl).connect(url)).await.unwrap()
}

/// Acquires a lease and gives it back.
async fn acquires(leases: &Leases, key: &str) {
    within("a lease", leases.lease(key).acquire()).await.unwrap().release().await.unwrap();
}

/// Who has the lease `k` there.
fn value(server: &Server) -> Option<String> {
    look(server, &["GET", "k"]).text()
}

async fn refusal(url: &str) -> StoreError {
    match within("an answer", Leases::connect(url)).await.unwrap_err() {
        leasehold::Error::Store { source, .. } => source,
        other => panic!("{other}"),
    }
}

/// Takes one lease after the other, each for a moment, until `until`; the longest time in which none was acquired, and
/// when it ended.
async fn longest_gap(leases: Leases, until: impl Fn() -> bool) -> (Duration, Instant) {
    let (mut last, mut longest) = (Instant::now(), (Duration::ZERO, Instant::now()));
    let mut n = 0;
    while !until() {
        n += 1;
        let request = leases.lease(format!("probe:{n}")).attempt(Duration::from_millis(200)).wait(Wait::No);
        if let Ok(lease) = request.acquire().await {
            let now = Instant::now();
            if now - last > longest.0 {
                longest = (now - last, now);
            }
            last = now;
            lease.release().await.ok();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    longest
}

/// What happens to the primary, and how long no lease could be acquired because of it.
async fn fails_over(what: &str, ttl: Duration, happen: impl FnOnce(&mut Watched, u16)) -> Watched {
    let mut watched = Watched::start();
    let old = watched.named_by(0);
    let leases = leases(&watched.url(), ttl).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    until("the replicas have it", || {
        watched.servers.iter().all(|server| server.port() == old || value(server).is_some())
    })
    .await;
    let (ended, end) = tokio::sync::oneshot::channel();
    let done = std::sync::atomic::AtomicBool::new(false);
    let start = Instant::now();
    happen(&mut watched, old);
    let gap = longest_gap(leases.clone(), || done.load(std::sync::atomic::Ordering::Relaxed));
    let switch = async {
        watched.switched_from(old).await;
        let switched = Instant::now();
        let renewed = lease.valid_until() + ttl / 3;
        until("the lease is renewed", || lease.valid_until() > renewed).await;
        let probes = |server: &Server| !look(server, &["KEYS", "*probe*"]).list().is_empty();
        until("others acquire too", || watched.servers.iter().any(|s| s.port() != old && probes(s))).await;
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        ended.send(()).unwrap();
        switched
    };
    let ((gap, gap_ended), switched) = tokio::join!(gap, switch);
    end.await.unwrap();
    let over = gap_ended.saturating_duration_since(switched).min(gap);
    println!(
        "{what}: the sentinels took {:?}; no lease could be acquired for {gap:?}, {over:?} beyond the switch",
        switched - start
    );
    assert!(over < 2 * SECOND, "{over:?} after the sentinels had agreed");
    assert!(lease.is_held());
    // On a machine as slow as it may be, the sentinels may have moved on once more.
    let kept = |fence: u64| {
        let has = |s: &Server| value(s).is_some_and(|value| value.ends_with(&format!("#{fence}")));
        watched.servers.iter().any(|s| s.port() != old && has(s))
    };
    until("the same lease is on the others", || kept(lease.fence())).await;
    within("the end", lease.release()).await.unwrap();
    let next = within("its successor", leases.lease("k").acquire()).await.unwrap();
    until("the next lease is on the others", || kept(next.fence())).await;
    watched
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lives_through_a_failover_that_was_asked_for() {
    fails_over("SENTINEL FAILOVER", 6 * SECOND, |watched, _| {
        watched.sentinels[0].cmd(&["SENTINEL", "FAILOVER", SERVICE]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lives_through_the_death_of_the_primary() {
    fails_over("a killed primary", 15 * SECOND, |watched, old| {
        watched.servers.iter_mut().find(|s| s.port() == old).unwrap().kill();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lives_through_a_primary_that_stands_still() {
    let watched = fails_over("a stopped primary", 15 * SECOND, |watched, old| watched.server(old).stop()).await;
    // The one that stood still wakes up, and is put in its place.
    for server in &watched.servers {
        server.cont();
    }
    until("two of the three follow", || {
        watched.servers.iter().filter(|s| info(s, "replication").contains("role:slave")).count() == 2
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_shorter_than_the_failover_is_told_lost_in_time() {
    let watched = Watched::start();
    let old = watched.named_by(0);
    let leases = leases(&watched.url(), Duration::from_millis(400)).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    watched.server(old).stop();
    let lost = within("the loss", lease.lost()).await;
    let late = tokio::time::Instant::now().saturating_duration_since(lease.valid_until());
    assert!(matches!(lost.reason, LossReason::Deadline { .. }), "{lost}");
    assert!(late < Duration::from_millis(200), "{late:?} late");
    let next = within("a lease on the new primary", leases.lease("k").wait(PATIENCE).acquire()).await.unwrap();
    assert!(next.fence() > lease.fence());
    assert_ne!(watched.named_by(0), old);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_replicas_have_is_on_the_server_that_takes_over_and_goes_on_there() {
    let mut watched = Watched::start();
    let old = watched.named_by(0);
    // Both, for whichever of them takes over: then it has one of its own.
    let (url, builder) = (watched.url(), |wanted| Leases::builder().ttl(15 * SECOND).replicas(wanted, SECOND));
    let both = within("a connection", builder(2).connect(&url)).await.unwrap();
    let one = within("a connection", builder(1).connect(&url)).await.unwrap();
    let lease = within("a lease", both.lease("k").acquire()).await.unwrap();
    watched.servers.iter_mut().find(|s| s.port() == old).unwrap().kill();
    watched.switched_from(old).await;
    let renewed = lease.valid_until() + 5 * SECOND;
    until("it is renewed by the new primary", || lease.valid_until() > renewed).await;
    let mut watch = lease.watch();
    within("one replica is too few", watch.wait_for(|state| *state == LeaseState::AtRisk)).await.unwrap();
    assert!(lease.is_held());
    let new = watched.named_by(0);
    assert!(value(watched.server(new)).unwrap().ends_with(&format!("#{}", lease.fence())));
    let error = within("an answer", both.lease("other").wait(PATIENCE).acquire()).await.unwrap_err();
    assert!(
        matches!(&error, leasehold::Error::Store { source: StoreError::Replicas { wanted: 2, .. }, .. }),
        "{error:?}"
    );
    // The new primary's replica may need a moment to follow it.
    let enough = async { while one.lease("other").wait(PATIENCE).acquire().await.is_err() {} };
    within("a lease that one replica has", enough).await;
    lease.release().await.unwrap();
}

/// The suite of every store, and of every line.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_sentinels_every_rule_is_kept_and_who_waits_is_served_in_order_with_a_push_and_without() {
    let watched = Watched::start();
    let url = watched.url();
    assert_eq!(contract::check(async || RedisStore::connect(&url).await.unwrap()).await, Ok(()));

    let both = [leases(&url, 30 * SECOND).await, leases(&url, 30 * SECOND).await];
    let primary = watched.server(watched.named_by(0));
    until("the inboxes are open", || look(primary, &["PUBSUB", "CHANNELS", "leasehold:*"]).list().len() == 2).await;
    suite::serves_in_order(&both, "told").await;
    for server in &watched.servers {
        look(server, &["ACL", "SETUSER", "default", "-publish"]);
    }
    let told = primary.calls("publish");
    suite::serves_in_order_untold(&both, "untold", SECOND).await;
    assert_eq!(primary.calls("publish"), told, "nobody was told");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_lives_through_the_death_of_the_primary_in_its_order() {
    let mut watched = Watched::start();
    let old = watched.named_by(0);
    let both = [leases(&watched.url(), 15 * SECOND).await, leases(&watched.url(), 15 * SECOND).await];
    let crowd = Crowd::gather(&both, "k", 6, true).await;
    watched.servers.iter_mut().find(|s| s.port() == old).unwrap().kill();
    watched.switched_from(old).await;
    // Each has asked the new primary, by which it counts as alive.
    until("all stand in the new line", || {
        let new = watched.server(watched.named_by(0));
        new.port() != old && {
            let now = look(new, &["TIME"]).list()[0].int() * 1000;
            let deadline = |record: Reply| record.text().unwrap().split(' ').next().unwrap().parse::<i64>().unwrap();
            let alive =
                look(new, &["HVALS", "{k}:waiters"]).list().into_iter().filter(|r| deadline(r.clone()) > now + 1500);
            alive.count() == 6
        }
    })
    .await;
    let (order, took) = crowd.served(&both[0]).await;
    println!("after a failover: {took:?}");
    assert_eq!(order, [0, 1, 2, 3, 4, 5]);
}

/// Back within the second in which nobody misses it. The worst that a primary can do: its replicas follow it into oblivion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_restarts_empty_at_once_is_told_as_a_loss_and_the_next_fence_is_larger() {
    let mut watched = Watched::start();
    let old = watched.named_by(0);
    let leases = leases(&watched.url(), 3 * SECOND).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    watched.servers.iter_mut().find(|s| s.port() == old).unwrap().restart();
    let back = Instant::now();
    let lost = within("the loss", lease.lost()).await;
    if watched.named_by(0) == old {
        assert_eq!(lost.reason, LossReason::Expired);
        assert!(back.elapsed() < 2 * SECOND, "{:?}: a renewal, a third of a TTL later, finds out", back.elapsed());
    }
    let next = within("the next lease", leases.lease("k").wait(PATIENCE).acquire()).await.unwrap();
    assert!(next.fence() > lease.fence());
    next.release().await.unwrap();
}

/// Two servers of which the first is the primary, and sentinels that say so.
async fn made_up(sentinels: usize) -> (Server, Server, Vec<MadeUp>) {
    let primary = Server::start();
    let replica = Server::with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    until("the replica follows", || info(&replica, "replication").contains("master_link_status:up")).await;
    let sentinels = (0..sentinels).map(|_| MadeUp::start(Says::Names(primary.port()))).collect();
    (primary, replica, sentinels)
}

fn ports(sentinels: &[MadeUp]) -> Vec<u16> {
    sentinels.iter().map(MadeUp::port).collect()
}

fn promote(replica: &Server, primary: &Server) {
    replica.cmd(&["REPLICAOF", "NO", "ONE"]);
    primary.cmd(&["REPLICAOF", "127.0.0.1", &replica.port().to_string()]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_primary_that_still_answers_is_left_with_the_next_operation() {
    let (primary, replica, sentinels) = made_up(3).await;
    let leases = leases(&url(&ports(&sentinels)), 30 * SECOND).await;
    acquires(&leases, "before").await;
    promote(&replica, &primary);
    for sentinel in &sentinels {
        sentinel.says(Says::Names(replica.port()));
    }
    let start = Instant::now();
    let lease = within("a lease", leases.lease("k").acquire()).await.unwrap();
    println!("a demoted primary: acquired on the new one after {:?}", start.elapsed());
    assert!(start.elapsed() < 3 * SECOND, "{:?}", start.elapsed());
    assert!(value(&replica).unwrap().ends_with(&format!("#{}", lease.fence())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_still_takes_writes_is_left_when_most_sentinels_name_another() {
    let (primary, other, sentinels) = made_up(3).await;
    let leases = leases(&url(&ports(&sentinels)), 30 * SECOND).await;
    other.cmd(&["REPLICAOF", "NO", "ONE"]);
    sentinels[0].says(Says::Names(other.port()));
    // One is not most of them; two are.
    tokio::time::sleep(6 * SECOND).await;
    assert_eq!((primary.clients().len(), other.clients().len()), (3, 0));
    sentinels[2].says(Says::Names(other.port()));
    let start = Instant::now();
    until("all connections have moved", || (primary.clients().len(), other.clients().len()) == (0, 3)).await;
    println!("a primary that was cut off: left after {:?}", start.elapsed());
    acquires(&leases, "k").await;
    assert!(other.get("{k}:fence").is_some() && primary.get("{k}:fence").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_that_hang_are_gone_or_lie_hold_nothing_up() {
    let (primary, replica, sentinels) = made_up(5).await;
    let gone = free_port();
    let stranger = Server::start();
    sentinels[0].says(Says::Nothing);
    sentinels[1].says(Says::Names(stranger.port()));
    let mut all = vec![gone];
    all.extend(&ports(&sentinels)[..]);
    // Of six one is gone, one hangs, one names a server of its own; four of six would be most.
    let start = Instant::now();
    acquires(&leases(&url(&all[1..]), SECOND).await, "k").await;
    assert!(
        start.elapsed() < SECOND,
        "{:?}: three of five agree, so nobody waits for the one that hangs",
        start.elapsed()
    );
    acquires(&leases(&url(&all), SECOND).await, "l").await;
    assert!(primary.get("{l}:fence").is_some());
    assert_eq!(stranger.keys(), [""; 0]);

    // Two that don't agree, and one of them names a replica.
    sentinels[2].says(Says::Names(replica.port()));
    for two in [[2, 3], [3, 2]] {
        let two = two.map(|at| sentinels[at].port());
        acquires(&leases(&url(&two), SECOND).await, "m").await;
    }
    // One that is late, and alone.
    let error = refusal(&url(&[sentinels[2].port()])).await;
    assert!(error.may_pass() && error.to_string().contains("is a replica; failing over?"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_sentinel_that_answers_the_error_says_what_to_look_at() {
    let hangs = MadeUp::start(Says::Nothing);
    let start = Instant::now();
    let error = refusal(&url(&[free_port(), free_port(), hangs.port()])).await;
    assert!(error.may_pass(), "{error}");
    assert!(error.to_string().contains("the URL names the sentinels, not the servers"), "{error}");
    assert!(error.to_string().contains(&format!("127.0.0.1:{}", hangs.port())), "{error}");
    assert!(error.source().is_some(), "{error:?}");
    assert!(start.elapsed() < 3 * SECOND, "{:?}", start.elapsed());

    // A server is no sentinel.
    let server = Server::start();
    let error = refusal(&url(&[server.port()])).await;
    assert!(!error.may_pass() && error.to_string().contains("the URL names the sentinels"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_the_sentinels_do_not_know_is_refused_with_the_parameter_to_change() {
    let sentinels = [MadeUp::start(Says::Unknown), MadeUp::start(Says::Unknown)];
    let error = refusal(&url(&[sentinels[0].port(), free_port(), sentinels[1].port()])).await;
    assert!(!error.may_pass(), "{error}");
    assert!(error.to_string().contains("`main`") && error.to_string().contains("sentinelServiceName"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_have_credentials_of_their_own_which_are_shown_nowhere() {
    let primary = Server::with(&["--requirepass", "primarys"]);
    let sentinel = Server::sentinel(&format!(
        "requirepass sentinels\nsentinel monitor {SERVICE} 127.0.0.1 {} 1\nsentinel auth-pass {SERVICE} primarys\n",
        primary.port()
    ));
    let url = |parameters: &str| {
        format!("redis-sentinel://:primarys@127.0.0.1:{}/0?sentinelServiceName={SERVICE}{parameters}", sentinel.port())
    };
    let leases = leases(&url("&sentinelPassword=sentinels"), SECOND).await;
    assert!(!format!("{leases:?}").contains("primarys"));
    acquires(&leases, "k").await;
    let nobody = "&sentinelUsername=nobody&sentinelPassword=sentinels";
    for (parameters, word) in
        [("", "sentinelPassword"), ("&sentinelPassword=wrong", "sentinelPassword"), (nobody, "sentinelUsername")]
    {
        let error = refusal(&url(parameters)).await;
        assert!(!error.may_pass() && error.to_string().contains(word), "{error}");
        let shown = format!("{error} {error:?} {:?}", error.source());
        assert!(!["primarys", "=sentinels", "wrong"].iter().any(|secret| shown.contains(secret)), "{shown}");
    }
    // The primary's own are wrong.
    let error = refusal(&url("&sentinelPassword=sentinels").replace(":primarys@", ":hunter2@")).await;
    assert!(!error.may_pass() && !format!("{error:?}").contains("hunter2"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_sentinels_a_connection_lives_on_and_a_new_one_waits_for_them() {
    let primary = Server::start();
    let mut sentinel = Server::sentinel(&format!("sentinel monitor {SERVICE} 127.0.0.1 {} 1\n", primary.port()));
    let leases = leases(&url(&[sentinel.port()]), SECOND).await;
    let store = RedisStore::connect(&url(&[sentinel.port()])).await.unwrap();
    let lease = leases.lease("held").acquire().await.unwrap();
    sentinel.kill();
    // It is asked several times meanwhile, in vain.
    let renewed = lease.valid_until() + 5 * SECOND;
    until("the lease is renewed", || lease.valid_until() > renewed).await;
    acquires(&leases, "k").await;

    primary.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    let error = within("an error", async {
        loop {
            // What was under way is lost first.
            let error = store.inspect(&"k".into()).await.err();
            if let Some(error) = error.filter(|error| error.to_string().contains("no sentinel answers")) {
                break error;
            }
        }
    })
    .await;
    assert!(error.may_pass(), "{error}");
    sentinel.restart();
    within("an answer", async { while store.inspect(&"k".into()).await.is_err() {} }).await;
    within("a lease", async { while leases.lease("k").acquire().await.is_err() {} }).await;
}
