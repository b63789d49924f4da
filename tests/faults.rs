//! The store of the virtual-time tests misbehaves as it is told to.
#![allow(clippy::unwrap_used, reason = "tests")]
mod support;
use leasehold::{
    Key, StoreError,
    store::{Claim, Claimed, Identity, MemoryStore, Owner, Renewal, Renewed, Store, contract},
};
use std::{sync::Arc, time::Duration};
use support::faults::{Fault, Faults, Faulty, Verb};
use tokio::time::{Instant, advance, sleep, timeout};

const TTL: Duration = Duration::from_secs(30);

fn faulty() -> (Arc<Faulty<MemoryStore>>, Faults, Claim) {
    let (store, faults) = Faulty::new(MemoryStore::new());
    (Arc::new(store), faults, claim("k"))
}

fn claim(key: &str) -> Claim {
    let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
    Claim::new(key.into(), owner, TTL)
}

async fn is_held(store: &Faulty<MemoryStore>) -> bool {
    store.inspect(&"k".into()).await.unwrap().is_some()
}

/// The answer within a second, if there is one.
async fn soon<T>(answer: impl Future<Output = T>) -> Option<T> {
    timeout(Duration::from_secs(1), answer).await.ok()
}

#[tokio::test(start_paused = true)]
async fn it_keeps_the_contract_until_it_is_told_otherwise() {
    assert_eq!(contract::check(async || Faulty::new(MemoryStore::new()).0).await, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_lost_request_is_not_carried_out_and_a_lost_reply_is() {
    for (fault, carried_out) in [(Fault::LoseRequest, false), (Fault::LoseReply, true)] {
        let (store, faults, claim) = faulty();
        faults.next(Verb::Claim, [fault]);
        assert_eq!(soon(store.claim(&claim)).await, None);
        assert_eq!(is_held(&store).await, carried_out);
        assert!(matches!(soon(store.claim(&claim)).await, Some(Ok(Claimed::Held { .. }))));
    }
}

#[tokio::test(start_paused = true)]
async fn a_delayed_request_is_carried_out_though_its_caller_gave_up() {
    let (store, faults, claim) = faulty();
    faults.next(Verb::Claim, [Fault::DelayRequest(Duration::from_millis(1500))]);
    assert_eq!(soon(store.claim(&claim)).await, None);
    assert!(!is_held(&store).await);
    sleep(Duration::from_millis(501)).await;
    assert!(is_held(&store).await);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_travels_too_long_is_late() {
    let (store, faults, claim) = faulty();
    faults.next(Verb::Claim, [Fault::DelayRequest(claim.not_after + Duration::from_millis(1))]);
    assert_eq!(store.claim(&claim).await, Ok(Claimed::Late));
}

#[tokio::test(start_paused = true)]
async fn a_delayed_reply_comes_late_and_what_it_answers_was_done_at_once() {
    let (store, faults, claim) = faulty();
    faults.next(Verb::Claim, [Fault::DelayReply(Duration::from_secs(5))]);
    let since = Instant::now();
    assert!(matches!(store.claim(&claim).await, Ok(Claimed::Held { .. })));
    assert_eq!(since.elapsed(), Duration::from_secs(5));
    let left = store.inspect(&claim.key).await.unwrap().unwrap().remaining;
    assert_eq!(left, Some(TTL - Duration::from_secs(5)));
}

#[tokio::test(start_paused = true)]
async fn what_is_held_goes_on_its_way_when_all_is_healed() {
    for (fault, carried_out) in [(Fault::HoldRequest, false), (Fault::HoldReply, true)] {
        let (store, faults, mut claim) = faulty();
        claim.not_after = TTL;
        faults.always(Verb::Claim, fault);
        let (other, request) = (store.clone(), claim.clone());
        let answer = tokio::spawn(async move { other.claim(&request).await });
        faults.until_sent(Verb::Claim, 1).await;
        sleep(Duration::from_secs(10)).await;
        assert!(!answer.is_finished());
        assert_eq!((is_held(&store).await, faults.in_flight()), (carried_out, 1));
        faults.heal();
        assert!(matches!(answer.await.unwrap(), Ok(Claimed::Held { .. })));
        assert_eq!((is_held(&store).await, faults.in_flight()), (true, 0));
        // And what comes later passes.
        assert!(matches!(soon(store.claim(&claim)).await, Some(Ok(Claimed::Held { .. }))));
    }
}

#[tokio::test(start_paused = true)]
async fn a_held_request_is_carried_out_though_its_caller_gave_up() {
    let (store, faults, claim) = faulty();
    faults.next(Verb::Claim, [Fault::HoldRequest]);
    assert_eq!(soon(store.claim(&claim)).await, None);
    faults.heal();
    sleep(Duration::from_millis(1)).await;
    assert!(is_held(&store).await);
}

#[tokio::test(start_paused = true)]
async fn an_error_is_answered_before_or_after_the_deed() {
    let error = StoreError::unavailable("the test says so");
    let faults_and_deeds = [(Fault::Fail(error.clone()), false), (Fault::FailAfter(error.clone()), true)];
    for (fault, carried_out) in faults_and_deeds {
        let (store, faults, claim) = faulty();
        faults.next(Verb::Claim, [fault]);
        assert_eq!(store.claim(&claim).await, Err(error.clone()));
        assert_eq!(is_held(&store).await, carried_out);
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_messages_come_before_all_and_a_key_before_both() {
    let (store, faults, claim) = faulty();
    let [a, b, c] = ["a", "b", "c"].map(StoreError::unavailable);
    faults.always(Verb::Claim, Fault::Fail(a.clone()));
    faults.next(Verb::Claim, [Fault::Fail(b.clone()), Fault::Pass]);
    let mut answers = Vec::new();
    for _ in 0..4 {
        answers.push(store.claim(&claim).await.err());
    }
    assert_eq!(answers, [Some(b), None, Some(a.clone()), Some(a)]);
    faults.on_key("k", Fault::Fail(c.clone()));
    assert_eq!(store.claim(&claim).await, Err(c));
    assert!(store.release(&claim.key, &claim.owner).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_list_is_one_message_and_the_log_says_what_was_sent_when() {
    let (store, faults, _) = faulty();
    let mut list = Vec::new();
    for key in ["a", "b"] {
        let claim = claim(key);
        let Ok(Claimed::Held { fence, .. }) = store.claim(&claim).await else { panic!("not held") };
        list.push(Renewal::new(claim.key, claim.owner, fence, TTL));
    }
    let start = Instant::now();
    advance(Duration::from_secs(3)).await;
    let error = StoreError::unavailable("the test says so");
    faults.next(Verb::Renew, [Fault::Pass, Fault::FailAfter(error.clone())]);
    assert_eq!(store.renew_all(&list).await, [Ok(Renewed::Renewed), Ok(Renewed::Renewed)]);
    assert_eq!(store.renew_all(&list).await, [Err(error.clone()), Err(error)]);
    let sent = faults.sent(Verb::Renew);
    assert_eq!((sent.len(), faults.count(Verb::Claim)), (2, 2));
    assert_eq!(sent[0].keys, [Key::from("a"), Key::from("b")]);
    assert_eq!((sent[0].at - start, &sent[0].fault), (Duration::from_secs(3), &Fault::Pass));

    faults.lane("a", 7);
    assert_eq!((store.lane(&"a".into()), store.lane(&"b".into())), (7, 0));
}
