//! Frames in JIT memory. A body is looked at again once a second while it is met.

use super::{CodeView, Resolved};
use crate::process::cached_bodies::{CachedBody, RECHECK};
use crate::process::mapping::{Mapping, MappingKind};
use perfusion_model::frame::FrameKey;
use perfusion_unwind::TargetMemory;
use perfusion_unwind::managed::{CODE_BYTES, JitBody};
use perfusion_unwind::native::NATIVE;
use perfusion_unwind::rule::RuleRefusal;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bodies looked at again at once, each some reads of the process's memory: those that were met
/// since the last look and will soon be due.
pub(super) const BODIES_AT_ONCE: usize = 128;
/// And no more than there is time for: a batch that takes too long is given up, and its process
/// left alone for a minute, by whom a busy machine did that.
const TIME_AT_ONCE: Duration = Duration::from_millis(20);
/// How long it holds when the next one is not to be had although the process lives: a busy machine
/// holds a reading up for a moment; who holds it up for longer, or has others' held up, is not to
/// have a name that may be another method's by now.
pub(super) const UNSEEN: Duration = Duration::from_secs(5);

/// Looks whether bodies are still there: at the first, and at as many others as there is time for.
pub(super) fn looks(
    bodies: Vec<(u64, JitBody)>,
    memory: &dyn TargetMemory,
    time: Duration,
) -> Vec<(u64, Option<bool>, Range<u64>)> {
    let begin = Instant::now();
    let mut seen = Vec::new();
    for (start, body) in bodies {
        if !seen.is_empty() && begin.elapsed() >= time {
            break;
        }
        seen.push((start, body.is_current(NATIVE, memory), body.range));
    }
    seen
}

/// Memory of a process that is gone.
struct NoMemory;

impl TargetMemory for NoMemory {
    fn read(&self, _address: u64, _into: &mut [u8]) -> usize {
        0
    }
}

