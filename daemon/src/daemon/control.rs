//! The control socket: the same answers as over HTTP, and what only root may know, how each process
//! stands. Its file has mode 0600, lies beside the kill switch, and whoever connects must be root
//! or who runs the daemon, whatever rights the file has by then.

use super::http::{Listener, ServedState, ServerThread};
use super::processes::{PROCESSES, ProcessesResponse};
use super::sinks::SinkWatcher;
use super::state::DaemonState;
use perfusion_export::file;
use rustix::fs::Mode;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;

/// Its name, in the directory of the kill switch.
const NAME: &str = "control.sock";
/// Connections that wait to be taken.
const BACKLOG: i32 = 8;
/// How long the daemon is given to answer, and how much is read of it: 16,384 processes of some 300
/// bytes fit six times.
const TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_BYTES: u64 = 32 << 20;

/// The path of the socket of a daemon with this kill switch.
#[must_use]
pub fn path(kill_switch: &Path) -> PathBuf {
    kill_switch.with_file_name(NAME)
}

/// The socket; dropping it takes the file away.
pub struct Control {
    path: PathBuf,
    _thread: ServerThread,
}

impl Control {
    /// Listens at `path`. The caller holds the lock that only one daemon can have, so what lies
    /// there is a dead one's.
    ///
    /// # Errors
    /// When it cannot be had.
    pub fn start(path: PathBuf, state: Arc<DaemonState>, sinks: SinkWatcher) -> io::Result<Self> {
        let about = ServedState::new(state, sinks, true);
        let thread = ServerThread::start("control", || listen(&path).map(ControlListener), about)?;
        Ok(Self { path, _thread: thread })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Somebody may have taken it away.
        std::fs::remove_file(&self.path).ok();
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    file::remove(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Before it listens nobody can connect.
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// Connections of those who may ask.
struct ControlListener(UnixListener);

impl Listener for ControlListener {
    type Connection = tokio::net::UnixStream;

    async fn accept(&self) -> io::Result<Self::Connection> {
        let (connection, _) = self.0.accept().await?;
        let peer = socket_peercred(&connection)?.uid;
        if peer.is_root() || peer == rustix::process::geteuid() {
            Ok(connection)
        } else {
            tracing::warn!(uid = peer.as_raw(), "refused at the control socket");
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }
}

/// Asks the daemon at `path`; `None` when there is none.
///
/// # Errors
/// When there is one and it does not answer as it should.
pub fn ask(path: &Path) -> io::Result<Option<ProcessesResponse>> {
    use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
    let mut connection = match UnixStream::connect(path) {
        Ok(connection) => connection,
        Err(error) if matches!(error.kind(), NotFound | ConnectionRefused | PermissionDenied) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    connection.set_read_timeout(Some(TIMEOUT))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    write!(connection, "GET {PROCESSES} HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
    let mut text = String::new();
    connection.take(ANSWER_BYTES).read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_default();
    if !head.starts_with("HTTP/1.1 200") {
        return Err(io::Error::other(body.trim().to_owned()));
    }
    serde_json::from_str(body).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::{Control, ask, path};
    use crate::config::Config;
    use crate::daemon::sinks::{OpenedSinks, Sinks};
    use crate::daemon::state::DaemonState;
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    #[test]
    fn the_socket_is_the_owners_alone_and_is_not_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(&folder.path().join("off"));
        assert_eq!(ask(&path).unwrap(), None, "no daemon");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert_eq!(ask(&path).unwrap(), None, "one that died");
        let (state, sinks) = (
            Arc::new(DaemonState::of(Config::default())),
            Sinks::start(OpenedSinks::default()).unwrap(),
        );
        let control = Control::start(path.clone(), state, sinks.watcher()).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(ask(&path).unwrap_err().to_string().contains("nothing is recorded"));
        // One who connects and says nothing, or too much, holds up nobody.
        let silent: Vec<UnixStream> = (0..8).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let mut long = UnixStream::connect(&path).unwrap();
        // It may be closed in the middle.
        long.write_all(&vec![b'x'; 1 << 20]).ok();
        let mut health = UnixStream::connect(&path).unwrap();
        health.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        health.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        drop((silent, control));
        assert!(!path.exists());
        sinks.close(std::time::Instant::now());
    }
}
