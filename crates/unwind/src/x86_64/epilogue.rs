//! (machine code, address) → rule where unwind data is silent: epilogues of managed methods, and
//! runtime stubs that have no unwind data at all. Decodes a few instructions, never follows a jump.
//!
//! An epilogue, as the JIT writes it (jit codegenxarch.cpp, `genFnEpilog`): `vzeroupper`? then
//! `add rsp, n` or `lea rsp, [rbp±n]` or `mov rsp, rbp`, pops (a body compiled by on-stack
//! replacement has a second `add rsp, n` and pops for its tier-0 parent's frame), then `ret` or a
//! tail jump. A jump through a register ends an epilogue only with REX.W, the mark by which
//! unwinders tell it from a switch (jit emitxarch.cpp, `INS_tail_i_jmp`; Microsoft "x64 prolog and
//! epilog"). A stub (precode, call counting, dispatch, the copied write barrier) runs straight to a
//! jump or `ret`.

use super::X86_64;
use crate::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register as Machine};
use std::ops::Range;

/// Most instructions an epilogue has: two `add rsp`, six pops for each of two frames, `vzeroupper`,
/// the end.
const MAX_EPILOGUE: usize = 18;
/// Most instructions followed in a stub; the longest seen, a write barrier with card bundles, has
/// 30.
const MAX_STUB: usize = 48;

/// A stub pushes at most two words for the helper it jumps to (delay-load thunks of ReadyToRun
/// code, PLT entries).
const STUB_WORDS: u8 = 3;

/// rsp in terms of the registers at the frame, and what the instructions passed so far restored.
struct EpilogueReplay {
    base: Register,
    offset: i32,
    rule: Rule,
    /// A register that was popped holds the caller's value: it can no longer be a base.
    popped: [bool; 16],
}

impl EpilogueReplay {
    fn new() -> Self {
        Self { base: Register::RSP, offset: 0, rule: X86_64.frameless(), popped: [false; 16] }
    }

    fn move_by(&mut self, bytes: i64) -> Option<()> {
        self.offset = i64::from(self.offset).checked_add(bytes)?.try_into().ok()?;
        Some(())
    }

    fn move_to(&mut self, base: Register, offset: i64) -> Option<()> {
        if self.popped[base.index()] {
            return None;
        }
        if base == Register::RSP {
            return self.move_by(offset);
        }
        (self.base, self.offset) = (base, offset.try_into().ok()?);
        Some(())
    }

    fn pop(&mut self, register: Register) -> Option<()> {
        if register == Register::RSP {
            return None;
        }
        self.popped[register.index()] = true;
        if X86_64.registers.is_callee_saved(register) {
            self.rule.registers[register.index()] =
                Saved::AtRegister { base: self.base, offset: self.offset };
        }
        self.move_by(8)
    }

    fn finish(mut self, kind: FrameKind) -> Option<Rule> {
        self.rule.cfa = Cfa::Register { base: self.base, offset: self.offset.checked_add(8)? };
        self.rule.kind = kind;
        Some(self.rule)
    }
}

/// The rule when `code`, the bytes at `address`, is inside an epilogue of the function that takes
/// `function`; `None` when it is not.
#[must_use]
pub fn epilogue(code: &[u8], address: u64, function: &Range<u64>) -> Option<Rule> {
    let mut replay = EpilogueReplay::new();
    let mut undone = false;
    for instruction in instructions(code, address).take(MAX_EPILOGUE) {
        match instruction.mnemonic() {
            Mnemonic::Vzeroupper | Mnemonic::Nop if !undone => {}
            Mnemonic::Ret => return replay.finish(FrameKind::Call),
            Mnemonic::Jmp if leaves(&instruction, code, address, function) => {
                return replay.finish(FrameKind::Call);
            }
            _ => {
                adjust(&instruction, &mut replay)?;
                undone = true;
            }
        }
    }
    None
}

/// The rule for a stub whose instruction at `address` is about to run.
///
/// # Errors
/// [`RuleRefusal::Unsupported`] when the code does not run straight to its end.
pub fn stub(code: &[u8], address: u64) -> Result<Rule, RuleRefusal> {
    let mut replay = EpilogueReplay::new();
    for instruction in instructions(code, address).take(MAX_STUB) {
        let followed = match instruction.mnemonic() {
            Mnemonic::Ret | Mnemonic::Jmp => {
                return replay
                    .finish(FrameKind::Stub { words: STUB_WORDS })
                    .ok_or(RuleRefusal::Unsupported);
            }
            Mnemonic::Push => replay.move_by(-8),
            Mnemonic::Sub if instruction.op0_register() == Machine::RSP => {
                stack_immediate(&instruction).and_then(|n| replay.move_by(-n))
            }
            Mnemonic::Int3 | Mnemonic::Ud2 | Mnemonic::Hlt | Mnemonic::INVALID => None,
            _ => adjust(&instruction, &mut replay)
                .or_else(|| (!writes_stack_pointer(&instruction)).then_some(())),
        };
        followed.ok_or(RuleRefusal::Unsupported)?;
    }
    Err(RuleRefusal::Unsupported)
}

