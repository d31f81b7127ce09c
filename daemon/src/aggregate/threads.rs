//! Scheduler truth meets samples: samples and kept waits say *where* a thread's time went, the scheduler's exact totals say
//! *how much*. So every column of a thread sums to its true time (D1, D2), whatever was thinned or lost.
//!
//! - cpu: each of the thread's n samples stands for 1/n of its on-CPU time. A thread that ran and was never sampled gives its
//!   time to the stacks it left the CPU with, in proportion to how long it had run before each. Time stolen from it while it held a
//!   CPU is spread over the same stacks, as runnable.
//! - runnable, blocked: a kept wait stands for `weight` waits. Where the coin thinned the thread's waits, the estimates are
//!   scaled so that they sum to the exact total; where nothing was thinned, what is missing is shown under a marker.

use crate::sample::frame::Marker;
use crate::sample::stack::StackId;
use crate::source::{MonotonicNs, Progress, ThreadId, ThreadSnapshot, ThreadTimes, WaitEnd, WaitState};
use std::collections::{HashMap, HashSet};

/// Where a row's time was spent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In this stack.
    Stack(StackId),
    /// Not known; the marker says why.
    Marker(Marker),
}

/// What a thread waited for, as far as the kernel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WaitReason {
    /// State it left the CPU in.
    pub state: WaitStateKey,
    /// System call it was in.
    pub syscall: Option<u32>,
}

/// [`WaitState`] without the raw bits, so that it can be a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitStateKey {
    /// Preempted.
    Preempted,
    /// Its CPU did not run it.
    Stolen,
    /// Interruptible sleep.
    Interruptible,
    /// Uninterruptible sleep.
    Uninterruptible,
    /// Stopped, traced, parked, dead.
    Other,
}

impl From<WaitState> for WaitStateKey {
    fn from(state: WaitState) -> Self {
        match state {
            WaitState::Runnable => Self::Preempted,
            WaitState::Interruptible => Self::Interruptible,
            WaitState::Uninterruptible => Self::Uninterruptible,
            WaitState::Other(_) => Self::Other,
        }
    }
}

/// Who ended a wait: thread and command name.
pub type Waker = (ThreadId, [u8; 16]);

/// One line of the result. All times in nanoseconds; their sums per thread equal the scheduler's totals.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The thread.
    pub thread: ThreadId,
    /// When it entered the recording: tells it from a later thread with the same id.
    pub since: MonotonicNs,
    /// Where.
    pub place: Place,
    /// Why it waited; `None` for rows of CPU time.
    pub reason: Option<WaitReason>,
    /// Who woke it.
    pub waker: Option<Waker>,
    /// CPU samples taken here.
    pub samples: u64,
    /// On-CPU time.
    pub cpu_ns: f64,
    /// Time runnable.
    pub runnable_ns: f64,
    /// Time blocked.
    pub blocked_ns: f64,
}

#[derive(Default)]
struct Waited {
    blocked_ns: f64,
    runnable_ns: f64,
}

struct Open {
    start: MonotonicNs,
    stack: StackId,
    weight: f64,
    reason: WaitReason,
}

#[derive(Default)]
struct Thread {
    id: ThreadId,
    samples: HashMap<StackId, u64>,
    ran_before_wait: HashMap<StackId, f64>,
    waits: HashMap<(StackId, WaitReason, Option<Waker>), Waited>,
    open: Option<Open>,
    /// When it was first known to be on a CPU: before that it waited, where nobody saw.
    first_on_cpu: Option<MonotonicNs>,
    thinned: bool,
    ended: Option<ThreadTimes>,
}

/// Collects one window of all threads.
#[derive(Default)]
pub struct Threads {
    threads: HashMap<u32, Thread>,
    finished: Vec<Thread>,
    unmatched_wait_ends: u64,
}

