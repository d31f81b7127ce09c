//! Stacks of one process that were walked whole, and their frames.

use super::cached_bodies::RECHECK;
use foldhash::HashMap;
use perfusion_model::event::{MonotonicNs, ProbeWalk, UserContext, UserRegs};
use perfusion_model::frame::FrameKey;
use perfusion_unwind::native::NATIVE;
use perfusion_unwind::unwinder::UnwindTrace;
use std::time::Instant;

/// Most frames of remembered stacks per process, and of what is remembered besides as many words.
const MAX_WALKED_FRAMES: usize = 16_384;
/// Most stacks remembered that were copied at the same instruction with the same stack pointer:
/// callers differ.
const MAX_LIKE_COPIES: usize = 4;

/// Stacks that were walked whole and the frames they are, as long as one look at JIT memory holds:
/// those of the probes by their places, copies by what the walk went by.
#[derive(Debug, Default)]
pub(super) struct WalkedStacks {
    stacks: HashMap<Box<[u64]>, Box<[FrameKey]>>,
    copies: HashMap<CopyKey, Vec<WalkedCopy>>,
    /// Frames of all of them, and words of the traces.
    frames: usize,
    /// When the first was looked at, and when the first of the probes was walked: one that was
    /// walked earlier may have been by other rules.
    since: Option<Instant>,
    first_walk: Option<MonotonicNs>,
}

/// A copy that was walked, and its frames.
type WalkedCopy = (UnwindTrace, Box<[FrameKey]>);

/// What two contexts must have in common for a trace of the one to be of use to the other.
#[derive(Debug, PartialEq, Eq, Hash)]
struct CopyKey {
    ip: u64,
    stack_pointer: u64,
    bytes: usize,
    skipped: u64,
    limited: bool,
    known: u16,
}

impl CopyKey {
    fn of(context: &UserContext) -> Self {
        let &UserContext { regs: UserRegs { gpr, ip, known }, ref stack, skipped, limited, .. } =
            context;
        let stack_pointer = gpr[NATIVE.stack_pointer.index()];
        Self { ip, stack_pointer, bytes: stack.len(), skipped, limited, known }
    }
}

impl WalkedStacks {
    fn holds(&self, now: Instant) -> bool {
        self.since.is_some_and(|looked| now.duration_since(looked) < RECHECK)
    }

    /// The frames of a stack the probes walked to the thread's start, when it was walked before and
    /// none of it may have changed since.
    pub(super) fn get(&self, walk: &ProbeWalk, now: Instant) -> Option<&[FrameKey]> {
        let holds = self.holds(now) && self.first_walk? <= walk.time;
        if holds { self.stacks.get(walk.frames.as_slice()).map(|frames| &**frames) } else { None }
    }

    /// Remembers the frames of a stack the probes walked to the thread's start.
    pub(super) fn insert(&mut self, walk: &ProbeWalk, frames: &[FrameKey], now: Instant) {
        self.renew(now);
        self.first_walk.get_or_insert(walk.time);
        if self.has_room(walk.frames.len()) {
            self.stacks.insert(walk.frames.as_slice().into(), frames.into());
        }
    }

    /// The frames of a copied stack that was walked before, when nothing the walk went by is
    /// different.
    pub(super) fn get_copy(&self, context: &UserContext, now: Instant) -> Option<&[FrameKey]> {
        let like = self.copies.get(&CopyKey::of(context)).filter(|_| self.holds(now))?;
        like.iter().find(|(trace, _)| trace.holds_in(context)).map(|(_, frames)| &**frames)
    }

    /// Remembers the frames of a copied stack that was walked to the thread's start.
    pub(super) fn insert_copy(
        &mut self,
        context: &UserContext,
        trace: UnwindTrace,
        frames: &[FrameKey],
        now: Instant,
    ) {
        self.renew(now);
        let key = CopyKey::of(context);
        let full = self.copies.get(&key).is_some_and(|like| like.len() >= MAX_LIKE_COPIES);
        if !full && self.has_room(frames.len() + trace.words()) {
            self.copies.entry(key).or_default().push((trace, frames.into()));
        }
    }

    fn renew(&mut self, now: Instant) {
        if !self.holds(now) {
            self.clear();
            self.since = Some(now);
        }
    }

    fn has_room(&mut self, frames: usize) -> bool {
        let room = self.frames + frames <= MAX_WALKED_FRAMES;
        self.frames += if room { frames } else { 0 };
        room
    }

    /// Forgets all of them.
    pub(super) fn clear(&mut self) {
        self.stacks.clear();
        self.copies.clear();
        self.frames = 0;
        (self.since, self.first_walk) = (None, None);
    }
}
