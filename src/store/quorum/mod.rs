//! A store made of stores, of which a majority decides: Redlock done with care, and with fences.
//!
//! The rules are argued in `docs/safety.md`. An acquisition takes two steps: the members are asked for the key, and each
//! that gives it proposes a fence; then the largest proposal of a majority is written back to a majority, before the lease
//! is handed out. Two majorities share a member, so the next owner's fence is larger.
mod member;
mod members;
mod owners;
mod stake;
mod tally;

pub use member::{Hold, Kept, Member, Proposal, Proposed};
pub(crate) use tally::Size;

use self::{
    members::{Heard, Members},
    owners::{Held, Turn},
    stake::Stake,
    tally::{Done, Holds, Proposals, Views, Won},
};
use crate::{
    Key,
    clock::{Clock, Moment},
    error::{Invalid, StoreError},
    store::{Claim, Claimed, FencedWrite, Freed, Holding, Owner, Renewal, Renewed, Store, Wrote},
    term::drift,
};
use std::{fmt, sync::Arc, time::Duration};
use tokio::runtime::Handle;

/// Leases that a majority of independent stores keeps: they go on while any minority is down, slow or unreachable.
///
/// The members must not replicate to each other, and there are as many of them as there are in all, not as many as answer.
/// There is no line: who waits asks again after a pause that is left to chance. It keeps no values
/// ([`write`](Store::write) is refused).
///
/// ```
/// use leasehold::{Clock, Leases, store::{MemoryStore, quorum::QuorumStore}};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = Clock::tokio();
/// let members = (0..3).map(|_| MemoryStore::with_clock(clock.clone()));
/// let store = QuorumStore::with_clock(members, clock.clone())?.quarantine(std::time::Duration::ZERO);
/// let leases = Leases::builder().clock(clock).build(store)?;
/// let lease = leases.lease("report:monthly").acquire().await?;
/// # lease.release().await?; Ok(()) }
/// ```
pub struct QuorumStore<M> {
    members: Arc<Members<M>>,
}

/// How long a call that has no limit of its own is worth anything to anybody.
const EXCHANGE: Duration = Duration::from_secs(2);

impl<M: Member> QuorumStore<M> {
    /// A quorum of these.
    ///
    /// # Errors
    /// When they are fewer than three, or an even number: of four no fewer may fail than of three.
    pub fn new(members: impl IntoIterator<Item = M>) -> Result<Self, Invalid> {
        Self::with_clock(members, Clock::system())
    }

    /// A quorum on another clock: the one of the [`Leases`](crate::Leases) above it.
    ///
    /// # Errors
    /// Those of [`new`](QuorumStore::new).
    pub fn with_clock(members: impl IntoIterator<Item = M>, clock: Clock) -> Result<Self, Invalid> {
        Self::on(members.into_iter().collect(), clock, None)
    }

    /// `runtime`: where what is left to do is done.
    pub(crate) fn on(members: Vec<M>, clock: Clock, runtime: Option<Handle>) -> Result<Self, Invalid> {
        check_size(members.len())?;
        Ok(QuorumStore { members: Arc::new(Members::new(members, clock, runtime)) })
    }

    /// How long a member that has started takes no part in new leases, because it may have forgotten its fences and what it
    /// had given away: longer than any TTL in use, and than the members' clocks are apart. By default the longest TTL that
    /// was asked for here, and 2 s. Zero for members that never lose an answered write. The first call counts.
    #[must_use]
    pub fn quarantine(self, quarantine: Duration) -> Self {
        self.members.quarantine.get_or_init(|| quarantine);
        self
    }

