//! Merges the streams of all sources into one, by time, with bounded lateness.
//!
//! The caller drains every source once per round. A record carries the time of the event, and is published a little later
//! (the probe copies a stack in between), so a round releases what is older than the *start of the round before it*: whoever
//! took an earlier time had a whole round to publish. What comes later still is passed on at once and counted as late.

use super::{Event, MonotonicNs};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

struct Entry {
    time: MonotonicNs,
    /// Keeps events of equal time in the order they came, which is their order within one source.
    arrival: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.time, self.arrival) == (other.time, other.arrival)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.time, self.arrival).cmp(&(other.time, other.arrival))
    }
}

/// The merge buffer. Its size is bounded by what the sources' rings can hold in two rounds.
#[derive(Default)]
pub struct Order {
    heap: BinaryHeap<Reverse<Entry>>,
    arrivals: u64,
    previous_round: MonotonicNs,
    released: MonotonicNs,
    late: u64,
}

impl Order {
    /// Takes one event of any source.
    pub fn push(&mut self, event: Event) {
        if event.time < self.released {
            self.late += 1;
        }
        self.arrivals += 1;
        self.heap.push(Reverse(Entry { time: event.time, arrival: self.arrivals, event }));
    }

    /// Ends a round that began at `round_start` and whose sources are all drained: appends what may go on to `out`.
    pub fn end_round(&mut self, round_start: MonotonicNs, out: &mut Vec<Event>) {
        let until = std::mem::replace(&mut self.previous_round, round_start);
        while let Some(Reverse(entry)) = self.heap.peek() {
            if entry.time >= until {
                break;
            }
            if let Some(Reverse(entry)) = self.heap.pop() {
                out.push(entry.event);
            }
        }
        self.released = self.released.max(until);
    }

    /// Releases everything: no source will speak again.
    pub fn finish(&mut self, out: &mut Vec<Event>) {
        while let Some(Reverse(entry)) = self.heap.pop() {
            out.push(entry.event);
        }
    }

    /// Events that came after later ones had been released.
    #[must_use]
    pub fn late(&self) -> u64 {
        self.late
    }
}

#[cfg(test)]
mod tests {
    use super::{Event, MonotonicNs, Order};
    use crate::source::{EventKind, ThreadId};
    use proptest::prelude::{any, prop, proptest};

    fn event(time: u64, tid: u32) -> Event {
        Event { time: MonotonicNs(time), kind: EventKind::Exit { thread: ThreadId { pid: 1, tid } } }
    }

    proptest! {
        /// Rounds of 100; each event is published up to 99 after its time: the output must be whole and sorted.
        #[test]
        fn on_time_events_come_out_whole_and_sorted(events in prop::collection::vec((0u64..1_000, 0u64..100), 0..200), seed in any::<u32>()) {
            let mut published: Vec<(u64, u64)> = events.iter().map(|&(t, delay)| (t + delay, t)).collect();
            published.sort_unstable();
            let (mut order, mut out, mut next) = (Order::default(), Vec::new(), 0);
            for round in 1..=12u64 {
                // Sources are drained some time after the round starts; here at its very start, the worst case.
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
    fn a_late_event_is_counted_and_not_lost() {
        let (mut order, mut out) = (Order::default(), Vec::new());
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
