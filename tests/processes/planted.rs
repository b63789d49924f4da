//! A judge that cannot convict proves nothing: everything it looks for is put before it once.
use super::{
    alone,
    field::{Field, Setup},
    judge::{Breach, Evidence, kinds},
    notes::{End, How, Lease, Step, Trouble},
    resource::Write,
    support::PATIENCE,
    worker,
};
use std::time::{Duration, Instant};

const MS: u64 = 1_000_000;
const TTL: u64 = 1000 * MS;

/// A lease from `from` to `until`, with a step each 10 ms, all of them in order. Times in milliseconds.
fn lease(worker: usize, fence: u64, from: u64, until: u64) -> Lease {
    let step = |at: u64| Step {
        polled: at * MS,
        left_then: Some(TTL / 2),
        begun: at * MS + 1000,
        left: Some(TTL / 2),
        ended: (at + 2) * MS,
        left_after: Some(TTL / 2),
        accepted: Some(true),
    };
    let steps = (from..until - 2).step_by(10).map(step).collect();
    let end = End { how: How::Released, from: until * MS, at: until * MS, why: String::new() };
    let (asked, got) = (from.saturating_sub(100) * MS, from * MS);
    Lease { worker, key: 0, fence: Some(fence), ttl: TTL, asked, got, steps, end: Some(end) }
}

/// Two workers that take turns.
fn in_order() -> Evidence {
    let leases = vec![lease(0, 10, 1000, 1100), lease(1, 11, 1100, 1200), lease(0, 12, 1200, 1300)];
    let write = |(fence, at): (u64, u64)| Write { key: 0, fence, at: at * MS, accepted: true };
    let writes = [(10, 1050), (11, 1150), (12, 1250)].map(write).to_vec();
    let keys = vec!["{k0}:fence".into()];
    Evidence { leases, writes, keys, troubles: Vec::new(), data_lost: false }
}

/// What is found when this is done to them.
#[track_caller]
fn convicts(of: &[Breach], plant: impl FnOnce(&mut Evidence)) {
    let mut evidence = in_order();
    assert_eq!(evidence.judge(), []);
    plant(&mut evidence);
    let found = evidence.judge();
    assert_eq!(kinds(&found).into_iter().collect::<Vec<_>>(), of, "{found:?}");
}

fn lost(lease: &mut Lease, at: u64) {
    lease.end = Some(End { how: How::Lost, from: at * MS, at: at * MS, why: String::new() });
}

#[test]
fn a_step_between_two_of_another_owners_is_an_overlap() {
    // A step longer.
    convicts(&[Breach::Overlap], |e| e.leases[0] = lease(0, 10, 1000, 1105));
    // One within the other, and the third after both.
    convicts(&[Breach::Overlap], |e| e.leases[0] = lease(0, 10, 1000, 1195));
    // One around two.
    convicts(&[Breach::Overlap], |e| e.leases[0] = lease(0, 10, 1000, 1400));
    // Also one that tells no fence.
    convicts(&[Breach::Overlap], |e| {
        let mut other = lease(1, 0, 1040, 1045);
        other.fence = None;
        other.steps.iter_mut().for_each(|s| (s.left_then, s.left, s.left_after, s.accepted) = (None, None, None, None));
        e.leases.push(other);
    });
    // Where the data was lost, that has to be.
    convicts(&[], |e| {
        e.leases[0] = lease(0, 10, 1000, 1105);
        e.data_lost = true;
    });
    // Other keys are other matters.
    convicts(&[], |e| {
        e.leases[0] = lease(0, 10, 1000, 1105);
        e.leases[0].key = 1;
    });
}

#[test]
fn a_process_that_was_stopped_in_the_middle_of_a_step_is_an_owner_for_as_long_as_it_was_certain() {
    let stopped = |left: u64| {
        move |e: &mut Evidence| {
            let last = e.leases[0].steps.last_mut().unwrap();
            (last.left, last.ended, last.left_after) = (Some(left * MS), 5000 * MS, Some(0));
        }
    };
    convicts(&[], stopped(5));
    convicts(&[Breach::Overlap], stopped(50));
}

#[test]
fn a_poll_that_began_past_validity_is_found_and_one_that_overran_it_is_not() {
    convicts(&[Breach::StepPastValidity], |e| e.leases[0].steps[9].left_then = Some(0));
    convicts(&[], |e| {
        let last = e.leases[0].steps.last_mut().unwrap();
        (last.left_then, last.left, last.left_after) = (Some(1), Some(0), Some(0));
    });
}

