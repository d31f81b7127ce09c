//! Brings the shim into a process and out of it again: [`attach()`] for a running one,
//! [`launch::launch`] for one that is about to start.
//! [`policy`] decides whether it can be done. [`shim_copy`] writes the shim where the process can
//! load it. [`ipc`] talks to its runtime. [`helper`] has the right to do both with other users'
//! processes where the daemon has not. Nothing here stops, signals or traces the process, and each
//! wait for it has a deadline. A file system may block a call for ever all the same: the daemon
//! abandons such an attach ([`workers`]).

pub mod helper;
pub mod hresult;
pub mod ipc;
mod ipc_error;
pub mod launch;
pub mod no_socket;
pub mod policy;
pub mod shim_copy;
pub mod shim_file;
mod socket;
mod trusted;
pub mod unusable_directory;
pub mod wait;
pub mod workers;

use self::ipc::{AttachProfiler, IpcError, RuntimeInfo};
use self::policy::{AttachObstacle, Inspection};
use self::wait::IpcTimeout;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::headroom::{Headroom, MemoryCgroups, mib};
use perfusion_sources::shim::ShimSettings;
use perfusion_sources::shim::finder;
use profiler_protocol::load::{CLASS_ID, client_data};
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A runtime that has just started needs this long at most before it listens.
const SOCKET_WAIT: Duration = Duration::from_secs(2);
/// A first event session takes up to 70 ms; an attach behind another profiler's detach waits up to
/// 5 s.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(15);
const WAIT_FOR_GC: Duration = Duration::from_secs(5);
const INFO_TIMEOUT: Duration = Duration::from_secs(2);
/// The region is mapped before the attach returns; this is for a machine that is overloaded.
const REGION_WAIT: Duration = Duration::from_secs(2);
/// Most memory that the shim takes in a process: its library, a region of 2.4 MiB, and what the
/// runtime allocates for its callbacks. It took 2.3 to 2.8 MiB of .NET 8 to 11; a process in which
/// 65,536 objects are watched has 1.5 MiB more.
pub(crate) const SHIM_BYTES: u64 = 8 << 20;
/// Between looks at something that has no notification.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Why the shim is not in the process.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// This binary has no shim inside.
    #[error("this perfusion was built without its shim: build it with `cargo xtask build`")]
    NoShim,
    /// Exact mode needs the one place there is.
    #[error(
        "--exact needs the place of the runtime's main profiler, and CORECLR_PROFILER={class} has \
         it: start the program without it (unset CORECLR_ENABLE_PROFILING)"
    )]
    OtherProfiler {
        /// Its class id.
        class: String,
    },
    /// No such process.
    #[error("no process {pid}")]
    NoSuchProcess {
        /// Asked for.
        pid: u32,
    },
    /// It ended meanwhile.
    #[error("process {pid} ended during the attach")]
    Ended {
        /// The process.
        pid: u32,
    },
    /// The shim would take memory that the process may not have.
    #[error(
        "process {pid}: the shim was not loaded: it takes up to {} of the process's memory, and \
         {headroom}. The kernel might kill or throttle \
         the process. Raise the limit, or use --force (`record`, `leaks`) to go on all the same",
        mib(SHIM_BYTES)
    )]
    NoHeadroom {
        /// The process.
        pid: u32,
        /// What there is.
        headroom: Box<Headroom>,
    },
    /// What the shim would write could not be read.
    #[error("process {pid}: {source}")]
    Unreadable {
        /// The process.
        pid: u32,
        /// What is lacking.
        source: perfusion_sources::kernel::features::FeatureLimit,
    },
    /// Something did not answer for as long as there is.
    #[error(
        "process {pid}: {what} takes too long: this machine has too much to do, or a file system \
         that the process uses does not answer; try again later"
    )]
    HeldUp {
        /// The process.
        pid: u32,
        /// What takes so long.
        what: String,
    },
    /// There is nobody to do it.
    #[error("process {pid}: no thread for the attach: {source}")]
    NoThread {
        /// The process.
        pid: u32,
        /// The system's answer.
        source: io::Error,
    },
    /// `/proc` could not be read.
    #[error("process {pid}: /proc/{pid}/{file}: {source}")]
    Look {
        /// The process.
        pid: u32,
        /// What of it.
        file: &'static str,
        /// The system's answer.
        source: Errno,
    },
    /// It cannot be done with this process.
    #[error("process {pid}: {why}")]
    Unsuitable {
        /// The process.
        pid: u32,
        /// The reason.
        why: AttachObstacle,
    },
    /// The library has no place.
    #[error(transparent)]
    ShimCopy(Box<shim_copy::ShimCopyError>),
    /// The runtime does not say what it is: its process is stopped, or it stands still for a
    /// collection. Nothing else was asked of it, so it may be asked again.
    #[error(transparent)]
    Busy(Box<IpcError>),
    /// The diagnostics socket.
    #[error(transparent)]
    Ipc(Box<IpcError>),
    /// The runtime says it has loaded the shim, but its region is not mapped.
    #[error("process {pid}: the runtime loaded the shim, but no region of it appeared within {} \
         ms", waited.as_millis())]
    NoRegion {
        /// The process.
        pid: u32,
        /// How long was waited.
        waited: Duration,
    },
}

