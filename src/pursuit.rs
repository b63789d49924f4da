//! An acquisition under way, from the first claim to the lease: waiting, giving up, leaving nothing behind.
mod pauses;
mod place;

use self::{pauses::Pauses, place::Place};
use crate::{
    Key, Result,
    clock::Moment,
    engine::Keeper,
    error::{Error, StoreError},
    farewell::{Farewell, Parting},
    lease::Lease,
    settings::{Plan, Wait},
    store::{Claim, Claimed, Owner},
    tenure::{Grant, Tenure},
    term::{self, Term},
    waiting::Word,
};
use std::{
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

/// An acquisition under way. When it is dropped without having caught a lease, it leaves nothing behind.
pub(crate) struct Pursuit {
    keeper: Arc<Keeper>,
    plan: Plan,
    key: Key,
    owner: Owner,
    started: Moment,
    /// Claims that have not been answered: when each was sent, and when it is surely refused as too late.
    unanswered: Vec<(Moment, Moment)>,
    /// The owner may have something in the store: a place in the line, or the key itself.
    engaged: bool,
    place: Place,
    /// What stood in the way when last we looked.
    obstacle: Option<Obstacle>,
    pauses: Pauses,
    /// When to ask next.
    ask_at: Moment,
    /// When a wait without end was last complained of.
    complained: Moment,
    /// A shutdown waits for this, and then for the farewell that may come of it.
    _parting: Parting,
}

/// What stands between us and the lease.
enum Obstacle {
    /// `until`: its end, if it isn't renewed.
    Holder {
        label: Option<Arc<str>>,
        until: Option<Moment>,
    },
    Store(StoreError),
}

/// Claims on their way: seldom more than one. Not `FuturesUnordered`, which wakes its own task at every first poll of one.
type OnTheirWay = Vec<Pin<Box<dyn Future<Output = Asked> + Send>>>;

/// A claim that was sent, and what came of it.
struct Asked {
    sent: Moment,
    /// The wait ended before an attempt's time was over: no answer to it is no trouble of the store's.
    cut_short: bool,
    answer: Result<Claimed, StoreError>,
}

impl Pursuit {
    pub(crate) fn new(keeper: Arc<Keeper>, key: Key, plan: Plan) -> Result<Self> {
        let owner = Owner::draw(&keeper.identity).map_err(|error| Error::store("acquire", &key, error))?;
        let started = keeper.clock().now();
        // Before `catch` looks whether there is a shutdown.
        let parting = keeper.partings.begin();
        Ok(Pursuit {
            keeper,
            plan,
            key,
            owner,
            started,
            unanswered: Vec::new(),
            engaged: false,
            place: Place::default(),
            obstacle: None,
            pauses: Pauses::new(term::poll_interval(plan.ttl)),
            ask_at: started,
            complained: started,
            _parting: parting,
        })
    }

    pub(crate) async fn catch(mut self) -> Result<Lease> {
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
        let clock = self.keeper.clock().clone();
        // Before the first claim is sent: a grant may overtake the answer to it.
        let mut listener = self.waits().then(|| self.keeper.waiting.listen(&self.owner));
        let mut asked = OnTheirWay::new();
        // The first claim always has the time of one attempt, however short the wait.
        let first = self.plan.claim_window().min(self.left().max(self.plan.attempt));
        asked.push(Box::pin(self.ask(first)));
        loop {
            // With the wait over, what is still on its way may yet bring the lease; nothing new is sent.
            if self.left().is_zero() && asked.is_empty() {
                return Err(self.give_up());
            }
            let wake_at = if self.left().is_zero() { Moment::NEVER } else { self.ask_at.min(self.ends_at()) };
            tokio::select! {
                biased;
                asked = answered(&mut asked), if !asked.is_empty() => {
                    if let Some(lease) = self.heard(asked)? {
                        return Ok(lease);
                    }
                }
                word = word(&mut listener), if listener.is_some() => {
                    if let Some(lease) = self.told(word) {
                        return Ok(lease);
                    }
                }
                () = clock.sleep_until(wake_at), if wake_at != Moment::NEVER => {
                    if clock.now() >= self.ask_at && !self.left().is_zero() {
                        asked.push(Box::pin(self.ask(self.plan.claim_window().min(self.left()))));
                    }
                    self.complain();
                }
            }
        }
    }

    /// Sends a claim, whether or not the last was answered: a slow answer must not cost the place in the line.
    fn ask(&mut self, window: Duration) -> impl Future<Output = Asked> + use<> {
        let sent = self.keeper.clock().now();
        let mut claim = Claim::new(self.key.clone(), self.owner.clone(), self.plan.ttl);
        claim.presence = self.plan.presence();
        claim.line = self.waits();
        claim.ticket = self.place.ticket;
        claim.not_after = window;
        self.place.asked(sent);
        self.unanswered.retain(|(_, until)| *until > sent);
        // Its time, and as long again as a slow answer of the server's may have misled us about its clock.
        self.unanswered.push((sent, sent.after(window + window.max(self.plan.claim_window()))));
        self.ask_at = self.next_poll(sent);
        let engine = self.keeper.0.clone();
        let cut_short = window < self.plan.attempt;
        async move {
            let answer = engine.bounded(window, engine.store.claim(&claim)).await;
            Asked { sent, cut_short, answer }
        }
    }

    /// An answer counts from when its claim was sent (rule C1).
    fn heard(&mut self, Asked { sent, cut_short, answer }: Asked) -> Result<Option<Lease>> {
        match answer {
            // We have it, and may not use it: the drop gives it back. Nobody is in the way, so there is no use in waiting.
            Err(error @ StoreError::Replicas { .. }) => {
                self.answered(sent);
                self.engaged = true;
                Err(Error::store("acquire", &self.key, error))
            }
            Err(error) if error.may_pass() => {
                // It may have been carried out all the same, so it stays unanswered.
                self.engaged = true;
                if !cut_short || self.obstacle.is_none() {
                    self.obstacle = Some(Obstacle::Store(error));
                }
                self.ask_at = self.ask_at.min(self.now().after(self.pauses.next(None)));
                Ok(None)
            }
            Err(error) => {
                self.answered(sent);
                Err(Error::store("acquire", &self.key, error))
            }
            Ok(answer) => {
                self.answered(sent);
                // The end of the wait left it little time: what was known before stands.
                let known = (cut_short && answer == Claimed::Late).then(|| self.obstacle.take()).flatten();
                let lease = self.understand(sent, answer);
                self.obstacle = known.or(self.obstacle.take());
                Ok(lease)
            }
        }
    }

    /// One of the claims that were sent then has been answered.
    fn answered(&mut self, sent: Moment) {
        if let Some(at) = self.unanswered.iter().position(|(other, _)| *other == sent) {
            self.unanswered.swap_remove(at);
        }
    }

    fn understand(&mut self, sent: Moment, answer: Claimed) -> Option<Lease> {
        match answer {
            Claimed::Held { fence } => {
                self.engaged = true;
                let term = Term::new(sent, self.plan.ttl, self.plan.ttl, self.plan.grace);
                // Nobody else is in the way, should there be no time to ask again.
                self.obstacle =
                    Some(Obstacle::Store(StoreError::unavailable("the claim was answered too late to be used")));
                if !self.place.held(sent, fence, self.now()) {
                    self.ask_at = self.now();
                    return None;
                }
                self.keep(fence, term, false)
            }
            Claimed::Queued { ahead, retry_in, seen, ticket, holder } => {
                self.engaged = true;
                self.place.queued(sent, seen, ticket, self.now());
                self.obstacle = Some(self.held_by(holder, retry_in));
                self.pauses.reset();
                // The first in line comes when the holder's TTL ends, the second in case the first is dead; nobody else.
                if let (0 | 1, Some(retry_in)) = (ahead, retry_in) {
                    self.ask_at = self.ask_at.min(self.now().after(retry_in + Duration::from_millis(1 + ahead)));
                }
                None
            }
            Claimed::Busy { retry_in, holder } => {
                self.obstacle = Some(self.held_by(holder, retry_in));
                self.ask_at = self.now().after(self.pauses.next(retry_in));
                None
            }
            Claimed::Late => {
                self.obstacle = Some(Obstacle::Store(StoreError::unavailable("the claim reached the store too late")));
                self.ask_at = self.ask_at.min(self.now().after(self.pauses.next(None)));
                None
            }
        }
    }

    /// A grant counts from before it can have been made (rule C2), never from when word of it came.
    fn told(&mut self, word: Word) -> Option<Lease> {
        let Word::Granted { fence, length } = word else {
            // Everybody is told to ask at once, so not all of them should do it at once.
            let soon = self.pauses.longest.mul_f64(fastrand::f64() / 8.0);
            self.ask_at = self.ask_at.min(self.now().after(soon));
            return None;
        };
        let term = Term::new(self.place.granted_after(fence)?, length, self.plan.ttl, self.plan.grace);
        self.engaged = true;
        // Too little of it is left to renew it in before the work would be told to stop: asking brings a whole TTL.
        if term.cancel_at().since(self.now()) < length / 6 {
            self.ask_at = self.now();
            return None;
        }
        self.keep(fence, term, true)
    }

    /// Makes the lease, unless it would be over before it began: asking again renews what is ours.
    fn keep(&mut self, fence: u64, term: Term, handed_over: bool) -> Option<Lease> {
        let now = self.now();
        if now >= term.cancel_at() {
            self.ask_at = now;
            return None;
        }
        tracing::debug!(fence, waited = ?self.waited(), handed_over, "lease acquired");
        let grant = Grant {
            key: self.key.clone(),
            owner: self.owner.clone(),
            fence,
            term,
            handed_over,
            echo_until: self.echo_until(),
        };
        // From here on the lease answers for the owner.
        self.engaged = false;
        self.unanswered.clear();
        Some(Lease::new(Tenure::begin(grant, self.plan, self.keeper.clone())))
    }

    fn held_by(&self, label: Option<Arc<str>>, remaining: Option<Duration>) -> Obstacle {
        Obstacle::Holder { label, until: remaining.map(|remaining| self.now().after(remaining)) }
    }

    fn now(&self) -> Moment {
        self.keeper.clock().now()
    }

    fn waits(&self) -> bool {
        self.plan.wait != Wait::No
    }

    fn waited(&self) -> Duration {
        self.now().since(self.started)
    }

    fn ends_at(&self) -> Moment {
        match self.plan.wait {
            Wait::No => self.started,
            Wait::UpTo(wait) => self.started.after(wait),
            Wait::Forever => Moment::NEVER,
        }
    }

    /// How much of the wait is left.
    fn left(&self) -> Duration {
        self.ends_at().since(self.now())
    }

    /// One poll interval after `sent`, moved to a common beat, so that those who wait in one process ask together.
    fn next_poll(&self, sent: Moment) -> Moment {
        let interval = self.pauses.longest;
        let beat = u64::try_from(interval.as_nanos() / 8).unwrap_or(u64::MAX).max(1);
        let at = sent.after(interval);
        Moment(at.0 - at.0 % beat)
    }

    /// From then on, no claim of this owner can be carried out any more.
    fn echo_until(&self) -> Moment {
        self.unanswered.iter().map(|(_, until)| *until).max().unwrap_or(Moment(0))
    }

    /// A wait without end is said aloud, once each TTL.
    fn complain(&mut self) {
        let now = self.now();
        if self.plan.wait == Wait::Forever && now.since(self.complained) >= self.plan.ttl {
            self.complained = now;
            let holder = match &self.obstacle {
                Some(Obstacle::Holder { label, .. }) => label.as_deref(),
                _ => None,
            };
            tracing::warn!(waited = ?self.waited(), holder, "still waiting for a lease");
        }
    }

    fn give_up(&mut self) -> Error {
        let (key, waited) = (self.key.clone(), self.waited());
        match self.obstacle.take() {
            Some(Obstacle::Store(error)) => Error::store("acquire", &key, error),
            Some(Obstacle::Holder { label, until }) => {
                let remaining = until.map(|until| until.since(self.now()));
                Error::Contended { key, waited, holder: label, remaining }
            }
            None => Error::Contended { key, waited, holder: None, remaining: None },
        }
    }
}

impl Drop for Pursuit {
    fn drop(&mut self) {
        if !self.engaged && self.unanswered.is_empty() {
            return;
        }
        let now = self.now();
        let echo_until = self.echo_until();
        self.keeper.bid_farewell(Farewell {
            key: self.key.clone(),
            owner: self.owner.clone(),
            attempt: self.plan.attempt,
            settling: None,
            until: now.after(self.plan.ttl),
            again_at: (now < echo_until).then_some(echo_until),
            parting: self.keeper.partings.begin(),
        });
    }
}

/// The next claim that is answered.
async fn answered(asked: &mut OnTheirWay) -> Asked {
    poll_fn(|cx| {
        for at in 0..asked.len() {
            if let Poll::Ready(answer) = asked[at].as_mut().poll(cx) {
                drop(asked.remove(at));
                return Poll::Ready(answer);
            }
        }
        Poll::Pending
    })
    .await
}

async fn word(listener: &mut Option<crate::waiting::Listener>) -> Word {
    match listener {
        Some(listener) => listener.word().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Clock,
        engine::Engine,
        host::Host,
        settings::Settings,
        store::{Identity, MemoryStore, Store},
    };

    /// Or its place in the line would be left behind, should it be carried out after the release.
    #[tokio::test(start_paused = true)]
    async fn of_two_claims_of_one_instant_an_answer_leaves_the_other_unanswered() {
        let (clock, me) = (Clock::tokio(), Identity::new("me").unwrap());
        let store = Arc::new(MemoryStore::with_clock(clock.clone()));
        let other = Claim::new("k".into(), Owner::draw(&me).unwrap(), Duration::from_secs(30));
        store.claim(&other).await.unwrap();
        let keeper = Arc::new(Keeper(Engine::new(store, clock, me, Host::callers(), Duration::ZERO)));
        let mut pursuit = Pursuit::new(keeper, "k".into(), Settings::default().plan().unwrap()).unwrap();
        let window = pursuit.plan.claim_window();
        let (one, two) = (pursuit.ask(window), pursuit.ask(window));
        let answer = one.await;
        assert!(pursuit.heard(answer).unwrap().is_none());
        assert_eq!(pursuit.unanswered.len(), 1);
        let answer = two.await;
        assert!(pursuit.heard(answer).unwrap().is_none());
        assert!(pursuit.unanswered.is_empty());
    }
}
