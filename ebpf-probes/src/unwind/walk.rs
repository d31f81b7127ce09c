//! Walks the user stack by one rule per exact place of a frame, taken from two arrays
//! (`ebpf_common::rule`). How a frame is left, and what a walk may and may not do, is in
//! `ebpf_common::walk`.

use crate::config::setting;
use crate::machine;
use crate::maps::{GENERATIONS, LAST_WALKS, PLACES, RULES, SPACES};
use aya_ebpf::helpers::generated::{bpf_get_smp_processor_id, bpf_loop, bpf_probe_read_user};
use core::ffi::{c_long, c_void};
use ebpf_common::event::FLAG_WALKED_TO_LIMIT;
use ebpf_common::key::WalkState;
use ebpf_common::last_walk::{self, LastWalk};
use ebpf_common::limits::MAX_WALK_FRAMES;
use ebpf_common::rule::{SP, Spot, TAG_USED, TAG_USED_BYTE, WAYS};
use ebpf_common::scratch::Scratch;
use ebpf_common::walk::{self, StackMemory};

/// The walk goes on; it ends.
const ON: c_long = 0;
const END: c_long = 1;

/// What a step is handed: a place on the stack of the program, as the verifier wants it.
#[derive(Clone, Copy)]
struct WalkContext {
    scratch: *mut Scratch,
    last: *mut LastWalk,
}

/// Memory of the current task. A bad address is an error, and so is a page that is not in memory.
struct UserMemory;

impl StackMemory for UserMemory {
    #[inline(always)]
    unsafe fn read(&self, into: *mut u8, bytes: u32, from: u64) -> bool {
        // SAFETY: the caller's promise.
        (unsafe { bpf_probe_read_user(into.cast(), bytes, from as *const c_void) }) == 0
    }
}

/// Walks the stack of the current thread, `tid` of `tgid`, from `regs`. The frames are the first
/// bytes of `scratch.tail`, and all else is in `scratch.walk`. Answers whether there were rules to
/// walk by.
#[inline(always)]
pub(crate) fn user(scratch: &mut Scratch, tgid: u32, tid: u32, regs: &machine::Regs) -> bool {
    // SAFETY: values are plain integers.
    let Some(space) = (unsafe { SPACES.get(tgid) }) else { return false };
    let Some(last) = last_walk(tid) else { return false };
    let Some(generation) = GENERATIONS.get(*space % last_walk::GENERATIONS) else { return false };
    // The lower half of a word. It is read before any rule is, so that a list is never newer than
    // what is in it. SAFETY: an aligned half of an entry, which outlives the program.
    let generation = machine::published(unsafe { &*(&raw const *generation).cast() });
    // SAFETY: this CPU's, which `busy` keeps for this hook.
    unsafe { (*last).begin(*space, generation) };
    walk::begin(&mut scratch.walk, machine::walked(regs), *space);
    let mut context = WalkContext { scratch, last };
    // SAFETY: the step is a function of this program, and the context outlives the loop.
    unsafe { bpf_loop(MAX_WALK_FRAMES, step as *mut c_void, (&raw mut context).cast(), 0) };
    // SAFETY: as above.
    unsafe { (*last).ended(walk_of(&context).frames) };
    if walk_of(&context).frames >= MAX_WALK_FRAMES && walk_of(&context).end == 0 {
        // SAFETY: as in `step`.
        unsafe { (*context.scratch).walk.end = u64::from(FLAG_WALKED_TO_LIMIT) };
    }
    true
}

/// Where this CPU keeps the thread's last walk.
#[inline(always)]
fn last_walk(tid: u32) -> Option<*mut LastWalk> {
    // SAFETY: a helper without arguments.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    LAST_WALKS.get_ptr_mut(cpu * last_walk::LAST_WALKS + tid % last_walk::LAST_WALKS)
}

#[inline(always)]
fn walk_of(context: &WalkContext) -> &WalkState {
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
    let WalkContext { scratch, last } = unsafe { *context.cast() };
    // SAFETY: this CPU's, of this hook, and `busy` keeps everybody else away.
    let scratch = unsafe { &mut *scratch };
    // SAFETY: as above.
    let last = unsafe { &mut *last };
    let walk = &mut scratch.walk;
    let Some(place) = walk::place(walk) else { return END };
    let stack = walk.registers[SP];
    let rule = match last.rule(place, stack) {
        Some(rule) => rule,
        None => {
            let Some(rule) = rule_at(place, walk.space) else { return END };
            last.note(place, stack, rule);
            rule
        }
    };
    let Some(rule) = RULES.get_ptr(rule) else { return END };
    // SAFETY: an entry of the map, which outlives the program. The daemon does not change one that
    // a place named a moment ago.
    let rule = unsafe { &*rule };
    if !walk::leave(walk, rule, &machine::machine(), &UserMemory) {
        return END;
    }
    let frames = walk.frames;
    let slot =
        scratch.tail.as_mut_ptr().wrapping_add(((frames & (MAX_WALK_FRAMES - 1)) * 8) as usize);
    // SAFETY: below `MAX_WALK_FRAMES` words, of which the tail has more; it is aligned behind a
    // record of whole words.
    unsafe { slot.cast::<u64>().write(place) };
    walk.frames = frames + 1;
    if walk.end != 0 { END } else { ON }
}

/// The index of the rule pushed for a place.
#[inline(always)]
fn rule_at(place: u64, space: u32) -> Option<u32> {
    let spot = Spot::of(place, space, setting!(place_shift));
    let set = PLACES.get_ptr_mut(spot.set)?.cast::<[u64; 2]>();
    let mut way = 0;
    while way < WAYS {
        // An entry is its place and its tag.
        let entry = set.wrapping_add(way).cast::<u64>();
        let tag = entry.wrapping_add(1);
        // SAFETY: within a set, which outlives the program; the daemon writes whole words.
        if unsafe { entry.read_volatile() } == place {
            // SAFETY: as above.
            let found = unsafe { tag.read_volatile() };
            // SAFETY: as above. Read again: the tag may be that of another place that has just
            // taken the entry, and look like this one's.
            let stays = unsafe { entry.read_volatile() } == place;
            if let Some(rule) = spot.rule(found).filter(|_| stays) {
                if found & TAG_USED == 0 {
                    // SAFETY: one byte of the tag, which says nothing else. It may mark an entry
                    // that has just become another one.
                    unsafe { tag.cast::<u8>().wrapping_add(TAG_USED_BYTE).write_volatile(1) };
                }
                return Some(rule);
            }
        }
        way += 1;
    }
    None
}
