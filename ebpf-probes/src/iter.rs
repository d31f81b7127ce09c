//! The task iterator: scans all threads and tells of waits in progress, with the stack of those
//! whose stack nobody has: waits that began before the recording, and those the sampler did not
//! keep. It may sleep, so it can read the memory of threads that do not run. A long wait is told of
//! at every scan: that its thread has not moved is what allows the daemon to ask for names of its
//! code.
//!
//! A scanned thread can wake at any moment. Its registers and stack are true if it slept through
//! the scan: it slept before and after, in the same wait and without having run. Anything else is
//! dropped and counted.

use crate::config::{Task, has_rules, mapping_end};
use crate::emit::{PF_EXITING, PF_KTHREAD, ring_half_full, send};
use crate::log::{self, SetUp, lost};
use crate::machine;
use crate::maps::{OFF_CPU_SCRATCH, PASSED_OVER, THREADS, VISITORS, count};
use crate::sched::state_of;
use crate::span;
use crate::unwind::copy::{CopyStep, END, MAX_STEPS, ON, next, skip, skipped};
use aya_ebpf::bindings::task_struct;
use aya_ebpf::helpers::generated::{
    bpf_copy_from_user_task, bpf_find_vma, bpf_get_current_pid_tgid, bpf_get_task_stack,
    bpf_ktime_get_ns, bpf_loop,
};
use core::ffi::{c_long, c_void};
use core::mem::size_of;
use ebpf_common::config::RULE_WAITS;
use ebpf_common::counter::Counter;
use ebpf_common::event::MAX_OFF_CPU_BYTES;
use ebpf_common::event::{
    FLAG_EXITING, FLAG_IO, FLAG_LIMITED, FLAG_PREEMPTED, FLAG_STACK_SENT, FLAG_THROTTLED,
    FLAG_USER, KIND_OFF_CPU, OffCpuRecord, RecordHeader,
};
use ebpf_common::key::{
    STATE_BLOCKED, STATE_RUNNABLE, STATE_RUNNING_OR_RUNNABLE, SchedulerAccount, TaskIteratorReader,
    WAIT_CERTAIN, WAIT_KEPT, WAIT_WAS_BLOCKED,
};
use ebpf_common::limits::{MAX_KERNEL_STACK_BYTES, MAX_STACK_COPY_BYTES, MAX_VISITORS};
use ebpf_common::scratch::{OffCpuScratch, StackCopy};

/// A wait whose stack and weight are known is told of only when it has lasted so long: the record
/// of its start is news enough.
const NEWS_NS: u64 = 1_000_000_000;

/// `TASK_INTERRUPTIBLE` of include/linux/sched.h.
const INTERRUPTIBLE: u32 = 1;

/// `-EBUSY`.
const BUSY: c_long = -16;

/// `struct bpf_iter__task` of kernel/bpf/task_iter.c.
#[repr(C)]
struct TaskIteratorContext {
    meta: *const c_void,
    /// Null once, after the last thread.
    task: *const task_struct,
}

/// What a thread that sleeps does not change.
#[derive(Clone, Copy, PartialEq, Eq)]
struct SleepSnapshot {
    tgid: u32,
    state: u32,
    start_ns: u64,
    exec_ns: u64,
    was_blocked: bool,
}

