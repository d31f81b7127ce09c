//! A PE image in a file: a ReadyToRun assembly by itself, or one of those that a single-file
//! program carries behind its ELF segments. The runtime maps the latter from where they are,
//! section by section (`PAL_LOADLoadPEFile`, src/coreclr/pal/src/loader/module.cpp of
//! dotnet/runtime), so that code of theirs is found by its offset in the program's file.

use super::byte_source::ByteSource;
use memchr::memrchr_iter;
use perfusion_unwind::managed::{ExceptionDirectory, PeImage};
use perfusion_unwind::native::NATIVE;
use std::ops::Range;
use std::sync::Arc;

/// Most PE sections that are read.
const MAX_SECTIONS: u16 = 96;
/// Most bytes of an exception directory that are loaded.
const MAX_DIRECTORY_BYTES: u64 = 32 << 20;
/// Carried assemblies begin at such multiples: at pages for arm64 and with the SDKs before 8, at
/// 16 bytes else (`Microsoft.NET.HostModel`, Bundle/TargetInfo.cs and Bundler.cs).
const ALIGNMENT: u64 = 16;
/// None is longer than that.
const MAX_CARRIED_BYTES: u64 = 64 << 20;
/// Most places that look like a beginning and are tried: data has `MZ` now and then, and a file may
/// be full of it.
const MAX_TRIES: usize = 4096;
/// Read at a time when one is looked for: few readings, since a file system may take its time for
/// each.
const CHUNK_BYTES: u64 = 1 << 20;

/// One PE section: file offsets to relative virtual addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PeSection {
    offset: u32,
    size: u32,
    rva: u32,
}

/// A PE image of this machine: a ReadyToRun image when it has an exception directory.
#[derive(Debug)]
pub(super) struct Pe {
    /// Where it begins in the file.
    start: u64,
    sections: Vec<PeSection>,
    exception: (u32, u32),
    directory: Option<Arc<ExceptionDirectory>>,
}

impl Pe {
    /// Reads headers of a PE32+ image (Microsoft PE format): sections and the exception directory's
    /// place.
    pub(super) fn parse(source: &ByteSource, start: u64) -> Option<Self> {
        /// crossgen marks the target system in the machine field (runtime
        /// src/coreclr/inc/pedecoder.h, IMAGE_FILE_MACHINE_OS_MASK_LINUX).
        const LINUX: u16 = 0x7b79;
        const COFF_BYTES: usize = 24;
        const DIRECTORIES_AT: usize = 112;
        let u16_at =
            |b: &[u8], at: usize| b.get(at..)?.first_chunk::<2>().map(|b| u16::from_le_bytes(*b));
        let u32_at =
            |b: &[u8], at: usize| b.get(at..)?.first_chunk::<4>().map(|b| u32::from_le_bytes(*b));

        let dos = source.bytes(start, 64, 64)?;
        let coff_at = start.checked_add(u64::from(u32_at(&dos, 0x3c)?))?;
        let coff = source.bytes(coff_at, COFF_BYTES as u64, 64)?;
        let machine = u16_at(&coff, 4)?;
        if dos.get(..2)? != b"MZ"
            || coff.get(..4)? != b"PE\0\0"
            || ![NATIVE.pe, NATIVE.pe ^ LINUX].contains(&machine)
        {
            return None;
        }
        let optional_len = u16_at(&coff, 20)?;
        let optional_at = coff_at.checked_add(COFF_BYTES as u64)?;
        let optional = source.bytes(optional_at, u64::from(optional_len), 4096)?;
        if u16_at(&optional, 0)? != 0x20b {
            return None;
        }
        let has_exceptions = u32_at(&optional, DIRECTORIES_AT - 4)? > 3;
        let directory = |at| {
            u32_at(&optional, DIRECTORIES_AT + 3 * 8 + at).filter(|_| has_exceptions).unwrap_or(0)
        };
        let exception = (directory(0), directory(4));
        let count = u16_at(&coff, 6)?.min(MAX_SECTIONS);
        let table = source.bytes(
            optional_at.checked_add(u64::from(optional_len))?,
            u64::from(count) * 40,
            4096,
        )?;
        let sections = table
            .chunks_exact(40)
            .filter_map(|s| {
                Some(PeSection {
                    rva: u32_at(s, 12)?,
                    size: u32_at(s, 16)?,
                    offset: u32_at(s, 20)?,
                })
            })
            .collect();
        Some(Self { start, sections, exception, directory: None })
    }

