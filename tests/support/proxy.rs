//! A TCP proxy that stands between a client and Redis and fails on command, the way networks do.
//!
//! It lives on a thread and runtime of its own, so a test that blocks its runtime, or pauses its time, does not stop it.
//! It moves whole protocol messages, and counts replies to know which request each one answers; on a connection that
//! subscribes in RESP2 the two don't match, so arm no reply faults there.
use super::{PATIENCE, resp};
use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpSocket, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::{mpsc, watch},
    time::Instant,
};

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
struct Rules {
    requests: Flow,
    replies: Flow,
    listening: bool,
    /// How often held replies were let go.
    deliveries: u64,
    /// How often all connections were reset.
    resets: u64,
}

struct Shared {
    target: SocketAddr,
    rules: watch::Sender<Rules>,
    counts: watch::Sender<Counts>,
    armed: Mutex<Vec<Armed>>,
    /// Whether the port is open, as opposed to whether it should be.
    listening: (Mutex<bool>, Condvar),
}

/// A fault that waits for a request.
struct Armed {
    within: Vec<u8>,
    fault: Fault,
}

#[derive(Clone, Copy)]
enum Fault {
    Cut { after: usize },
    Reply(Fate),
}

/// What becomes of one reply.
#[derive(Clone, Copy)]
enum Fate {
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
                        never = accept(listener, address, &shared) => match never {},
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
    /// Loses the reply to the next request that contains `within` (to any, if that is empty). The request was carried
    /// out.
    pub fn lose_reply(&self, within: impl AsRef<[u8]>, then: Then) {
        self.arm(within.as_ref(), Fault::Reply(Fate::Lost(then)));
    }
    /// Holds the reply to the next request that contains `within`, and what comes behind it, until `deliver`.
    pub fn hold_reply(&self, within: impl AsRef<[u8]>) {
        self.arm(within.as_ref(), Fault::Reply(Fate::Held));
    }
    /// Delivers what `hold_reply` holds.
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

async fn accept(listener: TcpListener, address: SocketAddr, shared: &Arc<Shared>) -> Infallible {
    let mut rules = shared.rules.subscribe();
    let mut port = Port::Open(listener);
    loop {
        let listening = rules.borrow_and_update().listening;
        port = match port {
            Port::Open(listener) if !listening => {
                drop(listener);
                Port::Kept(keep(address))
            }
            Port::Kept(socket) if listening => Port::Open(socket.listen(128).expect("a port that can be opened again")),
            same => same,
        };
        *shared.listening.0.lock().expect("nobody panics here") = listening;
        shared.listening.1.notify_all();
        let incoming = async {
            match &port {
                Port::Open(listener) => listener.accept().await,
                Port::Kept(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            changed = rules.changed() => changed.expect("the sender is ours"),
            client = incoming => if let Ok((client, _)) = client {
                tokio::spawn(serve(client, shared.clone()));
            }
        }
    }
}

enum Port {
    Open(TcpListener),
    /// Refuses connections, and nobody else can have it.
    Kept(TcpSocket),
}

/// A port that is taken but not open. Only such a one refuses: on an open one that nobody accepts from, handshakes are
/// completed all the same; one that is given up is soon somebody else's.
pub fn keep(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("a socket whose connections may be there still");
    let start = std::time::Instant::now();
    // A process that another test is about to start holds a copy of each listener until it is a program of its own.
    while let Err(error) = socket.bind(address) {
        assert!(start.elapsed() < PATIENCE, "{address} does not become free: {error}");
        std::thread::sleep(Duration::from_millis(1));
    }
    socket
}

/// One connection, until both sides have closed it or it is reset.
async fn serve(mut client: TcpStream, shared: Arc<Shared>) {
    let mut rules = shared.rules.subscribe();
    let before = rules.borrow().resets;
    shared.count(|c| (c.accepted, c.open) = (c.accepted + 1, c.open + 1));
    if let Ok(mut server) = TcpStream::connect(shared.target).await {
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let (requests, replies) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let fates = Mutex::default();
        let moved = async {
            tokio::try_join!(
                read(from_client, requests.0),
                send_requests(requests.1, to_server, &fates, &shared),
                read(from_server, replies.0),
                send_replies(replies.1, to_client, &fates, &shared),
            )
        };
        let closed = tokio::select! {
            ended = moved => ended.is_ok(),
            _ = rules.wait_for(|r| r.resets != before) => false,
        };
        if closed {
            drop(client);
        } else {
            reset(client);
        }
    } else {
        reset(client);
    }
    shared.count(|c| c.open -= 1);
}

/// Closes it with a RST in place of a FIN. The server's side is closed in the ordinary way, so that it has heard all that
/// went to it before.
fn reset(client: TcpStream) {
    // Fails when the peer was faster, and then there is nothing to reset.
    let _ = client.set_zero_linger();
}

/// What one side said, in the order in which it did.
enum Said {
    Message(Vec<u8>, Instant),
    Closed,
    Reset,
}

async fn read(mut from: ReadHalf<'_>, said: mpsc::UnboundedSender<Said>) -> io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        let end = match from.read_buf(&mut bytes).await {
            Ok(0) => Some(Said::Closed),
            Ok(_) => None,
            Err(_) => Some(Said::Reset),
        };
        while let Some(length) = resp::message(&bytes) {
            let rest = bytes.split_off(length);
            let message = std::mem::replace(&mut bytes, rest);
            let _ = said.send(Said::Message(message, Instant::now()));
        }
        if let Some(end) = end {
            // The receiver goes only when the whole connection does.
            let _ = said.send(end);
            return Ok(());
        }
    }
}

type Fates = Mutex<VecDeque<Fate>>;

async fn send_requests(
    mut said: mpsc::UnboundedReceiver<Said>,
    mut to: WriteHalf<'_>,
    fates: &Fates,
    shared: &Shared,
) -> io::Result<()> {
    let mut gap = false;
    while let Some(said) = said.recv().await {
        let arrives = shared.travels(&said, |r| r.requests).await && !gap;
        match said {
            Said::Message(request, _) if arrives => {
                let fate = match shared.fault(&request) {
                    Some(Fault::Cut { after }) => {
                        to.write_all(&request[..after.min(request.len())]).await?;
                        shared.count(|c| c.lost += 1);
                        return Err(io::ErrorKind::ConnectionReset.into());
                    }
                    Some(Fault::Reply(fate)) => fate,
                    None => Fate::Arrives,
                };
                fates.lock().expect("nobody panics here").push_back(fate);
                to.write_all(&request).await?;
                shared.count(|c| (c.requests, c.request_bytes) = (c.requests + 1, c.request_bytes + request.len()));
            }
            Said::Message(..) => {
                gap = true;
                shared.count(|c| c.lost += 1);
            }
            Said::Closed => return to.shutdown().await,
            Said::Reset => return Err(io::ErrorKind::ConnectionReset.into()),
        }
    }
    Ok(())
}

async fn send_replies(
    mut said: mpsc::UnboundedReceiver<Said>,
    mut to: WriteHalf<'_>,
    fates: &Fates,
    shared: &Shared,
) -> io::Result<()> {
    let mut gap = false;
    while let Some(said) = said.recv().await {
        let mut arrives = shared.travels(&said, |r| r.replies).await;
        match said {
            Said::Message(reply, _) => {
                let answers = (!resp::is_push(&reply)).then(|| fates.lock().expect("nobody panics here").pop_front());
                match answers.flatten().unwrap_or(Fate::Arrives) {
                    Fate::Arrives => {}
                    Fate::Held => shared.held_until_delivered().await,
                    Fate::Lost(Then::Silence) => arrives = false,
                    Fate::Lost(Then::Reset) => {
                        shared.count(|c| c.lost += 1);
                        return Err(io::ErrorKind::ConnectionReset.into());
                    }
                }
                gap |= !arrives;
                if gap {
                    shared.count(|c| c.lost += 1);
                } else {
                    to.write_all(&reply).await?;
                    shared.count(|c| (c.replies, c.reply_bytes) = (c.replies + 1, c.reply_bytes + reply.len()));
                }
            }
            Said::Closed => return to.shutdown().await,
            Said::Reset => return Err(io::ErrorKind::ConnectionReset.into()),
        }
    }
    Ok(())
}

impl Shared {
    /// Waits for as long as the rules say, which may change meanwhile. Whether it then arrives.
    async fn travels(&self, said: &Said, direction: impl Fn(&Rules) -> Flow) -> bool {
        let mut rules = self.rules.subscribe();
        loop {
            let flow = direction(&rules.borrow_and_update());
            match (flow, said) {
                (Flow::Pass, _) => return true,
                (Flow::Drop, _) => return false,
                (Flow::Hold, _) => {
                    self.held(async { while rules.changed().await.is_ok() && direction(&rules.borrow()) == flow {} })
                        .await;
                }
                (Flow::Delay(by), Said::Message(_, since)) => {
                    // The rules may change on the way: what is delayed can still be held or dropped.
                    tokio::select! {
                        () = tokio::time::sleep_until(*since + by) => return true,
                        _ = rules.changed() => {}
                    }
                }
                (Flow::Delay(_), _) => return true,
            }
        }
    }

    async fn held_until_delivered(&self) {
        let mut rules = self.rules.subscribe();
        let before = rules.borrow_and_update().deliveries;
        self.held(async { while rules.changed().await.is_ok() && rules.borrow().deliveries == before {} }).await;
    }

    /// Counts a message as held while it waits, also when the connection is reset under it.
    async fn held(&self, wait: impl Future<Output = ()>) {
        struct Held<'a>(&'a Shared);
        impl Drop for Held<'_> {
            fn drop(&mut self) {
                self.0.count(|c| c.held -= 1);
            }
        }
        self.count(|c| c.held += 1);
        let _held = Held(self);
        wait.await;
    }

    /// The fault that was armed first for such a request, which disarms it.
    fn fault(&self, request: &[u8]) -> Option<Fault> {
        let mut armed = self.armed.lock().expect("no test panics while it arms a fault");
        let contains = |within: &[u8]| within.is_empty() || request.windows(within.len()).any(|part| part == within);
        let found = armed.iter().position(|a| contains(&a.within))?;
        Some(armed.remove(found).fault)
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        self.counts.send_modify(change);
    }
}
