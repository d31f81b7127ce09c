//! Native symbols from an ELF file's `.symtab` and `.dynsym`, by blazesym.
//!
//! blazesym maps the file, and a mapped file that its owner truncates kills the reader by SIGBUS.
//! The profiled side owns these files, so what is mapped is a private, sparse copy in a memfd:
//! headers and the symbol and string tables, at their own offsets. It is bounded, lives for one
//! batch, and costs no memory for code and data.

pub use crate::error::NativeError;

use crate::demangle;
use crate::elf_sections::{
    ELF_HEADER_BYTES, ELF_IDENT, SHT_DYNSYM, SHT_STRTAB, SHT_SYMTAB, u64_in,
};
use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{Input, Sym, Symbolized, Symbolizer};
use perfusion_host::process::guarded_io::ForeignFile;
use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Largest file that is looked at: no real library is bigger, and a sparse one may claim anything.
const MAX_FILE_BYTES: u64 = 16 << 30;
/// Bytes of headers and tables copied from one file, and from all files of one window.
const MAX_COPIED_BYTES: u64 = 64 << 20;
const MAX_COPIED_IN_ALL_BYTES: u64 = 512 << 20;
/// How far a symbol without a size (hand-written assembly) reaches at most.
const MAX_SIZELESS_BYTES: usize = 4096;
/// Copied per read.
const CHUNK_BYTES: usize = 1 << 20;

const SECTION_HEADER_BYTES: usize = 64;

/// A symbol's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NativeName {
    /// Demangled where it is C++ or Rust.
    pub name: String,
    /// As in the symbol table.
    pub system_name: String,
    /// ELF virtual address where the symbol begins.
    pub start: u64,
}

/// What may still be copied for one window: a process may map any number of files with large
/// tables.
#[derive(Debug)]
pub struct CopyBudget {
    left: u64,
}

impl Default for CopyBudget {
    fn default() -> Self {
        Self { left: MAX_COPIED_IN_ALL_BYTES }
    }
}

/// The name of each ELF virtual address, `None` where no symbol covers it.
///
/// # Errors
/// When the file cannot be read, is no ELF file, or is beyond the limits.
pub fn names(
    file: &ForeignFile,
    addresses: &[u64],
    budget: &mut CopyBudget,
) -> Result<Vec<Option<NativeName>>, NativeError> {
    symbolize(&sparse_copy(file, budget)?, addresses)
}

/// The same for an image that is held in memory.
///
/// # Errors
/// As [`names`].
pub(crate) fn names_in(
    image: &[u8],
    addresses: &[u64],
    budget: &mut CopyBudget,
) -> Result<Vec<Option<NativeName>>, NativeError> {
    let mut file = memfd()?;
    file.write_all(image)?;
    names(&ForeignFile::own(file), addresses, budget)
}

/// Looks addresses up in a file nobody else can change.
fn symbolize(copy: &File, addresses: &[u64]) -> Result<Vec<Option<NativeName>>, NativeError> {
    let mut source = Elf::new(format!("/proc/self/fd/{}", copy.as_raw_fd()));
    source.debug_syms = false;
    // A fresh symbolizer per file: descriptors are reused, so a cache by path could mix files up.
    let symbolizer = Symbolizer::builder()
        .enable_code_info(false)
        .enable_inlined_fns(false)
        .enable_demangling(false)
        .build();
    // The tables are hostile input to a library that was written for honest files.
    let found =
        catch_unwind(AssertUnwindSafe(|| -> Result<Vec<Option<(String, u64)>>, NativeError> {
            let found = symbolizer.symbolize(&Source::Elf(source), Input::VirtOffset(addresses))?;
            // blazesym stretches a symbol without a size up to the next symbol, however far that
            // is.
            let near =
                |symbol: &Sym<'_>| symbol.size.is_some() || symbol.offset < MAX_SIZELESS_BYTES;
            let name = |found: Symbolized<'_>| {
                let symbol = found.into_sym().filter(near)?;
                Some((symbol.name.into_owned(), symbol.addr))
            };
            Ok(found.into_iter().map(name).collect())
        }))
        .map_err(|_| NativeError::Panic)??;
    let readable = |(name, start): (String, u64)| (!name.is_empty()).then(|| readable(name, start));
    Ok(found.into_iter().map(|found| found.and_then(readable)).collect())
}

