//! A runtime whose threads are blocked, or have ten thousand other tasks to run, and the leases of those who use it.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Error, Lease, LeaseState, Leases, LossReason, store::redis::RedisStore};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use support::{PATIENCE, server::Server, until, within, work::Polls};
use tokio::{runtime::Builder, sync::RwLock, task::JoinSet};

const TTL: Duration = Duration::from_millis(600);

/// Ten thousand busy tasks take the machine from whoever runs beside them, so they have it for themselves.
static MACHINE: RwLock<()> = RwLock::const_new(());

async fn connect(url: &str) -> Leases {
    Leases::builder().ttl(TTL).connect(url).await.unwrap()
}

/// With everything on the runtime that calls: the connections, the watchdog and the work.
async fn on_this_runtime(server: &Server) -> Leases {
    Leases::builder().ttl(TTL).build(RedisStore::connect(&server.url()).await.unwrap()).unwrap()
}

/// Does it on a thread and runtime of its own, as another process would.
fn elsewhere<T: Send + 'static>(
    server: &Server,
    task: impl AsyncFnOnce(Leases) -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    let url = server.url();
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { task(connect(&url).await).await })
    })
}

/// Takes the key, tells its fence, and holds it until it is told to let go.
fn another_owner(server: &Server) -> (mpsc::Receiver<u64>, mpsc::Sender<()>, thread::JoinHandle<()>) {
    let ((has, had), (let_go, told)) = (mpsc::channel(), mpsc::channel());
    let thread = elsewhere(server, async move |leases| {
        // So long that no starved machine takes it away.
        let lease = leases.lease("k").ttl(2 * PATIENCE).wait(PATIENCE).acquire().await.unwrap();
        has.send(lease.fence()).unwrap();
        // The lease doesn't need this runtime.
        told.recv_timeout(PATIENCE).unwrap();
        assert!(lease.is_held());
        lease.release().await.unwrap();
    });
    (had, let_go, thread)
}

#[test]
fn nobody_else_gets_the_key_while_its_holders_runtime_is_blocked_for_three_ttls() {
    let _beside = MACHINE.blocking_read();
    unless_the_machine_stands_still(Builder::new_current_thread, async |server| {
        let leases = connect(&server.url()).await;
        let contender =
            elsewhere(server, async |leases: Leases| leases.lease("k").wait(3 * TTL).acquire().await.map(drop));
        let held = leases.lease("k").wait(PATIENCE).run(async |lease| {
            until("it stands in line", || server.cmd(&["EXISTS", "{k}:queue"]).int() == 1).await;
            // The runtime's only thread.
            let contended = contender.join().unwrap();
            (contended, lease.is_held(), lease.cancel_token().is_cancelled())
        });
        let held = held.await;
        move || match held {
            Ok((Err(error), true, false)) if error.is_contended() => {}
            other => panic!("{other:?}"),
        }
    });
}

