//! Leases in Redis.
mod address;
mod answer;
mod cluster;
mod inbox;
mod job;
mod link;
mod names;
mod protocol;
mod quorum;
mod sentinels;
mod server_error;
mod server_info;
mod server_time;
mod wire;

pub(crate) use self::{address::Address, quorum::addresses};
use self::{
    answer::Answer,
    cluster::{Cluster, Way},
    link::Link,
    protocol::Op,
};
use crate::{
    Key,
    clock::Clock,
    error::{Error, Invalid, StoreError},
    settings::Replicas,
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Wrote},
};
use fred::types::config::Config;
use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tokio::runtime::Handle;
use tokio_util::sync::{CancellationToken, DropGuard};

#[cfg(all(feature = "tls-rustls", feature = "tls-rustls-ring"))]
compile_error!(
    "turn on either `tls-rustls` or `tls-rustls-ring`: with both, rustls cannot choose and panics in the first connection"
);

/// The client library, for [`RedisStore::connect_with`] and
/// [`LeasesBuilder::connect_with`](crate::LeasesBuilder::connect_with). A major version of it is one of leasehold's.
pub use fred;

/// Leases on one Redis server (6.0 or later, or what speaks like it), on the primary that sentinels name, or in a Redis
/// Cluster.
///
/// A lease is a plain string key, so it excludes other programs that take the same key with `SET key token NX PX ms`,
/// and is excluded by them. Everything is done by one script whose operations each check, act and mark in one step.
///
/// It keeps three connections, one of them for renewals alone and one to hear what the server has to say, and connects
/// again by itself when one is lost. In a cluster it keeps three with each primary whose keys are used. They live on the
/// runtime on which [`connect`](RedisStore::connect) ran; calls may come from any runtime. Calls wait while there is no
/// connection, so bound them.
///
/// [`write`](Store::write) and [`read`](Store::read) keep values that outlive every lease: neither a value nor the mark
/// beside it (the largest fence that wrote it) has a TTL. Delete both when the value is no longer needed.
pub struct RedisStore {
    address: Address,
    routes: Routes,
    clock: Clock,
    settings: Settings,
    /// Where the connections live.
    runtime: Handle,
    /// Fires when the store is dropped: the inboxes end with it.
    closed: CancellationToken,
    /// It was said that the server publishes nothing.
    mute: AtomicBool,
    _open: DropGuard,
}

/// The links on which operations travel.
enum Routes {
    Server {
        /// Claims, releases and the rest: one link, for a release must not overtake its claim.
        main: Link,
        /// Renewals never stand behind a herd of claims.
        renewals: Link,
    },
    /// The same two for each primary.
    Cluster(Cluster),
}

// What a cluster does is boxed: futures within futures grow so deep that a caller's crate would need a higher
// `recursion_limit`.
impl Routes {
    async fn open(address: &Address, settings: Settings) -> Result<Routes, StoreError> {
        if let Some(topology) = address.cluster() {
            let cluster = Cluster::open(address.clone(), topology.clone(), settings.patience);
            return Ok(Routes::Cluster(Box::pin(cluster).await?));
        }
        let open = || Link::open(address.clone(), settings.patience);
        let (main, renewals) = tokio::try_join!(open(), open())?;
        Ok(Routes::Server { main, renewals })
    }

    async fn ask(&self, op: Op) -> Result<Answer, StoreError> {
        match self {
            Routes::Server { main, .. } => main.ask(op).await,
            Routes::Cluster(cluster) => Box::pin(cluster.ask(op)).await,
        }
    }

    async fn ask_all(&self, way: Way, ops: impl IntoIterator<Item = Op>) -> Vec<Result<Answer, StoreError>> {
        match (self, way) {
            (Routes::Server { main, .. }, Way::Main) => main.ask_all(ops).await,
            (Routes::Server { renewals, .. }, Way::Renewals) => renewals.ask_all(ops).await,
            (Routes::Cluster(cluster), way) => Box::pin(cluster.ask_all(way, ops.into_iter().collect())).await,
        }
    }
}

/// How a store treats its connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// A server that is silent for that long, with something to answer, gets a new connection; whoever waits for a
    /// connection for that long is told why there is none.
    pub(crate) patience: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { patience: Duration::from_secs(2) }
    }
}

impl RedisStore {
    /// Connects to `redis://user:password@host:port/database` (all but the host optional), or to the primary that
    /// sentinels name: `redis-sentinel://user:password@host:port/database?node=host:port&sentinelServiceName=name`, where
    /// each host is a sentinel and user and password are the primary's. Sentinels that ask for credentials get
    /// `sentinelUsername` and `sentinelPassword`. A cluster is `redis-cluster://user:password@host:port?node=host:port`, where
    /// each host is a node to begin with. With one of the TLS features, also `rediss://`, `rediss-sentinel://` and
    /// `rediss-cluster://`.
    ///
    /// A few round trips, bounded at two seconds for a server, and one for the sentinels or for three of the nodes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the URL is not of that form; [`Error::Store`] when nobody answers there
    /// ([`Unavailable`](StoreError::Unavailable)), or the server does not let us in or lets us run no scripts
    /// ([`Refused`](StoreError::Refused)).
    pub async fn connect(url: &str) -> Result<RedisStore, Error> {
        Box::pin(Self::open(Address::parse(url)?, Settings::default())).await
    }

