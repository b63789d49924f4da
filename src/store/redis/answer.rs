//! What the page answers, in our words.
use super::server_error::ServerError;
use crate::{
    error::StoreError,
    settings::Replicas,
    store::{
        Claimed, Freed, Holding, Renewed, Ticket, Wrote,
        quorum::{Kept, Proposed},
    },
};
use std::{sync::Arc, time::Duration};

/// A word of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Word {
    Int(i64),
    Text(Vec<u8>),
    /// What no operation answers with.
    Other,
}

/// How many replicas are known to have what was done, or why the server would not say.
pub(super) type Had = Result<u32, ServerError>;

/// The answer to one operation: a name, and what belongs to it. And which replicas have it, if that was asked for.
#[derive(Clone)]
pub(super) struct Answer(Vec<Word>, Option<Had>);

impl Answer {
    pub(super) fn new(words: Vec<Word>) -> Self {
        Answer(words, None)
    }

    pub(super) fn on_replicas(self, had: Option<Had>) -> Self {
        Answer(self.0, had)
    }

    /// Of the replicas that have to have it, too few do.
    ///
    /// # Errors
    /// How many do.
    fn on_enough(&self, replicas: Option<Replicas>) -> Result<(), StoreError> {
        match (replicas.map(|replicas| replicas.wanted), &self.1) {
            (None, _) => Ok(()),
            (Some(wanted), Some(Ok(had))) if *had >= wanted => Ok(()),
            (Some(wanted), Some(Ok(had))) => Err(StoreError::replicas(wanted, *had)),
            (Some(wanted), Some(Err(said))) => {
                let why = Some(Box::new(said.clone().classify()));
                Err(StoreError::Replicas { wanted, had: 0, why })
            }
            (Some(wanted), None) => Err(StoreError::replicas(wanted, 0)),
        }
    }

    /// The server's own error, if this operation failed by itself.
    pub(super) fn error(&self) -> Option<ServerError> {
        (self.name() == "error").then(|| ServerError::new(&self.text(1)))
    }

    /// The claim came too late: our idea of the server's time is off.
    pub(super) fn is_late(&self) -> bool {
        self.name() == "late"
    }

    /// # Errors
    /// Also when it is held, and too few of these replicas have it.
    pub(super) fn claimed(&self, replicas: Option<Replicas>) -> Result<Claimed, StoreError> {
        match self.name() {
            "held" => {
                let fence = self.number(1)?;
                self.on_enough(replicas).map(|()| Claimed::held(fence))
            }
            "late" => Ok(Claimed::Late),
            "busy" => Ok(Claimed::busy(self.time(1), self.label(2))),
            "queued" => {
                let (ahead, seen, ticket) = (self.number(1)?, self.number(3)?, Ticket(self.number(4)?));
                Ok(Claimed::queued(ahead, self.time(2), seen, ticket, self.label(5)))
            }
            _ => Err(self.misunderstood()),
        }
    }

    pub(super) fn renewed(&self, replicas: Option<Replicas>) -> Result<Renewed, StoreError> {
        match self.name() {
            "renewed" => match self.on_enough(replicas) {
                Err(StoreError::Replicas { wanted, had, .. }) => Ok(Renewed::thin(wanted, had)),
                enough => enough.map(|()| Renewed::Renewed),
            },
            "gone" => Ok(Renewed::Gone),
            "taken" => Ok(Renewed::Taken),
            _ => Err(self.misunderstood()),
        }
    }

    pub(super) fn proposed(&self) -> Result<Proposed, StoreError> {
        match self.name() {
            "held" => Ok(Proposed::Held { fence: self.number(1)? }),
            "late" => Ok(Proposed::Late),
            "young" => Ok(Proposed::Young { settled_in: Duration::from_millis(self.number(1)?) }),
            "busy" => Ok(Proposed::Busy { retry_in: self.time(1), holder: self.label(2) }),
            _ => Err(self.misunderstood()),
        }
    }

    pub(super) fn kept(&self) -> Result<Kept, StoreError> {
        match self.name() {
            "renewed" => Ok(Kept::Ours),
            "gone" => Ok(Kept::Gone),
            "taken" => Ok(Kept::Taken),
            "late" => Ok(Kept::Late),
            _ => Err(self.misunderstood()),
        }
    }

