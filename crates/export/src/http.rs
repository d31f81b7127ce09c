//! Requests to others: HTTP/1.1 or HTTP/2, plain or with TLS. A connection of its own for each,
//! since there are few in a minute: a receiver that was replaced, or one of several behind a
//! balancer, is found each time. Certificates and secrets are read from their files each time,
//! because they are renewed while we run.
//!
//! A [`Client`] posts to a receiver, with a deadline for all of it and an answer of bounded length;
//! a [`Peer`] hands an answer over as it comes.

use super::error_text;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{HOST, HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue, USER_AGENT};
use hyper::rt::Executor;
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use perfusion_host::locked_files;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, crypto};

/// Of an answer so much is read.
const MOST_ANSWER_BYTES: usize = 1 << 20;
/// How often a request in progress looks when it has to end.
const DEADLINE_LOOK: Duration = Duration::from_millis(200);
/// Longest that one of several addresses is waited for.
const MOST_CONNECT: Duration = Duration::from_secs(3);
/// Where distributions keep the authorities they trust: Debian, Red Hat, Alpine.
const AUTHORITIES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// Where to and how.
#[derive(Clone, Debug)]
pub struct HttpSettings {
    /// `http://` or `https://`, a host, and perhaps a port and a path.
    pub url: Uri,
    /// For every request.
    pub headers: Vec<(HeaderName, Secret)>,
    /// For `https`.
    pub tls: Tls,
}

impl HttpSettings {
    /// Whether the files that are named can be used now: certificates, keys, values of headers.
    ///
    /// # Errors
    /// What is wrong with the first that cannot.
    pub fn check_files(&self, version: Version) -> Result<(), HttpError> {
        if self.url.scheme_str() == Some("https") {
            tls(&self.tls, version)?;
        }
        self.headers.iter().try_for_each(|(name, secret)| header(name, secret).map(drop))
    }
}

/// A header's value.
#[derive(Clone)]
pub enum Secret {
    /// As it is.
    Value(String),
    /// What a file holds, behind a prefix such as `Bearer `; blanks around it are no part of it.
    File(&'static str, PathBuf),
}

impl std::fmt::Debug for Secret {
    /// Values are for the receiver only.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Value(_) => f.write_str("(value)"),
            Self::File(_, path) => write!(f, "(content of {})", path.display()),
        }
    }
}

/// Who is believed, and who we are.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// PEM file with the authorities to believe instead of the system's.
    pub authority: Option<PathBuf>,
    /// PEM files with our certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// HTTP's major version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.1.
    One,
    /// HTTP/2, without asking first where there is no TLS.
    Two,
}

/// What came back.
#[derive(Debug)]
pub struct HttpResponse {
    /// HTTP's.
    pub status: u16,
    /// In front of the body.
    pub headers: HeaderMap,
    /// Behind it.
    pub trailers: HeaderMap,
    /// At most a mebibyte.
    pub body: Bytes,
}

