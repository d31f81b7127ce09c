//! Which of many events are told of: all while they are few, by chance when they are many. With what probability follows from how many came
//! before, never from what was chosen, so an event that was chosen stands for the inverse without bias.

use crate::repeat::mix;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use profiler_protocol::record::MAX_LEVEL;

/// A period's length is 2³⁰ ns, a little more than a second.
const PERIOD_BITS: u32 = 30;

/// How often a kind of event comes. At level n one in 2ⁿ is chosen.
pub struct Thin {
    period: AtomicU64,
    /// Events in this period.
    count: AtomicU32,
    /// The level at which this period began.
    begin: AtomicU32,
    /// Events ever: the draws.
    drawn: AtomicU64,
}

impl Thin {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        let (period, drawn) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { period, count: AtomicU32::new(0), begin: AtomicU32::new(0), drawn }
    }

    /// Counts an event and answers its level. Of a period `all` are told of whatever comes, and when many times as many come period after period, between
    /// half as many and as many.
    pub fn level(&self, now_ns: u64, all: u32) -> u8 {
        let period = now_ns >> PERIOD_BITS;
        let before = self.period.load(Ordering::Relaxed);
        // Relaxed throughout: whoever comes first begins the period, and a count that went to its neighbour does no harm.
        if before != period
            && self.period.compare_exchange(before, period, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            let counted = self.count.swap(0, Ordering::Relaxed);
            let next = before.wrapping_add(1) == period;
            let level = if next { level_of(counted.saturating_sub(1), all) } else { 0 };
            self.begin.store(u32::from(level), Ordering::Relaxed);
        }
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let begin = u8::try_from(self.begin.load(Ordering::Relaxed)).unwrap_or(MAX_LEVEL);
        level_of(count, all).max(begin).min(MAX_LEVEL)
    }

    /// Draws: true for one in 2^level.
    pub fn chosen(&self, level: u8, seed: u64) -> bool {
        let draw = mix(self.drawn.fetch_add(1, Ordering::Relaxed) ^ seed);
        let mask = 1u64.checked_shl(u32::from(level)).unwrap_or(0).wrapping_sub(1);
        draw & mask == 0
    }
}

/// The level when so many came before in a period.
fn level_of(count: u32, all: u32) -> u8 {
    let times = count.checked_div(all).unwrap_or(0);
    times.checked_ilog2().map_or(0, |bits| u8::try_from(bits).unwrap_or(MAX_LEVEL).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::{PERIOD_BITS, Thin, level_of};

    /// Sum of what the chosen of `count` events in each of `periods` stand for, and how many were chosen.
    fn told(thin: &Thin, seed: u64, periods: u64, count: u32) -> (u64, u64) {
        let (mut sum, mut chosen) = (0, 0);
        for period in 1..=periods {
            for _ in 0..count {
                let level = thin.level(period << PERIOD_BITS, 32);
                if thin.chosen(level, seed) {
                    sum += 1 << level;
                    chosen += 1;
                }
            }
        }
        (sum, chosen)
    }

    #[test]
    fn few_events_are_all_told_of() {
        assert_eq!(told(&Thin::new(), 1, 5, 32), (160, 160));
        assert_eq!(
            [0, 31, 32, 63, 64, 256, u32::MAX].map(|count| level_of(count, 32)),
            [0, 0, 1, 1, 2, 4, 27]
        );
    }

    #[test]
    fn many_events_are_stood_for_by_some() {
        // 10 periods of 25,000: the levels are 9 and 10. Of 40 such estimates the mean is right within four of its standard errors; one estimate
        // has a variance of at most Σ 2^10 = 2.6e8, so the mean of 40 an error of 2,530.
        let (mut sum, mut chosen) = (0, 0);
        for seed in 0..40 {
            let (told, number) = told(&Thin::new(), seed << 40, 10, 25_000);
            sum += told;
            chosen += number;
        }
        let mean = sum as f64 / 40.0;
        assert!((mean - 2.5e5).abs() < 4.0 * 2_530.0, "{mean}");
        assert!(chosen / 40 < 1_000, "{chosen}");
    }

    #[test]
    fn after_a_silence_it_begins_at_all_again() {
        let thin = Thin::new();
        for _ in 0..10_000 {
            thin.level(1 << PERIOD_BITS, 32);
        }
        assert_eq!(thin.level(2 << PERIOD_BITS, 32), 9);
        assert_eq!(thin.level(4 << PERIOD_BITS, 32), 0);
    }
}
