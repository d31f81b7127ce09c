//! What other threads ask the processor's thread, and what it says of itself. Both are seen between
//! two batches: neither waits for all events that are on their way to the processor.

use crate::processor::ManagedProcess;
use perfusion_host::process::table::ProcessStatus;
use std::collections::HashMap;
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// At most so many requests for the processes' states wait for an answer.
const MAX_STANDINGS: usize = 8;

/// What the processor says of itself, a moment old.
#[derive(Default)]
struct RecordingState {
    counters: Vec<(String, u64)>,
    managed: Vec<ManagedProcess>,
    /// How much of its memory for stacks the window in progress has taken, from 0 to 1.
    stacks_fill: f64,
}

/// What the processor is asked for.
#[derive(Default)]
pub(crate) struct ProcessorRequests {
    /// Memory is short.
    pub(crate) shed: bool,
    /// Bytes that the stacks of a window may take.
    pub(crate) stacks: Option<u64>,
    /// Who wants to know how the processes stand.
    pub(crate) standings: Vec<SyncSender<Vec<ProcessStatus>>>,
    /// Whether the shims of a process are asked for names.
    pub(crate) names: HashMap<u32, bool>,
}

/// Shared by the processor's thread and all that ask it.
#[derive(Default)]
pub(crate) struct ProcessorMailbox {
    state: Mutex<RecordingState>,
    requests: Mutex<ProcessorRequests>,
}

impl ProcessorMailbox {
    fn state(&self) -> MutexGuard<'_, RecordingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn requests(&self) -> MutexGuard<'_, ProcessorRequests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory is short.
    pub(crate) fn request_shed(&self) {
        self.requests().shed = true;
    }

    /// The stacks of a window may take so many bytes.
    pub(crate) fn request_stacks(&self, bytes: u64) {
        self.requests().stacks = Some(bytes);
    }

    /// The shims of `pid` are to be asked for names, or not.
    pub(crate) fn request_names(&self, pid: u32, names: bool) {
        self.requests().names.insert(pid, names);
    }

    /// Somebody wants to know how the processes stand. False when too many do.
    pub(crate) fn request_standings(&self, answer: SyncSender<Vec<ProcessStatus>>) -> bool {
        let mut requests = self.requests();
        let has_room = requests.standings.len() < MAX_STANDINGS;
        if has_room {
            requests.standings.push(answer);
        }
        has_room
    }

    /// Takes all requests.
    pub(crate) fn take_requests(&self) -> ProcessorRequests {
        std::mem::take(&mut *self.requests())
    }

    /// The processor's counters are these.
    pub(crate) fn publish_counters(&self, counters: Vec<(String, u64)>) {
        self.state().counters = counters;
    }

    /// These processes run a CLR, and the window's stacks have taken so much of their memory.
    pub(crate) fn publish(&self, managed: Vec<ManagedProcess>, stacks_fill: f64) {
        let mut state = self.state();
        (state.managed, state.stacks_fill) = (managed, stacks_fill);
    }

    /// The processor's counters.
    pub(crate) fn counters(&self) -> Vec<(String, u64)> {
        self.state().counters.clone()
    }

    /// The processes that run a CLR.
    pub(crate) fn managed(&self) -> Vec<ManagedProcess> {
        self.state().managed.clone()
    }

    /// How much of its memory for stacks the window in progress has taken.
    pub(crate) fn stacks_fill(&self) -> f64 {
        self.state().stacks_fill
    }
}
