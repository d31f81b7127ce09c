//! Which of many events are told of: all while they are few, by chance when they are many. With
//! what probability follows from how many came before, never from what was chosen, so an event that
//! was chosen stands for the inverse without bias.

use crate::repeat::mix;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use profiler_protocol::live::MAX_LEVEL;

/// A period's length is 2³⁰ ns, a little more than a second.
const PERIOD_BITS: u32 = 30;

/// Which part of the ring events may use before chance chooses among them. With each further step
/// half as many are told of: some ten thousand can come before the reader does, in a burst or while
/// it has no CPU, and find room, and what was told of stands for them.
#[derive(Clone, Copy)]
pub(crate) enum RingShare {
    /// Half of it. Then steps of a twenty-fourth.
    Usual,
    /// Three quarters, for what is exact as long as each is told of. Then steps of a forty-eighth.
    Last,
}

impl RingShare {
    /// The least level while so many of the ring's units are in use. It follows from what was told
    /// of before, and not from whether this event is.
    #[must_use]
    pub(crate) fn level(self, used: u64, units: u64) -> u8 {
        let (parts, free) = match self {
            Self::Usual => (24u64, 12u64),
            Self::Last => (48, 36),
        };
        let part = used.saturating_mul(parts).checked_div(units).unwrap_or(0);
        u8::try_from(part.saturating_sub(free)).unwrap_or(MAX_LEVEL)
    }
}

/// How often a kind of event comes. At level n one in 2ⁿ is chosen.
pub(crate) struct Downsampler {
    period: AtomicU64,
    /// Events in this period.
    count: AtomicU32,
    /// The level at which this period began.
    begin: AtomicU32,
    /// Events ever: the draws.
    drawn: AtomicU64,
}

impl Downsampler {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        let (period, drawn) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { period, count: AtomicU32::new(0), begin: AtomicU32::new(0), drawn }
    }

    /// Counts an event and answers its level. All are told of while they do not come faster than
    /// `all` in a period. When many times as many come period after period it is between half as
    /// many and as many; of a period that follows on a quieter one, and of one whose many come
    /// late, it is `all` and half as many for each doubling. The level of the period before holds
    /// as long as this one's events come no less often: what follows on a burst is told of again.
    pub(crate) fn level(&self, now_ns: u64, all: u32) -> u8 {
        let period = now_ns >> PERIOD_BITS;
        let before = self.period.load(Ordering::Relaxed);
        // Relaxed throughout: whoever comes first begins the period, and a count that went to its
        // neighbour does no harm.
        if before != period
            && self
                .period
                .compare_exchange(before, period, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        {
            let counted = self.count.swap(0, Ordering::Relaxed);
            let next = before.wrapping_add(1) == period;
            let level = if next { level_of(counted.saturating_sub(1), all) } else { 0 };
            self.begin.store(u32::from(level), Ordering::Relaxed);
        }
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let begin = u8::try_from(self.begin.load(Ordering::Relaxed)).unwrap_or(MAX_LEVEL);
        let at_this_rate = level_of(whole_period(count, now_ns), all);
        level_of(count, all).max(begin.min(at_this_rate)).min(MAX_LEVEL)
    }

    /// Draws: true for one in 2^level.
    pub(crate) fn chosen(&self, level: u8, seed: u64) -> bool {
        let draw = mix(self.drawn.fetch_add(1, Ordering::Relaxed) ^ seed);
        let mask = 1u64.checked_shl(u32::from(level)).unwrap_or(0).wrapping_sub(1);
        draw & mask == 0
    }
}

