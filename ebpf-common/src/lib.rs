//! The ABI between the eBPF probes and the daemon: ring records, map keys and values, limits,
//! counters.
//!
//! Both sides are built together and travel in one binary, so nothing here is versioned. Everything
//! is native-endian (probe and daemon share a machine), `repr(C)`, made of fixed-width integers,
//! and has its padding named, because the kernel copies whole values and map keys are compared byte
//! by byte. With the feature `user` the types are `Pod`. No std here, and no logic but what the
//! probes run and tests are to check: a walk's one step ([`walk`]), the
//! last walk ([`last_walk`]) and what a task's state says
//! ([`task`]).
#![cfg_attr(not(test), no_std)]

pub mod config;
pub mod counter;
pub mod event;
pub mod key;
pub mod last_walk;
pub mod limits;
pub mod machine;
pub mod rule;
pub mod scratch;
pub mod stage;
pub mod task;
pub mod walk;

/// Declares a plain record and, for the daemon, its `Pod` impls.
macro_rules! plain {
    ($(#[$meta:meta])* pub struct $name:ident { $($body:tt)* }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "user", derive(bytemuck::Pod, bytemuck::Zeroable))]
        pub struct $name { $($body)* }

        // SAFETY: `repr(C)` and made of integers without padding: bytemuck's derive of `Pod` proves
        // it at compile time.
        #[cfg(feature = "user")]
        unsafe impl aya::Pod for $name {}
    };
}
pub(crate) use plain;