impl CodeView<'_> {
    /// Whether a known body covers `pc`; it is looked at again when that is due.
    pub(super) fn has_body(&mut self, pc: u64) -> Result<bool, RuleRefusal> {
        let Some((start, known)) = self.process.code.bodies.at(pc) else { return Ok(false) };
        let (checked, holds) = (known.checked, known.holds(self.now));
        if let Some(known) = self.process.code.bodies.get_mut(start) {
            known.is_used = true;
        }
        if holds {
            return Ok(true);
        }
        match self.look_at_bodies(start) {
            Some(is_current) => Ok(is_current),
            None if self.holds_unseen(checked) => Ok(true),
            None => Err(RuleRefusal::Unreadable),
        }
    }

    /// Looks whether the body at `first` is still there, and with it at others that are met as
    /// often, as long as there is time: a look costs less than to hand it over to the thread that
    /// may be held up by it. The answer is the first one's, `None` when it could not be seen.
    pub(super) fn look_at_bodies(&mut self, first: u64) -> Option<bool> {
        let soon = |known: &CachedBody| {
            known.is_used && self.now.duration_since(known.checked) >= RECHECK / 2
        };
        let others = self
            .process
            .code
            .bodies
            .iter()
            .filter(|(start, known)| **start != first && soon(known));
        let bodies: Vec<(u64, JitBody)> = self
            .process
            .code
            .bodies
            .get(first)
            .map(|known| (&first, known))
            .into_iter()
            .chain(others)
            .take(BODIES_AT_ONCE)
            .map(|(start, known)| (*start, known.body.clone()))
            .collect();
        let seen =
            self.process.memory()?.with(move |memory| looks(bodies, memory, TIME_AT_ONCE))?;
        let mut answer = None;
        for (start, is_current, range) in seen {
            if start == first {
                answer = is_current;
            }
            match is_current {
                Some(true) => {
                    if let Some(known) = self.process.code.bodies.get_mut(start) {
                        (known.checked, known.is_used) = (self.now, start == first);
                    }
                }
                Some(false) => {
                    self.counters.bodies_replaced += 1;
                    self.process.code.forget(&range);
                }
                // One that cannot be seen takes no other one's place in the next batch before it is
                // met again.
                None => {
                    if let Some(known) = self.process.code.bodies.get_mut(start) {
                        known.is_used = false;
                    }
                }
            }
        }
        answer
    }

    /// Whether a frame found at `pc` before is still that: the body it is of is still there. Its
    /// rule is then what it was, for the runtime writes the code of a body once, and unwind data
    /// are what a body is told by.
    pub(super) fn still_holds(&mut self, pc: u64, frame: FrameKey) -> Option<Instant> {
        let FrameKey::Managed { start, generation, .. } = frame else { return None };
        // Most bodies were looked at with another one: to find that costs less than to measure what
        // it costs.
        let due = self.process.code.bodies.at(pc).is_some_and(|(_, known)| !known.holds(self.now));
        let has_body = |view: &mut Self| view.has_body(pc);
        let found = if due { self.within_budget(has_body)? } else { has_body(self) };
        if found != Ok(true) {
            return None;
        }
        let (found, known) = self.process.code.bodies.at(pc)?;
        (found == start && known.generation == generation).then_some(known.checked)
    }

    /// Whether a look at JIT memory still holds although none can be had now. The memory of a
    /// process that has ended is what it was.
    pub(super) fn holds_unseen(&self, checked: Instant) -> bool {
        self.now.duration_since(checked) < UNSEEN || !self.process.is_alive()
    }

    /// The frame and rule at `pc` in JIT memory.
    pub(super) fn in_jit(&mut self, mapping: &Mapping, pc: u64, exact: bool) -> Resolved {
        let known = match self.has_body(pc) {
            Ok(known) => known,
            Err(refusal) => return (self.unknown(pc), Err(refusal)),
        };
        if !known {
            if let Some(found) = self.in_memory_image(mapping, pc, exact) {
                return found;
            }
            let mut budget = self.process.budget;
            let Some(memory) = self.process.memory() else {
                return (self.unknown(pc), Err(RuleRefusal::Unreadable));
            };
            let start = mapping.range.start;
            let found = memory.with(move |memory| {
                let found = JitBody::find(NATIVE, memory, pc, start, &mut budget);
                (found, budget)
            });
            let Some((found, budget)) = found else {
                return (self.unknown(pc), Err(RuleRefusal::Unreadable));
            };
            self.process.budget = budget;
            match found {
                Ok(Some(body)) => self.learn(body),
                Ok(None) => return self.read_stub(pc),
                Err(refusal) => return (self.unknown(pc), Err(refusal)),
            }
        }
        let Some((start, known)) = self.process.code.bodies.before(pc) else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        let frame = self.managed(start, known.generation, pc);
        let rule = match &self.process.memory {
            Some(memory) => known.body.rule(NATIVE, memory, pc, exact),
            None => known.body.rule(NATIVE, &NoMemory, pc, exact),
        };
        (frame, rule)
    }

    /// The frame and rule at `pc` in code that nobody describes, by its instructions.
    fn read_stub(&mut self, pc: u64) -> Resolved {
        let mut code = [0u8; CODE_BYTES];
        let length = self.process.read(pc, &mut code);
        self.stub(pc, code.get(..length).unwrap_or_default())
    }

    /// The frame and rule at `pc` of a ReadyToRun image in anonymous memory.
    fn in_memory_image(&mut self, mapping: &Mapping, pc: u64, exact: bool) -> Option<Resolved> {
        if mapping.region != (MappingKind::Jit { doublemapped: false }) {
            return None;
        }
        self.process.memory()?;
        let process = &mut *self.process;
        let memory = process.memory.as_ref()?;
        let image = process.code.images.of(memory, &mapping.range)?;
        let rva = image.rva(pc)?;
        let pe = image.view(memory);
        let Some(function) = image.directory().function(NATIVE, &pe, rva) else {
            return Some(self.read_stub(pc));
        };
        let rule = image.directory().rule(NATIVE, &pe, function, rva, exact);
        let start = pc.wrapping_sub(u64::from(rva - function.begin));
        Some((self.managed(start, 0, pc), rule))
    }

    /// Remembers a body that was found.
    pub(super) fn learn(&mut self, body: JitBody) {
        self.counters.steps_cleared += u64::from(self.process.code.learn(body, self.now));
    }
}
