//! Leases in Redis.
use super::*;
pub struct RedisStore;
impl RedisStore { pub(crate) async fn open(_u: String, _d: Duration) -> crate::Result<RedisStore> { Ok(RedisStore) } }
impl Store for RedisStore {
    async fn claim(&self, _: &Claim) -> Result<Claimed, StoreError> { Err(StoreError::refused("")) }
    async fn renew(&self, _: &Renewal) -> Result<Renewed, StoreError> { Err(StoreError::refused("")) }
    async fn release(&self, _: &Key, _: &Owner) -> Result<Freed, StoreError> { Err(StoreError::refused("")) }
    async fn inspect(&self, _: &Key) -> Result<Option<Holding>, StoreError> { Err(StoreError::refused("")) }
    async fn force_release(&self, _: &Key) -> Result<bool, StoreError> { Err(StoreError::refused("")) }
}
