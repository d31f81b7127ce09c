//! The slow half of the pipeline: events in time order become stacks, and stacks become estimates.
//! Names are only asked for here.

pub mod cut;

use self::cut::{LivenessAtCut, WindowRotation};
use super::cost_attribution::CostAttribution;
use super::names::{ThreadNames, comm_text};
use super::naming;
use super::pre_attach_names::PreAttachNames;
use super::question_times::QuestionTimes;
use super::retired_programs::{RetiredProgram, RetiredPrograms};
use super::starts::ThreadStarts;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_aggregate::chance::Chances;
use perfusion_aggregate::collecting::CollectingThreads;
use perfusion_aggregate::collections::{CollectionKind, GarbageCollections};
use perfusion_aggregate::exceptions_and_contentions::{
    ExceptionsAndContentions, LockWait, RuntimeEventSite, Throw,
};
use perfusion_aggregate::heap::SampledAllocations;
use perfusion_aggregate::pool::Pools;
use perfusion_aggregate::runtime_counts::RuntimeCounts;
use perfusion_aggregate::runtime_wait::{LockEvents, RuntimeWaits};
use perfusion_aggregate::threads::{ThreadAccounts, WaitReason};
use perfusion_aggregate::wait_reason;
use perfusion_dotnet::attach::shim_copy;
use perfusion_host::pods::Pods;
use perfusion_host::process::ProcessTable;
use perfusion_host::process::container::ContainerIdentity;
use perfusion_host::process::service::ServiceNames;
use perfusion_host::process::table::ProcessStatus;
use perfusion_host::process::thread_contexts::ThreadContextSchedule;
use perfusion_model::event::WakeOrigin;
use perfusion_model::event::{
    Allocation, Event, EventKind, MethodBody, MonotonicNs, OffCpuThread, RegionId, Rename,
    RuntimeSample, ShimEvent, ThreadId, ThreadProgress, ThreadSnapshot, TraceSpan, UserContext,
    WaitEnd,
};
use perfusion_model::feature::ExcludedFeatures;
use perfusion_model::frame::{FrameKey, Marker, ProcessId};
use perfusion_model::labels::{Labels, PodLabels};
use perfusion_model::stack::{StackId, StackTable};
use perfusion_model::text::clean;
use perfusion_model::thread_role::{RoleEvidence, StartFile};
use perfusion_model::units::counted;
use perfusion_pprof::INUSE_NOT_AVAILABLE;
use perfusion_sources::kernel::rule_set::ServiceExclusions;
use perfusion_sources::shim::{ShimLimits, ShimSource};
use perfusion_symbolize::kernel::WakeSites;
use perfusion_symbolize::types::{ModuleLabels, TypeName, TypeNameTable};
use perfusion_symbolize::wait_functions::WaitFunctions;
use perfusion_symbolize::{Symbolizer, file_name};
use perfusion_unwind::unwinder::UnwindLimits;
use profiler_protocol::record::NOT_NOW;
use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// A managed method body whose name is to be asked of its process's shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameRequest {
    /// The process.
    pub pid: u32,
    /// An address inside the method.
    pub address: u64,
    /// When the method was last on a stack for sure; 0 when that is not known.
    pub seen: MonotonicNs,
}

/// What is to be asked of shims.
#[derive(Debug, Default)]
pub struct Questions {
    /// These names.
    pub names: Vec<NameRequest>,
    /// Regions of which a mark has been looked at: their shims wait to be told so behind the
    /// questions.
    pub heard: Vec<RegionId>,
}

impl From<Vec<NameRequest>> for Questions {
    fn from(names: Vec<NameRequest>) -> Self {
        Self { names, heard: Vec::new() }
    }
}

impl Questions {
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.heard.is_empty()
    }

    /// Queues them with the shims.
    pub fn put_to(self, shims: &mut ShimSource) {
        for NameRequest { pid, address, seen } in self.names {
            shims.ask(pid, address, seen);
        }
        for region in self.heard {
            shims.heard(region);
        }
    }
}

/// Code heaps are made of blocks of this size, each of one loader allocator
/// (`ExecutableAllocator::Granularity` of dotnet/runtime).
const CODE_BLOCK: u64 = 64 << 10;
/// Questions about other code of the block, after each answer.
const NEIGHBOURS: usize = 64;

/// What happened to stacks and pauses, for the loss line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackCounters {
    /// User stacks walked.
    pub walked: u64,
    /// Of them, those that reached the thread's start with no guess.
    pub exact: u64,
    /// Frames found by guessing.
    pub guessed_frames: u64,
    /// Of CPU samples, those stored.
    pub cpu_samples: u64,
    /// Kept waits.
    pub waits: u64,
    /// Allocation samples.
    pub allocations: u64,
    /// Allocation samples that came after the end, while names were waited for: not in the profile.
    pub allocations_after_end: u64,
    /// Exceptions told of.
    pub exceptions: u64,
    /// Waits for locks told of.
    pub contentions: u64,
    /// Of both, those that came after the end.
    pub incidents_after_end: u64,
    /// Managed frames of windows, of processes whose shim is asked for names.
    pub managed_frames: u64,
    /// Of them, those without a name.
    pub managed_unnamed: u64,
}

/// What a shim said of its runtime.
#[derive(Clone, Copy, Debug)]
struct ShimRuntime {
    version: (u16, u16, u16),
    /// Objects can be watched.
    watches: bool,
}

/// To let the other threads run again takes microseconds; a thread that was told to have ended its
/// collection and not to have done that is at something else by now, and the record was lost.
const RESTART_NS: u64 = 100_000_000;

/// A thread younger than this that gets its first name was made for it. It gets it with its first
/// instructions, and waits that long for a CPU at most.
const YOUNG_NS: u64 = 1_000_000_000;

/// As many as a hostile library may make up.
const MAX_PAUSERS: usize = 10_000;

