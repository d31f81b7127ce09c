//! A thread's last walk: which rule each of its frames had. The callers of a thread's frames are
//! mostly those of its last walk. Looking a rule up in `PLACES` takes one cache line that nothing
//! else has used for long. A last walk is one stream of memory, which the CPU reads ahead.
//!
//! A frame's rule depends on its place and the address space alone. So an entry with the frame's
//! place is right, whoever has written it, as long as no rule of the address space has been
//! removed. Stack pointers only lead to the entry: they grow from frame to frame.
//!
//! A walk either follows the list or records it. Those that record find all rules in `PLACES`, and
//! thereby mark them as used.

use crate::walk::opaque;

/// Most frames of a walk that are kept: the innermost. A power of two.
pub const LAST_WALK_FRAMES: u32 = 128;

/// Walks each CPU keeps. Threads share one by their ids.
pub const LAST_WALKS: u32 = 32;

/// Entries of `GENERATIONS`, which address spaces share by their numbers; a page of memory.
pub const GENERATIONS: u32 = 512;

/// How many walks follow a list before another one records it.
const MAX_FOLLOWED: u32 = 16;

/// Entries that a frame may pass over, so that a shorter stack catches up with a longer one.
const MAX_PASSED: u32 = 2;

/// Bits of an entry's second word below the stack pointer's.
const RULE_BITS: u32 = 16;

/// Stack pointers of walked frames are multiples of eight.
const STACK_UNIT: u32 = 3;

/// A frame of a last walk.
#[repr(C)]
#[derive(Clone, Copy)]
struct LastFrame {
    /// Its place (`RuleKey::place`).
    place: u64,
    /// From the lowest bit: 16 bits index in `RULES`, then the stack pointer in words.
    stack_and_rule: u64,
}

/// Value of the map `LAST_WALKS`; used by one hook at a time, as [`crate::scratch::Scratch`].
#[repr(C)]
pub struct LastWalk {
    /// The address space; 0 before the first walk.
    space: u32,
    /// Its generation when the recording walk began.
    generation: u32,
    /// Entries there are.
    frames: u32,
    /// Walks that followed it, or [`MAX_FOLLOWED`] when it did not fit the last one.
    followed: u32,
    /// 1 while a walk records it.
    records: u32,
    /// The entry that is next, to follow or to be written.
    next: u32,
    /// Frames of the present walk that were not found here.
    missed: u32,
    /// Named padding.
    reserved: u32,
    /// From the innermost frame on.
    entries: [LastFrame; LAST_WALK_FRAMES as usize],
}

impl LastWalk {
    /// Begins a walk. `generation` was read before the first rule is looked up.
    #[inline(always)]
    pub fn begin(&mut self, space: u32, generation: u32) {
        let fits = self.space == space && self.generation == generation;
        self.next = 0;
        self.missed = 0;
        self.records = 0;
        if !fits || self.followed >= MAX_FOLLOWED {
            self.space = space;
            self.generation = generation;
            self.frames = 0;
            self.records = 1;
        }
    }

    /// The rule of a frame, when the list has it.
    #[inline(always)]
    pub fn rule(&mut self, place: u64, stack: u64) -> Option<u32> {
        let mut passed = 0;
        loop {
            // There are no entries while a walk records them.
            let at = self.next;
            if at >= self.frames {
                break;
            }
            // SAFETY: an entry, by the mask.
            let LastFrame { place: known, stack_and_rule } = unsafe { *self.entry(at) };
            if known == place {
                self.next = at + 1;
                return Some((stack_and_rule & ((1 << RULE_BITS) - 1)) as u32);
            }
            if stack_and_rule >> RULE_BITS >= stack >> STACK_UNIT || passed == MAX_PASSED {
                break;
            }
            self.next = at + 1;
            passed += 1;
        }
        self.missed += 1;
        None
    }

    /// Notes the rule that a frame has in `PLACES`.
    #[inline(always)]
    pub fn note(&mut self, place: u64, stack: u64, rule: u32) {
        let at = opaque(self.next);
        // The second check is for the verifier, which does not follow what is in memory.
        if self.records == 0 || at >= LAST_WALK_FRAMES {
            return;
        }
        let stack_and_rule = stack >> STACK_UNIT << RULE_BITS | rule as u64;
        // SAFETY: an entry, by the mask.
        unsafe { *self.entry(at) = LastFrame { place, stack_and_rule } };
        self.next = at + 1;
    }

