//! The values of the window in progress.

use super::gc_activity::GcActivity;
use super::heap_values::HeapValues;
use perfusion_aggregate::chance::Chances;
use perfusion_aggregate::exceptions_and_contentions::{
    ExceptionsAndContentions, LockWait, RuntimeEventSite, Throw,
};
use perfusion_aggregate::pool::Pools;
use perfusion_aggregate::runtime_counts::RuntimeCounts;
use perfusion_aggregate::runtime_wait::LockEvents;
use perfusion_aggregate::threads::{ThreadAccounts, WaitReason};
use perfusion_model::event::{
    Allocation, Contention, Exception, MonotonicNs, RegionId, ShimEvent, ThreadId, WaitStart,
};
use perfusion_model::labels::NameId;
use perfusion_model::stack::StackId;
use std::collections::HashSet;

/// What was added up so far, by what it is measured from.
#[derive(Default)]
pub(super) struct WindowValues {
    /// Times of threads on and off the CPU.
    pub(super) accounts: ThreadAccounts,
    /// With what probability the waits of this window kept their stacks.
    pub(super) wait_chances: Chances,
    pub(super) heap: HeapValues,
    pub(super) gc: GcActivity,
    pub(super) runtime_events: ExceptionsAndContentions,
    /// Exceptions and contentions that the runtimes have counted themselves.
    pub(super) runtime_counts: RuntimeCounts,
    /// Frames in which locks were waited for: what the runtimes' own frames mean is learnt from
    /// them, too.
    pub(super) lock_events: LockEvents,
    pub(super) pools: Pools,
}

impl WindowValues {
    /// The CPU sampler found the thread in this stack.
    pub(super) fn add_cpu_sample(&mut self, thread: ThreadId, time: MonotonicNs, stack: StackId) {
        if self.gc.collects(thread, time) {
            self.accounts.collecting_sample(thread, time, stack);
        } else {
            self.accounts.cpu_sample(thread, time, stack);
        }
    }

    /// A thread left the CPU in this stack.
    pub(super) fn add_wait_start(
        &mut self,
        wait: &WaitStart,
        time: MonotonicNs,
        stack: StackId,
        reason: WaitReason,
    ) {
        let mut ran_ns = wait.ran_ns;
        if self.gc.collects(wait.thread, time) {
            self.accounts.collecting_slice(wait.thread, stack, ran_ns, wait.weight);
            ran_ns = 0;
        }
        self.accounts.wait_start(wait.thread, time, stack, reason, ran_ns, wait.weight);
    }

    /// An object was allocated in this stack, by a thread of this name.
    pub(super) fn add_allocation(
        &mut self,
        region: RegionId,
        time: MonotonicNs,
        allocation: &Allocation,
        at: (StackId, NameId),
    ) {
        self.heap.allocations.allocated(region, time, allocation, at);
    }

    /// An exception was thrown here.
    pub(super) fn add_exception(&mut self, exception: &Exception, place: RuntimeEventSite) {
        let (type_name, rethrown) = (Some(exception.type_name.as_str().into()), exception.rethrown);
        let message = exception.message.as_deref().map(std::sync::Arc::from);
        let throw = Throw { place, type_name, message, rethrown };
        self.runtime_events.thrown(throw, exception.at.weight);
    }

    /// A wait for a lock here is over.
    pub(super) fn add_contention(
        &mut self,
        pid: u32,
        time: MonotonicNs,
        contention: &Contention,
        place: RuntimeEventSite,
    ) {
        let (owner, began) = (contention.owner, time.0.saturating_sub(contention.waited_ns));
        // Only a thread of the process itself counts: whom a process names is its own choice.
        let held_at = owner.and_then(|tid| {
            self.accounts.mostly_between(ThreadId { pid, tid }, MonotonicNs(began), time)
        });
        let wait = LockWait { place, owner, held_at };
        self.runtime_events.waited(wait, contention.waited_ns, contention.at.weight);
    }

    /// A shim tells of something that has no stack. Other events are ignored.
    pub(super) fn observe(
        &mut self,
        time: MonotonicNs,
        pid: u32,
        region: RegionId,
        event: &ShimEvent,
    ) {
        match *event {
            // A first word, or the first after a silence in which the shim let go of all its
            // handles.
            ShimEvent::Hello { .. } => {
                self.heap.allocations.watched_from(region, time);
                self.pools.forget(region);
                self.gc.begins_anew(pid, region);
            }
            ShimEvent::PoolAdjusted { workers, reason } => {
                self.pools.adjusted(region, workers, reason);
            }
            ShimEvent::PoolQueue { items } => self.pools.looked(region, items),
            _ => {
                self.heap.observe(time, region, event);
                self.gc.observe(time, pid, region, event, &mut self.accounts);
            }
        }
    }

    /// Forgets all threads but these, and the regions that are gone.
    pub(super) fn keep(&mut self, tids: &HashSet<u32>, gone: &HashSet<RegionId>) {
        self.gc.keep(tids, gone);
        self.heap.forget(gone);
        for &region in gone {
            self.pools.forget(region);
        }
    }
}
