//! The server is silent, unreachable or dead: the work stops in time all the same, and nobody hangs.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Error, LeaseState, Leases, LossReason, Result};
use std::time::{Duration, Instant};
use support::{
    proxy::{Flow, Proxy},
    server::Server,
    until, within,
    work::Polls,
};
use tokio::task::JoinHandle;

const TTL: Duration = Duration::from_secs(2);
const GRACE: Duration = Duration::from_millis(500);
/// The longest that is allowed; a release takes up to two of them.
const ATTEMPT: Duration = Duration::from_millis(660);

/// Work under a lease of 2 s, and what it saw.
struct Held {
    work: JoinHandle<Result<()>>,
    polls: Polls,
    /// When `with_lease` returned.
    returned: JoinHandle<Instant>,
}

async fn held(url: &str) -> Held {
    let leases = Leases::builder().ttl(TTL).grace(GRACE).attempt(ATTEMPT).connect(url).await.unwrap();
    let polls = Polls::default();
    let (back, returned) = tokio::sync::oneshot::channel();
    let work = tokio::spawn({
        let polls = polls.clone();
        async move {
            let out = leases.lease("k").run(|lease| polls.stubborn(lease)).await;
            back.send(Instant::now()).unwrap();
            out
        }
    });
    polls.begun().await;
    Held { work, polls, returned: tokio::spawn(async { returned.await.unwrap() }) }
}

impl Held {
    /// Waits until it has been renewed: a lease in its later life.
    async fn renewed(&self) {
        let seen = self.polls.seen();
        let first = seen[0].at + seen[0].left;
        until("a renewal", || {
            let last = self.polls.last();
            last.at + last.left > first + Duration::from_millis(100)
        })
        .await;
    }

