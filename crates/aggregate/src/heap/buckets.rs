//! Numbers of a live object as labels: few values, however many objects there are.

use perfusion_model::event::MonotonicNs;

/// True where a collection is known to have looked at a live object and left it alive, by its
/// generation and the collections it has survived (rounded down to a power of two or not). These
/// are counted when they begin, so the only one may be going on still; but an object changes from 0
/// to 1 or 2 at the end of one only.
#[must_use]
pub fn has_survived(generation: i64, survived: i64) -> bool {
    match generation {
        1 | 2 => true,
        _ => survived >= 2,
    }
}

/// `number` rounded down to a power of two, 0 for 0: bounds the number of label values.
#[must_use]
pub fn count_bucket(number: u32) -> u64 {
    number.checked_ilog2().map_or(0, |bits| 1 << bits)
}

/// `size` rounded down to a power of two, at least 1: bounds the number of label values, and keeps
/// objects of one class alike.
#[must_use]
pub fn size_class(size: u64) -> u64 {
    1 << size.max(1).ilog2()
}

/// Age in seconds rounded down to a power of two, 0 below one second: bounds the number of label
/// values.
#[must_use]
pub fn age_bucket_seconds(born: MonotonicNs, now: MonotonicNs) -> u64 {
    let seconds = now.0.saturating_sub(born.0) / 1_000_000_000;
    if seconds == 0 { 0 } else { 1 << seconds.ilog2() }
}
