//! A server with the semantics of the Redis page, a clock of its own, and switches for what it may get wrong.
use crate::planted::Planted;
use leasehold::{
    Key,
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Renewal, Renewed, Ticket, Wrote},
};
use std::{collections::BTreeMap, time::Duration};

/// The server's wall clock, in microseconds, as it follows from true time.
pub struct WallClock {
    anchor: u64,
    wall: u64,
    /// How much faster than true time, in millionths.
    ppm: i64,
}

impl WallClock {
    pub fn new(ppm: i64) -> Self {
        WallClock { anchor: 0, wall: 1_700_000_000_000_000, ppm }
    }
    pub fn at(&self, true_time: u64) -> u64 {
        let gone = true_time - self.anchor;
        self.wall.wrapping_add(gone).wrapping_add_signed(gone as i64 * self.ppm / 1_000_000)
    }
    pub fn set_rate(&mut self, true_time: u64, ppm: i64) {
        (self.wall, self.anchor, self.ppm) = (self.at(true_time), true_time, ppm);
    }
    pub fn jump(&mut self, true_time: u64, by: i64) {
        self.set_rate(true_time, self.ppm);
        self.wall = self.wall.wrapping_add_signed(by);
    }
}

#[derive(Clone, Debug)]
pub enum Request {
    /// With the server's time after which it is late.
    Claim(Claim, u64),
    Renew(Vec<Renewal>),
    Release(Key, Owner),
    Inspect(Key),
    Force(Key),
    Write(FencedWrite),
    Read(Key),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    Claimed(Claimed),
    Renewed(Vec<Renewed>),
    Freed(Freed),
    Inspected(Option<Holding>),
    Forced(bool),
    Wrote(Wrote),
    Read(Option<Vec<u8>>),
}

/// Word for the inbox of an owner.
#[derive(Clone, Debug)]
pub enum Word {
    Granted { owner: Owner, fence: u64, length: Duration },
    Forced { owner: Owner, key: Key, fence: u64 },
}

impl Word {
    pub fn owner(&self) -> &Owner {
        let (Word::Granted { owner, .. } | Word::Forced { owner, .. }) = self;
        owner
    }
}

/// What a failover may take back. The values are the protected resource, which has a disk of its own.
#[derive(Clone, Default)]
pub struct Data(BTreeMap<Key, Slot>);

#[derive(Clone, Default)]
struct Slot {
    fence: u64,
    holder: Option<Held>,
    line: Vec<Waiter>,
}

#[derive(Clone)]
pub struct Held {
    pub owner: Owner,
    pub fence: u64,
    pub until: u64,
}

#[derive(Clone)]
struct Waiter {
    owner: Owner,
    ticket: u64,
    deadline: u64,
    presence: u64,
}

impl Waiter {
    /// More than one presence ahead: the clock went back, and the entry proves nothing.
    fn is_alive(&self, now: u64) -> bool {
        self.deadline > now && self.deadline - now <= self.presence
    }
}

pub struct Server {
    pub data: Data,
    values: BTreeMap<Key, (u64, Vec<u8>)>,
    pub planted: Option<Planted>,
}

pub fn micros(d: Duration) -> u64 {
    d.as_micros() as u64
}

impl Server {
    pub fn new(planted: Option<Planted>) -> Self {
        Server { data: Data::default(), values: BTreeMap::new(), planted }
    }

    /// Who holds the key at `now`.
    pub fn holder(&self, key: &Key, now: u64) -> Option<&Held> {
        self.data.0.get(key)?.holder.as_ref().filter(|held| held.until > now)
    }

    /// Whoever held the key last and has not been released, expired or not.
    pub fn last_holder(&self, key: &Key) -> Option<&Held> {
        self.data.0.get(key)?.holder.as_ref()
    }

    pub fn keys(&self) -> Vec<Key> {
        self.data.0.keys().cloned().collect()
    }

