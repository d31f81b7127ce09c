//! Scans of off-CPU threads. A thread of its own reads the kernel's task iterator to its end, which
//! runs the probe on every thread of the host. It has its own thread because the probe may wait for
//! pages of a scanned process: swapped-out pages, or pages of a file whose server does not answer
//! (FUSE). The probe leaves files out, but a file can be mapped in place of a stack between its
//! look and its copy. A scan that spends a second on one copy is given up. Its thread is abandoned,
//! the process is passed over from then on (`scans_held` counts it, the log names it once), and
//! another thread begins the scan anew. A few threads can be abandoned at a time; with more, scans
//! wait for one of them to end (`scans_refused`). Two things cannot be bounded here. Such a thread
//! cannot be killed, so its process cannot go away before. And a sleepable program that does not
//! end delays the kernel's RCU tasks trace (`bpf_iter_run_prog`, kernel/bpf/bpf_iter.c). A
//! userfaultfd delays nobody: the fault ends with an error, because a reader of another process's
//! memory must not drop its lock (`FOLL_UNLOCKABLE`, mm/gup.c; tested).

use super::KernelError;
use aya::Ebpf;
use aya::maps::{Array, HashMap as BpfHashMap, MapData};
use aya::programs::{Iter, ProgramError};
use ebpf_common::key::TaskIteratorReader as Slot;
use ebpf_common::limits::MAX_VISITORS;
use perfusion_host::abandoned::AbandonedThreads;
use perfusion_model::backoff::Backoff;
use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::{self, Read as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Name of the program in the object.
pub(super) const PROGRAM: &str = "off_cpu_threads";

/// Time between two scans.
const INTERVAL: Duration = Duration::from_secs(2);
/// The next scan comes so soon at the beginning, or when one left something out for want of room
/// in the ring; then after twice that, and so on.
const SOON: Duration = Duration::from_millis(50);
/// A copy of a stack that takes longer is held up by its process. Pages that are swapped out take
/// milliseconds.
const HELD_NS: u64 = 1_000_000_000;

/// Who scans, one thread at a time, and those that were abandoned.
pub(super) struct TaskScanner {
    slots: Array<MapData, Slot>,
    passed_over: BpfHashMap<MapData, u32, u32>,
    /// When those processes started.
    passed: HashMap<u32, u64>,
    /// `None` when as many are abandoned as there may be.
    thread: Option<ScannerThread>,
    /// By their slots.
    abandoned: AbandonedThreads<u32>,
    scanning: bool,
    due_ns: u64,
    soon: Backoff,
    /// Whether a recording or a process has just begun.
    beginning: bool,
    ended: u64,
    /// That a scan did not begin was told.
    told: bool,
}

/// One thread that reads iterators. It ends when nobody sends it any.
struct ScannerThread {
    slot: u32,
    iterators: SyncSender<File>,
    ends: Receiver<()>,
    thread: JoinHandle<()>,
}

impl ScannerThread {
    /// The program knows it by its thread's number.
    fn start(slot: u32, slots: &mut Array<MapData, Slot>) -> io::Result<Self> {
        let (iterators, scans) = sync_channel::<File>(1);
        let (ended, ends) = sync_channel(1);
        let (number, numbers) = sync_channel(1);
        let thread = std::thread::Builder::new().name("off-cpu-scan".into()).spawn(move || {
            number.send(rustix::thread::gettid().as_raw_nonzero().get()).ok();
            for mut iterator in scans {
                read_to_end(&mut iterator);
                drop(iterator);
                if ended.send(()).is_err() {
                    return;
                }
            }
        })?;
        let number = numbers.recv().map_err(io::Error::other)?;
        let tid = u32::try_from(number).map_err(io::Error::other)?;
        slots.set(slot, Slot { tid, ..Slot::default() }, 0).map_err(io::Error::other)?;
        Ok(Self { slot, iterators, ends, thread })
    }
}

/// Why a scan did not begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum ScanRefused {
    /// Visits before it have not ended.
    #[error("the memory of some sleeping threads does not answer")]
    Busy,
    /// The kernel makes no iterator.
    #[error("the kernel makes no iterator over threads")]
    Iterator(#[source] Box<dyn Error + Send + Sync>),
}

impl TaskScanner {
    /// Starts the thread; the first scan is due at once.
    pub(super) fn start(bpf: &mut Ebpf) -> Result<Self, KernelError> {
        let mut slots = super::typed(bpf, "VISITORS")?;
        let failed = |source| KernelError::Visitor { source };
        let thread = ScannerThread::start(0, &mut slots).map_err(failed)?;
        Ok(Self {
            slots,
            passed_over: super::typed(bpf, "PASSED_OVER")?,
            passed: HashMap::new(),
            thread: Some(thread),
            abandoned: AbandonedThreads::new(),
            scanning: false,
            due_ns: 0,
            soon: Backoff::new(SOON, INTERVAL),
            beginning: true,
            ended: 0,
            told: false,
        })
    }

    /// True the first time.
    pub(super) fn is_news(&mut self) -> bool {
        !std::mem::replace(&mut self.told, true)
    }

    /// Makes the next scan due now, and others soon after it: a process begins to be recorded.
    /// While the probes know none of its code each stack is a copy, the budget keeps fewer, and of
    /// a thread that waits now and then there is none that could stand for another. Whatever the
    /// sampler says meanwhile: a scan that came because it kept nothing would make a wait's stack
    /// the likelier for not having been kept.
    pub(super) fn hurry(&mut self) {
        (self.due_ns, self.beginning) = (0, true);
        self.soon.reset();
    }

    /// True when a scan is to begin.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.due_ns
    }

    /// Begins a scan.
    pub(super) fn begin(&mut self, bpf: &mut Ebpf, now_ns: u64) -> Result<(), ScanRefused> {
        self.due_ns = now_ns.saturating_add(nanos(INTERVAL));
        self.take_leave();
        if self.scanning {
            return Err(ScanRefused::Busy);
        }
        let thread = self.thread.as_ref().ok_or(ScanRefused::Busy)?;
        let iterator = open(bpf).map_err(ScanRefused::Iterator)?;
        // The channel is empty while nobody scans.
        thread.iterators.try_send(iterator).map_err(|_| ScanRefused::Busy)?;
        self.scanning = true;
        Ok(())
    }

    /// Takes the slot of an abandoned thread that has ended, and lets go of processes passed over
    /// that are gone.
    fn take_leave(&mut self) {
        if self.thread.is_none() {
            self.thread = self.next_thread();
        }
        let Self { passed, passed_over, .. } = self;
        passed.retain(|&pid, &mut started| {
            let is_there = perfusion_host::process::start_ticks(pid) == Some(started);
            if !is_there {
                passed_over.remove(&pid).ok();
            }
            is_there
        });
    }

    fn next_thread(&mut self) -> Option<ScannerThread> {
        let slot =
            (0..MAX_VISITORS).find(|slot| self.abandoned.holders().all(|used| used != slot))?;
        ScannerThread::start(slot, &mut self.slots).ok()
    }

    /// Gives the scan in progress up when a process holds it up, and says which.
    pub(super) fn held_up_by(&mut self, now_ns: u64) -> Option<u32> {
        let thread = self.thread.as_ref().filter(|_| self.scanning)?;
        let slot = self.slots.get(&thread.slot, 0).ok()?;
        let since = Some(slot.copies_since_ns).filter(|since| *since != 0)?;
        if now_ns.saturating_sub(since) < HELD_NS {
            return None;
        }
        // When it has gone by now nobody is passed over, and the scan goes on.
        let started = perfusion_host::process::start_ticks(slot.tgid)?;
        self.passed_over.insert(slot.tgid, 1, 0).ok()?;
        self.passed.insert(slot.tgid, started);
        // From now on the program does nothing for this thread.
        self.slots.set(thread.slot, Slot::default(), 0).ok()?;
        // It ends when it comes back: nobody sends it an iterator any more.
        let ScannerThread { slot: number, thread, .. } = self.thread.take()?;
        self.abandoned.add(number, thread);
        self.scanning = false;
        self.due_ns = 0;
        self.thread = self.next_thread();
        Some(slot.tgid)
    }

    /// Waits up to `timeout` for the scan in progress, and says whether one ended now.
    pub(super) fn ended(&mut self, timeout: Duration) -> bool {
        let Some(thread) = self.thread.as_ref().filter(|_| self.scanning) else { return false };
        match thread.ends.recv_timeout(timeout) {
            Ok(()) => {
                self.scanning = false;
                self.ended += 1;
                true
            }
            // Disconnected only if the thread died: then there are no more scans.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => false,
        }
    }

    /// True while a scan goes on.
    pub(super) fn is_scanning(&self) -> bool {
        self.scanning
    }

    /// Visits that have ended.
    pub(super) fn count(&self) -> u64 {
        self.ended
    }

    /// Whether the last scan left something out: then the next one comes soon, as it does at the
    /// beginning.
    pub(super) fn left_out(&mut self, something: bool, now_ns: u64) {
        let soon = something || self.beginning;
        if soon {
            self.due_ns = self.due_ns.min(now_ns.saturating_add(nanos(self.soon.delay())));
        }
        self.beginning &= self.soon.delay() < INTERVAL;
        if soon {
            self.soon.failed();
        } else {
            self.soon.reset();
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A new iterator: each scan needs its own.
fn open(bpf: &mut Ebpf) -> Result<File, Box<dyn Error + Send + Sync>> {
    let program = bpf.program_mut(PROGRAM).ok_or(ProgramError::NotLoaded)?;
    let program: &mut Iter = program.try_into()?;
    let link = program.attach()?;
    Ok(program.take_link(link)?.into_file()?)
}

/// Each read scans threads until it has text for us, which the probe never writes, or has seen
/// very many (then it answers EAGAIN).
fn read_to_end(iterator: &mut File) {
    let mut nothing = [0; 64];
    loop {
        match iterator.read(&mut nothing) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) => {}
            Err(_) => return,
        }
    }
}
