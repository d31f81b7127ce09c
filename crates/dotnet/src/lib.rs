//! The CLR from outside.
//!
//! [`attach`] decides which processes get the shim, loads it and speaks the diagnostics protocol.
//! [`counts`] and [`exact`] read exact allocation counts. [`nettrace`] decodes event streams.
//! [`metadata`], [`declared`], [`types`] and [`fields`] name types.

pub mod attach;
pub mod counts;
pub mod declared;
pub mod exact;
pub mod fields;
pub mod metadata;
pub mod nettrace;
pub mod types;
