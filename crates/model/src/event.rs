//! Events: what the kernel's probes and the shims report, whatever their records look like in a
//! ring. All stages behind the sources see only these types.

use profiler_protocol::record::NOT_NOW;
use std::time::{Duration, SystemTime};

/// Two clocks that are read within so much time are read at once.
const CLOCKS_APART_NS: u64 = 100_000;
/// How often that is tried.
const CLOCK_READINGS: u32 = 10;

/// CLOCK_MONOTONIC of the initial time namespace, in nanoseconds (`bpf_ktime_get_ns`, perf's
/// `clockid`, the shim's clock with its namespace offset removed).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MonotonicNs(pub u64);

impl MonotonicNs {
    /// This moment; the recorder lives in the initial time namespace.
    #[must_use]
    pub fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let (seconds, nanos) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
        Self(seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(nanos.unwrap_or(0)))
    }

    /// This moment, which is past, by the wall clock as that is set now. Whoever loses the CPU
    /// between one clock and the other is wrong by as long: so the wall clock is read between two
    /// looks at this one, a few times where they are far apart, and the closest counts.
    #[must_use]
    pub fn on_wall_clock(self) -> SystemTime {
        let mut closest = (u64::MAX, Self(0), SystemTime::UNIX_EPOCH);
        for _ in 0..CLOCK_READINGS {
            let (before, wall, after) = (Self::now(), SystemTime::now(), Self::now());
            let apart = after.0.saturating_sub(before.0);
            if apart < closest.0 {
                closest = (apart, Self(before.0 + apart / 2), wall);
            }
            if apart <= CLOCKS_APART_NS {
                break;
            }
        }
        let (_, read_at, wall) = closest;
        let ago = Duration::from_nanos(read_at.0.saturating_sub(self.0));
        wall.checked_sub(ago).unwrap_or(wall)
    }
}

/// A thread, by its ids in the initial pid namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ThreadId {
    /// Thread group id: what users call the pid.
    pub pid: u32,
    /// The kernel's id of the thread itself.
    pub tid: u32,
}

/// What a thread says it works for: a span of a trace, by ids as W3C Trace Context has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TraceSpan {
    /// The trace.
    pub trace: [u8; 16],
    /// The span.
    pub id: [u8; 8],
}

/// General registers of the interrupted or captured user context, by the places of the machine
/// (`unwind::machine::Machine`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserRegs {
    /// Values by place; meaningful only where `known` has the bit set.
    pub gpr: [u64; 16],
    /// Bit n set: `gpr[n]` was captured. A sample from the kernel knows all; the shim knows
    /// callee-saved ones and the stack pointer.
    pub known: u16,
    /// The instruction pointer: the exact instruction, unless the probes' walk says that it is a
    /// return address.
    pub ip: u64,
}

/// How a walk of the probes ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkEnd {
    /// At a frame without a rule: the context's registers are that frame's.
    HandedOver {
        /// True when the frame stands at the next instruction to run, false at a return address.
        exact: bool,
    },
    /// At the thread's first frame.
    ThreadStart,
    /// At the most frames a record holds.
    Limit,
}

/// What the probes did of a walk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeWalk {
    /// When.
    pub time: MonotonicNs,
    /// The address space whose rules they used.
    pub space: u32,
    /// Places of the frames (`ebpf_common::rule::RuleKey::place`), innermost first.
    pub frames: Vec<u64>,
    /// How it ended.
    pub end: WalkEnd,
}

/// A user context: registers and a bounded copy of the stack that starts at the stack pointer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UserContext {
    /// What the probes walked before; `None` for contexts that do not come from them.
    pub walk: Option<ProbeWalk>,
    /// Registers at the moment of capture, or of the frame the probes handed over; meaningless when
    /// they did not.
    pub regs: UserRegs,
    /// Bytes from the stack pointer, or behind `skipped`, upwards; shorter than asked where the
    /// stack's mapping ends.
    pub stack: Vec<u8>,
    /// Bytes at the stack pointer that were not in memory: nothing has been written to them yet, or
    /// they are swapped out.
    pub skipped: u64,
    /// True when the copy ended because the limit was reached, not because memory did.
    pub limited: bool,
    /// True when the kernel had begun to end the thread. Its memory may have been gone.
    pub exiting: bool,
    /// Of a thread that was blocked then: how to find out whether it still is.
    pub asleep: Option<BlockedThread>,
}

/// A thread that is blocked. While it has run no longer it is in the same place, and its stack is
/// what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockedThread {
    /// The thread.
    pub tid: u32,
    /// How long it has run in its life, by the scheduler's account; ns.
    pub exec_ns: u64,
}

