//! The estimates of a window that is over. They are made as soon as all of it has arrived, and
//! their labels with them, because ids may be others' later. Only names may be missing.

use super::Processor;
use super::exclusions::ExclusionsByService;
use super::heap_values::{HeapCut, ObjectSurvival};
use super::identities::LabelsOfThreads;
use super::rotation::ReachedEnd;
use perfusion_aggregate::chance::Chances;
use perfusion_aggregate::collections::{CollectionKind, CollectionSum};
use perfusion_aggregate::exceptions_and_contentions::{
    ExceptionSum, LockWait, LockWaitSum, RuntimeEventSite, Throw,
};
use perfusion_aggregate::heap::{LiveObject, Site, Weight};
use perfusion_aggregate::pool::PoolSum;
use perfusion_aggregate::runtime_wait::LockEvents;
use perfusion_aggregate::threads::{StackOrMarker, ThreadRow};
use perfusion_model::event::{MonotonicNs, RegionId, ThreadId, ThreadSnapshot};
use perfusion_model::feature::ExcludedFeatures;
use perfusion_model::frame::{FrameKey, Marker};
use perfusion_model::labels::{CollectionLabels, Labels, OTHER};
use perfusion_model::stack::{StackId, StackTable};
use perfusion_symbolize::types::TypeName;
use std::collections::HashSet;
use std::sync::Arc;

/// The estimates of one window.
pub(crate) struct WindowEstimates {
    pub(super) stacks: StackTable,
    pub(super) threads: ThreadEstimates,
    pub(super) heap: HeapEstimates,
    /// Labels and nanoseconds of pauses.
    pub(super) pauses: Vec<(Labels, u64)>,
    pub(super) runtime_events: RuntimeEventEstimates,
    pub(super) pools: Vec<(Labels, PoolSum)>,
    pub(super) exclusions: ExclusionsByService,
    pub(super) liveness: LivenessAtCut,
}

/// What threads did, on and off the CPU.
pub(super) struct ThreadEstimates {
    pub(super) rows: Vec<ThreadRow>,
    /// Labels of the rows' threads.
    pub(super) labels: LabelsOfThreads,
    /// Threads that have stopped their process for a collection.
    pub(super) pausers: HashSet<ThreadId>,
    pub(super) wait_chances: Chances,
}

/// What was allocated, and what is alive.
pub(super) struct HeapEstimates {
    pub(super) sites: Vec<(Site, Weight, Labels)>,
    pub(super) live: Vec<(LiveObject, ObjectSurvival, Labels)>,
}

/// Exceptions and contentions.
pub(super) struct RuntimeEventEstimates {
    pub(super) throws: Vec<(StackId, Labels, ExceptionSum)>,
    pub(super) lock_waits: Vec<(LockWait, Labels, LockWaitSum)>,
    /// Exceptions and contentions of processes that told of none.
    pub(super) unsampled: Vec<(Labels, [u64; 2])>,
    pub(super) lock_events: LockEvents,
}

/// Which threads, processes and regions exist at a window's end, and which do not.
pub(crate) struct LivenessAtCut {
    /// Regions that nothing more comes from.
    pub(super) regions: HashSet<RegionId>,
    /// Ids of all threads that existed.
    pub(super) threads: HashSet<u32>,
    /// Ids of all processes that existed.
    pub(super) pids: HashSet<u32>,
}

impl WindowEstimates {
    pub(super) fn labels(&self) -> impl Iterator<Item = &Labels> {
        let Self { threads, heap, pauses, runtime_events, pools, .. } = self;
        let of_threads = threads.labels.values();
        let of_sites = heap.sites.iter().map(|(_, _, labels)| labels);
        let of_live = heap.live.iter().map(|(_, _, labels)| labels);
        let of_throws = runtime_events.throws.iter().map(|(_, labels, _)| labels);
        let of_waits = runtime_events.lock_waits.iter().map(|(_, labels, _)| labels);
        let of_pauses = pauses.iter().map(|(labels, _)| labels);
        let of_pools = pools.iter().map(|(labels, _)| labels);
        of_threads
            .chain(of_sites)
            .chain(of_live)
            .chain(of_throws)
            .chain(of_waits)
            .chain(of_pauses)
            .chain(of_pools)
    }

    pub(super) fn labels_mut(&mut self) -> impl Iterator<Item = &mut Labels> {
        let Self { threads, heap, pauses, runtime_events, pools, .. } = self;
        let of_threads = threads.labels.values_mut();
        let of_sites = heap.sites.iter_mut().map(|(_, _, labels)| labels);
        let of_live = heap.live.iter_mut().map(|(_, _, labels)| labels);
        let of_throws = runtime_events.throws.iter_mut().map(|(_, labels, _)| labels);
        let of_waits = runtime_events.lock_waits.iter_mut().map(|(_, labels, _)| labels);
        let of_pauses = pauses.iter_mut().map(|(labels, _)| labels);
        let of_pools = pools.iter_mut().map(|(labels, _)| labels);
        of_threads
            .chain(of_sites)
            .chain(of_live)
            .chain(of_throws)
            .chain(of_waits)
            .chain(of_pauses)
            .chain(of_pools)
    }
}

