//! Exact mode between collections: its clock, counts that are brought up to date, and the end.

use super::{Exact, unseen};
use crate::runtime::heap::RuntimeHeap as _;
use crate::runtime::info::Info;
use crate::syscall;
use core::sync::atomic::Ordering;
use profiler_protocol::exact::{head, state};

/// How often the counts are brought up to date between collections, and the clock of lifetimes
/// ticks.
const COUNT_NS: u64 = 1_000_000_000;
const TICK_NS: u64 = 1_000_000;

impl Exact {
    /// The life of the clock's thread: lifetimes are told by a clock that ticks every millisecond,
    /// since reading one costs as much as all else that is done for an object; and the counts are
    /// brought up to date.
    pub(crate) fn keep_time(&self) {
        syscall::name_thread(c"perfusion-exact");
        let mut counted_ns = 0;
        while self.over.load(Ordering::Acquire) == 0 {
            let before = self.tick.load(Ordering::Relaxed);
            if before == 0 {
                break;
            }
            let now_ns = syscall::now_ns();
            let tick = u64::from(self.milliseconds(now_ns)).wrapping_add(1);
            // Not when the process has ended meanwhile.
            self.tick.compare_exchange(before, tick, Ordering::Relaxed, Ordering::Relaxed).ok();
            let asked = self.table.get(head::ASKED);
            if asked != self.table.get(head::ANSWERED)
                || now_ns.saturating_sub(counted_ns) >= COUNT_NS
            {
                counted_ns = now_ns;
                self.count(now_ns);
                self.table.set(head::ANSWERED, asked);
            }
            syscall::sleep_ns(TICK_NS);
        }
    }

    /// Counts what was allocated since the last time.
    fn count(&self, now_ns: u64) {
        self.take_lock();
        self.table.change(|table| {
            self.chunks.count_all(table);
            table.set(head::COUNTED_NS, now_ns);
        });
        self.release_lock();
    }

    /// The process ends: the last objects are counted, and no more.
    pub(crate) fn end(&self, name: impl Fn(usize)) {
        if self.is_counting() && self.over.swap(1, Ordering::AcqRel) == 0 {
            let has_looked = self.unseen.is_wanted()
                && self.info().is_some_and(|info| self.look_at_all(info, name))
                && self.unseen.is_wanted();
            self.tick.store(0, Ordering::Relaxed);
            // Whoever counts is a native thread, and a collection in progress ends.
            self.count(syscall::now_ns());
            self.table.set(head::LOOKED_LAST, u64::from(has_looked));
            self.table.set(head::STATE, state::ENDED);
        }
    }

    /// Looks for objects that no callback told of when no collection will. The runtime stops the
    /// world for that and goes through the whole heap. False: it does not.
    fn look_at_all(&self, info: Info, name: impl Fn(usize)) -> bool {
        let (mut look, mut finds, mut whole) = (None, self.finds(), true);
        let told = info.each_object(|object| {
            let look = look.get_or_insert_with(|| {
                // Whoever has the lock is a native thread, which does not stand still.
                self.take_lock();
                // From here on nothing is counted, and no collection looks: the edges stay.
                self.tick.store(0, Ordering::Relaxed);
                self.survey.locate(&info);
                self.unseen.look(&self.survey, &self.chunks, &info, false)
            });
            match look.is_unseen(object) {
                Some(true) => {
                    if let Some(met) = unseen::meet(&info, object).filter(|met| !met.has_components)
                    {
                        self.found(&info, object, met, &mut finds, &name);
                    }
                }
                Some(false) => {}
                // The frozen heap is in no generation.
                None => whole &= info.is_frozen(object),
            }
        });
        if look.is_some() {
            self.release_lock();
        }
        told && whole
    }

    pub(super) fn milliseconds(&self, now_ns: u64) -> u32 {
        let lived_ns = now_ns.saturating_sub(self.began_ns.load(Ordering::Relaxed));
        u32::try_from(lived_ns / 1_000_000).unwrap_or(u32::MAX)
    }

    pub(super) fn take_lock(&self) {
        // Whoever holds it does so for a count, a whole collection or the last look, and never
        // waits for managed code.
        while self.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            syscall::sleep_ns(50_000);
        }
    }

    pub(super) fn release_lock(&self) {
        self.lock.store(0, Ordering::Release);
    }
}
