//! Keeps the selection and the rules right while processes are made, replaced and removed.

use crate::config::{Task, setting};
use crate::log::lost;
use crate::maps::{SELECTED, SPACES, SPANS};
use crate::sched;
use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_ebpf::programs::BtfTracePointContext;
use ebpf_common::counter::Counter;
use ebpf_common::key::RecordingStart;

/// `void sched_process_fork(struct task_struct *parent, struct task_struct *child)`: a child of a
/// selected process is selected. It comes before `sched_wakeup_new` of the child. Attached only
/// when the selection is by pid.
#[inline(always)]
pub(crate) fn fork(ctx: &BtfTracePointContext) {
    let parent = Task::typed(ctx.arg(0)).tgid();
    let child = Task::typed(ctx.arg(1)).tgid();
    // SAFETY: values are plain integers.
    if parent == child || unsafe { SELECTED.get(parent) }.is_none() {
        return;
    }
    // Its one thread is new: nothing is to be seeded.
    // SAFETY: a helper without arguments.
    let since_ns = unsafe { bpf_ktime_get_ns() };
    let recording = RecordingStart { since_ns, seeded: 1, left_out: 0 };
    if let Err(cause) = SELECTED.insert(child, recording, u64::from(BPF_ANY)) {
        lost(Counter::SelectedMapFull, child, cause.into());
    }
}

/// `void sched_process_exec(struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm)`: `p`
/// is current and has become another program.
#[inline(always)]
pub(crate) fn exec(ctx: &BtfTracePointContext) {
    let task = Task::typed(ctx.arg(0));
    let tgid = task.tgid();
    // Most processes have none.
    SPACES.remove(tgid).ok();
    if setting!(spans) != 0 {
        SPANS.remove(tgid).ok();
    }
    if let Some(recording) = SELECTED.get_ptr_mut(tgid) {
        // SAFETY: an entry of the map; this process's threads alone are concerned, and this is the
        // only one.
        let recording = unsafe { &mut *recording };
        if recording.since_ns == 0 {
            // SAFETY: a helper without arguments.
            recording.since_ns = unsafe { bpf_ktime_get_ns() };
        }
    }
    if task.recording(tgid).is_some() {
        sched::exec(task, tgid, ctx.arg(1));
    }
}

/// `void sched_process_free(struct task_struct *p)`: a task was reaped. The first thread is the
/// last to go.
#[inline(always)]
pub(crate) fn free(ctx: &BtfTracePointContext) {
    let task = Task::typed(ctx.arg(0));
    let tgid = task.tgid();
    if task.tid() == tgid {
        // Most processes are not selected.
        SELECTED.remove(tgid).ok();
    }
}
