//! Exceptions and contentions sum to what their runtime counted.
//!
//! A shim counts each of them and tells of some, chosen by chance, with a stack. Each that was told
//! of stands for itself and for others; how many others there were in all is known from the count.
//! So the others are scaled to it: what was told of one by one stays exact, and where chance chose,
//! the parts keep their proportions. The numbers become whole without a change of the sum.

use super::exceptions_and_contentions::{ExceptionSum, LockWait, LockWaitSum, Throw};
use perfusion_model::event::RegionId;
use perfusion_model::event::RuntimeEventCounts;
use std::collections::HashMap;

/// What runtimes counted in the window in progress.
#[derive(Debug, Default)]
pub struct RuntimeCounts {
    /// At the end of the window before: exceptions, contentions. Of regions that were there then.
    before: HashMap<RegionId, [u64; 2]>,
    /// Since then; `None` where the profile does not cover what was counted.
    window: HashMap<RegionId, [Option<u64>; 2]>,
}

/// What a runtime counted and nothing was told of: exceptions, contentions.
pub(crate) type Unsampled = (RegionId, [u64; 2]);

impl RuntimeCounts {
    /// A window ends with these counts.
    pub fn count(&mut self, counts: &[RuntimeEventCounts]) {
        for RuntimeEventCounts { region, counts, covered } in counts {
            let before = self.before.get(region).copied().unwrap_or_default();
            let sums = self.window.entry(*region).or_insert([Some(0); 2]);
            for (((sum, now), before), covered) in
                sums.iter_mut().zip(counts).zip(before).zip(covered)
            {
                let since = now.saturating_sub(before);
                *sum = sum.filter(|_| *covered).map(|sum| sum.saturating_add(since));
            }
        }
        self.before = counts.iter().map(|of| (of.region, of.counts)).collect();
    }

    /// Makes the sums of the window that ends what was counted. Answers what nothing was told of.
    pub fn complete(
        &mut self,
        throws: &mut HashMap<Throw, ExceptionSum>,
        waits: &mut HashMap<LockWait, LockWaitSum>,
    ) -> Vec<Unsampled> {
        let mut by_region: HashMap<RegionId, (Vec<&mut ExceptionSum>, Vec<&mut LockWaitSum>)> =
            HashMap::new();
        for (throw, sum) in throws {
            by_region.entry(throw.place.region).or_default().0.push(sum);
        }
        for (wait, sum) in waits {
            by_region.entry(wait.place.region).or_default().1.push(sum);
        }
        let mut unsampled = Vec::new();
        for (region, [thrown, waited]) in self.window.drain() {
            let (throws, waits) = by_region.remove(&region).unwrap_or_default();
            let rest = [
                thrown.map_or(0, |total| fit(throws, total)),
                waited.map_or(0, |total| fit(waits, total)),
            ];
            if rest != [0; 2] {
                unsampled.push((region, rest));
            }
        }
        unsampled.sort_by_key(|(region, _)| region.0);
        unsampled
    }
}

/// A sum that is an estimate.
trait SumFields {
    /// How many, and how many of them were told of themselves.
    fn parts(&self) -> (f64, f64);
    /// What was told of counts `told` times, the others `others` times; in number they are `count`.
    fn set(&mut self, count: f64, told: f64, others: f64);
}

impl SumFields for ExceptionSum {
    fn parts(&self) -> (f64, f64) {
        (self.count, self.told)
    }

    fn set(&mut self, count: f64, _: f64, _: f64) {
        self.count = count;
    }
}

impl SumFields for LockWaitSum {
    fn parts(&self) -> (f64, f64) {
        (self.count, self.told)
    }

    fn set(&mut self, count: f64, told: f64, others: f64) {
        self.count = count;
        self.ns = self.told_ns * told + (self.ns - self.told_ns).max(0.0) * others;
    }
}

/// Scales `sums` to `total`, in whole numbers. Answers the total where there is no sum to scale.
fn fit<T: SumFields>(mut sums: Vec<&mut T>, total: u64) -> u64 {
    let all: f64 = sums.iter().map(|sum| sum.parts().0).sum();
    let told: f64 = sums.iter().map(|sum| sum.parts().1).sum();
    if told <= 0.0 {
        return total;
    }
    let (others, total) = ((all - told).max(0.0), total as f64);
    // Fewer counted than told of: by what came between the look at the counters and the window's
    // end.
    let (of_told, of_others) = if total >= told && others > 0.0 {
        (1.0, (total - told) / others)
    } else {
        (total / told, 0.0)
    };
    // What is whole already stays so: it comes before what is rounded.
    let is_estimate = |sum: &T| sum.parts().0 > sum.parts().1;
    sums.sort_by_key(|sum| is_estimate(sum));
    let (mut exact, mut given) = (0.0, 0.0);
    for sum in sums {
        let (count, told) = sum.parts();
        exact += told * of_told + (count - told).max(0.0) * of_others;
        let whole = (f64::round(exact) - given).max(0.0);
        given += whole;
        sum.set(whole, of_told, of_others);
    }
    0
}

