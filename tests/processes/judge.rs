//! What must not be, found in what was written down.
use super::{
    notes::{How, Lease, Trouble},
    resource::Write,
};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Breach {
    /// Two leases of one key: one of them had a step between two of the other's.
    Overlap,
    /// A poll of the work that began when the lease was not certain any more.
    StepPastValidity,
    /// A write that the resource took, though it had one of a newer fence.
    StaleWriteAccepted,
    /// A write of the one owner there was that the resource refused.
    RightfulWriteRefused,
    /// A lease that came after another, and its fence is not larger.
    FenceNotLarger,
    /// A lease whose server answered, and whose process ran.
    LostForNothing,
    /// A key that is there when nobody is any more.
    KeyLeft,
}

/// All that is known after a run.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    pub leases: Vec<Lease>,
    pub writes: Vec<Write>,
    pub troubles: Vec<Trouble>,
    /// What is on the server at the end.
    pub keys: Vec<String>,
    /// The server forgot what it had answered: exclusion is gone then, by nature, and only fences and validity are left.
    pub data_lost: bool,
}

/// From a fault's end to the loss that it caused, beyond the TTL: a task has to run, and to write it down.
const SLACK: u64 = 100_000_000;

impl Evidence {
    pub fn judge(&self) -> Vec<(Breach, String)> {
        let mut found = Vec::new();
        let mut breach = |breach, what: String| found.push((breach, what));
        for lease in &self.leases {
            for step in lease.steps.iter().filter(|step| step.left_then == Some(0)) {
                breach(Breach::StepPastValidity, format!("{step:?} of {}", lease.text()));
            }
            let refused = lease.steps.iter().filter(|s| s.accepted == Some(false) && s.left_after > Some(0));
            for step in refused.filter(|_| !self.data_lost) {
                breach(Breach::RightfulWriteRefused, format!("{step:?} of {}", lease.text()));
            }
            if let Some(end) = lease.end.as_ref().filter(|end| end.how == How::Lost)
                && !self.in_trouble(lease, end.at.saturating_sub(lease.ttl + SLACK), end.at)
            {
                breach(Breach::LostForNothing, format!("{end:?} of {}", lease.text()));
            }
        }
        for leases in self.by_key().into_values() {
            if !self.data_lost {
                let mut spans: Vec<_> = leases.iter().filter_map(|lease| Some((lease.span()?, *lease))).collect();
                spans.sort_by_key(|((from, _), _)| *from);
                // The one that lasts longest so far; each next one is compared with it.
                let mut longest: Option<((u64, u64), &Lease)> = None;
                let mut newest: Option<&Lease> = None;
                for ((from, until), lease) in spans {
                    if let Some(earlier) =
                        newest.filter(|earlier| lease.fence.is_some_and(|f| earlier.fence >= Some(f)))
                    {
                        breach(Breach::FenceNotLarger, format!("{} worked before {}", earlier.text(), lease.text()));
                    }
                    newest = newest.into_iter().chain([lease]).max_by_key(|lease| lease.fence);
                    if let Some(((_, end), other)) = longest.filter(|((_, end), _)| *end > from) {
                        let by = (end.min(until) - from) as f64 / 1e6;
                        breach(Breach::Overlap, format!("by {by} ms: {} and {}", other.text(), lease.text()));
                    }
                    if longest.is_none_or(|((_, end), _)| until > end) {
                        longest = Some(((from, until), lease));
                    }
                }
            }
            let mut in_hand: Vec<_> = leases.iter().filter(|lease| lease.fence.is_some()).collect();
            let mut asked = in_hand.clone();
            in_hand.sort_by_key(|lease| lease.got);
            asked.sort_by_key(|lease| lease.asked);
            let (mut in_hand, mut newest) = (in_hand.into_iter().peekable(), None::<&Lease>);
            for lease in asked {
                while let Some(earlier) = in_hand.next_if(|earlier| earlier.got < lease.asked) {
                    newest = newest.into_iter().chain([*earlier]).max_by_key(|lease| lease.fence);
                }
                if let Some(earlier) = newest.filter(|earlier| earlier.fence >= lease.fence) {
                    breach(Breach::FenceNotLarger, format!("{} and then {}", earlier.text(), lease.text()));
                }
            }
        }
        let mut newest = BTreeMap::new();
        for write in self.writes.iter().filter(|write| write.accepted) {
            let newest = newest.entry(write.key).or_insert(write.fence);
            if write.fence < *newest {
                breach(Breach::StaleWriteAccepted, format!("{write:?} after {newest}"));
            }
            *newest = write.fence.max(*newest);
        }
        for key in self.keys.iter().filter(|key| !key.ends_with(":fence")) {
            breach(Breach::KeyLeft, key.clone());
        }
        found
    }

