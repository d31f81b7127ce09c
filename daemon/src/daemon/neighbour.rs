//! The daemon as a good neighbour: what it observes comes first. It lowers itself when it starts, whoever starts it; systemd's unit says the same once
//! more, for what happens before.

use super::ioprio;
use rustix::process::{getpriority_process, setpriority_process};
use std::fs;
use std::io;

/// When the host is short of memory, services go after the profiler: of 1000, as in `packaging/perfusion.service`. The kubelet gives most pods more.
const OOM_SCORE_ADJ: i32 = 500;
/// A third of the weight of a thread with nice 0. It is not more, because the collector must come to the rings before they are full: it needs
/// some hundredths of a CPU, every 20 ms, and what the rings hold lasts a second. With a third of a CPU it gets there in time; at nice 19, a
/// seventieth, the budget of `limits.cpu` could not be had on a busy machine, and samples would be lost just there. Between cgroups nice counts for
/// nothing: there it is the cgroup's weight, which its unit or pod has.
const NICE: i32 = 5;
const OWN_OOM_SCORE_ADJ: &str = "/proc/self/oom_score_adj";

/// Lowers this process and the threads it makes from now on, where they are not as low or lower. Nothing of it needs a capability. What cannot be
/// had is said, and everything else goes on.
pub(super) fn step_back() {
    for (what, done) in
        [("oom_score_adj", oom_score()), ("nice", nice()), ("I/O priority", ioprio::step_back())]
    {
        if let Err(error) = done {
            tracing::warn!(%error, "{what} stays as it is");
        }
    }
}

fn oom_score() -> io::Result<()> {
    let now: i32 = fs::read_to_string(OWN_OOM_SCORE_ADJ)?.trim().parse().map_err(io::Error::other)?;
    if now < OOM_SCORE_ADJ {
        fs::write(OWN_OOM_SCORE_ADJ, OOM_SCORE_ADJ.to_string())?;
    }
    Ok(())
}

fn nice() -> io::Result<()> {
    if getpriority_process(None)? < NICE {
        setpriority_process(None, NICE)?;
    }
    Ok(())
}
