//! Whether the server answers, asked all the time.
use super::{
    GAP,
    notes::{Trouble, now},
    support::{PATIENCE, server::Connection},
};
use std::{
    net::{Ipv4Addr, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// Notes when the server, or this process, was not there for a while.
pub struct Pulse {
    gaps: Arc<Mutex<Vec<Trouble>>>,
    over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Pulse {
    pub fn of(port: u16) -> Pulse {
        let (gaps, over) = (Arc::<Mutex<Vec<Trouble>>>::default(), Arc::new(AtomicBool::new(false)));
        let (noted, ends) = (gaps.clone(), over.clone());
        let thread = thread::spawn(move || {
            let mut connection: Option<Connection> = None;
            let mut from = now();
            while !ends.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(10));
                if connection.is_none() {
                    let stream = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), PATIENCE);
                    connection = stream.and_then(Connection::over).ok();
                }
                // An error, such as `LOADING`, is no answer.
                if connection.as_mut().is_some_and(|side| side.try_cmd(&["PING"]).is_ok()) {
                    let until = now();
                    if until - from > GAP.as_nanos().try_into().unwrap() {
                        noted.lock().unwrap().push(Trouble { worker: None, from, until });
                    }
                    from = until;
                } else {
                    connection = None;
                }
            }
        });
        Pulse { gaps, over, thread: Some(thread) }
    }

    pub fn gaps(&self) -> Vec<Trouble> {
        self.gaps.lock().unwrap().clone()
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A server that a panic left stopped is killed after this, and answers nothing until then.
            if !thread::panicking() {
                thread.join().ok();
            }
        }
    }
}
