//! The daemon's side. The peer is taken to be hostile: positions are private, each shared word is
//! read once, data is copied and only the copy is checked, every lie is an error. A drain costs one
//! read of the header, then two to four reads per chunk.

mod error;

pub use error::ConsumerError;

use crate::layout::{
    COMMIT_OFFSET_AT, COUNTER_WORDS, COUNTERS_AT, CREATED_AT, DATA_OFFSET_AT, EVENT_HEAD_AT,
    EVENT_TAIL_AT, FEATURES_AT, Geometry, HEADER_BYTES, HEADER_USED_BYTES, INSTANCE_AT,
    InstanceState, LISTENER_AT, MAGIC, MAGIC_AT, MAX_RECORD_UNITS, OWNER_AT, PID_AT,
    REGION_BYTES_AT, REQUEST_BYTES, REQUEST_HEAD_AT, REQUEST_OFFSET_AT, REQUEST_SLOTS_AT,
    REQUEST_TAIL_AT, RUNTIME_AT, SLOTS_AT, STATE_AT, UNIT_BYTES, UNITS_AT, VERSION, VERSION_AT,
};
use crate::position::{Commit, index, read_commit};
use crate::producer::InstanceIdentity;
use crate::record::{Record, RecordBody, RecordError, decode};
use crate::request::Request;

/// Memory at offsets, copied. Every call that returns `Ok` has filled or written all of the bytes.
pub trait RegionMemory {
    /// Why it failed (truncated, closed, …).
    type Error;

    /// Copies the bytes at `offset` out.
    ///
    /// # Errors
    /// Some byte could not be read.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Self::Error>;

    /// Copies the bytes in at `offset`. Words that are aligned are written whole.
    ///
    /// # Errors
    /// Some byte could not be written.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Self::Error>;
}

/// Bytes of scratch memory a drain is best given: 256 KiB of data and its commit words.
pub const SCRATCH_BYTES: usize = 4_096 * BYTES_PER_UNIT;
/// Fewest bytes of scratch memory: the longest record must fit.
pub const MIN_SCRATCH_BYTES: usize = 2 * MAX_RECORD_UNITS as usize * BYTES_PER_UNIT;
const BYTES_PER_UNIT: usize = UNIT_BYTES as usize + 8;

/// How much one drain may take, so that one process cannot starve the others.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// Most records.
    pub records: u64,
    /// Most bytes of event data.
    pub bytes: u64,
}

impl Quota {
    /// No limit beyond the ring's own length.
    pub const RING: Self = Self { records: u64::MAX, bytes: u64::MAX };
}

/// What one drain did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Records handed to the sink.
    pub records: u64,
    /// Records of a kind this version does not know.
    pub unknown: u64,
    /// Records given up by their producer.
    pub skipped: u64,
    /// Records whose content contradicts itself.
    pub malformed: u64,
    /// The first of those.
    pub first_malformed: Option<RecordError>,
    /// Units consumed.
    pub units: u64,
    /// More is waiting: a quota ended this drain.
    pub more: bool,
    /// The drain ended at this position, which is reserved but not committed. When it stays so for
    /// long (who may still write there does so when it likes) or the process is gone,
    /// [`Consumer::skip_hole`].
    pub pending: Option<u64>,
}

/// The words the shim writes, as copied at the last drain or [`Consumer::refresh`].
#[derive(Clone, Copy, Debug)]
pub struct InstanceStatus {
    /// What the instance is doing.
    pub state: InstanceState,
    /// Units ever reserved.
    pub event_head: u64,
    /// Requests it has taken.
    pub request_tail: u64,
    /// Its counters, by `Counter::index`.
    pub counters: [u64; COUNTER_WORDS as usize],
}

/// The lease words as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseWords {
    /// Who listens; 0 nobody.
    pub listener: u64,
    /// The last beat.
    pub heartbeat: u64,
    /// Its period.
    pub period_ns: u64,
}

/// One region's reader.
pub struct Consumer<M> {
    memory: M,
    geometry: Geometry,
    identity: InstanceIdentity,
    tail: u64,
    request_head: u64,
    status: InstanceStatus,
}

/// The header, copied once.
struct RegionHeader([u8; HEADER_USED_BYTES]);

