//! The frames and rules that were found at places of a process's code, remembered until the code
//! changes or there is no room.

use super::cached_bodies::RECHECK;
use super::pushed_rules::PushedRules;
use perfusion_model::event::MonotonicNs;
use perfusion_unwind::unwinder::FrameRule;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// Most places whose step is remembered per process.
pub(super) const MAX_STEPS: usize = 16_384;
/// Part of all steps that is dropped at once where there is no room.
pub(super) const DROPPED_PART: usize = 4;

/// When a rule arrives that the probes do not know yet: later than any sample.
const ON_ITS_WAY: MonotonicNs = MonotonicNs(u64::MAX);

/// The key of a step, which is `RuleKey::place` too.
pub(super) fn place(pc: u64, exact: bool) -> u64 {
    pc << 1 | u64::from(exact)
}

/// The keys of the steps at the addresses in `range`.
fn step_keys(range: &Range<u64>) -> Range<u64> {
    let key = |address: u64| address.min(u64::MAX >> 1) << 1;
    key(range.start)..key(range.end).max(key(range.start))
}

/// A step that was found before.
#[derive(Debug)]
pub(super) struct CachedStep {
    pub(super) step: FrameRule,
    /// When it was last looked at; `None` outside JIT memory.
    pub(super) checked: Option<Instant>,
    /// Since when the probes know the rule, or [`ON_ITS_WAY`].
    pub(super) pushed: Option<MonotonicNs>,
}

impl CachedStep {
    /// True while the last look holds.
    pub(super) fn holds(&self, now: Instant) -> bool {
        self.checked.is_none_or(|at| now.duration_since(at) < RECHECK)
    }

    /// Its rule is on its way to the probes.
    pub(super) fn send(&mut self) {
        self.pushed = Some(ON_ITS_WAY);
    }
}

/// The remembered steps of one process, by [`place`].
#[derive(Debug, Default)]
pub(super) struct CachedSteps(BTreeMap<u64, CachedStep>);

impl CachedSteps {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, place: u64) -> Option<&CachedStep> {
        self.0.get(&place)
    }

    pub(super) fn get_mut(&mut self, place: u64) -> Option<&mut CachedStep> {
        self.0.get_mut(&place)
    }

    /// Remembers a step; answers the one that was there.
    pub(super) fn insert(&mut self, place: u64, step: CachedStep) -> Option<CachedStep> {
        self.0.insert(place, step)
    }

    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MAX_STEPS
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Drops some steps. Those where threads were interrupted go first: they are many and seldom
    /// met twice.
    pub(super) fn evict(&mut self, pushed: &mut PushedRules) {
        let most = MAX_STEPS / DROPPED_PART;
        let exact = self.0.keys().filter(|key| *key & 1 != 0);
        let callers = self.0.keys().filter(|key| *key & 1 == 0).step_by(DROPPED_PART);
        let dropped: Vec<u64> = exact.chain(callers).copied().take(most).collect();
        for key in dropped {
            self.remove(key, pushed);
        }
    }

    /// Forgets the steps at the addresses in `range`.
    pub(super) fn forget(&mut self, range: &Range<u64>, pushed: &mut PushedRules) {
        let gone: Vec<u64> = self.0.range(step_keys(range)).map(|(key, _)| *key).collect();
        for key in gone {
            self.remove(key, pushed);
        }
    }

    fn remove(&mut self, place: u64, pushed: &mut PushedRules) {
        if self.0.remove(&place).is_some_and(|cached| cached.pushed.is_some()) {
            pushed.outdate(place);
        }
    }

    /// The steps of JIT memory in `range` were last looked at `past`.
    pub(super) fn recheck(&mut self, range: &Range<u64>, past: Instant) {
        for (_, cached) in self.0.range_mut(step_keys(range)) {
            if cached.checked.is_some() {
                cached.checked = Some(past);
            }
        }
    }

    /// The rule at a place has come to the probes.
    pub(super) fn arrived(&mut self, place: u64, now: MonotonicNs) {
        if let Some(cached) = self.0.get_mut(&place)
            && cached.pushed == Some(ON_ITS_WAY)
        {
            cached.pushed = Some(now);
        }
    }
}
