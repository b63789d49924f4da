//! A part of a test that runs in a process of its own, so that it can be stopped and killed.
//!
//! The test runs itself again, and finds out at its beginning which of the two it is:
//!
//! ```ignore
//! #[tokio::test]
//! async fn a_stopped_process_does_nothing_more() {
//!     if let Some(url) = child::told() {
//!         // .. this is the child
//!         child::says("held 17");
//!         return;
//!     }
//!     let mut child = Child::of("a_stopped_process_does_nothing_more", &server.url());
//!     let fence = child.hears("held").await;
//!     child.stop();
//! }
//! ```
use super::PATIENCE;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
};
use tokio::sync::mpsc;

/// Carries what the child is told, and by that tells it that it is one.
const TOLD: &str = "LEASEHOLD_TEST_CHILD";
/// Begins the lines that are events; the test harness prints lines of its own.
const EVENT: &str = "@ ";

/// What the parent told this process, if it is a child.
pub fn told() -> Option<String> {
    std::env::var(TOLD).ok()
}

/// In the child: an event for the parent to hear.
pub fn says(event: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    // The harness may have begun a line.
    write!(out, "\n{EVENT}{event}\n").and_then(|()| out.flush()).expect("the parent reads");
}

/// A child process. Dropping it kills it.
pub struct Child {
    process: std::process::Child,
    events: mpsc::UnboundedReceiver<String>,
    transcript: Arc<Mutex<String>>,
}

impl Child {
    /// Runs the test of that name (with its modules: `module::name`) in a new process, which is [`told`] so.
    pub fn of(test: &str, told: &str) -> Child {
        Child::with(test, told, |_| ())
    }

    /// The same, with something more done to the command, such as an environment variable.
    pub fn with(test: &str, told: &str, more: impl FnOnce(&mut Command)) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("the test's binary"));
        command.args([test, "--exact", "--nocapture"]).env(TOLD, told);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        more(&mut command);
        let mut process = command.spawn().expect("a process of this binary");
        let (heard, events) = mpsc::unbounded_channel();
        let transcript = Arc::default();
        read(process.stdout.take(), &transcript, heard.clone());
        read(process.stderr.take(), &transcript, heard);
        Child { process, events, transcript }
    }

    /// Waits for the next event that begins with these words, and returns the rest of it. Other events are passed over.
    pub async fn hears(&mut self, words: &str) -> String {
        self.hears_past(words, |_| ()).await
    }

    /// The same, with a look at each event that is passed over.
    pub async fn hears_past(&mut self, words: &str, mut passed: impl FnMut(&str)) -> String {
        let rest = tokio::time::timeout(PATIENCE, async {
            while let Some(event) = self.events.recv().await {
                if let Some(rest) = event.strip_prefix(words) {
                    return Some(rest.trim_start().to_owned());
                }
                passed(&event);
            }
            None
        });
        match rest.await {
            Ok(Some(rest)) => rest,
            Ok(None) => panic!("the child ended before it said {words:?}; {}", self.said()),
            Err(_) => panic!("the child did not say {words:?}; {}", self.said()),
        }
    }

    /// The events that are there and were not heard yet.
    pub fn unheard(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }

    /// Stops it as a scheduler or a debugger would; returns when it stands still.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let wait = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::Pid(self.pid()), wait).expect("the state of a child");
        assert!(status.is_some_and(|s| s.stopped()), "the child ended before it could be stopped; {}", self.said());
    }
    /// Lets it go on.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }
    /// Kills it; returns when it is gone.
    pub fn kill(&mut self) {
        self.process.kill().expect("a child that can be killed");
        self.process.wait().expect("the end of a child");
    }
    /// Waits for its end, and fails if its part of the test did.
    pub async fn succeeds(&mut self) {
        // Its output ends when it does; what it still says is in the transcript by then.
        let ended = tokio::time::timeout(PATIENCE, async { while self.events.recv().await.is_some() {} }).await;
        assert!(ended.is_ok(), "the child did not end; {}", self.said());
        let status = self.process.wait().expect("the end of a child");
        assert!(status.success() && self.said().contains("1 passed"), "the child failed; {}", self.said());
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    fn signal(&self, signal: Signal) {
        // Not reaped before `kill` or `succeeds`, so the number is still this child's.
        kill_process(self.pid(), signal).unwrap_or_else(|e| panic!("{e}; {}", self.said()));
    }
    fn said(&self) -> String {
        format!("it said:\n{}", self.transcript.lock().expect("readers do not panic"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Reads on a thread, so that a blocked runtime never holds up a child by a full pipe. Events end when both pipes do.
fn read(
    pipe: Option<impl Read + Send + 'static>,
    transcript: &Arc<Mutex<String>>,
    events: mpsc::UnboundedSender<String>,
) {
    let (pipe, transcript) = (BufReader::new(pipe.expect("a pipe")), transcript.clone());
    std::thread::spawn(move || {
        for line in pipe.lines().map_while(Result::ok) {
            let mut transcript = transcript.lock().expect("readers do not panic");
            transcript.push_str(&line);
            transcript.push('\n');
            if let Some(event) = line.strip_prefix(EVENT) {
                // Nobody may be left to hear it.
                let _ = events.send(event.to_owned());
            }
        }
    });
}
