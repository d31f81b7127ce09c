//! How long the last names are waited for, once the kernel source is closed.

use crate::processor::NameRequest;
use perfusion_host::process;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The wait is over this long after the last answer came: shims that do not answer any more are not
/// waited for.
const NO_ANSWERS: Duration = Duration::from_millis(400);

/// The wait for the last names of a recording.
pub(crate) struct LastNames {
    until: Instant,
    /// How many answers are missing; none were counted yet at the beginning.
    missing: Option<usize>,
    /// Since when so many are missing.
    since: Instant,
}

impl LastNames {
    /// The wait begins, and takes no longer than this.
    pub(crate) fn begin(most: Duration) -> Self {
        let now = Instant::now();
        Self { until: now + most, missing: None, since: now }
    }

    /// True when there is no more time, whatever is missing.
    pub(crate) fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    /// True when the wait is over; `open` is what has no answer yet. Processes that have ended give
    /// no answers but those in their rings, which are read anyway.
    pub(crate) fn is_over(&mut self, open: &[NameRequest]) -> bool {
        if self.missing != Some(open.len()) {
            (self.missing, self.since) = (Some(open.len()), Instant::now());
        }
        let pids: BTreeSet<u32> = open.iter().map(|request| request.pid).collect();
        let lives = |pid| process::is_running(pid, process::start_ticks(pid));
        self.is_late() || self.since.elapsed() >= NO_ANSWERS || !pids.into_iter().any(lives)
    }
}
