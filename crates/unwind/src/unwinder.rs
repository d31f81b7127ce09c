//! The user-space unwinder. It walks a captured context (registers and a copy of the stack) to the
//! thread's start, frame by frame, by the rules that a [`CodeLookup`] gives. Frames that the probes
//! have walked already come first, by the same rules. It knows nothing of files or processes.
//!
//! Invariants: a walk has at most `max_frames` frames, and its stack pointer grows with every one,
//! but for that of a signal handler, which may have interrupted code on another stack; a register
//! that was not captured or not saved is never used as if it were. A frame without a rule is left
//! by its frame pointer or by a search of the stack for its return address ([`scan`]), last and
//! marked, because about a third of optimised managed methods and all of glibc keep no frame
//! pointer.

mod captured_stack;
mod scan;
mod trace;
mod unwound_stack;

pub use self::trace::UnwindTrace;
pub use self::unwound_stack::UnwoundStack;

use self::captured_stack::{CapturedStack, MissingValue, ValueOrigin};
use self::scan::ScanBudget;
use super::machine::TargetMachine;
use super::native::{NATIVE, native_address_mask};
use super::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use perfusion_model::event::{MonotonicNs, UserContext, WalkEnd};
use perfusion_model::frame::{FrameKey, Marker};
use std::sync::Arc;

/// Bounds of one walk.
#[derive(Clone, Copy, Debug)]
pub struct UnwindLimits {
    /// Most frames.
    pub max_frames: usize,
    /// Bits of a return address that are one.
    pub address_mask: u64,
}

impl Default for UnwindLimits {
    fn default() -> Self {
        Self { max_frames: 512, address_mask: native_address_mask() }
    }
}

/// What is known about one PC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameRule {
    /// The frame.
    pub frame: FrameKey,
    /// How to leave it.
    pub rule: Result<Arc<Rule>, RuleRefusal>,
}

/// Looks PCs up.
pub trait CodeLookup {
    /// What is at `pc`. `exact`: `pc` is the next instruction to run (innermost or interrupted by a
    /// signal); else it is a return address minus one, inside a call.
    fn step(&mut self, pc: u64, exact: bool) -> FrameRule;
    /// The frame at a place that the probes have left at `time` by a rule pushed to them. `None`
    /// when that rule did not hold then or does not now.
    fn walked(&mut self, pc: u64, exact: bool, time: MonotonicNs) -> Option<FrameKey>;
    /// True when `address` is in executable memory.
    fn is_executable(&mut self, address: u64) -> bool;
    /// Whether `address` is in executable memory and the instruction before it is a call; `None`
    /// when that is not known: there was no time to look, or the code could not be read.
    fn follows_call(&mut self, address: u64) -> Option<bool>;
    /// Where the call before `address` leads, when that is in the instruction itself.
    fn call_target(&mut self, address: u64) -> Option<u64>;
    /// More of the thread's stack, from `address` on, as it was when the context was taken; `None`
    /// where that is not to be had, or not any more.
    fn stack(&mut self, address: u64) -> Option<Vec<u8>>;
}

/// A walk in progress.
struct StackWalk<'a> {
    machine: &'a TargetMachine,
    context: &'a UserContext,
    stack: CapturedStack<'a>,
    /// The frame is at or above this address: its stack pointer, where that is known.
    floor: u64,
    registers: [u64; 16],
    origins: [ValueOrigin; 16],
    known: u16,
    trace: UnwindTrace,
    scans: ScanBudget,
}

