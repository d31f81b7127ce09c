//! The runtime's diagnostics socket: one request a connection, as documented in dotnet/diagnostics
//! `documentation/design-docs/ipc-protocol.md`. The peer is the profiled process, so it may lie,
//! stall or send noise: its socket is opened below its own root without following a link at the
//! end, it must be the peer the kernel names, all I/O has one deadline, and an answer is at most 64
//! KiB. The events of a session follow its answer on the same connection ([`Events`]).

use super::helper;
use super::hresult::Hresult;
pub use super::wait::IpcTimeout;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::system_limits::explain;
use perfusion_model::text::printable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Dir, FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MAGIC: &[u8; 14] = b"DOTNET_IPC_V1\0";
const HEADER_BYTES: usize = 20;
/// Entries of a temporary directory looked at, and sockets tried, at most: both are the process's
/// to fill.
const DIRECTORY_ENTRIES: usize = 65_536;
const CANDIDATES: usize = 8;

/// Between looks at whether whoever waits has been told to stop.
const LOOK_UP: Duration = Duration::from_millis(100);
/// Between tries to connect where as many wait already as the runtime lets.
const FULL_BACKLOG: Duration = Duration::from_millis(10);

/// The step at which another user's socket is refused.
pub(super) const CONNECT: &str = "connect";

const SET_EVENTS: u8 = 0x02;
const SET_PROFILER: u8 = 0x03;
const SET_PROCESS: u8 = 0x04;
const SET_SERVER: u8 = 0xff;
const STOP_TRACING: u8 = 0x01;
const COLLECT_TRACING_2: u8 = 0x03;
/// .NET 9 and newer.
const COLLECT_TRACING_3: u8 = 0x04;
/// Version 4 of the event format, "nettrace".
const NETTRACE: u32 = 1;
const ATTACH_PROFILER: u8 = 0x01;
const PROCESS_INFO_2: u8 = 0x04;
const SERVER_OK: u8 = 0x00;

/// Why a request had no good answer.
#[derive(Debug, thiserror::Error)]
pub enum IpcError {
    /// No socket of this process.
    #[error("process {pid} has no diagnostics socket (looked in {})", Directories(looked_in))]
    NoSocket {
        /// The process.
        pid: u32,
        /// Directories below its root.
        looked_in: Vec<PathBuf>,
    },
    /// A socket was there, but another process answers on it.
    #[error("the diagnostics socket of process {pid} belongs to process {found}")]
    WrongPeer {
        /// Expected.
        pid: u32,
        /// Found, as the kernel says (`SO_PEERCRED`).
        found: u32,
    },
    /// A system call failed.
    #[error("process {pid}: diagnostics socket: {step}: {source}{}", why_refused(step, *source))]
    System {
        /// The process.
        pid: u32,
        /// What was tried.
        step: &'static str,
        /// The system's answer.
        source: Errno,
    },
    /// Only the daemon's helper could connect.
    #[error(
        "process {pid}: its diagnostics socket is for its own user alone, and the helper that has \
         the right to connect to it all the same has \
         ended; restart the daemon"
    )]
    NoHelper {
        /// The process.
        pid: u32,
    },
    /// Nothing came in time.
    #[error("process {pid}: no answer on the diagnostics socket within {} ms (is the process \
         stopped, or in a long collection?)", waited.as_millis())]
    TimedOut {
        /// The process.
        pid: u32,
        /// How long.
        waited: Duration,
    },
    /// Somebody had enough of waiting: a signal, or the end of a recording.
    #[error("process {pid}: its runtime had not answered when perfusion stopped waiting, after {} \
         ms", waited.as_millis())]
    GivenUp {
        /// The process.
        pid: u32,
        /// How long.
        waited: Duration,
    },
    /// The answer does not follow the protocol.
    #[error("process {pid}: diagnostics socket: expected {expected}, found {found}")]
    Malformed {
        /// The process.
        pid: u32,
        /// What the protocol says.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// The runtime says no.
    #[error("process {pid}: the runtime refused: {code}")]
    Refused {
        /// The process.
        pid: u32,
        /// Its reason.
        code: Hresult,
    },
}

