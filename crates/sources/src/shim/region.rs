//! One shim's memfd, opened and checked. It is read and written with `pread` and `pwrite` only,
//! never mapped: neither truncation nor holes nor concurrent rewriting by the process can do more
//! than change the bytes of an answer.

use perfusion_host::process::handle::{MapLine, ProcessHandle};
use profiler_protocol::consumer::RegionMemory;
use profiler_protocol::layout::{MAGIC, MAGIC_AT, OWNER_AT};
use rustix::fs::{
    FileType, FlockOperation, Mode, OFlags, SealFlags, fcntl_get_seals, flock, fstat, fstatfs,
    open, openat, readlinkat,
};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

/// Sizes that a region can have: its header, and room for the largest ring a shim makes with much
/// to spare.
const MIN_BYTES: u64 = 4096;
const MAX_BYTES: u64 = 256 << 20;
/// `TMPFS_MAGIC` of linux/magic.h; memfds live on the kernel's own tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Why something that looks like a region is not used.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A system call failed; `SRCH` and `NOENT` mean that the mapping or the process is gone.
    #[error("process {pid}, mapping at {start:#x}: {step}: {source}")]
    System {
        /// The process.
        pid: u32,
        /// Start of the mapping.
        start: u64,
        /// What was tried.
        step: &'static str,
        /// The system's answer.
        source: Errno,
    },
    /// It is not a memfd of a shim.
    #[error("process {pid}, mapping at {start:#x}: expected {expected}, found {found}")]
    NotARegion {
        /// The process.
        pid: u32,
        /// Start of the mapping.
        start: u64,
        /// What a region has.
        expected: &'static str,
        /// What this has.
        found: String,
    },
}

impl RegionError {
    /// True when this process may open no more files (EMFILE, ENFILE): it may well be a region.
    pub(super) fn is_lack_of_files(&self) -> bool {
        matches!(self, Self::System { source: Errno::MFILE | Errno::NFILE, .. })
    }
}

/// Identity of a memfd while it exists: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionKey {
    device: u64,
    inode: u64,
}

/// An open region.
#[derive(Debug)]
pub struct ShimRegion {
    file: File,
    key: RegionKey,
    bytes: u64,
}

impl ShimRegion {
    /// Opens the mapping that `line` shows, after checking by a descriptor that gives no access
    /// (O_PATH) that it is what it should be, a memfd called `name`: opening a device or another
    /// service's memory for writing must not be possible by a trick with the map.
    pub fn open(
        target: &ProcessHandle,
        line: &MapLine,
        name: &'static str,
    ) -> Result<Self, RegionError> {
        let (pid, start) = (target.pid(), line.start);
        let system = |step| move |source| RegionError::System { pid, start, step, source };
        let refuse = |expected, found| RegionError::NotARegion { pid, start, expected, found };

        let link = format!("map_files/{start:x}-{:x}", line.end);
        let path = openat(target.directory(), link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(system("open map_files (CAP_CHECKPOINT_RESTORE)"))?;
        let status = fstat(&path).map_err(system("stat"))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(refuse("a regular file", format!("mode {:#o}", status.st_mode)));
        }
        let magic = u64::try_from(fstatfs(&path).map_err(system("statfs"))?.f_type).unwrap_or(0);
        if magic != TMPFS_MAGIC {
            return Err(refuse("a file on tmpfs", format!("file system {magic:#x}")));
        }
        let own = format!("/proc/self/fd/{}", path.as_raw_fd());
        let found = readlinkat(rustix::fs::CWD, &own, Vec::new()).map_err(system("readlink"))?;
        if found.to_bytes() != name.as_bytes() {
            return Err(refuse(name, perfusion_model::text::printable(&found.to_string_lossy())));
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = File::from(open(&own, flags, Mode::empty()).map_err(system("open"))?);
        // Seals exist on memfds alone: without them the file could shrink under a shim of ours that
        // trusts its size.
        let needed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        let seals = fcntl_get_seals(&file).map_err(system("F_GET_SEALS"))?;
        if !seals.contains(needed) {
            return Err(refuse("seals SHRINK, GROW and SEAL", format!("{seals:?}")));
        }
        let bytes = u64::try_from(fstat(&file).map_err(system("stat"))?.st_size).unwrap_or(0);
        if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) {
            return Err(refuse("4 KiB to 256 MiB", format!("{bytes} bytes")));
        }
        Ok(Self { file, key: RegionKey { device: status.st_dev, inode: status.st_ino }, bytes })
    }

    /// Any file.
    #[cfg(test)]
    pub(super) fn for_test(file: File) -> Self {
        let status = fstat(&file).unwrap();
        let bytes = u64::try_from(status.st_size).unwrap();
        Self { file, key: RegionKey { device: status.st_dev, inode: status.st_ino }, bytes }
    }

    pub fn key(&self) -> RegionKey {
        self.key
    }

    /// Size, which its seals keep as it is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes the region for this recorder alone. The lock goes with the descriptor: when this
    /// process dies, however it does, the next one can have it.
    pub fn lock(&self) -> bool {
        flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }

    /// The 8-byte word at `offset`; `None` when it cannot be read.
    pub fn word(&self, offset: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, offset).ok()?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Whom the region was made for: the number its shim was given when it was loaded, 0 for nobody
    /// in particular; `None` before the shim has finished it.
    pub fn owner(&self) -> Option<u64> {
        self.word(MAGIC_AT).filter(|&magic| magic == MAGIC)?;
        self.word(OWNER_AT)
    }
}

impl RegionMemory for ShimRegion {
    type Error = std::io::Error;

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }
}
