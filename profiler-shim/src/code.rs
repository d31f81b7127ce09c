//! Which addresses the runtime may be asked about. When a collectible load context is unloaded, its
//! modules are destroyed at once but its code stays registered until after a later generation-2
//! collection (dotnet/runtime vm/appdomain.cpp, `ProcessDelayedUnloadLoaderAllocators`); asked
//! about an address in it meanwhile, the runtime follows pointers into the freed module and the
//! process dies (seen on 8.0.32 and 10.0.13).
//!
//! A frame on a stack keeps its code's loader allocator alive, and a dynamic method's resolver
//! (vm/gcenv.ee.common.cpp, `GcStackCrawlCallBack`): what a collection has found dead is on no
//! stack, and its unload begins later still. So code that was on a stack after the last unload
//! began is not what was unloaded, and the gate keeps the next unload waiting. Code that was seen
//! before an unload may be asked about only where it is known to stay.

use crate::repeat::mix;
use core::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 8192;
const PROBES: u64 = 16;
/// Code heaps are made of blocks of 64 KiB, and each heap belongs to one loader allocator
/// (`ExecutableAllocator::Granularity`).
const BLOCK_BITS: u32 = 16;
/// Images that are remembered; a program of more modules has that many of its names a little later.
const IMAGES: usize = 2048;
/// A question that does not say when its address was seen is younger than this
/// (`docs/shim-protocol.md`).
const QUESTION_NS: u64 = 6_000_000_000;
/// Samples are timed by the kernel's clock for non-maskable interrupts, which can be ahead of the
/// one that is read here: by what the rate of CLOCK_MONOTONIC changes between two ticks
/// (kernel/time/timekeeping.c, `ktime_get_mono_fast_ns`), a few microseconds.
const APART_NS: u64 = 1_000_000;

/// What is known about code that stays and code that went.
pub(crate) struct CodeLifetimes {
    /// Blocks with code that cannot be unloaded, plus 1. Written and read by the service thread
    /// alone.
    lasting: [AtomicU64; SLOTS],
    /// Images that cannot be unloaded: first address and the first behind it, 0 for none. Written
    /// and read by the service thread alone.
    images: [[AtomicU64; 2]; IMAGES],
    /// When something was last unloaded, or may have been; 0 for never.
    unloaded_ns: AtomicU64,
}

/// When an address was seen, as a question says at `now_ns`. A time that has not come yet is no
/// time.
pub(crate) fn seen_at(told_ns: u64, now_ns: u64) -> u64 {
    match told_ns {
        0 => now_ns.saturating_sub(QUESTION_NS),
        told if told > now_ns => 0,
        told => told,
    }
}

/// True when what was on a stack at `seen_ns` was there after something else was on none at
/// `gone_ns`.
pub(crate) fn is_later(seen_ns: u64, gone_ns: u64) -> bool {
    seen_ns > gone_ns.saturating_add(APART_NS)
}

impl CodeLifetimes {
    /// Something unloads, or an unload may have gone unseen: whatever it was is on no stack from
    /// `now_ns` on.
    pub(crate) fn on_unload(&self, now_ns: u64) {
        // Relaxed: the gate orders it before any look-up that could meet what is unloaded.
        self.unloaded_ns.fetch_max(now_ns, Ordering::Relaxed);
    }

    /// True when a look-up of `address`, last on a stack at `seen_ns`, cannot meet unloaded code.
    /// Asked inside the gate.
    pub(crate) fn may_ask(&self, address: u64, seen_ns: u64) -> bool {
        let unloaded_ns = self.unloaded_ns.load(Ordering::Relaxed);
        if unloaded_ns == 0 || is_later(seen_ns, unloaded_ns) {
            return true;
        }
        let wanted = block(address);
        self.slots(wanted).any(|slot| slot.load(Ordering::Relaxed) == wanted)
            || self.images().any(|(_, start, end)| (start..end).contains(&address))
    }

    /// There is code at `address` that cannot be unloaded. When the neighbourhood of its slot is
    /// full, it is not remembered.
    pub(crate) fn lasts(&self, address: u64) {
        let wanted = block(address);
        for slot in self.slots(wanted) {
            match slot.load(Ordering::Relaxed) {
                0 => return slot.store(wanted, Ordering::Relaxed),
                there if there == wanted => return,
                _ => {}
            }
        }
    }

    /// An image of so many `bytes` cannot be unloaded: no other code is between its ends, in which
    /// an image differs from a code heap, whose blocks may hold anybody's. What finds no room is
    /// not remembered.
    pub(crate) fn image_lasts(&self, start: u64, bytes: u64) {
        for (image, first, end) in self.images() {
            if first == start && end != 0 {
                return;
            }
            if end == 0 {
                let [first, end] = image;
                first.store(start, Ordering::Relaxed);
                return end.store(start.saturating_add(bytes), Ordering::Relaxed);
            }
        }
    }

    /// Those that are known, and the first place that is free.
    fn images(&self) -> impl Iterator<Item = (&[AtomicU64; 2], u64, u64)> {
        let mut is_last = false;
        let all = self.images.iter().map(|image| {
            let [start, end] = image;
            (image, start.load(Ordering::Relaxed), end.load(Ordering::Relaxed))
        });
        all.take_while(move |(_, _, end)| !core::mem::replace(&mut is_last, *end == 0))
    }

    fn slots(&self, block: u64) -> impl Iterator<Item = &AtomicU64> {
        let start = mix(block);
        (0..PROBES)
            .filter_map(move |probe| self.lasting.get(start.wrapping_add(probe) as usize % SLOTS))
    }
}

const fn block(address: u64) -> u64 {
    (address >> BLOCK_BITS).wrapping_add(1)
}

#[cfg(test)]
mod tests {
    use super::{APART_NS, CodeLifetimes, QUESTION_NS, seen_at};
    use core::sync::atomic::AtomicU64;

    fn code() -> CodeLifetimes {
        // As it lies in the instance: all zero.
        CodeLifetimes {
            lasting: [const { AtomicU64::new(0) }; super::SLOTS],
            images: [const { [const { AtomicU64::new(0) }; 2] }; super::IMAGES],
            unloaded_ns: AtomicU64::new(0),
        }
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
    }

    /// Whatever else has code in the blocks of 64 KiB where it begins and ends. That its edges were
    /// left out kept the stub by which the runtime's socket thread sleeps from ever being named.
    #[test]
    fn the_whole_of_an_image_lasts_and_nothing_beside_it() {
        let code = code();
        code.on_unload(5);
        for _ in 0..2 {
            code.image_lasts(0xa_8000, 0x3_0000);
            code.image_lasts(0x2_1000, 0x1000);
        }
        let asked =
            [0xa_7fff, 0xa_8000, 0xb_0000, 0xd_7fff, 0xd_8000, 0x2_0fff, 0x2_1fff, 0x2_2000];
        let expected = [false, true, true, true, false, false, true, false];
        assert_eq!(asked.map(|address| code.may_ask(address, 1)), expected);
        assert_eq!(code.images().filter(|(_, _, end)| *end != 0).count(), 2, "each once");
    }

    #[test]
    fn images_beyond_what_is_remembered_are_not_asked_about() {
        let code = code();
        code.on_unload(5);
        for image in 0..super::IMAGES as u64 + 1 {
            code.image_lasts(0x10_0000 + (image << 13), 0x1000);
        }
        let first_and_last = [0, super::IMAGES as u64 - 1, super::IMAGES as u64];
        let asked = first_and_last.map(|image| code.may_ask(0x10_0000 + (image << 13), 1));
        assert_eq!(asked, [true, true, false]);
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
