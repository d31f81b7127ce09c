//! aarch64: of its 31 general registers and sp a walk needs those from x16 on, because no frame is
//! found by one that a call may change (AAPCS64, 6.1.1); they are the 16 places of
//! `StackRecord::gpr`, so that DWARF's number of a place is 16 more. A call leaves its return
//! address in x30, perhaps signed (PAC).

use super::WalkMachine;

/// DWARF number of the first place in `StackRecord::gpr`.
pub const FIRST_DWARF: u16 = 16;
/// sp in `StackRecord::gpr`.
pub const STACK_POINTER: usize = 15;

/// x19 in `UnwindRule::saved` and in the walk's registers; x20 to x22 follow. Frames are found by
/// sp or x29; a few of the others are there for hand-written code.
pub const X19: usize = 0;
/// x29, the frame pointer.
pub const X29: usize = 4;
/// x30, the link register.
pub const X30: usize = 5;

/// The processor.
#[derive(Clone, Copy, Debug)]
pub struct Aarch64 {
    /// Bits of a word that are an address; what [`address_mask`] answers.
    pub address_mask: u64,
}

impl WalkMachine for Aarch64 {
    const GPR_PLACES: [u8; 7] = [3, 4, 5, 6, 13, 14, 15];
    const LINK: Option<usize> = Some(X30);

    #[inline(always)]
    fn address(&self, word: u64) -> u64 {
        word & self.address_mask
    }
}

/// The bits of a user address that can be set, from an address near the end of user memory, such as
/// any on the main thread's stack. The signature takes the bits above them
/// (arch/arm64/include/asm/pointer_auth.h, `ptrauth_user_pac_mask`): which those are depends on the
/// kernel's page tables. With 52-bit addresses the stack is still below 2⁴⁸, and so is all memory a
/// program did not ask to be above (Documentation/arch/arm64/memory.rst).
#[must_use]
pub fn address_mask(near_end: u64) -> u64 {
    if near_end == 0 { u64::MAX >> 16 } else { u64::MAX >> near_end.leading_zeros() }
}

#[cfg(test)]
mod tests {
    use super::{Aarch64, address_mask};
    use crate::machine::WalkMachine as _;

    #[test]
    fn a_signature_is_taken_off_whatever_the_page_tables() {
        for (stack, code, signed) in [
            (0x0000_ffff_f2c1_ff00_u64, 0x0000_aaaa_d5a0_1234_u64, 0x006f_aaaa_d5a0_1234_u64),
            (0x0000_007f_f2c1_ff00, 0x0000_0055_d5a0_1234, 0x006f_b2d5_d5a0_1234),
        ] {
            let machine = Aarch64 { address_mask: address_mask(stack) };
            assert_eq!(machine.address(signed), code, "{stack:#x}");
            assert_eq!(machine.address(code), code, "unsigned");
        }
        assert_eq!(address_mask(0), (1 << 48) - 1);
    }
}
