//! The CPU sampler: a timer per CPU that finds a thread running.

use crate::config::{Task, has_rules};
use crate::emit::{HookContext, RecordLoss, stack_record};
use crate::log::{self, SetUp, lost};
use crate::machine;
use crate::maps::count;
use aya_ebpf::EbpfContext as _;
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_ns};
use aya_ebpf::programs::PerfEventContext;
use ebpf_common::config::{RULE_CPU, RULE_DOWNSAMPLES};
use ebpf_common::counter::Counter;
use ebpf_common::event::{CERTAIN, KIND_CPU_SAMPLE};

/// `struct bpf_perf_event_data *ctx`, from the cpu-clock's timer interrupt.
#[inline(always)]
pub(crate) fn cpu_sample<const LOOPS: bool>(ctx: &PerfEventContext) {
    let task = Task::current::<LOOPS>();
    let tid = task.tid();
    if tid == 0 {
        return;
    }
    let tgid = task.tgid();
    let Some(recording) = task.recording(tgid) else { return };
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    if now < recording.since_ns {
        return;
    }
    if has_rules() && is_left_out(recording.left_out) {
        return;
    }
    count(Counter::CpuSamples);
    log::began(SetUp::Sampler, tid);
    let hook = HookContext {
        kind: KIND_CPU_SAMPLE,
        time_ns: now,
        tgid,
        tid,
        flags: 0,
        state: 0,
        ran_ns: 0,
        exec_ns: 0,
        probability: CERTAIN,
        kernel_stack: if machine::in_user_code(ctx) { None } else { Some(0) },
    };
    match stack_record::<LOOPS>(ctx.as_ptr(), task, &hook) {
        Ok(_) => count(Counter::CpuSamplesStored),
        Err(RecordLoss::RingFull(_)) => lost(Counter::CpuSamplesRingFull, tid, 0),
        Err(RecordLoss::Busy) => lost(Counter::CpuSamplesBusy, tid, 0),
    }
}

/// Whether rules leave this sample out: all of a process's, or all but one in some.
#[inline(always)]
fn is_left_out(left_out: u32) -> bool {
    // SAFETY: a helper without arguments.
    left_out & RULE_CPU != 0 || left_out >> RULE_DOWNSAMPLES & unsafe { bpf_get_prandom_u32() } != 0
}
