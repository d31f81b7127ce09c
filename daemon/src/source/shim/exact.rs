//! The table of a process in exact mode (`profiler_protocol::exact`), found and opened like a region: `pread` and `pwrite`, never mapped.

use super::region::Region;
use profiler_protocol::consumer::Memory as _;
use profiler_protocol::exact::{MAGIC, TABLE_BYTES, head, reader};
use std::io;

/// An open table.
#[derive(Debug)]
pub struct Opened(Region);

impl Opened {
    /// The table in `region`, if it was made for `owner` by the process that calls itself `pid`; `None` also before the shim has finished it.
    pub(super) fn new(region: Region, owner: u64, pid: u64) -> Option<Self> {
        let word = |at| region.word(byte(at));
        let ours = word(head::MAGIC) == Some(MAGIC)
            && region.bytes() >= u64::try_from(TABLE_BYTES).unwrap_or(u64::MAX)
            && word(head::OWNER) == Some(owner)
            && word(head::PID) == Some(pid);
        ours.then_some(Self(region))
    }

    /// Tells the process, which waits for that, that it may begin.
    pub(crate) fn accept(&self) -> bool {
        self.set(head::READER, reader::OPENED).is_ok()
    }

    /// Tells it that it is not to be counted, and need not wait.
    pub(crate) fn decline(&self) {
        // One that cannot be told waits in vain, as for a recorder that is gone.
        self.set(head::READER, reader::DECLINED).ok();
    }

    /// Whether it was told so.
    pub(crate) fn is_declined(&self) -> bool {
        self.word(head::READER).is_ok_and(|said| said == reader::DECLINED)
    }

    /// Reads from word `at` on.
    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_at(byte(at), bytes)
    }

    /// One word.
    pub(crate) fn word(&self, at: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a word.
    pub(crate) fn set(&self, at: usize, value: u64) -> io::Result<()> {
        self.0.write_at(byte(at), &value.to_le_bytes())
    }
}

fn byte(word: usize) -> u64 {
    u64::try_from(word).unwrap_or(u64::MAX).saturating_mul(8)
}
