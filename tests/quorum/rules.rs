//! What a quorum of embedded stores has to do, on virtual time.
use crate::net::{Net, Site};
use leasehold::{
    Clock,
    store::{Claim, Claimed, Freed, Identity, MemoryStore, Owner, Store, contract, quorum::QuorumStore},
};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::{Instant, timeout};

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

/// An attempt that was lost may have something at a member that hangs; what was won later does not wait for that.
#[tokio::test(start_paused = true)]
async fn what_an_owner_has_won_is_given_back_at_once_though_a_member_hangs_since_it_lost() {
    let clock = Clock::tokio();
    let sites: Vec<_> = (0..3).map(|_| Site::new(MemoryStore::with_clock(clock.clone()), None)).collect();
    let stopped_until = Arc::new(Mutex::new(Instant::now()));
    let net = |site: &Arc<Site>| Net { site: site.clone(), stopped_until: stopped_until.clone(), cut: Arc::default() };
    let store = QuorumStore::with_clock(sites.iter().map(net), clock).unwrap().quarantine(Duration::ZERO);
    let me = Identity::new("me").unwrap();
    let claim = || Claim::new("k".into(), Owner::draw(&me).unwrap(), Duration::from_secs(30));
    let (first, second) = (claim(), claim());
    assert!(matches!(store.claim(&first).await, Ok(Claimed::Held { .. })));
    sites[2].hang(Duration::from_secs(3600));
    for _ in 0..3 {
        assert!(matches!(store.claim(&second).await, Ok(Claimed::Busy { .. })));
    }
    for Claim { key, owner, .. } in [&first, &second] {
        if *owner == second.owner {
            assert!(matches!(store.claim(&second).await, Ok(Claimed::Held { .. })));
        }
        let released = timeout(Duration::from_millis(100), store.release(key, owner)).await;
        assert_eq!(released, Ok(Ok(Freed::Released)));
        for site in &sites[..2] {
            assert_eq!(site.store.inspect(key).await, Ok(None));
        }
    }
}
