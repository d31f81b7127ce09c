//! Memory of a live process, read through `/proc/PID/mem`. Not by `process_vm_readv`: that call may
//! be held up for ever by a userfaultfd of the target, whereas `access_remote_vm` behind this file
//! never waits for one (mm/memory.c: no `FAULT_FLAG_ALLOW_RETRY`).
//!
//! A fault in a mapped file does wait for that file's server, for ever if it is a FUSE server that
//! does not answer, and the addresses come from the target. So only memory no file system serves is
//! read: anonymous memory, memfds, the vDSO; and since a file can be mapped there between the look
//! and the read, by a thread that can be left behind (`guarded_io`).

use super::guarded_io::{IoPeer, wait_for};
use super::mapping::{anonymous_range, parse_fields};
use perfusion_model::backoff::Backoff;
use perfusion_unwind::TargetMemory;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Most bytes read from one `/proc/PID/maps`.
pub(super) const MAX_MAPS_BYTES: u64 = 32 << 20;
/// How long a reading of the maps holds, which takes about a millisecond of a process with a
/// thousand mappings. It says what is not to be read; what becomes a file's meanwhile is read by a
/// thread that can be left behind.
const HOLDS: Duration = Duration::from_secs(10);
/// How soon an address it does not cover makes for another one. That time doubles while readings do
/// not help.
const SOONEST: Duration = Duration::from_millis(100);
const LATEST: Duration = Duration::from_secs(1);
/// Most addresses remembered that a reading was made for in vain: none is made again for the same
/// word that is no pointer.
const MAX_NOWHERE: usize = 16;

/// An open `/proc/PID/mem`: it stays with the address space it was opened on, so after exec or exit
/// reads give nothing.
#[derive(Debug)]
pub struct ProcessMemory {
    shared: Arc<OpenMemory>,
}

/// What the threads share that may read it.
#[derive(Debug)]
struct OpenMemory {
    pid: u32,
    memory: File,
    safe: Mutex<ReadableRanges>,
}

/// Which addresses may be read, as of some moment.
#[derive(Debug)]
struct ReadableRanges {
    /// The same address space's maps.
    maps: File,
    /// Device (major, minor) of memfds and other shared anonymous memory: of the kernel's own,
    /// nowhere mounted tmpfs.
    shared: (u32, u32),
    /// Sorted, adjacent ones joined.
    ranges: Vec<Range<u64>>,
    read: Option<Instant>,
    soonest: Backoff,
    /// Addresses for which there was a reading, in vain.
    nowhere: Vec<u64>,
}

impl ProcessMemory {
    /// Opens the memory of `pid`, if it is still the process that started at `start_ticks`.
    #[must_use]
    pub fn open(pid: u32, start_ticks: u64) -> Option<Self> {
        let directory = super::in_common(pid);
        let memory = File::open(format!("{directory}/mem")).ok()?;
        let maps = File::open(format!("{directory}/maps")).ok()?;
        // Checked after opening: from here on the files cannot become another process's.
        if super::start_ticks(pid) != Some(start_ticks) {
            return None;
        }
        let own =
            rustix::fs::memfd_create("perfusion-device", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
        let device = File::from(own).metadata().ok()?.dev();
        let shared = (rustix::fs::major(device), rustix::fs::minor(device));
        let safe = ReadableRanges {
            maps,
            shared,
            ranges: Vec::new(),
            read: None,
            soonest: Backoff::new(SOONEST, LATEST),
            nowhere: Vec::new(),
        };
        Some(Self { shared: Arc::new(OpenMemory { pid, memory, safe: Mutex::new(safe) }) })
    }

    /// Does `work` with it on a thread that can be left behind, which costs more than a reading:
    /// what needs several is best done at once. `None` when the process holds that up.
    pub fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn TargetMemory) -> T + Send + 'static,
    ) -> Option<T> {
        let shared = Arc::clone(&self.shared);
        wait_for(IoPeer::Process(self.shared.pid), move || work(&*shared))
    }
}

