//! The probes' walker and the user-space unwinder against each other, on random stacks and by
//! random rules, of both machines. Wherever the probes hand over, the stack is the one that the
//! unwinder finds alone.

use super::aarch64::AARCH64;
use super::encode::encode;
use super::machine::TargetMachine;
use super::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use super::unwinder::{CodeLookup, FrameRule, UnwindLimits, UnwoundStack, walk_on};
use super::x86_64::X86_64;
use ebpf_common::key::WalkState;
use ebpf_common::rule::{PC, SP};
use ebpf_common::{machine, walk};
use perfusion_model::event::{MonotonicNs, ProbeWalk, UserContext, UserRegs, WalkEnd};
use perfusion_model::frame::{FrameKey, ProcessId};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert_eq, prop_oneof, proptest};
use std::sync::Arc;

const STACK: u64 = 0x7ffc_0000_0000;
/// A page: the probes read ahead to the middle or the end of one. It repeats fewer words, which are
/// chosen.
const WORDS: usize = 512;
const CHOSEN: usize = 128;
/// rbx, or x19.
const PRESERVED: Register = Register::RBX;
const TEXT: u64 = 0x40_0000;

/// What is in memory: nothing below the innermost stack pointer, which no copy holds either.
#[derive(Debug)]
struct TestStack {
    bytes: Vec<u8>,
    from: usize,
}

impl TestStack {
    fn copied(&self) -> walk::CopiedStack<'_> {
        let at = 8 * self.from;
        walk::CopiedStack {
            from: STACK + at as u64,
            bytes: self.bytes.get(at..).unwrap_or_default(),
        }
    }

    fn copy(&self, from: u64) -> Vec<u8> {
        let offset = from
            .checked_sub(STACK + 8 * self.from as u64)
            .map(|offset| offset + 8 * self.from as u64);
        let offset = offset.and_then(|offset| usize::try_from(offset).ok());
        offset.and_then(|offset| self.bytes.get(offset..)).unwrap_or_default().to_vec()
    }
}

/// Each frame by the next rule, wherever it is.
struct RuleSequence<'a> {
    rules: &'a [Option<Rule>],
    memory: &'a TestStack,
    next: usize,
}

impl RuleSequence<'_> {
    fn rule(&mut self) -> Option<Rule> {
        self.next += 1;
        self.rules.get(self.next - 1).copied().flatten()
    }
}

fn frame(address: u64) -> FrameKey {
    FrameKey::Unknown { process: ProcessId(0), address }
}

impl CodeLookup for RuleSequence<'_> {
    fn step(&mut self, pc: u64, _exact: bool) -> FrameRule {
        FrameRule { frame: frame(pc), rule: self.rule().map(Arc::new).ok_or(RuleRefusal::NoEntry) }
    }
    fn walked(&mut self, pc: u64, _exact: bool, _time: MonotonicNs) -> Option<FrameKey> {
        self.rule().map(|_| frame(pc))
    }
    fn is_executable(&mut self, address: u64) -> bool {
        address >> 47 == 0
    }
    fn follows_call(&mut self, address: u64) -> Option<bool> {
        Some(address.is_multiple_of(3))
    }
    fn call_target(&mut self, address: u64) -> Option<u64> {
        address.is_multiple_of(2).then_some(TEXT)
    }
    fn stack(&mut self, address: u64) -> Option<Vec<u8>> {
        Some(self.memory.copy(address))
    }
}

