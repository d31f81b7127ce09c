//! Tells repeats of one event apart, should a runtime deliver it once per EventPipe session in the
//! process, other tools' sessions included, one after the other on the thread that caused it. .NET
//! 8 to 10 do not (docs/adr/0004-repeated-events.md).

use core::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 4096;

/// The last allocation of each thread, by its control block. Two threads that share a slot can at
/// worst let a repeat through, and only while both allocate samples within the same microseconds.
pub(crate) struct LastAllocations {
    last: [AtomicU64; SLOTS],
}

impl LastAllocations {
    /// True when the thread with this control block ([`crate::machine::thread_block`]: its id would
    /// cost a system call) saw this very object just before. Between two collections no address is
    /// given out twice, so (thread, address, collections so far) names an allocation.
    pub(crate) fn is_repeat(&self, thread: usize, address: u64, collections: u32) -> bool {
        let thread = mix(thread as u64);
        let Some(slot) = self.last.get(thread as usize % SLOTS) else { return false };
        let name = mix(address ^ thread.wrapping_add(u64::from(collections))) | 1;
        // Relaxed: the slot is this thread's own but for collisions, which need no order.
        slot.swap(name, Ordering::Relaxed) == name
    }
}

/// Between two deliveries of one event lies less than this, and between two events of a thread that
/// look alike more: to unwind an exception takes microseconds, and so does a wait.
const SAME_EVENT_NS: u64 = 500;

/// The last exception of each thread, or its last wait for a lock, by the thread id's low bits.
pub(crate) struct LastEvents {
    last: [LastEvent; MOMENTS],
}

const MOMENTS: usize = 1024;

struct LastEvent {
    /// What it was.
    name: AtomicU64,
    /// When it had been dealt with.
    at_ns: AtomicU64,
}

impl LastEvents {
    /// True when `thread` had the same, as `name` says, a moment before `now_ns`: neither has an
    /// identity of its own.
    pub(crate) fn is_repeat(&self, thread: u32, name: u64, now_ns: u64) -> bool {
        let Some(last) = self.last.get(thread as usize % MOMENTS) else { return false };
        // Relaxed: the slot is this thread's own but for collisions, which need no order.
        last.name.swap(name, Ordering::Relaxed) == name
            && now_ns.saturating_sub(last.at_ns.load(Ordering::Relaxed)) < SAME_EVENT_NS
    }

    /// The one of `thread` has been dealt with.
    pub(crate) fn done(&self, thread: u32, now_ns: u64) {
        if let Some(last) = self.last.get(thread as usize % MOMENTS) {
            last.at_ns.store(now_ns, Ordering::Relaxed);
        }
    }
}

/// Spreads a number over 64 bits (the finalizer of MurmurHash3).
#[must_use]
pub(crate) fn mix(mut n: u64) -> u64 {
    n ^= n >> 33;
    n = n.wrapping_mul(0xff51_afd7_ed55_8ccd);
    n ^= n >> 33;
    n = n.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    n ^ n >> 33
}

/// Collections whose start was reported and whose end was not.
pub(crate) struct OpenCollections {
    newest: AtomicU64,
    open: [AtomicU64; 8],
}

impl OpenCollections {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self { newest: AtomicU64::new(0), open: Default::default() }
    }

    /// True when this is the first report of the start of collection `number`. Numbers only grow.
    pub(crate) fn started(&self, number: u32) -> bool {
        let number = u64::from(number).wrapping_add(1);
        // Relaxed throughout: each word decides by itself.
        if self.newest.fetch_max(number, Ordering::Relaxed) >= number {
            return false;
        }
        for slot in &self.open {
            if slot.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return true;
            }
        }
        // More open than can be (a background and a foreground one): ends were lost. Forget the
        // oldest.
        if let Some(slot) = self.open.iter().min_by_key(|s| s.load(Ordering::Relaxed)) {
            slot.store(number, Ordering::Relaxed);
        }
        true
    }

    /// True when this is the first report of the end of collection `number`.
    pub(crate) fn ended(&self, number: u32) -> bool {
        let number = u64::from(number).wrapping_add(1);
        self.open.iter().any(|slot| {
            slot.compare_exchange(number, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{LastAllocations, LastEvent, LastEvents, OpenCollections, SAME_EVENT_NS};
    use core::sync::atomic::AtomicU64;

    #[test]
    fn the_same_allocation_again_is_a_repeat_and_another_is_not() {
        let seen = LastAllocations { last: std::array::from_fn(|_| AtomicU64::new(0)) };
        assert!(!seen.is_repeat(7, 0x1000, 3));
        assert!(seen.is_repeat(7, 0x1000, 3));
        assert!(seen.is_repeat(7, 0x1000, 3));
        assert!(!seen.is_repeat(7, 0x1018, 3));
        assert!(!seen.is_repeat(8, 0x1018, 3));
        assert!(!seen.is_repeat(7, 0x1018, 4), "after a collection the address is free again");
    }

    #[test]
    fn the_same_exception_at_once_is_a_repeat_and_later_it_is_another() {
        let zero = || AtomicU64::new(0);
        let seen =
            LastEvents { last: std::array::from_fn(|_| LastEvent { name: zero(), at_ns: zero() }) };
        assert!(!seen.is_repeat(7, 5, 10_000));
        seen.done(7, 14_000);
        assert!(seen.is_repeat(7, 5, 14_100));
        seen.done(7, 14_150);
        assert!(seen.is_repeat(7, 5, 14_150 + SAME_EVENT_NS - 1), "a third session");
        assert!(!seen.is_repeat(7, 5, 14_150 + SAME_EVENT_NS));
        assert!(!seen.is_repeat(7, 6, 14_200));
    }

    #[test]
    fn nested_collections_are_reported_once_each() {
        let seen = OpenCollections::new();
        assert!(seen.started(0));
        assert!(!seen.started(0));
        assert!(seen.started(1));
        assert!(seen.ended(1));
        assert!(!seen.ended(1));
        assert!(seen.ended(0));
        assert!(!seen.ended(5));
        for number in 2..40 {
            assert!(seen.started(number));
        }
        assert!(seen.ended(39));
    }
}
