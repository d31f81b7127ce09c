//! The stacks of threads that sleep: an iterator over tasks takes them, for threads that slept
//! before the recording and for waits whose stack was not kept.

use super::counters::KernelCounters;
use super::task_iterator::TaskScanner;
use aya::Ebpf;
use aya::programs::ProgramError;
use ebpf_common::counter::Counter;
use perfusion_host::system_limits::explain;
use perfusion_model::event::MonotonicNs;
use std::time::Duration;

/// The scans of off-CPU threads.
pub(super) struct OffCpuScans {
    /// `None` when the kernel cannot show sleeping threads.
    scanner: Option<TaskScanner>,
    /// Why it cannot.
    lack: Option<String>,
    /// Threads deferred so far.
    deferred: u64,
    /// Whether the last scan left somebody to the next one.
    left_out: bool,
}

impl OffCpuScans {
    /// Scans by the iterator that was loaded, or none.
    pub(super) fn start(bpf: &mut Ebpf, loaded: Result<(), ProgramError>) -> Self {
        let scanner = loaded.map_err(|error| lack_of_scans(&error));
        let scanner =
            scanner.and_then(|()| TaskScanner::start(bpf).map_err(|error| explain(&error)));
        let lack = scanner.as_ref().err().cloned();
        Self { scanner: scanner.ok(), lack, deferred: 0, left_out: false }
    }

    /// Says so where the kernel cannot show sleeping threads.
    pub(super) fn report_lack(&self, counters: &KernelCounters) {
        if let Some(lack) = &self.lack {
            tracing::warn!(
                "threads that sleep all the time will have no stack: the kernel does not show \
                 them: {lack}"
            );
            counters.add(Counter::ScansRefused, 1);
        }
    }

    /// Why threads that sleep all the time have no stacks, if the kernel cannot show them.
    pub(super) fn lack(&self) -> Option<&str> {
        self.lack.as_deref()
    }

    /// Whether the last scan left threads to the next one, for want of room in the ring.
    pub(super) fn has_left_out(&self) -> bool {
        self.left_out
    }

    /// How often all sleeping threads have been scanned.
    pub(super) fn count(&self) -> u64 {
        self.scanner.as_ref().map_or(0, TaskScanner::count)
    }

    /// Makes the next scan due now.
    pub(super) fn hurry(&mut self) {
        if let Some(scanner) = &mut self.scanner {
            scanner.hurry();
        }
    }

    /// Lets the iterator run when it is time.
    pub(super) fn scan(&mut self, bpf: &mut Ebpf, counters: &KernelCounters) {
        let now = MonotonicNs::now().0;
        let Some(scanner) = &mut self.scanner else { return };
        if scanner.ended(Duration::ZERO) {
            let deferred = counters.of_probes(Counter::OffCpuDeferred);
            self.left_out = deferred != std::mem::replace(&mut self.deferred, deferred);
            scanner.left_out(self.left_out, now);
            return;
        }
        if let Some(pid) = scanner.held_up_by(now) {
            let news = scanner.is_news();
            counters.add(Counter::ScansHeld, 1);
            if news {
                tracing::warn!(
                    pid,
                    "reading the stack of a sleeping thread takes more than a second: it seems to \
                     lie in a file whose file system does not answer. \
                     The process's sleeping threads get no stacks from now on, and neither do \
                     those of others that do so"
                );
            }
            return;
        }
        if scanner.is_due(now)
            && let Err(why) = scanner.begin(bpf, now)
        {
            if scanner.is_news() {
                tracing::warn!(
                    "threads that sleep all the time get no stacks for now: {}",
                    explain(&why)
                );
            }
            counters.add(Counter::ScansRefused, 1);
        }
    }

    /// Goes on with the last scan of a recording. False when it is over, or cannot be; `begun` says
    /// whether it was begun before.
    pub(super) fn scan_last(&mut self, bpf: &mut Ebpf, begun: &mut bool) -> bool {
        let Some(scanner) = &mut self.scanner else { return false };
        if !scanner.is_scanning() {
            if *begun || scanner.begin(bpf, MonotonicNs::now().0).is_err() {
                return false;
            }
            *begun = true;
        }
        scanner.ended(Duration::from_millis(1));
        true
    }
}

/// What the kernel answered to the iterator, in words where its age says it.
fn lack_of_scans(error: &ProgramError) -> String {
    let release = crate::kernel::features::without_scans();
    release.map_or_else(
        || explain(error),
        |release| format!("this is Linux {release}; it takes Linux 5.18 or newer"),
    )
}
