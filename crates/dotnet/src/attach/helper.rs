//! The small process that has CAP_DAC_OVERRIDE, so that the daemon has it not. What an attach needs
//! it for is little: to connect to a diagnostics socket, which nobody but its user may write to,
//! and to make and remove the library's file where nobody but the process's user may write. The
//! daemon starts a second process of its own program for these three before it has a second thread,
//! and gives the capability up ([`start`]).
//!
//! What that is good for: no mistake of the daemon's, a path it follows or a file it writes, passes
//! over permissions any more. What it does not do is keep the capability from somebody who runs
//! code of his own in the daemon: CAP_SYS_PTRACE is there, and with it every process of the host.
//!
//! A request is one message on a SOCK_SEQPACKET pair, with the descriptor on which it is answered:
//! requests of several threads know nothing of each other, and who has waited long enough goes
//! away. The helper believes nobody: it finds the socket by the process's id and start itself,
//! checks whose it is, and makes and removes files with the library's kind of name only. It ends
//! when the daemon does, by the end of the pair. Each request has a thread of its own, since a file
//! system that does not answer may hold it up for ever; there are only so many, and not all for
//! one.

mod protocol;

use self::protocol::{ASKING, HelperRequest, HelperResponse, MESSAGE_BYTES};
use super::ipc_error::IpcError;
use super::{shim_file, socket};
use perfusion_host::process::handle::ProcessHandle;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::net::sockopt::socket_type;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
    recvmsg, sendmsg, shutdown, socketpair,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// What it is about.
const CAPABILITY: CapabilitySet = CapabilitySet::DAC_OVERRIDE;
/// All the helper has: the other one lets it look below the root of another user's process, and
/// read where that keeps temporary files. (To read and search what is closed to it, CAPABILITY does
/// for CAP_DAC_READ_SEARCH.)
const KEPT: CapabilitySet = CAPABILITY.union(CapabilitySet::SYS_PTRACE);

/// Most requests that are in hand at once. The daemon has fewer: each of its workers has one, and
/// what sweeps and what removes has one. The others are those that it does not wait for any more.
const MOST_REQUESTS: usize = 32;
/// Most of them that one file system, or one process, can hold up.
const MOST_OF_ONE: usize = 8;
/// The answer's, and a directory's.
const MOST_DESCRIPTORS: usize = 2;
/// Making or removing a file takes no time, unless its file system does not answer.
const FILE_TIMEOUT: Duration = Duration::from_secs(2);

/// The daemon's end of the pair. Once in the life of a process: what was given up does not come
/// back.
static HELPER: OnceLock<HelperSocket> = OnceLock::new();

/// The helper's process.
#[derive(Debug)]
pub struct Helper(Child);

impl Helper {
    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }
}

/// Starts the helper and gives CAP_DAC_OVERRIDE up, for good and for whatever this process starts.
/// Capabilities are each thread's own: to be called while there is only one. `None` when there is
/// nothing to part with, or when it has to be kept, which is logged.
///
/// # Errors
/// When the helper cannot be started. The capability is still there then.
pub fn start() -> io::Result<Option<Helper>> {
    let sets = capabilities(None)?;
    if !sets.permitted.contains(CAPABILITY) {
        return Ok(None);
    }
    if !sets.permitted.contains(CapabilitySet::DAC_READ_SEARCH) {
        tracing::warn!(
            "the daemon itself keeps CAP_DAC_OVERRIDE: it cannot read files of other users without \
             it, for want of CAP_DAC_READ_SEARCH; grant that, too"
        );
        return Ok(None);
    }
    if was_given_by_the_file() {
        tracing::warn!(
            "the daemon itself keeps CAP_DAC_OVERRIDE: the program's file gives it to whoever runs \
             it, so no helper would know for whom it works; \
             let a service manager give capabilities"
        );
        return Ok(None);
    }
    let (ours, theirs) = pair()?;
    // Done when the other program runs, so with its capabilities.
    let process = Command::new(std::env::current_exe()?)
        .arg("attach-helper")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        // Ctrl-C is for us.
        .process_group(0)
        .current_dir("/")
        .spawn()?;
    give_up(&sets)?;
    // Not set twice: this is called once.
    HELPER.set(HelperSocket(ours)).ok();
    Ok(Some(Helper(process)))
}

