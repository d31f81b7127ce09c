//! Processes that commands are pointed at: refused with the reason where they cannot be recorded.

use crate::error::Error;
use perfusion_dotnet::attach::policy::{self, AttachObstacle};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::seed::is_gone;
use perfusion_host::process::{is_hidden, name, ticks_before_now};
use perfusion_recorder::follow::GROWS_UP;
use rustix::io::Errno;
use std::io;
use std::time::Duration;

/// How often ended targets are looked for; nothing reports the end of a process that is not a child
/// without its help.
const LOOK: Duration = Duration::from_millis(100);

/// Takes hold of a process.
pub(super) fn open_target(pid: u32) -> Result<ProcessHandle, Error> {
    ProcessHandle::open(pid).map_err(|error| unopened(pid, error.into()))
}

/// Why nothing can be read of a process: only some errors mean that there is none.
fn unopened(pid: u32, source: io::Error) -> Error {
    // What `hidepid=1` answers (proc_pid_permission, fs/proc/base.c); a higher one says ENOENT.
    let is_refused = source.raw_os_error() == Some(Errno::PERM.raw_os_error());
    match is_gone(&source) {
        true if is_hidden(pid) => Error::Hidden { pid },
        true => Error::NoProcess { pid },
        false if is_refused => Error::Hidden { pid },
        false => Error::ProcessUnreadable { pid, source },
    }
}

/// Refuses what is no process.
pub(super) fn check_target(pid: u32) -> Result<(), Error> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
        .map_err(|source| unopened(pid, source))?;
    // /proc/TID exists for every thread, though it is not listed.
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    match field("Tgid:").and_then(|id| id.parse().ok()) {
        Some(process) if process != pid => Err(Error::IsThread { tid: pid, pid: process }),
        _ if field("State:").is_some_and(|state| state.starts_with(['Z', 'X']))
            && perfusion_host::process::living_thread(pid).is_none() =>
        {
            Err(Error::Zombie { pid })
        }
        _ => Ok(()),
    }
}

/// Refuses a process in which nothing would have a name: a thread of the kernel, which has no
/// memory of its own, and one at which the kernel does not let this program look, whatever its
/// capabilities (`ptrace_may_access`, kernel/ptrace.c).
pub(super) fn check_seen(pid: u32) -> Result<(), Error> {
    let target = open_target(pid)?;
    let name = || name::of(&target);
    if target.is_kernel_thread() {
        return Err(Error::KernelThread { pid, name: name() });
    }
    match target.maps(|_| false) {
        Err(error @ (Errno::ACCESS | Errno::PERM)) => {
            Err(Error::Unseen { pid, name: name(), source: error.into() })
        }
        // One that has just ended is found to be gone where the recording begins.
        _ => Ok(()),
    }
}

/// Refuses what has no runtime that could be asked about managed memory, before anything is said or
/// done. Answers what else is in the way, if anything is. One that has just started has some
/// seconds to become what it will be.
pub(super) fn check_managed(target: &ProcessHandle) -> Result<Option<AttachObstacle>, Error> {
    let pid = target.pid();
    let is_young =
        || target.start_ticks().is_ok_and(|started| started >= ticks_before_now(GROWS_UP));
    let seen = loop {
        let seen = policy::inspect(target, None).map_err(|error| unopened(pid, error.into()))?;
        if !matches!(seen.why_not, Some(AttachObstacle::NotDotnet | AttachObstacle::NoSocket(_)))
            || !is_young()
        {
            break seen;
        }
        std::thread::sleep(LOOK);
    };
    match (seen.runtime, seen.why_not) {
        (
            policy::DetectedRuntime::Native
            | policy::DetectedRuntime::NativeAot
            | policy::DetectedRuntime::Unseen,
            Some(why),
        ) => Err(Error::NotManaged { pid, name: name::of(target), why }),
        (_, why_not) => Ok(why_not),
    }
}

#[cfg(test)]
mod tests {
    use super::{Errno, Error, unopened};

    #[test]
    fn only_an_error_that_says_so_means_that_there_is_no_process() {
        // No pid is as high (PID_MAX_LIMIT, linux/threads.h).
        let pid = 1 << 23;
        for gone in [Errno::NOENT, Errno::SRCH] {
            assert!(matches!(unopened(pid, gone.into()), Error::NoProcess { .. }));
        }
        assert!(matches!(unopened(pid, Errno::PERM.into()), Error::Hidden { .. }));
        for unknown in [Errno::MFILE, Errno::ACCESS, Errno::NOMEM] {
            let error = unopened(pid, unknown.into());
            assert!(matches!(error, Error::ProcessUnreadable { .. }), "{error}");
        }
    }
}
