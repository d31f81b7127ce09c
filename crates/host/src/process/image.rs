//! One file that is mapped as code, identified and read piece by piece. A target's file is never
//! mapped, for whoever may write it could truncate it under us; every size it states is checked
//! against the file and a cap.

use super::byte_source::ByteSource;
use super::elf::{MAX_NAMES_BYTES, elf_header, find_build_id, program_headers, section_headers};
use super::elf_unwind::load_unwind;
use super::guarded_io::ForeignFile;
use super::pe::{Pe, PeView};
use object::elf;
use object::endian::LittleEndian as LE;
use perfusion_unwind::eh_frame::{FdeRule, FileBytes, UnwindSections};
use perfusion_unwind::managed::ExceptionDirectory;
use perfusion_unwind::rule::RuleRefusal;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// Most bytes of notes that are read.
const MAX_NOTE_BYTES: u64 = 64 << 10;
/// Most assemblies that are known in one single-file program, and so many times one is looked for
/// that is not there.
const MAX_CARRIED: usize = 1024;
/// Most bytes of exception directories of carried assemblies that stay when another one is wanted.
const MAX_CARRIED_BYTES: usize = 16 << 20;
const MAX_SEARCHES: u8 = 64;

/// Why a mapped file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It could not be opened.
    #[error("pid {pid}: cannot open mapped file {path}: {source}")]
    Open {
        /// Process that maps it.
        pid: u32,
        /// Path as the process sees it.
        path: Arc<str>,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Something else is at its path now.
    #[error("pid {pid}: {path}: expected regular file with inode {expected}, found inode {found}")]
    Changed {
        /// Process that maps it.
        pid: u32,
        /// Path as the process sees it.
        path: Arc<str>,
        /// Inode of the mapping.
        expected: u64,
        /// Inode found, 0 when it is no regular file.
        found: u64,
    },
    /// As many are known as may be, and all of them stand in stacks.
    #[error("too many mapped files")]
    Full,
    /// The process has brought its share of them.
    #[error("pid {pid}: too many mapped files")]
    Share {
        /// Process that maps them.
        pid: u32,
    },
}

/// What makes two mappings the same file: never the build id, which anyone can forge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FileIdentity {
    device: u64,
    inode: u64,
    ctime: (i64, i64),
    mtime: (i64, i64),
    size: u64,
}

impl FileIdentity {
    pub(super) fn of(meta: &std::fs::Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            size: meta.size(),
        }
    }
}

impl FileBytes for ByteSource {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> usize {
        self.read(offset, into)
    }
}

/// One loadable segment: file offsets to addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LoadSegment {
    offset: u64,
    size: u64,
    address: u64,
    executable: bool,
}

/// What kind of file it is.
#[derive(Debug)]
enum ImageFormat {
    /// ELF of this machine.
    Elf {
        segments: Vec<LoadSegment>,
        /// Address of the first instruction of a process.
        entry: u64,
        unwind: Option<Arc<UnwindSections>>,
        /// Assemblies behind its segments, those that were needed.
        carried: Vec<Pe>,
        /// Times that one was looked for and not found.
        searches: u8,
    },
    /// PE of this machine.
    Pe(Pe),
    /// Neither, or of another machine.
    Other,
}

/// A mapped file.
#[derive(Debug)]
pub struct ExecutableImage {
    /// Path in the mount namespace of the first process it was seen in; `[vdso]` for the vDSO.
    pub path: Arc<str>,
    /// GNU build id, at most 64 bytes; names the file to the outside only.
    pub build_id: Option<Vec<u8>>,
    /// Device (major, minor) as the mapping states it.
    pub device: (u32, u32),
    /// Inode.
    pub inode: u64,
    /// What its file was when it was parsed; `None` for the vDSO.
    identity: Option<FileIdentity>,
    source: ByteSource,
    format: ImageFormat,
}

impl ExecutableImage {
    /// The open file, for reading by others; `None` for the vDSO and when it was closed to bound
    /// the number of open files.
    #[must_use]
    pub fn file(&self) -> Option<&ForeignFile> {
        match &self.source {
            ByteSource::File(file) => Some(file),
            _ => None,
        }
    }