/// True when this process has capabilities its parent had not (AT_SECURE, getauxval(3)): then
/// whoever may run the program may run a helper of his own, too, which must not do for him what he
/// could not do.
fn was_given_by_the_file() -> bool {
    const AT_SECURE: u64 = 23;
    let Ok(bytes) = std::fs::read("/proc/self/auxv") else { return true };
    let (words, _) = bytes.as_chunks::<8>();
    words.chunks_exact(2).any(|pair| {
        let [name, value] = pair else { return false };
        u64::from_ne_bytes(*name) == AT_SECURE && u64::from_ne_bytes(*value) != 0
    })
}

fn give_up(sets: &CapabilitySets) -> io::Result<()> {
    // A program that root starts gets all of the bounding set. To take something out of that needs
    // CAP_SETPCAP, which neither the unit nor the pod has; there it stays in the bounding set, and
    // what keeps it from coming back is no_new_privs alone, which those have anyway: with that no
    // exec gives more than its caller had (security/commoncap.c, cap_bprm_creds_from_file).
    remove_capability_from_bounding_set(CAPABILITY).ok();
    set_no_new_privs(true)?;
    // The ambient set goes with the inheritable one.
    let left = CapabilitySets {
        effective: sets.effective.difference(CAPABILITY),
        permitted: sets.permitted.difference(CAPABILITY),
        inheritable: sets.inheritable.difference(CAPABILITY),
    };
    Ok(set_capabilities(None, left)?)
}

/// True when this process has left the capability to a helper, which may have ended since.
#[must_use]
pub fn is_used() -> bool {
    HELPER.get().is_some()
}

/// Has the helper connect to the diagnostics socket of `target`; `None` when there is no helper.
pub(super) fn connect(
    target: &ProcessHandle,
    timeout: Duration,
    deadline: Instant,
) -> Option<Result<OwnedFd, IpcError>> {
    HELPER.get().map(|helper| helper.connect(target, timeout, deadline))
}

/// Has the helper make the library's file; `None` when there is no helper.
pub(super) fn make(directory: impl AsFd, name: &str) -> Option<Result<OwnedFd, Errno>> {
    HELPER.get().map(|helper| helper.file(&HelperRequest::Make(name), directory)?.ok_or(Errno::IO))
}

/// Has the helper remove the library's file; `None` when there is no helper.
pub(super) fn remove(directory: impl AsFd, name: &str) -> Option<Result<(), Errno>> {
    HELPER.get().map(|helper| helper.file(&HelperRequest::Remove(name), directory).map(drop))
}

/// Where the helper is asked.
struct HelperSocket(OwnedFd);

/// Why there is no answer.
enum HelperFailure {
    /// The helper has ended.
    Ended,
    TimedOut,
    System(Errno),
}

impl HelperSocket {
    fn connect(
        &self,
        target: &ProcessHandle,
        timeout: Duration,
        deadline: Instant,
    ) -> Result<OwnedFd, IpcError> {
        let pid = target.pid();
        let system = |step, source| IpcError::System { pid, step, source };
        let start_ticks = target.start_ticks().map_err(|source| system("reading stat", source))?;
        let left = deadline.saturating_duration_since(Instant::now());
        let answer =
            self.ask(&HelperRequest::Connect { pid, start_ticks, timeout: left }, None, deadline);
        Err(match answer {
            Ok((HelperResponse::Done, Some(socket))) => return Ok(socket),
            Ok((HelperResponse::NoSocket, _)) => {
                IpcError::NoSocket { pid, looked_in: target.temporary_directories() }
            }
            Ok((HelperResponse::WrongPeer(found), _)) => IpcError::WrongPeer { pid, found },
            Ok((HelperResponse::TimedOut, _)) | Err(HelperFailure::TimedOut) => {
                IpcError::TimedOut { pid, waited: timeout }
            }
            Ok((HelperResponse::System(step, source), _)) => system(step, source),
            Ok((HelperResponse::Done, None)) => system(ASKING, Errno::IO),
            Err(HelperFailure::System(source)) => system(ASKING, source),
            Err(HelperFailure::Ended) => IpcError::NoHelper { pid },
        })
    }

