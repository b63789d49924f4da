//! A worker process: what it is told, its beginning and its end.
use super::{
    TTL,
    hand::{Hand, Log},
    support::{self, child},
};
use leasehold::{Error, Leases};
use std::{path::PathBuf, sync::Arc, thread, time::Duration};
use tokio::task::JoinSet;

/// What a worker is told.
#[derive(Clone, Debug)]
pub struct Orders {
    pub url: String,
    pub resource: PathBuf,
    pub log: PathBuf,
    /// It ends when this file is there.
    pub end: PathBuf,
    pub keys: u64,
    pub threads: usize,
    /// Planted: one that takes a lease once, and then works without a look at it.
    pub careless: bool,
}

impl Orders {
    /// A line, for [`child::told`].
    pub fn line(&self) -> String {
        let Orders { url, resource, log, end, keys, threads, careless } = self;
        format!("{url} {} {} {} {keys} {threads} {careless}", resource.display(), log.display(), end.display())
    }
    fn read(line: &str) -> Orders {
        let words: Vec<_> = line.split(' ').collect();
        let [url, resource, log, end, keys, threads, careless] = words[..] else { panic!("orders? {line}") };
        Orders {
            url: url.into(),
            resource: resource.into(),
            log: log.into(),
            end: end.into(),
            keys: keys.parse().unwrap(),
            threads: threads.parse().unwrap(),
            careless: careless.parse().unwrap(),
        }
    }
}

/// Does what it is told, if this process is a worker.
pub fn works() -> bool {
    let Some(told) = child::told() else { return false };
    // Whatever ends the test ends its workers, also when nothing unwinds.
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).unwrap();
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        child::says(format_args!("panicked: {info}"));
        usual(info);
    }));
    let orders = Orders::read(&told);
    let mut builder = match orders.threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if orders.threads > 1 {
        builder.worker_threads(orders.threads);
    }
    builder.enable_all().build().unwrap().block_on(work(orders));
    child::says("done");
    true
}

const LOOK: Duration = Duration::from_millis(20);

async fn work(orders: Orders) {
    let log = Arc::new(Log::create(&orders.log));
    let pulse = log.clone();
    thread::spawn(move || pulse.look_for_gaps());
    let leases = support::within("a connection", async {
        loop {
            match Leases::builder().ttl(TTL).label(format!("{}", std::process::id())).connect(&orders.url).await {
                Ok(leases) => return leases,
                Err(error) if may_pass(&error) => tokio::time::sleep(LOOK).await,
                Err(error) => panic!("{error}"),
            }
        }
    })
    .await;
    let (mut tasks, mut hands) = (JoinSet::new(), Vec::new());
    for key in 0..orders.keys {
        let (leases, log) = (leases.clone(), log.clone());
        let hand = Arc::new(Hand::new(leases, log, key, &orders.resource));
        hands.push(hand.clone());
        if orders.careless {
            tasks.spawn(hand.carelessly());
        } else {
            tasks.spawn(hand.rounds());
        }
    }
    while !orders.end.exists() {
        tokio::select! {
            ended = tasks.join_next() => panic!("a task ended: {ended:?}"),
            () = tokio::time::sleep(LOOK) => {}
        }
    }
    // They are dropped wherever they are, but for what blocks a thread.
    log.end();
    tasks.shutdown().await;
    support::until("no thread works", || hands.iter().all(|hand| Arc::strong_count(hand) == 1)).await;
    leases.shutdown().await;
}

pub fn may_pass(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if source.may_pass())
}
