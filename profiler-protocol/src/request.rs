//! The request ring: fixed slots, written by the daemon, taken by the shim's service thread.

use crate::counter::Counter;
use crate::layout::{REQUEST_BYTES, REQUEST_HEAD_AT, REQUEST_TAIL_AT};
use crate::position::index;
use crate::producer::ProducerRegion;
use crate::sync::Ordering;

/// "Not known to have been on a stack": before everything.
pub const NEVER_SEEN: u64 = 1;

/// What the daemon asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Name the method at a code address.
    Name {
        /// In the method's code.
        address: u64,
        /// When it was certainly on a stack, by the process's own clock: [`NEVER_SEEN`] when it is
        /// not known to have been; 0 when nothing is said (daemons before `FEATURE_SEEN_TIMES`).
        seen_ns: u64,
    },
    /// Detach the instance.
    Detach,
    /// New limits; 0 leaves a value as it is.
    Settings {
        /// Most weak handles.
        handles: u32,
        /// Samples of allocations in a second that are all told of; of more, chance chooses.
        samples: u32,
    },
    /// Everything up to a mark (a name of no thread) has been looked at, and what that made the
    /// daemon ask stands before this.
    Heard,
}

impl Request {
    /// kind and arguments.
    #[must_use]
    pub const fn words(self) -> [u64; 3] {
        match self {
            Self::Name { address, seen_ns } => [1, address, seen_ns],
            Self::Detach => [2, 0, 0],
            Self::Settings { handles, samples } => [3, handles as u64 | (samples as u64) << 32, 0],
            Self::Heard => [4, 0, 0],
        }
    }

    /// The request in a slot's words after its number.
    #[must_use]
    pub const fn from_words(words: [u64; 3]) -> Option<Self> {
        match words {
            [1, address, seen_ns] => Some(Self::Name { address, seen_ns }),
            [2, ..] => Some(Self::Detach),
            [3, limits, _] => Some(Self::Settings {
                handles: (limits & u32::MAX as u64) as u32,
                samples: (limits >> 32) as u32,
            }),
            [4, ..] => Some(Self::Heard),
            _ => None,
        }
    }

    /// A slot: its number, then the words.
    #[must_use]
    pub fn slot(self, position: u64) -> [u8; REQUEST_BYTES as usize] {
        let [kind, first, second] = self.words();
        let mut slot = [0; REQUEST_BYTES as usize];
        for (bytes, word) in
            slot.chunks_exact_mut(8).zip([position.wrapping_add(1), kind, first, second])
        {
            for (to, from) in bytes.iter_mut().zip(word.to_le_bytes()) {
                *to = from;
            }
        }
        slot
    }
}

/// The shim's end: remembers how many requests it took.
pub struct RequestReader {
    taken: u64,
}

impl RequestReader {
    /// Begins at `region`'s first request.
    #[must_use]
    pub const fn new() -> Self {
        Self { taken: 0 }
    }

    /// The next request, if any. Malformed slots are skipped and counted.
    pub fn take(&mut self, region: &ProducerRegion<'_>) -> Option<Request> {
        let geometry = region.geometry();
        loop {
            // Acquire: pairs with the daemon's write of request_head, which follows that of the
            // slots.
            let head = region.load(REQUEST_HEAD_AT, Ordering::Acquire);
            let waiting = head.saturating_sub(self.taken);
            if waiting == 0 {
                return None;
            }
            if waiting > geometry.request_slots {
                // More than fits: a daemon lost its count. Start afresh from what it says.
                region.count(Counter::RequestsMalformed, 1);
                self.taken = head;
                self.publish(region);
                return None;
            }
            let at = geometry.request_offset().wrapping_add(
                index(self.taken, geometry.request_slots).wrapping_mul(REQUEST_BYTES),
            );
            let load = |word: u64| region.load(at.wrapping_add(word << 3), Ordering::Relaxed);
            let number = load(0);
            let words = [load(1), load(2), load(3)];
            self.taken = self.taken.wrapping_add(1);
            self.publish(region);
            if number == self.taken
                && let Some(request) = Request::from_words(words)
            {
                region.count(Counter::RequestsTaken, 1);
                return Some(request);
            }
            region.count(Counter::RequestsMalformed, 1);
        }
    }

    /// Release: the daemon reuses slots behind request_tail, so they must have been read before.
    fn publish(&self, region: &ProducerRegion<'_>) {
        region.store(REQUEST_TAIL_AT, self.taken, Ordering::Release);
    }
}

impl Default for RequestReader {
    fn default() -> Self {
        Self::new()
    }
}
