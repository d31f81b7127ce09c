//! The units of a file's debug information: where each is, and which code it describes.

use super::sections::{DebugSections, DwarfError, Slice, WorkBudget};
use gimli::{
    Abbreviations, AttributeValue, DebugAbbrev, DebugAbbrevOffset, DebugAddrBase, Encoding,
    EndianSlice, EntriesRaw, Format, LittleEndian, RangeListsOffset, UnitOffset,
};
use std::collections::HashMap;
use std::rc::Rc;

/// Most units of one file, and address ranges of all of them.
const MAX_UNITS: usize = 1 << 18;
const MAX_RANGES: usize = 1 << 20;
/// Read first of a unit: its header and mostly its root entry. Some have long texts in it.
const HEAD_BYTES: u64 = 1024;
const MAX_HEAD_BYTES: u64 = 64 << 10;
/// Abbreviations of one unit.
const MAX_ABBREVIATION_BYTES: u64 = 1 << 20;
/// Sets of abbreviations that are kept to be quick.
const MAX_SETS: usize = 16;
/// Ranges that begin in the ELF header are those of functions that the linker has dropped.
const MIN_ADDRESS: u64 = 64;
/// Ranges before the nearest one that are looked at, where ranges overlap.
const MAX_OVERLAPS: usize = 16;
/// Steps that an address range takes.
const RANGE_STEPS: u64 = 4;

/// A unit's header, and what its root entry says.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// Where it is in `.debug_info`.
    pub(super) offset: u64,
    pub(super) end: u64,
    /// Bytes of its header.
    pub(super) header: usize,
    pub(super) encoding: Encoding,
    abbreviations: u64,
    pub(super) str_offsets_base: u64,
    low_pc: u64,
    addr_base: DebugAddrBase,
    range_lists_base: u64,
    /// Where its lines are in `.debug_line`.
    pub(super) line: Option<u64>,
}

/// Code of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct UnitRange {
    begin: u64,
    end: u64,
    unit: u32,
}

/// All units of a file.
#[derive(Debug, Default)]
pub(crate) struct UnitIndex {
    units: Vec<Unit>,
    /// By their beginnings.
    ranges: Vec<UnitRange>,
}

/// What an entry says of its code.
#[derive(Default)]
pub(super) struct CodeAttributes<'a> {
    low: Option<AttributeValue<Slice<'a>>>,
    high: Option<AttributeValue<Slice<'a>>>,
    ranges: Option<AttributeValue<Slice<'a>>>,
}

impl<'a> CodeAttributes<'a> {
    /// Takes an attribute if it is of these.
    pub(super) fn take(&mut self, attribute: &gimli::Attribute<Slice<'a>>) {
        match attribute.name() {
            gimli::DW_AT_low_pc => self.low = Some(attribute.value()),
            gimli::DW_AT_high_pc => self.high = Some(attribute.value()),
            gimli::DW_AT_ranges => self.ranges = Some(attribute.value()),
            _ => {}
        }
    }

    /// Calls `each` with the beginning and the end of each range.
    pub(super) fn each(
        &self,
        unit: &Unit,
        sections: &DebugSections<'_>,
        budget: &mut WorkBudget,
        mut each: impl FnMut(u64, u64),
    ) -> Result<(), DwarfError> {
        let mut add = |begin: u64, end: u64| {
            if (MIN_ADDRESS..end).contains(&begin) {
                each(begin, end);
            }
        };
        let (addresses, encoding) = (sections.addresses(), unit.encoding);
        let address = |value: &AttributeValue<Slice<'a>>| match value {
            AttributeValue::Addr(address) => Ok(Some(*address)),
            AttributeValue::DebugAddrIndex(index) => {
                addresses.get_address(encoding.address_size, unit.addr_base, *index).map(Some)
            }
            _ => Ok(None),
        };
        let lists = sections.range_lists();
        let list = match self.ranges {
            Some(AttributeValue::RangeListsRef(offset)) => Some(RangeListsOffset(offset.0)),
            Some(AttributeValue::DebugRngListsIndex(index)) => {
                sections.range_list(unit.range_lists_base, index.0, encoding.format)
            }
            _ => None,
        };
        if let Some(list) = list {
            let mut list = lists.ranges(list, encoding, unit.low_pc, &addresses, unit.addr_base)?;
            // One by one: a list may be long and without any range.
            while let Some(raw) = list.next_raw()? {
                budget.spend(RANGE_STEPS)?;
                if let Some(range) = list.convert_raw(raw)? {
                    add(range.begin, range.end);
                }
            }
        } else if let Some(begin) = self.low.as_ref().map(address).transpose()?.flatten() {
            match &self.high {
                Some(AttributeValue::Udata(size)) => add(begin, begin.saturating_add(*size)),
                Some(high) => add(begin, address(high)?.unwrap_or(begin)),
                None => {}
            }
        }
        Ok(())
    }
}

