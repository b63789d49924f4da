//! Several workers come for the same report: `cargo run --example monthly_report`.
//!
//! Leases are kept in this process, and each worker is a thread with a runtime of its own. With `REDIS_URL` set they are
//! kept on that Redis, and each worker is a process.
#![allow(clippy::print_stdout)]

mod report;
mod running;

use leasehold::{Error, LeaseView, Leases};
use report::{Order, Report};
use running::{Place, Running};
use std::{
    fmt,
    time::{Duration, SystemTime},
};

const KEY: &str = "report:monthly";
/// Where the finished report is kept: in the same store, behind its fence.
const TEXT: &str = "report:monthly:text";
const TTL: Duration = Duration::from_secs(1);

struct Worker {
    name: String,
    leases: Leases,
    orders: Vec<Order>,
    start: SystemTime,
}

impl Worker {
    /// Builds the report, unless somebody else is at it for longer than `patience`.
    async fn come(&self, patience: Duration, halfway: impl Fn(&Self)) -> anyhow::Result<()> {
        if !patience.is_zero() {
            self.says(format!("comes, and waits up to {patience:?}"));
        }
        let request = self.leases.lease(KEY).wait(patience);
        let built = request.try_run(async |lease: LeaseView| -> leasehold::Result<Report> {
            self.says(format!("has {KEY}, fence {}", lease.fence()));
            let report = Report::build(&self.orders, || halfway(self)).await;
            lease.write(TEXT, report.to_string()).await?;
            Ok(report)
        });
        match built.await {
            Ok(report) => self.says(format!("has written the report: {} orders", report.orders())),
            Err(Error::Contended { holder, remaining, .. }) => {
                let (holder, left) = (holder.unwrap_or("another program".into()), remaining.unwrap_or_default());
                self.says(format!("stands back: {holder} has it, for {:.2} s unless renewed", left.as_secs_f64()));
            }
            Err(Error::Lost(lost)) => {
                self.says(format!("has its work dropped: fence {} is lost, {}", lost.fence, lost.reason));
                // What was on its way already is beyond any lease. The fence stops it where it arrives.
                match self.leases.write(TEXT, "half a report", lost.fence).await {
                    Err(Error::Stale(stale)) => self.says(format!("has a late write refused: {stale}")),
                    other => anyhow::bail!("a stale write was not refused: {other:?}"),
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn says(&self, what: impl fmt::Display) {
        say(self.start, &self.name, what);
    }
}

/// One line of the story, with the time since its beginning.
fn say(start: SystemTime, who: &str, what: impl fmt::Display) {
    let time = start.elapsed().unwrap_or_default().as_secs_f64();
    println!("  {time:5.2} s  {who:<9} {what}");
}

fn main() -> anyhow::Result<()> {
    if std::env::args().len() > 1 {
        return running::as_process();
    }
    let start = SystemTime::now();
    let place = match std::env::var("REDIS_URL") {
        Ok(url) => Place::Redis(url),
        Err(_) => Place::embedded(),
    };
    println!(
        "One report, three workers. A lease lasts {TTL:?}, and is renewed every third of that while its work runs."
    );
    println!("{place}\n\nThey come at once: one builds, the others stand back.");
    let come = |name, patience, stalls| Running::start(&place, start, name, patience, stalls);
    let workers = ["worker-1", "worker-2", "worker-3"].map(|name| come(name, Duration::ZERO, false));
    for worker in workers {
        worker?.finish()?;
    }

    println!("\nThe next one is stopped in the middle: its lease runs out, and another takes over.");
    let mut stopped = come("worker-1", Duration::ZERO, true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let leases = place.leases("operator").await?;
        let holding = loop {
            match leases.inspect(KEY).await? {
                Some(holding) => break holding,
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        let (label, fence) = (holding.label.unwrap_or_default(), holding.fence.unwrap_or_default());
        say(start, "operator", format!("sees that {label} has it, fence {fence}"));
        come("worker-2", 5 * TTL, false)?.finish()?;
        stopped.wake()?;
        stopped.finish()?;

        println!("\nThe report is the one that worker-2 wrote:\n");
        let report = leases.read(TEXT).await?.unwrap_or_default();
        println!("{}", String::from_utf8_lossy(&report));
        leases.shutdown().await;
        Ok(())
    })
}
