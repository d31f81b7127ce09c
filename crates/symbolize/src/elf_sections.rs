//! The sections of an ELF file that belongs to a profiled process, read piece by piece.

use crate::error::NativeError;
use perfusion_host::process::guarded_io::ForeignFile;

/// e_ident: magic, ELFCLASS64, ELFDATA2LSB (System V gABI, chapter 4).
pub(crate) const ELF_IDENT: [u8; 6] = [0x7f, b'E', b'L', b'F', 2, 1];
pub(crate) const ELF_HEADER_BYTES: usize = 64;
const SECTION_HEADER_BYTES: usize = 64;
/// Most sections that are read, and most bytes of their names. A file that is compiled with one
/// section per function is linked into few.
const MAX_SECTIONS: u16 = 4096;
const MAX_NAMES_BYTES: u64 = 1 << 20;

pub(crate) const SHT_SYMTAB: u32 = 2;
pub(crate) const SHT_STRTAB: u32 = 3;
pub(crate) const SHT_NOTE: u32 = 7;
pub(crate) const SHT_NOBITS: u32 = 8;
pub(crate) const SHT_DYNSYM: u32 = 11;

/// One section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) name: Vec<u8>,
    /// `sh_type`.
    pub(crate) kind: u32,
    /// `sh_flags`.
    pub(crate) flags: u64,
    /// ELF virtual address, 0 where it is not loaded.
    pub(crate) address: u64,
    /// In the file, bytes.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) size: u64,
}

impl Section {
    /// Its content; `None` when it has none in the file, or more than `most` bytes.
    pub(crate) fn bytes(&self, file: &ForeignFile, most: u64) -> Option<Vec<u8>> {
        if self.kind == SHT_NOBITS || self.size > most {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(self.size).ok()?];
        file.read_exact_at(&mut bytes, self.offset).ok()?;
        Some(bytes)
    }

    /// Whether it is loaded and holds the byte at `address`.
    pub(crate) fn holds(&self, address: u64) -> bool {
        self.address != 0 && address.checked_sub(self.address).is_some_and(|at| at < self.size)
    }
}

/// All sections of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sections(Vec<Section>);

impl Sections {
    /// Reads their headers and names.
    ///
    /// # Errors
    /// When the file cannot be read or is no ELF file with sections.
    pub(crate) fn read(file: &ForeignFile) -> Result<Self, NativeError> {
        let mut header = [0; ELF_HEADER_BYTES];
        file.read_exact_at(&mut header, 0)?;
        if header[..6] != ELF_IDENT {
            return Err(NativeError::Format("no 64-bit little-endian ELF header"));
        }
        let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let (offset, bytes, count, names) =
            (u64_in(&header, 40), u16_at(58), u16_at(60), u16_at(62));
        if usize::from(bytes) != SECTION_HEADER_BYTES || !(1..=MAX_SECTIONS).contains(&count) {
            return Err(NativeError::Format("no section headers"));
        }
        let mut headers = vec![0; usize::from(bytes) * usize::from(count)];
        file.read_exact_at(&mut headers, offset)?;
        let (headers, _) = headers.as_chunks::<SECTION_HEADER_BYTES>();
        let section = |header: &[u8; SECTION_HEADER_BYTES]| Section {
            name: Vec::new(),
            kind: u32_in(header, 4),
            flags: u64_in(header, 8),
            address: u64_in(header, 16),
            offset: u64_in(header, 24),
            size: u64_in(header, 32),
        };
        let mut sections: Vec<Section> = headers.iter().map(section).collect();
        let table = sections
            .get(usize::from(names))
            .and_then(|names| names.bytes(file, MAX_NAMES_BYTES))
            .ok_or(NativeError::Format("no names of sections"))?;
        for (section, header) in sections.iter_mut().zip(headers) {
            let at = usize::try_from(u32_in(header, 0)).unwrap_or(usize::MAX);
            let name = table.get(at..).and_then(|rest| rest.split(|byte| *byte == 0).next());
            section.name = name.unwrap_or_default().to_vec();
        }
        Ok(Self(sections))
    }

    /// The section of this name.
    pub(crate) fn named(&self, name: &str) -> Option<&Section> {
        self.0.iter().find(|section| section.name == name.as_bytes())
    }

    /// Whether a section of this type has content.
    pub(crate) fn has(&self, kind: u32) -> bool {
        self.0.iter().any(|section| section.kind == kind && section.size > 0)
    }

    /// Those of this type.
    pub(crate) fn of_kind(&self, kind: u32) -> impl Iterator<Item = &Section> {
        self.0.iter().filter(move |section| section.kind == kind)
    }

    /// The loaded section that holds the byte at `address`, and has content in the file.
    pub(crate) fn at(&self, address: u64) -> Option<&Section> {
        self.0.iter().find(|section| section.kind != SHT_NOBITS && section.holds(address))
    }
}

pub(crate) fn u64_in(bytes: &[u8; 64], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

fn u32_in(bytes: &[u8; 64], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
