//! One region's records become events. `profiler_protocol::consumer` has copied and checked each
//! record. This module translates thread ids and times to the initial namespaces. It accepts only
//! answers to questions, and limits what one process can make later steps remember.

use super::ShimLimits;
use super::counters::ReaderTotals;
use super::names::NameRequests;
use super::names_memory::NamesMemory;
use super::namespace::{ClockOffset, NamespaceThreads};
use super::region::{RegionKey, ShimRegion};
use super::start_hold::StartHold;
use crate::shim::Subscriptions;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::event::IncidentCounts;
use perfusion_model::event::{
    Allocation, AllocationKind, Contention, Event, EventKind, Exception, HeapKind, MethodBody,
    MonotonicNs, RegionId, RuntimeSample, ShimEvent, UserContext, UserRegs,
};
use perfusion_unwind::native::NATIVE;
use profiler_protocol::consumer::{Consumer, ConsumerError, Drained, Quota};
use profiler_protocol::counter::{self, Counter};
use profiler_protocol::layout::{
    FEATURE_LIVE_OBJECTS, FEATURE_SEEN_TIMES, FEATURE_WAITS_AT_START, InstanceState, UNIT_BYTES,
    unpack_runtime,
};
use profiler_protocol::record::{AllocationHead, Record, RecordBody, Registers, StackHead};
use profiler_protocol::request::Request;
use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

/// What one round takes of one region while more can come: at a round every 10 ms this is 100
/// MiB/s, far above what a shim sends, and no more than a moment of the daemon's time.
const QUOTA: Quota = Quota { records: 4096, bytes: 1 << 20 };
/// What one round takes of all regions together: the memory it needs is bounded, however many there
/// are and however full. A ring of the usual length is read at once.
pub(super) const BUDGET: Quota = Quota { records: 1 << 16, bytes: 8 << 20 };
/// Shares of it are no smaller while there is something left: the longest record fits.
const LEAST: Quota = Quota { records: 64, bytes: 64 << 10 };
/// A shim holds its process's end up for no longer than this (docs/shim-protocol.md).
const LAST_QUESTIONS: Duration = Duration::from_millis(50);
/// Rounds in which a region that has ended may still hand over what was in it: a second's worth.
const LAST_ROUNDS: u32 = 100;
/// A record that stays unfinished for this long is given up. Writers end with their process only,
/// so one may still come, held up by a debugger or a cgroup that has no CPU left, and what it
/// writes then would be in the middle of another's record; in the meantime the ring fills, and what
/// finds no room is counted.
const HOLE_AGE: Duration = Duration::from_secs(60);
/// Distinct types that one region may tell, and bytes of their names.
const TYPES: usize = 65_536;
const TYPES_BYTES: usize = 8 << 20;
/// What a type takes besides.
const TYPE_OVERHEAD: usize = 128;
/// Characters of a thread's name that are kept.
const THREAD_NAME_CHARS: usize = 128;
/// Characters of an exception's type that are kept.
const TYPE_NAME_CHARS: usize = 256;
/// The same of what an exception says.
const MESSAGE_CHARS: usize = 200;
/// Events may wait in the ring while the daemon is busy, but not longer than this.
const OLDEST_NS: u64 = 60_000_000_000;
const QUESTIONS_AT_ONCE: usize = 512;

/// A question to a shim that cannot be told when its address was seen may be asked for this long:
/// see `names.rs` for repetitions, and docs/shim-protocol.md for the six seconds that they must
/// stay below.
const FRESH: Duration = Duration::from_secs(2);

/// How often a beat is due, and what the shim is told about it.
pub(super) const BEAT_EVERY: Duration = Duration::from_millis(250);

/// What is left of a round, and for how many regions.
#[derive(Debug)]
pub(super) struct ReadRound {
    left: Quota,
    regions: u64,
    /// Something was left for the next round.
    pub(super) more: bool,
    /// How much of the fullest ring was used, in 1/256.
    pub(super) fullest: u64,
}

impl ReadRound {
    /// A round in which so many regions are read.
    pub(super) fn new(regions: usize) -> Self {
        Self {
            left: BUDGET,
            regions: u64::try_from(regions).unwrap_or(u64::MAX),
            more: false,
            fullest: 0,
        }
    }

