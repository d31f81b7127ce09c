//! What earlier windows have counted. The scheduler tells a thread's totals since the recording
//! began, so each window takes what the earlier ones have not counted.

use foldhash::HashMap;
use perfusion_model::event::{MonotonicNs, ThreadProgress, ThreadTimes};

/// A thread that was counted and is in no snapshot since (its times changed while they were read)
/// is remembered for so many windows.
pub(super) const REMEMBERED: u8 = 3;

/// A wait in progress: when it began, and how much of it was blocked and runnable.
type WaitSoFar = (MonotonicNs, u64, u64);

/// The times of a thread that earlier windows have.
#[derive(Clone, Copy, Debug)]
struct CountedTimes {
    times: ThreadTimes,
    /// The wait it was in at the cut, and how much of it is counted.
    wait: Option<WaitSoFar>,
    /// Cuts since that the thread was not in.
    missed: u8,
}

/// The part of one wait that earlier windows have.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CountedWait {
    blocked_ns: u64,
    runnable_ns: u64,
    /// For a wait that was in progress at the cut: when its thread entered the recording.
    pub(super) entered: Option<MonotonicNs>,
}

impl CountedWait {
    /// The part of the whole wait that no window has.
    pub(super) fn rest(self, blocked_ns: u64, runnable_ns: u64) -> (u64, u64) {
        (blocked_ns.saturating_sub(self.blocked_ns), runnable_ns.saturating_sub(self.runnable_ns))
    }
}

/// What all earlier windows have of all threads, and which of these have ended.
#[derive(Default)]
pub(super) struct CountedThreads {
    threads: HashMap<u32, CountedTimes>,
    /// When the last ended thread of each id had entered the recording.
    ended: HashMap<u32, MonotonicNs>,
    /// `ended` of the window before, as far as these threads were still in the kernel's map then.
    ended_before: HashMap<u32, MonotonicNs>,
}

impl CountedThreads {
    /// What is counted of the wait of a thread that began at `start`.
    pub(super) fn wait(&self, tid: u32, start: MonotonicNs) -> CountedWait {
        match self.threads.get(&tid).map(|counted| (counted.times.since, counted.wait)) {
            Some((since, Some((began, blocked_ns, runnable_ns)))) if began == start => {
                CountedWait { blocked_ns, runnable_ns, entered: Some(since) }
            }
            _ => CountedWait::default(),
        }
    }

    /// The wait a thread is in, as its snapshot says, and what is counted of it.
    pub(super) fn wait_in(
        &self,
        times: &ThreadTimes,
        progress: ThreadProgress,
    ) -> (Option<WaitSoFar>, CountedWait) {
        let ThreadProgress::Waiting { start, blocked_ns, runnable_ns, .. } = progress else {
            return (None, CountedWait::default());
        };
        let tid = times.thread.tid;
        let known =
            self.threads.get(&tid).is_some_and(|counted| counted.times.since == times.since);
        let counted = if known { self.wait(tid, start) } else { CountedWait::default() };
        (Some((start, blocked_ns, runnable_ns)), counted)
    }

    /// Of a thread's totals, what no window has counted. A total may be less than what was counted:
    /// a thread that seemed to run turned out to sleep. What is too much in one column is taken off
    /// the others, so that their sum is that of the window; both come right in time.
    pub(super) fn not_counted(&self, times: &ThreadTimes) -> ThreadTimes {
        let same = |counted: &&CountedTimes| counted.times.since == times.since;
        let Some(CountedTimes { times: before, .. }) =
            self.threads.get(&times.thread.tid).filter(same)
        else {
            return *times;
        };
        let columns = |times: &ThreadTimes| [times.blocked_ns, times.runnable_ns, times.oncpu_ns];
        let (now, before_columns) = (columns(times), columns(before));
        let mut rest: [u64; 3] = std::array::from_fn(|n| now[n].saturating_sub(before_columns[n]));
        let mut too_much: u64 = (0..3).map(|n| before_columns[n].saturating_sub(now[n])).sum();
        for column in &mut rest {
            let taken = too_much.min(*column);
            *column -= taken;
            too_much -= taken;
        }
        let [blocked_ns, runnable_ns, oncpu_ns] = rest;
        let stolen_ns = times.stolen_ns.saturating_sub(before.stolen_ns).min(runnable_ns);
        ThreadTimes { oncpu_ns, runnable_ns, stolen_ns, blocked_ns, ..*times }
    }

    /// Counts `rest` of a thread, and as much of the wait it is in.
    pub(super) fn count(&mut self, rest: &ThreadTimes, wait: Option<WaitSoFar>) {
        let times = self.counted_with(rest);
        self.threads.insert(rest.thread.tid, CountedTimes { times, wait, missed: 0 });
    }

    /// What all windows together have counted of a thread when this one has counted `rest`.
    fn counted_with(&self, rest: &ThreadTimes) -> ThreadTimes {
        let before =
            self.threads.get(&rest.thread.tid).filter(|counted| counted.times.since == rest.since);
        let Some(CountedTimes { times: before, .. }) = before else { return *rest };
        ThreadTimes {
            oncpu_ns: before.oncpu_ns.saturating_add(rest.oncpu_ns),
            runnable_ns: before.runnable_ns.saturating_add(rest.runnable_ns),
            stolen_ns: before.stolen_ns.saturating_add(rest.stolen_ns),
            blocked_ns: before.blocked_ns.saturating_add(rest.blocked_ns),
            ..*rest
        }
    }

    /// A thread has ended with these totals. Answers what no window has counted of them.
    pub(super) fn end(&mut self, times: &ThreadTimes) -> ThreadTimes {
        self.ended.insert(times.thread.tid, times.since);
        let rest = self.not_counted(times);
        self.threads.remove(&times.thread.tid);
        rest
    }

    /// True of a thread that has ended in this window.
    pub(super) fn has_ended(&self, times: &ThreadTimes) -> bool {
        self.ended.get(&times.thread.tid) == Some(&times.since)
    }

    /// True of a thread that has ended in this window or the one before.
    pub(super) fn has_ended_lately(&self, times: &ThreadTimes) -> bool {
        self.has_ended(times) || self.ended_before.get(&times.thread.tid) == Some(&times.since)
    }

    /// A cut begins: no thread is counted in it yet.
    pub(super) fn begin_cut(&mut self) {
        for counted in self.threads.values_mut() {
            counted.missed += 1;
        }
    }

    /// A cut is made. `listed` are the ended threads that were in a snapshot all the same.
    pub(super) fn end_cut(&mut self, listed: HashMap<u32, MonotonicNs>) {
        self.threads.retain(|_, counted| counted.missed < REMEMBERED);
        self.ended.clear();
        self.ended_before = listed;
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.threads.is_empty() && self.ended.is_empty() && self.ended_before.is_empty()
    }
}