    /// How many stand in line.
    pub fn waiting(&self, key: &Key, now: u64) -> usize {
        self.data.0.get(key).map_or(0, |slot| slot.line.iter().filter(|w| w.is_alive(now)).count())
    }

    /// Carries out one message at `now`. `early`: by how much a planted fault dates a renewal too early.
    pub fn step(&mut self, now: u64, request: &Request, early: u64, words: &mut Vec<Word>) -> Reply {
        match request {
            Request::Claim(claim, not_after) => Reply::Claimed(self.claim(claim, now > *not_after, now)),
            Request::Renew(list) => Reply::Renewed(list.iter().map(|r| self.renew(r, now, early)).collect()),
            Request::Release(key, owner) => Reply::Freed(self.release(key, owner, now, words)),
            Request::Inspect(key) => Reply::Inspected(self.inspect(key, now)),
            Request::Force(key) => Reply::Forced(self.force(key, now, words)),
            Request::Write(write) => Reply::Wrote(self.write(write)),
            Request::Read(key) => Reply::Read(self.values.get(key).map(|(_, bytes)| bytes.clone())),
        }
    }

    fn is(&self, planted: Planted) -> bool {
        self.planted == Some(planted)
    }

    fn claim(&mut self, claim: &Claim, late: bool, now: u64) -> Claimed {
        let runs_late = self.is(Planted::RunsLateClaims);
        let forgets = self.is(Planted::ForgetsWhatQueuedSaw);
        let restarts = self.is(Planted::RestartsFences);
        let slot = self.data.0.entry(claim.key.clone()).or_default();
        if let Some(held) = slot.holder.as_mut().filter(|held| held.until > now && held.owner == claim.owner) {
            held.until = held.until.max(now + micros(claim.ttl));
            return Claimed::held(held.fence);
        }
        if late && !runs_late {
            return Claimed::Late;
        }
        let presence = micros(claim.presence);
        if let Some(me) = slot.line.iter_mut().find(|w| w.owner == claim.owner) {
            (me.deadline, me.presence) = (now + presence, presence);
        }
        let held = slot.holder.as_ref().filter(|held| held.until > now);
        let (left, label) = match held {
            Some(held) => (held.until - now, Some(held.owner.label().clone())),
            None => match slot.first(now) {
                Some(first) if first.owner != claim.owner => (first.deadline - now, None),
                _ => {
                    slot.line.retain(|w| w.owner != claim.owner);
                    return Claimed::held(slot.take(&claim.owner, micros(claim.ttl), now, restarts));
                }
            },
        };
        let left = Some(Duration::from_micros(left));
        if !claim.line {
            return Claimed::busy(left, label);
        }
        let ticket = match slot.line.iter().find(|w| w.owner == claim.owner) {
            Some(me) => me.ticket,
            None => {
                let next = slot.line.last().map_or(0, |last| last.ticket + 1).max(now);
                let ticket = claim.ticket.map_or(next, |ticket| ticket.0);
                let at = slot.line.partition_point(|w| w.ticket <= ticket);
                let me = Waiter { owner: claim.owner.clone(), ticket, deadline: now + presence, presence };
                slot.line.insert(at, me);
                ticket
            }
        };
        let ahead = slot.line.iter().take_while(|w| w.owner != claim.owner).filter(|w| w.is_alive(now)).count();
        if slot.fence == 0 {
            // The counter was lost; what is told as seen must count for the next one.
            slot.fence = now.max(slot.holder.as_ref().map_or(0, |held| held.fence));
        }
        let seen = if forgets { 0 } else { slot.fence };
        Claimed::queued(ahead as u64, left, seen, Ticket(ticket), label)
    }

