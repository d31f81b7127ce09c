//! One region's records become events. `profiler_protocol::consumer` has copied and checked each
//! record. This module translates thread ids and times to the initial namespaces. It accepts only
//! answers to questions, and limits what one process can make later steps remember.

use super::ShimLimits;
use super::counters::ReaderTotals;
use super::heartbeat::Heartbeat;
use super::lock_owners::{LockOwners, ThreadLists};
use super::name_questions::NameQuestions;
use super::names::NameRequests;
use super::names_memory::NamesMemory;
use super::namespace::{ClockOffset, NamespaceThreads};
use super::read_round::{BUDGET, QUOTA, ReadRound};
use super::record_decoder::{RecordContext, RecordDecoder};
use super::region::{RegionKey, ShimRegion};
use super::start_hold::StartHold;
use super::type_names::RegionTypeNames;
use crate::shim::Subscriptions;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::event::{
    Event, EventKind, MonotonicNs, RegionId, RuntimeEventCounts, ShimEvent,
};
use profiler_protocol::consumer::{Consumer, ConsumerError, Quota};
use profiler_protocol::counter::{self, Counter};
use profiler_protocol::layout::{
    FEATURE_LIVE_OBJECTS, FEATURE_SEEN_TIMES, FEATURE_WAITS_AT_START, InstanceState,
};
use profiler_protocol::request::Request;
use std::io;
use std::time::{Duration, Instant};

/// A shim holds its process's end up for no longer than this (docs/shim-protocol.md).
const LAST_QUESTIONS: Duration = Duration::from_millis(50);
/// Rounds in which a region that has ended may still hand over what was in it: a second's worth.
const LAST_ROUNDS: u32 = 100;
/// A record that stays unfinished for this long is given up. Writers end with their process only,
/// so one may still come, held up by a debugger or a cgroup that has no CPU left, and what it
/// writes then would be in the middle of another's record; in the meantime the ring fills, and what
/// finds no room is counted.
const HOLE_AGE: Duration = Duration::from_secs(60);
/// Why a reader ends.
#[derive(Debug)]
pub(super) enum ReadEnd {
    /// The instance said so and its ring is empty.
    Gone,
    /// It lied, or its memory cannot be read.
    Disabled(ConsumerError<io::Error>),
}

/// One region that is ours to read.
pub(super) struct RegionReader {
    pub(super) id: RegionId,
    pub(super) key: RegionKey,
    pub(super) ours: bool,
    consumer: Consumer<ShimRegion>,
    questions: NameQuestions,
    decoder: RecordDecoder,
    /// Counter values at adoption, when an earlier recorder had read from the region.
    base: [u64; counter::ALL.len()],
    hole: Option<(u64, Instant)>,
    /// Rounds since its end.
    last_rounds: u32,
    /// It was told to leave.
    leaving: bool,
    /// When its process was first seen to end and to wait for last questions.
    closing: Option<Instant>,
    /// Since when it is read.
    pub(super) found: MonotonicNs,
    /// Its process runs another program now.
    pub(super) left_behind: bool,
    heartbeat: Heartbeat,
    /// What it was asked for last.
    told: Option<ShimLimits>,
}

impl RegionReader {
    /// Takes a region that is locked by us.
    pub(super) fn new(
        id: RegionId,
        consumer: Consumer<ShimRegion>,
        ours: bool,
        offset: ClockOffset,
        now: MonotonicNs,
        room: &NamesMemory,
    ) -> Self {
        let features = consumer.identity().features;
        let types = RegionTypeNames::with(room.another());
        let not_before_ns = if ours { 0 } else { now.0 };
        let watches = features & FEATURE_LIVE_OBJECTS != 0;
        let mut reader = Self {
            id,
            key: consumer.memory().key(),
            ours,
            consumer,
            questions: NameQuestions::new(
                NameRequests::with(room.another()),
                features & FEATURE_SEEN_TIMES != 0,
            ),
            decoder: RecordDecoder::new(id, types, offset, not_before_ns, watches),
            base: [0; counter::ALL.len()],
            hole: None,
            last_rounds: 0,
            leaving: false,
            closing: None,
            found: MonotonicNs::now(),
            left_behind: false,
            heartbeat: Heartbeat::default(),
            told: None,
        };
        if !ours {
            reader.base = reader.counters();
        }
        reader
    }

