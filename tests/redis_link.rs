//! The store's connections: lists, order, silence, and what happens when one is lost.
#![allow(clippy::unwrap_used, clippy::expect_used)] // in helpers too, not only in tests
mod support;

use leasehold::{
    Key, StoreError,
    store::{Claim, Claimed, Freed, Identity, Owner, Renewal, Renewed, Store, redis::RedisStore},
};
use std::{
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};
use support::{
    fake::{Fake, Say},
    server::Server,
    until, within,
};

const TTL: Duration = Duration::from_secs(60);
/// A server that is silent for this long is given up.
const PATIENCE: Duration = Duration::from_secs(2);

fn owner() -> Owner {
    Owner::draw(&Identity::new("me:1").unwrap()).unwrap()
}

fn claim(key: impl Into<Key>, owner: &Owner) -> Claim {
    let mut claim = Claim::new(key.into(), owner.clone(), TTL);
    claim.not_after = TTL;
    claim
}

async fn store(server: &Server) -> Arc<RedisStore> {
    Arc::new(RedisStore::connect(&server.url()).await.unwrap())
}

#[track_caller]
fn fence(claimed: Result<Claimed, StoreError>) -> u64 {
    match claimed {
        Ok(Claimed::Held { fence, .. }) => fence,
        other => panic!("not held: {other:?}"),
    }
}

/// Lets the future say what it wants done, and no more.
fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Asks until the store answers again.
async fn until_it_answers(store: &RedisStore) {
    let start = Instant::now();
    while let Err(error) = within("an answer", store.inspect(&"k".into())).await {
        assert!(error.may_pass() && start.elapsed() < support::PATIENCE, "{error}");
    }
}

#[tokio::test]
async fn what_is_asked_at_once_shares_lists_and_a_lone_operation_has_its_own() {
    let server = Server::start();
    let store = store(&server).await;
    let before = server.calls("evalsha");
    for _ in 0..10 {
        store.inspect(&"k".into()).await.unwrap();
    }
    assert_eq!(server.calls("evalsha") - before, 10);

    let before = server.calls("evalsha");
    let tasks: Vec<_> = (0..2000)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { store.claim(&claim(format!("k{n}"), &owner())).await })
        })
        .collect();
    for task in tasks {
        fence(task.await.unwrap());
    }
    let lists = server.calls("evalsha") - before;
    assert!((2000 / 128..200).contains(&lists), "{lists} lists for 2000 claims");
}

#[tokio::test]
async fn what_is_asked_while_lists_are_under_way_travels_in_the_next_one() {
    let server = Server::start();
    let store = store(&server).await;
    let before = server.calls("evalsha");
    server.stop();
    let claims: Vec<_> = (0..200).map(|n| claim(format!("k{n}"), &owner())).collect();
    let mut asked: Vec<_> = claims.iter().map(|c| Box::pin(store.claim(c))).collect();
    for future in &mut asked {
        assert!(poll_once(future.as_mut()).is_pending());
        give_way().await;
    }
    server.cont();
    for future in asked {
        fence(within("an answer", future).await);
    }
    assert_eq!(server.calls("evalsha") - before, 4 + 2, "four with one each, 128, and the rest");
}

#[tokio::test]
async fn what_came_together_goes_together_from_the_first_list_on() {
    let server = Server::start();
    let store = store(&server).await;
    let before = server.calls("evalsha");
    let claims: Vec<_> = (0..200).map(|n| claim(format!("k{n}"), &owner())).collect();
    let mut asked: Vec<_> = claims.iter().map(|c| Box::pin(store.claim(c))).collect();
    for future in &mut asked {
        assert!(poll_once(future.as_mut()).is_pending());
    }
    for future in asked {
        fence(within("an answer", future).await);
    }
    assert_eq!(server.calls("evalsha") - before, 2, "128, and the rest");
}

