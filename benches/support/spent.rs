//! Processor time, here and in Redis.
use crate::support::server::Server;
use std::time::Duration;

/// Processor time in seconds, or, between two of them, cores.
pub(crate) struct Spent {
    pub(crate) here: f64,
    pub(crate) redis: f64,
}

impl Spent {
    pub(crate) fn now(server: &Server) -> Spent {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let here = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
        let info = server.cmd(&["INFO", "cpu"]).text().unwrap();
        let used =
            |line: &str| -> Option<f64> { line.strip_prefix("used_cpu_")?.split_once(':')?.1.trim().parse().ok() };
        let redis = info.lines().filter(|line| !line.contains("children") && !line.contains("thread")).filter_map(used);
        Spent { here, redis: redis.sum() }
    }

    pub(crate) fn since(self, before: &Spent, time: Duration) -> Spent {
        let share = |now: f64, then: f64| (now - then) / time.as_secs_f64();
        Spent { here: share(self.here, before.here), redis: share(self.redis, before.redis) }
    }
}
