//! Sentinels, who know which server is the primary.
//!
//! All are asked at once, and what more than half of them say is taken at once: so neither one that is dead or hangs
//! holds anything up, nor does one that lies or is late decide. Where no such majority answers, whoever answers is
//! believed, and the server that they name has to be a primary in its own words.
use super::{
    server_error::ServerError,
    wire::{LOST, Wire},
};
use crate::{
    clock::jittered,
    error::{Invalid, StoreError},
};
use fred::{
    error::Error as FredError,
    interfaces::{ClientLike, EventInterface, PubsubInterface},
    types::{
        ClusterHash, CustomCommand, Value,
        config::{Config, Server},
    },
};
use futures_util::{
    future::{join, join_all},
    stream::{FuturesUnordered, StreamExt},
};
use std::{fmt, time::Duration};
use tokio::{
    sync::{Notify, broadcast::error::RecvError, watch},
    time::timeout,
};

/// How long a sentinel may take to answer.
const ANSWER: Duration = Duration::from_secs(1);

/// How often they are asked though they say nothing by themselves.
const EVERY: Duration = Duration::from_secs(2);

/// How often they are asked while their primary lets us wait.
const SOON: Duration = Duration::from_millis(200);

pub(super) struct Sentinels {
    hosts: Vec<Server>,
    /// The primary, as they know it.
    service: String,
    /// Their own credentials, and TLS.
    login: Config,
    /// What a majority said last.
    said: watch::Sender<Option<Server>>,
}

impl Sentinels {
    pub(super) fn new(hosts: &[Server], service: &str, login: Config) -> Result<Self, Invalid> {
        let mut distinct: Vec<Server> = vec![];
        for host in hosts {
            if !distinct.contains(host) {
                distinct.push(host.clone());
            }
        }
        if distinct.is_empty() {
            return Err(Invalid::new("config", "names at least one sentinel"));
        }
        if service.is_empty() {
            return Err(Invalid::new(
                "url",
                "names the primary as the sentinels know it: `?sentinelServiceName=mymaster`",
            ));
        }
        Ok(Sentinels { hosts: distinct, service: service.to_owned(), login, said: watch::Sender::new(None) })
    }

    /// Where the primary is: one place if a majority of the sentinels names it, else each that was named, most often named
    /// first.
    pub(super) async fn primary(&self) -> Result<Vec<Server>, StoreError> {
        let answers = self.ask_all().await;
        if answers.votes.is_empty() { Err(self.nothing(answers)) } else { Ok(answers.places()) }
    }

    /// Until a majority names another server than this one, which lets us wait.
    pub(super) async fn another_than(&self, server: &Server) -> Server {
        loop {
            tokio::time::sleep(SOON).await;
            match self.ask_all().await.majority {
                Some(other) if other != *server => return other,
                _ => {}
            }
        }
    }

    /// Asks whenever a sentinel says that the primary is another, and now and then. A primary that was demoted takes writes
    /// for seconds after that, until it is told.
    pub(super) async fn follow(&self) {
        let hint = Notify::new();
        let ask = async {
            loop {
                // Not all learn of it at once, and each says so when it does.
                if timeout(jittered(EVERY), hint.notified()).await.is_ok() {
                    tracing::debug!(sentinels = %self, "a sentinel says that the primary is another");
                }
                if let Some(named) = self.ask_all().await.majority {
                    self.said.send_replace(Some(named));
                }
            }
        };
        join(ask, join_all(self.hosts.iter().map(|sentinel| self.listen(sentinel, &hint)))).await;
    }

