//! Nothing outlives its use: neither in Redis nor in this process.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Leases, Wait, store::redis::RedisStore};
use std::time::Duration;
use support::{server::Server, until, within};
use tokio::{runtime::Handle, task::JoinSet};

const TTL: Duration = Duration::from_secs(10);
/// A claim that was given up unanswered is released once more after four of these.
const ATTEMPT: Duration = Duration::from_millis(250);

/// 1,000 leases on 50 keys, ended in every way there is.
async fn come_and_go(leases: &Leases) {
    let mut tasks = JoinSet::new();
    for task in 0..50 {
        let leases = leases.clone();
        tasks.spawn(async move {
            for round in 0..20 {
                // Every second key is one that others want too.
                let key = format!("k{}", if task % 2 == 0 { task } else { round % 10 });
                let request = leases.lease(&key).wait(Wait::Forever);
                match (task + round) % 6 {
                    0 => _ = request.acquire().await.unwrap().release().await.unwrap(),
                    1 => drop(request.acquire().await.unwrap()),
                    2 => request.run(async |lease| assert!(lease.is_held())).await.unwrap(),
                    3 => {
                        let mut lock = leases.lock(&key);
                        lock.lock().await.unwrap();
                        lock.unlock().await.unwrap();
                    }
                    // These may end while they still wait.
                    4 => _ = tokio::time::timeout(Duration::from_millis(1), request.acquire()).await,
                    _ => _ = request.try_acquire().await.unwrap(),
                }
            }
        });
    }
    while let Some(done) = within("all come and go", tasks.join_next()).await {
        done.unwrap();
    }
}

/// Only fences, each with its TTL.
async fn only_fences(server: &Server) {
    until("no key but fences", || server.keys().iter().all(|key| key.ends_with(":fence"))).await;
    let fences = server.keys();
    assert!(fences.len() >= 25, "{fences:?}");
    for fence in fences {
        assert!(server.pttl(&fence) > 24 * 3600 * 1000, "{fence} lasts {} ms", server.pttl(&fence));
    }
}

fn channels(server: &Server) -> usize {
    server.cmd(&["PUBSUB", "CHANNELS"]).list().len()
}

fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_leases_leave_no_keys_but_fences_and_no_connection_subscription_or_task() {
    let server = Server::start();
    let before = alive_tasks();
    let leases = Leases::builder().ttl(TTL).attempt(ATTEMPT).connect(&server.url()).await.unwrap();
    until("it is subscribed", || channels(&server) == 1).await;
    let connections = server.clients().len();
    come_and_go(&leases).await;
    only_fences(&server).await;
    assert_eq!(server.clients().len(), connections, "{:#?}", server.clients());
    assert_eq!(channels(&server), 1);
    until("no task is left", || alive_tasks() == before).await;
    drop(leases);
    until("every connection is closed", || server.clients().is_empty()).await;
    assert_eq!(channels(&server), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_the_callers_runtime_the_tasks_are_as_many_as_before_and_none_when_the_leases_are_gone() {
    let server = Server::start();
    let before = alive_tasks();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let leases = Leases::builder().ttl(TTL).attempt(ATTEMPT).build(store).unwrap();
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    until("it is subscribed", || channels(&server) == 1).await;
    let working = alive_tasks();
    come_and_go(&leases).await;
    only_fences(&server).await;
    until("as many tasks as before", || alive_tasks() <= working).await;
    drop(leases);
    until("no task is left", || alive_tasks() == before).await;
    until("every connection is closed", || server.clients().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_made_and_dropped_again_and_again_leave_no_connection_and_no_task() {
    let server = Server::start();
    let before = alive_tasks();
    for round in 0..30 {
        // A shutdown leaves the work its grace.
        let grace = Duration::from_millis(50);
        let leases = Leases::builder().ttl(TTL).attempt(ATTEMPT).grace(grace).connect(&server.url()).await.unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        match round % 3 {
            0 => drop((leases, lease)),
            // A lease keeps everything going that it needs.
            1 => {
                drop(leases);
                assert!(lease.is_held());
                lease.release().await.unwrap();
            }
            _ => {
                leases.shutdown().await;
                drop((lease, leases));
            }
        }
        until("the key is free", || server.get("k").is_none()).await;
    }
    until("every connection is closed", || server.clients().is_empty()).await;
    until("no task is left", || alive_tasks() == before).await;
    assert_eq!(server.keys(), ["{k}:fence"]);
}

/// In a process of its own: others here have such threads too.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_thread_named_leasehold_ends_with_the_leases() {
    use support::child::{self, Child};
    if let Some(url) = child::told() {
        assert_eq!(threads(), 0);
        let leases = Leases::connect(&url).await.unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        assert_eq!(threads(), 1);
        drop(leases);
        assert_eq!(threads(), 1, "a lease needs it");
        drop(lease);
        until("the thread is gone", || threads() == 0).await;
        let leases = Leases::connect(&url).await.unwrap();
        leases.shutdown().await;
        drop(leases);
        until("the thread is gone", || threads() == 0).await;
        return;
    }
    let server = Server::start();
    let mut child = Child::of("the_thread_named_leasehold_ends_with_the_leases", &server.url());
    child.succeeds().await;
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[cfg(target_os = "linux")]
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may end between the two.
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "leasehold").count()
}
