//! Who ended the blocked part of a wait.

use foldhash::HashMap;
use perfusion_model::event::{MonotonicNs, WaitEnd, Wake, WakeOrigin};
use perfusion_symbolize::kernel::WakeSites;
use std::sync::{Arc, OnceLock};

/// Where wake-ups come from, and the waits where that is not known.
#[derive(Default)]
pub(super) struct Wakers {
    /// The kernel's code that tells them apart. It is read when the first wake-up is.
    sites: Arc<OnceLock<WakeSites>>,
    /// Start of each thread's wait where it is not known what ended its blocked part. A thread ran
    /// then, which may have had nothing to do with it.
    unknown: HashMap<u32, MonotonicNs>,
    /// The waker's stack is shown beyond that of the wait.
    shows_stacks: bool,
}

impl Wakers {
    /// The kernel's code, for a thread that reads it ahead.
    pub(super) fn sites(&self) -> Arc<OnceLock<WakeSites>> {
        Arc::clone(&self.sites)
    }

    /// Shows what ended each wait beyond the wait's own stack, or not.
    pub(super) fn show_stacks(&mut self, shows_stacks: bool) {
        self.shows_stacks = shows_stacks;
    }

    /// True when what ended a wait is shown with it.
    pub(super) fn has_stacks(&self) -> bool {
        self.shows_stacks
    }

    /// Where a wake-up came from; `None` when its kernel stack does not tell.
    pub(super) fn origin(&self, wake: &Wake) -> Option<WakeOrigin> {
        self.sites.get_or_init(WakeSites::read).origin(wake)
    }

    /// It is not known what ended the wait that the thread began at `start`.
    pub(super) fn set_unknown(&mut self, tid: u32, start: MonotonicNs) {
        self.unknown.insert(tid, start);
    }

    /// Removes the waker of a wait where it is not known. The idle task does nothing itself: where
    /// it ran, an interrupt ended the wait.
    pub(super) fn check(&mut self, end: &mut WaitEnd) {
        if self.unknown.remove(&end.thread.tid) == Some(end.start) {
            end.waker = end.waker.filter(|(waker, _)| waker.tid == 0);
        }
    }

    /// The thread has ended.
    pub(super) fn forget(&mut self, tid: u32) {
        self.unknown.remove(&tid);
    }
}

#[cfg(test)]
mod tests {
    use super::Wakers;
    use perfusion_model::event::{MonotonicNs, ThreadId, WaitEnd};

    #[test]
    fn a_thread_that_only_may_have_ended_a_wait_is_not_named() {
        let mut wakers = Wakers::default();
        let mut waker_of = |start, waker| {
            wakers.set_unknown(7, MonotonicNs(5));
            let waker = ThreadId { pid: waker, tid: waker };
            let mut end = WaitEnd {
                thread: ThreadId { pid: 7, tid: 7 },
                start: MonotonicNs(start),
                blocked_ns: 1,
                runnable_ns: 1,
                waker: Some((waker, [0; 16])),
                woken_throttled: false,
                new_thread: false,
            };
            wakers.check(&mut end);
            end.waker.map(|(waker, _)| waker.tid)
        };
        assert_eq!(waker_of(5, 9), None);
        assert_eq!(waker_of(6, 9), Some(9), "another wait");
        assert_eq!(waker_of(5, 0), Some(0), "the idle task: an interrupt");
    }
}
