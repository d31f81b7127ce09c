//! What a walk and its rules must know of a processor, as data: both are always compiled and
//! tested, and [`NATIVE`](crate::native::NATIVE) is the one the daemon runs on. What is written for
//! one processor only is in `x86_64/` and `aarch64/`.

use super::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use super::unwind_format::UnwindFormat;
use std::ops::Range;

/// A processor.
#[derive(Debug)]
pub struct TargetMachine {
    /// The registers that a walk keeps.
    pub registers: RegisterSet,
    /// Stack pointer.
    pub stack_pointer: Register,
    /// Frame pointer: by it a frame without a rule is left.
    pub frame_pointer: Register,
    /// Where a call leaves its return address; `None` when it pushes it.
    pub link: Option<Register>,
    /// Its conventions in call frame information.
    pub dwarf: DwarfConventions,
    /// `e_machine` of its ELF files.
    pub elf: u16,
    /// The oldest kernel whose probes do what they must here.
    pub oldest_kernel: (u32, u32),
    /// Machine field of its PE files.
    pub pe: u16,
    /// User addresses are below this, unless a process asks for more.
    pub user_end: u64,
    /// The bits of a word that are an address, from an address near the end of user memory.
    pub address_mask: fn(u64) -> u64,
    /// The runtime's unwind information.
    pub unwind_info: UnwindFormat,
    /// What its instructions say where no unwind data does.
    pub code: CodeRules,
}

/// The registers of a processor that a walk keeps, each with its place in a rule.
#[derive(Debug)]
pub struct RegisterSet {
    /// Their names, by place.
    pub names: [&'static str; 16],
    /// DWARF number of the register in the first place; the others follow.
    pub first_dwarf: u16,
    /// Registers a callee must restore, by bit; without stack pointer and link register.
    pub callee_saved: u16,
    /// Places of the registers that the probes walk with (`ebpf_common::machine`).
    pub walk_places: [u8; 7],
    /// Places of the registers that the shim captures, all but the instruction pointer
    /// (`profiler_protocol::record::Registers`).
    pub captured_places: [u8; 7],
}

impl RegisterSet {
    /// The register with DWARF number `number`, if a walk needs it.
    #[must_use]
    pub(crate) fn by_dwarf(&self, number: u16) -> Option<Register> {
        number.checked_sub(self.first_dwarf).and_then(Register::at)
    }

    /// True for the registers a callee must restore.
    #[must_use]
    pub(crate) fn is_callee_saved(&self, register: Register) -> bool {
        self.callee_saved & (1 << register.index()) != 0
    }

    /// Name of a register.
    #[must_use]
    pub fn name(&self, register: Register) -> &'static str {
        self.names.get(register.index()).copied().unwrap_or("?")
    }
}

/// A processor's conventions in call frame information.
#[derive(Debug)]
pub struct DwarfConventions {
    /// DWARF column of the return address.
    pub return_column: u16,
    /// DWARF number by which expressions name the instruction pointer.
    pub instruction_pointer: Option<u16>,
    /// Whose extensions call frame information uses.
    pub vendor: gimli::Vendor,
}

/// Rules that a processor's instructions give by themselves.
#[derive(Debug)]
pub struct CodeRules {
    /// The rule when code, the bytes at an address, is inside an epilogue of the function that
    /// takes the range.
    pub epilogue: fn(&[u8], u64, &Range<u64>) -> Option<Rule>,
    /// The rule for a stub whose instruction at the address is about to run.
    pub stub: fn(&[u8], u64) -> Result<Rule, RuleRefusal>,
    /// True when code, the bytes that end at a candidate return address, ends with a call.
    pub ends_with_call: fn(&[u8]) -> bool,
    /// Where such a call leads, given the return address, when that is in the instruction itself.
    pub call_target: fn(&[u8], u64) -> Option<u64>,
    /// The rule when code, the bytes at the next instruction, returns from a signal handler and
    /// call frame information does not say how.
    pub signal_return: Option<SignalReturn>,
    /// What code without unwind data says about its frames, where its instructions are followed.
    pub body: Option<BodyDecoder>,
    /// Whether the bytes of code are where the C library has the function of a new context
    /// (makecontext(3)) return to, which nobody has called.
    pub is_context_start: fn(&[u8]) -> bool,
    /// First bytes of the runtime's `OnHijackTripThread`, where its call frame information needs
    /// [`CodeRules::hijack`].
    pub hijack_prologue: &'static [u8],
    /// The rule inside it, at an offset from its start, given what its call frame information says.
    pub hijack: fn(Rule, u64) -> Result<Rule, RuleRefusal>,
}

