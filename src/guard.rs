//! The future that is never polled past validity.
use crate::{Result, tenure::Tenure};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};
use tokio::{
    sync::futures::OwnedNotified,
    time::{Instant, Sleep, sleep_until},
};

pin_project! {
    /// Work under a lease; made by [`LeaseView::guard`](crate::LeaseView::guard).
    ///
    /// It reads the clock before each poll of the work. Once ownership isn't certain any more, the work is dropped
    /// instead of polled, and the result is [`Error::Lost`](crate::Error::Lost); so a process that was stopped or
    /// suspended past the end of its lease does not run one more step of stale work when it wakes. A result that comes
    /// from a poll which overran validity is reported as loss too.
    ///
    /// What cannot be dropped isn't stopped: threads, `spawn_blocking` and spawned tasks have to look at the lease
    /// themselves. Needs a tokio runtime with its timer on.
    #[must_use = "futures do nothing unless you `.await` or poll them"]
    pub struct Guard<F> {
        // Emptied the moment the lease isn't certain, so that work ends before the release is sent.
        #[pin]
        work: Option<F>,
        tenure: Arc<Tenure>,
        #[pin]
        alarm: Alarm,
    }
}

impl<F> Guard<F> {
    pub(crate) fn new(tenure: Arc<Tenure>, work: F) -> Self {
        let alarm = Alarm { ended: tenure.ended().clone().notified_owned(), timer: None, waker: None };
        Guard { work: Some(work), tenure, alarm }
    }
}

impl<F: Future> Future for Guard<F> {
    type Output = Result<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if this.tenure.is_valid() {
            this.alarm.arm(this.tenure, cx);
            // As every future does that is polled after it was ready.
            #[allow(clippy::panic)]
            let Some(work) = this.work.as_mut().as_pin_mut() else {
                panic!("`Guard` polled after it was ready");
            };
            let Poll::Ready(out) = work.poll(cx) else {
                return Poll::Pending;
            };
            this.work.set(None);
            // A poll that overran validity worked without a lease for a while; its result can't be trusted.
            if this.tenure.is_valid() {
                return Poll::Ready(Ok(out));
            }
        }
        this.work.set(None);
        match this.tenure.loss() {
            Some(lost) => Poll::Ready(Err(lost.into())),
            // Not valid is lost, so there is a loss to tell; should there be none, ask again rather than run on.
            None => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }
}

impl<F> fmt::Debug for Guard<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("key", &self.tenure.key).finish_non_exhaustive()
    }
}

pin_project! {
    /// Wakes the guard's task when something has to be done about the lease: on the watchdog's word, or by a timer of its
    /// own should the watchdog be starved. Costs nothing on a poll that neither it nor a new waker caused.
    struct Alarm {
        #[pin]
        ended: OwnedNotified,
        // Made in the first poll: `guard` may be called outside a runtime.
        #[pin]
        timer: Option<Sleep>,
        waker: Option<Waker>,
    }
}

impl Alarm {
    fn arm(self: Pin<&mut Self>, tenure: &Tenure, cx: &mut Context<'_>) {
        let mut this = self.project();
        let rang = this.timer.as_ref().as_pin_ref().is_none_or(|timer| timer.is_elapsed());
        if !rang && this.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return;
        }
        // Ready or not, the tenure says what to do.
        let _ = this.ended.poll(cx);
        if rang {
            // Renewals move the deadline while this sleeps, so it may find that it has to sleep again: once a term. A
            // suspension is noticed by the watchdog, which looks each second for all leases.
            let left = tenure.alarm_at().since(tenure.clock().now());
            this.timer.set(Some(sleep_until(Instant::now() + left)));
        }
        if let Some(timer) = this.timer.as_mut().as_pin_mut() {
            let _ = timer.poll(cx);
        }
        *this.waker = Some(cx.waker().clone());
    }
}
