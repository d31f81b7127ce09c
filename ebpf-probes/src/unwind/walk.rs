//! Walks the user stack by one rule per exact place of a frame, taken from a hash map. The stack is read ahead into a window in kernel
//! memory, since one read of a kilobyte costs little more than one of a word.
//!
//! A frame is left as a whole or not at all: where a rule is missing, or a word of the stack, or the stack pointer would not
//! grow, the walk ends with the registers of that frame, and the daemon goes on from them.

use super::opaque;
use crate::maps::{RULES, SPACES};
use aya_ebpf::bindings::pt_regs;
use aya_ebpf::helpers::generated::{bpf_loop, bpf_probe_read_user};
use core::ffi::{c_long, c_void};
use ebpf_common::event::{FLAG_WALKED_TO_LIMIT, FLAG_WALKED_TO_START};
use ebpf_common::key::{Scratch, Walk};
use ebpf_common::limits::{MAX_WALK_FRAMES, WALK_WINDOW_BYTES};
use ebpf_common::rule::{
    LOST, RIP, RSP, RULE_CALL, RULE_DEREF, RULE_SIGNAL, RULE_START, RuleKey, SAME, UnwindRule, WALK_REGISTERS,
};

/// Reads end at multiples of this, which lie in no other page than the byte before them.
const READ_ALIGN: u64 = 1024;

/// The walk goes on; it ends.
const ON: c_long = 0;
const END: c_long = 1;

/// What a step is handed: a place on the stack of the program, as the verifier wants it.
struct Context {
    scratch: *mut Scratch,
}

/// Walks from `regs`; the frames are the first bytes of `scratch.tail`, all else is in `scratch.walk`. Answers whether there were rules to
/// walk by.
#[inline(always)]
pub(crate) fn user(scratch: &mut Scratch, tgid: u32, regs: &pt_regs) -> bool {
    // SAFETY: values are plain integers.
    let Some(space) = (unsafe { SPACES.get(tgid) }) else { return false };
    let walk = &mut scratch.walk;
    walk.registers = [regs.rbx, regs.rbp, regs.r12, regs.r13, regs.r14, regs.r15, regs.rsp, regs.rip];
    walk.known = (1 << WALK_REGISTERS) - 1;
    walk.exact = 1;
    walk.window_start = regs.rsp;
    walk.window_bytes = 0;
    walk.frames = 0;
    walk.space = *space;
    walk.end = 0;
    let mut context = Context { scratch };
    // SAFETY: the step is a function of this program, and the context outlives the loop.
    unsafe { bpf_loop(MAX_WALK_FRAMES, step as *mut c_void, (&raw mut context).cast(), 0) };
    if walk_of(&context).frames >= MAX_WALK_FRAMES && walk_of(&context).end == 0 {
        // SAFETY: as in `step`.
        unsafe { (*context.scratch).walk.end = u64::from(FLAG_WALKED_TO_LIMIT) };
    }
    true
}

#[inline(always)]
fn walk_of(context: &Context) -> &Walk {
    // SAFETY: this CPU's scratch of this hook, held for the whole of it.
    unsafe { &(*context.scratch).walk }
}

/// One frame.
///
/// # Safety
/// `context` is the [`Context`] handed to the loop.
#[inline(never)]
unsafe extern "C" fn step(_index: u64, context: *mut c_void) -> c_long {
    // SAFETY: the caller's promise.
    let scratch = unsafe { (*context.cast::<Context>()).scratch };
    // SAFETY: this CPU's, of this hook, and `busy` keeps everybody else away.
    let scratch = unsafe { &mut *scratch };
    let walk = &mut scratch.walk;
    let ip = walk.registers[RIP];
    // Not an address of user code, and as a place it would look like one that is.
    if ip >> 63 != 0 {
        return END;
    }
    let exact = walk.exact & 1;
    let place = ((ip - (1 - exact)) << 1) | exact;
    let key = RuleKey { place, space: walk.space, reserved: 0 };
    let Some(rule) = RULES.get_ptr(key) else { return END };
    // SAFETY: an entry of the map, which outlives the program. One that the map takes for another place while it is read here would be
    // neither rule: that takes its eviction or its removal, and another lesson, within these 50 ns.
    let rule = unsafe { &*rule };

    let base = (rule.base & 7) as usize;
    if walk.known & (1 << base) == 0 {
        return END;
    }
    let kind = rule.kind;
    let mut cfa = walk.registers[base].wrapping_add(rule.cfa_offset as i64 as u64);
    if kind == RULE_DEREF {
        let Some(kept) = read_word(cfa) else { return END };
        cfa = kept.wrapping_add(rule.cfa_add as i64 as u64);
    }
    let before = walk.registers[RSP];
    if kind == RULE_CALL || kind == RULE_DEREF {
        let Some((caller, at)) = leave_words(walk, rule, cfa) else {
            return END;
        };
        if caller == 0 || cfa <= before {
            return END;
        }
        restore(walk, &rule.saved, cfa, at);
        walk.registers[RSP] = cfa;
        walk.known |= 1 << RSP;
        walk.registers[RIP] = caller;
        walk.exact = 0;
    } else if kind == RULE_SIGNAL {
        let Some((caller, at)) = leave_words(walk, rule, before) else {
            return END;
        };
        let stack = word(walk, plus(at, rule.saved[RSP]));
        if caller == 0 || stack <= before {
            return END;
        }
        restore(walk, &rule.saved, before, at);
        walk.registers[RSP] = stack;
        walk.registers[RIP] = caller;
        walk.exact = 1;
    } else if kind == RULE_START {
        walk.end = u64::from(FLAG_WALKED_TO_START);
    } else {
        return END;
    }
    let frames = walk.frames;
    let slot = scratch.tail.as_mut_ptr().wrapping_add(((frames & (MAX_WALK_FRAMES - 1)) * 8) as usize);
    // SAFETY: below `MAX_WALK_FRAMES` words, of which the tail has more; it is aligned behind a record of whole words.
    unsafe { slot.cast::<u64>().write_unaligned(place) };
    walk.frames = frames + 1;
    if walk.end != 0 { END } else { ON }
}

