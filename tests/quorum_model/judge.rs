//! What must hold, in every state that can be reached.
use crate::{
    client::{Client, Phase},
    member::{Kept, Lease, Member, Owner, Proposed},
    world::{Action, LATE, MAJORITY, Quorum, Site, State, What},
};
use stateright::Property;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Rule {
    /// No two clients believe at one time.
    Exclusion,
    /// A lease that was handed out stands at a majority, its fence was written back there, and none that is larger.
    Standing,
    /// Each lease that is handed out has a larger fence than all before it.
    FencesGrow,
    /// A renewal that began after a larger fence was handed out does not succeed.
    Overtaken,
    /// A client is told of no loss while its lease stands at a majority.
    NoFalseLoss,
    /// Where an attempt that has ended has a key, a release is on its way; and where it may still get one, a release that
    /// is kept back until it can't.
    NothingLeft,
}

/// The rules that the step from `before` to `after` broke.
pub(crate) fn broken(before: &State, action: Action, after: &State, x: &Quorum) -> Vec<Rule> {
    [
        (Rule::Exclusion, exclusion(after)),
        (Rule::Standing, standing(after)),
        (Rule::FencesGrow, fences_grow(before, after)),
        (Rule::Overtaken, overtaken(before, action)),
        (Rule::NoFalseLoss, no_false_loss(before, action)),
        (Rule::NothingLeft, nothing_left(after, x)),
    ]
    .into_iter()
    .filter_map(|(rule, holds)| (!holds).then_some(rule))
    .collect()
}

pub(crate) fn properties() -> Vec<Property<Quorum>> {
    vec![
        Property::always("mutual exclusion", |_, state: &State| !state.broken.contains(&Rule::Exclusion)),
        Property::always("a majority stands", |_, state: &State| !state.broken.contains(&Rule::Standing)),
        Property::always("fences grow", |_, state: &State| !state.broken.contains(&Rule::FencesGrow)),
        Property::always("overtaken is over", |_, state: &State| !state.broken.contains(&Rule::Overtaken)),
        Property::always("no false loss", |_, state: &State| !state.broken.contains(&Rule::NoFalseLoss)),
        Property::always("nothing left", |_, state: &State| !state.broken.contains(&Rule::NothingLeft)),
        Property::always("no dead end", |x, state: &State| no_dead_end(state, x)),
    ]
}

fn believers(state: &State) -> impl Iterator<Item = &Client> {
    state.clients.iter().filter(|client| client.phase == Phase::Held)
}

fn stands(client: &Client, site: &Site) -> bool {
    let written = site.member.f == client.fence;
    written && site.member.k.is_some_and(|k| k.owner == client.owner && k.fence == client.fence)
}

fn robbed(client: &Client, site: &Site) -> bool {
    site.robbed.is_some_and(|k| k.owner == client.owner)
}

/// But for a lease that was ended by force, until its TTL would have ended.
fn exclusion(state: &State) -> bool {
    let sure = |client: &&Client| !state.sites.iter().any(|site| robbed(client, site));
    believers(state).filter(sure).count() < 2
}

/// But for members that have just forgotten it, and give nothing away, and those that were forced.
fn standing(state: &State) -> bool {
    believers(state).all(|client| {
        let counts = |site: &&Site| stands(client, site) || site.member.young > 0 || robbed(client, site);
        state.sites.iter().filter(counts).count() >= MAJORITY
    })
}

pub(crate) fn stands_everywhere(state: &State) -> bool {
    believers(state).any(|client| state.sites.iter().all(|site| stands(client, site)))
}

/// But for an attempt that lost a key by force on the way: acks from before and after that may mix.
fn fences_grow(before: &State, after: &State) -> bool {
    before.clients.iter().zip(&after.clients).all(|(was, is)| {
        let handed_out = was.phase != Phase::Held && is.phase == Phase::Held;
        !handed_out || is.forced || is.fence > before.told
    })
}

fn overtaken(before: &State, action: Action) -> bool {
    !matches!(action, Action::Renewed(client) if before.clients[usize::from(client)].overtaken)
}

fn no_false_loss(before: &State, action: Action) -> bool {
    let Action::Lose(client) = action else { return true };
    let client = &before.clients[usize::from(client)];
    before.sites.iter().filter(|site| stands(client, site)).count() < MAJORITY
}

fn nothing_left(state: &State, x: &Quorum) -> bool {
    state.sites.iter().all(|site| {
        let over = |owner: &Owner| {
            let client = &state.clients[usize::from(owner.client)];
            client.owner != *owner || client.phase == Phase::Gone
        };
        let released =
            |owner, from| site.coming.iter().any(|it| it.what == What::Release && it.owner == owner && it.age >= from);
        let mut runs = site.coming.iter().filter(|it| it.runs(x.fault) && over(&it.owner));
        site.member.k.map(|k| k.owner).filter(over).is_none_or(|owner| released(owner, 0))
            && runs.all(|it| it.age < LATE && released(it.owner, LATE - it.age))
    })
}

/// All go in silence, and nothing that is on its way comes: once the keys have ended, and nobody is young any more,
/// whoever asks is served, whichever minority is away.
fn no_dead_end(state: &State, x: &Quorum) -> bool {
    let owner = Owner { client: u8::MAX, attempt: 0 };
    let mut members = state.sites.clone().map(|site| site.member);
    let wait = |member: &Member| member.young.max(member.k.map_or(0, |k| k.ttl));
    for _ in 0..members.iter().map(wait).max().unwrap_or(0) {
        members.iter_mut().for_each(Member::tick);
    }
    (0..members.len()).all(|away| {
        let mut members = members.clone();
        let mut others: Vec<_> =
            members.iter_mut().enumerate().filter(|(at, _)| *at != away).map(|(_, it)| it).collect();
        let proposals = others.iter_mut().map(|member| member.propose(owner, x.bounds.ttl, false, x.fault));
        let fences = proposals.map(|proposed| match proposed {
            Proposed::Held { fence } => Some(fence),
            _ => None,
        });
        let Some(fences) = fences.collect::<Option<Vec<_>>>() else { return false };
        let Some(fence) = fences.into_iter().max() else { return false };
        let lease = Lease { owner, fence, ttl: x.bounds.ttl };
        others.into_iter().all(|member| member.hold(lease, false, false, x.fault) == Kept::Ours)
    })
}
