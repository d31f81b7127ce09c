//! Rules in the form the probes take: those that practically all code has. The others stay with the finisher.

use super::machine::Machine;
use super::rule::{Cfa, FrameKind, Register, Rule, Saved};
use ebpf_common::rule::{
    LOST, PC, RULE_CALL, RULE_DEREF, RULE_SIGNAL, RULE_START, SAME, SP, UnwindRule, WALK_REGISTERS,
};

/// The probes' form of a rule of `machine`; `None` when they cannot do what it says.
#[must_use]
pub fn encode(machine: &Machine, rule: &Rule) -> Option<UnwindRule> {
    if rule.is_thread_start() {
        // The stack pointer is always known.
        let base = place_of(machine, machine.stack_pointer)?;
        return Some(UnwindRule { kind: RULE_START, base, ..UnwindRule::default() });
    }
    let (kind, base, cfa_offset, cfa_add) = match (rule.kind, rule.cfa) {
        (FrameKind::Signal, _) => (RULE_SIGNAL, machine.stack_pointer, 0, 0),
        (FrameKind::Call, Cfa::Register { base, offset }) => (RULE_CALL, base, offset, 0),
        (FrameKind::Call, Cfa::Deref { base, offset, add }) => (RULE_DEREF, base, offset, add),
        (FrameKind::Stub { .. } | FrameKind::NewThread, _) => return None,
    };
    let mut saved = [SAME; WALK_REGISTERS];
    for (place, number) in saved.iter_mut().zip(machine.walk_places) {
        let register = *rule.registers.get(usize::from(number))?;
        let is_stack = usize::from(number) == machine.stack_pointer.index();
        *place = match (register, rule.kind) {
            // They leave with the CFA in the stack pointer, whatever is said of it, and with the CFA in no other register.
            (Saved::CfaPlus(0), _) if is_stack => SAME,
            (_, FrameKind::Call) if is_stack => return None,
            _ => offset(machine, rule, register)?,
        };
    }
    let in_link = machine.link.is_some_and(|link| rule.return_address == Saved::InRegister(link));
    if let Some(place) = saved.get_mut(PC) {
        *place = if in_link { SAME } else { word(offset(machine, rule, rule.return_address)?)? };
    }
    if in_link && kind == RULE_SIGNAL {
        return None;
    }
    let stack = saved.get(SP).copied()?;
    if (kind == RULE_SIGNAL) != word(stack).is_some() || stack == LOST {
        return None;
    }
    let words = saved.iter().copied().filter_map(word);
    // A leaf on a machine with a link register may have saved nothing.
    let (low, high) = (words.clone().min().unwrap_or(0), words.max().map_or(Some(0), |p| p.checked_add(8))?);
    let base = place_of(machine, base)?;
    Some(UnwindRule { cfa_offset, cfa_add, saved, low, high, kind, base, reserved: 0 })
}

/// A place in memory, as opposed to what else `UnwindRule::saved` can say.
fn word(saved: i16) -> Option<i16> {
    (saved != SAME && saved != LOST).then_some(saved)
}

/// Where a register is saved, from the rule's anchor.
fn offset(machine: &Machine, rule: &Rule, saved: Saved) -> Option<i16> {
    let from_anchor = |offset: i32| i16::try_from(offset).ok().and_then(word);
    match (saved, rule.kind, rule.cfa) {
        (Saved::Same, ..) => Some(SAME),
        (Saved::Lost, ..) => Some(LOST),
        // The anchor of a signal's frame is the stack pointer.
        (Saved::AtRegister { base, offset }, FrameKind::Signal, _) if base == machine.stack_pointer => {
            from_anchor(offset)
        }
        (_, FrameKind::Signal, _) => None,
        (Saved::AtCfa(offset), ..) => from_anchor(offset),
        (Saved::AtRegister { base, offset }, _, Cfa::Register { base: of_cfa, offset: cfa })
            if base == of_cfa =>
        {
            from_anchor(offset.checked_sub(cfa)?)
        }
        _ => None,
    }
}

