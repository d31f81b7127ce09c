//! (DWARF call frame information, address) → rule, for native code. One address at a time: no table
//! is compiled.
//!
//! `.eh_frame` is found through the sorted table of `.eh_frame_hdr` (LSB 5.0, 10.6.2); where that
//! table is missing, and for `.debug_frame`, an index of (start, end, offset) is made once by
//! reading the section from end to end. Where the sections are large (megabytes in browsers and
//! compilers) they stay in the file, and of both only what one look-up needs is read. Facts relied
//! on: a CIE with augmentation `S` marks a signal frame (gcc unwind-dw2.c); glibc's `clone3`,
//! `_start` and the vDSO state the end of the stack by an undefined return address (glibc
//! sysdeps/unix/sysv/linux/x86_64/clone3.S). Of DWARF expressions those that occur are evaluated:
//! PLT entries (binutils elf_x86_64_eh_frame_plt: the place in the 16-byte entry decides, and the
//! address is known here), signal frames (glibc sigaction.c: register plus offset, one dereference)
//! and hand-written assembly that keeps the CFA in its frame (OpenSSL). On aarch64 the return
//! address stays in x30 unless it says otherwise, and whether it is signed
//! (`DW_CFA_AARCH64_negate_ra_state`) need not be known: signatures are always taken off.

use super::machine::TargetMachine;
use super::native::NATIVE;
use super::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use gimli::{
    BaseAddresses, CfaRule, CommonInformationEntry, DebugFrame, EhFrame, EndianSlice,
    FrameDescriptionEntry, LittleEndian, Operation, RegisterRule, UnwindContext, UnwindOffset,
    UnwindSection,
};
use std::ops::Range;
use std::sync::OnceLock;

type SectionBytes<'a> = EndianSlice<'a, LittleEndian>;

/// Longest CIE or FDE that is looked into, bytes: the longest of Chromium's has under 20 KiB.
const MAX_ENTRY_BYTES: usize = 32 << 10;
/// Most entries looked at when an index is made by reading the whole section, whether they turn out
/// to be of use or not; what is behind them is in no index. Only Go's programs need one, and the
/// largest of those have some 100,000 functions.
const MAX_INDEX: usize = 512 << 10;
/// Most bytes of CIEs read for one index: each FDE that names another one than the FDE before it
/// has its own parsed anew.
const MAX_INDEX_CIE_BYTES: usize = 32 << 20;
/// Most operations of one DWARF expression, and values on its stack.
const MAX_OPERATIONS: usize = 64;
/// Where the rows of `.eh_frame_hdr`'s table begin, and the bytes of each.
const TABLE_AT: usize = 12;
const ROW_BYTES: usize = 8;
/// Rows of a table in the file that are read at once.
const BLOCK_ROWS: u64 = 256;
/// Bytes of the length a CIE or FDE begins with.
const LENGTH_BYTES: usize = 4;

/// A section's bytes and the address the file gives it.
#[derive(Debug, Default, Clone)]
pub struct CfiSection {
    /// Virtual address in the file's own numbering.
    pub address: u64,
    /// Contents.
    pub bytes: Vec<u8>,
}

/// The file of an image.
pub trait FileBytes {
    /// Reads from `offset`; fewer bytes than asked where the file ends.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> usize;
}

/// No file: all that is known is in memory.
struct NoFile;

impl FileBytes for NoFile {
    fn read_at(&self, _offset: u64, _into: &mut [u8]) -> usize {
        0
    }
}

/// Where a section's bytes are in the file.
#[derive(Debug, Clone, Copy)]
pub struct FileSection {
    /// Virtual address in the file's own numbering.
    pub address: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// `.eh_frame_hdr` with a table of the usual form, and `.eh_frame`, both left in the file.
#[derive(Debug)]
pub struct FarSections {
    hdr: FileSection,
    rows: u64,
    eh_frame: FileSection,
    /// Where the functions of every so many rows begin ([`FarSections::step`]), once that was read.
    starts: OnceLock<Vec<u64>>,
}

/// The unwind sections of one ELF image; each may be missing.
#[derive(Debug)]
pub struct UnwindSections {
    machine: &'static TargetMachine,
    /// Instead of `eh_frame_hdr` and `eh_frame`.
    pub far: Option<FarSections>,
    /// `.eh_frame_hdr`.
    pub eh_frame_hdr: Option<CfiSection>,
    /// `.eh_frame`.
    pub eh_frame: Option<CfiSection>,
    /// `.debug_frame`.
    pub debug_frame: Option<CfiSection>,
    /// Addresses of `.plt`, `.plt.got` and `.plt.sec`: lld writes no call frame information for
    /// them.
    pub plt: Vec<Range<u64>>,
    eh_index: OnceLock<Vec<IndexEntry>>,
    debug_index: OnceLock<Vec<IndexEntry>>,
}

/// A rule and the range its FDE covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FdeRule {
    /// The rule.
    pub rule: Rule,
    /// Addresses of the function, or of the part of it, that the FDE is for.
    pub function: Range<u64>,
    /// Which table says so.
    pub table: CfiTable,
}

/// A table of call frame information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CfiTable {
    /// `.eh_frame`.
    EhFrame,
    /// `.debug_frame`.
    DebugFrame,
}

