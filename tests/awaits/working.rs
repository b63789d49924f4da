//! Calls that do work under a lease.
use super::call::{Cast, Ready, Step, call, so};
use leasehold::Lease;
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::task::yield_now;

/// Work with awaits in it, which panics at one of them.
#[derive(Clone, Default)]
pub struct Work {
    begun: Arc<AtomicBool>,
    gone: Arc<AtomicBool>,
}

struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

pub const NEVER: usize = usize::MAX;

impl Work {
    pub fn does(&self, panics_at: usize) -> impl Future<Output = ()> + Send + use<> {
        self.begun.store(true, SeqCst);
        let gone = Gone(self.gone.clone());
        async move {
            let _gone = gone;
            for step in 0..3 {
                assert!(step != panics_at, "the work panics at its await number {step}");
                if step == 1 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                } else {
                    yield_now().await;
                }
            }
        }
    }

    /// A call that does it.
    pub fn within<T: 'static>(self, future: impl Future<Output = T> + Send + 'static) -> Ready {
        let settle = move |_, _| so(self.begun.load(SeqCst) == self.gone.load(SeqCst), "the work is still there");
        Ready { call: call(future), settle: Box::new(|end, polls| Box::pin(async move { settle(end, polls) })) }
    }
}

pub fn run<const PANICS_AT: usize>(cast: &Cast) -> Ready {
    let work = Work::default();
    let does = work.clone();
    work.within(cast.request().run(move |_lease| does.does(PANICS_AT)))
}

pub fn with_lease<const PANICS_AT: usize>(cast: &Cast) -> Ready {
    let work = Work::default();
    let does = work.clone();
    work.within(cast.leases.with_lease(cast.key.clone(), move |_cancel| does.does(PANICS_AT)))
}

/// A lease that is still held when a call with a look at it was dropped.
pub fn under<T: 'static>(lease: Lease, future: impl Future<Output = T> + Send + 'static) -> Ready {
    let settle = async move {
        so(lease.is_held(), "the lease that it looked at is held no more")?;
        lease.release().await.map(drop).map_err(|error| format!("the lease that it looked at: {error}"))
    };
    Ready { call: call(future), settle: Box::new(|_, _| Box::pin(settle)) }
}

pub fn guard<const PANICS_AT: usize>(lease: Lease) -> Ready {
    let work = Work::default();
    let guard = lease.guard(work.does(PANICS_AT));
    let gone = work.gone.clone();
    let Ready { call, settle } = under(lease, guard);
    let settle = |end, polls| -> Step {
        let settled = settle(end, polls);
        Box::pin(async move {
            so(gone.load(SeqCst), "the work is still there")?;
            settled.await
        })
    };
    Ready { call, settle: Box::new(settle) }
}
