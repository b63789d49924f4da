//! A call that can be made again and again, and all that belongs to it.
use super::{
    cut::End,
    look::{CALLER, Look},
    onlookers::Others,
    support::{PATIENCE, proxy::Proxy},
};
use futures_util::FutureExt;
use leasehold::{Lease, LeaseRequest, Leases};
use std::{
    fmt::Display,
    future::Future,
    pin::Pin,
    rc::Rc,
    time::{Duration, Instant},
};

pub type Calling = Pin<Box<dyn Future<Output = ()> + Send>>;
pub type Step = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// What a call is made with.
#[derive(Clone)]
pub struct Cast {
    /// Those of the caller.
    pub leases: Leases,
    pub url: String,
    /// Of three servers, the first of which is that one.
    pub quorum: [String; 3],
    pub key: String,
    /// Somebody else's.
    pub others: Leases,
    pub look: Rc<Look>,
    pub proxy: Rc<Proxy>,
}

/// A call that is about to be made.
pub struct Ready {
    pub call: Calling,
    /// Once the call is over and the server answers: what it has to have left behind as it was, and giving back what the
    /// caller still has by right.
    pub settle: Box<dyn FnOnce(End, usize) -> Step>,
}

pub struct Call {
    /// As the source names it.
    pub of: &'static str,
    pub when: &'static str,
    pub others: Others,
    /// So often at least it is polled before it is done.
    pub awaits: usize,
    /// Also tried with the watchdog on the caller's own runtime.
    pub at_home: bool,
    pub prepare: fn(Cast) -> Pin<Box<dyn Future<Output = Ready>>>,
}

/// How long one exchange may take: a claim without an answer is released again after four of these.
pub const ATTEMPT: Duration = Duration::from_millis(150);

/// A short wait, that ends without the key.
pub const SHORT: Duration = Duration::from_millis(300);

impl Cast {
    pub fn request(&self) -> LeaseRequest {
        self.leases.lease(&self.key).wait(PATIENCE)
    }

    pub async fn lease(&self) -> Lease {
        self.request().acquire().await.unwrap()
    }

    /// A `Leases` of the caller's for one call alone.
    pub async fn leases_of_its_own(&self) -> Leases {
        let builder = Leases::builder().label(CALLER).attempt(ATTEMPT).grace(Duration::from_millis(50));
        connected(|| builder.clone().connect(&self.url)).await
    }
}

/// On a machine that is busy a connection may take longer than it may take.
pub async fn connected<T, E: Display>(mut connect: impl AsyncFnMut() -> Result<T, E>) -> T {
    let start = Instant::now();
    loop {
        match connect().await {
            Ok(connected) => return connected,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
    }
}

pub fn call<T: 'static>(future: impl Future<Output = T> + Send + 'static) -> Calling {
    // Nothing is kept beside the future: what is dropped is the call and nothing else.
    Box::pin(future.map(drop))
}

/// A call that leaves nothing that would have to be settled.
pub fn alone<T: 'static>(future: impl Future<Output = T> + Send + 'static) -> Ready {
    Ready { call: call(future), settle: Box::new(|_, _| Box::pin(async { Ok(()) })) }
}

pub fn so(so: bool, else_: &str) -> Result<(), String> {
    if so { Ok(()) } else { Err(else_.to_owned()) }
}
