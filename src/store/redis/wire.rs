//! One connection to one server. The only place, with the inbox, that knows the client library.
use super::{
    address::{Address, Target},
    answer::{Answer, Had, Word},
    cluster::moving,
    protocol::{Arg, LONGEST, Op, PAGE, Sending, Verb},
    sentinels::Moves,
    server_error::ServerError,
    server_info::{Doubt, ServerInfo},
};
use crate::{
    clock::{Clock, Moment},
    error::StoreError,
    settings::Replicas,
};
use fred::{
    error::Error as FredError,
    interfaces::ClientLike,
    prelude::{Builder, Client, TcpConfig},
    types::{
        ClusterHash, ConnectHandle, CustomCommand, RespVersion, Value,
        config::{Blocking, Config, Server, ServerConfig},
        scripts::Script,
    },
};
use futures_util::future::{maybe_done, try_join};
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::LazyLock,
    task::Poll,
    time::Duration,
};

/// How long a connection may take until the page has answered on it. A server that needs longer is not there.
const CONNECT: Duration = Duration::from_secs(2);

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::from_lua(PAGE));

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
    /// When to leave the server, if sentinels named it.
    moves: Option<Moves>,
    /// Those that have to have what is claimed or renewed.
    replicas: Option<Replicas>,
}

impl Wire {
    /// Connects, and lets the page answer an empty list: now the server knows it, we know its time, and that we may.
    pub(super) async fn open(address: &Address, clock: &Clock) -> Result<(Wire, Moment, u64), StoreError> {
        let open = |target: Target| async move {
            let (server, tls) = (target.server.clone(), target.login.uses_tls());
            within_time(&server, tls, async {
                let mut wire = Wire::reach(target, 32).await?;
                wire.replicas = address.replicas();
                let sent = clock.now();
                let time = wire.introduce().await?.ok_or_else(|| StoreError::unavailable(UNREADABLE))?;
                wire.look_at_it(address, &server).await?;
                Ok((wire, sent, time))
            })
            .await
        };
        address.reach(open).await
    }

    /// Connects for a subscription: with room for so many words that wait to be heard.
    pub(super) async fn open_for_words(address: &Address, room: usize) -> Result<Wire, StoreError> {
        let open = |target: Target| async move {
            let (server, tls) = (target.server.clone(), target.login.uses_tls());
            within_time(&server, tls, Wire::reach(target, room)).await
        };
        address.reach(open).await
    }

    /// An empty list, by its text and then by its hash, so that it shows at once whether we may use both; and whether
    /// replicas are counted here. The server's time.
    async fn introduce(&self) -> Result<Option<u64>, StoreError> {
        if self.replicas.is_some() {
            let (wait, args) = wait(Replicas { wanted: 0, within: Duration::ZERO });
            self.client.custom::<Value, _>(wait, args).await.map_err(explain)?;
        }
        let by_hash = async {
            match self.send(Page::ByHash, &[], |_| 0).await {
                // Somebody has emptied the cache between the two.
                Err(Failure::Said(error)) if error.is_no_script() => Ok(()),
                said => said.map(drop),
            }
        };
        match try_join(self.send(Page::ByText, &[], |_| 0), by_hash).await {
            Ok((reply, ())) => Ok(reply.time),
            Err(Failure::Said(error)) => Err(error.classify()),
            Err(Failure::Lost(error)) => Err(error),
        }
    }

    /// It has to be what it was named as. What else may betray a lease is told.
    async fn look_at_it(&self, address: &Address, server: &Server) -> Result<(), StoreError> {
        let command = CustomCommand::new_static("INFO", ClusterHash::Random, false);
        let said: Result<String, FredError> = self.client.custom(command, Vec::<Value>::new()).await;
        let info = match said {
            Ok(info) => ServerInfo::read(&info),
            Err(error) => {
                address.tell(server, [Doubt::unknown(error.details())]);
                ServerInfo::default()
            }
        };
        address.suits(server, &info)?;
        address.tell(server, info.doubts());
        Ok(())
    }

    async fn reach(target: Target, room: usize) -> Result<Wire, StoreError> {
        let Target { server, login, moves } = target;
        let mut wire = Wire::connect(login, &server, room).await.map_err(|error| not_connected(&server, error))?;
        wire.moves = moves;
        Ok(wire)
    }

    /// Connects to one server with these credentials.
    pub(super) async fn connect(login: Config, server: &Server, room: usize) -> Result<Wire, FredError> {
        // How connections are kept, and what is said on them, is ours to choose.
        let config = Config {
            server: ServerConfig::Centralized { server: server.clone() },
            fail_fast: true,
            blocking: Blocking::Block,
            version: RespVersion::RESP2,
            ..login
        };
        let client = Builder::from_config(config)
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
        let wire = Wire { client, task, moves: None, replicas: None };
        outcome.await?;
        Ok(wire)
    }

