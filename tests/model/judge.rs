//! What must hold, in every state that can be reached.
use crate::{
    client::{Client, Phase},
    server::{Claimed, Owner},
    world::{Action, Exchange, Hand, State, What},
};
use stateright::Property;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Rule {
    /// A client that believes is the server's owner under that fence. So no two believe.
    Exclusion,
    /// Each acquisition has a larger fence than all before it.
    FencesGrow,
    /// Who holds the key stands in no line.
    OneRole,
    /// Whoever leaves never leaves a free key beside somebody who waits for it.
    NoLostWakeUp,
    /// A client gives up no lease that it has.
    NoFalseLoss,
    /// Once an owner has ended, other than by a crash, and its releases have arrived, the server has nothing of it.
    NothingLeft,
}

/// The first rule, if any, that the step from `before` to `after` broke.
pub(crate) fn broken(before: &State, action: Action, after: &State) -> Option<Rule> {
    [
        (Rule::Exclusion, exclusion(after)),
        (Rule::FencesGrow, fences_grow(before, after)),
        (Rule::OneRole, one_role(after)),
        (Rule::NoLostWakeUp, no_lost_wake_up(action, after)),
        (Rule::NoFalseLoss, no_false_loss(before, action, after)),
        (Rule::NothingLeft, nothing_left(after)),
    ]
    .into_iter()
    .find_map(|(rule, holds)| (!holds).then_some(rule))
}

pub(crate) fn properties() -> Vec<Property<Exchange>> {
    vec![
        Property::always("mutual exclusion", |_, state: &State| state.broken != Some(Rule::Exclusion)),
        Property::always("fences grow", |_, state: &State| state.broken != Some(Rule::FencesGrow)),
        Property::always("no owner in line", |_, state: &State| state.broken != Some(Rule::OneRole)),
        Property::always("no lost wake-up", |_, state: &State| state.broken != Some(Rule::NoLostWakeUp)),
        Property::always("no false loss", |_, state: &State| state.broken != Some(Rule::NoFalseLoss)),
        Property::always("nothing left", |_, state: &State| state.broken != Some(Rule::NothingLeft)),
        Property::always("no dead end", |x, state: &State| state.broken.is_some() || no_dead_end(state, x)),
    ]
}

/// But for the holder of a lease that was ended by hand, until its TTL would have ended.
fn exclusion(state: &State) -> bool {
    let believers = state.clients.iter().filter(|client| client.phase == Phase::Held);
    believers.into_iter().all(|client| {
        [state.server.k, state.robbed].into_iter().flatten().any(|k| k.owner == client.owner && k.fence == client.fence)
    })
}

fn fences_grow(before: &State, after: &State) -> bool {
    let had = before.server.k.map(|k| (k.owner, k.fence));
    after.server.k.is_none_or(|k| had == Some((k.owner, k.fence)) || k.fence >= before.server.us)
}

fn one_role(state: &State) -> bool {
    state.server.k.is_none_or(|k| !state.server.in_line(k.owner))
}

fn no_lost_wake_up(action: Action, after: &State) -> bool {
    let left = matches!(action, Action::Arrive(message) if message.what == What::Release)
        || action == Action::ByHand(Hand::Force);
    !left || after.server.k.is_some() || after.server.q.iter().all(|waiter| waiter.left == 0)
}

/// Time may end a lease, and its client; nothing that is heard may.
fn no_false_loss(before: &State, action: Action, after: &State) -> bool {
    !matches!(action, Action::Arrive(_))
        || before.clients.iter().zip(&after.clients).all(|(was, is)| {
            was.phase != Phase::Held
                || is.phase == Phase::Held
                || before.server.k.is_none_or(|k| k.owner != was.owner || k.fence != was.fence)
        })
}

fn nothing_left(state: &State) -> bool {
    let over = |owner: Owner| {
        let client = &state.clients[usize::from(owner.client)];
        let ended = client.owner != owner || client.phase == Phase::Gone;
        ended && !state.net.iter().any(|message| message.what == What::Release && message.owner == owner)
    };
    !state.server.k.is_some_and(|k| over(k.owner)) && !state.server.q.iter().any(|waiter| over(waiter.owner))
}

/// For each client that waits: the others go, by a release that arrives or in silence; what is on its way never comes,
/// no push either; and it asks once each tick.
fn no_dead_end(state: &State, x: &Exchange) -> bool {
    let waits = |client: &&Client| client.phase == Phase::Waiting;
    state
        .clients
        .iter()
        .filter(waits)
        .all(|client| [true, false].into_iter().all(|released| served_in_time(state, client.owner, released, x)))
}

fn served_in_time(state: &State, owner: Owner, released: bool, x: &Exchange) -> bool {
    let lives = |client: &&Client| matches!(client.phase, Phase::Waiting | Phase::Held | Phase::Leaving);
    let others = || state.clients.iter().filter(lives).map(|client| client.owner).filter(|other| *other != owner);
    let silent = |other: Owner| other != owner && !(released && others().any(|leaver| leaver == other));
    // A silent holder costs what is left of its TTL. A silent waiter may be given the key, and costs one presence.
    let holder = state.server.k.filter(|k| silent(k.owner)).map_or(0, |k| k.ttl);
    let waiters = state.server.q.iter().filter(|waiter| waiter.left > 0 && silent(waiter.owner));
    let at_most =
        waiters.map(|waiter| if holder > 0 { waiter.left } else { waiter.presence }).max().unwrap_or(0).max(holder);

    let mut server = state.server.clone();
    if released {
        others().for_each(|leaver| _ = server.release(leaver, x.fault));
    }
    for _ in 0..=at_most {
        if let Claimed::Held { .. } = server.claim(owner, x.ttl(owner), x.presence(owner), false, x.fault) {
            return true;
        }
        server.tick();
    }
    false
}
