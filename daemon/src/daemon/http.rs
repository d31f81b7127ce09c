//! `/metrics`, `/healthz`, `/readyz`, `/debug/pipeline` over HTTP, and `/processes` for root. hyper
//! reads the requests and writes the answers. A server is one thread, and what takes long to say is
//! made by others. A request is bounded in bytes and time. Each connection has one answer, and
//! there are few connections at once.

use super::sink_worker::SinkStatus;
use super::sinks::SinkWatcher;
use super::state::DaemonState;
use super::switch::Switch;
use super::{metrics, pipeline, processes};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use perfusion_host::priority;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinError, JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

/// Idle connections at once: those that have not asked yet. A further one takes the place of the
/// oldest, not the other way round: whoever holds connections open for nothing must not keep the
/// kubelet from asking whether this daemon lives.
const IDLE_CONNECTIONS: usize = 64;
/// All connections at once. Those that have asked are still at their answer.
const CONNECTIONS: usize = 2 * IDLE_CONNECTIONS;
/// Longest request line and headers. hyper takes no smaller bound.
const REQUEST_BYTES: usize = 8 << 10;
/// Longest time for a request, and for sending its answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// After a connection could not be taken the next one has to wait for so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Threads that make answers. Each kind of answer but `/processes` is made once at a time.
const ANSWERING_THREADS: usize = 4;
/// What takes much work to say is said again for so long.
const SAME_FOR: Duration = Duration::from_millis(500);
/// The daemon looks at its clocks every second, and whether its threads move; one that has not for
/// so long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(15);

/// Status, type and text of an answer.
type Answer = (StatusCode, &'static str, Bytes);

/// Makes the text of an answer. It may wait for the recording.
type MakeText = fn(&DaemonState, &[SinkStatus]) -> String;

/// What answers are made of.
pub(super) struct ServedState {
    state: Arc<DaemonState>,
    sinks: SinkWatcher,
    private: bool,
    metrics: CachedResponse,
    pipeline: CachedResponse,
}

/// What was said last. Whoever may ask over the network may ask without end, and what that costs is
/// taken from the recording.
#[derive(Default)]
struct CachedResponse(Arc<tokio::sync::Mutex<Option<(Instant, RecordingAndSwitch, Bytes)>>>);

/// Whether it is recorded, and by what it is switched off: `/readyz` says so at once, and nobody
/// else is to say anything else then.
type RecordingAndSwitch = (bool, Switch);

impl CachedResponse {
    async fn get(&self, about: &ServedState, make: MakeText) -> Result<Bytes, JoinError> {
        // Held while it is made, also for one who has gone by then: others wait for the same.
        let mut said = Arc::clone(&self.0).lock_owned().await;
        let whether = (about.state.recording.is_active(), about.state.switch());
        if let Some((at, then, text)) = &*said
            && at.elapsed() < SAME_FOR
            && *then == whether
        {
            return Ok(text.clone());
        }
        let (state, sinks) = (Arc::clone(&about.state), about.sinks.clone());
        let make = move || {
            let text = Bytes::from(make(&state, &sinks.standing()));
            *said = Some((Instant::now(), whether, text.clone()));
            text
        };
        spawn_blocking(make).await
    }
}

impl ServedState {
    /// `private` where it is root who asks, through the control socket: processes may be told of,
    /// too.
    pub(super) fn new(state: Arc<DaemonState>, sinks: SinkWatcher, private: bool) -> Self {
        let (metrics, pipeline) = (CachedResponse::default(), CachedResponse::default());
        Self { state, sinks, private, metrics, pipeline }
    }

    /// Fails where the thread that makes the answer panics.
    async fn respond(
        &self,
        request: &Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, JoinError> {
        // hyper leaves the text out of an answer to HEAD.
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let (status, kind, text) = if is_read {
            self.answer(request.uri().path()).await?
        } else {
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, Bytes::from("expected GET or HEAD\n"))
        };
        let mut response = Response::new(Full::new(text));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        if !is_read {
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        }
        Ok(response)
    }

    async fn answer(&self, path: &str) -> Result<Answer, JoinError> {
        let state = &self.state;
        let answer = match path {
            "/metrics" => {
                let make: MakeText =
                    |state, sinks| metrics::text(state, state.recording.status().as_deref(), sinks);
                (StatusCode::OK, metrics::CONTENT_TYPE, self.metrics.get(self, make).await?)
            }
            "/healthz" | "/readyz" if state.last_beat().elapsed() >= HANGS_AFTER => {
                unavailable("the daemon hangs")
            }
            "/healthz" => ok("alive"),
            "/readyz" if state.recording.is_active() => ok("recording"),
            "/readyz" => unavailable(&idle(state, "nothing is recorded")),
            "/debug/pipeline" => {
                (StatusCode::OK, JSON, self.pipeline.get(self, pipeline::text).await?)
            }
            processes::PROCESSES if self.private => {
                let asked = Arc::clone(state);
                match spawn_blocking(move || processes::processes(&asked)).await? {
                    Some(processes) => (StatusCode::OK, JSON, processes.into()),
                    None => {
                        unavailable(&idle(state, "nothing is recorded, or it is too busy to say"))
                    }
                }
            }
            _ => {
                let text = "there are /metrics, /healthz, /readyz and /debug/pipeline\n";
                (StatusCode::NOT_FOUND, TEXT, text.into())
            }
        };
        Ok(answer)
    }
}

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

fn ok(what: &str) -> Answer {
    (StatusCode::OK, TEXT, format!("{what}\n").into())
}

fn unavailable(what: &str) -> Answer {
    (StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{what}\n").into())
}

/// Why there is no recording.
fn idle(state: &DaemonState, otherwise: &str) -> String {
    state.idle().map_or_else(|| otherwise.to_owned(), |why| format!("nothing is recorded: {why}"))
}

/// Where connections come from.
pub(super) trait Listener: Send + 'static {
    /// One of them.
    type Connection: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// The next one who may ask.
    async fn accept(&self) -> io::Result<Self::Connection>;
}

impl Listener for TcpListener {
    type Connection = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        Self::accept(self).await.map(|(connection, _)| connection)
    }
}

