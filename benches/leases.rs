//! What each thing costs: `cargo bench --bench leases`, or with `-- guard` what has that in its name.
#![allow(clippy::unwrap_used, missing_docs)]
#[path = "../tests/support/mod.rs"]
mod support;

use criterion::{BatchSize, Bencher, Criterion, Throughput, criterion_group, criterion_main};
use leasehold::{Lease, Leases, Wait};
use std::{
    future::Future,
    hint::black_box,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};
use support::server::Server;
use tokio::{runtime::Runtime, task::JoinSet};

criterion_group! {
    name = all;
    config = Criterion::default().measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1));
    targets = round_trips, in_memory
}
criterion_main!(all);

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// What asks the server.
fn round_trips(c: &mut Criterion) {
    let (server, runtime) = (Server::start(), runtime());
    let leases = runtime.block_on(Leases::connect(&server.url())).unwrap();
    let other = runtime.block_on(Leases::connect(&server.url())).unwrap();

    for tasks in [1, 8, 64, 1000] {
        let mut group = c.benchmark_group("acquire and release");
        group.throughput(Throughput::Elements(tasks));
        group.bench_function(format!("{tasks} tasks"), |b| {
            b.to_async(&runtime).iter_custom(|rounds| pairs(leases.clone(), tasks, rounds));
        });
    }
    c.bench_function("hand-over and back", |b| {
        b.to_async(&runtime).iter_custom(|rounds| hand_overs(leases.clone(), other.clone(), rounds));
    });
    c.bench_function("re-entry", |b| {
        let mut lock = leases.lock("lock");
        runtime.block_on(lock.lock()).unwrap();
        b.iter(|| runtime.block_on(async { (lock.lock().await.unwrap(), lock.unlock().await.unwrap()) }));
    });
    c.bench_function("take and hold another", |b| {
        let mut held = Vec::new();
        let mut n = 0_u64;
        b.iter(|| {
            n += 1;
            held.push(runtime.block_on(leases.lease(format!("held:{n}")).acquire()).unwrap());
        });
    });
}

/// What looks at the lease alone.
fn in_memory(c: &mut Criterion) {
    let runtime = runtime();
    let _here = runtime.enter();
    let lease: Lease = runtime.block_on(Leases::in_memory().lease("k").acquire()).unwrap();
    c.bench_function("the clock that counts suspension", |b| {
        b.iter(|| rustix::time::clock_gettime(black_box(rustix::time::ClockId::Boottime)));
    });
    c.bench_function("ensure_held", |b| b.iter(|| black_box(&lease).ensure_held().unwrap()));
    c.bench_function("a poll of guarded work", |b| {
        let mut guard = pin!(lease.guard(Yields));
        polls(b, guard.as_mut());
    });
    c.bench_function("a poll of the same work without a guard", |b| {
        let mut work = pin!(Yields);
        polls(b, work.as_mut());
    });
    c.bench_function("a guard made, polled and dropped", |b| {
        b.iter_batched(|| lease.view(), |view| poll(pin!(view.guard(Yields)).as_mut()), BatchSize::SmallInput);
    });
}

/// Never done, and costs nothing.
struct Yields;

impl Future for Yields {
    type Output = ();
    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

fn polls<F: Future>(b: &mut Bencher<'_>, mut work: Pin<&mut F>) {
    b.iter(|| poll(black_box(work.as_mut())));
}

fn poll<F: Future>(work: Pin<&mut F>) -> bool {
    work.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Each task on a key of its own, so many times.
async fn pairs(leases: Leases, tasks: u64, rounds: u64) -> Duration {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let leases = leases.clone();
        running.spawn(async move {
            for _ in 0..rounds {
                leases.lease(format!("pair:{task}")).acquire().await.unwrap().release().await.unwrap();
            }
        });
    }
    running.join_all().await;
    start.elapsed()
}

/// Two processes' worth of `Leases`, each waiting while the other holds.
async fn hand_overs(one: Leases, other: Leases, rounds: u64) -> Duration {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for leases in [one, other] {
        running.spawn(async move {
            for _ in 0..rounds {
                let lease = leases.lease("to and fro").wait(Wait::Forever).acquire().await.unwrap();
                lease.release().await.unwrap();
            }
        });
    }
    running.join_all().await;
    start.elapsed()
}
