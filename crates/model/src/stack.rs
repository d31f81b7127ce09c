//! Interned stacks: each distinct sequence of frames is stored once.

use crate::event::TraceSpan;
use crate::frame::{FrameKey, Marker};
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;

/// Identity of an interned stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

/// Frames of all stacks together: 200 MB, a hundred thousand stacks of eighty frames. Random
/// recursion makes every stack a new one.
const MAX_FRAMES: usize = 1 << 23;
/// The least that is allowed: a few hundred stacks, which are still a profile.
const LEAST_FRAMES: usize = 1 << 15;
/// What a stack takes besides its frames, in frames.
const OVERHEAD: usize = 4;
/// Part of the room that there is besides for stacks of spans, which are as many as an app has
/// requests: they take none from the others.
const SPAN_PART: usize = 8;
/// What stands for a stack there was no room for.
const NO_ROOM: &[FrameKey] = &[FrameKey::Marker(Marker::Overflow)];

/// What the thread of a stack worked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StackSpan {
    /// This span.
    Of(TraceSpan),
    /// One of those that found no room.
    Other,
}

/// All stacks of a window. Frames are innermost first, kernel frames before user frames. The same
/// frames for another span are another stack, which shares them.
pub struct StackTable {
    ids: HashMap<Arc<[FrameKey]>, StackId, RandomState>,
    /// Those with a span, by the stack without it.
    of_spans: HashMap<(StackId, StackSpan), StackId, RandomState>,
    stacks: Vec<Stack>,
    /// What is allowed, and what is taken, in frames.
    room: usize,
    taken: usize,
    refused: u64,
    /// How many more there may be with a span, and how many each process has.
    spans_left: usize,
    spans_of: HashMap<u32, usize>,
    spans_refused: u64,
}

struct Stack {
    frames: Arc<[FrameKey]>,
    /// The span, and the process of its thread.
    span: Option<(StackSpan, u32)>,
}

impl Default for StackTable {
    fn default() -> Self {
        Self::with_room(MAX_FRAMES)
    }
}

impl StackTable {
    /// The stack of one frame, [`Marker::Overflow`].
    pub const OVERFLOW: StackId = StackId(u32::MAX);

    /// A table with room for this many frames of all stacks together.
    #[must_use]
    pub fn with_room(room: usize) -> Self {
        Self {
            ids: HashMap::default(),
            of_spans: HashMap::default(),
            stacks: Vec::new(),
            room,
            taken: 0,
            refused: 0,
            spans_left: spans_in(room),
            spans_of: HashMap::new(),
            spans_refused: 0,
        }
    }

    /// The id of `frames`, made if new and there is room, else [`Self::OVERFLOW`].
    pub fn intern(&mut self, frames: &[FrameKey]) -> StackId {
        if let Some(id) = self.find(frames) {
            return id;
        }
        let Some(id) = self.room_for(frames.len() + OVERHEAD) else { return Self::OVERFLOW };
        let frames: Arc<[FrameKey]> = frames.into();
        self.stacks.push(Stack { frames: Arc::clone(&frames), span: None });
        self.ids.insert(frames, id);
        id
    }

    /// The id of `frames` of a thread of `pid` that was in this span, made if new; where there is
    /// no room for one more, that of the same frames in [`StackSpan::Other`].
    pub fn intern_for(
        &mut self,
        frames: &[FrameKey],
        span: Option<TraceSpan>,
        pid: u32,
    ) -> StackId {
        let without = self.intern(frames);
        span.map_or(without, |span| self.in_span(without, StackSpan::Of(span), pid))
    }

    /// The id here of a stack of another table, made if new.
    pub fn intern_from(&mut self, other: &Self, id: StackId) -> StackId {
        let without = self.intern(other.frames(id));
        let span = other.get(id).and_then(|stack| stack.span);
        span.map_or(without, |(span, pid)| self.in_span(without, span, pid))
    }

    /// Takes what is there for a window that is over. What was refused stays counted.
    pub fn take(&mut self) -> Self {
        let (refused, spans_refused) = (self.refused, self.spans_refused);
        let next = Self { refused, spans_refused, ..Self::with_room(self.room) };
        std::mem::replace(self, next)
    }

    /// Puts other frames in the place of those there are, in a table that takes no more stacks.
    pub fn replace_frames(&mut self, mut other: impl FnMut(FrameKey) -> FrameKey) {
        let mut replaced: HashMap<Arc<[FrameKey]>, Arc<[FrameKey]>, RandomState> =
            HashMap::default();
        for stack in &mut self.stacks {
            let frames = replaced
                .entry(Arc::clone(&stack.frames))
                .or_insert_with(|| stack.frames.iter().map(|&frame| other(frame)).collect());
            stack.frames = Arc::clone(frames);
        }
        self.ids.clear();
        self.of_spans.clear();
    }

