//! Waiting for a lease.
use crate::{
    SECOND, leases,
    support::{PATIENCE, cluster::Cluster, until, within},
};
use leasehold::Leases;
use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// How many of ours listen at this node.
fn listeners(cluster: &Cluster, node: usize) -> usize {
    cluster.nodes[node].cmd(&["PUBSUB", "CHANNELS", "leasehold:*"]).list().len()
}

fn waiters(cluster: &Cluster, node: usize, key: &str) -> i64 {
    cluster.nodes[node].cmd(&["ZCARD", &format!("{{{key}}}:queue")]).int()
}

/// Holds a key of this shard's, which that node keeps, while waiters come one after the other; then lets go. How long the
/// first of them took to be served after that, and the last.
async fn is_served_in_order(
    cluster: &Cluster,
    shard: usize,
    node: usize,
    all: &[Leases],
    told: bool,
) -> (Duration, Duration) {
    let key = cluster.key_on(shard, "line");
    let held = within("a lease", all[0].lease(key.as_str()).acquire()).await.unwrap();
    let served = Arc::new(Mutex::new(vec![]));
    let mut tasks = vec![];
    for (n, leases) in all.iter().cycle().take(2 * all.len()).enumerate() {
        let (served, request) = (served.clone(), leases.lease(key.as_str()).wait(PATIENCE));
        tasks.push(tokio::spawn(async move {
            let lease = request.acquire().await.unwrap();
            served.lock().unwrap().push((n, lease.fence(), Instant::now()));
            lease.release().await.unwrap();
        }));
        until("it stands in line", || waiters(cluster, node, &key) == n as i64 + 1).await;
    }
    if told {
        until("all listen", || listeners(cluster, node) == all.len()).await;
    }
    let start = Instant::now();
    held.release().await.unwrap();
    for task in tasks {
        within("its turn", task).await.unwrap();
    }
    let served = served.lock().unwrap().clone();
    assert!(served.iter().map(|(n, ..)| *n).eq(0..2 * all.len()), "{served:?}");
    assert!(served.windows(2).all(|pair| pair[0].1 < pair[1].1), "fences grow: {served:?}");
    (served[0].2 - start, served[served.len() - 1].2 - start)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_is_told_by_whichever_primary_and_in_order() {
    let mut cluster = Cluster::with_replicas();
    let mut all = vec![];
    for _ in 0..3 {
        all.push(leases(&cluster.url(), 30 * SECOND).await);
    }
    for node in 0..3 {
        let (first, last) = is_served_in_order(&cluster, node, node, &all, true).await;
        println!("served by primary {node}: the first after {first:?}, the sixth after {last:?}");
        // Asking would take most of a second for each.
        assert!(last < SECOND, "{last:?}");
    }
    // What is heard from a primary that dies is heard from its replica.
    let (key, old) = (cluster.key_on(0, "line"), cluster.nodes[0].port());
    cluster.nodes[0].kill();
    cluster.failed_over(&key, old, 1).await;
    let (first, last) = is_served_in_order(&cluster, 0, 3, &all, true).await;
    println!("served by a replica that took over: the first after {first:?}, the sixth after {last:?}");
    assert!(last < SECOND, "{last:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_where_nothing_may_be_published_asks_and_is_served_in_order() {
    let cluster = Cluster::start();
    for node in &cluster.nodes {
        node.cmd(&["ACL", "SETUSER", "default", "resetchannels"]);
    }
    let all = [leases(&cluster.url(), SECOND).await, leases(&cluster.url(), SECOND).await];
    let (_, last) = is_served_in_order(&cluster, 1, 1, &all, false).await;
    println!("asking: the fourth after {last:?}");
}