/// C++ and Rust names made readable; anything else as it is.
fn readable(system_name: String, start: u64) -> NativeName {
    let name = demangle::whole(&system_name);
    NativeName { name: name.unwrap_or_else(|| system_name.clone()), system_name, start }
}

pub(crate) fn memfd() -> Result<File, Errno> {
    Ok(File::from(rustix::fs::memfd_create("perfusion-symbols", rustix::fs::MemfdFlags::CLOEXEC)?))
}

/// A memfd as long as `file` that holds its headers and its symbol and string tables, and holes
/// elsewhere.
fn sparse_copy(file: &ForeignFile, budget: &mut CopyBudget) -> Result<File, NativeError> {
    let len = file.metadata()?.len();
    if len > MAX_FILE_BYTES {
        return Err(NativeError::Format("longer than 16 GiB"));
    }
    let mut header = [0; ELF_HEADER_BYTES];
    file.read_exact_at(&mut header, 0)?;
    let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let u64_at = |at: usize| u64_in(&header, at);
    if header[..6] != ELF_IDENT {
        return Err(NativeError::Format("no 64-bit little-endian ELF header"));
    }
    let (program_offset, section_offset) = (u64_at(32), u64_at(40));
    let (program_size, programs) = (u64::from(u16_at(54)), u64::from(u16_at(56)));
    let (section_size, sections) = (u16_at(58), u16_at(60));
    if usize::from(section_size) != SECTION_HEADER_BYTES || sections == 0 {
        return Err(NativeError::Format("no section headers"));
    }
    let mut parts = vec![
        (0, 64),
        (program_offset, program_size * programs),
        (section_offset, u64::from(section_size) * u64::from(sections)),
    ];
    let mut section = [0; SECTION_HEADER_BYTES];
    for index in 0..u64::from(sections) {
        let at = section_offset
            .checked_add(index * u64::from(section_size))
            .ok_or(NativeError::Format("section headers beyond the file"))?;
        file.read_exact_at(&mut section, at)?;
        let kind = u32::from_le_bytes([section[4], section[5], section[6], section[7]]);
        if matches!(kind, SHT_SYMTAB | SHT_STRTAB | SHT_DYNSYM) {
            parts.push((u64_in(&section, 24), u64_in(&section, 32)));
        }
    }
    let found = parts.iter().fold(0u64, |sum, (_, part_len)| sum.saturating_add(*part_len));
    if found > MAX_COPIED_BYTES {
        return Err(NativeError::TooLarge { found, limit: MAX_COPIED_BYTES });
    }
    budget.left =
        budget.left.checked_sub(found).ok_or(NativeError::Budget { found, left: budget.left })?;
    let copy = memfd()?;
    copy.set_len(len)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    for (start, part_len) in parts {
        let end = start.checked_add(part_len).filter(|end| *end <= len);
        let end = end.ok_or(NativeError::Format("a table lies beyond the file's end"))?;
        let mut at = start;
        while at < end {
            let want = usize::try_from(end - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let got = file.read_at(&mut chunk[..want], at)?;
            if got == 0 {
                return Err(NativeError::Format("it became shorter while it was read"));
            }
            copy.write_all_at(&chunk[..got], at)?;
            at += u64::try_from(got).unwrap_or(u64::MAX);
        }
    }
    Ok(copy)
}

/// Where a file's code lies in its ELF address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSegment {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub limit: u64,
    /// Offset of `start` in the file, bytes.
    pub file_offset: u64,
}

