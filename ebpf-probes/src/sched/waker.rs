//! Where a waking came from.

use super::account::is_known;
use crate::config::Task;
use crate::emit::{HookContext, PF_KTHREAD, RecordLoss, small_record, stack_record};
use crate::log::lost;
use crate::machine::{self, THREAD_BYTES};
use crate::maps::{WAKE_SCRATCH, count};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::helpers::generated::bpf_get_stack;
use aya_ebpf::programs::BtfTracePointContext;
use core::mem::{size_of, size_of_val};
use ebpf_common::counter::Counter;
use ebpf_common::event::{CERTAIN, KIND_WAKE, KIND_WAKER_STACK, RecordHeader, WakeRecord};
use ebpf_common::key::SchedulerAccount;
use ebpf_common::limits::{OWN_FRAMES, WAKER_FRAMES};

/// Sends the stack of the current thread, if it is one that is recorded; false when it was not
/// sent. Whether the waking is this thread's own doing, or that of an interrupt that came in
/// between, its kernel part tells the daemon.
#[inline(always)]
pub(super) fn tell_waker<const LOOPS: bool>(
    ctx: &BtfTracePointContext,
    tid: u32,
    thread: &SchedulerAccount,
    waker: Task,
    now: u64,
) -> bool {
    let by = thread.waker_tid;
    if by == 0 || !is_known(thread, thread.wait_flags) {
        return false;
    }
    let tgid = thread.waker_tgid;
    if waker.recording(tgid).is_none() {
        count(Counter::WakersOutside);
        return false;
    }
    count(Counter::WakerStacks);
    let hook = HookContext {
        kind: KIND_WAKER_STACK,
        time_ns: now,
        tgid,
        tid: by,
        flags: 0,
        state: tid,
        ran_ns: thread.wait_start_ns,
        exec_ns: 0,
        probability: CERTAIN,
        kernel_stack: Some(OWN_FRAMES),
    };
    let sent = stack_record::<LOOPS>(ctx.as_ptr(), waker, &hook);
    match sent {
        Ok(_) => count(Counter::WakerStacksStored),
        Err(RecordLoss::RingFull(_)) => lost(Counter::WakerStacksRingFull, by, 0),
        Err(RecordLoss::Busy) => lost(Counter::WakerStacksBusy, by, 0),
    }
    sent.is_ok()
}

/// Sends where the waking came from, unless it is plain that the current thread did it itself.
/// False when that is not known after all.
#[inline(always)]
pub(super) fn tell_wake<const LOOPS: bool>(
    ctx: &BtfTracePointContext,
    tid: u32,
    thread: &SchedulerAccount,
    waker: Task,
    now: u64,
) -> bool {
    let Some(record) = WAKE_SCRATCH.get_ptr_mut(0) else { return false };
    // SAFETY: this CPU's entry; see the map.
    let record = unsafe { &mut *record };
    // The tracepoint's arguments are on the stack it was called on. A pointer becomes a number on
    // its way through memory. SAFETY: a valid, aligned field.
    unsafe { core::ptr::write_volatile(&raw mut record.place, ctx.as_ptr() as u64) };
    // SAFETY: as above.
    let place = unsafe { core::ptr::read_volatile(&raw const record.place) };
    // The registers' copy, if it takes one: what comes here next is the stack.
    let room = record.kernel.as_mut_ptr().cast();
    const { assert!(size_of::<[u64; WAKER_FRAMES]>() >= size_of::<machine::Regs>()) };
    if is_in_system_call::<LOOPS>(waker, place, room) {
        return true;
    }
    record.header =
        RecordHeader { kind: KIND_WAKE, len: size_of::<WakeRecord>() as u32, time_ns: now };
    record.tgid = thread.tgid;
    record.tid = tid;
    record.start_ns = thread.wait_start_ns;
    record.place = 0;
    let (room, skipped) = (size_of_val(&record.kernel) as u32, u64::from(OWN_FRAMES));
    // SAFETY: the buffer has `room` bytes.
    let got =
        unsafe { bpf_get_stack(ctx.as_ptr(), record.kernel.as_mut_ptr().cast(), room, skipped) };
    record.kernel_bytes = if got < 0 { 0 } else { got as u32 };
    let stored = small_record(record);
    if stored {
        count(Counter::WakesStored);
    } else {
        lost(Counter::WakesRingFull, tid, 0);
    }
    stored
}

/// Whether the current thread does this itself, in a system call. An interrupt that finds a thread
/// in the kernel runs on a stack of its own, and so do softirqs (arch/x86/include/asm/irq_stack.h,
/// arch/arm64/kernel/entry-common.c); one that finds it in user code may run on the thread's, but
/// then no system call is in progress.
#[inline(always)]
fn is_in_system_call<const LOOPS: bool>(task: Task, place: u64, room: *mut machine::Regs) -> bool {
    if task.flags() & PF_KTHREAD != 0 || place.wrapping_sub(task.stack()) >= THREAD_BYTES {
        return false;
    }
    let regs = if LOOPS {
        machine::registers(task)
    } else {
        // SAFETY: the caller's room, of that size.
        unsafe { machine::copied_registers(task, room) }
    };
    machine::system_call(regs) >= 0
}
