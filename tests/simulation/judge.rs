//! What must hold, checked at every step, by what was seen on the wire and in the work alone.
use crate::server::{Reply, Request, Word, micros};
use leasehold::{
    Gate, Key,
    store::{Claimed, Owner, Renewed, Wrote},
};
use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

mod work;

/// An index into the acquisitions, in the order in which the server made them.
pub type Id = usize;

/// One ownership.
pub struct Acquisition {
    key: Key,
    fence: u64,
    owner: Owner,
    net: usize,
    /// When the server made it.
    at: u64,
    ttl: Duration,
    /// Certain before this moment of true time, by what the client was told; 0 while it wasn't told anything.
    until: u64,
    /// The server broke its word (force, lost data, a jump of its clock): only the fence is left.
    void: bool,
    /// A client has made a lease of it.
    begun: bool,
    told: bool,
    /// It is not renewed: it ends with its TTL.
    fixed: bool,
    /// A poll of the work went past the end.
    pub overran: bool,
    /// Renewals that went wrong since the last that succeeded.
    faults: u32,
    /// Those before, and when that success came: it may have come when the token had fired.
    before: (u32, u64),
    /// It came from the line.
    granted: bool,
    /// The server said that it was renewed when somebody else had the key: no promise.
    lied_to: bool,
    /// What had happened to the client when it began; see [`Judge::disturbed`].
    disturbances: u64,
    /// Taken by a claim that was carried out after a release of the same owner.
    orphan: bool,
    cancelled: Option<u64>,
}

/// What is known of one owner.
#[derive(Default)]
struct Asking {
    /// Which of all owners, for the log.
    number: usize,
    first: Option<u64>,
    /// When it is released again, should its last claim not be answered.
    echo: u64,
    /// When the latest claim that was answered "queued" was sent.
    base: Option<u64>,
    /// The server's time until which it counts as alive in the line.
    alive_until: u64,
    released: bool,
    /// A release was lost.
    let_down: bool,
    /// When its first release was sent.
    leaves: Option<u64>,
    /// Something of it went wrong on the wire.
    faulty: bool,
}

#[derive(Default)]
struct Fences {
    newest: u64,
    /// The newest ownership whose work has been polled.
    polled: Option<Id>,
    /// The owner of the newest write that was let through, by each of two resources.
    wrote: [Option<Id>; 2],
    gate: Gate,
    /// The server's clock went back behind the last acquisition, and the counter was lost.
    beyond: bool,
}

pub struct Judge {
    acquisitions: Vec<Acquisition>,
    asking: HashMap<uuid::Uuid, Asking>,
    keys: BTreeMap<Key, Fences>,
    pub coverage: BTreeMap<&'static str, u64>,
    /// Of everybody, and of each client by itself.
    pub disturbances: u64,
    /// Until when the last of them lasts.
    pub until: u64,
    pub nets: Vec<NetTrouble>,
    /// How often they did.
    pub stalls: u64,
    /// When the clients last awoke from standing still.
    pub stood_still: u64,
    data_lost: bool,
    pub log: Option<Vec<String>>,
    pub violation: Option<String>,
}

#[derive(Default)]
pub struct NetTrouble {
    pub disturbances: u64,
    pub until: u64,
    /// How often it was stopped.
    pub stalls: u64,
    /// Its process is gone.
    pub dead: bool,
}

fn drift(length: Duration) -> Duration {
    length / 100 + Duration::from_millis(2)
}

/// What is promised by an answer to a request that was sent at `sent`.
fn promise(sent: u64, length: Duration) -> u64 {
    sent + micros(length.saturating_sub(drift(length)))
}

/// Timers have a resolution of a millisecond, and a message takes its time through a few tasks.
const SLACK: u64 = 5_000;
/// How long it may take after a suspension until everything due is noticed.
const LOOK: u64 = 1_000_000;

impl Judge {
    pub fn new(logging: bool) -> Self {
        Judge {
            acquisitions: Vec::new(),
            asking: HashMap::new(),
            keys: BTreeMap::new(),
            coverage: BTreeMap::new(),
            disturbances: 0,
            until: 0,
            stalls: 0,
            nets: Vec::new(),
            stood_still: 0,
            data_lost: false,
            log: logging.then(Vec::new),
            violation: None,
        }
    }

    pub fn count(&mut self, what: &'static str) {
        *self.coverage.entry(what).or_default() += 1;
    }

