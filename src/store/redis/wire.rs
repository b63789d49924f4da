//! One connection to one server. The only place, with the inbox, that knows the client library.
use super::{
    protocol::{Answer, Arg, Op, PAGE, Word},
    server_error::ServerError,
};
use crate::{
    clock::{Clock, Moment},
    error::{Invalid, StoreError},
};
use fred::{
    error::Error as FredError,
    interfaces::ClientLike,
    prelude::{Builder, Client, TcpConfig},
    types::{
        ClusterHash, ConnectHandle, CustomCommand, Value,
        config::{Config, ServerConfig},
        scripts::Script,
    },
};
use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::LazyLock,
    task::Poll,
    time::Duration,
};

/// How long a connection may take until the page has answered on it. A server that needs longer is not there.
const CONNECT: Duration = Duration::from_secs(2);

const TLS: bool = cfg!(any(feature = "tls-rustls", feature = "tls-rustls-ring", feature = "tls-native"));

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::from_lua(PAGE));

/// Where a server is, and as whom to speak to it.
#[derive(Clone)]
pub(super) struct Address(Config);

impl Address {
    /// # Errors
    /// [`Invalid`] when it is no URL of one Redis server, or asks for what this build cannot do.
    pub(super) fn parse(url: &str) -> Result<Self, Invalid> {
        let invalid = |rule| Err(Invalid::new("url", rule));
        // A URL may hold a password, so no rule quotes it.
        let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        match scheme.as_deref() {
            Some("redis") => {}
            Some("rediss") if TLS => {}
            Some("rediss") => {
                return invalid("`rediss://` needs TLS: turn on leasehold's feature `tls-rustls`, or `tls-native`");
            }
            Some("redis-sentinel" | "rediss-sentinel") => {
                return invalid("Sentinel is not supported yet; name the primary with `redis://`");
            }
            Some("redis-cluster" | "rediss-cluster") => {
                return invalid("Redis Cluster is not supported yet; `redis://` names one server");
            }
            Some("unix" | "redis+unix" | "redis-unix") => {
                return invalid("unix sockets are not supported yet; use `redis://` with a host");
            }
            _ => return invalid("starts with `redis://` or `rediss://`"),
        }
        match Config::from_url_centralized(url) {
            Ok(config) => Ok(Address(config)),
            Err(_) => invalid("has the form `redis://user:password@host:port/database`, all but the host optional"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.server {
            ServerConfig::Centralized { server } => write!(f, "{}:{}", server.host, server.port),
            _ => f.write_str("a server"),
        }
    }
}

/// What a list of operations was answered.
pub(super) struct Reply {
    /// The server's time, in microseconds, if it looked.
    pub(super) time: Option<u64>,
    /// One for each operation.
    pub(super) answers: Vec<Answer>,
}

/// Why a whole list was not answered.
pub(super) enum Failure {
    /// The server said so.
    Said(ServerError),
    /// No words of the server's: whether the list was carried out is not known, and the connection is done for.
    Lost(StoreError),
}

/// How the server is told which script to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Page {
    /// By its hash: short, and known to a server that has run it before.
    ByHash,
    /// By its text, which the server then remembers.
    ByText,
}

pub(super) type Sent = Pin<Box<dyn Future<Output = Result<Reply, Failure>> + Send>>;

/// A client of one connection, without a policy to connect again: when its connection ends, so does it.
pub(super) struct Wire {
    pub(super) client: Client,
    task: ConnectHandle,
}

impl Wire {
    /// Connects, and lets the page answer an empty list: now the server knows it, we know its time, and that we may.
    pub(super) async fn open(address: &Address, clock: &Clock) -> Result<(Wire, Moment, u64), StoreError> {
        let opened = tokio::time::timeout(CONNECT, async {
            let wire = Wire::connect(address, 32).await.map_err(|e| not_connected(address, e))?;
            let sent = clock.now();
            let reply = match wire.send(Page::ByText, &[], |_| 0).await {
                Ok(reply) => reply,
                Err(Failure::Said(error)) => return Err(error.classify()),
                Err(Failure::Lost(error)) => return Err(error),
            };
            wire.refuse_clusters().await?;
            let time = reply.time.ok_or_else(|| StoreError::unavailable(UNREADABLE))?;
            Ok((wire, sent, time))
        });
        opened.await.unwrap_or_else(|_| Err(silent(address)))
    }

