//! What the daemon knows of each process: what only root may know, for the control socket.

use super::state::DaemonState;
use perfusion_host::process::table::ProcessStatus;
use perfusion_sources::kernel::rule_set::RuleSetFilter;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Where the processes are told of.
pub const PROCESSES: &str = "/processes";

/// A process, as the daemon sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonProcess {
    /// What its stacks came to and cost.
    #[serde(flatten)]
    pub standing: ProcessStatus,
    /// True when the daemon reads a shim in it.
    pub shim: bool,
    /// Records its shims had no room for.
    pub shim_dropped: u64,
    /// Why there is no shim, where there could be one.
    pub why_not: Option<String>,
    /// Features that rules leave out of it, by their names in the configuration.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// Rules have one of so many CPU samples taken.
    #[serde(default = "every")]
    pub one_sample_in: u32,
}

fn every() -> u32 {
    1
}

/// A process that no rule selects, or that one excepts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnselectedProcess {
    /// Its pid.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
}

/// All of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessesResponse {
    /// What the whole recording has less of than was asked for, in words.
    pub remarks: Vec<String>,
    /// Those of which something is known, in no order.
    pub processes: Vec<DaemonProcess>,
    /// Those that are not recorded, likewise.
    #[serde(default)]
    pub unselected: Vec<UnselectedProcess>,
}

/// What [`PROCESSES`] answers.
pub(super) fn processes(state: &DaemonState) -> Option<String> {
    let watcher = state.recording.handle()?;
    let (standings, look, unattached) =
        (watcher.standings()?, watcher.look()?, state.attaches.unattached());
    let shims: HashMap<u32, u64> = look.shims.iter().map(|shim| (shim.pid, shim.dropped)).collect();
    let rules = state.selection();
    let mut filter = rules.as_deref().map(RuleSetFilter::new);
    // Rules about services are about what the shim does, and only of these are the services known.
    let managed: HashMap<u32, _> =
        watcher.managed().into_iter().map(|process| (process.pid, process.service)).collect();
    let told = |standing: ProcessStatus| {
        let shim = shims.get(&standing.pid);
        let key = standing.start_ticks.map(|ticks| (standing.pid, ticks));
        let why_not = key.and_then(|key| unattached.get(&key).cloned()).filter(|_| shim.is_none());
        let service = managed.get(&standing.pid);
        let left_out = filter
            .as_mut()
            .and_then(|filter| filter.left_out(standing.pid, service.map_or("", |s| s)));
        let left_out = left_out.unwrap_or_default();
        let left_out = if service.is_some() { left_out } else { left_out.of_probes() };
        DaemonProcess {
            shim: shim.is_some(),
            shim_dropped: shim.copied().unwrap_or(0),
            why_not,
            left_out: left_out.features().map(str::to_owned).collect(),
            one_sample_in: left_out.one_sample_in(),
            standing,
        }
    };
    let processes = standings.into_iter().map(told).collect();
    let unselected = filter.as_mut().map(unselected).unwrap_or_default();
    serde_json::to_string(&ProcessesResponse { remarks: state.remarks(), processes, unselected })
        .ok()
}

/// The processes of this host that the rules do not hold.
fn unselected(filter: &mut RuleSetFilter<'_>) -> Vec<UnselectedProcess> {
    let all = perfusion_host::process::all_pids().unwrap_or_default();
    let left = all.into_iter().filter(|pid| !filter.holds(*pid));
    left.filter_map(|pid| {
        let start_ticks = perfusion_host::process::start_ticks(pid)?;
        Some(UnselectedProcess { pid, start_ticks })
    })
    .collect()
}
