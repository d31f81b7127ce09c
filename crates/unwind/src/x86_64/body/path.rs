//! One path through code: symbolic values of its registers and of the words it wrote to its frame,
//! instruction by instruction.

use crate::rule::Register;
use crate::x86_64::X86_64;
use crate::x86_64::epilogue::general;
use iced_x86::{
    FlowControl, Instruction, InstructionInfoFactory, InstructionInfoOptions, Mnemonic, OpAccess,
    OpKind, Register as Machine,
};
use std::collections::BTreeMap;

/// Most words of its frame a path may write.
const MAX_WORDS: usize = 256;

/// What a register or a word of the stack holds, in terms of the registers where the path began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrackedValue {
    /// `r + n`.
    Register(Register, i32),
    /// The word that was at `r + n`.
    Word(Register, i32),
    Unknown,
}

impl TrackedValue {
    fn plus(self, bytes: i64) -> Self {
        let moved = |n: i32| i64::from(n).checked_add(bytes)?.try_into().ok();
        match self {
            Self::Register(base, n) => moved(n).map_or(Self::Unknown, |n| Self::Register(base, n)),
            Self::Word(..) | Self::Unknown => Self::Unknown,
        }
    }
}

/// One path's registers, by DWARF number, and the words it wrote to the stack, by their distance
/// from where its stack pointer began.
#[derive(Clone, Debug)]
pub(super) struct CodePath {
    pub(super) at: u64,
    pub(super) registers: [TrackedValue; 16],
    pub(super) words: BTreeMap<i32, TrackedValue>,
    /// It has read a callee-saved register that it did not write.
    pub(super) reads_callers: bool,
    /// It has branched, called, and gone through a system call.
    pub(super) branched: bool,
    pub(super) called: bool,
    pub(super) system_call: bool,
}

/// Where an instruction leads.
pub(super) enum Successor {
    On,
    Jump(u64),
    Branch(u64),
    Return,
    /// Nowhere that is known.
    End,
}

impl CodePath {
    pub(super) fn begin(at: u64) -> Self {
        let mut registers = [TrackedValue::Unknown; 16];
        for (place, value) in (0u16..).zip(&mut registers) {
            *value = Register::at(place)
                .map_or(TrackedValue::Unknown, |register| TrackedValue::Register(register, 0));
        }
        Self {
            at,
            registers,
            words: BTreeMap::new(),
            reads_callers: false,
            branched: false,
            called: false,
            system_call: false,
        }
    }

    fn get(&self, register: Machine) -> TrackedValue {
        general(register).map_or(TrackedValue::Unknown, |register| self.registers[register.index()])
    }

    fn set(&mut self, register: Machine, value: TrackedValue) {
        if let Some(register) = general(register) {
            self.registers[register.index()] = value;
        }
    }

    pub(super) fn stack_pointer(&self) -> TrackedValue {
        self.registers[Register::RSP.index()]
    }

    /// The address of an instruction's memory operand.
    fn address(&self, instruction: &Instruction) -> TrackedValue {
        if instruction.memory_index() != Machine::None {
            return TrackedValue::Unknown;
        }
        self.get(instruction.memory_base()).plus(instruction.memory_displacement64().cast_signed())
    }

    fn load(&self, address: TrackedValue) -> TrackedValue {
        match address {
            TrackedValue::Register(Register::RSP, n) => {
                self.words.get(&n).copied().unwrap_or(TrackedValue::Word(Register::RSP, n))
            }
            TrackedValue::Register(base, n) => TrackedValue::Word(base, n),
            TrackedValue::Word(..) | TrackedValue::Unknown => TrackedValue::Unknown,
        }
    }

    fn store(&mut self, address: TrackedValue, value: TrackedValue) {
        if let TrackedValue::Register(Register::RSP, n) = address {
            self.words.insert(n, value);
        }
    }

    fn push(&mut self, value: TrackedValue) {
        let to = self.stack_pointer().plus(-8);
        self.registers[Register::RSP.index()] = to;
        self.store(to, value);
    }

    fn pop(&mut self) -> TrackedValue {
        let from = self.stack_pointer();
        let value = self.load(from);
        self.registers[Register::RSP.index()] = from.plus(8);
        value
    }

    /// What a called function may have changed.
    fn forget_scratch(&mut self) {
        for (place, value) in (0u16..).zip(&mut self.registers) {
            let kept = Register::at(place)
                .is_some_and(|r| X86_64.registers.is_callee_saved(r) || r == Register::RSP);
            if !kept {
                *value = TrackedValue::Unknown;
            }
        }
    }

