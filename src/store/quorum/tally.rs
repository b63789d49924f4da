//! What the members' answers come to.
use super::{Kept, Proposed};
use crate::{
    error::StoreError,
    store::{Claimed, Holding, Renewed},
};
use std::{sync::Arc, time::Duration};

/// How many there are, and how many decide.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) members: usize,
    pub(crate) majority: usize,
}

impl Size {
    pub(crate) fn of(members: usize) -> Self {
        Size { members, majority: members / 2 + 1 }
    }

    /// So many against it, and no majority can be for it.
    pub(crate) fn blocks(self, against: usize) -> bool {
        against > self.members - self.majority
    }
}

/// Members that gave no useful answer, and what the last of them said.
#[derive(Debug, Default)]
struct Failures {
    refused: usize,
    others: usize,
    last: Option<StoreError>,
}

impl Failures {
    fn add(&mut self, error: StoreError) {
        if error.may_pass() {
            self.others += 1
        } else {
            self.refused += 1
        }
        self.last = Some(error);
    }

    fn count(&self) -> usize {
        self.refused + self.others
    }

    /// A refusal that a majority can't outvote won't pass by itself.
    fn error(&self, size: Size, what: &'static str) -> StoreError {
        let (got, of) = (self.count(), size.members);
        let silent = if got == 0 { String::new() } else { format!("; {got} of {of} failed") };
        let words = format!("no majority of the {of} members {what}{silent}");
        let error = if size.blocks(self.refused) { StoreError::refused(words) } else { StoreError::unavailable(words) };
        match &self.last {
            Some(last) => error.with_source(last.clone()),
            None => error,
        }
    }
}

/// The votes on a proposal.
#[derive(Debug)]
pub(super) struct Proposals {
    size: Size,
    held: usize,
    /// The largest proposal of those counted.
    fence: u64,
    /// For each member where somebody else is: when that ends.
    busy: Vec<Option<Duration>>,
    holder: Option<Arc<str>>,
    late: usize,
    failures: Failures,
}

/// What became of a proposal.
#[derive(Debug, PartialEq)]
pub(super) enum Won {
    /// A majority has the key for us: the fence to write back.
    Fence(u64),
    /// What to answer.
    Not(Result<Claimed, StoreError>),
}

impl Proposals {
    pub(super) fn new(size: Size) -> Self {
        let (busy, failures) = (Vec::new(), Failures::default());
        Proposals { size, held: 0, fence: 0, busy, holder: None, late: 0, failures }
    }

    pub(super) fn add(&mut self, answer: Result<Proposed, StoreError>) -> Option<Won> {
        match answer {
            Ok(Proposed::Held { fence }) => {
                self.held += 1;
                self.fence = self.fence.max(fence);
            }
            Ok(Proposed::Busy { retry_in, holder }) => {
                self.busy.push(retry_in);
                self.holder = holder.or(self.holder.take());
            }
            Ok(Proposed::Late) => self.late += 1,
            Ok(Proposed::Young { settled_in }) => self.failures.add(StoreError::unavailable(format!(
                "a member started lately, and takes part in new leases in {settled_in:?}"
            ))),
            Err(error) => self.failures.add(error),
        }
        if self.held >= self.size.majority {
            return Some(Won::Fence(self.fence));
        }
        let against = self.busy.len() + self.late + self.failures.count();
        self.size.blocks(against).then(|| Won::Not(self.lost()))
    }

    /// How it stands when no more answers are awaited.
    pub(super) fn lost(&self) -> Result<Claimed, StoreError> {
        let (busy, absent) = (self.busy.len(), self.failures.count());
        if self.size.blocks(absent) || busy + self.late == 0 {
            return Err(self.failures.error(self.size, "could be asked"));
        }
        if busy == 0 {
            return Ok(Claimed::Late);
        }
        Ok(Claimed::busy(self.retry_in(), self.holder.clone()))
    }

    /// When so many of the others' leases have ended that a majority can be free. Where the votes were split among those
    /// who asked at once, nobody can say: they leave as soon as they know.
    fn retry_in(&self) -> Option<Duration> {
        let wanted = self.busy.len().checked_sub(self.size.members - self.size.majority + 1)?;
        let mut ends: Vec<_> = self.busy.iter().map(|end| end.unwrap_or(Duration::MAX)).collect();
        ends.sort();
        ends.get(wanted).copied().filter(|end| *end != Duration::MAX)
    }
}

