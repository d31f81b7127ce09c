//! What to record, and how much it may cost.

use super::KernelError;
use super::rule_set::RuleSet;
use ebpf_common::limits::{
    DEFAULT_MAX_PLACES, DEFAULT_MAX_THREADS, MAX_SELECTED_PROCESSES, MAX_STACK_COPY_BYTES,
};
use std::num::NonZeroU32;

/// Whose events are recorded. The probes decide it before any other work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelSelection {
    /// Everybody.
    All,
    /// These processes and the children they make from now on.
    Pids(Vec<u32>),
    /// Threads in the cgroup v2 directory with this inode number.
    Cgroup(u64),
    /// Those that these choose.
    Rules(RuleSet),
}

/// What to record, and how much it may cost.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// CPU samples per second and CPU, 1–10,000.
    pub frequency_hz: u32,
    /// Whose.
    pub selection: KernelSelection,
    /// One of the selected processes that is recorded only when it has become another program.
    pub from_exec: Option<u32>,
    /// Most bytes of user stack per record, 1–131,072.
    pub stack_copy_bytes: u32,
    /// Bytes of wait records per second, for all CPUs together; above it they are downsampled.
    pub wait_stack_budget_bytes_per_s: u64,
    /// Keeps one wait's stack of so many, whatever they cost, instead of following the budget.
    pub wait_stacks_one_in: Option<NonZeroU32>,
    /// Leaves this process out.
    pub exclude_self: bool,
    /// Bytes of the ring between the probes and this process: a power of two of at least a page.
    pub ring_bytes: u32,
    /// Threads whose times can be known at once.
    pub max_threads: u32,
    /// Places whose unwind rules the probes can know at once; taken as the power of two below.
    pub max_places: u32,
    /// Sends registers and copy of each stack from its innermost frame on, also where the probes
    /// walked it, so that the two can be compared.
    pub copies_all: bool,
    /// Takes the stacks of threads that end kept waits, out of the same budget.
    pub waker_stacks: bool,
    /// Takes with each stack the span its thread works for, where threads publish that and a rule
    /// update says where.
    pub spans: bool,
    /// Measures what the stages of a stack record take: for `cargo xtask bench`, which reads it
    /// from the probes' map.
    pub times_stages: bool,
    /// Uses the programs for kernels before 5.17, so that they can be tried on newer ones.
    pub older_probes: bool,
}

impl Default for KernelOptions {
    fn default() -> Self {
        Self {
            frequency_hz: 99,
            selection: KernelSelection::All,
            from_exec: None,
            stack_copy_bytes: 16 * 1024,
            wait_stack_budget_bytes_per_s: 64 << 20,
            wait_stacks_one_in: None,
            exclude_self: true,
            ring_bytes: 8 << 20,
            max_threads: DEFAULT_MAX_THREADS,
            max_places: DEFAULT_MAX_PLACES,
            copies_all: false,
            waker_stacks: false,
            spans: false,
            times_stages: false,
            older_probes: false,
        }
    }
}

/// What of the probes can be changed while a recording goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRates {
    /// As [`KernelOptions::frequency_hz`].
    pub frequency_hz: u32,
    /// As [`KernelOptions::wait_stack_budget_bytes_per_s`].
    pub wait_stack_budget_bytes_per_s: u64,
}

impl KernelOptions {
    /// Those to begin with.
    #[must_use]
    pub fn rates(&self) -> KernelRates {
        KernelRates {
            frequency_hz: self.frequency_hz,
            wait_stack_budget_bytes_per_s: self.wait_stack_budget_bytes_per_s,
        }
    }
}

/// Whether all options are in their ranges.
pub(super) fn check(options: &KernelOptions) -> Result<(), KernelError> {
    let option = |option, expected, found: u64, good: bool| {
        if good { Ok(()) } else { Err(KernelError::Option { option, expected, found }) }
    };
    let hz = options.frequency_hz;
    option("sampling frequency", "1 to 10000 Hz", hz.into(), (1..=10_000).contains(&hz))?;
    let copy = options.stack_copy_bytes;
    option(
        "stack copy",
        "1 to 131072 bytes",
        copy.into(),
        (1..=MAX_STACK_COPY_BYTES).contains(&copy),
    )?;
    let ring = options.ring_bytes;
    let good = ring.is_power_of_two() && (4096..=1 << 30).contains(&ring);
    option("ring", "a power of two from 4096 to 2^30 bytes", ring.into(), good)?;
    let threads = options.max_threads;
    option("threads", "1 to 4194304", threads.into(), (1..=1 << 22).contains(&threads))?;
    if let KernelSelection::Pids(pids) = &options.selection {
        let count = u64::try_from(pids.len()).unwrap_or(u64::MAX);
        option(
            "selected processes",
            "1 to 8192",
            count,
            (1..=u64::from(MAX_SELECTED_PROCESSES)).contains(&count),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{KernelError, KernelOptions, check};

    #[test]
    fn options_out_of_range_name_themselves() {
        let options = KernelOptions { ring_bytes: 5000, ..KernelOptions::default() };
        assert!(matches!(
            check(&options),
            Err(KernelError::Option { option: "ring", found: 5000, .. })
        ));
        assert!(check(&KernelOptions::default()).is_ok());
    }
}
