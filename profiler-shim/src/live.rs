//! Which sampled objects are alive: a weak handle for each, looked at when a collection has ended.
//! Bounded: when there are too many, chance decides which stay, so that those that stay stand for
//! all (`profiler_protocol::live`). Lock-free for the threads that allocate.

use crate::runtime::heap::Handles;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use profiler_protocol::live::{
    GROUP, LEVELS_OF_OCTAVE, SLOT_WORDS, SPARE, TOP_LEVEL, groups, key, level_above, threshold,
};
use profiler_protocol::record::WordList;

/// Objects watched at a time unless told otherwise, and the fewest and most that can be asked for.
pub(crate) const USUAL: usize = 4_096;
/// Fewest.
pub(crate) const FEWEST: usize = 256;
/// Most.
pub(crate) const MOST: usize = 65_536;
const GROUPS: usize = groups(MOST);
const SLOTS: usize = GROUPS * GROUP;
const BATCH: usize = 256;
/// CPU time a survey may take of a pause: this, or 100 ns for each object where more are asked for.
const SURVEY_NS: u64 = 1_000_000;
const OBJECT_NS: u64 = 100;

/// Its words are read from outside as [`SLOT_WORDS`] says.
#[derive(Default)]
#[repr(C)]
struct WatchSlot {
    /// 0 while being filled or unused.
    handle: AtomicUsize,
    /// sample << 8 | generation.
    sample: AtomicU64,
    /// What is not above the level's threshold is not watched.
    key: AtomicU64,
}

const _: () = assert!(size_of::<WatchSlot>() == SLOT_WORDS * 8);

/// All watched objects.
pub(crate) struct Live {
    /// Bit set: the slot has an owner.
    used: [AtomicU64; GROUPS],
    slots: [WatchSlot; SLOTS],
    /// Slots with an owner.
    count: AtomicU32,
    /// Most objects asked for, 0 for [`USUAL`].
    limit: AtomicU32,
    /// Most objects as far as pauses allow, 0 for all.
    allowed: AtomicU32,
    /// The level.
    level: AtomicU32,
    /// 1 when some that are not above the level are watched still, because the ring had no room to
    /// say so.
    untidy: AtomicU32,
    /// Makes the draws another sequence in each instance.
    seed: AtomicU64,
    /// 1 while somebody goes through the slots; nobody waits for that. Taken with acquire, put back
    /// with release: the next one sees what this one did.
    busy: AtomicU32,
    /// Threads between the question whether somebody listens and the end of [`Live::watch`].
    watching: AtomicU32,
}

/// While there is one, a handle may be made.
pub(crate) struct Watching<'a>(&'a AtomicU32);

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire load in `is_anybody_watching`; the handle is in its slot
        // by now.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// What became of the wish to watch an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WatchOutcome {
    /// It is watched, and this was the level.
    Watched {
        /// The level.
        level: u8,
    },
    /// There are too many, and it was not chosen.
    Downsampled,
    /// All slots are in use.
    Full,
    /// The runtime gave no handle.
    Refused,
}

/// What a survey found out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SurveyResult<'a> {
    /// Sample numbers.
    Dead(WordList<'a>),
    /// sample << 8 | generation.
    Alive(WordList<'a>),
    /// Not watched any more.
    Dropped {
        /// The level that those that are watched still were above.
        level: u8,
        /// Sample numbers.
        samples: WordList<'a>,
    },
}

/// A batch of words on the stack, with the slots they came from.
struct WordBatch {
    bytes: [u8; BATCH * 8],
    slots: [usize; BATCH],
    count: usize,
}

impl WordBatch {
    const fn new() -> Self {
        Self { bytes: [0; BATCH * 8], slots: [0; BATCH], count: 0 }
    }

    fn push(&mut self, slot: usize, word: u64) -> bool {
        let at = self.count.wrapping_mul(8);
        let (Some(bytes), Some(place)) = (self.bytes.get_mut(at..), self.slots.get_mut(self.count))
        else {
            return true;
        };
        for (to, from) in bytes.iter_mut().zip(word.to_le_bytes()) {
            *to = from;
        }
        *place = slot;
        self.count = self.count.wrapping_add(1);
        self.count >= BATCH
    }

    fn words(&self) -> WordList<'_> {
        WordList::new(self.bytes.get(..self.count.wrapping_mul(8)).unwrap_or(&[]))
    }

    fn entries(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.slots.iter().copied().zip(self.words().iter())
    }
}

