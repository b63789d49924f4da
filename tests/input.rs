//! Bad input: a typed error at once, that names the setting and the rule, and nothing left behind.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;
use leasehold::{Error, Invalid, Leases, Result, StoreError, Wait};
use std::{
    error::Error as _,
    time::{Duration, Instant},
};
use support::{
    proxy::Proxy,
    server::{Server, free_port},
    until, within,
};

#[track_caller]
fn invalid<T>(result: Result<T>) -> Invalid {
    match result.map(|_| ()) {
        Err(Error::Invalid(invalid)) => {
            let said = Error::from(invalid).to_string();
            assert!(said.contains(invalid.setting) && said.contains(invalid.rule), "{said}");
            invalid
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn store_error<T>(result: Result<T>) -> StoreError {
    match result.map(|_| ()) {
        Err(Error::Store { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_cannot_be_are_refused_by_every_call_and_leave_nothing_behind() {
    let server = Server::start();
    let leases = Leases::connect(&server.url()).await.unwrap();
    let calls = server.calls("evalsha");
    let long = "x".repeat(1025);
    for key in ["", &long, "a}", "{}", "{}a", "a{}b}", "}{", "{a}:fence", "a:queue"] {
        assert_eq!(invalid(leases.lease(key).acquire().await).setting, "key", "{key}");
        assert_eq!(invalid(leases.lease(key).try_acquire().await).setting, "key");
        assert_eq!(invalid(leases.with_lease(key, async |_| unreachable!()).await.map(|(): ()| ())).setting, "key");
        assert_eq!(invalid(leases.lock(key).lock().await).setting, "key");
        assert_eq!(invalid(leases.lock(key).try_lock().await).setting, "key");
        assert_eq!(invalid(leases.inspect(key).await).setting, "key");
        assert_eq!(invalid(leases.force_release(key).await).setting, "key");
        assert_eq!(invalid(leases.write(key, "v", 1).await).setting, "key");
        assert_eq!(invalid(leases.read(key).await).setting, "key");
    }
    assert_eq!(server.calls("evalsha"), calls, "nothing was sent");
    assert_eq!(server.keys(), [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_keys_that_can_be_are_each_a_key_of_their_own() {
    let server = Server::start();
    let leases = Leases::connect(&server.url()).await.unwrap();
    let longest = "x".repeat(1024);
    let odd = ["a", "a:", "ab", "a/b", "a*", "a?[b]", "{a}", "{a}:b", "a{", " ", "a b\r\n\0c", "ключ", "#1", &longest];
    let mut held = Vec::new();
    for key in odd {
        let lease = leases.lease(key).try_acquire().await.unwrap().unwrap_or_else(|| panic!("{key:?} is another's"));
        assert_eq!(server.get(key).and_then(|v| v.rsplit_once('#')?.1.parse().ok()), Some(lease.fence()), "{key:?}");
        held.push(lease);
    }
    for lease in held {
        lease.release().await.unwrap();
    }
    assert!(server.keys().iter().all(|key| key.ends_with(":fence")), "{:?}", server.keys());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ttls_that_redis_or_a_watchdog_cannot_keep_are_refused() {
    let server = Server::start();
    let ms = Duration::from_millis;
    let leases = Leases::connect(&server.url()).await.unwrap();
    for ttl in [Duration::ZERO, ms(1), ms(99), Duration::MAX, ms(u64::MAX), ms(i64::MAX.unsigned_abs())] {
        assert_eq!(invalid(leases.lease("k").ttl(ttl).acquire().await).setting, "ttl", "{ttl:?}");
        assert_eq!(invalid(leases.lock("k").lock_for(ttl).await).setting, "ttl");
        assert_eq!(invalid(leases.lock("k").try_lock_with(ms(1), ttl).await).setting, "ttl");
        assert_eq!(invalid(Leases::builder().ttl(ttl).connect(&server.url()).await).setting, "ttl");
    }
    assert_eq!(server.keys(), [""; 0]);
    // The ends of the range do work, and for as long as they say.
    let year = Duration::from_secs(365 * 24 * 3600);
    for ttl in [ms(100), year] {
        let lease = leases.lease("k").ttl(ttl).acquire().await.unwrap();
        let left = server.pttl("k");
        assert!(left <= i64::try_from(ttl.as_millis()).unwrap(), "{left}");
        assert!(ttl != year || left > i64::try_from(ttl.as_millis()).unwrap() - 60_000, "{left}");
        drop(lease);
        until("the key is free", || server.get("k").is_none()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_contradict_each_other_are_refused_by_the_builder_and_by_a_request() {
    let server = Server::start();
    let leases = Leases::connect(&server.url()).await.unwrap();
    let (ms, ttl) = (Duration::from_millis, Duration::from_secs(3));
    let request = || leases.lease("k").ttl(ttl);
    let builder = || Leases::builder().ttl(ttl);
    for grace in [ttl / 3, ttl, Duration::MAX] {
        assert_eq!(invalid(request().grace(grace).acquire().await).setting, "grace");
        assert_eq!(invalid(builder().grace(grace).connect(&server.url()).await).setting, "grace");
    }
    for attempt in [Duration::ZERO, ms(9), ttl / 3 + ms(1), Duration::MAX] {
        assert_eq!(invalid(request().attempt(attempt).acquire().await).setting, "attempt");
        assert_eq!(invalid(builder().attempt(attempt).connect(&server.url()).await).setting, "attempt");
    }
    for max_hold in [Duration::ZERO, ttl / 10] {
        assert_eq!(invalid(request().max_hold(max_hold).acquire().await).setting, "max_hold");
        assert_eq!(invalid(builder().max_hold(max_hold).connect(&server.url()).await).setting, "max_hold");
    }
    for label in ["", "a b", "a#b", "a\n", &"x".repeat(129)] {
        assert_eq!(invalid(builder().label(label).connect(&server.url()).await).setting, "label", "{label:?}");
    }
    assert_eq!(server.keys(), [""; 0]);
    // What looks extreme and does work.
    for request in [
        request().grace(Duration::ZERO),
        request().max_hold(Duration::MAX),
        request().wait(Duration::MAX),
        request().wait(Wait::UpTo(Duration::ZERO)),
    ] {
        within("a lease", request.acquire()).await.unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_url_that_is_wrong_is_refused_with_the_rule_and_without_its_password() {
    for url in [
        "",
        "localhost:6379",
        "http://:hunter2@h",
        "redis://",
        "redis://:hunter2@h:port",
        "redis://:hunter2@h/x",
        "redis://:hunter2@h?protocol=3",
        "redis-sentinel://:hunter2@h:1",
        "redis-sentinel://h:1?sentinelServiceName=m&sentinelPasswort=hunter2",
        "redis-sentinel://h:1?sentinelServiceName=m&node=h:x&sentinelPassword=hunter2",
        "redis-cluster://:hunter2@h:1/3",
        "redis-cluster://:hunter2@h:1?node=h:x",
        "redis-cluster://:hunter2@h:1?nodes=h:1",
        "redis+unix:///run/redis.sock",
    ] {
        let error = Leases::connect(url).await.unwrap_err();
        assert_secret(&error, "hunter2");
        assert_eq!(invalid::<()>(Err(error)).setting, "url", "{url}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_there_is_an_error_within_seconds() {
    let start = Instant::now();
    let url = format!("redis://:hunter2@127.0.0.1:{}", free_port());
    let error = within("refused", Leases::connect(&url)).await.unwrap_err();
    assert_secret(&error, "hunter2");
    let error = store_error::<()>(Err(error));
    assert!(error.may_pass() && error.to_string().contains("127.0.0.1"), "{error}");

    // Somebody listens and says nothing.
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    proxy.blackhole();
    let error = store_error(within("silent", Leases::connect(&proxy.url())).await);
    assert!(error.may_pass() && error.to_string().contains("no answer"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_refused_and_shown_nowhere() {
    let server = Server::with(&["--requirepass", "letmein"]);
    server.cmd(&["AUTH", "letmein"]);
    for url in [server.url(), server.url_as("", "hunter2"), server.url_as("nobody", "hunter2")] {
        let error = within("an answer", Leases::connect(&url)).await.unwrap_err();
        assert_secret(&error, "hunter2");
        let error = store_error::<()>(Err(error));
        assert!(!error.may_pass(), "{error}");
        assert!(error.to_string().contains("password"), "{error}");
    }
    let leases = Leases::connect(&server.url_as("", "letmein")).await.unwrap();
    assert!(!format!("{leases:?}").contains("letmein"));
    let lease = leases.lease("k").acquire().await.unwrap();

    // The password is changed, and every connection is ended.
    server.cmd(&["CONFIG", "SET", "requirepass", "changed"]);
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    let error = within("an end", leases.lease("other").wait(support::PATIENCE).acquire()).await.unwrap_err();
    assert_secret(&error, "letmein");
    let error = store_error::<()>(Err(error));
    assert!(!error.may_pass(), "{error}");
    drop(lease);
}

/// Neither the error nor anything behind it says the password.
#[track_caller]
fn assert_secret(error: &Error, password: &str) {
    let mut next: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = next {
        let shown = format!("{error} {error:?} {error:#?}");
        assert!(!shown.contains(password), "{shown}");
        next = error.source();
    }
}

/// A user with these permissions, and a URL to connect as it.
fn user(server: &Server, rules: &str) -> String {
    let mut words = vec!["ACL", "SETUSER", "worker", "reset", "on", ">pw"];
    words.extend(rules.split(' '));
    server.cmd(&words);
    server.url_as("worker", "pw")
}

/// What the documentation says that a user needs, without keys and channels.
const COMMANDS: &str = "+ping +info +client|id +eval +evalsha +time +get +set +del +pttl +pexpire +exists +strlen \
                        +zadd +zrem +zrange +zrevrange +zrank +zscore +zcard +zremrangebyrank +hset +hdel +hmget +publish";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_without_the_right_to_run_scripts_is_refused_as_it_connects() {
    let server = Server::start();
    for rules in ["~* &* +@all -eval", "~* &* +ping +info +client", "~* &* +@all -@scripting"] {
        let error = within("an answer", Leases::connect(&user(&server, rules))).await.unwrap_err();
        let refused = store_error::<()>(Err(error));
        assert!(matches!(refused, StoreError::Refused(_)), "{refused}");
        assert!(refused.to_string().contains("+eval"), "{refused}");
        let words = refused.source().expect("Redis' own words").to_string();
        assert!(words.contains("NOPERM"), "{words}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_the_user_may_not_touch_is_refused_at_once_and_others_work() {
    let server = Server::start();
    let url = user(&server, &format!("~jobs:* ~{{jobs:* &leasehold:* {COMMANDS} +subscribe"));
    let leases = Leases::connect(&url).await.unwrap();
    let refused = store_error(within("at once", leases.lease("k").wait(Wait::Forever).acquire()).await);
    assert!(matches!(refused, StoreError::Refused(_)), "{refused}");
    assert!(refused.source().is_some_and(|words| words.to_string().contains("NOPERM")), "{refused:?}");
    let lease = within("its own", leases.lease("jobs:1").acquire()).await.unwrap();
    assert!(leases.inspect("jobs:1").await.unwrap().is_some());
    lease.release().await.unwrap();
    assert_eq!(server.keys(), ["{jobs:1}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_publish_and_subscribe_it_works_only_slower() {
    let server = Server::start();
    for rules in [
        format!("~* resetchannels {COMMANDS} +subscribe"),
        format!("~* &* {} +subscribe", COMMANDS.replace(" +publish", "")),
        format!("~* resetchannels {}", COMMANDS.replace(" +publish", "")),
    ] {
        let url = user(&server, &rules);
        let connect = || async { Leases::builder().ttl(Duration::from_secs(1)).connect(&url).await.unwrap() };
        let (here, there) = (connect().await, connect().await);
        let held = here.lease("k").acquire().await.unwrap();
        let waiter = tokio::spawn(there.lease("k").wait(support::PATIENCE).acquire());
        until("it stands in line", || server.cmd(&["ZCARD", "{k}:queue"]).int() == 1).await;
        held.release().await.unwrap();
        let lease = within("its turn", waiter).await.unwrap().unwrap();
        let next = lease.valid_until() + Duration::from_millis(500);
        until("a renewal", || lease.valid_until() > next).await;
        assert!(here.force_release("k").await.unwrap());
        within("the loss", lease.lost()).await;
        until("only a fence", || server.keys() == ["{k}:fence"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permission_that_is_taken_away_is_named_in_the_loss_and_in_the_error() {
    let server = Server::start();
    let url = user(&server, "~* &* +@all");
    let leases = Leases::builder().ttl(Duration::from_secs(1)).connect(&url).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    server.cmd(&["ACL", "SETUSER", "worker", "-@scripting"]);
    let error = store_error(within("at once", leases.lease("other").acquire()).await);
    assert!(matches!(error, StoreError::Refused(_)), "{error}");
    let lost = within("the loss", lease.lost()).await;
    assert!(lost.to_string().contains("+eval"), "{lost}");
}

/// It would answer `CROSSSLOT` to whatever shares a list with another key.
#[tokio::test]
async fn a_member_of_a_cluster_is_refused_as_it_connects() {
    let server = Server::with(&["--cluster-enabled", "yes"]);
    server.cmd(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let Err(error) = Leases::connect(&server.url()).await else { panic!("it was taken") };
    assert!(format!("{error:?}").contains("name the cluster: `redis-cluster://`"), "{error:?}");
}
