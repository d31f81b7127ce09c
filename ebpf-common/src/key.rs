//! Values of the maps. All keys are plain `u32`: a tid, a tgid, a CPU or 0.

use crate::limits::{COMM_BYTES, WALK_WINDOW_BYTES};
use crate::plain;
use crate::rule::WALK_REGISTERS;

/// The thread is on a CPU.
pub const STATE_ON_CPU: u32 = 0;
/// The thread waits for a CPU.
pub const STATE_RUNNABLE: u32 = 1;
/// The thread waits for something else.
pub const STATE_BLOCKED: u32 = 2;
/// `/proc` said `R`: it runs or waits for a CPU. The next switch tells which it was.
pub const STATE_RUNNING_OR_RUNNABLE: u32 = 3;
/// The thread is gone, and its end found no room in the ring: its times are final.
pub const STATE_DEAD: u32 = 4;

/// The present wait's stack was kept: its end is to be sent.
pub const WAIT_KEPT: u32 = 1;
/// The present wait was blocked at first.
pub const WAIT_WAS_BLOCKED: u32 = 2;
/// The present wait's stack was kept, and would have been whatever the sampler said: it stands for
/// itself alone.
pub const WAIT_CERTAIN: u32 = 4;
/// When the present wait's blocked part ended, the thread's cgroup had used up its CPU limit.
pub const WAIT_WOKEN_THROTTLED: u32 = 8;
/// It is known where the waking came from that ended the present wait's blocked part: the thread
/// that ran then did it in a system call, or the record of it was sent.
pub const WAIT_WAKER_TOLD: u32 = 16;
/// The present wait is a new thread's for its first CPU.
pub const WAIT_NEW: u32 = 32;

/// `SpanPlace::kind`: the variable is `offset` behind the thread pointer.
pub const SPAN_STATIC: u32 = 0;
/// `SpanPlace::kind`: the word at `address` says how far behind the thread pointer it is
/// (`R_X86_64_TPOFF64`).
pub const SPAN_DISTANCE: u32 = 1;
/// `SpanPlace::kind`: at `address` is a TLS descriptor (`R_X86_64_TLSDESC`).
pub const SPAN_DESCRIPTOR: u32 = 2;
/// `SpanPlace::kind`: at `address` are the module's number and the variable's place in the module's
/// block (`R_X86_64_DTPMOD64`).
pub const SPAN_INDEX: u32 = 3;
/// `SpanPlace::kind`: at `address` is the module's number; the variable is at `offset` of the
/// module's block.
pub const SPAN_MODULE: u32 = 4;

plain! {
    /// Where a process's threads publish what they work for (OpenTelemetry's thread context); key:
    /// tgid. Each has a thread-local variable that points to its record; these are the ways in
    /// which programs find such a variable ("ELF Handling For Thread-Local Storage", Drepper).
    pub struct SpanPlace {
        /// Where the dynamic linker has put what `kind` says.
        pub address: u64,
        /// As `kind` says; wraps.
        pub offset: u64,
        /// One of the `SPAN_` values.
        pub kind: u32,
        /// Bytes of an entry of the vector in which each thread has the blocks of modules (`dtv`):
        /// 16 with glibc, 8 with musl.
        pub entry_bytes: u32,
    }
}

plain! {
    /// What is known of one thread; key: tid. Law:
    /// `oncpu_ns + runnable_ns + blocked_ns == since_ns - entered_ns`, exactly, after each event:
    /// every event closes the state in progress into one sum and moves `since_ns`. A reader that
    /// sees the law broken has read in the middle of an update and reads again.
    pub struct SchedulerAccount {
        /// When it entered the recording; ns.
        pub entered_ns: u64,
        /// When its present state began; ns.
        pub since_ns: u64,
        /// Closed time on a CPU.
        pub oncpu_ns: u64,
        /// Closed time waiting for a CPU.
        pub runnable_ns: u64,
        /// Part of that in which it held a CPU that did not run it: taken by the hypervisor or by
        /// interrupts.
        pub stolen_ns: u64,
        /// Closed time waiting for something else.
        pub blocked_ns: u64,
        /// When the present wait began (switch-out), or the last one.
        pub wait_start_ns: u64,
        /// Blocked part of the present wait, once it is over.
        pub wait_blocked_ns: u64,
        /// `task_struct.se.sum_exec_runtime` as far as it is in `oncpu_ns`; `u64::MAX` before it
        /// was read.
        pub exec_ns: u64,
        /// Start of the last wait the task iterator has seen and told of. Written by the iterator
        /// alone.
        pub scanned_start_ns: u64,
        /// When somebody woke it last while it was still on its way off a CPU.
        pub woken_early_ns: u64,
        /// The task's kernel stack, which tells the task from another one that takes its id over in
        /// `execve`; 0 before its first switch.
        pub stack: u64,
        /// Process.
        pub tgid: u32,
        /// One of the `STATE_` values. Written behind everything else.
        pub state: u32,
        /// `WAIT_` bits of the present wait.
        pub wait_flags: u32,
        /// Thread that woke it last.
        pub waker_tid: u32,
        /// Process of that thread.
        pub waker_tgid: u32,
        /// Waits, for the sampler: halved with each second.
        pub waits: u32,
        /// What rules leave out of its process, as last looked up (`crate::config::left_out`).
        pub left_out: u32,
        /// The second of its last wait: 2³⁰ ns by the clock, from boot on.
        pub waits_in: u32,
        /// Renames that were told of in the second below, or one more than
        /// [`crate::limits::MAX_RENAMES`] where one of them was not told of.
        pub renames: u32,
        /// The second of its last rename: 2³⁰ ns by the clock, from boot on.
        pub renamed_in: u32,
        /// Command name of that thread; written for kept waits only.
        pub waker_comm: [u8; COMM_BYTES],
    }
}

