//! Sampled allocations and the sampled objects that are still alive, each standing for what was not
//! sampled.

mod buckets;
mod levels;
mod live;
mod sites;
mod weight;

pub use buckets::{age_bucket_seconds, count_bucket, has_survived, size_class};
pub use live::LiveObject;
pub use sites::Site;
pub use weight::{SAMPLED_BYTE_PROBABILITY, Weight, weight};

use live::LiveObjects;
use perfusion_model::event::{Allocation, AllocationKind, MonotonicNs, RegionId};
use perfusion_model::labels::{NameId, Sampling};
use perfusion_model::stack::StackId;
use sites::SiteTotals;

/// Sites, and living objects, kept of one region at most; a process that invents samples takes its
/// share. See [`SampledAllocations::expect`].
const MAX_OF_REGION: usize = 1 << 17;
/// The most of all regions.
const MAX_OF_ALL: usize = 1 << 20;

/// Allocations of a window, and the objects that live on across windows.
#[derive(Default)]
pub struct SampledAllocations {
    sites: SiteTotals,
    live: LiveObjects,
    ticks: u64,
    large: u64,
}

impl SampledAllocations {
    /// Libraries were asked for so many living objects at a time, and in windows for so many
    /// samples in a second. A region that has more has invented them, and all of them are named at
    /// the end of a window.
    pub fn expect(&mut self, live_objects: u32, samples: Option<u32>) {
        self.sites.expect(samples);
        self.live.expect(live_objects);
    }

    /// One sampled allocation with its finished stack, and what its thread was called.
    pub fn allocated(
        &mut self,
        region: RegionId,
        time: MonotonicNs,
        allocation: &Allocation,
        (stack, name): (StackId, NameId),
    ) {
        let (tid, type_id, heap) = (allocation.tid, allocation.type_id, allocation.heap);
        let sampling = match allocation.kind {
            AllocationKind::Exact if allocation.level == 0 => Sampling::Exact,
            AllocationKind::Exact | AllocationKind::Sampled | AllocationKind::Chosen { .. } => {
                Sampling::Random
            }
            AllocationKind::Tick { .. } => Sampling::Stride,
        };
        let size_class = size_class(allocation.size);
        let site = Site { region, tid, name, stack, type_id, heap, size_class, sampling };
        let weight = weight(allocation.kind, allocation.size, allocation.level);
        self.ticks += u64::from(sampling == Sampling::Stride);
        self.large += u64::from(allocation.kind == AllocationKind::Exact);
        self.sites.add(site, weight, allocation.level);
        // Where the sum is of the region's rest, the object still has its own site: it is of later
        // windows, too.
        self.live.allocated(time, allocation, site, weight);
    }

    /// These sampled objects were collected.
    pub fn dead(&mut self, region: RegionId, samples: &[u64]) {
        self.live.dead(region, samples);
    }

    /// These sampled objects survived into this generation.
    pub fn alive(&mut self, region: RegionId, samples: &[(u64, u8)]) {
        self.live.alive(region, samples);
    }

    /// These are not watched any more: those that are were above the level all the time.
    pub fn dropped(&mut self, region: RegionId, level: u8, samples: &[u64]) {
        self.live.dropped(region, level, samples);
    }

    /// A collection of `generation` and those below it begins.
    pub fn collection(&mut self, region: RegionId, generation: u8, time: MonotonicNs) {
        self.live.collection(region, generation, time);
    }

    /// Collections that looked at the object and left it alive.
    #[must_use]
    pub fn survived(&self, object: &LiveObject) -> u32 {
        self.live.survived(object)
    }

    /// Full collections since the object has been in generation 2 or a heap of its own; `None`
    /// while it is not. The last may be going on still. Those that it survived before do not count:
    /// an object may stay young through any number of them, or be made young again.
    #[must_use]
    pub fn survived_old(&self, object: &LiveObject) -> Option<u32> {
        self.live.survived_old(object)
    }

    /// When the last full collection but one began: what was old by then is alive for sure, since
    /// the last may be going on still.
    #[must_use]
    pub fn proven_at(&self, region: RegionId) -> Option<MonotonicNs> {
        self.live.proven_at(region)
    }

