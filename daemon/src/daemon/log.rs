//! The daemon's own log: on stderr, for people or one JSON object a line.

use crate::config::{Log, LogFormat, LogLevel};
use std::io::IsTerminal as _;
use tracing_subscriber::EnvFilter;

/// Begins to log, as configured; once in the life of the program.
pub(super) fn start(log: &Log) {
    let level = match log.level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
    };
    let filter = EnvFilter::try_from_env("PERFUSION_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let form = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match log.format {
        LogFormat::Json => form.json().flatten_event(true).init(),
        LogFormat::Text => form
            .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
            .with_target(false)
            .init(),
    }
}
