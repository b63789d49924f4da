//! A server, workers that each reach it through a proxy of their own, and the hand that does harm to them.
use super::{
    TTL,
    judge::{Covered, Evidence},
    notes::{self, Trouble, now},
    plan::{Fault, Planned},
    pulse::Pulse,
    resource::Resource,
    support::{
        PATIENCE,
        child::Child,
        proxy::{CLAIM, Flow, Proxy, RELEASE, RENEW, Then},
        server::Server,
    },
    worker::Orders,
};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// How the field is set up.
pub struct Setup {
    /// The test that a worker's process runs.
    pub test: &'static str,
    pub workers: usize,
    pub keys: u64,
    /// Whether the server keeps its data when it is killed.
    pub durable: bool,
    /// Whether the resource compares fences.
    pub compares: bool,
    /// Whether the first worker looks at its lease.
    pub careless: bool,
}

pub struct Field {
    setup: Setup,
    // In the order in which they are ended, also by a panic.
    workers: Vec<Worker>,
    pulse: Pulse,
    resource: Resource,
    pub server: Server,
    runtime: tokio::runtime::Runtime,
    troubles: Vec<Trouble>,
    logs: Vec<(usize, PathBuf)>,
    pub faults: BTreeMap<Fault, usize>,
    dir: TempDir,
}

struct Worker {
    child: Child,
    proxy: Proxy,
}

impl Field {
    pub fn open(setup: Setup) -> Field {
        let dir = tempfile::Builder::new().prefix("leasehold-").tempdir().unwrap();
        let server = if setup.durable { Server::durable() } else { Server::start() };
        let mut field = Field {
            workers: Vec::new(),
            pulse: Pulse::of(server.port()),
            resource: Resource::open(dir.path(), setup.compares),
            server,
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
            troubles: Vec::new(),
            logs: Vec::new(),
            faults: BTreeMap::new(),
            dir,
            setup,
        };
        for place in 0..field.setup.workers {
            let proxy = Proxy::to(field.server.port());
            let child = field.spawn(place, &proxy);
            field.workers.push(Worker { child, proxy });
        }
        field
    }

    fn spawn(&mut self, place: usize, proxy: &Proxy) -> Child {
        let log = self.dir.path().join(format!("worker-{place}-{}", self.logs.len()));
        let orders = Orders {
            url: proxy.url(),
            resource: self.resource.path().to_owned(),
            log: log.clone(),
            end: self.end(),
            keys: self.setup.keys,
            threads: 1 + place % 2,
            careless: self.setup.careless && place == 0,
        };
        self.logs.push((place, log));
        Child::of(self.setup.test, &orders.line())
    }

    fn end(&self) -> PathBuf {
        self.dir.path().join("end")
    }

    pub fn child(&self, place: usize) -> &Child {
        &self.workers[place].child
    }
    pub fn writes(&self) -> Vec<super::resource::Write> {
        self.resource.writes()
    }

    /// Does what is planned, for as long as is said, and until there is enough of it; but no longer than six times that.
    pub fn suffer(
        &mut self,
        plan: impl Iterator<Item = Planned>,
        length: Duration,
        enough: impl Fn(&Field, Covered) -> bool,
    ) {
        let start = Instant::now();
        let mut plan = plan.peekable();
        let mut under_way: Vec<(Planned, u64)> = Vec::new();
        let mut look_at = length;
        loop {
            let start_at = plan.peek().map_or(Duration::MAX, |planned| planned.at);
            let next_end = (0..under_way.len()).min_by_key(|n| under_way[*n].0.until);
            let end_at = next_end.map_or(Duration::MAX, |n| under_way[n].0.until);
            let next = start_at.min(end_at).min(look_at);
            thread::sleep(next.saturating_sub(start.elapsed()));
            if let Some(n) = next_end.filter(|_| next == end_at) {
                let (planned, from) = under_way.swap_remove(n);
                self.end_fault(&planned);
                self.trouble(&planned, from);
            } else if next == start_at
                && let Some(planned) = plan.next()
            {
                let from = now();
                self.begin_fault(&planned);
                *self.faults.entry(planned.fault).or_default() += 1;
                under_way.push((planned, from));
            } else {
                self.look_at_workers();
                if start.elapsed() > 6 * length || enough(self, self.evidence().covered()) {
                    break;
                }
                look_at = start.elapsed() + Duration::from_secs(1);
            }
        }
        for (planned, from) in under_way {
            thread::sleep(planned.until.saturating_sub(start.elapsed()));
            self.end_fault(&planned);
            self.trouble(&planned, from);
        }
    }

    /// Nothing goes wrong any more: waits until each worker has had a turn at each key, and until there is enough of it.
    pub fn recover(&mut self, enough: impl Fn(Covered) -> bool) {
        let (from, start) = (now(), Instant::now());
        loop {
            let evidence = self.evidence();
            let leases = &evidence.leases;
            let had = |place: usize, key: u64| leases.iter().any(|l| l.got > from && (l.worker, l.key) == (place, key));
            let places = (0..self.workers.len()).flat_map(|place| (0..self.setup.keys).map(move |key| (place, key)));
            let without: Vec<_> = places.filter(|(place, key)| !had(*place, *key)).collect();
            if without.is_empty() && (enough(evidence.covered()) || start.elapsed() > PATIENCE) {
                return;
            }
            self.look_at_workers();
            assert!(start.elapsed() < 2 * PATIENCE, "no turn came to (worker, key) {without:?}");
            thread::sleep(Duration::from_millis(300));
        }
    }

