//! Interned stacks: each distinct sequence of frames is stored once.

use super::frame::{FrameKey, Marker};
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

/// All stacks of a window. Frames are innermost first, kernel frames before user frames.
pub struct StackTable {
    ids: HashMap<Arc<[FrameKey]>, StackId, RandomState>,
    stacks: Vec<Arc<[FrameKey]>>,
    room: usize,
    refused: u64,
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
        Self { ids: HashMap::default(), stacks: Vec::new(), room, refused: 0 }
    }

    /// The id of `frames`, made if new and there is room, else [`Self::OVERFLOW`].
    pub fn intern(&mut self, frames: &[FrameKey]) -> StackId {
        if let Some(id) = self.find(frames) {
            return id;
        }
        let (room, id) = (self.room.checked_sub(frames.len() + OVERHEAD), u32::try_from(self.stacks.len()));
        let (Some(room), Ok(id)) = (room, id.map(StackId)) else {
            self.refused += 1;
            return Self::OVERFLOW;
        };
        self.room = room;
        let frames: Arc<[FrameKey]> = frames.into();
        self.stacks.push(Arc::clone(&frames));
        self.ids.insert(frames, id);
        id
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

    /// All stacks, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &[FrameKey]> {
        self.stacks.iter().map(|frames| &**frames)
    }

    /// The frames of `id`; empty for an id of another table.
    #[must_use]
    pub fn frames(&self, id: StackId) -> &[FrameKey] {
        if id == Self::OVERFLOW {
            return NO_ROOM;
        }
        usize::try_from(id.0).ok().and_then(|i| self.stacks.get(i)).map_or(&[], |f| f)
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
    use super::{FrameKey, OVERHEAD, StackTable};

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
}
