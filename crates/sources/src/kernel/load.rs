//! Brings the probes into the kernel: settings from its BTF, sizes from the options, programs
//! attached in the order that loses nothing.

use super::btf::{self, Argument, BtfError, KernelBtf};
use super::rule_set::RuleSet;
use super::{KernelError, KernelOptions, KernelSelection, probe_log, task_iterator};
use aya::maps::MapError;
use aya::programs::perf_event::{
    PerfEventConfig, PerfEventLinkId, PerfEventScope, SamplePolicy, SoftwareEvent,
};
use aya::programs::{BtfTracePoint, PerfEvent, Program, ProgramError, ProgramType};
use aya::sys::{BpfHelper, is_helper_supported};
use aya::{Btf, Ebpf, EbpfError, EbpfLoader, Endianness, VerifierLogLevel};
use ebpf_common::config::{
    NO_FIELD, ProbeConfig, RULES_BY_CGROUP, SELECT_ALL, SELECT_CGROUP, SELECT_PIDS, SELECT_RULES,
};
use ebpf_common::event::CERTAIN;
use ebpf_common::last_walk::LAST_WALKS;
use ebpf_common::limits::{MAX_RULED_CGROUPS, MAX_SPAN_PLACES};
use ebpf_common::rule::WAYS;
use perfusion_unwind::native::native_address_mask;
use std::collections::HashMap;
use std::time::Instant;
use std::{fs, io, thread};

/// A probability of the sampler is kept that long.
const SAMPLER_INTERVAL_NS: u64 = 100_000_000;

/// Attached in this order: wake-ups before switches, so that a switch-in without a wake-up seen
/// proves that the thread was runnable; fork before both, so that a child is selected before it
/// first runs.
const TRACEPOINTS: [&str; 7] = [
    "task_rename",
    "sched_process_free",
    "sched_process_fork",
    "sched_process_exec",
    "sched_waking",
    "sched_wakeup_new",
    "sched_switch",
];

/// A program at the same place as the last of them that does nothing: for
/// [`KernelOptions::times_stages`].
const NOTHING: &str = "nothing";

/// What is in the kernel.
pub(super) struct LoadedProbes {
    pub(super) bpf: Ebpf,
    /// The kernel's answer to the task iterator.
    pub(super) off_cpu_scans: Result<(), ProgramError>,
    /// Whether the probes can walk.
    pub(super) loops: bool,
}

/// Loads the programs and attaches the scheduler's. Nothing is recorded before `CONTROL` or
/// `SELECTED` say so.
pub(super) fn load(
    options: &KernelOptions,
    possible_cpus: u32,
) -> Result<LoadedProbes, KernelError> {
    let object = perfusion_artefacts::probes().ok_or(KernelError::NoProbes)?;
    let data = fs::read(btf::PATH).map_err(|source| KernelError::BtfUnreadable { source })?;
    // aya reads the kernel's types twice, once for the loader (which has no way around it) and once
    // for the tracepoints: 50 ms each, the greater part of the start, so the two run side by side.
    crate::kernel::features::raise_locked_memory();
    let loops = !options.older_probes && has_bpf_loop();
    let (types, config, mut loader) = thread::scope(|scope| {
        let types = scope.spawn(|| Btf::parse(&data, Endianness::default()));
        let config = KernelBtf::parse(&data).map_err(KernelError::from);
        let config = config.and_then(|btf| settings(options, &btf, loops));
        let loader = EbpfLoader::new();
        (types.join(), config, loader)
    });
    let types =
        types.map_err(|_| KernelError::BtfReader)?.map_err(|source| KernelError::Btf { source })?;
    let config = config?;
    let shown = probe_log::is_shown();
    let level = probe_log::level(shown);
    let mut bpf = loader
        .verifier_log_level(VerifierLogLevel::STATS)
        .override_global("CONFIG", &config, true)
        .override_global(aya_log::LEVEL, &level, true)
        .map_max_entries("AYA_LOGS", probe_log::ring_bytes(shown))
        .map_max_entries("RING", options.ring_bytes)
        .map_max_entries("THREADS", options.max_threads)
        .map_max_entries("PLACES", 1 << (u64::BITS - config.place_shift))
        .map_max_entries(
            "CGROUPS",
            if config.rules_by & RULES_BY_CGROUP == 0 { 1 } else { MAX_RULED_CGROUPS },
        )
        .map_max_entries("SPANS", if options.spans { MAX_SPAN_PLACES } else { 1 })
        .map_max_entries("SCRATCH", possible_cpus)
        .map_max_entries(
            "LAST_WALKS",
            if loops { possible_cpus.saturating_mul(LAST_WALKS) } else { 1 },
        )
        .load(object)
        .map_err(refused)?;
    // The verifier takes its memory next: a small cgroup has no room for both (10 and 5 MiB).
    drop((loader, data));
    let by_pid = config.selection == SELECT_PIDS;
    let tracepoints: Vec<&'static str> = TRACEPOINTS
        .into_iter()
        .filter(|name| by_pid || !matches!(*name, "sched_process_free" | "sched_process_fork"))
        .chain(options.times_stages.then_some(NOTHING))
        .collect();
    let began = Instant::now();
    let hooks = [&tracepoints[..], &[SAMPLER, task_iterator::PROGRAM]].concat();
    let hooks: Vec<ProbeHook> =
        hooks.into_iter().map(|name| (name, program_of(name, loops))).collect();
    let mut answers = load_all(&mut bpf, &hooks, &types)?;
    tracing::debug!(milliseconds = began.elapsed().as_secs_f64() * 1e3, "programs loaded");
    let mut answer = |name: &'static str| answers.remove(name).ok_or(KernelError::Object { name });
    for name in tracepoints {
        let failed = |source| KernelError::Program { name, source };
        answer(name)?.map_err(failed)?;
        let program: &mut BtfTracePoint = program(&mut bpf, program_of(name, loops))?;
        program.attach().map_err(failed)?;
    }
    answer(SAMPLER)?.map_err(|source| KernelError::Program { name: SAMPLER, source })?;
    let off_cpu_scans = answer(task_iterator::PROGRAM)?;
    Ok(LoadedProbes { bpf, off_cpu_scans, loops })
}

