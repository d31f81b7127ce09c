//! Symbols that are not in the mapped file: separate debug files, and the compressed tables that
//! distributions leave in stripped files (MiniDebugInfo).
//!
//! A separate file is found where gdb finds it: by build id below `/usr/lib/debug/.build-id`, and
//! by the name in `.gnu_debuglink` beside the mapped file, in `.debug` there, and below
//! `/usr/lib/debug`. It is looked for in our root and in that of a process that maps the file. Its
//! build id must be the mapped file's. Without build ids, its checksum must be the one in
//! `.gnu_debuglink`.
//!
//! Whoever has a mount namespace of its own can map a file that others map too, and put a forged
//! debug file beside it. So a file in a process's root must be on the mapped file's device, and
//! belong to root or to the mapped file's owner.

use crate::elf_sections::{SHT_NOTE, SHT_SYMTAB, Sections};
use crate::native::NativeError;
use crate::native_aot::AotMethods;
use flate2::Crc;
use lzma_rust2::XzReader;
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_host::process::{find_build_id, open_regular};
use perfusion_model::text::hex;
use std::collections::HashSet;
use std::fs::Metadata;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

/// Where distributions put debug files.
const SYSTEM_DIRECTORY: &str = "/usr/lib/debug";
/// Longest file whose checksum is computed, which is done only where there is no build id.
const MAX_CHECKSUM_BYTES: u64 = 256 << 20;
/// Longest `.gnu_debuglink`: a file name and a checksum.
const MAX_LINK_BYTES: u64 = 4096;
const MAX_NOTE_BYTES: u64 = 64 << 10;
/// Most bytes of compressed tables, of what they unpack to, and of memory that unpacking takes.
/// Distributions use a dictionary of 8 MiB.
const MAX_PACKED_BYTES: u64 = 16 << 20;
const MAX_UNPACKED_BYTES: u64 = 64 << 20;
const MAX_UNPACKING_KIB: u32 = 65 << 10;
/// Read at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// The file name and the checksum in `.gnu_debuglink` (gdb's manual, "Debugging Information in
/// Separate Files").
#[derive(Clone, Debug, PartialEq, Eq)]
struct DebugLink {
    name: String,
    checksum: u32,
}

impl DebugLink {
    fn of(file: &ForeignFile, sections: &Sections) -> Option<Self> {
        Self::parse(&sections.named(".gnu_debuglink")?.bytes(file, MAX_LINK_BYTES)?)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let length = bytes.iter().position(|byte| *byte == 0)?;
        let name = std::str::from_utf8(bytes.get(..length)?).ok()?;
        // A name, not a path: it is looked for in certain directories.
        if name.is_empty() || name.contains('/') || name == "." || name == ".." {
            return None;
        }
        let checksum = bytes.get((length + 1).next_multiple_of(4)..)?.first_chunk::<4>()?;
        Some(Self { name: name.to_owned(), checksum: u32::from_le_bytes(*checksum) })
    }
}

/// What a debug file is looked for by.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    /// The mapped file.
    pub(crate) file: &'a ForeignFile,
    pub(crate) sections: &'a Sections,
    /// Its path as its process saw it.
    pub(crate) path: &'a str,
    pub(crate) build_id: Option<&'a [u8]>,
    /// A process that maps it, or did.
    pub(crate) mapped_by: Option<u32>,
    /// Further directories of ours, each with `.build-id` in it.
    pub(crate) directories: &'a [PathBuf],
}

/// What became of a search.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The file, if there is one that fits.
    pub(crate) file: Option<ForeignFile>,
    /// Where it is.
    path: Option<PathBuf>,
    /// Files at the places that belong to another build, or to somebody who may not speak for the
    /// mapped file.
    pub(crate) refused: u64,
}

/// Where a candidate is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    /// Below this process's root; below ours for `None`.
    root: Option<u32>,
    path: PathBuf,
    /// It was found by name, so its checksum can stand for a build id.
    by_name: bool,
}

/// `.build-id/xx/rest.debug`.
#[must_use]
pub fn build_id_path(build_id: &[u8]) -> Option<PathBuf> {
    let (first, rest) = build_id.split_first().filter(|(_, rest)| !rest.is_empty())?;
    Some(PathBuf::from(format!(".build-id/{first:02x}/{}.debug", hex(rest))))
}

