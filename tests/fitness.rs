//! What is said of a server that may betray a lease, and what a user of it must be allowed to do.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;

use leasehold::{
    Error, Key, Leases, StoreError,
    store::{Claim, Claimed, FencedWrite, Freed, Identity, Owner, Renewal, Renewed, Store, Wrote, redis::RedisStore},
};
use std::{error::Error as _, time::Duration};
use support::{
    fake::{Fake, Say},
    log::Log,
    sentinels::info,
    server::Server,
    until, within,
};
use tracing::Level;

const TTL: Duration = Duration::from_secs(30);

fn owner() -> Owner {
    Owner::draw(&Identity::new("a").unwrap()).unwrap()
}

/// Connects, and is connected again; then everything that was warned of this server.
async fn warned_of(server: &Server) -> Vec<String> {
    let (log, _guard) = Log::listen();
    let store = within("a connection", RedisStore::connect(&server.url())).await.unwrap();
    // A replica's connection to its primary is no client's.
    let clients = || server.clients().into_iter().filter(|c| !c.contains(" flags=M ")).collect::<Vec<_>>();
    let before = clients();
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    until("connected again", || {
        let now = clients();
        now.len() == 2 && now.iter().all(|c| !before.contains(c))
    })
    .await;
    // Both connections have been opened when this is answered.
    while store.inspect(&Key::from("k")).await.is_err() {}
    while store.renew_all(&[Renewal::new("k".into(), owner(), 1, TTL)]).await[0].is_err() {}
    let lines = log.lines().into_iter();
    lines.filter(|(level, line)| *level == Level::WARN && !line.contains("again")).map(|(_, line)| line).collect()
}

#[tokio::test]
async fn a_server_as_it_should_be_is_not_warned_of() {
    let server = Server::with(&["--maxmemory", "100mb"]);
    assert_eq!(warned_of(&server).await, [""; 0]);
}

#[tokio::test]
async fn a_server_that_may_evict_leases_is_told_once_with_the_setting_to_change() {
    for (policy, limit, word) in [
        ("allkeys-lru", "100mb", "when memory is short"),
        ("volatile-ttl", "100mb", "short"),
        ("volatile-lru", "0", "as soon as"),
    ] {
        let server = Server::with(&["--maxmemory", limit, "--maxmemory-policy", policy]);
        let warned = warned_of(&server).await;
        assert_eq!(warned.len(), 1, "{warned:#?}");
        assert!(warned[0].contains("maxmemory-policy noeviction") && warned[0].contains(policy), "{warned:?}");
        assert!(warned[0].contains(word) && warned[0].contains(&server.port().to_string()), "{warned:?}");
    }
}

