//! Rows of threads that have ended in this window.

use super::account::ThreadAccount;
use super::row::{StackOrMarker, ThreadRow};
use perfusion_model::event::{MonotonicNs, ThreadId, ThreadTimes};
use perfusion_model::frame::Marker;

/// Rows of ended threads that are kept apart; as many keys has a window (`window.rs`).
pub(super) const MAX_ENDED_ROWS: usize = 200_000;

/// The rows of ended threads, as far as there is memory for them, and the sum of the others.
#[derive(Default)]
pub(super) struct EndedThreads {
    rows: Vec<ThreadRow>,
    /// The sums of threads that ended after there was no more memory for rows.
    rest: Option<ThreadRow>,
    summed_up: u64,
}

impl EndedThreads {
    /// Makes rows of an ended thread. True when they are kept apart.
    pub(super) fn keep(&mut self, thread: ThreadAccount, times: &ThreadTimes) -> bool {
        let mut rows = Vec::new();
        thread.rows(times, &mut rows);
        if self.rows.len() + rows.len() <= MAX_ENDED_ROWS {
            self.rows.append(&mut rows);
            return true;
        }
        self.summed_up += 1;
        let rest = self.rest.get_or_insert_with(|| ThreadRow {
            thread: ThreadId::default(),
            since: MonotonicNs(0),
            name: None,
            place: StackOrMarker::Marker(Marker::Overflow),
            reason: None,
            waker: None,
            samples: 0,
            cpu_ns: 0.0,
            runnable_ns: 0.0,
            blocked_ns: 0.0,
            // Each thread's sum is exact.
            wait_stderr_ns: 0.0,
        });
        for row in rows {
            rest.samples += row.samples;
            rest.cpu_ns += row.cpu_ns;
            rest.runnable_ns += row.runnable_ns;
            rest.blocked_ns += row.blocked_ns;
        }
        false
    }

    /// Moves all of the window behind `rows`.
    pub(super) fn take_into(&mut self, rows: &mut Vec<ThreadRow>) {
        rows.append(&mut self.rows);
        rows.extend(self.rest.take());
    }

    /// Threads of which only the sums of all are kept.
    pub(super) fn summed_up(&self) -> u64 {
        self.summed_up
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}
