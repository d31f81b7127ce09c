//! Exact stacks. [`eh_frame`] and [`managed`] turn unwind data and an address into a rule.
//! [`unwinder`] is the user-space unwinder: it follows the rules from captured registers to the
//! thread's start.
//!
//! This crate is pure. Bytes come in through [`TargetMemory`] and [`managed::PeImage`]. It knows no
//! procfs, no eBPF and no paths of files. No input makes it panic or work without bound.

pub mod aarch64;
pub mod eh_frame;
pub mod encode;
pub mod machine;
pub mod managed;
pub mod native;
pub mod rule;
pub mod unwind_format;
pub mod unwinder;
#[cfg(test)]
mod walkers;
pub mod x86_64;

/// Memory of the profiled process.
pub trait TargetMemory {
    /// Reads from `address` into `into` and returns how many bytes it got, from the first on; 0
    /// when nothing could be read.
    fn read(&self, address: u64, into: &mut [u8]) -> usize;
}
