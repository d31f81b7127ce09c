//! The exact times of threads are divided among their samples. Samples and kept waits say *where* a
//! thread's time went, and the scheduler's totals say *how much*. So every column of a thread sums
//! to its true time, whatever was downsampled or lost.
//!
//! - cpu: each of the thread's n samples stands for 1/n of its on-CPU time. A thread that ran and
//!   was never sampled gives its time to the stacks it left the CPU with, in proportion to how long
//!   it had run before each. Time stolen from it while it held a CPU is spread over the same
//!   stacks, as runnable. A thread that runs collections on the side has two such sums, where the
//!   time of its collections is known: one is shared by the samples in them, the rest by the
//!   others.
//! - runnable, blocked: a wait that the sampler kept stands for `weight` waits. One that the task
//!   iterator saw stands for itself alone, whether it was kept or not. That is unbiased: scans do
//!   not depend on the sampler (`ebpf-probes/src/iter.rs`), so each wait that no scan saw still
//!   stands for itself in the mean. Where waits were downsampled, the estimated ones share
//!   what is left of the exact total, each row by its ratio to all of them; where nothing was
//!   downsampled, what is missing is shown under a marker.
//!
//! A ratio of two estimates is biased when few waits were kept: of 5 at two places, one with waits
//! three times as long, the share of the short ones came out 6 points above a true 25, of 70 still
//! 0.3. Two things against it: the probe keeps the first waits of every thread, so that some 64
//! stand behind every ratio (`ebpf-probes/src/sampler.rs`), and Beale's correction takes off what
//! is left to first order.

use crate::recent::RecentStacks;
use account::{ThreadAccount, no_times};
use counted::CountedThreads;
use ended::EndedThreads;
use foldhash::HashMap;
use perfusion_model::event::{
    MonotonicNs, ThreadId, ThreadSnapshot, ThreadTimes, WaitEnd, WakeOrigin,
};
use perfusion_model::stack::StackId;
use waits::{EndedWait, OpenWait};

mod account;
mod counted;
mod cut;
mod ended;
mod estimate;
mod names;
mod on_cpu;
mod row;
mod waits;

pub use row::{StackOrMarker, ThreadRow, WaitReason, WaitStateKey, Waker};
pub use waits::WaitInProgress;

/// Collects one window of all threads.
#[derive(Default)]
pub struct ThreadAccounts {
    threads: HashMap<u32, ThreadAccount>,
    ended: EndedThreads,
    counted: CountedThreads,
    unmatched_wait_ends: u64,
    wakers_capped: u64,
    /// Names of renamed threads in this window.
    names: usize,
    /// Whether it is kept where each was lately.
    remembers: bool,
}

impl ThreadAccounts {
    fn thread(&mut self, id: ThreadId) -> &mut ThreadAccount {
        // A tid that is used again belongs to a new thread. The old one has ended and was moved
        // away by `thread_end`, unless that is still to come, or lost.
        if self.threads.get(&id.tid).is_some_and(|thread| thread.id != id)
            && let Some(old) = self.threads.remove(&id.tid)
        {
            let times = no_times(old.id);
            self.ended.keep(old, &times);
        }
        let thread = self.threads.entry(id.tid).or_default();
        thread.id = id;
        thread
    }

    /// From now on it is kept where each thread was lately ([`Self::mostly_between`]).
    pub fn remember(&mut self) {
        self.remembers = true;
    }

    fn note(&mut self, id: ThreadId, note: impl FnOnce(&mut RecentStacks)) {
        if self.remembers {
            note(self.thread(id).recent.get_or_insert_default());
        }
    }

    /// Where a thread was most of the time between two moments, as far as the last places of it say
    /// that are kept.
    #[must_use]
    pub fn mostly_between(
        &self,
        id: ThreadId,
        begin: MonotonicNs,
        end: MonotonicNs,
    ) -> Option<StackId> {
        self.threads
            .get(&id.tid)
            .filter(|thread| thread.id == id)?
            .recent
            .as_ref()?
            .mostly_between(begin, end)
    }

    /// Threads of which something is known that no window has.
    pub fn ids(&self) -> impl Iterator<Item = ThreadId> {
        self.threads.values().map(|thread| thread.id)
    }

    /// A CPU sample of `id` with this stack.
    pub fn cpu_sample(&mut self, id: ThreadId, time: MonotonicNs, stack: StackId) {
        self.note(id, |recent| recent.seen(time, stack));
        let thread = self.thread(id);
        thread.on_cpu.sampled(stack);
        thread.last_run = Some((time, stack));
    }

    /// A CPU sample of `id` while it runs a collection.
    pub fn collecting_sample(&mut self, id: ThreadId, time: MonotonicNs, stack: StackId) {
        let thread = self.thread(id);
        thread.collected.on_cpu.sampled(stack);
        thread.last_run = Some((time, stack));
    }

