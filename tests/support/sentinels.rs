//! A primary with two replicas under three sentinels, and sentinels that say what a test tells them to.
use super::{
    PATIENCE,
    server::{Connection, Reply, Server},
};
use std::{
    net::{Ipv4Addr, TcpListener},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// What the sentinels call their primary.
pub const SERVICE: &str = "main";

/// Three real sentinels, who watch three real servers. A primary counts as down after a second.
pub struct Watched {
    pub servers: Vec<Server>,
    pub sentinels: Vec<Server>,
}

impl Watched {
    /// Returns when everybody knows everybody, so that a failover can succeed.
    pub fn start() -> Watched {
        let servers = replicated(2);
        let port = servers[0].port();
        let config = format!(
            "sentinel monitor {SERVICE} 127.0.0.1 {port} 2\nsentinel down-after-milliseconds {SERVICE} 1000\n\
             sentinel failover-timeout {SERVICE} 3000\nsentinel parallel-syncs {SERVICE} 2\n"
        );
        let sentinels: Vec<_> = (0..3).map(|_| Server::sentinel(&config)).collect();
        let watched = Watched { servers, sentinels };
        wait("the sentinels to know everybody", || {
            let known = |sentinel: &Server| {
                let of = |name| field(&sentinel.cmd(&["SENTINEL", "MASTER", SERVICE]), name);
                (of("num-slaves"), of("num-other-sentinels")) == ("2".into(), "2".into())
            };
            watched.sentinels.iter().all(known)
        });
        watched
    }

    /// `redis-sentinel://`, naming all three.
    pub fn url(&self) -> String {
        let ports: Vec<u16> = self.sentinels.iter().map(Server::port).collect();
        url(&ports)
    }

    /// The server that this sentinel names.
    pub fn named_by(&self, sentinel: usize) -> u16 {
        let named = self.sentinels[sentinel].cmd(&["SENTINEL", "get-master-addr-by-name", SERVICE]);
        u16::try_from(named.list()[1].int()).unwrap()
    }

    pub fn server(&self, port: u16) -> &Server {
        self.servers.iter().find(|s| s.port() == port).unwrap()
    }

    /// Waits until a majority of the sentinels names another server than this one.
    pub async fn switched_from(&self, old: u16) {
        let start = Instant::now();
        loop {
            let mut others: Vec<u16> =
                (0..self.sentinels.len()).map(|s| self.named_by(s)).filter(|p| *p != old).collect();
            others.sort_unstable();
            if others.windows(2).any(|pair| pair[0] == pair[1]) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "no failover");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A primary, first, and so many replicas, which follow it.
pub fn replicated(replicas: usize) -> Vec<Server> {
    let primary = Server::with(&["--repl-diskless-sync-delay", "0"]);
    let port = primary.port().to_string();
    let replica = || Server::with(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"]);
    let mut servers = vec![primary];
    servers.extend((0..replicas).map(|_| replica()));
    // A replica that has caught up is counted a moment later.
    let all = i64::try_from(replicas).unwrap();
    wait("the replicas to follow", || {
        servers[0].cmd(&["SET", "ready", "?"]);
        servers[0].cmd(&["DEL", "ready"]);
        servers[0].cmd(&["WAIT", &replicas.to_string(), "100"]).int() == all
    });
    servers
}

/// `redis-sentinel://` with sentinels on these ports.
pub fn url(ports: &[u16]) -> String {
    let nodes: String = ports[1..].iter().map(|port| format!("&node=127.0.0.1:{port}")).collect();
    format!("redis-sentinel://127.0.0.1:{}?sentinelServiceName={SERVICE}{nodes}", ports[0])
}

/// The answer to a command, on a connection of its own, and on another should it be lost: a failover ends connections.
pub fn look(server: &Server, words: &[&str]) -> Reply {
    let start = Instant::now();
    loop {
        match server.connect().try_cmd(words) {
            Ok(reply) => return reply,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{words:?}: {error}"),
        }
    }
}

pub fn info(server: &Server, section: &str) -> String {
    look(server, &["INFO", section]).text().unwrap()
}

/// The value beside a name in a flat list.
fn field(list: &Reply, name: &str) -> String {
    let words: Vec<_> = list.clone().list().into_iter().filter_map(|w| w.text()).collect();
    words.chunks(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone()).unwrap_or_default()
}

fn wait(what: &str, mut event: impl FnMut() -> bool) {
    let start = Instant::now();
    while !event() {
        assert!(start.elapsed() < PATIENCE * 2, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What a made-up sentinel says to whoever asks for the primary.
#[derive(Clone, Copy)]
pub enum Says {
    Names(u16),
    /// It knows no primary of that name.
    Unknown,
    /// It takes the question and says nothing.
    Nothing,
}

/// A sentinel that says what it is told to.
pub struct MadeUp {
    port: u16,
    says: Arc<Mutex<Says>>,
}

impl MadeUp {
    pub fn start(says: Says) -> MadeUp {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let made_up = MadeUp { port: listener.local_addr().unwrap().port(), says: Arc::new(Mutex::new(says)) };
        let says = made_up.says.clone();
        // These threads end with their connections, the first one with the test.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut connection, says) = (Connection::over(stream.unwrap()).unwrap(), says.clone());
                std::thread::spawn(move || {
                    while let Ok(command) = connection.read() {
                        let words: Vec<_> = command.list().into_iter().filter_map(|w| w.text()).collect();
                        let says = *says.lock().unwrap();
                        match (words[0].as_str(), says) {
                            ("PING", _) => connection.write("+PONG\r\n"),
                            ("SENTINEL", Says::Names(port)) => {
                                let port = port.to_string();
                                connection.write(&format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len()));
                            }
                            ("SENTINEL", Says::Unknown) => connection.write("*-1\r\n"),
                            ("SENTINEL", Says::Nothing) => {}
                            _ => connection.write("-ERR not here\r\n"),
                        }
                    }
                });
            }
        });
        made_up
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn says(&self, says: Says) {
        *self.says.lock().unwrap() = says;
    }
}
