//! Interned stacks: each distinct sequence of frames is stored once.

use super::frame::FrameKey;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;

/// Identity of an interned stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

/// All stacks of a window. Frames are innermost first, kernel frames before user frames.
#[derive(Default)]
pub struct StackTable {
    ids: HashMap<Arc<[FrameKey]>, StackId, RandomState>,
    stacks: Vec<Arc<[FrameKey]>>,
}

impl StackTable {
    /// The id of `frames`, made if new. `None` when `u32::MAX` stacks exist.
    pub fn intern(&mut self, frames: &[FrameKey]) -> Option<StackId> {
        if let Some(&id) = self.ids.get(frames) {
            return Some(id);
        }
        let id = StackId(u32::try_from(self.stacks.len()).ok()?);
        let frames: Arc<[FrameKey]> = frames.into();
        self.stacks.push(Arc::clone(&frames));
        self.ids.insert(frames, id);
        Some(id)
    }

    /// The id of `frames` if they were interned.
    #[must_use]
    pub fn find(&self, frames: &[FrameKey]) -> Option<StackId> {
        self.ids.get(frames).copied()
    }

    /// All stacks, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &[FrameKey]> {
        self.stacks.iter().map(|frames| &**frames)
    }

    /// The frames of `id`; empty for an id of another table.
    #[must_use]
    pub fn frames(&self, id: StackId) -> &[FrameKey] {
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
