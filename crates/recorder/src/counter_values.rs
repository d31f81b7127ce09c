//! Every counter of every stage. What of them a profile says: `perfusion_pprof::loss`.

use super::processor::Processor;
use perfusion_aggregate::window::Window;
use std::collections::HashMap;

/// What a window could not keep apart.
#[must_use]
pub(crate) fn window_counters(window: &Window) -> Vec<(String, u64)> {
    let overflow = window.counters();
    let named = [
        ("window_overflowed", overflow.overflowed),
        ("window_labels_capped", overflow.capped_labels),
        ("window_values_refused", overflow.refused),
    ];
    named.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Adds counters to others, by name.
pub(crate) fn add(sums: &mut Vec<(String, u64)>, counters: &[(String, u64)]) {
    for (name, value) in counters {
        match sums.iter_mut().find(|(known, _)| known == name) {
            Some((_, sum)) => *sum = sum.saturating_add(*value),
            None => sums.push((name.clone(), *value)),
        }
    }
}

/// Counters as they were when they were looked at last.
#[derive(Debug, Default)]
pub struct CounterBaseline(HashMap<String, u64>);

impl CounterBaseline {
    /// The baseline of these counters.
    #[must_use]
    pub fn of(counters: impl IntoIterator<Item = (&'static str, u64)>) -> Self {
        Self(counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// What each has counted since then; those that `begin_anew` have by themselves.
    pub fn since(
        &mut self,
        counters: &[(String, u64)],
        begin_anew: impl Fn(&str) -> bool,
    ) -> Vec<(String, u64)> {
        let since = |(name, value): &(String, u64)| {
            let before = self.0.get(name).copied().filter(|_| !begin_anew(name)).unwrap_or(0);
            (name.clone(), value.saturating_sub(before))
        };
        let since = counters.iter().map(since).collect();
        self.0 = counters.iter().cloned().collect();
        since
    }
}

/// Those of this process, whatever recordings it has had.
#[must_use]
pub fn process_counters() -> [(&'static str, u64); 2] {
    let (calls_given_up, calls_not_made) = perfusion_host::process::guarded_io::counts();
    [("calls_given_up", calls_given_up), ("calls_not_made", calls_not_made)]
}

/// Counters of the stages inside the daemon.
#[must_use]
pub fn daemon_counters(processor: &Processor) -> Vec<(String, u64)> {
    let stacks = processor.counters();
    let table = processor.processes.counters();
    let named = [
        ("events_cpu_samples", stacks.cpu_samples),
        ("events_waits", stacks.waits),
        ("events_allocations", stacks.allocations),
        ("events_allocations_after_end", stacks.allocations_after_end),
        ("events_exceptions", stacks.exceptions),
        ("events_contentions", stacks.contentions),
        ("runtime_events_after_end", stacks.runtime_events_after_end),
        ("managed_frames", stacks.managed_frames),
        ("managed_frames_unnamed", stacks.managed_unnamed),
        ("stacks_walked", stacks.walked),
        ("stacks_exact", stacks.exact),
        ("stacks_guessed", table.stacks_guessed),
        ("stacks_broken", table.stacks_broken),
        ("stacks_exiting", table.stacks_exiting),
        ("stacks_stale", table.stacks_stale),
        ("processes_read_anew", table.doubts),
        ("rules_pushed", table.rules_pushed),
        ("rules_refused", table.rules_refused),
        ("guessed_frames", stacks.guessed_frames),
        ("stack_pieces_read", table.stack_pieces),
        ("stacks_of_gone_processes", table.stacks_of_gone_processes),
        ("processes_refused", table.processes_refused),
        ("mappings_refused", table.mappings_refused),
        ("mappings_evicted", table.mappings_evicted),
        ("images_failed", table.images_failed),
        ("descriptors_short", processor.processes.descriptors_short()),
        ("images_refused", processor.processes.images_refused()),
        ("images_evicted", processor.processes.images_evicted()),
        ("image_evictions", processor.processes.image_evictions()),
        ("rules_cleared", table.steps_cleared),
        ("rules_evicted", table.caches_evicted),
        ("maps_read_again", table.refreshes),
        ("unwind_budget_refusals", table.budget_refusals),
        ("method_bodies_replaced", table.bodies_replaced),
    ];
    let mut all: Vec<(String, u64)> = process_counters()
        .into_iter()
        .chain(named)
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    for (name, value) in processor.estimator_counters() {
        all.push((name.to_owned(), value));
    }
    for (name, value) in processor.symbolizer.counters() {
        all.push((name.to_owned(), value));
    }
    all
}
