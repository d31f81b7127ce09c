//! The recording of a dump: it goes on until each thread was seen, or until nothing more is learnt.
//!
//! The kernel shows waiting threads scan by scan, as many in one as the ring has room for. A host
//! that is busy, or a process of many thousand threads, takes many scans. So there is no fixed
//! time: the scan goes on while it reaches threads it had not reached before.

use super::{ROUND, Session, ThreadDump, suspension};
use crate::error::say;
use perfusion_dotnet::attach::policy::AttachObstacle;
use perfusion_dotnet::attach::{AttachError, Attached};
use perfusion_host::system_limits::explain;
use perfusion_model::event::{MonotonicNs, ThreadProgress, ThreadSnapshot};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the runtime is given to load the shim. One that is stuck does not, and is what a dump
/// is taken for.
const ATTACH: Duration = Duration::from_secs(3);
/// How long threads that run are waited for, once the rest is known. Ten of the scheduler's ticks
/// at the least.
const RUNNING: Duration = Duration::from_millis(200);
/// How long a scan may go on without reaching anybody new: a process can keep its memory from being
/// read.
const STALLED: Duration = Duration::from_secs(3);
/// How long all of it may take: threads may begin to wait elsewhere as fast as they are reached.
const MOST: Duration = Duration::from_secs(60);
/// Time between two looks at how many threads are known, at least; a look asks the kernel about
/// each of them, and takes no more than a fifth of the time.
const LOOK: Duration = Duration::from_millis(25);
const LOOK_SHARE: u32 = 4;

/// Records until the shim is in and all threads were seen, or until there is no more progress. True
/// when the runtime did not answer.
pub(super) fn observe(
    session: &mut Session,
    pid: u32,
    mut attaching: Option<JoinHandle<Result<Attached, AttachError>>>,
    (give_up, quiet): (&AtomicBool, bool),
) -> bool {
    let mut silent = false;
    let begin = Instant::now();
    let (mut began, ticks) = (MonotonicNs::now(), perfusion_host::process::start_ticks(pid));
    let (mut most_known, mut progressed, mut looked, mut pause) = (0, begin, begin, LOOK);
    loop {
        session.round();
        if begin.elapsed() > ATTACH {
            // Pairs with the loads in `attach::ipc`; nothing else is told by it.
            give_up.store(true, Ordering::Relaxed);
        }
        if let Some(attach) = attaching.take_if(|attach| attach.is_finished()) {
            match attach.join() {
                Ok(Ok(_)) => {
                    session.shims.watch(pid);
                    // The shim may name what runs from here on.
                    began = MonotonicNs::now();
                }
                // Native code has its names without a shim.
                Ok(Err(AttachError::Unsuitable { why: AttachObstacle::NotDotnet, .. })) => {}
                Ok(Err(error)) => {
                    silent = suspension::is_silence(&error);
                    if !quiet {
                        say(&format!(
                            "pid {pid}: no shim, names are read from memory: {}",
                            explain(&error)
                        ));
                    }
                }
                Err(_) => {}
            }
            progressed = Instant::now();
        }
        if attaching.is_none() && looked.elapsed() >= pause {
            let look = Instant::now();
            let (known, all) = known(session, pid, began);
            looked = Instant::now();
            pause = LOOK.max(look.elapsed() * LOOK_SHARE);
            if known > most_known {
                (most_known, progressed) = (known, looked);
            }
            let scans = session.kernel.scans();
            tracing::debug!(known, all, took = ?look.elapsed(), scans, "threads");
            let scanned = session.kernel.scans() > 0;
            let whole = scanned && !session.kernel.has_left_out();
            let timeout = if whole { RUNNING } else { STALLED };
            if scanned && known == all || progressed.elapsed() > timeout || begin.elapsed() > MOST {
                return silent;
            }
            if !whole {
                session.kernel.hurry();
            }
        }
        if !perfusion_host::process::is_running(pid, ticks) {
            return silent;
        }
        std::thread::sleep(ROUND);
    }
}

/// Threads whose place is known, the stack of their present wait, or one of the time since `begin`
/// where they run; and all of them.
fn known(session: &mut Session, pid: u32, begin: MonotonicNs) -> (usize, usize) {
    let threads = session.processor.threads();
    let is_known = |snapshot: &&ThreadSnapshot| {
        let tid = snapshot.times.thread.tid;
        match snapshot.progress {
            ThreadProgress::OnCpu { .. } => {
                threads.last_run(tid).is_some_and(|(at, _)| at >= begin)
            }
            ThreadProgress::Waiting { start, .. } => {
                threads.waiting(tid).is_some_and(|wait| wait.start == start)
            }
        }
    };
    let mut snapshots = session.kernel.thread_times();
    snapshots.retain(|snapshot| snapshot.times.thread.pid == pid);
    (snapshots.iter().filter(is_known).count(), snapshots.len())
}

/// That some have no stack, in words.
pub(super) fn not_reached(dump: &ThreadDump) -> String {
    format!(
        "pid {}: {} of {} threads wait and were not reached: the scan of waiting threads made no \
         progress for {} s, or took {} s. \
         They have no stack; dump again when the host is less busy",
        dump.pid,
        dump.threads_not_reached,
        dump.threads.len(),
        STALLED.as_secs(),
        MOST.as_secs()
    )
}
