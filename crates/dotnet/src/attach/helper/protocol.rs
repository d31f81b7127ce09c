//! What the daemon asks its helper for and what that answers, as bytes of one message each. Both
//! are the same program, so there are no versions of it.

use crate::attach::ipc_error::{CONNECT as CONNECT_STEP, IpcError};
use crate::attach::shim_file;
use rustix::io::Errno;
use std::io;
use std::time::Duration;

/// Bytes of the longest message, and more than that: one of the library's names.
pub(super) const MESSAGE_BYTES: usize = 64;
/// A request for a connection waits no longer, whatever it says.
const LONGEST: Duration = Duration::from_secs(60);

/// What the helper does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HelperRequest<'a> {
    /// Connects to the diagnostics socket of the process that has this id and started then.
    Connect { pid: u32, start_ticks: u64, timeout: Duration },
    /// Makes a file of this name in the directory that comes with it.
    Make(&'a str),
    /// Removes it.
    Remove(&'a str),
}

const CONNECT: u8 = 1;
const MAKE: u8 = 2;
const REMOVE: u8 = 3;

impl<'a> HelperRequest<'a> {
    pub(super) fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Connect { pid, start_ticks, timeout } => {
                let timeout = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
                [
                    &[CONNECT][..],
                    &pid.to_ne_bytes(),
                    &start_ticks.to_ne_bytes(),
                    &timeout.to_ne_bytes(),
                ]
                .concat()
            }
            Self::Make(name) => [&[MAKE], name.as_bytes()].concat(),
            Self::Remove(name) => [&[REMOVE], name.as_bytes()].concat(),
        }
    }

    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        let name = || std::str::from_utf8(rest).ok().filter(|name| shim_file::NAMING.fits(name));
        match *kind {
            CONNECT => {
                let (pid, rest) = rest.split_first_chunk()?;
                let (start_ticks, rest) = rest.split_first_chunk()?;
                let timeout =
                    Duration::from_millis(u32::from_ne_bytes(rest.try_into().ok()?).into());
                Some(Self::Connect {
                    pid: u32::from_ne_bytes(*pid),
                    start_ticks: u64::from_ne_bytes(*start_ticks),
                    timeout: timeout.min(LONGEST),
                })
            }
            MAKE => name().map(Self::Make),
            REMOVE => name().map(Self::Remove),
            _ => None,
        }
    }
}

/// What it answers; with `Done` comes what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HelperResponse {
    Done,
    NoSocket,
    WrongPeer(u32),
    TimedOut,
    System(&'static str, Errno),
}

pub(super) const ASKING: &str = "asking the helper";
/// Steps that may fail ([`IpcError::System`]): an answer has their number. Another one is the first
/// of these.
const STEPS: [&str; 9] = [
    ASKING,
    "opening /proc/PID",
    "reading NSpid",
    "reading stat",
    "socket",
    "SO_SNDTIMEO",
    "address",
    CONNECT_STEP,
    "SO_PEERCRED",
];

impl HelperResponse {
    pub(super) fn of(error: &IpcError) -> Self {
        match error {
            IpcError::NoSocket { .. } => Self::NoSocket,
            IpcError::WrongPeer { found, .. } => Self::WrongPeer(*found),
            IpcError::TimedOut { .. } | IpcError::GivenUp { .. } => Self::TimedOut,
            IpcError::System { step, source, .. } => Self::System(step, *source),
            // These come of what is said on a connection.
            IpcError::Malformed { .. } | IpcError::Refused { .. } | IpcError::NoHelper { .. } => {
                Self::System(ASKING, Errno::IO)
            }
        }
    }

    pub(super) fn bytes(self) -> Vec<u8> {
        let (kind, step, value) = match self {
            Self::Done => (0, 0, 0),
            Self::NoSocket => (1, 0, 0),
            Self::WrongPeer(found) => (2, 0, found),
            Self::TimedOut => (3, 0, 0),
            Self::System(step, error) => {
                let step = STEPS.iter().position(|known| *known == step).unwrap_or(0);
                (4, u8::try_from(step).unwrap_or(0), error.raw_os_error().unsigned_abs())
            }
        };
        [&[kind, step][..], &value.to_ne_bytes()].concat()
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let &[kind, step, ref value @ ..] = bytes else { return None };
        let value = u32::from_ne_bytes(value.try_into().ok()?);
        match kind {
            0 => Some(Self::Done),
            1 => Some(Self::NoSocket),
            2 => Some(Self::WrongPeer(value)),
            3 => Some(Self::TimedOut),
            4 => {
                let error = io::Error::from_raw_os_error(i32::try_from(value).ok()?);
                Some(Self::System(STEPS.get(usize::from(step))?, Errno::from_io_error(&error)?))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{HelperRequest, HelperResponse, MESSAGE_BYTES, STEPS, shim_file};
    use proptest::{collection::vec, prelude::any, proptest};
    use rustix::io::Errno;
    use std::time::Duration;

    #[test]
    fn requests_and_answers_are_read_as_they_were_written() {
        let name = shim_file::NAMING.fresh().unwrap();
        let timeout = Duration::from_millis(1234);
        let connect = HelperRequest::Connect { pid: 7, start_ticks: 1 << 40, timeout };
        for request in [connect, HelperRequest::Make(&name), HelperRequest::Remove(&name)] {
            assert!(request.bytes().len() <= MESSAGE_BYTES);
            assert_eq!(HelperRequest::parse(&request.bytes()), Some(request));
        }
        let others = [
            HelperResponse::Done,
            HelperResponse::NoSocket,
            HelperResponse::WrongPeer(u32::MAX),
            HelperResponse::TimedOut,
        ];
        let failed = STEPS.map(|step| HelperResponse::System(step, Errno::ACCESS));
        for answer in others.into_iter().chain(failed) {
            assert_eq!(HelperResponse::parse(&answer.bytes()), Some(answer));
        }
    }

    proptest! {
        #[test]
        fn any_message_is_read_or_refused(bytes in vec(any::<u8>(), 0..MESSAGE_BYTES)) {
            // What has been read says the same again.
            if let Some(request) = HelperRequest::parse(&bytes) {
                assert_eq!(HelperRequest::parse(&request.bytes()), Some(request));
            }
            if let Some(answer) = HelperResponse::parse(&bytes) {
                assert_eq!(HelperResponse::parse(&answer.bytes()), Some(answer));
            }
        }
    }
}
