//! Names of frames: which are missing, and which were told.

use super::Processor;
use super::questions::{NameRequest, Questions};
use super::stacks;
use crate::read_names::{ReadName, ReadProcess, UnreadName};
use perfusion_dotnet::method_names::UnnamedCode;
use perfusion_model::event::{MonotonicNs, RegionId, ThreadProgress, ThreadSnapshot};
use perfusion_model::frame::{FrameKey, ProcessId};
use perfusion_model::stack::StackId;
use std::collections::HashSet;

impl Processor {
    /// The program of a region: the one that its process was, if that is another one by now.
    fn program_of(&self, region: RegionId, pid: u32) -> Option<ProcessId> {
        match self.identities.retired.of_region(region) {
            Some(retired) => retired.process,
            None => self.processes.id(pid),
        }
    }

    /// What the events since the last call make it ask of shims.
    pub fn take_questions(&mut self) -> Questions {
        self.identities.pre_attach.read(&mut self.identities.names);
        self.questions.take()
    }

    /// Managed methods of living processes that were seen a moment ago and have no answer yet.
    #[must_use]
    pub fn unanswered(&self, now: MonotonicNs) -> Vec<NameRequest> {
        let of = |(process, pid)| self.questions.unanswered(process, pid, now, &self.symbolizer);
        self.processes_with_shim().flat_map(of).collect()
    }

    /// Managed methods that shims would not ask about, for a last try: some lie in code that has
    /// turned out to stay.
    #[must_use]
    pub(crate) fn withheld(&self) -> Vec<NameRequest> {
        let of = |(process, pid)| self.questions.withheld(process, pid, &self.symbolizer);
        self.processes_with_shim().flat_map(of).collect()
    }

    /// The names that can be read instead of asked for: of these questions those that no shim
    /// answers, and what a shim would not, or could not, answer since the last call.
    #[must_use]
    pub(crate) fn unread(&mut self, questions: &Questions) -> Vec<UnreadName> {
        let refused = self.questions.take_refused();
        let of = |pid: u32, start: u64| {
            let id = self.processes.id(pid)?;
            let start_ticks = self.processes.info(id)?.start_ticks?;
            let (generation, body) = self.processes.managed_body(pid, start)?;
            if self.symbolizer.is_read(id, start, generation) {
                return None;
            }
            Some(UnreadName {
                process: ReadProcess { id, pid, start_ticks },
                generation,
                code: UnnamedCode { start, body },
            })
        };
        let without_shim = |request: &&NameRequest| {
            self.regions.of(request.pid).next().is_none() && self.questions.is_asked(request.pid)
        };
        let asked = questions.names().iter().filter(without_shim);
        let asked = asked.map(|request| (request.pid, request.address));
        asked.chain(refused).filter_map(|(pid, start)| of(pid, start)).collect()
    }

    /// Takes names that were read.
    pub(crate) fn learn_read(&mut self, names: Vec<ReadName>) {
        for ReadName { process, generation, method } in names {
            self.symbolizer.learn_read(process, generation, &method);
        }
    }

    fn processes_with_shim(&self) -> impl Iterator<Item = (ProcessId, u32)> {
        self.regions.iter().filter_map(|(_, pid)| Some((self.processes.id(pid)?, pid)))
    }

    /// Asks for what has no name yet in a stack that a thread was in at `time`.
    pub(super) fn ask_again(&mut self, pid: u32, stack: StackId, time: MonotonicNs) {
        let frames = self.stacks.frames(stack);
        let sure = &frames[..stacks::sure_frames(frames)];
        self.questions.ask_again(pid, sure, time, &mut self.symbolizer);
    }

    /// All threads as they are at the end, read after `at`. Those that wait were in their stacks
    /// then, or came there later: a shim that was loaded after they were seen can now be asked for
    /// the names.
    pub fn still_there(&mut self, threads: &[ThreadSnapshot], at: MonotonicNs) {
        for snapshot in threads {
            let thread = snapshot.times.thread;
            if let ThreadProgress::Waiting { start, .. } = snapshot.progress
                && let Some(wait) =
                    self.values.accounts.waiting(thread.tid).filter(|wait| wait.start == start)
            {
                self.ask_again(thread.pid, wait.stack, at.max(start));
            }
        }
    }

    /// Counts the managed frames of a window, and those that its end found without a name although
    /// there is a shim to ask.
    pub(super) fn count_managed(&mut self, frames: &HashSet<FrameKey>) {
        let asked = self.regions.iter().filter(|&(_, pid)| self.questions.is_asked(pid));
        let asked: HashSet<ProcessId> =
            asked.filter_map(|(region, pid)| self.program_of(region, pid)).collect();
        let methods: HashSet<FrameKey> = frames.iter().map(|frame| frame.body()).collect();
        for frame in methods {
            if let FrameKey::Managed { process, .. } = frame
                && asked.contains(&process)
            {
                let is_unnamed = self.symbolizer.symbol(frame).unresolved.is_some();
                self.counters.managed_frames += 1;
                self.counters.managed_unnamed += u64::from(is_unnamed);
            }
        }
    }

    /// Names the frames of these stacks, all in one batch.
    pub fn name_stacks(&mut self, stacks: &[StackId]) {
        let frames = stacks.iter().flat_map(|&stack| self.stacks.frames(stack)).copied();
        let frames = frames.chain(self.values.lock_events.frames());
        let frames = frames.chain(self.identities.starts.unnamed());
        self.symbolizer.resolve(frames, &self.processes);
        self.identities.starts.name(&self.symbolizer);
        let stacks = stacks.iter().map(|&stack| self.stacks.frames(stack));
        self.wait_reasons.learn(
            stacks,
            &self.values.lock_events,
            &mut self.symbolizer,
            &self.processes,
        );
    }

    /// Names the frames of all stacks there are so far, so that it is done when their values are
    /// summed up.
    pub(crate) fn name_early(&mut self) {
        let frames = self.stacks.iter().flatten().copied();
        self.symbolizer.resolve(frames, &self.processes);
    }
}
