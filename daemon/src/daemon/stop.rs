//! The end of a daemon: the last window is written, and nobody who hangs is waited for.

use super::Daemon;
use super::sinks::END_WITHIN;
use crate::error::Error;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

impl Daemon {
    /// Ends the recording and waits for the sinks, but not for a processor that hangs.
    pub(super) fn stop(self, told: Instant) -> Result<(), Error> {
        let Self { state, mut endpoints, mut selector, sinks, recording, liveness, .. } = self;
        state.ends();
        // From here on there is nothing to tell.
        endpoints.close_control();
        let mut sinks = sinks.into_sinks();
        sinks.hasten(told);
        let watcher = sinks.watcher();
        selector.forget_pods();
        let mut watch = recording.as_ref().map(|active| active.recording().watch());
        let (done, wait) = std::sync::mpsc::channel();
        let ending = std::thread::Builder::new().name("ending".into()).spawn(move || {
            // They answer until the end, and nobody waits for theirs.
            let _until_the_end = (endpoints, liveness);
            let ended = recording.map_or(Ok(()), |active| active.end());
            // Fails only when nobody waits any more.
            done.send(None).ok();
            sinks.close(told);
            done.send(Some(ended)).ok();
        });
        // Without the thread what it was given is gone, the last window too.
        ending.map_err(Error::internal("starting a thread"))?;
        let mut sinks_until = None;
        loop {
            let now = Instant::now();
            match wait.recv_timeout(Duration::from_millis(50)) {
                Ok(Some(ended)) => return ended,
                Ok(None) => sinks_until = Some(now + END_WITHIN),
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Failed),
                Err(RecvTimeoutError::Timeout) if sinks_until.is_some_and(|until| now >= until) => {
                    watcher.give_up();
                    return Err(Error::SinksHang(END_WITHIN));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(thread) = watch.as_mut().and_then(|watch| watch.hanging(now)) {
                        tracing::error!(
                            "the {thread} has not moved for a minute: the last window is lost"
                        );
                        return Err(Error::Failed);
                    }
                }
            }
        }
    }
}
