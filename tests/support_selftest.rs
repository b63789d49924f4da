//! The faults that other tests rely on, each shown to happen.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;

use std::{
    io::{self, ErrorKind},
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};
use support::{
    PATIENCE,
    proxy::{Flow, Proxy, Then},
    resp, traffic,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Instant, timeout},
};

/// Answers each line with itself, and keeps all bytes that it was sent.
struct Echo {
    address: SocketAddr,
    heard: watch::Sender<String>,
}

impl Echo {
    async fn start() -> Echo {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let echo = Echo { address: listener.local_addr().unwrap(), heard: watch::Sender::default() };
        let heard = echo.heard.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let heard = heard.clone();
                tokio::spawn(async move {
                    let mut bytes = [0; 1024];
                    while let Ok(n @ 1..) = client.read(&mut bytes).await {
                        heard.send_modify(|heard| heard.push_str(std::str::from_utf8(&bytes[..n]).unwrap()));
                        client.write_all(&bytes[..n]).await.unwrap();
                    }
                });
            }
        });
        echo
    }
    async fn has_heard(&self, lines: &str) {
        let mut heard = self.heard.subscribe();
        let all = timeout(PATIENCE, heard.wait_for(|heard| heard == lines)).await.map(|_| ());
        assert!(all.is_ok(), "the server has heard {:?}, not {lines:?}", *self.heard.borrow());
    }
}

struct Client(BufReader<TcpStream>);

impl Client {
    async fn connect(proxy: &Proxy) -> Client {
        Client::try_connect(proxy).await.unwrap()
    }
    async fn try_connect(proxy: &Proxy) -> io::Result<Client> {
        Ok(Client(BufReader::new(TcpStream::connect(proxy.address()).await?)))
    }
    async fn says(&mut self, line: &str) {
        self.0.write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
    }
    /// The next line, or the end (empty), or the error.
    async fn heard(&mut self) -> io::Result<String> {
        let mut line = String::new();
        timeout(PATIENCE, self.0.read_line(&mut line)).await.expect("an answer or an end")?;
        Ok(line.trim_end().to_owned())
    }
    async fn hears(&mut self, line: &str) {
        assert_eq!(self.heard().await.unwrap(), line);
    }
    async fn is_reset(&mut self) {
        assert_eq!(self.heard().await.map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset));
    }
    /// For after an event that shows that anything to be heard would have been.
    fn has_heard_nothing(&self) {
        assert_eq!(self.0.buffer(), b"");
        assert_eq!(self.0.get_ref().try_read(&mut [0]).map_err(|e| e.kind()), Err(ErrorKind::WouldBlock));
    }
}

async fn echo_behind_proxy() -> (Echo, Proxy, Client) {
    let echo = Echo::start().await;
    let proxy = Proxy::to(echo.address.port());
    let mut client = Client::connect(&proxy).await;
    client.says("hello").await;
    client.hears("hello").await;
    (echo, proxy, client)
}

#[tokio::test]
async fn what_passes_is_counted() {
    let (_echo, proxy, client) = echo_behind_proxy().await;
    let seen = proxy.until(|c| c.replies == 1).await;
    assert_eq!((seen.accepted, seen.open, seen.requests, seen.request_bytes), (1, 1, 1, 7));
    assert_eq!((seen.replies, seen.reply_bytes, seen.lost, seen.held), (1, 7, 0, 0));
    drop(client);
    proxy.until(|c| c.open == 0 && c.accepted == 1).await;
}

#[tokio::test]
async fn a_delay_delays_each_message_by_itself() {
    let (_echo, proxy, mut client) = echo_behind_proxy().await;
    let by = Duration::from_millis(150);
    for direction in [Proxy::requests, Proxy::replies] {
        direction(&proxy, Flow::Delay(by));
        let start = Instant::now();
        for n in 0..40 {
            client.says(&n.to_string()).await;
        }
        for n in 0..40 {
            client.hears(&n.to_string()).await;
        }
        // One after the other they would take forty times as long.
        let took = start.elapsed();
        assert!(took >= by && took < 20 * by, "{took:?}");
        proxy.pass();
    }
}

#[tokio::test]
async fn held_replies_arrive_in_order_when_let_go() {
    let (echo, proxy, mut client) = echo_behind_proxy().await;
    proxy.replies(Flow::Hold);
    client.says("1").await;
    client.says("2").await;
    proxy.until(|c| c.requests == 3 && c.held == 1).await;
    client.has_heard_nothing();
    proxy.pass();
    client.hears("1").await;
    client.hears("2").await;
    echo.has_heard("hello\r\n1\r\n2\r\n").await;
    assert_eq!(proxy.counts().held, 0);
}

