//! The kernel as a source: a CPU sampler and the scheduler's tracepoints as eBPF programs, and
//! perf's own records of processes and mappings. When [`KernelSource`] is dropped, nothing is left
//! in the kernel.

pub mod btf;
mod cpus;
pub mod decode;
pub mod features;
mod load;
mod maps;
pub mod perf;
pub mod rule_set;
pub mod rules;
pub mod span_map;
mod task_iterator;
pub mod threads;

use aya::Ebpf;
use aya::maps::{Array, HashMap as BpfHashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use aya::programs::ProgramError;
use cpus::CpuRings;
use ebpf_common::counter::{COUNTERS, Counter, CounterInfo};
use ebpf_common::key::{RecordingStart, STATE_BLOCKED, STATE_DEAD, SchedulerAccount};
use ebpf_common::limits::{
    DEFAULT_MAX_PLACES, DEFAULT_MAX_THREADS, MAX_SELECTED_PROCESSES, MAX_STACK_COPY_BYTES,
};
use load::LoadedProbes;
use perfusion_host::cpus::CpusError;
use perfusion_host::process::seed;
use perfusion_host::system_limits::{needed_open_files, raise_open_files};
use perfusion_model::event::{Event, EventKind, MonotonicNs, ThreadSnapshot};
use rule_set::RuleSet;
use rules::RuleCache;
use span_map::SpanMap;
use std::collections::{HashMap, HashSet};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use task_iterator::TaskScanner;
use threads::{ProcessFilter, ThreadScan, ThreadTable, closed_times};

/// Whose events are recorded. The probes decide it before any other work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelSelection {
    /// Everybody.
    All,
    /// These processes and the children they make from now on.
    Pids(Vec<u32>),
    /// Threads in the cgroup v2 directory with this inode number.
    Cgroup(u64),
    /// Those that these choose.
    Rules(RuleSet),
}

/// What to record, and how much it may cost.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// CPU samples per second and CPU, 1–10,000.
    pub frequency_hz: u32,
    /// Whose.
    pub selection: KernelSelection,
    /// One of the selected processes that is recorded only when it has become another program.
    pub from_exec: Option<u32>,
    /// Most bytes of user stack per record, 1–131,072.
    pub stack_copy_bytes: u32,
    /// Bytes of wait records per second, for all CPUs together; above it a coin thins them.
    pub wait_stack_budget_bytes_per_s: u64,
    /// Keeps one wait's stack of so many, whatever they cost, instead of following the budget.
    pub wait_stacks_one_in: Option<NonZeroU32>,
    /// Leaves this process out.
    pub exclude_self: bool,
    /// Bytes of the ring between the probes and this process: a power of two of at least a page.
    pub ring_bytes: u32,
    /// Threads whose times can be known at once.
    pub max_threads: u32,
    /// Places whose unwind rules the probes can know at once; taken as the power of two below.
    pub max_places: u32,
    /// Sends registers and copy of each stack from its innermost frame on, also where the probes
    /// walked it, so that the two can be compared.
    pub copies_all: bool,
    /// Takes the stacks of threads that end kept waits, out of the same budget.
    pub waker_stacks: bool,
    /// Takes with each stack the span its thread works for, where threads publish that and a lesson
    /// says where.
    pub spans: bool,
    /// Measures what the stages of a stack record take: for `cargo xtask bench`, which reads it
    /// from the probes' map.
    pub times_stages: bool,
    /// Uses the programs for kernels before 5.17, so that they can be tried on newer ones.
    pub older_probes: bool,
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self {
            frequency_hz: 99,
            selection: KernelSelection::All,
            from_exec: None,
            stack_copy_bytes: 16 * 1024,
            wait_stack_budget_bytes_per_s: 64 << 20,
            wait_stacks_one_in: None,
            exclude_self: true,
            ring_bytes: 8 << 20,
            max_threads: DEFAULT_MAX_THREADS,
            max_places: DEFAULT_MAX_PLACES,
            copies_all: false,
            waker_stacks: false,
            spans: false,
            times_stages: false,
            older_probes: false,
        }
    }
}

/// What of the probes can be changed while a recording goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRates {
    /// As [`KernelOptions::frequency_hz`].
    pub frequency_hz: u32,
    /// As [`KernelOptions::wait_stack_budget_bytes_per_s`].
    pub wait_stack_budget_bytes_per_s: u64,
}

impl KernelOptions {
    /// Those to begin with.
    #[must_use]
    pub fn rates(&self) -> KernelRates {
        KernelRates {
            frequency_hz: self.frequency_hz,
            wait_stack_budget_bytes_per_s: self.wait_stack_budget_bytes_per_s,
        }
    }
}

