//! The kernel as a source: a CPU sampler and the scheduler's tracepoints as eBPF programs, and perf's own records of processes and
//! mappings. [`KernelSource`] is all the rest of the daemon sees; when it is dropped nothing is left in the kernel.

pub mod btf;
pub mod decode;
pub mod hierarchy;
mod iter;
mod load;
mod maps;
pub mod perf;
pub mod rule_set;
pub mod rules;
mod seed;

use super::{Event, EventKind, MonotonicNs, Progress, ThreadId, ThreadSnapshot, ThreadTimes};
use aya::Ebpf;
use aya::maps::{Array, HashMap as BpfHashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use aya::programs::perf_event::PerfEventLinkId;
use decode::PerfRecord;
use ebpf_common::counter::{COUNTERS, Counter, CounterInfo};
use ebpf_common::key::{
    Recording, STATE_BLOCKED, STATE_DEAD, STATE_ON_CPU, STATE_RUNNABLE, STATE_RUNNING_OR_RUNNABLE, Thread,
    WAIT_KEPT,
};
use ebpf_common::limits::{
    DEFAULT_MAX_PLACES, DEFAULT_MAX_THREADS, MAX_SELECTED_PROCESSES, MAX_STACK_COPY_BYTES,
};
use iter::Visitor;
use perf::PerfRing;
use rule_set::{Filter, RuleSet};
use rules::RuleCache;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::num::NonZeroU32;
use std::time::Duration;

/// Whose events are recorded. The probes decide it before any other work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
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
    pub selection: Selection,
    /// One of the selected processes that is recorded only when it has become another program.
    pub from_exec: Option<u32>,
    /// Most bytes of user stack per record, 1–65,536.
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
    /// Sends registers and copy of each stack from its innermost frame on, also where the probes walked it, so that the two can be
    /// compared.
    pub copies_all: bool,
    /// Takes the stacks of threads that end kept waits, out of the same budget.
    pub waker_stacks: bool,
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self {
            frequency_hz: 99,
            selection: Selection::All,
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
        }
    }
}

/// What can be changed while a recording goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// As [`KernelOptions::frequency_hz`].
    pub frequency_hz: u32,
    /// As [`KernelOptions::wait_stack_budget_bytes_per_s`].
    pub wait_stack_budget_bytes_per_s: u64,
}

