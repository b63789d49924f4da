//! Grants from the line, on a store whose every answer is the test's: from when they count, and what is made of them.
//! That two never own one key rests on these.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{
    Clock, Error, Key, Lease, LeaseState, Leases, LossReason, Result, StoreError, Wait,
    store::{Claim, Claimed, Freed, Holding, Owner, Pushes, Renewal, Renewed, Store, Ticket},
};
use std::{
    collections::VecDeque,
    future::{Future, pending},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};
use support::scene::{SECOND, down, ms};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, sleep},
};

/// With a TTL of 30 s a grant lasts 3 s, and waiters ask each second.
const PRESENCE: Duration = Duration::from_secs(3);

/// What may be relied on of a length: less the drift.
fn certain(length: Duration) -> Duration {
    length - length / 100 - ms(2)
}

/// The store's side: claims come to the test, which answers them.
struct Desk {
    claims: mpsc::UnboundedSender<Asked>,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    to: OnceLock<Pushes>,
    /// When each renewal was sent.
    renewals: Mutex<Vec<Instant>>,
    /// What becomes of the next ones; when there is nothing more to say, they are never answered.
    renewing: Mutex<VecDeque<Result<Renewed, StoreError>>>,
    releases: Mutex<Vec<Instant>>,
}

/// A claim, and its answer still to be given.
struct Asked {
    claim: Claim,
    at: Instant,
    answer: oneshot::Sender<Result<Claimed, StoreError>>,
}

impl Asked {
    fn owner(&self) -> String {
        self.claim.owner.secret()
    }
    fn answer(self, answer: Claimed) {
        // A waiter that has left hears nothing any more.
        let _ = self.answer.send(Ok(answer));
    }
    /// Far back in a line, behind a holder that stays.
    fn queued(self, seen: u64) {
        self.answer(Claimed::queued(7, Some(20 * SECOND), seen, Ticket(77), Some("holder".into())));
    }
}

impl Store for Desk {
    async fn claim(&self, claim: &Claim) -> Result<Claimed, StoreError> {
        let (answer, given) = oneshot::channel();
        self.claims.send(Asked { claim: claim.clone(), at: Instant::now(), answer }).unwrap();
        given.await.unwrap_or_else(|_| Err(down()))
    }
    async fn renew(&self, _: &Renewal) -> Result<Renewed, StoreError> {
        self.seen.renewals.lock().unwrap().push(Instant::now());
        let answer = self.seen.renewing.lock().unwrap().pop_front();
        match answer {
            Some(answer) => answer,
            None => pending().await,
        }
    }
    async fn release(&self, _: &Key, _: &Owner) -> Result<Freed, StoreError> {
        self.seen.releases.lock().unwrap().push(Instant::now());
        Ok(Freed::Released)
    }
    async fn inspect(&self, _: &Key) -> Result<Option<Holding>, StoreError> {
        Ok(None)
    }
    async fn force_release(&self, _: &Key) -> Result<bool, StoreError> {
        Ok(false)
    }
    fn listen(&self, to: Pushes) {
        assert!(self.seen.to.set(to).is_ok());
    }
}

/// The test's hands.
struct Counter {
    leases: Leases,
    claims: mpsc::UnboundedReceiver<Asked>,
    seen: Arc<Seen>,
}

fn counter() -> Counter {
    let (sender, claims) = mpsc::unbounded_channel();
    let seen = Arc::<Seen>::default();
    let desk = Desk { claims: sender, seen: seen.clone() };
    let leases = Leases::builder().clock(Clock::tokio()).build(desk).unwrap();
    Counter { leases, claims, seen }
}

impl Counter {
    fn wait(&self) -> JoinHandle<Result<Lease>> {
        tokio::spawn(self.leases.lease("k").wait(Wait::Forever).acquire())
    }
    /// The next claim, when it comes.
    async fn claim(&mut self) -> Asked {
        within(self.claims.recv()).await.unwrap()
    }
    fn grant(&self, owner: &str, fence: u64) {
        assert!(self.seen.to.get().unwrap().granted(owner, fence, PRESENCE));
    }
    fn renews(&self, answers: impl IntoIterator<Item = Result<Renewed, StoreError>>) {
        self.seen.renewing.lock().unwrap().extend(answers);
    }
    fn renewals(&self) -> Vec<Instant> {
        self.seen.renewals.lock().unwrap().clone()
    }
    fn releases(&self) -> usize {
        self.seen.releases.lock().unwrap().len()
    }
}