    pub(super) fn freed(&self) -> Result<Freed, StoreError> {
        match self.name() {
            "released" => Ok(Freed::Released),
            "gone" => Ok(Freed::Gone),
            _ => Err(self.misunderstood()),
        }
    }

    /// Why the server would not tell the next owner, if so: it owns the key all the same.
    pub(super) fn untold(&self) -> Option<ServerError> {
        (self.name() == "released" && self.0.len() > 1).then(|| ServerError::new(&self.text(1)))
    }

    pub(super) fn holding(&self) -> Result<Option<Holding>, StoreError> {
        match self.name() {
            "free" => Ok(None),
            "holds" => {
                let label = self.label(3);
                let fence = if label.is_some() { Some(self.number(4)?) } else { None };
                Ok(Some(Holding::new(label, fence, self.time(1), self.number(2)?)))
            }
            _ => Err(self.misunderstood()),
        }
    }

    pub(super) fn wrote(&self) -> Result<Wrote, StoreError> {
        match self.name() {
            "written" => Ok(Wrote::Written),
            "stale" => Ok(Wrote::Stale { newest: self.number(1)? }),
            _ => Err(self.misunderstood()),
        }
    }

    pub(super) fn value(mut self) -> Result<Option<Vec<u8>>, StoreError> {
        match self.name() {
            "none" => return Ok(None),
            "value" => {
                if let Some(Word::Text(value)) = self.0.get_mut(1) {
                    return Ok(Some(std::mem::take(value)));
                }
            }
            _ => {}
        }
        Err(self.misunderstood())
    }

    fn name(&self) -> &str {
        match self.0.first() {
            Some(Word::Text(name)) => std::str::from_utf8(name).unwrap_or_default(),
            _ => "",
        }
    }

    fn text(&self, at: usize) -> String {
        match self.0.get(at) {
            Some(Word::Text(text)) => String::from_utf8_lossy(text).into_owned(),
            _ => String::new(),
        }
    }

    fn number(&self, at: usize) -> Result<u64, StoreError> {
        let number = match self.0.get(at) {
            Some(Word::Int(n)) => u64::try_from(*n).ok(),
            Some(Word::Text(text)) => std::str::from_utf8(text).ok().and_then(|t| t.parse().ok()),
            _ => None,
        };
        number.ok_or_else(|| self.misunderstood())
    }

    /// A time in milliseconds; below zero when the server cannot say.
    fn time(&self, at: usize) -> Option<Duration> {
        self.number(at).ok().map(Duration::from_millis)
    }

    fn label(&self, at: usize) -> Option<Arc<str>> {
        let label = self.text(at);
        (!label.is_empty()).then(|| label.into())
    }