    /// True when nothing is left for those that come now.
    pub(super) fn is_over(&self) -> bool {
        self.left.bytes == 0 || self.left.records == 0
    }

    /// The next region's share: what others leave goes to those behind them. `None` when nothing is
    /// left.
    fn share(&mut self, most: Quota) -> Option<Quota> {
        let regions = self.regions.max(1);
        self.regions = regions - 1;
        if self.is_over() {
            self.more = true;
            return None;
        }
        Some(Quota {
            records: (self.left.records / regions).clamp(LEAST.records, most.records),
            bytes: (self.left.bytes / regions).clamp(LEAST.bytes, most.bytes),
        })
    }

    fn took(&mut self, drained: &Drained) {
        let records = drained.records + drained.unknown + drained.skipped + drained.malformed;
        self.left.records = self.left.records.saturating_sub(records);
        self.left.bytes = self.left.bytes.saturating_sub(drained.units.saturating_mul(UNIT_BYTES));
        self.more |= drained.more;
    }
}

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
    names: NameRequests,
    types: RegionTypeNames,
    offset: ClockOffset,
    /// The shim can be told when an address was seen.
    seen_times: bool,
    /// Records from before this are of an earlier recorder's time.
    not_before_ns: u64,
    /// Counter values at adoption, when an earlier recorder had read from the region.
    base: [u64; counter::ALL.len()],
    /// Whether records of exceptions, of contentions were left out since that was last asked.
    incidents_left_out: [bool; 2],
    hole: Option<(u64, Instant)>,
    said_bye: bool,
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
    beat: u64,
    /// What it was asked for last.
    told: Option<ShimLimits>,
    /// A mark of its has been looked at, and it does not know yet.
    heard: bool,
    /// Its runtime waits for the first beat, until this is over.
    hold: Option<StartHold>,
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
        let seen_times = consumer.identity().features & FEATURE_SEEN_TIMES != 0;
        let mut reader = Self {
            id,
            key: consumer.memory().key(),
            ours,
            consumer,
            names: NameRequests::with(room.another()),
            types: RegionTypeNames { share: room.another(), ..RegionTypeNames::default() },
            offset,
            seen_times,
            not_before_ns: if ours { 0 } else { now.0 },
            base: [0; counter::ALL.len()],
            incidents_left_out: [false; 2],
            hole: None,
            said_bye: false,
            last_rounds: 0,
            leaving: false,
            closing: None,
            found: MonotonicNs::now(),
            left_behind: false,
            beat: 0,
            told: None,
            heard: false,
            hold: None,
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
    pub(super) fn incidents(&mut self) -> IncidentCounts {
        let counts = [Counter::Exceptions, Counter::Contentions].map(|wanted| {
            let position = counter::ALL.iter().position(|(id, ..)| *id == wanted);
            position.and_then(|position| self.counted().nth(position)).unwrap_or(0)
        });
        let left_out = std::mem::take(&mut self.incidents_left_out);
        IncidentCounts { region: self.id, counts, covered: left_out.map(|left_out| !left_out) }
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
        if self.seen_times {
            return self.names.ask(address, self.offset.told(seen));
        }
        // It takes every question for one about code seen a moment ago.
        let age = MonotonicNs::now().0.saturating_sub(seen.0);
        u128::from(age) > FRESH.as_nanos() || self.names.ask(address, 0)
    }

    /// All that it said up to a mark has been looked at: it learns that behind the questions that
    /// are queued by now.
    pub(super) fn heard(&mut self) {
        self.heard = true;
    }

    /// Its process was loaded by environment, and does not go on before the first beat.
    pub(super) fn waits_at_start(&self) -> bool {
        self.ours && self.consumer.identity().features & FEATURE_WAITS_AT_START != 0
    }

    /// How long ago it was made.
    pub(super) fn age(&self, now: MonotonicNs) -> Duration {
        let made = self.offset.seen(self.consumer.identity().created_ns);
        Duration::from_nanos(now.0.saturating_sub(made.0))
    }

    /// Nobody beats before this is over.
    pub(super) fn hold_up(&mut self, hold: StartHold) {
        self.hold = Some(hold);
    }

    /// The first beat, when it is due.
    pub(super) fn let_go(
        &mut self,
        owner: u64,
        now: MonotonicNs,
    ) -> Result<(), ConsumerError<io::Error>> {
        match self.hold.take_if(|hold| hold.is_over()) {
            Some(_) => self.beat(owner, now),
            None => Ok(()),
        }
    }

    /// Says that somebody listens.
    pub(super) fn beat(
        &mut self,
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
        self.consumer.beat(owner, self.beat, period)
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
        self.consumer.release(self.beat.wrapping_add(1)).ok();
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
        let next = self.names.next(QUESTIONS_AT_ONCE);
        if !next.is_empty() {
            let requests: Vec<Request> = next
                .into_iter()
                .map(|(address, seen_ns)| Request::Name { address, seen_ns })
                .collect();
            let written = self.consumer.request(&requests)?;
            self.names.sent(written, now);
        }
        if self.heard && self.names.next(1).is_empty() {
            self.heard = self.consumer.request(&[Request::Heard])? == 0;
        }
        Ok(())
    }

    /// Asks again where an answer is overdue; counts what is given up.
    pub(super) fn repeat_questions(&mut self, now: Instant, totals: &mut ReaderTotals) {
        totals.names_unanswered += self.names.repeat(now);
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
        let watches = self.consumer.identity().features & FEATURE_LIVE_OBJECTS != 0;
        let Self { consumer, names, types, .. } = self;
        let mut decoder = RecordDecoder {
            id: self.id,
            names,
            types,
            offset: self.offset,
            not_before_ns: self.not_before_ns,
            said_bye: &mut self.said_bye,
            incidents_left_out: &mut self.incidents_left_out,
            wishes: context.wishes,
            watches,
        };
        let drained = consumer
            .drain(context.scratch, quota, &mut |record| {
                decoder.record(
                    &record,
                    context.target,
                    context.threads,
                    context.now,
                    context.totals,
                    sink,
                )
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
        if !std::mem::replace(&mut self.said_bye, true) {
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
    pub(super) scratch: &'a mut [u8],
    pub(super) turns: &'a mut ReadRound,
    pub(super) now: MonotonicNs,
    /// Where they are others than elsewhere.
    pub(super) wishes: Option<Subscriptions>,
    pub(super) totals: &'a mut ReaderTotals,
}

struct RecordDecoder<'a> {
    id: RegionId,
    names: &'a mut NameRequests,
    types: &'a mut RegionTypeNames,
    offset: ClockOffset,
    not_before_ns: u64,
    said_bye: &'a mut bool,
    incidents_left_out: &'a mut [bool; 2],
    wishes: Option<Subscriptions>,
    /// The shim watches objects.
    watches: bool,
}

impl RecordDecoder<'_> {
    fn is_left_out(&self, wished: impl Fn(Subscriptions) -> bool) -> bool {
        self.wishes.is_some_and(|wishes| !wished(wishes))
    }

    fn record(
        &mut self,
        record: &Record<'_>,
        target: &ProcessHandle,
        threads: &mut NamespaceThreads,
        now: MonotonicNs,
        totals: &mut ReaderTotals,
        sink: &mut dyn FnMut(Event),
    ) {
        let told = record.time_ns.wrapping_sub(self.offset.ns.cast_unsigned());
        let time = plausible(told, now.0, || MonotonicNs::now().0);
        // Clocks of two CPUs may differ by a little.
        totals.times_corrected +=
            u64::from(time != told && told.wrapping_sub(now.0) > 1_000_000_000);
        let mut thread = |tid: u32| {
            let outer = threads.outer(target, tid);
            totals.threads_unknown += u64::from(outer.is_none());
            outer.unwrap_or(0)
        };
        let event = match record.body {
            _ if told < self.not_before_ns && !matches!(record.body, RecordBody::Bye) => {
                totals.records_stale += 1;
                return;
            }
            RecordBody::Skip => return,
            RecordBody::Allocation(..) if self.is_left_out(|wishes| wishes.allocations) => {
                return totals.records_left_out += 1;
            }
            RecordBody::Exception(..) if self.is_left_out(|wishes| wishes.exceptions) => {
                self.incidents_left_out[0] = true;
                return totals.records_left_out += 1;
            }
            RecordBody::Contention(..) if self.is_left_out(|wishes| wishes.contention) => {
                self.incidents_left_out[1] = true;
                return totals.records_left_out += 1;
            }
            RecordBody::Hello { runtime } => {
                let (major, minor, build, _) = unpack_runtime(runtime);
                ShimEvent::Hello { runtime: (major, minor, build), watches: self.watches }
            }
            RecordBody::Allocation(head, stack) => {
                let mut allocation = allocation(&head, stack, thread(record.tid));
                allocation.seen = MonotonicNs(told.min(time));
                if self.is_left_out(|wishes| wishes.live_objects) {
                    allocation.watched = None;
                }
                ShimEvent::Allocation(Box::new(allocation))
            }
            RecordBody::TypeName { type_id, module_id, name, module } => {
                if !self.types.take(type_id, name.len() + module.len()) {
                    totals.types_refused += 1;
                    return;
                }
                let (name, module) = (name.to_owned(), module.to_owned());
                ShimEvent::TypeName { type_id, module_id, name, module }
            }
            RecordBody::Method { asked, module_id, token, dynamic, ranges, name, module } => {
                let ranges: Vec<(u64, u32)> = ranges
                    .pairs()
                    .filter(|&(start, bytes)| bytes > 0 && start.checked_add(bytes).is_some())
                    .map(|(start, bytes)| (start, u32::try_from(bytes).unwrap_or(u32::MAX)))
                    .collect();
                if !self.names.found(asked, module_id, &ranges) {
                    totals.names_unasked += 1;
                    return;
                }
                let (name, module) = (name.to_owned(), module.to_owned());
                ShimEvent::Method(Box::new(MethodBody {
                    asked,
                    module_id,
                    token,
                    dynamic,
                    name,
                    module,
                    ranges,
                }))
            }
            RecordBody::NoMethod { asked, hresult } => match self.names.not_found(asked, hresult) {
                Some(sent_ns) => {
                    ShimEvent::NoMethod { asked, hresult, seen: self.offset.seen(sent_ns) }
                }
                None => {
                    totals.names_unasked += 1;
                    return;
                }
            },
            RecordBody::CodeUnloaded { module_id, ranges } => {
                let ranges = self.names.unloaded(module_id, ranges.pairs());
                if ranges.is_empty() {
                    return;
                }
                ShimEvent::CodeUnloaded { ranges }
            }
            RecordBody::GcStart { number, generation, reason, kind } => {
                ShimEvent::GcStart { number, generation, reason, kind, tid: thread(record.tid) }
            }
            RecordBody::GcEnd { number } => ShimEvent::GcEnd { number },
            RecordBody::PauseBegin { reason } => ShimEvent::PauseBegin {
                reason: u8::try_from(reason).unwrap_or(u8::MAX),
                tid: thread(record.tid),
            },
            RecordBody::PauseEnd => ShimEvent::PauseEnd { tid: thread(record.tid) },
            RecordBody::GcHeap { number, promoted } => ShimEvent::GcHeap { number, promoted },
            RecordBody::PauseCpu { suspender, cpu_ns } => {
                ShimEvent::PauseCpu { tid: thread(suspender), cpu_ns }
            }
            RecordBody::PoolAdjusted { workers, reason } => {
                ShimEvent::PoolAdjusted { workers, reason }
            }
            RecordBody::PoolQueue { items } => ShimEvent::PoolQueue { items },
            RecordBody::Exception(head, stack) => ShimEvent::Exception(Box::new(Exception {
                at: runtime_sample(
                    &head.at,
                    stack,
                    thread(record.tid),
                    MonotonicNs(told.min(time)),
                ),
                rethrown: head.rethrown,
                type_name: head.type_name.chars().take(TYPE_NAME_CHARS).collect(),
                message: head.message.map(|message| message.chars().take(MESSAGE_CHARS).collect()),
            })),
            RecordBody::Contention(head, stack) => ShimEvent::Contention(Box::new(Contention {
                at: runtime_sample(
                    &head.at,
                    stack,
                    thread(record.tid),
                    MonotonicNs(told.min(time)),
                ),
                waited_ns: head.waited_ns,
                owner: Some(head.owner)
                    .filter(|&owner| owner != 0)
                    .map(thread)
                    .filter(|&owner| owner != 0),
            })),
            RecordBody::ObjectsDead(samples) => {
                ShimEvent::ObjectsDead { samples: samples.iter().collect() }
            }
            RecordBody::ObjectsAlive(samples) => ShimEvent::ObjectsAlive {
                samples: samples.iter().map(|word| (word >> 8, word.to_le_bytes()[0])).collect(),
            },
            RecordBody::ObjectsDropped { level, samples } => {
                ShimEvent::ObjectsDropped { level, samples: samples.iter().collect() }
            }
            RecordBody::ThreadName { os_tid: 0, .. } => ShimEvent::Mark,
            // Of one without a name the id alone was to be learnt, while it runs.
            RecordBody::ThreadName { os_tid, name } => match thread(os_tid) {
                0 => return,
                _ if name.is_empty() => return,
                tid => ShimEvent::ThreadName {
                    tid,
                    name: name.chars().take(THREAD_NAME_CHARS).collect(),
                },
            },
            RecordBody::ThreadAt { os_tid, address } => match thread(os_tid) {
                0 => return,
                tid => ShimEvent::ThreadAt { tid, address },
            },
            RecordBody::Bye => {
                if std::mem::replace(self.said_bye, true) {
                    return;
                }
                ShimEvent::Bye
            }
        };
        let kind = EventKind::Shim { pid: target.pid(), region: self.id, event };
        sink(Event { time: MonotonicNs(time), kind });
    }
}

/// The time of a record that says it was written at `told`, in a ring whose reading began at
/// `began`. Records are written while the ring is read, and events of the kernel lie between them:
/// one that is later than `began` keeps its time, unless it is ahead of the clock too.
fn plausible(told: u64, began: u64, clock: impl FnOnce() -> u64) -> u64 {
    let latest = if told > began { clock().max(began) } else { began };
    told.clamp(began.saturating_sub(OLDEST_NS), latest)
}

/// Lengths of the names of the types that a region has told, with those of their modules.
#[derive(Default)]
struct RegionTypeNames {
    names: HashMap<u64, usize>,
    bytes: usize,
    share: NamesMemory,
}

impl RegionTypeNames {
    /// A type with names of so many `bytes` is told, again perhaps. False when there is no room for
    /// it.
    fn take(&mut self, type_id: u64, bytes: usize) -> bool {
        let before = self.names.get(&type_id).copied();
        let after = self.bytes - before.unwrap_or(0) + bytes;
        if after > TYPES_BYTES || before.is_none() && self.names.len() >= TYPES {
            return false;
        }
        if !self.share.take(bytes + TYPE_OVERHEAD) {
            return false;
        }
        if let Some(before) = before {
            self.share.give(before + TYPE_OVERHEAD);
        }
        self.names.insert(type_id, bytes);
        self.bytes = after;
        true
    }
}

fn allocation(head: &AllocationHead, stack: &[u8], tid: u32) -> Allocation {
    Allocation {
        sample: head.sample,
        tid,
        type_id: head.type_id,
        size: head.size,
        heap: match head.heap {
            0 => HeapKind::Small,
            1 => HeapKind::Large,
            _ => HeapKind::Pinned,
        },
        kind: match (head.exact, head.sampled) {
            (true, _) => AllocationKind::Exact,
            (false, true) if head.amount > head.size => {
                AllocationKind::Chosen { bytes: head.amount }
            }
            (false, true) => AllocationKind::Sampled,
            (false, false) => AllocationKind::Tick { amount: head.amount },
        },
        level: head.level,
        watched: head.watched.checked_sub(1),
        user: UserContext {
            walk: None,
            regs: registers(&head.registers),
            stack: stack.to_vec(),
            skipped: 0,
            limited: head.limited,
            exiting: false,
            asleep: None,
        },
        seen: MonotonicNs(0),
    }
}

fn runtime_sample(head: &StackHead, stack: &[u8], tid: u32, seen: MonotonicNs) -> RuntimeSample {
    let user = UserContext {
        walk: None,
        regs: registers(&head.registers),
        stack: stack.to_vec(),
        skipped: 0,
        limited: head.limited,
        exiting: false,
        asleep: None,
    };
    RuntimeSample { tid, weight: f64::from(head.level).exp2(), user, seen }
}

/// The registers the shim captures, at their places.
fn registers(captured: &Registers) -> UserRegs {
    let mut regs = UserRegs { ip: captured.pc, ..UserRegs::default() };
    let values = [captured.sp, captured.fp].into_iter().chain(captured.saved);
    for (place, value) in NATIVE.captured_places.into_iter().zip(values) {
        if let Some(register) = regs.gpr.get_mut(usize::from(place)) {
            *register = value;
            regs.known |= 1 << place;
        }
    }
    regs
}

#[cfg(test)]
mod tests {
    use super::{
        BUDGET, Consumer, Drained, InstanceState, LEAST, MonotonicNs, NamesMemory, OLDEST_NS,
        QUOTA, Quota, ReadRound, RegionId, RegionReader, RegionTypeNames, Request, ShimLimits,
        ShimRegion, TYPES, TYPES_BYTES, UNIT_BYTES, plausible,
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

    #[test]
    fn a_record_that_is_written_while_the_ring_is_read_keeps_its_time() {
        const BEGAN: u64 = 100_000_000_000;
        let clock = || BEGAN + 5_000;
        assert_eq!(plausible(BEGAN + 3_000, BEGAN, clock), BEGAN + 3_000);
        assert_eq!(plausible(BEGAN + 9_000, BEGAN, clock), BEGAN + 5_000, "not yet");
        assert_eq!(plausible(u64::MAX, BEGAN, clock), BEGAN + 5_000);
        assert_eq!(plausible(BEGAN - 3_000, BEGAN, || unreachable!()), BEGAN - 3_000);
        assert_eq!(plausible(0, BEGAN, || unreachable!()), BEGAN - OLDEST_NS);
    }

    fn took(records: u64, bytes: u64) -> Drained {
        Drained { records, units: bytes / UNIT_BYTES, ..Drained::default() }
    }

    #[test]
    fn types_are_bounded_by_their_number_and_by_their_names() {
        let mut types = RegionTypeNames::default();
        assert!((0..TYPES as u64).all(|id| types.take(id, 10)));
        assert!(!types.take(TYPES as u64, 10) && types.take(7, 12));
        let mut types = RegionTypeNames::default();
        let most = TYPES_BYTES / 2048;
        assert!((0..most as u64).all(|id| types.take(id, 2048)));
        assert!(!types.take(most as u64, 1), "no more");
        assert!(
            types.take(0, 10) && types.take(most as u64, 1),
            "what is told anew counts as it is now"
        );
        assert!(!types.take(most as u64, 2048));
    }

    #[test]
    fn full_rings_share_a_round_and_what_one_leaves_goes_to_those_behind_it() {
        let mut turns = ReadRound::new(4);
        let share = turns.share(BUDGET).unwrap();
        assert_eq!((share.records, share.bytes), (BUDGET.records / 4, BUDGET.bytes / 4));
        turns.took(&took(0, 0));
        let share = turns.share(BUDGET).unwrap();
        assert_eq!(share.bytes, BUDGET.bytes / 3);
        turns.took(&took(1, share.bytes / UNIT_BYTES * UNIT_BYTES));
        assert_eq!(turns.share(QUOTA).unwrap().bytes, QUOTA.bytes, "while more can come");
        assert!(!turns.more);
    }

    #[test]
    fn a_round_ends_however_many_regions_there_are() {
        let mut turns = ReadRound::new(100_000);
        let mut bytes = 0;
        while let Some(Quota { bytes: share, .. }) = turns.share(QUOTA) {
            assert_eq!(share, LEAST.bytes, "the longest record fits");
            turns.took(&took(1, share));
            bytes += share;
        }
        assert_eq!(bytes, BUDGET.bytes);
        assert!(turns.more && turns.is_over());
    }
}
