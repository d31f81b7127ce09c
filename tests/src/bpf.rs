//! What the kernel says the BPF programs of a process cost (`kernel.bpf_stats_enabled`).

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;

use anyhow::Context as _;

/// Runs and run time of one program since it was loaded (or since statistics were switched on).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Runs.
    pub runs: u64,
    /// Nanoseconds of all of them.
    pub run_ns: u64,
}

/// Switches the statistics on for as long as the descriptor is held.
///
/// # Errors
/// Before Linux 5.8, or without the privilege.
pub fn statistics() -> anyhow::Result<OwnedFd> {
    aya::sys::enable_stats(aya::sys::Stats::RunTime).context("BPF statistics cannot be switched on")
}

/// The programs a process holds open, by name; empty when it holds none (any more).
pub fn programs_of(pid: u32) -> BTreeMap<String, Cost> {
    let ids: Vec<u32> = fs::read_dir(format!("/proc/{pid}/fdinfo"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .filter(|text| text.contains("prog_type:"))
        .filter_map(|text| {
            text.lines().find_map(|line| line.strip_prefix("prog_id:"))?.trim().parse().ok()
        })
        .collect();
    let mut costs = BTreeMap::new();
    for program in aya::programs::loaded_programs().filter_map(Result::ok) {
        if ids.contains(&program.id()) {
            let run_ns = u64::try_from(program.run_time().as_nanos()).unwrap_or(u64::MAX);
            let name = program.name_as_str().unwrap_or_default().to_owned();
            costs.insert(name, Cost { runs: program.run_count(), run_ns });
        }
    }
    costs
}