    /// The thread leaves the CPU while it runs a collection, of which it had run so long. The
    /// caller also calls [`ThreadAccounts::wait_start`], with a running time of 0. Otherwise the
    /// thread's other work would get the stacks of its collections where it is too short to be
    /// sampled.
    pub fn collecting_slice(&mut self, id: ThreadId, stack: StackId, ran_ns: u64, weight: f64) {
        self.thread(id).collected.on_cpu.left(stack, ran_ns, weight);
    }

    /// The thread has run a collection, for so long on a CPU; `None` when that is not known, or not
    /// all of it was in this window.
    pub fn collected(&mut self, id: ThreadId, cpu_ns: Option<u64>) {
        // What a process says of its own threads may be made up: this id is another process's now.
        if self.threads.get(&id.tid).is_some_and(|thread| thread.id.pid != id.pid) {
            return;
        }
        self.thread(id).collected.add(cpu_ns);
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
        self.note(id, |recent| recent.seen(time, stack));
        let thread = self.thread(id);
        thread.on_cpu.left(stack, ran_ns, weight);
        thread.last_run = Some((time, stack));
        thread.waits.begin(OpenWait::new(time, stack, reason, weight));
    }

    /// The iterator saw the thread in the wait that began at `start`: from now on it stands for
    /// itself. Answers its stack when that is known.
    pub fn seen_waiting(&mut self, id: ThreadId, start: MonotonicNs) -> Option<StackId> {
        self.thread(id).waits.stands_for_itself(start)
    }

    /// The iterator saw the thread in the wait that began at `start`, with this stack.
    pub fn off_cpu(
        &mut self,
        id: ThreadId,
        start: MonotonicNs,
        stack: StackId,
        reason: WaitReason,
    ) {
        if self.seen_waiting(id, start).is_some() {
            return;
        }
        self.note(id, |recent| recent.seen(start, stack));
        self.thread(id).waits.scanned(OpenWait::new(start, stack, reason, 1.0));
    }

    /// The scheduler's note of when the thread left the CPU for the wait that began at `start`.
    pub fn left_cpu(&mut self, id: ThreadId, start: MonotonicNs, at: MonotonicNs) {
        self.thread(id).waits.left_cpu(start, at);
    }

    /// The wait a thread is in, as far as it was seen.
    #[must_use]
    pub fn waiting(&self, tid: u32) -> Option<WaitInProgress> {
        self.threads.get(&tid)?.waits.progress()
    }

    /// Where a thread was when it was last seen running: at a sample, or when it left its CPU.
    #[must_use]
    pub fn last_run(&self, tid: u32) -> Option<(MonotonicNs, StackId)> {
        self.threads.get(&tid)?.last_run
    }

    /// Somebody ended the blocked part of the wait of thread `tid`; `stack` is what that thread was
    /// doing, if it was one and its stack was taken.
    pub fn wake(
        &mut self,
        tid: u32,
        start: MonotonicNs,
        origin: WakeOrigin,
        stack: Option<StackId>,
    ) {
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.waits.woken(start, origin, stack);
        }
    }

    /// The kept wait is over.
    pub fn wait_end(&mut self, end: &WaitEnd) {
        let counted = self.counted.wait(end.thread.tid, end.start);
        let until = end.start.0.saturating_add(end.blocked_ns).saturating_add(end.runnable_ns);
        self.note(end.thread, |recent| recent.waited(end.start, MonotonicNs(until)));
        let thread = self.thread(end.thread);
        match thread.waits.end(end, counted, thread.last_run.is_some()) {
            EndedWait::Counted => {}
            EndedWait::WakerCapped => self.wakers_capped += 1,
            EndedWait::Unmatched => self.unmatched_wait_ends += 1,
        }
    }

    /// A thread's last switch, with its exact totals. True when it has rows of its own.
    pub fn thread_end(&mut self, times: ThreadTimes) -> bool {
        let id = times.thread;
        // Its id may belong to another already.
        let same = self.threads.get(&id.tid).is_some_and(|thread| thread.id == id);
        let thread = if same { self.threads.remove(&id.tid) } else { None };
        let rest = self.counted.end(&times);
        self.ended.keep(ThreadAccount { id, ..thread.unwrap_or_default() }, &rest)
    }

    /// Threads of which only the sums of all are kept.
    #[must_use]
    pub fn summed_up(&self) -> u64 {
        self.ended.summed_up()
    }

    /// Waits whose waker is not told, because their thread had very many.
    #[must_use]
    pub fn wakers_capped(&self) -> u64 {
        self.wakers_capped
    }

    /// Wait ends whose start never arrived.
    #[must_use]
    pub fn unmatched_wait_ends(&self) -> u64 {
        self.unmatched_wait_ends
    }

    /// Closes the last window: slices waits in progress and makes every column of a thread sum to
    /// its exact total. `running` are the threads that still exist, with their totals as of now.
    #[must_use]
    pub fn finish(mut self, running: &[ThreadSnapshot]) -> Vec<ThreadRow> {
        self.cut(running, &mut |stack| stack, true)
    }
}

