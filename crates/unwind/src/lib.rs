//! Exact stacks: (unwind data, PC) → rule, and the finisher that obeys the rules from a captured
//! context down to the thread's start. Pure: bytes come in through [`TargetMemory`] and
//! [`managed::PeImage`], nothing here knows procfs, eBPF or where files are, and no input, however
//! hostile, makes it panic or work without bound.

pub mod aarch64;
pub mod eh_frame;
pub mod encode;
pub mod finish;
pub mod machine;
pub mod managed;
pub mod native;
pub mod rule;
pub mod unwind_format;
#[cfg(test)]
mod walkers;
pub mod x86_64;

/// Memory of the profiled process.
pub trait TargetMemory {
    /// Reads from `address` into `into` and returns how many bytes it got, from the first on; 0
    /// when nothing could be read.
    fn read(&self, address: u64, into: &mut [u8]) -> usize;
}
