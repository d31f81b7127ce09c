//! A diagnostic port of ours: runtimes that start with it in their environment come to us over a socket and wait until they are told to go on, so that
//! an event session can be there before their first instruction (dotnet/diagnostics `ipc-protocol.md`, "diagnostic ports").
//!
//! A runtime waits without end. So that no program is ever left waiting, also when the recorder is killed, a second process, the *keeper*, shares the
//! listening socket: when the recorder is gone, or has had enough, the keeper lets go on whoever still comes, as long as any process lives that has the port in its
//! environment.
//!
//! ```text
//! runtime ─connect─► "ADVR_V1" … ─► one request of ours ─► answer; then it comes again, with a new connection
//! ```

use super::ipc::{Connection, Events, IpcError, Listen, listen_on, resume};
use super::place::{self, Tried};
use super::target::{Target, printable};
use crate::leftover::Naming;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{SocketFlags, accept_with};
use std::ffi::OsString;
use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const NAMING: Naming = Naming { prefix: "perfusion-port-", suffix: ".sock" };
/// The runtime's variable. It cannot be had twice, so what is there already stays in it.
const VARIABLE: &str = "DOTNET_DiagnosticPorts";
/// What a runtime says first: this, its cookie, its pid as it knows it, and two bytes for later.
const ADVERTISE: &[u8] = b"ADVR_V1\0";
const ADVERTISE_BYTES: usize = 34;

/// What each runtime draws at its start, to be told from others (`ds_ipc_advertise_cookie_v1_get`, src/native/eventpipe/ds-ipc.c of dotnet/runtime).
pub type Cookie = [u8; 16];
/// Longest path of a unix socket (unix(7)), the zero at its end left out.
const PATH_BYTES: usize = 107;
/// From the connection to the answer; a runtime that starts has nothing else to do.
const ANSWER: Duration = Duration::from_secs(10);
/// Between looks of the keeper at who still knows the port.
const LOOK: Duration = Duration::from_secs(1);

/// There is no port.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// No directory can hold its socket.
    #[error("no directory for the diagnostic port: {}", Tried(tried))]
    NoPlace {
        /// Each directory, and what was wrong with it.
        tried: Vec<(PathBuf, io::Error)>,
    },
    /// Its keeper could not be started.
    #[error("the keeper of the diagnostic port: {0}")]
    Keeper(#[source] io::Error),
}

/// The port. Dropping it leaves it to its keeper.
#[derive(Debug)]
pub struct Port {
    listener: UnixListener,
    path: PathBuf,
    /// The keeper waits for the end of it.
    _lifeline: UnixStream,
    keeper: Child,
}

impl Drop for Port {
    fn drop(&mut self) {
        // One that has ended already is no zombie of ours; the others outlive us.
        self.keeper.try_wait().ok();
    }
}

impl Port {
    /// Opens one, and starts its keeper.
    ///
    /// # Errors
    /// See [`PortError`].
    pub fn open() -> Result<Self, PortError> {
        // A runtime obeys whoever listens there, as long as it lives: nobody else may ever be able to.
        let me = Target::open(std::process::id()).map_err(|error| PortError::Keeper(error.into()))?;
        let mut tried = Vec::new();
        for (directory, made) in place::for_start(&me) {
            match made.map_err(io::Error::other).and_then(|directory| bind(&directory)) {
                Ok((listener, path)) => return Self::keep(listener, path).map_err(PortError::Keeper),
                Err(why) => tried.push((directory, why)),
            }
        }
        Err(PortError::NoPlace { tried })
    }

    fn keep(listener: UnixListener, path: PathBuf) -> io::Result<Self> {
        let started = listener.try_clone().and_then(|shared| {
            let (lifeline, keepers) = UnixStream::pair()?;
            let keeper = Command::new(std::env::current_exe()?)
                .arg("keep-port")
                .arg(&path)
                .stdin(Stdio::from(OwnedFd::from(shared)))
                .stdout(Stdio::from(OwnedFd::from(keepers)))
                // Whoever waits for the end of our messages must not wait for the keeper's.
                .stderr(Stdio::null())
                // Ctrl-C is for us and the program.
                .process_group(0)
                .current_dir("/")
                .spawn()?;
            Ok((lifeline, keeper))
        });
        match started {
            Ok((lifeline, keeper)) => Ok(Self { listener, path, _lifeline: lifeline, keeper }),
            Err(error) => {
                std::fs::remove_file(path).ok();
                Err(error)
            }
        }
    }

