//! Thread pools: how many workers a runtime lets run at a time, and why it changed that.
//!
//! It begins with as many as there are processors. It adds one when work has waited for half a
//! second and no worker has taken any (starvation), some when workers block on tasks (cooperative
//! blocking), and tries more and fewer to see whether more gets done (hill climbing):
//! `PortableThreadPool` of System.Private.CoreLib in dotnet/runtime. Each change is told, with the
//! number it led to.

use perfusion_model::event::RegionId;
use std::collections::{BTreeMap, HashMap};

/// `ThreadAdjustmentReasonMap` of the runtime's event source, by number.
const REASONS: [&str; 9] = [
    "warmup",
    "initializing",
    "random_move",
    "climbing_move",
    "change_point",
    "stabilizing",
    STARVATION,
    "thread_timed_out",
    "cooperative_blocking",
];
/// No worker took any of the work that waited.
pub const STARVATION: &str = "starvation";

/// Changes for one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerChanges {
    /// The number of changes.
    pub count: u64,
    /// Workers they added.
    pub added: u64,
    /// Workers they took away.
    pub removed: u64,
}

/// All changes of a pool in a window, and its queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolSum {
    /// Of its workers, if their number was changed.
    pub workers: Option<PoolWorkers>,
    /// The work that waited for them.
    pub queue: QueuedWork,
}

/// The number of workers and its changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolWorkers {
    /// Before the first change, as far as is known.
    pub from: u32,
    /// After the last one.
    pub to: u32,
    /// Most at a time.
    pub most: u32,
    /// By reason; the runtime's codes are few, whatever a process says.
    pub changes: BTreeMap<&'static str, WorkerChanges>,
}

/// Items of work that waited when the runtime looked, once a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuedWork {
    /// Times it looked.
    pub looks: u64,
    /// Sum of what it saw.
    pub total: u64,
    /// Most of it.
    pub most: u64,
}

impl PoolWorkers {
    /// In words: how many, then reasons, the most frequent first.
    fn text(&self) -> String {
        let mut changes: Vec<_> = self.changes.iter().collect();
        changes.sort_by_key(|(_, of)| std::cmp::Reverse(of.count));
        let change = |(reason, of): (&&str, &WorkerChanges)| {
            let parts = [(of.added, "added"), (of.removed, "removed")];
            let parts = parts.into_iter().filter(|(count, _)| *count > 0);
            let parts: Vec<String> = parts.map(|(count, what)| format!("{count} {what}")).collect();
            let times =
                if of.count == 1 { "once".to_owned() } else { format!("{} times", of.count) };
            let parts =
                if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) };
            format!("{reason} {times}{parts}")
        };
        let changes: Vec<String> = changes.into_iter().map(change).collect();
        format!(
            "{} to {} workers, {} at most: {}",
            self.from,
            self.to,
            self.most,
            changes.join(", ")
        )
    }
}

impl QueuedWork {
    /// In words; none where the runtime never looked.
    fn text(&self) -> Option<String> {
        let times = match self.looks {
            0 => return None,
            1 => "once".to_owned(),
            looks => format!("{looks} times"),
        };
        let average = self.total as f64 / self.looks as f64;
        Some(format!(
            "{average:.1} items of work waiting on average, {} at most, looked at {times}",
            self.most
        ))
    }
}

impl PoolSum {
    /// In words.
    #[must_use]
    pub fn text(&self) -> String {
        let parts =
            self.workers.as_ref().map(PoolWorkers::text).into_iter().chain(self.queue.text());
        parts.collect::<Vec<_>>().join("; ")
    }
}

/// The pools of all runtimes.
#[derive(Default)]
pub struct Pools {
    workers: HashMap<RegionId, u32>,
    sums: HashMap<RegionId, PoolSum>,
    starved: u64,
}

