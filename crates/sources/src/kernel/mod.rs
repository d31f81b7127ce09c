//! The kernel as a source: a CPU sampler and the scheduler's tracepoints as eBPF programs, and
//! perf's own records of processes and mappings. When [`KernelSource`] is dropped, nothing is left
//! in the kernel.

pub mod btf;
mod control;
mod counters;
mod cpus;
pub mod decode;
mod error;
pub mod features;
mod load;
mod maps;
mod off_cpu;
mod options;
mod perf;
mod probe_log;
mod probe_ring;
mod probe_threads;
pub mod rule_set;
pub mod rules;
mod selected;
pub mod span_map;
mod task_iterator;
pub mod threads;

pub use counters::ProgramCost;
pub use error::KernelError;
pub use options::{KernelOptions, KernelRates, KernelSelection};

use aya::Ebpf;
use aya::maps::Map;
use control::ProbeControl;
use counters::KernelCounters;
use cpus::CpuRings;
use ebpf_common::counter::{Counter, CounterInfo};
use load::LoadedProbes;
use off_cpu::OffCpuScans;
use perfusion_host::system_limits::{needed_open_files, raise_open_files};
use perfusion_model::event::{Event, EventKind, MonotonicNs, ThreadSnapshot};
use probe_log::ProbeLog;
use probe_ring::ProbeRing;
use probe_threads::ProbeThreads;
use rules::RuleCache;
use selected::{SelectedProcesses, SelectionMaps, fill};
use span_map::SpanMap;
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use threads::{ThreadScan, ThreadTable};

/// How long the last scan may take: the recording has ended, and somebody waits for it.
const LAST_SCAN_NS: u64 = 1_000_000_000;

/// The recording in the kernel.
pub struct KernelSource {
    // Dropped first: closing perf's rings and the programs' links ends all recording.
    cpus: CpuRings,
    /// Gone once the recording is frozen: dropping it detaches the programs.
    bpf: Option<Ebpf>,
    frozen_ns: Option<u64>,
    ring: ProbeRing,
    log: Option<ProbeLog>,
    rules: Option<RuleCache>,
    spans: Option<SpanMap>,
    threads: ProbeThreads,
    selected: SelectedProcesses,
    control: ProbeControl,
    counters: KernelCounters,
    has_spans: bool,
    has_waker_stacks: bool,
    /// In force now.
    rates: KernelRates,
    started_ns: u64,
    off_cpu: OffCpuScans,
}

impl KernelSource {
    /// Loads and attaches the probes and starts recording.
    ///
    /// # Errors
    /// When an option is out of range, the kernel lacks something or this process lacks a right.
    /// Nothing is left behind.
    pub fn start(options: &KernelOptions) -> Result<Self, KernelError> {
        options::check(options)?;
        features::check()?;
        let (needed, found) = (needed_open_files(), raise_open_files());
        if found < needed {
            return Err(KernelError::FewOpenFiles { needed, found });
        }
        let mut cpus = CpuRings::open(MonotonicNs::now().0)?;
        let LoadedProbes { mut bpf, off_cpu_scans, loops } =
            load::load(options, perfusion_host::cpus::possible()?)?;
        let log = ProbeLog::open(&mut bpf)?;
        let off_cpu = OffCpuScans::start(&mut bpf, off_cpu_scans);
        if let KernelSelection::Rules(rules) = &options.selection {
            fill(&mut typed(&mut bpf, "USERS")?, "USERS", &rules.users)?;
            fill(&mut typed(&mut bpf, "COMMANDS")?, "COMMANDS", &rules.commands)?;
        }
        let mut control = ProbeControl {
            ended: typed(&mut bpf, "ENDED")?,
            wait_budget: typed(&mut bpf, "WAIT_BUDGET")?,
        };
        let bytes_per_s = options.wait_stack_budget_bytes_per_s;
        control.set_budget(bytes_per_s, options.ring_bytes, cpus.count())?;
        cpus.sample(&mut bpf, options.frequency_hz)?;
        let counters = KernelCounters::new(typed(&mut bpf, "COUNTS")?);
        let threads = bpf.take_map("THREADS").ok_or(KernelError::Object { name: "THREADS" })?;
        let maps = SelectionMaps {
            selected: typed(&mut bpf, "SELECTED")?,
            cgroups: typed(&mut bpf, "CGROUPS")?,
            control: typed(&mut bpf, "CONTROL")?,
        };
        let mut source = Self {
            ring: ProbeRing::new(typed(&mut bpf, "RING")?, options.ring_bytes),
            log,
            rules: loops.then(|| rule_cache(&mut bpf)).transpose()?,
            spans: if options.spans { Some(SpanMap::new(typed(&mut bpf, "SPANS")?)) } else { None },
            threads: ProbeThreads::new(threads, options.max_threads, &counters)?,
            selected: SelectedProcesses::new(maps, options),
            control,
            counters,
            cpus,
            bpf: Some(bpf),
            frozen_ns: None,
            has_spans: options.spans,
            has_waker_stacks: options.waker_stacks,
            rates: options.rates(),
            started_ns: MonotonicNs::now().0,
            off_cpu,
        };
        source.selected.begin(&mut source.threads, &source.counters)?;
        source.off_cpu.report_lack(&source.counters);
        source.scan_off_cpu();
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
        self.threads.take()
    }