    pub fn note(&mut self, now: u64, what: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            log.push(format!("{:>12.3} ms  {}", now as f64 / 1000.0, what()));
        }
    }

    pub fn broken(&mut self, now: u64, what: String) {
        if self.violation.is_none() {
            self.note(now, || format!("BROKEN: {what}"));
            self.violation = Some(format!("at {:.3} ms: {what}", now as f64 / 1000.0));
        }
    }

    /// The number of an owner, for the log.
    pub fn number(&mut self, owner: &Owner) -> usize {
        let next = self.asking.len();
        self.asking.entry(*owner.id()).or_insert_with(|| Asking { number: next, ..Asking::default() }).number
    }

    fn find(&self, key: &Key, fence: u64) -> Option<Id> {
        self.acquisitions.iter().rposition(|a| a.fence == fence && a.key == *key)
    }

    pub fn describe(&self, id: Id) -> String {
        let a = &self.acquisitions[id];
        format!("#{id} {} net {} until {:.3} ms", a.key, a.net, a.until as f64 / 1000.0)
    }

    /// The server broke its word to everybody.
    pub fn void_all(&mut self, lost: bool) {
        self.data_lost |= lost;
        self.disturbances += 1;
        self.acquisitions.iter_mut().for_each(|a| a.void = true);
        // A place that was taken back proves nothing about when its owner last asked, nor does a release; and by a clock that
        // was set back, a late claim is not late.
        self.asking.values_mut().for_each(|asking| asking.let_down = true);
    }

    fn disturbed(&self, a: &Acquisition) -> bool {
        let net = &self.nets[a.net];
        self.disturbances + net.disturbances != a.disturbances || self.until.max(net.until) > a.at
    }

    /// How often this client stood still.
    pub fn stalls(&self, net: usize) -> u64 {
        self.stalls + self.nets[net].stalls
    }

    // -- what the server does

    /// A message is about to be carried out.
    pub fn before(&mut self, wall: u64, request: &Request) {
        match request {
            Request::Claim(claim, not_after) if wall <= *not_after => {
                let asking = self.asking.entry(*claim.owner.id()).or_default();
                asking.alive_until = wall + micros(claim.presence);
            }
            Request::Release(_, owner) => self.asking.entry(*owner.id()).or_default().released = true,
            _ => {}
        }
    }

    /// The key has another owner than before the step.
    pub fn acquired(&mut self, now: u64, wall: u64, (key, fence, owner): (Key, u64, Owner), ttl: Duration) -> Id {
        let net: usize = owner.label().parse().unwrap();
        let id = self.acquisitions.len();
        let orphan = self.asking.get(owner.id()).is_some_and(|asking| asking.released && !asking.let_down);
        let fences = self.keys.entry(key.clone()).or_default();
        if fence <= fences.newest {
            let newest = fences.newest;
            // Promise 12 ends where a lost counter meets a clock that is behind the last acquisition.
            if self.data_lost && wall <= newest {
                fences.beyond = true;
                self.count("fences beyond their promise");
            } else {
                self.broken(now, format!("{key}: fence {fence} was given after {newest}"));
            }
        } else {
            fences.newest = fence;
        }
        let disturbances = self.disturbances + self.nets[net].disturbances;
        self.acquisitions.push(Acquisition {
            key,
            fence,
            owner,
            net,
            at: now,
            ttl,
            until: 0,
            void: false,
            begun: false,
            told: false,
            fixed: false,
            overran: false,
            faults: 0,
            before: (0, 0),
            granted: false,
            lied_to: false,
            disturbances,
            orphan,
            cancelled: None,
        });
        self.count("ownerships");
        if self.log.is_some() {
            let made = self.describe(id);
            self.note(now, || format!("owned: {made}"));
        }
        id
    }

    /// A waiter was handed the key.
    pub fn granted(&mut self, now: u64, wall: u64, id: Id, word: &Word) {
        let Word::Granted { owner, length, .. } = word else { return };
        self.count("hand-overs");
        let a = &mut self.acquisitions[id];
        (a.until, a.granted) = (promise(now, *length), true);
        let alive_until = self.asking.get(owner.id()).map_or(0, |asking| asking.alive_until);
        if alive_until <= wall {
            self.broken(now, format!("#{id} was handed to a waiter that died {} us ago", wall - alive_until));
        }
    }

    /// A lease is said to be renewed.
    pub fn renewed(&mut self, key: &Key, fence: u64, owns: bool) {
        if let Some(id) = self.find(key, fence).filter(|_| !owns) {
            self.acquisitions[id].lied_to = true;
        }
    }

    pub fn forced(&mut self, key: &Key, fence: u64) {
        if let Some(id) = self.find(key, fence) {
            self.acquisitions[id].void = true;
        }
    }

    /// The TTL of an ownership has freed the key.
    pub fn expired(&mut self, now: u64, key: &Key, fence: u64) {
        self.count("ownerships that ran out");
        let Some(id) = self.find(key, fence) else { return };
        let a = &self.acquisitions[id];
        let excused = self.asking.get(a.owner.id()).is_none_or(|asking| asking.let_down || now <= asking.echo + SLACK);
        let in_the_way =
            |asking: &Asking| asking.faulty || asking.let_down || asking.leaves.is_some_and(|at| at <= now);
        let in_the_way = self.asking.get(a.owner.id()).is_none_or(in_the_way);
        if a.void || self.nets[a.net].dead || self.disturbed(a) {
            return;
        }
        if a.orphan && !excused {
            self.broken(now, format!("#{id} was taken after its release, and nobody released it again"));
        } else if !a.orphan && !in_the_way && !a.fixed {
            self.broken(now, format!("#{id} was left to its TTL, though nothing was in the way of a release"));
        }
    }

    pub fn wrote(&mut self, now: u64, key: &Key, fence: u64, reply: &Reply) {
        let Reply::Wrote(wrote) = reply else { return };
        let Some(id) = self.find(key, fence) else { return };
        self.accept(now, key, id, *wrote == Wrote::Written, 0);
    }

    // -- what clients hear

    pub fn sent(&mut self, now: u64, request: &Request, faulty: bool) {
        if faulty {
            self.went_wrong(request);
        }
        match request {
            Request::Claim(claim, _) => {
                self.number(&claim.owner);
                let asking = self.asking.entry(*claim.owner.id()).or_default();
                asking.first.get_or_insert(now);
                let attempt = (claim.ttl / 6).clamp(Duration::from_millis(10), Duration::from_secs(2));
                asking.echo = now + micros(attempt * 4);
            }
            Request::Release(_, owner) => {
                let asking = self.asking.entry(*owner.id()).or_default();
                asking.leaves.get_or_insert(now);
            }
            _ => {}
        }
    }

    /// A message is lost, late, or left behind.
    pub fn went_wrong(&mut self, request: &Request) {
        let owners: Vec<_> = match request {
            Request::Claim(claim, _) => vec![&claim.owner],
            Request::Release(_, owner) => vec![owner],
            Request::Renew(list) => list.iter().map(|renewal| &renewal.owner).collect(),
            _ => Vec::new(),
        };
        for owner in owners {
            self.number(owner);
            let asking = self.asking.entry(*owner.id()).or_default();
            asking.faulty = true;
            asking.let_down |= matches!(request, Request::Release(..));
        }
        if let Request::Renew(list) = request {
            for renewal in list {
                if let Some(id) = self.find(&renewal.key, renewal.fence) {
                    self.acquisitions[id].faults += 1;
                }
            }
        }
    }

    pub fn delivered(&mut self, now: u64, sent: u64, request: &Request, reply: &Reply) {
        match (request, reply) {
            (Request::Claim(claim, _), Reply::Claimed(Claimed::Held { fence, .. })) => {
                self.promised(now, sent, &claim.key, *fence, claim.ttl);
            }
            (Request::Claim(claim, _), Reply::Claimed(Claimed::Queued { .. })) => {
                let asking = self.asking.entry(*claim.owner.id()).or_default();
                asking.base = asking.base.max(Some(sent));
            }
            (Request::Renew(list), Reply::Renewed(answers)) => {
                for (renewal, _) in list.iter().zip(answers).filter(|(_, a)| **a == Renewed::Renewed) {
                    self.promised(now, sent, &renewal.key, renewal.fence, renewal.ttl);
                }
            }
            _ => {}
        }
    }

    fn promised(&mut self, now: u64, sent: u64, key: &Key, fence: u64, ttl: Duration) {
        if let Some(id) = self.find(key, fence).filter(|id| !self.acquisitions[*id].lied_to) {
            let a = &mut self.acquisitions[id];
            let had = if a.before.1 == now || a.cancelled.is_some() { a.before.0 } else { 0 };
            a.before = (had + a.faults, now);
            (a.until, a.ttl, a.faults) = (a.until.max(promise(sent, ttl)), ttl, 0);
        }
    }

    /// From when an engine counts a grant to this owner.
    pub fn counts_from(&self, owner: &Owner) -> Option<u64> {
        let asking = self.asking.get(owner.id())?;
        asking.base.or(asking.first)
    }
}
