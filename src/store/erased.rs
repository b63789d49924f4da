//! [`Store`] without its type, so that `Leases` has no parameter. One box a call.
use super::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Renewal, Renewed, Store, Wrote};
use crate::{
    Key,
    error::{Invalid, StoreError},
};
use std::{future::Future, pin::Pin};

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
type Answer<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

pub(crate) trait DynStore: Send + Sync + 'static {
    fn claim<'a>(&'a self, claim: &'a Claim) -> Answer<'a, Claimed>;
    fn renew_all<'a>(&'a self, list: &'a [Renewal]) -> BoxFuture<'a, Vec<Result<Renewed, StoreError>>>;
    fn release<'a>(&'a self, key: &'a Key, owner: &'a Owner) -> Answer<'a, Freed>;
    fn inspect<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Holding>>;
    fn force_release<'a>(&'a self, key: &'a Key) -> Answer<'a, bool>;
    fn write<'a>(&'a self, write: &'a FencedWrite) -> Answer<'a, Wrote>;
    fn read<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Vec<u8>>>;
    fn lane(&self, key: &Key) -> u32;
    fn check(&self, key: &Key) -> Result<(), Invalid>;
}

impl<S: Store> DynStore for S {
    fn claim<'a>(&'a self, claim: &'a Claim) -> Answer<'a, Claimed> {
        Box::pin(Store::claim(self, claim))
    }
    fn renew_all<'a>(&'a self, list: &'a [Renewal]) -> BoxFuture<'a, Vec<Result<Renewed, StoreError>>> {
        Box::pin(Store::renew_all(self, list))
    }
    fn release<'a>(&'a self, key: &'a Key, owner: &'a Owner) -> Answer<'a, Freed> {
        Box::pin(Store::release(self, key, owner))
    }
    fn inspect<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Holding>> {
        Box::pin(Store::inspect(self, key))
    }
    fn force_release<'a>(&'a self, key: &'a Key) -> Answer<'a, bool> {
        Box::pin(Store::force_release(self, key))
    }
    fn write<'a>(&'a self, write: &'a FencedWrite) -> Answer<'a, Wrote> {
        Box::pin(Store::write(self, write))
    }
    fn read<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Vec<u8>>> {
        Box::pin(Store::read(self, key))
    }
    fn lane(&self, key: &Key) -> u32 {
        Store::lane(self, key)
    }
    fn check(&self, key: &Key) -> Result<(), Invalid> {
        Store::check(self, key)
    }
}
