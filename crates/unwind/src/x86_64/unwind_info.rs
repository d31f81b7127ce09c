//! UNWIND_INFO (Windows x64, version 1) → rule, for code the runtime's compilers made: JIT and
//! ReadyToRun.
//!
//! The format is Microsoft's "x64 exception handling"; the Unix runtime adds operation 11
//! (`UWOP_SET_FPREG_LARGE`, dotnet/runtime src/coreclr/inc/win64unwind.h). Codes describe the
//! prologue only, last instruction first, each with the offset of the end of its instruction, so a
//! frame inside the prologue is undone by the codes at or below its offset. Code compiled by
//! on-stack replacement states its tier-0 parent's frame as codes at offset 0 (jit
//! codegenxarch.cpp, `genOSRRecordTier0CalleeSavedRegistersAndFrame`): one rule leads past both, so
//! the method is seen once. Version 1 says nothing about epilogues: `epilogue.rs` does.

use super::X86_64;
use super::epilogue::epilogue;
use crate::managed::{CODE_BYTES, FunctionOffset, ReadAt, RuntimeFunction, u32_at};
use crate::rule::{Cfa, Register, Rule, RuleRefusal, Saved};

/// Bytes of the fixed part.
const HEADER_BYTES: usize = 4;
/// Bytes of a RUNTIME_FUNCTION: begin, end, unwind data.
pub const FUNCTION_BYTES: usize = 12;
/// Longest chain of UNWIND_INFOs that is followed.
pub const MAX_CHAIN: usize = 8;
/// `UNW_FLAG_CHAININFO`.
const FLAG_CHAINED: u8 = 4;

/// Decodes a RUNTIME_FUNCTION.
pub(super) fn decode(bytes: &[u8]) -> Option<RuntimeFunction> {
    Some(RuntimeFunction {
        begin: u32_at(bytes, 0)?,
        end: u32_at(bytes, 4)?,
        unwind: u32_at(bytes, 8)?,
    })
}

/// Reads one UNWIND_INFO: the fixed part first, then as much as that says.
pub(super) fn read(at: u32, read: ReadAt<'_>) -> Option<Vec<u8>> {
    let mut info = vec![0u8; HEADER_BYTES];
    if read(at, &mut info) < HEADER_BYTES {
        return None;
    }
    let needed = UnwindInfoHeader::decode(&info).map_or(HEADER_BYTES, |h| h.needed_bytes());
    info.resize(needed, 0);
    (read(at, &mut info) == needed).then_some(info)
}

/// True when `info` can belong to `function`.
pub(super) fn is_plausible(info: &[u8], function: RuntimeFunction) -> bool {
    UnwindInfoHeader::decode(info)
        .is_some_and(|h| u32::from(h.prologue) <= function.end.saturating_sub(function.begin))
}

/// The rule at a place in a function: by the instructions in an epilogue, else by its UNWIND_INFO.
pub(super) fn rule_at(
    at: FunctionOffset,
    info: &dyn Fn(u32) -> Option<Vec<u8>>,
    code: ReadAt<'_>,
) -> Result<Rule, RuleRefusal> {
    let FunctionOffset { function, offset, exact, base } = at;
    if exact {
        let header = info(function.unwind)
            .and_then(|i| UnwindInfoHeader::decode(&i))
            .ok_or(RuleRefusal::Malformed)?;
        if offset >= u32::from(header.prologue) {
            let place = |offset: u32| base.wrapping_add(u64::from(offset));
            let range = place(function.begin)..place(function.end);
            let from = function.begin.checked_add(offset).ok_or(RuleRefusal::NoEntry)?;
            let mut bytes = [0u8; CODE_BYTES];
            let length = code(from, &mut bytes);
            if length == 0 {
                return Err(RuleRefusal::Unreadable);
            }
            if let Some(rule) =
                epilogue(bytes.get(..length).unwrap_or_default(), place(from), &range)
            {
                return Ok(rule);
            }
        }
    }
    rule(function, offset, info)
}

/// The fixed part of an UNWIND_INFO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnwindInfoHeader {
    /// Flags: 1 and 2 have a handler, 4 chained.
    pub flags: u8,
    /// Length of the prologue in bytes.
    pub prologue: u8,
    /// Number of 16-bit slots that follow.
    pub slots: u8,
    frame_register: Option<Register>,
    frame_offset: i64,
}

impl UnwindInfoHeader {
    /// Decodes and checks the first four bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let &[first, prologue, slots, frame] = bytes.first_chunk::<4>()?;
        let (version, flags) = (first & 7, first >> 3);
        if version != 1 || flags > 7 || (flags & FLAG_CHAINED != 0 && flags != FLAG_CHAINED) {
            return None;
        }
        let frame_register = match frame & 15 {
            0 => None,
            n => Register::from_machine(n),
        };
        Some(Self {
            flags,
            prologue,
            slots,
            frame_register,
            frame_offset: i64::from(frame >> 4) * 16,
        })
    }

    /// Bytes to read so that [`rule`] has all it needs.
    #[must_use]
    pub(crate) fn needed_bytes(&self) -> usize {
        let chained = if self.flags == FLAG_CHAINED { FUNCTION_BYTES } else { 0 };
        HEADER_BYTES + (usize::from(self.slots) + usize::from(self.slots & 1)) * 2 + chained
    }
}

