//! One live process: who it is, where its code is, and what is remembered of it.

use super::address_space::AddressSpace;
use super::budget::{CommonBudget, ProcessBudget};
use super::code_cache::CodeCache;
use super::counters::ProcessTableCounters;
use super::images::ParentFallback;
use super::mapping::{FileKey, Mapping, Mappings, Replaced};
use super::memory::ProcessMemory;
use super::rule_update::RuleUpdates;
use perfusion_model::frame::{ImageId, ProcessId};
use perfusion_unwind::TargetMemory as _;
use perfusion_unwind::managed::SearchBudget;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of JIT memory one process may have searched in the period of its [`ProcessBudget`].
const BUDGET_BYTES: u64 = 64 << 20;

/// Where a program's code and stack begin: others after each exec, for the kernel takes them at
/// random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProgramLayout {
    code: u64,
    stack: u64,
}

impl ProgramLayout {
    pub(super) fn of(stat: &procfs::process::Stat) -> Self {
        Self { code: stat.startcode, stack: stat.startstack }
    }

    /// False when the kernel did not say, which it tells only those who may trace the process.
    pub(super) fn is_told(self) -> bool {
        self.stack != 0
    }
}

/// A live process.
#[derive(Debug)]
pub(super) struct LiveProcess {
    pub(super) id: ProcessId,
    pub(super) pid: u32,
    pub(super) start_ticks: Option<u64>,
    /// What it was when its start was read.
    pub(super) program: Option<ProgramLayout>,
    pub(super) space: AddressSpace,
    pub(super) memory: Option<ProcessMemory>,
    pub(super) code: CodeCache,
    pub(super) budget: SearchBudget,
    /// Of the work for all processes.
    pub(super) share: ProcessBudget,
    /// Where its files may be found when it is gone: with the process it was made by, unchanged
    /// since it was made or first looked at.
    pub(super) elsewhere: Option<ParentFallback>,
    /// When its last stack was walked.
    pub(super) used: Instant,
    /// Stacks walked, and those of them that did not reach the thread's start.
    pub(super) stacks: u64,
    pub(super) stacks_broken: u64,
}

impl LiveProcess {
    pub(super) fn new(
        id: ProcessId,
        pid: u32,
        start_ticks: Option<u64>,
        mappings: Arc<Mappings>,
    ) -> Self {
        Self {
            id,
            pid,
            start_ticks,
            program: None,
            space: AddressSpace::new(mappings),
            memory: None,
            code: CodeCache::new(pid),
            budget: SearchBudget { bytes: BUDGET_BYTES },
            share: ProcessBudget::new(Instant::now()),
            elsewhere: None,
            used: Instant::now(),
            stacks: 0,
            stacks_broken: 0,
        }
    }

    /// Takes up a mapping; what was known of the code in its place goes.
    pub(super) fn map(&mut self, mapping: Mapping, counters: &mut ProcessTableCounters) {
        let range = mapping.range.clone();
        let met = self.space.mappings.met(&range);
        match self.space.insert(mapping) {
            Replaced::Nothing => {}
            Replaced::Perhaps => self.code.recheck(&range),
            Replaced::Certainly => self.code.forget(&range),
            Replaced::Refused => {
                counters.mappings_refused += 1;
                self.code.forget(&met);
            }
        }
    }

    /// The file behind mappings was looked for: whatever was known by another one that had its
    /// place, as when it is rewritten and mapped again, goes.
    pub(super) fn set_image(&mut self, key: FileKey, image: Option<ImageId>) {
        let known = self.space.images.insert(key, image).flatten();
        if known.is_some() && known != image {
            self.forget_file(key);
        }
    }

    /// What is known by a file may be another file's.
    pub(super) fn forget_file(&mut self, key: FileKey) {
        for range in self.space.ranges_of(key) {
            self.code.forget(&range);
        }
    }

    /// Takes up all its mappings as they are; what was known of code that is still there stays.
    pub(super) fn remap(&mut self, seen: Vec<Mapping>, counters: &mut ProcessTableCounters) {
        let mut now = Mappings::default();
        for mapping in seen {
            if now.insert(mapping.clone()) == Replaced::Refused {
                counters.mappings_refused += 1;
            } else if !self.space.mappings.has(&mapping) {
                self.map(mapping, counters);
            }
        }
        let gone: Vec<Range<u64>> =
            self.space.mappings.iter().flat_map(|old| now.uncovered(&old.range)).collect();
        for range in gone {
            self.code.forget(&range);
        }
        self.space.mappings = Arc::new(now);
    }

    /// Forgets where its code is, until it is read anew.
    pub(super) fn drop_mappings(&mut self, updates: &mut RuleUpdates) {
        self.code.clear(updates);
        self.space.clear();
    }

    /// Begins a new period of its share of work when one is over.
    pub(super) fn refill(&mut self, common: &mut CommonBudget, now: Instant) {
        common.refill(now);
        if self.share.refill(now) {
            self.budget = SearchBudget { bytes: BUDGET_BYTES };
        }
    }

    /// Whether the process is still there, if only as one that nobody has waited for.
    pub(super) fn is_alive(&self) -> bool {
        self.start_ticks.is_some_and(|ticks| super::start_ticks(self.pid) == Some(ticks))
    }

    /// Its memory, opened when it is first needed.
    pub(super) fn memory(&mut self) -> Option<&ProcessMemory> {
        if self.memory.is_none() {
            self.memory = ProcessMemory::open(self.pid, self.start_ticks?);
        }
        self.memory.as_ref()
    }

    /// Reads its memory from `address` on.
    pub(super) fn read(&mut self, address: u64, into: &mut [u8]) -> usize {
        self.memory().map_or(0, |m| m.read(address, into))
    }
}