impl StackWalk<'_> {
    /// The walk goes by this.
    fn go_by(&mut self, origin: ValueOrigin) {
        match origin {
            ValueOrigin::Context(register) => {
                self.trace.add_register(register, self.context.regs.gpr[register]);
            }
            ValueOrigin::Word(at, word) => self.trace.add_word(at, word),
            ValueOrigin::Known => {}
        }
    }

    fn register(&mut self, register: Register) -> Result<u64, MissingValue> {
        let register = register.index();
        if self.known & (1 << register) == 0 {
            return Err(MissingValue::Unknown);
        }
        self.go_by(self.origins[register]);
        Ok(self.registers[register])
    }

    fn plus(&mut self, base: Register, offset: i32) -> Result<u64, MissingValue> {
        Ok(self.register(base)?.wrapping_add_signed(i64::from(offset)))
    }

    /// The word at `address` in the copy, which the walk may or may not go by.
    fn peek(&self, address: u64) -> Result<(u64, ValueOrigin), MissingValue> {
        self.stack.peek(address, self.floor)
    }

    /// Has the word that was missing last read, with what is about it; false when it is not to be
    /// had.
    fn read_on(&mut self, code: &mut dyn CodeLookup) -> bool {
        let is_read = self.stack.read_on(self.floor, code);
        if is_read {
            self.trace.go_beyond();
        }
        is_read
    }

    /// The word at `address` in the copy.
    fn word(&mut self, address: u64) -> Result<u64, MissingValue> {
        let (word, origin) = self.peek(address)?;
        self.go_by(origin);
        Ok(word)
    }

    fn cfa(&mut self, cfa: Cfa) -> Result<u64, MissingValue> {
        match cfa {
            Cfa::Register { base, offset } => self.plus(base, offset),
            Cfa::Deref { base, offset, add } => {
                let kept = self.plus(base, offset)?;
                Ok(self.word(kept)?.wrapping_add_signed(i64::from(add)))
            }
        }
    }

    /// The caller's value of a register, `own` its index here.
    fn saved(
        &mut self,
        saved: Saved,
        own: Option<usize>,
        cfa: u64,
    ) -> Result<(u64, ValueOrigin), MissingValue> {
        let held = |walk: &Self, register: usize| {
            let known = walk.known & (1 << register) != 0;
            known
                .then(|| (walk.registers[register], walk.origins[register]))
                .ok_or(MissingValue::Unknown)
        };
        match saved {
            Saved::Same => held(self, own.ok_or(MissingValue::Unknown)?),
            Saved::Lost => Err(MissingValue::Unknown),
            Saved::AtCfa(offset) => self.peek(cfa.wrapping_add_signed(i64::from(offset))),
            Saved::AtRegister { base, offset } => {
                let at = self.plus(base, offset)?;
                self.peek(at)
            }
            Saved::CfaPlus(offset) => {
                Ok((cfa.wrapping_add_signed(i64::from(offset)), ValueOrigin::Known))
            }
            Saved::InRegister(other) => held(self, other.index()),
        }
    }

    /// Goes to the caller and returns its PC.
    fn leave(&mut self, rule: &Rule, code: &mut dyn CodeLookup) -> Result<u64, MissingValue> {
        let cfa = self.cfa(rule.cfa)?;
        if let FrameKind::Stub { words } = rule.kind {
            return self.leave_stub(rule, cfa, words, code);
        }
        let (return_address, origin) = self.saved(rule.return_address, None, cfa)?;
        self.go_by(origin);
        let mut registers = [0; 16];
        let mut origins = [ValueOrigin::Known; 16];
        let mut known = 0u16;
        for (i, saved) in rule.registers.iter().enumerate() {
            // Below the stack pointer nothing is kept: an epilogue has taken the register from
            // there already. gcc does not say so (after `leave` or `pop` it states the new CFA
            // only), and the copy does not reach there.
            let place = match *saved {
                Saved::AtCfa(offset) => Some(cfa.wrapping_add_signed(i64::from(offset))),
                Saved::AtRegister { base, offset } => self.plus(base, offset).ok(),
                _ => None,
            };
            let saved =
                if place.is_some_and(|place| place < self.floor) { Saved::Same } else { *saved };
            if let Ok((value, origin)) = self.saved(saved, Some(i), cfa) {
                (registers[i], origins[i]) = (value, origin);
                known |= 1 << i;
            }
        }
        // The stack pointer must grow, but where a signal handler had a stack of its own
        // (sigaltstack), which may be above the one it interrupted. Asked first: a guess goes on
        // from this frame's registers. It may stay in a function whose return address is in a
        // register: all those that have not pushed it (aarch64), or have taken it off again
        // (glibc's `vfork`). A call changes that register, so it leads out of one frame only.
        let sp = self.machine.stack_pointer.index();
        self.go_by(origins[sp]);
        let stays =
            registers[sp] == self.floor && matches!(rule.return_address, Saved::InRegister(_));
        let is_signal = rule.kind == FrameKind::Signal;
        let goes_on =
            registers[sp] > self.floor || stays || is_signal && registers[sp] != self.floor;
        if known & (1 << sp) == 0 || !goes_on {
            return Err(MissingValue::Unknown);
        }
        if is_signal {
            self.stack.go_to(registers[sp]);
        }
        if let Some(link) = self.machine.link
            && !is_signal
        {
            known &= !(1 << link.index());
        }
        (self.registers, self.origins, self.known, self.floor) =
            (registers, origins, known, registers[sp]);
        Ok(return_address)
    }

    /// True for a thread's first instructions: it has no caller yet. `None` when the one who makes
    /// it cannot be told from it.
    fn is_new_thread(&mut self, rule: &Rule, code: &mut dyn CodeLookup) -> Option<bool> {
        if rule.kind != FrameKind::NewThread {
            return Some(false);
        }
        match self.cfa(rule.cfa).and_then(|cfa| self.word(cfa.wrapping_sub(8))) {
            Ok(word) => code.follows_call(word).map(|follows| !follows),
            // Whoever makes a thread has just written its return address; the new one, to which the
            // system call answers 0, has nothing on its stack yet.
            Err(MissingValue::NoCopy) => Some(self.register(Register::RAX) == Ok(0)),
            Err(_) => Some(false),
        }
    }

    /// Leaves a stub: its caller's return address is the first word from where the rule says that
    /// follows a call.
    fn leave_stub(
        &mut self,
        rule: &Rule,
        cfa: u64,
        words: u8,
        code: &mut dyn CodeLookup,
    ) -> Result<u64, MissingValue> {
        for word in 0..words {
            let at = cfa.wrapping_add(u64::from(word) * 8);
            let candidate = self.word(at.wrapping_sub(8))?;
            // One that was not seen may be the caller: what is found behind it would be the
            // caller's caller.
            if at > self.floor && code.follows_call(candidate).ok_or(MissingValue::NotSeen)? {
                let (mut registers, mut origins, mut known) =
                    (self.registers, self.origins, self.known);
                for (i, saved) in
                    rule.registers.iter().enumerate().filter(|(_, saved)| **saved != Saved::Same)
                {
                    match self.saved(*saved, Some(i), cfa) {
                        Ok((value, origin)) => {
                            (registers[i], origins[i]) = (value, origin);
                            known |= 1 << i;
                        }
                        Err(_) => known &= !(1 << i),
                    }
                }
                let sp = self.machine.stack_pointer.index();
                (registers[sp], origins[sp]) = (at, ValueOrigin::Known);
                (self.registers, self.origins, self.known, self.floor) =
                    (registers, origins, known, at);
                return Ok(candidate);
            }
        }
        Err(MissingValue::Unknown)
    }

    /// Leaves a frame by its frame pointer, if that leads up the stack and to code behind a call.
    /// Both machines keep the caller's frame pointer and the return address there, one above the
    /// other.
    fn leave_by_frame_pointer(
        &mut self,
        code: &mut dyn CodeLookup,
        limits: UnwindLimits,
    ) -> Option<u64> {
        let frame = self.register(self.machine.frame_pointer).ok()?;
        if frame < self.floor || !frame.is_multiple_of(8) {
            return None;
        }
        let caller = self.word(frame.checked_add(8)?).ok()? & limits.address_mask;
        let (saved, origin) = self.peek(frame).ok()?;
        // Where nothing can be read of it, code is all that can be asked for.
        if !code.is_executable(caller.wrapping_sub(1)) || code.follows_call(caller) == Some(false) {
            return None;
        }
        let above = frame.checked_add(16)?;
        self.go_on_from(self.called(above, Some((saved, origin))));
        // Where a call pushes the return address the frame ends with it; a frame record can be
        // anywhere in its frame.
        if self.machine.link.is_some() {
            self.known &= !(1 << self.machine.stack_pointer.index());
        }
        Some(caller)
    }

    /// At the caller of a frame without a rule, whose stack pointer and frame pointer are these.
    /// Nothing is known of the other registers: the frame may have changed and saved any of them.
    fn called(&self, stack_pointer: u64, frame_pointer: Option<(u64, ValueOrigin)>) -> Self {
        let mut caller = Self { floor: stack_pointer, known: 0, ..self.copied() };
        let at_call = (self.machine.stack_pointer, (stack_pointer, ValueOrigin::Known));
        let known = frame_pointer.map(|kept| (self.machine.frame_pointer, kept));
        for (register, (value, origin)) in known.into_iter().chain([at_call]) {
            let register = register.index();
            (caller.registers[register], caller.origins[register]) = (value, origin);
            caller.known |= 1 << register;
        }
        caller
    }

    /// The same walk, to try where it leads.
    fn copied(&self) -> Self {
        Self { trace: UnwindTrace::default(), stack: self.stack.copied(), ..*self }
    }

    /// The caller of a frame without a rule when its return address is at `slot`, in the two ways
    /// its frame pointer can be known: it is what it is here, or what this frame has pushed first.
    fn callers(&self, slot: u64) -> impl Iterator<Item = Self> {
        let own = self.machine.frame_pointer.index();
        let kept = (self.known & (1 << own) != 0).then(|| (self.registers[own], self.origins[own]));
        let pushed = self.peek(slot.wrapping_sub(8)).ok();
        let ways = [Some(kept), pushed.map(Some)];
        ways.into_iter().filter_map(move |way| Some(self.called(slot.checked_add(8)?, way?)))
    }

    /// Goes on from there.
    fn go_on_from(&mut self, caller: Self) {
        *self = Self { trace: std::mem::take(&mut self.trace), scans: self.scans, ..caller };
    }
}

