//! The sampled objects that are alive as far as known, across windows.

use super::levels::{RaisedLevels, RarestLevels};
use super::sites::Site;
use super::weight::Weight;
use super::{MAX_OF_ALL, MAX_OF_REGION};
use foldhash::HashMap;
use perfusion_model::event::{Allocation, AllocationKind, HeapKind, MonotonicNs, RegionId};
use perfusion_model::labels::Sampling;
use perfusion_model::stack::StackId;
use profiler_protocol::live;

/// A sampled object that was alive at the last collection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LiveObject {
    /// The site of its allocation.
    pub site: Site,
    /// The number of its sample in its region.
    pub sample: u64,
    /// The time of its allocation.
    pub born: MonotonicNs,
    /// Generation at the last collection that looked at it; before the first, the one it was
    /// allocated in.
    pub generation: u8,
    size: u64,
    /// What it stands for as a sample of what is allocated.
    sampled: Weight,
    /// Its sample was reported with the probability 2^-`sample_level`.
    sample_level: u8,
    /// The level it was watched at from the start; see [`RaisedLevels`].
    pub(super) level: u8,
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
        let watched = live::chance(live::importance(self.size, self.sample_level), self.level);
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

/// Collections of a region: how many looked at generation 0, at 1 too, and at everything.
type CollectionCounts = [u32; 3];

/// The index in [`CollectionCounts`] of those that look at a generation. Large and pinned objects
/// (3, 4) are looked at with generation 2.
fn looked_at(generation: u8) -> usize {
    usize::from(generation.min(2))
}

/// Collections that looked at the object and left it alive.
fn survived(object: &LiveObject, collections: &CollectionCounts) -> u32 {
    let since = collections[looked_at(object.generation)].saturating_sub(object.entered_after);
    object.survived.saturating_add(since)
}

/// What is known of one region's heap since its objects are watched.
#[derive(Default)]
pub(super) struct RegionObjects {
    /// By sample.
    objects: HashMap<u64, LiveObject>,
    /// The highest level at which one was told of: of these some may live and not be known.
    rarest: RarestLevels,
    /// The level at which objects are watched, as last told of.
    level: u8,
    /// How many of those that are told of one by one are not watched, though no chance has left
    /// them out.
    unwatched: u64,
    pub(super) raised: RaisedLevels,
    collections: CollectionCounts,
    /// When the last full collection began, and the one before it.
    full: [Option<MonotonicNs>; 2],
    /// Since when objects have been watched without a break.
    watched_since: Option<MonotonicNs>,
}

/// The live objects of all regions. One region's end costs nothing of the others'.
pub(super) struct LiveObjects {
    pub(super) regions: HashMap<RegionId, RegionObjects>,
    /// Objects of all regions.
    len: usize,
    most_of_region: usize,
    untracked: u64,
    refused: u64,
}

impl Default for LiveObjects {
    fn default() -> Self {
        Self {
            regions: HashMap::default(),
            len: 0,
            most_of_region: MAX_OF_REGION,
            untracked: 0,
            refused: 0,
        }
    }
}

impl LiveObjects {
    /// A region watches so many objects at a time. An object's death may be told of after others
    /// have come, or be lost.
    pub(super) fn expect(&mut self, objects: u32) {
        let objects = usize::try_from(objects).unwrap_or(usize::MAX);
        self.most_of_region = objects.saturating_mul(2).min(MAX_OF_REGION);
    }

    /// A sampled object was allocated at `site`, and as a sample it stands for `sampled`.
    pub(super) fn allocated(
        &mut self,
        time: MonotonicNs,
        allocation: &Allocation,
        site: Site,
        sampled: Weight,
    ) {
        let region = self.regions.entry(site.region).or_default();
        region.rarest.at_least(allocation.heap, allocation.level);
        let Some(level) = allocation.watched else {
            self.untracked += 1;
            let importance = live::importance(allocation.size, allocation.level);
            let is_sure = live::chance(importance, region.level) >= 1.0;
            region.unwatched += u64::from(allocation.kind == AllocationKind::Exact && is_sure);
            return;
        };
        region.level = level;
        // Large objects are looked at by full collections only, also before the library has told
        // their generation.
        let generation = match allocation.heap {
            HeapKind::Small => 0,
            HeapKind::Large => 3,
            HeapKind::Pinned => 4,
        };
        let has_room = region.objects.len() < self.most_of_region && self.len < MAX_OF_ALL;
        if !has_room && !region.objects.contains_key(&allocation.sample) {
            self.refused += 1;
            region.unwatched += 1;
            return;
        }
        let object = LiveObject {
            site,
            sample: allocation.sample,
            born: time,
            generation,
            size: allocation.size,
            sampled,
            sample_level: allocation.level,
            level,
            raised_before: region.raised.count,
            survived: 0,
            entered_after: region.collections[looked_at(generation)],
            old_after: region.collections[2],
        };
        self.len += usize::from(region.objects.insert(allocation.sample, object).is_none());
    }

