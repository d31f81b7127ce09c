//! The waits of one thread: those whose stacks were kept, the one in progress, and the first one.

use super::counted::CountedWait;
use super::estimate::{Division, WaitEstimate, WaitTimes, WaitVariance};
use super::row::{StackOrMarker, ThreadRow, WaitReason, WaitStateKey, Waker};
use foldhash::HashMap;
use perfusion_model::event::{MonotonicNs, ThreadProgress, ThreadTimes, WaitEnd, WakeOrigin};
use perfusion_model::frame::Marker;
use perfusion_model::stack::StackId;

/// Places, reasons and wakers of one thread's waits that are kept apart. Places and reasons are
/// few; threads that wake it may come and go without end.
pub(super) const MAX_WAITS: usize = 4096;

/// A new thread that could run and has no CPU yet waits for this.
const FOR_A_CPU: WaitReason =
    WaitReason { state: WaitStateKey::Preempted, syscall: None, io: false, suspended: false };

/// A wait in progress, and what is known of it so far.
#[derive(Clone, Copy)]
pub(super) struct OpenWait {
    pub(super) start: MonotonicNs,
    pub(super) stack: StackId,
    weight: f64,
    reason: WaitReason,
    origin: Option<WakeOrigin>,
    /// The stack of the thread that ended it.
    waker: Option<StackId>,
    /// When the thread left the CPU, if the iterator could tell: before the recording, or about
    /// `start`.
    left_cpu: Option<MonotonicNs>,
}

impl OpenWait {
    pub(super) fn new(start: MonotonicNs, stack: StackId, reason: WaitReason, weight: f64) -> Self {
        Self { start, stack, weight, reason, origin: None, waker: None, left_cpu: None }
    }

    /// The wait with stacks of the next window.
    pub(super) fn carried(self, carry: &mut dyn FnMut(StackId) -> StackId) -> Self {
        Self { stack: carry(self.stack), waker: self.waker.map(&mut *carry), ..self }
    }
}

/// A wait in progress, of which the stack is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitInProgress {
    /// When it began; when the recording did, for a wait that is older.
    pub start: MonotonicNs,
    /// When the thread left the CPU, as the scheduler noted it, to some milliseconds.
    pub left_cpu: Option<MonotonicNs>,
    /// The stack.
    pub stack: StackId,
    /// The reason.
    pub reason: WaitReason,
}

/// A thread's first wait, of which the stack was not seen.
#[derive(Clone, Copy)]
struct FirstWait {
    start: MonotonicNs,
    blocked_ns: u64,
    runnable_ns: u64,
    /// The thread had not run at all.
    new_thread: bool,
}

/// The way a wait that is over was counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EndedWait {
    /// It is counted.
    Counted,
    /// It is counted without its waker, because the thread has had very many.
    WakerCapped,
    /// Its start never arrived.
    Unmatched,
}

/// All waits of one thread in a window.
#[derive(Default)]
pub(super) struct ThreadWaits {
    kept: HashMap<(StackId, WaitReason, Option<Waker>), WaitEstimate>,
    open: Option<OpenWait>,
    /// The wait that ended before anything else was heard of the thread. The one it was in when it
    /// entered the recording, if it began then too and the iterator did not see it.
    first: Option<FirstWait>,
}

impl ThreadWaits {
    /// A thread that goes on with this wait.
    pub(super) fn in_progress(open: Option<OpenWait>) -> Self {
        Self { open, ..Self::default() }
    }

    /// A wait begins whose stack was kept.
    pub(super) fn begin(&mut self, open: OpenWait) {
        self.open = Some(open);
    }

    /// The iterator saw the thread in a wait. A later one may be open already: the scan's record
    /// came late.
    pub(super) fn scanned(&mut self, open: OpenWait) {
        if self.open.as_ref().is_none_or(|other| other.start <= open.start) {
            self.open = Some(open);
        }
    }

    /// From now on the wait that began at `start` stands for itself. Answers its stack when that is
    /// known.
    pub(super) fn stands_for_itself(&mut self, start: MonotonicNs) -> Option<StackId> {
        let open = self.open_since(start)?;
        open.weight = 1.0;
        Some(open.stack)
    }

    /// When the thread left the CPU for the wait that began at `start`.
    pub(super) fn left_cpu(&mut self, start: MonotonicNs, at: MonotonicNs) {
        if let Some(open) = self.open_since(start) {
            open.left_cpu = Some(at);
        }
    }

    /// The blocked part of the wait that began at `start` was ended.
    pub(super) fn woken(&mut self, start: MonotonicNs, origin: WakeOrigin, stack: Option<StackId>) {
        if let Some(open) = self.open_since(start) {
            (open.origin, open.waker) = (Some(origin), stack);
        }
    }

