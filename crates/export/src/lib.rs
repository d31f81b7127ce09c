//! Profiles out: files, spool, OTLP, Pyroscope and object storage.
//!
//! [`file::write`] writes a file whole or not at all. `record` needs no more. The daemon gives each
//! [`FinishedProfile`] window to every [`Sink`]; each sink has a module of its own.
//!
//! Each sink runs on a thread of its own and may take as long as a local disk does. A sink that
//! sends over a network first writes the profile to its spool and sends from another thread. So a
//! profile that waits for a receiver is on disk, not in memory.

pub mod accepted_sizes;
pub mod age;
pub mod counts;
pub mod deliver;
pub mod directory;
pub mod error_text;
pub mod failure_states;
pub mod file;
pub mod http;
pub mod lock;
pub mod orphans;
pub mod otlp;
pub mod parts;
pub mod pyroscope;
pub mod receiver;
pub mod request_scheduler;
pub mod request_sink;
#[cfg(feature = "object-storage")]
pub mod s3;
pub mod spool;

use self::deliver::SpoolBacklog;
use self::parts::SinkSignals;
use perfusion_pprof::PprofError;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// What one service did in one window.
#[derive(Clone, Debug)]
pub struct FinishedProfile {
    /// The service's name, of printable characters.
    pub service: Arc<str>,
    /// What else tells where it comes from, by the names of OpenTelemetry's resource attributes:
    /// `host.name`, `k8s.*`. Never an argument or a variable of a process, unless the configuration
    /// asks for it.
    pub labels: BTreeMap<String, String>,
    /// When the window began, by the wall clock.
    pub start: SystemTime,
    /// How long it was, by the clock that is never set.
    pub duration: Duration,
    /// The merged profile: all sample types, names, build ids, and comments with rates and losses.
    /// It passes `pprof::validate`.
    pub profile: Packed,
}

/// A profile as the bytes of its file, which are a tenth of the message.
#[derive(Clone, Debug)]
pub struct Packed(Vec<u8>);

impl Packed {
    /// Of what `pprof::encode` made.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// A gzipped pprof file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The turn to make parts of a profile, each ten times as large as its bytes in the spool: several
/// sinks are given one window at the same moment. Not to be held while a disk is waited for.
pub(crate) struct EncodePermit(());

/// Whoever waits for a turn: the first in line is next.
struct PermitQueue {
    waiting: VecDeque<u64>,
    last_ticket: u64,
    is_taken: bool,
}

static LINE: Mutex<PermitQueue> =
    Mutex::new(PermitQueue { waiting: VecDeque::new(), last_ticket: 0, is_taken: false });
static LINE_MOVED: Condvar = Condvar::new();
/// Whoever waits for a turn has a moment for other things so often.
const TURN_LOOK: Duration = Duration::from_millis(100);

fn line() -> MutexGuard<'static, PermitQueue> {
    LINE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EncodePermit {
    /// Waits for it. `still` is asked now and then, and none is waited for where it says no; it
    /// must not wait for anything itself, since others stand in line behind.
    pub(crate) fn wait(still: impl FnMut() -> bool) -> Option<Self> {
        Self::take(|line, ticket| line.waiting.push_back(ticket), still)
    }

    /// Waits for it in front of all others: somebody waits for whoever asks.
    pub(crate) fn next() -> Option<Self> {
        Self::take(|line, ticket| line.waiting.push_front(ticket), || true)
    }

    fn take(
        join: impl FnOnce(&mut PermitQueue, u64),
        mut still: impl FnMut() -> bool,
    ) -> Option<Self> {
        let mut state = line();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        join(&mut state, ticket);
        while state.is_taken || state.waiting.front() != Some(&ticket) {
            drop(LINE_MOVED.wait_timeout(state, TURN_LOOK));
            let is_still = still();
            state = line();
            if !is_still {
                state.waiting.retain(|other| *other != ticket);
                LINE_MOVED.notify_all();
                return None;
            }
        }
        state.waiting.pop_front();
        state.is_taken = true;
        Some(Self(()))
    }
}

impl Drop for EncodePermit {
    fn drop(&mut self) {
        line().is_taken = false;
        LINE_MOVED.notify_all();
    }
}

#[cfg(test)]
impl From<perfusion_pprof::proto::Profile> for Packed {
    fn from(profile: perfusion_pprof::proto::Profile) -> Self {
        Self::new(perfusion_pprof::pack(&profile).unwrap())
    }
}

/// A profile did not get where it should.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// A file.
    #[error(transparent)]
    File(#[from] file::FileError),
    /// It could not be encoded.
    #[error(transparent)]
    Profile(#[from] PprofError),
    /// The sink refused it.
    #[error("{reason}")]
    Refused {
        /// What was expected and found.
        reason: String,
    },
}

/// Takes finished windows.
pub trait Sink: Send {
    /// What messages call it, such as `files` or `otlp https://collector:4317`.
    fn name(&self) -> &str;

    /// The directory that it works in: only one sink does at a time.
    fn place(&self) -> &Path;

    /// So many bytes of memory are there for all of the program. Said before the first profile.
    fn within(&mut self, _memory: u64) {}

    /// How it learns that the daemon ends or a window waits, and how it says what it counts while
    /// it is at work. Said before the first profile.
    fn hurries(&mut self, _hurry: SinkSignals) {}

    /// Takes one profile. It is given once: what is to be sent again later the sink keeps itself.
    ///
    /// # Errors
    /// When the profile is lost; the sink has counted it.
    fn put(&mut self, finished: &FinishedProfile) -> Result<(), SinkError>;

    /// All profiles of a window were put, or none has come for a minute: a moment for what is due
    /// now and then, such as retention.
    fn window_over(&mut self) {}

    /// It waits for memory that others have, so its next moment is to come soon.
    fn is_short_of_memory(&self) -> bool {
        false
    }

    /// Name and value of each counter, by the names of [`counts::SINK`]; each grows only.
    fn counters(&self) -> Vec<(&'static str, u64)>;

    /// What waits to be sent, of one that has a spool.
    fn backlog(&self) -> Option<SpoolBacklog> {
        None
    }

    /// No more profiles come: what is quickly sent is sent, the rest is kept for the next start.
    fn close(&mut self, _deadline: Instant) {}
}
pub mod quantity;
