//! The processors there are rules for, and the one the daemon runs on.

use super::machine::TargetMachine;
use super::{aarch64, x86_64};

/// The processor the daemon runs on.
#[cfg(target_arch = "x86_64")]
pub const NATIVE: &TargetMachine = &x86_64::X86_64;
/// The processor the daemon runs on.
#[cfg(target_arch = "aarch64")]
pub const NATIVE: &TargetMachine = &aarch64::AARCH64;

/// Both.
pub const ALL: [&TargetMachine; 2] = [&x86_64::X86_64, &aarch64::AARCH64];

/// Bits of a word that are an address on this machine.
#[must_use]
pub fn native_address_mask() -> u64 {
    // The name of the program lies at the very end of the main thread's stack (fs/binfmt_elf.c,
    // AT_EXECFN).
    (NATIVE.address_mask)(u64::try_from(rustix::param::linux_execfn().as_ptr().addr()).unwrap_or(0))
}
