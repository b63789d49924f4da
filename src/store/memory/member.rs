//! The embedded store as a member of a quorum: each operation is one of the Redis page.
use super::{Hold, Kept, Member, MemoryStore, Proposal, Proposed, State, slot::Now, unpoisoned};
use crate::error::StoreError;
use std::future::Future;

impl Member for MemoryStore {
    fn propose(&self, proposal: &Proposal) -> impl Future<Output = Result<Proposed, StoreError>> + Send {
        let given = self.clock.now();
        async move {
            Ok(self.step(|state, now, _| {
                let late = now.moment.since(given) > proposal.not_after;
                let age = now.moment.since(*unpoisoned(&self.born));
                state.propose(proposal, late, proposal.settled.saturating_sub(age), now)
            }))
        }
    }

    fn hold_all(&self, list: &[Hold]) -> impl Future<Output = Vec<Result<Kept, StoreError>>> + Send {
        let given = self.clock.now();
        async move {
            self.step(|state, now, _| {
                let late = |hold: &Hold| now.moment.since(given) > hold.not_after;
                list.iter().map(|hold| Ok(state.hold(hold, late(hold), now))).collect()
            })
        }
    }
}

impl State {
    /// The fence that was given last stays as it is: only what a majority writes back is a fence.
    fn propose(&mut self, proposal: &Proposal, late: bool, settled_in: std::time::Duration, now: Now) -> Proposed {
        self.sweep(now);
        let slot = self.slots.entry(proposal.key.clone()).or_default();
        if let Some(fence) = slot.prolong(&proposal.owner, proposal.ttl, now) {
            return Proposed::Held { fence };
        }
        if late {
            return Proposed::Late;
        }
        if let Some(held) = slot.held(now) {
            let retry_in = Some(held.until.since(now.moment));
            return Proposed::Busy { retry_in, holder: Some(held.owner.label().clone()) };
        }
        if !settled_in.is_zero() {
            return Proposed::Young { settled_in };
        }
        Proposed::Held { fence: slot.propose(proposal.owner.clone(), proposal.ttl, now) }
    }

    fn hold(&mut self, hold: &Hold, late: bool, now: Now) -> Kept {
        let slot = self.slots.entry(hold.key.clone()).or_default();
        let held = slot.held(now);
        let mine = held.is_some_and(|held| held.owner == hold.owner);
        if held.is_some() && !mine {
            return Kept::Taken;
        }
        if slot.fence > hold.fence {
            return if mine { Kept::Taken } else { Kept::Gone };
        }
        let least = held.map(|held| held.until.since(now.moment)).unwrap_or_default();
        if !mine && !hold.create {
            return Kept::Gone;
        }
        if !mine && late {
            return Kept::Late;
        }
        slot.keep(hold.owner.clone(), hold.fence, hold.ttl.max(least), now);
        Kept::Ours
    }
}
