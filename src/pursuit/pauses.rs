//! How long to pause between claims.
use std::time::Duration;

/// How long to pause between claims where there is no line to stand in, or trouble: growing, with jitter, never too short.
pub(super) struct Pauses {
    next: Duration,
    pub(super) longest: Duration,
}

impl Pauses {
    const FIRST: Duration = Duration::from_millis(16);
    const SHORTEST: Duration = Duration::from_millis(2);

    pub(super) fn new(longest: Duration) -> Self {
        Pauses { next: Self::FIRST.min(longest), longest }
    }

    pub(super) fn reset(&mut self) {
        self.next = Self::FIRST.min(self.longest);
    }

    /// Half of it is left to chance, so that those who came together don't come back together. It ends when the holder's
    /// TTL does, should that be sooner.
    pub(super) fn next(&mut self, soonest: Option<Duration>) -> Duration {
        let jitter = 0.5 + fastrand::f64() / 2.0;
        let pause = self.next.mul_f64(jitter);
        self.next = (self.next * 2).min(self.longest);
        let first_chance = soonest.map_or(pause, |soonest| soonest + Self::SHORTEST.mul_f64(0.5 + jitter));
        pause.min(first_chance).max(Self::SHORTEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_poll_interval_and_never_vanish() {
        let longest = Duration::from_secs(1);
        let mut pauses = Pauses::new(longest);
        let drawn: Vec<_> = (0..20).map(|_| pauses.next(None)).collect();
        assert!(drawn.iter().all(|pause| (Pauses::SHORTEST..=longest).contains(pause)), "{drawn:?}");
        assert!(drawn[0] <= Pauses::FIRST && drawn[19] >= longest / 2, "{drawn:?}");
        assert!(pauses.next(Some(Duration::ZERO)) >= Pauses::SHORTEST);
        assert!(pauses.next(Some(Duration::from_millis(40))) < Duration::from_millis(45));
    }
}
