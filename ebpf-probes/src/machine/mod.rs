//! The processor the probes run on: where a task's user registers are, and what they say. One file each; all others name no register.

#[cfg(bpf_target_arch = "aarch64")]
mod aarch64;
#[cfg(bpf_target_arch = "x86_64")]
mod x86_64;

#[cfg(bpf_target_arch = "aarch64")]
pub(crate) use aarch64::{
    Native, Regs, THREAD_BYTES, general, in_user_code, instruction, is_user, is_user_32_bit, machine,
    publish, published, stack, system_call, walked,
};
#[cfg(bpf_target_arch = "x86_64")]
pub(crate) use x86_64::{
    Native, Regs, THREAD_BYTES, general, in_user_code, instruction, is_user, is_user_32_bit, machine,
    publish, published, stack, system_call, walked,
};

use crate::config::Task;
use aya_ebpf::helpers::generated::bpf_task_pt_regs;
use core::arch::asm;

/// The user registers at the top of a task's kernel stack: those the thread entered the kernel with, by whatever door, a timer interrupt
/// out of user code too (interrupts from user mode save them there).
///
/// `task` is the current one or held by the program, and no kernel thread.
#[inline(always)]
pub(crate) fn registers<'a>(task: Task) -> &'a Regs {
    // SAFETY: a helper on a task that is there, and has user registers.
    let regs = unsafe { bpf_task_pt_regs(task.0.cast_mut()) } as *const Regs;
    // SAFETY: what the helper returned is typed for the verifier; loads through it cannot fault.
    unsafe { &*regs }
}

/// Keeps what is before it before what is behind it, a store before a load too. BPF has no store with release before 6.15; an exchange is a
/// full barrier wherever it is (`xchg`: arch/x86/net/bpf_jit_comp.c; `swpal`, or `ldxr`, `stlxr` and `dmb ish`: arch/arm64/net/bpf_jit_comp.c;
/// the rule about `amo` with A and L in the machine's memory model).
#[inline(always)]
pub(crate) fn barrier() {
    let mut word = 0u64;
    // SAFETY: a word of this program's stack. (The compiler's own exchange is not to be had for this target.)
    unsafe {
        asm!("{value} = xchg_64({word} + 0x0, {value})", value = inout(reg) 1u64 => _, word = in(reg) &raw mut word);
    }
}
