//! Arrays of the probes that are mapped here.

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A mapped array, as words.
#[derive(Debug)]
pub(super) struct MappedWords {
    base: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread.
unsafe impl Send for MappedWords {}

impl MappedWords {
    /// Maps an array of so many words.
    pub(super) fn map(file: impl AsFd, count: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap(std::ptr::null_mut(), bytes(count), access, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { base, count })
    }

    /// All of them.
    pub(super) fn all(&self) -> &[AtomicU64] {
        // SAFETY: mapped as long as `self` lives, aligned to a page, and only ever changed as whole
        // words here and as whole bytes by probes.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }
}

impl Drop for MappedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `map`, of that length, which nothing borrows any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), bytes(self.count)) };
        // Fails for a wrong address or length only.
        unmapped.ok();
    }
}

fn bytes(words: usize) -> usize {
    (words * 8).next_multiple_of(rustix::param::page_size())
}