    /// A request about a file; whoever has no helper any more has no right either.
    fn file(
        &self,
        request: &HelperRequest<'_>,
        directory: impl AsFd,
    ) -> Result<Option<OwnedFd>, Errno> {
        match self.ask(request, Some(directory.as_fd()), Instant::now() + FILE_TIMEOUT) {
            Ok((HelperResponse::Done, made)) => Ok(made),
            Ok((HelperResponse::System(_, error), _)) | Err(HelperFailure::System(error)) => {
                Err(error)
            }
            Ok((HelperResponse::TimedOut, _)) | Err(HelperFailure::TimedOut) => {
                Err(Errno::TIMEDOUT)
            }
            Ok((HelperResponse::NoSocket | HelperResponse::WrongPeer(_), _)) => Err(Errno::IO),
            Err(HelperFailure::Ended) => Err(Errno::ACCESS),
        }
    }

    fn ask(
        &self,
        request: &HelperRequest<'_>,
        directory: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(HelperResponse, Option<OwnedFd>), HelperFailure> {
        let (answers, theirs) = pair().map_err(HelperFailure::System)?;
        let descriptors: Vec<BorrowedFd<'_>> =
            [Some(theirs.as_fd()), directory].into_iter().flatten().collect();
        match send(&self.0, &request.bytes(), &descriptors) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                return Err(HelperFailure::Ended);
            }
            Err(error) => return Err(HelperFailure::System(error)),
        }
        // From here on its other end is the helper's alone, and ends with it.
        drop(theirs);
        let mut late = false;
        while !late {
            let left = deadline.saturating_duration_since(Instant::now());
            if wait(&answers, left) {
                break;
            }
            late = left.is_zero();
        }
        if late {
            // An answer that has come meanwhile is here, and a later one cannot be sent: so nothing
            // is made that neither side knows of.
            shutdown(&answers, Shutdown::Read).map_err(HelperFailure::System)?;
        }
        match receive(&answers) {
            Ok(None) if late => Err(HelperFailure::TimedOut),
            Ok(Some(SocketMessage { bytes, mut descriptors })) => {
                let answer =
                    HelperResponse::parse(&bytes).ok_or(HelperFailure::System(Errno::PROTO))?;
                Ok((answer, descriptors.pop()))
            }
            Ok(None) | Err(Errno::CONNRESET) => Err(HelperFailure::Ended),
            Err(error) => Err(HelperFailure::System(error)),
        }
    }
}

/// The helper's life: its stdin is its end of the pair.
///
/// # Errors
/// When it is something else, or the capability is not there.
pub fn serve() -> io::Result<()> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    if socket_type(&socket)? != SocketType::SEQPACKET || was_given_by_the_file() {
        return Err(io::Error::other("it is for the daemon to start"));
    }
    keep_only_what_it_needs()?;
    outlive_signals()?;
    // Whatever a request still waits for then.
    Ok(work(&socket)?)
}

fn keep_only_what_it_needs() -> io::Result<()> {
    let kept = capabilities(None)?.permitted.intersection(KEPT);
    if !kept.contains(CAPABILITY) {
        return Err(io::Error::other("CAP_DAC_OVERRIDE is not there"));
    }
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

/// What is sent to all processes of a service, such as `systemctl stop` and `systemctl kill`, is
/// for the daemon: until that has ended, the helper is needed.
fn outlive_signals() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _inside = runtime.enter();
    // The handlers stay when nobody listens to them any more.
    for kind in [
        SignalKind::hangup(),
        SignalKind::interrupt(),
        SignalKind::terminate(),
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
    ] {
        signal(kind).map(drop)?;
    }
    Ok(())
}