    /// Connects as a configuration of `fred`'s says: for a private certificate authority, or a client's certificate. Where
    /// to connect (one server, sentinels, or a cluster), the credentials, the database and TLS are taken from it; how connections
    /// are kept is leasehold's to choose.
    ///
    /// # Errors
    /// Those of [`connect`](RedisStore::connect); [`Error::Invalid`] for a configuration of anything else.
    pub async fn connect_with(config: Config) -> Result<RedisStore, Error> {
        Box::pin(Self::open(Address::of(config)?, Settings::default())).await
    }

    /// The same store, for which a lease counts only when at least `wanted` replicas of its server have it (`WAIT`), for
    /// which the server has the time `within`: 1 ms to 1 s. A claim that fewer have fails with [`StoreError::Replicas`], and
    /// is then to be released; a renewal is [`Renewed::Thin`]. Each list of claims or renewals holds up its connection until
    /// the replicas have it, for `within` at most: a call may have to wait for one list before it, and for its own.
    ///
    /// [`LeasesBuilder::replicas`](crate::LeasesBuilder::replicas) asks for the same, and gives calls the time on top; here
    /// it is part of an [`attempt`](crate::LeasesBuilder::attempt), so keep it well below that.
    ///
    /// Connects anew, as [`connect`](RedisStore::connect) does.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no replica, another time, or a cluster; else those of [`connect`](RedisStore::connect). A server that
    /// knows no `WAIT`, or does not let us use it, refuses; a replica is [`Unavailable`](StoreError::Unavailable).
    pub async fn replicas(self, wanted: u32, within: Duration) -> Result<RedisStore, Error> {
        let replicas = Replicas { wanted, within };
        replicas.check()?;
        if within > Duration::from_secs(1) {
            return Err(Invalid::new("replicas", "`within` is at most 1 s").into());
        }
        let settings = Settings { patience: self.settings.patience.max(replicas.slack()) };
        Self::open(self.address.clone().with_replicas(Some(replicas))?, settings).await
    }

    pub(crate) async fn open(address: Address, settings: Settings) -> Result<RedisStore, Error> {
        let routes = Routes::open(&address, settings).await;
        let routes = routes.map_err(|source| Error::Store { attempted: "connect", key: None, source })?;
        Ok(Self::over(address, settings, routes))
    }

    fn over(address: Address, settings: Settings, routes: Routes) -> RedisStore {
        let (clock, closed) = (Clock::system(), CancellationToken::new());
        let (runtime, open) = (Handle::current(), closed.clone().drop_guard());
        runtime.spawn({
            let (address, closed) = (address.clone(), closed.clone());
            async move { closed.run_until_cancelled(address.follow()).await }
        });
        let mute = AtomicBool::new(false);
        RedisStore { address, routes, clock, settings, runtime, closed, mute, _open: open }
    }

    fn freed(&self, answer: &Answer) -> Result<Freed, StoreError> {
        if let Some(why) = answer.untold()
            && !self.mute.swap(true, Ordering::Relaxed)
        {
            let why = why.classify();
            tracing::warn!(server = %self.address, %why, "Redis tells nobody that it is their turn; whoever waits asks instead");
        }
        answer.freed()
    }
}

impl Store for RedisStore {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        self.routes.ask(Op::claim(claim, self.clock.now())).await?.claimed(self.address.replicas())
    }

    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        let mut answers = self.routes.ask_all(Way::Renewals, [Op::renew(renewal)]).await;
        answers.pop().ok_or_else(|| StoreError::unavailable("there was no answer"))??.renewed(self.address.replicas())
    }

    async fn renew_all(&self, list: &[Renewal]) -> Vec<Result<Renewed, StoreError>> {
        let answers = self.routes.ask_all(Way::Renewals, list.iter().map(Op::renew)).await;
        answers.into_iter().map(|answer| answer?.renewed(self.address.replicas())).collect()
    }

    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        self.freed(&self.routes.ask(Op::release(key, owner)).await?)
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        self.routes.ask(Op::inspect(key)).await?.holding()
    }

    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        Ok(self.freed(&self.routes.ask(Op::force(key)).await?)? == Freed::Released)
    }

    async fn write(&self, write: &FencedWrite) -> Result<Wrote, StoreError> {
        self.routes.ask(Op::write(write)).await?.wrote()
    }

    async fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        self.routes.ask(Op::read(key)).await?.value()
    }

    fn lane(&self, key: &Key) -> u32 {
        match &self.routes {
            Routes::Server { .. } => 0,
            Routes::Cluster(cluster) => cluster.lane(key),
        }
    }

    /// Subscribes, on a connection of its own: to the server, or to each primary whose keys are used.
    fn listen(&self, to: Pushes) {
        if let Routes::Cluster(cluster) = &self.routes {
            return cluster.listen(to);
        }
        let (address, patience) = (self.address.clone(), self.settings.patience);
        self.runtime.spawn(inbox::hear(address, patience, to, self.closed.clone()));
    }

    fn check(&self, key: &Key) -> Result<(), Invalid> {
        names::check(key)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("server", &format_args!("{}", self.address)).finish_non_exhaustive()
    }
}