    /// One attempt at a majority.
    async fn attempt(&self, claim: &Claim, stake: Arc<Stake>, given: Moment) -> Result<Claimed, StoreError> {
        let members = &self.members;
        let attempt = Attempt { members, owner: &claim.owner, stake };
        let until = given.after(claim.not_after);
        // Before the first is sent: validity counts from here.
        let sent = members.clock.now();
        if sent > until {
            return Ok(Claimed::Late);
        }
        let fence = match attempt.propose(claim, until.since(sent)).await {
            Won::Fence(fence) => fence,
            Won::Not(answer) => return answer,
        };
        match attempt.confirm(claim, fence, until.since(members.clock.now())).await? {
            Renewed::Renewed | Renewed::Thin { .. } => {}
            Renewed::Gone | Renewed::Taken => return Ok(Claimed::busy(None, None)),
        }
        let valid_until = sent.after(claim.ttl.saturating_sub(drift(claim.ttl)));
        if members.clock.now() >= valid_until {
            return Err(StoreError::unavailable("a majority agreed when the lease was over"));
        }
        let held = Held { stake: attempt.stake.clone(), fence, valid_until };
        if !members.owners.won(&claim.owner, held) {
            return Err(StoreError::unavailable("the owner was released meanwhile"));
        }
        Ok(Claimed::held(fence))
    }

    fn answer(&self, renewal: &Renewal, held: Option<&Held>, verdict: &Result<Renewed, StoreError>, sent: Moment) {
        let Some(held) = held else { return };
        match verdict {
            Ok(Renewed::Renewed | Renewed::Thin { .. }) => {
                let valid_until = sent.after(renewal.ttl.saturating_sub(drift(renewal.ttl)));
                self.members.owners.renewed(&renewal.owner, &held.stake, valid_until, sent.after(renewal.ttl * 2));
            }
            Ok(Renewed::Gone | Renewed::Taken) => {
                self.members.owners.lost(&renewal.owner, &held.stake);
                self.members.give_back(&renewal.owner, &held.stake, Duration::ZERO);
            }
            Err(_) => {}
        }
    }
}

/// # Errors
/// As [`QuorumStore::new`].
pub(crate) fn check_size(members: usize) -> Result<(), Invalid> {
    if members < 3 || members.is_multiple_of(2) {
        return Err(Invalid::new("quorum", "an odd number of members, at least three"));
    }
    Ok(())
}

/// An attempt under way. What it has is given back unless it has won.
struct Attempt<'a, M: Member> {
    members: &'a Arc<Members<M>>,
    owner: &'a Owner,
    stake: Arc<Stake>,
}

impl<M: Member> Attempt<'_, M> {
    async fn propose(&self, claim: &Claim, window: Duration) -> Won {
        let Attempt { members, stake, .. } = self;
        let mut proposal = Proposal::new(claim.key.clone(), stake.owner.clone(), claim.ttl);
        (proposal.not_after, proposal.settled) = (window, members.settled(claim.ttl));
        let proposal = Arc::new(proposal);
        let surely_late = members.clock.now().after(window * 2);
        let mut votes = Proposals::new(members.size);
        let verdict = members.ask(
            window,
            |members, member| {
                let (stake, proposal) = (stake.clone(), proposal.clone());
                stake.asks(member, surely_late);
                Box::pin(async move {
                    let answer = members.all[member].propose(&proposal).await;
                    stake.heard(member, answer.as_ref().map(|answer| matches!(answer, Proposed::Held { .. })));
                    answer
                })
            },
            |answer| {
                // A young member is as good as absent: those who are far are waited for all the same.
                let answered = answer.as_ref().is_ok_and(|answer| !matches!(answer, Proposed::Young { .. }));
                Heard { answered, verdict: votes.add(answer) }
            },
        );
        let verdict = verdict.await;
        verdict.unwrap_or_else(|| Won::Not(votes.lost()))
    }

    /// Writes the fence back.
    async fn confirm(&self, claim: &Claim, fence: u64, window: Duration) -> Result<Renewed, StoreError> {
        let Attempt { members, stake, .. } = self;
        let mut hold = Hold::new(claim.key.clone(), stake.owner.clone(), fence, claim.ttl);
        hold.not_after = window;
        let (holds, stakes) = (Arc::from([hold]), Arc::from([Some(stake.clone())]));
        let mut votes = Holds::new(members.size);
        let verdict = members.ask(
            window,
            |members, member| members.hold(member, Arc::clone(&holds), Arc::clone(&stakes)),
            |answers| {
                answers.into_iter().for_each(|answer| votes.add(answer));
                // A majority has just agreed. It is waited for, whoever else has nothing to say.
                Heard { answered: false, verdict: votes.is_decided().then_some(()) }
            },
        );
        verdict.await;
        votes.verdict()
    }
}