/// What it means that a runtime does not listen at its own socket.
fn why_refused(step: &str, source: Errno) -> &'static str {
    if (step, source) != (CONNECT, Errno::CONNREFUSED) {
        return "";
    }
    // ipc_socket_bind (ds-ipc-pal-socket.c of dotnet/runtime) removes no file that is there, and
    // pid and start time, which make the name, outlive exec.
    "; nobody listens there: a program that became this one by exec left the file in the way of \
     this runtime's own socket. Start the program by a \
     fork, or delete its /tmp/dotnet-diagnostic-* file before exec"
}

impl IpcError {
    /// True when the runtime is too old for what was asked of it.
    #[must_use]
    pub fn is_unknown_command(&self) -> bool {
        // DS_IPC_E_UNKNOWN_COMMAND (ds-ipc-types.h).
        matches!(self, Self::Refused { code: Hresult(0x8013_1385), .. })
    }

    /// True when the socket is there, and for others.
    fn is_denied(&self) -> bool {
        matches!(self, Self::System { step: CONNECT, source: Errno::ACCESS, .. })
    }
}

struct Directories<'a>(&'a [PathBuf]);

impl fmt::Display for Directories<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, path) in self.0.iter().enumerate() {
            write!(
                f,
                "{}{}",
                if index == 0 { "" } else { ", " },
                printable(&path.to_string_lossy())
            )?;
        }
        Ok(())
    }
}

/// What a runtime says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// Pid as the process sees itself.
    pub pid: u64,
    /// Architecture, `x64` or `arm64`.
    pub architecture: String,
    /// Simple name of the assembly it was started with.
    pub entry_assembly: String,
    /// Version of the runtime, for example `9.0.5`.
    pub runtime_version: String,
}

/// What to load into a runtime.
#[derive(Debug)]
pub struct AttachProfiler<'a> {
    /// Class id the library answers to, in memory order.
    pub class_id: [u8; 16],
    /// Path of the library in the target's mount namespace.
    pub path: &'a str,
    /// Handed to the library as client data.
    pub client_data: &'a [u8],
    /// How long the runtime waits for a background GC to end.
    pub wait_for_gc: Duration,
}

/// Asks for the runtime's version and the program's name. Harmless: the runtime only answers.
///
/// # Errors
/// See [`IpcError`].
pub fn process_info(
    target: &ProcessHandle,
    wait: impl Into<IpcTimeout>,
) -> Result<RuntimeInfo, IpcError> {
    let answer = request(target, SET_PROCESS, PROCESS_INFO_2, &[], wait.into())?;
    let mut reader = ResponseReader { pid: target.pid(), rest: &answer };
    let pid = u64::from_le_bytes(reader.array()?);
    let _runtime_cookie: [u8; 16] = reader.array()?;
    let _command_line = reader.string()?;
    let _operating_system = reader.string()?;
    let architecture = reader.string()?;
    let entry_assembly = reader.string()?;
    let runtime_version = reader.string()?;
    // "9.0.5" of a release, "9.0.5+hash" or "9.0.5 @Commit: hash" of other builds.
    let runtime_version = runtime_version.split(['+', ' ']).next().unwrap_or_default().to_owned();
    Ok(RuntimeInfo { pid, architecture, entry_assembly, runtime_version })
}

/// Makes the runtime load a library as a profiler; returns when the library's initialization has.
///
/// # Errors
/// See [`IpcError`]; `Refused` carries the runtime's or the library's own code.
pub fn attach_profiler(
    target: &ProcessHandle,
    what: &AttachProfiler<'_>,
    wait: impl Into<IpcTimeout>,
) -> Result<(), IpcError> {
    let pid = target.pid();
    let mut payload = Vec::new();
    payload.extend(u32::try_from(what.wait_for_gc.as_millis()).unwrap_or(u32::MAX).to_le_bytes());
    payload.extend(what.class_id);
    payload.extend(string(what.path, pid)?);
    payload.extend(count(what.client_data.len(), pid)?);
    payload.extend(what.client_data);
    let answer = request(target, SET_PROFILER, ATTACH_PROFILER, &payload, wait.into())?;
    let code = u32::from_le_bytes(ResponseReader { pid, rest: &answer }.array()?);
    // Failure is the sign bit; S_FALSE and friends are successes.
    if code & 0x8000_0000 != 0 {
        Err(IpcError::Refused { pid, code: Hresult(code) })
    } else {
        Ok(())
    }
}

