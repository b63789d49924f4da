//! Every public async call, polled k times and then dropped, for every k: against a server that answers and against one
//! that hangs, before and after it is woken, with the runtime that it is on, and with work that panics. Whatever it had
//! begun is given back, nobody else notices, and no task, thread or connection is left.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, reason = "a test")]
#![allow(clippy::print_stdout, reason = "it says what was covered")]
mod call;
mod connecting;
mod cut;
mod endings;
mod handle;
mod look;
mod onlookers;
mod run;
mod source;
mod stage;
#[path = "../support/mod.rs"]
mod support;
mod table;
mod toys;
mod trouble;
mod working;

use call::Call;
use leasehold::Leases;
use stage::{Home, Seen, World, play};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use support::{PATIENCE, server::Server};
use table::table;

/// Plays at a time: they mostly wait.
const AT_ONCE: usize = 14;

/// They count the threads of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn world(patience: Duration, then: impl FnOnce(&World)) {
    let servers = [Server::start(), Server::start(), Server::start()];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let others = runtime.block_on(Leases::builder().label("others").connect(&servers[0].url())).unwrap();
    let [port, beside @ ..] = servers.each_ref().map(Server::port);
    let world = World { port, beside, others, runtime: runtime.handle().clone(), patience };
    then(&world);
    drop(world);
    runtime.block_on(support::until("every connection is closed", || {
        servers.iter().all(|server| server.clients().is_empty())
    }));
    #[cfg(target_os = "linux")]
    runtime.block_on(support::until("every thread of leasehold's has ended", || threads() == 0));
}

#[cfg(target_os = "linux")]
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may end between the two.
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "leasehold").count()
}

fn play_all(calls: &[(Call, Home)], world: &World) -> Vec<Seen> {
    let next = AtomicUsize::new(0);
    let seen: Mutex<BTreeMap<usize, Seen>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, SeqCst);
                    let Some((call, home)) = calls.get(n) else { return };
                    let start = Instant::now();
                    let one = play(call, *home, world);
                    println!(
                        "{:24} {:40} {:?}: {} awaits; dropped {}, {} of them woken, {} with their runtime, {} as the \
                         server hung; {} done, {} panicked; {:.1} s",
                        call.of,
                        call.when,
                        home,
                        one.awaits,
                        one.dropped,
                        one.woken,
                        one.runtimes,
                        one.hanging,
                        one.done,
                        one.panicked,
                        start.elapsed().as_secs_f64(),
                    );
                    seen.lock().unwrap().insert(n, one);
                }
            });
        }
    });
    seen.into_inner().unwrap().into_values().collect()
}

#[test]
fn every_public_async_call_may_be_dropped_at_every_await() {
    let _alone = alone();
    let start = Instant::now();
    let mut calls: Vec<_> = table().into_iter().map(|call| (call, Home::Thread)).collect();
    calls.extend(table().into_iter().filter(|call| call.at_home).map(|call| (call, Home::CallersRuntime)));
    world(PATIENCE, |world| {
        let seen = play_all(&calls, world);
        let sum = |of: fn(&Seen) -> usize| seen.iter().map(of).sum::<usize>();
        let found: Vec<_> = seen.iter().flat_map(|seen| &seen.found).collect();
        support::aloud::say(format_args!(
            "covered: awaits: {} calls in {} situations, {} awaits, {} drops ({} woken and not polled, {} with their runtime, \
             {} while the server hung), {} done, {} panics, in {:.1} s",
            calls.iter().map(|(call, _)| call.of).collect::<BTreeSet<_>>().len(),
            calls.len(),
            sum(|seen| seen.awaits),
            sum(|seen| seen.dropped),
            sum(|seen| seen.woken),
            sum(|seen| seen.runtimes),
            sum(|seen| seen.hanging),
            sum(|seen| seen.done),
            sum(|seen| seen.panicked),
            start.elapsed().as_secs_f64(),
        ));
        assert!(found.is_empty(), "{found:#?}");
        // Nobody passes by doing nothing.
        for ((call, _), seen) in calls.iter().zip(&seen) {
            let name = (call.of, call.when);
            assert!(seen.awaits >= call.awaits, "{name:?}: {} awaits", seen.awaits);
            assert!(
                seen.dropped > seen.woken && (seen.woken > 0 || call.awaits == 0),
                "{name:?}: {} drops",
                seen.dropped
            );
            assert!(seen.hanging > 0 && seen.runtimes > 0, "{name:?}");
        }
        assert!(sum(|seen| seen.dropped) >= 1500 && sum(|seen| seen.woken) >= 500);
        assert!(sum(|seen| seen.hanging) >= 1000 && sum(|seen| seen.runtimes) >= 150);
        assert!(sum(|seen| seen.done) >= 500 && sum(|seen| seen.panicked) >= 20);
    });
}

#[test]
fn the_table_has_every_public_async_call_of_the_source() {
    let source = source::public_async_calls();
    let mut table: BTreeSet<String> = table().into_iter().map(|call| call.of.to_owned()).collect();
    // A check of stores, for their tests: it has a store of its own.
    table.insert("check".to_owned());
    assert_eq!(source, table);
}
