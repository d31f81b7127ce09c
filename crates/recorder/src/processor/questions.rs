//! Which methods' names the shims are asked for, and when.

use crate::question_times::QuestionTimes;
use perfusion_model::event::{MethodBody, MonotonicNs, RegionId};
use perfusion_model::frame::{FrameKey, ProcessId};
use perfusion_sources::shim::ShimSource;
use perfusion_symbolize::Symbolizer;
use std::collections::HashSet;

/// Code heaps are made of blocks of this size, each of one loader allocator
/// (`ExecutableAllocator::Granularity` of dotnet/runtime).
const CODE_BLOCK: u64 = 64 << 10;
/// Each answer leads to at most this many questions about other code of its block.
const NEIGHBOURS: usize = 64;
/// Most addresses without a name that are remembered until they are taken.
const MOST_REFUSED: usize = 4096;

/// A managed method body whose name is to be asked of its process's shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameRequest {
    /// The process.
    pub pid: u32,
    /// An address inside the method.
    pub address: u64,
    /// When the method was last on a stack for sure; 0 when that is not known.
    pub seen: MonotonicNs,
}

/// What is to be asked of shims.
#[derive(Debug, Default)]
pub struct Questions {
    /// These names.
    names: Vec<NameRequest>,
    /// Regions whose mark has been looked at. Their shims wait to be told so behind the questions.
    heard: Vec<RegionId>,
}

impl From<Vec<NameRequest>> for Questions {
    fn from(names: Vec<NameRequest>) -> Self {
        Self { names, heard: Vec::new() }
    }
}

impl Questions {
    /// True when there is nothing to ask.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.heard.is_empty()
    }

    /// The names.
    #[must_use]
    pub(crate) fn names(&self) -> &[NameRequest] {
        &self.names
    }

    /// Queues them with the shims.
    pub fn put_to(self, shims: &mut ShimSource) {
        for NameRequest { pid, address, seen } in self.names {
            shims.ask(pid, address, seen);
        }
        for region in self.heard {
            shims.heard(region);
        }
    }
}

/// When the frames of a stack are asked about, and when the stack was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackTimes {
    pub(super) now: MonotonicNs,
    pub(super) seen: MonotonicNs,
}

impl StackTimes {
    /// Times of a stack that was taken now.
    pub(super) fn at(time: MonotonicNs) -> Self {
        Self { now: time, seen: time }
    }
}

/// The questions that stacks and answers lead to.
#[derive(Default)]
pub(super) struct NameQuestions {
    pending: Questions,
    times: QuestionTimes,
    /// Processes whose shims are not asked for names, because rules exclude them.
    excluded: HashSet<u32>,
    /// Addresses of which a shim gave no name.
    refused: Vec<(u32, u64)>,
}

impl NameQuestions {
    /// Asks for the names that a walk has met first. The first `sure` frames were on the stack for
    /// certain.
    pub(super) fn walked(
        &mut self,
        pid: u32,
        times: StackTimes,
        (frames, sure): (&[FrameKey], usize),
        symbolizer: &mut Symbolizer,
    ) {
        let StackTimes { now, seen } = times;
        for (index, &frame) in frames.iter().enumerate() {
            if let FrameKey::Managed { process, start, .. } = frame {
                let again = || !self.times.is_fresh((pid, start), now);
                if symbolizer.wants_answer(frame, index < sure)
                    || symbolizer.is_waiting(process, start) && again()
                {
                    let seen = if index < sure { seen } else { MonotonicNs(0) };
                    let seen = self.times.note((pid, start), now, seen);
                    self.pending.names.push(NameRequest { pid, address: start, seen });
                } else if index < sure && symbolizer.is_waiting(process, start) {
                    self.times.saw((pid, start), seen);
                }
            }
        }
    }

    /// Asks for the names that are missing in frames which a thread was in at `time` for sure.
    pub(super) fn ask_again(
        &mut self,
        pid: u32,
        frames: &[FrameKey],
        time: MonotonicNs,
        symbolizer: &mut Symbolizer,
    ) {
        for &frame in frames {
            if let FrameKey::Managed { process, start, .. } = frame
                && (symbolizer.wants_answer(frame, true) || symbolizer.is_waiting(process, start))
            {
                let seen = self.times.note((pid, start), time, time);
                self.pending.names.push(NameRequest { pid, address: start, seen });
            }
        }
    }

