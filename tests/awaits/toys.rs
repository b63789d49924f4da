//! Calls that are wrong, each in its way: what looks for faults has to find theirs.
use super::{
    alone,
    call::{Call, Cast, Ready, alone as nothing_to_settle},
    look::CALLER,
    onlookers::Others,
    play_all,
    stage::Home,
    support::{proxy::Proxy, server::Connection},
    world,
};
use leasehold::{
    Leases, Store,
    store::{Claim, Identity, Owner, redis::RedisStore},
};
use std::{
    future::pending,
    net::TcpStream,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{runtime::Handle, task::yield_now};

type Prepare = fn(Cast) -> Pin<Box<dyn Future<Output = Ready>>>;

/// Things that a call should not have kept.
static KEPT: Mutex<Vec<(Option<Leases>, Option<TcpStream>)>> = Mutex::new(Vec::new());

fn keep(leases: Option<Leases>, stream: Option<TcpStream>) {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push((leases, stream));
}

/// Gives back what it knows it has, and nothing that was asked for and not answered.
struct GivesBack(Arc<RedisStore>, String, Owner, Handle);

impl Drop for GivesBack {
    fn drop(&mut self) {
        let (store, key, owner) = (self.0.clone(), self.1.clone(), self.2.clone());
        self.3.spawn(async move { store.release(&key.into(), &owner).await });
    }
}

async fn claims(cast: Cast, label: &str) -> Ready {
    let store = Arc::new(RedisStore::connect(&cast.url).await.unwrap());
    let owner = Owner::draw(&Identity::new(label).unwrap()).unwrap();
    let (key, handle) = (cast.key.clone(), Handle::current());
    let call = nothing_to_settle(async move {
        let mut claim = Claim::new(key.as_str().into(), owner.clone(), Duration::from_secs(30));
        claim.line = true;
        _ = store.claim(&claim).await;
        let _gives_back = GivesBack(store, key, owner, handle);
        yield_now().await;
    });
    // The connections end with the store, and that with what gives back.
    let settle = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        Ok(())
    };
    Ready { settle: Box::new(|_, _| Box::pin(settle)), ..call }
}

fn neighbour(proxy: &Proxy) -> String {
    format!("{}-neighbour", proxy.address().port())
}

/// What it does, who else is there, and by what it is found.
fn toys() -> Vec<(Others, Prepare, &'static str)> {
    vec![
        (Others::Nobody, |cast| Box::pin(claims(cast, CALLER)), "left behind: [\"the key itself"),
        (Others::Hold, |cast| Box::pin(claims(cast, CALLER)), "left behind: [\"a place in the line"),
        (Others::Nobody, |cast| Box::pin(claims(cast, "thief")), "who came after was not served"),
        (
            Others::Hold,
            |cast| {
                Box::pin(async move {
                    let (others, key) = (cast.others, cast.key);
                    nothing_to_settle(async move {
                        _ = others.force_release(&key).await;
                        yield_now().await;
                    })
                })
            },
            "the holder lost its lease",
        ),
        (
            Others::Nobody,
            |cast| {
                Box::pin(async move {
                    let (others, key) = (cast.others, neighbour(&cast.proxy));
                    nothing_to_settle(async move {
                        _ = others.force_release(&key).await;
                        yield_now().await;
                    })
                })
            },
            "another lease of the caller's was lost",
        ),
        (
            Others::Wait,
            |cast| {
                Box::pin(async move {
                    let lease = cast.leases.lease(&cast.key).acquire().await.unwrap();
                    let (line, waiters) = (format!("{{{}}}:queue", cast.key), format!("{{{}}}:waiters", cast.key));
                    let port = cast.look.port();
                    nothing_to_settle(async move {
                        // Somebody is put before who waits, who never comes.
                        let mut side = Connection::over(TcpStream::connect(("127.0.0.1", port)).unwrap()).unwrap();
                        let nobody = "caller/0123456789abcdef/00000000-0000-4000-8000-000000000000";
                        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
                        side.cmd(&["HSET", &waiters, nobody, &format!("{} 60000", now + 50_000)]);
                        side.cmd(&["ZADD", &line, "1", nobody]);
                        yield_now().await;
                        drop(lease);
                    })
                })
            },
            "left behind",
        ),
        (
            Others::Nobody,
            |_| {
                Box::pin(async {
                    nothing_to_settle(async {
                        tokio::spawn(pending::<()>());
                        yield_now().await;
                    })
                })
            },
            "tasks are alive",
        ),
        (
            Others::Nobody,
            |cast| {
                Box::pin(async move {
                    let address = cast.proxy.address();
                    nothing_to_settle(async move {
                        keep(None, Some(TcpStream::connect(address).unwrap()));
                        yield_now().await;
                    })
                })
            },
            "connections are open",
        ),
        (
            Others::Nobody,
            |cast| {
                Box::pin(async move {
                    let leases = cast.leases;
                    nothing_to_settle(async move {
                        keep(Some(leases), None);
                        yield_now().await;
                    })
                })
            },
            "with the leases gone",
        ),
    ]
}

#[test]
fn calls_that_leave_something_or_harm_somebody_are_found() {
    let _alone = alone();
    let toys = toys();
    let row = |(others, prepare, _): &(Others, Prepare, &'static str)| {
        (Call { of: "toy", when: "", others: *others, awaits: 0, at_home: false, prepare: *prepare }, Home::Thread)
    };
    let calls: Vec<_> = toys.iter().map(row).collect();
    world(Duration::from_secs(2), |world| {
        let seen = play_all(&calls, world);
        KEPT.lock().unwrap_or_else(PoisonError::into_inner).clear();
        for (n, ((_, _, by), seen)) in toys.iter().zip(seen).enumerate() {
            assert!(seen.found.iter().any(|found| found.contains(by)), "number {n} by {by:?}: {:#?}", seen.found);
        }
    });
}
