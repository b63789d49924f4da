//! Slots that are moved from one primary to another.
use crate::{
    SECOND, acquires, leases,
    support::{
        PATIENCE,
        cluster::{Cluster, asked, slot},
        until, within,
    },
};
use leasehold::{Leases, Released, Wait, store::redis::fred::util::redis_keyslot};
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_goes_on_where_its_slot_was_moved_to() {
    let cluster = Cluster::start();
    let key = cluster.key_on(0, "k");
    let leases = leases(&cluster.url(), 3 * SECOND).await;
    let lease = leases.lease(key.as_str()).acquire().await.unwrap();
    let waiter = tokio::spawn(leases.lease(key.as_str()).wait(PATIENCE).acquire());
    until("it stands in line", || cluster.nodes[0].cmd(&["ZCARD", &format!("{{{key}}}:queue")]).int() == 1).await;

    cluster.begin_move(slot(&key), 0, 2);
    cluster.end_move(slot(&key), 0, 2);
    let valid_until = lease.valid_until();
    until("it is renewed", || lease.valid_until() > valid_until).await;
    assert!(cluster.nodes[2].get(&key).unwrap().ends_with(&format!("#{}", lease.fence())));
    lease.release().await.unwrap();
    let next = within("the next one's turn", waiter).await.unwrap().unwrap();
    assert!(cluster.nodes[2].get(&key).unwrap().ends_with(&format!("#{}", next.fence())));
    next.release().await.unwrap();
    // A single try is sent on, too, though it has one attempt only.
    cluster.begin_move(slot(&key), 2, 1);
    cluster.end_move(slot(&key), 2, 1);
    let lease = leases.lease(key.as_str()).try_acquire().await.unwrap().unwrap();
    assert!(cluster.nodes[1].get(&key).unwrap().ends_with(&format!("#{}", lease.fence())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_is_being_moved_serves_what_is_whole_on_either_side() {
    let cluster = Cluster::start();
    let tag = cluster.key_on(0, "tag");
    let key = |name: &str| format!("{{{tag}}}:{name}");
    let leases = leases(&cluster.url(), 3 * SECOND).await;
    let there = |words: &[&str]| asked(&cluster.nodes[1], words);
    let names = ["held", "waited", "half"].map(key);
    let mut held = vec![];
    for name in &names {
        held.push(leases.lease(name.as_str()).acquire().await.unwrap());
    }
    let waiter = tokio::spawn(leases.lease(names[1].as_str()).wait(PATIENCE).acquire());
    until("it stands in line", || cluster.nodes[0].cmd(&["ZCARD", &format!("{}::queue", names[1])]).int() == 1).await;

    cluster.begin_move(slot(&tag), 0, 1);
    // What nobody has yet is made where the slot goes.
    let fresh = key("fresh");
    let lease = within("a lease", leases.lease(fresh.as_str()).acquire()).await.unwrap();
    assert!(there(&["GET", &fresh]).text().is_some() && cluster.nodes[0].keys().iter().all(|k| !k.contains(&fresh)));
    let second = tokio::spawn(leases.lease(fresh.as_str()).wait(PATIENCE).acquire());
    until("it stands in line", || there(&["EXISTS", &format!("{fresh}::queue")]).int() == 1).await;
    let start = Instant::now();
    lease.release().await.unwrap();
    let lease = within("its turn", second).await.unwrap().unwrap();
    println!("a hand-over within a slot that is being moved: {:?}", start.elapsed());
    let valid_until = lease.valid_until();
    until("it is renewed", || lease.valid_until() > valid_until).await;
    lease.release().await.unwrap();
    // And all else that is done with a key.
    let lease = leases.lease(fresh.as_str()).acquire().await.unwrap();
    assert_eq!(leases.inspect(fresh.as_str()).await.unwrap().unwrap().fence, Some(lease.fence()));
    let value = key("value");
    lease.write(value.as_str(), "written").await.unwrap();
    assert_eq!(leases.read(value.as_str()).await.unwrap().as_deref(), Some(&b"written"[..]));
    assert!(leases.write(value.as_str(), "stale", 1).await.is_err());
    assert!(leases.force_release(fresh.as_str()).await.unwrap());
    within("the loss", lease.lost()).await;
    assert_eq!(leases.inspect(fresh.as_str()).await.unwrap(), None);

    // A lease that was there before, and has no line, can be looked at and ended, though not all of its keys exist.
    let before = leases.lease(names[0].as_str()).wait(Wait::No).acquire().await.unwrap_err();
    assert!(before.is_contended(), "{before}");
    let holding = leases.inspect(names[0].as_str()).await.unwrap().unwrap();
    assert_eq!((holding.fence, holding.waiters), (Some(held[0].fence()), 0));
    assert_eq!(held.remove(0).release().await.unwrap(), Released::Released);
    assert_eq!(cluster.nodes[0].keys().iter().filter(|key| key.starts_with(&names[0])).count(), 1, "its fence");
    // Until its fence is moved, too, nobody else can have it, and is told why.
    let request = leases.lease(names[0].as_str()).wait(SECOND).acquire();
    let error = request.await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("moving this key's slot"), "{error}: {source}");
    let waits = tokio::spawn(leases.lease(names[0].as_str()).wait(PATIENCE).acquire());
    cluster.move_keys(&[&format!("{}::fence", names[0])], 0, 1);
    let next = within("its turn", waits).await.unwrap().unwrap();
    held.insert(0, next);

    // Whatever was held goes on where it is: not moved, half moved, and moved.
    let keys = |name: &str| ["", "::fence", "::queue", "::waiters"].map(|rest| format!("{name}{rest}"));
    let renewed = async |what: &str| {
        let before: Vec<_> = held.iter().map(|lease| lease.valid_until()).collect();
        let all = || held.iter().zip(&before).all(|(lease, before)| lease.valid_until() > *before);
        until(what, all).await;
    };
    renewed("they are renewed where they are").await;
    cluster.move_keys(&[&keys(&names[2])[0]], 0, 1);
    renewed("half a lease is renewed").await;
    cluster.move_keys(&keys(&names[1]).each_ref().map(String::as_str), 0, 1);
    renewed("what was moved is renewed").await;

    // The one that was moved with its line is handed over.
    let mut held = held.into_iter();
    let (first, waited, half) = (held.next().unwrap(), held.next().unwrap(), held.next().unwrap());
    waited.release().await.unwrap();
    let next = within("its turn", waiter).await.unwrap().unwrap();
    assert!(there(&["GET", &names[1]]).text().unwrap().ends_with(&format!("#{}", next.fence())));

    // Half a lease is released at once; the next can have it once it is whole.
    assert_eq!(within("the release", half.release()).await.unwrap(), Released::Released);
    assert_eq!(there(&["GET", &names[2]]).text(), None);
    let waits = tokio::spawn(leases.lease(names[2].as_str()).wait(PATIENCE).acquire());
    cluster.move_keys(&keys(&names[2]).each_ref().map(String::as_str), 0, 1);
    within("its turn", waits).await.unwrap().unwrap().release().await.unwrap();

    cluster.end_move(slot(&tag), 0, 1);
    first.release().await.unwrap();
    next.release().await.unwrap();
    acquires(&leases, &names[0]).await;
}

/// Before Redis 7, `ASK` may mean that some keys are here. Who may not ask for the version takes it so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_ask_may_mean_that_some_keys_are_here_nothing_is_acquired_before_the_move_is_over() {
    let cluster = Cluster::start();
    for node in &cluster.nodes {
        node.cmd(&["ACL", "SETUSER", "worker", "reset", "on", ">secret", "~*", "&leasehold:*", "+@all", "-info"]);
    }
    let leases = leases(&cluster.url().replace("://", "://worker:secret@"), 3 * SECOND).await;
    let tag = cluster.key_on(0, "tag");
    let [held, fresh] = ["held", "fresh"].map(|name| format!("{{{tag}}}:{name}"));
    let lease = leases.lease(held.as_str()).acquire().await.unwrap();
    cluster.begin_move(slot(&tag), 0, 1);
    let error = leases.lease(fresh.as_str()).wait(SECOND).acquire().await.unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("moving this key's slot"), "{error}: {source}");
    assert_eq!(asked(&cluster.nodes[1], &["EXISTS", &format!("{fresh}::fence")]).int(), 0);
    let valid_until = lease.valid_until();
    until("it is renewed", || lease.valid_until() > valid_until).await;
    cluster.move_keys(&[&held], 0, 1);
    let valid_until = lease.valid_until();
    until("it is renewed", || lease.valid_until() > valid_until).await;
    assert_eq!(within("the end", lease.release()).await.unwrap(), Released::Released);
    let waits = tokio::spawn(leases.lease(fresh.as_str()).wait(PATIENCE).acquire());
    cluster.end_move(slot(&tag), 0, 1);
    within("a lease", waits).await.unwrap().unwrap().release().await.unwrap();
    acquires(&leases, &held).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_leases_live_through_a_resharding() {
    let cluster = Cluster::start();
    let leases = leases(&cluster.url(), 9 * SECOND).await;
    let mut held = vec![];
    for n in 0..1000 {
        held.push(leases.lease(format!("k:{n}")).acquire().await.unwrap());
    }
    let slots: BTreeSet<u16> =
        held.iter().map(|lease| redis_keyslot(lease.key().as_str().as_bytes())).filter(|slot| *slot < 5461).collect();
    let start = Instant::now();
    tokio::task::block_in_place(|| {
        for (n, slot) in slots.iter().enumerate() {
            let to = 1 + n % 2;
            cluster.begin_move(*slot, 0, to);
            cluster.end_move(*slot, 0, to);
        }
    });
    println!("{} slots moved in {:?}", slots.len(), start.elapsed());
    assert!(cluster.nodes[0].keys().is_empty());
    let before: Vec<_> = held.iter().map(|lease| lease.valid_until()).collect();
    until("all are renewed", || held.iter().zip(&before).all(|(lease, before)| lease.valid_until() > *before)).await;
    assert!(held.iter().all(|lease| lease.is_held()));
    for lease in held {
        assert_eq!(lease.release().await.unwrap(), Released::Released);
    }
}

/// Who has a key, and under which fence it was had last.
#[derive(Default)]
struct Had {
    by: AtomicU64,
    fence: AtomicU64,
    times: AtomicU64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_slots_are_moved_to_and_fro_nobody_has_what_another_has_and_fences_grow() {
    const KEYS: usize = 6;
    let cluster = Cluster::start();
    let tags: Vec<String> = (0..3).map(|n| cluster.key_on(n, "tag")).collect();
    let keys: Vec<String> = (0..KEYS).map(|n| format!("{{{}}}:{n}", tags[n % 3])).collect();
    let had: Arc<Vec<Had>> = Arc::new((0..KEYS).map(|_| Had::default()).collect());
    let done = leasehold::CancellationToken::new();
    let mut workers: Vec<(Leases, _)> = vec![];
    for n in 0..4 * KEYS {
        let leases = if n % KEYS == 0 { leases(&cluster.url(), 3 * SECOND).await } else { workers[n - 1].0.clone() };
        let (key, had, done) = (keys[n % KEYS].clone(), had.clone(), done.clone());
        let me = n as u64 + 1;
        let shared = leases.clone();
        let task = tokio::spawn(async move {
            let had = &had[n % KEYS];
            while !done.is_cancelled() {
                let Ok(lease) = leases.lease(key.as_str()).wait(PATIENCE).acquire().await else { continue };
                assert_eq!(had.by.swap(me, SeqCst), 0, "{key} has two owners");
                let last = had.fence.swap(lease.fence(), SeqCst);
                assert!(last < lease.fence(), "{key}: fence {last} and then {}", lease.fence());
                tokio::time::sleep(Duration::from_millis(fastrand::u64(..8))).await;
                assert!(lease.is_held(), "{key} was lost");
                had.times.fetch_add(1, SeqCst);
                assert_eq!(had.by.swap(0, SeqCst), me, "{key} has two owners");
                lease.release().await.ok();
            }
        });
        workers.push((shared, task));
    }
    let mut moves = 0;
    let start = Instant::now();
    tokio::task::block_in_place(|| {
        let mut at = [0, 1, 2];
        while start.elapsed() < 5 * SECOND {
            for (n, tag) in tags.iter().enumerate() {
                let (slot, from, to) = (slot(tag), at[n], (at[n] + 1) % 3);
                cluster.begin_move(slot, from, to);
                // Key by key, and not in the order of leases.
                for _ in 0..3 {
                    let some = cluster.nodes[from].cmd(&["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "3"]).list();
                    for key in some.into_iter().filter_map(|key| key.text()) {
                        cluster.move_keys(&[&key], from, to);
                        std::thread::sleep(Duration::from_millis(fastrand::u64(..15)));
                    }
                }
                cluster.end_move(slot, from, to);
                at[n] = to;
                moves += 1;
            }
        }
    });
    done.cancel();
    for (_, task) in workers {
        within("the end", task).await.unwrap();
    }
    let times: Vec<u64> = had.iter().map(|had| had.times.load(SeqCst)).collect();
    println!("{moves} moves, and the keys were had {times:?} times");
    assert!(moves > 5 && times.iter().all(|times| *times > 20), "{moves}, {times:?}");
}
