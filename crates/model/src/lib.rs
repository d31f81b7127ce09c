//! What flows through the profiler. The sources produce [`event`]s. The unwinder turns the context
//! of an event into a [`stack`] of [`frame`]s. A [`feature`] is what a process is recorded with.
//! The aggregation adds values to a stack and its [`labels`]; a [`thread_role`] is one of them.
//!
//! This crate does no I/O and knows no other crate of the pipeline.

pub mod backoff;
pub mod clock;
pub mod event;
pub mod feature;
pub mod frame;
pub mod labels;
pub mod pretty;
pub mod stack;
pub mod text;
pub mod thread_role;
pub mod units;
