//! What is said to the page and what it answers, in our words.
use super::{names::Companions, server_error::ServerError};
use crate::{
    Key,
    clock::Moment,
    error::StoreError,
    settings::Replicas,
    store::{
        Claim, Claimed, FencedWrite, Freed, Holding, Owner, Renewal, Renewed, Ticket, Wrote,
        quorum::{Hold, Kept, Proposal, Proposed},
    },
};
use std::{fmt, sync::Arc, time::Duration};

/// The page: everything that is done in Redis.
pub(super) const PAGE: &str = include_str!("protocol.lua");

/// The longest list of operations in one call. A claim takes the server some 10 µs, so it is never held for much more
/// than a millisecond.
pub(super) const LONGEST: usize = 128;

/// One operation of the page, ready to be sent.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) verb: Verb,
    pub(super) keys: Vec<String>,
    pub(super) args: Vec<Arg>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Claim,
    Renew,
    Release,
    Force,
    Inspect,
    Write,
    Read,
    Propose,
    Hold,
}

impl Verb {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Verb::Claim => "claim",
            Verb::Renew => "renew",
            Verb::Release => "release",
            Verb::Force => "force",
            Verb::Inspect => "inspect",
            Verb::Write => "write",
            Verb::Read => "read",
            Verb::Propose => "propose",
            Verb::Hold => "hold",
        }
    }
}

/// An argument of an operation.
#[derive(PartialEq)]
pub(super) enum Arg {
    Text(String),
    Bytes(Vec<u8>),
    Number(u64),
    /// A moment on our clock, to be sent as the server's microseconds.
    Until(Moment),
}

impl fmt::Debug for Arg {
    /// Owners are secrets and values are nobody's business.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arg::Text(_) => f.write_str("text"),
            Arg::Bytes(b) => write!(f, "{} bytes", b.len()),
            Arg::Number(n) => write!(f, "{n}"),
            Arg::Until(at) => write!(f, "{at:?}"),
        }
    }
}

impl Op {
    /// `asked` is when the claim was given to the store: its `not_after` counts from there.
    pub(super) fn claim(claim: &Claim, asked: Moment) -> Self {
        let ticket = claim.ticket.map_or_else(String::new, |t| t.0.to_string());
        let args = vec![
            Arg::Text(claim.owner.secret()),
            Arg::Number(millis(claim.ttl)),
            Arg::Number(millis(claim.presence)),
            Arg::Number(claim.line.into()),
            Arg::Text(ticket),
            Arg::Until(asked.after(claim.not_after)),
        ];
        Op { verb: Verb::Claim, keys: of_lease(&claim.key), args }
    }

    pub(super) fn renew(renewal: &Renewal) -> Self {
        let args =
            vec![Arg::Text(renewal.owner.secret()), Arg::Number(renewal.fence), Arg::Number(millis(renewal.ttl))];
        Op { verb: Verb::Renew, keys: vec![renewal.key.to_string()], args }
    }

    /// Whose lease this renews, if that is what it does.
    pub(super) fn renews(&self) -> Option<&str> {
        match (self.verb, self.args.first()) {
            (Verb::Renew | Verb::Hold, Some(Arg::Text(owner))) => Some(owner),
            _ => None,
        }
    }

    /// Whether this does what that would have done, though it be later.
    pub(super) fn asks_the_same(&self, that: &Op) -> bool {
        let same = |(this, that): (&Arg, &Arg)| this == that || matches!((this, that), (Arg::Until(_), Arg::Until(_)));
        let args = self.args.len() == that.args.len() && self.args.iter().zip(&that.args).all(same);
        self.verb == that.verb && self.keys == that.keys && args
    }

    pub(super) fn release(key: &Key, owner: &Owner) -> Self {
        Op { verb: Verb::Release, keys: of_lease(key), args: vec![Arg::Text(owner.secret())] }
    }

    pub(super) fn force(key: &Key) -> Self {
        Op { verb: Verb::Force, keys: of_lease(key), args: vec![] }
    }

    pub(super) fn inspect(key: &Key) -> Self {
        Op { verb: Verb::Inspect, keys: vec![key.to_string(), Companions::of(key).queue()], args: vec![] }
    }

    pub(super) fn write(write: &FencedWrite) -> Self {
        let names = Companions::of(&write.key);
        let keys = vec![write.key.to_string(), names.mark(), names.fence()];
        Op { verb: Verb::Write, keys, args: vec![Arg::Bytes(write.value.clone()), Arg::Number(write.fence)] }
    }

    pub(super) fn read(key: &Key) -> Self {
        Op { verb: Verb::Read, keys: vec![key.to_string(), Companions::of(key).fence()], args: vec![] }
    }

    /// `asked` as for a claim.
    pub(super) fn propose(proposal: &Proposal, asked: Moment) -> Self {
        let settled = if proposal.settled.is_zero() { 0 } else { millis(proposal.settled) };
        let args = vec![
            Arg::Text(proposal.owner.secret()),
            Arg::Number(millis(proposal.ttl)),
            Arg::Number(settled),
            Arg::Until(asked.after(proposal.not_after)),
        ];
        Op { verb: Verb::Propose, keys: with_fence(&proposal.key), args }
    }

    /// `asked` as for a claim.
    pub(super) fn hold(hold: &Hold, asked: Moment) -> Self {
        let args = vec![
            Arg::Text(hold.owner.secret()),
            Arg::Number(hold.fence),
            Arg::Number(millis(hold.ttl)),
            Arg::Number(hold.create.into()),
            Arg::Until(asked.after(hold.not_after)),
        ];
        Op { verb: Verb::Hold, keys: with_fence(&hold.key), args }
    }
}

fn with_fence(key: &Key) -> Vec<String> {
    vec![key.to_string(), Companions::of(key).fence()]
}

fn of_lease(key: &Key) -> Vec<String> {
    let names = Companions::of(key);
    vec![key.to_string(), names.fence(), names.queue(), names.waiters()]
}

/// Redis counts in milliseconds; a TTL is never shorter than what was asked for, and never nothing.
fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1)
}

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

    #[test]
    fn a_ttl_is_rounded_up_to_whole_milliseconds() {
        assert_eq!(millis(Duration::from_micros(1_500_001)), 1501);
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }

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
    fn only_a_renewal_renews_and_it_is_told_by_its_owner() {
        let owner = Owner::draw(&crate::store::Identity::new("me").unwrap()).unwrap();
        let renewal = Renewal::new("k".into(), owner.clone(), 1, Duration::from_secs(1));
        assert_eq!(Op::renew(&renewal).renews(), Some(&*owner.secret()));
        assert_eq!(Op::release(&"k".into(), &owner).renews(), None);
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

    #[test]
    fn debug_tells_neither_owner_nor_value() {
        let write = FencedWrite::new("v".into(), b"private".to_vec(), 1);
        let shown = format!("{:?}", Op::write(&write));
        assert!(!shown.contains("private") && shown.contains("7 bytes"), "{shown}");
    }
}
