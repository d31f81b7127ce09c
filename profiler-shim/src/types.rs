//! Types seen in allocations, so that each is named once: the event path adds, the service thread
//! names.

use crate::repeat::mix;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SLOTS: usize = 4096;
const PROBES: u64 = 8;
/// ClassIDs are pointers to aligned memory: bit 0 is free to say "named".
const NAMED: u64 = 1;

/// An open hash table of ClassIDs.
pub(crate) struct PendingTypes {
    slots: [AtomicU64; SLOTS],
    waiting: AtomicU32,
}

impl PendingTypes {
    /// Notes a type. False when its neighbourhood was full and an older type had to go (which is
    /// then named again).
    pub(crate) fn add(&self, type_id: u64) -> bool {
        let type_id = type_id & !NAMED;
        if type_id == 0 {
            return true;
        }
        let start = mix(type_id);
        for probe in 0..PROBES {
            let Some(slot) = self.slot(start.wrapping_add(probe)) else { continue };
            // Relaxed: a slot's word is all there is to a type.
            match slot.compare_exchange(0, type_id, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    self.waiting.store(1, Ordering::Release);
                    return true;
                }
                Err(there) if there & !NAMED == type_id => return true,
                Err(_) => {}
            }
        }
        if let Some(slot) = self.slot(start) {
            slot.store(type_id, Ordering::Relaxed);
        }
        self.waiting.store(1, Ordering::Release);
        false
    }

    /// Calls `name` for each type not yet named; those for which it answers true are done. A type
    /// may be forgotten between the call and its look-up: the second argument tells whether it is
    /// still there.
    pub(crate) fn name_waiting(&self, mut name: impl FnMut(u64, &dyn Fn() -> bool) -> bool) {
        // Acquire: pairs with the release in `add`, which follows the slot's store.
        if self.waiting.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        for slot in &self.slots {
            let type_id = slot.load(Ordering::Relaxed);
            if type_id == 0 || type_id & NAMED != 0 {
                continue;
            }
            if name(type_id, &|| slot.load(Ordering::Relaxed) == type_id) {
                // Not when it was replaced or forgotten meanwhile.
                slot.compare_exchange(
                    type_id,
                    type_id | NAMED,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .ok();
            } else {
                self.waiting.store(1, Ordering::Release);
            }
        }
    }

    /// Forgets all: a new listener knows none, and a module's ids die with it.
    pub(crate) fn forget(&self) {
        for slot in &self.slots {
            slot.store(0, Ordering::Relaxed);
        }
    }

    fn slot(&self, hash: u64) -> Option<&AtomicU64> {
        self.slots.get(hash as usize % SLOTS)
    }
}

#[cfg(test)]
mod tests {
    use super::{PendingTypes, SLOTS};
    use core::sync::atomic::{AtomicU32, AtomicU64};

    fn types() -> PendingTypes {
        PendingTypes {
            slots: std::array::from_fn(|_| AtomicU64::new(0)),
            waiting: AtomicU32::new(0),
        }
    }

    fn named(types: &PendingTypes) -> Vec<u64> {
        let mut all = Vec::new();
        types.name_waiting(|t, still_there| {
            assert!(still_there());
            all.push(t);
            true
        });
        all.sort_unstable();
        all
    }

    #[test]
    fn each_type_is_named_once_until_forgotten() {
        let types = types();
        assert!(types.add(0x1000) && types.add(0x2000) && types.add(0x1000) && types.add(0));
        assert_eq!(named(&types), [0x1000, 0x2000]);
        types.add(0x1000);
        assert!(named(&types).is_empty());
        types.forget();
        types.add(0x1000);
        assert_eq!(named(&types), [0x1000]);
    }

    #[test]
    fn a_type_that_could_not_be_named_is_tried_again() {
        let types = types();
        types.add(0x1000);
        types.name_waiting(|_, _| false);
        assert_eq!(named(&types), [0x1000]);
    }

    #[test]
    fn a_type_that_is_forgotten_before_its_look_up_is_known_to_be() {
        let types = types();
        types.add(0x1000);
        types.name_waiting(|_, still_there| {
            types.forget();
            assert!(!still_there());
            true
        });
        types.add(0x1000);
        assert_eq!(named(&types), [0x1000]);
    }

    #[test]
    fn more_types_than_slots_are_still_all_named() {
        let types = types();
        let mut seen = Vec::new();
        for n in 1..=2 * SLOTS as u64 {
            types.add(n << 3);
            seen.extend(named(&types));
        }
        assert_eq!(seen.len(), 2 * SLOTS);
    }
}
