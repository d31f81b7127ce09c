//! The atomics of the shared words: core's, or loom's when the ring is model-checked.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU64, Ordering};
