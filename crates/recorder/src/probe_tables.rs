//! What the processor's thread tells the probes, and what it reads from them.

use crate::processor::Processor;
use perfusion_sources::kernel::KernelSource;
use perfusion_sources::kernel::rules::RuleCache;
use perfusion_sources::kernel::span_map::SpanMap;
use perfusion_sources::kernel::threads::{ConfirmedThreads, ThreadScan, ThreadTable};

/// The probes' tables; `None` where the probes have none.
pub(crate) struct ProbeTables {
    rules: Option<RuleCache>,
    spans: Option<SpanMap>,
    /// The probes' threads, which are confirmed here.
    threads: Option<ThreadTable>,
}

impl ProbeTables {
    /// Takes the tables from the source, which does not use them any more.
    pub(crate) fn take(kernel: &mut KernelSource) -> Self {
        let (rules, spans) = (kernel.take_rules(), kernel.take_spans());
        Self { rules, spans, threads: kernel.take_threads() }
    }

    /// True when the probes unwind by rules that are pushed to them.
    pub(crate) fn have_rules(&self) -> bool {
        self.rules.is_some()
    }

    /// Pushes to the probes the rules that are for them.
    pub(crate) fn push(&mut self, processor: &mut Processor) {
        let mut refused = Vec::new();
        processor.processes.push_rules(|updates| {
            if let Some(spans) = &mut self.spans {
                refused = spans.push_rules(&updates);
            }
            if let Some(rules) = &mut self.rules {
                rules.push_rules(updates);
            }
        });
        for pid in refused {
            processor.spans_refused(pid);
        }
    }

    /// What the probes had no room for.
    pub(crate) fn refused(&self) -> u64 {
        self.rules.as_ref().map_or(0, RuleCache::refused)
            + self.spans.as_ref().map_or(0, SpanMap::refused)
    }

    /// Asks /proc for the threads of a scan that the probes are not sure of, and corrects the
    /// probes' counters.
    pub(crate) fn confirm(
        &mut self,
        scan: &ThreadScan,
        counters: &mut [(String, u64)],
    ) -> ConfirmedThreads {
        let Some(table) = &mut self.threads else { return ConfirmedThreads::default() };
        let confirmed = table.confirm(scan);
        table.amend(counters);
        confirmed
    }
}
