//! Keeps the selection, the thread map and the rules right while processes are made, replaced and removed.

use crate::config::Task;
use crate::maps::{SELECTED, SPACES, THREADS, count};
use aya_ebpf::bindings::BPF_ANY;
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_ebpf::programs::BtfTracePointContext;
use ebpf_common::counter::Counter;
use ebpf_common::key::Recording;

/// `void sched_process_fork(struct task_struct *parent, struct task_struct *child)`: a child of a selected process is selected. It
/// comes before `sched_wakeup_new` of the child. Attached only when the selection is by pid.
#[inline(always)]
pub(crate) fn fork(ctx: &BtfTracePointContext) {
    let parent = Task(ctx.arg(0)).tgid();
    let child = Task(ctx.arg(1)).tgid();
    // SAFETY: values are plain integers.
    if parent == child || unsafe { SELECTED.get(parent) }.is_none() {
        return;
    }
    // Its one thread is new: nothing is to be seeded.
    // SAFETY: a helper without arguments.
    let recording = Recording { since_ns: unsafe { bpf_ktime_get_ns() }, seeded: 1 };
    if SELECTED.insert(child, recording, u64::from(BPF_ANY)).is_err() {
        count(Counter::SelectedMapFull);
    }
}

/// `void sched_process_exec(struct task_struct *p, pid_t old_pid, struct linux_binprm *bprm)`: when another thread than the first calls
/// execve, it takes over the first one's id (`de_thread`, fs/exec.c), and its times move along.
#[inline(always)]
pub(crate) fn exec(ctx: &BtfTracePointContext) {
    let task = Task(ctx.arg(0));
    let tid = task.tid();
    // Most processes have none.
    SPACES.remove(task.tgid()).ok();
    let old: u32 = ctx.arg(1);
    if tid == old {
        return;
    }
    // SAFETY: the entry is this thread's, and it is here, in execve.
    let Some(thread) = (unsafe { THREADS.get(old) }) else { return };
    let thread = *thread;
    if THREADS.insert(tid, thread, u64::from(BPF_ANY)).is_err() {
        count(Counter::ThreadMapFull);
    }
    // Gone already means nothing is left to remove.
    THREADS.remove(old).ok();
}

/// `void sched_process_free(struct task_struct *p)`: a task was reaped. The first thread is the last to go.
#[inline(always)]
pub(crate) fn free(ctx: &BtfTracePointContext) {
    let task = Task(ctx.arg(0));
    let tgid = task.tgid();
    if task.tid() == tgid {
        // Most processes are not selected.
        SELECTED.remove(tgid).ok();
    }
}