impl<M: Member> Drop for Attempt<'_, M> {
    fn drop(&mut self) {
        let has_won = self
            .members
            .owners
            .held(&self.stake.key, self.owner)
            .is_some_and(|held| Arc::ptr_eq(&held.stake, &self.stake));
        if !has_won {
            self.members.owners.failed(self.owner, &self.stake);
            self.members.give_back(self.owner, &self.stake, Duration::ZERO);
        }
    }
}

impl<M: Member> Store for QuorumStore<M> {
    fn claim(&self, claim: &Claim) -> impl Future<Output = Result<Claimed, StoreError>> + Send {
        let given = self.members.clock.now();
        async move {
            // The caller's owner asks again and again, but no two attempts may share one: late answers would be mistaken.
            let Members { owners, clock, all, .. } = &*self.members;
            let owner = claim.owner.draw_another()?;
            let stake = Arc::new(Stake::new(claim.key.clone(), owner, claim.ttl, all.len()));
            loop {
                let now = clock.now();
                match owners.turn(&claim.owner, &stake, now.after(claim.ttl * 2 + claim.not_after), now) {
                    Turn::Begin => return self.attempt(claim, stake, given).await,
                    // An error when the owner has left: then it begins anew.
                    Turn::Wait(mut over) => drop(over.changed().await),
                    Turn::Held(Held { fence, .. }) => {
                        let again = Renewal::new(claim.key.clone(), claim.owner.clone(), fence, claim.ttl);
                        if self.renew(&again).await? == Renewed::Renewed {
                            return Ok(Claimed::held(fence));
                        }
                    }
                }
            }
        }
    }

    async fn renew(&self, renewal: &Renewal) -> Result<Renewed, StoreError> {
        let answer = self.renew_all(std::slice::from_ref(renewal)).await.pop();
        answer.unwrap_or_else(|| Err(StoreError::unavailable("no answer")))
    }

    async fn renew_all(&self, list: &[Renewal]) -> Vec<Result<Renewed, StoreError>> {
        let members = &self.members;
        let sent = members.clock.now();
        let held: Vec<Option<Held>> =
            list.iter().map(|renewal| members.owners.held(&renewal.key, &renewal.owner)).collect();
        let wanted: Vec<usize> =
            (0..list.len()).filter(|at| held[*at].as_ref().is_none_or(|held| held.fence == list[*at].fence)).collect();
        let hold = |at: usize| {
            let (renewal, held) = (&list[at], &held[at]);
            // Who holds nothing here may still be told who does.
            let owner = held.as_ref().map_or(&renewal.owner, |held| &held.stake.owner);
            let mut hold = Hold::new(renewal.key.clone(), owner.clone(), renewal.fence, renewal.ttl);
            // A lease that is over is put back nowhere.
            hold.create = held.as_ref().is_some_and(|held| sent < held.valid_until);
            hold.not_after = (renewal.ttl / 3).min(EXCHANGE);
            hold
        };
        let holds: Arc<[Hold]> = wanted.iter().map(|at| hold(*at)).collect();
        let stakes: Arc<[Option<Arc<Stake>>]> =
            wanted.iter().map(|at| held[*at].as_ref().map(|held| held.stake.clone())).collect();
        let mut votes: Vec<Holds> = wanted.iter().map(|_| Holds::new(members.size)).collect();
        if !wanted.is_empty() {
            let verdict = members.ask(
                EXCHANGE,
                |members, member| members.hold(member, holds.clone(), stakes.clone()),
                |answers| {
                    let answered = answers.iter().any(Result::is_ok);
                    votes.iter_mut().zip(answers).for_each(|(votes, answer)| votes.add(answer));
                    Heard { answered, verdict: votes.iter().all(Holds::is_decided).then_some(()) }
                },
            );
            verdict.await;
        }
        let mut answers: Vec<_> = list.iter().map(|_| Ok(Renewed::Taken)).collect();
        for (at, votes) in wanted.into_iter().zip(votes) {
            let verdict = votes.verdict();
            self.answer(&list[at], held[at].as_ref(), &verdict, sent);
            answers[at] = verdict;
        }
        answers
    }