impl AttachError {
    /// Whether the runtime may have been asked to load the shim before this.
    #[must_use]
    pub fn is_after_the_request(&self) -> bool {
        matches!(self, Self::Ended { .. } | Self::Ipc(_) | Self::NoRegion { .. })
    }

    /// A file of the process's in `/proc` that could not be read. What `host::process::guarded_io`
    /// does not wait for any longer can be read another time.
    pub fn unread(pid: u32, file: &'static str, source: Errno) -> Self {
        match source {
            Errno::TIMEDOUT => Self::HeldUp { pid, what: format!("reading /proc/{pid}/{file}") },
            source => Self::Look { pid, file, source },
        }
    }
}

/// A shim that was attached.
#[derive(Clone, Debug)]
pub struct Attached {
    /// The process.
    pub pid: u32,
    /// What its runtime says about itself.
    pub info: RuntimeInfo,
    /// From the call of [`attach()`] until the region was there.
    pub took: Duration,
}

/// Brings the shim into a running process and waits until its region is mapped. The library's file
/// is gone when this returns.
///
/// # Errors
/// See [`AttachError`].
pub fn attach(pid: u32, settings: ShimSettings) -> Result<Attached, AttachError> {
    attach_until(pid, settings, &Arc::default())
}

/// The same, and no longer than until `give_up` is raised: then it ends within a tenth of a second,
/// as far as it waits for the runtime.
///
/// # Errors
/// See [`AttachError`].
pub fn attach_until(
    pid: u32,
    settings: ShimSettings,
    give_up: &Arc<AtomicBool>,
) -> Result<Attached, AttachError> {
    let library = perfusion_artefacts::shim().ok_or(AttachError::NoShim)?;
    // Else the shim would be in the process for nothing.
    perfusion_sources::kernel::features::mapped_files()
        .map_err(|source| AttachError::Unreadable { pid, source })?;
    attach_library(pid, settings, library, give_up)
}

/// Takes hold of a process. Only an error that says that there is none means so.
fn open_target(pid: u32) -> Result<ProcessHandle, AttachError> {
    ProcessHandle::open(pid).map_err(|error| match error {
        Errno::NOENT | Errno::SRCH => AttachError::NoSuchProcess { pid },
        source => AttachError::Look { pid, file: "", source },
    })
}

fn attach_library(
    pid: u32,
    settings: ShimSettings,
    library: &[u8],
    give_up: &Arc<AtomicBool>,
) -> Result<Attached, AttachError> {
    let begin = Instant::now();
    let target = open_target(pid)?;
    let or_ended = |error| if target.is_alive() { error } else { AttachError::Ended { pid } };
    wait_until_attachable(&target, give_up).map_err(or_ended)?;
    check_headroom(&target, settings)?;
    let ipc = |error| or_ended(AttachError::Ipc(Box::new(error)));
    let info =
        ipc::process_info(&target, IpcTimeout::until(INFO_TIMEOUT, give_up)).map_err(|error| {
            match error {
                IpcError::TimedOut { .. } | IpcError::GivenUp { .. } => {
                    or_ended(AttachError::Busy(Box::new(error)))
                }
                error => ipc(error),
            }
        })?;
    if info
        .runtime_version
        .split('.')
        .next()
        .and_then(|major| major.parse().ok())
        .is_some_and(|m: u32| m < 6)
    {
        return Err(AttachError::Unsuitable {
            pid,
            why: AttachObstacle::TooOld(info.runtime_version),
        });
    }
    let placed = shim_copy::write_copy(&target, library)
        .map_err(|error| or_ended(AttachError::ShimCopy(Box::new(error))))?;
    let data = client_data(settings.owner);
    let request = AttachProfiler {
        class_id: CLASS_ID,
        path: placed.path(),
        client_data: &data,
        wait_for_gc: WAIT_FOR_GC,
    };
    let deadline = begin + ATTACH_TIMEOUT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Pairs with the store of whoever has had enough; nothing else is told by it.
        let goes_on = !left.is_zero() && !give_up.load(Ordering::Relaxed);
        match ipc::attach_profiler(&target, &request, IpcTimeout::until(left, give_up)) {
            Ok(()) => break,
            Err(IpcError::Refused { code, .. }) if code.is_transient() && goes_on => {
                std::thread::sleep(LOOK_AGAIN * 10);
            }
            Err(error) => {
                let refused = matches!(error, IpcError::Refused { .. });
                let error = ipc(error);
                // It may still load what it was asked to, whenever it gets to it: until then nobody
                // else may use the name.
                if !refused {
                    placed.keep_until_end_of(target);
                }
                return Err(error);
            }
        }
    }
    drop(placed);
    wait_for_region(&target, settings.owner, give_up).map_err(or_ended)?;
    Ok(Attached { pid, info, took: begin.elapsed() })
}

