//! (machine code, address) → rule where unwind data is silent: native epilogues, stubs, the return
//! from a signal handler. Looks at a few instructions, never follows a jump. Encodings: Arm
//! Architecture Reference Manual, C4.1.

use super::AARCH64;
use crate::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use std::ops::Range;

/// Most instructions an epilogue has: ten callee-saved registers and eight of floating point in
/// pairs, the stack, the signature, the end.
const MAX_EPILOGUE: usize = 18;
/// Most instructions followed in a stub.
const MAX_STUB: usize = 48;
/// Register number 31: sp as a base, and as the target of some instructions.
const SP: u32 = 31;

/// sp in terms of the registers at the frame, and what the instructions passed so far restored.
struct Replay {
    base: Register,
    offset: i64,
    rule: Rule,
}

impl Replay {
    fn new() -> Self {
        Self { base: Register::SP, offset: 0, rule: AARCH64.frameless() }
    }

    /// A load of a general register from sp + `at`.
    fn load(&mut self, register: u32, at: i64) -> Option<()> {
        let Some(register) = Register::x(register) else { return Some(()) };
        let offset = i32::try_from(self.offset.checked_add(at)?).ok()?;
        let saved = Saved::AtRegister { base: self.base, offset };
        if register == Register::X30 {
            self.rule.return_address = saved;
        } else if AARCH64.registers.is_callee_saved(register) {
            self.rule.registers[register.index()] = saved;
        }
        Some(())
    }

    fn move_by(&mut self, bytes: i64) -> Option<()> {
        self.offset = self.offset.checked_add(bytes)?;
        Some(())
    }

    fn finish(mut self) -> Option<Rule> {
        self.rule.cfa = Cfa::Register { base: self.base, offset: i32::try_from(self.offset).ok()? };
        Some(self.rule)
    }
}

/// An instruction as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    /// `ldp` of general registers (or of others, which are none) off sp at an offset, then sp
    /// moves.
    Load { registers: [Option<u32>; 2], at: i64, then: i64 },
    /// sp = sp + n.
    Move(i64),
    /// sp = x29 + n.
    FromFrame(i64),
    /// `ret`, with or without authentication.
    Return,
    /// A jump by a register.
    JumpRegister,
    /// A jump by a distance.
    Jump(i64),
    /// Changes neither sp nor x30.
    None,
    /// Anything else.
    Other,
}

fn bits(word: u32, from: u32, count: u32) -> u32 {
    word >> from & ((1 << count) - 1)
}

/// A field as a signed number.
fn signed(word: u32, from: u32, count: u32) -> i64 {
    let value = i64::from(bits(word, from, count));
    if value >> (count - 1) != 0 { value - (1 << count) } else { value }
}

fn effect(word: u32) -> Effect {
    let (target, base) = (bits(word, 0, 5), bits(word, 5, 5));
    // Jumps and calls.
    if word & 0xffff_fc1f == 0xd65f_0000 || word == 0xd65f_0bff || word == 0xd65f_0fff {
        return Effect::Return;
    }
    if word & 0xffff_fc1f == 0xd61f_0000 || word & 0xfeff_f800 == 0xd61f_0800 {
        return Effect::JumpRegister;
    }
    if word >> 26 == 0b00_0101 {
        return Effect::Jump(signed(word, 0, 26) * 4);
    }
    if is_call(word) {
        return Effect::Other;
    }
    // Loads off sp.
    if base == SP {
        let pair =
            |bytes: i64| (signed(word, 15, 7) * bytes, [Some(target), Some(bits(word, 10, 5))]);
        match word >> 22 {
            0x2a3 => {
                let (then, registers) = pair(8);
                return Effect::Load { registers, at: 0, then };
            }
            0x2a5 => {
                let (at, registers) = pair(8);
                return Effect::Load { registers, at, then: 0 };
            }
            // Pairs of d registers.
            0x1b3 => return Effect::Load { registers: [None; 2], at: 0, then: pair(8).0 },
            0x1b5 => return Effect::None,
            0x3e5 => {
                let at = i64::from(bits(word, 10, 12)) * 8;
                return Effect::Load { registers: [Some(target), None], at, then: 0 };
            }
            _ if word >> 21 == 0x7c2 && bits(word, 10, 2) == 1 => {
                let then = signed(word, 12, 9);
                return Effect::Load { registers: [Some(target), None], at: 0, then };
            }
            _ => {}
        }
    }
    // add or sub of an immediate to sp.
    if target == SP && bits(word, 23, 6) == 0b10_0010 && bits(word, 29, 1) == 0 && word >> 31 == 1 {
        let immediate = i64::from(bits(word, 10, 12)) << (12 * bits(word, 22, 1));
        let immediate = if bits(word, 30, 1) == 1 { -immediate } else { immediate };
        return match base {
            SP => Effect::Move(immediate),
            29 => Effect::FromFrame(immediate),
            _ => Effect::Other,
        };
    }
    if changes_frame(word, target, base) { Effect::Other } else { Effect::None }
}