/// Nothing came back.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The settings do not fit together.
    #[error("{0}: expected http:// or https:// and a host")]
    Url(Uri),
    /// A file of the settings.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// No PEM, or not of the kind that was expected.
    #[error("{}: {source}", path.display())]
    Pem {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: pem::Error,
    },
    /// Nobody to believe.
    #[error(
        "no file with certificate authorities: expected {}, or one named in the configuration",
        AUTHORITIES.join(" or ")
    )]
    NoAuthorities,
    /// A certificate, ours or theirs.
    #[error("{}", error_text::of_tls(.0))]
    Tls(#[from] rustls::Error),
    /// A header.
    #[error("header {name}: {source}")]
    Header {
        /// Its name.
        name: HeaderName,
        /// Why not.
        source: InvalidHeaderValue,
    },
    /// No connection, or a handshake that failed.
    #[error("{to}: {}", error_text::of_connection(source))]
    Connect {
        /// Host and port.
        to: String,
        /// Why not.
        source: io::Error,
    },
    /// The conversation failed.
    #[error("{}", error_text::of_request(.0))]
    Http(#[from] hyper::Error),
    /// The request cannot be written as one.
    #[error("HTTP: {0}")]
    Request(#[from] hyper::http::Error),
    /// A body that failed or is too long.
    #[error("the answer: {0}")]
    Body(String),
    /// Not in time.
    #[error("no answer in time")]
    Timeout,
}

/// Somebody who is asked.
pub struct Peer {
    settings: HttpSettings,
    version: Version,
}

/// An answer whose body is still to come.
#[derive(Debug)]
pub struct PendingResponse {
    /// HTTP's.
    pub status: u16,
    headers: HeaderMap,
    body: Incoming,
    drivers: Drivers,
}

/// What drives a connection. Dropping it ends that at the runtime's next turn.
#[derive(Debug, Default)]
struct Drivers(Tasks);

/// HTTP/2 has two, of which the library starts the one that holds the socket.
#[derive(Clone, Debug, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl Drop for Drivers {
    fn drop(&mut self) {
        self.0.lock().abort_all();
    }
}

impl Drivers {
    /// Closes the connection. Where nobody waited for that, it would be open until there is
    /// something to send again: nobody else runs the runtime.
    async fn end(&self) {
        let mut tasks = std::mem::take(&mut *self.0.lock());
        tasks.shutdown().await;
    }
}

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, task: F) {
        // A driver's error is the request's, too.
        self.lock().spawn(async move { drop(task.await) });
    }
}

