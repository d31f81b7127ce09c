//! The end of a window, in three steps that lie apart in time.
//!
//! 1. *Announced* ([`Cutting`]): the collector has read the times of all threads, each at its own
//!    moment. What is still on its way belongs to the old window or the next one, thread by thread;
//!    the latter is put off.
//! 2. *Cut* ([`Cut`]): all of the old window has arrived. Its estimates are made, labels with them,
//!    since the ids may be others' later.
//! 3. *Window*: the last names have come, or their time is over.

use super::Processor;
use crate::names::comm_text;
use crate::naming;
use crate::starts;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_aggregate::chance::Chances;
use perfusion_aggregate::collections::{CollectionKind, CollectionSum};
use perfusion_aggregate::exceptions_and_contentions::{
    self, ExceptionSum, LockWait, LockWaitSum, Throw,
};
use perfusion_aggregate::heap::{LiveObject, Site, Weight, age_bucket_seconds, count_bucket};
use perfusion_aggregate::pool;
use perfusion_aggregate::runtime_wait::{self, LockEvents, RuntimeWaits};
use perfusion_aggregate::threads::{StackOrMarker, ThreadRow, WaitStateKey, Waker};
use perfusion_aggregate::window::{Window, WindowLimits};
use perfusion_model::event::{
    Event, EventKind, MonotonicNs, RegionId, ShimEvent, ThreadId, ThreadSnapshot,
};
use perfusion_model::frame::{FrameKey, ImageId, Marker};
use perfusion_model::labels::{
    CollectionLabels, Labels, NameId, OTHER, SampleType, Sampling, SpanLabels, UNKNOWN_TYPE,
};
use perfusion_model::stack::{StackId, StackTable};
use perfusion_sources::kernel::rule_set::ServiceExclusions;
use perfusion_symbolize::file_name;
use perfusion_symbolize::types::TypeName;
use std::collections::HashSet;
use std::sync::Arc;

/// A cut that was announced.
pub(super) struct WindowRotation {
    at: MonotonicNs,
    running: Vec<ThreadSnapshot>,
    /// When each thread was looked at.
    looked: HashMap<u32, MonotonicNs>,
    later: Vec<Event>,
}

impl WindowRotation {
    /// Gives the event back unless it belongs to the next window: then it waits for that.
    pub(super) fn put_off(cutting: &mut Option<Self>, event: Event) -> Option<Event> {
        let Some(cutting) = cutting else { return Some(event) };
        if event.time <= cutting.end_of(&event.kind) {
            return Some(event);
        }
        cutting.later.push(event);
        None
    }

    /// Until when events of this kind are the old window's.
    fn end_of(&self, kind: &EventKind) -> MonotonicNs {
        let tid = match kind {
            EventKind::CpuSample(sample) => sample.thread.tid,
            EventKind::WaitStart(wait) => wait.thread.tid,
            EventKind::Sleeper(sleeper) => sleeper.thread.tid,
            EventKind::Wake(wake) => wake.tid,
            EventKind::WaitEnd(end) => end.thread.tid,
            EventKind::ThreadEnd(times) => times.thread.tid,
            EventKind::Rename(rename) => rename.thread.tid,
            // Names serve both windows, and the process table lives through all.
            EventKind::Exec { .. }
            | EventKind::Comm { .. }
            | EventKind::Fork { .. }
            | EventKind::Exit { .. }
            | EventKind::Mmap(_)
            | EventKind::ProcessRecordsLost => return MonotonicNs(u64::MAX),
            EventKind::Shim { event, .. } => {
                return match event {
                    ShimEvent::Method(_)
                    | ShimEvent::NoMethod { .. }
                    | ShimEvent::TypeName { .. }
                    | ShimEvent::CodeUnloaded { .. } => MonotonicNs(u64::MAX),
                    _ => self.at,
                };
            }
        };
        self.looked.get(&tid).copied().unwrap_or(self.at)
    }
}

