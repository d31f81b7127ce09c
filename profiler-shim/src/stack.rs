//! The allocating thread's stack: how much above the stack pointer can be copied without a fault,
//! and the copy into the ring.

use crate::{machine, syscall};
use profiler_protocol::sync::AtomicU64;

const PAGE: usize = 4096;

/// Copies are at most this long, bytes: a record holds 128 KiB. What a stack does not have costs
/// nothing.
pub(crate) const LIMIT: usize = 127 * 1024;

/// How much of a stack to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StackExtent {
    /// From here (the stack pointer).
    pub(crate) from: usize,
    /// This many bytes, a multiple of 8.
    pub(crate) bytes: usize,
    /// The limit ended it.
    pub(crate) limited: bool,
    /// Memory ended before the thread's stack did.
    pub(crate) cut: bool,
}

/// The part of this thread's stack from `sp` up that exists, at most `limit` bytes. Each further
/// page is asked of the kernel (about 60 ns), so no stack layout can make the copy fault: pages
/// above a live frame do not go away while it runs.
#[must_use]
pub(crate) fn extent(sp: usize, limit: usize) -> StackExtent {
    let limit = limit.min(LIMIT) & !7;
    let from = sp & !7;
    // A thread's own control block ends its stack; the main thread's lies elsewhere and says
    // nothing.
    let block = machine::thread_block();
    let to_block = block.checked_sub(from).unwrap_or(usize::MAX);
    let wanted = limit.min(to_block & !7);
    let end = from.saturating_add(wanted);
    let mut page = (from & !(PAGE - 1)).saturating_add(PAGE);
    while page < end {
        if !syscall::readable(page) {
            return StackExtent { from, bytes: page.wrapping_sub(from), limited: false, cut: true };
        }
        page = page.saturating_add(PAGE);
    }
    StackExtent { from, bytes: wanted, limited: wanted == limit, cut: false }
}

/// Copies `extent` into the runs of ring memory that were reserved for it.
pub(crate) fn copy(extent: StackExtent, runs: [&[AtomicU64]; 2]) {
    let mut from = extent.from;
    let mut left = extent.bytes / 8;
    for run in runs {
        let words = run.len().min(left);
        if words > 0 {
            machine::copy_words(from, run, words);
        }
        from = from.wrapping_add(words.wrapping_mul(8));
        left = left.wrapping_sub(words);
    }
}

#[cfg(test)]
mod tests {
    use super::{copy, extent};
    use crate::machine::capture;
    use profiler_protocol::record::Registers;
    use profiler_protocol::sync::{AtomicU64, Ordering};

    #[test]
    fn a_threads_stack_is_copied_up_to_its_end_and_no_further() {
        std::thread::spawn(|| {
            let mut registers = Registers::default();
            capture(&mut registers);
            let sp = usize::try_from(registers.sp).expect("64 bit");
            let found = extent(sp, 31 * 1024);
            assert!(!found.limited && !found.cut, "{found:?}");
            assert!(found.bytes < 31 * 1024);
            let short = extent(sp, 256);
            assert!(short.limited && short.bytes == 256);
            let ring: Vec<AtomicU64> = (0..found.bytes / 8).map(|_| AtomicU64::new(0)).collect();
            let (first, second) = ring.split_at(10);
            copy(found, [first, second]);
            // The marker below stands somewhere in this frame or its callers'.
            assert!(ring.iter().any(|w| w.load(Ordering::Relaxed) != 0));
        })
        .join()
        .expect("no fault");
    }

    #[test]
    fn the_captured_place_is_in_this_function() {
        let mut registers = Registers::default();
        capture(&mut registers);
        let here = (the_captured_place_is_in_this_function as fn() as *const ()).addr() as u64;
        assert!(registers.pc > here && registers.pc < here + 4096);
        assert!(registers.sp.abs_diff((&raw const registers).addr() as u64) < 65_536);
    }
}
