//! The process is stopped past its lease and goes on: not one more step of its work, and nothing of its successor's is
//! touched.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#![cfg(unix)]
mod support;
use leasehold::{Error, Leases};
use std::{
    future::{Future, poll_fn},
    pin::pin,
    time::Duration,
};
use support::{
    child::{self, Child},
    proxy::{CLAIM, Proxy},
    server::Server,
    until, within,
};

const TTL: Duration = Duration::from_secs(1);

/// Nanoseconds on a clock that all processes share.
fn clock() -> u128 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap()).as_nanos()
}

/// In the child: work that says when each of its polls began.
async fn told_work() {
    let mut pulse = pin!(async {
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    poll_fn(|cx| {
        child::says(format_args!("poll {}", clock()));
        pulse.as_mut().poll(cx)
    })
    .await
}

/// Stops the child for longer than its lease, lets `next` have the key, and sees that the child does nothing more.
async fn stopped_and_succeeded(child: &mut Child, server: &Server) {
    child.hears("poll").await;
    child.stop();
    let stopped = clock();
    let leases = Leases::builder().ttl(2 * TTL).connect(&server.url()).await.unwrap();
    let next = within("the successor", leases.lease("k").wait(support::PATIENCE).acquire()).await.unwrap();
    let value = server.get("k").unwrap();
    child.resume();
    let fence: u64 = child
        .hears_past("lost", |event| {
            let begun: u128 = event.strip_prefix("poll ").map_or(0, |at| at.parse().unwrap());
            assert!(begun <= stopped, "polled {} ns after the stop", begun - stopped);
        })
        .await
        .parse()
        .unwrap();
    assert!(fence < next.fence());
    // Whatever it sent on its way out is answered by now.
    child.succeeds().await;
    assert_eq!(server.get("k").as_deref(), Some(value.as_str()), "its release freed somebody else's key");
    assert!(next.is_held());
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_was_stopped_past_its_lease_does_not_poll_its_work_once_more() {
    if let Some(url) = child::told() {
        let leases = Leases::builder().ttl(TTL).connect(&url).await.unwrap();
        let error = leases.with_lease("k", |_| told_work()).await.unwrap_err();
        child::says(format_args!("lost {}", error.lost().unwrap().fence));
        leases.shutdown().await;
        return;
    }
    let server = Server::start();
    let name = "a_process_that_was_stopped_past_its_lease_does_not_poll_its_work_once_more";
    stopped_and_succeeded(&mut Child::of(name, &server.url()), &server).await;
}

#[tokio::test(flavor = "current_thread")]
async fn a_stopped_process_of_one_thread_does_not_poll_its_work_once_more_and_its_unlock_says_lost() {
    if let Some(url) = child::told() {
        let leases = Leases::builder().ttl(TTL).connect(&url).await.unwrap();
        let mut lock = leases.lock("k");
        lock.lock().await.unwrap();
        let fence = lock.fence().unwrap();
        let error = lock.view().unwrap().guard(told_work()).await.unwrap_err();
        assert_eq!(error.lost().unwrap().fence, fence);
        assert!(!lock.is_held() && lock.fence().is_none());
        assert!(matches!(lock.unlock().await, Err(Error::Lost(_))));
        child::says(format_args!("lost {fence}"));
        leases.shutdown().await;
        return;
    }
    let server = Server::start();
    let name = "a_stopped_process_of_one_thread_does_not_poll_its_work_once_more_and_its_unlock_says_lost";
    stopped_and_succeeded(&mut Child::of(name, &server.url()), &server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_was_stopped_while_its_claim_was_answered_does_not_believe_a_lease_that_is_over() {
    if let Some(url) = child::told() {
        // Long enough for the test to stop it before it gives up its claim, however busy the machine is.
        let leases = Leases::builder().ttl(3 * TTL).attempt(TTL).connect(&url).await.unwrap();
        child::says("connected");
        match leases.lease("k").try_acquire().await {
            Ok(Some(lease)) => child::says(format_args!("got a lease that is certain for {:?}", lease.valid_for())),
            Ok(None) => child::says("got nothing"),
            Err(error) => child::says(format_args!("got nothing: {error}")),
        }
        let lease = leases.lease("k").wait(support::PATIENCE).acquire().await.unwrap();
        child::says(format_args!("fence {}", lease.fence()));
        lease.release().await.unwrap();
        leases.shutdown().await;
        return;
    }
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    proxy.hold_reply(CLAIM);
    let name = "a_process_that_was_stopped_while_its_claim_was_answered_does_not_believe_a_lease_that_is_over";
    let mut child = Child::of(name, &proxy.url());
    child.hears("connected").await;
    proxy.until(|counts| counts.held == 1).await;
    child.stop();
    assert!(server.get("k").is_some(), "the claim was carried out");
    proxy.deliver();
    until("the claimed lease runs out", || server.get("k").is_none()).await;
    let leases = Leases::builder().ttl(2 * TTL).connect(&server.url()).await.unwrap();
    let next = leases.lease("k").acquire().await.unwrap();
    let value = server.get("k").unwrap();
    child.resume();
    let got = child.hears("got").await;
    assert!(got.starts_with("nothing"), "it was handed out: {got}");
    assert_eq!(server.get("k").as_deref(), Some(value.as_str()));
    assert!(next.is_held());
    let fence = next.fence();
    next.release().await.unwrap();
    assert!(child.hears("fence").await.parse::<u64>().unwrap() > fence);
    child.succeeds().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_holder_costs_the_others_its_ttl_and_no_more() {
    if let Some(url) = child::told() {
        let leases = Leases::builder().ttl(TTL).connect(&url).await.unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        child::says(format_args!("fence {}", lease.fence()));
        return std::future::pending().await;
    }
    let server = Server::start();
    let mut child = Child::of("a_killed_holder_costs_the_others_its_ttl_and_no_more", &server.url());
    let fence: u64 = child.hears("fence").await.parse().unwrap();
    let leases = Leases::connect(&server.url()).await.unwrap();
    let waiter = tokio::spawn(leases.lease("k").wait(support::PATIENCE).acquire());
    child.kill();
    let left = server.pttl("k");
    assert!(left <= i64::try_from(TTL.as_millis()).unwrap());
    let next = within("the waiter", waiter).await.unwrap().unwrap();
    assert!(next.fence() > fence);
    next.release().await.unwrap();
}