impl PendingResponse {
    /// A header's value, if it is text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The next part of the body; `None` behind the last.
    ///
    /// # Errors
    /// When the connection fails.
    pub async fn next(&mut self) -> Result<Option<Bytes>, HttpError> {
        // Trailers say nothing here.
        while let Some(frame) = self.body.frame().await.transpose()? {
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// All of it.
    ///
    /// # Errors
    /// When it is longer than that, or the connection fails.
    pub async fn whole(self, most_bytes: usize) -> Result<HttpResponse, HttpError> {
        match self.read(most_bytes).await {
            Ok((answer, true)) => Ok(answer),
            Ok((_, false)) => Err(HttpError::Body("length limit exceeded".to_owned())),
            Err(error) => Err(HttpError::Body(error.to_string())),
        }
    }

    /// So much of it as fits, for who is told by the status what it is: of a longer one there are
    /// no trailers.
    ///
    /// # Errors
    /// When the connection fails.
    async fn cut(self, most_bytes: usize) -> Result<HttpResponse, HttpError> {
        Ok(self.read(most_bytes).await?.0)
    }

    /// The answer with so much of its body as fits, and whether that is all of it.
    async fn read(mut self, most_bytes: usize) -> Result<(HttpResponse, bool), hyper::Error> {
        let (mut body, mut trailers) = (Vec::new(), HeaderMap::new());
        let read = loop {
            let frame = match self.body.frame().await.transpose() {
                Ok(Some(frame)) => frame,
                Ok(None) => break Ok(true),
                Err(error) => break Err(error),
            };
            match frame.into_data() {
                Ok(data) => {
                    let room = most_bytes.saturating_sub(body.len());
                    body.extend(data.iter().take(room));
                    if data.len() > room {
                        break Ok(false);
                    }
                }
                Err(frame) => trailers = frame.into_trailers().unwrap_or_default(),
            }
        };
        self.drivers.end().await;
        let is_all = read?;
        let headers = std::mem::take(&mut self.headers);
        Ok((HttpResponse { status: self.status, headers, trailers, body: body.into() }, is_all))
    }
}

impl Peer {
    /// Checks what can be checked before there is anything to ask.
    ///
    /// # Errors
    /// When the URL is none, or a file cannot be read.
    pub fn new(settings: HttpSettings, version: Version) -> Result<Self, HttpError> {
        settings.check_files(version)?;
        Self::of(settings, version)
    }

    /// The same, but its files are read when there is something to ask, and no sooner.
    ///
    /// # Errors
    /// When the URL is none.
    pub fn lazy(settings: HttpSettings, version: Version) -> Result<Self, HttpError> {
        Self::of(settings, version)
    }

    fn of(settings: HttpSettings, version: Version) -> Result<Self, HttpError> {
        if !matches!(settings.url.scheme_str(), Some("http" | "https"))
            || settings.url.host().is_none()
        {
            return Err(HttpError::Url(settings.url));
        }
        Ok(Self { settings, version })
    }

    /// Asks for `path` below the URL's own.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn get(&self, path: &str) -> Result<PendingResponse, HttpError> {
        self.ask(Method::GET, path, &[], Vec::new(), None).await
    }

    /// Sends `body` to `path` below the URL's own. Whoever does not wait for ever for the answer
    /// says until when.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(HeaderName, &'static str)],
        body: Vec<u8>,
        until: Option<Instant>,
    ) -> Result<PendingResponse, HttpError> {
        let url = &self.settings.url;
        let secure = url.scheme_str() == Some("https");
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let port = url.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let failed = |source| HttpError::Connect { to: format!("{host}:{port}"), source };

        // Only what is asked for as it stands has a query of its own.
        let query = url.query().filter(|_| path.is_empty());
        let query = query.map_or_else(String::new, |query| format!("?{query}"));
        let whole = match format!("{}{path}{query}", url.path().trim_end_matches('/')) {
            whole if whole.starts_with('/') => whole,
            whole => format!("/{whole}"),
        };
        let authority = url.authority().map_or("", |authority| authority.as_str());
        // HTTP/2 has the host in the target, HTTP/1.1 in a header.
        let mut request = match self.version {
            Version::One => Request::builder().uri(&whole).header(HOST, authority),
            Version::Two => {
                let target =
                    Uri::builder().scheme(url.scheme_str().unwrap_or("http")).authority(authority);
                Request::builder().uri(target.path_and_query(whole).build()?)
            }
        };
        request = request
            .method(method)
            .header(USER_AGENT, concat!("perfusion/", env!("CARGO_PKG_VERSION")));
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        for (name, secret) in &self.settings.headers {
            request = request.header(name, header(name, secret)?);
        }
        let request = request.body(Full::new(Bytes::from(body)))?;

        let mut addresses: Vec<SocketAddr> =
            lookup_host((host, port)).await.map_err(failed)?.collect();
        // One that accepts and then says nothing is not in the way of the next attempt.
        let chance =
            usize::try_from(locked_files::random().unwrap_or_default() >> 32).unwrap_or_default();
        let first = chance.checked_rem(addresses.len()).unwrap_or_default();
        addresses.rotate_left(first);
        let stream = connect(&addresses, until).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        if !secure {
            return self.converse(stream, request).await;
        }
        let connector = TlsConnector::from(tls(&self.settings.tls, self.version)?);
        let name =
            ServerName::try_from(host.to_owned()).map_err(|_| HttpError::Url(url.clone()))?;
        self.converse(connector.connect(name, stream).await.map_err(failed)?, request).await
    }

    async fn converse(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        request: Request<Full<Bytes>>,
    ) -> Result<PendingResponse, HttpError> {
        let stream = TokioIo::new(stream);
        let drivers = Drivers::default();
        let response = match self.version {
            Version::One => {
                let (mut sender, connection) =
                    hyper::client::conn::http1::handshake(stream).await?;
                drivers.0.execute(connection);
                sender.send_request(request).await
            }
            Version::Two => {
                let (mut sender, connection) =
                    hyper::client::conn::http2::handshake(drivers.0.clone(), stream).await?;
                drivers.0.execute(connection);
                sender.send_request(request).await
            }
        };
        match response {
            Ok(response) => {
                let (head, body) = response.into_parts();
                Ok(PendingResponse {
                    status: head.status.as_u16(),
                    headers: head.headers,
                    body,
                    drivers,
                })
            }
            Err(error) => {
                drivers.end().await;
                Err(error.into())
            }
        }
    }
}

