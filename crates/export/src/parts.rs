//! A finished window -> parts that are each no longer than a receiver takes, made, handed over and
//! dropped one at a time. Memory is the profile's tables and one part, whatever the profile is
//! like.

use super::deliver::{DeliveryCounters, LazyDelivery, SpoolBacklog};
use super::failure_states::{DeliveryEvent, Ends};
use super::spool::ItemKind;
use super::{EncodePermit, FinishedProfile, Packed, SinkError};
use perfusion_pprof::PprofError;
use perfusion_pprof::proto::{Profile, Sample};
use perfusion_pprof::split::{PartBounds, Splitter};
use perfusion_pprof::stream;
use prost::Message;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Part of the memory for the tables of profiles that parts are made of, of all sinks together.
const TABLES: u64 = 8;
/// So long a sink waits for room that the tables of others have. A window of which no part was made
/// by then waits in the spool as it is: another sink's disk may not answer.
const ROOM_WAIT: Duration = Duration::from_secs(10);
/// So often it looks whether the daemon ends meanwhile.
const ROOM_LOOK: Duration = Duration::from_millis(100);
/// Part of the memory for one part before compression. It is there twice while it is encoded, and
/// in the form it is made in, too.
const PART: u64 = 32;
/// Samples of a part take about so much memory each, with those that differ by type only.
const SAMPLE_BYTES: u64 = 512;

/// Where nobody says how much memory there is: as much as the configuration has unless told
/// otherwise.
const DEFAULT_MEMORY: u64 = 256 << 20;

/// Bytes of tables that are in memory now: a sink has its own as long as it makes parts of them,
/// which may be as long as its disk takes.
struct ProfileTableMemory {
    bytes: Mutex<usize>,
    /// There are fewer.
    freed: Condvar,
}

static TABLES_NOW: ProfileTableMemory =
    ProfileTableMemory { bytes: Mutex::new(0), freed: Condvar::new() };