impl Processor {
    /// A window ends: these were the threads, each at its own moment, `at` the earliest. What comes
    /// from now on may be the next window's.
    pub fn begin_cut(&mut self, at: MonotonicNs, running: Vec<ThreadSnapshot>) {
        let [now, before] = &mut self.begun;
        *before = std::mem::take(now);
        let looked =
            running.iter().map(|snapshot| (snapshot.times.thread.tid, snapshot.at)).collect();
        self.cutting = Some(WindowRotation { at, running, looked, later: Vec::new() });
    }

    /// All that belongs to the window that ends has come. `None` when none was announced.
    pub fn end_cut(&mut self) -> Option<WindowEstimates> {
        let WindowRotation { at, running, later, .. } = self.cutting.take()?;
        let cut = WindowEstimates::of(self, at, &running, false);
        for event in later {
            self.event(event);
        }
        Some(cut)
    }

    /// Closes the recording: the values of its only or last window. `running` are the threads that
    /// exist at the end.
    #[must_use]
    pub fn close(&mut self, now: MonotonicNs, running: &[ThreadSnapshot]) -> Window {
        let cut = WindowEstimates::of(self, now, running, true);
        self.window(cut).0
    }

    /// The window of a cut, with all names that are known by now, and what to forget when it is
    /// encoded.
    #[must_use]
    pub fn window(&mut self, cut: WindowEstimates) -> (Window, LivenessAtCut) {
        let mut cut = cut;
        self.symbolizer
            .resolve(cut.labels().flat_map(unnamed).chain(self.starts.unnamed()), &self.processes);
        self.starts.name(&self.symbolizer);
        cut.labels_mut().for_each(|labels| self.settle_role(labels));
        let WindowEstimates {
            mut rows,
            labels,
            stacks,
            sites,
            live,
            pauses,
            throws,
            unsampled,
            lock_waits,
            ..
        } = cut;
        let (lock_events, gone) = (cut.lock_events, cut.gone);
        self.left_out_before = cut.left_out;
        let mut window = Window::new(WindowLimits::default());
        window.pools = cut.pools;
        window.wait_chances = cut.wait_chances;
        let frames = stacks.iter().flatten().copied();
        self.symbolizer.resolve(frames.chain(lock_events.frames()), &self.processes);
        let functions = self.wait_functions.called(stacks.iter(), &self.processes);
        self.symbolizer.resolve(functions.iter().map(|&(function, _)| function), &self.processes);
        self.runtime_waits =
            RuntimeWaits::learn(stacks.iter(), &lock_events, &functions, |frame| {
                self.symbolizer.symbol(frame)
            });
        let waits = rows.iter().filter_map(|row| match row.place {
            StackOrMarker::Stack(stack) => {
                let by_collector =
                    matches!(row.waker, Some(Waker::Thread { id, .. }) if cut.pausers.contains(&id));
                let (stack, blocked_ns) = (stacks.frames(stack), row.blocked_ns);
                Some(runtime_wait::StackWaits { stack, reason: row.reason?, by_collector, blocked_ns })
            }
            StackOrMarker::Marker(_) => None,
        });
        self.runtime_waits.learn_pauses(waits, |frame| self.symbolizer.symbol(frame));
        // What is beyond the window's bound on distinct rows is one row: the few of these families
        // would be lost among those of time.
        self.add_heap(&mut window, &stacks, sites, live);
        for (labels, total) in pauses {
            let frames = [FrameKey::Marker(Marker::GarbageCollector)];
            window.add(&frames, &labels, SampleType::GcPause, total as f64);
        }
        for (labels, [exceptions, contentions]) in unsampled {
            let values = [
                (SampleType::Exceptions, exceptions as f64),
                (SampleType::Contentions, contentions as f64),
            ];
            window.add_all(&[FrameKey::Marker(Marker::NotSampled)], &labels, &values);
        }
        for (stack, labels, ExceptionSum { count, .. }) in throws {
            let frames = naming::from_throw(&self.symbolizer, stacks.frames(stack));
            window.add(frames, &labels, SampleType::Exceptions, count);
        }
        for (wait, labels, LockWaitSum { count, ns, .. }) in lock_waits {
            let values = [(SampleType::Contentions, count), (SampleType::Delay, ns)];
            let waiting = stacks.frames(wait.place.stack);
            match wait.held_at {
                Some(held_at) => {
                    let frames =
                        naming::with_owner(&self.symbolizer, waiting, stacks.frames(held_at));
                    window.add_all(&frames, &labels, &values);
                }
                None => window.add_all(waiting, &labels, &values),
            }
        }
        sort_by_share(&mut rows);
        for row in &rows {
            let labels = match labels.get(&(row.thread.tid, row.since)) {
                Some(labels) => named(labels.clone(), row.name.clone()),
                None => Labels::default(),
            };
            self.add_row(&mut window, row, labels, &stacks);
        }
        let frames = window.frames();
        self.symbolizer.resolve(frames.iter().copied(), &self.processes);
        self.count_managed(&frames);
        window.sum_into(
            SampleType::Wall,
            &[SampleType::Cpu, SampleType::Runnable, SampleType::Blocked],
        );
        (window, gone)
    }