/// Why the kernel cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Built without the probes.
    #[error("this program was built without its eBPF probes; build it with `cargo xtask build`")]
    NoProbes,
    /// An option outside its range.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its range.
        expected: &'static str,
        /// What was given.
        found: u64,
    },
    /// A process to record is not there.
    #[error("no process with pid {pid}")]
    NoProcess {
        /// Its pid.
        pid: u32,
    },
    /// The running kernel lacks something, or this process lacks a right.
    #[error(transparent)]
    Feature(#[from] crate::kernel::features::FeatureError),
    /// BTF cannot be read.
    #[error("{}: {source}; the kernel must be built with CONFIG_DEBUG_INFO_BTF", btf::PATH)]
    BtfUnreadable {
        /// Why.
        source: io::Error,
    },
    /// BTF lacks something.
    #[error(transparent)]
    KernelBtf(#[from] btf::BtfError),
    /// aya cannot read the kernel's BTF.
    #[error("{}: {source}", btf::PATH)]
    Btf {
        /// Why.
        source: aya::BtfError,
    },
    /// The thread that reads BTF died.
    #[error("{}: reading it panicked", btf::PATH)]
    BtfReader,
    /// A thread that loads a program died.
    #[error("loading the eBPF programs panicked")]
    LoaderDied,
    /// An unknown tracepoint prototype.
    #[error("tracepoint sched_switch: expected (bool, task, task[, state]), found {found:?}")]
    Prototype {
        /// The arguments' sorts.
        found: Vec<btf::Argument>,
    },
    /// The kernel refuses the maps or the object.
    #[error("loading the eBPF object: {source}")]
    Load {
        /// Why.
        source: aya::EbpfError,
    },
    /// The kernel refuses a map.
    #[error(
        "eBPF map {name}: {source}; before Linux 5.11 maps count as locked memory, of which \
         {limit} are allowed: allow more (ulimit -l \
         unlimited, LimitMEMLOCK=infinity), or grant CAP_SYS_RESOURCE; on a newer kernel a seccomp \
         profile or an LSM forbids it"
    )]
    MapForbidden {
        /// The map.
        name: String,
        /// Why.
        source: io::Error,
        /// RLIMIT_MEMLOCK.
        limit: String,
    },
    /// The kernel refuses a program.
    #[error("eBPF program {name}: {source}")]
    Program {
        /// Its name.
        name: &'static str,
        /// Why.
        source: aya::programs::ProgramError,
    },
    /// The object lacks a program or map, or it is of another kind.
    #[error(
        "the eBPF object has no `{name}` of the expected kind: it belongs to another version of \
         this program"
    )]
    Object {
        /// Its name.
        name: &'static str,
    },
    /// A sampling timer cannot be made.
    #[error(
        "sampling timer of CPU {cpu}: {}{}",
        perfusion_host::system_limits::explain(source),
        perfusion_host::system_limits::sampler_advice(*frequency_hz, source)
    )]
    Sampler {
        /// The CPU.
        cpu: u32,
        /// How often it was to ring, per second.
        frequency_hz: u32,
        /// Why.
        source: aya::programs::ProgramError,
    },
    /// perf's records cannot be had.
    #[error(
        "perf_event_open on CPU {cpu}: {source}{}",
        perfusion_host::system_limits::sampler_advice(0, source)
    )]
    Perf {
        /// The CPU.
        cpu: u32,
        /// Why.
        source: io::Error,
    },
    /// perf's ring cannot be mapped.
    #[error(
        "mmap of perf's ring of CPU {cpu}: {source}; kernel.perf_event_mlock_kb is {}, \
         RLIMIT_MEMLOCK is {} bytes: raise one of them, or \
         grant CAP_IPC_LOCK",
        perfusion_host::system_limits::sysctl("kernel.perf_event_mlock_kb"),
        perfusion_host::system_limits::limit(rustix::process::Resource::Memlock)
    )]
    PerfRing {
        /// The CPU.
        cpu: u32,
        /// Why.
        source: io::Error,
    },
    /// Too few open files are allowed.
    #[error(
        "RLIMIT_NOFILE: expected at least {needed} open files on this host, found {found}: allow \
         more (ulimit -n, LimitNOFILE=), or grant \
         CAP_SYS_RESOURCE"
    )]
    FewOpenFiles {
        /// How many are needed.
        needed: u64,
        /// How many are allowed.
        found: u64,
    },
    /// The thread that visits sleeping ones cannot be started.
    #[error("the thread that visits sleeping ones: {source}")]
    Visitor {
        /// Why.
        source: io::Error,
    },
    /// The probes' rules cannot be mapped.
    #[error("eBPF maps of unwind rules: {source}")]
    RulesUnmapped {
        /// Why.
        source: io::Error,
    },
    /// The CPUs cannot be listed.
    #[error(transparent)]
    Cpus(#[from] CpusError),
    /// A map refuses an access.
    #[error("eBPF map {name}: {source}")]
    Map {
        /// Its name.
        name: &'static str,
        /// Why.
        source: MapError,
    },
}

