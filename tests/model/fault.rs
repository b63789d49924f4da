//! The mistakes that can be planted, and what has to be seen.

/// A mistake, made throughout one search. Each has to be caught.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    None,
    // The server makes these,
    RenewalProvesNothing,
    RenewalProvesNoFence,
    RenewalCreates,
    ReleaseComparesNothing,
    GrantForgetsTheDead,
    ClaimsKeepTheDead,
    HeldKeepsTheTtl,
    TakerStaysInLine,
    LateClaimRuns,
    LeaverKeepsItsTurn,
    FenceRestarts,
    // and the client these.
    DeadlineFromTheReply,
    GrantFromThePush,
    GrantFromAnAnswerThatHadSeenIt,
    EndedOwnershipKept,
    OwnerUsedAgain,
    NoSecondRelease,
    QueuedWhileHeldIsLoss,
}

/// What has to have happened somewhere in a search, or its verdict would say little.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// A push made its waiter the holder.
    Granted,
    /// A push came too late to be used, or was of an ownership that had ended.
    PushUseless,
    /// A claim brought a grant whose push had not come.
    GrantFoundByAsking,
    /// A renewal moved a deadline.
    Renewed,
    /// The TTL of a key ended.
    Expired,
    /// A holder's validity ended by its own clock.
    RanOut,
    /// A renewal was told that the lease was gone or taken.
    ToldOfLoss,
    /// A holder was told that its lease was ended by force.
    ForceTold,
    /// Somebody left the line of a free key, and the next one got it.
    TurnPassedOn,
    DeadDropped,
    /// A waiter had lost its place in the line, and a claim brought it back.
    PlaceRegained,
    LateRefused,
    /// A claim was carried out after the first release of its owner; the second makes it good.
    SecondReleaseNeeded,
}

impl Event {
    pub(crate) const ALL: [Event; 13] = [
        Event::Granted,
        Event::PushUseless,
        Event::GrantFoundByAsking,
        Event::Renewed,
        Event::Expired,
        Event::RanOut,
        Event::ToldOfLoss,
        Event::ForceTold,
        Event::TurnPassedOn,
        Event::DeadDropped,
        Event::PlaceRegained,
        Event::LateRefused,
        Event::SecondReleaseNeeded,
    ];
}
