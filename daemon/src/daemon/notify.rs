//! What systemd is told about this service (sd_notify(3)): a datagram to the socket it names in the
//! environment. Without one nobody is told.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The manager of this service.
#[derive(Debug, Default)]
pub struct Notify {
    manager: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl Notify {
    /// The one the environment names (`NOTIFY_SOCKET`, `WATCHDOG_USEC`).
    #[must_use]
    pub fn from_environment() -> Self {
        let micros = std::env::var("WATCHDOG_USEC").ok().and_then(|text| text.parse().ok());
        // Meant for another process of the service when it names another pid.
        let other =
            std::env::var("WATCHDOG_PID").is_ok_and(|pid| pid != std::process::id().to_string());
        Self::to(
            std::env::var_os("NOTIFY_SOCKET"),
            micros.filter(|_| !other).map(Duration::from_micros),
        )
    }

    fn to(socket: Option<OsString>, watchdog: Option<Duration>) -> Self {
        let open = |name: OsString| -> io::Result<_> {
            let address = match name.as_bytes().split_first() {
                // Of the abstract namespace.
                Some((b'@', rest)) => SocketAddr::from_abstract_name(rest)?,
                _ => SocketAddr::from_pathname(&name)?,
            };
            let socket = UnixDatagram::unbound()?;
            // A manager that does not read must not hold the profiler up.
            socket.set_nonblocking(true)?;
            Ok((socket, address))
        };
        let manager = socket.and_then(|name| match open(name) {
            Ok(manager) => Some(manager),
            Err(error) => {
                tracing::warn!(%error, "NOTIFY_SOCKET cannot be used");
                None
            }
        });
        Self { manager, watchdog }
    }

    fn send(&self, message: &str) {
        if let Some((socket, address)) = &self.manager {
            // Nothing better can be done than to say the next thing.
            socket.send_to_addr(message.as_bytes(), address).ok();
        }
    }

    /// It works, and this is what it does.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}"));
    }

    /// It reads its configuration again; followed by [`Notify::ready`].
    pub fn reloading(&self) {
        let micros = perfusion_model::event::MonotonicNs::now().0 / 1_000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
    }

    /// It ends.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// It is alive.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// How often [`Notify::alive`] is due: three times as often as the manager asks.
    #[must_use]
    pub fn alive_every(&self) -> Option<Duration> {
        self.watchdog.map(|interval| interval / 3)
    }
}

#[cfg(test)]
mod tests {
    use super::Notify;
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    #[test]
    fn the_manager_hears_each_state_and_nobody_else_is_needed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notify = Notify::to(Some(path.into()), Some(Duration::from_secs(30)));
        notify.ready("recording");
        notify.reloading();
        notify.alive();
        notify.stopping();
        let heard: Vec<String> = (0..4)
            .map(|_| {
                let mut buffer = [0; 256];
                let length = manager.recv(&mut buffer).unwrap();
                String::from_utf8_lossy(&buffer[..length]).into_owned()
            })
            .collect();
        assert_eq!(heard[0], "READY=1\nSTATUS=recording");
        assert!(heard[1].starts_with("RELOADING=1\nMONOTONIC_USEC="));
        assert_eq!(heard[2..], ["WATCHDOG=1", "STOPPING=1"]);
        assert_eq!(notify.alive_every(), Some(Duration::from_secs(10)));
        Notify::to(None, None).ready("nobody listens");
        Notify::to(Some(folder.path().join("gone").into()), None).ready("nobody listens");
    }
}
