//! Connecting is one await to its caller and a conversation below, or several: dropped after each reply of them.
use super::{
    alone,
    call::Calling,
    cut::{Cut, Driven, End},
    support::{PATIENCE, proxy::Proxy, until},
    world,
};
use leasehold::{
    Leases,
    store::{quorum::QuorumStore, redis::RedisStore},
};
use std::time::Duration;
use tokio::runtime::{Builder, Handle};

/// To these URLs.
type Connect = fn(Vec<String>) -> Calling;

/// More replies than any of them needs.
const REPLIES: usize = 64;

/// Longer than a server may take to be connected to.
const GIVEN_UP: Duration = Duration::from_secs(4);

fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// A way to each server, which holds every reply.
fn ways(ports: &[u16]) -> Vec<Proxy> {
    let way = |port: &u16| {
        let proxy = Proxy::to(*port);
        (0..REPLIES).for_each(|_| proxy.hold_reply(""));
        proxy
    };
    ports.iter().map(way).collect()
}

fn held(ways: &[Proxy]) -> usize {
    ways.iter().map(|proxy| proxy.counts().held).sum()
}

fn arrived(ways: &[Proxy]) -> usize {
    ways.iter().map(|proxy| proxy.counts().replies).sum()
}

/// So many rounds of replies arrive, and then the servers are silent. There are no more rounds once `all` have arrived.
async fn replies(ways: &[Proxy], many: usize, all: usize) {
    for _ in 0..many {
        if arrived(ways) >= all {
            return;
        }
        until("a reply", || held(ways) > 0).await;
        let before = arrived(ways);
        ways.iter().for_each(Proxy::deliver);
        until("the reply there", || arrived(ways) > before).await;
    }
    if arrived(ways) < all {
        until("the next reply", || held(ways) > 0).await;
    }
}

/// What it comes to when so many rounds of replies arrive from the first of these servers, and nothing from the others.
async fn after(many: usize, all: usize, ports: &[u16], silent: usize, connect: Connect) -> (End, usize) {
    let ways = ways(ports);
    let answering = &ways[..ways.len() - silent];
    let mut driven = Driven::new(connect(ways.iter().map(Proxy::url).collect()));
    tokio::select! {
        () = driven.to(Cut { polls: usize::MAX, woken: false }, PATIENCE) => {}
        () = replies(answering, many, all) => {}
    }
    let (end, arrived) = (driven.end(), arrived(answering));
    gone(&ways).await;
    (end, arrived)
}

/// The same, but nobody drops it.
async fn to_its_end(ports: &[u16], silent: usize, connect: Connect) {
    let ways = ways(ports);
    let mut driven = Driven::new(connect(ways.iter().map(Proxy::url).collect()));
    ways[..ways.len() - silent].iter().for_each(Proxy::pass);
    driven.to(Cut { polls: usize::MAX, woken: false }, GIVEN_UP).await;
    assert_eq!(driven.end(), End::Done);
    gone(&ways).await;
}

/// Nothing is left.
async fn gone(ways: &[Proxy]) {
    until("no task is left", || alive_tasks() == 0).await;
    ways.iter().for_each(Proxy::pass);
    until("every connection is closed", || {
        // A reply that comes now may still be one to be held.
        ways.iter().for_each(Proxy::deliver);
        ways.iter().all(|proxy| proxy.counts().open == 0)
    })
    .await;
}

#[test]
fn connecting_may_be_dropped_after_every_reply_of_the_server() {
    let _alone = alone();
    let connects: [(&str, Connect); 3] = [
        ("Leases::connect", |urls| Box::pin(async move { drop(Leases::connect(&urls[0]).await) })),
        ("LeasesBuilder::connect", |urls| {
            Box::pin(async move { drop(Leases::builder().ttl(Duration::from_secs(9)).connect(&urls[0]).await) })
        }),
        ("RedisStore::connect", |urls| Box::pin(async move { drop(RedisStore::connect(&urls[0]).await) })),
    ];
    world(PATIENCE, |world| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        for (name, connect) in connects {
            let mut replies = 0;
            while runtime.block_on(after(replies, usize::MAX, &[world.port], 0, connect)).0 == End::Dropped {
                replies += 1;
            }
            crate::support::aloud::say(format_args!(
                "covered: {name}, dropped after each of {replies} rounds of replies"
            ));
            assert!(replies >= 3, "{name} is through after {replies}");
        }
    });
}

#[test]
fn connecting_to_a_quorum_may_be_dropped_after_every_reply_of_its_servers_though_some_of_them_are_silent() {
    let _alone = alone();
    let connects: [(&str, Connect); 3] = [
        ("Leases::quorum", |urls| Box::pin(async move { drop(Leases::quorum(urls).await) })),
        ("LeasesBuilder::connect_quorum", |urls| {
            Box::pin(async move { drop(Leases::builder().connect_quorum(urls).await) })
        }),
        ("QuorumStore::connect", |urls| Box::pin(async move { drop(QuorumStore::connect(urls).await) })),
    ];
    world(PATIENCE, |world| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let [two, three] = world.beside;
        let ports = [world.port, two, three];
        for (name, connect) in connects {
            let mut rounds = 0;
            // What each server says before the quorum is there.
            let each = loop {
                let (end, arrived) = runtime.block_on(after(rounds, usize::MAX, &ports, 0, connect));
                if end != End::Dropped {
                    assert_eq!(end, End::Done);
                    break arrived / ports.len();
                }
                rounds += 1;
            };
            assert!(rounds >= 3, "{name} is through after {rounds}");
            // It waits for each of its servers for a while, so that it is not through without the silent ones.
            let mut beside_silent = 0;
            for silent in [1, 2] {
                let all = each * (ports.len() - silent);
                for rounds in 0.. {
                    let (end, arrived) = runtime.block_on(after(rounds, all, &ports, silent, connect));
                    beside_silent += usize::from(end == End::Dropped);
                    if arrived >= all || end != End::Dropped {
                        break;
                    }
                }
                runtime.block_on(to_its_end(&ports, silent, connect));
            }
            assert!(beside_silent >= 4, "{name}, {beside_silent} times beside silent servers");
            crate::support::aloud::say(format_args!(
                "covered: {name}, dropped after each of {rounds} rounds of replies, and of {beside_silent} beside silent \
                 servers"
            ));
        }
    });
}
