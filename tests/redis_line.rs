//! The page on a real server: who stands in line, who is served, and what is told to whom.
#![allow(clippy::unwrap_used)] // in helpers too, not only in tests
mod support;

use std::time::Duration;
use support::{
    page::{Claim, Op, claim, held, inbox, list, owner, run},
    server::Server,
};

fn line(server: &Server, key: &str) -> Vec<String> {
    let line = server.cmd(&["ZRANGE", &format!("{{{key}}}:queue"), "0", "-1"]);
    line.list().into_iter().map(|o| o.text().unwrap()).collect()
}

/// After this, a waiter with that presence counts as dead, whatever the machine was doing.
fn let_die(presence: u64) {
    std::thread::sleep(Duration::from_millis(presence + 5));
}

/// The holder's lease runs out.
fn run_out(server: &Server, key: &str) {
    server.cmd(&["PEXPIRE", key, "1"]);
    while server.cmd(&["EXISTS", key]).int() == 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn waiters_are_served_in_the_order_in_which_they_came_also_within_one_list() {
    let server = Server::start();
    let owners: Vec<String> = ["a", "z", "m", "b"].iter().zip(1..).map(|(l, n)| owner(l, n)).collect();
    held(&server, Claim::of("k", &owners[0]));
    let claims: Vec<Op> = owners[1..].iter().map(|o| Claim::in_line("k", o).op()).collect();
    let (_, answers) = list(&server, &claims);
    assert_eq!(answers.iter().map(|a| &a[1]).collect::<Vec<_>>(), ["0", "1", "2"], "{answers:?}");
    let mut last = String::new();
    for (holder, next) in owners.iter().zip(&owners[1..]) {
        assert_eq!(run(&server, Op::release("k", holder)), ["released"]);
        let value = server.get("k").unwrap();
        let (who, fence) = value.split_once('#').unwrap();
        assert!(who == next && fence > last.as_str(), "{value}");
        last = fence.to_owned();
    }
}

#[test]
fn a_grant_lasts_one_presence_is_told_to_the_winners_inbox_and_grows_to_the_ttl_when_claimed() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let first = held(&server, Claim::of("k", &a));
    claim(&server, Claim { presence: 20_000, ..Claim::in_line("k", &b) });
    let mut winner = server.connect();
    winner.subscribe(&inbox(2));
    run(&server, Op::release("k", &a));
    let message = winner.message();
    let words: Vec<&str> = message.split(' ').collect();
    assert_eq!([words[0], words[2], words[3]], ["granted", "20000", &b]);
    assert!(words[1] > first.as_str());
    assert_eq!(server.get("k"), Some(format!("{b}#{}", words[1])));
    assert!((10_000..=20_000).contains(&server.pttl("k")));
    assert_eq!(server.keys(), ["k", "{k}:fence"], "and the line is left");
    assert_eq!(held(&server, Claim::in_line("k", &b)), words[1]);
    assert!(server.pttl("k") > 50_000);
}

#[test]
fn a_grant_stands_though_the_message_may_not_be_published() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &b));
    server.cmd(&["ACL", "SETUSER", "default", "-publish"]);
    let released = run(&server, Op::release("k", &a));
    assert!(released[0] == "released" && released.len() == 2, "and it is said: {released:?}");
    assert!(server.get("k").unwrap().starts_with(&b));
}

#[test]
fn a_forced_lease_goes_to_the_next_in_line_and_both_are_told() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let fence = held(&server, Claim::of("a key: with spaces", &a));
    claim(&server, Claim::in_line("a key: with spaces", &b));
    let mut both = [server.connect(), server.connect()];
    both[0].subscribe(&inbox(1));
    both[1].subscribe(&inbox(2));
    assert_eq!(run(&server, Op::force("a key: with spaces")), ["released"]);
    assert_eq!(both[0].message(), format!("forced {fence} a key: with spaces"));
    assert!(both[1].message().starts_with("granted "));
}

#[test]
fn a_single_try_neither_joins_the_line_nor_jumps_it() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &b));
    assert_eq!(claim(&server, Claim::of("k", &c))[0], "busy");
    assert_eq!(line(&server, "k"), std::slice::from_ref(&b));
    run_out(&server, "k");
    let busy = claim(&server, Claim::of("k", &c));
    let left: u64 = busy[1].parse().unwrap();
    assert!(
        busy[0] == "busy" && left > 1000 && left <= 30_000,
        "for what is left of the first one's presence: {busy:?}"
    );
    held(&server, Claim::in_line("k", &b));
    assert_eq!(line(&server, "k"), Vec::<String>::new(), "taking leaves the line");
}

