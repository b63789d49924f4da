//! One ownership as this process sees it: what is certain, until when, and what comes next.
//!
//! Everything that can end a lease meets here: answers, deadlines, releases and shutdown. Nothing here does I/O.
use crate::{
    Key,
    clock::{Clock, Moment},
    engine::Keeper,
    error::{LossReason, Lost, StoreError},
    farewell::Farewell,
    lease::LeaseState,
    settings::Plan,
    store::{Owner, Renewal, Renewed},
    term::{self, Term},
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

struct State {
    phase: Phase,
    /// When to send the next renewal.
    renew_at: Moment,
    /// No renewal moves validity past this.
    cap: Option<(Moment, LossReason)>,
    /// Renewals sent and not answered yet.
    in_flight: u32,
    /// When the latest renewal that succeeded was sent: what became of those before it says nothing any more.
    confirmed: Option<Moment>,
    /// A renewal was sent, and none has succeeded since.
    awaited: bool,
    /// The last renewal failed, or wasn't answered in time, and what was said.
    trouble: Option<Option<StoreError>>,
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
    Lost(LossReason),
    Released,
}

/// What the watchdog has to do for a tenure that is due.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Renew,
    Nothing,
}

/// What changed under the lock and has to be told after it: wakers run other people's code.
#[derive(Default)]
#[must_use]
struct News {
    cancelled: bool,
    ended: bool,
    state: Option<LeaseState>,
}