/// The first executable `PT_LOAD` segment, widened to whole pages as the loader maps it. `None` for
/// anything unusual.
#[must_use]
pub fn text_segment(file: &ForeignFile) -> Option<TextSegment> {
    const PAGE_BYTES: u64 = 4096;
    const PROGRAM_HEADER_BYTES: u64 = 56;
    let mut header = [0; ELF_HEADER_BYTES];
    file.read_exact_at(&mut header, 0).ok()?;
    let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    if header[..6] != ELF_IDENT || u64::from(u16_at(54)) != PROGRAM_HEADER_BYTES {
        return None;
    }
    for index in 0..u64::from(u16_at(56)) {
        let mut program = [0; 64];
        let at = u64_in(&header, 32).checked_add(index * PROGRAM_HEADER_BYTES)?;
        file.read_exact_at(&mut program[..56], at).ok()?;
        // PT_LOAD with PF_X.
        if program[..4] != [1, 0, 0, 0] || program[4] & 1 == 0 {
            continue;
        }
        let (offset, address, len) =
            (u64_in(&program, 8), u64_in(&program, 16), u64_in(&program, 40));
        let before = address % PAGE_BYTES;
        return Some(TextSegment {
            start: address - before,
            limit: address.checked_add(len)?.checked_next_multiple_of(PAGE_BYTES)?,
            file_offset: offset.checked_sub(before)?,
        });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test binary itself: PIE, with `.symtab`, Rust names.
    fn own_image() -> (ForeignFile, u64) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let line = maps.lines().find(|line| line.ends_with(exe.to_str().unwrap())).unwrap();
        let base = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        (ForeignFile::own(File::open(exe).unwrap()), base)
    }

    #[inline(never)]
    fn a_function_with_a_known_name() -> u64 {
        std::hint::black_box(a_function_with_a_known_name as *const () as usize as u64)
    }

    #[test]
    fn names_a_function_of_this_binary_and_nothing_outside_it() {
        let (file, base) = own_image();
        let address = a_function_with_a_known_name() - base;
        let found =
            names(&file, &[address + 1, 0x7fff_ffff_ffff], &mut CopyBudget::default()).unwrap();
        let name = found[0].as_ref().unwrap();
        assert!(
            name.name.ends_with("native::tests::a_function_with_a_known_name"),
            "{}",
            name.name
        );
        assert!(
            name.system_name.starts_with("_R") || name.system_name.starts_with("_ZN"),
            "{}",
            name.system_name
        );
        assert_eq!(found[1], None);
    }

    #[test]
    fn a_window_copies_no_more_than_its_budget() {
        let (file, _) = own_image();
        let mut budget = CopyBudget { left: 1000 };
        assert!(matches!(
            names(&file, &[0x1234], &mut budget),
            Err(NativeError::Budget { left: 1000, .. })
        ));
    }

    #[test]
    fn the_text_segment_holds_this_binary_s_code() {
        let (file, base) = own_image();
        let text = text_segment(&file).unwrap();
        let address = a_function_with_a_known_name() - base;
        assert!((text.start..text.limit).contains(&address), "{address:x} in {text:x?}");
    }

    #[test]
    fn cpp_names_are_demangled_and_c_names_left_alone() {
        assert_eq!(readable("_ZN3foo3barEi".to_owned(), 0).name, "foo::bar(int)");
        assert_eq!(readable("malloc".to_owned(), 0).name, "malloc");
        assert_eq!(readable("_Zgarbage".to_owned(), 0).name, "_Zgarbage");
    }

    #[test]
    fn files_that_are_cut_or_scribbled_on_give_an_error_or_no_name() {
        let (file, _) = own_image();
        let mut start = vec![0; 4096];
        file.read_exact_at(&mut start, 0).unwrap();
        let probe = |bytes: &[u8]| {
            let mut scratch = tempfile::tempfile().unwrap();
            scratch.write_all(bytes).unwrap();
            names(&ForeignFile::own(scratch), &[0x1234], &mut CopyBudget::default())
                .map(|found| found.into_iter().flatten().count())
        };
        for cut in [0, 1, 63, 64, 65, 4095, 4096] {
            assert!(probe(&start[..cut]).is_err(), "cut at {cut}");
        }
        for at in 0..64 {
            let mut bytes = start.clone();
            bytes[at] ^= 0xff;
            assert_ne!(probe(&bytes).ok(), Some(1), "byte {at}");
        }
    }
}