/// Frame state while codes are undone: where rsp would be, and what was found saved.
struct Undo {
    base: Register,
    offset: i64,
    rule: Rule,
}

/// The rule at `offset` bytes into a function. `read` gives the bytes of the UNWIND_INFO at an
/// offset from the base, fewer where memory ends; it is called again for chained ones.
///
/// # Errors
/// [`RuleRefusal`] for what is unreadable, malformed or of no use outside Windows (machine frames,
/// other versions).
pub fn rule(
    function: RuntimeFunction,
    offset: u32,
    read: impl Fn(u32) -> Option<Vec<u8>>,
) -> Result<Rule, RuleRefusal> {
    let mut undo = Undo { base: Register::RSP, offset: 0, rule: X86_64.frameless() };
    let mut unwind = function.unwind;
    // Codes of a chained parent have all been executed: its prologue ran before the function was
    // entered.
    let mut reached = offset;
    for _ in 0..MAX_CHAIN {
        let bytes = read(unwind).ok_or(RuleRefusal::Unreadable)?;
        let header = UnwindInfoHeader::decode(&bytes).ok_or(RuleRefusal::Malformed)?;
        undo.codes(&header, &bytes, reached)?;
        if header.flags != FLAG_CHAINED {
            return undo.finish();
        }
        let parent = bytes.get(header.needed_bytes() - FUNCTION_BYTES..).and_then(decode);
        unwind = parent.ok_or(RuleRefusal::Malformed)?.unwind;
        reached = u32::MAX;
    }
    Err(RuleRefusal::Malformed)
}

impl Undo {
    fn codes(
        &mut self,
        header: &UnwindInfoHeader,
        bytes: &[u8],
        reached: u32,
    ) -> Result<(), RuleRefusal> {
        let all = bytes.get(HEADER_BYTES..).ok_or(RuleRefusal::Malformed)?;
        let slots = all.get(..usize::from(header.slots) * 2).ok_or(RuleRefusal::Malformed)?;
        let slot = |i: usize| {
            slots.get(i * 2..i * 2 + 2).map(|s| [s[0], s[1]]).ok_or(RuleRefusal::Malformed)
        };
        let wide = |i: usize| u32_at(slots, i * 2).map(i64::from).ok_or(RuleRefusal::Malformed);
        let short = |i: usize| slot(i).map(|s| i64::from(u16::from_le_bytes(s)));
        let count = usize::from(header.slots);

        // Saves are stated from the base of the fixed frame: the frame register's once it is set,
        // else rsp.
        let frame = self.frame_base(header, slots, reached)?;
        let mut i = 0;
        while i < count {
            let [at, operation] = slot(i)?;
            let (operation, info) = (operation & 15, operation >> 4);
            let used = match (operation, info) {
                (0 | 2 | 3 | 10, _) => 1,
                (1, 0) | (4 | 8, _) => 2,
                (1, 1) | (5 | 9 | 11, _) => 3,
                _ => return Err(RuleRefusal::Unsupported),
            };
            if u32::from(at) <= reached {
                match operation {
                    0 => {
                        self.save(info, self.base, self.offset)?;
                        self.offset += 8;
                    }
                    1 => self.offset += if info == 0 { short(i + 1)? * 8 } else { wide(i + 1)? },
                    2 => self.offset += i64::from(info) * 8 + 8,
                    3 | 11 => {
                        let below =
                            if operation == 3 { header.frame_offset } else { wide(i + 1)? * 16 };
                        self.base = header.frame_register.ok_or(RuleRefusal::Malformed)?;
                        self.offset = -below;
                    }
                    4 | 5 => {
                        let at = if operation == 4 { short(i + 1)? * 8 } else { wide(i + 1)? };
                        self.save(info, frame.0, frame.1 + at)?;
                    }
                    8 | 9 => {} // an XMM register: never an address
                    _ => return Err(RuleRefusal::Unsupported),
                }
            }
            i += used;
        }
        Ok(())
    }

    fn frame_base(
        &self,
        header: &UnwindInfoHeader,
        slots: &[u8],
        reached: u32,
    ) -> Result<(Register, i64), RuleRefusal> {
        let Some(register) = header.frame_register else { return Ok((self.base, self.offset)) };
        let set = slots.chunks_exact(2).enumerate().find(|(_, s)| matches!(s[1] & 15, 3 | 11));
        match set {
            Some((_, slot)) if u32::from(slot[0]) > reached => Ok((self.base, self.offset)),
            Some((i, slot)) if slot[1] & 15 == 11 => {
                let below = u32_at(slots, i * 2 + 2).ok_or(RuleRefusal::Malformed)?;
                Ok((register, -i64::from(below) * 16))
            }
            Some(_) => Ok((register, -header.frame_offset)),
            None => Ok((self.base, self.offset)),
        }
    }

