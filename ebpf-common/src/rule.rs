//! Unwind rules as the probes take them: what leads from one frame to its caller, with the
//! registers that go on mattering.
//!
//! The map `PLACES` says which rule holds at a place, the map `RULES` what it is: nearly all places
//! share some hundred rules, which the CPU's cache keeps. A place can be in the [`WAYS`] entries of
//! one set only, and a set is a cache line: looking a frame up is one line to fetch. The daemon
//! writes entries, by plain stores into the mapped map; the probes write only the mark of use,
//! which may thereby be left on an entry that has just been cleared. A probe reads the place on
//! both sides of the tag: around a change it finds neither the old nor the new one, and goes on as
//! without a rule. (The tag repeats a little of the place, which is enough nearly always; on
//! aarch64 it is all there is, because nothing keeps loads in their order there.)

use crate::plain;

/// The stack pointer in [`UnwindRule::saved`] and in the walk's registers, which have the same
/// order; those before it are the machine's (module `machine`).
pub const SP: usize = 6;
/// The instruction pointer: where the frame stands, and in a rule where its return address is.
pub const PC: usize = 7;
/// Registers a walk knows.
pub const WALK_REGISTERS: usize = 8;

/// `UnwindRule::saved`: the frame did not change the register. For the stack pointer: the caller's
/// is the CFA. For the instruction pointer: the return address is still in the link register.
pub const SAME: i16 = i16::MAX;
/// `UnwindRule::saved`: the caller's value is lost.
pub const LOST: i16 = i16::MIN;

/// CFA = r\[base\] + offset; what is saved is at CFA + n.
pub const RULE_CALL: u8 = 1;
/// CFA = \[r\[base\] + offset\] + add; what is saved is at CFA + n.
pub const RULE_DEREF: u8 = 2;
/// A signal's frame: what is saved is at the stack pointer + n, itself and the instruction pointer
/// among it, and the caller stands at the exact instruction.
pub const RULE_SIGNAL: u8 = 3;
/// The thread's first frame.
pub const RULE_START: u8 = 4;

plain! {
    /// Where a rule holds.
    pub struct RuleKey {
        /// Address of the frame × 2, + 1 when it is the next instruction to run. A return address
        /// is taken minus one, inside its call.
        pub place: u64,
        /// The process's address space, by the number the daemon gave it in `SPACES`.
        pub space: u32,
        /// Named padding; zero.
        pub reserved: u32,
    }
}

plain! {
    /// How to leave a frame; entry of the map `RULES`.
    pub struct UnwindRule {
        /// Bytes from the base register to the CFA, or to where it is kept.
        pub cfa_offset: i32,
        /// Bytes added to the CFA that was read.
        pub cfa_add: i32,
        /// Where the caller's registers are: bytes from the anchor (CFA, or the stack pointer in a
        /// signal's frame), [`SAME`] or [`LOST`].
        pub saved: [i16; WALK_REGISTERS],
        /// First byte of what is saved, from the anchor.
        pub low: i16,
        /// One past the last byte of what is saved, from the anchor.
        pub high: i16,
        /// One of the `RULE_` values.
        pub kind: u8,
        /// Base register: a place in `saved`, below [`PC`].
        pub base: u8,
        /// Named padding.
        pub reserved: u16,
    }
}

/// Entries of a set.
pub const WAYS: usize = 4;

plain! {
    /// Which rule holds at one place.
    pub struct CachedPlace {
        /// [`RuleKey::place`].
        pub place: u64,
        /// From the lowest bit: 16 bits index in `RULES`, 8 bits of the place's hash, 8 bits that
        /// are not 0 once a probe has used the entry, 32 bits address space, which is never 0 but
        /// where there is no entry.
        pub tag: u64,
    }
}

plain! {
    /// The entries a place can be in; value of the map `PLACES`.
    pub struct PlaceSet {
        /// In no order.
        pub ways: [CachedPlace; WAYS],
    }
}

