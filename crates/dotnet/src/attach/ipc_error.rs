//! Why a request to a runtime's diagnostics socket had no good answer.

use super::hresult::Hresult;
use perfusion_model::text::printable;
use rustix::io::Errno;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The step at which another user's socket is refused.
pub(super) const CONNECT: &str = "connect";

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
    pub(crate) fn is_unknown_command(&self) -> bool {
        // DS_IPC_E_UNKNOWN_COMMAND (ds-ipc-types.h).
        matches!(self, Self::Refused { code: Hresult(0x8013_1385), .. })
    }

    /// True when the socket is there, and for others.
    pub(super) fn is_denied(&self) -> bool {
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
