//! A client: what `src/pursuit.rs`, `src/pursuit/place.rs` and `src/tenure` make of answers, words and time.
use crate::{
    fault::Fault,
    server::Owner,
    world::{Exchange, FORGOTTEN, LATE, Message, What},
};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Phase {
    Idle,
    /// A pursuit.
    Waiting,
    /// A tenure. It ends when `valid` does.
    Held,
    /// Released, and the second release is still to come.
    Leaving,
    Gone,
    Crashed,
}

/// Times are in ticks, ago or to come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Client {
    pub(crate) phase: Phase,
    /// How many more it may begin; how many claims and renewals it may yet send in this one.
    acquisitions: u8,
    pub(crate) claims: u8,
    pub(crate) renewals: u8,
    /// When the first claim was sent.
    first: u8,
    /// When the claim was sent that was sent last of those that were answered "queued".
    pub(crate) base: Option<u8>,
    /// An ownership under this fence or a smaller one is known to have ended.
    pub(crate) over: u8,
    /// Claims that were not answered: how many of each age. The last are too late to be carried out now.
    unanswered: [u8; LATE as usize + 1],
    pub(crate) fence: u8,
    pub(crate) valid: u8,
    /// Until a claim that was unanswered when the wait ended cannot be carried out any more. `None`: there was none.
    echo: Option<u8>,
    pub(crate) owner: Owner,
}

impl Client {
    pub(crate) fn new(client: u8, x: &Exchange) -> Client {
        let owner = Owner { client, turn: 0 };
        match x.bounds.claims[usize::from(client)] {
            0 => Client::blank(owner, 0),
            _ => Client::idle(owner, x.bounds.acquisitions[usize::from(client)] - 1, x),
        }
    }

    fn blank(owner: Owner, acquisitions: u8) -> Client {
        let unanswered = [0; LATE as usize + 1];
        let (phase, base, echo) = (Phase::Gone, None, None);
        Client {
            phase,
            acquisitions,
            claims: 0,
            renewals: 0,
            first: 0,
            base,
            over: 0,
            unanswered,
            fence: 0,
            valid: 0,
            echo,
            owner,
        }
    }

    fn idle(owner: Owner, acquisitions: u8, x: &Exchange) -> Client {
        let this = usize::from(owner.client);
        let (claims, renewals) = (x.bounds.claims[this], x.bounds.renewals[this]);
        Client { phase: Phase::Idle, claims, renewals, ..Client::blank(owner, acquisitions) }
    }

    /// The first claim, or one more, whether or not the last was answered (C9).
    pub(crate) fn ask(&mut self, net: &mut Vec<Message>) {
        self.phase = Phase::Waiting;
        self.claims -= 1;
        // What is too late to be carried out now, and was not answered, is forgotten.
        self.unanswered[usize::from(LATE)] = 0;
        for message in net.iter_mut().filter(|message| message.owner == self.owner && message.age >= LATE) {
            message.age = FORGOTTEN;
        }
        self.unanswered[0] += 1;
        net.push(Message::new(What::Claim, self.owner, 0));
    }

    /// C1: it counts from when its claim was sent. Once there is a tenure, nobody hears the answers to claims (C3).
    pub(crate) fn held(&mut self, fence: u8, age: u8, x: &Exchange) {
        if self.phase == Phase::Waiting {
            self.answered(age);
            let sent = if x.fault == Fault::DeadlineFromTheReply { 0 } else { age };
            let ended = fence <= self.over && x.fault != Fault::EndedOwnershipKept;
            self.keep(fence, x.ttl(self.owner).saturating_sub(sent), ended);
            if self.phase == Phase::Waiting {
                // The library believes a claim that was asked since, whatever its fence: here no fence ever shrinks.
                self.over = self.over.max(fence - 1);
            }
        }
    }

    pub(crate) fn queued(&mut self, seen: u8, age: u8, net: &mut Vec<Message>, x: &Exchange) {
        if self.phase == Phase::Waiting {
            self.answered(age);
            self.base = Some(self.base.map_or(age, |sent| sent.min(age)));
            self.over = self.over.max(seen);
        } else if self.phase == Phase::Held && x.fault == Fault::QueuedWhileHeldIsLoss {
            self.leave(net, x);
        }
    }

