//! leasehold
mod clock;
mod error;
mod fence;
mod key;
mod owner;
pub mod store;

pub use clock::Clock;
pub use error::{Cause, Error, Invalid, LossReason, Lost, Result, Stale, StoreError};
pub use fence::{Fenced, Gate};
pub use key::Key;
