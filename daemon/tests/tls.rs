//! Receivers behind TLS, each a real server (rustls): with an authority of its own, a client's
//! certificate, tokens and certificates that are renewed while we run, and all that must be
//! refused.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::AUTHORIZATION;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use perfusion_export::http::{Client, HttpError, HttpResponse, HttpSettings, Secret, Tls, Version};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig, crypto};

/// An authority, in files of a folder.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    file: PathBuf,
}

/// A certificate and its key, in files.
#[derive(Clone)]
struct Pair {
    certificate: PathBuf,
    key: PathBuf,
}

impl Authority {
    fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = folder.join(name);
        fs::write(&file, issuer.pem()).unwrap();
        Self { issuer, file }
    }

    /// A certificate for a host's name, valid until the end of that year.
    fn certify(&self, host: &str, year: i32, into: &Path) -> Pair {
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(year, 12, 31);
        let key = KeyPair::generate().unwrap();
        let pair =
            Pair { certificate: into.with_extension("pem"), key: into.with_extension("key") };
        fs::write(&pair.certificate, params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        fs::write(&pair.key, key.serialize_pem()).unwrap();
        pair
    }
}

/// A receiver: HTTP/1.1 or HTTP/2, as it is asked. Takes only those with a certificate of the
/// authority, and notes their tokens. One after the other: a connection that is not closed when its
/// answer was read holds up the next.
fn serve(own: &Pair, clients: &Path, tokens: Arc<Mutex<Vec<String>>>) -> u16 {
    let provider = Arc::new(crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(clients).unwrap()).unwrap();
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(
            vec![CertificateDer::from_pem_file(&own.certificate).unwrap()],
            PrivateKeyDer::from_pem_file(&own.key).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    listener.set_nonblocking(true).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                // Whoever is refused hears so and goes.
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                let two = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let tokens = Arc::clone(&tokens);
                let answer = service_fn(move |request: Request<Incoming>| {
                    let tokens = Arc::clone(&tokens);
                    async move {
                        let token = request
                            .headers()
                            .get(AUTHORIZATION)
                            .unwrap()
                            .to_str()
                            .unwrap()
                            .to_owned();
                        let body = request.into_body().collect().await?.to_bytes();
                        tokens.lock().unwrap().push(token);
                        Ok::<_, hyper::Error>(Response::new(Full::<Bytes>::new(body)))
                    }
                });
                let stream = TokioIo::new(stream);
                if two {
                    hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(stream, answer)
                        .await
                        .ok();
                } else {
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(stream, answer)
                        .await
                        .ok();
                }
            }
        });
    });
    port
}

fn client(
    port: u16,
    token: &Path,
    authority: &Path,
    own: Option<&Pair>,
    version: Version,
) -> Client {
    let settings = HttpSettings {
        url: format!("https://localhost:{port}").parse().unwrap(),
        headers: vec![(AUTHORIZATION, Secret::File("Bearer ", token.to_owned()))],
        tls: Tls {
            authority: Some(authority.to_owned()),
            client: own.map(|pair| (pair.certificate.clone(), pair.key.clone())),
        },
    };
    Client::new(settings, version).unwrap()
}

fn post(client: &Client) -> Result<HttpResponse, HttpError> {
    let deadline = Instant::now() + Duration::from_secs(20);
    client.post("/x", &[], b"body".to_vec(), &|| deadline)
}

#[test]
fn a_receiver_with_its_own_authority_takes_those_with_a_certificate_and_nobody_else_is_spoken_to() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (ours, other) =
        (Authority::new(folder.path(), "ours.pem"), Authority::new(folder.path(), "other.pem"));
    let own = ours.certify("client", 2999, &at("client"));
    let stranger = other.certify("client", 2999, &at("stranger"));
    let server = ours.certify("localhost", 2999, &at("server"));
    let token = at("token");
    fs::write(&token, "first\n").unwrap();
    for version in [Version::One, Version::Two] {
        let tokens = Arc::default();
        let port = serve(&server, &ours.file, Arc::clone(&tokens));
        let good = client(port, &token, &ours.file, Some(&own), version);
        let answer = post(&good).unwrap();
        assert_eq!((answer.status, &answer.body[..]), (200, &b"body"[..]), "{version:?}");
        // Both are renewed while we run.
        fs::write(&token, "second").unwrap();
        ours.certify("client", 2998, &at("client"));
        post(&good).unwrap();
        assert_eq!(*tokens.lock().unwrap(), ["Bearer first", "Bearer second"]);
        fs::write(&token, "first\n").unwrap();

        for (who, client) in [
            ("without a certificate", client(port, &token, &ours.file, None, version)),
            ("with a stranger's", client(port, &token, &ours.file, Some(&stranger), version)),
            ("believing another", client(port, &token, &other.file, Some(&own), version)),
        ] {
            let error = post(&client).map(|answer| panic!("{who}: {answer:?}")).unwrap_err();
            assert!(
                !matches!(error, HttpError::Timeout),
                "{version:?}, {who}: nobody spoke to it: {error}"
            );
        }
        assert_eq!(tokens.lock().unwrap().len(), 2, "nobody else's token was heard");
    }
}

#[test]
fn a_certificate_that_has_run_out_or_is_anothers_is_refused_until_it_is_renewed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let ours = Authority::new(folder.path(), "ours.pem");
    let own = ours.certify("client", 2999, &at("client"));
    fs::write(at("token"), "t").unwrap();
    for (host, year, said) in [
        ("localhost", 2021, "certificate has run out"),
        ("other.example", 2999, "is for another name"),
    ] {
        let tokens = Arc::default();
        let server = ours.certify(host, year, &at("server"));
        let port = serve(&server, &ours.file, Arc::clone(&tokens));
        let error =
            post(&client(port, &at("token"), &ours.file, Some(&own), Version::One)).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
        assert!(tokens.lock().unwrap().is_empty(), "the token is not told to whoever that is");
        // Renewed, it is taken, and nothing here was started again but the server.
        let renewed = serve(&ours.certify("localhost", 2999, &at("server")), &ours.file, tokens);
        post(&client(renewed, &at("token"), &ours.file, Some(&own), Version::One)).unwrap();
    }
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    fs::write(&file, "no certificate").unwrap();
    let settings = HttpSettings {
        url: "https://localhost:1".parse().unwrap(),
        headers: Vec::new(),
        tls: Tls { authority: Some(file), client: None },
    };
    let error = settings.check_files(Version::One).unwrap_err();
    assert!(error.to_string().contains("ca.pem"), "{error}");
    // It may be repaired until there is something to send.
    Client::new(settings, Version::One).unwrap();
}
