//! Where workers run: in threads or in processes.
use crate::{TTL, Worker, report};
use leasehold::{Leases, store::MemoryStore};
use std::{
    fmt,
    sync::{Arc, mpsc},
    time::{Duration, SystemTime},
};

/// Where the leases are.
#[derive(Clone)]
pub(super) enum Place {
    Embedded(Arc<MemoryStore>),
    Redis(String),
}

impl Place {
    pub(super) fn embedded() -> Place {
        Place::Embedded(Arc::new(MemoryStore::new()))
    }

    pub(super) async fn leases(&self, label: &str) -> leasehold::Result<Leases> {
        let leases = Leases::builder().label(label).ttl(TTL);
        match self {
            Place::Embedded(store) => Ok(leases.build(store.clone())?),
            Place::Redis(url) => leases.connect(url).await,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Embedded(_) => {
                f.write_str("Leases are in this process, each worker is a thread. With REDIS_URL: processes.")
            }
            Place::Redis(_) => f.write_str("Leases are on the Redis of REDIS_URL, each worker is a process."),
        }
    }
}

/// A worker on its way. To stop it is to stop everything it has, its watchdog too: all of a process, or the one thread
/// that its runtime has.
pub(super) enum Running {
    Thread(Option<std::thread::JoinHandle<anyhow::Result<()>>>, mpsc::Sender<()>),
    Process(std::process::Child),
}

impl Running {
    pub(super) fn start(
        place: &Place,
        start: SystemTime,
        name: &str,
        patience: Duration,
        stalls: bool,
    ) -> anyhow::Result<Running> {
        match place {
            Place::Embedded(_) => {
                let (wake, woken) = mpsc::channel();
                let (place, name) = (place.clone(), name.to_owned());
                let stop = move || {
                    // Fails when nobody is left to wake it: then it goes on, too.
                    let _ = woken.recv();
                };
                let thread = std::thread::spawn(move || work(place, start, name, patience, stalls.then_some(stop)));
                Ok(Running::Thread(Some(thread), wake))
            }
            Place::Redis(_) => {
                let since = start.duration_since(SystemTime::UNIX_EPOCH)?.as_micros();
                let mut command = std::process::Command::new(std::env::current_exe()?);
                command.args([name, &since.to_string(), &patience.as_millis().to_string(), &stalls.to_string()]);
                Ok(Running::Process(command.spawn()?))
            }
        }
    }

    pub(super) fn wake(&mut self) -> anyhow::Result<()> {
        match self {
            Running::Thread(_, wake) => Ok(wake.send(())?),
            Running::Process(child) => signals::go_on(child),
        }
    }

    pub(super) fn finish(mut self) -> anyhow::Result<()> {
        match &mut self {
            Running::Thread(thread, _) => match thread.take().map(std::thread::JoinHandle::join) {
                Some(Ok(ended)) => ended,
                Some(Err(_)) => anyhow::bail!("a worker panicked"),
                None => Ok(()),
            },
            Running::Process(child) => {
                let status = child.wait()?;
                anyhow::ensure!(status.success(), "a worker failed: {status}");
                Ok(())
            }
        }
    }
}

/// When the story breaks off, no stopped process is left behind.
impl Drop for Running {
    fn drop(&mut self) {
        if let Running::Process(child) = self {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The life of a worker that is a process.
pub(super) fn as_process() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, name, since, patience, stalls] = &args[..] else {
        anyhow::bail!("takes no arguments; set REDIS_URL to use a Redis");
    };
    let start = SystemTime::UNIX_EPOCH + Duration::from_micros(since.parse()?);
    let stop = stalls.parse::<bool>()?.then_some(signals::stop_myself);
    work(Place::Redis(std::env::var("REDIS_URL")?), start, name.clone(), Duration::from_millis(patience.parse()?), stop)
}

fn work(
    place: Place,
    start: SystemTime,
    name: String,
    patience: Duration,
    stop: Option<impl Fn()>,
) -> anyhow::Result<()> {
    let orders = report::orders()?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let worker = Worker { leases: place.leases(&name).await?, orders, name, start };
        worker
            .come(patience, |worker| {
                if let Some(stop) = &stop {
                    worker.says("is stopped, with half of the orders read; so is its watchdog");
                    stop();
                    worker.says("goes on, and does not know yet what has happened");
                }
            })
            .await
    })
}

#[cfg(unix)]
mod signals {
    use rustix::process::{Pid, Signal, getpid, kill_process};

    pub(super) fn stop_myself() {
        if let Err(error) = kill_process(getpid(), Signal::STOP) {
            println!("cannot be stopped: {error}");
        }
    }
    pub(super) fn go_on(child: &std::process::Child) -> anyhow::Result<()> {
        Ok(kill_process(Pid::from_child(child), Signal::CONT)?)
    }
}
#[cfg(not(unix))]
mod signals {
    /// Where processes can't be stopped: the thread of the runtime at least.
    pub(super) fn stop_myself() {
        std::thread::sleep(4 * crate::TTL);
    }
    pub(super) fn go_on(_: &std::process::Child) -> anyhow::Result<()> {
        Ok(())
    }
}