/// Goes as far as the probes can, and hands over as their record does (`ebpf-probes/src/emit.rs`).
/// `None` when a signal's frame said that what it interrupted had its stack where there is no
/// memory.
fn probe<M: machine::WalkMachine>(
    machine: &TargetMachine,
    walked: &M,
    regs: UserRegs,
    rules: &[Option<Rule>],
    stack: &TestStack,
) -> Option<UserContext> {
    let mut walk = Box::new(WalkState::nowhere());
    let mut registers =
        machine.registers.walk_places.map(|place| regs.gpr[usize::from(place)]).to_vec();
    registers.push(regs.ip);
    walk::begin(&mut walk, registers.try_into().unwrap(), 1);
    let mut frames = Vec::new();
    for rule in rules {
        let rule = rule.as_ref().and_then(|rule| encode(machine, rule));
        let (Some(place), Some(rule)) = (walk::place(&walk), rule) else { break };
        if !walk::leave(&mut walk, &rule, walked, &stack.copied()) {
            break;
        }
        frames.push(place);
        if stack.copy(walk.registers[SP]).is_empty() {
            return None;
        }
        if walk.end != 0 {
            break;
        }
    }
    let mut handed = regs;
    if !frames.is_empty() {
        handed.known = 0;
        for (register, place) in machine.registers.walk_places.into_iter().enumerate() {
            handed.gpr[usize::from(place)] = walk.registers[register];
            handed.known |= u16::try_from(walk.known >> register & 1).unwrap() << place;
        }
        handed.ip = walk.registers[PC];
    }
    let end = if walk.end == 0 {
        WalkEnd::HandedOver { exact: walk.exact != 0 }
    } else {
        WalkEnd::ThreadStart
    };
    Some(UserContext {
        walk: Some(ProbeWalk { time: MonotonicNs(1), space: 1, frames, end }),
        regs: handed,
        stack: stack.copy(walk.registers[SP]),
        skipped: 0,
        limited: false,
        exiting: false,
        asleep: None,
    })
}

/// What a reader sees; why a stack is broken may be said in other words.
fn seen(done: &UnwoundStack) -> (&[FrameKey], bool, bool, u32) {
    let frames = &done.frames[..done.frames.len() - usize::from(done.broken.is_some())];
    (frames, done.broken.is_some(), done.reached_thread_start, done.guessed)
}

fn any_rule(machine: &'static TargetMachine) -> impl Strategy<Value = Option<Rule>> {
    let bases = [machine.stack_pointer, machine.frame_pointer, PRESERVED];
    let base = prop::sample::select(bases.to_vec());
    let cfa = prop_oneof![
        6 => (base, 0..24i32).prop_map(|(base, n)| Cfa::Register { base, offset: n * 8 }),
        // By other registers it could be kept below the stack pointer, or elsewhere, where only the
        // probes can read.
        1 => (0..24i32, -4..4i32)
            .prop_map(|(n, add)| Cfa::Deref {
                base: machine.stack_pointer,
                offset: n * 8,
                add: add * 8,
            }),
    ];
    let place = prop_oneof![9 => (-20..4i32).prop_map(|n| n * 8), 1 => -160..32i32];
    let saved = prop_oneof![
        4 => place.clone().prop_map(Saved::AtCfa),
        2 => Just(Saved::Same),
        1 => Just(Saved::Lost),
        1 => place.clone().prop_map(Saved::CfaPlus),
        2 => place.prop_map(|offset| Saved::AtRegister { base: machine.stack_pointer, offset }),
    ];
    let kind = prop_oneof![
        12 => Just(FrameKind::Call),
        2 => Just(FrameKind::Signal),
        1 => Just(FrameKind::NewThread),
        1 => (1..4u8).prop_map(|words| FrameKind::Stub { words }),
    ];
    let at = prop_oneof![4 => Just(-8), 1 => (-3..1i32).prop_map(|n| n * 8)];
    let registers = [saved.clone(), saved.clone(), saved];
    (cfa, registers, at, kind, any::<bool>(), 0..16u8).prop_map(
        move |(cfa, [preserved_at, frame_at, stack_at], at, kind, in_link, chance)| {
            let mut rule = machine.call(cfa);
            rule.kind = kind;
            // Compilers count from the register by which they find the CFA.
            let beside = |saved| match (saved, cfa) {
                (Saved::AtRegister { offset, .. }, Cfa::Register { base, .. }) => {
                    Saved::AtRegister { base, offset }
                }
                _ => saved,
            };
            rule.registers[PRESERVED.index()] = beside(preserved_at);
            rule.registers[machine.frame_pointer.index()] = beside(frame_at);
            match kind {
                FrameKind::Signal => {
                    // Nothing is counted from it.
                    rule.cfa = Cfa::Register { base: machine.stack_pointer, offset: 8 };
                    let from = |word: i32| Saved::AtRegister {
                        base: machine.stack_pointer,
                        offset: 8 * word,
                    };
                    rule.registers[PRESERVED.index()] = from(5);
                    rule.registers[machine.frame_pointer.index()] = from(6);
                    rule.registers[machine.stack_pointer.index()] = from(at / -8 + 1);
                    rule.return_address = from(0);
                }
                _ if machine.link.is_some() && in_link => {}
                _ => rule.return_address = Saved::AtCfa(at),
            }
            if kind == FrameKind::Call
                && matches!(stack_at, Saved::CfaPlus(_) | Saved::Same)
                && chance < 4
            {
                rule.registers[machine.stack_pointer.index()] = stack_at;
            }
            match chance {
                15 => None,
                14 => Some(machine.thread_start()),
                _ => Some(rule),
            }
        },
    )
}

