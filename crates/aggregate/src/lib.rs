//! 5. COUNT: values per (stack, labels) of one window, for the thirteen sample types of a profile.
//!
//! ```text
//! let mut window = Window::new(Limits::default());
//! window.add(&frames, &labels, SampleType::Samples, 1.0);       // frames innermost first
//! window.add(&frames, &labels, SampleType::Cpu, 10_101_010.1);
//! for entry in window.entries() { /* frames, labels, values by SampleType::index() */ }
//! ```
//! Keys are full (no hash stands for a stack) and bounded: what comes after the limit goes to one
//! entry whose only frame is [`Marker::Overflow`](perfusion_model::frame::Marker::Overflow), so
//! that sums stay right. No names of functions here.

pub mod chance;
pub mod collecting;
pub mod collections;
pub mod heap;
pub mod incident_totals;
pub mod incidents;
pub mod interval;
pub mod pool;
pub mod recent;
pub mod runtime_wait;
pub mod threads;
pub mod wait_reason;
pub mod window;

pub use window::{Entry, Limits, Window};
