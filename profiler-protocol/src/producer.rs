//! The shim's side of the region: reserve → fill → commit. Never waits, never allocates; what does
//! not fit is counted. All access goes through bounds-checked words; the mapping itself is the
//! caller's business.

use crate::counter::Counter;
use crate::layout::{
    COMMIT_OFFSET_AT, CREATED_AT, DATA_OFFSET_AT, EVENT_HEAD_AT, EVENT_TAIL_AT, FEATURES_AT,
    Geometry, HEADER_BYTES, HEARTBEAT_AT, INSTANCE_AT, InstanceState, LISTENER_AT, MAGIC, MAGIC_AT,
    MAX_RECORD_BYTES, OWNER_AT, PERIOD_AT, PID_AT, REGION_BYTES_AT, REQUEST_OFFSET_AT,
    REQUEST_SLOTS_AT, RUNTIME_AT, SLOTS_AT, STATE_AT, UNITS_AT, VERSION, VERSION_AT,
};
use crate::position::{Extent, commit_word, free, index, units_for};
use crate::sync::{AtomicU64, Ordering};

/// A region as its maker sees it. `words` is all of it, in words.
#[derive(Clone, Copy)]
pub struct ProducerRegion<'a> {
    words: &'a [AtomicU64],
    geometry: Geometry,
}

/// What the header says about the instance; written once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceIdentity {
    /// Random number of the instance.
    pub instance: u64,
    /// The process as it sees itself.
    pub pid: u64,
    /// When the region was made.
    pub created_ns: u64,
    /// [`crate::layout::pack_runtime`].
    pub runtime: u64,
    /// Feature bits.
    pub features: u64,
    /// Number of the recorder the region was made for ([`crate::load`]), 0 for nobody in
    /// particular.
    pub owner: u64,
    /// Where in the process the slots of the watched objects lie ([`crate::live::SLOT_WORDS`]), 0
    /// for nowhere.
    pub slots: u64,
}

impl<'a> ProducerRegion<'a> {
    /// The region in `words`; `None` when there are too few for `geometry`.
    #[must_use]
    pub fn new(words: &'a [AtomicU64], geometry: Geometry) -> Option<Self> {
        let bytes = (words.len() as u64).checked_mul(8)?;
        (geometry.region_bytes() <= bytes).then_some(Self { words, geometry })
    }

    /// Writes the header of fresh (zeroed) memory. The magic comes last, with release ordering: it
    /// pairs with the consumer's first read, which accepts nothing before it.
    pub fn publish(&self, identity: InstanceIdentity) {
        let version = u64::from(VERSION) | HEADER_BYTES << 32;
        for (at, value) in [
            (VERSION_AT, version),
            (REGION_BYTES_AT, self.geometry.region_bytes()),
            (REQUEST_OFFSET_AT, self.geometry.request_offset()),
            (REQUEST_SLOTS_AT, self.geometry.request_slots),
            (COMMIT_OFFSET_AT, self.geometry.commit_offset()),
            (DATA_OFFSET_AT, self.geometry.data_offset()),
            (UNITS_AT, self.geometry.units),
            (INSTANCE_AT, identity.instance),
            (PID_AT, identity.pid),
            (CREATED_AT, identity.created_ns),
            (RUNTIME_AT, identity.runtime),
            (FEATURES_AT, identity.features),
            (OWNER_AT, identity.owner),
            (SLOTS_AT, identity.slots),
        ] {
            self.store(at, value, Ordering::Relaxed);
        }
        self.store(MAGIC_AT, MAGIC, Ordering::Release);
    }

    /// Tells the daemon what the instance is doing (release: what was written before is visible
    /// with it).
    pub fn set_state(&self, state: InstanceState) {
        self.store(STATE_AT, state.word(), Ordering::Release);
    }

    /// The lease words (listener, heartbeat, period), written by the consumer's `beat`. Relaxed:
    /// each is judged by itself.
    #[must_use]
    pub fn lease_words(&self) -> (u64, u64, u64) {
        let load = |at| self.load(at, Ordering::Relaxed);
        (load(LISTENER_AT), load(HEARTBEAT_AT), load(PERIOD_AT))
    }

    /// Adds to a counter. Relaxed: the daemon only reads totals.
    pub fn count(&self, counter: Counter, by: u64) {
        if let Some(word) = self.word(counter.offset()) {
            word.fetch_add(by, Ordering::Relaxed);
        }
    }

    /// A counter's value (relaxed).
    #[must_use]
    pub fn counter(&self, counter: Counter) -> u64 {
        self.load(counter.offset(), Ordering::Relaxed)
    }

    /// When it was made (relaxed: written before anybody else saw it).
    #[must_use]
    pub fn created_ns(&self) -> u64 {
        self.load(CREATED_AT, Ordering::Relaxed)
    }

