//! A quorum of real servers.
use crate::support::{server::Server, suite, until, within};
use leasehold::{
    Error, LeaseState, Leases, LeasesBuilder, LossReason, Released, Wait,
    store::{
        Identity, Owner, contract,
        quorum::{Member, Proposal, Proposed, QuorumStore},
        redis::RedisStore,
    },
};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

fn servers(n: usize) -> Vec<Server> {
    (0..n).map(|_| Server::start()).collect()
}

fn builder() -> LeasesBuilder {
    Leases::builder().ttl(Duration::from_secs(3)).quarantine(Duration::ZERO)
}

async fn connect(servers: &[Server]) -> Leases {
    builder().connect_quorum(servers.iter().map(Server::url)).await.unwrap()
}

#[tokio::test]
async fn a_lease_is_taken_renewed_and_released_on_three_servers() {
    let servers = servers(3);
    let leases = connect(&servers).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    let fence = lease.fence();
    let on = |server: &Server| server.get("k").is_some_and(|value| value.ends_with(&format!("#{fence}")));
    assert!(servers.iter().filter(|server| on(server)).count() >= 2);
    assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
    assert_eq!(leases.inspect("k").await.unwrap().unwrap().fence, Some(fence));

    within("a renewal", async {
        let valid_for = lease.valid_for();
        while lease.valid_for() <= valid_for {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(lease.release().await.unwrap(), Released::Released);
    until("nothing is left", || servers.iter().all(|server| server.get("k").is_none())).await;

    let next = leases.lease("k").acquire().await.unwrap();
    assert!(next.fence() > fence);
    next.release().await.unwrap();
}

#[tokio::test]
async fn without_a_majority_at_the_start_the_error_says_so() {
    let mut servers = servers(3);
    let urls: Vec<_> = servers.iter().map(Server::url).collect();
    servers[0].kill();
    let leases = builder().connect_quorum(&urls).await.unwrap();
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    servers[1].kill();
    match builder().connect_quorum(&urls).await.unwrap_err() {
        Error::Store { attempted: "connect", source, .. } => {
            assert!(source.may_pass() && source.to_string().contains("no majority"), "{source}");
        }
        other => panic!("{other:?}"),
    }
}

/// How long the lease was certain for, each time that somebody looked: the least.
async fn least_validity(lease: &leasehold::Lease, length: Duration) -> Duration {
    let (start, mut least) = (Instant::now(), Duration::MAX);
    while start.elapsed() < length {
        least = least.min(lease.valid_for());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    least
}

#[tokio::test]
async fn with_two_of_five_servers_gone_a_lease_lives_on_and_others_are_taken() {
    let mut servers = servers(5);
    let leases = connect(&servers).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    servers[0].kill();
    servers[3].stop();
    // Renewed at a third of three seconds, so that never less than the rest is left, but for what a busy machine takes.
    let least = least_validity(&lease, Duration::from_secs(7)).await;
    assert!(least > Duration::from_millis(1200), "{least:?}");
    assert_eq!(lease.state(), LeaseState::Held);
    let start = Instant::now();
    for n in 0..50 {
        let other = leases.lease(format!("other:{n}")).acquire().await.unwrap();
        assert_eq!(other.release().await.unwrap(), Released::Released);
    }
    println!("50 acquisitions and releases beside a dead and a stopped server: {:?}", start.elapsed());
    assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
    assert_eq!(leases.inspect("k").await.unwrap().unwrap().fence, Some(lease.fence()));
    servers[3].cont();
    assert_eq!(lease.release().await.unwrap(), Released::Released);
    until("nothing is left", || servers[1..].iter().all(|server| server.get("k").is_none())).await;
}

#[tokio::test]
async fn with_three_of_five_servers_stopped_a_lease_is_lost_in_time() {
    let servers = servers(5);
    let leases = connect(&servers).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    let token = lease.cancel_token().clone();
    servers[..3].iter().for_each(Server::stop);
    let stopped = tokio::time::Instant::now();
    within("the token", token.cancelled()).await;
    // Validity is less than a TTL from the last renewal, which was sent before the servers stopped.
    let end = lease.valid_until();
    assert!(end < stopped + Duration::from_secs(3), "{:?} after the stop", end - stopped);
    let lost = within("the loss", lease.lost()).await;
    assert!(tokio::time::Instant::now() >= end);
    match lost.reason {
        LossReason::Deadline { last: Some(last), .. } => println!("{last}"),
        other => panic!("{other:?}"),
    }
    let refused = leases.lease("k").wait(Duration::from_millis(500)).acquire().await.unwrap_err();
    assert!(matches!(&refused, Error::Store { source, .. } if source.may_pass()), "{refused:?}");

    servers[..3].iter().for_each(Server::cont);
    let next = leases.lease("k").wait(Wait::Forever).acquire().await.unwrap();
    assert!(next.fence() > lost.fence);
    assert_eq!(next.release().await.unwrap(), Released::Released);
    until("nothing is left", || servers.iter().all(|server| server.get("k").is_none())).await;
}

#[tokio::test]
async fn a_lease_is_put_back_on_servers_that_all_restart_empty_one_after_another() {
    let mut servers = servers(5);
    // What has just started gives nothing away; but what is held comes back.
    let urls: Vec<_> = servers.iter().map(Server::url).collect();
    let leases = builder().connect_quorum(&urls).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let value = format!("#{}", lease.fence());
    for server in &mut servers {
        server.restart();
        until("the lease is back", || server.get("k").is_some_and(|there| there.ends_with(&value))).await;
        assert_eq!(server.get("{k}:fence"), Some(value[1..].to_owned()));
    }
    assert_eq!(lease.state(), LeaseState::Held);
    assert_eq!(format!("#{}", lease.fence()), value);
    let late = Leases::builder().ttl(Duration::from_secs(3)).quarantine(Duration::from_secs(3600));
    let late = late.connect_quorum(&urls).await.unwrap();
    let refused = late.lease("other").try_acquire().await.unwrap_err();
    let Error::Store { source, .. } = refused else { panic!("{refused:?}") };
    let why = std::error::Error::source(&source).map(ToString::to_string).unwrap_or_default();
    assert!(why.contains("started lately"), "{source}: {why}");
    assert_eq!(lease.release().await.unwrap(), Released::Released);
}

#[tokio::test]
async fn a_server_is_never_taken_to_be_older_than_it_is() {
    let settled = Duration::from_secs(2);
    let mut server = Server::start();
    // It counts the seconds of the wall clock: started late in one of them, it is a second old at once.
    let into = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_millis();
    tokio::time::sleep(Duration::from_millis((1850 - u64::from(into)) % 1000)).await;
    let start = Instant::now();
    server.restart();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
    let mut proposal = Proposal::new("k".into(), owner, Duration::from_secs(3));
    proposal.settled = settled;
    within("its vote", async {
        while let Proposed::Young { settled_in } = store.propose(&proposal).await.unwrap() {
            tokio::time::sleep(settled_in.min(Duration::from_millis(20))).await;
        }
    })
    .await;
    assert!(start.elapsed() >= settled, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_server_that_agrees_when_the_round_is_lost_keeps_nothing() {
    let servers = servers(3);
    let leases = connect(&servers).await;
    // Another program has one, and another stands still with the proposal on its way.
    servers[0].cmd(&["SET", "k", "a token", "PX", "60000"]);
    servers[1].stop();
    assert!(leases.lease("k").try_acquire().await.unwrap().is_none());
    until("given back where it was won", || servers[2].get("k").is_none()).await;
    servers[1].cont();
    // It has answered everything that was sent before this.
    until("the proposal and its release were carried out", || {
        servers[1].calls("evalsha") > 0 && servers[1].get("k").is_none()
    })
    .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(servers[1].keys(), Vec::<String>::new(), "neither a lease nor a fence");
}

#[tokio::test]
async fn a_force_is_not_undone_by_the_next_renewal() {
    let servers = servers(3);
    let leases = connect(&servers).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    assert!(leases.force_release("k").await.unwrap());
    let lost = within("the loss", lease.lost()).await;
    assert!(matches!(lost.reason, LossReason::Expired | LossReason::Taken), "{lost:?}");
    assert!(servers.iter().all(|server| server.get("k").is_none()));
    let next = leases.lease("k").acquire().await.unwrap();
    assert!(next.fence() > lost.fence);
    next.release().await.unwrap();
}

#[tokio::test]
async fn five_servers_keep_every_rule_of_a_store() {
    let servers = servers(5);
    let quorum = async || {
        let quorum = QuorumStore::connect(servers.iter().map(Server::url)).await.unwrap();
        quorum.quarantine(Duration::ZERO)
    };
    assert_eq!(contract::check(quorum).await, Ok(()));
}

/// There is no line, and no order is promised.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_five_servers_two_may_be_gone_while_many_wait_and_everybody_is_served_alone() {
    let mut servers = servers(5);
    let ttl = Duration::from_secs(6);
    let another = || builder().ttl(ttl).connect_quorum(servers.iter().map(Server::url));
    let both = [another().await.unwrap(), another().await.unwrap()];
    suite::serves_everybody(&both, "all there", ttl).await;
    servers[1].kill();
    servers[4].stop();
    suite::serves_everybody(&both, "two gone", ttl).await;
    servers[4].cont();
}

#[tokio::test]
async fn three_of_five_servers_that_restart_empty_at_once_cost_no_lease_and_give_none_for_the_quarantine() {
    let mut servers = servers(5);
    let leases = connect(&servers).await;
    let lease = leases.lease("k").acquire().await.unwrap();
    servers[..3].iter_mut().for_each(Server::kill);
    servers[..3].iter_mut().for_each(Server::restart);
    let careful = builder().quarantine(Duration::from_secs(3600));
    let careful = careful.connect_quorum(servers.iter().map(Server::url)).await.unwrap();
    let refused = careful.lease("other").try_acquire().await.unwrap_err();
    assert!(matches!(&refused, Error::Store { source, .. } if source.may_pass()), "{refused:?}");
    let value = format!("#{}", lease.fence());
    let back = |server: &Server| server.get("k").is_some_and(|there| there.ends_with(&value));
    until("the lease is back", || servers[..3].iter().all(back)).await;
    assert!(lease.is_held());
    assert_eq!(lease.release().await.unwrap(), Released::Released);
}
