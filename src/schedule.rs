//! When something is due for which lease: one entry a lease, what comes first.
//!
//! An ordered map under a plain mutex, rather than a timer a lease: it takes any clock, needs no runtime to put something
//! in, and is cheap at a hundred thousand leases.
use crate::{
    Key,
    clock::{LOOK, Moment},
    tenure::Tenure,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::{sync::Notify, time::Instant};

#[derive(Default)]
pub(crate) struct Schedule {
    entries: Mutex<Entries>,
    ids: AtomicU64,
}

#[derive(Default)]
struct Entries {
    due: BTreeMap<(Moment, u64), Arc<Tenure>>,
    /// When the watchdog means to look next. It is woken for what is due earlier, and for nothing else: waking a parked
    /// task costs more than all the rest.
    looks_at: Moment,
    /// When its timer goes off; none while it sleeps until it is woken. After a suspension, in which timers stand still,
    /// that is later than it means to.
    timer: Option<Instant>,
    /// Something was put in since it last looked.
    stirred: bool,
    /// Wakes it before its time. Each watchdog has its own: one that stands still would sleep through the next one's.
    wake: Arc<Notify>,
}

impl Schedule {
    pub(crate) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Moves a tenure from where it was due to where it is due now, at `now`.
    pub(crate) fn place(&self, tenure: &Arc<Tenure>, from: Option<Moment>, to: Option<Moment>, now: Moment) {
        let mut entries = self.lock();
        if let Some(from) = from {
            entries.due.remove(&(from, tenure.id));
        }
        let Some(to) = to else { return };
        entries.due.insert((to, tenure.id), tenure.clone());
        entries.stirred = true;
        let here = Instant::now();
        let looks_at = entries.timer.map_or(Moment::NEVER, |timer| now.after(timer.saturating_duration_since(here)));
        if to < entries.looks_at || to < looks_at {
            entries.looks_at = entries.looks_at.min(to);
            entries.timer = Some(here);
            let wake = entries.wake.clone();
            drop(entries);
            wake.notify_one();
        }
    }

    /// Everything that is due by `horizon`. It stays where it is until its tenure moves it, so that no lease is ever
    /// missing for whoever looks at all of them.
    pub(crate) fn due(&self, horizon: Moment) -> Vec<Arc<Tenure>> {
        self.lock().due.range(..=(horizon, u64::MAX)).map(|(_, tenure)| tenure.clone()).collect()
    }

    /// The watchdog looked at `now`, and says when it will look next: when something is due, or a second later.
    pub(crate) fn look_at(&self, now: Moment) -> Moment {
        let mut entries = self.lock();
        let first = entries.due.first_key_value().map_or(Moment::NEVER, |((at, _), _)| *at);
        // With nothing to watch it sleeps until it is woken; but not at once: where leases come and go one by one, each would
        // have to wake it.
        let idle = first == Moment::NEVER && !std::mem::take(&mut entries.stirred);
        entries.looks_at = if idle { first } else { first.min(now.after(LOOK)) };
        entries.timer = (!idle).then(|| Instant::now() + entries.looks_at.since(now));
        entries.looks_at
    }

    pub(crate) fn looks_at(&self) -> Moment {
        self.lock().looks_at
    }

    pub(crate) fn all(&self) -> Vec<Arc<Tenure>> {
        self.lock().due.values().cloned().collect()
    }

    /// The tenure of `key` under `fence`. Looks at all of them: it is for what happens once in a while.
    pub(crate) fn find(&self, key: &Key, fence: u64) -> Option<Arc<Tenure>> {
        self.lock().due.values().find(|tenure| tenure.fence == fence && tenure.key == *key).cloned()
    }

    pub(crate) fn wake(&self) {
        let wake = self.lock().wake.clone();
        wake.notify_one();
    }

    /// What wakes the watchdog that calls this, and no other any more.
    pub(crate) fn take_over(&self) -> Arc<Notify> {
        let wake = Arc::<Notify>::default();
        self.lock().wake = wake.clone();
        wake
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // A map that a panic interrupted is still a map; each tenure checks its own state when it comes up.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Moment {
    fn default() -> Self {
        Moment::NEVER
    }
}