fn is_call(word: u32) -> bool {
    word >> 26 == 0b10_0101
        || word & 0xffff_fc1f == 0xd63f_0000
        || word & 0xfeff_f800 == 0xd63f_0800
}

/// Whether an instruction that is none of the above may change sp or x30; yes where it is not plain
/// that it does not.
fn changes_frame(word: u32, target: u32, base: u32) -> bool {
    if word & 0x0a00_0000 == 0x0800_0000 {
        // Loads and stores; those of pairs, and those that write their base back.
        let pair = word & 0x3a00_0000 == 0x2800_0000;
        let writes_back = if pair {
            bits(word, 23, 1) == 1
        } else {
            word & 0x3b20_0000 == 0x3800_0000 && bits(word, 10, 1) == 1
        };
        return target == 30
            || (pair && bits(word, 10, 5) == 30)
            || (writes_back && matches!(base, 30 | SP));
    }
    if word & 0x1c00_0000 == 0x1000_0000 {
        // Immediates: 31 is sp in what sets no flags.
        let sets_flags = match bits(word, 23, 3) {
            0b010 => bits(word, 29, 1) == 1,
            0b100 => bits(word, 29, 2) == 3,
            _ => false,
        };
        return target == 30 || (target == SP && !sets_flags);
    }
    if word & 0x0e00_0000 == 0x0a00_0000 {
        // Registers: 31 is sp only in additions of an extended one.
        return target == 30 || (target == SP && word & 0x3fe0_0000 == 0x0b20_0000);
    }
    false
}

fn words(code: &[u8]) -> impl Iterator<Item = u32> {
    code.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word))
}

/// Applies an instruction that gives back stack, or none; `None` for others.
fn adjust(effect: Effect, replay: &mut Replay) -> Option<()> {
    match effect {
        Effect::Load { registers, at, then } => {
            for (register, place) in registers.into_iter().zip([at, at + 8]) {
                register.map_or(Some(()), |register| replay.load(register, place))?;
            }
            replay.move_by(then)
        }
        Effect::Move(bytes) => replay.move_by(bytes),
        Effect::FromFrame(bytes) => {
            // Once x29 is the caller's again it says nothing of this frame.
            let x29 = replay.rule.registers[Register::X29.index()];
            (x29 == Saved::Same).then(|| (replay.base, replay.offset) = (Register::X29, bytes))
        }
        _ => None,
    }
}

/// The rule when `code`, the bytes at `address`, is inside an epilogue of the function that takes
/// `function`; `None` when it is not.
#[must_use]
pub fn epilogue(code: &[u8], address: u64, function: &Range<u64>) -> Option<Rule> {
    let mut replay = Replay::new();
    for (i, word) in words(code).take(MAX_EPILOGUE).enumerate() {
        match effect(word) {
            Effect::Return => return replay.finish(),
            Effect::Jump(distance) => {
                let at = address.wrapping_add(i as u64 * 4).wrapping_add_signed(distance);
                return if function.contains(&at) && at != function.start {
                    None
                } else {
                    replay.finish()
                };
            }
            // A signature checked, a landing pad, a nop: all hints.
            Effect::None if word & 0xffff_f01f == 0xd503_201f => {}
            effect => adjust(effect, &mut replay)?,
        }
    }
    None
}

