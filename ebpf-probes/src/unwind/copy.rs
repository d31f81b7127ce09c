//! Copies the user stack from rsp upwards, page by page: the copy ends where the mapping does, or at a page that is not in memory
//! (a program that may not sleep cannot bring it in).

use crate::config::setting;
use aya_ebpf::helpers::generated::bpf_probe_read_user;
use ebpf_common::limits::{
    MAX_KERNEL_STACK_BYTES, MAX_STACK_COPY_BYTES, MAX_WALK_BYTES, PAGE_BYTES, SCRATCH_TAIL_BYTES,
};

/// One page more than the limit has, for a stack pointer in the middle of a page.
const MAX_STEPS: u32 = MAX_STACK_COPY_BYTES / PAGE_BYTES + 1;

/// How a copy ended.
pub(crate) struct Copied {
    /// Bytes copied.
    pub(crate) bytes: u32,
    /// The limit ended it.
    pub(crate) limited: bool,
}

/// Copies at most `stack_copy_bytes` from user address `from` to `tail[at..]`.
#[inline(always)]
pub(crate) fn stack(tail: &mut [u8; SCRATCH_TAIL_BYTES as usize], at: u32, from: u64) -> Copied {
    let limit = setting!(stack_copy_bytes);
    let mut bytes = 0u32;
    for done in 0..MAX_STEPS {
        // The first condition is a constant to the verifier, which does not look at steps the setting rules out.
        if done * PAGE_BYTES >= limit + PAGE_BYTES || bytes >= limit {
            break;
        }
        let address = from.wrapping_add(u64::from(bytes));
        let in_page = (address as u32) & (PAGE_BYTES - 1);
        let wanted = limit - bytes;
        let mut step = PAGE_BYTES - in_page;
        if step > wanted {
            step = wanted;
        }
        // Verifiers before 6.8 do not bound one variable by another: they need these two checks, which the compiler finds
        // superfluous.
        let step = opaque(step);
        let position = opaque(at + bytes);
        if position > MAX_WALK_BYTES + MAX_KERNEL_STACK_BYTES + MAX_STACK_COPY_BYTES || step > PAGE_BYTES {
            break;
        }
        let target = tail.as_mut_ptr().wrapping_add(position as usize);
        // SAFETY: `position` and `step` were checked: a page fits behind the last allowed position. A bad user address is an error.
        if unsafe { bpf_probe_read_user(target.cast(), step, address as *const _) } != 0 {
            break;
        }
        bytes += step;
    }
    Copied { bytes, limited: bytes >= limit }
}

/// Hides from the compiler what it knows of a value.
#[inline(always)]
fn opaque(value: u32) -> u32 {
    // SAFETY: a valid, aligned local.
    unsafe { core::ptr::read_volatile(&raw const value) }
}
