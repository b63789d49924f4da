//! One process: its `Leases`, and what its tasks do with them.
use crate::{
    judge::{Id, NetTrouble},
    net::NetStore,
    planted::Planted,
    world::World,
};
use fastrand::Rng;
use leasehold::{CancellationToken, Error, Key, Lease, LeaseView, Leases, Result, Wait};
use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Instant, Sleep, advance, sleep, sleep_until, timeout};

pub struct Client {
    pub net: usize,
    pub leases: Leases,
    ttl: Duration,
    world: Arc<World>,
    keys: Vec<Key>,
}

/// Work that panics on purpose.
struct OnPurpose;

/// What the work under a lease is given.
struct Under {
    id: Option<Id>,
    /// Not for all work.
    view: Option<LeaseView>,
    token: CancellationToken,
}

impl Client {
    pub fn new(world: &Arc<World>, ttl: Duration) -> Arc<Client> {
        let net = {
            let state = &mut *world.lock();
            state.judge.nets.push(NetTrouble::default());
            state.wire.join()
        };
        let store = NetStore { world: world.clone(), net };
        let builder = Leases::builder().clock(world.clock.clone()).label(net.to_string()).ttl(ttl);
        let keys = (0..world.plan.keys).map(|n| Key::from(format!("k{n}"))).collect();
        Arc::new(Client { net, leases: builder.build(store).unwrap(), ttl, world: world.clone(), keys })
    }

    /// One task: takes leases in every way there is, one after another.
    pub async fn act(self: Arc<Self>, mut dice: Rng) {
        let acting = async {
            while !self.world.is_ending() {
                sleep(self.world.plan.some(&mut dice, 1.0)).await;
                let key = self.keys[dice.usize(0..self.keys.len())].clone();
                let end = match dice.u32(0..100) {
                    0..15 => self.dropped(key, &mut dice).await,
                    _ => self.once(key, &mut dice).await,
                };
                match end {
                    Err(Error::Shutdown) => break,
                    Err(error) => self.world.note(|| format!("net {}: {error:?}", self.net)),
                    Ok(()) => {}
                }
            }
        };
        Gate { world: &self.world, net: self.net, inner: pin!(acting), timer: None }.await;
    }

    /// The same, dropped at whatever await it has come to.
    async fn dropped(&self, key: Key, dice: &mut Rng) -> Result<()> {
        self.world.count("futures dropped");
        let (mut polls, patience, few) = (dice.u32(0..12), self.world.plan.some(dice, 2.0), dice.bool());
        let mut once = pin!(self.once(key, dice));
        if !few {
            return timeout(patience, once).await.unwrap_or(Ok(()));
        }
        poll_fn(|cx| {
            if polls == 0 {
                return Poll::Ready(Ok(()));
            }
            polls -= 1;
            once.as_mut().poll(cx)
        })
        .await
    }

    async fn once(&self, key: Key, dice: &mut Rng) -> Result<()> {
        let ttl = self.world.plan.base.mul_f64([0.7, 1.0, 1.0, 2.0][dice.usize(0..4)]);
        let wait = [Wait::Forever, Wait::UpTo(self.world.plan.some(dice, 4.0)), Wait::UpTo(ttl)][dice.usize(0..3)];
        let mut request = self.leases.lease(key.clone()).ttl(ttl).wait(wait);
        if dice.u32(0..8) == 0 {
            request = request.max_hold(ttl.mul_f64(0.5 + 2.0 * dice.f64()));
        }
        let mut mine = dice.fork();
        match dice.u32(0..100) {
            0..25 => {
                let lease = self.bounded(wait, ttl, request.acquire()).await?;
                self.hold(lease, &mut mine).await
            }
            25..45 => {
                let run = request.run(async move |view: LeaseView| {
                    let id = self.begin(&view);
                    let token = view.cancel_token().clone();
                    self.work(Under { id, view: Some(view), token }, &mut mine).await;
                    id
                });
                self.finished(run.await?)
            }
            45..55 => {
                let run = self.leases.with_lease(key.clone(), async move |token| {
                    // It sees no fence, but it is the one that its process was told of last.
                    let id = self.world.begins_newest(self.net, &key);
                    self.work(Under { id, view: None, token }, &mut mine).await;
                    id
                });
                self.finished(run.await?)
            }
            55..65 => match self.bounded(Wait::No, ttl, request.try_acquire()).await? {
                Some(lease) => self.hold(lease, &mut mine).await,
                None => Ok(()),
            },
            65..70 => {
                let run = request.run(async move |view: LeaseView| {
                    let id = self.begin(&view);
                    let token = view.cancel_token().clone();
                    self.work(Under { id, view: Some(view), token }, &mut mine).await;
                    resume_unwind(Box::new(OnPurpose))
                });
                self.panicking(run).await
            }
            _ => self.lock(key, ttl, wait, &mut mine).await,
        }
    }