    /// Connects for a subscription: with room for so many words that wait to be heard.
    pub(super) async fn open_for_words(address: &Address, room: usize) -> Result<Wire, StoreError> {
        match tokio::time::timeout(CONNECT, Wire::connect(address, room)).await {
            Ok(wire) => wire.map_err(|error| not_connected(address, error)),
            Err(_) => Err(silent(address)),
        }
    }

    /// A member of a cluster has only some of the keys, and takes no list whose keys are in different slots. A server that
    /// does not say what it is, is taken for what it should be.
    async fn refuse_clusters(&self) -> Result<(), StoreError> {
        let info = CustomCommand::new_static("INFO", ClusterHash::Random, false);
        let said: Result<String, FredError> = self.client.custom(info, vec!["cluster"]).await;
        match said {
            Ok(info) if info.contains("cluster_enabled:1") => Err(StoreError::refused(
                "the server is a member of a cluster, and Redis Cluster is not supported yet; name a single server",
            )),
            _ => Ok(()),
        }
    }

    async fn connect(address: &Address, room: usize) -> Result<Wire, FredError> {
        let client = Builder::from_config(address.0.clone())
            .with_performance_config(|p| p.broadcast_channel_capacity = room)
            .with_connection_config(|c| {
                // The caller's own bound comes first; these end what it may leave behind.
                c.connection_timeout = 2 * CONNECT;
                c.internal_command_timeout = 2 * CONNECT;
                // A second attempt would tell the caller that its own claim is somebody else's.
                c.max_command_attempts = 1;
                c.tcp = TcpConfig { nodelay: Some(true), ..TcpConfig::default() };
            })
            .build()?;
        // Polled once before the task starts, it has subscribed to the outcome; later it could miss it.
        let listener = client.clone();
        let mut outcome = Box::pin(listener.wait_for_connect());
        poll_fn(|cx| {
            let early = outcome.as_mut().poll(cx);
            debug_assert!(early.is_pending(), "connected before it was asked to");
            Poll::Ready(())
        })
        .await;
        let task = client.connect();
        let wire = Wire { client, task };
        outcome.await?;
        Ok(wire)
    }

    /// A list of operations, written when first polled. Dropping it doesn't take it back.
    ///
    /// `server_time` says what time it is on the server at one of our moments, in microseconds.
    pub(super) fn send<'a>(
        &self,
        page: Page,
        ops: impl IntoIterator<Item = &'a Op>,
        server_time: impl Fn(Moment) -> u64,
    ) -> Sent {
        let (command, script) = match page {
            Page::ByHash => ("EVALSHA", Value::from(SCRIPT.sha1().clone())),
            Page::ByText => ("EVAL", Value::from_static_str(PAGE)),
        };
        let command = CustomCommand::new_static(command, ClusterHash::Random, false);
        let (mut keys, mut args) = (vec![script, Value::Integer(0)], vec![]);
        let mut count = 0;
        for op in ops {
            count += 1;
            keys.extend(op.keys.iter().map(|k| Value::from(k.as_str())));
            args.push(Value::from_static_str(op.verb.as_str()));
            args.extend(op.args.iter().map(|arg| match arg {
                Arg::Text(text) => Value::from(text.as_str()),
                Arg::Bytes(bytes) => Value::from(bytes.as_slice()),
                Arg::Number(n) => number(*n),
                Arg::Until(at) => number(server_time(*at)),
            }));
        }
        keys[1] = number(keys.len() as u64 - 2);
        keys.append(&mut args);
        let client = self.client.clone();
        Box::pin(async move {
            let reply: Value = client.custom(command, keys).await.map_err(failure)?;
            decode(reply, count).ok_or_else(|| Failure::Lost(StoreError::unavailable(UNREADABLE)))
        })
    }

    /// Until the connection is gone.
    pub(super) async fn ended(&mut self) -> StoreError {
        let lost = StoreError::unavailable(LOST);
        match (&mut self.task).await {
            Ok(Err(error)) => lost.with_source(error),
            Ok(Ok(())) | Err(_) => lost,
        }
    }
}

impl Drop for Wire {
    /// The task owns the socket: without this, both would outlive every handle.
    fn drop(&mut self) {
        self.task.abort();
    }
}

const LOST: &str = "the connection to Redis was lost";
const UNREADABLE: &str = "the answer was not one of Redis'; is there a proxy in between?";

fn number(n: u64) -> Value {
    i64::try_from(n).map_or_else(|_| Value::from(n.to_string()), Value::Integer)
}

fn failure(error: FredError) -> Failure {
    let said = ServerError::new(error.details());
    match said.code() {
        Some(_) => Failure::Said(said),
        None => Failure::Lost(StoreError::unavailable(LOST).with_source(error)),
    }
}

