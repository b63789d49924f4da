//! What every [`Store`] must do: the rules, to be run in a store's own tests.
//!
//! ```
//! use leasehold::store::{MemoryStore, contract};
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), contract::Broken> {
//! contract::check(async || MemoryStore::new()).await?;
//! # Ok(()) }
//! ```
use super::{Claim, Claimed, FencedWrite, Freed, Holding, Identity, Owner, Renewal, Renewed, Store};
use crate::{Key, error::StoreError};
use std::{fmt, pin::Pin, sync::Arc, time::Duration};
use tokio::time::{Instant, sleep};

mod rules;

/// Runs every rule of [`Store`], each on a fresh store and on keys of its own, until one is broken.
///
/// Stores from `fresh` may share a server: the keys are never used twice, and each is left with a TTL of at most half a
/// minute. A store need not have a line (it answers [`Claimed::Busy`] to who would stand in one), keep values, or push.
/// What it does have must keep the rules.
///
/// It needs a tokio runtime with time. A few rules wait for a TTL of 200 ms to be over, by asking again; so it takes
/// some seconds against a server, and no time against a store that follows `tokio::time` when that is paused.
///
/// # Errors
/// [`Broken`] names the first rule that was broken.
pub async fn check<S, Fut>(mut fresh: impl FnMut() -> Fut) -> Result<(), Broken>
where
    S: Store,
    Fut: Future<Output = S>,
{
    let error = |Saw(saw)| Broken { rule: "what it supports can be found out", saw };
    let has_line = Trial::new(fresh().await).map_err(error)?.has_a_line().await.map_err(error)?;
    let has_values = Trial::new(fresh().await).map_err(error)?.keeps_values().await.map_err(error)?;
    let mut all = Rules(Vec::new());
    rules::ownership(&mut all);
    rules::time(&mut all);
    rules::fences(&mut all);
    if has_line {
        rules::line(&mut all);
    }
    if has_values {
        rules::values(&mut all);
    }
    for Rule { rule, run } in all.0 {
        let broken = |Saw(saw)| Broken { rule, saw };
        let trial = Trial::new(fresh().await).map_err(broken)?;
        run(trial).await.map_err(broken)?;
    }
    Ok(())
}

/// The rule that a store broke.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Broken {
    /// The rule, as a sentence.
    pub rule: &'static str,
    /// What was asked, what the store answered, and what would have been right.
    pub saw: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store breaks the rule that {}: {}", self.rule, self.saw)
    }
}

impl std::error::Error for Broken {}

/// What a rule saw that it should not have.
#[derive(Debug)]
struct Saw(String);

impl From<StoreError> for Saw {
    fn from(error: StoreError) -> Self {
        Saw(format!("an error: {error}"))
    }
}

/// The answer must match; gives what the pattern binds.
macro_rules! must {
    ($got:expr, $wanted:pat $(if $guard:expr)? $(=> $value:expr)?) => {
        match $got {
            $wanted $(if $guard)? => { $($value)? }
            other => {
                return Err(Saw(format!(
                    "`{}` gave {other:?}, and not {}",
                    stringify!($got),
                    stringify!($wanted $(if $guard)?),
                )));
            }
        }
    };
}
use must;

type Verdict = Pin<Box<dyn Future<Output = Result<(), Saw>> + Send>>;

/// A rule, and how to find out.
struct Rule<S> {
    rule: &'static str,
    run: Box<dyn FnOnce(Trial<S>) -> Verdict + Send>,
}

struct Rules<S>(Vec<Rule<S>>);

impl<S> Rules<S> {
    fn rule<Fut>(&mut self, rule: &'static str, run: impl FnOnce(Trial<S>) -> Fut + Send + 'static)
    where
        Fut: Future<Output = Result<(), Saw>> + Send + 'static,
    {
        self.0.push(Rule { rule, run: Box::new(|trial| Box::pin(run(trial))) });
    }
}

/// Longer than any rule takes.
const LONG: Duration = Duration::from_secs(30);
/// For what is to be over before the rule is.
const SHORT: Duration = Duration::from_millis(200);
/// How late a store may be with what has to happen.
const PATIENCE: Duration = Duration::from_secs(10);

/// How far two clocks may drift apart in `d`, the resolution of a store's clock included.
fn drift(d: Duration) -> Duration {
    d / 100 + Duration::from_millis(2)
}

/// At most so much is `d` by a store's clock.
fn about(d: Duration) -> Duration {
    d + drift(d)
}

/// One store, one key, and those who come for it.
struct Trial<S> {
    store: Arc<S>,
    key: Key,
    a: Owner,
    b: Owner,
    c: Owner,
}

