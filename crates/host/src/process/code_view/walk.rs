//! What a walk asks of the view: steps, remembered or found anew, and the code and stack around an
//! address. The rules of steps that the probes handed over are pushed to them.

use super::{CodeView, RulePush};
use crate::process::cached_steps::{CachedStep, place};
use crate::process::mapping::{Mapping, MappingKind};
use crate::process::rule_update::{self, RuleUpdate};
use crate::process::seed::still_sleeps;
use perfusion_model::event::{BlockedThread, MonotonicNs};
use perfusion_model::frame::FrameKey;
use perfusion_unwind::encode::encode;
use perfusion_unwind::native::NATIVE;
use perfusion_unwind::rule::RuleRefusal;
use perfusion_unwind::unwinder::{CodeLookup, FrameRule};

/// Bytes of a stack read at once where its copy has ended.
const STACK_PIECE_BYTES: usize = 64 << 10;

impl CodeView<'_> {
    /// Pushes the rule of a remembered step to the probes, if they can use it.
    pub(super) fn push_rule(&mut self, place: u64) {
        let again = std::mem::replace(&mut self.push, RulePush::New) == RulePush::Again;
        let Some(cached) = self.process.code.steps.get_mut(place) else { return };
        if cached.pushed.is_some() && !again {
            return;
        }
        let Some(rule) = cached.step.rule.as_ref().ok().and_then(|rule| encode(NATIVE, rule))
        else {
            return;
        };
        if !self.common.take_rule(&mut self.process.share) {
            self.counters.rules_refused += 1;
            return;
        }
        // Of a rule they seem to have lost, samples may be on the way that were walked before they
        // did.
        let pushed = &mut self.process.code.pushed;
        if cached.pushed.is_none() {
            cached.send();
            pushed.send(place, self.updates);
        }
        let space = pushed.open_space(self.updates);
        // An outdated rule may be the rule of this very place.
        pushed.take_back(self.updates);
        self.updates.push(RuleUpdate::Rule { key: rule_update::key(space, place), rule });
        self.counters.rules_pushed += 1;
    }

    /// The step at a place: the remembered one while it holds.
    pub(super) fn look_up(&mut self, pc: u64, exact: bool) -> FrameRule {
        let key = place(pc, exact);
        // Such an address is in no mapping, and its key would be another's.
        if pc >> 63 != 0 {
            return FrameRule { frame: self.unknown(pc), rule: Err(RuleRefusal::NoEntry) };
        }
        if let Some(cached) = self.process.code.steps.get(key) {
            if cached.holds(self.now) {
                return cached.step.clone();
            }
            // Why there was none may be over.
            let frame = cached.step.rule.is_ok().then_some(cached.step.frame);
            if let Some(frame) = frame
                && let Some(looked) = self.still_holds(pc, frame)
                && let Some(cached) = self.process.code.steps.get_mut(key)
            {
                cached.checked = Some(looked);
                return cached.step.clone();
            }
        }
        let (frame, rule) = self.resolve_within_budget(pc, exact);
        let step = FrameRule { frame, rule: rule.map(|rule| self.rules.intern(rule)) };
        let lasting = !matches!(step.rule, Err(RuleRefusal::Budget | RuleRefusal::Unreadable));
        // What cannot be looked at again, because the process ended or had its share, is still what
        // it was. Only JIT memory is.
        if !lasting && let Some(cached) = self.process.code.steps.get(key) {
            let seen =
                self.process.code.bodies.at(pc).map(|(_, known)| known.checked).or(cached.checked);
            if step.rule == Err(RuleRefusal::Budget)
                || seen.is_none_or(|seen| self.holds_unseen(seen))
            {
                return cached.step.clone();
            }
        }
        // What could not be looked at may be there next time; addresses outside all mappings are
        // not worth a place.
        if lasting && self.process.space.mappings.find(pc).is_some() {
            if self.process.code.steps.is_full() {
                self.process.code.steps.evict(&mut self.process.code.pushed);
                self.counters.steps_cleared += 1;
            }
            let jit = self
                .process
                .space
                .mappings
                .find(pc)
                .is_some_and(|m| matches!(m.region, MappingKind::Jit { .. }));
            let cached =
                CachedStep { step: step.clone(), checked: jit.then_some(self.now), pushed: None };
            let old = self.process.code.steps.insert(key, cached);
            if old.as_ref().is_some_and(|old| old.step != step) {
                self.process.code.code_is_replaced();
            }
            if let Some(old) = old.filter(|old| old.pushed.is_some()) {
                if old.step == step
                    && let Some(cached) = self.process.code.steps.get_mut(key)
                {
                    cached.pushed = old.pushed;
                } else {
                    self.process.code.pushed.outdate(key);
                }
            }
        }
        step
    }
}

