//! A bound on what all regions together make the daemon remember. Each has a bound of its own; but
//! a process may have several, and a host thousands of processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes, about, of names of types and of where methods lie, for all regions: a hundred processes
/// with 5,000 types and 10,000 methods each.
const ALL: usize = 128 << 20;

/// What one region has of it; given back with the region.
#[derive(Debug, Default)]
pub(super) struct NamesMemory {
    /// Relaxed: a sum on which nothing else depends.
    of_all: Arc<AtomicUsize>,
    own: usize,
}

impl NamesMemory {
    /// One more, that has nothing yet.
    pub(super) fn another(&self) -> Self {
        Self { of_all: Arc::clone(&self.of_all), own: 0 }
    }

    /// False when there is no room for so many more.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        if self.of_all.load(Ordering::Relaxed).saturating_add(bytes) > ALL {
            return false;
        }
        self.of_all.fetch_add(bytes, Ordering::Relaxed);
        self.own += bytes;
        true
    }

    pub(super) fn give(&mut self, bytes: usize) {
        let bytes = bytes.min(self.own);
        self.of_all.fetch_sub(bytes, Ordering::Relaxed);
        self.own -= bytes;
    }
}

impl Drop for NamesMemory {
    fn drop(&mut self) {
        self.give(self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, NamesMemory};

    #[test]
    fn what_one_has_others_have_not_until_it_is_gone() {
        let all = NamesMemory::default();
        let (mut one, mut other) = (all.another(), all.another());
        assert!(one.take(ALL - 10) && !other.take(11) && other.take(10));
        one.give(5);
        assert!(other.take(5) && !other.take(1));
        drop(one);
        assert!(other.take(ALL - 15) && !other.take(1));
        other.give(usize::MAX);
        assert!(all.another().take(ALL));
    }
}
