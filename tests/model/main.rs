//! The exchange with the server, in every order that it can take: a model, searched to its end by `stateright`.
//!
//! One server and up to three clients. `server.rs` is `src/store/redis/protocol.lua`, operation by operation; `client.rs` is
//! what the library makes of answers, words and time; `world.rs` lets anything happen next; `judge.rs` says what must hold
//! in each state; `form.rs` makes one state of those that are alike. `fault.rs` lists the mistakes that can be planted: each must be caught, or the judge is blind.
//!
//! **What can happen.** Each message travels alone: it arrives after any time, in any order, or never. Clients ask, ask again,
//! renew, leave and crash whenever they may; their validity and the server's TTLs run out. Once in a search, somebody ends the
//! lease by force, deletes the key or the counter, or flushes everything.
//!
//! **Bounds.** Time goes in ticks: a TTL is 3 or so, a presence 2, a claim is refused when it is 2 old. Only what is left, or how
//! old something is, is kept, and of fences only their order, so that there is no last tick. How many claims and renewals a
//! client may send is bounded, by [`Bounds`], and each search ends because there is no other state.
//!
//! **Not here.** Clocks that run apart, and the server's being set (`term.rs` has the first, the simulation both). Data lost other
//! than at once. Tickets, `try` without a line, several keys, lists of operations, and errors within one. Grace, jitter, and when
//! exactly a client asks: it may at any time. That an answer isn't heard any more after a while: here it may be, however late.
//!
//! `MODEL=wide cargo test --release --test model -- --nocapture` searches further. `docs/safety.md` has the figures.
#![allow(unreachable_pub, clippy::print_stdout, clippy::unwrap_used, reason = "it says what it found")]

#[path = "../support/aloud.rs"]
mod aloud;
mod client;
mod fault;
mod form;
mod judge;
mod server;
mod world;

use crate::{
    fault::{Event, Fault},
    world::{Action, Bounds, Exchange, Hand},
};
use stateright::{Checker, Model};
use std::time::Instant;

/// Two clients, of which the first asks twice.
const PAIR: Bounds = Bounds {
    ttl: [3; 3],
    presence: [2; 3],
    acquisitions: [1; 3],
    claims: [2, 1, 0],
    renewals: [1, 0, 0],
    crashes: false,
    by_hand: &[],
};
/// Three clients, each of which asks once.
const THREE: Bounds = Bounds { claims: [1; 3], renewals: [0; 3], ..PAIR };

