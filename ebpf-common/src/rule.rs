//! Unwind rules as the probes take them: what leads from one frame to its caller, with the registers that go on mattering.

use crate::plain;

/// The stack pointer in [`UnwindRule::saved`] and in the walk's registers, which have the same order; those before it are the machine's
/// ([`crate::machine`]).
pub const SP: usize = 6;
/// The instruction pointer: where the frame stands, and in a rule where its return address is.
pub const PC: usize = 7;
/// Registers a walk knows.
pub const WALK_REGISTERS: usize = 8;

/// `UnwindRule::saved`: the frame did not change the register. For the stack pointer: the caller's is the CFA. For the instruction pointer:
/// the return address is still in the link register.
pub const SAME: i16 = i16::MAX;
/// `UnwindRule::saved`: the caller's value is lost.
pub const LOST: i16 = i16::MIN;

/// CFA = r\[base\] + offset; what is saved is at CFA + n.
pub const RULE_CALL: u8 = 1;
/// CFA = \[r\[base\] + offset\] + add; what is saved is at CFA + n.
pub const RULE_DEREF: u8 = 2;
/// A signal's frame: what is saved is at the stack pointer + n, itself and the instruction pointer among it, and the caller stands at the exact instruction.
pub const RULE_SIGNAL: u8 = 3;
/// The thread's first frame.
pub const RULE_START: u8 = 4;

plain! {
    /// Where a rule holds; key of the map `RULES`.
    pub struct RuleKey {
        /// Address of the frame × 2, + 1 when it is the next instruction to run. A return address is taken minus one, inside its call.
        pub place: u64,
        /// The process's address space, by the number the daemon gave it in `SPACES`.
        pub space: u32,
        /// Named padding; zero.
        pub reserved: u32,
    }
}

plain! {
    /// How to leave a frame; value of the map `RULES`.
    pub struct UnwindRule {
        /// Bytes from the base register to the CFA, or to where it is kept.
        pub cfa_offset: i32,
        /// Bytes added to the CFA that was read.
        pub cfa_add: i32,
        /// Where the caller's registers are: bytes from the anchor (CFA, or the stack pointer in a signal's frame), [`SAME`] or [`LOST`].
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
