//! Where the server is, and as whom to speak to it.
use super::{
    cluster::Topology,
    sentinels::{Moves, Sentinels},
    server_info::{Doubt, ServerInfo},
};
use crate::{
    error::{Invalid, StoreError},
    settings::Replicas,
};
use fred::types::config::{Config, Server, ServerConfig};
use std::{
    collections::HashSet,
    fmt,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

pub(super) const TLS: bool = cfg!(any(feature = "tls-rustls", feature = "tls-rustls-ring", feature = "tls-native"));

/// One server that stays where it is, the primary that the sentinels name, or a cluster. And how many replicas have to
/// follow a server.
#[derive(Clone)]
pub(crate) struct Address(Arc<Inner>, Option<Replicas>);

struct Inner {
    place: Place,
    /// Credentials, database and TLS; not where.
    login: Config,
    /// What was said of which server, so that it is said once.
    told: Arc<Mutex<HashSet<(Server, Doubt)>>>,
}

enum Place {
    Fixed(Server),
    Sentinels(Sentinels),
    /// To be reached member by member.
    Cluster(Arc<Topology>),
    /// A primary of a cluster.
    Member(Server),
}

/// One server, as a connection to it is to be opened.
pub(super) struct Target {
    pub(super) server: Server,
    pub(super) login: Config,
    /// When to leave it, if the sentinels named it.
    pub(super) moves: Option<Moves>,
}

impl Address {
    /// # Errors
    /// [`Invalid`] when it is no URL of one Redis server, of sentinels or of a cluster, or asks for what this build cannot do.
    pub(crate) fn parse(url: &str) -> Result<Self, Invalid> {
        let invalid = |rule| Err(Invalid::new("url", rule));
        // A URL may hold a password, so no rule quotes it.
        let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        let config = match scheme.as_deref() {
            Some("rediss" | "rediss-sentinel" | "rediss-cluster") if !TLS => {
                return invalid(
                    "`rediss://`, `rediss-sentinel://` and `rediss-cluster://` need TLS: turn on leasehold's feature \
                     `tls-rustls`, or `tls-native`",
                );
            }
            Some("redis" | "rediss") => {
                if parameters(url).next().is_some() {
                    return invalid(
                        "`redis://` takes no parameters; a database is its path, and `redis-sentinel://` and `redis-cluster://` have \
                         some",
                    );
                }
                Config::from_url_centralized(url)
            }
            Some("redis-sentinel" | "rediss-sentinel") => {
                check_sentinel_parameters(url)?;
                Config::from_url_sentinel(url)
            }
            Some("redis-cluster" | "rediss-cluster") => {
                check_cluster(url)?;
                Config::from_url_clustered(url)
            }
            Some("unix" | "redis+unix" | "redis-unix") => {
                return invalid("unix sockets are not supported yet; use `redis://` with a host");
            }
            _ => {
                return invalid(
                    "starts with `redis://`, `redis-sentinel://` or `redis-cluster://`, or with `rediss` for TLS",
                );
            }
        };
        match config {
            Ok(config) => Self::of(config),
            #[cfg(any(feature = "tls-rustls", feature = "tls-rustls-ring", feature = "tls-native"))]
            Err(error) if *error.kind() == fred::error::ErrorKind::Tls => invalid(
                "`rediss://` trusts the system's certificate authorities, and they could not be loaded; see `connect_with`",
            ),
            Err(_) if scheme.as_deref().is_some_and(|s| s.ends_with("sentinel")) => invalid(
                "has the form `redis-sentinel://user:password@host:port/database?node=host:port&sentinelServiceName=name`",
            ),
            Err(_) if scheme.is_some_and(|s| s.ends_with("cluster")) => {
                invalid("has the form `redis-cluster://user:password@host:port?node=host:port&node=host:port`")
            }
            Err(_) => invalid("has the form `redis://user:password@host:port/database`, all but the host optional"),
        }
    }

    /// # Errors
    /// [`Invalid`] when the configuration is of neither one server, nor sentinels, nor a cluster.
    pub(crate) fn of(config: Config) -> Result<Self, Invalid> {
        let place = match &config.server {
            ServerConfig::Centralized { server } => Place::Fixed(server.clone()),
            ServerConfig::Sentinel { hosts, service_name, username, password } => {
                let login =
                    Config { username: username.clone(), password: password.clone(), database: None, ..config.clone() };
                Place::Sentinels(Sentinels::new(hosts, service_name, login)?)
            }
            ServerConfig::Clustered { hosts, .. } => Place::Cluster(Arc::new(Topology::new(hosts, config.clone())?)),
            #[allow(unreachable_patterns, reason = "with another feature of fred's there are more")]
            _ => {
                return Err(Invalid::new(
                    "config",
                    "names one server (`ServerConfig::Centralized`), sentinels (`ServerConfig::Sentinel`) or a cluster \
                     (`ServerConfig::Clustered`)",
                ));
            }
        };
        Ok(Address(Arc::new(Inner { place, login: config, told: Arc::default() }), None))
    }

    /// So many of its replicas have to have each lease.
    ///
    /// # Errors
    /// [`Invalid`] for a cluster: its lists go by slot, and each of them would have to wait for the replicas in turn.
    pub(crate) fn with_replicas(self, replicas: Option<Replicas>) -> Result<Self, Invalid> {
        if replicas.is_some() && self.has_slots() {
            return Err(Invalid::new("replicas", "for one server, or the primary of sentinels; not for a cluster yet"));
        }
        Ok(Address(self.0, replicas))
    }

    pub(super) fn replicas(&self) -> Option<Replicas> {
        self.1
    }

    /// The cluster, if it is one.
    pub(super) fn cluster(&self) -> Option<&Arc<Topology>> {
        match &self.0.place {
            Place::Cluster(topology) => Some(topology),
            _ => None,
        }
    }

    /// A member of this cluster.
    pub(super) fn member(&self, server: &Server) -> Address {
        let Inner { login, told, .. } = &*self.0;
        Address(
            Arc::new(Inner { place: Place::Member(server.clone()), login: login.clone(), told: told.clone() }),
            self.1,
        )
    }

    /// Whether what is sent there has to be told apart by slot.
    pub(super) fn has_slots(&self) -> bool {
        matches!(self.0.place, Place::Cluster(_) | Place::Member(_))
    }

    /// Whether it is one server for good.
    pub(super) fn stays(&self) -> bool {
        matches!(self.0.place, Place::Fixed(_))
    }

    /// Opens something where the server is now. Sentinels are asked anew each time, and asked again while it opens: a
    /// primary that hangs is left as soon as they name another.
    pub(super) async fn reach<T, F>(&self, open: impl Fn(Target) -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let sentinels = match &self.0.place {
            Place::Fixed(server) | Place::Member(server) => {
                return open(Target { server: server.clone(), login: self.0.login.clone(), moves: None }).await;
            }
            Place::Cluster(_) => return Err(StoreError::unavailable("a cluster is reached member by member")),
            Place::Sentinels(sentinels) => sentinels,
        };
        let mut named = sentinels.primary().await?;
        loop {
            let server = named.remove(0);
            let login = self.0.login.clone();
            let moves = Some(sentinels.moves_from(&server));
            let opened = tokio::select! {
                opened = open(Target { server: server.clone(), login, moves }) => opened,
                other = sentinels.another_than(&server) => {
                    named = vec![other];
                    continue;
                }
            };
            match opened {
                // They don't agree, so the next may be right.
                Err(_) if !named.is_empty() => {}
                opened => return opened,
            }
        }
    }

    /// Asks the sentinels or the cluster now and then, if it is they who know, and lets the connections know when a
    /// primary is another. Never ends.
    pub(super) async fn follow(&self) {
        match &self.0.place {
            Place::Fixed(_) | Place::Member(_) => std::future::pending().await,
            Place::Sentinels(sentinels) => sentinels.follow().await,
            Place::Cluster(topology) => topology.follow().await,
        }
    }

    /// Whether a server is what it was named as.
    pub(super) fn suits(&self, server: &Server, info: &ServerInfo) -> Result<(), StoreError> {
        let another = |what: &str| Err(StoreError::unavailable(format!("{what} {server} is a replica; failing over?")));
        match &self.0.place {
            Place::Fixed(_) | Place::Sentinels(_) if info.in_cluster => Err(StoreError::refused(
                "the server is a member of a cluster and has only some of the keys; name the cluster: `redis-cluster://`",
            )),
            Place::Sentinels(_) if info.replica => another("the sentinels name it as the primary, and"),
            Place::Member(_) if info.replica => another("the cluster named it as a primary, and"),
            _ => Ok(()),
        }
    }

    /// The pause before the next attempt to connect, which is over when the sentinels have something to say.
    pub(super) async fn pause(&self, pause: Duration) {
        let word = async {
            match &self.0.place {
                Place::Sentinels(sentinels) => sentinels.word().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = word => {}
        }
    }

    /// Says what a server does that may betray a lease, once.
    pub(super) fn tell(&self, server: &Server, doubts: impl IntoIterator<Item = Doubt>) {
        for doubt in doubts {
            let new =
                self.0.told.lock().unwrap_or_else(PoisonError::into_inner).insert((server.clone(), doubt.clone()));
            if new {
                tracing::warn!(%server, setting = doubt.setting, "{doubt}");
            }
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.place {
            Place::Fixed(server) | Place::Member(server) => write!(f, "{server}"),
            Place::Sentinels(sentinels) => write!(f, "{sentinels}"),
            Place::Cluster(topology) => write!(f, "{topology}"),
        }
    }
}

/// The names of a URL's parameters.
fn parameters(url: &str) -> impl Iterator<Item = &str> {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let pairs = query.split('#').next().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    pairs.map(|pair| pair.split('=').next().unwrap_or_default())
}

fn check_sentinel_parameters(url: &str) -> Result<(), Invalid> {
    let mut seen = HashSet::new();
    for name in parameters(url) {
        if !["node", "sentinelServiceName", "sentinelUsername", "sentinelPassword"].contains(&name) {
            return Err(Invalid::new(
                "url",
                "of the parameters `node`, `sentinelServiceName`, `sentinelUsername` and `sentinelPassword`, and no other",
            ));
        }
        if name != "node" && !seen.insert(name) {
            return Err(Invalid::new("url", "each parameter but `node` once"));
        }
    }
    if !seen.contains("sentinelServiceName") {
        return Err(Invalid::new("url", "names the primary as the sentinels know it: `?sentinelServiceName=mymaster`"));
    }
    if seen.contains("sentinelUsername") && !seen.contains("sentinelPassword") {
        return Err(Invalid::new("url", "`sentinelUsername` comes with `sentinelPassword`"));
    }
    Ok(())
}

/// fred would take any path and parameter, and not say that it ignores them.
fn check_cluster(url: &str) -> Result<(), Invalid> {
    if parameters(url).any(|name| name != "node") {
        return Err(Invalid::new("url", "of the parameters `node`, and no other"));
    }
    let place = url.split_once("://").map_or(url, |(_, rest)| rest).split(['?', '#']).next().unwrap_or_default();
    let path = place.rsplit('@').next().and_then(|host| host.split_once('/')).map_or("", |(_, path)| path);
    if !path.is_empty() && path != "0" {
        return Err(Invalid::new("url", "no database: a cluster has none but 0"));
    }
    Ok(())
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
    fn the_url_of_sentinels_is_taken_with_their_own_credentials() {
        let url = "redis-sentinel://u:p@a/2?node=b:2&node=c:3&node=b:2&sentinelServiceName=m&sentinelUsername=su\
                   &sentinelPassword=sp%26";
        let address = Address::parse(url).unwrap();
        assert_eq!(address.to_string(), "`m` of the sentinels b:2, c:3, a:26379");
        let login = &address.0.login;
        assert_eq!((login.username.as_deref(), login.password.as_deref()), (Some("u"), Some("p")));
        assert_eq!(login.database, Some(2));
        let Place::Sentinels(sentinels) = &address.0.place else { panic!("{address}") };
        let login = sentinels.login();
        assert_eq!((login.username.as_deref(), login.password.as_deref()), (Some("su"), Some("sp&")));
        assert_eq!(login.database, None);
    }

    #[test]
    fn replicas_are_counted_behind_one_server_and_not_in_a_cluster() {
        let replicas = Some(Replicas { wanted: 1, within: Duration::from_millis(5) });
        assert_eq!(Address::parse("redis://h").unwrap().with_replicas(replicas).unwrap().replicas(), replicas);
        let cluster = || Address::parse("redis-cluster://h").unwrap();
        assert_eq!(cluster().with_replicas(replicas).err().map(|error| error.setting), Some("replicas"));
        assert!(cluster().with_replicas(None).is_ok());
    }

    #[test]
    fn any_other_url_is_refused_with_the_rule_it_breaks() {
        for url in ["", "h:6379", "http://h", "redis:/h", "redis//h"] {
            assert!(rule(url).contains("starts with"), "{url}: {}", rule(url));
        }
        for url in ["redis://", "redis://:1", "redis://h:x", "redis://h:99999", "redis://h/x", "redis://h/1/2"] {
            assert!(rule(url).contains("form"), "{url}: {}", rule(url));
        }
        assert!(rule("redis://h?node=b:1").contains("no parameters"));
        assert!(rule("redis+unix:///run/redis.sock").contains("unix"));
    }

    #[test]
    fn a_url_of_sentinels_with_other_parameters_is_refused_with_the_rule_it_breaks() {
        for (parameters, word) in [
            ("", "sentinelServiceName=mymaster"),
            ("?node=b:1", "sentinelServiceName=mymaster"),
            ("?sentinelServiceName=", "sentinelServiceName=mymaster"),
            ("?sentinelServiceName=m&nodes=b:1", "no other"),
            ("?sentinelServiceName=m&sentinelservicename=n", "no other"),
            ("?sentinelServiceName=m&sentinelServiceName=n", "once"),
            ("?sentinelServiceName=m&sentinelUsername=u", "sentinelPassword"),
            ("?sentinelServiceName=m&node=b", "form"),
            ("?sentinelServiceName=m&node=b:x", "form"),
        ] {
            let rule = rule(&format!("redis-sentinel://h{parameters}"));
            assert!(rule.contains(word), "{parameters}: {rule}");
        }
    }

    #[test]
    fn the_url_of_a_cluster_is_taken_with_any_number_of_nodes() {
        let address = Address::parse("redis-cluster://u:p%2F@a?node=b:2&node=c:3&node=b:2").unwrap();
        assert_eq!(address.to_string(), "the cluster of b:2, c:3, a:6379");
        let login = &address.0.login;
        assert_eq!((login.username.as_deref(), login.password.as_deref()), (Some("u"), Some("p/")));
        for url in ["redis-cluster://h", "redis-cluster://h/", "redis-cluster://[::1]:2/0", "REDIS-CLUSTER://:p@h"] {
            assert!(Address::parse(url).is_ok(), "{url}");
        }
        let member = address.member(&Server::new("d", 4));
        assert_eq!((member.to_string(), member.0.login.username.as_deref()), ("d:4".into(), Some("u")));
        assert!(!member.stays() && member.has_slots() && address.has_slots());
    }

    #[test]
    fn a_url_of_a_cluster_with_anything_else_is_refused_with_the_rule_it_breaks() {
        for (rest, word) in [
            ("h?nodes=b:1", "no other"),
            ("h?node=b:1&sentinelServiceName=m", "no other"),
            ("h?Node=b:1", "no other"),
            ("h/3", "no database"),
            ("u:p@h/1?node=b:1", "no database"),
            ("h?node=b", "form"),
            ("h?node=b:x", "form"),
            (":1", "form"),
            ("h:x", "form"),
        ] {
            let rule = rule(&format!("redis-cluster://{rest}"));
            assert!(rule.contains(word), "{rest}: {rule}");
        }
    }

    #[test]
    fn a_configuration_of_a_cluster_names_nodes_and_no_database() {
        let of = |hosts: Vec<(&str, u16)>, database| {
            Address::of(Config { server: ServerConfig::new_clustered(hosts), database, ..Config::default() })
        };
        assert_eq!(of(vec![("a", 1), ("b", 2)], Some(0)).unwrap().to_string(), "the cluster of a:1, b:2");
        assert!(of(vec![], None).is_err_and(|invalid| invalid.rule.contains("at least one node")));
        assert!(of(vec![("a", 1)], Some(3)).is_err_and(|invalid| invalid.rule.contains("no database")));
    }

    #[cfg(not(any(feature = "tls-rustls", feature = "tls-rustls-ring", feature = "tls-native")))]
    #[test]
    fn tls_without_its_feature_is_refused_with_the_feature_to_turn_on() {
        assert!(rule("rediss://h").contains("tls-rustls"));
        assert!(rule("rediss-sentinel://h?sentinelServiceName=m").contains("tls-rustls"));
        assert!(rule("rediss-cluster://h").contains("tls-rustls"));
    }
}