/// The rule for a stub whose instruction at `address` is about to run: it runs straight to a jump,
/// with the caller in x30.
///
/// # Errors
/// [`RuleRefusal::Unsupported`] when it does not.
pub fn stub(code: &[u8], _address: u64) -> Result<Rule, RuleRefusal> {
    let mut replay = Replay::new();
    for word in words(code).take(MAX_STUB) {
        match effect(word) {
            Effect::Return | Effect::Jump(_) | Effect::JumpRegister => {
                return replay.finish().ok_or(RuleRefusal::Unsupported);
            }
            Effect::None => {}
            effect => adjust(effect, &mut replay).ok_or(RuleRefusal::Unsupported)?,
        }
    }
    Err(RuleRefusal::Unsupported)
}

/// True when `code`, the bytes that end at a candidate return address, ends with a call
/// instruction.
#[must_use]
pub fn ends_with_call(code: &[u8]) -> bool {
    code.last_chunk::<4>().is_some_and(|word| is_call(u32::from_le_bytes(*word)))
}

/// The rule when `code`, the bytes at the next instruction, is `mov x8, #139; svc #0`:
/// `rt_sigreturn`, by which every handler returns.
///
/// Call frame information of the vDSO's says only where the frame record is, and leaves it to the
/// unwinder to know the instructions (arch/arm64/kernel/vdso/sigreturn.S); musl's has none. At sp
/// is `struct rt_sigframe` (arch/arm64/kernel/signal.c): a siginfo of 128 bytes, then the ucontext,
/// whose `mcontext.regs` begin 184 bytes further, followed by sp and pc.
#[must_use]
pub fn signal_return(code: &[u8]) -> Option<Rule> {
    const MOV_X8_139: u32 = 0xd280_1168;
    const SVC_0: u32 = 0xd400_0001;
    const REGS: i32 = 128 + 184;
    let mut words = words(code);
    if words.next()? != MOV_X8_139 || words.next()? != SVC_0 {
        return None;
    }
    let at = |number: i32| Saved::AtRegister { base: Register::SP, offset: REGS + 8 * number };
    let mut rule = AARCH64.frameless();
    rule.kind = FrameKind::Signal;
    for (place, number) in (16..32).enumerate() {
        rule.registers[place] = at(number);
    }
    rule.return_address = at(32);
    Some(rule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, proptest};

    const FUNCTION: Range<u64> = 0x1000..0x2000;

    fn code(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn at(words: &[u32]) -> Option<Rule> {
        epilogue(&code(words), 0x1800, &FUNCTION)
    }

    fn saved(base: Register, offset: i32) -> Saved {
        Saved::AtRegister { base, offset }
    }

    #[test]
    fn each_instruction_of_an_epilogue_gives_the_same_caller() {
        // ldp x19, x20, [sp, #16]; ldp x29, x30, [sp], #48; autiasp; ret
        let words = [0xa941_53f3, 0xa8c3_7bfd, 0xd503_23bf, 0xd65f_03c0];
        let whole = at(&words).unwrap();
        assert_eq!(whole.cfa, Cfa::Register { base: Register::SP, offset: 48 });
        assert_eq!(whole.return_address, saved(Register::SP, 8));
        assert_eq!(whole.registers[Register::X29.index()], saved(Register::SP, 0));
        assert_eq!(whole.registers[3], saved(Register::SP, 16), "x19");
        let after = at(&words[2..]).unwrap();
        assert_eq!(after, AARCH64.frameless());
        // add sp, sp, #32; ldr x30, [sp], #16; b out of the function
        let tail = at(&[0x9100_83ff, 0xf841_07fe, 0x1400_1000]).unwrap();
        assert_eq!(tail.cfa, Cfa::Register { base: Register::SP, offset: 48 });
        assert_eq!(tail.return_address, saved(Register::SP, 32));
        // mov sp, x29; ldp x29, x30, [sp], #16; ret
        let frame = at(&[0x9100_03bf, 0xa8c1_7bfd, 0xd65f_03c0]).unwrap();
        assert_eq!(frame.cfa, Cfa::Register { base: Register::X29, offset: 16 });
    }

    #[test]
    fn ordinary_code_is_no_epilogue() {
        assert_eq!(at(&[0xaa00_03e1, 0xd65f_03c0]), None, "mov x1, x0; ret");
        assert_eq!(at(&[0x1400_0004]), None, "a jump inside the function");
        assert_eq!(at(&[0xa8c1_7bfd]), None, "no end");
    }

    #[test]
    fn stubs_leave_the_caller_in_the_link_register() {
        // runtime src/coreclr/vm/arm64/thunktemplates.S: ldr x10, [pc, …]; ldr x12, [pc, …]; br x10
        let precode = code(&[0x5802_000a, 0x5802_002c, 0xd61f_0140]);
        assert_eq!(stub(&precode, 0), Ok(AARCH64.frameless()));
        // CallCountingStub: ldr x9; ldrh w10, [x9]; subs w10, w10, #1; strh w10, [x9]; b.eq; ldr
        // x9; br x9
        let counting = [
            0x5802_0009,
            0x7940_012a,
            0x7100_054a,
            0x7900_012a,
            0x5400_0060,
            0x5802_0009,
            0xd61f_0120,
        ];
        assert_eq!(stub(&code(&counting), 0), Ok(AARCH64.frameless()));
        assert_eq!(
            stub(&code(&[0x9400_0001, 0xd61f_0140]), 0),
            Err(RuleRefusal::Unsupported),
            "a call"
        );
        assert_eq!(
            stub(&code(&[0xaa00_03fe, 0xd61f_0140]), 0),
            Err(RuleRefusal::Unsupported),
            "mov x30, x0"
        );
        assert_eq!(
            stub(&code(&[0xa9bf_7bfd, 0xd61f_0140]), 0),
            Err(RuleRefusal::Unsupported),
            "stp …, [sp, #-16]!"
        );
        assert_eq!(stub(&code(&[0xd503_201f; 4]), 0), Err(RuleRefusal::Unsupported), "no end");
    }

    #[test]
    fn calls_are_recognised() {
        assert!(ends_with_call(&code(&[0, 0x97ff_fff0])) && ends_with_call(&code(&[0xd63f_0100])));
        assert!(
            ends_with_call(&code(&[0xd63f_0bf0 & !0x400]))
                && !ends_with_call(&code(&[0xd61f_0100]))
        );
        assert!(!ends_with_call(&[1, 2]));
    }

    #[test]
    fn the_return_from_a_handler_restores_every_register() {
        let rule = signal_return(&code(&[0xd280_1168, 0xd400_0001])).unwrap();
        assert_eq!(rule.kind, FrameKind::Signal);
        assert_eq!(rule.return_address, saved(Register::SP, 568));
        assert_eq!(rule.registers[Register::X30.index()], saved(Register::SP, 552));
        assert_eq!(rule.registers[Register::SP.index()], saved(Register::SP, 560));
        assert_eq!(signal_return(&code(&[0xd280_1168, 0xd400_0021])), None);
    }

    proptest! {
        #[test]
        fn random_code_gives_an_answer(code in any::<Vec<u8>>(), address in any::<u64>()) {
            std::hint::black_box(epilogue(&code, address, &FUNCTION));
            stub(&code, address).ok();
            std::hint::black_box((ends_with_call(&code), signal_return(&code)));
        }
    }
}