/// The thread of a server. Dropping it closes the listener. Those who have connected by then still
/// get their answers.
pub(super) struct ServerThread {
    stop: Arc<Notify>,
    /// Nothing comes here. It ends when the listener is closed.
    closed: Receiver<()>,
}

impl ServerThread {
    /// Serves what `listen` makes.
    pub(super) fn start<L: Listener>(
        name: &str,
        listen: impl FnOnce() -> io::Result<L>,
        about: ServedState,
    ) -> io::Result<Self> {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().thread_name(name).max_blocking_threads(ANSWERING_THREADS);
        let runtime = runtime.build()?;
        let listener = {
            let _entered = runtime.enter();
            listen()?
        };
        let (stop, (closing, closed)) = (Arc::new(Notify::new()), channel());
        let stopped = Arc::clone(&stop);
        std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // The threads that make answers have it from this one.
            priority::wait_for_others();
            runtime.block_on(async {
                let mut connections = serve(listener, &Arc::new(about), &stopped).await;
                drop(closing);
                while connections.join_next().await.is_some() {}
            });
        })?;
        Ok(Self { stop, closed })
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.stop.notify_one();
        // The error says that it is closed.
        self.closed.recv().ok();
    }
}

/// Takes connections until it is told to stop, and hands back those that are still open.
async fn serve<L: Listener>(
    listener: L,
    about: &Arc<ServedState>,
    stopped: &Notify,
) -> JoinSet<()> {
    let (mut connections, idle) = (JoinSet::new(), Arc::new(IdleConnections::default()));
    loop {
        tokio::select! {
            () = stopped.notified() => return connections,
            // Each ends soon: when there are too many, further ones wait for that.
            Some(_) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < CONNECTIONS => match accepted {
                Ok(connection) => {
                    let talk = talk(connection, Arc::clone(about), Arc::clone(&idle));
                    idle.add(connections.spawn(talk));
                }
                // Out of descriptors, most likely, or somebody who may not ask: not again at once.
                Err(_) => sleep(ACCEPT_PAUSE).await,
            },
        }
    }
}

/// The connections of one server that have not asked yet, oldest first.
#[derive(Default)]
struct IdleConnections(Mutex<VecDeque<AbortHandle>>);

impl IdleConnections {
    /// Closes the oldest where there is no room for one more.
    fn add(&self, connection: AbortHandle) {
        let mut idle = self.lock();
        idle.retain(|other| !other.is_finished());
        if idle.len() >= IDLE_CONNECTIONS
            && let Some(oldest) = idle.pop_front()
        {
            oldest.abort();
        }
        idle.push_back(connection);
    }