/// Events of the runtime to listen to, of the provider `Microsoft-Windows-DotNETRuntime`.
#[derive(Clone, Copy, Debug)]
pub struct EventSubscription {
    /// Groups of events.
    pub keywords: u64,
    /// 4 is informational, 5 verbose.
    pub level: u32,
    /// Most memory the runtime takes for events that were not read yet, MiB; what does not fit is
    /// dropped.
    pub buffer_mib: u32,
}

impl EventSubscription {
    /// What asks for a session; `switches` are the command's own.
    fn request(&self, switches: &[u8], pid: u32) -> Result<Vec<u8>, IpcError> {
        let mut payload = Vec::new();
        payload.extend(self.buffer_mib.to_le_bytes());
        payload.extend(NETTRACE.to_le_bytes());
        payload.extend(switches);
        payload.extend(1u32.to_le_bytes());
        payload.extend(self.keywords.to_le_bytes());
        payload.extend(self.level.to_le_bytes());
        payload.extend(string(RUNTIME_PROVIDER, pid)?);
        // No filter.
        payload.extend(0u32.to_le_bytes());
        Ok(payload)
    }
}

/// The provider of [`Listen`].
pub const RUNTIME_PROVIDER: &str = "Microsoft-Windows-DotNETRuntime";

/// Opens an event session. The answer comes when the runtime has done what the keywords ask of it
/// at once, such as a collection. Reading its events ends with an error when `give_up` is raised.
///
/// # Errors
/// See [`IpcError`].
pub fn listen(
    target: &ProcessHandle,
    what: &EventSubscription,
    give_up: Arc<AtomicBool>,
    wait: impl Into<IpcTimeout>,
) -> Result<EventStream, IpcError> {
    listen_from_start(target, what, true, give_up, wait)
}

/// The same without `stacks`, which cost more than the events, from .NET 9 on; older ones refuse
/// that ([`IpcError::is_unknown_command`]).
///
/// # Errors
/// See [`IpcError`].
pub fn listen_from_start(
    target: &ProcessHandle,
    what: &EventSubscription,
    stacks: bool,
    give_up: Arc<AtomicBool>,
    wait: impl Into<IpcTimeout>,
) -> Result<EventStream, IpcError> {
    let mut connection = IpcConnection::open(target, wait.into())?;
    // No list of all methods at the end.
    let (command, switches) =
        if stacks { (COLLECT_TRACING_2, &[0][..]) } else { (COLLECT_TRACING_3, &[0, 0][..]) };
    let payload = what.request(switches, connection.pid)?;
    let answer = connection.exchange(SET_EVENTS, command, &payload)?;
    connection.events(&answer, give_up)
}

/// Ends an event session: the runtime forgets its keywords, sends what it still has, and closes the
/// connection of its events.
///
/// # Errors
/// See [`IpcError`].
pub fn stop_listening(
    target: &ProcessHandle,
    session: u64,
    wait: impl Into<IpcTimeout>,
) -> Result<(), IpcError> {
    request(target, SET_EVENTS, STOP_TRACING, &session.to_le_bytes(), wait.into()).map(drop)
}

/// The bytes of an event session.
#[derive(Debug)]
pub struct EventStream {
    session: u64,
    socket: OwnedFd,
    give_up: Arc<AtomicBool>,
}

impl EventStream {
    /// What the runtime calls the session.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.session
    }
}