impl ProfileTableMemory {
    fn bytes(&self) -> MutexGuard<'_, usize> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there are fewer than `taken`; false where that does not come in time. `still` is
    /// asked now and then whether to wait on.
    fn shrink_below(&self, taken: usize, until: Instant, still: impl Fn() -> bool) -> bool {
        let mut bytes = self.bytes();
        while *bytes >= taken {
            if Instant::now() >= until || !still() {
                return false;
            }
            let waited = self.freed.wait_timeout(bytes, ROOM_LOOK);
            bytes = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// The tables of a window's profile, which count as long as they are there.
pub struct WindowTables {
    profile: Profile,
    bytes: usize,
}

impl WindowTables {
    fn new(profile: Profile, bytes: usize) -> Self {
        *TABLES_NOW.bytes() += bytes;
        Self { profile, bytes }
    }
}

impl Drop for WindowTables {
    fn drop(&mut self) {
        // Memory first.
        self.profile = Profile::default();
        let mut bytes = TABLES_NOW.bytes();
        *bytes = bytes.saturating_sub(self.bytes);
        drop(bytes);
        TABLES_NOW.freed.notify_all();
    }
}

impl std::ops::Deref for WindowTables {
    type Target = Profile;

    fn deref(&self) -> &Profile {
        &self.profile
    }
}

/// What making parts may take.
#[derive(Clone, Copy, Debug)]
pub struct MemoryBounds {
    /// Tables of profiles, bytes of memory, of all sinks together.
    pub tables: usize,
    /// A part before compression, bytes.
    pub part: usize,
    /// Samples in a part.
    pub samples: usize,
}

impl MemoryBounds {
    /// Of so many bytes of memory for all of the program.
    #[must_use]
    pub fn of(memory: u64) -> Self {
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        Self {
            tables: bytes(memory / TABLES),
            part: bytes((memory / PART).max(64 << 10)),
            samples: bytes((memory / PART / SAMPLE_BYTES).max(1024)),
        }
    }

    /// The bounds of parts for a receiver that takes so much.
    #[must_use]
    pub fn within(self, bounds: PartBounds) -> PartBounds {
        PartBounds {
            samples: bounds.samples.min(self.samples),
            bytes: bounds.bytes.min(self.part),
            lone_bytes: bounds.lone_bytes.min(self.part),
        }
    }
}

/// What the two sides of a sink tell each other while it makes parts. Whoever has it says until
/// when parts are made, set once, when the daemon ends; and that the next window waits. What is
/// left then waits in the spool. The sink says that it goes on, for whoever looks whether a disk
/// answers, and what it has counted so far.
#[derive(Clone, Debug, Default)]
pub struct SinkSignals {
    end: Arc<OnceLock<Instant>>,
    latest_end: Arc<OnceLock<Instant>>,
    waits: Arc<AtomicBool>,
    steps: Arc<Mutex<SinkProgress>>,
}

/// How far a sink is.
#[derive(Debug, Default)]
struct SinkProgress {
    /// When it began with the present window.
    began: Option<Instant>,
    /// When it went on last.
    last: Option<Instant>,
    /// When it is to say again what it has counted.
    report_at: Option<Instant>,
    report: SinkReport,
}

/// What a sink has counted so far, and what waits to be sent.
#[derive(Clone, Debug, Default)]
pub struct SinkReport {
    /// By the names of metrics.
    pub counters: Vec<(&'static str, u64)>,
    /// What waits.
    pub backlog: Option<SpoolBacklog>,
}

/// A sink says what it has counted so often, while it is at work on a window.
const REPORT_EVERY: Duration = Duration::from_millis(500);

impl SinkSignals {
    /// No sample is put into a part after this. The first call counts.
    pub fn end_by(&self, deadline: Instant) {
        self.end.set(deadline).ok();
    }

    /// The same, said before it is known when the last window comes: whichever is sooner counts.
    pub fn end_at_the_latest(&self, deadline: Instant) {
        self.latest_end.set(deadline).ok();
    }

    /// True when no more part is to be begun.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let ends = [self.end.get(), self.latest_end.get()];
        ends.into_iter().flatten().min().is_some_and(|deadline| Instant::now() >= *deadline)
    }

    /// Set while a window waits for the sink in memory.
    #[must_use]
    pub fn waits(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.waits)
    }

    /// True when what parts are not made of yet is to be put into the spool as it is.
    #[must_use]
    pub fn gives_way(&self) -> bool {
        // Pairs with the stores of whoever was given `waits`. It is a hint: nothing else is read by
        // it.
        self.is_over() || self.waits.load(Ordering::Relaxed)
    }

    fn steps(&self) -> MutexGuard<'_, SinkProgress> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Work on a window begins that waited in the spool.
    fn begins(&self) {
        let now = Some(Instant::now());
        let mut steps = self.steps();
        (steps.began, steps.last) = (now, now);
    }

    /// A part was put, or its turn to be made has come.
    fn goes_on(&self) {
        self.steps().last = Some(Instant::now());
    }

    /// When work on a window began that waited in the spool.
    #[must_use]
    pub fn began(&self) -> Option<Instant> {
        self.steps().began
    }

    /// When it went on last.
    #[must_use]
    pub fn last_step(&self) -> Option<Instant> {
        self.steps().last
    }

    /// Takes what was counted, now and then; none where that is not to be had at once.
    pub fn report(&self, read: impl FnOnce() -> Option<SinkReport>) {
        let (mut steps, now) = (self.steps(), Instant::now());
        if steps.report_at.is_none_or(|at| now >= at)
            && let Some(report) = read()
        {
            (steps.report, steps.report_at) = (report, Some(now + REPORT_EVERY));
        }
    }

    /// What was counted by the last report.
    #[must_use]
    pub fn reported(&self) -> SinkReport {
        self.steps().report.clone()
    }

    /// All that was reported is known by now.
    pub fn is_reported(&self) {
        self.steps().report = SinkReport::default();
    }
}

/// Makes parts of samples.
pub trait PartBuilder {
    /// A part.
    type Part;

    /// Takes one more sample. Answers the part of those before it when it does not fit into that.
    fn add(&mut self, sample: &Sample) -> Option<Self::Part>;

    /// The last part, and how many samples are in none because each alone is too long.
    fn finish(self) -> (Option<Self::Part>, u64);
}

impl PartBuilder for Splitter<'_> {
    type Part = Profile;

    fn add(&mut self, sample: &Sample) -> Option<Profile> {
        Splitter::add(self, sample)
    }

    fn finish(self) -> (Option<Profile>, u64) {
        Splitter::finish(self)
    }
}

/// What became of a window.
#[derive(Debug, Default)]
pub struct PartsOutcome {
    /// Samples that are in no part because each alone is too long.
    pub dropped_samples: u64,
    /// The first sample that is in no part yet, when time was up.
    pub left_from: Option<u64>,
    /// The first part that could not be handed over.
    pub failed: Option<SinkError>,
}

/// Where parts go.
pub trait PartSink {
    /// Takes one.
    ///
    /// # Errors
    /// When it is lost.
    fn put(&mut self, part: Vec<u8>) -> Result<(), SinkError>;

