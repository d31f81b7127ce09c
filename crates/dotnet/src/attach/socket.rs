//! The file of a runtime's diagnostics socket, and connections to it by this process's own rights.
//! The socket belongs to the profiled process. It is opened below that process's root without
//! following a link at the end, and its peer must be the process, as the kernel names it.

use super::ipc_error::{CONNECT, IpcError};
use super::wait::IpcTimeout;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::system_limits::explain;
use rustix::fs::{Dir, FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

/// Entries of a temporary directory looked at, and sockets tried, at most: both are the process's
/// to fill.
const DIRECTORY_ENTRIES: usize = 65_536;
const CANDIDATES: usize = 8;
/// Between tries to connect where as many wait already as the runtime lets.
const FULL_BACKLOG: Duration = Duration::from_millis(10);

/// Whether a file with the name of this process's diagnostics socket exists.
///
/// # Errors
/// When that cannot be seen: at which step, and why.
pub fn has_socket(target: &ProcessHandle) -> Result<bool, String> {
    match candidates(target) {
        Ok(found) => Ok(!found.is_empty()),
        Err(IpcError::System { step, source, .. }) => Err(format!("{step}: {}", explain(&source))),
        Err(error) => Err(explain(&error)),
    }
}

/// Sockets with this process's name, likeliest first, opened without following a link at the end
/// (O_PATH).
fn candidates(target: &ProcessHandle) -> Result<Vec<OwnedFd>, IpcError> {
    let pid = target.pid();
    let system = |step| move |source| IpcError::System { pid, step, source };
    let inner_pid = target.namespace_pid().map_err(system("reading NSpid"))?;
    let prefix = format!("dotnet-diagnostic-{inner_pid}-");
    // The key is the start time as the process reads it; in a time namespace it differs from what
    // is read here.
    let exact = format!("{prefix}{}-socket", target.start_ticks().map_err(system("reading stat"))?);
    let mut sockets = Vec::new();
    let mut unseen = None;
    for path in target.temporary_directories() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK;
        let directory = match target.open_in_root(&path, flags) {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            // Not the process's doing, as where a sandbox keeps openat2(2) from us: that there is
            // no socket is not known then.
            Err(error) => {
                unseen = Some(error);
                continue;
            }
        };
        let open = |name: &str| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(&directory, name, flags, Mode::empty()).ok()?;
            let status = fstat(&file).ok()?;
            (FileType::from_raw_mode(status.st_mode) == FileType::Socket)
                .then_some((status.st_mtime, file))
        };
        if let Some((_, socket)) = open(&exact) {
            sockets.push(socket);
            continue;
        }
        // What else has this pid in its name was left behind by a process that was killed and had
        // the pid before.
        if target.shares_our_time_namespace() {
            continue;
        }
        let Ok(entries) = Dir::read_from(&directory) else { continue };
        let mut named: Vec<_> = entries
            .take(DIRECTORY_ENTRIES)
            .map_while(Result::ok)
            .filter_map(|entry| {
                let name = entry.file_name().to_str().ok()?;
                let key = name.strip_prefix(&prefix)?.strip_suffix("-socket")?;
                key.bytes().all(|b| b.is_ascii_digit()).then(|| open(name))?
            })
            .collect();
        named.sort_by_key(|(modified, _)| std::cmp::Reverse(*modified));
        sockets.extend(named.into_iter().map(|(_, socket)| socket));
    }
    sockets.truncate(CANDIDATES);
    match unseen {
        Some(error) if sockets.is_empty() => Err(system("opening its temporary directory")(error)),
        _ => Ok(sockets),
    }
}

/// For the helper: a connection to the process with this id, if it started then.
///
/// # Errors
/// See [`IpcError`].
pub(super) fn connect_to(
    pid: u32,
    start_ticks: u64,
    timeout: Duration,
) -> Result<OwnedFd, IpcError> {
    let system = |step, source| IpcError::System { pid, step, source };
    let target = ProcessHandle::open(pid).map_err(|source| system("opening /proc/PID", source))?;
    if target.start_ticks().map_err(|source| system("reading stat", source))? != start_ticks {
        return Err(system("reading stat", Errno::SRCH));
    }
    Ok(open(&target, &timeout.into(), Instant::now() + timeout)?.socket)
}

/// A connection to a runtime.
pub(super) struct ConnectedSocket {
    pub(super) socket: OwnedFd,
    /// When connecting to it began.
    pub(super) began: Instant,
}