#[test]
fn a_waiter_behind_a_live_one_learns_when_that_one_would_be_dead() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim { presence: 20_000, ..Claim::in_line("k", &b) });
    run_out(&server, "k");
    let queued = claim(&server, Claim::in_line("k", &c));
    let left: u64 = queued[2].parse().unwrap();
    assert!(queued[..2] == ["queued", "1"] && left > 1000 && left <= 20_000, "{queued:?}");
}

#[test]
fn the_dead_are_dropped_by_a_claim_and_by_a_release() {
    let server = Server::start();
    let (a, dead, c) = (owner("a", 1), owner("dead", 2), owner("c", 3));
    let dying = || Claim { presence: 20, ..Claim::in_line("k", &dead) };
    held(&server, Claim::of("k", &a));
    claim(&server, dying());
    claim(&server, Claim::in_line("k", &c));
    let_die(20);
    run_out(&server, "k");
    held(&server, Claim::in_line("k", &c));
    assert_eq!(server.keys(), ["k", "{k}:fence"], "by a claim");

    claim(&server, dying());
    claim(&server, Claim::in_line("k", &a));
    let_die(20);
    run(&server, Op::release("k", &c));
    assert!(server.get("k").unwrap().starts_with(&a));
    assert_eq!(server.keys(), ["k", "{k}:fence"], "by a release");
}

/// Dead ones in the line: without a record, nobody counts as alive.
fn stand(server: &Server, dead: std::ops::Range<u32>) {
    let dead: Vec<_> = dead.flat_map(|n| [n.to_string(), owner("dead", 1000 + n)]).collect();
    let mut words = vec!["ZADD", "{k}:queue"];
    words.extend(dead.iter().map(String::as_str));
    server.cmd(&words);
}

#[test]
fn a_release_drops_a_bounded_number_of_the_dead_and_grants_to_nobody_unseen() {
    let server = Server::start();
    let (a, live) = (owner("a", 1), owner("live", 2));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &live)); // so that the line lasts as long as this test
    for start in (0..1500).step_by(100) {
        stand(&server, start..start + 100);
    }
    run(&server, Op::release("k", &live));
    claim(&server, Claim::in_line("k", &live));
    assert_eq!(run(&server, Op::release("k", &a)), ["released"]);
    assert_eq!(server.cmd(&["EXISTS", "k"]).int(), 0, "released, and granted to nobody that was not looked at");
    let left = line(&server, "k").len();
    // Who joins drops a few too.
    assert!((1501 - 512 - 64 - 8..1501 - 512 + 1).contains(&left), "{left} are left");
    let newcomer = claim(&server, Claim::of("k", &a));
    assert_eq!(newcomer[..2], ["busy", "1"], "ask again at once");
    let mut asked = 0;
    while claim(&server, Claim::in_line("k", &live))[0] != "held" {
        asked += 1;
        assert!(asked < 4, "each claim drops as many");
    }
    assert_eq!(server.keys(), ["k", "{k}:fence"]);
}

#[test]
fn a_waiter_from_the_future_is_dead_for_the_clock_went_back() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    held(&server, Claim::of("k", &a));
    let queued = claim(&server, Claim { presence: 1000, ..Claim::in_line("k", &b) });
    assert_eq!(queued[0], "queued");
    let (now, _) = list(&server, &[]);
    server.cmd(&["HSET", "{k}:waiters", &b, &format!("{} 1000", now / 1000 + 3_600_000)]);
    run_out(&server, "k");
    held(&server, Claim::of("k", &c));
}

#[test]
fn the_lines_ttl_only_grows() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim { presence: 60_000, ..Claim::in_line("k", &b) });
    claim(&server, Claim { presence: 100, ..Claim::in_line("k", &c) });
    assert!(server.pttl("{k}:queue") > 50_000 && server.pttl("{k}:waiters") > 50_000);
}

#[test]
fn a_place_that_the_server_lost_comes_back_by_its_ticket_and_a_newcomer_is_last() {
    let server = Server::start();
    let holder = owner("h", 9);
    held(&server, Claim::of("k", &holder));
    let owners: Vec<String> = ["z", "m", "b"].iter().zip(1..).map(|(l, n)| owner(l, n)).collect();
    let tickets: Vec<String> = owners.iter().map(|o| claim(&server, Claim::in_line("k", o))[4].clone()).collect();
    server.cmd(&["DEL", "{k}:queue", "{k}:waiters"]);
    for at in [2, 0, 1] {
        claim(&server, Claim { ticket: &tickets[at], ..Claim::in_line("k", &owners[at]) });
    }
    assert_eq!(line(&server, "k"), owners);
    let newcomer = claim(&server, Claim::in_line("k", &owner("a", 10)));
    assert!(newcomer[1] == "3" && newcomer[4] > tickets[2], "{newcomer:?}");
}

