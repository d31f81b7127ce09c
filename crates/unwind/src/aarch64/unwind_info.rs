//! Unwind information of Windows on ARM64 → rule, for code the runtime's compilers made: JIT and
//! ReadyToRun.
//!
//! The format is Microsoft's "ARM64 exception handling", as the runtime reads it (dotnet/runtime
//! src/coreclr/unwinder/arm64). A RUNTIME_FUNCTION is a begin and a word: the place of a record
//! (`.xdata`) when its lowest two bits are clear, else the record itself, packed. A record has the
//! function's length, so that entries have an end, and codes that undo the prologue, last
//! instruction first, one code per instruction; epilogues are ranges whose instructions have codes
//! too. A frame inside either is undone by the codes of the instructions that have run, or have not
//! yet. So no instruction has to be looked at. The JIT writes records in full only (jit
//! unwindarm64.cpp); packed ones are of other compilers.

use super::AARCH64;
use crate::managed::{FunctionOffset, ReadAt, RuntimeFunction, u32_at};
use crate::rule::{Cfa, Register, Rule, RuleRefusal, Saved};

/// Bytes of the fixed part with its extension.
const HEADER_BYTES: usize = 8;
/// `end`; and `end_c`, after which the codes of the function this is a part of follow.
const END: u8 = 0xe4;
const END_CHAINED: u8 = 0xe5;
const NOP: u8 = 0xe3;
const PAC: u8 = 0xfc;
const SET_FP: u8 = 0xe1;

/// The fixed part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct XdataHeader {
    /// Instructions of the function.
    length: u32,
    /// Words that list epilogues.
    epilogues: u32,
    /// With a single epilogue, at the function's end: its first code.
    single: Option<usize>,
    /// Bytes of codes.
    codes: usize,
    /// Where the list of epilogues begins.
    at: usize,
}

impl XdataHeader {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let word = u32_at(bytes, 0)?;
        if word >> 18 & 3 != 0 {
            return None;
        }
        let (mut epilogues, mut words, mut at) = (word >> 22 & 31, word >> 27, 4);
        if epilogues == 0 && words == 0 {
            let extension = u32_at(bytes, 4)?;
            (epilogues, words, at) = (extension & 0xffff, extension >> 16 & 0xff, 8);
        }
        let single = (word >> 21 & 1 == 1).then_some(epilogues as usize);
        if single.is_some() {
            epilogues = 0;
        }
        Some(Self { length: word & 0x3_ffff, epilogues, single, codes: words as usize * 4, at })
    }

    fn codes_at(&self) -> usize {
        self.at + self.epilogues as usize * 4
    }
}

/// Decodes a RUNTIME_FUNCTION; its end is in what it points to.
pub(super) fn entry(bytes: &[u8], read: ReadAt<'_>) -> Option<RuntimeFunction> {
    let (begin, unwind) = (u32_at(bytes, 0)?, u32_at(bytes, 4)?);
    let instructions = match unwind & 3 {
        0 => {
            let mut word = [0u8; 4];
            if read(unwind, &mut word) < word.len() {
                return None;
            }
            u32::from_le_bytes(word) & 0x3_ffff
        }
        1 | 2 => unwind >> 2 & 0x7ff,
        // A part of another function that has no prologue of its own: no compiler of the runtime's
        // makes them.
        _ => return None,
    };
    Some(RuntimeFunction { begin, end: begin.checked_add(instructions * 4)?, unwind })
}

/// Reads a record without what handlers need; nothing for a packed one.
pub(super) fn read(at: u32, read: ReadAt<'_>) -> Option<Vec<u8>> {
    if at & 3 != 0 {
        return Some(Vec::new());
    }
    let mut bytes = vec![0u8; HEADER_BYTES];
    // A short record at the end of memory may have no second word.
    let got = read(at, &mut bytes);
    bytes.truncate(got);
    let header = XdataHeader::decode(&bytes)?;
    bytes.resize(header.codes_at() + header.codes, 0);
    (read(at, &mut bytes) == bytes.len()).then_some(bytes)
}