    fn open_since(&mut self, start: MonotonicNs) -> Option<&mut OpenWait> {
        self.open.as_mut().filter(|open| open.start == start)
    }

    pub(super) fn open(&self) -> Option<OpenWait> {
        self.open
    }

    /// The wait in progress, for who shows it.
    pub(super) fn progress(&self) -> Option<WaitInProgress> {
        let OpenWait { start, left_cpu, stack, reason, .. } = self.open?;
        Some(WaitInProgress { start, left_cpu, stack, reason })
    }

    /// A wait is over, of which earlier windows have counted a part. `has_run` is true of a thread
    /// that was seen running before.
    pub(super) fn end(&mut self, end: &WaitEnd, counted: CountedWait, has_run: bool) -> EndedWait {
        let (blocked_ns, mut runnable_ns) = counted.rest(end.blocked_ns, end.runnable_ns);
        match self.open.take() {
            Some(open) if open.start == end.start => {
                let waker = end.waker.map(|(id, comm)| match (open.origin, id.tid) {
                    (Some(WakeOrigin::Timer), _) => Waker::Timer,
                    // The idle task does nothing itself.
                    (Some(WakeOrigin::Interrupt), _) | (_, 0) => Waker::Interrupt,
                    _ => Waker::Thread { id, comm, stack: open.waker },
                });
                if end.woken_throttled {
                    self.throttled(&open, std::mem::take(&mut runnable_ns));
                }
                let mut key = (open.stack, open.reason, waker);
                let full = self.kept.len() >= MAX_WAITS && !self.kept.contains_key(&key);
                let capped = full && matches!(waker, Some(Waker::Thread { .. }));
                if capped {
                    key.2 = Some(Waker::Other);
                }
                self.kept.entry(key).or_default().add(blocked_ns, runnable_ns, open.weight);
                if capped { EndedWait::WakerCapped } else { EndedWait::Counted }
            }
            None if !has_run && self.first.is_none() => {
                let (start, new_thread) = (counted.entered.unwrap_or(end.start), end.new_thread);
                self.first = Some(FirstWait { start, blocked_ns, runnable_ns, new_thread });
                EndedWait::Counted
            }
            other => {
                // Its start was lost; a later start may already be open.
                self.open = other.filter(|open| open.start > end.start);
                EndedWait::Unmatched
            }
        }
    }

    /// Counts the part of the wait in progress that belongs to this window; `counted` is what
    /// earlier windows have of it. `since` is when the thread entered the recording.
    pub(super) fn slice_open(
        &mut self,
        progress: ThreadProgress,
        since: MonotonicNs,
        counted: CountedWait,
    ) {
        let open = self.open.take();
        let ThreadProgress::Waiting {
            start,
            blocked_ns,
            runnable_ns,
            new_thread,
            woken_throttled,
            ..
        } = progress
        else {
            return;
        };
        let (blocked_ns, mut runnable_ns) = counted.rest(blocked_ns, runnable_ns);
        let Some(open) = open.filter(|open| open.start == start) else {
            if start == since || counted.entered.is_some() {
                self.first = Some(FirstWait { start: since, blocked_ns, runnable_ns, new_thread });
            }
            return;
        };
        if woken_throttled {
            self.throttled(&open, std::mem::take(&mut runnable_ns));
        }
        let waited = self.kept.entry((open.stack, open.reason, None)).or_default();
        waited.add(blocked_ns, runnable_ns, open.weight);
    }

    /// The runnable part of a wait whose thread was woken when its cgroup had used up its CPU
    /// limit.
    fn throttled(&mut self, open: &OpenWait, runnable_ns: u64) {
        let reason = WaitReason { state: WaitStateKey::Throttled, ..open.reason };
        let throttled = self.kept.entry((open.stack, reason, None)).or_default();
        throttled.add(0, runnable_ns, open.weight);
    }

    /// Takes what is over, and leaves the wait in progress.
    pub(super) fn take_ended(&mut self) -> Self {
        Self { kept: std::mem::take(&mut self.kept), open: None, first: self.first.take() }
    }

    /// True when no wait is over.
    pub(super) fn none_ended(&self) -> bool {
        self.kept.is_empty() && self.first.is_none()
    }

    /// Adds the waits of `other` that are over.
    pub(super) fn merge(&mut self, other: Self) {
        for (key, estimate) in other.kept {
            self.kept.entry(key).or_default().merge(estimate);
        }
        self.first = match (self.first, other.first) {
            (Some(mut first), Some(more)) => {
                first.blocked_ns = first.blocked_ns.saturating_add(more.blocked_ns);
                first.runnable_ns = first.runnable_ns.saturating_add(more.runnable_ns);
                Some(first)
            }
            (first, more) => first.or(more),
        };
    }

    /// Estimated time of all that were kept.
    pub(super) fn estimated(&self, part: fn(&WaitTimes) -> f64) -> f64 {
        self.kept.values().map(|wait| part(&wait.sure) + part(&wait.scaled)).sum()
    }

