//! One client's store: what it asks goes over the wire.
use crate::{
    server::{Reply, Request, micros},
    world::World,
};
use leasehold::{
    Key, StoreError,
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Wrote},
};
use std::{future::pending, sync::Arc};

pub struct NetStore {
    pub world: Arc<World>,
    pub net: usize,
}

impl NetStore {
    async fn ask(&self, request: Request) -> Result<Reply, StoreError> {
        match self.world.send(self.net, request).await {
            Ok(answer) => answer,
            Err(_) => pending().await,
        }
    }
}

/// The server answers a request by its own kind of reply.
macro_rules! reply {
    ($answer:expr, $kind:path) => {
        match $answer? {
            $kind(answer) => Ok(answer),
            other => panic!("the server answered {other:?}"),
        }
    };
}

pub(crate) use reply;

impl Store for NetStore {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        // Where the server's clock is, is known well enough: every reply tells it.
        let not_after = self.world.wall() + micros(claim.not_after);
        reply!(self.ask(Request::Claim(claim.clone(), not_after)).await, Reply::Claimed)
    }
    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        self.renew_all(std::slice::from_ref(renewal)).await.remove(0)
    }
    async fn renew_all(&self, list: &[Renewal]) -> Vec<Result<Renewed, StoreError>> {
        match self.ask(Request::Renew(list.to_vec())).await {
            Ok(Reply::Renewed(answers)) => answers.into_iter().map(Ok).collect(),
            Ok(other) => panic!("the server answered {other:?}"),
            Err(error) => vec![Err(error); list.len()],
        }
    }
    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        reply!(self.ask(Request::Release(key.clone(), owner.clone())).await, Reply::Freed)
    }
    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        reply!(self.ask(Request::Inspect(key.clone())).await, Reply::Inspected)
    }
    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        reply!(self.ask(Request::Force(key.clone())).await, Reply::Forced)
    }
    async fn write(&self, write: &FencedWrite) -> Result<Wrote, StoreError> {
        reply!(self.ask(Request::Write(write.clone())).await, Reply::Wrote)
    }
    async fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        reply!(self.ask(Request::Read(key.clone())).await, Reply::Read)
    }
    fn listen(&self, to: Pushes) {
        self.world.lock().wire.nets[self.net].sink = Some(to);
    }
}