/// How long the last visit may take: the recording has ended, and somebody waits for it.
const LAST_VISIT_NS: u64 = 1_000_000_000;

/// An entry that the kernel does not take is tried again after this.
const AGAIN_NS: u64 = 1_000_000_000;

/// Counters of this side of the ring, by `Counter`. Numbers for people, which order nothing: all
/// accesses are relaxed.
#[derive(Debug)]
pub struct ReceiveCounters([AtomicU64; COUNTERS]);

impl Default for ReceiveCounters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl ReceiveCounters {
    fn add(&self, counter: Counter, amount: u64) {
        if let Some(count) = self.0.get(index(counter)) {
            count.fetch_add(amount, Ordering::Relaxed);
        }
    }

    fn get(&self, id: u32) -> u64 {
        self.0.get(to_usize(id)).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

/// Run time of one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramCost {
    /// Its name: `cpu_sample`, `sched_switch`, ….
    pub name: String,
    /// How often it ran.
    pub runs: u64,
    /// Nanoseconds it took, all runs together.
    pub total_ns: u64,
}

/// The recording in the kernel.
pub struct KernelSource {
    // Dropped first: closing perf's rings and the programs' links ends all recording.
    cpus: CpuRings,
    /// Gone once the recording is frozen: dropping it detaches the programs.
    bpf: Option<Ebpf>,
    frozen_ns: Option<u64>,
    ring: RingBuf<MapData>,
    rules: Option<RuleCache>,
    spans: Option<SpanMap>,
    threads: ThreadTable,
    /// Another handle for whoever asks /proc about them.
    given: Option<ThreadTable>,
    /// Ends of threads found on the way, for the next drain.
    ends: Vec<Event>,
    /// When the last window ended.
    cut_ns: u64,
    selected: BpfHashMap<MapData, u32, RecordingStart>,
    cgroups: BpfHashMap<MapData, u64, u32>,
    /// Those that are to be in `cgroups`, when the kernel did not take all of them, and when that
    /// is tried again.
    wanted: Option<(HashMap<u64, u32>, u64)>,
    control: Array<MapData, RecordingStart>,
    ended: Array<MapData, u64>,
    wait_budget: Array<MapData, u64>,
    counts: PerCpuArray<MapData, [u64; COUNTERS]>,
    options: KernelOptions,
    /// In force now.
    rates: KernelRates,
    started_ns: u64,
    /// `None` when the kernel cannot show sleeping threads.
    visitor: Option<TaskScanner>,
    sleepers_lack: Option<String>,
    sleepers_deferred: u64,
    /// Whether the last visit left somebody to the next one.
    left_out: bool,
    thread_ends_left: u64,
    /// See [`KernelSource::filled`].
    filled: u64,
    /// Processes whose perf records are passed on, when the selection is by pid.
    followed: HashSet<u32>,
    /// Counted on this side of the ring.
    own: Arc<ReceiveCounters>,
}

impl KernelSource {
    /// Loads and attaches the probes and starts recording.
    ///
    /// # Errors
    /// When an option is out of range, the kernel lacks something or this process lacks a right.
    /// Nothing is left behind.
    pub fn start(options: &KernelOptions) -> Result<Self, KernelError> {
        check(options)?;
        crate::kernel::features::check()?;
        let (needed, found) = (needed_open_files(), raise_open_files());
        if found < needed {
            return Err(KernelError::FewOpenFiles { needed, found });
        }
        let mut cpus = CpuRings::open(MonotonicNs::now().0)?;
        let LoadedProbes { mut bpf, sleepers, loops } =
            load::load(options, perfusion_host::cpus::possible()?)?;
        let visitor = sleepers.map_err(|error| lack_of_sleepers(&error));
        let visitor =
            visitor.and_then(|()| TaskScanner::start(&mut bpf).map_err(|error| error.to_string()));
        if let KernelSelection::Rules(rules) = &options.selection {
            fill(&mut typed(&mut bpf, "USERS")?, "USERS", &rules.users)?;
            fill(&mut typed(&mut bpf, "COMMANDS")?, "COMMANDS", &rules.commands)?;
        }
        let mut wait_budget: Array<MapData, u64> = typed(&mut bpf, "WAIT_BUDGET")?;
        let bytes_per_s = options.wait_stack_budget_bytes_per_s;
        set_budget(&mut wait_budget, bytes_per_s, options.ring_bytes, cpus.count())?;
        cpus.sample(&mut bpf, options.frequency_hz)?;
        let own = Arc::new(ReceiveCounters::default());
        let threads = bpf.take_map("THREADS").ok_or(KernelError::Object { name: "THREADS" })?;
        let [threads, given] = ThreadTable::pair(threads, &own)?;
        let mut source = Self {
            ring: typed(&mut bpf, "RING")?,
            rules: loops.then(|| rule_cache(&mut bpf)).transpose()?,
            spans: if options.spans { Some(SpanMap::new(typed(&mut bpf, "SPANS")?)) } else { None },
            threads,
            given: Some(given),
            ends: Vec::new(),
            cut_ns: 0,
            selected: typed(&mut bpf, "SELECTED")?,
            cgroups: typed(&mut bpf, "CGROUPS")?,
            wanted: None,
            control: typed(&mut bpf, "CONTROL")?,
            ended: typed(&mut bpf, "ENDED")?,
            wait_budget,
            counts: typed(&mut bpf, "COUNTS")?,
            cpus,
            bpf: Some(bpf),
            frozen_ns: None,
            options: options.clone(),
            rates: options.rates(),
            started_ns: MonotonicNs::now().0,
            sleepers_lack: visitor.as_ref().err().cloned(),
            visitor: visitor.ok(),
            sleepers_deferred: 0,
            left_out: false,
            thread_ends_left: 0,
            filled: 0,
            followed: HashSet::new(),
            own,
        };
        match &options.selection {
            KernelSelection::Pids(pids) => {
                for &pid in pids {
                    source.add_pid(pid)?;
                }
            }
            KernelSelection::All | KernelSelection::Cgroup(_) => source.begin_for_all()?,
            KernelSelection::Rules(rules) => {
                set_cgroups(
                    &mut source.cgroups,
                    &mut HashMap::new(),
                    &rules.cgroups.clone().unwrap_or_default(),
                )?;
                source.begin_for_all()?;
            }
        }
        if let Some(lack) = &source.sleepers_lack {
            tracing::warn!(
                "threads that sleep all the time will have no stack: the kernel does not show \
                 them: {lack}; it takes Linux 5.18 or newer"
            );
            source.count(Counter::VisitsRefused, 1);
        }
        source.visit_sleepers();
        Ok(source)
    }

