//! The sorted table of `.eh_frame_hdr` (LSB 5.0, 10.6.2), in memory or left in the file.

use super::expression::SectionBytes;
use super::fde::{CfiTable, Dwarf, FdeQuery, LENGTH_BYTES, MAX_ENTRY_BYTES};
use crate::machine::TargetMachine;
use crate::rule::RuleRefusal;
use gimli::{BaseAddresses, EhFrame, LittleEndian};
use std::sync::OnceLock;

/// Where the rows of `.eh_frame_hdr`'s table begin, and the bytes of each.
const TABLE_AT: usize = 12;
const ROW_BYTES: usize = 8;
/// Rows of a table in the file that are read at once.
const BLOCK_ROWS: u64 = 256;

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
    pub(super) starts: OnceLock<Vec<u64>>,
}

/// Looks in the sorted table. `None` when there is none of the one form all linkers write: four
/// bytes of version and encodings, the place of `.eh_frame`, the number of rows, then rows of two
/// offsets from the section's own address. Read here and not by gimli (0.34): that multiplies the
/// number of rows without a check.
pub(super) fn by_table<A: FdeQuery>(
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

    pub(super) fn ask<A: FdeQuery>(
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
        eh_frame.set_vendor(machine.dwarf.vendor);
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
