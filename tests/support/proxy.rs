//! A TCP proxy that stands between a client and Redis and fails on command, the way networks do.
//!
//! It lives on a thread and runtime of its own, so a test that blocks its runtime, or pauses its time, does not stop it.
//! It moves whole protocol messages, and counts replies to know which request each one answers; on a connection that
//! subscribes in RESP2 the two don't match, so arm no reply faults there.
use super::{PATIENCE, traffic};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    time::Duration,
};
use tokio::{net::TcpListener, sync::watch};

/// What a request to claim, to renew or to release contains, and the text of the page does not.
pub const CLAIM: &str = "\r\nclaim\r\n";
pub const RENEW: &str = "\r\nrenew\r\n";
pub const RELEASE: &str = "\r\nrelease\r\n";

/// The handle: faults are switched here, and dropping it ends the proxy and its connections.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// What happens to what travels in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// It arrives.
    Pass,
    /// It arrives so much later.
    Delay(Duration),
    /// It arrives when this ends. The end of a connection is held too: the other side hears nothing at all.
    Hold,
    /// It never arrives, and nothing that comes after it on its connection does either (but its end): no TCP stream goes
    /// on behind a gap.
    Drop,
}

/// How a reply gets lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The connection is reset in its place.
    Reset,
    /// The connection says nothing more, until one side closes it.
    Silence,
}

/// What has gone through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections accepted so far.
    pub accepted: usize,
    /// Connections there are now.
    pub open: usize,
    /// Requests that went on to the server.
    pub requests: usize,
    /// Their bytes.
    pub request_bytes: usize,
    /// Replies and pushes that went on to the client.
    pub replies: usize,
    /// Their bytes.
    pub reply_bytes: usize,
    /// Messages that arrived here and will never arrive there.
    pub lost: usize,
    /// Messages that are being held now, those that wait behind another one not counted.
    pub held: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) requests: Flow,
    pub(super) replies: Flow,
    pub(super) listening: bool,
    /// How often what was held was let go.
    pub(super) deliveries: u64,
    /// How often all connections were reset.
    pub(super) resets: u64,
}

pub(super) struct Shared {
    pub(super) target: SocketAddr,
    pub(super) rules: watch::Sender<Rules>,
    pub(super) counts: watch::Sender<Counts>,
    pub(super) armed: Mutex<Vec<Armed>>,
    /// Whether the port is open, as opposed to whether it should be.
    pub(super) listening: (Mutex<bool>, Condvar),
}

/// A fault that waits for a request.
pub(super) struct Armed {
    pub(super) within: Vec<u8>,
    pub(super) fault: Fault,
}

#[derive(Clone, Copy)]
pub(super) enum Fault {
    Cut { after: usize },
    Held,
    Reply(Fate),
}

/// What becomes of one reply.
#[derive(Clone, Copy)]
pub(super) enum Fate {
    Arrives,
    Held,
    Lost(Then),
}