#[tokio::test]
async fn dropped_replies_never_arrive_nor_does_what_follows_them() {
    let (echo, proxy, mut client) = echo_behind_proxy().await;
    proxy.replies(Flow::Drop);
    client.says("1").await;
    proxy.until(|c| c.lost == 1).await;
    proxy.pass();
    client.says("2").await;
    proxy.until(|c| c.lost == 2).await;
    client.has_heard_nothing();
    echo.has_heard("hello\r\n1\r\n2\r\n").await;

    let mut other = Client::connect(&proxy).await;
    other.says("3").await;
    other.hears("3").await;
}

#[tokio::test]
async fn a_black_hole_is_silent_both_ways_and_ends_nothing() {
    let (echo, proxy, mut client) = echo_behind_proxy().await;
    proxy.blackhole();
    client.says("1").await;
    let mut other = Client::connect(&proxy).await;
    other.says("2").await;
    proxy.until(|c| c.held == 2).await;
    echo.has_heard("hello\r\n").await;
    client.has_heard_nothing();
    other.has_heard_nothing();
    // Not even the end of a connection gets through.
    let gone = Client::connect(&proxy).await;
    drop(gone);
    assert_eq!(proxy.until(|c| c.held == 3).await.open, 3);

    proxy.pass();
    client.hears("1").await;
    other.hears("2").await;
    proxy.until(|c| c.open == 2).await;
}

#[tokio::test]
async fn a_reset_ends_all_connections_and_loses_what_they_held() {
    let (echo, proxy, mut client) = echo_behind_proxy().await;
    let mut other = Client::connect(&proxy).await;
    proxy.blackhole();
    client.says("1").await;
    proxy.until(|c| c.held == 1 && c.open == 2).await;
    proxy.reset_all();
    client.is_reset().await;
    other.is_reset().await;
    assert_eq!(proxy.until(|c| c.open == 0).await.held, 0);

    proxy.pass();
    let mut client = Client::connect(&proxy).await;
    client.says("2").await;
    client.hears("2").await;
    echo.has_heard("hello\r\n2\r\n").await;
}

#[tokio::test]
async fn refusing_keeps_old_connections_and_lets_no_new_one_in_until_it_passes() {
    let (_echo, proxy, mut client) = echo_behind_proxy().await;
    proxy.refuse();
    for _ in 0..3 {
        assert_eq!(Client::try_connect(&proxy).await.err().map(|e| e.kind()), Some(ErrorKind::ConnectionRefused));
    }
    client.says("1").await;
    client.hears("1").await;
    proxy.pass();
    let mut client = Client::connect(&proxy).await;
    client.says("2").await;
    client.hears("2").await;
}

#[tokio::test]
async fn a_cut_lets_the_first_bytes_of_the_chosen_request_through() {
    let (echo, proxy, mut client) = echo_behind_proxy().await;
    proxy.cut_request("secret", 3);
    client.says("public").await;
    client.hears("public").await;
    client.says("secret").await;
    client.is_reset().await;
    echo.has_heard("hello\r\npublic\r\nsec").await;
    let mut client = Client::connect(&proxy).await;
    client.says("secret").await;
    client.hears("secret").await;
}

#[tokio::test]
async fn one_reply_is_lost_by_silence_or_reset_though_its_request_was_carried_out() {
    for then in [Then::Silence, Then::Reset] {
        let (echo, proxy, mut client) = echo_behind_proxy().await;
        proxy.lose_reply("2", then);
        client.says("1").await;
        client.says("2").await;
        client.hears("1").await;
        echo.has_heard("hello\r\n1\r\n2\r\n").await;
        match then {
            Then::Reset => client.is_reset().await,
            Then::Silence => {
                client.says("3").await;
                proxy.until(|c| c.lost == 2).await;
                client.has_heard_nothing();
            }
        }
        let mut client = Client::connect(&proxy).await;
        client.says("2").await;
        client.hears("2").await;
    }
}

#[tokio::test]
async fn one_reply_is_late_and_holds_up_what_is_behind_it() {
    let (_echo, proxy, mut client) = echo_behind_proxy().await;
    let mut other = Client::connect(&proxy).await;
    proxy.hold_reply("");
    client.says("1").await;
    client.says("2").await;
    proxy.until(|c| c.held == 1 && c.requests == 3).await;
    other.says("3").await;
    other.hears("3").await;
    client.has_heard_nothing();
    proxy.deliver();
    client.hears("1").await;
    client.hears("2").await;
}

#[tokio::test]
async fn one_request_is_late_and_holds_up_what_is_behind_it() {
    let (_echo, proxy, mut client) = echo_behind_proxy().await;
    let mut other = Client::connect(&proxy).await;
    let before = proxy.counts().requests;
    proxy.hold_request("1");
    client.says("1").await;
    client.says("2").await;
    proxy.until(|c| c.held == 1).await;
    other.says("3").await;
    other.hears("3").await;
    assert_eq!(proxy.counts().requests, before + 1);
    client.has_heard_nothing();
    proxy.deliver();
    client.hears("1").await;
    client.hears("2").await;
}

