//! A service of which one instance works and the others stand by, and which stops cleanly:
//! `cargo run --example graceful_service`.
//!
//! Stops on ctrl-c and SIGTERM; as an example it also does by itself, after three seconds.
#![allow(clippy::print_stdout)]

use leasehold::{Error, LeaseView, Leases, Result, Wait};
use std::time::Duration;
use tokio::time::sleep;

const KEY: &str = "service:invoices";

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // Half a minute of TTL is the default, and a tenth of it is the grace in which work may finish when it is told to stop.
    let leases = match std::env::var("REDIS_URL") {
        Ok(url) => Leases::connect(&url).await?,
        Err(_) => Leases::in_memory(),
    };
    let service = tokio::spawn(serve(leases.clone()));

    println!("runs as pid {}; ctrl-c or SIGTERM to stop", std::process::id());
    tokio::select! {
        signal = stopped() => println!("{}: shutting down", signal?),
        () = sleep(Duration::from_secs(3)) => println!("three seconds are over: shutting down"),
    }

    // Tells the work, gives it its grace, and frees the key: the next instance need not wait for the TTL.
    leases.shutdown().await;
    service.await??;
    println!("stopped; the key is {}", if leases.inspect(KEY).await?.is_none() { "free" } else { "another's" });
    Ok(())
}

/// Works whenever this instance is the one to, until the process is to stop.
async fn serve(leases: Leases) -> Result<()> {
    loop {
        match leases.lease(KEY).wait(Wait::Forever).run(send_invoices).await {
            Ok(sent) => println!("told to stop between two invoices, after {sent}"),
            // Redis was away for too long, or somebody took the key: stand by again.
            Err(Error::Lost(lost)) => println!("stopped at once: {}", lost.reason),
            Err(Error::Shutdown) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Finishes the invoice that it is at when it is told to stop. If that took longer than the grace, it would be dropped.
async fn send_invoices(lease: LeaseView) -> u32 {
    println!("works, under fence {}", lease.fence());
    let mut sent = 0;
    while !lease.cancel_token().is_cancelled() {
        sleep(Duration::from_millis(250)).await;
        sent += 1;
    }
    sent
}

/// Which signal came.
#[cfg(unix)]
async fn stopped() -> std::io::Result<&'static str> {
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed.map(|()| "ctrl-c"),
        _ = term.recv() => Ok("SIGTERM"),
    }
}
#[cfg(not(unix))]
async fn stopped() -> std::io::Result<&'static str> {
    tokio::signal::ctrl_c().await.map(|()| "ctrl-c")
}