    /// The probes' rules, for whoever finishes stacks; `None` when they were taken before, or the
    /// kernel cannot walk.
    pub fn take_rules(&mut self) -> Option<RuleCache> {
        self.rules.take()
    }

    /// Where the probes are told of spans, for whoever finds that out; `None` when it was taken
    /// before, or nobody asks for spans.
    pub fn take_spans(&mut self) -> Option<SpanMap> {
        self.spans.take()
    }

    /// The probes' threads, for whoever asks /proc about them; `None` when they were taken before.
    pub fn take_threads(&mut self) -> Option<ThreadTable> {
        self.given.take()
    }

    /// Whether spans are taken with stacks.
    #[must_use]
    pub fn has_spans(&self) -> bool {
        self.options.spans
    }

    /// True when the threads that end waits have stacks too.
    #[must_use]
    pub fn has_waker_stacks(&self) -> bool {
        self.options.waker_stacks
    }

    /// When the recording began.
    #[must_use]
    pub fn started(&self) -> MonotonicNs {
        MonotonicNs(self.started_ns)
    }

    /// Records `pid` too, and the children it makes from now on; for a selection by pid.
    ///
    /// # Errors
    /// When there is no such process or no room.
    pub fn add_pid(&mut self, pid: u32) -> Result<(), KernelError> {
        let failed = |source| KernelError::Map { name: "SELECTED", source };
        if seed::numbers(&format!("/proc/{pid}/task")).is_empty() {
            return Err(KernelError::NoProcess { pid });
        }
        self.followed.insert(pid);
        if self.options.from_exec == Some(pid) {
            // The probe fills in when; its one thread is new then.
            return self
                .selected
                .insert(pid, RecordingStart { since_ns: 0, seeded: 1, left_out: 0 }, 0)
                .map_err(failed);
        }
        let mut recording =
            RecordingStart { since_ns: MonotonicNs::now().0, seeded: 0, left_out: 0 };
        self.selected.insert(pid, recording, 0).map_err(failed)?;
        self.seed(pid, recording.since_ns)?;
        recording.seeded = 1;
        self.selected.insert(pid, recording, 0).map_err(failed)?;
        if let Some(visitor) = &mut self.visitor {
            visitor.hurry();
        }
        if seed::numbers(&format!("/proc/{pid}/task")).is_empty() {
            // It ended meanwhile, maybe before its entry was there to be removed. Gone already is
            // as good.
            self.selected.remove(&pid).ok();
        }
        Ok(())
    }

    fn begin_for_all(&mut self) -> Result<(), KernelError> {
        let failed = |source| KernelError::Map { name: "CONTROL", source };
        let mut recording =
            RecordingStart { since_ns: MonotonicNs::now().0, seeded: 0, left_out: 0 };
        self.control.set(0, recording, 0).map_err(failed)?;
        let excluded = if self.options.exclude_self { std::process::id() } else { 0 };
        let selection = self.options.selection.clone();
        let mut holder = ProcessFilter::of(&selection);
        for pid in seed::numbers("/proc") {
            if pid != excluded && holder.as_mut().is_none_or(|holder| holder.holds(pid)) {
                self.seed(pid, recording.since_ns)?;
            }
        }
        recording.seeded = 1;
        self.control.set(0, recording, 0).map_err(failed)
    }