impl Processor {
    /// A window ends: these were the threads, each at its own moment, `at` the earliest. What comes
    /// from now on may be the next window's.
    pub(crate) fn begin_cut(&mut self, at: MonotonicNs, running: Vec<ThreadSnapshot>) {
        self.rotation.announce(at, running);
    }

    /// All that belongs to the window that ends has come. `None` when none was announced.
    pub(crate) fn end_cut(&mut self) -> Option<WindowEstimates> {
        let ReachedEnd { at, running, later } = self.rotation.reach()?;
        let estimates = self.estimate(at, &running, false);
        for event in later {
            self.event(event);
        }
        Some(estimates)
    }

    /// Makes a window's estimates. `last`: none comes after it.
    pub(super) fn estimate(
        &mut self,
        at: MonotonicNs,
        running: &[ThreadSnapshot],
        last: bool,
    ) -> WindowEstimates {
        let stacks = self.stacks.take();
        let next = &mut self.stacks;
        let mut carry = |stack| next.intern_from(&stacks, stack);
        let collections = self.values.gc.cut(&mut self.values.accounts);
        self.values.accounts.name_renamed(|thread| self.identities.names.shown(thread));
        let rows = self.values.accounts.cut(running, &mut carry, last);
        let ended = self.regions.take_ended();
        let mut heap = self.values.heap.cut(at, &ended, &mut carry);
        let mut regions: HashSet<RegionId> = ended.into_keys().collect();
        regions.extend(self.regions.of_gone_processes());
        if self.has_windows() {
            // A recording of one program shows what was alive at its end; a window what is.
            heap.live.retain(|(object, _)| !regions.contains(&object.site.region));
        } else {
            let of = heap.live.iter().map(|(object, _)| object.site.region);
            self.values.heap.count_alive_at_end(of, &regions);
        }
        let threads = self.estimate_threads(rows);
        let heap = self.estimate_heap(at, heap, running);
        let pauses = collections
            .into_iter()
            .map(|((region, kind), sum)| (self.pause_labels(region, kind, sum), sum.pause_ns));
        let pauses = pauses.collect();
        let runtime_events = self.estimate_runtime_events();
        let pools = self.values.pools.take().into_iter();
        let mut pools: Vec<(Labels, PoolSum)> =
            pools.map(|(region, sum)| (self.region_labels(region, None), sum)).collect();
        pools.sort_by_key(|(labels, _)| labels.pid);
        self.note_exclusions(running);
        WindowEstimates {
            stacks,
            threads,
            heap,
            pauses,
            runtime_events,
            pools,
            exclusions: self.exclusions.take(),
            liveness: self.liveness(regions, running),
        }
    }

    fn estimate_threads(&mut self, rows: Vec<ThreadRow>) -> ThreadEstimates {
        let mut labels = self.identities.take_ended();
        let overflow = StackOrMarker::Marker(Marker::Overflow);
        for row in rows.iter().filter(|row| row.place != overflow) {
            labels
                .entry((row.thread.tid, row.since))
                .or_insert_with(|| self.labels_of(row.thread, row.since));
        }
        ThreadEstimates {
            rows,
            labels,
            pausers: self.values.gc.pausers().clone(),
            wait_chances: std::mem::take(&mut self.values.wait_chances),
        }
    }

    fn estimate_heap(
        &mut self,
        at: MonotonicNs,
        heap: HeapCut,
        running: &[ThreadSnapshot],
    ) -> HeapEstimates {
        let HeapCut { sites, live, times } = heap;
        let sites = sites.into_iter().map(|(site, weight, told_one_in)| {
            let labels = self.region_labels(site.region, Some(site.tid));
            let thread = self.thread_of(site.region, site.tid);
            let labels = named(labels, self.identities.name_then(thread, site.name));
            (site, weight, Labels { told_one_in, ..labels })
        });
        let sites = sites.collect();
        let there: HashSet<ThreadId> = running.iter().map(|thread| thread.times.thread).collect();
        let mut made_by = HashSet::new();
        let live = live.into_iter().map(|(object, survival)| {
            let Site { region, tid, .. } = object.site;
            let times = times.get(&region).copied().unwrap_or_default();
            let [watched_ms, proven_ms] =
                times.map(|time| time.map(|time| at.0.saturating_sub(time.0) / 1_000_000));
            made_by.insert((region, tid));
            let labels = self.maker_labels(&object, &there);
            let handle = self.values.heap.handle(&object);
            (object, survival, Labels { watched_ms, proven_ms, handle, ..labels })
        });
        let live = live.collect();
        self.values.heap.keep_makers(&made_by);
        HeapEstimates { sites, live }
    }

