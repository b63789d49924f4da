//! Leases and the runtimes that use them: blocked, ended, one after another.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Leases, Released};
use std::{
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};
use support::server::Server;
use tokio::runtime::{Builder, Runtime};

const TTL: Duration = Duration::from_secs(1);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

async fn connect(server: &Server) -> Leases {
    Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap()
}

#[tokio::test(flavor = "current_thread")]
async fn a_runtime_that_is_blocked_for_three_ttls_costs_no_lease() {
    let server = Server::start();
    let leases = connect(&server).await;
    let done = leases
        .with_lease("k", async |cancel| {
            thread::sleep(3 * TTL);
            assert!(!cancel.is_cancelled());
            tokio::task::yield_now().await;
            "done"
        })
        .await;
    assert_eq!(done.unwrap(), "done");
    assert_eq!(server.get("k"), None);
}

#[tokio::test(flavor = "current_thread")]
async fn blocking_code_is_told_of_a_loss_while_it_blocks_its_runtime() {
    let server = Server::start();
    let leases = connect(&server).await;
    let error = leases
        .lease("k")
        .run(async |lease| {
            lease.ensure_held().unwrap();
            server.cmd(&["DEL", "k"]);
            let start = Instant::now();
            while lease.ensure_held().is_ok() {
                assert!(start.elapsed() < support::PATIENCE);
                thread::sleep(Duration::from_millis(5));
            }
            assert!(lease.cancel_token().is_cancelled());
        })
        .await
        .unwrap_err();
    assert!(error.lost().is_some(), "the result of work that overran its lease: {error}");
}

#[test]
fn leases_in_a_static_renew_whichever_runtime_uses_them() {
    static LEASES: OnceLock<Leases> = OnceLock::new();
    let server = Server::start();
    let first = runtime();
    LEASES.set(first.block_on(connect(&server))).unwrap();
    let leases = LEASES.get().unwrap();
    let kept = first.block_on(leases.lease("kept").acquire()).unwrap();
    drop(first);

    for _ in 0..2 {
        let next = runtime();
        let lease = next.block_on(leases.lease("k").acquire()).unwrap();
        let until = lease.valid_until() + TTL;
        next.block_on(support::until("renewals", || lease.valid_until() > until));
        assert!(lease.is_held() && kept.is_held(), "no runtime of the user's has to run for them");
        next.block_on(lease.release()).unwrap();
    }
    let last = runtime();
    assert_eq!(last.block_on(kept.release()).unwrap(), Released::Released);
    assert_eq!(server.get("kept"), None);
}

#[test]
fn a_runtime_that_ends_while_it_holds_leaves_the_key_free_long_before_the_ttl() {
    let server = Server::start();
    let runtime = runtime();
    let leases = runtime.block_on(Leases::builder().ttl(60 * TTL).connect(&server.url())).unwrap();
    let work = runtime.spawn(leases.with_lease("k", async |_| std::future::pending::<()>().await));
    runtime.block_on(support::until("the work runs", || server.get("k").is_some()));
    drop(runtime);
    assert!(work.is_finished());
    let start = Instant::now();
    while server.get("k").is_some() {
        assert!(start.elapsed() < support::PATIENCE, "still held");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_handle_dropped_outside_any_runtime_is_released() {
    let server = Server::start();
    let runtime = runtime();
    let leases = runtime.block_on(Leases::builder().ttl(60 * TTL).connect(&server.url())).unwrap();
    let lease = runtime.block_on(leases.lease("k").acquire()).unwrap();
    drop(runtime);
    thread::spawn(move || drop((lease, leases))).join().unwrap();
    let start = Instant::now();
    while server.get("k").is_some() {
        assert!(start.elapsed() < support::PATIENCE, "still held");
        thread::sleep(Duration::from_millis(5));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_the_work_releases_and_goes_on() {
    let server = Server::start();
    let leases = connect(&server).await;
    let work = leases.with_lease("k", async |_| {
        tokio::task::yield_now().await;
        panic!("the work's own");
    });
    let end = tokio::spawn(work).await.map(|out: leasehold::Result<()>| out.is_ok()).unwrap_err();
    assert_eq!(end.into_panic().downcast_ref::<&str>(), Some(&"the work's own"));
    support::until("the key is free", || server.get("k").is_none()).await;
}
