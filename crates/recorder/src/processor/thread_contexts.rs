//! When to look for the place where a process's threads publish what they work for.

use perfusion_host::process::ProcessTable;
use perfusion_host::process::thread_contexts::ThreadContextSchedule;
use std::collections::HashSet;
use std::time::Instant;

/// The look-ups of a recording whose stacks say what their threads worked for; none in others.
#[derive(Default)]
pub(super) struct ThreadContexts(Option<ThreadContextSchedule>);

impl ThreadContexts {
    /// Begins with none looked up, or looks up none where stacks are not to say it.
    pub(super) fn new(are_shown: bool) -> Self {
        Self(are_shown.then(ThreadContextSchedule::default))
    }

    /// Looks into a process, now and then.
    pub(super) fn look(&mut self, pid: u32, processes: &mut ProcessTable) {
        let (Some(schedule), Some(process)) = (&mut self.0, processes.id(pid)) else { return };
        let now = Instant::now();
        if schedule.is_due(pid, process, now) {
            let found = processes.find_spans(pid);
            if schedule.looked(pid, process, now, found) {
                processes.forget_spans(pid);
            }
        }
    }

    /// The probes had no room for what was found of `pid`.
    pub(super) fn refused(&mut self, pid: u32) {
        if let Some(schedule) = &mut self.0 {
            schedule.refused(pid, Instant::now());
        }
    }

    /// The process is another program, or gone.
    pub(super) fn forget(&mut self, pid: u32, processes: &mut ProcessTable) {
        if self.0.as_mut().is_some_and(|schedule| schedule.forget(pid)) {
            processes.forget_spans(pid);
        }
    }

    /// Forgets all processes but these.
    pub(super) fn keep(&mut self, pids: &HashSet<u32>, processes: &mut ProcessTable) {
        for pid in self.0.iter_mut().flat_map(|schedule| schedule.keep(pids)) {
            processes.forget_spans(pid);
        }
    }
}
