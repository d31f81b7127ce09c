//! What the probes know of one process's rules: in which address space they walk, which rules are
//! on their way to them, and which they are still to forget.

use super::rule_update::{self, RuleUpdate, RuleUpdates};
use perfusion_model::event::MonotonicNs;
use std::time::Duration;

/// How long it may take until the probes have forgotten a rule that was taken back.
const TAKEN_BACK: Duration = Duration::from_secs(2);

/// The rules of one process in the probes.
#[derive(Debug)]
pub(super) struct PushedRules {
    pid: u32,
    /// The address space of the rules the probes know.
    space: Option<u32>,
    /// The address space before, when it was given up for want of room and not because code was
    /// replaced.
    retired_space: Option<u32>,
    /// When code was replaced last.
    replaced_at: Option<MonotonicNs>,
    /// Places whose rules the probes are to forget.
    outdated: Vec<u64>,
    /// Places whose rules are on their way to the probes.
    on_their_way: Vec<u64>,
    /// True when code was replaced and its rules are not taken back yet.
    is_replaced: bool,
    /// True when rules of replaced code are being taken back.
    is_taken_back: bool,
}

impl PushedRules {
    /// The probes know nothing of the process `pid` yet.
    pub(super) fn new(pid: u32) -> Self {
        Self {
            pid,
            space: None,
            retired_space: None,
            replaced_at: None,
            outdated: Vec::new(),
            on_their_way: Vec::new(),
            is_replaced: false,
            is_taken_back: false,
        }
    }

    /// The address space of the rules the probes know.
    pub(super) fn space(&self) -> Option<u32> {
        self.space
    }

    /// True when what the probes walked by the rules of an address space may hold still.
    pub(super) fn knows_space(&self, space: u32) -> bool {
        space == self.space.unwrap_or(0) || Some(space) == self.retired_space
    }

    /// The address space for a rule to be pushed. The probes are told of a new one.
    pub(super) fn open_space(&mut self, updates: &mut RuleUpdates) -> u32 {
        let pid = self.pid;
        *self.space.get_or_insert_with(|| {
            let space = updates.new_space();
            updates.push(RuleUpdate::Space { pid, space });
            space
        })
    }

    /// The probes walk no more of the process's stacks by the rules they know.
    pub(super) fn close_space(&mut self, updates: &mut RuleUpdates) {
        if self.space.take().is_some() {
            updates.push(RuleUpdate::NoSpace { pid: self.pid });
        }
    }

    /// Gives up all rules for want of room. What the probes have walked by them still holds.
    pub(super) fn give_up(&mut self, updates: &mut RuleUpdates) {
        self.outdated.clear();
        self.retired_space = self.space.or(self.retired_space);
        self.close_space(updates);
    }

    /// The rule at a place is to be forgotten with the next [`PushedRules::take_back`].
    pub(super) fn outdate(&mut self, place: u64) {
        self.outdated.push(place);
    }

    /// A rule is on its way to the probes.
    pub(super) fn send(&mut self, place: u64, updates: &mut RuleUpdates) {
        self.on_their_way.push(place);
        updates.touches(self.pid);
    }

    /// Some of the process's code is not what it was.
    pub(super) fn code_is_replaced(&mut self) {
        (self.replaced_at, self.is_replaced) = (Some(MonotonicNs::now()), true);
    }

    /// True when the probes could not have walked at `time` by a rule of code that had been
    /// replaced.
    pub(super) fn is_unreplaced(&self, time: MonotonicNs) -> bool {
        let since = |at: MonotonicNs| time.0.checked_sub(at.0).map(Duration::from_nanos);
        self.replaced_at.is_none_or(|at| since(at).is_some_and(|since| since > TAKEN_BACK))
    }

    /// Has the probes forget the outdated rules.
    pub(super) fn take_back(&mut self, updates: &mut RuleUpdates) {
        if std::mem::take(&mut self.is_replaced) && !self.outdated.is_empty() {
            self.is_taken_back = true;
            updates.touches(self.pid);
        }
        for place in self.outdated.drain(..) {
            if let Some(space) = self.space {
                updates.push(RuleUpdate::Forget { key: rule_update::key(space, place) });
            }
        }
    }

    /// All updates have come to the probes: what they walk from `now` on they walk by those.
    /// Answers the places whose rules have arrived.
    pub(super) fn arrived(&mut self, now: MonotonicNs) -> Vec<u64> {
        if std::mem::take(&mut self.is_taken_back) {
            self.replaced_at = Some(now);
        }
        std::mem::take(&mut self.on_their_way)
    }
}
