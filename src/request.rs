//! One acquisition, from claim to lease: waiting, giving up, leaving nothing behind.
use crate::{
    Key, Result,
    clock::Moment,
    engine::Keeper,
    error::{Error, StoreError},
    farewell::Farewell,
    lease::{Lease, LeaseView},
    settings::{Plan, Settings, Wait},
    store::{Claim, Claimed, Owner},
    tenure::{Grant, Tenure},
    term::{self, Term},
};
use std::{fmt, future::Future, sync::Arc, time::Duration};
use tracing::Instrument;

/// A request for a lease, to be configured and then sent with [`acquire`](LeaseRequest::acquire),
/// [`try_acquire`](LeaseRequest::try_acquire) or [`run`](LeaseRequest::run). It sends nothing by itself, borrows nothing,
/// and can be cloned and used again: each use is an acquisition of its own.
#[must_use = "a request does nothing until `acquire`, `try_acquire` or `run`"]
#[derive(Clone)]
pub struct LeaseRequest {
    keeper: Arc<Keeper>,
    defaults: Arc<Settings>,
    settings: Settings,
    key: Key,
}

impl LeaseRequest {
    pub(crate) fn new(keeper: Arc<Keeper>, defaults: Arc<Settings>, key: Key) -> Self {
        LeaseRequest { keeper, defaults, settings: Settings::default(), key }
    }

