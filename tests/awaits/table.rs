//! Every public async call, in every situation that makes it wait for something else.
use super::{
    cut::End,
    look::{CALLER, Look, wait},
    onlookers::Others,
    support::{
        PATIENCE,
        proxy::{Proxy, RENEW},
    },
};
use futures_util::FutureExt;
use leasehold::{Error, Lease, LeaseRequest, LeaseView, Leases, Lock, Wait, store::redis::RedisStore};
use std::{
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{sync::Mutex, task::yield_now};

pub type Calling = Pin<Box<dyn Future<Output = ()> + Send>>;
pub type Step = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// What a call is made with.
#[derive(Clone)]
pub struct Cast {
    /// Those of the caller.
    pub leases: Leases,
    pub url: String,
    pub key: String,
    /// Somebody else's.
    pub others: Leases,
    pub look: Rc<Look>,
    pub proxy: Rc<Proxy>,
}

/// A call that is about to be made.
pub struct Ready {
    pub call: Calling,
    /// Once the call is over and the server answers: what it has to have left behind as it was, and giving back what the
    /// caller still has by right.
    pub settle: Box<dyn FnOnce(End, usize) -> Step>,
}

pub struct Call {
    /// As the source names it.
    pub of: &'static str,
    pub when: &'static str,
    pub others: Others,
    /// So often at least it is polled before it is done.
    pub awaits: usize,
    /// Also tried with the watchdog on the caller's own runtime.
    pub at_home: bool,
    pub prepare: fn(Cast) -> Pin<Box<dyn Future<Output = Ready>>>,
}

/// How long one exchange may take: a claim without an answer is released again after four of these.
pub const ATTEMPT: Duration = Duration::from_millis(150);

/// A short wait, that ends without the key.
const SHORT: Duration = Duration::from_millis(300);

impl Cast {
    fn request(&self) -> LeaseRequest {
        self.leases.lease(&self.key).wait(PATIENCE)
    }

    async fn lease(&self) -> Lease {
        self.request().acquire().await.unwrap()
    }

    /// A `Leases` of the caller's for one call alone.
    async fn leases_of_its_own(&self) -> Leases {
        let builder = Leases::builder().label(CALLER).attempt(ATTEMPT).grace(Duration::from_millis(50));
        builder.connect(&self.url).await.unwrap()
    }
}

fn call<T: 'static>(future: impl Future<Output = T> + Send + 'static) -> Calling {
    // Nothing is kept beside the future: what is dropped is the call and nothing else.
    Box::pin(future.map(drop))
}

/// A call that leaves nothing that would have to be settled.
pub fn alone<T: 'static>(future: impl Future<Output = T> + Send + 'static) -> Ready {
    Ready { call: call(future), settle: Box::new(|_, _| Box::pin(async { Ok(()) })) }
}

fn so(so: bool, else_: &str) -> Result<(), String> {
    if so { Ok(()) } else { Err(else_.to_owned()) }
}

/// Work with awaits in it, which panics at one of them.
#[derive(Clone, Default)]
struct Work {
    begun: Arc<AtomicBool>,
    gone: Arc<AtomicBool>,
}

struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

const NEVER: usize = usize::MAX;

impl Work {
    fn does(&self, panics_at: usize) -> impl Future<Output = ()> + Send + use<> {
        self.begun.store(true, SeqCst);
        let gone = Gone(self.gone.clone());
        async move {
            let _gone = gone;
            for step in 0..3 {
                assert!(step != panics_at, "the work panics at its await number {step}");
                if step == 1 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                } else {
                    yield_now().await;
                }
            }
        }
    }

    /// A call that does it.
    fn within<T: 'static>(self, future: impl Future<Output = T> + Send + 'static) -> Ready {
        let settle = move |_, _| so(self.begun.load(SeqCst) == self.gone.load(SeqCst), "the work is still there");
        Ready { call: call(future), settle: Box::new(|end, polls| Box::pin(async move { settle(end, polls) })) }
    }
}

fn run<const PANICS_AT: usize>(cast: &Cast) -> Ready {
    let work = Work::default();
    let does = work.clone();
    work.within(cast.request().run(move |_lease| does.does(PANICS_AT)))
}

fn with_lease<const PANICS_AT: usize>(cast: &Cast) -> Ready {
    let work = Work::default();
    let does = work.clone();
    work.within(cast.leases.with_lease(cast.key.clone(), move |_cancel| does.does(PANICS_AT)))
}

/// A lease that is still held when a call with a look at it was dropped.
fn under<T: 'static>(lease: Lease, future: impl Future<Output = T> + Send + 'static) -> Ready {
    let settle = async move {
        so(lease.is_held(), "the lease that it looked at is held no more")?;
        lease.release().await.map(drop).map_err(|error| format!("the lease that it looked at: {error}"))
    };
    Ready { call: call(future), settle: Box::new(|_, _| Box::pin(settle)) }
}