    /// What a runtime's thread was called then, as whole as it is known by now.
    fn name_then(&self, region: RegionId, tid: u32, name: NameId) -> Option<Arc<str>> {
        let pid = self.region_pid.get(&region).copied().unwrap_or(0);
        self.names.text(name).map(|name| self.names.completed(ThreadId { pid, tid }, &name))
    }

    /// The methods near the thread's start have the names that they will have in this window.
    fn settle_role(&self, labels: &mut Labels) {
        if let Some(evidence) = labels.role_evidence.take() {
            let mut evidence = Arc::unwrap_or_clone(evidence);
            evidence.name(|frame| starts::named(&self.symbolizer, frame));
            labels.thread_role = Some(evidence.role());
        }
    }

    /// Who ended a wait, with ids and without.
    fn waker_texts(&self, waker: Waker) -> (Arc<str>, Arc<str>) {
        let same = |text: &str| {
            let text: Arc<str> = text.into();
            (Arc::clone(&text), text)
        };
        match waker {
            Waker::Timer => same("timer"),
            Waker::Interrupt => same("interrupt"),
            Waker::Other => same(OTHER),
            Waker::Thread { id, comm, .. } => {
                let name = self.names.completed(id, &comm_text(&comm));
                (format!("{name} {}/{}", id.pid, id.tid).into(), name)
            }
        }
    }

