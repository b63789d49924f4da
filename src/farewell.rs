//! Releases that nobody waits for: of dropped leases, abandoned acquisitions, and releases cut short.
use crate::{
    Key,
    clock::{Moment, jittered},
    engine::Engine,
    store::{Freed, Owner},
    tenure::Settling,
};
use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::sync::Notify;

/// An owner-checked release that the watchdog sends. Making one needs no runtime and never blocks, so `Drop` can.
pub(crate) struct Farewell {
    pub(crate) key: Key,
    pub(crate) owner: Owner,
    /// How long one try may take.
    pub(crate) attempt: Duration,
    /// A renewal is in flight, and goes first.
    pub(crate) settling: Option<Settling>,
    /// By then the TTL has freed the key.
    pub(crate) until: Moment,
    /// When a claim of this owner was never answered: the moment from which it is surely refused as too late. The release
    /// is repeated then, in case the claim was carried out after the first.
    pub(crate) again_at: Option<Moment>,
    /// It counts as under way until this is dropped.
    pub(crate) parting: Parting,
}

impl Farewell {
    /// Not an `async fn`: what such a one is given is lost when its runtime ends before the first poll.
    pub(crate) fn say(self, engine: Arc<Engine>) -> impl Future<Output = ()> {
        let mut under_way = UnderWay { engine, farewell: Some(self), in_a_poll: false };
        async move {
            if let UnderWay { engine, farewell: Some(farewell), in_a_poll } = &mut under_way {
                let mut through = pin!(farewell.through(engine));
                poll_fn(|context| {
                    *in_a_poll = true;
                    let polled = through.as_mut().poll(context);
                    *in_a_poll = false;
                    polled
                })
                .await;
            }
            if let Some(said) = under_way.farewell.take() {
                drop(said.parting);
            }
        }
    }

    async fn through(&mut self, engine: &Engine) {
        if let Some(settling) = self.settling.take() {
            settling.wait().await;
        }
        let goodbye = Goodbye { engine, key: &self.key, owner: &self.owner, attempt: self.attempt };
        goodbye.say(self.until).await;
        if let Some(at) = self.again_at {
            engine.clock.sleep_until(at).await;
            goodbye.say(at.after(self.attempt * 2)).await;
        }
    }
}

/// A farewell that is being said. When its runtime ends before it is through, the next watchdog says it.
struct UnderWay {
    engine: Arc<Engine>,
    farewell: Option<Farewell>,
    in_a_poll: bool,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        // Not after a panic of the store: it would be met again and again. A runtime may end in another's panic.
        if let Some(farewell) = self.farewell.take()
            && !self.in_a_poll
        {
            self.engine.bid_farewell(farewell);
        }
    }
}

struct Goodbye<'a> {
    engine: &'a Engine,
    key: &'a Key,
    owner: &'a Owner,
    attempt: Duration,
}

impl Goodbye<'_> {
    async fn say(&self, until: Moment) {
        let mut pause = self.attempt / 8;
        loop {
            match self.engine.bounded(self.attempt, self.engine.store.release(self.key, self.owner)).await {
                Ok(Freed::Released | Freed::Gone) => return,
                Err(error) if !error.may_pass() || self.engine.clock.now() >= until => {
                    tracing::warn!(key = %self.key, %error, "a lease could not be released; its TTL will free the key");
                    return;
                }
                Err(_) => {
                    pause = (pause * 2).min(self.attempt);
                    tokio::time::sleep(jittered(pause)).await;
                }
            }
        }
    }
}

/// What a shutdown has to wait for: releases under way, and acquisitions that may leave something to release.
#[derive(Clone, Default)]
pub(crate) struct Partings(Arc<Count>);

#[derive(Default)]
struct Count {
    under_way: AtomicUsize,
    none: Notify,
}

impl Partings {
    pub(crate) fn begin(&self) -> Parting {
        self.0.under_way.fetch_add(1, Ordering::AcqRel);
        Parting(self.0.clone())
    }

    /// Returns when none is under way.
    pub(crate) async fn over(&self) {
        loop {
            // Registered before the look.
            let none = self.0.none.notified();
            if self.0.under_way.load(Ordering::Acquire) == 0 {
                return;
            }
            none.await;
        }
    }
}

pub(crate) struct Parting(Arc<Count>);

impl Drop for Parting {
    fn drop(&mut self) {
        if self.0.under_way.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Clock, StoreError,
        engine::Keeper,
        host::Host,
        store::{Claim, Claimed, Holding, Identity, MemoryStore, Renewal, Renewed, Store},
    };

    fn keeper(store: impl Store, clock: Clock, me: &Identity) -> Keeper {
        Keeper(Engine::new(Arc::new(store), clock, me.clone(), Host::callers(), Duration::ZERO))
    }

    /// As the watchdog takes it.
    fn farewell(keeper: &Keeper, me: &Identity) -> Farewell {
        keeper.bid_farewell(Farewell {
            key: "k".into(),
            owner: Owner::draw(me).unwrap(),
            attempt: Duration::from_secs(1),
            settling: None,
            until: keeper.clock().now().after(Duration::from_secs(30)),
            again_at: None,
            parting: keeper.partings.begin(),
        });
        keeper.take_farewells().pop().unwrap()
    }

    /// A task may be dropped with its runtime before it was polled once.
    #[tokio::test(start_paused = true)]
    async fn a_farewell_whose_runtime_ends_before_its_first_poll_is_left_to_the_next_watchdog() {
        let (clock, me) = (Clock::tokio(), Identity::new("me").unwrap());
        let keeper = keeper(MemoryStore::with_clock(clock.clone()), clock, &me);
        let farewell = farewell(&keeper, &me);
        drop(farewell.say(keeper.0.clone()));
        assert_eq!(keeper.take_farewells().len(), 1);
    }

    /// Its release panics.
    struct Broken;

    impl Store for Broken {
        async fn claim(&self, _: &Claim) -> Result<Claimed, StoreError> {
            Err(StoreError::refused("broken"))
        }
        async fn renew(&self, _: &Renewal) -> Result<Renewed, StoreError> {
            Err(StoreError::refused("broken"))
        }
        async fn release(&self, _: &Key, _: &Owner) -> Result<Freed, StoreError> {
            panic!("broken")
        }
        async fn inspect(&self, _: &Key) -> Result<Option<Holding>, StoreError> {
            Err(StoreError::refused("broken"))
        }
        async fn force_release(&self, _: &Key) -> Result<bool, StoreError> {
            Err(StoreError::refused("broken"))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_farewell_in_which_the_store_panics_is_not_said_again() {
        let me = Identity::new("me").unwrap();
        let keeper = keeper(Broken, Clock::tokio(), &me);
        let farewell = farewell(&keeper, &me);
        assert!(tokio::spawn(farewell.say(keeper.0.clone())).await.unwrap_err().is_panic());
        assert!(keeper.take_farewells().is_empty());
    }
}
