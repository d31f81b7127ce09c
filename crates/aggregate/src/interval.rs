//! How sure an estimate from sampled objects is.
//!
//! An object that was in the sample with probability π stands for 1/π objects (Horvitz–Thompson).
//! When objects are chosen independently, the estimate T = Σ x/π of a total has the variance V = Σ
//! (x/π)²·(1−π), estimated here from the sample itself. A sample of few objects is far from a
//! normal distribution, so T is taken for T/m times a Poisson count of m = T²/V effective
//! observations, whose 95 % interval is that of Jeffreys (Gamma(m + ½)): on average over true
//! values it covers them as often as it says, from a handful of objects on. Of objects that are
//! nearly all seen, which make many effective observations, one may be missing all the same: the
//! upper end is at least that of a gamma distribution with the mean and the variance that half an
//! object more would make (Fay and Feuer, 1997, whose whole object is for at least 95 % always).
//! That object is one that would have stood for as much as any could have: where objects were
//! chosen with one probability in a quiet second and with a hundredth of it in a busy one, a type
//! of which only the first were seen may have had many of the others.

/// Half the width of a 95 % interval of a normal distribution, in standard deviations.
const NORMAL_95: f64 = 1.959_964;

/// A total, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The total.
    pub value: f64,
    /// Its variance.
    pub variance: f64,
    /// Objects that were seen.
    pub seen: f64,
    /// What one that was not seen may have stood for at the most; 0 where all were chosen alike.
    pub missed: f64,
}

/// Lower and upper end of an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Estimate {
    /// The total `value` of objects that are alike, of which `seen` were in the sample and stand
    /// for `objects`.
    #[must_use]
    pub fn of_alike(value: f64, seen: f64, objects: f64) -> Self {
        let missed = if objects > seen { 1.0 - seen / objects } else { 0.0 };
        let variance = if seen > 0.0 { value * value / seen * missed } else { 0.0 };
        Self { value, variance, seen, missed: 0.0 }
    }

    /// The sum of two totals whose errors are independent.
    pub fn add(&mut self, other: Self) {
        self.value += other.value;
        self.variance += other.variance;
        self.seen += other.seen;
        self.missed = self.missed.max(other.missed);
    }

    /// The 95 % interval. `at_least` is what was seen itself.
    #[must_use]
    pub fn interval95(self, at_least: f64) -> Interval {
        let sure = self.value.max(at_least);
        if self.variance <= 0.0 || self.value <= 0.0 {
            return Interval {
                low: sure,
                high: self.with_half_of(self.missed, NORMAL_95).max(sure),
            };
        }
        // What one that was seen stands for.
        let one = self.variance / self.value;
        // One sampled object more than there were by half.
        let more = 1.0 + 0.5 / self.seen.max(1.0);
        let one_missing = one * gamma_quantile(self.value / one * more, NORMAL_95);
        Interval {
            low: self.with_half_of(one, -NORMAL_95).max(at_least),
            high: self.with_half_of(one.max(self.missed), NORMAL_95).max(one_missing).max(sure),
        }
    }

    /// An end of the gamma distribution that has mean and variance of this and of half an object
    /// more, which stands for `one`; where all stand for as much that is Gamma(m + ½).
    fn with_half_of(self, one: f64, z: f64) -> f64 {
        let (mean, variance) = (self.value + one / 2.0, self.variance + one * one / 2.0);
        if mean > 0.0 && variance > 0.0 {
            variance / mean * gamma_quantile(mean * mean / variance, z)
        } else {
            0.0
        }
    }
}