    /// Allocations, and the objects that are alive.
    fn add_heap(
        &self,
        window: &mut Window,
        stacks: &StackTable,
        sites: Vec<(Site, Weight, Labels)>,
        live: Vec<(LiveObject, ObjectSurvival, Labels)>,
    ) {
        let unknown = TypeName { shown: UNKNOWN_TYPE.into(), raw: None, module: None };
        let types = self.types.told_apart();
        let site_labels = |site: &Site, labels: Labels| {
            let TypeName { shown, raw, module } =
                types.get(site.region, site.type_id).unwrap_or_else(|| unknown.clone());
            Labels {
                type_name: Some(shown),
                type_raw: raw,
                type_module: module,
                heap: Some(site.heap),
                size_class: (site.size_class > 0).then_some(site.size_class),
                sampling: Some(site.sampling),
                ..labels
            }
        };
        // Summed up by what the profile shows first: how many samples are behind a value is one of
        // its labels.
        let mut allocated: HashMap<(StackId, Labels), Weight> = HashMap::new();
        for (site, weight, labels) in sites {
            *allocated.entry((site.stack, site_labels(&site, labels))).or_default() += weight;
        }
        let mut alive: HashMap<(StackId, Labels), Weight> = HashMap::new();
        for (object, survived, labels) in live {
            let labels = Labels {
                age_seconds: Some(age_bucket_seconds(object.born, survived.until)),
                generation: Some(object.generation),
                survived: Some(count_bucket(survived.all)),
                // More than two prove no more.
                survived_old: survived.old.map(|count| u64::from(count.min(2))),
                told_one_in: survived.told_one_in,
                unwatched: survived.unwatched.filter(|_| object.site.sampling == Sampling::Exact),
                sampling: Some(object.sampling()),
                ..site_labels(&object.site, labels)
            };
            *alive.entry((object.site.stack, labels)).or_default() += object.weight();
        }
        let columns = [
            (allocated, [SampleType::AllocObjects, SampleType::AllocSpace]),
            (alive, [SampleType::InuseObjects, SampleType::InuseSpace]),
        ];
        let rows = columns
            .into_iter()
            .flat_map(|(rows, columns)| rows.into_iter().map(move |row| (row, columns)));
        let mut rows: Vec<_> = rows.collect();
        sort_by_type(&mut rows, |(((_, labels), weight), _)| (labels, weight.bytes));
        for (((stack, labels), weight), [objects, bytes]) in rows {
            let by_chance = labels.sampling == Some(Sampling::Random);
            let labels = Labels {
                sampled_objects: Some(weight.seen),
                sampled_bytes: Some(weight.seen_bytes),
                space_stderr: by_chance.then_some(weight.variance.max(0.0).sqrt().round() as u64),
                ..labels
            };
            let values = [(objects, weight.objects), (bytes, weight.bytes)];
            window.add_all(stacks.frames(stack), &labels, &values);
        }
    }

    fn file_name(&self, image: ImageId) -> Option<&str> {
        self.processes.image(image).map(|image| file_name(&image.path))
    }

    fn add_row(
        &self,
        window: &mut Window,
        row: &ThreadRow,
        mut labels: Labels,
        stacks: &StackTable,
    ) {
        let waker = row.waker.filter(|_| self.is_detailed());
        (labels.waker, labels.waker_name) = waker.map(|waker| self.waker_texts(waker)).unzip();
        let marker;
        let frames = match row.place {
            StackOrMarker::Stack(stack) => {
                naming::without_own_frames(&self.symbolizer, stacks.frames(stack))
            }
            StackOrMarker::Marker(what) => {
                marker = [FrameKey::Marker(what)];
                &marker[..]
            }
        };
        if let StackOrMarker::Stack(stack) = row.place {
            labels.span = stacks.span(stack).map(SpanLabels::of).map(Arc::new);
        }
        labels.wait_reason = row.reason.map(|reason| self.wait_reason(reason, frames));
        if row.reason.is_some_and(|reason| reason.state == WaitStateKey::Interruptible)
            && naming::is_parked(&self.symbolizer, labels.thread_role, frames, |image| {
                self.file_name(image)
            })
        {
            labels.idle = true;
        }
        // Rounded up: an error of a part of a nanosecond is none.
        labels.wait_stderr =
            (row.wait_stderr_ns >= 1.0).then_some(row.wait_stderr_ns.ceil() as u64);
        let values = [
            (SampleType::Samples, row.samples as f64),
            (SampleType::Cpu, row.cpu_ns),
            (SampleType::Runnable, row.runnable_ns),
            (SampleType::Blocked, row.blocked_ns),
        ];
        match row.waker.filter(|_| self.has_waker_stacks()) {
            Some(waker) => {
                let frames = naming::with_waker(&self.symbolizer, frames, waker, stacks);
                window.add_all(&frames, &labels, &values);
            }
            None => window.add_all(frames, &labels, &values),
        }
    }
}

