//! Decides which waits keep their stack: with a probability that is fixed before the coin is thrown and sent with the record, so that
//! weighing each kept wait by its inverse gives unbiased sums.

use crate::config::setting;
use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use ebpf_common::event::CERTAIN;
use ebpf_common::key::Coin;

/// The probability never falls below this (2⁻²⁰), so that it can rise again.
const LEAST: u64 = CERTAIN >> 20;

/// Between two intervals it grows at most this much, in units of 2⁻¹⁶.
const MOST_GROWTH: u64 = 4 << 16;

/// What a kept wait costs besides its bytes, in bytes: the walk of its stack. Without it, short records would let a hundred thousand stacks
/// a second through.
const WALK_BYTES: u64 = 1024;

/// Throws the coin at `now`; `Some(probability)` when the stack is to be kept.
#[inline(always)]
pub(crate) fn throw(coin: &mut Coin, now: u64) -> Option<u64> {
    let elapsed = now.saturating_sub(coin.interval_start_ns);
    let budget = setting!(coin_budget_bytes);
    let fixed = setting!(coin_fixed);
    if fixed != 0 {
        coin.probability = fixed;
    } else if coin.probability == 0 {
        *coin = Coin { interval_start_ns: now, bytes: 0, probability: CERTAIN };
    } else if elapsed >= setting!(coin_interval_ns) || coin.bytes >= 2 * budget {
        // The next probability follows from what the past used: also when an interval is cut short because a burst used twice the
        // budget, no probability depends on the wait it decides about.
        *coin = Coin { interval_start_ns: now, bytes: 0, probability: next(coin, elapsed, budget) };
    }
    // SAFETY: a helper without arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    (random < coin.probability).then_some(coin.probability)
}

/// Notes the cost of a kept wait: `bytes` for the ring, whether it had room for them or not, and the work.
#[inline(always)]
pub(crate) fn spend(coin: &mut Coin, bytes: u32) {
    coin.bytes += u64::from(bytes) + WALK_BYTES;
}

/// probability × (budget per interval) / (bytes per interval as they came). Ranges, so that nothing overflows: budget < 2³², elapsed
/// and interval in µs < 2²¹, bytes < 2³³, so the products stay below 2⁶³ with room for the 10 fraction bits.
#[inline(always)]
fn next(coin: &Coin, elapsed_ns: u64, budget: u64) -> u64 {
    let elapsed_us = (elapsed_ns / 1000).clamp(1, 1 << 20);
    let interval_us = setting!(coin_interval_ns) / 1000;
    let used = (coin.bytes * interval_us) | 1;
    let ratio = ((budget * elapsed_us) << 10) / used;
    let growth = if ratio >= MOST_GROWTH >> 6 { MOST_GROWTH } else { ratio << 6 };
    ((coin.probability * growth) >> 16).clamp(LEAST, CERTAIN)
}
