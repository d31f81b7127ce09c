//! Registers, a copy of a stack and any rules → stack.

use crate::input::Input;
use perfusion_model::event::{MonotonicNs, ProbeWalk, UserContext, UserRegs, WalkEnd};
use perfusion_model::frame::{FrameKey, Marker, ProcessId};
use perfusion_unwind::machine::TargetMachine;
use perfusion_unwind::native::ALL;
use perfusion_unwind::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use perfusion_unwind::unwinder::{self, CodeLookup, FrameRule, UnwindLimits};
use std::sync::Arc;

/// Few enough that deep stacks are short.
const MAX_FRAMES: usize = 48;
/// Places a walk may look at beside those of its frames, when it searches for return addresses.
const MAX_TRIED: usize = 2 * 128;

/// Pieces of the stack it may have read beyond its copy.
const MAX_PIECES: usize = 16;

struct Program {
    steps: Vec<Result<Arc<Rule>, RuleRefusal>>,
    asked: usize,
    read: usize,
}

impl CodeLookup for Program {
    fn step(&mut self, pc: u64, _exact: bool) -> FrameRule {
        self.asked += 1;
        let count = u64::try_from(self.steps.len()).unwrap_or(u64::MAX);
        let rule =
            pc.checked_rem(count).and_then(|at| self.steps.get(usize::try_from(at).ok()?)).cloned();
        FrameRule {
            frame: FrameKey::Unknown { process: ProcessId(0), address: pc },
            rule: rule.unwrap_or(Err(RuleRefusal::NoEntry)),
        }
    }
    fn walked(&mut self, pc: u64, _exact: bool, _time: MonotonicNs) -> Option<FrameKey> {
        (pc & 15 != 15).then_some(FrameKey::Unknown { process: ProcessId(0), address: pc })
    }
    fn is_executable(&mut self, address: u64) -> bool {
        address & 2 == 0
    }
    fn follows_call(&mut self, address: u64) -> Option<bool> {
        (address & 9 != 9).then_some(address & 6 == 0)
    }
    fn call_target(&mut self, address: u64) -> Option<u64> {
        (address & 3 != 3).then_some(address & !0xff)
    }
    fn stack(&mut self, address: u64) -> Option<Vec<u8>> {
        self.read += 1;
        let words = (0..=address & 63)
            .map(|word| address.wrapping_add(address.rotate_left(7).wrapping_mul(word)));
        (address & 0x700 != 0x700).then(|| words.flat_map(u64::to_le_bytes).collect())
    }
}

pub(crate) fn run(data: &[u8]) {
    for machine in ALL {
        run_on(machine, data);
    }
}

fn run_on(machine: &TargetMachine, data: &[u8]) {
    let mut input = Input::new(data);
    let steps = (0..input.u8() % 24).map(|_| step(machine, &mut input)).collect();
    let mut regs = UserRegs { ip: input.u64(), known: input.u16(), ..UserRegs::default() };
    let [saved, other] = [3, 12];
    for place in [saved, machine.frame_pointer.index(), machine.stack_pointer.index(), other] {
        regs.gpr[place] = input.u64();
    }
    let shape = input.u8();
    let walk = (shape & 2 != 0).then(|| ProbeWalk {
        time: MonotonicNs(0),
        space: 0,
        frames: (0..input.u8() % 8).map(|_| u64::from(input.u8())).collect(),
        end: match shape >> 6 {
            0 => WalkEnd::ThreadStart,
            1 => WalkEnd::Limit,
            end => WalkEnd::HandedOver { exact: end == 2 },
        },
    });
    let skipped = if shape & 4 == 0 { 0 } else { u64::from(input.u16()) };
    let context = UserContext {
        walk,
        regs,
        stack: input.rest().to_vec(),
        skipped,
        limited: shape & 1 == 0,
        exiting: false,
        asleep: None,
    };
    let limits = UnwindLimits { max_frames: MAX_FRAMES, address_mask: u64::MAX };
    let mut program = Program { steps, asked: 0, read: 0 };
    let done = unwinder::walk_on(machine, &context, &mut program, limits);

    assert!(program.asked <= MAX_FRAMES + MAX_TRIED, "work is bounded");
    assert!(program.read <= 2 * (2 * MAX_FRAMES + MAX_PIECES), "so is what is read");
    assert!(done.frames.len() <= MAX_FRAMES + 2, "so is the stack");
    assert_eq!(
        done.reached_thread_start,
        done.broken.is_none(),
        "a stack is whole or says why not: {done:?}"
    );
    if let Some(marker) = done.broken {
        assert_eq!(done.frames.last(), Some(&FrameKey::Marker(marker)), "and says so at its end");
    }
    let guessed =
        done.frames.iter().filter(|frame| **frame == FrameKey::Marker(Marker::Guessed)).count();
    assert_eq!(u32::try_from(guessed), Ok(done.guessed), "each guess is marked");
    assert_eq!(
        unwinder::walk_on(machine, &context, &mut program, limits),
        done,
        "the same context gives the same stack"
    );
}

/// Any rule an image could make, or a refusal.
fn step(machine: &TargetMachine, input: &mut Input<'_>) -> Result<Arc<Rule>, RuleRefusal> {
    let shape = input.u8();
    let refused = match shape >> 5 {
        7 => Some(RuleRefusal::Unreadable),
        6 => Some(RuleRefusal::NoEntry),
        _ => None,
    };
    if let Some(refusal) = refused {
        return Err(refusal);
    }
    let (base, offset) = (register(input), offset(input));
    let mut rule = machine.call(if shape & 1 == 0 {
        Cfa::Register { base, offset }
    } else {
        Cfa::Deref { base, offset, add: self::offset(input) }
    });
    rule.kind = match (shape >> 1) & 7 {
        0 => FrameKind::Signal,
        1 => FrameKind::Stub { words: 1 + input.u8() % 8 },
        _ => FrameKind::Call,
    };
    if shape & 16 != 0 {
        rule.return_address = saved(input);
        for _ in 0..input.u8() % 4 {
            rule.registers[register(input).index()] = saved(input);
        }
    }
    Ok(Arc::new(rule))
}

fn saved(input: &mut Input<'_>) -> Saved {
    match input.u8() % 6 {
        0 => Saved::Same,
        1 => Saved::Lost,
        2 => Saved::AtCfa(offset(input)),
        3 => Saved::AtRegister { base: register(input), offset: offset(input) },
        4 => Saved::CfaPlus(offset(input)),
        _ => Saved::InRegister(register(input)),
    }
}

fn register(input: &mut Input<'_>) -> Register {
    Register::at(u16::from(input.u8() % 16)).unwrap_or(Register::RSP)
}

/// Near, mostly.
fn offset(input: &mut Input<'_>) -> i32 {
    match input.u8() {
        255 => input.u32().cast_signed(),
        near => i32::from(near.cast_signed()),
    }
}
