//! Whose events are recorded, as the probes and this side know it: processes by pid with the
//! children they make, or all those that rules choose.

use super::KernelError;
use super::counters::KernelCounters;
use super::options::{KernelOptions, KernelSelection};
use super::probe_threads::ProbeThreads;
use super::rule_set::RuleSet;
use super::threads::ProcessFilter;
use aya::maps::{Array, HashMap as BpfHashMap, MapData};
use ebpf_common::key::RecordingStart;
use ebpf_common::limits::MAX_SELECTED_PROCESSES;
use perfusion_host::process::seed;
use perfusion_model::event::{EventKind, MonotonicNs};
use std::collections::{HashMap, HashSet};

/// An entry that the kernel does not take is tried again after this.
const AGAIN_NS: u64 = 1_000_000_000;

/// The maps of the selection.
pub(super) struct SelectionMaps {
    /// Processes and when each is recorded from, for a selection by pid.
    pub(super) selected: BpfHashMap<MapData, u32, RecordingStart>,
    /// What rules say of cgroups, by their ids.
    pub(super) cgroups: BpfHashMap<MapData, u64, u32>,
    /// When all others are recorded from.
    pub(super) control: Array<MapData, RecordingStart>,
}

/// Who is selected.
pub(super) struct SelectedProcesses {
    maps: SelectionMaps,
    selection: KernelSelection,
    /// A process that is recorded only when it has become another program.
    from_exec: Option<u32>,
    /// A process that is left out.
    excluded: Option<u32>,
    /// Cgroups that are to be in the map, when the kernel did not take all of them, and when that
    /// is tried again.
    wanted: Option<(HashMap<u64, u32>, u64)>,
    /// Processes whose perf records are passed on, when the selection is by pid.
    followed: HashSet<u32>,
}

impl SelectedProcesses {
    /// Those that the options select. None is recorded before [`SelectedProcesses::begin`].
    pub(super) fn new(maps: SelectionMaps, options: &KernelOptions) -> Self {
        Self {
            maps,
            selection: options.selection.clone(),
            from_exec: options.from_exec,
            excluded: options.exclude_self.then(std::process::id),
            wanted: None,
            followed: HashSet::new(),
        }
    }

    /// The selection, with the cgroups that the kernel has taken.
    pub(super) fn selection(&self) -> &KernelSelection {
        &self.selection
    }

    /// Begins the recording of all that are selected.
    pub(super) fn begin(
        &mut self,
        threads: &mut ProbeThreads,
        counters: &KernelCounters,
    ) -> Result<(), KernelError> {
        match &self.selection {
            KernelSelection::Pids(pids) => {
                pids.clone().into_iter().try_for_each(|pid| self.add_pid(pid, threads, counters))
            }
            KernelSelection::All | KernelSelection::Cgroup(_) => {
                self.begin_for_all(threads, counters)
            }
            KernelSelection::Rules(rules) => {
                let cgroups = rules.cgroups.clone().unwrap_or_default();
                set_cgroups(&mut self.maps.cgroups, &mut HashMap::new(), &cgroups)?;
                self.begin_for_all(threads, counters)
            }
        }
    }

    /// Records `pid` too, and the children it makes from now on; for a selection by pid.
    fn add_pid(
        &mut self,
        pid: u32,
        threads: &mut ProbeThreads,
        counters: &KernelCounters,
    ) -> Result<(), KernelError> {
        let failed = |source| KernelError::Map { name: "SELECTED", source };
        let unreadable = |source| KernelError::ProcessUnreadable { pid, source };
        if seed::tasks(pid).map_err(unreadable)?.is_empty() {
            return Err(KernelError::NoProcess { pid });
        }
        self.followed.insert(pid);
        if self.from_exec == Some(pid) {
            // The probe fills in when; its one thread is new then.
            let recording = RecordingStart { since_ns: 0, seeded: 1, left_out: 0 };
            return self.maps.selected.insert(pid, recording, 0).map_err(failed);
        }
        let mut recording =
            RecordingStart { since_ns: MonotonicNs::now().0, seeded: 0, left_out: 0 };
        self.maps.selected.insert(pid, recording, 0).map_err(failed)?;
        threads.seed(pid, recording.since_ns, counters)?;
        recording.seeded = 1;
        self.maps.selected.insert(pid, recording, 0).map_err(failed)?;
        if seed::tasks(pid).is_ok_and(|tasks| tasks.is_empty()) {
            // It ended meanwhile, maybe before its entry was there to be removed. Gone already is
            // as good.
            self.maps.selected.remove(&pid).ok();
        }
        Ok(())
    }