/// `int (struct bpf_iter_meta *meta, struct task_struct *task)`.
#[inline(always)]
pub(crate) fn scan(ctx: *mut c_void) {
    // SAFETY: the kernel calls programs of this section with this context.
    let task = unsafe { (*ctx.cast::<TaskIteratorContext>()).task };
    if task.is_null() {
        return;
    }
    let task = Task::typed(task);
    let tid = task.tid();
    let tgid = task.tgid();
    let Some(recording) = task.recording(tgid) else { return };
    let Some((slot, visitor)) = visitor() else { return };
    let Some(thread) = THREADS.get_ptr_mut(tid) else { return };
    // SAFETY: an entry of the map, which outlives the program; the scheduler's hooks may change it
    // meanwhile.
    let thread = unsafe { &mut *thread };
    if has_rules() {
        // One that sleeps for long learns here what rules say now; its next switch looks for
        // itself. SAFETY: a valid, aligned field.
        unsafe { core::ptr::write_volatile(&raw mut thread.left_out, recording.left_out) };
        if recording.left_out & RULE_WAITS != 0 {
            return;
        }
    }
    let Some(asleep) = asleep(task, thread) else { return };
    let flags = thread.wait_flags;
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let known = flags & WAIT_KEPT != 0 || thread.scanned_start_ns == asleep.start_ns;
    let certain = flags & WAIT_CERTAIN != 0 || thread.scanned_start_ns == asleep.start_ns;
    if known && certain && now.saturating_sub(asleep.start_ns) < NEWS_NS {
        return;
    }
    count(Counter::OffCpuScanned);
    log::began(SetUp::TaskIterator, tid);
    if ring_half_full() {
        return count(Counter::OffCpuDeferred);
    }
    let Some(scratch) = OFF_CPU_SCRATCH.get_ptr_mut(slot) else { return };
    // SAFETY: this visitor's entry.
    let scratch = unsafe { &mut *scratch };
    describe(&mut scratch.record, task, &asleep, tid);
    // Asked of every wait, also of one whose stack is not taken now: what a wait stands for is one
    // when it was scanned, 1/p when the sampler alone kept it. Were only those put off that the
    // sampler did not keep, the others would stand for too little in the mean.
    let Some(mapping) = mapping(task, tgid) else { return count(Counter::OffCpuDeferred) };
    if known {
        scratch.record.flags |= FLAG_STACK_SENT;
    } else {
        stacks(scratch, task, &mapping, visitor);
    }
    // Before the last look, so that whoever ends the wait from now on tells of its end.
    let told = thread.scanned_start_ns;
    set_scanned(thread, asleep.start_ns);
    // Pairs with the one in `sched::arrive`: either the look below sees that the wait has ended, or
    // its end is told.
    machine::barrier();
    // Before the last look too: what ends the wait is later than that.
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    if self::asleep(task, thread) != Some(asleep) {
        set_scanned(thread, told);
        return count(Counter::OffCpuTorn);
    }
    let record = &mut scratch.record;
    let len = size_of::<OffCpuRecord>() as u32 + record.kernel_bytes + record.user_bytes;
    record.header = RecordHeader { kind: KIND_OFF_CPU, len, time_ns: now };
    // SAFETY: a valid, aligned field; read back, so that the compiler keeps the check that the
    // verifier needs.
    let len = unsafe { core::ptr::read_volatile(&raw const record.header.len) };
    if len > MAX_OFF_CPU_BYTES {
        set_scanned(thread, told);
        return count(Counter::OffCpuTorn);
    }
    // SAFETY: the first `len` bytes of `scratch` are record and tail.
    let stored = unsafe { send((&raw mut *scratch).cast(), len) };
    if !stored {
        set_scanned(thread, told);
    }
    if stored {
        count(Counter::OffCpuStored);
    } else {
        lost(Counter::OffCpuRingFull, tid, 0);
    }
}

/// The visitor that reads this iterator; `None` for one that was struck off because it was held up.
#[inline(always)]
fn visitor<'a>() -> Option<(u32, &'a mut TaskIteratorReader)> {
    // SAFETY: a helper without arguments.
    let tid = unsafe { bpf_get_current_pid_tgid() } as u32;
    let mut slot = 0;
    while slot < MAX_VISITORS {
        // SAFETY: an entry of the map, which outlives the program; the daemon may change it
        // meanwhile.
        let visitor = unsafe { &mut *VISITORS.get_ptr_mut(slot)? };
        // SAFETY: a valid, aligned field.
        if unsafe { core::ptr::read_volatile(&raw const visitor.tid) } == tid {
            return Some((slot, visitor));
        }
        slot += 1;
    }
    None
}

/// Notes the wait that has been told of last: this one, or again the one before when nothing was
/// told after all.
#[inline(always)]
fn set_scanned(thread: &mut SchedulerAccount, start_ns: u64) {
    // SAFETY: a valid, aligned field.
    unsafe { core::ptr::write_volatile(&raw mut thread.scanned_start_ns, start_ns) };
}

