//! One ownership as this process sees it: what is certain, until when, and what comes next.
//!
//! Everything that can end a lease meets here: answers, deadlines, releases and shutdown. Nothing here does I/O.
mod news;
mod renewing;

use self::news::News;
pub(crate) use self::renewing::{Action, COALESCE};
use crate::{
    Key,
    clock::{Clock, Moment},
    engine::Keeper,
    error::{LossReason, Lost, StoreError},
    farewell::Farewell,
    lease::LeaseState,
    settings::Plan,
    store::{Owner, Renewal},
    term::Term,
};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

/// What a store handed out, with the moment at which the claim for it was sent.
pub(crate) struct Grant {
    pub(crate) key: Key,
    pub(crate) owner: Owner,
    pub(crate) fence: u64,
    pub(crate) term: Term,
    /// It came from the line, and is shorter than the TTL: it has to be renewed at once.
    pub(crate) handed_over: bool,
    /// Until then an earlier claim of this owner may still be carried out; see [`Tenure::echo_until`].
    pub(crate) echo_until: Moment,
}

pub(crate) struct Tenure {
    pub(crate) key: Key,
    pub(crate) owner: Owner,
    pub(crate) fence: u64,
    pub(crate) plan: Plan,
    /// A claim of this owner that was never answered may be carried out until then, so a release before it has to be
    /// repeated after it.
    pub(crate) echo_until: Moment,
    /// Tells apart what is due at the same moment.
    pub(crate) id: u64,
    pub(crate) keeper: Arc<Keeper>,
    /// Nanoseconds of the clock; zero once the lease has ended. All that a poll of guarded work reads.
    valid_until: AtomicU64,
    /// Likewise; `u64::MAX` once the token has fired.
    cancel_at: AtomicU64,
    state: Mutex<State>,
    /// Both are made when first asked for: most leases need neither.
    token: OnceLock<CancellationToken>,
    watch: OnceLock<watch::Sender<LeaseState>>,
    ended: Arc<Notify>,
}

/// What few leases ever have is boxed: there may be a hundred thousand of these.
struct State {
    phase: Phase,
    /// When to send the next renewal.
    renew_at: Moment,
    /// No renewal moves validity past this.
    cap: Option<Box<(Moment, LossReason)>>,
    /// Renewals sent and not answered yet.
    in_flight: u32,
    /// When the latest renewal that succeeded was sent: what became of those before it says nothing any more.
    confirmed: Option<Moment>,
    /// A renewal was sent, and none has succeeded since.
    awaited: bool,
    /// The last renewal failed, or wasn't answered in time, and what was said.
    trouble: Option<Box<StoreError>>,
    /// Where the schedule has us.
    due: Option<Moment>,
    /// Rings when the last renewal in flight is over; made by a release that has to wait for it.
    settled: Option<Arc<Notify>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    /// The token has fired; ownership is certain until `valid_until`, and is not prolonged.
    Ending,
    Lost(Box<LossReason>),
    Released,
}

impl Tenure {
    pub(crate) fn begin(grant: Grant, plan: Plan, keeper: Arc<Keeper>) -> Arc<Tenure> {
        let Grant { key, owner, fence, term, handed_over, echo_until } = grant;
        let cap = plan.max_hold.map(|max_hold| Box::new((term.sent.after(max_hold), LossReason::MaxHold)));
        let id = keeper.next_id();
        let renew_at = if handed_over { term.sent } else { term.first_renew_at(fastrand::f64()) };
        let tenure = Arc::new(Tenure {
            key,
            owner,
            fence,
            plan,
            echo_until,
            id,
            keeper,
            valid_until: AtomicU64::new(0),
            cancel_at: AtomicU64::new(u64::MAX),
            state: Mutex::new(State {
                phase: Phase::Held,
                renew_at: Moment::NEVER,
                cap,
                in_flight: 0,
                confirmed: None,
                awaited: false,
                trouble: None,
                due: None,
                settled: None,
            }),
            token: OnceLock::new(),
            watch: OnceLock::new(),
            ended: Arc::default(),
        });
        let mut state = tenure.lock();
        tenure.extend(&state, &term);
        state.renew_at = if handed_over || tenure.can_gain(&state) { renew_at } else { Moment::NEVER };
        tenure.reschedule(&mut state);
        drop(state);
        tenure
    }

    pub(crate) fn clock(&self) -> &Clock {
        self.keeper.clock()
    }