impl KernelOptions {
    /// Those to begin with.
    #[must_use]
    pub fn rates(&self) -> Rates {
        Rates {
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
    Feature(#[from] crate::kernel_features::FeatureError),
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
        "the eBPF object has no `{name}` of the expected kind: it belongs to another version of this program"
    )]
    Object {
        /// Its name.
        name: &'static str,
    },
    /// A sampling timer cannot be made.
    #[error("sampling timer of CPU {cpu}: {source}")]
    Sampler {
        /// The CPU.
        cpu: u32,
        /// Why.
        source: aya::programs::ProgramError,
    },
    /// perf's records cannot be had.
    #[error("perf_event_open on CPU {cpu}: {source}")]
    Perf {
        /// The CPU.
        cpu: u32,
        /// Why.
        source: io::Error,
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
    #[error("{path}: {source}")]
    Cpus {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A map refuses an access.
    #[error("eBPF map {name}: {source}")]
    Map {
        /// Its name.
        name: &'static str,
        /// Why.
        source: MapError,
    },
}

/// CPUs are looked for that often.
const HOTPLUG_INTERVAL_NS: u64 = 1_000_000_000;

/// How long the last visit may take: the recording has ended, and somebody waits for it.
const LAST_VISIT_NS: u64 = 1_000_000_000;

/// A torn read of a thread's times is repeated at most this often.
const REREADS: u32 = 8;

/// A thread that seems to run for longer is looked up in /proc; ten times the scheduler's longest slice.
const LONG_RUN_NS: u64 = 30_000_000;

/// The scheduler's account of a running thread may lag by its clock's tick: 10 ms at the slowest (CONFIG_HZ=100).
const TICK_NS: u64 = 10_000_000;

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
    // Dropped first: closing the perf rings and the programs' links ends all recording.
    rings: HashMap<u32, PerfRing>,
    /// The sampling timer of each CPU.
    samplers: HashMap<u32, PerfEventLinkId>,
    /// Gone once the recording is frozen: dropping it detaches the programs.
    bpf: Option<Ebpf>,
    frozen_ns: Option<u64>,
    ring: RingBuf<MapData>,
    rules: Option<RuleCache>,
    threads: BpfHashMap<MapData, u32, Thread>,
    selected: BpfHashMap<MapData, u32, Recording>,
    cgroups: BpfHashMap<MapData, u64, u32>,
    control: Array<MapData, Recording>,
    ended: Array<MapData, u64>,
    wait_budget: Array<MapData, u64>,
    counts: PerCpuArray<MapData, [u64; COUNTERS]>,
    options: KernelOptions,
    /// In force now.
    rates: Rates,
    started_ns: u64,
    looked_for_cpus_ns: u64,
    /// `None` when the kernel cannot show sleeping threads.
    visitor: Option<Visitor>,
    sleepers_lack: Option<String>,
    sleepers_deferred: u64,
    thread_ends_left: u64,
    /// Processes whose perf records are passed on, when the selection is by pid.
    followed: HashSet<u32>,
    /// Counted on this side of the ring.
    own: [u64; COUNTERS],
    buffer: Vec<u8>,
}

impl KernelSource {
    /// Loads and attaches the probes and starts recording.
    ///
    /// # Errors
    /// When an option is out of range, the kernel lacks something or this process lacks a right. Nothing is left behind.
    pub fn start(options: &KernelOptions) -> Result<Self, KernelError> {
        check(options)?;
        crate::kernel_features::check()?;
        let online = cpus("/sys/devices/system/cpu/online")?;
        let possible = cpus("/sys/devices/system/cpu/possible")?;
        let possible_count = possible.iter().max().map_or(1, |last| last + 1);
        // Before anything else, so that no mapping made from now on is missed.
        let mut rings = HashMap::new();
        for &cpu in &online {
            rings.insert(cpu, PerfRing::open(cpu).map_err(|source| KernelError::Perf { cpu, source })?);
        }
        let (mut bpf, sleepers) = load::load(options, possible_count)?;
        let visitor = sleepers.map_err(|error| error.to_string());
        let visitor = visitor.and_then(|()| Visitor::start(&mut bpf).map_err(|error| error.to_string()));
        if let Selection::Rules(rules) = &options.selection {
            fill(&mut typed(&mut bpf, "USERS")?, "USERS", &rules.users)?;
            fill(&mut typed(&mut bpf, "COMMANDS")?, "COMMANDS", &rules.commands)?;
        }
        let mut wait_budget: Array<MapData, u64> = typed(&mut bpf, "WAIT_BUDGET")?;
        set_budget(&mut wait_budget, options.wait_stack_budget_bytes_per_s, online.len())?;
        let mut samplers = HashMap::new();
        for &cpu in &online {
            samplers.insert(cpu, load::attach_sampler(&mut bpf, cpu, options.frequency_hz)?);
        }
        let mut source = Self {
            ring: typed(&mut bpf, "RING")?,
            rules: Some(rule_cache(&mut bpf)?),
            threads: typed(&mut bpf, "THREADS")?,
            selected: typed(&mut bpf, "SELECTED")?,
            cgroups: typed(&mut bpf, "CGROUPS")?,
            control: typed(&mut bpf, "CONTROL")?,
            ended: typed(&mut bpf, "ENDED")?,
            wait_budget,
            counts: typed(&mut bpf, "COUNTS")?,
            rings,
            samplers,
            bpf: Some(bpf),
            frozen_ns: None,
            options: options.clone(),
            rates: options.rates(),
            started_ns: MonotonicNs::now().0,
            looked_for_cpus_ns: MonotonicNs::now().0,
            sleepers_lack: visitor.as_ref().err().cloned(),
            visitor: visitor.ok(),
            sleepers_deferred: 0,
            thread_ends_left: 0,
            followed: HashSet::new(),
            own: [0; COUNTERS],
            buffer: Vec::new(),
        };
        match &options.selection {
            Selection::Pids(pids) => {
                for &pid in pids {
                    source.add_pid(pid)?;
                }
            }
            Selection::All | Selection::Cgroup(_) => source.begin_for_all()?,
            Selection::Rules(rules) => {
                source.set_cgroups(rules.cgroups.clone().unwrap_or_default(), &HashMap::new())?;
                source.begin_for_all()?;
            }
        }
        if let Some(lack) = &source.sleepers_lack {
            tracing::warn!(
                "threads that sleep all the time will have no stack: the kernel refuses the task iterator: {lack}"
            );
            source.count(Counter::VisitsRefused, 1);
        }
        source.visit_sleepers();
        Ok(source)
    }

    /// The probes' rules, for whoever finishes stacks; `None` when they were taken before.
    pub fn take_rules(&mut self) -> Option<RuleCache> {
        self.rules.take()
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
            return self.selected.insert(pid, Recording { since_ns: 0, seeded: 1 }, 0).map_err(failed);
        }
        let mut recording = Recording { since_ns: MonotonicNs::now().0, seeded: 0 };
        self.selected.insert(pid, recording, 0).map_err(failed)?;
        self.seed(pid, recording.since_ns)?;
        recording.seeded = 1;
        self.selected.insert(pid, recording, 0).map_err(failed)?;
        if let Some(visitor) = &mut self.visitor {
            visitor.hurry();
        }
        if seed::numbers(&format!("/proc/{pid}/task")).is_empty() {
            // It ended meanwhile, maybe before its entry was there to be removed. Gone already is as good.
            self.selected.remove(&pid).ok();
        }
        Ok(())
    }

    fn begin_for_all(&mut self) -> Result<(), KernelError> {
        let failed = |source| KernelError::Map { name: "CONTROL", source };
        let mut recording = Recording { since_ns: MonotonicNs::now().0, seeded: 0 };
        self.control.set(0, recording, 0).map_err(failed)?;
        let excluded = if self.options.exclude_self { std::process::id() } else { 0 };
        let selection = self.options.selection.clone();
        let mut holder = Holder::of(&selection);
        for pid in seed::numbers("/proc") {
            if pid != excluded && holder.as_mut().is_none_or(|holder| holder.holds(pid)) {
                self.seed(pid, recording.since_ns)?;
            }
        }
        recording.seeded = 1;
        self.control.set(0, recording, 0).map_err(failed)
    }

    /// Tells the probes which cgroups there are now and what rules say of them; for a selection by rules that look at cgroups.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn select_cgroups(&mut self, now: HashMap<u64, u32>) -> Result<(), KernelError> {
        let Selection::Rules(RuleSet { cgroups: Some(known), .. }) = &mut self.options.selection else {
            return Ok(());
        };
        let before = std::mem::replace(known, now.clone());
        self.set_cgroups(now, &before)
    }

