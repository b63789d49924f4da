//! The Redis store on a real server, through its own face.
#![allow(clippy::unwrap_used, clippy::expect_used)] // in helpers too, not only in tests
mod support;

use leasehold::{
    Error, Key, StoreError,
    store::{
        Claim, Claimed, FencedWrite, Freed, Identity, Owner, Renewal, Renewed, Store, Ticket, Wrote, redis::RedisStore,
    },
};
use std::time::Duration;
use support::server::{Server, free_port};

const TTL: Duration = Duration::from_secs(60);

fn owner() -> Owner {
    Owner::draw(&Identity::new("me:1").unwrap()).unwrap()
}

#[track_caller]
fn fence(claimed: Result<Claimed, StoreError>) -> u64 {
    match claimed {
        Ok(Claimed::Held { fence, .. }) => fence,
        other => panic!("not held: {other:?}"),
    }
}

/// What the server itself said, at the end of the chain.
fn words(error: &Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

async fn refusal(url: &str) -> (StoreError, String) {
    let error = RedisStore::connect(url).await.expect_err("connected");
    let words = words(&error);
    match error {
        Error::Store { attempted: "connect", key: None, source, .. } => (source, words),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_lease_is_claimed_renewed_inspected_and_released() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let (key, me, other) = (Key::from("k"), owner(), owner());
    let fence = fence(store.claim(&Claim::new(key.clone(), me.clone(), TTL)).await);
    assert_eq!(server.get("k"), Some(format!("{}#{fence}", me.secret())));

    match store.claim(&Claim::new(key.clone(), other, TTL)).await.unwrap() {
        Claimed::Busy { retry_in, holder, .. } => {
            assert!(retry_in.is_some_and(|t| t > TTL / 2 && t <= TTL), "{retry_in:?}");
            assert_eq!(holder.as_deref(), Some("me:1"));
        }
        other => panic!("{other:?}"),
    }
    let renewal = Renewal::new(key.clone(), me.clone(), fence, TTL * 2);
    assert_eq!(store.renew(&renewal).await, Ok(Renewed::Renewed));
    let holding = store.inspect(&key).await.unwrap().unwrap();
    assert_eq!((holding.label.as_deref(), holding.fence, holding.waiters), (Some("me:1"), Some(fence), 0));
    assert!(holding.remaining.is_some_and(|r| r > TTL));

    assert_eq!(store.release(&key, &me).await, Ok(Freed::Released));
    assert_eq!(store.release(&key, &me).await, Ok(Freed::Gone));
    assert_eq!(store.inspect(&key).await, Ok(None));
}

#[tokio::test]
async fn whoever_stands_in_line_is_told_its_place_and_granted_the_key() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let (a, b) = (owner(), owner());
    let first = fence(store.claim(&Claim::new("k".into(), a.clone(), TTL)).await);
    let mut claim = Claim::new("k".into(), b, TTL);
    claim.line = true;
    let queued = store.claim(&claim).await.unwrap();
    let Claimed::Queued { ahead: 0, retry_in: Some(_), seen, ticket, holder: Some(_), .. } = queued else {
        panic!("{queued:?}")
    };
    assert_eq!(seen, first);
    claim.ticket = Some(ticket);
    assert_eq!(store.inspect(&"k".into()).await.unwrap().unwrap().waiters, 1);
    assert_eq!(store.release(&"k".into(), &a).await, Ok(Freed::Released));
    assert!(fence(store.claim(&claim).await) > first);
}

#[tokio::test]
async fn a_lock_of_another_program_has_no_label_no_fence_and_perhaps_no_end() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    server.cmd(&["SET", "k", "token"]);
    let busy = store.claim(&Claim::new("k".into(), owner(), TTL)).await.unwrap();
    assert_eq!(busy, Claimed::busy(None, None));
    let holding = store.inspect(&"k".into()).await.unwrap().unwrap();
    assert_eq!((holding.label, holding.fence, holding.remaining), (None, None, None));
    assert_eq!(store.force_release(&"k".into()).await, Ok(true));
    assert_eq!(store.force_release(&"k".into()).await, Ok(false));
}