/// True when `code`, the bytes that end at a candidate return address, ends with a call
/// instruction.
#[must_use]
pub fn ends_with_call(code: &[u8]) -> bool {
    // Calls are 2 to 8 bytes long: FF /2 with any addressing and an optional REX, or E8 rel32.
    (2..=8).any(|length| {
        let Some(tail) = code.len().checked_sub(length).and_then(|from| code.get(from..)) else {
            return false;
        };
        let mut decoder = Decoder::new(64, tail, DecoderOptions::NONE);
        let instruction = decoder.decode();
        instruction.len() == length && instruction.mnemonic() == Mnemonic::Call
    })
}

/// Where the call at the end of `code`, the bytes before `address`, leads: E8 rel32 says it, FF /2
/// does not.
#[must_use]
pub fn call_target(code: &[u8], address: u64) -> Option<u64> {
    let (_, call) = code.split_last_chunk::<5>()?;
    let [0xe8, distance @ ..] = *call else { return None };
    Some(address.wrapping_add_signed(i64::from(i32::from_le_bytes(distance))))
}

fn instructions(code: &[u8], address: u64) -> impl Iterator<Item = Instruction> {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    std::iter::from_fn(move || {
        decoder.can_decode().then(|| decoder.decode()).filter(|i| !i.is_invalid())
    })
}

/// Applies an instruction that gives back stack; `None` when it is none.
fn adjust(instruction: &Instruction, replay: &mut EpilogueReplay) -> Option<()> {
    match instruction.code() {
        Code::Add_rm64_imm8 | Code::Add_rm64_imm32
            if instruction.op0_register() == Machine::RSP =>
        {
            replay.move_by(stack_immediate(instruction)?)
        }
        Code::Lea_r64_m
            if instruction.op0_register() == Machine::RSP
                && instruction.memory_index() == Machine::None =>
        {
            let base = general(instruction.memory_base())?;
            replay.move_to(base, instruction.memory_displacement64().cast_signed())
        }
        Code::Mov_r64_rm64 | Code::Mov_rm64_r64
            if instruction.op0_register() == Machine::RSP
                && instruction.op1_kind() == OpKind::Register =>
        {
            replay.move_to(general(instruction.op1_register())?, 0)
        }
        Code::Pop_r64 => replay.pop(general(instruction.op0_register())?),
        Code::Leaveq => {
            replay.move_to(Register::RBP, 0)?;
            replay.pop(Register::RBP)
        }
        _ => None,
    }
}

fn stack_immediate(instruction: &Instruction) -> Option<i64> {
    let n = instruction.try_immediate(1).ok()?.cast_signed();
    (0..=1 << 30).contains(&n).then_some(n)
}

/// A jump out of the function: direct to elsewhere (or to its own first instruction: recursion),
/// through memory, or through a register with REX.W.
fn leaves(instruction: &Instruction, code: &[u8], address: u64, function: &Range<u64>) -> bool {
    match instruction.code() {
        Code::Jmp_rel8_64 | Code::Jmp_rel32_64 => {
            let target = instruction.near_branch_target();
            return !function.contains(&target) || target == function.start;
        }
        Code::Jmp_rm64 => {}
        _ => return false,
    }
    let at = usize::try_from(instruction.ip().wrapping_sub(address)).ok();
    let rex_w = at.and_then(|at| code.get(at)).is_some_and(|prefix| prefix & 0xf8 == 0x48);
    rex_w || instruction.memory_base() == Machine::RIP
}

/// Conservative: any instruction that names rsp as its first operand, or calls.
fn writes_stack_pointer(instruction: &Instruction) -> bool {
    let names = instruction.op_count() > 0
        && instruction.op0_kind() == OpKind::Register
        && matches!(
            instruction.op0_register(),
            Machine::RSP | Machine::ESP | Machine::SP | Machine::SPL
        )
        && !matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test);
    names
        || matches!(
            instruction.mnemonic(),
            Mnemonic::Call
                | Mnemonic::Enter
                | Mnemonic::Leave
                | Mnemonic::Pop
                | Mnemonic::Popfq
                | Mnemonic::Pushfq
        )
}