fn guard<const PANICS_AT: usize>(lease: Lease) -> Ready {
    let work = Work::default();
    let guard = lease.guard(work.does(PANICS_AT));
    let gone = work.gone.clone();
    let Ready { call, settle } = under(lease, guard);
    let settle = |end, polls| -> Step {
        let settled = settle(end, polls);
        Box::pin(async move {
            so(gone.load(SeqCst), "the work is still there")?;
            settled.await
        })
    };
    Ready { call, settle: Box::new(settle) }
}

/// One `lock` more or less on a handle that survives the call.
struct Handle(Arc<Mutex<Lock>>);

impl Handle {
    fn new(cast: &Cast) -> Handle {
        Handle(Arc::new(Mutex::new(cast.leases.lock(&cast.key))))
    }

    /// Afterwards the handle is as it was, or as the call says, and as good as new.
    fn calls<T: Send + 'static>(
        self,
        cast: &Cast,
        (before, after): (u32, u32),
        does: impl AsyncFnOnceOnLock<T>,
    ) -> Ready {
        let calls = self.0.clone();
        let future = async move {
            let mut lock = calls.try_lock_owned().unwrap();
            does.on(&mut lock).await
        };
        let key = cast.key.clone();
        let others = cast.others.clone();
        let settle = move |end, _polls| -> Step {
            Box::pin(async move {
                let mut lock = self.0.try_lock().map_err(|_| "the handle is still borrowed".to_owned())?;
                let count = lock.hold_count();
                let right = match end {
                    // A release that was begun goes on.
                    End::Dropped => count == before || after < before && count == after,
                    _ => count == after || count == 0,
                };
                so(right, &format!("{count} holds where {before} were and {after} were to be"))?;
                while lock.hold_count() > 0 {
                    lock.unlock().await.map_err(|error| format!("the handle cannot unlock: {error}"))?;
                }
                // Unless it is another's all the time, or the next one's by now.
                if before == 0
                    && others
                        .inspect(&key)
                        .await
                        .map_err(|error| error.to_string())?
                        .is_none_or(|h| h.label.as_deref() == Some(CALLER))
                {
                    let again = lock.try_lock_for(PATIENCE).await.map_err(|error| format!("locked again: {error}"))?;
                    so(again.is_some(), "the handle cannot be locked again")?;
                    lock.unlock().await.map_err(|error| format!("unlocked again: {error}"))?;
                }
                Ok(())
            })
        };
        Ready { call: call(future), settle: Box::new(settle) }
    }
}

/// An async closure whose future is `Send` cannot be asked for by its bound, so each is a function here.
pub trait AsyncFnOnceOnLock<T>: Send + 'static {
    fn on(self, lock: &mut Lock) -> impl Future<Output = leasehold::Result<T>> + Send;
}

macro_rules! on_lock {
    ($name:ident, $out:ty, |$lock:ident| $call:expr) => {
        struct $name;
        impl AsyncFnOnceOnLock<$out> for $name {
            fn on(self, $lock: &mut Lock) -> impl Future<Output = leasehold::Result<$out>> + Send {
                $call
            }
        }
    };
}

const WHOLE: Duration = Duration::from_secs(30);
on_lock!(DoLock, u64, |lock| lock.lock());
on_lock!(DoLockFor, u64, |lock| lock.lock_for(WHOLE));
on_lock!(DoTryLock, Option<u64>, |lock| lock.try_lock());
on_lock!(DoTryLockFor, Option<u64>, |lock| lock.try_lock_for(PATIENCE));
on_lock!(DoTryLockForShort, Option<u64>, |lock| lock.try_lock_for(SHORT));
on_lock!(DoTryLockWith, Option<u64>, |lock| lock.try_lock_with(PATIENCE, WHOLE));
on_lock!(DoUnlock, (), |lock| lock.unlock());
on_lock!(DoIsLocked, bool, |lock| lock.is_locked());
on_lock!(DoRemaining, Option<Duration>, |lock| lock.remaining_ttl());

async fn locked(cast: &Cast, times: u32) -> Handle {
    let handle = Handle::new(cast);
    let mut lock = handle.0.try_lock().unwrap();
    for _ in 0..times {
        lock.lock().await.unwrap();
    }
    drop(lock);
    handle
}

/// A lease that was handed over, so that it is renewed at once, and the answer to that does not come.
async fn renewing(cast: &Cast) -> Lease {
    let before = cast.others.lease(&cast.key).acquire().await.unwrap();
    let waiter = tokio::spawn(cast.request().attempt(ATTEMPT).acquire());
    wait(PATIENCE, || so(cast.look.waiting(&cast.key) == 1, "no place")).await.unwrap();
    // One that is held holds up those behind it.
    if cast.proxy.counts().held == 0 {
        cast.proxy.hold_reply(RENEW);
    }
    before.release().await.unwrap();
    let lease = waiter.await.unwrap().unwrap();
    wait(PATIENCE, || so(cast.look.pttl(&cast.key) > 3000, "not renewed")).await.unwrap();
    lease
}