impl FdeRule {
    /// True when the rule says that a register is saved below the stack pointer. Clang writes that
    /// for the instructions after an epilogue's pops (it moves the CFA, but does not restore the
    /// registers), where the memory may be overwritten already and the register itself holds the
    /// value; a few leaf functions save into the red zone in earnest. The code tells which.
    #[must_use]
    pub fn saves_below_stack(&self) -> bool {
        let Cfa::Register { base: Register::RSP, offset } = self.rule.cfa else { return false };
        self.rule
            .registers
            .iter()
            .any(|saved| matches!(saved, Saved::AtCfa(at) if at.saturating_add(offset) < 0))
    }
}

#[derive(Debug, Clone, Copy)]
struct IndexEntry {
    start: u64,
    end: u64,
    offset: usize,
}

impl UnwindSections {
    /// Sections of this machine with the given contents.
    #[must_use]
    pub fn new(
        eh_frame_hdr: Option<CfiSection>,
        eh_frame: Option<CfiSection>,
        debug_frame: Option<CfiSection>,
    ) -> Self {
        Self::of(NATIVE, eh_frame_hdr, eh_frame, debug_frame)
    }

    /// The same of another machine.
    #[must_use]
    pub fn of(
        machine: &'static TargetMachine,
        eh_frame_hdr: Option<CfiSection>,
        eh_frame: Option<CfiSection>,
        debug_frame: Option<CfiSection>,
    ) -> Self {
        Self {
            machine,
            far: None,
            eh_frame_hdr,
            eh_frame,
            debug_frame,
            plt: Vec::new(),
            eh_index: OnceLock::new(),
            debug_index: OnceLock::new(),
        }
    }

    /// Bytes held.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let sections = [&self.eh_frame_hdr, &self.eh_frame, &self.debug_frame];
        let indexes = [&self.eh_index, &self.debug_index];
        let starts = self.far.as_ref().and_then(|far| far.starts.get());
        let index_bytes = indexes
            .iter()
            .filter_map(|i| i.get())
            .map(|i| i.len() * size_of::<IndexEntry>())
            .sum::<usize>();
        sections.iter().filter_map(|s| s.as_ref()).map(|s| s.bytes.len()).sum::<usize>()
            + index_bytes
            + starts.map_or(0, |starts| size_of_val(&**starts))
    }

    /// True when `address` is in a procedure linkage table: straight code of which a replay finds
    /// the rule.
    #[must_use]
    pub fn is_plt(&self, address: u64) -> bool {
        self.plt.iter().any(|range| range.contains(&address))
    }

    /// The rule at `address` (the file's numbering) by the sections in memory.
    ///
    /// # Errors
    /// [`Refusal`] when no table covers it or what covers it cannot be used.
    pub fn rule(&self, address: u64) -> Result<FdeRule, RuleRefusal> {
        self.rule_in(&NoFile, address)
    }

    /// The same, with the image's file for what was left in it.
    ///
    /// # Errors
    /// As [`UnwindSections::rule`], and [`Refusal::Unreadable`] when the file does not give it.
    pub fn rule_in(&self, file: &dyn FileBytes, address: u64) -> Result<FdeRule, RuleRefusal> {
        self.ask(file, address)
    }

    /// The range of the FDE that covers `address`: what an address costs that needs no rule, for a
    /// rule's program may be long.
    ///
    /// # Errors
    /// As [`UnwindSections::rule_in`].
    pub fn function_in(
        &self,
        file: &dyn FileBytes,
        address: u64,
    ) -> Result<Range<u64>, RuleRefusal> {
        self.ask(file, address)
    }

    fn ask<A: FdeQuery>(&self, file: &dyn FileBytes, address: u64) -> Result<A, RuleRefusal> {
        let found = match &self.far {
            Some(far) => far.ask(self.machine, file, address),
            None => self.eh_frame(address),
        };
        match found {
            Err(RuleRefusal::NoEntry) => self.debug_frame(address),
            found => found,
        }
    }

    fn eh_frame<A: FdeQuery>(&self, address: u64) -> Result<A, RuleRefusal> {
        let section = self.eh_frame.as_ref().ok_or(RuleRefusal::NoEntry)?;
        let mut eh_frame = EhFrame::new(&section.bytes, LittleEndian);
        eh_frame.set_vendor(self.machine.vendor);
        let mut bases = BaseAddresses::default().set_eh_frame(section.address);
        if let Some(hdr) = &self.eh_frame_hdr {
            bases = bases.set_eh_frame_hdr(hdr.address);
        }
        let dwarf =
            Dwarf { table: CfiTable::EhFrame, section: eh_frame, bytes: &section.bytes, bases };
        if let Some(hdr) = &self.eh_frame_hdr
            && let Some(found) = by_table(self.machine, hdr, &dwarf, section.address, address)
        {
            return found;
        }
        let index = self.eh_index.get_or_init(|| dwarf.index());
        dwarf.by_index(self.machine, index, address)
    }

    fn debug_frame<A: FdeQuery>(&self, address: u64) -> Result<A, RuleRefusal> {
        let section = self.debug_frame.as_ref().ok_or(RuleRefusal::NoEntry)?;
        let mut debug_frame = DebugFrame::new(&section.bytes, LittleEndian);
        debug_frame.set_address_size(8);
        debug_frame.set_vendor(self.machine.vendor);
        let bases = BaseAddresses::default();
        let dwarf = Dwarf {
            table: CfiTable::DebugFrame,
            section: debug_frame,
            bytes: &section.bytes,
            bases,
        };
        let index = self.debug_index.get_or_init(|| dwarf.index());
        dwarf.by_index(self.machine, index, address)
    }
}

