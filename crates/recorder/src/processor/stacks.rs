//! From the context of an event to an interned stack.

use super::Processor;
use super::questions::StackTimes;
use crate::naming;
use perfusion_dotnet::attach::shim_copy;
use perfusion_model::event::{MonotonicNs, ThreadId, TraceSpan, UserContext};
use perfusion_model::frame::{FrameKey, Marker};
use perfusion_model::stack::StackId;
use perfusion_symbolize::file_name;
use perfusion_unwind::unwinder::UnwindLimits;

impl Processor {
    /// The stack of a thread that worked for this span.
    pub(super) fn stack_for(
        &mut self,
        thread: ThreadId,
        time: MonotonicNs,
        kernel: &[u64],
        user: Option<&UserContext>,
        span: Option<TraceSpan>,
    ) -> StackId {
        let mut frames: Vec<FrameKey> =
            kernel.iter().map(|&address| FrameKey::Kernel(address)).collect();
        if let Some(user) = user {
            let kernel = frames.len();
            if self.unwind(thread.pid, StackTimes::at(time), user, &mut frames) {
                let user_frames = frames.get(kernel..).unwrap_or_default();
                self.identities.saw_start(thread, user_frames, &self.processes);
            }
            // Only after the walk, which takes up a process that is new.
            self.thread_contexts.look(thread.pid, &mut self.processes);
        }
        if self.identities.is_collector(thread, &self.processes) {
            frames.push(FrameKey::Marker(Marker::GarbageCollector));
        } else if self.values.gc.collects(thread, time) {
            // The collection is not the work of the method that happened to allocate. The stack is
            // cut there, so that all of the collection meets.
            if let Some(managed) =
                frames.iter().position(|frame| matches!(frame, FrameKey::Managed { .. }))
            {
                frames.truncate(managed);
            }
            frames.push(FrameKey::Marker(Marker::GarbageCollector));
        }
        if frames.is_empty() {
            // 32-bit code, or a stack the kernel could not walk.
            frames.push(FrameKey::Marker(Marker::StackLost));
        }
        self.by_lines(&mut frames);
        self.stacks.intern_for(&frames, span, thread.pid)
    }

    /// Unwinds a context, appends its frames, and asks for their names. True when the walk reached
    /// the thread's start without a guess.
    pub(super) fn unwind(
        &mut self,
        pid: u32,
        times: StackTimes,
        user: &UserContext,
        frames: &mut Vec<FrameKey>,
    ) -> bool {
        let unwound = self.processes.finish(pid, user, UnwindLimits::default());
        self.counters.walked += 1;
        self.counters.guessed_frames += u64::from(unwound.guessed);
        let whole = unwound.reached_thread_start && unwound.guessed == 0;
        self.counters.exact += u64::from(whole);
        // Of a stack seen a moment ago all names were asked for then, but a shim may have said "not
        // now".
        let withheld =
            || self.processes.id(pid).is_some_and(|process| self.symbolizer.has_withheld(process));
        let news = if unwound.seen_before && !withheld() { &[][..] } else { &unwound.frames };
        let sure = sure_frames(&unwound.frames);
        self.questions.walked(pid, times, (news, sure), &mut self.symbolizer);
        frames.extend(unwound.frames);
        whole
    }

    /// The stack of an event of the runtime's, see [`Processor::intern_event`].
    pub(super) fn event_stack(
        &mut self,
        pid: u32,
        times: StackTimes,
        user: &UserContext,
    ) -> StackId {
        let mut frames = Vec::new();
        self.unwind(pid, times, user, &mut frames);
        self.intern_event(frames)
    }

    /// The innermost frames are the shim and the event's delivery: the event's stack begins at the
    /// innermost managed frame. If the copy of the stack ended before one, what is left is what the
    /// runtime did. Our own callback never stays, or it would be taken for who allocated.
    pub(super) fn intern_event(&mut self, mut frames: Vec<FrameKey>) -> StackId {
        let managed = frames.iter().position(|frame| matches!(frame, FrameKey::Managed { .. }));
        let own = || frames.iter().rposition(|frame| self.is_of_shim(*frame)).map(|last| last + 1);
        if let Some(inside) = managed.or_else(own) {
            frames.drain(..inside);
        }
        self.by_lines(&mut frames);
        self.stacks.intern(&frames)
    }

    /// Frames of one line become one frame, as far as lines are known by now: else each address
    /// would make stacks of its own.
    fn by_lines(&self, frames: &mut [FrameKey]) {
        if self.symbolizer.finds_lines() {
            frames.iter_mut().for_each(|frame| *frame = self.symbolizer.line_frame(*frame));
        }
    }

    fn is_of_shim(&self, frame: FrameKey) -> bool {
        let FrameKey::Native { image, .. } = frame else { return false };
        self.processes.image(image).is_some_and(|image| shim_copy::is_ours(file_name(&image.path)))
    }

    /// The frames of a stack, innermost first.
    #[must_use]
    pub fn frames(&self, stack: StackId) -> &[FrameKey] {
        naming::without_own_frames(&self.symbolizer, self.stacks.frames(stack))
    }
}

/// How many of the innermost frames were on the stack for sure, when it was taken. What was reached
/// through a guess may be the return address of a call that is long over, into code that is not
/// there any more. The same holds for all but the innermost user frame of a walk that went astray.
/// A copy that was too short, and too many frames, say nothing against the frames before.
pub(super) fn sure_frames(frames: &[FrameKey]) -> usize {
    let marker = frames.iter().position(|frame| matches!(frame, FrameKey::Marker(_)));
    match frames.last() {
        Some(FrameKey::Marker(
            Marker::TruncatedNoRule
            | Marker::TruncatedUnreadable
            | Marker::TruncatedStale
            | Marker::Exiting,
        )) => {
            let kernel =
                frames.iter().take_while(|frame| matches!(frame, FrameKey::Kernel(_))).count();
            (kernel + 1).min(marker.unwrap_or(frames.len()))
        }
        _ => marker.unwrap_or(frames.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::{FrameKey, Marker, sure_frames};
    use perfusion_model::frame::ProcessId;

    #[test]
    fn only_frames_of_exact_walks_are_sure() {
        let managed =
            |start| FrameKey::Managed { process: ProcessId(0), start, generation: 0, offset: None };
        let kernel = FrameKey::Kernel(1);
        let ended = |marker| {
            let ended = [kernel, managed(1), managed(2), FrameKey::Marker(marker)];
            sure_frames(&ended)
        };
        assert_eq!(sure_frames(&[]), 0);
        assert_eq!(sure_frames(&[kernel, managed(1), managed(2)]), 3);
        assert_eq!([Marker::TruncatedCopy, Marker::TruncatedDepth].map(ended), [3, 3]);
        let astray = [
            Marker::TruncatedNoRule,
            Marker::TruncatedStale,
            Marker::TruncatedUnreadable,
            Marker::Exiting,
        ];
        assert_eq!(astray.map(ended), [2; 4], "where it stood");
        let guessed = [managed(1), managed(2), FrameKey::Marker(Marker::Guessed), managed(3)];
        assert_eq!(sure_frames(&guessed), 2);
        assert_eq!(sure_frames(&[FrameKey::Marker(Marker::TruncatedStale)]), 0);
    }
}
