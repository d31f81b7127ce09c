//! ReadyToRun images in anonymous memory. A compressed single-file program has its assemblies
//! unpacked there: the runtime reserves memory for the whole image, copies each section to its
//! place and makes the code executable (`ConvertedImageLayout`, src/coreclr/vm/peimagelayout.cpp of
//! dotnet/runtime). So below a mapping with such code are the image's headers, and its unwind data
//! are in memory as they are in a file.

use super::byte_source::ByteSource;
use super::memory::ProcessMemory;
use super::pe::Pe;
use perfusion_unwind::TargetMemory;
use perfusion_unwind::managed::{ExceptionDirectory, PeImage};
use std::ops::Range;

/// Images are reserved at such multiples (`VIRTUAL_64KB`, src/coreclr/pal/src/map/virtual.cpp).
const RESERVED_AT: u64 = 64 << 10;
/// How far below its code an image may begin, in such multiples: what lies between are headers,
/// and in an image of crossgen data that is only read.
const MOST_STEPS: u64 = 64;
/// Bytes of headers that are read.
const HEADER_BYTES: usize = 4096;
/// Most mappings that are remembered, and most bytes of the unwind data of one process.
const MAX_KNOWN: usize = 1024;
const MAX_BYTES: usize = 32 << 20;

/// An image in the memory of a process.
#[derive(Debug)]
pub(super) struct MemoryImage {
    base: u64,
    pe: Pe,
    directory: ExceptionDirectory,
}

impl MemoryImage {
    /// Looks for the image whose code begins at `code`, the start of a mapping.
    fn find(memory: &dyn TargetMemory, code: u64) -> Option<Self> {
        let highest = code & !(RESERVED_AT - 1);
        let mut headers = vec![0u8; HEADER_BYTES];
        for step in 0..=MOST_STEPS {
            let base = highest.checked_sub(step * RESERVED_AT).filter(|base| *base > 0)?;
            let read = memory.read(base, &mut headers);
            let there = headers.get(..read).unwrap_or_default();
            if !there.starts_with(b"MZ") {
                continue;
            }
            let pe = Pe::parse(&ByteSource::Bytes(there.to_vec()), 0)?;
            // The mapping's first page may begin before the section that it holds.
            pe.code().find(|(rvas, _)| {
                let begin = base.saturating_add(rvas.start & !(4096 - 1));
                let end = base.saturating_add(rvas.end);
                (begin..end).contains(&code)
            })?;
            let (rva, length) = pe.exception_directory()?;
            let mut bytes = vec![0u8; length];
            let read = memory.read(base.checked_add(u64::from(rva))?, &mut bytes);
            bytes.truncate(read);
            bytes.shrink_to_fit();
            return Some(Self { base, pe, directory: ExceptionDirectory::new(bytes) });
        }
        None
    }

    /// Its unwind data.
    pub(super) fn directory(&self) -> &ExceptionDirectory {
        &self.directory
    }

    /// Relative virtual address of `address`, which must be in one of its sections.
    pub(super) fn rva(&self, address: u64) -> Option<u32> {
        let rva = address.checked_sub(self.base)?;
        self.pe.code().find(|(rvas, _)| rvas.contains(&rva))?;
        u32::try_from(rva).ok()
    }

    /// The image to read from.
    pub(super) fn view<'a>(&self, memory: &'a dyn TargetMemory) -> MemoryPeView<'a> {
        MemoryPeView { memory, base: self.base }
    }
}

/// An image, and the memory it is in.
pub(super) struct MemoryPeView<'a> {
    memory: &'a dyn TargetMemory,
    base: u64,
}

impl PeImage for MemoryPeView<'_> {
    fn read(&self, rva: u32, into: &mut [u8]) -> usize {
        self.memory.read(self.base.wrapping_add(u64::from(rva)), into)
    }
}

/// What the anonymous mappings of a process hold, as far as that was looked for.
#[derive(Debug, Default)]
pub(super) struct MemoryImages {
    /// By mapping; `None` where there is no image.
    known: Vec<(Range<u64>, Option<MemoryImage>)>,
}

impl MemoryImages {
    /// The image whose code the mapping `range` holds.
    pub(super) fn of(
        &mut self,
        memory: &ProcessMemory,
        range: &Range<u64>,
    ) -> Option<&MemoryImage> {
        let at = match self.known.iter().position(|(known, _)| known == range) {
            Some(at) => at,
            None => {
                let code = range.start;
                let found = memory.with(move |memory| MemoryImage::find(memory, code))?;
                let held: usize =
                    self.known.iter().map(|(_, image)| bytes_of(image.as_ref())).sum();
                if self.known.len() >= MAX_KNOWN
                    || held.saturating_add(bytes_of(found.as_ref())) > MAX_BYTES
                {
                    self.known.clear();
                }
                self.known.push((range.clone(), found));
                self.known.len() - 1
            }
        };
        self.known.get(at)?.1.as_ref()
    }

    /// What is in `range` may have changed.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        self.known.retain(|(known, _)| known.end <= range.start || range.end <= known.start);
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.known.clear();
    }
}

fn bytes_of(image: Option<&MemoryImage>) -> usize {
    image.map_or(0, |image| image.directory.size_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::pe::tests::headers;
    use super::*;

    const BASE: u64 = 0x7f00_0001_0000;

    /// Memory with these bytes at [`BASE`], and nothing else.
    struct Bytes(Vec<u8>);

    impl TargetMemory for Bytes {
        fn read(&self, address: u64, into: &mut [u8]) -> usize {
            let at =
                address.checked_sub(BASE).and_then(|at| self.0.get(usize::try_from(at).ok()?..));
            let there = at.unwrap_or_default();
            let length = there.len().min(into.len());
            into[..length].copy_from_slice(&there[..length]);
            length
        }
    }

    #[test]
    fn an_image_is_found_from_the_start_of_its_code_and_nowhere_else() {
        // One section, for 0x4000 of 0x3000 bytes, and an exception directory in it.
        let mut bytes = headers(0x3000);
        bytes.resize(0x7000, 0);
        bytes[0x98 + 108..0x98 + 112].copy_from_slice(&16u32.to_le_bytes());
        bytes[0x98 + 136..0x98 + 140].copy_from_slice(&0x4100u32.to_le_bytes());
        bytes[0x98 + 140..0x98 + 144].copy_from_slice(&24u32.to_le_bytes());
        let memory = Bytes(bytes);
        let found = MemoryImage::find(&memory, BASE + 0x4000).unwrap();
        assert_eq!((found.base, found.directory.size_bytes()), (BASE, 24));
        assert_eq!(found.rva(BASE + 0x4123), Some(0x4123));
        assert_eq!((found.rva(BASE + 0x7000), found.rva(BASE - 1)), (None, None));
        // Memory behind the image, and memory with none below it.
        assert!(MemoryImage::find(&memory, BASE + 0x8000).is_none());
        assert!(MemoryImage::find(&memory, BASE + (MOST_STEPS + 1) * RESERVED_AT).is_none());
        assert!(MemoryImage::find(&memory, 0x1000).is_none());
    }
}