#[test]
fn asking_again_keeps_the_place_and_the_ticket() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    held(&server, Claim::of("k", &a));
    let first = claim(&server, Claim::in_line("k", &b));
    claim(&server, Claim::in_line("k", &c));
    let again = claim(&server, Claim::in_line("k", &b));
    assert_eq!((&first[1], &first[4]), (&again[1], &again[4]));
    assert_eq!(line(&server, "k"), [b, c]);
}

#[test]
fn a_waiter_that_asks_again_after_its_presence_is_alive_if_nobody_noticed() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &c)); // so that the line lasts as long as this test
    let first = claim(&server, Claim { presence: 20, ..Claim::in_line("k", &b) });
    run(&server, Op::release("k", &c));
    claim(&server, Claim::in_line("k", &c));
    let_die(20);
    let again = claim(&server, Claim::in_line("k", &b));
    assert_eq!((again[1].as_str(), &again[4]), ("0", &first[4]), "the same place");
    run(&server, Op::release("k", &a));
    assert!(server.get("k").unwrap().starts_with(&b));
}

#[test]
fn a_release_by_who_only_waits_leaves_the_line() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &b));
    assert_eq!(run(&server, Op::release("k", &b)), ["gone"]);
    assert_eq!(server.keys(), ["k", "{k}:fence"]);
}

#[test]
fn who_waits_learns_the_largest_fence_given_so_far_though_the_counter_was_lost() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let fence = held(&server, Claim::of("k", &a));
    assert_eq!(claim(&server, Claim::in_line("k", &b))[3], fence);
    for loss in [&["DEL", "{k}:fence"][..], &["SET", "{k}:fence", "7"]] {
        server.cmd(loss);
        assert_eq!(claim(&server, Claim::in_line("k", &b))[3], fence, "{loss:?}");
    }
    server.cmd(&["SET", "j", "another program's", "PX", "60000"]);
    let seen = &claim(&server, Claim::in_line("j", &b))[3];
    assert!(seen > &fence && server.get("{j}:fence").as_ref() == Some(seen), "it is kept, and grows from there");
    assert!(server.pttl("{j}:fence") > 0);
}

#[test]
fn a_line_of_another_type_stops_no_release_and_no_lease() {
    for companion in ["{k}:queue", "{k}:waiters"] {
        let server = Server::start();
        let (a, b) = (owner("a", 1), owner("b", 2));
        held(&server, Claim::of("k", &a));
        claim(&server, Claim::in_line("k", &b));
        server.cmd(&["DEL", companion]);
        server.cmd(&["SET", companion, "x"]);
        assert_eq!(run(&server, Op::release("k", &a)), ["released"], "{companion}");
        assert_eq!(server.cmd(&["EXISTS", "k"]).int(), 0, "{companion}");
        assert_eq!(run(&server, Op::inspect("k")), ["free"]);
    }
}

#[test]
fn a_place_that_could_not_be_taken_whole_is_not_taken() {
    for (companion, denied) in [("{k}:waiters", None), ("{k}:queue", None), ("", Some("-pexpire")), ("", Some("-zadd"))]
    {
        let server = Server::start();
        let (a, b) = (owner("a", 1), owner("b", 2));
        held(&server, Claim::of("k", &a));
        match denied {
            None => server.cmd(&["SET", companion, "x", "PX", "60000"]),
            Some(rule) => server.cmd(&["ACL", "SETUSER", "default", rule]),
        };
        let refused = claim(&server, Claim::in_line("k", &b));
        assert_eq!(refused[0], "error", "{refused:?}");
        let kept: Vec<String> = server.keys().into_iter().filter(|k| *k != companion).collect();
        assert_eq!(kept, ["k", "{k}:fence"], "{companion} {denied:?}");
    }
}

#[test]
fn when_memory_is_full_a_release_with_waiters_still_releases_or_grants() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &b));
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(run(&server, Op::release("k", &a)), ["released"]);
    assert!(server.get("k").is_none_or(|v| v.starts_with(&b)));
}