    fn counters(&self) -> [u64; counter::ALL.len()] {
        let mut values = [0; counter::ALL.len()];
        for (value, (id, ..)) in values.iter_mut().zip(counter::ALL) {
            *value = self.consumer.status().counters.get(id.index()).copied().unwrap_or(0);
        }
        values
    }

    /// The shim's counters since this recorder reads the region.
    pub(super) fn counted(&self) -> impl Iterator<Item = u64> {
        self.counters().into_iter().zip(self.base).map(|(now, base)| now.saturating_sub(base))
    }

    /// What its runtime has told of until the state was read last.
    pub(super) fn runtime_events(&mut self) -> RuntimeEventCounts {
        let counts = [Counter::Exceptions, Counter::Contentions].map(|wanted| {
            let position = counter::ALL.iter().position(|(id, ..)| *id == wanted);
            position.and_then(|position| self.counted().nth(position)).unwrap_or(0)
        });
        RuntimeEventCounts { region: self.id, counts, covered: self.decoder.take_covered() }
    }

    /// Where the slots of the objects lie that its library watches for us, if it says so.
    pub(super) fn slots(&self) -> Option<u64> {
        Some(self.consumer.identity().slots).filter(|&slots| self.ours && slots != 0)
    }

    /// True when the instance has said its last, as last read: it is gone, or was told to leave and
    /// obeyed.
    pub(super) fn is_over(&self) -> bool {
        match self.consumer.status().state {
            InstanceState::Gone => true,
            InstanceState::Closing => self.leaving,
            InstanceState::Starting | InstanceState::Ready => false,
        }
    }

    /// Queues a question about an address that was on a stack at `seen`.
    pub(super) fn ask(&mut self, address: u64, seen: MonotonicNs) -> bool {
        self.questions.ask(address, seen, self.decoder.offset)
    }

    /// All that it said up to a mark has been looked at: it learns that behind the questions that
    /// are queued by now.
    pub(super) fn heard(&mut self) {
        self.questions.heard();
    }

    /// Its process was loaded by environment, and does not go on before the first beat.
    pub(super) fn waits_at_start(&self) -> bool {
        self.ours && self.consumer.identity().features & FEATURE_WAITS_AT_START != 0
    }

    /// How long ago it was made.
    pub(super) fn age(&self, now: MonotonicNs) -> Duration {
        let made = self.decoder.offset.seen(self.consumer.identity().created_ns);
        Duration::from_nanos(now.0.saturating_sub(made.0))
    }

    /// Nobody beats before this is over.
    pub(super) fn hold_up(&mut self, hold: StartHold) {
        self.heartbeat.hold_up(hold);
    }

    /// The first beat, when it is due.
    pub(super) fn let_go(
        &mut self,
        owner: u64,
        now: MonotonicNs,
    ) -> Result<(), ConsumerError<io::Error>> {
        self.heartbeat.let_go(&mut self.consumer, owner, now)
    }

    /// Says that somebody listens.
    pub(super) fn beat(
        &mut self,
        owner: u64,
        now: MonotonicNs,
    ) -> Result<(), ConsumerError<io::Error>> {
        self.heartbeat.beat(&mut self.consumer, owner, now)
    }

    /// Says how many live objects are to be watched, and how many samples told of in a second,
    /// unless that was said before. A ring of requests that is full takes nothing: then it is to be
    /// tried again.
    pub(super) fn tell_limits(
        &mut self,
        limits: ShimLimits,
    ) -> Result<(), ConsumerError<io::Error>> {
        let ShimLimits { live_objects: handles, allocation_samples: samples } = limits;
        if self.told != Some(limits)
            && self.consumer.request(&[Request::Settings { handles, samples }])? == 1
        {
            self.told = Some(limits);
        }
        Ok(())
    }

    /// Leaves the region to whoever comes next. A region that cannot be written has nobody to tell.
    pub(super) fn release(&mut self) {
        self.heartbeat.release(&mut self.consumer);
    }

