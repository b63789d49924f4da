//! The network between clients and the server: what is on its way, and what becomes of it.
use crate::{
    fate::Fate,
    judge::Judge,
    plan::Odds,
    planted::Planted,
    server::{Reply, Request, Word, micros},
    world::{State, World},
};
use fastrand::Rng;
use leasehold::{
    StoreError,
    store::{Pushes, Renewed},
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep_until},
};

type Answer = oneshot::Sender<Result<Reply, StoreError>>;

enum Event {
    Arrives { message: Message, answer: Option<(Answer, After)> },
    Answers { message: Message, answer: Answer, with: Result<Reply, StoreError> },
    Pushed { net: usize, word: Word },
    Missed { net: usize },
}

#[derive(Clone)]
struct Message {
    net: usize,
    request: Arc<Request>,
    /// True time.
    sent: u64,
}

/// How the answer comes.
#[derive(Clone, Copy)]
struct After {
    delay: Duration,
    broken_link: bool,
}

/// The ways of one client: claims and releases go by the first, renewals by the second.
pub struct Net {
    pub sink: Option<Pushes>,
    /// Nothing goes through any more: its process is gone.
    pub cut: bool,
    /// It stands still until then: what it sends and hears waits.
    pub paused: Instant,
    /// Nothing goes through until then.
    pub parted: Instant,
    /// What is pushed until then is lost.
    pub deaf: Instant,
    links: [Instant; 2],
}

pub struct Wire {
    on_its_way: BTreeMap<(Instant, u64), Event>,
    posted: u64,
    pub nets: Vec<Net>,
    pub down: Instant,
    pub hangs: Instant,
    healed: bool,
}

impl Wire {
    pub fn new() -> Self {
        let now = Instant::now();
        Wire { on_its_way: BTreeMap::new(), posted: 0, nets: Vec::new(), down: now, hangs: now, healed: false }
    }

    pub fn join(&mut self) -> usize {
        let now = Instant::now();
        self.nets.push(Net { sink: None, cut: false, paused: now, parted: now, deaf: now, links: [now; 2] });
        self.nets.len() - 1
    }

    pub fn heal(&mut self) {
        let now = Instant::now();
        self.healed = true;
        // What already waits for a server that hangs goes on in its order.
        self.down = now;
        for net in &mut self.nets {
            (net.paused, net.parted, net.deaf) = (now, now, now);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.on_its_way.is_empty()
    }

    /// The server is gone, and with it everything on its way.
    pub fn drop_all(&mut self, judge: &mut Judge) {
        for event in std::mem::take(&mut self.on_its_way).into_values() {
            if let Event::Arrives { message, .. } | Event::Answers { message, .. } = event {
                judge.went_wrong(&message.request);
            }
        }
    }

    pub fn missed(&mut self, net: usize, at: Instant) {
        self.post(at, Event::Missed { net });
    }

    fn post(&mut self, at: Instant, event: Event) {
        self.posted += 1;
        self.on_its_way.insert((at, self.posted), event);
    }
}

impl World {
    /// Sends a message; nothing may ever come of it.
    pub fn send(&self, net: usize, request: Request) -> oneshot::Receiver<Result<Reply, StoreError>> {
        let (answer, answered) = oneshot::channel();
        let (now, sent) = (Instant::now(), self.now());
        let state = &mut *self.lock();
        let State { dice, wire, judge, .. } = state;
        let odds = if wire.healed { Odds::default() } else { self.plan.odds };
        let slow = |dice: &mut Rng| self.plan.some(dice, 2.0);
        let mut fate = Fate::draw(&odds, self.plan.usual, slow, dice);
        let link = usize::from(matches!(request, Request::Renew(_)));
        let way = &mut wire.nets[net];
        if way.cut || way.parted > now {
            (fate.arrives, fate.again, fate.broken_link) = (false, None, false);
            fate.faulty = Some("fault: cut off");
        }
        let mut at = now.max(way.paused) + fate.way;
        if !fate.alone && fate.arrives {
            if fate.faulty.is_none() && way.links[link] > at + Duration::from_millis(2) {
                fate.faulty = Some("fault: behind a slow request");
            }
            at = at.max(way.links[link]);
            way.links[link] = at;
        }
        judge.sent(sent, &request, fate.faulty.is_some());
        if let Some(fault) = fate.faulty {
            judge.count(fault);
        }
        let owner = request.owner().map_or(0, |owner| judge.number(owner));
        judge.note(sent, || format!("net {net}: {owner} sends {}{}", request.told(), fate.faulty.unwrap_or_default()));
        let message = Message { net, request: Arc::new(request), sent };
        let is_claim = matches!(*message.request, Request::Claim(..));
        let after = After { delay: fate.back, broken_link: fate.broken_link };
        if !fate.arrives || !fate.answers {
            if fate.broken_link {
                let with = Err(StoreError::unavailable("the connection was reset"));
                wire.post(at + fate.back, Event::Answers { message: message.clone(), answer, with });
            }
            if fate.arrives {
                wire.post(at, Event::Arrives { message, answer: None });
            }
        } else if let Some(again) = fate.again {
            // A claim is never answered before it has been carried out for the last time: what was answered is over.
            let (first, second) = if is_claim { (None, Some((answer, after))) } else { (Some((answer, after)), None) };
            wire.post(at, Event::Arrives { message: message.clone(), answer: first });
            wire.post(at + again, Event::Arrives { message, answer: second });
        } else {
            wire.post(at, Event::Arrives { message, answer: Some((answer, after)) });
        }
        self.posted.notify_one();
        answered
    }

