//! What the embedded store keeps of one key, and the arithmetic of one step on it.
use crate::{
    Key,
    clock::Moment,
    store::{Claim, Holding, Owner, Ticket},
};
use std::{collections::VecDeque, time::Duration};

/// How long a fence is remembered after the last acquisition of its key.
pub(super) const FENCE_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);

/// What is kept of one key.
#[derive(Default)]
pub(super) struct Slot {
    /// The largest fence that was given for this key. 0: none yet.
    pub(super) fence: u64,
    /// When the fence may be forgotten.
    pub(super) forget: Option<Moment>,
    /// The last holder. It may have expired: ask [`Slot::held`].
    pub(super) holder: Option<Held>,
    /// Who waits, in the order of their tickets. Some may be dead. The holder is never among them.
    pub(super) line: VecDeque<Waiter>,
    /// The largest ticket that was given, or brought back. 0: none yet.
    last_ticket: u64,
}

pub(super) struct Held {
    pub(super) owner: Owner,
    /// The largest that was given, unless it is only proposed in a quorum.
    pub(super) fence: u64,
    pub(super) until: Moment,
}

pub(super) struct Waiter {
    pub(super) owner: Owner,
    ticket: Ticket,
    /// How long it is taken to live without another claim, and how long a grant to it lasts.
    pub(super) presence: Duration,
    /// When it is taken to be dead.
    pub(super) until: Moment,
}

impl Waiter {
    pub(super) fn is_alive(&self, now: Now) -> bool {
        self.until > now.moment
    }
}

/// The instant of one step, on both clocks.
#[derive(Clone, Copy)]
pub(super) struct Now {
    pub(super) moment: Moment,
    /// Microseconds of wall time: the floor of a new fence or ticket.
    pub(super) wall: u64,
}

/// Word to be left in an inbox once the step is over.
pub(super) enum Word {
    Granted { owner: Owner, fence: u64, length: Duration },
    Forced { owner: Owner, key: Key, fence: u64 },
}

impl Slot {
    /// Who holds the key now.
    pub(super) fn held(&self, now: Now) -> Option<&Held> {
        self.holder.as_ref().filter(|held| held.until > now.moment)
    }

    /// Prolongs `owner`'s ownership to at least `ttl` from now; its fence, if there was one.
    pub(super) fn prolong(&mut self, owner: &Owner, ttl: Duration, now: Now) -> Option<u64> {
        let held = self.holder.as_mut().filter(|held| held.until > now.moment && held.owner == *owner)?;
        held.until = held.until.max(now.moment.after(ttl));
        Some(held.fence)
    }

    /// Makes `owner` the holder, under a new fence.
    pub(super) fn take(&mut self, owner: Owner, ttl: Duration, now: Now) -> u64 {
        let fence = self.next_fence(now);
        self.keep(owner, fence, ttl, now);
        fence
    }

    /// Gives a fence for good, and makes `owner` the holder under it.
    pub(super) fn keep(&mut self, owner: Owner, fence: u64, ttl: Duration, now: Now) {
        self.fence = fence;
        self.forget = Some(now.moment.after(FENCE_LIFE));
        let until = now.moment.after(ttl);
        self.holder = Some(Held { owner, fence, until });
    }

    /// Makes `owner` the holder under a fence that isn't given yet.
    pub(super) fn propose(&mut self, owner: Owner, ttl: Duration, now: Now) -> u64 {
        let fence = self.next_fence(now);
        self.holder = Some(Held { owner, fence, until: now.moment.after(ttl) });
        fence
    }

    /// Uses up a fence that is larger than this one.
    pub(super) fn overtake(&mut self, fence: u64, now: Now) {
        self.fence = self.next_fence(now).max(fence + 1);
        self.forget = Some(now.moment.after(FENCE_LIFE));
    }

    pub(super) fn next_fence(&self, now: Now) -> u64 {
        (self.fence + 1).max(now.wall)
    }

    /// The holder's key goes to the first live waiter, for one presence, or to nobody.
    pub(super) fn give(&mut self, now: Now, words: &mut Vec<Word>) {
        self.holder = None;
        self.first(now);
        if let Some(next) = self.line.pop_front() {
            let fence = self.take(next.owner.clone(), next.presence, now);
            words.push(Word::Granted { owner: next.owner, fence, length: next.presence });
        }
    }

    /// The first live waiter; the dead before it are dropped.
    pub(super) fn first(&mut self, now: Now) -> Option<&Waiter> {
        while self.line.front().is_some_and(|w| !w.is_alive(now)) {
            self.line.pop_front();
        }
        self.line.front()
    }

    /// The claim's place in the line: how many live ones are before it, and its ticket.
    pub(super) fn stand(&mut self, claim: &Claim, now: Now) -> (usize, Ticket) {
        let known = self.line.iter().position(|w| w.owner == claim.owner);
        let at = known.unwrap_or_else(|| self.join(claim, now));
        let ahead = self.line.iter().take(at).filter(|w| w.is_alive(now)).count();
        (ahead, self.line[at].ticket)
    }

    fn join(&mut self, claim: &Claim, now: Now) -> usize {
        // After all who ever came, also of those who came within this microsecond.
        let ticket = claim.ticket.unwrap_or(Ticket(self.last_ticket.saturating_add(1).max(now.wall)));
        self.last_ticket = self.last_ticket.max(ticket.0);
        let at = self.line.partition_point(|w| (w.ticket, w.owner.id()) < (ticket, claim.owner.id()));
        let (owner, presence) = (claim.owner.clone(), claim.presence);
        self.line.insert(at, Waiter { owner, ticket, presence, until: now.moment.after(presence) });
        at
    }

    pub(super) fn inspect(&self, now: Now) -> Option<Holding> {
        let held = self.held(now)?;
        let waiters = self.line.iter().filter(|w| w.is_alive(now)).count() as u64;
        let remaining = held.until.since(now.moment);
        Some(Holding::new(Some(held.owner.label().clone()), Some(held.fence), Some(remaining), waiters))
    }
}
