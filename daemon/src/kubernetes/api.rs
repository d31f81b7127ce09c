//! Asks the API server for the pods of this node: once for all of them, then for what changes, from
//! the version of the last answer on (Kubernetes API concepts, "Efficient detection of changes").
//! On a thread of its own, which may wait for a network; whatever fails is tried again, less and
//! less often, and what was known stays known.

use super::KubernetesConfig;
use super::object::{ApiFailure, PodList, PodObject, UsedKeys, WatchEventObject, WatchEventType};
use crate::counts::DaemonCounters;
use perfusion_export::http::{HttpError, Peer, PendingResponse, Version};
use perfusion_host::locked_files;
use perfusion_host::pods::Pods;
use perfusion_host::priority;
use perfusion_model::backoff::{Backoff, spread};
use serde::de::DeserializeOwned;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Longest list: a node's pods, whose objects are some kilobytes each and 1.5 MiB at most (etcd's
/// limit of a request).
const MOST_LIST_BYTES: usize = 64 << 20;
/// Longest line of a watch: one object.
const MOST_LINE_BYTES: usize = 4 << 20;
/// Pods in one answer to a list.
const PAGE: u32 = 100;
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a watch goes on before it is begun anew, so that none hangs for ever where a connection
/// breaks without a word; and how much longer each may, so that not all nodes ask at once.
const WATCH_SECONDS: u64 = 240;
const WATCH_SPREAD_SECONDS: u64 = 60;
/// A watch ends by then, or it hangs.
const WATCH_GRACE: Duration = Duration::from_secs(30);
/// A watch that ends sooner is a failure.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Bytes of what the API server says that are shown.
const MOST_SAID: usize = 300;

/// Why nothing was heard of pods.
#[derive(Debug, thiserror::Error)]
enum ApiError {
    #[error("{0}")]
    Http(#[from] HttpError),
    #[error("the API server answers {code}: {message}{}", hint(*code))]
    Refused { code: u16, message: String },
    #[error("the API server's answer: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the API server's answer: a line of more than {MOST_LINE_BYTES} bytes")]
    TooLong,
    #[error("the API server ended a watch at once")]
    Short,
    /// The version we go on from is forgotten there.
    #[error("the API server no longer knows what has changed")]
    Gone,
}

fn hint(code: u16) -> &'static str {
    match code {
        401 => " (is the token of the service account mounted, kubernetes.token_file?)",
        403 => " (the service account needs list and watch of pods: rbac in the chart)",
        _ => "",
    }
}

/// The thread.
pub struct PodWatch {
    stop: Arc<Notify>,
    thread: JoinHandle<()>,
}

impl PodWatch {
    /// Begins to ask, and keeps `pods` as it hears.
    ///
    /// # Errors
    /// When the options cannot be used, or no thread can be made.
    pub fn start(
        options: &KubernetesConfig,
        wanted: UsedKeys,
        pods: Arc<Pods>,
        counters: Arc<DaemonCounters>,
    ) -> io::Result<Self> {
        let settings = options.settings().map_err(io::Error::other)?;
        let node = options.node.clone().unwrap_or_default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = Arc::new(Notify::new());
        let stopped = Arc::clone(&stop);
        let work = async move {
            let mut work =
                PodWatchLoop { node, wanted, pods, counters, version: None, said: String::new() };
            loop {
                // Files that are not there yet may be later.
                match Peer::new(settings.clone(), Version::One) {
                    Ok(peer) => work.follow(&peer).await,
                    Err(error) => work.failed(&error.into()),
                }
                tokio::time::sleep(LONGEST_WAIT).await;
            }
        };
        let thread = std::thread::Builder::new().name("pods".into()).spawn(move || {
            priority::wait_for_others();
            runtime.block_on(async {
                tokio::select! {
                    () = work => {}
                    () = stopped.notified() => {}
                }
            });
            // A name server that does not answer holds nobody up.
            runtime.shutdown_background();
        })?;
        Ok(Self { stop, thread })
    }

    /// Ends it.
    pub fn stop(self) {
        self.stop.notify_one();
        // One that panicked has said so.
        self.thread.join().ok();
    }
}

struct PodWatchLoop {
    node: String,
    wanted: UsedKeys,
    pods: Arc<Pods>,
    counters: Arc<DaemonCounters>,
    /// What is known is as of this one.
    version: Option<String>,
    /// What the log said last.
    said: String,
}

