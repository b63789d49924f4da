//! The examples, run as a newcomer would, and on a real Redis too.
#![allow(clippy::unwrap_used, clippy::expect_used)]
mod support;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::LazyLock,
};
use support::{server::Server, within};

/// The examples' programs by name, built by now.
static EXAMPLES: LazyLock<BTreeMap<String, PathBuf>> = LazyLock::new(|| {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--locked", "--quiet", "--examples", "--message-format", "json-render-diagnostics"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null()).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let artifacts = String::from_utf8(built.stdout).unwrap();
    let programs = artifacts.lines().filter(|line| line.contains(r#""kind":["example"]"#)).filter_map(|line| {
        let path = PathBuf::from(line.split_once(r#""executable":""#)?.1.split_once('"')?.0);
        Some((path.file_stem()?.to_str()?.to_owned(), path))
    });
    programs.collect()
});

/// Runs it to its end.
async fn run(name: &str, redis: Option<&Server>) -> String {
    let mut command = tokio::process::Command::new(&EXAMPLES[name]);
    command.env_remove("REDIS_URL").envs(redis.map(|server| ("REDIS_URL", server.url())));
    command.stdin(Stdio::null()).kill_on_drop(true);
    let Output { status, stdout, stderr } = within(name, command.output()).await.unwrap();
    let said = String::from_utf8(stdout).unwrap();
    assert!(status.success(), "{name}: {status}\n{said}\n{}", String::from_utf8_lossy(&stderr));
    said
}

/// On the embedded store, and on a Redis, twice: what a first run leaves there must not trouble a second.
async fn run_all_ways(name: &str, check: impl Fn(&str)) {
    check(&run(name, None).await);
    let server = Server::start();
    for _ in 0..2 {
        check(&run(name, Some(&server)).await);
        // What was written stays, and so does the mark of who wrote it. Of a lease, nothing stays for ever.
        let written = [":text", ":done", ":mark"];
        for key in server.keys().iter().filter(|key| !written.iter().any(|end| key.ends_with(end))) {
            assert!(server.pttl(key) > 0, "{name} leaves {key}");
        }
    }
}

#[tokio::test]
async fn every_example_is_tested_here() {
    let known = ["fencing_sqlite", "graceful_service", "handles", "monthly_report", "scheduled_job"];
    assert_eq!(EXAMPLES.keys().collect::<Vec<_>>(), known);
}

#[tokio::test]
async fn monthly_report_is_built_by_one_and_a_stopped_worker_is_overtaken() {
    run_all_ways("monthly_report", |said| {
        let count = |words: &str| said.matches(words).count();
        let fence = |line: &str| line.rsplit_once("fence ").unwrap().1.parse::<u64>().unwrap();
        let has: Vec<u64> = said.lines().filter(|line| line.contains("has report:monthly, fence")).map(fence).collect();
        assert!(has.is_sorted(), "{said}");
        // Each builds or stands back, and it is a slow machine on which only one of the others comes in time to do so.
        assert!(count("stands back: worker-") > 0, "{said}");
        assert_eq!(count("stands back: ") + count("has written the report: 3650 orders"), 4, "{said}");
        for words in ["worker-1  is stopped", "worker-1  has its work dropped", "worker-1  has a late write refused"] {
            assert_eq!(count(words), 1, "{words}\n{said}");
        }
        let [.., overtaken, newest] = has[..] else { panic!("{said}") };
        assert!(said.contains(&format!("fence {overtaken} is stale: fence {newest} has written since")), "{said}");
        assert!(said.contains("2025-12      460"), "{said}");
    })
    .await;
}

#[tokio::test]
async fn handles_lock_enter_again_and_unlock() {
    run_all_ways("handles", |said| {
        assert!(said.contains("held 2 times") && said.contains("your fence is larger: true"), "{said}");
        assert!(said.contains("unlocking it says so, too") && !said.contains("?!"), "{said}");
    })
    .await;
}

#[tokio::test]
async fn fencing_sqlite_refuses_the_stale_writer() {
    run_all_ways("fencing_sqlite", |said| {
        assert!(said.contains("refused: a newer owner has written\nthe balance is 8000"), "{said}");
    })
    .await;
}

#[tokio::test]
async fn scheduled_job_runs_at_most_once_a_tick() {
    run_all_ways("scheduled_job", |said| {
        let mut ticks: Vec<&str> = said
            .lines()
            .filter(|line| line.ends_with("has cleaned up"))
            .map(|line| line.split_whitespace().nth(1).unwrap())
            .collect();
        let runs = ticks.len();
        ticks.dedup();
        assert!(runs >= 4 && ticks.len() == runs, "{said}");
    })
    .await;
}

#[tokio::test]
async fn graceful_service_frees_its_key_by_itself() {
    run_all_ways("graceful_service", |said| {
        assert!(said.contains("told to stop between two invoices") && said.ends_with("the key is free\n"), "{said}");
    })
    .await;
}

#[cfg(unix)]
#[tokio::test]
async fn graceful_service_frees_its_key_when_it_is_terminated() {
    use rustix::process::{Pid, Signal, kill_process};
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};

    let server = Server::start();
    let mut command = tokio::process::Command::new(&EXAMPLES["graceful_service"]);
    command.env("REDIS_URL", server.url()).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut service = command.spawn().unwrap();
    let mut said = BufReader::new(service.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("works, under fence") {
        line.clear();
        assert!(within("the first invoice", said.read_line(&mut line)).await.unwrap() > 0, "it ended");
    }
    assert_eq!(server.keys().iter().filter(|key| *key == "service:invoices").count(), 1);
    kill_process(Pid::from_raw(service.id().unwrap().cast_signed()).unwrap(), Signal::TERM).unwrap();
    let mut rest = String::new();
    within("the end", said.read_to_string(&mut rest)).await.unwrap();
    assert!(within("the end", service.wait()).await.unwrap().success());
    assert!(rest.contains("SIGTERM: shutting down") && rest.ends_with("the key is free\n"), "{rest}");
    assert!(!server.keys().contains(&"service:invoices".to_owned()));
}
