//! Regions of shims: the process that each belongs to, and the runtime in it.

use foldhash::HashMap;
use perfusion_model::event::{MonotonicNs, RegionId};
use std::collections::HashSet;

/// What a shim said of its runtime.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShimRuntime {
    pub(super) version: (u16, u16, u16),
    /// Objects can be watched.
    pub(super) watches: bool,
}

/// All regions that anything was read from.
#[derive(Default)]
pub(super) struct ShimRegions {
    pids: HashMap<RegionId, u32>,
    runtimes: HashMap<RegionId, ShimRuntime>,
    /// Regions that said good-bye in this window, and when.
    ended: HashMap<RegionId, MonotonicNs>,
}

impl ShimRegions {
    /// Something was read from a region of `pid`. True when it is the first of that region.
    pub(super) fn observe(&mut self, region: RegionId, pid: u32) -> bool {
        self.pids.insert(region, pid).is_none()
    }

    /// The region's shim says which runtime it is in.
    pub(super) fn set_runtime(&mut self, region: RegionId, runtime: ShimRuntime) {
        self.runtimes.insert(region, runtime);
    }

    /// The region's shim said good-bye.
    pub(super) fn ends(&mut self, region: RegionId, time: MonotonicNs) {
        self.ended.entry(region).or_insert(time);
    }

    /// Takes the regions that said good-bye in the window that ends.
    pub(super) fn take_ended(&mut self) -> HashMap<RegionId, MonotonicNs> {
        std::mem::take(&mut self.ended)
    }

    /// The regions whose processes do not run any more.
    pub(super) fn of_gone_processes(&self) -> impl Iterator<Item = RegionId> {
        let is_gone = |pid: u32| perfusion_host::process::start_ticks(pid).is_none();
        self.iter().filter(move |&(_, pid)| is_gone(pid)).map(|(region, _)| region)
    }

    /// The process of a region.
    pub(super) fn pid(&self, region: RegionId) -> Option<u32> {
        self.pids.get(&region).copied()
    }

    /// All regions with their processes.
    pub(super) fn iter(&self) -> impl Iterator<Item = (RegionId, u32)> {
        self.pids.iter().map(|(&region, &pid)| (region, pid))
    }

    /// The regions of a process.
    pub(super) fn of(&self, pid: u32) -> impl Iterator<Item = RegionId> {
        self.iter().filter(move |&(_, of)| of == pid).map(|(region, _)| region)
    }

    /// The runtimes that shims told of.
    pub(super) fn runtimes(&self) -> impl Iterator<Item = ShimRuntime> {
        self.runtimes.values().copied()
    }

    /// True when the region's runtime tells of an exception whether it is thrown again. .NET 9 and
    /// newer do not.
    pub(super) fn tells_rethrown(&self, region: RegionId) -> bool {
        self.runtimes.get(&region).is_some_and(|runtime| runtime.version.0 < 9)
    }

    /// Forgets regions that nothing more comes from.
    pub(super) fn forget(&mut self, gone: &HashSet<RegionId>) {
        for region in gone {
            self.pids.remove(region);
            self.runtimes.remove(region);
        }
    }
}