    /// Asks the instance to leave its process if it was made for us; else leaves the region to the
    /// next recorder.
    pub(super) fn leave(&mut self) {
        if self.ours {
            // With a full request ring it stays until its lease has run out, and goes then.
            self.leaving = matches!(self.consumer.request(&[Request::Detach]), Ok(1));
        } else {
            self.release();
        }
    }

    /// True while its process waits for last questions: it does so for [`LAST_QUESTIONS`], whatever
    /// it says.
    pub(super) fn is_waited_for(&mut self) -> bool {
        let closing = self.consumer.status().state == InstanceState::Closing;
        closing && self.closing.get_or_insert_with(Instant::now).elapsed() < LAST_QUESTIONS
    }

    /// Reads the state again.
    pub(super) fn refresh(&mut self) -> Result<(), ConsumerError<io::Error>> {
        self.consumer.refresh().map(|_| ())
    }

    /// Sends what is queued.
    pub(super) fn send_questions(&mut self, now: Instant) -> Result<(), ConsumerError<io::Error>> {
        self.questions.send(&mut self.consumer, now)
    }

    /// Asks again where an answer is overdue; counts what is given up.
    pub(super) fn repeat_questions(&mut self, now: Instant, totals: &mut ReaderTotals) {
        totals.names_unanswered += self.questions.names.repeat(now);
    }

    /// Reads what is there, within the share of the round that is left for it. `ended` says that
    /// the process is gone. The last words of an instance are read to their end, but whoever goes
    /// on writing after it is not listened to.
    pub(super) fn drain(
        &mut self,
        context: &mut DrainContext<'_>,
        ended: bool,
        sink: &mut dyn FnMut(Event),
    ) -> Result<(), ReadEnd> {
        let ended = ended || self.left_behind;
        let over = ended || self.is_over();
        let Some(quota) = context.turns.share(if over { BUDGET } else { QUOTA }) else {
            return Ok(());
        };
        self.drain_quota(context, quota, ended, sink)?;
        if over {
            self.last_rounds += 1;
        }
        if self.last_rounds > LAST_ROUNDS { Err(ReadEnd::Gone) } else { Ok(()) }
    }

    fn drain_quota(
        &mut self,
        context: &mut DrainContext<'_>,
        quota: Quota,
        ended: bool,
        sink: &mut dyn FnMut(Event),
    ) -> Result<(), ReadEnd> {
        let (consumer, decoder) = (&mut self.consumer, &mut self.decoder);
        let mut records = RecordContext {
            target: context.target,
            threads: context.threads,
            names: &mut self.questions.names,
            owners: context.owners,
            lists: context.lists,
            now: context.now,
            subscriptions: context.subscriptions,
            totals: context.totals,
        };
        let drained = consumer
            .drain(context.scratch, quota, &mut |record| {
                decoder.record(&record, &mut records, sink);
            })
            .map_err(ReadEnd::Disabled)?;
        context.turns.took(&drained);
        let filled = if drained.more {
            256
        } else {
            (drained.units << 8) / consumer.geometry().units.max(1)
        };
        context.turns.fullest = context.turns.fullest.max(filled);
        let totals = &mut *context.totals;
        totals.records_read += drained.records;
        totals.records_unknown += drained.unknown;
        totals.records_malformed += drained.malformed;
        totals.quota_ends += u64::from(drained.more);
        if let Some(error) = drained.first_malformed {
            tracing::debug!(pid = context.target.pid(), %error, "malformed record");
        }
        self.hole = match (drained.pending, self.hole) {
            (Some(position), Some((same, since))) if position == same => Some((position, since)),
            (Some(position), _) => Some((position, Instant::now())),
            (None, _) => None,
        };
        if let Some((_, since)) = self.hole
            && (ended || since.elapsed() >= HOLE_AGE)
        {
            let skipped =
                self.consumer.skip_hole(context.scratch, ended).map_err(ReadEnd::Disabled)?;
            totals.holes += u64::from(skipped > 0);
            self.hole = None;
        }
        let over = ended || self.is_over();
        if over && !drained.more && drained.pending.is_none() {
            return Err(ReadEnd::Gone);
        }
        Ok(())
    }

