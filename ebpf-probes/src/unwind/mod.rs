//! User stacks: walked here by the rules the daemon has pushed, copied from the first frame without
//! a rule on.

pub(crate) mod copy;
pub(crate) mod walk;

use ebpf_common::limits::PAGE_BYTES;

/// Bytes from `address` to the end of its page, at most `most`.
#[inline(always)]
pub(crate) fn to_page_end(address: u64, most: u32) -> u32 {
    let rest = PAGE_BYTES - ((address as u32) & (PAGE_BYTES - 1));
    if rest > most { most } else { rest }
}
