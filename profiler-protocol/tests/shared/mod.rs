//! A region in plain memory, with both sides' views of it.

#![allow(clippy::expect_used, reason = "a test fails by panicking")]

use profiler_protocol::consumer::RegionMemory;
use profiler_protocol::layout::Geometry;
use profiler_protocol::producer::ProducerRegion;
use profiler_protocol::sync::{AtomicU64, Ordering};
use std::convert::Infallible;
use std::sync::Arc;

/// The memory.
pub(crate) struct SharedWords {
    words: Arc<Vec<AtomicU64>>,
    geometry: Geometry,
}

impl SharedWords {
    /// Zeroed memory.
    pub(crate) fn new(geometry: Geometry) -> Self {
        let count = usize::try_from(geometry.region_bytes() / 8).expect("small");
        Self { words: Arc::new((0..count).map(|_| AtomicU64::new(0)).collect()), geometry }
    }

    /// The shim's view.
    pub(crate) fn region(&self) -> ProducerRegion<'_> {
        ProducerRegion::new(&self.words, self.geometry).expect("enough words")
    }

    /// The daemon's view.
    pub(crate) fn memory(&self) -> PlainMemory {
        PlainMemory(Arc::clone(&self.words))
    }
}

/// `pread` and `pwrite` over the words: single loads and stores, in no promised order within one
/// call.
pub(crate) struct PlainMemory(pub(crate) Arc<Vec<AtomicU64>>);

impl RegionMemory for PlainMemory {
    type Error = Infallible;

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Infallible> {
        let first = usize::try_from(offset / 8).expect("small");
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(self.words_from(first)) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Infallible> {
        let first = usize::try_from(offset / 8).expect("small");
        for (chunk, word) in bytes.chunks_exact(8).zip(&self.0[first..]) {
            word.store(u64::from_le_bytes(chunk.try_into().expect("eight")), Ordering::Release);
        }
        Ok(())
    }
}

impl PlainMemory {
    fn words_from(&self, first: usize) -> impl Iterator<Item = u64> + '_ {
        self.0[first..].iter().map(|w| w.load(Ordering::Acquire))
    }
}
