//! When windows end.

use crate::config::WindowsConfig;
use std::time::{Duration, Instant, SystemTime};

/// The window in progress.
#[derive(Debug)]
pub struct Schedule {
    windows: WindowsConfig,
    began: Instant,
    /// Which multiple of the length the wall clock is in.
    number: u128,
}

impl Schedule {
    /// A window begins.
    #[must_use]
    pub fn begin(windows: WindowsConfig, now: Instant, wall: SystemTime) -> Self {
        let number = number(wall, windows.length.0);
        Self { windows, began: now, number }
    }

    /// True when the window is over; then the next one begins. A clock that is set ends it too: no
    /// window has two times.
    pub fn is_over(&mut self, now: Instant, wall: SystemTime) -> bool {
        let number = number(wall, self.windows.length.0);
        let over = match self.windows.aligned {
            true => number != self.number,
            false => now.saturating_duration_since(self.began) >= self.windows.length.0,
        };
        if over {
            (self.began, self.number) = (now, number);
        }
        over
    }

    /// How long until the window is over, if no clock is set meanwhile.
    #[must_use]
    pub fn left(&self, now: Instant, wall: SystemTime) -> Duration {
        let length = self.windows.length.0;
        if !self.windows.aligned {
            return length.saturating_sub(now.saturating_duration_since(self.began));
        }
        let into = since_epoch(wall).as_nanos() % length.as_nanos().max(1);
        let left = length.as_nanos().saturating_sub(into);
        Duration::from_nanos(u64::try_from(left).unwrap_or(u64::MAX))
    }
}

fn since_epoch(wall: SystemTime) -> Duration {
    wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn number(wall: SystemTime, length: Duration) -> u128 {
    since_epoch(wall).as_nanos() / length.as_nanos().max(1)
}

#[cfg(test)]
mod tests {
    use super::Schedule;
    use crate::config::WindowsConfig;
    use perfusion_export::quantity::HumanDuration;
    use std::time::{Duration, Instant, SystemTime};

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn aligned_windows_end_at_full_minutes_and_when_the_clock_is_set() {
        let (windows, now) = (WindowsConfig::default(), Instant::now());
        let mut schedule = Schedule::begin(windows, now, at(6_030));
        assert_eq!(schedule.left(now, at(6_030)), Duration::from_secs(30));
        let over: Vec<u64> =
            (6_031..6_200).filter(|second| schedule.is_over(now, at(*second))).collect();
        assert_eq!(over, [6_060, 6_120, 6_180]);
        assert!(schedule.is_over(now, at(2_500)), "an hour back");
        assert!(!schedule.is_over(now, at(2_501)));
    }

    #[test]
    fn windows_that_are_not_aligned_do_not_know_the_wall_clock() {
        let windows =
            WindowsConfig { length: HumanDuration(Duration::from_secs(10)), aligned: false };
        let now = Instant::now();
        let mut schedule = Schedule::begin(windows, now, at(0));
        assert!(!schedule.is_over(now + Duration::from_secs(9), at(9_999)));
        assert_eq!(schedule.left(now + Duration::from_secs(9), at(9_999)), Duration::from_secs(1));
        assert!(schedule.is_over(now + Duration::from_secs(10), at(9_999)));
        assert!(!schedule.is_over(now + Duration::from_secs(11), at(9_999)));
    }
}
