//! Which URLs and users lead to a cluster.
use crate::{
    SECOND, acquires, leases,
    support::{
        cluster::{Cluster, PRIMARIES},
        server::{Server, free_port},
        within,
    },
};
use leasehold::{
    Leases, StoreError,
    store::redis::{
        RedisStore,
        fred::types::config::{Config, ServerConfig},
    },
};
use std::{error::Error as _, time::Instant};

async fn refusal(url: &str) -> StoreError {
    match within("an answer", Leases::connect(url)).await.unwrap_err() {
        leasehold::Error::Store { source, .. } => source,
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_is_found_by_any_node_that_is_alive_and_its_other_nodes_by_that() {
    let cluster = Cluster::start();
    let hangs = Server::start();
    hangs.stop();
    let ports = [free_port(), hangs.port(), free_port(), cluster.nodes[2].port()];
    let start = Instant::now();
    let leases = leases(&cluster.url_of(&ports), SECOND).await;
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
    for node in 0..PRIMARIES {
        acquires(&leases, &cluster.key_on(node, "k")).await;
    }
    let hosts = ports.iter().map(|port| ("127.0.0.1", *port)).collect();
    let config = Config { server: ServerConfig::new_clustered(hosts), ..Config::default() };
    let leases = within("a connection", Leases::builder().connect_with(config)).await.unwrap();
    for node in 0..PRIMARIES {
        acquires(&leases, &cluster.key_on(node, "k")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_cluster_is_refused_with_what_to_change() {
    let dead = [free_port(), free_port()];
    let error = refusal(&format!("redis-cluster://127.0.0.1:{}?node=127.0.0.1:{}", dead[0], dead[1])).await;
    assert!(error.may_pass() && error.source().is_some(), "{error}");
    assert!(dead.iter().all(|port| error.to_string().contains(&format!("127.0.0.1:{port}"))), "{error}");

    let alone = Server::start();
    let error = refusal(&alone.url().replace("redis:", "redis-cluster:")).await;
    assert!(!error.may_pass() && error.to_string().contains("`redis://`"), "{error}");

    let member = Server::member(&[]);
    let error = refusal(&member.url()).await;
    assert!(!error.may_pass() && error.to_string().contains("`redis-cluster://`"), "{error}");
    let error = refusal(&member.url().replace("redis:", "redis-cluster:")).await;
    assert!(error.may_pass(), "it may be created yet: {error}");
    assert!(error.source().unwrap().to_string().contains("was its cluster created"), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_three_permissions_more_suffice_and_each_is_needed() {
    const ALONE: &str = "+ping +info +eval +evalsha +time +get +set +del +exists +strlen +pttl +pexpire +zadd +zscore +zrank +zrange \
                         +zrevrange +zcard +zrem +zremrangebyrank +hset +hmget +hdel +publish +subscribe";
    const HERE: [&str; 3] = ["+cluster|slots", "+cluster|info", "+asking"];
    let cluster = Cluster::start();
    let permit = |more: &[&str]| {
        for node in &cluster.nodes {
            let mut words = vec!["ACL", "SETUSER", "worker", "reset", "on", ">secret", "~*", "&leasehold:*", "-@all"];
            words.extend(ALONE.split_whitespace());
            words.extend(more);
            node.cmd(&words);
        }
    };
    let url = cluster.url().replace("://", "://worker:secret@");
    let store = async || within("an answer", RedisStore::connect(&url)).await;

    permit(&HERE);
    let key = cluster.key_on(0, "k");
    cluster.begin_move(crate::support::cluster::slot(&key), 0, 1);
    let leases = leases(&url, SECOND).await;
    acquires(&leases, &key).await;
    acquires(&leases, &cluster.key_on(2, "k")).await;
    assert!(!format!("{leases:?} {:?}", store().await.unwrap()).contains("secret"));

    for (lacking, more) in [("+cluster|slots", &HERE[1..]), ("+cluster|slots", &[HERE[0], HERE[2]][..])] {
        permit(more);
        let error = refusal(&url).await;
        assert!(!error.may_pass() && error.to_string().contains(lacking), "{error}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
    permit(&HERE[..2]);
    let error = within("an answer", leases.lease(key.as_str()).acquire()).await.unwrap_err();
    let error = error.source().unwrap().to_string();
    assert!(error.contains("+asking"), "{error}");

    let wrong = url.replace("secret", "wrong");
    let error = refusal(&wrong).await;
    assert!(!error.may_pass() && error.to_string().contains("no such user"), "{error}");
}