    fn save(&mut self, machine: u8, base: Register, offset: i64) -> Result<(), RuleRefusal> {
        let register = Register::from_machine(machine).ok_or(RuleRefusal::Malformed)?;
        let offset = i32::try_from(offset).map_err(|_| RuleRefusal::Unsupported)?;
        // The first save undone is the last made; the one undone last holds the caller's value, and
        // wins.
        self.rule.registers[register.index()] = Saved::AtRegister { base, offset };
        Ok(())
    }

    fn finish(mut self) -> Result<Rule, RuleRefusal> {
        let offset = i32::try_from(self.offset + 8).map_err(|_| RuleRefusal::Unsupported)?;
        self.rule.cfa = Cfa::Register { base: self.base, offset };
        self.rule.registers[Register::RSP.index()] = Saved::CfaPlus(0);
        Ok(self.rule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, proptest};

    const FUNCTION: RuntimeFunction = RuntimeFunction { begin: 0x100, end: 0x200, unwind: 0x1000 };
    const RBP: usize = 6;

    fn at(info: &[u8], offset: u32) -> Result<Rule, RuleRefusal> {
        rule(FUNCTION, offset, |unwind| (unwind == 0x1000).then(|| info.to_vec()))
    }

    fn rsp(offset: i32) -> Cfa {
        Cfa::Register { base: Register::RSP, offset }
    }

    #[test]
    fn a_tier_0_prologue_is_undone_as_far_as_it_ran() {
        // @5 alloc 64, @1 push rbp
        let info = [0x19, 5, 2, 0, 5, 0x72, 1, 0x50];
        assert_eq!(at(&info, 0).unwrap(), X86_64.frameless());
        let pushed = at(&info, 1).unwrap();
        assert_eq!(
            (pushed.cfa, pushed.registers[RBP]),
            (rsp(16), Saved::AtRegister { base: Register::RSP, offset: 0 })
        );
        let body = at(&info, 5).unwrap();
        assert_eq!(
            (body.cfa, body.registers[RBP]),
            (rsp(80), Saved::AtRegister { base: Register::RSP, offset: 64 })
        );
    }

    #[test]
    fn an_rsp_frame_of_one_word_keeps_rbp() {
        let body = at(&[0x19, 4, 1, 0, 4, 0x02], 9).unwrap();
        assert_eq!((body.cfa, body.registers[RBP]), (rsp(16), Saved::Same));
    }

    #[test]
    fn codes_at_offset_0_hold_from_the_first_byte() {
        // @4 alloc 16; @0 alloc 32, @0 push rbp (the tier-0 frame of an OSR body)
        let info = [0x19, 4, 3, 0, 4, 0x12, 0, 0x32, 0, 0x50];
        assert_eq!(at(&info, 0).unwrap().cfa, rsp(48));
        assert_eq!(at(&info, 4).unwrap().cfa, rsp(64));
    }

    #[test]
    fn a_frame_register_replaces_rsp_once_it_is_set() {
        // @10 rbp = rsp + 32, @5 alloc 48, @1 push rbp: with localloc rsp moves afterwards
        let info = [0x19, 10, 3, 0x25, 10, 0x03, 5, 0x52, 1, 0x50];
        assert_eq!(at(&info, 5).unwrap().cfa, rsp(64));
        assert_eq!(
            at(&info, 10).unwrap().cfa,
            Cfa::Register { base: Register::RBP, offset: -32 + 48 + 8 + 8 }
        );
    }

    #[test]
    fn a_chained_part_has_its_parents_whole_frame() {
        let chained = [0x21, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x00, 0x20, 0, 0];
        let parent = [0x19, 5, 2, 0, 5, 0x72, 1, 0x50];
        let found = rule(FUNCTION, 0, |unwind| {
            Some(if unwind == 0x1000 { chained.to_vec() } else { parent.to_vec() })
        });
        assert_eq!(found.unwrap().cfa, rsp(80));
    }

    #[test]
    fn an_endless_chain_is_refused() {
        let chained = [0x21, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x00, 0x10, 0, 0];
        assert_eq!(at(&chained, 0), Err(RuleRefusal::Malformed));
    }

    #[test]
    fn other_versions_and_machine_frames_are_refused() {
        assert_eq!(at(&[0x1a, 0, 0, 0], 0), Err(RuleRefusal::Malformed));
        assert_eq!(at(&[0x19, 0, 1, 0, 0, 0x0a], 0), Err(RuleRefusal::Unsupported));
    }

    proptest! {
        #[test]
        fn random_unwind_info_gives_a_rule_or_a_refusal(
            info in any::<Vec<u8>>(),
            offset in any::<u32>(),
        ) {
            rule(FUNCTION, offset, |_| Some(info.clone())).ok();
        }
    }
}