    /// Whether spans are taken with stacks.
    #[must_use]
    pub fn has_spans(&self) -> bool {
        self.has_spans
    }

    /// True when the threads that end waits have stacks too.
    #[must_use]
    pub fn has_waker_stacks(&self) -> bool {
        self.has_waker_stacks
    }

    /// When the recording began.
    #[must_use]
    pub fn started(&self) -> MonotonicNs {
        MonotonicNs(self.started_ns)
    }

    /// Tells the probes which cgroups there are now and what rules say of them; for a selection by
    /// rules that look at cgroups. What the kernel does not take is tried again.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn select_cgroups(&mut self, now: HashMap<u64, u32>) -> Result<(), KernelError> {
        self.selected.select_cgroups(now)
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
        self.ring.filled()
    }

    /// Hands all events that have arrived to `sink`. To be called every 100 ms at least, since a
    /// ring holds about a second of samples.
    pub fn drain(&mut self, sink: &mut dyn FnMut(Event)) {
        self.log.iter_mut().for_each(ProbeLog::show);
        self.selected.select_again();
        self.scan_off_cpu();
        let changes = self.cpus.look(MonotonicNs::now().0);
        self.drain_perf(sink);
        if let (Some(changes), Some(bpf)) = (changes, &mut self.bpf) {
            let (failed, missed) = self.cpus.follow(bpf, self.rates.frequency_hz, &changes);
            self.counters.add(Counter::CpuNotFollowed, failed);
            if missed {
                sink(Event { time: MonotonicNs::now(), kind: EventKind::ProcessRecordsLost });
            }
        }
        self.ring.drain(&self.counters, sink);
        self.threads.drain_ends(&self.counters, sink);
    }

    fn drain_perf(&mut self, sink: &mut dyn FnMut(Event)) {
        let mut events = Vec::new();
        let lost = self.cpus.read(&self.counters.own, &mut events);
        for event in events {
            if self.selected.wants(&event.kind) {
                sink(event);
            }
        }
        if lost {
            sink(Event { time: MonotonicNs::now(), kind: EventKind::ProcessRecordsLost });
        }
    }

    /// Lets the task iterator run when it is time: threads that slept before the recording, or
    /// whose wait's stack was not kept, get their stack.
    fn scan_off_cpu(&mut self) {
        if let Some(bpf) = &mut self.bpf {
            self.off_cpu.scan(bpf, &self.counters);
        }
    }

    /// A last scan, for what waits at the end of the recording; events go to `sink` meanwhile, so
    /// that the ring has room. A thread whose memory does not answer is not waited for.
    pub fn scan_last(&mut self, sink: &mut dyn FnMut(Event)) {
        let deadline = MonotonicNs::now().0.saturating_add(LAST_SCAN_NS);
        let mut begun = false;
        while MonotonicNs::now().0 < deadline {
            let Some(bpf) = &mut self.bpf else { return };
            if !self.off_cpu.scan_last(bpf, &mut begun) {
                return;
            }
            self.drain(sink);
        }
        self.counters.add(Counter::ScansRefused, 1);
    }

    /// How often all sleeping threads have been scanned; their records are in the ring or read.
    #[must_use]
    pub fn scans(&self) -> u64 {
        self.off_cpu.count()
    }

    /// Whether the last scan left threads to the next one, for want of room in the ring.
    #[must_use]
    pub fn has_left_out(&self) -> bool {
        self.off_cpu.has_left_out()
    }

    /// Makes the next scan due now.
    pub fn hurry(&mut self) {
        self.off_cpu.hurry();
    }

    /// Why threads that sleep all the time have no stacks, if the kernel cannot show them.
    #[must_use]
    pub fn scans_lack(&self) -> Option<&str> {
        self.off_cpu.lack()
    }

    /// Bytes of the ring between the probes and this process.
    #[must_use]
    pub fn ring_bytes(&self) -> u32 {
        self.ring.bytes()
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
            self.counters.add(Counter::CpuNotFollowed, failed);
        }
        let (bytes_per_s, ring) = (rates.wait_stack_budget_bytes_per_s, self.ring.bytes());
        if before.wait_stack_budget_bytes_per_s != bytes_per_s
            && let Err(error) = self.control.set_budget(bytes_per_s, ring, self.cpus.count())
        {
            tracing::warn!(%error, "the budget of wait stacks stays as it was");
        }
    }

    /// Ends the recording and detaches the probes: what was recorded can be read in peace. Answers
    /// when it ended.
    pub fn freeze(&mut self) -> MonotonicNs {
        // The probes are told first: detaching them waits for grace periods, and threads switch
        // meanwhile.
        self.control.end();
        let frozen = MonotonicNs::now().0;
        self.frozen_ns = Some(frozen);
        self.bpf = None;
        MonotonicNs(frozen)
    }

    /// Times of all living threads, the state each is in closed now, or when the recording was
    /// frozen. Ends that went unseen come with the next drain, except once the recording is frozen:
    /// /proc knows what is now, not what was then.
    pub fn thread_times(&mut self) -> Vec<ThreadSnapshot> {
        self.threads.times(self.selected.selection(), self.frozen_ns)
    }

    /// All threads at the end of a window, each state closed at `at`; that of a thread that had an
    /// event since, with this event. To be confirmed with the table that
    /// [`KernelSource::take_threads`] gave.
    pub fn look_at_threads(&mut self, at: MonotonicNs) -> ThreadScan {
        self.threads.at_cut(at, self.selected.selection(), self.frozen_ns.is_some())
    }

    /// All counters of this source.
    pub fn counters(&self) -> Vec<(CounterInfo, u64)> {
        self.counters.all()
    }

    /// What each program has cost so far; all zero unless the kernel counts
    /// (`kernel.bpf_stats_enabled=1`).
    #[must_use]
    pub fn costs(&self) -> Vec<ProgramCost> {
        self.bpf.as_ref().map(counters::costs).unwrap_or_default()
    }
}

fn rule_cache(bpf: &mut Ebpf) -> Result<RuleCache, KernelError> {
    let mut array = |name| match bpf.take_map(name) {
        Some(Map::Array(map)) => Ok(map),
        _ => Err(KernelError::Object { name }),
    };
    let arrays = [array("PLACES")?, array("RULES")?, array("GENERATIONS")?];
    let cache = RuleCache::new(arrays, typed(bpf, "SPACES")?);
    cache.map_err(|source| KernelError::RulesUnmapped { source })
}

fn typed<M: TryFrom<Map>>(bpf: &mut Ebpf, name: &'static str) -> Result<M, KernelError> {
    let map = bpf.take_map(name).ok_or(KernelError::Object { name })?;
    M::try_from(map).map_err(|_| KernelError::Object { name })
}
