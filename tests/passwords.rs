//! Passwords are shown nowhere: not in the log of leasehold or of the client library, whatever its level, not in an error
//! or its sources, not in what `Debug` shows.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;

use leasehold::{
    Error, Leases, LeasesBuilder, Wait,
    store::{
        quorum::QuorumStore,
        redis::{
            RedisStore,
            fred::types::config::{Config, Server as Host, ServerConfig},
        },
    },
};
use std::{
    fmt::Debug,
    sync::{LazyLock, Mutex},
    time::Duration,
};
use support::{
    log::Log,
    sentinels::SERVICE,
    server::{Server, free_port},
    within,
};

/// In every password of this test, right or wrong, and in nothing else.
const SECRET: &str = "hunter";
/// It has to be escaped in a URL.
const PRIMARYS: &str = "primary's &hunter@1";
const SENTINELS: &str = "sentinels/hunter#2";
const WRONG: &str = "wrong:hunter?3";

const TTL: Duration = Duration::from_millis(900);

fn escaped(password: &str) -> String {
    let escape = |byte: u8| match byte {
        b if b.is_ascii_alphanumeric() => char::from(b).to_string(),
        b => format!("%{b:02X}"),
    };
    password.bytes().map(escape).collect()
}

/// All that was shown to anybody: what the client library logs comes here too.
struct Shown;

static SHOWN: LazyLock<Mutex<Vec<String>>> = LazyLock::new(Mutex::default);

impl log::Log for Shown {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        SHOWN.lock().unwrap().push(format!("{}: {}", record.target(), record.args()));
    }
    fn flush(&self) {}
}

fn show(what: impl Debug) {
    SHOWN.lock().unwrap().push(format!("{what:?} {what:#?}"));
}

