//! The CPU time that the daemon spends on each process. Reading the thread's clock costs about as
//! much as handling an event. So a random part of the events is measured and stands for all.
//! Look-ups into files are always measured (`host::process::budget`) and are not counted here.

use perfusion_host::process::ProcessTable;
use perfusion_host::process::budget::cpu_time;
use perfusion_model::event::{Event, EventKind};
use std::time::Duration;

/// One event in so many is measured. The steps from one to the next are from 1 to 2 · EVERY - 1,
/// each as likely as the others.
const EVERY: u32 = 16;

/// Which event is measured next.
#[derive(Debug)]
pub(super) struct CostAttribution {
    left: u32,
    random: u64,
}

/// An event that is being measured, or only counted.
pub(super) struct MeasuredEvent {
    pid: u32,
    /// CPU time of this thread so far, and of it the look-ups for the process.
    at: Option<(Duration, Duration)>,
}

impl Default for CostAttribution {
    fn default() -> Self {
        // Chance only has to keep step with nothing.
        Self { left: EVERY, random: 0x9e37_79b9_7f4a_7c15 }
    }
}

impl CostAttribution {
    /// An event begins; `None` for one of no process.
    pub(super) fn begin(
        &mut self,
        event: &Event,
        processes: &ProcessTable,
    ) -> Option<MeasuredEvent> {
        let pid = pid(&event.kind)?;
        let at = self.is_due().then(|| (cpu_time(), processes.lookup_time(pid)));
        Some(MeasuredEvent { pid, at })
    }

    fn is_due(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return false;
        }
        // xorshift64.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let step = self.random % u64::from(2 * EVERY - 1);
        self.left = u32::try_from(step).unwrap_or(0) + 1;
        true
    }
}

impl MeasuredEvent {
    /// It is over.
    pub(super) fn end(self, processes: &mut ProcessTable) {
        let Self { pid, at } = self;
        let time = at.map_or(Duration::ZERO, |(before, looked_up)| {
            let lookups = processes.lookup_time(pid).saturating_sub(looked_up);
            cpu_time().saturating_sub(before).saturating_sub(lookups).saturating_mul(EVERY)
        });
        processes.handled(pid, time);
    }
}

/// The process an event is about.
fn pid(kind: &EventKind) -> Option<u32> {
    match kind {
        EventKind::CpuSample(sample) => Some(sample.thread.pid),
        EventKind::WaitStart(wait) => Some(wait.thread.pid),
        EventKind::OffCpu(found) => Some(found.thread.pid),
        // Whose stack is walked.
        EventKind::Wake(wake) => wake.by.as_ref().map(|by| by.thread.pid),
        EventKind::WaitEnd(end) => Some(end.thread.pid),
        EventKind::ThreadEnd(times) => Some(times.thread.pid),
        EventKind::Rename(rename) => Some(rename.thread.pid),
        EventKind::Exec { pid, .. } | EventKind::Shim { pid, .. } => Some(*pid),
        EventKind::Comm { thread, .. }
        | EventKind::Fork { thread, .. }
        | EventKind::Exit { thread } => Some(thread.pid),
        EventKind::Mmap(mmap) => Some(mmap.pid),
        EventKind::ProcessRecordsLost => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{CostAttribution, EVERY};

    #[test]
    fn one_in_sixteen_is_measured_and_in_step_with_nothing() {
        let mut cost = CostAttribution::default();
        let due: Vec<bool> = (0..1_600_000).map(|_| cost.is_due()).collect();
        let count =
            |of: usize, at: usize| due.iter().skip(at).step_by(of).filter(|due| **due).count();
        assert!((95_000..105_000).contains(&count(1, 0)), "{} of 100,000", count(1, 0));
        // Events of two processes in turn, and every sixteenth one, are measured as often as any.
        for at in 0..2 {
            assert!((47_000..53_000).contains(&count(2, at)), "{}", count(2, at));
        }
        for at in 0..16 {
            assert!((5_500..7_000).contains(&count(EVERY as usize, at)), "{}", count(16, at));
        }
    }
}
