//! The place a thread was in: its registers and stack.

use super::time::MonotonicNs;

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
    /// It ended at a frame without a rule: the context's registers are that frame's.
    HandedOver {
        /// True when the frame stands at the next instruction to run, false at a return address.
        exact: bool,
    },
    /// It ended at the thread's first frame.
    ThreadStart,
    /// It ended when a record held no more frames.
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
    /// How to find out whether the thread is still blocked, if it was blocked then.
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

impl UserContext {
    /// About how much memory it takes.
    pub(super) fn bytes(&self) -> usize {
        let frames = self.walk.as_ref().map_or(0, |walk| size_of_val(&*walk.frames));
        size_of::<Self>() + self.stack.len() + frames
    }
}
