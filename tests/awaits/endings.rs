//! Runtimes that end with a call on them, and with the watchdog.
use super::{
    alone,
    call::ATTEMPT,
    look::{CALLER, Look, wait},
    stage::World,
    support::{PATIENCE, proxy::Proxy},
    world,
};
use leasehold::{Leases, store::redis::RedisStore};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};
use tokio::runtime::{Builder, Runtime};

/// Can end between any two polls of its tasks: it looks at the main future after each.
fn runtime() -> Runtime {
    Builder::new_current_thread().event_interval(1).enable_all().build().unwrap()
}

/// On whichever runtime acquires; its connections are elsewhere.
fn leases(world: &World, port: u16) -> Leases {
    let url = format!("redis://127.0.0.1:{port}");
    let store = world.runtime.block_on(RedisStore::connect(&url)).unwrap();
    Leases::builder().label(CALLER).attempt(ATTEMPT).build(store).unwrap()
}

/// The next runtime that acquires anything gives back what the last one left under `key`.
fn the_next_gives_back(leases: &Leases, look: &Look, key: &str) {
    runtime().block_on(async {
        leases.lease("another").acquire().await.unwrap().release().await.unwrap();
        let left = look.nothing_left(key, PATIENCE).await;
        assert!(left.is_ok(), "{key}: {left:?}");
    });
}

#[test]
fn what_a_runtime_that_ends_had_still_to_release_is_released_by_the_next() {
    let _alone = alone();
    world(PATIENCE, |world| {
        let (leases, look) = (leases(world, world.port), Look::at(world.port));
        for (yields, panics) in (0..24).map(|n| (n / 2, n % 2 == 1)) {
            let key = format!("dropped-{yields}-{panics}");
            let ended = catch_unwind(AssertUnwindSafe(|| {
                runtime().block_on(async {
                    drop(leases.lease(&key).acquire().await.unwrap());
                    for _ in 0..yields {
                        tokio::task::yield_now().await;
                    }
                    assert!(!panics, "the runtime ends in a panic");
                });
            }));
            assert_eq!(ended.is_err(), panics);
            the_next_gives_back(&leases, &look, &key);
        }
    });
}

#[test]
fn a_release_that_the_end_of_its_runtime_cut_short_is_sent_again_by_the_next() {
    let _alone = alone();
    world(PATIENCE, |world| {
        let proxy = Proxy::to(world.port);
        let (leases, look) = (leases(world, proxy.address().port()), Look::at(world.port));
        runtime().block_on(async {
            let lease = leases.lease("cut-short").acquire().await.unwrap();
            proxy.blackhole();
            drop(lease);
            proxy.until(|counts| counts.held > 0).await;
        });
        // It never arrived.
        proxy.reset_all();
        proxy.pass();
        assert_eq!(look.traces("cut-short").len(), 1);
        the_next_gives_back(&leases, &look, "cut-short");
    });
}

#[test]
fn an_acquisition_whose_runtime_ends_loses_its_place_in_the_line_and_what_it_asked_for() {
    let _alone = alone();
    world(PATIENCE, |world| {
        let (leases, look) = (leases(world, world.port), Look::at(world.port));
        for yields in 0..6 {
            let key = format!("free-{yields}");
            runtime().block_on(async {
                tokio::spawn(leases.lease(&key).acquire());
                for _ in 0..yields {
                    tokio::task::yield_now().await;
                }
            });
            the_next_gives_back(&leases, &look, &key);

            let key = format!("held-{yields}");
            let others = world.runtime.block_on(world.others.lease(&key).acquire()).unwrap();
            runtime().block_on(async {
                tokio::spawn(leases.lease(&key).wait(PATIENCE).acquire());
                wait(PATIENCE, || if look.waiting(&key) == 1 { Ok(()) } else { Err("no place".into()) }).await.unwrap();
                for _ in 0..yields {
                    tokio::task::yield_now().await;
                }
            });
            the_next_gives_back(&leases, &look, &key);
            assert!(others.is_held());
            world.runtime.block_on(others.release()).unwrap();
        }
    });
}

#[test]
fn a_runtime_with_threads_that_is_shut_down_with_calls_on_it_leaves_nothing_of_them() {
    let _alone = alone();
    world(PATIENCE, |world| {
        let url = format!("redis://127.0.0.1:{}", world.port);
        let look = Look::at(world.port);
        let builder = Leases::builder().label(CALLER).attempt(ATTEMPT);
        let leases = world.runtime.block_on(builder.connect(&url)).unwrap();
        for round in 0..20 {
            let held = world.runtime.block_on(world.others.lease(format!("held-{round}")).acquire()).unwrap();
            let threads = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            for call in 0..4 {
                threads.spawn(leases.lease(format!("held-{round}")).wait(PATIENCE).acquire());
                let key = format!("free-{round}-{call}");
                threads.spawn(leases.with_lease(key, async |_cancel| tokio::time::sleep(PATIENCE).await));
            }
            std::thread::sleep(Duration::from_micros(100 * round));
            threads.shutdown_background();
            world.runtime.block_on(async {
                for call in 0..4 {
                    look.nothing_left(&format!("free-{round}-{call}"), PATIENCE).await.unwrap();
                }
                look.nothing_left(&format!("held-{round}"), PATIENCE).await.unwrap();
                held.release().await.unwrap();
            });
        }
    });
}
