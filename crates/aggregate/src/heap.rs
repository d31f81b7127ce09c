//! Sampled allocations and the sampled objects that are still alive, each standing for what was not
//! sampled (D7, D8).

use foldhash::{HashMap, HashMapExt as _};
use perfusion_model::event::{Allocation, AllocationKind, HeapKind, MonotonicNs, RegionId};
use perfusion_model::labels::{NameId, Sampling};
use perfusion_model::stack::{StackId, StackTable};
use profiler_protocol::live;
use std::ops::AddAssign;

/// Probability with which the runtime samples each single byte (.NET 10 `AllocationSampled`,
/// `docs/design/features/RandomizedAllocationSampling.md` of dotnet/runtime): a mean distance of
/// 100 KiB.
pub const SAMPLED_BYTE_PROBABILITY: f64 = 1.0 / 102_400.0;

/// Sites, and living objects, kept of one region at most; a process that invents samples takes its
/// share. See [`Allocations::expect`].
const MAX_OF_REGION: usize = 1 << 17;
/// The same of all regions.
const MAX_OF_ALL: usize = 1 << 20;
/// Fewest sites that there is room for.
const LEAST_SITES: usize = 1 << 15;
/// A window's samples for each that is told of in a second: a minute's of small objects, one of
/// large ones, and some that were told of beyond that.
const SECONDS_OF_SITES: usize = 128;

/// What samples stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weight {
    /// Objects.
    pub objects: f64,
    /// Bytes.
    pub bytes: f64,
    /// How many samples.
    pub seen: u64,
    /// Their own bytes.
    pub seen_bytes: u64,
    /// Variance of `bytes`: Σ bytes²·(1−π) (`aggregate::interval`). Without a meaning where the
    /// runtime samples by a stride.
    pub variance: f64,
}

impl AddAssign for Weight {
    fn add_assign(&mut self, other: Self) {
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.seen += other.seen;
        self.seen_bytes = self.seen_bytes.saturating_add(other.seen_bytes);
        self.variance += other.variance;
    }
}