/// Walks a `context` of this machine and appends to nothing: the result holds all frames.
pub fn walk(
    context: &UserContext,
    code: &mut dyn CodeLookup,
    limits: UnwindLimits,
) -> UnwoundStack {
    walk_on(NATIVE, context, code, limits)
}

/// The same, and what it went by.
pub fn walk_traced(
    context: &UserContext,
    code: &mut dyn CodeLookup,
    limits: UnwindLimits,
) -> (UnwoundStack, UnwindTrace) {
    let mut walk = StackWalk::new(NATIVE, context);
    let done = walk.unwind(code, limits);
    (done, walk.trace)
}

/// The same as [`walk`] of any machine.
pub fn walk_on(
    machine: &TargetMachine,
    context: &UserContext,
    code: &mut dyn CodeLookup,
    limits: UnwindLimits,
) -> UnwoundStack {
    StackWalk::new(machine, context).unwind(code, limits)
}

impl<'a> StackWalk<'a> {
    fn new(machine: &'a TargetMachine, context: &'a UserContext) -> Self {
        let regs = &context.regs;
        let stack_pointer = regs.gpr[machine.stack_pointer.index()];
        Self {
            machine,
            context,
            stack: CapturedStack::new(context, stack_pointer),
            floor: stack_pointer,
            registers: regs.gpr,
            origins: std::array::from_fn(ValueOrigin::Context),
            known: regs.known,
            trace: UnwindTrace::default(),
            scans: ScanBudget::default(),
        }
    }

    /// Leaves a frame, by more of the stack than was copied where that is needed and to be had.
    fn leave_reading_on(
        &mut self,
        rule: &Rule,
        code: &mut dyn CodeLookup,
    ) -> Result<u64, MissingValue> {
        loop {
            match self.leave(rule, code) {
                Err(MissingValue::BeyondCopy | MissingValue::NotThere) if self.read_on(code) => {}
                left => {
                    if left.is_ok() && rule.kind == FrameKind::Signal && self.stack.is_elsewhere() {
                        self.stack.want(self.floor);
                        self.read_on(code);
                    }
                    return left;
                }
            }
        }
    }

    fn unwind(&mut self, code: &mut dyn CodeLookup, limits: UnwindLimits) -> UnwoundStack {
        let (context, regs) = (self.context, &self.context.regs);
        let mut done = UnwoundStack::default();
        let (mut pc, mut exact) = (regs.ip, true);
        if let Some(probed) = &context.walk {
            for place in &probed.frames {
                match code.walked(place >> 1, place & 1 != 0, probed.time) {
                    Some(frame) => done.frames.push(frame),
                    None => return done.broken(Marker::TruncatedStale),
                }
            }
            match probed.end {
                WalkEnd::HandedOver { exact: at_instruction } => exact = at_instruction,
                WalkEnd::Limit => return done.broken(Marker::TruncatedDepth),
                WalkEnd::ThreadStart => {
                    done.reached_thread_start = true;
                    return done;
                }
            }
        }
        let broken = loop {
            if done.frames.len() >= limits.max_frames {
                break Marker::TruncatedDepth;
            }
            let at = if exact { pc } else { pc.wrapping_sub(1) };
            let step = code.step(at, exact);
            // Where no code is, no call can return to: the frame before has its return address
            // elsewhere than its rule says.
            if step.rule.is_err() && !done.frames.is_empty() && !code.is_executable(at) {
                break Marker::TruncatedNoRule;
            }
            done.frames.push(step.frame);
            let first = match &step.rule {
                Ok(rule) if rule.is_thread_start() => Some(true),
                Ok(rule) => self.is_new_thread(rule, code),
                Err(_) => Some(false),
            };
            let left = match &step.rule {
                _ if first.is_none() => break Marker::TruncatedUnreadable,
                Ok(_) if first == Some(true) => {
                    done.reached_thread_start = true;
                    return done;
                }
                Ok(rule) => match self.leave_reading_on(rule, code) {
                    Ok(caller) => {
                        Ok((caller & limits.address_mask, rule.kind == FrameKind::Signal))
                    }
                    Err(missing) => Err(missing.into()),
                },
                Err(RuleRefusal::Unreadable) => Err(Marker::TruncatedUnreadable),
                Err(_) => Err(Marker::TruncatedNoRule),
            };
            // Not where there is a rule, or will be: what is to be read, or waits for a share of
            // the work, says more than a guess.
            let scans = match &step.rule {
                Ok(rule) => matches!(rule.kind, FrameKind::Stub { .. }),
                Err(refusal) => !matches!(refusal, RuleRefusal::Unreadable | RuleRefusal::Budget),
            } && left == Err(Marker::TruncatedNoRule);
            (pc, exact) = match left {
                // A zero where a rule says the return address is: code without another end-of-stack
                // mark starts so (Go's goroutines).
                Ok((0, false)) => {
                    done.reached_thread_start = true;
                    return done;
                }
                Ok(caller) => caller,
                Err(Marker::TruncatedCopy) => break Marker::TruncatedCopy,
                Err(marker) => match self.guess(pc, scans, code, limits) {
                    // What a guess finds there says nothing about the stack's end.
                    Some(0) | None => break marker,
                    Some(caller) => {
                        done.guessed += 1;
                        done.frames.push(FrameKey::Marker(Marker::Guessed));
                        (caller, false)
                    }
                },
            };
        };
        // The kernel ends the thread and takes its memory away: there was no more stack to be seen.
        let gone = context.exiting && broken == Marker::TruncatedUnreadable;
        done.broken(if gone { Marker::Exiting } else { broken })
    }
}