    fn set_cgroups(&mut self, now: HashMap<u64, u32>, before: &HashMap<u64, u32>) -> Result<(), KernelError> {
        for id in before.keys().filter(|id| !now.contains_key(id)) {
            // Gone already is as good.
            self.cgroups.remove(id).ok();
        }
        for (id, bits) in now.into_iter().filter(|(id, bits)| before.get(id) != Some(bits)) {
            self.cgroups
                .insert(id, bits, 0)
                .map_err(|source| KernelError::Map { name: "CGROUPS", source })?;
        }
        Ok(())
    }

    /// Enters the threads of `tgid` that no event has told about: those have been in one state since `since_ns`.
    fn seed(&mut self, tgid: u32, since_ns: u64) -> Result<(), KernelError> {
        // BPF_NOEXIST: an event seen meanwhile knows better.
        const NO_EXIST: u64 = 1;
        for thread in seed::threads(tgid) {
            let value = Thread {
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
                ..Thread::default()
            };
            match self.threads.insert(thread.tid, value, NO_EXIST) {
                Ok(()) => {
                    if seed::state(tgid, thread.tid).is_none() {
                        // It ended meanwhile: its last switch may have come before the entry. Gone already is as good.
                        self.threads.remove(&thread.tid).ok();
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

    /// Hands all events that have arrived to `sink`. To be called every 20 ms or so.
    pub fn drain(&mut self, sink: &mut dyn FnMut(Event)) {
        self.follow_cpus();
        self.visit_sleepers();
        self.drain_perf(sink);
        // What comes in meanwhile is left for the next call.
        let mut budget = self.options.ring_bytes;
        while budget > 0 {
            let Some(record) = self.ring.next() else { break };
            // 8 bytes of header per record in the ring.
            budget = budget.saturating_sub(u32::try_from(record.len()).unwrap_or(u32::MAX).saturating_add(8));
            let event = decode::ring_record(&record);
            drop(record);
            self.count(Counter::RecordsRead, 1);
            match event {
                Ok(event) => sink(event),
                Err(_) => self.count(Counter::RecordsBad, 1),
            }
        }
        self.drain_ends(sink);
    }

    /// The ends of threads that found no room in the ring: they stay in the map until they are taken here.
    fn drain_ends(&mut self, sink: &mut dyn FnMut(Event)) {
        let left = self.counter(Counter::ThreadEndsRingFull);
        if left == self.thread_ends_left {
            return;
        }
        self.thread_ends_left = left;
        // Bounded like the walk in `thread_times`.
        let threads = self.threads.iter().take(2 * to_usize(self.options.max_threads));
        let dead: HashMap<u32, Thread> =
            threads.filter_map(Result::ok).filter(|(_, thread)| thread.state == STATE_DEAD).collect();
        for (tid, thread) in dead {
            // A new thread has taken its place if it is gone, and is known from now on if it took it this moment.
            if self.threads.remove(&tid).is_ok() {
                sink(Event {
                    time: MonotonicNs(thread.since_ns),
                    kind: EventKind::ThreadEnd(closed_times(tid, &thread)),
                });
            }
        }
    }

    /// Reads perf's rings. Their records are put in order first, so that a child's records come after the fork that makes them wanted.
    fn drain_perf(&mut self, sink: &mut dyn FnMut(Event)) {
        let (mut events, mut lost) = (Vec::new(), false);
        for ring in self.rings.values_mut() {
            self.buffer.clear();
            ring.read(&mut self.buffer);
            let own = &mut self.own;
            let mut count = |counter: Counter, amount: u64| {
                if let Some(slot) = own.get_mut(index(counter)) {
                    *slot = slot.saturating_add(amount);
                }
            };
            let end = decode::perf_records(&self.buffer, &mut |record| match record {
                Ok(PerfRecord::Event(event)) => {
                    count(Counter::PerfRecords, 1);
                    events.push(*event);
                }
                Ok(PerfRecord::Lost(records)) => {
                    count(Counter::PerfLost, records);
                    lost = true;
                }
                Ok(PerfRecord::Other) => {}
                Err(_) => {
                    count(Counter::PerfBad, 1);
                    lost = true;
                }
            });
            if end.is_err() {
                count(Counter::PerfBad, 1);
                lost = true;
            }
        }
        events.sort_by_key(|event| event.time);
        for event in events {
            if self.wants(&event.kind) {
                sink(event);
            }
        }
        if lost {
            sink(Event { time: MonotonicNs::now(), kind: EventKind::ProcessRecordsLost });
        }
    }

    /// Whether a perf record is about a selected process. A cgroup's are passed on with all others: the record does not say whose it is.
    fn wants(&mut self, kind: &EventKind) -> bool {
        let pid = match kind {
            EventKind::Exec { pid, .. } => *pid,
            EventKind::Comm { thread, .. } | EventKind::Exit { thread } | EventKind::Fork { thread, .. } => {
                thread.pid
            }
            EventKind::Mmap(mmap) => mmap.pid,
            _ => return true,
        };
        if self.options.exclude_self && pid == std::process::id() {
            return false;
        }
        if !matches!(self.options.selection, Selection::Pids(_)) {
            return true;
        }
        if let EventKind::Fork { parent, .. } = kind
            && self.followed.contains(&parent.pid)
        {
            self.followed.insert(pid);
        }
        // The probe follows forks too, and before the child runs: it knows children whose fork record is still to be read.
        let wanted = self.followed.contains(&pid) || self.selected.get(&pid, 0).is_ok();
        if wanted {
            self.followed.insert(pid);
        }
        if let EventKind::Exit { thread } = kind
            && thread.tid == pid
            && self.followed.len() > to_usize(MAX_SELECTED_PROCESSES)
        {
            // Bounded by what the probes can select; a process whose first thread ended is asked for in the map from now on.
            self.followed.remove(&pid);
        }
        wanted
    }

    /// Lets the task iterator run when it is time: threads that slept before the recording, or whose wait the coin did not keep, get
    /// their stack.
    fn visit_sleepers(&mut self) {
        let now = MonotonicNs::now().0;
        let (Some(visitor), Some(bpf)) = (&mut self.visitor, &mut self.bpf) else { return };
        let ended = visitor.ended(Duration::ZERO);
        if ended {
            let deferred = self.counter(Counter::SleepersDeferred);
            let left_out = deferred != self.sleepers_deferred;
            self.sleepers_deferred = deferred;
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
                    "reading the stack of a sleeping thread takes more than a second: it seems to lie in a file whose file system does not answer. \
                     The process's sleeping threads get no stacks from now on, and neither do those of others that do so"
                );
            }
            return;
        }
        if visitor.is_due(now) && visitor.begin(bpf, now).is_err() {
            if visitor.is_news() {
                tracing::warn!(
                    "the kernel does not show sleeping threads, or the memory of some does not answer: until it does, threads that sleep all the \
                     time get no stacks"
                );
            }
            self.count(Counter::VisitsRefused, 1);
        }
    }

    /// A last visit, for what waits at the end of the recording; events go to `sink` meanwhile, so that the ring has room. A thread whose
    /// memory does not answer is not waited for.
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
        self.visitor.as_ref().map_or(0, Visitor::count)
    }

    /// Why threads that sleep all the time have no stacks, if the kernel cannot show them.
    #[must_use]
    pub fn sleepers_lack(&self) -> Option<&str> {
        self.sleepers_lack.as_deref()
    }

    /// Starts sampling on CPUs that came online. What belonged to a CPU that went away is dead and is replaced when it returns.
    fn follow_cpus(&mut self) {
        let now = MonotonicNs::now().0;
        if now.saturating_sub(self.looked_for_cpus_ns) < HOTPLUG_INTERVAL_NS {
            return;
        }
        self.looked_for_cpus_ns = now;
        let Ok(online) = cpus("/sys/devices/system/cpu/online") else { return };
        let Some(bpf) = &mut self.bpf else { return };
        self.rings.retain(|cpu, _| online.contains(cpu));
        for (_, timer) in self.samplers.extract_if(|cpu, _| !online.contains(cpu)) {
            load::detach_sampler(bpf, timer);
        }
        let mut failed = 0;
        for cpu in online {
            if let Entry::Vacant(place) = self.rings.entry(cpu) {
                match PerfRing::open(cpu) {
                    Ok(ring) => drop(place.insert(ring)),
                    Err(_) => failed += 1,
                }
            }
            if let Entry::Vacant(place) = self.samplers.entry(cpu) {
                match load::attach_sampler(bpf, cpu, self.rates.frequency_hz) {
                    Ok(timer) => drop(place.insert(timer)),
                    Err(_) => failed += 1,
                }
            }
        }
        self.count(Counter::CpuNotFollowed, failed);
    }

    /// Bytes of the ring between the probes and this process.
    #[must_use]
    pub fn ring_bytes(&self) -> u32 {
        self.options.ring_bytes
    }

    /// The rates in force.
    #[must_use]
    pub fn rates(&self) -> Rates {
        self.rates
    }

    /// Puts other rates in force, as at the end of a window: samples of one window all stand for as much. A timer that cannot be had
    /// is tried again like that of a CPU that comes online.
    pub fn set_rates(&mut self, rates: Rates) {
        let before = std::mem::replace(&mut self.rates, rates);
        let Some(bpf) = &mut self.bpf else { return };
        if before.frequency_hz != rates.frequency_hz {
            for (_, timer) in self.samplers.drain() {
                load::detach_sampler(bpf, timer);
            }
            self.looked_for_cpus_ns = 0;
            self.follow_cpus();
        }
        if before.wait_stack_budget_bytes_per_s != rates.wait_stack_budget_bytes_per_s
            && let Err(error) =
                set_budget(&mut self.wait_budget, rates.wait_stack_budget_bytes_per_s, self.rings.len())
        {
            tracing::warn!(%error, "the budget of wait stacks stays as it was");
        }
    }

    /// Ends the recording and detaches the probes: what was recorded can be read in peace. Answers when it ended.
    pub fn freeze(&mut self) -> MonotonicNs {
        // The probes are told first: detaching them waits for grace periods, and threads switch meanwhile. Writing an element of an
        // array cannot fail; if it did, detaching would end the recording all the same, later than said.
        if let Err(error) = self.ended.set(0, 1, 0) {
            tracing::warn!(%error, "eBPF map ENDED");
        }
        let frozen = MonotonicNs::now().0;
        self.frozen_ns = Some(frozen);
        self.bpf = None;
        MonotonicNs(frozen)
    }

    /// Times of all living threads, the state each is in closed now, or when the recording was frozen.
    pub fn thread_times(&mut self) -> Vec<ThreadSnapshot> {
        self.thread_times_at(self.frozen_ns)
    }

    /// The same while the recording goes on, each state closed at `at`; that of a thread that had an event since, with this event.
    pub fn thread_times_cut(&mut self, at: MonotonicNs) -> Vec<ThreadSnapshot> {
        self.thread_times_at(Some(at.0))
    }

    fn thread_times_at(&mut self, at: Option<u64>) -> Vec<ThreadSnapshot> {
        let mut tids = HashSet::new();
        // A key removed during the walk makes it start again: bounded by the map's size.
        let most = to_usize(self.options.max_threads);
        tids.extend(self.threads.keys().take(2 * most).filter_map(Result::ok));
        let selection = self.options.selection.clone();
        let mut holder = Holder::of(&selection);
        let mut snapshots = Vec::with_capacity(tids.len());
        for tid in tids {
            let mut read = None;
            for _ in 0..REREADS {
                let Ok(thread) = self.threads.get(&tid, 0) else { break };
                let now = at.unwrap_or_else(|| MonotonicNs::now().0);
                read = Some(snapshot(tid, &thread, now).map(|snapshot| (thread, snapshot)));
                if matches!(read, Some(Some(_))) {
                    break;
                }
            }
            match read {
                Some(Some((thread, snapshot))) => {
                    snapshots.push(self.confirm(&thread, snapshot, holder.as_mut()));
                }
                Some(None) => self.count(Counter::ThreadTorn, 1),
                None => {}
            }
        }
        snapshots
    }

    /// Asks /proc about a thread whose last event is long ago. One whose switch-out was not reported must not collect CPU time until its
    /// next event, nor one that left the selected cgroup any time: of those no event tells, not even of their end.
    fn confirm(
        &mut self,
        entry: &Thread,
        mut snapshot: ThreadSnapshot,
        holder: Option<&mut Holder<'_>>,
    ) -> ThreadSnapshot {
        let open = snapshot.at.0.saturating_sub(entry.since_ns);
        if open <= LONG_RUN_NS || entry.state == STATE_DEAD {
            return snapshot;
        }
        let thread = snapshot.times.thread;
        if let Some(holder) = holder
            && (seed::state(thread.pid, thread.tid).is_none() || !holder.holds(thread.pid))
        {
            self.count(Counter::ThreadsLeft, 1);
            return self::snapshot(thread.tid, entry, entry.since_ns).unwrap_or(snapshot);
        }
        let Progress::OnCpu { since } = snapshot.progress else { return snapshot };
        if seed::state(thread.pid, thread.tid) == Some(STATE_BLOCKED) {
            self.count(Counter::ThreadMisjudged, 1);
            snapshot.times.oncpu_ns = snapshot.times.oncpu_ns.saturating_sub(open);
            snapshot.times.blocked_ns = snapshot.times.blocked_ns.saturating_add(open);
            snapshot.progress =
                Progress::Waiting { start: since, blocked_ns: open, runnable_ns: 0, kept: false };
        } else if entry.exec_ns != u64::MAX
            && let Some(ran_ns) = seed::ran_ns(thread.pid, thread.tid)
        {
            take_stolen(&mut snapshot.times, open, ran_ns.saturating_sub(entry.exec_ns));
        }
        snapshot
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
                let probes = per_cpu.iter().flat_map(|cpus| cpus.iter()).filter_map(|counts| counts.get(id));
                (*info, probes.sum::<u64>().saturating_add(self.own.get(id).copied().unwrap_or(0)))
            })
            .collect()
    }

