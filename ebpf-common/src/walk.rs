//! One step of a walk: from the registers of a frame, its rule and the program's memory to the
//! registers of its caller. The probes run it for each frame; here it is without a map and a
//! helper, so that it can be tested for both machines on any of them.
//!
//! The stack is read ahead into a window in kernel memory, since one read of a kilobyte costs
//! little more than one of a word.
//!
//! A frame is left as a whole or not at all: where a word of the stack is missing, or the stack
//! pointer would not grow (but for a signal handler's, which may have interrupted code on another
//! stack), the registers stay those of the frame, and the daemon goes on from them. On a machine
//! with a link register the stack pointer may also stay where it is, but then the return address
//! was in that register, which is lost from there on: once a stack.
//!
//! Checks that the compiler finds superfluous are for the kernel's verifier, which does not see
//! everything.

use crate::event::FLAG_WALKED_TO_START;
use crate::key::WalkState;
use crate::limits::WALK_WINDOW_BYTES;
use crate::machine::WalkMachine;
use crate::rule::{
    LOST, PC, RULE_CALL, RULE_DEREF, RULE_SIGNAL, RULE_START, SAME, SP, UnwindRule, WALK_REGISTERS,
};

/// Bytes of a word. Stack pointers are multiples of it, and so is what rules say; a stack for which
/// that does not hold is the daemon's. (Read byte by byte, as the compiler does it for the probes
/// where it cannot know, words take most of a walk.)
const WORD: u64 = 8;

/// Reads end at multiples of this, which lie in no other page than the byte before them.
const READ_ALIGN: u64 = 2048;

/// Memory of the program whose stack is walked.
pub trait StackMemory {
    /// Reads `bytes` bytes at `from` to `into`; false when they are not all there.
    ///
    /// # Safety
    /// `into` has room for them.
    unsafe fn read(&self, into: *mut u8, bytes: u32, from: u64) -> bool;
}

/// Memory of which there is a copy: to walk outside of the kernel, in tests.
#[derive(Clone, Copy, Debug)]
pub struct CopiedStack<'a> {
    /// Address of the first byte.
    pub from: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl StackMemory for CopiedStack<'_> {
    unsafe fn read(&self, into: *mut u8, bytes: u32, from: u64) -> bool {
        let Some(at) = from.checked_sub(self.from) else { return false };
        let there = self.bytes.get(at as usize..).and_then(|rest| rest.get(..bytes as usize));
        let Some(there) = there else { return false };
        // SAFETY: the caller's promise, and as many bytes are there.
        unsafe { into.copy_from_nonoverlapping(there.as_ptr(), there.len()) };
        true
    }
}

/// Hides from the compiler what it knows of a value, so that it keeps the checks the verifier
/// needs.
#[inline(always)]
pub fn opaque<T: Copy>(value: T) -> T {
    // SAFETY: a valid, aligned local.
    unsafe { core::ptr::read_volatile(&raw const value) }
}

/// Sets a walk up at a thread's innermost frame.
#[inline(always)]
pub fn begin(walk: &mut WalkState, registers: [u64; WALK_REGISTERS], space: u32) {
    walk.registers = registers;
    walk.known = (1 << WALK_REGISTERS) - 1;
    walk.exact = 1;
    walk.window_start = registers[SP];
    walk.window_end = registers[SP];
    walk.frames = 0;
    walk.space = space;
    walk.end = 0;
}

/// The place of the frame (`RuleKey::place`); `None` at what is no address of user code, and as a
/// place would look like one that is.
#[inline(always)]
pub fn place(walk: &WalkState) -> Option<u64> {
    let ip = walk.registers[PC];
    if ip >> 63 != 0 {
        return None;
    }
    let exact = walk.exact & 1;
    Some(((ip - (1 - exact)) << 1) | exact)
}

