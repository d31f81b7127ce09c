//! Memory of a live process, read through `/proc/PID/mem`. Not by `process_vm_readv`: that call may be held up for ever by a
//! userfaultfd of the target, whereas `access_remote_vm` behind this file never waits for one (mm/memory.c: no
//! `FAULT_FLAG_ALLOW_RETRY`).

use crate::unwind::TargetMemory;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// An open `/proc/PID/mem`: it stays with the address space it was opened on, so after exec or exit reads give nothing.
#[derive(Debug)]
pub struct ProcessMemory(File);

impl ProcessMemory {
    /// Opens the memory of `pid`, if it is still the process that started at `start_ticks`.
    #[must_use]
    pub fn open(pid: u32, start_ticks: Option<u64>) -> Option<Self> {
        let file = File::open(format!("/proc/{pid}/mem")).ok()?;
        // Checked after opening: from here on the file cannot become another process's.
        let same = start_ticks.is_none() || super::start_ticks(pid) == start_ticks;
        same.then_some(Self(file))
    }
}

impl TargetMemory for ProcessMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> usize {
        // Beyond i64 the kernel refuses the offset, and the read is 0 like any other that fails.
        self.0.read_at(into, address).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_and_wild_addresses_are_not() {
        let value = 0x1122_3344_5566_7788u64;
        let pid = std::process::id();
        let memory = ProcessMemory::open(pid, crate::process::start_ticks(pid)).unwrap();
        let mut bytes = [0u8; 8];
        let address = u64::try_from(std::ptr::from_ref(&value).addr()).unwrap();
        assert_eq!(memory.read(address, &mut bytes), 8);
        assert_eq!(u64::from_le_bytes(bytes), value);
        assert_eq!(memory.read(8, &mut bytes), 0);
        assert_eq!(memory.read(u64::MAX - 3, &mut bytes), 0);
        assert!(ProcessMemory::open(pid, Some(1)).is_none(), "another process with this pid");
    }
}
