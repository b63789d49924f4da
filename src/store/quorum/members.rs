//! The members, all asked at once.
use super::{
    Hold, Kept, Member,
    owners::Owners,
    stake::Stake,
    tally::{Done, Size},
};
use crate::{
    Key,
    clock::{Clock, Moment},
    error::StoreError,
    store::{Freed, Owner},
};
use futures_util::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};
use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    time::{Instant, timeout, timeout_at},
};

pub(super) struct Members<M> {
    pub(super) all: Box<[M]>,
    pub(super) size: Size,
    pub(super) clock: Clock,
    pub(super) owners: Owners,
    pub(super) quarantine: OnceLock<Duration>,
    /// The longest TTL that was asked for, in nanoseconds.
    longest: AtomicU64,
    /// Where what is left to do is done; where the caller is, if not set.
    runtime: Option<Handle>,
}

type Call<A> = Pin<Box<dyn Future<Output = A> + Send>>;

/// What an answer adds.
pub(super) struct Heard<V> {
    /// The member did say something.
    pub(super) answered: bool,
    /// Enough is known.
    pub(super) verdict: Option<V>,
}

/// How far the members' clocks may be apart, if nothing else is said.
const CLOCKS: Duration = Duration::from_secs(2);

/// The longest time that one release may take before it is tried again.
const RELEASE: Duration = Duration::from_secs(2);

/// A majority has answered and does not agree: the others get twice the time that it took, and this at least.
const LEAST_WAIT: Duration = Duration::from_millis(10);

impl<M: Member> Members<M> {
    pub(super) fn new(all: Vec<M>, clock: Clock, runtime: Option<Handle>) -> Self {
        Members {
            size: Size::of(all.len()),
            all: all.into(),
            clock,
            owners: Owners::default(),
            quarantine: OnceLock::new(),
            longest: AtomicU64::new(0),
            runtime,
        }
    }

