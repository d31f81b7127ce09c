//! The profiler process. Modules stand in the order the data takes:
//! source (events in) -> process (who) -> unwind + sample (stacks) -> symbolize (names) -> aggregate (count)
//! -> pprof (encode) -> sink (out). `run` joins them; nothing else knows all stages.

pub mod cli;
pub mod commands;
pub mod config;
pub mod daemon;
mod end_signals;
pub mod error;
pub mod kubernetes;
pub mod log_filter;
pub mod memory_guard;
pub mod select;
