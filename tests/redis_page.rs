//! The page on a real server: who owns a key, under which fence, and until when.
mod support;

use std::time::Duration;
use support::{
    page::{Claim, EVER, Op, claim, held, list, owner, run},
    server::Server,
};

/// The holder's TTL runs out.
fn run_out(server: &Server, key: &str) {
    server.cmd(&["PEXPIRE", key, "1"]);
    while server.cmd(&["EXISTS", key]).int() == 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_free_key_is_taken_and_its_value_says_by_whom_and_under_which_fence() {
    let server = Server::start();
    let a = owner("a", 1);
    let fence = held(&server, Claim::of("k", &a));
    assert_eq!(fence.len(), 16, "every digit of the microseconds: {fence}");
    assert_eq!(server.get("k"), Some(format!("{a}#{fence}")));
    assert_eq!(server.get("{k}:fence"), Some(fence));
    assert!((50_000..=60_000).contains(&server.pttl("k")));
    assert!(server.pttl("{k}:fence") > 6 * 24 * 3600 * 1000);
    assert_eq!(server.keys(), ["k", "{k}:fence"]);
}

#[test]
fn a_claim_that_is_sent_twice_has_the_same_fence_and_the_whole_ttl_again() {
    let server = Server::start();
    let a = owner("a", 1);
    let fence = held(&server, Claim::of("k", &a));
    server.cmd(&["PEXPIRE", "k", "3000"]);
    assert_eq!(held(&server, Claim::of("k", &a)), fence);
    assert!(server.pttl("k") > 50_000);
}

#[test]
fn neither_a_claim_nor_a_renewal_ever_shortens() {
    let server = Server::start();
    let a = owner("a", 1);
    let fence = held(&server, Claim::of("k", &a));
    held(&server, Claim { ttl: 100, ..Claim::of("k", &a) });
    assert_eq!(run(&server, Op::renew("k", &a, &fence, 100)), ["renewed"]);
    assert!(server.pttl("k") > 50_000);
}

/// Or a WAIT behind it would count replicas that have an earlier write of the connection, and not this.
#[test]
fn a_claim_and_a_renewal_that_change_nothing_are_written_all_the_same() {
    let server = Server::start();
    let a = owner("a", 1);
    let fence = held(&server, Claim::of("k", &a));
    let written = || {
        let said = server.cmd(&["INFO", "persistence"]).text().unwrap();
        let count = said.lines().find_map(|line| line.strip_prefix("rdb_changes_since_last_save:"));
        count.unwrap().parse::<u64>().unwrap()
    };
    for life in [100, 60_000] {
        let before = written();
        held(&server, Claim { ttl: life, ..Claim::of("k", &a) });
        assert_eq!(written(), before + 1, "a claim");
        assert_eq!(run(&server, Op::renew("k", &a, &fence, life)), ["renewed"]);
        assert_eq!(written(), before + 2, "a renewal");
    }
    assert!(server.pttl("k") > 50_000);
}

#[test]
fn a_renewal_gives_a_ttl_to_a_key_that_lost_it() {
    let server = Server::start();
    let a = owner("a", 1);
    let fence = held(&server, Claim::of("k", &a));
    server.cmd(&["PERSIST", "k"]);
    assert_eq!(run(&server, Op::renew("k", &a, &fence, 60_000)), ["renewed"]);
    assert!(server.pttl("k") > 50_000);
}

#[test]
fn a_renewal_needs_owner_and_fence_and_creates_nothing() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let fence = held(&server, Claim::of("k", &a));
    let other = (fence.parse::<u64>().unwrap() - 1).to_string();
    let value = server.get("k");
    assert_eq!(run(&server, Op::renew("k", &a, &other, 90_000)), ["taken"]);
    assert_eq!(run(&server, Op::renew("k", &b, &fence, 90_000)), ["taken"]);
    assert!(server.get("k") == value && server.pttl("k") <= 60_000, "nothing was changed");
    assert_eq!(run(&server, Op::renew("j", &a, &fence, 60_000)), ["gone"]);
    assert_eq!(server.cmd(&["EXISTS", "j"]).int(), 0);
}