#[tokio::test]
async fn a_replica_is_told_once_and_takes_no_claims() {
    let primary = Server::start();
    let replica = Server::with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    until("it follows", || info(&replica, "replication").contains("master_link_status:up")).await;
    let warned = warned_of(&replica).await;
    assert!(warned.len() == 1 && warned[0].contains("connect to its primary"), "{warned:#?}");
    let store = RedisStore::connect(&replica.url()).await.unwrap();
    let error = store.claim(&Claim::new("k".into(), owner(), TTL)).await.unwrap_err();
    assert!(error.may_pass() && error.to_string().contains("replica"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_too_old_is_told_once() {
    let (log, _guard) = Log::listen();
    let old = Fake::with_info(Some("redis_version:5.0.14\r\n"), |_, _| Say::HangUp);
    let _store = RedisStore::connect(&old.url()).await.unwrap();
    log.assert_once(Level::WARN, "Redis 5.0 is too old for leasehold: upgrade it to 6.0 or later");
}

/// What `docs/redis.md` says that a user needs.
fn documented() -> Vec<String> {
    let page = include_str!("../docs/redis.md");
    let rule = page.split("ACL SETUSER worker").nth(1).unwrap().split("```").next().unwrap();
    let words = rule.split_whitespace().filter(|word| *word != "\\");
    words.map(|word| word.replace(">password", ">pw")).collect()
}

/// A user with all of these rules but one, and a URL to connect as it.
fn user(server: &Server, rules: &[String], but: &str) -> String {
    let mut words = vec!["ACL", "SETUSER", "worker", "reset"];
    words.extend(rules.iter().map(String::as_str).filter(|rule| *rule != but));
    server.cmd(&words);
    server.url_as("worker", "pw")
}

/// Everything that leasehold asks of a server.
async fn use_everything(server: &Server, url: &str) -> Result<(), StoreError> {
    let leases = Leases::connect(url).await.map_err(|error| match error {
        Error::Store { source, .. } => source,
        other => panic!("{other}"),
    })?;
    let store = RedisStore::connect(url).await.unwrap();
    let owners = [owner(), owner()];
    let key = Key::from("report:k");
    let claim = |at: usize| {
        let mut claim = Claim::new(key.clone(), owners[at].clone(), TTL);
        claim.line = true;
        claim
    };
    let Claimed::Held { fence, .. } = store.claim(&claim(0)).await? else { panic!("it is free") };
    tokio::time::sleep(Duration::from_millis(5)).await;
    let renewal = Renewal::new(key.clone(), owners[0].clone(), fence, TTL);
    assert_eq!(store.renew(&renewal).await?, Renewed::Renewed);
    assert!(matches!(store.claim(&claim(1)).await?, Claimed::Queued { .. }));
    assert_eq!(store.inspect(&key).await?.unwrap().waiters, 1);
    // One that died before it.
    server.cmd(&["ZADD", "{report:k}:queue", "1", "dead"]);
    server.cmd(&["HSET", "{report:k}:waiters", "dead", "1 1"]);
    assert_eq!(store.release(&key, &owners[0]).await?, Freed::Released);
    assert!(matches!(store.claim(&claim(1)).await?, Claimed::Held { .. }));
    assert_eq!(server.get("report:k").unwrap().split('#').next(), Some(owners[1].secret().as_str()));
    assert!(store.force_release(&key).await?);
    assert_eq!(store.write(&FencedWrite::new("report:v".into(), b"x".to_vec(), fence)).await?, Wrote::Written);
    assert_eq!(store.read(&"report:v".into()).await?, Some(b"x".to_vec()));
    drop(leases);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_documented_permissions_suffice_and_one_that_is_missing_is_named() {
    let log = Log::of_all();
    let rules = documented();
    let commands: Vec<&str> = rules.iter().map(String::as_str).filter(|rule| rule.starts_with('+')).collect();
    assert!(commands.len() > 20, "{commands:?}");
    {
        let server = Server::start();
        use_everything(&server, &user(&server, &rules, "")).await.unwrap();
        // The client library asks for its own number, and does without.
        let denied = server.cmd(&["ACL", "LOG"]).list().into_iter().flat_map(|entry| {
            let words: Vec<_> = entry.list().iter().map(|w| w.text().unwrap()).collect();
            words.windows(2).filter(|pair| pair[0] == "object").map(|pair| pair[1].clone()).collect::<Vec<_>>()
        });
        assert_eq!(denied.filter(|command| command != "client|id").collect::<Vec<_>>(), [""; 0]);
        assert_eq!(log.warnings(&server, ""), 0);
    }
    for missing in commands.iter().copied().chain(["&leasehold:*"]) {
        let server = Server::start();
        match within("an end", use_everything(&server, &user(&server, &rules, missing))).await {
            Err(error) => {
                assert!(!error.may_pass() && error.to_string().contains(missing), "{missing}: {error}");
                let words = error.source().unwrap().to_string();
                let denied = ["NOPERM", "The user executing", "ACL failure"];
                assert!(denied.iter().any(|said| words.contains(said)), "{missing}: {words}");
            }
            // What leasehold can do without is told.
            Ok(()) => {
                assert!(["+ping", "+info", "+publish", "+subscribe", "&leasehold:*"].contains(&missing), "{missing}");
                until(missing, || log.warnings(&server, missing) > 0).await;
            }
        }
    }
}
