//! What must not compile, or must be warned of. Each comes with the right way, which shows that nothing else is wrong with it.

//!
//! # A lease that is dropped at once is warned of
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! leases.lease("k").acquire().await?;
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let _lease = leases.lease("k").acquire().await?;
//! # Ok(()) }
//! ```
//!
//! # A request that is never sent is warned of
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! leases.lease("k");
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let _request = leases.lease("k");
//! # Ok(()) }
//! ```
//!
//! # A lock that is never locked is warned of
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! leases.lock("k");
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let _lock = leases.lock("k");
//! # Ok(()) }
//! ```
//!
//! # A builder that builds nothing is warned of
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! leasehold::Leases::builder().label("me");
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let _builder = leasehold::Leases::builder().label("me");
//! # Ok(()) }
//! ```
//!
//! # A guard that nobody awaits is warned of
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let lease = leases.lease("k").acquire().await?;
//! lease.guard(async {});
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let lease = leases.lease("k").acquire().await?;
//! lease.guard(async {}).await?;
//! # Ok(()) }
//! ```
//!
//! # Work that was given to `with_lease` and never awaited is warned of
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! leases.with_lease("k", async |_| ());
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! leases.with_lease("k", async |_| ()).await?;
//! # Ok(()) }
//! ```
//!
//! # A lease can't be cloned, so that one release ends it
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let lease = leases.lease("k").acquire().await?;
//! let _other: leasehold::Lease = lease.clone();
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let lease = leases.lease("k").acquire().await?;
//! let _other: leasehold::LeaseView = lease.view();
//! # Ok(()) }
//! ```
//!
//! # A lease can't be used after its release
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let lease = leases.lease("k").acquire().await?;
//! lease.release().await?;
//! lease.ensure_held()?;
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let lease = leases.lease("k").acquire().await?;
//! lease.ensure_held()?;
//! lease.release().await?;
//! # Ok(()) }
//! ```
//!
//! # A view can't end the lease that it looks at
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let view = leases.lease("k").acquire().await?.view();
//! view.release().await?;
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let view = leases.lease("k").acquire().await?.view();
//! view.ensure_held()?;
//! # Ok(()) }
//! ```
//!
//! # Two tasks can't lock one handle at once
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let mut lock = leases.lock("k");
//! let (a, b) = tokio::join!(lock.lock(), lock.try_lock());
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let (mut one, mut two) = (leases.lock("k"), leases.lock("k"));
//! let (a, b) = tokio::join!(one.lock(), two.try_lock());
//! # Ok(()) }
//! ```
//!
//! # Work that isn't `Send` can't be spawned
//! ```compile_fail
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let rc = std::rc::Rc::new(1);
//! tokio::spawn(leases.with_lease("k", async move |_| { tokio::task::yield_now().await; *rc }));
//! # Ok(()) }
//! ```
//! ```no_run
//! # #![deny(unused_must_use)]
//! # async fn program(leases: leasehold::Leases) -> leasehold::Result<()> {
//! let rc = std::sync::Arc::new(1);
//! tokio::spawn(leases.with_lease("k", async move |_| { tokio::task::yield_now().await; *rc }));
//! # Ok(()) }
//! ```
