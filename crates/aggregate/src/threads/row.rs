//! The result of a window: where the time of a thread went, and why it waited.

use perfusion_model::event::{MonotonicNs, ThreadId, WaitState};
use perfusion_model::feature::{ExcludedFeatures, Feature};
use perfusion_model::frame::Marker;
use perfusion_model::stack::StackId;
use std::sync::Arc;

/// The place where a row's time was spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StackOrMarker {
    /// In this stack.
    Stack(StackId),
    /// Not known; the marker says why.
    Marker(Marker),
}

/// What a thread waited for, as far as the kernel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WaitReason {
    /// State it left the CPU in.
    pub state: WaitStateKey,
    /// [Family](crate::wait_reason::family) of the system call it was in: its number may be any
    /// that the process likes, and waits are kept apart by this.
    pub syscall: Option<&'static str>,
    /// The scheduler counts it as a wait for input or output.
    pub io: bool,
    /// It began while its process stood still for the garbage collector.
    pub suspended: bool,
}

/// [`WaitState`] without the raw bits, so that it can be a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitStateKey {
    /// Preempted.
    Preempted,
    /// Its CPU did not run it.
    Stolen,
    /// Out of CPU time by its cgroup's limit.
    Throttled,
    /// Interruptible sleep.
    Interruptible,
    /// Uninterruptible sleep.
    Uninterruptible,
    /// Stopped, traced, parked, dead.
    Other,
}

impl From<WaitState> for WaitStateKey {
    fn from(state: WaitState) -> Self {
        match state {
            WaitState::Runnable => Self::Preempted,
            WaitState::Throttled => Self::Throttled,
            WaitState::Interruptible => Self::Interruptible,
            WaitState::Uninterruptible => Self::Uninterruptible,
            WaitState::Other(_) => Self::Other,
        }
    }
}

/// The thread or interrupt that ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Waker {
    /// A thread.
    Thread {
        /// Its ids.
        id: ThreadId,
        /// Its command name.
        comm: [u8; 16],
        /// Its stack, if that was taken.
        stack: Option<StackId>,
    },
    /// A timer ran out.
    Timer,
    /// Another interrupt, or work it left to be done right after.
    Interrupt,
    /// One thread or another: there were too many.
    Other,
}

/// One line of the result. All times in nanoseconds; their sums per thread equal the scheduler's
/// totals.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadRow {
    /// The thread.
    pub thread: ThreadId,
    /// When it entered the recording: tells it from a later thread with the same id.
    pub since: MonotonicNs,
    /// What the thread was called then; `None` for one that was not renamed in this window.
    pub name: Option<Arc<str>>,
    /// The place of the time.
    pub place: StackOrMarker,
    /// The reason of the wait; `None` for rows of CPU time.
    pub reason: Option<WaitReason>,
    /// The waker of the wait.
    pub waker: Option<Waker>,
    /// CPU samples taken here.
    pub samples: u64,
    /// On-CPU time.
    pub cpu_ns: f64,
    /// Time runnable.
    pub runnable_ns: f64,
    /// Time blocked.
    pub blocked_ns: f64,
    /// Standard error of `runnable_ns` and `blocked_ns` together; 0 where nothing was left to
    /// chance.
    pub wait_stderr_ns: f64,
}

impl ThreadRow {
    /// What is left of it without what rules leave out.
    pub(super) fn without(mut self, left_out: ExcludedFeatures) -> Option<Self> {
        if left_out.has(Feature::Cpu) {
            (self.samples, self.cpu_ns) = (0, 0.0);
        }
        if left_out.has(Feature::Waits) {
            (self.runnable_ns, self.blocked_ns, self.wait_stderr_ns) = (0.0, 0.0, 0.0);
        }
        let something = self.samples > 0 || self.cpu_ns + self.runnable_ns + self.blocked_ns > 0.0;
        something.then_some(self)
    }
}
