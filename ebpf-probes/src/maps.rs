//! Every map but the log's own: who writes, who reads, its unit and size, and what happens when it
//! is full.

use aya_ebpf::bindings::BPF_F_MMAPABLE;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, PerCpuArray, RingBuf};
use ebpf_common::counter::{COUNTERS, Counter};
use ebpf_common::event::WakeRecord;
use ebpf_common::key::{RecordingStart, Sampler, SchedulerAccount, SpanPlace, TaskIteratorReader};
use ebpf_common::last_walk::{self, LastWalk};
use ebpf_common::limits::{
    DEFAULT_MAX_PLACES, DEFAULT_MAX_THREADS, MAX_PASSED_OVER, MAX_RULED_CGROUPS, MAX_RULED_OTHERS,
    MAX_RULES, MAX_SELECTED_PROCESSES, MAX_SPACES, MAX_SPAN_PLACES, MAX_VISITORS,
};
use ebpf_common::rule::{PlaceSet, UnwindRule, WAYS};
use ebpf_common::scratch::{OffCpuScratch, Scratch};
use ebpf_common::stage::{STAGE_KINDS, Stages};

/// Records: probes → daemon. Size in bytes set at load. Full: the record is dropped and counted by
/// kind.
#[map]
pub(crate) static RING: RingBuf = RingBuf::with_byte_size(16 << 20, 0);

/// Times of each thread, by tid. Written by the scheduler hooks, seeded and read by the daemon.
/// Size set at load; full: counted, the thread has no times. An entry leaves at its thread's last
/// switch-out, or when the daemon finds that it has left or ended unseen.
#[map]
pub(crate) static THREADS: HashMap<u32, SchedulerAccount> =
    HashMap::with_max_entries(DEFAULT_MAX_THREADS, 0);

/// Selected processes, by tgid, when the selection is by pid. Written by the daemon and at fork; an
/// entry leaves when its process is freed.
#[map]
pub(crate) static SELECTED: HashMap<u32, RecordingStart> =
    HashMap::with_max_entries(MAX_SELECTED_PROCESSES, 0);

/// What rules say of each cgroup (`RULE_` bits), by id. Written by the daemon as cgroups come and
/// go; made small when no rule looks at it.
#[map]
pub(crate) static CGROUPS: HashMap<u64, u32> = HashMap::with_max_entries(MAX_RULED_CGROUPS, 0);

/// The same of real users, by number. Written by the daemon before it records.
#[map]
pub(crate) static USERS: HashMap<u32, u32> = HashMap::with_max_entries(MAX_RULED_OTHERS, 0);

/// The same of command names. Written by the daemon before it records.
#[map]
pub(crate) static COMMANDS: HashMap<[u8; 16], u32> = HashMap::with_max_entries(MAX_RULED_OTHERS, 0);

/// One entry: from when on everything is recorded. Written by the daemon.
#[map]
pub(crate) static CONTROL: Array<RecordingStart> = Array::with_max_entries(1, 0);

/// One entry: not 0 once the recording is over, and from then on no hook does anything. Written by
/// the daemon. Detaching the programs takes as long as an RCU grace period, a second on a busy
/// machine, in which nothing may move the totals.
#[map]
pub(crate) static ENDED: Array<u64> = Array::with_max_entries(1, 0);

/// Two entries: bytes of wait records one CPU may send in `sampler_interval_ns`, and how many more
/// while a recording begins. Written by the daemon, also while it records.
#[map]
static WAIT_BUDGET: Array<u64> = Array::with_max_entries(2, 0);

/// One entry per CPU: the sampler's state. Private to the switch hook.
#[map]
static SAMPLERS: PerCpuArray<Sampler> = PerCpuArray::with_max_entries(1, 0);

/// One entry per CPU: counters, by `Counter`. Read by the daemon.
#[map]
static COUNTS: PerCpuArray<[u64; COUNTERS]> = PerCpuArray::with_max_entries(1, 0);

/// Stack records under construction, by CPU. Entries set at load. (A per-CPU array cannot hold
/// values of this size: they are limited to 32 KiB, `PCPU_MIN_UNIT_SIZE`.) The hooks share it, so
/// that the CPU's caches hold one: the scheduler calls with interrupts off, and the sampler is an
/// interrupt, so none begins a record in the middle of another's; if one ever does, it is refused
/// and counted.
#[map]
pub(crate) static SCRATCH: Array<Scratch> = Array::with_max_entries(1, 0);

