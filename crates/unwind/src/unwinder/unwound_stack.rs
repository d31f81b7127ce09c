//! What a walk has found.

use perfusion_model::frame::{FrameKey, Marker};

/// An unwound stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnwoundStack {
    /// User frames, innermost first, with [`Marker`]s where the walk guessed or ended early.
    pub frames: Vec<FrameKey>,
    /// True when the last frame is the thread's first.
    pub reached_thread_start: bool,
    /// Callers found by a frame pointer or a scan only.
    pub guessed: u32,
    /// True when the same stack was unwound a moment ago.
    pub seen_before: bool,
    /// Why the walk ended before the thread's start; also the last frame.
    pub broken: Option<Marker>,
}

impl UnwoundStack {
    /// Ended early, after the frames found so far.
    #[must_use]
    pub fn broken(mut self, why: Marker) -> Self {
        self.frames.push(FrameKey::Marker(why));
        self.broken = Some(why);
        self
    }

    /// Whether the thread was being ended and had no more stack.
    #[must_use]
    pub fn is_exiting(&self) -> bool {
        self.broken == Some(Marker::Exiting)
    }

    /// Whether a part of the stack that was there is missing.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        !self.reached_thread_start && !self.is_exiting()
    }
}
