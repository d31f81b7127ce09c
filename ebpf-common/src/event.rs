//! Records in the BPF ring. Each starts with [`RecordHeader`]; the tag says which type it is.

use crate::key::SchedulerAccount;
use crate::limits::{
    COMM_BYTES, MAX_KERNEL_STACK_BYTES, MAX_STACK_COPY_BYTES, MAX_WALK_BYTES, PAGE_BYTES,
    WAKER_FRAMES,
};
use crate::machine::GPR;
use crate::plain;

/// [`StackRecord`] of the CPU sampler.
pub const KIND_CPU_SAMPLE: u32 = 1;
/// [`StackRecord`] of a switch-out.
pub const KIND_WAIT_START: u32 = 2;
/// [`WaitEndRecord`].
pub const KIND_WAIT_END: u32 = 3;
/// [`ThreadEndRecord`].
pub const KIND_THREAD_END: u32 = 4;
/// [`RenameRecord`].
pub const KIND_RENAME: u32 = 5;

/// [`OffCpuRecord`] of the task iterator.
pub const KIND_OFF_CPU: u32 = 16;
/// [`WakeRecord`].
pub const KIND_WAKE: u32 = 17;
/// [`StackRecord`] of a thread that ended a kept wait.
pub const KIND_WAKER_STACK: u32 = 18;

/// `StackRecord::flags`: `ip` and `gpr` are there, and the user frames or the copy of the stack
/// that say the rest.
pub const FLAG_USER: u32 = 1;
/// `StackRecord::flags`: the copy of the stack ended because the limit was reached.
pub const FLAG_LIMITED: u32 = 2;
/// `StackRecord::flags`: the thread was preempted or yielded; `state` means nothing.
pub const FLAG_PREEMPTED: u32 = 4;
/// `StackRecord::flags`: the last user frame is the thread's first; no registers and no copy
/// follow.
pub const FLAG_WALKED_TO_START: u32 = 8;
/// `StackRecord::flags`: there are as many user frames as fit; no registers and no copy follow.
pub const FLAG_WALKED_TO_LIMIT: u32 = 16;
/// `StackRecord::flags`: the user frames did not lead to the thread's start; `ip` and `gpr` are
/// those of the next one, and it stands at a return address.
pub const FLAG_AT_CALL: u32 = 32;
/// `StackRecord::flags`: the scheduler counts this wait as one for input or output
/// (`task_struct.in_iowait`).
pub const FLAG_IO: u32 = 64;
/// `StackRecord::flags`: the thread has to wait because its cgroup has used up its CPU limit.
pub const FLAG_THROTTLED: u32 = 128;
/// `OffCpuRecord::flags`: no stack follows, because the ring had it at the wait's start.
pub const FLAG_STACK_SENT: u32 = 256;
/// `StackRecord::flags` and `OffCpuRecord::flags`: `trace_id` and `span_id` are there.
pub const FLAG_SPAN: u32 = 512;
/// `RenameRecord::flags`: earlier renames of the thread were not told of.
pub const FLAG_SKIPPED: u32 = 1;
/// `StackRecord::flags` and `OffCpuRecord::flags`: the kernel has begun to end the thread, whose
/// memory may be gone.
pub const FLAG_EXITING: u32 = 1024;
/// `StackRecord::flags` and `OffCpuRecord::flags` from this bit on: pages from the stack pointer
/// on that were not in memory. The copy of the stack begins behind them.
pub const SKIPPED_PAGES_SHIFT: u32 = 24;
/// `WaitEndRecord::flags`: it was blocked, and where the waking came from is known: the waker did
/// it, unless a `KIND_WAKE` or `KIND_WAKER_STACK` of this wait says otherwise.
pub const FLAG_WAKER: u32 = 1;
/// `WaitEndRecord::flags`: when it was woken, its cgroup had used up its CPU limit.
pub const FLAG_WOKEN_THROTTLED: u32 = 2;
/// `WaitEndRecord::flags`: it was a new thread's wait for its first CPU.
pub const FLAG_NEW: u32 = 4;