    /// Where the parts lie.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Units ever reserved (relaxed).
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.load(EVENT_HEAD_AT, Ordering::Relaxed)
    }

    /// Units in use, at most all of them, whatever the consumer says. For a guess how full it is,
    /// since it changes meanwhile.
    #[must_use]
    pub fn used(&self) -> u64 {
        let units = self.geometry.units;
        // Acquire, and the tail first: the head that was read before it was written is then no
        // later one than ours, else a ring that is being emptied would look full. Pairs with the
        // consumer's write.
        let tail = self.load(EVENT_TAIL_AT, Ordering::Acquire);
        units.wrapping_sub(free(self.reserved(), tail, units))
    }

    pub(crate) fn word(&self, offset: u64) -> Option<&'a AtomicU64> {
        usize::try_from(offset >> 3).ok().and_then(|i| self.words.get(i))
    }

    pub(crate) fn load(&self, offset: u64, order: Ordering) -> u64 {
        self.word(offset).map_or(0, |w| w.load(order))
    }

    pub(crate) fn store(&self, offset: u64, value: u64, order: Ordering) {
        if let Some(word) = self.word(offset) {
            word.store(value, order);
        }
    }

    /// Reserves room for a record of `bytes` (at most 32 KiB). `None`: the ring is full, or the
    /// record too long; counted.
    #[must_use]
    pub fn try_reserve(&self, bytes: u64) -> Option<Grant<'a>> {
        self.try_reserve_before(bytes, 0)
    }

    /// The same for a sample, of which there are many and large ones: a part of the ring is left to
    /// records without which others mean nothing, such as those of collections.
    #[must_use]
    pub fn try_reserve_sample(&self, bytes: u64) -> Option<Grant<'a>> {
        self.try_reserve_before(bytes, self.geometry.units >> 5)
    }

    fn try_reserve_before(&self, bytes: u64, spare: u64) -> Option<Grant<'a>> {
        let units = units_for(bytes);
        let (Some(head_word), Some(tail_word)) =
            (self.word(EVENT_HEAD_AT), self.word(EVENT_TAIL_AT))
        else {
            return None;
        };
        if units == 0 || bytes > MAX_RECORD_BYTES {
            self.count(Counter::RecordsDroppedFull, 1);
            return None;
        }
        let mut head = head_word.load(Ordering::Relaxed);
        loop {
            // Acquire: pairs with the consumer's write of event_tail, which it does after copying
            // the units out.
            let tail = tail_word.load(Ordering::Acquire);
            if free(head, tail, self.geometry.units) < units.saturating_add(spare) {
                // Between the two looks others may have written, and the consumer read on, to
                // beyond where the head was: it read a later head before it wrote that tail, so
                // this look finds one.
                let now = head_word.load(Ordering::Relaxed);
                if now != head {
                    head = now;
                    continue;
                }
                self.count(Counter::RecordsDroppedFull, 1);
                return None;
            }
            // Relaxed: the units' owner is decided by the value alone; the consumer trusts only
            // commit words.
            match head_word.compare_exchange_weak(
                head,
                head.wrapping_add(units),
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    return Some(Grant {
                        region: *self,
                        position: head,
                        units,
                        word: 0,
                        committed: false,
                    });
                }
                Err(now) => head = now,
            }
        }
    }
}

/// Units that belong to one producer until it commits them. Dropped without a commit, they are
/// committed as a Skip.
pub struct Grant<'a> {
    region: ProducerRegion<'a>,
    position: u64,
    units: u64,
    word: u64,
    committed: bool,
}

impl<'a> Grant<'a> {
    /// Appends a word. Words beyond the reservation are ignored, and the record is then abandoned
    /// at its commit.
    pub fn put(&mut self, value: u64) {
        let unit = self.position.wrapping_add(self.word >> 3);
        if self.word < self.units << 3 {
            let geometry = self.region.geometry;
            let at = index(unit, geometry.units) << 6 | (self.word & 7) << 3;
            // Relaxed: made visible by the release store of the commit word.
            self.region.store(geometry.data_offset().wrapping_add(at), value, Ordering::Relaxed);
        }
        self.word = self.word.wrapping_add(1);
    }

    /// Where the next `words` words go, as up to two runs of ring memory (the second one when they
    /// wrap round the end), and moves past them. For a caller that copies faster than word by word;
    /// `None` when they do not fit.
    pub fn skip(&mut self, words: u64) -> Option<[&'a [AtomicU64]; 2]> {
        let end = self.word.checked_add(words)?;
        if end > self.units << 3 {
            return None;
        }
        let ring_words = self.region.geometry.units << 3;
        let first = (self.position << 3).wrapping_add(self.word) & ring_words.wrapping_sub(1);
        let before_end = ring_words.wrapping_sub(first).min(words);
        let data = usize::try_from(self.region.geometry.data_offset() >> 3).ok()?;
        let first = data.checked_add(usize::try_from(first).ok()?)?;
        let first_end = first.checked_add(usize::try_from(before_end).ok()?)?;
        let second_end = data.checked_add(usize::try_from(words.wrapping_sub(before_end)).ok()?)?;
        let runs =
            [self.region.words.get(first..first_end)?, self.region.words.get(data..second_end)?];
        self.word = end;
        Some(runs)
    }

    /// Hands the record to the consumer. The release store pairs with the consumer's copy of the
    /// commit words, after which it copies the data.
    pub fn commit(mut self) {
        if self.word <= self.units << 3 {
            self.committed = true;
            self.region.count(Counter::RecordsWritten, 1);
            self.finish(self.word << 3);
        }
    }

    fn finish(&self, bytes: u64) {
        let geometry = self.region.geometry;
        let word = commit_word(self.position, geometry.units, Extent { units: self.units, bytes });
        let at = geometry.commit_offset().wrapping_add(index(self.position, geometry.units) << 3);
        self.region.store(at, word, Ordering::Release);
    }
}

impl Drop for Grant<'_> {
    fn drop(&mut self) {
        if !self.committed {
            self.region.count(Counter::RecordsAbandoned, 1);
            self.word = 0;
            self.put(0);
            self.finish(8);
        }
    }
}
