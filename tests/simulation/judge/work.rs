//! What is checked in the work, and at the end of each lease.
use super::{Acquisition, Id, Judge, LOOK, SLACK};
use crate::{
    plan::Plan,
    server::{Server, micros},
};
use leasehold::{Key, LossReason};
use std::time::Duration;

impl Judge {
    /// A client has a lease.
    pub fn begun(&mut self, now: u64, net: usize, key: &Key, fence: u64) -> Option<Id> {
        let mine = |a: &Acquisition| a.net == net && a.fence == fence && a.key == *key;
        let Some(id) = self.acquisitions.iter().rposition(mine) else {
            self.broken(now, format!("{key}: a lease under fence {fence}, which was never given"));
            return None;
        };
        let a = &mut self.acquisitions[id];
        if a.begun {
            self.broken(now, format!("#{id} was begun twice"));
            return None;
        }
        a.begun = true;
        self.count("leases");
        self.note(now, || format!("begun: #{id}"));
        Some(id)
    }

    /// The one ownership of which this client can just have made a lease: for work that sees no fence. None if there are
    /// several.
    pub fn newest(&self, now: u64, net: usize, key: &Key) -> Option<u64> {
        let fits = |a: &&Acquisition| a.net == net && a.key == *key && a.until > now && !a.begun;
        let mut fitting = self.acquisitions.iter().filter(fits);
        let first = fitting.next()?;
        fitting.next().is_none().then_some(first.fence)
    }

    /// A poll of work begins. `certain`: for how long the client believes it may run.
    pub fn polled(&mut self, now: u64, wall: u64, server: &Server, id: Id, certain: Option<Duration>) {
        self.count("polls of work");
        let a = &self.acquisitions[id];
        let owns = server.holder(&a.key, wall).is_some_and(|held| held.fence == a.fence && held.owner == a.owner);
        let newest = self.keys.get(&a.key).and_then(|fences| fences.polled);
        // Grants are dated by what the server says of its fences; a server that forgot them dates wrongly.
        let misled = a.void && self.data_lost && a.granted;
        let wrong = match certain {
            Some(certain) if certain.is_zero() => Some("work was polled past what its lease says"),
            _ if misled => None,
            _ if now > a.until => Some("work was polled past validity"),
            Some(certain) if now + micros(certain) > a.until + 1 => Some("a lease says more than it was promised"),
            _ if self.nets[a.net].dead => Some("work of a dead process was polled"),
            _ if a.void => None,
            _ if !owns => Some("work was polled that does not own"),
            _ if newest > Some(id) => Some("work was polled after the next owner's"),
            _ => None,
        };
        if let Some(wrong) = wrong {
            return self.broken(now, format!("{wrong}: {}", self.describe(id)));
        }
        if self.acquisitions[id].void {
            self.count("polls after the server broke its word");
        }
        let newest = &mut self.keys.entry(self.acquisitions[id].key.clone()).or_default().polled;
        *newest = (*newest).max(Some(id));
    }

    pub fn poll_ended(&mut self, now: u64, id: Id, ready: bool) {
        if ready && now > self.acquisitions[id].until && !self.acquisitions[id].void {
            self.acquisitions[id].overran = true;
            self.count("polls that overran validity");
        }
    }

    /// A client was told that its work is done.
    pub fn finished(&mut self, now: u64, id: Id) {
        if self.acquisitions[id].overran {
            self.broken(now, format!("#{id}: a result that came after the end was taken for good"));
        }
    }

    /// It was asked for without renewal.
    pub fn fixed(&mut self, id: Id) {
        self.acquisitions[id].fixed = true;
    }

    /// Nobody looks how this one ends.
    pub fn unwatched(&mut self, id: Id) {
        self.acquisitions[id].told = true;
    }

    /// The work writes to a resource that checks fences.
    pub fn writes(&mut self, now: u64, id: Id) {
        let (key, fence) = (self.acquisitions[id].key.clone(), self.acquisitions[id].fence);
        let admitted = self.keys.entry(key.clone()).or_default().gate.admit(fence).is_ok();
        self.accept(now, &key, id, admitted, 1);
    }

    pub(super) fn accept(&mut self, now: u64, key: &Key, id: Id, accepted: bool, resource: usize) {
        let fences = self.keys.entry(key.clone()).or_default();
        if !accepted {
            return self.count("stale writes refused");
        }
        let older = fences.wrote[resource].is_some_and(|newest| newest > id);
        if older && !fences.beyond {
            return self.broken(now, format!("a write of #{id} was let through after one of a newer owner"));
        }
        fences.wrote[resource] = fences.wrote[resource].max(Some(id));
        self.count("writes");
    }

    // -- how leases end

    pub fn cancelled(&mut self, now: u64, id: Id) {
        self.acquisitions[id].cancelled = Some(now);
    }

    /// The end of the lease was told.
    pub fn told(&mut self, plan: &Plan, now: u64, id: Id, reason: &LossReason) {
        let a = &mut self.acquisitions[id];
        a.told = true;
        let a = &self.acquisitions[id];
        let still = self.stood_still > 0;
        let due = if still { a.until.max(self.stood_still) + LOOK + SLACK } else { a.until + SLACK };
        let kind = match reason {
            LossReason::Expired => "lost: expired",
            LossReason::Taken => "lost: taken",
            LossReason::Forced => "lost: forced",
            LossReason::Deadline { .. } => "lost: deadline",
            LossReason::MaxHold => "lost: max_hold",
            LossReason::Shutdown => "lost: shutdown",
            LossReason::Released => "released",
            _ => "lost: otherwise",
        };
        let disturbed = self.disturbed(a);
        let too_late = a.cancelled.is_some_and(|cancelled| a.before.1 >= cancelled);
        let misled = a.void && self.data_lost && a.granted;
        let faults = a.faults + if too_late { a.before.0 } else { 0 };
        let excused = match reason {
            // One renewal that goes wrong does no harm: a second one always fits.
            LossReason::Deadline { .. } => faults >= 2 || disturbed || a.void || a.fixed,
            LossReason::Expired | LossReason::Taken => a.void || disturbed,
            LossReason::Forced => a.void && plan.forces(),
            _ => true,
        };
        // With one grace between the token and the end.
        let grace = a.cancelled.map_or(0, |cancelled| now.saturating_sub(cancelled));
        let shortest = if a.granted { a.ttl.min(Duration::from_secs(3)) } else { a.ttl };
        let hurried = matches!(reason, LossReason::Deadline { .. }) && !still && grace + 2_000 < micros(shortest) / 30;
        self.note(now, || format!("ended: #{id} {reason}"));
        self.count(kind);
        if now > due && !misled {
            self.broken(now, format!("#{id} was told late that it is lost ({reason}): {} us", now - due));
        } else if !excused {
            self.broken(now, format!("#{id} was lost ({reason}), though its server answered; {faults} faults"));
        } else if hurried {
            self.broken(now, format!("#{id} was told to stop {grace} us before its end"));
        }
    }

    pub fn all_told(&mut self, now: u64) {
        if let Some(id) = self.acquisitions.iter().position(|a| a.begun && !a.told && !self.nets[a.net].dead) {
            self.broken(now, format!("#{id} was never told that it has ended"));
        }
    }
}