    /// Looks for the one that holds the byte at `offset` of a file, and does not begin before
    /// `lowest`.
    pub(super) fn find(source: &ByteSource, offset: u64, lowest: u64) -> Option<Self> {
        let lowest = lowest
            .max(offset.saturating_sub(MAX_CARRIED_BYTES))
            .checked_next_multiple_of(ALIGNMENT)?;
        let mut tries = 0;
        let mut end = (offset & !(ALIGNMENT - 1)).checked_add(ALIGNMENT)?;
        while end > lowest {
            let from = end.saturating_sub(CHUNK_BYTES).max(lowest);
            let mut chunk = vec![0; usize::try_from(end - from).ok()?];
            let read = source.read(from, &mut chunk);
            chunk.truncate(read);
            for at in memrchr_iter(b'M', &chunk) {
                let start = from + at as u64;
                if !start.is_multiple_of(ALIGNMENT) || chunk.get(at + 1) != Some(&b'Z') {
                    continue;
                }
                tries += 1;
                if tries > MAX_TRIES {
                    return None;
                }
                if let Some(found) = Self::parse(source, start) {
                    // Behind its end nothing of an earlier one follows.
                    return found.rva(offset).is_some().then_some(found);
                }
            }
            end = from;
        }
        None
    }

    /// Relative virtual address of the byte at `offset` in the file.
    pub(super) fn rva(&self, offset: u64) -> Option<u32> {
        let offset = u32::try_from(offset.checked_sub(self.start)?).ok()?;
        let within = |s: &&PeSection| offset.checked_sub(s.offset).is_some_and(|o| o < s.size);
        let section = self.sections.iter().find(within)?;
        section.rva.checked_add(offset - section.offset)
    }

    /// Relative virtual addresses of its sections, and their offsets in the file.
    pub(super) fn code(&self) -> impl Iterator<Item = (Range<u64>, u64)> {
        let sections = self.sections.iter().filter(|s| s.size > 0);
        sections.map(|s| {
            (
                u64::from(s.rva)..u64::from(s.rva) + u64::from(s.size),
                self.start.saturating_add(u64::from(s.offset)),
            )
        })
    }

    /// The exception directory, and whether it was loaded just now, which it is only from an open
    /// file.
    pub(super) fn directory(
        &mut self,
        source: &ByteSource,
    ) -> Option<(Arc<ExceptionDirectory>, bool)> {
        if let Some(directory) = &self.directory {
            return Some((Arc::clone(directory), false));
        }
        if source.is_closed() {
            return None;
        }
        let (rva, size) = self.exception;
        let mut bytes = vec![0u8; usize::try_from(u64::from(size).min(MAX_DIRECTORY_BYTES)).ok()?];
        let read = PeView { source, pe: self }.read(rva, &mut bytes);
        bytes.truncate(read);
        bytes.shrink_to_fit();
        let loaded = Arc::new(ExceptionDirectory::new(bytes));
        self.directory = Some(Arc::clone(&loaded));
        Some((loaded, true))
    }

    /// Relative virtual address of its exception directory, and how many bytes of it are to be
    /// loaded. `None` where it has none.
    pub(super) fn exception_directory(&self) -> Option<(u32, usize)> {
        let (rva, size) = self.exception;
        let length = usize::try_from(u64::from(size).min(MAX_DIRECTORY_BYTES)).ok()?;
        (rva != 0 && length != 0).then_some((rva, length))
    }

