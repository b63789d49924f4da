//! The arithmetic of one lease: pure, no I/O, no clock.
use crate::clock::Moment;
use std::time::Duration;

/// How far two clocks may run apart within a TTL: a hundredth of it, and 2 ms for their ticks.
///
/// The allowance is the one of Redis' own page on distributed locks.
pub(crate) fn drift(length: Duration) -> Duration {
    length / 100 + Duration::from_millis(2)
}

/// A stretch of time for which the store has promised ownership, as far as this process may rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Term {
    /// Taken *before* the request was written: the store cannot have begun to count any earlier.
    pub(crate) sent: Moment,
    pub(crate) length: Duration,
    grace: Duration,
}

impl Term {
    /// `grace` is what the settings give to a whole `ttl`. A term shorter than that (a grant from the line) has its
    /// share of it, or the token would fire the instant that such a term begins.
    pub(crate) fn new(sent: Moment, length: Duration, ttl: Duration, grace: Duration) -> Self {
        let share = if length < ttl { grace.mul_f64(length.as_secs_f64() / ttl.as_secs_f64()) } else { grace };
        Term { sent, length, grace: share }
    }

    /// Ownership is certain before this moment, and from it on is not.
    pub(crate) fn valid_until(&self) -> Moment {
        self.sent.after(self.length.saturating_sub(drift(self.length)))
    }

    /// When to ask the work to stop, if the lease hasn't been renewed by then.
    pub(crate) fn cancel_at(&self) -> Moment {
        self.valid_until().before(self.grace)
    }

    /// When to renew: at a third, so that two more thirds are left for trouble.
    pub(crate) fn renew_at(&self) -> Moment {
        self.sent.after(self.length / 3)
    }

    /// The first renewal: somewhere between a sixth and a third, by `dice` in `0.0..1.0`, so that leases which were taken
    /// together don't tick together for ever.
    pub(crate) fn first_renew_at(&self, dice: f64) -> Moment {
        self.sent.after((self.length / 6).mul_f64(1.0 + dice.clamp(0.0, 1.0)))
    }
}

/// How long to wait for the answer to a renewal before it is sent again: never longer than half of what is left, so that
/// a second attempt always fits.
pub(crate) fn patience(now: Moment, cancel_at: Moment, attempt: Duration) -> Duration {
    attempt.min(cancel_at.since(now) / 2)
}

/// How often a waiter asks, and how long a place in the line lasts without being asked for again.
pub(crate) fn poll_interval(ttl: Duration) -> Duration {
    (ttl / 3).min(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn validity_is_counted_from_before_the_send_less_the_drift() {
        let ttl = Duration::from_secs(30);
        let term = Term::new(Moment(1_000 * MS), ttl, ttl, ttl / 10);
        assert_eq!(term.valid_until(), Moment((1_000 + 30_000 - 302) * MS));
        assert_eq!(term.cancel_at(), Moment((1_000 + 26_698) * MS));
        assert_eq!(term.renew_at(), Moment(11_000 * MS));
    }

    #[test]
    fn a_short_term_has_a_short_grace() {
        let (ttl, presence) = (Duration::from_secs(30), Duration::from_secs(3));
        let term = Term::new(Moment(0), presence, ttl, Duration::from_secs(3));
        assert_eq!(term.valid_until().since(term.cancel_at()), Duration::from_millis(300));
        assert!(term.cancel_at() > term.renew_at());
    }

    #[test]
    fn a_waiter_asks_three_times_within_a_ttl_and_at_least_each_second() {
        assert_eq!(poll_interval(Duration::from_secs(30)), Duration::from_secs(1));
        assert_eq!(poll_interval(Duration::from_millis(900)), Duration::from_millis(300));
    }

    proptest! {
        #[test]
        fn nothing_overflows_and_the_order_of_events_stands(
            sent in any::<u64>(), ttl_ms in 100_u64..=31_536_000_000, share in 0.0_f64..0.333, dice in any::<f64>()
        ) {
            let ttl = Duration::from_millis(ttl_ms);
            let term = Term::new(Moment(sent), ttl, ttl, ttl.mul_f64(share));
            prop_assert!(term.sent <= term.first_renew_at(dice));
            prop_assert!(term.first_renew_at(dice) <= term.renew_at().after(Duration::from_nanos(10)));
            prop_assert!(term.cancel_at() <= term.valid_until());
            if sent < u64::MAX / 4 {
                prop_assert!(term.renew_at() < term.cancel_at());
                prop_assert!(term.valid_until() < term.sent.after(ttl));
            }
        }

        #[test]
        fn a_second_attempt_always_fits(now in 0_u64..1 << 40, left in 0_u64..1 << 40, attempt in 0_u64..1 << 40) {
            let cancel_at = Moment(now + left);
            let waits = patience(Moment(now), cancel_at, Duration::from_nanos(attempt));
            prop_assert!(waits * 2 <= Duration::from_nanos(left));
        }
    }
}
