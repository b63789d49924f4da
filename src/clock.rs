//! Monotonic time that counts suspension.
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::Instant;

/// A point on a [`Clock`], in nanoseconds. Eight bytes, so a deadline is one atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(pub(crate) u64);

impl Moment {
    pub(crate) const NEVER: Moment = Moment(u64::MAX);

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

/// What leases measure time with. [`Clock::system`] is right for everything but tests.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    System,
    Tokio { origin: Instant, asleep: Arc<AtomicU64> },
}

impl Default for Clock {
    fn default() -> Self {
        Clock::system()
    }
}

impl Clock {
    /// The operating system's clock that goes on while the machine is suspended: `CLOCK_BOOTTIME` on Linux and Android,
    /// `CLOCK_MONOTONIC` on Apple's systems, the performance counter on Windows.
    pub fn system() -> Self {
        Clock(Kind::System)
    }

    /// Follows `tokio::time`, so `tokio::time::pause` works. It doesn't see suspension by itself.
    pub fn tokio() -> Self {
        Clock(Kind::Tokio { origin: Instant::now(), asleep: Arc::default() })
    }

    /// Pretends on a [`Clock::tokio`] that the machine was suspended for `d`: time jumps, and no timer noticed. Does
    /// nothing to a [`Clock::system`].
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

    /// Sleeps until `at`. Timers stand still while the machine is suspended, so it looks at the clock at least each
    /// second: what fell due in a suspension is late by at most that much awake time.
    pub(crate) async fn sleep_until(&self, at: Moment) {
        loop {
            let left = at.since(self.now());
            if left.is_zero() {
                return;
            }
            // A timer of tokio has a resolution of 1 ms, so a shorter nap would spin.
            tokio::time::sleep(left.clamp(Duration::from_millis(1), LOOK)).await;
        }
    }
}

/// A pause with its second half left to chance, so that those who came together don't come back together.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64() / 2.0)
}

/// How long a timer may be trusted without a look at the clock.
pub(crate) const LOOK: Duration = Duration::from_secs(1);

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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_sleep_ends_at_its_moment_and_within_a_second_of_waking_from_a_suspension() {
        let clock = Clock::tokio();
        let start = clock.now();
        clock.sleep_until(start.after(Duration::from_millis(2500))).await;
        assert_eq!(clock.now().since(start), Duration::from_millis(2500));

        let awake = Instant::now();
        let target = clock.now().after(Duration::from_secs(3600));
        let sleeper = tokio::spawn({
            let clock = clock.clone();
            async move { clock.sleep_until(target).await }
        });
        tokio::time::sleep(Duration::from_millis(500)).await;
        clock.suspend(Duration::from_secs(7200));
        sleeper.await.unwrap();
        assert!(awake.elapsed() <= Duration::from_secs(1), "{:?}", awake.elapsed());
    }

    #[test]
    fn moments_saturate() {
        assert_eq!(Moment(5).after(Duration::MAX), Moment::NEVER);
        assert_eq!(Moment(5).before(Duration::MAX), Moment(0));
        assert_eq!(Moment(5).since(Moment(7)), Duration::ZERO);
    }

    #[test]
    fn the_system_clock_does_not_run_backwards() {
        let clock = Clock::system();
        let mut last = clock.now();
        for _ in 0..10_000 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn half_of_a_pause_is_left_to_chance() {
        let pauses: Vec<_> = (0..1000).map(|_| jittered(Duration::from_millis(1000)).as_millis()).collect();
        let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
        assert!((500..550).contains(least) && (950..=1000).contains(most), "{least} to {most}");
    }
}