/// Looks in the sorted table. `None` when there is none of the one form all linkers write: four
/// bytes of version and encodings, the place of `.eh_frame`, the number of rows, then rows of two
/// offsets from the section's own address. Read here and not by gimli (0.34): that multiplies the
/// number of rows without a check.
fn by_table<A: FdeQuery>(
    machine: &TargetMachine,
    hdr: &CfiSection,
    eh_frame: &Dwarf<'_, EhFrame<SectionBytes<'_>>>,
    eh_frame_address: u64,
    address: u64,
) -> Option<Result<A, RuleRefusal>> {
    let (head, table) = hdr.bytes.split_first_chunk::<TABLE_AT>()?;
    let count = usize::try_from(table_rows(head)?).ok()?;
    let (rows, _) = table.as_chunks::<ROW_BYTES>();
    let rows = rows.get(..count).unwrap_or(rows);
    if rows.is_empty() {
        return None;
    }
    let Some((_, fde)) = row_before(rows, hdr.address, address) else {
        return Some(Err(RuleRefusal::NoEntry));
    };
    let offset = fde.checked_sub(eh_frame_address).and_then(|o| usize::try_from(o).ok());
    let Some(offset) = offset else { return Some(Err(RuleRefusal::Malformed)) };
    Some(eh_frame.ask(machine, offset, address))
}

/// How many rows a table says it has, if it has the one form all linkers write.
fn table_rows(head: &[u8; TABLE_AT]) -> Option<u32> {
    let [1, 0x1b, 0x03, 0x3b, _, _, _, _, count @ ..] = *head else { return None };
    Some(u32::from_le_bytes(count))
}

/// What a row of the table at `table` says: where a function begins, and its FDE.
fn row_at(table: u64, [a, b, c, d, e, f, g, h]: [u8; ROW_BYTES]) -> (u64, u64) {
    let at = |bytes| table.wrapping_add_signed(i64::from(i32::from_le_bytes(bytes)));
    (at([a, b, c, d]), at([e, f, g, h]))
}

/// The last row whose function does not begin behind `address`.
fn row_before(rows: &[[u8; ROW_BYTES]], table: u64, address: u64) -> Option<(u64, u64)> {
    let after = rows.partition_point(|row| row_at(table, *row).0 <= address);
    rows.get(after.checked_sub(1)?).map(|row| row_at(table, *row))
}

impl FarSections {
    /// Sections that are left in the file; `None` when their table has not the usual form, so that
    /// all would have to be read.
    #[must_use]
    pub fn new(hdr: FileSection, eh_frame: FileSection, file: &dyn FileBytes) -> Option<Self> {
        let mut head = [0; TABLE_AT];
        if file.read_at(hdr.offset, &mut head) < TABLE_AT {
            return None;
        }
        let there = hdr.bytes.checked_sub(TABLE_AT as u64)? / ROW_BYTES as u64;
        let rows = u64::from(table_rows(&head)?).min(there);
        (rows > 0).then_some(Self { hdr, rows, eh_frame, starts: OnceLock::new() })
    }

    /// Rows from one of `starts` to the next: as many as are read at once, or more where the table
    /// is long, whose length the file says.
    fn step(&self) -> u64 {
        const MAX_STARTS: u64 = 1024;
        self.rows.div_ceil(MAX_STARTS).max(BLOCK_ROWS)
    }

    fn start(&self, file: &dyn FileBytes, row: u64) -> Result<u64, RuleRefusal> {
        let mut bytes = [0; ROW_BYTES];
        if file.read_at(self.place(row), &mut bytes) < ROW_BYTES {
            return Err(RuleRefusal::Unreadable);
        }
        Ok(row_at(self.hdr.address, bytes).0)
    }

    fn starts(&self, file: &dyn FileBytes) -> Result<&[u64], RuleRefusal> {
        if let Some(starts) = self.starts.get() {
            return Ok(starts);
        }
        let rows = (0..self.rows).step_by(usize::try_from(self.step()).unwrap_or(usize::MAX));
        let starts: Vec<u64> = rows.map(|row| self.start(file, row)).collect::<Result<_, _>>()?;
        Ok(self.starts.get_or_init(|| starts))
    }

    /// Offset of a row in the file.
    fn place(&self, row: u64) -> u64 {
        self.hdr.offset.saturating_add(TABLE_AT as u64 + row * ROW_BYTES as u64)
    }

    fn ask<A: FdeQuery>(
        &self,
        machine: &TargetMachine,
        file: &dyn FileBytes,
        address: u64,
    ) -> Result<A, RuleRefusal> {
        let fde_address = self.row(file, address)?.1;
        let offset =
            fde_address.checked_sub(self.eh_frame.address).ok_or(RuleRefusal::Malformed)?;
        let mut fde = self.entry(file, offset)?;
        // System V ABI, LSB 5.0, 10.6.1: behind an FDE's length is the distance of its CIE, counted
        // back from there.
        let distance = fde.get_mut(LENGTH_BYTES..).and_then(<[u8]>::first_chunk_mut::<4>);
        let distance = distance.ok_or(RuleRefusal::Malformed)?;
        let back = u64::from(u32::from_le_bytes(*distance));
        let cie_offset =
            (offset + LENGTH_BYTES as u64).checked_sub(back).ok_or(RuleRefusal::Malformed)?;
        let mut section = self.entry(file, cie_offset)?;
        let at = section.len();
        // A section of these two alone, in which all is as it was but the distance.
        *distance =
            u32::try_from(at + LENGTH_BYTES).map_err(|_| RuleRefusal::Malformed)?.to_le_bytes();
        section.append(&mut fde);
        let mut eh_frame = EhFrame::new(&section, LittleEndian);
        eh_frame.set_vendor(machine.vendor);
        // The FDE's place counts in addresses relative to it; the CIE's has none that matters.
        let bases = BaseAddresses::default().set_eh_frame(fde_address.wrapping_sub(at as u64));
        Dwarf { table: CfiTable::EhFrame, section: eh_frame, bytes: &section, bases }
            .ask(machine, at, address)
    }