    /// Works under a lease in hand, and ends it.
    async fn hold(&self, lease: Lease, dice: &mut Rng) -> Result<()> {
        let view = lease.view();
        let id = self.begin(&view);
        let under = Under { id, token: view.cancel_token().clone(), view: Some(view.clone()) };
        let mut mine = dice.fork();
        match self.guard(&view, self.work(under, &mut mine)).await {
            Ok(()) => self.finished(id)?,
            Err(error) => self.world.note(|| format!("net {}: {error:?}", self.net)),
        }
        if dice.bool() {
            lease.release().await?;
        }
        Ok(())
    }

    async fn lock(&self, key: Key, ttl: Duration, wait: Wait, dice: &mut Rng) -> Result<()> {
        let mut lock = self.leases.lock(key);
        let short = match wait {
            Wait::UpTo(wait) => wait,
            _ => Duration::ZERO,
        };
        let how = dice.u32(0..5);
        let fence = match how {
            0 => Some(lock.lock().await?),
            1 => Some(lock.lock_for(ttl).await?),
            2 => self.bounded(Wait::No, self.ttl, lock.try_lock()).await?,
            3 => self.bounded(short.into(), self.ttl, lock.try_lock_for(short)).await?,
            _ => self.bounded(short.into(), ttl, lock.try_lock_with(short, ttl)).await?,
        };
        let Some(fence) = fence else { return Ok(()) };
        let view = lock.view()?;
        let id = self.begin(&view);
        if let (1 | 4, Some(id)) = (how, id) {
            self.world.lock().judge.fixed(id);
        }
        if dice.u32(0..4) == 0 && lock.lock().await? != fence {
            self.world.broken(|| "re-entry changed the fence".into());
        }
        let under = Under { id, token: view.cancel_token().clone(), view: Some(view.clone()) };
        let mut mine = dice.fork();
        let done = self.guard(&view, self.work(under, &mut mine)).await;
        while lock.hold_count() > 1 {
            lock.unlock().await?;
        }
        lock.unlock().await?;
        self.world.count("locks unlocked");
        done.and_then(|()| self.finished(id))
    }

    async fn guard(&self, view: &LeaseView, work: impl Future<Output = ()>) -> Result<()> {
        if self.world.plan.planted != Some(Planted::TrustsItsToken) {
            return view.guard(work).await;
        }
        tokio::select! {
            biased;
            () = view.cancel_token().cancelled() => view.ensure_held(),
            () = work => Ok(()),
        }
    }

