//! Merges the streams of all sources into one, by time, with bounded lateness.
//!
//! The caller drains every source once per round. A record has the time of its event but is
//! published later, because the probe first copies a stack. So a round releases events older than
//! the *start of the round before it*, or older than 20 ms if that round is longer ago. A later
//! event is passed on at once and counted as late.

use perfusion_model::event::{Event, MonotonicNs};

/// Time enough to publish.
const PUBLISHED_NS: u64 = 20_000_000;

/// The merge buffer. Its size is bounded by what the sources' rings can hold in two rounds.
#[derive(Default)]
pub struct EventOrder {
    /// What is not released yet, in the order it came: nearly sorted, since each CPU's and each
    /// process's events are.
    pending: Vec<Event>,
    previous_round: MonotonicNs,
    released: MonotonicNs,
    late: u64,
}

impl EventOrder {
    /// Takes one event of any source.
    pub fn push(&mut self, event: Event) {
        if event.time < self.released {
            self.late += 1;
        }
        self.pending.push(event);
    }

    /// Ends a round that began at `round_start` and whose sources are all drained: appends what may
    /// go on to `out`.
    pub fn end_round(&mut self, round_start: MonotonicNs, out: &mut Vec<Event>) {
        let before = std::mem::replace(&mut self.previous_round, round_start);
        let until = before.max(MonotonicNs(round_start.0.saturating_sub(PUBLISHED_NS)));
        self.sort();
        let ready = self.pending.partition_point(|event| event.time < until);
        out.extend(self.pending.drain(..ready));
        self.released = self.released.max(until);
    }

    /// Everything that happened before this was passed on, unless it comes late.
    #[must_use]
    pub fn released(&self) -> MonotonicNs {
        self.released
    }

    /// Releases everything: no source will speak again.
    pub fn finish(&mut self, out: &mut Vec<Event>) {
        self.sort();
        out.append(&mut self.pending);
    }

    /// A stable sort, which keeps events of equal time in the order they came: their order within
    /// one source. Of runs that are sorted it is a merge.
    fn sort(&mut self) {
        self.pending.sort_by_key(|event| event.time);
    }

    /// Events that came after later ones had been released.
    #[must_use]
    pub fn late(&self) -> u64 {
        self.late
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, EventOrder, MonotonicNs};
    use perfusion_model::event::{EventKind, ThreadId};
    use proptest::prelude::{any, prop, proptest};

    fn event(time: u64, tid: u32) -> Event {
        Event {
            time: MonotonicNs(time),
            kind: EventKind::Exit { thread: ThreadId { pid: 1, tid } },
        }
    }

    proptest! {
        /// Rounds of 100; each event is published up to 99 after its time: the output must be whole
        /// and sorted.
        #[test]
        fn on_time_events_come_out_whole_and_sorted(
            events in prop::collection::vec((0u64..1_000, 0u64..100), 0..200),
            seed in any::<u32>(),
        ) {
            let published = events.iter().map(|&(t, delay)| (t + delay, t));
            let mut published: Vec<(u64, u64)> = published.collect();
            published.sort_unstable();
            let (mut order, mut out, mut next) = (EventOrder::default(), Vec::new(), 0);
            for round in 1..=12u64 {
                // Sources are drained some time after the round starts; here at its very start, the
                // worst case.
                while next < published.len() && published[next].0 <= round * 100 {
                    order.push(event(published[next].1, seed));
                    next += 1;
                }
                order.end_round(MonotonicNs(round * 100), &mut out);
            }
            order.finish(&mut out);
            assert_eq!(out.len(), events.len());
            assert!(out.windows(2).all(|w| w[0].time <= w[1].time));
            assert_eq!(order.late(), 0);
        }
    }

    #[test]
    fn what_had_time_to_be_published_does_not_wait_for_another_round() {
        const MS: u64 = 1_000_000;
        let (mut order, mut out) = (EventOrder::default(), Vec::new());
        order.end_round(MonotonicNs(100 * MS), &mut out);
        for time in [150, 181, 199] {
            order.push(event(time * MS, 1));
        }
        order.end_round(MonotonicNs(200 * MS), &mut out);
        assert_eq!(out.iter().map(|event| event.time.0 / MS).collect::<Vec<_>>(), [150]);
        order.end_round(MonotonicNs(205 * MS), &mut out);
        assert_eq!((out.len(), order.late()), (3, 0));
    }

    #[test]
    fn a_late_event_is_counted_and_not_lost() {
        let (mut order, mut out) = (EventOrder::default(), Vec::new());
        order.push(event(50, 1));
        order.end_round(MonotonicNs(100), &mut out);
        order.end_round(MonotonicNs(200), &mut out);
        assert_eq!(out.len(), 1);
        order.push(event(60, 2));
        assert_eq!(order.late(), 1);
        order.end_round(MonotonicNs(300), &mut out);
        assert_eq!(out.len(), 2);
    }
}