    fn by_key(&self) -> BTreeMap<u64, Vec<&Lease>> {
        let mut keys = BTreeMap::<_, Vec<_>>::new();
        for lease in &self.leases {
            keys.entry(lease.key).or_default().push(lease);
        }
        keys
    }

    fn in_trouble(&self, lease: &Lease, from: u64, until: u64) -> bool {
        let concerned = |trouble: &&Trouble| trouble.worker.is_none_or(|worker| worker == lease.worker);
        self.troubles.iter().filter(concerned).any(|trouble| trouble.from <= until && trouble.until >= from)
    }

    /// How much was seen of it all.
    pub fn covered(&self) -> Covered {
        let steps = || self.leases.iter().flat_map(|lease| &lease.steps);
        let ended =
            |how| self.leases.iter().filter(|lease| lease.end.as_ref().is_some_and(|end| end.how == how)).count();
        let undisturbed = |lease: &&Lease| {
            lease.span().is_some_and(|(_, until)| {
                until > lease.got + lease.ttl && !self.in_trouble(lease, lease.got.saturating_sub(lease.ttl), until)
            })
        };
        Covered {
            steps: steps().count(),
            acquisitions: self.leases.len(),
            hand_overs: self.by_key().values().map(|leases| hand_overs(leases)).sum(),
            losses: ended(How::Lost),
            ended_as_agreed: ended(How::Agreed),
            undisturbed: self.leases.iter().filter(undisturbed).count(),
            overran: steps().filter(|step| step.left_then > Some(0) && step.left_after == Some(0)).count(),
            writes: self.writes.len(),
            refused: self.writes.iter().filter(|write| !write.accepted).count(),
        }
    }
}

/// How often somebody was given the key as another let go of it, having waited for it.
fn hand_overs(leases: &[&Lease]) -> usize {
    let mut leases = leases.to_vec();
    leases.sort_by_key(|lease| lease.got);
    let handed = |pair: &&[&Lease]| {
        let [before, after] = pair else { return false };
        let released = before.end.as_ref().filter(|end| end.how == How::Released);
        released.is_some_and(|end| (end.from..end.from + SLACK).contains(&after.got) && after.asked < end.from)
    };
    leases.windows(2).filter(handed).count()
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Covered {
    pub steps: usize,
    pub acquisitions: usize,
    pub hand_overs: usize,
    /// Told of a loss that was not agreed.
    pub losses: usize,
    pub ended_as_agreed: usize,
    /// Leases that were kept for longer than a TTL while nothing was in the way: those that must not be lost.
    pub undisturbed: usize,
    /// Steps that began in time, and were over when the lease was: what only a fence can hold.
    pub overran: usize,
    pub writes: usize,
    pub refused: usize,
}

impl Lease {
    /// From when to when its worker was surely its owner, by what it did. Each poll began with the lease in hand, for the
    /// guard looks after that; a step belongs to it for as long as the lease was certain, and no longer: a process can be
    /// stopped in the middle of one.
    fn span(&self) -> Option<(u64, u64)> {
        let owned = |step: &super::notes::Step| match (step.left_after, step.left) {
            (Some(1..), _) => step.ended,
            (_, Some(left @ 1..)) => step.ended.min(step.begun + left),
            _ => step.polled,
        };
        let from = self.steps.iter().map(|step| step.polled).min()?;
        Some((from, self.steps.iter().map(owned).max()?))
    }

    fn text(&self) -> String {
        let Lease { worker, key, fence, asked, got, .. } = self;
        let (span, end) = (self.span(), &self.end);
        format!("[worker {worker}, key {key}, fence {fence:?}, asked {asked}, got {got}, steps {span:?}, {end:?}]")
    }
}

/// The kinds of what was found.
pub fn kinds(found: &[(Breach, String)]) -> BTreeSet<Breach> {
    found.iter().map(|(breach, _)| *breach).collect()
}