impl ReadableRanges {
    /// Bytes that may be read from `address` on.
    fn length(&mut self, address: u64) -> u64 {
        let now = Instant::now();
        let age = self.read.map(|at| now.duration_since(at));
        let mut known = self.known(address);
        let due = if known != 0 || self.nowhere.contains(&address) {
            HOLDS
        } else {
            self.soonest.delay()
        };
        if age.is_none_or(|age| age >= due) {
            self.refresh();
            self.read = Some(now);
            known = self.known(address);
            if known != 0 {
                self.soonest.reset();
            } else {
                self.soonest.failed();
                if self.nowhere.len() >= MAX_NOWHERE {
                    self.nowhere.clear();
                }
                self.nowhere.push(address);
            }
        }
        known
    }

    fn known(&self, address: u64) -> u64 {
        let after = self.ranges.partition_point(|r| r.start <= address);
        let range = after.checked_sub(1).and_then(|i| self.ranges.get(i));
        range.map_or(0, |r| r.end.saturating_sub(address))
    }

    fn refresh(&mut self) {
        self.ranges.clear();
        let mut text = Vec::new();
        let read = self
            .maps
            .seek(SeekFrom::Start(0))
            .and_then(|_| (&self.maps).take(MAX_MAPS_BYTES).read_to_end(&mut text));
        if read.is_err() {
            return;
        }
        for line in text.split(|&b| b == b'\n') {
            let line = String::from_utf8_lossy(line);
            let Some(range) = parse_fields(&line).and_then(|f| anonymous_range(&f, self.shared))
            else {
                continue;
            };
            match self.ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => self.ranges.push(range),
            }
        }
    }
}

impl TargetMemory for OpenMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> usize {
        // Locked by a thread that was left behind while it looked at the maps.
        let Ok(mut safe) = self.safe.try_lock() else { return 0 };
        let length = usize::try_from(safe.length(address)).unwrap_or(usize::MAX).min(into.len());
        drop(safe);
        match into.get_mut(..length) {
            // Beyond i64 the kernel refuses the offset, and the read is 0 like any other that
            // fails.
            Some(into) if length > 0 => self.memory.read_at(into, address).unwrap_or(0),
            _ => 0,
        }
    }
}

impl TargetMemory for ProcessMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> usize {
        let length = into.len();
        let read = self.with(move |memory| {
            let mut bytes = vec![0; length];
            let read = memory.read(address, &mut bytes);
            bytes.truncate(read);
            bytes
        });
        let bytes = read.unwrap_or_default();
        into.iter_mut().zip(&bytes).for_each(|(to, from)| *to = *from);
        bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> ProcessMemory {
        let pid = std::process::id();
        ProcessMemory::open(pid, crate::process::start_ticks(pid).unwrap()).unwrap()
    }

    #[test]
    fn own_memory_is_read_and_wild_addresses_are_not() {
        let value = 0x1122_3344_5566_7788u64;
        let memory = own();
        let mut bytes = [0u8; 8];
        let address = u64::try_from(std::ptr::from_ref(&value).addr()).unwrap();
        assert_eq!(memory.read(address, &mut bytes), 8);
        assert_eq!(u64::from_le_bytes(bytes), value);
        assert_eq!(memory.read(8, &mut bytes), 0);
        assert_eq!(memory.read(u64::MAX - 3, &mut bytes), 0);
        assert!(
            ProcessMemory::open(std::process::id(), 1).is_none(),
            "another process with this pid"
        );
    }

    #[test]
    fn the_maps_are_not_read_again_and_again_for_the_same_wild_address() {
        let memory = own();
        let read_for = |address: u64, later: Duration| {
            let mut safe = memory.shared.safe.lock().unwrap();
            let then = Instant::now().checked_sub(later).unwrap();
            safe.read = safe.read.map(|_| then);
            assert_eq!(safe.length(address), 0);
            safe.read != Some(then)
        };
        assert!(read_for(8, LATEST), "the first of all");
        assert!(!read_for(8, LATEST));
        assert!(read_for(16, LATEST) && !read_for(16, LATEST));
        assert!(!read_for(24, Duration::ZERO), "so soon");
        assert!(read_for(8, HOLDS), "it may be there by now");
        for address in (32..).step_by(8).take(MAX_NOWHERE) {
            assert!(read_for(address, LATEST));
        }
        assert!(read_for(8, LATEST), "that is forgotten");
    }

    #[test]
    fn memory_of_a_mapped_file_is_not_read() {
        let code = own as fn() -> ProcessMemory as usize as u64;
        assert_eq!(own().read(code, &mut [0u8; 8]), 0);
    }
}