/// Goes to the caller, or notes in `walk.end` that there is none; false when the rule does not lead
/// there.
#[inline(always)]
pub fn leave<M: WalkMachine>(
    walk: &mut WalkState,
    rule: &UnwindRule,
    machine: &M,
    memory: &impl StackMemory,
) -> bool {
    let base = (rule.base & 7) as usize;
    if walk.known & (1 << base) == 0 {
        return false;
    }
    let kind = rule.kind;
    let mut cfa = walk.registers[base].wrapping_add(rule.cfa_offset as i64 as u64);
    if kind == RULE_DEREF {
        let Some(kept) = read_word(memory, cfa) else { return false };
        cfa = kept.wrapping_add(rule.cfa_add as i64 as u64);
    }
    let before = walk.registers[SP];
    if kind == RULE_CALL || kind == RULE_DEREF {
        let (caller, at) = match M::LINK {
            Some(link) if rule.saved[PC] == SAME => {
                if walk.known & (1 << link) == 0 || cfa < before || !bring(walk, rule, cfa, memory)
                {
                    return false;
                }
                (walk.registers[link], cfa.wrapping_sub(walk.window_start))
            }
            _ => {
                if rule.saved[PC] == SAME
                    || plus(cfa, rule.saved[PC]) < before
                    || !bring(walk, rule, cfa, memory)
                {
                    return false;
                }
                let at = cfa.wrapping_sub(walk.window_start);
                let caller = word(walk, plus(at, rule.saved[PC]));
                if cfa <= before {
                    return false;
                }
                (caller, at)
            }
        };
        let caller = machine.address(caller);
        if caller == 0 {
            return false;
        }
        restore(walk, &rule.saved, cfa, at);
        if let Some(link) = M::LINK {
            walk.known &= !(1 << link);
        }
        walk.registers[SP] = cfa;
        walk.known |= 1 << SP;
        walk.registers[PC] = caller;
        walk.exact = 0;
    } else if kind == RULE_SIGNAL {
        if plus(before, rule.saved[PC]) < before || !bring(walk, rule, before, memory) {
            return false;
        }
        let at = before.wrapping_sub(walk.window_start);
        let caller = machine.address(word(walk, plus(at, rule.saved[PC])));
        let stack = word(walk, plus(at, rule.saved[SP]));
        // The handler may have a stack of its own (sigaltstack), wherever that is.
        if caller == 0 || stack == before {
            return false;
        }
        restore(walk, &rule.saved, before, at);
        walk.registers[SP] = stack;
        walk.registers[PC] = caller;
        walk.exact = 1;
    } else if kind == RULE_START {
        walk.end = u64::from(FLAG_WALKED_TO_START);
    } else {
        return false;
    }
    true
}

/// Brings what a rule saves around `anchor` into the window.
#[inline(always)]
fn bring(walk: &mut WalkState, rule: &UnwindRule, anchor: u64, memory: &impl StackMemory) -> bool {
    let stack = walk.registers[SP];
    if (anchor | stack) & (WORD - 1) != 0 {
        return false;
    }
    let low = plus(anchor, rule.low);
    let start = if low < stack { stack } else { low };
    fetch(walk, start, plus(anchor, rule.high), memory)
}

#[inline(always)]
fn plus(base: u64, offset: i16) -> u64 {
    base.wrapping_add(offset as i64 as u64)
}

