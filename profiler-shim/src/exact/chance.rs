//! Which objects get a stack: chance chooses each byte with the same probability as the runtime's
//! own sampling does (.NET 10, AllocationSampled), so what is chosen stands for as much. Until the
//! next chosen byte a thread only counts down.

use crate::repeat::mix;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bytes between two chosen ones, on average: 102,400
/// (`docs/design/features/RandomizedAllocationSampling.md` of dotnet/runtime), times ln 2.
const MEAN_LN_2: u64 = 70_978;
/// Fraction bits of a logarithm.
const BITS: u32 = 12;

/// The countdown of one thread: bytes left, and the state of its random numbers, 0 before the
/// first.
#[derive(Clone, Copy)]
pub(crate) struct Chance<'a> {
    /// Bytes that are not chosen.
    pub(crate) left: &'a AtomicU64,
    /// State.
    pub(crate) state: &'a AtomicU64,
}

impl Chance<'_> {
    /// True when one of the next `bytes` bytes may be chosen; else they have been counted.
    #[inline]
    #[must_use]
    pub(crate) fn is_near(self, bytes: u64) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left < bytes {
            return true;
        }
        self.left.store(left.wrapping_sub(bytes), Ordering::Relaxed);
        false
    }

    /// The same once it is near: whether one is. What follows the object has its own chance.
    #[cold]
    #[must_use]
    pub(crate) fn chooses(self, bytes: u64, seed: u64) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        if state == 0 {
            // A thread's first bytes: nothing has been drawn for them.
            state = mix(seed) | 1;
            self.left.store(distance(&mut state), Ordering::Relaxed);
            self.state.store(state, Ordering::Relaxed);
            if !self.is_near(bytes) {
                return false;
            }
        }
        self.left.store(distance(&mut state), Ordering::Relaxed);
        self.state.store(state, Ordering::Relaxed);
        true
    }
}

/// How many bytes are passed over: exponentially distributed, as −ln of a uniform number is.
fn distance(state: &mut u64) -> u64 {
    // xorshift64 (Marsaglia, 2003), and its output mixed.
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    let uniform = mix(*state) | 1;
    (u64::from(u64::BITS) << BITS).wrapping_sub(log2(uniform)).wrapping_mul(MEAN_LN_2) >> BITS
}

/// The logarithm to the base 2, in steps of 2^-[`BITS`]: a bit of it for each time the mantissa,
/// squared, reaches 2.
fn log2(value: u64) -> u64 {
    let zeros = value.leading_zeros();
    let mut mantissa = (value << zeros) >> 32;
    let mut result = u64::from(63u32.wrapping_sub(zeros));
    for _ in 0..BITS {
        // Between 1 and 2, as 1.31 bits.
        mantissa = mantissa.wrapping_mul(mantissa) >> 31;
        let two = mantissa >> 32;
        mantissa >>= two;
        result = result << 1 | two;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::{BITS, Chance, log2};
    use core::sync::atomic::AtomicU64;

    #[test]
    fn logarithms_are_right_to_their_last_bit() {
        for value in [1, 2, 3, 1000, 102_400, u64::MAX / 3, u64::MAX] {
            let exact = (value as f64).log2() * f64::from(1 << BITS);
            assert!((log2(value) as f64 - exact).abs() < 1.5, "{value}");
        }
    }

    #[test]
    fn each_byte_has_the_same_chance_whatever_object_it_is_in() {
        let words = [AtomicU64::new(0), AtomicU64::new(0)];
        let chance = Chance { left: &words[0], state: &words[1] };
        let sizes = [24u64, 200, 5_000, 100_000, 1_000_000];
        let mut chosen = [0u32; 5];
        let rounds = 40_000;
        for _ in 0..rounds {
            for (bytes, chosen) in sizes.iter().zip(&mut chosen) {
                if chance.is_near(*bytes) && chance.chooses(*bytes, 7) {
                    *chosen += 1;
                }
            }
        }
        for (bytes, chosen) in sizes.iter().zip(chosen) {
            let p = 1.0 - (-(*bytes as f64) / 102_400.0).exp();
            let expected = p * f64::from(rounds);
            let error = (expected * (1.0 - p)).sqrt();
            assert!(
                (f64::from(chosen) - expected).abs() < 5.0 * error + 1.0,
                "{bytes}: {chosen}, {expected} ± {error}"
            );
        }
    }
}