    /// Memory its unwind data takes.
    pub(super) fn held_bytes(&self) -> usize {
        self.directory.as_ref().map_or(0, |directory| directory.size_bytes())
    }

    /// Memory it takes besides.
    pub(super) fn described_bytes(&self) -> usize {
        self.sections.capacity() * size_of::<PeSection>()
    }

    /// Drops its unwind data.
    pub(super) fn release(&mut self) {
        self.directory = None;
    }
}

/// A PE image and the file it is in.
#[derive(Debug)]
pub struct PeView<'a> {
    pub(super) source: &'a ByteSource,
    pub(super) pe: &'a Pe,
}

impl PeImage for PeView<'_> {
    fn read(&self, rva: u32, into: &mut [u8]) -> usize {
        let within = |s: &&PeSection| rva.checked_sub(s.rva).is_some_and(|o| o < s.size);
        let Some(section) = self.pe.sections.iter().find(within) else { return 0 };
        let from = rva - section.rva;
        let length = into.len().min(usize::try_from(section.size - from).unwrap_or(0));
        let into = into.get_mut(..length).unwrap_or_default();
        let at = self.pe.start.saturating_add(u64::from(section.offset) + u64::from(from));
        self.source.read(at, into)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Headers of an image whose one section is `size` bytes at 0x1000 of it, for 0x4000.
    pub(in crate::process) fn headers(size: u32) -> Vec<u8> {
        let mut bytes = vec![0u8; 0x400];
        let mut put = |at: usize, what: &[u8]| bytes[at..at + what.len()].copy_from_slice(what);
        put(0, b"MZ");
        put(0x3c, &0x80u32.to_le_bytes());
        put(0x80, b"PE\0\0");
        put(0x84, &NATIVE.pe.to_le_bytes());
        put(0x86, &1u16.to_le_bytes());
        put(0x94, &240u16.to_le_bytes());
        put(0x98, &0x20bu16.to_le_bytes());
        for (at, word) in [(12, 0x4000), (16, size), (20, 0x1000)] {
            put(0x98 + 240 + at, &u32::to_le_bytes(word));
        }
        bytes
    }

    #[test]
    fn a_carried_image_is_found_from_a_byte_of_its_code() {
        let mut file = vec![0u8; 0x40_0000];
        for (start, size) in [(0x2380, 0x3000), (0x10_0000, 0x20_0000)] {
            file[start..start + 0x400].copy_from_slice(&headers(size));
        }
        // What looks like one and is none.
        file[0x18_0000..0x18_0002].copy_from_slice(b"MZ");
        let source = ByteSource::Bytes(file);
        let rva = |offset: u64, lowest: u64| {
            let found = Pe::find(&source, offset, lowest)?;
            Some((found.start, found.rva(offset)?))
        };
        assert_eq!(rva(0x34a3, 0x1234), Some((0x2380, 0x4123)));
        assert_eq!(rva(0x2f_ffff, 0), Some((0x10_0000, 0x4000 + 0x1f_efff)));
        assert_eq!(rva(0x6380, 0), None, "behind its end");
        assert_eq!(rva(0x34a3, 0x2381), None, "part of what is before");
        assert_eq!((rva(0x50_0000, 0), rva(u64::MAX, 0), rva(0, 0)), (None, None, None));
    }

    #[test]
    fn a_file_full_of_beginnings_is_given_up() {
        let mut file = headers(0x20_0000);
        file.resize(0x20_0000, 0);
        let at = |tries: usize| 0x1000 + ALIGNMENT as usize * tries;
        let fill = |file: &mut Vec<u8>, tries: usize| {
            for place in (0x1000..at(tries)).step_by(ALIGNMENT as usize) {
                file[place..place + 2].copy_from_slice(b"MZ");
            }
            Pe::find(&ByteSource::Bytes(file.clone()), at(tries) as u64 + 0x100, 0).is_some()
        };
        assert!(fill(&mut file, MAX_TRIES - 1));
        assert!(!fill(&mut file, MAX_TRIES));
    }
}