#[cfg(test)]
mod tests {
    use super::captured_stack::MAX_PIECES;
    use super::*;
    use crate::aarch64::AARCH64;
    use crate::x86_64::X86_64;
    use perfusion_model::event::{ProbeWalk, UserRegs};
    use perfusion_model::frame::ProcessId;
    use proptest::prelude::{any, prop, proptest};
    use std::collections::HashMap;

    const STACK: u64 = 0x7ffc_0000_0000;
    const TEXT: u64 = 0x1000;

    #[derive(Default)]
    struct Rules(HashMap<u64, Rule>);

    fn frame(address: u64) -> FrameKey {
        FrameKey::Unknown { process: ProcessId(0), address }
    }

    impl CodeLookup for Rules {
        fn step(&mut self, pc: u64, _exact: bool) -> FrameRule {
            FrameRule {
                frame: frame(pc),
                rule: self.0.get(&pc).copied().map(Arc::new).ok_or(RuleRefusal::NoEntry),
            }
        }
        fn walked(&mut self, pc: u64, _exact: bool, _time: MonotonicNs) -> Option<FrameKey> {
            self.0.contains_key(&pc).then(|| frame(pc))
        }
        fn is_executable(&mut self, address: u64) -> bool {
            (TEXT..2 * TEXT).contains(&address)
        }
        fn follows_call(&mut self, address: u64) -> Option<bool> {
            Some(self.is_executable(address))
        }
        fn call_target(&mut self, address: u64) -> Option<u64> {
            // As if every function were called at its own beginning, 16 bytes long.
            Some(address & !15)
        }
        fn stack(&mut self, _address: u64) -> Option<Vec<u8>> {
            None
        }
    }

    fn context(ip: u64, rbp: u64, stack: &[u64]) -> UserContext {
        let mut regs = UserRegs { ip, known: u16::MAX, ..UserRegs::default() };
        regs.gpr[7] = STACK;
        regs.gpr[6] = rbp;
        UserContext {
            walk: None,
            regs,
            stack: stack.iter().flat_map(|w| w.to_le_bytes()).collect(),
            skipped: 0,
            limited: true,
            exiting: false,
            asleep: None,
        }
    }

    fn walk_with(rules: &[(u64, Rule)], context: &UserContext) -> UnwoundStack {
        walk_on(
            &X86_64,
            context,
            &mut Rules(rules.iter().copied().collect()),
            UnwindLimits::default(),
        )
    }

    fn rsp_plus(offset: i32) -> Rule {
        X86_64.call(Cfa::Register { base: Register::RSP, offset })
    }

    #[test]
    fn callers_are_looked_up_one_byte_before_the_return_address() {
        let done = walk_with(
            &[
                (0x1010, rsp_plus(16)),
                (0x101f, X86_64.frameless()),
                (0x102f, X86_64.thread_start()),
            ],
            &context(0x1010, 0, &[7, 0x1020, 0x1030]),
        );
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
        assert!(done.reached_thread_start && done.broken.is_none() && done.guessed == 0);
    }

    #[test]
    fn a_thread_that_is_being_ended_without_a_stack_is_not_broken() {
        let rules = [(0x1010, rsp_plus(16))];
        let gone = |exiting, stack: &[u64]| {
            let context = UserContext { exiting, limited: false, ..context(0x1010, 0, stack) };
            walk_with(&rules, &context)
        };
        let ended = gone(true, &[]);
        assert_eq!(ended.frames, [frame(0x1010), FrameKey::Marker(Marker::Exiting)]);
        assert!(ended.is_exiting() && !ended.is_broken() && !ended.reached_thread_start);
        let partly = gone(true, &[7]);
        assert!(
            partly.is_exiting(),
            "the rest of its stack was taken in the middle of the copy: {partly:?}"
        );
        let alive = gone(false, &[]);
        assert!(alive.is_broken() && !alive.is_exiting());
        assert_eq!(alive.broken, Some(Marker::TruncatedUnreadable));
        // What is missing for another reason is missing all the same.
        let no_rule = UserContext { exiting: true, ..context(0x1020, 0, &[7]) };
        assert!(walk_with(&rules, &no_rule).is_broken());
    }

