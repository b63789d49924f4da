//! Monotonic time that counts suspension.
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::time::Duration;
use tokio::time::Instant;

/// A point on a [`Clock`], in nanoseconds. Eight bytes, so a deadline is one atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(pub(crate) u64);

impl Moment {
    pub(crate) fn after(self, d: Duration) -> Moment {
        Moment(self.0.saturating_add(nanos(d)))
    }
    pub(crate) fn before(self, d: Duration) -> Moment {
        Moment(self.0.saturating_sub(nanos(d)))
    }
    /// How long from `earlier` to here; zero if that is the wrong way round.
    pub(crate) fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// What leases measure time with.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    /// The operating system's clock that goes on while the machine sleeps.
    System,
    /// Tokio's clock, which tests can pause; `asleep` is suspension that a test pretends.
    Tokio { origin: Instant, asleep: Arc<AtomicU64> },
}

impl Default for Clock {
    fn default() -> Self {
        Clock::system()
    }
}

impl Clock {
    /// Counts time in which the machine was suspended (`CLOCK_BOOTTIME` on Linux). For everything but tests.
    pub fn system() -> Self {
        Clock(Kind::System)
    }
    /// Follows `tokio::time`, so `tokio::time::pause` works. It doesn't see suspension by itself.
    pub fn tokio() -> Self {
        Clock(Kind::Tokio { origin: Instant::now(), asleep: Arc::default() })
    }
    /// Pretends on a [`Clock::tokio`] that the machine was suspended for `d`: time jumps, and no timer noticed.
    pub fn suspend(&self, d: Duration) {
        if let Kind::Tokio { asleep, .. } = &self.0 {
            asleep.fetch_add(nanos(d), Relaxed);
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Moment {
        match &self.0 {
            Kind::System => system_now(),
            Kind::Tokio { origin, asleep } => Moment(nanos(origin.elapsed()).saturating_add(asleep.load(Relaxed))),
        }
    }

    /// Sleeps until `at`. Timers stand still while the machine is suspended, so it looks again at least every
    /// second on the system's clock: what fell due in a suspension is late by at most that much awake time.
    pub(crate) async fn sleep_until(&self, at: Moment) {
        loop {
            let left = at.since(self.now());
            if left.is_zero() {
                return;
            }
            // A timer of tokio has a resolution of 1 ms, so a shorter nap would spin.
            tokio::time::sleep(left.clamp(Duration::from_millis(1), self.look())).await;
        }
    }
    /// How long a timer may be trusted without a look at the clock.
    pub(crate) fn look(&self) -> Duration {
        Duration::from_secs(1)
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn system_now() -> Moment {
    read(rustix::time::ClockId::Boottime)
}
/// On Apple's systems `CLOCK_MONOTONIC` counts sleep, and it is std's `Instant` that does not.
#[cfg(target_vendor = "apple")]
fn system_now() -> Moment {
    read(rustix::time::ClockId::Monotonic)
}
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
#[inline]
fn read(id: rustix::time::ClockId) -> Moment {
    let t = rustix::time::clock_gettime(id);
    Moment(t.tv_sec.unsigned_abs().saturating_mul(1_000_000_000).saturating_add(t.tv_nsec.unsigned_abs()))
}
/// Windows' performance counter counts sleep. Elsewhere this is the best that std has.
#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn system_now() -> Moment {
    static ORIGIN: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    Moment(nanos(ORIGIN.elapsed()))
}