impl Pools {
    /// From now on so many may run.
    pub fn adjusted(&mut self, region: RegionId, workers: u32, reason: u32) {
        let reason = usize::try_from(reason).ok().and_then(|reason| REASONS.get(reason));
        let reason = reason.copied().unwrap_or("other");
        let starved = reason == STARVATION;
        self.starved += u64::from(starved);
        // Against starvation one worker at a time is added, so before the first change that is told
        // there was one less.
        let before = self.workers.insert(region, workers);
        let before = before.unwrap_or(workers.saturating_sub(u32::from(starved)));
        let begin =
            || PoolWorkers { from: before, to: before, most: before, changes: BTreeMap::new() };
        let sum = self.sums.entry(region).or_default().workers.get_or_insert_with(begin);
        sum.to = workers;
        sum.most = sum.most.max(workers);
        let changes = sum.changes.entry(reason).or_default();
        changes.count += 1;
        changes.added += u64::from(workers.saturating_sub(before));
        changes.removed += u64::from(before.saturating_sub(workers));
    }

    /// The runtime looked, and so many items waited.
    pub fn looked(&mut self, region: RegionId, items: u64) {
        let queue = &mut self.sums.entry(region).or_default().queue;
        queue.looks += 1;
        queue.total = queue.total.saturating_add(items);
        queue.most = queue.most.max(items);
    }

    /// A window ends: what happened in it.
    pub fn take(&mut self) -> HashMap<RegionId, PoolSum> {
        std::mem::take(&mut self.sums)
    }

    /// The runtime is gone, or nobody listened to it for a while.
    pub fn forget(&mut self, region: RegionId) {
        self.workers.remove(&region);
    }

    /// Times a pool was starved.
    #[must_use]
    pub fn starved(&self) -> u64 {
        self.starved
    }
}

#[cfg(test)]
mod tests {
    use super::{Pools, STARVATION, WorkerChanges};
    use perfusion_model::event::RegionId;

    const R: RegionId = RegionId(3);

    #[test]
    fn workers_are_added_and_removed_for_reasons() {
        let mut pools = Pools::default();
        for (workers, reason) in [(3, 6), (4, 6), (6, 8), (5, 3), (4, 7)] {
            pools.adjusted(R, workers, reason);
        }
        assert_eq!(pools.starved(), 2);
        let sum = pools.take().remove(&R).unwrap();
        let workers = sum.workers.as_ref().unwrap();
        assert_eq!((workers.from, workers.to, workers.most), (2, 4, 6));
        assert_eq!(workers.changes[STARVATION], WorkerChanges { count: 2, added: 2, removed: 0 });
        assert_eq!(
            sum.text(),
            "2 to 4 workers, 6 at most: starvation 2 times (2 added), climbing_move once (1 \
             removed), \
             cooperative_blocking once (2 added), thread_timed_out once (1 removed)"
        );
        assert!(pools.take().is_empty());
        pools.adjusted(R, 7, 99);
        let sum = pools.take().remove(&R).unwrap();
        assert_eq!(sum.text(), "4 to 7 workers, 7 at most: other once (3 added)");
        pools.forget(R);
        pools.adjusted(R, 9, 1);
        assert_eq!(
            pools.take().remove(&R).unwrap().text(),
            "9 to 9 workers, 9 at most: initializing once"
        );
    }

    #[test]
    fn work_that_waits_is_told_beside_workers_or_alone() {
        let mut pools = Pools::default();
        for items in [0, 40, 5] {
            pools.looked(R, items);
        }
        let text = |pools: &mut Pools| pools.take().remove(&R).unwrap().text();
        assert_eq!(
            text(&mut pools),
            "15.0 items of work waiting on average, 40 at most, looked at 3 times"
        );
        pools.looked(R, u64::MAX);
        pools.adjusted(R, 3, 6);
        let both = text(&mut pools);
        let workers = "2 to 3 workers, 3 at most: starvation once (1 added); ";
        assert!(both.starts_with(workers) && both.ends_with(" looked at once"), "{both}");
    }
}