    /// There is room for stacks of so many bytes, those that are there among them: where they are
    /// more already, none comes to them.
    pub fn allow(&mut self, bytes: u64) {
        let frames = usize::try_from(bytes).unwrap_or(usize::MAX) / size_of::<FrameKey>();
        self.room = frames.clamp(LEAST_FRAMES, MAX_FRAMES);
        self.spans_left = spans_in(self.room).saturating_sub(self.spans_of.values().sum());
    }

    /// How much of the room is taken; more than 1 where there is less room than when it was.
    #[must_use]
    pub fn fill(&self) -> f64 {
        self.taken as f64 / self.room.max(1) as f64
    }

    fn in_span(&mut self, without: StackId, span: StackSpan, pid: u32) -> StackId {
        if without == Self::OVERFLOW {
            return without;
        }
        if let Some(id) = self.of_spans.get(&(without, span)) {
            return *id;
        }
        let id = match span {
            StackSpan::Of(_) => {
                let own = self.spans_of.entry(pid).or_default();
                let next = u32::try_from(self.stacks.len());
                // Nobody takes more than it leaves to others.
                let (true, Ok(next)) = (*own < self.spans_left, next) else {
                    self.spans_refused += 1;
                    return self.in_span(without, StackSpan::Other, pid);
                };
                *own += 1;
                self.spans_left -= 1;
                StackId(next)
            }
            // As many as there are stacks without, at most.
            StackSpan::Other => match self.room_for(2 * OVERHEAD) {
                Some(id) => id,
                None => return without,
            },
        };
        let frames = self.shared(without);
        self.stacks.push(Stack { frames, span: Some((span, pid)) });
        self.of_spans.insert((without, span), id);
        id
    }

    /// The id of one stack more, which takes as much room as so many frames.
    fn room_for(&mut self, frames: usize) -> Option<StackId> {
        let (taken, id) = (self.taken + frames, u32::try_from(self.stacks.len()));
        let (true, Ok(id)) = (taken <= self.room, id.map(StackId)) else {
            self.refused += 1;
            return None;
        };
        self.taken = taken;
        Some(id)
    }

    fn get(&self, id: StackId) -> Option<&Stack> {
        usize::try_from(id.0).ok().and_then(|i| self.stacks.get(i))
    }

    fn shared(&self, id: StackId) -> Arc<[FrameKey]> {
        self.get(id).map_or_else(|| NO_ROOM.into(), |stack| Arc::clone(&stack.frames))
    }

    /// Times a new stack found no room.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Times a stack's span found no room.
    #[must_use]
    pub fn spans_refused(&self) -> u64 {
        self.spans_refused
    }

    /// The id of `frames` if they were interned.
    #[must_use]
    pub fn find(&self, frames: &[FrameKey]) -> Option<StackId> {
        if frames == NO_ROOM { Some(Self::OVERFLOW) } else { self.ids.get(frames).copied() }
    }

    /// The frames of all stacks, each once.
    pub fn iter(&self) -> impl Iterator<Item = &[FrameKey]> + Clone {
        self.stacks.iter().filter(|stack| stack.span.is_none()).map(|stack| &*stack.frames)
    }

    /// The frames of `id`; empty for an id of another table.
    #[must_use]
    pub fn frames(&self, id: StackId) -> &[FrameKey] {
        if id == Self::OVERFLOW {
            return NO_ROOM;
        }
        self.get(id).map_or(&[], |stack| &stack.frames)
    }

    /// The span of `id`.
    #[must_use]
    pub fn span(&self, id: StackId) -> Option<StackSpan> {
        self.get(id)?.span.map(|(span, _)| span)
    }
}

/// How many stacks of spans there may be in so much room, in frames.
const fn spans_in(room: usize) -> usize {
    room / SPAN_PART / (2 * OVERHEAD)
}

#[cfg(test)]
mod tests {
    use super::{
        FrameKey, LEAST_FRAMES, OVERHEAD, SPAN_PART, StackId, StackSpan, StackTable, TraceSpan,
    };
    use std::collections::HashSet;

    #[test]
    fn stacks_beyond_the_limit_are_counted_and_known_ones_stay() {
        let mut table = StackTable::with_room(2 * (3 + OVERHEAD));
        let stack = |first| [first, 1, 2].map(FrameKey::Kernel);
        let ids: Vec<_> = (0..5).map(|first| table.intern(&stack(first))).collect();
        assert_eq!(ids[2..], [StackTable::OVERFLOW; 3]);
        assert_eq!((table.stacks.len(), table.refused()), (2, 3));
        assert_eq!((table.intern(&stack(1)), table.frames(ids[1])), (ids[1], &stack(1)[..]));
        let marker = table.frames(StackTable::OVERFLOW).to_vec();
        assert_eq!((table.intern(&marker), table.find(&marker)), (ids[2], Some(ids[2])));
        let over = table.take();
        assert_eq!(
            (over.stacks.len(), table.stacks.len(), table.refused()),
            (2, 0, 3),
            "counted since the recording began"
        );
    }