/// The first of them that answers. One that swallows what it is sent has its share of the time
/// only: the kernel itself would wait for two minutes.
async fn connect(addresses: &[SocketAddr], until: Option<Instant>) -> io::Result<TcpStream> {
    let Some((last, others)) = addresses.split_last() else {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    };
    for (&address, left) in others.iter().zip((2..=addresses.len()).rev()) {
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let share = until.map(|until| until.saturating_duration_since(Instant::now()) / left);
        let share = share.unwrap_or(MOST_CONNECT).min(MOST_CONNECT);
        if let Ok(Ok(stream)) = tokio::time::timeout(share, TcpStream::connect(address)).await {
            return Ok(stream);
        }
    }
    // After it there is nobody to leave time for.
    TcpStream::connect(last).await
}

/// Sends requests to one place.
pub struct Client {
    peer: Peer,
    /// There until it is dropped.
    runtime: Option<Runtime>,
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A name server that does not answer holds nobody up.
            runtime.shutdown_background();
        }
    }
}

impl Client {
    /// Reads no file before there is something to send: one that is missing now may be there then,
    /// as each is read anew for each request. Who wants to know asks [`HttpSettings::check_files`].
    ///
    /// # Errors
    /// When the URL is none.
    pub fn new(settings: HttpSettings, version: Version) -> Result<Self, HttpError> {
        let peer = Peer::of(settings, version)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime
            .map_err(|source| HttpError::Connect { to: "the runtime".to_owned(), source })?;
        Ok(Self { peer, runtime: Some(runtime) })
    }

    /// Sends `body` to `path` below the URL's own and reads the answer. The deadline may be brought
    /// forward meanwhile.
    ///
    /// # Errors
    /// When there is no answer by `deadline`.
    pub fn post(
        &self,
        path: &str,
        headers: &[(HeaderName, &'static str)],
        body: Vec<u8>,
        deadline: &dyn Fn() -> Instant,
    ) -> Result<HttpResponse, HttpError> {
        let Some(runtime) = &self.runtime else { return Err(HttpError::Timeout) };
        runtime.block_on(async {
            let exchange = async {
                let asked = self.peer.ask(Method::POST, path, headers, body, Some(deadline()));
                asked.await?.cut(MOST_ANSWER_BYTES).await
            };
            let mut exchange = std::pin::pin!(exchange);
            loop {
                let look = deadline().min(Instant::now() + DEADLINE_LOOK);
                match tokio::time::timeout_at(look.into(), exchange.as_mut()).await {
                    Ok(answer) => return answer,
                    Err(_) if Instant::now() >= deadline() => return Err(HttpError::Timeout),
                    Err(_) => {}
                }
            }
        })
    }
}

fn header(name: &HeaderName, secret: &Secret) -> Result<HeaderValue, HttpError> {
    let text = match secret {
        Secret::Value(value) => value.clone(),
        Secret::File(prefix, path) => {
            let text = fs::read_to_string(path)
                .map_err(|source| HttpError::File { path: path.clone(), source })?;
            format!("{prefix}{}", text.trim())
        }
    };
    let mut value = HeaderValue::try_from(text)
        .map_err(|source| HttpError::Header { name: name.clone(), source })?;
    value.set_sensitive(true);
    Ok(value)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, HttpError> {
    let fail = |source| HttpError::Pem { path: path.to_owned(), source };
    let found = CertificateDer::pem_file_iter(path)
        .map_err(fail)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(fail)?;
    if found.is_empty() { Err(fail(pem::Error::NoItemsFound)) } else { Ok(found) }
}

fn tls(settings: &Tls, version: Version) -> Result<Arc<ClientConfig>, HttpError> {
    let system = || AUTHORITIES.map(PathBuf::from).into_iter().find(|path| path.exists());
    let authorities = settings.authority.clone().or_else(system).ok_or(HttpError::NoAuthorities)?;
    let mut roots = RootCertStore::empty();
    // Of a system's many, some are of kinds nobody uses any more.
    let (added, _) = roots.add_parsable_certificates(certificates(&authorities)?);
    if added == 0 {
        return Err(HttpError::Pem { path: authorities, source: pem::Error::NoItemsFound });
    }
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let mut config = match &settings.client {
        None => config.with_no_client_auth(),
        Some((certificate, key)) => {
            let key_der = PrivateKeyDer::from_pem_file(key)
                .map_err(|source| HttpError::Pem { path: key.clone(), source })?;
            config.with_client_auth_cert(certificates(certificate)?, key_der)?
        }
    };
    config.alpn_protocols = match version {
        Version::One => vec![b"http/1.1".to_vec()],
        Version::Two => vec![b"h2".to_vec()],
    };
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use tokio::net::TcpSocket;

    #[test]
    fn an_address_that_swallows_packets_leaves_time_for_the_others() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            // Nobody accepts: with its queue full the kernel drops what comes.
            let full = socket.listen(1).unwrap();
            let swallows = full.local_addr().unwrap();
            let mut waiting = Vec::new();
            while let Ok(stream) =
                std::net::TcpStream::connect_timeout(&swallows, Duration::from_millis(200))
            {
                waiting.push(stream);
            }
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let good = listener.local_addr().unwrap();
            let refuses = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let (began, attempt) = (Instant::now(), Duration::from_secs(2));
            let addresses = [swallows, refuses, good];
            let stream = connect(&addresses, Some(began + attempt)).await.unwrap();
            assert_eq!(stream.peer_addr().unwrap(), good);
            assert!(began.elapsed() < attempt);
            assert!(connect(&[], None).await.is_err());
            drop((full, listener));
        });
    }