    /// These sampled objects were collected.
    pub(super) fn dead(&mut self, region: RegionId, samples: &[u64]) {
        let Some(region) = self.regions.get_mut(&region) else { return };
        for sample in samples {
            self.len -= usize::from(region.objects.remove(sample).is_some());
        }
    }

    /// These sampled objects survived into this generation.
    pub(super) fn alive(&mut self, region: RegionId, samples: &[(u64, u8)]) {
        let Some(RegionObjects { objects, collections, .. }) = self.regions.get_mut(&region) else {
            return;
        };
        for &(sample, generation) in samples {
            if let Some(object) = objects.get_mut(&sample) {
                object.survived = survived(object, collections);
                object.entered_after = collections[looked_at(generation)];
                if object.generation < 2 {
                    object.old_after = collections[2];
                }
                object.generation = generation;
            }
        }
    }

    /// These are not watched any more: those that are were above the level all the time.
    pub(super) fn dropped(&mut self, region: RegionId, level: u8, samples: &[u64]) {
        self.dead(region, samples);
        let region = self.regions.entry(region).or_default();
        region.level = level;
        region.raised.to(level);
    }

    /// A collection of `generation` and those below it begins.
    pub(super) fn collection(&mut self, region: RegionId, generation: u8, time: MonotonicNs) {
        let RegionObjects { full: [last, before], collections, .. } =
            self.regions.entry(region).or_default();
        if looked_at(generation) == 2 {
            *before = last.replace(time);
        }
        for count in &mut collections[..=looked_at(generation)] {
            *count = count.saturating_add(1);
        }
    }

    /// Collections that looked at the object and left it alive.
    pub(super) fn survived(&self, object: &LiveObject) -> u32 {
        survived(object, &self.collections(object))
    }

    /// Full collections since the object has been in generation 2 or a heap of its own.
    pub(super) fn survived_old(&self, object: &LiveObject) -> Option<u32> {
        let full = self.collections(object)[2];
        (object.generation >= 2).then(|| full.saturating_sub(object.old_after))
    }

    fn collections(&self, object: &LiveObject) -> CollectionCounts {
        self.regions.get(&object.site.region).map(|region| region.collections).unwrap_or_default()
    }

    /// When the last full collection but one began.
    pub(super) fn proven_at(&self, region: RegionId) -> Option<MonotonicNs> {
        self.regions.get(&region).and_then(|region| region.full[1])
    }

    /// From now on objects of the region are watched, and of those that were before nothing is
    /// known any more.
    pub(super) fn watched_from(&mut self, region: RegionId, time: MonotonicNs) {
        self.region_gone(region);
        self.regions.entry(region).or_default().watched_since = Some(time);
    }

    pub(super) fn watched_since(&self, region: RegionId) -> Option<MonotonicNs> {
        self.regions.get(&region)?.watched_since
    }

    /// The process is gone, and its heap with it.
    pub(super) fn region_gone(&mut self, region: RegionId) {
        self.len -= self.regions.remove(&region).map_or(0, |region| region.objects.len());
    }

    /// Takes the stacks of all objects over to the next window.
    pub(super) fn next_window(&mut self, carry: &mut dyn FnMut(StackId) -> StackId) {
        let objects = self.regions.values_mut().flat_map(|region| region.objects.values_mut());
        for object in objects {
            object.site.stack = carry(object.site.stack);
        }
    }

    /// Of one in how many samples like the site's was told when that was least often.
    pub(super) fn watched_one_in(&self, site: &Site) -> Option<u64> {
        self.regions.get(&site.region)?.rarest.one_in(site.heap)
    }

    /// How many large objects of the site's region are not watched; `None` where all are.
    pub(super) fn unwatched(&self, site: &Site) -> Option<u64> {
        self.regions.get(&site.region).map(|region| region.unwatched).filter(|count| *count > 0)
    }

    /// All objects, at the level each is watched at by now.
    pub(super) fn iter(&self) -> impl Iterator<Item = LiveObject> {
        self.regions.values().flat_map(|region| {
            region.objects.values().map(|object| {
                let since = region.raised.since(object.raised_before);
                LiveObject { level: object.level.max(since), ..*object }
            })
        })
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn untracked(&self) -> u64 {
        self.untracked
    }

    /// Objects that are not followed, because there were too many.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }
}
