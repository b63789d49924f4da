//! leasehold's own threads, one for each `Leases` (Linux).
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Some of them.
pub(crate) struct Threads(Vec<PathBuf>);

impl Threads {
    /// Those that run now.
    pub(crate) fn running() -> Threads {
        let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten().map(|task| task.path());
        Threads(
            tasks
                .filter(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "leasehold\n"))
                .collect(),
        )
    }

    /// Seconds of processor time that they have had.
    pub(crate) fn spent(&self) -> f64 {
        let nanos = |task: &Path| -> Option<f64> {
            fs::read_to_string(task.join("schedstat")).ok()?.split(' ').next()?.parse().ok()
        };
        self.0.iter().filter_map(|task| nanos(task)).sum::<f64>() / 1e9
    }
}