#[cfg(test)]
mod tests {
    use super::{StackOrMarker, ThreadAccounts, ThreadRow, WaitReason, WaitStateKey, Waker};
    use perfusion_model::event::WakeOrigin;
    use perfusion_model::event::{
        MonotonicNs, ThreadId, ThreadProgress, ThreadSnapshot, ThreadTimes, WaitEnd,
    };
    use perfusion_model::feature::Feature;
    use perfusion_model::frame::Marker;
    use perfusion_model::stack::StackId;
    use proptest::prelude::{any, prop, proptest};

    pub(super) const T: ThreadId = ThreadId { pid: 7, tid: 8 };

    /// The end of a wait that was blocked all the time, and that nobody is known to have ended.
    pub(super) fn end(start: u64, blocked_ns: u64) -> WaitEnd {
        WaitEnd {
            thread: T,
            start: MonotonicNs(start),
            blocked_ns,
            runnable_ns: 0,
            waker: None,
            woken_throttled: false,
            new_thread: false,
        }
    }
    pub(super) const SLEEP: WaitReason = WaitReason {
        state: WaitStateKey::Interruptible,
        syscall: Some("sleep"),
        io: false,
        suspended: false,
    };

    fn times(oncpu_ns: u64, runnable_ns: u64, blocked_ns: u64) -> ThreadTimes {
        ThreadTimes {
            thread: T,
            oncpu_ns,
            runnable_ns,
            stolen_ns: 0,
            blocked_ns,
            since: MonotonicNs(0),
            left_out: 0,
        }
    }

    fn running(times: ThreadTimes, progress: ThreadProgress) -> [ThreadSnapshot; 1] {
        [ThreadSnapshot { times, at: MonotonicNs(100), progress }]
    }

    pub(super) const ON_CPU: ThreadProgress = ThreadProgress::OnCpu { since: MonotonicNs(0) };

    fn sums(rows: &[ThreadRow]) -> (f64, f64, f64) {
        rows.iter().fold((0.0, 0.0, 0.0), |(c, r, b), row| {
            (c + row.cpu_ns, r + row.runnable_ns, b + row.blocked_ns)
        })
    }

    #[test]
    fn what_rules_leave_out_of_a_process_is_in_no_row() {
        let columns = |left_out: u32| {
            let mut threads = ThreadAccounts::default();
            threads.cpu_sample(T, MonotonicNs(1), StackId(1));
            threads.wait_start(T, MonotonicNs(2), StackId(2), SLEEP, 1, 1.0);
            threads.wait_end(&end(2, 60));
            let rows =
                threads.finish(&running(ThreadTimes { left_out, ..times(40, 0, 60) }, ON_CPU));
            assert!(rows.iter().all(|row| row.cpu_ns + row.blocked_ns > 0.0), "{rows:?}");
            sums(&rows)
        };
        let (cpu, waits) = (Feature::Cpu as u32, Feature::Waits as u32);
        assert_eq!(columns(0), (40.0, 0.0, 60.0));
        assert_eq!(columns(waits), (40.0, 0.0, 0.0));
        assert_eq!(columns(cpu), (0.0, 0.0, 60.0));
        assert_eq!(columns(cpu | waits), (0.0, 0.0, 0.0));
    }