impl Threads {
    fn thread(&mut self, id: ThreadId) -> &mut Thread {
        // A tid that is used again belongs to a new thread: the old one has ended and was moved away by `thread_end`.
        let thread = self.threads.entry(id.tid).or_default();
        thread.id = id;
        thread
    }

    /// A CPU sample of `id` with this stack.
    pub fn cpu_sample(&mut self, id: ThreadId, time: MonotonicNs, stack: StackId) {
        let thread = self.thread(id);
        thread.first_on_cpu.get_or_insert(time);
        *thread.samples.entry(stack).or_default() += 1;
    }

    /// A thread leaves the CPU and its stack was kept.
    pub fn wait_start(
        &mut self,
        id: ThreadId,
        time: MonotonicNs,
        stack: StackId,
        reason: WaitReason,
        ran_ns: u64,
        weight: f64,
    ) {
        let thread = self.thread(id);
        thread.first_on_cpu.get_or_insert(MonotonicNs(time.0.saturating_sub(ran_ns)));
        thread.thinned |= weight > 1.0;
        *thread.ran_before_wait.entry(stack).or_default() += ran_ns as f64 * weight;
        thread.open = Some(Open { start: time, stack, weight, reason });
    }

    /// The kept wait is over.
    pub fn wait_end(&mut self, end: &WaitEnd) {
        let thread = self.thread(end.thread);
        match thread.open.take() {
            Some(open) if open.start == end.start => {
                let waited = thread.waits.entry((open.stack, open.reason, end.waker)).or_default();
                waited.blocked_ns += end.blocked_ns as f64 * open.weight;
                waited.runnable_ns += end.runnable_ns as f64 * open.weight;
            }
            other => {
                // Its start was lost; a later start may already be open.
                thread.open = other.filter(|open| open.start > end.start);
                self.unmatched_wait_ends += 1;
            }
        }
    }

    /// A thread's last switch, with its exact totals.
    pub fn thread_end(&mut self, times: ThreadTimes) {
        let mut thread = self.threads.remove(&times.thread.tid).unwrap_or_default();
        thread.id = times.thread;
        thread.ended = Some(times);
        self.finished.push(thread);
    }

    /// Wait ends whose start never arrived.
    #[must_use]
    pub fn unmatched_wait_ends(&self) -> u64 {
        self.unmatched_wait_ends
    }

    /// Closes the window: slices waits in progress and makes every column of a thread sum to its exact total.
    /// `running` are the threads that still exist, with their totals as of now.
    #[must_use]
    pub fn finish(mut self, running: &[ThreadSnapshot]) -> Vec<Row> {
        let mut rows = Vec::new();
        let ended: HashSet<(u32, MonotonicNs)> =
            self.finished.iter().filter_map(|t| t.ended).map(life).collect();
        for ThreadSnapshot { times, progress, .. } in running {
            // Still in the map, but its end was told: one life must not count twice.
            if ended.contains(&life(*times)) {
                continue;
            }
            let mut thread = self.threads.remove(&times.thread.tid).unwrap_or_default();
            thread.id = times.thread;
            thread.slice_open_wait(*progress);
            thread.rows(times, &mut rows);
        }
        for thread in self.finished.drain(..) {
            if let Some(times) = thread.ended {
                thread.rows(&times, &mut rows);
            }
        }
        // Left: threads whose end was lost on the way. Their samples stay, at no more time than is known: none.
        for thread in self.threads.into_values() {
            let times = ThreadTimes {
                thread: thread.id,
                oncpu_ns: 0,
                runnable_ns: 0,
                stolen_ns: 0,
                blocked_ns: 0,
                since: MonotonicNs(0),
            };
            thread.rows(&times, &mut rows);
        }
        rows
    }
}

/// What tells a thread from a later one with the same id.
fn life(times: ThreadTimes) -> (u32, MonotonicNs) {
    (times.thread.tid, times.since)
}

