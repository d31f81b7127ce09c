//! Ring arithmetic on plain numbers: positions, laps, commit words. Pure.

use crate::layout::{MAX_RECORD_UNITS, UNIT_BYTES};

/// Units that `bytes` need.
#[must_use]
pub(crate) const fn units_for(bytes: u64) -> u64 {
    bytes.div_ceil(UNIT_BYTES)
}

/// Index in the ring of position `position`; `units` is a power of two.
#[must_use]
pub const fn index(position: u64, units: u64) -> u64 {
    position & units.wrapping_sub(1)
}

/// How many units a producer may still reserve. Zero for a tail that cannot be right, so an absurd
/// tail means a full ring.
#[must_use]
pub const fn free(head: u64, tail: u64, units: u64) -> u64 {
    match head.checked_sub(tail) {
        Some(used) if used <= units => units.wrapping_sub(used),
        _ => 0,
    }
}

/// A committed record's size, as its commit word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Units it occupies.
    pub units: u64,
    /// Bytes in use, from the start of its first unit.
    pub bytes: u64,
}

/// What a commit word says about the position it was read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// Not yet written: the word is of another lap.
    Pending,
    /// Written.
    Done(Extent),
    /// Of this lap, but no size a record can have.
    Impossible(Extent),
}

/// Bits of a commit word that state the bytes in use: the lowest. Those above them, up to the upper
/// half, state the units.
const BYTES_BITS: u32 = 18;
const BYTES_MASK: u64 = (1 << BYTES_BITS) - 1;
const UNITS_MASK: u64 = (1 << (32 - BYTES_BITS)) - 1;
const _: () =
    assert!(MAX_RECORD_UNITS * UNIT_BYTES <= BYTES_MASK && MAX_RECORD_UNITS <= UNITS_MASK);

/// Upper half of the commit words of `position`'s lap; never 0 before 2³² laps.
const fn lap_mark(position: u64, units: u64) -> u64 {
    let lap = position >> units.trailing_zeros();
    (lap.wrapping_add(1)) << 32
}

/// The commit word of a record at `position`.
#[must_use]
pub const fn commit_word(position: u64, units: u64, extent: Extent) -> u64 {
    lap_mark(position, units)
        | (extent.units & UNITS_MASK) << BYTES_BITS
        | (extent.bytes & BYTES_MASK)
}

/// Reads the commit word found for `position`.
#[must_use]
pub(crate) const fn read_commit(word: u64, position: u64, units: u64) -> Commit {
    if word & !0xffff_ffff != lap_mark(position, units) {
        return Commit::Pending;
    }
    let extent = Extent { units: word >> BYTES_BITS & UNITS_MASK, bytes: word & BYTES_MASK };
    let fits = extent.units >= 1
        && extent.units <= MAX_RECORD_UNITS
        && extent.bytes <= extent.units.wrapping_mul(UNIT_BYTES);
    if fits { Commit::Done(extent) } else { Commit::Impossible(extent) }
}