impl Live {
    /// Watches the object at `address`, which matters so much, as sample number `sample`, if chance
    /// will have it. Where so many come that the service thread did not make room in time, it is
    /// made here, for some hundred objects to come.
    pub(crate) fn watch(
        &self,
        handles: &dyn Handles,
        address: usize,
        sample: u64,
        importance: u64,
        report: &mut dyn FnMut(SurveyResult<'_>) -> bool,
    ) -> WatchOutcome {
        let key = key(importance, self.draw(sample));
        let chosen_at = self.level();
        if key <= threshold(chosen_at) {
            return WatchOutcome::Downsampled;
        }
        let slot = self.claim(sample).or_else(|| {
            self.keep(handles, report);
            self.claim(sample)
        });
        let Some(slot) = slot else { return WatchOutcome::Full };
        let Some(place) = self.slots.get(slot) else { return WatchOutcome::Full };
        let Some(handle) = handles.create(address) else {
            self.free(slot);
            return WatchOutcome::Refused;
        };
        place.sample.store(sample << 8, Ordering::Relaxed);
        place.key.store(key, Ordering::Relaxed);
        // Release: pairs with the acquire load in `watched`.
        place.handle.store(handle, Ordering::Release);
        // Pairs with the fence in `keep`: either that sees the handle, or this sees its level.
        fence(Ordering::SeqCst);
        let level = self.level();
        if key <= threshold(level) {
            // Handles are given up only by who goes through the slots: a survey may be looking at
            // this one.
            self.untidy.store(1, Ordering::Relaxed);
        }
        // It may have been lowered meanwhile: then the object was chosen at the first one still.
        WatchOutcome::Watched { level: level.max(chosen_at) }
    }

    /// To be held from before the question whether somebody listens: once nobody does and nobody
    /// watches, no further handle is made.
    pub(crate) fn watching(&self) -> Watching<'_> {
        self.watching.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `is_anybody_watching`: either that sees us, or we see that nobody
        // listens.
        fence(Ordering::SeqCst);
        Watching(&self.watching)
    }

    /// True while handles may be made. To be asked when nobody listens any more.
    pub(crate) fn is_anybody_watching(&self) -> bool {
        // Pairs with the fence in `watching`.
        fence(Ordering::SeqCst);
        // Acquire: pairs with the release in `Watching::drop`.
        self.watching.load(Ordering::Acquire) != 0
    }

    /// Sets how many objects are watched at most. What pauses allow stays as it was where that is
    /// no other number: it is said again whenever anything else of a recording changes.
    pub(crate) fn set_limit(&self, most: u64) {
        let most = usize::try_from(most).unwrap_or(MOST).clamp(FEWEST, MOST);
        if most == self.limit() {
            return;
        }
        self.limit.store(u32::try_from(most).unwrap_or(0), Ordering::Relaxed);
        self.allowed.store(0, Ordering::Relaxed);
    }

    /// Where the slots lie.
    pub(crate) fn slots_at(&self) -> u64 {
        self.slots.as_ptr().addr() as u64
    }

    /// Sets what the draws begin with.
    pub(crate) fn set_seed(&self, seed: u64) {
        self.seed.store(seed, Ordering::Relaxed);
    }

