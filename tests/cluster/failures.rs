//! Primaries that die, hang, are replaced, or keep no slots.
use crate::{
    SECOND, acquires, leases,
    support::{
        PATIENCE,
        cluster::{Cluster, NODE_TIMEOUT, PRIMARIES, slot},
        proxy::Proxy,
        until, within,
    },
};
use leasehold::{Lease, Leases, Wait};
use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

const TTL: Duration = Duration::from_secs(9);

/// Takes a lease on a primary time and again, until `done`; the longest time in which none was acquired, and when it ended.
async fn longest_gap(leases: &Leases, key: &str, done: &AtomicBool) -> (Duration, Instant) {
    let (mut last, mut longest) = (Instant::now(), (Duration::ZERO, Instant::now()));
    while !done.load(Relaxed) {
        let request = leases.lease(key).attempt(Duration::from_millis(200)).wait(Wait::No);
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

/// The least that these leases were certain for, until `done`.
async fn least_valid(held: &[Lease], done: &AtomicBool) -> Duration {
    let mut least = TTL;
    while !done.load(Relaxed) {
        least = held.iter().map(|lease| lease.valid_for()).min().unwrap().min(least);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    least
}

/// What happens to the first primary, and what others see of it. `apart`: they are to see nothing.
async fn fails_over(what: &str, mut cluster: Cluster, apart: bool, happen: impl FnOnce(&mut Cluster)) -> Cluster {
    let leases = leases(&cluster.url_of(&[cluster.nodes[1].port(), cluster.nodes[0].port()]), TTL).await;
    let keys: Vec<String> = (0..PRIMARIES).map(|node| cluster.key_on(node, "held")).collect();
    let mut held = vec![];
    for key in &keys {
        held.push(leases.lease(key.as_str()).acquire().await.unwrap());
    }
    let replica = &cluster.nodes[PRIMARIES];
    replica.cmd(&["READONLY"]);
    until("the replica has it", || replica.cmd(&["EXISTS", &keys[0]]).int() == 1).await;

    let old = cluster.nodes[0].port();
    let probes: Vec<String> = (0..PRIMARIES).map(|node| cluster.key_on(node, "probe")).collect();
    let done = AtomicBool::new(false);
    let start = Instant::now();
    happen(&mut cluster);
    let untouched = &held[1..];
    let watch = async {
        cluster.failed_over(&keys[0], old, 1).await;
        let switched = Instant::now();
        let valid_until = held[0].valid_until();
        until("the lease is renewed on the replica", || held[0].valid_until() > valid_until + TTL / 3).await;
        until("all others are renewed", || untouched.iter().all(|lease| lease.valid_until() > valid_until)).await;
        done.store(true, Relaxed);
        switched
    };
    let gaps = async {
        tokio::join!(
            longest_gap(&leases, &probes[0], &done),
            longest_gap(&leases, &probes[1], &done),
            longest_gap(&leases, &probes[2], &done)
        )
    };
    let (switched, (own, second, third), least) = tokio::join!(watch, gaps, least_valid(untouched, &done));
    let over = own.1.saturating_duration_since(switched).min(own.0);
    let others = second.0.max(third.0);
    println!(
        "{what}: the cluster took {:?}; no lease could be acquired there for {:?}, {over:?} beyond that; on the others for \
         {others:?}, and what was held there was certain for {least:?} of {TTL:?} at least",
        switched - start,
        own.0
    );
    assert!(over < 2 * SECOND, "{over:?} after the cluster had switched");
    if apart {
        // A renewal each third: the first attempt at each succeeded, for another would come a sixth later.
        assert!(least > TTL / 2, "{least:?}: renewals on the others were late");
        assert!(others < SECOND * 3 / 2, "{others:?} without a lease on the others");
    }
    assert!(held.iter().all(|lease| lease.is_held()));
    for lease in held {
        assert_eq!(within("the end", lease.release()).await.unwrap(), leasehold::Released::Released);
    }
    for key in &keys {
        acquires(&leases, key).await;
    }
    cluster
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_dies_is_replaced_and_the_others_see_nothing_of_it() {
    fails_over("a killed primary", Cluster::with_replicas(), true, |cluster| cluster.nodes[0].kill()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_stands_still_is_replaced_and_the_others_see_nothing_of_it() {
    let cluster =
        fails_over("a stopped primary", Cluster::with_replicas(), true, |cluster| cluster.nodes[0].stop()).await;
    cluster.nodes[0].cont();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_hands_over_to_its_replica_is_left_with_the_next_operation() {
    fails_over("CLUSTER FAILOVER", Cluster::with_replicas(), true, |cluster| {
        cluster.nodes[PRIMARIES].cmd(&["CLUSTER", "FAILOVER"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_serves_nothing_without_all_of_its_slots_costs_no_lease_on_the_others_either() {
    let cluster = Cluster::of(2 * PRIMARIES, &["--cluster-require-full-coverage", "yes"]);
    fails_over("a killed primary, full coverage required", cluster, false, |cluster| cluster.nodes[0].kill()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_is_cut_off_from_us_alone_costs_its_own_leases_and_no_other() {
    let cluster = Cluster::start();
    let proxy = Proxy::to(cluster.nodes[0].port());
    cluster.announce(0, proxy.address().port());
    let leases = leases(&cluster.url_of(&[cluster.nodes[1].port(), cluster.nodes[2].port()]), TTL / 3).await;
    let mut held = vec![];
    for n in 0..60 {
        held.push(leases.lease(format!("held:{n}")).acquire().await.unwrap());
    }
    let (here, there): (Vec<_>, Vec<_>) = held.into_iter().partition(|lease| slot(lease.key().as_str()) < 5461);
    assert!(!here.is_empty() && there.len() > 20, "{} and {}", here.len(), there.len());
    let done = AtomicBool::new(false);
    proxy.blackhole();
    let lost = async {
        for lease in &here {
            within("the loss", lease.lost()).await;
        }
        done.store(true, Relaxed);
    };
    let probe = cluster.key_on(1, "probe");
    let ((), (gap, _), least) = tokio::join!(lost, longest_gap(&leases, &probe, &done), least_valid(&there, &done));
    println!(
        "a primary cut off: {gap:?} without a lease on another, and what was held there was certain for {least:?}"
    );
    assert!(least > TTL / 6 && gap < SECOND, "{least:?}, {gap:?}");
    assert!(there.iter().all(|lease| lease.is_held()));
    proxy.pass();
    let key = here[0].key().as_str();
    let next = within("a lease", leases.lease(key).wait(PATIENCE).acquire()).await.unwrap();
    assert!(next.fence() > here[0].fence());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_without_a_replica_is_found_again_when_it_comes_back() {
    let mut cluster = Cluster::start();
    let leases = leases(&cluster.url_of(&[cluster.nodes[1].port(), cluster.nodes[2].port()]), SECOND).await;
    let (here, there) = (cluster.key_on(0, "k"), cluster.key_on(1, "k"));
    let lease = leases.lease(here.as_str()).acquire().await.unwrap();
    cluster.nodes[0].kill();
    within("the loss", lease.lost()).await;
    let error = leases.lease(here.as_str()).wait(SECOND / 2).acquire().await.unwrap_err();
    assert!(!error.is_contended(), "{error}");
    acquires(&leases, &there).await;
    cluster.nodes[0].restart();
    let next = within("a lease", leases.lease(here.as_str()).wait(PATIENCE).acquire()).await.unwrap();
    assert!(next.fence() > lease.fence());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_nobody_keeps_is_an_error_that_passes_and_a_lease_in_it_lives_until_somebody_does() {
    let cluster = Cluster::start();
    let leases = leases(&cluster.url(), 6 * SECOND).await;
    let key = cluster.key_on(0, "k");
    let slot = slot(&key).to_string();
    let lease = leases.lease(key.as_str()).acquire().await.unwrap();
    for node in &cluster.nodes {
        node.cmd(&["CLUSTER", "DELSLOTS", &slot]);
    }
    for _ in 0..2 {
        let error = leases.lease(key.as_str()).wait(SECOND / 2).acquire().await.unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("CLUSTER INFO"), "{error}: {source}");
    }
    acquires(&leases, &cluster.key_on(1, "k")).await;
    let valid_until = lease.valid_until();
    let waiter = tokio::spawn(leases.lease(key.as_str()).wait(PATIENCE).acquire());
    tokio::time::sleep(2 * NODE_TIMEOUT).await;
    cluster.nodes[0].cmd(&["CLUSTER", "ADDSLOTS", &slot]);
    until("it is renewed", || lease.valid_until() > valid_until + SECOND).await;
    lease.release().await.unwrap();
    within("the next one's turn", waiter).await.unwrap().unwrap().release().await.unwrap();
}