/// True when the record `info` can be a JIT-compiled function's.
pub(super) fn is_plausible(info: &[u8], function: RuntimeFunction) -> bool {
    let codes = |header: XdataHeader| {
        info.get(header.codes_at()..).is_some_and(|codes| codes.contains(&END))
    };
    XdataHeader::decode(info)
        .is_some_and(|h| h.length * 4 == function.end.wrapping_sub(function.begin) && codes(h))
}

/// The rule at a place in a function. Epilogues need no code, and whether the place is exact says
/// nothing more.
pub(super) fn rule_at(
    at: FunctionOffset,
    info: &dyn Fn(u32) -> Option<Vec<u8>>,
    _code: ReadAt<'_>,
) -> Result<Rule, RuleRefusal> {
    let instruction = at.offset / 4;
    if at.function.unwind & 3 != 0 {
        let packed = expand(at.function.unwind).ok_or(RuleRefusal::Malformed)?;
        let has_prologue = at.function.unwind & 3 == 1;
        let prologue = if has_prologue { instructions(&packed.prologue) } else { 0 };
        if instruction < prologue {
            return undo(&packed.prologue, prologue - instruction);
        }
        let length = at.function.unwind >> 2 & 0x7ff;
        let start = length.saturating_sub(instructions(&packed.epilogue) + 1);
        return undo(&packed.epilogue, instruction.saturating_sub(start));
    }
    let bytes = info(at.function.unwind).ok_or(RuleRefusal::Unreadable)?;
    let header = XdataHeader::decode(&bytes).ok_or(RuleRefusal::Malformed)?;
    let codes = bytes.get(header.codes_at()..).and_then(|codes| codes.get(..header.codes));
    let codes = codes.ok_or(RuleRefusal::Malformed)?;
    let prologue = instructions(codes);
    if instruction < prologue {
        return undo(codes, prologue - instruction);
    }
    let within = |start: u32, first: usize| {
        let codes = codes.get(first..)?;
        // The codes are those of the instructions before the return.
        let done = instruction.checked_sub(start)?;
        (done <= instructions(codes)).then_some((codes, done))
    };
    let epilogue = match header.single {
        Some(first) => {
            let size = codes.get(first..).map_or(0, instructions) + 1;
            header.length.checked_sub(size).and_then(|start| within(start, first))
        }
        None => (0..header.epilogues as usize).find_map(|i| {
            let scope = u32_at(&bytes, header.at + i * 4)?;
            within(scope & 0x3_ffff, (scope >> 22) as usize)
        }),
    };
    match epilogue {
        Some((codes, done)) => undo(codes, done),
        None => undo(codes, 0),
    }
}

/// Bytes of a code.
fn size(code: u8) -> usize {
    match code {
        0xc0..=0xdf | 0xe2 | 0xf8 => 2,
        0xe7 | 0xf9 => 3,
        0xe0 | 0xfa => 4,
        0xfb => 5,
        _ => 1,
    }
}

/// Instructions that the codes up to the next end stand for.
fn instructions(codes: &[u8]) -> u32 {
    let (mut at, mut count) = (0, 0);
    while let Some(&code) = codes.get(at)
        && code & 0xfe != END
    {
        at += size(code);
        count += 1;
    }
    count
}

/// Frame state while codes are undone: where sp would be, and what was found saved.
struct Undo {
    base: Register,
    offset: i64,
    rule: Rule,
    /// Pairs that follow the next one saved.
    next_pairs: u32,
}

/// Undoes `codes` without the first `skip`.
fn undo(codes: &[u8], skip: u32) -> Result<Rule, RuleRefusal> {
    let mut undo = Undo { base: Register::SP, offset: 0, rule: AARCH64.frameless(), next_pairs: 0 };
    let (mut at, mut left) = (0, skip);
    while let Some(&code) = codes.get(at) {
        let operands = codes.get(at..at + size(code)).ok_or(RuleRefusal::Malformed)?;
        at += size(code);
        if code == END {
            break;
        }
        if left > 0 && code != END_CHAINED {
            left -= 1;
            continue;
        }
        left = 0;
        undo.apply(operands)?;
    }
    undo.finish()
}