    /// Tells the probes which cgroups there are now and what rules say of them; for a selection by
    /// rules that look at cgroups. What the kernel does not take is tried again.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn select_cgroups(&mut self, now: HashMap<u64, u32>) -> Result<(), KernelError> {
        self.wanted = None;
        let KernelSelection::Rules(RuleSet { cgroups: Some(known), .. }) =
            &mut self.options.selection
        else {
            return Ok(());
        };
        let set = set_cgroups(&mut self.cgroups, known, &now);
        if set.is_err() {
            self.wanted = Some((now, MonotonicNs::now().0.saturating_add(AGAIN_NS)));
        }
        set
    }

    fn select_again(&mut self) {
        if self.wanted.as_ref().is_some_and(|(_, due)| *due <= MonotonicNs::now().0)
            && let Some((wanted, _)) = self.wanted.take()
            && self.select_cgroups(wanted).is_ok()
        {
            tracing::info!("the selection of cgroups is up to date again");
        }
    }

    /// Enters the threads of `tgid` that no event has told about: those have been in one state
    /// since `since_ns`.
    fn seed(&mut self, tgid: u32, since_ns: u64) -> Result<(), KernelError> {
        // BPF_NOEXIST: an event seen meanwhile knows better.
        const NO_EXIST: u64 = 1;
        for thread in seed::threads(tgid) {
            let value = SchedulerAccount {
                entered_ns: since_ns,
                since_ns,
                wait_start_ns: since_ns,
                exec_ns: u64::MAX,
                tgid,
                state: thread.state,
                wait_flags: if thread.state == STATE_BLOCKED {
                    ebpf_common::key::WAIT_WAS_BLOCKED
                } else {
                    0
                },
                ..SchedulerAccount::default()
            };
            match self.threads.map.insert(thread.tid, value, NO_EXIST) {
                Ok(()) => {
                    if seed::state(tgid, thread.tid).is_none() {
                        // It ended meanwhile: its last switch may have come before the entry. Gone
                        // already is as good.
                        self.threads.map.remove(&thread.tid).ok();
                    }
                }
                Err(MapError::SyscallError(error))
                    if error.io_error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(MapError::SyscallError(_)) => self.count(Counter::ThreadMapFull, 1),
                Err(source) => return Err(KernelError::Map { name: "THREADS", source }),
            }
        }
        Ok(())
    }

