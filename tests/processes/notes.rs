//! What a worker writes down, a line each, and how the judge reads it again. A process that is killed has written what it
//! did: each line goes to its file in one call.
use rustix::time::{ClockId, clock_gettime};
use std::{collections::BTreeMap, fmt, fs, path::Path, str::FromStr};

/// Nanoseconds on a clock that all processes share and that counts suspension: the one that leases are measured with.
pub fn now() -> u64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: ClockId = ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: ClockId = ClockId::Monotonic;
    let now = clock_gettime(CLOCK);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// One lease, as its worker saw it.
#[derive(Clone, Debug, Default)]
pub struct Lease {
    /// The place of its process in the field; a process that is killed leaves it to another.
    pub worker: usize,
    pub key: u64,
    /// `with_lease` tells none.
    pub fence: Option<u64>,
    pub ttl: u64,
    /// When it was asked for, and when it was in hand.
    pub asked: u64,
    pub got: u64,
    pub steps: Vec<Step>,
    /// None when its process was killed, or its task ended.
    pub end: Option<End>,
}

/// What the work did in one poll: a piece of code without an await.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// When the poll began, before the guard had looked at the lease; and how long the lease was certain then.
    pub polled: u64,
    pub left_then: Option<u64>,
    /// The same as the step began.
    pub begun: u64,
    pub left: Option<u64>,
    /// The same when it was over.
    pub ended: u64,
    pub left_after: Option<u64>,
    /// What became of its write.
    pub accepted: Option<bool>,
}

/// How a lease ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    pub how: How,
    /// When the work was over, and when that was told.
    pub from: u64,
    pub at: u64,
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Released,
    /// It was not to last any longer.
    Agreed,
    Lost,
}

/// A line of the log. Leases are numbered within their process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    Got {
        number: u64,
        key: u64,
        fence: Option<u64>,
        ttl: u64,
        asked: u64,
        got: u64,
    },
    Step(u64, Step),
    End(u64, End),
    /// The process, or the machine, stood still.
    Starved {
        from: u64,
        until: u64,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or = |n: &Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
        match self {
            Note::Got { number, key, fence, ttl, asked, got } => {
                write!(f, "got {number} {key} {} {ttl} {asked} {got}", or(fence))
            }
            Note::Step(number, s) => {
                let accepted = s.accepted.map(u64::from);
                write!(f, "step {number} {} {} {} ", s.polled, or(&s.left_then), s.begun)?;
                write!(f, "{} {} {} {}", or(&s.left), s.ended, or(&s.left_after), or(&accepted))
            }
            Note::End(number, End { how, from, at, why }) => write!(f, "{how:?} {number} {from} {at} | {why}"),
            Note::Starved { from, until } => write!(f, "starved {from} {until}"),
        }
    }
}

impl FromStr for Note {
    type Err = String;
    fn from_str(line: &str) -> Result<Note, String> {
        parse(line).ok_or_else(|| format!("not a note: {line:?}"))
    }
}

fn parse(line: &str) -> Option<Note> {
    let (line, why) = line.split_once(" | ").unwrap_or((line, ""));
    let (kind, numbers) = line.split_once(' ')?;
    let number = |word: &str| if word == "-" { Some(None) } else { word.parse().ok().map(Some) };
    let numbers: Vec<Option<u64>> = numbers.split(' ').map(number).collect::<Option<_>>()?;
    let how = match kind {
        "Agreed" => How::Agreed,
        "Lost" => How::Lost,
        _ => How::Released,
    };
    match (kind, &numbers[..]) {
        ("got", &[Some(number), Some(key), fence, Some(ttl), Some(asked), Some(got)]) => {
            Some(Note::Got { number, key, fence, ttl, asked, got })
        }
        ("step", &[Some(number), Some(polled), left_then, Some(begun), left, Some(ended), left_after, accepted]) => {
            let accepted = accepted.map(|n| n == 1);
            Some(Note::Step(number, Step { polled, left_then, begun, left, ended, left_after, accepted }))
        }
        ("Released" | "Agreed" | "Lost", &[Some(number), Some(from), Some(at)]) => {
            Some(Note::End(number, End { how, from, at, why: why.to_owned() }))
        }
        ("starved", &[Some(from), Some(until)]) => Some(Note::Starved { from, until }),
        _ => None,
    }
}

/// A time in which leases may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Whose; everybody's if none.
    pub worker: Option<usize>,
    pub from: u64,
    pub until: u64,
}

/// What the process in that place wrote down: its leases, and when it stood still.
pub fn read(log: &Path, worker: usize) -> (Vec<Lease>, Vec<Trouble>) {
    // A process that is just starting has written nothing; one that writes right now may be in the middle of a line.
    let text = fs::read_to_string(log).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let (mut leases, mut starved) = (BTreeMap::<u64, Lease>::new(), Vec::new());
    for line in whole.lines() {
        match line.parse().unwrap() {
            Note::Got { number, key, fence, ttl, asked, got } => {
                leases.insert(number, Lease { worker, key, fence, ttl, asked, got, ..Lease::default() });
            }
            Note::Step(number, step) => leases.get_mut(&number).expect("a lease before its steps").steps.push(step),
            // It may have been lost before its work began.
            Note::End(number, end) => drop(leases.get_mut(&number).map(|lease| lease.end = Some(end))),
            Note::Starved { from, until } => starved.push(Trouble { worker: Some(worker), from, until }),
        }
    }
    (leases.into_values().collect(), starved)
}

#[test]
fn what_is_written_down_is_read_again() {
    let step =
        Step { polled: 1, left_then: Some(2), begun: 3, left: None, ended: 4, left_after: Some(0), accepted: None };
    let end = End { how: How::Lost, from: 8, at: 9, why: "it | was so".into() };
    for note in [
        Note::Got { number: 1, key: 2, fence: None, ttl: 3, asked: 4, got: 5 },
        Note::Got { number: 1, key: 2, fence: Some(u64::MAX), ttl: 3, asked: 4, got: 5 },
        Note::Step(7, step),
        Note::Step(7, Step { left: Some(5), accepted: Some(true), ..step }),
        Note::Step(7, Step { accepted: Some(false), ..step }),
        Note::End(7, end.clone()),
        Note::End(7, End { how: How::Agreed, ..end.clone() }),
        Note::End(7, End { how: How::Released, why: String::new(), ..end }),
        Note::Starved { from: 1, until: 2 },
    ] {
        assert_eq!(note.to_string().parse(), Ok(note));
    }
    assert!("step 1 2".parse::<Note>().is_err() && "".parse::<Note>().is_err());
}