    /// What the draws begin with.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.load(Ordering::Relaxed)
    }

    /// Most objects asked for.
    fn limit(&self) -> usize {
        match self.limit.load(Ordering::Relaxed) {
            0 => USUAL,
            limit => (limit as usize).min(MOST),
        }
    }

    /// Most objects now.
    fn allowed(&self) -> usize {
        match self.allowed.load(Ordering::Relaxed) {
            0 => self.limit(),
            allowed => (allowed as usize).min(self.limit()),
        }
    }

    fn level(&self) -> u8 {
        // Acquire: pairs with the release store in `keep`, so that `untidy` is set after it was
        // cleared there.
        u8::try_from(self.level.load(Ordering::Acquire)).unwrap_or(TOP_LEVEL)
    }

    /// A number from 1 to 2³²−1 that belongs to a sample (SplitMix64's output function, Steele, Lea
    /// and Flood 2014).
    fn draw(&self, sample: u64) -> u32 {
        let mut bits = sample.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(self.seed());
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        u32::try_from((bits ^ bits >> 31) >> 32).unwrap_or(u32::MAX).max(1)
    }

    fn claim(&self, sample: u64) -> Option<usize> {
        let groups = groups(self.allowed()).clamp(1, GROUPS);
        let first = (sample % groups as u64) as usize;
        for step in 0..groups {
            let group = first.wrapping_add(step);
            let group = if group >= groups { group.wrapping_sub(groups) } else { group };
            let Some(word) = self.used.get(group) else { continue };
            let mut bits = word.load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = bits.trailing_ones();
                // Acquire: what the slot's last owner wrote happened before it freed the bit.
                match word.compare_exchange_weak(
                    bits,
                    bits | 1 << bit,
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        self.count.fetch_add(1, Ordering::Relaxed);
                        return Some(group << 6 | bit as usize);
                    }
                    Err(now) => bits = now,
                }
            }
        }
        None
    }

    fn free(&self, slot: usize) {
        if let Some(word) = self.used.get(slot >> 6) {
            // Release: pairs with the acquire in `claim`.
            word.fetch_and(!(1 << (slot & 63)), Ordering::Release);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Looks at every watched object that a collection of generation `condemned` can have touched.
    /// `report` answers false when it cannot take a batch: those objects stay as they are until the
    /// next survey. Answers the batches put off and the objects the runtime said nothing of, or
    /// `None` when the slots are being released.
    pub(crate) fn survey(
        &self,
        handles: &dyn Handles,
        condemned: u8,
        report: &mut dyn FnMut(SurveyResult<'_>) -> bool,
    ) -> Option<u64> {
        if self.busy.swap(1, Ordering::Acquire) != 0 {
            return None;
        }
        let mut deferred = 0u64;
        let (mut dead, mut alive) = (WordBatch::new(), WordBatch::new());
        for (slot, place, handle) in self.all_watched() {
            let word = place.sample.load(Ordering::Relaxed);
            let generation = (word & 0xff) as u8;
            // Large and pinned objects die in generation-2 collections.
            if generation.min(2) > condemned {
                continue;
            }
            match handles.object(handle) {
                // The runtime may refuse on the thread of a background collection.
                None => deferred = deferred.wrapping_add(1),
                Some(0) if dead.push(slot, word >> 8) => {
                    deferred = deferred.wrapping_add(self.flush_dead(&mut dead, handles, report));
                }
                Some(0) => {}
                Some(object) if generation < 2 => {
                    let now = handles.generation(object).unwrap_or(generation);
                    let changed = word & !0xff | u64::from(now);
                    if now != generation && alive.push(slot, changed) {
                        deferred = deferred.wrapping_add(self.flush_alive(&mut alive, report));
                    }
                }
                Some(_) => {}
            }
        }
        deferred = deferred.wrapping_add(self.flush_dead(&mut dead, handles, report));
        deferred = deferred.wrapping_add(self.flush_alive(&mut alive, report));
        self.busy.store(0, Ordering::Release);
        Some(deferred)
    }

    /// Objects that are watched now.
    pub(crate) fn watched(&self) -> u64 {
        self.count.load(Ordering::Relaxed).into()
    }

    /// A survey, before which so many were watched, of what a collection of generation `condemned`
    /// can have touched took so much CPU time: makes the set smaller if that was more than its
    /// share of a pause. True when it did.
    pub(crate) fn account(&self, watched: u64, spent_ns: u64, condemned: u8) -> bool {
        let budget_ns = SURVEY_NS.max((self.limit() as u64).saturating_mul(OBJECT_NS));
        if spent_ns <= budget_ns {
            // What looks at the young ones only says nothing of the time that all take.
            if condemned >= 2 && spent_ns <= budget_ns / 2 {
                self.allow_more(watched);
            }
            return false;
        }
        let fits = watched.saturating_mul(budget_ns).checked_div(spent_ns).unwrap_or(0);
        let fits = usize::try_from(fits).unwrap_or(MOST).max(FEWEST);
        let smaller = fits < self.allowed();
        if smaller {
            self.allowed.store(u32::try_from(fits).unwrap_or(0), Ordering::Relaxed);
        }
        smaller
    }

    /// Makes a set larger again that was made smaller, by an eighth: one look may have taken long
    /// for a reason of its own, and a process may live for months. Not one that has more room than
    /// it needs, for what it cost says less of a full one.
    fn allow_more(&self, watched: u64) {
        let (allowed, limit) = (self.allowed(), self.limit());
        if allowed < limit && watched as usize > allowed.saturating_sub(allowed / 4) {
            let more = allowed.saturating_add(allowed / 8);
            // With no number of its own it is what is asked for, whatever that will be.
            let more = if more < limit { u32::try_from(more).unwrap_or(0) } else { 0 };
            self.allowed.store(more, Ordering::Relaxed);
        }
    }

    /// Raises the level when there are too many objects, and drops those that are not above it;
    /// lowers it when there is room again. Which level that is depends on how many keys are above
    /// each, so for an object that stays it does not matter where above its key was: that makes 1 /
    /// [`chance`](profiler_protocol::live::chance) unbiased.
    pub(crate) fn keep(
        &self,
        handles: &dyn Handles,
        report: &mut dyn FnMut(SurveyResult<'_>) -> bool,
    ) {
        let (watched, allowed) = (self.count.load(Ordering::Relaxed) as usize, self.allowed());
        let untidy = self.untidy.load(Ordering::Relaxed) != 0;
        if watched <= allowed && !untidy {
            if watched < allowed / 2 {
                let lower = self.level().saturating_sub(LEVELS_OF_OCTAVE);
                self.level.store(u32::from(lower), Ordering::Relaxed);
            }
            return;
        }
        if self.busy.swap(1, Ordering::Acquire) != 0 {
            return;
        }
        self.untidy.store(0, Ordering::Relaxed);
        if watched > allowed {
            let level = self.level_for(allowed.saturating_sub(allowed / SPARE));
            self.level.store(u32::from(level), Ordering::Release);
        }
        // Pairs with the fence in `watch`.
        fence(Ordering::SeqCst);
        let level = self.level();
        let (mut batch, mut all_told) = (WordBatch::new(), true);
        for (slot, place, _) in self.all_watched() {
            if place.key.load(Ordering::Relaxed) <= threshold(level)
                && batch.push(slot, place.sample.load(Ordering::Relaxed) >> 8)
            {
                all_told &= self.flush_dropped(&mut batch, level, handles, report);
            }
        }
        all_told &= self.flush_dropped(&mut batch, level, handles, report);
        if !all_told {
            self.untidy.store(1, Ordering::Relaxed);
        }
        self.busy.store(0, Ordering::Release);
    }

    /// The lowest level, not below the present one, above which are at most `most` keys.
    fn level_for(&self, most: usize) -> u8 {
        let mut last_at = [0u32; TOP_LEVEL as usize + 1];
        let mut above = 0usize;
        for (_, place, _) in self.all_watched() {
            let level = level_above(place.key.load(Ordering::Relaxed));
            if let Some(count) = last_at.get_mut(usize::from(level)) {
                *count = count.wrapping_add(1);
                above = above.wrapping_add(1);
            }
        }
        for (level, count) in (0..=TOP_LEVEL).zip(last_at) {
            above = above.saturating_sub(count as usize);
            if above <= most && level >= self.level() {
                return level;
            }
        }
        TOP_LEVEL
    }

    // Called from several places, rarely: inlined into each, they would be a kilobyte.
    #[inline(never)]
    fn flush_dropped(
        &self,
        batch: &mut WordBatch,
        level: u8,
        handles: &dyn Handles,
        report: &mut dyn FnMut(SurveyResult<'_>) -> bool,
    ) -> bool {
        if batch.count == 0 {
            return true;
        }
        let taken = report(SurveyResult::Dropped { level, samples: batch.words() });
        if taken {
            for (slot, _) in batch.entries() {
                self.drop_slot(slot, handles);
            }
        }
        batch.count = 0;
        taken
    }

    /// Slots that watch an object, with its handle.
    fn all_watched(&self) -> impl Iterator<Item = (usize, &WatchSlot, usize)> {
        self.used.iter().enumerate().flat_map(move |(group, word)| {
            let mut bits = word.load(Ordering::Relaxed);
            core::iter::from_fn(move || {
                while bits != 0 {
                    let slot = group << 6 | bits.trailing_zeros() as usize;
                    bits &= bits.wrapping_sub(1);
                    if let Some(place) = self.slots.get(slot) {
                        let handle = place.handle.load(Ordering::Acquire);
                        if handle != 0 {
                            return Some((slot, place, handle));
                        }
                    }
                }
                None
            })
        })
    }

    fn flush_dead(
        &self,
        batch: &mut WordBatch,
        handles: &dyn Handles,
        report: &mut dyn FnMut(SurveyResult<'_>) -> bool,
    ) -> u64 {
        if batch.count == 0 {
            return 0;
        }
        let taken = report(SurveyResult::Dead(batch.words()));
        if taken {
            for (slot, _) in batch.entries() {
                self.drop_slot(slot, handles);
            }
        }
        batch.count = 0;
        u64::from(!taken)
    }

    #[inline(never)]
    fn flush_alive(
        &self,
        batch: &mut WordBatch,
        report: &mut dyn FnMut(SurveyResult<'_>) -> bool,
    ) -> u64 {
        if batch.count == 0 {
            return 0;
        }
        let taken = report(SurveyResult::Alive(batch.words()));
        if taken {
            for (slot, word) in batch.entries() {
                if let Some(place) = self.slots.get(slot) {
                    place.sample.store(word, Ordering::Relaxed);
                }
            }
        }
        batch.count = 0;
        u64::from(!taken)
    }

    fn drop_slot(&self, slot: usize, handles: &dyn Handles) {
        let Some(place) = self.slots.get(slot) else { return };
        let handle = place.handle.swap(0, Ordering::AcqRel);
        if handle != 0 {
            handles.destroy(handle);
            self.free(slot);
        }
    }

    /// Gives up all handles: nobody knows the samples any more. False while a survey is going on.
    pub(crate) fn release_all(&self, handles: &dyn Handles) -> bool {
        if self.busy.swap(1, Ordering::Acquire) != 0 {
            return false;
        }
        for (slot, ..) in self.all_watched() {
            self.drop_slot(slot, handles);
        }
        self.level.store(0, Ordering::Relaxed);
        self.untidy.store(0, Ordering::Relaxed);
        self.allowed.store(0, Ordering::Relaxed);
        self.busy.store(0, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{
        FEWEST, Live, MOST, SPARE, SURVEY_NS, SurveyResult, USUAL, WatchOutcome, WatchSlot,
    };
    use crate::runtime::heap::Handles;
    use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use profiler_protocol::live::{chance, importance};
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    /// A heap: handle → (object, generation); object 0 is dead.
    #[derive(Default)]
    struct Heap(RefCell<BTreeMap<usize, (usize, u8)>>);

    impl Handles for Heap {
        fn create(&self, address: usize) -> Option<usize> {
            (address != 13).then(|| {
                self.0.borrow_mut().insert(address + 1_000_000, (address, 0));
                address + 1_000_000
            })
        }
        fn destroy(&self, handle: usize) {
            assert!(self.0.borrow_mut().remove(&handle).is_some(), "destroyed twice");
        }
        fn object(&self, handle: usize) -> Option<usize> {
            self.0.borrow().get(&handle).map(|o| o.0)
        }
        fn generation(&self, object: usize) -> Option<u8> {
            self.0.borrow().get(&(object + 1_000_000)).map(|o| o.1)
        }
    }

    impl Heap {
        fn set(&self, address: usize, object: usize, generation: u8) {
            self.0.borrow_mut().insert(address + 1_000_000, (object, generation));
        }
    }

    /// Made on a thread with room for it: a test's stack is small.
    fn live() -> Box<Live> {
        let zero = || AtomicU32::new(0);
        let make = move || {
            Box::new(Live {
                used: std::array::from_fn(|_| AtomicU64::new(0)),
                slots: std::array::from_fn(|_| WatchSlot::default()),
                count: zero(),
                limit: zero(),
                allowed: zero(),
                level: zero(),
                untidy: zero(),
                seed: AtomicU64::new(0),
                busy: zero(),
                watching: zero(),
            })
        };
        let thread =
            std::thread::Builder::new().stack_size(64 << 20).spawn(make).expect("a thread");
        thread.join().expect("it is made")
    }

    /// Nothing can be told meanwhile: room is made by `keep` alone.
    fn watch(live: &Live, heap: &Heap, address: usize, sample: u64, size: u64) -> WatchOutcome {
        live.watch(heap, address, sample, importance(size, 0), &mut |_| false)
    }

    fn survey(live: &Live, heap: &Heap, condemned: u8, take: bool) -> (Vec<u64>, Vec<u64>) {
        let (mut dead, mut alive) = (Vec::new(), Vec::new());
        live.survey(heap, condemned, &mut |found| {
            match found {
                SurveyResult::Dead(words) => dead.extend(words.iter()),
                SurveyResult::Alive(words) => alive.extend(words.iter()),
                SurveyResult::Dropped { .. } => panic!("a survey drops nothing"),
            }
            take
        });
        (dead, alive)
    }

    #[test]
    fn the_dead_are_reported_once_and_survivors_when_their_generation_changes() {
        let (live, heap) = (live(), Heap::default());
        for n in 1..=3 {
            assert_eq!(watch(&live, &heap, n, n as u64, 24), WatchOutcome::Watched { level: 0 });
        }
        heap.set(1, 0, 0);
        heap.set(2, 2, 1);
        assert_eq!(survey(&live, &heap, 0, true), (vec![1], vec![2 << 8 | 1]));
        assert_eq!(survey(&live, &heap, 0, true), (vec![], vec![]));
        assert_eq!(heap.0.borrow().len(), 2, "the dead one's handle is gone");
        heap.set(2, 0, 1);
        assert_eq!(
            survey(&live, &heap, 0, true).0,
            [0u64; 0],
            "a gen-0 collection does not touch generation 1"
        );
        assert_eq!(survey(&live, &heap, 1, true).0, [2]);
    }

    /// Lowers the level while a handle is made.
    struct Lowering<'a>(&'a Live, Heap);

    impl Handles for Lowering<'_> {
        fn create(&self, address: usize) -> Option<usize> {
            self.0.level.store(0, Ordering::Relaxed);
            self.1.create(address)
        }

        fn destroy(&self, handle: usize) {
            self.1.destroy(handle);
        }

        fn object(&self, handle: usize) -> Option<usize> {
            self.1.object(handle)
        }

        fn generation(&self, object: usize) -> Option<u8> {
            self.1.generation(object)
        }
    }

    #[test]
    fn an_object_bears_the_level_it_was_chosen_at() {
        let live = live();
        let lowering = Lowering(&live, Heap::default());
        let first = (1..1000u64).find_map(|sample| {
            live.level.store(8, Ordering::Relaxed);
            match live.watch(
                &lowering,
                sample as usize + 100,
                sample,
                importance(24, 0),
                &mut |_| false,
            ) {
                WatchOutcome::Downsampled => None,
                other => Some(other),
            }
        });
        assert_eq!((first, live.level()), (Some(WatchOutcome::Watched { level: 8 }), 0));
    }

    #[test]
    fn whoever_may_make_a_handle_is_seen() {
        let live = live();
        assert!(!live.is_anybody_watching());
        let (one, other) = (live.watching(), live.watching());
        drop(one);
        assert!(live.is_anybody_watching());
        drop(other);
        assert!(!live.is_anybody_watching());
    }

    #[test]
    fn reports_the_ring_cannot_take_are_made_again() {
        let (live, heap) = (live(), Heap::default());
        watch(&live, &heap, 1, 1, 24);
        watch(&live, &heap, 2, 2, 24);
        heap.set(1, 0, 0);
        heap.set(2, 2, 1);
        assert_eq!(survey(&live, &heap, 2, false), (vec![1], vec![2 << 8 | 1]));
        assert_eq!(survey(&live, &heap, 2, true), (vec![1], vec![2 << 8 | 1]));
        assert_eq!(survey(&live, &heap, 2, true), (vec![], vec![]));
    }

    #[test]
    fn handles_are_bounded_and_come_back() {
        let (live, heap) = (live(), Heap::default());
        assert_eq!(watch(&live, &heap, 13, 13, 24), WatchOutcome::Refused);
        let room = USUAL + USUAL / SPARE;
        for n in 0..room {
            assert_eq!(
                watch(&live, &heap, n + 100, n as u64, 24),
                WatchOutcome::Watched { level: 0 }
            );
        }
        assert_eq!(watch(&live, &heap, 50, 5000, 24), WatchOutcome::Full);
        assert!(live.release_all(&heap));
        assert!(heap.0.borrow().is_empty());
        live.set_limit(128);
        let has_room = |n: usize| {
            matches!(watch(&live, &heap, n + 100, n as u64, 24), WatchOutcome::Watched { .. })
        };
        assert_eq!(
            (0..1000).filter(|&n| has_room(n)).count(),
            (FEWEST + FEWEST / SPARE).next_multiple_of(64)
        );
        live.set_limit(u64::MAX);
        assert_eq!(live.allowed(), MOST);
    }

    /// What a daemon would know of the watched objects: sample → (size, highest level).
    type Told = BTreeMap<u64, (u64, u8)>;

    fn keep(live: &Live, heap: &Heap, told: &mut Told, take: bool) {
        live.keep(heap, &mut |found| {
            let SurveyResult::Dropped { level, samples } = found else { panic!("{found:?}") };
            if take {
                told.retain(|&sample, _| !samples.iter().any(|dropped| dropped == sample));
                told.values_mut().for_each(|(_, highest)| *highest = level.max(*highest));
            }
            take
        });
    }

    const RUNS: u64 = 150;

    /// Objects come and most of them die; what is watched is to stand for all that live, on average
    /// over draws.
    #[test]
    fn a_full_set_stands_for_all_that_lives_without_bias() {
        let size = |n: u64| [24, 1_000, 90_000, 2_000_000][(n % 4) as usize];
        let lives = |n: u64| n.is_multiple_of(3);
        let (live, mut errors, mut watched) = (live(), Vec::new(), 0);
        for seed in 0..RUNS {
            let (heap, mut told) = (Heap::default(), Told::new());
            live.set_limit(256);
            live.set_seed(u64::wrapping_mul(seed, 0x1234_5678_9abc_def1));
            for n in 0..3_000u64 {
                let address = n as usize + 100;
                if let WatchOutcome::Watched { level } = watch(&live, &heap, address, n, size(n)) {
                    told.insert(n, (size(n), level));
                    if !lives(n) {
                        heap.set(address, 0, 0);
                    }
                }
                if n % 16 == 0 {
                    // Sometimes the ring has no room: then it is said later.
                    keep(&live, &heap, &mut told, n % 64 != 0);
                }
                if n % 500 == 499 {
                    let (dead, _) = survey(&live, &heap, 2, true);
                    told.retain(|sample, _| !dead.contains(sample));
                }
            }
            keep(&live, &heap, &mut told, true);
            let (dead, _) = survey(&live, &heap, 2, true);
            told.retain(|sample, _| !dead.contains(sample));
            assert_eq!(told.len(), heap.0.borrow().len(), "both know the same objects");
            let estimate: f64 = told
                .values()
                .map(|&(size, level)| size as f64 / chance(importance(size, 0), level))
                .sum();
            let truth: f64 = (0..3_000).filter(|&n| lives(n)).map(|n| size(n) as f64).sum();
            errors.push(estimate / truth - 1.0);
            watched += told.len();
            live.release_all(&heap);
        }
        let mean = errors.iter().sum::<f64>() / RUNS as f64;
        let spread =
            (errors.iter().map(|e| (e - mean).powi(2)).sum::<f64>() / (RUNS - 1) as f64).sqrt();
        // Four standard errors of the mean, and the set was full most of the time.
        assert!(mean.abs() < 4.0 * spread / (RUNS as f64).sqrt(), "{mean} of {spread}");
        assert!(spread > 0.01 && spread < 0.2, "{spread}");
        assert!(watched / RUNS as usize > 100, "{}", watched / RUNS as usize);
    }

    #[test]
    fn when_the_service_thread_is_late_room_is_made_by_who_needs_it() {
        let (live, heap, mut dropped) = (live(), Heap::default(), 0);
        live.set_limit(256);
        let mut downsampled = 0;
        for n in 0..5_000u64 {
            let watched = live.watch(&heap, n as usize + 100, n, importance(24, 0), &mut |found| {
                let SurveyResult::Dropped { samples, .. } = found else { panic!("{found:?}") };
                dropped += samples.iter().count();
                true
            });
            assert!(!matches!(watched, WatchOutcome::Full | WatchOutcome::Refused), "{watched:?}");
            downsampled += usize::from(watched == WatchOutcome::Downsampled);
        }
        assert_eq!(heap.0.borrow().len() + dropped + downsampled, 5_000);
        assert!(heap.0.borrow().len() > 150, "{}", heap.0.borrow().len());
    }

    #[test]
    fn the_level_falls_when_there_is_room_again() {
        let (live, heap, mut told) = (live(), Heap::default(), Told::new());
        live.set_limit(256);
        for n in 0..280 {
            watch(&live, &heap, n + 100, n as u64, 24);
        }
        keep(&live, &heap, &mut told, true);
        let (level, left) = (live.level(), heap.0.borrow().len());
        assert!(level > 0 && left <= 224 && left > 100, "{level} {left}");
        keep(&live, &heap, &mut told, true);
        assert_eq!(live.level(), level, "not while it is half full");
        for n in 0..280 {
            if heap.0.borrow().contains_key(&(n + 1_000_100)) {
                heap.set(n + 100, 0, 0);
            }
        }
        survey(&live, &heap, 2, true);
        for _ in 0..50 {
            keep(&live, &heap, &mut told, true);
        }
        assert_eq!(live.level(), 0);
    }

    #[test]
    fn a_survey_that_takes_too_long_makes_the_set_smaller() {
        let (live, heap, mut told) = (live(), Heap::default(), Told::new());
        for n in 0..4_000 {
            watch(&live, &heap, n + 100, n as u64, 24);
        }
        assert!(!live.account(live.watched(), SURVEY_NS, 2));
        assert!(live.account(live.watched(), SURVEY_NS * 4, 0));
        assert_eq!(live.allowed(), 1_000);
        assert!(
            !live.account(live.watched(), SURVEY_NS * 2, 2),
            "half of what is left to be dropped is no news"
        );
        keep(&live, &heap, &mut told, true);
        assert!(heap.0.borrow().len() <= 1_000, "{}", heap.0.borrow().len());
        assert!(live.account(live.watched(), SURVEY_NS * 1_000, 2));
        assert_eq!(live.allowed(), FEWEST);
        live.set_limit(USUAL as u64);
        assert_eq!(live.allowed(), FEWEST, "said again, for a reason of its own");
        // Who asks for many, accepts what they take.
        live.set_limit(65_536);
        assert!(!live.account(live.watched(), 6_000_000, 2));
    }

    #[test]
    fn a_set_that_was_made_smaller_grows_while_it_is_cheap_and_full() {
        let (live, heap, mut told) = (live(), Heap::default(), Told::new());
        let mut samples = 0..;
        let mut fill = || {
            // Those that are told of are dropped at once: what is left is what chance chose.
            for n in samples.by_ref().take(20_000) {
                watch(&live, &heap, n as usize + 100, n, 24);
                if n % 64 == 0 {
                    keep(&live, &heap, &mut told, true);
                }
            }
        };
        fill();
        assert!(live.account(live.watched(), SURVEY_NS * 3, 2));
        fill();
        let small = live.allowed();
        assert!(small < USUAL / 2);
        live.account(live.watched(), SURVEY_NS / 2 + 1, 2);
        live.account(live.watched(), SURVEY_NS / 2, 1);
        assert_eq!(live.allowed(), small, "it was not cheap, or not a look at all of them");
        assert!(!live.account(live.watched(), SURVEY_NS / 2, 2));
        assert_eq!(live.allowed(), small + small / 8);
        for _ in 0..3 {
            live.account(live.watched(), SURVEY_NS / 2, 2);
        }
        assert!(live.allowed() < small * 3 / 2, "as long as it has not filled up");
        for _ in 0..20 {
            fill();
            live.account(live.watched(), SURVEY_NS / 2, 2);
        }
        assert_eq!(live.allowed(), USUAL);
        assert!(heap.0.borrow().len() > USUAL * 3 / 4, "{}", heap.0.borrow().len());
    }

    #[test]
    fn a_mass_death_is_reported_in_batches_that_fit_a_record() {
        let (live, heap) = (live(), Heap::default());
        for n in 0..1000usize {
            watch(&live, &heap, n + 100, n as u64, 24);
            heap.set(n + 100, 0, 0);
        }
        let mut dead = survey(&live, &heap, 0, true).0;
        dead.sort_unstable();
        assert_eq!(dead, (0..1000).collect::<Vec<_>>());
    }
}