    async fn release(&self, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        self.members.release(key, owner).await
    }

    async fn inspect(&self, key: &Key) -> Result<Option<Holding>, StoreError> {
        let mut views = Views::new(self.members.size);
        let verdict = self.members.ask(
            EXCHANGE,
            |members, member| {
                let key = key.clone();
                Box::pin(async move { members.all[member].inspect(&key).await })
            },
            |view| Heard { answered: view.is_ok(), verdict: views.add(view) },
        );
        match verdict.await {
            Some(view) => Ok(view),
            None => views.last(),
        }
    }

    async fn force_release(&self, key: &Key) -> Result<bool, StoreError> {
        let mut done = Done::new(self.members.size, 0);
        let verdict = self.members.ask(
            EXCHANGE,
            |members, member| {
                let key = key.clone();
                Box::pin(async move { members.all[member].force_release(&key).await })
            },
            |answer| Heard { answered: answer.is_ok(), verdict: done.add(answer) },
        );
        match verdict.await {
            Some(any) => Ok(any),
            None => done.last(),
        }
    }

    async fn write(&self, _: &FencedWrite) -> Result<Wrote, StoreError> {
        Err(StoreError::refused(NO_VALUES))
    }

    async fn read(&self, _: &Key) -> Result<Option<Vec<u8>>, StoreError> {
        Err(StoreError::refused(NO_VALUES))
    }

    fn check(&self, key: &Key) -> Result<(), Invalid> {
        self.members.all.iter().try_for_each(|member| member.check(key))
    }
}

const NO_VALUES: &str =
    "a quorum keeps leases and no values; keep the value in one store, which checks the lease's fence";

impl<M> fmt::Debug for QuorumStore<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumStore").field("size", &self.members.size).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Identity, MemoryStore};

    const TTL: Duration = Duration::from_secs(3);

    /// Whatever became of it: won and released, lost to another, forced, run out, dropped midway.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_remembered_of_an_owner_that_has_left() {
        let clock = Clock::tokio();
        let members = (0..3).map(|_| MemoryStore::with_clock(clock.clone()));
        let store = QuorumStore::with_clock(members, clock.clone()).unwrap().quarantine(Duration::ZERO);
        let me = Identity::new("me").unwrap();
        let claim = || Claim::new("k".into(), Owner::draw(&me).unwrap(), TTL);

        let (first, second) = (claim(), claim());
        let Ok(Claimed::Held { fence }) = store.claim(&first).await else { panic!() };
        assert!(matches!(store.claim(&second).await, Ok(Claimed::Busy { .. })));
        drop(store.claim(&second));
        store.release(&first.key, &first.owner).await.unwrap();
        tokio::time::sleep(TTL).await;
        assert!(store.members.owners.is_empty());

        let third = claim();
        assert!(matches!(store.claim(&third).await, Ok(Claimed::Held { fence: next }) if next > fence));
        store.force_release(&third.key).await.unwrap();
        let renewal = Renewal::new(third.key.clone(), third.owner.clone(), fence, TTL);
        assert_eq!(store.renew(&renewal).await, Ok(Renewed::Taken), "another fence");
        store.release(&third.key, &third.owner).await.unwrap();
        let fourth = claim();
        assert!(matches!(store.claim(&fourth).await, Ok(Claimed::Held { .. })));
        tokio::time::sleep(TTL * 2).await;
        assert_eq!(store.release(&fourth.key, &fourth.owner).await, Ok(Freed::Gone));
        tokio::time::sleep(TTL).await;
        assert!(store.members.owners.is_empty());
    }

    #[test]
    fn a_quorum_can_be_shared_and_sent() {
        const fn shared<T: Send + Sync + 'static>() {}
        shared::<QuorumStore<MemoryStore>>();
    }
}
