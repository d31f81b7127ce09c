//! The CLR from outside.
//!
//! [`attach`] decides which processes get the shim, loads it and speaks the diagnostics protocol.
//! [`counts`] and [`exact`] read exact allocation counts. [`nettrace`] decodes event streams.
//! [`metadata`], [`declared`], [`types`] and [`fields`] name types. [`data_descriptor`] reads what
//! a runtime says of its own data. By it [`method_names`] names methods, and [`thread_list`] lists
//! managed threads.

pub mod attach;
mod bundle;
pub mod counts;
pub mod data_descriptor;
pub mod declared;
pub mod exact;
pub mod fields;
pub mod metadata;
pub mod method_names;
pub mod nettrace;
mod pe_head;
pub mod thread_list;
pub mod types;
