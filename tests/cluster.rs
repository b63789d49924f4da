//! Leases on a Redis Cluster.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;

use leasehold::{
    Leases,
    store::{contract, redis::RedisStore},
};
use std::time::Duration;
use support::{cluster::Cluster, within};

const SECOND: Duration = Duration::from_secs(1);

async fn leases(url: &str, ttl: Duration) -> Leases {
    within("a connection", Leases::builder().ttl(ttl).connect(url)).await.unwrap()
}

#[tokio::test]
async fn the_store_keeps_every_rule_on_a_cluster() {
    let start = std::time::Instant::now();
    let cluster = Cluster::start();
    println!("started after {:?}", start.elapsed());
    let url = cluster.url();
    assert_eq!(contract::check(async || RedisStore::connect(&url).await.unwrap()).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_on_every_primary_are_acquired_renewed_and_released() {
    let cluster = Cluster::start();
    let leases = leases(&cluster.url(), SECOND).await;
    for node in 0..3 {
        let key = cluster.key_on(node, "k");
        let tagged = format!("{{{key}}}:order");
        for key in [&key, &tagged] {
            let lease = within("a lease", leases.lease(key.as_str()).acquire()).await.unwrap();
            let until = lease.valid_until();
            let value = cluster.nodes[node].get(key).unwrap();
            assert!(value.ends_with(&format!("#{}", lease.fence())), "{value}");
            support::until("it is renewed", || lease.valid_until() > until).await;
            within("the end", lease.release()).await.unwrap();
            assert_eq!(cluster.nodes[node].get(key), None);
            let fence = within("the work", leases.with_lease(key.as_str(), async |_| 7)).await.unwrap();
            assert_eq!(fence, 7);
        }
    }
}