/// One thing that happened, with the time it happened.
#[derive(Clone, Debug)]
pub struct Event {
    /// When.
    pub time: MonotonicNs,
    /// What.
    pub kind: EventKind,
}

impl Event {
    /// True for a shim's answer "not now".
    #[must_use]
    pub fn is_withheld(&self) -> bool {
        matches!(
            self.kind,
            EventKind::Shim { event: ShimEvent::NoMethod { hresult: NOT_NOW, .. }, .. }
        )
    }

    /// True when there may be code that should be seen soon: of a process that has begun or become
    /// another and may not last, or of one that unloads some.
    #[must_use]
    pub fn is_change(&self) -> bool {
        match &self.kind {
            EventKind::Fork { parent, thread } => thread.pid != parent.pid,
            EventKind::Exec { .. } | EventKind::ProcessRecordsLost => true,
            EventKind::Shim { event: ShimEvent::CodeUnloaded { .. }, .. } => true,
            _ => false,
        }
    }

    /// About how much memory it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let kernel = |addresses: &[u64]| size_of_val(addresses);
        let user = |user: &UserContext| {
            size_of::<UserContext>()
                + user.stack.len()
                + user.walk.as_ref().map_or(0, |walk| size_of_val(&*walk.frames))
        };
        let behind = match &self.kind {
            EventKind::CpuSample(sample) => {
                kernel(&sample.kernel) + sample.user.as_deref().map_or(0, user)
            }
            EventKind::WaitStart(wait) => {
                kernel(&wait.kernel) + wait.user.as_deref().map_or(0, user)
            }
            EventKind::Sleeper(sleeper) => sleeper
                .seen
                .as_ref()
                .map_or(0, |seen| kernel(&seen.kernel) + seen.user.as_deref().map_or(0, user)),
            EventKind::Wake(wake) => {
                let by = wake.by.as_ref().and_then(|by| by.user.as_deref());
                kernel(&wake.kernel) + by.map_or(0, user)
            }
            EventKind::Mmap(mmap) => mmap.path.len(),
            EventKind::Shim { event, .. } => match event {
                ShimEvent::Allocation(allocation) => {
                    size_of::<Allocation>() + user(&allocation.user)
                }
                ShimEvent::Exception(exception) => {
                    let message = exception.message.as_ref().map_or(0, String::len);
                    size_of::<Exception>()
                        + exception.type_name.len()
                        + message
                        + user(&exception.at.user)
                }
                ShimEvent::Contention(contention) => {
                    size_of::<Contention>() + user(&contention.at.user)
                }
                ShimEvent::TypeName { name, module, .. } => name.len() + module.len(),
                ShimEvent::ThreadName { name, .. } => name.len(),
                ShimEvent::Method(method) => {
                    size_of::<MethodBody>()
                        + method.name.len()
                        + method.module.len()
                        + size_of_val(&*method.ranges)
                }
                ShimEvent::CodeUnloaded { ranges } => size_of_val(&**ranges),
                ShimEvent::ObjectsDead { samples } => size_of_val(&**samples),
                ShimEvent::ObjectsAlive { samples } => size_of_val(&**samples),
                ShimEvent::ObjectsDropped { samples, .. } => size_of_val(&**samples),
                _ => 0,
            },
            _ => 0,
        };
        size_of::<Self>() + behind
    }
}

/// All kinds of events, from both sources.
#[derive(Clone, Debug)]
pub enum EventKind {
    /// The CPU sampler's timer found this thread running.
    CpuSample(CpuSample),
    /// A thread left the CPU and its stack was kept by the coin.
    WaitStart(WaitStart),
    /// The task iterator found a thread waiting.
    Sleeper(OffCpuThread),
    /// Somebody ended the blocked part of a wait whose `WaitStart` or `Sleeper` was sent.
    Wake(Wake),
    /// A thread whose `WaitStart` or `Sleeper` was sent got the CPU again.
    WaitEnd(WaitEnd),
    /// A thread's last switch: its exact totals since the recording began.
    ThreadEnd(ThreadTimes),
    /// A thread of the recording gets another name.
    Rename(Box<Rename>),
    /// `execve` succeeded: the process has a new image; all mappings before this are gone.
    Exec {
        /// The process.
        pid: u32,
        /// New command name (at most 15 bytes).
        comm: String,
    },
    /// A thread was named.
    Comm {
        /// The thread.
        thread: ThreadId,
        /// Its new name (at most 15 bytes).
        comm: String,
    },
    /// A thread or process was made. `thread.pid == parent.pid` means a thread.
    Fork {
        /// Who called clone.
        parent: ThreadId,
        /// The new one.
        thread: ThreadId,
    },
    /// A thread ended; when `thread.tid == thread.pid` the main thread did.
    Exit {
        /// The thread.
        thread: ThreadId,
    },
    /// A new executable mapping.
    Mmap(Mmap),
    /// Some of the five above were lost: whatever is known of any process may be out of date.
    ProcessRecordsLost,
    /// Something a shim said about its own process.
    Shim {
        /// Process in the initial pid namespace, as the finder established it (never from the
        /// record).
        pid: u32,
        /// Which region (one per attached instance) said it.
        region: RegionId,
        /// What it said.
        event: ShimEvent,
    },
}

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