/// What an error of fred's means.
pub(super) fn explain(error: FredError) -> StoreError {
    match failure(error) {
        Failure::Said(said) => said.classify(),
        Failure::Lost(error) => error,
    }
}

fn silent(address: &Address) -> StoreError {
    StoreError::unavailable(format!("Redis at {address} gave no answer within {CONNECT:?}; does it hang?"))
}

fn not_connected(address: &Address, error: FredError) -> StoreError {
    let said = ServerError::new(error.details());
    if said.code().is_some() {
        return said.classify();
    }
    // A certificate that is wrong stays wrong.
    #[cfg(any(feature = "tls-rustls", feature = "tls-rustls-ring", feature = "tls-native"))]
    if *error.kind() == fred::error::ErrorKind::Tls {
        let what = "Redis' certificate was not accepted; check it, and the host in the URL";
        return StoreError::refused(what).with_source(error);
    }
    StoreError::unavailable(format!("no connection to Redis at {address}; is it running there?")).with_source(error)
}

/// `{time, answer, ..}`; `None` for anything else, also for too many or too few answers.
fn decode(reply: Value, count: usize) -> Option<Reply> {
    let mut words = array(reply)?.into_iter();
    let time = words.next()?.as_u64()?;
    let answers: Vec<Answer> = words.map(answer).collect();
    (answers.len() == count).then_some(Reply { time: (time > 0).then_some(time), answers })
}

/// A word, or a list that begins with one.
fn answer(value: Value) -> Answer {
    Answer::new(match value {
        Value::Array(items) => items.into_iter().map(word).collect(),
        one => vec![word(one)],
    })
}

fn array(value: Value) -> Option<Vec<Value>> {
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

fn word(value: Value) -> Word {
    match value {
        Value::Integer(n) => Word::Int(n),
        Value::String(text) => Word::Text(text.as_bytes().to_vec()),
        Value::Bytes(bytes) => Word::Text(bytes.to_vec()),
        _ => Word::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(url: &str) -> &'static str {
        let invalid = Address::parse(url).err().unwrap_or_else(|| panic!("{url} was taken"));
        assert_eq!(invalid.setting, "url");
        invalid.rule
    }

    #[test]
    fn the_url_of_one_server_is_taken() {
        for url in ["redis://h", "redis://h:1/3", "redis://:p@h", "redis://u:p%40@h:1", "redis://[::1]:1", "REDIS://h"]
        {
            assert!(Address::parse(url).is_ok(), "{url}");
        }
        assert_eq!(Address::parse("redis://u:p@h").unwrap().to_string(), "h:6379");
    }

    #[test]
    fn any_other_url_is_refused_with_the_rule_it_breaks() {
        for url in ["", "h:6379", "http://h", "redis:/h", "redis//h"] {
            assert!(rule(url).contains("starts with"), "{url}: {}", rule(url));
        }
        for url in ["redis://", "redis://:1", "redis://h:x", "redis://h:99999", "redis://h/x", "redis://h/1/2"] {
            assert!(rule(url).contains("form"), "{url}: {}", rule(url));
        }
        assert!(rule("redis-sentinel://h:1?sentinelServiceName=m").contains("Sentinel"));
        assert!(rule("redis-cluster://h:1").contains("Cluster"));
        assert!(rule("redis+unix:///run/redis.sock").contains("unix"));
    }

    #[cfg(not(any(feature = "tls-rustls", feature = "tls-rustls-ring", feature = "tls-native")))]
    #[test]
    fn tls_without_its_feature_is_refused_with_the_feature_to_turn_on() {
        assert!(rule("rediss://h").contains("tls-rustls"));
    }

    #[test]
    fn a_reply_of_another_shape_is_no_reply() {
        let text = |s: &'static str| Value::from_static_str(s);
        let list = Value::Array;
        let one = || list(vec![text("1"), list(vec![text("released")])]);
        assert!(decode(one(), 1).is_some_and(|r| r.time == Some(1) && r.answers[0].freed().is_ok()));
        assert!(decode(one(), 2).is_none(), "one answer for two operations");
        let timeless = decode(list(vec![text("0"), text("gone")]), 1);
        assert!(timeless.is_some_and(|r| r.time.is_none() && r.answers[0].freed().is_ok()));
        for odd in
            [Value::Null, text("OK"), list(vec![]), list(vec![text("x")]), list(vec![list(vec![]), text("gone")])]
        {
            assert!(decode(odd, 0).is_none());
        }
    }
}
