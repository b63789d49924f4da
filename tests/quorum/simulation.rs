//! Clients that take leases on a quorum over a network and on members that do what they should not, on virtual time. Each
//! seed is one schedule. `SEED=n` replays one and tells, `SEEDS=n` runs so many.
use crate::net::{DICE, Net, Planted, Site, dice};
use leasehold::{
    Clock, LeaseView, Leases,
    store::{MemoryStore, Store, quorum::QuorumStore},
};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    rc::Rc,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    task::LocalSet,
    time::{Instant, sleep, timeout},
};

const TTL: Duration = Duration::from_millis(600);
/// How long a member that has restarted takes no part; clocks are closer than it is longer than a TTL.
const QUARANTINE: Duration = Duration::from_millis(900);
const KEY: &str = "k";

/// What was seen.
#[derive(Default)]
struct Judge {
    newest: u64,
    views: Vec<LeaseView>,
    broken: Option<String>,
    coverage: BTreeMap<&'static str, u64>,
    log: Vec<String>,
}

impl Judge {
    fn note(&mut self, what: String) {
        self.log.push(format!("{:?} {what}", START.with(|start| start.borrow().unwrap().elapsed())));
    }

    fn count(&mut self, what: &'static str) {
        *self.coverage.entry(what).or_default() += 1;
    }

    fn breaks(&mut self, how: String) {
        self.note(how.clone());
        self.broken.get_or_insert(how);
    }

    fn handed_out(&mut self, who: usize, view: LeaseView) {
        let fence = view.fence();
        self.note(format!("{who} gets {fence}"));
        self.count("leases");
        if fence <= self.newest {
            self.breaks(format!("{fence} was handed out after {}", self.newest));
        }
        self.newest = self.newest.max(fence);
        self.views.push(view);
        self.look();
    }

    /// Two can only come to be held when one is handed out.
    fn look(&mut self) {
        self.views.retain(LeaseView::is_held);
        if let [one, other, ..] = &self.views[..] {
            self.breaks(format!("{} and {} are both held", one.fence(), other.fence()));
        }
    }
}

thread_local! {
    static START: RefCell<Option<Instant>> = const { RefCell::new(None) };
}

struct Outcome {
    broken: Option<String>,
    coverage: BTreeMap<&'static str, u64>,
    log: Vec<String>,
}

fn run(seed: u64, size: usize, planted: Option<Planted>) -> Outcome {
    fastrand::seed(seed);
    DICE.set(fastrand::Rng::with_seed(seed));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let judge = Rc::new(RefCell::new(Judge::default()));
    LocalSet::new().block_on(&runtime, play(size, planted, judge.clone()));
    drop(runtime);
    let judge = std::mem::take(&mut *judge.borrow_mut());
    Outcome { broken: judge.broken, coverage: judge.coverage, log: judge.log }
}

/// A client: its leases, and how to stand in its way.
struct Client {
    leases: Leases,
    stopped_until: Arc<Mutex<Instant>>,
    cut: Arc<AtomicBool>,
}

