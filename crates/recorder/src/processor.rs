//! The slow half of the pipeline: events in time order become stacks, and stacks become values.
//!
//! [`Processor::event`] is the way of one event. It is put in its window ([`rotation`]), attributed
//! to threads and processes ([`identities`]), unwound (`stacks`), and its frames' names are asked
//! for ([`questions`]). Then it is added to the [`values`] of the window in progress. The end of a
//! window turns these into [`estimates`], and names turn estimates into a [`window`].

mod estimates;
mod exclusions;
mod frame_names;
mod gc_activity;
mod heap_values;
mod identities;
mod questions;
mod regions;
mod rotation;
mod shim_events;
mod stacks;
mod thread_contexts;
mod values;
mod wait_reasons;
mod wakers;
mod window;

pub(crate) use estimates::{LivenessAtCut, WindowEstimates};
pub use identities::ManagedProcess;
pub use questions::{NameRequest, Questions};

use crate::cost_attribution::CostAttribution;
use exclusions::WindowExclusions;
use foldhash::HashMap;
use identities::Identities;
use perfusion_aggregate::threads::{ThreadAccounts, WaitReason};
use perfusion_aggregate::wait_reason;
use perfusion_host::pods::Pods;
use perfusion_host::process::ProcessTable;
use perfusion_host::process::table::ProcessStatus;
use perfusion_model::event::{
    CpuSample, Event, EventKind, MonotonicNs, OffCpuThread, RegionId, RuntimeEventCounts, ThreadId,
    ThreadTimes, WaitEnd, WaitStart, Wake, WakeOrigin,
};
use perfusion_model::feature::ExcludedFeatures;
use perfusion_model::frame::FrameKey;
use perfusion_model::labels::Labels;
use perfusion_model::stack::StackTable;
use perfusion_sources::kernel::rule_set::ServiceExclusions;
use perfusion_sources::shim::ShimLimits;
use perfusion_symbolize::Symbolizer;
use perfusion_symbolize::kernel::WakeSites;
use perfusion_symbolize::types::{ModuleLabels, TypeName};
use questions::NameQuestions;
use regions::ShimRegions;
use rotation::WindowRotation;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};
use thread_contexts::ThreadContexts;
use values::WindowValues;
use wait_reasons::WaitReasons;
use wakers::Wakers;

/// What happened to stacks and pauses, for the loss line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StackCounters {
    /// User stacks walked.
    pub(crate) walked: u64,
    /// Of them, those that reached the thread's start with no guess.
    pub(crate) exact: u64,
    /// Frames found by guessing.
    pub(crate) guessed_frames: u64,
    /// Of CPU samples, those stored.
    pub(crate) cpu_samples: u64,
    /// Kept waits.
    pub(crate) waits: u64,
    /// Allocation samples.
    pub(crate) allocations: u64,
    /// Allocation samples that came after the end, while names were waited for: not in the profile.
    pub(crate) allocations_after_end: u64,
    /// Exceptions that were reported.
    pub(crate) exceptions: u64,
    /// Waits for locks that were reported.
    pub(crate) contentions: u64,
    /// Of both, those that came after the end.
    pub(crate) runtime_events_after_end: u64,
    /// Managed frames of windows, of processes whose shim is asked for names.
    pub(crate) managed_frames: u64,
    /// Of them, those without a name.
    pub(crate) managed_unnamed: u64,
}

/// State of one recording between the collector and the encoder.
pub struct Processor {
    /// The processes, and what is mapped where in them.
    pub processes: ProcessTable,
    /// Names, as far as shims gave them.
    pub symbolizer: Symbolizer,
    identities: Identities,
    regions: ShimRegions,
    exclusions: WindowExclusions,
    stacks: StackTable,
    thread_contexts: ThreadContexts,
    questions: NameQuestions,
    wakers: Wakers,
    wait_reasons: WaitReasons,
    values: WindowValues,
    rotation: WindowRotation,
    counters: StackCounters,
    cost: CostAttribution,
}