/// Looks for the separate debug file of a mapped file.
pub(crate) fn find(wanted: &Wanted<'_>) -> Found {
    let link = DebugLink::of(wanted.file, wanted.sections);
    let mut found = Found::default();
    let Ok(mapped) = wanted.file.metadata() else { return found };
    // One file may be at several places, and in both roots.
    let mut refused = HashSet::new();
    for candidate in candidates(wanted, link.as_ref()) {
        // Most places have none.
        let Ok(file) = open_regular(candidate.root, &candidate.path) else { continue };
        let Ok(meta) = file.metadata() else { continue };
        // `.gnu_debuglink` of a file that was never stripped may name that file.
        if (meta.dev(), meta.ino()) == (mapped.dev(), mapped.ino()) {
            continue;
        }
        let checksum = link.as_ref().filter(|_| candidate.by_name).map(|link| link.checksum);
        let may_speak = candidate.root.is_none() || is_of_same_origin(&mapped, &meta);
        if may_speak && fits(&file, &meta, wanted.build_id, checksum) {
            (found.file, found.path) = (Some(file), Some(candidate.path));
            break;
        }
        tracing::debug!(
            path = %candidate.path.display(),
            pid = ?candidate.root,
            "a debug file of another build, or of somebody else"
        );
        refused.insert((meta.dev(), meta.ino()));
    }
    found.refused = refused.len() as u64;
    found
}

fn candidates(wanted: &Wanted<'_>, link: Option<&DebugLink>) -> Vec<Candidate> {
    let mut all = Vec::new();
    let by_id = wanted.build_id.and_then(build_id_path);
    let roots = [None, wanted.mapped_by];
    let roots = || roots.into_iter().take(1 + usize::from(wanted.mapped_by.is_some()));
    if let Some(by_id) = &by_id {
        for directory in wanted.directories {
            all.push(Candidate { root: None, path: directory.join(by_id), by_name: false });
        }
        for root in roots() {
            let path = Path::new(SYSTEM_DIRECTORY).join(by_id);
            all.push(Candidate { root, path, by_name: false });
        }
    }
    let path = wanted.path.strip_suffix(" (deleted)").unwrap_or(wanted.path);
    let directory = Path::new(path).parent().filter(|directory| directory.is_absolute());
    if let (Some(link), Some(directory)) = (link, directory) {
        let below = directory.strip_prefix("/").unwrap_or(directory);
        let places = [
            directory.join(&link.name),
            directory.join(".debug").join(&link.name),
            Path::new(SYSTEM_DIRECTORY).join(below).join(&link.name),
        ];
        // What the process sees comes first: the path is its.
        for root in roots().collect::<Vec<_>>().into_iter().rev() {
            for path in &places {
                all.push(Candidate { root, path: path.clone(), by_name: true });
            }
        }
    }
    all
}

/// Whether who could write the one could write the other.
fn is_of_same_origin(mapped: &Metadata, debug: &Metadata) -> bool {
    mapped.dev() == debug.dev() && (debug.uid() == 0 || debug.uid() == mapped.uid())
}

/// Whether a debug file is of the build that was mapped.
fn fits(
    file: &ForeignFile,
    meta: &Metadata,
    build_id: Option<&[u8]>,
    checksum: Option<u32>,
) -> bool {
    let Ok(sections) = Sections::read(file) else { return false };
    match (build_id, build_id_of(file, &sections)) {
        (Some(wanted), Some(found)) => found == wanted,
        _ => checksum.is_some() && checksum_of(file, meta.len()) == checksum,
    }
}

/// The build id in a file's notes.
pub(crate) fn build_id_of(file: &ForeignFile, sections: &Sections) -> Option<Vec<u8>> {
    let mut notes = sections.of_kind(SHT_NOTE);
    notes.find_map(|note| find_build_id(&note.bytes(file, MAX_NOTE_BYTES)?))
}

/// Where the symbols of a file are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SymbolSource {
    /// In its own symbol table.
    Own,
    /// In this separate file.
    DebugFile(PathBuf),
    /// Packed in the file (`.gnu_debugdata`): those of functions, without the rest.
    Packed,
    /// Nowhere on this host: there are only the names that it exports, if any.
    Exports,
}

/// What is known of a file's symbols.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolReport {
    /// The GNU build id, by which servers are asked.
    pub build_id: Option<Vec<u8>>,
    /// Where the symbols are.
    pub source: SymbolSource,
    /// Debug files that belong to another build.
    pub refused: u64,
    /// Methods that a NativeAOT program itself names.
    pub methods: usize,
}

/// Looks where the symbols of a file on this host are. `directories` have `.build-id` in them.
///
/// # Errors
/// When it cannot be read or is no ELF file.
pub fn report(path: &Path, directories: &[PathBuf]) -> Result<SymbolReport, NativeError> {
    let path = path.canonicalize()?;
    let file = open_regular(None, &path)?;
    let sections = Sections::read(&file)?;
    let build_id = build_id_of(&file, &sections);
    let (mut source, mut refused) = (SymbolSource::Own, 0);
    if !sections.has(SHT_SYMTAB) {
        let found = find(&Wanted {
            file: &file,
            sections: &sections,
            path: &path.to_string_lossy(),
            build_id: build_id.as_deref(),
            mapped_by: None,
            directories,
        });
        refused = found.refused;
        source = match found.path {
            Some(path) => SymbolSource::DebugFile(path),
            None if sections.named(".gnu_debugdata").is_some() => SymbolSource::Packed,
            None => SymbolSource::Exports,
        };
    }
    let methods = AotMethods::read(&file, &sections).map_or(0, |methods| methods.count());
    Ok(SymbolReport { build_id, source, refused, methods })
}

