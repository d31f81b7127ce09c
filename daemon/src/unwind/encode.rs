//! Rules in the form the probes take: those that practically all code has. The others stay with the finisher.

use super::rule::{Cfa, FrameKind, Register, Rule, Saved};
use ebpf_common::rule::{
    DWARF_NUMBERS, LOST, RIP, RSP, RULE_CALL, RULE_DEREF, RULE_SIGNAL, RULE_START, SAME, UnwindRule,
    WALK_REGISTERS,
};

/// The probes' form of a rule; `None` when they cannot do what it says.
#[must_use]
pub fn encode(rule: &Rule) -> Option<UnwindRule> {
    if rule.is_thread_start() {
        // rsp is always known.
        let base = place_of(Register::RSP)?;
        return Some(UnwindRule { kind: RULE_START, base, ..UnwindRule::default() });
    }
    let (kind, base, cfa_offset, cfa_add) = match (rule.kind, rule.cfa) {
        (FrameKind::Signal, _) => (RULE_SIGNAL, Register::RSP, 0, 0),
        (FrameKind::Call, Cfa::Register { base, offset }) => (RULE_CALL, base, offset, 0),
        (FrameKind::Call, Cfa::Deref { base, offset, add }) => (RULE_DEREF, base, offset, add),
        (FrameKind::Stub { .. }, _) => return None,
    };
    let mut saved = [SAME; WALK_REGISTERS];
    for (place, number) in saved.iter_mut().zip(DWARF_NUMBERS) {
        *place = offset(rule, *rule.registers.get(usize::from(number))?)?;
    }
    if let Some(place) = saved.get_mut(RIP) {
        *place = word(offset(rule, rule.return_address)?)?;
    }
    let stack = saved.get(RSP).copied()?;
    if (kind == RULE_SIGNAL) != word(stack).is_some() || stack == LOST {
        return None;
    }
    let words = saved.iter().copied().filter_map(word);
    let (low, high) = (words.clone().min()?, words.max()?.checked_add(8)?);
    Some(UnwindRule { cfa_offset, cfa_add, saved, low, high, kind, base: place_of(base)?, reserved: 0 })
}

/// A place in memory, as opposed to what else `UnwindRule::saved` can say.
fn word(saved: i16) -> Option<i16> {
    (saved != SAME && saved != LOST).then_some(saved)
}

/// Where a register is saved, from the rule's anchor.
fn offset(rule: &Rule, saved: Saved) -> Option<i16> {
    let from_anchor = |offset: i32| i16::try_from(offset).ok().and_then(word);
    match (saved, rule.kind, rule.cfa) {
        (Saved::Same, ..) => Some(SAME),
        (Saved::Lost, ..) => Some(LOST),
        // The anchor of a signal's frame is rsp.
        (Saved::AtRegister { base: Register::RSP, offset }, FrameKind::Signal, _) => from_anchor(offset),
        (_, FrameKind::Signal, _) => None,
        (Saved::AtCfa(offset), ..) => from_anchor(offset),
        (Saved::AtRegister { base, offset }, _, Cfa::Register { base: of_cfa, offset: cfa })
            if base == of_cfa =>
        {
            from_anchor(offset.checked_sub(cfa)?)
        }
        (Saved::CfaPlus(0), ..) => Some(SAME),
        _ => None,
    }
}

/// A register's place among those of a walk.
fn place_of(register: Register) -> Option<u8> {
    let place = DWARF_NUMBERS.iter().position(|number| usize::from(*number) == register.index())?;
    u8::try_from(place).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebpf_common::rule::RBX;

    #[test]
    fn a_frameless_function_saves_its_return_address_only() {
        let rule = encode(&Rule::frameless()).unwrap();
        assert_eq!((rule.kind, usize::from(rule.base), rule.cfa_offset), (RULE_CALL, RSP, 8));
        assert_eq!((rule.saved[RIP], rule.low, rule.high), (-8, -8, 0));
        assert!(rule.saved[..RIP].iter().all(|place| *place == SAME));
    }

    #[test]
    fn what_is_saved_beside_the_base_register_is_counted_from_the_cfa() {
        let mut rule = Rule::call(Cfa::Register { base: Register::RBP, offset: 16 });
        rule.registers[3] = Saved::AtRegister { base: Register::RBP, offset: -24 };
        rule.registers[6] = Saved::AtCfa(-16);
        let encoded = encode(&rule).unwrap();
        assert_eq!((encoded.saved[RBX], encoded.low, encoded.high), (-40, -40, 0));
        rule.registers[3] = Saved::AtRegister { base: Register::RSP, offset: 0 };
        assert_eq!(encode(&rule), None, "another base");
    }

    #[test]
    fn a_signal_frame_restores_the_stack_pointer_too() {
        let mut rule = Rule::call(Cfa::Deref { base: Register::RSP, offset: 160, add: 0 });
        rule.kind = FrameKind::Signal;
        for number in [3, 6, 7, 12, 13, 14, 15] {
            rule.registers[number] =
                Saved::AtRegister { base: Register::RSP, offset: 40 + 8 * number as i32 };
        }
        rule.return_address = Saved::AtRegister { base: Register::RSP, offset: 168 };
        let encoded = encode(&rule).unwrap();
        assert_eq!((encoded.kind, encoded.saved[RSP], encoded.low, encoded.high), (RULE_SIGNAL, 96, 64, 176));
        rule.registers[7] = Saved::CfaPlus(0);
        assert_eq!(encode(&rule), None, "where rsp is must be known without the CFA");
    }

    #[test]
    fn what_the_probes_cannot_do_is_refused() {
        let stub = Rule { kind: FrameKind::Stub { words: 2 }, ..Rule::frameless() };
        let far = Rule::call(Cfa::Register { base: Register::from_dwarf(10).unwrap(), offset: 8 });
        let elsewhere = Rule { return_address: Saved::InRegister(Register::RBX), ..Rule::frameless() };
        for rule in [stub, far, elsewhere] {
            assert_eq!(encode(&rule), None, "{rule:?}");
        }
        assert_eq!(encode(&Rule::thread_start()).unwrap().kind, RULE_START);
    }
}
