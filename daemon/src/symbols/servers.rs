//! Servers of symbols. A URL may be that of a debuginfod, or of a symbol store of Microsoft's
//! layout, which has those of the runtime: both are asked for. Who does not answer, or not as it
//! should, costs a bounded time and is left alone for a while.

use super::cache::{CacheError, PartialFile, SymbolCache};
use hyper::Uri;
use perfusion_export::http::{HttpError, HttpSettings, Peer, PendingResponse, Tls, Version};
use perfusion_export::quantity::ByteSize;
use perfusion_model::text::hex;
use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::time::timeout_at;

/// A server that sends nothing for so long is given up.
const STALL: Duration = Duration::from_secs(10);
/// How long one that failed is left alone.
const LEFT_ALONE: Duration = Duration::from_secs(600);
/// How often an answer may send us elsewhere.
const MAX_REDIRECTS: usize = 5;

/// A URL that no request can be sent to.
#[derive(Debug, thiserror::Error)]
#[error("{url}: expected http:// or https:// and a host")]
pub struct UnusableUrl {
    url: String,
}

/// Bounds of what is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchLimits {
    /// Longest file, bytes.
    pub file_bytes: u64,
    /// How long one file may take.
    pub timeout: Duration,
}

/// What was asked for, and what became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchReport {
    /// Builds whose file was kept, and the bytes of all.
    pub kept: Vec<Vec<u8>>,
    /// Their bytes.
    pub bytes: u64,
    /// Files that no server has.
    pub not_found: u64,
    /// Files that were sent and are not what was asked for.
    pub refused: u64,
    /// Files that could not be fetched, or not in time.
    pub failed: u64,
    /// What went wrong, each cause once.
    pub causes: BTreeSet<String>,
}

impl FetchReport {
    /// What to say of it; nothing where nothing was asked for.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let counts = [
            (self.kept.len() as u64, "fetched"),
            (self.not_found, "not on any server"),
            (self.refused, "refused"),
            (self.failed, "not fetched"),
        ];
        let counted: Vec<String> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        if counted.is_empty() {
            return Vec::new();
        }
        let bytes =
            if self.bytes > 0 { format!(" ({})", ByteSize(self.bytes)) } else { String::new() };
        let mut lines = vec![format!("symbols: {}{bytes}", counted.join(", "))];
        lines.extend(self.causes.iter().map(|cause| format!("symbols: {cause}")));
        lines
    }
}

/// One server.
struct SymbolServer {
    url: String,
    peer: Peer,
    left_alone_until: Option<Instant>,
}

/// All of them, asked one after the other.
pub struct SymbolServers {
    servers: Vec<SymbolServer>,
    cache: SymbolCache,
    limits: FetchLimits,
    runtime: Option<Runtime>,
}

/// Why a server did not give a file.
enum Miss {
    NotFound,
    Refused(&'static str),
    /// The server is of no use now.
    Failed(String),
    /// Nothing can be kept.
    Cache(CacheError),
}

impl Drop for SymbolServers {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A name server that does not answer holds nobody up.
            runtime.shutdown_background();
        }
    }
}

/// Checks a URL.
fn peer(url: &str) -> Result<Peer, UnusableUrl> {
    let unusable = || UnusableUrl { url: url.to_owned() };
    let uri: Uri = url.parse().map_err(|_| unusable())?;
    let settings = HttpSettings { url: uri, headers: Vec::new(), tls: Tls::default() };
    Peer::lazy(settings, Version::One).map_err(|_| unusable())
}

impl SymbolServers {
    /// Asks these servers, and keeps what they send.
    ///
    /// # Errors
    /// When a URL is none.
    pub fn new(
        urls: &[String],
        cache: SymbolCache,
        limits: FetchLimits,
    ) -> Result<Self, UnusableUrl> {
        let server = |url: &String| {
            Ok(SymbolServer { url: url.clone(), peer: peer(url)?, left_alone_until: None })
        };
        let servers = urls.iter().map(server).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { servers, cache, limits, runtime: None })
    }

    /// Whether a URL can be asked.
    ///
    /// # Errors
    /// When it is none.
    pub fn check(url: &str) -> Result<(), UnusableUrl> {
        peer(url).map(drop)
    }

    /// Fetches the debug files of these builds, as many as there is time for until `deadline`.
    pub fn fetch(&mut self, build_ids: &[Vec<u8>], deadline: Instant) -> FetchReport {
        let mut report = FetchReport::default();
        let runtime = match self.runtime.take() {
            Some(runtime) => runtime,
            None => match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    report.failed = build_ids.len() as u64;
                    report.causes.insert(error.to_string());
                    return report;
                }
            },
        };
        for build_id in build_ids {
            self.fetch_one(&runtime, build_id, deadline, &mut report);
        }
        self.runtime = Some(runtime);
        report
    }

    fn fetch_one(
        &mut self,
        runtime: &Runtime,
        build_id: &[u8],
        deadline: Instant,
        report: &mut FetchReport,
    ) {
        let deadline = deadline.min(Instant::now() + self.limits.timeout);
        let (mut refused, mut failed) = (false, false);
        for server in &mut self.servers {
            let now = Instant::now();
            if now >= deadline {
                report.causes.insert("no time was left for more files".to_owned());
                failed = true;
                break;
            }
            if server.left_alone_until.is_some_and(|until| now < until) {
                failed = true;
                continue;
            }
            let exchange = server.ask(build_id, &self.cache, self.limits.file_bytes);
            let answer = runtime.block_on(async { timeout_at(deadline.into(), exchange).await });
            let miss = match answer {
                Ok(Ok(bytes)) => {
                    report.kept.push(build_id.to_vec());
                    report.bytes += bytes;
                    return;
                }
                Ok(Err(miss)) => miss,
                Err(_) => Miss::Failed("no whole answer in time".to_owned()),
            };
            match miss {
                Miss::NotFound => {}
                Miss::Refused(why) => {
                    refused = true;
                    report.causes.insert(format!("{}: a file was refused: {why}", server.url));
                }
                Miss::Failed(why) => {
                    failed = true;
                    server.left_alone_until = Some(Instant::now() + LEFT_ALONE);
                    report.causes.insert(format!("{}: {why}", server.url));
                }
                Miss::Cache(error) => {
                    report.causes.insert(error.to_string());
                    report.failed += 1;
                    return;
                }
            }
        }
        match (refused, failed) {
            (true, _) => report.refused += 1,
            (false, true) => report.failed += 1,
            (false, false) => report.not_found += 1,
        }
    }
}