impl PodWatchLoop {
    /// Goes on for ever.
    async fn follow(&mut self, peer: &Peer) {
        // What the API server has in memory will do at first: of thousands of nodes none needs to
        // ask its disks.
        let mut as_of = "&resourceVersion=0";
        let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT);
        loop {
            let done = match self.version.clone() {
                None => self.list(peer, as_of).await,
                Some(version) => self.watch(peer, &version).await,
            };
            match done {
                Ok(()) => {
                    self.said.clear();
                    backoff.reset();
                    continue;
                }
                Err(ApiError::Gone) => {
                    // Not again what is older than what was seen.
                    (self.version, as_of) = (None, "");
                    tracing::info!(
                        "pods: the API server no longer knows what has changed: all are asked for \
                         again"
                    );
                }
                Err(error) => self.failed(&error),
            }
            let chance = locked_files::random().unwrap_or_default();
            tokio::time::sleep(spread(backoff.failed(), chance)).await;
        }
    }

    fn failed(&mut self, error: &ApiError) {
        self.counters.pod_failures.add(1);
        let text = error.to_string();
        // The same thing is said once.
        if text != self.said {
            tracing::warn!(error = %text, known = self.pods.count(), "pods: nothing is heard of \
                 changes");
            self.said = text;
        }
    }

    async fn list(&mut self, peer: &Peer, as_of: &str) -> Result<(), ApiError> {
        self.counters.pod_lists.add(1);
        let first =
            format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{}&limit={PAGE}", self.node);
        let mut path = format!("{first}{as_of}");
        let mut found = Vec::new();
        let version = loop {
            let page = async {
                let answer = accepted(peer.get(&path).await?).await?.whole(MOST_LIST_BYTES).await?;
                Ok::<PodList, ApiError>(serde_json::from_slice(&answer.body)?)
            };
            let page = tokio::time::timeout(LIST_TIMEOUT, page)
                .await
                .unwrap_or(Err(HttpError::Timeout.into()))?;
            found.extend(page.items.into_iter().filter_map(|object| object.pod(&self.wanted)));
            match page.metadata.rest.filter(|rest| !rest.is_empty()) {
                Some(rest) => path = format!("{first}&continue={}", escaped(&rest)),
                None => break page.metadata.resource_version,
            }
        };
        tracing::info!(pods = found.len(), node = self.node, "pods of this node are known");
        self.pods.replace(found, Instant::now());
        self.version = Some(version);
        Ok(())
    }

    /// Hears of changes until the API server ends it.
    async fn watch(&mut self, peer: &Peer, version: &str) -> Result<(), ApiError> {
        self.counters.pod_watches.add(1);
        let seconds =
            WATCH_SECONDS + locked_files::random().unwrap_or_default() % WATCH_SPREAD_SECONDS;
        let path = format!(
            "/api/v1/pods?watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}\
             &fieldSelector=spec.nodeName%3D{}&resourceVersion={}",
            self.node,
            escaped(version)
        );
        let began = Instant::now();
        let mut lines = Lines::default();
        let hear = async {
            let mut coming = accepted(peer.get(&path).await?).await?;
            while let Some(bytes) = coming.next().await? {
                for line in lines.add(&bytes)? {
                    self.heard(&line)?;
                }
            }
            Ok::<(), ApiError>(())
        };
        let deadline = Duration::from_secs(seconds) + WATCH_GRACE;
        tokio::time::timeout(deadline, hear).await.unwrap_or(Err(HttpError::Timeout.into()))?;
        // Whatever was heard: behind a proxy that lets each of them end after a line it would go on
        // without a pause.
        if began.elapsed() < SHORTEST_WATCH { Err(ApiError::Short) } else { Ok(()) }
    }

    fn heard(&mut self, line: &[u8]) -> Result<(), ApiError> {
        self.counters.pod_changes.add(1);
        let kind = serde_json::from_slice::<WatchEventType>(line)?.kind;
        if kind == "ERROR" {
            let ApiFailure { code, message } =
                serde_json::from_slice::<WatchEventObject<ApiFailure>>(line)?.object;
            return Err(refused(code, message));
        }
        let object: PodObject = serde_json::from_slice::<WatchEventObject<PodObject>>(line)?.object;
        let version = object.metadata.resource_version.clone();
        if let Some((uid, pod)) = object.pod(&self.wanted) {
            match kind.as_str() {
                "ADDED" | "MODIFIED" => self.pods.put(uid, pod, Instant::now()),
                "DELETED" => self.pods.remove(&uid, &pod, Instant::now()),
                _ => {}
            }
        }
        if !version.is_empty() {
            self.version = Some(version);
        }
        Ok(())
    }
}

