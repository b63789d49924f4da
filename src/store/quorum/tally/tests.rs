use super::*;

const FIVE: Size = Size { members: 5, majority: 3 };

fn busy(ms: u64) -> Result<Proposed, StoreError> {
    Ok(Proposed::Busy { retry_in: Some(Duration::from_millis(ms)), holder: Some("other".into()) })
}
fn down() -> StoreError {
    StoreError::unavailable("down")
}

#[test]
fn a_majority_is_more_than_half() {
    assert_eq!([3, 5, 7].map(|members| Size::of(members).majority), [2, 3, 4]);
}

#[test]
fn a_majority_wins_with_the_largest_fence_that_it_proposed() {
    let mut votes = Proposals::new(FIVE);
    assert_eq!(votes.add(Ok(Proposed::Held { fence: 4 })), None);
    assert_eq!(votes.add(Err(down())), None);
    assert_eq!(votes.add(Ok(Proposed::Held { fence: 9 })), None);
    assert_eq!(votes.add(busy(1)), None);
    assert_eq!(votes.add(Ok(Proposed::Held { fence: 2 })), Some(Won::Fence(9)));
}

#[test]
fn who_has_lost_is_told_when_a_majority_can_be_free() {
    let mut votes = Proposals::new(FIVE);
    for end in [50, 10, 30] {
        votes.add(busy(end));
    }
    let Ok(Claimed::Busy { retry_in, holder }) = votes.lost() else { panic!() };
    assert_eq!((retry_in, holder.as_deref()), (Some(Duration::from_millis(10)), Some("other")));
    votes.add(busy(20));
    votes.add(busy(40));
    let Ok(Claimed::Busy { retry_in, .. }) = votes.lost() else { panic!() };
    assert_eq!(retry_in, Some(Duration::from_millis(30)), "three of five have ended");
}

#[test]
fn without_a_majority_that_answers_it_is_trouble_and_not_contention() {
    let mut votes = Proposals::new(FIVE);
    assert_eq!((votes.add(busy(1)), votes.add(Err(down()))), (None, None));
    assert!(matches!(votes.add(Err(down())), Some(Won::Not(Ok(Claimed::Busy { .. })))), "somebody is in the way");
    assert!(matches!(votes.add(Err(down())), Some(Won::Not(Err(error))) if error.may_pass()));
    let mut votes = Proposals::new(FIVE);
    (0..3).for_each(|_| drop(votes.add(Err(StoreError::refused("no")))));
    assert!(votes.lost().is_err_and(|error| !error.may_pass()));
    let mut votes = Proposals::new(FIVE);
    (0..3).for_each(|_| drop(votes.add(Ok(Proposed::Late))));
    assert_eq!(votes.lost(), Ok(Claimed::Late));
}

#[test]
fn a_vote_that_is_over_says_what_stood_in_the_way() {
    #[derive(Debug, PartialEq)]
    enum Why {
        Busy,
        Late,
        MayPass,
        Refused,
    }
    let late = || Ok(Proposed::Late);
    let (down, refused) = (|| Err(down()), || Err(StoreError::refused("no")));
    let held = || Ok(Proposed::Held { fence: 1 });
    for (answers, why) in [
        (vec![held(), held(), busy(1), late(), down()], Why::Busy),
        (vec![held(), held(), late(), down()], Why::Late),
        (vec![held(), held(), late(), late(), late()], Why::Late),
        (vec![busy(1), late(), down()], Why::Busy),
        (vec![held(), held(), down()], Why::MayPass),
        (vec![busy(1), busy(1), down(), down(), down()], Why::MayPass),
        (vec![busy(1), late(), down(), refused(), refused()], Why::MayPass),
        (vec![held(), held(), refused(), refused(), refused()], Why::Refused),
    ] {
        let mut votes = Proposals::new(FIVE);
        let shown = format!("{answers:?}");
        answers.into_iter().for_each(|answer| drop(votes.add(answer)));
        let lost = match votes.lost() {
            Ok(Claimed::Busy { .. }) => Why::Busy,
            Ok(Claimed::Late) => Why::Late,
            Ok(other) => panic!("{other:?}"),
            Err(error) if error.may_pass() => Why::MayPass,
            Err(_) => Why::Refused,
        };
        assert_eq!(lost, why, "{shown}");
    }
}

#[test]
fn a_vote_is_over_as_soon_as_no_majority_is_left() {
    for (one, other) in [(busy(1), Ok(Proposed::Late)), (Err(down()), Err(StoreError::refused("no")))] {
        let mut votes = Proposals::new(FIVE);
        assert_eq!(votes.add(one.clone()), None);
        assert_eq!(votes.add(other), None);
        assert_eq!(votes.add(Ok(Proposed::Held { fence: 1 })), None);
        assert!(matches!(votes.add(one), Some(Won::Not(_))));
    }
}

#[test]
fn an_error_says_how_many_failed_and_why_the_last_did() {
    let mut failures = Failures::default();
    assert_eq!(
        failures.error(FIVE, "answered").to_string(),
        format!("{}", StoreError::unavailable("no majority of the 5 members answered"))
    );
    failures.add(down());
    failures.add(StoreError::refused("no"));
    let error = failures.error(FIVE, "answered");
    assert!(error.may_pass() && error.to_string().ends_with("no majority of the 5 members answered; 2 of 5 failed"));
    let source = std::error::Error::source(&error).map(ToString::to_string);
    assert_eq!(source, Some(StoreError::refused("no").to_string()));
}

