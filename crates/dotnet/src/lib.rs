//! The CLR from outside: attach, diagnostics IPC, nettrace, exact counts, metadata.

pub mod attach;
pub mod counts;
pub mod declared;
pub mod exact;
pub mod fields;
pub mod metadata;
pub mod nettrace;
pub mod types;