    /// Waits for what a sentinel says by itself. It only speeds things up, so trouble is no news.
    async fn listen(&self, sentinel: &Server, hint: &Notify) {
        loop {
            if let Err(error) = self.hear(sentinel, hint).await {
                tracing::debug!(%sentinel, %error, "hears nothing from a sentinel");
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    async fn hear(&self, sentinel: &Server, hint: &Notify) -> Result<(), StoreError> {
        let failed = |error| not_answered(sentinel, error);
        let silent = |_| StoreError::unavailable("no answer");
        let subscribed = async {
            let wire = Wire::connect(self.login.clone(), sentinel, 32).await?;
            let words = wire.client.message_rx();
            wire.client.subscribe("+switch-master").await?;
            // Only its answer shows that the subscription was taken.
            wire.client.ping::<Value>(None).await?;
            Ok((wire, words))
        };
        let (mut wire, mut words) = timeout(ANSWER, subscribed).await.map_err(silent)?.map_err(failed)?;
        // What was said while nobody heard is gone.
        hint.notify_one();
        let client = wire.client.clone();
        loop {
            tokio::select! {
                word = words.recv() => match word {
                    Ok(_) | Err(RecvError::Lagged(_)) => hint.notify_one(),
                    Err(RecvError::Closed) => return Ok(()),
                },
                why = wire.ended() => return Err(why),
                () = tokio::time::sleep(EVERY) => {
                    timeout(ANSWER, client.ping::<Value>(None)).await.map_err(silent)?.map_err(failed)?;
                }
            }
        }
    }

    /// Tells when the server is to be left.
    pub(super) fn moves_from(&self, server: &Server) -> Moves {
        // What was said before counts as heard: to open a connection, they were asked anew.
        Moves { server: server.clone(), said: self.said.subscribe() }
    }

    /// Until a majority says something, be it what it said before.
    pub(super) async fn word(&self) {
        // The sender is ours, so it cannot be gone.
        self.said.subscribe().changed().await.ok();
    }

    async fn ask_all(&self) -> Answers {
        let mut answers = Answers::default();
        let mut asked: FuturesUnordered<_> = self.hosts.iter().map(|host| self.ask(host)).collect();
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(Some(named)) => {
                    if answers.count(named, self.hosts.len()) {
                        break;
                    }
                }
                Ok(None) => answers.unknown = true,
                Err(error) => answers.keep(error),
            }
        }
        answers
    }

    async fn ask(&self, sentinel: &Server) -> Result<Option<Server>, StoreError> {
        let asked = async {
            let wire = Wire::connect(self.login.clone(), sentinel, 32).await?;
            let command = CustomCommand::new_static("SENTINEL", ClusterHash::Random, false);
            let words = vec!["get-master-addr-by-name", self.service.as_str()];
            wire.client.custom::<Option<(String, u16)>, _>(command, words).await
        };
        match timeout(ANSWER, asked).await {
            Ok(Ok(named)) => Ok(named.map(|(host, port)| server(host, port))),
            Ok(Err(error)) => Err(not_answered(sentinel, error)),
            Err(_) => Err(StoreError::unavailable(format!("the sentinel at {sentinel} gave no answer"))),
        }
    }

    /// Nobody named a server. What won't pass by itself is told before what may.
    fn nothing(&self, answers: Answers) -> StoreError {
        match answers.trouble {
            Some(refused) if !refused.may_pass() => refused,
            _ if answers.unknown => StoreError::refused(format!(
                "the sentinels know no primary named `{}`; check `sentinelServiceName` in the URL",
                self.service
            )),
            trouble => {
                let hosts = Hosts(&self.hosts);
                let what = format!("no sentinel answers at {hosts}; the URL names the sentinels, not the servers");
                let error = StoreError::unavailable(what);
                match trouble {
                    Some(last) => error.with_source(last),
                    None => error,
                }
            }
        }
    }

    #[cfg(test)]
    pub(super) fn login(&self) -> &Config {
        &self.login
    }
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` of the sentinels {}", self.service, Hosts(&self.hosts))
    }
}

struct Hosts<'a>(&'a [Server]);

impl fmt::Display for Hosts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, host) in self.0.iter().enumerate() {
            write!(f, "{}{host}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// Tells a connection when its server is to be left.
pub(super) struct Moves {
    server: Server,
    said: watch::Receiver<Option<Server>>,
}

impl Moves {
    /// Until a majority of the sentinels has named another server than ours.
    pub(super) async fn away(&mut self) -> StoreError {
        while self.said.changed().await.is_ok() {
            if let Some(named) = &*self.said.borrow_and_update()
                && *named != self.server
            {
                return StoreError::unavailable(format!("the sentinels name {named} as the primary now"));
            }
        }
        std::future::pending().await
    }
}

/// What the sentinels said when they were asked.
#[derive(Default)]
struct Answers {
    /// Which server was named how often, in the order in which they were named first.
    votes: Vec<(Server, usize)>,
    /// The one that more than half named.
    majority: Option<Server>,
    /// One doesn't know the name.
    unknown: bool,
    trouble: Option<StoreError>,
}

impl Answers {
    /// Whether it has a majority of so many now.
    fn count(&mut self, named: Server, of: usize) -> bool {
        let at = self.votes.iter().position(|(server, _)| *server == named).unwrap_or_else(|| {
            self.votes.push((named, 0));
            self.votes.len() - 1
        });
        let (server, votes) = &mut self.votes[at];
        *votes += 1;
        if *votes * 2 > of {
            self.majority = Some(server.clone());
        }
        self.majority.is_some()
    }

    /// Keeps the last trouble that may pass, and rather one that won't.
    fn keep(&mut self, error: StoreError) {
        if self.trouble.as_ref().is_none_or(StoreError::may_pass) {
            self.trouble = Some(error);
        }
    }

    fn places(mut self) -> Vec<Server> {
        if let Some(server) = self.majority {
            return vec![server];
        }
        self.votes.sort_by_key(|(_, votes)| std::cmp::Reverse(*votes));
        self.votes.into_iter().map(|(server, _)| server).collect()
    }
}

/// An address of IPv6 in the form in which a host and a port are told apart.
fn server(host: String, port: u16) -> Server {
    if host.contains(':') { Server::new(format!("[{host}]"), port) } else { Server::new(host, port) }
}

fn not_answered(sentinel: &Server, error: FredError) -> StoreError {
    let said = ServerError::new(error.details());
    let refused = |what| StoreError::refused(format!("the sentinel at {sentinel} {what}"));
    match said.code() {
        Some("NOAUTH") => refused(
            "asks for a password; put it in the URL: `sentinelPassword`, and `sentinelUsername` if it has users",
        )
        .with_source(said),
        Some("WRONGPASS") => {
            refused("knows no such user with this password; check `sentinelUsername` and `sentinelPassword` in the URL")
                .with_source(said)
        }
        Some("NOPERM") => refused(
            "lets its user do too little; leasehold needs +ping +info +client|id +sentinel|get-master-addr-by-name \
                     +subscribe, and &+switch-master",
        )
        .with_source(said),
        Some("ERR") if error.details().contains("AUTH") => {
            refused("asks for no password, or takes none with a user; check `sentinelUsername` and `sentinelPassword`")
                .with_source(said)
        }
        Some("ERR") => refused("does not answer as a sentinel does; the URL names the sentinels, not the servers")
            .with_source(said),
        _ => match super::wire::tls_trouble(&error) {
            Some(trouble) => trouble.with_source(error),
            None => StoreError::unavailable(format!("{LOST}, at the sentinel {sentinel}")).with_source(error),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Server {
        Server::new("h", port)
    }

    #[test]
    fn a_majority_of_all_decides_and_without_one_the_most_named_comes_first() {
        let mut answers = Answers::default();
        assert!(!answers.count(at(1), 3));
        assert!(!answers.count(at(2), 3));
        assert!(answers.count(at(2), 3), "two of three");
        assert_eq!(answers.places(), [at(2)]);

        let mut split = Answers::default();
        for port in [1, 2, 2, 3] {
            assert!(!split.count(at(port), 5), "five, of whom one is dead");
        }
        assert_eq!(split.places(), [at(2), at(1), at(3)]);
    }

    #[test]
    fn a_majority_is_more_than_half() {
        for (of, needed) in [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)] {
            let mut answers = Answers::default();
            let named = (1..=of).find(|_| answers.count(at(1), of));
            assert_eq!(named, Some(needed), "of {of}");
        }
    }

    #[tokio::test]
    async fn a_server_is_left_when_another_is_named_and_not_before() {
        use futures_util::FutureExt;
        let sentinels = Sentinels::new(&[at(1)], "m", Config::default()).unwrap();
        let mut moves = sentinels.moves_from(&at(7));
        assert!(moves.away().now_or_never().is_none());
        sentinels.said.send_replace(Some(at(7)));
        assert!(moves.away().now_or_never().is_none());
        sentinels.said.send_replace(Some(at(8)));
        assert!(moves.away().now_or_never().is_some_and(|why| why.to_string().contains("h:8")));
    }

    #[test]
    fn an_address_of_ipv6_can_be_told_from_its_port() {
        assert_eq!(server("::1".into(), 6379).to_string(), "[::1]:6379");
        assert_eq!(server("10.0.0.1".into(), 6379).to_string(), "10.0.0.1:6379");
    }

    #[test]
    fn what_will_not_pass_is_told_before_what_may() {
        let sentinels = Sentinels::new(&[at(1), at(2)], "m", Config::default()).unwrap();
        let may = || StoreError::unavailable("may pass");
        let mut answers = Answers::default();
        answers.keep(StoreError::refused("stays"));
        answers.keep(may());
        assert_eq!(sentinels.nothing(answers), StoreError::refused("stays"));
        let unknown = sentinels.nothing(Answers { unknown: true, trouble: Some(may()), ..Answers::default() });
        assert!(!unknown.may_pass() && unknown.to_string().contains("sentinelServiceName"), "{unknown}");
        let none = sentinels.nothing(Answers { trouble: Some(may()), ..Answers::default() });
        assert!(none.may_pass() && none.to_string().contains("h:1, h:2"), "{none}");
    }
}