impl io::Read for EventStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            // Pairs with the store of whoever has had enough; nothing else is told by it.
            if self.give_up.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let timeout = Timespec::try_from(LOOK_UP).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(error.into()),
            }
            match recv(&self.socket, &mut *into, RecvFlags::DONTWAIT) {
                Ok((read, _)) => return Ok(read),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// A count of UTF-16 units, the zero at the end included, and the units.
fn string(text: &str, pid: u32) -> Result<Vec<u8>, IpcError> {
    let units: Vec<u16> = text.encode_utf16().chain([0]).collect();
    let mut bytes = count(units.len(), pid)?.to_vec();
    bytes.extend(units.into_iter().flat_map(u16::to_le_bytes));
    Ok(bytes)
}

fn count(len: usize, pid: u32) -> Result<[u8; 4], IpcError> {
    let len = u32::try_from(len).map_err(|_| IpcError::Malformed {
        pid,
        expected: "a request below 4 GiB",
        found: len.to_string(),
    })?;
    Ok(len.to_le_bytes())
}

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

fn request(
    target: &ProcessHandle,
    set: u8,
    command: u8,
    payload: &[u8],
    wait: IpcTimeout,
) -> Result<Vec<u8>, IpcError> {
    IpcConnection::open(target, wait)?.exchange(set, command, payload)
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
    let connection =
        IpcConnection::open_ourselves(&target, &timeout.into(), Instant::now() + timeout)?;
    Ok(connection.socket)
}

/// A connection to a runtime, on which one request can be made.
#[derive(Debug)]
pub(super) struct IpcConnection {
    pid: u32,
    socket: OwnedFd,
    wait: IpcTimeout,
    began: Instant,
    deadline: Instant,
}

impl IpcConnection {
    /// One to a runtime that listens: by ourselves, which does for our own user's processes and for
    /// whoever may do anything, or else through the helper, if this process has left that right to
    /// one.
    fn open(target: &ProcessHandle, wait: IpcTimeout) -> Result<Self, IpcError> {
        let pid = target.pid();
        let deadline = Instant::now() + wait.timeout;
        let opened = Self::open_ourselves(target, &wait, deadline);
        if let Err(error) = &opened
            && error.is_denied()
            && let Some(socket) = helper::connect(target, wait.timeout, deadline)
        {
            return Ok(Self { pid, socket: socket?, wait, began: Instant::now(), deadline });
        }
        opened
    }

    fn open_ourselves(
        target: &ProcessHandle,
        wait: &IpcTimeout,
        deadline: Instant,
    ) -> Result<Self, IpcError> {
        let pid = target.pid();
        let mut last = IpcError::NoSocket { pid, looked_in: target.temporary_directories() };
        for file in candidates(target)? {
            match Self::connect(pid, &file, wait, deadline) {
                Ok(connection) => return Ok(connection),
                // The one that the helper may open: others have been left behind.
                Err(_) if last.is_denied() => {}
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn connect(
        pid: u32,
        file: &OwnedFd,
        wait: &IpcTimeout,
        deadline: Instant,
    ) -> Result<Self, IpcError> {
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
        let found =
            socket_peercred(&socket).map_err(system("SO_PEERCRED"))?.pid.as_raw_nonzero().get();
        let found = u32::try_from(found).unwrap_or(0);
        if found != pid {
            return Err(IpcError::WrongPeer { pid, found });
        }
        Ok(Self { pid, socket, wait: wait.clone(), began, deadline })
    }

    /// Makes a request and reads its answer; more may follow on the connection.
    fn exchange(&mut self, set: u8, command: u8, payload: &[u8]) -> Result<Vec<u8>, IpcError> {
        let pid = self.pid;
        let size = HEADER_BYTES + payload.len();
        let Ok(size) = u16::try_from(size) else {
            return Err(self.malformed("a request below 64 KiB", size.to_string()));
        };
        let mut message = Vec::with_capacity(usize::from(size));
        message.extend(MAGIC);
        message.extend(size.to_le_bytes());
        message.extend([set, command, 0, 0]);
        message.extend(payload);
        self.send(&message)?;
        let header: [u8; HEADER_BYTES] =
            self.receive(HEADER_BYTES)?.try_into().unwrap_or([0; HEADER_BYTES]);
        let (magic, rest) = header.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(self.malformed("DOTNET_IPC_V1", printable(&String::from_utf8_lossy(magic))));
        }
        let &[low, high, answer_set, answer_id, ..] = rest else {
            return Err(self.malformed("a header of 20 bytes", format!("{rest:?}")));
        };
        let total = usize::from(u16::from_le_bytes([low, high]));
        let Some(body) = total.checked_sub(HEADER_BYTES) else {
            return Err(self.malformed("a size of at least 20", total.to_string()));
        };
        let body = self.receive(body)?;
        match (answer_set, answer_id) {
            (SET_SERVER, SERVER_OK) => Ok(body),
            (SET_SERVER, _) => {
                let code =
                    Hresult(u32::from_le_bytes(ResponseReader { pid, rest: &body }.array()?));
                Err(IpcError::Refused { pid, code })
            }
            _ => Err(self.malformed(
                "an answer of set 0xff",
                format!("set {answer_set:#x}, id {answer_id:#x}"),
            )),
        }
    }

    /// What follows the answer to a request for a session.
    fn events(self, answer: &[u8], give_up: Arc<AtomicBool>) -> Result<EventStream, IpcError> {
        let session = u64::from_le_bytes(ResponseReader { pid: self.pid, rest: answer }.array()?);
        Ok(EventStream { session, socket: self.socket, give_up })
    }

    fn malformed(&self, expected: &'static str, found: String) -> IpcError {
        IpcError::Malformed { pid: self.pid, expected, found }
    }

    fn wait_for(&self, events: PollFlags) -> Result<(), IpcError> {
        loop {
            if self.wait.is_given_up() {
                return Err(IpcError::GivenUp { pid: self.pid, waited: self.began.elapsed() });
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            let is_last = self.wait.give_up.is_none() || left <= LOOK_UP;
            let left = if is_last { left } else { LOOK_UP };
            let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
            match poll(&mut [PollFd::new(&self.socket, events)], Some(&timeout)) {
                Ok(0) if is_last => {
                    return Err(IpcError::TimedOut { pid: self.pid, waited: self.wait.timeout });
                }
                Ok(0) => {}
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(source) => {
                    return Err(IpcError::System { pid: self.pid, step: "poll", source });
                }
            }
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<(), IpcError> {
        while !bytes.is_empty() {
            self.wait_for(PollFlags::OUT)?;
            match send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(source) => {
                    return Err(IpcError::System { pid: self.pid, step: "send", source });
                }
            }
        }
        Ok(())
    }

    /// Exactly `len` bytes; `len` is below 64 KiB at every caller.
    pub(super) fn receive(&mut self, len: usize) -> Result<Vec<u8>, IpcError> {
        let mut bytes = vec![0; len];
        let mut filled = 0;
        while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            self.wait_for(PollFlags::IN)?;
            match recv(&self.socket, rest, RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    return Err(self.malformed(
                        "a whole answer",
                        format!("end of file after {filled} of {len} bytes"),
                    ));
                }
                Ok((read, _)) => filled += read,
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(source) => {
                    return Err(IpcError::System { pid: self.pid, step: "receive", source });
                }
            }
        }
        Ok(bytes)
    }
}

/// Takes fields off the front of an answer.
struct ResponseReader<'a> {
    pid: u32,
    rest: &'a [u8],
}

impl ResponseReader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], IpcError> {
        let Some((field, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(self.short("a field", N));
        };
        let field = *field;
        self.rest = rest;
        Ok(field)
    }

    fn short(&self, expected: &'static str, bytes: usize) -> IpcError {
        let found = format!("{} bytes where {bytes} are needed", self.rest.len());
        IpcError::Malformed { pid: self.pid, expected, found }
    }

    /// A count of UTF-16 units, the zero at the end included, and the units.
    fn string(&mut self) -> Result<String, IpcError> {
        let units = usize::try_from(u32::from_le_bytes(self.array()?)).unwrap_or(usize::MAX);
        let bytes = units.saturating_mul(2);
        let Some((text, rest)) = self.rest.split_at_checked(bytes) else {
            return Err(self.short("a string", bytes));
        };
        self.rest = rest;
        let units = text.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let text: String = char::decode_utf16(units.take_while(|&unit| unit != 0))
            .map(|c| c.unwrap_or(char::REPLACEMENT_CHARACTER))
            .collect();
        Ok(printable(&text))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{
        AttachProfiler, HEADER_BYTES, IpcError, MAGIC, ResponseReader, attach_profiler,
        process_info,
    };
    use perfusion_host::process::handle::ProcessHandle;
    use proptest::{collection::vec, prelude::any, proptest};
    use rustix::net::{RecvFlags, recv};
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    /// For peers that answer at once, on a machine that is busy with other things.
    const MINUTE: Duration = Duration::from_secs(60);

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

    fn answer(set: u8, id: u8, payload: &[u8]) -> Vec<u8> {
        let size = u16::try_from(HEADER_BYTES + payload.len()).unwrap();
        [&MAGIC[..], &size.to_le_bytes(), &[set, id, 0, 0], payload].concat()
    }

    fn string(text: &str) -> Vec<u8> {
        let units: Vec<u16> = text.encode_utf16().chain([0]).collect();
        let count = u32::try_from(units.len()).unwrap();
        count
            .to_le_bytes()
            .into_iter()
            .chain(units.into_iter().flat_map(u16::to_le_bytes))
            .collect()
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
        assert_eq!(super::candidates(&me).unwrap().len(), 0);
    }

    #[test]
    fn process_info_is_read_as_the_runtime_sends_it() {
        let peer = |mut stream: UnixStream| {
            let mut request = [0; HEADER_BYTES];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request[14..18], [20, 0, 0x04, 0x04]);
            let mut payload = 7u64.to_le_bytes().to_vec();
            payload.extend([0; 16]);
            for text in ["dotnet app.dll", "Linux", "x64", "app", "9.0.5+abc"] {
                payload.extend(string(text));
            }
            stream.write_all(&answer(0xff, 0, &payload)).unwrap();
        };
        let info = with_peer(peer, |me| process_info(me, MINUTE)).unwrap();
        assert_eq!(
            (info.pid, info.architecture.as_str(), info.entry_assembly.as_str()),
            (7, "x64", "app")
        );
        assert_eq!(info.runtime_version, "9.0.5");
    }

    #[test]
    fn a_refusal_carries_the_runtimes_code() {
        let peer = |mut stream: UnixStream| {
            let mut head = [0; HEADER_BYTES];
            stream.read_exact(&mut head).unwrap();
            let size = usize::from(u16::from_le_bytes([head[14], head[15]]));
            let mut payload = vec![0; size - HEADER_BYTES];
            stream.read_exact(&mut payload).unwrap();
            assert_eq!(payload[..4], 500u32.to_le_bytes());
            stream.write_all(&answer(0xff, 0xff, &0x8007_007eu32.to_le_bytes())).unwrap();
        };
        let what = AttachProfiler {
            class_id: [1; 16],
            path: "/x",
            client_data: b"abc",
            wait_for_gc: Duration::from_millis(500),
        };
        let error = with_peer(peer, |me| attach_profiler(me, &what, MINUTE)).unwrap_err();
        assert!(
            matches!(error, IpcError::Refused { code, .. } if code.0 == 0x8007_007e),
            "{error}"
        );
    }

    #[test]
    fn a_silent_peer_costs_the_timeout_and_no_more() {
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let peer = move |stream: UnixStream| {
            wait.recv().ok();
            drop(stream);
        };
        let (result, took) = with_peer(peer, |me| {
            let begin = Instant::now();
            let result = process_info(me, Duration::from_millis(50));
            let took = begin.elapsed();
            drop(done);
            (result, took)
        });
        let error = result.unwrap_err();
        assert!(matches!(error, IpcError::TimedOut { .. }), "{error}");
        assert!(took < MINUTE, "{took:?}");
    }

    #[test]
    fn noise_from_the_peer_is_an_error() {
        for noise in [
            b"".to_vec(),
            b"DOTNET_IPC_V1".to_vec(),
            vec![0xff; 40],
            answer(0xff, 0, b""),
            answer(0xff, 0, &[0xff; 60]),
            answer(0x01, 0, &[0; 60]),
            [&MAGIC[..], &[3, 0, 0xff, 0, 0, 0]].concat(),
        ] {
            let sent = noise.clone();
            let peer = move |mut stream: UnixStream| {
                stream.read_exact(&mut [0; HEADER_BYTES]).unwrap();
                stream.write_all(&sent).ok();
            };
            let error = with_peer(peer, |me| process_info(me, MINUTE)).unwrap_err();
            assert!(matches!(error, IpcError::Malformed { .. }), "{noise:?}: {error}");
        }
    }

    #[test]
    fn a_process_without_a_socket_is_told_from_a_silent_one() {
        // The parent of a test is cargo, or whatever shell: no .NET program.
        let parent = ProcessHandle::open(std::os::unix::process::parent_id()).unwrap();
        match process_info(&parent, MINUTE) {
            Err(IpcError::NoSocket { looked_in, .. }) => assert!(!looked_in.is_empty()),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn strings_of_any_length_are_read_or_refused(bytes in vec(any::<u8>(), 0..64)) {
            let mut reader = ResponseReader { pid: 1, rest: &bytes };
            while reader.string().is_ok() {}
        }
    }
}