#[test]
fn writes_that_go_the_wrong_way_are_found() {
    convicts(&[Breach::StaleWriteAccepted], |e| e.writes.push(Write { fence: 11, ..e.writes[2] }));
    convicts(&[], |e| e.writes.push(Write { fence: 11, accepted: false, ..e.writes[2] }));
    convicts(&[], |e| e.writes.push(Write { fence: 11, key: 1, ..e.writes[2] }));
    // Also when there is nothing but the resource to hold anything.
    convicts(&[Breach::StaleWriteAccepted], |e| {
        e.writes.push(Write { fence: 11, ..e.writes[2] });
        e.data_lost = true;
    });
    convicts(&[Breach::RightfulWriteRefused], |e| e.leases[1].steps[3].accepted = Some(false));
    convicts(&[], |e| {
        let step = &mut e.leases[1].steps[3];
        (step.accepted, step.left, step.left_after) = (Some(false), Some(MS), Some(0));
    });
}

#[test]
fn a_fence_that_does_not_grow_is_found() {
    convicts(&[Breach::FenceNotLarger], |e| e.leases[2].fence = Some(10));
    convicts(&[Breach::FenceNotLarger], |e| e.leases[2].fence = Some(9));
    convicts(&[Breach::FenceNotLarger], |e| {
        e.leases[2].fence = Some(9);
        e.data_lost = true;
    });
    // It was asked for before the other was in hand, so only their work tells their order.
    convicts(&[Breach::FenceNotLarger], |e| e.leases[1].fence = Some(9));
    convicts(&[], |e| {
        e.leases[1].fence = Some(9);
        e.data_lost = true;
    });
}

#[test]
fn a_loss_without_a_reason_is_found() {
    convicts(&[Breach::LostForNothing], |e| lost(&mut e.leases[0], 1100));
    let trouble = |worker, from: u64, until: u64| Trouble { worker, from: from * MS, until: until * MS };
    for excuse in
        [trouble(Some(0), 1050, 1060), trouble(None, 1050, 1060), trouble(None, 0, 150), trouble(None, 0, 9999)]
    {
        convicts(&[], |e| {
            lost(&mut e.leases[0], 1100);
            e.troubles.push(excuse);
        });
    }
    // Somebody else's, one that was over for a TTL, one that came after.
    for other in [trouble(Some(1), 1050, 1060), trouble(Some(0), 0, 0), trouble(None, 1102, 1103)] {
        convicts(&[Breach::LostForNothing], |e| {
            lost(&mut e.leases[0], 1101);
            e.troubles.push(other);
        });
    }
    convicts(&[], |e| e.leases[0].end = None);
}

#[test]
fn a_key_that_is_left_is_found() {
    convicts(&[Breach::KeyLeft], |e| e.keys.push("k0".into()));
    convicts(&[Breach::KeyLeft], |e| e.keys.push("{k0}:queue".into()));
}

/// The whole of it, with a worker that takes no look at its lease and a resource that does not compare.
#[test]
fn a_worker_that_goes_on_without_its_lease_is_convicted_by_what_its_process_did() {
    if worker::works() {
        return;
    }
    let _alone = alone();
    let test = "planted::a_worker_that_goes_on_without_its_lease_is_convicted_by_what_its_process_did";
    let (durable, compares, careless) = (true, false, true);
    let field = Field::open(Setup { test, workers: 2, keys: 1, durable, compares, careless });
    let mut had = None;
    until("the careless one works", || {
        let leases = field.evidence().leases;
        had = leases.iter().find(|lease| lease.worker == 0 && !lease.steps.is_empty()).and_then(|lease| lease.fence);
        had.is_some()
    });
    field.child(0).stop();
    until("another works", || field.writes().iter().any(|write| Some(write.fence) > had));
    field.child(0).resume();
    let seen = field.writes().len();
    until("both do", || {
        let writes = field.writes().split_off(seen);
        writes.iter().any(|write| Some(write.fence) == had) && writes.iter().any(|write| Some(write.fence) > had)
    });
    let (evidence, _) = field.close();
    let found = kinds(&evidence.judge());
    for breach in [Breach::Overlap, Breach::StepPastValidity, Breach::StaleWriteAccepted] {
        assert!(found.contains(&breach), "{breach:?} was not found, but {found:?}");
    }
    assert!(!found.contains(&Breach::LostForNothing) && !found.contains(&Breach::KeyLeft), "{found:?}");
}

fn until(what: &str, mut event: impl FnMut() -> bool) {
    let start = Instant::now();
    while !event() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What the numbers of a run are counted from.
#[test]
fn what_was_covered_is_counted() {
    let mut evidence = in_order();
    let covered = evidence.covered();
    assert_eq!((covered.acquisitions, covered.hand_overs, covered.steps, covered.writes), (3, 2, 30, 3));
    assert_eq!((covered.losses, covered.undisturbed, covered.overran, covered.refused), (0, 0, 0, 0));
    lost(&mut evidence.leases[0], 1100);
    evidence.leases[1] = lease(1, 11, 1100, 2200);
    assert_eq!((evidence.covered().losses, evidence.covered().undisturbed, evidence.covered().hand_overs), (1, 1, 0));
    evidence.troubles.push(Trouble { worker: None, from: 2000 * MS, until: 2001 * MS });
    assert_eq!(evidence.covered().undisturbed, 0);
}
