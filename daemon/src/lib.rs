//! The program: command line, [`commands`], configuration, selection and the node service
//! ([`daemon`]). The steps of the data are crates of their own; docs/architecture.md lists them.

pub mod cli;
pub mod commands;
pub mod config;
pub mod counts;
pub mod daemon;
mod end_signals;
pub mod error;
pub mod kubernetes;
pub mod log_filter;
pub mod memory_guard;
pub mod select;
pub mod symbols;
