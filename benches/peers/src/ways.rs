//! The ways to take a lock and give it back.
use distributed_lock_core::{DistributedLock, LockHandle, LockProvider};
use fred::{
    prelude::{Builder, Client, ClientLike, Config, Expiration, KeysInterface, SetOptions},
    types::scripts::Script,
};
use std::{sync::Arc, time::Duration};

const TTL: Duration = Duration::from_secs(30);

/// Compare and delete.
pub(crate) const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// One of them, connected.
#[derive(Clone)]
pub(crate) enum Way {
    Leasehold(leasehold::Leases),
    RawFred(Client, Script),
    RawRedis(redis::aio::MultiplexedConnection, Arc<redis::Script>),
    Rslock(rslock::LockManager),
    AsyncRedisLock(async_redis_lock::Locker),
    DistributedLock(Arc<distributed_lock_redis::RedisLockProvider>),
    RedisLock(redis_027::Client),
    Redlock(Arc<redlock::RedLock>),
}

impl Way {
    /// leasehold first.
    pub(crate) async fn all(url: &str) -> Vec<Way> {
        let leases = leasehold::Leases::builder().ttl(TTL).connect(url).await.expect("leasehold");
        let config = Config::from_url(url).expect("a URL");
        let fred = Builder::from_config(config).build().expect("a client");
        fred.init().await.expect("fred");
        let script = Script::from_lua(RELEASE);
        script.load(&fred).await.expect("fred's script");
        let client = redis::Client::open(url).expect("redis");
        let redis = client.get_multiplexed_async_connection().await.expect("redis");
        let locker = async_redis_lock::Locker::from_redis_url(url).await.expect("async-redis-lock");
        let provider = distributed_lock_redis::RedisLockProvider::new(url).await.expect("distributed-lock-redis");
        let client = redis_027::Client::open(url).expect("redis-lock");
        redis_lock::setup(&client).await.expect("redis-lock's functions");
        vec![
            Way::Leasehold(leases),
            Way::RawFred(fred, script),
            Way::RawRedis(redis, Arc::new(redis::Script::new(RELEASE))),
            Way::Rslock(rslock::LockManager::new(vec![url])),
            Way::AsyncRedisLock(locker),
            Way::DistributedLock(Arc::new(provider)),
            Way::RedisLock(client),
            Way::Redlock(Arc::new(redlock::RedLock::new(vec![url]))),
        ]
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Way::Leasehold(_) => "leasehold",
            Way::RawFred(..) => "bare fred",
            Way::RawRedis(..) => "bare redis",
            Way::Rslock(_) => "rslock",
            Way::AsyncRedisLock(_) => "async-redis-lock",
            Way::DistributedLock(_) => "distributed-lock-redis",
            Way::RedisLock(_) => "redis-lock",
            Way::Redlock(_) => "redlock",
        }
    }

    /// Those that connect anew for each command run out of ports with more.
    pub(crate) fn most_tasks(&self) -> usize {
        match self {
            Way::RedisLock(_) | Way::Redlock(_) => 1,
            _ => usize::MAX,
        }
    }

    /// Takes the lock and gives it back.
    pub(crate) async fn pair(&self, key: &str) {
        match self {
            Way::Leasehold(leases) => {
                let lease = leases.lease(key).acquire().await.expect("a lease");
                lease.release().await.expect("released");
            }
            Way::RawFred(client, script) => {
                let token = token();
                let px = Some(Expiration::PX(30_000));
                let set: Option<String> =
                    client.set(key, &token, px, Some(SetOptions::NX), false).await.expect("an answer");
                let gone: i64 = script.evalsha(client, key, token).await.expect("an answer");
                assert!(set.is_some() && gone == 1);
            }
            Way::RawRedis(connection, script) => {
                let (token, mut connection) = (token(), connection.clone());
                let options = redis::SetOptions::default()
                    .conditional_set(redis::ExistenceCheck::NX)
                    .with_expiration(redis::SetExpiry::PX(30_000));
                let set = redis::AsyncTypedCommands::set_options(&mut connection, key, &token, options).await;
                let gone = script.key(key).arg(&token).invoke_async::<i64>(&mut connection).await;
                assert!(set.expect("an answer").is_some() && gone.expect("an answer") == 1);
            }
            Way::Rslock(manager) => {
                let lock = manager.lock(key, TTL).await.expect("a lock");
                manager.unlock(&lock).await;
            }
            Way::AsyncRedisLock(locker) => {
                let lock = locker.acquire(key).await.expect("a lock");
                lock.release().await.expect("released");
            }
            Way::DistributedLock(provider) => {
                let lock = provider.create_lock(key);
                let handle = lock.acquire(None).await.expect("a lock");
                handle.release().await.expect("released");
            }
            Way::RedisLock(client) => {
                let mut lock = redis_lock::MultiResourceLock::new(client.clone()).expect("redis-lock");
                let id = lock.try_acquire(&[key.to_owned()], TTL).await.expect("an answer").expect("a lock");
                lock.release(&id).await.expect("released");
            }
            Way::Redlock(manager) => {
                let lock = manager.lock(key.as_bytes(), 30_000).expect("an answer").expect("a lock");
                manager.unlock(&lock);
            }
        }
    }
}

/// A secret for one acquisition.
fn token() -> String {
    uuid::Uuid::new_v4().to_string()
}
