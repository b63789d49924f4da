//! The front door: `Leases` and its builder.
use crate::{
    CancellationToken, Clock, Key, LeaseRequest, Lock, Result,
    engine::{EXCHANGE, Engine, Keeper},
    error::{Error, Invalid},
    host::Host,
    settings::{Replicas, Settings, Wait},
    store::{
        FencedWrite, Holding, Identity, MemoryStore, Pushes, Store,
        quorum::QuorumStore,
        redis::{self, Address, RedisStore, fred::types::config::Config},
    },
};
use std::{fmt, future::Future, sync::Arc, time::Duration};

/// Where leases come from: one for a process, cloned at will.
///
/// Holds the connection and the watchdog that renews every lease taken through it. When the last clone and the last lease
/// are gone, the watchdog sends the releases that are still due, and goes too; call [`shutdown`](Leases::shutdown) before
/// the process ends to wait for that.
#[derive(Clone)]
pub struct Leases {
    keeper: Arc<Keeper>,
    defaults: Arc<Settings>,
}

impl Leases {
    /// Connects to a Redis server, with the default settings: `redis://[user:password@]host:port/database`, or to the primary
    /// that sentinels name: `redis-sentinel://[user:password@]host:port?node=host:port&sentinelServiceName=name`; `rediss://`
    /// and `rediss-sentinel://` with one of the TLS features. The watchdog gets a thread and a connection of its own, so a runtime that is blocked
    /// by user code doesn't cost a lease.
    ///
    /// ```no_run
    /// # async fn doc() -> leasehold::Result<()> {
    /// let leases = leasehold::Leases::connect("redis://127.0.0.1:6379").await?;
    /// let report = leases.with_lease("report:monthly", async |_cancel| "built by one").await?;
    /// # let _ = report; Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that can't be used; [`Error::Store`] when the server isn't there, or refuses the user
    /// or the script.
    pub async fn connect(url: &str) -> Result<Leases> {
        Leases::builder().connect(url).await
    }

    /// Connects to a quorum of independent Redis servers, with the default settings: an odd number, at least three. A lease
    /// is held by a majority of them, and goes on while any minority is down, slow or out of reach; its fence grows as on
    /// one server. `docs/topologies.md` says when that is worth its price.
    ///
    /// ```no_run
    /// # async fn doc() -> leasehold::Result<()> {
    /// let leases = leasehold::Leases::quorum(["redis://a.internal", "redis://b.internal", "redis://c.internal"]).await?;
    /// # let _ = leases; Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for servers that make no quorum, or a URL that can't be used; [`Error::Store`] when no majority is
    /// there, or one of them refuses the user or the script.
    pub async fn quorum(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Leases> {
        Leases::builder().connect_quorum(urls).await
    }

    /// Sets what all leases have in common.
    pub fn builder() -> LeasesBuilder {
        LeasesBuilder::default()
    }

    /// Leases within this process, on an embedded store: for tests, examples and programs of one process. Follows tokio's
    /// time, so tests can pause it. May be called outside a runtime.
    pub fn in_memory() -> Leases {
        let clock = Clock::tokio();
        let built = Leases::builder().clock(clock.clone()).build(MemoryStore::with_clock(clock));
        #[allow(clippy::expect_used)] // a test builds from the defaults
        built.expect("the default settings work together")
    }

    /// Does the work under a lease: acquires it, runs the work, aborts it when the lease is lost, and releases. Waits for
    /// the key as the settings say: one TTL by default.
    ///
    /// The token that the work gets fires when it has to stop. From the end of validity on the work is never polled again:
    /// it is dropped, and the result is [`Error::Lost`]. If the work panics, the lease is released and the panic goes on.
    /// The future is `Send` when the work is, and borrows only what the work borrows, so it can be spawned.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> leasehold::Result<()> {
    /// # let leases = leasehold::Leases::in_memory();
    /// let total = leases.with_lease("report:monthly", async |cancel| {
    ///     let mut total = 0;
    ///     for part in 1..=4 {
    ///         if cancel.is_cancelled() {
    ///             break;
    ///         }
    ///         total += part;
    ///     }
    ///     total
    /// });
    /// assert_eq!(total.await?, 10);
    /// # Ok(()) }
    /// ```
    ///
    /// Dropped at any point, it drops the work and releases in the background. What the work has spawned elsewhere
    /// (`tokio::spawn`, `spawn_blocking`, threads) is not dropped with it: give it the token, or a
    /// [`LeaseView`](crate::LeaseView) from [`LeaseRequest::run`].
    ///
    /// # Errors
    /// Those of [`LeaseRequest::acquire`], and [`Error::Lost`]. A failed release of finished work is logged, and its TTL
    /// frees the key.
    pub fn with_lease<K, F, Fut>(&self, key: K, work: F) -> impl Future<Output = Result<Fut::Output>> + use<K, F, Fut>
    where
        K: Into<Key>,
        F: FnOnce(CancellationToken) -> Fut,
        Fut: Future,
    {
        self.lease(key).run(|lease| work(lease.cancel_token().clone()))
    }

    /// [`with_lease`](Leases::with_lease) for work that returns a `Result`, so that both kinds of error come out as one.
    /// It waits just as `with_lease` does; to skip the work when the key is held, ask once with
    /// `leases.lease(key).wait(Wait::No).run(..)` and look at [`Error::is_contended`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
    /// # let leases = leasehold::Leases::in_memory();
    /// let n = leases.try_with_lease("import", async |_cancel| -> anyhow::Result<u32> { Ok("42".parse()?) }).await?;
    /// assert_eq!(n, 42);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`with_lease`](Leases::with_lease), converted, and the work's own.
    pub fn try_with_lease<K, F, Fut, T, E>(
        &self,
        key: K,
        work: F,
    ) -> impl Future<Output = Result<T, E>> + use<K, F, Fut, T, E>
    where
        K: Into<Key>,
        F: FnOnce(CancellationToken) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        self.lease(key).try_run(|lease| work(lease.cancel_token().clone()))
    }