    /// A shim has no method at `address`, which had last been seen at `seen` when it was asked.
    /// True when the address was seen again since then, so that the answer may be another now. The
    /// question is repeated then.
    pub(super) fn repeat_if_seen_since(
        &mut self,
        pid: u32,
        address: u64,
        seen: MonotonicNs,
    ) -> bool {
        let is_outdated = self.times.seen((pid, address)) > seen;
        if is_outdated {
            let request = self.request(pid, address);
            self.pending.names.push(request);
        }
        is_outdated
    }

    /// A shim of `pid` gave no name for `address`.
    pub(super) fn refused(&mut self, pid: u32, address: u64) {
        if self.refused.len() < MOST_REFUSED {
            self.refused.push((pid, address));
        }
    }

    /// Takes what shims gave no name for since the last call.
    pub(super) fn take_refused(&mut self) -> Vec<(u32, u64)> {
        std::mem::take(&mut self.refused)
    }

    /// A method has its name. When its code stays, all code in its block of the code heap stays
    /// too. What was withheld of that block is asked about again.
    pub(super) fn ask_neighbours(
        &mut self,
        process: ProcessId,
        pid: u32,
        method: &MethodBody,
        symbolizer: &Symbolizer,
    ) {
        for &(start, bytes) in &method.ranges {
            let last = start.saturating_add(u64::from(bytes).saturating_sub(1));
            let blocks = start & !(CODE_BLOCK - 1)..=last | (CODE_BLOCK - 1);
            let neighbours = symbolizer.withheld(process, blocks).take(NEIGHBOURS);
            let requests: Vec<NameRequest> =
                neighbours.map(|address| self.request(pid, address)).collect();
            self.pending.names.extend(requests);
        }
    }

    /// Asks for what was seen in a process before it had a shim. The process may not live until
    /// the end.
    pub(super) fn ask_new_shim(
        &mut self,
        process: ProcessId,
        pid: u32,
        now: MonotonicNs,
        symbolizer: &Symbolizer,
    ) {
        let open: Vec<NameRequest> = self.unanswered(process, pid, now, symbolizer).collect();
        self.pending.names.extend(open);
    }

    /// Managed methods of a process that were seen a moment ago and have no answer yet.
    pub(super) fn unanswered(
        &self,
        process: ProcessId,
        pid: u32,
        now: MonotonicNs,
        symbolizer: &Symbolizer,
    ) -> impl Iterator<Item = NameRequest> {
        let all = symbolizer.unanswered(process);
        let fresh = all.filter(move |&address| self.times.is_fresh((pid, address), now));
        fresh.map(move |address| self.request(pid, address))
    }

    /// Managed methods that the shim of a process would not ask about.
    pub(super) fn withheld(
        &self,
        process: ProcessId,
        pid: u32,
        symbolizer: &Symbolizer,
    ) -> impl Iterator<Item = NameRequest> {
        let withheld = symbolizer.withheld(process, 0..=u64::MAX);
        withheld.map(move |address| self.request(pid, address))
    }

    fn request(&self, pid: u32, address: u64) -> NameRequest {
        NameRequest { pid, address, seen: self.times.seen((pid, address)) }
    }

    /// The region's mark was looked at.
    pub(super) fn mark_heard(&mut self, region: RegionId) {
        if !self.pending.heard.contains(&region) {
            self.pending.heard.push(region);
        }
    }

    /// Takes all questions since the last call.
    pub(super) fn take(&mut self) -> Questions {
        std::mem::take(&mut self.pending)
    }

    /// From now on the shims of `pid` are asked for names, or not.
    pub(super) fn set_asked(&mut self, pid: u32, is_asked: bool) {
        if is_asked {
            self.excluded.remove(&pid);
        } else {
            self.excluded.insert(pid);
        }
    }

    /// True while rules let the shims of `pid` be asked for names.
    pub(super) fn is_asked(&self, pid: u32) -> bool {
        !self.excluded.contains(&pid)
    }

    /// Forgets all processes but these.
    pub(super) fn keep(&mut self, pids: &HashSet<u32>) {
        self.excluded.retain(|pid| pids.contains(pid));
    }
}