    #[test]
    fn a_header_is_what_its_file_holds_now() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let of = |prefix| {
            header(&HeaderName::from_static("x-api-key"), &Secret::File(prefix, path.clone()))
        };
        assert!(of("").unwrap_err().to_string().contains(path.to_str().unwrap()));
        for value in ["first", "renewed"] {
            fs::write(&path, format!(" {value}\n")).unwrap();
            assert_eq!(of("").unwrap(), value);
            assert_eq!(of("Bearer ").unwrap(), format!("Bearer {value}"));
        }
        fs::write(&path, "two\nlines").unwrap();
        let error = of("").unwrap_err().to_string();
        assert!(error.contains("x-api-key") && !error.contains("lines"), "{error}");
    }

    #[test]
    fn an_answer_that_is_too_long_is_one_with_its_status() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let receiver = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\nprofile") {
                let mut part = [0; 1024];
                let read = stream.read(&mut part).unwrap();
                assert!(read > 0);
                asked.extend_from_slice(&part[..read]);
            }
            let length = 2 * MOST_ANSWER_BYTES;
            write!(stream, "HTTP/1.1 400 Bad Request\r\nContent-Length: {length}\r\n\r\n").unwrap();
            // The client has gone before the end.
            stream.write_all(&vec![b'x'; length]).ok();
        });
        let settings = HttpSettings { url, headers: Vec::new(), tls: Tls::default() };
        let client = Client::new(settings, Version::One).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let answer = client.post("/", &[], b"profile".to_vec(), &|| deadline).unwrap();
        assert_eq!((answer.status, answer.body.len()), (400, MOST_ANSWER_BYTES));
        receiver.join().unwrap();
    }

    #[test]
    fn a_receiver_that_speaks_http_1_where_grpc_is_sent_is_said_to() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let receiver = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // Nobody answers before there is a request.
            let mut preface = [0; 24];
            stream.read_exact(&mut preface).unwrap();
            let answer = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n400 Bad Request";
            stream.write_all(answer.as_bytes()).unwrap();
            // Until the client has read it, and gone.
            std::io::copy(&mut stream, &mut std::io::sink()).ok();
        });
        let settings = HttpSettings { url, headers: Vec::new(), tls: Tls::default() };
        let client = Client::new(settings, Version::Two).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = client.post("/", &[], b"profile".to_vec(), &|| deadline).unwrap_err();
        drop(client);
        let said = error.to_string();
        assert_eq!(
            said,
            "the receiver does not speak gRPC (HTTP/2): is it an HTTP receiver? Then set \
             `protocol: http`"
        );
        receiver.join().unwrap();
    }
}