impl Undo {
    fn apply(&mut self, code: &[u8]) -> Result<(), RuleRefusal> {
        let byte = |i: usize| code.get(i).copied().map_or(0, i64::from);
        let two = byte(0) << 8 | byte(1);
        // Number of a register, and an offset in words, in the two bytes of most codes.
        let (register, words) = ((two >> 6 & 15) + 19, two & 63);
        match code.first().copied().unwrap_or(END) {
            small @ 0..=0x1f => self.offset += i64::from(small) * 16,
            pair @ 0x20..=0x3f => self.save_pair(19, 0, i64::from(pair & 31) * 8)?,
            frame @ 0x40..=0x7f => self.save_pair(29, i64::from(frame & 63) * 8, 0)?,
            frame @ 0x80..=0xbf => self.save_pair(29, 0, (i64::from(frame & 63) + 1) * 8)?,
            0xc0..=0xc7 => self.offset += (two & 0x7ff) * 16,
            0xc8..=0xcb => self.save_pair(register, words * 8, 0)?,
            0xcc..=0xcf => self.save_pair(register, 0, (words + 1) * 8)?,
            0xd0..=0xd3 => self.save(register, words * 8)?,
            0xd4..=0xd5 => {
                self.save((two >> 5 & 15) + 19, 0)?;
                self.offset += ((two & 31) + 1) * 8;
            }
            0xd6..=0xd7 => {
                self.save(19 + 2 * (two >> 6 & 7), words * 8)?;
                self.save(30, words * 8 + 8)?;
            }
            // Registers of floating point: never an address, but some move sp.
            0xd8 | 0xd9 | 0xdc | 0xdd => self.next_pairs = 0,
            0xda | 0xdb => {
                self.next_pairs = 0;
                self.offset += (words + 1) * 8;
            }
            0xde => self.offset += ((two & 31) + 1) * 8,
            0xe0 => self.offset += (byte(1) << 16 | byte(2) << 8 | byte(3)) * 16,
            SET_FP => self.leave_by_frame(0)?,
            0xe2 => self.leave_by_frame(-byte(1) * 8)?,
            0xe6 => self.next_pairs += 1,
            0xe7 => self.save_any(byte(1), byte(2))?,
            NOP | END_CHAINED | 0xf8..=0xff => {}
            _ => return Err(RuleRefusal::Unsupported),
        }
        Ok(())
    }

    fn leave_by_frame(&mut self, offset: i64) -> Result<(), RuleRefusal> {
        // Once x29 is the caller's again it says nothing of this frame.
        if self.rule.registers[Register::X29.index()] != Saved::Same {
            return Err(RuleRefusal::Unsupported);
        }
        (self.base, self.offset) = (Register::X29, offset);
        Ok(())
    }

    /// Two registers and those of the pairs to follow, at sp + `at`; then sp moves.
    fn save_pair(&mut self, first: i64, at: i64, then: i64) -> Result<(), RuleRefusal> {
        let count = i64::from(2 + 2 * std::mem::take(&mut self.next_pairs));
        for i in 0..count {
            self.save(first + i, at + i * 8)?;
        }
        self.offset += then;
        Ok(())
    }

    fn save(&mut self, number: i64, at: i64) -> Result<(), RuleRefusal> {
        let register =
            u32::try_from(number).ok().and_then(Register::x).ok_or(RuleRefusal::Malformed)?;
        let offset = i32::try_from(self.offset + at).map_err(|_| RuleRefusal::Unsupported)?;
        // The first save undone is the last made; the one undone last holds the caller's value, and
        // wins.
        let saved = Saved::AtRegister { base: self.base, offset };
        if register == Register::X30 {
            self.rule.return_address = saved;
        } else {
            self.rule.registers[register.index()] = saved;
        }
        Ok(())
    }

