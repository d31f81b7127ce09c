//! Visits to sleeping threads: a thread of its own reads the kernel's task iterator to its end, which runs the probe on every thread of
//! the host. Of its own, because the probe may have to wait for pages of a visited process's memory: those that are swapped out, and those of
//! a file for as long as its file system likes, which may be a process (FUSE). The probe leaves files out, but one can be mapped in
//! place of a stack between its look and its copy: then there are no more visits (`visits_refused` counts them, and the log says it once) until
//! that file system answers or ends, waits that only they would see stay without a stack, and no other thread of ours waits. What cannot be
//! bounded from here: that thread cannot be killed, so neither can the process be gone before, and a sleepable program that does not end holds
//! up the kernel's RCU tasks trace (`bpf_iter_run_prog`, kernel/bpf/bpf_iter.c). A userfaultfd holds nobody up: the fault ends with an error,
//! because whoever reads another process's memory must not drop its lock (`FOLL_UNLOCKABLE`, mm/gup.c; tested).

use aya::Ebpf;
use aya::programs::Iter;
use std::fs::File;
use std::io::{self, Read as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// Name of the program in the object.
pub(super) const PROGRAM: &str = "sleepers";

/// Time between two visits.
const INTERVAL_NS: u64 = 2_000_000_000;
/// The next visit comes so soon when one left something out for want of room in the ring.
const SOON_NS: u64 = 50_000_000;

/// The visiting thread.
pub(super) struct Visitor {
    iterators: SyncSender<File>,
    ends: Receiver<()>,
    visiting: bool,
    due_ns: u64,
    ended: u64,
    /// That a visit did not begin was told.
    told: bool,
}

/// A visit did not begin: the one before has not ended, or the kernel refuses.
pub(super) struct Refused;

impl Visitor {
    /// Starts the thread; the first visit is due at once.
    pub(super) fn start() -> io::Result<Self> {
        let (iterators, visits) = sync_channel::<File>(1);
        let (ended, ends) = sync_channel(1);
        std::thread::Builder::new().name("sleepers".into()).spawn(move || {
            for mut iterator in visits {
                read_to_end(&mut iterator);
                drop(iterator);
                if ended.send(()).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { iterators, ends, visiting: false, due_ns: 0, ended: 0, told: false })
    }

    /// True the first time.
    pub(super) fn is_news(&mut self) -> bool {
        !std::mem::replace(&mut self.told, true)
    }

    /// Makes the next visit due now.
    pub(super) fn hurry(&mut self) {
        self.due_ns = 0;
    }

    /// True when a visit is to begin.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.due_ns
    }

    /// Begins a visit.
    pub(super) fn begin(&mut self, bpf: &mut Ebpf, now_ns: u64) -> Result<(), Refused> {
        self.due_ns = now_ns.saturating_add(INTERVAL_NS);
        if self.visiting {
            return Err(Refused);
        }
        let iterator = open(bpf).ok_or(Refused)?;
        // The channel is empty while nobody visits.
        self.iterators.try_send(iterator).map_err(|_| Refused)?;
        self.visiting = true;
        Ok(())
    }

    /// Waits up to `timeout` for the visit in progress, and says whether one ended now.
    pub(super) fn ended(&mut self, timeout: Duration) -> bool {
        if !self.visiting {
            return false;
        }
        match self.ends.recv_timeout(timeout) {
            Ok(()) => {
                self.visiting = false;
                self.ended += 1;
                true
            }
            // Disconnected only if the thread died: then there are no more visits.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => false,
        }
    }

    /// True while a visit goes on.
    pub(super) fn is_visiting(&self) -> bool {
        self.visiting
    }

    /// Visits that have ended.
    pub(super) fn count(&self) -> u64 {
        self.ended
    }

    /// Something was left out: comes back soon.
    pub(super) fn left_out(&mut self, now_ns: u64) {
        self.due_ns = self.due_ns.min(now_ns.saturating_add(SOON_NS));
    }
}

/// A new iterator: each visit needs its own. `None` when the kernel refuses.
fn open(bpf: &mut Ebpf) -> Option<File> {
    let program: &mut Iter = bpf.program_mut(PROGRAM)?.try_into().ok()?;
    let link = program.attach().ok()?;
    program.take_link(link).ok()?.into_file().ok()
}

/// Each read visits threads until it has text for us, which the probe never writes, or has seen very many (then it answers EAGAIN).
fn read_to_end(iterator: &mut File) {
    let mut nothing = [0; 64];
    loop {
        match iterator.read(&mut nothing) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(_) => return,
        }
    }
}
