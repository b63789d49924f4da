//! The place in the line, and the date of a grant.
use crate::{clock::Moment, store::Ticket};

/// The place in the line, and what has to be known to date a grant (rule C2 of the protocol, see `docs/safety.md`).
#[derive(Default)]
pub(super) struct Place {
    pub(super) ticket: Option<Ticket>,
    /// When the first claim was sent: before that, this owner can have owned nothing.
    first: Option<Moment>,
    /// When the latest of the claims was sent that were answered "queued". Before it was, a later grant cannot have been made.
    base: Option<Moment>,
    /// An ownership under this fence or a smaller one has ended, and since when we know.
    over: Option<(u64, Moment)>,
}

impl Place {
    /// A claim is sent.
    pub(super) fn asked(&mut self, sent: Moment) {
        self.first.get_or_insert(sent);
    }

    /// The claim sent then was answered "queued", now. Answers may come out of order.
    pub(super) fn queued(&mut self, sent: Moment, seen: u64, ticket: Ticket, now: Moment) {
        self.ticket = Some(ticket);
        self.base = self.base.max(Some(sent));
        self.ended(seen, now);
    }

    /// The claim sent then was answered "held", now: whether that may still be so. An answer to another claim can have shown
    /// it to be over, but not for a claim that was sent since: what the server says then is so, whatever the fence.
    pub(super) fn held(&mut self, sent: Moment, fence: u64, now: Moment) -> bool {
        let lasts = self.over.is_none_or(|(over, known)| fence > over || sent >= known);
        self.ended(fence.saturating_sub(1), now);
        lasts
    }

    /// From when on an ownership under `fence` counts: before it can have begun, never from when word of it came. `None` when
    /// it is one that has ended since.
    pub(super) fn granted_after(&self, fence: u64) -> Option<Moment> {
        if self.over.is_some_and(|(over, _)| fence <= over) { None } else { self.first.max(self.base) }
    }

    fn ended(&mut self, fence: u64, now: Moment) {
        if self.over.is_none_or(|(over, _)| fence > over) {
            self.over = Some((fence, now));
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
        place.queued(Moment(20), 5, Ticket(1), Moment(30));
        assert_eq!(place.granted_after(6), Some(Moment(20)));
        assert_eq!(place.granted_after(5), None, "it had been given by then, and has gone");
        place.queued(Moment(10), 4, Ticket(1), Moment(31));
        assert_eq!(place.granted_after(6), Some(Moment(20)), "an answer that comes late takes nothing back");
        assert_eq!(place.granted_after(5), None);
    }

    #[test]
    fn an_answer_under_way_cannot_bring_back_what_another_has_shown_to_be_over() {
        let mut place = Place::default();
        place.asked(Moment(10));
        assert!(place.held(Moment(10), 5, Moment(30)));
        assert!(place.held(Moment(10), 5, Moment(30)), "the same again");
        assert!(!place.held(Moment(20), 4, Moment(31)));
        assert_eq!(place.granted_after(4), None);
        assert!(place.granted_after(5).is_some(), "it is the one that we had");
        place.queued(Moment(20), 5, Ticket(1), Moment(40));
        assert!(!place.held(Moment(39), 5, Moment(41)));
        assert!(place.held(Moment(40), 5, Moment(50)), "asked since");
        assert!(place.held(Moment(20), 6, Moment(50)));
    }
}