fn check_headroom(target: &ProcessHandle, settings: ShimSettings) -> Result<(), AttachError> {
    match MemoryCgroups::of(target).headroom() {
        Some(headroom) if headroom.bytes < SHIM_BYTES && !settings.force => {
            Err(AttachError::NoHeadroom { pid: target.pid(), headroom: Box::new(headroom) })
        }
        _ => Ok(()),
    }
}

/// A runtime that is starting has its library mapped a little before its socket is there.
fn wait_until_attachable(target: &ProcessHandle, give_up: &AtomicBool) -> Result<(), AttachError> {
    let pid = target.pid();
    let deadline = Instant::now() + SOCKET_WAIT;
    loop {
        match look(pid, ATTACH_TIMEOUT, || policy::inspect(target, None))? {
            Inspection { why_not: None, .. } => return Ok(()),
            // Pairs with the store of whoever has had enough; nothing else is told by it.
            Inspection { why_not: Some(AttachObstacle::NoSocket(_)), .. }
                if Instant::now() < deadline && !give_up.load(Ordering::Relaxed) =>
            {
                std::thread::sleep(LOOK_AGAIN * 4);
            }
            Inspection { why_not: Some(why), .. } => {
                return Err(AttachError::Unsuitable { pid, why });
            }
        }
    }
}

/// What `look` finds in `/proc`. On a machine that has no CPU to spare a read may not be over when
/// it is not waited for any longer (`host::process::guarded_io`): it is tried again.
fn look<T>(
    pid: u32,
    timeout: Duration,
    mut look: impl FnMut() -> Result<T, Errno>,
) -> Result<T, AttachError> {
    let deadline = Instant::now() + timeout;
    loop {
        match look() {
            Err(Errno::TIMEDOUT) if Instant::now() < deadline => {
                std::thread::sleep(LOOK_AGAIN * 10)
            }
            answer => return answer.map_err(|source| AttachError::unread(pid, "maps", source)),
        }
    }
}

fn wait_for_region(
    target: &ProcessHandle,
    owner: u64,
    give_up: &AtomicBool,
) -> Result<(), AttachError> {
    let begin = Instant::now();
    loop {
        let found = look(target.pid(), ATTACH_TIMEOUT, || finder::find(target, &|_| false))?;
        if found.regions.iter().any(|region| region.owner() == Some(owner)) {
            return Ok(());
        }
        let waited = begin.elapsed();
        // Pairs with the store of whoever has had enough; nothing else is told by it.
        let is_over = waited > REGION_WAIT || give_up.load(Ordering::Relaxed);
        if is_over || !target.is_alive() {
            return Err(AttachError::NoRegion { pid: target.pid(), waited });
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// A class id as the runtime's environment variables spell it.
fn class_id_text(id: [u8; 16]) -> String {
    let [a, b, c, d, e, f, g, h, rest @ ..] = id;
    let (first, second, third) =
        (u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]), u16::from_le_bytes([g, h]));
    let [i, j, k, l, m, n, o, p] = rest;
    format!(
        "{{{first:08X}-{second:04X}-{third:04X}-{i:02X}{j:02X}-\
         {k:02X}{l:02X}{m:02X}{n:02X}{o:02X}{p:02X}}}"
    )
}

#[cfg(test)]
mod tests {
    use super::{AttachError, class_id_text, look};
    use perfusion_host::process::handle;
    use profiler_protocol::load::CLASS_ID;
    use rustix::io::Errno;
    use std::time::Duration;

    #[test]
    fn a_look_that_takes_too_long_is_taken_again_for_a_while() {
        let (mut looks, long) = (0, Duration::from_secs(60));
        let found = look(1, long, || {
            looks += 1;
            if looks < 3 { Err(Errno::TIMEDOUT) } else { Ok(looks) }
        });
        assert!(matches!(found, Ok(3)), "{found:?}");
        let found = look(1, long, || Err::<(), _>(Errno::SRCH));
        assert!(
            matches!(found, Err(AttachError::Look { pid: 1, source: Errno::SRCH, .. })),
            "{found:?}"
        );
        // What a reader of a process's files says of a read that is not waited for any longer.
        let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
        let found = look(1, Duration::from_millis(1), || Err::<(), _>(handle::errno(&error)));
        assert!(matches!(found, Err(AttachError::HeldUp { pid: 1, .. })), "{found:?}");
    }

    #[test]
    fn the_class_id_is_spelled_as_the_runtime_reads_it() {
        assert_eq!(class_id_text(CLASS_ID), "{9A1B7B5E-5F0B-4C0E-9B5F-50455246494E}");
    }
}