#[test]
fn only_its_owner_releases_a_key_and_only_once() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    held(&server, Claim::of("k", &a));
    assert_eq!(run(&server, Op::release("k", &b)), ["gone"]);
    assert!(server.get("k").is_some());
    assert_eq!(run(&server, Op::release("k", &a)), ["released"]);
    assert_eq!(run(&server, Op::release("k", &a)), ["gone"]);
    assert_eq!(server.keys(), ["{k}:fence"], "only the fence outlives the lease");
}

#[test]
fn who_comes_second_is_told_the_holders_label_and_how_long_and_never_its_secret() {
    let server = Server::start();
    let (a, b) = (owner("host/one:1", 1), owner("b", 2));
    held(&server, Claim::of("k", &a));
    let busy = claim(&server, Claim::of("k", &b));
    let ttl: i64 = busy[1].parse().unwrap();
    assert!((50_000..=60_000).contains(&ttl), "{busy:?}");
    assert_eq!([&busy[0], &busy[2]], ["busy", "host/one:1"]);
    let queued = claim(&server, Claim::in_line("k", &b));
    assert_eq!([&queued[0], &queued[5]], ["queued", "host/one:1"]);
    assert!(!queued.concat().contains("0000-4000") && !busy.concat().contains("0000-4000"));
}

#[test]
fn a_lock_of_another_program_excludes_us_and_is_excluded_by_us() {
    let server = Server::start();
    let a = owner("a", 1);
    server.cmd(&["SET", "k", "token", "NX", "PX", "60000"]);
    let busy = claim(&server, Claim::of("k", &a));
    assert_eq!([&busy[0], &busy[2]], ["busy", ""]);
    run_out(&server, "k");
    held(&server, Claim::of("k", &a));
    assert_eq!(server.cmd(&["SET", "k", "token", "NX", "PX", "50"]).text(), None);
}

#[test]
fn a_lock_without_a_ttl_leaves_open_when_to_ask_again() {
    let server = Server::start();
    server.cmd(&["SET", "k", "token"]);
    assert_eq!(claim(&server, Claim::of("k", &owner("a", 1))), ["busy", "-1", ""]);
    assert_eq!(run(&server, Op::inspect("k")), ["holds", "-1", "0", "", ""]);
}

#[test]
fn no_foreign_token_is_ever_taken_for_one_of_ours() {
    let server = Server::start();
    let a = owner("a", 1);
    let uuid = &a[a.len() - 36..];
    let tokens = [
        "token#12".to_owned(),
        format!("{a}#"),
        format!("{a}#0"),
        format!("{a}#01"),
        format!("{a}#-1"),
        format!("{a}#1x"),
        format!("{a}##1"),
        a.clone(),
        format!("{}#1", a.to_uppercase()),
        format!("{uuid}#1"),
        format!("a/{uuid}#1"),
        format!("/000000000000ab01/{uuid}#1"),
        format!("a b/000000000000ab01/{uuid}#1"),
        format!("a#b/000000000000ab01/{uuid}#1"),
        format!("a/000000000000ab0/{uuid}#1"),
    ];
    for token in tokens {
        server.cmd(&["SET", "k", &token, "PX", "60000"]);
        let holds = run(&server, Op::inspect("k"));
        assert_eq!([&holds[3], &holds[4]], ["", ""], "{token}");
        let busy = claim(&server, Claim::of("k", &a));
        assert_eq!([&busy[0], &busy[2]], ["busy", ""], "{token}");
        assert_eq!(run(&server, Op::renew("k", &a, "2", 60_000)), ["taken"], "{token}");
        assert_eq!(run(&server, Op::release("k", &a)), ["gone"], "{token}");
        assert_eq!(server.get("k"), Some(token));
    }
}

