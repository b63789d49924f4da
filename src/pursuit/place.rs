//! The place in the line, and the date of a grant.
use crate::{clock::Moment, store::Ticket};

/// The place in the line, and what has to be known to date a grant (rule C2 of the protocol, see `docs/safety.md`).
#[derive(Default)]
pub(super) struct Place {
    pub(super) ticket: Option<Ticket>,
    /// When the first claim was sent: before that, this owner can have owned nothing.
    first: Option<Moment>,
    /// The latest claim that was answered "queued": when it was sent, and which fence had been given by then. A grant with a
    /// larger fence was made after it was sent.
    base: Option<(Moment, u64)>,
}

impl Place {
    /// A claim is sent.
    pub(super) fn asked(&mut self, sent: Moment) {
        self.first.get_or_insert(sent);
    }

    /// The claim sent then was answered "queued". Answers may come out of order.
    pub(super) fn queued(&mut self, sent: Moment, seen: u64, ticket: Ticket) {
        self.ticket = Some(ticket);
        if self.base.is_none_or(|(base, _)| base <= sent) {
            self.base = Some((sent, seen));
        }
    }

    /// From when on an ownership under `fence` counts: before it can have begun, never from when word of it came. `None` when
    /// it is an older one that has gone since: by the time of the last answer its fence had been given.
    pub(super) fn granted_after(&self, fence: u64) -> Option<Moment> {
        match self.base {
            Some((_, seen)) if seen >= fence => None,
            Some((base, _)) => self.first.max(Some(base)),
            None => self.first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_counts_from_the_last_answer_that_had_not_seen_it_and_an_older_one_is_none() {
        let mut place = Place::default();
        assert_eq!(place.granted_after(1), None, "nothing was asked for yet");
        place.asked(Moment(10));
        place.asked(Moment(20));
        assert_eq!(place.granted_after(1), Some(Moment(10)), "word of it overtook the first answer");
        place.queued(Moment(20), 5, Ticket(1));
        assert_eq!(place.granted_after(6), Some(Moment(20)));
        assert_eq!(place.granted_after(5), None, "it had been given by then, and has gone");
        place.queued(Moment(10), 4, Ticket(1));
        assert_eq!(place.granted_after(6), Some(Moment(20)), "an answer that comes late takes nothing back");
        assert_eq!(place.granted_after(5), None);
    }
}