#[tokio::test]
async fn many_renewals_are_answered_in_their_order_each_by_itself() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let mut renewals = vec![];
    for n in 0..300 {
        let (key, me) = (Key::from(format!("k{n}")), owner());
        let fence = fence(store.claim(&Claim::new(key.clone(), me.clone(), TTL)).await);
        renewals.push(Renewal::new(key, me, fence, TTL * 2));
    }
    server.cmd(&["DEL", "k7"]);
    server.cmd(&["SET", "k150", "token"]);
    server.cmd(&["DEL", "k299"]);
    server.cmd(&["LPUSH", "k299", "x"]);
    let before = server.calls("evalsha");
    let answers = store.renew_all(&renewals).await;
    assert_eq!(server.calls("evalsha") - before, 2, "at most 256 a list");
    for (n, answer) in answers.into_iter().enumerate() {
        let right = match n {
            7 => Renewed::Gone,
            150 | 299 => Renewed::Taken,
            _ => Renewed::Renewed,
        };
        assert_eq!(answer, Ok(right), "{n}");
    }
    assert!(server.pttl("k298") > 100_000);
    assert_eq!(store.renew_all(&[]).await, vec![]);
}

#[tokio::test]
async fn a_value_of_any_bytes_is_written_and_read_under_a_fence() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let key = Key::from("{v}:1");
    assert_eq!(store.read(&key).await, Ok(None));
    for value in [vec![], (0..=255).collect(), b"\r\n$3\r\n".to_vec()] {
        assert_eq!(store.write(&FencedWrite::new(key.clone(), value.clone(), 7)).await, Ok(Wrote::Written));
        assert_eq!(store.read(&key).await, Ok(Some(value)));
    }
    let stale = store.write(&FencedWrite::new(key.clone(), vec![1], 6)).await;
    assert_eq!(stale, Ok(Wrote::Stale { newest: 7 }));
    assert_eq!(server.keys(), ["{v}:1", "{v}:1::mark"]);
    assert!(!store.write(&FencedWrite::new(key, vec![1], u64::MAX)).await.unwrap_err().may_pass());
}

#[tokio::test]
async fn keys_that_would_share_a_line_are_refused_and_others_are_apart() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    assert!(store.check(&"a}".into()).is_err() && store.check(&"a:queue".into()).is_err());
    for key in ["order:{42}", "invoice:{42}", "a", "{a}", "{a}:b", "a{"] {
        assert!(store.check(&key.into()).is_ok());
        fence(store.claim(&Claim::new(key.into(), owner(), TTL)).await);
    }
    assert_eq!(server.keys().len(), 12, "{:?}", server.keys());
}