/// State of one recording between the collector and the encoder.
pub struct Processor {
    /// Who lives where.
    pub processes: ProcessTable,
    /// Names, as far as shims gave them.
    pub symbolizer: Symbolizer,
    pub(super) stacks: StackTable,
    pub(super) threads: ThreadAccounts,
    pub(super) heap: SampledAllocations,
    pub(super) names: ThreadNames,
    pub(super) starts: ThreadStarts,
    /// Threads whose runtime has told no name of them.
    pub(super) untold: PreAttachNames,
    /// Labels of threads that have ended, by id and when they entered the recording.
    pub(super) ended: HashMap<(u32, MonotonicNs), Labels>,
    pub(super) formers: RetiredPrograms,
    questions: Questions,
    asked: QuestionTimes,
    pub(super) types: TypeNameTable,
    pub(super) region_pid: HashMap<RegionId, u32>,
    /// What was said last of threads that made objects which are alive, by region and id.
    makers: HashMap<(RegionId, u32), MakerLabels>,
    runtimes: HashMap<RegionId, ShimRuntime>,
    /// Regions that said good-bye in this window, and when.
    pub(super) regions_gone: HashMap<RegionId, MonotonicNs>,
    /// Regions that are gone and of which a recording without windows has objects that were alive
    /// then.
    pub(super) alive_at_end: usize,
    /// Threads that run a collection right now.
    pub(super) collecting: CollectingThreads,
    /// Ids of threads, first ones of processes among them, that began since the last window's end
    /// was announced, and in that window.
    pub(super) begun: [HashSet<u32>; 2],
    /// Those that have stopped their process for a collection, as long as they live; so many of
    /// them at most.
    pub(super) pausers: HashSet<ThreadId>,
    /// Events of shims after this are not of this window.
    closed: Option<MonotonicNs>,
    pub(super) collections: GarbageCollections,
    pub(super) incidents: ExceptionsAndContentions,
    pub(super) incident_totals: RuntimeCounts,
    pub(super) pools: Pools,
    /// With what probability the waits of this window kept their stacks.
    pub(super) wait_chances: Chances,
    /// What the runtimes' own frames mean.
    pub(super) runtime_waits: RuntimeWaits,
    /// What there is to learn that from beside the stacks of waits.
    pub(super) lock_events: LockEvents,
    pub(super) wait_functions: WaitFunctions,
    /// Where wake-ups come from; read when the first one is.
    pub(super) wake_sites: Arc<OnceLock<WakeSites>>,
    wakers_unknown: WakersUnknown,
    counters: StackCounters,
    /// Where the values of each process go; `None` when all go to one profile.
    services: Option<ServiceNames>,
    /// Who they are that processes run in.
    pods: Option<Arc<Pods>>,
    /// What watches live objects, where they are told apart by it.
    pub(super) handles: HashMap<(RegionId, u64), u64>,
    /// What the probes leave out of the processes of services in this window, and in the one that
    /// was over last.
    pub(super) left_out: HashMap<Arc<str>, ServiceExclusions>,
    pub(super) left_out_before: HashMap<Arc<str>, ServiceExclusions>,
    /// Threads and wakers are told apart.
    detailed: bool,
    /// What ended a wait is shown with it.
    waker_stacks: bool,
    /// Stacks say what their threads worked for.
    spans: Option<ThreadContextSchedule>,
    /// A window is being ended.
    cutting: Option<WindowRotation>,
    effort: CostAttribution,
    /// Processes whose shims are not asked for names, because rules leave them out.
    unnamed: HashSet<u32>,
}

