//! A call played many times, each time dropped somewhere else, while the server answers or hangs.
use super::{
    call::{ATTEMPT, Call, Cast, Ready, connected},
    cut::{Cut, Driven, End},
    look::{CALLER, Look, wait},
    onlookers::{Onlookers, Others},
    run::{FOLLOWED, Run, runtime},
    support::proxy::{Flow, Proxy},
    trouble::{Hang, Trouble, cuts, troubles},
};
use futures_util::future::join_all;
use leasehold::{Lease, Leases, store::redis::RedisStore};
use std::{cell::RefCell, rc::Rc, time::Duration};
use tokio::runtime::Handle;

/// Longer than any exchange takes before it is given up.
const GIVEN_UP: Duration = Duration::from_millis(2300);

/// Everybody's server, and everybody else's leases.
#[derive(Clone)]
pub struct World {
    pub port: u16,
    /// Those that make a quorum of it.
    pub beside: [u16; 2],
    pub others: Leases,
    pub runtime: Handle,
    /// What should be is waited for no longer.
    pub patience: Duration,
}

/// Where the caller's watchdog lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    Thread,
    CallersRuntime,
}

/// What was seen of a call.
#[derive(Default)]
pub struct Seen {
    /// The most polls after which it was not done yet.
    pub awaits: usize,
    pub dropped: usize,
    /// Of these, so many had been woken and not polled since.
    pub woken: usize,
    /// Of these, so many went with their runtime.
    pub runtimes: usize,
    pub hanging: usize,
    pub done: usize,
    pub panicked: usize,
    pub found: Vec<String>,
}

struct Stage {
    look: Rc<Look>,
    proxy: Rc<Proxy>,
    /// To the servers that make a quorum of the first, in the same trouble as that.
    beside: [Proxy; 2],
    caller: Leases,
    world: World,
    /// Another lease of the caller's, which none of this may touch.
    neighbour: Lease,
    tasks: usize,
    /// What was played for.
    keys: RefCell<Vec<String>>,
}

/// Plays it in every way there is.
pub fn play(call: &Call, home: Home, world: &World) -> Seen {
    let runtime = runtime();
    let mut seen = Seen::default();
    let played = runtime.block_on(Stage::play(call, home, world, &mut seen));
    seen.found.extend(played.err());
    seen
}

fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

impl Stage {
    async fn play(call: &Call, home: Home, world: &World, seen: &mut Seen) -> Result<(), String> {
        let stage = Stage::open(home, world).await;
        let awaits = stage.rehearse(call, seen).await;
        for (n, trouble) in troubles(awaits).into_iter().enumerate() {
            stage.batch(call, n, trouble, awaits, seen).await;
            if !seen.found.is_empty() {
                break;
            }
        }
        stage.close().await
    }

    async fn open(home: Home, world: &World) -> Stage {
        let (proxy, beside) = (Rc::new(Proxy::to(world.port)), world.beside.map(Proxy::to));
        let url = proxy.url();
        let builder = Leases::builder().label(CALLER).attempt(ATTEMPT);
        let caller = match home {
            Home::Thread => connected(|| builder.clone().connect(&url)).await,
            Home::CallersRuntime => builder.build(connected(|| RedisStore::connect(&url)).await).unwrap(),
        };
        let look = Rc::new(Look::at(world.port));
        let name = format!("{}-neighbour", proxy.address().port());
        let neighbour = caller.lease(&name).acquire().await.unwrap();
        proxy.until(|counts| counts.open == 3).await;
        let heard = || if look.is_heard(&name) { Ok(()) } else { Err("nobody hears what the server says".into()) };
        wait(world.patience, heard).await.unwrap();
        let tasks = alive_tasks();
        Stage { look, proxy, beside, caller, world: world.clone(), neighbour, tasks, keys: RefCell::default() }
    }

    fn cast(&self, key: &str) -> Cast {
        Cast {
            leases: self.caller.clone(),
            url: self.proxy.url(),
            quorum: [self.proxy.url(), self.beside[0].url(), self.beside[1].url()],
            key: key.to_owned(),
            others: self.world.others.clone(),
            look: self.look.clone(),
            proxy: self.proxy.clone(),
        }
    }

    /// One call, polled until it is done: how many polls it was not.
    async fn rehearse(&self, call: &Call, seen: &mut Seen) -> usize {
        let mut run = self.prepare(call, format!("{}-rehearsal", self.proxy.address().port())).await;
        run.driven.to(Cut { polls: usize::MAX, woken: false }, FOLLOWED).await;
        let end = run.driven.end();
        let awaits = run.driven.polls - usize::from(end != End::Dropped);
        self.proxy.pass();
        if let Err(why) = run.judge(&self.look, &self.caller, self.world.patience, end).await {
            seen.found.push(format!("{}, {}, to its end: {why}", call.of, call.when));
        }
        seen.awaits = awaits;
        awaits
    }