/// A long random history, looked at after every step.
#[test]
fn no_key_is_ever_without_a_ttl_and_no_owner_stands_in_its_own_line() {
    let server = Server::start();
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let owners: Vec<String> = (0..6).map(|n| owner("o", n)).collect();
    for step in 0..600 {
        let who = &owners[random.usize(0..owners.len())];
        let key = ["k", "j"][random.usize(0..2)];
        let fence = server.get(key).and_then(|v| Some(v.split_once('#')?.1.to_owned())).unwrap_or("1".into());
        let life = [10, 40, 1000][random.usize(0..3)];
        let op = match random.u32(0..10) {
            0..5 => Claim { ttl: life, presence: life, line: random.u32(0..4) > 0, ..Claim::of(key, who) }.op(),
            5 => Op::renew(key, who, &fence, life),
            6..8 => Op::release(key, who),
            8 => Op::force(key),
            _ => {
                server.cmd(&[
                    ["DEL", "DEL", "UNLINK"][random.usize(0..3)],
                    ["k", "{k}:queue", "{j}:fence"][random.usize(0..3)],
                ]);
                Op::inspect(key)
            }
        };
        let answer = run(&server, op.clone());
        assert_ne!(answer[0], "error", "seed {seed}, step {step}: {op:?} {answer:?}");
        for key in server.keys() {
            assert_ne!(server.pttl(&key), -1, "seed {seed}, step {step}: {key} after {op:?}");
        }
        for key in ["k", "j"] {
            let holder = server.get(key).and_then(|v| Some(v.split_once('#')?.0.to_owned()));
            let line = line(&server, key);
            assert!(!holder.is_some_and(|h| line.contains(&h)), "seed {seed}, step {step}: {op:?}");
        }
    }
}

/// So many come, stand in line, and are never heard of again.
fn come_and_die(server: &Server, key: &str, first: u32, count: u32) {
    let owners: Vec<String> = (first..first + count).map(|n| owner("dead", n)).collect();
    for some in owners.chunks(128) {
        let ops: Vec<Op> = some.iter().map(|o| Claim { presence: 20, ..Claim::in_line(key, o) }.op()).collect();
        list(server, &ops);
    }
    // Somebody who lives, and waits with them, keeps both keys of the line.
    for of_line in ["queue", "waiters"] {
        server.cmd(&["PEXPIRE", &format!("{{{key}}}:{of_line}"), "60000"]);
    }
    std::thread::sleep(Duration::from_millis(25));
}

/// A standby that is killed again and again while the leader holds for weeks and another standby lives.
#[test]
fn the_dead_do_not_pile_up_in_redis_while_the_key_is_held_and_somebody_lives_in_the_line() {
    let server = Server::start();
    let (a, lives) = (owner("a", 1), owner("b", 2));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &lives));
    for round in 0..20 {
        come_and_die(&server, "k", 1000 + 100 * round, 100);
        claim(&server, Claim::in_line("k", &lives));
    }
    let left = server.cmd(&["ZCARD", "{k}:queue"]).int();
    assert!(left <= 500, "{left} stand in line, one of them alive");
}

#[test]
fn the_first_who_lives_is_told_that_it_is_first_though_the_key_is_still_held() {
    let server = Server::start();
    let (a, lives) = (owner("a", 1), owner("b", 2));
    held(&server, Claim { ttl: 500, ..Claim::of("k", &a) });
    come_and_die(&server, "k", 1000, 2);
    let queued = claim(&server, Claim::in_line("k", &lives));
    assert_eq!(queued[..2], ["queued", "0"], "{queued:?}: or it does not ask when the TTL ends");
}

#[test]
fn a_claim_that_fails_leaves_no_place() {
    let server = Server::start();
    let b = owner("b", 2);
    server.cmd(&["SET", "k", "another program's", "PX", "60000"]);
    server.cmd(&["LPUSH", "{k}:fence", "x"]);
    let failed = claim(&server, Claim::in_line("k", &b));
    assert_eq!(failed[0], "error", "{failed:?}");
    assert_eq!(server.cmd(&["EXISTS", "{k}:queue", "{k}:waiters"]).int(), 0);
}

/// Who leaves after the queue was deleted takes its record along.
#[test]
fn who_leaves_a_line_that_was_deleted_leaves_no_record() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &b));
    server.cmd(&["DEL", "{k}:queue"]);
    run(&server, Op::release("k", &b));
    claim(&server, Claim::in_line("k", &c));
    assert_eq!(server.cmd(&["HLEN", "{k}:waiters"]).int(), 1);
}
