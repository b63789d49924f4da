//! Which attempt holds for which owner.
//!
//! Whoever asks keeps one owner for as long as it waits; but each attempt at a majority needs an owner of its own, or a
//! late answer to an earlier one could be counted (`docs/safety.md`). So attempts draw their own, and the table knows
//! which of them has won.
use super::stake::Stake;
use crate::{
    Key,
    clock::Moment,
    store::{Owner, sweep::Sweep},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::watch;
use uuid::Uuid;

#[derive(Default)]
pub(super) struct Owners {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<(Key, Uuid), Entry>,
    /// When it is looked through for what was forgotten.
    sweep: Sweep<CROWDED>,
}

struct Entry {
    state: State,
    /// What has to be given back when the owner leaves.
    stakes: Vec<Arc<Stake>>,
    /// By then all of it has ended by itself.
    until: Moment,
    /// Rings when an attempt is over.
    over: watch::Sender<()>,
}

enum State {
    Idle,
    /// An attempt is being made.
    Trying(Arc<Stake>),
    Held(Held),
}

/// A majority that was won.
#[derive(Clone)]
pub(super) struct Held {
    pub(super) stake: Arc<Stake>,
    pub(super) fence: u64,
    /// Until then it is certain; after that it is put back nowhere.
    pub(super) valid_until: Moment,
}

/// What an owner that asks finds.
pub(super) enum Turn {
    /// An attempt of its own that is under way: the next turn comes when that is over.
    Wait(watch::Receiver<()>),
    Held(Held),
    /// Its attempt may begin.
    Begin,
}

/// Fewer entries are not looked through.
const CROWDED: usize = 256;

fn name(key: &Key, owner: &Owner) -> (Key, Uuid) {
    (key.clone(), *owner.id())
}

impl Owners {
    pub(super) fn turn(&self, owner: &Owner, stake: &Arc<Stake>, until: Moment, now: Moment) -> Turn {
        let mut table = self.table();
        table.sweep(now);
        let entry = table.entries.entry(name(&stake.key, owner)).or_insert_with(|| Entry {
            state: State::Idle,
            stakes: Vec::new(),
            until,
            over: watch::Sender::new(()),
        });
        match &entry.state {
            State::Trying(_) => Turn::Wait(entry.over.subscribe()),
            State::Held(held) => Turn::Held(held.clone()),
            State::Idle => {
                entry.state = State::Trying(stake.clone());
                entry.stakes.push(stake.clone());
                entry.until = entry.until.max(until);
                Turn::Begin
            }
        }
    }

    /// The attempt has won; `false` when its owner has left meanwhile.
    pub(super) fn won(&self, owner: &Owner, held: Held) -> bool {
        self.end(owner, &held.stake.clone(), State::Held(held))
    }

    /// The attempt is over, and has won nothing.
    pub(super) fn failed(&self, owner: &Owner, stake: &Arc<Stake>) {
        self.end(owner, stake, State::Idle);
    }

    fn end(&self, owner: &Owner, stake: &Arc<Stake>, state: State) -> bool {
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&name(&stake.key, owner)) else { return false };
        if !matches!(&entry.state, State::Trying(trying) if Arc::ptr_eq(trying, stake)) {
            return false;
        }
        entry.state = state;
        entry.over.send_replace(());
        true
    }

    pub(super) fn held(&self, key: &Key, owner: &Owner) -> Option<Held> {
        match &self.table().entries.get(&name(key, owner))?.state {
            State::Held(held) => Some(held.clone()),
            _ => None,
        }
    }

    /// A majority has confirmed it again.
    pub(super) fn renewed(&self, owner: &Owner, stake: &Arc<Stake>, valid_until: Moment, until: Moment) {
        if let Some(entry) = self.table().entries.get_mut(&name(&stake.key, owner))
            && let State::Held(held) = &mut entry.state
            && Arc::ptr_eq(&held.stake, stake)
        {
            held.valid_until = held.valid_until.max(valid_until);
            entry.until = entry.until.max(until);
        }
    }

    /// What was won is lost again.
    pub(super) fn lost(&self, owner: &Owner, stake: &Arc<Stake>) {
        if let Some(entry) = self.table().entries.get_mut(&name(&stake.key, owner))
            && matches!(&entry.state, State::Held(held) if Arc::ptr_eq(&held.stake, stake))
        {
            entry.state = State::Idle;
        }
    }

    /// The owner leaves: from here on nothing is won or renewed for it. What it may have to give back; it is kept until
    /// [`forget`](Owners::forget), should giving back fail.
    pub(super) fn part(&self, key: &Key, owner: &Owner) -> Vec<Arc<Stake>> {
        let mut table = self.table();
        let Some(entry) = table.entries.get_mut(&name(key, owner)) else { return Vec::new() };
        entry.state = State::Idle;
        entry.over.send_replace(());
        entry.stakes.clone()
    }

    /// These were given back.
    pub(super) fn forget(&self, key: &Key, owner: &Owner, back: &[Arc<Stake>]) {
        let mut table = self.table();
        let name = name(key, owner);
        if let Some(entry) = table.entries.get_mut(&name) {
            entry.stakes.retain(|stake| !back.iter().any(|gone| Arc::ptr_eq(stake, gone)));
            if entry.stakes.is_empty() && matches!(entry.state, State::Idle) {
                table.entries.remove(&name);
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.table().entries.len()
    }
}

impl Table {
    /// Drops what its owner never came back for.
    fn sweep(&mut self, now: Moment) {
        if self.sweep.is_due(self.entries.len()) {
            self.entries.retain(|_, entry| entry.until > now || matches!(entry.state, State::Trying(_)));
            self.sweep.done(self.entries.len());
        }
    }
}
