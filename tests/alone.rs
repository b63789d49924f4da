//! What can only be tried in a process of one thread: a suspension of the machine, and a fork. A program of its own, for
//! the usual harness runs each test on a second thread.
#![allow(clippy::unwrap_used, clippy::expect_used)]
#[cfg(target_os = "linux")]
mod support;

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() {
    linux::main();
}

#[cfg(target_os = "linux")]
mod linux {
    use super::support::server::Server;
    use leasehold::{
        Clock, Error, LeaseView, Leases, LossReason,
        store::{Identity, MemoryStore, Owner},
    };
    use rustix::{
        thread::{LinkNameSpaceType, move_into_link_name_space},
        time::{ClockId, clock_gettime},
    };
    use std::{
        cell::Cell,
        fs::File,
        io::{Read, Write},
        os::fd::AsFd,
        process::{Command, Stdio},
        time::{Duration, Instant},
    };
    use tokio::runtime::{Builder, Runtime};

    type Test = (&'static str, fn() -> Result<(), String>);
    const TESTS: [Test; 3] = [
        ("an_hour_of_suspension_costs_the_lease_and_the_work_is_not_polled_once_more", suspended),
        ("a_forked_child_draws_other_owners_than_its_parent", owners_after_a_fork),
        ("leases_from_before_a_fork_are_refused_in_the_child_and_work_in_the_parent", leases_after_a_fork),
    ];

    /// Runs itself once for each test, each in a process of its own.
    pub(super) fn main() {
        let args: Vec<String> = std::env::args().skip(1).collect();
        if let [only, name] = &args[..]
            && only == "--alone"
        {
            let (_, test) = TESTS.iter().find(|(known, _)| known == name).expect("a test of this file");
            if let Err(why) = test() {
                print(&format!("!! NOT RUN: {why}\n"));
            }
            return;
        }
        let wanted = |name: &str| args.iter().all(|arg| arg.starts_with('-') || name.contains(arg.as_str()));
        if args.iter().any(|arg| arg == "--list") {
            TESTS.iter().for_each(|(name, _)| print(&format!("{name}: test\n")));
            return;
        }
        let mut failed = false;
        for (name, _) in TESTS.iter().filter(|(name, _)| wanted(name)) {
            let me = std::env::current_exe().expect("the test's binary");
            let ended = Command::new(me).args(["--alone", name]).status().expect("a process of this binary");
            print(&format!("test {name} ... {}\n", if ended.success() { "ok" } else { "FAILED" }));
            failed |= !ended.success();
        }
        assert!(!failed, "a test failed; see above");
    }

    fn print(text: &str) {
        std::io::stdout().write_all(text.as_bytes()).expect("somebody reads");
    }

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    fn threads() -> usize {
        std::fs::read_dir("/proc/self/task").unwrap().count()
    }

    fn boot_time() -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        Duration::from_secs(now.tv_sec.unsigned_abs())
    }

    /// Another process's view of time, in which the machine has slept for an hour.
    struct HourLater(std::process::Child);

    impl HourLater {
        fn begin() -> Result<(HourLater, File), String> {
            let mut unshare = Command::new("unshare");
            unshare.args(["-T", "--boottime", "3600", "sh", "-c", "echo; exec sleep 60"]);
            let child = unshare.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
            let mut child = HourLater(child.map_err(|e| format!("`unshare` of util-linux is needed: {e}"))?);
            let mut line = [0];
            let begun = child.0.stdout.take().unwrap().read_exact(&mut line);
            begun.map_err(|_| "a time namespace needs root, and a kernel with CONFIG_TIME_NS".to_owned())?;
            let time = File::open(format!("/proc/{}/ns/time", child.0.id())).map_err(|e| e.to_string())?;
            Ok((child, time))
        }
    }