#[cfg(test)]
mod tests {
    use super::super::exceptions_and_contentions::RuntimeEventSite;
    use super::*;
    use perfusion_model::labels::NameId;
    use perfusion_model::stack::StackId;
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    fn counts(region: u32, counts: [u64; 2]) -> RuntimeEventCounts {
        RuntimeEventCounts { region: RegionId(region), counts, covered: [true; 2] }
    }

    fn throw(region: u32, tid: u32) -> Throw {
        let place = RuntimeEventSite {
            region: RegionId(region),
            tid,
            name: NameId::default(),
            stack: StackId(1),
        };
        Throw { place, type_name: None, message: None, rethrown: false }
    }

    /// As one told of one in eight by chance, and one that was told of each time.
    #[test]
    fn the_column_sums_to_the_count_and_what_was_told_one_by_one_stays() {
        let mut totals = RuntimeCounts::default();
        totals.count(&[counts(1, [1_633, 0])]);
        let estimate = ExceptionSum { count: 1_445.0, told: 200.0 };
        let exact = ExceptionSum { count: 20.0, told: 20.0 };
        let mut throws = HashMap::from([(throw(1, 1), estimate), (throw(1, 2), exact)]);
        assert_eq!(totals.complete(&mut throws, &mut HashMap::new()), []);
        assert_eq!(throws[&throw(1, 1)].count, 1_613.0);
        assert_eq!(throws[&throw(1, 2)].count, 20.0);
    }

    #[test]
    fn a_wait_keeps_its_length_and_those_it_stands_for_are_scaled_with_it() {
        let mut totals = RuntimeCounts::default();
        totals.count(&[counts(1, [0, 30])]);
        let wait = |tid| LockWait { place: throw(1, tid).place, owner: None, held_at: None };
        let long = LockWaitSum { count: 10.0, ns: 1e9, told: 10.0, told_ns: 1e9 };
        let short = LockWaitSum { count: 8.0, ns: 800.0, told: 4.0, told_ns: 400.0 };
        let mut waits = HashMap::from([(wait(1), long), (wait(2), short)]);
        assert_eq!(totals.complete(&mut HashMap::new(), &mut waits), []);
        assert_eq!(waits[&wait(1)], long);
        assert_eq!(waits[&wait(2)], LockWaitSum { count: 20.0, ns: 2_000.0, ..short });
    }

    #[test]
    fn what_nothing_was_told_of_is_answered_and_what_is_not_covered_is_left() {
        let mut totals = RuntimeCounts::default();
        let uncovered = RuntimeEventCounts { covered: [false, true], ..counts(3, [9, 4]) };
        totals.count(&[counts(1, [5, 0]), counts(2, [0, 0]), uncovered]);
        let told = ExceptionSum { count: 2.0, told: 1.0 };
        let mut throws = HashMap::from([(throw(3, 1), told)]);
        let unsampled = totals.complete(&mut throws, &mut HashMap::new());
        assert_eq!(unsampled, [(RegionId(1), [5, 0]), (RegionId(3), [0, 4])]);
        assert_eq!(throws[&throw(3, 1)], told);
        // Counts are of the window: what was counted before is not counted again.
        totals.count(&[counts(1, [7, 0]), counts(3, [9, 4])]);
        assert_eq!(
            totals.complete(&mut HashMap::new(), &mut HashMap::new()),
            [(RegionId(1), [2, 0])]
        );
    }

    proptest! {
        #[test]
        fn the_sum_is_the_count_whatever_was_told(
            rows in prop::collection::vec((1u32..50, 0u32..400), 1..40),
            more in 0u64..100_000,
        ) {
            let told: u64 = rows.iter().map(|(told, _)| u64::from(*told)).sum();
            let mut sums: Vec<ExceptionSum> = rows
                .iter()
                .map(|&(told, others)| {
                    let count = f64::from(told + others);
                    ExceptionSum { count, told: f64::from(told) }
                })
                .collect();
            prop_assert_eq!(fit(sums.iter_mut().collect(), told + more), 0);
            let sum: f64 = sums.iter().map(|sum| sum.count).sum();
            prop_assert_eq!(sum, (told + more) as f64);
            prop_assert!(sums.iter().all(|sum| sum.count.fract() == 0.0));
            let has_others = rows.iter().any(|(_, others)| *others > 0);
            prop_assert!(!has_others || sums.iter().all(|sum| sum.count >= sum.told));
        }
    }
}