/// A register's place among those of a walk.
fn place_of(machine: &Machine, register: Register) -> Option<u8> {
    let place = machine.walk_places.iter().position(|number| usize::from(*number) == register.index())?;
    u8::try_from(place).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::frame::{FrameKey, ProcessId};
    use crate::source::{MonotonicNs, UserContext, UserRegs};
    use crate::unwind::aarch64::AARCH64;
    use crate::unwind::finish::{Code, Limits, Step, walk_on};
    use crate::unwind::rule::Refusal;
    use crate::unwind::x86_64::X86_64;
    use ebpf_common::machine::aarch64::{X29, X30};
    use ebpf_common::machine::x86_64::RBX;
    use ebpf_common::walk;
    use proptest::prelude::{Just, Strategy, prop, prop_assert, prop_oneof, proptest};
    use std::sync::Arc;

    #[test]
    fn a_frameless_function_saves_its_return_address_only() {
        let rule = encode(&X86_64, &X86_64.frameless()).unwrap();
        assert_eq!((rule.kind, usize::from(rule.base), rule.cfa_offset), (RULE_CALL, SP, 8));
        assert_eq!((rule.saved[PC], rule.low, rule.high), (-8, -8, 0));
        assert!(rule.saved[..PC].iter().all(|place| *place == SAME));
    }

    #[test]
    fn what_is_saved_beside_the_base_register_is_counted_from_the_cfa() {
        let mut rule = X86_64.call(Cfa::Register { base: Register::RBP, offset: 16 });
        rule.registers[3] = Saved::AtRegister { base: Register::RBP, offset: -24 };
        rule.registers[6] = Saved::AtCfa(-16);
        let encoded = encode(&X86_64, &rule).unwrap();
        assert_eq!((encoded.saved[RBX], encoded.low, encoded.high), (-40, -40, 0));
        rule.registers[3] = Saved::AtRegister { base: Register::RSP, offset: 0 };
        assert_eq!(encode(&X86_64, &rule), None, "another base");
    }

    #[test]
    fn a_signal_frame_restores_the_stack_pointer_too() {
        let mut rule = X86_64.call(Cfa::Deref { base: Register::RSP, offset: 160, add: 0 });
        rule.kind = FrameKind::Signal;
        for number in [3, 6, 7, 12, 13, 14, 15] {
            rule.registers[number] =
                Saved::AtRegister { base: Register::RSP, offset: 40 + 8 * number as i32 };
        }
        rule.return_address = Saved::AtRegister { base: Register::RSP, offset: 168 };
        let encoded = encode(&X86_64, &rule).unwrap();
        assert_eq!((encoded.kind, encoded.saved[SP], encoded.low, encoded.high), (RULE_SIGNAL, 96, 64, 176));
        rule.registers[7] = Saved::CfaPlus(0);
        assert_eq!(encode(&X86_64, &rule), None, "where rsp is must be known without the CFA");
    }

    #[test]
    fn the_cfa_goes_to_the_stack_pointer_and_to_no_other_register() {
        for machine in [&X86_64, &AARCH64] {
            for register in [machine.frame_pointer, machine.stack_pointer] {
                let is_stack = register == machine.stack_pointer;
                for saved in [Saved::CfaPlus(0), Saved::CfaPlus(8), Saved::Same, Saved::AtCfa(-16)] {
                    let mut rule = machine.call(Cfa::Register { base: machine.frame_pointer, offset: 16 });
                    rule.return_address = Saved::AtCfa(-8);
                    rule.registers[register.index()] = saved;
                    let can = is_stack == (saved == Saved::CfaPlus(0)) && saved != Saved::CfaPlus(8);
                    assert_eq!(encode(machine, &rule).is_some(), can, "{rule:?}");
                }
            }
        }
    }

    #[test]
    fn what_the_probes_cannot_do_is_refused() {
        let stub = Rule { kind: FrameKind::Stub { words: 2 }, ..X86_64.frameless() };
        let far = X86_64.call(Cfa::Register { base: Register::at(10).unwrap(), offset: 8 });
        let elsewhere = Rule { return_address: Saved::InRegister(Register::RBX), ..X86_64.frameless() };
        for rule in [stub, far, elsewhere] {
            assert_eq!(encode(&X86_64, &rule), None, "{rule:?}");
        }
        assert_eq!(encode(&X86_64, &X86_64.thread_start()).unwrap().kind, RULE_START);
    }

    #[test]
    fn a_leaf_with_its_return_address_in_the_link_register_needs_no_memory() {
        let leaf = encode(&AARCH64, &AARCH64.frameless()).unwrap();
        assert_eq!((leaf.kind, usize::from(leaf.base), leaf.cfa_offset), (RULE_CALL, SP, 0));
        assert_eq!((leaf.saved[PC], leaf.low, leaf.high), (SAME, 0, 0));
        assert_eq!(leaf.saved[X30], LOST);
    }

    #[test]
    fn a_frame_record_is_counted_from_the_cfa_too() {
        let mut rule = AARCH64.call(Cfa::Register { base: Register::X29, offset: 96 });
        rule.return_address = Saved::AtRegister { base: Register::X29, offset: 8 };
        rule.registers[Register::X29.index()] = Saved::AtRegister { base: Register::X29, offset: 0 };
        let encoded = encode(&AARCH64, &rule).unwrap();
        assert_eq!((usize::from(encoded.base), encoded.saved[X29], encoded.saved[PC]), (X29, -96, -88));
        assert_eq!((encoded.low, encoded.high), (-96, -80));
    }

    /// A program's stack, of one page.
    #[derive(Clone, Debug)]
    struct Stack(Vec<u64>);

    const STACK: u64 = 0x7ffc_0000_0000;
    const WORDS: usize = 512;

    impl walk::Memory for Stack {
        unsafe fn read(&self, into: *mut u8, bytes: u32, from: u64) -> bool {
            let all: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
            let from = from.checked_sub(STACK).and_then(|at| all.get(usize::try_from(at).ok()?..));
            let Some(from) = from.and_then(|rest| rest.get(..bytes as usize)) else { return false };
            // SAFETY: the caller's promise, and as many bytes are there.
            unsafe { into.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            true
        }
    }

    /// The rules of the frames, in their order.
    struct Program(std::vec::IntoIter<Rule>);

    impl Code for Program {
        fn step(&mut self, pc: u64, _exact: bool) -> Step {
            let frame = FrameKey::Unknown { process: ProcessId(0), address: pc };
            Step { frame, rule: self.0.next().map(Arc::new).ok_or(Refusal::NoEntry) }
        }
        fn walked(&mut self, _pc: u64, _exact: bool, _time: MonotonicNs) -> Option<FrameKey> {
            None
        }
        fn is_executable(&mut self, _address: u64) -> bool {
            true
        }
        fn follows_call(&mut self, _address: u64) -> bool {
            false
        }
    }

    fn any_rule() -> impl Strategy<Value = Rule> {
        let base = prop::sample::select(vec![Register::RSP, Register::RBP, Register::RBX]);
        let cfa = prop_oneof![
            4 => (base.clone(), 0..24i32).prop_map(|(base, n)| Cfa::Register { base, offset: n * 8 }),
            1 => (base, 0..24i32, -4..4i32).prop_map(|(base, n, add)| Cfa::Deref { base, offset: n * 8, add: add * 8 }),
        ];
        let place = (-20..4i32).prop_map(|n| n * 8);
        let saved = prop_oneof![
            4 => place.clone().prop_map(Saved::AtCfa),
            2 => Just(Saved::Same),
            1 => Just(Saved::Lost),
            1 => Just(Saved::CfaPlus(0)),
            1 => place.prop_map(Saved::CfaPlus),
        ];
        (
            cfa,
            [saved.clone(), saved.clone(), saved],
            prop_oneof![4 => Just(-8), 1 => (-3..1i32).prop_map(|n| n * 8)],
        )
            .prop_map(|(cfa, [rbx, rbp, rsp], at)| {
                let mut rule = X86_64.call(cfa);
                rule.return_address = Saved::AtCfa(at);
                rule.registers[Register::RBX.index()] = rbx;
                rule.registers[Register::RBP.index()] = rbp;
                if matches!(rsp, Saved::CfaPlus(_) | Saved::Same) {
                    rule.registers[Register::RSP.index()] = rsp;
                }
                rule
            })
    }

    proptest! {
        /// Frames the probes have left are those the finisher finds, whatever the rules.
        #[test]
        fn both_walkers_go_the_same_way(
            rules in prop::collection::vec(any_rule(), 1..6),
            words in prop::collection::vec(0..WORDS as u64, WORDS),
            registers in [0..WORDS as u64, 0..WORDS as u64, 0..64u64],
        ) {
            let address = |word: u64| STACK + 8 * word;
            let stack = Stack(words.into_iter().map(address).collect());
            let [rbx, rbp, rsp] = registers.map(address);
            let mut regs = UserRegs { ip: 0x40_0000, known: u16::MAX, ..UserRegs::default() };
            regs.gpr[Register::RBX.index()] = rbx;
            regs.gpr[Register::RBP.index()] = rbp;
            regs.gpr[Register::RSP.index()] = rsp;

            let mut walk = Box::new(ebpf_common::key::Walk {
                registers: [0; WALK_REGISTERS],
                known: 0,
                exact: 0,
                window_start: 0,
                window_bytes: 0,
                frames: 0,
                space: 0,
                end: 0,
                window: [0; 2 * ebpf_common::limits::WALK_WINDOW_BYTES as usize + 8],
            });
            let mut begin = [0; WALK_REGISTERS];
            for (to, place) in begin.iter_mut().zip(X86_64.walk_places) {
                *to = regs.gpr[usize::from(place)];
            }
            begin[PC] = regs.ip;
            walk::begin(&mut walk, begin, 1);
            let mut left = vec![regs.ip];
            for rule in &rules {
                let Some(rule) = encode(&X86_64, rule) else { break };
                if !walk::leave(&mut walk, &rule, &ebpf_common::machine::x86_64::X86_64, &stack) {
                    break;
                }
                left.push(walk.registers[PC] - 1);
            }

            let from = usize::try_from((rsp - STACK) / 8).unwrap();
            let copy = stack.0[from..].iter().flat_map(|word| word.to_le_bytes()).collect();
            let context = UserContext { walk: None, regs, stack: copy, limited: false };
            let limits = Limits { max_frames: 64, address_mask: u64::MAX };
            let done = walk_on(&X86_64, &context, &mut Program(rules.into_iter()), limits);
            // What it guesses comes behind all that the probes have left.
            let found: Vec<u64> = done.frames.iter().filter_map(|frame| match frame {
                FrameKey::Unknown { address, .. } => Some(*address),
                _ => None,
            }).collect();
            prop_assert!(found.starts_with(&left), "{found:x?} {left:x?}");
        }
    }
}
