//! Lines of source, and functions that are part of others.

use std::sync::Arc;

/// A line of a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// The file, as the compiler was told it.
    pub file: Arc<str>,
    /// The line, from 1 on.
    pub line: u32,
    /// The first line of its function; 0 where that is not known.
    pub start_line: u32,
}

/// A function that the compiler has put into another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InlinedFunction {
    /// For people: demangled, control characters escaped, bounded in length.
    pub name: Arc<str>,
    /// As the linker would have it, where the compiler says so.
    pub system_name: Arc<str>,
    /// Where it is at the address.
    pub line: Option<SourceLine>,
}
