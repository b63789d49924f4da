//! What a hand-over costs, as ratios within one run: `cargo bench --bench handover`.
//!
//! Against a real redis-server on this machine, which shares its cores with everything else here; so only the ratios mean
//! something.
#![allow(clippy::unwrap_used, clippy::print_stdout)]
#[path = "support/spent.rs"]
mod spent;
#[path = "../tests/support/mod.rs"]
mod support;

use fred::{interfaces::ClientLike, prelude::Builder, types::config::Config};
use leasehold::{Lease, Leases, Wait};
use spent::Spent;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use support::server::Server;
use tokio::{sync::mpsc, task::JoinSet};

const ROUNDS: usize = 7;

#[tokio::main]
async fn main() {
    let server = Server::start();
    one_hand_over(&server).await;
    many_waiters(&server).await;
    commands(&server).await;
    take_over(&server).await;
    waiting(&server).await;
}

/// The median time from the call of `release` to the next owner running, over the median `PING`.
async fn one_hand_over(server: &Server) {
    let ping = ping_client(server).await;
    let (here, there) = (connect(server).await, connect(server).await);
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let (mut pings, mut hand_overs) = (Vec::new(), Vec::new());
        let mut held = here.lease("solo").acquire().await.unwrap();
        for turn in 0..200 {
            let next = if turn % 2 == 0 { &there } else { &here };
            let waiter = tokio::spawn(running(next.lease("solo").wait(Wait::Forever)));
            waiters(next, "solo", 1).await;
            let start = Instant::now();
            ping.ping::<fred::types::Value>(None).await.unwrap();
            pings.push(start.elapsed());
            let start = Instant::now();
            let releasing = tokio::spawn(held.release());
            let (lease, at) = waiter.await.unwrap();
            hand_overs.push(at - start);
            releasing.await.unwrap().unwrap();
            held = lease;
        }
        held.release().await.unwrap();
        ratios.push(median(&mut hand_overs).as_secs_f64() / median(&mut pings).as_secs_f64());
    }
    println!("one hand-over / one PING: {:.2} (aim: 1.5 at most)", middle(&mut ratios));
}

/// Hand-overs a second with 200 waiters over the same with 2, and how far the slow ones are from the usual.
async fn many_waiters(server: &Server) {
    let (mut rates, mut tails) = (Vec::new(), Vec::new());
    let mut thousand = Vec::new();
    for _ in 0..ROUNDS {
        let (few, _) = relay(server, 2).await;
        let (many, mut gaps) = relay(server, 200).await;
        let (crowd, _) = relay(server, 1000).await;
        rates.push(many / few);
        thousand.push(crowd / few);
        gaps.sort();
        tails.push(gaps[gaps.len() * 99 / 100].as_secs_f64() / gaps[gaps.len() / 2].as_secs_f64());
    }
    println!("hand-overs a second, 200 waiters / 2: {:.2} (aim: 0.9 at least)", middle(&mut rates));
    println!("hand-overs a second, 1000 waiters / 2: {:.2}", middle(&mut thousand));
    println!("99th percentile / median, 200 waiters: {:.2} (aim: 3 at most)", middle(&mut tails));
}

/// Waiters from four `Leases` that come again as soon as they have been served: hand-overs a second, and the gaps.
async fn relay(server: &Server, waiters: usize) -> (f64, Vec<Duration>) {
    let mut pool = Vec::new();
    for _ in 0..4 {
        pool.push(connect(server).await);
    }
    let (served, mut times) = mpsc::unbounded_channel();
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    for n in 0..waiters {
        let (leases, served, stop) = (pool[n % 4].clone(), served.clone(), stop.clone());
        tasks.spawn(async move {
            while !stop.load(Relaxed) {
                let lease = leases.lease("relay").wait(Wait::Forever).acquire().await.unwrap();
                served.send(Instant::now()).unwrap();
                lease.release().await.unwrap();
            }
        });
    }
    let wanted = 2000;
    let mut seen = Vec::with_capacity(wanted);
    while seen.len() < wanted + waiters {
        seen.push(times.recv().await.unwrap());
    }
    stop.store(true, Relaxed);
    while tasks.join_next().await.is_some() {}
    let seen = &mut seen[waiters..];
    seen.sort();
    let gaps: Vec<_> = seen.windows(2).map(|pair| pair[1] - pair[0]).collect();
    (seen.len() as f64 / (seen[seen.len() - 1] - seen[0]).as_secs_f64(), gaps)
}