impl Processor {
    /// Starts with the processes the table already knows.
    #[must_use]
    pub fn new(processes: ProcessTable) -> Self {
        Self {
            processes,
            symbolizer: Symbolizer::default(),
            identities: Identities::default(),
            regions: ShimRegions::default(),
            exclusions: WindowExclusions::default(),
            stacks: StackTable::default(),
            thread_contexts: ThreadContexts::default(),
            questions: NameQuestions::default(),
            wakers: Wakers::default(),
            wait_reasons: WaitReasons::default(),
            values: WindowValues::default(),
            rotation: WindowRotation::default(),
            counters: StackCounters::default(),
            cost: CostAttribution::default(),
        }
    }

    /// Tells services apart, and shows the pods of processes. Threads and wakers are not told
    /// apart, because they would multiply samples.
    #[must_use]
    pub(crate) fn by_service(mut self, pods: Arc<Pods>) -> Self {
        self.identities.tell_services(pods);
        self.without_threads()
    }

    /// Tells neither threads nor wakers apart.
    #[must_use]
    pub fn without_threads(mut self) -> Self {
        self.identities.hide_threads();
        self
    }

    /// From now on live objects that these weak handles watch, by region and sample, are told apart
    /// by them.
    pub fn tell_handles(&mut self, handles: HashMap<(RegionId, u64), u64>) {
        self.values.heap.tell_handles(handles);
    }

    /// Sets what shims are asked for.
    pub(crate) fn expect(&mut self, limits: ShimLimits) {
        let samples = self.has_windows().then_some(limits.allocation_samples);
        self.values.heap.allocations.expect(limits.live_objects, samples);
    }

    /// Shows what ended each wait beyond the wait's own stack.
    #[must_use]
    pub(crate) fn with_waker_stacks(mut self, waker_stacks: bool) -> Self {
        self.wakers.show_stacks(waker_stacks);
        self
    }

    /// Shows of waits for locks where the owner was meanwhile.
    #[must_use]
    pub(crate) fn with_lock_owners(mut self) -> Self {
        self.values.accounts.remember();
        self
    }

    /// Has stacks say what their threads worked for, where they publish it.
    #[must_use]
    pub(crate) fn with_spans(self, spans: bool) -> Self {
        Self { thread_contexts: ThreadContexts::new(spans), ..self }
    }

    /// Has frames keep their lines.
    #[must_use]
    pub fn with_lines(mut self, lines: bool) -> Self {
        if lines {
            self.processes.tell_offsets();
            self.symbolizer.find_lines();
        }
        self
    }

    /// True when this window is one of several.
    fn has_windows(&self) -> bool {
        self.identities.has_services()
    }

    /// Takes one event; events come in time order.
    pub fn event(&mut self, event: Event) {
        let Some(event) = self.rotation.put_off(event) else { return };
        let measured = self.cost.begin(&event, &self.processes);
        self.attribute(&event);
        self.add(event);
        if let Some(measured) = measured {
            measured.end(&mut self.processes);
        }
    }

    /// Keeps up what is known of threads and processes.
    fn attribute(&mut self, event: &Event) {
        let time = event.time;
        if let EventKind::Exec { pid, comm } = &event.kind {
            let regions: Vec<RegionId> = self.regions.of(*pid).collect();
            self.identities.retire(*pid, comm, time, &regions, &self.processes);
        }
        self.processes.observe(event);
        let accounts = &mut self.values.accounts;
        match &event.kind {
            EventKind::Exec { pid, comm } => {
                self.identities.became_another(*pid, comm);
                self.thread_contexts.forget(*pid, &mut self.processes);
            }
            EventKind::Rename(rename) => self.identities.renamed(time, rename, accounts),
            EventKind::Comm { thread, comm } => {
                self.identities.named(*thread, comm, time, accounts);
            }
            EventKind::Fork { parent, thread } => self.forked(*parent, *thread),
            EventKind::Exit { thread } => {
                self.identities.retired.exited(*thread);
                if thread.tid == thread.pid {
                    self.thread_contexts.forget(thread.pid, &mut self.processes);
                }
            }
            EventKind::ProcessRecordsLost => self.identities.doubt(),
            _ => {}
        }
    }

    fn forked(&mut self, parent: ThreadId, thread: ThreadId) {
        self.identities.forked(parent, thread);
        if self.has_windows() {
            self.rotation.note_begun(thread.tid);
        }
        if parent.pid != thread.pid {
            // What is known of that pid is of the process that had it before.
            self.thread_contexts.forget(thread.pid, &mut self.processes);
        }
    }

