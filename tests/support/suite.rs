//! What leases do alike wherever they are kept. Each is called with leases on the test's own servers.
use super::{PATIENCE, within};
use leasehold::{Leases, Wait};
use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
};

/// One who was served.
struct Served {
    who: usize,
    fence: u64,
    at: Instant,
}

/// Those who wait for one key, on several `Leases` by turns, while somebody holds it. Each is alone with the key when it is
/// served, and gives it back at once.
pub struct Crowd {
    key: String,
    release: oneshot::Sender<()>,
    served: mpsc::UnboundedReceiver<Served>,
    waiting: JoinSet<()>,
}

impl Crowd {
    /// Comes one after another, each when those before it stand in line, if there is one.
    pub async fn gather(leases: &[Leases], key: &str, count: usize, line: bool) -> Crowd {
        let held = within("a lease", leases[0].lease(key).acquire()).await.unwrap();
        let (release, released) = oneshot::channel();
        let (tell, served) = mpsc::unbounded_channel();
        let busy = Arc::new(AtomicBool::new(false));
        let mut waiting = JoinSet::new();
        for who in 0..count {
            let request = leases[who % leases.len()].lease(key).wait(Wait::Forever);
            let (tell, busy) = (tell.clone(), busy.clone());
            waiting.spawn(async move {
                let lease = request.acquire().await.unwrap();
                assert!(!busy.swap(true, Ordering::SeqCst), "somebody else has it");
                tell.send(Served { who, fence: lease.fence(), at: Instant::now() }).unwrap();
                busy.store(false, Ordering::SeqCst);
                lease.release().await.unwrap();
            });
            if line {
                let stand = async || leases[0].inspect(key).await.unwrap().unwrap().waiters == who as u64 + 1;
                until_so("they stand in line", stand).await;
            }
        }
        waiting.spawn(async move {
            // Without a word, the test has failed.
            if released.await.is_ok() {
                held.release().await.unwrap();
            }
        });
        Crowd { key: key.to_owned(), release, served, waiting }
    }

    /// The key is given back, and everybody is served: who, in their order, and how long each hand-over took.
    pub async fn served(mut self, leases: &Leases) -> (Vec<usize>, Vec<Duration>) {
        let (mut last, mut fence) = (Instant::now(), 0);
        let (mut order, mut took) = (vec![], vec![]);
        self.release.send(()).unwrap();
        for _ in 1..self.waiting.len() {
            let served = within("the next is served", self.served.recv()).await.unwrap();
            assert!(served.fence > fence, "{} after {fence}", served.fence);
            fence = served.fence;
            took.push(served.at - last);
            last = served.at;
            order.push(served.who);
        }
        while let Some(done) = self.waiting.join_next().await {
            done.unwrap();
        }
        until_so("the key is free", async || leases.inspect(&*self.key).await.unwrap().is_none()).await;
        (order, took)
    }
}

/// As [`until`](super::until), for what has to be asked.
pub async fn until_so<F: Future<Output = bool>>(what: &str, mut event: impl FnMut() -> F) {
    let start = Instant::now();
    while !event().await {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// They are served in the order in which they came, and told that it is their turn: several hand-overs take no poll, however
/// busy the machine.
pub async fn serves_in_order(leases: &[Leases], key: &str) {
    let (order, mut took) = Crowd::gather(leases, key, 8, true).await.served(&leases[0]).await;
    assert_eq!(order, (0..8).collect::<Vec<_>>());
    took.sort();
    println!("told: {took:?}");
    assert!(took[3] < Duration::from_millis(100), "{took:?}");
}

/// They are served in the order in which they came though nobody is told: each hand-over takes a poll at most.
pub async fn serves_in_order_untold(leases: &[Leases], key: &str, poll: Duration) {
    let (order, took) = Crowd::gather(leases, key, 8, true).await.served(&leases[0]).await;
    assert_eq!(order, (0..8).collect::<Vec<_>>());
    println!("untold: {took:?}");
    assert!(took.iter().all(|took| *took < 2 * poll), "{took:?}");
}

/// Where there is no line: they are served all the same, one at a time, and nobody waits for a TTL to end.
pub async fn serves_everybody(leases: &[Leases], key: &str, ttl: Duration) {
    let (mut order, took) = Crowd::gather(leases, key, 8, false).await.served(&leases[0]).await;
    order.sort_unstable();
    assert_eq!(order, (0..8).collect::<Vec<_>>());
    println!("without a line: {took:?}");
    assert!(took.iter().all(|took| *took < ttl * 3 / 4), "{took:?}");
}
