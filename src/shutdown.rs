//! The end of everything, in order.
use crate::{
    engine::Engine,
    error::{LossReason, Lost},
};
use std::{sync::Arc, time::Duration};

impl Engine {
    /// Ends everything; see [`Leases::shutdown`](crate::Leases::shutdown). `patience` is for what the store is asked at the
    /// end.
    pub(crate) async fn shut_down(self: &Arc<Self>, patience: Duration) {
        self.closing.cancel();
        // The runtime that the watchdog lived on may have ended, and somebody has to send the releases.
        if let Err(error) = self.watched() {
            tracing::warn!(%error, "nothing can be released here");
            return;
        }
        // A task of its own, which goes on when this future is dropped.
        let ending = self.host.run(self.clone().wind_down(patience));
        if let Err(error) = ending.await {
            tracing::warn!(%error, "the shutdown was cut short; the TTLs will free the keys");
        }
    }

    async fn wind_down(self: Arc<Self>, mut patience: Duration) {
        let tenures = self.schedule.all();
        let now = self.clock.now();
        for tenure in &tenures {
            tenure.cap(now.after(tenure.plan.grace), LossReason::Shutdown);
        }
        for tenure in &tenures {
            patience = patience.max(tenure.plan.attempt * 4 + self.slack);
            let Lost { reason, .. } = tenure.over().await;
            // Its handle may never be dropped. A release by the handle is under way, and waited for below.
            if reason != LossReason::Released && tenure.leaves_something(&reason) {
                tenure.bid_farewell();
            }
        }
        drop(tenures);
        if tokio::time::timeout(patience, self.partings.over()).await.is_err() {
            tracing::warn!("shut down, but not every release was confirmed; the TTLs will free the keys");
        }
    }
}
