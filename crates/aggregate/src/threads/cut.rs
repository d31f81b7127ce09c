//! Where one window ends and the next begins. Threads live through it: a wait in progress is
//! sliced, and keeps its stack and its weight.

use super::account::{ThreadAccount, no_times};
use super::waits::ThreadWaits;
use super::{ThreadAccounts, ThreadRow};
use crate::recent::RecentStacks;
use foldhash::HashMap;
use perfusion_model::event::ThreadSnapshot;
use perfusion_model::stack::StackId;

impl ThreadAccounts {
    /// Closes the window and begins the next: slices waits in progress and makes every column of a
    /// thread sum to its exact time in this window. `running` are the threads that still exist,
    /// with their totals. `carry` takes a stack over to the next window, unless this is the `last`.
    pub fn cut(
        &mut self,
        running: &[ThreadSnapshot],
        carry: &mut dyn FnMut(StackId) -> StackId,
        last: bool,
    ) -> Vec<ThreadRow> {
        let mut rows = Vec::new();
        let mut ended = HashMap::default();
        let mut next = HashMap::default();
        self.counted.begin_cut();
        for ThreadSnapshot { times, progress, .. } in running {
            let (id, tid) = (times.thread, times.thread.tid);
            // Still in the map, but its end was told: one life must not count twice.
            if self.counted.has_ended_lately(times) {
                ended.insert(tid, times.since);
                continue;
            }
            let mut thread =
                self.threads.remove(&tid).filter(|thread| thread.id == id).unwrap_or_default();
            thread.id = id;
            let (wait, counted) = self.counted.wait_in(times, *progress);
            if let (Some(open), Some((start, ..))) = (thread.waits.open(), wait)
                && open.start == start
            {
                let open = open.carried(carry);
                let recent = self.remembers.then(|| {
                    let mut recent = RecentStacks::default();
                    recent.seen(open.start, open.stack);
                    Box::new(recent)
                });
                let waits = ThreadWaits::in_progress(Some(open));
                next.insert(tid, ThreadAccount { id, waits, recent, ..ThreadAccount::default() });
            }
            thread.waits.slice_open(*progress, times.since, counted);
            let rest = self.counted.not_counted(times);
            thread.rows(&rest, &mut rows);
            self.counted.count(&rest, wait);
        }
        self.ended.take_into(&mut rows);
        // Left: threads that began or ended while the snapshots were taken. What is known of them
        // waits for their times, which come with the next window. If they do not, they were lost on
        // the way: their samples stay, at no more time than is known: none.
        for (tid, thread) in std::mem::replace(&mut self.threads, next) {
            if last || thread.unseen {
                let times = no_times(thread.id);
                thread.rows(&times, &mut rows);
            } else {
                self.threads.entry(tid).or_insert(thread.unseen(carry));
            }
        }
        self.counted.end_cut(ended);
        self.names = 0;
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::super::counted::REMEMBERED;
    use super::super::tests::{T, end};
    use super::super::{StackOrMarker, WaitReason, WaitStateKey};
    use super::*;
    use perfusion_model::event::{MonotonicNs, ThreadId, ThreadProgress, ThreadTimes};
    use perfusion_model::frame::Marker;
    use proptest::prelude::{prop, proptest};

    const SLEEP: WaitReason = WaitReason {
        state: WaitStateKey::Interruptible,
        syscall: Some("sleep"),
        io: false,
        suspended: false,
    };

    fn times(oncpu_ns: u64, blocked_ns: u64) -> ThreadTimes {
        ThreadTimes {
            thread: T,
            oncpu_ns,
            runnable_ns: 0,
            stolen_ns: 0,
            blocked_ns,
            since: MonotonicNs(0),
            left_out: 0,
        }
    }

    fn asleep(start: u64, at: u64, times: ThreadTimes) -> [ThreadSnapshot; 1] {
        let progress = ThreadProgress::Waiting {
            start: MonotonicNs(start),
            blocked_ns: at - start,
            runnable_ns: 0,
            kept: true,
            new_thread: false,
            woken_throttled: false,
        };
        [ThreadSnapshot { times, at: MonotonicNs(at), progress }]
    }

    fn on_cpu(at: u64, times: ThreadTimes) -> [ThreadSnapshot; 1] {
        [ThreadSnapshot {
            times,
            at: MonotonicNs(at),
            progress: ThreadProgress::OnCpu { since: MonotonicNs(at) },
        }]
    }

    fn at(rows: &[ThreadRow], place: StackOrMarker) -> (f64, f64) {
        let of = rows.iter().filter(|row| row.place == place);
        of.fold((0.0, 0.0), |(cpu, blocked), row| (cpu + row.cpu_ns, blocked + row.blocked_ns))
    }

    #[test]
    fn a_wait_across_two_cuts_is_sliced_and_keeps_its_stack() {
        let mut threads = ThreadAccounts::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 10, 1.0);
        let mut renamed = |stack: StackId| StackId(stack.0 + 1);
        let first = threads.cut(&asleep(10, 100, times(10, 90)), &mut renamed, false);
        let second = threads.cut(&asleep(10, 200, times(10, 190)), &mut renamed, false);
        threads.wait_end(&end(10, 210));
        let third = threads.cut(&on_cpu(230, times(20, 210)), &mut renamed, false);
        assert_eq!(at(&first, StackOrMarker::Stack(StackId(5))), (10.0, 90.0));
        assert_eq!(at(&second, StackOrMarker::Stack(StackId(6))), (0.0, 100.0));
        assert_eq!(at(&third, StackOrMarker::Stack(StackId(7))), (0.0, 20.0));
        assert_eq!(threads.unmatched_wait_ends(), 0);
    }

