//! What is to be seen of a caller in the server, from the side.
use super::support::server::Connection;
use std::{
    cell::RefCell,
    net::{Ipv4Addr, TcpStream},
    time::{Duration, Instant},
};

/// The label of those whose calls are dropped.
pub const CALLER: &str = "caller";

/// What a caller has under a key and its companions. What it has is kept from running out: a leftover that a TTL removes
/// must not pass for one that was given back.
const TRACES: &str = "local found = {}
local function look(owner, where, key)
  if string.sub(owner or '', 1, #ARGV[1]) == ARGV[1] then
    found[#found + 1] = where .. ' ' .. owner
    redis.call('PEXPIRE', key, 60000)
  end
end
look(redis.call('GET', KEYS[1]), 'the key itself:', KEYS[1])
for _, owner in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do look(owner, 'a place in the line:', KEYS[2]) end
for _, owner in ipairs(redis.call('HKEYS', KEYS[3])) do look(owner, 'a record of a waiter:', KEYS[3]) end
return found";

pub struct Look {
    side: RefCell<Connection>,
    port: u16,
}

impl Look {
    pub fn at(port: u16) -> Look {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        Look { side: RefCell::new(Connection::over(stream).unwrap()), port }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    fn cmd(&self, words: &[&str]) -> super::support::server::Reply {
        self.side.borrow_mut().cmd(words)
    }

    pub fn traces(&self, key: &str) -> Vec<String> {
        let (queue, waiters) = (format!("{{{key}}}:queue"), format!("{{{key}}}:waiters"));
        let found = self.cmd(&["EVAL", TRACES, "3", key, &queue, &waiters, &format!("{CALLER}/")]);
        found.list().into_iter().filter_map(|trace| trace.text()).collect()
    }

    /// Nothing of a caller's is left under the key.
    pub async fn nothing_left(&self, key: &str, patience: Duration) -> Result<(), String> {
        wait(patience, || {
            let traces = self.traces(key);
            if traces.is_empty() { Ok(()) } else { Err(format!("left behind: {traces:?}")) }
        })
        .await
    }

    /// Nothing is left under the key, of nobody; but the fence, which is meant to stay.
    pub async fn nothing_of_anybody(&self, key: &str, patience: Duration) -> Result<(), String> {
        let names = [key.to_owned(), format!("{{{key}}}:queue"), format!("{{{key}}}:waiters")];
        wait(patience, || match names.iter().find(|name| self.cmd(&["EXISTS", name]).int() == 1) {
            None => Ok(()),
            Some(name) => Err(format!("`{name}` is still there")),
        })
        .await
    }

    pub fn value(&self, key: &str) -> Option<String> {
        self.cmd(&["GET", key]).text()
    }

    pub fn pttl(&self, key: &str) -> i64 {
        self.cmd(&["PTTL", key]).int()
    }

    /// Whether the process of the key's holder has subscribed to what the server says to it.
    pub fn is_heard(&self, key: &str) -> bool {
        let value = self.value(key).unwrap_or_default();
        let channel = format!("leasehold:{}", value.split('/').nth(1).unwrap_or_default());
        self.cmd(&["PUBSUB", "NUMSUB", &channel]).list()[1].int() == 1
    }

    pub fn waiting(&self, key: &str) -> i64 {
        self.cmd(&["ZCARD", &format!("{{{key}}}:queue")]).int()
    }
}

/// Waits until it is so, or says why it is not.
pub async fn wait(patience: Duration, mut so: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let start = Instant::now();
    loop {
        match so() {
            Ok(()) => return Ok(()),
            Err(why) if start.elapsed() > patience => return Err(why),
            Err(_) => tokio::time::sleep(Duration::from_millis(3)).await,
        }
    }
}
