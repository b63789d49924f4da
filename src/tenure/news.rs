//! What is told of a lease: to its token, to whoever waits for its end or watches it, and to the log.
use super::Tenure;
use crate::{
    error::{LossReason, StoreError},
    lease::LeaseState,
};
use tokio::sync::watch;

/// What changed under the lock, to be told after it.
#[derive(Default)]
#[must_use]
pub(super) struct News {
    cancelled: bool,
    ended: bool,
    /// The state is another.
    state: bool,
    event: Option<Event>,
}

enum Event {
    AtRisk(StoreError),
    RenewedLate,
    /// Enough replicas have it again.
    Replicated,
    /// The work is told to stop; the reason, unless it is that no renewal came through.
    Ending(Option<LossReason>),
    Lost(LossReason),
}

impl News {
    pub(super) fn at_risk(error: StoreError) -> News {
        News { state: true, event: Some(Event::AtRisk(error)), ..News::default() }
    }

    /// The trouble is over.
    pub(super) fn renewed_after(trouble: StoreError) -> News {
        let event = match trouble {
            StoreError::Replicas { .. } => Event::Replicated,
            _ => Event::RenewedLate,
        };
        News { state: true, event: Some(event), ..News::default() }
    }

    pub(super) fn ending(reason: Option<LossReason>) -> News {
        News { cancelled: true, event: Some(Event::Ending(reason)), ..News::default() }
    }

    pub(super) fn lost(reason: LossReason) -> News {
        News { cancelled: true, ended: true, state: true, event: Some(Event::Lost(reason)) }
    }

    pub(super) fn released() -> News {
        News { cancelled: true, ended: true, state: true, event: None }
    }
}

impl Tenure {
    /// The log comes last: it may be slow, and nobody's work should go on meanwhile.
    pub(super) fn tell(&self, news: News) {
        if news.cancelled
            && let Some(token) = self.token.get()
        {
            token.cancel();
        }
        if news.ended {
            self.ended.notify_waiters();
        }
        if news.state
            && let Some(watch) = self.watch.get()
        {
            self.show(watch);
        }
        if let Some(event) = news.event {
            self.log(event);
        }
    }

    /// Shows the state as it is now, not as it was when somebody set out to show it: two of them may pass each other, and
    /// the older would be the last.
    pub(super) fn show(&self, watch: &watch::Sender<LeaseState>) {
        watch.send_if_modified(|seen| {
            let state = self.lock().shown();
            std::mem::replace(seen, state.clone()) != state
        });
    }

    fn log(&self, event: Event) {
        let (key, fence, valid_for) = (&self.key, self.fence, self.valid_for());
        match event {
            Event::AtRisk(error) => tracing::warn!(%key, fence, ?valid_for, %error, "lease at risk"),
            Event::RenewedLate => tracing::info!(%key, fence, ?valid_for, "lease renewed late"),
            Event::Replicated => tracing::info!(%key, fence, ?valid_for, "lease on enough replicas again"),
            Event::Ending(Some(reason)) => {
                tracing::info!(%key, fence, ?valid_for, %reason, "lease ending: work is told to stop");
            }
            Event::Ending(None) => tracing::warn!(%key, fence, ?valid_for, "lease ending: work is told to stop"),
            Event::Lost(reason) => tracing::warn!(%key, fence, %reason, "lease lost"),
        }
    }
}
