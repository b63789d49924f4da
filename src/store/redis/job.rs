//! An operation on its way, and whoever waits for it.
use super::{
    answer::Answer,
    protocol::{Op, Verb},
};
use crate::{clock::Moment, error::StoreError};
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};
use tokio::sync::oneshot;

/// How long a release is kept for a connection that is down, once nobody waits for it: a lease of the default TTL has
/// ended by itself by then.
const RELEASE_KEPT: Duration = Duration::from_secs(30);

/// An operation, and who asked for it and when.
pub(super) struct Job {
    pub(super) op: Op,
    /// Since when somebody waits for it.
    pub(super) asked: Moment,
    /// `None` once it was answered.
    reply: Option<Waits>,
    /// Who asked for the same before, and hears the same answer.
    before: Vec<Waits>,
}

type Waits = oneshot::Sender<Result<Answer, StoreError>>;

impl Job {
    pub(super) fn new(op: Op, asked: Moment) -> (Job, oneshot::Receiver<Result<Answer, StoreError>>) {
        let (reply, answer) = oneshot::channel();
        (Job { op, asked, reply: Some(reply), before: Vec::new() }, answer)
    }

    pub(super) fn answer(&mut self, answer: Result<Answer, StoreError>) {
        // Whoever asked may have gone; then nobody is left to tell.
        for reply in self.before.drain(..) {
            reply.send(answer.clone()).ok();
        }
        if let Some(reply) = self.reply.take() {
            reply.send(answer).ok();
        }
    }

    /// Its answer is that one's too.
    fn takes_over(&mut self, old: Job) {
        // Somebody has waited since then, and is told in time why there is no connection.
        self.asked = self.asked.min(old.asked);
        self.before.extend(old.before.into_iter().chain(old.reply));
    }

    pub(super) fn is_awaited(&self) -> bool {
        self.reply.iter().chain(&self.before).any(|reply| !reply.is_closed())
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

/// Takes in what is asked. A renewal that was not written before the next attempt at it isn't written at all: a server that
/// stood still for a while would get all of them at once, and be late again. The next one gets its place, or who is in a
/// hurry would go to the back again and again; and whoever waits for it hears the next one's answer.
pub(super) fn take_in(queue: &mut VecDeque<Job>, jobs: Vec<Job>) {
    let mut again: HashMap<&str, usize> = HashMap::new();
    if !queue.is_empty() {
        again.extend(jobs.iter().enumerate().filter_map(|(at, job)| Some((job.op.renews()?, at))));
    }
    let mut places = Vec::new();
    for (place, job) in queue.iter().enumerate() {
        if again.is_empty() {
            break;
        }
        if let Some(owner) = job.op.renews()
            && let Some(&at) = again.get(owner)
            && jobs[at].op.asks_the_same(&job.op)
        {
            again.remove(owner);
            places.push((place, at));
        }
    }
    let mut jobs: Vec<Option<Job>> = jobs.into_iter().map(Some).collect();
    for (place, at) in places {
        if let Some(next) = jobs[at].take() {
            let old = std::mem::replace(&mut queue[place], next);
            queue[place].takes_over(old);
        }
    }
    queue.extend(jobs.into_iter().flatten());
}

#[cfg(test)]
mod tests {
    use super::super::{answer::Word, protocol::Arg};
    use super::*;
    use crate::{
        Key,
        store::{Claim, Identity, Owner, Renewal, Renewed},
    };
    use tokio::sync::oneshot::error::TryRecvError;

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
    fn a_renewal_gives_its_place_to_the_next_attempt_at_it_and_hears_its_answer_and_nothing_else_does() {
        let renewal = ops().1;
        let again = |fence| {
            let args = vec![Arg::Text(owner_of(&renewal)), Arg::Number(fence), Arg::Number(30_000)];
            Job::new(Op { args, ..renewal.clone() }, ASKED.after(Duration::from_secs(fence)))
        };
        let (others, mut waits) = Job::new(ops().1, ASKED);
        let ((first, mut told), (another_fence, mut waits_too)) = (again(1), again(2));
        let mut queue = VecDeque::from([first, others, forsaken(ops().2), another_fence]);
        // It was asked for later, and by somebody else too.
        let (mut next, mut answered) = again(1);
        next.asked = ASKED.after(Duration::from_secs(60));
        take_in(&mut queue, vec![forsaken(ops().0), next]);
        let verbs: Vec<_> = queue.iter().map(|job| job.op.verb).collect();
        assert_eq!(verbs, [Verb::Renew, Verb::Renew, Verb::Release, Verb::Renew, Verb::Claim]);
        assert_eq!(queue[0].asked, ASKED.after(Duration::from_secs(1)), "by who asked before");

        queue[0].answer(Ok(Answer::new(vec![Word::Text(b"renewed".to_vec())])));
        for told in [&mut told, &mut answered] {
            assert!(told.try_recv().unwrap().is_ok_and(|answer| answer.renewed(None) == Ok(Renewed::Renewed)));
        }
        for waits in [&mut waits, &mut waits_too] {
            assert_eq!(waits.try_recv().err(), Some(TryRecvError::Empty), "it was told nothing");
        }
    }

    #[test]
    fn who_waits_for_a_renewal_that_gave_its_place_hears_when_that_is_dropped() {
        let renewal = ops().1;
        let ((first, mut told), (next, _)) = (Job::new(renewal.clone(), ASKED), Job::new(renewal, ASKED));
        let mut queue = VecDeque::from([first]);
        take_in(&mut queue, vec![next]);
        assert!(queue.len() == 1 && queue[0].is_awaited());
        queue.clear();
        assert_eq!(told.try_recv().err(), Some(TryRecvError::Closed));
    }

    fn owner_of(renewal: &Op) -> String {
        renewal.renews().unwrap().to_owned()
    }
}
