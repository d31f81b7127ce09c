//! How long to wait before the next attempt.

use std::time::Duration;

/// Delays between attempts. The first failure is followed by the first delay. Each further failure
/// in a row doubles the delay, up to the longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    /// The policy, before any failure.
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, failures: 0 }
    }

    /// The delay that follows one more failure than these.
    #[must_use]
    pub fn after(&self, failures: u32) -> Duration {
        let factor = 1_u32.checked_shl(failures).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }

    /// The delay that follows the next failure.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.after(self.failures)
    }

    /// Counts one more failure. Returns the delay that follows it.
    pub fn failed(&mut self) -> Duration {
        let delay = self.delay();
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// An attempt succeeded: the next failure is a first one.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Lengthens a delay by up to a fifth, so that the daemons of a cluster do not all return to a
/// server at once. `chance` is any number.
#[must_use]
pub fn spread(delay: Duration, chance: u64) -> Duration {
    delay + delay / 1000 * u32::try_from(chance % 200).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{Backoff, spread};
    use std::time::Duration;

    #[test]
    fn the_delay_doubles_up_to_the_longest_and_a_success_makes_it_short_again() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));
        let delays: Vec<u64> = (0..6).map(|_| backoff.failed().as_secs()).collect();
        assert_eq!(delays, [1, 2, 4, 8, 10, 10]);
        backoff.reset();
        assert_eq!(backoff.delay(), Duration::from_secs(1));
        assert_eq!(backoff.after(3), Duration::from_secs(8));
        assert_eq!(backoff.after(u32::MAX), Duration::from_secs(10));
    }

    #[test]
    fn a_spread_delay_is_at_most_a_fifth_longer() {
        let second = Duration::from_secs(1);
        assert_eq!(spread(second, 0), second);
        assert_eq!(spread(second, 199), Duration::from_millis(1199));
        assert_eq!(spread(second, 200), second);
    }
}