    /// Of 10,000 waits at each of two places one in 100 is kept, a hundred times over. The true
    /// time of a place must lie within 2.576 standard errors of the estimate about 99 times;
    /// fewer than 96 would have a chance of 1 in 300.
    #[test]
    fn the_stated_error_covers_the_truth_as_often_as_it_says() {
        let mut random = 88_172_645_463_325_252u64;
        let mut next = || {
            // Xorshift64.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let mut covered = 0;
        for _ in 0..100 {
            let mut threads = ThreadAccounts::default();
            let (mut truth, mut blocked, mut runnable, mut clock) = (0.0, 0, 0, 0);
            for n in 0..20_000u64 {
                // Short waits at place 1, long ones at place 2, of lengths that differ.
                let place = n % 2;
                let wait = if place == 0 { 50 + next() % 100 } else { 200 + next() % 900 };
                let queue = next() % 40;
                clock += 1;
                let start = MonotonicNs(clock);
                clock += wait + queue;
                blocked += wait;
                runnable += queue;
                truth += if place == 0 { (wait + queue) as f64 } else { 0.0 };
                if next() % 100 == 0 {
                    threads.wait_start(T, start, StackId(1 + place as u32), SLEEP, 1, 100.0);
                    threads.wait_end(&WaitEnd {
                        thread: T,
                        start,
                        blocked_ns: wait,
                        runnable_ns: queue,
                        waker: None,
                        woken_throttled: false,
                        new_thread: false,
                    });
                }
            }
            let rows = threads.finish(&running(times(1, runnable, blocked), ON_CPU));
            let row = rows
                .iter()
                .find(|r| r.place == StackOrMarker::Stack(StackId(1)) && r.reason.is_some())
                .unwrap();
            assert!(row.wait_stderr_ns > 0.0 && row.wait_stderr_ns < truth);
            let error = (row.blocked_ns + row.runnable_ns - truth).abs();
            covered += usize::from(error <= 2.576 * row.wait_stderr_ns);
        }
        assert!((96..=100).contains(&covered), "{covered} of 100");
    }

    /// Threads with 60 waits each, of which a chance of 1 in 1000 and one of 32 in n for the
    /// n-th (less than `ebpf-probes/src/sampler.rs` gives) keep some 52. No thread's estimate is
    /// much worth, but those of 4000 must not all err on the same side.
    #[test]
    fn estimates_from_few_waits_are_not_all_wrong_in_the_same_direction() {
        let mut random = 88_172_645_463_325_252u64;
        let mut next = || {
            // Xorshift64.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random >> 11
        };
        let (mut error, mut all) = (0.0, 0.0);
        for _ in 0..4000 {
            let mut threads = ThreadAccounts::default();
            let (mut truth, mut blocked) = (0, 0);
            for n in 1..=60u64 {
                let short = next() % 2 == 0;
                let wait = if short { 100 } else { 1000 };
                truth += if short { wait } else { 0 };
                blocked += wait;
                let kept = n <= 32 || next() % n < 32;
                if kept {
                    let (start, weight) = (MonotonicNs(n), (n as f64 / 32.0).max(1.0));
                    threads.wait_start(T, start, StackId(u32::from(short)), SLEEP, 1, weight);
                    threads.wait_end(&WaitEnd {
                        thread: T,
                        start,
                        blocked_ns: wait,
                        runnable_ns: 0,
                        waker: None,
                        woken_throttled: false,
                        new_thread: false,
                    });
                }
            }
            let rows = threads.finish(&running(times(1, 0, blocked), ON_CPU));
            let at = |row: &&ThreadRow| {
                row.reason.is_some() && row.place == StackOrMarker::Stack(StackId(1))
            };
            error += rows.iter().find(at).map_or(0.0, |row| row.blocked_ns) - truth as f64;
            all += truth as f64;
        }
        // The mean of so many has a standard error of 0.002 of the truth, and the correction leaves
        // as much; the plain ratio is off by 0.013.
        assert!((error / all).abs() < 0.006, "off by {} of the truth", error / all);
    }

    #[test]
    fn samples_share_the_exact_time_on_cpu() {
        let mut threads = ThreadAccounts::default();
        for stack in [1, 1, 1, 2] {
            threads.cpu_sample(T, MonotonicNs(0), StackId(stack));
        }
        let rows = threads.finish(&running(times(1_000, 0, 0), ON_CPU));
        let cpu = |id| {
            rows.iter().find(|r| r.place == StackOrMarker::Stack(StackId(id))).map(|r| r.cpu_ns)
        };
        assert_eq!((cpu(1), cpu(2)), (Some(750.0), Some(250.0)));
    }

    #[test]
    fn collections_have_their_own_exact_time_where_it_is_known() {
        let rows = |collected: &[Option<u64>], inside: u32, outside: u32| {
            let mut threads = ThreadAccounts::default();
            (0..inside).for_each(|_| threads.collecting_sample(T, MonotonicNs(0), StackId(1)));
            (0..outside).for_each(|_| threads.cpu_sample(T, MonotonicNs(0), StackId(2)));
            collected.iter().for_each(|&ns| threads.collected(T, ns));
            threads.finish(&running(times(1_000, 0, 0), ON_CPU))
        };
        let cpu = |rows: &[ThreadRow], place| {
            rows.iter().filter(|r| r.place == place).map(|r| r.cpu_ns).sum::<f64>()
        };
        let [inside, outside] = [1, 2].map(|id| StackOrMarker::Stack(StackId(id)));
        let known = rows(&[Some(100), Some(150)], 3, 1);
        assert_eq!((cpu(&known, inside), cpu(&known, outside)), (250.0, 750.0));
        let unsure = rows(&[Some(100), None], 3, 1);
        assert_eq!((cpu(&unsure, inside), cpu(&unsure, outside)), (750.0, 250.0));
        let unseen = rows(&[Some(250)], 0, 1);
        assert_eq!(
            (cpu(&unseen, StackOrMarker::Marker(Marker::GarbageCollector)), cpu(&unseen, outside)),
            (250.0, 750.0)
        );
        // What is too little to be sampled has the stacks it left the CPU with, and none of those
        // of the other.
        let slices = |collected: Option<u64>, inside: u32| {
            let mut threads = ThreadAccounts::default();
            (0..inside).for_each(|_| threads.collecting_sample(T, MonotonicNs(0), StackId(1)));
            threads.wait_start(T, MonotonicNs(10), StackId(3), SLEEP, 30, 1.0);
            threads.collecting_slice(T, StackId(4), 70, 1.0);
            threads.wait_start(T, MonotonicNs(20), StackId(4), SLEEP, 0, 1.0);
            threads.collected(T, collected);
            let rows = threads.finish(&running(times(1_000, 0, 0), ON_CPU));
            [1, 3, 4].map(|id| cpu(&rows, StackOrMarker::Stack(StackId(id))))
        };
        assert_eq!(slices(Some(250), 1), [250.0, 750.0, 0.0]);
        assert_eq!(slices(Some(250), 0), [0.0, 750.0, 250.0]);
        assert_eq!(slices(None, 0), [0.0, 300.0, 700.0]);
        let only = rows(&[Some(400)], 1, 0);
        assert_eq!(
            (cpu(&only, inside), cpu(&only, StackOrMarker::Marker(Marker::NotSampled))),
            (400.0, 600.0)
        );
        let all = rows(&[Some(2_000)], 1, 0);
        assert_eq!(sums(&all), (1_000.0, 0.0, 0.0));
    }

    #[test]
    fn a_thread_too_quick_to_be_sampled_gives_its_time_to_where_it_left_the_cpu() {
        let mut threads = ThreadAccounts::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 3, 1.0);
        threads.wait_end(&WaitEnd {
            thread: T,
            start: MonotonicNs(10),
            blocked_ns: 80,
            runnable_ns: 5,
            waker: None,
            woken_throttled: false,
            new_thread: false,
        });
        threads.thread_end(times(8, 5, 80));
        let rows = threads.finish(&[]);
        assert!(
            rows.iter().any(|r| r.place == StackOrMarker::Stack(StackId(5)) && r.cpu_ns == 8.0)
        );
        assert_eq!(sums(&rows), (8.0, 5.0, 80.0));
    }