/// Brings what a rule saves around `anchor` into the window; answers the return address and the anchor as an offset in the window.
#[inline(always)]
fn leave_words(walk: &mut Walk, rule: &UnwindRule, anchor: u64) -> Option<(u64, u64)> {
    let stack = walk.registers[RSP];
    let low = plus(anchor, rule.low);
    let start = if low < stack { stack } else { low };
    if plus(anchor, rule.saved[RIP]) < stack || !fetch(walk, start, plus(anchor, rule.high)) {
        return None;
    }
    let at = anchor.wrapping_sub(walk.window_start);
    Some((word(walk, plus(at, rule.saved[RIP])), at))
}

#[inline(always)]
fn plus(base: u64, offset: i16) -> u64 {
    base.wrapping_add(offset as i64 as u64)
}

/// Takes the caller's registers out of the window, all but rsp and rip. What would be below the stack pointer the frame has taken back
/// already, as in the finisher.
#[inline(always)]
fn restore(walk: &mut Walk, saved: &[i16; WALK_REGISTERS], anchor: u64, at: u64) {
    let stack = walk.registers[RSP];
    let mut known = walk.known;
    let mut register = 0;
    while register < RSP {
        let place = saved[register];
        if place == LOST {
            known &= !(1 << register);
        } else if place != SAME && plus(anchor, place) >= stack {
            walk.registers[register] = word(walk, plus(at, place));
            known |= 1 << register;
        }
        register += 1;
    }
    walk.known = known;
}

/// The word at an offset in the window. [`fetch`] has brought it in; the mask is for the verifier.
#[inline(always)]
fn word(walk: &Walk, offset: u64) -> u64 {
    let offset = opaque(offset) & (2 * WALK_WINDOW_BYTES as u64 - 1);
    // SAFETY: the window has 8 bytes more than the mask lets through.
    unsafe { walk.window.as_ptr().wrapping_add(offset as usize).cast::<u64>().read_unaligned() }
}

/// Makes sure that the window holds the stack from `start` to `end`.
#[inline(always)]
fn fetch(walk: &mut Walk, start: u64, end: u64) -> bool {
    let held = walk.window_start.wrapping_add(walk.window_bytes);
    if start >= walk.window_start && end <= held {
        return true;
    }
    let end = end.wrapping_add(READ_ALIGN - 1) & !(READ_ALIGN - 1);
    if start >= walk.window_start && end > held && end - walk.window_start <= u64::from(WALK_WINDOW_BYTES) {
        let (at, bytes) = (walk.window_bytes, end - held);
        // Fails where a page between is not in memory, such as locals a function has not used yet.
        if read(walk, at, bytes, held) {
            walk.window_bytes = at + bytes;
            return true;
        }
    }
    let bytes = end.wrapping_sub(start);
    if bytes > u64::from(WALK_WINDOW_BYTES) || !read(walk, 0, bytes, start) {
        return false;
    }
    walk.window_start = start;
    walk.window_bytes = bytes;
    true
}

/// Reads user memory into the window.
#[inline(always)]
fn read(walk: &mut Walk, at: u64, bytes: u64, from: u64) -> bool {
    // Verifiers before 6.8 do not bound one variable by another: they need both checks, which the compiler finds superfluous.
    let (at, bytes) = (opaque(at), opaque(bytes));
    if at > u64::from(WALK_WINDOW_BYTES) || bytes > u64::from(WALK_WINDOW_BYTES) {
        return false;
    }
    let target = walk.window.as_mut_ptr().wrapping_add(at as usize);
    // SAFETY: a whole window fits behind any place in the first half. A bad user address is an error.
    (unsafe { bpf_probe_read_user(target.cast(), bytes as u32, from as *const c_void) }) == 0
}

/// Reads one word of user memory.
#[inline(always)]
fn read_word(from: u64) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: eight bytes of a local. A bad user address is an error.
    let failed = unsafe { bpf_probe_read_user((&raw mut value).cast(), 8, from as *const c_void) };
    (failed == 0).then_some(value)
}