    /// A request for a lease, to be configured and sent. Sends nothing by itself.
    pub fn lease(&self, key: impl Into<Key>) -> LeaseRequest {
        LeaseRequest::new(self.keeper.clone(), self.defaults.clone(), key.into())
    }

    /// A handle to lock and unlock, as Redisson has it. Sends nothing by itself.
    pub fn lock(&self, key: impl Into<Key>) -> Lock {
        Lock::new(self.clone(), key.into())
    }

    /// Who holds the key, under which fence, and for how much longer; `None` when it is free. One round trip.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Invalid`] for a key that can't be.
    pub async fn inspect(&self, key: impl Into<Key>) -> Result<Option<Holding>> {
        let key = self.usable(key)?;
        let asked = self.keeper.bounded(EXCHANGE, self.keeper.store.inspect(&key)).await;
        asked.map_err(|error| Error::store("inspect", &key, error))
    }

    /// Ends whatever lease there is on the key, whoever has it; whether there was one. For operators: the holder is told
    /// as soon as the store can, at the latest by its next renewal, and works on until then. One round trip.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Invalid`] for a key that can't be.
    pub async fn force_release(&self, key: impl Into<Key>) -> Result<bool> {
        let key = self.usable(key)?;
        let asked = self.keeper.bounded(EXCHANGE, self.keeper.store.force_release(&key)).await;
        asked.map_err(|error| Error::store("force the release of", &key, error))
    }

    /// Writes a value into the store that keeps the leases, unless a larger fence has written there: check, write and mark
    /// are one step. [`LeaseView::write`](crate::LeaseView::write) is the same with the lease's own fence, and looks at the
    /// lease first. One round trip.
    ///
    /// # Errors
    /// [`Error::Stale`] when a newer owner has written; [`Error::Store`] when the store failed or keeps no values.
    pub async fn write(&self, key: impl Into<Key>, value: impl Into<Vec<u8>>, fence: u64) -> Result<()> {
        self.keeper.write(FencedWrite::new(key.into(), value.into(), fence)).await
    }

    /// Reads what [`write`](Leases::write) wrote. One round trip.
    ///
    /// # Errors
    /// [`Error::Store`] when the store failed or keeps no values.
    pub async fn read(&self, key: impl Into<Key>) -> Result<Option<Vec<u8>>> {
        let key = self.usable(key)?;
        let asked = self.keeper.bounded(EXCHANGE, self.keeper.store.read(&key)).await;
        asked.map_err(|error| Error::store("read", &key, error))
    }

    /// Ends everything in order: nothing new is acquired (those who wait get [`Error::Shutdown`]); every token fires; work
    /// has its lease's grace to finish and is dropped after it; then everything is released. Returns when that is done, or
    /// when the store doesn't confirm it in time: then the TTLs free the keys. Dropped midway, it goes on.
    pub async fn shutdown(&self) {
        let patience = self.defaults.plan().map_or(EXCHANGE, |plan| EXCHANGE.max(plan.attempt * 4) + self.keeper.slack);
        self.keeper.shut_down(patience).await;
    }

