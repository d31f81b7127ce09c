//! When all processes are doubted because the kernel's records of some were lost.

use perfusion_model::backoff::Backoff;
use std::time::{Duration, Instant};

/// Shortest time between two times that all processes are read anew: a process that makes mappings
/// without end can fill perf's rings. It doubles while that goes on, and is short again once
/// nothing was lost for as long as the longest.
pub(super) const DOUBT_INTERVAL: Duration = Duration::from_secs(1);
pub(super) const LONGEST_DOUBT_INTERVAL: Duration = Duration::from_secs(16);

/// Records of processes that were lost.
#[derive(Debug)]
pub(super) struct LostRecords {
    /// Some were lost since all processes were doubted.
    is_new: bool,
    /// When all were last doubted, and how long not to do that again.
    pub(super) doubted: Option<Instant>,
    pub(super) interval: Backoff,
}

impl Default for LostRecords {
    fn default() -> Self {
        let interval = Backoff::new(DOUBT_INTERVAL, LONGEST_DOUBT_INTERVAL);
        Self { is_new: false, doubted: None, interval }
    }
}

impl LostRecords {
    /// Records were lost.
    pub(super) fn note(&mut self) {
        self.is_new = true;
    }

    /// True when all processes are to be doubted now.
    pub(super) fn is_due(&self) -> bool {
        self.is_new && self.doubted.is_none_or(|at| at.elapsed() >= self.interval.delay())
    }

    /// All processes are doubted now.
    pub(super) fn doubt(&mut self) {
        let long = self.interval.delay() + LONGEST_DOUBT_INTERVAL;
        if self.doubted.is_none_or(|at| at.elapsed() >= long) {
            self.interval.reset();
        } else {
            self.interval.failed();
        }
        (self.is_new, self.doubted) = (false, Some(Instant::now()));
    }
}