    /// A list of operations, written when first polled. Dropping it doesn't take it back.
    ///
    /// A list that [waits](Wire::waits) is followed by a WAIT, which counts the replicas that have it; there may be more in
    /// it than a server should carry out at once, for they share the WAIT. `server_time` says what time it is on the server
    /// at one of our moments, in microseconds.
    pub(super) fn send<'a>(
        &self,
        page: Page,
        ops: impl IntoIterator<Item = &'a Op>,
        server_time: impl Fn(Moment) -> u64,
    ) -> Sent {
        let ops: Vec<&Op> = ops.into_iter().collect();
        if let [op] = *ops
            && matches!(op.sending, Sending::Asking { .. } | Sending::Bare { .. })
        {
            return moving::send(&self.client, op, words(op, &server_time));
        }
        let counting = self.replicas.filter(|_| ops.iter().any(|op| self.waits(op)));
        let (mut commands, mut counts) = (vec![], vec![]);
        for part in parts(&ops) {
            commands.push(call(page, part, &server_time));
            counts.push(part.len());
        }
        commands.extend(counting.map(wait));
        let client = self.client.clone();
        Box::pin(async move {
            let asked = commands.into_iter().map(|(command, args)| client.custom::<Value, _>(command, args));
            let mut replies = in_order(asked).await;
            let had = counting.and_then(|_| replies.pop()).map(had);
            let mut whole = Reply { time: None, answers: vec![] };
            for (reply, count) in replies.into_iter().zip(counts) {
                let part = decode(reply.map_err(failure)?, count)?;
                whole.time = whole.time.or(part.time);
                whole.answers.extend(part.answers);
            }
            if let Some(had) = had.transpose()? {
                let told = |answer: Answer| answer.on_replicas(Some(had.clone()));
                whole.answers = whole.answers.into_iter().map(told).collect();
            }
            Ok(whole)
        })
    }

    pub(super) fn counts_replicas(&self) -> bool {
        self.replicas.is_some()
    }

    /// Whether replicas have to have what this does, so that its list holds up the connection until they do.
    pub(super) fn waits(&self, op: &Op) -> bool {
        self.counts_replicas() && matches!(op.verb, Verb::Claim | Verb::Renew)
    }

    /// Until the connection is gone, or leads to a server that is no longer the primary.
    pub(super) async fn ended(&mut self) -> StoreError {
        let away = async {
            match &mut self.moves {
                Some(moves) => moves.away().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            end = &mut self.task => {
                let lost = StoreError::unavailable(LOST);
                match end {
                    Ok(Err(error)) => lost.with_source(error),
                    Ok(Ok(())) | Err(_) => lost,
                }
            }
            elsewhere = away => elsewhere,
        }
    }
}

impl Drop for Wire {
    /// The task owns the socket: without this, both would outlive every handle.
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) const LOST: &str = "the connection to Redis was lost";
const UNREADABLE: &str = "the answer was not one of Redis'; is there a proxy in between?";