    fn misunderstood(&self) -> StoreError {
        let name = self.name().to_owned();
        StoreError::refused(format!("Redis answered what the page never says (`{name}`); is there a proxy in between?"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(words: &[&str]) -> Answer {
        // What the page counts comes as a number, what must keep all its digits as text.
        let word = |word: &&str| word.parse().map_or_else(|_| Word::Text(word.as_bytes().to_vec()), Word::Int);
        Answer::new(words.iter().map(word).collect())
    }

    #[test]
    fn every_answer_of_the_page_is_read_as_it_is_meant() {
        let text = Answer::new(vec![Word::Text(b"held".to_vec()), Word::Text(b"9007199254740991".to_vec())]);
        assert_eq!(text.claimed(None), Ok(Claimed::held(9_007_199_254_740_991)));
        assert_eq!(said(&["held", "7"]).claimed(None), Ok(Claimed::held(7)));
        assert_eq!(said(&["late"]).claimed(None), Ok(Claimed::Late));
        let (left, holder) = (Some(Duration::from_millis(250)), Some("me:1".into()));
        assert_eq!(said(&["busy", "250", "me:1"]).claimed(None), Ok(Claimed::busy(left, holder.clone())));
        assert_eq!(said(&["busy", "-1", ""]).claimed(None), Ok(Claimed::busy(None, None)));
        let queued = Claimed::queued(3, left, 7, Ticket(9), holder.clone());
        assert_eq!(said(&["queued", "3", "250", "7", "9", "me:1"]).claimed(None), Ok(queued));

        assert_eq!(said(&["renewed"]).renewed(None), Ok(Renewed::Renewed));
        assert_eq!(said(&["gone"]).renewed(None), Ok(Renewed::Gone));
        assert_eq!(said(&["taken"]).renewed(None), Ok(Renewed::Taken));

        assert_eq!(said(&["released"]).freed(), Ok(Freed::Released));
        assert_eq!(said(&["gone"]).freed(), Ok(Freed::Gone));
        assert_eq!(said(&["released", "NOPERM no"]).untold(), Some(ServerError::new("NOPERM no")));
        assert_eq!((said(&["released"]).untold(), said(&["gone", "NOPERM no"]).untold()), (None, None));

        assert_eq!(said(&["free"]).holding(), Ok(None));
        let ours = Holding::new(holder, Some(7), left, 2);
        assert_eq!(said(&["holds", "250", "2", "me:1", "7"]).holding(), Ok(Some(ours)));
        let anothers = Holding::new(None, None, None, 0);
        assert_eq!(said(&["holds", "-1", "0", "", ""]).holding(), Ok(Some(anothers)));

        assert_eq!(said(&["written"]).wrote(), Ok(Wrote::Written));
        assert_eq!(said(&["stale", "8"]).wrote(), Ok(Wrote::Stale { newest: 8 }));
        assert_eq!(said(&["none"]).value(), Ok(None));
        assert_eq!(said(&["value", "bytes"]).value(), Ok(Some(b"bytes".to_vec())));

        assert_eq!(said(&["error", "OOM no"]).error(), Some(ServerError::new("OOM no")));
        assert_eq!(said(&["gone"]).error(), None);
        assert!(said(&["late"]).is_late() && !said(&["gone"]).is_late());
    }

    #[test]
    fn what_is_held_counts_when_enough_replicas_have_it_and_what_is_renewed_counts_all_the_same() {
        let replicas = Some(Replicas { wanted: 2, within: Duration::from_secs(1) });
        let on = |name, had| said(&[name, "7"]).on_replicas(had);
        let unblocked = || ServerError::new("UNBLOCKED it is a replica now");
        for enough in [Ok(2), Ok(3)] {
            assert_eq!(on("held", Some(enough.clone())).claimed(replicas), Ok(Claimed::held(7)));
            assert_eq!(on("renewed", Some(enough)).renewed(replicas), Ok(Renewed::Renewed));
        }
        for (had, count) in [(Some(Ok(1)), 1), (Some(Err(unblocked())), 0), (None, 0)] {
            let error = on("held", had.clone()).claimed(replicas).unwrap_err();
            assert!(matches!(error, StoreError::Replicas { wanted: 2, had, .. } if had == count), "{error:?}");
            assert_eq!(on("renewed", had.clone()).renewed(replicas), Ok(Renewed::thin(2, count)));
            // Nothing was given.
            assert_eq!(said(&["late"]).on_replicas(had.clone()).claimed(replicas), Ok(Claimed::Late));
            assert_eq!(on("gone", had).renewed(replicas), Ok(Renewed::Gone));
        }
        let error = on("held", Some(Err(unblocked()))).claimed(replicas).unwrap_err();
        let source = std::error::Error::source(&error).and_then(std::error::Error::source);
        assert!(error.may_pass() && source.is_some_and(|words| words.to_string().contains("UNBLOCKED")), "{error:?}");
    }

    #[test]
    fn an_answer_that_the_page_never_gives_is_an_error_and_not_a_guess() {
        let odd = || Answer::new(vec![Word::Text(b"renewed?".to_vec())]);
        assert!(
            odd().renewed(None).is_err()
                && odd().claimed(None).is_err()
                && odd().freed().is_err()
                && odd().value().is_err()
        );
        assert!(Answer::new(vec![Word::Text(b"held".to_vec()), Word::Int(-1)]).claimed(None).is_err());
        assert!(Answer::new(vec![]).holding().is_err());
    }
}
