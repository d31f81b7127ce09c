//! Which sampled objects are alive: a weak handle for each, looked at when a collection has ended. Bounded; lock-free for the
//! threads that allocate.

use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use profiler_protocol::record::Words;

const GROUPS: usize = 64;
/// Most objects watched at a time.
pub const MOST: usize = GROUPS * 64;
const BATCH: usize = 256;

/// The runtime's handles (Info13, .NET 7+).
pub trait Handles {
    /// A weak handle on the object at `address`.
    fn create(&self, address: usize) -> Option<usize>;
    /// Gives it up.
    fn destroy(&self, handle: usize);
    /// The object, 0 when it is dead, `None` when the runtime refuses to say.
    fn object(&self, handle: usize) -> Option<usize>;
    /// The generation a living object is in (3: large, 4: pinned object heap).
    fn generation(&self, object: usize) -> Option<u8>;
}

#[derive(Default)]
struct Slot {
    /// 0 while being filled or unused.
    handle: AtomicUsize,
    /// sample << 8 | generation.
    sample: AtomicU64,
}

/// All watched objects.
pub struct Live {
    /// Bit set: the slot has an owner.
    used: [AtomicU64; GROUPS],
    slots: [Slot; MOST],
    /// Most objects, 0 for [`MOST`].
    limit: AtomicU32,
    /// 1 while a survey or a release goes through the slots; neither waits for the other.
    busy: AtomicU32,
}

/// What became of the wish to watch an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// It is watched.
    Watched,
    /// All handles are in use.
    Full,
    /// The runtime gave no handle.
    Refused,
}

/// What a survey found out.
#[derive(Clone, Copy, Debug)]
pub enum Found<'a> {
    /// Sample numbers.
    Dead(Words<'a>),
    /// sample << 8 | generation.
    Alive(Words<'a>),
}

/// A batch of words on the stack, with the slots they came from.
struct Batch {
    bytes: [u8; BATCH * 8],
    slots: [usize; BATCH],
    count: usize,
}

impl Batch {
    const fn new() -> Self {
        Self { bytes: [0; BATCH * 8], slots: [0; BATCH], count: 0 }
    }

    fn push(&mut self, slot: usize, word: u64) -> bool {
        let at = self.count.wrapping_mul(8);
        let (Some(bytes), Some(place)) = (self.bytes.get_mut(at..), self.slots.get_mut(self.count)) else {
            return true;
        };
        for (to, from) in bytes.iter_mut().zip(word.to_le_bytes()) {
            *to = from;
        }
        *place = slot;
        self.count = self.count.wrapping_add(1);
        self.count >= BATCH
    }

    fn words(&self) -> Words<'_> {
        Words::new(self.bytes.get(..self.count.wrapping_mul(8)).unwrap_or(&[]))
    }

    fn entries(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.slots.iter().copied().zip(self.words().iter())
    }
}

impl Live {
    /// Watches the object at `address` as sample number `sample`.
    pub fn watch(&self, handles: &dyn Handles, address: usize, sample: u64) -> Watch {
        let Some(slot) = self.claim(sample) else { return Watch::Full };
        let Some(place) = self.slots.get(slot) else { return Watch::Full };
        let Some(handle) = handles.create(address) else {
            self.free(slot);
            return Watch::Refused;
        };
        place.sample.store(sample << 8, Ordering::Relaxed);
        // Release: pairs with the acquire load in `survey` and `release_all`.
        place.handle.store(handle, Ordering::Release);
        Watch::Watched
    }

    /// Sets how many objects are watched at most.
    pub fn set_limit(&self, most: u64) {
        self.limit.store(u32::try_from(most.min(MOST as u64)).unwrap_or(0), Ordering::Relaxed);
    }