/// How many come in a period that goes on as it began, with so many until now.
fn whole_period(count: u32, now_ns: u64) -> u32 {
    let elapsed = (now_ns & ((1 << PERIOD_BITS) - 1)).max(1);
    let count = (u64::from(count) << PERIOD_BITS).checked_div(elapsed).unwrap_or(0);
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The level when so many came before in a period.
fn level_of(count: u32, all: u32) -> u8 {
    let times = count.checked_div(all).unwrap_or(0);
    times
        .checked_ilog2()
        .map_or(0, |bits| u8::try_from(bits).unwrap_or(MAX_LEVEL).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::{Downsampler, PERIOD_BITS, RingShare, level_of};
    use proptest::prelude::{
        ProptestConfig, Strategy, prop, prop_assert, prop_assert_eq, proptest,
    };

    /// So many events, evenly spread over each of so many periods.
    fn even(periods: core::ops::Range<u64>, count: u64) -> impl Iterator<Item = u64> {
        let spread = move |n| (n << PERIOD_BITS) / count + (1 << PERIOD_BITS) / (2 * count);
        periods.flat_map(move |period| (0..count).map(move |n| (period << PERIOD_BITS) + spread(n)))
    }

    /// Levels of events at these times.
    fn levels(sampler: &Downsampler, all: u32, times: impl IntoIterator<Item = u64>) -> Vec<u8> {
        times.into_iter().map(|now_ns| sampler.level(now_ns, all)).collect()
    }

    /// What the chosen of these levels stand for, and how many are chosen.
    fn told(levels: &[u8], seed: u64) -> (u64, u64) {
        let sampler = Downsampler::new();
        let chosen = levels.iter().filter(|level| sampler.chosen(**level, seed));
        chosen.fold((0, 0), |(sum, count), level| (sum + (1 << level), count + 1))
    }

    /// Σ (2ⁿ − 1): the variance of what they stand for together.
    fn variance(levels: &[u8]) -> f64 {
        levels.iter().map(|level| f64::from(*level).exp2() - 1.0).sum()
    }

    #[test]
    fn few_events_are_all_told_of() {
        let at_once = (1..6_u64).flat_map(|period| [period << PERIOD_BITS; 32]);
        assert_eq!(levels(&Downsampler::new(), 32, at_once), [0; 160]);
        assert_eq!(
            [0, 31, 32, 63, 64, 256, u32::MAX].map(|count| level_of(count, 32)),
            [0, 0, 1, 1, 2, 4, 27]
        );
    }

    #[test]
    fn a_burst_finds_room() {
        const UNITS: u64 = 32_768;
        let levels = |room: RingShare| {
            [0, 12, 13, 18, 19, 24].map(|part| room.level(part * UNITS / 24 + 1, UNITS))
        };
        assert_eq!(levels(RingShare::Usual), [0, 0, 1, 6, 7, 12]);
        assert_eq!(levels(RingShare::Last), [0, 0, 0, 0, 2, 12]);
        // Of 4 to 12 KiB each, before anybody reads. 10,000 samples are 1 GB.
        for (seed, count) in (0..20).zip([500, 1_000, 4_000, 10_000].into_iter().cycle()) {
            let (sampler, mut used, mut sum, mut variance) = (Downsampler::new(), 0, 0.0, 0.0);
            for n in 0..count {
                let level = RingShare::Usual.level(used, UNITS);
                variance += f64::from(level).exp2() - 1.0;
                if sampler.chosen(level, seed << 40) {
                    used += 64 + n % 128;
                    sum += f64::from(level).exp2();
                }
            }
            assert!(used < UNITS * 31 / 32, "{used} of {count}");
            let error = sum - count as f64;
            assert!(
                error.abs() < 4.0 * variance.sqrt(),
                "{error} of {count}, ± {}",
                variance.sqrt()
            );
        }
    }

    #[test]
    fn many_events_are_stood_for_by_some() {
        for at_once in [true, false] {
            let times = even(1..11, 25_000)
                .map(|time| if at_once { time >> PERIOD_BITS << PERIOD_BITS } else { time });
            let levels = levels(&Downsampler::new(), 32, times);
            let (mut sum, mut chosen) = (0, 0);
            for seed in 0..40 {
                let (stands_for, number) = told(&levels, seed << 40);
                sum += stands_for;
                chosen += number;
            }
            // Within four standard errors of the mean of 40.
            let (mean, stderr) = (sum as f64 / 40.0, (variance(&levels) / 40.0).sqrt());
            assert!((mean - 2.5e5).abs() < 4.0 * stderr, "{mean} ± {stderr}");
            // One in 2^10 of each but the first period, which begins with all.
            let (first, others) =
                (32.0 + 16.0 * (25_000.0 / 32.0_f64).log2(), 9.0 * 25_000.0 / 1024.0);
            let number = f64::from(u32::try_from(chosen).unwrap()) / 40.0;
            assert!(
                (0.8..1.2).contains(&(number / (first + others))),
                "{number} of {first} and {others}"
            );
        }
    }

    #[test]
    fn after_a_burst_few_events_are_all_told_of_again() {
        for burst in [even(1..2, 50_000).collect::<Vec<_>>(), vec![1 << PERIOD_BITS; 50_000]] {
            for few in [1, 2, 100, 511] {
                let sampler = Downsampler::new();
                assert_eq!(levels(&sampler, 512, burst.iter().copied()).last(), Some(&7));
                let next = levels(&sampler, 512, even(2..4, few));
                assert!(next.iter().all(|level| *level == 0), "{few}: {next:?}");
            }
            // As long as it goes on it is the same burst.
            let sampler = Downsampler::new();
            levels(&sampler, 512, burst);
            let on = levels(&sampler, 512, even(2..3, 50_000));
            assert_eq!(
                (on[0], &on[2..10_000]),
                (0, &[7; 9_998][..]),
                "it is not known of the first"
            );
        }
    }

    #[test]
    fn after_a_silence_it_begins_at_all_again() {
        let sampler = Downsampler::new();
        for _ in 0..10_000 {
            sampler.level(1 << PERIOD_BITS, 32);
        }
        sampler.level(2 << PERIOD_BITS, 32);
        assert_eq!(sampler.level(2 << PERIOD_BITS, 32), 9);
        sampler.level(4 << PERIOD_BITS, 32);
        assert_eq!(sampler.level(4 << PERIOD_BITS, 32), 0);
    }

    /// Bursts: how long after the one before, how many events, and how far apart.
    fn bursts() -> impl Strategy<Value = Vec<u64>> {
        let burst = (
            0..3_000_000_000_u64,
            1..1_000_u64,
            prop::sample::select(vec![0, 100, 10_000, 1_000_000]),
        );
        prop::collection::vec(burst, 1..8).prop_map(|bursts| {
            let mut now = 0;
            let mut times = Vec::new();
            for (silence, count, apart) in bursts {
                now += silence;
                times.extend((0..count).map(|n| now + n * apart));
                now += count * apart;
            }
            times
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_told_stands_for_all_without_bias_however_they_come(
            times in bursts(),
            all in 1_u32..1_000,
        ) {
            const SEEDS: u64 = 16;
            let of = levels(&Downsampler::new(), all, times.iter().copied());
            // Choosing in between changes nothing: else what is told would depend on what was.
            let choosing = Downsampler::new();
            for (now_ns, level) in times.iter().zip(&of) {
                let again = choosing.level(*now_ns, all);
                prop_assert_eq!(again, *level);
                choosing.chosen(again, now_ns >> 1);
            }
            let sum: u64 = (0..SEEDS).map(|seed| told(&of, seed << 40).0).sum();
            let most = of.iter().max().map_or(1.0, |level| f64::from(*level).exp2());
            let error = sum as f64 - (SEEDS * times.len() as u64) as f64;
            let stderr = (SEEDS as f64 * variance(&of)).sqrt();
            // Six standard errors, and what a few more of the rarest make.
            prop_assert!(error.abs() <= 6.0 * stderr + 4.0 * most, "{} ± {}", error, stderr);
        }
    }
}
