//! The embedded store against the plainest one: whatever is asked, in whatever order, they answer the same.
use crate::toy::Toy;
use leasehold::{
    Key,
    store::{Claim, Claimed, Freed, Holding, Identity, MemoryStore, Owner, Renewal, Renewed, Store, Ticket},
};
use proptest::{collection::vec, prelude::*};
use std::time::Duration;
use tokio::time::{Instant, advance};

const OWNERS: usize = 4;

/// One thing that somebody does. Times are in units of 100 ms, few enough that they meet.
#[derive(Clone, Debug)]
enum Step {
    Claim { who: usize, ttl: u64, line: bool, with_ticket: bool },
    Renew { who: usize, ttl: u64 },
    Release { who: usize },
    Force,
    Pass { time: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let who = || 0..OWNERS;
    prop_oneof![
        6 => (who(), 1..6_u64, any::<bool>(), any::<bool>())
            .prop_map(|(who, ttl, line, with_ticket)| Step::Claim { who, ttl, line, with_ticket }),
        2 => (who(), 1..6_u64).prop_map(|(who, ttl)| Step::Renew { who, ttl }),
        2 => who().prop_map(|who| Step::Release { who }),
        1 => Just(Step::Force),
        4 => (1..4_u64).prop_map(|time| Step::Pass { time }),
    ]
}

fn units(n: u64) -> Duration {
    Duration::from_millis(100) * n as u32
}

/// What one store has told the world so far.
struct World<S> {
    store: S,
    key: Key,
    owners: Vec<Owner>,
    tickets: [Option<Ticket>; OWNERS],
    /// The last fence that each owner was given.
    fences: [u64; OWNERS],
    newest: u64,
    /// Who was told to hold the key, and until when that is certain.
    certain: Option<(usize, Instant)>,
}

/// An answer without what differs from store to store: fences and tickets become their order.
#[derive(Debug, PartialEq)]
enum Said {
    Held { newer: bool },
    Queued { ahead: u64, retry_in: Option<Duration>, after_newest: bool },
    Busy { retry_in: Option<Duration> },
    Renewed(Renewed),
    Freed(Freed),
    Forced(bool),
    Nothing,
}

impl<S: Store> World<S> {
    fn new(store: S, owners: &[Owner]) -> Self {
        let (key, owners) = ("k".into(), owners.to_vec());
        World { store, key, owners, tickets: [None; OWNERS], fences: [0; OWNERS], newest: 0, certain: None }
    }

    async fn go(&mut self, step: &Step) -> Said {
        let key = self.key.clone();
        match *step {
            Step::Claim { who, ttl, line, with_ticket } => {
                let mut claim = Claim::new(key, self.owners[who].clone(), units(ttl));
                claim.presence = units(2 + who as u64);
                (claim.line, claim.ticket) = (line, self.tickets[who].filter(|_| with_ticket));
                match self.store.claim(&claim).await.unwrap() {
                    Claimed::Held { fence, .. } => {
                        let newer = fence > self.newest;
                        assert!(newer || fence == self.fences[who] && fence == self.newest, "{fence} was given before");
                        self.fences[who] = fence;
                        self.holds(who, units(ttl));
                        self.newest = fence;
                        Said::Held { newer }
                    }
                    Claimed::Queued { ahead, retry_in, seen, ticket, .. } => {
                        self.tickets[who] = Some(ticket);
                        Said::Queued { ahead, retry_in, after_newest: seen >= self.newest }
                    }
                    Claimed::Busy { retry_in, .. } => Said::Busy { retry_in },
                    other => panic!("{other:?} to a claim at once"),
                }
            }
            Step::Renew { who, ttl } => {
                let renewal = Renewal::new(key, self.owners[who].clone(), self.fences[who], units(ttl));
                let answer = self.store.renew(&renewal).await.unwrap();
                if answer == Renewed::Renewed {
                    self.holds(who, units(ttl));
                }
                Said::Renewed(answer)
            }
            Step::Release { who } => {
                self.certain = self.certain.filter(|(holder, _)| *holder != who);
                Said::Freed(self.store.release(&key, &self.owners[who]).await.unwrap())
            }
            Step::Force => {
                self.certain = None;
                Said::Forced(self.store.force_release(&key).await.unwrap())
            }
            Step::Pass { .. } => Said::Nothing,
        }
    }

    /// `who` was told to hold the key: then nobody else is certain to, and no certainty is ever taken back.
    fn holds(&mut self, who: usize, ttl: Duration) {
        let now = Instant::now();
        let until = match self.certain {
            Some((holder, until)) if until > now => {
                assert_eq!(holder, who, "two hold the key");
                until
            }
            _ => now,
        };
        self.certain = Some((who, until.max(now + ttl)));
    }

    async fn look(&self) -> Option<(Option<Duration>, u64)> {
        let holding = self.store.inspect(&self.key).await.unwrap();
        if let Some((who, until)) = self.certain.filter(|(_, until)| *until > Instant::now()) {
            let left = until.duration_since(Instant::now());
            let holds = |h: &Holding| h.fence == Some(self.fences[who]) && h.remaining >= Some(left);
            assert!(holding.as_ref().is_some_and(holds), "{who} is certain for {left:?}, and there is {holding:?}");
        }
        holding.map(|h| (h.remaining, h.waiters))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_embedded_store_answers_as_the_plainest_does(steps in vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let owners = ["a", "b", "c", "d"].map(|label| Owner::draw(&Identity::new(label).unwrap()).unwrap());
            let mut plain = World::new(Toy::default(), &owners);
            let mut embedded = World::new(MemoryStore::new(), &owners);
            for (n, step) in steps.iter().enumerate() {
                if let Step::Pass { time } = *step {
                    advance(units(time)).await;
                }
                prop_assert_eq!(plain.go(step).await, embedded.go(step).await, "in step {}: {:?}", n, step);
                prop_assert_eq!(plain.look().await, embedded.look().await, "after step {}: {:?}", n, step);
            }
            Ok(())
        })?;
    }
}
