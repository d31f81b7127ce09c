//! The rule that leads from one frame to its caller, whatever it was learnt from. No parsing here.
//!
//! With `r` the registers at the frame and `[a]` the eight bytes of stack at address `a`:
//! ```text
//! CFA        = r[b] + o                      Cfa::Register { base: b, offset: o }
//!            = [r[b] + o] + p                Cfa::Deref { base: b, offset: o, add: p }
//! caller.sp  = CFA                           unless the rule saves sp itself (signal frames)
//! caller.ip  = [CFA + o]                     Saved::AtCfa(o)
//!            = [r[b] + o]                    Saved::AtRegister { base: b, offset: o }
//!            = r[n]                          Saved::InRegister(n)
//! caller.r[i] the same three, or r[i] (Saved::Same), or CFA + o (Saved::CfaPlus(o)), or not known
//!             (Saved::Lost)
//! ```
//! The signature of a return address (pointer authentication) is taken off.

/// A general register, by its place among the sixteen that matter to a walk; which ones those are
/// is the machine's ([`super::machine::TargetMachine`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Register(u8);

impl Register {
    /// The register in a place that is known to be one.
    pub(super) const fn of(place: u8) -> Self {
        Self(place & 15)
    }

    /// The register in a place; `None` above 15.
    #[must_use]
    pub fn at(place: u16) -> Option<Self> {
        u8::try_from(place).ok().filter(|&n| n < 16).map(Self)
    }

    /// Place in arrays of 16.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// How the canonical frame address is found: the caller's stack pointer just before its call.
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
    /// Made by the kernel to run a signal handler: the interrupted code stands at the exact
    /// instruction, and every register was saved.
    Signal,
    /// Behind a system call that makes a thread. The one that made it has a caller as after a call;
    /// the new one, on a stack nobody has used yet, has none, and no call precedes what is where a
    /// return address would be.
    NewThread,
    /// A runtime stub: the return address is one of the first `words` words from the place the rule
    /// names (the others are its own, for the code it jumps to), and the walker takes the first
    /// that follows a call.
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
    /// Caller's general registers, by place.
    pub registers: [Saved; 16],
    /// Call, signal or stub.
    pub kind: FrameKind,
}

impl Rule {
    /// True when the frame has no caller.
    #[must_use]
    pub fn is_thread_start(&self) -> bool {
        self.return_address == Saved::Lost
    }
}

/// Why there is no rule for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RuleRefusal {
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
