//! What the kernel's probes report.

use super::context::{ThreadId, TraceSpan, UserContext};
use super::time::MonotonicNs;

/// The CPU sampler's record.
#[derive(Clone, Debug)]
pub struct CpuSample {
    /// Thread that was running.
    pub thread: ThreadId,
    /// Command name at that moment.
    pub comm: [u8; 16],
    /// User context; `None` for kernel threads. Boxed, as everywhere: events are sorted, and this
    /// is most of one.
    pub user: Option<Box<UserContext>>,
    /// Kernel return addresses, innermost first; empty when user code was interrupted.
    pub kernel: Vec<u64>,
    /// What it worked for, where it publishes that and was asked.
    pub span: Option<TraceSpan>,
}

/// A thread gets another name, but for one that becomes another program.
#[derive(Clone, Debug)]
pub struct Rename {
    /// The thread.
    pub thread: ThreadId,
    /// Its command name so far.
    pub from: [u8; 16],
    /// Its command name from now on.
    pub to: [u8; 16],
    /// Its times until now; `None` when they changed while they were read.
    pub until: Option<ThreadSnapshot>,
    /// Earlier renames were not told of.
    pub skipped: bool,
}

/// Why a thread left the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitState {
    /// Preempted or yielded: it could have gone on.
    Runnable,
    /// Its cgroup had used up its CPU limit.
    Throttled,
    /// TASK_INTERRUPTIBLE.
    Interruptible,
    /// TASK_UNINTERRUPTIBLE.
    Uninterruptible,
    /// Stopped, traced, parked or dead, by the raw state bits.
    Other(u32),
}

/// A thread leaves the CPU.
#[derive(Clone, Debug)]
pub struct WaitStart {
    /// The thread.
    pub thread: ThreadId,
    /// Command name.
    pub comm: [u8; 16],
    /// User context; `None` for kernel threads.
    pub user: Option<Box<UserContext>>,
    /// Kernel return addresses, innermost first.
    pub kernel: Vec<u64>,
    /// State it left in.
    pub state: WaitState,
    /// The scheduler counts the wait as one for input or output.
    pub io: bool,
    /// Nanoseconds it had been on CPU since its last switch-in.
    pub ran_ns: u64,
    /// System call it is in, if any.
    pub syscall: Option<u32>,
    /// One over the probability with which this stack was kept; at least 1.
    pub weight: f64,
    /// What it worked for, where it publishes that and was asked.
    pub span: Option<TraceSpan>,
}

/// A wait in progress, seen from outside. It stands for itself alone, whatever the sampler chose.
#[derive(Clone, Debug)]
pub struct OffCpuThread {
    /// The thread.
    pub thread: ThreadId,
    /// Command name.
    pub comm: [u8; 16],
    /// When the wait began; when the recording did, for a wait that is older.
    pub start: MonotonicNs,
    /// How long the thread has been off the CPU in all, to some milliseconds; `None` when the
    /// kernel does not say.
    pub off_cpu_ns: Option<u64>,
    /// `None` when its stack was sent before, with the `WaitStart` or an earlier `OffCpu`.
    pub seen: Option<OffCpuStack>,
}

/// What a sleeping thread is in the middle of.
#[derive(Clone, Debug)]
pub struct OffCpuStack {
    /// User context; `None` for kernel threads.
    pub user: Option<Box<UserContext>>,
    /// Kernel return addresses, innermost first, without the scheduler's own.
    pub kernel: Vec<u64>,
    /// State it sleeps in.
    pub state: WaitState,
    /// The scheduler counts the wait as one for input or output.
    pub io: bool,
    /// System call it is in, if any.
    pub syscall: Option<u32>,
    /// What it worked for.
    pub span: Option<TraceSpan>,
}

/// Where a wake-up came from, as its kernel stack shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeOrigin {
    /// The thread that ran then.
    Thread,
    /// A timer.
    Timer,
    /// Another interrupt.
    Interrupt,
}