/// A hook's name, and its program's.
type ProbeHook = (&'static str, &'static str);

/// The program of a hook: those that take stacks have two, one for kernels without `bpf_loop`.
fn program_of(hook: &'static str, loops: bool) -> &'static str {
    match hook {
        SAMPLER if !loops => COPYING_SAMPLER,
        "sched_switch" if !loops => "copying_switch",
        "sched_waking" if !loops => "copying_waking",
        hook => hook,
    }
}

/// Before Linux 5.11 maps count against RLIMIT_MEMLOCK, which has been raised as far as that is
/// allowed.
fn refused(source: EbpfError) -> KernelError {
    match source {
        EbpfError::MapError(MapError::CreateError { name, io_error })
            if io_error.kind() == io::ErrorKind::PermissionDenied =>
        {
            KernelError::MapForbidden { name, source: io_error, limit: memlock() }
        }
        source => KernelError::Load { source },
    }
}

/// The present limit, in words.
fn memlock() -> String {
    rustix::process::getrlimit(rustix::process::Resource::Memlock)
        .current
        .map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
}

/// Loads programs, each in a thread of its own: the kernel verifies them at the same time, and a
/// few large ones take nearly all of it. Answers what the kernel said to each that there is, by
/// hook.
fn load_all(
    bpf: &mut Ebpf,
    hooks: &[ProbeHook],
    types: &Btf,
) -> Result<HashMap<&'static str, Result<(), ProgramError>>, KernelError> {
    thread::scope(|scope| {
        let mut loads = Vec::new();
        for (name, program) in bpf.programs_mut() {
            let Some(&(hook, _)) = hooks.iter().find(|(_, wanted)| *wanted == name) else {
                continue;
            };
            loads.push((hook, scope.spawn(move || load_one(hook, program, types))));
        }
        let mut answers = HashMap::new();
        for (name, load) in loads {
            answers.insert(name, load.join().map_err(|_| KernelError::LoaderDied)??);
        }
        Ok(answers)
    })
}

fn load_one(
    name: &'static str,
    program: &mut Program,
    types: &Btf,
) -> Result<Result<(), ProgramError>, KernelError> {
    match program {
        Program::BtfTracePoint(program) => {
            Ok(program.load(if name == NOTHING { "sched_switch" } else { name }, types))
        }
        Program::PerfEvent(program) => Ok(program.load()),
        Program::Iter(program) => Ok(program.load("task", types)),
        _ => Err(KernelError::Object { name }),
    }
}

/// Whether the kernel can loop over the frames of a stack (since 5.17). Where it cannot, all stacks
/// are copied and the daemon walks; and what else came between 5.10 and then is not asked for.
fn has_bpf_loop() -> bool {
    is_helper_supported(ProgramType::PerfEvent, BpfHelper::BPF_FUNC_loop).unwrap_or(false)
}

/// [`ebpf_common::rule::Spot::of`]'s for so many places: the sets' number as a power of two, at
/// least 2.
fn place_shift(places: u32) -> u32 {
    let sets = (places / WAYS as u32).max(2);
    u64::BITS - sets.ilog2()
}