impl Interval {
    /// True when `value` is inside.
    #[must_use]
    pub fn holds(self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// The quantile of Gamma(shape, 1) that belongs to the standard normal quantile `z` (Wilson and
/// Hilferty, 1931): within 2 % of its distance from the mean for shapes of 1.5 and more.
fn gamma_quantile(shape: f64, z: f64) -> f64 {
    let ninth = 1.0 / (9.0 * shape);
    shape * (1.0 - ninth + z * ninth.sqrt()).max(0.0).powi(3)
}

#[cfg(test)]
mod tests {
    use super::{Estimate, NORMAL_95, gamma_quantile};

    /// χ² with 2·shape degrees of freedom is 2·Gamma(shape): printed tables of χ² at 0.025 and
    /// 0.975.
    #[test]
    fn quantiles_agree_with_tables_of_chi_squared() {
        for (degrees, low, high) in
            [(3.0, 0.216, 9.348), (10.0, 3.247, 20.483), (40.0, 24.433, 59.342)]
        {
            for (z, truth) in [(-NORMAL_95, low), (NORMAL_95, high)] {
                let found = 2.0 * gamma_quantile(degrees / 2.0, z);
                assert!(
                    (found - truth).abs() <= 0.02 * (truth - degrees).abs(),
                    "{degrees}: {found} {truth}"
                );
            }
        }
    }

    /// P(count) of a Poisson distribution with mean `mean`.
    fn poisson(mean: f64, count: u32) -> f64 {
        (1..=count).fold((-mean).exp(), |p, k| p * mean / f64::from(k))
    }

    #[test]
    fn intervals_cover_the_truth_as_often_as_they_say() {
        // 1 of 1,000 objects is sampled; all true totals for which 4 to 60 are expected.
        let (mut covered, mut cells) = (0.0, 0.0);
        for tenths in 40..600 {
            let truth = f64::from(tenths) / 10.0;
            for count in 0..200u32 {
                let seen = f64::from(count);
                let interval = Estimate::of_alike(seen * 1e3, seen, seen * 1e3).interval95(seen);
                if interval.holds(truth * 1e3) {
                    covered += poisson(truth, count);
                }
            }
            cells += 1.0;
        }
        let share: f64 = covered / cells;
        assert!((0.94..0.96).contains(&share), "{share}");
    }

    /// Six objects come while each is seen, and 64 to 512 while one in 64 is.
    #[test]
    fn what_was_seen_in_a_quiet_moment_does_not_hide_what_was_not_in_a_busy_one() {
        let covered = |missed: f64, busy: f64| {
            let of = |quiet: u32, seen: u32| {
                let (quiet, seen) = (f64::from(quiet), f64::from(seen));
                let value = 1e3 * (quiet + 64.0 * seen);
                let variance = 1e6 * (quiet + 64.0 * 64.0 * seen);
                Estimate { value, variance, seen: quiet + seen, missed }.interval95(quiet)
            };
            let truth = 1e3 * (6.0 + 64.0 * busy);
            let all = (0..40).flat_map(|quiet| (0..40).map(move |seen| (quiet, seen)));
            let holds = all.filter(|&(quiet, seen)| of(quiet, seen).holds(truth));
            holds.map(|(quiet, seen)| poisson(6.0, quiet) * poisson(busy, seen)).sum::<f64>()
        };
        for busy in [1.0, 2.0, 4.0, 8.0] {
            let (without, with) = (covered(0.0, busy), covered(64_000.0, busy));
            assert!(with > 0.93 && without <= with, "{busy}: {without} {with}");
        }
        assert!(
            covered(0.0, 1.0) < 0.7,
            "none of the busy moment's is seen in every third recording: {}",
            covered(0.0, 1.0)
        );
        // Where all stand for the same nothing changes.
        let alike = Estimate::of_alike(7e3, 7.0, 7e3);
        let (old, new) = (alike.interval95(7.0), Estimate { missed: 1e3, ..alike }.interval95(7.0));
        assert!((new.high / old.high - 1.0).abs() < 0.01 && new.low == old.low, "{old:?} {new:?}");
    }

    #[test]
    fn what_was_seen_completely_is_sure() {
        let all = Estimate::of_alike(300.0, 3.0, 3.0).interval95(300.0);
        assert_eq!((all.low, all.high), (300.0, 300.0));
        let none = Estimate::default().interval95(0.0);
        assert_eq!((none.low, none.high), (0.0, 0.0));
    }

    #[test]
    fn many_observations_make_a_normal_interval() {
        let interval = Estimate::of_alike(1e6, 1e4, 1e6).interval95(1e4);
        let half = NORMAL_95 * 1e6 / 100.0 * 0.99_f64.sqrt();
        assert!((interval.low - (1e6 - half)).abs() < 300.0, "{interval:?}");
        assert!((interval.high - (1e6 + half)).abs() < 300.0, "{interval:?}");
    }
}