/// The debug file of a build, which some host has, in these directories or where distributions put
/// it.
#[must_use]
pub fn by_build_id(build_id: &[u8], directories: &[PathBuf]) -> Option<PathBuf> {
    let by_id = build_id_path(build_id)?;
    let system = PathBuf::from(SYSTEM_DIRECTORY);
    let mut all = directories.iter().chain([&system]).map(|directory| directory.join(&by_id));
    all.find(|path| {
        let file = open_regular(None, path);
        file.is_ok_and(|file| check(&file, build_id).is_ok())
    })
}

/// Whether a file, such as one that a server sent, has symbols and this build id.
///
/// # Errors
/// Why it is not what was asked for.
pub fn check(file: &ForeignFile, build_id: &[u8]) -> Result<(), &'static str> {
    let sections = Sections::read(file).map_err(|_| "it is no ELF file")?;
    if build_id_of(file, &sections).as_deref() != Some(build_id) {
        return Err("it has another build id");
    }
    if !sections.has(SHT_SYMTAB) {
        return Err("it has no symbol table");
    }
    Ok(())
}

/// CRC-32 of a whole file, `None` when it is too long or cannot be read.
fn checksum_of(file: &ForeignFile, length: u64) -> Option<u32> {
    if length > MAX_CHECKSUM_BYTES {
        return None;
    }
    let (mut crc, mut at, mut chunk) = (Crc::new(), 0, vec![0; CHUNK_BYTES]);
    while at < length {
        let read = file.read_at(&mut chunk, at).ok().filter(|read| *read > 0)?;
        crc.update(chunk.get(..read)?);
        at += read as u64;
    }
    Some(crc.sum())
}

/// The ELF file in `.gnu_debugdata`, which holds the symbols of functions that are not exported.
pub(crate) fn unpack(file: &ForeignFile, sections: &Sections) -> Option<Vec<u8>> {
    let packed = sections.named(".gnu_debugdata")?.bytes(file, MAX_PACKED_BYTES)?;
    // Hostile input to a decoder: a bug of it must not end the program.
    catch_unwind(|| {
        let mut unpacked = Vec::new();
        let reader = XzReader::new_mem_limit(packed.as_slice(), false, MAX_UNPACKING_KIB);
        reader.take(MAX_UNPACKED_BYTES + 1).read_to_end(&mut unpacked).ok()?;
        (unpacked.len() as u64 <= MAX_UNPACKED_BYTES).then_some(unpacked)
    })
    .ok()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::{DebugLink, build_id_path, is_of_same_origin};
    use std::path::PathBuf;

    #[test]
    fn a_link_is_a_name_and_a_checksum() {
        let parse = |bytes: &[u8]| DebugLink::parse(bytes).map(|link| (link.name, link.checksum));
        assert_eq!(
            parse(b"Work.dbg\0\0\0\0\x01\x02\x03\x04"),
            Some(("Work.dbg".to_owned(), 0x0403_0201))
        );
        assert_eq!(parse(b"abc\0\x01\x00\x00\x00"), Some(("abc".to_owned(), 1)));
        let wrong: [&[u8]; 7] = [
            b"",
            b"abc",
            b"abc\0",
            b"\0\0\0\0\x01\x00\x00\x00",
            b"/etc/x\0\0\x01\x00\x00\x00",
            b"..\0\0\x01\x00\x00\x00",
            b"a\xffc\0\x01\x00\x00\x00",
        ];
        for bytes in wrong {
            assert_eq!(parse(bytes), None, "{bytes:?}");
        }
    }

    #[test]
    fn build_ids_have_their_places() {
        assert_eq!(
            build_id_path(&[0xab, 0xcd, 0x01]),
            Some(PathBuf::from(".build-id/ab/cd01.debug"))
        );
        assert_eq!((build_id_path(&[0xab]), build_id_path(&[])), (None, None));
    }

    #[test]
    fn a_file_on_another_device_does_not_speak_for_a_mapped_one() {
        let scratch = tempfile::tempfile().unwrap().metadata().unwrap();
        let elsewhere = std::fs::metadata("/proc/self/status").unwrap();
        assert!(is_of_same_origin(&scratch, &scratch));
        assert!(!is_of_same_origin(&scratch, &elsewhere));
    }
}