fn refused(code: u16, message: String) -> ApiError {
    let message = message.chars().filter(|letter| !letter.is_control()).take(MOST_SAID).collect();
    if code == 410 { ApiError::Gone } else { ApiError::Refused { code, message } }
}

/// An answer that is none is an error, with what it says.
async fn accepted(coming: PendingResponse) -> Result<PendingResponse, ApiError> {
    if coming.status == 200 {
        return Ok(coming);
    }
    let code = coming.status;
    let body = coming.whole(MOST_LINE_BYTES).await.map(|answer| answer.body).unwrap_or_default();
    let said = parsed::<ApiFailure>(&body)
        .map_or_else(|| String::from_utf8_lossy(&body).into_owned(), |failure| failure.message);
    Err(refused(code, said))
}

fn parsed<T: DeserializeOwned>(body: &[u8]) -> Option<T> {
    serde_json::from_slice(body).ok()
}

/// Lines out of what comes in pieces.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    /// The lines that are whole now.
    fn add(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, ApiError> {
        self.0.extend_from_slice(bytes);
        let mut whole = Vec::new();
        if let Some(end) = self.0.iter().rposition(|byte| *byte == b'\n') {
            let rest = self.0.split_off(end + 1);
            let lines = std::mem::replace(&mut self.0, rest);
            whole.extend(
                lines
                    .split(|byte| *byte == b'\n')
                    .filter(|line| !line.is_empty())
                    .map(<[u8]>::to_vec),
            );
        }
        if self.0.len() > MOST_LINE_BYTES { Err(ApiError::TooLong) } else { Ok(whole) }
    }
}

/// What a URL's query cannot hold, as it can.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            escaped.push(char::from(byte));
        } else {
            escaped += &format!("%{byte:02X}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::{ApiError, Lines, MOST_LINE_BYTES, PodWatch, SHORTEST_WATCH, escaped, refused};
    use crate::kubernetes::object::UsedKeys;
    use crate::kubernetes::{KubernetesConfig, PodSource};
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    #[test]
    fn lines_are_put_together_again() {
        let mut lines = Lines::default();
        let mut add = |text: &str| {
            let lines = lines.add(text.as_bytes()).unwrap().into_iter();
            lines.map(|line| String::from_utf8(line).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(add("{\"a\""), [""; 0]);
        assert_eq!(add(":1}\n{}\n\n{"), ["{\"a\":1}", "{}"]);
        assert_eq!(add("}\n"), ["{}"]);
        let mut lines = Lines::default();
        assert!(matches!(lines.add(&vec![b'x'; MOST_LINE_BYTES + 1]), Err(ApiError::TooLong)));
    }

    #[test]
    fn a_watch_that_ends_at_once_is_not_repeated_at_once_whatever_was_heard() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let token = tempfile::NamedTempFile::new().unwrap();
        let options = KubernetesConfig {
            pods: PodSource::Api,
            node: Some("node-1".to_owned()),
            url: Some(format!("http://{}", listener.local_addr().unwrap())),
            token_file: token.path().to_owned(),
            ..KubernetesConfig::default()
        };
        let (tell, told) = channel();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().map_while(Result::ok) {
                let lines = BufReader::new(&stream).lines().map_while(Result::ok);
                let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                let is_watch = head.first().is_some_and(|line| line.contains("watch=1"));
                let body = if is_watch {
                    r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"8"}}}"#
                } else {
                    r#"{"metadata":{"resourceVersion":"7"},"items":[]}"#
                };
                // Who hung up is not told.
                write!(
                    stream,
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}\n",
                    body.len() + 1
                )
                .ok();
                if is_watch && tell.send(()).is_err() {
                    break;
                }
            }
        });
        let watch =
            PodWatch::start(&options, UsedKeys::default(), Arc::default(), Arc::default()).unwrap();
        told.recv_timeout(10 * SHORTEST_WATCH).unwrap();
        std::thread::sleep(SHORTEST_WATCH / 4);
        assert!(told.try_recv().is_err(), "there is half a second between two at least");
        told.recv_timeout(10 * SHORTEST_WATCH).unwrap();
        watch.stop();
    }

    #[test]
    fn what_was_refused_is_said_with_what_to_do_and_without_control_characters() {
        let said = refused(403, "pods is forbidden\u{1b}[31m".to_owned()).to_string();
        assert_eq!(
            said,
            "the API server answers 403: pods is forbidden[31m (the service account needs list and \
             watch of pods: rbac in the chart)"
        );
        assert!(matches!(refused(410, String::new()), ApiError::Gone));
        assert_eq!(escaped("eyJ2=&+"), "eyJ2%3D%26%2B");
    }
}
