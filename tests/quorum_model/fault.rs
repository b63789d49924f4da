//! The mistakes that can be planted, and what has to be seen.

/// A mistake, made throughout one search. Each has to be caught.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    None,
    // A member makes these,
    ProposalForgetsTheFence,
    HoldKeepsWhatIsNotOurs,
    HoldIgnoresTheFence,
    ReleaseComparesNothing,
    LateRequestRuns,
    NoQuarantine,
    // and a client these.
    NoWriteBack,
    WriteBackNotAwaited,
    MajorityOfTheAnswers,
    DeadlineFromTheAnswers,
    OwnerUsedAgain,
    NoSecondRelease,
    OneRefusalIsLoss,
}

/// What has to have happened somewhere in a search, or its verdict would say little.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// The votes were split: a proposal met another client's key.
    Busy,
    /// A proposal was carried out for an attempt that had gone on without it, or was over.
    ProposalUseless,
    /// A write-back came to a member whose key was another's.
    WriteBackRefused,
    /// A member had written back a larger fence than was to be held.
    Overtaken,
    /// A majority wrote back, and the lease was handed out.
    HandedOut,
    /// A lease that was handed out stands at all members.
    Everywhere,
    /// The TTL of a key ended.
    Expired,
    /// A holder's validity ended by its own clock.
    RanOut,
    /// A renewal moved a deadline.
    Renewed,
    /// A renewal put the lease back where it was missing.
    PutBack,
    /// A holder was told that no majority can be its own.
    ToldOfLoss,
    /// A request was carried out after the first release of its owner; the second makes it good.
    SecondReleaseNeeded,
    /// A member that may have forgotten something gave no key away.
    YoungRefused,
}

impl Event {
    pub(crate) const ALL: [Event; 13] = [
        Event::Busy,
        Event::ProposalUseless,
        Event::WriteBackRefused,
        Event::Overtaken,
        Event::HandedOut,
        Event::Everywhere,
        Event::Expired,
        Event::RanOut,
        Event::Renewed,
        Event::PutBack,
        Event::ToldOfLoss,
        Event::SecondReleaseNeeded,
        Event::YoungRefused,
    ];
}
