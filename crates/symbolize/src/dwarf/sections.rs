//! The sections of debug information, read piece by piece, and what reading them may cost.

use crate::elf_sections::{SHT_NOBITS, Section, Sections};
use flate2::read::ZlibDecoder;
use gimli::{
    DebugAddr, DebugRanges, DebugRngLists, EndianSlice, Format, LittleEndian, RangeLists,
    RangeListsOffset,
};
use perfusion_host::process::guarded_io::ForeignFile;
use std::io::Read as _;

/// Bytes of a reader of one section or piece.
pub(super) type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Steps for all files of one window. A step is a byte read, an attribute, or a quarter of an
/// address range. A second or two of CPU time is spent at most. A debug file of a large runtime
/// takes a tenth of it.
const MAX_STEPS: u64 = 512 << 20;
/// Bytes of one section that is read whole: lists of ranges, and addresses.
const MAX_TABLE_BYTES: u64 = 32 << 20;
/// Bytes that one compressed section may unpack to.
const MAX_UNPACKED_BYTES: u64 = 64 << 20;
/// Compressed sections of one file together.
const MAX_UNPACKED_IN_ALL_BYTES: u64 = 192 << 20;
/// Longest name of a function or file.
const MAX_TEXT_BYTES: u64 = 16 << 10;
/// Read first of a text: most are shorter.
const SHORT_TEXT_BYTES: u64 = 256;

/// `SHF_COMPRESSED` of `sh_flags`, and the header before such content (System V gABI, chapter 4).
const SHF_COMPRESSED: u64 = 0x800;
const COMPRESSION_HEADER_BYTES: u64 = 24;
const ELFCOMPRESS_ZLIB: u32 = 1;

