//! What is aarch64's: registers, stubs and epilogues by their instructions, signal frames, and the
//! runtime's unwind information. No machine was at hand to run it: tested on what compilers made
//! for it (docs/architectures.md).

pub mod code;
pub mod unwind_info;

use super::machine::{CodeRules, DwarfConventions, RegisterSet, TargetMachine};
use super::managed::UnwindFormat;
use super::rule::{Register, RuleRefusal};
use ebpf_common::machine::WalkMachine as _;
use ebpf_common::machine::aarch64 as walked;

/// Registers x16 to x30 and sp, whose DWARF numbers are 16 to 31 (AADWARF64, 4.1). A callee
/// restores x19 to x29 (AAPCS64, 6.1.1); none that it may change is ever a base, so that x0 to x15
/// need no place.
pub(crate) static AARCH64: TargetMachine = TargetMachine {
    registers: RegisterSet {
        names: [
            "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27",
            "x28", "x29", "x30", "sp",
        ],
        first_dwarf: walked::FIRST_DWARF,
        callee_saved: 0x7ff << 3,
        walk_places: walked::Aarch64::GPR_PLACES,
        captured_places: [15, 13, 3, 4, 5, 6, 7],
    },
    stack_pointer: Register::SP,
    frame_pointer: Register::X29,
    link: Some(Register::X30),
    dwarf: DwarfConventions {
        return_column: 30,
        instruction_pointer: None,
        vendor: gimli::Vendor::AArch64,
    },
    elf: object::elf::EM_AARCH64,
    // The barrier between CPUs is an atomic exchange, which eBPF has here since 5.18.
    oldest_kernel: (5, 18),
    pe: 0xaa64,
    user_end: 1 << 48,
    address_mask: walked::address_mask,
    unwind_info: UnwindFormat {
        entry_bytes: 8,
        body_align: 8,
        entry: unwind_info::entry,
        info: unwind_info::read,
        is_plausible: unwind_info::is_plausible,
        rule: unwind_info::rule_at,
    },
    code: CodeRules {
        epilogue: code::epilogue,
        stub: code::stub,
        ends_with_call: code::ends_with_call,
        // Nothing is searched for by it: a frame need not have a return address.
        call_target: |_, _| None,
        signal_return: Some(code::signal_return),
        // Compilers keep frame records in nearly all code.
        body: None,
        // The function of a new context has no caller by its call frame information, and its code
        // begins with a `nop` (glibc sysdeps/unix/sysv/linux/aarch64/setcontext.S).
        is_context_start: |_| false,
        // The true return address is written where its call frame information says (runtime
        // src/coreclr/vm/arm64/asmhelpers.S).
        hijack_prologue: &[],
        hijack: |_, _| Err(RuleRefusal::Unsupported),
    },
};

impl Register {
    /// x29, the frame pointer.
    pub(crate) const X29: Self = Self::of(13);
    /// x30, the link register.
    pub(crate) const X30: Self = Self::of(14);
    /// sp.
    pub(crate) const SP: Self = Self::of(15);