/// Sets of abbreviations that were read.
#[derive(Default)]
pub(super) struct AbbreviationSets(HashMap<u64, Rc<Abbreviations>>);

impl AbbreviationSets {
    /// Those of a unit.
    pub(super) fn of(
        &mut self,
        unit: &Unit,
        sections: &DebugSections<'_>,
        budget: &mut WorkBudget,
    ) -> Result<Rc<Abbreviations>, DwarfError> {
        if let Some(known) = self.0.get(&unit.abbreviations) {
            return Ok(Rc::clone(known));
        }
        // Most sets are short.
        let mut bytes = 16 << 10;
        let found = loop {
            let piece =
                sections.abbreviations.piece(sections.file, unit.abbreviations, bytes, budget)?;
            let is_all = (piece.len() as u64) < bytes;
            match set(&piece, is_all) {
                Some(found) => break found?,
                None if bytes < MAX_ABBREVIATION_BYTES => bytes *= 8,
                None => return Err(DwarfError::Format("too many abbreviations")),
            }
        };
        if self.0.len() >= MAX_SETS {
            self.0.clear();
        }
        let found = Rc::new(found);
        self.0.insert(unit.abbreviations, Rc::clone(&found));
        Ok(found)
    }
}

/// The set at the beginning of `piece`; `None` where it may go on behind it.
fn set(piece: &[u8], is_all: bool) -> Option<Result<Abbreviations, DwarfError>> {
    // The parser takes the end of its input for that of the set: a set ends in a zero.
    let ends = ends_within(piece).unwrap_or(false);
    if !ends && !is_all {
        return None;
    }
    let found = DebugAbbrev::new(piece, LittleEndian).abbreviations(DebugAbbrevOffset(0));
    Some(found.map_err(DwarfError::from))
}

/// Whether a set of abbreviations has its end in these bytes; `None` when it goes on behind them.
fn ends_within(piece: &[u8]) -> Option<bool> {
    let mut rest = piece.iter();
    let mut number = || -> Option<u64> {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = *rest.next()?;
            if shift < u64::BITS {
                value |= u64::from(byte & 0x7f) << shift;
            }
            if byte & 0x80 == 0 {
                break;
            }
        }
        Some(value)
    };
    let implicit = u64::from(gimli::DW_FORM_implicit_const.0);
    while number()? != 0 {
        // The tag, and whether there are children, which is a byte of 0 or 1.
        number()?;
        number()?;
        loop {
            let (name, form) = (number()?, number()?);
            if form == implicit {
                number()?;
            }
            if (name, form) == (0, 0) {
                break;
            }
        }
    }
    Some(true)
}

impl UnitIndex {
    /// Reads the headers and the root entries of all units.
    pub(super) fn read(
        sections: &DebugSections<'_>,
        sets: &mut AbbreviationSets,
        budget: &mut WorkBudget,
    ) -> Result<Self, DwarfError> {
        let mut index = Self::default();
        let mut at = 0;
        while at < sections.info.size() && index.units.len() < MAX_UNITS {
            let Some(next) = index.add(at, sections, sets, budget)? else { break };
            at = next;
        }
        index.ranges.sort_unstable_by_key(|range| (range.begin, range.end));
        index.ranges.shrink_to_fit();
        index.units.shrink_to_fit();
        Ok(index)
    }