    /// Carries everything where it goes, for as long as the run lasts.
    pub async fn carry(self: Arc<Self>) {
        loop {
            let next = self.lock().wire.on_its_way.first_key_value().map(|((at, _), _)| *at);
            match next {
                Some(at) if at <= Instant::now() => self.carry_one(),
                Some(at) => tokio::select! {
                    biased;
                    () = self.posted.notified() => {}
                    () = sleep_until(at) => {}
                },
                None => self.posted.notified().await,
            }
        }
    }

    fn carry_one(&self) {
        let (now, true_time) = (Instant::now(), self.now());
        let state = &mut *self.lock();
        let Some((_, event)) = state.wire.on_its_way.pop_first() else { return };
        match event {
            Event::Arrives { message, answer } => {
                if state.wire.down > now {
                    state.judge.went_wrong(&message.request);
                    return state.judge.count("fault: server down");
                }
                if state.wire.hangs > now {
                    let at = state.wire.hangs;
                    return state.wire.post(at, Event::Arrives { message, answer });
                }
                let early = match &answer {
                    Some((_, after)) if self.plan.planted == Some(Planted::CountsFromReply) => {
                        true_time - message.sent + micros(after.delay)
                    }
                    _ => 0,
                };
                let reply = self.carry_out(state, &message, early, now, true_time);
                if let Some((answer, After { delay, broken_link: false })) = answer {
                    state.wire.post(now + delay, Event::Answers { message, answer, with: Ok(reply) });
                }
            }
            Event::Answers { message, answer, with } => {
                let net = &state.wire.nets[message.net];
                if net.cut || net.parted > now {
                    return;
                }
                if net.paused > now {
                    let at = net.paused;
                    return state.wire.post(at, Event::Answers { message, answer, with });
                }
                if answer.is_closed() {
                    return;
                }
                let owner = message.request.owner().map_or(0, |owner| state.judge.number(owner));
                state.judge.note(true_time, || format!("net {}: {owner} hears {with:?}", message.net));
                if let Ok(reply) = &with {
                    state.judge.delivered(true_time, message.sent, &message.request, reply);
                }
                // It was open a moment ago, and nothing runs between.
                let _ = answer.send(with);
            }
            Event::Pushed { net, word } => {
                let way = &state.wire.nets[net];
                if way.cut || way.parted > now || way.deaf > now {
                    return state.judge.count("fault: push lost");
                }
                if way.paused > now {
                    let at = way.paused;
                    return state.wire.post(at, Event::Pushed { net, word });
                }
                let Some(sink) = way.sink.clone() else { return };
                let since = state.judge.counts_from(word.owner());
                state.judge.note(true_time, || format!("net {net} is told {}", word.told()));
                let heard = match word {
                    Word::Forced { key, fence, .. } => sink.forced(&key, fence),
                    Word::Granted { owner, fence, mut length } => {
                        if self.plan.planted == Some(Planted::DatesGrantFromPush) {
                            length += Duration::from_micros(true_time - since.unwrap_or(true_time));
                        }
                        sink.granted(&owner.secret(), fence, length)
                    }
                };
                let _ = heard;
            }
            Event::Missed { net } => {
                if let Some(sink) = state.wire.nets[net].sink.clone() {
                    let _ = sink.missed();
                }
            }
        }
    }