#[tokio::test(flavor = "current_thread")]
async fn work_beside_which_its_only_thread_was_blocked_is_not_polled_once_more() {
    let _beside = MACHINE.read().await;
    let server = Server::start();
    let leases = on_this_runtime(&server).await;
    let polls = Polls::default();
    let working = tokio::spawn(leases.lease("k").run({
        let polls = polls.clone();
        async move |lease| {
            let fence = lease.fence();
            polls.stubborn(lease).await;
            fence
        }
    }));
    within("the work begins", polls.begun()).await;
    let (has, let_go, thread) = another_owner(&server);
    let blocked = Instant::now();
    // Nothing runs here until somebody else has the key, and three TTLs are over.
    let fence = has.recv_timeout(PATIENCE).unwrap();
    thread::sleep((3 * TTL).saturating_sub(blocked.elapsed()));
    let seen = polls.seen().len();
    let value = server.get("k").unwrap();

    let lost = within("the loss", working).await.unwrap().unwrap_err().lost().unwrap().clone();
    assert!(matches!(lost.reason, LossReason::Deadline { .. }), "{lost:?}");
    assert!(lost.fence < fence);
    assert_eq!(polls.seen().len(), seen, "it was polled under the other's lease");
    polls.assert_none_past(blocked + TTL);
    assert!(polls.is_dropped());
    // What it says on its way out touches nothing of the other's.
    leases.shutdown().await;
    assert_eq!(server.get("k"), Some(value));
    let_go.send(()).unwrap();
    thread.join().unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn a_poll_that_blocked_its_own_renewals_past_the_end_brings_a_loss_and_no_result() {
    let _beside = MACHINE.read().await;
    let server = Server::start();
    let leases = on_this_runtime(&server).await;
    let error = leases.with_lease("k", async |_| thread::sleep(3 * TTL)).await.unwrap_err();
    assert!(matches!(error.lost().unwrap().reason, LossReason::Deadline { .. }), "{error}");
    // Nobody minds what was; the next work has the runtime again.
    assert_eq!(leases.with_lease("k", async |_| "done").await.unwrap(), "done");
}

#[tokio::test(flavor = "current_thread")]
async fn a_handle_whose_runtime_was_blocked_says_so_at_the_first_look() {
    let _beside = MACHINE.read().await;
    let server = Server::start();
    let leases = on_this_runtime(&server).await;
    let mut lock = leases.lock("k");
    let fence = lock.lock().await.unwrap();
    let view = lock.view().unwrap();
    thread::sleep(3 * TTL);
    assert!(matches!(view.ensure_held(), Err(Error::Lost(lost)) if lost.fence == fence));
    assert!(view.cancel_token().is_cancelled() && view.valid_for().is_zero());
    assert!(!lock.is_held() && lock.fence().is_none());
    assert!(matches!(lock.unlock().await, Err(Error::Lost(_))));
    assert!(lock.lock().await.unwrap() > fence);
    lock.unlock().await.unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn a_waiter_whose_runtime_was_blocked_does_not_believe_a_grant_that_has_run_out() {
    let _beside = MACHINE.read().await;
    let server = Server::start();
    let leases = connect(&server.url()).await;
    let (has, let_go, first) = another_owner(&server);
    let granted_by = has.recv_timeout(PATIENCE).unwrap();
    let waiter = tokio::spawn(leases.lease("k").wait(2 * PATIENCE).acquire());
    until("it stands in line", || server.cmd(&["EXISTS", "{k}:queue"]).int() == 1).await;
    // From here on nothing runs on its runtime: it is granted the key, which runs out, and a third one gets it.
    let_go.send(()).unwrap();
    first.join().unwrap();
    let granted = server.get("k").unwrap();
    let (has, let_go, third) = another_owner(&server);
    let fence = has.recv_timeout(PATIENCE).unwrap();
    let value = server.get("k").unwrap();
    assert!(value != granted && fence > granted_by);

    // It hears of its grant now, and is in line again before it could believe it.
    until("it stands in line again", || server.cmd(&["EXISTS", "{k}:queue"]).int() == 1).await;
    assert!(!waiter.is_finished(), "it believed in what was over");
    assert_eq!(server.get("k"), Some(value));
    let_go.send(()).unwrap();
    let lease = within("its turn", waiter).await.unwrap().unwrap();
    assert!(lease.fence() > fence && lease.is_held());
    third.join().unwrap();
    lease.release().await.unwrap();
}

#[test]
fn ten_thousand_busy_tasks_cost_no_lease_on_a_runtime_of_one_thread() {
    among_busy_tasks(Builder::new_current_thread);
}

#[test]
fn ten_thousand_busy_tasks_cost_no_lease_on_a_runtime_of_two_threads() {
    among_busy_tasks(|| {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(2);
        builder
    });
}

const BUSY: usize = 10_000;
const HELD: usize = 20;

fn among_busy_tasks(runtime: impl Fn() -> Builder) {
    let _alone = MACHINE.blocking_write();
    unless_the_machine_stands_still(runtime, held_among_busy_tasks);
}

/// Tries it, and then looks at what came of it. When the operating system let this process or the server stand still for so
/// long that leases could go unrenewed, that proves nothing, and it is tried again.
fn unless_the_machine_stands_still<L: FnOnce()>(runtime: impl Fn() -> Builder, attempt: impl AsyncFn(&Server) -> L) {
    for _ in 0..5 {
        let server = Server::start();
        let gaps = Gaps::watch(&server);
        let look = runtime().enable_all().build().unwrap().block_on(attempt(&server));
        let longest = gaps.longest();
        if longest < TTL / 4 {
            return look();
        }
        println!("the machine stood still for {longest:?}; once more");
    }
    panic!("this machine stands still too often to say anything about starvation");
}

/// Keeps leases for three TTLs among them.
async fn held_among_busy_tasks(server: &Server) -> impl FnOnce() + use<> {
    let leases = connect(&server.url()).await;
    let mut held: Vec<Lease> = Vec::new();
    for n in 0..HELD {
        held.push(leases.lease(format!("held {n}")).acquire().await.unwrap());
    }
    let (over, turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut busy = JoinSet::new();
    for _ in 0..BUSY {
        let (over, turns) = (over.clone(), turns.clone());
        busy.spawn(async move {
            while !over.load(Ordering::Relaxed) {
                let start = Instant::now();
                while start.elapsed() < Duration::from_micros(5) {}
                turns.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
    }
    let polls = Polls::default();
    let work = tokio::spawn(leases.lease("work").wait(PATIENCE).run({
        let polls = polls.clone();
        async move |lease| polls.note(lease, tokio::time::sleep(3 * TTL)).await
    }));
    // With a round of all tasks for each of its polls.
    let worked = within("the work", work).await.unwrap();
    over.store(true, Ordering::Relaxed);
    while busy.join_next().await.is_some() {}
    let states: Vec<_> = held.iter().map(|lease| lease.state()).collect();
    move || {
        let turns = turns.load(Ordering::Relaxed);
        assert!(turns > 5 * BUSY, "they were not busy: {turns} turns");
        assert!(worked.is_ok(), "{worked:?}");
        assert!(polls.seen().len() > 3 && polls.seen().iter().all(|poll| !poll.told), "{:?}", polls.seen());
        assert!(states.iter().all(|state| *state == LeaseState::Held), "{states:?}");
        drop(held);
    }
}

/// A thread that sleeps, as the watchdog's does, asks the server, and sees for how long it could not.
struct Gaps {
    over: Arc<AtomicBool>,
    thread: thread::JoinHandle<Duration>,
}

impl Gaps {
    fn watch(server: &Server) -> Gaps {
        let (over, mut connection) = (Arc::new(AtomicBool::new(false)), server.connect());
        let ends = over.clone();
        let thread = thread::spawn(move || {
            let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
            while !ends.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
                connection.cmd(&["PING"]);
                longest = longest.max(last.elapsed());
                last = Instant::now();
            }
            longest
        });
        Gaps { over, thread }
    }

    fn longest(self) -> Duration {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}
