//! Leases over TLS, with authorities and certificates made for each test.
#![allow(clippy::unwrap_used, reason = "tests")]
#![cfg(any(feature = "tls-rustls", feature = "tls-rustls-ring"))]
mod support;

use leasehold::{
    Error, Leases, StoreError,
    store::redis::fred::{
        rustls::{
            ClientConfig, RootCertStore,
            pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
        },
        types::config::{Config, ServerConfig, TlsConnector},
    },
};
use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair};
use std::{
    error::Error as _,
    fs,
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
};
use support::{
    server::{Server, free_port},
    until, within,
};
use tempfile::TempDir;

/// No two have the same name, or one could be taken for the other.
fn named(what: &str) -> CertificateParams {
    static NAMES: AtomicU32 = AtomicU32::new(0);
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let name = format!("{what} {}", NAMES.fetch_add(1, Ordering::Relaxed));
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// Who signs certificates, in a directory of its own.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    dir: TempDir,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = named("authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        let dir = tempfile::Builder::new().prefix("leasehold-").tempdir().unwrap();
        fs::write(dir.path().join("ca.crt"), certificate.pem()).unwrap();
        Authority { issuer: Issuer::new(params, key), certificate: certificate.der().clone(), dir }
    }

    /// A certificate for this host, and its key.
    fn sign(&self, host: &str) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let mut params = named(host);
        params.subject_alt_names = CertificateParams::new([host.to_owned()]).unwrap().subject_alt_names;
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// The settings of a server that is that host, and its port for TLS.
    fn settings(&self, host: &str, clients: &str) -> (Vec<String>, u16) {
        let (certificate, key) = self.sign(host);
        let (file, port) = (|name: &str| self.dir.path().join(name), free_port());
        fs::write(file("server.crt"), certificate.pem()).unwrap();
        fs::write(file("server.key"), key.serialize_pem()).unwrap();
        let path = |name: &str| Path::to_str(&file(name)).unwrap().to_owned();
        let settings = [
            ("tls-port", port.to_string()),
            ("tls-ca-cert-file", path("ca.crt")),
            ("tls-cert-file", path("server.crt")),
            ("tls-key-file", path("server.key")),
            ("tls-auth-clients", clients.to_owned()),
        ];
        (settings.into_iter().flat_map(|(name, value)| [format!("--{name}"), value]).collect(), port)
    }

    fn serve(&self, host: &str, clients: &str) -> (Server, u16) {
        let (settings, port) = self.settings(host, clients);
        (Server::with(&settings.iter().map(String::as_str).collect::<Vec<_>>()), port)
    }

    /// A client that trusts this authority and no other.
    fn trusted(&self) -> TlsConnector {
        TlsConnector::from(ClientConfig::builder().with_root_certificates(self.roots()).with_no_client_auth())
    }

    /// The same, with a certificate of its own.
    fn trusted_with_a_certificate(&self, from: &Authority) -> TlsConnector {
        let (certificate, key) = from.sign("worker");
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let client = ClientConfig::builder()
            .with_root_certificates(self.roots())
            .with_client_auth_cert(vec![certificate.der().clone()], key);
        TlsConnector::from(client.unwrap())
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        roots
    }
}

async fn connect(server: ServerConfig, tls: TlsConnector) -> Result<Leases, Error> {
    let config = Config { server, tls: Some(tls.into()), ..Config::default() };
    within("an answer", Leases::builder().connect_with(config)).await
}

async fn connect_to(port: u16, tls: TlsConnector) -> Result<Leases, Error> {
    connect(ServerConfig::new_centralized("127.0.0.1", port), tls).await
}

/// Refused for good, with words about certificates.
#[track_caller]
fn assert_refused(result: Result<Leases, Error>, word: &str) {
    let Err(Error::Store { source: error, .. }) = result else { panic!("{result:?}") };
    assert!(matches!(error, StoreError::Refused(_)), "{error} <- {:?}", error.source());
    assert!(error.to_string().contains("certificate"), "{error}");
    let words = format!("{:?}", error.source().unwrap());
    assert!(words.contains(word), "{words}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_private_authority_is_trusted_by_whoever_is_told_to_and_by_nobody_else() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (server, port) = ours.serve("127.0.0.1", "no");
    let leases = connect_to(port, ours.trusted()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    until("it hears, too", || !server.cmd(&["PUBSUB", "CHANNELS"]).list().is_empty()).await;
    lease.release().await.unwrap();
    assert_refused(connect_to(port, theirs.trusted()).await, "UnknownIssuer");
    let url = format!("rediss://:hunter2@127.0.0.1:{port}");
    let error = within("an answer", Leases::connect(&url)).await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_for_another_host_is_refused() {
    let authority = Authority::new();
    let (_server, port) = authority.serve("redis.example.com", "no");
    assert_refused(connect_to(port, authority.trusted()).await, "NotValidForName");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_asks_for_a_certificate_gets_ours_and_refuses_whoever_has_none() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (_server, port) = ours.serve("127.0.0.1", "yes");
    let leases = connect_to(port, ours.trusted_with_a_certificate(&ours)).await.unwrap();
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    assert_refused(connect_to(port, ours.trusted()).await, "CertificateRequired");
    assert_refused(connect_to(port, ours.trusted_with_a_certificate(&theirs)).await, "AlertReceived");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_speaks_no_tls_is_told_as_what_it_may_be() {
    let server = Server::start();
    let Err(Error::Store { source, .. }) = connect_to(server.port(), Authority::new().trusted()).await else {
        panic!("it speaks no TLS")
    };
    assert!(source.to_string().contains("speaks no TLS"), "{source} <- {:?}", source.source());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_their_primary_are_both_spoken_to_over_tls() {
    let authority = Authority::new();
    let (primary, primary_port) = authority.serve("127.0.0.1", "no");
    let (settings, port) = authority.settings("127.0.0.1", "no");
    let settings: String =
        settings.chunks(2).map(|pair| format!("{} {}\n", pair[0].trim_start_matches('-'), pair[1])).collect();
    let _sentinel =
        Server::sentinel(&format!("{settings}tls-replication yes\nsentinel monitor main 127.0.0.1 {primary_port} 1\n"));
    let sentinels = ServerConfig::new_sentinel(vec![("127.0.0.1", port)], "main");
    let leases = connect(sentinels, authority.trusted()).await.unwrap();
    leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    assert_eq!(primary.keys(), ["{k}:fence"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_members_of_a_cluster_are_spoken_to_over_tls() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let (settings, port) = ours.settings("127.0.0.1", "no");
    let settings: Vec<&str> = settings.iter().map(String::as_str).chain(["--tls-cluster", "yes"]).collect();
    let member = Server::member(&settings);
    member.cmd(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    until("it serves", || member.cmd(&["CLUSTER", "INFO"]).text().unwrap().contains("cluster_state:ok")).await;
    let nodes = || ServerConfig::new_clustered(vec![("127.0.0.1", port)]);
    let leases = connect(nodes(), ours.trusted()).await.unwrap();
    let lease = leases.lease("k").acquire().await.unwrap();
    until("it hears, too", || !member.cmd(&["PUBSUB", "CHANNELS"]).list().is_empty()).await;
    lease.release().await.unwrap();
    assert_refused(connect(nodes(), theirs.trusted()).await, "UnknownIssuer");
}
