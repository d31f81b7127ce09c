//! Event sessions: the events follow the answer to the request on the same connection.

use super::super::ipc_error::IpcError;
use super::super::wait::IpcTimeout;
use super::connection::{IpcConnection, LOOK_UP, ResponseReader, request, string};
use perfusion_host::process::handle::ProcessHandle;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const SET_EVENTS: u8 = 0x02;
const STOP_TRACING: u8 = 0x01;
const COLLECT_TRACING_2: u8 = 0x03;
/// .NET 9 and newer.
const COLLECT_TRACING_3: u8 = 0x04;
/// Version 4 of the event format, "nettrace".
const NETTRACE: u32 = 1;

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

/// The provider of [`EventSubscription`].
pub(crate) const RUNTIME_PROVIDER: &str = "Microsoft-Windows-DotNETRuntime";

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
pub(crate) fn listen_from_start(
    target: &ProcessHandle,
    what: &EventSubscription,
    stacks: bool,
    give_up: Arc<AtomicBool>,
    wait: impl Into<IpcTimeout>,
) -> Result<EventStream, IpcError> {
    let mut connection = IpcConnection::open(target, wait.into())?;
    let pid = connection.pid;
    // No list of all methods at the end.
    let (command, switches) =
        if stacks { (COLLECT_TRACING_2, &[0][..]) } else { (COLLECT_TRACING_3, &[0, 0][..]) };
    let payload = what.request(switches, pid)?;
    let answer = connection.exchange(SET_EVENTS, command, &payload)?;
    let session = u64::from_le_bytes(ResponseReader { pid, rest: &answer }.array()?);
    Ok(EventStream { session, socket: connection.into_socket(), give_up })
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
