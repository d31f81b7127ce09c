//! `/metrics`, `/healthz`, `/readyz`, `/debug/pipeline` over HTTP, and `/processes` for root. A few
//! fixed answers to GET need no server of a library: what is read is bounded in bytes and time,
//! each connection has one answer, and there are few connections at once.

use super::sinks::SinkWatcher;
use super::state::DaemonState;
use super::switch::Switch;
use super::{metrics, pipeline, processes};
use perfusion_host::priority;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections at once. A further one takes the place of the oldest that has not asked yet, not the
/// other way round: whoever holds connections open for nothing must not keep the kubelet from
/// asking whether this daemon lives.
const CONNECTIONS: usize = 64;
/// Threads at once: those of closed connections may still be at their answer.
const THREADS: usize = 2 * CONNECTIONS;
/// Longest request line and headers, and longest time for them and for the answer.
const REQUEST_BYTES: usize = 8 << 10;
const TIMEOUT: Duration = Duration::from_secs(2);
/// What takes much work to say is said again for so long.
const SAME_FOR: Duration = Duration::from_millis(500);
/// The daemon looks at its clocks every second, and whether its threads move; one that has not for
/// so long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(15);

/// A connection, whatever it came over.
pub(super) trait ClientStream: Read + Write + Send + Sized + 'static {
    /// The same connection once more, to [`close`](Self::close) it by.
    fn twin(&self) -> io::Result<Self>;
    /// Ends it, whoever is reading or writing.
    fn close(&self);
    /// The next read or write waits no longer than this.
    fn give(&self, time: Duration) -> io::Result<()>;
}

impl ClientStream for TcpStream {
    fn twin(&self) -> io::Result<Self> {
        self.try_clone()
    }

    fn close(&self) {
        // Then the other side has.
        self.shutdown(Shutdown::Both).ok();
    }

    fn give(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

impl ClientStream for UnixStream {
    fn twin(&self) -> io::Result<Self> {
        self.try_clone()
    }

    fn close(&self) {
        // Then the other side has.
        self.shutdown(Shutdown::Both).ok();
    }

    fn give(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))?;
        self.set_write_timeout(Some(time))
    }
}

/// What answers are made of.
#[derive(Clone)]
pub(super) struct ServedState {
    state: Arc<DaemonState>,
    sinks: SinkWatcher,
    private: bool,
    metrics: Arc<CachedResponse>,
    pipeline: Arc<CachedResponse>,
}

impl ServedState {
    /// `private` where it is root who asks, through the control socket: processes may be told of,
    /// too.
    pub(super) fn new(state: Arc<DaemonState>, sinks: SinkWatcher, private: bool) -> Self {
        Self { state, sinks, private, metrics: Arc::default(), pipeline: Arc::default() }
    }
}

/// What was said last. Whoever may ask over the network may ask without end, and what that costs is
/// taken from the recording.
#[derive(Default)]
struct CachedResponse(Mutex<Option<(Instant, RecordingAndSwitch, Arc<str>)>>);

/// Whether it is recorded, and by what it is switched off: `/readyz` says so at once, and nobody
/// else is to say anything else then.
type RecordingAndSwitch = (bool, Switch);

impl CachedResponse {
    fn or(&self, state: &DaemonState, say: impl FnOnce() -> String) -> Arc<str> {
        // Held while it is made: others wait for the same.
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let whether = (state.recording.is_active(), state.switch());
        if let Some((at, then, text)) = &*said
            && at.elapsed() < SAME_FOR
            && *then == whether
        {
            return Arc::clone(text);
        }
        let text: Arc<str> = say().into();
        *said = Some((Instant::now(), whether, Arc::clone(&text)));
        text
    }
}

/// Takes connections until it is told to stop, and answers each on a thread of its own.
pub(super) fn serve<C: ClientStream>(
    mut accept: impl FnMut() -> io::Result<C>,
    stopped: &AtomicBool,
    about: &ServedState,
) {
    let open = Arc::new(OpenConnections::new());
    for number in 0_u64.. {
        let connection = accept();
        if stopped.load(Ordering::Relaxed) {
            return;
        }
        let Ok(connection) = connection else {
            // Out of descriptors, most likely, or somebody who may not ask: not again at once.
            std::thread::sleep(Duration::from_millis(100));
            continue;
        };
        if !open.admit(number, &connection) {
            continue;
        }
        let answering = std::thread::Builder::new().name("http".into());
        let answered = answering.spawn({
            let (open, about) = (Arc::clone(&open), about.clone());
            move || {
                // Whoever asked is gone, or too slow.
                answer(connection, &about, || open.has_asked(number)).ok();
                open.leave(number);
            }
        });
        if answered.is_err() {
            open.leave(number);
        }
    }
}