/// Name and role of a thread, and what is to decide on the latter.
type MakerLabels = (Option<Arc<str>>, Option<&'static str>, Option<Arc<RoleEvidence>>);

/// Waits of which it is not known what ended their blocked part: a thread ran then, which may have
/// had nothing to do with it.
#[derive(Default)]
struct WakersUnknown {
    /// Start of each thread's.
    waits: HashMap<u32, MonotonicNs>,
}

impl WakersUnknown {
    fn add(&mut self, tid: u32, start: MonotonicNs) {
        self.waits.insert(tid, start);
    }

    /// Names nobody for such a wait, unless what ran was the idle task: that does nothing itself,
    /// so an interrupt it was.
    fn take_from(&mut self, end: &mut WaitEnd) {
        if self.waits.remove(&end.thread.tid) == Some(end.start) {
            end.waker = end.waker.filter(|(waker, _)| waker.tid == 0);
        }
    }
}

impl Processor {
    /// Starts with the processes the table already knows.
    #[must_use]
    pub fn new(processes: ProcessTable) -> Self {
        Self {
            processes,
            symbolizer: Symbolizer::default(),
            stacks: StackTable::default(),
            threads: ThreadAccounts::default(),
            heap: SampledAllocations::default(),
            names: ThreadNames::default(),
            starts: ThreadStarts::default(),
            untold: PreAttachNames::default(),
            ended: HashMap::new(),
            formers: RetiredPrograms::default(),
            questions: Questions::default(),
            asked: QuestionTimes::default(),
            types: TypeNameTable::default(),
            region_pid: HashMap::new(),
            makers: HashMap::new(),
            runtimes: HashMap::new(),
            regions_gone: HashMap::new(),
            alive_at_end: 0,
            collecting: CollectingThreads::default(),
            pausers: HashSet::new(),
            begun: <[HashSet<u32>; 2]>::default(),
            closed: None,
            collections: GarbageCollections::default(),
            incidents: ExceptionsAndContentions::default(),
            incident_totals: RuntimeCounts::default(),
            pools: Pools::default(),
            wait_chances: Chances::default(),
            runtime_waits: RuntimeWaits::default(),
            lock_events: LockEvents::default(),
            wait_functions: WaitFunctions::default(),
            wake_sites: Arc::default(),
            wakers_unknown: WakersUnknown::default(),
            counters: StackCounters::default(),
            services: None,
            pods: None,
            handles: HashMap::new(),
            left_out: HashMap::new(),
            left_out_before: HashMap::new(),
            detailed: true,
            waker_stacks: false,
            spans: None,
            cutting: None,
            effort: CostAttribution::default(),
            unnamed: HashSet::new(),
        }
    }

    /// Tells services apart, and neither threads nor wakers, which would multiply samples; shows
    /// the pods of processes.
    #[must_use]
    pub fn by_service(mut self, pods: Arc<Pods>) -> Self {
        self.services = Some(ServiceNames::with(Arc::clone(&pods)));
        self.pods = Some(pods);
        self.without_threads()
    }

    /// Tells neither threads nor wakers apart.
    #[must_use]
    pub fn without_threads(mut self) -> Self {
        self.detailed = false;
        self
    }

    /// From now on live objects that these weak handles watch, by region and sample, are told apart
    /// by them.
    pub fn tell_handles(&mut self, handles: HashMap<(RegionId, u64), u64>) {
        self.handles = handles;
    }

    /// What libraries are asked for.
    pub fn expect(&mut self, limits: ShimLimits) {
        self.heap
            .expect(limits.live_objects, self.has_windows().then_some(limits.allocation_samples));
    }

    /// Shows what ended each wait beyond the wait's own stack.
    #[must_use]
    pub fn with_waker_stacks(self, waker_stacks: bool) -> Self {
        Self { waker_stacks, ..self }
    }

    /// Shows of waits for locks where the owner was meanwhile.
    #[must_use]
    pub fn with_lock_owners(mut self) -> Self {
        self.threads.remember();
        self
    }

    /// Has stacks say what their threads worked for, where they publish it.
    #[must_use]
    pub fn with_spans(self, spans: bool) -> Self {
        Self { spans: spans.then(ThreadContextSchedule::default), ..self }
    }

    /// True when what ended a wait is shown with it.
    pub(super) fn has_waker_stacks(&self) -> bool {
        self.waker_stacks
    }

    /// True when threads and wakers are told apart.
    pub(super) fn is_detailed(&self) -> bool {
        self.detailed
    }

    /// The processes that run a CLR.
    pub(super) fn managed(&mut self) -> Vec<super::ManagedProcess> {
        let found: Vec<(u32, u64)> = self.processes.managed().collect();
        let managed = found.into_iter().map(|(pid, start_ticks)| {
            let info = self.processes.id(pid).and_then(|id| self.processes.info(id));
            let name = info.map_or_else(|| self.names.comm(pid), |info| info.name.as_str());
            let service = self
                .services
                .as_mut()
                .map_or_else(|| name.into(), |services| services.of(pid, name).0);
            let is_named = self.services.as_ref().is_none_or(|services| services.is_sure(pid));
            super::ManagedProcess { pid, start_ticks, service, is_named }
        });
        managed.collect()
    }

    /// The stacks of a window may take so many bytes.
    pub(super) fn allow_stacks(&mut self, bytes: u64) {
        self.stacks.allow(bytes);
    }

    /// How much of that they take, from 0 to 1.
    pub(super) fn stacks_fill(&self) -> f64 {
        self.stacks.fill()
    }

    /// How the processes stand, with their services.
    pub(super) fn standings(&self) -> Vec<ProcessStatus> {
        let mut standings = self.processes.standings();
        for standing in &mut standings {
            let service = self.services.as_ref().and_then(|services| services.known(standing.pid));
            standing.service = service.map(|service| service.to_string());
        }
        standings
    }

    /// What the probes left out of the processes of this service in the window that was over last.
    #[must_use]
    pub fn left_out(&self, service: &str) -> Option<ServiceExclusions> {
        self.left_out_before.get(service).copied()
    }

    /// Notes what the probes leave out of the threads there are.
    pub(super) fn note_left_out(&mut self, running: &[ThreadSnapshot]) {
        let Some(services) = &self.services else { return };
        for ThreadSnapshot { times, .. } in running {
            if let Some(service) = services.known(times.thread.pid) {
                ServiceExclusions::add(
                    &mut self.left_out,
                    &service,
                    ExcludedFeatures(times.left_out),
                );
            }
        }
    }

    /// True when this window is one of several.
    pub(super) fn has_windows(&self) -> bool {
        self.services.is_some()
    }

    /// Takes one event; events come in time order.
    pub fn event(&mut self, event: Event) {
        let Some(event) = WindowRotation::put_off(&mut self.cutting, event) else { return };
        let begun = self.effort.begin(&event, &self.processes);
        self.handle(event);
        if let Some(begun) = begun {
            begun.end(&mut self.processes);
        }
    }

    fn handle(&mut self, event: Event) {
        if let EventKind::Exec { pid, comm } = &event.kind {
            self.names.becomes(*pid, comm);
            self.retire(*pid, event.time);
        }
        self.processes.observe(&event);
        let time = event.time;
        match event.kind {
            EventKind::CpuSample(sample) => {
                self.counters.cpu_samples += 1;
                self.sampled(sample.thread, &sample.comm, time);
                let stack = self.stack_for(
                    sample.thread,
                    time,
                    &sample.kernel,
                    sample.user.as_deref(),
                    sample.span,
                );
                if self.collects(sample.thread, time) {
                    self.threads.collecting_sample(sample.thread, time, stack);
                } else {
                    self.threads.cpu_sample(sample.thread, time, stack);
                }
            }
            EventKind::WaitStart(wait) => {
                self.counters.waits += 1;
                self.wait_chances.kept(wait.weight);
                self.sampled(wait.thread, &wait.comm, time);
                let stack = self.stack_for(
                    wait.thread,
                    time,
                    &wait.kernel,
                    wait.user.as_deref(),
                    wait.span,
                );
                let suspended = self.stands_still(wait.thread.pid);
                let syscall = wait.syscall.map(wait_reason::family);
                let reason =
                    WaitReason { state: wait.state.into(), syscall, io: wait.io, suspended };
                let mut ran_ns = wait.ran_ns;
                if self.collects(wait.thread, time) {
                    self.threads.collecting_slice(wait.thread, stack, ran_ns, wait.weight);
                    ran_ns = 0;
                }
                self.threads.wait_start(wait.thread, time, stack, reason, ran_ns, wait.weight);
            }
            EventKind::Sleeper(sleeper) => self.sleeper(time, &sleeper),
            EventKind::Wake(wake) => {
                let origin = self.wake_sites.get_or_init(WakeSites::read).origin(&wake);
                // What an interrupt found there had nothing to do with it.
                let by = wake.by.filter(|_| origin == Some(WakeOrigin::Thread));
                let stack = by.map(|by| {
                    self.sampled(by.thread, &by.comm, time);
                    self.stack(by.thread, time, &wake.kernel, by.user.as_deref())
                });
                match origin {
                    Some(origin) => self.threads.wake(wake.tid, wake.start, origin, stack),
                    None => self.wakers_unknown.add(wake.tid, wake.start),
                }
            }
            EventKind::WaitEnd(mut end) => {
                self.wakers_unknown.take_from(&mut end);
                self.threads.wait_end(&end);
            }
            EventKind::ThreadEnd(times) => {
                self.wakers_unknown.waits.remove(&times.thread.tid);
                // Named now: later the ids may be others'.
                let labels = self.labels_of(times.thread, times.since);
                if let Some(service) = &labels.service {
                    ServiceExclusions::add(
                        &mut self.left_out,
                        service,
                        ExcludedFeatures(times.left_out),
                    );
                }
                // Of the program that its process was, if that is another one by now.
                let former = self.formers.of_thread(times.thread, times.since);
                let former = former.filter(|_| times.thread.tid == times.thread.pid);
                let former = former.and_then(|former| former.labels.thread_name.clone());
                self.threads
                    .name_one(times.thread, || former.or_else(|| self.names.shown(times.thread)));
                if self.threads.thread_end(times) {
                    self.ended.insert((times.thread.tid, times.since), labels);
                }
            }
            EventKind::Exec { pid, comm } => {
                self.names.became(pid, &comm);
                self.starts.forget(pid);
                self.forget_spans(pid);
                if let Some(services) = &mut self.services {
                    services.became_another(pid);
                }
            }
            EventKind::Rename(rename) => self.renamed(time, &rename),
            EventKind::Comm { thread, comm } => {
                self.missed_rename(thread, &comm, time);
                self.names.kernel(thread.tid, &comm);
            }
            EventKind::Fork { parent, thread } => {
                self.names.forked(parent.tid, thread.tid);
                self.starts.forget(thread.tid);
                if self.has_windows() {
                    let [now, _] = &mut self.begun;
                    now.insert(thread.tid);
                }
                if parent.pid != thread.pid {
                    // Whoever had the pid before.
                    self.forget_spans(thread.pid);
                    if let Some(services) = &mut self.services {
                        services.forked(parent.pid, thread.pid);
                    }
                }
            }
            EventKind::ProcessRecordsLost => {
                if let Some(services) = &mut self.services {
                    services.doubt();
                }
            }
            EventKind::Exit { thread } => {
                self.formers.exited(thread);
                if thread.tid == thread.pid {
                    self.forget_spans(thread.pid);
                }
            }
            EventKind::Mmap(_) => {}
            EventKind::Shim { pid, region, event } => self.shim(time, pid, region, event),
        }
    }

    /// A sample of the thread was taken when the kernel called it `comm`.
    fn sampled(&mut self, thread: ThreadId, comm: &[u8; 16], at: MonotonicNs) {
        let comm = comm_text(comm);
        if !self.names.is_known(thread.tid, &comm, at) {
            self.missed_rename(thread, &comm, at);
            self.names.sampled(thread.tid, &comm);
        }
    }

    /// The kernel calls the thread `comm`, and if that is news no record has told since when.
    fn missed_rename(&mut self, thread: ThreadId, comm: &str, at: MonotonicNs) {
        let tid = thread.tid;
        if !self.names.is_known(tid, comm, at)
            && !self.names.is_inherited(tid)
            && let Some(name) = self.names.shown(thread)
        {
            self.threads.renamed(thread, &name, None);
        }
    }

    /// A thread gets another name: what it did until now is that of the old one.
    fn renamed(&mut self, time: MonotonicNs, rename: &Rename) {
        let Rename { thread, from, to, until, skipped } = rename;
        let (tid, from, to) = (thread.tid, comm_text(from), comm_text(to));
        self.missed_rename(*thread, &from, time);
        let since = until.as_ref().map(|until| until.times.since);
        let young = since.is_some_and(|since| time.0.saturating_sub(since.0) < YOUNG_NS);
        // A new thread's first name is the one it was made for; until it is told it has that of its
        // maker.
        if !(young && self.names.is_inherited(tid)) {
            let name = self.names.shown(*thread).unwrap_or_else(|| clean(&from).into());
            self.threads.renamed(*thread, &name, until.as_ref());
        }
        if *skipped {
            self.threads.missed_rename(*thread);
        }
        self.names.renamed(tid, &from, &to, time);
    }

    /// `pid` becomes another program: what there is of it belongs to the one it was.
    fn retire(&mut self, pid: u32, at: MonotonicNs) {
        let mut labels = self.labels(ThreadId { pid, tid: pid }, self.is_detailed());
        if let Some(services) = &self.services {
            // Where it was not asked for in time, only its name is left.
            labels.service = services.known(pid).or_else(|| labels.process.clone());
            labels.published = services.published(pid);
        }
        let regions: Vec<RegionId> = self.regions(pid).collect();
        self.formers
            .retire(RetiredProgram { pid, at, process: self.processes.id(pid), labels }, &regions);
    }

    fn regions(&self, pid: u32) -> impl Iterator<Item = RegionId> {
        self.region_pid.iter().filter(move |(_, of)| **of == pid).map(|(region, _)| *region)
    }

    /// What the events since the last call make it ask of shims.
    pub fn take_questions(&mut self) -> Questions {
        self.untold.read(&mut self.names);
        std::mem::take(&mut self.questions)
    }

    /// Managed methods of living processes that were seen a moment ago and have no answer yet.
    #[must_use]
    pub fn unanswered(&self, now: MonotonicNs) -> Vec<NameRequest> {
        let mut open = Vec::new();
        for &pid in self.region_pid.values() {
            if let Some(process) = self.processes.id(pid) {
                self.unanswered_of(process, pid, now, &mut open);
            }
        }
        open
    }

    fn unanswered_of(
        &self,
        process: ProcessId,
        pid: u32,
        now: MonotonicNs,
        open: &mut Vec<NameRequest>,
    ) {
        let all = self.symbolizer.unanswered(process);
        let fresh = all.filter(|&address| self.asked.is_fresh((pid, address), now));
        open.extend(fresh.map(|address| self.request(pid, address)));
    }

    fn request(&self, pid: u32, address: u64) -> NameRequest {
        NameRequest { pid, address, seen: self.asked.seen((pid, address)) }
    }

    /// A method has its name. When its code stays, so does all in its block of the code heap: what
    /// was withheld of that is asked about again.
    fn ask_neighbours(&mut self, process: ProcessId, pid: u32, method: &MethodBody) {
        for &(start, bytes) in &method.ranges {
            let last = start.saturating_add(u64::from(bytes).saturating_sub(1));
            let blocks = start & !(CODE_BLOCK - 1)..=last | (CODE_BLOCK - 1);
            let neighbours = self.symbolizer.withheld(process, blocks).take(NEIGHBOURS);
            let requests: Vec<NameRequest> =
                neighbours.map(|address| self.request(pid, address)).collect();
            self.questions.names.extend(requests);
        }
    }

    /// Managed methods that shims would not ask about, for a last try: some lie in code that has
    /// turned out to stay.
    #[must_use]
    pub fn withheld(&self) -> Vec<NameRequest> {
        let of = |(process, pid)| {
            self.symbolizer.withheld(process, 0..=u64::MAX).map(move |address| (pid, address))
        };
        let processes =
            self.region_pid.values().filter_map(|&pid| Some((self.processes.id(pid)?, pid)));
        processes.flat_map(of).map(|(pid, address)| self.request(pid, address)).collect()
    }

    /// The kernel source ended at `at`: what a shim tells of later is not counted, its names still
    /// are.
    pub fn close_at(&mut self, at: MonotonicNs) {
        self.closed = Some(at);
    }

    /// From now on the shims of `pid` are asked for names, or not.
    pub(super) fn name(&mut self, pid: u32, names: bool) {
        if names {
            self.unnamed.remove(&pid);
        } else {
            self.unnamed.insert(pid);
        }
    }

    /// Counts the managed frames of a window, and those that its end found without a name although
    /// there is a shim to ask.
    pub(super) fn count_managed(&mut self, frames: &HashSet<FrameKey>) {
        let process = |(&region, pid): (&RegionId, &u32)| match self.formers.of_region(region) {
            Some(former) => former.process,
            None => self.processes.id(*pid),
        };
        let asked = self.region_pid.iter().filter(|(_, pid)| !self.unnamed.contains(pid));
        let asked: HashSet<ProcessId> = asked.filter_map(process).collect();
        let (mut all, mut unnamed) = (0, 0);
        for &frame in frames {
            if let FrameKey::Managed { process, .. } = frame
                && asked.contains(&process)
            {
                all += 1;
                unnamed += u64::from(self.symbolizer.symbol(frame).unresolved.is_some());
            }
        }
        self.counters.managed_frames += all;
        self.counters.managed_unnamed += unnamed;
    }

    /// What happened to stacks so far.
    #[must_use]
    pub fn counters(&self) -> StackCounters {
        self.counters
    }

    /// How allocations were estimated, for the profile's comments.
    #[must_use]
    pub fn estimator_comments(&self) -> Vec<String> {
        let (all, ticks, large) = (self.counters.allocations, self.heap.ticks(), self.heap.large());
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
        if all > ticks + large {
            comments.push(
                "alloc, inuse (.NET 10 and later): AllocationSampled, every byte an independent \
                 trial with p = 1/102400; \
                 an object of s bytes stands for 1/(1-(1-p)^s); unbiased; label sampled_objects \
                 says how many were seen"
                    .to_owned(),
            );
        }
        if ticks > 0 {
            comments.push(
                "alloc, inuse (.NET 6 to 9): AllocationTick, one sample per about 100 KiB at a \
                 fixed stride, standing for the bytes \
                 since the last; no unbiased estimator and no interval exists: types in step with \
                 the stride are over- or understated, \
                 some many times over"
                    .to_owned(),
            );
        }
        comments.extend(inuse_comments(all > 0, self.runtimes.values().copied()));
        if self.alive_at_end > 0 {
            comments.push(format!(
                "inuse: of {} that had ended or become another program by the end, what was alive, \
                 and how old, when that happened",
                counted(self.alive_at_end, "runtime")
            ));
        }
        comments
    }

    /// What the estimators and their tables could not take as it came.
    #[must_use]
    pub fn estimator_counters(&self) -> [(&'static str, u64); 11] {
        let (sites, live) = self.heap.refused();
        [
            ("wait_ends_unmatched", self.threads.unmatched_wait_ends()),
            ("threads_summed_up", self.threads.summed_up()),
            ("wakers_capped", self.threads.wakers_capped()),
            ("allocations_untracked", self.heap.untracked()),
            ("allocation_sites_refused", sites),
            ("live_objects_refused", live),
            ("incident_places_refused", self.incidents.refused()),
            ("gc_events_unmatched", self.collections.unmatched()),
            ("thread_pool_starvations", self.pools.starved()),
            ("stacks_refused", self.stacks.refused()),
            ("spans_refused", self.stacks.spans_refused()),
        ]
    }

    /// A thread found asleep. Its frames' code is surely there, since the thread will return to it:
    /// what has no name yet is asked for.
    fn sleeper(&mut self, time: MonotonicNs, sleeper: &OffCpuThread) {
        let (thread, start) = (sleeper.thread, sleeper.start);
        self.sampled(thread, &sleeper.comm, time);
        if let Some(stack) = self.threads.seen_waiting(thread, start) {
            self.ask_again(thread.pid, stack, time);
        } else if let Some(seen) = &sleeper.seen {
            let stack = self.stack_for(thread, time, &seen.kernel, seen.user.as_deref(), seen.span);
            // When it began is long ago.
            let syscall = seen.syscall.map(wait_reason::family);
            let reason =
                WaitReason { state: seen.state.into(), syscall, io: seen.io, suspended: false };
            self.threads.sleeper(thread, start, stack, reason);
        }
        if let Some(off_cpu_ns) = sleeper.off_cpu_ns {
            self.threads.left_cpu(thread, start, MonotonicNs(time.0.saturating_sub(off_cpu_ns)));
        }
    }

    /// Asks for what has no name yet in a stack that a thread was in at `time`.
    fn ask_again(&mut self, pid: u32, stack: StackId, time: MonotonicNs) {
        let frames = self.stacks.frames(stack);
        for &frame in &frames[..sure_frames(frames)] {
            if let FrameKey::Managed { process, start, .. } = frame
                && (self.symbolizer.wants_answer(frame, true)
                    || self.symbolizer.is_waiting(process, start))
            {
                let seen = self.asked.note((pid, start), time, time);
                self.questions.names.push(NameRequest { pid, address: start, seen });
            }
        }
    }

    /// All threads as they are at the end, read after `at`. Those that wait were in their stacks
    /// then, or came there later: a shim that was loaded after they were seen can now be asked for
    /// the names.
    pub fn still_there(&mut self, threads: &[ThreadSnapshot], at: MonotonicNs) {
        for snapshot in threads {
            let thread = snapshot.times.thread;
            if let ThreadProgress::Waiting { start, .. } = snapshot.progress
                && let Some(wait) =
                    self.threads.waiting(thread.tid).filter(|wait| wait.start == start)
            {
                self.ask_again(thread.pid, wait.stack, at.max(start));
            }
        }
    }

    /// Whether all managed threads of a process are stopped for a collection.
    fn stands_still(&self, pid: u32) -> bool {
        self.collections.paused().any(|region| self.region_pid.get(&region) == Some(&pid))
    }

    /// Whether a thread of the program runs a collection.
    fn collects(&self, thread: ThreadId, at: MonotonicNs) -> bool {
        self.collecting.contains(thread, at)
    }

    /// What is known of the threads right now.
    #[must_use]
    pub fn threads(&self) -> &ThreadAccounts {
        &self.threads
    }

    /// Names the frames of these stacks, all in one batch.
    pub fn name_stacks(&mut self, stacks: &[StackId]) {
        let frames = stacks.iter().flat_map(|&stack| self.stacks.frames(stack)).copied();
        let frames = frames.chain(self.lock_events.frames()).chain(self.starts.unnamed());
        self.symbolizer.resolve(frames, &self.processes);
        self.starts.name(&self.symbolizer);
        let stacks = stacks.iter().map(|&stack| self.stacks.frames(stack));
        let functions = self.wait_functions.called(stacks.clone(), &self.processes);
        self.symbolizer.resolve(functions.iter().map(|&(function, _)| function), &self.processes);
        self.runtime_waits = RuntimeWaits::learn(stacks, &self.lock_events, &functions, |frame| {
            self.symbolizer.symbol(frame)
        });
    }

    /// Names the frames of all stacks there are so far, so that it is done when their values are
    /// summed up.
    pub fn name_early(&mut self) {
        let frames = self.stacks.iter().flatten().copied();
        self.symbolizer.resolve(frames, &self.processes);
    }

    /// The frames of a stack, innermost first.
    #[must_use]
    pub fn frames(&self, stack: StackId) -> &[FrameKey] {
        naming::without_own_frames(&self.symbolizer, self.stacks.frames(stack))
    }

    /// Words for a wait in `frames`, which are named.
    #[must_use]
    pub fn wait_reason(&self, reason: WaitReason, frames: &[FrameKey]) -> &'static str {
        let word = naming::wait_reason(&self.symbolizer, reason, frames);
        // To the kernel, all waits of the runtime are this.
        if word == "futex" {
            self.runtime_waits
                .name(reason, frames, |frame| self.symbolizer.symbol(frame))
                .unwrap_or(word)
        } else {
            word
        }
    }

    fn stack(
        &mut self,
        thread: ThreadId,
        time: MonotonicNs,
        kernel: &[u64],
        user: Option<&UserContext>,
    ) -> StackId {
        self.stack_for(thread, time, kernel, user, None)
    }

    /// The same of a thread that worked for this span.
    fn stack_for(
        &mut self,
        thread: ThreadId,
        time: MonotonicNs,
        kernel: &[u64],
        user: Option<&UserContext>,
        span: Option<TraceSpan>,
    ) -> StackId {
        let mut frames: Vec<FrameKey> =
            kernel.iter().map(|&address| FrameKey::Kernel(address)).collect();
        if let Some(user) = user {
            let kernel = frames.len();
            if self.walk(thread.pid, (time, time), user, &mut frames) {
                self.saw_start(thread, frames.get(kernel..).unwrap_or_default());
            }
            // Behind the walk, with which a process is taken up.
            self.look_for_spans(thread.pid);
        }
        if self.is_collector(thread) {
            frames.push(FrameKey::Marker(Marker::GarbageCollector));
        } else if self.collects(thread, time) {
            // The collection is not the work of the method that happened to allocate: cut there, so
            // that all of it meets.
            if let Some(managed) =
                frames.iter().position(|frame| matches!(frame, FrameKey::Managed { .. }))
            {
                frames.truncate(managed);
            }
            frames.push(FrameKey::Marker(Marker::GarbageCollector));
        }
        if frames.is_empty() {
            // 32-bit code, or a stack the kernel could not walk.
            frames.push(FrameKey::Marker(Marker::StackLost));
        }
        self.stacks.intern_for(&frames, span, thread.pid)
    }

    /// These are the frames of a whole stack of the thread.
    fn saw_start(&mut self, thread: ThreadId, frames: &[FrameKey]) {
        let comm = self.names.comm(thread.tid);
        self.starts.saw(thread, frames, |frame| {
            let FrameKey::Native { image, .. } = frame else { return None };
            let image = self.processes.image(image)?;
            let name = file_name(&image.path);
            let file = StartFile::of(name, shim_copy::is_ours(name));
            let is_aot =
                || thread.pid != thread.tid && comm.starts_with(".NET ") && image.is_native_aot();
            if file == Some(StartFile::Program) && is_aot() {
                Some(StartFile::Runtime)
            } else {
                file
            }
        });
    }

    /// What says what a thread is for.
    fn role_evidence(&self, thread: ThreadId) -> RoleEvidence {
        let info = self.processes.id(thread.pid).and_then(|id| self.processes.info(id));
        self.starts.evidence(
            thread,
            self.names.comm(thread.tid),
            info.is_some_and(|info| info.is_clr),
        )
    }

    /// Whether the thread does nothing but collect.
    fn is_collector(&self, thread: ThreadId) -> bool {
        RoleEvidence::may_collect(self.names.comm(thread.tid))
            && self.role_evidence(thread).is_collector()
    }

    /// The process is another program, or gone.
    fn forget_spans(&mut self, pid: u32) {
        if self.spans.as_mut().is_some_and(|looks| looks.forget(pid)) {
            self.processes.forget_spans(pid);
        }
    }

    /// The probes had no room for where the threads of `pid` publish what they work for.
    pub fn spans_refused(&mut self, pid: u32) {
        if let Some(looks) = &mut self.spans {
            looks.refused(pid, Instant::now());
        }
    }

    /// Finds out where the threads of a process publish what they work for, now and then.
    fn look_for_spans(&mut self, pid: u32) {
        let (Some(looks), Some(process)) = (&mut self.spans, self.processes.id(pid)) else {
            return;
        };
        let now = Instant::now();
        if looks.is_due(pid, process, now) {
            let found = self.processes.find_spans(pid);
            if looks.looked(pid, process, now, found) {
                self.processes.forget_spans(pid);
            }
        }
    }

    /// Walks a context of the time `now` that was taken at `seen`. True when the walk reached the
    /// thread's start without a guess.
    fn walk(
        &mut self,
        pid: u32,
        (now, seen): (MonotonicNs, MonotonicNs),
        user: &UserContext,
        frames: &mut Vec<FrameKey>,
    ) -> bool {
        let finished = self.processes.finish(pid, user, UnwindLimits::default());
        self.counters.walked += 1;
        self.counters.guessed_frames += u64::from(finished.guessed);
        let whole = finished.reached_thread_start && finished.guessed == 0;
        self.counters.exact += u64::from(whole);
        // Of a stack seen a moment ago all names were asked for then, but a shim may have said "not
        // now".
        let withheld =
            || self.processes.id(pid).is_some_and(|process| self.symbolizer.has_withheld(process));
        let news = if finished.seen_before && !withheld() { &[][..] } else { &finished.frames };
        let sure = sure_frames(&finished.frames);
        for (index, &frame) in news.iter().enumerate() {
            if let FrameKey::Managed { process, start, .. } = frame {
                let again = || !self.asked.is_fresh((pid, start), now);
                if self.symbolizer.wants_answer(frame, index < sure)
                    || self.symbolizer.is_waiting(process, start) && again()
                {
                    let seen = if index < sure { seen } else { MonotonicNs(0) };
                    let seen = self.asked.note((pid, start), now, seen);
                    self.questions.names.push(NameRequest { pid, address: start, seen });
                } else if index < sure && self.symbolizer.is_waiting(process, start) {
                    self.asked.saw((pid, start), seen);
                }
            }
        }
        frames.extend(finished.frames);
        whole
    }

    fn shim(&mut self, time: MonotonicNs, pid: u32, region: RegionId, event: ShimEvent) {
        let new_region = self.region_pid.insert(region, pid).is_none();
        let process = match self.formers.of_region(region) {
            Some(former) => former.process,
            None => self.processes.adopt(pid).ok(),
        };
        if let Some(process) = process {
            match event {
                // It was seen again since that was asked: the answer may be another now.
                ShimEvent::NoMethod { asked, hresult: NOT_NOW, seen }
                    if self.symbolizer.is_waiting(process, asked)
                        && self.asked.seen((pid, asked)) > seen =>
                {
                    self.questions.names.push(self.request(pid, asked));
                }
                _ => self.symbolizer.observe(process, &event),
            }
            if let ShimEvent::Method(method) = &event {
                self.ask_neighbours(process, pid, method);
            }
            if new_region {
                // What was seen before there was anybody to ask: asked now, because the process may
                // not live until the end.
                let mut open = Vec::new();
                self.unanswered_of(process, pid, time, &mut open);
                self.questions.names.append(&mut open);
            }
        }
        let names_only = self.closed.is_some_and(|at| time > at);
        match event {
            ShimEvent::TypeName { type_id, module_id, name, module } => {
                self.types.learn(region, type_id, &name, (&module, module_id));
            }
            ShimEvent::Allocation(_) if names_only => self.counters.allocations_after_end += 1,
            ShimEvent::Exception(_) | ShimEvent::Contention(_) if names_only => {
                self.counters.incidents_after_end += 1;
            }
            _ if names_only => {}
            ShimEvent::Allocation(allocation) => self.allocation(time, pid, region, &allocation),
            ShimEvent::GcStart { number, generation, reason, kind, tid } => {
                self.heap.collection(region, generation, time);
                self.collections.begins(
                    region,
                    number,
                    CollectionKind::of(generation, reason, kind),
                    time,
                );
                // 1 is a background collection: it runs on a thread of its own, known by name.
                if kind != 1 {
                    self.collecting.begins(ThreadId { pid, tid }, region);
                }
            }
            ShimEvent::GcEnd { number } => {
                self.collections.ends(region, number);
                self.collecting.ends(pid, region, MonotonicNs(time.0.saturating_add(RESTART_NS)));
            }
            ShimEvent::GcHeap { number, promoted } => {
                self.collections.left(region, number, promoted)
            }
            ShimEvent::PauseBegin { reason, tid } if FOR_COLLECTION.contains(&reason) => {
                let thread = ThreadId { pid, tid };
                if let Some(before) = self.collections.pause_begins(region, thread, time) {
                    self.threads.collected(before, None);
                }
                self.collecting.none(pid, region);
                self.collecting.begins(thread, region);
                if self.pausers.len() < MAX_PAUSERS {
                    self.pausers.insert(thread);
                }
            }
            ShimEvent::PauseBegin { .. } => self.collections.foreign_pause_begins(region),
            ShimEvent::PauseCpu { .. } if self.collections.is_in_foreign_pause(region) => {}
            ShimEvent::PauseCpu { tid, cpu_ns } if tid != 0 => {
                let cpu_ns = Some(cpu_ns).filter(|_| self.collections.is_in_whole_pause(region));
                self.threads.collected(ThreadId { pid, tid }, cpu_ns);
            }
            ShimEvent::PauseEnd { .. } => {
                self.collecting.none(pid, region);
                self.collections.pause_ends(region, time);
            }
            ShimEvent::PoolAdjusted { workers, reason } => {
                self.pools.adjusted(region, workers, reason)
            }
            ShimEvent::PoolQueue { items } => self.pools.looked(region, items),
            ShimEvent::Exception(exception) => {
                self.counters.exceptions += 1;
                let place = self.place(time, pid, region, &exception.at);
                let (type_name, rethrown) =
                    (Some(exception.type_name.as_str().into()), exception.rethrown);
                let message = exception.message.as_deref().map(Arc::from);
                let throw = Throw { place, type_name, message, rethrown };
                self.incidents.thrown(throw, exception.at.weight);
            }
            ShimEvent::Contention(contention) => {
                self.counters.contentions += 1;
                let (at, weight) = (&contention.at, contention.at.weight);
                let mut frames = Vec::new();
                self.walk(pid, (time, at.seen), &at.user, &mut frames);
                self.lock_events.note(&frames);
                let stack = self.intern_event(frames);
                let name = self.names.id(ThreadId { pid, tid: at.tid });
                let place = RuntimeEventSite { region, tid: at.tid, name, stack };
                let (owner, began) =
                    (contention.owner, time.0.saturating_sub(contention.waited_ns));
                // Of a thread of its own process: whom a process names is its own choice.
                let held_at = owner.and_then(|tid| {
                    self.threads.mostly_between(ThreadId { pid, tid }, MonotonicNs(began), time)
                });
                self.incidents.waited(
                    LockWait { place, owner, held_at },
                    contention.waited_ns,
                    weight,
                );
            }
            ShimEvent::ObjectsDead { samples } => self.heap.dead(region, &samples),
            ShimEvent::ObjectsAlive { samples } => self.heap.alive(region, &samples),
            ShimEvent::ObjectsDropped { level, samples } => {
                self.heap.dropped(region, level, &samples)
            }
            ShimEvent::ThreadAt { tid, address } => self.untold.add(ThreadId { pid, tid }, address),
            ShimEvent::ThreadName { tid, name } => {
                let thread = ThreadId { pid, tid };
                // The kernel was not told of it: the first thread's name is the process's.
                if let Some(before) = self.names.managed(thread, &name) {
                    self.threads.renamed(thread, &before, None);
                }
            }
            ShimEvent::Mark => {
                if !self.questions.heard.contains(&region) {
                    self.questions.heard.push(region);
                }
            }
            // A first word, or the first after a silence in which the shim let go of all its
            // handles.
            ShimEvent::Hello { runtime: version, watches } => {
                self.runtimes.insert(region, ShimRuntime { version, watches });
                self.heap.watched_from(region, time);
                self.pools.forget(region);
                // What it did not tell of in a silence may be the end of a pause.
                self.collections.region_gone(region);
                self.collecting.none(pid, region);
            }
            ShimEvent::Bye => {
                self.regions_gone.entry(region).or_insert(time);
            }
            ShimEvent::PauseCpu { .. }
            | ShimEvent::Method(_)
            | ShimEvent::NoMethod { .. }
            | ShimEvent::CodeUnloaded { .. } => {}
        }
    }

    fn allocation(
        &mut self,
        time: MonotonicNs,
        pid: u32,
        region: RegionId,
        allocation: &Allocation,
    ) {
        self.counters.allocations += 1;
        let stack = self.event_stack(pid, (time, allocation.seen), &allocation.user);
        let name = self.names.id(ThreadId { pid, tid: allocation.tid });
        self.heap.allocated(region, time, allocation, (stack, name));
    }

    fn place(
        &mut self,
        time: MonotonicNs,
        pid: u32,
        region: RegionId,
        at: &RuntimeSample,
    ) -> RuntimeEventSite {
        let name = self.names.id(ThreadId { pid, tid: at.tid });
        RuntimeEventSite {
            region,
            tid: at.tid,
            name,
            stack: self.event_stack(pid, (time, at.seen), &at.user),
        }
    }

    /// The stack of an event of the runtime's, see [`Processor::intern_event`].
    fn event_stack(
        &mut self,
        pid: u32,
        times: (MonotonicNs, MonotonicNs),
        user: &UserContext,
    ) -> StackId {
        let mut frames = Vec::new();
        self.walk(pid, times, user, &mut frames);
        self.intern_event(frames)
    }

    /// Inside are the shim and the event's delivery: the stack is the innermost managed frame's.
    /// Where none was reached, the copy of the stack ended before it, what is left is what the
    /// runtime did: never our own callback, which would be taken for who allocated.
    fn intern_event(&mut self, mut frames: Vec<FrameKey>) -> StackId {
        let managed = frames.iter().position(|frame| matches!(frame, FrameKey::Managed { .. }));
        let own = || frames.iter().rposition(|frame| self.is_of_shim(*frame)).map(|last| last + 1);
        if let Some(inside) = managed.or_else(own) {
            frames.drain(..inside);
        }
        self.stacks.intern(&frames)
    }

    fn is_of_shim(&self, frame: FrameKey) -> bool {
        let FrameKey::Native { image, .. } = frame else { return false };
        self.processes.image(image).is_some_and(|image| shim_copy::is_ours(file_name(&image.path)))
    }

    /// What a thread's values are counted under.
    #[must_use]
    pub fn labels(&self, thread: ThreadId, detailed: bool) -> Labels {
        let info = self.processes.id(thread.pid).and_then(|id| self.processes.info(id));
        let evidence = self.role_evidence(thread);
        Labels {
            pid: Some(thread.pid),
            thread_id: detailed.then_some(thread.tid),
            thread_name: self.names.shown(thread),
            thread_role: Some(evidence.role()),
            role_evidence: (!evidence.unnamed().is_empty()).then(|| Arc::new(evidence)),
            process: info.map(|info| info.name.as_str().into()),
            container_id: info.and_then(|info| info.home.container.clone()),
            pod: info.and_then(|info| self.pod(&info.home)),
            ..Labels::default()
        }
    }

    /// What is shown of the pod.
    fn pod(&self, home: &ContainerIdentity) -> Option<Arc<PodLabels>> {
        let pods = self.pods.as_ref()?;
        let pod = pods.get(home.pod.as_deref()?)?;
        Some(Arc::new(pods.shown().of(&pod, home.container.as_deref())))
    }

    /// A thread of `pid` as labels' values, with ids and without, like those of wakers.
    pub(super) fn owner_texts(&self, pid: Option<u32>, owner: u32) -> (Arc<str>, Arc<str>) {
        let thread = ThreadId { pid: pid.unwrap_or(0), tid: owner };
        let name = self.names.shown(thread).unwrap_or_default();
        (format!("{name} {}/{owner}", thread.pid).into(), name)
    }

    /// What the values of a thread that entered the recording at `since` are counted under, with as
    /// much detail as this recording has, and the service.
    pub(super) fn labels_of(&mut self, thread: ThreadId, since: MonotonicNs) -> Labels {
        let mut labels = self.labels_with_service(thread);
        if let Some(former) = self.formers.of_thread(thread, since) {
            former.relabel(&mut labels, thread);
        }
        labels
    }

    /// What is counted under of a runtime's thread; of its process without one.
    pub(super) fn region_labels(&mut self, region: RegionId, tid: Option<u32>) -> Labels {
        let pid = self.region_pid.get(&region).copied().unwrap_or(0);
        let thread = ThreadId { pid, tid: tid.unwrap_or(pid) };
        let mut labels = self.labels_with_service(thread);
        if let Some(former) = self.formers.of_region(region) {
            former.relabel(&mut labels, thread);
        }
        labels
    }

    /// Whether the region's runtime tells of an exception whether it is thrown again: .NET 9 and
    /// newer do not.
    pub(super) fn tells_rethrown(&self, region: RegionId) -> bool {
        self.runtimes.get(&region).is_some_and(|runtime| runtime.version.0 < 9)
    }

    /// What a live object is counted under. Where the thread that made it does not `live` any more,
    /// its id may be another's by now, and its name is forgotten: the object keeps what was said of
    /// it last.
    pub(super) fn maker_labels(
        &mut self,
        region: RegionId,
        tid: u32,
        lives: impl Fn(ThreadId) -> bool,
    ) -> Labels {
        let mut labels = self.region_labels(region, Some(tid));
        let lives = self.region_pid.get(&region).is_some_and(|&pid| lives(ThreadId { pid, tid }));
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
        labels
    }

    /// No other threads made what is alive.
    pub(super) fn keep_makers(&mut self, of: &HashSet<(RegionId, u32)>) {
        self.makers.retain(|maker, _| of.contains(maker));
    }

    fn labels_with_service(&mut self, thread: ThreadId) -> Labels {
        let mut labels = self.labels(thread, self.is_detailed());
        if let Some(services) = &mut self.services {
            let comm = labels.process.as_deref().unwrap_or_else(|| self.names.comm(thread.pid));
            let (service, published) = services.of(thread.pid, comm);
            (labels.service, labels.published) = (Some(service), published);
        }
        labels
    }

    /// Memory is short: forgets what can be found out again. What the window in progress holds
    /// stays.
    pub(super) fn shed(&mut self) {
        self.processes.shed();
        self.symbolizer.shed(&self.stacks.iter().flatten().copied().collect());
        super::trim::give_back();
    }

    /// The names that samples of a process bear for what its runtime calls so, as far as it has
    /// told.
    pub fn type_names(&self) -> impl Fn(u32, u64) -> Option<TypeName> {
        let told = self.types.told_apart();
        move |pid, type_id| {
            let mut regions = self.region_pid.iter().filter(|(_, of)| **of == pid);
            regions.find_map(|(region, _)| told.get(*region, type_id))
        }
    }

    /// The modules of a process's runtime, as the labels of its samples number them.
    #[must_use]
    pub fn contexts(&self, pid: u32) -> ModuleLabels {
        let mut regions = self.region_pid.iter().filter(|(_, of)| **of == pid);
        regions.next().map(|(region, _)| self.types.contexts(*region)).unwrap_or_default()
    }

    /// Forgets what only a window that is over and encoded needed: whatever was kept of processes,
    /// threads and regions that are gone.
    pub fn forget(&mut self, gone: &LivenessAtCut) {
        let LivenessAtCut { regions, threads, pids } = gone;
        // Those that began since were in no list of who is there: a window waits up to seconds for
        // names before it is forgotten.
        let (mut threads, mut pids) = (threads.clone(), pids.clone());
        for since in &self.begun {
            threads.extend(since);
            pids.extend(since);
        }
        for thread in self.threads.ids() {
            threads.insert(thread.tid);
            pids.insert(thread.pid);
        }
        let names = self.heap.live().map(|object| object.site.name).collect();
        self.names.keep(&threads, &names);
        self.starts.keep(&threads);
        self.unnamed.retain(|pid| pids.contains(pid));
        self.pausers.retain(|thread| threads.contains(&thread.tid));
        self.collecting.keep(|tid| threads.contains(&tid), |region| regions.contains(&region));
        if let Some(services) = &mut self.services {
            services.keep(&pids);
        }
        for pid in self.spans.iter_mut().flat_map(|looks| looks.keep(&pids)) {
            self.processes.forget_spans(pid);
        }
        for region in regions {
            self.heap.region_gone(*region);
            self.formers.forget(*region);
            self.region_pid.remove(region);
            self.runtimes.remove(region);
            self.collections.region_gone(*region);
            self.pools.forget(*region);
        }
        self.types.forget(regions);
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
        self.wait_functions.keep(&self.processes);
    }
}

/// How many of the innermost frames were on the stack for sure, when it was taken. What was reached
/// through a guess may be the return address of a call that is long over, into code that is not
/// there any more; so may all but the innermost user frame of a walk that went astray. A copy that
/// was too short, and too many frames, say nothing against the frames before.
fn sure_frames(frames: &[FrameKey]) -> usize {
    let marker = frames.iter().position(|frame| matches!(frame, FrameKey::Marker(_)));
    match frames.last() {
        Some(FrameKey::Marker(
            Marker::TruncatedNoRule
            | Marker::TruncatedUnreadable
            | Marker::TruncatedStale
            | Marker::Exiting,
        )) => {
            let kernel =
                frames.iter().take_while(|frame| matches!(frame, FrameKey::Kernel(_))).count();
            (kernel + 1).min(marker.unwrap_or(frames.len()))
        }
        _ => marker.unwrap_or(frames.len()),
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
             that looked at their generation; those \
             watched when there were more than --live-objects stand for all, by the inverse of the \
             probability with which chance chose them"
                .to_owned(),
        );
    }
    let versions: BTreeSet<(u16, u16, u16)> = blind.iter().map(|runtime| runtime.version).collect();
    comments.extend(versions.into_iter().map(|(major, minor, build)| {
        format!(
            "{INUSE_NOT_AVAILABLE} of .NET {major}.{minor}.{build}, whose profilers have no weak \
             handles (.NET 7 and later do): live objects of \
             its processes are not in this profile, their allocations are"
        )
    }));
    comments
}