#[test]
fn where_a_member_cannot_say_when_it_is_free_nobody_is_told_when_a_majority_is() {
    let never = || Ok(Proposed::Busy { retry_in: None, holder: None });
    let mut votes = Proposals::new(FIVE);
    for answer in [busy(50), never(), never()] {
        votes.add(answer);
    }
    assert_eq!(votes.lost(), Ok(Claimed::busy(Some(Duration::from_millis(50)), Some("other".into()))));
    votes.add(never());
    assert_eq!(votes.lost(), Ok(Claimed::busy(None, Some("other".into()))));
    // Shared among those who asked at once.
    let mut votes = Proposals::new(FIVE);
    votes.add(busy(50));
    votes.add(busy(50));
    assert_eq!(votes.lost(), Ok(Claimed::busy(None, Some("other".into()))));
}

#[test]
fn a_confirmation_is_decided_when_it_cannot_be_otherwise() {
    let decided = |answers: &[Result<Kept, StoreError>]| {
        let mut votes = Holds::new(FIVE);
        answers.iter().for_each(|answer| votes.add(answer.clone()));
        votes.is_decided().then(|| votes.verdict().map_err(|error| error.may_pass()))
    };
    let (ours, gone, taken, late, failed) =
        (Ok(Kept::Ours), Ok(Kept::Gone), Ok(Kept::Taken), Ok(Kept::Late), Err(down()));
    for against in [&gone, &taken, &late, &failed] {
        let against = || against.clone();
        assert_eq!(decided(&[against(), against(), ours.clone(), ours.clone()]), None);
        assert_eq!(
            decided(&[against(), against(), ours.clone(), ours.clone(), ours.clone()]),
            Some(Ok(Renewed::Renewed))
        );
    }
    let three = |a: &_, b: &_, c: &_| decided(&[Clone::clone(a), Clone::clone(b), Clone::clone(c)]);
    assert_eq!(three(&gone, &gone, &gone), Some(Ok(Renewed::Gone)));
    assert_eq!(three(&gone, &gone, &taken), Some(Ok(Renewed::Taken)));
    assert_eq!(three(&gone, &taken, &late), Some(Err(true)));
    assert_eq!(three(&late, &late, &failed), Some(Err(true)));
}

#[test]
fn what_each_member_does_is_done_when_a_majority_has_answered() {
    let mut done = Done::new(FIVE, 1);
    assert_eq!((done.add(Ok(false)), done.add(Err(down()))), (None, None));
    assert!(done.last().is_err_and(|error| error.may_pass() && error.to_string().contains("1 of 5")));
    assert_eq!(done.add(Ok(true)), Some(true));
    assert_eq!(done.add(Ok(false)), Some(true));
    assert_eq!(done.last(), Ok(true));
    let mut nothing = Done::new(FIVE, 3);
    assert_eq!(nothing.last(), Ok(false));
    assert_eq!(nothing.add(Ok(false)), Some(false));
}

#[test]
fn a_lease_is_lost_only_when_no_majority_can_have_it() {
    let mut votes = Holds::new(FIVE);
    for answer in [Ok(Kept::Taken), Ok(Kept::Gone), Err(down()), Err(down())] {
        votes.add(answer);
    }
    assert!(votes.is_decided(), "no majority can confirm it now");
    assert!(votes.verdict().is_err_and(|error| error.may_pass()), "but may later");
    votes.add(Ok(Kept::Gone));
    assert_eq!(votes.verdict(), Ok(Renewed::Taken));
}

#[test]
fn a_key_is_free_when_a_majority_says_so_and_unknown_when_too_few_say_anything() {
    let mut views = Views::new(FIVE);
    assert_eq!((views.add(Ok(None)), views.add(Ok(None)), views.add(Err(down()))), (None, None, None));
    assert!(views.last().is_err_and(|error| error.may_pass()));
    assert_eq!(views.add(Ok(None)), Some(None));
    // Another program's, without a TTL.
    let mut views = Views::new(FIVE);
    let lasting = || Ok(Some(Holding::new(None, None, None, 0)));
    assert_eq!((views.add(lasting()), views.add(lasting())), (None, None));
    assert_eq!(views.add(lasting()).flatten().map(|holding| holding.remaining), Some(None));
    let mut views = Views::new(FIVE);
    for (label, fence) in [("a", 1), ("b", 1), ("a", 2)] {
        let view = Holding::new(Some(label.into()), Some(fence), Some(Duration::from_secs(1)), 0);
        assert_eq!(views.add(Ok(Some(view.clone()))), None);
        assert_eq!(views.add(Ok(None)).flatten(), None);
    }
}

#[test]
fn the_view_of_a_majority_ends_when_a_majority_lets_it_end() {
    let view = |fence, ms| Ok(Some(Holding::new(Some("a".into()), Some(fence), Some(Duration::from_millis(ms)), 0)));
    let mut views = Views::new(FIVE);
    for view in [view(7, 30), Ok(None), view(6, 90), view(7, 10)] {
        assert_eq!(views.add(view), None);
    }
    assert_eq!(views.last(), Ok(None), "nobody has a majority");
    let shared = views.add(view(7, 20)).flatten().map(|holding| (holding.fence, holding.remaining));
    assert_eq!(shared, Some((Some(7), Some(Duration::from_millis(10)))));
}
