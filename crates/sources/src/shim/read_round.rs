//! One round of reading: how much each region may hand over.

use profiler_protocol::consumer::{Drained, Quota};
use profiler_protocol::layout::UNIT_BYTES;

/// What one round takes of one region while more can come: at a round every 10 ms this is 100
/// MiB/s, far above what a shim sends, and no more than a moment of the daemon's time.
pub(super) const QUOTA: Quota = Quota { records: 4096, bytes: 1 << 20 };

/// What one round takes of all regions together: the memory it needs is bounded, however many there
/// are and however full. A ring of the usual length is read at once.
pub(super) const BUDGET: Quota = Quota { records: 1 << 16, bytes: 8 << 20 };

/// Shares of it are no smaller while there is something left: the longest record fits.
const LEAST: Quota = Quota { records: 64, bytes: 64 << 10 };

/// What is left of a round, and for how many regions.
#[derive(Debug)]
pub(super) struct ReadRound {
    left: Quota,
    regions: u64,
    /// Something was left for the next round.
    pub(super) more: bool,
    /// How much of the fullest ring was used, in 1/256.
    pub(super) fullest: u64,
}

impl ReadRound {
    /// A round in which so many regions are read.
    pub(super) fn new(regions: usize) -> Self {
        Self {
            left: BUDGET,
            regions: u64::try_from(regions).unwrap_or(u64::MAX),
            more: false,
            fullest: 0,
        }
    }

    /// True when nothing is left for those that come now.
    pub(super) fn is_over(&self) -> bool {
        self.left.bytes == 0 || self.left.records == 0
    }

    /// The next region's share: what others leave goes to those behind them. `None` when nothing is
    /// left.
    pub(super) fn share(&mut self, most: Quota) -> Option<Quota> {
        let regions = self.regions.max(1);
        self.regions = regions - 1;
        if self.is_over() {
            self.more = true;
            return None;
        }
        Some(Quota {
            records: (self.left.records / regions).clamp(LEAST.records, most.records),
            bytes: (self.left.bytes / regions).clamp(LEAST.bytes, most.bytes),
        })
    }

    /// A region has handed this over.
    pub(super) fn took(&mut self, drained: &Drained) {
        let records = drained.records + drained.unknown + drained.skipped + drained.malformed;
        self.left.records = self.left.records.saturating_sub(records);
        self.left.bytes = self.left.bytes.saturating_sub(drained.units.saturating_mul(UNIT_BYTES));
        self.more |= drained.more;
    }
}

#[cfg(test)]
mod tests {
    use super::{BUDGET, LEAST, QUOTA, ReadRound};
    use profiler_protocol::consumer::{Drained, Quota};
    use profiler_protocol::layout::UNIT_BYTES;

    fn took(records: u64, bytes: u64) -> Drained {
        Drained { records, units: bytes / UNIT_BYTES, ..Drained::default() }
    }

    #[test]
    fn full_rings_share_a_round_and_what_one_leaves_goes_to_those_behind_it() {
        let mut turns = ReadRound::new(4);
        let share = turns.share(BUDGET).unwrap();
        assert_eq!((share.records, share.bytes), (BUDGET.records / 4, BUDGET.bytes / 4));
        turns.took(&took(0, 0));
        let share = turns.share(BUDGET).unwrap();
        assert_eq!(share.bytes, BUDGET.bytes / 3);
        turns.took(&took(1, share.bytes / UNIT_BYTES * UNIT_BYTES));
        assert_eq!(turns.share(QUOTA).unwrap().bytes, QUOTA.bytes, "while more can come");
        assert!(!turns.more);
    }

    #[test]
    fn a_round_ends_however_many_regions_there_are() {
        let mut turns = ReadRound::new(100_000);
        let mut bytes = 0;
        while let Some(Quota { bytes: share, .. }) = turns.share(QUOTA) {
            assert_eq!(share, LEAST.bytes, "the longest record fits");
            turns.took(&took(1, share));
            bytes += share;
        }
        assert_eq!(bytes, BUDGET.bytes);
        assert!(turns.more && turns.is_over());
    }
}
