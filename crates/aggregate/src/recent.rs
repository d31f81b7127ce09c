//! Where a thread was lately, for who asks what it did while another one waited for it.

use perfusion_model::event::MonotonicNs;
use perfusion_model::stack::StackId;

/// Places kept of a thread. Who asks does so right after the time he asks for: a wait that is over.
const KEPT: usize = 32;

/// Seen in `stack` from one moment on: at a CPU sample, after which it was there or on its way to
/// what is seen next; or in a wait, which ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StackInterval {
    from: MonotonicNs,
    until: MonotonicNs,
    stack: StackId,
}

/// Not known yet.
const OPEN: MonotonicNs = MonotonicNs(u64::MAX);

/// The last places of one thread, the oldest first.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecentStacks(Vec<StackInterval>);

impl RecentStacks {
    /// It was sampled there, or waits there: the latter until [`Self::waited`] says that it does no
    /// more. The same may be told twice.
    pub(crate) fn seen(&mut self, from: MonotonicNs, stack: StackId) {
        let seen = StackInterval { from, until: OPEN, stack };
        // Mostly the last: records of several CPUs come about in the order of their times.
        let at = self.0.iter().rposition(|other| other.from <= from).map_or(0, |last| last + 1);
        if self.0.get(at.wrapping_sub(1)) == Some(&seen) {
            return;
        }
        self.0.insert(at, seen);
        if self.0.len() > KEPT {
            self.0.remove(0);
        }
    }

    /// The wait that began then is over.
    pub(crate) fn waited(&mut self, from: MonotonicNs, until: MonotonicNs) {
        for seen in self.0.iter_mut().filter(|seen| seen.from == from) {
            seen.until = until;
        }
    }

    /// Where it was most of the time between two moments, as far as it was seen.
    #[must_use]
    pub(crate) fn mostly_between(&self, begin: MonotonicNs, end: MonotonicNs) -> Option<StackId> {
        let nexts = self.0.iter().skip(1).map(|next| next.from).chain([OPEN]);
        let mut times: Vec<(StackId, u64)> = Vec::new();
        for (seen, next) in self.0.iter().zip(nexts) {
            let (from, until) = (seen.from.max(begin), seen.until.min(next).min(end));
            if from > until {
                continue;
            }
            let ns = until.0 - from.0;
            match times.iter_mut().find(|(stack, _)| *stack == seen.stack) {
                Some((_, sum)) => *sum += ns,
                None => times.push((seen.stack, ns)),
            }
        }
        times.into_iter().max_by_key(|(_, ns)| *ns).map(|(stack, _)| stack)
    }
}

#[cfg(test)]
mod tests {
    use super::{KEPT, RecentStacks};
    use perfusion_model::event::MonotonicNs;
    use perfusion_model::stack::StackId;

    const T: fn(u64) -> MonotonicNs = MonotonicNs;

    #[test]
    fn where_a_thread_was_most_of_the_time_is_told() {
        let mut recent = RecentStacks::default();
        for (from, stack) in [(10, 1), (20, 2), (20, 2), (15, 1)] {
            recent.seen(T(from), StackId(stack));
        }
        let at = |recent: &RecentStacks, begin, end| {
            recent.mostly_between(T(begin), T(end)).map(|stack| stack.0)
        };
        assert_eq!(at(&recent, 100, 110), Some(2), "it waits still");
        recent.waited(T(20), T(30));
        recent.seen(T(40), StackId(3));
        assert_eq!(
            [(0, 9), (0, 10), (0, 25), (0, 50), (25, 31), (31, 39), (31, 50), (38, 60)]
                .map(|(begin, end)| at(&recent, begin, end)),
            [None, Some(1), Some(1), Some(3), Some(2), None, Some(3), Some(3)]
        );
        for time in 0..KEPT as u64 {
            recent.seen(T(100 + time), StackId(9));
        }
        assert_eq!((at(&recent, 0, 99), recent.0.len()), (None, KEPT), "the last ones are kept");
    }
}
