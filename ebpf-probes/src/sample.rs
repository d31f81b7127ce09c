//! The CPU sampler: a timer per CPU that finds a thread running.

use crate::config::Task;
use crate::emit::{Hook, Lost, stack_record};
use crate::machine;
use crate::maps::count;
use aya_ebpf::EbpfContext as _;
use aya_ebpf::helpers::generated::{bpf_get_current_task_btf, bpf_ktime_get_ns};
use aya_ebpf::programs::PerfEventContext;
use ebpf_common::counter::Counter;
use ebpf_common::event::{CERTAIN, KIND_CPU_SAMPLE};

/// `struct bpf_perf_event_data *ctx`, from the cpu-clock's timer interrupt.
#[inline(always)]
pub(crate) fn cpu_sample(ctx: &PerfEventContext) {
    // SAFETY: a helper without arguments.
    let task = Task(unsafe { bpf_get_current_task_btf() });
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
    count(Counter::CpuSamples);
    let hook = Hook {
        kind: KIND_CPU_SAMPLE,
        time_ns: now,
        tgid,
        tid,
        flags: 0,
        state: 0,
        ran_ns: 0,
        probability: CERTAIN,
        kernel_stack: if machine::in_user_code(ctx) { None } else { Some(0) },
    };
    count(match stack_record(ctx.as_ptr(), task, &hook) {
        Ok(_) => Counter::CpuSamplesStored,
        Err(Lost::RingFull(_)) => Counter::CpuSamplesRingFull,
        Err(Lost::Busy) => Counter::CpuSamplesBusy,
    });
}
