//! Functions of a unit, and those that the compiler has put into them.
//!
//! The entries are read one after the other, and none of them by a function that calls itself:
//! their depth is the file's to say.

use super::sections::{DebugSections, DwarfError, WorkBudget};
use super::strings::text;
use super::units::{AbbreviationSets, CodeAttributes, Unit, UnitIndex};
use crate::demangle;
use gimli::{Abbreviations, AttributeValue, DwTag};
use perfusion_model::text::clean;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Largest unit that is read.
const MAX_UNIT_BYTES: u64 = 48 << 20;
/// Functions that may be nested at one address, and at all addresses of a unit together.
const MAX_DEPTH: usize = 64;
const MAX_SCOPES: usize = 1 << 20;
/// Entries that name a function, one the other: an instance, its abstract origin, a declaration.
const MAX_REFERENCES: usize = 8;
/// Bytes of an entry that is looked up alone: of most, and at most.
const ENTRY_BYTES: [u64; 2] = [192, 4096];
/// What names of functions may take that are kept to be quick.
const MAX_KNOWN_BYTES: usize = 16 << 20;

/// Code of a function at an address: itself, or put into another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scope {
    /// Where its entry is in `.debug_info`.
    pub(super) entry: u64,
    /// The file and the line of the call, where it was put into another function.
    pub(super) call: Option<(u64, u32)>,
    /// It was put into another function.
    pub(super) is_inlined: bool,
}

/// What a unit says of a function.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Function {
    /// Readable, and as the linker has it.
    pub(super) names: Option<(Arc<str>, Arc<str>)>,
    /// The unit's number of the file where it begins, if it is of that unit, and the line.
    pub(super) start: Option<(Option<u64>, u32)>,
}

/// The bytes of a unit.
pub(super) fn read(
    unit: &Unit,
    sections: &DebugSections<'_>,
    budget: &mut WorkBudget,
) -> Result<Vec<u8>, DwarfError> {
    let found = unit.end.saturating_sub(unit.offset);
    if found > MAX_UNIT_BYTES {
        return Err(DwarfError::TooLarge { what: "a unit", found, limit: MAX_UNIT_BYTES });
    }
    sections.info.piece(sections.file, unit.offset, found, budget)
}

/// The folder in which a unit was compiled.
pub(super) fn folder(
    unit: &Unit,
    bytes: &[u8],
    abbreviations: &Abbreviations,
    sections: &DebugSections<'_>,
    budget: &mut WorkBudget,
) -> Result<Option<String>, DwarfError> {
    let root = bytes.get(unit.header..).unwrap_or_default();
    let mut entries = unit.entries(root, unit.header, abbreviations);
    let Some(root) = entries.read_abbreviation()? else { return Ok(None) };
    for spec in root.attributes() {
        budget.spend(1)?;
        let attribute = entries.read_attribute(*spec)?;
        if attribute.name() == gimli::DW_AT_comp_dir {
            return text(&attribute.value(), unit, sections, budget);
        }
    }
    Ok(None)
}

