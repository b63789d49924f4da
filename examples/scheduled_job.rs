//! A job that is due on all servers at the same time and runs on one: `cargo run --example scheduled_job`.
#![allow(clippy::print_stdout)]

use leasehold::{Error, LeaseView, Leases, Result, Wait, store::MemoryStore};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};
use tokio::time::sleep;

const TICK: Duration = Duration::from_millis(500);
/// The number of the tick for which it was last done.
const DONE: &str = "job:cleanup:done";

#[tokio::main]
async fn main() -> Result<()> {
    let store = Arc::new(MemoryStore::new());
    let mut servers = tokio::task::JoinSet::new();
    for label in ["server-a", "server-b", "server-c"] {
        let leases = Leases::builder().label(label).ttl(Duration::from_secs(5));
        let leases = match std::env::var("REDIS_URL") {
            Ok(url) => leases.connect(&url).await?,
            Err(_) => leases.build(store.clone())?,
        };
        servers.spawn(serve(leases, label));
    }
    for ended in servers.join_all().await {
        ended?;
    }
    Ok(())
}

/// When the next tick is, and which one it is; counted since 1970, so that it is the same on all servers.
fn next_tick() -> (Duration, u64) {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let tick = now.as_millis() / TICK.as_millis() + 1;
    let tick = u32::try_from(tick).unwrap_or(u32::MAX);
    (TICK * tick - now, tick.into())
}

async fn serve(leases: Leases, label: &str) -> Result<()> {
    for _ in 0..4 {
        let (left, tick) = next_tick();
        sleep(left).await;
        // Asks once: who comes while another is at it has nothing to do.
        let ran =
            leases.lease("job:cleanup").wait(Wait::No).try_run(async |lease| clean_up(&leases, lease, tick).await);
        match ran.await {
            Ok(true) => println!("tick {tick}  {label} has cleaned up"),
            Ok(false) => println!("tick {tick}  {label} skips: it is done"),
            Err(Error::Contended { holder, .. }) => {
                println!("tick {tick}  {label} skips: {} is at it", holder.as_deref().unwrap_or("another program"));
            }
            Err(error) => return Err(error),
        }
    }
    leases.shutdown().await;
    Ok(())
}

/// The lease keeps two from working at once; it doesn't keep one who comes late from doing it again. So what was done is
/// written down, under the fence.
async fn clean_up(leases: &Leases, lease: LeaseView, tick: u64) -> Result<bool> {
    let done = leases.read(DONE).await?.and_then(|text| String::from_utf8(text).ok()?.parse().ok());
    if done >= Some(tick) {
        return Ok(false);
    }
    sleep(Duration::from_millis(100)).await;
    lease.write(DONE, tick.to_string()).await?;
    Ok(true)
}
