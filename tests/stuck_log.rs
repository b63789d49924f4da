//! A log that cannot be written must not cost anybody a lease, or the truth about it. In a file of its own, for the log is
//! the process's.
#![allow(clippy::unwrap_used)]
mod support;
use leasehold::Leases;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};
use support::{
    scene::{SECOND, ms},
    server::Server,
};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt},
};

/// Writes to a terminal that nobody reads.
struct Stuck(Arc<AtomicBool>);

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl<S: Subscriber> Layer<S> for Stuck {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        let start = Instant::now();
        while message.0 == "lease lost" && self.0.load(SeqCst) && start.elapsed() < 5 * SECOND {
            thread::sleep(ms(5));
        }
    }
}

/// Whoever only asks must not wait for the watchdog's log to be written; and what the store has answered counts from then
/// on, not from when it was logged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_is_stuck_delays_neither_the_loss_nor_whoever_asks_for_it() {
    let stuck = Arc::new(AtomicBool::new(true));
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Stuck(stuck.clone()))).unwrap();
    let server = Server::start();
    let leases = Leases::builder().ttl(2 * SECOND).connect(&server.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let view = lease.view();
    server.cmd(&["SET", "k", "somebody else's"]);
    // The next renewal is a third of the TTL away at most, so in one second everybody knows.
    thread::sleep(SECOND);
    let held = view.is_held();
    let fired = view.valid_for(); // local, and no lock
    thread::sleep(SECOND);
    // Past validity: the check itself.
    let asked = thread::spawn(move || {
        let start = Instant::now();
        (view.ensure_held().is_err(), start.elapsed())
    });
    let (lost, took) = asked.join().unwrap();
    stuck.store(false, SeqCst);
    assert!(lost);
    assert!(took < ms(100), "`ensure_held` took {took:?}");
    assert!(
        !held && fired == Duration::ZERO,
        "work went on for {fired:?} after the store had said that the key is taken"
    );
}
