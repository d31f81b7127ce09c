//! Interned stacks: each distinct sequence of frames is stored once.

use super::frame::{FrameKey, Marker};
use crate::source::Span;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;

/// Identity of an interned stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

/// Frames of all stacks together: 200 MB, a hundred thousand stacks of eighty frames. Random recursion makes every stack a new one.
const MAX_FRAMES: usize = 1 << 23;
/// What a stack takes besides its frames, in frames.
const OVERHEAD: usize = 4;
/// What stands for a stack there was no room for.
const NO_ROOM: &[FrameKey] = &[FrameKey::Marker(Marker::Overflow)];

/// All stacks of a window. Frames are innermost first, kernel frames before user frames. The same frames for another span are another stack, which shares
/// them.
pub struct StackTable {
    ids: HashMap<Arc<[FrameKey]>, StackId, RandomState>,
    /// Those with a span, by the stack without it.
    of_spans: HashMap<(StackId, Span), StackId, RandomState>,
    stacks: Vec<Stack>,
    room: usize,
    refused: u64,
}

struct Stack {
    frames: Arc<[FrameKey]>,
    span: Option<Span>,
}

impl Default for StackTable {
    fn default() -> Self {
        Self::with_room(MAX_FRAMES)
    }
}

impl StackTable {
    /// The stack of one frame, [`Marker::Overflow`].
    pub const OVERFLOW: StackId = StackId(u32::MAX);

    pub(crate) fn with_room(room: usize) -> Self {
        Self { ids: HashMap::default(), of_spans: HashMap::default(), stacks: Vec::new(), room, refused: 0 }
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

    /// The id of `frames` that were in this span, made if new; without the span where there is no room for one more.
    pub fn intern_for(&mut self, frames: &[FrameKey], span: Option<Span>) -> StackId {
        let without = self.intern(frames);
        let Some(span) = span.filter(|_| without != Self::OVERFLOW) else { return without };
        if let Some(id) = self.of_spans.get(&(without, span)) {
            return *id;
        }
        let Some(id) = self.room_for(2 * OVERHEAD) else { return without };
        let frames = self.shared(without);
        self.stacks.push(Stack { frames, span: Some(span) });
        self.of_spans.insert((without, span), id);
        id
    }

    /// The id of one stack more, which takes as much room as so many frames.
    fn room_for(&mut self, frames: usize) -> Option<StackId> {
        let (room, id) = (self.room.checked_sub(frames), u32::try_from(self.stacks.len()));
        let (Some(room), Ok(id)) = (room, id.map(StackId)) else {
            self.refused += 1;
            return None;
        };
        self.room = room;
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

    /// The id of `frames` if they were interned.
    #[must_use]
    pub fn find(&self, frames: &[FrameKey]) -> Option<StackId> {
        if frames == NO_ROOM { Some(Self::OVERFLOW) } else { self.ids.get(frames).copied() }
    }

    /// The frames of all stacks, each once.
    pub fn iter(&self) -> impl Iterator<Item = &[FrameKey]> {
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
    pub fn span(&self, id: StackId) -> Option<Span> {
        self.get(id)?.span
    }

    /// Number of distinct stacks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.stacks.len()
    }

    /// True when nothing was interned.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stacks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::{FrameKey, OVERHEAD, Span, StackTable};

    #[test]
    fn stacks_beyond_the_limit_are_counted_and_known_ones_stay() {
        let mut table = StackTable::with_room(2 * (3 + OVERHEAD));
        let stack = |first| [first, 1, 2].map(FrameKey::Kernel);
        let ids: Vec<_> = (0..5).map(|first| table.intern(&stack(first))).collect();
        assert_eq!(ids[2..], [StackTable::OVERFLOW; 3]);
        assert_eq!((table.len(), table.refused()), (2, 3));
        assert_eq!((table.intern(&stack(1)), table.frames(ids[1])), (ids[1], &stack(1)[..]));
        let marker = table.frames(StackTable::OVERFLOW).to_vec();
        assert_eq!((table.intern(&marker), table.find(&marker)), (ids[2], Some(ids[2])));
    }

    #[test]
    fn a_stack_in_a_span_shares_its_frames_and_goes_without_the_span_where_there_is_no_room() {
        let frames = [FrameKey::Kernel(1), FrameKey::Kernel(2)];
        let span = |id| Some(Span { trace: [1; 16], id: [id; 8] });
        let mut table = StackTable::with_room(2 + OVERHEAD + 2 * (2 * OVERHEAD));
        let ids = [None, span(1), span(2), span(1), span(3)].map(|span| table.intern_for(&frames, span));
        assert_eq!((ids[1], ids[0]), (ids[3], ids[4]));
        assert!(ids[0] != ids[1] && ids[1] != ids[2]);
        assert_eq!(ids.map(|id| table.span(id)), [None, span(1), span(2), span(1), None]);
        assert!(ids.iter().all(|id| table.frames(*id) == frames) && table.find(&frames) == Some(ids[0]));
        assert_eq!((table.iter().count(), table.refused()), (1, 1));
        assert_eq!(
            table.intern_for(table.frames(StackTable::OVERFLOW).to_vec().as_slice(), span(1)),
            StackTable::OVERFLOW
        );
    }
}
