//! Assemblies that a single-file program carries in its file, behind the host that has the runtime
//! inside. The host says where the list of them is (`Microsoft.NET.HostModel`, Bundle/Manifest.cs
//! and Bundle/FileEntry.cs, and `bundle_marker_t` of src/native/corehost in dotnet/runtime). Any
//! file may look like one: sizes and counts are bounded.

use crate::fields::PayloadFields;
use memchr::memmem;
use object::endian::LittleEndian as LE;
use object::{elf, pod};

/// Stands in the host behind the place of the list.
const SIGNATURE: [u8; 32] = [
    0x8b, 0x12, 0x02, 0xb9, 0x6a, 0x61, 0x20, 0x38, 0x72, 0x7b, 0x93, 0x02, 0x14, 0xd7, 0xa0, 0x32,
    0x13, 0xf5, 0xb9, 0xe6, 0xef, 0xae, 0x33, 0x18, 0xee, 0x3b, 0x2d, 0xce, 0x24, 0xb3, 0x6a, 0xae,
];
/// The version of the list that .NET 6 and newer write.
const VERSION: u32 = 6;
/// The kind of an assembly.
const ASSEMBLY: u8 = 1;
/// Most program headers, and bytes of a segment's data that are looked at.
const MOST_HEADERS: u16 = 64;
const MOST_DATA: u64 = 4 << 20;
/// Most bytes of a list; one of 200 files has 10 KiB.
const MOST_LIST: u64 = 1 << 20;

/// Reads so many bytes at an offset of a file.
pub(crate) type ReadAt<'a> = &'a dyn Fn(u64, u64) -> Option<Vec<u8>>;

/// Offsets and lengths of the assemblies in a file of so many bytes, at most so many. `None` when
/// it is no single-file program. Those that are compressed are left out.
pub(crate) fn carried(read: ReadAt<'_>, length: u64, most: usize) -> Option<Vec<(u64, u64)>> {
    let at = list_at(read)?;
    let bytes = read(at, length.checked_sub(at)?.min(MOST_LIST))?;
    let mut fields = PayloadFields(&bytes);
    let (version, _minor, count) = (fields.u32()?, fields.u32()?, fields.u32()?);
    if version != VERSION {
        return None;
    }
    text(&mut fields)?;
    // Where two files are, and flags.
    fields.take(5 * 8)?;
    let mut all = Vec::new();
    for _ in 0..count {
        let (offset, size, compressed) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let kind = fields.u8()?;
        text(&mut fields)?;
        let is_inside = offset.checked_add(size).is_some_and(|end| end <= length);
        if kind == ASSEMBLY && compressed == 0 && is_inside && all.len() < most {
            all.push((offset, size));
        }
    }
    Some(all)
}

fn text(fields: &mut PayloadFields<'_>) -> Option<()> {
    let length = usize::try_from(fields.varint()?).ok()?;
    fields.take(length).map(|_| ())
}

/// Where the list is, as the host's data says.
fn list_at(read: ReadAt<'_>) -> Option<u64> {
    let header = read(0, 64)?;
    let (header, _) = pod::from_bytes::<elf::FileHeader64<LE>>(&header).ok()?;
    if header.e_ident.magic != elf::ELFMAG {
        return None;
    }
    let size = size_of::<elf::ProgramHeader64<LE>>() as u64;
    let count = header.e_phnum.get(LE).min(MOST_HEADERS);
    let segments = read(header.e_phoff.get(LE), size * u64::from(count))?;
    let (segments, _) =
        pod::slice_from_bytes::<elf::ProgramHeader64<LE>>(&segments, usize::from(count)).ok()?;
    let written = segments.iter().filter(|segment| {
        segment.p_type.get(LE) == elf::PT_LOAD && segment.p_flags.get(LE) & elf::PF_W != 0
    });
    let mut found = written.filter_map(|segment| {
        let data = read(segment.p_offset.get(LE), segment.p_filesz.get(LE).min(MOST_DATA))?;
        let at = memmem::find(&data, &SIGNATURE)?.checked_sub(8)?;
        Some(u64::from_le_bytes(*data.get(at..)?.first_chunk()?))
    });
    // A host without a list has 0 there.
    found.find(|&at| at != 0)
}

#[cfg(test)]
mod tests {
    use super::{SIGNATURE, carried};
    use proptest::prelude::{any, proptest};

    fn of(file: &[u8]) -> Option<Vec<(u64, u64)>> {
        let read = |at: u64, count: u64| {
            let at = usize::try_from(at).ok()?;
            Some(file.get(at..at.checked_add(usize::try_from(count).ok()?)?)?.to_vec())
        };
        carried(&read, file.len() as u64, 10)
    }

    /// A file with one segment of data, from 0x100 to 0x200, and a list at 0x300.
    fn program() -> Vec<u8> {
        let mut file = vec![0; 0x300];
        let mut put = |at: usize, what: &[u8]| file[at..at + what.len()].copy_from_slice(what);
        put(0, b"\x7fELF");
        put(0x20, &0x40_u64.to_le_bytes());
        put(0x38, &1_u16.to_le_bytes());
        put(0x40, &1_u32.to_le_bytes());
        put(0x44, &6_u32.to_le_bytes());
        put(0x48, &0x100_u64.to_le_bytes());
        put(0x60, &0x100_u64.to_le_bytes());
        put(0x120, &0x300_u64.to_le_bytes());
        put(0x128, &SIGNATURE);
        for word in [6_u32, 0, 4] {
            file.extend(word.to_le_bytes());
        }
        file.extend(b"\x02id");
        file.extend([0; 40]);
        for (place, kind) in [
            ([0x200_u64, 0x80, 0], 1),
            ([0x280, 0x10, 0], 3),
            ([0x290, 9, 5], 1),
            ([1 << 40, 1, 0], 1),
        ] {
            file.extend(place.into_iter().flat_map(u64::to_le_bytes));
            file.extend([kind, 5]);
            file.extend(b"A.dll");
        }
        file
    }

    #[test]
    fn assemblies_are_found_that_are_as_they_were() {
        assert_eq!(of(&program()), Some(vec![(0x200, 0x80)]));
        let mut without = program();
        without[0x120..0x128].fill(0);
        assert_eq!(of(&without), None);
        let mut newer = program();
        newer[0x300] = 7;
        assert_eq!(of(&newer), None);
        assert_eq!((of(&[]), of(&program()[..0x320])), (None, None));
    }

    proptest! {
        #[test]
        fn any_file_is_read_or_refused(
            changes in proptest::collection::vec((0..0x400_usize, any::<u8>()), 0..20),
        ) {
            let mut file = program();
            for (at, byte) in changes {
                if let Some(changed) = file.get_mut(at) {
                    *changed = byte;
                }
            }
            assert!(of(&file).is_none_or(|found| found.len() <= 10));
        }
    }
}
