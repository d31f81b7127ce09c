//! Shims as a source of events.

pub mod finder;
mod region;
pub use region::RegionError;
