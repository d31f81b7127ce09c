//! Symbols of an ELF file by name, in the hash table that its linker made for the loader
//! (DT_GNU_HASH), in the file or where a process has it mapped. Both come from profiled processes:
//! every table is bounded, and what does not fit together has no symbol.

use super::byte_source::ByteSource;
use super::elf::{elf_header, program_headers};
use object::endian::LittleEndian as LE;
use object::{elf, pod};
use std::fs::File;

/// Most entries of the dynamic section, and symbols looked at for one name: linkers make tables in
/// which a name has a handful to itself.
const MAX_DYNAMIC: u64 = 4096;
const MAX_CHAIN: u32 = 512;

/// The address of a symbol that a file defines which `memory`, of a process, has from `base` on.
/// It waits for the process, so only a thread that can be abandoned may call this.
#[must_use]
pub fn in_memory(memory: File, base: u64, name: &str) -> Option<u64> {
    loaded(&ByteSource::Memory(memory, base), base, name)
}

/// The same of an image as it lies in memory from its first byte on.
fn loaded(image: &ByteSource, base: u64, name: &str) -> Option<u64> {
    let programs = program_headers(image, &elf_header(image)?)?;
    let section = programs.iter().find(|program| program.p_type.get(LE) == elf::PT_DYNAMIC)?;
    // glibc's loader has made addresses of what the file has as offsets, musl's has not.
    let offset_of = |value: u64| Some(value.checked_sub(base).unwrap_or(value));
    let dynamic = DynamicSection::read(image, section.p_vaddr.get(LE), section, offset_of)?;
    let (_, symbol) = dynamic.symbol(image, name)?;
    (symbol.st_shndx.get(LE) != 0).then(|| base.checked_add(symbol.st_value.get(LE)))?
}

/// A table of the dynamic section: its offset in the image, and bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DynamicTable {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// What of the dynamic section matters. Offsets are those of the image that it was read from.
#[derive(Debug, Default)]
pub(super) struct DynamicSection {
    symbols: Option<u64>,
    names: DynamicTable,
    hashes: Option<u64>,
    /// The smaller one first, so that there is something left to read of the other.
    pub(super) relocations: [DynamicTable; 2],
    pub(super) is_program: bool,
}

impl DynamicSection {
    /// Reads the section that `program` describes and that begins at `offset`. `offset_of` says
    /// where in the image an address is.
    pub(super) fn read(
        image: &ByteSource,
        offset: u64,
        program: &elf::ProgramHeader64<LE>,
        offset_of: impl Fn(u64) -> Option<u64>,
    ) -> Option<Self> {
        let most = MAX_DYNAMIC * size_of::<elf::Dyn64<LE>>() as u64;
        let bytes = image.bytes(offset, program.p_filesz.get(LE), most)?;
        let count = bytes.len() / size_of::<elf::Dyn64<LE>>();
        let (entries, _) = pod::slice_from_bytes::<elf::Dyn64<LE>>(&bytes, count).ok()?;
        let mut found = Self::default();
        let [direct, by_calls] = &mut [DynamicTable::default(); 2];
        for entry in entries {
            let value = entry.d_val.get(LE);
            let offset = || offset_of(value);
            match entry.d_tag.get(LE) {
                elf::DT_NULL => break,
                elf::DT_SYMTAB => found.symbols = offset(),
                elf::DT_STRTAB => found.names.offset = offset().unwrap_or(0),
                elf::DT_STRSZ => found.names.bytes = value,
                elf::DT_GNU_HASH => found.hashes = offset(),
                elf::DT_RELA => direct.offset = offset().unwrap_or(0),
                elf::DT_RELASZ => direct.bytes = value,
                elf::DT_JMPREL => by_calls.offset = offset().unwrap_or(0),
                elf::DT_PLTRELSZ => by_calls.bytes = value,
                elf::DT_FLAGS_1 => found.is_program = value & u64::from(elf::DF_1_PIE) != 0,
                _ => {}
            }
        }
        found.relocations = [*by_calls, *direct];
        Some(found)
    }

