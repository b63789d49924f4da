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
//! **Bounds.** Time goes in ticks: a TTL is 2, and a request takes nothing when it is 1 old. Only what is left, or how old something
//! is, is kept, and fences are counted from the slowest clock, so that there is no last tick. How many attempts a client makes and
//! how many renewals it sends is bounded, by [`Bounds`], and each search ends because there is no other state. Nothing is
//! searched behind the end of both clients: what is then on its way is judged as it lies.
//!
//! **Not here.** Five members, and three clients (the simulation in `tests/quorum` has them). A request that arrives twice. Answers
//! to a renewal that was given up for another. Clocks of clients that run apart, and members' that are set. Members that restart with their data, for nothing is
//! lost then. Who is released where: here all are. Split votes over and over, which chance ends.
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

/// Two clients, each of which makes one attempt. Nothing is forgotten, so the clocks may show anything.
const PAIR: Bounds = Bounds {
    ttl: 2,
    attempts: [1; 2],
    renewals: [0; 2],
    clocks: [0; 3],
    pace: 0,
    restarts: 0,
    quarantine: 2,
    force: false,
};
/// One clock is ahead of the others.
const AHEAD: Bounds = Bounds { clocks: [1, 0, 0], ..PAIR };

/// What came of a search.
struct Found {
    /// The rules that were broken, with the shortest way there.
    broken: Vec<(&'static str, Vec<Action>)>,
    seen: Vec<Event>,
}

/// Searches all that there is, or until all the `wanted` rules are broken, if there are any.
fn search(name: &str, bounds: Bounds, fault: Fault, wanted: &[&'static str]) -> Found {
    let began = Instant::now();
    let mut checker = Quorum::new(bounds, fault).checker();
    if !wanted.is_empty() {
        checker = checker.finish_when(HasDiscoveries::AllOf(wanted.iter().copied().collect()));
    }
    let checker = checker.spawn_bfs().join();
    let mut broken: Vec<_> =
        checker.discoveries().into_iter().map(|(rule, path)| (rule, path.into_actions())).collect();
    broken.sort_unstable_by_key(|(rule, _)| *rule);
    if wanted.is_empty() {
        assert!(checker.is_done(), "{name}: the search was not completed");
        aloud::say(format_args!(
            "covered: quorum model, {name}: all of its {} states, {} steps, depth {}, in {:.1?}",
            checker.unique_state_count(),
            checker.state_count(),
            checker.max_depth(),
            began.elapsed()
        ));
    }
    Found { broken, seen: checker.model().seen() }
}

/// What cannot happen without a renewal, and without a restart.
const RENEWALS: &[Event] = &[Event::Renewed, Event::PutBack];
const RESTARTS: &[Event] = &[Event::YoungRefused];
const LOSS: &[Event] = &[Event::ToldOfLoss];

/// `unseen`: what cannot happen within these bounds. Everything else has to, or the search of them would say little.
fn holds(name: &str, bounds: Bounds, wide: Bounds, unseen: &[&[Event]]) {
    let bounds = if std::env::var("MODEL").is_ok_and(|how| how == "wide") { wide } else { bounds };
    let found = search(name, bounds, Fault::None, &[]);
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
    holds("two", AHEAD, wide, &[RENEWALS, RESTARTS, LOSS]);
}

#[test]
fn all_rules_hold_when_a_lease_is_renewed_and_put_back_where_it_is_missing() {
    let bounds = Bounds { renewals: [1, 0], ..PAIR };
    let wide = Bounds { renewals: [1, 0], ..AHEAD };
    holds("renewed", bounds, wide, &[RESTARTS, LOSS]);
}
