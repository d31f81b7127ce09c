//! Names of threads by tid: the runtime's where it gave one, else the kernel's.

use crate::source::ThreadId;
use foldhash::HashMap;
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

/// A command name without its padding.
#[must_use]
pub fn comm_text(comm: &[u8; 16]) -> Cow<'_, str> {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    String::from_utf8_lossy(&comm[..end])
}

/// What the kernel calls a thread.
struct Kernel {
    name: Arc<str>,
    /// Its name before, where no record has told of the new one yet.
    told: Option<Arc<str>>,
}

/// Names of all threads of a recording. A thread's id that is used again takes the new thread's name.
#[derive(Default)]
pub struct ThreadNames {
    kernel: HashMap<u32, Kernel>,
    /// With the process whose runtime said so: of a thread whose id is another process's by now it says nothing.
    managed: HashMap<u32, (u32, Arc<str>)>,
}

impl ThreadNames {
    /// The kernel's name of `tid` as a record tells it.
    pub fn kernel(&mut self, tid: u32, name: &str) {
        match self.kernel.get_mut(&tid) {
            Some(known) if *known.name == *name => known.told = None,
            _ => drop(self.kernel.insert(tid, Kernel { name: name.into(), told: None })),
        }
    }

    /// The kernel's name of `tid` where it was sampled.
    pub fn sampled(&mut self, tid: u32, name: &str) {
        match self.kernel.get_mut(&tid) {
            Some(known) if *known.name == *name => {}
            Some(known) => {
                let before = std::mem::replace(&mut known.name, name.into());
                known.told.get_or_insert(before);
            }
            None => drop(self.kernel.insert(tid, Kernel { name: name.into(), told: None })),
        }
    }

    /// The thread is about to become another program, which the kernel calls `name`: that is not what it was called until now. A sample may have
    /// met it under that name already, for the kernel gives it before it tells of it (`begin_new_exec`, fs/exec.c).
    pub fn becomes(&mut self, tid: u32, name: &str) {
        if let Some(known) = self.kernel.get_mut(&tid).filter(|known| *known.name == *name)
            && let Some(told) = known.told.take()
        {
            known.name = told;
        }
    }

    /// The runtime's name of its `thread`: not cut to 15 bytes.
    pub fn managed(&mut self, thread: ThreadId, name: String) {
        self.managed.insert(thread.tid, (thread.pid, name.into()));
    }

    /// `tid` is a new thread's, made by the thread `parent`, whose name it has until it takes another (`dup_task_struct`, kernel/fork.c): one that
    /// ends before it is sampled tells no other.
    pub fn forked(&mut self, parent: u32, tid: u32) {
        self.managed.remove(&tid);
        if let Some(name) = self.kernel.get(&parent).map(|known| Arc::clone(&known.name)) {
            self.kernel.insert(tid, Kernel { name, told: None });
        }
    }

    /// The thread has become another program, which the kernel calls `name`.
    pub fn became(&mut self, tid: u32, name: &str) {
        self.managed.remove(&tid);
        self.kernel(tid, name);
    }

    /// Forgets all threads but these.
    pub fn keep(&mut self, alive: &HashSet<u32>) {
        self.kernel.retain(|tid, _| alive.contains(tid));
        self.managed.retain(|tid, _| alive.contains(tid));
    }

    /// What the kernel calls it; tells the runtime's own threads.
    #[must_use]
    pub fn comm(&self, tid: u32) -> &str {
        self.kernel.get(&tid).map_or("", |known| &known.name)
    }

    /// What to show.
    #[must_use]
    pub fn shown(&self, thread: ThreadId) -> Option<Arc<str>> {
        let managed = self.managed.get(&thread.tid).filter(|(pid, _)| *pid == thread.pid);
        managed
            .map(|(_, name)| name)
            .or_else(|| self.kernel.get(&thread.tid).map(|known| &known.name))
            .cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::ThreadNames;
    use crate::source::ThreadId;

    fn thread(tid: u32) -> ThreadId {
        ThreadId { pid: 7, tid }
    }

    #[test]
    fn a_new_thread_has_its_makers_name_until_it_has_its_own() {
        let mut names = ThreadNames::default();
        names.kernel(7, "maker");
        names.kernel(8, "who had this id before");
        names.managed(thread(8), "and was managed".to_owned());
        names.forked(7, 8);
        let shown = |names: &ThreadNames, tid| names.shown(thread(tid)).map(|name| name.to_string());
        assert_eq!(shown(&names, 8).as_deref(), Some("maker"));
        names.kernel(8, "own");
        assert_eq!((shown(&names, 7).as_deref(), shown(&names, 8).as_deref()), (Some("maker"), Some("own")));
        names.became(8, "program");
        assert_eq!(shown(&names, 8).as_deref(), Some("program"));
        // Of a maker nobody knows nothing is known.
        names.forked(9, 10);
        assert_eq!(shown(&names, 10), None);
    }

    #[test]
    fn a_runtime_names_no_thread_of_another_process() {
        let mut names = ThreadNames::default();
        names.kernel(8, "kernel's");
        names.managed(ThreadId { pid: 6, tid: 8 }, "of one that had a thread with this id".to_owned());
        assert_eq!(names.shown(thread(8)).as_deref(), Some("kernel's"));
        names.managed(thread(8), "own".to_owned());
        assert_eq!(names.shown(thread(8)).as_deref(), Some("own"));
    }

    #[test]
    fn a_sample_between_a_programs_naming_and_its_record_does_not_rename_what_was() {
        let mut names = ThreadNames::default();
        let shown = |names: &ThreadNames| names.shown(thread(8)).map(|name| name.to_string());
        names.sampled(8, "before");
        names.sampled(8, "after");
        assert_eq!(shown(&names).as_deref(), Some("after"));
        names.becomes(8, "after");
        assert_eq!(shown(&names).as_deref(), Some("before"));
        names.became(8, "after");
        assert_eq!(shown(&names).as_deref(), Some("after"));
        // It had taken that name itself.
        names.sampled(8, "renamed");
        names.kernel(8, "renamed");
        names.becomes(8, "renamed");
        assert_eq!(shown(&names).as_deref(), Some("renamed"));
    }
}
