//! How a lease is kept: the settings, and the rules they must obey together.
use crate::{error::Invalid, term};
use std::time::Duration;

const MIN_TTL: Duration = Duration::from_millis(100);
/// Redis counts in signed 64-bit milliseconds of wall-clock time; a year is far within it, and nobody means more.
const MAX_TTL: Duration = Duration::from_secs(365 * 24 * 3600);
const MIN_ATTEMPT: Duration = Duration::from_millis(10);
/// A wait for replicas that is in vain ends when Redis next looks at the time: ten times a second, by its usual `hz`.
const TICK: Duration = Duration::from_millis(100);

/// How long to wait for a key that somebody else holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// Don't: ask once.
    No,
    /// At most this long.
    UpTo(Duration),
    /// For as long as it takes. A `warn` event says so once each TTL.
    Forever,
}

/// Zero is [`Wait::No`].
impl From<Duration> for Wait {
    fn from(d: Duration) -> Self {
        if d.is_zero() { Wait::No } else { Wait::UpTo(d) }
    }
}

/// How many replicas have to have a lease, and how long the server waits for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replicas {
    pub(crate) wanted: u32,
    pub(crate) within: Duration,
}

impl Replicas {
    /// # Errors
    /// When they ask for nothing. To Redis, no time would mean for ever.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        if self.wanted == 0 {
            return Err(Invalid::new("replicas", "at least one; leave the setting out to wait for none"));
        }
        if self.within < Duration::from_millis(1) {
            return Err(Invalid::new("replicas", "`within` is at least 1 ms"));
        }
        Ok(())
    }

    /// How much longer a call may take: the server may still be waiting for what was asked before it.
    pub(crate) fn slack(&self) -> Duration {
        (self.within + TICK).saturating_mul(2)
    }
}

/// What was set, by whoever set it: the builder for all leases, a request for its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) ttl: Option<Duration>,
    pub(crate) grace: Option<Duration>,
    pub(crate) attempt: Option<Duration>,
    pub(crate) wait: Option<Wait>,
    pub(crate) max_hold: Option<Duration>,
    /// A lease that is never renewed: it ends with its TTL.
    pub(crate) fixed: bool,
    pub(crate) replicas: Option<Replicas>,
}

/// Settings that work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) ttl: Duration,
    pub(crate) grace: Duration,
    /// How long one exchange with the store may take before it is tried again.
    pub(crate) attempt: Duration,
    pub(crate) wait: Wait,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) renews: bool,
}

impl Settings {
    const DEFAULT_TTL: Duration = Duration::from_secs(30);

    /// These settings over `defaults`. Where the TTL is overridden, what was set for another TTL is fitted to it; what
    /// is set here stands as it is.
    pub(crate) fn over(&self, defaults: &Settings) -> Settings {
        let usual = defaults.ttl.unwrap_or(Self::DEFAULT_TTL);
        let ttl = self.ttl.unwrap_or(usual);
        let proportionate = |grace: Duration| {
            let share = grace.mul_f64(ttl.as_secs_f64() / usual.as_secs_f64());
            if ttl == usual { grace } else { share.min((ttl / 3).saturating_sub(Duration::from_nanos(1))) }
        };
        Settings {
            ttl: Some(ttl),
            grace: self.grace.or(defaults.grace.map(proportionate)),
            attempt: self.attempt.or(defaults.attempt.map(|attempt| attempt.min(ttl / 3).max(MIN_ATTEMPT))),
            wait: self.wait.or(defaults.wait),
            max_hold: self.max_hold.or(defaults.max_hold),
            fixed: self.fixed,
            replicas: defaults.replicas,
        }
    }

    /// Checks each setting and all of them together.
    pub(crate) fn plan(&self) -> Result<Plan, Invalid> {
        let ttl = self.ttl.unwrap_or(Self::DEFAULT_TTL);
        if ttl < MIN_TTL {
            return Err(Invalid::new("ttl", "at least 100 ms"));
        }
        if ttl > MAX_TTL {
            return Err(Invalid::new("ttl", "at most 365 days"));
        }
        let grace = self.grace.unwrap_or(ttl / 10);
        if grace >= ttl / 3 {
            return Err(Invalid::new(
                "grace",
                "less than a third of the ttl, or renewals would have no time to be retried",
            ));
        }
        let attempt = self.attempt.unwrap_or(default_attempt(ttl));
        if attempt < MIN_ATTEMPT {
            return Err(Invalid::new("attempt", "at least 10 ms"));
        }
        if attempt > ttl / 3 {
            return Err(Invalid::new("attempt", "at most a third of the ttl, or a second attempt would not fit"));
        }
        if self.max_hold.is_some_and(|max_hold| max_hold <= grace) {
            return Err(Invalid::new(
                "max_hold",
                "longer than the grace, or the work would be told to stop as it starts",
            ));
        }
        if let Some(replicas) = self.replicas {
            replicas.check()?;
            if replicas.within > attempt {
                return Err(Invalid::new("replicas", "`within` is at most an `attempt`: shorten it, or lengthen that"));
            }
            // Or too few replicas could cost a lease that the server renews.
            if !self.fixed && replicas.slack() + attempt > ttl * 2 / 3 - grace {
                return Err(Invalid::new(
                    "replicas",
                    "twice `within` (and 0.2 s) and an `attempt` fit between a renewal and the cancellation, two thirds of \
                     the ttl less the grace: shorten it, or lengthen the ttl",
                ));
            }
        }
        let wait = self.wait.unwrap_or(Wait::UpTo(ttl));
        Ok(Plan { ttl, grace, attempt, wait, max_hold: self.max_hold, renews: !self.fixed })
    }
}

