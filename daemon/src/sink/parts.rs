//! A finished window -> parts that are each no longer than a receiver takes, made, handed over and
//! dropped one at a time. Memory is the profile's tables and one part, whatever the profile is like.

use super::deliver::{Figures, Lazy};
use super::spool::Kind;
use super::states::{Ends, Event};
use super::{Finished, Packed, SinkError, unpacking};
use perfusion_pprof::PprofError;
use perfusion_pprof::proto::{Profile, Sample};
use perfusion_pprof::split::{Bounds, Splitter};
use perfusion_pprof::stream;
use prost::Message;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Part of the memory for the tables of profiles that parts are made of, of all sinks together.
const TABLES: u64 = 8;
/// So long a sink waits for room that the tables of others have. A window of which no part was made by
/// then waits in the spool as it is: another sink's disk may not answer.
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

/// Bytes of tables that are in memory now: a sink has its own as long as it makes parts of them, which
/// may be as long as its disk takes.
struct Tables {
    bytes: Mutex<usize>,
    /// There are fewer.
    freed: Condvar,
}

static TABLES_NOW: Tables = Tables { bytes: Mutex::new(0), freed: Condvar::new() };

impl Tables {
    fn bytes(&self) -> MutexGuard<'_, usize> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there are fewer than `taken`; false where that does not come in time.
    fn shrink_below(&self, taken: usize, until: Instant, hurry: &Hurry) -> bool {
        let mut bytes = self.bytes();
        while *bytes >= taken {
            if Instant::now() >= until || hurry.is_over() {
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
    pub fn within(self, bounds: Bounds) -> Bounds {
        Bounds {
            samples: bounds.samples.min(self.samples),
            bytes: bounds.bytes.min(self.part),
            lone_bytes: bounds.lone_bytes.min(self.part),
        }
    }
}

/// Until when parts are made: what is left then waits for the next start. Set once, when the
/// daemon ends. And that parts are made, for whoever looks whether a disk answers.
#[derive(Clone, Debug, Default)]
pub struct Hurry {
    end: Arc<OnceLock<Instant>>,
    step: Arc<Mutex<Option<Instant>>>,
}

impl Hurry {
    /// No sample is put into a part after this. The first call counts.
    pub fn end_by(&self, deadline: Instant) {
        self.end.set(deadline).ok();
    }

    /// True when no more part is to be begun.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.end.get().is_some_and(|deadline| Instant::now() >= *deadline)
    }

    /// A part was put, or its turn to be made has come.
    fn goes_on(&self) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// When it went on last.
    #[must_use]
    pub fn last_step(&self) -> Option<Instant> {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes parts of samples.
pub trait Parts {
    /// A part.
    type Part;

    /// Takes one more sample. Answers the part of those before it when it does not fit into that.
    fn add(&mut self, sample: &Sample) -> Option<Self::Part>;

    /// The last part, and how many samples are in none because each alone is too long.
    fn finish(self) -> (Option<Self::Part>, u64);
}

impl Parts for Splitter<'_> {
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
pub struct Made {
    /// Samples that are in no part because each alone is too long.
    pub dropped_samples: u64,
    /// The first sample that is in no part yet, when time was up.
    pub left_from: Option<u64>,
    /// The first part that could not be handed over.
    pub failed: Option<SinkError>,
}

/// Encodes each part of a window's samples from `first` on, and hands it over: what becomes of one
/// is nothing to the rest. One part of all sinks is made at a time, and no disk is waited for
/// meanwhile.
///
/// # Errors
/// When the profile cannot be read.
pub fn each<P: Parts>(
    finished: &Finished,
    first: u64,
    mut parts: P,
    hurry: &Hurry,
    encode: impl Fn(P::Part) -> Result<Vec<u8>, SinkError>,
    mut put: impl FnMut(Vec<u8>) -> Result<(), SinkError>,
) -> Result<Made, SinkError> {
    let mut made = Made::default();
    let mut hand_over = |part, one: MutexGuard<'static, ()>, failed: &mut Option<SinkError>| {
        let encoded = encode(part);
        drop(one);
        if let Err(error) = encoded.and_then(&mut put) {
            failed.get_or_insert(error);
        }
        hurry.goes_on();
    };
    let turn = || {
        let one = unpacking();
        hurry.goes_on();
        one
    };
    let mut one = Some(turn());
    let mut part_from = first;
    let Made { left_from, failed, .. } = &mut made;
    stream::samples(finished.profile.bytes(), first, |position, sample| {
        // A part that was begun is left with all of its samples: none is made twice.
        if hurry.is_over() {
            *left_from = Some(part_from);
            return Ok::<_, SinkError>(ControlFlow::Break(()));
        }
        if let Some(part) = parts.add(&sample) {
            hand_over(part, one.take().unwrap_or_else(turn), failed);
            // It begins the next part.
            part_from = position;
            one = Some(turn());
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let (last, dropped_samples) = parts.finish();
    if let Some(last) = last.filter(|_| left_from.is_none()) {
        hand_over(last, one.take().unwrap_or_else(turn), failed);
    }
    made.dropped_samples = dropped_samples;
    Ok(made)
}

/// A window of which requests are to be made by the next daemon, as it waits in the spool.
#[derive(Clone, PartialEq, Message)]
struct Unmade {
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

impl Unmade {
    fn of(finished: &Finished, first: u64) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            service: finished.service.to_string(),
            labels: finished.labels.clone(),
            start_nanos: nanos(finished.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()),
            duration_nanos: nanos(finished.duration),
            first,
            profile: finished.profile.bytes().to_vec(),
        }
    }

    fn finished(self) -> Finished {
        Finished {
            service: self.service.into(),
            labels: self.labels,
            start: SystemTime::UNIX_EPOCH + Duration::from_nanos(self.start_nanos),
            duration: Duration::from_nanos(self.duration_nanos),
            profile: Packed::new(self.profile),
        }
    }
}

/// The way of a window into the spool of a receiver that takes requests of limited length.
pub struct Outgoing {
    /// Sends them.
    pub delivery: Lazy,
    /// When it is over windows are kept as they are.
    pub hurry: Hurry,
    /// A window was kept because the tables of others had the room.
    has_no_room: bool,
    memory: MemoryBounds,
    /// Longest request, before compression.
    most_bytes: usize,
    /// What messages call a request.
    what: &'static str,
    requests: u64,
    dropped_samples: u64,
    too_large: u64,
}

impl Outgoing {
    /// For requests of at most so many bytes before compression, each called `what`.
    #[must_use]
    pub fn new(delivery: Lazy, most_bytes: usize, what: &'static str) -> Self {
        Self {
            delivery,
            hurry: Hurry::default(),
            has_no_room: false,
            memory: MemoryBounds::of(DEFAULT_MEMORY),
            most_bytes,
            what,
            requests: 0,
            dropped_samples: 0,
            too_large: 0,
        }
    }

    /// So much memory is there for all of the program.
    pub fn within(&mut self, memory: u64) {
        self.memory = MemoryBounds::of(memory);
    }

    /// Bounds of new requests.
    #[must_use]
    pub fn bounds(&self, most_samples: usize) -> Bounds {
        let bounds = self.delivery.bounds(self.most_bytes);
        self.memory.within(Bounds { samples: bounds.samples.min(most_samples), ..bounds })
    }

    /// The tables of a window's profile; none where there is no time or no room for it, and it waits in
    /// the spool, or where they are too large, which is said and counted.
    ///
    /// # Errors
    /// When the profile cannot be read, or the spool does not take the window.
    pub fn tables(
        &mut self,
        finished: &Finished,
        first: u64,
        at: SystemTime,
    ) -> Result<Option<WindowTables>, SinkError> {
        let until = Instant::now() + ROOM_WAIT;
        loop {
            // Others may have had the turn for long.
            let one = (!self.hurry.is_over()).then(unpacking);
            let Some(one) = one.filter(|_| !self.hurry.is_over()) else {
                return self.keep(finished, first, at).map(|()| None);
            };
            self.hurry.goes_on();
            let taken = *TABLES_NOW.bytes();
            let tables = stream::tables(finished.profile.bytes(), self.memory.tables.saturating_sub(taken));
            let tables = tables.map(|(profile, bytes)| WindowTables::new(profile, bytes));
            drop(one);
            match tables {
                Ok(tables) => return Ok(Some(tables)),
                Err(PprofError::LargeTables(_)) if taken > 0 => {
                    if !TABLES_NOW.shrink_below(taken, until, &self.hurry) {
                        self.has_no_room = true;
                        return self.keep(finished, first, at).map(|()| None);
                    }
                }
                Err(error @ PprofError::LargeTables(_)) => {
                    self.too_large += 1;
                    self.delivery.event(Event {
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
    pub fn put<P: Parts>(
        &mut self,
        finished: &Finished,
        first: u64,
        at: SystemTime,
        (parts, bounds): (P, Bounds),
        encode: impl Fn(P::Part) -> Result<Vec<u8>, SinkError>,
    ) -> Result<(), SinkError> {
        let Self { delivery, requests, hurry, .. } = self;
        let made = each(finished, first, parts, hurry, encode, |request| {
            *requests += 1;
            Ok(delivery.put(at, Kind::Request, &finished.service, &request)?)
        })?;
        if made.dropped_samples > 0 {
            self.dropped_samples += made.dropped_samples;
            let reason = format!("stacks are longer than a {} may be, {} bytes", self.what, bounds.lone_bytes);
            self.delivery.event(Event {
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
    fn keep(&mut self, finished: &Finished, first: u64, at: SystemTime) -> Result<(), SinkError> {
        self.requests += 1;
        let unmade = Unmade::of(finished, first).encode_to_vec();
        Ok(self.delivery.put(at, Kind::Window, &finished.service, &unmade)?)
    }

    /// Begins with what an earlier daemon left; `make` makes requests of a window's samples from one
    /// on.
    pub fn take_up(&mut self, mut make: impl FnMut(&mut Self, &Finished, u64) -> Result<(), SinkError>) {
        self.delivery.take_up();
        self.has_no_room = false;
        while !self.hurry.is_over()
            && !self.has_no_room
            && let Some(taken) = self.delivery.window()
        {
            let made = match Unmade::decode(taken.payload.as_slice()) {
                Ok(unmade) => {
                    let first = unmade.first;
                    make(self, &unmade.finished(), first)
                }
                Err(error) => Err(PprofError::from(error).into()),
            };
            if let Err(error) = made {
                tracing::warn!(%error, "a window that an earlier daemon left is not sent whole");
            }
            self.delivery.done(taken.item);
        }
    }

    /// What was counted, by the names of metrics.
    #[must_use]
    pub fn counters(&self) -> (Vec<(&'static str, u64)>, Figures) {
        let figures = self.delivery.figures();
        let mut counters = figures.counters(self.requests).to_vec();
        counters.push(("samples_too_long", self.dropped_samples));
        counters.push(("profiles_too_large", self.too_large));
        (counters, figures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sink::deliver::{Remote, Verdict};
    use crate::sink::spool::Limits;

    struct Takes;

    impl Remote for Takes {
        fn send(&mut self, _: &[u8], _: &dyn Fn() -> Instant) -> Verdict {
            Verdict::Accepted { rejected: 0, remark: None }
        }
    }

    /// Finds each sample too long.
    struct NoneFits;

    impl Parts for NoneFits {
        type Part = Profile;

        fn add(&mut self, _: &Sample) -> Option<Profile> {
            None
        }

        fn finish(self) -> (Option<Profile>, u64) {
            (None, 3)
        }
    }

    #[test]
    fn the_bound_that_is_said_is_the_one_that_stacks_were_measured_by() {
        let folder = tempfile::tempdir().unwrap();
        let limits = Limits { bytes: 1 << 20, age: Duration::from_secs(3600), free_bytes: 0 };
        let delivery = Lazy::new("test", folder.path().join("s"), limits, Duration::from_secs(1), Takes);
        let mut outgoing = Outgoing::new(delivery, 4 << 20, "request");
        // As after a refusal of 16,000 bytes. What is taken meanwhile may have it forgotten.
        let bounds = Bounds { samples: 10, bytes: 8000, lone_bytes: 64_000 };
        let finished = finished(&Profile::default());
        let now = SystemTime::now();
        outgoing.put(&finished, 0, now, (NoneFits, bounds), |_| Ok(Vec::new())).unwrap();
        let said = outgoing.delivery.reasons();
        assert_eq!(said, ["stacks are longer than a request may be, 64000 bytes"]);
    }

    fn finished(profile: &Profile) -> Finished {
        Finished {
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
        let limits = Limits { bytes: 1 << 20, age: Duration::from_secs(3600), free_bytes: 0 };
        let delivery = Lazy::new("test", folder.path().join("s"), limits, Duration::from_secs(1), Takes);
        let mut outgoing = Outgoing::new(delivery, 1 << 20, "request");
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
        assert_eq!((outgoing.delivery.backlog().requests, outgoing.too_large), (1, 0));
        drop(other);

        // What waits is made when there is room.
        outgoing.hurry = Hurry::default();
        let mut made = 0;
        outgoing.take_up(|outgoing, finished, first| {
            made += u32::from(outgoing.tables(finished, first, now)?.is_some());
            Ok(())
        });
        assert_eq!((made, outgoing.delivery.backlog().requests), (1, 0));
    }
}
