//! Members that are late, one by one, on virtual time.
use crate::far::{Way, Ways, claim, fence, quorum, quorum_by_default};
use leasehold::store::{Claim, Claimed, Freed, Renewal, Renewed, Store};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

const TTL: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Whatever can be done at once is done.
async fn quiet() {
    sleep(ms(1)).await;
}

fn renewal(claim: &Claim, fence: u64) -> Renewal {
    Renewal::new(claim.key.clone(), claim.owner.clone(), fence, claim.ttl)
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_comes_to_its_turn_too_late_asks_nobody() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let late = claim("k", TTL);
    let asked = store.claim(&late);
    sleep(late.not_after + ms(1)).await;
    assert_eq!(asked.await, Ok(Claimed::Late));
    assert_eq!(members[0].asked("propose"), 0);
    let asked = store.claim(&late);
    sleep(late.not_after).await;
    fence(&asked.await);
}

#[tokio::test(start_paused = true)]
async fn a_proposal_that_is_carried_out_behind_its_release_is_given_back() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let other = claim("k", TTL);
    let holds = fence(&store.claim(&other).await);
    quiet().await;
    // Now it stands at two of three: another asks, and the third is late.
    members[2].store.force_release(&"k".into()).await.unwrap();
    let mut late = claim("k", TTL);
    late.not_after = SECOND;
    members[2].set(Ways { propose: Way::Mute(ms(900)), ..Ways::near() });
    assert!(matches!(store.claim(&late).await, Ok(Claimed::Busy { .. })));
    sleep(ms(950)).await;
    assert!(members[2].has("k").await, "it was carried out behind the first release");
    sleep(2 * SECOND).await;
    assert!(!members[2].has("k").await);
    assert_eq!(members[2].asked("release"), 2);
    assert_eq!(store.renew(&renewal(&other, holds)).await, Ok(Renewed::Renewed));
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_carried_out_behind_the_release_puts_nothing_back() {
    for way in [Way::Mute(ms(1900)), Way::Takes(ms(1900))] {
        let (store, members) = quorum(3, Duration::ZERO).await;
        let mine = claim("k", TTL);
        let holds = fence(&store.claim(&mine).await);
        // The attempt itself is settled by then.
        sleep(5 * SECOND).await;
        members[2].store.restart();
        members[2].set(Ways { hold: way, ..Ways::near() });
        assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed));
        assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Released));
        sleep(ms(1950)).await;
        assert!(matches!(way, Way::Takes(_)) || members[2].has("k").await, "it was put back behind the release");
        sleep(ms(2500)).await;
        assert!(!members[2].has("k").await, "{way:?}");
    }
}

/// It may take a key for a third of its TTL, and for 2 s at most.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_travels_too_long_puts_nothing_back() {
    for (ttl, too_long) in [(3 * SECOND, ms(1001)), (TTL, ms(2001))] {
        let (store, members) = quorum(3, Duration::ZERO).await;
        let mine = claim("k", ttl);
        let holds = fence(&store.claim(&mine).await);
        quiet().await;
        for (way, there) in [(too_long, false), (too_long - ms(2), true)] {
            members[2].store.restart();
            members[2].set(Ways { hold: Way::Mute(way), ..Ways::near() });
            assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed));
            sleep(way + ms(10)).await;
            assert_eq!(members[2].has("k").await, there, "{ttl:?}, {way:?}");
            members[2].set(Ways::near());
            assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed));
            quiet().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_put_back_for_as_long_as_it_is_renewed_and_not_when_it_is_over() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let mine = claim("k", TTL);
    let sent = Instant::now();
    let holds = fence(&store.claim(&mine).await);
    quiet().await;
    let valid = TTL - TTL / 100 - ms(2);
    sleep(valid - (Instant::now() - sent) - ms(1)).await;
    let mut last = Instant::now();
    for turn in 0..6 {
        members[turn % 3].store.restart();
        last = Instant::now();
        assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed));
        sleep(TTL / 2).await;
        assert!(members[turn % 3].has("k").await);
    }
    sleep(valid - (Instant::now() - last)).await;
    members.iter().for_each(|member| member.store.restart());
    assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Gone));
}

#[tokio::test(start_paused = true)]
async fn a_member_that_has_just_started_does_not_keep_those_from_being_heard_who_are_far() {
    let quarantine = 40 * SECOND;
    for members in [3, 5] {
        let (store, members) = quorum(members, quarantine).await;
        members[0].store.restart();
        // Just as many as a majority are old, and one of them is far.
        let far = members.len() / 2 + 1;
        members[far].set(Ways::all(Way::Takes(ms(80))));
        members[far + 1..].iter().for_each(|member| member.set(Ways::all(Way::Down)));
        let mine = claim("k", TTL);
        fence(&store.claim(&mine).await);
        assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Released));
    }
}

