//! What is a machine's own of the runtime's unwind information.

use super::rule::{Rule, RuleRefusal};

/// Reads at an offset from the base of an image or code heap; answers how many bytes it got.
pub type ReadAt<'a> = &'a dyn Fn(u32, &mut [u8]) -> usize;

/// The unwind information that the runtime's compilers write for a machine.
#[derive(Clone, Copy, Debug)]
pub struct UnwindFormat {
    /// Bytes of a RUNTIME_FUNCTION.
    pub entry_bytes: usize,
    /// JIT bodies start at multiples of this.
    pub body_align: u64,
    /// Decodes one, with what it points to.
    pub entry: fn(&[u8], ReadAt<'_>) -> Option<RuntimeFunction>,
    /// Reads unwind information as far as [`UnwindFormat::rule`] needs it.
    pub info: fn(u32, ReadAt<'_>) -> Option<Vec<u8>>,
    /// True when unwind information can belong to a function.
    pub is_plausible: fn(&[u8], RuntimeFunction) -> bool,
    /// The rule at a place, by unwind information and, where that is silent, by code.
    pub rule: RuleAt,
}

/// As [`UnwindFormat::rule`]: unwind information by what a RUNTIME_FUNCTION says of its place.
pub type RuleAt =
    fn(FunctionOffset, &dyn Fn(u32) -> Option<Vec<u8>>, ReadAt<'_>) -> Result<Rule, RuleRefusal>;

/// RUNTIME_FUNCTION: offsets from the base of its image or code heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuntimeFunction {
    /// First byte.
    pub begin: u32,
    /// First byte after it.
    pub end: u32,
    /// Its unwind information.
    pub unwind: u32,
}

/// A place in a function.
#[derive(Clone, Copy, Debug)]
pub struct FunctionOffset {
    /// The function.
    pub function: RuntimeFunction,
    /// Bytes from its begin.
    pub offset: u32,
    /// It is the next instruction to run, not inside a call.
    pub exact: bool,
    /// Address of the base that the function's offsets count from.
    pub base: u64,
}
