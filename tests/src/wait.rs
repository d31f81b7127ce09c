//! Waiting for conditions, and for child processes, with a deadline. The only `sleep` of the
//! harness is the poll interval here.

use std::io;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

/// How often a condition is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Polls `condition` until it gives a value, or fails with `what` when `deadline` has passed since
/// the call.
///
/// # Errors
/// Names `what` and the time waited.
pub fn wait_until<T>(
    what: &str,
    deadline: Duration,
    mut condition: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        anyhow::ensure!(start.elapsed() < deadline, "waited {deadline:?} in vain for {what}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Lets `duration` of the workload's own time pass: for tests whose *subject* is time (a leak that
/// ages, a minute before the profiler comes), never as a stand-in for a condition.
pub fn let_pass(duration: Duration) {
    thread::sleep(duration);
}

/// Waits for `child`; kills it when the deadline passes.
///
/// # Errors
/// When the deadline passed (the child is dead then) or waiting failed.
pub fn wait_for_exit(child: &mut Child, deadline: Duration) -> anyhow::Result<ExitStatus> {
    let waited = wait_until("a child process to exit", deadline, || child.try_wait().transpose());
    match waited {
        Ok(status) => Ok(status?),
        Err(error) => {
            kill(child)?;
            Err(error)
        }
    }
}

/// SIGKILL and reap.
///
/// # Errors
/// When it cannot be waited for.
pub fn kill(child: &mut Child) -> io::Result<()> {
    child.kill()?;
    child.wait().map(|_| ())
}