/// A shutdown has to release what is held though its handle is kept, and to turn away who waits.
async fn shutdown(cast: Cast) -> Ready {
    let leases = cast.leases_of_its_own().await;
    let lease = leases.lease(&cast.key).acquire().await.unwrap();
    let waiter = tokio::spawn(leases.lease(&cast.key).wait(Wait::Forever).acquire());
    wait(PATIENCE, || so(cast.look.waiting(&cast.key) == 1, "no place")).await.unwrap();
    let closing = leases.clone();
    let settle = move |_, polls| -> Step {
        Box::pin(async move {
            if polls > 0 {
                let turned_away = waiter.await.map_err(|end| end.to_string())?;
                so(matches!(turned_away, Err(Error::Shutdown)), "who waited was not told of the shutdown")?;
                cast.look.nothing_left(&cast.key, PATIENCE).await?;
                so(leases.lease(&cast.key).acquire().await.is_err(), "it still acquires")?;
            } else {
                waiter.abort();
                _ = waiter.await;
            }
            drop((lease, leases));
            Ok(())
        })
    };
    Ready { call: call(async move { closing.shutdown().await }), settle: Box::new(settle) }
}

/// `lost` ends here with a bound of the lease's own.
async fn lost(cast: Cast) -> Ready {
    let lease = cast.request().max_hold(SHORT).grace(Duration::from_millis(30)).acquire().await.unwrap();
    let view: LeaseView = lease.view();
    let settle = async move {
        let lost = lease.lost().await;
        so(lost.reason == leasehold::LossReason::MaxHold, &format!("{lost}"))
    };
    Ready { call: call(async move { view.lost().await }), settle: Box::new(|_, _| Box::pin(settle)) }
}

const AT_HOME: &[(&str, &str)] = &[
    ("LeaseRequest::acquire", "the key is free"),
    ("LeaseRequest::acquire", "the key is another's"),
    ("LeaseRequest::acquire", "the key is handed over"),
    ("LeaseRequest::run", "the key is handed over"),
    ("Lease::release", "somebody waits"),
    ("Lock::lock", "the key is another's"),
];

macro_rules! row {
    ($of:literal, $when:literal, $others:ident, $awaits:literal, |$cast:ident| $ready:expr) => {
        Call {
            of: $of,
            when: $when,
            others: Others::$others,
            awaits: $awaits,
            at_home: AT_HOME.contains(&($of, $when)),
            prepare: |$cast| Box::pin(async move { $ready }),
        }
    };
}