    fn carry_out(&self, state: &mut State, message: &Message, early: u64, now: Instant, true_time: u64) -> Reply {
        let State { dice, server, wall, wire, judge } = state;
        let wall = wall.at(true_time);
        let request = &*message.request;
        let renewed = match request {
            Request::Renew(list) => list.as_slice(),
            _ => &[],
        };
        let one = match request {
            Request::Claim(claim, _) => Some(&claim.key),
            Request::Release(key, _) | Request::Force(key) => Some(key),
            _ => None,
        };
        let keys: Vec<_> = one.into_iter().chain(renewed.iter().map(|renewal| &renewal.key)).cloned().collect();
        let before: Vec<_> = keys.iter().map(|key| server.last_holder(key).cloned()).collect();
        judge.before(wall, request);
        let mut words = Vec::new();
        let reply = server.step(wall, request, early, &mut words);
        let owner = request.owner().map_or(0, |owner| judge.number(owner));
        judge.note(true_time, || format!("server: {owner}: {}-> {reply:?}", request.told()));
        if let Request::Write(write) = request {
            judge.wrote(true_time, &write.key.as_str()["value:".len()..].into(), write.fence, &reply);
        }
        if let (Request::Renew(list), Reply::Renewed(answers)) = (request, &reply) {
            for (renewal, _) in list.iter().zip(answers).filter(|(_, a)| **a == Renewed::Renewed) {
                let holder = server.holder(&renewal.key, wall);
                let owns = holder.is_some_and(|held| held.owner == renewal.owner && held.fence == renewal.fence);
                judge.renewed(&renewal.key, renewal.fence, owns);
            }
        }
        for word in &words {
            if let Word::Forced { key, fence, .. } = word {
                judge.forced(key, *fence);
            }
        }
        for (key, before) in keys.into_iter().zip(before) {
            let after = server.last_holder(&key);
            if before.as_ref().map(|b| (b.fence, &b.owner)) == after.map(|a| (a.fence, &a.owner)) {
                continue;
            }
            if let Some(before) = before.filter(|before| before.until <= wall) {
                judge.expired(true_time.saturating_sub(wall - before.until), &key, before.fence);
            }
            let Some(after) = after else { continue };
            let length = Duration::from_micros(after.until - wall);
            let id = judge.acquired(true_time, wall, (key, after.fence, after.owner.clone()), length);
            if let Some(word @ Word::Granted { .. }) = words.iter().find(|word| word.owner() == &after.owner) {
                judge.granted(true_time, wall, id, word);
            }
        }
        for word in words {
            let net: usize = word.owner().label().parse().unwrap();
            let mut roll = dice.u32(0..1000);
            let odds = if wire.healed { Odds::default() } else { self.plan.odds };
            let usual = Duration::from_millis(dice.u64(0..=self.plan.usual));
            if roll < odds.lose_push {
                judge.count("fault: push lost");
                continue;
            }
            roll -= odds.lose_push;
            if roll < odds.slow_push {
                judge.count("fault: push slow");
                wire.post(now + self.plan.some(dice, 2.0), Event::Pushed { net, word });
                continue;
            }
            if roll < odds.slow_push + odds.push_twice {
                judge.count("fault: push twice");
                wire.post(now + self.plan.some(dice, 2.0), Event::Pushed { net, word: word.clone() });
            }
            wire.post(now + usual, Event::Pushed { net, word });
        }
        if judge.violation.is_some() {
            self.failed.notify_one();
        }
        reply
    }
}