/// What the stages of stack records took, by kind of record. Read by `cargo xtask bench`; all zero
/// unless `Config::times_stages`.
#[map]
pub(crate) static STAGES: PerCpuArray<Stages> = PerCpuArray::with_max_entries(STAGE_KINDS, 0);

/// Which rule holds at a place of an address space. Written by the daemon, which maps it, as it
/// learns; the probes write the marks of use alone. Entries set at load; where a set is full, one
/// that was not used lately makes room.
#[map]
pub(crate) static PLACES: Array<PlaceSet> =
    Array::with_max_entries(DEFAULT_MAX_PLACES / WAYS as u32, BPF_F_MMAPABLE);

/// The rules, each once. Written by the daemon in the same way; an entry changes only long after
/// the last place let go of it.
#[map]
pub(crate) static RULES: Array<UnwindRule> = Array::with_max_entries(MAX_RULES, BPF_F_MMAPABLE);

/// How often rules of an address space were removed from `PLACES`, or changed there, by the space's
/// number. Written by the daemon, which maps it, behind the change.
#[map]
pub(crate) static GENERATIONS: Array<u64> =
    Array::with_max_entries(last_walk::GENERATIONS, BPF_F_MMAPABLE);

/// The last walks of some threads on each CPU. Entries set at load. Where threads share an entry,
/// each records it anew.
#[map]
pub(crate) static LAST_WALKS: Array<LastWalk> = Array::with_max_entries(last_walk::LAST_WALKS, 0);

/// The address space of each process the daemon has pushed rules of, by tgid; another number after
/// each exec. Written by the daemon; an entry leaves at exec, so that no rule of the old image is
/// used for the new one. Full: the process's stacks are copied.
#[map]
pub(crate) static SPACES: HashMap<u32, u32> = HashMap::with_max_entries(MAX_SPACES, 0);

/// Where the threads of a process publish what they work for, by tgid. Written by the daemon; an
/// entry leaves at exec, or when the daemon finds that its process is gone. Made small when nobody
/// asks for spans. Full: the process's stacks have none.
#[map]
pub(crate) static SPANS: HashMap<u32, SpanPlace> = HashMap::with_max_entries(MAX_SPAN_PLACES, 0);

/// Who reads the task iterator. The daemon writes the thread, and strikes off one that is held up;
/// the thread's scans write the rest.
#[map]
pub(crate) static VISITORS: Array<TaskIteratorReader> = Array::with_max_entries(MAX_VISITORS, 0);

/// Their records under construction.
#[map]
pub(crate) static OFF_CPU_SCRATCH: Array<OffCpuScratch> = Array::with_max_entries(MAX_VISITORS, 0);

/// Processes, by tgid, whose sleeping threads' stacks are not copied: reading one took too long.
/// Written by the daemon, which takes an entry out when its process is gone. Full: those visitors
/// stay held up.
#[map]
pub(crate) static PASSED_OVER: HashMap<u32, u32> = HashMap::with_max_entries(MAX_PASSED_OVER, 0);

/// Wake-up records under construction, one per CPU: a waking holds the thread's lock with
/// interrupts off, so none interrupts another.
#[map]
pub(crate) static WAKE_SCRATCH: PerCpuArray<WakeRecord> = PerCpuArray::with_max_entries(1, 0);

/// Adds one to a counter.
#[inline(always)]
pub(crate) fn count(counter: Counter) {
    add(counter, 1);
}

/// Adds to a counter.
#[inline(always)]
pub(crate) fn add(counter: Counter, amount: u64) {
    if let Some(counts) = COUNTS.get_ptr_mut(0) {
        let slot = counts.cast::<u64>().wrapping_add(counter as usize);
        // SAFETY: `counter` is one of `COUNTERS` positions of this CPU's array. A program that
        // interrupts between load and store counts other counters, or loses some units of the same:
        // the samplers and hooks share only the walk's and the copy's.
        unsafe { *slot += amount }
    }
}

/// Bytes of wait records this CPU may send in an interval of the sampler.
#[inline(always)]
pub(crate) fn wait_budget() -> u64 {
    WAIT_BUDGET.get(0).copied().unwrap_or(0)
}

/// Bytes it may send beyond that in an interval, while its allowance lasts.
#[inline(always)]
pub(crate) fn wait_beyond() -> u64 {
    WAIT_BUDGET.get(1).copied().unwrap_or(0)
}

/// This CPU's sampler.
#[inline(always)]
pub(crate) fn sampler() -> Option<*mut Sampler> {
    SAMPLERS.get_ptr_mut(0)
}
