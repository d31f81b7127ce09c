//! Runtimes that are held up at their start until a session of their events is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A runtime's start is held up until this is over.
#[derive(Clone, Debug, Default)]
pub struct StartHold(Arc<AtomicBool>);

impl StartHold {
    /// True when the runtime may go on.
    #[must_use]
    pub fn is_over(&self) -> bool {
        // Pairs with the store in `end`; nothing else is told by it.
        self.0.load(Ordering::Relaxed)
    }

    /// Lets it go on.
    pub fn end(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Who is told of runtimes that are held up at their start.
pub trait HoldStarts: std::fmt::Debug + Send {
    /// A runtime of this process has been held up for so long. What is to be done before it goes on
    /// is begun, and not waited for.
    fn begin(&self, pid: u32, waited: Duration) -> StartHold;
}
