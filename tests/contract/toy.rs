//! A store to compare others with: the rules written down in the plainest way, and a switch that breaks one of them.
use leasehold::{
    Key, StoreError,
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Ticket, Wrote},
};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
    time::Duration,
};
use tokio::{task::yield_now, time::Instant};

/// A mistake that a store may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    ClaimTakesWhatIsHeld,
    ClaimIsTwoSteps,
    ClaimRepeatedGetsAnotherFence,
    ClaimRepeatedKeepsTheOldTtl,
    ClaimRepeatedShortens,
    ClaimLateTakesAllTheSame,
    RenewsForAnybody,
    RenewsUnderAnyFence,
    RenewalCreates,
    RenewalShortens,
    RenewalDoesNothing,
    RenewalGetsAnotherFence,
    ListIsAnsweredBackwards,
    ListEndsAtTheFirstTrouble,
    ReleasesForAnybody,
    ReleaseDoesNothing,
    ReleaseAlwaysSaysReleased,
    ForceDoesNothing,
    ForceAlwaysSaysTrue,
    FenceRestartsAfterRelease,
    FenceRestartsAfterExpiry,
    FenceRestartsAfterForce,
    EndsEarly,
    NeverEnds,
    RetryAtOnce,
    RetryFarTooLate,
    InspectNamesTheWrongFence,
    KeysIgnoreCase,
    LineIsAStack,
    LineTwicePlaces,
    LineForgetsPlaces,
    LineCountsNobody,
    LineSeesNothing,
    TicketIgnored,
    TryJumpsTheLine,
    TakingStaysInLine,
    ReleaseStaysInLine,
    GrantsForTheWholeTtl,
    GrantsToTheDead,
    DeadStayFirst,
    ForceForgetsTheLine,
    PushNamesTheWrongFence,
    WriteIgnoresFences,
    WriteRefusesTheSameFence,
    WriteRefusesQuietly,
    WriteRoundsFences,
    WriteIsTwoSteps,
    WriteCutsAtZero,
}
use Bug::*;

/// The store. Time is tokio's.
#[derive(Default)]
pub(crate) struct Toy {
    bug: Option<Bug>,
    keys: Mutex<HashMap<String, Kept>>,
    values: Mutex<HashMap<String, (u64, Vec<u8>)>>,
    pushes: Mutex<Vec<Pushes>>,
}

#[derive(Default)]
struct Kept {
    fence: u64,
    holder: Option<Holder>,
    line: Vec<Waiter>,
    last_ticket: u64,
}

#[derive(Clone)]
struct Holder {
    owner: Owner,
    until: Instant,
}

#[derive(Clone)]
struct Waiter {
    claim: Claim,
    ticket: Ticket,
    until: Instant,
}

impl Kept {
    /// The dead before the first who lives lose their places.
    fn drop_dead(&mut self) {
        self.line.sort_by_key(|w| (w.ticket, *w.claim.owner.id()));
        let dead = self.line.iter().take_while(|w| w.until <= Instant::now()).count();
        self.line.drain(..dead);
    }
}