/// The functions at each of these addresses, which are sorted, the outermost first. What was found
/// before an error stays in `scopes`.
pub(super) fn scopes(
    (unit, bytes): (&Unit, &[u8]),
    abbreviations: &Abbreviations,
    addresses: &[u64],
    scopes: &mut [Vec<Scope>],
    (sections, budget): (&DebugSections<'_>, &mut WorkBudget),
) -> Result<(), DwarfError> {
    let root = bytes.get(unit.header..).unwrap_or_default();
    let mut entries = unit.entries(root, unit.header, abbreviations);
    let mut held = 0;
    while !entries.is_empty() {
        let entry = unit.offset.saturating_add(entries.next_offset().0 as u64);
        let Some(abbreviation) = entries.read_abbreviation()? else {
            budget.spend(1)?;
            continue;
        };
        budget.spend(1 + abbreviation.attributes().len() as u64)?;
        let is_inlined = match abbreviation.tag() {
            gimli::DW_TAG_subprogram => false,
            gimli::DW_TAG_inlined_subroutine => true,
            tag if !is_type(tag) => {
                entries.skip_attributes(abbreviation.attributes())?;
                continue;
            }
            _ => {
                // Types have no code in them, and C++ has many.
                let mut behind = None;
                for spec in abbreviation.attributes() {
                    let attribute = entries.read_attribute(*spec)?;
                    if attribute.name() == gimli::DW_AT_sibling {
                        behind = match attribute.value() {
                            AttributeValue::UnitRef(at) => Some(at.0),
                            _ => None,
                        };
                    }
                }
                if let Some(at) = behind.filter(|at| *at > entries.next_offset().0)
                    && let Some(rest) = bytes.get(at..)
                {
                    entries = unit.entries(rest, at, abbreviations);
                }
                continue;
            }
        };
        let (mut code, mut file, mut line) = (CodeAttributes::default(), None, None);
        for spec in abbreviation.attributes() {
            let attribute = entries.read_attribute(*spec)?;
            code.take(&attribute);
            match attribute.name() {
                gimli::DW_AT_call_file => file = file_number(&attribute.value()),
                gimli::DW_AT_call_line => line = attribute.udata_value(),
                _ => {}
            }
        }
        let call = file.zip(line.and_then(|line| u32::try_from(line).ok()));
        let scope = Scope { entry, call, is_inlined };
        let mut steps = 0;
        code.each(unit, sections, budget, |begin, end| {
            let first = addresses.partition_point(|address| *address < begin);
            let rest = addresses.get(first..).unwrap_or_default().iter();
            let inside = rest.take_while(|address| **address < end).count();
            steps += inside as u64;
            for of in scopes.get_mut(first..first + inside).unwrap_or_default() {
                // An entry of a function stands before those of what was put into it.
                if !is_inlined {
                    held -= of.len();
                    of.clear();
                }
                if of.len() < MAX_DEPTH && held < MAX_SCOPES && of.last() != Some(&scope) {
                    of.push(scope);
                    held += 1;
                }
            }
        })?;
        budget.spend(steps)?;
    }
    Ok(())
}

fn is_type(tag: DwTag) -> bool {
    matches!(
        tag,
        gimli::DW_TAG_structure_type
            | gimli::DW_TAG_class_type
            | gimli::DW_TAG_union_type
            | gimli::DW_TAG_enumeration_type
            | gimli::DW_TAG_subroutine_type
            | gimli::DW_TAG_array_type
    )
}

/// The number of a file in an attribute's value.
fn file_number(value: &AttributeValue<super::sections::Slice<'_>>) -> Option<u64> {
    match value {
        AttributeValue::FileIndex(number) => Some(*number),
        other => other.udata_value(),
    }
}

/// Names of functions that were looked up.
pub(super) struct Functions<'s> {
    pub(super) index: &'s UnitIndex,
    pub(super) sections: &'s DebugSections<'s>,
    pub(super) sets: AbbreviationSets,
    /// Of one unit, by entry.
    known: HashMap<u64, Rc<Function>>,
    known_bytes: usize,
}

/// What one entry says, and the entry that says the rest.
#[derive(Default)]
struct Entry {
    linkage: Option<String>,
    name: Option<String>,
    file: Option<u64>,
    line: Option<u32>,
    next: Option<u64>,
}

impl<'s> Functions<'s> {
    pub(super) fn new(
        index: &'s UnitIndex,
        sections: &'s DebugSections<'s>,
        sets: AbbreviationSets,
    ) -> Self {
        Self { index, sections, sets, known: HashMap::new(), known_bytes: 0 }
    }

    /// Forgets what was looked up: numbers of files are those of one unit.
    pub(super) fn clear(&mut self) {
        self.known.clear();
        self.known_bytes = 0;
    }

