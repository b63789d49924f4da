//! The simulated server without a network, to be held against the rules of a store.
use crate::{
    net::reply,
    server::{Reply, Request, Server, Word, micros},
};
use leasehold::{
    Key, StoreError,
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Wrote, contract},
};
use std::sync::Mutex;
use tokio::time::Instant;

struct Plain {
    server: Mutex<Server>,
    sinks: Mutex<Vec<Pushes>>,
    origin: Instant,
}

impl Plain {
    fn new() -> Self {
        Plain { server: Mutex::new(Server::new(None)), sinks: Mutex::default(), origin: Instant::now() }
    }
    fn now(&self) -> u64 {
        1 + micros(self.origin.elapsed())
    }
    fn ask(&self, request: &Request) -> Result<Reply, StoreError> {
        let mut words = Vec::new();
        let reply = self.server.lock().unwrap().step(self.now(), request, 0, &mut words);
        for word in words {
            for sink in self.sinks.lock().unwrap().iter().filter(|sink| sink.inbox() == word.owner().inbox()) {
                match &word {
                    Word::Granted { owner, fence, length } => sink.granted(&owner.secret(), *fence, *length),
                    Word::Forced { key, fence, .. } => sink.forced(key, *fence),
                };
            }
        }
        Ok(reply)
    }
}

impl Store for Plain {
    fn claim(&self, claim: &Claim) -> impl Future<Output = Result<Claimed, StoreError>> + Send {
        let not_after = self.now() + micros(claim.not_after);
        async move { reply!(self.ask(&Request::Claim(claim.clone(), not_after)), Reply::Claimed) }
    }
    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        let answers: Vec<Renewed> = reply!(self.ask(&Request::Renew(vec![renewal.clone()])), Reply::Renewed)?;
        Ok(answers[0])
    }
    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        reply!(self.ask(&Request::Release(key.clone(), owner.clone())), Reply::Freed)
    }
    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        reply!(self.ask(&Request::Inspect(key.clone())), Reply::Inspected)
    }
    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        reply!(self.ask(&Request::Force(key.clone())), Reply::Forced)
    }
    async fn write(&self, write: &FencedWrite) -> Result<Wrote, StoreError> {
        reply!(self.ask(&Request::Write(write.clone())), Reply::Wrote)
    }
    async fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        reply!(self.ask(&Request::Read(key.clone())), Reply::Read)
    }
    fn listen(&self, to: Pushes) {
        self.sinks.lock().unwrap().push(to);
    }
}

#[tokio::test(start_paused = true)]
async fn the_simulated_server_keeps_every_rule_of_a_store() {
    assert_eq!(contract::check(async || Plain::new()).await, Ok(()));
}
