//! Renews all leases, watches all deadlines, says all farewells: one task for each `Leases`.
use crate::{
    clock::Moment,
    engine::Engine,
    error::StoreError,
    store::{Renewal, Renewed},
    tenure::{Action, COALESCE, Tenure},
};
use std::{collections::BTreeMap, future::Future, sync::Arc, time::Duration};
use tokio::task::{JoinError, JoinSet};

/// The longest list of renewals, so that the server is never held for more than a moment.
const LONGEST_LIST: usize = 256;

/// Runs the watchdog, and another should it panic: leases must not lose it in silence.
pub(crate) async fn supervise(engine: Arc<Engine>, generation: u64) {
    loop {
        match tokio::spawn(watch(engine.clone(), generation)).await {
            Ok(()) => return,
            Err(end) if end.is_panic() => {
                tracing::error!("the watchdog panicked, which is a bug in leasehold or in a store; it starts again");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            // The runtime ends. The next acquisition starts another watchdog.
            Err(_) => return,
        }
    }
}

async fn watch(engine: Arc<Engine>, generation: u64) {
    // Ends with this function, and with it everything in flight.
    let mut under_way = JoinSet::new();
    let wake = engine.schedule.take_over();
    loop {
        if engine.is_superseded(generation) {
            // Another looks after the leases; what was begun here is ended here.
            while let Some(done) = under_way.join_next().await {
                note(done);
            }
            return;
        }
        let now = engine.clock.now();
        engine.beat(now);
        for list in due_lists(&engine, now) {
            under_way.spawn(renew(engine.clone(), list));
        }
        // Looked at before the farewells are taken: what the last handle says as it goes is still to be said.
        let retired = engine.is_retired();
        for farewell in engine.take_farewells() {
            under_way.spawn(farewell.say(engine.clone()));
        }
        // Every lease that is watched holds a handle, so then there are none.
        if retired && under_way.is_empty() {
            return;
        }
        // Timers stand still while the machine sleeps, so it looks at the clock each second whatever is due.
        let until = engine.schedule.look_at(now);
        tokio::select! {
            // Each turn does all that is due, so none of these keeps the others waiting.
            biased;
            Some(done) = under_way.join_next(), if !under_way.is_empty() => note(done),
            () = wake.notified() => {}
            () = engine.clock.sleep_until(until), if until != Moment::NEVER => {}
        }
    }
}

fn note(done: Result<(), JoinError>) {
    if done.is_err_and(|end| end.is_panic()) {
        tracing::error!("a store panicked; the exchange counts as unanswered");
    }
}

/// Does what is due, and gathers what has to be renewed into lists, each for one lane.
fn due_lists(engine: &Engine, now: Moment) -> Vec<Vec<Arc<Tenure>>> {
    let mut lanes = Lanes::default();
    let due = engine.schedule.due(now.after(COALESCE));
    // A store's own code, so all of it before the first tick: what has ticked counts as under way, though this may panic.
    let due: Vec<_> = due.into_iter().map(|tenure| (engine.store.lane(&tenure.key), tenure)).collect();
    for (lane, tenure) in due {
        match tenure.tick(now) {
            Action::Renew => lanes.0.entry(lane).or_default().push(tenure),
            Action::Nothing => {}
        }
    }
    let mut lists = Vec::new();
    for mut lane in std::mem::take(&mut lanes.0).into_values() {
        while lane.len() > LONGEST_LIST {
            let rest = lane.split_off(LONGEST_LIST);
            lists.push(std::mem::replace(&mut lane, rest));
        }
        lists.push(lane);
    }
    lists
}

/// What has ticked and is still to be sent, by lane. A tick tells wakers and the log, which are other people's code: when
/// one of them panics, what had ticked before is not under way.
#[derive(Default)]
struct Lanes(BTreeMap<u32, Vec<Arc<Tenure>>>);

impl Drop for Lanes {
    fn drop(&mut self) {
        for tenure in self.0.values().flatten() {
            tenure.not_sent();
        }
    }
}

/// Not an `async fn`: its list has to be answered also when its runtime ends before the first poll.
fn renew(engine: Arc<Engine>, tenures: Vec<Arc<Tenure>>) -> impl Future<Output = ()> {
    let renewals: Vec<Renewal> = tenures.iter().map(|tenure| tenure.renewal()).collect();
    let give_up = tenures.iter().map(|tenure| tenure.alarm_at()).max().unwrap_or(Moment(0));
    let asked = tenures.len();
    let mut list = List { sent: engine.clock.now(), waiting: tenures.into_iter() };
    async move {
        tokio::select! {
            biased;
            answers = engine.store.renew_all(&renewals) => {
                if answers.len() != asked {
                    tracing::error!("a store gave {} answers to {asked} renewals", answers.len());
                }
                for answer in answers {
                    list.next(Some(answer));
                }
            }
            // The leases end by their own deadlines; nobody needs the answer any more.
            () = engine.clock.sleep_until(give_up) => {}
        }
    }
}

/// Renewals on their way. Whatever becomes of the list, each of them gets an answer or is told that there was none.
struct List {
    sent: Moment,
    waiting: std::vec::IntoIter<Arc<Tenure>>,
}

impl List {
    fn next(&mut self, answer: Option<Result<Renewed, StoreError>>) -> bool {
        let Some(tenure) = self.waiting.next() else { return false };
        tenure.answered(self.sent, answer);
        true
    }
}

impl Drop for List {
    fn drop(&mut self) {
        while self.next(None) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Leases, store::MemoryStore};
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        pin::pin,
        task::{Context, Wake},
    };

    /// A task may be dropped with its runtime before it was polled once.
    #[tokio::test(start_paused = true)]
    async fn a_renewal_whose_runtime_ends_before_its_first_poll_is_in_flight_no_more() {
        let clock = Clock::tokio();
        let leases = Leases::builder().clock(clock.clone()).build(MemoryStore::with_clock(clock.clone())).unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let tenure = lease.tenure();
        clock.suspend(Duration::from_secs(10));
        assert_eq!(tenure.tick(clock.now()), Action::Renew);
        assert!(tenure.settling().is_some());
        drop(renew(tenure.keeper.0.clone(), vec![tenure.clone()]));
        assert!(tenure.settling().is_none());
    }

    /// Its waker panics when it is told that its lease ends.
    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker that panics");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_waker_that_panics_as_one_lease_ends_leaves_no_renewal_of_another_in_flight_that_was_never_sent() {
        let clock = Clock::tokio();
        let builder = Leases::builder().clock(clock.clone()).ttl(Duration::from_secs(3));
        let leases = builder.build(MemoryStore::with_clock(clock.clone())).unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let mut fixed = leases.lock("fixed");
        fixed.lock_for(Duration::from_millis(1200)).await.unwrap();
        let token = fixed.cancel_token().unwrap();
        let mut cancelled = pin!(token.cancelled());
        let waker = Arc::new(Panics).into();
        assert!(cancelled.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        tokio::time::sleep(Duration::from_millis(100)).await;
        // The renewal of the one is due a moment before the end of the other, and both are due at the same look.
        clock.suspend(Duration::from_secs(1));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(token.is_cancelled() && lease.valid_for() > Duration::from_millis(1500), "{:?}", lease.valid_for());
        assert!(lease.tenure().settling().is_none(), "a release would wait for it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waker_that_panics_at_a_leases_own_trouble_leaves_no_renewal_of_it_in_flight_that_was_never_sent() {
        let clock = Clock::tokio();
        let leases = Leases::builder().clock(clock.clone()).build(MemoryStore::with_clock(clock.clone())).unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let (tenure, mut watch) = (lease.tenure().clone(), lease.watch());
        clock.suspend(Duration::from_secs(10));
        let first = clock.now();
        assert_eq!(tenure.tick(first), Action::Renew);
        let waker = Arc::new(Panics).into();
        let mut changed = Box::pin(watch.changed());
        assert!(changed.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        // The first has had its time; that the next is sent beside it is trouble, and told.
        clock.suspend(Duration::from_secs(5));
        let ticked = catch_unwind(AssertUnwindSafe(|| tenure.tick(clock.now())));
        assert!(ticked.is_err(), "the waker was not woken: {ticked:?}");
        assert_eq!(tenure.tick(clock.now()), Action::Renew, "it is due again");
        for _ in 0..2 {
            tenure.answered(first, Some(Ok(Renewed::Renewed)));
        }
        assert!(tenure.settling().is_none(), "a release would wait for it");
    }
}