plain! {
    /// From when on threads are known; key: tgid in `SELECTED`, 0 in `CONTROL` (for all processes).
    pub struct RecordingStart {
        /// Events before this are ignored; 0 = not yet started, in `SELECTED`: before the process's
        /// next exec. An unknown thread was in its state since then.
        pub since_ns: u64,
        /// 1 once `/proc` has been read: from then on an unknown thread is one that was lost, and
        /// starts afresh.
        pub seeded: u32,
        /// What rules leave out of a process; 0 in the maps.
        pub left_out: u32,
    }
}

plain! {
    /// State of the sampler of wait stacks; one per CPU.
    pub struct Sampler {
        /// End of the interval; ns.
        pub interval_end_ns: u64,
        /// When the probability was last set: when the interval began, or a burst within it had
        /// used twice what there was; ns.
        pub since_ns: u64,
        /// Bytes sent since then, those included that only a thread's own chance has kept, and not
        /// those of threads with few waits, as long as these are within their part of the budget.
        pub bytes: u64,
        /// Probability of keeping a stack, in units of 2⁻³²: at most 2³². 0 = not yet used, meaning
        /// 2³².
        pub probability: u64,
        /// Bytes sent in this interval for stacks that were kept for what their thread had before.
        pub own_bytes: u64,
        /// The probability of the last throw, and what made it.
        pub thrown: u64,
        /// See there; a constant of the probes.
        pub kept_by: u64,
        /// State of the random numbers; 0 = not yet seeded.
        pub random: u64,
        /// Bytes that may be sent beyond the budget.
        pub allowance: u64,
        /// How many of them in this interval.
        pub beyond: u64,
    }
}

/// A walk in progress.
#[repr(C)]
pub struct WalkState {
    /// Registers at the frame, in the order of `ebpf_common::rule`.
    pub registers: [u64; WALK_REGISTERS],
    /// Which of them are known, by bit.
    pub known: u64,
    /// 1 when the frame stands at the next instruction to run, 0 at a return address.
    pub exact: u64,
    /// Address of the first byte of the window.
    pub window_start: u64,
    /// One past the last byte in it.
    pub window_end: u64,
    /// Frames found.
    pub frames: u32,
    /// The address space.
    pub space: u32,
    /// How it ended: 0 without a rule, or one of the `FLAG_WALKED_` values.
    pub end: u64,
    /// Stack from `window_start` on, by words.
    pub window: [u64; WALK_WINDOW_BYTES as usize / 8],
}

impl WalkState {
    /// One that is nowhere yet.
    #[must_use]
    pub const fn nowhere() -> Self {
        Self {
            registers: [0; WALK_REGISTERS],
            known: 0,
            exact: 0,
            window_start: 0,
            window_end: 0,
            frames: 0,
            space: 0,
            end: 0,
            window: [0; WALK_WINDOW_BYTES as usize / 8],
        }
    }
}

plain! {
    /// A reader of the task iterator, and what may hold it up.
    pub struct TaskIteratorReader {
        /// When it began to copy a stack, CLOCK_MONOTONIC ns; 0 when it does not.
        pub copies_since_ns: u64,
        /// Its thread; 0 for nobody. One that is struck off here does nothing more.
        pub tid: u32,
        /// The process whose stack it copies, or copied last.
        pub tgid: u32,
    }
}