    /// How long the lease lasts without renewal: 100 ms to 365 days.
    #[doc(alias = "period")]
    #[doc(alias = "lease_time")]
    #[doc(alias = "expiry")]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = Some(ttl);
        self
    }

    /// How long before the end of validity the token fires, when the lease can't be renewed. Less than a third of the
    /// TTL; a tenth by default.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = Some(grace);
        self
    }

    /// How long one exchange with the store may take before it is tried again: 10 ms to a third of the TTL. By default a
    /// sixth of it, 2 s at most.
    pub fn attempt(mut self, attempt: Duration) -> Self {
        self.settings.attempt = Some(attempt);
        self
    }

    /// How long to wait for a key that somebody else holds: a duration, or a [`Wait`]. One TTL by default.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.settings.wait = Some(wait.into());
        self
    }

    /// Ends the lease after this long, however well it can be renewed: the token fires one grace before. Longer than the
    /// grace; no bound by default.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.settings.max_hold = Some(max_hold);
        self
    }

    /// Never renews: the lease ends with its TTL.
    pub(crate) fn fixed(mut self) -> Self {
        self.settings.fixed = true;
        self
    }

    /// Acquires the lease: one round trip when the key is free; otherwise it waits as [`wait`](LeaseRequest::wait) says.
    /// While the store is unavailable it keeps trying, for as long.
    ///
    /// May be dropped at any time, timed out, or lose a `select!`: whatever was acquired by then is released in the
    /// background.
    ///
    /// # Errors
    /// [`Error::Contended`] when the wait is over; [`Error::Store`] when the store refused, or was unavailable to the
    /// end; [`Error::Invalid`] for settings or a key that can't work; [`Error::Shutdown`].
    pub async fn acquire(self) -> Result<Lease> {
        let plan = self.settings.over(&self.defaults).plan()?;
        self.keeper.check(&self.key)?;
        self.keeper.ready()?;
        let span = tracing::info_span!("acquire", key = %self.key);
        Pursuit::new(self.keeper, self.key, plan)?.catch().instrument(span).await
    }

    /// Tries once: `None` when somebody else holds the key. One round trip. Cancel-safe as
    /// [`acquire`](LeaseRequest::acquire) is.
    ///
    /// # Errors
    /// As for [`acquire`](LeaseRequest::acquire), but for [`Error::Contended`].
    pub async fn try_acquire(self) -> Result<Option<Lease>> {
        match self.wait(Wait::No).acquire().await {
            Ok(lease) => Ok(Some(lease)),
            Err(Error::Contended { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Acquires, does the work under guard with a look at the lease in hand, and releases. As
    /// [`with_lease`](crate::Leases::with_lease), which hands out the token alone.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> leasehold::Result<()> {
    /// # let leases = leasehold::Leases::in_memory();
    /// let fence = leases.lease("report:monthly").run(async |lease| lease.fence()).await?;
    /// assert!(fence > 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`acquire`](LeaseRequest::acquire), and [`Error::Lost`] when the lease was lost before the work was done:
    /// then the work has been dropped. What a release finds changes nothing about a finished work's result.
    pub async fn run<F, Fut>(self, work: F) -> Result<Fut::Output>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future,
    {
        let lease = self.acquire().await?;
        let view = lease.view();
        let span = tracing::info_span!("lease", key = %lease.key(), fence = lease.fence());
        // The call of the closure is inside the guard too; guard and work are gone before the release is sent.
        let out = lease.guard(async move { work(view).await }).instrument(span).await?;
        match lease.release().await {
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the work is done, but its lease could not be released"),
        }
        Ok(out)
    }

    /// [`run`](LeaseRequest::run) for work that returns a `Result`: both kinds of error come out as one.
    ///
    /// # Errors
    /// Those of [`run`](LeaseRequest::run), converted, and the work's own.
    pub async fn try_run<F, Fut, T, E>(self, work: F) -> Result<T, E>
    where
        F: FnOnce(LeaseView) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        self.run(work).await?
    }
}

impl fmt::Debug for LeaseRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest").field("key", &self.key).field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// An acquisition under way. When it is dropped without having caught a lease, it leaves nothing behind.
struct Pursuit {
    keeper: Arc<Keeper>,
    plan: Plan,
    claim: Claim,
    started: Moment,
    /// The owner may have something in the store: a place, or the key itself.
    engaged: bool,
    /// A claim was sent and not answered; it may be carried out until then.
    echo_until: Moment,
    /// What the last answer was.
    last: Option<Obstacle>,
}

/// What stands between us and the lease.
enum Obstacle {
    /// Somebody else's lease.
    Holder { label: Option<Arc<str>>, remaining: Option<Duration> },
    /// Trouble with the store.
    Store(StoreError),
}

impl Pursuit {
    fn new(keeper: Arc<Keeper>, key: Key, plan: Plan) -> Result<Self> {
        let owner = Owner::draw(&keeper.identity).map_err(|error| Error::store("acquire", &key, error))?;
        let mut claim = Claim::new(key, owner, plan.ttl);
        claim.presence = plan.presence();
        let started = keeper.clock().now();
        Ok(Pursuit { keeper, plan, claim, started, engaged: false, echo_until: Moment(0), last: None })
    }

    async fn catch(mut self) -> Result<Lease> {
        let closing = self.keeper.closing.clone();
        let caught = tokio::select! {
            biased;
            () = closing.cancelled() => Err(Error::Shutdown),
            caught = self.chase() => caught,
        };
        // A shutdown that began meanwhile may have taken its list of leases before this one was on it.
        if closing.is_cancelled() { Err(Error::Shutdown) } else { caught }
    }

    async fn chase(&mut self) -> Result<Lease> {
        let mut pauses = Pauses::new(term::poll_interval(self.plan.ttl));
        let mut warned = self.started;
        let mut window = self.first_window();
        loop {
            let mut soonest = None;
            match self.ask(window).await {
                Ok(Answer::Caught(lease)) => return Ok(lease),
                Ok(Answer::Later(retry_in)) => soonest = retry_in,
                Err(error) if error.may_pass() => self.last = Some(Obstacle::Store(error)),
                Err(error) => return Err(Error::store("acquire", &self.claim.key, error)),
            }
            let left = self.left();
            if left.is_zero() {
                return Err(self.give_up());
            }
            if self.plan.wait == Wait::Forever {
                self.complain(&mut warned);
            }
            let pause = pauses.next(soonest).min(left);
            tokio::time::sleep(pause).await;
            window = self.plan.claim_window().min(self.left());
            if window.is_zero() {
                return Err(self.give_up());
            }
        }
    }

    /// One claim. The answer counts from before it was sent.
    async fn ask(&mut self, window: Duration) -> Result<Answer, StoreError> {
        let sent = self.keeper.clock().now();
        self.claim.not_after = window;
        let before = (self.engaged, self.echo_until);
        // Should this future be dropped from here on, the claim may still be carried out.
        self.engaged = true;
        self.echo_until = self.echo_until.max(sent.after(window * 2));
        let answer = self.keeper.bounded(window, self.keeper.store.claim(&self.claim)).await;
        let answered = answer.as_ref().err().is_none_or(|error| !error.may_pass());
        if answered {
            (self.engaged, self.echo_until) = before;
        }
        match answer? {
            Claimed::Held { fence } => {
                self.engaged = true;
                let term = Term::new(sent, self.plan.ttl, self.plan.ttl, self.plan.grace);
                // The answer took so long that the lease would be over before it began. Asking again renews it.
                if self.keeper.clock().now() >= term.cancel_at() {
                    return Ok(Answer::Later(Some(Duration::ZERO)));
                }
                Ok(Answer::Caught(self.keep(fence, term)))
            }
            Claimed::Queued { retry_in, ticket, holder, .. } => {
                self.engaged = true;
                self.claim.ticket = Some(ticket);
                self.last = Some(Obstacle::Holder { label: holder, remaining: retry_in });
                Ok(Answer::Later(retry_in))
            }
            Claimed::Busy { retry_in, holder } => {
                self.last = Some(Obstacle::Holder { label: holder, remaining: retry_in });
                Ok(Answer::Later(retry_in))
            }
            Claimed::Late => {
                self.last = Some(Obstacle::Store(StoreError::unavailable("the claim reached the store too late")));
                Ok(Answer::Later(None))
            }
        }
    }

    fn keep(&mut self, fence: u64, term: Term) -> Lease {
        // From here on the lease answers for the owner.
        self.engaged = false;
        let grant = Grant {
            key: self.claim.key.clone(),
            owner: self.claim.owner.clone(),
            fence,
            term,
            echo_until: self.echo_until,
        };
        tracing::debug!(fence, waited = ?self.waited(), "lease acquired");
        Lease::new(Tenure::begin(grant, self.plan, self.keeper.clone()))
    }

    fn waited(&self) -> Duration {
        self.keeper.clock().now().since(self.started)
    }

    /// How much of the wait is left.
    fn left(&self) -> Duration {
        match self.plan.wait {
            Wait::No => Duration::ZERO,
            Wait::UpTo(wait) => wait.saturating_sub(self.waited()),
            Wait::Forever => Duration::MAX,
        }
    }

    /// The first claim always has the time of one attempt, however short the wait; later ones end with the wait.
    fn first_window(&self) -> Duration {
        self.plan.claim_window().min(self.left().max(self.plan.attempt))
    }

    fn complain(&self, warned: &mut Moment) {
        let now = self.keeper.clock().now();
        if now.since(*warned) >= self.plan.ttl {
            *warned = now;
            let holder = match &self.last {
                Some(Obstacle::Holder { label, .. }) => label.as_deref(),
                _ => None,
            };
            tracing::warn!(waited = ?self.waited(), holder, "still waiting for a lease");
        }
    }

    fn give_up(&mut self) -> Error {
        let (key, waited) = (self.claim.key.clone(), self.waited());
        match self.last.take() {
            Some(Obstacle::Store(error)) => Error::store("acquire", &key, error),
            Some(Obstacle::Holder { label, remaining }) => Error::Contended { key, waited, holder: label, remaining },
            None => Error::Contended { key, waited, holder: None, remaining: None },
        }
    }
}

enum Answer {
    Caught(Lease),
    /// Not now; when asking again can first change something, if the store can tell.
    Later(Option<Duration>),
}

impl Drop for Pursuit {
    fn drop(&mut self) {
        let now = self.keeper.clock().now();
        let echo = now < self.echo_until;
        if !self.engaged && !echo {
            return;
        }
        self.keeper.bid_farewell(Farewell {
            key: self.claim.key.clone(),
            owner: self.claim.owner.clone(),
            attempt: self.plan.attempt,
            settling: None,
            until: now.after(self.plan.ttl),
            again_at: echo.then_some(self.echo_until),
            parting: self.keeper.partings.begin(),
        });
    }
}

/// How long to pause between claims: growing, with jitter, and never too short.
struct Pauses {
    next: Duration,
    longest: Duration,
}

impl Pauses {
    const FIRST: Duration = Duration::from_millis(16);
    const SHORTEST: Duration = Duration::from_millis(2);

    fn new(longest: Duration) -> Self {
        Pauses { next: Self::FIRST.min(longest), longest }
    }

    /// Half of it is left to chance, so that those who came together don't come back together. It ends when the holder's
    /// TTL does, should that be sooner.
    fn next(&mut self, soonest: Option<Duration>) -> Duration {
        let jitter = 0.5 + fastrand::f64() / 2.0;
        let pause = self.next.mul_f64(jitter);
        self.next = (self.next * 2).min(self.longest);
        let first_chance = soonest.map_or(pause, |soonest| soonest + Self::SHORTEST.mul_f64(0.5 + jitter));
        pause.min(first_chance).max(Self::SHORTEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_poll_interval_and_never_vanish() {
        let longest = Duration::from_secs(1);
        let mut pauses = Pauses::new(longest);
        let drawn: Vec<_> = (0..20).map(|_| pauses.next(None)).collect();
        assert!(drawn.iter().all(|pause| (Pauses::SHORTEST..=longest).contains(pause)), "{drawn:?}");
        assert!(drawn[0] <= Pauses::FIRST && drawn[19] >= longest / 2, "{drawn:?}");
        assert!(pauses.next(Some(Duration::ZERO)) >= Pauses::SHORTEST);
        assert!(pauses.next(Some(Duration::from_millis(40))) < Duration::from_millis(45));
    }
}