async fn play(size: usize, planted: Option<Planted>, judge: Rc<RefCell<Judge>>) {
    START.with(|start| *start.borrow_mut() = Some(Instant::now()));
    let clock = Clock::tokio();
    let restarts = planted == Some(Planted::NoQuarantine) || dice(|rng| rng.bool()) && planted.is_none();
    // Clocks may be anything while nothing is forgotten. Else they are closer than the quarantine is long.
    let apart = if restarts { 250_000 } else { 3_600_000_000 };
    let site = |_| {
        let wall = Duration::from_secs(1_000_000) + Duration::from_micros(dice(|rng| rng.u64(0..apart)));
        Site::new(MemoryStore::with_clocks(clock.clone(), wall), planted)
    };
    let sites: Vec<_> = (0..size).map(site).collect();
    sleep(Duration::from_secs(10)).await; // all members are old enough

    let clients: Vec<_> = (0..3).map(|_| client(&sites, &clock)).collect();
    let over = Rc::new(std::cell::Cell::new(false));
    let mut playing = tokio::task::JoinSet::new();
    for (who, client) in clients.iter().enumerate() {
        playing.spawn_local(work(who, client.leases.clone(), judge.clone(), over.clone()));
    }
    let trouble = tokio::task::spawn_local(trouble(
        sites.clone(),
        clients.iter().map(|client| (client.stopped_until.clone(), client.cut.clone())).collect(),
        restarts,
        judge.clone(),
        over.clone(),
    ));
    let until = Instant::now() + Duration::from_millis(if planted.is_some() { 3000 } else { 1200 });
    while Instant::now() < until && judge.borrow().broken.is_none() {
        sleep(Duration::from_millis(100)).await;
    }
    over.set(true);
    trouble.await.unwrap();
    for site in &sites {
        site.set_faults(0);
        site.hang(Duration::ZERO);
    }
    for client in &clients {
        client.cut.store(false, Relaxed);
        *client.stopped_until.lock().unwrap() = Instant::now();
    }
    while let Some(done) = playing.join_next().await {
        done.unwrap();
    }
    if judge.borrow().broken.is_some() {
        return;
    }
    // What was left is given back, and nothing late puts anything back.
    sleep(Duration::from_secs(3)).await;
    for (at, site) in sites.iter().enumerate() {
        if let Some(left) = site.store.inspect(&KEY.into()).await.unwrap() {
            judge.borrow_mut().breaks(format!("left at member {at}: {left:?}"));
        }
    }
    match timeout(Duration::from_secs(2), clients[0].leases.lease(KEY).acquire()).await {
        Ok(Ok(lease)) => judge.borrow_mut().handed_out(9, lease.view()),
        other => judge.borrow_mut().breaks(format!("nobody gets the key any more: {other:?}")),
    }
}

fn client(sites: &[Arc<Site>], clock: &Clock) -> Client {
    let stopped_until = Arc::new(Mutex::new(Instant::now()));
    let cut = Arc::new(AtomicBool::new(false));
    let net = |site: &Arc<Site>| Net { site: site.clone(), stopped_until: stopped_until.clone(), cut: cut.clone() };
    let store = QuorumStore::with_clock(sites.iter().map(net), clock.clone()).unwrap().quarantine(QUARANTINE);
    let leases = Leases::builder().clock(clock.clone()).ttl(TTL).label("sim").build(store).unwrap();
    Client { leases, stopped_until, cut }
}

/// Takes leases, holds them for a while, and gives them back in every way there is.
async fn work(who: usize, leases: Leases, judge: Rc<RefCell<Judge>>, over: Rc<std::cell::Cell<bool>>) {
    while !over.get() {
        let (pause, wait, patience, hold, way) = dice(|rng| {
            let hold = if rng.u8(0..3) == 0 { rng.u64(0..1200) } else { rng.u64(0..50) };
            (rng.u64(0..40), rng.u64(0..500), rng.u64(1..1000), hold, rng.u8(0..4))
        });
        sleep(Duration::from_millis(pause)).await;
        let asked = leases.lease(KEY).wait(Duration::from_millis(wait)).acquire();
        let Ok(asked) = timeout(Duration::from_millis(patience), asked).await else {
            judge.borrow_mut().count("acquisitions dropped");
            continue;
        };
        let lease = match asked {
            Ok(lease) => lease,
            Err(error) => {
                judge.borrow_mut().count(if error.is_contended() { "contended" } else { "store failed" });
                continue;
            }
        };
        judge.borrow_mut().handed_out(who, lease.view());
        tokio::select! {
            lost = lease.lost() => judge.borrow_mut().note(format!("{who} loses {lost}")),
            () = sleep(Duration::from_millis(hold)) => {}
        }
        let held = lease.is_held();
        judge.borrow_mut().count(if held { "held to the end" } else { "lost" });
        judge.borrow_mut().note(format!("{who} leaves {}", lease.fence()));
        if way == 0 {
            drop(lease);
        } else {
            // The TTL frees what could not be released.
            let _ = lease.release().await;
        }
    }
}