    /// True when its file was closed to make room; resolving a mapping of it opens it again.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.source.is_closed()
    }

    /// The whole image where it is held in memory: the vDSO.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.source {
            ByteSource::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// True for an executable that was compiled with NativeAOT, by the section of its managed code.
    /// Reads the file's section headers.
    #[must_use]
    pub fn is_native_aot(&self) -> bool {
        let Some(header) = elf_header(&self.source) else { return false };
        let names = || {
            let sections = section_headers(&self.source, &header)?;
            let names = sections.get(usize::from(header.e_shstrndx.get(LE)))?;
            let bytes = self.source.bytes(
                names.sh_offset.get(LE),
                names.sh_size.get(LE),
                MAX_NAMES_BYTES,
            )?;
            let of = |section: &elf::SectionHeader64<LE>| {
                let at = usize::try_from(section.sh_name.get(LE)).ok()?;
                bytes.get(at..)?.split(|byte| *byte == 0).next().map(<[u8]>::to_vec)
            };
            Some(sections.iter().filter_map(of).any(|name| name == b"__managedcode"))
        };
        names().unwrap_or(false)
    }

    /// The rule at an ELF virtual address, if a stack has needed its unwind sections and they were
    /// not evicted since.
    #[must_use]
    pub(crate) fn loaded_rule(&self, address: u64) -> Option<Result<FdeRule, RuleRefusal>> {
        match &self.format {
            ImageFormat::Elf { unwind: Some(unwind), .. } => {
                Some(unwind.rule_in(&self.source, address))
            }
            _ => None,
        }
    }

    /// Where the function at an ELF virtual address begins, under the same condition: no rule's
    /// program is run for it.
    #[must_use]
    pub fn loaded_function(&self, address: u64) -> Option<u64> {
        match &self.format {
            ImageFormat::Elf { unwind: Some(unwind), .. } => {
                unwind.function_in(&self.source, address).ok().map(|f| f.start)
            }
            _ => None,
        }
    }

    /// Where the data is that the unwind entry of an ELF virtual address names for its language
    /// (LSDA), under the same condition.
    #[must_use]
    pub fn loaded_language_data(&self, address: u64) -> Option<u64> {
        match &self.format {
            ImageFormat::Elf { unwind: Some(unwind), .. } => {
                unwind.language_data_in(&self.source, address)
            }
            _ => None,
        }
    }

    /// The rule at an ELF virtual address by the unwind sections of this image.
    pub(super) fn rule(
        &self,
        unwind: &UnwindSections,
        address: u64,
    ) -> Result<FdeRule, RuleRefusal> {
        unwind.rule_in(&self.source, address)
    }

    /// Reads from `offset` in the file; fewer bytes than asked where it ends.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> usize {
        self.source.read(offset, into)
    }

    /// ELF virtual address of the first byte of an executable mapping that begins at `offset` in
    /// the file, which is a page's.
    pub(super) fn mapped_address(&self, offset: u64) -> Option<u64> {
        const PAGE: u64 = 4096;
        let ImageFormat::Elf { segments, .. } = &self.format else { return None };
        let begins = |segment: &&LoadSegment| {
            segment.executable && segment.offset - segment.offset % PAGE == offset
        };
        let segment = segments.iter().find(begins)?;
        segment.address.checked_sub(segment.offset % PAGE)
    }

    pub(super) fn source(&self) -> &ByteSource {
        &self.source
    }

    /// ELF virtual address of the byte at `offset` in the file.
    #[must_use]
    pub fn elf_address(&self, offset: u64) -> Option<u64> {
        let ImageFormat::Elf { segments, .. } = &self.format else { return None };
        let within = |s: &&LoadSegment| offset.checked_sub(s.offset).is_some_and(|o| o < s.size);
        let best = segments.iter().filter(within).find(|s| s.executable);
        let segment = best.or_else(|| segments.iter().find(within))?;
        Some(offset - segment.offset + segment.address)
    }

    /// The PE image that holds the byte at `offset` in the file, and the byte's relative virtual
    /// address; in a single-file program only if its unwind data was asked for.
    #[must_use]
    pub fn pe_at(&self, offset: u64) -> Option<(u32, PeView<'_>)> {
        let all = match &self.format {
            ImageFormat::Pe(pe) => std::slice::from_ref(pe),
            ImageFormat::Elf { carried, .. } => carried,
            ImageFormat::Other => &[],
        };
        all.iter().find_map(|pe| Some((pe.rva(offset)?, PeView { source: &self.source, pe })))
    }

    /// Relative virtual address of the byte at `offset` in the file, as [`ExecutableImage::pe_at`].
    #[must_use]
    pub fn rva(&self, offset: u64) -> Option<u32> {
        self.pe_at(offset).map(|(rva, _)| rva)
    }

    /// Reads the code at `address` of an ELF file; fewer bytes than asked where its segment ends.
    /// What is mapped before a segment, from its page's beginning, is read as well.
    pub(crate) fn read_code(&self, address: u64, into: &mut [u8]) -> usize {
        const PAGE: u64 = 4096;
        let ImageFormat::Elf { segments, .. } = &self.format else { return 0 };
        let found = segments.iter().filter(|s| s.executable).find_map(|s| {
            let before = (s.address % PAGE).min(s.offset);
            let at = address.checked_sub(s.address - before)?;
            let left = s.size.saturating_add(before).checked_sub(at).filter(|left| *left > 0)?;
            Some(((s.offset - before).saturating_add(at), left))
        });
        let Some((offset, left)) = found else { return 0 };
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(into.len());
        into.get_mut(..most).map_or(0, |into| self.read_at(offset, into))
    }

    /// Address of the first instruction of a process that runs it.
    #[must_use]
    pub fn entry(&self) -> Option<u64> {
        match self.format {
            ImageFormat::Elf { entry, .. } if entry != 0 => Some(entry),
            _ => None,
        }
    }

    /// True when `address` is in the code a dynamic loader begins with. glibc's has no unwind data
    /// there, and nobody called it. Other libraries may state an entry point that means nothing.
    #[must_use]
    pub(crate) fn is_loaders_start(&self, address: u64) -> bool {
        // `_start` and `_dl_start_user` (sysdeps/x86_64/dl-machine.h, RTLD_START) have some 70
        // bytes.
        const BYTES: u64 = 96;
        let name = self.path.rsplit('/').next().unwrap_or_default();
        let ImageFormat::Elf { entry, .. } = self.format else { return false };
        name.starts_with("ld-")
            && entry != 0
            && address.checked_sub(entry).is_some_and(|after| after < BYTES)
    }

    /// Where its code is: addresses in its own numbering (ELF virtual or relative virtual), and the
    /// offset in the file.
    #[must_use]
    pub fn code(&self) -> Vec<(Range<u64>, u64)> {
        match &self.format {
            ImageFormat::Elf { segments, .. } => segments
                .iter()
                .filter(|s| s.executable && s.size > 0)
                .map(|s| (s.address..s.address.saturating_add(s.size), s.offset))
                .collect(),
            ImageFormat::Pe(pe) => pe.code().collect(),
            ImageFormat::Other => Vec::new(),
        }
    }

    /// True when its file is open and was neither written to, replaced nor removed since it was
    /// parsed. While it is open its inode cannot become another file's.
    pub(super) fn is_unchanged(&self) -> bool {
        let ByteSource::File(file) = &self.source else { return false };
        self.identity.is_some()
            && file.metadata().ok().map(|meta| FileIdentity::of(&meta)) == self.identity
    }

    /// True when its file is open and was written to since it was parsed. Unlike
    /// [`ExecutableImage::is_unchanged`] it does not ask for its name, which an upgrade of the
    /// package takes away from a file that is in use.
    pub fn is_overwritten(&self) -> bool {
        let (ByteSource::File(file), Some(then)) = (&self.source, &self.identity) else {
            return false;
        };
        let now = file.metadata().ok().map(|meta| FileIdentity::of(&meta));
        now.is_none_or(|now| (now.mtime, now.size) != (then.mtime, then.size))
    }

    fn parse(path: Arc<str>, device: (u32, u32), inode: u64, source: ByteSource) -> Self {
        let mut magic = [0u8; 4];
        source.read(0, &mut magic);
        let (format, build_id) = match magic {
            elf::ELFMAG => parse_elf(&source).unwrap_or((ImageFormat::Other, None)),
            [b'M', b'Z', ..] => {
                (Pe::parse(&source, 0).map_or(ImageFormat::Other, ImageFormat::Pe), None)
            }
            _ => (ImageFormat::Other, None),
        };
        let identity = match &source {
            ByteSource::File(file) => file.metadata().ok().map(|meta| FileIdentity::of(&meta)),
            _ => None,
        };
        Self { path, build_id, device, inode, identity, source, format }
    }

    /// The image in a file.
    pub(super) fn of_file(
        path: Arc<str>,
        device: (u32, u32),
        inode: u64,
        file: ForeignFile,
    ) -> Self {
        Self::parse(path, device, inode, ByteSource::File(file))
    }

    /// The vDSO.
    pub(super) fn of_vdso(bytes: Vec<u8>) -> Self {
        Self::parse("[vdso]".into(), (0, 0), 0, ByteSource::Bytes(bytes))
    }

    pub(super) fn identity(&self) -> Option<&FileIdentity> {
        self.identity.as_ref()
    }

    /// Device (major, minor) of its file as the file states it.
    pub(super) fn identity_device(&self) -> Option<(u32, u32)> {
        let device = self.identity.as_ref()?.device;
        Some((rustix::fs::major(device), rustix::fs::minor(device)))
    }

    /// Closes its file; what was read of it stays.
    pub(super) fn close(&mut self) {
        self.source = ByteSource::Closed;
    }

    /// Takes its file, which was closed, again.
    pub(super) fn reopen(&mut self, file: ForeignFile) {
        self.source = ByteSource::File(file);
    }

    /// Memory it takes without its unwind data.
    pub(super) fn described_bytes(&self) -> usize {
        let parts = match &self.format {
            ImageFormat::Elf { segments, .. } => segments.capacity() * size_of::<LoadSegment>(),
            ImageFormat::Pe(pe) => pe.described_bytes(),
            ImageFormat::Other => 0,
        };
        let held = if let ByteSource::Bytes(bytes) = &self.source { bytes.len() } else { 0 };
        size_of::<Self>()
            + self.path.len()
            + self.build_id.as_ref().map_or(0, Vec::len)
            + parts
            + held
    }

    /// The unwind sections of an ELF image, and whether they were loaded just now.
    pub(super) fn unwind(&mut self) -> Option<(Arc<UnwindSections>, bool)> {
        let closed = self.is_closed();
        let ImageFormat::Elf { unwind, .. } = &mut self.format else { return None };
        if let Some(unwind) = unwind {
            return Some((Arc::clone(unwind), false));
        }
        if closed {
            return None;
        }
        let loaded = Arc::new(
            load_unwind(&self.source).unwrap_or_else(|| UnwindSections::new(None, None, None)),
        );
        *unwind = Some(Arc::clone(&loaded));
        Some((loaded, true))
    }

    /// The exception directory of the PE image that holds the byte at `offset`, and whether it was
    /// loaded just now.
    pub(super) fn exceptions(&mut self, offset: u64) -> Option<(Arc<ExceptionDirectory>, bool)> {
        let pe = match &mut self.format {
            ImageFormat::Pe(pe) => pe,
            ImageFormat::Elf { segments, carried, searches, .. } => {
                let known = carried.iter().position(|pe| pe.rva(offset).is_some());
                let found = known.or_else(|| {
                    // The program's own parts come first.
                    let own = segments.iter().map(|s| s.offset.saturating_add(s.size)).max()?;
                    let may =
                        offset >= own && carried.len() < MAX_CARRIED && *searches < MAX_SEARCHES;
                    if !may || self.source.is_closed() {
                        return None;
                    }
                    match Pe::find(&self.source, offset, own) {
                        Some(pe) => carried.push(pe),
                        None => *searches += 1,
                    }
                    carried.iter().position(|pe| pe.rva(offset).is_some())
                });
                let found = found?;
                // All of them are this one image's, in favour of which others' are dropped: a file
                // may say that it carries hundreds.
                let held: usize = carried.iter().map(Pe::held_bytes).sum();
                if held > MAX_CARRIED_BYTES && carried.get(found)?.held_bytes() == 0 {
                    carried.iter_mut().for_each(Pe::release);
                }
                carried.get_mut(found)?
            }
            ImageFormat::Other => return None,
        };
        pe.directory(&self.source)
    }

    /// Memory its unwind data takes.
    pub(super) fn held_bytes(&self) -> usize {
        match &self.format {
            ImageFormat::Elf { unwind, carried, .. } => {
                let carried =
                    carried.iter().map(|pe| pe.described_bytes() + pe.held_bytes()).sum::<usize>();
                unwind.as_ref().map_or(0, |unwind| unwind.size_bytes()) + carried
            }
            ImageFormat::Pe(pe) => pe.held_bytes(),
            ImageFormat::Other => 0,
        }
    }

    /// Drops its unwind data.
    pub(super) fn release(&mut self) {
        match &mut self.format {
            ImageFormat::Elf { unwind, carried, .. } => {
                *unwind = None;
                carried.clear();
            }
            ImageFormat::Pe(pe) => pe.release(),
            ImageFormat::Other => {}
        }
    }
}

fn parse_elf(source: &ByteSource) -> Option<(ImageFormat, Option<Vec<u8>>)> {
    let header = elf_header(source)?;
    let mut segments = Vec::new();
    let mut build_id = None;
    for program in program_headers(source, &header)? {
        let (offset, size, address) =
            (program.p_offset.get(LE), program.p_filesz.get(LE), program.p_vaddr.get(LE));
        match program.p_type.get(LE) {
            elf::PT_LOAD => {
                // Addresses that wrap would turn one PC into two.
                address.checked_add(size)?;
                offset.checked_add(size)?;
                let executable = program.p_flags.get(LE) & elf::PF_X != 0;
                segments.push(LoadSegment { offset, size, address, executable });
            }
            elf::PT_NOTE if build_id.is_none() => {
                build_id =
                    source.bytes(offset, size, MAX_NOTE_BYTES).as_deref().and_then(find_build_id);
            }
            _ => {}
        }
    }
    let entry = header.e_entry.get(LE);
    Some((
        ImageFormat::Elf { segments, entry, unwind: None, carried: Vec::new(), searches: 0 },
        build_id,
    ))
}