/// Has requests answered until there are no more.
fn work(socket: &OwnedFd) -> Result<(), Errno> {
    let in_hand = Arc::default();
    loop {
        let SocketMessage { bytes, descriptors } = match receive(socket) {
            Ok(Some(message)) => message,
            Err(Errno::MSGSIZE) => continue,
            Ok(None) | Err(Errno::CONNRESET) => return Ok(()),
            Err(error) => return Err(error),
        };
        let mut descriptors = descriptors.into_iter();
        let Some(answers) = descriptors.next().map(Arc::new) else { continue };
        if let Err(error) = begin(&in_hand, bytes, descriptors.next(), &answers) {
            // Fails only when nobody waits for it any more.
            send(&answers, &HelperResponse::System(ASKING, error).bytes(), &[]).ok();
        }
    }
}

/// Has a thread answer a request; BUSY when others of the same holder wait already, or too many of
/// all.
fn begin(
    in_hand: &Arc<PendingRequests>,
    request: Vec<u8>,
    directory: Option<OwnedFd>,
    answers: &Arc<OwnedFd>,
) -> Result<(), Errno> {
    let place = PendingRequests::add(in_hand, RequestBlocker::of(&request, directory.as_ref())?)
        .ok_or(Errno::BUSY)?;
    let answers = Arc::clone(answers);
    let work = move || {
        answer(&request, directory.as_ref(), &answers);
        drop(place);
    };
    let thread = std::thread::Builder::new().name("attach-helper".into()).spawn(work);
    thread.map(drop).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
}

/// Who can hold a request up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestBlocker {
    /// A process: by its backlog, and by where it keeps temporary files.
    Process(u32),
    /// A file system, by its device's numbers.
    Device(u32, u32),
}

impl RequestBlocker {
    /// INVAL for what is no request.
    fn of(request: &[u8], directory: Option<&OwnedFd>) -> Result<Self, Errno> {
        match (HelperRequest::parse(request), directory) {
            (Some(HelperRequest::Connect { pid, .. }), None) => Ok(Self::Process(pid)),
            (Some(HelperRequest::Make(_) | HelperRequest::Remove(_)), Some(directory)) => {
                // Without asking its server.
                let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
                let status = statx(directory, "", flags, StatxFlags::empty())?;
                Ok(Self::Device(status.stx_dev_major, status.stx_dev_minor))
            }
            _ => Err(Errno::INVAL),
        }
    }
}

/// Whose requests are not answered yet.
#[derive(Default)]
struct PendingRequests(Mutex<Vec<RequestBlocker>>);

/// One of them, until it is dropped.
struct PendingRequest(Arc<PendingRequests>, RequestBlocker);

impl PendingRequests {
    fn add(this: &Arc<Self>, holder: RequestBlocker) -> Option<PendingRequest> {
        let mut all = this.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_one = all.iter().filter(|other| **other == holder).count();
        if all.len() >= MOST_REQUESTS || of_one >= MOST_OF_ONE {
            return None;
        }
        all.push(holder);
        Some(PendingRequest(Arc::clone(this), holder))
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        let mut all = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = all.iter().position(|other| *other == self.1) {
            all.swap_remove(at);
        }
    }
}

fn answer(request: &[u8], directory: Option<&OwnedFd>, answers: &OwnedFd) {
    let (answer, found) = match perform(request, directory) {
        Ok(found) => (HelperResponse::Done, found),
        Err(why) => (why, None),
    };
    let sent = send(answers, &answer.bytes(), found.as_ref().map(AsFd::as_fd).as_slice());
    // Fails only when nobody waits for it any more. What was made for nobody would stay.
    if sent.is_err()
        && answer == HelperResponse::Done
        && let (Some(HelperRequest::Make(name)), Some(directory)) =
            (HelperRequest::parse(request), directory)
    {
        // On failure it is left to the next sweep.
        shim_file::remove(directory, name).ok();
    }
}

