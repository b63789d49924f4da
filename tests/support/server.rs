//! A real redis-server of a test's own, and a plain connection that looks at it from the side.
use rustix::process::{Pid, Signal, kill_process};
use std::{
    cell::RefCell,
    fmt,
    io::{BufRead, BufReader, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// A server on a free port of the loopback, ended with this value. It keeps nothing on disk unless told to.
pub struct Server {
    child: Child,
    port: u16,
    settings: Vec<String>,
    dir: TempDir,
    side: RefCell<Option<Connection>>,
}

impl Server {
    /// A server that keeps nothing on disk.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server that loses nothing when it is killed.
    pub fn durable() -> Self {
        Self::with(&["--appendonly", "yes", "--appendfsync", "always"])
    }

    /// A server with further settings, as on the command line: `["--requirepass", "secret"]`.
    pub fn with(settings: &[&str]) -> Self {
        Self::within(tempfile::Builder::new().prefix("leasehold-").tempdir().unwrap(), settings)
    }

    /// A sentinel with this configuration.
    pub fn sentinel(config: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("leasehold-").tempdir().unwrap();
        std::fs::write(dir.path().join(SENTINEL), config).unwrap();
        Self::within(dir, &[])
    }

    /// A member of a cluster to be, with a free port for its bus too.
    pub fn member(settings: &[&str]) -> Self {
        let dir = tempfile::Builder::new().prefix("leasehold-").tempdir().unwrap();
        Self::drawing(dir, || {
            let bus = free_port().to_string();
            [&["--cluster-enabled", "yes", "--cluster-port", &bus], settings]
                .concat()
                .into_iter()
                .map(str::to_owned)
                .collect()
        })
    }

    fn within(dir: TempDir, settings: &[&str]) -> Self {
        Self::drawing(dir, || settings.iter().map(|s| (*s).to_owned()).collect())
    }

    fn drawing(dir: TempDir, draw: impl Fn() -> Vec<String>) -> Self {
        // The port is free when it is drawn; if somebody else has it by the time the server binds it, draw again.
        for _ in 0..20 {
            let (port, settings) = (free_port(), draw());
            let mut child = spawn(port, &settings, &dir);
            if answers(&mut child, port) {
                return Server { child, port, settings, dir, side: RefCell::default() };
            }
            end(&mut child);
        }
        panic!("no redis-server would start; is `{}` installed?", binary());
    }

    /// `redis://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// `redis://user:password@127.0.0.1:port`; an empty user means the default one.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("redis://{user}:{password}@127.0.0.1:{}", self.port)
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The value of one of its settings.
    pub fn setting(&self, name: &str) -> &str {
        let at = self.settings.iter().position(|setting| setting == name).unwrap();
        &self.settings[at + 1]
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops the process as a scheduler or a debugger would: connections stay, nothing is answered.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets a stopped process go on.
    pub fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills the process, without a chance to save anything.
    pub fn kill(&mut self) {
        end(&mut self.child);
        self.side.take();
    }

    /// Kills it if it lives, and starts it again on the same port, with what it had on disk.
    pub fn restart(&mut self) {
        self.kill();
        let start = Instant::now();
        loop {
            self.child = spawn(self.port, &self.settings, &self.dir);
            if answers(&mut self.child, self.port) {
                return;
            }
            end(&mut self.child);
            assert!(start.elapsed() < super::PATIENCE, "redis-server would not start again on port {}", self.port);
        }
    }

    /// Starts it again on the same port, and returns as soon as it takes connections, though it is still loading.
    pub fn restart_loading(&mut self) {
        self.kill();
        self.child = spawn(self.port, &self.settings, &self.dir);
        let start = Instant::now();
        while Connection::open(self.port).is_err() {
            assert!(start.elapsed() < super::PATIENCE, "redis-server would not start again on port {}", self.port);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// A connection of its own, for blocking commands and subscriptions.
    pub fn connect(&self) -> Connection {
        Connection::open(self.port).unwrap()
    }

    /// The answer to a command. An error fails the test.
    #[track_caller]
    pub fn cmd(&self, words: &[&str]) -> Reply {
        self.try_cmd(words).unwrap_or_else(|e| panic!("{words:?}: {e}"))
    }

    /// The answer to a command, or the text of the error.
    #[track_caller]
    pub fn try_cmd(&self, words: &[&str]) -> Result<Reply, String> {
        let mut side = self.side.borrow_mut();
        let connection = side.get_or_insert_with(|| Connection::open(self.port).unwrap());
        connection.try_cmd(words)
    }

    /// The text of a string key.
    pub fn get(&self, key: &str) -> Option<String> {
        self.cmd(&["GET", key]).text()
    }

    /// The TTL of a key in milliseconds: -1 without one, -2 without the key.
    pub fn pttl(&self, key: &str) -> i64 {
        self.cmd(&["PTTL", key]).int()
    }

    /// Every key there is.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.cmd(&["KEYS", "*"]).list().into_iter().filter_map(|k| k.text()).collect();
        keys.sort();
        keys
    }

    /// The connections that a client library opened: all but this value's own.
    pub fn clients(&self) -> Vec<String> {
        let me = self.cmd(&["CLIENT", "ID"]).int();
        let list = self.cmd(&["CLIENT", "LIST"]).text().unwrap();
        list.lines().filter(|l| !l.starts_with(&format!("id={me} "))).map(str::to_owned).collect()
    }

    /// How many times a command ran, whether by itself or in a script.
    pub fn calls(&self, command: &str) -> u64 {
        let stats = self.cmd(&["INFO", "commandstats"]).text().unwrap();
        let start = format!("cmdstat_{command}:calls=");
        let count = stats.lines().find_map(|l| l.strip_prefix(&start)?.split(',').next()?.parse().ok());
        count.unwrap_or(0)
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server(pid {}, port {})", self.child.id(), self.port)
    }
}

/// A port of the loopback that nobody listens on.
pub fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

fn binary() -> String {
    std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

/// The configuration of a sentinel, which it also writes.
const SENTINEL: &str = "sentinel.conf";

fn spawn(port: u16, settings: &[String], dir: &TempDir) -> Child {
    let mut command = Command::new(binary());
    let config = dir.path().join(SENTINEL);
    if config.exists() {
        command.arg(config).args(["--port", &port.to_string(), "--bind", "127.0.0.1"]);
        command.arg("--dir").arg(dir.path()).arg("--sentinel");
    } else {
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        command.arg("--dir").arg(dir.path()).args(settings);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap_or_else(|e| panic!("`{}`: {e}; is it installed?", binary()))
}

/// Kills the process and waits for its end. Killing what has ended already is no error.
fn end(child: &mut Child) {
    child.kill().ok();
    child.wait().unwrap();
}

/// Whether it is this process that comes to answer on that port, with all its data.
fn answers(child: &mut Child, port: u16) -> bool {
    let start = Instant::now();
    while start.elapsed() < super::PATIENCE {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        let ours = format!("process_id:{}\r", child.id());
        match Connection::open(port).map(|mut side| side.try_cmd(&["INFO"])) {
            Ok(Ok(info)) => match info.text() {
                Some(info) if !info.contains(&ours) => return false,
                Some(info) if info.contains("\nloading:0\r") || info.contains("_mode:sentinel") => return true,
                _ => std::thread::sleep(Duration::from_millis(2)),
            },
            // It asks for a password, so it is up; and it is ours, for another's would have kept ours from binding.
            Ok(Err(e)) if e.starts_with("NOAUTH") => return true,
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    false
}

/// A plain connection: one command, one answer.
pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    fn open(port: u16) -> std::io::Result<Self> {
        Self::over(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?)
    }

    /// Either end of a connection: commands have the form of answers.
    pub fn over(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(super::PATIENCE))?;
        Ok(Connection { stream: BufReader::new(stream) })
    }

    /// The answer to a command. An error fails the test.
    #[track_caller]
    pub fn cmd(&mut self, words: &[&str]) -> Reply {
        self.try_cmd(words).unwrap_or_else(|e| panic!("{words:?}: {e}"))
    }

    /// The answer to a command, or the text of the error.
    pub fn try_cmd(&mut self, words: &[&str]) -> Result<Reply, String> {
        self.send(words);
        self.read()
    }

    /// Writes what a server would.
    pub fn write(&mut self, answer: &str) {
        // A client that has gone shows when it is read from.
        self.stream.get_mut().write_all(answer.as_bytes()).ok();
    }

    /// Only writes a command.
    pub fn send(&mut self, words: &[&str]) {
        let mut out = format!("*{}\r\n", words.len());
        for word in words {
            out.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        // A server that has gone shows in the answer.
        self.stream.get_mut().write_all(out.as_bytes()).ok();
    }

    /// Subscribes to a channel; then [`message`](Connection::message).
    pub fn subscribe(&mut self, channel: &str) {
        self.cmd(&["SUBSCRIBE", channel]);
    }

    /// The next message on a subscribed channel.
    #[track_caller]
    pub fn message(&mut self) -> String {
        self.read().unwrap().list().pop().and_then(|m| m.text()).unwrap()
    }

    /// Reads one answer.
    pub fn read(&mut self) -> Result<Reply, String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).map_err(|e| e.to_string())?;
        let (kind, rest) = line.trim_end().split_at_checked(1).ok_or("the connection was closed")?;
        let number = || rest.parse::<i64>().map_err(|e| format!("{line:?}: {e}"));
        match kind {
            "+" => Ok(Reply::Text(rest.into())),
            "-" => Err(rest.to_owned()),
            ":" => Ok(Reply::Int(number()?)),
            "$" => match usize::try_from(number()?) {
                Err(_) => Ok(Reply::Nil),
                Ok(n) => {
                    let mut bytes = vec![0; n + 2];
                    self.stream.read_exact(&mut bytes).map_err(|e| e.to_string())?;
                    bytes.truncate(n);
                    Ok(Reply::Text(bytes))
                }
            },
            "*" => match usize::try_from(number()?) {
                Err(_) => Ok(Reply::Nil),
                // An error inside a list is kept as its text.
                Ok(n) => Ok(Reply::List(
                    (0..n).map(|_| self.read().unwrap_or_else(|e| Reply::Text(e.into_bytes()))).collect(),
                )),
            },
            _ => Err(format!("not an answer: {line:?}")),
        }
    }
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    Nil,
    Int(i64),
    Text(Vec<u8>),
    List(Vec<Reply>),
}

impl Reply {
    /// The number that it is, or that its text is.
    #[track_caller]
    pub fn int(&self) -> i64 {
        match self {
            Reply::Int(n) => *n,
            Reply::Text(t) => String::from_utf8_lossy(t).parse().unwrap_or_else(|_| panic!("not a number: {self:?}")),
            _ => panic!("not a number: {self:?}"),
        }
    }

    /// Its text; `None` for nil.
    #[track_caller]
    pub fn text(&self) -> Option<String> {
        match self {
            Reply::Nil => None,
            Reply::Int(n) => Some(n.to_string()),
            Reply::Text(t) => Some(String::from_utf8_lossy(t).into_owned()),
            Reply::List(_) => panic!("not text: {self:?}"),
        }
    }

    /// Its items.
    #[track_caller]
    pub fn list(self) -> Vec<Reply> {
        match self {
            Reply::List(items) => items,
            _ => panic!("not a list: {self:?}"),
        }
    }
}
