//! Slots that are moved from one primary to another.
use crate::{
    SECOND, acquires, leases,
    support::{
        PATIENCE,
        cluster::{Cluster, asked, slot},
        until, within,
    },
};
use leasehold::{Released, Wait, store::redis::fred::util::redis_keyslot};
use std::{collections::BTreeSet, time::Instant};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_goes_on_where_its_slot_was_moved_to() {
    let cluster = Cluster::start();
    let key = cluster.key_on(0, "k");
    let leases = leases(&cluster.url(), SECOND).await;
    let lease = leases.lease(key.as_str()).acquire().await.unwrap();
    let waiter = tokio::spawn(leases.lease(key.as_str()).wait(PATIENCE).acquire());
    until("it stands in line", || cluster.nodes[0].cmd(&["ZCARD", &format!("{{{key}}}:queue")]).int() == 1).await;

    cluster.begin_move(slot(&key), 0, 2);
    cluster.end_move(slot(&key), 0, 2);
    let valid_until = lease.valid_until();
    until("it is renewed", || lease.valid_until() > valid_until + SECOND).await;
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
    let leases = leases(&cluster.url(), SECOND).await;
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
    until("it is renewed", || lease.valid_until() > valid_until + SECOND).await;
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
        let all = || held.iter().zip(&before).all(|(lease, before)| lease.valid_until() > *before + SECOND);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_leases_live_through_a_resharding() {
    let cluster = Cluster::start();
    let leases = leases(&cluster.url(), 3 * SECOND).await;
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
