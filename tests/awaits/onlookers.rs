//! Others who want the same key, and what they have to say afterwards.
use super::look::{Look, wait};
use leasehold::{Lease, Leases};
use std::{future::Future, time::Duration};
use tokio::{runtime::Handle, task::JoinHandle};
use tokio_util::sync::CancellationToken;

/// Renewed each second.
const HELD: Duration = Duration::from_secs(3);

/// Who else is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// Nobody, until the call is over.
    Nobody,
    /// Somebody holds the key all the time, and somebody waits for it: the call comes after both.
    Hold,
    /// Somebody holds the key until the call stands in line for it.
    HandOver,
    /// The call's own lease is on the key, and somebody waits behind it.
    Wait,
}

/// The others of one key. They are on a runtime and a connection of their own, so what is done to the call is not done to
/// them.
pub struct Onlookers {
    key: String,
    leases: Leases,
    runtime: Handle,
    holder: Option<Lease>,
    /// Waits since before the call.
    ahead: Option<JoinHandle<leasehold::Result<Lease>>>,
    hand_over: Option<JoinHandle<Result<(), String>>>,
    /// The call is over.
    over: CancellationToken,
}

impl Onlookers {
    pub fn new(key: &str, leases: &Leases, runtime: &Handle) -> Onlookers {
        Onlookers {
            key: key.to_owned(),
            leases: leases.clone(),
            runtime: runtime.clone(),
            holder: None,
            ahead: None,
            hand_over: None,
            over: CancellationToken::new(),
        }
    }

    fn wants(&self, patience: Duration) -> JoinHandle<leasehold::Result<Lease>> {
        self.runtime.spawn(self.leases.lease(&self.key).wait(patience).acquire())
    }

    /// Those who come before the call.
    pub async fn come_first(&mut self, others: Others, look: &Look, patience: Duration) {
        match others {
            Others::Nobody | Others::Wait => {}
            Others::Hold => {
                self.holder = Some(self.leases.lease(&self.key).ttl(HELD).acquire().await.unwrap());
                self.wait(look, patience).await;
            }
            Others::HandOver => {
                let holder = self.leases.lease(&self.key).ttl(HELD).acquire().await.unwrap();
                let (leases, key, over) = (self.leases.clone(), self.key.clone(), self.over.clone());
                self.hand_over = Some(self.runtime.spawn(async move {
                    while !over.is_cancelled() {
                        let holding = leases.inspect(&key).await.map_err(|error| error.to_string())?;
                        if holding.is_some_and(|holding| holding.waiters > 0) {
                            break;
                        }
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                    let released = holder.release().await;
                    released.map(drop).map_err(|error| format!("who held the key before: {error}"))
                }));
            }
        }
    }

    /// Somebody stands in line.
    pub async fn wait(&mut self, look: &Look, patience: Duration) {
        self.ahead = Some(self.wants(patience));
        wait(patience, || if look.waiting(&self.key) == 1 { Ok(()) } else { Err("no place".into()) }).await.unwrap();
    }

    pub fn call_is_over(&self) {
        self.over.cancel();
    }

    /// The holder still holds, and goes on renewing.
    async fn holder_is_unharmed(&self, look: &Look, patience: Duration) -> Result<(), String> {
        let Some(holder) = &self.holder else { return Ok(()) };
        let until = holder.valid_until();
        let fence = format!("#{}", holder.fence());
        wait(patience, || match () {
            () if !holder.is_held() => Err(format!("the holder lost its lease: {:?}", holder.state())),
            () if !look.value(&self.key).is_some_and(|value| value.ends_with(&fence)) => {
                Err("the holder's key is not its own any more".to_owned())
            }
            () if holder.valid_until() <= until => Err("the holder's lease is not renewed any more".to_owned()),
            () => Ok(()),
        })
        .await
    }

    /// Everybody gets what they came for, in the order in which they came, one who comes only now included.
    pub async fn are_served(mut self, look: &Look, patience: Duration) -> Result<(), String> {
        self.holder_is_unharmed(look, patience).await?;
        if let Some(hand_over) = self.hand_over.take() {
            hand_over.await.map_err(|end| end.to_string())??;
        }
        // In line before the holder goes, so that there is an order to keep.
        let behind = self.wants(patience);
        if self.holder.is_some() {
            wait(
                patience,
                || if look.waiting(&self.key) == 2 { Ok(()) } else { Err("nobody can join the line".into()) },
            )
            .await?;
        }
        if let Some(holder) = self.holder.take() {
            holder.release().await.map_err(|error| format!("the holder could not release: {error}"))?;
        }
        let mut last = 0;
        for (who, waiter) in [("who waited before", self.ahead.take()), ("who came after", Some(behind))] {
            let Some(waiter) = waiter else { continue };
            let lease = in_time(who, patience, waiter).await?.map_err(|end| end.to_string())?;
            let lease = lease.map_err(|error| format!("{who} was not served: {error}"))?;
            if lease.fence() < last {
                return Err(format!("{who} was served out of turn"));
            }
            last = lease.fence();
            lease.release().await.map_err(|error| format!("{who} could not release: {error}"))?;
        }
        Ok(())
    }
}

pub async fn in_time<T>(what: &str, patience: Duration, future: impl Future<Output = T>) -> Result<T, String> {
    tokio::time::timeout(2 * patience, future).await.map_err(|_| format!("{what}: nothing within {patience:?}"))
}