pub(super) fn general(register: Machine) -> Option<Register> {
    const MACHINE: [Machine; 16] = [
        Machine::RAX,
        Machine::RCX,
        Machine::RDX,
        Machine::RBX,
        Machine::RSP,
        Machine::RBP,
        Machine::RSI,
        Machine::RDI,
        Machine::R8,
        Machine::R9,
        Machine::R10,
        Machine::R11,
        Machine::R12,
        Machine::R13,
        Machine::R14,
        Machine::R15,
    ];
    let number = MACHINE.iter().position(|&m| m == register)?;
    u8::try_from(number).ok().and_then(Register::from_machine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, proptest};

    const FUNCTION: Range<u64> = 0x1000..0x2000;
    const RBP: usize = 6;

    fn at(code: &[u8]) -> Option<Rule> {
        epilogue(code, 0x1800, &FUNCTION)
    }

    fn rsp(offset: i32) -> Cfa {
        Cfa::Register { base: Register::RSP, offset }
    }

    #[test]
    fn each_instruction_of_an_epilogue_gives_the_same_caller() {
        // add rsp, 0x40; pop rbp; ret
        let code = [0x48, 0x83, 0xc4, 0x40, 0x5d, 0xc3];
        let whole = at(&code).unwrap();
        assert_eq!(
            (whole.cfa, whole.registers[RBP]),
            (rsp(0x50), Saved::AtRegister { base: Register::RSP, offset: 0x40 })
        );
        let after_add = at(&code[4..]).unwrap();
        assert_eq!(
            (after_add.cfa, after_add.registers[RBP]),
            (rsp(16), Saved::AtRegister { base: Register::RSP, offset: 0 })
        );
        let at_ret = at(&code[5..]).unwrap();
        assert_eq!((at_ret.cfa, at_ret.registers[RBP]), (rsp(8), Saved::Same));
    }

    #[test]
    fn an_epilogue_may_restore_rsp_from_the_frame_register() {
        // lea rsp, [rbp-0x10]; pop rbx; pop r15; pop rbp; ret
        let rule = at(&[0x48, 0x8d, 0x65, 0xf0, 0x5b, 0x41, 0x5f, 0x5d, 0xc3]).unwrap();
        assert_eq!(rule.cfa, Cfa::Register { base: Register::RBP, offset: -16 + 24 + 8 });
        assert_eq!(rule.registers[15], Saved::AtRegister { base: Register::RBP, offset: -8 });
    }

    #[test]
    fn an_osr_epilogue_gives_back_two_frames() {
        // add rsp, 0x18; pop rbx; add rsp, 0x40; pop rbp; ret
        let rule = at(&[0x48, 0x83, 0xc4, 0x18, 0x5b, 0x48, 0x83, 0xc4, 0x40, 0x5d, 0xc3]).unwrap();
        assert_eq!(rule.cfa, rsp(0x18 + 8 + 0x40 + 8 + 8));
    }

    #[test]
    fn a_switch_is_no_tail_call() {
        assert_eq!(at(&[0xff, 0xe0]), None, "jmp rax");
        assert!(at(&[0x48, 0xff, 0xe0]).is_some(), "rex.w jmp rax");
        assert!(at(&[0xff, 0x25, 0, 0, 0, 0]).is_some(), "jmp [rip]");
        assert_eq!(at(&[0xeb, 0x10]), None, "a jump inside the function");
        assert!(at(&[0xe9, 0, 0x10, 0, 0]).is_some(), "a jump out of the function");
    }

    #[test]
    fn ordinary_code_is_no_epilogue() {
        assert_eq!(at(&[0x48, 0x89, 0xe5, 0xc3]), None, "mov rbp, rsp; ret");
        assert_eq!(
            at(&[0x48, 0x83, 0xc4, 0x20, 0x6a, 0x00, 0xc3]),
            None,
            "add rsp, 32; push 0 (localloc)"
        );
    }

    #[test]
    fn a_stub_hands_its_callers_return_address_on() {
        // mov r10, [rip]; jmp [rip]
        let rule = stub(&[0x4c, 0x8b, 0x15, 0, 0, 0, 0, 0xff, 0x25, 0, 0, 0, 0], 0x5000).unwrap();
        assert_eq!((rule.cfa, rule.kind), (rsp(8), FrameKind::Stub { words: 3 }));
        // pop rdx; jmp rax: one word was pushed before
        assert_eq!(stub(&[0x5a, 0xff, 0xe0], 0x5000).unwrap().cfa, rsp(16));
        assert_eq!(
            stub(&[0xe8, 0, 0, 0, 0, 0xc3], 0x5000),
            Err(RuleRefusal::Unsupported),
            "a call"
        );
    }

    #[test]
    fn calls_are_recognised_by_their_end() {
        assert!(ends_with_call(&[0x90, 0xe8, 1, 2, 3, 4]));
        assert!(ends_with_call(&[0x90, 0x90, 0xff, 0xd0]));
        assert!(!ends_with_call(&[0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90]));
        assert_eq!(call_target(&[0x90, 0xe8, 0xf0, 0xff, 0xff, 0xff], 0x1015), Some(0x1005));
        assert_eq!(call_target(&[0x90, 0x90, 0x90, 0x90, 0xff, 0xd0], 0x1015), None);
    }

    proptest! {
        #[test]
        fn random_code_gives_an_answer(code in any::<Vec<u8>>(), address in any::<u64>()) {
            std::hint::black_box(epilogue(&code, address, &FUNCTION));
            stub(&code, address).ok();
            std::hint::black_box((ends_with_call(&code), call_target(&code, address)));
        }
    }
}