    /// From now on objects of the region are watched, and of those that were before nothing is
    /// known any more.
    pub fn watched_from(&mut self, region: RegionId, time: MonotonicNs) {
        self.live.watched_from(region, time);
    }

    /// Since when objects of a region have been watched without a break.
    #[must_use]
    pub fn watched_since(&self, region: RegionId) -> Option<MonotonicNs> {
        self.live.watched_since(region)
    }

    /// The process is gone, and its heap with it.
    pub fn region_gone(&mut self, region: RegionId) {
        self.live.region_gone(region);
    }

    /// The next window begins: what was allocated is forgotten, what is alive stays. `carry` takes
    /// a stack over to it.
    pub fn next_window(&mut self, carry: &mut dyn FnMut(StackId) -> StackId) {
        self.sites.next_window();
        self.live.next_window(carry);
    }

    /// Of one in how many samples like the site's was told when that was least often in this
    /// window; `None` where of each.
    #[must_use]
    pub fn told_one_in(&self, site: &Site) -> Option<u64> {
        self.sites.told_one_in(site)
    }

    /// The same since its region's objects are watched.
    #[must_use]
    pub fn watched_one_in(&self, site: &Site) -> Option<u64> {
        self.live.watched_one_in(site)
    }

    /// How many large objects of the site's region are not watched, though no chance has left them
    /// out: some may live and not be known.
    #[must_use]
    pub fn unwatched(&self, site: &Site) -> Option<u64> {
        self.live.unwatched(site)
    }

    /// Allocation totals by site.
    pub fn sites(&self) -> impl Iterator<Item = (&Site, &Weight)> {
        self.sites.iter()
    }

    /// Sampled objects alive as far as known.
    pub fn live(&self) -> impl Iterator<Item = LiveObject> {
        self.live.iter()
    }

    /// Samples that came from `AllocationTick`, whose estimates may be biased.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    /// Large objects, of which the runtime tells one by one.
    #[must_use]
    pub fn large(&self) -> u64 {
        self.large
    }

    /// Samples counted under the rest of their region, and objects not followed, because there were
    /// too many.
    #[must_use]
    pub fn refused(&self) -> (u64, u64) {
        (self.sites.refused(), self.live.refused())
    }

    /// Samples without a weak handle (not chosen, all handles in use, or a runtime before .NET 7):
    /// absent from the live heap.
    #[must_use]
    pub fn untracked(&self) -> u64 {
        self.live.untracked()
    }
}

#[cfg(test)]
mod tests {
    use super::NameId;
    use super::{
        MAX_OF_REGION, SampledAllocations, Sampling, Site, age_bucket_seconds, has_survived,
        size_class, weight,
    };
    use perfusion_model::event::{
        Allocation, AllocationKind, HeapKind, MonotonicNs, RegionId, UserContext,
    };
    use perfusion_model::stack::{StackId, StackTable};
    use profiler_protocol::live;

    fn allocation(sample: u64, size: u64, kind: AllocationKind) -> Allocation {
        Allocation {
            sample,
            tid: 1,
            type_id: 2,
            size,
            heap: HeapKind::Small,
            kind,
            level: 0,
            watched: Some(0),
            user: UserContext::default(),
            seen: MonotonicNs(0),
        }
    }

    /// The expectation of the estimator, summed over the choice's own probability, is the truth for
    /// every size.
    #[test]
    fn the_sampled_weight_is_the_inverse_of_the_inclusion_probability() {
        for size in [24u64, 100, 1_000, 102_400, 1_000_000] {
            let included = 1.0 - (1.0 - 1.0 / 102_400.0_f64).powf(size as f64);
            let w = weight(AllocationKind::Sampled, size, 0);
            assert!((w.objects * included - 1.0).abs() < 1e-6, "{size}");
            assert!((w.bytes * included - size as f64).abs() < size as f64 * 1e-6, "{size}");
            // Chance had this many bytes to choose an object of 24 from.
            let w = weight(AllocationKind::Chosen { bytes: size }, 24, 0);
            assert!((w.objects * included - 1.0).abs() < 1e-6 && w.seen_bytes == 24, "{size}");
            assert!((w.bytes * included - 24.0).abs() < 1e-4, "{size}");
        }
    }