impl<S: Store> Trial<S> {
    fn new(store: S) -> Result<Self, Saw> {
        // A key that nobody has used, also not in another process.
        let key = format!("leasehold-contract:{}", draw("key")?.id()).into();
        Ok(Trial { store: Arc::new(store), key, a: draw("a")?, b: draw("b")?, c: draw("c")? })
    }

    /// One who tries.
    fn tries(&self, owner: &Owner) -> Claim {
        let claim = Claim::new(self.key.clone(), owner.clone(), LONG);
        Claim { presence: LONG, not_after: PATIENCE, ..claim }
    }

    /// One who stands in line.
    fn waits(&self, owner: &Owner) -> Claim {
        Claim { line: true, ..self.tries(owner) }
    }

    /// Whether who asks for what is held gets a place.
    async fn has_a_line(&self) -> Result<bool, Saw> {
        self.claim(&self.tries(&self.a)).await?;
        Ok(matches!(self.claim(&self.waits(&self.b)).await?, Claimed::Queued { .. }))
    }

    /// Whether a write isn't refused.
    async fn keeps_values(&self) -> Result<bool, Saw> {
        match self.store.write(&FencedWrite::new(self.key.clone(), Vec::new(), 1)).await {
            Err(StoreError::Refused(_)) => Ok(false),
            answer => Ok(answer.map(|_| true)?),
        }
    }

    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        self.store.claim(claim).await
    }

    async fn renew(&self, owner: &Owner, fence: u64, ttl: Duration) -> Result<Renewed, StoreError> {
        self.store.renew(&Renewal::new(self.key.clone(), owner.clone(), fence, ttl)).await
    }

    async fn release(&self, owner: &Owner) -> Result<Freed, StoreError> {
        self.store.release(&self.key, owner).await
    }

    async fn inspect(&self) -> Result<Option<Holding>, StoreError> {
        self.store.inspect(&self.key).await
    }

    /// The claim gets the key, now; under which fence.
    async fn hold(&self, claim: &Claim) -> Result<u64, Saw> {
        match self.claim(claim).await {
            Ok(Claimed::Held { fence }) => Ok(fence),
            answer => Err(Saw(format!("{:?} was to get the key, and got {answer:?}", claim.owner))),
        }
    }

    /// The claim gets a place in the line; which.
    async fn queue(&self, claim: &Claim) -> Result<Place, Saw> {
        let answer = self.claim(claim).await;
        let Ok(Claimed::Queued { ahead, seen, ticket, retry_in, .. }) = answer else {
            return Err(Saw(format!("{:?} was to get a place, and got {answer:?}", claim.owner)));
        };
        Ok(Place { ahead, seen, ticket, retry_in })
    }

    /// The claim gets the key in the end; under which fence.
    async fn hold_in_the_end(&self, claim: &Claim) -> Result<u64, Saw> {
        let since = Instant::now();
        loop {
            match self.claim(claim).await? {
                Claimed::Held { fence } => return Ok(fence),
                other if since.elapsed() > PATIENCE => {
                    return Err(Saw(format!("{:?} was asked for {PATIENCE:?}, last {other:?}", claim.owner)));
                }
                _ => sleep(SHORT / 20).await,
            }
        }
    }

    /// The key is nobody's in the end.
    async fn free_in_the_end(&self) -> Result<(), Saw> {
        let since = Instant::now();
        while let Some(holding) = self.inspect().await? {
            if since.elapsed() > PATIENCE {
                return Err(Saw(format!("the key was held for {PATIENCE:?}, last {holding:?}")));
            }
            sleep(SHORT / 20).await;
        }
        Ok(())
    }

    /// What is left of the lease. It must have a TTL.
    async fn remaining(&self) -> Result<Duration, Saw> {
        Ok(must!(self.inspect().await, Ok(Some(Holding { remaining: Some(remaining), .. })) => remaining))
    }

    /// The lease lasts `ttl` from some point between `since` and now.
    async fn lasts(&self, ttl: Duration, since: Instant) -> Result<(), Saw> {
        let remaining = self.remaining().await?;
        let least = ttl.saturating_sub(since.elapsed() + drift(ttl));
        must!(remaining, r if (least..=about(ttl)).contains(&r));
        Ok(())
    }
}

/// A place in the line.
#[derive(Debug)]
struct Place {
    ahead: u64,
    seen: u64,
    ticket: super::Ticket,
    retry_in: Option<Duration>,
}

fn draw(label: &str) -> Result<Owner, Saw> {
    let identity = Identity::new(label).map_err(|e| Saw(e.to_string()))?;
    Ok(Owner::draw(&identity)?)
}
