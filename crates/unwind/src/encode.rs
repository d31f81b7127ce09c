//! Rules in the form the probes take: those that practically all code has. The others stay with the
//! user-space unwinder.

use super::machine::TargetMachine;
use super::rule::{Cfa, FrameKind, Register, Rule, Saved};
use ebpf_common::rule::{
    LOST, PC, RULE_CALL, RULE_DEREF, RULE_SIGNAL, RULE_START, SAME, SP, UnwindRule, WALK_REGISTERS,
};

/// The probes' form of a rule of `machine`; `None` when they cannot do what it says.
#[must_use]
pub fn encode(machine: &TargetMachine, rule: &Rule) -> Option<UnwindRule> {
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
    for (place, number) in saved.iter_mut().zip(machine.registers.walk_places) {
        let register = *rule.registers.get(usize::from(number))?;
        let is_stack = usize::from(number) == machine.stack_pointer.index();
        *place = match (register, rule.kind) {
            // They leave with the CFA in the stack pointer, whatever is said of it, and with the
            // CFA in no other register.
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
    let (low, high) =
        (words.clone().min().unwrap_or(0), words.max().map_or(Some(0), |p| p.checked_add(8))?);
    let base = place_of(machine, base)?;
    Some(UnwindRule { cfa_offset, cfa_add, saved, low, high, kind, base, reserved: 0 })
}

/// A place in memory, as opposed to what else `UnwindRule::saved` can say.
fn word(saved: i16) -> Option<i16> {
    (saved != SAME && saved != LOST).then_some(saved)
}

/// Where a register is saved, from the rule's anchor.
fn offset(machine: &TargetMachine, rule: &Rule, saved: Saved) -> Option<i16> {
    // The probes read whole words at multiples of eight bytes.
    let from_anchor =
        |offset: i32| i16::try_from(offset).ok().filter(|offset| offset % 8 == 0).and_then(word);
    match (saved, rule.kind, rule.cfa) {
        (Saved::Same, ..) => Some(SAME),
        (Saved::Lost, ..) => Some(LOST),
        // The anchor of a signal's frame is the stack pointer.
        (Saved::AtRegister { base, offset }, FrameKind::Signal, _)
            if base == machine.stack_pointer =>
        {
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
fn place_of(machine: &TargetMachine, register: Register) -> Option<u8> {
    let place = machine
        .registers
        .walk_places
        .iter()
        .position(|number| usize::from(*number) == register.index())?;
    u8::try_from(place).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aarch64::AARCH64;
    use crate::x86_64::X86_64;
    use ebpf_common::machine::aarch64::{X29, X30};
    use ebpf_common::machine::x86_64::RBX;

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
        assert_eq!(
            (encoded.kind, encoded.saved[SP], encoded.low, encoded.high),
            (RULE_SIGNAL, 96, 64, 176)
        );
        rule.registers[7] = Saved::CfaPlus(0);
        assert_eq!(encode(&X86_64, &rule), None, "where rsp is must be known without the CFA");
    }

    #[test]
    fn the_cfa_goes_to_the_stack_pointer_and_to_no_other_register() {
        for machine in [&X86_64, &AARCH64] {
            for register in [machine.frame_pointer, machine.stack_pointer] {
                let is_stack = register == machine.stack_pointer;
                for saved in [Saved::CfaPlus(0), Saved::CfaPlus(8), Saved::Same, Saved::AtCfa(-16)]
                {
                    let mut rule =
                        machine.call(Cfa::Register { base: machine.frame_pointer, offset: 16 });
                    rule.return_address = Saved::AtCfa(-8);
                    rule.registers[register.index()] = saved;
                    let can =
                        is_stack == (saved == Saved::CfaPlus(0)) && saved != Saved::CfaPlus(8);
                    assert_eq!(encode(machine, &rule).is_some(), can, "{rule:?}");
                }
            }
        }
    }

    #[test]
    fn what_the_probes_cannot_do_is_refused() {
        let stub = Rule { kind: FrameKind::Stub { words: 2 }, ..X86_64.frameless() };
        let far = X86_64.call(Cfa::Register { base: Register::at(10).unwrap(), offset: 8 });
        let mut askew = X86_64.frameless();
        askew.registers[3] = Saved::AtCfa(-20);
        let elsewhere =
            Rule { return_address: Saved::InRegister(Register::RBX), ..X86_64.frameless() };
        for rule in [stub, far, askew, elsewhere] {
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
        rule.registers[Register::X29.index()] =
            Saved::AtRegister { base: Register::X29, offset: 0 };
        let encoded = encode(&AARCH64, &rule).unwrap();
        assert_eq!(
            (usize::from(encoded.base), encoded.saved[X29], encoded.saved[PC]),
            (X29, -96, -88)
        );
        assert_eq!((encoded.low, encoded.high), (-96, -80));
    }
}