impl CodeLookup for CodeView<'_> {
    fn step(&mut self, pc: u64, exact: bool) -> FrameRule {
        let step = self.look_up(pc, exact);
        if self.push != RulePush::Off {
            self.push_rule(place(pc, exact));
        }
        step
    }

    fn walked(&mut self, pc: u64, exact: bool, time: MonotonicNs) -> Option<FrameKey> {
        let key = place(pc, exact);
        // Nearly always: a remembered step that holds.
        let mut cached = self.process.code.steps.get(key);
        let frame = match cached.filter(|cached| cached.holds(self.now)) {
            Some(cached) => cached.step.frame,
            None => {
                let step = self.look_up(pc, exact);
                cached = self.process.code.steps.get(key);
                // It cannot be seen whether the rule still holds.
                if cached.is_some_and(|cached| cached.step != step) {
                    return None;
                }
                step.frame
            }
        };
        // Taken back, or pushed later: then the probes used a rule of code that is not there any
        // more, or one that was dropped for want of room; the latter for certain where no code was
        // replaced shortly before.
        let pushed = cached.and_then(|cached| cached.pushed);
        (pushed.is_some_and(|pushed| pushed <= time)
            || self.process.code.pushed.is_unreplaced(time))
        .then_some(frame)
    }

    fn is_executable(&mut self, address: u64) -> bool {
        self.process.space.mappings.find(address).is_some()
    }

    fn follows_call(&mut self, address: u64) -> Option<bool> {
        let follows = self.within_budget(|view| view.is_behind_call(address));
        self.counters.budget_refusals += u64::from(follows.is_none());
        follows.flatten()
    }

    /// Asked of what [`CodeLookup::follows_call`] was just asked.
    fn call_target(&mut self, address: u64) -> Option<u64> {
        let mapping = self.process.space.mappings.find(address.wrapping_sub(1)).cloned()?;
        (NATIVE.code.call_target)(&self.code_before(&mapping, address)?, address)
    }

    /// Of a thread that still sleeps where it did.
    fn stack(&mut self, address: u64) -> Option<Vec<u8>> {
        let BlockedThread { tid, exec_ns } = self.asleep?;
        let piece = self.within_budget(|view| {
            let pid = view.process.pid;
            // Before, lest those be read that are gone already, and behind it, which says that it
            // is true.
            let sleeps = || still_sleeps(pid, tid, exec_ns);
            let mut bytes = vec![0; STACK_PIECE_BYTES];
            let length = if sleeps() { view.process.read(address, &mut bytes) } else { 0 };
            bytes.truncate(length);
            (length > 0 && sleeps()).then_some(bytes)
        });
        self.counters.budget_refusals += u64::from(piece.is_none());
        let piece = piece.flatten();
        self.counters.stack_pieces += u64::from(piece.is_some());
        piece
    }
}

impl CodeView<'_> {
    /// `None` when the code before `address` could not be read.
    fn is_behind_call(&mut self, address: u64) -> Option<bool> {
        let Some(mapping) = self.process.space.mappings.find(address.wrapping_sub(1)).cloned()
        else {
            return Some(false);
        };
        self.code_before(&mapping, address).map(|code| (NATIVE.code.ends_with_call)(&code))
    }

    /// The bytes before `address` in a mapping.
    fn code_before(&mut self, mapping: &Mapping, address: u64) -> Option<[u8; 8]> {
        let (start, mut code) = (mapping.range.start, [0u8; 8]);
        let from = address.wrapping_sub(8);
        if self.read_code(mapping, from, &mut code) < code.len() {
            // The mapping may begin so shortly before: with zeros in front of it, none of which a
            // call can begin with.
            code = [0; 8];
            let missing = usize::try_from(start.checked_sub(from)?).ok()?;
            let there = code.get_mut(missing..)?;
            if self.read_code(mapping, start, there) < there.len() {
                return None;
            }
        }
        Some(code)
    }

    /// Reads from `address` on, which is in a mapping or shortly before it.
    fn read_code(&mut self, mapping: &Mapping, address: u64, into: &mut [u8]) -> usize {
        if mapping.region != MappingKind::File {
            return self.process.read(address, into);
        }
        if !mapping.range.contains(&address) {
            return 0;
        }
        let image = self.image(mapping).and_then(|id| self.images.get(id));
        image.map_or(0, |image| image.read_at(mapping.file_offset_of(address), into))
    }
}
