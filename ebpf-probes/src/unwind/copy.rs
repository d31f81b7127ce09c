//! Copies the user stack upwards from where it is to go on, page by page: the copy ends where the
//! mapping does, or at a page that is not in memory (a program that may not sleep cannot bring it
//! in). It begins behind missing pages: a thread that faults on a new page of its stack has its
//! stack pointer there already, and nothing in it yet.
//!
//! What changes from page to page is in memory, where the verifier does not follow it: every page
//! is the same to it. In registers the loop cost 100,000 verified instructions on 6.18, and on 7.2
//! more than a verifier gives.

use super::to_page_end;
use aya_ebpf::helpers::generated::{bpf_loop, bpf_probe_read_user};
use core::ffi::{c_long, c_void};
use ebpf_common::event::SKIPPED_PAGES_SHIFT;
use ebpf_common::limits::{
    MAX_KERNEL_STACK_BYTES, MAX_SKIPPED_PAGES, MAX_STACK_COPY_BYTES, MAX_STEPPED_COPY_BYTES,
    MAX_WALK_BYTES, PAGE_BYTES,
};
use ebpf_common::scratch::{Scratch, StackCopy};
use ebpf_common::walk::opaque;

/// One page more than the limit has, for a stack pointer in the middle of a page, and those that
/// may be missing.
pub(crate) const MAX_STEPS: u32 = MAX_STACK_COPY_BYTES / PAGE_BYTES + 1 + MAX_SKIPPED_PAGES;

/// The same where the steps are those of a loop that the verifier follows.
const MAX_STEPPED: u32 = MAX_STEPPED_COPY_BYTES / PAGE_BYTES + 1 + MAX_SKIPPED_PAGES;

/// The copy goes on; it ends.
pub(crate) const ON: c_long = 0;
pub(crate) const END: c_long = 1;

/// How a copy ended.
pub(crate) struct CopyResult {
    /// Bytes copied.
    pub(crate) bytes: u32,
    /// The limit ended it.
    pub(crate) limited: bool,
    /// The pages missing at its beginning, as the record's flags say it.
    pub(crate) flags: u32,
}

/// Copies at most `room` bytes, and `limit`, which is a constant to the verifier, from user address
/// `from` to `scratch.tail[at..]`.
#[inline(always)]
pub(crate) fn stack<const LOOPS: bool>(
    scratch: &mut Scratch,
    at: u32,
    from: u64,
    room: u32,
    limit: u32,
) -> CopyResult {
    scratch.copy = StackCopy { from, at, bytes: 0, limit: room, skipped: 0 };
    if LOOPS {
        let mut context: *mut Scratch = scratch;
        // SAFETY: the step is a function of this program, and the context outlives the loop.
        unsafe { bpf_loop(MAX_STEPS, step as *mut c_void, (&raw mut context).cast(), 0) };
    } else {
        for done in 0..MAX_STEPPED {
            // The first condition is a constant to the verifier, which does not look at steps the
            // setting rules out.
            if done * PAGE_BYTES >= limit + (1 + MAX_SKIPPED_PAGES) * PAGE_BYTES
                || page(scratch) == END
            {
                break;
            }
        }
    }
    let bytes = scratch.copy.bytes;
    CopyResult { bytes, limited: bytes >= limit, flags: skipped(&scratch.copy) }
}

/// One page.
///
/// # Safety
/// `context` points to the pointer handed to the loop.
#[inline(never)]
unsafe extern "C" fn step(_index: u64, context: *mut c_void) -> c_long {
    // SAFETY: the caller's promise.
    let scratch = unsafe { *context.cast::<*mut Scratch>() };
    // SAFETY: this CPU's, of this hook, and `busy` keeps everybody else away.
    page(unsafe { &mut *scratch })
}

#[inline(always)]
fn page(scratch: &mut Scratch) -> c_long {
    let Some(CopyStep { address, position, bytes }) = next(&scratch.copy) else { return END };
    let target = scratch.tail.as_mut_ptr().wrapping_add(position as usize);
    // SAFETY: a page fits behind the position. A bad user address is an error.
    if unsafe { bpf_probe_read_user(target.cast(), bytes, address as *const _) } != 0 {
        return skip(&mut scratch.copy);
    }
    scratch.copy.bytes += bytes;
    ON
}

/// Passes over a page that could not be read, as long as none could.
#[inline(always)]
pub(crate) fn skip(copy: &mut StackCopy) -> c_long {
    if copy.bytes != 0 || copy.skipped >= MAX_SKIPPED_PAGES {
        return END;
    }
    copy.from = (copy.from | u64::from(PAGE_BYTES - 1)).wrapping_add(1);
    copy.skipped += 1;
    ON
}

/// The record's flags for the pages passed over.
#[inline(always)]
pub(crate) fn skipped(copy: &StackCopy) -> u32 {
    if copy.bytes == 0 { 0 } else { copy.skipped << SKIPPED_PAGES_SHIFT }
}

/// What is to be copied next: within a page, to a position in the tail behind which a whole page
/// fits.
pub(crate) struct CopyStep {
    pub(crate) address: u64,
    pub(crate) position: u32,
    pub(crate) bytes: u32,
}

/// The next step of a copy; `None` when it has all it may have.
#[inline(always)]
pub(crate) fn next(copy: &StackCopy) -> Option<CopyStep> {
    let &StackCopy { from, at, bytes, limit, .. } = copy;
    if bytes >= limit {
        return None;
    }
    let address = from.wrapping_add(u64::from(bytes));
    // Verifiers before 6.8 do not bound one variable by another: they need these two checks, which
    // the compiler finds superfluous.
    let step = opaque(to_page_end(address, limit - bytes));
    let position = opaque(at + bytes);
    if position > MAX_WALK_BYTES + MAX_KERNEL_STACK_BYTES + MAX_STACK_COPY_BYTES
        || step > PAGE_BYTES
    {
        return None;
    }
    Some(CopyStep { address, position, bytes: step })
}
