//! Load and faults at once: nobody overlaps, nobody notices, no key is ever without its TTL.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Error, Leases, Wait};
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use support::{server::Server, until, within};
use tokio::task::JoinSet;

/// Finds two who are inside at the same time, and fences that do not grow.
#[derive(Clone, Default)]
struct Inside(Arc<Mutex<Who>>);

#[derive(Default)]
struct Who {
    /// Who is inside, and until when it may be.
    holder: Option<(u64, Instant)>,
    last: u64,
}

impl Inside {
    fn enter(&self, fence: u64, until: Instant) {
        let mut who = self.0.lock().unwrap();
        if let Some((other, their_end)) = who.holder {
            assert!(Instant::now() >= their_end, "{fence} came in while {other} was certain for longer");
        }
        assert!(fence > who.last, "{fence} after {}", who.last);
        *who = Who { holder: Some((fence, until)), last: fence };
    }

    /// What was certain a moment ago is certain for longer now.
    fn stay(&self, fence: u64, until: Instant) {
        let mut who = self.0.lock().unwrap();
        match who.holder {
            Some((inside, _)) if inside == fence => who.holder = Some((fence, until)),
            other => assert!(Instant::now() >= until, "{other:?} came in while {fence} was certain for longer"),
        }
    }

    fn leave(&self, fence: u64) {
        let mut who = self.0.lock().unwrap();
        if who.holder.is_some_and(|(inside, _)| inside == fence) {
            who.holder = None;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_shortest_ttl_is_held_or_lost_cleanly_and_never_overlaps() {
    let server = Server::start();
    let ttl = Duration::from_millis(100);
    let inside = Inside::default();
    let (held, lost) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let end = Instant::now() + Duration::from_secs(4);
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let leases = Leases::builder().ttl(ttl).connect(&server.url()).await.unwrap();
        let (inside, held, lost) = (inside.clone(), held.clone(), lost.clone());
        tasks.spawn(async move {
            while Instant::now() < end {
                let work = leases.lease("k").wait(Wait::Forever).run(async |lease| {
                    inside.enter(lease.fence(), Instant::now() + lease.valid_for());
                    // Several TTLs, so that it lives by its renewals.
                    for _ in 0..50 {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        inside.stay(lease.fence(), Instant::now() + lease.valid_for());
                    }
                    inside.leave(lease.fence());
                });
                match work.await {
                    Ok(()) => _ = held.fetch_add(1, SeqCst),
                    Err(Error::Lost(gone)) => {
                        inside.leave(gone.fence);
                        lost.fetch_add(1, SeqCst);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        });
    }
    while let Some(done) = within("all end", tasks.join_next()).await {
        done.unwrap();
    }
    assert!(held.load(SeqCst) + lost.load(SeqCst) >= 3, "{held:?} held, {lost:?} lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_tasks_of_one_process_are_never_inside_at_once_and_each_is_an_owner_of_its_own() {
    let server = Server::start();
    let leases = Leases::builder().ttl(Duration::from_secs(10)).connect(&server.url()).await.unwrap();
    let inside = Inside::default();
    let mut tasks = JoinSet::new();
    for _ in 0..100 {
        let (leases, inside) = (leases.clone(), inside.clone());
        tasks.spawn(async move {
            for _ in 0..3 {
                let lease = leases.lease("k").wait(Wait::Forever).acquire().await.unwrap();
                inside.enter(lease.fence(), Instant::now() + lease.valid_for());
                tokio::task::yield_now().await;
                inside.leave(lease.fence());
                lease.release().await.unwrap();
            }
        });
    }
    while let Some(done) = within("all had their turns", tasks.join_next()).await {
        done.unwrap();
    }
    until("only a fence", || server.keys() == ["{k}:fence"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flushed_script_cache_and_killed_connections_under_load_are_noticed_by_nobody() {
    let server = Server::start();
    let ttl = Duration::from_secs(3);
    let leases = Leases::builder().ttl(ttl).wait(Wait::Forever).connect(&server.url()).await.unwrap();
    let mut kept = Vec::new();
    for n in 0..20 {
        kept.push(leases.lease(format!("kept{n}")).acquire().await.unwrap());
    }
    let over = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    let done = Arc::new(AtomicU64::new(0));
    for task in 0..10 {
        let (leases, over, done) = (leases.clone(), over.clone(), done.clone());
        tasks.spawn(async move {
            while !over.load(SeqCst) {
                let key = format!("k{}", task % 4);
                if task % 2 == 0 {
                    let out = leases.with_lease(&key, async |_| tokio::task::yield_now().await).await;
                    out.expect("work under a lease");
                } else {
                    // A release may stay unconfirmed while the connection is away; it is no error, and it is repeated.
                    leases.lease(&key).acquire().await.expect("a lease").release().await.expect("a release");
                }
                done.fetch_add(1, SeqCst);
            }
        });
    }
    let start = Instant::now();
    let mut round = 0_u64;
    while start.elapsed() < ttl + ttl / 2 {
        tokio::time::sleep(Duration::from_millis(4)).await;
        server.cmd(&["SCRIPT", "FLUSH"]);
        round += 1;
        if round.is_multiple_of(100) {
            server.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
        }
    }
    over.store(true, SeqCst);
    while let Some(end) = within("all end", tasks.join_next()).await {
        end.unwrap();
    }
    let done = done.load(SeqCst);
    assert!(done > 50, "{done} turns in {round} rounds");
    for lease in kept {
        assert!(lease.is_held() && !lease.cancel_token().is_cancelled(), "{lease:?}");
        lease.release().await.unwrap();
    }
    until("only fences", || server.keys().iter().all(|key| key.ends_with(":fence"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contenders_never_touch_a_key_that_is_held() {
    let server = Server::start();
    let ttl = Duration::from_secs(3);
    let holder = Leases::builder().ttl(ttl).connect(&server.url()).await.unwrap();
    let others = Leases::builder().ttl(Duration::from_secs(60)).connect(&server.url()).await.unwrap();
    // One that is never renewed: whatever its TTL does but fall, somebody else did.
    let mut fixed = holder.lock("k");
    fixed.lock_for(ttl).await.unwrap();
    let value = server.get("k").unwrap();
    let mut tasks = JoinSet::new();
    for n in 0..50 {
        let others = others.clone();
        tasks.spawn(async move {
            let wait = if n % 2 == 0 { Wait::No } else { Wait::UpTo(Duration::from_millis(50)) };
            loop {
                // The first to get in says so by ending.
                if others.lease("k").wait(wait).acquire().await.is_ok() {
                    return;
                }
                tokio::task::yield_now().await;
            }
        });
    }
    let (mut last, mut samples) = (server.pttl("k"), 0);
    loop {
        let (left, seen) = (server.pttl("k"), server.get("k"));
        if left < 0 || seen.as_deref() != Some(value.as_str()) {
            // It changed hands: not before it had run out.
            assert!(last < 500, "gone when {last} ms were left; now {left} {seen:?}");
            break;
        }
        assert!(left <= last, "{left} ms after {last}");
        (last, samples) = (left, samples + 1);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(samples > 100, "{samples}");
    within("somebody gets in", tasks.join_next()).await.unwrap().unwrap();
    tasks.shutdown().await;
}

/// In the child: everything at once, for as long as it is left alive.
async fn hustle(url: &str) {
    let leases = Leases::builder().ttl(Duration::from_millis(400)).connect(url).await.unwrap();
    let mut tasks = JoinSet::new();
    for task in 0..16_u64 {
        let leases = leases.clone();
        tasks.spawn(async move {
            for round in 0_u64.. {
                let key = format!("k{}", (task + round) % 5);
                let request = leases.lease(&key).wait(Duration::from_millis(200));
                match (task + round) % 5 {
                    0 => drop(request.acquire().await),
                    1 => _ = request.run(async |_| tokio::time::sleep(Duration::from_millis(3)).await).await,
                    2 => _ = tokio::time::timeout(Duration::from_millis(1), request.acquire()).await,
                    3 => _ = leases.force_release(&key).await,
                    _ => _ = leases.lock(&key).try_lock().await,
                }
            }
        });
    }
    support::child::says("hustles");
    tasks.join_next().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_key_is_ever_without_a_ttl_whatever_is_done_and_whoever_is_killed() {
    use support::child::{self, Child};
    if let Some(url) = child::told() {
        return hustle(&url).await;
    }
    let server = Server::start();
    let mut side = server.connect();
    // One step, so that no key comes or goes between two looks at it.
    let look = "local bad, n = {}, 0 for _, k in ipairs(redis.call('KEYS', '*')) do n = n + 1 \
                if redis.call('PTTL', k) < 0 then bad[#bad + 1] = k end end return {n, bad}";
    let mut looks = 0;
    for _ in 0..8 {
        let name = "no_key_is_ever_without_a_ttl_whatever_is_done_and_whoever_is_killed";
        let mut child = Child::of(name, &server.url());
        child.hears("hustles").await;
        let killed_at = Instant::now() + Duration::from_millis(150);
        while Instant::now() < killed_at {
            let mut seen = side.cmd(&["EVAL", look, "0"]).list();
            let bad = seen.pop().unwrap().list();
            assert!(bad.is_empty(), "no TTL: {bad:?}");
            looks += i32::from(seen[0].int() > 0);
        }
        child.kill();
        assert_eq!(side.cmd(&["EVAL", look, "0"]).list()[1].clone().list().len(), 0);
    }
    assert!(looks > 100, "{looks}");
    // What the killed ones held is free when their TTLs are over.
    until("only fences", || server.keys().iter().all(|key| key.ends_with(":fence"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_handle_used_again_after_its_ttl_is_as_good_as_new() {
    let server = Server::start();
    let ttl = Duration::from_millis(200);
    let leases = Leases::builder().ttl(ttl).connect(&server.url()).await.unwrap();
    let mut lock = leases.lock("k");
    let mut last = 0;
    for round in 0..12 {
        let fence = within("a lock", lock.lock()).await.unwrap();
        assert!(fence > last);
        last = fence;
        assert!(matches!(lock.unlock().await, Ok(()) | Err(Error::Lost(_))));
        tokio::time::sleep(ttl * (round % 3) / 2).await;
    }
    until("the key is free", || server.get("k").is_none()).await;
}
