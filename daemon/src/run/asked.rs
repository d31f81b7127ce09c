//! When addresses were last asked about; forgets what is too old to matter.

use super::processor::NameRequest;
use crate::source::MonotonicNs;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::time::Duration;

/// An address may be asked about only while it is sure that its code is still there: at most so long after it was seen running. With
/// the repetitions of a lost question (`source/shim/names.rs`) that stays below the six seconds of docs/shim-protocol.md. One without an
/// answer that is seen again after this is asked about again.
const FRESH: Duration = Duration::from_secs(2);
/// Entries from which on the old ones are looked for.
const FEW: usize = 65_536;

/// When each address was last asked about, which was when it was seen running.
#[derive(Default)]
pub(super) struct Asked {
    at: HashMap<NameRequest, MonotonicNs, RandomState>,
    /// Entries left by the last search for old ones.
    left: usize,
}

fn is_fresh(at: MonotonicNs, now: MonotonicNs) -> bool {
    u128::from(now.0.saturating_sub(at.0)) <= FRESH.as_nanos()
}

impl Asked {
    /// It is asked about now.
    pub(super) fn note(&mut self, request: NameRequest, now: MonotonicNs) {
        self.at.insert(request, now);
        if self.at.len() > 2 * self.left.max(FEW) {
            self.at.retain(|_, at| is_fresh(*at, now));
            self.left = self.at.len();
        }
    }

    /// True while the address was asked about a moment ago; later its code may be another, and only being seen again allows to ask.
    pub(super) fn is_fresh(&self, request: NameRequest, now: MonotonicNs) -> bool {
        self.at.get(&request).is_some_and(|at| is_fresh(*at, now))
    }
}

#[cfg(test)]
mod tests {
    use super::{Asked, FEW, FRESH, MonotonicNs, NameRequest};

    #[test]
    fn what_is_too_old_to_matter_is_forgotten() {
        let mut asked = Asked::default();
        let second = u64::try_from(FRESH.as_nanos()).unwrap() / 2;
        let request = |address| NameRequest { pid: 1, address };
        // As many new ones in each second as are few: three seconds' worth is kept at most, until the next search finds it.
        for address in 0..40 * FEW as u64 {
            let now = MonotonicNs(address / FEW as u64 * second);
            asked.note(request(address), now);
            assert!(asked.is_fresh(request(address), now));
        }
        assert!(asked.at.len() <= 8 * FEW, "{}", asked.at.len());
        let newest = MonotonicNs(39 * second);
        assert!(asked.is_fresh(request(38 * FEW as u64), newest) && !asked.is_fresh(request(0), newest));
    }
}
