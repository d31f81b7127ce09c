//! Thread-local variables of ELF files, found by name: in the dynamic symbol table, and in the
//! relocations by which the file itself finds them. Files come from profiled processes: every table
//! is bounded, and what does not fit together has no variable.

use super::byte_source::ByteSource;
use super::elf::{elf_header, program_headers};
use super::elf_symbol::{DynamicSection, DynamicTable};
use super::image::ExecutableImage;
use object::endian::LittleEndian as LE;
use object::{elf, pod};

/// Most bytes of relocations read of a file, of all its tables together: a third of a million.
const MAX_RELOCATION_BYTES: u64 = 8 << 20;
const RELOCATIONS_AT_ONCE: u64 = 1 << 16;

/// Where a thread has a variable. Addresses are ELF virtual addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadVariable {
    /// So far behind the thread pointer.
    Static(i64),
    /// The word there says how far.
    Distance(u64),
    /// A TLS descriptor is there.
    Descriptor(u64),
    /// There are the module's number and the variable's place in its block.
    Index(u64),
    /// There is the module's number; the place in its block is known.
    Module(u64, u64),
}

impl ExecutableImage {
    /// The thread-local variable of this name and size that the file defines for everybody.
    #[must_use]
    pub fn thread_variable(&self, name: &str, size: u64) -> Option<ThreadVariable> {
        find(self.source(), name, size)
    }
}

/// Thread-local memory of a module, as the file has it.
#[derive(Clone, Copy)]
struct TlsBlock {
    address: u64,
    bytes: u64,
    align: u64,
}

fn find(source: &ByteSource, name: &str, size: u64) -> Option<ThreadVariable> {
    let header = elf_header(source)?;
    let programs = program_headers(source, &header)?;
    let of_type =
        |wanted: u32| programs.iter().find(move |program| program.p_type.get(LE) == wanted);
    // Most files have none, and are done with here.
    let block = of_type(elf::PT_TLS).map(|block| TlsBlock {
        address: block.p_vaddr.get(LE),
        bytes: block.p_memsz.get(LE),
        align: block.p_align.get(LE).max(1),
    })?;
    let section = of_type(elf::PT_DYNAMIC)?;
    let offset_of = |address: u64| {
        programs.iter().filter(|program| program.p_type.get(LE) == elf::PT_LOAD).find_map(
            |program| {
                let within = address.checked_sub(program.p_vaddr.get(LE))?;
                (within < program.p_filesz.get(LE))
                    .then(|| program.p_offset.get(LE).checked_add(within))?
            },
        )
    };
    let dynamic = DynamicSection::read(source, section.p_offset.get(LE), section, offset_of)?;
    let (index, symbol) = dynamic.symbol(source, name)?;
    if symbol.st_info & 0xf != elf::STT_TLS
        || symbol.st_shndx.get(LE) == 0
        || symbol.st_size.get(LE) != size
    {
        return None;
    }
    let value = symbol.st_value.get(LE);
    let loaded = header.e_type.get(LE) == elf::ET_EXEC
        || dynamic.is_program
        || of_type(elf::PT_INTERP).is_some();
    if loaded {
        return distance(block, value).map(ThreadVariable::Static);
    }
    let mut left = MAX_RELOCATION_BYTES;
    let mut module = None;
    for table in dynamic.relocations {
        match relocated(source, table, &mut left, index, value) {
            // That says where the module's other variables are as well. The variable's own
            // relocation, which is the surer one, may be in another table: linkers put a descriptor
            // among those of calls.
            Some(found @ ThreadVariable::Module(..)) => module = module.or(Some(found)),
            Some(found) => return Some(found),
            None => {}
        }
    }
    module
}

/// How far behind the thread pointer the program's own variables are: its block ends there, as far
/// up as its alignment allows (x86-64, variant II).
fn distance(block: TlsBlock, value: u64) -> Option<i64> {
    let end = block.address.wrapping_add(block.bytes);
    let below = block.bytes.checked_add(end.wrapping_neg() & (block.align - 1))?;
    i64::try_from(value).ok()?.checked_sub(i64::try_from(below).ok()?)
}