    /// C2: a grant counts from before it can have been made, never from when word of it came. Nobody else hears it (C8).
    pub(crate) fn granted(&mut self, fence: u8, x: &Exchange) {
        if self.phase == Phase::Waiting {
            let sent = match x.fault {
                Fault::GrantFromThePush => 0,
                _ => self.base.map_or(self.first, |sent| sent.min(self.first)),
            };
            let ended = fence <= self.over && x.fault != Fault::GrantFromAnAnswerThatHadSeenIt;
            self.keep(fence, x.presence(self.owner).saturating_sub(sent), ended);
        }
    }

    /// Unless it has ended, or would before it began: then it goes on asking.
    fn keep(&mut self, fence: u8, valid: u8, ended: bool) {
        if valid > 0 && !ended {
            let (phase, echo, renewals) = (Phase::Held, self.unanswered_until(), self.renewals);
            *self = Client { phase, renewals, fence, valid, echo, ..Client::blank(self.owner, self.acquisitions) };
        }
    }

    pub(crate) fn renew(&mut self, net: &mut Vec<Message>) {
        self.renewals -= 1;
        net.push(Message::new(What::Renew, self.owner, self.fence));
    }

    /// C3: never back, and nothing that has run out comes back.
    pub(crate) fn renewed(&mut self, age: u8, x: &Exchange) {
        if self.phase == Phase::Held {
            let sent = if x.fault == Fault::DeadlineFromTheReply { 0 } else { age };
            self.valid = self.valid.max(x.ttl(self.owner).saturating_sub(sent));
        }
    }

    /// The server said that it is gone, taken or forced: there is nothing to release, unless a claim was left unanswered.
    pub(crate) fn lost(&mut self, net: &mut Vec<Message>, x: &Exchange) {
        if self.phase == Phase::Held {
            if self.echo.is_some() { self.leave(net, x) } else { self.end(x) }
        }
    }

    /// C7: released at once, and again when a claim left unanswered cannot be carried out any more.
    pub(crate) fn leave(&mut self, net: &mut Vec<Message>, x: &Exchange) {
        if self.phase == Phase::Waiting {
            self.echo = self.unanswered_until();
        }
        net.push(Message::new(What::Release, self.owner, 0));
        match self.echo {
            Some(1..) if x.fault != Fault::NoSecondRelease => {
                let (phase, echo) = (Phase::Leaving, self.echo);
                *self = Client { phase, echo, ..Client::blank(self.owner, self.acquisitions) };
            }
            _ => self.end(x),
        }
    }

    /// What comes next has an owner of its own (C7).
    fn end(&mut self, x: &Exchange) {
        let turn = self.owner.turn + u8::from(x.fault != Fault::OwnerUsedAgain);
        *self = match self.acquisitions {
            0 => Client::blank(self.owner, 0),
            more => Client::idle(Owner { turn, ..self.owner }, more - 1, x),
        };
    }

    pub(crate) fn crash(&mut self) {
        *self = Client { phase: Phase::Crashed, ..Client::blank(self.owner, 0) };
    }

    /// Whether it ran out.
    pub(crate) fn tick(&mut self, net: &mut Vec<Message>, x: &Exchange) -> bool {
        self.echo = self.echo.map(|echo| echo.saturating_sub(1));
        match self.phase {
            Phase::Waiting => {
                self.first = x.older(self.first);
                self.base = self.base.map(|sent| x.older(sent));
                let late = self.unanswered[usize::from(LATE)];
                self.unanswered.rotate_right(1);
                self.unanswered[0] = 0;
                self.unanswered[usize::from(LATE)] += late;
            }
            Phase::Held => {
                self.valid -= 1;
                if self.valid == 0 {
                    self.leave(net, x);
                    return true;
                }
            }
            Phase::Leaving if self.echo == Some(0) => {
                net.push(Message::new(What::Release, self.owner, 0));
                self.end(x);
            }
            _ => {}
        }
        false
    }

    /// One of the claims of that age is answered.
    fn answered(&mut self, age: u8) {
        if age != FORGOTTEN {
            self.unanswered[usize::from(age.min(LATE))] -= 1;
        }
    }

    fn unanswered_until(&self) -> Option<u8> {
        (0..=LATE).find(|age| self.unanswered[usize::from(*age)] > 0).map(|age| LATE - age)
    }
}
