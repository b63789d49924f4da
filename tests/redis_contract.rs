//! The rules of a store, run against a real redis-server.
mod support;
use leasehold::store::{contract, redis::RedisStore};
use support::server::Server;

#[tokio::test]
async fn the_redis_store_keeps_every_rule() {
    let server = Server::start();
    let url = server.url();
    assert_eq!(contract::check(async || RedisStore::connect(&url).await.unwrap()).await, Ok(()));
    // Of all that it left, only the values and their marks have no TTL.
    let keys = server.keys();
    let is_value = |key: &String| keys.contains(&format!("{{{key}}}:mark"));
    let forever: Vec<_> =
        keys.iter().filter(|key| server.pttl(key) == -1 && !key.ends_with(":mark") && !is_value(key)).collect();
    assert!(!keys.is_empty() && forever.is_empty(), "{forever:?}");
}