/// What a relocation has put where for the variable, of so many bytes as there are `left` to read.
/// One that is bound within its file has no symbol: the value stands in the relocation.
fn relocated(
    source: &ByteSource,
    table: DynamicTable,
    left: &mut u64,
    index: u32,
    value: u64,
) -> Option<ThreadVariable> {
    const BYTES: u64 = size_of::<elf::Rela64<LE>>() as u64;
    let bytes = table.bytes.min(*left) / BYTES * BYTES;
    *left -= bytes;
    let mut module = None;
    let mut at = 0;
    while at < bytes {
        let part = (bytes - at).min(RELOCATIONS_AT_ONCE * BYTES);
        let read = source.bytes(table.offset.checked_add(at)?, part, part)?;
        let count = read.len() / size_of::<elf::Rela64<LE>>();
        let (entries, _) = pod::slice_from_bytes::<elf::Rela64<LE>>(&read, count).ok()?;
        for entry in entries {
            let (symbol, addend) = (entry.r_sym(LE, false), entry.r_addend.get(LE));
            let here = entry.r_offset.get(LE);
            let by_name = symbol == index && addend == 0;
            let by_value = symbol == 0 && u64::try_from(addend).is_ok_and(|addend| addend == value);
            match entry.r_type(LE, false) {
                elf::R_X86_64_TPOFF64 if by_name || by_value => {
                    return Some(ThreadVariable::Distance(here));
                }
                elf::R_X86_64_TLSDESC if by_name || by_value => {
                    return Some(ThreadVariable::Descriptor(here));
                }
                elf::R_X86_64_DTPMOD64 if by_name => return Some(ThreadVariable::Index(here)),
                // The module's, for any of its variables.
                elf::R_X86_64_DTPMOD64 if symbol == 0 => {
                    module = Some(ThreadVariable::Module(here, value))
                }
                _ => {}
            }
        }
        at += part;
    }
    module
}

#[cfg(test)]
pub(super) mod tests {
    use super::{MAX_RELOCATION_BYTES, ThreadVariable, TlsBlock, distance, find};
    use crate::process::byte_source::ByteSource;
    use object::elf;
    use perfusion_unwind::native::NATIVE;

    /// Offsets in [`library`], which are its addresses, too.
    const PROGRAMS: u64 = 64;
    const DYNAMIC: u64 = 0x400;
    const SYMBOLS: u64 = 0x600;
    const NAMES: u64 = 0x700;
    const HASHES: u64 = 0x800;
    const TABLES: u64 = 0x1000;
    /// Where the variable is in its module's block.
    pub(crate) const VALUE: u64 = 16;

    /// A relocation: where, which, of which symbol, what is added.
    pub(crate) type Relocation = (u64, u32, u32, u64);