    #[test]
    fn a_walk_of_the_probes_is_continued_where_it_was_handed_over() {
        let rules =
            [(0x1010, rsp_plus(16)), (0x101f, X86_64.frameless()), (0x102f, X86_64.thread_start())];
        let mut context = context(0x1020, 0, &[0x1030]);
        let mut walk = ProbeWalk {
            time: MonotonicNs(1),
            space: 1,
            frames: vec![0x1010 << 1 | 1],
            end: WalkEnd::HandedOver { exact: false },
        };
        context.walk = Some(walk.clone());
        let done = walk_with(&rules, &context);
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
        assert!(done.reached_thread_start && done.broken.is_none());

        walk.frames.push(0x1055 << 1);
        walk.end = WalkEnd::ThreadStart;
        context.walk = Some(walk);
        let done = walk_with(&rules, &context);
        assert_eq!(done.broken, Some(Marker::TruncatedStale), "a rule that is not known any more");
        assert_eq!(done.frames[0], frame(0x1010));
    }

    #[test]
    fn code_interrupted_by_a_signal_is_looked_up_where_it_stands() {
        let mut signal = X86_64.call(Cfa::Deref { base: Register::RSP, offset: 8, add: 0 });
        signal.kind = FrameKind::Signal;
        signal.return_address = Saved::AtRegister { base: Register::RSP, offset: 16 };
        let done = walk_with(
            &[(0x1010, signal), (0x1020, X86_64.thread_start())],
            &context(0x1010, 0, &[0, STACK + 24, 0x1020]),
        );
        assert_eq!(done.frames, [frame(0x1010), frame(0x1020)]);
    }

