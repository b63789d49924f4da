//! The renewals of one lease: when one is due, and what its answer means.
use super::{News, Phase, State, Tenure};
use crate::{
    clock::Moment,
    error::{LossReason, StoreError},
    store::Renewed,
    term::{self, Term},
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// Renewals that fall due this close together travel together.
pub(crate) const COALESCE: Duration = Duration::from_millis(10);

/// An attempt shorter than this isn't made: the cancellation is upon us.
const SHORTEST: Duration = Duration::from_millis(1);

/// What the watchdog has to do for a tenure that is due.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Renew,
    Nothing,
}

impl Tenure {
    /// The watchdog's turn: does what is due at `now`, and says whether a renewal has to be sent.
    pub(crate) fn tick(self: &Arc<Self>, now: Moment) -> Action {
        let mut begun = Begun { tenure: self, unsent: false };
        let action = self.change(|state| {
            let news = self.keep_deadlines(state, now);
            // What is due soon travels with what is due now; but a retry has its time, or it would be sent in a tight loop.
            let calm = state.in_flight == 0 && state.trouble.is_none();
            let horizon = if calm { now.after(COALESCE) } else { now };
            if state.phase == Phase::Held && horizon >= state.renew_at {
                begun.unsent = true;
                (Action::Renew, self.attempt(state, now))
            } else {
                (Action::Nothing, news)
            }
        });
        begun.unsent = false;
        action
    }

    /// A renewal is about to be sent; the next follows when this one has had its time.
    fn attempt(&self, state: &mut State, now: Moment) -> News {
        let unanswered = std::mem::replace(&mut state.awaited, true) && state.in_flight > 0;
        let patience = self.patience(now);
        state.renew_at = if patience < SHORTEST { Moment::NEVER } else { now.after(patience) };
        state.in_flight += 1;
        if unanswered {
            state.trouble(StoreError::unavailable("a renewal was not answered in time"))
        } else {
            News::default()
        }
    }

    /// A renewal that was about to be sent was not: it is due again. Tells nothing, for it is called in a panic.
    pub(crate) fn not_sent(self: &Arc<Self>) {
        let now = self.clock().now();
        self.change(|state| {
            state.one_less_in_flight();
            state.renew_at = state.renew_at.min(now);
            ((), News::default())
        });
    }

    /// The answer to a renewal sent at `sent`; `None` when there was none.
    pub(crate) fn answered(self: &Arc<Self>, sent: Moment, answer: Option<Result<Renewed, StoreError>>) {
        let now = self.clock().now();
        self.change(|state| {
            state.one_less_in_flight();
            let overtaken = state.confirmed.is_some_and(|last| sent <= last);
            let news = match answer {
                Some(Ok(Renewed::Gone)) if state.is_live() => self.lose(state, LossReason::Expired),
                Some(Ok(Renewed::Taken)) if state.is_live() => self.lose(state, LossReason::Taken),
                _ if state.phase != Phase::Held || overtaken => News::default(),
                // What has run out stays lost: the token has fired, and others may have been let in.
                _ if now >= self.valid_until() => self.keep_deadlines(state, now),
                Some(Ok(Renewed::Thin { wanted, had })) => {
                    self.renewed(state, sent, Some(StoreError::replicas(wanted, had)))
                }
                Some(Ok(_)) => self.renewed(state, sent, None),
                Some(Err(error)) => self.failed(state, error, now),
                None => self.failed(state, StoreError::unavailable("a renewal was not answered"), now),
            };
            ((), news)
        });
    }

    /// `thin`: the store has it, but not on as many replicas as it should be.
    fn renewed(&self, state: &mut State, sent: Moment, thin: Option<StoreError>) -> News {
        let term = Term::new(sent, self.plan.ttl, self.plan.ttl, self.plan.grace);
        (state.confirmed, state.awaited) = (Some(sent), false);
        let extended = self.extend(state, &term);
        if !self.can_gain(state) {
            state.renew_at = Moment::NEVER;
        } else if extended {
            state.renew_at = term.renew_at();
        }
        match (thin, state.trouble.take()) {
            (Some(thin), trouble) => {
                state.trouble = trouble;
                state.trouble(thin)
            }
            (None, Some(trouble)) => News::renewed_after(*trouble),
            (None, None) => News::default(),
        }
    }

    fn failed(&self, state: &mut State, error: StoreError, now: Moment) -> News {
        let patience = self.patience(now);
        // While a later one is on its way, that one has its time.
        if patience >= SHORTEST && state.in_flight == 0 {
            // With jitter: a server that comes back should not be met by everybody at once.
            state.renew_at = state.renew_at.min(now.after(patience.mul_f64(0.25 + fastrand::f64() / 4.0)));
        }
        state.trouble(error)
    }

    fn patience(&self, now: Moment) -> Duration {
        term::patience(now, Moment(self.cancel_at.load(Ordering::Acquire)), self.an_attempt())
    }

    /// Whether another renewal could move the end of validity.
    pub(super) fn can_gain(&self, state: &State) -> bool {
        self.plan.renews && state.cap.as_deref().is_none_or(|(at, _)| *at > self.valid_until())
    }
}

/// A renewal that counts as under way before the news are told. Those are told to other people's code: when that panics,
/// the caller never hears of the renewal, and nobody sends it.
struct Begun<'a> {
    tenure: &'a Arc<Tenure>,
    unsent: bool,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if self.unsent {
            self.tenure.not_sent();
        }
    }
}

impl State {
    fn one_less_in_flight(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0
            && let Some(settled) = self.settled.take()
        {
            settled.notify_waiters();
            settled.notify_one();
        }
    }

    /// Told when it begins, not each time that it goes on.
    fn trouble(&mut self, error: StoreError) -> News {
        match self.trouble.replace(Box::new(error.clone())) {
            None => News::at_risk(error),
            Some(_) => News::default(),
        }
    }
}
