//! Processes as /proc shows them: those that were there before the recording, and those of which
//! records may be lost.

use super::held_memory::MAX_MAPPING_BYTES;
use super::{ProcessIdentity, ProcessTable};
use crate::process::budget::cpu_time;
use crate::process::container::{ContainerIdentity, home};
use crate::process::images::ParentFallback;
use crate::process::live::ProgramLayout;
use crate::process::mapping::{FileKey, Mappings, Replaced};
use crate::process::name::ProcessName;
use crate::process::proc_maps::read_maps;
use crate::process::{ProcessError, read_stat, stat};
use perfusion_model::event::MonotonicNs;
use perfusion_model::frame::{ImageId, ProcessId};
use std::sync::Arc;
use std::time::Instant;

impl ProcessTable {
    /// Takes up a process that was there before the recording, from /proc. Known ones are left as
    /// they are.
    ///
    /// # Errors
    /// [`ProcessError`] when it is gone, unreadable or the table is full.
    pub fn adopt(&mut self, pid: u32) -> Result<ProcessId, ProcessError> {
        if let Some(process) = self.registry.live.get(&pid) {
            return Ok(process.id);
        }
        // Asked before anything is read: it is asked at each stack of a process that finds no room.
        let room = self.registry.find_room(pid, &mut self.updates);
        self.counters.processes_refused += u64::from(room.is_err());
        room?;
        let read = read_stat(pid).map_err(|source| ProcessError::Read {
            pid,
            path: format!("/proc/{pid}/stat"),
            source,
        });
        let stat = read?.ok_or(ProcessError::Gone { pid })?;
        let program = ProgramLayout::of(&stat);
        let before = cpu_time();
        let mut mappings = Mappings::default();
        let mut refused = 0;
        for mapping in read_maps(pid)? {
            refused +=
                u64::from(mappings.insert(self.images.share_path(mapping)) == Replaced::Refused);
        }
        self.counters.mappings_refused += refused;
        let held = mappings.held_bytes();
        let name = ProcessName::of(pid, &stat.comm);
        let id = self.insert(pid, Some(stat.starttime), 0, name, home(pid), Arc::new(mappings))?;
        if let Some(process) = self.registry.live.get_mut(&pid) {
            let parent = u32::try_from(stat.ppid).ok();
            process.elsewhere =
                parent.map(|parent| ParentFallback { parent, at: MonotonicNs::now() });
            process.program = Some(program);
            self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
        }
        self.held.mapping_bytes += held;
        self.evict_mappings(MAX_MAPPING_BYTES, Some(pid));
        Ok(id)
    }

    /// Reads a process anew of which records may be lost. What is known of it stays where it is
    /// still so, and so does what was spent on it.
    pub(super) fn settle(&mut self, pid: u32) {
        let process = self.registry.live.get_mut(&pid);
        let Some(process) = process.filter(|process| process.space.in_doubt) else { return };
        process.refill(&mut self.common, Instant::now());
        if !self.common.has_time(&process.share) {
            self.counters.budget_refusals += 1;
            return;
        }
        // One that has ended, or whose first thread has, stays as it was: there is nothing to be
        // read any more.
        let Some(stat) = stat(pid).filter(|stat| stat.state != 'Z') else { return };
        let program = ProgramLayout::of(&stat);
        let same = program.is_told()
            && process.program == Some(program)
            && process.start_ticks == Some(stat.starttime);
        let before = cpu_time();
        if !same {
            let Some(old) = self.registry.remove(pid, &mut self.updates) else { return };
            // What it has used up stays so, whoever it is: else a process that has records lost
            // would have its share anew.
            if self.adopt(pid).is_ok()
                && let Some(process) = self.registry.live.get_mut(&pid)
            {
                process.share = old.share;
            }
        } else if let Ok(seen) = read_maps(pid) {
            process.space.in_doubt = false;
            let (held, images) = (process.space.mappings.held_bytes(), &self.images);
            process.remap(
                seen.into_iter().map(|m| images.share_path(m)).collect(),
                &mut self.counters,
            );
            self.held.mapping_bytes += process.space.mappings.held_bytes().saturating_sub(held);
            let changed = |(key, id): (&FileKey, &Option<ImageId>)| {
                id.is_some_and(|id| !images.is_unchanged(id)).then_some(*key)
            };
            let changed: Vec<FileKey> = process.space.images.iter().filter_map(changed).collect();
            for key in changed {
                process.space.images.remove(&key);
                process.forget_file(key);
            }
            process.code.pushed.take_back(&mut self.updates);
            if let Some((process, info)) = self.registry.known(pid) {
                info.is_clr = process.space.is_clr;
            }
        }
        if let Some(process) = self.registry.live.get_mut(&pid) {
            self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
        }
    }

    /// Reads the start time of a process that was forked or executed since the recording began: its
    /// record does not tell.
    pub(super) fn fill_start(&mut self, pid: u32) {
        let process = self.registry.live.get_mut(&pid);
        let Some(process) = process.filter(|process| process.program.is_none()) else { return };
        let Some(stat) = stat(pid) else { return };
        process.program = Some(ProgramLayout::of(&stat));
        process.start_ticks = process.start_ticks.or(Some(stat.starttime));
        if let Some((process, info)) = self.registry.known(pid) {
            info.start_ticks = process.start_ticks;
        }
    }

    /// Takes up a process, if there is room.
    pub(super) fn insert(
        &mut self,
        pid: u32,
        start_ticks: Option<u64>,
        exec_count: u32,
        name: ProcessName,
        home: ContainerIdentity,
        mappings: Arc<Mappings>,
    ) -> Result<ProcessId, ProcessError> {
        let identity = ProcessIdentity { pid, start_ticks, exec_count, name, home, is_clr: false };
        let inserted = self.registry.insert(identity, mappings, &mut self.updates);
        self.counters.processes_refused += u64::from(inserted.is_err());
        inserted
    }
}
