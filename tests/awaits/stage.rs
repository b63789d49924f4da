//! A call played many times, each time dropped somewhere else, while the server answers or hangs.
use super::{
    cut::{Cut, Driven, End},
    look::{CALLER, Look, wait},
    onlookers::{Onlookers, Others, in_time},
    support::proxy::{Flow, Proxy},
    table::{ATTEMPT, Call, Calling, Cast, Ready},
};
use futures_util::future::join_all;
use leasehold::{Lease, Leases, store::redis::RedisStore};
use std::{
    future::poll_fn,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::runtime::{Builder, Handle, Runtime};

/// The most polls after which a call is dropped.
const POLLS: usize = 6;
/// How long a call that waits is followed.
const FOLLOWED: Duration = Duration::from_millis(1300);
/// Longer than any exchange takes before it is given up.
const GIVEN_UP: Duration = Duration::from_millis(2300);

/// Everybody's server, and everybody else's leases.
#[derive(Clone)]
pub struct World {
    pub port: u16,
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

/// What happens besides the drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    /// The call is dropped with the runtime that it is on.
    RuntimeEnds,
    /// The server hangs from when the call has been woken so often.
    Hangs {
        from: usize,
        how: Hang,
        /// It is over as soon as the calls are dropped, and what was sent before arrives.
        brief: bool,
        /// What was sent meanwhile never arrives.
        loses: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hang {
    /// It hears nothing.
    Deaf,
    /// It does what it is asked, and says nothing.
    Mute,
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
    caller: Leases,
    world: World,
    /// Another lease of the caller's, which none of this may touch.
    neighbour: Lease,
    tasks: usize,
}

/// Plays it in every way there is.
pub fn play(call: &Call, home: Home, world: &World) -> Seen {
    let runtime = runtime();
    let mut seen = Seen::default();
    let played = runtime.block_on(Stage::play(call, home, world, &mut seen));
    seen.found.extend(played.err());
    seen
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
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
        let proxy = Rc::new(Proxy::to(world.port));
        let builder = Leases::builder().label(CALLER).attempt(ATTEMPT);
        let caller = match home {
            Home::Thread => builder.connect(&proxy.url()).await.unwrap(),
            Home::CallersRuntime => builder.build(RedisStore::connect(&proxy.url()).await.unwrap()).unwrap(),
        };
        let look = Rc::new(Look::at(world.port));
        let name = format!("{}-neighbour", proxy.address().port());
        let neighbour = caller.lease(&name).acquire().await.unwrap();
        proxy.until(|counts| counts.open == 3).await;
        if home == Home::CallersRuntime {
            // The last of the connections is not through with its greetings.
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
        let tasks = alive_tasks();
        Stage { look, proxy, caller, world: world.clone(), neighbour, tasks }
    }

    fn cast(&self, key: &str) -> Cast {
        Cast {
            leases: self.caller.clone(),
            url: self.proxy.url(),
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
        if let Err(why) = run.judge(self, end).await {
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
            match how {
                Hang::Deaf => self.proxy.blackhole(),
                Hang::Mute => self.proxy.replies(Flow::Hold),
            }
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
            self.proxy.reset_all();
        }
        self.proxy.pass();
        let judged = join_all(played.into_iter().map(async |(cut, run, end)| (cut, end, run.judge(self, end).await)));
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

    fn connections(&self) -> usize {
        // A reply that comes only now may still be one to be held.
        self.proxy.deliver();
        self.proxy.counts().open
    }

    /// With the last handle everything goes.
    async fn close(self) -> Result<(), String> {
        let Stage { look, proxy, caller, world, neighbour, .. } = self;
        let key = neighbour.key().clone();
        neighbour.release().await.map_err(|error| format!("another lease of the caller's: {error}"))?;
        look.nothing_left(key.as_ref(), world.patience).await?;
        drop(caller);
        wait(world.patience, || match (alive_tasks(), proxy.counts().open) {
            (0, 0) => Ok(()),
            (tasks, open) => Err(format!("with the leases gone, {tasks} tasks and {open} connections are left")),
        })
        .await
    }
}

struct Run {
    key: String,
    onlookers: Onlookers,
    driven: Driven,
    settle: Box<dyn FnOnce(End, usize) -> super::table::Step>,
}

impl Run {
    /// Puts the call on a runtime that ends when the call has been polled so often.
    async fn ends_with_its_runtime(&mut self, cut: Cut) -> End {
        let Some(mut call) = self.driven.take() else { return self.driven.end() };
        let (polls, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counted, finished) = (polls.clone(), done.clone());
        let counting: Calling = Box::pin(poll_fn(move |context| {
            if counted.load(SeqCst) >= cut.polls {
                // Woken, and never polled again.
                return Poll::Pending;
            }
            counted.fetch_add(1, SeqCst);
            let polled = call.as_mut().poll(context);
            finished.fetch_add(usize::from(polled.is_ready()), SeqCst);
            polled
        }));
        let (ended, end) = tokio::sync::oneshot::channel();
        let (polls_there, done_there) = (polls.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            let runtime = runtime();
            let panicked = runtime.block_on(async {
                let task = tokio::spawn(counting);
                let all = async {
                    while polls_there.load(SeqCst) < cut.polls && done_there.load(SeqCst) == 0 && !task.is_finished() {
                        tokio::task::yield_now().await;
                        tokio::time::sleep(Duration::from_micros(200)).await;
                    }
                };
                _ = tokio::time::timeout(FOLLOWED, all).await;
                task.is_finished() && done_there.load(SeqCst) == 0
            });
            drop(runtime);
            _ = ended.send(panicked);
        });
        let panicked = end.await.unwrap_or(true);
        thread.join().unwrap();
        let end = match done.load(SeqCst) {
            0 if panicked => End::Panicked,
            0 => End::Dropped,
            _ => End::Done,
        };
        self.driven.ended_as(end, polls.load(SeqCst));
        end
    }

    /// Nothing is left, nobody is harmed.
    async fn judge(self, stage: &Stage, end: End) -> Result<(), String> {
        let Run { key, onlookers, driven, settle } = self;
        let (look, patience) = (&stage.look, stage.world.patience);
        onlookers.call_is_over();
        in_time("the caller", patience, settle(end, driven.polls)).await??;
        look.nothing_left(&key, patience).await?;
        onlookers.are_served(look, patience).await?;
        look.nothing_left(&key, patience).await?;
        look.nothing_of_anybody(&key, patience).await?;
        // As good as before, for the caller too.
        let again =
            stage.caller.lease(&key).wait(patience).acquire().await.map_err(|e| format!("the same key: {e}"))?;
        again.release().await.map_err(|error| format!("the same key: {error}"))?;
        look.nothing_of_anybody(&key, patience).await
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

/// What is tried with a call that is polled so often before it is done.
fn troubles(awaits: usize) -> Vec<Trouble> {
    let hangs = |from, how, brief, loses| Trouble::Hangs { from, how, brief, loses };
    let mut troubles = vec![
        Trouble::None,
        Trouble::RuntimeEnds,
        hangs(0, Hang::Deaf, true, false),
        hangs(0, Hang::Mute, true, true),
        hangs(0, Hang::Deaf, false, true),
        hangs(0, Hang::Mute, false, false),
    ];
    for from in 1..=awaits.min(2) {
        troubles.push(hangs(from, Hang::Mute, true, false));
        troubles.push(hangs(from, Hang::Deaf, false, false));
    }
    troubles
}

/// After every number of polls, before the wake and after it, and beyond the last.
fn cuts(trouble: Trouble, awaits: usize) -> Vec<Cut> {
    let polls = match trouble {
        Trouble::None | Trouble::RuntimeEnds => 0..=awaits.min(POLLS) + 1,
        Trouble::Hangs { from, brief: true, .. } => from..=from + 1,
        Trouble::Hangs { from, .. } => from..=from + 4,
    };
    let both = polls.flat_map(|polls| [false, true].map(|woken| Cut { polls, woken }));
    // Nobody waits for a wake while the server is to hang only briefly, nor on a runtime that ends.
    let woken = !matches!(trouble, Trouble::RuntimeEnds | Trouble::Hangs { brief: true, .. });
    both.filter(|cut| !cut.woken || woken && cut.polls > 0).collect()
}
