//! The recording in progress, for those who ask how it stands.

use perfusion_recorder::RecordingHandle;
use perfusion_recorder::commands::CollectorStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer of the recording's stages is good for all who ask.
const STATUS_AGAIN: Duration = Duration::from_millis(500);

/// Asks the recording, while there is one.
#[derive(Default)]
pub struct RecordingWatch {
    handle: Mutex<Option<RecordingHandle>>,
    /// What it answered last, and when that was.
    last: Mutex<Option<(Instant, Option<Arc<CollectorStatus>>)>>,
}

impl RecordingWatch {
    /// Asks the recording directly.
    #[must_use]
    pub fn handle(&self) -> Option<RecordingHandle> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// True while there is a recording, also one that is too busy to answer.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.handle().is_some()
    }

    /// A recording has begun.
    pub fn begun(&self, handle: RecordingHandle) {
        self.set(Some(handle));
    }

    /// It has ended, or is about to.
    pub fn ended(&self) {
        self.set(None);
    }

    fn set(&self, handle: Option<RecordingHandle>) {
        *self.handle.lock().unwrap_or_else(PoisonError::into_inner) = handle;
        // After that: an old recording that is asked meanwhile has its answer kept no longer than
        // any other.
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How the recording's stages stand, or stood within [`STATUS_AGAIN`]. The thread that drains
    /// the rings has to answer, and whoever may ask over the network may ask without end. `None`
    /// where there is no recording, or it is too busy to answer.
    #[must_use]
    pub fn status(&self) -> Option<Arc<CollectorStatus>> {
        // Held while it is asked: others wait for the same answer.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = self.handle()?;
        if let Some((at, status)) = &*last
            && at.elapsed() < STATUS_AGAIN
        {
            return status.clone();
        }
        let status = handle.look().map(Arc::new);
        *last = Some((Instant::now(), status.clone()));
        status
    }
}
