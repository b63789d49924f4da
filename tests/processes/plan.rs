//! What goes wrong when, drawn from a seed.
use super::TTL;
use fastrand::Rng;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A worker is stopped, for a moment or for longer than its lease, and goes on.
    Stop,
    /// It is killed, and another comes in its place.
    Kill,
    /// Its connections are reset.
    Cut,
    /// One is reset in the middle of a request.
    CutMidway,
    /// It hears nothing, nor is it heard; later everything arrives.
    Hang,
    /// What it sends, or what it is sent, is lost.
    Vanish,
    /// Everything comes late.
    Delay,
    /// One answer is lost, with its connection or without a word.
    LoseReply,
    /// It has no connection and gets none.
    Refuse,
    /// The server is killed and starts again.
    Restart,
    /// It is stopped and goes on.
    Freeze,
    /// `CLIENT PAUSE`
    Pause,
    /// `CLIENT KILL`
    KillClients,
    KillInboxes,
    /// `SCRIPT FLUSH`
    FlushScripts,
}

use Fault::*;

/// How often each comes before the cards are shuffled again.
const DECK: [(Fault, usize); 15] = [
    (Stop, 9),
    (Kill, 3),
    (Cut, 2),
    (CutMidway, 2),
    (Hang, 4),
    (Vanish, 2),
    (Delay, 3),
    (LoseReply, 4),
    (Refuse, 1),
    (Restart, 2),
    (Freeze, 2),
    (Pause, 2),
    (KillClients, 1),
    (KillInboxes, 1),
    (FlushScripts, 1),
];

impl Fault {
    pub fn all() -> impl Iterator<Item = Fault> {
        DECK.into_iter().map(|(fault, _)| fault)
    }
    pub fn is_the_servers(self) -> bool {
        self >= Restart
    }

    /// How long it lasts; for the most part not long enough to cost a lease, for a good part longer.
    fn lasts(self, rng: &mut Rng) -> Duration {
        let (short, long) = match self {
            Kill | Cut | Restart | KillClients | KillInboxes | FlushScripts => return Duration::ZERO,
            CutMidway | LoseReply => return TTL / 2,
            Stop => (0.7, 3.0),
            Hang => (0.4, 2.5),
            Vanish | Delay | Refuse => (0.4, 2.0),
            Freeze | Pause => (0.3, 1.5),
        };
        let share = rng.f64();
        TTL.mul_f64(if rng.u8(..5) < 2 { 0.03 + share * (short - 0.03) } else { short + share * (long - short) })
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Since the beginning.
    pub at: Duration,
    pub until: Duration,
    pub fault: Fault,
    /// Whom it hits, unless it is the server.
    pub worker: usize,
    /// What else there is to choose in it.
    pub choice: u64,
}

/// Faults without end. Nobody is hit by two at a time; after each deck there is a time in which nothing goes wrong.
pub struct Plan {
    rng: Rng,
    at: Duration,
    deck: Vec<Fault>,
    workers: Vec<Duration>,
    server: Duration,
}

impl Plan {
    pub fn new(seed: u64, workers: usize) -> Plan {
        let rng = Rng::with_seed(seed);
        Plan { rng, at: TTL, deck: Vec::new(), workers: vec![Duration::ZERO; workers], server: Duration::ZERO }
    }
}

impl Iterator for Plan {
    type Item = Planned;
    fn next(&mut self) -> Option<Planned> {
        if self.deck.is_empty() {
            let busy = self.workers.iter().copied().max().unwrap_or_default().max(self.server);
            if self.at > TTL {
                self.at = self.at.max(busy) + 4 * TTL;
            }
            self.deck = DECK.iter().flat_map(|(fault, times)| vec![*fault; *times]).collect();
            self.rng.shuffle(&mut self.deck);
        }
        let fault = self.deck.pop()?;
        self.at += Duration::from_millis(self.rng.u64(50..450));
        let first = self.rng.usize(..self.workers.len());
        let places = (0..self.workers.len()).map(|n| (first + n) % self.workers.len());
        let worker = places.min_by_key(|n| self.workers[*n].max(self.at)).unwrap_or(0);
        let busy = if fault.is_the_servers() { &mut self.server } else { &mut self.workers[worker] };
        self.at = self.at.max(*busy);
        let until = self.at + fault.lasts(&mut self.rng);
        // As long as the hand of the one who does it may take.
        *busy = until + Duration::from_millis(100);
        Some(Planned { at: self.at, until, fault, worker, choice: self.rng.u64(..) })
    }
}

#[test]
fn one_seed_is_one_plan_and_nobody_is_hit_by_two_faults_at_a_time() {
    for seed in 0..50 {
        let plan: Vec<_> = Plan::new(seed, 6).take(200).collect();
        assert_eq!(plan, Plan::new(seed, 6).take(200).collect::<Vec<_>>());
        assert!(Fault::all().all(|fault| plan.iter().any(|planned| planned.fault == fault)));
        for (n, one) in plan.iter().enumerate() {
            assert!(one.at <= one.until);
            for other in &plan[..n] {
                let same = one.fault.is_the_servers() == other.fault.is_the_servers()
                    && (one.fault.is_the_servers() || one.worker == other.worker);
                assert!(other.at <= one.at && (!same || other.until < one.at), "{other:?} and {one:?}");
            }
        }
    }
}
