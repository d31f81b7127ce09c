//! Leaves a frame about which nothing is known: no unwind data, and instructions that do not say it
//! either (`x86_64/body.rs`). By its frame pointer, if it keeps one; else by the first word above
//! its stack pointer that can be its return address. What is found so is a guess, and is marked as
//! one.
//!
//! A word can be the return address when a call is before what it points to, and when the rule of
//! that place, if it has one, leads on: to another return address behind a call, or to the thread's
//! start. A frame may hold words of calls made before it was there, of which all this is as true:
//! the loader leaves whole chains behind when it binds a function. So a call whose instruction
//! leads just here, to code of which nothing is known either, goes before others; a call through a
//! pointer does not tell.
//!
//! Where the frame pointer leads somewhere it may be the caller's, or that of a frame further up:
//! code without unwind data is often written by hand, and has none of its own. So what is below it
//! is searched first, for such a call, or a caller that keeps the frame pointer.

use super::captured_stack::MissingValue;
use super::{CodeLookup, StackWalk, UnwindLimits};
use crate::rule::{Cfa, FrameKind, Rule, RuleRefusal};

/// Most words of one frame that are looked at, and of all frames of a stack.
const FRAME_WORDS: u64 = 512;
const STACK_WORDS: u32 = 2048;
/// Most places of a stack whose code is looked at, and in one search.
const STACK_PLACES: u32 = 128;
const SEARCH_PLACES: u32 = 32;
/// Code this far behind where a call leads may be the called function's.
const FUNCTION_BYTES: u64 = 64 << 10;

/// What may still be looked at for one stack, whatever is on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScanBudget {
    words: u32,
    places: u32,
}

impl Default for ScanBudget {
    fn default() -> Self {
        Self { words: STACK_WORDS, places: STACK_PLACES }
    }
}

/// What a word must have to be taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScanTarget {
    /// Any return address.
    Any,
    /// One whose frame has a rule, and which is behind a call to this place.
    CallTo { pc: u64 },
    /// The same, or in code that keeps the frame pointer.
    CallToOrKept { pc: u64 },
}

impl StackWalk<'_> {
    /// Goes to the caller of a frame at `pc` without a rule, if one can be found, and returns its
    /// PC. `scans`: the stack may be searched.
    pub(super) fn guess(
        &mut self,
        pc: u64,
        scans: bool,
        code: &mut dyn CodeLookup,
        limits: UnwindLimits,
    ) -> Option<u64> {
        // Where a call leaves its return address in a register, a frame may have none on the stack.
        let scans = scans && self.machine.link.is_none();
        let end = |walk: &Self| walk.floor.saturating_add(8 * FRAME_WORDS);
        if scans && let Ok(frame) = self.register(self.machine.frame_pointer) {
            let end = end(self).min(frame);
            if let Some(caller) = self.scan(ScanTarget::CallToOrKept { pc }, end, code, limits) {
                return Some(caller);
            }
        }
        let caller = self.leave_by_frame_pointer(code, limits);
        if caller.is_some() || !scans {
            return caller;
        }
        [ScanTarget::CallTo { pc }, ScanTarget::Any].into_iter().find_map(|wanted| {
            let end = end(self);
            self.scan(wanted, end, code, limits)
        })
    }

    /// Leaves the frame by the first word below `end` that fits.
    fn scan(
        &mut self,
        wanted: ScanTarget,
        end: u64,
        code: &mut dyn CodeLookup,
        limits: UnwindLimits,
    ) -> Option<u64> {
        let mut slot = self.floor.checked_next_multiple_of(8)?;
        let mut places = SEARCH_PLACES;
        while slot < end {
            self.scans.words = self.scans.words.checked_sub(1)?;
            let candidate = self.peek(slot).ok()?.0 & limits.address_mask;
            if code.is_executable(candidate.wrapping_sub(1)) {
                places = places.checked_sub(1)?;
                self.scans.places = self.scans.places.checked_sub(1)?;
                // One that was not seen may be the caller: what is found behind it would be the
                // caller's caller.
                if code.follows_call(candidate)?
                    && let Some(caller) = self.caller_at(slot, candidate, wanted, code, limits)?
                {
                    self.go_on_from(caller);
                    return Some(candidate);
                }
            }
            slot = slot.checked_add(8)?;
        }
        None
    }

    /// The walk at the caller whose return address at `slot` is `pc`, when it goes on from there;
    /// `None` outside when that was not seen.
    fn caller_at(
        &self,
        slot: u64,
        pc: u64,
        wanted: ScanTarget,
        code: &mut dyn CodeLookup,
        limits: UnwindLimits,
    ) -> Option<Option<Self>> {
        let rule = match code.step(pc.wrapping_sub(1), false).rule {
            Ok(rule) => Some(rule),
            Err(RuleRefusal::Unreadable | RuleRefusal::Budget) => return None,
            Err(_) => None,
        };
        if wanted != ScanTarget::Any
            && !rule.as_ref().is_some_and(|rule| self.is_confirmed(rule, pc, wanted, code))
        {
            return Some(None);
        }
        for caller in self.callers(slot) {
            let Some(rule) = &rule else { return Some(Some(caller)) };
            if rule.is_thread_start() {
                return Some(Some(caller));
            }
            let mut further = caller.copied();
            let leads_on = match further.leave(rule, code) {
                Ok(next) if rule.kind == FrameKind::Signal => {
                    code.is_executable(next & limits.address_mask)
                }
                // Zero is the end of a stack without another mark, and what is on stacks that
                // nobody has used yet.
                Ok(next) => code.follows_call(next & limits.address_mask)?,
                // It cannot be said.
                Err(MissingValue::BeyondCopy) => true,
                Err(MissingValue::NotSeen) => return None,
                Err(MissingValue::NotThere | MissingValue::NoCopy | MissingValue::Unknown) => false,
            };
            if leads_on {
                return Some(Some(caller));
            }
        }
        Some(None)
    }

    /// Whether the frame at the return address `pc` is a wanted caller by more than the call before
    /// it.
    fn is_confirmed(
        &self,
        rule: &Rule,
        pc: u64,
        wanted: ScanTarget,
        code: &mut dyn CodeLookup,
    ) -> bool {
        let by_frame_pointer = match rule.cfa {
            Cfa::Register { base, .. } | Cfa::Deref { base, .. } => {
                base == self.machine.frame_pointer
            }
        };
        let here = match wanted {
            ScanTarget::Any => return true,
            ScanTarget::CallToOrKept { .. } if by_frame_pointer => return true,
            ScanTarget::CallTo { pc } | ScanTarget::CallToOrKept { pc } => pc,
        };
        let to = code
            .call_target(pc)
            .filter(|to| here.checked_sub(*to).is_some_and(|at| at < FUNCTION_BYTES));
        // What has unwind data is another function.
        to.is_some_and(|to| {
            code.step(to, true)
                .rule
                .map_or(true, |rule| matches!(rule.kind, FrameKind::Stub { .. }))
        })
    }
}