    /// `save_any_reg`: 0pxrrrrr ffoooooo.
    fn save_any(&mut self, first: i64, second: i64) -> Result<(), RuleRefusal> {
        let (pair, before, number) = (first >> 6 & 1 == 1, first >> 5 & 1 == 1, first & 31);
        let (class, words) = (second >> 6, second & 63);
        if first >> 7 != 0 || class == 3 || (!pair && self.next_pairs != 0) {
            return Err(RuleRefusal::Malformed);
        }
        let unit = if before || pair || class == 2 { 16 } else { 8 };
        let (at, then) = if before { (0, (words + 1) * unit) } else { (words * unit, 0) };
        match (class, pair) {
            (0, true) => return self.save_pair(number, at, then),
            (0, false) => self.save(number, at)?,
            _ => self.next_pairs = 0,
        }
        self.offset += then;
        Ok(())
    }

    fn finish(mut self) -> Result<Rule, RuleRefusal> {
        let offset = i32::try_from(self.offset).map_err(|_| RuleRefusal::Unsupported)?;
        self.rule.cfa = Cfa::Register { base: self.base, offset };
        Ok(self.rule)
    }
}

/// The codes a packed record stands for.
#[derive(Debug, PartialEq, Eq)]
struct Expanded {
    prologue: Vec<u8>,
    epilogue: Vec<u8>,
}

/// Writes a packed record out: the prologue it describes is always of one form, and the epilogue
/// mirrors it without the parameters' homes.
fn expand(packed: u32) -> Option<Expanded> {
    let field = |from: u32, count: u32| packed >> from & ((1 << count) - 1);
    let (floats, integers, homes, chain) =
        (field(13, 3), field(16, 4), field(20, 1) == 1, field(21, 2));
    let frame_bytes = field(23, 9) * 16;
    let saves_link = chain == 1;
    let float_count = if floats == 0 { 0 } else { floats + 1 };
    let integer_bytes = integers * 8 + if saves_link { 8 } else { 0 };
    let save_bytes =
        (integer_bytes + float_count * 8 + if homes { 64 } else { 0 }).next_multiple_of(16);
    let local_bytes = frame_bytes.checked_sub(save_bytes)?;
    if integers > 10 {
        return None;
    }
    // In the order of the prologue; the first to save makes the room.
    let mut codes: Vec<Vec<u8>> = Vec::new();
    let mut room = Some(save_bytes).filter(|bytes| *bytes > 0);
    if chain == 2 {
        codes.push(vec![PAC]);
    }
    let mut link_saved = !saves_link;
    let mut register = 0;
    while register < integers {
        let pair = register + 1 < integers;
        match (pair, room.take()) {
            (true, Some(bytes)) => codes.push(two(0xcc, register << 6 | (bytes / 8 - 1))),
            (true, None) => codes.push(two(0xc8, register << 6 | register)),
            (false, room) if saves_link => {
                codes.extend(room.map(allocate));
                codes.push(two(0xd6, ((register / 2) << 6) | register));
                link_saved = true;
            }
            (false, Some(bytes)) => codes.push(two(0xd4, register << 5 | (bytes / 8 - 1))),
            (false, None) => codes.push(two(0xd0, register << 6 | register)),
        }
        register += 1 + u32::from(pair);
    }
    if !link_saved {
        codes.push(match room.take() {
            Some(bytes) => two(0xd4, 11 << 5 | (bytes / 8 - 1)),
            None => two(0xd0, 11 << 6 | integers),
        });
    }
    let mut float = 0;
    while float < float_count {
        let pair = float + 1 < float_count;
        let words = integer_bytes / 8 + float;
        codes.push(match (pair, room.take()) {
            (true, Some(bytes)) => two(0xda, float << 6 | (bytes / 8 - 1)),
            (true, None) => two(0xd8, float << 6 | words),
            (false, _) => two(0xdc, float << 6 | words),
        });
        float += 1 + u32::from(pair);
    }
    if homes {
        let first = room.take().map_or_else(|| vec![NOP], allocate);
        codes.push(first);
        codes.extend(std::iter::repeat_n(vec![NOP], 3));
    }
    if chain >= 2 {
        if local_bytes == 0 {
            return None;
        } else if local_bytes <= 512 {
            codes.push(vec![0x80 | u8::try_from(local_bytes / 8 - 1).ok()?]);
        } else {
            codes.push(allocate(local_bytes));
            codes.push(vec![0x40]);
        }
        codes.push(vec![SET_FP]);
    } else if local_bytes > 0 {
        codes.push(allocate(local_bytes));
    }
    let undone = |codes: &mut dyn Iterator<Item = &Vec<u8>>| {
        codes.flatten().copied().chain([END]).collect::<Vec<u8>>()
    };
    Some(Expanded {
        prologue: undone(&mut codes.iter().rev()),
        epilogue: undone(&mut codes.iter().rev().filter(|code| **code != [NOP])),
    })
}

