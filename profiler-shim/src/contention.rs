//! Waits for locks that another thread held: the runtime tells of the beginning and of the end,
//! each on the thread that waits.

use crate::downsampler::Downsampler;
use core::sync::atomic::{AtomicU64, Ordering};

/// Of so many threads that wait at once, few share a slot: most processes' threads have ids that
/// follow each other.
const SLOTS: usize = 4096;
/// Waits in a period that are all told of ([`Downsampler`]): with their stacks they find room in
/// the ring even when all come at once.
pub(crate) const CONTENTIONS: u32 = 32;
/// A wait this long is told of whatever comes: no thread can have more than a hundred of them a
/// second.
const LONG_NS: u64 = 10_000_000;

/// Waits in progress, by the thread id's low bits, and how many there were.
pub(crate) struct Contentions {
    /// Thread and owner of the lock, in one word; 0 for none.
    open: [AtomicU64; SLOTS],
    /// How many there are.
    pub(crate) sampler: Downsampler,
}

impl Contentions {
    fn slot(&self, thread: u32) -> Option<&AtomicU64> {
        self.open.get(thread as usize % SLOTS)
    }

    /// `thread` begins to wait for a lock that `owner` holds (0: not known).
    pub(crate) fn begins(&self, thread: u32, owner: u32) {
        if let Some(slot) = self.slot(thread) {
            // Relaxed: the slot is this thread's own but for collisions, which cost the other its
            // owner.
            slot.store(u64::from(thread) << 32 | u64::from(owner), Ordering::Relaxed);
        }
    }

    /// `thread` waits no more: the owner of the lock when it began (0: not known), if that was seen
    /// and no other thread's since.
    pub(crate) fn ends(&self, thread: u32) -> Option<u32> {
        let slot = self.slot(thread)?;
        let word = slot.load(Ordering::Relaxed);
        if word >> 32 != u64::from(thread) {
            return None;
        }
        slot.store(0, Ordering::Relaxed);
        Some((word & u64::from(u32::MAX)) as u32)
    }

    /// Beginnings may be of long ago: no events came meanwhile.
    pub(crate) fn forget(&self) {
        for slot in &self.open {
            slot.store(0, Ordering::Relaxed);
        }
    }
}

/// The level of a wait of `waited_ns` where others are chosen at `level`: its chance is at least
/// its share of a long one, so that what waits add up to is known better than by their number
/// alone.
#[must_use]
pub(crate) fn level_for(level: u8, waited_ns: u64) -> u8 {
    let shorter = (LONG_NS / waited_ns.max(1)).checked_ilog2();
    level.min(shorter.and_then(|bits| u8::try_from(bits).ok()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::{Contentions, SLOTS, level_for};
    use crate::downsampler::Downsampler;
    use core::sync::atomic::AtomicU64;

    #[test]
    fn an_end_belongs_to_its_threads_beginning() {
        let waits = Contentions {
            open: std::array::from_fn(|_| AtomicU64::new(0)),
            sampler: Downsampler::new(),
        };
        waits.begins(7, 9);
        assert_eq!((waits.ends(7), waits.ends(7)), (Some(9), None));
        let other = 7 + u32::try_from(SLOTS).unwrap();
        waits.begins(7, 9);
        waits.begins(other, 5);
        assert_eq!((waits.ends(7), waits.ends(other)), (None, Some(5)));
        waits.begins(7, 9);
        waits.forget();
        assert_eq!(waits.ends(7), None);
    }

    #[test]
    fn long_waits_are_told_of_and_short_ones_as_often_as_all() {
        assert_eq!(
            [u64::MAX, 10_000_000, 5_000_001, 5_000_000, 39_000, 0].map(|ns| level_for(8, ns)),
            [0, 0, 0, 1, 8, 8]
        );
        assert_eq!(level_for(0, 5), 0);
    }
}
