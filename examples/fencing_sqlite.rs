//! A database that refuses whoever has been overtaken: `cargo run --example fencing_sqlite`.
//!
//! A lease can run out while its owner is stopped, and no lease can stop a write that is on its way then. The database
//! can: it remembers the largest fence that has written a row, and lets no smaller one write it.
#![allow(clippy::print_stdout)]

use leasehold::Leases;
use rusqlite::{Connection, params};
use std::time::Duration;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let leases = match std::env::var("REDIS_URL") {
        Ok(url) => Leases::connect(&url).await?,
        Err(_) => Leases::in_memory(),
    };
    let db = Connection::open_in_memory()?;
    db.execute_batch(
        "CREATE TABLE account (name TEXT PRIMARY KEY, cents INTEGER NOT NULL, fence INTEGER NOT NULL);
         INSERT INTO account VALUES ('alice', 10000, 0);",
    )?;

    // The first owner reads the balance, and then takes longer than its lease lasts.
    let mut first = leases.lock("account:alice");
    let old = first.lock_for(Duration::from_millis(300)).await?;
    let balance = balance(&db)?;
    println!("first  fence {old}: reads {balance}, means to take 3000 off, and is held up");

    // The second waits for the end of that lease, and does its work.
    let mut second = leases.lock("account:alice");
    let new = second.lock().await?;
    save(&db, balance - 2000, new)?;
    println!("second fence {new}: takes 2000 off and writes {}", balance - 2000);

    // The first goes on with what it read. Without the fence this would undo the second's work.
    match save(&db, balance - 3000, old) {
        Err(refused) => println!("first  fence {old}: {refused}"),
        Ok(()) => anyhow::bail!("a stale write was let through"),
    }
    second.unlock().await?;
    println!("the balance is {}", self::balance(&db)?);
    leases.shutdown().await;
    Ok(())
}

/// Checks, writes and marks in one statement, so nobody gets in between.
fn save(db: &Connection, cents: i64, fence: u64) -> anyhow::Result<()> {
    let changed = db.execute(
        "UPDATE account SET cents = ?1, fence = ?2 WHERE name = 'alice' AND fence <= ?2",
        params![cents, i64::try_from(fence)?],
    )?;
    anyhow::ensure!(changed == 1, "refused: a newer owner has written");
    Ok(())
}

fn balance(db: &Connection) -> rusqlite::Result<i64> {
    db.query_row("SELECT cents FROM account WHERE name = 'alice'", [], |row| row.get(0))
}
