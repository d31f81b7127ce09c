//! x86-64: 16 general registers in DWARF order (0 rax, 1 rdx, 2 rcx, 3 rbx, 4 rsi, 5 rdi, 6 rbp, 7
//! rsp, 8–15 r8–r15; System V ABI x86-64, figure 3.36), return addresses on the stack.

use super::WalkMachine;

/// rsp in `StackRecord::gpr`.
pub const STACK_POINTER: usize = 7;

/// rbx in `UnwindRule::saved` and in the walk's registers, which have the same order.
pub const RBX: usize = 0;
/// rbp; r12 to r15 follow.
pub const RBP: usize = 1;

/// The processor.
#[derive(Clone, Copy, Debug)]
pub struct X86_64;

impl WalkMachine for X86_64 {
    const GPR_PLACES: [u8; 7] = [3, 6, 12, 13, 14, 15, 7];
    const LINK: Option<usize> = None;

    #[inline(always)]
    fn address(&self, word: u64) -> u64 {
        word
    }
}