/// Connects to a runtime that listens, by this process's own rights.
///
/// # Errors
/// See [`IpcError`].
pub(super) fn open(
    target: &ProcessHandle,
    wait: &IpcTimeout,
    deadline: Instant,
) -> Result<ConnectedSocket, IpcError> {
    let pid = target.pid();
    let mut last = IpcError::NoSocket { pid, looked_in: target.temporary_directories() };
    for file in candidates(target)? {
        match connect_to_file(pid, &file, wait, deadline) {
            Ok(connection) => return Ok(connection),
            // The one that the helper may open: others have been left behind.
            Err(_) if last.is_denied() => {}
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect_to_file(
    pid: u32,
    file: &OwnedFd,
    wait: &IpcTimeout,
    deadline: Instant,
) -> Result<ConnectedSocket, IpcError> {
    let system = |step| move |source| IpcError::System { pid, step, source };
    let began = Instant::now();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(system("socket"))?;
    // The descriptor names the very file that was examined; nothing is looked up by name again.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(system("address"))?;
    // A full backlog is no reason to sleep in the kernel, where nothing could end the wait.
    while let Err(error) = connect(&socket, &address) {
        match error {
            Errno::AGAIN | Errno::INTR if wait.is_given_up() => {
                return Err(IpcError::GivenUp { pid, waited: began.elapsed() });
            }
            Errno::AGAIN if Instant::now() >= deadline => {
                return Err(IpcError::TimedOut { pid, waited: wait.timeout });
            }
            Errno::AGAIN => std::thread::sleep(FULL_BACKLOG),
            Errno::INTR => {}
            error => return Err(system(CONNECT)(error)),
        }
    }
    // Credentials of whoever called listen(), by the kernel: a link or a forged socket cannot
    // fake them.
    let found = socket_peercred(&socket).map_err(system("SO_PEERCRED"))?.pid.as_raw_nonzero().get();
    let found = u32::try_from(found).unwrap_or(0);
    if found != pid {
        return Err(IpcError::WrongPeer { pid, found });
    }
    Ok(ConnectedSocket { socket, began })
}

#[cfg(test)]
pub(super) mod tests {
    use super::candidates;
    use perfusion_host::process::handle::ProcessHandle;
    use rustix::net::{RecvFlags, recv};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Tests of one process share the name of its socket, so they take turns; with them those that
    /// ask every process there is, this one too.
    pub(in crate::attach) fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes with the test, also with one that fails.
    struct Socket(PathBuf);

    impl Drop for Socket {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).ok();
        }
    }

    /// A socket named as this process's runtime would name it, in the first of this process's
    /// temporary directories.
    pub(in crate::attach) fn with_listener<T>(
        test: impl FnOnce(&ProcessHandle, UnixListener) -> T,
    ) -> T {
        let _turn = turn();
        let me = ProcessHandle::open(std::process::id()).unwrap();
        let directory = me.temporary_directories().remove(0);
        let name = format!(
            "dotnet-diagnostic-{}-{}-socket",
            me.namespace_pid().unwrap(),
            me.start_ticks().unwrap()
        );
        let socket = Socket(directory.join(name));
        test(&me, UnixListener::bind(&socket.0).unwrap())
    }

    /// The same with somebody who answers there once. Whoever looks at all processes meanwhile,
    /// such as another program's tests, may connect and leave.
    pub(in crate::attach) fn with_peer<T>(
        peer: impl FnOnce(UnixStream) + Send + 'static,
        test: impl FnOnce(&ProcessHandle) -> T,
    ) -> T {
        with_listener(|me, listener| {
            let speaks = |stream: &UnixStream| {
                let mut first = [0];
                recv(stream, &mut first, RecvFlags::PEEK).is_ok_and(|(_, length)| length > 0)
            };
            let next = move || listener.accept().unwrap().0;
            let thread = std::thread::spawn(move || {
                peer(std::iter::repeat_with(next).find(speaks).unwrap())
            });
            let result = test(me);
            thread.join().unwrap();
            result
        })
    }

    #[test]
    fn a_socket_of_an_earlier_process_with_the_pid_is_not_this_ones() {
        let _turn = turn();
        let me = ProcessHandle::open(std::process::id()).unwrap();
        let directory = me.temporary_directories().remove(0);
        let earlier = me.start_ticks().unwrap() - 1;
        let name = format!("dotnet-diagnostic-{}-{earlier}-socket", me.namespace_pid().unwrap());
        let socket = Socket(directory.join(name));
        let _listener = UnixListener::bind(&socket.0).unwrap();
        assert_eq!(candidates(&me).unwrap().len(), 0);
    }
}
