//! One call made once, and what is to be said of it afterwards.
use super::{
    call::{Calling, Step},
    cut::{Cut, Driven, End},
    look::Look,
    onlookers::{Onlookers, in_time},
};
use leasehold::Leases;
use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};
use tokio::runtime::{Builder, Runtime};

/// How long a call that waits is followed.
pub const FOLLOWED: Duration = Duration::from_millis(1300);

pub fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

pub struct Run {
    pub key: String,
    pub onlookers: Onlookers,
    pub driven: Driven,
    pub settle: Box<dyn FnOnce(End, usize) -> Step>,
}

impl Run {
    /// Puts the call on a runtime that ends when the call has been polled so often.
    pub async fn ends_with_its_runtime(&mut self, cut: Cut) -> End {
        let Some(mut call) = self.driven.take() else { return self.driven.end() };
        let (polls, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counted, finished) = (polls.clone(), done.clone());
        let counting: Calling = Box::pin(poll_fn(move |context| {
            if counted.load(SeqCst) >= cut.polls {
                // Woken, and never polled again.
                return Poll::Pending;
            }
            counted.fetch_add(1, SeqCst);
            let polled = call.as_mut().poll(context);
            finished.fetch_add(usize::from(polled.is_ready()), SeqCst);
            polled
        }));
        let (ended, end) = tokio::sync::oneshot::channel();
        let (polls_there, done_there) = (polls.clone(), done.clone());
        let thread = std::thread::spawn(move || {
            let runtime = runtime();
            let panicked = runtime.block_on(async {
                let task = tokio::spawn(counting);
                let all = async {
                    while polls_there.load(SeqCst) < cut.polls && done_there.load(SeqCst) == 0 && !task.is_finished() {
                        tokio::task::yield_now().await;
                        tokio::time::sleep(Duration::from_micros(200)).await;
                    }
                };
                _ = tokio::time::timeout(FOLLOWED, all).await;
                task.is_finished() && done_there.load(SeqCst) == 0
            });
            drop(runtime);
            _ = ended.send(panicked);
        });
        let panicked = end.await.unwrap_or(true);
        thread.join().unwrap();
        let end = match done.load(SeqCst) {
            0 if panicked => End::Panicked,
            0 => End::Dropped,
            _ => End::Done,
        };
        self.driven.ended_as(end, polls.load(SeqCst));
        end
    }

    /// Nothing is left, nobody is harmed.
    pub async fn judge(self, look: &Look, caller: &Leases, patience: Duration, end: End) -> Result<(), String> {
        let Run { key, onlookers, driven, settle } = self;
        onlookers.call_is_over();
        in_time("the caller", patience, settle(end, driven.polls)).await??;
        look.nothing_left(&key, patience).await?;
        onlookers.are_served(look, patience).await?;
        look.nothing_left(&key, patience).await?;
        look.nothing_of_anybody(&key, patience).await?;
        // As good as before, for the caller too.
        let again = caller.lease(&key).wait(patience).acquire().await.map_err(|e| format!("the same key: {e}"))?;
        again.release().await.map_err(|error| format!("the same key: {error}"))?;
        look.nothing_of_anybody(&key, patience).await
    }
}