/// A wait in progress, seen from outside. It stands for itself alone, whatever the coin said of it.
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
    /// `None` when its stack was sent before, with the `WaitStart` or an earlier `Sleeper`.
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

/// How many exceptions and contentions one region has counted since this recorder reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IncidentCounts {
    /// The region.
    pub region: RegionId,
    /// How many.
    pub counts: [u64; 2],
    /// False where records were left out since the last look: then the profile does not cover what
    /// was counted.
    pub covered: [bool; 2],
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
/// the `Sleeper` with that start.
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

/// Identity of one shim region in this daemon's life; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// Which heap an object went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeapKind {
    /// Small object heap.
    Small,
    /// Large object heap.
    Large,
    /// Pinned object heap.
    Pinned,
}

/// How an allocation was chosen, which says what it stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AllocationKind {
    /// AllocationTick (.NET 6–9): a fixed stride of about 100 KiB; it stands for `amount` bytes. No
    /// unbiased estimator exists.
    Tick {
        /// Bytes allocated on this heap since the last tick.
        amount: u64,
    },
    /// AllocationSampled (.NET 10+): each byte is an independent trial with p = 1/102400.
    Sampled,
    /// The same, by exact mode: an object that stands for others of its class, too, which nobody is
    /// told of, is chosen as if it were larger.
    Chosen {
        /// Bytes that chance had to choose from, its own included.
        bytes: u64,
    },
    /// A large object: the runtime tells of each of them.
    Exact,
}

/// One sampled allocation.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// Identity of the sample within its region; later `ObjectsDead`/`ObjectsAlive` name it.
    pub sample: u64,
    /// Allocating thread.
    pub tid: u32,
    /// The runtime's ClassID; its name comes as `TypeName`.
    pub type_id: u64,
    /// Object size in bytes.
    pub size: u64,
    /// Which heap.
    pub heap: HeapKind,
    /// How it was chosen.
    pub kind: AllocationKind,
    /// It was told of with the probability 2^-level.
    pub level: u8,
    /// When a weak handle watches it, the level it was chosen at (`profiler_protocol::live`).
    pub watched: Option<u8>,
    /// Registers and stack of the allocating thread, inside the shim's callback.
    pub user: UserContext,
    /// When they were taken, or earlier: unlike the event's time never later, whatever became of
    /// the record.
    pub seen: MonotonicNs,
}

/// Where a thread was in the middle of something the runtime told of; chosen by chance to stand for
/// others of its kind.
#[derive(Clone, Debug)]
pub struct RuntimeSample {
    /// The thread.
    pub tid: u32,
    /// One over the probability with which it was chosen; at least 1.
    pub weight: f64,
    /// Registers and stack of the thread, inside the shim's callback.
    pub user: UserContext,
    /// When they were taken, or earlier ([`Allocation::seen`]).
    pub seen: MonotonicNs,
}

/// An exception that was thrown.
#[derive(Clone, Debug)]
pub struct Exception {
    /// Where.
    pub at: RuntimeSample,
    /// Thrown again from a handler.
    pub rethrown: bool,
    /// Its type.
    pub type_name: String,
    /// What it says, where that was asked for.
    pub message: Option<String>,
}

/// A wait for a lock that another thread held, which is over.
#[derive(Clone, Debug)]
pub struct Contention {
    /// Where the thread waited.
    pub at: RuntimeSample,
    /// How long, nanoseconds.
    pub waited_ns: u64,
    /// Who held the lock when the wait began, as far as the runtime said.
    pub owner: Option<u32>,
}