fn perform(request: &[u8], directory: Option<&OwnedFd>) -> Result<Option<OwnedFd>, HelperResponse> {
    let file = |error| HelperResponse::System(ASKING, error);
    match (HelperRequest::parse(request), directory) {
        (Some(HelperRequest::Connect { pid, start_ticks, timeout }), None) => {
            socket::connect_to(pid, start_ticks, timeout)
                .map(Some)
                .map_err(|error| HelperResponse::of(&error))
        }
        (Some(HelperRequest::Make(name)), Some(directory)) => {
            shim_file::create(directory, name).map(Some).map_err(file)
        }
        (Some(HelperRequest::Remove(name)), Some(directory)) => {
            shim_file::remove(directory, name).map(|()| None).map_err(file)
        }
        _ => Err(file(Errno::INVAL)),
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::MSGSIZE);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// What is said on a pair.
struct SocketMessage {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// The next message; `None` at the end. MSGSIZE when it is longer, or has more of them, than any of
/// ours.
fn receive(socket: &OwnedFd) -> Result<Option<SocketMessage>, Errno> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let (received, descriptors): (_, Vec<OwnedFd>) = loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Ok(received) => {
                let descriptors = control.drain().filter_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                    _ => None,
                });
                break (received, descriptors.flatten().collect());
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    };
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE);
    }
    match bytes.get(..received.bytes) {
        None | Some([]) => Ok(None),
        Some(bytes) => Ok(Some(SocketMessage { bytes: bytes.to_vec(), descriptors })),
    }
}

