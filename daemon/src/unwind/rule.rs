//! The rule that leads from one frame to its caller, whatever it was learnt from. No parsing here.
//!
//! With `r` the registers at the frame and `[a]` the eight bytes of stack at address `a`:
//! ```text
//! CFA        = r[b] + o                      Cfa::Register { base: b, offset: o }
//!            = [r[b] + o] + p                Cfa::Deref { base: b, offset: o, add: p }
//! caller.rsp = CFA                           unless the rule saves rsp itself (signal frames)
//! caller.ip  = [CFA + o]                     Saved::AtCfa(o)
//!            = [r[b] + o]                    Saved::AtRegister { base: b, offset: o }
//!            = r[n]                          Saved::InRegister(n)
//! caller.r[i] the same three, or r[i] (Saved::Same), CFA + o (Saved::CfaPlus(o)), or not known (Saved::Lost)
//! ```
//! Registers are numbered as DWARF does on x86-64 (System V ABI x86-64, figure 3.36): 0 rax, 1 rdx, 2 rcx, 3 rbx, 4 rsi,
//! 5 rdi, 6 rbp, 7 rsp, 8–15 r8–r15; 16 is the return address.

/// A general register by its DWARF number, 0–15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Register(u8);

impl Register {
    /// rbx.
    pub const RBX: Self = Self(3);
    /// rbp.
    pub const RBP: Self = Self(6);
    /// rsp.
    pub const RSP: Self = Self(7);

    /// The register with DWARF number `number`; `None` above 15.
    #[must_use]
    pub fn from_dwarf(number: u16) -> Option<Self> {
        u8::try_from(number).ok().filter(|&n| n < 16).map(Self)
    }

    /// The register that machine code (and UNWIND_INFO) calls `number`: rax rcx rdx rbx rsp rbp rsi rdi r8–r15.
    #[must_use]
    pub fn from_machine(number: u8) -> Option<Self> {
        const DWARF: [u8; 16] = [0, 2, 1, 3, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15];
        DWARF.get(usize::from(number)).copied().map(Self)
    }

    /// Place in arrays of 16.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// True for the registers a callee must restore (System V ABI x86-64, 3.2.1): rbx, rbp, rsp, r12–r15.
    #[must_use]
    pub fn is_callee_saved(self) -> bool {
        matches!(self.0, 3 | 6 | 7 | 12..=15)
    }
}

/// How the canonical frame address is found: the caller's rsp just before its call instruction pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cfa {
    /// `r[base] + offset`.
    Register {
        /// Base register.
        base: Register,
        /// Bytes.
        offset: i32,
    },
    /// `[r[base] + offset] + add`.
    Deref {
        /// Base register.
        base: Register,
        /// Bytes.
        offset: i32,
        /// Bytes added to what was read.
        add: i32,
    },
}

/// Where the caller's value of a register is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Saved {
    /// The frame did not change it.
    Same,
    /// It cannot be recovered. As return address: there is no caller, the thread starts here.
    Lost,
    /// In memory at CFA + n.
    AtCfa(i32),
    /// In memory at `r[base] + offset`.
    AtRegister {
        /// Base register, at this frame.
        base: Register,
        /// Bytes.
        offset: i32,
    },
    /// It is CFA + n itself.
    CfaPlus(i32),
    /// In another register.
    InRegister(Register),
}

/// What kind of frame the rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// Made by a call: the caller stands at a return address.
    Call,
    /// Made by the kernel to run a signal handler: the interrupted code stands at the exact instruction, and every
    /// register was saved.
    Signal,
    /// A runtime stub: the return address is one of the first `words` words from the place the rule names (the others are
    /// its own, for the code it jumps to), and the walker takes the first that follows a call.
    Stub {
        /// At least 1.
        words: u8,
    },
}

/// One frame's rule; see the equations above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Canonical frame address.
    pub cfa: Cfa,
    /// The return address; `Saved::Lost` marks the start of the thread.
    pub return_address: Saved,
    /// Caller's general registers by DWARF number.
    pub registers: [Saved; 16],
    /// Call, signal or stub.
    pub kind: FrameKind,
}

impl Rule {
    /// A call frame in which callee-saved registers are unchanged and all others lost, with the return address just below
    /// `cfa`, as the call instruction leaves it.
    #[must_use]
    pub fn call(cfa: Cfa) -> Self {
        let mut registers = [Saved::Lost; 16];
        for number in [3, 6, 12, 13, 14, 15] {
            registers[number] = Saved::Same;
        }
        registers[Register::RSP.index()] = Saved::CfaPlus(0);
        Self { cfa, return_address: Saved::AtCfa(-8), registers, kind: FrameKind::Call }
    }

    /// A frame that pushed nothing: the return address is at rsp.
    #[must_use]
    pub fn frameless() -> Self {
        Self::call(Cfa::Register { base: Register::RSP, offset: 8 })
    }

    /// The outermost frame of a thread.
    #[must_use]
    pub fn thread_start() -> Self {
        let mut rule = Self::frameless();
        rule.return_address = Saved::Lost;
        rule
    }

    /// True when the frame has no caller.
    #[must_use]
    pub fn is_thread_start(&self) -> bool {
        self.return_address == Saved::Lost
    }
}

/// Why there is no rule for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// No unwind table covers it.
    #[error("no unwind entry covers the address")]
    NoEntry,
    /// The tables are there but malformed.
    #[error("malformed unwind data")]
    Malformed,
    /// Well formed, but it says something no rule here can express.
    #[error("unwind data of an unsupported form")]
    Unsupported,
    /// Code or unwind data could not be read.
    #[error("unwind data could not be read")]
    Unreadable,
    /// The process used up its share of look-up work for now.
    #[error("look-up budget of the process is used up")]
    Budget,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_numbers_name_the_same_registers_as_dwarf_numbers() {
        assert_eq!(Register::from_machine(5), Some(Register::RBP));
        assert_eq!(Register::from_machine(4), Some(Register::RSP));
        assert_eq!(Register::from_machine(3), Some(Register::RBX));
        assert_eq!(Register::from_machine(16), None);
        assert_eq!(Register::from_dwarf(16), None);
    }

    #[test]
    fn a_call_rule_keeps_exactly_the_callee_saved_registers() {
        let rule = Rule::frameless();
        for (number, saved) in rule.registers.iter().enumerate() {
            let register = Register::from_dwarf(u16::try_from(number).unwrap()).unwrap();
            assert_eq!(*saved != Saved::Lost, register.is_callee_saved(), "register {number}");
        }
    }
}