/// The thread as it sleeps, `None` when it does not.
#[inline(always)]
fn asleep(task: Task, thread: &SchedulerAccount) -> Option<SleepSnapshot> {
    // Read first: the scheduler's hooks write it behind all they say of the wait.
    let state = state_of(thread);
    // "Running or runnable" and not on a CPU: preempted since before the recording, for a switch
    // would have been seen.
    if !matches!(state, STATE_BLOCKED | STATE_RUNNABLE | STATE_RUNNING_OR_RUNNABLE) || task.on_cpu()
    {
        return None;
    }
    // SAFETY: a valid, aligned field.
    let start_ns = unsafe { core::ptr::read_volatile(&raw const thread.wait_start_ns) };
    // SAFETY: as above.
    let was_blocked =
        unsafe { core::ptr::read_volatile(&raw const thread.wait_flags) } & WAIT_WAS_BLOCKED != 0;
    Some(SleepSnapshot { tgid: thread.tgid, state, start_ns, exec_ns: task.exec_ns(), was_blocked })
}

#[inline(always)]
fn describe(record: &mut OffCpuRecord, task: Task, asleep: &SleepSnapshot, tid: u32) {
    record.tgid = asleep.tgid;
    record.tid = tid;
    record.comm = task.comm();
    record.state = task.state();
    record.start_ns = asleep.start_ns;
    record.exec_ns = asleep.exec_ns;
    record.syscall = -1;
    record.kernel_bytes = 0;
    record.user_bytes = 0;
    let reader = Task::current::<true>();
    let (now, left) = (reader.last_on_cpu_ns(), task.last_on_cpu_ns());
    record.off_cpu_ns = if left == 0 { 0 } else { now.saturating_sub(left) };
    record.flags = 0;
    if asleep.state != STATE_BLOCKED {
        // What it sleeps for is over, and its state forgotten; one that was never blocked was
        // preempted.
        record.state = INTERRUPTIBLE;
        if !asleep.was_blocked {
            record.flags |= FLAG_PREEMPTED;
        }
    }
    if task.flags() & PF_EXITING != 0 {
        record.flags |= FLAG_EXITING;
    }
    if task.in_iowait() {
        record.flags |= FLAG_IO;
    }
    if !asleep.was_blocked && task.throttled() {
        record.flags |= FLAG_THROTTLED;
    }
}

/// Takes the kernel's and the user's part of the stack.
#[inline(always)]
fn stacks(
    scratch: &mut OffCpuScratch,
    task: Task,
    mapping: &StackMapping,
    visitor: &mut TaskIteratorReader,
) {
    let tail = scratch.tail.as_mut_ptr();
    // SAFETY: the buffer has `MAX_KERNEL_STACK_BYTES` and more; the iterator holds a reference to
    // the task.
    let got = unsafe {
        bpf_get_task_stack(task.pointer.cast_mut().cast(), tail.cast(), MAX_KERNEL_STACK_BYTES, 0)
    };
    let mut kernel_bytes = 0;
    if got < 0 {
        lost(Counter::KernelStackFailed, task.tid(), got);
    } else {
        kernel_bytes = got as u32;
    }
    scratch.record.kernel_bytes = kernel_bytes;
    if task.flags() & PF_KTHREAD != 0 {
        return;
    }
    let regs = machine::registers(task);
    if !machine::is_user(regs) {
        return;
    }
    let record = &mut scratch.record;
    record.flags |= FLAG_USER;
    record.ip = machine::instruction(regs);
    record.syscall = machine::system_call(regs);
    machine::general(&mut record.gpr, regs);
    let from = machine::stack(regs);
    // SAFETY: values are plain integers.
    if unsafe { PASSED_OVER.get(record.tgid) }.is_some() {
        return count(Counter::StackPassedOver);
    }
    if mapping.of_file {
        return count(Counter::StackOfFile);
    }
    // As much as there may be, whatever samples get: one look at a wait, which nothing walks here,
    // is all there may ever be.
    let limit = MAX_STACK_COPY_BYTES;
    let mapped =
        mapping.end.saturating_sub(from).min(u64::from(task.stack_room(from, limit))) as u32;
    visitor.tgid = record.tgid;
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: a valid, aligned field, which the daemon may read at any time.
    unsafe { core::ptr::write_volatile(&raw mut visitor.copies_since_ns, now) };
    let bytes = copy(scratch, kernel_bytes, task, from, mapped);
    let ids = (&mut scratch.record.trace_id, &mut scratch.record.span_id);
    let in_span = span::of_off_cpu(task, scratch.record.tgid, &mut scratch.span, ids);
    // SAFETY: as above.
    unsafe { core::ptr::write_volatile(&raw mut visitor.copies_since_ns, 0) };
    let record = &mut scratch.record;
    record.user_bytes = bytes;
    record.flags |= skipped(&scratch.copy) | in_span;
    if bytes >= limit {
        record.flags |= FLAG_LIMITED;
        count(Counter::StackLimited);
    } else if bytes == 0 {
        count(Counter::StackUnreadable);
    }
}