    /// How long ago the watchdog last looked at its leases. While there are any, it looks at least once a second.
    pub fn last_beat(&self) -> Duration {
        self.keeper.clock.now().since(self.keeper.last_beat())
    }

    fn usable(&self, key: impl Into<Key>) -> Result<Key> {
        let key = key.into();
        self.keeper.check(&key)?;
        Ok(key)
    }
}

impl fmt::Debug for Leases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leases")
            .field("label", self.keeper.identity.label())
            .field("settings", &self.defaults)
            .finish_non_exhaustive()
    }
}

/// What all leases of a [`Leases`] have in common. Each request can override it.
#[must_use = "a builder does nothing until `connect` or `build`"]
#[derive(Clone, Debug, Default)]
pub struct LeasesBuilder {
    settings: Settings,
    label: Option<Arc<str>>,
    clock: Clock,
    quarantine: Option<Duration>,
}

impl LeasesBuilder {
    /// How long a lease lasts without renewal: 100 ms to 365 days, 30 s by default. Renewed at a third of it.
    #[doc(alias = "period")]
    #[doc(alias = "lease_time")]
    #[doc(alias = "expiry")]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = Some(ttl);
        self
    }

    /// As [`LeaseRequest::grace`].
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = Some(grace);
        self
    }

    /// As [`LeaseRequest::attempt`].
    pub fn attempt(mut self, attempt: Duration) -> Self {
        self.settings.attempt = Some(attempt);
        self
    }

    /// As [`LeaseRequest::wait`].
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.settings.wait = Some(wait.into());
        self
    }

    /// As [`LeaseRequest::max_hold`].
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.settings.max_hold = Some(max_hold);
        self
    }

    /// Who we say we are, for people who read the store and for those who are told who holds a key: `host:pid` by default.
    /// Up to 128 bytes, without `#`, spaces and control characters.
    pub fn label(mut self, label: impl Into<Arc<str>>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// What time is measured with: for tests of stores. [`Clock::system`] by default.
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// A lease counts only when the server says (`WAIT`) that at least `wanted` of its replicas have it, for which it is given
    /// the time `within`: 1 ms to one [`attempt`](LeasesBuilder::attempt).
    ///
    /// An acquisition that fewer replicas have is undone, and fails with [`StoreError::Replicas`], which says how many had it.
    /// A renewal that fewer have stands, for the server has renewed the lease: that is a `warn` event and
    /// [`LeaseState::AtRisk`](crate::LeaseState::AtRisk), taken back when enough have it again.
    ///
    /// What a call may take grows by twice `within`, for a server answers one connection's calls one after the other: while
    /// replicas are missing, each list of claims or renewals holds up its connection for `within`, and up to 0.1 s longer, for
    /// Redis looks ten times a second whether a wait is over. Validity still counts from before the first send. It makes no lease safe against a failover; `docs/topologies.md` says what it is worth.
    ///
    /// For [`connect`](LeasesBuilder::connect) and [`connect_with`](LeasesBuilder::connect_with); a quorum and a store of
    /// your own refuse it.
    ///
    /// ```no_run
    /// # async fn doc() -> leasehold::Result<()> {
    /// use std::time::Duration;
    ///
    /// let builder = leasehold::Leases::builder().replicas(1, Duration::from_millis(200));
    /// let leases = builder.connect("redis://127.0.0.1:6379").await?;
    /// # let _ = leases; Ok(()) }
    /// ```
    ///
    /// [`StoreError::Replicas`]: crate::StoreError::Replicas
    pub fn replicas(mut self, wanted: u32, within: Duration) -> Self {
        self.settings.replicas = Some(Replicas { wanted, within });
        self
    }

    /// In a quorum of servers: how long one that has just started takes no part in new leases, because it may have forgotten
    /// what it knew. See [`QuorumStore::quarantine`].
    pub fn quarantine(mut self, quarantine: Duration) -> Self {
        self.quarantine = Some(quarantine);
        self
    }

    /// Leases on a store of your own. The watchdog lives on the runtime that acquires first; when that has ended, on the
    /// one that acquires next. Sends nothing, and needs no runtime.
    ///
    /// # Errors
    /// Settings that can't work, each with the rule that it breaks.
    pub fn build(self, store: impl Store) -> Result<Leases, Invalid> {
        self.settings.plan()?;
        self.without_replicas("for servers that `connect` reaches; a `RedisStore` has `replicas` of its own")?;
        let identity = self.identity()?;
        Ok(self.assemble(store, identity, Host::callers()))
    }

    /// Leases on a Redis server; see [`Leases::connect`].
    ///
    /// # Errors
    /// Those of [`Leases::connect`], and settings that can't work.
    pub async fn connect(self, url: &str) -> Result<Leases> {
        let address = Address::parse(url)?;
        self.connect_to(address).await
    }

    /// Leases on a Redis server, connected to as a configuration of the client library says: for what a URL can't, such as
    /// a private certificate authority, or a client's certificate. Where to connect (one server, or sentinels),
    /// credentials, database and TLS are taken from it.
    ///
    /// ```no_run
    /// # async fn doc() -> leasehold::Result<()> {
    /// use leasehold::store::redis::fred::types::config::{Config, ServerConfig};
    ///
    /// let config = Config {
    ///     server: ServerConfig::new_centralized("redis.example.com", 6379),
    ///     username: Some("worker".into()),
    ///     password: std::env::var("REDIS_PASSWORD").ok(),
    ///     // With a TLS feature: `tls: Some(TlsConnector::from(rustls_client_config).into())`.
    ///     ..Config::default()
    /// };
    /// let leases = leasehold::Leases::builder().connect_with(config).await?;
    /// # let _ = leases; Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`Leases::connect`], and settings that can't work.
    pub async fn connect_with(self, config: Config) -> Result<Leases> {
        let address = Address::of(config)?;
        self.connect_to(address).await
    }

    async fn connect_to(self, address: Address) -> Result<Leases> {
        let plan = self.settings.plan()?;
        let identity = self.identity()?;
        let unable = |source| Error::Store { attempted: "connect", key: None, source };
        let host = Host::own().map_err(unable)?;
        let address = address.with_replicas(self.settings.replicas);
        let settings = redis::Settings { patience: (plan.attempt * 2).max(self.slack()) };
        // Boxed, here and below: futures within futures grow so deep that a caller's crate would need a higher `recursion_limit`.
        let store = host.run(Box::pin(RedisStore::open(address, settings))).await.map_err(unable)??;
        Ok(self.assemble(store, identity, host))
    }

    /// Leases on a quorum of Redis servers; see [`Leases::quorum`].
    ///
    /// # Errors
    /// Those of [`Leases::quorum`], and settings that can't work.
    pub async fn connect_quorum(self, urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Leases> {
        let plan = self.settings.plan()?;
        self.without_replicas("not in a quorum: its members have no replicas, and a majority of them has each lease")?;
        let identity = self.identity()?;
        let addresses = redis::addresses(urls)?;
        let unable = |source| Error::Store { attempted: "connect", key: None, source };
        let host = Host::own().map_err(unable)?;
        let settings = redis::Settings { patience: plan.attempt * 2 };
        let store = host.run(Box::pin(QuorumStore::connect_with(addresses, settings))).await.map_err(unable)??;
        let store = match self.quarantine {
            Some(quarantine) => store.quarantine(quarantine),
            None => store,
        };
        Ok(self.assemble(store, identity, host))
    }

    fn slack(&self) -> Duration {
        self.settings.replicas.map_or(Duration::ZERO, |replicas| replicas.slack())
    }

    fn without_replicas(&self, rule: &'static str) -> Result<(), Invalid> {
        self.settings.replicas.map_or(Ok(()), |_| Err(Invalid::new("replicas", rule)))
    }

    fn identity(&self) -> Result<Identity, Invalid> {
        Identity::new(self.label.clone().unwrap_or_else(|| Identity::default_label().into()))
    }

    fn assemble(self, store: impl Store, identity: Identity, host: Host) -> Leases {
        let store = Arc::new(store);
        let slack = self.slack();
        let engine = Engine::new(store.clone(), self.clock, identity.clone(), host, slack);
        let hearer = Arc::downgrade(&engine);
        store.listen(Pushes::new(identity, move |push| match hearer.upgrade() {
            Some(engine) => {
                engine.hear(&push);
                true
            }
            None => false,
        }));
        Leases { keeper: Arc::new(Keeper(engine)), defaults: Arc::new(self.settings) }
    }
}
