//! Calls of a `Lock`, a handle that survives them.
use super::{
    call::{Cast, Ready, Step, call, so},
    cut::End,
    look::CALLER,
    support::PATIENCE,
};
use futures_util::future::BoxFuture;
use leasehold::{Error, Holding, Lock};
use std::sync::Arc;
use tokio::sync::Mutex;

/// What is done to a handle.
pub type Does = for<'a> fn(&'a mut Lock) -> BoxFuture<'a, ()>;

/// One `lock` more or less on a handle that survives the call.
pub struct Handle(Arc<Mutex<Lock>>);

impl Handle {
    pub fn new(cast: &Cast) -> Handle {
        Handle(Arc::new(Mutex::new(cast.leases.lock(&cast.key))))
    }

    /// Afterwards the handle is as it was, or as the call says, and as good as new.
    pub fn calls(self, cast: &Cast, (before, after): (u32, u32), does: Does) -> Ready {
        let calls = self.0.clone();
        let future = async move {
            let mut lock = calls.try_lock_owned().unwrap();
            does(&mut lock).await
        };
        let key = cast.key.clone();
        let others = cast.others.clone();
        let settle = move |end, _polls| -> Step {
            Box::pin(async move {
                let mut lock = self.0.try_lock().map_err(|_| "the handle is still borrowed".to_owned())?;
                let count = lock.hold_count();
                let right = match end {
                    // A release that was begun goes on.
                    End::Dropped => count == before || after < before && count == after,
                    _ => count == after || count == 0,
                };
                so(right, &format!("{count} holds where {before} were and {after} were to be"))?;
                while lock.hold_count() > 0 {
                    given_back(lock.unlock().await).map_err(|error| format!("the handle cannot unlock: {error}"))?;
                }
                // Unless it is another's all the time, or the next one's by now.
                if before == 0 && others.inspect(&key).await.is_ok_and(|holding| holding.is_none_or(|h| is_ours(&h))) {
                    let again = lock.try_lock_for(PATIENCE).await.map_err(|error| format!("locked again: {error}"))?;
                    so(again.is_some(), "the handle cannot be locked again")?;
                    given_back(lock.unlock().await).map_err(|error| format!("unlocked again: {error}"))?;
                }
                Ok(())
            })
        };
        Ready { call: call(future), settle: Box::new(settle) }
    }

    /// Locked so often.
    pub async fn locked(cast: &Cast, times: u32) -> Handle {
        let handle = Handle::new(cast);
        let mut lock = handle.0.try_lock().unwrap();
        for _ in 0..times {
            lock.lock().await.unwrap();
        }
        drop(lock);
        handle
    }
}

fn is_ours(holding: &Holding) -> bool {
    holding.label.as_deref() == Some(CALLER)
}

/// What is not confirmed goes on in the background.
fn given_back(unlocked: leasehold::Result<()>) -> leasehold::Result<()> {
    match unlocked {
        Err(Error::Store { source, .. }) if source.may_pass() => Ok(()),
        other => other,
    }
}
