//! The ring between the probes and this process.

use super::counters::KernelCounters;
use super::decode;
use aya::maps::{MapData, RingBuf};
use ebpf_common::counter::Counter;
use perfusion_model::event::Event;

/// The reading end of the ring.
pub(super) struct ProbeRing {
    ring: RingBuf<MapData>,
    bytes: u32,
    filled: u64,
}

impl ProbeRing {
    /// A ring of so many bytes.
    pub(super) fn new(ring: RingBuf<MapData>, bytes: u32) -> Self {
        Self { ring, bytes, filled: 0 }
    }

    /// Bytes of the ring.
    pub(super) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// How much of the ring the last [`ProbeRing::drain`] found used, in 1/256.
    pub(super) fn filled(&self) -> u64 {
        self.filled
    }

    /// Hands all events that have arrived to `sink`.
    pub(super) fn drain(&mut self, counters: &KernelCounters, sink: &mut dyn FnMut(Event)) {
        // What comes in meanwhile is left for the next call.
        let mut budget = self.bytes;
        while budget > 0 {
            let Some(record) = self.ring.next() else { break };
            // 8 bytes of header per record in the ring.
            budget = budget
                .saturating_sub(u32::try_from(record.len()).unwrap_or(u32::MAX).saturating_add(8));
            let event = decode::ring_record(&record);
            drop(record);
            counters.add(Counter::RecordsRead, 1);
            match event {
                Ok(event) => sink(event),
                Err(_) => counters.add(Counter::RecordsBad, 1),
            }
        }
        self.filled = (u64::from(self.bytes - budget) << 8) / u64::from(self.bytes.max(1));
    }
}
