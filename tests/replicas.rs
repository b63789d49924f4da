//! Leases that count only when replicas have them, on a real primary with real replicas.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;

use leasehold::{
    Error, Lease, LeaseState, Leases, LeasesBuilder, Released, StoreError, Wait,
    store::{
        Claim, Claimed, Identity, MemoryStore, Owner, Renewal, Renewed, Store, contract,
        quorum::{Member, Proposal},
        redis::RedisStore,
    },
};
use std::{
    error::Error as _,
    time::{Duration, Instant},
};
use support::{
    log::Log,
    sentinels::{info, look, replicated},
    server::Server,
    until, within,
};
use tokio::task::JoinSet;
use tracing::Level;

const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(6);
/// As long as it may be: replicas on a busy machine may be late.
const WITHIN: Duration = SECOND;

fn builder(wanted: u32) -> LeasesBuilder {
    Leases::builder().ttl(TTL).replicas(wanted, WITHIN)
}

async fn connect(server: &Server, wanted: u32) -> Leases {
    within("a connection", builder(wanted).connect(&server.url())).await.unwrap()
}

/// A lease, though replicas that do follow be late.
async fn acquired(leases: &Leases, key: &str) -> Lease {
    within("a lease", async {
        loop {
            match leases.lease(key).acquire().await {
                Ok(lease) => break lease,
                Err(error) => println!("late: {:?}", shortage(error)),
            }
        }
    })
    .await
}

/// How many were asked for and how many had it, and why they could not be counted.
#[track_caller]
fn shortage(error: Error) -> (u32, u32, Option<StoreError>) {
    match error {
        Error::Store { attempted: "acquire", source: StoreError::Replicas { wanted, had, why, .. }, .. } => {
            (wanted, had, why.map(|why| *why))
        }
        other => panic!("{other:?}"),
    }
}

