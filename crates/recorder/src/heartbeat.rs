//! Whether the threads of a recording still work. The processor may take long over one event, when
//! a file is large or a file system slow, and the collector over one round, but not for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Neither one event, nor a window's estimates, names or bytes take so long. Nor does a round of
/// all rings and shims.
const HANGS_AFTER: Duration = Duration::from_secs(60);

/// Beats when the thread has ended.
const ENDED: u64 = u64::MAX;

/// A thread's end: the processor beats with each event and with each turn of its loop, the
/// collector with each round.
#[derive(Debug, Default)]
pub(super) struct Heartbeat(Arc<AtomicU64>);

impl Heartbeat {
    pub(super) fn beat(&self) {
        // Relaxed: a number that only has to be another one, read by `Watch::hangs`.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn watch(&self) -> HeartbeatMonitor {
        HeartbeatMonitor { count: Arc::clone(&self.0), seen: 0, since: Instant::now() }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.0.store(ENDED, Ordering::Relaxed);
    }
}

/// Looks from outside.
#[derive(Debug)]
pub(crate) struct HeartbeatMonitor {
    count: Arc<AtomicU64>,
    seen: u64,
    since: Instant,
}

impl HeartbeatMonitor {
    /// Another one, which begins now.
    pub(super) fn again(&self) -> Self {
        Self { count: Arc::clone(&self.count), seen: 0, since: Instant::now() }
    }

    /// True when the thread has done nothing for long. To be asked now and then.
    #[must_use]
    pub(crate) fn hangs(&mut self, now: Instant) -> bool {
        let beats = self.count.load(Ordering::Relaxed);
        if beats != self.seen || beats == ENDED {
            (self.seen, self.since) = (beats, now);
        }
        now.saturating_duration_since(self.since) >= HANGS_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::{HANGS_AFTER, Heartbeat};
    use std::time::{Duration, Instant};

    #[test]
    fn one_that_does_nothing_for_long_hangs_until_it_beats_again_or_has_ended() {
        let heartbeat = Heartbeat::default();
        let mut monitor = heartbeat.watch();
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        heartbeat.beat();
        assert!(!monitor.hangs(begin));
        assert!(!monitor.hangs(begin + HANGS_AFTER - second));
        assert!(monitor.hangs(begin + HANGS_AFTER));
        heartbeat.beat();
        assert!(!monitor.hangs(begin + HANGS_AFTER + second));
        drop(heartbeat);
        assert!(
            !monitor.hangs(begin + 9 * HANGS_AFTER) && !monitor.hangs(begin + 19 * HANGS_AFTER)
        );
    }
}