/// Name and code of one managed method body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MethodBody {
    /// The address that was asked about.
    pub asked: u64,
    /// Module identity inside the process (ModuleID), with `token` and `instantiation` the
    /// function's identity.
    pub module_id: u64,
    /// MethodDef token; 0 for dynamic methods.
    pub token: u32,
    /// True for dynamic methods (LCG, IL stubs).
    pub dynamic: bool,
    /// `Namespace.Type<Args>.Method<Args>(ParameterTypes)`.
    pub name: String,
    /// Simple name of the module's file, or empty.
    pub module: String,
    /// Code ranges of this body: (start, length in bytes); hot part first.
    pub ranges: Vec<(u64, u32)>,
}

/// What a shim says, decoded and bounds-checked, still only believed about its own process.
#[derive(Clone, Debug)]
pub enum ShimEvent {
    /// The instance is up: runtime version as (major, minor, build) and the instance's number in
    /// its process.
    Hello {
        /// Runtime version.
        runtime: (u16, u16, u16),
        /// It can watch objects: the runtime has weak handles for profilers.
        watches: bool,
    },
    /// A sampled allocation.
    Allocation(Box<Allocation>),
    /// Name of a type, sent before or after the first allocation that needs it.
    TypeName {
        /// ClassID.
        type_id: u64,
        /// ModuleID of its module; 0 when the runtime did not tell.
        module_id: u64,
        /// Name with generic arguments; what the compiler has made is as it is called in the
        /// metadata.
        name: String,
        /// Module's simple file name.
        module: String,
    },
    /// Answer to a name request.
    Method(Box<MethodBody>),
    /// The runtime does not know the address; the HRESULT says why.
    NoMethod {
        /// The address asked about.
        asked: u64,
        /// The runtime's answer.
        hresult: i32,
        /// When the question said that it was seen; later than all when it could not say so.
        seen: MonotonicNs,
    },
    /// Code in these ranges is gone (dynamic method collected, module unloaded): names and rules
    /// die.
    CodeUnloaded {
        /// (start, length).
        ranges: Vec<(u64, u64)>,
    },
    /// A collection began.
    GcStart {
        /// The runtime's count of collections.
        number: u32,
        /// Generation condemned.
        generation: u8,
        /// The runtime's reason code (`reference` A7: 0 small alloc, 1 induced, …).
        reason: u8,
        /// 0 blocking, 1 background, 2 foreground during background.
        kind: u8,
        /// Thread that started it.
        tid: u32,
    },
    /// A collection ended.
    GcEnd {
        /// The runtime's count of collections.
        number: u32,
    },
    /// All managed threads are being suspended.
    PauseBegin {
        /// The runtime's suspension reason (1 = GC, 6 = GC preparation, …).
        reason: u8,
        /// Thread that suspends.
        tid: u32,
    },
    /// Managed threads run again.
    PauseEnd {
        /// Thread that resumed them.
        tid: u32,
    },
    /// What a collection left.
    GcHeap {
        /// The runtime's count of collections.
        number: u32,
        /// Bytes that survived it, in the generations it collected.
        promoted: u64,
    },
    /// CPU time of the thread that suspended the others, during the pause that ends now.
    PauseCpu {
        /// The thread.
        tid: u32,
        /// Nanoseconds.
        cpu_ns: u64,
    },
    /// The runtime changed how many workers of its thread pool may run at a time.
    PoolAdjusted {
        /// So many.
        workers: u32,
        /// The runtime's reason code.
        reason: u32,
    },
    /// What waited for a worker of the thread pool when the runtime looked.
    PoolQueue {
        /// Items of work.
        items: u64,
    },
    /// An exception.
    Exception(Box<Exception>),
    /// A wait for a lock.
    Contention(Box<Contention>),
    /// These sampled objects were found dead at a collection's end.
    ObjectsDead {
        /// Their `Allocation::sample`.
        samples: Vec<u64>,
    },
    /// These sampled objects survived, with the generation they are in now.
    ObjectsAlive {
        /// (sample, generation).
        samples: Vec<(u64, u8)>,
    },
    /// These sampled objects are not watched any more: chance chose others, which were all above
    /// the level.
    ObjectsDropped {
        /// The level (`profiler_protocol::live`).
        level: u8,
        /// Their `Allocation::sample`.
        samples: Vec<u64>,
    },
    /// A managed thread that was there when the library was loaded.
    ThreadAt {
        /// Its id in the initial pid namespace.
        tid: u32,
        /// Where the runtime's structure of it is, as the library says.
        address: u64,
    },
    /// The instance waits to hear that all it has said up to this was looked at.
    Mark,
    /// A managed thread's OS id and name.
    ThreadName {
        /// OS thread id in the initial pid namespace (translated by the reader when it can), else
        /// as the process sees it.
        tid: u32,
        /// The name.
        name: String,
    },
    /// The instance says goodbye: detach finished or the process shuts down.
    Bye,
}