/// Bits of a tag: the index of the rule.
const TAG_RULE: u64 = 0xffff;
/// Bits of a tag: the mark of use.
pub const TAG_USED: u64 = 0xff << 24;
/// Which byte of a tag that mark is: both machines keep the lowest first.
pub const TAG_USED_BYTE: usize = 3;

/// Bit of a place that is the next instruction to run ([`RuleKey::place`]).
const EXACT: u64 = 1;
/// Places of a page of code, which are twice its addresses, as a power of two.
const PLACES_PAGE: u32 = 13;
/// Sets in a page of memory.
const SETS_OF_PAGE: u64 = 64;

/// Where a place is kept, and what its tag looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Index in `PLACES`.
    pub set: u32,
    /// The tag without rule and mark of use.
    pub tag: u64,
}

impl Spot {
    /// `shift`: 64 less the binary logarithm of the number of sets, which is a power of two and at
    /// least 2.
    #[inline(always)]
    #[must_use]
    pub fn of(place: u64, space: u32, shift: u32) -> Self {
        // Fibonacci hashing: the upper bits depend on all of the place, and neighbours lie far
        // apart.
        let hash =
            |of: u64| of.wrapping_add((space as u64) << 49).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (own, shift) = (hash(place), shift & 63);
        // The return addresses of a page of code are in one page of sets: a walk through neighbours
        // needs few translations of addresses, which cost more than the sets do when they are not
        // cached. Of next instructions a busy loop has too many for one page.
        let near = if place & EXACT == 0 { hash(place >> PLACES_PAGE) } else { own };
        let set = near >> shift & !(SETS_OF_PAGE - 1) | own >> shift & (SETS_OF_PAGE - 1);
        Self { set: set as u32, tag: (space as u64) << 32 | (own >> 16 & 0xff) << 16 }
    }

    /// The rule's index, when `tag` is this place's.
    #[inline(always)]
    #[must_use]
    pub fn rule(&self, tag: u64) -> Option<u32> {
        if tag & !(TAG_RULE | TAG_USED) == self.tag { Some((tag & TAG_RULE) as u32) } else { None }
    }

    /// The tag of an entry with this rule that nobody has used yet.
    #[must_use]
    pub fn tag_with(&self, rule: u16) -> u64 {
        self.tag | rule as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_its_places_alone_whatever_its_rule_and_use() {
        let spot = Spot::of(0x7f12_3456_789a, 7, 50);
        assert!(spot.set < 1 << 14);
        let tag = spot.tag_with(0xabcd);
        assert_eq!((spot.rule(tag), spot.rule(tag | TAG_USED)), (Some(0xabcd), Some(0xabcd)));
        assert_eq!(Spot::of(0x7f12_3456_789a, 8, 50).rule(tag), None);
        assert_eq!(spot.rule(0), None);
        let mut marked = tag.to_le_bytes();
        marked[TAG_USED_BYTE] = 1;
        let marked = u64::from_le_bytes(marked);
        assert!(marked & TAG_USED != 0 && marked & !TAG_USED == tag);
    }

    /// Most places of a set, of those the numbers below 4096 stand for.
    fn fullest(place: impl Fn(u64) -> u64) -> u8 {
        let mut filled = [0u8; 1 << 10];
        (0..4096).for_each(|number| filled[Spot::of(place(number), 1, 54).set as usize] += 1);
        filled.into_iter().max().unwrap()
    }

    #[test]
    fn next_instructions_spread_over_all_sets_and_return_addresses_over_a_page_of_them() {
        assert!(fullest(|number| 0x5555_0000_0000 + number * 10 + 1) <= 16);
        // 64 pages of code with 64 calls each, for 16 pages of sets.
        assert!(
            fullest(|number| 0x5555_0000_0000 + ((number / 64) << 13) + number % 64 * 126) <= 32
        );
        let page = |place| Spot::of(place, 1, 54).set / 64;
        assert!(
            (0..64).all(|number| page(0x5555_0000_2000 + number * 126) == page(0x5555_0000_2000))
        );
    }
}
