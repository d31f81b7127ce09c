//! The unwind sections of an ELF file.

use super::byte_source::ByteSource;
use super::elf::{MAX_NAMES_BYTES, elf_header, program_headers, section_headers};
use object::elf;
use object::endian::LittleEndian as LE;
use perfusion_unwind::eh_frame::{CfiSection, FarSections, FileSection, UnwindSections};
use std::io::Read as _;

/// Most bytes of one section of unwind data that is loaded.
const MAX_UNWIND_BYTES: u64 = 32 << 20;
/// From so many on `.eh_frame` and its table stay in the file: Chromium has 16 MiB of them, of
/// which the stacks of a day need some kilobytes.
const FAR_UNWIND_BYTES: u64 = 256 << 10;

/// Reads the unwind sections; by section headers, or by PT_GNU_EH_FRAME where those were stripped.
pub(super) fn load_unwind(source: &ByteSource) -> Option<UnwindSections> {
    let header = elf_header(source)?;
    let mut found: [Option<CfiSection>; 3] = [None, None, None];
    let mut plt = Vec::new();
    let mut far = None;
    if let Some(sections) = section_headers(source, &header) {
        let names = usize::from(header.e_shstrndx.get(LE));
        let names = sections.get(names)?;
        let names =
            source.bytes(names.sh_offset.get(LE), names.sh_size.get(LE), MAX_NAMES_BYTES)?;
        let mut places: [Option<&elf::SectionHeader64<LE>>; 3] = [None; 3];
        for section in &sections {
            let name = usize::try_from(section.sh_name.get(LE)).ok().and_then(|at| names.get(at..));
            let name = name.and_then(|n| n.split(|&b| b == 0).next());
            let place = match name {
                Some(b".eh_frame_hdr") => 0,
                Some(b".eh_frame") => 1,
                Some(b".debug_frame") => 2,
                Some(b".plt" | b".plt.got" | b".plt.sec") => {
                    let start = section.sh_addr.get(LE);
                    plt.extend(
                        start
                            .checked_add(section.sh_size.get(LE))
                            .map(|end| start..end)
                            .filter(|_| plt.len() < 8),
                    );
                    continue;
                }
                _ => continue,
            };
            if section.sh_type.get(LE) != elf::SHT_NOBITS
                && let Some(slot) = places.get_mut(place)
            {
                *slot = Some(section);
            }
        }
        if let [Some(hdr), Some(eh_frame), _] = places {
            far = leave_in_file(source, hdr, eh_frame);
        }
        for (section, slot) in
            places.into_iter().zip(&mut found).skip(if far.is_some() { 2 } else { 0 })
        {
            let Some(section) = section else { continue };
            let bytes =
                source.bytes(section.sh_offset.get(LE), section.sh_size.get(LE), MAX_UNWIND_BYTES);
            let bytes = if is_compressed(section) {
                bytes.and_then(|bytes| inflate(&bytes))
            } else {
                bytes
            };
            *slot = bytes.map(|bytes| CfiSection { address: section.sh_addr.get(LE), bytes });
        }
    }
    if far.is_none() && found.iter().all(Option::is_none) {
        let programs = program_headers(source, &header)?;
        let hdr = programs.iter().find(|p| p.p_type.get(LE) == elf::PT_GNU_EH_FRAME)?;
        let hdr_bytes =
            source.bytes(hdr.p_offset.get(LE), hdr.p_filesz.get(LE), MAX_UNWIND_BYTES)?;
        let hdr_address = hdr.p_vaddr.get(LE);
        // Version 1, then encodings; the linkers write `.eh_frame`'s place as a 32-bit offset from
        // the field itself.
        let (&[1, 0x1b, ..], Some(distance)) =
            (hdr_bytes.get(..4)?, hdr_bytes.get(4..)?.first_chunk::<4>())
        else {
            return None;
        };
        let eh_address = hdr_address
            .wrapping_add(4)
            .wrapping_add_signed(i64::from(i32::from_le_bytes(*distance)));
        let load = programs.iter().find(|p| {
            let from = p.p_vaddr.get(LE);
            p.p_type.get(LE) == elf::PT_LOAD
                && eh_address >= from
                && eh_address - from < p.p_filesz.get(LE)
        })?;
        let into = eh_address - load.p_vaddr.get(LE);
        // Its length is stated nowhere: to the end of the segment; a zero length word ends it.
        let length = load.p_filesz.get(LE) - into;
        let bytes =
            source.bytes(load.p_offset.get(LE).checked_add(into)?, length, MAX_UNWIND_BYTES)?;
        found[0] = Some(CfiSection { address: hdr_address, bytes: hdr_bytes });
        found[1] = Some(CfiSection { address: eh_address, bytes });
    }
    let [hdr, eh, debug] = found;
    let mut sections = UnwindSections::new(hdr, eh, debug);
    sections.plt = plt;
    sections.far = far;
    Some(sections)
}

/// `.eh_frame` and its table, when they are large and can be used where they are.
fn leave_in_file(
    source: &ByteSource,
    hdr: &elf::SectionHeader64<LE>,
    eh_frame: &elf::SectionHeader64<LE>,
) -> Option<FarSections> {
    let place = |section: &elf::SectionHeader64<LE>| {
        let place = FileSection {
            address: section.sh_addr.get(LE),
            offset: section.sh_offset.get(LE),
            bytes: section.sh_size.get(LE),
        };
        (!is_compressed(section) && source.has(place.offset, place.bytes)).then_some(place)
    };
    let (hdr, eh_frame) = (place(hdr)?, place(eh_frame)?);
    let large = hdr.bytes.saturating_add(eh_frame.bytes) >= FAR_UNWIND_BYTES;
    large.then(|| FarSections::new(hdr, eh_frame, source)).flatten()
}

fn is_compressed(section: &elf::SectionHeader64<LE>) -> bool {
    section.sh_flags.get(LE) & u64::from(elf::SHF_COMPRESSED) != 0
}

/// The contents of a compressed section (gABI `Elf64_Chdr`: kind, padding, size, alignment, then
/// the data). Go's linker compresses `.debug_frame`, the only unwind information its programs have.
fn inflate(section: &[u8]) -> Option<Vec<u8>> {
    const HEADER_BYTES: usize = 24;
    let kind = u32::from_le_bytes(*section.first_chunk::<4>()?);
    let size = u64::from_le_bytes(*section.get(8..)?.first_chunk::<8>()?);
    if kind != elf::ELFCOMPRESS_ZLIB || size > MAX_UNWIND_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    // What the header says is not believed: no more than that is read, however much comes out.
    let data = flate2::read::ZlibDecoder::new(section.get(HEADER_BYTES..)?);
    data.take(size).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 == size).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn compressed_sections_are_read_no_further_than_they_say() {
        let data = vec![7u8; 100_000];
        let section = |size: u64| {
            let mut bytes = vec![1, 0, 0, 0, 0, 0, 0, 0];
            bytes.extend(size.to_le_bytes());
            bytes.extend(1u64.to_le_bytes());
            let mut encoder =
                flate2::write::ZlibEncoder::new(bytes, flate2::Compression::default());
            encoder.write_all(&data).unwrap();
            encoder.finish().unwrap()
        };
        assert_eq!(inflate(&section(100_000)), Some(data.clone()));
        assert_eq!(inflate(&section(10)), Some(data[..10].to_vec()));
        assert_eq!(inflate(&section(100_001)), None);
        assert_eq!(inflate(&section(u64::MAX)), None);
        assert_eq!(inflate(&[1, 0, 0]), None);
    }
}