    /// Whether ownership is certain now; what a guard asks before and after each poll. Also does what the watchdog would
    /// have done by now, should it be starved.
    #[inline]
    pub(crate) fn is_valid(self: &Arc<Self>) -> bool {
        let now = self.clock().now().0;
        let valid_until = self.valid_until.load(Ordering::Acquire);
        let over = now >= valid_until && valid_until != 0;
        if over || now >= self.cancel_at.load(Ordering::Acquire) {
            self.catch_up(Moment(now));
        }
        now < self.valid_until.load(Ordering::Acquire)
    }

    pub(crate) fn valid_for(&self) -> Duration {
        self.valid_until().since(self.clock().now())
    }

    pub(crate) fn valid_until(&self) -> Moment {
        Moment(self.valid_until.load(Ordering::Acquire))
    }

    /// When to look next, for whoever doesn't rely on the watchdog: at the cancellation, then at the end of validity.
    pub(crate) fn alarm_at(&self) -> Moment {
        Moment(self.cancel_at.load(Ordering::Acquire)).min(self.valid_until())
    }

    /// Rings when the lease has ended.
    pub(crate) fn ended(&self) -> &Arc<Notify> {
        &self.ended
    }

    pub(crate) fn token(&self) -> &CancellationToken {
        let token = self.token.get_or_init(CancellationToken::new);
        // Made first, looked at after: whoever fires looks for a token after the phase has changed.
        if self.lock().phase != Phase::Held {
            token.cancel();
        }
        token
    }

    pub(crate) fn watch(self: &Arc<Self>) -> watch::Receiver<LeaseState> {
        let sender = self.watch.get_or_init(|| watch::channel(LeaseState::Held).0);
        let receiver = sender.subscribe();
        self.is_valid();
        self.show(sender);
        receiver
    }

    pub(crate) fn state(self: &Arc<Self>) -> LeaseState {
        self.is_valid();
        self.lock().shown()
    }

    /// The loss, once there is one. A release counts, for whoever still looks.
    pub(crate) fn loss(self: &Arc<Self>) -> Option<Lost> {
        self.is_valid();
        let reason = match &self.lock().phase {
            Phase::Held | Phase::Ending => return None,
            Phase::Lost(reason) => (**reason).clone(),
            Phase::Released => LossReason::Released,
        };
        Some(Lost::new(&self.key, self.fence, reason))
    }

    /// Waits for the end of the lease.
    pub(crate) async fn over(self: &Arc<Self>) -> Lost {
        loop {
            // Registered before the look, so that no end falls between the two.
            let ended = self.ended.clone().notified_owned();
            if let Some(lost) = self.loss() {
                return lost;
            }
            tokio::select! {
                biased;
                () = ended => {}
                () = self.clock().sleep_until(self.valid_until()) => {}
            }
        }
    }

    pub(crate) fn renewal(&self) -> Renewal {
        Renewal::new(self.key.clone(), self.owner.clone(), self.fence, self.plan.ttl)
    }

    /// What the watchdog would have done by now, should it be starved. Sends nothing.
    fn catch_up(self: &Arc<Self>, now: Moment) {
        self.change(|state| ((), self.keep_deadlines(state, now)));
    }

    fn keep_deadlines(&self, state: &mut State, now: Moment) -> News {
        if !state.is_live() {
            return News::default();
        }
        let capped = state.cap.as_deref().filter(|(at, _)| *at <= self.valid_until()).map(|(_, reason)| reason.clone());
        if now >= self.valid_until() {
            let reason = capped.unwrap_or_else(|| LossReason::Deadline { last: state.trouble.as_deref().cloned() });
            return self.lose(state, reason);
        }
        if state.phase == Phase::Held && now.0 >= self.cancel_at.load(Ordering::Acquire) {
            state.phase = Phase::Ending;
            state.renew_at = Moment::NEVER;
            self.cancel_at.store(u64::MAX, Ordering::Release);
            return News::ending(capped);
        }
        News::default()
    }

    fn lose(&self, state: &mut State, reason: LossReason) -> News {
        state.phase = Phase::Lost(Box::new(reason.clone()));
        self.close();
        News::lost(reason)
    }

    /// Ends the lease at `at` at the latest, for `reason`; the token fires one grace before.
    pub(crate) fn cap(self: &Arc<Self>, at: Moment, reason: LossReason) {
        let now = self.clock().now();
        self.change(|state| {
            if !state.is_live() || state.cap.as_deref().is_some_and(|(had, _)| *had <= at) {
                return ((), News::default());
            }
            state.cap = Some(Box::new((at, reason)));
            if at < self.valid_until() {
                self.valid_until.store(at.0, Ordering::Release);
            }
            if state.phase == Phase::Held {
                self.cancel_at.fetch_min(at.before(self.plan.grace).0, Ordering::AcqRel);
            }
            ((), self.keep_deadlines(state, now))
        });
    }

