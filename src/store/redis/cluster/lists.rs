//! All keys of a list have to be in one slot, and while a slot is being moved, in one place.
use super::super::{job::Job, protocol::Sending};
use std::collections::HashMap;

/// Takes a list apart by slot. What is in one slot keeps its order.
pub(in super::super) fn by_slot(jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let mut lists: Vec<Vec<Job>> = vec![];
    let mut open: HashMap<u16, usize> = HashMap::new();
    for job in jobs {
        let slot = job.op.slot();
        match open.get(&slot) {
            Some(&at) if job.op.sending == Sending::Listed => lists[at].push(job),
            _ => {
                if job.op.sending == Sending::Listed {
                    open.insert(slot, lists.len());
                } else {
                    // What comes after it in its slot must not get ahead of it.
                    open.remove(&slot);
                }
                lists.push(vec![job]);
            }
        }
    }
    lists
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock::Moment,
        store::{Identity, Owner, redis::protocol::Op},
    };

    #[test]
    fn a_list_is_taken_apart_by_slot_and_each_slot_keeps_its_order() {
        let owner = Owner::draw(&Identity::new("me").unwrap()).unwrap();
        let job = |key: &str, sending| {
            let op = Op { sending, ..Op::release(&key.into(), &owner) };
            Job::new(op, Moment(0)).0
        };
        let (listed, alone) = (Sending::Listed, Sending::Alone);
        let jobs = vec![
            job("{a}:1", listed),
            job("{b}:1", listed),
            job("{a}:2", listed),
            job("{a}:3", alone),
            job("{a}:4", listed),
            job("{b}:2", listed),
            job("{a}:5", Sending::Asking { all_keys: false }),
            job("{a}:6", listed),
        ];
        let lists: Vec<Vec<_>> =
            by_slot(jobs).iter().map(|list| list.iter().map(|job| job.op.keys[0].clone()).collect()).collect();
        assert_eq!(
            lists,
            [
                vec!["{a}:1", "{a}:2"],
                vec!["{b}:1", "{b}:2"],
                vec!["{a}:3"],
                vec!["{a}:4"],
                vec!["{a}:5"],
                vec!["{a}:6"]
            ]
        );
    }
}
