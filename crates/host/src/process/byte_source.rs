//! Where the bytes of an image come from.

use super::guarded_io::ForeignFile;
use std::os::unix::fs::MetadataExt as _;

/// Where an image's bytes are.
#[derive(Debug)]
pub(super) enum ByteSource {
    File(ForeignFile),
    Bytes(Vec<u8>),
    /// Closed to make room.
    Closed,
}

impl ByteSource {
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> usize {
        match self {
            Self::File(file) => {
                let mut done = 0;
                while let Some(rest) = into.get_mut(done..).filter(|r| !r.is_empty()) {
                    match file.read_at(rest, offset.saturating_add(done as u64)) {
                        Ok(0) => break,
                        Ok(n) => done += n,
                        Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                        Err(_) => break,
                    }
                }
                done
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
