//! What one attempt may have at the members.
use crate::{Key, clock::Moment, error::StoreError, store::Owner};
use std::{
    sync::{Mutex, MutexGuard, PoisonError, atomic::AtomicBool},
    time::Duration,
};

/// The owner of one attempt, and what it may have where. It never asks again once it was released.
#[derive(Debug)]
pub(super) struct Stake {
    pub(super) key: Key,
    pub(super) owner: Owner,
    pub(super) ttl: Duration,
    traces: Mutex<Box<[Trace]>>,
    /// It is being given back in the background.
    pub(super) leaving: AtomicBool,
}

/// What it may have at one member.
#[derive(Clone, Copy, Debug)]
struct Trace {
    has: bool,
    /// How often it was found there.
    found: u32,
    /// Requests that were not answered.
    unanswered: u32,
    /// From then on, none of them can take anything any more.
    until: Moment,
}

impl Stake {
    pub(super) fn new(key: Key, owner: Owner, ttl: Duration, members: usize) -> Self {
        let nothing = Trace { has: false, found: 0, unanswered: 0, until: Moment(0) };
        let traces = Mutex::new(vec![nothing; members].into());
        Stake { key, owner, ttl, traces, leaving: AtomicBool::new(false) }
    }

    /// A request that can take something until then goes to a member.
    pub(super) fn asks(&self, member: usize, until: Moment) {
        if let Some(trace) = self.traces().get_mut(member) {
            trace.unanswered += 1;
            trace.until = trace.until.max(until);
        }
    }

    /// It was answered: whether the key is this owner's there. After trouble nobody knows, but after a refusal.
    pub(super) fn heard(&self, member: usize, ours: Result<bool, &StoreError>) {
        if let Some(trace) = self.traces().get_mut(member) {
            match ours {
                Ok(ours) => {
                    trace.unanswered -= 1;
                    trace.has |= ours;
                    trace.found = trace.found.wrapping_add(u32::from(ours));
                }
                Err(error) if !error.may_pass() => trace.unanswered -= 1,
                Err(_) => {}
            }
        }
    }

    /// A release is about to be sent to a member; for [`released`](Stake::released).
    pub(super) fn releases(&self, member: usize) -> u32 {
        self.traces().get(member).map_or(0, |trace| trace.found)
    }

    /// It was carried out. What was found at the member since it was sent may be there again.
    pub(super) fn released(&self, member: usize, found: u32) {
        if let Some(trace) = self.traces().get_mut(member) {
            trace.has &= trace.found != found;
        }
    }

    pub(super) fn may_be_at(&self, member: usize) -> bool {
        self.traces().get(member).is_some_and(|trace| trace.has || trace.unanswered > 0)
    }

    /// When nothing that is under way to a member can take anything there any more.
    pub(super) fn settled_at(&self, member: usize) -> Moment {
        self.traces().get(member).map_or(Moment(0), |trace| trace.until)
    }

    fn traces(&self) -> MutexGuard<'_, Box<[Trace]>> {
        self.traces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Identity;

    const NONE: Moment = Moment(0);

    fn stake() -> Stake {
        let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
        Stake::new("k".into(), owner, Duration::from_secs(1), 2)
    }

    #[test]
    fn it_is_where_it_was_found_and_may_be_where_nothing_was_answered() {
        let (down, refused) = (StoreError::unavailable("down"), StoreError::refused("no"));
        for (answer, may) in [(Ok(true), true), (Ok(false), false), (Err(&down), true), (Err(&refused), false)] {
            let stake = stake();
            assert!(!stake.may_be_at(1));
            stake.asks(1, NONE);
            assert!(stake.may_be_at(1) && !stake.may_be_at(0), "not answered yet");
            stake.heard(1, answer);
            assert_eq!(stake.may_be_at(1), may, "{answer:?}");
            stake.asks(1, NONE);
            stake.asks(1, NONE);
            stake.heard(1, Ok(false));
            assert!(stake.may_be_at(1), "one of two is not answered");
            stake.heard(1, Ok(false));
            assert_eq!(stake.may_be_at(1), may, "{answer:?}");
        }
    }

    #[test]
    fn a_release_takes_away_what_was_there_when_it_was_sent_and_no_more() {
        let stake = stake();
        let found = |times| {
            for _ in 0..times {
                stake.asks(0, NONE);
                stake.heard(0, Ok(true));
            }
        };
        found(2);
        let released = stake.releases(0);
        found(1);
        stake.released(0, released);
        assert!(stake.may_be_at(0), "it was found since");
        stake.released(0, stake.releases(0));
        assert!(!stake.may_be_at(0));
        found(1);
        stake.asks(0, NONE);
        stake.released(0, stake.releases(0));
        assert!(stake.may_be_at(0), "a request is under way");
    }

    #[test]
    fn nothing_is_settled_before_the_last_request_is() {
        let stake = stake();
        assert_eq!(stake.settled_at(0), NONE);
        stake.asks(0, Moment(7));
        stake.asks(0, Moment(5));
        assert_eq!((stake.settled_at(0), stake.settled_at(1)), (Moment(7), NONE));
    }
}
