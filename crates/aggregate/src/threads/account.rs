//! What is known of one thread in a window, until its exact times are.

use super::on_cpu::OnCpu;
use super::row::{ThreadRow, WaitReason, WaitStateKey};
use super::waits::ThreadWaits;
use crate::recent::RecentStacks;
use perfusion_model::event::{MonotonicNs, ThreadId, ThreadTimes};
use perfusion_model::feature::ExcludedFeatures;
use perfusion_model::frame::Marker;
use perfusion_model::stack::StackId;
use std::sync::Arc;

/// One thread's samples and waits.
#[derive(Default)]
pub(super) struct ThreadAccount {
    pub(super) id: ThreadId,
    /// What it ran outside of collections, and in those of which the time is not known.
    pub(super) on_cpu: OnCpu,
    pub(super) waits: ThreadWaits,
    pub(super) last_run: Option<(MonotonicNs, StackId)>,
    /// Only where somebody wants to know.
    pub(super) recent: Option<Box<RecentStacks>>,
    pub(super) collected: CollectionTime,
    /// It was in no snapshot at the end of the window before.
    pub(super) unseen: bool,
    /// What it is called, where it had other names in this window.
    pub(super) name: Option<Arc<str>>,
    /// What it did in this window before it was renamed last.
    pub(super) named: Vec<NamedAccount>,
    /// Its time is shared among its names by its samples.
    pub(super) shared: bool,
}

/// The time that a thread spent on collections.
#[derive(Default)]
pub(super) struct CollectionTime {
    pub(super) on_cpu: OnCpu,
    /// Time on a CPU in them, exactly.
    cpu_ns: u64,
    /// The time of one or another is not known.
    unsure: bool,
}

impl CollectionTime {
    /// The thread has run a collection, for so long on a CPU; `None` when that is not known.
    pub(super) fn add(&mut self, cpu_ns: Option<u64>) {
        self.cpu_ns = self.cpu_ns.saturating_add(cpu_ns.unwrap_or(0));
        self.unsure |= cpu_ns.is_none();
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.on_cpu.merge(other.on_cpu);
        self.cpu_ns = self.cpu_ns.saturating_add(other.cpu_ns);
        self.unsure |= other.unsure;
    }

    fn carried(self, carry: &mut dyn FnMut(StackId) -> StackId) -> Self {
        Self { on_cpu: self.on_cpu.carried(carry), ..self }
    }
}

/// The times of a thread whose end is not known.
pub(super) fn no_times(thread: ThreadId) -> ThreadTimes {
    ThreadTimes {
        thread,
        oncpu_ns: 0,
        runnable_ns: 0,
        stolen_ns: 0,
        blocked_ns: 0,
        since: MonotonicNs(0),
        left_out: 0,
    }
}

/// What a thread did in this window under a name that it has no more, or had before.
pub(super) struct NamedAccount {
    pub(super) name: Arc<str>,
    pub(super) account: ThreadAccount,
    pub(super) times: ThreadTimes,
}

impl NamedAccount {
    /// The account in the next window.
    fn carried(self, carry: &mut dyn FnMut(StackId) -> StackId) -> Self {
        Self { account: self.account.unseen(carry), ..self }
    }
}

impl ThreadAccount {
    /// Rows that sum to the thread's exact `times`, without what rules leave out.
    pub(super) fn rows(self, times: &ThreadTimes, rows: &mut Vec<ThreadRow>) {
        let before = rows.len();
        self.rows_by_name(times, rows);
        let left_out = ExcludedFeatures(times.left_out);
        if left_out != ExcludedFeatures::default() {
            let own = rows.split_off(before);
            rows.extend(own.into_iter().filter_map(|row| row.without(left_out)));
        }
    }

    /// Rows of what the thread did under one name.
    pub(super) fn all_rows(mut self, times: &ThreadTimes, rows: &mut Vec<ThreadRow>) {
        let (id, name) = (self.id, self.name.take());
        let row = |place, reason, waker| ThreadRow {
            thread: id,
            since: times.since,
            name: name.clone(),
            place,
            reason,
            waker,
            samples: 0,
            cpu_ns: 0.0,
            runnable_ns: 0.0,
            blocked_ns: 0.0,
            wait_stderr_ns: 0.0,
        };
        let (oncpu, stolen) = (times.oncpu_ns as f64, times.stolen_ns as f64);
        let held = Some(WaitReason {
            state: WaitStateKey::Stolen,
            syscall: None,
            io: false,
            suspended: false,
        });
        let mut spread = |place, samples, share: f64| {
            if samples > 0 || oncpu > 0.0 {
                rows.push(ThreadRow { samples, cpu_ns: oncpu * share, ..row(place, None, None) });
            }
            if stolen > 0.0 {
                rows.push(ThreadRow { runnable_ns: stolen * share, ..row(place, held, None) });
            }
        };
        let mut collected = std::mem::take(&mut self.collected);
        let mut on_cpu = std::mem::take(&mut self.on_cpu);
        if collected.unsure || collected.cpu_ns == 0 {
            on_cpu.merge(std::mem::take(&mut collected.on_cpu));
            collected.cpu_ns = 0;
        }
        // The clocks are read apart.
        let of_collections =
            if times.oncpu_ns > 0 { (collected.cpu_ns as f64 / oncpu).min(1.0) } else { 0.0 };
        for (ran, part, unknown) in [
            (collected.on_cpu, of_collections, Marker::GarbageCollector),
            (on_cpu, 1.0 - of_collections, Marker::NotSampled),
        ] {
            for (place, samples, share) in ran.shares(unknown) {
                if samples > 0 || part > 0.0 {
                    spread(place, samples, part * share);
                }
            }
        }
        self.waits.rows(times, row, rows);
    }

    /// The thread in the next window, when this one had no snapshot of it.
    pub(super) fn unseen(self, carry: &mut dyn FnMut(StackId) -> StackId) -> Self {
        let Self { id, on_cpu, waits, last_run, collected, name, named, shared, .. } = self;
        Self {
            id,
            on_cpu: on_cpu.carried(carry),
            waits: waits.carried(carry),
            last_run: last_run.map(|(at, stack)| (at, carry(stack))),
            recent: None,
            collected: collected.carried(carry),
            unseen: true,
            name,
            named: named.into_iter().map(|named| named.carried(carry)).collect(),
            shared,
        }
    }
}