/// What Redis executes for one hand-over, and what it executes for those who wait meanwhile.
async fn commands(server: &Server) {
    for waiting in [2, 200, 1000] {
        let leases = connect(server).await;
        let mut held = leases.lease("count").acquire().await.unwrap();
        let turns = Arc::new(AtomicU64::new(0));
        let (served, mut next) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for _ in 0..waiting {
            let (leases, served, turns) = (leases.clone(), served.clone(), turns.clone());
            tasks.spawn(async move {
                let lease = leases.lease("count").wait(Wait::Forever).acquire().await.unwrap();
                turns.fetch_add(1, Relaxed);
                // The bench may be over; then the lease is dropped with the task.
                let _ = served.send(lease);
            });
        }
        waiters(&leases, "count", waiting).await;
        // Polls come on a common beat; between two of them nothing but the hand-over happens. Take the least of many.
        let mut least = u64::MAX;
        for _ in 0..waiting.min(20) {
            let before = executed(server);
            held.release().await.unwrap();
            held = next.recv().await.unwrap();
            // The winner renews to its full TTL at once.
            tokio::time::sleep(Duration::from_millis(3)).await;
            least = least.min(executed(server) - before);
        }
        println!("commands that Redis executes for one hand-over, {waiting} waiting: {least}");
        tasks.abort_all();
        while tasks.join_next().await.is_some() {}
        drop((held, next));
        leases.shutdown().await;
    }
}

/// After a crash: from the end of the TTL to the next owner running, over a `PING`.
async fn take_over(server: &Server) {
    let ping = ping_client(server).await;
    let leases = connect(server).await;
    let (mut pings, mut lags) = (Vec::new(), Vec::new());
    for n in 0..20 {
        let key = format!("crashed:{n}");
        // Another program that took the key, and died.
        server.cmd(&["SET", &key, "token", "NX", "PX", "300"]);
        let expires = Instant::now() + Duration::from_millis(300);
        let (lease, at) = running(leases.lease(key.as_str()).wait(Wait::Forever)).await;
        lags.push(at.saturating_duration_since(expires));
        lease.release().await.unwrap();
        let start = Instant::now();
        ping.ping::<fred::types::Value>(None).await.unwrap();
        pings.push(start.elapsed());
    }
    let (lag, ping) = (median(&mut lags), median(&mut pings));
    println!(
        "take-over after a crash: {lag:?} after the TTL's end, {:.1} PINGs",
        lag.as_secs_f64() / ping.as_secs_f64()
    );
}

/// A thousand who wait for a key that somebody holds for a minute: what it costs while nothing happens.
async fn waiting(server: &Server) {
    const TIME: Duration = Duration::from_secs(60);
    let (holder, leases) = (connect(server).await, connect(server).await);
    let held = holder.lease("busy").acquire().await.unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..1000 {
        let request = leases.lease("busy").wait(Wait::Forever);
        tasks.spawn(async move { request.acquire().await.map(drop) });
    }
    waiters(&holder, "busy", 1000).await;
    let (spent, before) = (Spent::now(server), executed(server));
    tokio::time::sleep(TIME).await;
    let (spent, after) = (Spent::now(server).since(&spent, TIME), executed(server));
    let rate = (after - before) as f64 / TIME.as_secs_f64();
    println!("a thousand waiting: {rate:.0} commands a second, scripts and what they call");
    println!("cores busy meanwhile: {:.3} in this process, {:.3} in Redis", spent.here, spent.redis);
    tasks.abort_all();
    while tasks.join_next().await.is_some() {}
    held.release().await.unwrap();
}

async fn running(request: leasehold::LeaseRequest) -> (Lease, Instant) {
    let lease = request.acquire().await.unwrap();
    (lease, Instant::now())
}

async fn waiters(leases: &Leases, key: &str, n: u64) {
    while leases.inspect(key).await.unwrap().is_none_or(|holding| holding.waiters != n) {
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

async fn connect(server: &Server) -> Leases {
    let leases = Leases::connect(&server.url()).await.unwrap();
    // Until its inbox is confirmed.
    tokio::time::sleep(Duration::from_millis(30)).await;
    leases
}

async fn ping_client(server: &Server) -> fred::prelude::Client {
    let client = Builder::from_config(Config::from_url(&server.url()).unwrap()).build().unwrap();
    client.init().await.unwrap();
    client
}

/// How many commands the server has executed, but for those of this question.
fn executed(server: &Server) -> u64 {
    let info = server.cmd(&["INFO", "commandstats"]).text().unwrap();
    info.lines()
        .filter(|line| line.starts_with("cmdstat_") && !line.starts_with("cmdstat_info"))
        .filter_map(|line| line.split("calls=").nth(1)?.split(',').next()?.parse::<u64>().ok())
        .sum()
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn middle(ratios: &mut [f64]) -> f64 {
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}