    #[test]
    fn a_wait_that_nobody_saw_begin_is_older_than_the_window_and_its_scan_comes_in_time() {
        let mut threads = ThreadAccounts::default();
        let first = threads.cut(&asleep(40, 100, times(40, 60)), &mut |stack| stack, false);
        assert_eq!(at(&first, StackOrMarker::Marker(Marker::StackLost)).1, 60.0);
        let second = threads.cut(&asleep(40, 200, times(40, 160)), &mut |stack| stack, false);
        assert_eq!(at(&second, StackOrMarker::Marker(Marker::WaitingSinceBefore)).1, 100.0);
        threads.off_cpu(T, MonotonicNs(40), StackId(3), SLEEP);
        let third = threads.cut(&asleep(40, 300, times(40, 260)), &mut |stack| stack, false);
        assert_eq!(at(&third, StackOrMarker::Stack(StackId(3))).1, 100.0);
    }

    #[test]
    fn what_was_counted_of_a_thread_ends_with_it_and_its_id_begins_anew() {
        let mut threads = ThreadAccounts::default();
        threads.cpu_sample(T, MonotonicNs(1), StackId(1));
        drop(threads.cut(&on_cpu(100, times(100, 0)), &mut |stack| stack, false));
        threads.cpu_sample(T, MonotonicNs(110), StackId(1));
        threads.thread_end(times(130, 0));
        // Its entry may still be in the map at this cut and the next.
        for left in [30.0, 0.0, 0.0] {
            let rows = threads.cut(&on_cpu(200, times(130, 0)), &mut |stack| stack, false);
            assert_eq!(at(&rows, StackOrMarker::Stack(StackId(1))).0, left);
            assert_eq!(rows.iter().map(|row| row.cpu_ns).sum::<f64>(), left);
        }
        let again = ThreadTimes { since: MonotonicNs(300), ..times(7, 0) };
        let rows = threads.cut(&on_cpu(310, again), &mut |stack| stack, false);
        assert_eq!(rows.iter().map(|row| row.cpu_ns).sum::<f64>(), 7.0);
    }

