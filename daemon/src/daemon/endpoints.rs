//! Where the daemon answers questions: the server for metrics and health, and the control socket.

use super::control::{self, Control};
use super::http::HttpServer;
use super::sinks::Sinks;
use super::state::DaemonState;
use crate::config::Config;
use crate::error::Error;
use std::sync::Arc;

/// Both of them, as far as they are configured and could be had.
pub(super) struct Endpoints {
    state: Arc<DaemonState>,
    server: Option<HttpServer>,
    control: Option<Control>,
}

impl Endpoints {
    /// Listens where the configuration says. Without the control socket profiles are made all the
    /// same.
    ///
    /// # Errors
    /// When the address for metrics cannot be had.
    pub(super) fn start(state: &Arc<DaemonState>, sinks: &Sinks) -> Result<Self, Error> {
        let server = listen(state, sinks)?;
        let path = control::path(&state.config().limits.kill_switch);
        let control = Control::start(path.clone(), Arc::clone(state), sinks.watcher());
        let control = control
            .inspect_err(|error| {
                tracing::warn!(path = %path.display(), %error, "no control socket");
            })
            .ok();
        Ok(Self { state: Arc::clone(state), server, control })
    }

    /// The address of the server, in words.
    pub(super) fn address(&self) -> String {
        self.server
            .as_ref()
            .map_or_else(|| "nowhere".to_owned(), |server| server.address().to_string())
    }

    /// Listens where the configuration says, if that is elsewhere than before. Where it cannot, all
    /// stays as it was, in the configuration as well: so the next reload tries again.
    pub(super) fn listen_again(&mut self, before: &Config, sinks: &Sinks) {
        let (old, new) = (before.telemetry.listen, self.state.config().telemetry.listen);
        if old == new && self.server.is_some() == new.is_some() {
            return;
        }
        let mut listened = listen(&self.state, sinks);
        // The same port of another address: the old one may be what is in the way.
        if listened.is_err() && old.zip(new).is_some_and(|(old, new)| old.port() == new.port()) {
            self.server = None;
            listened = listen(&self.state, sinks);
        }
        match listened {
            Ok(listened) => self.server = listened,
            Err(error) => {
                let mut config = Config::clone(&self.state.config());
                config.telemetry = before.telemetry.clone();
                self.state.set_config(config);
                if self.server.is_none() {
                    self.server = listen(&self.state, sinks).ok().flatten();
                }
                let stays = self.address();
                tracing::error!(
                    %error,
                    "metrics are to be had where they were, at {stays}; the next reload tries the \
                     new address again"
                );
            }
        }
    }

    /// The daemon ends: nobody asks through the control socket from now on.
    pub(super) fn close_control(&mut self) {
        self.control = None;
    }
}

/// The server for metrics and health, if one is configured.
fn listen(state: &Arc<DaemonState>, sinks: &Sinks) -> Result<Option<HttpServer>, Error> {
    let Some(listen) = state.config().telemetry.listen else { return Ok(None) };
    let server = HttpServer::start(listen, Arc::clone(state), sinks.watcher());
    server.map(Some).map_err(|source| Error::Listen { listen, source })
}

#[cfg(test)]
mod tests {
    use super::Endpoints;
    use crate::config::Config;
    use crate::daemon::http::HttpServer;
    use crate::daemon::sinks::{OpenedSinks, Sinks};
    use crate::daemon::state::DaemonState;
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Arc;

    #[test]
    fn an_address_that_cannot_be_had_costs_nobody_the_old_one_and_is_tried_again() {
        let with = |listen: Option<SocketAddr>| {
            let mut config = Config::default();
            config.telemetry.listen = listen;
            config
        };
        let none = with(None);
        let state = Arc::new(DaemonState::of(with(Some(([127, 0, 0, 1], 0).into()))));
        let sinks = Sinks::start(OpenedSinks::default()).unwrap();
        let mut endpoints = Endpoints { state: Arc::clone(&state), server: None, control: None };
        endpoints.listen_again(&none, &sinks);
        let old = endpoints.server.as_ref().unwrap().address();

        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let before = with(Some(old));
        state.set_config(with(Some(address)));
        endpoints.listen_again(&before, &sinks);
        assert_eq!(endpoints.server.as_ref().map(HttpServer::address), Some(old));
        assert_eq!(
            state.config().telemetry.listen,
            Some(old),
            "so the next reload finds a difference"
        );
        TcpStream::connect(old).unwrap();

        drop(taken);
        // As after a reload that could have neither: the value is the same.
        endpoints.server = None;
        state.set_config(with(Some(address)));
        endpoints.listen_again(&with(Some(address)), &sinks);
        TcpStream::connect(address).unwrap();
        state.set_config(none);
        endpoints.listen_again(&with(Some(address)), &sinks);
        assert!(endpoints.server.is_none() && TcpStream::connect(address).is_err());
        sinks.close(std::time::Instant::now());
    }
}