const SAMPLER: &str = "cpu_sample";
const COPYING_SAMPLER: &str = "copying_sample";

/// What one CPU may send of a budget for all of them in an interval of the sampler: at least one
/// record's worth, and within the range the sampler's arithmetic is made for.
pub(super) fn sampler_budget(bytes_per_s: u64, online_cpus: usize) -> u64 {
    let cpus = u64::try_from(online_cpus.max(1)).unwrap_or(u64::MAX);
    (bytes_per_s / cpus / (1_000_000_000 / SAMPLER_INTERVAL_NS)).clamp(4096, 1 << 31)
}

/// What one CPU may send beyond such a budget in an interval: together a quarter of the ring, so
/// that the ring, which is emptied several times an interval, does not overflow by it; and little
/// where the budget is little.
pub(super) fn sampler_beyond(budget: u64, ring_bytes: u32, online_cpus: usize) -> u64 {
    let cpus = u64::try_from(online_cpus.max(1)).unwrap_or(u64::MAX);
    (u64::from(ring_bytes) / 4 / cpus).min(budget.saturating_mul(4))
}

/// Starts the sampling timer of a CPU.
pub(super) fn attach_sampler(
    bpf: &mut Ebpf,
    cpu: u32,
    frequency_hz: u32,
) -> Result<PerfEventLinkId, KernelError> {
    sampler(bpf)?
        .attach(
            PerfEventConfig::Software(SoftwareEvent::CpuClock),
            PerfEventScope::AllProcessesOneCpu { cpu },
            SamplePolicy::Frequency(u64::from(frequency_hz)),
            false,
        )
        .map_err(|source| KernelError::Sampler { cpu, frequency_hz, source })
}

/// Stops a sampling timer. One that is gone already, with its CPU, is as good.
pub(super) fn detach_sampler(bpf: &mut Ebpf, timer: PerfEventLinkId) {
    if let Ok(sampler) = sampler(bpf) {
        sampler.detach(timer).ok();
    }
}

/// That of the two which is loaded.
fn sampler(bpf: &mut Ebpf) -> Result<&mut PerfEvent, KernelError> {
    let is_loaded = |name| bpf.program(name).is_some_and(|program| program.fd().is_ok());
    let name = if is_loaded(SAMPLER) { SAMPLER } else { COPYING_SAMPLER };
    program(bpf, name)
}

pub(super) fn program<'a, P>(
    bpf: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut P, KernelError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program>,
{
    let program = bpf.program_mut(name).ok_or(KernelError::Object { name })?;
    program.try_into().map_err(|_| KernelError::Object { name })
}

