//! Every public async call, in every situation that makes it wait for something else.
use super::{
    call::{ATTEMPT, Call, Cast, Ready, SHORT, Step, alone, call, so},
    handle::Handle,
    look::wait,
    onlookers::Others,
    support::{
        PATIENCE,
        proxy::{CLAIM, RENEW},
    },
    working::{NEVER, Work, guard, run, under, with_lease},
};
use futures_util::FutureExt;
use leasehold::{
    Error, Lease, LeaseView, Leases, Wait,
    store::{
        quorum::QuorumStore,
        redis::{RedisStore, fred::types::config::Config},
    },
};
use std::time::Duration;

const WHOLE: Duration = Duration::from_secs(30);

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
        // It is carried out when its connection is long given up, and after the release, which another carried.
        row!("LeaseRequest::acquire", "the claim travels long", Nobody, 1, |cast| {
            cast.proxy.hold_request(CLAIM);
            alone(cast.request().attempt(6 * ATTEMPT).acquire())
        }),
        row!("Leases::connect", "", Nobody, 1, |cast| alone(async move { Leases::connect(&cast.url).await })),
        row!("LeasesBuilder::connect", "", Nobody, 1, |cast| {
            alone(async move { Leases::builder().connect(&cast.url).await })
        }),
        row!("LeasesBuilder::connect_with", "", Nobody, 1, |cast| {
            alone(async move { Leases::builder().connect_with(Config::from_url(&cast.url).unwrap()).await })
        }),
        row!("RedisStore::connect", "", Nobody, 1, |cast| alone(async move { RedisStore::connect(&cast.url).await })),
        row!("RedisStore::connect_with", "", Nobody, 1, |cast| {
            alone(async move { RedisStore::connect_with(Config::from_url(&cast.url).unwrap()).await })
        }),
        row!("RedisStore::replicas", "", Nobody, 2, |cast| {
            alone(async move {
                let store = RedisStore::connect(&cast.url).await?;
                store.replicas(1, Duration::from_millis(1)).await
            })
        }),
        row!("Leases::quorum", "", Nobody, 1, |cast| alone(async move { Leases::quorum(&cast.quorum).await })),
        row!("LeasesBuilder::connect_quorum", "", Nobody, 1, |cast| {
            alone(async move { Leases::builder().connect_quorum(&cast.quorum).await })
        }),
        row!("LeasesBuilder::connect_quorum", "one of them is not there", Nobody, 1, |cast| {
            let [one, two, _] = cast.quorum;
            let nobody = "redis://127.0.0.1:1".to_owned();
            alone(async move { Leases::builder().connect_quorum([one, two, nobody]).await })
        }),
        row!("QuorumStore::connect", "", Nobody, 1, |cast| {
            alone(async move { QuorumStore::connect(&cast.quorum).await })
        }),
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
        row!("Lock::lock", "the key is free", Nobody, 1, |cast| Handle::new(&cast)
            .calls(&cast, (0, 1), |lock| lock.lock().map(drop).boxed())),
        row!("Lock::lock", "the key is another's", Hold, 2, |cast| Handle::new(&cast)
            .calls(&cast, (0, 1), |lock| lock.lock().map(drop).boxed())),
        row!("Lock::lock", "it is locked", Wait, 0, |cast| Handle::locked(&cast, 1).await.calls(
            &cast,
            (1, 2),
            |lock| lock.lock().map(drop).boxed()
        )),
        row!("Lock::lock_for", "the key is handed over", HandOver, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), |lock| lock.lock_for(WHOLE).map(drop).boxed())
        }),
        row!("Lock::try_lock", "the key is free", Nobody, 1, |cast| Handle::new(&cast)
            .calls(&cast, (0, 1), |lock| lock.try_lock().map(drop).boxed())),
        row!("Lock::try_lock", "the key is another's", Hold, 1, |cast| Handle::new(&cast).calls(
            &cast,
            (0, 1),
            |lock| lock.try_lock().map(drop).boxed()
        )),
        row!("Lock::try_lock_for", "the key is handed over", HandOver, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), |lock| lock.try_lock_for(PATIENCE).map(drop).boxed())
        }),
        row!("Lock::try_lock_for", "the wait ends first", Hold, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), |lock| lock.try_lock_for(SHORT).map(drop).boxed())
        }),
        row!("Lock::try_lock_with", "the key is free", Nobody, 1, |cast| {
            Handle::new(&cast).calls(&cast, (0, 1), |lock| lock.try_lock_with(PATIENCE, WHOLE).map(drop).boxed())
        }),
        row!("Lock::unlock", "somebody waits", Wait, 1, |cast| Handle::locked(&cast, 1).await.calls(
            &cast,
            (1, 0),
            |lock| lock.unlock().map(drop).boxed()
        )),
        row!("Lock::unlock", "it was locked twice", Wait, 0, |cast| Handle::locked(&cast, 2).await.calls(
            &cast,
            (2, 1),
            |lock| lock.unlock().map(drop).boxed()
        )),
        row!("Lock::is_locked", "", Hold, 1, |cast| Handle::new(&cast)
            .calls(&cast, (0, 0), |lock| lock.is_locked().map(drop).boxed())),
        row!("Lock::remaining_ttl", "", Hold, 1, |cast| Handle::new(&cast)
            .calls(&cast, (0, 0), |lock| lock.remaining_ttl().map(drop).boxed())),
        row!("Lock::force_unlock", "it is locked", Wait, 1, |cast| {
            let mut lock = cast.leases.lock(&cast.key);
            lock.lock().await.unwrap();
            alone(async move { lock.force_unlock().await })
        }),
    ]
}