#[tokio::test(start_paused = true)]
async fn those_who_cannot_be_outvoted_are_waited_for_however_far_they_are() {
    let (store, members) = quorum(5, Duration::ZERO).await;
    members[0].set(Ways::all(Way::Down));
    members[1].set(Ways::all(Way::Refused));
    members[2].set(Ways::all(Way::Takes(ms(400))));
    let mine = claim("k", TTL);
    let holds = fence(&store.claim(&mine).await);
    assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed));
    assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Released));
}

#[tokio::test(start_paused = true)]
async fn who_shares_the_votes_with_another_does_not_wait_for_a_member_that_hangs() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    // An owner that died in the middle.
    let other = claim("k", TTL);
    members[0].store.claim(&other).await.unwrap();
    for (near, least, most) in [(Duration::ZERO, ms(10), ms(12)), (ms(100), ms(300), ms(302))] {
        let hangs = Way::Mute(60 * SECOND);
        members[0].set(Ways::all(Way::Takes(near)));
        members[1].set(Ways::all(Way::Takes(near)));
        members[2].set(Ways { release: Way::Takes(Duration::ZERO), ..Ways::all(hangs) });
        let start = Instant::now();
        let asked = timeout(SECOND, store.claim(&claim("k", TTL))).await;
        assert!(matches!(asked, Ok(Ok(Claimed::Busy { .. }))), "{asked:?}");
        let took = start.elapsed();
        assert!(took >= least && took <= most, "{took:?}, not {least:?} to {most:?}");
        sleep(SECOND).await;
        assert!(!members[1].has("k").await, "the vote is given back");
    }
}

#[tokio::test(start_paused = true)]
async fn the_time_that_the_last_ones_get_does_not_begin_anew_with_each_answer() {
    let (store, members) = quorum(5, Duration::ZERO).await;
    for member in &members[..2] {
        member.store.claim(&claim("k", TTL)).await.unwrap();
    }
    members[3].set(Ways::all(Way::Takes(ms(8))));
    members[4].set(Ways::all(Way::Mute(Duration::ZERO)));
    let start = Instant::now();
    let asked = timeout(SECOND, store.claim(&claim("k", TTL))).await;
    assert!(matches!(asked, Ok(Ok(Claimed::Busy { .. }))), "{asked:?}");
    assert!(start.elapsed() <= ms(12), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_member_that_has_started_waits_for_the_longest_ttl_that_was_asked_for_and_the_clocks() {
    let (store, members) = quorum_by_default(3);
    sleep(100 * SECOND).await;
    let first = claim("k", TTL);
    fence(&store.claim(&first).await);
    assert_eq!(store.release(&first.key, &first.owner).await, Ok(Freed::Released));
    quiet().await;
    members[0].store.restart();
    members[1].store.restart();
    let brief = claim("k", 3 * SECOND);
    sleep(TTL + ms(1900)).await;
    let error = store.claim(&brief).await.unwrap_err();
    assert!(error.may_pass() && error.to_string().contains("2 of 3"), "{error}");
    sleep(ms(200)).await;
    fence(&store.claim(&brief).await);
}

#[tokio::test(start_paused = true)]
async fn each_member_is_asked_once_to_let_go_of_what_it_surely_has() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let mine = claim("k", TTL);
    // One comes to have it only with a renewal.
    members[2].set(Ways { propose: Way::Refused, ..Ways::near() });
    let holds = fence(&store.claim(&mine).await);
    for _ in 0..3 {
        quiet().await;
        assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed));
    }
    quiet().await;
    assert!(members[2].has("k").await);
    // Nor while it is about to.
    members[2].set(Ways { release: Way::Takes(ms(100)), ..Ways::near() });
    assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Released));
    sleep(2 * SECOND).await;
    for member in &members {
        assert!(!member.has("k").await);
        assert_eq!(member.asked("release"), 1);
    }
    sleep(TTL).await;
    assert_eq!(members[0].asked("release"), 1);
    assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Gone));
}

#[tokio::test(start_paused = true)]
async fn a_release_gives_back_what_any_attempt_of_the_owner_has() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    for member in &members[..2] {
        member.store.claim(&claim("k", TTL)).await.unwrap();
    }
    members[2].set(Ways { release: Way::Down, ..Ways::near() });
    let mine = claim("k", TTL);
    // The first gets a vote that cannot be given back yet, which stands in the way of the second.
    for _ in 0..2 {
        assert!(matches!(store.claim(&mine).await, Ok(Claimed::Busy { .. })));
        quiet().await;
    }
    members[2].set(Ways::near());
    // A majority has nothing, so it was never the owner's. The rest is not waited for, and asked all the same.
    assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Gone));
    quiet().await;
    assert!(!members[2].has("k").await);
}

/// Its owner asks for the same key again under the same name, as one that waits does.
#[tokio::test(start_paused = true)]
async fn an_owner_that_has_lost_its_lease_begins_anew() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let mine = claim("k", TTL);
    let holds = fence(&store.claim(&mine).await);
    quiet().await;
    assert_eq!(store.claim(&mine).await, Ok(Claimed::held(holds)));
    for member in &members {
        member.store.force_release(&"k".into()).await.unwrap();
    }
    assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Gone));
    let again = timeout(SECOND, store.claim(&mine)).await.unwrap();
    assert!(fence(&again) > holds);
}

