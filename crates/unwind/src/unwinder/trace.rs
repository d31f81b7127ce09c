//! What of a context a walk went by, so that the frames of an equal context are known without one.

use perfusion_model::event::UserContext;

/// What of a context a walk went by: registers it began with and words of the stack. By the same
/// rules, a context that begins at the same instruction with the same stack pointer and has all of
/// these has the same frames.
#[derive(Clone, Debug, Default)]
pub struct UnwindTrace {
    registers: u16,
    values: [u64; 16],
    /// Offset in the copy, and the word.
    words: Vec<(usize, u64)>,
    /// It also went by what is in no copy.
    is_beyond: bool,
}

impl UnwindTrace {
    /// The walk went by a register of the context.
    pub(super) fn add_register(&mut self, register: usize, value: u64) {
        self.registers |= 1 << register;
        self.values[register] = value;
    }

    /// The walk went by the word at an offset in the copy.
    pub(super) fn add_word(&mut self, at: usize, word: u64) {
        self.words.push((at, word));
    }

    /// The walk went by what is in no copy.
    pub(super) fn go_beyond(&mut self) {
        self.is_beyond = true;
    }

    /// Whether it says all that the walk went by.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !self.is_beyond
    }

    /// Whether a context has what this one's had.
    #[must_use]
    pub fn holds_in(&self, context: &UserContext) -> bool {
        let registers = self.values.iter().zip(&context.regs.gpr).enumerate();
        let mut registers = registers.filter(|(register, _)| self.registers & (1 << register) != 0);
        registers.all(|(_, (then, now))| then == now)
            && self.words.iter().all(|(at, word)| word_in(&context.stack, *at) == Some(*word))
    }

    /// What it takes to keep it, in words.
    #[must_use]
    pub fn words(&self) -> usize {
        self.values.len() + 2 * self.words.len()
    }
}

/// The word at an offset in a copy.
pub(super) fn word_in(stack: &[u8], at: usize) -> Option<u64> {
    stack.get(at..).and_then(|rest| rest.first_chunk::<8>()).map(|word| u64::from_le_bytes(*word))
}