    /// A moment while the turn is waited for. It must not wait for anything.
    fn waits(&mut self);
}

/// Encodes each part of a window's samples from `first` on, and hands it over: what becomes of one
/// is nothing to the rest. One part of all sinks is made at a time, and no disk is waited for
/// meanwhile. Between two parts it gives way to the window that waits.
///
/// # Errors
/// When the profile cannot be read.
pub fn each<P: PartBuilder>(
    finished: &FinishedProfile,
    first: u64,
    mut parts: P,
    hurry: &SinkSignals,
    encode: impl Fn(P::Part) -> Result<Vec<u8>, SinkError>,
    way: &mut impl PartSink,
) -> Result<PartsOutcome, SinkError> {
    let mut made = PartsOutcome::default();
    let mut one = turn(hurry, || way.waits());
    if one.is_none() {
        made.left_from = Some(first);
        return Ok(made);
    }
    // The turn is over when the part is made.
    let encode = |part, one: &mut Option<EncodePermit>| {
        let encoded = encode(part);
        *one = None;
        encoded
    };
    let mut part_from = first;
    let PartsOutcome { left_from, failed, .. } = &mut made;
    stream::samples(finished.profile.bytes(), first, |position, sample| {
        // A part that was begun is left with all of its samples: none is made twice.
        if hurry.is_over() {
            *left_from = Some(part_from);
            return Ok::<_, SinkError>(ControlFlow::Break(()));
        }
        if let Some(part) = parts.add(&sample) {
            if let Err(error) = encode(part, &mut one).and_then(|part| way.put(part)) {
                failed.get_or_insert(error);
            }
            hurry.goes_on();
            way.waits();
            // It begins the next part.
            part_from = position;
            one = turn(hurry, || way.waits());
            if one.is_none() {
                *left_from = Some(part_from);
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let (last, dropped_samples) = parts.finish();
    if let Some(last) = last.filter(|_| left_from.is_none()) {
        if let Err(error) = encode(last, &mut one).and_then(|part| way.put(part)) {
            failed.get_or_insert(error);
        }
        hurry.goes_on();
    }
    made.dropped_samples = dropped_samples;
    Ok(made)
}

/// The turn to make a part; none where the sink is to give way.
fn turn(hurry: &SinkSignals, mut wait: impl FnMut()) -> Option<EncodePermit> {
    if hurry.gives_way() {
        return None;
    }
    let one = EncodePermit::wait(|| {
        hurry.goes_on();
        wait();
        !hurry.gives_way()
    });
    hurry.goes_on();
    one
}

/// A window of which requests are to be made later, or by the next daemon, as it waits in the
/// spool.
#[derive(Clone, PartialEq, Message)]
struct UnsplitWindow {
    #[prost(string, tag = "1")]
    service: String,
    #[prost(btree_map = "string, string", tag = "2")]
    labels: BTreeMap<String, String>,
    /// Since the epoch.
    #[prost(uint64, tag = "3")]
    start_nanos: u64,
    #[prost(uint64, tag = "4")]
    duration_nanos: u64,
    /// Samples that are in requests already.
    #[prost(uint64, tag = "5")]
    first: u64,
    #[prost(bytes = "vec", tag = "6")]
    profile: Vec<u8>,
}

impl UnsplitWindow {
    fn of(finished: &FinishedProfile, first: u64) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            service: finished.service.to_string(),
            labels: finished.labels.clone(),
            start_nanos: nanos(
                finished.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
            ),
            duration_nanos: nanos(finished.duration),
            first,
            profile: finished.profile.bytes().to_vec(),
        }
    }

    fn finished(self) -> FinishedProfile {
        FinishedProfile {
            service: self.service.into(),
            labels: self.labels,
            start: SystemTime::UNIX_EPOCH + Duration::from_nanos(self.start_nanos),
            duration: Duration::from_nanos(self.duration_nanos),
            profile: Packed::new(self.profile),
        }
    }
}

/// The way of a window into the spool of a receiver that takes requests of limited length.
pub struct RequestSpooler {
    /// Sends them.
    pub delivery: LazyDelivery,
    /// When it is over windows are kept as they are.
    pub hurry: SinkSignals,
    /// A window was kept because the tables of others had the room.
    has_no_room: bool,
    /// Requests are made of a window that waits in the spool.
    is_taking_up: bool,
    /// Of that none was made: it waits as it did.
    stays: bool,
    memory: MemoryBounds,
    /// Longest request, before compression.
    most_bytes: usize,
    /// What messages call a request.
    what: &'static str,
    counts: SpoolerCounts,
}

#[derive(Clone, Copy, Debug, Default)]
struct SpoolerCounts {
    requests: u64,
    dropped_samples: u64,
    too_large: u64,
}

impl SpoolerCounts {
    /// With those of the delivery, by the names of metrics.
    fn with(self, figures: &DeliveryCounters) -> Vec<(&'static str, u64)> {
        let mut counters = figures.counters(self.requests).to_vec();
        counters.push(("samples_too_long", self.dropped_samples));
        counters.push(("profiles_too_large", self.too_large));
        counters
    }
}

fn report(hurry: &SinkSignals, delivery: &LazyDelivery, counts: SpoolerCounts) {
    hurry.report(|| {
        let (figures, backlog) = delivery.glance()?;
        Some(SinkReport { counters: counts.with(&figures), backlog: Some(backlog) })
    });
}

/// The way of one window's requests into the spool.
struct WindowSpooler<'a> {
    delivery: &'a mut LazyDelivery,
    counts: &'a mut SpoolerCounts,
    hurry: &'a SinkSignals,
    service: &'a str,
    at: SystemTime,
}

impl PartSink for WindowSpooler<'_> {
    fn put(&mut self, part: Vec<u8>) -> Result<(), SinkError> {
        self.counts.requests += 1;
        Ok(self.delivery.put(self.at, ItemKind::Request, self.service, &part)?)
    }

    fn waits(&mut self) {
        report(self.hurry, self.delivery, *self.counts);
    }
}

impl RequestSpooler {
    /// For requests of at most so many bytes before compression, each called `what`.
    #[must_use]
    pub fn new(delivery: LazyDelivery, most_bytes: usize, what: &'static str) -> Self {
        Self {
            delivery,
            hurry: SinkSignals::default(),
            has_no_room: false,
            is_taking_up: false,
            stays: false,
            memory: MemoryBounds::of(DEFAULT_MEMORY),
            most_bytes,
            what,
            counts: SpoolerCounts::default(),
        }
    }

