//! A connection to a runtime: requests and answers as bytes.

use super::super::helper;
use super::super::hresult::Hresult;
use super::super::ipc_error::IpcError;
use super::super::socket::{self, ConnectedSocket};
use super::super::wait::IpcTimeout;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::text::printable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

pub(super) const MAGIC: &[u8; 14] = b"DOTNET_IPC_V1\0";
pub(super) const HEADER_BYTES: usize = 20;

/// Between looks at whether whoever waits has been told to stop.
pub(super) const LOOK_UP: Duration = Duration::from_millis(100);
const SET_SERVER: u8 = 0xff;
const SERVER_OK: u8 = 0x00;

/// A count of UTF-16 units, the zero at the end included, and the units.
pub(super) fn string(text: &str, pid: u32) -> Result<Vec<u8>, IpcError> {
    let units: Vec<u16> = text.encode_utf16().chain([0]).collect();
    let mut bytes = count(units.len(), pid)?.to_vec();
    bytes.extend(units.into_iter().flat_map(u16::to_le_bytes));
    Ok(bytes)
}

pub(super) fn count(len: usize, pid: u32) -> Result<[u8; 4], IpcError> {
    let len = u32::try_from(len).map_err(|_| IpcError::Malformed {
        pid,
        expected: "a request below 4 GiB",
        found: len.to_string(),
    })?;
    Ok(len.to_le_bytes())
}

pub(super) fn request(
    target: &ProcessHandle,
    set: u8,
    command: u8,
    payload: &[u8],
    wait: IpcTimeout,
) -> Result<Vec<u8>, IpcError> {
    IpcConnection::open(target, wait)?.exchange(set, command, payload)
}

/// A connection to a runtime, on which one request can be made.
#[derive(Debug)]
pub(super) struct IpcConnection {
    pub(super) pid: u32,
    socket: OwnedFd,
    wait: IpcTimeout,
    began: Instant,
    deadline: Instant,
}

impl IpcConnection {
    /// One to a runtime that listens: by ourselves, which does for our own user's processes and for
    /// whoever may do anything, or else through the helper, if this process has left that right to
    /// one.
    pub(super) fn open(target: &ProcessHandle, wait: IpcTimeout) -> Result<Self, IpcError> {
        let pid = target.pid();
        let deadline = Instant::now() + wait.timeout;
        let opened = socket::open(target, &wait, deadline);
        if let Err(error) = &opened
            && error.is_denied()
            && let Some(socket) = helper::connect(target, wait.timeout, deadline)
        {
            return Ok(Self { pid, socket: socket?, wait, began: Instant::now(), deadline });
        }
        let ConnectedSocket { socket, began } = opened?;
        Ok(Self { pid, socket, wait, began, deadline })
    }

    /// Makes a request and reads its answer; more may follow on the connection.
    pub(super) fn exchange(
        &mut self,
        set: u8,
        command: u8,
        payload: &[u8],
    ) -> Result<Vec<u8>, IpcError> {
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

    /// The socket, for what follows an answer.
    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
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
    fn receive(&mut self, len: usize) -> Result<Vec<u8>, IpcError> {
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
pub(super) struct ResponseReader<'a> {
    pub(super) pid: u32,
    pub(super) rest: &'a [u8],
}

impl ResponseReader<'_> {
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], IpcError> {
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
    pub(super) fn string(&mut self) -> Result<String, IpcError> {
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
