//! The table of processes: fed by events, or by /proc for those that were there before, and asked
//! for finished stacks.
//!
//! A process is (pid, start time, exec count). Its mappings are kept by epoch: whatever is mapped
//! over code takes the old code's rules and methods with it. An unmapping alone is not reported and
//! harmless: no thread can run there.

mod adopt;
mod held_memory;
mod lost_records;
mod observe;
mod registry;
mod thread_pointers;
mod walk;

use self::held_memory::HeldMemory;
use self::lost_records::LostRecords;
use self::registry::ProcessRegistry;
use super::budget::CommonBudget;
use super::container::ContainerIdentity;
use super::counters::ProcessTableCounters;
use super::image::ExecutableImage;
use super::images::ImageCache;
use super::interned_rules::InternedRules;
use super::live::LiveProcess;
use super::mapping::{Mapping, MappingKind};
use super::name::ProcessName;
use super::rule_update::{RuleUpdate, RuleUpdates};
use perfusion_model::event::MonotonicNs;
use perfusion_model::frame::{ImageId, ProcessId};
use perfusion_unwind::managed::JitBody;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::time::Duration;

/// Who a process is; stays known after it is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Pid in the initial pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot, when it was read from /proc.
    pub start_ticks: Option<u64>,
    /// How many `execve` were seen.
    pub exec_count: u32,
    /// Its name ([`super::name`]).
    pub name: ProcessName,
    /// Its container and pod.
    pub home: ContainerIdentity,
    /// True when it runs a CLR.
    pub is_clr: bool,
}

/// How a process that is profiled stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Its pid in the initial pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot, when it is known.
    pub start_ticks: Option<u64>,
    /// True when it runs a CLR.
    pub is_clr: bool,
    /// User stacks walked since it became this program.
    pub stacks: u64,
    /// Of them, those that did not reach the thread's start.
    pub stacks_broken: u64,
    /// Milliseconds of CPU time spent on its files and rules.
    pub lookup_ms: u64,
    /// What the probes, the kernel and its shims have told of it, in records.
    #[serde(default)]
    pub records: u64,
    /// Microseconds of CPU time of the daemon for it: all of these records, look-ups included.
    #[serde(default)]
    pub cpu_us: u64,
    /// Milliseconds since the daemon has known it: what to divide by. 0 from a daemon that does not
    /// say.
    #[serde(default)]
    pub known_for_ms: u64,
    /// The service whose profile has it, where services are told apart.
    #[serde(default)]
    pub service: Option<String>,
}

/// All processes of a run.
#[derive(Debug, Default)]
pub struct ProcessTable {
    pub(super) registry: ProcessRegistry,
    pub(super) images: ImageCache,
    pub(super) rules: InternedRules,
    /// What is on its way to the probes.
    pub(super) updates: RuleUpdates,
    /// The probes walk nothing, so no rules are pushed to them.
    copies_only: bool,
    /// Frames of methods say where in the body they are, for their lines.
    offsets: bool,
    pub(super) common: CommonBudget,
    held: HeldMemory,
    lost: LostRecords,
    pub(super) counters: ProcessTableCounters,
}

impl ProcessTable {
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The kernel cannot walk: every stack comes as a copy, and the probes are sent no rules.
    pub fn push_no_rules(&mut self) {
        self.copies_only = true;
    }

    /// From now on frames of methods say where in the body they are.
    pub fn tell_offsets(&mut self) {
        self.offsets = true;
    }

    /// Has the probes learn and forget what they are to, by `write`. Stacks that they walk after
    /// that are walked by these rules.
    pub fn push_rules(&mut self, write: impl FnOnce(Vec<RuleUpdate>)) {
        let (updates, touched) = self.updates.take();
        write(updates);
        let now = MonotonicNs::now();
        for pid in touched {
            if let Some(process) = self.registry.live.get_mut(&pid) {
                process.code.updates_arrived(now);
            }
        }
    }

    /// Forgets processes that are gone, except these, to which those still there are added; and
    /// that files but these stand in stacks.
    pub fn forget_gone(&mut self, images: &HashSet<ImageId>, processes: &mut HashSet<ProcessId>) {
        self.registry.forget_gone(processes, &mut self.updates);
        self.images.keep_only(images);
    }

    /// The process that has `pid` now, if it is known.
    #[must_use]
    pub fn id(&self, pid: u32) -> Option<ProcessId> {
        self.registry.live.get(&pid).map(|p| p.id)
    }

    /// The processes that run a CLR, with when they started.
    pub fn managed(&self) -> impl Iterator<Item = (u32, u64)> {
        let managed = self.registry.live.values().filter(|process| process.space.is_clr);
        managed.filter_map(|process| Some((process.pid, process.start_ticks?)))
    }