    /// Unwinds an event that has a stack, and adds it to the values.
    fn add(&mut self, event: Event) {
        let time = event.time;
        match event.kind {
            EventKind::CpuSample(sample) => self.cpu_sample(time, &sample),
            EventKind::WaitStart(wait) => self.wait_start(time, &wait),
            EventKind::OffCpu(thread) => self.off_cpu_thread(time, &thread),
            EventKind::Wake(wake) => self.wake(time, wake),
            EventKind::WaitEnd(end) => self.wait_end(end),
            EventKind::ThreadEnd(times) => self.thread_end(times),
            EventKind::Shim { pid, region, event } => self.shim(time, pid, region, event),
            EventKind::Exec { .. }
            | EventKind::Rename(_)
            | EventKind::Comm { .. }
            | EventKind::Fork { .. }
            | EventKind::Exit { .. }
            | EventKind::Mmap(_)
            | EventKind::ProcessRecordsLost => {}
        }
    }

    fn cpu_sample(&mut self, time: MonotonicNs, sample: &CpuSample) {
        self.counters.cpu_samples += 1;
        self.sampled(sample.thread, &sample.comm, time);
        let user = sample.user.as_deref();
        let stack = self.stack_for(sample.thread, time, &sample.kernel, user, sample.span);
        self.values.add_cpu_sample(sample.thread, time, stack);
    }

    fn wait_start(&mut self, time: MonotonicNs, wait: &WaitStart) {
        self.counters.waits += 1;
        self.values.wait_chances.kept(wait.weight);
        self.sampled(wait.thread, &wait.comm, time);
        let user = wait.user.as_deref();
        let stack = self.stack_for(wait.thread, time, &wait.kernel, user, wait.span);
        let reason = WaitReason {
            state: wait.state.into(),
            syscall: wait.syscall.map(wait_reason::family),
            io: wait.io,
            suspended: self.is_suspended(wait.thread.pid),
        };
        self.values.add_wait_start(wait, time, stack, reason);
    }

    /// A thread found off the CPU. It will return to its frames, so their code is surely there.
    /// What has no name yet is asked for.
    fn off_cpu_thread(&mut self, time: MonotonicNs, found: &OffCpuThread) {
        let (thread, start) = (found.thread, found.start);
        self.sampled(thread, &found.comm, time);
        if let Some(stack) = self.values.accounts.seen_waiting(thread, start) {
            self.ask_again(thread.pid, stack, time);
        } else if let Some(seen) = &found.seen {
            let stack = self.stack_for(thread, time, &seen.kernel, seen.user.as_deref(), seen.span);
            // The wait began long ago: whether the process was suspended then is not known.
            let syscall = seen.syscall.map(wait_reason::family);
            let reason =
                WaitReason { state: seen.state.into(), syscall, io: seen.io, suspended: false };
            self.values.accounts.off_cpu(thread, start, stack, reason);
        }
        if let Some(off_cpu_ns) = found.off_cpu_ns {
            let left = MonotonicNs(time.0.saturating_sub(off_cpu_ns));
            self.values.accounts.left_cpu(thread, start, left);
        }
    }

    fn wake(&mut self, time: MonotonicNs, wake: Wake) {
        let origin = self.wakers.origin(&wake);
        // The thread that an interrupt found there had nothing to do with it.
        let by = wake.by.filter(|_| origin == Some(WakeOrigin::Thread));
        let stack = by.map(|by| {
            self.sampled(by.thread, &by.comm, time);
            self.stack_for(by.thread, time, &wake.kernel, by.user.as_deref(), None)
        });
        match origin {
            Some(origin) => self.values.accounts.wake(wake.tid, wake.start, origin, stack),
            None => self.wakers.set_unknown(wake.tid, wake.start),
        }
    }

    fn wait_end(&mut self, mut end: WaitEnd) {
        self.wakers.check(&mut end);
        self.values.accounts.wait_end(&end);
    }

