//! ABI between the shim (inside a CLR process) and the daemon: one shared region of memory,
//! described byte by byte in `docs/shim-protocol.md`. No allocation, no libc, no unsafe code, and
//! no panic on any input.
//!
//! - [`layout`]: offsets and sizes; [`position`]: ring arithmetic.
//! - Shim's side: [`producer`] (events out), [`request`] (questions in), [`lease`] (does anybody
//!   listen?), over `&[AtomicU64]`.
//! - Daemon's side: [`consumer`], over anything with `read_at`/`write_at`; it copies first and then
//!   checks the copy.
//! - Both: [`load`] (what a shim is told when it is loaded), [`record`] (record ↔ bytes), [`live`]
//!   (which objects are watched), [`counter`] (the one list of what the shim counts),
//!   [`signature`] (what types in metadata are called).
//! - Beside the region, for `record --exact` only: [`exact`], the table of every object.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod consumer;
pub mod counter;
pub mod exact;
pub mod layout;
pub mod lease;
pub mod live;
pub mod load;
pub mod position;
pub mod producer;
pub mod record;
pub mod request;
pub mod signature;
pub mod sync;
