//! An operation on its way, and whoever waits for it.
use super::protocol::{Answer, Op, Verb};
use crate::{clock::Moment, error::StoreError};
use std::time::Duration;
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

    /// A claim that nobody waits for would only have to be released again. What else was asked may still matter.
    pub(super) fn is_worth_sending(&self) -> bool {
        self.op.verb != Verb::Claim || self.is_awaited()
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
