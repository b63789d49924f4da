//! The public face, as the programs that people write with it. Much of what is proved here is that they compile.
use leasehold::{
    CancellationToken, Clock, Error, Key, Lease, LeaseRequest, LeaseView, Leases, Lock, LossReason, Result, Wait,
    store::MemoryStore,
};
use std::{error::Error as StdError, future::Future, io, rc::Rc, sync::Arc, time::Duration};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

const SECOND: Duration = Duration::from_secs(1);

const _: () = {
    const fn shared<T: Send + Sync + 'static>() {}
    shared::<Leases>();
    shared::<Lease>();
    shared::<LeaseView>();
    shared::<Lock>();
    shared::<LeaseRequest>();
    shared::<Error>();
};

async fn job(cancel: CancellationToken) -> bool {
    sleep(SECOND).await;
    cancel.is_cancelled()
}

#[tokio::test(start_paused = true)]
async fn with_lease_takes_a_closure_an_async_closure_and_a_function_by_name() {
    let leases = Leases::in_memory();
    assert!(!leases.with_lease("k", |cancel| async move { cancel.is_cancelled() }).await.unwrap());
    assert!(!leases.with_lease("k", async |cancel| cancel.is_cancelled()).await.unwrap());
    assert!(!leases.with_lease("k", job).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_key_may_be_any_string_owned_or_borrowed() {
    let leases = Leases::in_memory();
    let name = String::from("k");
    leases.with_lease("k", async |_| ()).await.unwrap();
    leases.with_lease(&name, async |_| ()).await.unwrap();
    leases.with_lease(format!("{name}:{}", 1), async |_| ()).await.unwrap();
    leases.with_lease(Key::from(&name), async |_| ()).await.unwrap();
    leases.with_lease(&Key::from("k"), async |_| ()).await.unwrap();
    leases.with_lease(std::borrow::Cow::from("k"), async |_| ()).await.unwrap();
    leases.with_lease(Arc::<str>::from("k"), async |_| ()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn work_may_borrow_locals_and_change_them_across_awaits() {
    let leases = Leases::in_memory();
    let mut seen = Vec::new();
    leases.with_lease("k", |_| async { seen.push(1) }).await.unwrap();
    leases
        .with_lease("k", async |_| {
            seen.push(2);
            sleep(SECOND).await;
            seen.push(3);
        })
        .await
        .unwrap();
    leases
        .lease("k")
        .run(async |lease| {
            sleep(SECOND).await;
            seen.push(if lease.is_held() { 4 } else { 0 });
        })
        .await
        .unwrap();
    assert_eq!(seen, [1, 2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn leased_work_can_be_spawned_in_both_forms_and_boxed() {
    let leases = Leases::in_memory();
    let label = String::from("label");
    let mut tasks = JoinSet::new();
    let mine = label.clone();
    tasks.spawn(leases.with_lease("a", move |cancel| async move {
        sleep(SECOND).await;
        (mine.len(), cancel.is_cancelled())
    }));
    tasks.spawn(leases.with_lease(format!("b{}", 1), async move |cancel| {
        sleep(SECOND).await;
        (label.len(), cancel.is_cancelled())
    }));
    tasks.spawn(leases.lease("c").run(async |lease| {
        sleep(SECOND).await;
        (lease.key().as_str().len(), !lease.is_held())
    }));
    type Boxed<T> = std::pin::Pin<Box<dyn Future<Output = Result<T>> + Send>>;
    let boxed: Boxed<_> = Box::pin(leases.with_lease("d", async |cancel| (4, cancel.is_cancelled())));
    tasks.spawn(boxed);
    let mut got: Vec<_> = tasks.join_all().await.into_iter().map(Result::unwrap).collect();
    got.sort_unstable();
    assert_eq!(got, [(1, false), (4, false), (5, false), (5, false)]);
}

/// A wrapper as a team writes it around the library: generic, and its future can be spawned.
fn timed<F, Fut>(
    leases: &Leases,
    key: &'static str,
    work: F,
) -> impl Future<Output = Result<Fut::Output>> + Send + use<F, Fut>
where
    F: FnOnce(CancellationToken) -> Fut + Send,
    Fut: Future<Output: Send> + Send,
{
    let leased = leases.with_lease(key, work);
    async move { timeout(60 * SECOND, leased).await.unwrap_or(Err(Error::Shutdown)) }
}

#[tokio::test(start_paused = true)]
async fn a_generic_wrapper_can_promise_send() {
    let leases = Leases::in_memory();
    assert_eq!(tokio::spawn(timed(&leases, "k", async |_| 7)).await.unwrap().unwrap(), 7);
    let slow = tokio::spawn(timed(&leases, "k", |_| sleep(120 * SECOND)));
    assert!(slow.await.unwrap().is_err());
}

#[tokio::test(start_paused = true)]
async fn work_that_is_not_send_runs_on_a_current_thread_runtime() {
    let leases = Leases::in_memory();
    let shared = Rc::new(5);
    let got = leases
        .with_lease("k", {
            let shared = shared.clone();
            async move |_| {
                sleep(SECOND).await;
                *shared
            }
        })
        .await;
    assert_eq!(got.unwrap(), 5);
    let tasks = tokio::task::LocalSet::new();
    let leased = leases.with_lease("k", |_| async move { *shared });
    assert_eq!(tasks.run_until(async { tokio::task::spawn_local(leased).await }).await.unwrap().unwrap(), 5);
}

#[derive(Debug, thiserror::Error)]
enum JobError {
    #[error(transparent)]
    Lease(#[from] Error),
    #[error("not a number")]
    Number(#[from] std::num::ParseIntError),
}

/// An error of one's own, without a macro.
#[derive(Debug)]
struct Own(String);
impl From<Error> for Own {
    fn from(error: Error) -> Self {
        Own(error.to_string())
    }
}

#[tokio::test(start_paused = true)]
async fn try_with_lease_brings_both_kinds_of_error_out_as_one() {
    let leases = Leases::in_memory();
    async fn with_anyhow(leases: &Leases) -> anyhow::Result<u32> {
        leases.try_with_lease("k", async |_| Ok("42".parse()?)).await
    }
    async fn with_a_box(leases: &Leases) -> Result<u32, Box<dyn StdError>> {
        leases.try_with_lease("k", async |_| Ok("42".parse()?)).await
    }
    async fn with_a_shared_box(leases: &Leases) -> Result<u32, Box<dyn StdError + Send + Sync>> {
        leases.try_with_lease("k", |_| async { Ok("42".parse()?) }).await
    }
    async fn with_thiserror(leases: &Leases, text: &str) -> Result<u32, JobError> {
        leases.try_with_lease("k", async |_| Ok(text.parse()?)).await
    }
    async fn with_ours(leases: &Leases) -> Result<u32> {
        leases
            .lease("k")
            .try_run(async |lease| {
                lease.ensure_held()?;
                Ok(42)
            })
            .await
    }
    async fn with_io(leases: &Leases) -> io::Result<u32> {
        leases.lease("k").wait(Wait::No).try_run(async |_| Err(io::Error::other("the work's own"))).await
    }
    async fn with_own(leases: &Leases) -> Result<u32, Own> {
        leases.try_with_lease("", async |_| Ok(42)).await
    }
    assert_eq!(with_anyhow(&leases).await.unwrap(), 42);
    assert_eq!(with_a_box(&leases).await.unwrap(), 42);
    assert_eq!(with_a_shared_box(&leases).await.unwrap(), 42);
    assert_eq!(with_thiserror(&leases, "42").await.unwrap(), 42);
    assert!(matches!(with_thiserror(&leases, "x").await, Err(JobError::Number(_))));
    assert_eq!(with_ours(&leases).await.unwrap(), 42);
    assert_eq!(with_io(&leases).await.unwrap_err().to_string(), "the work's own");
    assert!(with_own(&leases).await.unwrap_err().0.contains("key"));
    let named = leases.try_with_lease("k", async |_| -> anyhow::Result<u32> { Ok("42".parse()?) }).await.unwrap();
    assert_eq!(named, 42);

    let held = leases.lease("k").acquire().await.unwrap();
    assert_eq!(with_io(&leases).await.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let error = leases.lease("k").wait(Wait::No).try_run(async |_| Err::<(), _>(JobError::from(Error::Shutdown))).await;
    assert!(matches!(error, Err(JobError::Lease(Error::Contended { .. }))));
    held.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_token_works_in_a_select() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    leases.force_release("k").await.unwrap();
    tokio::select! {
        () = lease.cancel_token().cancelled() => {}
        () = sleep(SECOND) => panic!("the lease is lost, and the token did not fire"),
    }
    let mut lock = leases.lock("k");
    lock.lock().await.unwrap();
    let token = lock.cancel_token().unwrap();
    lock.force_unlock().await.unwrap();
    tokio::select! {
        () = token.cancelled() => assert!(lock.unlock().await.is_err()),
        () = sleep(SECOND) => panic!("the lock is lost, and its token did not fire"),
    }
}

#[tokio::test(start_paused = true)]
async fn cancelling_the_token_oneself_ends_no_lease() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    lease.cancel_token().cancel();
    sleep(60 * SECOND).await;
    assert!(lease.is_held());
    assert_eq!(lease.guard(async { 1 }).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn children_and_blocking_threads_work_with_a_view_and_see_the_release() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    let mut children = JoinSet::new();
    for _ in 0..3 {
        let view = lease.view();
        children.spawn(async move { view.guard(sleep(SECOND)).await.map(|()| view) });
    }
    let view = lease.view();
    children.spawn(async move {
        tokio::task::spawn_blocking(move || {
            view.ensure_held()?;
            view.ensure_held_for(SECOND)?;
            Ok(view)
        })
        .await
        .unwrap()
    });
    let views: Vec<LeaseView> = children.join_all().await.into_iter().map(Result::unwrap).collect();
    lease.release().await.unwrap();
    for view in views {
        let error = view.ensure_held().unwrap_err();
        assert_eq!(error.lost().unwrap().reason, LossReason::Released);
        assert!(view.guard(async {}).await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn a_step_longer_than_what_is_left_is_refused_and_says_how_much_is_left() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    lease.ensure_held_for(29 * SECOND).unwrap();
    let error = lease.ensure_held_for(30 * SECOND).unwrap_err();
    assert!(matches!(error, Error::Expiring { valid_for, .. } if valid_for == lease.valid_for()), "{error}");
    assert_eq!(lease.valid_until(), tokio::time::Instant::now() + lease.valid_for());
}

#[tokio::test(start_paused = true)]
async fn a_lease_names_its_key_its_fence_and_whoever_took_it() {
    let leases = Leases::builder().label("worker-7").clock(Clock::tokio()).build(MemoryStore::new()).unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    let holding = leases.inspect("k").await.unwrap().unwrap();
    assert_eq!((lease.key().as_str(), lease.label()), ("k", "worker-7"));
    assert_eq!((holding.fence, holding.label.as_deref()), (Some(lease.fence()), Some("worker-7")));
}

#[tokio::test(start_paused = true)]
async fn a_value_is_written_under_a_lease_and_not_under_one_that_was_lost_or_overtaken() {
    let leases = Leases::in_memory();
    let first = leases.lease("k").acquire().await.unwrap();
    first.write("v", "first").await.unwrap();
    assert_eq!(leases.read("v").await.unwrap().as_deref(), Some(&b"first"[..]));
    let stale = first.fence();
    leases.force_release("k").await.unwrap();
    assert!(first.write("v", "lost").await.unwrap_err().lost().is_some());

    let next = leases.lease("k").acquire().await.unwrap();
    next.write("v", "next").await.unwrap();
    assert!(matches!(leases.write("v", "stale", stale).await, Err(Error::Stale(_))));
    assert_eq!(leases.read("v").await.unwrap().as_deref(), Some(&b"next"[..]));
}

#[tokio::test(start_paused = true)]
async fn debug_shows_what_each_handle_is_about() {
    let leases = Leases::in_memory();
    let request = leases.lease("invoice:17").ttl(7 * SECOND);
    let lease = request.clone().acquire().await.unwrap();
    let mut lock = leases.lock("order:42");
    lock.lock().await.unwrap();
    let guard = lease.guard(async {});
    for (shown, about) in [
        (format!("{request:?}"), ["LeaseRequest", "invoice:17", "7s"]),
        (format!("{lease:?}"), ["LeaseView", "invoice:17", "Held"]),
        (format!("{:?}", lease.view()), ["LeaseView", "invoice:17", &lease.fence().to_string()]),
        (format!("{guard:?}"), ["Guard", "invoice:17", ""]),
        (format!("{lock:?}"), ["Lock", "order:42", "hold_count: 1"]),
        (format!("{:?}", MemoryStore::new()), ["MemoryStore", "", ""]),
    ] {
        assert!(about.iter().all(|word| shown.contains(word)), "{about:?} in {shown}");
    }
}

/// A function that may only be called under a lease says so by its argument.
fn append(_under: &LeaseView, row: u32, rows: &mut Vec<u32>) {
    rows.push(row);
}

#[tokio::test(start_paused = true)]
async fn guard_takes_pinned_and_boxed_work_and_combinators() {
    let leases = Leases::in_memory();
    let lease = leases.lease("k").acquire().await.unwrap();
    let mut rows = Vec::new();
    append(&lease, 1, &mut rows);
    append(&lease.view(), 2, &mut rows);
    let mut pinned = Box::pin(async {
        sleep(SECOND).await;
        1
    });
    assert!(timeout(SECOND / 2, lease.guard(pinned.as_mut())).await.is_err());
    assert_eq!(lease.guard(pinned).await.unwrap(), 1);
    assert!(lease.guard(timeout(SECOND, sleep(2 * SECOND))).await.unwrap().is_err());
    assert_eq!(lease.guard(async { tokio::join!(async { 1 }, async { 2 }) }).await.unwrap(), (1, 2));
    assert_eq!(rows, [1, 2]);
}

#[test]
fn requests_locks_and_guards_are_made_outside_a_runtime() {
    let leases = Leases::in_memory();
    let (request, mut lock) = (leases.lease("k").ttl(5 * SECOND), leases.lock("l"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let lease = runtime.block_on(request.clone().acquire()).unwrap();
    let guarded = lease.guard(async { 1 });
    assert_eq!(runtime.block_on(guarded).unwrap(), 1);
    runtime.block_on(lock.lock()).unwrap();
    runtime.block_on(lock.unlock()).unwrap();
    runtime.block_on(lease.release()).unwrap();
}

/// A lock as a field: nothing stays borrowed while it is held.
struct Till {
    lock: Lock,
    sum: u64,
}

impl Till {
    async fn take(&mut self, amount: u64) -> Result<u64> {
        let fence = self.lock.lock().await?;
        self.add(amount);
        let sum = self.read();
        self.lock.unlock().await?;
        assert!(fence > 0);
        Ok(sum)
    }
    fn add(&mut self, amount: u64) {
        self.sum += amount;
    }
    fn read(&self) -> u64 {
        self.sum
    }
}

async fn deeper(lock: &mut Lock, depth: u32) -> Result<u32> {
    lock.lock().await?;
    let deepest = if depth == 0 { lock.hold_count() } else { Box::pin(deeper(lock, depth - 1)).await? };
    lock.unlock().await?;
    Ok(deepest)
}

#[tokio::test(start_paused = true)]
async fn a_lock_lives_in_a_struct_nests_and_can_be_spawned() {
    let leases = Leases::in_memory();
    let mut till = Till { lock: leases.lock("till"), sum: 0 };
    assert_eq!(till.take(3).await.unwrap(), 3);
    let mut till = tokio::spawn(async move { till.take(4).await.map(|_| till) }).await.unwrap().unwrap();
    assert_eq!(till.read(), 7);
    assert_eq!(deeper(&mut till.lock, 3).await.unwrap(), 4);
    assert_eq!(till.lock.hold_count(), 0);
    assert!(!till.lock.is_locked().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_timeout_around_lock_leaves_the_handle_usable_and_nothing_held() {
    let leases = Leases::in_memory();
    let mut other = leases.lock("k");
    other.lock().await.unwrap();
    let mut lock = leases.lock("k");
    match timeout(SECOND, lock.lock()).await {
        Ok(_) => panic!("somebody else holds it"),
        Err(_) => assert_eq!((lock.hold_count(), lock.fence(), lock.is_held()), (0, None, false)),
    }
    other.unlock().await.unwrap();
    let fence = timeout(SECOND, lock.lock()).await.unwrap().unwrap();
    assert_eq!(lock.fence(), Some(fence));
    assert_eq!(lock.view().unwrap().fence(), fence);
    lock.unlock().await.unwrap();
    assert!(matches!(lock.view(), Err(Error::NotHeld { .. })));
}

#[tokio::test(start_paused = true)]
async fn two_tasks_that_share_one_handle_are_one_owner() {
    let leases = Leases::in_memory();
    let shared = Arc::new(tokio::sync::Mutex::new(leases.lock("k")));
    let first = shared.lock().await.lock().await.unwrap();
    let second = tokio::spawn({
        let shared = shared.clone();
        async move { shared.lock().await.lock().await.unwrap() }
    });
    assert_eq!(second.await.unwrap(), first);
    assert_eq!(shared.lock().await.hold_count(), 2);
}
