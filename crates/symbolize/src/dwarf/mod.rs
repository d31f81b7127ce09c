//! Lines and inlined functions of native code, from DWARF.
//!
//! blazesym could tell them. But whoever is profiled writes the file, and blazesym is for honest
//! ones: nested functions are read by a function that calls itself, lists of ranges may be summed
//! up without end, and all of the sections would have to be copied. So the entries are read here,
//! with gimli, piece by piece, one after the other, and each step is counted (`WorkBudget`).
//!
//! Not read: debug information in further files (`.dwo`, and what `dwz` shares among files).

mod functions;
mod line_table;
mod sections;
mod strings;
mod units;

use crate::elf_sections::{SHT_NOBITS, Sections};
use crate::native::memfd;
use crate::source_line::{InlinedFunction, SourceLine};
use functions::{Functions, Scope};
use line_table::{FileLine, LineTable};
use perfusion_host::process::guarded_io::ForeignFile;
use sections::DebugSections;
pub(crate) use sections::{DwarfError, WorkBudget};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use units::AbbreviationSets;
pub(crate) use units::UnitIndex;

/// Where the code at an address comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AddressLines {
    /// Functions that are part of the one that a symbol names, innermost first.
    pub(crate) inlined: Vec<InlinedFunction>,
    /// The line in that function itself.
    pub(crate) line: Option<SourceLine>,
}

/// The inlined functions at ELF virtual addresses of a file that is held in memory, innermost
/// first, and the lines of the functions that they are part of.
#[must_use]
pub fn lines_in(
    image: &[u8],
    addresses: &[u64],
) -> Vec<(Vec<InlinedFunction>, Option<SourceLine>)> {
    let mut all = vec![(Vec::new(), None); addresses.len()];
    let file = || -> Option<ForeignFile> {
        let mut file = memfd().ok()?;
        file.write_all(image).ok()?;
        Some(ForeignFile::own(file))
    };
    if let Some(file) = file()
        && let Ok(sections) = Sections::read(&file)
    {
        let mut budget = WorkBudget::default();
        let of = (&file, &sections);
        let refused = lines(of, &mut None, addresses, &mut budget, |at, lines| {
            if let Some(of) = all.get_mut(at) {
                *of = (lines.inlined, lines.line);
            }
        });
        tracing::trace!(?refused, "debug information read");
    }
    all
}

/// How an inlined function is called that has no name.
const UNNAMED: &str = "[inlined]";

/// Whether there is debug information in a file.
pub(crate) fn is_in(sections: &Sections) -> bool {
    [".debug_info", ".debug_line"].iter().all(|name| {
        let section = sections.named(name);
        section.is_some_and(|section| section.kind != SHT_NOBITS && section.size > 0)
    })
}

/// Calls `found` with the position and the lines of each of these ELF virtual addresses of which
/// the file says something. `index` is kept from call to call. Errors of one unit leave that unit
/// out, and are counted: how many there were.
///
/// # Errors
/// When nothing more of the file can be read.
pub(crate) fn lines(
    (file, sections): (&ForeignFile, &Sections),
    index: &mut Option<UnitIndex>,
    addresses: &[u64],
    budget: &mut WorkBudget,
    mut found: impl FnMut(usize, AddressLines),
) -> Result<u64, DwarfError> {
    // Hostile input to a parser: a bug of it must not end the program.
    catch_unwind(AssertUnwindSafe(|| {
        let sections = DebugSections::open(file, sections, budget)?;
        let mut sets = AbbreviationSets::default();
        if index.is_none() {
            *index = Some(UnitIndex::read(&sections, &mut sets, budget)?);
        }
        let Some(index) = index.as_ref() else { return Ok(0) };
        let mut of_units: BTreeMap<usize, Vec<(u64, usize)>> = BTreeMap::new();
        for (position, &address) in addresses.iter().enumerate() {
            if let Some(unit) = index.of_code(address) {
                of_units.entry(unit).or_default().push((address, position));
            }
        }
        let (mut functions, mut refused) = (Functions::new(index, &sections, sets), 0);
        for (unit, mut wanted) in of_units {
            wanted.sort_unstable();
            match of_unit(unit, &wanted, &mut functions, budget, &mut found) {
                Ok(()) => {}
                Err(DwarfError::Budget) => return Err(DwarfError::Budget),
                Err(error) => {
                    refused += 1;
                    tracing::debug!(%error, "debug information of a unit not read");
                }
            }
        }
        Ok(refused)
    }))
    .map_err(|_| DwarfError::Panic)?
}

