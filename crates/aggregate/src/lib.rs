//! Samples and exact totals become values: one value per stack, labels and sample type of a window.
//!
//! [`threads`] splits each thread's exact scheduler time among its sampled stacks, and weights
//! downsampled waits. [`heap`] keeps the live objects. [`window`] holds the result.
//!
//! ```text
//! let mut window = Window::new(WindowLimits::default());
//! window.add(&frames, &labels, SampleType::Samples, 1.0);       // frames innermost first
//! window.add(&frames, &labels, SampleType::Cpu, 10_101_010.1);
//! for entry in window.entries() { /* frames, labels, values by SampleType::index() */ }
//! ```
//! A key is the whole stack, never a hash of it. The number of keys is bounded. Values beyond the
//! limit go to one entry whose only frame is
//! [`Marker::Overflow`](perfusion_model::frame::Marker::Overflow), so that sums stay right.

pub mod chance;
pub mod collecting;
pub mod collections;
pub mod exceptions_and_contentions;
pub mod heap;
pub mod interval;
pub mod pool;
mod recent;
pub mod runtime_counts;
pub mod runtime_wait;
pub mod threads;
pub mod wait_reason;
pub mod window;

pub use window::{Window, WindowEntry, WindowLimits};