    /// Readable when a process has begun, ended or changed since it was last asked, whoever's it
    /// is: [`KernelSource::drain`] should be called soon.
    #[must_use]
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.cpus.bell()
    }

    /// How much of the ring the last [`KernelSource::drain`] found used, in 1/256.
    #[must_use]
    pub fn filled(&self) -> u64 {
        self.filled
    }

    /// Hands all events that have arrived to `sink`. To be called every 100 ms at least, since a
    /// ring holds about a second of samples.
    pub fn drain(&mut self, sink: &mut dyn FnMut(Event)) {
        self.select_again();
        self.visit_sleepers();
        let changes = self.cpus.look(MonotonicNs::now().0);
        self.drain_perf(sink);
        if let (Some(changes), Some(bpf)) = (changes, &mut self.bpf) {
            let (failed, missed) = self.cpus.follow(bpf, self.rates.frequency_hz, &changes);
            self.count(Counter::CpuNotFollowed, failed);
            if missed {
                sink(Event { time: MonotonicNs::now(), kind: EventKind::ProcessRecordsLost });
            }
        }
        // What comes in meanwhile is left for the next call.
        let mut budget = self.options.ring_bytes;
        while budget > 0 {
            let Some(record) = self.ring.next() else { break };
            // 8 bytes of header per record in the ring.
            budget = budget
                .saturating_sub(u32::try_from(record.len()).unwrap_or(u32::MAX).saturating_add(8));
            let event = decode::ring_record(&record);
            drop(record);
            self.count(Counter::RecordsRead, 1);
            match event {
                Ok(event) => sink(event),
                Err(_) => self.count(Counter::RecordsBad, 1),
            }
        }
        self.filled = (u64::from(self.options.ring_bytes - budget) << 8)
            / u64::from(self.options.ring_bytes.max(1));
        self.drain_ends(sink);
        self.ends.drain(..).for_each(sink);
    }

    /// The ends of threads that found no room in the ring: they stay in the map until they are
    /// taken here.
    fn drain_ends(&mut self, sink: &mut dyn FnMut(Event)) {
        let left = self.counter(Counter::ThreadEndsRingFull);
        if left == self.thread_ends_left {
            return;
        }
        self.thread_ends_left = left;
        // Bounded like the walk in `thread_times`.
        let threads = self.threads.map.iter().take(2 * to_usize(self.options.max_threads));
        let dead: HashMap<u32, SchedulerAccount> = threads
            .filter_map(Result::ok)
            .filter(|(_, thread)| thread.state == STATE_DEAD)
            .collect();
        for (tid, thread) in dead {
            // A new thread has taken its place if it is gone, and is known from now on if it took
            // it this moment.
            if self.threads.map.remove(&tid).is_ok() {
                sink(Event {
                    time: MonotonicNs(thread.since_ns),
                    kind: EventKind::ThreadEnd(closed_times(tid, &thread)),
                });
            }
        }
    }

    fn drain_perf(&mut self, sink: &mut dyn FnMut(Event)) {
        let mut events = Vec::new();
        let lost = self.cpus.read(&self.own, &mut events);
        for event in events {
            if self.wants(&event.kind) {
                sink(event);
            }
        }
        if lost {
            sink(Event { time: MonotonicNs::now(), kind: EventKind::ProcessRecordsLost });
        }
    }

    /// Whether a perf record is about a selected process. A cgroup's are passed on with all others:
    /// the record does not say whose it is.
    fn wants(&mut self, kind: &EventKind) -> bool {
        let pid = match kind {
            EventKind::Exec { pid, .. } => *pid,
            EventKind::Comm { thread, .. }
            | EventKind::Exit { thread }
            | EventKind::Fork { thread, .. } => thread.pid,
            EventKind::Mmap(mmap) => mmap.pid,
            _ => return true,
        };
        if self.options.exclude_self && pid == std::process::id() {
            return false;
        }
        if !matches!(self.options.selection, KernelSelection::Pids(_)) {
            return true;
        }
        if let EventKind::Fork { parent, .. } = kind
            && self.followed.contains(&parent.pid)
        {
            self.followed.insert(pid);
        }
        // The probe follows forks too, and before the child runs: it knows children whose fork
        // record is still to be read.
        let wanted = self.followed.contains(&pid) || self.selected.get(&pid, 0).is_ok();
        if wanted {
            self.followed.insert(pid);
        }
        if let EventKind::Exit { thread } = kind
            && thread.tid == pid
            && self.followed.len() > to_usize(MAX_SELECTED_PROCESSES)
        {
            // Bounded by what the probes can select; a process whose first thread ended is asked
            // for in the map from now on.
            self.followed.remove(&pid);
        }
        wanted
    }

    /// Lets the task iterator run when it is time: threads that slept before the recording, or
    /// whose wait the coin did not keep, get their stack.
    fn visit_sleepers(&mut self) {
        let now = MonotonicNs::now().0;
        let (Some(visitor), Some(bpf)) = (&mut self.visitor, &mut self.bpf) else { return };
        let ended = visitor.ended(Duration::ZERO);
        if ended {
            let deferred = self.counter(Counter::SleepersDeferred);
            let left_out = deferred != self.sleepers_deferred;
            self.sleepers_deferred = deferred;
            self.left_out = left_out;
            if let Some(visitor) = &mut self.visitor {
                visitor.left_out(left_out, now);
            }
            return;
        }
        if let Some(pid) = visitor.held_up_by(now) {
            let news = visitor.is_news();
            self.count(Counter::VisitsHeld, 1);
            if news {
                tracing::warn!(
                    pid,
                    "reading the stack of a sleeping thread takes more than a second: it seems to \
                     lie in a file whose file system does not answer. \
                     The process's sleeping threads get no stacks from now on, and neither do \
                     those of others that do so"
                );
            }
            return;
        }
        if visitor.is_due(now) && visitor.begin(bpf, now).is_err() {
            if visitor.is_news() {
                tracing::warn!(
                    "the kernel does not show sleeping threads, or the memory of some does not \
                     answer: until it does, threads that sleep all the \
                     time get no stacks"
                );
            }
            self.count(Counter::VisitsRefused, 1);
        }
    }

    /// A last visit, for what waits at the end of the recording; events go to `sink` meanwhile, so
    /// that the ring has room. A thread whose memory does not answer is not waited for.
    pub fn visit_last(&mut self, sink: &mut dyn FnMut(Event)) {
        let deadline = MonotonicNs::now().0.saturating_add(LAST_VISIT_NS);
        let mut begun = false;
        while MonotonicNs::now().0 < deadline {
            let (Some(visitor), Some(bpf)) = (&mut self.visitor, &mut self.bpf) else { return };
            if !visitor.is_visiting() {
                if begun || visitor.begin(bpf, MonotonicNs::now().0).is_err() {
                    return;
                }
                begun = true;
            }
            visitor.ended(Duration::from_millis(1));
            self.drain(sink);
        }
        self.count(Counter::VisitsRefused, 1);
    }

    /// How often all sleeping threads have been visited; their records are in the ring or read.
    #[must_use]
    pub fn visits(&self) -> u64 {
        self.visitor.as_ref().map_or(0, TaskScanner::count)
    }

    /// Whether the last visit left threads to the next one, for want of room in the ring.
    #[must_use]
    pub fn has_left_out(&self) -> bool {
        self.left_out
    }

    /// Makes the next visit due now.
    pub fn hurry(&mut self) {
        if let Some(visitor) = &mut self.visitor {
            visitor.hurry();
        }
    }

    /// Why threads that sleep all the time have no stacks, if the kernel cannot show them.
    #[must_use]
    pub fn sleepers_lack(&self) -> Option<&str> {
        self.sleepers_lack.as_deref()
    }

    /// Bytes of the ring between the probes and this process.
    #[must_use]
    pub fn ring_bytes(&self) -> u32 {
        self.options.ring_bytes
    }

    /// The rates in force.
    #[must_use]
    pub fn rates(&self) -> KernelRates {
        self.rates
    }

    /// Puts other rates in force, as at the end of a window: samples of one window all stand for as
    /// much. A timer that cannot be had is tried again like that of a CPU that comes online.
    pub fn set_rates(&mut self, rates: KernelRates) {
        let before = std::mem::replace(&mut self.rates, rates);
        let Some(bpf) = &mut self.bpf else { return };
        if before.frequency_hz != rates.frequency_hz {
            let failed = self.cpus.sample_anew(bpf, rates.frequency_hz);
            self.count(Counter::CpuNotFollowed, failed);
        }
        let (bytes_per_s, ring) = (rates.wait_stack_budget_bytes_per_s, self.options.ring_bytes);
        if before.wait_stack_budget_bytes_per_s != bytes_per_s
            && let Err(error) =
                set_budget(&mut self.wait_budget, bytes_per_s, ring, self.cpus.count())
        {
            tracing::warn!(%error, "the budget of wait stacks stays as it was");
        }
    }

    /// Ends the recording and detaches the probes: what was recorded can be read in peace. Answers
    /// when it ended.
    pub fn freeze(&mut self) -> MonotonicNs {
        // The probes are told first: detaching them waits for grace periods, and threads switch
        // meanwhile. Writing an element of an array cannot fail; if it did, detaching would end the
        // recording all the same, later than said.
        if let Err(error) = self.ended.set(0, 1, 0) {
            tracing::warn!(%error, "eBPF map ENDED");
        }
        let frozen = MonotonicNs::now().0;
        self.frozen_ns = Some(frozen);
        self.bpf = None;
        MonotonicNs(frozen)
    }

    /// Times of all living threads, the state each is in closed now, or when the recording was
    /// frozen. Ends that went unseen come with the next drain, except once the recording is frozen:
    /// /proc knows what is now, not what was then.
    pub fn thread_times(&mut self) -> Vec<ThreadSnapshot> {
        let look = self.look_at(self.frozen_ns, u64::MAX);
        let confirmed = self.threads.confirm(&look);
        self.ends.extend(confirmed.ends);
        confirmed.threads
    }

    /// All threads at the end of a window, each state closed at `at`; that of a thread that had an
    /// event since, with this event. To be confirmed with the table that
    /// [`KernelSource::take_threads`] gave.
    pub fn look_at_threads(&mut self, at: MonotonicNs) -> ThreadScan {
        let before = std::mem::replace(&mut self.cut_ns, at.0);
        self.look_at(Some(at.0), before)
    }

    fn look_at(&self, at: Option<u64>, asks_before: u64) -> ThreadScan {
        let most = to_usize(self.options.max_threads);
        self.threads.look(at, most, &self.options.selection, asks_before, self.frozen_ns.is_some())
    }

    fn counter(&self, counter: Counter) -> u64 {
        let per_cpu = self.counts.get(&0, 0).ok();
        let of = |counts: &[u64; COUNTERS]| counts.get(index(counter)).copied().unwrap_or(0);
        per_cpu.iter().flat_map(|cpus| cpus.iter()).map(of).sum()
    }

    /// All counters of this source.
    pub fn counters(&self) -> Vec<(CounterInfo, u64)> {
        let per_cpu = self.counts.get(&0, 0).ok();
        Counter::ALL
            .iter()
            .map(|info| {
                let id = to_usize(info.id);
                let probes =
                    per_cpu.iter().flat_map(|cpus| cpus.iter()).filter_map(|counts| counts.get(id));
                (*info, probes.sum::<u64>().saturating_add(self.own.get(info.id)))
            })
            .collect()
    }

    /// What each program has cost so far; all zero unless the kernel counts
    /// (`kernel.bpf_stats_enabled=1`).
    #[must_use]
    pub fn costs(&self) -> Vec<ProgramCost> {
        self.bpf
            .iter()
            .flat_map(Ebpf::programs)
            .filter_map(|(name, program)| {
                let info = program.info().ok()?;
                Some(ProgramCost {
                    name: name.to_owned(),
                    runs: info.run_count(),
                    total_ns: u64::try_from(info.run_time().as_nanos()).ok()?,
                })
            })
            .collect()
    }

    fn count(&self, counter: Counter, amount: u64) {
        self.own.add(counter, amount);
    }
}