impl Toy {
    pub(crate) fn with(bug: Bug) -> Self {
        Toy { bug: Some(bug), ..Toy::default() }
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    fn name(&self, key: &Key) -> String {
        if self.has(KeysIgnoreCase) { key.as_str().to_lowercase() } else { key.to_string() }
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<String, Kept>> {
        self.keys.lock().unwrap()
    }

    fn end(&self, ttl: Duration) -> Instant {
        Instant::now() + if self.has(EndsEarly) { ttl / 2 } else { ttl }
    }

    fn holder(&self, kept: &Kept) -> Option<Holder> {
        let live = |h: &&Holder| h.until > Instant::now() || self.has(NeverEnds);
        kept.holder.as_ref().filter(live).cloned()
    }

    fn take(&self, kept: &mut Kept, owner: &Owner, ttl: Duration) -> Claimed {
        if self.has(FenceRestartsAfterExpiry) && kept.holder.is_some() {
            kept.fence = 0;
        }
        kept.fence += 1;
        kept.holder = Some(Holder { owner: owner.clone(), until: self.end(ttl) });
        if !self.has(TakingStaysInLine) {
            kept.line.retain(|w| w.claim.owner != *owner);
        }
        Claimed::held(kept.fence)
    }

    fn alive(&self, kept: &Kept) -> Vec<Waiter> {
        let mut line: Vec<_> = kept.line.iter().filter(|w| w.until > Instant::now()).cloned().collect();
        line.sort_by_key(|w| (w.ticket, *w.claim.owner.id()));
        if self.has(LineIsAStack) {
            line.reverse();
        }
        line
    }

    fn give(&self, kept: &mut Kept) {
        kept.holder = None;
        if !self.has(GrantsToTheDead) {
            kept.drop_dead();
        }
        let first =
            if self.has(GrantsToTheDead) { kept.line.first().cloned() } else { self.alive(kept).first().cloned() };
        if let Some(Waiter { claim, .. }) = first {
            let length = if self.has(GrantsForTheWholeTtl) { claim.ttl } else { claim.presence };
            let length = if self.has(GrantsToTheDead) { claim.ttl } else { length };
            self.take(kept, &claim.owner, length);
            let fence = kept.fence + u64::from(self.has(PushNamesTheWrongFence));
            let pushes = self.pushes.lock().unwrap().clone();
            for push in pushes.iter().filter(|p| p.inbox() == claim.owner.inbox()) {
                push.granted(&claim.owner.secret(), fence, length);
            }
        }
    }

    fn claim_now(&self, claim: &Claim) -> Claimed {
        let mut keys = self.keys();
        let kept = keys.entry(self.name(&claim.key)).or_default();
        let holder = self.holder(kept);
        if let (Some(Holder { owner, until }), Some(now)) = (&holder, &mut kept.holder)
            && *owner == claim.owner
        {
            match self.bug {
                Some(ClaimRepeatedKeepsTheOldTtl) => {}
                Some(ClaimRepeatedShortens) => now.until = self.end(claim.ttl),
                _ => now.until = self.end(claim.ttl).max(*until),
            }
            kept.fence += u64::from(self.has(ClaimRepeatedGetsAnotherFence));
            return Claimed::held(kept.fence);
        }
        if claim.not_after.is_zero() {
            if self.has(ClaimLateTakesAllTheSame) {
                self.take(kept, &claim.owner, claim.ttl);
            }
            return Claimed::Late;
        }
        if self.has(LineForgetsPlaces) {
            kept.line.retain(|w| w.claim.owner != claim.owner);
        }
        if let Some(me) = kept.line.iter_mut().find(|w| w.claim.owner == claim.owner) {
            me.until = Instant::now() + claim.presence;
        }
        if holder.is_none() && !self.has(DeadStayFirst) {
            kept.drop_dead();
        }
        let line = if self.has(DeadStayFirst) { kept.line.clone() } else { self.alive(kept) };
        let first = line.first();
        let jumps = self.has(TryJumpsTheLine) && !claim.line;
        let free = holder.is_none() && (jumps || first.is_none_or(|w| w.claim.owner == claim.owner));
        if free || self.has(ClaimTakesWhatIsHeld) {
            return self.take(kept, &claim.owner, claim.ttl);
        }
        let change = holder.as_ref().map(|h| h.until).or(first.map(|w| w.until));
        let retry_in = change.map(|at| at.saturating_duration_since(Instant::now()));
        let retry_in = match self.bug {
            Some(RetryAtOnce) => Some(Duration::ZERO),
            Some(RetryFarTooLate) => retry_in.map(|r| 10 * r),
            _ => retry_in,
        };
        let label = holder.map(|h| h.owner.label().clone());
        if !claim.line {
            return Claimed::busy(retry_in, label);
        }
        let known = kept.line.iter().any(|w| w.claim.owner == claim.owner);
        if !known || self.has(LineTwicePlaces) {
            kept.last_ticket += 1;
            let ticket = claim.ticket.filter(|_| !self.has(TicketIgnored)).unwrap_or(Ticket(kept.last_ticket));
            kept.line.push(Waiter { claim: claim.clone(), ticket, until: Instant::now() + claim.presence });
        }
        let ahead = self.alive(kept).iter().position(|w| w.claim.owner == claim.owner).unwrap_or_default();
        let ticket = kept.line.iter().find(|w| w.claim.owner == claim.owner).map(|w| w.ticket);
        let ahead = if self.has(LineCountsNobody) { 0 } else { ahead as u64 };
        let seen = if self.has(LineSeesNothing) { 0 } else { kept.fence };
        Claimed::queued(ahead, retry_in, seen, ticket.unwrap(), label)
    }
}

impl Store for Toy {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        if self.has(ClaimIsTwoSteps) && self.inspect(&claim.key).await?.is_none() && !claim.not_after.is_zero() {
            yield_now().await;
            return Ok(self.take(self.keys().entry(self.name(&claim.key)).or_default(), &claim.owner, claim.ttl));
        }
        Ok(self.claim_now(claim))
    }

    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        let mut keys = self.keys();
        let Renewal { key, owner, fence, ttl, .. } = renewal;
        let kept = keys.entry(self.name(key)).or_default();
        let Some(holder) = self.holder(kept) else {
            if !self.has(RenewalCreates) {
                return Ok(Renewed::Gone);
            }
            self.take(kept, owner, *ttl);
            return Ok(Renewed::Renewed);
        };
        let ours = holder.owner == *owner || self.has(RenewsForAnybody);
        if !ours || (kept.fence != *fence && !self.has(RenewsUnderAnyFence)) {
            return Ok(Renewed::Taken);
        }
        let until = match self.bug {
            Some(RenewalShortens) => self.end(*ttl),
            Some(RenewalDoesNothing) => holder.until,
            _ => holder.until.max(self.end(*ttl)),
        };
        kept.fence += u64::from(self.has(RenewalGetsAnotherFence));
        kept.holder = Some(Holder { until, ..holder });
        Ok(Renewed::Renewed)
    }

