//! Programs that processes were before `execve`: what ran in them bears their names, not those of
//! what came after.

use perfusion_model::event::{MonotonicNs, RegionId, ThreadId};
use perfusion_model::frame::ProcessId;
use perfusion_model::labels::Labels;
use std::collections::HashMap;
use std::sync::Arc;

/// Most processes whose last program is remembered. The ends of its threads come within the delay
/// between the rings.
const MAX_PROCESSES: usize = 16_384;

/// What a process was.
pub(super) struct RetiredProgram {
    pub(super) pid: u32,
    /// It ceased to be that program at this time.
    pub(super) at: MonotonicNs,
    /// The process table's id for it.
    pub(super) process: Option<ProcessId>,
    /// Labels of its first thread.
    pub(super) labels: Labels,
}

impl RetiredProgram {
    /// Makes labels of today those of a thread of the retired program. Only the first thread's id
    /// goes on to be used.
    pub(super) fn relabel(&self, labels: &mut Labels, thread: ThreadId) {
        labels.service.clone_from(&self.labels.service);
        labels.process.clone_from(&self.labels.process);
        labels.container_id.clone_from(&self.labels.container_id);
        labels.pod.clone_from(&self.labels.pod);
        labels.published.clone_from(&self.labels.published);
        if thread.tid == thread.pid {
            labels.thread_name.clone_from(&self.labels.thread_name);
            labels.thread_role = self.labels.thread_role;
            labels.role_evidence.clone_from(&self.labels.role_evidence);
        }
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct RetiredPrograms {
    /// The last one of each process.
    processes: HashMap<u32, Arc<RetiredProgram>>,
    /// The program that each CLR was in. There are no more of them than CLRs.
    regions: HashMap<RegionId, Arc<RetiredProgram>>,
}

impl RetiredPrograms {
    /// A process has become another program.
    pub(super) fn retire(&mut self, retired: RetiredProgram, regions: &[RegionId]) {
        if self.processes.len() >= MAX_PROCESSES {
            self.processes.clear();
        }
        let retired = Arc::new(retired);
        for &region in regions {
            self.regions.entry(region).or_insert_with(|| Arc::clone(&retired));
        }
        self.processes.insert(retired.pid, retired);
    }

    /// Nothing more comes of this CLR.
    pub(super) fn forget(&mut self, region: RegionId) {
        self.regions.remove(&region);
    }

    /// A thread has ended: threads of a program that comes later with its process's id are not of
    /// what that was.
    pub(super) fn exited(&mut self, thread: ThreadId) {
        if thread.tid == thread.pid {
            self.processes.remove(&thread.pid);
        }
    }

    /// The program a thread was of that entered the recording at `since`, unless its process is
    /// still that.
    pub(super) fn of_thread(
        &self,
        thread: ThreadId,
        since: MonotonicNs,
    ) -> Option<&RetiredProgram> {
        self.processes
            .get(&thread.pid)
            .map(|retired| &**retired)
            .filter(|retired| since < retired.at)
    }

    /// The program a CLR was in, unless its process is still that.
    pub(super) fn of_region(&self, region: RegionId) -> Option<&RetiredProgram> {
        self.regions.get(&region).map(|retired| &**retired)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(process: &str) -> Labels {
        Labels {
            process: Some(process.into()),
            thread_name: Some(process.into()),
            thread_role: Some("app"),
            ..Labels::default()
        }
    }

    fn retired(pid: u32, at: u64) -> RetiredProgram {
        RetiredProgram {
            pid,
            at: MonotonicNs(at),
            process: Some(ProcessId(3)),
            labels: labels("before"),
        }
    }

    #[test]
    fn threads_and_runtimes_from_before_an_exec_bear_the_retired_programs_name() {
        let mut programs = RetiredPrograms::default();
        programs.retire(retired(7, 100), &[RegionId(1)]);
        let (first, other) = (ThreadId { pid: 7, tid: 7 }, ThreadId { pid: 7, tid: 8 });
        let relabelled = |retired: &RetiredProgram, thread| {
            let mut today = labels("after");
            retired.relabel(&mut today, thread);
            (today.process.unwrap().to_string(), today.thread_name.unwrap().to_string())
        };
        let was = programs.of_thread(first, MonotonicNs(99)).unwrap();
        assert_eq!(relabelled(was, first), ("before".to_owned(), "before".to_owned()));
        assert_eq!(
            relabelled(was, other),
            ("before".to_owned(), "after".to_owned()),
            "its id is nobody else's"
        );
        assert!(programs.of_thread(first, MonotonicNs(100)).is_none());
        assert!(programs.of_thread(ThreadId { pid: 9, tid: 9 }, MonotonicNs(1)).is_none());
        assert_eq!(programs.of_region(RegionId(1)).unwrap().process, Some(ProcessId(3)));
        assert!(programs.of_region(RegionId(2)).is_none());
    }

    #[test]
    fn a_process_that_ended_leaves_its_number_to_another_one() {
        let mut programs = RetiredPrograms::default();
        programs.retire(retired(7, 100), &[]);
        programs.exited(ThreadId { pid: 7, tid: 8 });
        assert!(programs.of_thread(ThreadId { pid: 7, tid: 8 }, MonotonicNs(1)).is_some());
        programs.exited(ThreadId { pid: 7, tid: 7 });
        assert!(programs.of_thread(ThreadId { pid: 7, tid: 8 }, MonotonicNs(1)).is_none());
    }

    #[test]
    fn very_many_processes_are_not_remembered() {
        let mut programs = RetiredPrograms::default();
        for pid in 0..2 * u32::try_from(MAX_PROCESSES).unwrap() + 1 {
            programs.retire(retired(pid, 1), &[]);
        }
        assert_eq!(programs.processes.len(), 1);
    }
}
