//! Joins the steps into one recording: events, order, stacks, names, values, windows.
//!
//! [`Recording`] owns the two threads of a recording. The [`collector`] drains the sources and puts
//! events in order; the processor's thread ([`processor_thread`]) does the rest, event by event
//! ([`processor`]). docs/architecture.md says why there are two threads. `record`, `dump`, `leaks`
//! and the daemon use this crate alike.

mod backlog;
mod collector;
pub mod commands;
mod cost_attribution;
pub mod counter_values;
pub mod counters;
pub mod follow;
mod handle;
mod heartbeat;
mod last_names;
mod mailbox;
mod names;
mod naming;
mod pre_attach_names;
mod probe_tables;
pub mod processor;
mod processor_thread;
mod question_times;
mod rate_controller;
mod read_names;
mod recording;
mod retired_programs;
mod starts;
pub mod trim;

pub use handle::RecordingHandle;
pub use processor::ManagedProcess;
pub use processor_thread::{ClosedWindow, RecordingResult, TakeWindow};
pub use recording::{HeartbeatMonitors, Recording, WindowOptions};
