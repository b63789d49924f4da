//! Leases on a Redis Cluster, whatever becomes of its servers and its slots.
#![allow(clippy::unwrap_used, reason = "tests")]
mod failures;
mod line;
mod names;
mod slots;
#[path = "../support/mod.rs"]
mod support;

use leasehold::{
    Leases,
    store::{contract, redis::RedisStore},
};
use std::time::Duration;
use support::{cluster::Cluster, until, within};

const SECOND: Duration = Duration::from_secs(1);

async fn leases(url: &str, ttl: Duration) -> Leases {
    within("a connection", Leases::builder().ttl(ttl).connect(url)).await.unwrap()
}

/// Acquires a lease and gives it back.
async fn acquires(leases: &Leases, key: &str) {
    within("a lease", leases.lease(key).acquire()).await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn the_store_keeps_every_rule_on_a_cluster() {
    let cluster = Cluster::start();
    let url = cluster.url();
    assert_eq!(contract::check(async || RedisStore::connect(&url).await.unwrap()).await, Ok(()));
    // Of all that it left, only the values and their marks have no TTL; and all primaries had their share.
    for node in &cluster.nodes {
        let keys = node.keys();
        let is_value = |key: &String| keys.contains(&format!("{{{key}}}:mark"));
        let forever: Vec<_> =
            keys.iter().filter(|key| node.pttl(key) == -1 && !key.ends_with(":mark") && !is_value(key)).collect();
        assert!(!keys.is_empty() && forever.is_empty(), "{forever:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_on_every_primary_are_acquired_renewed_and_released_with_and_without_hash_tags() {
    let cluster = Cluster::start();
    let leases = leases(&cluster.url(), SECOND).await;
    for node in 0..3 {
        let key = cluster.key_on(node, "k");
        for key in [&key, &format!("order:{{{key}}}")] {
            let lease = within("a lease", leases.lease(key.as_str()).acquire()).await.unwrap();
            let valid_until = lease.valid_until();
            let value = cluster.nodes[node].get(key).unwrap();
            assert!(value.ends_with(&format!("#{}", lease.fence())), "{value}");
            until("it is renewed", || lease.valid_until() > valid_until).await;
            within("the end", lease.release()).await.unwrap();
            assert_eq!(cluster.nodes[node].get(key), None);
            let done = within("the work", leases.with_lease(key.as_str(), async |_| "done")).await;
            assert_eq!(done.unwrap(), "done");
        }
    }
    // A primary of whose keys none is asked for is not connected to: who connects runs the page at once.
    let other = self::leases(&cluster.url(), SECOND).await;
    let runs = || [0, 2].map(|node: usize| cluster.nodes[node].calls("eval") + cluster.nodes[node].calls("evalsha"));
    let before = runs();
    let key = cluster.key_on(1, "other");
    let lease = within("a lease", other.lease(key.as_str()).acquire()).await.unwrap();
    let valid_until = lease.valid_until();
    until("it is renewed", || lease.valid_until() > valid_until).await;
    assert_eq!(runs(), before);
}
