//! The table of a process in exact mode (`profiler_protocol::exact`), found and opened like a
//! region: `pread` and `pwrite`, never mapped.

use super::region::ShimRegion;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::{is_running, name, start_ticks};
use perfusion_model::event::MonotonicNs;
use profiler_protocol::consumer::RegionMemory as _;
use profiler_protocol::exact::{MAGIC, TABLE_BYTES, head, reader};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An open table.
#[derive(Debug)]
pub struct ExactTableRegion(ShimRegion);

impl ExactTableRegion {
    /// The table in `region`, if it was made for `owner` by the process that calls itself `pid`;
    /// `None` also before the shim has finished it.
    pub(super) fn new(region: ShimRegion, owner: u64, pid: u64) -> Option<Self> {
        let word = |at| region.word(byte(at));
        let ours = word(head::MAGIC) == Some(MAGIC)
            && region.bytes() >= u64::try_from(TABLE_BYTES).unwrap_or(u64::MAX)
            && word(head::OWNER) == Some(owner)
            && word(head::PID) == Some(pid);
        ours.then_some(Self(region))
    }

    /// Tells the process, which waits for that, that it may begin.
    pub fn accept(&self) -> bool {
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
    pub fn read(&self, at: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_at(byte(at), bytes)
    }

    /// One word.
    pub fn word(&self, at: usize) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a word.
    pub fn set(&self, at: usize, value: u64) -> io::Result<()> {
        self.0.write_at(byte(at), &value.to_le_bytes())
    }
}

/// Tables of a recording, at most.
pub const TABLES: usize = 256;
/// Tables of one process, at most: it has another for each exec.
pub const OF_ONE_PROCESS: usize = 16;
/// One process's table, open: it can be read when the process is long gone.
#[derive(Debug)]
pub struct ExactTable {
    /// The process.
    pub pid: u32,
    start_ticks: Option<u64>,
    /// What it is called.
    pub name: String,
    /// The table.
    pub table: ExactTableRegion,
    found: MonotonicNs,
    /// The process has become another program by exec.
    left_behind: bool,
}

impl ExactTable {
    /// Whether the process still counts in it.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.left_behind && is_running(self.pid, self.start_ticks)
    }
}

#[derive(Debug, Default)]
struct OpenTables {
    tables: Vec<ExactTable>,
    /// Processes for which there was no room.
    left_out: u64,
}

impl OpenTables {
    /// A table that nothing remembers is found at every look: it counts once.
    fn decline(&mut self, table: &ExactTableRegion) {
        self.left_out += u64::from(!table.is_declined());
        table.decline();
    }
}

/// The tables of one recording, shared by the thread that finds them and the one that reads them at
/// the end.
#[derive(Clone, Debug, Default)]
pub struct ExactTables(Arc<Mutex<OpenTables>>);

impl ExactTables {
    fn kept(&self) -> MutexGuard<'_, OpenTables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a table. Where there is no room its process runs on without being counted, which is
    /// said at the end.
    pub fn put(&self, pid: u32, table: ExactTableRegion) {
        let mut kept = self.kept();
        let of_it = kept.tables.iter().filter(|source| source.pid == pid).count();
        if kept.tables.len() >= TABLES || of_it >= OF_ONE_PROCESS {
            return kept.decline(&table);
        }
        if table.accept() {
            let name = ProcessHandle::open(pid).map(|target| name::of(&target)).unwrap_or_default();
            let (start_ticks, found) = (start_ticks(pid), MonotonicNs::now());
            kept.tables.push(ExactTable {
                pid,
                start_ticks,
                name,
                table,
                found,
                left_behind: false,
            });
        }
    }

    /// Lets the process of a table run on without being counted.
    pub(crate) fn decline(&self, table: &ExactTableRegion) {
        self.kept().decline(table);
    }

    /// A process called exec at `at`, which may be told of only now: nobody counts in the tables
    /// any more that it had before.
    pub fn became_another(&self, pid: u32, at: MonotonicNs) {
        let mut kept = self.kept();
        let before = kept.tables.iter_mut().filter(|source| source.pid == pid && source.found < at);
        before.for_each(|source| source.left_behind = true);
    }

    /// Shows all tables, in the order they came. Answers for how many processes there was no room.
    pub fn visit(&self, of: &mut dyn FnMut(&ExactTable)) -> u64 {
        let kept = self.kept();
        kept.tables.iter().for_each(of);
        kept.left_out
    }
}

fn byte(word: usize) -> u64 {
    u64::try_from(word).unwrap_or(u64::MAX).saturating_mul(8)
}
