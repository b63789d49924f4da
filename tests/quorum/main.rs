//! A quorum: the rules of a store, faults on virtual time, and real servers.
#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, reason = "a test")]
#![allow(clippy::print_stdout, reason = "it says what was covered")]
#[path = "../support/mod.rs"]
mod support;

mod far;
mod late;
mod net;
mod rules;
mod servers;
mod simulation;