    /// A library that defines the variable `name`, with relocations of data and of calls.
    pub(crate) fn library(name: &str, direct: &[Relocation], by_calls: &[Relocation]) -> Vec<u8> {
        let words =
            |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let halves =
            |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let table = |of: &[Relocation]| -> Vec<u8> {
            let entry = |&(at, kind, symbol, addend): &Relocation| {
                [at, u64::from(symbol) << 32 | u64::from(kind), addend]
            };
            words(&of.iter().flat_map(entry).collect::<Vec<u64>>())
        };
        let (direct, by_calls) = (table(direct), table(by_calls));
        let calls_at = TABLES + direct.len() as u64;
        let end = calls_at + by_calls.len() as u64;
        let program = |kind: u32, flags: u32, offset: u64, bytes: u64| {
            [halves(&[kind, flags]), words(&[offset, offset, offset, bytes, bytes, 8])].concat()
        };
        let hash = name
            .bytes()
            .fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(byte)));
        let names = [&[0], name.as_bytes(), &[0]].concat();
        let parts = [
            (0, [&elf::ELFMAG[..], &[elf::ELFCLASS64, elf::ELFDATA2LSB, 1]].concat()),
            (16, halves(&[u32::from(NATIVE.elf) << 16 | u32::from(elf::ET_DYN), 1])),
            (32, words(&[PROGRAMS])),
            (52, halves(&[56 << 16 | 64, 3])),
            (
                PROGRAMS,
                [
                    program(elf::PT_LOAD, elf::PF_R | elf::PF_X, 0, end),
                    program(elf::PT_TLS, elf::PF_R, 0, 32),
                    program(elf::PT_DYNAMIC, elf::PF_R, DYNAMIC, 16 * 9),
                ]
                .concat(),
            ),
            (
                DYNAMIC,
                [
                    (elf::DT_SYMTAB, SYMBOLS),
                    (elf::DT_STRTAB, NAMES),
                    (elf::DT_STRSZ, names.len() as u64),
                    (elf::DT_GNU_HASH, HASHES),
                    (elf::DT_RELA, TABLES),
                    (elf::DT_RELASZ, direct.len() as u64),
                    (elf::DT_JMPREL, calls_at),
                    (elf::DT_PLTRELSZ, by_calls.len() as u64),
                    (elf::DT_NULL, 0),
                ]
                .iter()
                .flat_map(|(tag, value)| words(&[u64::try_from(*tag).unwrap_or(0), *value]))
                .collect(),
            ),
            // The first symbol is none.
            (
                SYMBOLS + 24,
                [halves(&[1, 1 << 16 | elf::STT_TLS as u32]), words(&[VALUE, 8])].concat(),
            ),
            (NAMES, names),
            // A bucket, whose first symbol is 1; a word of the filter; the bucket; the hash of its
            // last symbol.
            (HASHES, [halves(&[1, 1, 1, 0]), words(&[u64::MAX]), halves(&[1, hash | 1])].concat()),
            (TABLES, direct),
            (calls_at, by_calls),
        ];
        let mut file = vec![0; usize::try_from(end).unwrap()];
        for (at, bytes) in parts {
            let at = usize::try_from(at).unwrap();
            file[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        file
    }

    /// The same as a loader has it in memory that makes addresses of the tables' offsets.
    pub(crate) fn relocated_to(base: u64, mut library: Vec<u8>) -> Vec<u8> {
        let at = usize::try_from(DYNAMIC).unwrap();
        for entry in library[at..].chunks_mut(16) {
            let (tag, value) = entry.split_at_mut(8);
            match i64::from_le_bytes(tag.try_into().unwrap()) {
                elf::DT_NULL => break,
                elf::DT_STRSZ | elf::DT_RELASZ | elf::DT_PLTRELSZ => {}
                _ => {
                    let offset = u64::from_le_bytes(value.try_into().unwrap());
                    value.copy_from_slice(&(base + offset).to_le_bytes());
                }
            }
        }
        library
    }

    fn found(direct: &[Relocation], by_calls: &[Relocation]) -> Option<ThreadVariable> {
        find(&ByteSource::Bytes(library("shown", direct, by_calls)), "shown", 8)
    }

    #[test]
    fn the_variables_own_relocation_is_preferred_in_whichever_table_it_is() {
        let module = (0x3000, elf::R_X86_64_DTPMOD64, 0, 0);
        let others = (0x3100, elf::R_X86_64_GLOB_DAT, 2, 0);
        let own = [
            ((0x3200, elf::R_X86_64_TLSDESC, 1, 0), ThreadVariable::Descriptor(0x3200)),
            // Bound within the file.
            ((0x3200, elf::R_X86_64_TLSDESC, 0, VALUE), ThreadVariable::Descriptor(0x3200)),
            ((0x3200, elf::R_X86_64_TPOFF64, 1, 0), ThreadVariable::Distance(0x3200)),
            ((0x3200, elf::R_X86_64_DTPMOD64, 1, 0), ThreadVariable::Index(0x3200)),
        ];
        for (own, expected) in own {
            assert_eq!(found(&[others, module], &[others, own]), Some(expected));
            assert_eq!(found(&[own], &[module]), Some(expected));
            assert_eq!(found(&[module, own], &[]), Some(expected));
        }
        assert_eq!(
            found(&[others], &[module, others]),
            Some(ThreadVariable::Module(0x3000, VALUE))
        );
        assert_eq!(found(&[module], &[]), Some(ThreadVariable::Module(0x3000, VALUE)));
        // Another variable's.
        assert_eq!(found(&[(0x3200, elf::R_X86_64_TLSDESC, 0, VALUE + 8)], &[others]), None);
    }

    #[test]
    fn no_more_of_a_files_relocations_is_read_than_there_may_be_in_all() {
        let most = usize::try_from(MAX_RELOCATION_BYTES / 24).unwrap();
        let others = vec![(0x3100, elf::R_X86_64_GLOB_DAT, 2, 0); most];
        let own = (0x3200, elf::R_X86_64_TLSDESC, 1, 0);
        assert_eq!(
            found(&[&[own], &others[1..]].concat(), &[]),
            Some(ThreadVariable::Descriptor(0x3200))
        );
        assert_eq!(found(&[&others[1..], &[own]].concat(), &others[..1]), None);
        assert_eq!(
            found(&others, &[own]),
            Some(ThreadVariable::Descriptor(0x3200)),
            "calls are few"
        );
    }

    #[test]
    fn the_programs_block_ends_at_the_thread_pointer_as_far_up_as_it_may() {
        let block = |address, bytes, align| TlsBlock { address, bytes, align };
        assert_eq!(distance(block(0x1000, 8, 8), 0), Some(-8));
        // Linkers round the size up so that the block begins at an aligned address.
        assert_eq!(distance(block(0x1000, 24, 16), 16), Some(-16));
        assert_eq!(distance(block(0x1008, 8, 64), 0), Some(-56));
        assert_eq!(distance(block(u64::MAX, u64::MAX, 1 << 63), u64::MAX), None);
    }

    /// This program, whose symbols are not for others.
    #[test]
    fn a_file_without_the_variable_has_none_and_neither_has_a_cut_one() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        for length in [own.len(), own.len() / 2, 4096, 64, 3] {
            let part = ByteSource::Bytes(own[..length].to_vec());
            assert_eq!(find(&part, "otel_thread_ctx_v1", 8), None, "{length}");
        }
    }
}