    /// Adds the unit at `at`; where the next one is.
    fn add(
        &mut self,
        at: u64,
        sections: &DebugSections<'_>,
        sets: &mut AbbreviationSets,
        budget: &mut WorkBudget,
    ) -> Result<Option<u64>, DwarfError> {
        let mut head = sections.info.piece(sections.file, at, HEAD_BYTES, budget)?;
        let Some((mut unit, has_code)) = header(&head, at) else {
            return Err(DwarfError::Format("no header of a unit"));
        };
        if unit.end > sections.info.size() || unit.end <= at {
            return Err(DwarfError::Format("a unit that ends behind its section"));
        }
        let next = unit.end;
        if has_code {
            let mut ranges = Vec::new();
            let mut root = unit.read_root(&head, &mut ranges, sections, sets, budget);
            if matches!(root, Err(DwarfError::Parse(_))) && head.len() as u64 == HEAD_BYTES {
                head = sections.info.piece(sections.file, at, MAX_HEAD_BYTES, budget)?;
                ranges.clear();
                root = unit.read_root(&head, &mut ranges, sections, sets, budget);
            }
            match root {
                // Of one unit nothing is known then.
                Ok(()) | Err(DwarfError::Parse(_) | DwarfError::Format(_)) => {}
                Err(other) => return Err(other),
            }
            let number = u32::try_from(self.units.len()).unwrap_or(u32::MAX);
            let room = MAX_RANGES.saturating_sub(self.ranges.len());
            let ranges = ranges.into_iter().take(room);
            self.ranges.extend(ranges.map(|(begin, end)| UnitRange { begin, end, unit: number }));
        }
        self.units.push(unit);
        Ok(Some(next))
    }

    /// The unit whose code has this address.
    pub(super) fn of_code(&self, address: u64) -> Option<usize> {
        let after = self.ranges.partition_point(|range| range.begin <= address);
        let before = self.ranges.get(..after)?.iter().rev().take(MAX_OVERLAPS);
        let found = before.into_iter().find(|range| address < range.end)?;
        usize::try_from(found.unit).ok()
    }

    /// The unit that has this place of `.debug_info`.
    pub(super) fn of_entry(&self, offset: u64) -> Option<usize> {
        let after = self.units.partition_point(|unit| unit.offset <= offset);
        let at = after.checked_sub(1)?;
        self.units.get(at).filter(|unit| offset < unit.end).map(|_| at)
    }

    pub(super) fn unit(&self, at: usize) -> Option<&Unit> {
        self.units.get(at)
    }

    pub(crate) fn held_bytes(&self) -> usize {
        size_of_val(&*self.units) + size_of_val(&*self.ranges)
    }
}

/// The header of the unit that is at `at`, of which this is the beginning, and whether its root
/// entry may name code.
fn header(head: &[u8], at: u64) -> Option<(Unit, bool)> {
    let mut rest = head;
    let mut number = |bytes: usize| {
        let (field, behind) = rest.split_at_checked(bytes)?;
        rest = behind;
        // What is longer than a word is passed over.
        let mut word = [0; 8];
        word.iter_mut().zip(field).for_each(|(to, from)| *to = *from);
        Some(u64::from_le_bytes(word))
    };
    let (format, word, length) = match number(4)? {
        0xffff_ffff => (Format::Dwarf64, 8, number(8)?),
        length => (Format::Dwarf32, 4, length),
    };
    let first = if word == 8 { 12 } else { 4 };
    let end = at.checked_add(first)?.checked_add(length)?;
    let version = u16::try_from(number(2)?).ok()?;
    let (kind, address_size, abbreviations) = match version {
        2..=4 => {
            let abbreviations = number(word)?;
            (u64::from(gimli::DW_UT_compile.0), number(1)?, abbreviations)
        }
        5 => (number(1)?, number(1)?, number(word)?),
        _ => return None,
    };
    match gimli::DwUt(u8::try_from(kind).ok()?) {
        gimli::DW_UT_skeleton | gimli::DW_UT_split_compile => {
            number(8)?;
        }
        gimli::DW_UT_type | gimli::DW_UT_split_type => {
            number(8 + word)?;
        }
        _ => {}
    }
    let has_code = matches!(
        gimli::DwUt(u8::try_from(kind).ok()?),
        gimli::DW_UT_compile | gimli::DW_UT_skeleton
    );
    let header = head.len() - rest.len();
    let address_size = u8::try_from(address_size).ok().filter(|size| matches!(size, 4 | 8))?;
    let unit = Unit {
        offset: at,
        end,
        header,
        encoding: Encoding { address_size, format, version },
        abbreviations,
        str_offsets_base: if format == Format::Dwarf64 { 16 } else { 8 },
        low_pc: 0,
        addr_base: DebugAddrBase(if format == Format::Dwarf64 { 16 } else { 8 }),
        range_lists_base: if format == Format::Dwarf64 { 20 } else { 12 },
        line: None,
    };
    Some((unit, has_code))
}

