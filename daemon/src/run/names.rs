//! Names of threads by tid: the runtime's where it gave one, else the kernel's.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A command name without its padding.
#[must_use]
pub fn comm_text(comm: &[u8; 16]) -> Cow<'_, str> {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..end])
}

/// Names of all threads of a recording. A thread's id that is used again takes the new thread's name.
#[derive(Default)]
pub struct ThreadNames {
    kernel: HashMap<u32, Arc<str>>,
    managed: HashMap<u32, Arc<str>>,
}

impl ThreadNames {
    /// The kernel's name of `tid`.
    pub fn kernel(&mut self, tid: u32, name: &str) {
        if self.kernel.get(&tid).is_none_or(|known| **known != *name) {
            self.kernel.insert(tid, name.into());
        }
    }

    /// The runtime's name of `tid`: not cut to 15 bytes.
    pub fn managed(&mut self, tid: u32, name: String) {
        self.managed.insert(tid, name.into());
    }

    /// The thread is gone, or another program; its kernel name stays for its rows until the id is used again, its managed one would be wrong then.
    pub fn forked(&mut self, tid: u32) {
        self.managed.remove(&tid);
    }

    /// Forgets all threads but these.
    pub fn keep(&mut self, alive: &HashSet<u32>) {
        self.kernel.retain(|tid, _| alive.contains(tid));
        self.managed.retain(|tid, _| alive.contains(tid));
    }

    /// What the kernel calls it; tells the runtime's own threads.
    #[must_use]
    pub fn comm(&self, tid: u32) -> &str {
        self.kernel.get(&tid).map_or("", |name| name)
    }

    /// What to show.
    #[must_use]
    pub fn shown(&self, tid: u32) -> Option<Arc<str>> {
        self.managed.get(&tid).or_else(|| self.kernel.get(&tid)).cloned()
    }
}
