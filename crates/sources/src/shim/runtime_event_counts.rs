//! How many exceptions and contentions a runtime reported to its shim. The shim counts them before
//! chance chooses which get a stack. So the numbers are exact, and the profile's columns are scaled
//! to them.

use super::ShimSource;
use perfusion_model::event::RuntimeEventCounts;

/// Counters that are of the same moment as the end of the profile, and not of the end of the shim.
pub const RUNTIME_EVENT_COUNTERS: [&str; 6] = [
    "shim_exceptions",
    "shim_exceptions_downsampled",
    "shim_exceptions_dropped_full",
    "shim_contentions",
    "shim_contentions_downsampled",
    "shim_contentions_dropped_full",
];

/// Most regions that are given up between two looks of which the counts are kept. Columns of others
/// stay estimates.
pub(super) const MAX_FINISHED: usize = 16_384;

impl ShimSource {
    /// The counts of all regions now, and the last ones of those given up since this was asked
    /// before.
    pub fn runtime_events(&mut self) -> Vec<RuntimeEventCounts> {
        let mut all = std::mem::take(&mut self.shared.finished_counts);
        for reader in self.processes.values_mut().flat_map(|process| &mut process.readers) {
            // A region that cannot be read is given up with the next drain, with the counts read
            // before.
            reader.refresh().ok();
            all.push(reader.runtime_events());
        }
        all
    }
}