    /// The last row whose function does not begin behind `address`: by what is known, then by
    /// halves, the last of them read at once.
    fn row(&self, file: &dyn FileBytes, address: u64) -> Result<(u64, u64), RuleRefusal> {
        let after = self.starts(file)?.partition_point(|start| *start <= address) as u64;
        let mut first = after.checked_sub(1).ok_or(RuleRefusal::NoEntry)? * self.step();
        let mut after = (after * self.step()).min(self.rows);
        while after - first > BLOCK_ROWS {
            let middle = first.midpoint(after);
            if self.start(file, middle)? <= address {
                first = middle;
            } else {
                after = middle;
            }
        }
        let mut bytes = vec![0; usize::try_from(after - first).unwrap_or(0) * ROW_BYTES];
        if file.read_at(self.place(first), &mut bytes) < bytes.len() {
            return Err(RuleRefusal::Unreadable);
        }
        let (rows, _) = bytes.as_chunks::<ROW_BYTES>();
        row_before(rows, self.hdr.address, address).ok_or(RuleRefusal::NoEntry)
    }

    /// The CIE or FDE at an offset of `.eh_frame`, its length before it.
    fn entry(&self, file: &dyn FileBytes, offset: u64) -> Result<Vec<u8>, RuleRefusal> {
        /// Nearly all are shorter.
        const USUAL: usize = 512;
        let left = self.eh_frame.bytes.checked_sub(offset).ok_or(RuleRefusal::Malformed)?;
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        let at = self.eh_frame.offset.saturating_add(offset);
        let mut entry = vec![0; left.min(USUAL)];
        if file.read_at(at, &mut entry) < entry.len() {
            return Err(RuleRefusal::Unreadable);
        }
        let length = u32::from_le_bytes(*entry.first_chunk().ok_or(RuleRefusal::Malformed)?);
        let length = usize::try_from(length).unwrap_or(usize::MAX).saturating_add(LENGTH_BYTES);
        if length > left {
            return Err(RuleRefusal::Malformed);
        }
        // The form with 64-bit lengths says u32::MAX here, and is for sections of more than 4 GiB.
        if length > MAX_ENTRY_BYTES + LENGTH_BYTES {
            return Err(RuleRefusal::Unsupported);
        }
        let there = entry.len();
        entry.resize(length, 0);
        let rest = entry.get_mut(there..).unwrap_or_default();
        if file.read_at(at.saturating_add(there as u64), rest) < rest.len() {
            return Err(RuleRefusal::Unreadable);
        }
        Ok(entry)
    }
}

/// A section of call frame information in memory.
struct Dwarf<'a, S> {
    table: CfiTable,
    section: S,
    /// The same bytes, for looking at an entry's length before it is parsed: a CIE's augmentation
    /// alone may take up the section, and gimli parses a CIE for each FDE that names it.
    bytes: &'a [u8],
    bases: BaseAddresses,
}

type Cie<'a> = CommonInformationEntry<SectionBytes<'a>>;

