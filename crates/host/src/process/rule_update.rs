//! What the probes are to learn of the unwinder's rules: a list of changes to their maps, in order.
//! Rules belong to an address space, a number that a process gets with its first rule, and another
//! one after each exec or when everything about it is forgotten at once.

use ebpf_common::key::SpanPlace;
use ebpf_common::rule::{RuleKey, UnwindRule};
use std::collections::HashSet;

/// One change to the probes' rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleUpdate {
    /// This is how to leave a frame.
    Rule {
        /// Where.
        key: RuleKey,
        /// How.
        rule: UnwindRule,
    },
    /// That does not hold any more.
    Forget {
        /// Where.
        key: RuleKey,
    },
    /// The process's stacks are to be walked by the rules of this address space.
    Space {
        /// The process.
        pid: u32,
        /// The number.
        space: u32,
    },
    /// The process's stacks are not to be walked.
    NoSpace {
        /// The process.
        pid: u32,
    },
    /// Its threads say there what they work for.
    Spans {
        /// The process.
        pid: u32,
        /// Where.
        place: SpanPlace,
    },
    /// They do not any more.
    NoSpans {
        /// The process.
        pid: u32,
    },
}

/// RuleUpdates that wait to be taken to the probes.
#[derive(Debug, Default)]
pub(super) struct RuleUpdates {
    pending: Vec<RuleUpdate>,
    /// Processes that wait to be told that their rules have arrived.
    touched: HashSet<u32>,
    last_space: u32,
}

impl RuleUpdates {
    /// A number no address space has had. 0, which the probes use for none, is left out.
    pub(super) fn new_space(&mut self) -> u32 {
        self.last_space = self.last_space.checked_add(1).unwrap_or(1);
        self.last_space
    }

    pub(super) fn push(&mut self, update: RuleUpdate) {
        self.pending.push(update);
    }

    /// The process is to be told when this has arrived.
    pub(super) fn touches(&mut self, pid: u32) {
        self.touched.insert(pid);
    }

    /// The updates, and the processes that are to be told when they have arrived.
    pub(super) fn take(&mut self) -> (Vec<RuleUpdate>, HashSet<u32>) {
        (std::mem::take(&mut self.pending), std::mem::take(&mut self.touched))
    }
}

/// Key of the rule for a place in an address space.
pub(super) fn key(space: u32, place: u64) -> RuleKey {
    RuleKey { place, space, reserved: 0 }
}
