//! All system tests, in one binary: each module one part of the promise, each test named after what
//! breaks when it fails.
//!
//! Run by `cargo xtask test`, which sets the variables of `system_tests::environment`. They take
//! their turns, those that measure time alone, so a plain `cargo test -p system-tests NAME` works
//! too.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod attach;
mod attribution;
mod capture;
mod coexistence;
mod counts;
mod daemon;
mod death;
mod deleted;
mod demo;
mod dump;
mod errors;
mod exact;
mod exec;
mod faults;
mod features;
mod foreign;
mod harness;
mod headroom;
mod heap;
mod held;
mod heldup;
mod host;
mod inspect;
mod kubernetes;
mod large;
mod limits;
mod lines;
mod memory;
mod monitoring;
mod musl;
mod names;
mod names_read;
mod native_lines;
mod native_symbols;
mod node;
mod object_storage;
mod operate;
mod otlp;
mod pages;
mod privilege;
mod process_names;
mod ps;
mod pyroscope;
mod receivers;
mod reservations;
mod restart;
mod runtime;
mod scale;
mod signals;
mod soak;
mod spans;
mod standstill;
mod start;
mod survive;
mod threads;
mod titles;
mod truth;
mod types;
mod unwind;
mod versions;
mod waits;
mod walker;