impl<'a, S: UnwindSection<SectionBytes<'a>>> Dwarf<'a, S> {
    /// Length of the CIE or FDE at `offset`, when it is one that is looked into. The form with
    /// 64-bit lengths, which says `u32::MAX` first, is for sections of more than 4 GiB.
    fn entry_bytes(&self, offset: usize) -> Option<usize> {
        let length = self.bytes.get(offset..)?.first_chunk::<LENGTH_BYTES>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        (length <= MAX_ENTRY_BYTES).then_some(length + LENGTH_BYTES)
    }

    fn cie(&self, offset: S::Offset) -> gimli::Result<Cie<'a>> {
        // What parsing says of a CIE that is not to be parsed.
        self.entry_bytes(UnwindOffset::into(offset)).ok_or(gimli::Error::UnsupportedOffset)?;
        self.section.cie_from_offset(&self.bases, offset)
    }

    /// Looks at every FDE once.
    fn index(&self) -> Vec<IndexEntry> {
        let mut index = Vec::new();
        let mut entries = self.section.entries(&self.bases);
        let (mut last, mut cie_bytes): (Option<(usize, gimli::Result<Cie<'a>>)>, _) = (None, 0);
        // An entry that does not parse ends the section: what follows has no known place.
        for _ in 0..MAX_INDEX {
            let Ok(Some(entry)) = entries.next() else { break };
            let gimli::CieOrFde::Fde(partial) = entry else { continue };
            let offset = partial.offset();
            // One that would not be executed has no place in the index, nor has one whose CIE does
            // not parse.
            if self.entry_bytes(offset).is_none() {
                continue;
            }
            let named = partial.cie_offset();
            let cie_offset: usize = UnwindOffset::into(named);
            let cie = match &last {
                Some((at, cie)) if *at == cie_offset => cie.clone(),
                _ => {
                    cie_bytes += self.entry_bytes(cie_offset).unwrap_or(0);
                    if cie_bytes > MAX_INDEX_CIE_BYTES {
                        break;
                    }
                    let cie = self.cie(named);
                    last = Some((cie_offset, cie.clone()));
                    cie
                }
            };
            let Ok(fde) = partial.parse(|_, _, _| cie.clone()) else { continue };
            let (start, end) = (fde.initial_address(), fde.end_address());
            if start < end {
                index.push(IndexEntry { start, end, offset });
            }
        }
        index.sort_unstable_by_key(|e| e.start);
        index
    }

    fn by_index<A: FdeQuery>(
        &self,
        machine: &TargetMachine,
        index: &[IndexEntry],
        address: u64,
    ) -> Result<A, RuleRefusal> {
        let after = index.partition_point(|e| e.start <= address);
        let entry = after.checked_sub(1).and_then(|i| index.get(i)).ok_or(RuleRefusal::NoEntry)?;
        if address >= entry.end {
            return Err(RuleRefusal::NoEntry);
        }
        self.ask(machine, entry.offset, address)
    }

    /// What the FDE at `offset` says of `address`.
    fn ask<A: FdeQuery>(
        &self,
        machine: &TargetMachine,
        offset: usize,
        address: u64,
    ) -> Result<A, RuleRefusal> {
        self.entry_bytes(offset).ok_or(RuleRefusal::Unsupported)?;
        let fde = self
            .section
            .fde_from_offset(&self.bases, S::Offset::from(offset), |_, _, at| self.cie(at));
        let fde = fde.map_err(|error| match error {
            gimli::Error::UnsupportedOffset => RuleRefusal::Unsupported,
            _ => RuleRefusal::Malformed,
        })?;
        if !fde.contains(address) {
            return Err(RuleRefusal::NoEntry);
        }
        A::of(machine, self, &fde, address)
    }
}

/// What is asked of the FDE that covers an address.
trait FdeQuery: Sized {
    fn of<'a, S: UnwindSection<SectionBytes<'a>>>(
        machine: &TargetMachine,
        dwarf: &Dwarf<'a, S>,
        fde: &FrameDescriptionEntry<SectionBytes<'a>>,
        address: u64,
    ) -> Result<Self, RuleRefusal>;
}

impl FdeQuery for Range<u64> {
    fn of<'a, S: UnwindSection<SectionBytes<'a>>>(
        _machine: &TargetMachine,
        _dwarf: &Dwarf<'a, S>,
        fde: &FrameDescriptionEntry<SectionBytes<'a>>,
        _address: u64,
    ) -> Result<Self, RuleRefusal> {
        Ok(fde.initial_address()..fde.end_address())
    }
}

impl FdeQuery for FdeRule {
    fn of<'a, S: UnwindSection<SectionBytes<'a>>>(
        machine: &TargetMachine,
        dwarf: &Dwarf<'a, S>,
        fde: &FrameDescriptionEntry<SectionBytes<'a>>,
        address: u64,
    ) -> Result<Self, RuleRefusal> {
        let rule = fde_rule(machine, &dwarf.section, &dwarf.bases, fde, address)?;
        Ok(Self { rule, function: fde.initial_address()..fde.end_address(), table: dwarf.table })
    }
}

/// The rule at `address` by the program of the FDE that covers it.
fn fde_rule<'a, S: UnwindSection<SectionBytes<'a>>>(
    machine: &TargetMachine,
    section: &S,
    bases: &BaseAddresses,
    fde: &FrameDescriptionEntry<SectionBytes<'a>>,
    address: u64,
) -> Result<Rule, RuleRefusal> {
    let return_address = gimli::Register(machine.return_column);
    if fde.cie().return_address_register() != return_address {
        return Err(RuleRefusal::Unsupported);
    }
    let mut context = UnwindContext::new();
    let row = fde
        .unwind_info_for_address(section, bases, &mut context, address)
        .map_err(|_| RuleRefusal::Malformed)?;
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            Cfa::Register { base: general(machine, *register)?, offset: narrow(*offset)? }
        }
        CfaRule::Expression(expression) => {
            let expression = expression.get(section).map_err(|_| RuleRefusal::Malformed)?;
            match evaluate(machine, expression, fde.cie().encoding(), address)? {
                ExpressionValue::Register { base, offset } => {
                    Cfa::Register { base, offset: narrow(offset)? }
                }
                ExpressionValue::Deref { base, offset, add } => {
                    Cfa::Deref { base, offset: narrow(offset)?, add: narrow(add)? }
                }
                ExpressionValue::Constant(_) => return Err(RuleRefusal::Unsupported),
            }
        }
    };
    let mut rule = machine.call(cfa);
    if fde.is_signal_trampoline() {
        rule.kind = FrameKind::Signal;
    }
    for (register, how) in row.registers() {
        let saved = match how {
            RegisterRule::Undefined => Saved::Lost,
            RegisterRule::SameValue => Saved::Same,
            RegisterRule::Offset(offset) => Saved::AtCfa(narrow(*offset)?),
            RegisterRule::ValOffset(offset) => Saved::CfaPlus(narrow(*offset)?),
            RegisterRule::Register(other) => Saved::InRegister(general(machine, *other)?),
            RegisterRule::Expression(expression) => {
                let expression = expression.get(section).map_err(|_| RuleRefusal::Malformed)?;
                match evaluate(machine, expression, fde.cie().encoding(), address)? {
                    ExpressionValue::Register { base, offset } => {
                        Saved::AtRegister { base, offset: narrow(offset)? }
                    }
                    ExpressionValue::Deref { .. } | ExpressionValue::Constant(_) => Saved::Lost,
                }
            }
            RegisterRule::ValExpression(_)
            | RegisterRule::Architectural
            | RegisterRule::Constant(_) => Saved::Lost,
        };
        if *register == return_address {
            // A return address that is saved in a way not understood must not look like the start
            // of the thread.
            if saved == Saved::Lost && !matches!(how, RegisterRule::Undefined) {
                return Err(RuleRefusal::Unsupported);
            }
            rule.return_address = match (saved, machine.link) {
                (Saved::Same, Some(link)) => Saved::InRegister(link),
                _ => saved,
            };
        } else if let Some(register) = machine.register(register.0) {
            rule.registers[register.index()] = saved;
        }
    }
    // `Same` for the return address would mean the frame has none of its own: a loop.
    if rule.return_address == Saved::Same {
        return Err(RuleRefusal::Malformed);
    }
    Ok(rule)
}