    fn renew(&mut self, renewal: &Renewal, now: u64, early: u64) -> Renewed {
        let (anybody, recreates) = (self.is(Planted::RenewsAnybody), self.is(Planted::RecreatesOnRenewal));
        let slot = self.data.0.entry(renewal.key.clone()).or_default();
        let until = now.saturating_sub(early) + micros(renewal.ttl);
        match slot.holder.as_mut().filter(|held| held.until > now) {
            None if recreates => {
                slot.holder = Some(Held { owner: renewal.owner.clone(), fence: renewal.fence, until });
                Renewed::Renewed
            }
            None => Renewed::Gone,
            Some(held) if anybody || held.owner == renewal.owner && held.fence == renewal.fence => {
                // A fault has no scruples about shortening.
                held.until = if early > 0 { until } else { held.until.max(until) };
                Renewed::Renewed
            }
            Some(_) => Renewed::Taken,
        }
    }

    fn release(&mut self, key: &Key, owner: &Owner, now: u64, words: &mut Vec<Word>) -> Freed {
        let (blind, dead, restarts) = self.handing_over();
        let Some(slot) = self.data.0.get_mut(key) else { return Freed::Gone };
        slot.line.retain(|w| w.owner != *owner);
        let held = slot.holder.as_ref().filter(|held| held.until > now);
        let mine = held.is_some_and(|held| blind || held.owner == *owner);
        // Who leaves the line before a free key passes the turn on.
        if mine || held.is_none() {
            slot.give(now, dead, restarts, words);
        }
        if mine { Freed::Released } else { Freed::Gone }
    }

    fn handing_over(&self) -> (bool, bool, bool) {
        let is = |planted| self.is(planted);
        (is(Planted::ReleasesWithoutComparing), is(Planted::GrantsToTheDead), is(Planted::RestartsFences))
    }

    fn force(&mut self, key: &Key, now: u64, words: &mut Vec<Word>) -> bool {
        let (_, dead, restarts) = self.handing_over();
        let Some(slot) = self.data.0.get_mut(key) else { return false };
        let Some(held) = slot.holder.as_ref().filter(|held| held.until > now) else { return false };
        words.push(Word::Forced { owner: held.owner.clone(), key: key.clone(), fence: held.fence });
        slot.give(now, dead, restarts, words);
        true
    }

    fn inspect(&self, key: &Key, now: u64) -> Option<Holding> {
        let held = self.holder(key, now)?;
        let left = Duration::from_micros(held.until - now);
        let waiters = self.waiting(key, now) as u64;
        Some(Holding::new(Some(held.owner.label().clone()), Some(held.fence), Some(left), waiters))
    }

    fn write(&mut self, write: &FencedWrite) -> Wrote {
        match self.values.get(&write.key) {
            Some((newest, _)) if *newest > write.fence => Wrote::Stale { newest: *newest },
            _ => {
                self.values.insert(write.key.clone(), (write.fence, write.value.clone()));
                Wrote::Written
            }
        }
    }
}

impl Slot {
    fn first(&mut self, now: u64) -> Option<&Waiter> {
        let alive = self.line.iter().position(|w| w.is_alive(now)).unwrap_or(self.line.len());
        self.line.drain(..alive);
        self.line.first()
    }

    fn take(&mut self, owner: &Owner, length: u64, now: u64, restarts: bool) -> u64 {
        let last = self.holder.as_ref().map_or(0, |held| held.fence).max(self.fence);
        self.fence = if restarts { self.fence % 3 + 1 } else { (last + 1).max(now) };
        self.holder = Some(Held { owner: owner.clone(), fence: self.fence, until: now + length });
        self.fence
    }

    fn give(&mut self, now: u64, dead: bool, restarts: bool, words: &mut Vec<Word>) {
        let next = if dead { self.line.first() } else { self.first(now) }.cloned();
        let Some(next) = next else {
            self.fence = self.fence.max(self.holder.take().map_or(0, |held| held.fence));
            return;
        };
        self.line.remove(0);
        let fence = self.take(&next.owner, next.presence, now, restarts);
        words.push(Word::Granted { owner: next.owner, fence, length: Duration::from_micros(next.presence) });
    }
}
