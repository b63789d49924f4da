//! The page on a real server: values that only a newer fence may write over.
mod support;

use support::{
    page::{Claim, Op, held, owner, run},
    server::Server,
};

#[test]
fn a_value_is_written_by_a_newer_fence_or_the_same_and_refused_to_a_stale_one() {
    let server = Server::start();
    assert_eq!(run(&server, Op::read("v")), ["none"]);
    assert_eq!(run(&server, Op::write("v", "one", 7)), ["written"]);
    assert_eq!(run(&server, Op::write("v", "two", 7)), ["written"], "the same fence again");
    assert_eq!(run(&server, Op::write("v", "stale", 6)), ["stale", "7"]);
    assert_eq!(run(&server, Op::read("v")), ["value", "two"]);
    assert_eq!(run(&server, Op::write("v", "three", 8)), ["written"]);
    assert_eq!((server.get("v").as_deref(), server.get("{v}:mark").as_deref()), (Some("three"), Some("8")));
    assert_eq!((server.pttl("v"), server.pttl("{v}:mark")), (-1, -1), "the mark lives as long as the value");
}

#[test]
fn fences_are_compared_as_numbers_to_the_last_digit() {
    let server = Server::start();
    assert_eq!(run(&server, Op::write("v", "x", 10)), ["written"]);
    assert_eq!(run(&server, Op::write("v", "x", 9)), ["stale", "10"], "not as text");
    assert_eq!(run(&server, Op::write("v", "x", 9_007_199_254_740_991)), ["written"]);
    assert_eq!(run(&server, Op::write("v", "y", 9_007_199_254_740_990)), ["stale", "9007199254740991"]);
    for beyond in [9_007_199_254_740_992, u64::MAX] {
        let refused = run(&server, Op::write("w", "x", beyond));
        assert!(refused[0] == "error" && refused[1].starts_with("FENCE"), "{refused:?}");
    }
    assert_eq!(server.keys(), ["v", "{v}:mark"]);
}

#[test]
fn a_mark_outlives_the_value_that_was_deleted_by_hand() {
    let server = Server::start();
    run(&server, Op::write("v", "x", 7));
    server.cmd(&["DEL", "v"]);
    assert_eq!(run(&server, Op::write("v", "stale", 6)), ["stale", "7"]);
    assert_eq!(run(&server, Op::read("v")), ["none"]);
}

#[test]
fn the_key_of_a_lease_is_neither_written_nor_read_as_a_value() {
    let server = Server::start();
    let a = owner("a", 1);
    held(&server, Claim::of("k", &a));
    let value = server.get("k");
    let refused = run(&server, Op::write("k", "x", u64::MAX >> 12));
    assert!(refused[0] == "error" && refused[1].starts_with("LEASE"), "{refused:?}");
    assert!(run(&server, Op::read("k"))[1].starts_with("LEASE"), "it would tell the owner's secret");
    assert_eq!(server.get("k"), value);
}

#[test]
fn a_value_or_a_mark_of_another_kind_is_not_written_over() {
    let server = Server::start();
    server.cmd(&["LPUSH", "v", "x"]);
    assert!(run(&server, Op::write("v", "x", 7))[1].starts_with("WRONGTYPE"));
    assert!(run(&server, Op::read("v"))[1].starts_with("WRONGTYPE"));
    server.cmd(&["SET", "{w}:mark", "by hand"]);
    assert!(run(&server, Op::write("w", "x", 7))[1].starts_with("MARK"));
    assert_eq!(server.keys(), ["v", "{w}:mark"]);
}

#[test]
fn a_write_that_memory_refuses_leaves_no_mark_ahead_of_its_value() {
    let server = Server::start();
    run(&server, Op::write("v", "one", 7));
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(run(&server, Op::write("v", "two", 8))[1].starts_with("OOM"));
    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!((server.get("v").as_deref(), server.get("{v}:mark").as_deref()), (Some("one"), Some("7")));
}
