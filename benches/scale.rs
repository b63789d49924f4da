//! What it costs to hold very many leases: `cargo bench --bench scale -- 100000`.
//!
//! Takes them, holds them for three TTLs of 30 s, and reports what was lost, how late a renewal ever was, what Redis had to
//! execute, processor time and heap. Another `Leases` acquires and releases all the while, to see whether it is held up.
#![allow(clippy::unwrap_used, clippy::print_stdout)]
#[path = "support/spent.rs"]
mod spent;
#[path = "../tests/support/mod.rs"]
mod support;
#[path = "support/threads.rs"]
mod threads;

use leasehold::{Lease, Leases};
use peak_alloc::PeakAlloc;
use spent::Spent;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use support::server::Server;
use threads::Threads;
use tokio::task::JoinSet;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const TTL: Duration = Duration::from_secs(30);
/// So many acquire at a time.
const TAKERS: usize = 256;

#[tokio::main]
async fn main() {
    // cargo adds an argument of its own.
    let wanted = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(10_000);
    let server = Server::start();
    let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    let renewing = Threads::running();
    let other = Other::start(&server).await;
    let (alone, before) = (other.slowest_over(Duration::from_secs(5)).await, HEAP.current_usage());

    let start = Instant::now();
    let held = take(&leases, wanted).await;
    let taking = start.elapsed();
    let heap = (HEAP.current_usage() - before) / wanted;
    println!("{wanted} leases of {TTL:?}, taken in {taking:.1?}");
    println!("heap: {heap} bytes a lease, its key included");
    println!("another's acquire and release, slowest: {:?} meanwhile, {alone:?} before", other.slowest());

    let (spent, executed) = (Spent::now(&server), evalsha(&server) - other.calls.load(Relaxed));
    let renewing_before = renewing.spent();
    let (start, mut worst) = (Instant::now(), TTL);
    while start.elapsed() < 3 * TTL {
        // To look at all of them is work too; at any time some are about to be renewed.
        tokio::time::sleep(Duration::from_secs(1)).await;
        worst = worst.min(held.iter().map(|lease| lease.valid_for()).min().unwrap());
    }
    let (held_for, lost) = (start.elapsed(), held.iter().filter(|lease| !lease.is_held()).count());
    let spent = Spent::now(&server).since(&spent, held_for);
    let renewing = (renewing.spent() - renewing_before) / held_for.as_secs_f64();
    let rounds = held_for.as_secs_f64() / (TTL / 3).as_secs_f64();
    println!("held for {held_for:.0?}: {lost} lost");
    println!("validity left, at worst: {:.2} of the TTL", worst.as_secs_f64() / TTL.as_secs_f64());
    println!(
        "EVALSHA a round of {:?}: {:.0}",
        TTL / 3,
        (evalsha(&server) - other.calls.load(Relaxed) - executed) as f64 / rounds
    );
    println!(
        "cores busy: {renewing:.3} in the thread that renews, {:.3} in this process, {:.3} in Redis",
        spent.here, spent.redis
    );
    println!("another's acquire and release, slowest: {:?}", other.slowest());

    // A release each would take longer than the rest.
    drop(server);
    std::process::exit(0);
}

async fn take(leases: &Leases, wanted: usize) -> Vec<Lease> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut takers = JoinSet::new();
    for _ in 0..TAKERS {
        let (leases, next) = (leases.clone(), next.clone());
        takers.spawn(async move {
            let mut held = Vec::new();
            loop {
                let n = next.fetch_add(1, Relaxed);
                if n >= wanted {
                    return held;
                }
                held.push(leases.lease(format!("scale:{n}")).acquire().await.unwrap());
            }
        });
    }
    let mut held = Vec::with_capacity(wanted);
    while let Some(some) = takers.join_next().await {
        held.append(&mut some.unwrap());
    }
    held
}

/// Somebody else, who goes on working.
#[derive(Clone, Default)]
struct Other {
    slowest: Arc<Mutex<Duration>>,
    calls: Arc<AtomicU64>,
}

impl Other {
    async fn start(server: &Server) -> Other {
        let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
        let other = Other::default();
        let seen = other.clone();
        tokio::spawn(async move {
            loop {
                let start = Instant::now();
                let lease = leases.lease("another").acquire().await.unwrap();
                lease.release().await.unwrap();
                seen.record(start.elapsed());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        other
    }

    fn record(&self, took: Duration) {
        self.calls.fetch_add(2, Relaxed);
        let mut slowest = self.slowest.lock().unwrap();
        *slowest = took.max(*slowest);
    }

    /// Since it was last asked.
    fn slowest(&self) -> Duration {
        std::mem::take(&mut *self.slowest.lock().unwrap())
    }

    async fn slowest_over(&self, time: Duration) -> Duration {
        self.slowest();
        tokio::time::sleep(time).await;
        self.slowest()
    }
}

fn evalsha(server: &Server) -> u64 {
    let info = server.cmd(&["INFO", "commandstats"]).text().unwrap();
    let calls = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")?.split(',').next());
    calls.and_then(|calls| calls.parse().ok()).unwrap_or(0)
}
