//! One task of a worker: takes its key in all the ways there are, works, and writes down what it did.
use super::{
    GAP, TTL,
    notes::{End, How, Note, Step, now},
    resource::Desk,
    support,
    worker::may_pass,
};
use leasehold::{CancellationToken, Error, Lease, LeaseView, Leases, LossReason, Released};
use std::{
    fs::File,
    future::{Future, poll_fn},
    io::Write,
    path::Path,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
use tokio::task::{spawn_blocking, yield_now};

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}
fn nanos(d: Duration) -> u64 {
    d.as_nanos().try_into().unwrap()
}
/// Something between the two.
fn between(from: Duration, to: Duration) -> Duration {
    from + (to - from).mul_f64(fastrand::f64())
}
/// How long the lease is certain now.
fn left(view: &LeaseView) -> u64 {
    nanos(view.valid_for())
}

/// A process's file, the numbers of its leases, and whether it is to end.
pub struct Log {
    file: File,
    next: AtomicU64,
    over: AtomicBool,
}

impl Log {
    pub fn create(path: &Path) -> Log {
        let file = File::options().create_new(true).append(true).open(path).unwrap();
        Log { file, next: AtomicU64::new(0), over: AtomicBool::new(false) }
    }
    fn note(&self, note: &Note) {
        (&self.file).write_all(format!("{note}\n").as_bytes()).unwrap();
    }
    /// What no runtime can drop ends by this.
    pub fn end(&self) {
        self.over.store(true, Ordering::Release);
    }
    /// A lease can be lost, and nobody is to blame, when threads don't get to run.
    pub fn look_for_gaps(&self) {
        let mut from = now();
        loop {
            thread::sleep(ms(10));
            let until = now();
            if until - from > nanos(GAP) {
                self.note(&Note::Starved { from, until });
            }
            from = until;
        }
    }
}

/// What was certain as the latest poll of the work began. Looked at outside of the guard, before it looks itself.
#[derive(Default)]
struct Watch {
    view: Mutex<Option<LeaseView>>,
    latest: Mutex<(u64, Option<u64>)>,
}

impl Watch {
    fn look(&self) {
        let polled = now();
        *self.latest.lock().unwrap() = (polled, self.view.lock().unwrap().as_ref().map(left));
    }
    async fn over<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        poll_fn(|cx| {
            self.look();
            future.as_mut().poll(cx)
        })
        .await
    }
}

/// One task and its key.
pub struct Hand {
    leases: Leases,
    log: Arc<Log>,
    key: u64,
    name: String,
    desk: Desk,
    watch: Watch,
}

/// What came of a round.
enum Came {
    OfNothing,
    /// The work was over then, and the lease was given back.
    Done(u64),
    /// There was no lease any more to be given back, and nobody had told us.
    Gone(u64),
}

type Outcome = Result<Came, Error>;

impl Hand {
    pub fn new(leases: Leases, log: Arc<Log>, key: u64, resource: &Path) -> Hand {
        Hand { leases, log, key, name: format!("k{key}"), desk: Desk::at(resource), watch: Watch::default() }
    }

    pub async fn rounds(self: Arc<Self>) {
        loop {
            let number = self.log.next.fetch_add(1, Ordering::Relaxed);
            // Most work is short; some needs a few renewals.
            let length = if fastrand::u8(..7) > 0 { between(ms(5), ms(150)) } else { between(TTL / 2, 3 * TTL) };
            let fixed = fastrand::u8(..15) == 0;
            let round = Round { number, asked: now(), length };
            let came = if fixed { self.locked(round, true).await } else { self.round(round).await };
            self.settle(number, came, fixed);
            *self.watch.view.lock().unwrap() = None;
            tokio::time::sleep(between(ms(0), ms(30))).await;
        }
    }

    async fn round(self: &Arc<Self>, round: Round) -> Outcome {
        let request = self.leases.lease(&self.name).wait(between(TTL / 4, 5 * TTL));
        match fastrand::u8(..20) {
            0..=4 => done(self.watch.over(request.run(|view| self.work(round, Some(view)))).await),
            5..=7 => {
                let work = |_: CancellationToken| self.work(round, None);
                done(self.watch.over(self.leases.with_lease(&self.name, work)).await)
            }
            8 | 9 => {
                let request = request.max_hold(between(ms(200), 2 * TTL));
                done(self.watch.over(request.run(|view| self.work(round, Some(view)))).await)
            }
            10 | 11 => match tokio::time::timeout(between(ms(0), ms(60)), request.acquire()).await {
                Ok(lease) => self.guarded(round, lease?).await,
                Err(_) => Ok(Came::OfNothing),
            },
            12 | 13 => match request.try_acquire().await? {
                Some(lease) => self.guarded(round, lease).await,
                None => Ok(Came::OfNothing),
            },
            14 => self.blocking(round, request.acquire().await?).await,
            15..=17 => self.locked(round, false).await,
            _ => self.guarded(round, request.acquire().await?).await,
        }
    }

