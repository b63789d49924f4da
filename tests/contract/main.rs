//! The rules of a store, run against stores that keep them, and against stores that break them one by one.
#![allow(clippy::unwrap_used, reason = "a test")]
use leasehold::{
    Key, StoreError,
    store::{Claim, Claimed, Freed, Holding, MemoryStore, Owner, Renewal, Renewed, Store, contract::check},
};
use std::future::ready;

mod agreement;
mod toy;
use toy::{Bug, Bug::*, Toy};

#[tokio::test(start_paused = true)]
async fn the_embedded_store_keeps_every_rule() {
    assert_eq!(check(async || MemoryStore::new()).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_store_keeps_every_rule_in_real_time_and_among_threads() {
    let check = tokio::spawn(check(|| ready(MemoryStore::new())));
    assert_eq!(check.await.unwrap(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn the_plainest_store_keeps_every_rule() {
    assert_eq!(check(async || Toy::default()).await, Ok(()));
}

/// A store of required methods alone: no line, no values, no pushes, no lists of its own.
struct Least(Toy);

impl Store for Least {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        let mut claim = claim.clone();
        claim.line = false;
        self.0.claim(&claim).await
    }
    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        self.0.renew(renewal).await
    }
    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        self.0.release(key, owner).await
    }
    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        self.0.inspect(key).await
    }
    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        self.0.force_release(key).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_needs_no_line_and_no_values() {
    assert_eq!(check(async || Least(Toy::default())).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_breaks_a_rule_is_told_which() {
    let mut missed = Vec::new();
    for (bug, rule) in MISTAKES {
        let found = check(async || Toy::with(*bug)).await.map_err(|broken| broken.rule);
        if found != Err(rule) {
            missed.push((bug, found));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// What a store may do wrong, and the rule that it breaks with it.
const MISTAKES: &[(Bug, &str)] = &[
    (ClaimIsTwoSteps, "of many who ask at once one gets the key"),
    (ClaimRepeatedGetsAnotherFence, "a claim that is repeated is held under the same fence"),
    (ClaimRepeatedKeepsTheOldTtl, "a claim that is repeated gives the whole TTL again"),
    (ClaimRepeatedShortens, "a claim that is repeated never shortens"),
    (ClaimLateTakesAllTheSame, "a claim that is late changes nothing"),
    (RenewsForAnybody, "only the owner renews"),
    (RenewsUnderAnyFence, "only the owner's fence renews"),
    (RenewalCreates, "a renewal creates nothing"),
    (RenewalShortens, "a renewal never shortens"),
    (RenewalDoesNothing, "a renewal gives the whole TTL again"),
    (RenewalGetsAnotherFence, "a fence stays as it is through renewals"),
    (ListIsAnsweredBackwards, "renewals in a list are answered one by one, in their order"),
    (ListEndsAtTheFirstTrouble, "renewals in a list are answered one by one, in their order"),
    (ReleasesForAnybody, "only the owner releases"),
    (ReleaseDoesNothing, "a release frees the key"),
    (ReleaseAlwaysSaysReleased, "only the owner releases"),
    (ForceDoesNothing, "force frees what anybody holds, and says whether anybody did"),
    (ForceAlwaysSaysTrue, "force frees what anybody holds, and says whether anybody did"),
    (FenceRestartsAfterRelease, "a fence grows across a release"),
    (FenceRestartsAfterExpiry, "a fence grows across an expiry"),
    (FenceRestartsAfterForce, "a fence grows across a force"),
    (EndsEarly, "nobody gets a key before its TTL is over"),
    (NeverEnds, "what was held is nobody's once its TTL is over"),
    (RetryAtOnce, "who is told when to come again is told a time within the TTL"),
    (RetryFarTooLate, "who is told when to come again is told a time within the TTL"),
    (InspectNamesTheWrongFence, "the holder can be looked up"),
    (KeysIgnoreCase, "keys that look alike are kept apart, or refused"),
    (LineIsAStack, "who waits is told how many come first, and the last fence"),
    (LineTwicePlaces, "who asks again keeps the place, and has only one"),
    (LineForgetsPlaces, "who asks again keeps the place, and has only one"),
    (LineCountsNobody, "who waits is told how many come first, and the last fence"),
    (LineSeesNothing, "who waits is told how many come first, and the last fence"),
    (TicketIgnored, "a place that was lost is given back for its ticket"),
    (TryJumpsTheLine, "an expiry leaves the key to the first who waits"),
    (TakingStaysInLine, "who gets the key has left the line"),
    (ReleaseStaysInLine, "a release leaves the line"),
    (GrantsForTheWholeTtl, "who waits and falls silent holds up nobody after a release"),
    (GrantsToTheDead, "who waits and dies is passed over in a release"),
    (DeadStayFirst, "who waits and falls silent holds up nobody after an expiry"),
    (ForceForgetsTheLine, "a force leaves the key to the first who waits"),
    (PushNamesTheWrongFence, "word of a grant is true"),
    (WriteIgnoresFences, "no older fence writes after a newer"),
    (WriteRefusesTheSameFence, "no older fence writes after a newer"),
    (WriteRefusesQuietly, "no older fence writes after a newer"),
    (WriteRoundsFences, "no older fence writes after a newer"),
    (WriteIsTwoSteps, "of many who write at once the newest fence is last"),
    (WriteCutsAtZero, "what was written is read"),
];