/// Puts all of a type in a row, and first the types of most bytes: a window keeps so many types
/// apart, in the order they come. Rounding goes on from value to value of a column
/// (`pprof::encode`): so a type is off by less than one object, and what is exact, before all
/// others, loses nothing by them.
fn sort_by_type<T>(rows: &mut [T], of: impl Fn(&T) -> (&Labels, f64)) {
    let mut sums: HashMap<Option<Arc<str>>, f64> = HashMap::new();
    for (labels, bytes) in rows.iter().map(&of) {
        *sums.entry(labels.type_name.clone()).or_default() += bytes;
    }
    let sum = |labels: &Labels| sums.get(&labels.type_name).copied().unwrap_or(0.0);
    rows.sort_by(|a, b| {
        let ((a, _), (b, _)) = (of(a), of(b));
        let order = |labels: &Labels| labels.sampling != Some(Sampling::Exact);
        let heavier = || sum(b).total_cmp(&sum(a));
        order(a).cmp(&order(b)).then_with(heavier).then_with(|| a.type_name.cmp(&b.type_name))
    });
}

/// Puts first what is most of a column, whichever: a window keeps so many rows apart, in the order
/// they come.
fn sort_by_share(rows: &mut [ThreadRow]) {
    let columns = |row: &ThreadRow| [row.cpu_ns, row.runnable_ns, row.blocked_ns];
    let mut sums = [0.0; 3];
    for row in rows.iter() {
        sums.iter_mut().zip(columns(row)).for_each(|(sum, value)| *sum += value);
    }
    let share = |row: &ThreadRow| {
        let shares = columns(row)
            .into_iter()
            .zip(sums)
            .map(|(value, sum)| if sum > 0.0 { value / sum } else { 0.0 });
        shares.fold(0.0, f64::max)
    };
    rows.sort_by(|a, b| share(b).total_cmp(&share(a)));
}

/// Until when a live object is known of: its process may have ended since. How many collections it
/// has survived, and full ones since it is old; of one in how many like it was told, and how many
/// are not watched.
struct ObjectSurvival {
    until: MonotonicNs,
    all: u32,
    old: Option<u32>,
    told_one_in: Option<u64>,
    unwatched: Option<u64>,
}

/// The estimates of a window that is over; only names may be missing.
pub struct WindowEstimates {
    rows: Vec<ThreadRow>,
    /// Of the rows' threads, by id and when they entered the recording.
    labels: HashMap<(u32, MonotonicNs), Labels>,
    stacks: StackTable,
    sites: Vec<(Site, Weight, Labels)>,
    live: Vec<(LiveObject, ObjectSurvival, Labels)>,
    pauses: Vec<(Labels, u64)>,
    /// Threads that have stopped their process for a collection.
    pausers: HashSet<ThreadId>,
    throws: Vec<(StackId, Labels, ExceptionSum)>,
    /// Exceptions and contentions of processes that told of none.
    unsampled: Vec<(Labels, [u64; 2])>,
    lock_waits: Vec<(LockWait, Labels, LockWaitSum)>,
    lock_events: LockEvents,
    pools: Vec<(Labels, pool::PoolSum)>,
    wait_chances: Chances,
    /// Of services, what the probes leave out.
    left_out: HashMap<Arc<str>, ServiceExclusions>,
    gone: LivenessAtCut,
}

/// What a window's end tells of who is there and who is not.
pub struct LivenessAtCut {
    /// Regions of which nothing more comes.
    pub(super) regions: HashSet<RegionId>,
    /// Ids of all threads and processes that existed.
    pub(super) threads: HashSet<u32>,
    pub(super) pids: HashSet<u32>,
}

/// The methods of labels that are to be named before their role is sure.
fn unnamed(labels: &Labels) -> impl Iterator<Item = FrameKey> {
    labels.role_evidence.iter().flat_map(|evidence| evidence.unnamed()).copied()
}

impl WindowEstimates {
    fn labels(&self) -> impl Iterator<Item = &Labels> {
        let of_rows = self.labels.values();
        let of_sites = self.sites.iter().map(|(_, _, labels)| labels);
        let of_live = self.live.iter().map(|(_, _, labels)| labels);
        let of_throws = self.throws.iter().map(|(_, labels, _)| labels);
        let of_waits = self.lock_waits.iter().map(|(_, labels, _)| labels);
        of_rows
            .chain(of_sites)
            .chain(of_live)
            .chain(of_throws)
            .chain(of_waits)
            .chain(self.labels_of_processes())
    }

