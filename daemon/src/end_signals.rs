//! Ctrl-C and SIGTERM: by the first of them a command ends in order, by the second at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Both, from now on, with the runtime that drives them. The handlers stay in place when it is gone.
pub(crate) struct EndSignals {
    pub(crate) runtime: Runtime,
    pub(crate) interrupt: Signal,
    pub(crate) terminate: Signal,
}

impl EndSignals {
    /// # Errors
    /// When there is no runtime or no handler to be had.
    pub(crate) fn listen() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let inside = runtime.enter();
        let (interrupt, terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        drop(inside);
        Ok(Self { runtime, interrupt, terminate })
    }

    /// Waits for the next of them.
    pub(crate) fn wait(&mut self) {
        let Self { runtime, interrupt, terminate } = self;
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
    }
}

/// A flag that Ctrl-C and SIGTERM raise. The second of them ends the program at once, as it does a recording (exit code 130).
pub(crate) fn end_on_signal() -> std::io::Result<Arc<AtomicBool>> {
    let mut signals = EndSignals::listen()?;
    let over = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&over);
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        signals.wait();
        raised.store(true, Ordering::Relaxed);
        signals.wait();
        std::process::exit(130);
    })?;
    Ok(over)
}
