//! The daemon as a good neighbour: what it observes comes first. It lowers itself when it starts,
//! whoever starts it; systemd's unit says part of it once more, for what happens before.

use crate::io_priority;
use rustix::process::{getpriority_process, setpriority_process};
use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// When the host is short of memory, services go after the profiler: of 1000, as in
/// `packaging/perfusion.service`. The kubelet gives most pods more.
const OOM_SCORE_ADJ: i32 = 500;
const OWN_OOM_SCORE_ADJ: &str = "/proc/self/oom_score_adj";
/// Of the threads that may wait: a tenth of the weight of others. Not of the collector, the
/// processor and what works for them, whose rings are full after a second: on a host with twenty
/// threads for each CPU, all in one cgroup, the processor got 1.21 s of CPU time in fifteen seconds
/// at nice 0, 1.03 at 1, 0.70 at 2 and 0.26 at 5, and what it did not get was lost, of the very
/// moment one would like to see. What these take is bounded by `limits.cpu` instead. Between
/// cgroups nice counts for nothing: there it is the cgroup's weight, which its unit or pod has.
const NICE: i32 = 10;

/// The daemon is to make way; nothing else in this program does.
static MAKES_WAY: AtomicBool = AtomicBool::new(false);

/// Lowers this process, and the priority of this thread and those it makes with the disk, where
/// they are not as low or lower. Threads that begin from now on may [`wait_for_others`]. Nothing of
/// it needs a capability. What cannot be had is said, and everything else goes on.
pub fn step_back() {
    MAKES_WAY.store(true, Ordering::Relaxed);
    for (what, done) in [("oom_score_adj", oom_score()), ("I/O priority", io_priority::step_back())]
    {
        if let Err(error) = done {
            tracing::warn!(%error, "{what} stays as it is");
        }
    }
}

/// This thread, and those it makes, are none of those that must come to their rings in time: the
/// daemon's, if it is to make way, let others go first.
pub fn wait_for_others() {
    if MAKES_WAY.load(Ordering::Relaxed)
        && let Err(error) = nice()
    {
        tracing::warn!(%error, "nice stays as it is");
    }
}

fn oom_score() -> io::Result<()> {
    let now: i32 =
        fs::read_to_string(OWN_OOM_SCORE_ADJ)?.trim().parse().map_err(io::Error::other)?;
    if now < OOM_SCORE_ADJ {
        fs::write(OWN_OOM_SCORE_ADJ, OOM_SCORE_ADJ.to_string())?;
    }
    Ok(())
}

/// On Linux nice is each thread's own.
fn nice() -> io::Result<()> {
    if getpriority_process(None)? < NICE {
        setpriority_process(None, NICE)?;
    }
    Ok(())
}
