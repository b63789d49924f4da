//! What the work writes to: a server on a Unix socket, outside of Redis, that compares fences and refuses the older one.
use super::notes::now;
use std::{
    collections::BTreeMap,
    io::{Read, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// A write, in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    pub key: u64,
    pub fence: u64,
    pub at: u64,
    pub accepted: bool,
}

pub struct Resource {
    path: PathBuf,
    state: Arc<State>,
    thread: Option<thread::JoinHandle<()>>,
}

struct State {
    /// Planted: one that lets everything through when it is false.
    compares: bool,
    writes: Mutex<Vec<Write>>,
    newest: Mutex<BTreeMap<u64, u64>>,
    over: AtomicBool,
}

impl Resource {
    pub fn open(dir: &Path, compares: bool) -> Resource {
        let path = dir.join("resource");
        let listener = UnixListener::bind(&path).unwrap();
        let (writes, newest, over) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        let state = Arc::new(State { compares, writes, newest, over });
        let shared = state.clone();
        let thread = thread::spawn(move || {
            for caller in listener.incoming() {
                if shared.over.load(Ordering::Acquire) {
                    return;
                }
                let (state, caller) = (shared.clone(), caller.unwrap());
                // Ends with its caller.
                thread::spawn(move || state.serve(caller));
            }
        });
        Resource { path, state, thread: Some(thread) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
    pub fn writes(&self) -> Vec<Write> {
        self.state.writes.lock().unwrap().clone()
    }
}

impl State {
    fn serve(&self, mut caller: UnixStream) {
        let mut words = [0; 16];
        // A caller that is killed ends it.
        while caller.read_exact(&mut words).is_ok() {
            let [key, fence] = [0, 8].map(|at| u64::from_le_bytes(words[at..at + 8].try_into().unwrap()));
            if caller.write_all(&[u8::from(self.write(key, fence))]).is_err() {
                return;
            }
        }
    }

    /// The comparison, the write and its note are one step.
    fn write(&self, key: u64, fence: u64) -> bool {
        let mut all = self.newest.lock().unwrap();
        let newest = all.entry(key).or_default();
        let accepted = fence >= *newest || !self.compares;
        *newest = fence.max(*newest);
        self.writes.lock().unwrap().push(Write { key, fence, at: now(), accepted });
        accepted
    }
}

impl Drop for Resource {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::Release);
        // Wakes the listener.
        if UnixStream::connect(&self.path).is_ok()
            && let Some(thread) = self.thread.take()
        {
            thread.join().ok();
        }
    }
}

/// A worker's side of it. Blocks, as a write to a file would.
pub struct Desk(UnixStream);

impl Desk {
    pub fn at(path: &Path) -> Desk {
        Desk(UnixStream::connect(path).unwrap())
    }

    /// Whether it was accepted.
    pub fn write(&self, key: u64, fence: u64) -> bool {
        let (mut stream, mut answer) = (&self.0, [0]);
        stream.write_all(&[key.to_le_bytes(), fence.to_le_bytes()].concat()).unwrap();
        stream.read_exact(&mut answer).unwrap();
        answer == [1]
    }
}