    pub(super) fn apply(
        &mut self,
        instruction: &Instruction,
        info: &mut InstructionInfoFactory,
    ) -> Successor {
        match instruction.mnemonic() {
            Mnemonic::Syscall => {
                self.system_call = true;
                for changed in [Machine::RAX, Machine::RCX, Machine::R11] {
                    self.set(changed, TrackedValue::Unknown);
                }
                return Successor::On;
            }
            Mnemonic::Hlt | Mnemonic::INVALID => return Successor::End,
            _ => {}
        }
        match instruction.flow_control() {
            FlowControl::Next => {}
            FlowControl::UnconditionalBranch => {
                return Successor::Jump(instruction.near_branch_target());
            }
            FlowControl::ConditionalBranch => {
                self.branched = true;
                return Successor::Branch(instruction.near_branch_target());
            }
            FlowControl::Return => return Successor::Return,
            FlowControl::Call | FlowControl::IndirectCall => {
                self.called = true;
                self.forget_scratch();
                return Successor::On;
            }
            FlowControl::IndirectBranch
            | FlowControl::Interrupt
            | FlowControl::XbeginXabortXend
            | FlowControl::Exception => return Successor::End,
        }
        let saves = self.compute(instruction);
        let info = info.info_options(
            instruction,
            if saves.is_some() {
                InstructionInfoOptions::NO_MEMORY_USAGE
            } else {
                InstructionInfoOptions::NONE
            },
        );
        let reads = |access: OpAccess| {
            matches!(
                access,
                OpAccess::Read | OpAccess::CondRead | OpAccess::ReadWrite | OpAccess::ReadCondWrite
            )
        };
        let writes = |access: OpAccess| {
            matches!(
                access,
                OpAccess::Write
                    | OpAccess::CondWrite
                    | OpAccess::ReadWrite
                    | OpAccess::ReadCondWrite
            )
        };
        for used in info.used_registers() {
            let Some(register) = general(used.register().full_register()) else { continue };
            let own = self.registers[register.index()] == TrackedValue::Register(register, 0);
            let saved = matches!(saves, Some(InstructionEffect::Saves));
            self.reads_callers |=
                reads(used.access()) && own && !saved && X86_64.registers.is_callee_saved(register);
            if writes(used.access()) && saves.is_none() {
                self.registers[register.index()] = TrackedValue::Unknown;
            }
        }
        for used in info.used_memory() {
            if writes(used.access()) && used.index() == Machine::None {
                let to = self.get(used.base()).plus(used.displacement().cast_signed());
                self.store(to, TrackedValue::Unknown);
            }
        }
        if let Some(InstructionEffect::Computes(register, value)) = saves {
            self.set(register, value);
        }
        if self.words.len() > MAX_WORDS { Successor::End } else { Successor::On }
    }

    /// Applies the instructions whose results are known; `None` for all others.
    fn compute(&mut self, instruction: &Instruction) -> Option<InstructionEffect> {
        let to = instruction.op0_register();
        let wide = instruction.op0_kind() == OpKind::Register && to.is_gpr64();
        match instruction.mnemonic() {
            Mnemonic::Push if instruction.op0_kind() == OpKind::Register && to.is_gpr64() => {
                self.push(self.get(to));
                Some(InstructionEffect::Saves)
            }
            Mnemonic::Push if instruction.stack_pointer_increment() == -8 => {
                self.push(TrackedValue::Unknown);
                Some(InstructionEffect::Done)
            }
            Mnemonic::Pop if wide => {
                let value = self.pop();
                Some(InstructionEffect::Computes(to, value))
            }
            Mnemonic::Leave => {
                self.registers[Register::RSP.index()] = self.registers[Register::RBP.index()];
                let value = self.pop();
                Some(InstructionEffect::Computes(Machine::RBP, value))
            }
            Mnemonic::Lea if wide => {
                Some(InstructionEffect::Computes(to, self.address(instruction)))
            }
            Mnemonic::Mov if wide && instruction.op1_kind() == OpKind::Register => {
                Some(InstructionEffect::Computes(to, self.get(instruction.op1_register())))
            }
            Mnemonic::Mov if wide && instruction.op1_kind() == OpKind::Memory => {
                Some(InstructionEffect::Computes(to, self.load(self.address(instruction))))
            }
            Mnemonic::Mov
                if instruction.op0_kind() == OpKind::Memory
                    && instruction.op1_register().is_gpr64() =>
            {
                let address = self.address(instruction);
                self.store(address, self.get(instruction.op1_register()));
                // Into its own frame; elsewhere it is a use.
                matches!(address, TrackedValue::Register(Register::RSP, _))
                    .then_some(InstructionEffect::Saves)
            }
            Mnemonic::Add | Mnemonic::Sub if wide => {
                let n = instruction.try_immediate(1).ok()?.cast_signed();
                let n = if instruction.mnemonic() == Mnemonic::Add { n } else { n.checked_neg()? };
                Some(InstructionEffect::Computes(to, self.get(to).plus(n)))
            }
            _ => None,
        }
    }
}

/// What is known of an instruction's effect.
enum InstructionEffect {
    /// Applied; it keeps a register's value for later.
    Saves,
    /// Applied.
    Done,
    /// A register's new value, for after its operands were looked at.
    Computes(Machine, TrackedValue),
}
