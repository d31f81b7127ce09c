//! How long requests may be, as one receiver is seen to take them: its limit may be lower than what
//! the configuration says. New requests are measured before compression; a limit may be of the
//! bytes after it, so those are looked at, too.

use super::request_scheduler::LengthClass;
use perfusion_pprof::split::PartBounds;
use std::time::{Duration, Instant};

/// What was learned from a refusal is doubted after this: a limit may have been raised.
const REMEMBERED: Duration = Duration::from_secs(3600);
/// No request is made shorter than this, but by its samples.
const LEAST_BYTES: usize = 16 << 10;
/// A shorter request, before compression, was not refused for its length.
pub const SHORT_BYTES: usize = 8 << 10;
/// A lone sample that is so many times longer than what was refused is not tried.
const CERTAINLY: usize = 4;

/// What is known of one receiver.
#[derive(Debug, Default)]
pub struct AcceptedSizes {
    /// Shortest that was refused for its length, or may have been, and when.
    refused: Option<(usize, Instant)>,
    /// Shortest that was said to be too long.
    certain: Option<usize>,
    /// Longest that was taken, below that.
    taken: usize,
    /// The same of bytes after compression.
    taken_packed: usize,
}

/// How long a request is.
#[derive(Clone, Copy, Debug)]
pub struct RequestSize {
    /// Bytes before compression.
    pub raw: usize,
    /// Bytes as they are sent: what a limit is of, one cannot know.
    pub packed: usize,
}

impl AcceptedSizes {
    /// A request of so many bytes was taken.
    pub fn taken(&mut self, long: RequestSize, now: Instant) {
        self.forget(now);
        if self.refused.is_some_and(|(refused, _)| long.raw >= refused) {
            // The limit is of something else, such as the bytes after compression.
            (self.refused, self.certain) = (None, None);
        }
        self.taken = self.taken.max(long.raw);
        self.taken_packed = self.taken_packed.max(long.packed);
    }

    /// One was refused for its length: by what the receiver says, or else perhaps.
    pub fn refused(&mut self, long: RequestSize, is_certain: bool, now: Instant) {
        self.forget(now);
        let bytes = long.raw;
        let before = self.refused.map_or(bytes, |(refused, _)| refused.min(bytes));
        self.refused = Some((before, now));
        if is_certain {
            self.certain = Some(self.certain.map_or(bytes, |certain| certain.min(bytes)));
        }
        if self.taken >= bytes {
            self.taken = bytes / 2;
        }
        if self.taken_packed >= long.packed {
            self.taken_packed = long.packed / 2;
        }
    }

    /// True when nothing was taken yet, of any length.
    #[must_use]
    pub fn has_taken_none(&self) -> bool {
        self.taken == 0
    }

    /// True when something was refused for its length, or may have been.
    #[must_use]
    pub fn has_refused(&self) -> bool {
        self.refused.is_some()
    }

    /// A short one was refused as well: where none was taken it is for something else.
    pub fn doubt(&mut self) {
        if self.has_taken_none() && self.certain.is_none() {
            self.refused = None;
        }
    }

    /// True when something so long or longer was taken.
    #[must_use]
    pub fn has_taken(&self, bytes: usize) -> bool {
        self.taken >= bytes.max(1)
    }

    /// Whether a request that failed may have failed for its length.
    #[must_use]
    pub fn of(&self, long: RequestSize) -> LengthClass {
        let is_beyond = long.raw > self.taken || long.packed > self.taken_packed;
        if long.raw <= SHORT_BYTES || !is_beyond {
            return LengthClass::Usual;
        }
        match self.refused {
            Some((refused, _)) if long.raw >= refused => LengthClass::AsRefused,
            _ => LengthClass::Long,
        }
    }

    /// How long new requests are to be, of at most `most` bytes.
    pub fn bounds(&mut self, most: usize, now: Instant) -> PartBounds {
        self.forget(now);
        let Some((refused, _)) = self.refused else {
            return PartBounds { samples: usize::MAX, bytes: most, lone_bytes: most };
        };
        let seen = if self.taken >= refused / 4 { self.taken } else { refused / 2 };
        let lone = self.certain.map_or(most, |certain| certain.saturating_mul(CERTAINLY));
        PartBounds {
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
    use super::{AcceptedSizes, LEAST_BYTES, LengthClass, REMEMBERED, RequestSize, SHORT_BYTES};
    use std::time::{Duration, Instant};

    const MOST: usize = 4 << 20;

    fn long(raw: usize) -> RequestSize {
        RequestSize { raw, packed: raw / 8 }
    }

    #[test]
    fn requests_become_as_long_as_a_receiver_takes_them() {
        let (mut sizes, now) = (AcceptedSizes::default(), Instant::now());
        assert_eq!(sizes.bounds(MOST, now).bytes, MOST);
        let limit = 150_000;
        let mut tried = MOST;
        while tried > limit {
            sizes.refused(long(tried), true, now);
            tried /= 2;
        }
        sizes.taken(long(tried), now);
        let bounds = sizes.bounds(MOST, now);
        assert!((limit / 2..=limit).contains(&bounds.bytes), "{bounds:?}");
        assert!((limit..=8 * limit).contains(&bounds.lone_bytes), "{bounds:?}");
        assert_eq!(
            (sizes.of(long(limit)), sizes.of(long(tried))),
            (LengthClass::Long, LengthClass::Usual)
        );
        assert_eq!(sizes.of(long(MOST)), LengthClass::AsRefused);
        assert!(
            sizes.has_taken(tried)
                && !sizes.has_taken(limit)
                && !AcceptedSizes::default().has_taken(0)
        );
        // The limit may be another by then.
        assert_eq!(sizes.bounds(MOST, now + REMEMBERED).bytes, MOST);
    }

    #[test]
    fn what_may_have_been_refused_for_its_length_keeps_nothing_from_being_tried() {
        let (mut sizes, now) = (AcceptedSizes::default(), Instant::now());
        assert_eq!(
            (sizes.of(long(MOST)), sizes.of(long(SHORT_BYTES))),
            (LengthClass::Long, LengthClass::Usual)
        );
        assert!(sizes.has_taken_none());
        sizes.taken(long(3000), now);
        sizes.refused(long(1 << 20), false, now);
        let bounds = sizes.bounds(MOST, now);
        assert_eq!((bounds.bytes, bounds.lone_bytes), (1 << 19, MOST));
        sizes.refused(long(1000), false, now);
        assert_eq!(sizes.bounds(MOST, now).bytes, LEAST_BYTES);
        sizes.taken(long(2 << 20), now + Duration::from_secs(1));
        assert_eq!(sizes.bounds(MOST, now).bytes, MOST, "it takes longer ones");
    }

    #[test]
    fn a_request_that_packs_badly_may_be_too_long_though_longer_ones_were_taken() {
        let (mut sizes, now) = (AcceptedSizes::default(), Instant::now());
        sizes.taken(RequestSize { raw: 1 << 20, packed: 40_000 }, now);
        assert_eq!(sizes.of(RequestSize { raw: 200_000, packed: 40_000 }), LengthClass::Usual);
        assert_eq!(sizes.of(RequestSize { raw: 200_000, packed: 60_000 }), LengthClass::Long);
        assert_eq!(sizes.of(RequestSize { raw: SHORT_BYTES, packed: 60_000 }), LengthClass::Usual);
    }
}