    fn begin_for_all(
        &mut self,
        threads: &mut ProbeThreads,
        counters: &KernelCounters,
    ) -> Result<(), KernelError> {
        let failed = |source| KernelError::Map { name: "CONTROL", source };
        let mut recording =
            RecordingStart { since_ns: MonotonicNs::now().0, seeded: 0, left_out: 0 };
        self.maps.control.set(0, recording, 0).map_err(failed)?;
        let mut filter = ProcessFilter::of(&self.selection);
        for pid in seed::numbers("/proc") {
            if Some(pid) != self.excluded && filter.as_mut().is_none_or(|filter| filter.holds(pid))
            {
                threads.seed(pid, recording.since_ns, counters)?;
            }
        }
        recording.seeded = 1;
        self.maps.control.set(0, recording, 0).map_err(failed)
    }

    /// Tells the probes which cgroups there are now and what rules say of them. What the kernel
    /// does not take is tried again.
    pub(super) fn select_cgroups(&mut self, now: HashMap<u64, u32>) -> Result<(), KernelError> {
        self.wanted = None;
        let KernelSelection::Rules(RuleSet { cgroups: Some(known), .. }) = &mut self.selection
        else {
            return Ok(());
        };
        let set = set_cgroups(&mut self.maps.cgroups, known, &now);
        if set.is_err() {
            self.wanted = Some((now, MonotonicNs::now().0.saturating_add(AGAIN_NS)));
        }
        set
    }

    /// Tries again what the kernel did not take, when it is time.
    pub(super) fn select_again(&mut self) {
        if self.wanted.as_ref().is_some_and(|(_, due)| *due <= MonotonicNs::now().0)
            && let Some((wanted, _)) = self.wanted.take()
            && self.select_cgroups(wanted).is_ok()
        {
            tracing::info!("the selection of cgroups is up to date again");
        }
    }

    /// Whether a perf record is about a selected process. A cgroup's are passed on with all others:
    /// the record does not say whose it is.
    pub(super) fn wants(&mut self, kind: &EventKind) -> bool {
        let pid = match kind {
            EventKind::Exec { pid, .. } => *pid,
            EventKind::Comm { thread, .. }
            | EventKind::Exit { thread }
            | EventKind::Fork { thread, .. } => thread.pid,
            EventKind::Mmap(mmap) => mmap.pid,
            _ => return true,
        };
        if Some(pid) == self.excluded {
            return false;
        }
        if !matches!(self.selection, KernelSelection::Pids(_)) {
            return true;
        }
        if let EventKind::Fork { parent, .. } = kind
            && self.followed.contains(&parent.pid)
        {
            self.followed.insert(pid);
        }
        // The probe follows forks too, and before the child runs: it knows children whose fork
        // record is still to be read.
        let wanted = self.followed.contains(&pid) || self.maps.selected.get(&pid, 0).is_ok();
        if wanted {
            self.followed.insert(pid);
        }
        let most = usize::try_from(MAX_SELECTED_PROCESSES).unwrap_or(usize::MAX);
        if let EventKind::Exit { thread } = kind
            && thread.tid == pid
            && self.followed.len() > most
        {
            // Bounded by what the probes can select; a process whose first thread ended is asked
            // for in the map from now on.
            self.followed.remove(&pid);
        }
        wanted
    }
}

/// Puts what rules say into one of the probes' maps.
pub(super) fn fill<K: aya::Pod + Copy>(
    map: &mut BpfHashMap<MapData, K, u32>,
    name: &'static str,
    said: &HashMap<K, u32>,
) -> Result<(), KernelError> {
    for (key, bits) in said {
        map.insert(key, bits, 0).map_err(|source| KernelError::Map { name, source })?;
    }
    Ok(())
}

/// Makes the probes' cgroups those of `now`. `known` is what they know: each entry as it succeeds.
fn set_cgroups(
    map: &mut BpfHashMap<MapData, u64, u32>,
    known: &mut HashMap<u64, u32>,
    now: &HashMap<u64, u32>,
) -> Result<(), KernelError> {
    let gone: Vec<u64> = known.keys().filter(|id| !now.contains_key(id)).copied().collect();
    for id in gone {
        // Gone already is as good.
        map.remove(&id).ok();
        known.remove(&id);
    }
    let mut failed = None;
    for (&id, &bits) in now {
        if known.get(&id) != Some(&bits) {
            match map.insert(id, bits, 0) {
                Ok(()) => drop(known.insert(id, bits)),
                Err(source) => failed = Some(source),
            }
        }
    }
    failed.map_or(Ok(()), |source| Err(KernelError::Map { name: "CGROUPS", source }))
}
