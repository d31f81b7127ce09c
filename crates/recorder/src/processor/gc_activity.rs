//! Garbage collections of the runtimes: their pauses, and the threads that run them.

use perfusion_aggregate::collecting::CollectingThreads;
use perfusion_aggregate::collections::{CollectionKind, CollectionSums, GarbageCollections};
use perfusion_aggregate::threads::ThreadAccounts;
use perfusion_model::event::{MonotonicNs, RegionId, ShimEvent, ThreadId};
use std::collections::HashSet;

/// A collecting thread needs microseconds to let the other threads run again. If nothing tells of
/// that for so long, the record was lost, and the thread is at something else.
const RESTART_NS: u64 = 100_000_000;

/// Suspensions for a collection and for its preparation (`SuspendEEBegin` of the runtime's event
/// manifest, ClrEtwAll.man).
const FOR_COLLECTION: [u8; 2] = [1, 6];

/// A hostile shim may make up more.
const MAX_PAUSERS: usize = 10_000;

/// What runtimes collect, and which threads do it.
#[derive(Default)]
pub(super) struct GcActivity {
    collections: GarbageCollections,
    /// Threads that run a collection right now.
    threads: CollectingThreads,
    /// Living threads that have stopped their process for a collection, [`MAX_PAUSERS`] at most.
    pausers: HashSet<ThreadId>,
}

impl GcActivity {
    /// A shim tells of a collection or a pause. Other events are ignored.
    pub(super) fn observe(
        &mut self,
        time: MonotonicNs,
        pid: u32,
        region: RegionId,
        event: &ShimEvent,
        accounts: &mut ThreadAccounts,
    ) {
        match *event {
            ShimEvent::GcStart { number, generation, reason, kind, tid } => {
                let of = CollectionKind::of(generation, reason, kind);
                self.collections.begins(region, number, of, time);
                // 1 is a background collection: it runs on a thread of its own, known by name.
                if kind != 1 {
                    self.threads.begins(ThreadId { pid, tid }, region);
                }
            }
            ShimEvent::GcEnd { number } => {
                self.collections.ends(region, number);
                self.threads.ends(pid, region, MonotonicNs(time.0.saturating_add(RESTART_NS)));
            }
            ShimEvent::GcHeap { number, promoted } => {
                self.collections.left(region, number, promoted);
            }
            ShimEvent::PauseBegin { reason, tid } if FOR_COLLECTION.contains(&reason) => {
                self.pause_begins(time, region, ThreadId { pid, tid }, accounts);
            }
            ShimEvent::PauseBegin { .. } => self.collections.foreign_pause_begins(region),
            ShimEvent::PauseCpu { .. } if self.collections.is_in_foreign_pause(region) => {}
            ShimEvent::PauseCpu { tid, cpu_ns } if tid != 0 => {
                let cpu_ns = Some(cpu_ns).filter(|_| self.collections.is_in_whole_pause(region));
                accounts.collected(ThreadId { pid, tid }, cpu_ns);
            }
            ShimEvent::PauseEnd { .. } => {
                self.threads.none(pid, region);
                self.collections.pause_ends(region, time);
            }
            _ => {}
        }
    }

    fn pause_begins(
        &mut self,
        time: MonotonicNs,
        region: RegionId,
        thread: ThreadId,
        accounts: &mut ThreadAccounts,
    ) {
        if let Some(before) = self.collections.pause_begins(region, thread, time) {
            accounts.collected(before, None);
        }
        self.threads.none(thread.pid, region);
        self.threads.begins(thread, region);
        if self.pausers.len() < MAX_PAUSERS {
            self.pausers.insert(thread);
        }
    }

    /// The region's shim begins, or begins again after a silence. In a silence the end of a pause
    /// may have gone untold.
    pub(super) fn begins_anew(&mut self, pid: u32, region: RegionId) {
        self.collections.region_gone(region);
        self.threads.none(pid, region);
    }

    /// Whether the thread ran a collection at that time.
    pub(super) fn collects(&self, thread: ThreadId, at: MonotonicNs) -> bool {
        self.threads.contains(thread, at)
    }

    /// The regions whose managed threads are all stopped for a collection.
    pub(super) fn paused(&self) -> impl Iterator<Item = RegionId> {
        self.collections.paused()
    }

    /// Threads that have stopped their process for a collection.
    pub(super) fn pausers(&self) -> &HashSet<ThreadId> {
        &self.pausers
    }

    /// Takes the pauses of a window. The CPU time of pauses in progress is told only at their end.
    pub(super) fn cut(&mut self, accounts: &mut ThreadAccounts) -> CollectionSums {
        let (collections, collecting) = self.collections.cut();
        for thread in collecting {
            accounts.collected(thread, None);
        }
        collections
    }

    /// Collections and pauses of which only the beginning or only the end was told.
    pub(super) fn unmatched(&self) -> u64 {
        self.collections.unmatched()
    }

    /// Forgets all threads but these, and the regions that are gone.
    pub(super) fn keep(&mut self, tids: &HashSet<u32>, gone: &HashSet<RegionId>) {
        self.pausers.retain(|thread| tids.contains(&thread.tid));
        self.threads.keep(|tid| tids.contains(&tid), |region| gone.contains(&region));
        for &region in gone {
            self.collections.region_gone(region);
        }
    }
}
