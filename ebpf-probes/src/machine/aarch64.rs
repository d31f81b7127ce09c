//! aarch64 (arch/arm64/include/asm/ptrace.h). Built and linted; no machine to run it was at hand.

use crate::config::setting;
use aya_ebpf::bindings::user_pt_regs;
use aya_ebpf::programs::PerfEventContext;
use core::arch::asm;
use ebpf_common::machine::GPR;
use ebpf_common::machine::aarch64::{Aarch64, FIRST_DWARF};
use ebpf_common::rule::WALK_REGISTERS;

/// The start of `struct pt_regs`.
#[repr(C)]
pub(crate) struct Regs {
    user: user_pt_regs,
    orig_x0: u64,
    syscallno: i32,
}

pub(crate) type Native = Aarch64;

/// `THREAD_SIZE` with pages of 4 or 16 KiB (arch/arm64/include/asm/memory.h). Where it is larger,
/// the upper part counts as foreign.
pub(crate) const THREAD_BYTES: u64 = 16 * 1024;

/// `PSR_MODE_MASK` and `PSR_MODE32_BIT` (arch/arm64/include/uapi/asm/ptrace.h): user mode is EL0t,
/// which is 0. Kernel threads that serve a process have EL1h there (arch/arm64/kernel/process.c,
/// `copy_thread`).
const MODE: u64 = 0xf;
const MODE_32_BIT: u64 = 0x10;

#[inline(always)]
pub(crate) fn machine() -> Native {
    Aarch64 { address_mask: setting!(address_mask) }
}

/// They are those of 64-bit user code.
#[inline(always)]
pub(crate) fn is_user(regs: &Regs) -> bool {
    regs.user.pstate & (MODE | MODE_32_BIT) == 0
}

#[inline(always)]
pub(crate) fn is_user_32_bit(regs: &Regs) -> bool {
    regs.user.pstate & (MODE | MODE_32_BIT) == MODE_32_BIT
}

/// The sampler's interrupt found user code.
#[inline(always)]
pub(crate) fn in_user_code(ctx: &PerfEventContext) -> bool {
    // SAFETY: the context is valid while the program runs.
    (unsafe { (*ctx.ctx).regs.pstate }) & MODE == 0
}

#[inline(always)]
pub(crate) fn instruction(regs: &Regs) -> u64 {
    regs.user.pc
}

#[inline(always)]
pub(crate) fn stack(regs: &Regs) -> u64 {
    regs.user.sp
}

/// The system call's number, negative (`NO_SYSCALL`) when there is none.
#[inline(always)]
pub(crate) fn system_call(regs: &Regs) -> i64 {
    i64::from(regs.syscallno)
}

/// Copies x16 to x30 and sp, the places of a record.
#[inline(always)]
pub(crate) fn general(gpr: &mut [u64; GPR], regs: &Regs) {
    let mut place = 0;
    while place < GPR - 1 {
        gpr[place] = regs.user.regs[place + FIRST_DWARF as usize];
        place += 1;
    }
    gpr[GPR - 1] = regs.user.sp;
}

/// The registers of a walk.
#[inline(always)]
pub(crate) fn walked(regs: &Regs) -> [u64; WALK_REGISTERS] {
    let x = &regs.user.regs;
    [x[19], x[20], x[21], x[22], x[29], x[30], regs.user.sp, regs.user.pc]
}

/// Stores what other CPUs act on, behind all earlier stores.
#[inline(always)]
pub(crate) fn publish(field: &mut u32, value: u32) {
    barrier();
    // SAFETY: a valid, aligned field.
    unsafe { core::ptr::write_volatile(field, value) }
}

/// Loads it before all later loads. Pairs with [`publish`].
#[inline(always)]
pub(crate) fn published(field: &u32) -> u32 {
    // SAFETY: a valid, aligned field.
    let value = unsafe { core::ptr::read_volatile(field) };
    barrier();
    value
}

/// Keeps what is before it before what is behind it, a store before a load too. BPF has no store
/// with release before 6.15; an exchange is a full barrier (`swpal`, or `ldxr`, `stlxr` and
/// `dmb ish`: arch/arm64/net/bpf_jit_comp.c, since 5.18), an addition without its result is none.
#[inline(always)]
pub(crate) fn barrier() {
    let mut word = 0u64;
    // SAFETY: a word of this program's stack. (The compiler's own exchange is not to be had for
    // this target.)
    unsafe {
        asm!(
            "{value} = xchg_64({word} + 0x0, {value})",
            value = inout(reg) 1u64 => _,
            word = in(reg) &raw mut word,
        );
    }
}
