//! Symbols of native files, asked of servers by a thread that nothing waits for. A window tells
//! what it lacks; a later one has the names.

use crate::config::SymbolsConfig;
use crate::counts::DaemonCounters;
use crate::symbols::{FetchReport, SymbolCache, SymbolServers};
use perfusion_host::priority;
use perfusion_symbolize::{MissingSymbols, SymbolNews};
use std::collections::{BTreeSet, HashMap};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lists that wait to be looked at.
const WAITING: usize = 2;
/// Files of one window that are asked for.
const MAX_FILES: usize = 64;
/// A build that no server had is not asked for again for so long.
const ASK_AGAIN: Duration = Duration::from_secs(3600);
/// Builds that are remembered for that.
const MAX_REMEMBERED: usize = 4096;
/// How long the files of one window may take together.
const MOST_TIME: Duration = Duration::from_secs(600);

/// What a window lacks.
struct SymbolRequest {
    options: SymbolsConfig,
    build_ids: Vec<Vec<u8>>,
}

/// Hands on what windows lack.
#[derive(Debug, Default)]
pub struct SymbolRequests {
    /// What recordings are told.
    pub news: Arc<SymbolNews>,
    thread: Mutex<Option<SyncSender<SymbolRequest>>>,
}

impl SymbolRequests {
    /// Asks for the symbols of these files, as far as `options` allow. Never waits: a list that
    /// finds the thread busy is made again by the next window.
    pub fn ask(
        &self,
        options: &SymbolsConfig,
        missing: Vec<MissingSymbols>,
        counters: &Arc<DaemonCounters>,
    ) {
        if options.urls.is_empty() || missing.is_empty() {
            return;
        }
        let build_ids = missing.into_iter().take(MAX_FILES).map(|file| file.build_id).collect();
        let mut request = SymbolRequest { options: options.clone(), build_ids };
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = thread.as_ref() {
            match sender.try_send(request) {
                Ok(()) | Err(TrySendError::Full(_)) => return,
                Err(TrySendError::Disconnected(back)) => request = back,
            }
        }
        let (sender, requests) = sync_channel(WAITING);
        // It has room: nobody else has it yet.
        sender.try_send(request).ok();
        let (news, counters) = (Arc::clone(&self.news), Arc::clone(counters));
        let work = move || {
            priority::wait_for_others();
            SymbolThread::new(news, counters).run(&requests);
        };
        match std::thread::Builder::new().name("symbol-fetch".into()).spawn(work) {
            Ok(_) => *thread = Some(sender),
            Err(error) => tracing::warn!(%error, "symbols are not fetched: no thread"),
        }
    }
}

/// The thread.
struct SymbolThread {
    news: Arc<SymbolNews>,
    counters: Arc<DaemonCounters>,
    /// When builds that no server had were asked for.
    asked: HashMap<Vec<u8>, Instant>,
    /// Causes that were logged.
    said: BTreeSet<String>,
    /// Those of the options before.
    servers: Option<(SymbolsConfig, SymbolServers)>,
}

impl SymbolThread {
    fn new(news: Arc<SymbolNews>, counters: Arc<DaemonCounters>) -> Self {
        Self { news, counters, asked: HashMap::new(), said: BTreeSet::new(), servers: None }
    }

    /// Works until the daemon has ended.
    fn run(mut self, requests: &Receiver<SymbolRequest>) {
        for SymbolRequest { options, build_ids } in requests {
            let now = Instant::now();
            self.asked.retain(|_, asked| now.duration_since(*asked) < ASK_AGAIN);
            let wanted: Vec<Vec<u8>> =
                build_ids.into_iter().filter(|id| !self.asked.contains_key(id)).collect();
            if wanted.is_empty() {
                continue;
            }
            let report = self.fetch(&options, &wanted, now + MOST_TIME);
            for build_id in wanted {
                if report.kept.contains(&build_id) {
                    self.news.arrived(build_id);
                } else if self.asked.len() < MAX_REMEMBERED {
                    self.asked.insert(build_id, now);
                }
            }
            self.count(&report);
        }
    }

    fn fetch(
        &mut self,
        options: &SymbolsConfig,
        wanted: &[Vec<u8>],
        until: Instant,
    ) -> FetchReport {
        if self.servers.as_ref().is_none_or(|(of, _)| of != options) {
            // They are other servers, which may have what the ones before had not.
            self.said.clear();
            self.servers = self.open(options).map(|servers| (options.clone(), servers));
        }
        match &mut self.servers {
            Some((_, servers)) => servers.fetch(wanted, until),
            None => FetchReport { failed: wanted.len() as u64, ..FetchReport::default() },
        }
    }

    fn open(&mut self, options: &SymbolsConfig) -> Option<SymbolServers> {
        let opened = SymbolCache::open(&options.cache, options.cache_size.0)
            .map_err(|error| error.to_string())
            .and_then(|cache| {
                SymbolServers::new(&options.urls, cache, options.limits())
                    .map_err(|error| error.to_string())
            });
        match opened {
            Ok(servers) => Some(servers),
            Err(error) => {
                self.say(error);
                None
            }
        }
    }

    fn count(&mut self, report: &FetchReport) {
        self.counters.symbols_fetched.add(report.kept.len() as u64);
        self.counters.symbols_not_found.add(report.not_found);
        self.counters.symbols_refused.add(report.refused);
        self.counters.symbols_failed.add(report.failed);
        report.causes.iter().for_each(|cause| self.say(cause.clone()));
    }

    /// Logs each cause once.
    fn say(&mut self, cause: String) {
        if self.said.len() < MAX_REMEMBERED && !self.said.contains(&cause) {
            tracing::warn!("symbols: {cause}");
            self.said.insert(cause);
        }
    }
}