    async fn panicking(&self, run: impl Future<Output = Result<()>>) -> Result<()> {
        let mut run = pin!(run);
        let ran = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| run.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(ran)) => Poll::Ready(Ok(ran)),
            Err(panic) => Poll::Ready(Err(panic)),
        });
        match ran.await {
            Ok(ran) => ran,
            Err(panic) if panic.is::<OnPurpose>() => {
                self.world.count("works that panicked");
                Ok(())
            }
            Err(panic) => resume_unwind(panic),
        }
    }

    /// An acquisition that must be over in its time, whatever becomes of it.
    async fn bounded<T>(&self, wait: Wait, ttl: Duration, acquiring: impl Future<Output = Result<T>>) -> Result<T> {
        let attempt = (ttl / 6).clamp(Duration::from_millis(10), Duration::from_secs(2));
        let stalls = || self.world.lock().judge.stalls(self.net);
        let (start, before) = (Instant::now(), stalls());
        let acquired = acquiring.await;
        let took = start.elapsed();
        let limit = match wait {
            Wait::No => attempt,
            Wait::UpTo(wait) => wait.max(attempt),
            _ => Duration::MAX,
        };
        if stalls() == before && took > limit.saturating_add(Duration::from_millis(10)) {
            self.world.broken(|| format!("net {}: an acquisition took {took:?}, not {limit:?}", self.net));
        }
        match &acquired {
            Err(Error::Contended { .. }) => self.world.count("waiters told: contended"),
            Err(Error::Store { .. }) => self.world.count("waiters told: no server"),
            _ => {}
        }
        acquired
    }

    /// A lease has begun: its end is watched from here on.
    fn begin(&self, view: &LeaseView) -> Option<Id> {
        let id = self.world.begins(self.net, view.key(), view.fence())?;
        let (world, view) = (self.world.clone(), view.clone());
        tokio::spawn(async move {
            view.cancel_token().clone().cancelled_owned().await;
            let now = world.now();
            world.lock().judge.cancelled(now, id);
            let lost = view.lost().await;
            world.told(id, &lost.reason);
        });
        Some(id)
    }

    fn finished(&self, id: Option<Id>) -> Result<()> {
        if let Some(id) = id {
            self.world.finished(id);
        }
        Ok(())
    }

    async fn work(&self, under: Under, dice: &mut Rng) {
        let (id, view) = (under.id, under.view.clone());
        let inner = pin!(self.steps(under, dice));
        Watched { world: &self.world, id, view, inner }.await;
    }

    async fn steps(&self, under: Under, dice: &mut Rng) {
        let plan = &self.world.plan;
        let polite = dice.u32(0..3) > 0;
        for step in 0..dice.u32(0..12) {
            if polite && under.token.is_cancelled() {
                return;
            }
            match (dice.u32(0..16), under.id, &under.view) {
                (0, ..) => tokio::task::yield_now().await,
                (1, ..) if plan.blocks => self.world.block(plan.some(dice, 3.0)),
                (2..5, Some(id), _) => self.world.writes(id),
                (5..7, _, Some(view)) => match view.write(format!("value:{}", view.key()), [step as u8]).await {
                    Ok(()) => {}
                    Err(error) => self.world.note(|| format!("net {}: {error:?}", self.net)),
                },
                _ => sleep(plan.some(dice, 1.0)).await,
            }
        }
    }
}

impl World {
    fn begins(&self, net: usize, key: &Key, fence: u64) -> Option<Id> {
        let now = self.now();
        let id = self.lock().judge.begun(now, net, key, fence);
        self.look();
        id
    }

    fn begins_newest(&self, net: usize, key: &Key) -> Option<Id> {
        let now = self.now();
        let fence = self.lock().judge.newest(now, net, key)?;
        let id = self.begins(net, key, fence)?;
        self.lock().judge.unwatched(id);
        Some(id)
    }

    fn told(&self, id: Id, reason: &leasehold::LossReason) {
        let now = self.now();
        self.lock().judge.told(&self.plan, now, id, reason);
        self.look();
    }

    fn finished(&self, id: Id) {
        let now = self.now();
        self.lock().judge.finished(now, id);
        self.look();
    }

    fn writes(&self, id: Id) {
        let now = self.now();
        self.lock().judge.writes(now, id);
        self.look();
    }

    /// The only thread of all clients does something else for so long.
    fn block(&self, d: Duration) {
        self.count("fault: thread blocked");
        let mut cx = Context::from_waker(std::task::Waker::noop());
        // The clock moves in the first poll; what it waits for after that is none of ours.
        let _ = pin!(advance(d)).poll(&mut cx);
        self.slept();
    }

    /// Ends the run if something was broken.
    pub fn look(&self) {
        if self.lock().judge.violation.is_some() {
            self.failed.notify_one();
        }
    }
}

/// Work whose every poll is seen by the judge.
struct Watched<'a, F> {
    world: &'a World,
    id: Option<Id>,
    view: Option<LeaseView>,
    inner: Pin<&'a mut F>,
}

impl<F: Future> Future for Watched<'_, F> {
    type Output = F::Output;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some(id) = self.id else { return self.inner.as_mut().poll(cx) };
        let certain = self.view.as_ref().map(LeaseView::valid_for);
        {
            let (now, state) = (self.world.now(), &mut *self.world.lock());
            state.judge.polled(now, state.wall.at(now), &state.server, id, certain);
        }
        self.world.look();
        let out = self.inner.as_mut().poll(cx);
        let now = self.world.now();
        self.world.lock().judge.poll_ended(now, id, out.is_ready());
        out
    }
}

/// A process that is stopped now and then: nothing of it is polled.
struct Gate<'a, F> {
    world: &'a World,
    net: usize,
    inner: Pin<&'a mut F>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<F: Future> Future for Gate<'_, F> {
    type Output = F::Output;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let until = self.world.lock().wire.nets[self.net].paused;
        if until > Instant::now() {
            let mut timer = Box::pin(sleep_until(until));
            if timer.as_mut().poll(cx).is_pending() {
                self.timer = Some(timer);
                return Poll::Pending;
            }
        }
        self.inner.as_mut().poll(cx)
    }
}
