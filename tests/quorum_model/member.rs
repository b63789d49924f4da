//! A member: what `src/store/redis/protocol.lua` does for a quorum, operation by operation and under its names.
use crate::fault::Fault;

/// In the time of the slowest member's clock, which is always 0: below it are those that no clock makes any more.
pub(crate) type Fence = i8;

/// The counter of a member that remembers none.
pub(crate) const NO_FENCE: Fence = Fence::MIN;

/// Drawn anew for each attempt of a client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Owner {
    pub(crate) client: u8,
    pub(crate) attempt: u8,
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", char::from(b'A' + self.client), self.attempt)
    }
}

/// `k`: who has the key, under which fence, and for how many ticks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Lease {
    pub(crate) owner: Owner,
    pub(crate) fence: Fence,
    pub(crate) ttl: u8,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Member {
    pub(crate) k: Option<Lease>,
    /// The largest fence that was written back.
    pub(crate) f: Fence,
    /// `TIME`, as far as it is ahead of the slowest.
    pub(crate) clock: Fence,
    /// For how many ticks it is younger than the quarantine.
    pub(crate) young: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Proposed {
    Held { fence: Fence },
    Busy,
    Young,
    Late,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kept {
    Ours,
    Gone,
    Taken,
    Late,
}

impl Member {
    pub(crate) fn new(clock: Fence) -> Member {
        Member { k: None, f: NO_FENCE, clock, young: 0 }
    }

    pub(crate) fn owns(&self, owner: Owner) -> bool {
        self.k.is_some_and(|k| k.owner == owner)
    }

    /// Leaves the counter as it is: only what a majority writes back is a fence.
    pub(crate) fn propose(&mut self, owner: Owner, ttl: u8, late: bool, fault: Fault) -> Proposed {
        match &mut self.k {
            Some(k) if k.owner == owner => {
                k.ttl = k.ttl.max(ttl);
                Proposed::Held { fence: k.fence }
            }
            _ if late && fault != Fault::LateRequestRuns => Proposed::Late,
            Some(_) => Proposed::Busy,
            None if self.young > 0 && fault != Fault::NoQuarantine => Proposed::Young,
            None => {
                let fence = match fault {
                    Fault::ProposalForgetsTheFence => self.clock,
                    _ => self.clock.max(self.f.saturating_add(1)),
                };
                self.k = Some(Lease { owner, fence, ttl });
                Proposed::Held { fence }
            }
        }
    }

    /// Writes the fence back, renews, and (`create`) puts the lease back where it is missing.
    pub(crate) fn hold(&mut self, lease: Lease, create: bool, late: bool, fault: Fault) -> Kept {
        let Lease { owner, fence, ttl } = lease;
        let mine = self.owns(owner);
        let overtaken = self.f > fence && fault != Fault::HoldIgnoresTheFence;
        if fault == Fault::HoldKeepsWhatIsNotOurs && !mine && !overtaken {
            self.f = fence;
            return Kept::Ours;
        }
        if self.k.is_some() && !mine {
            return Kept::Taken;
        }
        if overtaken {
            return if mine { Kept::Taken } else { Kept::Gone };
        }
        if !mine && !create {
            return Kept::Gone;
        }
        if !mine && late && fault != Fault::LateRequestRuns {
            return Kept::Late;
        }
        let left = self.k.map_or(0, |k| k.ttl);
        self.f = self.f.max(fence);
        self.k = Some(Lease { owner, fence, ttl: left.max(ttl) });
        Kept::Ours
    }

    pub(crate) fn release(&mut self, owner: Owner, fault: Fault) {
        if self.owns(owner) || fault == Fault::ReleaseComparesNothing {
            self.k = None;
        }
    }

    /// Overtakes the fence of the lease that it ends.
    pub(crate) fn force(&mut self) -> Option<Lease> {
        let k = self.k.take()?;
        self.f = self.clock.max(self.f.max(k.fence).saturating_add(1));
        Some(k)
    }

    /// Comes back without its data.
    pub(crate) fn restart(&mut self, quarantine: u8) {
        *self = Member { young: quarantine, ..Member::new(self.clock) };
    }

    pub(crate) fn tick(&mut self) {
        self.k = self.k.map(|k| Lease { ttl: k.ttl - 1, ..k }).filter(|k| k.ttl > 0);
        self.young = self.young.saturating_sub(1);
    }
}