    async fn renew_all(&self, list: &[Renewal]) -> Vec<Result<Renewed, StoreError>> {
        let mut answers = Vec::new();
        for renewal in list {
            answers.push(self.renew(renewal).await);
            if self.has(ListEndsAtTheFirstTrouble) && answers.last() != Some(&Ok(Renewed::Renewed)) {
                break;
            }
        }
        if self.has(ListIsAnsweredBackwards) {
            answers.reverse();
        }
        answers
    }

    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        let mut keys = self.keys();
        let kept = keys.entry(self.name(key)).or_default();
        if !self.has(ReleaseStaysInLine) && !self.has(TakingStaysInLine) {
            kept.line.retain(|w| w.claim.owner != *owner);
        }
        match self.holder(kept) {
            Some(holder) if holder.owner == *owner || self.has(ReleasesForAnybody) => {
                if !self.has(ReleaseDoesNothing) {
                    self.give(kept);
                }
                if self.has(FenceRestartsAfterRelease) {
                    kept.fence = 0;
                }
                Ok(Freed::Released)
            }
            Some(_) if self.has(ReleaseAlwaysSaysReleased) => Ok(Freed::Released),
            Some(_) => Ok(Freed::Gone),
            // Who leaves a line before a free key passes its turn on.
            None => {
                self.give(kept);
                Ok(if self.has(ReleaseAlwaysSaysReleased) { Freed::Released } else { Freed::Gone })
            }
        }
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        let keys = self.keys();
        let Some(kept) = keys.get(&self.name(key)) else { return Ok(None) };
        Ok(self.holder(kept).map(|h| {
            let fence = kept.fence + u64::from(self.has(InspectNamesTheWrongFence));
            let remaining = h.until.saturating_duration_since(Instant::now());
            Holding::new(Some(h.owner.label().clone()), Some(fence), Some(remaining), self.alive(kept).len() as u64)
        }))
    }

    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        let mut keys = self.keys();
        let kept = keys.entry(self.name(key)).or_default();
        if self.has(ForceForgetsTheLine) {
            kept.line.clear();
        }
        let held = self.holder(kept).is_some();
        if held && !self.has(ForceDoesNothing) {
            self.give(kept);
            if self.has(FenceRestartsAfterForce) {
                kept.fence = 0;
            }
        }
        Ok(held || self.has(ForceAlwaysSaysTrue))
    }

    async fn write(&self, write: &FencedWrite) -> Result<Wrote, StoreError> {
        let seen = |values: &HashMap<String, (u64, Vec<u8>)>| values.get(write.key.as_str()).map(|(fence, _)| *fence);
        let before = seen(&self.values.lock().unwrap());
        yield_now().await;
        let mut values = self.values.lock().unwrap();
        let seen = if self.has(WriteIsTwoSteps) { before } else { seen(&values) };
        let fence = if self.has(WriteRoundsFences) { write.fence / 100 * 100 } else { write.fence };
        let stale = seen.filter(|seen| *seen > fence || self.has(WriteRefusesTheSameFence) && *seen == fence);
        match stale.filter(|_| !self.has(WriteIgnoresFences)) {
            Some(_) if self.has(WriteRefusesQuietly) => Ok(Wrote::Written),
            Some(newest) => Ok(Wrote::Stale { newest }),
            None => {
                let mut value = write.value.clone();
                if self.has(WriteCutsAtZero) {
                    value.truncate(value.iter().position(|byte| *byte == 0).unwrap_or(value.len()));
                }
                values.insert(write.key.to_string(), (fence, value));
                Ok(Wrote::Written)
            }
        }
    }

    async fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.values.lock().unwrap().get(key.as_str()).map(|(_, value)| value.clone()))
    }

    fn listen(&self, to: Pushes) {
        self.pushes.lock().unwrap().push(to);
    }
}