fn general(machine: &TargetMachine, register: gimli::Register) -> Result<Register, RuleRefusal> {
    machine.register(register.0).ok_or(RuleRefusal::Unsupported)
}

fn narrow(offset: i64) -> Result<i32, RuleRefusal> {
    i32::try_from(offset).map_err(|_| RuleRefusal::Unsupported)
}

/// Value of an expression as far as it can be known before a frame is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpressionValue {
    Constant(u64),
    Register { base: Register, offset: i64 },
    Deref { base: Register, offset: i64, add: i64 },
}

impl ExpressionValue {
    fn plus(self, n: i64) -> Self {
        match self {
            Self::Constant(c) => Self::Constant(c.wrapping_add_signed(n)),
            Self::Register { base, offset } => {
                Self::Register { base, offset: offset.wrapping_add(n) }
            }
            Self::Deref { base, offset, add } => {
                Self::Deref { base, offset, add: add.wrapping_add(n) }
            }
        }
    }

    fn constant(self) -> Result<u64, RuleRefusal> {
        match self {
            Self::Constant(c) => Ok(c),
            _ => Err(RuleRefusal::Unsupported),
        }
    }
}

/// Evaluates an expression at `address`, the only register whose value is known.
fn evaluate(
    machine: &TargetMachine,
    expression: gimli::Expression<SectionBytes<'_>>,
    encoding: gimli::Encoding,
    address: u64,
) -> Result<ExpressionValue, RuleRefusal> {
    let mut operations = expression.operations(encoding);
    let mut stack: Vec<ExpressionValue> = Vec::new();
    for _ in 0..MAX_OPERATIONS {
        let Some(operation) = operations.next().map_err(|_| RuleRefusal::Malformed)? else {
            return stack.pop().ok_or(RuleRefusal::Malformed);
        };
        let mut pop = || stack.pop().ok_or(RuleRefusal::Malformed);
        let value = match operation {
            Operation::Nop => continue,
            Operation::UnsignedConstant { value } => ExpressionValue::Constant(value),
            Operation::SignedConstant { value } => ExpressionValue::Constant(value.cast_unsigned()),
            Operation::RegisterOffset { register, offset, .. }
                if Some(register.0) == machine.instruction_pointer =>
            {
                ExpressionValue::Constant(address.wrapping_add_signed(offset))
            }
            Operation::RegisterOffset { register, offset, .. } => {
                ExpressionValue::Register { base: general(machine, register)?, offset }
            }
            Operation::PlusConstant { value } => pop()?.plus(value.cast_signed()),
            Operation::Plus => match (pop()?, pop()?) {
                (ExpressionValue::Constant(c), other) | (other, ExpressionValue::Constant(c)) => {
                    other.plus(c.cast_signed())
                }
                _ => return Err(RuleRefusal::Unsupported),
            },
            Operation::Minus => {
                let right = pop()?.constant()?;
                pop()?.plus(right.wrapping_neg().cast_signed())
            }
            Operation::And => ExpressionValue::Constant(pop()?.constant()? & pop()?.constant()?),
            Operation::Shl => {
                let count = pop()?.constant()?;
                let value = pop()?.constant()?;
                ExpressionValue::Constant(
                    u32::try_from(count).ok().and_then(|c| value.checked_shl(c)).unwrap_or(0),
                )
            }
            Operation::Ge => {
                let right = pop()?.constant()?.cast_signed();
                ExpressionValue::Constant(u64::from(pop()?.constant()?.cast_signed() >= right))
            }
            Operation::Deref { size: 8, space: false, .. } => match pop()? {
                ExpressionValue::Register { base, offset } => {
                    ExpressionValue::Deref { base, offset, add: 0 }
                }
                _ => return Err(RuleRefusal::Unsupported),
            },
            _ => return Err(RuleRefusal::Unsupported),
        };
        stack.push(value);
    }
    Err(RuleRefusal::Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86_64::X86_64;
    use proptest::prelude::{any, prop, proptest};

    fn at(bytes: &[u8], address: u64) -> Result<ExpressionValue, RuleRefusal> {
        let encoding =
            gimli::Encoding { address_size: 8, format: gimli::Format::Dwarf32, version: 4 };
        evaluate(
            &X86_64,
            gimli::Expression(EndianSlice::new(bytes, LittleEndian)),
            encoding,
            address,
        )
    }

    #[test]
    fn a_plt_entry_has_one_word_more_once_it_pushed_its_index() {
        // breg7 8; breg16 0; lit15; and; lit11; ge; lit3; shl; plus
        let plt = [0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22];
        assert_eq!(
            at(&plt, 0x1020),
            Ok(ExpressionValue::Register { base: Register::RSP, offset: 8 })
        );
        assert_eq!(
            at(&plt, 0x102b),
            Ok(ExpressionValue::Register { base: Register::RSP, offset: 16 })
        );
    }

    #[test]
    fn a_cfa_kept_in_the_frame_is_one_dereference() {
        // breg7 40; deref; plus_uconst 8
        let saved = [0x77, 40, 0x06, 0x23, 8];
        assert_eq!(
            at(&saved, 0),
            Ok(ExpressionValue::Deref { base: Register::RSP, offset: 40, add: 8 })
        );
    }

    /// One FDE for 0x5000..0x5010 behind one CIE, as gcc writes them, at 0x2000.
    fn eh_frame() -> CfiSection {
        let mut bytes = vec![
            20, 0, 0, 0, 0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1,
            0, 0,
        ];
        bytes.extend([20, 0, 0, 0, 28, 0, 0, 0]);
        bytes.extend((0x5000i32 - 0x2020).to_le_bytes());
        bytes.extend(0x10u32.to_le_bytes());
        bytes.extend([0; 8]);
        bytes.extend([0; 4]);
        CfiSection { address: 0x2000, bytes }
    }

    #[test]
    fn the_table_is_searched_and_its_count_not_believed() {
        for count in [1, 0, 2, u32::MAX] {
            let mut hdr = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
            hdr.extend(count.to_le_bytes());
            for place in [0x5000i32, 0x2018] {
                hdr.extend((place - 0x3000).to_le_bytes());
            }
            let hdr = Some(CfiSection { address: 0x3000, bytes: hdr });
            let sections = UnwindSections::of(&X86_64, hdr, Some(eh_frame()), None);
            let found = sections.rule(0x500f).unwrap();
            assert_eq!((found.function, found.rule), (0x5000..0x5010, X86_64.frameless()));
            assert_eq!(sections.rule(0x5010), Err(RuleRefusal::NoEntry));
            assert_eq!(sections.rule(0x4fff), Err(RuleRefusal::NoEntry));
        }
    }

    #[test]
    fn where_a_function_begins_is_known_without_its_program() {
        let mut section = eh_frame();
        // No such instruction.
        section.bytes[24 + 17] = 0x3f;
        let sections = UnwindSections::of(&X86_64, None, Some(section), None);
        assert_eq!(sections.rule(0x5008), Err(RuleRefusal::Malformed));
        assert_eq!(sections.function_in(&NoFile, 0x5008), Ok(0x5000..0x5010));
        assert_eq!(sections.function_in(&NoFile, 0x5010), Err(RuleRefusal::NoEntry));
    }

    /// A file of these bytes.
    impl FileBytes for Vec<u8> {
        fn read_at(&self, offset: u64, into: &mut [u8]) -> usize {
            let there =
                usize::try_from(offset).ok().and_then(|at| self.get(at..)).unwrap_or_default();
            let length = there.len().min(into.len());
            into[..length].copy_from_slice(&there[..length]);
            length
        }
    }

    /// `count` functions of 16 bytes from 0x5000 on, each with a CFA of its own, some with a CIE
    /// between them; table and sections as one file, at 0x3000 and 0x2000.
    fn many(count: u32) -> (Vec<u8>, FileSection, FileSection) {
        let mut hdr = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
        hdr.extend(count.to_le_bytes());
        let (mut eh, mut cie) = (Vec::new(), 0);
        for function in 0..count {
            if function % 7 == 0 {
                cie = eh.len();
                eh.extend([
                    20, 0, 0, 0, 0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8,
                ]);
                eh.extend([0x90, 1, 0, 0]);
            }
            let (at, start) = (eh.len(), 0x5000 + function * 16);
            // DW_CFA_def_cfa_offset with two bytes of LEB128.
            let instructions = [0x0e, (8 + function % 100) as u8 | 0x80, 1, 0, 0, 0, 0];
            eh.extend([24, 0, 0, 0]);
            eh.extend(((at + 4 - cie) as u32).to_le_bytes());
            eh.extend((start.wrapping_sub(0x2000 + at as u32 + 8)).to_le_bytes());
            eh.extend(16u32.to_le_bytes());
            eh.push(0);
            eh.extend(instructions);
            eh.extend([0; 4]);
            for place in [start, 0x2000 + at as u32] {
                hdr.extend(place.wrapping_sub(0x3000).to_le_bytes());
            }
        }
        eh.extend([0; 4]);
        let hdr_place = FileSection { address: 0x3000, offset: 0, bytes: hdr.len() as u64 };
        let eh_place =
            FileSection { address: 0x2000, offset: hdr.len() as u64, bytes: eh.len() as u64 };
        hdr.extend(eh);
        (hdr, hdr_place, eh_place)
    }

    fn near_and_far((file, hdr, eh): &(Vec<u8>, FileSection, FileSection)) -> [UnwindSections; 2] {
        let section = |place: &FileSection| {
            let bytes = file[place.offset as usize..][..place.bytes as usize].to_vec();
            Some(CfiSection { address: place.address, bytes })
        };
        let near = UnwindSections::of(&X86_64, section(hdr), section(eh), None);
        let mut far = UnwindSections::of(&X86_64, None, None, None);
        far.far = FarSections::new(*hdr, *eh, file);
        assert!(far.far.is_some());
        [near, far]
    }

    #[test]
    fn sections_left_in_the_file_give_the_same_rules() {
        // Between two rows that are remembered lie as many as are read at once, and in the last one
        // more.
        for (count, step) in
            [(1, 3), (7, 3), (255, 3), (256, 3), (257, 3), (3000, 3), (300_000, 9973)]
        {
            let file = many(count);
            let [near, far] = near_and_far(&file);
            for address in (0x4ff0..0x5010 + u64::from(count) * 16).step_by(step) {
                let rule = far.rule_in(&file.0, address);
                assert_eq!(rule, near.rule(address), "{address:#x} of {count}");
                let function = far.function_in(&file.0, address);
                assert_eq!(function, rule.map(|found| found.function), "{address:#x} of {count}");
            }
            let last = 0x5000 + u64::from(count - 1) * 16;
            assert_eq!(far.rule_in(&file.0, last).unwrap().function, last..last + 16);
            assert_eq!(far.rule(last), Err(RuleRefusal::Unreadable), "the file is closed");
        }
    }

    /// A CIE whose augmentation is `z`, so many `S` and `R`, then `fdes`, each of whose first word
    /// is to be its distance from its CIE.
    fn signals(letters: usize, fdes: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut body = vec![0, 0, 0, 0, 1, b'z'];
        body.resize(body.len() + letters, b'S');
        body.extend([b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1]);
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
        for fde in fdes {
            bytes.extend((fde.len() as u32 + 4).to_le_bytes());
            bytes.extend((bytes.len() as u32).to_le_bytes());
            bytes.extend(*fde);
        }
        bytes
    }

    #[test]
    fn what_is_too_long_is_refused_unparsed() {
        let cie = |letters| signals(letters, &[]).len();
        let fde = |at: usize| {
            let place = (0x5000u32.wrapping_sub(0x2000 + at as u32 + 8)).to_le_bytes();
            [place, 0x10u32.to_le_bytes(), [0; 4]].concat()
        };
        let of = |letters| {
            let bytes = signals(letters, &[&fde(cie(letters))]);
            UnwindSections::of(&X86_64, None, Some(CfiSection { address: 0x2000, bytes }), None)
        };
        assert_eq!(of(0).rule(0x5000).unwrap().rule, X86_64.frameless());
        assert_eq!(of(100).rule(0x5000).unwrap().rule.kind, FrameKind::Signal);
        assert_eq!(of(MAX_ENTRY_BYTES).rule(0x5000), Err(RuleRefusal::NoEntry), "in no index");
        let mut hdr = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0, 1, 0, 0, 0];
        hdr.extend((0x5000i32 - 0x3000).to_le_bytes());
        hdr.extend((0x2000 + cie(MAX_ENTRY_BYTES) as i32 - 0x3000).to_le_bytes());
        let mut with_table = of(MAX_ENTRY_BYTES);
        with_table.eh_frame_hdr = Some(CfiSection { address: 0x3000, bytes: hdr });
        assert_eq!(with_table.rule(0x5000), Err(RuleRefusal::Unsupported));
    }

    #[test]
    fn very_many_entries_of_a_very_long_one_take_no_longer_than_others() {
        // Sixteen million letters a million times, which no test would see the end of. The eight
        // bytes of each FDE do not parse.
        let all = vec![&[][..]; 1 << 20];
        for letters in [16 << 20, MAX_ENTRY_BYTES - 64] {
            let eh_frame = CfiSection { address: 0x2000, bytes: signals(letters, &all) };
            let sections = UnwindSections::of(&X86_64, None, Some(eh_frame), None);
            assert_eq!(sections.rule(0x5000), Err(RuleRefusal::NoEntry));
        }
        // The same where each names another one than the one before.
        let long = signals(MAX_ENTRY_BYTES - 64, &[]);
        let mut bytes = [long.clone(), long.clone()].concat();
        for fde in 0..1 << 20 {
            bytes.extend(4u32.to_le_bytes());
            bytes.extend((bytes.len() as u32 - fde % 2 * long.len() as u32).to_le_bytes());
        }
        let sections =
            UnwindSections::of(&X86_64, None, Some(CfiSection { address: 0x2000, bytes }), None);
        assert_eq!(sections.rule(0x5000), Err(RuleRefusal::NoEntry));
    }

    #[test]
    fn a_table_of_another_form_is_passed_over() {
        // DW_EH_PE_udata8 as count, and so many rows that their bytes overflow: found by the fuzzer
        // in gimli's reader.
        let mut hdr = vec![1, 0x1b, 0x04, 0x3b, 0, 0, 0, 0];
        hdr.extend(u64::MAX.to_le_bytes());
        hdr.extend([0xff; 8]);
        let sections = UnwindSections::of(
            &X86_64,
            Some(CfiSection { address: 0x3000, bytes: hdr }),
            Some(eh_frame()),
            None,
        );
        assert!(sections.rule(0x5000).is_ok());
    }

    proptest! {
        #[test]
        fn random_sections_give_a_rule_or_a_refusal(
            hdr in any::<Vec<u8>>(), eh in any::<Vec<u8>>(), debug in any::<Vec<u8>>(), address in any::<u64>(),
        ) {
            let section = |bytes| Some(CfiSection { address: 0x1000, bytes });
            let sections = UnwindSections::of(&X86_64, section(hdr), section(eh), section(debug));
            sections.rule(address).ok();
        }

        #[test]
        fn random_bytes_in_a_file_give_a_rule_or_a_refusal(
            at in any::<prop::sample::Index>(), bytes in any::<[u8; 4]>(), address in 0x5000u64..0x5400,
        ) {
            let mut file = many(64);
            let at = at.index(file.0.len() - 4);
            file.0[at..at + 4].copy_from_slice(&bytes);
            if let Some(far) = FarSections::new(file.1, file.2, &file.0) {
                let mut sections = UnwindSections::of(&X86_64, None, None, None);
                sections.far = Some(far);
                sections.rule_in(&file.0, address).ok();
            }
        }

        #[test]
        fn random_expressions_end(bytes in any::<Vec<u8>>(), address in any::<u64>()) {
            at(&bytes, address).ok();
        }
    }
}
