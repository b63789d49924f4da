//! A quorum, in every order that its exchange can take: a model, searched to its end by `stateright`.
//!
//! Three members and two clients. `member.rs` is what `src/store/redis/protocol.lua` does for a quorum, operation by operation;
//! `client.rs` is what `src/store/quorum` makes of answers and time; `world.rs` lets anything happen next; `judge.rs` says what
//! must hold in each state; `form.rs` makes one state of those that are alike. `fault.rs` lists the mistakes that can be planted:
//! each must be caught, or the judge is blind. `tests/model` is the exchange with one server.
//!
//! **What can happen.** Each request travels alone: it arrives after any time, in any order, or never. What a member answered is
//! written down, and its client looks at the answers of any majority, at any later time. Clients propose, write back, are handed
//! the lease, renew it, are told of its loss, leave and come back whenever they may; TTLs and validity run out. A client that
//! crashes is one that leaves, whose releases never arrive. A member restarts without its data, at most a minority at one time.
//! Somebody ends the lease by force, at any of the members, at each at a time of its own.
//!
//! **Bounds.** Time goes in ticks: a TTL is 2, and a request that is 1 old takes nothing. Only what is left, or how old something is,
//! is kept, and fences are counted from the slowest clock, so that there is no last tick. How many attempts a client makes and
//! how many renewals it sends is bounded, by [`Bounds`], and each search ends because there is no other state. Nothing is
//! searched behind the end of both clients: what is then on its way is judged as it lies.
//!
//! **Not here.** Five members, and three clients (the simulation in `tests/quorum` has them). A request that arrives twice. Answers
//! to a renewal that was given up for another. Clients' clocks that run apart, members' that are set. Which members an attempt has to
//! release (`stake.rs`): here it is all. Votes that are split again and again, which chance ends.
//!
//! `MODEL=wide cargo test --release --test quorum_model -- --nocapture` searches further. `docs/safety.md` has the figures.
#![allow(unreachable_pub, clippy::print_stdout, clippy::unwrap_used, reason = "it says what it found")]

#[path = "../support/aloud.rs"]
mod aloud;
mod client;
mod fault;
mod form;
mod judge;
mod member;
mod world;

use crate::{
    fault::{Event, Fault},
    world::{Action, Bounds, Quorum},
};
use stateright::{Checker, HasDiscoveries, Model};
use std::time::Instant;

/// Two clients, each of which makes one attempt. As long as nothing is forgotten, the clocks may stand still.
const PAIR: Bounds = Bounds {
    ttl: 2,
    held: false,
    attempts: [1; 2],
    renewals: [0; 2],
    clocks: [0; 3],
    pace: 0,
    restarts: 0,
    quarantine: 2,
    force: 0,
};
/// One member's clock is ahead of the others.
const AHEAD: Bounds = Bounds { clocks: [1, 0, 0], ..PAIR };
/// It begins when the first client has got the lease, which it renews once.
const HELD: Bounds = Bounds { held: true, renewals: [1, 0], ..PAIR };
/// A member restarts empty. The clocks agree, and the quarantine is 2 ticks.
const RESTART: Bounds = Bounds { pace: 1, restarts: 1, ..HELD };
/// Somebody ends the lease by force, at each of the members where it stands or at one of them.
const FORCED: Bounds = Bounds { force: 2, ..HELD };