fn any_stack() -> impl Strategy<Value = TestStack> {
    let word = prop_oneof![
        6 => (0..WORDS as u64).prop_map(|word| STACK + 8 * word),
        4 => (0..4096u64).prop_map(|offset| TEXT + offset),
        1 => Just(0),
        1 => any::<u64>(),
    ];
    (prop::collection::vec(word, CHOSEN), 0..64usize).prop_map(|(words, from)| {
        let words = words.iter().cycle().take(WORDS);
        TestStack { bytes: words.flat_map(|word| word.to_le_bytes()).collect(), from }
    })
}

/// Preserved register and frame pointer, as words of the stack, and whether the latter is askew.
type StartState = (u64, u64, bool);

fn any_begin() -> impl Strategy<Value = StartState> {
    (0..WORDS as u64, 0..WORDS as u64, prop::sample::select(vec![false, false, false, true]))
}

fn compare<M: machine::WalkMachine>(
    machine: &'static TargetMachine,
    walked: &M,
    rules: &[Option<Rule>],
    stack: &TestStack,
    (preserved, frame, askew): StartState,
) -> Result<(), proptest::test_runner::TestCaseError> {
    let mut regs = UserRegs { ip: TEXT, known: u16::MAX, ..UserRegs::default() };
    regs.gpr[PRESERVED.index()] = STACK + 8 * preserved;
    regs.gpr[machine.frame_pointer.index()] = STACK + 8 * frame + 4 * u64::from(askew);
    regs.gpr[machine.stack_pointer.index()] = STACK + 8 * stack.from as u64;
    if let Some(link) = machine.link {
        regs.gpr[link.index()] = TEXT + 77;
    }
    let alone = UserContext {
        walk: None,
        regs,
        stack: stack.copy(STACK + 8 * stack.from as u64),
        skipped: 0,
        limited: false,
        exiting: false,
        asleep: None,
    };
    let Some(together) = probe(machine, walked, regs, rules, stack) else { return Ok(()) };
    let limits = UnwindLimits { max_frames: 64, address_mask: (machine.address_mask)(STACK) };
    let of = |context| {
        walk_on(machine, context, &mut RuleSequence { rules, memory: stack, next: 0 }, limits)
    };
    let (alone, done) = (of(&alone), of(&together));
    prop_assert_eq!(
        seen(&done),
        seen(&alone),
        "handed over: {:x?}",
        (together.walk, together.regs)
    );
    Ok(())
}

proptest! {
    #[test]
    fn of_x86_64_find_the_same_stack(
        rules in prop::collection::vec(any_rule(&X86_64), 1..8),
        stack in any_stack(),
        begin in any_begin(),
    ) {
        compare(&X86_64, &machine::x86_64::X86_64, &rules, &stack, begin)?;
    }

    #[test]
    fn of_aarch64_find_the_same_stack(
        rules in prop::collection::vec(any_rule(&AARCH64), 1..8),
        stack in any_stack(),
        begin in any_begin(),
    ) {
        let walked = machine::aarch64::Aarch64 {
            address_mask: machine::aarch64::address_mask(STACK),
        };
        compare(&AARCH64, &walked, &rules, &stack, begin)?;
    }
}
