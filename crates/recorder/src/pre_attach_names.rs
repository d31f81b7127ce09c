//! Names of managed threads that are older than the attach, where the kernel has kept a part of
//! them only.

use super::names::{ThreadNames, is_cut_of};
use foldhash::HashMap;
use perfusion_host::process::managed_thread::{self, UnnamedThread};
use perfusion_model::event::ThreadId;
use perfusion_model::text::whole_text;

/// Most threads of all processes that wait to be looked at: a shim lists 4096 of its process.
const MOST: usize = 1 << 16;

/// Threads that shims have listed, with where their runtimes have them, by process.
#[derive(Default)]
pub(super) struct PreAttachNames {
    threads: HashMap<u32, Vec<(u32, u64)>>,
    count: usize,
}

impl PreAttachNames {
    /// The shim in its process says that the runtime has the thread at `address`.
    pub(super) fn add(&mut self, thread: ThreadId, address: u64) {
        if self.count < MOST {
            self.threads.entry(thread.pid).or_default().push((thread.tid, address));
            self.count += 1;
        }
    }

    /// Reads the names of those that came since the last call from their processes, as far as the
    /// kernel's may be cut.
    pub(super) fn read(&mut self, names: &mut ThreadNames) {
        self.count = 0;
        for (pid, threads) in self.threads.drain() {
            let Some(start_ticks) = perfusion_host::process::start_ticks(pid) else { continue };
            let mut wanted = Vec::new();
            for (tid, address) in threads {
                let thread = ThreadId { pid, tid };
                if names.comm(tid).is_empty()
                    && let Ok(comm) = std::fs::read(format!("/proc/{pid}/task/{tid}/comm"))
                {
                    names.kernel(tid, &whole_text(comm.strip_suffix(b"\n").unwrap_or(&comm)));
                }
                if names.may_be_cut(thread) {
                    wanted.push(UnnamedThread { tid, address, comm: names.comm(tid).to_owned() });
                }
            }
            if wanted.is_empty() {
                continue;
            }
            for (tid, name) in managed_thread::names(pid, start_ticks, wanted, is_cut_of) {
                // No other name than before: the rest of it.
                let _before = names.managed(ThreadId { pid, tid }, &name);
            }
        }
    }
}