    fn thread_end(&mut self, times: ThreadTimes) {
        self.wakers.forget(times.thread.tid);
        let labels = self.labels_of(times.thread, times.since);
        if let Some(service) = &labels.service {
            self.exclusions.note(service, ExcludedFeatures(times.left_out));
        }
        self.identities.thread_ends(times, labels, &mut self.values.accounts);
    }

    fn sampled(&mut self, thread: ThreadId, comm: &[u8; 16], at: MonotonicNs) {
        self.identities.sampled(thread, comm, at, &mut self.values.accounts);
    }

    /// Whether all managed threads of a process are stopped for a collection.
    fn is_suspended(&self, pid: u32) -> bool {
        self.values.gc.paused().any(|region| self.regions.pid(region) == Some(pid))
    }

    /// From now on the shims of `pid` are asked for names, or not.
    pub(crate) fn ask_for_names(&mut self, pid: u32, is_asked: bool) {
        self.questions.set_asked(pid, is_asked);
    }

    /// The kernel source ended at `at`. What a shim tells of later is not counted, but its names
    /// still are.
    pub(crate) fn close_at(&mut self, at: MonotonicNs) {
        self.rotation.close(at);
    }

    /// The runtimes have counted so many exceptions and contentions.
    pub(crate) fn count_runtime_events(&mut self, counts: &[RuntimeEventCounts]) {
        self.values.runtime_counts.count(counts);
    }

    /// The processes that run a CLR.
    pub(crate) fn managed(&mut self) -> Vec<ManagedProcess> {
        self.identities.managed(&self.processes)
    }

    /// How the processes stand, with their services.
    pub(crate) fn standings(&self) -> Vec<ProcessStatus> {
        self.identities.standings(&self.processes)
    }

    /// Sets how many bytes the stacks of a window may take.
    pub(crate) fn allow_stacks(&mut self, bytes: u64) {
        self.stacks.allow(bytes);
    }

    /// How much of that they take, from 0 to 1.
    pub(crate) fn stacks_fill(&self) -> f64 {
        self.stacks.fill()
    }

    /// What the probes left out of the processes of this service in the window that was over last.
    #[must_use]
    pub fn left_out(&self, service: &str) -> Option<ServiceExclusions> {
        self.exclusions.of_last_window(service)
    }

    /// Where wake-ups come from, for a thread that reads it ahead.
    pub(crate) fn wake_sites(&self) -> Arc<OnceLock<WakeSites>> {
        self.wakers.sites()
    }

    /// The probes had no room for where the threads of `pid` publish what they work for.
    pub(crate) fn spans_refused(&mut self, pid: u32) {
        self.thread_contexts.refused(pid);
    }

    /// What is known of the threads right now.
    #[must_use]
    pub fn threads(&self) -> &ThreadAccounts {
        &self.values.accounts
    }

    /// What a thread's values are counted under.
    #[must_use]
    pub fn labels(&self, thread: ThreadId, is_detailed: bool) -> Labels {
        self.identities.labels(thread, is_detailed, &self.processes)
    }

    /// The same with the thread's service, and with as much detail as this recording has. The
    /// thread entered the recording at `since`.
    fn labels_of(&mut self, thread: ThreadId, since: MonotonicNs) -> Labels {
        self.identities.labels_of(thread, since, &self.processes)
    }

    /// What the values of a runtime's thread are counted under; those of its process without one.
    fn region_labels(&mut self, region: RegionId, tid: Option<u32>) -> Labels {
        let pid = self.regions.pid(region).unwrap_or(0);
        self.identities.region_labels(region, pid, tid, &self.processes)
    }

