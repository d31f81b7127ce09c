//! Decides which waits keep their stack: with a probability that is fixed before the coin is thrown and sent with the record, so that
//! weighing each kept wait by its inverse gives unbiased sums. It never depends on the wait it decides about, only on what was before: on
//! what the CPU's waits have cost, and on how many its thread has had.

use crate::config::setting;
use crate::maps::{wait_beyond, wait_budget};
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

/// So many first waits of a thread are kept, and of the later ones at least one in n/32, for the n-th. However rare the coin's luck, a
/// thread's estimates then rest on some 64 waits at least: with few, a ratio of two estimates is biased, and threads with none have no
/// stacks. A thread costs 32·(1 + ln(n/32)) stacks by it.
const FIRST_WAITS: u64 = 32;

/// What an interval leaves of its budget others may use, as long as it is no more than the budget of so many (4 s): threads that wake all at
/// once are within a budget that holds in the mean. A recording begins with all of it: while the probes know no code each stack is a copy, twenty times
/// as large as later, and a short recording is nothing but its beginning. In one interval no more of it may be used than [`wait_beyond`]
/// says.
const ALLOWED_INTERVALS: u64 = 40;

/// Throws the coin at `now` for a thread's wait number `wait`, from 1 on; `Some(probability)` when the stack is to be kept.
#[inline(always)]
pub(crate) fn throw(coin: &mut Coin, now: u64, wait: u32) -> Option<u64> {
    let budget = wait_budget();
    let general = general(coin, now, budget);
    if now.saturating_sub(coin.first_start_ns) >= setting!(coin_interval_ns) {
        coin.first_start_ns = now;
        coin.first_bytes = 0;
    }
    let wait = u64::from(wait.max(1));
    // Whether the thread's own chance, CERTAIN · FIRST_WAITS / wait, is the greater one, without a division at each wait (both factors are
    // below 2³²). Like the general probability this follows from the past alone, the budget included: threads that come and go in
    // thousands a second get no more than as much again as all others.
    let first = general < CERTAIN && general * wait < CERTAIN * FIRST_WAITS && coin.first_bytes < budget;
    // Through memory: the verifier would walk the stack once for each way through here.
    coin.of_first = u64::from(first);
    coin.thrown = if first { (CERTAIN * FIRST_WAITS / wait).min(CERTAIN) } else { general };
    // SAFETY: a valid, aligned field.
    let probability = unsafe { core::ptr::read_volatile(&raw const coin.thrown) };
    // SAFETY: a helper without arguments.
    let random = u64::from(unsafe { bpf_get_prandom_u32() });
    (random < probability).then_some(probability)
}

/// The probability for waits of threads that have had many.
#[inline(always)]
fn general(coin: &mut Coin, now: u64, budget: u64) -> u64 {
    let elapsed = now.saturating_sub(coin.interval_start_ns);
    let fixed = setting!(coin_fixed);
    if fixed != 0 {
        coin.probability = fixed;
    } else if coin.probability == 0 {
        coin.allowance = budget * ALLOWED_INTERVALS;
        coin.beyond = wait_beyond().min(coin.allowance);
        begin(coin, now, CERTAIN);
    } else {
        let is_over = elapsed >= setting!(coin_interval_ns);
        if is_over || coin.bytes >= 2 * budget + coin.beyond {
            let left = (coin.allowance + budget).saturating_sub(coin.bytes);
            coin.allowance = left.min(budget * ALLOWED_INTERVALS);
            // An interval that a burst cut short has had its share of the allowance: whatever comes, that adds no more than one share to the
            // ring in as long as an interval is.
            coin.beyond = if is_over { wait_beyond().min(coin.allowance) } else { 0 };
            // The next probability follows from what the past used: also when an interval is cut short because a burst used twice the
            // budget, no probability depends on the wait it decides about.
            let probability = next(coin, elapsed, budget + coin.beyond);
            begin(coin, now, probability);
        }
    }
    coin.probability
}

#[inline(always)]
fn begin(coin: &mut Coin, now: u64, probability: u64) {
    coin.interval_start_ns = now;
    coin.bytes = 0;
    coin.probability = probability;
}

/// Notes the cost of a kept wait: `bytes` for the ring, whether it had room for them or not, and the work.
#[inline(always)]
pub(crate) fn spend(coin: &mut Coin, bytes: u32) {
    let account = if coin.of_first != 0 { &mut coin.first_bytes } else { &mut coin.bytes };
    *account += u64::from(bytes) + WALK_BYTES;
}

/// probability × (bytes an interval may have) / (bytes per interval as they came). Ranges, so that nothing overflows: what it may have < 2³²,
/// elapsed and interval in µs < 2²¹, bytes < 2³³, so the products stay below 2⁶³ with room for the 10 fraction bits.
#[inline(always)]
fn next(coin: &Coin, elapsed_ns: u64, room: u64) -> u64 {
    let elapsed_us = (elapsed_ns / 1000).clamp(1, 1 << 20);
    let interval_us = setting!(coin_interval_ns) / 1000;
    let used = (coin.bytes * interval_us) | 1;
    let ratio = ((room * elapsed_us) << 10) / used;
    let growth = if ratio >= MOST_GROWTH >> 6 { MOST_GROWTH } else { ratio << 6 };
    ((coin.probability * growth) >> 16).clamp(LEAST, CERTAIN)
}