    /// The connection of this task gets its answer, whoever comes.
    fn has_asked(&self) {
        let this = tokio::task::id();
        self.lock().retain(|other| other.id() != this);
    }

    /// Nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, VecDeque<AbortHandle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a request, and answers it.
async fn talk(
    connection: impl AsyncRead + AsyncWrite + Unpin,
    about: Arc<ServedState>,
    idle: Arc<IdleConnections>,
) {
    let (about, asked, made) = (&about, &Notify::new(), &Notify::new());
    let service = service_fn(move |request| {
        idle.has_asked();
        asked.notify_one();
        async move {
            let response = about.respond(&request).await;
            made.notify_one();
            response
        }
    });
    // One who sends or takes it byte by byte does not get more time by that. How long an answer is
    // made is bounded where it is made.
    let too_slow = async {
        if timeout(TIMEOUT, asked.notified()).await.is_ok() {
            made.notified().await;
            sleep(TIMEOUT).await;
        }
    };
    let mut http = http1::Builder::new();
    // Who has asked may close that direction, as `nc -N` does.
    http.keep_alive(false).half_close(true).title_case_headers(true).max_buf_size(REQUEST_BYTES);
    tokio::select! {
        // Its error is that whoever asked is gone, or speaks no HTTP.
        _ = http.serve_connection(TokioIo::new(connection), service) => {}
        () = too_slow => {}
    }
}

/// A server; dropping it closes its address.
pub struct HttpServer {
    address: SocketAddr,
    _thread: ServerThread,
}

impl HttpServer {
    /// Listens at `listen`.
    ///
    /// # Errors
    /// When the address cannot be had.
    pub fn start(
        listen: SocketAddr,
        state: Arc<DaemonState>,
        sinks: SinkWatcher,
    ) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let about = ServedState::new(state, sinks, false);
        let thread = ServerThread::start("http", || TcpListener::from_std(listener), about)?;
        Ok(Self { address, _thread: thread })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::{HttpServer, IDLE_CONNECTIONS, ServedState, TIMEOUT, talk};
    use crate::config::Config;
    use crate::daemon::sinks::{OpenedSinks, Sinks};
    use crate::daemon::state::DaemonState;
    use perfusion_recorder::RecordingHandle;
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{Shutdown, SocketAddr, TcpStream};
    use std::sync::Arc;
    use std::time::{Duration, Instant};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut connection = TcpStream::connect(address).unwrap();
        connection.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn each_path_has_its_answer_and_what_is_no_request_is_refused() {
        let (state, sinks) = (
            Arc::new(DaemonState::of(Config::default())),
            Sinks::start(OpenedSinks::default()).unwrap(),
        );
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = HttpServer::start(listen, Arc::clone(&state), sinks.watcher()).unwrap();
        let get =
            |path: &str| ask(server.address(), &format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n"));
        assert!(
            get("/metrics?x")
                .starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text")
        );
        assert!(get("/metrics").ends_with("# EOF\n"));
        assert!(get("/healthz").starts_with("HTTP/1.1 200"));
        assert!(get("/readyz").starts_with("HTTP/1.1 503"), "nothing is recorded");
        state.set_failure(Some("no recording can begin: out of\nmemory".to_owned()));
        assert!(
            get("/readyz")
                .ends_with("nothing is recorded: no recording can begin: out of memory\n")
        );
        assert!(get("/etc/passwd").starts_with("HTTP/1.1 404"));
        assert!(get("/processes").starts_with("HTTP/1.1 404"), "only over the control socket");
        assert!(get("/debug/pipeline").ends_with('}'));
        let refused = ask(server.address(), "POST /metrics HTTP/1.1\r\n\r\n");
        assert!(
            refused.starts_with("HTTP/1.1 405 Method Not Allowed\r\n")
                && refused.contains("\r\nAllow: GET, HEAD\r\n"),
            "{refused}"
        );
        assert!(ask(server.address(), "hello\r\n\r\n").starts_with("HTTP/1.1 400"));
        let head = ask(server.address(), "HEAD /healthz HTTP/1.1\r\n\r\n");
        assert!(
            head.starts_with("HTTP/1.1 200 OK") && head.contains("Content-Length: 6\r\n"),
            "{head}"
        );
        assert!(head.ends_with("\r\n\r\n"), "{head}");
        // The server reads no further, so the end of the answer may be lost with the connection.
        let long = format!("GET /healthz HTTP/1.1\r\nX: {}", "x".repeat(10 << 10));
        let mut connection = TcpStream::connect(server.address()).unwrap();
        connection.write_all(long.as_bytes()).ok();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).ok();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
        let mut connection = TcpStream::connect(server.address()).unwrap();
        connection.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").unwrap();
        connection.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("\r\n\r\nalive\n"), "{answer}");
        let address = server.address();
        drop(server);
        assert!(TcpStream::connect(address).is_err());
        sinks.close(Instant::now());
    }