#[test]
fn a_key_of_another_type_is_somebody_elses_and_stays_as_it_is() {
    let server = Server::start();
    let a = owner("a", 1);
    server.cmd(&["LPUSH", "k", "x"]);
    let refused = claim(&server, Claim::of("k", &a));
    assert!(refused[0] == "error" && refused[1].starts_with("WRONGTYPE"), "{refused:?}");
    assert_eq!(run(&server, Op::renew("k", &a, "1", 60_000)), ["taken"]);
    assert_eq!(run(&server, Op::release("k", &a)), ["gone"]);
    assert_eq!(run(&server, Op::inspect("k")), ["holds", "-1", "0", "", ""]);
    assert!(run(&server, Op::force("k"))[1].starts_with("WRONGTYPE"));
    assert_eq!(server.cmd(&["LLEN", "k"]).int(), 1);
}

#[test]
fn fences_grow_though_the_data_or_the_counter_is_lost() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    let number = |fence: String| fence.parse::<u64>().unwrap();
    let first = number(held(&server, Claim::of("k", &a)));
    server.cmd(&["FLUSHALL"]);
    let second = number(held(&server, Claim::of("k", &b)));
    assert!(second > first, "after FLUSHALL");
    server.cmd(&["DEL", "{k}:fence"]);
    run(&server, Op::release("k", &b));
    assert!(number(held(&server, Claim::of("k", &c))) > second, "after a lost counter");
}

#[test]
fn a_fence_ahead_of_the_clock_goes_on_by_one_with_every_digit() {
    let server = Server::start();
    let (a, b, c) = (owner("a", 1), owner("b", 2), owner("c", 3));
    server.cmd(&["SET", "{k}:fence", "9007199254740989"]);
    assert_eq!(held(&server, Claim::of("k", &a)), "9007199254740990");
    run(&server, Op::release("k", &a));
    assert_eq!(held(&server, Claim::of("k", &b)), "9007199254740991");
    run(&server, Op::release("k", &b));
    let refused = claim(&server, Claim::of("k", &c));
    assert!(refused[0] == "error" && refused[1].starts_with("FENCE"), "2^53 is refused: {refused:?}");
    assert_eq!(server.cmd(&["EXISTS", "k"]).int(), 0, "and nobody owns the key");
}

#[test]
fn a_grant_after_a_lost_counter_is_larger_because_the_value_carries_the_fence() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    server.cmd(&["SET", "{k}:fence", "5000000000000000"]);
    held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &b));
    server.cmd(&["DEL", "{k}:fence"]);
    run(&server, Op::release("k", &a));
    assert_eq!(server.get("k"), Some(format!("{b}#5000000000000002")));
}

#[test]
fn a_counter_that_is_no_number_counts_as_none() {
    let server = Server::start();
    for odd in ["", "x", "nan", "inf", "0x7fffffffffffff", "1e300", "-5", "1.5", " 7"] {
        server.cmd(&["FLUSHALL"]);
        server.cmd(&["SET", "{k}:fence", odd]);
        let fence = held(&server, Claim::of("k", &owner("a", 1)));
        assert!(fence.starts_with("1") && fence.len() == 16, "{odd:?}: {fence}");
    }
}

#[test]
fn a_claim_that_comes_late_does_nothing_unless_the_key_is_its_owners_already() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let (now, _) = list(&server, &[]);
    let late = |owner| Claim { not_after: now, ..Claim::in_line("k", owner) };
    assert_eq!(claim(&server, late(&a)), ["late"]);
    assert_eq!(server.keys(), Vec::<String>::new());
    let in_time = Claim { not_after: now + 60_000_000, ..Claim::of("k", &a) };
    let fence = held(&server, in_time);
    assert_eq!(held(&server, late(&a)), fence, "an answer again, not an act");
    assert_eq!(claim(&server, late(&b)), ["late"]);
    assert_eq!(server.cmd(&["EXISTS", "{k}:queue"]).int(), 0, "nor does it join the line");
}

