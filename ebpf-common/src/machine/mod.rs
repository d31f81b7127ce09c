//! What a walk must know of the processor it walks on. Both are always compiled, so that each is
//! tested wherever the tests run; the probes and the daemon choose theirs by the target they are
//! built for.

pub mod aarch64;
pub mod x86_64;

use crate::rule::WALK_REGISTERS;

/// Places of a record's general registers (`StackRecord::gpr`).
pub const GPR: usize = 16;

/// A processor, as far as a walk goes.
pub trait WalkMachine {
    /// Where in `gpr` the walk's registers are, all but the last, which is the instruction pointer.
    const GPR_PLACES: [u8; WALK_REGISTERS - 1];
    /// Which of the walk's registers a call leaves its return address in; `None` when it goes on
    /// the stack.
    const LINK: Option<usize>;

    /// The address in a word that was a return address: without the signature of pointer
    /// authentication.
    fn address(&self, word: u64) -> u64;
}