/// Suspensions for a collection and for its preparation (`SuspendEEBegin` of the runtime's event
/// manifest, ClrEtwAll.man).
const FOR_COLLECTION: [u8; 2] = [1, 6];

#[cfg(test)]
mod tests {
    use super::{
        FrameKey, Marker, Processor, ShimRuntime, WakersUnknown, inuse_comments, sure_frames,
    };
    use perfusion_host::process::ProcessTable;
    use perfusion_model::event::{
        Event, EventKind, MonotonicNs, RegionId, ShimEvent, ThreadId, WaitEnd,
    };
    use perfusion_model::frame::ProcessId;

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
        // As its library has told, until it is gone.
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

    #[test]
    fn a_thread_that_only_may_have_ended_a_wait_is_not_named() {
        let mut unknown = WakersUnknown::default();
        let mut waker_of = |start, waker| {
            unknown.add(7, MonotonicNs(5));
            let waker = ThreadId { pid: waker, tid: waker };
            let mut end = WaitEnd {
                thread: ThreadId { pid: 7, tid: 7 },
                start: MonotonicNs(start),
                blocked_ns: 1,
                runnable_ns: 1,
                waker: Some((waker, [0; 16])),
                woken_throttled: false,
                new_thread: false,
            };
            unknown.take_from(&mut end);
            end.waker.map(|(waker, _)| waker.tid)
        };
        assert_eq!(waker_of(5, 9), None);
        assert_eq!(waker_of(6, 9), Some(9), "another wait");
        assert_eq!(waker_of(5, 0), Some(0), "the idle task: an interrupt");
    }

    #[test]
    fn only_frames_of_exact_walks_are_sure() {
        let managed = |start| FrameKey::Managed { process: ProcessId(0), start, generation: 0 };
        let kernel = FrameKey::Kernel(1);
        let ended = |marker| {
            let ended = [kernel, managed(1), managed(2), FrameKey::Marker(marker)];
            sure_frames(&ended)
        };
        assert_eq!(sure_frames(&[]), 0);
        assert_eq!(sure_frames(&[kernel, managed(1), managed(2)]), 3);
        assert_eq!([Marker::TruncatedCopy, Marker::TruncatedDepth].map(ended), [3, 3]);
        let astray = [
            Marker::TruncatedNoRule,
            Marker::TruncatedStale,
            Marker::TruncatedUnreadable,
            Marker::Exiting,
        ];
        assert_eq!(astray.map(ended), [2; 4], "where it stood");
        let guessed = [managed(1), managed(2), FrameKey::Marker(Marker::Guessed), managed(3)];
        assert_eq!(sure_frames(&guessed), 2);
        assert_eq!(sure_frames(&[FrameKey::Marker(Marker::TruncatedStale)]), 0);
    }
}