    #[test]
    fn stolen_time_is_runnable_where_it_was_sampled() {
        let mut threads = ThreadAccounts::default();
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
    fn of_very_many_ended_threads_the_last_are_only_summed_up() {
        let mut threads = ThreadAccounts::default();
        let mut kept = 0;
        for tid in 0..super::ended::MAX_ENDED_ROWS as u32 {
            let thread = ThreadId { pid: 7, tid };
            threads.cpu_sample(thread, MonotonicNs(5), StackId(1));
            // Two rows: of its samples, and of what it waited before.
            kept += usize::from(threads.thread_end(ThreadTimes { thread, ..times(10, 0, 5) }));
        }
        assert_eq!((kept, threads.summed_up()), (super::ended::MAX_ENDED_ROWS / 2, kept as u64));
        let rows = threads.finish(&[]);
        assert_eq!(rows.len(), super::ended::MAX_ENDED_ROWS + 1);
        let all = super::ended::MAX_ENDED_ROWS as f64;
        assert_eq!(sums(&rows), (10.0 * all, 0.0, 5.0 * all));
        assert_eq!(
            rows.iter().map(|row| row.samples).sum::<u64>(),
            super::ended::MAX_ENDED_ROWS as u64
        );
    }

    #[test]
    fn a_thread_woken_by_very_many_others_keeps_the_first_of_them_and_its_time() {
        let mut threads = ThreadAccounts::default();
        let wakers = super::waits::MAX_WAITS as u64 + 7;
        for n in 0..wakers {
            threads.wait_start(T, MonotonicNs(n * 10), StackId(5), SLEEP, 1, 1.0);
            threads.wait_end(&WaitEnd {
                thread: T,
                start: MonotonicNs(n * 10),
                blocked_ns: 9,
                runnable_ns: 0,
                waker: Some((ThreadId { pid: 1, tid: 2 + n as u32 }, [0; 16])),
                woken_throttled: false,
                new_thread: false,
            });
        }
        assert_eq!(threads.wakers_capped(), 7);
        let rows = threads.finish(&running(times(wakers, 0, 9 * wakers), ON_CPU));
        let of = |waker: fn(&Waker) -> bool| {
            rows.iter().filter(move |r| r.waker.as_ref().is_some_and(waker))
        };
        assert_eq!(
            of(|waker| matches!(waker, Waker::Thread { .. })).count(),
            super::waits::MAX_WAITS
        );
        let other: Vec<f64> =
            of(|waker| *waker == Waker::Other).map(|row| row.blocked_ns).collect();
        assert_eq!(other, [63.0]);
    }

    #[test]
    fn a_wait_in_progress_is_sliced_at_the_end() {
        let mut threads = ThreadAccounts::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 10, 1.0);
        let waiting = ThreadProgress::Waiting {
            start: MonotonicNs(10),
            blocked_ns: 60,
            runnable_ns: 30,
            kept: true,
            new_thread: false,
            woken_throttled: false,
        };
        let rows = threads.finish(&running(times(10, 30, 60), waiting));
        let row = rows.iter().find(|r| r.reason.is_some()).unwrap();
        assert_eq!((row.blocked_ns, row.runnable_ns), (60.0, 30.0));
        assert_eq!(sums(&rows), (10.0, 30.0, 60.0));
    }