impl SymbolServer {
    /// Asks in both ways. Answers the bytes of the file that was kept.
    async fn ask(&self, build_id: &[u8], cache: &SymbolCache, most: u64) -> Result<u64, Miss> {
        let id = hex(build_id);
        let paths = [
            // debuginfod(8), "WEBAPI".
            format!("/buildid/{id}/debuginfo"),
            // Simple Symbol Query Protocol, "ELF-buildid-symbol" (dotnet/symstore).
            format!("/_.debug/elf-buildid-sym-{id}/_.debug"),
        ];
        for path in paths {
            match self.get(&path).await? {
                None => {}
                Some(answer) => {
                    let mut partial = cache.begin().map_err(Miss::Cache)?;
                    let bytes = receive(answer, &mut partial, most).await?;
                    return match cache.keep(partial, build_id).map_err(Miss::Cache)? {
                        Ok(()) => Ok(bytes),
                        Err(why) => Err(Miss::Refused(why)),
                    };
                }
            }
        }
        Err(Miss::NotFound)
    }

    /// An answer with a file; `None` where there is none at this path.
    async fn get(&self, path: &str) -> Result<Option<PendingResponse>, Miss> {
        let failed = |error: HttpError| Miss::Failed(error.to_string());
        let mut answer = in_time(self.peer.get(path)).await?.map_err(failed)?;
        for _ in 0..MAX_REDIRECTS {
            match answer.status {
                200 => return Ok(Some(answer)),
                404 | 410 => return Ok(None),
                301 | 302 | 303 | 307 | 308 => {
                    let to = answer.header("location").unwrap_or_default().to_owned();
                    // A path is on the same host.
                    answer = if to.starts_with('/') && !to.starts_with("//") {
                        in_time(self.at_root()?.get(&to)).await?.map_err(failed)?
                    } else {
                        let peer = peer(&to).map_err(|error| Miss::Failed(error.to_string()))?;
                        in_time(peer.get("")).await?.map_err(failed)?
                    };
                }
                status => return Err(Miss::Failed(format!("answered {status}"))),
            }
        }
        Err(Miss::Failed("sent us elsewhere too often".to_owned()))
    }

    /// The same host without the URL's path.
    fn at_root(&self) -> Result<Peer, Miss> {
        let uri: Uri = self.url.parse().map_err(|_| Miss::NotFound)?;
        let (scheme, authority) = (uri.scheme_str(), uri.authority());
        let root =
            format!("{}://{}", scheme.unwrap_or("http"), authority.map_or("", |a| a.as_str()));
        peer(&root).map_err(|error| Miss::Failed(error.to_string()))
    }
}

/// What a server does within [`STALL`].
async fn in_time<T>(work: impl Future<Output = T>) -> Result<T, Miss> {
    let done = tokio::time::timeout(STALL, work).await;
    done.map_err(|_| Miss::Failed(format!("sent nothing for {} s", STALL.as_secs())))
}

/// Writes an answer into a file.
async fn receive(
    mut answer: PendingResponse,
    partial: &mut PartialFile,
    most: u64,
) -> Result<u64, Miss> {
    let mut bytes = 0_u64;
    loop {
        let part = in_time(answer.next()).await?;
        let Some(part) = part.map_err(|error| Miss::Failed(error.to_string()))? else { break };
        bytes = bytes.saturating_add(part.len() as u64);
        if bytes > most {
            return Err(Miss::Refused("it is longer than the limit"));
        }
        partial.file().write_all(&part).map_err(|error| Miss::Failed(written(&error)))?;
    }
    Ok(bytes)
}

fn written(error: &io::Error) -> String {
    format!("the file cannot be written: {error}")
}
