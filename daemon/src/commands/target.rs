//! Processes that commands are pointed at: refused with the reason where they cannot be recorded.

use crate::error::Error;
use perfusion_dotnet::attach::policy::{self, AttachObstacle};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::{name, ticks_before_now};
use perfusion_recorder::follow::GROWS_UP;
use rustix::io::Errno;
use std::time::Duration;

/// How often ended targets are looked for; nothing reports the end of a process that is not a child
/// without its help.
const LOOK: Duration = Duration::from_millis(100);

/// Refuses what is no process.
pub(super) fn check_target(pid: u32) -> Result<(), Error> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
        .map_err(|_| Error::NoProcess { pid })?;
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
    let target = ProcessHandle::open(pid).map_err(|_| Error::NoProcess { pid })?;
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
        let seen = policy::inspect(target, None).map_err(|_| Error::NoProcess { pid })?;
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
