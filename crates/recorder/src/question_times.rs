//! The times at which addresses were last asked about and seen. What is too old is forgotten.

use foldhash::fast::RandomState;
use perfusion_model::event::MonotonicNs;
use std::collections::HashMap;
use std::time::Duration;

/// A question without an answer is repeated for so long; later only when its address is seen again.
/// With the repetitions of a lost question (`perfusion_sources::shim`) that stays below the six
/// seconds of docs/shim-protocol.md for shims that are not told when it was.
const FRESH: Duration = Duration::from_secs(2);
/// Entries from which on the old ones are looked for.
const FEW: usize = 65_536;

/// A process's id and an address in it.
type ProcessAddress = (u32, u64);

#[derive(Clone, Copy)]
struct LastTimes {
    asked: MonotonicNs,
    seen: MonotonicNs,
}

/// When each address was last asked about, and when it was surely on a stack.
#[derive(Default)]
pub(super) struct QuestionTimes {
    at: HashMap<ProcessAddress, LastTimes, RandomState>,
    /// Entries left by the last search for old ones.
    left: usize,
}

fn is_fresh(at: MonotonicNs, now: MonotonicNs) -> bool {
    u128::from(now.0.saturating_sub(at.0)) <= FRESH.as_nanos()
}

impl QuestionTimes {
    /// It is asked about now, and was surely on a stack at `seen` (0: never that is known). Answers
    /// when it last was.
    pub(super) fn note(
        &mut self,
        place: ProcessAddress,
        now: MonotonicNs,
        seen: MonotonicNs,
    ) -> MonotonicNs {
        let last = self.at.entry(place).or_insert(LastTimes { asked: now, seen });
        *last = LastTimes { asked: now, seen: last.seen.max(seen) };
        let seen = last.seen;
        if self.at.len() > 2 * self.left.max(FEW) {
            self.at.retain(|_, last| is_fresh(last.asked, now));
            self.left = self.at.len();
        }
        seen
    }

    /// It was surely on a stack at `seen`, and is not asked about: it was a moment ago.
    pub(super) fn saw(&mut self, place: ProcessAddress, seen: MonotonicNs) {
        if let Some(last) = self.at.get_mut(&place) {
            last.seen = last.seen.max(seen);
        }
    }

    /// True while the address was asked about a moment ago.
    pub(super) fn is_fresh(&self, place: ProcessAddress, now: MonotonicNs) -> bool {
        self.at.get(&place).is_some_and(|last| is_fresh(last.asked, now))
    }

    /// When it was surely on a stack, as far as is remembered.
    pub(super) fn seen(&self, place: ProcessAddress) -> MonotonicNs {
        self.at.get(&place).map_or(MonotonicNs(0), |last| last.seen)
    }
}

#[cfg(test)]
mod tests {
    use super::{FEW, FRESH, MonotonicNs, QuestionTimes};

    #[test]
    fn what_is_too_old_to_matter_is_forgotten() {
        let mut asked = QuestionTimes::default();
        let second = u64::try_from(FRESH.as_nanos()).unwrap() / 2;
        let request = |address| (1, address);
        // As many new ones in each second as are few: three seconds' worth is kept at most, until
        // the next search finds it.
        for address in 0..40 * FEW as u64 {
            let now = MonotonicNs(address / FEW as u64 * second);
            assert_eq!(asked.note(request(address), now, now), now);
            assert!(asked.is_fresh(request(address), now));
        }
        assert!(asked.at.len() <= 8 * FEW, "{}", asked.at.len());
        let newest = MonotonicNs(39 * second);
        assert!(
            asked.is_fresh(request(38 * FEW as u64), newest) && !asked.is_fresh(request(0), newest)
        );
        assert_eq!(asked.seen(request(0)), MonotonicNs(0));
    }

    #[test]
    fn what_is_not_sure_takes_nothing_from_what_was() {
        let mut asked = QuestionTimes::default();
        assert_eq!(asked.note((1, 2), MonotonicNs(10), MonotonicNs(0)), MonotonicNs(0));
        assert_eq!(asked.note((1, 2), MonotonicNs(20), MonotonicNs(20)), MonotonicNs(20));
        assert_eq!(asked.note((1, 2), MonotonicNs(30), MonotonicNs(0)), MonotonicNs(20));
        asked.saw((1, 2), MonotonicNs(15));
        assert_eq!((asked.seen((1, 2)), asked.seen((2, 2))), (MonotonicNs(20), MonotonicNs(0)));
    }
}