    /// Ends a walk of so many frames. A list with less than three quarters of them is recorded anew
    /// by the next walk.
    #[inline(always)]
    pub fn ended(&mut self, frames: u32) {
        if self.records != 0 {
            self.frames = self.next;
            self.followed = 0;
        } else if self.missed * 4 > frames {
            self.followed = MAX_FOLLOWED;
        } else {
            self.followed += 1;
        }
    }

    #[inline(always)]
    fn entry(&mut self, at: u32) -> *mut LastFrame {
        self.entries.as_mut_ptr().wrapping_add((at & (LAST_WALK_FRAMES - 1)) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list that is still empty, as the map has it.
    fn empty() -> LastWalk {
        LastWalk {
            space: 0,
            generation: 0,
            frames: 0,
            followed: 0,
            records: 0,
            next: 0,
            missed: 0,
            reserved: 0,
            entries: [LastFrame { place: 0, stack_and_rule: 0 }; LAST_WALK_FRAMES as usize],
        }
    }

    /// Walks frames of place and stack pointer; a frame's rule is its place. Answers how many were
    /// looked up elsewhere.
    fn walk(last: &mut LastWalk, generation: u32, frames: &[(u64, u64)]) -> usize {
        last.begin(1, generation);
        let mut looked_up = 0;
        for (place, stack) in frames {
            match last.rule(*place, *stack) {
                Some(rule) => assert_eq!(u64::from(rule), *place),
                None => {
                    looked_up += 1;
                    last.note(*place, *stack, *place as u32);
                }
            }
        }
        last.ended(frames.len() as u32);
        looked_up
    }

    /// A stack with these places, from the innermost frame on; its outermost frame is always at the
    /// same address, and a frame has 32 bytes.
    fn stack(places: impl DoubleEndedIterator<Item = u64>) -> Vec<(u64, u64)> {
        let outwards = places.rev().zip(1..);
        let mut all: Vec<_> =
            outwards.map(|(place, depth)| (place, 0x7ffc_0000_0000 - depth * 32)).collect();
        all.reverse();
        all
    }

    #[test]
    fn the_callers_of_the_last_walk_are_known_to_one_with_more_or_fewer_frames() {
        let mut last = empty();
        assert_eq!(walk(&mut last, 0, &stack(100..140)), 40);
        assert_eq!(walk(&mut last, 0, &stack(100..140)), 0);
        let deeper = stack((1..6).chain(100..140));
        assert_eq!(walk(&mut last, 0, &deeper), 5);
        let shallower = stack((7..8).chain(110..140));
        assert_eq!(walk(&mut last, 0, &shallower), 7, "nine entries are passed over on the way");
        assert_eq!(walk(&mut last, 0, &stack((1..2).chain(101..140))), 1);
    }

    #[test]
    fn a_list_ends_with_its_address_space_and_its_generation() {
        let mut last = empty();
        assert_eq!(walk(&mut last, 0, &stack(100..110)), 10);
        assert_eq!(walk(&mut last, 1, &stack(100..110)), 10);
        assert_eq!(walk(&mut last, 1, &stack(100..110)), 0);
        last.begin(2, 1);
        assert_eq!(last.rule(stack(100..110)[0].0, stack(100..110)[0].1), None);
    }

    #[test]
    fn one_that_does_not_fit_is_recorded_anew_and_so_is_one_that_was_followed_for_long() {
        let mut last = empty();
        walk(&mut last, 0, &stack(100..110));
        assert_eq!(walk(&mut last, 0, &stack(200..210)), 10);
        assert_eq!(walk(&mut last, 0, &stack(200..210)), 10, "it is recorded");
        let walks = (0..=MAX_FOLLOWED).map(|_| walk(&mut last, 0, &stack(200..210)));
        assert_eq!(walks.sum::<usize>(), 10, "so that its rules are marked as used");
    }

    #[test]
    fn a_walk_with_more_frames_than_a_list_has_looks_the_others_up() {
        let mut last = empty();
        let frames = stack(1000..1300);
        walk(&mut last, 0, &frames);
        assert_eq!(walk(&mut last, 0, &frames), 300 - LAST_WALK_FRAMES as usize);
    }
}
