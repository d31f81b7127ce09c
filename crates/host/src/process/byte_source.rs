//! Where the bytes of an image come from.

use super::guarded_io::ForeignFile;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

/// Where an image's bytes are.
#[derive(Debug)]
pub(super) enum ByteSource {
    File(ForeignFile),
    Bytes(Vec<u8>),
    /// The memory of a process from an address on, where the image is mapped. Only for a thread
    /// that can be abandoned: these reads wait for the process.
    Memory(File, u64),
    /// Closed to make room.
    Closed,
}

impl ByteSource {
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> usize {
        match self {
            Self::File(file) => read_all(|rest, at| file.read_at(rest, at), offset, into),
            Self::Memory(file, base) => {
                let Some(address) = base.checked_add(offset) else { return 0 };
                read_all(|rest, at| file.read_at(rest, at), address, into)
            }
            Self::Bytes(bytes) => {
                let there =
                    usize::try_from(offset).ok().and_then(|o| bytes.get(o..)).unwrap_or_default();
                let length = there.len().min(into.len());
                if let (Some(to), Some(from)) = (into.get_mut(..length), there.get(..length)) {
                    to.copy_from_slice(from);
                }
                length
            }
            Self::Closed => 0,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(self, Self::Closed)
    }

    /// Whether it has `length` bytes at `offset`.
    pub(super) fn has(&self, offset: u64, length: u64) -> bool {
        let size = match self {
            Self::File(file) => file.metadata().map_or(0, |meta| meta.size()),
            Self::Bytes(bytes) => bytes.len() as u64,
            // What is not there shows when it is read.
            Self::Memory(_, base) => u64::MAX - base,
            Self::Closed => 0,
        };
        offset.checked_add(length).is_some_and(|end| end <= size)
    }

    /// Exactly `length` bytes at `offset`; `None` when they are not there or more than `cap`.
    pub(super) fn bytes(&self, offset: u64, length: u64, cap: u64) -> Option<Vec<u8>> {
        if !self.has(offset, length) || length > cap {
            return None;
        }
        let mut bytes = vec![0u8; usize::try_from(length).ok()?];
        (self.read(offset, &mut bytes) == bytes.len()).then_some(bytes)
    }
}

/// Reads until all is there, the end, or an error. Returns how much is there.
fn read_all(
    read: impl Fn(&mut [u8], u64) -> io::Result<usize>,
    offset: u64,
    into: &mut [u8],
) -> usize {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|r| !r.is_empty()) {
        match read(rest, offset.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    done
}