/// What came of a search.
struct Found {
    /// The rules that were broken, with the shortest way there.
    broken: Vec<(&'static str, Vec<Action>)>,
    seen: Vec<Event>,
}

/// Searches all that there is.
fn search(name: &str, bounds: Bounds, fault: Fault) -> Found {
    let began = Instant::now();
    let checker = Exchange::new(bounds, fault).checker().spawn_bfs().join();
    // No limit was set, so it stops for one of two reasons only; and not all rules are broken.
    assert!(checker.is_done(), "{name}: the search was not completed");
    let mut broken: Vec<_> =
        checker.discoveries().into_iter().map(|(rule, path)| (rule, path.into_actions())).collect();
    broken.sort_unstable_by_key(|(rule, _)| *rule);
    assert!(broken.len() < judge::properties().len(), "{name}: the search stopped at its last rule");
    aloud::say(format_args!(
        "covered: model, {name}: all of its {} states, {} steps, depth {}, in {:.1?}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        began.elapsed()
    ));
    Found { broken, seen: checker.model().seen() }
}

/// What cannot happen when nobody does anything by hand, or when each asks once.
const NOT_BY_ITSELF: &[Event] = &[Event::ToldOfLoss, Event::ForceTold];
const NOT_AT_ONCE: &[Event] = &[Event::GrantFoundByAsking, Event::PlaceRegained];

/// `unseen`: what cannot happen within these bounds. Everything else has to, or the search of them would say little.
fn holds(name: &str, bounds: Bounds, wide: Bounds, unseen: &[&[Event]]) {
    let bounds = if std::env::var("MODEL").is_ok_and(|how| how == "wide") { wide } else { bounds };
    let found = search(name, bounds, Fault::None);
    for (rule, way) in &found.broken {
        println!("{name}: on this way, {rule} breaks:");
        way.iter().for_each(|action| println!("    {action:?}"));
    }
    assert!(found.broken.is_empty(), "{name} breaks a rule");
    let mut expected = Event::ALL.into_iter().filter(|event| !unseen.concat().contains(event));
    assert_eq!(expected.find(|event| !found.seen.contains(event)), None, "{name}: this should have happened");
}

#[test]
fn all_rules_hold_when_two_hold_renew_and_ask_again() {
    let bounds = Bounds { claims: [2, 2, 0], renewals: [1, 1, 0], ..PAIR };
    let wide = Bounds { claims: [3, 3, 0], renewals: [1, 1, 0], ..PAIR };
    holds("two that ask again", bounds, wide, &[NOT_BY_ITSELF, &[Event::DeadDropped]]);
}

#[test]
fn all_rules_hold_when_three_wait_for_each_other() {
    let bounds = Bounds { renewals: [1; 3], ..THREE };
    let wide = Bounds { claims: [2, 1, 1], renewals: [1, 1, 0], ..THREE };
    holds("three", bounds, wide, &[NOT_BY_ITSELF, NOT_AT_ONCE]);
}

#[test]
fn all_rules_hold_when_a_waiter_asks_again_among_three() {
    let bounds = Bounds { claims: [2, 1, 1], ..THREE };
    let wide = Bounds { claims: [2, 2, 1], ..THREE };
    holds("three, one of which asks again", bounds, wide, &[NOT_BY_ITSELF, &[Event::Renewed]]);
}

#[test]
fn all_rules_hold_when_any_of_three_crashes() {
    let bounds = Bounds { renewals: [1, 0, 0], crashes: true, ..THREE };
    let wide = Bounds { claims: [2, 1, 1], ..bounds.clone() };
    holds("crashes", bounds, wide, &[NOT_BY_ITSELF, NOT_AT_ONCE]);
}

#[test]
fn all_rules_hold_when_a_client_comes_back_under_another_owner() {
    let bounds = Bounds { claims: [1, 1, 0], renewals: [1, 0, 0], acquisitions: [2, 2, 1], ..PAIR };
    let wide = Bounds { claims: [2, 1, 0], ..bounds.clone() };
    holds("clients that come back", bounds, wide, &[NOT_BY_ITSELF, NOT_AT_ONCE]);
}

#[test]
fn all_rules_hold_when_waiters_have_their_own_ttls_and_presences() {
    let bounds = Bounds { ttl: [4, 3, 2], presence: [3, 2, 1], ..THREE };
    let wide = Bounds { claims: [2, 1, 1], crashes: true, ..bounds.clone() };
    holds("mixed lengths", bounds, wide, &[NOT_BY_ITSELF, NOT_AT_ONCE, &[Event::Renewed]]);
    let bounds = Bounds { presence: [3; 3], ..THREE };
    let wide = Bounds { claims: [2, 1, 1], crashes: true, ..bounds.clone() };
    holds("a presence as long as the TTL", bounds, wide, &[NOT_BY_ITSELF, NOT_AT_ONCE, &[Event::Renewed]]);
}

#[test]
fn all_rules_hold_when_somebody_ends_a_lease_or_loses_data_by_hand() {
    let by_hand = &[Hand::Force, Hand::Del, Hand::FlushAll, Hand::DelCounter];
    let bounds = Bounds { by_hand, ..PAIR };
    let wide = Bounds { claims: [3, 1, 0], by_hand, ..PAIR };
    holds("by hand, two", bounds, wide, &[&[Event::DeadDropped]]);
    let bounds = Bounds { by_hand, ..THREE };
    let wide = Bounds { claims: [2, 1, 1], by_hand, ..THREE };
    holds("by hand, three", bounds, wide, &[NOT_AT_ONCE, &[Event::Renewed, Event::ToldOfLoss]]);
}

/// Each alone: what it breaks first, on any way, is all that it may break. Without a fault, the tests above pass, within these
/// bounds or wider ones.
#[test]
fn every_planted_fault_is_caught_by_the_rules_that_forbid_it() {
    let by_hand = |by_hand| Bounds { by_hand, ..PAIR };
    let again = |claims, acquisitions| Bounds { claims, acquisitions, renewals: [0; 3], ..PAIR };
    let (exclusion, left, stuck) = ("mutual exclusion", "nothing left", "no dead end");
    for (fault, bounds, rules) in [
        (Fault::RenewalProvesNothing, by_hand(&[Hand::Del]), &[exclusion] as &[&str]),
        (Fault::RenewalProvesNoFence, by_hand(&[Hand::Del]), &[exclusion]),
        (Fault::RenewalCreates, PAIR, &["fences grow"]),
        (Fault::ReleaseComparesNothing, PAIR, &[exclusion, stuck, left]),
        (Fault::GrantForgetsTheDead, THREE, &[stuck]),
        (Fault::ClaimsKeepTheDead, THREE, &[stuck]),
        (Fault::HeldKeepsTheTtl, PAIR, &[exclusion]),
        (Fault::TakerStaysInLine, PAIR, &["no owner in line"]),
        (Fault::LateClaimRuns, PAIR, &[left]),
        (Fault::LeaverKeepsItsTurn, THREE, &["no lost wake-up"]),
        (Fault::FenceRestarts, by_hand(&[Hand::FlushAll]), &["fences grow"]),
        (Fault::DeadlineFromTheReply, PAIR, &[exclusion]),
        (Fault::GrantFromThePush, PAIR, &[exclusion]),
        (Fault::GrantFromAnAnswerThatHadSeenIt, again([2, 1, 0], [1, 2, 1]), &[exclusion]),
        (Fault::EndedOwnershipKept, by_hand(&[Hand::Del]), &[left]),
        (Fault::OwnerUsedAgain, again([1, 1, 0], [2, 2, 1]), &[exclusion]),
        (Fault::NoSecondRelease, PAIR, &[left]),
        (Fault::QueuedWhileHeldIsLoss, PAIR, &["no false loss"]),
    ] {
        let found = search(&format!("{fault:?}"), bounds, fault);
        let broken: Vec<_> = found.broken.iter().map(|(rule, _)| *rule).collect();
        assert_eq!(broken, rules, "{fault:?}");
        let shortest = found.broken.iter().map(|(_, way)| way.len()).min().unwrap_or_default();
        println!("caught: {fault:?} breaks {}, after {shortest} steps", broken.join(", "));
    }
}