    /// The last event of a region, unless the shim sent it.
    pub(super) fn say_bye(&mut self, pid: u32, now: MonotonicNs, sink: &mut dyn FnMut(Event)) {
        if !self.decoder.says_bye() {
            sink(Event {
                time: now,
                kind: EventKind::Shim { pid, region: self.id, event: ShimEvent::Bye },
            });
        }
    }
}

/// What a drain needs of the process and of this recorder.
pub(super) struct DrainContext<'a> {
    pub(super) target: &'a ProcessHandle,
    pub(super) threads: &'a mut NamespaceThreads,
    pub(super) owners: &'a mut LockOwners,
    /// Tell who owns locks.
    pub(super) lists: Option<&'a dyn ThreadLists>,
    pub(super) scratch: &'a mut [u8],
    pub(super) turns: &'a mut ReadRound,
    pub(super) now: MonotonicNs,
    /// Where they are others than elsewhere.
    pub(super) subscriptions: Option<Subscriptions>,
    pub(super) totals: &'a mut ReaderTotals,
}

#[cfg(test)]
mod tests {
    use super::{
        Consumer, InstanceState, MonotonicNs, NamesMemory, RegionId, RegionReader, Request,
        ShimLimits, ShimRegion,
    };
    use crate::shim::namespace::monotonic_offset;
    use perfusion_host::process::handle::ProcessHandle;
    use profiler_protocol::layout::{
        COMMIT_OFFSET_AT, DATA_OFFSET_AT, Geometry, HEADER_BYTES, MAGIC, MAGIC_AT, MIN_UNITS,
        REGION_BYTES_AT, REQUEST_HEAD_AT, REQUEST_OFFSET_AT, REQUEST_SLOTS_AT, REQUEST_TAIL_AT,
        STATE_AT, UNITS_AT, VERSION, VERSION_AT,
    };
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    /// A region in a file, with so many slots for requests.
    fn region(slots: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        let of = Geometry::new(MIN_UNITS, slots).unwrap();
        file.set_len(of.region_bytes()).unwrap();
        for (at, word) in [
            (MAGIC_AT, MAGIC),
            (VERSION_AT, HEADER_BYTES << 32 | u64::from(VERSION)),
            (REGION_BYTES_AT, of.region_bytes()),
            (REQUEST_OFFSET_AT, of.request_offset()),
            (REQUEST_SLOTS_AT, slots),
            (COMMIT_OFFSET_AT, of.commit_offset()),
            (DATA_OFFSET_AT, of.data_offset()),
            (UNITS_AT, MIN_UNITS),
            (STATE_AT, InstanceState::Ready.word()),
        ] {
            file.write_all_at(&word.to_le_bytes(), at).unwrap();
        }
        file
    }

    #[test]
    fn limits_that_find_no_room_among_the_requests_are_told_later_and_once() {
        const SLOTS: usize = 64;
        let file = region(SLOTS as u64);
        let memory = ShimRegion::for_test(file.try_clone().unwrap());
        let consumer = Consumer::open(memory, file.metadata().unwrap().len()).unwrap();
        let offset = monotonic_offset(&ProcessHandle::open(std::process::id()).unwrap());
        let mut reader = RegionReader::new(
            RegionId(0),
            consumer,
            true,
            offset,
            MonotonicNs(1),
            &NamesMemory::default(),
        );
        let asked = || {
            let mut word = [0; 8];
            file.read_exact_at(&mut word, REQUEST_HEAD_AT).unwrap();
            u64::from_le_bytes(word)
        };
        assert_eq!(reader.consumer.request(&[Request::Detach; SLOTS]).unwrap(), SLOTS);
        let fewer = ShimLimits { live_objects: 256, allocation_samples: 16 };
        reader.tell_limits(fewer).unwrap();
        assert_eq!(asked(), SLOTS as u64, "full");
        // The shim has taken all.
        file.write_all_at(&(SLOTS as u64).to_le_bytes(), REQUEST_TAIL_AT).unwrap();
        for (limits, requests) in [(fewer, 1), (fewer, 1), (ShimLimits::default(), 2), (fewer, 3)] {
            reader.tell_limits(limits).unwrap();
            assert_eq!(asked(), SLOTS as u64 + requests);
        }
    }
}
