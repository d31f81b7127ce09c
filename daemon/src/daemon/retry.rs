//! What is done when a recording cannot begin: what has recorded before is recorded again, and
//! where that is refused, too, it is tried again later. A host can refuse a configuration that is
//! right, such as a frequency above `kernel.perf_event_max_sample_rate`, and be short of something
//! for a while.

use perfusion_model::backoff::Backoff;
use std::time::{Duration, Instant};

/// Pause after the first failure; it doubles.
const FIRST: Duration = Duration::from_secs(1);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(60);

/// What has recorded last, and since when nothing does.
#[derive(Debug)]
pub struct Retry<C> {
    good: Option<C>,
    backoff: Backoff,
    /// When it is tried again, after a failure.
    next: Option<Instant>,
}

/// What is done after a failure.
#[derive(Debug, PartialEq, Eq)]
pub enum RetryStep<C> {
    /// This is recorded, which has recorded before.
    As(C),
    /// It is tried again after this.
    In(Duration),
}

impl<C> Default for Retry<C> {
    fn default() -> Self {
        Self { good: None, backoff: Backoff::new(FIRST, LONGEST), next: None }
    }
}

impl<C: Clone + PartialEq> Retry<C> {
    /// True when it is time to try.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// A recording has begun, with this.
    pub fn begun(&mut self, with: C) {
        self.good = Some(with);
        self.anew();
    }

    /// Whatever failed may be another now: the next try is due.
    pub fn anew(&mut self) {
        self.backoff.reset();
        self.next = None;
    }

    /// None could begin with this.
    pub fn failed(&mut self, with: &C, now: Instant) -> RetryStep<C> {
        if let Some(good) = self.good.as_ref().filter(|good| *good != with) {
            return RetryStep::As(good.clone());
        }
        let pause = self.backoff.failed();
        self.next = Some(now + pause);
        RetryStep::In(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::{LONGEST, Retry, RetryStep};
    use std::time::{Duration, Instant};

    #[test]
    fn what_has_recorded_before_is_recorded_again() {
        let (mut retry, now) = (Retry::default(), Instant::now());
        retry.begun("old");
        assert_eq!(retry.failed(&"new", now), RetryStep::As("old"));
        assert!(retry.is_due(now));
        // That is refused, too.
        assert_eq!(retry.failed(&"old", now), RetryStep::In(Duration::from_secs(1)));
        assert!(!retry.is_due(now));
        retry.begun("old");
        retry.begun("newer");
        assert_eq!(retry.failed(&"old", now), RetryStep::As("newer"));
    }

    #[test]
    fn where_nothing_has_recorded_it_is_tried_less_and_less_often() {
        let (mut retry, mut now) = (Retry::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert!(retry.is_due(now));
            let RetryStep::In(pause) = retry.failed(&"new", now) else {
                unreachable!("there is nothing before")
            };
            assert!(!retry.is_due(now + pause - Duration::from_millis(1)));
            now += pause;
            pauses.push(pause.as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, LONGEST.as_secs()]);
        // It was switched off and on, or the configuration was read again.
        retry.failed(&"new", now);
        retry.anew();
        assert!(retry.is_due(now));
        assert_eq!(retry.failed(&"new", now), RetryStep::In(Duration::from_secs(1)));
    }
}
