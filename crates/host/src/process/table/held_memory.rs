//! Bounds on what is held of all processes together: mappings, remembered code and open memory
//! files. The processes sampled longest ago lose theirs first.

use crate::process::live::LiveProcess;
use crate::process::rule_update::RuleUpdates;
use crate::system_limits::share_of_open_files;
use foldhash::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

/// Most memory the mappings of all processes take, bytes: of a thousand with three hundred each.
pub(super) const MAX_MAPPING_BYTES: usize = 32 << 20;
/// Most `/proc/PID/mem` kept open.
const MAX_MEMORIES: usize = 128;
/// Stacks between two looks at how many are open: a look is at all processes.
const MEMORIES_LOOK: u32 = 64;
/// Most steps and method bodies remembered of all processes together, about 25 MB.
pub(super) const MAX_CACHED: usize = 1 << 18;

/// What is held of all processes, as estimates that are never too low.
#[derive(Debug, Default)]
pub(super) struct HeldMemory {
    /// At least the number of steps and bodies remembered.
    pub(super) cached: usize,
    /// At least the memory all mappings take.
    pub(super) mapping_bytes: usize,
    /// Stacks since open memory files were counted.
    stacks_since_look: u32,
}

impl HeldMemory {
    /// Drops the mappings of the processes sampled longest ago until all take at most `limit`
    /// bytes; never those of `keep`. They are read anew when a stack needs them. Answers of how
    /// many processes.
    pub(super) fn evict_mappings(
        &mut self,
        live: &mut HashMap<u32, LiveProcess>,
        limit: usize,
        keep: Option<u32>,
        updates: &mut RuleUpdates,
    ) -> u64 {
        if self.mapping_bytes <= limit {
            return 0;
        }
        // Forked processes have their parent's until either maps something.
        let (mut seen, mut bytes) = (HashSet::new(), 0);
        for process in live.values() {
            if seen.insert(Arc::as_ptr(&process.space.mappings)) {
                bytes += process.space.mappings.held_bytes();
            }
        }
        self.mapping_bytes = bytes;
        let mut oldest: Vec<(Instant, u32)> = live
            .values()
            .filter(|process| Some(process.pid) != keep && !process.space.mappings.is_empty())
            .map(|process| (process.used, process.pid))
            .collect();
        oldest.sort_unstable();
        let mut evicted = 0;
        for (_, pid) in oldest {
            // A good deal at once: this looks at all processes.
            if self.mapping_bytes <= limit / 4 * 3 {
                break;
            }
            let Some(process) = live.get_mut(&pid) else { continue };
            if Arc::strong_count(&process.space.mappings) == 1 {
                let held = process.space.mappings.held_bytes();
                self.mapping_bytes = self.mapping_bytes.saturating_sub(held);
            }
            process.drop_mappings(updates);
            evicted += 1;
        }
        evicted
    }

    /// Drops what is remembered of the processes sampled longest ago, until at most `limit` steps
    /// and bodies are left. Answers of how many processes.
    pub(super) fn evict_caches(
        &mut self,
        live: &mut HashMap<u32, LiveProcess>,
        limit: usize,
        updates: &mut RuleUpdates,
    ) -> u64 {
        if self.cached <= limit {
            return 0;
        }
        self.cached = live.values().map(|process| process.code.len()).sum();
        let mut evicted = 0;
        while self.cached > limit {
            let holders = live.values_mut().filter(|process| process.code.len() > 0);
            let Some(oldest) = holders.min_by_key(|process| process.used) else { break };
            self.cached = self.cached.saturating_sub(oldest.code.len());
            oldest.code.clear(updates);
            evicted += 1;
        }
        evicted
    }

    /// Bounds the number of open memory files: all are closed when there are too many, and reopen
    /// when needed.
    pub(super) fn close_memories(&mut self, live: &mut HashMap<u32, LiveProcess>) {
        self.stacks_since_look += 1;
        if self.stacks_since_look < MEMORIES_LOOK {
            return;
        }
        self.stacks_since_look = 0;
        let most = share_of_open_files(MAX_MEMORIES);
        if live.len() > most && live.values().filter(|p| p.memory.is_some()).count() > most {
            for process in live.values_mut() {
                process.memory = None;
            }
        }
    }
}
