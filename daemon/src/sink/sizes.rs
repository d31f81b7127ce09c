//! How long requests may be, as one receiver is seen to take them: its limit may be lower than what
//! the configuration says. Bytes are those before compression, though a limit may be of those after.

use crate::pprof::split::Bounds;
use std::time::{Duration, Instant};

/// What was learned from a refusal is doubted after this: a limit may have been raised.
const REMEMBERED: Duration = Duration::from_secs(3600);
/// No request is made shorter than this, but by its samples.
const LEAST_BYTES: usize = 16 << 10;
/// A lone sample that is so many times longer than what was refused is not tried.
const CERTAINLY: usize = 4;

/// What is known of one receiver.
#[derive(Debug, Default)]
pub struct Sizes {
    /// Shortest that was refused for its length, or may have been, and when.
    refused: Option<(usize, Instant)>,
    /// Shortest that was said to be too long.
    certain: Option<usize>,
    /// Longest that was taken, below that.
    taken: usize,
}

impl Sizes {
    /// A request of so many bytes was taken.
    pub fn taken(&mut self, bytes: usize, now: Instant) {
        self.forget(now);
        if self.refused.is_some_and(|(refused, _)| bytes >= refused) {
            // The limit is of something else, such as the bytes after compression.
            (self.refused, self.certain) = (None, None);
        }
        self.taken = self.taken.max(bytes);
    }

    /// One was refused for its length: by what the receiver says, or else perhaps.
    pub fn refused(&mut self, bytes: usize, is_certain: bool, now: Instant) {
        self.forget(now);
        let before = self.refused.map_or(bytes, |(refused, _)| refused.min(bytes));
        self.refused = Some((before, now));
        if is_certain {
            self.certain = Some(self.certain.map_or(bytes, |certain| certain.min(bytes)));
        }
        if self.taken >= bytes {
            self.taken = bytes / 2;
        }
    }

    /// True when nothing was taken yet, of any length.
    #[must_use]
    pub fn has_taken_none(&self) -> bool {
        self.taken == 0
    }

    /// True when something so long or longer was taken.
    #[must_use]
    pub fn has_taken(&self, bytes: usize) -> bool {
        self.taken >= bytes.max(1)
    }

    /// True when nothing so long was taken, and something shorter was.
    #[must_use]
    pub fn is_beyond_taken(&self, bytes: usize) -> bool {
        self.taken > 0 && bytes > self.taken
    }

    /// How long new requests are to be, of at most `most` bytes.
    pub fn bounds(&mut self, most: usize, now: Instant) -> Bounds {
        self.forget(now);
        let Some((refused, _)) = self.refused else {
            return Bounds { samples: usize::MAX, bytes: most, lone_bytes: most };
        };
        let seen = if self.taken >= refused / 4 { self.taken } else { refused / 2 };
        let lone = self.certain.map_or(most, |certain| certain.saturating_mul(CERTAINLY));
        Bounds {
            samples: usize::MAX,
            bytes: seen.max(LEAST_BYTES).min(most),
            lone_bytes: lone.max(LEAST_BYTES).min(most),
        }
    }

    fn forget(&mut self, now: Instant) {
        if self.refused.is_some_and(|(_, at)| now.saturating_duration_since(at) >= REMEMBERED) {
            (self.refused, self.certain) = (None, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{LEAST_BYTES, REMEMBERED, Sizes};
    use std::time::{Duration, Instant};

    const MOST: usize = 4 << 20;

    #[test]
    fn requests_become_as_long_as_a_receiver_takes_them() {
        let (mut sizes, now) = (Sizes::default(), Instant::now());
        assert_eq!(sizes.bounds(MOST, now).bytes, MOST);
        let limit = 150_000;
        let mut tried = MOST;
        while tried > limit {
            sizes.refused(tried, true, now);
            tried /= 2;
        }
        sizes.taken(tried, now);
        let bounds = sizes.bounds(MOST, now);
        assert!((limit / 2..=limit).contains(&bounds.bytes), "{bounds:?}");
        assert!((limit..=8 * limit).contains(&bounds.lone_bytes), "{bounds:?}");
        assert!(sizes.is_beyond_taken(limit) && !sizes.is_beyond_taken(tried));
        assert!(sizes.has_taken(tried) && !sizes.has_taken(limit) && !Sizes::default().has_taken(0));
        // The limit may be another by then.
        assert_eq!(sizes.bounds(MOST, now + REMEMBERED).bytes, MOST);
    }

    #[test]
    fn what_may_have_been_refused_for_its_length_keeps_nothing_from_being_tried() {
        let (mut sizes, now) = (Sizes::default(), Instant::now());
        assert!(!sizes.is_beyond_taken(MOST), "nothing was taken yet");
        sizes.taken(3000, now);
        sizes.refused(1 << 20, false, now);
        let bounds = sizes.bounds(MOST, now);
        assert_eq!((bounds.bytes, bounds.lone_bytes), (1 << 19, MOST));
        sizes.refused(1000, false, now);
        assert_eq!(sizes.bounds(MOST, now).bytes, LEAST_BYTES);
        sizes.taken(2 << 20, now + Duration::from_secs(1));
        assert_eq!(sizes.bounds(MOST, now).bytes, MOST, "it takes longer ones");
    }
}
