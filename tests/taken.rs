//! The key is not ours any more: the loss is known at the next renewal, and what is another's is left alone.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Error, Lease, Leases, LossReason, StoreError};
use std::time::Duration;
use support::{server::Server, until, within};

const TTL: Duration = Duration::from_secs(2);

async fn held(server: &Server) -> (Leases, Lease) {
    let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    (leases, lease)
}

/// What happened to the key is known after one renewal at most, nothing is sent for the lost lease any more, and the next
/// owner's fence is larger.
async fn lost(server: &Server, happens: impl FnOnce(), reason: LossReason) -> (Leases, Lease) {
    let (leases, lease) = held(server).await;
    let token = lease.cancel_token().clone();
    let work = {
        let lease = lease.view();
        tokio::spawn(async move { lease.guard(std::future::pending::<()>()).await })
    };
    let before = server.calls("evalsha");
    happens();
    let loss = within("the loss", lease.lost()).await;
    assert_eq!(loss.reason, reason);
    let error = within("the work is aborted", work).await.unwrap().unwrap_err();
    assert_eq!(error.lost(), Some(&loss));
    assert!(token.is_cancelled() && !lease.is_held() && lease.valid_for().is_zero());
    // One of the two may have been under way as it happened.
    let renewals = server.calls("evalsha") - before;
    assert!(renewals <= 2, "it took {renewals} renewals to learn of it");
    (leases, lease)
}

/// The lost lease is over for the server too: neither its handle nor its end says anything more.
async fn silent(server: &Server, lease: Lease) {
    let before = server.calls("evalsha");
    let error = lease.release().await.unwrap_err();
    assert!(error.lost().is_some(), "{error}");
    tokio::time::sleep(TTL / 2).await;
    assert_eq!(server.calls("evalsha"), before);
}

