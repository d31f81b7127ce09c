//! What is known about collections: the callbacks tell when objects may be looked at, the events
//! tell number and reason.

use crate::repeat::OpenCollections;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// State of collections and pauses.
pub(crate) struct Gc {
    /// Highest generation of the collection between its Started and Finished callbacks, plus 1; 0
    /// outside.
    condemned: AtomicU32,
    /// 1 when a background collection has ended since the last survey: it may have killed objects
    /// of any generation.
    background: AtomicU32,
    /// Collections whose Started was seen, and those of which only the Finished was.
    count: AtomicU32,
    /// 1 between a suspension and the resumption.
    paused: AtomicU32,
    /// Who suspends, and what CPU time it had before.
    suspender: AtomicU32,
    suspender_cpu_ns: AtomicU64,
    /// Low half of the number of the collection whose end was reported last, and bit 32 while what
    /// it left was not.
    ended: AtomicU64,
    /// Which collections were reported.
    pub(crate) reported: OpenCollections,
}

impl Gc {
    /// The Started callback, with the highest generation collected.
    pub(crate) fn started(&self, condemned: u8) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.condemned.store(u32::from(condemned).wrapping_add(1), Ordering::Relaxed);
    }

    /// The Finished callback: the generations to survey, or `None` when objects may not be looked
    /// at. A background collection calls Finished without Started, on a thread where the runtime
    /// refuses such questions; the next survey then looks at everything.
    pub(crate) fn finished(&self) -> Option<u8> {
        let condemned = self.condemned.swap(0, Ordering::Relaxed);
        if condemned == 0 {
            // A background collection frees addresses, too.
            self.count.fetch_add(1, Ordering::Relaxed);
            self.background.store(1, Ordering::Relaxed);
            return None;
        }
        let all = self.background.swap(0, Ordering::Relaxed) != 0;
        Some(if all { 2 } else { condemned.wrapping_sub(1).min(2) as u8 })
    }

    /// A survey did not happen: the next one looks at everything.
    pub(crate) fn survey_missed(&self) {
        self.background.store(1, Ordering::Relaxed);
    }

    /// Collections so far: with it, an address names an allocation.
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// True for the first of several reports that `thread`, which has had `cpu_ns` of a CPU, begins
    /// to suspend the others.
    pub(crate) fn pause_begins(&self, thread: u32, cpu_ns: u64) -> bool {
        let first = self.paused.swap(1, Ordering::Relaxed) == 0;
        if first {
            // Relaxed: the runtime suspends and resumes under a lock of its own, so there is one
            // writer and then one reader.
            self.suspender.store(thread, Ordering::Relaxed);
            self.suspender_cpu_ns.store(cpu_ns, Ordering::Relaxed);
        }
        first
    }

    /// For the first of several reports that the suspension ended: who had begun it, and the CPU
    /// time that thread had had before.
    pub(crate) fn pause_ends(&self) -> Option<(u32, u64)> {
        if self.paused.swap(0, Ordering::Relaxed) == 0 {
            return None;
        }
        Some((
            self.suspender.load(Ordering::Relaxed),
            self.suspender_cpu_ns.load(Ordering::Relaxed),
        ))
    }

    /// Nobody has listened for a while: a pause that began before has ended unheard.
    pub(crate) fn forget(&self) {
        self.paused.store(0, Ordering::Relaxed);
        self.ended.store(0, Ordering::Relaxed);
    }

    /// The end of collection `number` was reported: what it left is told next.
    pub(crate) fn ended(&self, number: u32) {
        self.ended.store(u64::from(number) | 1 << 32, Ordering::Relaxed);
    }

    /// For the first of several reports of what a collection left: its number.
    pub(crate) fn left(&self) -> Option<u32> {
        let ended = self.ended.swap(0, Ordering::Relaxed);
        (ended >> 32 != 0).then_some((ended & u64::from(u32::MAX)) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::Gc;
    use crate::repeat::OpenCollections;
    use core::sync::atomic::{AtomicU32, AtomicU64};

    fn gc() -> Gc {
        let zero = || AtomicU32::new(0);
        Gc {
            condemned: zero(),
            background: zero(),
            count: zero(),
            paused: zero(),
            suspender: zero(),
            suspender_cpu_ns: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            reported: OpenCollections::new(),
        }
    }

    #[test]
    fn pauses_and_what_collections_left_are_told_once() {
        let gc = gc();
        assert_eq!((gc.pause_ends(), gc.left()), (None, None));
        assert!(gc.pause_begins(7, 100));
        assert!(!gc.pause_begins(8, 200));
        assert_eq!((gc.pause_ends(), gc.pause_ends()), (Some((7, 100)), None));
        gc.ended(0);
        assert_eq!((gc.left(), gc.left()), (Some(0), None));
        assert!(gc.pause_begins(7, 100));
        gc.ended(1);
        gc.forget();
        assert_eq!((gc.pause_ends(), gc.left()), (None, None), "the session ended in between");
        assert!(gc.pause_begins(7, 300), "the first of the next session");
    }

    #[test]
    fn a_background_collection_counts_and_makes_the_next_survey_look_at_everything() {
        let gc = gc();
        gc.started(0);
        assert_eq!((gc.finished(), gc.count()), (Some(0), 1));
        assert_eq!((gc.finished(), gc.count()), (None, 2));
        gc.started(1);
        assert_eq!((gc.finished(), gc.count()), (Some(2), 3));
    }
}