    /// What a live object is counted under. `there` are the living threads.
    fn maker_labels(&mut self, object: &LiveObject, there: &HashSet<ThreadId>) -> Labels {
        let Site { region, tid, name, .. } = object.site;
        let mut labels = self.region_labels(region, Some(tid));
        let lives =
            self.regions.pid(region).is_some_and(|pid| there.contains(&ThreadId { pid, tid }));
        self.values.heap.label_maker(region, tid, lives, &mut labels);
        let thread = self.thread_of(region, tid);
        named(labels, self.identities.name_then(thread, name))
    }

    fn estimate_runtime_events(&mut self) -> RuntimeEventEstimates {
        let values = &mut self.values;
        let (mut throws, mut waits) = values.runtime_events.take();
        let lock_events = std::mem::take(&mut values.lock_events);
        let unsampled = values.runtime_counts.complete(&mut throws, &mut waits).into_iter();
        let unsampled = unsampled.map(|(region, counts)| (self.process_labels(region), counts));
        let unsampled = unsampled.collect();
        let throws = throws.into_iter();
        let throws =
            throws.map(|(throw, sum)| (throw.place.stack, self.throw_labels(throw), sum)).collect();
        let waits = waits.into_iter();
        let lock_waits = waits.map(|(wait, sum)| (wait, self.wait_labels(wait), sum)).collect();
        RuntimeEventEstimates { throws, lock_waits, unsampled, lock_events }
    }

    /// Notes what the probes leave out of the threads there are.
    fn note_exclusions(&mut self, running: &[ThreadSnapshot]) {
        for ThreadSnapshot { times, .. } in running {
            if let Some(service) = self.identities.known_service(times.thread.pid) {
                self.exclusions.note(&service, ExcludedFeatures(times.left_out));
            }
        }
    }

    fn liveness(&self, regions: HashSet<RegionId>, running: &[ThreadSnapshot]) -> LivenessAtCut {
        let running = running.iter().map(|snapshot| snapshot.times.thread);
        let there = running.chain(self.values.accounts.ids());
        let (threads, pids) = there.map(|thread| (thread.tid, thread.pid)).unzip();
        LivenessAtCut { regions, threads, pids }
    }

    fn thread_of(&self, region: RegionId, tid: u32) -> ThreadId {
        ThreadId { pid: self.regions.pid(region).unwrap_or(0), tid }
    }

    fn pause_labels(
        &mut self,
        region: RegionId,
        kind: Option<CollectionKind>,
        sum: CollectionSum,
    ) -> Labels {
        let collections = kind.map(|kind| CollectionLabels {
            kind: kind.kind,
            count: sum.count,
            longest_ns: sum.longest_ns,
            promoted: sum.promoted,
        });
        Labels {
            gc_reason: Some(kind.map_or("unknown", |kind| kind.reason)),
            generation: kind.map(|kind| kind.generation),
            collections: collections.map(Arc::new),
            ..self.process_labels(region)
        }
    }

    /// Labels of what belongs to a process, and to no thread of it.
    fn process_labels(&mut self, region: RegionId) -> Labels {
        Labels {
            thread_name: None,
            thread_role: None,
            role_evidence: None,
            thread_id: None,
            ..self.region_labels(region, None)
        }
    }

    fn place_labels(&mut self, place: RuntimeEventSite) -> Labels {
        let labels = self.region_labels(place.region, Some(place.tid));
        let thread = self.thread_of(place.region, place.tid);
        named(labels, self.identities.name_then(thread, place.name))
    }

    fn throw_labels(&mut self, throw: Throw) -> Labels {
        let name = throw.type_name.as_deref().map(TypeName::of);
        let (exception_type, type_raw) =
            name.map_or_else(|| (OTHER.into(), None), |name| (name.shown, name.raw));
        let tells_rethrown = self.regions.tells_rethrown(throw.place.region);
        Labels {
            exception_type: Some(exception_type),
            exception_message: throw.message,
            type_raw,
            rethrown: tells_rethrown.then_some(throw.rethrown),
            ..self.place_labels(throw.place)
        }
    }

    fn wait_labels(&mut self, wait: LockWait) -> Labels {
        let labels = self.place_labels(wait.place);
        let owner = wait.owner.filter(|_| self.identities.is_detailed());
        let owner = owner.map(|owner| self.identities.owner_texts(labels.pid, owner));
        let (lock_owner, lock_owner_name) = owner.unzip();
        Labels { lock_owner, lock_owner_name, ..labels }
    }
}

/// Labels of a thread that was called `name` then.
pub(super) fn named(labels: Labels, name: Option<Arc<str>>) -> Labels {
    match name {
        Some(name) => Labels { thread_name: Some(name), ..labels },
        None => labels,
    }
}

/// The methods of labels that are to be named before their role is sure.
pub(super) fn unnamed(labels: &Labels) -> impl Iterator<Item = FrameKey> {
    labels.role_evidence.iter().flat_map(|evidence| evidence.unnamed()).copied()
}