#[test]
fn each_claim_of_a_list_has_its_own_bound() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let late = Claim { not_after: 1, ..Claim::of("j", &a) }.op();
    let (_, answers) = list(&server, &[late, Claim { not_after: EVER, ..Claim::of("k", &b) }.op()]);
    assert_eq!([&answers[0][0], &answers[1][0]], ["late", "held"]);
}

#[test]
fn an_error_fails_its_own_operation_and_no_other() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let fence = held(&server, Claim::of("j", &a));
    server.cmd(&["LPUSH", "{k}:fence", "x"]);
    let ops = [Claim::of("k", &b).op(), Op::renew("j", &a, &fence, 60_000), Op::release("j", &a)];
    let (_, answers) = list(&server, &ops);
    assert!(answers[0][0] == "error" && answers[0][1].contains("WRONGTYPE"), "{answers:?}");
    assert_eq!(answers[1..], [["renewed"], ["released"]]);
    assert_eq!(server.cmd(&["EXISTS", "k"]).int(), 0, "without a fence there is no owner");
}

#[test]
fn a_lease_is_ended_by_force_whoever_holds_it_and_the_next_fence_is_larger() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    assert_eq!(run(&server, Op::force("k")), ["gone"]);
    let first = held(&server, Claim::of("k", &a));
    let mut inbox = server.connect();
    inbox.subscribe(&support::page::inbox(1));
    assert_eq!(run(&server, Op::force("k")), ["released"]);
    assert_eq!(inbox.message(), format!("forced {first} k"), "its holder is told");
    assert_eq!(run(&server, Op::renew("k", &a, &first, 60_000)), ["gone"]);
    assert!(held(&server, Claim::of("k", &b)) > first);
    server.cmd(&["SET", "j", "token"]);
    assert_eq!(run(&server, Op::force("j")), ["released"], "also another program's lock");
    assert_eq!(server.cmd(&["EXISTS", "j"]).int(), 0);
}

#[test]
fn inspection_tells_label_fence_time_and_waiters() {
    let server = Server::start();
    let (a, b, c) = (owner("a:1", 1), owner("b", 2), owner("c", 3));
    assert_eq!(run(&server, Op::inspect("k")), ["free"]);
    let fence = held(&server, Claim::of("k", &a));
    claim(&server, Claim::in_line("k", &b));
    claim(&server, Claim::in_line("k", &c));
    let holds = run(&server, Op::inspect("k"));
    assert!(holds[1].parse::<u64>().unwrap() > 50_000);
    assert_eq!([&holds[0], &holds[2], &holds[3], &holds[4]], ["holds", "2", "a:1", &fence]);
}

#[test]
fn out_of_memory_refuses_a_claim_and_lets_a_release_through() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let fence = held(&server, Claim::of("k", &a));
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    let refused = claim(&server, Claim::of("j", &b));
    assert!(refused[0] == "error" && refused[1].starts_with("OOM"), "{refused:?}");
    assert_eq!(run(&server, Op::renew("k", &a, &fence, 90_000)), ["renewed"]);
    assert_eq!(run(&server, Op::release("k", &a)), ["released"]);
    assert_eq!(server.keys(), ["{k}:fence"]);
}

#[test]
fn a_read_only_server_refuses_what_would_write_and_says_so() {
    let server = Server::start();
    let (a, b) = (owner("a", 1), owner("b", 2));
    let fence = held(&server, Claim::of("k", &a));
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]);
    let ops = [Claim::of("j", &b).op(), Op::renew("k", &a, &fence, 90_000), Op::release("k", &a), Op::force("k")];
    for answer in list(&server, &ops).1 {
        assert!(answer[0] == "error" && answer[1].starts_with("READONLY"), "{answer:?}");
    }
    assert_eq!(run(&server, Op::inspect("k"))[0], "holds");
}