    fn claim(&self, sample: u64) -> Option<usize> {
        let limit = match self.limit.load(Ordering::Relaxed) {
            0 => MOST,
            limit => (limit as usize).min(MOST),
        };
        let groups = limit.div_ceil(64).max(1);
        let first = (sample % groups as u64) as usize;
        for step in 0..groups {
            let group = first.wrapping_add(step);
            let group = if group >= groups { group.wrapping_sub(groups) } else { group };
            let Some(word) = self.used.get(group) else { continue };
            let mut bits = word.load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = bits.trailing_ones();
                // Acquire: what the slot's last owner wrote happened before it freed the bit.
                match word.compare_exchange_weak(bits, bits | 1 << bit, Ordering::Acquire, Ordering::Relaxed)
                {
                    Ok(_) => return Some(group << 6 | bit as usize),
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
        }
    }

    /// Looks at every watched object that a collection of generation `condemned` can have touched. `report` answers false when it
    /// cannot take a batch: those objects stay as they are until the next survey. Answers the batches put off, or `None` when
    /// the slots are being released.
    pub fn survey(
        &self,
        handles: &dyn Handles,
        condemned: u8,
        report: &mut dyn FnMut(Found<'_>) -> bool,
    ) -> Option<u64> {
        if self.busy.swap(1, Ordering::Acquire) != 0 {
            return None;
        }
        let mut deferred = 0u64;
        let (mut dead, mut alive) = (Batch::new(), Batch::new());
        for slot in 0..MOST {
            let Some((place, handle)) = self.watched(slot) else { continue };
            let word = place.sample.load(Ordering::Relaxed);
            let generation = (word & 0xff) as u8;
            // Large and pinned objects die in generation-2 collections.
            if generation.min(2) > condemned {
                continue;
            }
            match handles.object(handle) {
                None => {}
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

    fn watched(&self, slot: usize) -> Option<(&Slot, usize)> {
        let word = self.used.get(slot >> 6)?.load(Ordering::Relaxed);
        if word & 1 << (slot & 63) == 0 {
            return None;
        }
        let place = self.slots.get(slot)?;
        match place.handle.load(Ordering::Acquire) {
            0 => None,
            handle => Some((place, handle)),
        }
    }

    fn flush_dead(
        &self,
        batch: &mut Batch,
        handles: &dyn Handles,
        report: &mut dyn FnMut(Found<'_>) -> bool,
    ) -> u64 {
        if batch.count == 0 {
            return 0;
        }
        let taken = report(Found::Dead(batch.words()));
        if taken {
            for (slot, _) in batch.entries() {
                self.drop_slot(slot, handles);
            }
        }
        batch.count = 0;
        u64::from(!taken)
    }

    fn flush_alive(&self, batch: &mut Batch, report: &mut dyn FnMut(Found<'_>) -> bool) -> u64 {
        if batch.count == 0 {
            return 0;
        }
        let taken = report(Found::Alive(batch.words()));
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
    pub fn release_all(&self, handles: &dyn Handles) -> bool {
        if self.busy.swap(1, Ordering::Acquire) != 0 {
            return false;
        }
        for slot in 0..MOST {
            if self.watched(slot).is_some() {
                self.drop_slot(slot, handles);
            }
        }
        self.busy.store(0, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{Found, Handles, Live, MOST, Slot, Watch};
    use core::sync::atomic::{AtomicU32, AtomicU64};
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

    fn live() -> Live {
        Live {
            used: std::array::from_fn(|_| AtomicU64::new(0)),
            slots: std::array::from_fn(|_| Slot::default()),
            limit: AtomicU32::new(0),
            busy: AtomicU32::new(0),
        }
    }

    fn survey(live: &Live, heap: &Heap, condemned: u8, take: bool) -> (Vec<u64>, Vec<u64>) {
        let (mut dead, mut alive) = (Vec::new(), Vec::new());
        live.survey(heap, condemned, &mut |found| {
            match found {
                Found::Dead(words) => dead.extend(words.iter()),
                Found::Alive(words) => alive.extend(words.iter()),
            }
            take
        });
        (dead, alive)
    }

    #[test]
    fn the_dead_are_reported_once_and_survivors_when_their_generation_changes() {
        let (live, heap) = (live(), Heap::default());
        for n in 1..=3 {
            assert_eq!(live.watch(&heap, n, n as u64), Watch::Watched);
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

    #[test]
    fn reports_the_ring_cannot_take_are_made_again() {
        let (live, heap) = (live(), Heap::default());
        live.watch(&heap, 1, 1);
        live.watch(&heap, 2, 2);
        heap.set(1, 0, 0);
        heap.set(2, 2, 1);
        assert_eq!(survey(&live, &heap, 2, false), (vec![1], vec![2 << 8 | 1]));
        assert_eq!(survey(&live, &heap, 2, true), (vec![1], vec![2 << 8 | 1]));
        assert_eq!(survey(&live, &heap, 2, true), (vec![], vec![]));
    }

    #[test]
    fn handles_are_bounded_and_come_back() {
        let (live, heap) = (live(), Heap::default());
        assert_eq!(live.watch(&heap, 13, 13), Watch::Refused);
        for n in 0..MOST {
            assert_eq!(live.watch(&heap, n + 100, n as u64), Watch::Watched);
        }
        assert_eq!(live.watch(&heap, 50, 5000), Watch::Full);
        assert!(live.release_all(&heap));
        assert!(heap.0.borrow().is_empty());
        live.set_limit(128);
        let watched =
            (0..200usize).filter(|&n| live.watch(&heap, n + 100, n as u64) == Watch::Watched).count();
        assert_eq!(watched, 128);
    }

    #[test]
    fn a_mass_death_is_reported_in_batches_that_fit_a_record() {
        let (live, heap) = (live(), Heap::default());
        for n in 0..1000usize {
            live.watch(&heap, n + 100, n as u64);
            heap.set(n + 100, 0, 0);
        }
        let mut dead = survey(&live, &heap, 0, true).0;
        dead.sort_unstable();
        assert_eq!(dead, (0..1000).collect::<Vec<_>>());
    }
}