/// Puts what rules say into the probes' map.
fn fill<K: aya::Pod + Copy>(
    map: &mut BpfHashMap<MapData, K, u32>,
    name: &'static str,
    said: &HashMap<K, u32>,
) -> Result<(), KernelError> {
    for (key, bits) in said {
        map.insert(key, bits, 0).map_err(|source| KernelError::Map { name, source })?;
    }
    Ok(())
}

/// Makes the probes' cgroups those of `now`. `known` is what they know: each entry as it succeeds.
fn set_cgroups(
    map: &mut BpfHashMap<MapData, u64, u32>,
    known: &mut HashMap<u64, u32>,
    now: &HashMap<u64, u32>,
) -> Result<(), KernelError> {
    let gone: Vec<u64> = known.keys().filter(|id| !now.contains_key(id)).copied().collect();
    for id in gone {
        // Gone already is as good.
        map.remove(&id).ok();
        known.remove(&id);
    }
    let mut failed = None;
    for (&id, &bits) in now {
        if known.get(&id) != Some(&bits) {
            match map.insert(id, bits, 0) {
                Ok(()) => drop(known.insert(id, bits)),
                Err(source) => failed = Some(source),
            }
        }
    }
    failed.map_or(Ok(()), |source| Err(KernelError::Map { name: "CGROUPS", source }))
}