    fn begin_fault(&mut self, planned: &Planned) {
        let Planned { at, until, fault, worker, choice } = *planned;
        let lasts = until - at;
        let port = self.server.port();
        let Worker { child, proxy } = &mut self.workers[worker];
        match fault {
            Fault::Stop => child.stop(),
            Fault::Kill => {
                self.look_at_workers();
                self.workers[worker].child.kill();
                // No connection of the dead one's is left to its successor.
                let proxy = Proxy::to(port);
                let child = self.spawn(worker, &proxy);
                self.workers[worker] = Worker { child, proxy };
            }
            Fault::Cut => proxy.reset_all(),
            Fault::CutMidway => proxy.cut_request(within(choice), usize::try_from(choice / 4 % 200).unwrap()),
            Fault::Hang => proxy.blackhole(),
            Fault::Vanish if choice % 2 == 0 => proxy.requests(Flow::Drop),
            Fault::Vanish => proxy.replies(Flow::Drop),
            Fault::Delay => {
                let by = Flow::Delay(Duration::from_millis(5 + choice / 4 % 250));
                match choice % 3 {
                    0 => proxy.requests(by),
                    1 => proxy.replies(by),
                    _ => (proxy.requests(by), proxy.replies(by)).0,
                }
            }
            Fault::LoseReply if choice / 4 % 2 == 0 => proxy.lose_reply(within(choice), Then::Reset),
            Fault::LoseReply => proxy.lose_reply(within(choice), Then::Silence),
            Fault::Refuse => {
                proxy.refuse();
                proxy.reset_all();
            }
            Fault::Restart => self.server.restart(),
            Fault::Freeze => self.server.stop(),
            Fault::Pause => {
                let what = if choice % 2 == 0 { "ALL" } else { "WRITE" };
                self.server.cmd(&["CLIENT", "PAUSE", &lasts.as_millis().to_string(), what]);
            }
            Fault::KillClients => drop(self.server.cmd(&["CLIENT", "KILL", "TYPE", "normal"])),
            Fault::KillInboxes => drop(self.server.cmd(&["CLIENT", "KILL", "TYPE", "pubsub"])),
            Fault::FlushScripts => drop(self.server.cmd(&["SCRIPT", "FLUSH"])),
        }
    }

    fn end_fault(&mut self, planned: &Planned) {
        let Worker { child, proxy } = &self.workers[planned.worker];
        match planned.fault {
            Fault::Stop => child.resume(),
            Fault::CutMidway | Fault::Hang | Fault::Vanish | Fault::Delay | Fault::LoseReply | Fault::Refuse => {
                proxy.pass();
            }
            Fault::Freeze => self.server.cont(),
            _ => {}
        }
    }

    /// It may have cost leases. What breaks connections or makes the server forget its scripts may not.
    fn trouble(&mut self, planned: &Planned, from: u64) {
        let harmless = [Fault::Cut, Fault::CutMidway, Fault::KillClients, Fault::KillInboxes, Fault::FlushScripts];
        if !harmless.contains(&planned.fault) {
            let worker = (!planned.fault.is_the_servers()).then_some(planned.worker);
            self.troubles.push(Trouble { worker, from, until: now() });
        }
    }

    fn look_at_workers(&mut self) {
        for Worker { child, .. } in &mut self.workers {
            let said = child.unheard();
            assert!(said.is_empty(), "a worker said {said:?}");
        }
    }

    /// What is known so far.
    pub fn evidence(&self) -> Evidence {
        let mut evidence =
            Evidence { writes: self.resource.writes(), data_lost: !self.setup.durable, ..Evidence::default() };
        evidence.troubles.extend(self.troubles.iter().chain(&self.pulse.gaps()));
        for (place, log) in &self.logs {
            let (leases, starved) = notes::read(log, *place);
            evidence.leases.extend(leases);
            evidence.troubles.extend(starved);
        }
        evidence
    }

    /// Ends all workers in order, and waits until nothing can be alive on the server any more.
    pub fn close(mut self) -> (Evidence, BTreeMap<Fault, usize>) {
        std::fs::write(self.end(), "").unwrap();
        for Worker { child, .. } in &mut self.workers {
            self.runtime.block_on(child.succeeds());
            let said = child.unheard();
            assert!(said.is_empty(), "a worker said {said:?}");
        }
        let mut evidence = self.evidence();
        let left = || self.server.keys().into_iter().filter(|key| !key.ends_with(":fence")).count();
        let start = Instant::now();
        // A TTL, and the presence of whoever stood in line.
        while left() > 0 && start.elapsed() < 2 * TTL + Duration::from_millis(500) {
            thread::sleep(Duration::from_millis(10));
        }
        evidence.keys = self.server.keys();
        for key in &evidence.keys {
            assert!(self.server.pttl(key) > 0, "{key} has no TTL");
        }
        (evidence, std::mem::take(&mut self.faults))
    }
}

fn within(choice: u64) -> &'static str {
    [CLAIM, RENEW, RENEW, RELEASE][usize::try_from(choice % 4).unwrap()]
}