impl RegionHeader {
    fn word(&self, offset: u64) -> u64 {
        usize::try_from(offset)
            .ok()
            .and_then(|at| self.0.get(at..))
            .and_then(|bytes| bytes.first_chunk::<8>())
            .map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

impl<M: RegionMemory> Consumer<M> {
    /// Opens a region whose file is `file_bytes` long. Goes on where the last consumer (if any)
    /// said it was.
    ///
    /// # Errors
    /// Unreadable, not a region, of another version, or inconsistent.
    pub fn open(memory: M, file_bytes: u64) -> Result<Self, ConsumerError<M::Error>> {
        let header = read_header(&memory)?;
        let found = header.word(MAGIC_AT);
        if found != MAGIC {
            return Err(ConsumerError::NotARegion { found });
        }
        let version = header.word(VERSION_AT);
        let found = (version & 0xffff_ffff) as u32;
        if found != VERSION {
            return Err(ConsumerError::Version { found });
        }
        let wrong = |field: u64| ConsumerError::Geometry { field, found: header.word(field) };
        let units = header.word(UNITS_AT);
        let geometry =
            Geometry::new(units, header.word(REQUEST_SLOTS_AT)).ok_or(wrong(UNITS_AT))?;
        for (field, expected) in [
            (REGION_BYTES_AT, geometry.region_bytes()),
            (REQUEST_OFFSET_AT, geometry.request_offset()),
            (COMMIT_OFFSET_AT, geometry.commit_offset()),
            (DATA_OFFSET_AT, geometry.data_offset()),
        ] {
            if header.word(field) != expected {
                return Err(wrong(field));
            }
        }
        if version >> 32 != HEADER_BYTES {
            return Err(wrong(VERSION_AT));
        }
        if file_bytes < geometry.region_bytes() {
            return Err(wrong(REGION_BYTES_AT));
        }
        let status = read_status(&header)?;
        // Another consumer may have been here. Its word counts only if it is possible; else begin
        // at the head.
        let tail = header.word(EVENT_TAIL_AT);
        let behind = status.event_head.checked_sub(tail);
        let tail =
            if behind.is_some_and(|b| b <= geometry.units) { tail } else { status.event_head };
        let request_head = header.word(REQUEST_HEAD_AT);
        let unanswered = request_head.checked_sub(status.request_tail);
        let sane = unanswered.is_some_and(|n| n <= geometry.request_slots);
        let request_head = if sane { request_head } else { status.request_tail };
        let identity = InstanceIdentity {
            instance: header.word(INSTANCE_AT),
            pid: header.word(PID_AT),
            created_ns: header.word(CREATED_AT),
            runtime: header.word(RUNTIME_AT),
            features: header.word(FEATURES_AT),
            owner: header.word(OWNER_AT),
            slots: header.word(SLOTS_AT),
        };
        Ok(Self { memory, geometry, identity, tail, request_head, status })
    }

    /// What the header says about the instance. Shown, never believed.
    #[must_use]
    pub fn identity(&self) -> InstanceIdentity {
        self.identity
    }

    /// Where the parts of the region lie.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The shim's words as last read.
    #[must_use]
    pub fn status(&self) -> &InstanceStatus {
        &self.status
    }

    /// The memory behind.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Reads the shim's words again.
    ///
    /// # Errors
    /// Unreadable, or impossible values.
    pub fn refresh(&mut self) -> Result<&InstanceStatus, ConsumerError<M::Error>> {
        self.status = read_status(&read_header(&self.memory)?)?;
        Ok(&self.status)
    }

    /// Hands all committed records to `sink`, in order, within `quota`. `scratch` is at least
    /// [`MIN_SCRATCH_BYTES`].
    ///
    /// # Errors
    /// Unreadable, or the peer lies: then the region should be given up.
    pub fn drain(
        &mut self,
        scratch: &mut [u8],
        quota: Quota,
        sink: &mut dyn FnMut(Record<'_>),
    ) -> Result<Drained, ConsumerError<M::Error>> {
        if scratch.len() < MIN_SCRATCH_BYTES {
            return Err(ConsumerError::Scratch { bytes: scratch.len() });
        }
        let head = self.refresh()?.event_head;
        let waiting = match head.checked_sub(self.tail) {
            Some(waiting) if waiting <= self.geometry.units => waiting,
            _ => return Err(ConsumerError::HeadJump { tail: self.tail, head }),
        };
        let mut drained = Drained::default();
        let mut left = waiting;
        while left > 0 && !drained.more && drained.pending.is_none() {
            let consumed = self.chunk(scratch, left, quota, sink, &mut drained)?;
            if consumed == 0 {
                break;
            }
            left = left.saturating_sub(consumed);
            self.tail = self.tail.wrapping_add(consumed);
            // Tells the producers that these units are free; the copy was made before.
            self.write_words(EVENT_TAIL_AT, &[self.tail])?;
        }
        Ok(drained)
    }

    /// One chunk: commit words, then the data they vouch for. Answers the units consumed.
    fn chunk(
        &self,
        scratch: &mut [u8],
        left: u64,
        quota: Quota,
        sink: &mut dyn FnMut(Record<'_>),
        drained: &mut Drained,
    ) -> Result<u64, ConsumerError<M::Error>> {
        let scratch_bytes = scratch.len();
        let too_small = || ConsumerError::Scratch { bytes: scratch_bytes };
        let room = scratch_bytes / BYTES_PER_UNIT;
        let span = usize::try_from(left).unwrap_or(room).min(room);
        let (commits, data) =
            scratch.split_at_mut_checked(span.saturating_mul(8)).ok_or_else(too_small)?;
        self.read_ring(self.geometry.commit_offset(), 8, self.tail, commits)?;
        let commits: &[u8] = commits;
        let taken = self.walk_commits(commits, left, quota, drained)?;
        let data_bytes =
            usize::try_from(taken.wrapping_mul(UNIT_BYTES)).map_err(|_| too_small())?;
        let data = data.get_mut(..data_bytes).ok_or_else(too_small)?;
        self.read_ring(self.geometry.data_offset(), UNIT_BYTES, self.tail, data)?;
        let mut at = 0u64;
        while at < taken {
            // The private copy of the commit word, which `walk_commits` has accepted.
            let position = self.tail.wrapping_add(at);
            let Commit::Done(extent) =
                read_commit(word_at(commits, at), position, self.geometry.units)
            else {
                break;
            };
            let start = usize::try_from(at.wrapping_mul(UNIT_BYTES)).map_err(|_| too_small())?;
            let bytes = usize::try_from(extent.bytes).map_err(|_| too_small())?;
            let record = data.get(start..).and_then(|d| d.get(..bytes)).ok_or_else(too_small)?;
            match decode(record) {
                Ok(Some(Record { body: RecordBody::Skip, .. })) => drained.skipped += 1,
                Ok(Some(record)) => {
                    drained.records += 1;
                    sink(record);
                }
                Ok(None) => drained.unknown += 1,
                Err(error) => {
                    drained.malformed += 1;
                    drained.first_malformed.get_or_insert(error);
                }
            }
            at = at.wrapping_add(extent.units);
        }
        drained.units += taken;
        Ok(taken)
    }

    /// Units of whole, committed records at the front of `commits`, within the quota.
    fn walk_commits(
        &self,
        commits: &[u8],
        left: u64,
        quota: Quota,
        drained: &mut Drained,
    ) -> Result<u64, ConsumerError<M::Error>> {
        let span = (commits.len() / 8) as u64;
        let seen = drained.records + drained.unknown + drained.skipped + drained.malformed;
        let (mut at, mut records) = (0u64, 0u64);
        while at < span {
            let position = self.tail.wrapping_add(at);
            let extent = match read_commit(word_at(commits, at), position, self.geometry.units) {
                Commit::Pending => {
                    drained.pending = Some(position);
                    break;
                }
                Commit::Impossible(e) => {
                    return Err(ConsumerError::Commit { position, units: e.units, bytes: e.bytes });
                }
                Commit::Done(extent) => extent,
            };
            let end = at.wrapping_add(extent.units);
            if end > left {
                return Err(ConsumerError::Commit {
                    position,
                    units: extent.units,
                    bytes: extent.bytes,
                });
            }
            if end > span {
                break; // whole in the next chunk
            }
            let units = drained.units.saturating_add(end);
            if seen.saturating_add(records) >= quota.records
                || units.saturating_mul(UNIT_BYTES) > quota.bytes
            {
                drained.more = true;
                break;
            }
            records += 1;
            at = end;
        }
        Ok(at)
    }

    /// Gives up a hole at the front: goes to the next committed position, or, when `to_head`, to
    /// the head if there is none. Answers the units skipped (one or more records were lost in
    /// them). For a producer that died while it wrote.
    ///
    /// # Errors
    /// Unreadable, or the head jumps.
    pub fn skip_hole(
        &mut self,
        scratch: &mut [u8],
        to_head: bool,
    ) -> Result<u64, ConsumerError<M::Error>> {
        let head = self.refresh()?.event_head;
        let waiting = match head.checked_sub(self.tail) {
            Some(waiting) if waiting <= self.geometry.units => waiting,
            _ => return Err(ConsumerError::HeadJump { tail: self.tail, head }),
        };
        let room = (scratch.len() / 8) as u64;
        if room == 0 {
            return Err(ConsumerError::Scratch { bytes: scratch.len() });
        }
        let mut skipped = 0u64;
        'search: while skipped < waiting {
            let span = usize::try_from((waiting - skipped).min(room)).unwrap_or(0);
            let Some(commits) = scratch.get_mut(..span.saturating_mul(8)) else { break };
            let from = self.tail.wrapping_add(skipped);
            self.read_ring(self.geometry.commit_offset(), 8, from, commits)?;
            for at in 0..span as u64 {
                let commit =
                    read_commit(word_at(commits, at), from.wrapping_add(at), self.geometry.units);
                if !matches!(commit, Commit::Pending) {
                    skipped += at;
                    break 'search;
                }
            }
            skipped += span as u64;
        }
        if skipped >= waiting && !to_head {
            return Ok(0);
        }
        self.tail = self.tail.wrapping_add(skipped);
        self.write_words(EVENT_TAIL_AT, &[self.tail])?;
        Ok(skipped)
    }

    /// Writes as many of `requests` as fit; answers how many.
    ///
    /// # Errors
    /// Unwritable, or request_tail is impossible.
    pub fn request(&mut self, requests: &[Request]) -> Result<usize, ConsumerError<M::Error>> {
        let tail = self.refresh()?.request_tail;
        let head = self.request_head;
        let slots = self.geometry.request_slots;
        let free = match head.checked_sub(tail) {
            Some(used) if used <= slots => slots - used,
            _ => return Err(ConsumerError::RequestTail { head, tail }),
        };
        let mut written = 0usize;
        let room = usize::try_from(free).unwrap_or(0);
        for batch in requests.get(..room.min(requests.len())).unwrap_or(&[]).chunks(32) {
            // 32 slots at a time, and not across the ring's end.
            let mut bytes = [0u8; 32 * REQUEST_BYTES as usize];
            let mut pending = 0usize;
            for request in batch {
                let position = self.request_head.wrapping_add(pending as u64);
                if pending > 0 && index(position, slots) == 0 {
                    self.write_requests(&bytes, pending)?;
                    pending = 0;
                }
                let position = self.request_head.wrapping_add(pending as u64);
                if let Some(to) = bytes.get_mut(pending.saturating_mul(REQUEST_BYTES as usize)..) {
                    for (to, from) in to.iter_mut().zip(request.slot(position)) {
                        *to = from;
                    }
                }
                pending += 1;
                written += 1;
            }
            self.write_requests(&bytes, pending)?;
        }
        // After the slots: the shim's acquire load of request_head pairs with this write.
        self.write_words(REQUEST_HEAD_AT, &[self.request_head])?;
        Ok(written)
    }

    fn write_requests(
        &mut self,
        bytes: &[u8],
        count: usize,
    ) -> Result<(), ConsumerError<M::Error>> {
        let at = index(self.request_head, self.geometry.request_slots).wrapping_mul(REQUEST_BYTES);
        let used = bytes.get(..count.saturating_mul(REQUEST_BYTES as usize)).unwrap_or(&[]);
        let offset = self.geometry.request_offset().wrapping_add(at);
        self.memory.write_at(offset, used).map_err(ConsumerError::Memory)?;
        self.request_head = self.request_head.wrapping_add(count as u64);
        Ok(())
    }

    /// Says "I listen": `listener` is this daemon's random number (not 0), `heartbeat` any value
    /// other than the last.
    ///
    /// # Errors
    /// Unwritable.
    pub fn beat(
        &self,
        listener: u64,
        heartbeat: u64,
        period_ns: u64,
    ) -> Result<(), ConsumerError<M::Error>> {
        self.write_words(LISTENER_AT, &[listener, heartbeat, period_ns])
    }

    /// Stops listening: the shim goes quiet at once. `heartbeat` as in [`Consumer::beat`].
    ///
    /// # Errors
    /// Unwritable.
    pub fn release(&self, heartbeat: u64) -> Result<(), ConsumerError<M::Error>> {
        self.write_words(LISTENER_AT, &[0, heartbeat, 0])
    }

    /// The lease as it is: a heartbeat that moves without us is another daemon's.
    ///
    /// # Errors
    /// Unreadable.
    pub fn lease(&self) -> Result<LeaseWords, ConsumerError<M::Error>> {
        let mut bytes = [0u8; 24];
        self.memory.read_at(LISTENER_AT, &mut bytes).map_err(ConsumerError::Memory)?;
        let words = [word_at(&bytes, 0), word_at(&bytes, 1), word_at(&bytes, 2)];
        let [listener, heartbeat, period_ns] = words;
        Ok(LeaseWords { listener, heartbeat, period_ns })
    }

    /// Reads `bytes` of a ring at `offset` with `stride` bytes a unit, from `position` on, in one
    /// or two pieces.
    fn read_ring(
        &self,
        offset: u64,
        stride: u64,
        position: u64,
        bytes: &mut [u8],
    ) -> Result<(), ConsumerError<M::Error>> {
        if bytes.is_empty() {
            return Ok(());
        }
        let at = index(position, self.geometry.units).wrapping_mul(stride);
        let to_end = self.geometry.units.wrapping_mul(stride).wrapping_sub(at);
        let cut = usize::try_from(to_end).unwrap_or(usize::MAX).min(bytes.len());
        let Some((first, second)) = bytes.split_at_mut_checked(cut) else { return Ok(()) };
        self.memory.read_at(offset.wrapping_add(at), first).map_err(ConsumerError::Memory)?;
        if !second.is_empty() {
            self.memory.read_at(offset, second).map_err(ConsumerError::Memory)?;
        }
        Ok(())
    }

    fn write_words(&self, offset: u64, words: &[u64]) -> Result<(), ConsumerError<M::Error>> {
        let mut bytes = [0u8; 24];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            for (to, from) in to.iter_mut().zip(word.to_le_bytes()) {
                *to = from;
            }
        }
        let used = bytes.get(..words.len().saturating_mul(8)).unwrap_or(&[]);
        self.memory.write_at(offset, used).map_err(ConsumerError::Memory)
    }
}

fn word_at(bytes: &[u8], word: u64) -> u64 {
    usize::try_from(word)
        .ok()
        .and_then(|w| bytes.get(w.saturating_mul(8)..))
        .and_then(|b| b.first_chunk::<8>())
        .map_or(0, |b| u64::from_le_bytes(*b))
}

fn read_header<M: RegionMemory>(memory: &M) -> Result<RegionHeader, ConsumerError<M::Error>> {
    let mut header = RegionHeader([0; HEADER_USED_BYTES]);
    memory.read_at(0, &mut header.0).map_err(ConsumerError::Memory)?;
    Ok(header)
}

fn read_status<E>(header: &RegionHeader) -> Result<InstanceStatus, ConsumerError<E>> {
    let found = header.word(STATE_AT);
    let state = InstanceState::from_word(found).ok_or(ConsumerError::State { found })?;
    let mut counters = [0; COUNTER_WORDS as usize];
    for (counter, at) in counters.iter_mut().zip((COUNTERS_AT..).step_by(8)) {
        *counter = header.word(at);
    }
    Ok(InstanceStatus {
        state,
        event_head: header.word(EVENT_HEAD_AT),
        request_tail: header.word(REQUEST_TAIL_AT),
        counters,
    })
}
