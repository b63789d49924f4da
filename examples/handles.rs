//! Handles to lock and unlock, as Redisson has them: `cargo run --example handles`.
#![allow(clippy::print_stdout)]

use leasehold::{Leases, Lock};
use std::time::Duration;

#[tokio::main]
async fn main() -> leasehold::Result<()> {
    let leases = match std::env::var("REDIS_URL") {
        Ok(url) => Leases::connect(&url).await?,
        Err(_) => Leases::in_memory(),
    };
    // A handle is one owner. Making one sends nothing, so each task makes its own.
    let mut mine = leases.lock("lock:order:1001");
    let mut yours = leases.lock("lock:order:1001");

    let fence = mine.lock().await?;
    println!("I have {}, fence {fence}; it is renewed in the background", mine.key());

    match yours.try_lock_for(Duration::from_millis(100)).await? {
        Some(fence) => println!("you have it, too?! fence {fence}"),
        None => println!("you have waited 100 ms and do something else"),
    }

    charge(&mut mine).await?;
    println!("I still have it, {} time; held by anybody: {}", mine.hold_count(), yours.is_locked().await?);

    // The token says when to stop; the view guards work and answers at once, without a round trip.
    let cancel = mine.cancel_token();
    let view = mine.view()?;
    println!("it is certain for {:.1?}; cancelled: {:?}", view.valid_for(), cancel.map(|c| c.is_cancelled()));

    mine.unlock().await?;
    let newer = yours.lock().await?;
    println!("I have unlocked, and you have it now; your fence is larger: {}", newer > fence);

    // An operator takes it away. The holder is told, and what it does next fails.
    let lost = yours.view()?;
    mine.force_unlock().await?;
    println!("yours is gone: {}", lost.lost().await);
    if let Err(error) = yours.unlock().await {
        println!("unlocking it says so, too: {error}");
    }

    // A lease that nobody renews, for work that must not be held up for longer.
    let fence = mine.lock_for(Duration::from_millis(300)).await?;
    let left = mine.remaining_ttl().await?.unwrap_or_default();
    println!("I have it again, fence {fence}, for {left:.1?} at most");
    mine.unlock().await?;

    leases.shutdown().await;
    Ok(())
}

/// Whoever has a handle in hand can lock it again: the same ownership, the same fence, one more to unlock.
async fn charge(lock: &mut Lock) -> leasehold::Result<()> {
    let fence = lock.lock().await?;
    println!("  charging the order under the same fence, {fence}; held {} times", lock.hold_count());
    lock.unlock().await
}
