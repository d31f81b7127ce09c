//! The functions in which the threads of a recording began, by their stacks.

use foldhash::HashMap;
use perfusion_model::event::ThreadId;
use perfusion_model::frame::FrameKey;
use perfusion_model::thread_role::{
    RoleEvidence, START_METHODS, StartFile, StartMethods, ThreadStart,
};
use perfusion_symbolize::{SymbolModule, Symbolizer};
use std::collections::HashSet;
use std::sync::Arc;

/// Where each thread began, by its id, as far as a whole stack has shown it.
#[derive(Default)]
pub(super) struct ThreadStarts(HashMap<u32, (u32, ThreadStart)>);

impl ThreadStarts {
    /// A walk has followed the stack of `thread` to its start without a guess. `file` says which
    /// sort of file the native frame is in, see [`StartFile::of`].
    pub(super) fn saw(
        &mut self,
        thread: ThreadId,
        frames: &[FrameKey],
        file: impl Fn(FrameKey) -> Option<StartFile>,
    ) {
        let is_managed = |frame: &FrameKey| matches!(frame, FrameKey::Managed { .. });
        let known = self.0.get_mut(&thread.tid).filter(|(pid, _)| *pid == thread.pid);
        // Nothing more is to be learnt of nearly all.
        if known.as_ref().is_some_and(|(_, start)| start.is_known()) {
            return;
        }
        let methods = frames.iter().rev().filter(|frame| is_managed(frame)).take(START_METHODS);
        let methods: Vec<FrameKey> = methods.copied().collect();
        if let Some((_, start)) = known {
            start.saw(methods);
            return;
        }
        let outside = frames.iter().rev().take_while(|frame| !is_managed(frame));
        let Some(file) = outside.copied().find_map(file) else { return };
        let mut start = ThreadStart { file, was_native: false, methods: StartMethods::None };
        start.saw(methods);
        self.0.insert(thread.tid, (thread.pid, start));
    }

    /// What says what a thread is for that the kernel calls `comm`.
    pub(super) fn evidence(
        &self,
        thread: ThreadId,
        comm: &str,
        runtime_in_program: bool,
    ) -> RoleEvidence {
        let start = self.0.get(&thread.tid).filter(|(pid, _)| *pid == thread.pid);
        // The first thread is the program's, and the runtime may be in the program.
        let runtime_in_program = runtime_in_program && thread.pid != thread.tid;
        RoleEvidence::new(comm, start.map(|(_, start)| start.clone()), runtime_in_program)
    }

    /// The methods that are to be named.
    pub(super) fn unnamed(&self) -> impl Iterator<Item = FrameKey> {
        self.0.values().flat_map(|(_, start)| start.unnamed()).copied()
    }

    /// Takes up the names that methods have by now.
    pub(super) fn name(&mut self, symbolizer: &Symbolizer) {
        for (_, start) in self.0.values_mut() {
            start.name(|frame| named(symbolizer, frame));
        }
    }

    /// The id is a new thread's, or a new program's.
    pub(super) fn forget(&mut self, tid: u32) {
        self.0.remove(&tid);
    }

    /// Forgets all threads but these.
    pub(super) fn keep(&mut self, alive: &HashSet<u32>) {
        self.0.retain(|tid, _| alive.contains(tid));
    }
}

/// What a method is called, and the file of its module; `None` as long as that is not known.
pub(super) fn named(symbolizer: &Symbolizer, frame: FrameKey) -> Option<(Arc<str>, Arc<str>)> {
    let symbol = symbolizer.symbol(frame);
    match &symbol.module {
        SymbolModule::Managed(module) if symbol.unresolved.is_none() => {
            Some((Arc::clone(&symbol.system_name), Arc::clone(module)))
        }
        _ => None,
    }
}