    #[test]
    fn a_thread_that_ends_while_the_snapshots_are_taken_keeps_its_stacks() {
        let mut threads = ThreadAccounts::default();
        threads.cpu_sample(T, MonotonicNs(5), StackId(1));
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 10, 1.0);
        threads.wait_end(&end(10, 60));
        // It ended before it was looked at, and its end comes with what is later than that.
        let mut renamed = |stack: StackId| StackId(stack.0 + 1);
        assert_eq!(threads.cut(&[], &mut renamed, false), []);
        threads.thread_end(times(15, 60));
        let rows = threads.cut(&[], &mut renamed, false);
        assert_eq!(at(&rows, StackOrMarker::Stack(StackId(2))), (15.0, 0.0));
        assert_eq!(at(&rows, StackOrMarker::Stack(StackId(6))), (0.0, 60.0));
        assert_eq!(rows.len(), 2);
    }

    #[test]
    fn a_thread_whose_end_is_lost_is_carried_over_once() {
        let mut threads = ThreadAccounts::default();
        threads.cpu_sample(T, MonotonicNs(5), StackId(1));
        assert_eq!(threads.cut(&[], &mut |stack| stack, false), []);
        let rows = threads.cut(&[], &mut |stack| stack, false);
        assert_eq!(rows.iter().map(|row| row.samples).sum::<u64>(), 1);
        assert_eq!(threads.cut(&[], &mut |stack| stack, false), []);
        threads.cpu_sample(T, MonotonicNs(5), StackId(1));
        assert_eq!(threads.cut(&[], &mut |stack| stack, true).len(), 1, "there is no next window");
    }

    #[test]
    fn what_was_counted_as_run_and_turns_out_as_slept_is_made_up_for_in_later_windows() {
        let mut threads = ThreadAccounts::default();
        let mut sums = |times: ThreadTimes| {
            let rows = threads.cut(&on_cpu(1, times), &mut |stack| stack, false);
            (
                rows.iter().map(|row| row.cpu_ns).sum::<f64>(),
                rows.iter().map(|row| row.blocked_ns).sum::<f64>(),
            )
        };
        assert_eq!(sums(times(100, 0)), (100.0, 0.0));
        // It had run for 70 only.
        assert_eq!(sums(times(70, 130)), (0.0, 100.0), "a window has no more time than it is long");
        assert_eq!(sums(times(170, 130)), (70.0, 30.0));
        assert_eq!(sums(times(270, 130)), (100.0, 0.0));
    }

    #[test]
    fn nothing_stays_of_threads_that_are_gone() {
        let mut threads = ThreadAccounts::default();
        for tid in 0..1_000 {
            let thread = ThreadId { pid: 1, tid };
            threads.cpu_sample(thread, MonotonicNs(1), StackId(1));
            threads.thread_end(ThreadTimes { thread, ..times(1, 0) });
        }
        drop(threads.cut(&on_cpu(10, times(1, 0)), &mut |stack| stack, false));
        for _ in 0..REMEMBERED {
            drop(threads.cut(&[], &mut |stack| stack, false));
        }
        assert!(threads.threads.is_empty() && threads.counted.is_empty());
        assert!(threads.ended.is_empty());
    }

    proptest! {
        /// However a recording is cut, its windows together have what one window would have.
        #[test]
        fn windows_sum_to_the_whole(
            steps in prop::collection::vec((1u64..1_000, 0u64..1_000, 0u8..4), 1..40),
        ) {
            let (mut cut, mut whole) = (ThreadAccounts::default(), ThreadAccounts::default());
            let (mut clock, mut oncpu, mut blocked) = (0, 0, 0);
            let (mut cpu_sum, mut blocked_sum) = (0.0, 0.0);
            let mut take = |rows: Vec<ThreadRow>| {
                cpu_sum += rows.iter().map(|row| row.cpu_ns).sum::<f64>();
                blocked_sum += rows.iter().map(|row| row.blocked_ns).sum::<f64>();
            };
            for (run, sleep, when) in steps {
                clock += run;
                oncpu += run;
                for threads in [&mut cut, &mut whole] {
                    threads.cpu_sample(T, MonotonicNs(clock), StackId(u32::from(when)));
                    threads.wait_start(T, MonotonicNs(clock), StackId(9), SLEEP, run, 1.0);
                }
                let start = clock;
                if when == 1 {
                    // In the middle of the wait.
                    let half = sleep / 2;
                    let running = asleep(start, start + half, times(oncpu, blocked + half));
                    take(cut.cut(&running, &mut |stack| stack, false));
                }
                clock += sleep;
                blocked += sleep;
                for threads in [&mut cut, &mut whole] {
                    threads.wait_end(&end(start, sleep));
                }
                if when == 2 {
                    take(cut.cut(&on_cpu(clock, times(oncpu, blocked)), &mut |s| s, false));
                }
            }
            take(cut.cut(&on_cpu(clock, times(oncpu, blocked)), &mut |s| s, false));
            let all = whole.finish(&on_cpu(clock, times(oncpu, blocked)));
            let cpu = all.iter().map(|row| row.cpu_ns).sum::<f64>();
            let waited = all.iter().map(|row| row.blocked_ns).sum::<f64>();
            assert!((cpu_sum - cpu).abs() < 1.0 && (blocked_sum - waited).abs() < 1.0, "{cpu_sum} \
                 {cpu} {blocked_sum} {waited}");
            assert!((cpu - oncpu as f64).abs() < 1.0 && (waited - blocked as f64).abs() < 1.0);
        }
    }
}
