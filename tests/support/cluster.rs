//! A Redis Cluster of a test's own.
use super::{
    PATIENCE,
    server::{Reply, Server},
};
use leasehold::store::redis::fred::util::redis_keyslot;
use std::time::{Duration, Instant};

/// How many primaries it begins with.
pub const PRIMARIES: usize = 3;

/// How long a node may be silent before it counts as failed.
pub const NODE_TIMEOUT: Duration = Duration::from_millis(1000);

/// Three primaries with a third of the slots each, and a replica of each, if wanted, in the same order.
pub struct Cluster {
    pub nodes: Vec<Server>,
    ids: Vec<String>,
}

impl Cluster {
    /// Three primaries.
    pub fn start() -> Cluster {
        Self::of(PRIMARIES, &[])
    }

    /// Three primaries, each with a replica.
    pub fn with_replicas() -> Cluster {
        Self::of(2 * PRIMARIES, &[])
    }

    /// Returns when all nodes agree that all is well.
    pub fn of(nodes: usize, settings: &[&str]) -> Cluster {
        let timeout = NODE_TIMEOUT.as_millis().to_string();
        let all = [
            &[
                "--cluster-node-timeout",
                &timeout,
                // One shard's trouble is to be its own.
                "--cluster-require-full-coverage",
                "no",
                "--cluster-replica-validity-factor",
                "0",
                "--repl-diskless-sync-delay",
                "0",
            ],
            settings,
        ]
        .concat();
        let nodes: Vec<Server> = (0..nodes).map(|_| Server::member(&all)).collect();
        let ids = nodes.iter().map(|node| node.cmd(&["CLUSTER", "MYID"]).text().unwrap()).collect();
        let cluster = Cluster { nodes, ids };
        let share = 16384 / PRIMARIES;
        for (n, node) in cluster.nodes.iter().enumerate() {
            node.cmd(&["CLUSTER", "SET-CONFIG-EPOCH", &(n + 1).to_string()]);
            if n < PRIMARIES {
                let last = if n + 1 == PRIMARIES { 16383 } else { (n + 1) * share - 1 };
                node.cmd(&["CLUSTER", "ADDSLOTSRANGE", &(n * share).to_string(), &last.to_string()]);
            }
            cluster.meet(n);
        }
        let known = cluster.nodes.len().to_string();
        cluster.wait("everybody to know everybody", |node| info(node, "cluster_known_nodes") == known);
        for n in PRIMARIES..2 * PRIMARIES {
            if let Some(node) = cluster.nodes.get(n) {
                node.cmd(&["CLUSTER", "REPLICATE", &cluster.ids[n - PRIMARIES]]);
            }
        }
        cluster.wait("all slots to be served", |node| {
            info(node, "cluster_state") == "ok" && info(node, "cluster_slots_ok") == "16384"
        });
        let replicas = cluster.nodes.len().saturating_sub(PRIMARIES).min(PRIMARIES);
        cluster.wait("the replicas to follow", |node| {
            let role = node.cmd(&["ROLE"]).list();
            let nodes = node.cmd(&["CLUSTER", "NODES"]).text().unwrap();
            let followers = nodes.lines().filter(|line| line.contains("slave")).count();
            followers == replicas
                && (role[0].text().as_deref() != Some("slave") || role[3].text().as_deref() == Some("connected"))
        });
        cluster
    }

    /// Introduces a node to the first.
    fn meet(&self, node: usize) {
        let first = &self.nodes[0];
        let (port, bus) = (first.port().to_string(), first.setting("--cluster-port"));
        if node > 0 {
            self.nodes[node].cmd(&["CLUSTER", "MEET", "127.0.0.1", &port, bus]);
        }
    }

