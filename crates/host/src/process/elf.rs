//! The headers of an ELF file, and its build id.

use super::byte_source::ByteSource;
use object::elf;
use object::endian::LittleEndian as LE;
use object::pod;
use perfusion_unwind::native::NATIVE;

/// Most program headers, section headers, and bytes of names that are read.
const MAX_PROGRAM_HEADERS: u16 = 128;
const MAX_SECTION_HEADERS: u16 = 4096;
pub(super) const MAX_NAMES_BYTES: u64 = 1 << 20;

/// The header of an ELF file of this machine.
pub(super) fn elf_header(source: &ByteSource) -> Option<elf::FileHeader64<LE>> {
    let mut bytes = [0u8; size_of::<elf::FileHeader64<LE>>()];
    if source.read(0, &mut bytes) < bytes.len() {
        return None;
    }
    let (header, _) = pod::from_bytes::<elf::FileHeader64<LE>>(&bytes).ok()?;
    let ident = &header.e_ident;
    let native = ident.class == elf::ELFCLASS64
        && ident.data == elf::ELFDATA2LSB
        && header.e_machine.get(LE) == NATIVE.elf;
    native.then_some(*header)
}

/// The program headers, as many as are read.
pub(super) fn program_headers(
    source: &ByteSource,
    header: &elf::FileHeader64<LE>,
) -> Option<Vec<elf::ProgramHeader64<LE>>> {
    let count = header.e_phnum.get(LE).min(MAX_PROGRAM_HEADERS);
    let length = u64::from(count) * size_of::<elf::ProgramHeader64<LE>>() as u64;
    let bytes = source.bytes(header.e_phoff.get(LE), length, length)?;
    let (headers, _) = pod::slice_from_bytes(&bytes, usize::from(count)).ok()?;
    Some(headers.to_vec())
}

/// The section headers; `None` where there are none or too many.
pub(super) fn section_headers(
    source: &ByteSource,
    header: &elf::FileHeader64<LE>,
) -> Option<Vec<elf::SectionHeader64<LE>>> {
    let count = header.e_shnum.get(LE);
    if !(1..=MAX_SECTION_HEADERS).contains(&count) {
        return None;
    }
    let length = u64::from(count) * size_of::<elf::SectionHeader64<LE>>() as u64;
    let bytes = source.bytes(header.e_shoff.get(LE), length, length)?;
    let (headers, _) = pod::slice_from_bytes(&bytes, usize::from(count)).ok()?;
    Some(headers.to_vec())
}

/// Walks the notes of a PT_NOTE segment (gABI: name size, descriptor size, type, each part padded
/// to 4 bytes).
#[must_use]
pub fn find_build_id(notes: &[u8]) -> Option<Vec<u8>> {
    let mut rest = notes;
    loop {
        let word = |i: usize| {
            let bytes = rest.get(i * 4..)?.first_chunk::<4>()?;
            usize::try_from(u32::from_le_bytes(*bytes)).ok()
        };
        let (name_len, desc_len, kind) = (word(0)?, word(1)?, word(2)?);
        let desc_at = 12 + name_len.checked_next_multiple_of(4)?;
        let desc_end = desc_at.checked_add(desc_len)?;
        let (name, desc) = (rest.get(12..)?.get(..name_len)?, rest.get(desc_at..desc_end)?);
        if name == b"GNU\0" && kind == elf::NT_GNU_BUILD_ID as usize && (1..=64).contains(&desc_len)
        {
            return Some(desc.to_vec());
        }
        rest = rest.get(desc_end.checked_next_multiple_of(4)?..)?;
    }
}