    #[test]
    fn a_thread_that_never_woke_says_so() {
        let waiting = ThreadProgress::Waiting {
            start: MonotonicNs(0),
            blocked_ns: 100,
            runnable_ns: 0,
            kept: false,
            new_thread: false,
            woken_throttled: false,
        };
        let rows = ThreadAccounts::default().finish(&running(times(0, 0, 100), waiting));
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].place, StackOrMarker::Marker(Marker::WaitingSinceBefore));
    }

    #[test]
    fn a_wait_that_was_scanned_has_its_stack_and_stands_for_itself() {
        let mut threads = ThreadAccounts::default();
        // Asleep since before the recording, which began at 0.
        threads.off_cpu(T, MonotonicNs(0), StackId(1), SLEEP);
        threads.wait_end(&end(0, 40));
        // Kept with a probability of 1/10, and scanned.
        threads.wait_start(T, MonotonicNs(50), StackId(2), SLEEP, 10, 10.0);
        assert_eq!(threads.seen_waiting(T, MonotonicNs(50)), Some(StackId(2)));
        assert_eq!(threads.seen_waiting(T, MonotonicNs(49)), None);
        threads.wait_end(&end(50, 30));
        // Kept with a probability of 1/10, and stands for what nobody saw.
        threads.wait_start(T, MonotonicNs(90), StackId(3), SLEEP, 10, 10.0);
        threads.wait_end(&end(90, 1));
        let rows = threads.finish(&running(times(30, 0, 85), ON_CPU));
        let at = |id| {
            rows.iter().find(|r| r.reason.is_some() && r.place == StackOrMarker::Stack(StackId(id)))
        };
        let blocked = |id| at(id).map(|row| row.blocked_ns);
        assert_eq!([blocked(1), blocked(2), blocked(3)], [Some(40.0), Some(30.0), Some(15.0)]);
        assert!(rows.iter().all(|row| !matches!(row.place, StackOrMarker::Marker(_))), "{rows:?}");
    }

    #[test]
    fn the_runnable_part_of_a_wait_that_ended_in_a_throttled_cgroup_is_the_limits() {
        let mut threads = ThreadAccounts::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 10, 1.0);
        threads.wake(T.tid, MonotonicNs(10), WakeOrigin::Timer, None);
        threads.wait_end(&WaitEnd {
            thread: T,
            start: MonotonicNs(10),
            blocked_ns: 60,
            runnable_ns: 20,
            waker: Some((ThreadId { pid: 1, tid: 1 }, [0; 16])),
            woken_throttled: true,
            new_thread: false,
        });
        let rows = threads.finish(&running(times(20, 20, 60), ON_CPU));
        let of = |state| {
            let row =
                rows.iter().find(|row| row.reason.is_some_and(|reason| reason.state == state));
            row.map(|row| (row.blocked_ns, row.runnable_ns, row.waker))
        };
        assert_eq!(of(WaitStateKey::Interruptible), Some((60.0, 0.0, Some(Waker::Timer))));
        assert_eq!(of(WaitStateKey::Throttled), Some((0.0, 20.0, None)));

        // One that is still in progress at the end of a window.
        let mut threads = ThreadAccounts::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 10, 1.0);
        let waiting = |runnable_ns| ThreadProgress::Waiting {
            start: MonotonicNs(10),
            blocked_ns: 60,
            runnable_ns,
            kept: true,
            new_thread: false,
            woken_throttled: true,
        };
        for (runnable, blocked, limited) in [(30, 60.0, 30.0), (50, 0.0, 20.0)] {
            let rows = threads.cut(
                &running(times(10, runnable, 60), waiting(runnable)),
                &mut |stack| stack,
                false,
            );
            let sum = |state| {
                let of = rows
                    .iter()
                    .filter(|row| row.reason.is_some_and(|reason| reason.state == state));
                of.fold((0.0, 0.0), |(b, r), row| (b + row.blocked_ns, r + row.runnable_ns))
            };
            assert_eq!(sum(WaitStateKey::Interruptible), (blocked, 0.0));
            assert_eq!(sum(WaitStateKey::Throttled), (0.0, limited));
        }
    }

    #[test]
    fn waits_that_were_ended_at_different_places_are_told_apart() {
        let by = ThreadId { pid: 1, tid: 1 };
        let mut threads = ThreadAccounts::default();
        for (start, place) in
            [(10, Some(StackId(7))), (20, Some(StackId(8))), (30, Some(StackId(7))), (40, None)]
        {
            threads.wait_start(T, MonotonicNs(start), StackId(5), SLEEP, 1, 1.0);
            threads.wake(T.tid, MonotonicNs(start - 1), WakeOrigin::Thread, Some(StackId(9)));
            threads.wake(T.tid, MonotonicNs(start), WakeOrigin::Thread, place);
            threads.wait_end(&WaitEnd { waker: Some((by, [0; 16])), ..end(start, 4) });
        }
        let rows = threads.finish(&running(times(4, 0, 16), ON_CPU));
        let of = |place| {
            let waker = Some(Waker::Thread { id: by, comm: [0; 16], stack: place });
            rows.iter().find(|row| row.waker == waker).map(|row| (row.place, row.blocked_ns))
        };
        let wait = |blocked| Some((StackOrMarker::Stack(StackId(5)), blocked));
        assert_eq!(
            [of(Some(StackId(7))), of(Some(StackId(8))), of(None)],
            [wait(8.0), wait(4.0), wait(4.0)]
        );
        assert_eq!(sums(&rows).2, 16.0);
    }

    #[test]
    fn an_end_without_its_start_does_not_close_another_wait() {
        let mut threads = ThreadAccounts::default();
        threads.wait_start(T, MonotonicNs(50), StackId(5), SLEEP, 1, 1.0);
        threads.wait_end(&end(10, 1));
        assert_eq!(threads.unmatched_wait_ends(), 1);
        threads.wait_end(&end(50, 9));
        let rows = threads.finish(&running(times(1, 0, 9), ON_CPU));
        assert!(
            rows.iter().any(|r| r.place == StackOrMarker::Stack(StackId(5)) && r.blocked_ns == 9.0)
        );
    }

    #[test]
    fn the_wait_before_the_recording_is_told_from_lost_stacks() {
        let mut threads = ThreadAccounts::default();
        threads.wait_end(&end(0, 50));
        threads.wait_start(T, MonotonicNs(60), StackId(5), SLEEP, 10, 1.0);
        threads.wait_end(&end(60, 20));
        assert_eq!(threads.unmatched_wait_ends(), 0);
        // Asleep until 50, on CPU to 60, asleep to 80, on CPU to 90; of the 20 ns after that no
        // stack arrived.
        let rows = threads.finish(&running(times(20, 0, 90), ON_CPU));
        let at = |marker| {
            rows.iter().find(|r| r.place == StackOrMarker::Marker(marker)).map(|r| r.blocked_ns)
        };
        assert_eq!(at(Marker::WaitingSinceBefore), Some(50.0));
        assert_eq!(at(Marker::StackLost), Some(20.0));
    }

    #[test]
    fn a_new_threads_wait_for_its_first_cpu_is_not_older_than_the_recording() {
        let since = MonotonicNs(1_000);
        let times = |runnable_ns| ThreadTimes { since, ..times(10, runnable_ns, 0) };
        let new = |rows: &[ThreadRow]| {
            let waits: Vec<&ThreadRow> =
                rows.iter().filter(|row| row.runnable_ns + row.blocked_ns > 0.0).collect();
            let [row] = waits[..] else { panic!("{rows:?}") };
            assert_eq!(row.place, StackOrMarker::Marker(Marker::NotYetRun));
            assert_eq!(row.reason.map(|reason| reason.state), Some(WaitStateKey::Preempted));
            row.runnable_ns
        };
        let mut threads = ThreadAccounts::default();
        threads.wait_end(&WaitEnd { runnable_ns: 70, new_thread: true, ..end(1_000, 0) });
        assert_eq!(new(&threads.finish(&running(times(70), ON_CPU))), 70.0);

        // One that waits across the end of a window.
        let mut threads = ThreadAccounts::default();
        let waiting = |runnable_ns| {
            let start = since;
            ThreadProgress::Waiting {
                start,
                blocked_ns: 0,
                runnable_ns,
                kept: false,
                new_thread: true,
                woken_throttled: false,
            }
        };
        let first = threads.cut(
            &running(ThreadTimes { oncpu_ns: 0, ..times(50) }, waiting(50)),
            &mut |stack| stack,
            false,
        );
        threads.wait_end(&WaitEnd { runnable_ns: 70, new_thread: true, ..end(1_000, 0) });
        assert_eq!([new(&first), new(&threads.finish(&running(times(70), ON_CPU)))], [50.0, 20.0]);
    }

    #[test]
    fn waits_the_sampler_left_out_are_not_taken_for_the_one_before_the_recording() {
        let mut threads = ThreadAccounts::default();
        // Asleep until 50; then 100 times 10 ns, of which the fortieth wait is kept.
        threads.wait_end(&end(0, 50));
        threads.wait_start(T, MonotonicNs(900), StackId(5), SLEEP, 10, 100.0);
        threads.wait_end(&end(900, 10));
        let rows = threads.finish(&running(times(1_000, 0, 1_050), ON_CPU));
        let at =
            |place| rows.iter().filter(|r| r.place == place).map(|r| r.blocked_ns).sum::<f64>();
        assert_eq!(at(StackOrMarker::Marker(Marker::WaitingSinceBefore)), 50.0);
        assert_eq!(at(StackOrMarker::Stack(StackId(5))), 1_000.0);

        // One in ten kept of 100 waits of 10 ns, and then one of 30 µs that was not: the others do
        // not stand for it, and say that they are unsure.
        let mut threads = ThreadAccounts::default();
        for n in 1..=10 {
            threads.wait_start(T, MonotonicNs(100 * n), StackId(5), SLEEP, 10, 10.0);
            threads.wait_end(&end(100 * n, 10));
        }
        let rows = threads.finish(&running(times(1_000, 0, 31_000), ON_CPU));
        let at = |place| {
            rows.iter()
                .find(|r| r.place == place && r.blocked_ns > 0.0)
                .map_or((0.0, 0.0), |r| (r.blocked_ns, r.wait_stderr_ns))
        };
        let (short, error) = at(StackOrMarker::Stack(StackId(5)));
        assert!(
            (1_000.0..2_300.0).contains(&short) && error >= short - 1_000.0,
            "{short} ± {error}"
        );
        assert_eq!(at(StackOrMarker::Marker(Marker::StackLost)).0, 31_000.0 - short);

        // Nothing kept at all: the thread did run, and its waits are lost, not older than the
        // recording.
        let rows = ThreadAccounts::default().finish(&running(times(1_000, 0, 1_050), ON_CPU));
        let at = |marker| {
            rows.iter().find(|r| r.place == StackOrMarker::Marker(marker)).map(|r| r.blocked_ns)
        };
        assert_eq!((at(Marker::WaitingSinceBefore), at(Marker::StackLost)), (None, Some(1_050.0)));
    }

    #[test]
    fn a_thread_id_used_again_before_the_first_threads_end_arrives_keeps_the_two_apart() {
        let other = ThreadId { pid: 9, tid: T.tid };
        let mut threads = ThreadAccounts::default();
        threads.cpu_sample(T, MonotonicNs(10), StackId(1));
        threads.cpu_sample(other, MonotonicNs(20), StackId(2));
        threads.thread_end(times(70, 0, 0));
        threads.thread_end(ThreadTimes {
            thread: other,
            since: MonotonicNs(15),
            ..times(30, 0, 0)
        });
        let rows = threads.finish(&[]);
        let of = |id, stack| {
            let row = rows
                .iter()
                .find(|r| r.thread == id && r.place == StackOrMarker::Stack(StackId(stack)));
            row.map(|row| row.cpu_ns)
        };
        // Of the first one's time it is not known where it was spent; none of it is the other's.
        assert_eq!([of(T, 1), of(other, 2)], [Some(0.0), Some(30.0)]);
        let lost = rows
            .iter()
            .find(|r| r.thread == T && r.place == StackOrMarker::Marker(Marker::NotSampled));
        assert_eq!(lost.map(|row| row.cpu_ns), Some(70.0));
        assert_eq!(rows.len(), 3);
    }

    proptest! {
        /// Whatever is kept, downsampled or lost, each column sums to the scheduler's total.
        #[test]
        fn columns_sum_to_the_exact_totals(
            waits in prop::collection::vec(
                (1u32..5, 0u64..1_000, 0u64..1_000, any::<bool>(), any::<bool>(), 1.0f64..50.0),
                0..40,
            ),
            samples in 0u32..20, oncpu in 0u64..1_000_000, extra in 0u64..1_000_000,
        ) {
            let mut threads = ThreadAccounts::default();
            (0..samples).for_each(|s| threads.cpu_sample(T, MonotonicNs(0), StackId(s % 3)));
            let (mut blocked, mut runnable, mut clock) = (extra, extra / 2, 0);
            for (stack, b, r, kept, scanned, weight) in waits {
                clock += 10_000;
                blocked += b;
                runnable += r;
                if kept {
                    threads.wait_start(T, MonotonicNs(clock), StackId(stack), SLEEP, 7, weight);
                }
                if scanned {
                    threads.off_cpu(T, MonotonicNs(clock), StackId(stack), SLEEP);
                }
                if kept || scanned {
                    threads.wait_end(&WaitEnd { runnable_ns: r, ..end(clock, b) });
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