#[tokio::test(start_paused = true)]
async fn a_lease_lives_on_with_a_majority_of_whom_one_is_far_though_another_has_the_rest() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    members[0].set(Ways::all(Way::Down));
    members[2].set(Ways::all(Way::Takes(ms(80))));
    let mine = claim("k", 3 * SECOND);
    let holds = fence(&store.claim(&mine).await);
    quiet().await;
    // It comes back, and is given to an owner that dies.
    members[0].store.claim(&claim("k", TTL)).await.unwrap();
    members[0].set(Ways::near());
    for _ in 0..5 {
        assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed));
        let seen = store.inspect(&mine.key).await.unwrap().and_then(|holding| holding.fence);
        assert_eq!(seen, Some(holds));
        sleep(SECOND).await;
    }
    // But a member that hangs does not hold up for long what the same answer says of others.
    members[2].set(Ways::all(Way::Mute(Duration::ZERO)));
    for (ttl, least) in [(SECOND, ms(100)), (TTL, ms(300))] {
        let mut last = renewal(&mine, holds);
        last.ttl = ttl;
        let start = Instant::now();
        let renewed = timeout(SECOND, store.renew(&last)).await.unwrap();
        assert!(renewed.is_err_and(|error| error.may_pass()));
        let took = start.elapsed();
        assert!(took >= least && took <= least + ms(2), "{took:?} of {ttl:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_says_so_when_no_majority_was_told() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let mine = claim("k", TTL);
    fence(&store.claim(&mine).await);
    quiet().await;
    members[0].set(Ways::all(Way::Down));
    members[1].set(Ways::all(Way::Down));
    let failed = store.release(&mine.key, &mine.owner).await.unwrap_err();
    assert!(failed.may_pass() && failed.to_string().contains("2 of 3"), "{failed}");
    assert!(!members[2].has("k").await && members[0].has("k").await);
    // It goes on by itself.
    members[0].set(Ways::near());
    members[1].set(Ways::near());
    sleep(3 * SECOND).await;
    assert!(!members[0].has("k").await && !members[1].has("k").await);
}

#[tokio::test(start_paused = true)]
async fn a_member_that_is_down_is_not_asked_often_to_let_go() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let mine = claim("k", TTL);
    fence(&store.claim(&mine).await);
    quiet().await;
    members[2].set(Ways::all(Way::Down));
    assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Released));
    quiet().await;
    // It is under way.
    assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Gone));
    sleep(2 * TTL).await;
    let often = members[2].asked("release");
    assert!((4..12).contains(&often), "{often} times within a TTL");
    members[2].set(Ways::near());
    sleep(2 * TTL).await;
    assert_eq!(members[2].asked("release"), often, "the TTL has ended it");
}

#[test]
fn an_attempt_that_ends_where_no_runtime_is_leaves_giving_back_to_the_release() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let (store, members) = runtime.block_on(quorum(3, Duration::ZERO));
    let mine = claim("k", TTL);
    members[1].set(Ways::all(Way::Mute(Duration::ZERO)));
    members[2].set(Ways::all(Way::Mute(Duration::ZERO)));
    let mut asked = Box::pin(store.claim(&mine));
    runtime.block_on(async { _ = timeout(SECOND, &mut asked).await });
    drop(asked);
    runtime.block_on(async {
        members[0].set(Ways::all(Way::Down));
        members[1].set(Ways::near());
        members[2].set(Ways::near());
        assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Released));
        assert!(members[0].has("k").await);
        members[0].set(Ways::near());
        sleep(5 * SECOND).await;
        assert!(!members[0].has("k").await);
    });
}

#[tokio::test(start_paused = true)]
async fn a_member_that_refuses_is_not_asked_again_to_let_go() {
    let (store, members) = quorum(3, Duration::ZERO).await;
    let mine = claim("k", TTL);
    fence(&store.claim(&mine).await);
    quiet().await;
    members[2].set(Ways::all(Way::Refused));
    assert_eq!(store.release(&mine.key, &mine.owner).await, Ok(Freed::Released));
    sleep(2 * TTL).await;
    // With the others, in the background, and when nothing can be under way any more.
    assert_eq!(members[2].asked("release"), 3);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_renewed_is_not_forgotten_however_many_others_are() {
    let (store, _) = quorum(3, Duration::ZERO).await;
    let mine = claim("k", TTL);
    let holds = fence(&store.claim(&mine).await);
    let crowd = |name: &'static str| {
        let store = &store;
        async move {
            for n in 0..300 {
                fence(&store.claim(&claim(&format!("{name}:{n}"), TTL)).await);
            }
        }
    };
    for (n, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        // Whoever takes these never comes back.
        sleep(TTL * 4 / 5).await;
        crowd(name).await;
        assert_eq!(store.renew(&renewal(&mine, holds)).await, Ok(Renewed::Renewed), "{n}");
    }
}
