//! The view that a walk has of one process: which code an address is in, what frame that is and by
//! which rule it is left. JIT memory is looked at again once a second per method in use.

mod jit;
mod native;
mod walk;

use super::budget::{CommonBudget, cpu_time};
use super::counters::ProcessTableCounters;
use super::image::ImageError;
use super::images::ImageCache;
use super::interned_rules::InternedRules;
use super::live::LiveProcess;
use super::mapping::{Mapping, MappingKind};
use super::proc_maps::read_maps;
use super::rule_update::RuleUpdates;
use perfusion_model::event::BlockedThread;
use perfusion_model::frame::{FrameKey, ImageId};
use perfusion_unwind::managed::CODE_BYTES;
use perfusion_unwind::native::NATIVE;
use perfusion_unwind::rule::{Rule, RuleRefusal};
use std::io::ErrorKind;
use std::time::Instant;

/// What is found at a place: a frame, and the rule by which it is left.
type Resolved = (FrameKey, Result<Rule, RuleRefusal>);

/// Everything a walk needs of one process.
pub(super) struct CodeView<'a> {
    pub(super) process: &'a mut LiveProcess,
    pub(super) images: &'a mut ImageCache,
    pub(super) rules: &'a mut InternedRules,
    pub(super) counters: &'a mut ProcessTableCounters,
    pub(super) updates: &'a mut RuleUpdates,
    pub(super) common: &'a mut CommonBudget,
    pub(super) now: Instant,
    /// Which rules of the frames that the probes handed over are pushed to them.
    pub(super) push: RulePush,
    /// The thread, when it was blocked.
    pub(super) asleep: Option<BlockedThread>,
    /// Frames of methods say where in the body they are.
    pub(super) offsets: bool,
}

/// Which rules are pushed to the probes on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RulePush {
    /// None: the context is not from the probes.
    Off,
    /// The next frame's rule, even if it was pushed before: the probes seem to have lost it.
    Again,
    /// The rules that were not pushed before.
    New,
}

impl CodeView<'_> {
    /// The mapping that `pc` is in; the maps are read anew for an address that none covers.
    fn find(&mut self, pc: u64) -> Option<Mapping> {
        if let Some(mapping) = self.process.space.mappings.find(pc) {
            return Some(mapping.clone());
        }
        if !self.process.space.begin_refresh(self.now) {
            return None;
        }
        self.counters.refreshes += 1;
        let ticks = self.process.start_ticks?;
        if crate::process::start_ticks(self.process.pid) != Some(ticks) {
            return None;
        }
        for mapping in read_maps(self.process.pid).ok()? {
            if !self.process.space.mappings.has(&mapping) {
                self.process.map(mapping, self.counters);
            }
        }
        let found = self.process.space.mappings.find(pc).cloned();
        self.process.space.end_refresh(found.is_some());
        found
    }

    /// The frame of an address of which nothing is known.
    fn unknown(&self, address: u64) -> FrameKey {
        FrameKey::Unknown { process: self.process.id, address }
    }

    /// The frame of the method whose body begins at `start`, at `pc` in it.
    fn managed(&self, start: u64, generation: u32, pc: u64) -> FrameKey {
        let process = self.process.id;
        let offset = self.offsets.then(|| pc.checked_sub(start).and_then(|o| o.try_into().ok()));
        FrameKey::Managed { process, start, generation, offset: None }.at(offset.flatten())
    }

    /// The frame and rule at `pc`, which is `exact` where a thread was interrupted.
    pub(super) fn resolve(&mut self, pc: u64, exact: bool) -> Resolved {
        let Some(mapping) = self.find(pc) else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        match mapping.region {
            MappingKind::File => self.in_file(&mapping, pc, exact),
            MappingKind::Vdso => self.in_vdso(&mapping, pc, exact),
            MappingKind::Jit { .. } if self.process.space.is_clr => {
                self.in_jit(&mapping, pc, exact)
            }
            MappingKind::Jit { .. } | MappingKind::Other => {
                (self.unknown(pc), Err(RuleRefusal::NoEntry))
            }
        }
    }

    /// The file of a mapping, opened when it is first needed.
    fn image(&mut self, mapping: &Mapping) -> Option<ImageId> {
        let key = mapping.file();
        match self.process.space.images.get(&key) {
            Some(None) => return None,
            Some(Some(id)) if self.images.get(*id).is_some_and(|i| !i.is_closed()) => {
                return Some(*id);
            }
            _ => {}
        }
        let closed = self.process.space.known_image(key);
        let resolved = self.images.resolve(self.process.pid, mapping, self.process.elsewhere);
        if let Err(error) = &resolved {
            self.counters.images_failed += 1;
            tracing::debug!(%error, "mapped file not usable");
        }
        // One that was closed for want of room and cannot be opened again is still the same file.
        // A file system that did not answer in time may do so later.
        let slow = matches!(
            &resolved,
            Err(ImageError::Open { source, .. }) if source.kind() == ErrorKind::TimedOut
        );
        let id = resolved.ok().or(closed);
        if !slow {
            self.process.set_image(key, id);
        }
        id
    }

    /// The code at `offset` of a file.
    fn code(&self, id: ImageId, offset: u64) -> Vec<u8> {
        let mut code = vec![0u8; CODE_BYTES];
        let length = self.images.get(id).map_or(0, |i| i.read_at(offset, &mut code));
        code.truncate(length);
        code
    }

    /// A stub of the runtime at `pc`, which is left as its `code` says.
    fn stub(&self, pc: u64, code: &[u8]) -> Resolved {
        let frame = FrameKey::Stub { process: self.process.id, address: pc };
        let rule = if code.is_empty() {
            Err(RuleRefusal::Unreadable)
        } else {
            (NATIVE.code.stub)(code, pc)
        };
        (frame, rule)
    }

    /// Does what the process's share of work has room for.
    fn within_budget<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.process.refill(self.common, self.now);
        if !self.common.has_time(&self.process.share) {
            return None;
        }
        let before = cpu_time();
        let done = work(self);
        self.common.spend(&mut self.process.share, cpu_time().saturating_sub(before));
        Some(done)
    }

    /// [`CodeView::resolve`] within the process's share of work.
    fn resolve_within_budget(&mut self, pc: u64, exact: bool) -> Resolved {
        let found = self
            .within_budget(|view| view.resolve(pc, exact))
            .unwrap_or_else(|| (self.unknown(pc), Err(RuleRefusal::Budget)));
        self.counters.budget_refusals += u64::from(matches!(found.1, Err(RuleRefusal::Budget)));
        found
    }
}

#[cfg(test)]
mod tests;
