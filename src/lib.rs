//! leasehold
mod clock;
mod error;
mod key;
mod owner;
pub mod store;

pub use clock::Clock;
pub use error::{Cause, Error, Invalid, LossReason, Lost, Result, Stale, StoreError};
pub use key::Key;