    /// Words for a wait in `frames`, which are named.
    #[must_use]
    pub fn wait_reason(&self, reason: WaitReason, frames: &[FrameKey]) -> &'static str {
        self.wait_reasons.name(reason, frames, &self.symbolizer)
    }

    /// The names that samples of a process bear for what its runtime calls so, as far as it has
    /// told.
    pub fn type_names(&self) -> impl Fn(u32, u64) -> Option<TypeName> {
        let names = self.values.heap.types.told_apart();
        move |pid, type_id| self.regions.of(pid).find_map(|region| names.get(region, type_id))
    }

    /// The modules of a process's runtime, as the labels of its samples number them.
    #[must_use]
    pub fn contexts(&self, pid: u32) -> ModuleLabels {
        let region = self.regions.of(pid).next();
        region.map(|region| self.values.heap.types.contexts(region)).unwrap_or_default()
    }

    /// What happened to stacks so far.
    #[must_use]
    pub(crate) fn counters(&self) -> StackCounters {
        self.counters
    }

    /// How allocations were estimated, for the profile's comments.
    #[must_use]
    pub fn estimator_comments(&self) -> Vec<String> {
        self.values.heap.comments(self.counters.allocations, self.regions.runtimes())
    }

    /// What the estimators and their tables could not take as it came.
    #[must_use]
    pub(crate) fn estimator_counters(&self) -> [(&'static str, u64); 11] {
        let WindowValues { accounts, heap, runtime_events, gc, pools, .. } = &self.values;
        let (sites, live) = heap.allocations.refused();
        [
            ("wait_ends_unmatched", accounts.unmatched_wait_ends()),
            ("threads_summed_up", accounts.summed_up()),
            ("wakers_capped", accounts.wakers_capped()),
            ("allocations_untracked", heap.allocations.untracked()),
            ("allocation_sites_refused", sites),
            ("live_objects_refused", live),
            ("runtime_event_places_refused", runtime_events.refused()),
            ("gc_events_unmatched", gc.unmatched()),
            ("thread_pool_starvations", pools.starved()),
            ("stacks_refused", self.stacks.refused()),
            ("spans_refused", self.stacks.spans_refused()),
        ]
    }

    /// Memory is short: forgets what can be found out again. What the window in progress holds
    /// stays.
    pub(crate) fn shed(&mut self) {
        self.processes.shed();
        self.symbolizer.shed(&self.stacks.iter().flatten().copied().collect());
        crate::trim::give_back();
    }

    /// Forgets what only a window that is over and encoded needed: all that was kept of processes,
    /// threads and regions that are gone.
    pub(crate) fn forget(&mut self, liveness: &LivenessAtCut) {
        let LivenessAtCut { regions, threads, pids } = liveness;
        // Those that began since were in no list of who is there: a window waits up to seconds for
        // names before it is forgotten.
        let (mut threads, mut pids) = (threads.clone(), pids.clone());
        threads.extend(self.rotation.begun());
        pids.extend(self.rotation.begun());
        for thread in self.values.accounts.ids() {
            threads.insert(thread.tid);
            pids.insert(thread.pid);
        }
        let names = self.values.heap.maker_names();
        self.identities.keep(&threads, &pids, &names, regions);
        self.questions.keep(&pids);
        self.thread_contexts.keep(&pids, &mut self.processes);
        self.values.keep(&threads, regions);
        self.regions.forget(regions);
        let (mut images, mut processes) = (HashSet::new(), HashSet::new());
        for frame in self.stacks.iter().flatten() {
            match *frame {
                FrameKey::Native { image, .. } => drop(images.insert(image)),
                FrameKey::Managed { process, .. }
                | FrameKey::Stub { process, .. }
                | FrameKey::Unknown { process, .. } => drop(processes.insert(process)),
                FrameKey::Kernel(_) | FrameKey::Marker(_) => {}
            }
        }
        self.processes.forget_gone(&images, &mut processes);
        self.symbolizer.keep(&self.processes, &processes);
        self.wait_reasons.keep(&self.processes);
    }
}

#[cfg(test)]
mod tests {
    use super::Processor;
    use perfusion_host::process::ProcessTable;
    use perfusion_model::event::{Event, EventKind, MonotonicNs, RegionId, ShimEvent};

    #[test]
    fn a_runtime_that_cannot_watch_objects_is_told_of_until_it_is_gone() {
        let mut processor = Processor::new(ProcessTable::new());
        let hello = ShimEvent::Hello { runtime: (6, 0, 36), watches: false };
        let kind = EventKind::Shim { pid: std::process::id(), region: RegionId(3), event: hello };
        processor.event(Event { time: MonotonicNs(1), kind });
        let comments = processor.estimator_comments();
        assert!(
            comments.iter().any(|said| said.contains("not available of .NET 6.0.36")),
            "{comments:?}"
        );
    }
}
