//! What the tests share.
// Every test file compiles this module anew and uses a part of it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]
pub mod aloud;
#[cfg(unix)]
pub mod child;
pub mod fake;
pub mod faults;
pub mod log;
pub mod page;
pub mod proxy;
pub mod resp;
pub mod scene;
pub mod sentinels;
pub mod server;
pub mod suite;
pub mod traffic;
pub mod work;

use std::{
    future::Future,
    time::{Duration, Instant},
};

/// How long anything that must happen may take before a test gives up on it.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `event` is true, and fails with `what` if that takes longer than [`PATIENCE`].
pub async fn until(what: &str, mut event: impl FnMut() -> bool) {
    let start = Instant::now();
    while !event() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The future's output, or a failure with `what` if it takes longer than [`PATIENCE`].
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("waited in vain: {what}"))
}
