//! How much the names of types take that one region has told.

use super::names_memory::NamesMemory;
use std::collections::HashMap;

/// Distinct types that one region may tell, and bytes of their names.
const TYPES: usize = 65_536;
const TYPES_BYTES: usize = 8 << 20;
/// What a type takes besides.
const TYPE_OVERHEAD: usize = 128;

/// Lengths of the names of the types that a region has told, with those of their modules.
#[derive(Default)]
pub(super) struct RegionTypeNames {
    names: HashMap<u64, usize>,
    bytes: usize,
    share: NamesMemory,
}

impl RegionTypeNames {
    /// No names yet, whose memory is counted by `share`.
    pub(super) fn with(share: NamesMemory) -> Self {
        Self { share, ..Self::default() }
    }

    /// A type with names of so many `bytes` is told, again perhaps. False when there is no room for
    /// it.
    pub(super) fn take(&mut self, type_id: u64, bytes: usize) -> bool {
        let before = self.names.get(&type_id).copied();
        let after = self.bytes - before.unwrap_or(0) + bytes;
        if after > TYPES_BYTES || before.is_none() && self.names.len() >= TYPES {
            return false;
        }
        if !self.share.take(bytes + TYPE_OVERHEAD) {
            return false;
        }
        if let Some(before) = before {
            self.share.give(before + TYPE_OVERHEAD);
        }
        self.names.insert(type_id, bytes);
        self.bytes = after;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{RegionTypeNames, TYPES, TYPES_BYTES};

    #[test]
    fn types_are_bounded_by_their_number_and_by_their_names() {
        let mut types = RegionTypeNames::default();
        assert!((0..TYPES as u64).all(|id| types.take(id, 10)));
        assert!(!types.take(TYPES as u64, 10) && types.take(7, 12));
        let mut types = RegionTypeNames::default();
        let most = TYPES_BYTES / 2048;
        assert!((0..most as u64).all(|id| types.take(id, 2048)));
        assert!(!types.take(most as u64, 1), "no more");
        assert!(
            types.take(0, 10) && types.take(most as u64, 1),
            "what is told anew counts as it is now"
        );
        assert!(!types.take(most as u64, 2048));
    }
}
