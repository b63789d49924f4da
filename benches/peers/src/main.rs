//! One table: acquiring and releasing a lock through leasehold, through its peers, and through bare clients that do
//! `SET NX PX` and a compare-and-delete with nothing else. Rounds alternate; each figure is a ratio of medians within
//! this run, against a server of its own on the loopback.
#[allow(dead_code, reason = "the tests need more of it")]
#[path = "../../../tests/support/server.rs"]
mod server;
mod ways;

use server::Server;
use std::{
    process::Command,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;
use ways::Way;

/// How long `server` waits for what has to happen.
const PATIENCE: Duration = Duration::from_secs(30);
const ROUNDS: usize = 7;
/// How long each way is measured in a round, at least.
const SLICE: Duration = Duration::from_millis(400);

#[tokio::main]
async fn main() {
    let server = Server::start();
    let ways = Way::all(&server.url()).await;
    let pipelined = pipelined(server.port());
    println!("Pairs of acquire and release, each task on a key of its own: the time of one, and how many a second, as");
    println!("ratios to leasehold's. Median of {ROUNDS} rounds.\n");
    println!("{:<24}{:>16}{:>16}{:>16}", "", "1 task, time", "64 tasks, rate", "1000 tasks, rate");
    let mut table: Vec<Vec<Option<f64>>> = vec![vec![]; ways.len()];
    for tasks in [1, 64, 1000] {
        let mut rates = vec![vec![]; ways.len()];
        for _ in 0..ROUNDS {
            for (way, rates) in ways.iter().zip(&mut rates) {
                if tasks <= way.most_tasks() {
                    rates.push(rate(way, tasks).await);
                }
            }
        }
        let medians: Vec<Option<f64>> = rates.iter_mut().map(|r| median(r)).collect();
        for (row, rate) in table.iter_mut().zip(&medians) {
            let ours = medians[0].unwrap_or(f64::NAN);
            row.push(rate.map(|r| if tasks == 1 { ours / r } else { r / ours }));
        }
        if let (64.., Some(ours)) = (tasks, medians[0]) {
            eprintln!("leasehold, {tasks} tasks: {:.2} of what redis-benchmark pipelines", ours / pipelined);
        }
    }
    for (way, row) in ways.iter().zip(&table) {
        print!("{:<24}", way.name());
        for cell in row {
            print!("{:>16}", cell.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")));
        }
        println!();
    }
}

/// Pairs a second by so many tasks.
async fn rate(way: &Way, tasks: usize) -> f64 {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let way = way.clone();
        running.spawn(async move {
            let key = format!("{}:{task}", way.name());
            let mut pairs = 0_u64;
            while start.elapsed() < SLICE {
                way.pair(&key).await;
                pairs += 1;
            }
            pairs
        });
    }
    let pairs: u64 = running.join_all().await.into_iter().sum();
    pairs as f64 / start.elapsed().as_secs_f64()
}

fn median(rates: &mut [f64]) -> Option<f64> {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

/// Pairs a second of `SET NX PX` and a release by script, as redis-benchmark pipelines them on one connection.
fn pipelined(port: u16) -> f64 {
    let set = benchmark(port, &["SET", "b:__rand_int__", "token", "NX", "PX", "30000"]);
    let release = benchmark(port, &["EVAL", ways::RELEASE, "1", "b:__rand_int__", "token"]);
    1.0 / (1.0 / set + 1.0 / release)
}

/// Commands a second.
fn benchmark(port: u16, command: &[&str]) -> f64 {
    let port = port.to_string();
    let options = ["-p", &port, "-c", "1", "-P", "64", "-n", "200000", "-r", "1000000", "--csv"];
    let run = Command::new("redis-benchmark").args(options).args(command).output();
    let out = String::from_utf8(run.expect("redis-benchmark comes with redis-server").stdout).unwrap_or_default();
    let last = out.lines().last().and_then(|line| line.split("\",\"").nth(1).map(str::to_owned));
    last.and_then(|rate| rate.parse().ok()).expect("a line of comma separated values")
}
