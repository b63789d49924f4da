//! The tests' own server does what the tests rely on.
mod support;

use support::server::Server;

#[test]
fn a_server_starts_answers_stops_goes_on_and_comes_back_on_its_port() {
    let mut server = Server::start();
    server.cmd(&["SET", "k", "v"]);
    assert_eq!(server.get("k").as_deref(), Some("v"));
    let (port, pid) = (server.port(), server.pid());

    server.stop();
    let mut side = server.connect();
    side.send(&["PING"]);
    server.cont();
    assert_eq!(side.read().unwrap().text().as_deref(), Some("PONG"));

    server.restart();
    assert_eq!((server.port(), server.get("k")), (port, None));
    assert_ne!(server.pid(), pid);
}

#[test]
fn a_durable_server_keeps_its_data_when_it_is_killed() {
    let mut server = Server::durable();
    server.cmd(&["SET", "k", "v"]);
    server.restart();
    assert_eq!(server.get("k").as_deref(), Some("v"));
}

#[test]
fn many_servers_at_once_each_have_their_own_port() {
    let threads: Vec<_> = (0..8).map(|_| std::thread::spawn(Server::start)).collect();
    let servers: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    for (i, server) in servers.iter().enumerate() {
        server.cmd(&["SET", "me", &i.to_string()]);
    }
    for (i, server) in servers.iter().enumerate() {
        assert_eq!(server.get("me"), Some(i.to_string()));
    }
}