#[tokio::test]
async fn a_server_that_is_gone_resets_its_client() {
    let nobody = traffic::keep((Ipv4Addr::LOCALHOST, 0).into());
    let proxy = Proxy::to(nobody.local_addr().unwrap().port());
    match Client::try_connect(&proxy).await {
        Ok(mut client) => client.is_reset().await,
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
    }
}

#[tokio::test(flavor = "current_thread")]
async fn the_proxy_works_while_the_tests_runtime_is_blocked() {
    let echo = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let proxy = Proxy::to(echo.local_addr().unwrap().port());
    // Blocking calls only: nothing here gives the runtime a turn.
    let mut client = std::net::TcpStream::connect(proxy.address()).unwrap();
    let (mut server, _) = echo.accept().unwrap();
    io::Write::write_all(&mut client, b"hello\r\n").unwrap();
    let mut bytes = [0; 7];
    io::Read::read_exact(&mut server, &mut bytes).unwrap();
    assert_eq!(&bytes, b"hello\r\n");
}

#[test]
fn a_message_ends_where_its_last_element_does() {
    for whole in [
        "+OK\r\n",
        "$-1\r\n",
        "$4\r\nab\r\n\r\n",
        "*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
        "*-1\r\n",
        "%1\r\n+a\r\n_\r\n",
        "PING\r\n",
    ] {
        let mut bytes = whole.as_bytes().to_vec();
        bytes.extend(b"+next\r\n");
        assert_eq!(resp::message(&bytes), Some(whole.len()), "{whole:?}");
        let early = (0..whole.len()).find_map(|part| resp::message(&bytes[..part]));
        assert_eq!(early, None, "{whole:?}");
    }
}

#[cfg(unix)]
mod children {
    use super::support::{
        child::{self, Child},
        until, within,
    };
    use std::{
        io::{Read, Write},
        net::{Ipv4Addr, TcpListener, TcpStream},
        time::Duration,
    };

    /// Answers bytes on a connection to its parent, so that the parent can see whether it runs.
    fn answer(port: &str) {
        let mut parent = TcpStream::connect((Ipv4Addr::LOCALHOST, port.parse().unwrap())).unwrap();
        child::says("connected now");
        let mut byte = [0];
        while parent.read(&mut byte).unwrap() == 1 && byte[0] != b'q' {
            parent.write_all(&byte).unwrap();
        }
        child::says("done");
    }

    async fn start(test: &str) -> (Child, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut child = Child::of(test, &listener.local_addr().unwrap().port().to_string());
        assert_eq!(child.hears("connected").await, "now");
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(super::PATIENCE)).unwrap();
        (child, stream)
    }

    #[tokio::test]
    async fn a_child_stands_still_while_it_is_stopped_and_then_goes_on() {
        if let Some(port) = child::told() {
            return answer(&port);
        }
        let (mut child, mut stream) =
            start("children::a_child_stands_still_while_it_is_stopped_and_then_goes_on").await;
        let mut byte = [0];
        stream.write_all(b"1").unwrap();
        stream.read_exact(&mut byte).unwrap();
        child.stop();
        stream.write_all(b"2").unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(stream.read(&mut byte).is_err());
        stream.set_read_timeout(Some(super::PATIENCE)).unwrap();
        child.resume();
        stream.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"2");
        stream.write_all(b"q").unwrap();
        child.hears("done").await;
        child.succeeds().await;
    }

    #[tokio::test]
    async fn a_child_that_is_killed_or_dropped_is_gone() {
        if let Some(port) = child::told() {
            return answer(&port);
        }
        for dropped in [false, true] {
            let (mut child, mut stream) = start("children::a_child_that_is_killed_or_dropped_is_gone").await;
            let pid = child.pid();
            if dropped {
                drop(child);
            } else {
                child.kill();
            }
            assert_eq!(stream.read(&mut [0]).unwrap(), 0, "its connection is closed");
            until("no such process", || rustix::process::test_kill_process(pid).is_err()).await;
        }
    }

    #[tokio::test]
    async fn a_child_that_fails_fails_its_test_with_its_words() {
        if child::told().is_some() {
            panic!("the reason");
        }
        let mut child = Child::of("children::a_child_that_fails_fails_its_test_with_its_words", "");
        let failed = within("the child's end", tokio::spawn(async move { child.hears("something").await })).await;
        let words = *failed.unwrap_err().into_panic().downcast::<String>().unwrap();
        assert!(words.contains("ended before it said \"something\"") && words.contains("the reason"), "{words}");
    }
}
