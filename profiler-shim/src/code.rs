//! Which addresses the runtime may be asked about. When a collectible load context is unloaded, its modules are destroyed at once but its
//! code stays registered until after a later generation-2 collection (dotnet/runtime vm/appdomain.cpp,
//! `ProcessDelayedUnloadLoaderAllocators`); asked about an address in it meanwhile, the runtime follows pointers into the freed module and
//! the process dies (seen on 8.0.32 and 10.0.13).
//!
//! The daemon asks about code it has just seen running, and unloaded code does not run. So an address is safe when nothing was unloaded
//! since it can have been seen; else, when it lies in code that is known to stay.

use crate::repeat::mix;
use core::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 8192;
const PROBES: u64 = 16;
/// Code heaps are made of blocks of 64 KiB, and each heap belongs to one loader allocator (`ExecutableAllocator::Granularity`).
const BLOCK_BITS: u32 = 16;
/// A question is younger than this (`docs/shim-protocol.md`).
const QUESTION_NS: u64 = 6_000_000_000;

/// What is known about code that stays and code that went.
pub struct Code {
    /// Blocks with code that cannot be unloaded, plus 1. Written and read by the service thread alone.
    lasting: [AtomicU64; SLOTS],
    /// When something was unloaded last; 0 for never.
    unloaded_ns: AtomicU64,
}

impl Code {
    /// A module's unload begins or ends.
    pub fn on_unload(&self, now_ns: u64) {
        // Relaxed: the gate orders it before any look-up that could meet the module.
        self.unloaded_ns.store(now_ns, Ordering::Relaxed);
    }

    /// True when a look-up of `address` cannot meet unloaded code. Asked inside the gate.
    pub fn may_ask(&self, address: u64, now_ns: u64) -> bool {
        let unloaded_ns = self.unloaded_ns.load(Ordering::Relaxed);
        if unloaded_ns == 0 || now_ns.saturating_sub(unloaded_ns) > QUESTION_NS {
            return true;
        }
        let wanted = block(address);
        self.slots(wanted).any(|slot| slot.load(Ordering::Relaxed) == wanted)
    }

    /// There is code at `address` that cannot be unloaded. When the neighbourhood of its slot is full, it is not remembered.
    pub fn lasts(&self, address: u64) {
        let wanted = block(address);
        for slot in self.slots(wanted) {
            match slot.load(Ordering::Relaxed) {
                0 => return slot.store(wanted, Ordering::Relaxed),
                there if there == wanted => return,
                _ => {}
            }
        }
    }

    /// All blocks that lie wholly in these `bytes` last. At most 64 MiB of them.
    pub fn all_lasts(&self, start: u64, bytes: u64) {
        let last = start.saturating_add(bytes) >> BLOCK_BITS;
        let first = start.div_ceil(1 << BLOCK_BITS);
        for block in (first..last).take(1024) {
            self.lasts(block << BLOCK_BITS);
        }
    }

    fn slots(&self, block: u64) -> impl Iterator<Item = &AtomicU64> {
        let start = mix(block);
        (0..PROBES).filter_map(move |probe| self.lasting.get(start.wrapping_add(probe) as usize % SLOTS))
    }
}

const fn block(address: u64) -> u64 {
    (address >> BLOCK_BITS).wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use super::{Code, QUESTION_NS};
    use core::sync::atomic::AtomicU64;

    #[test]
    fn after_an_unload_only_lasting_code_is_asked_about_until_questions_are_new() {
        let code =
            Code { lasting: std::array::from_fn(|_| AtomicU64::new(0)), unloaded_ns: AtomicU64::new(0) };
        assert!(code.may_ask(0x5_0000, 0));
        code.lasts(0x7_1234);
        code.on_unload(5);
        assert!(!code.may_ask(0x5_0000, 5 + QUESTION_NS));
        assert!(code.may_ask(0x7_ffff, 6), "the same block");
        assert!(!code.may_ask(0x8_0000, 6));
        code.lasts(0x8_0000);
        assert!(code.may_ask(0x8_0000, 6));
        assert!(code.may_ask(0x5_0000, 6 + QUESTION_NS));
        code.all_lasts(0xa_8000, 0x3_0000);
        code.on_unload(7 + QUESTION_NS);
        let asked = [0xa_ffff, 0xb_0000, 0xc_ffff, 0xd_0000].map(|a| code.may_ask(a, 8 + QUESTION_NS));
        assert_eq!(asked, [false, true, true, false], "blocks that others may share do not count");
        assert!(!code.may_ask(0x5_0000, 8 + QUESTION_NS), "the next unload begins it anew");
    }
}