    #[test]
    fn connections_that_are_held_open_keep_nobody_out() {
        let (state, sinks) = (
            Arc::new(DaemonState::of(Config::default())),
            Sinks::start(OpenedSinks::default()).unwrap(),
        );
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = HttpServer::start(listen, state, sinks.watcher()).unwrap();
        let mut held = Vec::new();
        while held.len() < 8 * IDLE_CONNECTIONS {
            let mut connection = TcpStream::connect(server.address()).unwrap();
            connection.write_all(b"GET /").unwrap();
            held.push(connection);
            if held.len() % (IDLE_CONNECTIONS / 2) == 0 {
                let health = ask(server.address(), "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
                assert!(health.starts_with("HTTP/1.1 200"), "after {}: {health}", held.len());
            }
        }
        drop(server);
        sinks.close(Instant::now());
    }

    /// True when there is nothing to read yet.
    fn waits(connection: &TcpStream) -> bool {
        connection.set_nonblocking(true).unwrap();
        let peeked = connection.peek(&mut [0]);
        connection.set_nonblocking(false).unwrap();
        peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    #[test]
    fn a_recorder_that_hangs_delays_answers_about_it_and_nothing_else() {
        let sinks = Sinks::start(OpenedSinks::default()).unwrap();
        // A machine that stalls for seconds may be late with any of them.
        let is_first = (0..5).any(|_| {
            let state = Arc::new(DaemonState::of(Config::default()));
            state.recording.begun(RecordingHandle::of_nobody().unwrap());
            let listen = SocketAddr::from(([127, 0, 0, 1], 0));
            let server = HttpServer::start(listen, state, sinks.watcher()).unwrap();
            let mut metrics = TcpStream::connect(server.address()).unwrap();
            metrics.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
            let health = ask(server.address(), "GET /healthz HTTP/1.1\r\n\r\n");
            assert!(health.starts_with("HTTP/1.1 200"), "{health}");
            drop(server);
            let is_first = waits(&metrics);
            // Who has asked by then gets an answer.
            let mut answer = String::new();
            metrics.read_to_string(&mut answer).unwrap();
            assert!(answer.ends_with("# EOF\n"), "{answer}");
            is_first
        });
        assert!(is_first, "health and the end of the server wait for the recorder");
        sinks.close(Instant::now());
    }

    #[test]
    fn who_is_too_slow_to_ask_or_to_take_the_answer_is_let_go() {
        let (state, sinks) = (
            Arc::new(DaemonState::of(Config::default())),
            Sinks::start(OpenedSinks::default()).unwrap(),
        );
        let about = Arc::new(ServedState::new(state, sinks.watcher(), false));
        // How long it is talked to, and what it gets.
        let served = async |peer: DuplexStream, ours: DuplexStream| {
            let begun = Instant::now();
            let task = tokio::spawn(talk(ours, Arc::clone(&about), Arc::default()));
            task.await.unwrap();
            let (mut peer, mut heard) = (peer, Vec::new());
            peer.read_to_end(&mut heard).await.unwrap();
            (begun.elapsed(), heard.len())
        };
        let run = async {
            let pair = || duplex(64);
            let ((mut slow, slows), (mut deaf, deafs)) = (pair(), pair());
            slow.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
            deaf.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.unwrap();
            tokio::join!(served(slow, slows), served(deaf, deafs))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let ((slow, nothing), (deaf, part)) = runtime.block_on(run);
        let times = TIMEOUT..TIMEOUT + Duration::from_secs(60);
        assert!(times.contains(&slow) && times.contains(&deaf), "{slow:?} {deaf:?}");
        assert_eq!((nothing, part), (0, 64));
        sinks.close(Instant::now());
    }
}
