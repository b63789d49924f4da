//! One supervised connection, and the lists that travel on it.
//!
//! Whoever wants something from the server leaves an operation here. A task of the link's own takes what has come
//! together and sends it as one list; so a lone operation goes at once, and what is asked while lists are under way
//! shares the next one. The task alone owns the connection: callers come and go without touching what is in flight.
use super::{
    address::Address,
    answer::Answer,
    cluster::by_slot,
    job::{Job, refuse, take_in},
    protocol::{LONGEST, Op, Verb},
    server_time::ServerTime,
    wire::{Failure, Page, Reply, Sent, Wire},
};
use crate::{
    clock::{Clock, Moment, jittered},
    error::StoreError,
    store::sweep::Sweep,
};
use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, MissedTickBehavior},
};

/// How many lists may be under way. One would leave the server idle for a round trip after each; more than a few would
/// go out with an operation or two in each, and it is the lists that cost.
const UNDER_WAY: usize = 4;

/// How many renewals may share a list that waits for replicas: each list waits anew.
const TOGETHER: usize = 64 * LONGEST;

/// From this many on, the queue is looked through for what nobody wants any more.
const CROWDED: usize = 1024;

/// A connection that lived this long was a good one: the next is tried at once.
const STEADY: Duration = Duration::from_secs(10);

/// The first and the longest pause between two attempts to connect.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A handle to one supervised connection. When it is dropped, what was asked is finished and the connection closed.
#[derive(Debug)]
pub(super) struct Link {
    asked: mpsc::UnboundedSender<Asked>,
    clock: Clock,
}

enum Asked {
    One(Job),
    Many(Vec<Job>),
}

impl Link {
    /// Connects, and lives on this runtime from then on. `patience`: a server that has been silent for that long, with
    /// something to answer, is given up for a new connection.
    pub(super) async fn open(address: Address, patience: Duration) -> Result<Link, StoreError> {
        match Link::open_in_time(address, patience).await {
            (link, None) => Ok(link),
            (_, Some(why)) => Err(why),
        }
    }

    /// The same; but a link that cannot connect goes on trying. And why it could not.
    pub(super) async fn open_in_time(address: Address, patience: Duration) -> (Link, Option<StoreError>) {
        let clock = Clock::system();
        let (wire, time, why) = match Wire::open(&address, &clock).await {
            Ok((wire, sent, server)) => (Some(wire), ServerTime::new(sent, server), None),
            // No time is asked for before there is a connection, and each brings its own.
            Err(why) => (None, ServerTime::new(clock.now(), 0), Some(why)),
        };
        let (asked, jobs) = mpsc::unbounded_channel();
        let carrier = Carrier {
            address,
            patience,
            clock: clock.clone(),
            jobs,
            closed: false,
            queue: VecDeque::new(),
            sweep: Sweep::default(),
            under_way: VecDeque::new(),
            unknown: VecDeque::new(),
            time,
            failures: u32::from(wire.is_none()),
        };
        tokio::spawn(carrier.run(wire));
        (Link { asked, clock }, why)
    }

    /// Asks for one operation. May be awaited on any runtime. Operations are written in the order in which they were
    /// asked; if this future is dropped, a claim that wasn't written yet never is, and anything else still is.
    pub(super) async fn ask(&self, op: Op) -> Result<Answer, StoreError> {
        let (job, answer) = self.job(op);
        self.asked.send(Asked::One(job)).map_err(|_| over())?;
        answer.await.unwrap_or_else(|_| Err(over()))
    }

    /// Asks for many at once: they share lists, whatever else is going on.
    pub(super) async fn ask_all(&self, ops: impl IntoIterator<Item = Op>) -> Vec<Result<Answer, StoreError>> {
        let (jobs, replies): (Vec<_>, Vec<_>) = ops.into_iter().map(|op| self.job(op)).unzip();
        // If nobody is there to take them, the jobs are dropped, and every reply says so.
        self.asked.send(Asked::Many(jobs)).ok();
        let mut answers = Vec::with_capacity(replies.len());
        for answer in replies {
            answers.push(answer.await.unwrap_or_else(|_| Err(over())));
        }
        answers
    }

    fn job(&self, op: Op) -> (Job, oneshot::Receiver<Result<Answer, StoreError>>) {
        Job::new(op, self.clock.now())
    }
}

fn over() -> StoreError {
    StoreError::unavailable("the runtime on which the connection to Redis lived has ended; connect anew")
}

/// A list that was sent.
struct List {
    jobs: Vec<Job>,
    /// The server says nothing more on this connection until replicas have it.
    waits: bool,
    sent: Moment,
    reply: Sent,
}

/// The task behind a [`Link`].
struct Carrier {
    address: Address,
    patience: Duration,
    clock: Clock,
    jobs: mpsc::UnboundedReceiver<Asked>,
    /// Every handle is gone.
    closed: bool,
    /// What was asked and not sent yet, in order.
    queue: VecDeque<Job>,
    /// When the queue is looked through again.
    sweep: Sweep<CROWDED>,
    /// What was sent and not answered yet, in order: the server answers in that order too.
    under_way: VecDeque<List>,
    /// Lists for which the server didn't have the page. They go before anything else, or a release could overtake its claim.
    unknown: VecDeque<Vec<Job>>,
    time: ServerTime,
    /// Connections, and attempts at one, that failed since the last answer.
    failures: u32,
}

