//! x86-64 (arch/x86/include/asm/ptrace.h).

use aya_ebpf::bindings::pt_regs;
use aya_ebpf::programs::PerfEventContext;
use core::arch::asm;
use ebpf_common::machine::GPR;
use ebpf_common::machine::x86_64::X86_64;
use ebpf_common::rule::WALK_REGISTERS;

pub(crate) type Regs = pt_regs;
pub(crate) type Native = X86_64;

/// `THREAD_SIZE` (arch/x86/include/asm/page_64_types.h). With KASAN it is twice that: then the
/// upper half counts as foreign.
pub(crate) const THREAD_BYTES: u64 = 16 * 1024;

/// Code segment of 64-bit user code (`__USER_CS`, arch/x86/include/asm/segment.h); 32-bit code has
/// 0x23.
const USER_CS: u64 = 0x33;
const USER32_CS: u64 = 0x23;

#[inline(always)]
pub(crate) fn machine() -> Native {
    X86_64
}

/// They are those of 64-bit user code. Threads of the kernel that serve a process (io_uring, vhost)
/// have those of the thread that made them, but for the instruction and the stack pointer, which
/// are zero (`copy_thread`, arch/x86/kernel/process.c). Flags of the task would say so too, in
/// other bits on other kernels.
#[inline(always)]
pub(crate) fn is_user(regs: &Regs) -> bool {
    regs.cs == USER_CS && (regs.rip | regs.rsp) != 0
}

#[inline(always)]
pub(crate) fn is_user_32_bit(regs: &Regs) -> bool {
    regs.cs == USER32_CS
}

/// The sampler's interrupt found user code: the privilege level is in the lowest two bits.
#[inline(always)]
pub(crate) fn in_user_code(ctx: &PerfEventContext) -> bool {
    // SAFETY: the context is valid while the program runs.
    (unsafe { (*ctx.ctx).regs.cs }) & 3 == 3
}

#[inline(always)]
pub(crate) fn instruction(regs: &Regs) -> u64 {
    regs.rip
}

#[inline(always)]
pub(crate) fn stack(regs: &Regs) -> u64 {
    regs.rsp
}

/// The system call's number (`orig_ax`), negative when there is none.
#[inline(always)]
pub(crate) fn system_call(regs: &Regs) -> i64 {
    regs.orig_rax as i64
}

/// Copies the general registers, by the places of a record.
#[inline(always)]
pub(crate) fn general(gpr: &mut [u64; GPR], regs: &Regs) {
    *gpr = [
        regs.rax, regs.rdx, regs.rcx, regs.rbx, regs.rsi, regs.rdi, regs.rbp, regs.rsp, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ];
}

/// The registers of a walk.
#[inline(always)]
pub(crate) fn walked(regs: &Regs) -> [u64; WALK_REGISTERS] {
    [regs.rbx, regs.rbp, regs.r12, regs.r13, regs.r14, regs.r15, regs.rsp, regs.rip]
}

/// Stores what other CPUs act on, behind all earlier volatile stores: this machine's stores are
/// seen in their order.
#[inline(always)]
pub(crate) fn publish(field: &mut u32, value: u32) {
    // SAFETY: a valid, aligned field.
    unsafe { core::ptr::write_volatile(field, value) }
}

/// Loads it before all later volatile loads: this machine loads in order. Pairs with [`publish`].
#[inline(always)]
pub(crate) fn published(field: &u32) -> u32 {
    // SAFETY: a valid, aligned field.
    unsafe { core::ptr::read_volatile(field) }
}

/// Keeps what is before it before what is behind it, a store before a load too: every locked
/// instruction does here (`lock add`: arch/x86/net/bpf_jit_comp.c). Of the atomic instructions
/// kernels before 5.12 know this one alone.
#[inline(always)]
pub(crate) fn barrier() {
    let mut word = 0u64;
    // SAFETY: a word of this program's stack. (The compiler's own addition keeps no order for this
    // target.)
    unsafe {
        asm!(
            "lock *(u64 *)({word} + 0x0) += {value}",
            value = in(reg) 1u64,
            word = in(reg) &raw mut word,
        );
    }
}