/// The connections of one server.
struct OpenConnections<C> {
    state: Mutex<Connections<C>>,
    /// A thread has ended.
    left: Condvar,
}

struct Connections<C> {
    /// Open ones that have not asked yet, oldest first, by number.
    open: VecDeque<(u64, C)>,
    /// Those of closed connections, too.
    threads: usize,
}

impl<C: ClientStream> OpenConnections<C> {
    fn new() -> Self {
        let state = Connections { open: VecDeque::new(), threads: 0 };
        Self { state: Mutex::new(state), left: Condvar::new() }
    }

    /// Makes room for one. False when it cannot be had.
    fn admit(&self, number: u64, connection: &C) -> bool {
        let Ok(twin) = connection.twin() else { return false };
        let mut state = self.lock();
        if state.open.len() >= CONNECTIONS
            && let Some((_, oldest)) = state.open.pop_front()
        {
            oldest.close();
        }
        // The threads of closed connections end soon.
        let waited = self.left.wait_timeout_while(state, TIMEOUT, |state| state.threads >= THREADS);
        let (mut state, timed_out) = waited.unwrap_or_else(PoisonError::into_inner);
        if timed_out.timed_out() {
            return false;
        }
        state.open.push_back((number, twin));
        state.threads += 1;
        true
    }

    /// This one gets its answer, whoever comes.
    fn has_asked(&self, number: u64) {
        self.lock().open.retain(|(other, _)| *other != number);
    }

    fn leave(&self, number: u64) {
        self.has_asked(number);
        self.lock().threads -= 1;
        self.left.notify_one();
    }

    /// Nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, Connections<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server; dropping it closes its address.
pub struct HttpServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
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
        let listener = TcpListener::bind(listen)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let about = ServedState::new(state, sinks, false);
        let thread = std::thread::Builder::new().name("http".into()).spawn(move || {
            priority::wait_for_others();
            serve(|| listener.accept().map(|(connection, _)| connection), &stopped, &about);
        })?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let mut wake = self.address;
        if wake.ip().is_unspecified() {
            wake.set_ip(if wake.is_ipv4() {
                [127, 0, 0, 1].into()
            } else {
                [0, 0, 0, 0, 0, 0, 0, 1].into()
            });
        }
        // Wakes the thread; where that fails it is left to the end of the program.
        if TcpStream::connect_timeout(&wake, TIMEOUT).is_ok()
            && let Some(thread) = self.thread.take()
        {
            thread.join().ok();
        }
    }
}

fn answer(
    mut connection: impl ClientStream,
    about: &ServedState,
    has_asked: impl FnOnce(),
) -> io::Result<()> {
    let ServedState { state, sinks, private, metrics, pipeline } = about;
    let asked = request(&mut connection)?;
    has_asked();
    let asked = asked.as_ref().map(|(method, path)| (*method, path.as_str()));
    let (status, kind, body) = match asked {
        None => ("400 Bad Request", TEXT, "expected an HTTP request\n".into()),
        Some((HttpMethod::Other, _)) => {
            ("405 Method Not Allowed\r\nAllow: GET, HEAD", TEXT, "expected GET or HEAD\n".into())
        }
        Some((_, "/metrics")) => {
            let text =
                || metrics::text(state, state.recording.status().as_deref(), &sinks.standing());
            ("200 OK", metrics::CONTENT_TYPE, metrics.or(state, text))
        }
        Some((_, "/healthz" | "/readyz")) if state.last_beat().elapsed() >= HANGS_AFTER => {
            unavailable("the daemon hangs")
        }
        Some((_, "/healthz")) => ok("alive"),
        Some((_, "/readyz")) if state.recording.is_active() => ok("recording"),
        Some((_, "/readyz")) => unavailable(&idle(state, "nothing is recorded")),
        Some((_, "/debug/pipeline")) => {
            ("200 OK", JSON, pipeline.or(state, || pipeline::text(state, &sinks.standing())))
        }
        Some((_, processes::PROCESSES)) if *private => match processes::processes(state) {
            Some(processes) => ("200 OK", JSON, processes.into()),
            None => unavailable(&idle(state, "nothing is recorded, or it is too busy to say")),
        },
        Some(_) => (
            "404 Not Found",
            TEXT,
            "there are /metrics, /healthz, /readyz and /debug/pipeline\n".into(),
        ),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n",
        body.len()
    );
    let deadline = Instant::now() + TIMEOUT;
    let body = if matches!(asked, Some((HttpMethod::Head, _))) { "" } else { &body };
    for part in
        [head.as_bytes(), body.as_bytes()].into_iter().flat_map(|text| text.chunks(64 << 10))
    {
        // One who takes it byte by byte does not get more time by that.
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        connection.give(left)?;
        connection.write_all(part)?;
    }
    Ok(())
}

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