    fn wait(&self, what: &str, mut event: impl FnMut(&Server) -> bool) {
        let start = Instant::now();
        while !self.nodes.iter().all(&mut event) {
            assert!(start.elapsed() < PATIENCE * 2, "waited in vain: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `redis-cluster://`, naming the first node.
    pub fn url(&self) -> String {
        self.url_of(&[self.nodes[0].port()])
    }

    /// `redis-cluster://`, naming nodes on these ports.
    pub fn url_of(&self, ports: &[u16]) -> String {
        let others: Vec<String> = ports[1..].iter().map(|port| format!("node=127.0.0.1:{port}")).collect();
        let others = if others.is_empty() { String::new() } else { format!("?{}", others.join("&")) };
        format!("redis-cluster://127.0.0.1:{}{others}", ports[0])
    }

    /// A key that this node keeps at first, whose name begins so.
    pub fn key_on(&self, node: usize, name: &str) -> String {
        let share = 16384 / PRIMARIES;
        let on = |key: &String| (usize::from(slot(key)) / share).min(PRIMARIES - 1) == node;
        (0..).map(|n| format!("{name}:{n}")).find(on).unwrap()
    }

    /// The port of the primary that keeps a key, in the eyes of this node.
    pub fn primary_of(&self, key: &str, asked: usize) -> u16 {
        let slot = i64::from(slot(key));
        let ranges = look(&self.nodes[asked], &["CLUSTER", "SLOTS"]).list();
        let range = ranges.into_iter().map(Reply::list).find(|range| range[0].int() <= slot && slot <= range[1].int());
        u16::try_from(range.unwrap()[2].clone().list()[1].int()).unwrap()
    }

    /// The node on that port.
    pub fn on(&self, port: u16) -> &Server {
        self.nodes.iter().find(|node| node.port() == port).unwrap()
    }

    /// Waits until this node sees another primary for a key than the one on that port.
    pub async fn failed_over(&self, key: &str, from: u16, asked: usize) {
        let start = Instant::now();
        while self.primary_of(key, asked) == from {
            assert!(start.elapsed() < PATIENCE, "no failover");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Has a node say that it is on another port, and waits until all say so.
    pub fn announce(&self, node: usize, port: u16) {
        self.nodes[node].cmd(&["CONFIG", "SET", "cluster-announce-port", &port.to_string()]);
        let known = format!("127.0.0.1:{port}@");
        self.wait("everybody to know the port", |node| {
            node.cmd(&["CLUSTER", "NODES"]).text().unwrap().contains(&known)
        });
    }

    /// Begins to move a slot: from then on, each key is with one of the two.
    pub fn begin_move(&self, slot: u16, from: usize, to: usize) {
        let slot = slot.to_string();
        self.nodes[to].cmd(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &self.ids[from]]);
        self.nodes[from].cmd(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &self.ids[to]]);
    }

    /// Moves these keys.
    pub fn move_keys(&self, keys: &[&str], from: usize, to: usize) {
        let port = self.nodes[to].port().to_string();
        let words = [&["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"], keys].concat();
        self.nodes[from].cmd(&words);
    }

    /// Moves what is left, and ends the move of a slot.
    pub fn end_move(&self, slot: u16, from: usize, to: usize) {
        let word = slot.to_string();
        loop {
            let keys = self.nodes[from].cmd(&["CLUSTER", "GETKEYSINSLOT", &word, "100"]).list();
            let keys: Vec<String> = keys.into_iter().filter_map(|key| key.text()).collect();
            if keys.is_empty() {
                break;
            }
            self.move_keys(&keys.iter().map(String::as_str).collect::<Vec<_>>(), from, to);
        }
        // The target first, as redis-cli does, for a slot is never without an owner; and then every primary.
        let others = (0..PRIMARIES).filter(|node| ![from, to].contains(node));
        for node in [to, from].into_iter().chain(others) {
            self.nodes[node].cmd(&["CLUSTER", "SETSLOT", &word, "NODE", &self.ids[to]]);
        }
    }
}

/// The answer of a server to which a slot is being moved.
pub fn asked(node: &Server, words: &[&str]) -> Reply {
    node.cmd(&["ASKING"]);
    node.cmd(words)
}

/// A key's slot.
pub fn slot(key: &str) -> u16 {
    redis_keyslot(key.as_bytes())
}

/// The answer to a command on a connection of its own: a failover ends connections.
pub fn look(server: &Server, words: &[&str]) -> Reply {
    super::sentinels::look(server, words)
}

fn info(node: &Server, field: &str) -> String {
    let info = node.cmd(&["CLUSTER", "INFO"]).text().unwrap();
    info.lines()
        .find_map(|line| line.trim_end().strip_prefix(field)?.strip_prefix(':').map(str::to_owned))
        .unwrap_or_default()
}
