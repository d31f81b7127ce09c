//! Events: what the kernel's probes and the shims report, whatever their records look like in a
//! ring. All stages behind the sources see only these types.

mod context;
mod kernel;
mod shim;
mod time;

pub use context::{BlockedThread, ProbeWalk, ThreadId, TraceSpan, UserContext, UserRegs, WalkEnd};
pub use kernel::{
    CpuSample, Mmap, OffCpuStack, OffCpuThread, Rename, ThreadProgress, ThreadSnapshot,
    ThreadTimes, WaitEnd, WaitStart, WaitState, Wake, WakeOrigin, WakerStack,
};
pub use shim::{
    Allocation, AllocationKind, Contention, Exception, HeapKind, IlMap, IlMapEntry, MethodBody,
    RegionId, RuntimeEventCounts, RuntimeSample, ShimEvent,
};
pub use time::MonotonicNs;

use profiler_protocol::record::NOT_NOW;

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
        size_of::<Self>() + self.kind.bytes_behind()
    }
}

impl EventKind {
    /// About how much memory it takes beside its own size.
    fn bytes_behind(&self) -> usize {
        let stack = |kernel: &[u64], user: Option<&UserContext>| {
            size_of_val(kernel) + user.map_or(0, UserContext::bytes)
        };
        match self {
            Self::CpuSample(sample) => stack(&sample.kernel, sample.user.as_deref()),
            Self::WaitStart(wait) => stack(&wait.kernel, wait.user.as_deref()),
            Self::OffCpu(thread) => {
                let seen = thread.seen.as_ref();
                seen.map_or(0, |seen| stack(&seen.kernel, seen.user.as_deref()))
            }
            Self::Wake(wake) => {
                stack(&wake.kernel, wake.by.as_ref().and_then(|by| by.user.as_deref()))
            }
            Self::Mmap(mmap) => mmap.path.len(),
            Self::Shim { event, .. } => event.bytes_behind(),
            _ => 0,
        }
    }
}

/// All kinds of events, from both sources.
#[derive(Clone, Debug)]
pub enum EventKind {
    /// The CPU sampler's timer found this thread running.
    CpuSample(CpuSample),
    /// A thread left the CPU, and the sampler kept its stack.
    WaitStart(WaitStart),
    /// The task iterator found a thread waiting.
    OffCpu(OffCpuThread),
    /// Somebody ended the blocked part of a wait whose `WaitStart` or `OffCpu` was sent.
    Wake(Wake),
    /// A thread whose `WaitStart` or `OffCpu` was sent got the CPU again.
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
