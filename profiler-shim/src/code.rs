//! Which addresses the runtime may be asked about. When a collectible load context is unloaded, its modules are destroyed at once but its
//! code stays registered until after a later generation-2 collection (dotnet/runtime vm/appdomain.cpp,
//! `ProcessDelayedUnloadLoaderAllocators`); asked about an address in it meanwhile, the runtime follows pointers into the freed module and
//! the process dies (seen on 8.0.32 and 10.0.13).
//!
//! A frame on a stack keeps its code's loader allocator alive, and a dynamic method's resolver (vm/gcenv.ee.common.cpp,
//! `GcStackCrawlCallBack`): what a collection has found dead is on no stack, and its unload begins later still. So code that was on a
//! stack after the last unload began is not what was unloaded, and the gate keeps the next unload waiting. Code that was seen before an
//! unload may be asked about only where it is known to stay.

use crate::repeat::mix;
use core::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 8192;
const PROBES: u64 = 16;
/// Code heaps are made of blocks of 64 KiB, and each heap belongs to one loader allocator (`ExecutableAllocator::Granularity`).
const BLOCK_BITS: u32 = 16;
/// A question that does not say when its address was seen is younger than this (`docs/shim-protocol.md`).
const QUESTION_NS: u64 = 6_000_000_000;
/// Samples are timed by the kernel's clock for non-maskable interrupts, which can be ahead of the one that is read here: by what the
/// rate of CLOCK_MONOTONIC changes between two ticks (kernel/time/timekeeping.c, `ktime_get_mono_fast_ns`), a few microseconds.
const APART_NS: u64 = 1_000_000;

/// What is known about code that stays and code that went.
pub struct Code {
    /// Blocks with code that cannot be unloaded, plus 1. Written and read by the service thread alone.
    lasting: [AtomicU64; SLOTS],
    /// When something was last unloaded, or may have been; 0 for never.
    unloaded_ns: AtomicU64,
}

/// When an address was seen, as a question says at `now_ns`. A time that has not come yet is no time.
pub fn seen_at(told_ns: u64, now_ns: u64) -> u64 {
    match told_ns {
        0 => now_ns.saturating_sub(QUESTION_NS),
        told if told > now_ns => 0,
        told => told,
    }
}

/// True when what was on a stack at `seen_ns` was there after something else was on none at `gone_ns`.
pub fn is_later(seen_ns: u64, gone_ns: u64) -> bool {
    seen_ns > gone_ns.saturating_add(APART_NS)
}

impl Code {
    /// Something unloads, or an unload may have gone unseen: whatever it was is on no stack from `now_ns` on.
    pub fn on_unload(&self, now_ns: u64) {
        // Relaxed: the gate orders it before any look-up that could meet what is unloaded.
        self.unloaded_ns.fetch_max(now_ns, Ordering::Relaxed);
    }

    /// True when a look-up of `address`, last on a stack at `seen_ns`, cannot meet unloaded code. Asked inside the gate.
    pub fn may_ask(&self, address: u64, seen_ns: u64) -> bool {
        let unloaded_ns = self.unloaded_ns.load(Ordering::Relaxed);
        if unloaded_ns == 0 || is_later(seen_ns, unloaded_ns) {
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
    use super::{APART_NS, Code, QUESTION_NS, seen_at};
    use core::sync::atomic::AtomicU64;

    fn code() -> Code {
        Code { lasting: std::array::from_fn(|_| AtomicU64::new(0)), unloaded_ns: AtomicU64::new(0) }
    }

    #[test]
    fn after_an_unload_only_code_seen_since_is_asked_about() {
        let code = code();
        assert!(code.may_ask(0x5_0000, 0), "nothing was ever unloaded");
        let unloaded = 3 * APART_NS;
        code.on_unload(unloaded);
        for before in [0, 1, unloaded - 1, unloaded, unloaded + APART_NS] {
            assert!(!code.may_ask(0x5_0000, before), "{before}");
        }
        assert!(code.may_ask(0x5_0000, unloaded + APART_NS + 1));
        code.on_unload(unloaded - 5);
        assert!(!code.may_ask(0x5_0000, unloaded), "of two at the same time the later one counts");
        code.on_unload(9 * APART_NS);
        assert!(!code.may_ask(0x5_0000, 9 * APART_NS), "the next one begins it anew");
    }

    #[test]
    fn lasting_code_is_asked_about_whenever_it_was_seen() {
        let code = code();
        code.lasts(0x7_1234);
        code.on_unload(5);
        assert!(code.may_ask(0x7_ffff, 1), "the same block");
        assert!(!code.may_ask(0x8_0000, 1));
        code.lasts(0x8_0000);
        assert!(code.may_ask(0x8_0000, 1));
        code.all_lasts(0xa_8000, 0x3_0000);
        let asked = [0xa_ffff, 0xb_0000, 0xc_ffff, 0xd_0000].map(|a| code.may_ask(a, 1));
        assert_eq!(asked, [false, true, true, false], "blocks that others may share do not count");
    }

    #[test]
    fn a_question_that_does_not_say_when_is_as_old_as_it_may_be() {
        let now = 10 * QUESTION_NS;
        assert_eq!(seen_at(0, now), now - QUESTION_NS);
        assert_eq!(seen_at(now, now), now);
        assert_eq!(seen_at(now + 1, now), 0, "from another clock");
        assert_eq!(seen_at(1, now), 1);
        assert_eq!(seen_at(0, 5), 0);
    }
}