    /// How each of them stands.
    #[must_use]
    pub fn standings(&self) -> Vec<ProcessStatus> {
        let whole = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
        let standing = |process: &LiveProcess| {
            let (records, cpu, since) = process.share.cost();
            ProcessStatus {
                pid: process.pid,
                start_ticks: process.start_ticks,
                is_clr: process.space.is_clr,
                stacks: process.stacks,
                stacks_broken: process.stacks_broken,
                lookup_ms: whole(process.share.time().as_millis()),
                records,
                cpu_us: whole(cpu.as_micros()),
                known_for_ms: whole(since.elapsed().as_millis()),
                service: None,
            }
        };
        self.registry.live.values().map(standing).collect()
    }

    /// CPU time spent on look-ups for `pid`.
    pub fn lookup_time(&self, pid: u32) -> Duration {
        self.registry.live.get(&pid).map(|process| process.share.time()).unwrap_or_default()
    }

    /// A record of `pid` was handled, which took so much CPU time beside look-ups. One of a process
    /// that is not known is nobody's.
    pub fn handled(&mut self, pid: u32, time: Duration) {
        if let Some(process) = self.registry.live.get_mut(&pid) {
            process.share.handled(time);
        }
    }

    /// Who `id` is or was.
    #[must_use]
    pub fn info(&self, id: ProcessId) -> Option<&ProcessIdentity> {
        self.registry.identity(id)
    }

    /// The executable mappings of `pid`, by address.
    pub fn mappings(&self, pid: u32) -> impl Iterator<Item = &Mapping> {
        self.registry.live.get(&pid).into_iter().flat_map(|p| p.space.mappings.iter())
    }

    /// A mapped file; `None` for an id of another run.
    #[must_use]
    pub fn image(&self, id: ImageId) -> Option<&ExecutableImage> {
        self.images.get(id)
    }

    /// A process that maps the file, or did ([`ImageCache::mapped_by`]).
    #[must_use]
    pub fn mapped_by(&self, id: ImageId) -> Option<u32> {
        self.images.mapped_by(id)
    }

    /// The program `pid` runs: the file mapped at its lowest address, where the kernel puts the
    /// executable.
    #[must_use]
    pub fn main_image(&self, pid: u32) -> Option<ImageId> {
        self.registry.live.get(&pid)?.space.main_image()
    }

    /// The managed code of `pid` that begins at `start`: its generation, and the body where a JIT
    /// made it. `None` for a body that is not remembered.
    #[must_use]
    pub fn managed_body(&self, pid: u32, start: u64) -> Option<(u32, Option<JitBody>)> {
        let process = self.registry.live.get(&pid)?;
        if let Some(known) = process.code.bodies.get(start) {
            return Some((known.generation, Some(known.body.clone())));
        }
        let mapping = process.space.mappings.find(start)?;
        (mapping.region == MappingKind::File).then_some((0, None))
    }

    /// What was lost so far.
    #[must_use]
    pub fn counters(&self) -> ProcessTableCounters {
        self.counters
    }

    /// Times unwind data of an image was dropped to stay within memory.
    #[must_use]
    pub fn image_evictions(&self) -> u64 {
        self.images.evictions
    }

    /// Times a mapped file was not opened because this process may have no more open.
    #[must_use]
    pub fn descriptors_short(&self) -> u64 {
        self.images.descriptors_short
    }

    /// Mapped files that were forgotten to make room for others; no stack has a frame in them.
    #[must_use]
    pub fn images_evicted(&self) -> u64 {
        self.images.evicted
    }

    /// Times a mapped file was not taken up because there were too many.
    #[must_use]
    pub fn images_refused(&self) -> u64 {
        self.images.refused
    }

    /// Memory is short: forgets half of what is remembered of walks, and all that was read of files
    /// and can be read again.
    pub fn shed(&mut self) {
        self.evict_caches(self.held.cached / 2);
        self.evict_mappings(self.held.mapping_bytes / 2, None);
        self.registry.live.shrink_to_fit();
        self.images.shed();
        self.rules.shed();
    }

    /// Bounds the memory that all mappings take; those of `keep` stay.
    fn evict_mappings(&mut self, limit: usize, keep: Option<u32>) {
        let (live, updates) = (&mut self.registry.live, &mut self.updates);
        self.counters.mappings_evicted += self.held.evict_mappings(live, limit, keep, updates);
    }

    /// Bounds what is remembered of all processes' code.
    fn evict_caches(&mut self, limit: usize) {
        let (live, updates) = (&mut self.registry.live, &mut self.updates);
        self.counters.caches_evicted += self.held.evict_caches(live, limit, updates);
    }
}

#[cfg(test)]
mod tests;
