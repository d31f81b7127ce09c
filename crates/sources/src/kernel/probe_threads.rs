//! The threads that the probes know: those entered before any event told about them, the ends that
//! found no room in the ring, and all of them at the end of a window.

use super::KernelError;
use super::counters::KernelCounters;
use super::options::KernelSelection;
use super::threads::{ThreadScan, ThreadTable, closed_times};
use aya::maps::{Map, MapError};
use ebpf_common::counter::Counter;
use ebpf_common::key::{STATE_BLOCKED, STATE_DEAD, SchedulerAccount, WAIT_WAS_BLOCKED};
use perfusion_host::process::seed;
use perfusion_model::event::{Event, EventKind, MonotonicNs, ThreadSnapshot};
use std::collections::HashMap;
use std::io;

/// The probes' threads, read from here.
pub(super) struct ProbeThreads {
    table: ThreadTable,
    /// Another handle for whoever asks /proc about them.
    given: Option<ThreadTable>,
    /// Most threads there can be.
    most: usize,
    /// Ends of threads found on the way, for the next drain.
    ends: Vec<Event>,
    /// Ends that have found no room in the ring so far.
    ends_left: u64,
    /// When the last window ended.
    cut_ns: u64,
}

impl ProbeThreads {
    /// The threads in the map `THREADS`, which has room for so many.
    pub(super) fn new(
        map: Map,
        max_threads: u32,
        counters: &KernelCounters,
    ) -> Result<Self, KernelError> {
        let [table, given] = ThreadTable::pair(map, &counters.own)?;
        Ok(Self {
            table,
            given: Some(given),
            most: usize::try_from(max_threads).unwrap_or(usize::MAX),
            ends: Vec::new(),
            ends_left: 0,
            cut_ns: 0,
        })
    }

    /// The other handle; `None` when it was taken before.
    pub(super) fn take(&mut self) -> Option<ThreadTable> {
        self.given.take()
    }

    /// Enters the threads of `tgid` that no event has told about: those have been in one state
    /// since `since_ns`.
    pub(super) fn seed(
        &mut self,
        tgid: u32,
        since_ns: u64,
        counters: &KernelCounters,
    ) -> Result<(), KernelError> {
        // BPF_NOEXIST: an event seen meanwhile knows better.
        const NO_EXIST: u64 = 1;
        for thread in seed::threads(tgid) {
            let value = SchedulerAccount {
                entered_ns: since_ns,
                since_ns,
                wait_start_ns: since_ns,
                exec_ns: u64::MAX,
                tgid,
                state: thread.state,
                wait_flags: if thread.state == STATE_BLOCKED { WAIT_WAS_BLOCKED } else { 0 },
                ..SchedulerAccount::default()
            };
            match self.table.map.insert(thread.tid, value, NO_EXIST) {
                Ok(()) => {
                    if seed::state(tgid, thread.tid).is_none() {
                        // It ended meanwhile: its last switch may have come before the entry. Gone
                        // already is as good.
                        self.table.map.remove(&thread.tid).ok();
                    }
                }
                Err(MapError::SyscallError(error))
                    if error.io_error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(MapError::SyscallError(_)) => counters.add(Counter::ThreadMapFull, 1),
                Err(source) => return Err(KernelError::Map { name: "THREADS", source }),
            }
        }
        Ok(())
    }

    /// Hands the ends of threads to `sink` that did not come through the ring. Those that found no
    /// room in it stay in the map until they are taken here.
    pub(super) fn drain_ends(&mut self, counters: &KernelCounters, sink: &mut dyn FnMut(Event)) {
        let left = counters.of_probes(Counter::ThreadEndsRingFull);
        if left != std::mem::replace(&mut self.ends_left, left) {
            self.drain_dead(sink);
        }
        self.ends.drain(..).for_each(sink);
    }

    fn drain_dead(&mut self, sink: &mut dyn FnMut(Event)) {
        // A key removed during the walk makes it start again: bounded by the map's size.
        let threads = self.table.map.iter().take(2 * self.most);
        let dead: HashMap<u32, SchedulerAccount> = threads
            .filter_map(Result::ok)
            .filter(|(_, thread)| thread.state == STATE_DEAD)
            .collect();
        for (tid, thread) in dead {
            // A new thread has taken its place if it is gone, and is known from now on if it took
            // it this moment.
            if self.table.map.remove(&tid).is_ok() {
                sink(Event {
                    time: MonotonicNs(thread.since_ns),
                    kind: EventKind::ThreadEnd(closed_times(tid, &thread)),
                });
            }
        }
    }

    /// Times of all living threads, the state each is in closed now, or when the recording was
    /// frozen. Ends that went unseen come with the next drain, except once the recording is frozen:
    /// /proc knows what is now, not what was then.
    pub(super) fn times(
        &mut self,
        selection: &KernelSelection,
        frozen_ns: Option<u64>,
    ) -> Vec<ThreadSnapshot> {
        let frozen = frozen_ns.is_some();
        let scan = self.table.look(frozen_ns, self.most, selection, u64::MAX, frozen);
        let confirmed = self.table.confirm(&scan);
        self.ends.extend(confirmed.ends);
        confirmed.threads
    }

    /// All threads at the end of a window, each state closed at `at`; that of a thread that had an
    /// event since, with this event.
    pub(super) fn at_cut(
        &mut self,
        at: MonotonicNs,
        selection: &KernelSelection,
        frozen: bool,
    ) -> ThreadScan {
        let before = std::mem::replace(&mut self.cut_ns, at.0);
        self.table.look(Some(at.0), self.most, selection, before, frozen)
    }
}