/// Takes the caller's registers out of the window, all but the stack and instruction pointer. What
/// would be below the stack pointer the frame has taken back already, as in the unwinder.
#[inline(always)]
fn restore(walk: &mut WalkState, saved: &[i16; WALK_REGISTERS], anchor: u64, at: u64) {
    let stack = walk.registers[SP];
    let mut known = walk.known;
    let mut register = 0;
    while register < SP {
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
fn word(walk: &WalkState, offset: u64) -> u64 {
    let offset = offset & (WALK_WINDOW_BYTES as u64 - WORD);
    let word = walk.window.as_ptr().cast::<u8>().wrapping_add(offset as usize);
    // SAFETY: a word of the window, aligned as the window is.
    unsafe { word.cast::<u64>().read() }
}

/// Makes sure that the window holds the stack from `start` to `end`. What was in it before is not
/// needed any more: a walk goes upwards. So each read begins at the window's first byte, and a long
/// stack passes through the same few lines of the CPU's cache.
#[inline(always)]
fn fetch(walk: &mut WalkState, start: u64, end: u64, memory: &impl StackMemory) -> bool {
    if start >= walk.window_start && end <= walk.window_end {
        return true;
    }
    let end = end.wrapping_add(READ_ALIGN - 1) & !(READ_ALIGN - 1);
    let bytes = opaque(end.wrapping_sub(start));
    if bytes > u64::from(WALK_WINDOW_BYTES) {
        return false;
    }
    // SAFETY: the window has as many bytes and more.
    if !unsafe { memory.read(walk.window.as_mut_ptr().cast(), bytes as u32, start) } {
        return false;
    }
    walk.window_start = start;
    walk.window_end = end;
    true
}

/// Reads one word of user memory.
#[inline(always)]
fn read_word(memory: &impl StackMemory, from: u64) -> Option<u64> {
    let mut value = 0u64;
    // SAFETY: eight bytes of a local.
    (unsafe { memory.read((&raw mut value).cast(), 8, from) }).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::aarch64::{self, Aarch64, X19, X29, X30};
    use crate::machine::x86_64::{RBP, RBX, X86_64};

    /// A program's stack: words from an address on, with a hole that is not in memory.
    struct Stack {
        start: u64,
        words: Vec<u64>,
        hole: core::ops::Range<u64>,
    }

    impl StackMemory for Stack {
        unsafe fn read(&self, into: *mut u8, bytes: u32, from: u64) -> bool {
            let end = from.saturating_add(u64::from(bytes));
            if from < self.hole.end && end > self.hole.start {
                return false;
            }
            for i in 0..u64::from(bytes) {
                let Some(offset) = (from + i).checked_sub(self.start) else { return false };
                let Some(word) = self.words.get((offset / 8) as usize) else { return false };
                let byte = word.to_le_bytes()[(offset % 8) as usize];
                // SAFETY: within the `bytes` bytes the caller has room for.
                unsafe { into.wrapping_add(i as usize).write(byte) };
            }
            true
        }
    }

    const STACK: u64 = 0x7ffc_0000_0000;

    /// A stack of a page from `STACK` on: what is read ahead is there.
    fn stack(words: &[u64]) -> Stack {
        let mut all = words.to_vec();
        all.resize(512, 0);
        Stack { start: STACK, words: all, hole: 0..0 }
    }

    fn walk_at(registers: [u64; WALK_REGISTERS]) -> Box<WalkState> {
        let mut walk = Box::new(WalkState::nowhere());
        begin(&mut walk, registers, 1);
        walk
    }

    /// CFA = `base` + `cfa`; `saved` are places from the CFA.
    fn call(base: usize, cfa: i32, return_address: i16, saved: &[(usize, i16)]) -> UnwindRule {
        let mut rule = UnwindRule {
            cfa_offset: cfa,
            saved: [SAME; WALK_REGISTERS],
            kind: RULE_CALL,
            base: base as u8,
            ..UnwindRule::default()
        };
        rule.saved[PC] = return_address;
        for (register, place) in saved {
            rule.saved[*register] = *place;
        }
        let words = rule.saved.iter().filter(|p| **p != SAME && **p != LOST);
        rule.low = words.clone().min().copied().unwrap_or(0);
        rule.high = words.max().map_or(0, |p| p + 8);
        rule
    }

    const START: UnwindRule = UnwindRule {
        kind: RULE_START,
        base: SP as u8,
        cfa_offset: 0,
        cfa_add: 0,
        saved: [0; WALK_REGISTERS],
        low: 0,
        high: 0,
        reserved: 0,
    };

    mod x86_64 {
        use super::*;

        fn at(rip: u64, rbp: u64) -> Box<WalkState> {
            let mut registers = [0x11; WALK_REGISTERS];
            registers[RBP] = rbp;
            registers[SP] = STACK;
            registers[PC] = rip;
            walk_at(registers)
        }

        #[test]
        fn a_frame_of_pushes_gives_the_callers_registers_back() {
            // push rbp; push rbx; sub rsp, 8: [rsp] local, rbx, rbp, return address.
            let memory = stack(&[7, 0xbbbb, STACK + 64, 0x40_1235]);
            let mut walk = at(0x40_2000, 0);
            assert_eq!(place(&walk), Some(0x40_2000 << 1 | 1));
            assert!(leave(
                &mut walk,
                &call(SP, 32, -8, &[(RBP, -16), (RBX, -24)]),
                &X86_64,
                &memory
            ));
            assert_eq!((walk.registers[SP], walk.registers[PC]), (STACK + 32, 0x40_1235));
            assert_eq!((walk.registers[RBX], walk.registers[RBP]), (0xbbbb, STACK + 64));
            assert_eq!(place(&walk), Some(0x40_1234 << 1), "inside the call");
            assert!(leave(&mut walk, &START, &X86_64, &memory));
            assert_eq!(walk.end, u64::from(FLAG_WALKED_TO_START));
        }

        #[test]
        fn a_frame_that_does_not_grow_or_has_no_return_address_is_not_left() {
            let mut walk = at(0x40_2000, STACK);
            let before = walk.registers;
            for rule in [call(SP, 0, -8, &[]), call(SP, 0, 0, &[]), call(SP, 8, SAME, &[])] {
                assert!(!leave(&mut walk, &rule, &X86_64, &stack(&[5])), "{rule:?}");
                assert_eq!(walk.registers, before);
            }
            let no_caller = call(SP, 8, -8, &[]);
            assert!(!leave(&mut at(0x40_2000, 0), &no_caller, &X86_64, &stack(&[0])));
            walk.known &= !(1 << RBP);
            assert!(
                !leave(&mut walk, &call(RBP, 16, -8, &[]), &X86_64, &stack(&[1, 2])),
                "base is not known"
            );
        }

        #[test]
        fn a_stack_that_is_not_of_whole_words_is_left_to_the_daemon() {
            let memory = stack(&[0x40_1111, 0x40_2222]);
            let mut walk = at(0x40_2000, STACK + 4);
            assert!(!leave(&mut walk, &call(RBP, 8, -8, &[]), &X86_64, &memory));
            walk.registers[SP] = STACK + 4;
            assert!(!leave(&mut walk, &call(SP, 8, -8, &[]), &X86_64, &memory));
            walk.registers[SP] = STACK;
            assert!(leave(&mut walk, &call(SP, 8, -8, &[]), &X86_64, &memory));
        }

        #[test]
        fn a_cfa_kept_in_the_frame_is_read_from_there() {
            let memory = stack(&[0, STACK + 32, 0, 0x40_1111]);
            let mut rule = call(SP, 8, -8, &[]);
            (rule.kind, rule.cfa_add) = (RULE_DEREF, 0);
            let mut walk = at(0x40_2000, 0);
            assert!(leave(&mut walk, &rule, &X86_64, &memory));
            assert_eq!((walk.registers[SP], walk.registers[PC]), (STACK + 32, 0x40_1111));
        }

        #[test]
        fn a_signals_frame_gives_the_interrupted_instruction() {
            // struct rt_sigframe: siginfo and ucontext behind the return address that `ret` took;
            // rsp at +160, rip at +168.
            let mut words = vec![0u64; 32];
            (words[19], words[20], words[21]) = (0xbb, STACK + 512, 0x40_3000);
            let mut rule = call(SP, 0, 168, &[(SP, 160), (RBX, 152)]);
            rule.kind = RULE_SIGNAL;
            let mut walk = at(0x40_2000, 0);
            assert!(leave(&mut walk, &rule, &X86_64, &stack(&words)));
            assert_eq!((walk.registers[SP], walk.registers[RBX]), (STACK + 512, 0xbb));
            assert_eq!(place(&walk), Some(0x40_3000 << 1 | 1), "exact");
        }

        #[test]
        fn a_page_that_is_not_in_memory_is_passed_over_or_ends_the_walk() {
            let mut memory = stack(&[0x40_1111]);
            memory.words.resize(4096, 0);
            let far = 2048 * 8;
            memory.words[2047] = 0x40_2222;
            memory.hole = STACK + 4096..STACK + 8192;
            let mut walk = at(0x40_2000, STACK + far);
            assert!(leave(&mut walk, &call(SP, 8, -8, &[]), &X86_64, &memory));
            assert!(
                leave(&mut walk, &call(RBP, 0, -8, &[]), &X86_64, &memory),
                "a large frame over the hole"
            );
            assert_eq!(walk.registers[PC], 0x40_2222);
            memory.hole = STACK..STACK + 4096;
            assert!(!leave(&mut at(0x40_2000, 0), &call(SP, 8, -8, &[]), &X86_64, &memory));
        }
    }

    mod aarch64_ {
        use super::*;

        const MACHINE: Aarch64 = Aarch64 { address_mask: (1 << 48) - 1 };

        fn at(pc: u64, x29: u64, x30: u64) -> Box<WalkState> {
            let mut registers = [0x11; WALK_REGISTERS];
            (registers[X29], registers[X30]) = (x29, x30);
            (registers[SP], registers[PC]) = (STACK, pc);
            walk_at(registers)
        }

        /// `stp x29, x30, [sp, #-n]!; mov x29, sp`, with x19 at [sp, #16].
        fn frame_record(bytes: i16) -> UnwindRule {
            call(X29, i32::from(bytes), 8 - bytes, &[(X29, -bytes), (X30, LOST), (X19, 16 - bytes)])
        }

        #[test]
        fn a_leaf_is_left_by_the_link_register_once() {
            let leaf = call(SP, 0, SAME, &[(X30, LOST)]);
            let mut walk = at(0x40_2000, 0, 0x006f_0000_0040_1004);
            assert!(leave(&mut walk, &leaf, &MACHINE, &stack(&[])));
            assert_eq!(
                (walk.registers[SP], walk.registers[PC]),
                (STACK, 0x40_1004),
                "signature taken off"
            );
            assert_eq!(place(&walk), Some(0x40_1003 << 1));
            assert!(!leave(&mut walk, &leaf, &MACHINE, &stack(&[])), "the register is used up");
            // A function that made room without saving the register.
            let mut walk = at(0x40_2000, 0, 0x40_1004);
            assert!(leave(&mut walk, &call(SP, 32, SAME, &[(X30, LOST)]), &MACHINE, &stack(&[])));
            assert_eq!(walk.registers[SP], STACK + 32);
            assert!(!leave(
                &mut at(0x40_2000, 0, 4),
                &call(SP, -16, SAME, &[]),
                &MACHINE,
                &stack(&[])
            ));
        }

        #[test]
        fn frame_records_are_followed_and_signed_return_addresses_stripped() {
            let memory = stack(&[
                STACK + 48,
                0x00d5_0000_0040_1234,
                0x1919,
                0,
                0,
                0,
                0,
                0x0011_0000_0040_5678,
            ]);
            let mut walk = at(0x40_2000, STACK, 0xdead);
            assert!(leave(&mut walk, &frame_record(48), &MACHINE, &memory));
            assert_eq!((walk.registers[SP], walk.registers[PC]), (STACK + 48, 0x40_1234));
            assert_eq!((walk.registers[X29], walk.registers[X19]), (STACK + 48, 0x1919));
            assert_eq!(walk.known & (1 << X30), 0);
            assert!(leave(&mut walk, &frame_record(32), &MACHINE, &memory));
            assert_eq!((walk.registers[SP], walk.registers[PC]), (STACK + 80, 0x40_5678));
        }

        #[test]
        fn a_signals_frame_gives_the_link_register_back() {
            // arch/arm64/kernel/signal.c, struct rt_sigframe: siginfo of 128 bytes, then ucontext,
            // whose regs[0] is at +312.
            let mut words = vec![0u64; 80];
            (words[68], words[69]) = (STACK + 1024, 0x0066_0000_0040_1004);
            (words[70], words[71]) = (STACK + 800, 0x40_3000);
            let mut rule = call(SP, 0, 568, &[(X29, 544), (X30, 552), (SP, 560)]);
            rule.kind = RULE_SIGNAL;
            let mut walk = at(0x40_2000, 0, 0);
            walk.known &= !(1 << X30);
            let memory = stack(&words);
            assert!(leave(&mut walk, &rule, &MACHINE, &memory));
            assert_eq!((walk.registers[SP], walk.registers[X29]), (STACK + 800, STACK + 1024));
            assert_eq!(place(&walk), Some(0x40_3000 << 1 | 1));
            assert!(
                leave(&mut walk, &call(SP, 0, SAME, &[(X30, LOST)]), &MACHINE, &memory),
                "a leaf was interrupted"
            );
            assert_eq!(walk.registers[PC], 0x40_1004);
        }

        #[test]
        fn the_registers_of_a_walk_are_those_of_a_record() {
            assert_eq!(<Aarch64 as WalkMachine>::GPR_PLACES[X29] as u16 + aarch64::FIRST_DWARF, 29);
            assert_eq!(<Aarch64 as WalkMachine>::GPR_PLACES[X30] as u16 + aarch64::FIRST_DWARF, 30);
            assert_eq!(<Aarch64 as WalkMachine>::GPR_PLACES[SP] as usize, aarch64::STACK_POINTER);
            assert_eq!(
                <X86_64 as WalkMachine>::GPR_PLACES[SP] as usize,
                crate::machine::x86_64::STACK_POINTER
            );
        }
    }
}
