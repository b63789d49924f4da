//! Connecting is one await to its caller and a conversation below: dropped after each reply of it.
use super::{
    alone,
    call::Calling,
    cut::{Cut, Driven, End},
    support::{PATIENCE, proxy::Proxy, until},
    world,
};
use leasehold::{Leases, store::redis::RedisStore};
use std::time::Duration;
use tokio::runtime::{Builder, Handle};

/// To a URL.
type Connect = fn(String) -> Calling;

/// More replies than any of them needs.
const REPLIES: usize = 64;

fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// So many replies arrive, and then the server is silent.
async fn replies(proxy: &Proxy, many: usize) {
    for _ in 0..many {
        let seen = proxy.until(|counts| counts.held > 0).await;
        proxy.deliver();
        proxy.until(|counts| counts.replies > seen.replies).await;
    }
    proxy.until(|counts| counts.held > 0).await;
}

/// What it comes to when so many rounds of replies arrive.
async fn after(many: usize, port: u16, connect: Connect) -> End {
    let proxy = Proxy::to(port);
    for _ in 0..REPLIES {
        proxy.hold_reply("");
    }
    let mut driven = Driven::new(connect(proxy.url()));
    tokio::select! {
        () = driven.to(Cut { polls: usize::MAX, woken: false }, PATIENCE) => {}
        () = replies(&proxy, many) => {}
    }
    let end = driven.end();
    until("no task is left", || alive_tasks() == 0).await;
    proxy.pass();
    until("every connection is closed", || {
        // A reply that comes now may still be one to be held.
        proxy.deliver();
        proxy.counts().open == 0
    })
    .await;
    end
}

#[test]
fn connecting_may_be_dropped_after_every_reply_of_the_server() {
    let _alone = alone();
    let connects: [(&str, Connect); 3] = [
        ("Leases::connect", |url| Box::pin(async move { drop(Leases::connect(&url).await) })),
        ("LeasesBuilder::connect", |url| {
            Box::pin(async move { drop(Leases::builder().ttl(Duration::from_secs(9)).connect(&url).await) })
        }),
        ("RedisStore::connect", |url| Box::pin(async move { drop(RedisStore::connect(&url).await) })),
    ];
    world(PATIENCE, |world| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        for (name, connect) in connects {
            let mut replies = 0;
            while runtime.block_on(after(replies, world.port, connect)) == End::Dropped {
                replies += 1;
            }
            crate::support::aloud::say(format_args!(
                "covered: {name}, dropped after each of {replies} rounds of replies"
            ));
            assert!(replies >= 3, "{name} is through after {replies}");
        }
    });
}