    /// The function that an entry of a unit describes.
    pub(super) fn of(
        &mut self,
        unit: usize,
        entry: u64,
        budget: &mut WorkBudget,
    ) -> Result<Rc<Function>, DwarfError> {
        if let Some(known) = self.known.get(&entry) {
            return Ok(Rc::clone(known));
        }
        let first = self.entry(entry, budget)?;
        // The same function is put into many others: all their entries lead to one.
        let shared = first.next.filter(|_| first.line.is_none());
        if let Some(known) = shared.and_then(|shared| self.known.get(&shared)) {
            let known = Rc::clone(known);
            self.keep(entry, &known, 0);
            return Ok(known);
        }
        let mut function = Function::default();
        let (mut linkage, mut name) = (None, None);
        let (mut at, mut found) = (entry, first);
        for _ in 0..MAX_REFERENCES {
            linkage = linkage.or(found.linkage);
            name = name.or(found.name);
            if let (None, Some(line)) = (function.start, found.line) {
                let is_of_unit = self.index.of_entry(at) == Some(unit);
                function.start = Some((found.file.filter(|_| is_of_unit), line));
            }
            let Some(next) = found.next.filter(|next| *next != at) else { break };
            (at, found) = (next, self.entry(next, budget)?);
        }
        function.names = linkage.or(name).filter(|name| !name.is_empty()).map(|system_name| {
            let readable = demangle::whole(&system_name);
            let readable = readable.as_deref().unwrap_or(&system_name);
            (clean(readable).as_ref().into(), clean(&system_name).as_ref().into())
        });
        let function = Rc::new(function);
        let names = function.names.as_ref().map_or(0, |(name, system)| name.len() + system.len());
        self.keep(entry, &function, names + size_of::<Function>());
        if let Some(shared) = shared {
            self.keep(shared, &function, 0);
        }
        Ok(function)
    }

    fn keep(&mut self, entry: u64, function: &Rc<Function>, bytes: usize) {
        self.known_bytes += bytes + 2 * size_of::<(u64, Rc<Function>)>();
        if self.known_bytes > MAX_KNOWN_BYTES {
            self.clear();
        }
        self.known.insert(entry, Rc::clone(function));
    }

    /// One entry, wherever it is.
    fn entry(&mut self, at: u64, budget: &mut WorkBudget) -> Result<Entry, DwarfError> {
        let lost = || DwarfError::Format("a reference to no unit");
        let number = self.index.of_entry(at).ok_or_else(lost)?;
        let unit = self.index.unit(number).ok_or_else(lost)?;
        let abbreviations = self.sets.of(unit, self.sections, budget)?;
        let left = unit.end.saturating_sub(at);
        let [short, long] = ENTRY_BYTES.map(|most| most.min(left));
        let mut parse = |most| {
            let bytes = self.sections.info.piece(self.sections.file, at, most, budget)?;
            parse((unit, &bytes), at, &abbreviations, (self.sections, budget))
        };
        match parse(short) {
            Err(DwarfError::Parse(_)) if long > short => parse(long),
            other => other,
        }
    }
}

/// The entry at `at`, which these bytes begin with.
fn parse(
    (unit, bytes): (&Unit, &[u8]),
    at: u64,
    abbreviations: &Abbreviations,
    (sections, budget): (&DebugSections<'_>, &mut WorkBudget),
) -> Result<Entry, DwarfError> {
    let offset = usize::try_from(at.saturating_sub(unit.offset)).unwrap_or(usize::MAX / 2);
    let mut entries = unit.entries(bytes, offset, abbreviations);
    let mut entry = Entry::default();
    let Some(abbreviation) = entries.read_abbreviation()? else { return Ok(entry) };
    budget.spend(abbreviation.attributes().len() as u64)?;
    for spec in abbreviation.attributes() {
        let attribute = entries.read_attribute(*spec)?;
        let value = attribute.value();
        match attribute.name() {
            gimli::DW_AT_linkage_name | gimli::DW_AT_MIPS_linkage_name => {
                entry.linkage = text(&value, unit, sections, budget)?;
            }
            gimli::DW_AT_name => entry.name = text(&value, unit, sections, budget)?,
            gimli::DW_AT_decl_file => entry.file = file_number(&value),
            gimli::DW_AT_decl_line => {
                let line = attribute.udata_value().filter(|line| *line > 0);
                entry.line = line.and_then(|line| u32::try_from(line).ok());
            }
            gimli::DW_AT_abstract_origin | gimli::DW_AT_specification => {
                entry.next = match value {
                    AttributeValue::UnitRef(at) => unit.offset.checked_add(at.0 as u64),
                    AttributeValue::DebugInfoRef(at) => Some(at.0 as u64),
                    _ => None,
                };
            }
            _ => {}
        }
    }
    Ok(entry)
}