/// Lets the link do what it can.
async fn give_way() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn operations_are_carried_out_in_the_order_in_which_they_were_asked() {
    let server = Server::start();
    let store = store(&server).await;
    let (key, me) = (Key::from("k"), owner());
    let claim = claim("k", &me);
    // Each pair is asked before anything is answered: a claim that ran after its release would leave the key taken.
    for round in 0..300 {
        let mut claimed = pin!(store.claim(&claim));
        let mut released = pin!(store.release(&key, &me));
        assert!(poll_once(claimed.as_mut()).is_pending() && poll_once(released.as_mut()).is_pending());
        assert_eq!(within("a release", released).await, Ok(Freed::Released), "{round}");
        fence(within("a claim", claimed).await);
    }
    assert_eq!(server.cmd(&["EXISTS", "k"]).int(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_callers_are_all_answered_and_the_script_cache_may_be_flushed_meanwhile() {
    let server = Server::start();
    let store = store(&server).await;
    let callers: Vec<_> = (0..3000)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move {
                let (key, me) = (Key::from(format!("k{}", n % 1000)), owner());
                let mine = loop {
                    match store.claim(&claim(key.clone(), &me)).await.unwrap() {
                        Claimed::Held { fence, .. } => break fence,
                        _ => tokio::task::yield_now().await,
                    }
                };
                let renewal = Renewal::new(key.clone(), me.clone(), mine, TTL);
                assert_eq!(store.renew(&renewal).await, Ok(Renewed::Renewed));
                assert_eq!(store.release(&key, &me).await, Ok(Freed::Released));
            })
        })
        .collect();
    let mut flushes = 0;
    while !callers.iter().all(|c| c.is_finished()) {
        server.cmd(&["SCRIPT", "FLUSH"]);
        flushes += 1;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for caller in callers {
        caller.await.unwrap();
    }
    assert!(flushes > 5, "{flushes}");
    assert!(server.calls("eval") > 2, "the page was sent again");
    assert!(!server.keys().iter().any(|k| k.starts_with('k')));
}

#[tokio::test]
async fn the_script_cache_may_be_flushed_between_any_two_operations() {
    let server = Server::start();
    let store = store(&server).await;
    let (key, me) = (Key::from("k"), owner());
    let flush = || server.cmd(&["SCRIPT", "FLUSH"]);
    flush();
    let mine = fence(store.claim(&claim("k", &me)).await);
    flush();
    assert_eq!(store.renew(&Renewal::new(key.clone(), me.clone(), mine, TTL)).await, Ok(Renewed::Renewed));
    flush();
    assert!(store.inspect(&key).await.unwrap().is_some());
    flush();
    assert_eq!(store.release(&key, &me).await, Ok(Freed::Released));
}

#[tokio::test]
async fn lists_that_the_server_did_not_know_are_sent_again_in_their_order() {
    let server = Server::start();
    let store = store(&server).await;
    let key = Key::from("k");
    for round in 0..100 {
        server.cmd(&["SCRIPT", "FLUSH"]);
        // Six lists: four that go at once, and two behind them.
        let owners = [owner(), owner(), owner()];
        let claims: Vec<_> = owners.iter().map(|o| claim("k", o)).collect();
        let mut asked: Vec<Pin<Box<dyn Future<Output = bool> + '_>>> = vec![];
        for (owner, claim) in owners.iter().zip(&claims) {
            let (store, key) = (&store, &key);
            asked.push(Box::pin(async { matches!(store.claim(claim).await, Ok(Claimed::Held { .. })) }));
            asked.push(Box::pin(async move { store.release(key, owner).await == Ok(Freed::Released) }));
        }
        for future in &mut asked {
            assert!(poll_once(future.as_mut()).is_pending());
            tokio::task::yield_now().await; // the link sends it alone
        }
        for future in asked {
            assert!(within("an answer", future).await, "round {round}");
        }
    }
}

#[tokio::test]
async fn a_claim_whose_caller_left_before_it_was_sent_is_never_sent_and_a_release_always_is() {
    let server = Server::start();
    let store = store(&server).await;
    let me = owner();
    fence(store.claim(&claim("held", &me)).await);
    server.stop();
    // Four lists are under way to a server that doesn't read, so what follows waits here.
    let owners: Vec<Owner> = (0..4).map(|_| owner()).collect();
    let claims: Vec<_> = owners.iter().map(|o| claim("first", o)).collect();
    let mut first: Vec<_> = claims.iter().map(|c| Box::pin(store.claim(c))).collect();
    for future in &mut first {
        assert!(poll_once(future.as_mut()).is_pending());
        give_way().await;
    }
    {
        let dropped = claim("dropped", &me);
        let mut claimed = pin!(store.claim(&dropped));
        let held = Key::from("held");
        let mut released = pin!(store.release(&held, &me));
        assert!(poll_once(claimed.as_mut()).is_pending() && poll_once(released.as_mut()).is_pending());
    }
    let kept = claim("kept", &me);
    let mut kept = pin!(store.claim(&kept));
    assert!(poll_once(kept.as_mut()).is_pending());
    server.cont();
    fence(within("the claim that was waited for", kept).await);
    assert_eq!(server.cmd(&["EXISTS", "dropped", "{dropped}:fence"]).int(), 0);
    assert_eq!(server.cmd(&["EXISTS", "held"]).int(), 0);
    assert_eq!(server.clients().len(), 2, "on the same connection");
}

#[tokio::test]
async fn a_claim_that_the_server_gets_to_too_late_is_late_and_the_next_is_not() {
    let server = Server::start();
    let store = store(&server).await;
    let me = owner();
    let mut hasty = claim("k", &me);
    hasty.not_after = Duration::from_millis(100);
    server.stop();
    let mut late = pin!(store.claim(&hasty));
    assert!(poll_once(late.as_mut()).is_pending());
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.cont();
    assert_eq!(within("an answer", late).await, Ok(Claimed::Late));
    assert_eq!(server.keys(), Vec::<String>::new());
    fence(store.claim(&claim("k", &me)).await);
}

/// The bound of the claim that is a list's only operation.
fn not_after(list: &[String]) -> u64 {
    list.last().unwrap().parse().unwrap()
}

#[tokio::test]
async fn the_bound_of_a_claim_is_the_servers_time_and_follows_its_clock() {
    const HOUR: u64 = 3_600_000_000;
    let fake = Fake::start(|before, _| match before {
        0 => Say::Answers(1_000_000_000 + HOUR, vec![vec!["late".into()]]),
        1 => Say::Answers(1_000_000_000 + HOUR, vec![vec!["held".into(), "7".into()]]),
        // A clock that goes back.
        _ => Say::Answers(1_000_000_000, vec![vec!["held".into(), "7".into()]]),
    });
    let store = RedisStore::connect(&fake.url()).await.unwrap();
    let mut claim = claim("k", &owner());
    claim.not_after = Duration::from_secs(5);
    assert_eq!(store.claim(&claim).await, Ok(Claimed::Late));
    for _ in 0..3 {
        assert_eq!(fence(store.claim(&claim).await), 7);
    }
    let bounds: Vec<u64> = fake.heard().iter().map(|list| not_after(list)).collect();
    // The server's time at the request plus 5 s, and what this test took.
    for (bound, server) in bounds.iter().zip([0, HOUR, HOUR, 0]) {
        let over = bound.checked_sub(1_000_000_000 + server + 5_000_000);
        assert!(over.is_some_and(|o| o < 60_000_000), "{bounds:?}");
    }
}

#[tokio::test]
async fn a_list_that_the_server_did_not_know_survives_the_loss_of_its_connection() {
    let fake = Fake::start(|before, _| match before {
        0 => Say::ErrorAfterNext("NOSCRIPT No matching script. Please use EVAL."),
        1 => Say::HangUp,
        _ => Say::Answers(1_000_000_000, vec![vec!["held".into(), "7".into()]]),
    });
    let store = RedisStore::connect(&fake.url()).await.unwrap();
    let (first, second) = (claim("first", &owner()), claim("second", &owner()));
    let mut unknown = pin!(store.claim(&first));
    assert!(poll_once(unknown.as_mut()).is_pending());
    give_way().await;
    let mut lost = pin!(store.claim(&second));
    assert!(poll_once(lost.as_mut()).is_pending());
    assert!(within("an error", lost).await.unwrap_err().may_pass(), "nobody knows what became of it");
    assert_eq!(fence(within("an answer", unknown).await), 7);
    assert_eq!(fake.heard().iter().map(|list| list[3].as_str()).collect::<Vec<_>>(), ["first", "second", "first"]);
}

#[tokio::test]
async fn an_answer_of_another_shape_is_no_answer_and_costs_the_connection() {
    let fake = Fake::start(|before, _| match before {
        0 => Say::Answers(1_000_000_000, vec![]),
        1 => Say::Answers(1_000_000_000, vec![vec!["held".into(), "x".into()]]),
        _ => Say::Answers(1_000_000_000, vec![vec!["held".into(), "7".into()]]),
    });
    let store = RedisStore::connect(&fake.url()).await.unwrap();
    let claim = claim("k", &owner());
    assert!(store.claim(&claim).await.unwrap_err().may_pass(), "no answer to one operation");
    assert!(!store.claim(&claim).await.unwrap_err().may_pass(), "a fence that is none");
    assert_eq!(fence(store.claim(&claim).await), 7);
}

#[tokio::test]
async fn a_killed_server_fails_what_is_under_way_at_once_and_is_found_again() {
    let mut server = Server::durable();
    let store = store(&server).await;
    let me = owner();
    let mine = fence(store.claim(&claim("k", &me)).await);
    server.stop();
    let (key, start) = (Key::from("k"), Instant::now());
    let mut asked = pin!(store.inspect(&key));
    assert!(poll_once(asked.as_mut()).is_pending());
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.kill();
    let error = within("an error", asked).await.unwrap_err();
    assert!(error.may_pass() && start.elapsed() < PATIENCE, "{error} after {:?}", start.elapsed());

    // What is asked now waits for the server to come back.
    let renewals = [Renewal::new(key.clone(), me.clone(), mine, TTL)];
    let mut waiting = pin!(store.renew_all(&renewals));
    assert!(poll_once(waiting.as_mut()).is_pending());
    server.restart();
    assert_eq!(within("an answer", waiting).await, vec![Ok(Renewed::Renewed)]);
    until("two connections", || server.clients().len() == 2).await;
}

#[tokio::test]
async fn without_a_server_whoever_waits_is_told_why_and_later_callers_are_served() {
    let mut server = Server::start();
    let store = store(&server).await;
    server.kill();
    until_unavailable(&store).await;
    let start = Instant::now();
    let error = within("an error", store.claim(&claim("k", &owner()))).await.unwrap_err();
    assert!(error.to_string().contains("is it running there?"), "{error}");
    assert!(start.elapsed() >= PATIENCE && start.elapsed() < 3 * PATIENCE, "{:?}", start.elapsed());
    server.restart();
    within("an answer", async { while store.claim(&claim("k", &owner())).await.is_err() {} }).await;
}

/// The first answer after a loss may still be that of the lost connection.
async fn until_unavailable(store: &RedisStore) {
    assert!(within("an error", store.inspect(&"k".into())).await.unwrap_err().may_pass());
}

#[tokio::test]
async fn a_release_that_nobody_waits_for_is_still_made_when_the_server_comes_back() {
    let mut server = Server::durable();
    let store = store(&server).await;
    let (key, me) = (Key::from("k"), owner());
    fence(store.claim(&claim("k", &me)).await);
    server.kill();
    until_unavailable(&store).await;
    {
        let mut released = pin!(store.release(&key, &me));
        assert!(poll_once(released.as_mut()).is_pending());
        let dropped = claim("dropped", &me);
        let mut claimed = pin!(store.claim(&dropped));
        assert!(poll_once(claimed.as_mut()).is_pending());
    }
    // One that has waited for a connection in vain doesn't take it along.
    until_unavailable(&store).await;
    server.restart();
    until("the release", || server.cmd(&["EXISTS", "k"]).int() == 0).await;
    until_it_answers(&store).await;
    assert_eq!(server.cmd(&["EXISTS", "dropped"]).int(), 0);
}

#[tokio::test]
async fn a_server_that_falls_silent_is_given_up_and_answers_on_a_new_connection_when_it_goes_on() {
    let server = Server::start();
    let store = store(&server).await;
    let old = server.clients();
    server.stop();
    let start = Instant::now();
    let error = within("an error", store.inspect(&"k".into())).await.unwrap_err();
    let took = start.elapsed();
    assert!(error.may_pass() && error.to_string().contains("silent"), "{error}");
    assert!(took >= PATIENCE * 3 / 4 && took < PATIENCE * 2, "{took:?}");
    server.cont();
    until_it_answers(&store).await;
    until("the old connection is closed, the idle one kept", || {
        let now = server.clients();
        now.len() == 2 && now.iter().filter(|c| old.iter().any(|o| id(o) == id(c))).count() == 1
    })
    .await;
}

fn id(client: &str) -> &str {
    client.split(' ').next().unwrap()
}

#[tokio::test]
async fn a_runtime_that_was_blocked_does_not_blame_the_server_for_its_own_silence() {
    let server = Server::start();
    let store = store(&server).await;
    let old = server.clients();
    let key = Key::from("k");
    let mut asked = pin!(store.inspect(&key));
    assert!(poll_once(asked.as_mut()).is_pending());
    give_way().await;
    std::thread::sleep(PATIENCE * 2);
    assert_eq!(within("an answer", asked).await, Ok(None));
    let now = server.clients();
    assert!(now.iter().zip(&old).all(|(now, old)| id(now) == id(old)), "{now:?}");
}

#[tokio::test]
async fn a_password_that_was_changed_refuses_whoever_waits_at_once() {
    let server = Server::with(&["--requirepass", "one"]);
    let mut admin = server.connect();
    admin.cmd(&["AUTH", "one"]);
    let store = RedisStore::connect(&server.url_as("", "one")).await.unwrap();
    admin.cmd(&["CONFIG", "SET", "requirepass", "two"]);
    admin.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    let start = Instant::now();
    let error = loop {
        // The first may find the lost connection, which is no refusal.
        match within("an error", store.claim(&claim("k", &owner()))).await {
            Err(error) if error.may_pass() => assert!(start.elapsed() < PATIENCE, "{error}"),
            other => break other.unwrap_err(),
        }
    };
    assert!(error.to_string().contains("password"), "{error}");
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    admin.cmd(&["CONFIG", "SET", "requirepass", "one"]);
    within("a claim", async { while store.claim(&claim("k", &owner())).await.is_err() {} }).await;
}

#[tokio::test]
async fn connections_that_are_killed_are_replaced_and_none_is_left_behind() {
    let server = Server::start();
    let store = store(&server).await;
    for round in 0..20 {
        let old: Vec<String> = server.clients().iter().map(|c| id(c).to_owned()).collect();
        for id in &old {
            server.cmd(&["CLIENT", "KILL", "ID", id.trim_start_matches("id=")]);
        }
        until("two new connections", || {
            let now = server.clients();
            now.len() == 2 && !now.iter().any(|c| old.iter().any(|o| o == id(c)))
        })
        .await;
        until_it_answers(&store).await;
        let renewals = [Renewal::new("none".into(), owner(), 1, TTL)];
        assert_eq!(store.renew_all(&renewals).await, vec![Ok(Renewed::Gone)], "{round}");
    }
    drop(store);
    until("no connection is left", || server.clients().is_empty()).await;
}

#[tokio::test]
async fn a_store_that_is_dropped_while_its_server_is_gone_leaves_nothing_running() {
    let mut server = Server::start();
    let store = store(&server).await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    assert!(tasks() > 0);
    server.kill();
    until_unavailable(&store).await;
    drop(store);
    until("no task is left", || tasks() == 0).await;
}

#[tokio::test]
async fn what_was_asked_before_the_store_was_dropped_is_still_done() {
    let server = Server::start();
    let store = store(&server).await;
    let (key, me) = (Key::from("k"), owner());
    fence(store.claim(&claim("k", &me)).await);
    {
        let mut released = pin!(store.release(&key, &me));
        assert!(poll_once(released.as_mut()).is_pending());
    }
    drop(store);
    until("released, and no connection left", || {
        server.cmd(&["EXISTS", "k"]).int() == 0 && server.clients().is_empty()
    })
    .await;
}

#[tokio::test]
async fn calls_come_from_any_runtime_and_end_when_the_stores_own_has_ended() {
    let server = Server::start();
    let url = server.url();
    let home = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let store = home.spawn(async move { RedisStore::connect(&url).await.unwrap() }).await.unwrap();
    let me = owner();
    fence(store.claim(&claim("k", &me)).await);
    home.shutdown_background();
    let error = within("an error", store.claim(&claim("k", &me))).await.unwrap_err();
    assert!(error.may_pass(), "{error}");
    let renewals = [Renewal::new("k".into(), me, 1, TTL)];
    assert!(within("an error", store.renew_all(&renewals)).await[0].is_err());
    until("no connection is left", || server.clients().is_empty()).await;
}

#[tokio::test]
async fn a_server_that_turned_replica_is_unavailable_and_found_again_when_it_is_primary() {
    let server = Server::start();
    let store = store(&server).await;
    let me = owner();
    let old = server.clients();
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = store.claim(&claim("k", &me)).await.unwrap_err();
    assert!(error.may_pass() && error.to_string().contains("replica"), "{error}");
    until("its connection is replaced", || {
        let now = server.clients();
        now.len() == 2 && now.iter().filter(|c| old.iter().any(|o| id(o) == id(c))).count() == 1
    })
    .await;
    let connections = || {
        let stats = server.cmd(&["INFO", "stats"]).text().unwrap();
        let count = stats.lines().find_map(|l| l.strip_prefix("total_connections_received:")).unwrap();
        count.parse::<u64>().unwrap()
    };
    let (before, start) = (connections(), Instant::now());
    while start.elapsed() < Duration::from_secs(1) {
        assert!(within("an error", store.claim(&claim("k", &me))).await.unwrap_err().may_pass());
    }
    let opened = connections() - before;
    assert!(opened <= 10 + start.elapsed().as_secs() * 2, "with growing pauses: {opened} in {:?}", start.elapsed());
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    within("a claim", async { while store.claim(&claim("k", &me)).await.is_err() {} }).await;
}

#[tokio::test]
async fn a_server_busy_with_somebodys_script_is_unavailable_and_then_answers() {
    let server = Server::with(&["--lua-time-limit", "50"]);
    let store = store(&server).await;
    let mut other = server.connect();
    other.send(&["EVAL", "while true do end", "0"]);
    until("busy", || server.try_cmd(&["PING"]).is_err_and(|e| e.starts_with("BUSY"))).await;
    let error = store.claim(&claim("k", &owner())).await.unwrap_err();
    assert!(error.may_pass() && error.to_string().contains("SCRIPT KILL"), "{error}");
    let error = RedisStore::connect(&server.url()).await.unwrap_err();
    assert!(matches!(&error, leasehold::Error::Store { source, .. } if source.may_pass()), "{error:?}");
    server.cmd(&["SCRIPT", "KILL"]);
    until_it_answers(&store).await;
    fence(store.claim(&claim("k", &owner())).await);
}

#[tokio::test]
async fn a_server_that_is_still_loading_is_unavailable_and_then_answers() {
    let mut server =
        Server::with(&["--appendonly", "yes", "--key-load-delay", "2000", "--enable-debug-command", "yes"]);
    server.cmd(&["DEBUG", "POPULATE", "500"]);
    server.cmd(&["BGREWRITEAOF"]);
    until("rewritten", || server.cmd(&["INFO", "persistence"]).text().unwrap().contains("aof_rewrite_in_progress:0"))
        .await;
    server.kill();
    server.restart_loading();
    let error = RedisStore::connect(&server.url()).await.unwrap_err();
    assert!(format!("{error:?}").contains("LOADING"), "{error:?}");
    assert!(matches!(&error, leasehold::Error::Store { source, .. } if source.may_pass()), "{error:?}");
    within("loaded", async { while RedisStore::connect(&server.url()).await.is_err() {} }).await;
}

#[tokio::test]
async fn memory_that_is_full_refuses_claims_and_still_renews_and_releases() {
    let server = Server::start();
    let store = store(&server).await;
    let (key, me) = (Key::from("k"), owner());
    let mine = fence(store.claim(&claim("k", &me)).await);
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = store.claim(&claim("j", &me)).await.unwrap_err();
    assert!(!error.may_pass() && error.to_string().contains("maxmemory"), "{error}");
    assert_eq!(store.renew(&Renewal::new(key.clone(), me.clone(), mine, TTL)).await, Ok(Renewed::Renewed));
    assert_eq!(store.release(&key, &me).await, Ok(Freed::Released));
}

#[tokio::test]
async fn a_permission_that_is_taken_away_refuses_and_given_back_serves_again() {
    let server = Server::start();
    let store = store(&server).await;
    server.cmd(&["ACL", "SETUSER", "default", "-evalsha"]);
    let error = store.claim(&claim("k", &owner())).await.unwrap_err();
    assert!(!error.may_pass() && error.to_string().contains("+evalsha"), "{error}");
    server.cmd(&["ACL", "SETUSER", "default", "+evalsha"]);
    fence(store.claim(&claim("k", &owner())).await);
}

#[tokio::test]
async fn renewals_do_not_stand_behind_a_herd_of_claims() {
    let server = Server::start();
    let store = store(&server).await;
    let me = owner();
    let mine = fence(store.claim(&claim("k", &me)).await);
    let claims: Vec<_> = (0..20_000).map(|n| claim(format!("k{}", n % 50), &me)).collect();
    let mut herd: Vec<_> = claims.iter().map(|c| Box::pin(store.claim(c))).collect();
    for future in &mut herd {
        assert!(poll_once(future.as_mut()).is_pending());
    }
    assert_eq!(store.renew(&Renewal::new("k".into(), me, mine, TTL)).await, Ok(Renewed::Renewed));
    let last = herd.last_mut().unwrap();
    assert!(poll_once(last.as_mut()).is_pending(), "the herd is still being served");
    for future in herd {
        within("a claim", future).await.unwrap();
    }
}
