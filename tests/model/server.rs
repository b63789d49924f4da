//! The server: the operations of `src/store/redis/protocol.lua`, one by one and under its names.
use crate::fault::Fault;

/// Drawn anew for each acquisition of a client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Owner {
    pub(crate) client: u8,
    pub(crate) turn: u8,
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", char::from(b'A' + self.client), self.turn)
    }
}

/// `k`: who has the lease, under which fence, and for how many ticks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Lease {
    pub(crate) owner: Owner,
    pub(crate) fence: u8,
    pub(crate) ttl: u8,
}

/// An entry of `q` and `w`. It is alive while something is left of its presence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Waiter {
    pub(crate) owner: Owner,
    pub(crate) left: u8,
    pub(crate) presence: u8,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Server {
    pub(crate) k: Option<Lease>,
    /// The counter of fences; 0 is none.
    pub(crate) f: u8,
    pub(crate) q: Vec<Waiter>,
    /// `TIME`, as far as fences are made of it: larger than any that was made.
    pub(crate) us: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Claimed {
    Held { fence: u8 },
    Queued { seen: u8 },
    Late,
}

impl Server {
    pub(crate) fn new() -> Server {
        Server { k: None, f: 0, q: Vec::new(), us: 1 }
    }

    pub(crate) fn claim(&mut self, owner: Owner, ttl: u8, presence: u8, late: bool, fault: Fault) -> Claimed {
        if let Some(k) = &mut self.k
            && k.owner == owner
        {
            if fault != Fault::HeldKeepsTheTtl {
                k.ttl = k.ttl.max(ttl);
            }
            return Claimed::Held { fence: k.fence };
        }
        if late && fault != Fault::LateClaimRuns {
            return Claimed::Late;
        }
        let place = self.q.iter_mut().find(|waiter| waiter.owner == owner);
        let joins = place.is_none();
        if let Some(waiter) = place {
            waiter.left = presence; // alive by its own account, before the dead are dropped
        }
        if self.k.is_none() && self.first(fault).is_none_or(|head| head.owner == owner) {
            if fault != Fault::TakerStaysInLine {
                self.leave(owner);
            }
            let fence = self.next_fence(0, fault);
            self.k = Some(Lease { owner, fence, ttl });
            return Claimed::Held { fence };
        }
        let mut seen = self.f.max(self.k.map_or(0, |k| k.fence));
        if self.f == 0 {
            if seen == 0 {
                seen = self.us;
                self.us += 1;
            }
            self.f = seen;
        }
        if joins {
            self.q.push(Waiter { owner, left: presence, presence });
        }
        if self.k.is_some_and(|k| k.ttl < presence) {
            self.first(fault);
        }
        Claimed::Queued { seen }
    }

    /// Whether it is renewed. If not, the lease is gone or taken.
    pub(crate) fn renew(&mut self, owner: Owner, fence: u8, ttl: u8, fault: Fault) -> bool {
        let Some(k) = &mut self.k else {
            if fault == Fault::RenewalCreates {
                self.k = Some(Lease { owner, fence, ttl });
            }
            return fault == Fault::RenewalCreates;
        };
        let proved = match fault {
            Fault::RenewalProvesNothing => true,
            Fault::RenewalProvesNoFence => k.owner == owner,
            _ => k.owner == owner && k.fence == fence,
        };
        if proved {
            k.ttl = k.ttl.max(ttl);
        }
        proved
    }

    /// Answers the grant that it publishes, if any.
    pub(crate) fn release(&mut self, owner: Owner, fault: Fault) -> Option<Lease> {
        if let Some(k) = self.k
            && (k.owner == owner || fault == Fault::ReleaseComparesNothing)
        {
            return self.give(k.fence, fault);
        }
        self.leave(owner);
        if self.k.is_none() && fault != Fault::LeaverKeepsItsTurn { self.give(0, fault) } else { None }
    }

    pub(crate) fn force(&mut self, fault: Fault) -> Option<Lease> {
        self.k.and_then(|k| self.give(k.fence, fault))
    }

    /// To the first live waiter, for one presence; or to nobody. `floor`: the fence that ends.
    fn give(&mut self, floor: u8, fault: Fault) -> Option<Lease> {
        self.k = None;
        let head = if fault == Fault::GrantForgetsTheDead { self.q.first().copied() } else { self.first(Fault::None) };
        let Waiter { owner, presence, .. } = head?;
        self.leave(owner);
        let fence = self.next_fence(floor, fault);
        self.k = Some(Lease { owner, fence, ttl: presence });
        self.k
    }

    fn next_fence(&mut self, floor: u8, fault: Fault) -> u8 {
        self.f = match fault {
            Fault::FenceRestarts => self.f + 1,
            _ => (self.f.max(floor) + 1).max(self.us),
        };
        self.us = self.us.max(self.f + 1);
        self.f
    }

    /// The first live waiter. The dead before it are dropped.
    fn first(&mut self, fault: Fault) -> Option<Waiter> {
        if fault != Fault::ClaimsKeepTheDead {
            let dead = self.q.iter().take_while(|waiter| waiter.left == 0).count();
            self.q.drain(..dead);
        }
        self.q.first().copied()
    }

    fn leave(&mut self, owner: Owner) {
        self.q.retain(|waiter| waiter.owner != owner);
    }

    pub(crate) fn owns(&self, owner: Owner) -> bool {
        self.k.is_some_and(|k| k.owner == owner)
    }

    pub(crate) fn in_line(&self, owner: Owner) -> bool {
        self.q.iter().any(|waiter| waiter.owner == owner)
    }

    pub(crate) fn tick(&mut self) {
        self.k = self.k.map(|k| Lease { ttl: k.ttl - 1, ..k }).filter(|k| k.ttl > 0);
        for waiter in &mut self.q {
            waiter.left = waiter.left.saturating_sub(1);
        }
        // The line has a TTL, which only grows: as much as is left of the longest presence.
        if self.q.iter().all(|waiter| waiter.left == 0) {
            self.q.clear();
        }
    }
}
