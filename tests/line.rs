//! First come, first served, on a real server.
mod support;
use leasehold::Leases;
use std::time::{Duration, Instant};
use support::server::Server;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_hands_over_to_the_first_in_line() {
    let server = Server::start();
    let here = Leases::connect(&server.url()).await.unwrap();
    let there = Leases::connect(&server.url()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut held = here.lease("k").acquire().await.unwrap();
    for round in 0..20 {
        let (from, to) = if round % 2 == 0 { (&here, &there) } else { (&there, &here) };
        let _ = from;
        let waiter = tokio::spawn(to.lease("k").acquire());
        loop {
            if to.inspect("k").await.unwrap().unwrap().waiters == 1 {
                break;
            }
        }
        let start = Instant::now();
        let fence = held.fence();
        held.release().await.unwrap();
        let released = start.elapsed();
        held = waiter.await.unwrap().unwrap();
        assert!(held.fence() > fence);
        eprintln!("released {released:?} handed over {:?}", start.elapsed());
    }
}
