//! The questions to one shim about addresses, as its requests carry them.

use super::names::NameRequests;
use super::namespace::ClockOffset;
use super::region::ShimRegion;
use perfusion_model::event::MonotonicNs;
use profiler_protocol::consumer::{Consumer, ConsumerError};
use profiler_protocol::request::Request;
use std::io;
use std::time::{Duration, Instant};

const QUESTIONS_AT_ONCE: usize = 512;

/// A question to a shim that cannot be told when its address was seen may be asked for this long:
/// see `names.rs` for repetitions, and docs/shim-protocol.md for the six seconds that they must
/// stay below.
const FRESH: Duration = Duration::from_secs(2);

/// The questions to one shim.
pub(super) struct NameQuestions {
    pub(super) names: NameRequests,
    /// The shim can be told when an address was seen.
    seen_times: bool,
    /// A mark of the shim's has been looked at, and it does not know yet.
    heard: bool,
}

impl NameQuestions {
    /// Questions to a shim that can be told `seen_times` or not.
    pub(super) fn new(names: NameRequests, seen_times: bool) -> Self {
        Self { names, seen_times, heard: false }
    }

    /// Queues a question about an address that was on a stack at `seen`.
    pub(super) fn ask(&mut self, address: u64, seen: MonotonicNs, offset: ClockOffset) -> bool {
        if self.seen_times {
            return self.names.ask(address, offset.told(seen));
        }
        // It takes every question for one about code seen a moment ago.
        let age = MonotonicNs::now().0.saturating_sub(seen.0);
        u128::from(age) > FRESH.as_nanos() || self.names.ask(address, 0)
    }

    /// All that the shim said up to a mark has been looked at: it learns that behind the questions
    /// that are queued by now.
    pub(super) fn heard(&mut self) {
        self.heard = true;
    }

    /// Sends what is queued.
    pub(super) fn send(
        &mut self,
        consumer: &mut Consumer<ShimRegion>,
        now: Instant,
    ) -> Result<(), ConsumerError<io::Error>> {
        let next = self.names.next(QUESTIONS_AT_ONCE);
        if !next.is_empty() {
            let requests: Vec<Request> = next
                .into_iter()
                .map(|(address, seen_ns)| Request::Name { address, seen_ns })
                .collect();
            let written = consumer.request(&requests)?;
            self.names.sent(written, now);
        }
        if self.heard && self.names.next(1).is_empty() {
            self.heard = consumer.request(&[Request::Heard])? == 0;
        }
        Ok(())
    }
}
