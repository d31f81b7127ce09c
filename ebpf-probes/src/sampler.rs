//! Decides which waits keep their stack: with a probability that is fixed before it decides
//! and sent with the record, so that weighing each kept wait by its inverse gives unbiased sums. It
//! never depends on the wait it decides about, only on what was before: on what the CPU's waits
//! have cost, and on how many its thread has had.

use crate::config::setting;
use crate::maps::{wait_beyond, wait_budget};
use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use ebpf_common::event::CERTAIN;
use ebpf_common::key::{Sampler, SchedulerAccount};

/// The probability never falls below this (2⁻²⁰), so that it can rise again.
const LEAST: u64 = CERTAIN >> 20;

/// Between two intervals it grows at most this much, in units of 2⁻¹⁶.
const MOST_GROWTH: u64 = 4 << 16;

/// What a kept wait costs besides its bytes, in bytes: the walk of its stack. Without it, short
/// records would let a hundred thousand stacks a second through.
const WALK_BYTES: u64 = 1024;

/// A thread's n-th wait is kept with a probability of 64/n at least. n is halved each second: a
/// thread with no more than 32 waits a second has them all. It has nothing that could stand for a
/// wait without a stack. Of any other some 44 a second are kept; a ratio of two estimates is biased
/// with few behind it. For that there are three quarters of the common part of the budget.
const SURE_WAITS: u64 = 64;

/// The part of the budget for waits that others can stand for. The rest is for those of threads
/// that have few, of which each stack tells something new: of thousands of waits that one thread
/// has in a second it hardly matters how many are kept, and each costs some µs.
const COMMON_PART: u64 = 6;

/// What kept a wait's stack: the general probability, its thread's own, or that its thread has few.
const OF_ALL: u64 = 0;
const OF_OWN: u64 = 1;
const OF_FEW: u64 = 2;

/// What an interval leaves of its budget others may use, as long as it is no more than the budget
/// of so many (4 s): threads that wake all at once are within a budget that holds in the mean. A
/// recording begins with all of it: while the probes know no code each stack is a copy, twenty
/// times as large as later, and a short recording is nothing but its beginning. In one interval no
/// more of it may be used than [`wait_beyond`] says, and what threads with many waits need to have
/// all of the budget.
const ALLOWED_INTERVALS: u64 = 40;

/// Decides about a wait that `thread` begins at `now`; `Some(probability)` when its stack is to be
/// kept.
#[inline(always)]
pub(crate) fn decide(
    sampler: &mut Sampler,
    thread: &mut SchedulerAccount,
    now: u64,
) -> Option<u64> {
    let fixed = setting!(sampler_fixed);
    let probability = if fixed != 0 {
        fixed
    } else {
        let second = (now >> 30) as u32;
        let passed = second.wrapping_sub(thread.waits_in).min(31);
        thread.waits_in = second;
        thread.waits = (thread.waits >> passed).saturating_add(1);
        adapted(sampler, now, u64::from(thread.waits))
    };
    (random(sampler) >> 32 < probability).then_some(probability)
}

/// The probability that keeps the cost within the budget: the CPU's general one, or the thread's
/// own when that is the greater one.
#[inline(always)]
fn adapted(sampler: &mut Sampler, now: u64, wait: u64) -> u64 {
    let budget = wait_budget();
    let general = general(sampler, now, budget);
    let few = wait <= SURE_WAITS;
    let room = if few { part_of_few(budget) + sampler.beyond } else { common_part(budget) * 3 / 4 };
    // Like the general probability this follows from the past alone, the budget included: what
    // threads with few waits use the own chances of others do not get. As long as all are kept, no
    // room is used up: the first waits of a thread that will have thousands look like those of one
    // that has few. Through memory: the verifier would walk the stack once for each way through
    // here.
    (sampler.kept_by, sampler.thrown) = if general == CERTAIN || sampler.own_bytes >= room {
        (OF_ALL, general)
    } else if few {
        (OF_FEW, CERTAIN)
    } else if general * wait < CERTAIN * SURE_WAITS {
        // The thread's own chance is the greater one; no division at each wait for that (the
        // factors are below 2³²).
        (OF_OWN, CERTAIN * SURE_WAITS / wait)
    } else {
        (OF_ALL, general)
    };
    // SAFETY: a valid, aligned field.
    unsafe { core::ptr::read_volatile(&raw const sampler.thrown) }
}

