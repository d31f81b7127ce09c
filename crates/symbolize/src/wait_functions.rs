//! Where methods go into the runtime to wait, and what for. Optimised code calls those functions
//! itself: the method that did so in the source has become a part of its caller. They have no
//! symbols, but the runtime finds them by name, in tables of its data (src/coreclr/vm of
//! dotnet/runtime): `ECFunc` (ecalllist.h, ecall.h), of flags, the function and the method's name,
//! and `s_QCall` (qcallentrypoints.cpp), of name and function. In the file the pointers are
//! relocations. Before .NET 10 `Monitor` is among them, `Monitor.Wait` a QCall since .NET 9.
//!
//! Any file may claim to be a runtime: what it says is bounded, and stands for its own waits only.

use super::ImageResolver;
use memchr::memmem;
use object::endian::LittleEndian as LE;
use object::{elf, pod};
use perfusion_model::frame::{FrameKey, ImageId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A table of functions by name.
struct FunctionTable {
    /// By which name it is found; with the zero behind it.
    found_by: &'static [u8],
    /// Bytes of an entry, and where in it the function is, counted from the name.
    entry_bytes: u64,
    function_at: i64,
    /// Names in it, and the word for a wait in that function; some only show that it is the table.
    names: &'static [(&'static [u8], Option<&'static str>)],
}

const TABLES: [FunctionTable; 4] = [
    FunctionTable {
        // The longest that `lock` needs.
        found_by: b"ReliableEnter\0",
        entry_bytes: 24,
        function_at: -8,
        names: &[
            (b"Enter", Some("lock")),
            (b"ReliableEnter", Some("lock")),
            (b"ReliableEnterTimeout", Some("lock")),
            (b"ObjWait", Some("condition")),
        ],
    },
    FunctionTable {
        found_by: b"get_OptimalMaxSpinWaitsPerSpinIteration\0",
        entry_bytes: 24,
        function_at: -8,
        names: &[(b"Join", Some("join")), (b"get_OptimalMaxSpinWaitsPerSpinIteration", None)],
    },
    FunctionTable {
        found_by: b"WaitOneCore\0",
        entry_bytes: 24,
        function_at: -8,
        names: &[
            (b"WaitOneCore", Some("event")),
            (b"WaitMultipleIgnoringSyncContext", Some("event")),
            (b"SignalAndWaitNative", Some("event")),
        ],
    },
    FunctionTable {
        found_by: b"ThreadNative_Start\0",
        entry_bytes: 16,
        function_at: 8,
        names: &[
            (b"ThreadNative_Start", None),
            (b"ThreadNative_YieldThread", None),
            (b"ThreadNative_Join", Some("join")),
            (b"Monitor_Wait", Some("condition")),
            (b"WaitHandle_WaitOneCore", Some("event")),
            (b"WaitHandle_WaitMultipleIgnoringSyncContext", Some("event")),
            (b"WaitHandle_SignalAndWait", Some("event")),
        ],
    },
];

/// Most entries on either side of the one that was found; the longest table has some five hundred.
/// And most places where one may be.
const MOST_ENTRIES: u64 = 1024;
const MOST_PLACES: usize = 8;
/// Longest name that is looked at.
const MOST_NAME: usize = 64;

/// Most bytes of constants, and of relocations; CoreCLR has half a MiB of each.
const MAX_BYTES: u64 = 8 << 20;
const MAX_SECTIONS: u16 = 128;
/// Most sections that are read: a file system may take its time for each.
const MAX_READ: usize = 16;

/// Addresses of functions that wait, and the words for it.
pub type WaitAddresses = BTreeMap<u64, &'static str>;

/// What is known of the files whose functions methods call.
#[derive(Debug, Default)]
pub struct WaitFunctions(HashMap<ImageId, WaitAddresses>);

impl WaitFunctions {
    /// Those of the files into which methods go on `stacks`, as frames.
    pub fn called<'a>(
        &mut self,
        stacks: impl Iterator<Item = &'a [FrameKey]>,
        directory: &dyn ImageResolver,
    ) -> Vec<(FrameKey, &'static str)> {
        let called = stacks.filter_map(|stack| {
            let method =
                stack.iter().position(|frame| matches!(frame, FrameKey::Managed { .. }))?;
            match stack.get(method.checked_sub(1)?)? {
                FrameKey::Native { image, .. } => Some(*image),
                _ => None,
            }
        });
        let called: BTreeSet<ImageId> = called.collect();
        let mut frames = Vec::new();
        for image in called {
            if !self.0.contains_key(&image)
                && let Some(file) = directory.image(image).and_then(|image| image.file)
            {
                let found = wait_functions(&|at, into| file.read_exact_at(into, at).is_ok());
                self.0.insert(image, found);
            }
            let functions = self.0.get(&image).into_iter().flatten();
            frames.extend(
                functions.map(|(&address, &word)| (FrameKey::Native { image, address }, word)),
            );
        }
        frames
    }

    /// Forgets files that are not known any more.
    pub fn keep(&mut self, directory: &dyn ImageResolver) {
        self.0.retain(|image, _| directory.image(*image).is_some());
    }
}