/// Why debug information was not read, or not to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DwarfError {
    /// The file cannot be read.
    #[error("cannot read the file: {0}")]
    Read(#[from] std::io::Error),
    /// It is not what it should be.
    #[error("no usable debug information: {0}")]
    Format(&'static str),
    /// The same, in the parser's words.
    #[error("no usable debug information: {0}")]
    Parse(#[from] gimli::Error),
    /// A part is beyond its limit.
    #[error("{what} has {found} bytes, more than the limit of {limit}")]
    TooLarge {
        /// The part.
        what: &'static str,
        /// Its bytes.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// All debug information of the window is beyond the limit.
    #[error("reading it takes more than the limit for a window")]
    Budget,
    /// The parser panicked over it.
    #[error("the parser panicked")]
    Panic,
}

/// What may still be spent in one window: a process may map any number of files, and a short file
/// may say that much is to be done.
#[derive(Debug)]
pub(crate) struct WorkBudget {
    left: u64,
}

impl Default for WorkBudget {
    fn default() -> Self {
        Self { left: MAX_STEPS }
    }
}

impl WorkBudget {
    /// # Errors
    /// When nothing is left.
    pub(super) fn spend(&mut self, steps: u64) -> Result<(), DwarfError> {
        // What is left would be spent by small steps else, long after the first refusal.
        self.left = self.left.saturating_sub(steps);
        if self.left == 0 { Err(DwarfError::Budget) } else { Ok(()) }
    }

    #[cfg(test)]
    pub(super) fn of(left: u64) -> Self {
        Self { left }
    }
}

/// Where the content of a section is.
#[derive(Debug, Default)]
enum Content {
    #[default]
    Absent,
    InFile {
        offset: u64,
        size: u64,
    },
    /// It was compressed.
    Unpacked(Vec<u8>),
}

/// One section.
#[derive(Debug, Default)]
pub(super) struct DebugSection(Content);

impl DebugSection {
    fn find(
        file: &ForeignFile,
        sections: &Sections,
        name: &str,
        unpacked: &mut u64,
    ) -> Result<Self, DwarfError> {
        let found = sections.named(name).filter(|section| section.kind != SHT_NOBITS);
        let Some(section) = found else { return Ok(Self::default()) };
        if section.flags & SHF_COMPRESSED == 0 {
            return Ok(Self(Content::InFile { offset: section.offset, size: section.size }));
        }
        let bytes = unpack(file, section, *unpacked)?;
        *unpacked += bytes.len() as u64;
        Ok(Self(Content::Unpacked(bytes)))
    }

    pub(super) fn size(&self) -> u64 {
        match &self.0 {
            Content::Absent => 0,
            Content::InFile { size, .. } => *size,
            Content::Unpacked(bytes) => bytes.len() as u64,
        }
    }

    /// The bytes from `at` on: `most`, or less where the section ends.
    pub(super) fn piece(
        &self,
        file: &ForeignFile,
        at: u64,
        most: u64,
        budget: &mut WorkBudget,
    ) -> Result<Vec<u8>, DwarfError> {
        let beyond = || DwarfError::Format("a reference beyond the end of a section");
        let length = self.size().checked_sub(at).ok_or_else(beyond)?.min(most);
        budget.spend(length)?;
        let length = usize::try_from(length).map_err(|_| beyond())?;
        match &self.0 {
            Content::Absent => Ok(Vec::new()),
            Content::InFile { offset, .. } => {
                let mut bytes = vec![0; length];
                file.read_exact_at(&mut bytes, offset.checked_add(at).ok_or_else(beyond)?)?;
                Ok(bytes)
            }
            Content::Unpacked(bytes) => {
                let at = usize::try_from(at).map_err(|_| beyond())?;
                Ok(bytes.get(at..at.saturating_add(length)).ok_or_else(beyond)?.to_vec())
            }
        }
    }

    /// All of it.
    fn table(
        &self,
        file: &ForeignFile,
        what: &'static str,
        budget: &mut WorkBudget,
    ) -> Result<Vec<u8>, DwarfError> {
        let found = self.size();
        if found > MAX_TABLE_BYTES {
            return Err(DwarfError::TooLarge { what, found, limit: MAX_TABLE_BYTES });
        }
        self.piece(file, 0, found, budget)
    }

    /// The text at `at`, up to its zero.
    pub(super) fn text(
        &self,
        file: &ForeignFile,
        at: u64,
        budget: &mut WorkBudget,
    ) -> Result<String, DwarfError> {
        for most in [SHORT_TEXT_BYTES, MAX_TEXT_BYTES] {
            let bytes = self.piece(file, at, most, budget)?;
            if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
                return Ok(String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into());
            }
        }
        Err(DwarfError::Format("a text without an end"))
    }
}

/// The content of a section that is compressed.
fn unpack(file: &ForeignFile, section: &Section, before: u64) -> Result<Vec<u8>, DwarfError> {
    let mut header = [0; COMPRESSION_HEADER_BYTES as usize];
    file.read_exact_at(&mut header, section.offset)?;
    let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    if kind != ELFCOMPRESS_ZLIB {
        return Err(DwarfError::Format("compressed otherwise than with zlib"));
    }
    let left = MAX_UNPACKED_IN_ALL_BYTES.saturating_sub(before).min(MAX_UNPACKED_BYTES);
    let too_large = |found| DwarfError::TooLarge { what: "a section", found, limit: left };
    let packed = section.size.saturating_sub(COMPRESSION_HEADER_BYTES);
    // Compressed, it has no more than that.
    if packed > left {
        return Err(too_large(packed));
    }
    let packed = Section {
        offset: section.offset + COMPRESSION_HEADER_BYTES,
        size: packed,
        ..section.clone()
    };
    let bytes = packed.bytes(file, left).ok_or(DwarfError::Format("a section cannot be read"))?;
    let mut unpacked = Vec::new();
    ZlibDecoder::new(bytes.as_slice()).take(left + 1).read_to_end(&mut unpacked)?;
    if unpacked.len() as u64 > left {
        return Err(too_large(unpacked.len() as u64));
    }
    Ok(unpacked)
}

/// All sections that tell lines and inlined functions.
#[derive(Debug)]
pub(super) struct DebugSections<'f> {
    pub(super) file: &'f ForeignFile,
    pub(super) info: DebugSection,
    pub(super) abbreviations: DebugSection,
    pub(super) line: DebugSection,
    pub(super) str: DebugSection,
    pub(super) line_str: DebugSection,
    pub(super) str_offsets: DebugSection,
    addr: Vec<u8>,
    ranges: Vec<u8>,
    range_lists: Vec<u8>,
}

impl<'f> DebugSections<'f> {
    pub(super) fn open(
        file: &'f ForeignFile,
        sections: &Sections,
        budget: &mut WorkBudget,
    ) -> Result<Self, DwarfError> {
        let mut unpacked = 0;
        let mut find = |name| DebugSection::find(file, sections, name, &mut unpacked);
        let [addr, ranges, range_lists] =
            [find(".debug_addr")?, find(".debug_ranges")?, find(".debug_rnglists")?];
        Ok(Self {
            file,
            info: find(".debug_info")?,
            abbreviations: find(".debug_abbrev")?,
            line: find(".debug_line")?,
            str: find(".debug_str")?,
            line_str: find(".debug_line_str")?,
            str_offsets: find(".debug_str_offsets")?,
            addr: addr.table(file, "the table of addresses", budget)?,
            ranges: ranges.table(file, "the table of ranges", budget)?,
            range_lists: range_lists.table(file, "the table of ranges", budget)?,
        })
    }

    pub(super) fn range_lists(&self) -> RangeLists<Slice<'_>> {
        RangeLists::new(
            DebugRanges::new(&self.ranges, LittleEndian),
            DebugRngLists::new(&self.range_lists, LittleEndian),
        )
    }

    /// Where the list of this number begins; `base` is where the numbers of a unit begin.
    pub(super) fn range_list(
        &self,
        base: u64,
        number: usize,
        format: Format,
    ) -> Option<RangeListsOffset> {
        let bytes = usize::from(format.word_size());
        let base = usize::try_from(base).ok()?;
        let at = number.checked_mul(bytes)?.checked_add(base)?;
        let field = self.range_lists.get(at..at.checked_add(bytes)?)?;
        let mut word = [0; 8];
        word.iter_mut().zip(field).for_each(|(to, from)| *to = *from);
        let list = usize::try_from(u64::from_le_bytes(word)).ok()?;
        Some(RangeListsOffset(base.checked_add(list)?))
    }

    pub(super) fn addresses(&self) -> DebugAddr<Slice<'_>> {
        DebugAddr::from(EndianSlice::new(&self.addr, LittleEndian))
    }
}
