//! Being written.
pub mod heap;
pub mod threads;
