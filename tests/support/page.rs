//! The page, spoken to without the library: what the store sends, word for word.
use super::server::{Reply, Server};

const PAGE: &str = include_str!("../../src/store/redis/protocol.lua");

/// No bound: far beyond the clock of any server.
pub const EVER: u64 = 9_000_000_000_000_000;

/// An owner as the library makes them, told apart by its label and number.
pub fn owner(label: &str, n: u32) -> String {
    format!("{label}/{:016x}/{n:08x}-0000-4000-8000-000000000000", 0xab00 + n)
}

/// The inbox of [`owner`].
pub fn inbox(n: u32) -> String {
    format!("leasehold:{:016x}", 0xab00 + n)
}

/// One operation on a key that has no braces in it.
#[derive(Clone, Debug)]
pub struct Op {
    keys: Vec<String>,
    words: Vec<String>,
}

impl Op {
    pub fn renew(key: &str, owner: &str, fence: &str, ttl: u64) -> Op {
        op(key, &[], &["renew", owner, fence, &ttl.to_string()])
    }
    pub fn release(key: &str, owner: &str) -> Op {
        op(key, &["fence", "queue", "waiters"], &["release", owner])
    }
    pub fn force(key: &str) -> Op {
        op(key, &["fence", "queue", "waiters"], &["force"])
    }
    pub fn inspect(key: &str) -> Op {
        op(key, &["queue"], &["inspect"])
    }
    pub fn write(key: &str, value: &str, fence: u64) -> Op {
        op(key, &["mark", "fence"], &["write", value, &fence.to_string()])
    }
    pub fn read(key: &str) -> Op {
        op(key, &["fence"], &["read"])
    }
}

fn op(key: &str, companions: &[&str], words: &[&str]) -> Op {
    let mut keys = vec![key.to_owned()];
    keys.extend(companions.iter().map(|c| format!("{{{key}}}:{c}")));
    Op { keys, words: words.iter().map(|w| (*w).to_owned()).collect() }
}

/// A claim with everything that can be said in one.
#[derive(Clone, Debug)]
pub struct Claim<'a> {
    pub key: &'a str,
    pub owner: &'a str,
    pub ttl: u64,
    pub presence: u64,
    pub line: bool,
    pub ticket: &'a str,
    pub not_after: u64,
}

impl<'a> Claim<'a> {
    /// A minute, without the line.
    pub fn of(key: &'a str, owner: &'a str) -> Self {
        Claim { key, owner, ttl: 60_000, presence: 30_000, line: false, ticket: "", not_after: EVER }
    }
    /// A minute, in line.
    pub fn in_line(key: &'a str, owner: &'a str) -> Self {
        Claim { line: true, ..Self::of(key, owner) }
    }
    pub fn op(&self) -> Op {
        let (ttl, presence, not_after) = (self.ttl.to_string(), self.presence.to_string(), self.not_after.to_string());
        let line = if self.line { "1" } else { "0" };
        let words = ["claim", self.owner, &ttl, &presence, line, self.ticket, &not_after];
        op(self.key, &["fence", "queue", "waiters"], &words)
    }
}

/// The server's time in microseconds, and the answer to each operation, as words.
pub fn list(server: &Server, ops: &[Op]) -> (u64, Vec<Vec<String>>) {
    let keys: Vec<&str> = ops.iter().flat_map(|o| &o.keys).map(String::as_str).collect();
    let count = keys.len().to_string();
    let mut words = vec!["EVAL", PAGE, &count];
    words.extend(keys);
    words.extend(ops.iter().flat_map(|o| &o.words).map(String::as_str));
    let mut reply = server.cmd(&words).list();
    let answers = reply.split_off(1);
    let text = |r: Reply| r.text().unwrap();
    let words = |answer| match answer {
        Reply::List(items) => items.into_iter().map(text).collect(),
        one => vec![text(one)],
    };
    (reply[0].int().unsigned_abs(), answers.into_iter().map(words).collect())
}

/// The answer to one operation.
pub fn run(server: &Server, op: Op) -> Vec<String> {
    list(server, &[op]).1.pop().unwrap()
}

/// The answer to one claim.
pub fn claim(server: &Server, claim: Claim<'_>) -> Vec<String> {
    run(server, claim.op())
}

/// The fence of a claim that must be answered "held".
#[track_caller]
pub fn held(server: &Server, claim: Claim<'_>) -> String {
    let answer = run(server, claim.op());
    assert_eq!(answer[0], "held", "{claim:?}: {answer:?}");
    answer[1].clone()
}
