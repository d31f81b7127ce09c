//! Waits for a runtime. A runtime may never answer, so each wait has a timeout. A signal or the end
//! of a recording ends it earlier.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long an answer is waited for. A bare [`Duration`] is one that nobody cuts short.
#[derive(Clone, Debug)]
pub struct IpcTimeout {
    /// At most so long.
    pub(super) timeout: Duration,
    pub(super) give_up: Option<Arc<AtomicBool>>,
}

impl IpcTimeout {
    /// So long at most, and no longer than until `give_up` is raised: then the error is
    /// [`IpcError::GivenUp`](super::ipc::IpcError::GivenUp), within a tenth of a second.
    #[must_use]
    pub fn until(timeout: Duration, give_up: &Arc<AtomicBool>) -> Self {
        Self { timeout, give_up: Some(Arc::clone(give_up)) }
    }

    /// True when nobody waits any more.
    pub(super) fn is_given_up(&self) -> bool {
        // Pairs with the store of whoever has had enough; nothing else is told by it.
        self.give_up.as_ref().is_some_and(|give_up| give_up.load(Ordering::Relaxed))
    }
}

impl From<Duration> for IpcTimeout {
    fn from(timeout: Duration) -> Self {
        Self { timeout, give_up: None }
    }
}
