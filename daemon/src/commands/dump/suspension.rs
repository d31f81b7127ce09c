//! Which threads a runtime waits for when it is to stop all managed threads: those in cooperative
//! mode.
//!
//! The runtime's list of its threads says so ([`perfusion_dotnet::thread_list`]).

use super::{DumpedState, DumpedThread};
use perfusion_dotnet::attach::AttachError;
use perfusion_dotnet::attach::ipc::IpcError;
use perfusion_dotnet::data_descriptor::{ProcessMemoryFile, runtime_base};
use perfusion_dotnet::thread_list::ThreadListLayout;
use perfusion_host::process::guarded_io::{IoPeer, wait_for};
use perfusion_host::process::handle::ProcessHandle;
use serde::Serialize;
use std::collections::HashSet;

/// Most threads looked at.
const MOST_THREADS: usize = 1 << 16;

/// A thread that is blocked for so long in cooperative mode waits for something else than the
/// runtime itself.
const BLOCKED_SECONDS: f64 = 0.05;

/// Managed threads are to stand still, and some do not let themselves be stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Suspension {
    /// True when the runtime did not answer either: it waits by now. Else the next collection
    /// would.
    pub pending: bool,
    /// Threads in cooperative mode that are blocked, or, while it waits, run: it waits for each of
    /// them. Empty where they cannot be told (.NET 8 and older).
    pub held_up_by: Vec<u32>,
}

/// What the runtime waits for, by who was in cooperative mode twice.
pub(super) fn of(
    threads: &[DumpedThread],
    cooperative: Option<(HashSet<u32>, HashSet<u32>)>,
    silent: bool,
) -> Option<Suspension> {
    // Nobody answers, nor waits for anybody.
    if threads.iter().all(|thread| thread.state == DumpedState::Stopped) {
        return None;
    }
    let (before, after) = cooperative.unwrap_or_default();
    let stays =
        |thread: &&DumpedThread| before.contains(&thread.tid) && after.contains(&thread.tid);
    let is_blocked = |thread: &DumpedThread| {
        let waits = !matches!(thread.state, DumpedState::Running | DumpedState::Runnable);
        waits && thread.waiting_seconds.is_some_and(|seconds| seconds >= BLOCKED_SECONDS)
    };
    let held_up_by: Vec<u32> = threads
        .iter()
        .filter(stays)
        .filter(|thread| silent || is_blocked(thread))
        .map(|thread| thread.tid)
        .collect();
    (silent || !held_up_by.is_empty()).then_some(Suspension { pending: silent, held_up_by })
}

/// True when the runtime was asked and has not answered.
pub(super) fn is_silence(error: &AttachError) -> bool {
    let (AttachError::Busy(error) | AttachError::Ipc(error)) = error else { return false };
    matches!(**error, IpcError::GivenUp { .. } | IpcError::TimedOut { .. })
}

/// Threads in cooperative mode now; `None` where the runtime does not say.
pub(super) fn cooperative(target: &ProcessHandle) -> Option<HashSet<u32>> {
    let (base, pid) = (runtime_base(target)?, target.pid());
    let memory = target.file("mem").ok()?;
    let threads = wait_for(IoPeer::Process(pid), move || {
        let memory = ProcessMemoryFile(memory);
        ThreadListLayout::read(&memory, memory.descriptor(base)?)?.threads(&memory, MOST_THREADS)
    })??;
    let cooperative = threads.iter().filter(|thread| thread.is_cooperative);
    Some(cooperative.map(|thread| thread.tid).collect())
}