    fn labels_of_processes(&self) -> impl Iterator<Item = &Labels> {
        self.pauses
            .iter()
            .map(|(labels, _)| labels)
            .chain(self.pools.iter().map(|(labels, _)| labels))
    }

    fn labels_mut(&mut self) -> impl Iterator<Item = &mut Labels> {
        let of_rows = self.labels.values_mut();
        let of_sites = self.sites.iter_mut().map(|(_, _, labels)| labels);
        let of_live = self.live.iter_mut().map(|(_, _, labels)| labels);
        let of_throws = self.throws.iter_mut().map(|(_, labels, _)| labels);
        let of_waits = self.lock_waits.iter_mut().map(|(_, labels, _)| labels);
        let of_pauses = self.pauses.iter_mut().map(|(labels, _)| labels);
        let of_pools = self.pools.iter_mut().map(|(labels, _)| labels);
        of_rows
            .chain(of_sites)
            .chain(of_live)
            .chain(of_throws)
            .chain(of_waits)
            .chain(of_pauses)
            .chain(of_pools)
    }

    /// Makes a window's estimates. `last`: none comes after it.
    fn of(
        processor: &mut Processor,
        at: MonotonicNs,
        running: &[ThreadSnapshot],
        last: bool,
    ) -> Self {
        let stacks = processor.stacks.take();
        let next = &mut processor.stacks;
        let mut carry = |stack| next.intern_from(&stacks, stack);
        let (collections, collecting) = processor.collections.cut();
        for thread in collecting {
            processor.threads.collected(thread, None);
        }
        processor.threads.name_renamed(|thread| processor.names.shown(thread));
        let rows = processor.threads.cut(running, &mut carry, last);
        let heap = &mut processor.heap;
        let sites: Vec<(Site, Weight, Option<u64>)> =
            heap.sites().map(|(site, weight)| (*site, *weight, heap.told_one_in(site))).collect();
        let gone_at = std::mem::take(&mut processor.regions_gone);
        let survived = |object: &LiveObject| ObjectSurvival {
            until: gone_at.get(&object.site.region).copied().unwrap_or(at),
            all: heap.survived(object),
            old: heap.survived_old(object),
            told_one_in: heap.watched_one_in(&object.site),
            unwatched: heap.unwatched(&object.site),
        };
        let mut live: Vec<(LiveObject, ObjectSurvival)> =
            heap.live().map(|object| (object, survived(&object))).collect();
        let times: HashMap<RegionId, [Option<MonotonicNs>; 2]> = live
            .iter()
            .map(|(object, _)| object.site.region)
            .map(|region| (region, [heap.watched_since(region), heap.proven_at(region)]))
            .collect();
        heap.next_window(&mut carry);
        let mut regions: HashSet<RegionId> = gone_at.keys().copied().collect();
        let is_gone = |pid: u32| perfusion_host::process::start_ticks(pid).is_none();
        regions.extend(
            processor
                .region_pid
                .iter()
                .filter(|(_, pid)| is_gone(**pid))
                .map(|(region, _)| *region),
        );
        if processor.has_windows() {
            // A recording of one program shows what was alive at its end; a window what is.
            live.retain(|(object, _)| !regions.contains(&object.site.region));
        } else {
            let alive_in: HashSet<RegionId> =
                live.iter().map(|(object, _)| object.site.region).collect();
            processor.alive_at_end = alive_in.intersection(&regions).count();
        }
        let mut labels = std::mem::take(&mut processor.ended);
        for row in rows.iter().filter(|row| row.place != StackOrMarker::Marker(Marker::Overflow)) {
            labels
                .entry((row.thread.tid, row.since))
                .or_insert_with(|| processor.labels_of(row.thread, row.since));
        }
        let mut of_site = |site: &Site| {
            let name = processor.name_then(site.region, site.tid, site.name);
            named(processor.region_labels(site.region, Some(site.tid)), name)
        };
        let sites = sites.into_iter().map(|(site, weight, told_one_in)| {
            let labels = Labels { told_one_in, ..of_site(&site) };
            (site, weight, labels)
        });
        let sites = sites.collect();
        let there: HashSet<ThreadId> = running.iter().map(|thread| thread.times.thread).collect();
        let mut made_by = HashSet::new();
        let live = live.into_iter().map(|(object, survived)| {
            let times = times.get(&object.site.region).copied().unwrap_or_default();
            let [watched_ms, proven_ms] =
                times.map(|time| time.map(|time| at.0.saturating_sub(time.0) / 1_000_000));
            let Site { region, tid, name, .. } = object.site;
            made_by.insert((region, tid));
            let labels = processor.maker_labels(region, tid, |thread| there.contains(&thread));
            let labels = named(labels, processor.name_then(region, tid, name));
            let handle = processor.handles.get(&(region, object.sample)).copied();
            (object, survived, Labels { watched_ms, proven_ms, handle, ..labels })
        });
        let live = live.collect();
        processor.keep_makers(&made_by);
        let of_pause =
            |((region, kind), sum): ((RegionId, Option<CollectionKind>), CollectionSum)| {
                (pause_labels(processor, region, kind, sum), sum.pause_ns)
            };
        let pauses = collections.into_iter().map(of_pause).collect();
        let (mut throws, mut waits) = processor.incidents.take();
        let unsampled = processor.incident_totals.complete(&mut throws, &mut waits).into_iter();
        let unsampled =
            unsampled.map(|(region, counts)| (process_labels(processor, region), counts));
        let unsampled = unsampled.collect();
        let throws = throws.into_iter();
        let throws = throws
            .map(|(throw, sum)| (throw.place.stack, throw_labels(processor, throw), sum))
            .collect();
        let waits = waits.into_iter();
        let lock_waits = waits.map(|(wait, of)| (wait, wait_labels(processor, wait), of)).collect();
        let pools = processor.pools.take().into_iter();
        let mut pools: Vec<(Labels, pool::PoolSum)> =
            pools.map(|(region, sum)| (processor.region_labels(region, None), sum)).collect();
        pools.sort_by_key(|(labels, _)| labels.pid);
        processor.note_left_out(running);
        let there =
            || running.iter().map(|snapshot| snapshot.times.thread).chain(processor.threads.ids());
        Self {
            rows,
            labels,
            stacks,
            sites,
            live,
            pauses,
            pausers: processor.pausers.clone(),
            throws,
            unsampled,
            lock_waits,
            lock_events: std::mem::take(&mut processor.lock_events),
            pools,
            wait_chances: std::mem::take(&mut processor.wait_chances),
            left_out: std::mem::take(&mut processor.left_out),
            gone: LivenessAtCut {
                regions,
                threads: there().map(|thread| thread.tid).collect(),
                pids: there().map(|thread| thread.pid).collect(),
            },
        }
    }
}

