//! Ctrl-C, SIGTERM and the end of the terminal: by the first of them a command ends in order, by
//! the second at once.

use crate::cli::exit;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How long the runtime looks for a signal that has come: it must turn once.
const LOOK: Duration = Duration::from_millis(1);

/// Which of them came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndSignal {
    /// Ctrl-C, which a started program got from its terminal too.
    Interrupt,
    /// SIGTERM, or SIGHUP where that is listened to.
    Terminate,
}

/// These signals, from now on, with the runtime that drives them. The handlers stay in place when
/// it is gone.
pub(crate) struct EndSignals {
    runtime: Runtime,
    received: Received,
}

/// The signals without their runtime.
pub(crate) struct Received {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
}

impl EndSignals {
    /// Ctrl-C and SIGTERM.
    ///
    /// # Errors
    /// When there is no runtime or no handler to be had.
    pub(crate) fn listen() -> io::Result<Self> {
        Self::of(false)
    }

    /// The same for a command that people start at a terminal, which may be closed: SIGHUP too,
    /// unless whoever started it has it ignored (`nohup`).
    ///
    /// # Errors
    /// When there is no runtime or no handler to be had.
    pub(crate) fn listen_at_terminal() -> io::Result<Self> {
        Self::of(!is_ignored(SignalKind::hangup()))
    }

    fn of(hangup: bool) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let received = Received {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: hangup.then(|| signal(SignalKind::hangup())).transpose()?,
        };
        drop(inside);
        Ok(Self { runtime, received })
    }

    /// Waits for the next of them.
    pub(crate) fn wait(&mut self) {
        let Self { runtime, received } = self;
        runtime.block_on(received.next());
    }

    /// One that has come already.
    pub(crate) fn come(&mut self) -> Option<EndSignal> {
        let Self { runtime, received } = self;
        runtime.block_on(async { tokio::time::timeout(LOOK, received.next()).await.ok() })
    }

    /// Runs what waits for them among other things.
    pub(crate) fn run<T>(&mut self, wait: impl AsyncFnOnce(&mut Received) -> T) -> T {
        let Self { runtime, received } = self;
        runtime.block_on(wait(received))
    }
}

impl Received {
    /// The next of them.
    pub(crate) async fn next(&mut self) -> EndSignal {
        let Self { interrupt, terminate, hangup } = self;
        let hung_up = async {
            match hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = interrupt.recv() => EndSignal::Interrupt,
            _ = terminate.recv() => EndSignal::Terminate,
            _ = hung_up => EndSignal::Terminate,
        }
    }
}

/// Whether this process ignores a signal, as whoever started it wanted. Without `/proc` it is
/// taken to.
pub(crate) fn is_ignored(signal: SignalKind) -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return true };
    let ignored = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_some_and(|set| set & 1 << (signal.as_raw_value() - 1) != 0)
}

/// A flag that the first of them raises. The second of them ends the program at once, as it does a
/// recording (exit code 130).
pub(crate) fn end_on_signal() -> io::Result<Arc<AtomicBool>> {
    let mut signals = EndSignals::listen_at_terminal()?;
    let over = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&over);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        signals.wait();
        raised.store(true, Ordering::Relaxed);
        signals.wait();
        std::process::exit(exit::INTERRUPTED.into());
    })?;
    Ok(over)
}