    impl Drop for HourLater {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn suspended() -> Result<(), String> {
        let (_sleeper, an_hour_later) = HourLater::begin()?;
        let polls = Cell::new(0);
        let (before, start) = (boot_time(), Instant::now());
        let error = runtime().block_on(async {
            let store = MemoryStore::with_clock(Clock::system());
            let leases = Leases::builder().build(store).unwrap();
            let work = leases.lease("k").run(async |lease: LeaseView| {
                loop {
                    polls.set(polls.get() + 1);
                    assert!(lease.is_held(), "one poll too many");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            });
            let suspension = async {
                while polls.get() < 3 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                if threads() != 1 {
                    return Err(format!("this process has {} threads", threads()));
                }
                let moved = move_into_link_name_space(an_hour_later.as_fd(), Some(LinkNameSpaceType::Time));
                moved.map_err(|e| format!("this process may not enter a time namespace: {e}"))?;
                Ok(polls.get())
            };
            let mut work = std::pin::pin!(work);
            let at_the_jump = tokio::select! {
                biased;
                at_the_jump = suspension => at_the_jump?,
                out = &mut work => { let out: leasehold::Result<()> = out; panic!("{out:?}") }
            };
            let out: leasehold::Result<()> = tokio::time::timeout(Duration::from_secs(20), work).await.unwrap();
            assert_eq!(polls.get(), at_the_jump, "polled after an hour's sleep");
            Ok::<_, String>(out.unwrap_err())
        })?;
        assert!(boot_time() - before >= Duration::from_secs(3600) && start.elapsed() < Duration::from_secs(60));
        assert!(matches!(error.lost().unwrap().reason, LossReason::Deadline { .. }), "{error}");
        Ok(())
    }

    /// What the child says, and its end, in the parent; in the child this does not return.
    fn forked(child: impl FnOnce() -> String) -> Result<(String, impl FnOnce()), String> {
        let (mut hears, mut says) = std::io::pipe().unwrap();
        match fork::fork().map_err(|e| format!("no fork: {e}"))? {
            fork::Fork::Child => {
                drop(hears);
                let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
                says.write_all(said.unwrap_or_else(|_| "the child panicked".into()).as_bytes()).unwrap();
                drop(says);
                std::process::abort();
            }
            fork::Fork::Parent(pid) => {
                drop(says);
                let mut said = String::new();
                hears.read_to_string(&mut said).unwrap();
                Ok((said, move || _ = fork::waitpid(pid)))
            }
        }
    }

    fn owners_after_a_fork() -> Result<(), String> {
        let identity = Identity::new("me").unwrap();
        // Whatever keeps a state in this process has one now, and the child has a copy of it.
        drop((0..10).map(|_| Owner::draw(&identity).unwrap()).collect::<Vec<_>>());
        assert_eq!(threads(), 1);
        let draw = || -> Vec<String> {
            let owners = (0..100).map(|_| Owner::draw(&identity).unwrap().id().to_string());
            owners.chain([Identity::new("me").unwrap().inbox().to_string()]).collect()
        };
        let (said, end) = forked(|| draw().join(" "))?;
        end();
        let theirs: Vec<&str> = said.split(' ').collect();
        assert_eq!(theirs.len(), 101, "{said}");
        for ours in draw() {
            assert!(!theirs.contains(&ours.as_str()), "{ours} is the child's and the parent's");
        }
        Ok(())
    }

    fn leases_after_a_fork() -> Result<(), String> {
        let server = Server::start();
        let runtime = runtime();
        let ttl = Duration::from_secs(2);
        let leases = runtime.block_on(Leases::builder().ttl(ttl).connect(&server.url())).unwrap();
        let held = runtime.block_on(leases.lease("held").acquire()).unwrap();
        let (said, end) = forked(|| {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            match runtime.block_on(leases.lease("k").acquire()) {
                Err(Error::Store { source, .. }) => source.to_string(),
                other => format!("{other:?}"),
            }
        })?;
        end();
        assert!(said.contains("forked"), "{said}");
        runtime.block_on(async {
            let next = held.valid_until() + ttl / 2;
            super::support::until("a renewal", || held.valid_until() > next).await;
            leases.lease("k").acquire().await.unwrap().release().await.unwrap();
            held.release().await.unwrap();
        });
        assert_eq!(server.keys(), ["{held}:fence", "{k}:fence"]);
        Ok(())
    }
}