/// `StackRecord::probability` of a stack that is always kept.
pub const CERTAIN: u64 = 1 << 32;

/// Bytes between a stack pointer and the copy of its stack, by the `flags` of the record.
#[must_use]
pub const fn skipped_bytes(flags: u32, stack_pointer: u64) -> u64 {
    let page = PAGE_BYTES as u64;
    match (flags >> SKIPPED_PAGES_SHIFT) as u64 {
        0 => 0,
        pages => pages * page - stack_pointer % page,
    }
}

plain! {
    /// Start of every record.
    pub struct RecordHeader {
        /// One of the `KIND_` values.
        pub kind: u32,
        /// Bytes of the whole record, this header included.
        pub len: u32,
        /// CLOCK_MONOTONIC; ns.
        pub time_ns: u64,
    }
}

plain! {
    /// Fixed part of a CPU sample, of the start of a wait, or of the stack that ended one.
    /// `walked_bytes` bytes of user frames follow (`RuleKey::place`, innermost first), then
    /// `kernel_bytes` bytes of kernel return addresses (u64, innermost first), then `user_bytes`
    /// bytes of user stack from the stack pointer upwards.
    pub struct StackRecord {
        /// `KIND_CPU_SAMPLE`, `KIND_WAIT_START` or `KIND_WAKER_STACK`.
        pub header: RecordHeader,
        /// Process.
        pub tgid: u32,
        /// Thread.
        pub tid: u32,
        /// Command name.
        pub comm: [u8; COMM_BYTES],
        /// `FLAG_` bits.
        pub flags: u32,
        /// Bytes of user frames that follow.
        pub walked_bytes: u32,
        /// The address space those were walked in (`RuleKey::space`).
        pub space: u32,
        /// Bytes of kernel stack that follow.
        pub kernel_bytes: u32,
        /// Bytes of user stack that follow those.
        pub user_bytes: u32,
        /// Raw task state at switch-out (`TASK_INTERRUPTIBLE` = 1, `TASK_UNINTERRUPTIBLE` = 2, …).
        /// Of a waker the thread it woke.
        pub state: u32,
        /// Time on the CPU since the last switch-in; ns. Of a waker the start of the wait it ended,
        /// as in the record of that.
        pub ran_ns: u64,
        /// Of a thread that is blocked from now on: how long it has run in its life, by the
        /// scheduler's account; else 0.
        pub exec_ns: u64,
        /// The system call's number, negative when there is none.
        pub syscall: i64,
        /// Probability with which this stack was kept, in units of 2⁻³².
        pub probability: u64,
        /// Registers of `gpr` that hold the frame's values, by bit; all others mean nothing.
        pub known: u64,
        /// The trace that the thread says it works for, as it published it, and the span of that.
        pub trace_id: [u8; 16],
        /// See there.
        pub span_id: [u8; 8],
        /// User instruction pointer.
        pub ip: u64,
        /// User registers, by the places of the machine ([`crate::machine`]).
        pub gpr: [u64; GPR],
    }
}

plain! {
    /// End of a kept wait.
    pub struct WaitEndRecord {
        /// `KIND_WAIT_END`.
        pub header: RecordHeader,
        /// Process.
        pub tgid: u32,
        /// Thread.
        pub tid: u32,
        /// Time of the switch-out that began it.
        pub start_ns: u64,
        /// How long it was blocked.
        pub blocked_ns: u64,
        /// How long it waited for a CPU.
        pub runnable_ns: u64,
        /// Of `FLAG_WAKER`, `FLAG_WOKEN_THROTTLED` and `FLAG_NEW`.
        pub flags: u32,
        /// Thread that woke it.
        pub waker_tid: u32,
        /// Process of that thread.
        pub waker_tgid: u32,
        /// Named padding.
        pub reserved: u32,
        /// Command name of that thread.
        pub waker_comm: [u8; COMM_BYTES],
    }
}