/// The operations in lists that a server may carry out at once; one empty list if there are none.
fn parts<'a>(ops: &'a [&'a Op]) -> impl Iterator<Item = &'a [&'a Op]> {
    let none = ops.is_empty().then_some(ops);
    none.into_iter().chain(ops.chunks(LONGEST))
}

fn call(page: Page, ops: &[&Op], server_time: &impl Fn(Moment) -> u64) -> (CustomCommand, Vec<Value>) {
    let (command, script) = match page {
        Page::ByHash => ("EVALSHA", Value::from(SCRIPT.sha1().clone())),
        Page::ByText => ("EVAL", Value::from_static_str(PAGE)),
    };
    let command = CustomCommand::new_static(command, ClusterHash::Random, false);
    let (mut keys, mut args) = (vec![script, Value::Integer(0)], vec![]);
    for op in ops {
        keys.extend(op.keys.iter().map(|k| Value::from(k.as_str())));
        args.extend(words(op, server_time));
    }
    keys[1] = number(keys.len() as u64 - 2);
    keys.append(&mut args);
    (command, keys)
}

/// Counts the replicas that have what was written before it on the same connection. No time would mean for ever.
fn wait(replicas: Replicas) -> (CustomCommand, Vec<Value>) {
    let within = u64::try_from(replicas.within.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1);
    let command = CustomCommand::new_static("WAIT", ClusterHash::Random, false);
    (command, vec![number(replicas.wanted.into()), number(within)])
}

/// The answer to a WAIT.
///
/// # Errors
/// When the connection is done for.
fn had(reply: Result<Value, FredError>) -> Result<Had, Failure> {
    match reply.map_err(failure) {
        Ok(count) => match count.as_u64().and_then(|count| u32::try_from(count).ok()) {
            Some(count) => Ok(Ok(count)),
            None => Err(Failure::Lost(StoreError::unavailable(UNREADABLE))),
        },
        Err(Failure::Said(error)) => Ok(Err(error)),
        Err(lost) => Err(lost),
    }
}

/// The outputs of all. Each is polled after those before it, for it is the first poll that writes a command.
async fn in_order<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| Box::pin(maybe_done(future))).collect();
    poll_fn(|cx| {
        let pending = futures.iter_mut().map(|future| future.as_mut().poll(cx).is_pending());
        // Each of them is polled, also behind one that is pending.
        if pending.fold(false, |any, this| any | this) { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    futures.iter_mut().filter_map(|future| future.as_mut().take_output()).collect()
}

/// What an operation says after its keys.
fn words<'a>(op: &'a Op, server_time: &'a impl Fn(Moment) -> u64) -> impl Iterator<Item = Value> + 'a {
    std::iter::once(Value::from_static_str(op.verb.as_str())).chain(op.args.iter().map(|arg| match arg {
        Arg::Text(text) => Value::from(text.as_str()),
        Arg::Bytes(bytes) => Value::from(bytes.as_slice()),
        Arg::Number(n) => number(*n),
        Arg::Until(at) => number(server_time(*at)),
    }))
}

pub(super) fn number(n: u64) -> Value {
    i64::try_from(n).map_or_else(|_| Value::from(n.to_string()), Value::Integer)
}

pub(super) fn failure(error: FredError) -> Failure {
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

async fn within_time<T>(
    server: &Server,
    tls: bool,
    opening: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    tokio::time::timeout(CONNECT, opening).await.unwrap_or_else(|_| {
        let or = if tls { ", or is it one that speaks no TLS" } else { "" };
        let what = format!("Redis at {server} gave no answer within {CONNECT:?}; does it hang{or}?");
        Err(StoreError::unavailable(what))
    })
}

pub(super) fn not_connected(server: &Server, error: FredError) -> StoreError {
    let said = ServerError::new(error.details());
    if said.code().is_some() {
        return said.classify();
    }
    if let Some(trouble) = tls_trouble(&error) {
        return trouble.with_source(error);
    }
    StoreError::unavailable(format!("no connection to Redis at {server}; is it running there?")).with_source(error)
}

/// What two sides that cannot agree on TLS will not agree on later either. rustls' errors come as errors of the socket, told
/// apart by their text.
pub(super) fn tls_trouble(error: &FredError) -> Option<StoreError> {
    if !super::address::TLS {
        return None;
    }
    let says = |word| error.details().contains(word);
    if says("InvalidMessage(") {
        return Some(StoreError::refused("what listens there speaks no TLS; `redis://` does without"));
    }
    if says("AlertReceived(") {
        return Some(StoreError::refused("Redis did not accept our certificate, or asks for one; see `connect_with`"));
    }
    #[cfg(any(feature = "tls-rustls", feature = "tls-rustls-ring", feature = "tls-native"))]
    if says("InvalidCertificate(") || *error.kind() == fred::error::ErrorKind::Tls {
        let what = "Redis' certificate was not accepted; check it, its authority, and the host in the URL";
        return Some(StoreError::refused(what));
    }
    None
}

/// A list's answer, or a word that nobody of ours would say.
pub(super) fn decode(reply: Value, count: usize) -> Result<Reply, Failure> {
    read(reply, count).ok_or_else(|| Failure::Lost(StoreError::unavailable(UNREADABLE)))
}

/// `{time, answer, ..}`; `None` for anything else, also for too many or too few answers.
fn read(reply: Value, count: usize) -> Option<Reply> {
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

    #[test]
    fn a_reply_of_another_shape_is_no_reply() {
        let text = |s: &'static str| Value::from_static_str(s);
        let list = Value::Array;
        let one = || list(vec![text("1"), list(vec![text("released")])]);
        assert!(read(one(), 1).is_some_and(|r| r.time == Some(1) && r.answers[0].freed().is_ok()));
        assert!(read(one(), 2).is_none(), "one answer for two operations");
        let timeless = read(list(vec![text("0"), text("gone")]), 1);
        assert!(timeless.is_some_and(|r| r.time.is_none() && r.answers[0].freed().is_ok()));
        for odd in
            [Value::Null, text("OK"), list(vec![]), list(vec![text("x")]), list(vec![list(vec![]), text("gone")])]
        {
            assert!(read(odd, 0).is_none());
        }
    }
}