#[tokio::test]
async fn a_url_that_cannot_work_is_refused_with_its_rule() {
    for url in ["", "localhost:6379", "http://h", "redis://h:port", "redis-cluster://h/1", "redis-sentinel://h"] {
        match RedisStore::connect(url).await {
            Err(Error::Invalid(invalid)) => assert_eq!(invalid.setting, "url", "{url}"),
            other => panic!("{url}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn nobody_listening_is_unavailable_at_once() {
    let start = std::time::Instant::now();
    let (error, words) = refusal(&format!("redis://127.0.0.1:{}", free_port())).await;
    assert!(error.may_pass() && error.to_string().contains("127.0.0.1"), "{error}");
    assert!(words.contains("refused"), "{words}");
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn a_server_that_takes_connections_and_never_answers_is_unavailable_after_two_seconds() {
    let server = Server::start();
    server.stop();
    let start = std::time::Instant::now();
    let (error, _) = refusal(&server.url()).await;
    assert!(error.may_pass() && error.to_string().contains("no answer within 2s"), "{error}");
    assert!(start.elapsed() >= Duration::from_millis(1900), "{:?}", start.elapsed());
    server.cont();
    support::until("no connection is left behind", || server.clients().is_empty()).await;
}

#[tokio::test]
async fn a_password_that_is_wrong_or_missing_is_refused_and_never_shown() {
    let server = Server::with(&["--requirepass", "sesame-1001"]);
    let (missing, said) = refusal(&server.url()).await;
    assert!(!missing.may_pass() && said.starts_with("NOAUTH"), "{missing}: {said}");
    let error = RedisStore::connect(&server.url_as("", "wrong-1002")).await.unwrap_err();
    assert!(!format!("{error:?} {error} {}", words(&error)).contains("1002"), "{error:?}");
    assert!(words(&error).contains("WRONGPASS"), "{error:?}");

    let store = RedisStore::connect(&server.url_as("", "sesame-1001")).await.unwrap();
    fence(store.claim(&Claim::new("k".into(), owner(), TTL)).await);
    let shown = format!("{store:?}");
    assert!(shown.contains(&format!("127.0.0.1:{}", server.port())) && !shown.contains("1001"), "{shown}");
}

#[tokio::test]
async fn a_database_that_is_not_there_is_refused() {
    let server = Server::start();
    let (error, _) = refusal(&format!("{}/99", server.url())).await;
    assert!(!error.may_pass() && error.to_string().contains("database"), "{error}");
    let store = RedisStore::connect(&format!("{}/3", server.url())).await.unwrap();
    fence(store.claim(&Claim::new("k".into(), owner(), TTL)).await);
    assert!(server.keys().is_empty(), "it is in database 3");
}

/// What `Refused` names when a permission is missing is enough, and all of it is needed.
#[tokio::test]
async fn the_permissions_that_a_refusal_names_are_enough_and_each_is_needed() {
    let server = Server::start();
    server.cmd(&["ACL", "SETUSER", "u", "on", ">pw"]);
    let url = server.url_as("u", "pw");
    let (error, words) = refusal(&url).await;
    assert!(!error.may_pass() && words.starts_with("NOPERM"), "{error}: {words}");
    let needed = error.to_string().split_once("needs ").unwrap().1.to_owned();
    let commands: Vec<&str> = needed.split([' ', ',']).filter(|w| w.starts_with('+')).collect();
    assert!(commands.len() > 20, "{needed}");
    let mut rule = vec!["ACL", "SETUSER", "u", "~*", "&leasehold:*"];
    rule.extend(&commands);
    server.cmd(&rule);
    server.cmd(&["ACL", "LOG", "RESET"]);

    let store = RedisStore::connect(&url).await.unwrap();
    every_verb(&store).await.unwrap();
    // The client library asks for its number, and does without.
    let tried = server.cmd(&["ACL", "LOG"]).list();
    let its_own =
        |entry: &support::server::Reply| entry.clone().list().iter().any(|w| w.text().as_deref() == Some("client|id"));
    assert!(tried.iter().all(its_own), "nothing else was tried: {tried:?}");

    // These are used while connecting, by the subscription, or by what may fail: a message, the dead.
    let apart = ["+ping", "+info", "+eval", "+evalsha", "+publish", "+subscribe", "+time"];
    for command in commands.iter().filter(|c| !apart.contains(c)) {
        server.cmd(&["FLUSHALL"]);
        server.cmd(&["ACL", "SETUSER", "u", &command.replace('+', "-")]);
        let refused = every_verb(&store).await.expect_err(command);
        assert!(!refused.may_pass() && refused.to_string().contains(command), "{command}: {refused}");
        server.cmd(&["ACL", "SETUSER", "u", command]);
    }
}

/// Every path of the page that a user needs permissions for.
async fn every_verb(store: &RedisStore) -> Result<(), StoreError> {
    let (key, a, b, c) = (Key::from("k"), owner(), owner(), owner());
    let in_line = |owner: &Owner| {
        let mut claim = Claim::new(key.clone(), owner.clone(), TTL);
        claim.line = true;
        claim
    };
    let Claimed::Held { fence, .. } = store.claim(&in_line(&a)).await? else { panic!("not held") };
    store.renew(&Renewal::new(key.clone(), a.clone(), fence, TTL * 2)).await?;
    store.claim(&in_line(&c)).await?;
    // Before it, one that dies; the line itself lives as long as the other.
    let mut dying = in_line(&b);
    dying.presence = Duration::from_millis(1);
    dying.ticket = Some(Ticket(1));
    store.claim(&dying).await?;
    tokio::time::sleep(Duration::from_millis(10)).await; // far more than the presence of the first waiter
    store.inspect(&key).await?;
    store.release(&key, &a).await?;
    // A grant that failed is no error, only a release: then the next one takes the key.
    let Claimed::Held { .. } = store.claim(&in_line(&c)).await? else { panic!("not held") };
    store.force_release(&key).await?;
    store.write(&FencedWrite::new("v".into(), vec![1], fence)).await?;
    store.read(&"v".into()).await?;
    Ok(())
}
