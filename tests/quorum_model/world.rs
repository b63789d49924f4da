//! The quorum: three members, two clients, and everything that is on its way between them.
use crate::{
    client::{Client, Phase},
    fault::{Event, Fault},
    form,
    judge::{self, Rule},
    member::{Fence, Kept, Lease, Member, NO_FENCE, Owner, Proposed},
};
use stateright::{Model, Property};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) const MEMBERS: usize = 3;
pub(crate) const MAJORITY: usize = 2;

/// A request this old takes nothing any more.
pub(crate) const LATE: u8 = 1;

/// How far a search goes. Times are in ticks; what there is two of, is for the two clients.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    pub(crate) ttl: u8,
    /// It begins with a lease of the first client's, which stands at a majority and not everywhere.
    pub(crate) held: bool,
    /// How many attempts a client may make, and how many renewals it may send in all of them.
    pub(crate) attempts: [u8; 2],
    pub(crate) renewals: [u8; 2],
    /// What the members' clocks show when the slowest shows nothing, and by how much they move in a tick.
    pub(crate) clocks: [Fence; MEMBERS],
    pub(crate) pace: Fence,
    /// How often a member may come back without its data.
    pub(crate) restarts: u8,
    pub(crate) quarantine: u8,
    /// At so many members somebody ends by force what he finds: once, at each at any time or never.
    pub(crate) force: usize,
}