fn pause_labels(
    processor: &mut Processor,
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
        ..process_labels(processor, region)
    }
}

/// Of what is of a process, and of no thread of it.
fn process_labels(processor: &mut Processor, region: RegionId) -> Labels {
    let labels = processor.region_labels(region, None);
    Labels { thread_name: None, thread_role: None, role_evidence: None, thread_id: None, ..labels }
}

/// Labels of a thread that was called `name` then.
fn named(labels: Labels, name: Option<Arc<str>>) -> Labels {
    match name {
        Some(name) => Labels { thread_name: Some(name), ..labels },
        None => labels,
    }
}

fn place_labels(
    processor: &mut Processor,
    place: exceptions_and_contentions::RuntimeEventSite,
) -> Labels {
    let labels = processor.region_labels(place.region, Some(place.tid));
    named(labels, processor.name_then(place.region, place.tid, place.name))
}

fn throw_labels(processor: &mut Processor, throw: Throw) -> Labels {
    let name = throw.type_name.as_deref().map(TypeName::of);
    let (exception_type, type_raw) =
        name.map_or_else(|| (OTHER.into(), None), |name| (name.shown, name.raw));
    Labels {
        exception_type: Some(exception_type),
        exception_message: throw.message,
        type_raw,
        rethrown: processor.tells_rethrown(throw.place.region).then_some(throw.rethrown),
        ..place_labels(processor, throw.place)
    }
}

