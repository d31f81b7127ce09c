//! The beats by which one shim knows that somebody reads its region.

use super::region::ShimRegion;
use super::start_hold::StartHold;
use perfusion_model::event::MonotonicNs;
use profiler_protocol::consumer::{Consumer, ConsumerError};
use std::io;
use std::time::Duration;

/// How often a beat is due, and what the shim is told about it.
pub(super) const BEAT_EVERY: Duration = Duration::from_millis(250);

/// The beats of one region.
#[derive(Default)]
pub(super) struct Heartbeat {
    beat: u64,
    /// Its runtime waits for the first beat, until this is over.
    hold: Option<StartHold>,
}

impl Heartbeat {
    /// Nobody beats before this is over.
    pub(super) fn hold_up(&mut self, hold: StartHold) {
        self.hold = Some(hold);
    }

    /// The first beat, when it is due.
    pub(super) fn let_go(
        &mut self,
        consumer: &mut Consumer<ShimRegion>,
        owner: u64,
        now: MonotonicNs,
    ) -> Result<(), ConsumerError<io::Error>> {
        match self.hold.take_if(|hold| hold.is_over()) {
            Some(_) => self.beat(consumer, owner, now),
            None => Ok(()),
        }
    }

    /// Says that somebody listens.
    pub(super) fn beat(
        &mut self,
        consumer: &mut Consumer<ShimRegion>,
        owner: u64,
        now: MonotonicNs,
    ) -> Result<(), ConsumerError<io::Error>> {
        if self.hold.is_some() {
            return Ok(());
        }
        // A beat is a change; the clock never gives the same value twice here, but a frozen one
        // must not stop us.
        self.beat = now.0.max(self.beat.wrapping_add(1));
        let period = u64::try_from(BEAT_EVERY.as_nanos()).unwrap_or(0);
        consumer.beat(owner, self.beat, period)
    }

    /// Leaves the region to whoever comes next. A region that cannot be written has nobody to tell.
    pub(super) fn release(&self, consumer: &mut Consumer<ShimRegion>) {
        consumer.release(self.beat.wrapping_add(1)).ok();
    }
}
