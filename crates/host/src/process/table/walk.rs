//! Walks of stacks: the frames of a context that a source has handed over.

use super::ProcessTable;
use super::held_memory::MAX_CACHED;
use crate::process::ProcessError;
use crate::process::code_view::{CodeView, RulePush};
use crate::process::counters::ProcessTableCounters;
use crate::process::rule_update::RuleUpdate;
use crate::process::seed::is_gone;
use perfusion_model::event::{UserContext, WalkEnd};
use perfusion_model::frame::Marker;
use perfusion_unwind::unwinder::{UnwindLimits, UnwoundStack, walk_traced};
use std::time::Instant;

impl ProcessTableCounters {
    fn count(&mut self, finished: &UnwoundStack) {
        self.stacks += 1;
        self.stacks_of_gone_processes +=
            u64::from(finished.broken == Some(Marker::TruncatedProcessGone));
        self.stacks_stale += u64::from(finished.broken == Some(Marker::TruncatedStale));
        self.stacks_exiting += u64::from(finished.is_exiting());
        self.stacks_broken += u64::from(finished.is_broken());
        self.stacks_guessed += u64::from(finished.reached_thread_start && finished.guessed > 0);
    }
}

impl ProcessTable {
    /// Walks a context of a thread of `pid` to the thread's start. A process not seen before is
    /// taken up from /proc.
    pub fn finish(
        &mut self,
        pid: u32,
        context: &UserContext,
        limits: UnwindLimits,
    ) -> UnwoundStack {
        self.held.close_memories(&mut self.registry.live);
        let adopted = self.adopt(pid);
        self.settle(pid);
        self.fill_start(pid);
        let finished = match adopted {
            Err(ProcessError::Full { .. }) => {
                UnwoundStack::default().broken(Marker::TruncatedNotKnown)
            }
            Err(ProcessError::Read { source, .. }) if !is_gone(&source) => {
                UnwoundStack::default().broken(Marker::TruncatedUnreadable)
            }
            _ => self.walk_in(pid, context, limits),
        };
        self.evict_caches(MAX_CACHED);
        self.counters.count(&finished);
        if let Some(process) = self.registry.live.get_mut(&pid) {
            process.stacks += 1;
            process.stacks_broken += u64::from(finished.is_broken());
        }
        finished
    }

    /// Walks a context of a process that is known, or is gone.
    fn walk_in(&mut self, pid: u32, context: &UserContext, limits: UnwindLimits) -> UnwoundStack {
        let Some(process) = self.registry.live.get_mut(&pid) else {
            return UnwoundStack::default().broken(Marker::TruncatedProcessGone);
        };
        if let Some(probed) = &context.walk
            && probed.space != process.code.pushed.space().unwrap_or(0)
        {
            if !probed.frames.is_empty() && !process.code.pushed.knows_space(probed.space) {
                return UnwoundStack::default().broken(Marker::TruncatedStale);
            }
            if let Some(space) = process.code.pushed.space() {
                // Just given and not there yet, or lost.
                self.updates.push(RuleUpdate::Space { pid, space });
            }
        }
        let (now, before) = (Instant::now(), process.code.len());
        process.used = now;
        let whole = context.walk.as_ref().filter(|probed| probed.end == WalkEnd::ThreadStart);
        let copied = self.copies_only || context.walk.is_none();
        let seen = match whole {
            Some(probed) => process.code.walked.get(probed, now),
            None if copied => process.code.walked.get_copy(context, now),
            None => None,
        };
        if let Some(frames) = seen {
            return UnwoundStack {
                frames: frames.to_vec(),
                reached_thread_start: true,
                seen_before: true,
                ..UnwoundStack::default()
            };
        }
        let push = if copied { RulePush::Off } else { RulePush::Again };
        let mut view = CodeView {
            process,
            images: &mut self.images,
            rules: &mut self.rules,
            counters: &mut self.counters,
            updates: &mut self.updates,
            common: &mut self.common,
            now,
            push,
            asleep: context.asleep,
            offsets: self.offsets,
        };
        let (finished, trace) = walk_traced(context, &mut view, limits);
        view.process.code.pushed.take_back(view.updates);
        if finished.reached_thread_start {
            match whole {
                Some(probed) => view.process.code.walked.insert(probed, &finished.frames, now),
                None if copied && finished.guessed == 0 && trace.is_whole() => {
                    view.process.code.walked.insert_copy(context, trace, &finished.frames, now);
                }
                None => {}
            }
        }
        self.held.cached += view.process.code.len().saturating_sub(before);
        finished
    }
}