impl Carrier {
    async fn run(mut self, mut connected: Option<Wire>) {
        loop {
            let next = match connected.take() {
                Some(wire) => Some(wire),
                None => self.connect().await,
            };
            let Some(mut wire) = next else { return };
            let since = Instant::now();
            let Err(why) = self.serve(&mut wire).await else { return };
            drop(wire); // closes the socket before the next one is opened
            self.failures = failed(since.elapsed(), self.failures);
            tracing::warn!(server = %self.address, %why, "connecting to Redis again");
            self.give_up_what_is_under_way(&why);
        }
    }

    /// Sends and receives until the connection is good for nothing any more; `Ok` when nobody can ask any more and all
    /// is answered.
    async fn serve(&mut self, wire: &mut Wire) -> Result<(), StoreError> {
        // Silence is counted in ticks, and a tick that was missed isn't one: when this process was stopped, it was not
        // the server that was silent.
        let mut ticks = tokio::time::interval((self.patience / 4).max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut silence = 0;
        loop {
            self.send(wire);
            let busy = !self.under_way.is_empty();
            if self.closed && !busy {
                return Ok(());
            }
            tokio::select! {
                biased;
                (list, result) = answered(&mut self.under_way), if busy => {
                    silence = 0;
                    self.received(list, result)?;
                }
                why = wire.ended() => return Err(why),
                asked = self.jobs.recv(), if !self.closed => match asked {
                    Some(asked) => self.take(asked),
                    None => self.closed = true,
                },
                _ = ticks.tick(), if busy => {
                    silence += 1;
                    // The first tick came at once or in less than its period.
                    if silence > 4 {
                        let patience = self.patience;
                        return Err(StoreError::unavailable(format!("Redis has been silent for {patience:?}")));
                    }
                }
            }
        }
    }

    fn send(&mut self, wire: &Wire) {
        if !self.unknown.is_empty() {
            // First every list that is still under way has to be answered: it may be an unknown one too, and an older.
            if !self.under_way.is_empty() {
                return;
            }
            for jobs in std::mem::take(&mut self.unknown) {
                self.send_list(wire, Page::ByText, jobs);
            }
        }
        let most = if wire.counts_replicas() { TOGETHER } else { LONGEST };
        let lists = if self.address.has_slots() { UNDER_WAY * LONGEST } else { UNDER_WAY };
        // What would stand behind a list that waits shares the next.
        while self.under_way.len() < lists && !self.under_way.iter().any(|list| list.waits) {
            while self.queue.len() < most
                && let Ok(asked) = self.jobs.try_recv()
            {
                self.take(asked);
            }
            let mut weight = 0;
            let fits = self.queue.iter().take_while(|job| {
                weight += job.op.weight();
                weight <= LONGEST
            });
            let fits = fits.count();
            let renewals = self.queue.iter().take(most).take_while(|job| job.op.verb == Verb::Renew).count();
            let length = fits.max(renewals);
            if length == 0 {
                return;
            }
            let jobs = self.queue.drain(..length).collect();
            if self.address.has_slots() {
                for jobs in by_slot(jobs) {
                    self.send_list(wire, Page::ByHash, jobs);
                }
            } else {
                self.send_list(wire, Page::ByHash, jobs);
            }
        }
    }

    fn send_list(&mut self, wire: &Wire, page: Page, mut jobs: Vec<Job>) {
        jobs.retain(Job::is_worth_sending);
        if jobs.is_empty() {
            return;
        }
        let sent = self.clock.now();
        let reply = wire.send(page, jobs.iter().map(|j| &j.op), |at| self.time.at(at));
        let waits = jobs.iter().any(|job| wire.waits(&job.op));
        self.under_way.push_back(List { jobs, waits, sent, reply });
    }

    /// Hands out what a list was answered; an error when the connection is to be replaced.
    fn received(&mut self, mut list: List, result: Result<Reply, Failure>) -> Result<(), StoreError> {
        let mut misled = None;
        match result {
            Ok(reply) => {
                let late = reply.answers.iter().any(Answer::is_late);
                if let Some(time) = reply.time {
                    self.time.sample(list.sent, time, late);
                }
                for (job, answer) in list.jobs.iter_mut().zip(reply.answers) {
                    match answer.error() {
                        None => job.answer(Ok(answer)),
                        Some(error) => {
                            let read_only = error.is_read_only();
                            let error = error.classify();
                            if read_only {
                                misled = Some(error.clone());
                            }
                            job.answer(Err(error));
                        }
                    }
                }
            }
            Err(Failure::Said(error)) if error.is_no_script() => self.unknown.push_back(list.jobs),
            Err(Failure::Said(error)) => {
                let read_only = error.is_read_only();
                let error = error.classify();
                refuse(&mut list.jobs, &error);
                misled = read_only.then_some(error);
            }
            Err(Failure::Lost(error)) => {
                refuse(&mut list.jobs, &error);
                return Err(error);
            }
        }
        match misled {
            // Not the primary, or no longer: the same address may lead to the new one. What else is under way was told
            // nothing by the server, and its words are not passed on as if it had been.
            Some(error) => Err(StoreError::unavailable("the server turned out to be a replica").with_source(error)),
            None => {
                self.failures = 0;
                Ok(())
            }
        }
    }

    fn give_up_what_is_under_way(&mut self, why: &StoreError) {
        for mut list in self.under_way.drain(..) {
            refuse(&mut list.jobs, why);
        }
        // These were certainly not carried out, so they can wait for the next connection.
        for jobs in self.unknown.drain(..).rev() {
            for job in jobs.into_iter().rev() {
                self.queue.push_front(job);
            }
        }
    }

    /// A new connection, as soon as there is one; `None` when nobody can ask any more.
    async fn connect(&mut self) -> Option<Wire> {
        loop {
            let pause = pause(self.failures, self.patience);
            let (address, clock) = (self.address.clone(), self.clock.clone());
            if !pause.is_zero() {
                self.meanwhile(address.pause(pause)).await?;
            }
            match self.meanwhile(async move { Wire::open(&address, &clock).await }).await? {
                Ok((wire, sent, server)) => {
                    self.time = ServerTime::new(sent, server);
                    return Some(wire);
                }
                Err(why) => {
                    self.failures = self.failures.saturating_add(1);
                    tracing::debug!(server = %self.address, %why, "could not connect to Redis");
                    self.disappoint(&why);
                }
            }
        }
    }

    /// Goes on taking what is asked while something else is awaited; `None` when nobody can ask any more.
    async fn meanwhile<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                biased;
                output = &mut future => return Some(output),
                asked = self.jobs.recv() => self.take(asked?),
            }
        }
    }

    fn take(&mut self, asked: Asked) {
        match asked {
            Asked::One(job) => self.queue.push_back(job),
            Asked::Many(jobs) => take_in(&mut self.queue, jobs),
        }
        if self.sweep.is_due(self.queue.len()) {
            self.drop_what_nobody_wants();
        }
    }

    /// There is no connection yet. Whoever has waited for one long enough is told why; after a refusal everybody is,
    /// for it won't pass.
    fn disappoint(&mut self, why: &StoreError) {
        let now = self.clock.now();
        for job in &mut self.queue {
            if !why.may_pass() || now.since(job.asked) >= self.patience {
                job.answer(Err(why.clone()));
            }
        }
        self.drop_what_nobody_wants();
    }

    fn drop_what_nobody_wants(&mut self) {
        let now = self.clock.now();
        self.queue.retain(|job| job.is_worth_keeping(now));
        self.sweep.done(self.queue.len());
    }
}

