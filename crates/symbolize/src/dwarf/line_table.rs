//! From addresses to lines, by a unit's line program.

use super::sections::{DebugSections, DwarfError, Slice, WorkBudget};
use super::strings::text;
use super::units::Unit;
use gimli::{
    AttributeValue, DebugLine, DebugLineOffset, IncompleteLineProgram, LineProgramHeader,
    LittleEndian,
};
use perfusion_model::text::clean;
use std::collections::HashMap;
use std::sync::Arc;

/// Longest line program of a unit, and longest header of one. A header names files and folders.
const MAX_PROGRAM_BYTES: u64 = 32 << 20;
const MAX_HEADER_BYTES: u64 = 512 << 10;
/// A sequence that begins in the ELF header is of a function that the linker has dropped.
const MIN_ADDRESS: u64 = 64;

/// A line of a file, which is numbered as in the unit's line program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileLine {
    pub(super) file: u64,
    pub(super) line: u32,
}

/// The bytes of a unit's line program; none where it has no lines.
pub(super) fn program(
    unit: &Unit,
    sections: &DebugSections<'_>,
    budget: &mut WorkBudget,
) -> Result<Vec<u8>, DwarfError> {
    let Some(at) = unit.line else { return Ok(Vec::new()) };
    // The length (4 bytes, or 12), the version, two sizes from version 5 on, and the header's
    // length.
    let head = sections.line.piece(sections.file, at, 24, budget)?;
    let word = |from: usize, bytes: usize| -> Option<u64> {
        let mut word = [0; 8];
        word.get_mut(..bytes)?.copy_from_slice(head.get(from..from + bytes)?);
        Some(u64::from_le_bytes(word))
    };
    let cut = || DwarfError::Format("a line program that is cut");
    let (first, bytes, length) = match word(0, 4).ok_or_else(cut)? {
        0xffff_ffff => (12, 8, word(4, 8).ok_or_else(cut)?),
        length => (4, 4, length),
    };
    let sizes = if word(first, 2).ok_or_else(cut)? >= 5 { 2 } else { 0 };
    let header = word(first + 2 + sizes, bytes).ok_or_else(cut)?;
    let all = length.saturating_add(first as u64);
    for (what, found, limit) in [
        ("a line program", all, MAX_PROGRAM_BYTES),
        ("the header of a line program", header, MAX_HEADER_BYTES),
    ] {
        if found > limit {
            return Err(DwarfError::TooLarge { what, found, limit });
        }
    }
    sections.line.piece(sections.file, at, all, budget)
}

/// A unit's line program and the names of its files.
pub(super) struct LineTable<'p> {
    /// `None` where the unit has no lines.
    program: Option<IncompleteLineProgram<Slice<'p>>>,
    /// Where the compiler was started.
    folder: Option<String>,
    files: HashMap<u64, Option<Arc<str>>>,
}

impl<'p> LineTable<'p> {
    /// That of a unit which was compiled in `folder`, with its line program.
    pub(super) fn new(
        unit: &Unit,
        program: &'p [u8],
        folder: Option<String>,
    ) -> Result<Self, DwarfError> {
        let size = unit.encoding.address_size;
        let parsed = (!program.is_empty())
            .then(|| {
                let section = DebugLine::new(program, LittleEndian);
                section.program(DebugLineOffset(0), size, None, None)
            })
            .transpose()?;
        Ok(Self { program: parsed, folder, files: HashMap::new() })
    }

    /// The line of each of these addresses, which are sorted.
    pub(super) fn lines(
        &self,
        addresses: &[u64],
        budget: &mut WorkBudget,
    ) -> Result<Vec<Option<FileLine>>, DwarfError> {
        let mut lines = vec![None; addresses.len()];
        let Some(program) = self.program.clone() else { return Ok(lines) };
        let mut rows = program.rows();
        // Where the last row begins, and its line.
        let mut last: Option<(u64, Option<FileLine>)> = None;
        let mut is_dropped = false;
        while let Some((_, row)) = rows.next_row()? {
            let address = row.address();
            match last {
                Some((from, line)) if !is_dropped && from < address => {
                    let first = addresses.partition_point(|wanted| *wanted < from);
                    let rest = addresses.get(first..).unwrap_or_default().iter();
                    let inside = rest.take_while(|wanted| **wanted < address).count();
                    budget.spend(1 + inside as u64)?;
                    let inside = lines.get_mut(first..first + inside).unwrap_or_default();
                    inside.iter_mut().for_each(|of| *of = line);
                }
                Some(_) => {}
                None => is_dropped = address < MIN_ADDRESS,
            }
            let line = row.line().and_then(|line| u32::try_from(line.get()).ok());
            let line = line.map(|line| FileLine { file: row.file_index(), line });
            last = if row.end_sequence() { None } else { Some((address, line)) };
        }
        Ok(lines)
    }

    /// The path of a file as the compiler was told it.
    pub(super) fn file(
        &mut self,
        number: u64,
        unit: &Unit,
        sections: &DebugSections<'_>,
        budget: &mut WorkBudget,
    ) -> Result<Option<Arc<str>>, DwarfError> {
        if let Some(known) = self.files.get(&number) {
            return Ok(known.clone());
        }
        let of = (unit, self.folder.as_deref());
        let found = match &self.program {
            Some(program) => path(program.header(), number, of, sections, budget)?,
            None => None,
        };
        let found: Option<Arc<str>> = found.map(|path| clean(&path).as_ref().into());
        self.files.insert(number, found.clone());
        Ok(found)
    }
}

/// The path of a file: its name, below its folder, below the folder of the compilation.
fn path(
    header: &LineProgramHeader<Slice<'_>>,
    number: u64,
    (unit, compiled_in): (&Unit, Option<&str>),
    sections: &DebugSections<'_>,
    budget: &mut WorkBudget,
) -> Result<Option<String>, DwarfError> {
    // Before version 5, 0 is no file.
    let Some(file) = header.file(number) else { return Ok(None) };
    let mut text = |value: &AttributeValue<Slice<'_>>| text(value, unit, sections, budget);
    let Some(name) = text(&file.path_name())? else { return Ok(None) };
    let folder = match file.directory(header) {
        Some(folder) => text(&folder)?,
        None => None,
    };
    let parts = [compiled_in.map(str::to_owned), folder, Some(name)];
    let joined = parts.into_iter().flatten().fold(String::new(), |before, part| {
        if before.is_empty() || part.starts_with('/') {
            part
        } else {
            format!("{}/{part}", before.trim_end_matches('/'))
        }
    });
    Ok((!joined.is_empty()).then_some(joined))
}