fn ok(what: &str) -> (&'static str, &'static str, Arc<str>) {
    ("200 OK", TEXT, format!("{what}\n").into())
}

fn unavailable(what: &str) -> (&'static str, &'static str, Arc<str>) {
    ("503 Service Unavailable", TEXT, format!("{what}\n").into())
}

/// Why there is no recording.
fn idle(state: &DaemonState, otherwise: &str) -> String {
    state.idle().map_or_else(|| otherwise.to_owned(), |why| format!("nothing is recorded: {why}"))
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HttpMethod {
    Get,
    /// As much of it without its body.
    Head,
    Other,
}

/// The method and path of a request, without its query; `None` for what is none.
fn request(connection: &mut impl ClientStream) -> io::Result<Option<(HttpMethod, String)>> {
    let deadline = Instant::now() + TIMEOUT;
    let (mut request, mut part) = (Vec::new(), [0; 1024]);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > REQUEST_BYTES {
            return Ok(None);
        }
        connection.give(left)?;
        match connection.read(&mut part)? {
            0 => return Ok(None),
            read => request.extend_from_slice(part.get(..read).unwrap_or_default()),
        }
    }
    let line = request.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    let (method, path) = match (words.next(), words.next()) {
        (Some(b"GET"), Some(path)) => (HttpMethod::Get, path),
        (Some(b"HEAD"), Some(path)) => (HttpMethod::Head, path),
        (Some(other), Some(path)) if other.iter().all(u8::is_ascii_uppercase) => {
            (HttpMethod::Other, path)
        }
        _ => return Ok(None),
    };
    let path = path.split(|&byte| byte == b'?').next().unwrap_or_default();
    Ok((!path.is_empty()).then(|| (method, String::from_utf8_lossy(path).into_owned())))
}

#[cfg(test)]
mod tests {
    use super::{CONNECTIONS, HttpServer};
    use crate::config::Config;
    use crate::daemon::sinks::{OpenedSinks, Sinks};
    use crate::daemon::state::DaemonState;
    use std::io::{Read as _, Write as _};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::Arc;

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
            refused.starts_with("HTTP/1.1 405 Method Not Allowed\r\nAllow: GET, HEAD\r\n"),
            "{refused}"
        );
        assert!(ask(server.address(), "hello\r\n\r\n").starts_with("HTTP/1.1 400"));
        let head = ask(server.address(), "HEAD /healthz HTTP/1.1\r\n\r\n");
        assert!(
            head.starts_with("HTTP/1.1 200 OK") && head.contains("Content-Length: 6\r\n"),
            "{head}"
        );
        assert!(head.ends_with("\r\n\r\n"), "{head}");
        let long = format!("GET /{}", "x".repeat(10 << 10));
        let mut connection = TcpStream::connect(server.address()).unwrap();
        // It may have been closed in the middle.
        connection.write_all(long.as_bytes()).ok();
        let address = server.address();
        drop(server);
        assert!(TcpStream::connect(address).is_err());
        sinks.close(std::time::Instant::now());
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
        while held.len() < 8 * CONNECTIONS {
            let mut connection = TcpStream::connect(server.address()).unwrap();
            connection.write_all(b"GET /").unwrap();
            held.push(connection);
            if held.len() % (CONNECTIONS / 2) == 0 {
                let health = ask(server.address(), "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
                assert!(health.starts_with("HTTP/1.1 200"), "after {}: {health}", held.len());
            }
        }
        drop(server);
        sinks.close(std::time::Instant::now());
    }
}
