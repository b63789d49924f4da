//! What everything in one run shares: true time, the server, the wire, the judge.
use crate::{
    judge::Judge,
    plan::Plan,
    server::{Server, WallClock, micros},
    wire::Wire,
};
use fastrand::Rng;
use leasehold::Clock;
use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

pub struct World {
    pub plan: Plan,
    pub clock: Clock,
    origin: Instant,
    /// For how long the machine of all clients was suspended, in microseconds.
    asleep: AtomicU64,
    ending: AtomicBool,
    pub failed: Notify,
    /// The wire has something earlier to do.
    pub posted: Notify,
    state: Mutex<State>,
}

pub struct State {
    pub dice: Rng,
    pub server: Server,
    pub wall: WallClock,
    pub wire: Wire,
    pub judge: Judge,
}

impl World {
    pub fn new(plan: Plan, dice: Rng, logging: bool) -> Arc<World> {
        let state = State {
            dice,
            server: Server::new(plan.planted),
            wall: WallClock::new(plan.ppm),
            wire: Wire::new(),
            judge: Judge::new(logging),
        };
        Arc::new(World {
            clock: Clock::tokio(),
            origin: Instant::now(),
            asleep: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            failed: Notify::new(),
            posted: Notify::new(),
            state: Mutex::new(state),
            plan,
        })
    }

    /// True time, in microseconds.
    pub fn now(&self) -> u64 {
        micros(self.origin.elapsed()) + self.asleep.load(Relaxed)
    }

    /// What the server's clock shows.
    pub fn wall(&self) -> u64 {
        let now = self.now();
        self.lock().wall.at(now)
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn count(&self, what: &'static str) {
        self.lock().judge.count(what);
    }

    /// One thing happened: for the log of the run.
    pub fn note(&self, what: impl FnOnce() -> String) {
        let now = self.now();
        self.lock().judge.note(now, what);
    }

    /// A promise was broken.
    pub fn broken(&self, what: impl FnOnce() -> String) {
        let now = self.now();
        self.lock().judge.broken(now, what());
        self.failed.notify_one();
    }

    pub fn is_ending(&self) -> bool {
        self.ending.load(Relaxed)
    }

    /// Nothing goes wrong any more, and nothing new is begun.
    pub fn end(&self) {
        self.ending.store(true, Relaxed);
        self.lock().wire.heal();
        self.posted.notify_one();
    }

    /// The machine of all clients sleeps: time goes on, and no timer notices.
    pub fn suspend(&self, d: Duration) {
        self.asleep.fetch_add(micros(d), Relaxed);
        self.clock.suspend(d);
        self.slept();
    }

    /// All clients stood still until now.
    pub fn slept(&self) {
        let now = self.now();
        let judge = &mut self.lock().judge;
        judge.stood_still = now;
        judge.disturbances += 1;
        judge.stalls += 1;
    }
}
