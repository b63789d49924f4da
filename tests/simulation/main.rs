//! The whole engine on virtual time, over a network and a server that do everything wrong that they can: each seed is one
//! schedule that nobody would write by hand, and what has to hold is looked at in every step.
//!
//! `SEED=n` replays one seed and prints what happened; `SEEDS=n` runs so many, from `FIRST` on.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, reason = "a test")]
#![allow(clippy::print_stdout, reason = "it says what was covered")]
#[path = "../support/aloud.rs"]
mod aloud;
mod client;
mod fate;
mod found;
mod judge;
mod net;
mod plain;
mod plan;
mod planted;
mod run;
mod server;
mod wire;
mod words;
mod world;

use planted::Planted;
use run::run;
use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|n| n.parse().unwrap_or_else(|_| panic!("{name}={n} is no number")))
}

/// Keeps what panics inside tasks, for `run` to find.
fn hear_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            run::PANICKED.with(|panicked| *panicked.borrow_mut() = Some(info.to_string()));
            usual(info);
        }));
    });
}

struct Summary {
    coverage: BTreeMap<&'static str, u64>,
    /// The first seeds that broke something, and what.
    broken: Vec<(u64, String)>,
}

/// Runs these seeds on all cores, until `most` of them broke something.
fn run_all(first: u64, count: u64, planted: Option<Planted>, most: usize) -> Summary {
    hear_panics();
    let next = AtomicU64::new(first);
    let summary = Mutex::new(Summary { coverage: BTreeMap::new(), broken: Vec::new() });
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let running: Vec<_> = (0..threads).map(|_| Mutex::new(None)).collect();
    let (done, over) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let seen = &running;
        scope.spawn(move || look_for_hangs(seen, &over));
        for running in &running {
            let (next, summary, done) = (&next, &summary, done.clone());
            scope.spawn(move || {
                let _done = done;
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    *running.lock().unwrap() = Some(seed);
                    if seed >= first + count || summary.lock().unwrap().broken.len() >= most {
                        return;
                    }
                    let outcome = run(seed, planted, false);
                    let mut summary = summary.lock().unwrap();
                    *summary.coverage.entry("seeds").or_default() += 1;
                    for (what, n) in outcome.coverage {
                        *summary.coverage.entry(what).or_default() += n;
                    }
                    if let Some(violation) = outcome.violation {
                        summary.broken.push((seed, violation));
                    }
                }
            });
        }
        drop(done);
    });
    summary.into_inner().unwrap()
}

/// A task that never lets go of the thread hangs a run, and no timer of the run itself can tell. Counted in looks, for when
/// this process was stopped, no run got on.
fn look_for_hangs(running: &[Mutex<Option<u64>>], over: &Receiver<()>) {
    let mut seen = vec![(None, 0); running.len()];
    while let Err(RecvTimeoutError::Timeout) = over.recv_timeout(LOOK) {
        for (running, (last, looks)) in running.iter().zip(&mut seen) {
            let now = *running.lock().unwrap();
            *looks = if now == *last { *looks + 1 } else { 0 };
            *last = now;
            if let Some(seed) = now
                && *looks > LONGEST
            {
                println!("SEED={seed} hangs");
                std::process::abort();
            }
        }
    }
}

const LOOK: Duration = Duration::from_millis(500);

/// A run takes milliseconds; this is a minute.
const LONGEST: u32 = 120;

#[test]
fn no_schedule_breaks_a_promise() {
    hear_panics();
    if let Some(seed) = number("SEED") {
        let outcome = run(seed, None, true);
        println!("{:#?}", outcome.plan);
        outcome.log.iter().for_each(|line| println!("{line}"));
        assert_eq!(outcome.violation, None);
        return;
    }
    let (first, count) = (number("FIRST").unwrap_or(0), number("SEEDS").unwrap_or(10_000));
    let start = Instant::now();
    let summary = run_all(first, count, None, 10);
    let all: Vec<_> = summary.coverage.iter().map(|(what, n)| format!("{n} {what}")).collect();
    aloud::say(format_args!("covered: simulation, in {:.1?}: {}", start.elapsed(), all.join(", ")));
    let broken: Vec<_> = summary.broken.iter().map(|(seed, what)| format!("\n  SEED={seed}: {what}")).collect();
    assert!(broken.is_empty(), "broken:{}", broken.concat());
    // Nobody passes by doing nothing. A few seeds alone need not meet everything.
    if count >= 1000 {
        let of = |what: &&str| summary.coverage.get(*what).copied().unwrap_or_default();
        let unseen: Vec<_> = SEEN.iter().filter(|what| of(what) < count / 100).collect();
        assert!(unseen.is_empty(), "as good as never seen: {unseen:?}");
        let often = ["leases", "hand-overs", "writes"].iter().all(|what| of(what) >= 5 * count);
        assert!(often && of(&"seeds") == count, "too little was seen to say anything");
    }
}

/// What each long run has to have met, at least once in a hundred seeds.
const SEEN: [&str; 40] = [
    "client cut off",
    "client deaf",
    "client killed",
    "client paused",
    "client shut down",
    "data lost",
    "fault: behind a slow request",
    "fault: cut off",
    "fault: push lost",
    "fault: push slow",
    "fault: push twice",
    "fault: reply lost",
    "fault: reply slow",
    "fault: request left behind",
    "fault: request lost",
    "fault: request slow",
    "fault: request twice",
    "fault: server down",
    "fault: thread blocked",
    "force",
    "futures dropped",
    "last writes lost",
    "locks unlocked",
    "lost: deadline",
    "lost: expired",
    "lost: forced",
    "lost: max_hold",
    "lost: shutdown",
    "lost: taken",
    "machine suspended",
    "ownerships that ran out",
    "polls that overran validity",
    "released",
    "server down",
    "server hangs",
    "server's clock changes its rate",
    "server's clock jumps",
    "stale writes refused",
    "waiters told: contended",
    "works that panicked",
];

#[test]
fn one_seed_is_one_schedule() {
    hear_panics();
    for seed in 0..60 {
        let (once, again) = (run(seed, None, true), run(seed, None, true));
        for (a, b) in once.log.iter().zip(&again.log) {
            assert_eq!(a, b, "seed {seed}");
        }
        assert_eq!(once.log.len(), again.log.len(), "seed {seed}");
    }
}

/// A checker that cannot fail proves nothing: each fault that is put in has to be found.
#[test]
fn every_planted_fault_is_found() {
    hear_panics();
    let mut missed = Vec::new();
    for planted in Planted::ALL {
        let start = Instant::now();
        let summary = run_all(0, 3000, Some(planted), 1);
        let seeds = summary.coverage["seeds"];
        match summary.broken.first() {
            Some((seed, what)) => {
                println!("{planted:?}: after {seeds} seeds, {:?}: SEED={seed} {what}", start.elapsed())
            }
            None => missed.push(planted),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