impl Tenure {
    pub(crate) fn begin(grant: Grant, plan: Plan, keeper: Arc<Keeper>) -> Arc<Tenure> {
        let Grant { key, owner, fence, term, handed_over, echo_until } = grant;
        let cap = plan.max_hold.map(|max_hold| (term.sent.after(max_hold), LossReason::MaxHold));
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
        let state = self.state();
        sender.send_if_modified(|seen| std::mem::replace(seen, state.clone()) != state);
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
            Phase::Lost(reason) => reason.clone(),
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

    /// The watchdog's turn: does what is due at `now`, and says whether a renewal has to be sent.
    pub(crate) fn tick(self: &Arc<Self>, now: Moment) -> Action {
        let mut state = self.lock();
        let mut news = self.keep_deadlines(&mut state, now);
        let mut action = Action::Nothing;
        // What is due soon travels with what is due now; but a retry has its time, or it would be sent in a tight loop.
        let calm = state.in_flight == 0 && state.trouble.is_none();
        let horizon = if calm { now.after(COALESCE) } else { now };
        if state.phase == Phase::Held && horizon >= state.renew_at {
            news = self.attempt(&mut state, now);
            action = Action::Renew;
        }
        self.reschedule(&mut state);
        drop(state);
        self.tell(news);
        action
    }

    /// What the watchdog would have done by now, should it be starved. Sends nothing.
    fn catch_up(self: &Arc<Self>, now: Moment) {
        let mut state = self.lock();
        let news = self.keep_deadlines(&mut state, now);
        self.reschedule(&mut state);
        drop(state);
        self.tell(news);
    }

    fn keep_deadlines(&self, state: &mut State, now: Moment) -> News {
        if !matches!(state.phase, Phase::Held | Phase::Ending) {
            return News::default();
        }
        if now >= self.valid_until() {
            let reason = match &state.cap {
                Some((at, reason)) if *at <= self.valid_until() => reason.clone(),
                _ => LossReason::Deadline { last: state.trouble.clone().flatten() },
            };
            return self.lose(state, reason);
        }
        if state.phase == Phase::Held && now.0 >= self.cancel_at.load(Ordering::Acquire) {
            return self.stop(state);
        }
        News::default()
    }

    /// A renewal is about to be sent; the next follows when this one has had its time.
    fn attempt(&self, state: &mut State, now: Moment) -> News {
        let news = if std::mem::replace(&mut state.awaited, true) && state.in_flight > 0 {
            let silent = StoreError::unavailable("a renewal was not answered in time");
            self.trouble(state, silent)
        } else {
            News::default()
        };
        let patience = term::patience(now, Moment(self.cancel_at.load(Ordering::Acquire)), self.plan.attempt);
        state.renew_at = if patience < SHORTEST { Moment::NEVER } else { now.after(patience) };
        state.in_flight += 1;
        news
    }

    /// The answer to a renewal sent at `sent`; `None` when there was none.
    pub(crate) fn answered(self: &Arc<Self>, sent: Moment, answer: Option<Result<Renewed, StoreError>>) {
        let now = self.clock().now();
        let mut state = self.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        if state.in_flight == 0
            && let Some(settled) = state.settled.take()
        {
            settled.notify_waiters();
            settled.notify_one();
        }
        let live = matches!(state.phase, Phase::Held | Phase::Ending);
        let news = match answer {
            Some(Ok(Renewed::Gone)) if live => self.lose(&mut state, LossReason::Expired),
            Some(Ok(Renewed::Taken)) if live => self.lose(&mut state, LossReason::Taken),
            _ if state.phase != Phase::Held || state.confirmed.is_some_and(|last| sent <= last) => News::default(),
            // What has run out stays lost: the token has fired, and others may have been let in.
            _ if now >= self.valid_until() => self.keep_deadlines(&mut state, now),
            Some(Ok(_)) => self.renewed(&mut state, sent),
            Some(Err(error)) => self.failed(&mut state, error, now),
            None => self.failed(&mut state, StoreError::unavailable("a renewal was not answered"), now),
        };
        self.reschedule(&mut state);
        drop(state);
        self.tell(news);
    }

    fn renewed(&self, state: &mut State, sent: Moment) -> News {
        let term = Term::new(sent, self.plan.ttl, self.plan.ttl, self.plan.grace);
        (state.confirmed, state.awaited) = (Some(sent), false);
        let extended = self.extend(state, &term);
        if !self.can_gain(state) {
            state.renew_at = Moment::NEVER;
        } else if extended {
            state.renew_at = term.renew_at();
        }
        let mut news = News::default();
        if state.trouble.take().is_some() {
            tracing::info!(key = %self.key, fence = self.fence, valid_for = ?self.valid_for(), "lease renewed late");
            news.state = Some(LeaseState::Held);
        }
        news
    }

    fn failed(&self, state: &mut State, error: StoreError, now: Moment) -> News {
        let patience = term::patience(now, Moment(self.cancel_at.load(Ordering::Acquire)), self.plan.attempt);
        if patience >= SHORTEST {
            // With jitter: a server that comes back should not be met by everybody at once.
            state.renew_at = state.renew_at.min(now.after(patience.mul_f64(0.25 + fastrand::f64() / 4.0)));
        }
        self.trouble(state, error)
    }

    fn trouble(&self, state: &mut State, error: StoreError) -> News {
        let mut news = News::default();
        if state.trouble.is_none() {
            tracing::warn!(key = %self.key, fence = self.fence, valid_for = ?self.valid_for(), %error, "lease at risk");
            news.state = Some(LeaseState::AtRisk);
        }
        state.trouble = Some(Some(error));
        news
    }

    /// Whether another renewal could move the end of validity.
    fn can_gain(&self, state: &State) -> bool {
        self.plan.renews && state.cap.as_ref().is_none_or(|(at, _)| *at > self.valid_until())
    }

    /// Moves the deadlines, never back. Whether they moved.
    fn extend(&self, state: &State, term: &Term) -> bool {
        let cap = state.cap.as_ref().map_or(Moment::NEVER, |(at, _)| *at);
        let valid_until = term.valid_until().min(cap);
        let cancel_at = term.cancel_at().min(cap.before(self.plan.grace));
        if valid_until <= self.valid_until() {
            return false;
        }
        self.cancel_at.store(cancel_at.0, Ordering::Release);
        self.valid_until.store(valid_until.0, Ordering::Release);
        true
    }

    /// Ends the lease at `at` at the latest, for `reason`; the token fires one grace before.
    pub(crate) fn cap(self: &Arc<Self>, at: Moment, reason: LossReason) {
        let now = self.clock().now();
        let mut state = self.lock();
        let live = matches!(state.phase, Phase::Held | Phase::Ending);
        if !live || state.cap.as_ref().is_some_and(|(had, _)| *had <= at) {
            return;
        }
        state.cap = Some((at, reason));
        if at < self.valid_until() {
            self.valid_until.store(at.0, Ordering::Release);
        }
        if state.phase == Phase::Held {
            self.cancel_at.fetch_min(at.before(self.plan.grace).0, Ordering::AcqRel);
        }
        let news = self.keep_deadlines(&mut state, now);
        self.reschedule(&mut state);
        drop(state);
        self.tell(news);
    }

    /// Somebody released it by force, and the store said so.
    pub(crate) fn forced(self: &Arc<Self>) {
        let mut state = self.lock();
        if !matches!(state.phase, Phase::Held | Phase::Ending) {
            return;
        }
        let news = self.lose(&mut state, LossReason::Forced);
        self.reschedule(&mut state);
        drop(state);
        self.tell(news);
    }

    /// The handle is done with it: renewal stops here, whatever becomes of the release.
    ///
    /// # Errors
    /// How it was lost, if it was lost before.
    pub(crate) fn end(self: &Arc<Self>) -> Result<(), LossReason> {
        let now = self.clock().now();
        let mut state = self.lock();
        let mut news = self.keep_deadlines(&mut state, now);
        let result = match &state.phase {
            Phase::Lost(reason) => Err(reason.clone()),
            Phase::Released => Ok(()),
            Phase::Held | Phase::Ending => {
                state.phase = Phase::Released;
                self.close();
                news = News { cancelled: true, ended: true, state: Some(LeaseState::Released) };
                Ok(())
            }
        };
        self.reschedule(&mut state);
        drop(state);
        self.tell(news);
        result
    }

    /// Something to wait for before a release is sent, when a renewal is in flight: at most as long as one attempt may
    /// take. What is still unanswered then can do no harm on the server: a renewal proves owner and fence, and creates
    /// nothing.
    pub(crate) fn settling(&self) -> Option<Settling> {
        let mut state = self.lock();
        (state.in_flight > 0)
            .then(|| Settling { settled: state.settled.get_or_insert_default().clone(), at_most: self.plan.attempt })
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

    fn stop(&self, state: &mut State) -> News {
        state.phase = Phase::Ending;
        state.renew_at = Moment::NEVER;
        self.cancel_at.store(u64::MAX, Ordering::Release);
        let ends = state.cap.as_ref().filter(|(at, _)| *at <= self.valid_until()).map(|(_, reason)| reason);
        match ends {
            Some(reason) => {
                tracing::info!(key = %self.key, fence = self.fence, %reason, "lease ending: work is told to stop")
            }
            None => {
                tracing::warn!(key = %self.key, fence = self.fence, valid_for = ?self.valid_for(), "lease ending: work is told to stop")
            }
        }
        News { cancelled: true, ..News::default() }
    }

    fn lose(&self, state: &mut State, reason: LossReason) -> News {
        tracing::warn!(key = %self.key, fence = self.fence, %reason, "lease lost");
        state.phase = Phase::Lost(reason);
        self.close();
        News { cancelled: true, ended: true, state: Some(state.shown()) }
    }

    fn close(&self) {
        self.valid_until.store(0, Ordering::Release);
        self.cancel_at.store(u64::MAX, Ordering::Release);
    }

    fn tell(&self, news: News) {
        if news.cancelled
            && let Some(token) = self.token.get()
        {
            token.cancel();
        }
        if news.ended {
            self.ended.notify_waiters();
        }
        if let (Some(state), Some(watch)) = (news.state, self.watch.get()) {
            watch.send_replace(state);
        }
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

/// Renewals that fall due this close together travel together.
pub(crate) const COALESCE: Duration = Duration::from_millis(10);

/// An attempt shorter than this isn't made: the cancellation is upon us.
const SHORTEST: Duration = Duration::from_millis(1);

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
    fn shown(&self) -> LeaseState {
        match &self.phase {
            Phase::Held | Phase::Ending if self.trouble.is_some() => LeaseState::AtRisk,
            Phase::Held | Phase::Ending => LeaseState::Held,
            Phase::Lost(reason) => LeaseState::Lost(reason.clone()),
            Phase::Released => LeaseState::Released,
        }
    }
}
