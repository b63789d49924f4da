//! What a quorum of embedded stores has to do, on virtual time.
use crate::far::{self, REFUSED};
use leasehold::{
    Clock,
    store::{MemoryStore, Store, contract, quorum::QuorumStore},
};
use std::time::Duration;

fn quorum(members: usize) -> QuorumStore<MemoryStore> {
    let clock = Clock::tokio();
    let members = (0..members).map(|_| MemoryStore::with_clock(clock.clone()));
    QuorumStore::with_clock(members, clock.clone()).unwrap().quarantine(Duration::ZERO)
}

#[tokio::test(start_paused = true)]
async fn a_quorum_keeps_every_rule_of_a_store() {
    for members in [3, 5] {
        assert_eq!(contract::check(async || quorum(members)).await, Ok(()));
    }
}

#[test]
fn a_quorum_has_an_odd_number_of_members_and_at_least_three() {
    for wrong in [0, 1, 2, 4, 6] {
        let members: Vec<_> = (0..wrong).map(|_| MemoryStore::with_clock(Clock::system())).collect();
        let refused = QuorumStore::new(members).unwrap_err();
        assert_eq!(refused.setting, "quorum", "{wrong}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_quorum_keeps_no_values_and_says_where_they_go() {
    let refused = quorum(3).read(&"v".into()).await.unwrap_err();
    assert!(!refused.may_pass() && refused.to_string().contains("one store"), "{refused}");
}

#[tokio::test]
async fn a_quorum_takes_the_keys_that_its_members_take_and_tells_how_many_they_are() {
    let (store, _) = far::quorum(3, Duration::ZERO).await;
    assert_eq!(store.check(&"taken".into()), Ok(()));
    assert_eq!(store.check(&REFUSED.into()).map_err(|invalid| invalid.setting), Err("key"));
    assert!(format!("{store:?}").contains("members: 3"), "{store:?}");
}
