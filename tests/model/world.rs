//! The exchange: a server, three clients, and everything that is on its way between them.
use crate::{
    client::{Client, Phase},
    fault::{Event, Fault},
    judge::{self, Rule},
    server::{Claimed, Lease, Owner, Server},
};
use stateright::{Model, Property};
use std::sync::atomic::{AtomicU32, Ordering};

/// A claim this old is refused (C6).
pub(crate) const LATE: u8 = 2;

/// The age of a claim that its client counts as unanswered no more, though it was not answered.
pub(crate) const FORGOTTEN: u8 = u8::MAX;

/// How far a search goes. Times are in ticks; what there is three of, is for the three clients.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) ttl: [u8; 3],
    pub(crate) presence: [u8; 3],
    /// How many claims and renewals a client may send in one acquisition. Without any claims, it is not there.
    pub(crate) claims: [u8; 3],
    pub(crate) renewals: [u8; 3],
    pub(crate) acquisitions: [u8; 3],
    pub(crate) crashes: bool,
    /// What may happen once, at any time.
    pub(crate) by_hand: &'static [Hand],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hand {
    Force,
    Del,
    FlushAll,
    DelCounter,
}

/// What is searched.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) bounds: Bounds,
    pub(crate) fault: Fault,
    /// What has happened anywhere: kept beside the states, so that it does not multiply them.
    seen: AtomicU32,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct State {
    pub(crate) server: Server,
    pub(crate) clients: [Client; 3],
    /// Each message travels alone: it comes after any time, in any order, or never.
    pub(crate) net: Vec<Message>,
    pub(crate) by_hand: bool,
    /// A lease that was ended by hand, for as long as its TTL would have lasted: its holder cannot know.
    pub(crate) robbed: Option<Lease>,
    /// The rule that the last step broke. No step follows it.
    pub(crate) broken: Option<Rule>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum What {
    Claim,
    Renew,
    Release,
    Held,
    Queued,
    Renewed,
    /// Gone or taken: the answer to a renewal.
    Lost,
    Granted,
    Forced,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Message {
    pub(crate) what: What,
    pub(crate) owner: Owner,
    /// Of a "queued": the one that it saw.
    pub(crate) fence: u8,
    /// Of a request or its answer: since the request was sent.
    pub(crate) age: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    Tick,
    Ask(u8),
    Renew(u8),
    Leave(u8),
    Crash(u8),
    Arrive(Message),
    ByHand(Hand),
}

impl Message {
    pub(crate) fn new(what: What, owner: Owner, fence: u8) -> Message {
        Message { what, owner, fence, age: 0 }
    }
}

impl Exchange {
    pub(crate) fn new(bounds: Bounds, fault: Fault) -> Exchange {
        Exchange { bounds, fault, seen: AtomicU32::new(0) }
    }

    pub(crate) fn ttl(&self, owner: Owner) -> u8 {
        self.bounds.ttl[usize::from(owner.client)]
    }

    pub(crate) fn presence(&self, owner: Owner) -> u8 {
        self.bounds.presence[usize::from(owner.client)]
    }

    /// What is as old as the longest TTL is good for nothing, however much older it gets.
    pub(crate) fn older(&self, age: u8) -> u8 {
        let [a, b, c] = self.bounds.ttl;
        if age == FORGOTTEN { age } else { (age + 1).min(a.max(b).max(c).max(LATE)) }
    }

    fn saw(&self, event: Event, really: bool) {
        let bit = 1 << event as u32;
        if really && self.seen.load(Ordering::Relaxed) & bit == 0 {
            self.seen.fetch_or(bit, Ordering::Relaxed);
        }
    }

    pub(crate) fn seen(&self) -> Vec<Event> {
        let seen = self.seen.load(Ordering::Relaxed);
        Event::ALL.into_iter().filter(|event| seen & 1 << *event as u32 != 0).collect()
    }

    fn step(&self, state: &mut State, action: Action) {
        let State { server, clients, net, .. } = state;
        match action {
            Action::Tick => self.tick(state),
            Action::Ask(client) => clients[usize::from(client)].ask(net),
            Action::Renew(client) => clients[usize::from(client)].renew(net),
            Action::Leave(client) => clients[usize::from(client)].leave(net, self),
            Action::Crash(client) => clients[usize::from(client)].crash(),
            Action::Arrive(message) => {
                if let Some(at) = net.iter().position(|other| *other == message) {
                    net.remove(at);
                }
                match message.what {
                    What::Claim | What::Renew | What::Release => self.serve(server, clients, net, message),
                    _ => self.tell(&mut clients[usize::from(message.owner.client)], net, message),
                }
            }
            Action::ByHand(hand) => {
                state.by_hand = false;
                if hand != Hand::DelCounter {
                    state.robbed = server.k;
                }
                match hand {
                    Hand::Force => {
                        let forced = server.k.map(|k| Message::new(What::Forced, k.owner, k.fence));
                        net.extend(server.force(self.fault).map(granted));
                        net.extend(forced);
                    }
                    Hand::Del => server.k = None,
                    Hand::FlushAll => *server = Server { us: server.us, ..Server::new() },
                    Hand::DelCounter => server.f = 0,
                }
            }
        }
    }

    fn tick(&self, state: &mut State) {
        let State { server, clients, net, robbed, .. } = state;
        for message in &mut *net {
            if !matches!(message.what, What::Release | What::Lost | What::Granted | What::Forced) {
                message.age = self.older(message.age);
            }
        }
        let owned = server.k.is_some();
        server.tick();
        self.saw(Event::Expired, owned && server.k.is_none());
        *robbed = robbed.map(|k| Lease { ttl: k.ttl - 1, ..k }).filter(|k| k.ttl > 0);
        for client in clients {
            self.saw(Event::RanOut, client.tick(net, self));
        }
    }

    /// A request reaches the server.
    fn serve(&self, server: &mut Server, clients: &[Client; 3], net: &mut Vec<Message>, request: Message) {
        let Message { what, owner, fence, age } = request;
        let client = &clients[usize::from(owner.client)];
        let waits = client.owner == owner && client.phase == Phase::Waiting;
        let dead: Vec<Owner> = server.q.iter().filter(|w| w.left == 0 && w.owner != owner).map(|w| w.owner).collect();
        let answer = |what, fence| Message { what, owner, fence, age };
        match what {
            What::Claim => {
                let (owned, stood) = (server.owns(owner), server.in_line(owner));
                let answered = server.claim(owner, self.ttl(owner), self.presence(owner), age >= LATE, self.fault);
                self.saw(Event::GrantFoundByAsking, waits && owned && client.base.is_some());
                self.saw(Event::PlaceRegained, waits && client.base.is_some() && !stood && server.in_line(owner));
                let released = !net.iter().any(|other| other.what == What::Release && other.owner == owner);
                let leaves = client.owner == owner && client.phase == Phase::Leaving && released;
                self.saw(Event::SecondReleaseNeeded, leaves && answered != Claimed::Late && !stood);
                match answered {
                    Claimed::Held { fence } => net.push(answer(What::Held, fence)),
                    Claimed::Queued { seen } => net.push(answer(What::Queued, seen)),
                    // Whoever hears it asks again, as it may anyway.
                    Claimed::Late => self.saw(Event::LateRefused, true),
                }
            }
            What::Renew => {
                let renewed = server.renew(owner, fence, self.ttl(owner), self.fault);
                net.push(answer(if renewed { What::Renewed } else { What::Lost }, fence));
            }
            _ => {
                let free = server.k.is_none();
                let told = server.release(owner, self.fault);
                self.saw(Event::TurnPassedOn, free && told.is_some());
                net.extend(told.map(granted));
            }
        }
        self.saw(Event::DeadDropped, dead.iter().any(|dead| !server.in_line(*dead) && !server.owns(*dead)));
    }

    /// An answer or a word reaches the client that it is for.
    fn tell(&self, client: &mut Client, net: &mut Vec<Message>, word: Message) {
        let Message { what, fence, age, .. } = word;
        match what {
            What::Held => client.held(fence, age, self),
            What::Queued => client.queued(fence, age, net, self),
            What::Renewed => {
                client.renewed(age, self);
                self.saw(Event::Renewed, true);
            }
            What::Lost => {
                client.lost(net, self);
                self.saw(Event::ToldOfLoss, true);
            }
            What::Forced => {
                self.saw(Event::ForceTold, client.phase == Phase::Held);
                client.lost(net, self);
            }
            _ => {
                client.granted(fence, self);
                self.saw(Event::Granted, client.phase == Phase::Held);
                self.saw(Event::PushUseless, client.phase == Phase::Waiting);
            }
        }
    }
}

fn granted(k: Lease) -> Message {
    Message::new(What::Granted, k.owner, k.fence)
}

impl Model for Exchange {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let clients = [0, 1, 2].map(|client| Client::new(client, self));
        let by_hand = !self.bounds.by_hand.is_empty();
        vec![State { server: Server::new(), clients, net: Vec::new(), by_hand, robbed: None, broken: None }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.broken.is_some() {
            return;
        }
        actions.push(Action::Tick);
        for (index, client) in (0..).zip(&state.clients) {
            if matches!(client.phase, Phase::Idle | Phase::Waiting) && client.claims > 0 {
                actions.push(Action::Ask(index));
            }
            if client.phase == Phase::Held && client.renewals > 0 {
                actions.push(Action::Renew(index));
            }
            if matches!(client.phase, Phase::Waiting | Phase::Held) {
                actions.push(Action::Leave(index));
                if self.bounds.crashes {
                    actions.push(Action::Crash(index));
                }
            }
        }
        for (at, message) in state.net.iter().enumerate() {
            if at == 0 || state.net[at - 1] != *message {
                actions.push(Action::Arrive(*message));
            }
        }
        if state.by_hand {
            let matters = |hand: &&Hand| match hand {
                Hand::Force | Hand::Del => state.server.k.is_some(),
                Hand::FlushAll | Hand::DelCounter => state.server.f > 0,
            };
            actions.extend(self.bounds.by_hand.iter().filter(matters).map(|hand| Action::ByHand(*hand)));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        self.step(&mut state, action);
        state.broken = judge::broken(last, action, &state);
        state.settle(self);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Exchange>> {
        judge::properties()
    }
}