    /// Of both choices, the runtime's and the library's.
    #[test]
    fn a_downsampled_sample_stands_for_those_that_were_not_told() {
        for size in [24u64, 102_400, 1_000_000] {
            let (one, downsampled) = (
                weight(AllocationKind::Sampled, size, 0),
                weight(AllocationKind::Sampled, size, 3),
            );
            assert!((downsampled.objects / one.objects - 8.0).abs() < 1e-9, "{size}");
            assert!((downsampled.bytes / one.bytes - 8.0).abs() < 1e-9, "{size}");
            let missed = 1.0 - 1.0 / downsampled.objects;
            assert!(
                (downsampled.variance / (downsampled.bytes * downsampled.bytes * missed) - 1.0)
                    .abs()
                    < 1e-9,
                "{size}"
            );
            assert_eq!((downsampled.seen, downsampled.seen_bytes), (1, size));
        }
        let tick = weight(AllocationKind::Tick { amount: 102_400 }, 1_024, 2);
        assert_eq!((tick.objects, tick.bytes), (400.0, 409_600.0));
    }

    #[test]
    fn a_large_object_stands_for_itself_and_for_those_it_was_chosen_of() {
        let one = weight(AllocationKind::Exact, 85_000, 0);
        assert_eq!((one.objects, one.bytes, one.variance), (1.0, 85_000.0, 0.0));
        let chosen = weight(AllocationKind::Exact, 85_000, 3);
        assert_eq!((chosen.objects, chosen.bytes, chosen.seen_bytes), (8.0, 680_000.0, 85_000));
        // It was told of with a probability of 1/8.
        assert_eq!(chosen.variance, 680_000.0 * 680_000.0 * 7.0 / 8.0);
    }