pub fn table() -> Vec<Call> {
    vec![
        row!("Leases::connect", "", Nobody, 1, |cast| alone(async move { Leases::connect(&cast.url).await })),
        row!("LeasesBuilder::connect", "", Nobody, 1, |cast| {
            alone(async move { Leases::builder().connect(&cast.url).await })
        }),
        row!("RedisStore::connect", "", Nobody, 1, |cast| alone(async move { RedisStore::connect(&cast.url).await })),
        row!("LeaseRequest::acquire", "the key is free", Nobody, 1, |cast| alone(cast.request().acquire())),
        row!("LeaseRequest::acquire", "the key is another's", Hold, 2, |cast| alone(cast.request().acquire())),
        row!("LeaseRequest::acquire", "the wait ends first", Hold, 1, |cast| {
            alone(cast.request().wait(SHORT).acquire())
        }),
        row!("LeaseRequest::acquire", "the key is handed over", HandOver, 1, |cast| alone(cast.request().acquire())),
        row!("LeaseRequest::try_acquire", "the key is free", Nobody, 1, |cast| alone(cast.request().try_acquire())),
        row!("LeaseRequest::try_acquire", "the key is another's", Hold, 1, |cast| alone(cast.request().try_acquire())),
        row!("LeaseRequest::run", "the key is free", Nobody, 4, |cast| run::<NEVER>(&cast)),
        row!("LeaseRequest::run", "the key is handed over", HandOver, 1, |cast| run::<NEVER>(&cast)),
        row!("LeaseRequest::run", "the work panics at once", Nobody, 1, |cast| run::<0>(&cast)),
        row!("LeaseRequest::run", "the work panics at its second await", HandOver, 2, |cast| run::<1>(&cast)),
        row!("LeaseRequest::try_run", "the work panics at its last await", Nobody, 3, |cast| {
            let work = Work::default();
            let does = work.clone();
            work.within(cast.request().try_run(async move |_lease| {
                does.does(2).await;
                Ok::<_, Error>(())
            }))
        }),
        row!("Leases::with_lease", "the key is free", Nobody, 4, |cast| with_lease::<NEVER>(&cast)),
        row!("Leases::with_lease", "the key is another's", Hold, 2, |cast| with_lease::<NEVER>(&cast)),
        row!("Leases::with_lease", "the work panics at its second await", Nobody, 2, |cast| with_lease::<1>(&cast)),
        row!("Leases::try_with_lease", "the key is handed over", HandOver, 1, |cast| {
            let work = Work::default();
            let does = work.clone();
            work.within(cast.leases.try_with_lease(cast.key, async move |_cancel| {
                does.does(NEVER).await;
                Ok::<_, Error>(())
            }))
        }),
        row!("Leases::inspect", "the key is another's", Hold, 1, |cast| {
            alone(async move { cast.leases.inspect(&cast.key).await })
        }),
        row!("Leases::force_release", "the key is free", Nobody, 1, |cast| {
            alone(async move { cast.leases.force_release(&cast.key).await })
        }),
        row!("Leases::force_release", "a lease of its own", Wait, 1, |cast| {
            let lease = cast.lease().await;
            let ready = alone(async move { cast.leases.force_release(&cast.key).await });
            let settle = async move {
                drop(lease);
                Ok(())
            };
            Ready { settle: Box::new(|_, _| Box::pin(settle)), ..ready }
        }),
        row!("Leases::write", "", Nobody, 1, |cast| {
            alone(async move { cast.leases.write(format!("value-{}", cast.key), "value", 1).await })
        }),
        row!("Leases::read", "", Nobody, 1, |cast| {
            alone(async move { cast.leases.read(format!("value-{}", cast.key)).await })
        }),
        row!("Leases::shutdown", "a lease is held and one waited for", Nobody, 1, |cast| shutdown(cast).await),
        row!("LeaseView::lost", "", Wait, 1, |cast| lost(cast).await),
        row!("LeaseView::write", "", Wait, 1, |cast| {
            let lease = cast.lease().await;
            let view = lease.view();
            under(lease, async move { view.write(format!("value-{}", cast.key), "value").await })
        }),
        row!("LeaseView::guard", "", Wait, 3, |cast| guard::<NEVER>(cast.lease().await)),
        row!("LeaseView::guard", "the work panics at its second await", Wait, 1, |cast| guard::<1>(cast.lease().await)),
        row!("Lease::release", "somebody waits", Wait, 1, |cast| alone(cast.lease().await.release())),
        row!("Lease::release", "a renewal is not answered", Wait, 2, |cast| alone(renewing(&cast).await.release())),
        row!("Lock::lock", "the key is free", Nobody, 1, |cast| Handle::new(&cast).calls(&cast, (0, 1), DoLock)),
        row!("Lock::lock", "the key is another's", Hold, 2, |cast| Handle::new(&cast).calls(&cast, (0, 1), DoLock)),
        row!("Lock::lock", "it is locked", Wait, 0, |cast| locked(&cast, 1).await.calls(&cast, (1, 2), DoLock)),
        row!("Lock::lock_for", "the key is handed over", HandOver, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), DoLockFor)
        }),
        row!("Lock::try_lock", "the key is free", Nobody, 1, |cast| Handle::new(&cast).calls(&cast, (0, 1), DoTryLock)),
        row!("Lock::try_lock", "the key is another's", Hold, 1, |cast| Handle::new(&cast).calls(
            &cast,
            (0, 1),
            DoTryLock
        )),
        row!("Lock::try_lock_for", "the key is handed over", HandOver, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), DoTryLockFor)
        }),
        row!("Lock::try_lock_for", "the wait ends first", Hold, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), DoTryLockForShort)
        }),
        row!("Lock::try_lock_with", "the key is free", Nobody, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), DoTryLockWith)
        }),
        row!("Lock::unlock", "somebody waits", Wait, 1, |cast| locked(&cast, 1).await.calls(&cast, (1, 0), DoUnlock)),
        row!("Lock::unlock", "it was locked twice", Wait, 0, |cast| locked(&cast, 2).await.calls(
            &cast,
            (2, 1),
            DoUnlock
        )),
        row!("Lock::is_locked", "", Hold, 1, |cast| Handle::new(&cast).calls(&cast, (0, 0), DoIsLocked)),
        row!("Lock::remaining_ttl", "", Hold, 1, |cast| Handle::new(&cast).calls(&cast, (0, 0), DoRemaining)),
        row!("Lock::force_unlock", "it is locked", Wait, 1, |cast| {
            let mut lock = cast.leases.lock(&cast.key);
            lock.lock().await.unwrap();
            alone(async move { lock.force_unlock().await })
        }),
    ]
}
