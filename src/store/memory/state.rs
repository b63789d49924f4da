//! All that the embedded store knows.
use super::{
    super::{Claim, Claimed, FencedWrite, Freed, Owner, Renewal, Renewed, Wrote, sweep::Sweep},
    SMALL,
    slot::{Now, Slot, Word},
};
use crate::{Key, error::StoreError};
use std::collections::HashMap;

#[derive(Default)]
pub(super) struct State {
    pub(super) slots: HashMap<Key, Slot>,
    /// When the slots are looked through for what is over.
    sweep: Sweep<SMALL>,
    values: HashMap<Key, Value>,
}

struct Value {
    bytes: Vec<u8>,
    fence: u64,
}

/// The verbs: each is an operation of the Redis page.
impl State {
    pub(super) fn claim(&mut self, claim: &Claim, late: bool, now: Now) -> Claimed {
        if let Some(slot) = self.slots.get_mut(&claim.key)
            && let Some(fence) = slot.prolong(&claim.owner, claim.ttl, now)
        {
            return Claimed::held(fence);
        }
        if late {
            return Claimed::Late;
        }
        self.sweep(now);
        let slot = self.slots.entry(claim.key.clone()).or_default();
        // By its own account alive, so before the dead are dropped.
        if let Some(me) = slot.line.iter_mut().find(|w| w.owner == claim.owner) {
            (me.presence, me.until) = (claim.presence, now.moment.after(claim.presence));
        }
        // What can change first: the holder's TTL ends, or, when the key is free, the presence of the first in line.
        let (change, holder) = if let Some(held) = slot.held(now) {
            (held.until, Some(held.owner.label().clone()))
        } else {
            match slot.first(now) {
                Some(first) if first.owner != claim.owner => (first.until, None),
                mine => {
                    if mine.is_some() {
                        slot.line.pop_front();
                    }
                    return Claimed::held(slot.take(claim.owner.clone(), claim.ttl, now));
                }
            }
        };
        let retry_in = Some(change.since(now.moment));
        if !claim.line {
            return Claimed::busy(retry_in, holder);
        }
        let (ahead, ticket) = slot.stand(claim, now);
        Claimed::queued(ahead as u64, retry_in, slot.fence, ticket, holder)
    }

    pub(super) fn renew(&mut self, renewal: &Renewal, now: Now) -> Renewed {
        let Some(slot) = self.slots.get_mut(&renewal.key) else { return Renewed::Gone };
        match slot.held(now) {
            None => Renewed::Gone,
            Some(held) if held.fence == renewal.fence && held.owner == renewal.owner => {
                slot.prolong(&renewal.owner, renewal.ttl, now);
                Renewed::Renewed
            }
            Some(_) => Renewed::Taken,
        }
    }

    pub(super) fn release(&mut self, key: &Key, owner: &Owner, now: Now, words: &mut Vec<Word>) -> Freed {
        let Some(slot) = self.slots.get_mut(key) else { return Freed::Gone };
        if slot.held(now).is_some_and(|held| held.owner == *owner) {
            slot.give(now, words);
            return Freed::Released;
        }
        slot.line.retain(|w| w.owner != *owner);
        // Who leaves the line before a free key passes its turn on: the next one may not stay until it would ask again.
        if slot.held(now).is_none() {
            slot.give(now, words);
        }
        Freed::Gone
    }

    pub(super) fn force(&mut self, key: &Key, now: Now, words: &mut Vec<Word>) -> bool {
        let Some(slot) = self.slots.get_mut(key) else { return false };
        let Some(held) = slot.held(now) else { return false };
        words.push(Word::Forced { owner: held.owner.clone(), key: key.clone(), fence: held.fence });
        // Overtakes it: in a quorum, its holder would put the lease back with the next renewal.
        let fence = held.fence;
        slot.overtake(fence, now);
        slot.give(now, words);
        true
    }

    pub(super) fn write(&mut self, write: &FencedWrite) -> Result<Wrote, StoreError> {
        self.no_lease(&write.key)?;
        let new = Value { bytes: write.value.clone(), fence: write.fence };
        match self.values.get_mut(&write.key) {
            Some(old) if old.fence > new.fence => return Ok(Wrote::Stale { newest: old.fence }),
            Some(old) => *old = new,
            None => drop(self.values.insert(write.key.clone(), new)),
        }
        Ok(Wrote::Written)
    }

    pub(super) fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        self.no_lease(key)?;
        Ok(self.values.get(key).map(|value| value.bytes.clone()))
    }

    /// In Redis both are keys in one space, so a program must not come to rely on their being apart.
    fn no_lease(&self, key: &Key) -> Result<(), StoreError> {
        if self.slots.contains_key(key) {
            return Err(StoreError::refused("the key is a lease's own; keep the value under another"));
        }
        Ok(())
    }

    /// Drops what is over: dead waiters, and slots with nothing to remember.
    pub(super) fn sweep(&mut self, now: Now) {
        if !self.sweep.is_due(self.slots.len()) {
            return;
        }
        self.slots.retain(|_, slot| {
            slot.line.retain(|w| w.is_alive(now));
            slot.held(now).is_some() || !slot.line.is_empty() || slot.forget.is_some_and(|at| at > now.moment)
        });
        self.sweep.done(self.slots.len());
        self.slots.shrink_to(2 * self.slots.len());
    }
}