async fn next_is_larger(leases: &Leases, fence: u64) {
    let next = leases.lease("k").wait(support::PATIENCE).acquire().await.unwrap();
    assert!(next.fence() > fence);
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_key_is_a_lost_lease() {
    let server = Server::start();
    let (leases, lease) = lost(&server, || _ = server.cmd(&["DEL", "k"]), LossReason::Expired).await;
    let fence = lease.fence();
    silent(&server, lease).await;
    next_is_larger(&leases, fence).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_another_program_took_is_lost_and_left_to_it() {
    let server = Server::start();
    let take = || _ = server.cmd(&["SET", "k", "theirs", "PX", "60000"]);
    let (leases, lease) = lost(&server, take, LossReason::Taken).await;
    let fence = lease.fence();
    silent(&server, lease).await;
    assert_eq!(server.get("k").as_deref(), Some("theirs"));
    assert!(server.pttl("k") > 50_000, "its TTL was not touched");
    assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
    server.cmd(&["DEL", "k"]);
    next_is_larger(&leases, fence).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_was_set_to_our_value_under_another_fence_is_lost() {
    let server = Server::start();
    let forge = || {
        let ours = server.get("k").unwrap();
        let (owner, fence) = ours.split_once('#').unwrap();
        let fence = fence.parse::<u64>().unwrap() + 1;
        server.cmd(&["SET", "k", &format!("{owner}#{fence}"), "PX", "1500"]);
    };
    let (_leases, lease) = lost(&server, forge, LossReason::Taken).await;
    silent(&server, lease).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_of_another_type_is_lost_left_alone_and_refused_to_whoever_asks() {
    let server = Server::start();
    let replace = || {
        server.cmd(&["DEL", "k"]);
        server.cmd(&["RPUSH", "k", "a", "b"]);
    };
    let (leases, lease) = lost(&server, replace, LossReason::Taken).await;
    let fence = lease.fence();
    silent(&server, lease).await;
    assert_eq!(server.cmd(&["LRANGE", "k", "0", "-1"]).list().len(), 2);
    assert_eq!(server.pttl("k"), -1);
    let error = within("at once", leases.lease("k").acquire()).await.unwrap_err();
    assert!(matches!(&error, Error::Store { source: StoreError::Refused(_), .. }), "{error:?}");
    server.cmd(&["DEL", "k"]);
    next_is_larger(&leases, fence).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_forgot_everything_is_a_lost_lease_and_its_next_fence_is_larger() {
    let server = Server::start();
    let (leases, lease) = lost(&server, || _ = server.cmd(&["FLUSHALL"]), LossReason::Expired).await;
    let fence = lease.fence();
    silent(&server, lease).await;
    assert_eq!(server.keys(), [""; 0], "nothing was created again");
    next_is_larger(&leases, fence).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_restarts_without_its_data_is_a_lost_lease_and_its_next_fence_is_larger() {
    let mut server = Server::start();
    let (leases, lease) = held(&server).await;
    let fence = lease.fence();
    server.restart();
    let loss = within("the loss", lease.lost()).await;
    assert_eq!(loss.reason, LossReason::Expired, "it said so, long before the deadline");
    drop(lease);
    assert_eq!(server.keys(), [""; 0]);
    next_is_larger(&leases, fence).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_restarts_with_its_data_costs_nothing() {
    let mut server = Server::durable();
    let leases = Leases::builder().ttl(2 * TTL).connect(&server.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let token = lease.cancel_token().clone();
    server.restart();
    let next = lease.valid_until() + TTL / 2;
    until("a renewal", || lease.valid_until() > next).await;
    assert!(lease.is_held() && !token.is_cancelled());
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_nearly_ran_out_while_its_server_was_away_is_judged_by_what_the_server_says() {
    let mut server = Server::durable();
    let (leases, lease) = held(&server).await;
    let (fence, token) = (lease.fence(), lease.cancel_token().clone());
    server.kill();
    // The key ends on the disk of a server that isn't there.
    let loss = within("the loss", lease.lost()).await;
    assert!(matches!(loss.reason, LossReason::Deadline { .. }), "{loss}");
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.restart();
    assert!(token.is_cancelled() && !lease.is_held());
    next_is_larger(&leases, fence).await;
    assert!(!lease.is_held(), "no connection brings it back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_lease_is_ended_by_force_is_told_long_before_its_next_renewal() {
    let server = Server::start();
    let leases = Leases::builder().ttl(50 * TTL).connect(&server.url()).await.unwrap();
    let operator = Leases::connect(&server.url()).await.unwrap();
    until("both are subscribed", || server.cmd(&["PUBSUB", "CHANNELS"]).list().len() == 2).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    assert!(operator.force_release("k").await.unwrap());
    let loss = tokio::time::timeout(5 * TTL, lease.lost()).await.expect("told");
    assert_eq!(loss.reason, LossReason::Forced);
    assert!(!operator.force_release("k").await.unwrap());
    next_is_larger(&leases, loss.fence).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unlock_says_what_became_of_the_lock_and_leaves_a_successor_alone() {
    let mut server = Server::start();
    let leases = Leases::builder().ttl(10 * TTL).attempt(TTL / 8).connect(&server.url()).await.unwrap();
    let mut lock = leases.lock("k");

    lock.lock().await.unwrap();
    server.cmd(&["DEL", "k"]);
    let error = lock.unlock().await.unwrap_err();
    assert_eq!(error.lost().map(|lost| lost.reason.clone()), Some(LossReason::Expired), "{error}");

    lock.lock().await.unwrap();
    server.cmd(&["SET", "k", "theirs", "PX", "60000"]);
    assert!(lock.unlock().await.unwrap_err().lost().is_some());
    assert_eq!(server.get("k").as_deref(), Some("theirs"));
    assert!(server.pttl("k") > 50_000);
    assert!(matches!(lock.unlock().await, Err(Error::NotHeld { .. })));

    server.cmd(&["DEL", "k"]);
    lock.lock().await.unwrap();
    server.kill();
    let error = within("an unlock of a dead server", lock.unlock()).await.unwrap_err();
    assert!(matches!(&error, Error::Store { source: StoreError::Unavailable(_), .. }), "{error:?}");
    assert!(!lock.is_held() && lock.hold_count() == 0);
}
