//! The library a CLR loads as a notification-only profiler. It answers the daemon's questions about
//! managed code, reports sampled allocations and what became of them, collections and pauses,
//! exceptions and waits for locks, through one shared region (`profiler-protocol`).
//!
//! No libc, no allocator, no locks, no signals, no panics: `cargo xtask` links it as a `no_std`
//! cdylib and fails the build when a panic path survives. Here, as a plain library, it is tested
//! with std.
//!
//! Reading order: [`com`] (how the runtime calls us) and [`runtime`] (how we call it) →
//! [`instance`] (one attached profiler; all its state) → [`event`] (what runs on the app's threads)
//! → [`service`] (the one thread of our own) → [`method`] (names). [`exact`] is another profiler in
//! the same library, which sees every object; the runtime asks for it by another class id.
#![cfg_attr(not(test), no_std)]

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!(
    "the shim's system calls and register capture are written for x86-64 and aarch64 Linux"
);

mod code;
pub mod com;
mod contention;
mod downsampler;
mod event;
mod exact;
#[cfg(all(feature = "freestanding", not(test)))]
mod freestanding;
mod gate;
mod gc;
mod instance;
mod live;
mod machine;
mod method;
mod payload;
mod recorder;
mod region;
mod repeat;
mod runtime;
mod service;
mod signature;
mod stack;
mod syscall;
mod text;
mod type_name;
mod types;
mod vdso;
