//! Exactly one worker at a time, across processes and machines: a lease on Redis that a watchdog renews, and that stops
//! the work when it is lost.
//!
//! A **lease** is exclusive ownership of a **key** for a **TTL**. While work runs, a watchdog renews it every third of its
//! TTL with a script that checks ownership. When the lease can no longer be shown to be held, a [`CancellationToken`] fires
//! and the work is aborted: it is never polled past the instant up to which ownership is certain.
//!
//! # Two front doors
//!
//! ```no_run
//! # async fn build(_: leasehold::CancellationToken) -> String { String::new() }
//! # async fn doc() -> leasehold::Result<()> {
//! use leasehold::Leases;
//! let leases = Leases::connect("redis://127.0.0.1:6379").await?;
//!
//! // A closure: acquire, renew, abort on loss, release.
//! let report = leases.with_lease("report:monthly", async |cancel| build(cancel).await).await?;
//!
//! // Handles, as Redisson has them.
//! let mut lock = leases.lock("lock:order:1001");
//! let fence = lock.lock().await?;
//! // .. charge the order ..
//! lock.unlock().await?;
//! # let _ = (report, fence); Ok(()) }
//! ```
//!
//! Both are one engine: [`Leases::lease`] makes a [`LeaseRequest`], and [`LeaseRequest::acquire`] gives the [`Lease`] itself,
//! for whatever the two don't fit.
//!
//! # What is held is certain, or it is lost
//!
//! - Validity is counted from *before* a request was sent, less an allowance for drift, on a clock that goes on while the
//!   machine sleeps ([`LeaseView::valid_for`]).
//! - The token fires one *grace* before that ends, though every renewal hangs. An answer that says somebody else has the
//!   key, or nobody, ends the lease at once. A failure that may pass does not: the lease is [`LeaseState::AtRisk`] and
//!   renewal is tried again.
//! - [`LeaseView::guard`] drops a future instead of polling it past validity; blocking code asks
//!   [`LeaseView::ensure_held`], which is local.
//! - Acquiring can be dropped at any point; dropping a [`Lease`] or [`Lock`] releases in the background.
//!
//! # The last gap
//!
//! Between a check and the write that follows it, any process can be stopped for longer than its lease, and no lease
//! library can do anything about that. Each ownership therefore has a [`fence`](LeaseView::fence) that grows; a resource
//! that refuses a smaller fence than it has seen closes the gap. [`Fenced`] and [`Gate`] do so for what lives in this
//! process, [`LeaseView::write`] for values in the same store.
//!
//! # Errors
//!
//! One type, [`Error`], for every call. It says whether somebody else has the key ([`Error::Contended`]), the lease was lost
//! ([`Error::Lost`], with the [`LossReason`]), something has to be set differently ([`Error::Invalid`]), or the store failed
//! ([`Error::Store`]), and then whether that may pass.
//!
//! # Runtime
//!
//! A tokio runtime with its timer on (`enable_time`). Requests, locks and guards can be made outside of one, and dropped.
//!
//! # Where leases are kept
//!
//! On a Redis server ([`Leases::connect`]), on a majority of several ([`Leases::quorum`]), in this process
//! ([`Leases::in_memory`]: tests, examples), or in a [`Store`] of your own ([`LeasesBuilder::build`]).
#![cfg_attr(
    not(test),
    warn(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)
)]

mod clock;
mod engine;
mod error;
mod farewell;
mod fence;
mod guard;
mod host;
mod key;
mod lease;
mod leases;
mod lock;
#[cfg(doctest)]
mod misuse;
mod owner;
mod pursuit;
mod request;
mod schedule;
mod settings;
mod shutdown;
pub mod store;
mod tenure;
mod term;
mod waiting;
mod watchdog;

pub use clock::Clock;
pub use error::{Cause, Error, Invalid, LossReason, Lost, Result, Stale, StoreError};
pub use fence::{Fenced, Gate};
pub use guard::Guard;
pub use key::Key;
pub use lease::{Lease, LeaseState, LeaseView, Released};
pub use leases::{Leases, LeasesBuilder};
pub use lock::Lock;
pub use request::LeaseRequest;
pub use settings::Wait;
pub use store::{Holding, Store};
pub use tokio_util::sync::CancellationToken;

// What is shared between tasks and threads, for ever.
const _: () = {
    const fn shared<T: Send + Sync + 'static>() {}
    shared::<Leases>();
    shared::<LeaseRequest>();
    shared::<Lease>();
    shared::<LeaseView>();
    shared::<Lock>();
    shared::<Error>();
};
