//! What is x86-64's: registers, epilogues, stubs and code without unwind data by their
//! instructions, UNWIND_INFO, and the runtime's hijacked return addresses.

pub mod body;
pub mod epilogue;
pub mod unwind_info;

use super::machine::{BodyDecoder, CodeRules, DwarfConventions, RegisterSet, TargetMachine};
use super::managed::UnwindFormat;
use super::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal};
use ebpf_common::machine as walked;
use ebpf_common::machine::WalkMachine as _;

/// Registers in DWARF order (System V ABI x86-64, figure 3.36): 0 rax, 1 rdx, 2 rcx, 3 rbx, 4 rsi,
/// 5 rdi, 6 rbp, 7 rsp, 8–15 r8–r15; 16 is the return address. A callee restores rbx, rbp, rsp and
/// r12 to r15 (3.2.1).
pub(crate) static X86_64: TargetMachine = TargetMachine {
    registers: RegisterSet {
        names: [
            "rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11",
            "r12", "r13", "r14", "r15",
        ],
        first_dwarf: 0,
        callee_saved: 1 << 3 | 1 << 6 | 0xf << 12,
        walk_places: walked::x86_64::X86_64::GPR_PLACES,
        captured_places: [7, 6, 3, 12, 13, 14, 15],
    },
    stack_pointer: Register::RSP,
    frame_pointer: Register::RBP,
    link: None,
    dwarf: DwarfConventions {
        return_column: 16,
        instruction_pointer: Some(16),
        vendor: gimli::Vendor::Default,
    },
    elf: object::elf::EM_X86_64,
    // The oldest that was tried. Before 5.8 there is no `bpf_ringbuf_output`.
    oldest_kernel: (5, 10),
    pe: 0x8664,
    user_end: 1 << 47,
    address_mask: |_| u64::MAX,
    unwind_info: UnwindFormat {
        entry_bytes: unwind_info::FUNCTION_BYTES,
        body_align: 16,
        entry: |bytes, _| unwind_info::decode(bytes),
        info: unwind_info::read,
        is_plausible: unwind_info::is_plausible,
        rule: unwind_info::rule_at,
    },
    code: CodeRules {
        epilogue: epilogue::epilogue,
        stub: epilogue::stub,
        ends_with_call: epilogue::ends_with_call,
        call_target: epilogue::call_target,
        // Call frame information says it all: glibc and the kernel write it for the return of
        // handlers.
        signal_return: None,
        body: Some(BodyDecoder { rule: body::rule, is_behind_entry: body::is_behind_entry }),
        is_context_start,
        hijack_prologue: &HIJACK_PROLOGUE,
        hijack,
    },
};

impl Register {
    /// rax: what a system call answers.
    pub(crate) const RAX: Self = Self::of(0);
    /// rbx.
    #[cfg(test)]
    pub(crate) const RBX: Self = Self::of(3);
    /// rbp.
    pub(crate) const RBP: Self = Self::of(6);
    /// rsp.
    pub const RSP: Self = Self::of(7);

    /// The register that machine code (and UNWIND_INFO) calls `number`: rax rcx rdx rbx rsp rbp rsi
    /// rdi r8–r15.
    #[must_use]
    pub(crate) fn from_machine(number: u8) -> Option<Self> {
        const DWARF: [u8; 16] = [0, 2, 1, 3, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];
        DWARF.get(usize::from(number)).copied().map(Self::of)
    }
}

/// Whether code is glibc's `__start_context` (sysdeps/unix/sysv/linux/x86_64/__start_context.S):
/// mov %rbx,%rsp; mov (%rsp),%rdi; test %rdi,%rdi, behind an `endbr64` where it is built with
/// those.
fn is_context_start(code: &[u8]) -> bool {
    let code = code.strip_prefix(&[0xf3, 0x0f, 0x1e, 0xfa]).unwrap_or(code);
    code.starts_with(&[0x48, 0x89, 0xdc, 0x48, 0x8b, 0x3c, 0x24, 0x48, 0x85, 0xff])
}

/// First bytes of `OnHijackTripThread` (runtime src/coreclr/vm/amd64/asmhelpers.S): push rax, rbp,
/// rbx, r15, r14, r13, r12. No other function of libcoreclr 8.0.32, 9.0.5 and 10.0.13 begins so.
const HIJACK_PROLOGUE: [u8; 11] =
    [0x50, 0x55, 0x53, 0x41, 0x57, 0x41, 0x56, 0x41, 0x55, 0x41, 0x54];

/// The rule inside `OnHijackTripThread`, at `offset` from its start, given what its call frame
/// information says.
///
/// To suspend a thread the runtime puts this function's address in place of a managed return
/// address (threadsuspend.cpp, `Thread::HijackThread`), so it is entered by a `ret`: there is no
/// return address on the stack until its first push made room and `OnHijackWorker` wrote the true
/// one there. Its CFI is that of a called function, one word too high. At the first instruction the
/// return address is in the runtime's `Thread` object only.
fn hijack(mut rule: Rule, offset: u64) -> Result<Rule, RuleRefusal> {
    let Cfa::Register { base, offset: cfa } = rule.cfa else {
        return Err(RuleRefusal::Unsupported);
    };
    if offset == 0 {
        return Err(RuleRefusal::Unsupported);
    }
    rule.cfa = Cfa::Register { base, offset: cfa.saturating_sub(8) };
    rule.kind = FrameKind::Stub { words: 1 };
    Ok(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_numbers_name_the_same_registers_as_dwarf_numbers() {
        assert_eq!(Register::from_machine(5), Some(Register::RBP));
        assert_eq!(Register::from_machine(4), Some(Register::RSP));
        assert_eq!(Register::from_machine(3), Some(Register::RBX));
        assert_eq!(Register::from_machine(16), None);
    }
}