    async fn batch(&self, call: &Call, n: usize, trouble: Trouble, awaits: usize, seen: &mut Seen) {
        let mut runs = Vec::new();
        for cut in cuts(trouble, awaits) {
            let key = format!("{}-{n}-{}-{}", self.proxy.address().port(), cut.polls, cut.woken);
            runs.push((cut, self.prepare(call, key).await));
        }
        if let Trouble::Hangs { from, how, .. } = trouble {
            let begin = Cut { polls: from, woken: true };
            join_all(runs.iter_mut().map(|(_, run)| run.driven.to(begin, self.world.patience))).await;
            self.proxies().for_each(|proxy| match how {
                Hang::Deaf => proxy.blackhole(),
                Hang::Mute => proxy.replies(Flow::Hold),
            });
        }
        let followed = match trouble {
            Trouble::Hangs { brief: false, .. } => GIVEN_UP,
            _ => FOLLOWED,
        };
        let mut played = join_all(runs.into_iter().map(async |(cut, mut run)| {
            let end = match trouble {
                Trouble::RuntimeEnds => run.ends_with_its_runtime(cut).await,
                _ => {
                    run.driven.to(cut, followed).await;
                    if matches!(trouble, Trouble::Hangs { brief: true, .. }) {
                        // What was asked is on its way by then, and can still be carried out after the drop.
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    run.driven.end()
                }
            };
            run.onlookers.call_is_over();
            (cut, run, end)
        }))
        .await;
        for (_, run, end) in &mut played {
            seen.count(run, *end, trouble);
        }
        if matches!(trouble, Trouble::Hangs { loses: true, .. }) {
            self.proxies().for_each(Proxy::reset_all);
        }
        self.proxies().for_each(Proxy::pass);
        let judged = join_all(played.into_iter().map(async |(cut, run, end)| {
            (cut, end, run.judge(&self.look, &self.caller, self.world.patience, end).await)
        }));
        for (cut, end, judged) in judged.await {
            if let Err(why) = judged {
                seen.found.push(format!("{}, {}; {trouble:?}; {cut:?}, {end:?}: {why}", call.of, call.when));
            }
        }
        if let Err(why) = self.as_before().await {
            seen.found.push(format!("{}, {}; {trouble:?}: {why}", call.of, call.when));
        }
    }

    async fn prepare(&self, call: &Call, key: String) -> Run {
        let mut onlookers = Onlookers::new(&key, &self.world.others, &self.world.runtime);
        onlookers.come_first(call.others, &self.look, self.world.patience).await;
        let Ready { call: calling, settle } = (call.prepare)(self.cast(&key)).await;
        if call.others == Others::Wait {
            onlookers.wait(&self.look, self.world.patience).await;
        }
        self.keys.borrow_mut().push(key.clone());
        Run { key, onlookers, driven: Driven::new(calling), settle }
    }

    /// No task and no connection more than before, and the same leases as before work for another key.
    async fn as_before(&self) -> Result<(), String> {
        let patience = self.world.patience;
        let fence = format!("#{}", self.neighbour.fence());
        let is_there = self.look.value(self.neighbour.key().as_ref()).is_some_and(|value| value.ends_with(&fence));
        if !is_there || !self.neighbour.is_held() {
            return Err(format!("another lease of the caller's was lost: {:?}", self.neighbour.state()));
        }
        let another = self.caller.lease(format!("{}-another", self.proxy.address().port())).wait(patience);
        let another = another.acquire().await.map_err(|error| format!("another key: {error}"))?;
        another.release().await.map_err(|error| format!("another key: {error}"))?;
        wait(patience, || match (alive_tasks(), self.connections()) {
            (tasks, _) if tasks > self.tasks => Err(format!("{tasks} tasks are alive, {} before", self.tasks)),
            (_, open) if open > 3 => Err(format!("{open} connections are open, 3 before")),
            _ => Ok(()),
        })
        .await
    }

    fn proxies(&self) -> impl Iterator<Item = &Proxy> {
        std::iter::once(&*self.proxy).chain(&self.beside)
    }

    fn connections(&self) -> usize {
        // A reply that comes only now may still be one to be held.
        self.proxies().for_each(Proxy::deliver);
        self.proxies().map(|proxy| proxy.counts().open).sum()
    }

    /// With the last handle everything goes.
    async fn close(self) -> Result<(), String> {
        let Stage { look, proxy, beside, caller, world, neighbour, keys, .. } = self;
        let key = neighbour.key().clone();
        neighbour.release().await.map_err(|error| format!("another lease of the caller's: {error}"))?;
        look.nothing_left(key.as_ref(), world.patience).await?;
        // Nor did anything come back since.
        for key in keys.into_inner() {
            look.nothing_left(&key, Duration::ZERO).await.map_err(|why| format!("{key}, at the end: {why}"))?;
        }
        drop(caller);
        wait(world.patience, || {
            match (alive_tasks(), proxy.counts().open + beside.iter().map(|proxy| proxy.counts().open).sum::<usize>()) {
                (0, 0) => Ok(()),
                (tasks, open) => Err(format!("with the leases gone, {tasks} tasks and {open} connections are left")),
            }
        })
        .await
    }
}

impl Seen {
    fn count(&mut self, run: &Run, end: End, trouble: Trouble) {
        match end {
            End::Done => self.done += 1,
            End::Panicked => self.panicked += 1,
            End::Dropped => {
                self.awaits = self.awaits.max(run.driven.polls);
                self.dropped += 1;
                self.woken += usize::from(run.driven.woken);
                self.runtimes += usize::from(trouble == Trouble::RuntimeEnds);
                self.hanging += usize::from(matches!(trouble, Trouble::Hangs { .. }));
            }
        }
    }
}