/// The next list that is answered. Lists are polled in the order in which they were made, for it is the first poll that
/// writes one.
async fn answered(lists: &mut VecDeque<List>) -> (List, Result<Reply, Failure>) {
    poll_fn(|cx| {
        for at in 0..lists.len() {
            if let Some(list) = lists.get_mut(at)
                && let Poll::Ready(result) = list.reply.as_mut().poll(cx)
                && let Some(list) = lists.remove(at)
            {
                return Poll::Ready((list, result));
            }
        }
        Poll::Pending
    })
    .await
}

/// How many have failed in a row, now that a connection has ended which lived for so long.
fn failed(lived: Duration, before: u32) -> u32 {
    if lived >= STEADY { 1 } else { before.saturating_add(1) }
}

/// None before the first attempt, then longer and longer, and never the same for everybody. Short against the patience,
/// which is short where leases are: a server that comes back in time for a last renewal has to be found in time for it.
fn pause(failures: u32, patience: Duration) -> Duration {
    let (first, longest) = (PAUSE.0, PAUSE.1.min(patience / 4).max(PAUSE.0));
    match failures {
        0 | 1 => Duration::ZERO,
        n => jittered((first * 2_u32.saturating_pow(n - 2)).min(longest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_lived_long_makes_good_for_those_that_did_not() {
        assert_eq!(failed(Duration::from_secs(9), 7), 8);
        assert_eq!(failed(Duration::from_secs(10), 7), 1);
    }

    #[test]
    fn the_first_attempt_is_at_once_and_the_pauses_grow_up_to_a_second_or_a_quarter_of_the_patience() {
        let long = Duration::from_secs(4);
        assert_eq!(pause(1, long), Duration::ZERO);
        for patience in [Duration::from_millis(20), Duration::from_millis(400)] {
            let most = (patience / 4).max(PAUSE.0);
            assert!(pause(100, patience) <= most && pause(100, patience) >= most / 2);
        }
        for failures in 2..100 {
            let most = Duration::from_millis(20 << (failures - 2).min(6)).min(Duration::from_secs(1));
            let pause = pause(failures, long);
            assert!(pause <= most && pause >= most / 2, "{pause:?} after {failures}");
        }
    }
}
