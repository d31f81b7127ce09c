//! The file that is mapped at an address of a process, as code or as data, and files beside it.
//! Assemblies without machine code are mapped as data, and so are in no list of code.

use super::guarded_io::{ForeignFile, IoPeer, wait_for};
use super::images::{beneath, open_mapped, readable};
use super::mapping::{Mapping, MappingKind, parse_fields};
use super::proc_maps::maps_text;
use rustix::fs::FileType;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;

/// A file, open, and where in it the address is.
#[derive(Debug)]
pub struct MappedFile {
    /// The file.
    pub file: ForeignFile,
    /// Its path below the process's root.
    pub path: String,
    /// What is mapped at the address begins at this offset.
    pub offset: u64,
}

/// What tells two files apart, and a file from what it was before it was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileVersion {
    device: u64,
    inode: u64,
    ctime: (i64, i64),
    size: u64,
    /// Where in the file the part begins that is meant.
    offset: u64,
}

impl MappedFile {
    /// The file that `pid` has mapped at `address`; `None` when that is no file, or cannot be
    /// opened. Reads the list of mappings.
    #[must_use]
    pub fn at(pid: u32, address: u64) -> Option<Self> {
        let text = maps_text(pid).ok()?;
        let line = text.split(|&byte| byte == b'\n').find_map(|line| {
            let line = String::from_utf8_lossy(line);
            let covers = parse_fields(&line).is_some_and(|fields| fields.range.contains(&address));
            covers.then_some(line)
        })?;
        let fields = parse_fields(&line)?;
        let path = fields.path.replace("\\012", "\n");
        if fields.inode == 0 || !path.starts_with('/') {
            return None;
        }
        let mapping = Mapping {
            range: fields.range,
            file_offset: fields.file_offset,
            device: fields.device,
            inode: fields.inode,
            path: path.as_str().into(),
            region: MappingKind::File,
        };
        let offset = mapping.file_offset_of(address);
        let file = wait_for(IoPeer::Process(pid), move || {
            ForeignFile::opened(open_mapped(pid, &mapping).ok()?).ok()
        });
        Some(Self { file: file??, path, offset })
    }
}

/// Opens a regular file by its path beneath the root of `pid`; no link is followed.
#[must_use]
pub fn open_beneath(pid: u32, path: &str) -> Option<ForeignFile> {
    let path = path.to_owned();
    let opened = wait_for(IoPeer::Process(pid), move || {
        let handle = beneath(&format!("{}/root", super::in_common(pid)), &path).ok()?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&handle).ok()?.st_mode);
        let file = readable(&handle).ok().filter(|_| kind.is_file())?;
        ForeignFile::opened(file).ok()
    });
    opened.flatten()
}

impl FileVersion {
    /// Of an open file.
    #[must_use]
    pub fn of(file: &ForeignFile) -> Option<Self> {
        let meta = file.metadata().ok()?;
        Some(Self {
            device: meta.dev(),
            inode: meta.ino(),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            size: meta.len(),
            offset: 0,
        })
    }

    /// Of the part of it that begins at `offset`.
    #[must_use]
    pub fn part(self, offset: u64) -> Self {
        Self { offset, ..self }
    }
}

/// All of a file, if it has at most so many bytes.
#[must_use]
pub fn read_whole(file: &ForeignFile, most_bytes: u64) -> Option<Vec<u8>> {
    let size = file.metadata().ok()?.len();
    let mut bytes = vec![0; usize::try_from(size).ok().filter(|_| size <= most_bytes)?];
    match file.read_exact_at(&mut bytes, 0) {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => None,
        read => read.ok().map(|()| bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::{FileVersion, MappedFile, open_beneath, read_whole};
    use std::io::Write as _;

    #[test]
    fn a_file_is_found_by_an_address_in_its_data_and_one_beside_it_by_its_path() {
        let own = std::process::id();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let exe = std::fs::read_link("/proc/self/exe").unwrap();
        let of_exe = |line: &&str| line.ends_with(exe.to_str().unwrap());
        // Its first mapping is read-only data.
        let line = maps.lines().find(of_exe).unwrap();
        assert!(line.contains(" r--p "), "{line}");
        let start = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        let found = MappedFile::at(own, start + 0x10).unwrap();
        assert_eq!((found.path.as_str(), found.offset), (exe.to_str().unwrap(), 0x10));
        let on_stack = 5u8;
        assert!(MappedFile::at(own, (&raw const on_stack).addr() as u64).is_none());

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap().join("a");
        std::fs::File::create(&path).unwrap().write_all(b"content").unwrap();
        let file = open_beneath(own, path.to_str().unwrap()).unwrap();
        assert_eq!(read_whole(&file, 7).as_deref(), Some(&b"content"[..]));
        assert_eq!(read_whole(&file, 6), None, "longer than is read");
        let before = FileVersion::of(&file).unwrap();
        std::fs::write(&path, "changed, too").unwrap();
        assert_ne!(FileVersion::of(&file).unwrap(), before);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open_beneath(own, link.to_str().unwrap()).is_none());
        assert!(open_beneath(own, folder.path().to_str().unwrap()).is_none(), "a directory");
    }
}
