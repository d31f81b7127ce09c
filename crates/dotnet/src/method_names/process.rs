//! Names of the methods of one process, read by threads that the process may hold up.

use super::{NamedMethod, NoName, RuntimeNames, UnnamedCode};
use crate::data_descriptor::{ProcessMemoryFile, runtime_base};
use perfusion_host::process::guarded_io::{IoPeer, wait_for};
use perfusion_host::process::handle::ProcessHandle;
use std::sync::Arc;

/// Most names read in one go.
const AT_ONCE: usize = 128;

/// The reader of one process.
pub struct ProcessMethodNames {
    pid: u32,
    memory: Arc<ProcessMemoryFile>,
    /// `None` once the process held a reading up.
    names: Option<RuntimeNames>,
}

impl ProcessMethodNames {
    /// Of the process that has this pid since `start_ticks`; `None` when it is gone, or has no
    /// runtime.
    #[must_use]
    pub fn open(pid: u32, start_ticks: u64) -> Option<Self> {
        let target = ProcessHandle::open(pid).ok()?;
        if target.start_ticks() != Ok(start_ticks) {
            return None;
        }
        let memory = target.file(&target.in_common("mem")).ok()?;
        let memory = Arc::new(ProcessMemoryFile(memory));
        let base = runtime_base(&target)?;
        let reader = Arc::clone(&memory);
        let names = wait_for(IoPeer::Process(pid), move || RuntimeNames::of(&reader, base))?;
        Some(Self { pid, memory, names: Some(names) })
    }

    /// Names of these codes, in their order. The first that is missing was held up, and all behind
    /// it.
    pub fn read(&mut self, codes: &[UnnamedCode]) -> Vec<Result<NamedMethod, NoName>> {
        let mut all = Vec::new();
        for part in codes.chunks(AT_ONCE) {
            let Some(mut names) = self.names.take() else { break };
            let (memory, part) = (Arc::clone(&self.memory), part.to_vec());
            let read = wait_for(IoPeer::Process(self.pid), move || {
                let found = names.names(&*memory, &part);
                (names, found)
            });
            let Some((names, found)) = read else { break };
            self.names = Some(names);
            all.extend(found);
        }
        all
    }

    /// Bytes that are kept of modules.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.names.as_ref().map_or(0, RuntimeNames::kept_bytes)
    }

    /// Forgets what was read of modules.
    pub fn forget_modules(&mut self) {
        if let Some(names) = &mut self.names {
            names.forget_modules();
        }
    }
}