/// What the stack pointer points into; nothing, when `end` is 0.
struct StackMapping {
    end: u64,
    of_file: bool,
}

/// The mapping the user's stack pointer points into, nothing where no user stack would be read;
/// `None` while the process changes its mappings.
///
/// The pages of a file are the business of its file system, and that may be a process (FUSE) which
/// never answers: whoever reads them then waits where not even SIGKILL ends the wait. Stacks are
/// anonymous memory. A process that replaces the mapping between this look and the copy still gets
/// the iterator to wait: then the daemon leaves it behind with its visitor, and passes the process
/// over from then on.
#[inline(always)]
fn mapping(task: Task, tgid: u32) -> Option<StackMapping> {
    let mut mapping = StackMapping { end: 0, of_file: false };
    if task.flags() & PF_KTHREAD != 0 {
        return Some(mapping);
    }
    let regs = machine::registers(task);
    // SAFETY: values are plain integers.
    if !machine::is_user(regs) || unsafe { PASSED_OVER.get(tgid) }.is_some() {
        return Some(mapping);
    }
    let address = machine::stack(regs);
    let (callback, context) = (look as *mut c_void, (&raw mut mapping).cast());
    // SAFETY: the iterator holds a reference to the task, `look` is a function of this program, and
    // its context outlives the call.
    let found =
        unsafe { bpf_find_vma(task.pointer.cast_mut().cast(), address, callback, context, 0) };
    (found != BUSY).then_some(mapping)
}

/// `long (*callback_fn)(struct task_struct *task, struct vm_area_struct *vma, void *callback_ctx)`
/// of `bpf_find_vma`.
///
/// # Safety
/// `context` is the [`Mapping`] handed to the helper.
#[inline(never)]
unsafe extern "C" fn look(
    _task: *const c_void,
    found: *const c_void,
    context: *mut c_void,
) -> c_long {
    let (end, of_file) = mapping_end(found);
    // SAFETY: the caller's promise.
    unsafe { *context.cast::<StackMapping>() = StackMapping { end, of_file } };
    0
}

/// What a copy works on. The task cannot lie in the record: as a number in a map the verifier would
/// not know it again.
struct Copying {
    scratch: *mut OffCpuScratch,
    task: *const task_struct,
}

/// Copies at most `limit` bytes of the user stack at `from` to `tail[at..]`, page by page. Kernels
/// with this iterator have `bpf_loop`.
#[inline(always)]
fn copy(scratch: &mut OffCpuScratch, at: u32, task: Task, from: u64, limit: u32) -> u32 {
    scratch.copy = StackCopy { from, at, bytes: 0, limit, skipped: 0 };
    let mut context = Copying { scratch, task: task.pointer };
    // SAFETY: the step is a function of this program, and the context outlives the loop.
    unsafe { bpf_loop(MAX_STEPS, step as *mut c_void, (&raw mut context).cast(), 0) };
    scratch.copy.bytes
}

/// One page.
///
/// # Safety
/// `context` is the [`Copying`] handed to the loop.
#[inline(never)]
unsafe extern "C" fn step(_index: u64, context: *mut c_void) -> c_long {
    // SAFETY: the caller's promise.
    let Copying { scratch, task } = unsafe { &*context.cast::<Copying>() };
    // SAFETY: this visitor's entry.
    let scratch = unsafe { &mut **scratch };
    let Some(CopyStep { address, position, bytes }) = next(&scratch.copy) else { return END };
    let target = scratch.tail.as_mut_ptr().wrapping_add(position as usize);
    // SAFETY: a page fits behind the position. A bad user address is an error.
    let failed = unsafe {
        bpf_copy_from_user_task(
            target.cast(),
            bytes,
            address as *const _,
            task.cast_mut().cast(),
            0,
        )
    };
    if failed != 0 {
        // Not beyond the mapping: what follows may be a file.
        scratch.copy.limit = scratch.copy.limit.saturating_sub(bytes);
        return skip(&mut scratch.copy);
    }
    scratch.copy.bytes += bytes;
    ON
}
