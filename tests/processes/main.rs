//! Worker processes on a real server, and a hand that stops, kills, cuts and restarts whatever it can, by a seed. What the
//! workers did is written down step by step, with the time on a clock that they all share, and judged afterwards.
//!
//! A step is what the work does between two awaits. The guard looks at the lease before each poll, and nothing can look
//! during a step: a process that is stopped in the middle of one goes on with it when it wakes, though the lease has gone
//! to somebody else. So a step must not *begin* in a poll that began past validity, and counts as an owner's for as long
//! as its lease was certain; what it writes after that is the resource's to refuse, by its fence.
//!
//! `SEED=n` plans the same faults again (what the workers do meanwhile is theirs); `PROCESSES_SECONDS=600` goes on for longer.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, reason = "a test")]
#![cfg(unix)]
mod field;
mod hand;
mod judge;
mod notes;
mod plan;
mod planted;
mod pulse;
mod resource;
#[path = "../support/mod.rs"]
mod support;
mod worker;

use field::{Field, Setup};
use judge::Covered;
use plan::{Fault, Plan};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Of all leases. Short, so that many of them end in a minute.
const TTL: Duration = Duration::from_millis(1200);
/// A process or a server that stands still for longer than this does not count as one that runs.
const GAP: Duration = Duration::from_millis(100);

/// One field at a time has the machine.
fn alone() -> MutexGuard<'static, ()> {
    static FIELD: Mutex<()> = Mutex::new(());
    FIELD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|n| n.parse().unwrap_or_else(|_| panic!("{name}={n} is no number")))
}

fn trial(setup: Setup, length: Duration) {
    let seed = number("SEED").unwrap_or_else(|| fastrand::u64(..1_000_000));
    let plan = Plan::new(seed, setup.workers);
    let (test, start) = (setup.test, Instant::now());
    support::aloud::say(format_args!("{test}: SEED={seed}"));
    let mut field = Field::open(setup);
    field.suffer(plan, length, |field, covered| all_faults(&field.faults) && harm(&covered));
    field.recover(|covered| peace(&covered));
    let (evidence, faults) = field.close();
    let Covered { steps, acquisitions, hand_overs, losses, ended_as_agreed, undisturbed, overran, writes, refused } =
        evidence.covered();
    support::aloud::say(format_args!(
        "covered: {test}, in {:.1?}: SEED={seed}, {steps} steps, {acquisitions} acquisitions, {hand_overs} hand-overs, \
         {losses} losses told, {ended_as_agreed} leases ended as agreed, {undisturbed} undisturbed for longer than a TTL, \
         {overran} steps overran their lease, {refused} of {writes} writes refused, faults {faults:?}",
        start.elapsed()
    ));
    let found = evidence.judge();
    let first: String = found.iter().take(20).map(|(breach, what)| format!("\n  {breach:?}: {what}")).collect();
    assert!(found.is_empty(), "SEED={seed}: {} breaches:{first}", found.len());
    let covered = evidence.covered();
    let all = all_faults(&faults) && harm(&covered) && peace(&covered);
    assert!(all, "too little was seen to say anything: {covered:?}, {faults:?}");
}

/// So little of everything that a slow machine does it too, and nobody passes by doing nothing.
fn all_faults(faults: &BTreeMap<Fault, usize>) -> bool {
    Fault::all().all(|fault| faults.contains_key(&fault))
}
fn harm(covered: &Covered) -> bool {
    let Covered { steps, acquisitions, hand_overs, losses, refused, .. } = *covered;
    steps >= 1000 && acquisitions >= 50 && hand_overs >= 20 && losses >= 3 && refused >= 1
}
fn peace(covered: &Covered) -> bool {
    covered.undisturbed >= 3
}

#[test]
fn nobody_works_under_a_lease_that_is_over_or_anothers_whatever_happens_to_processes_server_and_network() {
    if worker::works() {
        return;
    }
    let _alone = alone();
    let test = "nobody_works_under_a_lease_that_is_over_or_anothers_whatever_happens_to_processes_server_and_network";
    let setup = Setup { test, workers: 6, keys: 4, durable: true, compares: true, careless: false };
    trial(setup, Duration::from_secs(number("PROCESSES_SECONDS").unwrap_or(28)));
}

#[test]
fn a_resource_that_compares_fences_takes_nothing_stale_though_the_server_loses_its_data() {
    if worker::works() {
        return;
    }
    let _alone = alone();
    let test = "a_resource_that_compares_fences_takes_nothing_stale_though_the_server_loses_its_data";
    let setup = Setup { test, workers: 5, keys: 3, durable: false, compares: true, careless: false };
    trial(setup, Duration::from_secs(number("PROCESSES_SECONDS").map_or(14, |s| s.div_ceil(3))));
}