/// The votes on one confirmation or renewal.
#[derive(Debug)]
pub(super) struct Holds {
    size: Size,
    ours: usize,
    gone: usize,
    taken: usize,
    late: usize,
    failures: Failures,
}

impl Holds {
    pub(super) fn new(size: Size) -> Self {
        Holds { size, ours: 0, gone: 0, taken: 0, late: 0, failures: Failures::default() }
    }

    pub(super) fn add(&mut self, answer: Result<Kept, StoreError>) {
        match answer {
            Ok(Kept::Ours) => self.ours += 1,
            Ok(Kept::Gone) => self.gone += 1,
            Ok(Kept::Taken) => self.taken += 1,
            Ok(Kept::Late) => self.late += 1,
            Err(error) => self.failures.add(error),
        }
    }

    pub(super) fn is_decided(&self) -> bool {
        let against = self.gone + self.taken + self.late + self.failures.count();
        self.ours >= self.size.majority || self.size.blocks(against)
    }

    /// Lost only when so many say so that no majority can be ours; what may pass is tried again.
    pub(super) fn verdict(&self) -> Result<Renewed, StoreError> {
        if self.ours >= self.size.majority {
            Ok(Renewed::Renewed)
        } else if self.size.blocks(self.gone + self.taken) {
            Ok(if self.taken > 0 { Renewed::Taken } else { Renewed::Gone })
        } else {
            Err(self.failures.error(self.size, "confirmed the lease"))
        }
    }
}

/// The members' views of who holds a key.
#[derive(Debug)]
pub(super) struct Views {
    size: Size,
    seen: Vec<Option<Holding>>,
    failures: Failures,
}

impl Views {
    pub(super) fn new(size: Size) -> Self {
        Views { size, seen: Vec::new(), failures: Failures::default() }
    }

    /// The view of a majority, as soon as there is one.
    pub(super) fn add(&mut self, view: Result<Option<Holding>, StoreError>) -> Option<Option<Holding>> {
        match view {
            Ok(view) => self.seen.push(view),
            Err(error) => self.failures.add(error),
        }
        let free = self.seen.iter().filter(|view| view.is_none()).count();
        if free >= self.size.majority {
            return Some(None);
        }
        self.seen.iter().flatten().find_map(|one| self.shared_by_a_majority(one)).map(Some)
    }

    /// Ends when a majority has let it end.
    fn shared_by_a_majority(&self, one: &Holding) -> Option<Holding> {
        let same = self.seen.iter().flatten().filter(|it| (&it.label, it.fence) == (&one.label, one.fence));
        // A key without a TTL lasts for ever.
        let mut ends: Vec<_> = same.map(|it| it.remaining.unwrap_or(Duration::MAX)).collect();
        ends.sort_by(|a, b| b.cmp(a));
        let end = *ends.get(self.size.majority - 1)?;
        Some(Holding::new(one.label.clone(), one.fence, (end != Duration::MAX).then_some(end), 0))
    }

    /// All have answered who will: without a majority of one view, nobody holds the key.
    pub(super) fn last(&self) -> Result<Option<Holding>, StoreError> {
        if self.seen.len() >= self.size.majority { Ok(None) } else { Err(self.failures.error(self.size, "answered")) }
    }
}

/// The members' word on something that each of them does or fails to do.
#[derive(Debug)]
pub(super) struct Done {
    size: Size,
    answered: usize,
    any: bool,
    failures: Failures,
}

impl Done {
    /// `absent`: members that need not be asked.
    pub(super) fn new(size: Size, absent: usize) -> Self {
        Done { size, answered: absent, any: false, failures: Failures::default() }
    }

    /// Once a majority has answered: whether there was something to do at any of them.
    pub(super) fn add(&mut self, answer: Result<bool, StoreError>) -> Option<bool> {
        match answer {
            Ok(done) => {
                self.answered += 1;
                self.any |= done;
            }
            Err(error) => self.failures.add(error),
        }
        self.so_far()
    }

    pub(super) fn so_far(&self) -> Option<bool> {
        (self.answered >= self.size.majority).then_some(self.any)
    }

    /// No more answers are awaited.
    pub(super) fn last(&self) -> Result<bool, StoreError> {
        self.so_far().ok_or_else(|| self.failures.error(self.size, "answered"))
    }
}

#[cfg(test)]
mod tests;
