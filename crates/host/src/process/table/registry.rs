//! Who is alive: processes by pid, what is known of them after their end, and their removal.

use super::ProcessIdentity;
use crate::process::ProcessError;
use crate::process::live::LiveProcess;
use crate::process::mapping::Mappings;
use crate::process::rule_update::RuleUpdates;
use crate::process::start_ticks;
use foldhash::HashMap;
use perfusion_model::event::MonotonicNs;
use perfusion_model::frame::ProcessId;
use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most live processes.
pub(super) const MAX_PROCESSES: usize = 16_384;
/// Most processes, dead or alive, whose name and pid are remembered.
const MAX_INFOS: usize = 65_536;
/// A table for so many is never made smaller.
pub(super) const FEW: usize = 256;
/// How long an exited process is kept for samples that come late.
const KEEP_EXITED: Duration = Duration::from_secs(10);
/// Shortest time between two searches for processes that are gone, when the table is full.
const SEARCH_INTERVAL: Duration = Duration::from_secs(5);

/// The processes of a run.
#[derive(Debug, Default)]
pub(in crate::process) struct ProcessRegistry {
    /// By pid.
    pub(in crate::process) live: HashMap<u32, LiveProcess>,
    pub(super) identities: HashMap<ProcessId, ProcessIdentity>,
    next_id: u32,
    /// Exited, by time.
    pub(super) exited: VecDeque<(MonotonicNs, ProcessId, u32)>,
    /// When processes that are gone were looked for.
    pub(super) searched: Option<Instant>,
}

impl ProcessRegistry {
    /// Who `id` is or was.
    pub(super) fn identity(&self, id: ProcessId) -> Option<&ProcessIdentity> {
        self.identities.get(&id)
    }

    /// The same, to be changed.
    pub(super) fn identity_mut(&mut self, id: ProcessId) -> Option<&mut ProcessIdentity> {
        self.identities.get_mut(&id)
    }

    /// The process that has `pid` now, and who it is.
    pub(super) fn known(&mut self, pid: u32) -> Option<(&mut LiveProcess, &mut ProcessIdentity)> {
        let process = self.live.get_mut(&pid)?;
        let identity = self.identities.get_mut(&process.id)?;
        Some((process, identity))
    }

    /// Makes sure there is room for a process; answers what follows the next number.
    pub(super) fn find_room(
        &mut self,
        pid: u32,
        updates: &mut RuleUpdates,
    ) -> Result<u32, ProcessError> {
        if self.has_no_room(pid) && self.searched.is_none_or(|at| at.elapsed() >= SEARCH_INTERVAL) {
            self.searched = Some(Instant::now());
            self.remove_gone(updates);
        }
        let full = self.has_no_room(pid);
        let next = self.next_id.checked_add(1).filter(|_| !full);
        next.ok_or(ProcessError::Full { pid, limit: MAX_PROCESSES })
    }

    fn has_no_room(&self, pid: u32) -> bool {
        self.live.len() >= MAX_PROCESSES && !self.live.contains_key(&pid)
    }

    /// Takes up a process with these mappings, which say whether it runs a CLR.
    pub(super) fn insert(
        &mut self,
        identity: ProcessIdentity,
        mappings: Arc<Mappings>,
        updates: &mut RuleUpdates,
    ) -> Result<ProcessId, ProcessError> {
        let pid = identity.pid;
        let next = self.find_room(pid, updates)?;
        let id = ProcessId(self.next_id);
        self.next_id = next;
        // A pid that is used again.
        self.remove(pid, updates);
        let process = LiveProcess::new(id, pid, identity.start_ticks, mappings);
        if self.identities.len() >= MAX_INFOS {
            let live: HashSet<ProcessId> = self.live.values().map(|p| p.id).collect();
            self.identities.retain(|id, _| live.contains(id));
        }
        let is_clr = process.space.is_clr;
        self.identities.insert(id, ProcessIdentity { is_clr, ..identity });
        self.live.insert(pid, process);
        Ok(id)
    }

    /// Removes the process that has `pid`. The probes walk no more of its stacks by rules.
    pub(super) fn remove(&mut self, pid: u32, updates: &mut RuleUpdates) -> Option<LiveProcess> {
        let mut process = self.live.remove(&pid);
        if let Some(process) = &mut process {
            process.code.pushed.close_space(updates);
        }
        process
    }

    /// The first thread of `pid` ended at this time.
    pub(super) fn exits(&mut self, pid: u32, time: MonotonicNs) {
        if let Some(process) = self.live.get(&pid) {
            self.exited.push_back((time, process.id, pid));
        }
    }

    /// Removes the processes that exited so long before `now` that no more samples of them come.
    pub(super) fn drop_exited(&mut self, now: MonotonicNs, updates: &mut RuleUpdates) {
        let keep = u64::try_from(KEEP_EXITED.as_nanos()).unwrap_or(u64::MAX);
        for _ in 0..self.exited.len() {
            let Some((at, id, pid)) = self.exited.front().copied() else { break };
            let crowded = self.live.len() >= MAX_PROCESSES || self.exited.len() > MAX_PROCESSES;
            if now.0.saturating_sub(at.0) < keep && !crowded {
                break;
            }
            self.exited.pop_front();
            let Some(process) = self.live.get(&pid).filter(|p| p.id == id) else { continue };
            // Only the main thread may have ended: the others go on until they end too.
            if !crowded && has_threads(pid, process.start_ticks) {
                self.exited.push_back((now, id, pid));
            } else {
                self.remove(pid, updates);
            }
        }
    }

    /// Forgets who processes were that are gone, except these, to which those still there are
    /// added.
    pub(super) fn forget_gone(
        &mut self,
        processes: &mut HashSet<ProcessId>,
        updates: &mut RuleUpdates,
    ) {
        self.remove_gone(updates);
        processes.extend(self.live.values().map(|process| process.id));
        self.identities.retain(|id, _| processes.contains(id));
        fit(&mut self.live);
        fit(&mut self.identities);
    }

    /// Removes processes whose end was not reported: the pid is free, or another's. Of one that was
    /// forked and never sampled only the pid is known.
    fn remove_gone(&mut self, updates: &mut RuleUpdates) {
        let exited: HashSet<ProcessId> = self.exited.iter().map(|(_, id, _)| *id).collect();
        let gone = |process: &&LiveProcess| {
            let there = start_ticks(process.pid);
            (there.is_none() || process.start_ticks.is_some() && process.start_ticks != there)
                && !exited.contains(&process.id)
        };
        let gone: Vec<u32> = self.live.values().filter(gone).map(|process| process.pid).collect();
        for pid in gone {
            self.remove(pid, updates);
        }
    }
}

/// A table is as large as it ever was, here after a storm of short-lived processes, unless it is
/// made smaller: a quarter is to be in use at least.
fn fit<K: Eq + Hash, V>(table: &mut HashMap<K, V>) {
    if table.capacity() > 4 * table.len().max(FEW) {
        table.shrink_to(2 * table.len());
    }
}

/// True when threads other than the main one are left of the process that started at `start`.
fn has_threads(pid: u32, start: Option<u64>) -> bool {
    let tasks = || std::fs::read_dir(format!("/proc/{pid}/task")).ok();
    let main = pid.to_string();
    tasks().is_some_and(|tasks| tasks.flatten().any(|task| task.file_name() != *main))
        && start.is_none_or(|ticks| start_ticks(pid) == Some(ticks))
}