/// Some members at a time are in trouble, and now and then a client is.
async fn trouble(
    sites: Vec<Arc<Site>>,
    clients: Vec<(Arc<Mutex<Instant>>, Arc<AtomicBool>)>,
    restarts: bool,
    judge: Rc<RefCell<Judge>>,
    over: Rc<std::cell::Cell<bool>>,
) {
    while !over.get() {
        let (length, background) = dice(|rng| (rng.u64(30..700), if rng.bool() { 0 } else { rng.u64(0..40) }));
        let length = Duration::from_millis(length);
        let mut bad: Vec<_> = (0..sites.len()).collect();
        dice(|rng| rng.shuffle(&mut bad));
        bad.truncate(sites.len() / 2);
        for site in &sites {
            site.set_faults(background);
        }
        for (at, site) in bad.iter().map(|at| (*at, &sites[*at])) {
            match dice(|rng| rng.u8(0..5)) {
                0 => site.hang(length),
                1 => site.set_faults(1000),
                2 if restarts => {
                    judge.borrow_mut().note(format!("member {at} restarts"));
                    judge.borrow_mut().count("restarts");
                    site.store.restart();
                }
                3 => site.set_faults(300),
                _ => {}
            }
        }
        let (stopped_until, cut) = &clients[dice(|rng| rng.usize(0..clients.len()))];
        cut.store(false, Relaxed);
        match dice(|rng| rng.u8(0..12)) {
            0 => *stopped_until.lock().unwrap() = Instant::now() + length,
            1 => cut.store(true, Relaxed),
            _ => {}
        }
        sleep(length).await;
        cut.store(false, Relaxed);
    }
}

struct Summary {
    coverage: BTreeMap<&'static str, u64>,
    broken: Vec<(u64, String)>,
    seeds: u64,
}

fn run_all(size: usize, count: u64, planted: Option<Planted>, most: usize) -> Summary {
    let next = AtomicU64::new(0);
    let summary = Mutex::new(Summary { coverage: BTreeMap::new(), broken: Vec::new(), seeds: 0 });
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= count || summary.lock().unwrap().broken.len() >= most {
                        return;
                    }
                    let outcome = run(seed, size, planted);
                    let mut summary = summary.lock().unwrap();
                    summary.seeds += 1;
                    for (what, n) in outcome.coverage {
                        *summary.coverage.entry(what).or_default() += n;
                    }
                    summary.broken.extend(outcome.broken.map(|how| (seed, how)));
                }
            });
        }
    });
    summary.into_inner().unwrap()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|n| n.parse().unwrap())
}

fn no_schedule_breaks(size: usize) {
    if let Some(seed) = number("SEED") {
        let outcome = run(seed, size, None);
        outcome.log.iter().for_each(|line| println!("{line}"));
        assert_eq!(outcome.broken, None);
        return;
    }
    let start = std::time::Instant::now();
    let summary = run_all(size, number("SEEDS").unwrap_or(1_000), None, 5);
    println!("{size} members, {} seeds in {:?}: {:?}", summary.seeds, start.elapsed(), summary.coverage);
    assert!(summary.broken.is_empty(), "{:#?}", summary.broken);
    assert!(summary.coverage["leases"] > 2 * summary.seeds, "hardly anybody got a lease");
}

#[test]
fn no_schedule_of_three_members_breaks_exclusion_or_the_order_of_fences() {
    no_schedule_breaks(3);
}

#[test]
fn no_schedule_of_five_members_breaks_exclusion_or_the_order_of_fences() {
    no_schedule_breaks(5);
}

/// A checker that cannot fail proves nothing.
#[test]
fn every_rule_that_is_taken_out_is_missed() {
    let mut unseen = Vec::new();
    for planted in Planted::ALL {
        let summary = run_all(3, 3000, Some(planted), 1);
        println!("{planted:?}: after {} seeds, {:?}", summary.seeds, summary.broken);
        if summary.broken.is_empty() {
            unseen.push(planted);
        }
    }
    assert!(unseen.is_empty(), "{unseen:?}");
}
