//! What has to be read also when a test passes: of how much a proof speaks.
use std::{
    fmt::Display,
    io::{Write, stdout},
};

/// One line on its own. Not `println!`, which the test harness keeps to itself.
pub fn say(what: impl Display) {
    let mut out = stdout().lock();
    writeln!(out, "\n{what}").and_then(|()| out.flush()).unwrap();
}