    /// x16 to x30; `None` for the others.
    fn x(number: u32) -> Option<Self> {
        let place =
            number.checked_sub(u32::from(walked::FIRST_DWARF)).filter(|place| *place < 15)?;
        u16::try_from(place).ok().and_then(Self::at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eh_frame::{CfiSection, UnwindSections};
    use crate::encode::encode;
    use crate::rule::{Cfa, Saved};

    /// Where `.eh_frame` begins in libc.so.6 of Debian's libc6 2.36-9+deb12u14, arm64.
    const EH_FRAME: u64 = 0x16_3ec0;
    /// Its first bytes: a CIE, the entry of a jump, and that of the function at 0x27580.
    const BYTES: [u8; 80] = [
        0x10, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x7a, 0x52, 0x00, 0x04, 0x78, 0x1e,
        0x01, 0x1b, 0x0c, 0x1f, 0x00, 0x10, 0x00, 0x00, 0x00, 0x18, 0x00, 0x00, 0x00, 0xe4, 0x37,
        0xec, 0xff, 0x04, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x24, 0x00, 0x00, 0x00, 0x2c,
        0x00, 0x00, 0x00, 0x90, 0x36, 0xec, 0xff, 0x80, 0x00, 0x00, 0x00, 0x00, 0x41, 0x0e, 0x30,
        0x9d, 0x06, 0x9e, 0x05, 0x44, 0x93, 0x04, 0x95, 0x03, 0x56, 0x0a, 0xde, 0xdd, 0xd3, 0xd5,
        0x0e, 0x00, 0x41, 0x0b, 0x00,
    ];
    /// The end of that function: ldp x19, x21, [sp, #16]; ldp x29, x30, [sp], #48; b.
    const EPILOGUE: [u8; 12] =
        [0xf3, 0x57, 0x41, 0xa9, 0xfd, 0x7b, 0xc3, 0xa8, 0xf9, 0x11, 0x03, 0x14];

    fn rule(bytes: &[u8], address: u64) -> super::super::rule::Rule {
        let section = CfiSection { address: EH_FRAME, bytes: bytes.to_vec() };
        UnwindSections::of(&AARCH64, None, Some(section), None).rule(address).unwrap().rule
    }

    #[test]
    fn a_function_of_glibc_is_left_from_its_every_part() {
        assert_eq!(rule(&BYTES, 0x2_7580), AARCH64.frameless(), "before it made room");
        let body = rule(&BYTES, 0x2_75c0);
        assert_eq!(body.cfa, Cfa::Register { base: Register::SP, offset: 48 });
        assert_eq!(body.return_address, Saved::AtCfa(-40));
        assert_eq!(body.registers[Register::X29.index()], Saved::AtCfa(-48));
        assert_eq!(body.registers[3], Saved::AtCfa(-32), "x19");
        assert_eq!(body.registers[4], Saved::Same, "x20");
        assert_eq!(body.registers[5], Saved::AtCfa(-24), "x21");
        assert_eq!(rule(&BYTES, 0x2_75ec), AARCH64.frameless(), "all is given back");
        assert_eq!(rule(&BYTES, 0x2_75f4), body, "behind the epilogue");
        assert!(encode(&AARCH64, &body).is_some(), "the probes can do it");
    }

    #[test]
    fn its_epilogue_says_the_same_by_its_instructions() {
        let function = 0x2_7580..0x2_7600;
        for (at, address) in [(0, 0x2_75e4), (4, 0x2_75e8), (8, 0x2_75ec)] {
            let by_code = code::epilogue(&EPILOGUE[at..], address, &function).unwrap();
            let by_table = rule(&BYTES, address);
            assert_eq!(by_code.cfa, by_table.cfa, "{address:#x}");
            let at_cfa = |saved| match (saved, by_code.cfa) {
                (
                    Saved::AtRegister { base: Register::SP, offset },
                    Cfa::Register { offset: cfa, .. },
                ) => Saved::AtCfa(offset - cfa),
                (saved, _) => saved,
            };
            assert_eq!(at_cfa(by_code.return_address), by_table.return_address, "{address:#x}");
        }
    }

    #[test]
    fn signed_return_addresses_and_the_end_of_a_stack_are_read() {
        // The second entry's two bytes of instructions, once as paciasp's negate_ra_state, once as
        // `undefined x30` like clone's child.
        let mut signed = BYTES;
        signed[36..40].copy_from_slice(&[0, 0x2d, 0, 0]);
        assert_eq!(rule(&signed, 0x2_76c0), AARCH64.frameless());
        signed[36..40].copy_from_slice(&[0, 0x07, 30, 0]);
        assert!(rule(&signed, 0x2_76c0).is_thread_start());
    }
}
