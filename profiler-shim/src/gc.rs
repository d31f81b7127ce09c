//! What is known about collections: the callbacks tell when objects may be looked at, the events tell number and reason.

use crate::repeat::Collections;
use core::sync::atomic::{AtomicU32, Ordering};

/// State of collections and pauses.
pub struct Gc {
    /// Highest generation of the collection between its Started and Finished callbacks, plus 1; 0 outside.
    condemned: AtomicU32,
    /// 1 when a background collection has ended since the last survey: it may have killed objects of any generation.
    background: AtomicU32,
    /// Collections whose Started was seen, and those of which only the Finished was.
    count: AtomicU32,
    /// 1 between a suspension and the resumption.
    paused: AtomicU32,
    /// Which collections were reported.
    pub reported: Collections,
}

impl Gc {
    /// The Started callback, with the highest generation collected.
    pub fn started(&self, condemned: u8) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.condemned.store(u32::from(condemned).wrapping_add(1), Ordering::Relaxed);
    }

    /// The Finished callback: the generations to survey, or `None` when objects may not be looked at. A background collection calls
    /// Finished without Started, on a thread where the runtime refuses such questions; the next survey then looks at everything.
    pub fn finished(&self) -> Option<u8> {
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
    pub fn survey_missed(&self) {
        self.background.store(1, Ordering::Relaxed);
    }

    /// Collections so far: with it, an address names an allocation.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// True for the first of several reports that a suspension begins.
    pub fn pause_begins(&self) -> bool {
        self.paused.swap(1, Ordering::Relaxed) == 0
    }

    /// True for the first of several reports that it ended.
    pub fn pause_ends(&self) -> bool {
        self.paused.swap(0, Ordering::Relaxed) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::Gc;
    use crate::repeat::Collections;
    use core::sync::atomic::AtomicU32;

    #[test]
    fn a_background_collection_counts_and_makes_the_next_survey_look_at_everything() {
        let zero = || AtomicU32::new(0);
        let (condemned, background, count, paused) = (zero(), zero(), zero(), zero());
        let gc = Gc { condemned, background, count, paused, reported: Collections::new() };
        gc.started(0);
        assert_eq!((gc.finished(), gc.count()), (Some(0), 1));
        assert_eq!((gc.finished(), gc.count()), (None, 2));
        gc.started(1);
        assert_eq!((gc.finished(), gc.count()), (Some(2), 3));
    }
}