plain! {
    /// A thread's last switch-out.
    pub struct ThreadEndRecord {
        /// `KIND_THREAD_END`.
        pub header: RecordHeader,
        /// Process.
        pub tgid: u32,
        /// Thread.
        pub tid: u32,
        /// When it entered the recording.
        pub entered_ns: u64,
        /// Time on a CPU since then.
        pub oncpu_ns: u64,
        /// Time waiting for a CPU since then.
        pub runnable_ns: u64,
        /// Part of that in which it held a CPU that did not run it.
        pub stolen_ns: u64,
        /// Time waiting for something else since then.
        pub blocked_ns: u64,
        /// [`crate::key::SchedulerAccount::left_out`].
        pub left_out: u32,
        /// Named padding.
        pub reserved: u32,
    }
}

plain! {
    /// A thread gets another name.
    pub struct RenameRecord {
        /// `KIND_RENAME`.
        pub header: RecordHeader,
        /// Thread.
        pub tid: u32,
        /// `FLAG_SKIPPED` or 0.
        pub flags: u32,
        /// Command name so far.
        pub from: [u8; COMM_BYTES],
        /// Command name from now on.
        pub to: [u8; COMM_BYTES],
        /// What is known of it. Like the reader of the map, the reader of this looks whether the
        /// law holds.
        pub thread: SchedulerAccount,
    }
}

plain! {
    /// A wait the task iterator found in progress. `kernel_bytes` bytes of kernel return addresses
    /// and `user_bytes` bytes of user stack follow, as in [`StackRecord`].
    pub struct OffCpuRecord {
        /// `KIND_OFF_CPU`.
        pub header: RecordHeader,
        /// Process.
        pub tgid: u32,
        /// Thread.
        pub tid: u32,
        /// Command name.
        pub comm: [u8; COMM_BYTES],
        /// `FLAG_` bits, those of [`StackRecord`] and `FLAG_STACK_SENT`.
        pub flags: u32,
        /// Bytes of kernel stack that follow.
        pub kernel_bytes: u32,
        /// Bytes of user stack that follow those.
        pub user_bytes: u32,
        /// Raw task state.
        pub state: u32,
        /// When the wait began, or the recording if that was later.
        pub start_ns: u64,
        /// How long the thread has been off the CPU by the scheduler's own clock, which also knows
        /// waits older than the recording; 0 when the kernel does not say.
        pub off_cpu_ns: u64,
        /// How long the thread has run in its life, by the scheduler's account.
        pub exec_ns: u64,
        /// The system call's number, negative when there is none.
        pub syscall: i64,
        /// As in [`StackRecord`].
        pub trace_id: [u8; 16],
        /// See there.
        pub span_id: [u8; 8],
        /// User instruction pointer.
        pub ip: u64,
        /// User registers, as in [`StackRecord`].
        pub gpr: [u64; GPR],
    }
}

plain! {
    /// Somebody ended the blocked part of a kept wait, and it was not plainly the thread that ran
    /// then. The first `kernel_bytes` bytes of `kernel` are where: the kernel stack of the waking,
    /// innermost frame first.
    pub struct WakeRecord {
        /// `KIND_WAKE`.
        pub header: RecordHeader,
        /// Process that was woken.
        pub tgid: u32,
        /// Thread that was woken.
        pub tid: u32,
        /// Start of its wait.
        pub start_ns: u64,
        /// Used in the probe; 0.
        pub place: u64,
        /// Bytes of `kernel` that are filled.
        pub kernel_bytes: u32,
        /// Named padding.
        pub reserved: u32,
        /// Return addresses.
        pub kernel: [u64; WAKER_FRAMES],
    }
}

/// Largest record that can leave a probe.
pub const MAX_RECORD_BYTES: u32 = size_of::<StackRecord>() as u32
    + MAX_WALK_BYTES
    + MAX_KERNEL_STACK_BYTES
    + MAX_STACK_COPY_BYTES;

/// Largest record of the task iterator.
pub const MAX_OFF_CPU_BYTES: u32 =
    size_of::<OffCpuRecord>() as u32 + MAX_KERNEL_STACK_BYTES + MAX_STACK_COPY_BYTES;

const _: () = assert!(size_of::<StackRecord>().is_multiple_of(8));
const _: () = assert!(size_of::<OffCpuRecord>().is_multiple_of(8));