    /// How old a member has to be to take part in new leases: older than any lease that it may have forgotten, and than
    /// the clocks are apart, so that fences grow though it forgot the last.
    pub(super) fn settled(&self, ttl: Duration) -> Duration {
        let ttl = u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX);
        let longest = self.longest.fetch_max(ttl, Ordering::Relaxed).max(ttl);
        self.quarantine.get().copied().unwrap_or(Duration::from_nanos(longest) + CLOCKS)
    }

    /// Asks all members at once, and hears them until enough is known; `None` when it never is. Nobody waits for those
    /// who are late, but they are heard to the end in the background, for at most `limit`.
    pub(super) async fn ask<A: Send + 'static, V>(
        self: &Arc<Self>,
        limit: Duration,
        call: impl Fn(Arc<Self>, usize) -> Call<A>,
        mut add: impl FnMut(A) -> Heard<V>,
    ) -> Option<V> {
        let since = Instant::now();
        let mut calls: FuturesUnordered<_> = (0..self.all.len()).map(|member| call(self.clone(), member)).collect();
        let (mut answered, mut end) = (0, None);
        let verdict = loop {
            let next = match end {
                None => calls.next().await,
                Some(end) => timeout_at(end, calls.next()).await.unwrap_or(None),
            };
            let Some(answer) = next else { break None };
            let heard = add(answer);
            if heard.verdict.is_some() {
                break heard.verdict;
            }
            answered += usize::from(heard.answered);
            if answered >= self.size.majority && end.is_none() {
                end = Some(Instant::now() + LEAST_WAIT.max(since.elapsed() * 2));
            }
        };
        if !calls.is_empty() {
            self.spawn(async move {
                let to_the_end = async { while calls.next().await.is_some() {} };
                // What isn't answered by then is counted as unanswered.
                let _ = timeout(limit, to_the_end).await;
            });
        }
        verdict
    }

    /// A list of confirmations, to one member. `stakes` are theirs, where there are any.
    pub(super) fn hold(
        self: Arc<Self>,
        member: usize,
        holds: Arc<[Hold]>,
        stakes: Arc<[Option<Arc<Stake>>]>,
    ) -> Call<Vec<Result<Kept, StoreError>>> {
        let now = self.clock.now();
        // One that takes nothing leaves nothing, however late it comes.
        let takes = |(hold, stake): (&Hold, &Option<Arc<Stake>>)| match stake {
            Some(stake) if hold.create => stake.asks(member, now.after(hold.not_after * 2)),
            _ => {}
        };
        holds.iter().zip(stakes.iter()).for_each(takes);
        Box::pin(async move {
            let mut answers = match self.all.get(member) {
                Some(member) => member.hold_all(&holds).await,
                None => Vec::new(),
            };
            let missing = || Err(StoreError::unavailable("a member gave fewer answers than it was asked for"));
            answers.resize_with(holds.len(), missing);
            for ((hold, stake), answer) in holds.iter().zip(stakes.iter()).zip(&answers) {
                match (stake, answer) {
                    (Some(stake), answer) if hold.create => {
                        stake.heard(member, answer.as_ref().map(|kept| *kept == Kept::Ours));
                    }
                    (Some(stake), Ok(Kept::Ours)) => stake.found(member),
                    _ => {}
                }
            }
            answers
        })
    }

    /// Gives back what an owner may have; whether there was anything. Returns when a majority has let go of it.
    pub(super) async fn release(self: &Arc<Self>, key: &Key, owner: &Owner) -> Result<Freed, StoreError> {
        let stakes = self.owners.part(key, owner);
        // Side by side: what it has won does not wait for what an attempt that was lost may have at a member that hangs.
        let each = stakes.iter().map(|stake| {
            let rest = Rest { members: self, owner, stake };
            async move {
                let any = self.release_one(stake).await;
                drop(rest);
                any
            }
        });
        let mut any = false;
        for one in join_all(each).await {
            any |= one?;
        }
        self.owners.forget(key, owner, &stakes);
        Ok(if any { Freed::Released } else { Freed::Gone })
    }

    async fn release_one(self: &Arc<Self>, stake: &Arc<Stake>) -> Result<bool, StoreError> {
        let concerned = (0..self.all.len()).filter(|member| stake.may_be_at(*member)).count();
        let mut done = Done::new(self.size, self.all.len() - concerned);
        let call = |members: Arc<Self>, member| -> Call<_> {
            let stake = stake.clone();
            Box::pin(
                async move { if stake.may_be_at(member) { Some(members.let_go(&stake, member).await) } else { None } },
            )
        };
        let verdict = self.ask(RELEASE, call, |answer| match answer {
            Some(answer) => Heard { answered: answer.is_ok(), verdict: done.add(answer) },
            // Where a majority has nothing, nobody waits for the others.
            None => Heard { answered: false, verdict: done.so_far() },
        });
        match verdict.await {
            Some(any) => Ok(any),
            None => done.last(),
        }
    }

    /// One release at one member.
    async fn let_go(&self, stake: &Stake, member: usize) -> Result<bool, StoreError> {
        let Some(store) = self.all.get(member) else { return Ok(false) };
        let found = stake.releases(member);
        let freed = store.release(&stake.key, &stake.owner).await?;
        stake.released(member, found);
        Ok(freed == Freed::Released)
    }

    /// Gives back in the background what an attempt may have, also where it comes to have it only later. `after`: releases
    /// are under way, and have so much time.
    pub(super) fn give_back(self: &Arc<Self>, owner: &Owner, stake: &Arc<Stake>, after: Duration) {
        if !(0..self.all.len()).any(|member| stake.may_be_at(member)) {
            self.owners.forget(&stake.key, owner, std::slice::from_ref(stake));
            return;
        }
        if stake.leaving.swap(true, Ordering::AcqRel) {
            return;
        }
        let (members, owner, leaving) = (self.clone(), owner.clone(), stake.clone());
        let spawned = self.spawn(async move {
            let until = members.clock.now().after(leaving.ttl);
            if !after.is_zero() {
                tokio::time::sleep(after).await;
            }
            let each = (0..members.all.len()).map(|member| members.free(&leaving, member, until));
            let mut all: FuturesUnordered<_> = each.collect();
            while all.next().await.is_some() {}
            drop(all);
            members.owners.forget(&leaving.key, &owner, std::slice::from_ref(&leaving));
        });
        if !spawned {
            // Whoever released the owner can still do it.
            stake.leaving.store(false, Ordering::Release);
        }
    }

    /// Releases at one member: at once, and again when nothing that is on its way can be carried out any more.
    async fn free(&self, stake: &Stake, member: usize, until: Moment) {
        self.release_until(stake, member, until).await;
        if stake.may_be_at(member) {
            self.clock.sleep_until(stake.settled_at(member)).await;
            self.release_until(stake, member, stake.settled_at(member).after(RELEASE)).await;
        }
    }

    async fn release_until(&self, stake: &Stake, member: usize, until: Moment) {
        let patience = RELEASE.min(stake.ttl);
        let mut pause = patience / 8;
        while stake.may_be_at(member) {
            match timeout(patience, self.let_go(stake, member)).await {
                Ok(Ok(_)) => return,
                Ok(Err(error)) if !error.may_pass() => {
                    tracing::warn!(key = %stake.key, %error, "a member of the quorum refused a release; the TTL will free the key");
                    return;
                }
                // A member that is down for long is not asked often.
                _ => pause = pause.saturating_mul(2),
            }
            if self.clock.now().after(pause) >= until {
                return;
            }
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        }
    }

    /// Whether there was a runtime to do it on.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> bool {
        let here = || Handle::try_current().ok();
        match self.runtime.clone().or_else(here) {
            Some(runtime) => {
                runtime.spawn(task);
                true
            }
            None => false,
        }
    }
}

/// What is left to be given back, however a release ends.
struct Rest<'a, M: Member> {
    members: &'a Arc<Members<M>>,
    owner: &'a Owner,
    stake: &'a Arc<Stake>,
}

impl<M: Member> Drop for Rest<'_, M> {
    fn drop(&mut self) {
        self.members.give_back(self.owner, self.stake, RELEASE.min(self.stake.ttl) / 4);
    }
}