    /// What a program must have in its environment to come here at its start, and its children.
    #[must_use]
    pub fn environment(&self) -> (OsString, OsString) {
        (VARIABLE.into(), variable(&self.path, std::env::var_os(VARIABLE)))
    }

    /// The next runtime that comes; `None` when none has come in this time, or what came was none.
    #[must_use]
    pub fn accept(&self, timeout: Duration) -> Option<Visit> {
        accept(&self.listener, timeout)
    }
}

fn bind(directory: &Path) -> io::Result<(UnixListener, PathBuf)> {
    let path = directory.join(NAMING.fresh()?);
    let text = path.as_os_str().as_encoded_bytes();
    if text.len() > PATH_BYTES || text.iter().any(|byte| matches!(byte, b';' | b',')) {
        return Err(io::Error::new(io::ErrorKind::InvalidFilename, "too long, or `;` or `,` is in it"));
    }
    let listener = UnixListener::bind(&path)?;
    // The programs' user is not always ours. Whoever does not have the name from them cannot guess it.
    let shared = std::fs::set_permissions(&path, Permissions::from_mode(0o666))
        .and_then(|()| listener.set_nonblocking(true));
    match shared {
        Ok(()) => Ok((listener, path)),
        Err(error) => {
            std::fs::remove_file(&path).ok();
            Err(error)
        }
    }
}

/// We connect to nobody: the runtime does (`connect` is its default, `suspend` too).
fn variable(path: &Path, existing: Option<OsString>) -> OsString {
    let mut value = existing.unwrap_or_default();
    if !value.is_empty() && !value.as_encoded_bytes().ends_with(b";") {
        value.push(";");
    }
    value.push(path);
    value.push(",connect,suspend");
    value
}

pub(super) fn wait(descriptor: &impl std::os::fd::AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
    poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
}

fn accept(listener: &UnixListener, timeout: Duration) -> Option<Visit> {
    if !wait(listener, timeout) {
        return None;
    }
    let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(socket) => socket,
        // Too many open files do not go away by asking again at once.
        Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => {
            std::thread::sleep(timeout.min(Duration::from_millis(100)));
            return None;
        }
        Err(_) => return None,
    };
    // By the kernel; what the runtime says of itself is its pid in its own namespace.
    let pid = socket_peercred(&socket).ok()?.pid.as_raw_nonzero().get();
    let pid = u32::try_from(pid).ok()?;
    Some(Visit(Connection::made_by(pid, socket, ANSWER)))
}

/// A connection that a runtime has made. Dropped, it makes another one.
#[derive(Debug)]
pub struct Visit(Connection);

impl Visit {
    /// Whose it is.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Reads what a runtime says first, and answers which one it is: a process that becomes another program by exec has another runtime with
    /// the same pid and start.
    ///
    /// # Errors
    /// When it says something else, or nothing.
    pub fn greet(&mut self) -> Result<Cookie, IpcError> {
        let said = self.0.receive(ADVERTISE_BYTES)?;
        let cookie = said.strip_prefix(ADVERTISE).and_then(|rest| rest.first_chunk());
        if let Some(cookie) = cookie {
            return Ok(*cookie);
        }
        let found = printable(&String::from_utf8_lossy(&said));
        Err(IpcError::Malformed { pid: self.pid(), expected: "ADVR_V1", found })
    }