/// Waits until there is something to read, or the other end is closed.
fn wait(descriptor: &impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
    poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::{
        HelperFailure, HelperRequest, HelperResponse, HelperSocket, MESSAGE_BYTES, MOST_OF_ONE,
        MOST_REQUESTS, PendingRequests, RequestBlocker, SocketMessage, answer, pair, receive, send,
        shim_file, work,
    };
    use crate::attach::ipc_error::IpcError;
    use crate::attach::socket::tests::{with_listener, with_peer};
    use perfusion_host::process::handle::ProcessHandle;
    use rustix::io::Errno;
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    /// For what is answered at once, on a machine that is busy with other things.
    const MINUTE: Duration = Duration::from_secs(60);

    /// One whose helper is a thread: with this process's own rights.
    fn line() -> HelperSocket {
        let (ours, theirs) = pair().unwrap();
        std::thread::spawn(move || work(&theirs));
        HelperSocket(ours)
    }

    fn connect(
        line: &HelperSocket,
        target: &ProcessHandle,
        timeout: Duration,
    ) -> Result<UnixStream, IpcError> {
        // Who waits for it does so by `poll`; these tests have nobody to wait for.
        line.connect(target, timeout, Instant::now() + timeout).map(|socket| {
            let stream = UnixStream::from(socket);
            stream.set_nonblocking(false).unwrap();
            stream
        })
    }

    #[test]
    fn a_connection_that_the_helper_made_is_whoevers_who_asked() {
        let peer = |mut stream: UnixStream| {
            let mut said = [0; 5];
            stream.read_exact(&mut said).unwrap();
            stream.write_all(&said).unwrap();
        };
        let said = with_peer(peer, |me| {
            let mut connection = connect(&line(), me, MINUTE).unwrap();
            connection.write_all(b"hello").unwrap();
            let mut said = String::new();
            connection.read_to_string(&mut said).unwrap();
            said
        });
        assert_eq!(said, "hello");
    }

    #[test]
    fn a_process_that_has_its_pid_from_another_is_not_connected_to() {
        let me = ProcessHandle::open(std::process::id()).unwrap();
        let request = HelperRequest::Connect {
            pid: me.pid(),
            start_ticks: me.start_ticks().unwrap() - 1,
            timeout: MINUTE,
        };
        let Ok((answer, None)) = line().ask(&request, None, Instant::now() + MINUTE) else {
            panic!()
        };
        assert_eq!(answer, HelperResponse::System("reading stat", Errno::SRCH));
    }

    #[test]
    fn a_process_that_takes_no_connection_costs_the_timeout_and_no_more() {
        let error = with_listener(|me, listener| {
            // One may wait to be taken.
            rustix::net::listen(&listener, 0).unwrap();
            let line = line();
            let _first = connect(&line, me, MINUTE).unwrap();
            let begin = Instant::now();
            let second = connect(&line, me, Duration::from_millis(50));
            assert!(begin.elapsed() < MINUTE);
            second.unwrap_err()
        });
        assert!(matches!(error, IpcError::TimedOut { .. }), "{error}");
    }

    #[test]
    fn files_of_the_librarys_kind_of_name_are_made_and_removed_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(folder.path()).unwrap();
        let line = line();
        let name = shim_file::NAMING.fresh().unwrap();
        let made = line.file(&HelperRequest::Make(&name), &directory).unwrap();
        std::fs::File::from(made.unwrap()).write_all(b"library").unwrap();
        assert_eq!(std::fs::read(folder.path().join(&name)).unwrap(), b"library");
        assert_eq!(line.file(&HelperRequest::Make(&name), &directory).unwrap_err(), Errno::EXIST);
        assert!(line.file(&HelperRequest::Remove(&name), &directory).unwrap().is_none());
        assert!(!folder.path().join(&name).exists());

        std::fs::create_dir(folder.path().join(&name)).unwrap();
        assert_eq!(
            line.file(&HelperRequest::Remove(&name), &directory).unwrap_err(),
            Errno::INVAL,
            "a directory"
        );
        for other in [
            "",
            "x.so",
            "perfusion-shim-0123456789abcdef.so/x",
            "../perfusion-shim-0123456789abcdef.so",
        ] {
            for request in [HelperRequest::Make(other), HelperRequest::Remove(other)] {
                assert_eq!(line.file(&request, &directory).unwrap_err(), Errno::INVAL, "{other}");
            }
        }
    }

    #[test]
    fn a_file_that_was_made_too_late_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(folder.path()).unwrap();
        let name = shim_file::NAMING.fresh().unwrap();
        let (ours, theirs) = pair().unwrap();
        let soon = Instant::now() + Duration::from_millis(1);
        let asked =
            HelperSocket(ours).ask(&HelperRequest::Make(&name), Some(directory.as_fd()), soon);
        assert!(matches!(asked, Err(HelperFailure::TimedOut)));
        let late = |bytes: &[u8]| {
            let (answers, gone) = pair().unwrap();
            drop(gone);
            answer(bytes, Some(&directory.try_clone().unwrap().into()), &answers);
        };
        let SocketMessage { bytes, .. } = receive(&theirs).unwrap().unwrap();
        late(&bytes);
        assert!(!folder.path().join(&name).exists());
        // What was there before is not its own.
        std::fs::write(folder.path().join(&name), "library").unwrap();
        late(&bytes);
        assert!(folder.path().join(&name).exists());
    }

    #[test]
    fn an_answer_that_came_as_the_time_was_over_is_not_lost() {
        let request = HelperRequest::Connect { pid: 1, start_ticks: 1, timeout: MINUTE };
        for round in 0..1000 {
            let (ours, theirs) = pair().unwrap();
            let answered = std::thread::spawn(move || {
                let SocketMessage { descriptors, .. } = receive(&theirs).unwrap().unwrap();
                send(&descriptors[0], &HelperResponse::NoSocket.bytes(), &[])
            });
            let asked = HelperSocket(ours).ask(&request, None, Instant::now());
            // Too late or not: what could be sent was read.
            let read = matches!(asked, Ok((HelperResponse::NoSocket, None)));
            assert_eq!(answered.join().unwrap().is_ok(), read, "{round}");
        }
    }

    #[test]
    fn requests_that_are_held_up_hold_up_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(folder.path()).unwrap();
        with_listener(|me, listener| {
            // One may wait to be taken.
            rustix::net::listen(&listener, 0).unwrap();
            let line = line();
            let _first = connect(&line, me, MINUTE).unwrap();
            let ticks = me.start_ticks().unwrap();
            let request =
                HelperRequest::Connect { pid: me.pid(), start_ticks: ticks, timeout: MINUTE };
            let (answers, theirs) = pair().unwrap();
            for _ in 0..MOST_OF_ONE {
                send(&line.0, &request.bytes(), &[theirs.as_fd()]).unwrap();
            }
            let Ok((refused, None)) = line.ask(&request, None, Instant::now() + MINUTE) else {
                panic!()
            };
            assert_eq!(refused, HelperResponse::System("asking the helper", Errno::BUSY));
            let make = HelperRequest::Make("perfusion-shim-0123456789abcdef.so");
            let made = line.ask(&make, Some(directory.as_fd()), Instant::now() + MINUTE / 2);
            assert!(matches!(made, Ok((HelperResponse::Done, Some(_)))));
            drop(answers);
        });
    }

    #[test]
    fn there_are_so_many_requests_at_once_and_not_all_are_of_one() {
        let in_hand = std::sync::Arc::default();
        let take = |pid| PendingRequests::add(&in_hand, RequestBlocker::Process(pid));
        let mut places: Vec<_> = (0..MOST_OF_ONE).map(|_| take(1).unwrap()).collect();
        assert!(take(1).is_none());
        places.extend(
            (MOST_OF_ONE..MOST_REQUESTS)
                .filter_map(|_| PendingRequests::add(&in_hand, RequestBlocker::Device(0, 1))),
        );
        places.extend((2..2 + (MOST_REQUESTS - places.len()) as u32).map(|pid| take(pid).unwrap()));
        assert_eq!(places.len(), MOST_REQUESTS);
        assert!(take(1000).is_none());
        drop(places);
        assert!(take(1000).is_some());
    }

    #[test]
    fn noise_is_passed_over() {
        let line = line();
        send(&line.0, &[1; MESSAGE_BYTES + 1], &[]).unwrap();
        send(&line.0, &[1], &[]).unwrap();
        let (answers, theirs) = pair().unwrap();
        send(&line.0, &[1], &[theirs.as_fd()]).unwrap();
        let SocketMessage { bytes, .. } = receive(&answers).unwrap().unwrap();
        assert_eq!(
            HelperResponse::parse(&bytes),
            Some(HelperResponse::System("asking the helper", Errno::INVAL))
        );
        let folder = tempfile::tempdir().unwrap();
        let directory = std::fs::File::open(folder.path()).unwrap();
        line.file(&HelperRequest::Make(&shim_file::NAMING.fresh().unwrap()), &directory).unwrap();
    }

    #[test]
    fn a_helper_that_has_ended_is_told_from_one_that_says_no() {
        let me = ProcessHandle::open(std::process::id()).unwrap();
        let (ours, theirs) = pair().unwrap();
        drop(theirs);
        let error = connect(&HelperSocket(ours), &me, MINUTE).unwrap_err();
        assert!(matches!(error, IpcError::NoHelper { .. }), "{error}");
        // It ends with the request in its hands.
        let (ours, theirs) = pair().unwrap();
        let asked =
            std::thread::spawn(move || connect(&HelperSocket(ours), &me, MINUTE).unwrap_err());
        drop(super::receive(&theirs).unwrap().unwrap());
        drop(theirs);
        let error = asked.join().unwrap();
        assert!(matches!(error, IpcError::NoHelper { .. }), "{error}");
    }
}
