//! What is aarch64's: registers, stubs and epilogues by their instructions, signal frames, and the runtime's unwind information.
//! No machine was at hand to run it: tested on what compilers made for it (docs/architectures.md).

pub mod code;
pub mod unwind_info;

use super::machine::Machine;
use super::managed::UnwindFormat;
use super::rule::{Refusal, Register};
use ebpf_common::machine::Machine as _;
use ebpf_common::machine::aarch64 as walked;

/// Registers x16 to x30 and sp, whose DWARF numbers are 16 to 31 (AADWARF64, 4.1). A callee restores x19 to x29 (AAPCS64, 6.1.1); none
/// that it may change is ever a base, so that x0 to x15 need no place.
pub static AARCH64: Machine = Machine {
    names: [
        "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x29",
        "x30", "sp",
    ],
    first_dwarf: walked::FIRST_DWARF,
    stack_pointer: Register::SP,
    frame_pointer: Register::X29,
    link: Some(Register::X30),
    callee_saved: 0x7ff << 3,
    return_column: 30,
    instruction_pointer: None,
    vendor: gimli::Vendor::AArch64,
    elf: object::elf::EM_AARCH64,
    pe: 0xaa64,
    user_end: 1 << 48,
    walk_places: walked::Aarch64::GPR_PLACES,
    captured_places: [15, 13, 3, 4, 5, 6, 7],
    address_mask: walked::address_mask,
    unwind_info: UnwindFormat {
        entry_bytes: 8,
        body_align: 8,
        entry: unwind_info::entry,
        info: unwind_info::read,
        is_plausible: unwind_info::is_plausible,
        rule: unwind_info::rule_at,
    },
    epilogue: code::epilogue,
    stub: code::stub,
    ends_with_call: code::ends_with_call,
    signal_return: Some(code::signal_return),
    // The true return address is written where its call frame information says (runtime src/coreclr/vm/arm64/asmhelpers.S).
    hijack_prologue: &[],
    hijack: |_, _| Err(Refusal::Unsupported),
};

impl Register {
    /// x29, the frame pointer.
    pub const X29: Self = Self::of(13);
    /// x30, the link register.
    pub const X30: Self = Self::of(14);
    /// sp.
    pub const SP: Self = Self::of(15);

    /// x16 to x30; `None` for the others.
    fn x(number: u32) -> Option<Self> {
        let place = number.checked_sub(u32::from(walked::FIRST_DWARF)).filter(|place| *place < 15)?;
        u16::try_from(place).ok().and_then(Self::at)
    }
}