/// As [`CodeRules::signal_return`].
pub type SignalReturn = fn(&[u8]) -> Option<Rule>;

/// Reads code from an address on; says how many bytes there were.
pub type ReadCode<'a> = dyn FnMut(u64, &mut [u8]) -> usize + 'a;

/// As [`CodeRules::body`].
#[derive(Clone, Copy, Debug)]
pub struct BodyDecoder {
    /// The rule of the frame whose next instruction is at an address, and whether that is the next
    /// to run (else a call is before it).
    pub rule: fn(&mut ReadCode<'_>, u64, bool) -> Result<Rule, RuleRefusal>,
    /// Given a program's entry point and an address: true when that is behind the call by which the
    /// entry point leaves for good.
    pub is_behind_entry: fn(&mut ReadCode<'_>, u64, u64) -> bool,
}

impl TargetMachine {
    /// A call frame in which callee-saved registers are unchanged and all others lost, with the
    /// return address where the call left it.
    #[must_use]
    pub fn call(&self, cfa: Cfa) -> Rule {
        let mut registers = [Saved::Lost; 16];
        for (place, saved) in registers.iter_mut().enumerate() {
            if self.registers.callee_saved & (1 << place) != 0 {
                *saved = Saved::Same;
            }
        }
        registers[self.stack_pointer.index()] = Saved::CfaPlus(0);
        let return_address = match self.link {
            Some(link) => Saved::InRegister(link),
            None => Saved::AtCfa(-8),
        };
        Rule { cfa, return_address, registers, kind: FrameKind::Call }
    }

    /// A frame that has done nothing yet.
    #[must_use]
    pub fn frameless(&self) -> Rule {
        let offset = if self.link.is_some() { 0 } else { 8 };
        self.call(Cfa::Register { base: self.stack_pointer, offset })
    }

    /// The outermost frame of a thread.
    #[must_use]
    pub fn thread_start(&self) -> Rule {
        let mut rule = self.frameless();
        rule.return_address = Saved::Lost;
        rule
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native::{ALL, native_address_mask};

    #[test]
    fn a_call_rule_keeps_exactly_the_callee_saved_registers() {
        for machine in ALL {
            let rule = machine.frameless();
            for (place, saved) in rule.registers.iter().enumerate() {
                let register = Register::at(u16::try_from(place).unwrap()).unwrap();
                let kept = machine.registers.is_callee_saved(register)
                    || register == machine.stack_pointer;
                assert_eq!(*saved != Saved::Lost, kept, "{}", machine.registers.name(register));
            }
            assert!(machine.thread_start().is_thread_start() && !rule.is_thread_start());
        }
    }

    #[test]
    fn dwarf_numbers_lead_to_the_registers_of_their_names() {
        let [x86, arm] = ALL;
        let name = |machine: &TargetMachine, number| {
            machine.registers.by_dwarf(number).map(|r| machine.registers.name(r))
        };
        assert_eq!([name(x86, 3), name(x86, 7), name(x86, 16)], [Some("rbx"), Some("rsp"), None]);
        assert_eq!([name(arm, 19), name(arm, 31), name(arm, 15)], [Some("x19"), Some("sp"), None]);
        assert_eq!(arm.registers.by_dwarf(30), arm.link);
    }

    #[test]
    fn the_address_mask_lets_addresses_of_this_process_through() {
        let here = (native_address_mask as fn() -> u64 as *const ()).addr() as u64;
        assert_eq!(here & native_address_mask(), here);
    }
}