/// The weight of one sampled allocation of `size` bytes. `AllocationSampled`: the object was chosen
/// with probability 1−q^size, so it stands for the inverse; unbiased. `AllocationTick`: it stands
/// for the bytes since the last tick, as the event says; biased where allocations are in step with
/// the stride. A large object stands for itself. Where many samples come the library tells one in
/// 2^`level` of them, by chance, so each stands for as many.
#[must_use]
pub fn weight(kind: AllocationKind, size: u64, level: u8) -> Weight {
    let seen_bytes = size.max(1);
    let size = seen_bytes as f64;
    let told = (-f64::from(level)).exp2();
    match kind {
        AllocationKind::Sampled | AllocationKind::Chosen { .. } => {
            let trials = match kind {
                AllocationKind::Chosen { bytes } => size.max(bytes as f64),
                _ => size,
            };
            // 1 − q^size through expm1/ln_1p: the direct form loses all digits for small objects.
            let chosen = -(trials * (-SAMPLED_BYTE_PROBABILITY).ln_1p()).exp_m1() * told;
            let bytes = size / chosen;
            let variance = bytes * bytes * (1.0 - chosen);
            Weight { objects: 1.0 / chosen, bytes, seen: 1, seen_bytes, variance }
        }
        AllocationKind::Exact => {
            let bytes = size / told;
            let variance = bytes * bytes * (1.0 - told);
            Weight { objects: 1.0 / told, bytes, seen: 1, seen_bytes, variance }
        }
        AllocationKind::Tick { amount } => {
            let bytes = (amount as f64).max(size) / told;
            Weight { objects: bytes / size, bytes, seen: 1, seen_bytes, variance: 0.0 }
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
    /// What that was called then.
    pub name: NameId,
    /// Allocation stack.
    pub stack: StackId,
    /// ClassID.
    pub type_id: u64,
    /// Which heap.
    pub heap: HeapKind,
    /// Size, rounded down to a power of two: objects of one site are alike enough for one interval.
    pub size_class: u64,
    /// How its samples were chosen.
    pub sampling: Sampling,
}

/// A sampled object that was alive at the last collection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LiveObject {
    /// Where and what.
    pub site: Site,
    /// The number of its sample in its region.
    pub sample: u64,
    /// When it was allocated.
    pub born: MonotonicNs,
    /// Generation at the last collection that looked at it; before the first, the one it was
    /// allocated in.
    pub generation: u8,
    size: u64,
    /// What it stands for as a sample of what is allocated.
    sampled: Weight,
    /// Its sample was told of with the probability 2^-thinned.
    thinned: u8,
    /// The level it was watched at from the start; see [`Raised`].
    level: u8,
    /// How often the region's level had been raised before.
    raised_before: u64,
    /// Collections it has survived in the generations it was in before, and those of the present
    /// one before it came into it.
    survived: u32,
    entered_after: u32,
    /// Full collections before it came, for the last time, into a generation that only these look
    /// at.
    old_after: u32,
}

impl LiveObject {
    /// What it stands for, as a sample of what is allocated of which not all are watched.
    #[must_use]
    pub fn weight(&self) -> Weight {
        let watched = live::chance(live::importance(self.size, self.thinned), self.level);
        let (objects, bytes) = (self.sampled.objects / watched, self.sampled.bytes / watched);
        // Sampled and watched: 1/objects.
        let variance = bytes * bytes * (1.0 - 1.0 / objects.max(1.0));
        Weight { objects, bytes, variance, ..self.sampled }
    }

    /// How it was chosen: what stands for itself among all that was allocated is one of several by
    /// chance where not all of those are watched.
    #[must_use]
    pub fn sampling(&self) -> Sampling {
        match self.site.sampling {
            Sampling::Exact if self.weight().objects > 1.0 => Sampling::Random,
            sampling => sampling,
        }
    }
}

/// How a region's level was raised. It holds for every object that was alive then, and a process
/// may raise as often as it likes: so the objects are not gone through, but each remembers how
/// often it had been raised before.
#[derive(Default)]
struct RaisedLevels {
    count: u64,
    /// How often it had been raised, this time included, and to what level: higher ones before
    /// lower ones, so a level at most once.
    steps: Vec<(u64, u8)>,
}

impl RaisedLevels {
    fn to(&mut self, level: u8) {
        self.count += 1;
        while self.steps.pop_if(|(_, lower)| *lower <= level).is_some() {}
        self.steps.push((self.count, level));
    }

    /// The highest level since it had been raised `before` times.
    fn since(&self, before: u64) -> u8 {
        let index = self.steps.partition_point(|&(count, _)| count <= before);
        self.steps.get(index).map_or(0, |&(_, level)| level)
    }
}

/// Collections of a region: how many looked at generation 0, at 1 too, and at everything.
type CollectionCounts = [u32; 3];

/// Place in [`Collections`] of those that look at a generation; large and pinned objects (3, 4) are
/// looked at with generation 2.
fn looked_at(generation: u8) -> usize {
    usize::from(generation.min(2))
}

/// Levels of samples, of small objects and of large ones.
#[derive(Clone, Copy, Default)]
struct RarestLevels([u8; 2]);

impl RarestLevels {
    fn at_least(&mut self, heap: HeapKind, level: u8) {
        let [small, large] = &mut self.0;
        let rarest = if heap == HeapKind::Large { large } else { small };
        *rarest = (*rarest).max(level);
    }

    /// Of one in how many was told; `None` where of each.
    fn one_in(self, heap: HeapKind) -> Option<u64> {
        let [small, large] = self.0;
        let level = if heap == HeapKind::Large { large } else { small };
        (level > 0).then(|| 1u64.checked_shl(level.into()).unwrap_or(u64::MAX))
    }
}

/// What one region may have.
struct RegionLimits {
    sites: usize,
    live: usize,
}

impl Default for RegionLimits {
    fn default() -> Self {
        Self { sites: MAX_OF_REGION, live: MAX_OF_REGION }
    }
}

/// Allocations of a window, and the objects that live on across windows.
#[derive(Default)]
pub struct SampledAllocations {
    sites: HashMap<Site, Weight>,
    /// Of `sites`, how many are each region's.
    sites_of: HashMap<RegionId, usize>,
    live_objects: usize,
    most: RegionLimits,
    /// By region: the highest level at which one was told of in this window, and since its objects
    /// are watched: of these some may live and not be known.
    rarest: HashMap<RegionId, RarestLevels>,
    rarest_watched: HashMap<RegionId, RarestLevels>,
    /// By region: the level at which its objects are watched, as last told of; and how many of
    /// those that are told of one by one are not watched, though no chance has left them out, since
    /// the region's objects are watched.
    level: HashMap<RegionId, u8>,
    unwatched: HashMap<RegionId, u64>,
    /// By region and sample: one region's end costs nothing of the others'.
    live: HashMap<RegionId, HashMap<u64, LiveObject>>,
    raised: HashMap<RegionId, RaisedLevels>,
    collections: HashMap<RegionId, CollectionCounts>,
    /// When the last full collection of a region began, and the one before it.
    full: HashMap<RegionId, [Option<MonotonicNs>; 2]>,
    /// Since when objects of a region have been watched without a break.
    watched_since: HashMap<RegionId, MonotonicNs>,
    untracked: u64,
    ticks: u64,
    large: u64,
    sites_refused: u64,
    live_refused: u64,
}

impl SampledAllocations {
    /// What libraries were asked for: so many living objects at a time, and in windows so many
    /// samples in a second. A region that has more has invented them, and all of them are named at
    /// the end of a window. An object's death may be told of after others have come, or be lost.
    pub fn expect(&mut self, live_objects: u32, samples: Option<u32>) {
        let of = |number: u32, times: usize| {
            usize::try_from(number).unwrap_or(usize::MAX).saturating_mul(times)
        };
        let sites = samples.map_or(MAX_OF_REGION, |samples| of(samples, SECONDS_OF_SITES));
        self.most = RegionLimits {
            sites: sites.clamp(LEAST_SITES, MAX_OF_REGION),
            live: of(live_objects, 2).min(MAX_OF_REGION),
        };
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
        let own = Site { region, tid, name, stack, type_id, heap, size_class, sampling };
        let site = self.room_for(own);
        let weight = weight(allocation.kind, allocation.size, allocation.level);
        self.ticks += u64::from(sampling == Sampling::Stride);
        self.large += u64::from(allocation.kind == AllocationKind::Exact);
        *self.sites.entry(site).or_default() += weight;
        for rarest in [&mut self.rarest, &mut self.rarest_watched] {
            rarest.entry(region).or_default().at_least(heap, allocation.level);
        }
        if let Some(level) = allocation.watched {
            self.level.insert(region, level);
            // Large objects are looked at by full collections only, also before the library has
            // told their generation.
            let generation = match heap {
                HeapKind::Small => 0,
                HeapKind::Large => 3,
                HeapKind::Pinned => 4,
            };
            let collections = self.collections.entry(region).or_default();
            let (entered_after, old_after) = (collections[looked_at(generation)], collections[2]);
            let live = self.live.entry(region).or_default();
            let room = live.len() < self.most.live && self.live_objects < MAX_OF_ALL;
            if room || live.contains_key(&allocation.sample) {
                let (size, sampled) = (allocation.size, weight);
                let object = LiveObject {
                    // The sum of the rest is of this window, the object of later ones, too.
                    site: own,
                    sample: allocation.sample,
                    born: time,
                    generation,
                    size,
                    sampled,
                    thinned: allocation.level,
                    level,
                    raised_before: self.raised.get(&region).map_or(0, |raised| raised.count),
                    survived: 0,
                    entered_after,
                    old_after,
                };
                self.live_objects += usize::from(live.insert(allocation.sample, object).is_none());
            } else {
                self.live_refused += 1;
                *self.unwatched.entry(region).or_default() += 1;
            }
        } else {
            self.untracked += 1;
            let level = self.level.get(&region).copied().unwrap_or(0);
            let importance = live::importance(allocation.size, allocation.level);
            if allocation.kind == AllocationKind::Exact && live::chance(importance, level) >= 1.0 {
                *self.unwatched.entry(region).or_default() += 1;
            }
        }
    }

    /// `site`, or when there are too many the one that takes all the rest of its region.
    fn room_for(&mut self, site: Site) -> Site {
        if self.sites.contains_key(&site) {
            return site;
        }
        let of_region = self.sites_of.entry(site.region).or_default();
        if *of_region < self.most.sites && self.sites.len() < MAX_OF_ALL {
            *of_region += 1;
            return site;
        }
        self.sites_refused += 1;
        Site {
            tid: 0,
            name: NameId::default(),
            stack: StackTable::OVERFLOW,
            type_id: 0,
            size_class: 0,
            ..site
        }
    }

    /// These sampled objects were collected.
    pub fn dead(&mut self, region: RegionId, samples: &[u64]) {
        let Some(live) = self.live.get_mut(&region) else { return };
        for sample in samples {
            self.live_objects -= usize::from(live.remove(sample).is_some());
        }
    }

    /// These sampled objects survived into this generation.
    pub fn alive(&mut self, region: RegionId, samples: &[(u64, u8)]) {
        let Some(live) = self.live.get_mut(&region) else { return };
        let collections = self.collections.get(&region).copied().unwrap_or_default();
        for &(sample, generation) in samples {
            if let Some(object) = live.get_mut(&sample) {
                object.survived = survived(object, &collections);
                object.entered_after = collections[looked_at(generation)];
                if object.generation < 2 {
                    object.old_after = collections[2];
                }
                object.generation = generation;
            }
        }
    }

    /// These are not watched any more: those that are were above the level all the time.
    pub fn dropped(&mut self, region: RegionId, level: u8, samples: &[u64]) {
        self.dead(region, samples);
        self.level.insert(region, level);
        self.raised.entry(region).or_default().to(level);
    }

    /// A collection of `generation` and those below it begins.
    pub fn collection(&mut self, region: RegionId, generation: u8, time: MonotonicNs) {
        if looked_at(generation) == 2 {
            let [last, before] = self.full.entry(region).or_default();
            *before = last.replace(time);
        }
        let collections = self.collections.entry(region).or_default();
        for count in &mut collections[..=looked_at(generation)] {
            *count = count.saturating_add(1);
        }
    }

    /// Collections that looked at the object and left it alive.
    #[must_use]
    pub fn survived(&self, object: &LiveObject) -> u32 {
        let collections = self.collections.get(&object.site.region).copied().unwrap_or_default();
        survived(object, &collections)
    }

    /// Full collections since the object has been in generation 2 or a heap of its own; `None`
    /// while it is not. The last may be going on still. Those that it survived before do not count:
    /// an object may stay young through any number of them, or be made young again.
    #[must_use]
    pub fn survived_old(&self, object: &LiveObject) -> Option<u32> {
        let collections = self.collections.get(&object.site.region).copied().unwrap_or_default();
        (object.generation >= 2).then(|| collections[2].saturating_sub(object.old_after))
    }

    /// When the last full collection but one began: what was old by then is alive for sure, since
    /// the last may be going on still.
    #[must_use]
    pub fn proven_at(&self, region: RegionId) -> Option<MonotonicNs> {
        self.full.get(&region).and_then(|[_, before]| *before)
    }

    /// From now on objects of the region are watched, and of those that were before nothing is
    /// known any more.
    pub fn watched_from(&mut self, region: RegionId, time: MonotonicNs) {
        self.region_gone(region);
        self.watched_since.insert(region, time);
    }

    /// Since when objects of a region have been watched without a break.
    #[must_use]
    pub fn watched_since(&self, region: RegionId) -> Option<MonotonicNs> {
        self.watched_since.get(&region).copied()
    }

    /// The process is gone, and its heap with it.
    pub fn region_gone(&mut self, region: RegionId) {
        self.live_objects -= self.live.remove(&region).map_or(0, |live| live.len());
        self.rarest_watched.remove(&region);
        self.level.remove(&region);
        self.unwatched.remove(&region);
        self.raised.remove(&region);
        self.collections.remove(&region);
        self.full.remove(&region);
        self.watched_since.remove(&region);
    }

    /// The next window begins: what was allocated is forgotten, what is alive stays. `carry` takes
    /// a stack over to it.
    pub fn next_window(&mut self, carry: &mut dyn FnMut(StackId) -> StackId) {
        // Without their room: a busy window's is not kept.
        (self.sites, self.sites_of, self.rarest) = (HashMap::new(), HashMap::new(), HashMap::new());
        for object in self.live.values_mut().flat_map(HashMap::values_mut) {
            object.site.stack = carry(object.site.stack);
        }
    }

    /// Of one in how many samples like the site's was told when that was least often in this
    /// window; `None` where of each.
    #[must_use]
    pub fn told_one_in(&self, site: &Site) -> Option<u64> {
        self.rarest.get(&site.region)?.one_in(site.heap)
    }

    /// The same since its region's objects are watched.
    #[must_use]
    pub fn watched_one_in(&self, site: &Site) -> Option<u64> {
        self.rarest_watched.get(&site.region)?.one_in(site.heap)
    }

    /// How many large objects of the site's region are not watched, though no chance has left them
    /// out: some may live and not be known.
    #[must_use]
    pub fn unwatched(&self, site: &Site) -> Option<u64> {
        self.unwatched.get(&site.region).copied()
    }

    /// Allocation totals by site.
    pub fn sites(&self) -> impl Iterator<Item = (&Site, &Weight)> {
        self.sites.iter()
    }

    /// Sampled objects alive as far as known.
    pub fn live(&self) -> impl Iterator<Item = LiveObject> {
        self.live.iter().flat_map(|(region, live)| {
            let raised = self.raised.get(region);
            live.values().map(move |object| {
                let since = raised.map_or(0, |raised| raised.since(object.raised_before));
                LiveObject { level: object.level.max(since), ..*object }
            })
        })
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
        (self.sites_refused, self.live_refused)
    }

    /// Samples without a weak handle (not chosen, all handles in use, or a runtime before .NET 7):
    /// absent from the live heap.
    #[must_use]
    pub fn untracked(&self) -> u64 {
        self.untracked
    }
}

fn survived(object: &LiveObject, collections: &CollectionCounts) -> u32 {
    let since = collections[looked_at(object.generation)].saturating_sub(object.entered_after);
    object.survived.saturating_add(since)
}

/// True where a collection is known to have looked at a live object and left it alive, by its
/// generation and the collections it has survived (rounded down to a power of two or not). These
/// are counted when they begin, so the only one may be going on still; but an object changes from 0
/// to 1 or 2 at the end of one only.
#[must_use]
pub fn has_survived(generation: i64, survived: i64) -> bool {
    match generation {
        1 | 2 => true,
        _ => survived >= 2,
    }
}

/// `number` rounded down to a power of two, 0 for 0: bounds the number of label values (D10).
#[must_use]
pub fn count_bucket(number: u32) -> u64 {
    number.checked_ilog2().map_or(0, |bits| 1 << bits)
}

/// `size` rounded down to a power of two, at least 1: bounds the number of label values, and keeps
/// objects of one class alike.
#[must_use]
pub fn size_class(size: u64) -> u64 {
    1 << size.max(1).ilog2()
}

/// Age in seconds rounded down to a power of two, 0 below one second: bounds the number of label
/// values (D10).
#[must_use]
pub fn age_bucket_seconds(born: MonotonicNs, now: MonotonicNs) -> u64 {
    let seconds = now.0.saturating_sub(born.0) / 1_000_000_000;
    if seconds == 0 { 0 } else { 1 << seconds.ilog2() }
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
    fn a_thinned_sample_stands_for_those_that_were_not_told() {
        for size in [24u64, 102_400, 1_000_000] {
            let (one, thinned) = (
                weight(AllocationKind::Sampled, size, 0),
                weight(AllocationKind::Sampled, size, 3),
            );
            assert!((thinned.objects / one.objects - 8.0).abs() < 1e-9, "{size}");
            assert!((thinned.bytes / one.bytes - 8.0).abs() < 1e-9, "{size}");
            let missed = 1.0 - 1.0 / thinned.objects;
            assert!(
                (thinned.variance / (thinned.bytes * thinned.bytes * missed) - 1.0).abs() < 1e-9,
                "{size}"
            );
            assert_eq!((thinned.seen, thinned.seen_bytes), (1, size));
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
        assert_eq!((heap.live().count(), heap.live_objects), (1, 1));
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
        assert!(heap.raised[&region].steps.len() <= 256);
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