    /// The waits with stacks of the next window.
    pub(super) fn carried(self, carry: &mut dyn FnMut(StackId) -> StackId) -> Self {
        let mut carried = Self { first: self.first, ..Self::default() };
        for ((stack, reason, waker), estimate) in self.kept {
            let waker = waker.map(|waker| match waker {
                Waker::Thread { id, comm, stack } => {
                    Waker::Thread { id, comm, stack: stack.map(&mut *carry) }
                }
                other => other,
            });
            // One to one: stacks that differ go on to differ, unless there is no more room for
            // them.
            carried.kept.entry((carry(stack), reason, waker)).or_default().merge(estimate);
        }
        carried.open = self.open.map(|open| open.carried(carry));
        carried
    }

    /// Rows of all waits that are over: with the time that has no stack they sum to the thread's
    /// exact `times`.
    pub(super) fn rows(
        self,
        times: &ThreadTimes,
        row: impl Fn(StackOrMarker, Option<WaitReason>, Option<Waker>) -> ThreadRow,
        rows: &mut Vec<ThreadRow>,
    ) {
        let (blocked, runnable) =
            (times.blocked_ns as f64, times.runnable_ns as f64 - times.stolen_ns as f64);
        let total = |part: fn(&WaitEstimate) -> f64| self.kept.values().map(part).sum::<f64>();
        let (sure_blocked, sure_runnable) =
            (total(|w| w.sure.blocked_ns), total(|w| w.sure.runnable_ns));
        let (more_blocked, more_runnable) =
            (total(|w| w.scaled.blocked_ns), total(|w| w.scaled.runnable_ns));
        // Unless the iterator saw it, the wait the thread was in when it entered the recording has
        // no stack. Its length is known.
        let first = self.first.filter(|first| first.start == times.since);
        let (before_blocked, before_runnable) = first.map_or((0.0, 0.0), |first| {
            // No more than there is: the two are read apart.
            let within =
                |before: u64, total: f64, sure: f64| (before as f64).min((total - sure).max(0.0));
            (
                within(first.blocked_ns, blocked, sure_blocked),
                within(first.runnable_ns, runnable, sure_runnable),
            )
        });
        let (rest_blocked, rest_runnable) = (blocked - before_blocked, runnable - before_runnable);
        let mut spread = WaitVariance::default();
        for waited in self.kept.values() {
            spread.add(waited.spread, 1.0);
        }
        let blocked = Division::of(rest_blocked, sure_blocked, more_blocked, spread.blocked);
        let runnable = Division::of(rest_runnable, sure_runnable, more_runnable, spread.runnable);
        for ((stack, reason, waker), waited) in self.kept {
            let mut others = spread;
            others.add(waited.spread, -1.0);
            // A row is its part of the thread's exact rest. To first order a wait of its own moves
            // it by scale × (1 − part), one of another row by −scale × part: the linearised
            // variance of a ratio estimator.
            let of_blocked = blocked.part(waited.scaled.blocked_ns, waited.spread.blocked);
            let of_runnable = runnable.part(waited.scaled.runnable_ns, waited.spread.runnable);
            let (by_blocked, by_runnable) = (blocked.scale(), runnable.scale());
            let variance = waited
                .spread
                .variance(by_blocked * (1.0 - of_blocked), by_runnable * (1.0 - of_runnable))
                + others.variance(-by_blocked * of_blocked, -by_runnable * of_runnable)
                + (blocked.beyond_estimate() * of_blocked).powi(2)
                + (runnable.beyond_estimate() * of_runnable).powi(2);
            rows.push(ThreadRow {
                wait_stderr_ns: variance.max(0.0).sqrt(),
                blocked_ns: waited.sure.blocked_ns * blocked.sure + blocked.rest * of_blocked,
                runnable_ns: waited.sure.runnable_ns * runnable.sure + runnable.rest * of_runnable,
                ..row(StackOrMarker::Stack(stack), Some(reason), waker)
            });
        }
        let mut missing = |marker, reason, blocked_ns: f64, runnable_ns: f64| {
            if blocked_ns + runnable_ns >= 1.0 {
                let (blocked_ns, runnable_ns) = (blocked_ns.max(0.0), runnable_ns.max(0.0));
                rows.push(ThreadRow {
                    blocked_ns,
                    runnable_ns,
                    ..row(StackOrMarker::Marker(marker), reason, None)
                });
            }
        };
        if first.is_some_and(|first| first.new_thread) {
            missing(Marker::NotYetRun, Some(FOR_A_CPU), before_blocked, before_runnable);
        } else {
            missing(Marker::WaitingSinceBefore, None, before_blocked, before_runnable);
        }
        missing(Marker::StackLost, None, blocked.lost, runnable.lost);
    }
}