/// What is left of leases on `k` that were given back: the fence, which outlives them.
async fn nothing_is_left(server: &Server) {
    until("the key is free", || server.get("k").is_none()).await;
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_acquired_is_on_as_many_replicas_as_were_asked_for_by_the_time_that_it_is_handed_out() {
    let servers = replicated(2);
    let leases = connect(&servers[0], 2).await;
    for n in 0..50 {
        let lease = acquired(&leases, &format!("k{n}")).await;
        for replica in &servers[1..] {
            let value = replica.get(&format!("k{n}"));
            assert!(value.is_some_and(|value| value.ends_with(&format!("#{}", lease.fence()))));
        }
        assert_eq!(lease.release().await.unwrap(), Released::Released);
    }
    // Also what is done while others are.
    let mut acquiring = JoinSet::new();
    for n in 0..300 {
        let leases = leases.clone();
        acquiring.spawn(async move { acquired(&leases, &format!("many{n}")).await });
    }
    while let Some(lease) = acquiring.join_next().await {
        let lease = lease.unwrap();
        let key = lease.key().to_string();
        assert!(servers[1..].iter().all(|replica| replica.get(&key).is_some()), "{key}");
        lease.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_replica_that_stands_still_an_acquisition_is_undone_once_and_says_how_many_had_it() {
    let servers = replicated(2);
    let within = Duration::from_millis(250);
    let both = Leases::builder().ttl(TTL).replicas(2, within).connect(&servers[0].url()).await.unwrap();
    let one = connect(&servers[0], 1).await;
    let before = acquired(&both, "k").await;
    let fence = before.fence();
    before.release().await.unwrap();
    servers[2].stop();

    let deleted = servers[0].calls("del");
    let start = Instant::now();
    let error = both.lease("k").acquire().await.unwrap_err();
    let took = start.elapsed();
    assert!(took >= within && took < within + SECOND, "{took:?}: the wait for others is not for replicas");
    assert_eq!(error.to_string(), "could not acquire `k`");
    assert_eq!(error.source().unwrap().to_string(), "too few replicas have it: 1 of the 2 that were asked for");
    assert!(matches!(&error, Error::Store { source, .. } if source.may_pass()));
    assert_eq!(shortage(error), (2, 1, None));
    nothing_is_left(&servers[0]).await;
    println!("undone {:?} after the answer", start.elapsed() - took);
    assert_eq!(servers[0].calls("del") - deleted, 1);

    // In every way to acquire.
    assert_eq!(shortage(both.lease("k").try_acquire().await.unwrap_err()), (2, 1, None));
    nothing_is_left(&servers[0]).await;
    assert_eq!(shortage(both.with_lease("k", async |_| panic!("it worked")).await.unwrap_err()), (2, 1, None));
    nothing_is_left(&servers[0]).await;
    assert_eq!(shortage(both.lock("k").lock().await.unwrap_err()), (2, 1, None));
    nothing_is_left(&servers[0]).await;
    assert_eq!(shortage(both.lock("k").lock_for(TTL).await.unwrap_err()), (2, 1, None));
    nothing_is_left(&servers[0]).await;
    assert_eq!(servers[0].calls("del") - deleted, 5, "each once");

    // One is enough for whoever asks for one.
    let lease = acquired(&one, "k").await;
    assert!(lease.fence() > fence);
    lease.release().await.unwrap();
    servers[2].cont();
    let after = acquired(&both, "k").await;
    assert_eq!(after.release().await.unwrap(), Released::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_all_replicas_gone_nobody_has_it() {
    let mut servers = replicated(2);
    let leases = connect(&servers[0], 1).await;
    servers[1].kill();
    servers[2].kill();
    assert_eq!(shortage(leases.lease("k").acquire().await.unwrap_err()), (1, 0, None));
    nothing_is_left(&servers[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_too_few_replicas_have_is_trouble_told_once_and_taken_back_and_no_loss() {
    let log = Log::of_all();
    let servers = replicated(2);
    let leases = Leases::builder().ttl(3 * SECOND).replicas(2, SECOND / 2);
    let leases = leases.connect(&servers[0].url()).await.unwrap();
    let lease = acquired(&leases, "renewed-thinly").await;
    let mut watch = lease.watch();
    servers[1].stop();
    within("it is at risk", watch.wait_for(|state| *state == LeaseState::AtRisk)).await.unwrap();
    // It is renewed all the same, again and again.
    let next = lease.valid_until() + 3 * SECOND;
    until("it is renewed", || lease.valid_until() > next).await;
    assert_eq!(lease.state(), LeaseState::AtRisk);
    assert!(lease.is_held() && !lease.cancel_token().is_cancelled());
    let told = |level, text: &str| {
        let about = |line: &str| line.contains("renewed-thinly") && line.contains(text);
        log.lines().iter().filter(|(at, line)| *at == level && about(line)).count()
    };
    assert_eq!(told(Level::WARN, "lease at risk"), 1, "{:#?}", log.lines());
    assert_eq!(told(Level::WARN, "1 of the 2"), 1);
    servers[1].cont();
    within("no risk", watch.wait_for(|state| *state == LeaseState::Held)).await.unwrap();
    until("it is told", || told(Level::INFO, "lease on enough replicas again") == 1).await;
    assert_eq!(told(Level::INFO, "renewed late"), 0);
    assert_eq!(lease.release().await.unwrap(), Released::Released);
    assert!(servers[0].get("renewed-thinly").is_none());
}

/// A server looks ten times a second whether a wait is over: the shortest TTLs have to live with that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_few_replicas_cost_no_lease_that_is_short() {
    let servers = replicated(1);
    let builder = Leases::builder().ttl(SECOND).attempt(SECOND / 20).replicas(1, SECOND / 20);
    let leases = builder.connect(&servers[0].url()).await.unwrap();
    let lease = acquired(&leases, "k").await;
    servers[1].stop();
    let connections = || {
        let stats = servers[0].cmd(&["INFO", "stats"]).text().unwrap();
        stats.lines().find(|line| line.starts_with("total_connections_received:")).unwrap().to_owned()
    };
    let connected = connections();
    let next = lease.valid_until() + 4 * SECOND;
    until("it is renewed", || lease.valid_until() > next || !lease.is_held()).await;
    assert_eq!(lease.state(), LeaseState::AtRisk);
    assert_eq!(connections(), connected, "none was given up for a server that said nothing");
    assert_eq!(lease.release().await.unwrap(), Released::Released);
}

/// However many there are: what came together waits together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_few_replicas_cost_none_of_a_thousand_leases() {
    let servers = replicated(1);
    let builder = Leases::builder().ttl(3 * SECOND).replicas(1, Duration::from_millis(300));
    let leases = builder.connect(&servers[0].url()).await.unwrap();
    let mut acquiring = JoinSet::new();
    for n in 0..1000 {
        let leases = leases.clone();
        acquiring.spawn(async move { acquired(&leases, &format!("k{n}")).await });
    }
    let held = acquiring.join_all().await;
    servers[1].stop();
    let (start, counted) = (Instant::now(), servers[0].calls("wait"));
    let mut least = Duration::MAX;
    while start.elapsed() < 6 * SECOND {
        least = least.min(held.iter().map(|lease| lease.valid_for()).min().unwrap());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(held.iter().all(|lease| lease.is_held() && !lease.cancel_token().is_cancelled()));
    assert!(held.iter().all(|lease| lease.state() == LeaseState::AtRisk));
    println!("the least that was certain: {least:?}; {} WAITs", servers[0].calls("wait") - counted);
    leases.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_handed_over_is_on_the_replicas_too_and_is_handed_on_when_it_is_not() {
    let servers = replicated(2);
    let [a, b] = [connect(&servers[0], 2).await, connect(&servers[0], 2).await];
    let mut soonest = Duration::MAX;
    for _ in 0..20 {
        let held = acquired(&a, "k").await;
        let waiting = tokio::spawn(b.lease("k").wait(Wait::Forever).acquire());
        until("it stands in line", || servers[0].cmd(&["ZCARD", "{k}:queue"]).int() == 1).await;
        let start = Instant::now();
        held.release().await.unwrap();
        let next = within("its turn", waiting).await.unwrap().unwrap();
        soonest = soonest.min(start.elapsed());
        let has = |server: &Server| server.get("k").is_some_and(|v| v.ends_with(&format!("#{}", next.fence())));
        assert!(servers.iter().all(has));
        assert!(servers[0].pttl("k") > 5000, "for its whole TTL");
        assert_eq!(next.release().await.unwrap(), Released::Released);
    }
    println!("handed over and on two replicas within {soonest:?}");
    assert!(soonest < SECOND / 5, "{soonest:?}: only a poll finds out");

    let held = acquired(&a, "k").await;
    let waiting = tokio::spawn(b.lease("k").wait(Wait::Forever).acquire());
    until("it stands in line", || servers[0].cmd(&["ZCARD", "{k}:queue"]).int() == 1).await;
    let relaxed = connect(&servers[0], 1).await;
    let last = tokio::spawn(relaxed.lease("k").wait(Wait::Forever).acquire());
    until("so does another", || servers[0].cmd(&["ZCARD", "{k}:queue"]).int() == 2).await;
    servers[1].stop();
    held.release().await.unwrap();
    let refused = within("its turn", waiting).await.unwrap().unwrap_err();
    assert_eq!(shortage(refused), (2, 1, None));
    // Whoever is content with one is next.
    let last = within("the last turn", last).await.unwrap().unwrap();
    assert_eq!(last.release().await.unwrap(), Released::Released);
    nothing_is_left(&servers[0]).await;
}

/// A claim or a renewal may find that all is as it should be; the replicas have to have that all the same.
#[tokio::test]
async fn replicas_are_counted_behind_a_claim_that_changes_nothing_on_a_connection_that_wrote_nothing() {
    let servers = replicated(1);
    let store = async || RedisStore::connect(&servers[0].url()).await.unwrap().replicas(1, WITHIN).await.unwrap();
    let (first, second) = (store().await, store().await);
    let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
    let claim = |ttl| Claim::new("k".into(), owner.clone(), ttl);
    let Claimed::Held { fence, .. } = first.claim(&claim(60 * SECOND)).await.unwrap() else { panic!("not held") };
    servers[1].stop();
    let short = Err(StoreError::replicas(1, 0));
    assert_eq!(second.claim(&claim(TTL)).await, short);
    let renewal = |store: RedisStore| {
        let renewal = Renewal::new("k".into(), owner.clone(), fence, TTL);
        async move { store.renew(&renewal).await.map(|renewed| (store, renewed)) }
    };
    let (second, renewed) = renewal(second).await.unwrap();
    assert_eq!(renewed, Renewed::thin(1, 0));
    assert!(servers[0].pttl("k") > 50_000, "and neither shortens it");
    // What gives nothing has nothing to count.
    let other = Owner::draw(&Identity::new("me").unwrap()).unwrap();
    let busy = second.claim(&Claim::new("k".into(), other, TTL)).await;
    assert!(matches!(busy, Ok(Claimed::Busy { .. })), "{busy:?}");
    servers[1].cont();
    until("it follows again", || look(&servers[1], &["EXISTS", "k"]).int() == 1).await;
    assert_eq!(renewal(second).await.unwrap().1, Renewed::Renewed);
}

#[tokio::test]
async fn a_store_with_replicas_keeps_every_rule() {
    let servers = replicated(1);
    let store = async || RedisStore::connect(&servers[0].url()).await.unwrap().replicas(1, SECOND).await.unwrap();
    assert_eq!(contract::check(store).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_count_replicas_is_refused_with_what_to_change() {
    let refusal = async |server: &Server| match builder(1).connect(&server.url()).await.unwrap_err() {
        Error::Store { attempted: "connect", source, .. } => source,
        other => panic!("{other:?}"),
    };
    let unknown = refusal(&Server::with(&["--rename-command", "WAIT", ""])).await;
    assert!(!unknown.may_pass() && unknown.to_string().contains("leave out `replicas`"), "{unknown}");
    let denied = Server::start();
    denied.cmd(&["ACL", "SETUSER", "default", "-wait"]);
    let denied = refusal(&denied).await;
    assert!(!denied.may_pass() && denied.to_string().contains("+wait"), "{denied}");
    let replica = refusal(&replicated(1)[1]).await;
    assert!(replica.may_pass() && replica.to_string().contains("this server is a replica"), "{replica}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_wait_is_forbidden_later_nothing_is_acquired_nothing_left_and_what_is_held_lives_on() {
    let servers = replicated(1);
    let leases = connect(&servers[0], 1).await;
    let lease = acquired(&leases, "held").await;
    let mut watch = lease.watch();
    servers[0].cmd(&["ACL", "SETUSER", "default", "-wait"]);
    let (wanted, had, why) = shortage(leases.lease("k").acquire().await.unwrap_err());
    assert_eq!((wanted, had), (1, 0));
    assert!(why.is_some_and(|why| !why.may_pass() && why.to_string().contains("+wait")));
    until("the key is free", || servers[0].get("k").is_none()).await;
    within("it is at risk", watch.wait_for(|state| *state == LeaseState::AtRisk)).await.unwrap();
    let next = lease.valid_until() + 3 * SECOND;
    until("it is renewed", || lease.valid_until() > next).await;
    servers[0].cmd(&["ACL", "SETUSER", "default", "+wait"]);
    within("no risk", watch.wait_for(|state| *state == LeaseState::Held)).await.unwrap();
    assert_eq!(lease.release().await.unwrap(), Released::Released);
}

/// The server waits for its replicas with a claim of `k`.
async fn waits(server: &Server) {
    until("it waits for replicas", || {
        info(server, "clients").contains("blocked_clients:1\r") && server.get("k").is_some()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquisition_that_is_dropped_while_it_waits_for_replicas_leaves_nothing() {
    let servers = replicated(1);
    let leases = Leases::builder().ttl(12 * SECOND).replicas(1, 2 * SECOND);
    let leases = leases.connect(&servers[0].url()).await.unwrap();
    servers[1].stop();
    let acquiring = tokio::spawn(leases.lease("k").acquire());
    waits(&servers[0]).await;
    acquiring.abort();
    assert!(acquiring.await.unwrap_err().is_cancelled());
    nothing_is_left(&servers[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_lost_while_it_waits_for_replicas_is_a_claim_unanswered_that_is_made_again() {
    let servers = replicated(1);
    let leases = Leases::builder().ttl(12 * SECOND).replicas(1, 2 * SECOND);
    let leases = leases.connect(&servers[0].url()).await.unwrap();
    servers[1].stop();
    let acquiring = tokio::spawn(leases.lease("k").acquire());
    waits(&servers[0]).await;
    let fence = servers[0].get("{k}:fence").unwrap();
    servers[1].cont();
    servers[0].cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    let lease = within("a lease", acquiring).await.unwrap().unwrap();
    assert_eq!(lease.fence().to_string(), fence, "the claim that was lost has made it");
    // What was on its way may come to be carried out yet, so the release may have an echo.
    lease.release().await.unwrap();
    nothing_is_left(&servers[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_demoted_while_it_waits_for_replicas_gives_no_lease() {
    let servers = replicated(1);
    let leases = Leases::builder().ttl(12 * SECOND).replicas(1, 2 * SECOND);
    let leases = leases.connect(&servers[0].url()).await.unwrap();
    servers[1].stop();
    let acquiring = tokio::spawn(leases.lease("k").try_acquire());
    waits(&servers[0]).await;
    // Of nobody, so that it keeps its data.
    let nowhere = support::server::free_port().to_string();
    servers[0].cmd(&["REPLICAOF", "127.0.0.1", &nowhere]);
    let (wanted, had, why) = shortage(within("an answer", acquiring).await.unwrap().unwrap_err());
    assert_eq!((wanted, had), (1, 0));
    assert!(why.is_some_and(|why| why.may_pass() && why.to_string().contains("was made a replica")));
    // What could not be undone there is undone as soon as it can.
    look(&servers[0], &["REPLICAOF", "NO", "ONE"]);
    until("the key is free", || look(&servers[0], &["EXISTS", "k"]).int() == 0).await;
}

#[tokio::test]
async fn what_has_no_replicas_refuses_to_wait_for_them() {
    let says = |error: Error, word: &str| match error {
        Error::Invalid(invalid) => assert!(invalid.setting == "replicas" && invalid.rule.contains(word), "{invalid}"),
        other => panic!("{other:?}"),
    };
    says(builder(1).build(MemoryStore::new()).unwrap_err().into(), "`connect`");
    let nobody = ["redis://127.0.0.1:1", "redis://127.0.0.1:2", "redis://127.0.0.1:3"];
    says(builder(1).connect_quorum(nobody).await.unwrap_err(), "not in a quorum");
    // Before anything is sent.
    says(builder(0).connect(nobody[0]).await.unwrap_err(), "at least one");
    let long = Leases::builder().ttl(TTL).replicas(1, 2 * SECOND);
    says(long.connect(nobody[0]).await.unwrap_err(), "at most an `attempt`");

    let servers = replicated(1);
    let store = async || RedisStore::connect(&servers[0].url()).await.unwrap();
    says(store().await.replicas(0, SECOND).await.unwrap_err(), "at least one");
    says(store().await.replicas(1, Duration::ZERO).await.unwrap_err(), "at least 1 ms");
    says(store().await.replicas(1, 2 * SECOND).await.unwrap_err(), "at most 1 s");
    // A request may make too little of its TTL.
    let leases = connect(&servers[0], 1).await;
    says(leases.lease("k").ttl(SECOND).acquire().await.unwrap_err(), "at most an `attempt`");
    // Nor is it silently left out by a member of a quorum.
    let member = store().await.replicas(1, SECOND).await.unwrap();
    let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
    let refused = member.propose(&Proposal::new("k".into(), owner, TTL)).await.unwrap_err();
    assert!(!refused.may_pass() && refused.to_string().contains("no `replicas`"), "{refused}");
}
