//! Allocations and live objects of managed heaps.

use super::regions::ShimRuntime;
use foldhash::HashMap;
use perfusion_aggregate::heap::{LiveObject, SampledAllocations, Site, Weight};
use perfusion_model::event::{MonotonicNs, RegionId, ShimEvent};
use perfusion_model::labels::{Labels, NameId};
use perfusion_model::stack::StackId;
use perfusion_model::thread_role::RoleEvidence;
use perfusion_model::units::counted;
use perfusion_pprof::INUSE_NOT_AVAILABLE;
use perfusion_symbolize::types::TypeNameTable;
use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

/// Name and role of a thread, and the evidence that decides on the role.
type MakerLabels = (Option<Arc<str>>, Option<&'static str>, Option<Arc<RoleEvidence>>);

/// What is known of a live object at a window's end.
pub(super) struct ObjectSurvival {
    /// Until when the object is known of; its process may have ended since.
    pub(super) until: MonotonicNs,
    /// How many collections it has survived.
    pub(super) all: u32,
    /// How many full collections it has survived since it is old.
    pub(super) old: Option<u32>,
    /// Of one in how many objects like it the shim told.
    pub(super) told_one_in: Option<u64>,
    /// How many objects like it are not watched.
    pub(super) unwatched: Option<u64>,
}

/// What was allocated in a window and what is alive at its end.
pub(super) struct HeapCut {
    /// Where objects were allocated, with one in how many of them the shim told of.
    pub(super) sites: Vec<(Site, Weight, Option<u64>)>,
    pub(super) live: Vec<(LiveObject, ObjectSurvival)>,
    /// By region: since when objects are watched, and when the last full collection but one began.
    pub(super) times: HashMap<RegionId, [Option<MonotonicNs>; 2]>,
}

/// Allocations and live objects, the names of their types, and the threads that made them.
#[derive(Default)]
pub(super) struct HeapValues {
    pub(super) allocations: SampledAllocations,
    pub(super) types: TypeNameTable,
    /// What was last said of threads that made objects which are alive, by region and id.
    makers: HashMap<(RegionId, u32), MakerLabels>,
    /// What watches live objects, where they are told apart by it.
    handles: HashMap<(RegionId, u64), u64>,
    /// Regions that are gone, but whose objects that were alive then are in a recording without
    /// windows.
    alive_at_end: usize,
}

impl HeapValues {
    /// A shim tells what became of objects. Other events are ignored.
    pub(super) fn observe(&mut self, time: MonotonicNs, region: RegionId, event: &ShimEvent) {
        match event {
            ShimEvent::GcStart { generation, .. } => {
                self.allocations.collection(region, *generation, time);
            }
            ShimEvent::ObjectsDead { samples } => self.allocations.dead(region, samples),
            ShimEvent::ObjectsAlive { samples } => self.allocations.alive(region, samples),
            ShimEvent::ObjectsDropped { level, samples } => {
                self.allocations.dropped(region, *level, samples);
            }
            _ => {}
        }
    }

    /// From now on live objects that these weak handles watch, by region and sample, are told apart
    /// by them.
    pub(super) fn tell_handles(&mut self, handles: HashMap<(RegionId, u64), u64>) {
        self.handles = handles;
    }

    /// The weak handle that watches an object, where objects are told apart by it.
    pub(super) fn handle(&self, object: &LiveObject) -> Option<u64> {
        self.handles.get(&(object.site.region, object.sample)).copied()
    }

    /// Ends a window. `ended` says when regions said good-bye in it, and `carry` moves a stack to
    /// the next window.
    pub(super) fn cut(
        &mut self,
        at: MonotonicNs,
        ended: &HashMap<RegionId, MonotonicNs>,
        carry: &mut dyn FnMut(StackId) -> StackId,
    ) -> HeapCut {
        let heap = &mut self.allocations;
        let sites = heap.sites().map(|(site, weight)| (*site, *weight, heap.told_one_in(site)));
        let sites = sites.collect();
        let survival = |object: &LiveObject| ObjectSurvival {
            until: ended.get(&object.site.region).copied().unwrap_or(at),
            all: heap.survived(object),
            old: heap.survived_old(object),
            told_one_in: heap.watched_one_in(&object.site),
            unwatched: heap.unwatched(&object.site),
        };
        let live: Vec<(LiveObject, ObjectSurvival)> =
            heap.live().map(|object| (object, survival(&object))).collect();
        let regions = live.iter().map(|(object, _)| object.site.region);
        let times =
            regions.map(|region| (region, [heap.watched_since(region), heap.proven_at(region)]));
        let times = times.collect();
        heap.next_window(carry);
        HeapCut { sites, live, times }
    }

    /// The recording ends with the objects of these regions, some of which are gone.
    pub(super) fn count_alive_at_end(
        &mut self,
        of: impl Iterator<Item = RegionId>,
        gone: &HashSet<RegionId>,
    ) {
        let alive_in: HashSet<RegionId> = of.collect();
        self.alive_at_end = alive_in.intersection(gone).count();
    }

    /// Completes the labels of a live object's thread. The id of a thread that has ended may be
    /// another's by now, and its name is forgotten. So the object keeps what was last said of the
    /// thread while it lived.
    pub(super) fn label_maker(
        &mut self,
        region: RegionId,
        tid: u32,
        lives: bool,
        labels: &mut Labels,
    ) {
        match self.makers.get(&(region, tid)) {
            Some(said) if !lives => {
                (labels.thread_name, labels.thread_role, labels.role_evidence) = said.clone();
            }
            _ => {
                let said =
                    (labels.thread_name.clone(), labels.thread_role, labels.role_evidence.clone());
                self.makers.insert((region, tid), said);
            }
        }
    }

    /// Forgets all makers of live objects but these.
    pub(super) fn keep_makers(&mut self, of: &HashSet<(RegionId, u32)>) {
        self.makers.retain(|maker, _| of.contains(maker));
    }

    /// The names that live objects are told apart by.
    pub(super) fn maker_names(&self) -> HashSet<NameId> {
        self.allocations.live().map(|object| object.site.name).collect()
    }

    /// Forgets regions that nothing more comes from.
    pub(super) fn forget(&mut self, gone: &HashSet<RegionId>) {
        for &region in gone {
            self.allocations.region_gone(region);
        }
        self.types.forget(gone);
    }

    /// How the values were estimated, for the profile's comments. `samples` is the number of
    /// allocations that shims told of.
    pub(super) fn comments(
        &self,
        samples: u64,
        runtimes: impl Iterator<Item = ShimRuntime>,
    ) -> Vec<String> {
        let (ticks, large) = (self.allocations.ticks(), self.allocations.large());
        let mut comments = Vec::new();
        if large > 0 {
            comments.push(
                "alloc, inuse of large objects: the runtime tells of each as it is allocated \
                 (LARGEOBJECT_ALLOCATED): label sampling=exact; of those beyond \
                 --allocation-samples in a second chance chooses with a known probability, and of \
                 those alive beyond --live-objects: sampling=random"
                    .to_owned(),
            );
        }
        if samples > ticks + large {
            comments.push(
                "alloc, inuse (.NET 10 and later): AllocationSampled, every byte an independent \
                 trial with p = 1/102400; an object of s bytes stands for 1/(1-(1-p)^s); unbiased; \
                 label sampled_objects says how many were seen"
                    .to_owned(),
            );
        }
        if ticks > 0 {
            comments.push(
                "alloc, inuse (.NET 6 to 9): AllocationTick, one sample per about 100 KiB at a \
                 fixed stride, standing for the bytes since the last; no unbiased estimator and no \
                 interval exists: types in step with the stride are over- or understated, some \
                 many times over"
                    .to_owned(),
            );
        }
        comments.extend(inuse_comments(samples > 0, runtimes));
        if self.alive_at_end > 0 {
            comments.push(format!(
                "inuse: of {} that had ended or become another program by the end, what was alive, \
                 and how old, when that happened",
                counted(self.alive_at_end, "runtime")
            ));
        }
        comments
    }
}

/// What the profile says of live objects: how they were estimated, if `any` allocation was told of,
/// and which runtimes cannot tell.
fn inuse_comments(any: bool, runtimes: impl Iterator<Item = ShimRuntime>) -> Vec<String> {
    let (watching, blind): (Vec<ShimRuntime>, Vec<ShimRuntime>) =
        runtimes.partition(|runtime| runtime.watches);
    let mut comments = Vec::new();
    if any && (!watching.is_empty() || blind.is_empty()) {
        comments.push(
            "inuse: objects allocated since the shim was loaded, as of the last garbage collection \
             that looked at their generation; those watched when there were more than \
             --live-objects stand for all, by the inverse of the probability with which chance \
             chose them"
                .to_owned(),
        );
    }
    let versions: BTreeSet<(u16, u16, u16)> = blind.iter().map(|runtime| runtime.version).collect();
    comments.extend(versions.into_iter().map(|(major, minor, build)| {
        format!(
            "{INUSE_NOT_AVAILABLE} of .NET {major}.{minor}.{build}, whose profilers have no weak \
             handles (.NET 7 and later do): live objects of its processes are not in this profile, \
             their allocations are"
        )
    }));
    comments
}

#[cfg(test)]
mod tests {
    use super::{ShimRuntime, inuse_comments};

    #[test]
    fn a_runtime_that_cannot_watch_objects_is_said_to() {
        let said = |any, runtimes: &[(u16, bool)]| {
            let runtimes = runtimes
                .iter()
                .map(|&(major, watches)| ShimRuntime { version: (major, 0, 3), watches });
            let said = inuse_comments(any, runtimes);
            let words = ["not available of .NET 6.0.3,", "objects allocated since"];
            words.map(|words| said.iter().filter(|comment| comment.contains(words)).count())
        };
        assert_eq!(
            said(true, &[(6, false), (6, false)]),
            [1, 0],
            "nothing is in `inuse` to be explained"
        );
        assert_eq!(said(false, &[(6, false)]), [1, 0]);
        assert_eq!(said(true, &[(6, false), (10, true)]), [1, 1]);
        assert_eq!(said(true, &[(8, true)]), [0, 1]);
        assert_eq!(said(false, &[(8, true)]), [0, 0]);
    }
}
