//! What the probes and this side of their ring count, and what each program costs.

use aya::Ebpf;
use aya::maps::{MapData, PerCpuArray};
use ebpf_common::counter::{COUNTERS, Counter, CounterInfo};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of this side of the ring, by `Counter`. Numbers for people, which order nothing: all
/// accesses are relaxed.
#[derive(Debug)]
pub(super) struct ReceiveCounters([AtomicU64; COUNTERS]);

impl Default for ReceiveCounters {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl ReceiveCounters {
    pub(super) fn add(&self, counter: Counter, amount: u64) {
        if let Some(count) = self.0.get(index(counter)) {
            count.fetch_add(amount, Ordering::Relaxed);
        }
    }

    pub(super) fn get(&self, id: u32) -> u64 {
        self.0.get(to_usize(id)).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

/// Run time of one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramCost {
    /// Its name: `cpu_sample`, `sched_switch`, ….
    pub name: String,
    /// How often it ran.
    pub runs: u64,
    /// Nanoseconds it took, all runs together.
    pub total_ns: u64,
}

/// The counters of a recording, on both sides of the ring.
pub(super) struct KernelCounters {
    probes: PerCpuArray<MapData, [u64; COUNTERS]>,
    /// Counted on this side of the ring.
    pub(super) own: Arc<ReceiveCounters>,
}

impl KernelCounters {
    pub(super) fn new(probes: PerCpuArray<MapData, [u64; COUNTERS]>) -> Self {
        Self { probes, own: Arc::default() }
    }

    /// Counts on this side of the ring.
    pub(super) fn add(&self, counter: Counter, amount: u64) {
        self.own.add(counter, amount);
    }

    /// What the probes have counted.
    pub(super) fn of_probes(&self, counter: Counter) -> u64 {
        let per_cpu = self.probes.get(&0, 0).ok();
        let of = |counts: &[u64; COUNTERS]| counts.get(index(counter)).copied().unwrap_or(0);
        per_cpu.iter().flat_map(|cpus| cpus.iter()).map(of).sum()
    }

    /// All counters.
    pub(super) fn all(&self) -> Vec<(CounterInfo, u64)> {
        let per_cpu = self.probes.get(&0, 0).ok();
        Counter::ALL
            .iter()
            .map(|info| {
                let id = to_usize(info.id);
                let probes =
                    per_cpu.iter().flat_map(|cpus| cpus.iter()).filter_map(|counts| counts.get(id));
                (*info, probes.sum::<u64>().saturating_add(self.own.get(info.id)))
            })
            .collect()
    }
}

/// What each program has cost so far.
pub(super) fn costs(bpf: &Ebpf) -> Vec<ProgramCost> {
    bpf.programs()
        .filter_map(|(name, program)| {
            let info = program.info().ok()?;
            Some(ProgramCost {
                name: name.to_owned(),
                runs: info.run_count(),
                total_ns: u64::try_from(info.run_time().as_nanos()).ok()?,
            })
        })
        .collect()
}

fn index(counter: Counter) -> usize {
    to_usize(counter.id())
}

fn to_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
