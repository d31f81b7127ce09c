//! The shim in the processes that are recorded: who gets it when, and what that takes.

use super::StatusLines;
use crate::memory_guard::AttachedProcesses;
use perfusion_host::process::{start_ticks, ticks_before_now};
use perfusion_recorder::RecordingHandle;
use perfusion_recorder::follow::{AttachEvent, AttachTargets, Follower};
use perfusion_sources::shim::{COLUMNS, NOT_ALL_RECORDED, ShimSettings};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An attach that takes longer is told of: a recording with a named process is that much longer
/// than it was asked to be.
pub(super) const LONG_ATTACH: Duration = Duration::from_millis(500);

/// Processes that ran when the recording began and got the shim well after that.
#[derive(Clone)]
pub(super) struct LateAttaches {
    began: Instant,
    /// The same in the kernel's ticks since the boot.
    began_ticks: u64,
    found: Arc<Mutex<Vec<(u32, Duration)>>>,
}

impl LateAttaches {
    pub(super) fn since(began: Instant) -> Self {
        Self { began, began_ticks: ticks_before_now(began.elapsed()), found: Arc::default() }
    }

    /// It has the shim from now on.
    fn attached(&self, pid: u32) {
        let (after, started) = (self.began.elapsed(), start_ticks(pid));
        if after > LONG_ATTACH && started.is_some_and(|started| started < self.began_ticks) {
            self.found.lock().unwrap_or_else(PoisonError::into_inner).push((pid, after));
        }
    }

    /// What the profile of so long has to say of it.
    pub(super) fn comments(&self, duration: Duration) -> Vec<String> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let comment = |(pid, after): &(u32, Duration)| {
            format!(
                "{COLUMNS}{NOT_ALL_RECORDED}the first {after:.1?} of process {pid}, which had no \
                 library then; rates are of all {duration:.1?}"
            )
        };
        found.iter().map(comment).collect()
    }
}

/// Keeps the shim in the .NET processes that are recorded.
pub(super) fn follow(
    whom: AttachTargets,
    settings: ShimSettings,
    watcher: RecordingHandle,
    (late, attached, say): (LateAttaches, AttachedProcesses, StatusLines),
) -> Follower {
    let pipeline = watcher.clone();
    Follower::start(whom, settings, pipeline, move |news| match news {
        AttachEvent::Attaching { pid } => attached.attaching(pid),
        AttachEvent::NotAsked { pid } => attached.not_asked(pid),
        AttachEvent::Attached { pid, runtime, took } => {
            tracing::info!(pid, runtime, ?took, "attached");
            watcher.watch(pid);
            late.attached(pid);
            if took > LONG_ATTACH {
                say.line(&format!("loading the shim into pid {pid} took {took:.1?}"));
            }
        }
        AttachEvent::Refused { expected: true, reason, .. } => {
            say.line(&format!("{}{reason}", perfusion_pprof::WITHOUT_SHIM));
        }
        // Most processes are no .NET ones: `ps` tells about each.
        AttachEvent::Refused { pid, expected: false, reason } => {
            tracing::debug!(pid, reason, "not attached")
        }
    })
}
