//! What time it is on the server, without asking.
use crate::clock::Moment;
use std::time::Duration;

/// How long the tightest sample counts. Then a newer one replaces it though it is looser: clocks drift.
const KEPT: Duration = Duration::from_secs(10);

/// An upper bound of how far the server's clock is ahead of ours, in microseconds.
///
/// A reply's time was read after its request was sent, so server time minus send time is at least the true offset: a
/// bound made with it never comes too early, and too late by at most that reply's round trip. The smallest sample is
/// the tightest. A server's clock that was set forward shows in claims that come late, and is believed at once.
#[derive(Debug)]
pub(super) struct ServerTime {
    ahead: i64,
    taken: Moment,
}

impl ServerTime {
    pub(super) fn new(sent: Moment, server: u64) -> Self {
        ServerTime { ahead: ahead(sent, server), taken: sent }
    }

    /// A reply to a request sent at `sent`. `late`: a claim was late by this clock.
    pub(super) fn sample(&mut self, sent: Moment, server: u64, late: bool) {
        let ahead = ahead(sent, server);
        if late || ahead <= self.ahead || sent.since(self.taken) > KEPT {
            *self = ServerTime { ahead, taken: sent };
        }
    }

    /// The server's time at `at`, in microseconds; not earlier.
    pub(super) fn at(&self, at: Moment) -> u64 {
        micros(at).saturating_add(self.ahead).max(0).unsigned_abs()
    }
}

fn ahead(sent: Moment, server: u64) -> i64 {
    i64::try_from(server).unwrap_or(i64::MAX).saturating_sub(micros(sent))
}

fn micros(at: Moment) -> i64 {
    // Rounded up, and u64::MAX / 1000 fits.
    i64::try_from(at.0.div_ceil(1000)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_bound_is_never_earlier_than_the_servers_clock_and_later_by_one_round_trip_at_most() {
        // The server is 500 s ahead; the request took 3 ms to arrive.
        let time = ServerTime::new(Moment(SECOND), 501_003_000);
        assert_eq!(time.at(Moment(2 * SECOND)), 502_003_000);
        assert_eq!(time.at(Moment(2 * SECOND + 1)), 502_003_001, "rounded up");
    }

    #[test]
    fn the_tightest_sample_of_ten_seconds_counts() {
        let mut time = ServerTime::new(Moment(SECOND), 501_003_000);
        time.sample(Moment(2 * SECOND), 502_900_000, false);
        assert_eq!(time.at(Moment(3 * SECOND)), 503_003_000, "a slow reply loosens nothing");
        time.sample(Moment(3 * SECOND), 503_000_500, false);
        assert_eq!(time.at(Moment(4 * SECOND)), 504_000_500, "a faster one tightens");
        time.sample(Moment(13 * SECOND), 513_001_000, false);
        assert_eq!(time.at(Moment(14 * SECOND)), 514_000_500, "ten seconds are not over");
        time.sample(Moment(14 * SECOND), 514_002_000, false);
        assert_eq!(time.at(Moment(15 * SECOND)), 515_002_000, "an old one is replaced");
    }

    #[test]
    fn a_late_claim_sets_the_clock_at_once() {
        let mut time = ServerTime::new(Moment(SECOND), 501_000_000);
        time.sample(Moment(2 * SECOND), 3_602_000_000, true);
        assert_eq!(time.at(Moment(3 * SECOND)), 3_603_000_000);
    }
}
