//! Where the watchdog lives.
use crate::{
    engine::Engine,
    error::{Error, Result, StoreError},
    watchdog,
};
use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
    task::JoinHandle,
};

/// Where the watchdog lives, and who looks that it does.
pub(crate) struct Host {
    place: Place,
    running: Mutex<Running>,
    /// The process that made it. A forked child has no threads of its parent's, and must not use its sockets.
    process: u32,
}

enum Place {
    /// A thread of our own: a runtime that user code blocks doesn't cost a lease. It ends with the sender.
    Own { handle: Handle, _stop: oneshot::Sender<()> },
    /// Whichever runtime acquires. It may end while the `Leases` lives on, in a `static` for one.
    Callers,
}

#[derive(Default)]
struct Running {
    task: Option<JoinHandle<()>>,
    /// A watchdog of an earlier generation that comes to life again leaves at once.
    generation: u64,
}

/// How late the watchdog may be before another is set in its place.
const STALE: Duration = Duration::from_secs(2);

impl Host {
    pub(crate) fn callers() -> Host {
        Host::at(Place::Callers)
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// When the operating system gives no thread or no timer.
    pub(crate) fn own() -> Result<Host, StoreError> {
        let failed = |e| StoreError::unavailable("could not start leasehold's own thread").with_source(e);
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        thread::Builder::new()
            .name("leasehold".into())
            .spawn(move || {
                // Ends when the sender is dropped, which is an error to the receiver.
                let _ = runtime.block_on(stopped);
                runtime.shutdown_timeout(Duration::ZERO);
            })
            .map_err(failed)?;
        Ok(Host::at(Place::Own { handle, _stop: stop }))
    }

    fn at(place: Place) -> Host {
        Host { place, running: Mutex::default(), process: std::process::id() }
    }

    /// Runs something on the watchdog's runtime, so that what it spawns lives there.
    ///
    /// # Errors
    /// When it panicked, or the thread is gone.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let running = match &self.place {
            Place::Own { handle, .. } => handle.spawn(task),
            Place::Callers => tokio::spawn(task),
        };
        running.await.map_err(|end| StoreError::unavailable("leasehold's own thread ended").with_source(end))
    }

    /// Sees that a watchdog runs: it starts the first, and another when the runtime of the last has ended or stands
    /// still.
    ///
    /// # Errors
    /// In a forked child.
    pub(crate) fn ensure_watched(&self, engine: &Arc<Engine>) -> Result<()> {
        if std::process::id() != self.process {
            let forked =
                StoreError::unavailable("this `Leases` was made before the process forked; make one in the child");
            return Err(Error::Store { attempted: "acquire", key: None, source: forked });
        }
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let stands_still = engine.clock.now().since(engine.schedule.looks_at()) > STALE;
        let alive = running.task.as_ref().is_some_and(|task| !task.is_finished());
        if alive && !stands_still {
            return Ok(());
        }
        running.generation += 1;
        let watch = watchdog::supervise(engine.clone(), running.generation);
        running.task = Some(match &self.place {
            Place::Own { handle, .. } => handle.spawn(watch),
            Place::Callers => tokio::spawn(watch),
        });
        Ok(())
    }

    pub(crate) fn generation(&self) -> u64 {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).generation
    }
}
