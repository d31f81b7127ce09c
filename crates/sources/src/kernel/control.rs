//! What the probes are told while they record: that the recording has ended, and how many bytes of
//! wait stacks they may send.

use super::{KernelError, load};
use aya::maps::{Array, MapData};

/// The maps by which the probes are controlled.
pub(super) struct ProbeControl {
    pub(super) ended: Array<MapData, u64>,
    pub(super) wait_budget: Array<MapData, u64>,
}

impl ProbeControl {
    /// The recording has ended.
    pub(super) fn end(&mut self) {
        // Writing an element of an array cannot fail; if it did, detaching the probes would end the
        // recording all the same, later than said.
        if let Err(error) = self.ended.set(0, 1, 0) {
            tracing::warn!(%error, "eBPF map ENDED");
        }
    }

    /// Sets how many bytes of wait stacks may come per second, from all CPUs together.
    pub(super) fn set_budget(
        &mut self,
        bytes_per_s: u64,
        ring_bytes: u32,
        cpus: usize,
    ) -> Result<(), KernelError> {
        let budget = load::sampler_budget(bytes_per_s, cpus);
        let entries = [budget, load::sampler_beyond(budget, ring_bytes, cpus)];
        let mut set =
            (0..).zip(entries).map(|(index, bytes)| self.wait_budget.set(index, bytes, 0));
        set.try_for_each(|set| set)
            .map_err(|source| KernelError::Map { name: "WAIT_BUDGET", source })
    }
}