/// Its words and those of its sources, and what `Debug` makes of all of them.
fn show_error(error: &(dyn std::error::Error + 'static)) {
    show(error);
    let mut next = Some(error);
    while let Some(error) = next {
        SHOWN.lock().unwrap().push(error.to_string());
        show(error);
        next = error.source();
    }
}

async fn shows_error<T: Debug>(what: &str, asked: impl Future<Output = Result<T, Error>>) {
    let error = within(what, asked).await.unwrap_err();
    show_error(&std::io::Error::from(error.clone()));
    show_error(&error);
}

fn builder() -> LeasesBuilder {
    let builder = Leases::builder().ttl(TTL).attempt(TTL / 6).wait(TTL);
    show(&builder);
    builder
}

/// Everything that can be held in hand, and looked at.
async fn show_all(leases: &Leases) {
    show(leases);
    show(leases.lease("k"));
    show(leases.lock("k"));
    let lease = within("a lease", leases.lease("k").wait(Wait::Forever).acquire()).await.unwrap();
    show(&lease);
    show(lease.view());
    show(leases.inspect("k").await.unwrap());
    show(lease.release().await.unwrap());
}

/// The primary that `leases` are on is replaced by a replica, forgets the password, and goes.
async fn trouble(leases: &Leases, primary: &mut Server) {
    let mut side = primary.connect();
    side.cmd(&["AUTH", PRIMARYS]);
    let lease = within("a lease", leases.lease("held").acquire()).await.unwrap();
    side.cmd(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]);
    shows_error("READONLY", leases.lease("k").acquire()).await;
    show(within("the loss", lease.lost()).await);
    side.cmd(&["REPLICAOF", "NO", "ONE"]);
    within("it is a primary again", async { while leases.lease("k").acquire().await.is_err() {} }).await;

    side.cmd(&["CONFIG", "SET", "requirepass", "another"]);
    side.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
    shows_error("WRONGPASS", leases.lease("k").acquire()).await;
    primary.kill();
    shows_error("nobody there", leases.lease("k").acquire()).await;
    primary.restart();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_are_shown_nowhere() {
    let tracing = Log::of_all();
    log::set_boxed_logger(Box::new(Shown)).unwrap();
    log::set_max_level(log::LevelFilter::Trace);

    one_server().await;
    sentinels().await;
    quorum().await;
    urls_that_are_none().await;

    let said: Vec<String> = tracing.lines().into_iter().map(|(_, line)| line).collect();
    let shown = SHOWN.lock().unwrap().clone();
    // Both were listened to, at every level.
    assert!(said.iter().any(|line| line.contains("connecting to Redis again")), "{said:#?}");
    assert!(said.iter().any(|line| line.contains("could not connect to Redis")), "{said:#?}");
    for words in ["fred::", "WRONGPASS", "READONLY", "Recv"] {
        assert!(shown.iter().any(|line| line.contains(words)), "{words}: {shown:#?}");
    }
    let secret = |line: &&String| line.contains(SECRET);
    let found: Vec<_> = said.iter().chain(&shown).filter(secret).collect();
    assert!(found.is_empty(), "{found:#?}");
    println!("{} lines of leasehold's, {} of others", said.len(), shown.len());
}

/// The password of a server, in its URL and in a configuration.
async fn one_server() {
    let mut server = Server::with(&["--requirepass", PRIMARYS]);
    let url = |password: &str| server.url_as("default", &escaped(password));
    let config = |password: &str| Config {
        server: ServerConfig::new_centralized("127.0.0.1", server.port()),
        username: Some("default".into()),
        password: Some(password.into()),
        ..Config::default()
    };
    // What would be found, were it shown.
    assert!(format!("{:?}", config(PRIMARYS)).contains(SECRET));

    shows_error("a wrong password", builder().connect(&url(WRONG))).await;
    shows_error("a wrong password", builder().connect_with(config(WRONG))).await;
    shows_error("a wrong password", RedisStore::connect(&url(WRONG))).await;
    shows_error("a wrong password", RedisStore::connect_with(config(WRONG))).await;
    shows_error("no password", builder().connect(&server.url())).await;
    let store = RedisStore::connect(&url(PRIMARYS)).await.unwrap();
    show(&store);
    show(store.replicas(1, TTL / 6).await.unwrap());

    let by_url = builder().connect(&url(PRIMARYS)).await.unwrap();
    let by_config = builder().ttl(6 * TTL).replicas(1, TTL / 6).connect_with(config(PRIMARYS)).await.unwrap();
    show_all(&by_url).await;
    shows_error("too few replicas", by_config.lease("k").acquire()).await;
    trouble(&by_url, &mut server).await;
    show(&by_config);
}

/// The passwords of a primary and of those who name it.
async fn sentinels() {
    let mut primary = Server::with(&["--requirepass", PRIMARYS]);
    let mut sentinel = Server::sentinel(&format!(
        "requirepass \"{SENTINELS}\"\nsentinel monitor {SERVICE} 127.0.0.1 {} 1\nsentinel auth-pass {SERVICE} \"{PRIMARYS}\"\n",
        primary.port()
    ));
    let port = sentinel.port();
    let url = |primarys: &str, sentinels: &str| {
        let [primarys, sentinels] = [primarys, sentinels].map(escaped);
        format!(
            "redis-sentinel://:{primarys}@127.0.0.1:{port}?sentinelServiceName={SERVICE}&sentinelPassword={sentinels}"
        )
    };
    let config = |primarys: &str, sentinels: &str| Config {
        server: ServerConfig::Sentinel {
            hosts: vec![Host::new("127.0.0.1", port)],
            service_name: SERVICE.into(),
            username: None,
            password: Some(sentinels.into()),
        },
        password: Some(primarys.into()),
        ..Config::default()
    };
    for (primarys, sentinels) in [(WRONG, SENTINELS), (PRIMARYS, WRONG), (WRONG, WRONG)] {
        shows_error("a wrong password", builder().connect(&url(primarys, sentinels))).await;
        shows_error("a wrong password", builder().connect_with(config(primarys, sentinels))).await;
    }
    let by_url = builder().connect(&url(PRIMARYS, SENTINELS)).await.unwrap();
    let by_config = builder().connect_with(config(PRIMARYS, SENTINELS)).await.unwrap();
    show(RedisStore::connect(&url(PRIMARYS, SENTINELS)).await.unwrap());
    show_all(&by_url).await;
    show_all(&by_config).await;
    trouble(&by_config, &mut primary).await;
    sentinel.kill();
    shows_error("no sentinel", builder().connect(&url(PRIMARYS, SENTINELS))).await;
    shows_error("no sentinel", builder().connect_with(config(PRIMARYS, SENTINELS))).await;
    primary.kill();
    shows_error("nobody at all", by_url.lease("k").acquire()).await;
}

/// The passwords of a quorum's members.
async fn quorum() {
    let mut servers: Vec<_> = (0..3).map(|_| Server::with(&["--requirepass", PRIMARYS])).collect();
    let urls = |password: &str| -> Vec<String> {
        servers.iter().map(|server| server.url_as("default", &escaped(password))).collect()
    };
    let right = urls(PRIMARYS);
    shows_error("a wrong password", builder().connect_quorum(urls(WRONG))).await;
    let one_wrong = [&right[..2], &urls(WRONG)[2..]].concat();
    shows_error("a wrong password", builder().connect_quorum(&one_wrong)).await;
    shows_error("one named twice", builder().connect_quorum([&right[0], &right[1], &right[1]])).await;
    show(QuorumStore::connect(&right).await.unwrap());
    let leases = builder().quarantine(Duration::ZERO).connect_quorum(&right).await.unwrap();
    show_all(&leases).await;
    servers[0].kill();
    servers[1].kill();
    shows_error("no majority", leases.lease("k").acquire()).await;
    shows_error("no majority", builder().connect_quorum(&right)).await;
}

async fn urls_that_are_none() {
    for url in [
        "http://user:hunter@h",
        "redis://user:hunter@h:port",
        "redis://user:hunter@h?hunter=1",
        "redis://hunter:hunter@h:1/hunter",
        "hunter",
        "redis-sentinel://:hunter@h:1",
        "redis-sentinel://h:1?sentinelServiceName=m&hunter=hunter",
        "redis-sentinel://h:1?sentinelServiceName=m&sentinelPassword=hunter&sentinelPassword=hunter",
        "redis-cluster://:hunter@h:x",
        "unix://:hunter@h",
    ] {
        shows_error(url, builder().connect(url)).await;
        shows_error(url, RedisStore::connect(url)).await;
    }
}