    /// What each program has cost so far; all zero unless the kernel counts (`kernel.bpf_stats_enabled=1`).
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

    fn count(&mut self, counter: Counter, amount: u64) {
        if let Some(slot) = self.own.get_mut(index(counter)) {
            *slot = slot.saturating_add(amount);
        }
    }
}

/// Tells which processes a selection holds that is not by pid.
enum Holder<'a> {
    Cgroup(hierarchy::CgroupFilter),
    Rules(Filter<'a>),
}

impl<'a> Holder<'a> {
    /// `None` when it holds all there are.
    fn of(selection: &'a Selection) -> Option<Self> {
        match selection {
            Selection::Cgroup(id) => Some(Self::Cgroup(hierarchy::CgroupFilter::new(*id))),
            Selection::Rules(rules) => Some(Self::Rules(Filter::new(rules))),
            Selection::All | Selection::Pids(_) => None,
        }
    }

    fn holds(&mut self, pid: u32) -> bool {
        match self {
            Self::Cgroup(cgroup) => cgroup.holds(pid),
            Self::Rules(rules) => rules.holds(pid),
        }
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

fn set_budget(map: &mut Array<MapData, u64>, bytes_per_s: u64, cpus: usize) -> Result<(), KernelError> {
    let budget = load::coin_budget(bytes_per_s, cpus);
    map.set(0, budget, 0).map_err(|source| KernelError::Map { name: "WAIT_BUDGET", source })
}

fn index(counter: Counter) -> usize {
    to_usize(counter.id())
}

fn to_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// A thread's times up to its last event.
fn closed_times(tid: u32, thread: &Thread) -> ThreadTimes {
    ThreadTimes {
        thread: ThreadId { pid: thread.tgid, tid },
        oncpu_ns: thread.oncpu_ns,
        runnable_ns: thread.runnable_ns,
        stolen_ns: thread.stolen_ns,
        blocked_ns: thread.blocked_ns,
        since: MonotonicNs(thread.entered_ns),
    }
}

/// Of `open` ns on a CPU that a snapshot counts as run, the thread ran only `ran` by the scheduler's account: the rest was stolen.
fn take_stolen(times: &mut ThreadTimes, open: u64, ran: u64) {
    let stolen = open.saturating_sub(ran);
    if stolen > TICK_NS {
        times.oncpu_ns = times.oncpu_ns.saturating_sub(stolen);
        times.runnable_ns = times.runnable_ns.saturating_add(stolen);
        times.stolen_ns = times.stolen_ns.saturating_add(stolen);
    }
}

/// A thread's times closed at `now_ns`; `None` when it was read in the middle of an update: its law does not hold.
fn snapshot(tid: u32, thread: &Thread, now_ns: u64) -> Option<ThreadSnapshot> {
    let known = thread.since_ns.checked_sub(thread.entered_ns)?;
    let sum = thread.oncpu_ns.checked_add(thread.runnable_ns)?.checked_add(thread.blocked_ns)?;
    if sum != known {
        return None;
    }
    // The thread may have had an event after `now_ns` was taken; of a dead one there is none to come.
    let at = if thread.state == STATE_DEAD { thread.since_ns } else { now_ns.max(thread.since_ns) };
    let open = at - thread.since_ns;
    let mut times = closed_times(tid, thread);
    let waiting = |blocked_ns: u64| Progress::Waiting {
        start: MonotonicNs(thread.wait_start_ns),
        blocked_ns,
        runnable_ns: at.saturating_sub(thread.wait_start_ns).saturating_sub(blocked_ns),
        kept: thread.wait_flags & WAIT_KEPT != 0,
    };
    let progress = match thread.state {
        STATE_ON_CPU | STATE_RUNNING_OR_RUNNABLE | STATE_DEAD => {
            times.oncpu_ns += open;
            Progress::OnCpu { since: MonotonicNs(thread.since_ns) }
        }
        STATE_RUNNABLE => {
            times.runnable_ns += open;
            waiting(thread.wait_blocked_ns)
        }
        _ => {
            times.blocked_ns += open;
            waiting(at.saturating_sub(thread.wait_start_ns))
        }
    };
    Some(ThreadSnapshot { times, at: MonotonicNs(at), progress })
}

fn check(options: &KernelOptions) -> Result<(), KernelError> {
    let option = |option, expected, found: u64, good: bool| {
        if good { Ok(()) } else { Err(KernelError::Option { option, expected, found }) }
    };
    let hz = options.frequency_hz;
    option("sampling frequency", "1 to 10000 Hz", hz.into(), (1..=10_000).contains(&hz))?;
    let copy = options.stack_copy_bytes;
    option("stack copy", "1 to 65536 bytes", copy.into(), (1..=MAX_STACK_COPY_BYTES).contains(&copy))?;
    let ring = options.ring_bytes;
    let good = ring.is_power_of_two() && (4096..=1 << 30).contains(&ring);
    option("ring", "a power of two from 4096 to 2^30 bytes", ring.into(), good)?;
    let threads = options.max_threads;
    option("threads", "1 to 4194304", threads.into(), (1..=1 << 22).contains(&threads))?;
    if let Selection::Pids(pids) = &options.selection {
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

/// How many CPUs are at work.
///
/// # Errors
/// When the kernel does not say.
pub fn online_cpus() -> Result<usize, KernelError> {
    cpus("/sys/devices/system/cpu/online").map(|online| online.len())
}

/// A list such as `0-3,7` in a file of /sys.
fn cpus(path: &str) -> Result<Vec<u32>, KernelError> {
    let failed = |source| KernelError::Cpus { path: path.to_owned(), source };
    let text = std::fs::read_to_string(path).map_err(failed)?;
    cpu_list(&text)
        .ok_or_else(|| failed(io::Error::other(format!("expected a list such as 0-3,7, found {text:?}"))))
}

fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        // No kernel has more than 8192 CPUs (CONFIG_NR_CPUS).
        if first > last || last >= 8192 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
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
    use super::{KernelError, KernelOptions, Progress, Thread, check, cpu_list, snapshot, take_stolen};
    use ebpf_common::key::{
        STATE_BLOCKED, STATE_DEAD, STATE_ON_CPU, STATE_RUNNABLE, WAIT_KEPT, WAIT_WAS_BLOCKED,
    };

    fn thread(state: u32) -> Thread {
        Thread {
            entered_ns: 100,
            since_ns: 160,
            oncpu_ns: 10,
            runnable_ns: 20,
            blocked_ns: 30,
            wait_start_ns: 150,
            wait_blocked_ns: 4,
            state,
            wait_flags: WAIT_KEPT | WAIT_WAS_BLOCKED,
            ..Thread::default()
        }
    }

    #[test]
    fn a_snapshot_closes_the_state_in_progress() {
        for state in [STATE_ON_CPU, STATE_RUNNABLE, STATE_BLOCKED] {
            let times = snapshot(1, &thread(state), 200).unwrap().times;
            assert_eq!(times.oncpu_ns + times.runnable_ns + times.blocked_ns, 100, "state {state}");
        }
        let waiting = snapshot(1, &thread(STATE_RUNNABLE), 200).unwrap().progress;
        assert!(
            matches!(waiting, Progress::Waiting { blocked_ns: 4, runnable_ns: 46, kept: true, .. }),
            "{waiting:?}"
        );
    }

    #[test]
    fn a_dead_threads_times_are_final() {
        let times = snapshot(1, &thread(STATE_DEAD), 200).unwrap().times;
        assert_eq!((times.oncpu_ns, times.runnable_ns, times.blocked_ns), (10, 20, 30));
    }

    #[test]
    fn time_on_a_cpu_that_did_not_run_the_thread_was_stolen() {
        let before = snapshot(1, &thread(STATE_ON_CPU), 100_000_160).unwrap().times;
        let mut times = before;
        take_stolen(&mut times, 100_000_000, 95_000_000);
        assert_eq!(times, before, "the account may lag by a tick");
        take_stolen(&mut times, 100_000_000, 60_000_000);
        assert_eq!(
            (times.oncpu_ns, times.runnable_ns, times.stolen_ns),
            (60_000_010, 40_000_020, 40_000_000)
        );
    }

    #[test]
    fn a_torn_read_is_refused() {
        let torn = Thread { oncpu_ns: 11, ..thread(STATE_ON_CPU) };
        assert_eq!(snapshot(1, &torn, 200), None);
        let backwards = Thread { since_ns: 50, ..thread(STATE_ON_CPU) };
        assert_eq!(snapshot(1, &backwards, 200), None);
    }

    #[test]
    fn cpu_lists() {
        assert_eq!(cpu_list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(cpu_list("3"), Some(vec![3]));
        for bad in ["", "a", "3-1", "0-99999999"] {
            assert_eq!(cpu_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn options_out_of_range_name_themselves() {
        let options = KernelOptions { ring_bytes: 5000, ..KernelOptions::default() };
        assert!(matches!(check(&options), Err(KernelError::Option { option: "ring", found: 5000, .. })));
        assert!(check(&KernelOptions::default()).is_ok());
    }
}