    /// What must hold after an outage that has not ended yet. `from`: when it had begun for certain.
    async fn ends_in_time(self, from: Instant) {
        let error = within("`with_lease` returns during the outage", self.work).await.unwrap().unwrap_err();
        let Error::Lost(lost) = &error else { panic!("{error}") };
        assert!(matches!(lost.reason, LossReason::Deadline { .. }), "{lost}");
        // The last renewal was carried out before the outage had begun, and the key lasts one TTL from then.
        self.polls.assert_none_past(from + TTL);
        self.polls.assert_told_within(GRACE);
        assert!(self.polls.is_dropped());
        // It did not wait for a release that nobody can answer.
        let last = self.polls.last();
        let late = self.returned.await.unwrap().saturating_duration_since(last.at + last.left);
        assert!(late < 2 * ATTEMPT - Duration::from_millis(200), "returned {late:?} after the end");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_costs_the_lease_at_its_deadline_and_with_lease_returns_while_it_stands_still() {
    let server = Server::start();
    let held = held(&server.url()).await;
    held.renewed().await;
    server.stop();
    held.ends_in_time(Instant::now()).await;
    server.cont();
    let next = within("the next owner", acquire(&server.url())).await;
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn packets_that_vanish_cost_the_lease_at_its_deadline() {
    let (server, proxy) = behind_proxy();
    let held = held(&proxy.url()).await;
    held.renewed().await;
    proxy.blackhole();
    held.ends_in_time(Instant::now()).await;
    assert!(proxy.counts().open > 0, "no connection was closed to tell anybody");
    drop(server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_vanish_from_the_start_cost_the_lease_at_its_first_deadline() {
    let (_server, proxy) = behind_proxy();
    let held = held(&proxy.url()).await;
    proxy.requests(Flow::Drop);
    held.ends_in_time(Instant::now()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_replies_cost_the_lease_at_its_deadline_though_the_server_renews_it() {
    let (server, proxy) = behind_proxy();
    let held = held(&proxy.url()).await;
    held.renewed().await;
    proxy.replies(Flow::Hold);
    let from = Instant::now();
    proxy.until(|counts| counts.held > 0).await;
    let on_the_server = Duration::from_millis(server.pttl("k").unsigned_abs());
    assert!(on_the_server > held.polls.last().left + TTL / 10, "renewed, as nobody here can know");
    held.ends_in_time(from).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_costs_the_lease_at_its_deadline() {
    let mut server = Server::start();
    let held = held(&server.url()).await;
    held.renewed().await;
    server.kill();
    held.ends_in_time(Instant::now()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_silence_costs_nothing() {
    let (server, proxy) = behind_proxy();
    let ttl = Duration::from_secs(3);
    let leases = Leases::builder().ttl(ttl).connect(&proxy.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let (token, until) = (lease.cancel_token().clone(), Instant::now() + lease.valid_for());
    let mut watch = lease.watch();
    proxy.blackhole();
    within("the silence is noticed", watch.wait_for(|state| *state == LeaseState::AtRisk)).await.unwrap();
    proxy.pass();
    within("it is renewed", watch.wait_for(|state| *state == LeaseState::Held)).await.unwrap();
    // And once more in the ordinary way, on connections that work.
    support::until("another renewal", || Instant::now() + lease.valid_for() > until + ttl / 2).await;
    assert!(!token.is_cancelled());
    assert!(server.pttl("k") > 0);
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_lost_in_an_outage_stays_lost_when_the_server_would_still_renew_it() {
    let (server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(TTL).connect(&proxy.url()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    proxy.replies(Flow::Hold);
    let lost = within("the loss", lease.lost()).await;
    assert!(matches!(lost.reason, LossReason::Deadline { .. }), "{lost}");
    // The server has renewed all along and would go on to.
    assert!(server.pttl("k") > 0);
    proxy.pass();
    let next = within("the same key again", leases.lease("k").wait(support::PATIENCE).acquire()).await.unwrap();
    assert!(next.fence() > lost.fence);
    assert!(!lease.is_held() && lease.cancel_token().is_cancelled());
    assert!(matches!(lease.release().await, Err(Error::Lost(_))));
    assert!(next.is_held());
    // The new acquisition of the same key has a watchdog of its own.
    let until = Instant::now() + next.valid_for();
    support::until("a renewal", || Instant::now() + next.valid_for() > until + TTL).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_is_bounded_whether_the_server_is_silent_or_gone_and_the_same_leases_work_when_it_is_back() {
    let mut server = Server::start();
    let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    let wait = Duration::from_millis(700);

    server.stop();
    let start = Instant::now();
    let error = within("a bounded wait", leases.lease("k").wait(wait).acquire()).await.unwrap_err();
    assert!(start.elapsed() >= wait, "it gave up after {:?}", start.elapsed());
    unavailable(&error);
    let error = within("one try", leases.lease("k").try_acquire()).await.unwrap_err();
    unavailable(&error);
    unavailable(&within("a look", leases.inspect("k")).await.unwrap_err());
    server.cont();

    server.kill();
    let error = within("a bounded wait", leases.lease("k").wait(wait).acquire()).await.unwrap_err();
    unavailable(&error);
    let mut lock = leases.lock("k");
    unavailable(&within("one try", lock.try_lock()).await.unwrap_err());

    server.restart();
    let lease = within("as before", leases.lease("k").wait(support::PATIENCE).acquire()).await.unwrap();
    lease.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_server_that_restarts_is_found_again_by_the_next_call() {
    let mut server = Server::start();
    let leases = Leases::builder().ttl(TTL).connect(&server.url()).await.unwrap();
    for _ in 0..3 {
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
        server.restart();
        let lease = within("the next call", leases.lease("k").wait(support::PATIENCE).acquire()).await.unwrap();
        lease.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_during_an_outage_is_sent_when_the_server_is_back() {
    let (server, proxy) = behind_proxy();
    let leases = Leases::builder().ttl(Duration::from_secs(30)).connect(&proxy.url()).await.unwrap();
    let dropped = leases.lease("dropped").acquire().await.unwrap();
    let mut lock = leases.lock("unlocked");
    lock.lock().await.unwrap();
    proxy.reset_all();
    proxy.refuse();
    drop(dropped);
    let error = within("an unlock", lock.unlock()).await.unwrap_err();
    unavailable(&error);
    assert!(!lock.is_held());
    proxy.pass();
    until("both are released, long before their TTL", || {
        server.get("dropped").is_none() && server.get("unlocked").is_none()
    })
    .await;
}

fn behind_proxy() -> (Server, Proxy) {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    (server, proxy)
}

async fn acquire(url: &str) -> leasehold::Lease {
    let leases = Leases::connect(url).await.unwrap();
    leases.lease("k").acquire().await.unwrap()
}

#[track_caller]
fn unavailable(error: &Error) {
    let Error::Store { source, .. } = error else { panic!("{error}") };
    assert!(source.may_pass(), "{source}");
}
