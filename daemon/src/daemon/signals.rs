//! The signals of a running daemon: end, reload, and the kill switch.

use super::log::DaemonLog;
use crate::cli::exit;
use crate::end_signals::EndSignals;
use crate::error::Error;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// What the daemon is told from outside.
pub(super) struct Signals {
    runtime: Runtime,
    end: UnboundedReceiver<Instant>,
    reload: Signal,
    off: Signal,
    on: Signal,
}

/// What a signal asks for.
pub(super) enum SignalEvent {
    /// At this moment.
    End(Instant),
    Reload,
    Off,
    On,
    Nothing,
}

impl Signals {
    pub(super) fn listen(log: DaemonLog) -> Result<Self, Error> {
        let of_end = EndSignals::listen().map_err(Error::internal("signal handler"))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(Error::internal("tokio runtime"))?;
        let listen = |kind| signal(kind).map_err(Error::internal("signal handler"));
        let inside = runtime.enter();
        let reload = listen(SignalKind::hangup())?;
        let off = listen(SignalKind::user_defined1())?;
        let on = listen(SignalKind::user_defined2())?;
        drop(inside);
        let (tell, end) = unbounded_channel();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || end_when_told_twice(of_end, &tell, &log))
            .map_err(Error::internal("starting a thread"))?;
        Ok(Self { runtime, end, reload, off, on })
    }

    /// Waits for the first of them, not longer than this.
    pub(super) fn wait(&mut self, at_most: Duration) -> SignalEvent {
        let Self { runtime, end, reload, off, on } = self;
        runtime.block_on(async {
            tokio::select! {
                Some(at) = end.recv() => SignalEvent::End(at),
                _ = reload.recv() => SignalEvent::Reload,
                _ = off.recv() => SignalEvent::Off,
                _ = on.recv() => SignalEvent::On,
                () = tokio::time::sleep(at_most) => SignalEvent::Nothing,
            }
        })
    }
}

/// Passes the first signal to end on. The second ends the process, whatever its other threads wait
/// for.
fn end_when_told_twice(mut signals: EndSignals, tell: &UnboundedSender<Instant>, log: &DaemonLog) {
    signals.wait();
    // The daemon may be ending by itself.
    tell.send(Instant::now()).ok();
    signals.wait();
    log.exit(exit::INTERRUPTED.into());
}
