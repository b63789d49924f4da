//! What moves through a [`proxy`](super::proxy), or doesn't.
use super::{
    PATIENCE,
    proxy::{Counts, Fate, Fault, Flow, Rules, Shared, Then},
    resp,
};
use std::{
    collections::VecDeque,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpSocket, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::mpsc,
    time::Instant,
};

pub(super) async fn accept(listener: TcpListener, address: SocketAddr, shared: &Arc<Shared>) -> Infallible {
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
                    Some(Fault::Held) => {
                        shared.held_until_delivered().await;
                        Fate::Arrives
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