fn settings(
    options: &KernelOptions,
    btf: &KernelBtf<'_>,
    loops: bool,
) -> Result<ProbeConfig, KernelError> {
    let cgroup_id = match options.selection {
        KernelSelection::Cgroup(id) => id,
        KernelSelection::All | KernelSelection::Pids(_) | KernelSelection::Rules(_) => 0,
    };
    let rules = match &options.selection {
        KernelSelection::Rules(rules) => Some(rules),
        KernelSelection::All | KernelSelection::Pids(_) | KernelSelection::Cgroup(_) => None,
    };
    let (task_in_iowait, task_in_iowait_mask) = btf.bit_of("task_struct", "in_iowait")?;
    let (task_in_execve, task_in_execve_mask) = match btf.bit_of("task_struct", "in_execve") {
        Err(BtfError::NoField { .. }) => (0, 0),
        bit => bit?,
    };
    Ok(ProbeConfig {
        address_mask: native_address_mask(),
        cgroup_id,
        sampler_interval_ns: SAMPLER_INTERVAL_NS,
        sampler_fixed: options
            .wait_stacks_one_in
            .map_or(0, |waits| (CERTAIN / u64::from(waits.get())).max(1)),
        selection: match options.selection {
            KernelSelection::All => SELECT_ALL,
            KernelSelection::Pids(_) => SELECT_PIDS,
            KernelSelection::Cgroup(_) => SELECT_CGROUP,
            KernelSelection::Rules(_) => SELECT_RULES,
        },
        rules_by: rules.map_or(0, RuleSet::looks_at),
        rules_others: rules.map_or(0, |rules| rules.others),
        excluded_tgid: if options.exclude_self { std::process::id() } else { 0 },
        stack_copy_bytes: options.stack_copy_bytes,
        copies_all: u32::from(options.copies_all),
        waker_stacks: u32::from(options.waker_stacks),
        spans: u32::from(options.spans),
        reserved: 0,
        times_stages: u32::from(options.times_stages),
        has_prev_state: u32::from(hands_over_state(btf)?),
        task_pid: btf.offset_of("task_struct", "pid")?,
        task_tgid: btf.offset_of("task_struct", "tgid")?,
        task_flags: btf.offset_of("task_struct", "flags")?,
        task_comm: btf.offset_of("task_struct", "comm")?,
        // `state` before 5.14.
        task_state: match btf.offset_of("task_struct", "__state") {
            Err(BtfError::NoField { .. }) => btf.offset_of("task_struct", "state")?,
            offset => offset?,
        },
        task_cgroups: btf.offset_of("task_struct", "cgroups")?,
        task_cred: btf.offset_of("task_struct", "real_cred")?,
        cred_uid: btf.offset_of("cred", "uid")?,
        task_leader: btf.offset_of("task_struct", "group_leader")?,
        css_set_dfl_cgrp: btf.offset_of("css_set", "dfl_cgrp")?,
        cgroup_kn: btf.offset_of("cgroup", "kn")?,
        kernfs_node_id: btf.offset_of("kernfs_node", "id")?,
        task_exec: inside(btf, "se", "sched_entity", "sum_exec_runtime")?,
        task_exec_before: inside(btf, "se", "sched_entity", "prev_sum_exec_runtime")?,
        task_cfs_rq: optional(inside(btf, "se", "sched_entity", "cfs_rq"))?,
        cfs_rq_throttle_count: optional(btf.offset_of("cfs_rq", "throttle_count"))?,
        task_throttled: optional(btf.offset_of("task_struct", "throttled"))?,
        task_last_arrival: if has_bpf_scheduler() {
            NO_FIELD
        } else {
            optional(inside(btf, "sched_info", "sched_info", "last_arrival"))?
        },
        task_in_iowait,
        task_in_iowait_mask,
        task_in_execve,
        task_in_execve_mask,
        task_stack: btf.offset_of("task_struct", "stack")?,
        task_registers: if loops { 0 } else { registers_in_stack(btf)? },
        vma_end: btf.offset_of("vm_area_struct", "vm_end")?,
        vma_file: btf.offset_of("vm_area_struct", "vm_file")?,
        place_shift: place_shift(options.max_places),
        task_prio: btf.offset_of("task_struct", "prio")?,
        task_thread: btf.offset_of("task_struct", "thread")?,
        thread_pointer: optional(btf.offset_of("thread_struct", "fsbase"))?,
        // Without CONFIG_SMP there is no such field before 6.17.
        task_on_cpu: optional(btf.offset_of("task_struct", "on_cpu"))?,
    })
}

/// Where the user registers are in a kernel stack: at its very end. It has 16 KiB (`THREAD_SIZE`,
/// arch/x86/include/asm/page_64_types.h and arch/arm64/include/asm/memory.h), or a page where that
/// is larger; BTF does not tell. With KASAN, which no kernel for daily use has, it is larger, and
/// the registers are not found: what is there has no code segment of user code.
fn registers_in_stack(btf: &KernelBtf<'_>) -> Result<u32, BtfError> {
    let page = u32::try_from(rustix::param::page_size()).unwrap_or(u32::MAX);
    Ok(page.max(16 * 1024).saturating_sub(btf.size_of("pt_regs")?))
}

/// Whether a scheduler made of BPF programs runs (since 6.12): its threads are in no class that
/// notes `prev_sum_exec_runtime` (`set_next_task_scx`, kernel/sched/ext.c).
fn has_bpf_scheduler() -> bool {
    std::fs::read_to_string("/sys/kernel/sched_ext/state")
        .is_ok_and(|state| state.trim() != "disabled")
}

/// Offset of a field of a struct that is the field `member` of `task_struct`.
fn inside(
    btf: &KernelBtf<'_>,
    member: &'static str,
    name: &'static str,
    field: &'static str,
) -> Result<u32, BtfError> {
    Ok(btf.offset_of("task_struct", member)?.saturating_add(btf.offset_of(name, field)?))
}

/// A field that not every kernel has.
fn optional(offset: Result<u32, BtfError>) -> Result<u32, BtfError> {
    match offset {
        Err(BtfError::NoField { .. }) => Ok(NO_FIELD),
        offset => offset,
    }
}

/// Whether `sched_switch` has `prev_state` as its last argument (since 5.18). The first releases of
/// 5.18 had it second (commit fa2c3254d7cf, moved by 9c2136be0878).
fn hands_over_state(btf: &KernelBtf<'_>) -> Result<bool, KernelError> {
    use Argument::{Integer, Pointer};
    match btf.tracepoint("sched_switch")?.as_slice() {
        [Integer, Pointer, Pointer] => Ok(false),
        [Integer, Pointer, Pointer, Integer] => Ok(true),
        found => Err(KernelError::Prototype { found: found.to_vec() }),
    }
}