/// What of a budget is for threads that have many waits, and what for those that have few.
#[inline(always)]
fn common_part(budget: u64) -> u64 {
    budget / COMMON_PART
}

#[inline(always)]
fn part_of_few(budget: u64) -> u64 {
    budget - common_part(budget)
}

/// The next of the CPU's random numbers (SplitMix64: Steele, Lea, Flood, "Fast splittable
/// pseudorandom number generators", 2014). The kernel's own cost a call each.
#[inline(always)]
fn random(sampler: &mut Sampler) -> u64 {
    if sampler.random == 0 {
        // SAFETY: a helper without arguments.
        let seed = unsafe { bpf_get_prandom_u32() };
        sampler.random = u64::from(seed) + 1;
    }
    sampler.random = sampler.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (sampler.random ^ sampler.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// The probability for waits of threads that have had many. It follows from what the past used, so
/// it never depends on the wait it decides about: also where it changes within an interval, because
/// a burst has used twice what there was.
#[inline(always)]
fn general(sampler: &mut Sampler, now: u64, budget: u64) -> u64 {
    let most = budget * ALLOWED_INTERVALS;
    let elapsed_us = (now.saturating_sub(sampler.since_ns) / 1000).clamp(1, 1 << 20);
    let interval_us = (setting!(sampler_interval_ns) / 1000).max(1);
    let is_over = now >= sampler.interval_end_ns;
    if sampler.probability == 0 {
        sampler.allowance = most;
        sampler.probability = CERTAIN;
    } else if is_over || sampler.bytes >= 2 * share(sampler, budget) + sampler.beyond {
        let more = common_part(budget) * elapsed_us / interval_us;
        sampler.allowance = (sampler.allowance + more).saturating_sub(sampler.bytes).min(most);
    } else {
        return sampler.probability;
    }
    // What is left of an interval after a burst has had its share of what is allowed beyond the
    // budget: whatever comes, that adds no more than one such share to the ring in as long as an
    // interval is.
    sampler.beyond = 0;
    if is_over {
        sampler.interval_end_ns = now + setting!(sampler_interval_ns);
        sampler.beyond = wait_beyond().min(sampler.allowance.saturating_sub(part_of_few(budget)));
        sampler.own_bytes = 0;
    }
    sampler.probability =
        next(sampler, elapsed_us, interval_us, share(sampler, budget) + sampler.beyond);
    sampler.since_ns = now;
    sampler.bytes = 0;
    sampler.probability
}

/// What of a budget an interval has for threads with many waits: in the long run the common part,
/// as long as something is allowed beyond it all.
#[inline(always)]
fn share(sampler: &Sampler, budget: u64) -> u64 {
    common_part(budget) + sampler.allowance.min(part_of_few(budget))
}

/// Notes the cost of a kept wait: `bytes` for the ring, whether it had room for them or not, and
/// the work. What threads with few waits use beyond their part of the budget is what is allowed
/// beyond all of it.
#[inline(always)]
pub(crate) fn spend(sampler: &mut Sampler, bytes: u32) {
    let cost = u64::from(bytes) + WALK_BYTES;
    let by = sampler.kept_by;
    if by != OF_ALL {
        sampler.own_bytes += cost;
    }
    if by != OF_FEW || sampler.own_bytes > part_of_few(wait_budget()) {
        sampler.bytes += cost;
    }
}

/// probability × (bytes an interval may have) / (bytes per interval as they came). Ranges, so that
/// nothing overflows: what it may have < 2³², elapsed and interval in µs ≤ 2²⁰, bytes < 2³³, so the
/// products stay below 2⁶³ with room for the 10 fraction bits.
#[inline(always)]
fn next(sampler: &Sampler, elapsed_us: u64, interval_us: u64, room: u64) -> u64 {
    let used = (sampler.bytes * interval_us) | 1;
    let ratio = ((room * elapsed_us) << 10) / used;
    let growth = if ratio >= MOST_GROWTH >> 6 { MOST_GROWTH } else { ratio << 6 };
    ((sampler.probability * growth) >> 16).clamp(LEAST, CERTAIN)
}