impl Unit {
    /// Entries from an offset in the unit on, which are in `bytes`.
    pub(super) fn entries<'a>(
        &self,
        bytes: &'a [u8],
        offset: usize,
        abbreviations: &'a Abbreviations,
    ) -> EntriesRaw<'a, Slice<'a>> {
        let bytes = EndianSlice::new(bytes, LittleEndian);
        EntriesRaw::new(bytes, self.encoding, abbreviations, UnitOffset(offset))
    }

    fn read_root(
        &mut self,
        head: &[u8],
        ranges: &mut Vec<(u64, u64)>,
        sections: &DebugSections<'_>,
        sets: &mut AbbreviationSets,
        budget: &mut WorkBudget,
    ) -> Result<(), DwarfError> {
        let abbreviations = sets.of(self, sections, budget)?;
        let own = usize::try_from(self.end - self.offset).unwrap_or(usize::MAX);
        let head = head.get(..own.min(head.len())).unwrap_or_default();
        let mut entries =
            self.entries(head.get(self.header..).unwrap_or_default(), self.header, &abbreviations);
        let Some(root) = entries.read_abbreviation()? else { return Ok(()) };
        let mut code = CodeAttributes::default();
        for spec in root.attributes() {
            budget.spend(1)?;
            let attribute = entries.read_attribute(*spec)?;
            code.take(&attribute);
            match attribute.value() {
                AttributeValue::DebugAddrBase(base) => self.addr_base = base,
                AttributeValue::DebugRngListsBase(base) => {
                    self.range_lists_base = base.0 as u64;
                }
                AttributeValue::DebugStrOffsetsBase(base) => self.str_offsets_base = base.0 as u64,
                AttributeValue::DebugLineRef(offset) => self.line = Some(offset.0 as u64),
                _ => {}
            }
        }
        // Its address may be an index, for which the base had to be known.
        let address = match &code.low {
            Some(AttributeValue::Addr(address)) => Some(*address),
            Some(AttributeValue::DebugAddrIndex(index)) => {
                let size = self.encoding.address_size;
                Some(sections.addresses().get_address(size, self.addr_base, *index)?)
            }
            _ => None,
        };
        self.low_pc = address.unwrap_or(0);
        let most = MAX_RANGES;
        code.each(self, sections, budget, |begin, end| {
            if ranges.len() < most {
                ranges.push((begin, end));
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{ends_within, header};

    #[test]
    fn a_set_of_abbreviations_ends_in_a_zero() {
        let set = [1, 0x11, 1, 0x25, 0x0e, 0x13, 0x21, 0x85, 1, 0, 0, 2, 0x2e, 0, 0, 0, 0];
        assert_eq!(ends_within(&set), Some(true));
        for cut in 0..set.len() {
            assert_eq!(ends_within(&set[..cut]), None, "cut at {cut}");
        }
    }

    #[test]
    fn headers_of_all_versions_are_read_and_others_are_not() {
        let known = |head: &[u8]| {
            header(head, 0x100).map(|(unit, has_code)| {
                (unit.end, unit.header, unit.abbreviations, unit.encoding.version, has_code)
            })
        };
        let four = [0x20, 0, 0, 0, 4, 0, 7, 0, 0, 0, 8];
        assert_eq!(known(&four), Some((0x124, 11, 7, 4, true)));
        let five = [0x20, 0, 0, 0, 5, 0, 1, 8, 7, 0, 0, 0];
        assert_eq!(known(&five), Some((0x124, 12, 7, 5, true)));
        let partial = [0x20, 0, 0, 0, 5, 0, 3, 8, 7, 0, 0, 0];
        assert_eq!(known(&partial), Some((0x124, 12, 7, 5, false)));
        let six = [0x20, 0, 0, 0, 6, 0, 1, 8, 7, 0, 0, 0];
        assert_eq!((known(&six), known(&five[..11])), (None, None));
    }
}