fn wait_labels(processor: &mut Processor, wait: LockWait) -> Labels {
    let labels = place_labels(processor, wait.place);
    let owner = wait.owner.filter(|_| processor.is_detailed());
    let (lock_owner, lock_owner_name) =
        owner.map(|owner| processor.owner_texts(labels.pid, owner)).unzip();
    Labels { lock_owner, lock_owner_name, ..labels }
}

#[cfg(test)]
mod tests {
    use super::{
        Labels, MonotonicNs, OTHER, SampleType, Sampling, StackOrMarker, ThreadId, ThreadRow,
        Window, WindowLimits, sort_by_share, sort_by_type,
    };
    use perfusion_model::frame::{FrameKey, Marker};

    #[test]
    fn the_types_of_most_bytes_keep_their_names_and_each_is_in_a_row() {
        let row = |name: &str, sampling, age_seconds, bytes: f64| {
            let labels = Labels {
                type_name: Some(name.into()),
                sampling: Some(sampling),
                ..Labels::default()
            };
            (Labels { age_seconds, ..labels }, bytes)
        };
        let mut rows = [
            row("Account", Sampling::Random, None, 1.0),
            row("byte[]", Sampling::Random, None, 4.0),
            row("string", Sampling::Random, None, 5.0),
            row("byte[]", Sampling::Random, Some(1), 9.0),
            row("Batch", Sampling::Random, None, 1.0),
            row("Exact", Sampling::Exact, None, 1.0),
        ];
        sort_by_type(&mut rows, |(labels, bytes)| (labels, *bytes));
        let names: Vec<_> =
            rows.iter().map(|(labels, _)| labels.type_name.as_deref().unwrap()).collect();
        assert_eq!(names, ["Exact", "byte[]", "byte[]", "string", "Account", "Batch"]);
        let mut window =
            Window::new(WindowLimits { max_label_values: 3, ..WindowLimits::default() });
        for (labels, bytes) in &rows {
            window.add(&[FrameKey::Kernel(1)], labels, SampleType::AllocSpace, *bytes);
        }
        let of = |name: &str| {
            let own =
                window.entries().filter(|entry| entry.labels.type_name.as_deref() == Some(name));
            own.map(|entry| entry.values[SampleType::AllocSpace.index()]).sum::<f64>()
        };
        assert_eq!([of("Exact"), of("byte[]"), of("string"), of(OTHER)], [1.0, 13.0, 5.0, 2.0]);
    }

    #[test]
    fn what_is_most_of_any_column_comes_first() {
        let row = |tid, [cpu_ns, runnable_ns, blocked_ns]: [f64; 3]| ThreadRow {
            thread: ThreadId { pid: 1, tid },
            since: MonotonicNs(0),
            name: None,
            place: StackOrMarker::Marker(Marker::Overflow),
            reason: None,
            waker: None,
            samples: 0,
            cpu_ns,
            runnable_ns,
            blocked_ns,
            wait_stderr_ns: 0.0,
        };
        // Nobody wanted a CPU, and sleep is a thousand times what was computed.
        let mut rows = [
            row(1, [1.0, 0.0, 10.0]),
            row(2, [0.0, 0.0, 4_000.0]),
            row(3, [9.0, 0.0, 0.0]),
            row(4, [0.0, 0.0, 5_990.0]),
            row(5, [0.0, 0.0, 0.0]),
        ];
        sort_by_share(&mut rows);
        assert_eq!(rows.map(|row| row.thread.tid), [3, 4, 2, 1, 5]);
    }
}
