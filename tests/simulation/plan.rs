//! What a seed decides before anything happens.
use crate::planted::Planted;
use fastrand::Rng;
use std::time::Duration;

/// How much may go wrong. What a run of each kind has to keep is in `judge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: a network with small delays.
    Calm,
    /// The network, the clients and the server's presence; its clock is within a hundredth, and it keeps its data.
    Rough,
    /// Also force, by operators.
    Forced,
    /// Also a server that comes back with nothing, or without its last writes.
    LostData,
    /// Also a server's clock that jumps.
    Jumping,
    /// All of it at once.
    Everything,
}

/// In a thousand messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct Odds {
    pub lose_request: u32,
    pub lose_reply: u32,
    pub slow_request: u32,
    pub slow_reply: u32,
    /// Carried out long after, behind what was sent later; not answered.
    pub straggle: u32,
    pub twice: u32,
    pub lose_push: u32,
    pub slow_push: u32,
    pub push_twice: u32,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub kind: Kind,
    pub planted: Option<Planted>,
    /// The scale of everything: TTLs are around it.
    pub base: Duration,
    pub length: Duration,
    pub clients: usize,
    pub actors: usize,
    pub keys: usize,
    pub odds: Odds,
    /// The longest delay of a message that is not slow, in ms.
    pub usual: u64,
    /// The server's clock against true time, in millionths.
    pub ppm: i64,
    /// How often the weather changes: once in so much time, on average. None: never.
    pub weather: Option<Duration>,
    pub blocks: bool,
}

impl Plan {
    pub fn draw(planted: Option<Planted>, dice: &mut Rng) -> Plan {
        let kind = match dice.u32(0..100) {
            0..10 => Kind::Calm,
            10..60 => Kind::Rough,
            60..70 => Kind::Forced,
            70..80 => Kind::LostData,
            80..90 => Kind::Jumping,
            _ => Kind::Everything,
        };
        let base = Duration::from_millis([150, 400, 1000, 3000, 3000, 12_000, 30_000][dice.usize(0..7)]);
        let length = base * if base > Duration::from_secs(5) { dice.u32(4..10) } else { dice.u32(8..24) };
        let mut odd = || [0, 0, 10, 50, 150][dice.usize(0..5)];
        let odds = Odds {
            lose_request: odd(),
            lose_reply: odd(),
            slow_request: odd(),
            slow_reply: odd(),
            straggle: odd(),
            twice: odd(),
            lose_push: 2 * odd(),
            slow_push: 2 * odd(),
            push_twice: odd(),
        };
        let calm = kind == Kind::Calm;
        Plan {
            kind,
            planted,
            base,
            length,
            clients: dice.usize(2..5),
            actors: dice.usize(1..4),
            keys: [1, 1, 2, 3][dice.usize(0..4)],
            odds: if calm { Odds::default() } else { odds },
            usual: if calm { 1 } else { [0, 1, 1, 3][dice.usize(0..4)] },
            ppm: [0, -10_000, 10_000, dice.i64(-10_000..=10_000)][dice.usize(0..4)],
            weather: (!calm && dice.u32(0..4) > 0).then(|| base.mul_f64(0.3 + 3.0 * dice.f64())),
            blocks: !calm && dice.bool(),
        }
    }

    pub fn loses_data(&self) -> bool {
        matches!(self.kind, Kind::LostData | Kind::Everything)
    }
    pub fn jumps(&self) -> bool {
        matches!(self.kind, Kind::Jumping | Kind::Everything)
    }
    pub fn forces(&self) -> bool {
        matches!(self.kind, Kind::Forced | Kind::Everything)
    }

    /// A length of time on the scale of the run, up to `most` times its base; small ones are likelier.
    pub fn some(&self, dice: &mut Rng, most: f64) -> Duration {
        let share = dice.f64() * dice.f64() * most;
        Duration::from_millis((self.base.as_millis() as f64 * share) as u64)
    }
}