    /// The symbol of this name, with its index.
    pub(super) fn symbol(&self, image: &ByteSource, name: &str) -> Option<(u32, elf::Sym64<LE>)> {
        let (symbols, hashes) = (self.symbols?, self.hashes?);
        let word = |at: u64| {
            let mut bytes = [0; 4];
            (image.read(at, &mut bytes) == 4).then(|| u32::from_le_bytes(bytes))
        };
        let hash = name
            .bytes()
            .fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
        // Buckets, first symbol in them, words of the filter (of 8 bytes), its shift; the filter,
        // the buckets, a hash for each symbol.
        let part = |index: u64| word(hashes.checked_add(4 * index)?);
        let (buckets, first, filter) = (part(0)?, part(1)?, part(2)?);
        let table = hashes.checked_add(16 + 8 * u64::from(filter))?;
        let chains = table.checked_add(4 * u64::from(buckets))?;
        let start = word(table.checked_add(4 * u64::from(hash.checked_rem(buckets)?))?)?;
        for index in start..start.saturating_add(MAX_CHAIN) {
            let found = word(chains.checked_add(4 * u64::from(index.checked_sub(first)?))?)?;
            if found | 1 == hash | 1 {
                let mut bytes = [0; size_of::<elf::Sym64<LE>>()];
                let at = symbols.checked_add(u64::from(index) * bytes.len() as u64)?;
                if image.read(at, &mut bytes) < bytes.len() {
                    return None;
                }
                let (symbol, _) = pod::from_bytes::<elf::Sym64<LE>>(&bytes).ok()?;
                if self.is_called(image, symbol.st_name.get(LE), name) {
                    return Some((index, *symbol));
                }
            }
            if found & 1 == 1 {
                return None;
            }
        }
        None
    }

    fn is_called(&self, image: &ByteSource, at: u32, name: &str) -> bool {
        let wanted = [name.as_bytes(), &[0]].concat();
        let (at, length) = (u64::from(at), wanted.len() as u64);
        let there = at.checked_add(length).is_some_and(|end| end <= self.names.bytes);
        there
            && self.names.offset.checked_add(at).and_then(|at| image.bytes(at, length, length))
                == Some(wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::{in_memory, loaded};
    use crate::process::byte_source::ByteSource;
    use crate::process::thread_variable::tests::{VALUE, library, relocated_to};
    use proptest::prelude::{any, proptest};
    use std::fs::File;

    const BASE: u64 = 0x7f00_0000_0000;

    #[test]
    fn a_symbol_is_found_with_and_without_the_loaders_addresses() {
        for image in [library("shown", &[], &[]), relocated_to(BASE, library("shown", &[], &[]))] {
            let image = ByteSource::Bytes(image);
            assert_eq!(loaded(&image, BASE, "shown"), Some(BASE + VALUE));
            assert_eq!(loaded(&image, BASE, "other"), None);
        }
    }

    /// A function of this process's C library is in a mapping of that which can be executed.
    #[test]
    fn a_symbol_is_found_where_the_loader_put_it() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let of_libc: Vec<(u64, u64, &str)> = maps
            .lines()
            .filter(|line| line.contains("/libc.so"))
            .map(|line| {
                let (range, rest) = line.split_once(' ').unwrap();
                let (from, to) = range.split_once('-').unwrap();
                let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
                (from, to, rest)
            })
            .collect();
        let base = of_libc[0].0;
        let find = |base, name| in_memory(File::open("/proc/self/mem").unwrap(), base, name);
        let found = find(base, "pthread_create").unwrap();
        let is_there = |&&(from, to, _): &&(u64, u64, &str)| (from..to).contains(&found);
        let (_, _, rights) = of_libc.iter().find(is_there).unwrap();
        assert!(rights.starts_with("r-xp "), "{found:x}: {rights}");
        assert_eq!(find(base, "no_such_function"), None);
        assert_eq!(find(0, "pthread_create"), None);
    }

    proptest! {
        #[test]
        fn any_image_is_read_or_refused(
            changes in proptest::collection::vec((0..0x1100_usize, any::<u8>()), 0..64),
        ) {
            let mut image = library("shown", &[(0, 0, 0, 0)], &[]);
            for (at, byte) in changes {
                if let Some(there) = image.get_mut(at) {
                    *there = byte;
                }
            }
            loaded(&ByteSource::Bytes(image), BASE, "shown");
        }
    }
}
