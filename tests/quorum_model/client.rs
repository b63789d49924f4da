//! A client: what `src/store/quorum` makes of the members' answers, and of time.
use crate::{
    fault::Fault,
    member::{Fence, Owner},
    world::{Answer, LATE, MAJORITY, MEMBERS, Quorum, Request, Site, What},
};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Phase {
    Idle,
    /// The members are asked for the key.
    Proposing,
    /// The fence is being written back.
    Confirming,
    /// The lease was handed out. It ends when `valid` does.
    Held,
    Gone,
}

/// Times are in ticks, ago or to come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Client {
    pub(crate) phase: Phase,
    /// How many more it may begin, and how many renewals it may yet send.
    attempts: u8,
    pub(crate) renewals: u8,
    /// Since the first proposal was sent, or the renewal that is under way.
    age: u8,
    pub(crate) fence: Fence,
    valid: u8,
    /// The holds that were sent last: 0 is the write-back, then come renewals.
    pub(crate) round: u8,
    /// The last round is a renewal whose answers are still awaited.
    pub(crate) renewing: bool,
    /// A larger fence had been handed out when it began.
    pub(crate) overtaken: bool,
    /// A key of this attempt was ended by force before it was handed out.
    pub(crate) forced: bool,
    pub(crate) owner: Owner,
}

impl Client {
    pub(crate) fn new(client: u8, x: &Quorum) -> Client {
        let this = usize::from(client);
        let (attempts, renewals) = (x.bounds.attempts[this], x.bounds.renewals[this]);
        Client::blank(Owner { client, attempt: 0 }, attempts, renewals)
    }

    /// Its first attempt has won.
    pub(crate) fn holding(client: u8, fence: Fence, x: &Quorum) -> Client {
        let idle = Client::new(client, x);
        Client { phase: Phase::Held, attempts: idle.attempts - 1, fence, valid: x.bounds.ttl, ..idle }
    }

    fn blank(owner: Owner, attempts: u8, renewals: u8) -> Client {
        Client {
            phase: if attempts > 0 { Phase::Idle } else { Phase::Gone },
            attempts,
            renewals: if attempts > 0 { renewals } else { 0 },
            age: 0,
            fence: 0,
            valid: 0,
            round: 0,
            renewing: false,
            overtaken: false,
            forced: false,
            owner,
        }
    }

    /// All members at once.
    pub(crate) fn ask(&mut self, sites: &mut [Site; MEMBERS]) {
        self.phase = Phase::Proposing;
        self.attempts -= 1;
        self.send(What::Propose, 0, sites);
    }

    /// The fences that it can go on with: the largest of each majority that has given it the key.
    pub(crate) fn choices(&self, sites: &[Site; MEMBERS], x: &Quorum) -> Vec<Fence> {
        let mut fences: Vec<_> = sites.iter().filter_map(|site| self.answer(site).proposed()).collect();
        fences.sort_unstable();
        let mut choices = fences.split_off(fences.len().min(needed(x) - 1));
        choices.dedup();
        choices
    }

    /// The largest proposal of a majority is written back.
    pub(crate) fn decide(&mut self, fence: Fence, sites: &mut [Site; MEMBERS], x: &Quorum) {
        self.phase = Phase::Confirming;
        self.fence = fence;
        self.forget_answers(sites);
        if x.fault == Fault::NoWriteBack {
            return self.hand_out(sites, x);
        }
        self.send(What::Hold { fence, round: 0 }, 0, sites);
        if x.fault == Fault::WriteBackNotAwaited {
            self.hand_out(sites, x);
        }
    }

    /// It counts from before the first proposal was sent.
    pub(crate) fn hand_out(&mut self, sites: &mut [Site; MEMBERS], x: &Quorum) {
        let sent = if x.fault == Fault::DeadlineFromTheAnswers { 0 } else { self.age };
        self.phase = Phase::Held;
        self.valid = x.bounds.ttl - sent;
        self.age = 0;
        self.forget_answers(sites);
    }

    pub(crate) fn renew(&mut self, told: Fence, sites: &mut [Site; MEMBERS]) {
        self.renewals -= 1;
        self.round += 1;
        (self.renewing, self.age, self.overtaken) = (true, 0, self.fence < told);
        self.forget_answers(sites);
        self.send(What::Hold { fence: self.fence, round: self.round }, 0, sites);
    }

    /// A majority has agreed to the last round.
    pub(crate) fn is_kept(&self, sites: &[Site; MEMBERS], x: &Quorum) -> bool {
        sites.iter().filter(|site| self.answer(site) == Answer::Kept).count() >= needed(x)
    }

    /// So many have refused the renewal that no majority can agree.
    pub(crate) fn is_lost(&self, sites: &[Site; MEMBERS], x: &Quorum) -> bool {
        let refused = sites.iter().filter(|site| self.answer(site) == Answer::Refused).count();
        let allowed = if x.fault == Fault::OneRefusalIsLoss { 0 } else { MEMBERS - MAJORITY };
        self.renewing && refused > allowed
    }

    /// From when it was sent; never back.
    pub(crate) fn renewed(&mut self, sites: &mut [Site; MEMBERS], x: &Quorum) {
        let sent = if x.fault == Fault::DeadlineFromTheAnswers { 0 } else { self.age };
        self.valid = self.valid.max(x.bounds.ttl.saturating_sub(sent));
        (self.renewing, self.age, self.overtaken) = (false, 0, false);
        self.forget_answers(sites);
    }

    /// Everything is released at once, and again when what is on its way can take nothing any more.
    pub(crate) fn leave(&mut self, sites: &mut [Site; MEMBERS], x: &Quorum) {
        self.send(What::Release, 0, sites);
        for site in &mut *sites {
            let youngest = site.coming.iter().filter(|it| it.owner == self.owner && it.takes()).map(|it| it.age).min();
            if let Some(age) = youngest.filter(|age| *age < LATE && x.fault != Fault::NoSecondRelease) {
                site.coming.push(Request { what: What::Release, owner: self.owner, age: LATE - age });
            }
        }
        self.forget_answers(sites);
        let attempt = self.owner.attempt + u8::from(x.fault != Fault::OwnerUsedAgain && self.attempts > 0);
        *self = Client::blank(Owner { attempt, ..self.owner }, self.attempts, self.renewals);
    }

    /// Whether a lease ran out.
    pub(crate) fn tick(&mut self, sites: &mut [Site; MEMBERS], x: &Quorum) -> bool {
        match self.phase {
            Phase::Proposing | Phase::Confirming => {
                self.age += 1;
                if self.age >= x.bounds.ttl {
                    self.leave(sites, x);
                }
            }
            Phase::Held => {
                if self.renewing {
                    self.age = (self.age + 1).min(x.bounds.ttl);
                }
                self.valid -= 1;
                if self.valid == 0 {
                    self.leave(sites, x);
                    return true;
                }
            }
            _ => {}
        }
        false
    }

    fn answer(&self, site: &Site) -> Answer {
        site.answers[usize::from(self.owner.client)]
    }

    fn forget_answers(&self, sites: &mut [Site; MEMBERS]) {
        for site in sites {
            site.answers[usize::from(self.owner.client)] = Answer::None;
        }
    }

    fn send(&self, what: What, age: u8, sites: &mut [Site; MEMBERS]) {
        for site in sites {
            site.coming.push(Request { what, owner: self.owner, age });
        }
    }
}

/// Whether or not the others have answered.
fn needed(x: &Quorum) -> usize {
    if x.fault == Fault::MajorityOfTheAnswers { 1 } else { MAJORITY }
}