    #[test]
    fn less_room_counts_at_once_with_what_is_there_already() {
        let mut table = StackTable::default();
        let stack = |first: usize| [first as u64; 60].map(FrameKey::Kernel);
        let each = 60 + OVERHEAD;
        let least = LEAST_FRAMES / each;
        // What a machine that is busy brings before the recorder is told how much memory it has.
        for first in 0..least / 2 {
            table.intern(&stack(first));
        }
        table.allow(0);
        assert!((table.fill() - 0.5).abs() < 0.01, "{}", table.fill());
        let more: Vec<StackId> =
            (least / 2..2 * least).map(|first| table.intern(&stack(first))).collect();
        assert_eq!((table.stacks.len(), more[least]), (least, StackTable::OVERFLOW));
        table.allow(u64::MAX);
        assert!(table.fill() < 0.01 && table.intern(&stack(3 * least)) != StackTable::OVERFLOW);
        (4 * least..6 * least).for_each(|first| _ = table.intern(&stack(first)));
        table.allow(0);
        assert!(table.fill() > 2.9 && table.intern(&stack(7 * least)) == StackTable::OVERFLOW);
        drop(table.take());
        assert_eq!((table.fill(), table.room), (0.0, LEAST_FRAMES));
    }

    const fn span(id: u8) -> Option<TraceSpan> {
        Some(TraceSpan { trace: [1; 16], id: [id; 8] })
    }

    /// Room in which there is a part for so many stacks of spans.
    const fn room_for_spans(count: usize) -> usize {
        count * SPAN_PART * 2 * OVERHEAD
    }

    #[test]
    fn a_stack_in_a_span_shares_its_frames_and_is_another_spans_where_there_is_no_room() {
        let frames = [FrameKey::Kernel(1), FrameKey::Kernel(2)];
        let mut table = StackTable::with_room(room_for_spans(4));
        let ids = [None, span(1), span(2), span(1), span(3), span(4)]
            .map(|span| table.intern_for(&frames, span, 7));
        assert_eq!((ids[1], ids[4]), (ids[3], ids[5]));
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 4);
        let of = |id| span(id).map(StackSpan::Of);
        let other = Some(StackSpan::Other);
        assert_eq!(ids.map(|id| table.span(id)), [None, of(1), of(2), of(1), other, other]);
        assert!(
            ids.iter().all(|id| table.frames(*id) == frames) && table.find(&frames) == Some(ids[0])
        );
        assert_eq!((table.iter().count(), table.refused(), table.spans_refused()), (1, 0, 2));
        let overflow = table.frames(StackTable::OVERFLOW).to_vec();
        assert_eq!(table.intern_for(&overflow, span(1), 7), StackTable::OVERFLOW);
        // The next window's table.
        let mut next = StackTable::with_room(room_for_spans(4));
        let carried = ids.map(|id| next.intern_from(&table, id));
        assert_eq!(carried.map(|id| next.span(id)), ids.map(|id| table.span(id)));
        assert!(carried.iter().all(|id| next.frames(*id) == frames));
    }

    #[test]
    fn spans_take_no_room_from_stacks_and_those_of_one_process_none_from_anothers() {
        let (spans, stacks) = (64, 128);
        let mut table = StackTable::with_room(room_for_spans(spans));
        let frames = |first: usize| [first as u64; 8].map(FrameKey::Kernel);
        let mut new_span = 0u64;
        let mut flood = |table: &mut StackTable, pid, count: usize| {
            let told = (0..count).filter(|_| {
                new_span += 1;
                let span = TraceSpan { trace: [1; 16], id: new_span.to_le_bytes() };
                let id = table.intern_for(&frames(0), Some(span), pid);
                table.span(id) == Some(StackSpan::Of(span))
            });
            told.count()
        };
        assert_eq!(flood(&mut table, 1, 10_000), spans / 2);
        assert_eq!(flood(&mut table, 2, 5), 5);
        assert_eq!(flood(&mut table, 1, 10_000), 0);
        let ids: HashSet<StackId> = (0..stacks).map(|first| table.intern(&frames(first))).collect();
        assert!(
            ids.len() == stacks && !ids.contains(&StackTable::OVERFLOW) && table.refused() == 0
        );
    }
}
