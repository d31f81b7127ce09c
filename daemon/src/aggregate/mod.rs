//! Being written.
pub mod heap;
pub mod thread_role;
pub mod threads;
pub mod wait_reason;