    /// Opens an event session; runtimes before .NET 9 do so only with the stacks of events.
    ///
    /// # Errors
    /// See [`IpcError`].
    pub fn listen(self, what: &Listen, stacks: bool, give_up: Arc<AtomicBool>) -> Result<Events, IpcError> {
        listen_on(self.0, what, stacks, give_up)
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// See [`IpcError`].
    pub fn resume(self) -> Result<(), IpcError> {
        resume(self.0)
    }

    /// Waits so long for the runtime to hang up; true when it has.
    #[must_use]
    pub fn is_over(&self, timeout: Duration) -> bool {
        // It says nothing more by itself: whatever there is to read, its end is meant.
        wait(self.0.socket(), timeout)
    }
}

/// The keeper's life: its stdin is the listening socket, its stdout what ends when the recorder does.
///
/// # Errors
/// When they are something else.
pub fn keep(path: &Path) -> io::Result<()> {
    use std::os::fd::AsFd as _;
    let lifeline = io::stdout().as_fd().try_clone_to_owned()?;
    loop {
        if wait(&lifeline, Duration::from_secs(3600)) {
            break;
        }
    }
    let listener = UnixListener::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut parked: Vec<(Cookie, Visit)> = Vec::new();
    let mut looked = Instant::now();
    loop {
        if let Some(mut visit) = accept(&listener, LOOK)
            && let Ok(cookie) = visit.greet()
        {
            // Each comes once to be let go on, and from then on to wait for what nobody asks.
            let is_known = parked.iter().any(|(known, there)| (there.pid(), *known) == (visit.pid(), cookie));
            let parks = if is_known { Some(visit) } else { let_go_on(visit, cookie, &listener) };
            parked.extend(parks.map(|visit| (cookie, visit)));
        }
        if looked.elapsed() < LOOK {
            continue;
        }
        looked = Instant::now();
        parked.retain(|(_, visit)| !visit.is_over(Duration::ZERO));
        if parked.is_empty() && !is_known(path) {
            // Whoever removed it was faster.
            std::fs::remove_file(path).ok();
            return Ok(());
        }
    }
}

/// Answers the runtime, and takes the connection that it makes then.
fn let_go_on(visit: Visit, cookie: Cookie, listener: &UnixListener) -> Option<Visit> {
    let pid = visit.pid();
    visit.resume().ok()?;
    let mut again = accept(listener, LOOK)?;
    (again.pid() == pid && again.greet().is_ok_and(|said| said == cookie)).then_some(again)
}

/// True while a process has the port in the environment it was started with.
fn is_known(path: &Path) -> bool {
    let name = path.as_os_str().as_encoded_bytes();
    let pids = crate::process::all_pids().unwrap_or_default();
    let has = |pid: u32| {
        let value = Target::open(pid).ok()?.environment(VARIABLE).ok()??;
        Some(value.as_bytes().windows(name.len()).any(|part| part == name))
    };
    pids.into_iter().any(|pid| has(pid).unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::{ADVERTISE_BYTES, accept, bind, variable};
    use std::ffi::OsString;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_port_that_is_there_already_is_kept() {
        let value = |existing: Option<&str>| variable(Path::new("/t/p"), existing.map(OsString::from));
        assert_eq!(value(None), "/t/p,connect,suspend");
        assert_eq!(value(Some("/a,nosuspend")), "/a,nosuspend;/t/p,connect,suspend");
        assert_eq!(value(Some("/a;")), "/a;/t/p,connect,suspend");
    }

    #[test]
    fn a_runtime_is_answered_and_anything_else_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (listener, path) = bind(folder.path()).unwrap();
        assert!(accept(&listener, Duration::ZERO).is_none());
        let mut runtime = UnixStream::connect(&path).unwrap();
        let mut said = b"ADVR_V1\0".to_vec();
        said.resize(ADVERTISE_BYTES, 7);
        runtime.write_all(&said).unwrap();
        let mut visit = accept(&listener, SECOND).unwrap();
        assert_eq!(visit.pid(), std::process::id());
        assert_eq!(visit.greet().unwrap(), [7; 16]);
        assert!(!visit.is_over(Duration::ZERO));
        let answering = std::thread::spawn(move || {
            let mut request = [0; 20];
            runtime.read_exact(&mut request).unwrap();
            runtime.write_all(b"DOTNET_IPC_V1\0\x14\0\xff\0\0\0").unwrap();
            request
        });
        visit.resume().unwrap();
        assert_eq!(answering.join().unwrap()[14..18], [20, 0, 4, 1]);

        let mut other = UnixStream::connect(&path).unwrap();
        other.write_all(&[b'x'; ADVERTISE_BYTES]).unwrap();
        assert!(accept(&listener, SECOND).unwrap().greet().is_err());
        let gone = UnixStream::connect(&path).unwrap();
        let visit = accept(&listener, SECOND).unwrap();
        drop(gone);
        assert!(visit.is_over(SECOND));
    }

    #[test]
    fn paths_that_the_variable_cannot_hold_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let odd = folder.path().join("a;b");
        std::fs::create_dir(&odd).unwrap();
        assert!(bind(&odd).is_err() && bind(Path::new("/no such directory")).is_err());
        assert!(bind(&folder.path().join("d".repeat(120))).is_err());
    }
}
