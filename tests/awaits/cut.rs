//! A call, polled when it is woken and never otherwise, and dropped where a test says.
use super::{call::Calling, support::PATIENCE};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// Where a call is dropped: after so many polls, before it is woken or just after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    pub polls: usize,
    /// What it waited for has come, and it was not polled since.
    pub woken: bool,
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was dropped before it was done.
    Dropped,
    Done,
    Panicked,
}

/// Rings when the call is woken.
#[derive(Default)]
struct Bell(Notify);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

/// A call under way.
pub struct Driven {
    call: Option<Calling>,
    end: End,
    bell: Arc<Bell>,
    waker: Waker,
    /// Polls so far.
    pub polls: usize,
    /// It was woken since the last of them.
    pub woken: bool,
}

impl Driven {
    pub fn new(call: Calling) -> Driven {
        let bell = Arc::<Bell>::default();
        let waker = bell.clone().into();
        Driven { call: Some(call), end: End::Dropped, bell, waker, polls: 0, woken: false }
    }

    /// Goes on until there, or until the call is over, or for so long.
    pub async fn to(&mut self, cut: Cut, patience: Duration) {
        let deadline = Instant::now() + patience.min(PATIENCE);
        // The first poll needs no wake.
        while self.call.is_some() && self.polls < cut.polls {
            if self.polls > 0 && !self.is_woken_by(deadline).await {
                return;
            }
            self.poll();
        }
        if self.call.is_some() && cut.woken && self.polls > 0 {
            self.is_woken_by(deadline).await;
        }
    }

    async fn is_woken_by(&mut self, deadline: Instant) -> bool {
        if !self.woken {
            self.woken = tokio::time::timeout_at(deadline, self.bell.0.notified()).await.is_ok();
        }
        self.woken
    }

    fn poll(&mut self) {
        let Some(call) = &mut self.call else { return };
        (self.polls, self.woken) = (self.polls + 1, false);
        let mut context = Context::from_waker(&self.waker);
        match catch_unwind(AssertUnwindSafe(|| Pin::as_mut(call).poll(&mut context))) {
            Ok(Poll::Pending) => return,
            Ok(Poll::Ready(())) => self.end = End::Done,
            Err(_) => self.end = End::Panicked,
        }
        self.call = None;
    }

    /// Drops it where it is.
    pub fn end(&mut self) -> End {
        self.call = None;
        self.end
    }

    /// Takes it away, to be dropped elsewhere.
    pub fn take(&mut self) -> Option<Calling> {
        self.call.take()
    }

    pub fn ended_as(&mut self, end: End, polls: usize) {
        (self.end, self.polls) = (end, polls);
    }
}
