//! How much is on its way to the processor: draining pauses by bytes, because a single round may
//! hand on a whole ring.

use perfusion_model::event::Event;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Draining waits for the processor once so many times the ring's size is on its way. With the ring
/// itself, that is three seconds of what the budget of wait stacks lets through. More would be most
/// of the memory that the recorder of a busy host takes.
const RINGS: usize = 2;

/// Bytes of events that were drained and are not processed yet; shared by both ends.
#[derive(Clone, Debug)]
pub(crate) struct EventBacklog {
    bytes: Arc<AtomicUsize>,
    most: usize,
}

impl EventBacklog {
    /// The backlog of events that come through a ring of this size.
    #[must_use]
    pub(crate) fn of_ring(bytes: u32) -> Self {
        let most = usize::try_from(bytes).unwrap_or(usize::MAX).saturating_mul(RINGS);
        Self { bytes: Arc::default(), most }
    }

    /// These are on their way; answers what to [`EventBacklog::take`] when they are processed.
    pub(crate) fn add(&self, events: &[Event]) -> usize {
        let bytes = events.iter().map(Event::bytes).sum();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    /// So many bytes are processed.
    pub(crate) fn take(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// True while nothing more should be drained.
    #[must_use]
    pub(crate) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.most
    }
}

#[cfg(test)]
mod tests {
    use super::{EventBacklog, RINGS};
    use perfusion_model::event::{CpuSample, Event, EventKind, MonotonicNs, ThreadId, UserContext};

    #[test]
    fn few_events_with_large_stacks_fill_it_and_the_processor_empties_it() {
        let user = Some(UserContext { stack: vec![0; 32 << 10], ..UserContext::default() });
        let sample = CpuSample {
            thread: ThreadId::default(),
            comm: [0; 16],
            user: user.map(Box::new),
            kernel: vec![0; 8],
            span: None,
        };
        let event = Event { time: MonotonicNs(0), kind: EventKind::CpuSample(sample) };
        let batch = vec![event; (16 << 20) / (32 << 10)];
        let collector = EventBacklog::of_ring(16 << 20);
        let processor = collector.clone();
        let mut held = Vec::new();
        while !collector.is_full() {
            held.push(collector.add(&batch));
        }
        assert_eq!(held.len(), RINGS);
        processor.take(held[0]);
        assert!(!collector.is_full());
        held[1..].iter().for_each(|&bytes| processor.take(bytes));
        assert_eq!(collector.bytes.load(super::Ordering::Relaxed), 0);
    }
}