#[track_caller]
fn assert_counts_from(lease: &Lease, sent: Instant, length: Duration) {
    assert_eq!(lease.valid_for(), (sent + certain(length)) - Instant::now());
}

async fn assert_still_waits(waiting: &JoinHandle<Result<Lease>>) {
    sleep(ms(5)).await;
    assert!(!waiting.is_finished());
}

/// Panics after an hour, which is no time when paused.
async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(3600 * SECOND, future).await.unwrap()
}

async fn lease(waiting: JoinHandle<Result<Lease>>) -> Lease {
    within(waiting).await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_grant_counts_from_the_last_claim_that_found_an_older_fence_not_from_its_message() {
    let mut counter = counter();
    let waiting = counter.wait();
    counter.claim().await.queued(7);
    let poll = counter.claim().await;
    let (owner, sent) = (poll.owner(), poll.at);
    sleep(ms(200)).await;
    poll.queued(7);
    sleep(ms(300)).await;
    counter.grant(&owner, 8);
    let lease = lease(waiting).await;
    assert_eq!(lease.fence(), 8);
    assert_counts_from(&lease, sent, PRESENCE);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_overtakes_the_first_answer_counts_from_the_first_claim() {
    let mut counter = counter();
    let waiting = counter.wait();
    let (first, second) = (counter.claim().await, counter.claim().await);
    sleep(ms(400)).await;
    counter.grant(&second.owner(), 8);
    assert_counts_from(&lease(waiting).await, first.at, PRESENCE);
}

#[tokio::test(start_paused = true)]
async fn a_grant_never_counts_from_a_claim_that_was_not_answered() {
    let mut counter = counter();
    let waiting = counter.wait();
    let first = counter.claim().await;
    let (owner, sent) = (first.owner(), first.at);
    first.queued(7);
    let _unanswered = counter.claim().await;
    sleep(ms(300)).await;
    counter.grant(&owner, 8);
    assert_counts_from(&lease(waiting).await, sent, PRESENCE);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_to_an_older_claim_takes_nothing_back() {
    let mut counter = counter();
    let waiting = counter.wait();
    counter.claim().await.queued(7);
    let (older, newer) = (counter.claim().await, counter.claim().await);
    let (owner, sent) = (newer.owner(), newer.at);
    newer.queued(8);
    sleep(ms(1)).await;
    older.queued(7);
    sleep(ms(1)).await;
    counter.grant(&owner, 8);
    assert_still_waits(&waiting).await;
    counter.grant(&owner, 9);
    assert_counts_from(&lease(waiting).await, sent, PRESENCE);
}

#[tokio::test(start_paused = true)]
async fn word_of_an_ownership_that_has_gone_since_is_dropped() {
    let mut counter = counter();
    let waiting = counter.wait();
    let first = counter.claim().await;
    let (owner, sent) = (first.owner(), first.at);
    first.queued(8);
    sleep(ms(1)).await;
    for stale in [7, 8] {
        counter.grant(&owner, stale);
        assert_still_waits(&waiting).await;
    }
    counter.grant(&owner, 9);
    let lease = lease(waiting).await;
    assert_eq!(lease.fence(), 9);
    assert_counts_from(&lease, sent, PRESENCE);
}

/// Counterexample 1 of the protocol: the grant has ended and another has the key, when both the answer to a poll that
/// was sent during the grant and the word of it arrive.
#[tokio::test(start_paused = true)]
async fn a_grant_that_ended_while_its_message_stalled_is_not_revived_by_the_answer_to_a_later_poll() {
    let mut counter = counter();
    let waiting = counter.wait();
    counter.claim().await.queued(0);
    let poll = counter.claim().await;
    let owner = poll.owner();
    // Meanwhile: granted under fence 1, expired, taken by another under fence 2.
    sleep(ms(900)).await;
    poll.queued(2);
    sleep(ms(1)).await;
    counter.grant(&owner, 1);
    assert_still_waits(&waiting).await;
}

/// The model found it: of two claims under way the older is carried out first and takes the key, which is then deleted by
/// hand. Work would begin under an ownership that is known to have gone, and nobody would take back what the newer one has.
#[tokio::test(start_paused = true)]
async fn an_ownership_that_a_newer_answer_has_shown_to_be_over_makes_no_lease() {
    let mut counter = counter();
    let waiting = counter.wait();
    let (older, newer) = (counter.claim().await, counter.claim().await);
    newer.queued(8);
    sleep(ms(1)).await;
    older.answer(Claimed::held(8));
    assert_still_waits(&waiting).await;
    // What was asked since is believed, whatever its fence: the server may have lost its data, and its clock be behind.
    let since = counter.claim().await;
    let sent = since.at;
    since.answer(Claimed::held(8));
    assert_counts_from(&lease(waiting).await, sent, 30 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_grant_of_which_too_little_is_left_is_asked_for_again_and_then_lasts_a_whole_ttl() {
    // At 2,668 ms work that could not be renewed would be told to stop.
    for after in [2200, 2600, 2700, 2990, 3500] {
        let mut counter = counter();
        let waiting = counter.wait();
        let first = counter.claim().await;
        let (owner, sent) = (first.owner(), first.at);
        first.queued(7);
        let mut unanswered = Vec::new();
        while sent.elapsed() < ms(after) {
            tokio::select! {
                claim = counter.claim() => unanswered.push(claim),
                () = tokio::time::sleep_until(sent + ms(after)) => {}
            }
        }
        counter.grant(&owner, 8);
        let again = counter.claim().await;
        assert!(again.at - sent <= ms(after + 2), "at once: {:?}", again.at - sent);
        assert_eq!(again.owner(), owner);
        let sent = again.at;
        again.answer(Claimed::held(8));
        assert_counts_from(&lease(waiting).await, sent, 30 * SECOND);
    }
}

/// A lease that was granted with 2 s of it left, and when the claim was sent from which it counts.
async fn granted(counter: &mut Counter) -> (Lease, Instant) {
    let waiting = counter.wait();
    let first = counter.claim().await;
    let (owner, sent) = (first.owner(), first.at);
    first.queued(7);
    sleep(ms(500)).await;
    counter.grant(&owner, 8);
    (lease(waiting).await, sent)
}

#[tokio::test(start_paused = true)]
async fn the_grace_of_a_grant_is_a_tenth_of_it_so_that_no_token_fires_as_the_work_begins() {
    let mut counter = counter();
    let (lease, sent) = granted(&mut counter).await;
    assert!(!lease.cancel_token().is_cancelled());
    lease.cancel_token().cancelled().await;
    let told = sent.elapsed();
    let expected = certain(PRESENCE) - PRESENCE / 10;
    assert!((expected..expected + ms(12)).contains(&told), "{told:?}");
    assert!(lease.is_held());
    let lost = lease.lost().await;
    assert!(matches!(lost.reason, LossReason::Deadline { .. }), "{lost}");
    let (end, expected) = (sent.elapsed(), certain(PRESENCE));
    assert!((expected..expected + ms(2)).contains(&end), "{end:?}");
}

#[tokio::test(start_paused = true)]
async fn a_grant_is_renewed_at_once_to_the_whole_ttl() {
    let mut counter = counter();
    counter.renews([Ok(Renewed::Renewed)]);
    let (lease, sent) = granted(&mut counter).await;
    sleep(ms(1)).await;
    let renewals = counter.renewals();
    assert_eq!(renewals, [sent + ms(500)]);
    assert_counts_from(&lease, renewals[0], 30 * SECOND);
}

/// A store that has something to make sure of first says so, and the answer to the claim is its word.
#[tokio::test(start_paused = true)]
async fn a_grant_of_no_length_has_its_owner_ask_at_once_and_the_answer_counts() {
    let mut counter = counter();
    let waiting = counter.wait();
    let first = counter.claim().await;
    let owner = first.owner();
    first.queued(7);
    sleep(ms(300)).await;
    assert!(counter.seen.to.get().unwrap().granted(&owner, 8, Duration::ZERO));
    let (told, asked) = (Instant::now(), counter.claim().await);
    assert_eq!(asked.at, told);
    assert_still_waits(&waiting).await;
    let sent = asked.at;
    asked.answer(Claimed::held(8));
    assert_counts_from(&lease(waiting).await, sent, 30 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_on_too_few_replicas_counts_as_any_other_and_the_next_is_no_sooner() {
    let mut counter = counter();
    counter.renews([Ok(Renewed::thin(2, 1)), Ok(Renewed::thin(2, 0)), Ok(Renewed::Renewed)]);
    let (lease, sent) = granted(&mut counter).await;
    for (renewal, state) in [(0, LeaseState::AtRisk), (1, LeaseState::AtRisk), (2, LeaseState::Held)] {
        let due = sent + ms(500) + 10 * SECOND * renewal;
        tokio::time::sleep_until(due + ms(1)).await;
        assert_eq!(counter.renewals().last(), Some(&due), "{:?}", counter.renewals());
        assert_counts_from(&lease, due, 30 * SECOND);
        assert_eq!(lease.state(), state);
    }
    assert_eq!(counter.renewals().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn what_too_few_replicas_have_is_given_back_once_and_the_wait_is_over() {
    let mut counter = counter();
    let waiting = counter.wait();
    let asked = counter.claim().await;
    let _ = asked.answer.send(Err(StoreError::replicas(2, 1)));
    let start = Instant::now();
    let error = within(waiting).await.unwrap().unwrap_err();
    assert_eq!(start, Instant::now());
    let Error::Store { source, .. } = error else { panic!("{error:?}") };
    assert_eq!(source, StoreError::replicas(2, 1));
    sleep(60 * SECOND).await;
    assert_eq!(counter.releases(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_grant_whose_first_renewals_fail_or_are_not_answered_is_renewed_before_it_ends() {
    for fails in 1..3 {
        let mut counter = counter();
        counter.renews((0..fails).map(|_| Err(down())));
        counter.renews([Ok(Renewed::Renewed)]);
        let (lease, sent) = granted(&mut counter).await;
        tokio::time::sleep_until(sent + ms(2600)).await;
        assert_eq!(counter.renewals().len(), fails + 1);
        assert!(!lease.cancel_token().is_cancelled());
        assert_counts_from(&lease, *counter.renewals().last().unwrap(), 30 * SECOND);
    }
    // No answer: the second is sent by half of what is left, though an attempt may take 2 s.
    let mut counter = counter();
    let (lease, sent) = granted(&mut counter).await;
    tokio::time::sleep_until(sent + ms(501)).await;
    counter.renews([Ok(Renewed::Renewed)]);
    tokio::time::sleep_until(sent + ms(2600)).await;
    assert_eq!(counter.renewals().len(), 2);
    assert!(lease.valid_for() > 25 * SECOND, "{:?}", lease.valid_for());
}

#[tokio::test(start_paused = true)]
async fn a_fixed_lease_from_the_line_is_brought_to_its_ttl_and_not_renewed_after_that() {
    let mut counter = counter();
    counter.renews([Ok(Renewed::Renewed)]);
    let mut lock = counter.leases.lock("k");
    let waiting = tokio::spawn(async move { lock.lock_for(10 * SECOND).await.map(|fence| (lock, fence)) });
    let first = counter.claim().await;
    let owner = first.owner();
    first.queued(7);
    sleep(ms(500)).await;
    counter.grant(&owner, 8);
    let (lock, fence) = waiting.await.unwrap().unwrap();
    assert_eq!(fence, 8);
    let begun = Instant::now();
    let lost = lock.view().unwrap().lost().await;
    let (held, expected) = (begun.elapsed(), certain(10 * SECOND));
    assert!((expected..expected + ms(2)).contains(&held), "{held:?} {lost}");
    assert_eq!(counter.renewals().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn word_for_a_waiter_that_has_left_makes_no_lease_and_its_release_hands_it_on() {
    let mut counter = counter();
    let waiting = counter.wait();
    let first = counter.claim().await;
    let owner = first.owner();
    first.queued(7);
    sleep(ms(1)).await;
    waiting.abort();
    sleep(ms(1)).await;
    assert_eq!(counter.releases(), 1);
    counter.grant(&owner, 8);
    sleep(60 * SECOND).await;
    assert_eq!((counter.releases(), counter.renewals().len()), (1, 0));
    assert!(counter.claims.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_lease_granted_while_a_poll_travels_is_released_again_once_that_poll_can_take_nothing_any_more() {
    let mut counter = counter();
    let waiting = counter.wait();
    counter.claim().await.queued(7);
    let poll = counter.claim().await;
    counter.grant(&poll.owner(), 8);
    counter.renews([Ok(Renewed::Renewed)]);
    lease(waiting).await.release().await.unwrap();
    assert!(counter.releases() > 0);
    let surely_late = poll.at + 2 * poll.claim.not_after;
    tokio::time::sleep_until(surely_late + ms(10)).await;
    assert!(*counter.seen.releases.lock().unwrap().last().unwrap() >= surely_late);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_asks_each_poll_interval_whether_or_not_it_was_answered_and_with_its_ticket() {
    let mut counter = counter();
    let _waiting = counter.wait();
    let first = counter.claim().await;
    assert_eq!((first.claim.line, first.claim.ticket, first.claim.presence), (true, None, PRESENCE));
    let mut last = first.at;
    first.queued(7);
    let mut unanswered = Vec::new();
    for _ in 0..10 {
        let poll = counter.claim().await;
        assert!((ms(874)..=ms(1001)).contains(&(poll.at - last)), "{:?}", poll.at - last);
        assert_eq!(poll.claim.ticket, Some(Ticket(77)));
        last = poll.at;
        unanswered.push(poll);
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_two_in_line_also_ask_when_the_holders_time_ends_and_nobody_else_does() {
    for (ahead, next) in [(0, 401), (1, 402), (2, 1000), (50, 1000)] {
        let mut counter = counter();
        let _waiting = counter.wait();
        let first = counter.claim().await;
        let sent = first.at;
        first.answer(Claimed::queued(ahead, Some(ms(400)), 7, Ticket(1), None));
        let poll = counter.claim().await;
        let asked = poll.at - sent;
        assert!((ms(next)..=ms(next + 2)).contains(&asked), "{ahead} ahead: {asked:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_may_have_missed_word_asks_soon_and_not_all_at_once() {
    let mut counter = counter();
    let waiters: Vec<_> = (0..40).map(|_| counter.wait()).collect();
    for _ in &waiters {
        counter.claim().await.queued(7);
    }
    sleep(ms(10)).await;
    let gap = Instant::now();
    assert!(counter.seen.to.get().unwrap().missed());
    let mut claims = Vec::new();
    for _ in &waiters {
        claims.push(counter.claim().await);
    }
    let asked: Vec<_> = claims.iter().map(|claim| claim.at - gap).collect();
    assert!(asked.iter().all(|after| *after <= ms(127)), "{asked:?}");
    assert!(asked[39] - asked[0] > ms(30), "{asked:?}");
    assert!(counter.claims.try_recv().is_err(), "each of them once");
}

#[tokio::test(start_paused = true)]
async fn where_there_is_no_line_a_waiter_tries_again_in_growing_pauses_never_too_short_that_differ() {
    let mut firsts = Vec::new();
    for retry_in in [None, Some(20 * SECOND), Some(Duration::ZERO)] {
        let mut counter = counter();
        let _waiting = counter.wait();
        let mut asked = Vec::new();
        for _ in 0..20 {
            let claim = counter.claim().await;
            asked.push(claim.at);
            claim.answer(Claimed::busy(retry_in, None));
        }
        let pauses: Vec<_> = asked.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses.iter().all(|pause| (ms(2)..=ms(1001)).contains(pause)), "{pauses:?}");
        if retry_in != Some(Duration::ZERO) {
            assert!(pauses[10..].iter().all(|pause| *pause >= ms(499)), "{pauses:?}");
            firsts.extend(pauses[10..].iter().copied());
        }
    }
    firsts.dedup();
    assert!(firsts.len() > 10, "{firsts:?}");
}

#[tokio::test(start_paused = true)]
async fn without_a_line_a_waiter_comes_when_the_holders_time_ends() {
    let mut counter = counter();
    let waiting = counter.wait();
    let mut answered = None;
    // Until the pauses are long.
    for _ in 0..12 {
        let claim = counter.claim().await;
        answered = Some(Instant::now());
        claim.answer(Claimed::busy(Some(ms(200)), None));
    }
    let claim = counter.claim().await;
    let after = claim.at - answered.unwrap();
    assert!((ms(201)..=ms(206)).contains(&after), "{after:?}");
    claim.answer(Claimed::held(9));
    assert_eq!(lease(waiting).await.fence(), 9);
}

#[tokio::test(start_paused = true)]
async fn the_error_of_a_wait_that_ended_says_how_long_it_took_who_holds_the_key_and_for_how_much_longer() {
    let mut counter = counter();
    let waiting = tokio::spawn(counter.leases.lease("k").wait(ms(5500)).acquire());
    let mut told = Instant::now();
    let error = loop {
        tokio::select! {
            claim = counter.claim() => {
                told = Instant::now();
                claim.queued(7);
            }
            () = sleep(2 * SECOND) => break waiting.await.unwrap().unwrap_err(),
        }
    };
    match &error {
        Error::Contended { key, waited, holder, remaining, .. } => {
            assert_eq!((key.as_ref(), holder.as_deref(), *waited), ("k", Some("holder"), ms(5500)));
            let since = remaining.unwrap() + *waited;
            assert!(since > 24 * SECOND && since < 26 * SECOND, "counted down since it was told: {error}");
        }
        _ => panic!("{error}"),
    }
    assert!(told.elapsed() > SECOND);
    let text = error.to_string();
    assert!(text.starts_with("`k` is held by holder for 19.") && text.ends_with("waited 5.5s"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_in_trouble_names_the_trouble_and_one_that_recovered_names_the_holder() {
    for recovers in [false, true] {
        let mut counter = counter();
        let waiting = tokio::spawn(counter.leases.lease("k").wait(5 * SECOND).acquire());
        counter.claim().await.queued(7);
        let began = Instant::now();
        while !waiting.is_finished() {
            tokio::select! {
                claim = counter.claim() => match recovers && began.elapsed() > 3 * SECOND {
                    true => claim.queued(7),
                    false => claim.answer.send(Err(down())).unwrap(),
                },
                () = sleep(ms(1)) => {}
            }
        }
        let error = within(waiting).await.unwrap().unwrap_err();
        assert_eq!(error.is_contended(), recovers, "{error}");
        assert!(recovers || matches!(&error, Error::Store { source, .. } if source.may_pass()), "{error}");
    }
}

/// The last claim of a wait has little time, so it may come too late though all is well.
#[tokio::test(start_paused = true)]
async fn a_last_claim_that_came_too_late_for_its_wait_is_no_trouble_of_the_stores() {
    let mut counter = counter();
    let waiting = tokio::spawn(counter.leases.lease("k").wait(ms(1200)).acquire());
    counter.claim().await.queued(7);
    counter.claim().await.answer(Claimed::Late);
    let error = within(async {
        tokio::select! {
            error = waiting => error.unwrap().unwrap_err(),
            () = async { loop { counter.claim().await.answer(Claimed::Late) } } => unreachable!(),
        }
    });
    let error = error.await;
    assert!(matches!(&error, Error::Contended { holder: Some(label), .. } if &**label == "holder"), "{error}");
}
