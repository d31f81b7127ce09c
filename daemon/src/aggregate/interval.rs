//! How sure an estimate from sampled objects is.
//!
//! An object that was in the sample with probability π stands for 1/π objects (Horvitz–Thompson). When objects are chosen independently, the
//! estimate T = Σ x/π of a total has the variance V = Σ (x/π)²·(1−π), estimated here from the sample itself. A sample of few objects is far from a
//! normal distribution, so T is taken for T/m times a Poisson count of m = T²/V effective observations, whose 95 % interval is that
//! of Jeffreys (Gamma(m + ½)): on average over true values it covers them as often as it says, from a handful of objects on. Of objects that are
//! nearly all seen, which make many effective observations, one may be missing all the same: the upper end is at least that of a
//! gamma distribution with the mean and the variance that half an object more would make (Fay and Feuer, 1997, whose whole object is for at
//! least 95 % always).

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
    /// The total `value` of objects that are alike, of which `seen` were in the sample and stand for `objects`.
    #[must_use]
    pub fn of_alike(value: f64, seen: f64, objects: f64) -> Self {
        let missed = if objects > seen { 1.0 - seen / objects } else { 0.0 };
        let variance = if seen > 0.0 { value * value / seen * missed } else { 0.0 };
        Self { value, variance, seen }
    }

    /// The sum of two totals whose errors are independent.
    pub fn add(&mut self, other: Self) {
        self.value += other.value;
        self.variance += other.variance;
        self.seen += other.seen;
    }

    /// The 95 % interval. `at_least` is what was seen itself.
    #[must_use]
    pub fn interval95(self, at_least: f64) -> Interval {
        let sure = self.value.max(at_least);
        if self.variance <= 0.0 || self.value <= 0.0 {
            return Interval { low: sure, high: sure };
        }
        let effective = self.value * self.value / self.variance;
        let end = |z| self.value / effective * gamma_quantile(effective + 0.5, z);
        // One sampled object more than there were by half.
        let more = 1.0 + 0.5 / self.seen.max(1.0);
        let one_missing = self.value / effective * gamma_quantile(effective * more, NORMAL_95);
        Interval { low: end(-NORMAL_95).max(at_least), high: end(NORMAL_95).max(one_missing).max(sure) }
    }
}

impl Interval {
    /// True when `value` is inside.
    #[must_use]
    pub fn holds(self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// The quantile of Gamma(shape, 1) that belongs to the standard normal quantile `z` (Wilson and Hilferty, 1931): within 2 % of its distance
/// from the mean for shapes of 1.5 and more.
fn gamma_quantile(shape: f64, z: f64) -> f64 {
    let ninth = 1.0 / (9.0 * shape);
    shape * (1.0 - ninth + z * ninth.sqrt()).max(0.0).powi(3)
}

#[cfg(test)]
mod tests {
    use super::{Estimate, NORMAL_95, gamma_quantile};

    /// χ² with 2·shape degrees of freedom is 2·Gamma(shape): printed tables of χ² at 0.025 and 0.975.
    #[test]
    fn quantiles_agree_with_tables_of_chi_squared() {
        for (degrees, low, high) in [(3.0, 0.216, 9.348), (10.0, 3.247, 20.483), (40.0, 24.433, 59.342)] {
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
