//! The clock of all events.

use std::time::{Duration, SystemTime};

/// Two clocks that are read within this time count as read at once.
const CLOCKS_APART_NS: u64 = 100_000;
/// The clocks are read at most so often until that is so.
const CLOCK_READINGS: u32 = 10;

/// CLOCK_MONOTONIC of the initial time namespace, in nanoseconds (`bpf_ktime_get_ns`, perf's
/// `clockid`, the shim's clock with its namespace offset removed).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonotonicNs(pub u64);

impl MonotonicNs {
    /// This moment; the recorder lives in the initial time namespace.
    #[must_use]
    pub fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let (seconds, nanos) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
        Self(seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanos.unwrap_or(0)))
    }

    /// This moment, which is past, by the wall clock as that is set now. A thread that loses the
    /// CPU between the two clocks would be wrong by as long. So the wall clock is read between two
    /// readings of this one. That is repeated where they are far apart, and the closest counts.
    #[must_use]
    pub fn on_wall_clock(self) -> SystemTime {
        let mut closest = (u64::MAX, Self(0), SystemTime::UNIX_EPOCH);
        for _ in 0..CLOCK_READINGS {
            let (before, wall, after) = (Self::now(), SystemTime::now(), Self::now());
            let apart = after.0.saturating_sub(before.0);
            if apart < closest.0 {
                closest = (apart, Self(before.0 + apart / 2), wall);
            }
            if apart <= CLOCKS_APART_NS {
                break;
            }
        }
        let (_, read_at, wall) = closest;
        let ago = Duration::from_nanos(read_at.0.saturating_sub(self.0));
        wall.checked_sub(ago).unwrap_or(wall)
    }
}
