//! Sampled allocations and the sampled objects that are still alive, each standing for what was not sampled (D7, D8).

use crate::sample::stack::StackId;
use crate::source::{Allocation, AllocationKind, Heap, MonotonicNs, RegionId};
use std::collections::HashMap;

/// Probability with which the runtime samples each single byte (.NET 10 `AllocationSampled`, `docs/design/features/RandomizedAllocationSampling.md`
/// of dotnet/runtime): a mean distance of 100 KiB.
const SAMPLED_BYTE_PROBABILITY: f64 = 1.0 / 102_400.0;

/// What a sample stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weight {
    /// Objects.
    pub objects: f64,
    /// Bytes.
    pub bytes: f64,
}

/// The weight of one sampled allocation of `size` bytes. `AllocationSampled`: the object was chosen with probability 1−q^size, so
/// it stands for the inverse; unbiased. `AllocationTick`: it stands for the bytes since the last tick, as the event says; biased where
/// allocations are in step with the stride.
#[must_use]
pub fn weight(kind: AllocationKind, size: u64) -> Weight {
    let size = size.max(1) as f64;
    match kind {
        AllocationKind::Sampled => {
            // 1 − q^size through expm1/ln_1p: the direct form loses all digits for small objects.
            let chosen = -(size * (-SAMPLED_BYTE_PROBABILITY).ln_1p()).exp_m1();
            Weight { objects: 1.0 / chosen, bytes: size / chosen }
        }
        AllocationKind::Tick { amount } => {
            let bytes = (amount as f64).max(size);
            Weight { objects: bytes / size, bytes }
        }
    }
}

/// What allocations are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// Region the sample came through; with `type_id` it names the type.
    pub region: RegionId,
    /// Allocating thread.
    pub tid: u32,
    /// Allocation stack.
    pub stack: StackId,
    /// ClassID.
    pub type_id: u64,
    /// Which heap.
    pub heap: Heap,
}

/// A sampled object that was alive at the last collection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LiveObject {
    /// Where and what.
    pub site: Site,
    /// What it stands for.
    pub weight: Weight,
    /// When it was allocated.
    pub born: MonotonicNs,
    /// Generation at the last collection; 0 before the first.
    pub generation: u8,
}

/// Allocations of a window, and the objects that live on across windows.
#[derive(Default)]
pub struct Allocations {
    sites: HashMap<Site, Weight>,
    /// By region and sample: one region's end costs nothing of the others'.
    live: HashMap<RegionId, HashMap<u64, LiveObject>>,
    untracked: u64,
    ticks: u64,
}

impl Allocations {
    /// One sampled allocation with its finished stack.
    pub fn allocated(
        &mut self,
        region: RegionId,
        time: MonotonicNs,
        allocation: &Allocation,
        stack: StackId,
    ) {
        let site =
            Site { region, tid: allocation.tid, stack, type_id: allocation.type_id, heap: allocation.heap };
        let weight = weight(allocation.kind, allocation.size);
        self.ticks += u64::from(matches!(allocation.kind, AllocationKind::Tick { .. }));
        let total = self.sites.entry(site).or_default();
        total.objects += weight.objects;
        total.bytes += weight.bytes;
        if allocation.tracked {
            let object = LiveObject { site, weight, born: time, generation: 0 };
            self.live.entry(region).or_default().insert(allocation.sample, object);
        } else {
            self.untracked += 1;
        }
    }

    /// These sampled objects were collected.
    pub fn dead(&mut self, region: RegionId, samples: &[u64]) {
        let Some(live) = self.live.get_mut(&region) else { return };
        for sample in samples {
            live.remove(sample);
        }
    }

    /// These sampled objects survived into this generation.
    pub fn alive(&mut self, region: RegionId, samples: &[(u64, u8)]) {
        let Some(live) = self.live.get_mut(&region) else { return };
        for (sample, generation) in samples {
            if let Some(object) = live.get_mut(sample) {
                object.generation = *generation;
            }
        }
    }

    /// The process is gone, and its heap with it.
    pub fn region_gone(&mut self, region: RegionId) {
        self.live.remove(&region);
    }

    /// Allocation totals by site.
    pub fn sites(&self) -> impl Iterator<Item = (&Site, &Weight)> {
        self.sites.iter()
    }

    /// Sampled objects alive as far as known.
    pub fn live(&self) -> impl Iterator<Item = &LiveObject> {
        self.live.values().flat_map(HashMap::values)
    }

    /// Samples that came from `AllocationTick`, whose estimates may be biased.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Samples without a weak handle (all handles in use, or a runtime before .NET 7): absent from the live heap.
    #[must_use]
    pub fn untracked(&self) -> u64 {
        self.untracked
    }
}

/// Age in seconds rounded down to a power of two, 0 below one second: bounds the number of label values (D10).
#[must_use]
pub fn age_bucket_seconds(born: MonotonicNs, now: MonotonicNs) -> u64 {
    let seconds = now.0.saturating_sub(born.0) / 1_000_000_000;
    if seconds == 0 { 0 } else { 1 << seconds.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::{Allocations, age_bucket_seconds, weight};
    use crate::sample::stack::StackId;
    use crate::source::{Allocation, AllocationKind, Heap, MonotonicNs, RegionId, UserContext};

    fn allocation(sample: u64, size: u64, kind: AllocationKind) -> Allocation {
        Allocation {
            sample,
            tid: 1,
            type_id: 2,
            size,
            heap: Heap::Small,
            kind,
            tracked: true,
            user: UserContext::default(),
        }
    }

    /// The expectation of the estimator, summed over the choice's own probability, is the truth for every size.
    #[test]
    fn the_sampled_weight_is_the_inverse_of_the_inclusion_probability() {
        for size in [24u64, 100, 1_000, 102_400, 1_000_000] {
            let included = 1.0 - (1.0 - 1.0 / 102_400.0_f64).powf(size as f64);
            let w = weight(AllocationKind::Sampled, size);
            assert!((w.objects * included - 1.0).abs() < 1e-6, "{size}");
            assert!((w.bytes * included - size as f64).abs() < size as f64 * 1e-6, "{size}");
        }
    }

    #[test]
    fn a_tick_stands_for_its_amount() {
        let w = weight(AllocationKind::Tick { amount: 102_400 }, 1_024);
        assert_eq!((w.objects, w.bytes), (100.0, 102_400.0));
        assert_eq!(weight(AllocationKind::Tick { amount: 0 }, 0).objects, 1.0);
    }

    #[test]
    fn dead_objects_leave_and_survivors_age() {
        let (mut heap, region) = (Allocations::default(), RegionId(3));
        for sample in 0..4 {
            heap.allocated(
                region,
                MonotonicNs(5),
                &allocation(sample, 64, AllocationKind::Sampled),
                StackId(1),
            );
        }
        heap.dead(region, &[0, 2]);
        heap.dead(RegionId(9), &[1]);
        heap.alive(region, &[(1, 2), (77, 1)]);
        let mut generations: Vec<u8> = heap.live().map(|o| o.generation).collect();
        generations.sort_unstable();
        assert_eq!(generations, [0, 2]);
        heap.region_gone(region);
        assert_eq!(heap.live().count(), 0);
        assert_eq!(heap.sites().count(), 1);
    }

    #[test]
    fn ages_are_powers_of_two() {
        let s = |n: u64| MonotonicNs(n * 1_000_000_000);
        assert_eq!([0, 1, 2, 3, 4, 31].map(|n| age_bucket_seconds(s(0), s(n))), [0, 1, 2, 2, 4, 16]);
        assert_eq!(age_bucket_seconds(s(9), s(1)), 0);
    }
}
