//! What happens besides the drop.
use super::cut::Cut;

/// The most polls after which a call is dropped.
const POLLS: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    None,
    /// The call is dropped with the runtime that it is on.
    RuntimeEnds,
    /// The server hangs from when the call has been woken so often.
    Hangs {
        from: usize,
        how: Hang,
        /// It is over as soon as the calls are dropped, and what was sent before arrives.
        brief: bool,
        /// What was sent meanwhile never arrives.
        loses: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hang {
    /// It hears nothing.
    Deaf,
    /// It does what it is asked, and says nothing.
    Mute,
}

/// What is tried with a call that is polled so often before it is done.
pub fn troubles(awaits: usize) -> Vec<Trouble> {
    let hangs = |from, how, brief, loses| Trouble::Hangs { from, how, brief, loses };
    let mut troubles = vec![
        Trouble::None,
        Trouble::RuntimeEnds,
        hangs(0, Hang::Deaf, true, false),
        hangs(0, Hang::Mute, true, true),
        hangs(0, Hang::Deaf, false, false),
        hangs(0, Hang::Mute, false, true),
    ];
    for from in 1..=awaits.min(2) {
        troubles.push(hangs(from, Hang::Mute, true, false));
        troubles.push(hangs(from, Hang::Deaf, false, true));
    }
    troubles
}

/// After every number of polls, before the wake and after it, and beyond the last.
pub fn cuts(trouble: Trouble, awaits: usize) -> Vec<Cut> {
    let polls = match trouble {
        Trouble::None | Trouble::RuntimeEnds => 0..=awaits.min(POLLS) + 1,
        Trouble::Hangs { from, brief: true, .. } => from..=from + 1,
        Trouble::Hangs { from, .. } => from..=from + 4,
    };
    let both = polls.flat_map(|polls| [false, true].map(|woken| Cut { polls, woken }));
    // Nobody waits for a wake while the server is to hang only briefly, nor on a runtime that ends.
    let woken = !matches!(trouble, Trouble::RuntimeEnds | Trouble::Hangs { brief: true, .. });
    both.filter(|cut| !cut.woken || woken && cut.polls > 0).collect()
}
