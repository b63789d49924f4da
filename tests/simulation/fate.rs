//! What becomes of one message.
use crate::plan::Odds;
use fastrand::Rng;
use std::time::Duration;

/// What will happen to a message.
pub struct Fate {
    pub way: Duration,
    pub again: Option<Duration>,
    /// It does not wait behind others.
    pub alone: bool,
    pub arrives: bool,
    pub answers: bool,
    pub back: Duration,
    pub broken_link: bool,
    pub faulty: Option<&'static str>,
}

impl Fate {
    pub fn draw(odds: &Odds, usual: u64, slow: impl Fn(&mut Rng) -> Duration, dice: &mut Rng) -> Fate {
        let mut fate = Fate {
            way: Duration::from_millis(dice.u64(0..=usual)),
            again: None,
            alone: false,
            arrives: true,
            answers: true,
            back: Duration::from_millis(dice.u64(0..=usual)),
            broken_link: false,
            faulty: None,
        };
        let mut roll = dice.u32(0..1000);
        let mut is = |odd: u32| {
            let hit = roll < odd;
            roll = roll.saturating_sub(odd).max(if hit { 1000 } else { 0 });
            hit
        };
        if is(odds.lose_request) {
            (fate.arrives, fate.faulty) = (false, Some("fault: request lost"));
        } else if is(odds.lose_reply) {
            (fate.answers, fate.faulty) = (false, Some("fault: reply lost"));
        } else if is(odds.slow_request) {
            (fate.way, fate.faulty) = (slow(dice), Some("fault: request slow"));
            // What is behind it waits, unless it goes by another connection.
            fate.alone = dice.u32(0..4) > 0;
        } else if is(odds.slow_reply) {
            (fate.back, fate.faulty) = (slow(dice), Some("fault: reply slow"));
        } else if is(odds.straggle) {
            (fate.way, fate.alone, fate.answers) = (slow(dice) * 2, true, false);
            fate.faulty = Some("fault: request left behind");
        } else if is(odds.twice) {
            (fate.again, fate.faulty) = (Some(slow(dice) / 4), Some("fault: request twice"));
        }
        if !(fate.arrives && fate.answers) {
            fate.broken_link = dice.bool();
        }
        fate
    }
}
