//! Work that notes each of its polls, so that a test can judge by what the work saw.
use leasehold::LeaseView;
use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// What the work saw as a poll of it began.
#[derive(Clone, Copy, Debug)]
pub struct Poll {
    pub at: Instant,
    /// How long the lease was certain then.
    pub left: Duration,
    /// Whether the token had fired.
    pub told: bool,
}

/// The polls of one work. Clones share them.
#[derive(Clone, Default)]
pub struct Polls {
    seen: Arc<Mutex<Vec<Poll>>>,
    /// What the work owned is gone.
    dropped: Arc<AtomicBool>,
}

impl Polls {
    /// Work that is polled every few milliseconds and does not end by itself, whatever it is told.
    pub async fn stubborn(self, lease: LeaseView) {
        self.note(lease, std::future::pending::<()>()).await;
    }

    /// Work that is polled every few milliseconds, until `done`.
    pub async fn note<T>(self, lease: LeaseView, done: impl Future<Output = T>) -> T {
        let _gone = Gone(self.dropped.clone());
        let mut done = pin!(done);
        let mut pulse = pin!(async {
            loop {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        });
        poll_fn(|cx| {
            let told = lease.cancel_token().is_cancelled();
            let left = lease.valid_for();
            self.seen.lock().unwrap().push(Poll { at: Instant::now(), left, told });
            let never: std::task::Poll<()> = pulse.as_mut().poll(cx);
            assert!(never.is_pending());
            done.as_mut().poll(cx)
        })
        .await
    }

    pub fn seen(&self) -> Vec<Poll> {
        self.seen.lock().unwrap().clone()
    }

    pub fn last(&self) -> Poll {
        *self.seen.lock().unwrap().last().expect("the work was polled")
    }

    /// Waits until the work has been polled.
    pub async fn begun(&self) {
        super::until("the work begins", || !self.seen.lock().unwrap().is_empty()).await;
    }

    pub fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Acquire)
    }

    /// No poll began when the lease was not certain any more: by the lease's clock, and by `end`, before which the server
    /// cannot have let anybody else in.
    #[track_caller]
    pub fn assert_none_past(&self, end: Instant) {
        for poll in self.seen() {
            assert!(!poll.left.is_zero(), "polled when nothing was certain: {poll:?}");
            assert!(poll.at < end, "polled {:?} after the key could be another's", poll.at - end);
        }
    }

    /// The work was told to stop while it still had some of its grace, and not before.
    #[track_caller]
    pub fn assert_told_within(&self, grace: Duration) {
        let told: Vec<_> = self.seen().into_iter().filter(|poll| poll.told).collect();
        assert!(!told.is_empty(), "the work was never told to stop; last {:?}", self.last());
        assert!(told[0].left <= grace, "told too early: {:?}", told[0]);
    }
}

struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