impl Thread {
    fn slice_open_wait(&mut self, progress: Progress) {
        let Some(open) = self.open.take() else { return };
        let Progress::Waiting { start, blocked_ns, runnable_ns, .. } = progress else { return };
        if start != open.start {
            return;
        }
        let waited = self.waits.entry((open.stack, open.reason, None)).or_default();
        waited.blocked_ns += blocked_ns as f64 * open.weight;
        waited.runnable_ns += runnable_ns as f64 * open.weight;
    }

    fn rows(self, times: &ThreadTimes, rows: &mut Vec<Row>) {
        let id = self.id;
        let row = |place, reason, waker| Row {
            thread: id,
            since: times.since,
            place,
            reason,
            waker,
            samples: 0,
            cpu_ns: 0.0,
            runnable_ns: 0.0,
            blocked_ns: 0.0,
        };
        let (oncpu, stolen) = (times.oncpu_ns as f64, times.stolen_ns as f64);
        let held = Some(WaitReason { state: WaitStateKey::Stolen, syscall: None });
        let mut spread = |place, samples, share: f64| {
            if samples > 0 || oncpu > 0.0 {
                rows.push(Row { samples, cpu_ns: oncpu * share, ..row(place, None, None) });
            }
            if stolen > 0.0 {
                rows.push(Row { runnable_ns: stolen * share, ..row(place, held, None) });
            }
        };
        let samples: u64 = self.samples.values().sum();
        let ran: f64 = self.ran_before_wait.values().sum();
        if samples > 0 {
            for (stack, n) in self.samples {
                spread(Place::Stack(stack), n, n as f64 / samples as f64);
            }
        } else if ran > 0.0 {
            for (stack, share) in self.ran_before_wait.into_iter().filter(|(_, share)| *share > 0.0) {
                spread(Place::Stack(stack), 0, share / ran);
            }
        } else {
            spread(Place::Marker(Marker::NotSampled), 0, 1.0);
        }

        let (blocked, runnable) = (times.blocked_ns as f64, times.runnable_ns as f64 - stolen);
        let seen_blocked: f64 = self.waits.values().map(|w| w.blocked_ns).sum();
        let seen_runnable: f64 = self.waits.values().map(|w| w.runnable_ns).sum();
        // The wait it was in when the recording began has no stack. Its length is known: up to the first time on a CPU.
        let began = |first: MonotonicNs| first.0.saturating_sub(times.since.0) as f64;
        let before = self.first_on_cpu.map_or(blocked + runnable, began);
        let before_blocked =
            before.min(if self.thinned { blocked } else { (blocked - seen_blocked).max(0.0) });
        let before_runnable = (before - before_blocked).min(if self.thinned {
            runnable
        } else {
            (runnable - seen_runnable).max(0.0)
        });
        let (rest_blocked, rest_runnable) = (blocked - before_blocked, runnable - before_runnable);
        // Above the total only by the rounding of two clocks read apart, or by the coin: scale down. Below: see module docs.
        let scale = |seen: f64, total: f64| {
            if seen > 0.0 && (self.thinned || seen > total) { total / seen } else { 1.0 }
        };
        let (scale_blocked, scale_runnable) =
            (scale(seen_blocked, rest_blocked), scale(seen_runnable, rest_runnable));
        for ((stack, reason, waker), waited) in self.waits {
            rows.push(Row {
                blocked_ns: waited.blocked_ns * scale_blocked,
                runnable_ns: waited.runnable_ns * scale_runnable,
                ..row(Place::Stack(stack), Some(reason), waker)
            });
        }
        let mut missing = |marker, blocked_ns: f64, runnable_ns: f64| {
            if blocked_ns + runnable_ns >= 1.0 {
                let (blocked_ns, runnable_ns) = (blocked_ns.max(0.0), runnable_ns.max(0.0));
                rows.push(Row { blocked_ns, runnable_ns, ..row(Place::Marker(marker), None, None) });
            }
        };
        missing(Marker::WaitingSinceBefore, before_blocked, before_runnable);
        missing(
            Marker::StackLost,
            rest_blocked - seen_blocked * scale_blocked,
            rest_runnable - seen_runnable * scale_runnable,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::{Place, Row, Threads, WaitReason, WaitStateKey};
    use crate::sample::frame::Marker;
    use crate::sample::stack::StackId;
    use crate::source::{MonotonicNs, Progress, ThreadId, ThreadSnapshot, ThreadTimes, WaitEnd};
    use proptest::prelude::{any, prop, proptest};

    const T: ThreadId = ThreadId { pid: 7, tid: 8 };
    const SLEEP: WaitReason = WaitReason { state: WaitStateKey::Interruptible, syscall: Some(35) };

    fn times(oncpu_ns: u64, runnable_ns: u64, blocked_ns: u64) -> ThreadTimes {
        ThreadTimes { thread: T, oncpu_ns, runnable_ns, stolen_ns: 0, blocked_ns, since: MonotonicNs(0) }
    }

    fn running(times: ThreadTimes, progress: Progress) -> [ThreadSnapshot; 1] {
        [ThreadSnapshot { times, at: MonotonicNs(100), progress }]
    }

    const ON_CPU: Progress = Progress::OnCpu { since: MonotonicNs(0) };

    fn sums(rows: &[Row]) -> (f64, f64, f64) {
        rows.iter()
            .fold((0.0, 0.0, 0.0), |(c, r, b), row| (c + row.cpu_ns, r + row.runnable_ns, b + row.blocked_ns))
    }

    #[test]
    fn samples_share_the_exact_time_on_cpu() {
        let mut threads = Threads::default();
        for stack in [1, 1, 1, 2] {
            threads.cpu_sample(T, MonotonicNs(0), StackId(stack));
        }
        let rows = threads.finish(&running(times(1_000, 0, 0), ON_CPU));
        let cpu = |id| rows.iter().find(|r| r.place == Place::Stack(StackId(id))).map(|r| r.cpu_ns);
        assert_eq!((cpu(1), cpu(2)), (Some(750.0), Some(250.0)));
    }

    #[test]
    fn a_thread_too_quick_to_be_sampled_gives_its_time_to_where_it_left_the_cpu() {
        let mut threads = Threads::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 3, 1.0);
        threads.wait_end(&WaitEnd {
            thread: T,
            start: MonotonicNs(10),
            blocked_ns: 80,
            runnable_ns: 5,
            waker: None,
        });
        threads.thread_end(times(8, 5, 80));
        let rows = threads.finish(&[]);
        assert!(rows.iter().any(|r| r.place == Place::Stack(StackId(5)) && r.cpu_ns == 8.0));
        assert_eq!(sums(&rows), (8.0, 5.0, 80.0));
    }

    #[test]
    fn stolen_time_is_runnable_where_it_was_sampled() {
        let mut threads = Threads::default();
        for stack in [1, 1, 1, 2] {
            threads.cpu_sample(T, MonotonicNs(0), StackId(stack));
        }
        let times = ThreadTimes { stolen_ns: 40, ..times(1_000, 40, 0) };
        let rows = threads.finish(&running(times, ON_CPU));
        let stolen: Vec<_> = rows.iter().filter(|row| row.reason.is_some()).collect();
        assert!(stolen.iter().all(|row| row.reason.unwrap().state == WaitStateKey::Stolen));
        assert_eq!(stolen.iter().map(|row| row.runnable_ns).sum::<f64>(), 40.0);
        assert_eq!(sums(&rows), (1_000.0, 40.0, 0.0));
    }

    #[test]
    fn a_wait_in_progress_is_sliced_at_the_end() {
        let mut threads = Threads::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 10, 1.0);
        let waiting =
            Progress::Waiting { start: MonotonicNs(10), blocked_ns: 60, runnable_ns: 30, kept: true };
        let rows = threads.finish(&running(times(10, 30, 60), waiting));
        let row = rows.iter().find(|r| r.reason.is_some()).unwrap();
        assert_eq!((row.blocked_ns, row.runnable_ns), (60.0, 30.0));
        assert_eq!(sums(&rows), (10.0, 30.0, 60.0));
    }

