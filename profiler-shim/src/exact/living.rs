//! Lists of living objects.

use super::chunks::AllocationEntry;
use crate::region::lasting::GrowableWords;
use core::sync::atomic::{AtomicU64, Ordering};

/// Room for living objects: most and, with little address space, least.
const MOST_LIVING: usize = 1 << 31;
const LEAST_LIVING: usize = 1 << 20;

/// A living object.
#[derive(Clone, Copy)]
pub(super) struct Living {
    pub(super) entry: AllocationEntry,
    /// Collections that had ended before its birth, and flags.
    pub(super) history: u64,
}

/// Living objects of one generation.
pub(super) struct LivingList {
    pub(super) words: GrowableWords,
    pub(super) count: AtomicU64,
}

impl LivingList {
    pub(super) fn new() -> Self {
        Self {
            words: GrowableWords::new(MOST_LIVING * 3, LEAST_LIVING * 3),
            count: AtomicU64::new(0),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed) as usize
    }

    #[inline]
    pub(super) fn place(&self, at: usize) -> Option<&[AtomicU64; 3]> {
        self.words.words().get(at.wrapping_mul(3)..)?.first_chunk()
    }

    #[inline]
    pub(super) fn read(&self, at: usize) -> Option<Living> {
        let [place, what, history] = self.place(at)?;
        let words = [place.load(Ordering::Relaxed), what.load(Ordering::Relaxed)];
        Some(Living {
            entry: AllocationEntry::from_words(words),
            history: history.load(Ordering::Relaxed),
        })
    }

    #[inline]
    pub(super) fn write(&self, at: usize, living: Living) -> bool {
        let Some([place, what, history]) = self.place(at) else { return false };
        let [first, second] = living.entry.words();
        place.store(first, Ordering::Relaxed);
        what.store(second, Ordering::Relaxed);
        history.store(living.history, Ordering::Relaxed);
        true
    }

    #[inline]
    pub(super) fn push(&self, living: Living) -> bool {
        let at = self.len();
        let written =
            self.words.opens(at.wrapping_add(1).wrapping_mul(3)) && self.write(at, living);
        if written {
            self.count.store(at.wrapping_add(1) as u64, Ordering::Relaxed);
        }
        written
    }
}