    /// Code of a thread that still sleeps: what of its memory is in no copy.
    struct Sleeping<'a>(Rules, &'a [(u64, u64)]);

    impl CodeLookup for Sleeping<'_> {
        fn step(&mut self, pc: u64, exact: bool) -> FrameRule {
            self.0.step(pc, exact)
        }
        fn walked(&mut self, pc: u64, exact: bool, time: MonotonicNs) -> Option<FrameKey> {
            self.0.walked(pc, exact, time)
        }
        fn is_executable(&mut self, address: u64) -> bool {
            self.0.is_executable(address)
        }
        fn follows_call(&mut self, address: u64) -> Option<bool> {
            self.0.follows_call(address)
        }
        fn call_target(&mut self, address: u64) -> Option<u64> {
            self.0.call_target(address)
        }
        fn stack(&mut self, address: u64) -> Option<Vec<u8>> {
            let words = (address..address + (64 << 10)).step_by(8);
            let word = |at: u64| {
                self.1.iter().find(|(there, _)| *there == at).map_or(0, |(_, word)| *word)
            };
            (!self.1.is_empty()).then(|| words.flat_map(|at| word(at).to_le_bytes()).collect())
        }
    }

    fn walk_asleep(
        rules: &[(u64, Rule)],
        memory: &[(u64, u64)],
        context: &UserContext,
    ) -> (UnwoundStack, bool) {
        let mut walk = StackWalk::new(&X86_64, context);
        let mut code = Sleeping(Rules(rules.iter().copied().collect()), memory);
        let done = walk.unwind(&mut code, UnwindLimits::default());
        (done, walk.trace.is_whole())
    }

    #[test]
    fn a_stack_larger_than_its_copy_is_read_on_while_its_thread_sleeps() {
        let rules = [
            (0x1010, rsp_plus(70_000)),
            (0x101f, rsp_plus(200_000)),
            (0x102f, X86_64.thread_start()),
        ];
        let memory = [(STACK + 69_992, 0x1020), (STACK + 269_992, 0x1030)];
        let context = context(0x1010, 0, &[0; 64]);
        let (done, traced) = walk_asleep(&rules, &memory, &context);
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
        assert!(
            done.reached_thread_start && !traced,
            "another copy like this one says nothing about the rest"
        );
        let (done, _) = walk_asleep(&rules, &[], &context);
        assert_eq!((done.frames.len(), done.broken), (2, Some(Marker::TruncatedCopy)));
        // A hostile stack is read so often and no more.
        let endless = [(0x1010, rsp_plus(70_000)), (0x101f, rsp_plus(70_000))];
        let memory: Vec<_> = (1..64).map(|n| (STACK + n * 70_000 - 8, 0x1020)).collect();
        let (done, _) = walk_asleep(&endless, &memory, &context);
        assert_eq!((done.frames.len(), done.broken), (MAX_PIECES + 2, Some(Marker::TruncatedCopy)));
    }

    #[test]
    fn what_a_signal_handler_on_a_stack_of_its_own_interrupted_is_beyond_the_copy() {
        let mut signal = X86_64.call(Cfa::Deref { base: Register::RSP, offset: 8, add: 0 });
        signal.kind = FrameKind::Signal;
        signal.return_address = Saved::AtRegister { base: Register::RSP, offset: 16 };
        let rules = [(0x1010, signal), (0x1020, rsp_plus(16)), (0x102f, X86_64.thread_start())];
        for (other, limited) in
            [(STACK - 0x10_0000, true), (STACK + 0x10_0000, false), (STACK << 1, false)]
        {
            let mut context = context(0x1010, 0, &[0, other, 0x1020]);
            context.limited = limited;
            let (done, _) = walk_asleep(&rules, &[(other + 8, 0x1030)], &context);
            assert_eq!(done.frames, [frame(0x1010), frame(0x1020), frame(0x102f)], "{other:#x}");
            let (done, _) = walk_asleep(&rules, &[], &context);
            assert_eq!(
                (done.frames.len(), done.broken),
                (3, Some(Marker::TruncatedCopy)),
                "{other:#x}"
            );
        }
        // On the same stack both are in the copy.
        let done = walk_with(&rules, &context(0x1010, 0, &[0, STACK + 24, 0x1020, 7, 0x1030]));
        assert!(done.reached_thread_start);
    }

    #[test]
    fn a_guess_is_marked_between_the_frames_and_counted() {
        let done = walk_with(
            &[(0x102f, X86_64.thread_start())],
            &context(0x1010, STACK + 8, &[1, 2, 0x1030]),
        );
        assert_eq!(done.frames, [frame(0x1010), FrameKey::Marker(Marker::Guessed), frame(0x102f)]);
        assert_eq!(done.guessed, 1);
    }

    #[test]
    fn a_frame_without_a_rule_is_left_by_the_first_word_that_leads_on() {
        // The first one's caller would be 7.
        let decoy = (0x104f, X86_64.frameless());
        let done = walk_with(
            &[decoy, (0x101f, X86_64.frameless()), (0x102f, X86_64.thread_start())],
            &context(0x1010, 0, &[0x1050, 7, 0x1020, 0x1030]),
        );
        assert_eq!(
            done.frames,
            [frame(0x1010), FrameKey::Marker(Marker::Guessed), frame(0x101f), frame(0x102f)]
        );
        assert_eq!((done.guessed, done.broken), (1, None));
    }

    #[test]
    fn a_caller_that_keeps_the_frame_pointer_is_not_passed_over_by_it() {
        let by_rbp = X86_64.call(Cfa::Register { base: Register::RBP, offset: 16 });
        let rules = [(0x101f, by_rbp), (0x102f, X86_64.thread_start())];
        let frames =
            [frame(0x1010), FrameKey::Marker(Marker::Guessed), frame(0x101f), frame(0x102f)];
        let stack = [7, 0x1020, 9, STACK + 64, 0x1030];
        assert_eq!(walk_with(&rules, &context(0x1010, STACK + 24, &stack)).frames, frames);
        // The frame has pushed it and uses the register for something else.
        let stack = [7, STACK + 24, 0x1020, 0, 0x1030];
        assert_eq!(walk_with(&rules, &context(0x1010, 5, &stack)).frames, frames);
    }

    #[test]
    fn what_calls_just_here_goes_before_what_older_calls_have_left() {
        // 0x1040 leads on to 0x1050 and to the thread's start, but it is 0x1010 that calls the
        // function at 0x1010.
        let rules = [
            (0x103f, X86_64.frameless()),
            (0x104f, X86_64.thread_start()),
            (0x101a, X86_64.frameless()),
            (0x102f, X86_64.thread_start()),
        ];
        let done = walk_with(&rules, &context(0x101e, 0, &[0x1040, 0x1050, 7, 0x101b, 0x1030]));
        assert_eq!(
            done.frames,
            [frame(0x101e), FrameKey::Marker(Marker::Guessed), frame(0x101a), frame(0x102f)]
        );
    }

    #[test]
    fn what_is_searched_of_a_stack_is_bounded() {
        let done = walk_with(&[], &context(0x1010, 0, &vec![0x1021; 4096]));
        assert!(done.guessed < 8 && done.broken == Some(Marker::TruncatedNoRule), "{done:?}");
        let done = walk_with(&[], &context(0x1010, 0, &[vec![7; 512], vec![0x1020]].concat()));
        assert_eq!((done.guessed, done.broken), (0, Some(Marker::TruncatedNoRule)));
    }

    #[test]
    fn what_cannot_be_read_or_is_not_to_be_had_now_is_not_guessed_by_a_search() {
        let stack = context(0x1010, 0, &[0x1020, 0x1030]);
        let rules = Rules([(0x101f, X86_64.thread_start())].into_iter().collect());
        let done = walk_on(&X86_64, &stack, &mut Unread(rules), UnwindLimits::default());
        assert_eq!((done.guessed, done.broken), (0, Some(Marker::TruncatedNoRule)));
        let done = walk_on(&X86_64, &stack, &mut Busy, UnwindLimits::default());
        assert_eq!((done.guessed, done.broken), (0, Some(Marker::TruncatedNoRule)));
    }

    /// Code of a process that has had its share of work.
    struct Busy;

    impl CodeLookup for Busy {
        fn step(&mut self, pc: u64, _exact: bool) -> FrameRule {
            FrameRule { frame: frame(pc), rule: Err(RuleRefusal::Budget) }
        }
        fn walked(&mut self, _pc: u64, _exact: bool, _time: MonotonicNs) -> Option<FrameKey> {
            None
        }
        fn is_executable(&mut self, _address: u64) -> bool {
            true
        }
        fn follows_call(&mut self, _address: u64) -> Option<bool> {
            Some(true)
        }
        fn call_target(&mut self, _address: u64) -> Option<u64> {
            None
        }
        fn stack(&mut self, _address: u64) -> Option<Vec<u8>> {
            None
        }
    }

    #[test]
    fn a_return_address_beyond_the_copy_is_told_from_no_rule() {
        let done = walk_with(&[(0x1010, rsp_plus(64))], &context(0x1010, 0, &[0]));
        assert_eq!(done.broken, Some(Marker::TruncatedCopy));
        // Larger than any copy, as a frame with a buffer of 64 KiB is; no stack is as large as the
        // last one.
        let done = walk_with(&[(0x1010, rsp_plus(70_000))], &context(0x1010, 0, &[0]));
        assert_eq!(done.broken, Some(Marker::TruncatedCopy));
        let done = walk_with(&[(0x1010, rsp_plus(16 << 20))], &context(0x1010, 0, &[0]));
        assert_eq!(done.broken, Some(Marker::TruncatedNoRule));
        // Nor did a copy end too soon that went on for as long as there was memory.
        let all = UserContext { limited: false, ..context(0x1010, 0, &[0]) };
        assert_eq!(
            walk_with(&[(0x1010, rsp_plus(70_000))], &all).broken,
            Some(Marker::TruncatedUnreadable)
        );
        let done = walk_with(&[], &context(0x1010, 0, &[0]));
        assert_eq!((done.broken, done.frames.len()), (Some(Marker::TruncatedNoRule), 2));
    }

    #[test]
    fn a_register_that_was_not_captured_is_not_used() {
        let by_rax = X86_64.call(Cfa::Register { base: Register::at(0).unwrap(), offset: 16 });
        let mut context = context(0x1010, 0, &[0, 0, 0]);
        context.regs.known = 1 << 7;
        assert_eq!(walk_with(&[(0x1010, by_rax)], &context).broken, Some(Marker::TruncatedNoRule));
    }

    #[test]
    fn a_register_taken_back_by_the_epilogue_is_not_read_from_below_the_stack() {
        // After `leave`: CFA = rsp + 8, rbp said to be saved 16 bytes below it; the caller is left
        // by rbp.
        let mut after_leave = X86_64.frameless();
        after_leave.registers[Register::RBP.index()] = Saved::AtCfa(-16);
        let caller = X86_64.call(Cfa::Register { base: Register::RBP, offset: 16 });
        let done = walk_with(
            &[(0x1010, after_leave), (0x101f, caller), (0x102f, X86_64.thread_start())],
            &context(0x1010, STACK + 16, &[0x1020, 7, 8, 0x1030]),
        );
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
    }

    #[test]
    fn a_return_address_in_a_register_leaves_the_stack_as_it_is() {
        // glibc's `vfork`: `pop %rdi` before the system call, so that the child cannot overwrite
        // it.
        let mut vfork = rsp_plus(0);
        vfork.return_address = Saved::InRegister(Register::at(5).unwrap());
        let mut context = context(0x1010, 0, &[7, 0x1030]);
        context.regs.gpr[5] = 0x1020;
        let caller = (0x101f, rsp_plus(16));
        let done = walk_with(&[(0x1010, vfork), caller, (0x102f, X86_64.thread_start())], &context);
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
        // Only where it is known what the register holds.
        let done = walk_with(&[(0x1010, vfork), (0x101f, vfork)], &context);
        assert_eq!((done.frames.len(), done.broken), (3, Some(Marker::TruncatedNoRule)));
    }

    #[test]
    fn a_stack_that_was_not_there_is_told_from_one_without_a_rule() {
        let rules = [(0x1010, rsp_plus(16))];
        let mut gone = context(0x1010, 0, &[]);
        assert_eq!(walk_with(&rules, &gone).broken, Some(Marker::TruncatedUnreadable));
        gone.regs.ip = 0x1020;
        assert_eq!(walk_with(&rules, &gone).broken, Some(Marker::TruncatedNoRule));
    }

    #[test]
    fn a_new_thread_whose_stack_was_never_touched_is_at_its_start() {
        let rules = [(0x1010, Rule { kind: FrameKind::NewThread, ..rsp_plus(8) })];
        let mut child = context(0x1010, 0, &[]);
        let done = walk_with(&rules, &child);
        assert!(done.reached_thread_start && done.frames == [frame(0x1010)]);
        child.regs.gpr[0] = 4321;
        assert_eq!(
            walk_with(&rules, &child).broken,
            Some(Marker::TruncatedUnreadable),
            "the one that made it"
        );
    }

    /// Code of which nothing more can be read than is known.
    struct Unread(Rules);

    impl CodeLookup for Unread {
        fn step(&mut self, pc: u64, exact: bool) -> FrameRule {
            self.0.step(pc, exact)
        }
        fn walked(&mut self, pc: u64, exact: bool, time: MonotonicNs) -> Option<FrameKey> {
            self.0.walked(pc, exact, time)
        }
        fn is_executable(&mut self, address: u64) -> bool {
            self.0.is_executable(address)
        }
        fn follows_call(&mut self, _address: u64) -> Option<bool> {
            None
        }
        fn call_target(&mut self, _address: u64) -> Option<u64> {
            None
        }
        fn stack(&mut self, _address: u64) -> Option<Vec<u8>> {
            None
        }
    }

    #[test]
    fn code_that_cannot_be_read_says_neither_that_a_thread_is_new_nor_that_a_stub_has_more_words() {
        for kind in [FrameKind::NewThread, FrameKind::Stub { words: 3 }] {
            let rules = [(0x1010, Rule { kind, ..rsp_plus(8) }), (0x101f, X86_64.thread_start())];
            let context = context(0x1010, 0, &[0x1020, 0x1020, 0x1020]);
            let rules = Rules(rules.into_iter().collect());
            let done = walk_on(&X86_64, &context, &mut Unread(rules), UnwindLimits::default());
            assert_eq!(
                done.frames,
                [frame(0x1010), FrameKey::Marker(Marker::TruncatedUnreadable)],
                "{kind:?}"
            );
            assert!(!done.reached_thread_start);
        }
    }

    #[test]
    fn a_frame_that_reaches_into_pages_not_there_is_left_by_what_is_above_them() {
        let mut context = context(0x1010, 0, &[0x1020, 7, 0x1030]);
        context.skipped = 64;
        let rules =
            [(0x1010, rsp_plus(72)), (0x101f, rsp_plus(16)), (0x102f, X86_64.thread_start())];
        let done = walk_with(&rules, &context);
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
        // What would have to be read from them is not known, and it is not said to be missing for
        // good.
        let done = walk_with(&[(0x1010, rsp_plus(64))], &context);
        assert_eq!((done.frames.len(), done.broken), (2, Some(Marker::TruncatedUnreadable)));
    }

    #[test]
    fn a_return_address_of_zero_by_a_rule_is_the_end() {
        let done = walk_with(&[(0x1010, rsp_plus(16))], &context(0x1010, 0, &[7, 0]));
        assert!(done.reached_thread_start && done.broken.is_none());
        assert_eq!(done.frames, [frame(0x1010)]);
    }

    #[test]
    fn a_rule_that_makes_no_progress_ends_the_walk() {
        let done = walk_with(
            &[(0x1010, rsp_plus(0)), (0x100f, rsp_plus(0))],
            &context(0x1010, 0, &[0x1010; 4]),
        );
        assert_eq!(done.frames.len(), 2);
        assert!(done.broken.is_some());
    }

    #[test]
    fn depth_is_bounded() {
        let stack = vec![0x1011; 4096];
        let done = walk_with(&[(0x1010, X86_64.frameless())], &context(0x1010, 0, &stack));
        assert_eq!((done.frames.len(), done.broken), (513, Some(Marker::TruncatedDepth)));
    }

    #[test]
    fn a_stubs_own_words_are_skipped() {
        let mut stub = X86_64.frameless();
        stub.kind = FrameKind::Stub { words: 3 };
        let done = walk_with(
            &[(0x1010, stub), (0x102f, X86_64.frameless()), (0x103f, X86_64.thread_start())],
            &context(0x1010, 0, &[5, 0x9999_0000, 0x1030, 0x1040]),
        );
        assert_eq!(done.frames, [frame(0x1010), frame(0x102f), frame(0x103f)]);
    }

    #[test]
    fn a_stubs_registers_are_all_read_by_its_own_stack_pointer() {
        // `pop rbx; pop rbp; pop r12; ret`
        let mut stub = rsp_plus(32);
        stub.kind = FrameKind::Stub { words: 1 };
        let popped = |offset| Saved::AtRegister { base: Register::RSP, offset };
        for (register, offset) in [(3, 0), (6, 8), (12, 16)] {
            stub.registers[register] = popped(offset);
        }
        let mut caller = X86_64.call(Cfa::Register { base: Register::at(12).unwrap(), offset: 0 });
        caller.return_address = Saved::AtCfa(-8);
        let stack = [3, 6, STACK + 48, 0x1020, 5, 0x1030];
        let done = walk_with(
            &[(0x1010, stub), (0x101f, caller), (0x102f, X86_64.thread_start())],
            &context(0x1010, 0, &stack),
        );
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
    }

    /// A context of aarch64 whose x29 and x30 are given.
    fn arm(pc: u64, x29: u64, x30: u64, stack: &[u64]) -> UserContext {
        let mut context = context(pc, 0, stack);
        context.regs.gpr[Register::SP.index()] = STACK;
        context.regs.gpr[Register::X29.index()] = x29;
        context.regs.gpr[Register::X30.index()] = x30;
        context
    }

    fn walk_arm(rules: &[(u64, Rule)], context: &UserContext) -> UnwoundStack {
        let limits = UnwindLimits { address_mask: (1 << 48) - 1, ..UnwindLimits::default() };
        walk_on(&AARCH64, context, &mut Rules(rules.iter().copied().collect()), limits)
    }

    /// `stp x29, x30, [sp, #-n]!; mov x29, sp`.
    fn frame_record(bytes: i32) -> Rule {
        let mut rule = AARCH64.call(Cfa::Register { base: Register::X29, offset: bytes });
        rule.return_address = Saved::AtRegister { base: Register::X29, offset: 8 };
        rule.registers[Register::X29.index()] =
            Saved::AtRegister { base: Register::X29, offset: 0 };
        rule
    }

    #[test]
    fn a_leaf_of_aarch64_is_left_by_the_link_register_and_signed_addresses_are_stripped() {
        let rules = [
            (0x1010, AARCH64.frameless()),
            (0x101f, frame_record(32)),
            (0x102f, AARCH64.thread_start()),
        ];
        let context = arm(0x1010, STACK, 0x0041_0000_0000_1020, &[0, 0x007e_0000_0000_1030, 7, 8]);
        let done = walk_arm(&rules, &context);
        assert_eq!(done.frames, [frame(0x1010), frame(0x101f), frame(0x102f)]);
        assert!(done.reached_thread_start && done.guessed == 0);
    }

    #[test]
    fn the_link_register_leads_out_of_one_frame_only() {
        let rules = [(0x1010, AARCH64.frameless()), (0x101f, AARCH64.frameless())];
        let done = walk_arm(&rules, &arm(0x1010, 0, 0x1020, &[0; 4]));
        assert_eq!((done.frames.len(), done.broken), (3, Some(Marker::TruncatedNoRule)));
    }

    #[test]
    fn a_leaf_that_a_signal_interrupted_has_its_link_register_back() {
        let signal =
            crate::aarch64::code::signal_return(&[0x68, 0x11, 0x80, 0xd2, 1, 0, 0, 0xd4]).unwrap();
        let mut stack = vec![0u64; 90];
        (stack[69], stack[70], stack[71]) = (0x1030, STACK + 640, 0x1020);
        let rules =
            [(0x1010, signal), (0x1020, AARCH64.frameless()), (0x102f, AARCH64.thread_start())];
        let done = walk_arm(&rules, &arm(0x1010, 0, 0, &stack));
        assert_eq!(done.frames, [frame(0x1010), frame(0x1020), frame(0x102f)]);
    }

    #[test]
    fn a_guess_by_a_frame_record_knows_no_stack_pointer() {
        let by_sp = AARCH64.call(Cfa::Register { base: Register::SP, offset: 16 });
        let stack = [0, STACK + 32, 0x1020, 0, STACK + 56, 0x1030];
        let done = walk_arm(
            &[(0x101f, by_sp), (0x102f, AARCH64.thread_start())],
            &arm(0x1010, STACK + 8, 0, &stack),
        );
        let guessed = FrameKey::Marker(Marker::Guessed);
        assert_eq!(done.frames, [frame(0x1010), guessed, frame(0x101f), guessed, frame(0x102f)]);
    }

    proptest! {
        #[test]
        fn random_contexts_end(
            stack in prop::collection::vec(0x1000u64..0x1040, 0..64),
            rules in prop::collection::vec(
                (0x1000u64..0x1040, -16i32..64, 0u16..16, any::<bool>()),
                0..64,
            ),
            known in any::<u16>(),
        ) {
            let rules: Vec<_> = rules.iter().map(|&(at, offset, base, stub)| {
                let base = Register::at(base).unwrap();
                let mut rule = X86_64.call(Cfa::Register { base, offset });
                if stub { rule.kind = FrameKind::Stub { words: 3 }; }
                (at, rule)
            }).collect();
            let mut context = context(0x1010, STACK + 8, &stack);
            context.regs.known = known;
            proptest::prop_assert!(walk_with(&rules, &context).frames.len() <= 1026);
        }
    }
}