fn set_budget(
    map: &mut Array<MapData, u64>,
    bytes_per_s: u64,
    ring_bytes: u32,
    cpus: usize,
) -> Result<(), KernelError> {
    let budget = load::coin_budget(bytes_per_s, cpus);
    let entries = [budget, load::coin_beyond(budget, ring_bytes, cpus)];
    let mut set = (0..).zip(entries).map(|(index, bytes)| map.set(index, bytes, 0));
    set.try_for_each(|set| set).map_err(|source| KernelError::Map { name: "WAIT_BUDGET", source })
}

fn index(counter: Counter) -> usize {
    to_usize(counter.id())
}

fn to_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

fn check(options: &KernelOptions) -> Result<(), KernelError> {
    let option = |option, expected, found: u64, good: bool| {
        if good { Ok(()) } else { Err(KernelError::Option { option, expected, found }) }
    };
    let hz = options.frequency_hz;
    option("sampling frequency", "1 to 10000 Hz", hz.into(), (1..=10_000).contains(&hz))?;
    let copy = options.stack_copy_bytes;
    option(
        "stack copy",
        "1 to 131072 bytes",
        copy.into(),
        (1..=MAX_STACK_COPY_BYTES).contains(&copy),
    )?;
    let ring = options.ring_bytes;
    let good = ring.is_power_of_two() && (4096..=1 << 30).contains(&ring);
    option("ring", "a power of two from 4096 to 2^30 bytes", ring.into(), good)?;
    let threads = options.max_threads;
    option("threads", "1 to 4194304", threads.into(), (1..=1 << 22).contains(&threads))?;
    if let KernelSelection::Pids(pids) = &options.selection {
        let count = u64::try_from(pids.len()).unwrap_or(u64::MAX);
        option(
            "selected processes",
            "1 to 8192",
            count,
            (1..=u64::from(MAX_SELECTED_PROCESSES)).contains(&count),
        )?;
    }
    Ok(())
}

/// What the kernel answered to the iterator, in words where its age says it.
fn lack_of_sleepers(error: &ProgramError) -> String {
    let release = crate::kernel::features::without_sleepers();
    release.map_or_else(|| error.to_string(), |release| format!("this is Linux {release}"))
}

fn rule_cache(bpf: &mut Ebpf) -> Result<RuleCache, KernelError> {
    let mut array = |name| match bpf.take_map(name) {
        Some(Map::Array(map)) => Ok(map),
        _ => Err(KernelError::Object { name }),
    };
    let (places, rules) = (array("PLACES")?, array("RULES")?);
    let cache = RuleCache::new(places, rules, typed(bpf, "SPACES")?);
    cache.map_err(|source| KernelError::RulesUnmapped { source })
}

fn typed<M: TryFrom<Map>>(bpf: &mut Ebpf, name: &'static str) -> Result<M, KernelError> {
    let map = bpf.take_map(name).ok_or(KernelError::Object { name })?;
    M::try_from(map).map_err(|_| KernelError::Object { name })
}

#[cfg(test)]
mod tests {
    use super::{KernelError, KernelOptions, check};

    #[test]
    fn options_out_of_range_name_themselves() {
        let options = KernelOptions { ring_bytes: 5000, ..KernelOptions::default() };
        assert!(matches!(
            check(&options),
            Err(KernelError::Option { option: "ring", found: 5000, .. })
        ));
        assert!(check(&KernelOptions::default()).is_ok());
    }
}
