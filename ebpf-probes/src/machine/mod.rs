//! The processor the probes run on: where a task's user registers are, and what they say. One file
//! each; all others name no register.

#[cfg(bpf_target_arch = "aarch64")]
mod aarch64;
#[cfg(bpf_target_arch = "x86_64")]
mod x86_64;

#[cfg(bpf_target_arch = "aarch64")]
pub(crate) use aarch64::{
    Native, Regs, THREAD_BYTES, barrier, general, in_user_code, instruction, is_user,
    is_user_32_bit, machine, publish, published, stack, system_call, walked,
};
#[cfg(bpf_target_arch = "x86_64")]
pub(crate) use x86_64::{
    Native, Regs, THREAD_BYTES, barrier, general, in_user_code, instruction, is_user,
    is_user_32_bit, machine, publish, published, stack, system_call, walked,
};

use crate::config::{Task, setting};
use aya_ebpf::helpers::generated::{bpf_probe_read_kernel, bpf_task_pt_regs};
use core::mem::size_of;

/// The user registers at the top of a task's kernel stack: those the thread entered the kernel
/// with, by whatever door, a timer interrupt out of user code too (interrupts from user mode save
/// them there).
///
/// `task` is the current one or held by the program, and no kernel thread.
#[inline(always)]
pub(crate) fn registers<'a>(task: Task) -> &'a Regs {
    // SAFETY: a helper on a task that is there, and has user registers.
    let regs = unsafe { bpf_task_pt_regs(task.pointer.cast_mut()) } as *const Regs;
    // SAFETY: what the helper returned is typed for the verifier; loads through it cannot fault.
    unsafe { &*regs }
}

/// The same for kernels before 5.15, which have no helper for it: a copy in `room`, all zeros if
/// they cannot be read.
///
/// # Safety
/// `room` must be valid for a write of all of them.
#[inline(always)]
pub(crate) unsafe fn copied_registers<'a>(task: Task, room: *mut Regs) -> &'a Regs {
    // `task_pt_regs` of arch/x86/include/asm/processor.h and arch/arm64/include/asm/processor.h.
    let from = task.stack().wrapping_add(u64::from(setting!(task_registers)));
    // SAFETY: the caller's promise. A bad address is an error, and leaves zeros.
    unsafe { bpf_probe_read_kernel(room.cast(), size_of::<Regs>() as u32, from as *const _) };
    // SAFETY: the caller's promise; whole words, of which every pattern of bits is one.
    unsafe { &*room }
}
