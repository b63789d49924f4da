//! An operation on its way, and whoever waits for it.
use super::protocol::{Answer, Op, Verb};
use crate::{clock::Moment, error::StoreError};
use std::{
    collections::{HashSet, VecDeque},
    time::Duration,
};
use tokio::sync::oneshot;

/// How long a release is kept for a connection that is down, once nobody waits for it: a lease of the default TTL has
/// ended by itself by then.
const RELEASE_KEPT: Duration = Duration::from_secs(30);

/// An operation, and who asked for it and when.
pub(super) struct Job {
    pub(super) op: Op,
    pub(super) asked: Moment,
    /// `None` once it was answered.
    reply: Option<oneshot::Sender<Result<Answer, StoreError>>>,
}

impl Job {
    pub(super) fn new(op: Op, asked: Moment) -> (Job, oneshot::Receiver<Result<Answer, StoreError>>) {
        let (reply, answer) = oneshot::channel();
        (Job { op, asked, reply: Some(reply) }, answer)
    }

    pub(super) fn answer(&mut self, answer: Result<Answer, StoreError>) {
        if let Some(reply) = self.reply.take() {
            // Whoever asked may have gone; then nobody is left to tell.
            reply.send(answer).ok();
        }
    }

    pub(super) fn is_awaited(&self) -> bool {
        self.reply.as_ref().is_some_and(|reply| !reply.is_closed())
    }

    /// What makes a lease that nobody waits for would only have to be released again. What else was asked may still matter.
    pub(super) fn is_worth_sending(&self) -> bool {
        !matches!(self.op.verb, Verb::Claim | Verb::Propose | Verb::Hold) || self.is_awaited()
    }

    /// Whether it still matters while there is no connection.
    pub(super) fn is_worth_keeping(&self, now: Moment) -> bool {
        self.is_awaited() || self.op.verb == Verb::Release && now.since(self.asked) < RELEASE_KEPT
    }
}

pub(super) fn refuse(jobs: &mut [Job], why: &StoreError) {
    for job in jobs {
        job.answer(Err(why.clone()));
    }
}

/// A renewal that was not written before the next attempt at it isn't written at all: a server that stood still for a
/// while would get all of them at once, and be late again.
pub(super) fn drop_what_is_asked_again(queue: &mut VecDeque<Job>, jobs: &[Job]) {
    if queue.is_empty() {
        return;
    }
    let again: HashSet<&str> = jobs.iter().filter_map(|job| job.op.renews()).collect();
    queue.retain_mut(|job| {
        let keep = job.op.renews().is_none_or(|owner| !again.contains(owner));
        if !keep {
            job.answer(Err(StoreError::unavailable("not sent before the next attempt at it")));
        }
        keep
    });
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Arg;
    use super::*;
    use crate::{
        Key,
        store::{Claim, Identity, Owner, Renewal},
    };

    const ASKED: Moment = Moment(1_000_000_000);

    fn ops() -> (Op, Op, Op) {
        let (key, ttl) = (Key::from("k"), Duration::from_secs(30));
        let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
        let claim = Op::claim(&Claim::new(key.clone(), owner.clone(), ttl), ASKED);
        (claim, Op::renew(&Renewal::new(key.clone(), owner.clone(), 1, ttl)), Op::release(&key, &owner))
    }

    /// Whoever asked for it has gone.
    fn forsaken(op: Op) -> Job {
        Job::new(op, ASKED).0
    }

    #[test]
    fn a_claim_that_nobody_waits_for_is_not_sent_and_all_else_is() {
        let (claim, renewal, release) = ops();
        let (awaited, _answer) = Job::new(ops().0, ASKED);
        assert!(awaited.is_worth_sending());
        assert!(!forsaken(claim).is_worth_sending());
        assert!(forsaken(renewal).is_worth_sending() && forsaken(release).is_worth_sending());
    }

    #[test]
    fn while_there_is_no_connection_a_release_is_kept_though_nobody_waits_but_not_for_ever() {
        let (claim, renewal, release) = ops();
        let over = ASKED.after(RELEASE_KEPT);
        let just_before = Moment(over.0 - 1);
        for op in [claim, renewal] {
            assert!(!forsaken(op).is_worth_keeping(ASKED));
        }
        let kept = forsaken(release);
        assert!(kept.is_worth_keeping(just_before) && !kept.is_worth_keeping(over));

        let (mut awaited, mut answer) = Job::new(ops().0, ASKED);
        assert!(awaited.is_worth_keeping(over));
        refuse(std::slice::from_mut(&mut awaited), &StoreError::unavailable("gone"));
        assert!(!awaited.is_awaited() && answer.try_recv().unwrap().is_err(), "it was told");
    }

    #[test]
    fn a_renewal_gives_way_to_the_next_attempt_at_it_and_to_nothing_else() {
        let (_, renewal, release) = ops();
        let again = Op { args: vec![Arg::Text(owner_of(&renewal))], ..renewal.clone() };
        let (of_another, (first, mut told)) = (ops().1, Job::new(renewal, ASKED));
        let (others, mut waits) = Job::new(of_another, ASKED);
        let mut queue = VecDeque::from([first, others, forsaken(release)]);
        drop_what_is_asked_again(&mut queue, &[forsaken(again)]);
        assert!(told.try_recv().unwrap().is_err_and(|error| error.may_pass()));
        assert_eq!(queue.iter().map(|job| job.op.verb).collect::<Vec<_>>(), [Verb::Renew, Verb::Release]);
        assert!(waits.try_recv().is_err(), "it was told nothing");
    }

    fn owner_of(renewal: &Op) -> String {
        renewal.renews().unwrap().to_owned()
    }
}