    #[test]
    fn a_thread_that_never_woke_says_so() {
        let waiting =
            Progress::Waiting { start: MonotonicNs(0), blocked_ns: 100, runnable_ns: 0, kept: false };
        let rows = Threads::default().finish(&running(times(0, 0, 100), waiting));
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].place, Place::Marker(Marker::WaitingSinceBefore));
    }

    #[test]
    fn an_end_without_its_start_does_not_close_another_wait() {
        let mut threads = Threads::default();
        threads.wait_start(T, MonotonicNs(50), StackId(5), SLEEP, 1, 1.0);
        threads.wait_end(&WaitEnd {
            thread: T,
            start: MonotonicNs(10),
            blocked_ns: 1,
            runnable_ns: 0,
            waker: None,
        });
        assert_eq!(threads.unmatched_wait_ends(), 1);
        threads.wait_end(&WaitEnd {
            thread: T,
            start: MonotonicNs(50),
            blocked_ns: 9,
            runnable_ns: 0,
            waker: None,
        });
        let rows = threads.finish(&running(times(1, 0, 9), ON_CPU));
        assert!(rows.iter().any(|r| r.place == Place::Stack(StackId(5)) && r.blocked_ns == 9.0));
    }

    #[test]
    fn the_wait_before_the_recording_is_told_from_lost_stacks() {
        let mut threads = Threads::default();
        threads.wait_start(T, MonotonicNs(60), StackId(5), SLEEP, 10, 1.0);
        threads.wait_end(&WaitEnd {
            thread: T,
            start: MonotonicNs(60),
            blocked_ns: 20,
            runnable_ns: 0,
            waker: None,
        });
        // Asleep until 50, on CPU to 60, asleep to 80, on CPU to 90; of the 20 ns after that no stack arrived.
        let rows = threads.finish(&running(times(20, 0, 90), ON_CPU));
        let at = |marker| rows.iter().find(|r| r.place == Place::Marker(marker)).map(|r| r.blocked_ns);
        assert_eq!(at(Marker::WaitingSinceBefore), Some(50.0));
        assert_eq!(at(Marker::StackLost), Some(20.0));
    }

    proptest! {
        /// Whatever is kept, thinned or lost, each column sums to the scheduler's total.
        #[test]
        fn columns_sum_to_the_exact_totals(
            waits in prop::collection::vec((1u32..5, 0u64..1_000, 0u64..1_000, any::<bool>(), 1.0f64..50.0), 0..40),
            samples in 0u32..20, oncpu in 0u64..1_000_000, extra in 0u64..1_000_000,
        ) {
            let mut threads = Threads::default();
            (0..samples).for_each(|s| threads.cpu_sample(T, MonotonicNs(0), StackId(s % 3)));
            let (mut blocked, mut runnable, mut clock) = (extra, extra / 2, 0);
            for (stack, b, r, kept, weight) in waits {
                clock += 10_000;
                blocked += b;
                runnable += r;
                if kept {
                    threads.wait_start(T, MonotonicNs(clock), StackId(stack), SLEEP, 7, weight);
                    threads.wait_end(&WaitEnd { thread: T, start: MonotonicNs(clock), blocked_ns: b, runnable_ns: r, waker: None });
                }
            }
            let rows = threads.finish(&running(times(oncpu, runnable, blocked), ON_CPU));
            let (c, r, b) = sums(&rows);
            for (got, want) in [(c, oncpu), (r, runnable), (b, blocked)] {
                assert!((got - want as f64).abs() <= 1.0 + want as f64 * 1e-9, "{got} {want}");
            }
        }
    }
}