/// The lines of addresses in one unit.
fn of_unit(
    number: usize,
    wanted: &[(u64, usize)],
    functions: &mut Functions<'_>,
    budget: &mut WorkBudget,
    found: &mut impl FnMut(usize, AddressLines),
) -> Result<(), DwarfError> {
    functions.clear();
    let (index, sections) = (functions.index, functions.sections);
    let Some(unit) = index.unit(number) else { return Ok(()) };
    let addresses: Vec<u64> = wanted.iter().map(|(address, _)| *address).collect();
    let bytes = functions::read(unit, sections, budget)?;
    let abbreviations = functions.sets.of(unit, sections, budget)?;
    let folder = functions::folder(unit, &bytes, &abbreviations, sections, budget)?;
    let program = line_table::program(unit, sections, budget)?;
    let mut table = LineTable::new(unit, &program, folder)?;
    let lines = table.lines(&addresses, budget)?;
    let mut scopes = vec![Vec::new(); addresses.len()];
    // A unit whose entries cannot be read to their end has lines all the same.
    let entries = functions::scopes(
        (unit, &bytes),
        &abbreviations,
        &addresses,
        &mut scopes,
        (sections, budget),
    );
    drop(bytes);
    for (((_, position), line), scopes) in wanted.iter().zip(lines).zip(&scopes) {
        let mut resolver = Resolver { number, functions, table: &mut table, budget };
        let lines = resolver.address(line, scopes)?;
        if lines != AddressLines::default() {
            found(*position, lines);
        }
    }
    entries
}

/// Turns numbers into names.
struct Resolver<'r, 's, 'p> {
    number: usize,
    functions: &'r mut Functions<'s>,
    table: &'r mut LineTable<'p>,
    budget: &'r mut WorkBudget,
}

impl Resolver<'_, '_, '_> {
    /// The lines of an address that is on `line`, in these functions.
    fn address(
        &mut self,
        line: Option<FileLine>,
        scopes: &[Scope],
    ) -> Result<AddressLines, DwarfError> {
        let mut lines = AddressLines::default();
        // The innermost one is on the address's line, and each further one on that of its call.
        let mut line = line;
        for scope in scopes.iter().rev() {
            // A name that cannot be read makes no line wrong.
            let function = match self.functions.of(self.number, scope.entry, self.budget) {
                Err(error @ (DwarfError::Budget | DwarfError::Read(_))) => return Err(error),
                other => other.unwrap_or_default(),
            };
            let source = self.source(line, function.start)?;
            if !scope.is_inlined {
                lines.line = source;
                return Ok(lines);
            }
            let unnamed = || (UNNAMED.into(), UNNAMED.into());
            let (name, system_name) = function.names.clone().unwrap_or_else(unnamed);
            lines.inlined.push(InlinedFunction { name, system_name, line: source });
            let call = scope.call.filter(|(_, line)| *line > 0);
            line = call.map(|(file, line)| FileLine { file, line });
        }
        lines.line = self.source(line, None)?;
        Ok(lines)
    }

    fn source(
        &mut self,
        line: Option<FileLine>,
        start: Option<(Option<u64>, u32)>,
    ) -> Result<Option<SourceLine>, DwarfError> {
        let Some(FileLine { file, line }) = line else { return Ok(None) };
        let Some(path) = self.file(file)? else { return Ok(None) };
        // The line of the code may be of a file that was included in the function.
        let start_line = match start {
            Some((Some(of), start)) if self.file(of)?.as_ref() == Some(&path) => start,
            Some((None, start)) => start,
            _ => 0,
        };
        Ok(Some(SourceLine { file: path, line, start_line }))
    }

    fn file(&mut self, number: u64) -> Result<Option<Arc<str>>, DwarfError> {
        let (index, sections) = (self.functions.index, self.functions.sections);
        let Some(unit) = index.unit(self.number) else { return Ok(None) };
        self.table.file(number, unit, sections, self.budget)
    }
}

#[cfg(test)]
mod tests;