impl Proxy {
    /// Starts a proxy on a free port of the loopback, to another port of it.
    pub fn to(port: u16) -> Proxy {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        listener.set_nonblocking(true).expect("a listener that does not block");
        let address = listener.local_addr().expect("the address of a listener");
        let rules = Rules { requests: Flow::Pass, replies: Flow::Pass, listening: true, deliveries: 0, resets: 0 };
        let shared = Arc::new(Shared {
            target: (Ipv4Addr::LOCALHOST, port).into(),
            rules: watch::Sender::new(rules),
            counts: watch::Sender::new(Counts::default()),
            armed: Mutex::default(),
            listening: (Mutex::new(true), Condvar::new()),
        });
        let (stop, mut stopped) = watch::channel(false);
        let thread = std::thread::spawn({
            let shared = shared.clone();
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
                runtime.block_on(async {
                    let listener = TcpListener::from_std(listener).expect("a listener");
                    tokio::select! {
                        never = traffic::accept(listener, address, &shared) => match never {},
                        _ = stopped.wait_for(|stop| *stop) => {}
                    }
                });
            }
        });
        Proxy { address, shared, stop, thread: Some(thread) }
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
    /// The same as a URL.
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Everything arrives again, what was held included; no fault is armed any more. What was lost stays lost, on its
    /// connection.
    pub fn pass(&self) {
        self.armed().clear();
        self.switch(|r| {
            (r.requests, r.replies, r.listening) = (Flow::Pass, Flow::Pass, true);
            r.deliveries += 1;
        });
    }
    /// What happens to requests from now on.
    pub fn requests(&self, flow: Flow) {
        self.switch(|r| r.requests = flow);
    }
    /// What happens to replies from now on.
    pub fn replies(&self, flow: Flow) {
        self.switch(|r| r.replies = flow);
    }
    /// Silence both ways: nothing arrives, no connection ends, new connections hear nothing. As TCP repeats what was not
    /// acknowledged, `pass` delivers it all; to lose it, `reset_all` first.
    pub fn blackhole(&self) {
        self.switch(|r| (r.requests, r.replies) = (Flow::Hold, Flow::Hold));
    }
    /// Resets all connections there are now; the server sees them closed. What they held is lost.
    pub fn reset_all(&self) {
        self.switch(|r| r.resets += 1);
    }
    /// Refuses new connections until `pass`; those there are go on.
    pub fn refuse(&self) {
        self.switch(|r| r.listening = false);
    }

    /// Lets the first `bytes` of the next request that contains `within` through, then resets its connection.
    pub fn cut_request(&self, within: impl AsRef<[u8]>, bytes: usize) {
        self.arm(within.as_ref(), Fault::Cut { after: bytes });
    }
    /// Holds the next request that contains `within`, and what comes behind it on its connection, until `deliver`.
    pub fn hold_request(&self, within: impl AsRef<[u8]>) {
        self.arm(within.as_ref(), Fault::Held);
    }
    /// Loses the reply to the next request that contains `within` (to any, if that is empty). The request was carried
    /// out.
    pub fn lose_reply(&self, within: impl AsRef<[u8]>, then: Then) {
        self.arm(within.as_ref(), Fault::Reply(Fate::Lost(then)));
    }
    /// Holds the reply to the next request that contains `within`, and what comes behind it, until `deliver`.
    pub fn hold_reply(&self, within: impl AsRef<[u8]>) {
        self.arm(within.as_ref(), Fault::Reply(Fate::Held));
    }
    /// Delivers what `hold_reply` and `hold_request` hold.
    pub fn deliver(&self) {
        self.switch(|r| r.deliveries += 1);
    }

    /// What has gone through so far.
    pub fn counts(&self) -> Counts {
        *self.shared.counts.borrow()
    }
    /// Waits until the counts are as wanted.
    pub async fn until(&self, wanted: impl Fn(&Counts) -> bool) -> Counts {
        let mut counts = self.shared.counts.subscribe();
        match tokio::time::timeout(PATIENCE, counts.wait_for(|c| wanted(c))).await {
            Ok(seen) => *seen.expect("the sender is ours"),
            Err(_) => panic!("the proxy waited in vain; it has seen {:?}", self.counts()),
        }
    }

    fn switch(&self, change: impl FnOnce(&mut Rules)) {
        self.shared.rules.send_modify(change);
        let wanted = self.shared.rules.borrow().listening;
        let (listening, changed) = &self.shared.listening;
        let listening = listening.lock().expect("nobody panics here");
        let waited = changed.wait_timeout_while(listening, PATIENCE, |is| *is != wanted).expect("nor here");
        assert!(!waited.1.timed_out(), "the proxy's thread does not run");
    }
    fn arm(&self, within: &[u8], fault: Fault) {
        self.armed().push(Armed { within: within.to_vec(), fault });
    }
    fn armed(&self) -> MutexGuard<'_, Vec<Armed>> {
        self.shared.armed.lock().expect("no test panics while it arms a fault")
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        // Joined, so that no port or connection of this test is left to the next one.
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) && !std::thread::panicking() {
            panic!("the proxy panicked");
        }
    }
}