/// The end of the blocked part of a wait; pairs like [`WaitEnd`], which follows.
#[derive(Clone, Debug)]
pub struct Wake {
    /// The thread that was woken.
    pub tid: u32,
    /// Start of its wait.
    pub start: MonotonicNs,
    /// Kernel return addresses of the waking, innermost first.
    pub kernel: Vec<u64>,
    /// There may be more of them than there was room for.
    pub cut: bool,
    /// The thread that ran then, when its stack was taken.
    pub by: Option<WakerStack>,
}

/// The rest of the stack of a waking.
#[derive(Clone, Debug)]
pub struct WakerStack {
    /// The thread that ran.
    pub thread: ThreadId,
    /// Its command name.
    pub comm: [u8; 16],
    /// User context; `None` for kernel threads.
    pub user: Option<Box<UserContext>>,
}

/// The end of a kept wait; pairs with the `WaitStart` of the same thread whose time is `start`, or
/// the `OffCpu` with that start.
#[derive(Clone, Debug)]
pub struct WaitEnd {
    /// The thread.
    pub thread: ThreadId,
    /// Time of the switch-out that began it.
    pub start: MonotonicNs,
    /// Nanoseconds it waited for something.
    pub blocked_ns: u64,
    /// Nanoseconds it then (or from the start) waited for a CPU.
    pub runnable_ns: u64,
    /// Who woke it: thread and command name; `None` when it was never blocked. tid 0 is the idle
    /// task: an interrupt woke it.
    pub waker: Option<(ThreadId, [u8; 16])>,
    /// When it was woken its cgroup had used up its CPU limit: the runnable part is the limit's.
    pub woken_throttled: bool,
    /// The thread was new and waited for its first CPU: no stack was there to keep.
    pub new_thread: bool,
}

/// Exact scheduler times of one thread since the recording began. Law: the three sum to the time it
/// existed in the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadTimes {
    /// The thread.
    pub thread: ThreadId,
    /// Nanoseconds on a CPU.
    pub oncpu_ns: u64,
    /// Nanoseconds runnable, waiting for a CPU.
    pub runnable_ns: u64,
    /// Part of those in which it held a CPU that did not run it: taken by the hypervisor or by
    /// interrupts.
    pub stolen_ns: u64,
    /// Nanoseconds blocked.
    pub blocked_ns: u64,
    /// When the thread entered the recording.
    pub since: MonotonicNs,
    /// What rules leave out of its process (`ebpf_common::config::left_out`).
    pub left_out: u32,
}

/// A thread that is alive, looked at from outside: its times as if the state it is in ended at
/// `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadSnapshot {
    /// Its times, closed at `at`.
    pub times: ThreadTimes,
    /// When it was looked at.
    pub at: MonotonicNs,
    /// The state it is in.
    pub progress: ThreadProgress,
}

/// What a thread is in the middle of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadProgress {
    /// Running since then.
    OnCpu {
        /// Its switch-in.
        since: MonotonicNs,
    },
    /// Waiting, with what the wait amounts to so far: the part to take into this window.
    Waiting {
        /// Its switch-out: the time of the `WaitStart`, when that was kept.
        start: MonotonicNs,
        /// Nanoseconds of it blocked, up to `at`.
        blocked_ns: u64,
        /// Nanoseconds of it runnable, up to `at`.
        runnable_ns: u64,
        /// Whether its `WaitStart` was kept, so that its `WaitEnd` will come.
        kept: bool,
        /// The thread is new and waits for its first CPU.
        new_thread: bool,
        /// When it was woken its cgroup had used up its CPU limit: the runnable part is the
        /// limit's.
        woken_throttled: bool,
    },
}

/// A new executable mapping, as perf's MMAP2 record tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mmap {
    /// The process.
    pub pid: u32,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset in the file, bytes.
    pub file_offset: u64,
    /// Device (major, minor) and inode; inode 0 for anonymous memory.
    pub device: (u32, u32),
    /// Inode.
    pub inode: u64,
    /// Path as the process's mount namespace shows it, `//anon`, `[vdso]`, or
    /// `/memfd:NAME (deleted)`.
    pub path: String,
}