    #[test]
    fn large_objects_are_exact_until_chance_has_a_part_in_it() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        for (sample, level) in [(1, 0), (2, 2)] {
            let large = allocation(sample, 100_000, AllocationKind::Exact);
            heap.allocated(
                region,
                MonotonicNs(5),
                &Allocation { heap: HeapKind::Large, level, ..large },
                (StackId(1), NameId::default()),
            );
        }
        let mut sites: Vec<_> =
            heap.sites().map(|(site, weight)| (site.sampling, weight.objects)).collect();
        sites.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        assert_eq!(sites, [(Sampling::Exact, 1.0), (Sampling::Random, 4.0)]);
        assert_eq!((heap.large(), heap.ticks()), (2, 0));
        let alive = |heap: &SampledAllocations| {
            heap.live().map(|object| object.sampling()).collect::<Vec<_>>()
        };
        assert!(alive(&heap).contains(&Sampling::Exact));
        // The threshold of level 9 is above the importance of either.
        heap.dropped(region, 9, &[]);
        assert_eq!(alive(&heap), [Sampling::Random; 2]);
    }

    #[test]
    fn what_may_live_unknown_is_known_for_as_long_as_objects_are_watched() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(1));
        let busy = Allocation { level: 5, ..allocation(1, 10_000, AllocationKind::Sampled) };
        heap.allocated(region, MonotonicNs(0), &busy, (StackId(0), NameId::default()));
        let site = *heap.sites().next().unwrap().0;
        assert_eq!((heap.told_one_in(&site), heap.watched_one_in(&site)), (Some(32), Some(32)));
        heap.next_window(&mut |stack| stack);
        heap.allocated(
            region,
            MonotonicNs(1),
            &allocation(2, 10_000, AllocationKind::Sampled),
            (StackId(0), NameId::default()),
        );
        assert_eq!((heap.told_one_in(&site), heap.watched_one_in(&site)), (None, Some(32)));
        let large = super::Site { heap: HeapKind::Large, ..site };
        assert_eq!(heap.watched_one_in(&large), None);
        heap.watched_from(region, MonotonicNs(2));
        assert_eq!(heap.watched_one_in(&site), None);
    }

    #[test]
    fn a_tick_stands_for_its_amount() {
        let w = weight(AllocationKind::Tick { amount: 102_400 }, 1_024, 0);
        assert_eq!((w.objects, w.bytes), (100.0, 102_400.0));
        assert_eq!(weight(AllocationKind::Tick { amount: 0 }, 0, 0).objects, 1.0);
    }

    #[test]
    fn dead_objects_leave_and_survivors_age() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        for sample in 0..4 {
            heap.allocated(
                region,
                MonotonicNs(5),
                &allocation(sample, 64, AllocationKind::Sampled),
                (StackId(1), NameId::default()),
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
    fn large_objects_without_a_handle_are_known_to_be_missing_unless_chance_left_them_out() {
        let (mut heap, region, other) = (SampledAllocations::default(), RegionId(1), RegionId(2));
        let mut sample = 0;
        let mut made = |heap: &mut SampledAllocations, size, watched| {
            sample += 1;
            let large = Allocation { watched, ..allocation(sample, size, AllocationKind::Exact) };
            heap.allocated(region, MonotonicNs(5), &large, (StackId(1), NameId::default()));
        };
        made(&mut heap, 1 << 20, Some(0));
        let site = heap.live().next().unwrap().site;
        assert_eq!(heap.unwatched(&site), None);
        made(&mut heap, 1 << 20, None);
        assert_eq!(heap.unwatched(&site), Some(1));
        // From a level on of which the smaller one is left out by chance.
        let level = (0..live::TOP_LEVEL)
            .find(|level| live::chance(live::importance(85_000, 0), *level) < 1.0);
        heap.dropped(region, level.unwrap(), &[]);
        made(&mut heap, 85_000, None);
        assert_eq!(heap.unwatched(&site), Some(1));
        made(&mut heap, 100 << 20, None);
        assert_eq!(heap.unwatched(&site), Some(2));
        heap.next_window(&mut |stack| stack);
        assert_eq!(
            (heap.unwatched(&site), heap.unwatched(&Site { region: other, ..site })),
            (Some(2), None)
        );
    }

    #[test]
    fn a_region_that_invents_samples_takes_its_share_and_no_more() {
        let (mut heap, hostile, other) = (SampledAllocations::default(), RegionId(1), RegionId(2));
        let (share, extra) = (MAX_OF_REGION as u64, 10);
        let sampled = |sample| Allocation {
            type_id: sample,
            ..allocation(sample, 64, AllocationKind::Sampled)
        };
        for sample in 0..share + extra {
            heap.allocated(
                hostile,
                MonotonicNs(5),
                &sampled(sample),
                (StackId(1), NameId::default()),
            );
        }
        assert_eq!(heap.refused(), (extra, extra));
        heap.allocated(hostile, MonotonicNs(5), &sampled(0), (StackId(1), NameId::default()));
        heap.allocated(other, MonotonicNs(5), &sampled(0), (StackId(1), NameId::default()));
        assert_eq!(heap.refused(), (extra, extra), "known ones, and those of others, have room");
        let rest: Vec<_> =
            heap.sites().filter(|(site, _)| site.stack == StackTable::OVERFLOW).collect();
        assert_eq!(rest.len(), 1);
        let one = weight(AllocationKind::Sampled, 64, 0);
        assert!((rest[0].1.bytes - extra as f64 * one.bytes).abs() < 1.0, "no byte is lost");
        heap.dead(hostile, &[0, 0, share + 1]);
        heap.region_gone(hostile);
        assert_eq!((heap.live().count(), heap.live.len()), (1, 1));
    }

    #[test]
    fn a_region_has_no_more_than_its_library_was_asked_for() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(1));
        heap.expect(256, Some(512));
        for sample in 0..70_000 {
            let born =
                Allocation { type_id: sample, ..allocation(sample, 64, AllocationKind::Sampled) };
            heap.allocated(region, MonotonicNs(5), &born, (StackId(1), NameId::default()));
        }
        assert_eq!((heap.live().count(), heap.sites().count()), (512, 65_536 + 1));
        assert_eq!(heap.refused(), (70_000 - 65_536, 70_000 - 512));
    }

    #[test]
    fn an_object_born_when_there_is_no_room_for_sums_keeps_its_type_and_stack() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(1));
        for sample in 0..=MAX_OF_REGION as u64 {
            let born = Allocation {
                type_id: sample,
                watched: (sample == MAX_OF_REGION as u64).then_some(0),
                ..allocation(sample, 64, AllocationKind::Sampled)
            };
            heap.allocated(region, MonotonicNs(5), &born, (StackId(1), NameId::default()));
        }
        assert_eq!(heap.refused(), (1, 0));
        let [object] = heap.live().collect::<Vec<_>>()[..] else { panic!("one is watched") };
        assert_eq!((object.site.type_id, object.site.stack), (MAX_OF_REGION as u64, StackId(1)));
    }

    #[test]
    fn what_was_dropped_is_stood_for_by_what_is_left() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        for sample in 0..4 {
            let allocation = allocation(sample, 64, AllocationKind::Sampled);
            heap.allocated(region, MonotonicNs(5), &allocation, (StackId(1), NameId::default()));
        }
        let one = weight(AllocationKind::Sampled, 64, 0).bytes;
        heap.dropped(region, 5, &[0, 3]);
        heap.dropped(region, 1, &[]);
        let total: f64 = heap.live().map(|object| object.weight().bytes).sum();
        // The threshold of level 5 is 262,144, the importance 102,464.
        let expected = 2.0 * one * 262_145.0 / 102_464.0;
        assert!((total - expected).abs() < expected * 1e-9, "{total} {expected}");
        assert_eq!(heap.live().map(|object| object.weight().seen).sum::<u64>(), 2);
    }

    #[test]
    fn a_level_holds_for_those_that_were_alive_when_it_was_raised() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        let levels = |heap: &SampledAllocations| {
            let mut found: Vec<u8> = heap.live().map(|object| object.level).collect();
            found.sort_unstable();
            found
        };
        let mut sample = 0;
        for level in [3, 9, 5, 5, 7] {
            let allocation = allocation(sample, 64, AllocationKind::Sampled);
            heap.allocated(region, MonotonicNs(5), &allocation, (StackId(1), NameId::default()));
            heap.dropped(region, level, &[]);
            sample += 1;
        }
        heap.allocated(
            region,
            MonotonicNs(5),
            &allocation(sample, 64, AllocationKind::Sampled),
            (StackId(1), NameId::default()),
        );
        // The first two met the 9, the next three the 7, the last none.
        assert_eq!(levels(&heap), [0, 7, 7, 7, 9, 9]);
        heap.region_gone(region);
        heap.allocated(
            region,
            MonotonicNs(5),
            &allocation(1, 64, AllocationKind::Sampled),
            (StackId(1), NameId::default()),
        );
        assert_eq!(levels(&heap), [0]);
    }

    #[test]
    fn raising_a_level_costs_nothing_of_the_objects_that_are_alive() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        for sample in 0..MAX_OF_REGION as u64 {
            heap.allocated(
                region,
                MonotonicNs(5),
                &allocation(sample, 64, AllocationKind::Sampled),
                (StackId(1), NameId::default()),
            );
        }
        // Gone through one by one these would be 10^11 steps.
        for level in 0..1_000_000_u32 {
            heap.dropped(region, level.to_le_bytes()[0], &[]);
        }
        assert!(heap.live().all(|object| object.level == u8::MAX));
        assert!(heap.live.regions[&region].raised.steps.len() <= 256);
    }

    #[test]
    fn an_object_survives_the_collections_that_look_at_its_generation() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        let survived = |heap: &SampledAllocations| {
            heap.live().map(|object| heap.survived(&object)).sum::<u32>()
        };
        heap.collection(region, 2, MonotonicNs(0));
        heap.allocated(
            region,
            MonotonicNs(5),
            &allocation(1, 64, AllocationKind::Sampled),
            (StackId(1), NameId::default()),
        );
        assert_eq!(survived(&heap), 0);
        heap.collection(region, 0, MonotonicNs(0));
        heap.alive(region, &[(1, 1)]);
        assert_eq!(survived(&heap), 1);
        heap.collection(region, 0, MonotonicNs(0));
        assert_eq!(survived(&heap), 1, "it was not looked at");
        heap.collection(region, 1, MonotonicNs(0));
        heap.alive(region, &[(1, 2)]);
        heap.collection(region, 1, MonotonicNs(0));
        heap.collection(region, 2, MonotonicNs(0));
        heap.collection(region, 2, MonotonicNs(0));
        assert_eq!(survived(&heap), 4);
        assert_eq!([0, 1, 3, 4, 1_000].map(super::count_bucket), [0, 1, 2, 4, 512]);
    }

    #[test]
    fn only_full_collections_since_it_grew_old_prove_an_object_alive() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        let old =
            |heap: &SampledAllocations| heap.live().find_map(|object| heap.survived_old(&object));
        heap.allocated(
            region,
            MonotonicNs(5),
            &allocation(1, 64, AllocationKind::Sampled),
            (StackId(1), NameId::default()),
        );
        // Pinned, it stays young however often all is looked at, and grows old at last.
        for _ in 0..9 {
            heap.collection(region, 2, MonotonicNs(0));
        }
        assert_eq!(old(&heap), None);
        heap.alive(region, &[(1, 1)]);
        heap.collection(region, 1, MonotonicNs(0));
        heap.alive(region, &[(1, 2)]);
        assert_eq!(old(&heap), Some(0));
        heap.collection(region, 1, MonotonicNs(0));
        heap.collection(region, 2, MonotonicNs(0));
        assert_eq!(old(&heap), Some(1));
        // Demoted, and old again.
        heap.alive(region, &[(1, 1)]);
        heap.collection(region, 1, MonotonicNs(0));
        heap.alive(region, &[(1, 2)]);
        assert_eq!(old(&heap), Some(0));
    }

    #[test]
    fn a_large_object_has_not_survived_a_collection_of_young_ones() {
        let (mut heap, region) = (SampledAllocations::default(), RegionId(3));
        let survived = |heap: &SampledAllocations| {
            heap.live().map(|object| heap.survived(&object)).sum::<u32>()
        };
        for (sample, of) in [(1, HeapKind::Large), (2, HeapKind::Pinned)] {
            let object =
                Allocation { heap: of, ..allocation(sample, 100_000, AllocationKind::Sampled) };
            heap.allocated(region, MonotonicNs(5), &object, (StackId(1), NameId::default()));
        }
        let mut generations: Vec<u8> = heap.live().map(|object| object.generation).collect();
        generations.sort_unstable();
        assert_eq!(generations, [3, 4]);
        // The library has looked at them, the collection has not.
        heap.collection(region, 0, MonotonicNs(0));
        heap.alive(region, &[(1, 3), (2, 4)]);
        assert_eq!(survived(&heap), 0);
        heap.collection(region, 2, MonotonicNs(0));
        assert_eq!(survived(&heap), 2);
    }

    #[test]
    fn a_collection_that_may_be_going_on_proves_nothing() {
        for (generation, survived, known) in [
            (0, 0, false),
            (0, 1, false),
            (0, 2, true),
            (1, 1, true),
            (2, 2, true),
            (3, 0, false),
            (3, 1, false),
            (4, 2, true),
        ] {
            assert_eq!(has_survived(generation, survived), known, "{generation} {survived}");
        }
    }

    #[test]
    fn size_classes_are_powers_of_two() {
        assert_eq!(
            [0, 1, 24, 32, 300_000, u64::MAX].map(size_class),
            [1, 1, 16, 32, 262_144, 1 << 63]
        );
    }

    #[test]
    fn ages_are_powers_of_two() {
        let s = |n: u64| MonotonicNs(n * 1_000_000_000);
        assert_eq!(
            [0, 1, 2, 3, 4, 31].map(|n| age_bucket_seconds(s(0), s(n))),
            [0, 1, 2, 2, 4, 16]
        );
        assert_eq!(age_bucket_seconds(s(9), s(1)), 0);
    }
}