    /// Somebody released it by force, and the store said so.
    pub(crate) fn forced(self: &Arc<Self>) {
        self.change(|state| {
            let news = if state.is_live() { self.lose(state, LossReason::Forced) } else { News::default() };
            ((), news)
        });
    }

    /// The handle is done with it: renewal stops here, whatever becomes of the release.
    ///
    /// # Errors
    /// How it was lost, if it was lost before.
    pub(crate) fn end(self: &Arc<Self>) -> Result<(), LossReason> {
        let now = self.clock().now();
        self.change(|state| {
            let news = self.keep_deadlines(state, now);
            match &state.phase {
                Phase::Lost(reason) => (Err((**reason).clone()), news),
                Phase::Released => (Ok(()), news),
                Phase::Held | Phase::Ending => {
                    state.phase = Phase::Released;
                    self.close();
                    (Ok(()), News::released())
                }
            }
        })
    }

    /// Moves the deadlines, never back. Whether they moved.
    fn extend(&self, state: &State, term: &Term) -> bool {
        let cap = state.cap.as_deref().map_or(Moment::NEVER, |(at, _)| *at);
        let valid_until = term.valid_until().min(cap);
        let cancel_at = term.cancel_at().min(cap.before(self.plan.grace));
        if valid_until <= self.valid_until() {
            return false;
        }
        self.cancel_at.store(cancel_at.0, Ordering::Release);
        self.valid_until.store(valid_until.0, Ordering::Release);
        true
    }

    /// Something to wait for before a release is sent, when a renewal is in flight: at most as long as one attempt may
    /// take. What is still unanswered then can do no harm on the server: a renewal proves owner and fence, and creates
    /// nothing.
    pub(crate) fn settling(&self) -> Option<Settling> {
        let mut state = self.lock();
        (state.in_flight > 0)
            .then(|| Settling { settled: state.settled.get_or_insert_default().clone(), at_most: self.an_attempt() })
    }

    /// Whether the store may still have something of ours once the lease has been lost for this reason. What the store said
    /// is somebody else's or gone is neither, unless a claim of ours was still on its way as we got the key: that may have
    /// taken it again since. What merely ran out here may still be ours there.
    pub(crate) fn leaves_something(&self, reason: &LossReason) -> bool {
        !reason.is_the_stores_word() || self.echo_until > Moment(0)
    }

    /// Queues a release of what this tenure has in the store.
    pub(crate) fn bid_farewell(&self) {
        let now = self.clock().now();
        self.keeper.bid_farewell(Farewell {
            key: self.key.clone(),
            owner: self.owner.clone(),
            attempt: self.plan.attempt,
            settling: self.settling(),
            until: now.after(self.plan.ttl),
            again_at: (now < self.echo_until).then_some(self.echo_until),
            parting: self.keeper.partings.begin(),
        });
    }

    /// How long one attempt may take, with what the store may take longer.
    fn an_attempt(&self) -> Duration {
        self.plan.attempt + self.keeper.slack
    }

    fn close(&self) {
        self.valid_until.store(0, Ordering::Release);
        self.cancel_at.store(u64::MAX, Ordering::Release);
    }

    /// Changes the state under its lock. Then the tenure moves to where it is due next, and the news are told: not under the
    /// lock, for wakers and whoever writes the log are other people's code.
    fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut State) -> (T, News)) -> T {
        let mut state = self.lock();
        let (result, news) = change(&mut state);
        self.reschedule(&mut state);
        drop(state);
        self.tell(news);
        result
    }

    /// Puts the tenure where it is due next, or takes it out when nothing is.
    fn reschedule(self: &Arc<Self>, state: &mut State) {
        let due = match state.phase {
            Phase::Held => Some(state.renew_at.min(self.alarm_at())),
            Phase::Ending => Some(self.valid_until()),
            Phase::Lost(_) | Phase::Released => None,
        };
        if due != state.due || due.is_some() {
            self.keeper.schedule(self, state.due, due);
            state.due = due;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic leaves the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of the renewals in flight.
pub(crate) struct Settling {
    settled: Arc<Notify>,
    at_most: Duration,
}

impl Settling {
    pub(crate) async fn wait(self) {
        // Over either way: see `Tenure::settling`.
        let _ = tokio::time::timeout(self.at_most, self.settled.notified()).await;
    }
}

impl State {
    fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Held | Phase::Ending)
    }

    fn shown(&self) -> LeaseState {
        match &self.phase {
            Phase::Held | Phase::Ending if self.trouble.is_some() => LeaseState::AtRisk,
            Phase::Held | Phase::Ending => LeaseState::Held,
            Phase::Lost(reason) => LeaseState::Lost((**reason).clone()),
            Phase::Released => LeaseState::Released,
        }
    }
}
