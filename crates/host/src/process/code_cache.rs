//! What is remembered of one process's code: steps, method bodies, walked stacks and the rules that
//! the probes know. They are forgotten together when code changes or memory is short.

use super::cached_bodies::{CachedBodies, RECHECK};
use super::cached_steps::CachedSteps;
use super::memory_images::MemoryImages;
use super::pushed_rules::PushedRules;
use super::rule_update::RuleUpdates;
use super::walked_stacks::WalkedStacks;
use perfusion_model::event::MonotonicNs;
use perfusion_unwind::managed::JitBody;
use std::ops::Range;
use std::time::Instant;

/// What is remembered of one process's code.
#[derive(Debug)]
pub(super) struct CodeCache {
    pub(super) steps: CachedSteps,
    pub(super) bodies: CachedBodies,
    /// ReadyToRun images in anonymous memory.
    pub(super) images: MemoryImages,
    /// Stacks that were walked to the thread's start.
    pub(super) walked: WalkedStacks,
    /// The rules of the steps that the probes know.
    pub(super) pushed: PushedRules,
}

impl CodeCache {
    /// Nothing is known of the code of `pid` yet.
    pub(super) fn new(pid: u32) -> Self {
        Self {
            steps: CachedSteps::default(),
            bodies: CachedBodies::default(),
            images: MemoryImages::default(),
            walked: WalkedStacks::default(),
            pushed: PushedRules::new(pid),
        }
    }

    /// The number of remembered steps and bodies.
    pub(super) fn len(&self) -> usize {
        self.steps.len() + self.bodies.len()
    }

    /// Drops remembered steps and bodies. The probes' rules go with them: one that is not
    /// remembered could not be taken back. What they have walked by them still holds.
    pub(super) fn clear(&mut self, updates: &mut RuleUpdates) {
        self.walked.clear();
        self.steps.clear();
        self.bodies.clear();
        self.images.clear();
        self.pushed.give_up(updates);
    }

    /// Some of the code is not what it was.
    pub(super) fn code_is_replaced(&mut self) {
        self.walked.clear();
        self.pushed.code_is_replaced();
    }

    /// The code in `range` is gone.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        self.code_is_replaced();
        for body in self.bodies.remove_in(range) {
            self.steps.forget(&body, &mut self.pushed);
        }
        self.steps.forget(range, &mut self.pushed);
        self.bodies.forget_retired(range.clone());
        self.images.forget(range);
    }

    /// The code in `range` may have changed: the next use looks again.
    pub(super) fn recheck(&mut self, range: &Range<u64>) {
        self.walked.clear();
        let Some(past) = Instant::now().checked_sub(RECHECK) else { return self.forget(range) };
        self.bodies.recheck(range, past);
        self.images.forget(range);
        self.steps.recheck(range, past);
    }

    /// A body was found `now`. True when others had to be dropped to make room for it.
    pub(super) fn learn(&mut self, body: JitBody, now: Instant) -> bool {
        // A body that was known in this range and is not there any more was replaced.
        if !self.bodies.starts_in(&body.range).is_empty() {
            self.forget(&body.range);
        }
        let full = self.bodies.is_full();
        if full {
            self.bodies.evict();
        }
        self.bodies.insert(body, now);
        full
    }

    /// All updates of the rules have come to the probes.
    pub(super) fn updates_arrived(&mut self, now: MonotonicNs) {
        for place in self.pushed.arrived(now) {
            self.steps.arrived(place, now);
        }
    }
}