/// ELF addresses of the functions; none when the file is no runtime, or one without the tables.
/// `read` fills all it is given from an offset on.
#[must_use]
pub fn wait_functions(read: &dyn Fn(u64, &mut [u8]) -> bool) -> WaitAddresses {
    let Some(file) = RuntimeData::read(read) else { return WaitAddresses::new() };
    TABLES.iter().flat_map(|table| find(&file, table)).collect()
}

fn find(file: &RuntimeData, table: &FunctionTable) -> WaitAddresses {
    let mut functions = WaitAddresses::new();
    for name in file.addresses_of(table.found_by).take(MOST_PLACES) {
        for &(at, _) in file.pointers.iter().filter(|(_, to)| *to == name).take(MOST_PLACES) {
            let size = table.entry_bytes;
            let entry = |at: Option<u64>| file.entry(at?, table.function_at);
            let forwards = (0..MOST_ENTRIES).map_while(|n| entry(at.checked_add(n * size)));
            let backwards = (1..MOST_ENTRIES).map_while(|n| entry(at.checked_sub(n * size)));
            let known = forwards.chain(backwards).filter_map(|(name, function)| {
                let (_, word) = table.names.iter().find(|(known, _)| *known == name)?;
                Some((function, *word))
            });
            let known: Vec<(u64, Option<&'static str>)> = known.collect();
            // One name alone may stand in any table.
            if known.len() > 1 {
                functions.extend(
                    known.into_iter().filter_map(|(function, word)| Some((function, word?))),
                );
            }
        }
    }
    functions
}

/// What there is to look at.
struct RuntimeData {
    /// Constants, and the address each begins at.
    constants: Vec<(u64, Vec<u8>)>,
    /// Words of its data that point into itself, and where to; sorted.
    pointers: Vec<(u64, u64)>,
}

impl RuntimeData {
    fn read(read: &dyn Fn(u64, &mut [u8]) -> bool) -> Option<Self> {
        let bytes = |at: u64, size: u64| {
            let mut bytes = vec![0; usize::try_from(size).ok()?];
            read(at, &mut bytes).then_some(bytes)
        };
        let header = bytes(0, size_of::<elf::FileHeader64<LE>>() as u64)?;
        let (header, _) = pod::from_bytes::<elf::FileHeader64<LE>>(&header).ok()?;
        let ident = &header.e_ident;
        if ident.magic != elf::ELFMAG
            || ident.class != elf::ELFCLASS64
            || ident.data != elf::ELFDATA2LSB
        {
            return None;
        }
        let relative = match header.e_machine.get(LE) {
            elf::EM_X86_64 => elf::R_X86_64_RELATIVE,
            elf::EM_AARCH64 => elf::R_AARCH64_RELATIVE,
            _ => return None,
        };
        let count = header.e_shnum.get(LE).min(MAX_SECTIONS);
        let sections = bytes(
            header.e_shoff.get(LE),
            u64::from(count) * size_of::<elf::SectionHeader64<LE>>() as u64,
        )?;
        let (sections, _) =
            pod::slice_from_bytes::<elf::SectionHeader64<LE>>(&sections, usize::from(count))
                .ok()?;
        let (mut constants, mut pointers) = (Vec::new(), Vec::new());
        let [mut constants_left, mut pointers_left] = [MAX_BYTES; 2];
        let mut read_so_far = 0;
        for section in sections {
            let (flags, size) = (section.sh_flags.get(LE), section.sh_size.get(LE));
            let is_constant = flags & u64::from(elf::SHF_WRITE | elf::SHF_EXECINSTR) == 0;
            if flags & u64::from(elf::SHF_ALLOC) == 0 || !is_constant {
                continue;
            }
            let left = match section.sh_type.get(LE) {
                elf::SHT_PROGBITS => &mut constants_left,
                elf::SHT_RELA => &mut pointers_left,
                _ => continue,
            };
            let Some(rest) = left.checked_sub(size).filter(|_| read_so_far < MAX_READ) else {
                continue;
            };
            read_so_far += 1;
            *left = rest;
            let content = bytes(section.sh_offset.get(LE), size)?;
            if section.sh_type.get(LE) == elf::SHT_PROGBITS {
                constants.push((section.sh_addr.get(LE), content));
                continue;
            }
            let (entries, _) = content.as_chunks::<{ size_of::<elf::Rela64<LE>>() }>();
            let entries =
                entries.iter().filter_map(|entry| pod::from_bytes::<elf::Rela64<LE>>(entry).ok());
            let pointer = |entry: &elf::Rela64<LE>| {
                let is_relative = entry.r_info.get(LE) & u64::from(u32::MAX) == u64::from(relative);
                let to = u64::try_from(entry.r_addend.get(LE)).ok()?;
                is_relative.then(|| (entry.r_offset.get(LE), to))
            };
            pointers.extend(entries.filter_map(|(entry, _)| pointer(entry)));
        }
        pointers.sort_unstable();
        Some(Self { constants, pointers })
    }

    /// Where these bytes are.
    fn addresses_of<'a>(&'a self, wanted: &'a [u8]) -> impl Iterator<Item = u64> + 'a {
        self.constants.iter().flat_map(move |(address, bytes)| {
            memmem::find_iter(bytes, wanted).filter_map(|at| address.checked_add(at as u64))
        })
    }

    fn pointer(&self, at: u64) -> Option<u64> {
        let found = self.pointers.binary_search_by_key(&at, |(at, _)| *at).ok()?;
        self.pointers.get(found).map(|(_, to)| *to)
    }

    /// Name and function of the entry whose name is pointed to from `at`, and its function from
    /// `function_at` bytes on.
    fn entry(&self, at: u64, function_at: i64) -> Option<(&[u8], u64)> {
        let name = self.pointer(at)?;
        let function = self.pointer(at.checked_add_signed(function_at)?)?;
        let name = self.constants.iter().find_map(|(address, bytes)| {
            let rest = bytes.get(usize::try_from(name.checked_sub(*address)?).ok()?..)?;
            rest.get(..MOST_NAME.min(rest.len()))?.split(|byte| *byte == 0).next()
        })?;
        Some((name, function))
    }
}

#[cfg(test)]
mod tests {
    use super::{WaitAddresses, wait_functions};
    use object::elf;
    use proptest::prelude::{any, prop, proptest};

    /// An ELF file with constants at address 0x1000 and relocations.
    fn file(constants: &[u8], relocations: &[(u64, u64)]) -> Vec<u8> {
        let mut file = vec![0u8; 64];
        file[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        file[18..20].copy_from_slice(&elf::EM_X86_64.to_le_bytes());
        let constants_at = file.len() as u64;
        file.extend(constants);
        file.resize(file.len().next_multiple_of(8), 0);
        let relocations_at = file.len() as u64;
        for (at, to) in relocations {
            for word in [*at, u64::from(elf::R_X86_64_RELATIVE), *to] {
                file.extend(word.to_le_bytes());
            }
        }
        let sections = file.len() as u64;
        let size = relocations.len() as u64 * 24;
        for (kind, address, offset, size) in [
            (elf::SHT_PROGBITS, 0x1000, constants_at, constants.len() as u64),
            (elf::SHT_RELA, 0x400, relocations_at, size),
        ] {
            let (mut header, words) =
                ([0u8; 64], [u64::from(elf::SHF_ALLOC), address, offset, size]);
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            for (at, word) in words.iter().enumerate() {
                header[8 + 8 * at..16 + 8 * at].copy_from_slice(&word.to_le_bytes());
            }
            file.extend(header);
        }
        file[40..48].copy_from_slice(&sections.to_le_bytes());
        file[60..62].copy_from_slice(&2u16.to_le_bytes());
        file
    }

    fn found(file: &[u8]) -> WaitAddresses {
        wait_functions(&|at, into| {
            let there = usize::try_from(at).ok().and_then(|at| file.get(at..)?.get(..into.len()));
            there.map(|there| into.copy_from_slice(there)).is_some()
        })
    }

    /// Names, as one string behind the other, and their addresses.
    const NAMES: &[u8] = b"Exit\0Enter\0ReliableEnter\0ReliableEnterTimeout\0";
    const EXIT: u64 = 0x1000;
    const ENTER: u64 = 0x1005;
    const RELIABLE: u64 = 0x100b;
    const TIMEOUT: u64 = 0x1019;

    #[test]
    fn the_functions_of_the_table_are_found_by_its_names() {
        let table = |names: &[u64]| -> Vec<(u64, u64)> {
            let entries = (0..).zip(names);
            entries
                .flat_map(|(n, name)| [(0x5008 + 24 * n, 0x9000 + n), (0x5010 + 24 * n, *name)])
                .collect()
        };
        let of = |names: &[u64]| found(&file(NAMES, &table(names))).into_iter().collect::<Vec<_>>();
        let locks = [(0x9000, "lock"), (0x9001, "lock"), (0x9002, "lock")];
        assert_eq!(of(&[ENTER, RELIABLE, TIMEOUT, EXIT]), locks);
        assert!(found(&file(NAMES, &table(&[EXIT, RELIABLE]))).is_empty(), "a name alone");
        assert!(found(&file(NAMES, &table(&[EXIT, ENTER]))).is_empty());
        // A table ends where an entry has no function.
        let mut gap = table(&[ENTER, EXIT, RELIABLE, TIMEOUT]);
        gap.remove(2);
        assert_eq!(found(&file(NAMES, &gap)).into_keys().collect::<Vec<_>>(), [0x9002, 0x9003]);
        assert!(found(b"#!/bin/sh\n").is_empty());
    }

    #[test]
    fn the_functions_of_the_other_table_stand_behind_their_names() {
        let names = b"ThreadNative_Start\0Monitor_Wait\0ThreadNative_Join\0Other\0";
        let [start, wait, join, other] = [0x1000, 0x1013, 0x1020, 0x1032];
        let of = |names_of_entries: &[u64]| {
            let entries = (0..).zip(names_of_entries);
            let table: Vec<(u64, u64)> = entries
                .flat_map(|(n, name)| [(0x5000 + 16 * n, *name), (0x5008 + 16 * n, 0x9000 + n)])
                .collect();
            found(&file(names, &table)).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(of(&[join, other, start, wait]), [(0x9000, "join"), (0x9003, "condition")]);
        assert!(of(&[other, start]).is_empty(), "a name alone");
    }

    proptest! {
        #[test]
        fn no_change_to_a_file_makes_it_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let pointers =
                [(0x5008, 0x9000), (0x5010, ENTER), (0x5020, 0x9001), (0x5028, RELIABLE)];
            let mut file = file(NAMES, &pointers);
            for (at, byte) in changes {
                let at = at.index(file.len());
                file[at] = byte;
            }
            found(&file[..cut.index(file.len())]);
            found(&file);
        }
    }
}