    async fn guarded(&self, round: Round, lease: Lease) -> Outcome {
        let worked = self.watch.over(lease.guard(self.work(round, Some(lease.view())))).await;
        if fastrand::u8(..4) == 0 {
            drop(lease);
            return done(worked);
        }
        released(worked, lease).await
    }

    /// A handle, entered twice; or for one TTL that is not prolonged.
    async fn locked(&self, round: Round, fixed: bool) -> Outcome {
        let mut lock = self.leases.lock(&self.name);
        let got = match fixed {
            true => lock.try_lock_with(between(TTL / 4, 5 * TTL), TTL).await?,
            false => Some(lock.lock().await?),
        };
        let Some(fence) = got else { return Ok(Came::OfNothing) };
        let view = lock.view()?;
        let worked = self.watch.over(view.guard(self.work(round, Some(view.clone())))).await;
        if lock.lock().await.is_ok_and(|again| again == fence) {
            // It may be lost by now; the other unlock says so.
            let _ = lock.unlock().await;
        }
        let unlocked = lock.unlock().await;
        let over = worked?;
        unlocked.map(|()| Came::Done(over))
    }

    /// Code that blocks, and looks at its lease before each step.
    async fn blocking(self: &Arc<Self>, round: Round, lease: Lease) -> Outcome {
        let hand = self.clone();
        // The lease goes along: should this task be dropped, the thread still works under it.
        let working = spawn_blocking(move || {
            hand.begins(round, Some(&lease));
            let until = now() + nanos(round.length);
            while now() < until && !hand.log.over.load(Ordering::Acquire) {
                hand.watch.look();
                if let Err(error) = lease.ensure_held() {
                    return (Err(error), lease);
                }
                hand.step(round, Some(&lease));
                thread::sleep(between(ms(1), ms(8)));
            }
            (Ok(now()), lease)
        });
        let (worked, lease) = working.await.unwrap();
        released(worked, lease).await
    }

    /// Planted: looks at nothing.
    pub async fn carelessly(self: Arc<Self>) {
        let round = Round { number: self.log.next.fetch_add(1, Ordering::Relaxed), asked: now(), length: ms(0) };
        let lease = self.leases.lease(&self.name).wait(support::PATIENCE).acquire().await.unwrap();
        self.begins(round, Some(&lease));
        loop {
            self.watch.look();
            self.step(round, Some(&lease));
            tokio::time::sleep(ms(5)).await;
        }
    }

    /// The work, under guard. Returns when it was over.
    async fn work(&self, round: Round, view: Option<LeaseView>) -> u64 {
        self.begins(round, view.as_ref());
        // From here on each poll begins with the lease in hand.
        yield_now().await;
        let until = now() + nanos(round.length);
        while now() < until {
            self.step(round, view.as_ref());
            tokio::time::sleep(between(ms(1), ms(8))).await;
        }
        now()
    }

    fn begins(&self, Round { number, asked, .. }: Round, view: Option<&LeaseView>) {
        *self.watch.view.lock().unwrap() = view.cloned();
        let fence = view.map(LeaseView::fence);
        self.log.note(&Note::Got { number, key: self.key, fence, ttl: nanos(TTL), asked, got: now() });
    }

    fn step(&self, round: Round, view: Option<&LeaseView>) {
        let (polled, left_then) = *self.watch.latest.lock().unwrap();
        let (begun, left_now) = (now(), view.map(left));
        if fastrand::u8(..10) == 0 {
            // Long enough for a stop to come in the middle of it.
            thread::sleep(ms(50));
        }
        let accepted = view.map(|view| self.desk.write(self.key, view.fence()));
        let (ended, left_after) = (now(), view.map(left));
        let step = Step { polled, left_then, begun, left: left_now, ended, left_after, accepted };
        self.log.note(&Note::Step(round.number, step));
    }

    fn settle(&self, number: u64, came: Outcome, fixed: bool) {
        let at = now();
        let (how, from, why) = match came {
            Ok(Came::Done(over)) => (How::Released, over, String::new()),
            Ok(Came::Gone(over)) => (How::Lost, over, "gone when it was released".to_owned()),
            Err(Error::Lost(lost)) => {
                let agreed = fixed || lost.reason == LossReason::MaxHold;
                (if agreed { How::Agreed } else { How::Lost }, at, format!("{:?}", lost.reason))
            }
            Ok(Came::OfNothing) => return,
            Err(error) if error.is_contended() || may_pass(&error) => return,
            Err(error) => panic!("{error:?}"),
        };
        self.log.note(&Note::End(number, End { how, from, at, why }));
    }
}

#[derive(Clone, Copy)]
struct Round {
    number: u64,
    asked: u64,
    /// How long the work takes.
    length: Duration,
}

fn done(worked: Result<u64, Error>) -> Outcome {
    worked.map(Came::Done)
}

async fn released(worked: Result<u64, Error>, lease: Lease) -> Outcome {
    let released = lease.release().await;
    let over = worked?;
    Ok(if released? == Released::AlreadyGone { Came::Gone(over) } else { Came::Done(over) })
}