impl Plan {
    /// How long a claim may take to be carried out: twice an attempt.
    pub(crate) fn claim_window(&self) -> Duration {
        self.attempt * 2
    }

    /// How long a place in the line, or a grant from it, lasts.
    pub(crate) fn presence(&self) -> Duration {
        term::poll_interval(self.ttl) * 3
    }
}

/// A sixth of the TTL: four attempts fit between the first renewal and the cancellation.
fn default_attempt(ttl: Duration) -> Duration {
    (ttl / 6).clamp(MIN_ATTEMPT, Duration::from_secs(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refused(settings: Settings) -> Option<&'static str> {
        settings.plan().err().map(|invalid| invalid.setting)
    }
    fn ms(n: u64) -> Option<Duration> {
        Some(Duration::from_millis(n))
    }

    #[test]
    fn the_defaults_are_those_of_the_documentation() {
        let plan = Settings::default().plan().unwrap();
        assert_eq!(plan.ttl, Duration::from_secs(30));
        assert_eq!(plan.grace, Duration::from_secs(3));
        assert_eq!(plan.wait, Wait::UpTo(Duration::from_secs(30)));
        assert_eq!(plan.max_hold, None);
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let with = |ttl| Settings { ttl, ..Settings::default() };
        assert_eq!(refused(with(Some(Duration::ZERO))), Some("ttl"));
        assert_eq!(refused(with(ms(99))), Some("ttl"));
        assert_eq!(refused(with(ms(100))), None);
        assert_eq!(refused(with(Some(Duration::MAX))), Some("ttl"));
        assert_eq!(refused(Settings { grace: ms(334), ..with(ms(1000)) }), Some("grace"));
        assert_eq!(refused(Settings { grace: ms(333), ..with(ms(1000)) }), None);
        assert_eq!(refused(Settings { attempt: ms(334), ..with(ms(1000)) }), Some("attempt"));
        assert_eq!(refused(Settings { attempt: ms(9), ..with(ms(1000)) }), Some("attempt"));
        assert_eq!(refused(Settings { max_hold: ms(100), ..with(ms(1000)) }), Some("max_hold"));
        assert_eq!(refused(Settings { max_hold: ms(101), ..with(ms(1000)) }), None);
    }

    #[test]
    fn replicas_are_waited_for_no_longer_than_an_attempt_and_never_so_long_that_a_lease_would_end() {
        let with = |wanted, within| Settings {
            ttl: ms(6000),
            replicas: Some(Replicas { wanted, within: Duration::from_micros(within) }),
            ..Settings::default()
        };
        let rule = |settings: Settings| settings.plan().map_or_else(|invalid| invalid.to_string(), |_| String::new());
        assert_eq!(rule(with(1, 1_000_000)), "", "the usual attempt is a sixth of the ttl");
        for (settings, says) in [
            (with(0, 100_000), "at least one"),
            (with(1, 999), "at least 1 ms"),
            (with(1, 0), "at least 1 ms"),
            (with(1, 1_000_001), "at most an `attempt`"),
            (Settings { attempt: ms(2000), ..with(1, 2_000_000) }, "lengthen the ttl"),
            (Settings { grace: ms(1900), ..with(1, 1_000_000) }, "lengthen the ttl"),
            (Settings { ttl: ms(500), ..with(1, 1000) }, "lengthen the ttl"),
            // What a request makes of it.
            (Settings { ttl: ms(600), ..Settings::default() }.over(&with(1, 1_000_000)), "at most an `attempt`"),
        ] {
            let said = rule(settings);
            assert!(said.starts_with("`replicas`: ") && said.contains(says), "{said}, not {says}");
        }
        assert_eq!(rule(Settings { fixed: true, attempt: ms(2000), ..with(1, 2_000_000) }), "", "it is never renewed");
    }

    #[test]
    fn a_wait_of_zero_is_no_wait() {
        assert_eq!(Wait::from(Duration::ZERO), Wait::No);
        assert_eq!(Wait::from(Duration::from_secs(1)), Wait::UpTo(Duration::from_secs(1)));
    }

    #[test]
    fn what_a_request_sets_itself_is_never_bent() {
        let asked = Settings { ttl: ms(1000), grace: ms(400), ..Settings::default() };
        assert_eq!(refused(asked.over(&Settings::default())), Some("grace"));
    }

    proptest! {
        #[test]
        fn defaults_made_for_one_ttl_fit_every_other(
            ttl in 100_u64..100_000, grace in 0.0_f64..0.33, attempt in 0.0_f64..0.33, other in 100_u64..100_000
        ) {
            let whole = Duration::from_millis(ttl);
            let defaults = Settings {
                ttl: Some(whole),
                grace: Some(whole.mul_f64(grace)),
                attempt: Some(whole.mul_f64(attempt).max(MIN_ATTEMPT)),
                ..Settings::default()
            };
            prop_assert!(defaults.plan().is_ok());
            let asked = Settings { ttl: ms(other), ..Settings::default() };
            prop_assert!(asked.over(&defaults).plan().is_ok());
        }
    }
}
