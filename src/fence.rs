//! The other half of a fence: the resource that refuses the older one.
use crate::error::Stale;
use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A value in this process that only the newest owner may change.
///
/// A lease ends by the clock, and no clock can stop a write that is already on its way: a process may be stopped
/// between the moment it checks its lease and the moment it writes. leasehold makes that window small. Only the
/// resource can close it, by refusing a fence smaller than one it has seen (Martin Kleppmann, "How to do distributed
/// locking", 2016). This is such a resource. For a value in Redis there is a fenced write; in a database, compare in
/// the statement that writes.
///
/// ```
/// use leasehold::Fenced;
///
/// let report = Fenced::new(String::new());
/// report.write(33, |text| text.push_str("first half"))?;
/// // Fence 33 is stopped for longer than its lease. Its successor writes:
/// report.write(34, |text| *text = "all of it".to_owned())?;
/// // Now 33 wakes, and does not know yet that it has lost.
/// let stale = report.write(33, |text| text.push_str(", second half")).unwrap_err();
/// assert_eq!((stale.fence, stale.newest), (33, 34));
/// assert_eq!(report.read(String::clone), "all of it");
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// The check and the write are one step under a mutex that blocks its thread, so keep the closures short, and do not
/// use the same `Fenced` within them: that would wait for itself. To await while writing, put a [`Gate`] beside the
/// value in a `tokio::sync::Mutex`.
///
/// It is not poisoned by a panic. A write that panics counts as a write: its fence is the newest, the value stays as
/// the panic left it, and others go on, since the next owner is the one who can put it right.
#[derive(Default)]
pub struct Fenced<T> {
    inner: Mutex<Inner<T>>,
}

#[derive(Default)]
struct Inner<T> {
    gate: Gate,
    value: T,
}

impl<T> Fenced<T> {
    /// A value that nobody has written yet.
    pub fn new(value: T) -> Self {
        Self::with_gate(Gate::new(), value)
    }

    /// A value with its history: what was kept of it, and [`Gate::resume`] from the fence that was kept with it.
    pub fn with_gate(gate: Gate, value: T) -> Self {
        Fenced { inner: Mutex::new(Inner { gate, value }) }
    }

    /// Changes the value, unless a newer fence has: then `write` isn't called. An owner may write as often as it likes.
    ///
    /// # Errors
    /// [`Stale`], with the newer fence. The caller's lease is over; nothing was changed.
    pub fn write<R>(&self, fence: u64, write: impl FnOnce(&mut T) -> R) -> Result<R, Stale> {
        let mut inner = self.lock();
        inner.gate.admit(fence)?;
        Ok(write(&mut inner.value))
    }

    /// Looks at the value. That needs no fence.
    pub fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.lock().value)
    }

    /// The largest fence that has written.
    pub fn newest(&self) -> Option<u64> {
        self.lock().gate.newest()
    }

    /// The value, out of its gate.
    pub fn into_inner(self) -> T {
        self.inner.into_inner().unwrap_or_else(PoisonError::into_inner).value
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: fmt::Debug> fmt::Debug for Fenced<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { gate, value } = &*self.lock();
        f.debug_struct("Fenced").field("newest", &gate.newest()).field("value", value).finish()
    }
}

/// The rule of [`Fenced`] alone, for a resource with a lock of its own: no older fence is let through after a newer.
///
/// [`admit`](Gate::admit) takes `&mut self`, so that a gate can only be shared inside that lock. Keep the lock until
/// the write is over: an admission that is acted upon after others were admitted protects nothing.
///
/// ```
/// # use leasehold::Gate;
/// # use std::io;
/// # use tokio::{io::AsyncWriteExt, sync::Mutex};
/// async fn append(journal: &Mutex<(Gate, Vec<u8>)>, fence: u64, line: &str) -> io::Result<()> {
///     let (gate, file) = &mut *journal.lock().await;
///     gate.admit(fence).map_err(io::Error::other)?;
///     file.write_all(line.as_bytes()).await
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let journal = Mutex::default();
/// assert!(append(&journal, 2, "new").await.is_ok());
/// assert!(append(&journal, 1, "old").await.is_err());
/// # }
/// ```
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Gate {
    newest: Option<u64>,
}

impl Gate {
    /// A gate that has let nobody through.
    pub const fn new() -> Self {
        Gate { newest: None }
    }

    /// A gate that goes on where another one ended: `newest` was kept with the resource.
    pub const fn resume(newest: u64) -> Self {
        Gate { newest: Some(newest) }
    }

    /// Lets `fence` through if it is as large as the largest so far, or larger.
    ///
    /// # Errors
    /// [`Stale`], with the larger fence.
    pub fn admit(&mut self, fence: u64) -> Result<(), Stale> {
        match self.newest {
            Some(newest) if newest > fence => Err(Stale::new(fence, newest)),
            _ => {
                self.newest = Some(fence);
                Ok(())
            }
        }
    }

    /// The largest fence that was let through.
    pub const fn newest(&self) -> Option<u64> {
        self.newest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        thread,
    };

    proptest! {
        #[test]
        fn no_older_fence_is_let_through_after_a_newer(fences in proptest::collection::vec(0_u64..20, 0..100)) {
            let written = Fenced::new(Vec::new());
            for (n, &fence) in fences.iter().enumerate() {
                let newest = fences[..n].iter().copied().max();
                let expected = newest.filter(|newest| *newest > fence).map(|newest| Stale::new(fence, newest));
                prop_assert_eq!(written.write(fence, |log| log.push(fence)).err(), expected);
            }
            prop_assert_eq!(written.newest(), fences.iter().copied().max());
            prop_assert!(written.into_inner().is_sorted());
        }
    }

    #[test]
    fn threads_cannot_pass_each_other_between_the_check_and_the_write() {
        let written = Fenced::new(Vec::new());
        thread::scope(|scope| {
            for start in 0..4 {
                let written = &written;
                scope.spawn(move || {
                    for fence in (start..4000).step_by(4) {
                        // Refusals are what this is about.
                        let _ = written.write(fence, |log| log.push(fence));
                    }
                });
            }
        });
        let log = written.into_inner();
        assert!(log.is_sorted(), "{log:?}");
        assert_eq!(log.last(), Some(&3999));
    }

    #[test]
    fn a_write_that_panics_counts_and_does_not_shut_the_gate() {
        let value = Fenced::new(0);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            value.write(5, |v| {
                *v = 1;
                panic!("midway");
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(value.read(|v| *v), 1);
        assert_eq!(value.write(4, |v| *v = 4), Err(Stale::new(4, 5)));
        assert_eq!(value.write(5, |v| *v = 5), Ok(()));
        assert_eq!(value.write(6, |v| *v), Ok(5));
    }

    #[test]
    fn a_gate_goes_on_where_another_ended() {
        let value = Fenced::with_gate(Gate::resume(7), "kept");
        assert_eq!(value.write(6, |_| ()), Err(Stale::new(6, 7)));
        assert_eq!(value.write(7, |v| *v = "again"), Ok(()));
        assert_eq!(format!("{value:?}"), r#"Fenced { newest: Some(7), value: "again" }"#);
    }
}