/// What is searched.
#[derive(Debug)]
pub(crate) struct Quorum {
    pub(crate) bounds: Bounds,
    pub(crate) fault: Fault,
    /// What has happened anywhere: kept beside the states, so that it does not multiply them.
    seen: AtomicU32,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct State {
    pub(crate) clients: [Client; 2],
    /// In order, for no member has a name.
    pub(crate) sites: [Site; MEMBERS],
    pub(crate) restarts: u8,
    /// The largest fence that was handed out.
    pub(crate) told: Fence,
    /// The rules that the last step broke.
    pub(crate) broken: Vec<Rule>,
}

/// A member, and what lies between it and the clients.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Site {
    pub(crate) member: Member,
    /// What it has answered each client. The client may look at it at any later time, or never.
    pub(crate) answers: [Answer; 2],
    /// Each request travels alone: it comes after any time, in any order, or never.
    pub(crate) coming: Vec<Request>,
    pub(crate) by_force: bool,
    /// A lease that was ended by force, for as long as its TTL would have lasted: its holder cannot know.
    pub(crate) robbed: Option<Lease>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Answer {
    None,
    Proposed(Fence),
    Kept,
    /// Gone or taken.
    Refused,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Request {
    pub(crate) what: What,
    pub(crate) owner: Owner,
    /// Since it was sent, as far as that matters. Of a release: how long it is kept back.
    pub(crate) age: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum What {
    Propose,
    /// Creates what is missing, but for the first of an attempt.
    Hold {
        fence: Fence,
        round: u8,
    },
    Release,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    Tick,
    Ask(u8),
    Decide(u8, Fence),
    HandOut(u8),
    Renew(u8),
    Renewed(u8),
    Lose(u8),
    Leave(u8),
    /// The first is the place of the member in the state that it comes from.
    Arrive(usize, Request),
    Restart(usize),
    Force(usize),
}

impl Request {
    /// It can make a key its owner's.
    pub(crate) fn takes(&self) -> bool {
        matches!(self.what, What::Propose | What::Hold { round: 1.., .. })
    }

    /// It still may.
    pub(crate) fn runs(&self, fault: Fault) -> bool {
        self.takes() && (self.age < LATE || fault == Fault::LateRequestRuns)
    }
}

impl Answer {
    pub(crate) fn proposed(self) -> Option<Fence> {
        match self {
            Answer::Proposed(fence) => Some(fence),
            _ => None,
        }
    }
}

impl Quorum {
    pub(crate) fn new(bounds: Bounds, fault: Fault) -> Quorum {
        Quorum { bounds, fault, seen: AtomicU32::new(0) }
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
        let State { clients, sites, told, .. } = state;
        match action {
            Action::Tick => self.tick(state),
            Action::Ask(client) => clients[usize::from(client)].ask(sites),
            Action::Decide(client, fence) => clients[usize::from(client)].decide(fence, sites, self),
            Action::HandOut(client) => clients[usize::from(client)].hand_out(sites, self),
            Action::Renew(client) => clients[usize::from(client)].renew(*told, sites),
            Action::Renewed(client) => clients[usize::from(client)].renewed(sites, self),
            Action::Lose(client) | Action::Leave(client) => clients[usize::from(client)].leave(sites, self),
            Action::Arrive(at, request) => {
                let site = &mut sites[at];
                site.coming.retain(|other| *other != request);
                self.serve(site, clients, request);
            }
            Action::Restart(at) => {
                state.restarts -= 1;
                sites[at].member.restart(self.bounds.quarantine);
            }
            Action::Force(at) => {
                let site = &mut sites[at];
                site.by_force = false;
                site.robbed = site.member.force();
                for client in clients.iter_mut().filter(|client| client.phase != Phase::Held) {
                    client.forced |= site.robbed.is_some_and(|k| k.owner == client.owner);
                }
            }
        }
        self.saw(Event::HandedOut, matches!(action, Action::HandOut(_)));
        self.saw(Event::Renewed, matches!(action, Action::Renewed(_)));
        self.saw(Event::ToldOfLoss, matches!(action, Action::Lose(_)));
    }

    fn tick(&self, state: &mut State) {
        let State { clients, sites, told, .. } = state;
        for site in &mut *sites {
            let owned = site.member.k.is_some();
            site.member.tick();
            self.saw(Event::Expired, owned && site.member.k.is_none());
            site.robbed = site.robbed.map(|k| Lease { ttl: k.ttl - 1, ..k }).filter(|k| k.ttl > 0);
            for request in &mut site.coming {
                match request.what {
                    What::Release => request.age = request.age.saturating_sub(1),
                    _ if request.takes() => request.age = (request.age + 1).min(LATE),
                    _ => {}
                }
            }
        }
        for client in clients.iter_mut() {
            self.saw(Event::RanOut, client.tick(sites, self));
        }
        if self.bounds.pace > 0 {
            form::fences(clients, sites, told).for_each(|fence| *fence -= self.bounds.pace);
        }
    }

    /// A request reaches a member.
    fn serve(&self, site: &mut Site, clients: &[Client; 2], request: Request) {
        let Request { what, owner, age } = request;
        let client = &clients[usize::from(owner.client)];
        let phase = if client.owner == owner { client.phase } else { Phase::Gone };
        let (ttl, late, had) = (self.bounds.ttl, age >= LATE, site.member.owns(owner));
        let overtaken = |fence| site.member.f > fence;
        let answer = match what {
            What::Propose => {
                let proposed = site.member.propose(owner, ttl, late, self.fault);
                self.saw(Event::Busy, proposed == Proposed::Busy);
                self.saw(Event::YoungRefused, proposed == Proposed::Young);
                match proposed {
                    Proposed::Held { fence } if phase == Phase::Proposing => Some(Answer::Proposed(fence)),
                    Proposed::Held { .. } => {
                        self.saw(Event::ProposalUseless, true);
                        None
                    }
                    _ => None,
                }
            }
            What::Hold { fence, round } => {
                self.saw(Event::Overtaken, overtaken(fence));
                let lease = Lease { owner, fence, ttl };
                let kept = site.member.hold(lease, round > 0, late, self.fault);
                self.saw(Event::WriteBackRefused, round == 0 && kept == Kept::Taken);
                self.saw(Event::PutBack, phase == Phase::Held && !had && kept == Kept::Ours);
                let awaited = round == client.round && (phase == Phase::Confirming || client.renewing);
                let answer = match kept {
                    Kept::Ours => Some(Answer::Kept),
                    Kept::Gone | Kept::Taken if round > 0 => Some(Answer::Refused),
                    _ => None,
                };
                answer.filter(|_| awaited && matches!(phase, Phase::Confirming | Phase::Held))
            }
            What::Release => {
                site.member.release(owner, self.fault);
                None
            }
        };
        let kept_back = site.coming.iter().any(|it| it.what == What::Release && it.owner == owner);
        let only_kept_back = kept_back && !site.coming.contains(&Request { what: What::Release, owner, age: 0 });
        self.saw(Event::SecondReleaseNeeded, !had && site.member.owns(owner) && only_kept_back);
        if let Some(answer) = answer {
            site.answers[usize::from(owner.client)] = answer;
        }
    }
}

impl Model for Quorum {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let site = |clock| Site {
            member: Member::new(clock),
            answers: [Answer::None; 2],
            coming: Vec::new(),
            by_force: false,
            robbed: None,
        };
        let clients = [0, 1].map(|client| Client::new(client, self));
        let sites = self.bounds.clocks.map(site);
        let mut state = State { clients, sites, restarts: self.bounds.restarts, told: NO_FENCE, broken: Vec::new() };
        for site in &mut state.sites[..self.bounds.force] {
            site.by_force = true;
        }
        if self.bounds.held {
            let fence = self.bounds.clocks[0];
            let client = Client::holding(0, fence, self);
            for site in &mut state.sites[..MAJORITY] {
                site.member.k = Some(Lease { owner: client.owner, fence, ttl: self.bounds.ttl });
                site.member.f = fence;
            }
            (state.clients[0], state.told) = (client, fence);
        }
        state.settle(self);
        vec![state]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let State { clients, sites, .. } = state;
        // What is left then is judged as it lies: see `nothing left`.
        if clients.iter().all(|client| client.phase == Phase::Gone) {
            return;
        }
        actions.push(Action::Tick);
        for (index, client) in (0..).zip(clients) {
            match client.phase {
                Phase::Idle => actions.push(Action::Ask(index)),
                Phase::Proposing => {
                    let choices = client.choices(sites, self).into_iter();
                    actions.extend(choices.map(|fence| Action::Decide(index, fence)));
                }
                Phase::Confirming if client.is_kept(sites, self) => actions.push(Action::HandOut(index)),
                Phase::Held => {
                    if client.renewals > 0 {
                        actions.push(Action::Renew(index));
                    }
                    if client.renewing && client.is_kept(sites, self) {
                        actions.push(Action::Renewed(index));
                    }
                    if client.is_lost(sites, self) {
                        actions.push(Action::Lose(index));
                    }
                }
                _ => {}
            }
            if matches!(client.phase, Phase::Proposing | Phase::Confirming | Phase::Held) {
                actions.push(Action::Leave(index));
            }
        }
        for (at, site) in sites.iter().enumerate() {
            let comes = |request: &&Request| request.what != What::Release || request.age == 0;
            actions.extend(site.coming.iter().filter(comes).map(|request| Action::Arrive(at, *request)));
            // At most a minority may have forgotten something at one time.
            let others_remember = sites.iter().enumerate().all(|(other, site)| other == at || site.member.young == 0);
            if state.restarts > 0 && others_remember {
                actions.push(Action::Restart(at));
            }
            if site.by_force && site.member.k.is_some() {
                actions.push(Action::Force(at));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        self.step(&mut state, action);
        state.broken = judge::broken(last, action, &state, self);
        for client in state.clients.iter().filter(|client| client.phase == Phase::Held) {
            state.told = state.told.max(client.fence);
        }
        self.saw(Event::Everywhere, judge::stands_everywhere(&state));
        state.settle(self);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Quorum>> {
        judge::properties()
    }
}