/// A code of two bytes: an operation and up to ten bits.
fn two(operation: u8, operand: u32) -> Vec<u8> {
    let [low, high, ..] = operand.to_le_bytes();
    vec![operation | high, low]
}

fn allocate(bytes: u32) -> Vec<u8> {
    let [low, high, ..] = (bytes / 16).to_le_bytes();
    if bytes < 512 { vec![low] } else { vec![0xc0 | high, low] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, proptest};

    const X29: usize = 13;
    const UNWIND: u32 = 0x1000;

    /// A record of one epilogue at the function's end that undoes what the prologue did.
    fn record(instructions: u32, codes: &[u8]) -> Vec<u8> {
        let mut codes = codes.to_vec();
        codes.resize(codes.len().next_multiple_of(4), NOP);
        let word = instructions | 1 << 21 | u32::try_from(codes.len() / 4).unwrap() << 27;
        word.to_le_bytes().into_iter().chain(codes).collect()
    }

    fn at_of(unwind: u32, offset: u32) -> FunctionOffset {
        FunctionOffset {
            function: RuntimeFunction { begin: 0, end: 0x1000, unwind },
            offset,
            exact: true,
            base: 0,
        }
    }

    fn at(info: &[u8], offset: u32) -> Result<Rule, RuleRefusal> {
        rule_at(at_of(UNWIND, offset), &|place| (place == UNWIND).then(|| info.to_vec()), &|_, _| 0)
    }

    fn packed(word: u32, offset: u32) -> Result<Rule, RuleRefusal> {
        rule_at(at_of(word, offset), &|_| None, &|_, _| 0)
    }

    fn cfa(base: Register, offset: i32) -> Cfa {
        Cfa::Register { base, offset }
    }

    fn saved(base: Register, offset: i32) -> Saved {
        Saved::AtRegister { base, offset }
    }

    #[test]
    fn prologue_and_epilogue_are_undone_as_far_as_they_ran() {
        // stp x29, x30, [sp, #-48]!; stp x19, x20, [sp, #32]; mov x29, sp; …; ldp x19, x20; ldp
        // x29, x30, [sp], #48; ret
        let info = record(10, &[SET_FP, 0xc8, 0x04, 0x85, END]);
        assert_eq!(at(&info, 0), Ok(AARCH64.frameless()));
        let pushed = at(&info, 4).unwrap();
        assert_eq!(
            (pushed.cfa, pushed.return_address),
            (cfa(Register::SP, 48), saved(Register::SP, 8))
        );
        assert_eq!(
            (pushed.registers[X29], pushed.registers[3]),
            (saved(Register::SP, 0), Saved::Same)
        );
        let body = at(&info, 12).unwrap();
        assert_eq!(
            (body.cfa, body.return_address),
            (cfa(Register::X29, 48), saved(Register::X29, 8))
        );
        assert_eq!(body.registers[3], saved(Register::X29, 32), "x19");
        // The epilogue is four instructions: mov sp, x29 has a code too.
        assert_eq!(at(&info, 24).unwrap().cfa, cfa(Register::X29, 48));
        assert_eq!(at(&info, 28).unwrap().cfa, cfa(Register::SP, 48));
        assert_eq!(at(&info, 32).unwrap().registers[3], Saved::Same);
        assert_eq!(at(&info, 36), Ok(AARCH64.frameless()), "at the return");
    }

    #[test]
    fn epilogues_are_found_by_their_list() {
        // Two scopes, at instructions 5 and 8, both with the codes from byte 1 on; alloc 32,
        // save_fplr_x 16.
        let mut info = (12_u32 | 2 << 22 | 1 << 27).to_le_bytes().to_vec();
        for start in [5u32, 8] {
            info.extend((start | 1 << 22).to_le_bytes());
        }
        info.extend([0x02, 0x81, END, NOP]);
        assert_eq!(at(&info, 4 * 4).unwrap().cfa, cfa(Register::SP, 48), "the body");
        assert_eq!(
            at(&info, 4 * 5).unwrap().cfa,
            cfa(Register::SP, 16),
            "the room is given back already"
        );
        assert_eq!(at(&info, 4 * 6), Ok(AARCH64.frameless()), "the return");
        assert_eq!(at(&info, 4 * 7).unwrap().cfa, cfa(Register::SP, 48));
        assert_eq!(at(&info, 4 * 9), Ok(AARCH64.frameless()));
    }

    #[test]
    fn every_code_that_saves_or_moves_is_understood() {
        let after = |codes: &[u8]| undo(codes, 0).unwrap();
        let x19 = |rule: &Rule| rule.registers[3];
        assert_eq!(after(&[0xc1, 0xe7, END]).cfa, cfa(Register::SP, 7792), "alloc_m");
        assert_eq!(after(&[0xe0, 0, 0x10, 0, END]).cfa, cfa(Register::SP, 65_536), "alloc_l");
        let pre = after(&[0x24, END]);
        assert_eq!(
            (pre.cfa, x19(&pre)),
            (cfa(Register::SP, 32), saved(Register::SP, 0)),
            "save_r19r20_x"
        );
        let single = after(&[0xd0, 0x03, END]);
        assert_eq!(
            (single.cfa, x19(&single)),
            (cfa(Register::SP, 0), saved(Register::SP, 24)),
            "save_reg"
        );
        let link = after(&[0xd5, 0x61, END]);
        assert_eq!(
            (link.cfa, link.return_address),
            (cfa(Register::SP, 16), saved(Register::SP, 0)),
            "str x30"
        );
        let lr = after(&[0xd6, 0x02, END]);
        assert_eq!(
            (x19(&lr), lr.return_address),
            (saved(Register::SP, 16), saved(Register::SP, 24)),
            "lrpair"
        );
        let frame = after(&[0xe2, 4, 0x84, END]);
        assert_eq!(
            (frame.cfa, frame.registers[X29]),
            (cfa(Register::X29, 8), saved(Register::X29, -32)),
            "add_fp"
        );
        let next = after(&[0xe6, 0xc8, 0x02, END]);
        assert_eq!(next.registers[6], saved(Register::SP, 40), "save_next_pair: x22");
        assert_eq!(
            after(&[0xda, 0x03, 0xde, 0x01, END]).cfa,
            cfa(Register::SP, 48),
            "floating point"
        );
        let any = after(&[0xe7, 0x73, 0x01, END]);
        assert_eq!(
            (any.cfa, x19(&any)),
            (cfa(Register::SP, 32), saved(Register::SP, 0)),
            "save_any_reg"
        );
        assert_eq!(undo(&[0xe8, END], 0), Err(RuleRefusal::Unsupported), "a trap frame");
        assert_eq!(undo(&[0xc8], 0), Err(RuleRefusal::Malformed));
        assert_eq!(
            undo(&[0x40, SET_FP, END], 0),
            Err(RuleRefusal::Unsupported),
            "x29 is the caller's already"
        );
    }

    #[test]
    fn a_packed_record_is_written_out_as_the_runtime_does() {
        // The example of the runtime's unwinder.cpp: RegF 7, RegI 10, H 1, CR 2, 8000 bytes.
        let word = 1 | 200 << 2 | 7 << 13 | 10 << 16 | 1 << 20 | 2 << 21 | (8000 / 16) << 23;
        let expanded = expand(word).unwrap();
        let full = [
            0xe1, 0x40, 0xc1, 0xe7, 0xe3, 0xe3, 0xe3, 0xe3, 0xd9, 0x90, 0xd9, 0x0e, 0xd8, 0x8c,
            0xd8, 0x0a, 0xca, 0x08, 0xc9, 0x86, 0xc9, 0x04, 0xc8, 0x82, 0xcc, 0x19, 0xfc, 0xe4,
        ];
        assert_eq!(expanded.prologue, full);
        assert_eq!(
            expanded.epilogue,
            full.iter().copied().filter(|c| *c != NOP).collect::<Vec<u8>>()
        );
        let body = packed(word, 4 * 100).unwrap();
        assert_eq!(
            (body.cfa, body.registers[3]),
            (cfa(Register::X29, 8000), saved(Register::X29, 7792))
        );
        assert_eq!(packed(word, 0), Ok(AARCH64.frameless()));
        assert_eq!(packed(word, 4 * 199), Ok(AARCH64.frameless()), "the return");
    }

    #[test]
    fn packed_leaf_frames_keep_or_save_the_link_register() {
        // CR 0, no registers, 64 bytes: sub sp, sp, #64.
        let leaf = packed(1 | 20 << 2 | 4 << 23, 40).unwrap();
        assert_eq!(
            (leaf.cfa, leaf.return_address),
            (cfa(Register::SP, 64), Saved::InRegister(Register::X30))
        );
        // CR 1, x19: x19 and x30 as a pair.
        let pair = packed(1 | 20 << 2 | 1 << 16 | 1 << 21 | 1 << 23, 40).unwrap();
        assert_eq!(
            (pair.cfa, pair.return_address),
            (cfa(Register::SP, 16), saved(Register::SP, 8))
        );
        // CR 1, no registers: x30 alone.
        let alone = packed(1 | 20 << 2 | 1 << 21 | 1 << 23, 40).unwrap();
        assert_eq!(
            (alone.cfa, alone.return_address),
            (cfa(Register::SP, 16), saved(Register::SP, 0))
        );
        assert_eq!(
            packed(1 | 20 << 2 | 10 << 16, 40),
            Err(RuleRefusal::Malformed),
            "less room than it saves"
        );
    }

    #[test]
    fn an_entry_ends_where_its_record_says() {
        let info = record(10, &[0x81, END]);
        let read = |at: u32, into: &mut [u8]| {
            let there = usize::try_from(at)
                .ok()
                .and_then(|at| info.get(at.checked_sub(16)?..))
                .unwrap_or_default();
            let length = there.len().min(into.len());
            into[..length].copy_from_slice(&there[..length]);
            length
        };
        let entry_of = |unwind: u32| {
            let bytes: Vec<u8> = [0x40u32, unwind].iter().flat_map(|w| w.to_le_bytes()).collect();
            entry(&bytes, &read)
        };
        assert_eq!(entry_of(16), Some(RuntimeFunction { begin: 0x40, end: 0x68, unwind: 16 }));
        assert_eq!(entry_of(1 | 5 << 2).map(|f| f.end), Some(0x54));
        assert_eq!(entry_of(3), None);
        assert_eq!(super::read(16, &read), Some(info.clone()));
        assert!(is_plausible(&info, entry_of(16).unwrap()));
        assert!(!is_plausible(&info, RuntimeFunction { begin: 0, end: 8, unwind: 16 }));
    }

    proptest! {
        #[test]
        fn random_records_give_a_rule_or_a_refusal(
            info in any::<Vec<u8>>(),
            offset in any::<u32>(),
        ) {
            at(&info, offset).ok();
            super::read(UNWIND, &|_, into| {
                let n = into.len().min(info.len());
                into[..n].copy_from_slice(&info[..n]);
                n
            });
        }

        #[test]
        fn random_packed_records_give_a_rule_or_a_refusal(
            word in any::<u32>(),
            offset in 0u32..1 << 18,
        ) {
            packed(word | 1, offset).ok();
        }
    }
}