/// What came of a search.
struct Found {
    /// The rules that were broken, with a way there.
    broken: Vec<(&'static str, Vec<Action>)>,
    seen: Vec<Event>,
    searched: String,
}

impl Found {
    fn new(checker: &impl Checker<Quorum>, began: Instant) -> Found {
        let ways = checker.discoveries().into_iter();
        let mut broken: Vec<_> = ways.map(|(rule, path)| (rule, path.into_actions())).collect();
        broken.sort_unstable_by_key(|(rule, _)| *rule);
        let (states, steps) = (checker.unique_state_count(), checker.state_count());
        let searched =
            format!("{states} states, {steps} steps, depth {}, in {:.1?}", checker.max_depth(), began.elapsed());
        Found { broken, seen: checker.model().seen(), searched }
    }
}

/// Searches all that there is.
fn search(name: &str, bounds: Bounds) -> Found {
    let began = Instant::now();
    let checker = Quorum::new(bounds, Fault::None).checker().spawn_bfs().join();
    // No limit was set, so it stops for one of two reasons only; and not all rules are broken.
    assert!(checker.is_done(), "{name}: the search was not completed");
    let found = Found::new(&checker, began);
    assert!(found.broken.len() < judge::properties().len(), "{name}: the search stopped at its last rule");
    aloud::say(format_args!("covered: quorum model, {name}: all of its {}", found.searched));
    found
}

/// Searches until all these rules are broken, in the order that gets there soonest.
fn search_for(rules: &[&'static str], bounds: Bounds, fault: Fault) -> Found {
    let began = Instant::now();
    let all = HasDiscoveries::AllOf(rules.iter().copied().collect());
    Found::new(&Quorum::new(bounds, fault).checker().finish_when(all).spawn_dfs().join(), began)
}

/// What cannot happen when nobody renews, restarts, or is forced.
const BY_RENEWAL: &[Event] = &[Event::Renewed, Event::PutBack];
const BY_RESTART: &[Event] = &[Event::YoungRefused];
const BY_FORCE: &[Event] = &[Event::ToldOfLoss];

fn is_wide() -> bool {
    std::env::var("MODEL").is_ok_and(|how| how == "wide")
}

/// `unseen`: what cannot happen within these bounds. Everything else has to, or the search of them would say little.
fn holds(name: &str, bounds: Bounds, wide: Bounds, unseen: &[&[Event]]) {
    let bounds = if is_wide() { wide } else { bounds };
    let found = search(name, bounds);
    for (rule, way) in &found.broken {
        println!("{name}: on this way, {rule} breaks:");
        way.iter().for_each(|action| println!("    {action:?}"));
    }
    assert!(found.broken.is_empty(), "{name} breaks a rule");
    let mut expected = Event::ALL.into_iter().filter(|event| !unseen.concat().contains(event));
    assert_eq!(expected.find(|event| !found.seen.contains(event)), None, "{name}: this should have happened");
}

#[test]
fn all_rules_hold_when_two_want_the_key() {
    let wide = Bounds { clocks: [6, 3, 0], ..PAIR };
    holds("two", PAIR, wide, &[BY_RENEWAL, BY_RESTART, BY_FORCE]);
}

#[test]
fn all_rules_hold_when_leases_are_renewed_and_put_back_where_they_are_missing() {
    let wide = Bounds { renewals: [1; 2], ..AHEAD };
    holds("renewals", HELD, wide, &[BY_RESTART, BY_FORCE]);
}

#[test]
fn all_rules_hold_when_a_client_comes_back_while_its_last_attempt_is_on_its_way() {
    let bounds = Bounds { attempts: [2, 0], ..PAIR };
    let wide = Bounds { attempts: [2, 1], renewals: [0; 2], ..HELD };
    holds("a client that comes back", bounds, wide, &[BY_RENEWAL, BY_RESTART, BY_FORCE]);
}

#[test]
fn all_rules_hold_when_members_restart_empty_while_a_lease_is_renewed() {
    let bounds = Bounds { attempts: [1, 0], renewals: [2, 0], restarts: 2, ..RESTART };
    let wide = Bounds { clocks: [1, 0, 0], restarts: 2, ..RESTART };
    // Nobody proposes, and after the holder nobody is there.
    let in_part = [Event::Busy, Event::ProposalUseless, Event::WriteBackRefused, Event::HandedOut, Event::Overtaken];
    let alone = [&in_part[..], BY_RESTART, &[Event::SecondReleaseNeeded]].concat();
    holds("renewals and restarts", bounds, wide, &[BY_FORCE, &alone]);
}

#[test]
fn all_rules_hold_when_members_restart_empty_while_another_wants_the_key() {
    let bounds = Bounds { renewals: [0; 2], ..RESTART };
    let wide = Bounds { held: false, clocks: [11, 5, 0], pace: 6, restarts: 2, ..bounds.clone() };
    holds("restarts", bounds, wide, &[BY_RENEWAL, BY_FORCE, &[Event::Overtaken]]);
}

#[test]
fn all_rules_hold_when_somebody_ends_a_lease_by_force() {
    let bounds = Bounds { renewals: [0; 2], ..FORCED };
    let wide = Bounds { force: 3, ..FORCED };
    holds("force", bounds, wide, &[BY_RENEWAL, BY_RESTART, BY_FORCE, &[Event::Overtaken]]);
}

/// Each alone. Without a fault, the tests above pass, within these bounds or wider ones.
#[test]
fn every_planted_fault_is_caught_by_the_rules_that_forbid_it() {
    let again = Bounds { attempts: [2, 0], ..PAIR };
    let alone = Bounds { attempts: [1, 0], ..FORCED };
    const EXCLUSION: &str = "mutual exclusion";
    const STANDS: &str = "a majority stands";
    const GROW: &str = "fences grow";
    const LEFT: &str = "nothing left";
    let mut all = vec![
        (Fault::ProposalForgetsTheFence, PAIR, &[GROW] as &[&str]),
        (Fault::ProposalForgetsTheFence, AHEAD, &["no dead end"]),
        (Fault::HoldKeepsWhatIsNotOurs, PAIR, &[STANDS, GROW]),
        (Fault::HoldIgnoresTheFence, alone, &[STANDS]),
        (Fault::ReleaseComparesNothing, PAIR, &[STANDS]),
        (Fault::LateRequestRuns, PAIR, &[LEFT]),
        (Fault::NoQuarantine, RESTART, &[EXCLUSION, GROW]),
        (Fault::NoWriteBack, PAIR, &[STANDS, GROW]),
        (Fault::WriteBackNotAwaited, PAIR, &[STANDS, GROW]),
        (Fault::MajorityOfTheAnswers, PAIR, &[EXCLUSION, GROW]),
        (Fault::DeadlineFromTheAnswers, PAIR, &[EXCLUSION, STANDS]),
        (Fault::OwnerUsedAgain, again, &[STANDS, GROW]),
        (Fault::NoSecondRelease, PAIR, &[LEFT]),
        (Fault::OneRefusalIsLoss, HELD, &["no false loss"]),
    ];
    if is_wide() {
        all.push((Fault::HoldIgnoresTheFence, FORCED, &["overtaken is over"]));
    }
    for (fault, bounds, rules) in all {
        let found = search_for(rules, bounds, fault);
        let broken: Vec<_> = found.broken.iter().map(|(rule, _)| *rule).collect();
        assert!(rules.iter().all(|rule| broken.contains(rule)), "{fault:?} breaks only {broken:?}, of {rules:?}");
        println!("caught: {fault:?} breaks {}, after {}", rules.join(", "), found.searched);
    }
}

/// What the rules of fences rest on when members forget. Exclusion does not.
#[test]
fn fences_can_go_back_when_clocks_are_further_apart_than_the_quarantine_is_long() {
    let found = search("clocks too far apart", Bounds { clocks: [3, 0, 0], renewals: [0; 2], ..RESTART });
    let broken: Vec<_> = found.broken.iter().map(|(rule, _)| *rule).collect();
    assert_eq!(broken, ["fences grow"]);
}