    /// So much memory is there for all of the program.
    pub fn within(&mut self, memory: u64) {
        self.memory = MemoryBounds::of(memory);
    }

    /// Bounds of new requests.
    #[must_use]
    pub fn bounds(&self, most_samples: usize) -> PartBounds {
        let bounds = self.delivery.bounds(self.most_bytes);
        self.memory.within(PartBounds { samples: bounds.samples.min(most_samples), ..bounds })
    }

    /// A window begins that comes from a recording.
    pub fn begin(&mut self) {
        // It is still set where making requests has panicked.
        self.is_taking_up = false;
    }

    /// A window waits in the spool because the tables of others had the room.
    #[must_use]
    pub fn is_short_of_memory(&self) -> bool {
        self.has_no_room
    }

    /// The tables of a window's profile; none where there is no time or no room for it, another
    /// window waits for the sink, or an earlier one in the spool, and it waits there as well; or
    /// where they are too large, which is said and counted.
    ///
    /// # Errors
    /// When the profile cannot be read, or the spool does not take the window.
    pub fn tables(
        &mut self,
        finished: &FinishedProfile,
        first: u64,
        at: SystemTime,
    ) -> Result<Option<WindowTables>, SinkError> {
        let until = Instant::now() + ROOM_WAIT;
        // Those in the spool are older.
        if !self.is_taking_up && self.delivery.has_windows() {
            return self.keep(finished, first, at).map(|()| None);
        }
        loop {
            let Some(one) = turn(&self.hurry, || self.report()) else {
                if self.is_taking_up {
                    self.stays = true;
                    return Ok(None);
                }
                return self.keep(finished, first, at).map(|()| None);
            };
            let taken = *TABLES_NOW.bytes();
            let tables =
                stream::tables(finished.profile.bytes(), self.memory.tables.saturating_sub(taken));
            let tables = tables.map(|(profile, bytes)| WindowTables::new(profile, bytes));
            drop(one);
            match tables {
                Ok(tables) => return Ok(Some(tables)),
                Err(PprofError::LargeTables(_)) if taken > 0 => {
                    let still = || {
                        self.report();
                        self.hurry.goes_on();
                        !self.hurry.gives_way()
                    };
                    if !TABLES_NOW.shrink_below(taken, until, still) {
                        self.has_no_room = true;
                        return self.keep(finished, first, at).map(|()| None);
                    }
                }
                Err(error @ PprofError::LargeTables(_)) => {
                    self.counts.too_large += 1;
                    self.delivery.event(DeliveryEvent {
                        service: &finished.service,
                        reason: &error.to_string(),
                        detail: "",
                        then: "the window is not sent (limits.memory)",
                        count: 1,
                        unit: "profiles",
                        ends: Ends::WhenQuiet,
                    });
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Puts a window's samples from `first` on into the spool, part by part. The bounds are those
    /// that the parts are made within: they may be others by the end.
    ///
    /// # Errors
    /// The first there was: what becomes of one part is nothing to the rest.
    pub fn put<P: PartBuilder>(
        &mut self,
        finished: &FinishedProfile,
        first: u64,
        at: SystemTime,
        (parts, bounds): (P, PartBounds),
        encode: impl Fn(P::Part) -> Result<Vec<u8>, SinkError>,
    ) -> Result<(), SinkError> {
        let Self { delivery, counts, hurry, .. } = self;
        let mut way = WindowSpooler { delivery, counts, hurry, service: &finished.service, at };
        let made = each(finished, first, parts, hurry, encode, &mut way)?;
        if made.dropped_samples > 0 {
            self.counts.dropped_samples += made.dropped_samples;
            let reason = format!(
                "stacks are longer than a {} may be, {} bytes",
                self.what, bounds.lone_bytes
            );
            self.delivery.event(DeliveryEvent {
                service: &finished.service,
                reason: &reason,
                detail: "",
                then: "they are left out",
                count: made.dropped_samples,
                unit: "stacks",
                ends: Ends::WhenQuiet,
            });
        }
        let kept = match made.left_from {
            Some(first) => self.keep(finished, first, at),
            None => Ok(()),
        };
        made.failed.map_or(kept, Err)
    }

    /// Keeps a window as it is, for another time or the next daemon.
    fn keep(
        &mut self,
        finished: &FinishedProfile,
        first: u64,
        at: SystemTime,
    ) -> Result<(), SinkError> {
        self.counts.requests += 1;
        self.report();
        let unmade = UnsplitWindow::of(finished, first).encode_to_vec();
        Ok(self.delivery.put(at, ItemKind::Window, &finished.service, &unmade)?)
    }

    /// What was counted so far, for whoever asks meanwhile.
    fn report(&self) {
        report(&self.hurry, &self.delivery, self.counts);
    }

    /// Goes on with windows that wait in the spool, those of an earlier daemon, too, until another
    /// one waits for the sink; `make` makes requests of a window's samples from one on.
    pub fn take_up(
        &mut self,
        mut make: impl FnMut(&mut Self, &FinishedProfile, u64) -> Result<(), SinkError>,
    ) {
        self.delivery.take_up();
        self.has_no_room = false;
        self.is_taking_up = true;
        while !self.hurry.gives_way()
            && !self.has_no_room
            && let Some(taken) = self.delivery.window()
        {
            self.hurry.begins();
            self.report();
            self.stays = false;
            let made = match UnsplitWindow::decode(taken.payload.as_slice()) {
                Ok(unmade) => {
                    let first = unmade.first;
                    make(self, &unmade.finished(), first)
                }
                Err(error) => Err(PprofError::from(error).into()),
            };
            if let Err(error) = made {
                tracing::warn!(%error, "a window that waited in the spool is not sent whole");
            }
            if !self.stays {
                self.delivery.done(taken.item);
            }
        }
        self.is_taking_up = false;
    }

    /// What was counted, by the names of metrics.
    #[must_use]
    pub fn counters(&self) -> (Vec<(&'static str, u64)>, DeliveryCounters) {
        let figures = self.delivery.figures();
        (self.counts.with(&figures), figures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deliver::{Remote, SendOutcome};
    use crate::spool::SpoolLimits;

    struct Takes;

    impl Remote for Takes {
        fn send(&mut self, _: &[u8], _: &dyn Fn() -> Instant) -> SendOutcome {
            SendOutcome::Accepted { rejected: 0, remark: None }
        }
    }

    /// Finds each sample too long.
    struct NoneFits;

    impl PartBuilder for NoneFits {
        type Part = Profile;

        fn add(&mut self, _: &Sample) -> Option<Profile> {
            None
        }

        fn finish(self) -> (Option<Profile>, u64) {
            (None, 3)
        }
    }

    /// A window of samples 1, 2, … that are each a part of their own.
    fn window(samples: i64) -> FinishedProfile {
        let sample = |value| Sample { value: vec![value], ..Sample::default() };
        finished(&Profile { sample: (1..=samples).map(sample).collect(), ..Profile::default() })
    }

    /// Each sample's value is a part. A window waits for the sink from that one on.
    struct Each(Option<i64>, i64, SinkSignals);

    impl PartBuilder for Each {
        type Part = i64;

        fn add(&mut self, sample: &Sample) -> Option<i64> {
            if self.1 == sample.value[0] {
                self.2.waits().store(true, Ordering::Relaxed);
            }
            self.0.replace(sample.value[0])
        }

        fn finish(self) -> (Option<i64>, u64) {
            (self.0, 0)
        }
    }

    /// Requests of at most so many bytes for a receiver that takes all, with a spool in `folder`.
    fn spooler(folder: &tempfile::TempDir, most_bytes: usize) -> RequestSpooler {
        let limits = SpoolLimits { bytes: 1 << 20, age: Duration::from_secs(3600), free_bytes: 0 };
        let directory = folder.path().join("s");
        let delivery = LazyDelivery::new("test", directory, limits, Duration::from_secs(1), Takes);
        RequestSpooler::new(delivery, most_bytes, "request")
    }

    #[test]
    fn a_window_that_waits_has_the_one_before_it_go_on_from_the_spool() {
        let folder = tempfile::tempdir().unwrap();
        let mut outgoing = spooler(&folder, 1 << 20);
        let (hurry, now, made) =
            (outgoing.hurry.clone(), SystemTime::now(), Mutex::new(Vec::new()));
        let waits = |waits| hurry.waits().store(waits, Ordering::Relaxed);
        let make =
            |outgoing: &mut RequestSpooler, finished: &FinishedProfile, first, waits_from| {
                let Some(_tables) = outgoing.tables(finished, first, now)? else { return Ok(()) };
                let each = Each(None, waits_from, hurry.clone());
                let bounds = PartBounds { samples: 1, bytes: 1, lone_bytes: 1 };
                outgoing.put(finished, first, now, (each, bounds), |part| {
                    made.lock().unwrap().push(part);
                    Ok(vec![1])
                })
            };
        let taken = || std::mem::take(&mut *made.lock().unwrap());
        let kinds = |outgoing: &RequestSpooler| {
            // Requests are sent meanwhile.
            outgoing.delivery.has_windows().then_some(outgoing.counts.requests)
        };

        outgoing.begin();
        make(&mut outgoing, &window(4), 0, 3).unwrap();
        assert_eq!(
            (taken(), kinds(&outgoing)),
            (vec![1, 2], Some(3)),
            "two, and the rest as it is"
        );
        make(&mut outgoing, &window(1), 0, 0).unwrap();
        waits(false);
        make(&mut outgoing, &window(2), 0, 0).unwrap();
        assert_eq!((taken(), kinds(&outgoing)), (vec![], Some(5)), "it is behind the other two");
        // None is made again, and what was not begun waits as it did.
        outgoing.take_up(|outgoing, finished, first| make(outgoing, finished, first, 4));
        assert_eq!((taken(), kinds(&outgoing)), (vec![3], Some(7)));
        outgoing.take_up(|outgoing, finished, first| make(outgoing, finished, first, 0));
        assert_eq!((taken(), kinds(&outgoing)), (vec![], Some(7)), "it gives way");
        waits(false);
        outgoing.take_up(|outgoing, finished, first| make(outgoing, finished, first, 0));
        assert_eq!((taken(), kinds(&outgoing)), (vec![1, 1, 2, 4], None));
        outgoing.delivery.close(Instant::now() + Duration::from_secs(60));
        let figures = outgoing.delivery.figures();
        // Requests, and windows that waited: each has its end.
        assert_eq!((figures.sent, figures.split, outgoing.delivery.backlog().requests), (7, 4, 0));
    }

    /// Refuses every second part.
    struct Refuses(Vec<Vec<u8>>);

    impl PartSink for Refuses {
        fn put(&mut self, part: Vec<u8>) -> Result<(), SinkError> {
            let is_refused = self.0.len() % 2 == 1;
            let reason = format!("{part:?}");
            self.0.push(part);
            if is_refused { Err(SinkError::Refused { reason }) } else { Ok(()) }
        }

        fn waits(&mut self) {}
    }

    #[test]
    fn a_part_that_finds_no_room_costs_neither_the_rest_nor_its_own_error() {
        let (hurry, mut way) = (SinkSignals::default(), Refuses(Vec::new()));
        let encode = |part: i64| Ok(vec![u8::try_from(part).unwrap()]);
        let parts = Each(None, 0, hurry.clone());
        let made = each(&window(5), 0, parts, &hurry, encode, &mut way).unwrap();
        assert_eq!(way.0, [[1], [2], [3], [4], [5]]);
        assert_eq!((made.failed.unwrap().to_string().as_str(), made.left_from), ("[2]", None));
    }

    #[test]
    fn what_a_sink_counts_is_told_while_it_waits_for_its_turn() {
        let folder = tempfile::tempdir().unwrap();
        let mut outgoing = spooler(&folder, 1 << 20);
        outgoing.delivery.put(SystemTime::now(), ItemKind::Request, "web", b"one").unwrap();
        outgoing.counts.requests = 1;
        let hurry = outgoing.hurry.clone();
        let one = EncodePermit::next();
        std::thread::scope(|scope| {
            let waits = scope
                .spawn(|| outgoing.tables(&window(1), 0, SystemTime::now()).unwrap().is_some());
            let deadline = Instant::now() + Duration::from_secs(60);
            while !hurry.reported().counters.contains(&("requests_made", 1)) {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
            assert!(hurry.reported().backlog.is_some() && hurry.last_step().is_some());
            drop(one);
            assert!(waits.join().unwrap());
        });
    }

    #[test]
    fn the_bound_that_is_said_is_the_one_that_stacks_were_measured_by() {
        let folder = tempfile::tempdir().unwrap();
        let mut outgoing = spooler(&folder, 4 << 20);
        // As after a refusal of 16,000 bytes. What is taken meanwhile may have it forgotten.
        let bounds = PartBounds { samples: 10, bytes: 8000, lone_bytes: 64_000 };
        let finished = finished(&Profile::default());
        let now = SystemTime::now();
        outgoing.put(&finished, 0, now, (NoneFits, bounds), |_| Ok(Vec::new())).unwrap();
        let said = outgoing.delivery.reasons();
        assert_eq!(said, ["stacks are longer than a request may be, 64000 bytes"]);
    }

    fn finished(profile: &Profile) -> FinishedProfile {
        FinishedProfile {
            service: "web".into(),
            labels: BTreeMap::new(),
            start: SystemTime::now(),
            duration: Duration::from_secs(1),
            profile: profile.clone().into(),
        }
    }

    #[test]
    fn tables_of_all_sinks_share_their_room_and_what_finds_none_waits_in_the_spool() {
        let folder = tempfile::tempdir().unwrap();
        let mut outgoing = spooler(&folder, 1 << 20);
        outgoing.within(8 << 20);
        let room = outgoing.memory.tables;
        let string_table = vec![String::new(), "x".repeat(1000)];
        let finished = finished(&Profile { string_table, ..Profile::default() });
        let now = SystemTime::now();

        // The other sink lets go meanwhile.
        let other = WindowTables::new(Profile::default(), room - 500);
        let (tables, mut outgoing) = std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let tables = outgoing.tables(&finished, 0, now).unwrap();
                (tables, outgoing)
            });
            drop(other);
            waits.join().unwrap()
        });
        assert_eq!(tables.map(|tables| tables.string_table[1].len()), Some(1000));

        // It does not, until there is no more time.
        let other = WindowTables::new(Profile::default(), room - 500);
        outgoing.hurry.end_by(Instant::now() + Duration::from_millis(50));
        assert!(outgoing.tables(&finished, 0, now).unwrap().is_none());
        assert_eq!((outgoing.delivery.backlog().requests, outgoing.counts.too_large), (1, 0));
        drop(other);

        // What waits is made when there is room.
        outgoing.hurry = SinkSignals::default();
        let mut made = 0;
        outgoing.take_up(|outgoing, finished, first| {
            made += u32::from(outgoing.tables(finished, first, now)?.is_some());
            Ok(())
        });
        assert_eq!((made, outgoing.delivery.backlog().requests), (1, 0));
    }
}
