//! Faults that are put in on purpose: a checker that cannot fail proves nothing.

/// A fault of the server, or what is the same to everybody as a fault of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A renewal prolongs the lease, whoever has it.
    RenewsAnybody,
    /// A renewal makes the key when it is gone.
    RecreatesOnRenewal,
    /// A release hands the key to whoever is first in line, alive or not.
    GrantsToTheDead,
    /// A claim is carried out however late it is.
    RunsLateClaims,
    /// A release ends the lease, whoever has it.
    ReleasesWithoutComparing,
    /// Fences start again.
    RestartsFences,
    /// Validity is counted from when the answer came. Planted as a server that counts a renewal from so much earlier as the
    /// answer takes: the client's end and the server's lie exactly as far apart.
    CountsFromReply,
    /// A grant is dated from when word of it came. Planted as word of a grant that is so much longer.
    DatesGrantFromPush,
    /// A grant is dated from a "queued" that had seen its fence. Planted as a "queued" that does not tell what it has seen.
    ForgetsWhatQueuedSaw,
    /// Work that stops when its token says so, and looks at no clock.
    TrustsItsToken,
}

impl Planted {
    pub const ALL: [Planted; 10] = [
        Planted::RenewsAnybody,
        Planted::RecreatesOnRenewal,
        Planted::GrantsToTheDead,
        Planted::RunsLateClaims,
        Planted::ReleasesWithoutComparing,
        Planted::RestartsFences,
        Planted::CountsFromReply,
        Planted::DatesGrantFromPush,
        Planted::ForgetsWhatQueuedSaw,
        Planted::TrustsItsToken,
    ];
}
