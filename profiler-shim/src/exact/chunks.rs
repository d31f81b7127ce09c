//! What threads have allocated since the last collection: entries in chunks, each of which one
//! thread fills. All chunks are free again after a collection, which has then sorted their objects
//! into the dead and the living.

use super::chance::Chance;
use super::table::{RunSum, TableWriter};
use crate::exact::classes::PackedClass;
use crate::region::lasting::{self, GrowableWords};
use core::sync::atomic::{AtomicU64, Ordering};
use profiler_protocol::exact::{head, of_type};

/// Threads at a time (of different control blocks; those of ended threads are used again).
const SLOTS: usize = 16_384;
const SLOT_WORDS: usize = 8;
const PROBES: usize = 64;
/// Words of a chunk: entries in use, those of them that are counted, entries.
const CHUNK_WORDS: usize = 1024;
const CHUNK_ENTRIES: usize = (CHUNK_WORDS - 2) / 2;
/// Room for chunks: 64 GiB, or where there is less address space 64 MiB.
const MOST_WORDS: usize = 1 << 33;
const LEAST_WORDS: usize = 1 << 23;

/// Bits of an entry's first word that are the type's row.
const ROW_BITS: u32 = 19;

/// An object as it was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllocationEntry {
    /// Address / 8, and the type's row.
    place: u64,
    /// Size / 8, and milliseconds from the start to its birth.
    what: u64,
}

impl AllocationEntry {
    /// An object. A size of 32 GiB and more is one word less than that.
    #[inline]
    #[must_use]
    pub(crate) fn new(address: usize, row: usize, size_words: u64, born_ms: u64) -> Self {
        let size = if size_words > u64::from(u32::MAX) { u64::from(u32::MAX) } else { size_words };
        Self {
            place: (address as u64) >> 3 << ROW_BITS | row as u64 & ((1 << ROW_BITS) - 1),
            what: size << 32 | born_ms & 0xffff_ffff,
        }
    }

    /// From its words.
    #[inline]
    #[must_use]
    pub(crate) fn from_words([place, what]: [u64; 2]) -> Self {
        Self { place, what }
    }

    /// Its words.
    #[inline]
    #[must_use]
    pub(crate) fn words(self) -> [u64; 2] {
        [self.place, self.what]
    }

    /// Address.
    #[inline]
    #[must_use]
    pub(crate) fn address(self) -> usize {
        (self.place >> ROW_BITS << 3) as usize
    }

    /// The same object at another address.
    #[inline]
    #[must_use]
    pub(crate) fn moved_to(self, address: usize) -> Self {
        let row = self.place & ((1 << ROW_BITS) - 1);
        Self { place: (address as u64) >> 3 << ROW_BITS | row, what: self.what }
    }

    /// The type's row.
    #[inline]
    #[must_use]
    pub(crate) fn row(self) -> usize {
        (self.place & ((1 << ROW_BITS) - 1)) as usize
    }

    /// Bytes.
    #[inline]
    #[must_use]
    pub(crate) fn bytes(self) -> u64 {
        self.what >> 32 << 3
    }

    /// Milliseconds from the start to its birth.
    #[inline]
    #[must_use]
    pub(crate) fn born_ms(self) -> u32 {
        self.what as u32
    }
}

/// Where a thread's next entry goes: the chunk's count of entries, and two words behind it.
pub(crate) struct NextEntry<'a> {
    count: &'a AtomicU64,
    used: u64,
    place: &'a AtomicU64,
    what: &'a AtomicU64,
}

impl NextEntry<'_> {
    /// Writes it.
    #[inline]
    pub(crate) fn fill(self, entry: AllocationEntry) {
        let [place, what] = entry.words();
        self.place.store(place, Ordering::Relaxed);
        self.what.store(what, Ordering::Relaxed);
        // Release: pairs with the acquire in `each_chunk`, which runs beside this thread when it
        // counts only.
        self.count.store(self.used.wrapping_add(1), Ordering::Release);
    }
}

/// All chunks and who fills which.
pub(crate) struct Chunks {
    slots: &'static [AtomicU64],
    words: GrowableWords,
    /// Chunks in use.
    used: AtomicU64,
    /// Moves on with each collection: chunks of earlier epochs are not the threads' any more.
    epoch: AtomicU64,
}

/// What is known of one thread: its control block, chunk and the epoch of that, the class it met
/// last, what is known of it and in which epoch; its countdown to the next stack. Its words are its
/// thread's alone.
#[derive(Clone, Copy)]
pub(crate) struct ThreadSlot(&'static [AtomicU64; SLOT_WORDS]);

impl ThreadSlot {
    #[inline]
    fn thread(self) -> u64 {
        let [key, ..] = self.0;
        key.load(Ordering::Relaxed)
    }

    fn is_taken_by(self, thread: usize) -> bool {
        let [key, ..] = self.0;
        key.compare_exchange(0, thread as u64, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The class this thread met last, if it is this one.
    #[inline]
    #[must_use]
    pub(crate) fn known(self, class: usize, epoch: u64) -> Option<PackedClass> {
        let [_, _, _, last, info, at, ..] = self.0;
        let same =
            last.load(Ordering::Relaxed) == class as u64 && at.load(Ordering::Relaxed) == epoch;
        same.then(|| PackedClass::from_word(info.load(Ordering::Relaxed)))
    }

    /// Its countdown.
    #[inline]
    #[must_use]
    pub(crate) fn chance(&self) -> Chance<'_> {
        let [.., left, state] = self.0;
        Chance { left, state }
    }

    /// Remembers it, once all is known of it.
    #[inline]
    pub(crate) fn remember(self, class: usize, info: PackedClass, epoch: u64) {
        let [_, _, _, last, known, at, ..] = self.0;
        if info.is_described() {
            last.store(class as u64, Ordering::Relaxed);
            known.store(info.word(), Ordering::Relaxed);
            at.store(epoch, Ordering::Relaxed);
        }
    }
}

impl Chunks {
    /// Without any object.
    #[must_use]
    pub(crate) fn new() -> Option<Self> {
        Some(Self {
            slots: lasting::whole(SLOTS * SLOT_WORDS)?,
            words: GrowableWords::new(MOST_WORDS, LEAST_WORDS),
            used: AtomicU64::new(0),
            // Slots begin with 0: no thread has a chunk.
            epoch: AtomicU64::new(1),
        })
    }

    /// False where there was no address space.
    #[must_use]
    pub(crate) fn has_room(&self) -> bool {
        self.words.most() != 0
    }

    /// Where the slot of the thread with this control block is, if no other thread's is there.
    #[inline]
    fn slot_number(thread: usize) -> usize {
        // Control blocks are 64 bytes and more apart.
        ((thread as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as usize
    }

    #[inline]
    fn slot_at(&self, number: usize) -> Option<ThreadSlot> {
        let begin = (number % SLOTS) * SLOT_WORDS;
        Some(ThreadSlot(self.slots.get(begin..)?.first_chunk()?))
    }

    /// The slot of the thread with this control block, if it is where it is looked for first.
    #[inline]
    pub(crate) fn first_slot(&self, thread: usize) -> Option<ThreadSlot> {
        self.slot_at(Self::slot_number(thread)).filter(|slot| slot.thread() == thread as u64)
    }

    /// The same wherever it is, or a new one; `None` when there is none left near its place.
    #[inline(never)]
    pub(crate) fn slot(&self, thread: usize) -> Option<ThreadSlot> {
        let mut at = Self::slot_number(thread);
        for _ in 0..PROBES {
            let slot = self.slot_at(at)?;
            let found = slot.thread();
            if found == thread as u64 || found == 0 && slot.is_taken_by(thread) {
                return Some(slot);
            }
            at = at.wrapping_add(1);
        }
        None
    }

    /// Where this thread's next entry goes; `None` when its chunk is full or a collection has taken
    /// it.
    #[inline]
    pub(crate) fn place(&self, slot: ThreadSlot) -> Option<NextEntry<'_>> {
        let [_, chunk, epoch, ..] = slot.0;
        // Relaxed: epochs change while this thread stands.
        if epoch.load(Ordering::Relaxed) != self.epoch.load(Ordering::Relaxed) {
            return None;
        }
        self.place_in(chunk.load(Ordering::Relaxed) as usize)
    }

    #[inline]
    fn place_in(&self, chunk: usize) -> Option<NextEntry<'_>> {
        let words: &[AtomicU64; CHUNK_WORDS] =
            self.words.words().get(chunk.wrapping_mul(CHUNK_WORDS)..)?.first_chunk()?;
        let [count, _, entries @ ..] = words;
        let used = count.load(Ordering::Relaxed);
        let at = (used as usize).wrapping_mul(2);
        let (place, what) = (entries.get(at)?, entries.get(at.wrapping_add(1))?);
        Some(NextEntry { count, used, place, what })
    }

    /// Notes an object. False when there is no memory.
    #[inline(never)]
    pub(crate) fn push(&self, slot: ThreadSlot, entry: AllocationEntry) -> bool {
        let Some(place) = self.place(slot).or_else(|| self.place_in_new(slot)) else {
            return false;
        };
        place.fill(entry);
        true
    }

    /// The same in another chunk, which is the thread's from now on.
    #[cold]
    fn place_in_new(&self, slot: ThreadSlot) -> Option<NextEntry<'_>> {
        let [_, chunk, epoch, ..] = slot.0;
        let new = self.used.fetch_add(1, Ordering::Relaxed);
        let end = (new as usize).wrapping_add(1).wrapping_mul(CHUNK_WORDS);
        let place = if self.words.opens(end) { self.place_in(new as usize) } else { None }?;
        chunk.store(new, Ordering::Relaxed);
        epoch.store(self.epoch.load(Ordering::Relaxed), Ordering::Relaxed);
        Some(place)
    }

    /// Calls `each` with every chunk's number of entries that are counted, and its entries.
    #[inline]
    fn each_chunk(&self, mut each: impl FnMut(&AtomicU64, &[AtomicU64])) {
        // Relaxed: what is in a chunk is ordered by its count.
        let chunks = self
            .words
            .words()
            .chunks_exact(CHUNK_WORDS)
            .take(self.used.load(Ordering::Relaxed) as usize);
        for chunk in chunks {
            let Some(chunk) = chunk.first_chunk::<CHUNK_WORDS>() else { continue };
            let [count, counted, entries @ ..] = chunk;
            // Acquire: pairs with the release in `fill`.
            let used = (count.load(Ordering::Acquire) as usize).min(CHUNK_ENTRIES);
            each(counted, entries.get(..used.wrapping_mul(2)).unwrap_or(&[]));
        }
    }

    /// Calls `each` with every entry, and whether it was counted before; counts them.
    #[inline]
    fn each_entry(&self, from_counted: bool, mut each: impl FnMut(AllocationEntry, bool)) {
        self.each_chunk(|counted, entries| {
            let before = counted.load(Ordering::Relaxed) as usize;
            let skip = if from_counted { before } else { 0 };
            for (at, entry) in in_chunk(entries).enumerate().skip(skip) {
                each(entry, at < before);
            }
            counted.store(entries.len() as u64 / 2, Ordering::Relaxed);
        });
    }

    /// Calls `each` with every object and its bytes. While the world stands still.
    pub(crate) fn each_object(&self, mut each: impl FnMut(usize, u64)) {
        self.each_chunk(|_, entries| {
            in_chunk(entries).for_each(|entry| each(entry.address(), entry.bytes()));
        });
    }

    /// Counts what is not counted yet. Beside running threads: what they note meanwhile is counted
    /// the next time.
    pub(crate) fn count_all(&self, table: &TableWriter) {
        let mut sums = AllocationSums::default();
        self.each_entry(true, |entry, _| sums.add(table, entry));
        sums.end(table);
    }

    /// Counts what is not counted yet, hands every object to `each`, and forgets them all. While
    /// the world stands still.
    pub(crate) fn take_all(&self, table: &TableWriter, mut each: impl FnMut(AllocationEntry)) {
        let mut sums = AllocationSums::default();
        self.each_entry(false, |entry, is_counted| {
            if !is_counted {
                sums.add(table, entry);
            }
            each(entry);
        });
        sums.end(table);
        let used = self.used.swap(0, Ordering::Relaxed) as usize;
        for chunk in self.words.words().chunks_exact(CHUNK_WORDS).take(used) {
            for word in chunk.iter().take(2) {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }
}

/// The entries in so many words of a chunk.
#[inline]
fn in_chunk(words: &[AtomicU64]) -> impl Iterator<Item = AllocationEntry> {
    words.chunks_exact(2).filter_map(|pair| {
        let [place, what] = pair else { return None };
        Some(AllocationEntry::from_words([
            place.load(Ordering::Relaxed),
            what.load(Ordering::Relaxed),
        ]))
    })
}

/// What was allocated: of all types, and of those that came last.
#[derive(Default)]
struct AllocationSums {
    objects: u64,
    bytes: u64,
    run: RunSum<usize>,
}

impl AllocationSums {
    #[inline]
    fn add(&mut self, table: &TableWriter, entry: AllocationEntry) {
        if let Some(ended) = self.run.add(entry.row(), entry.bytes()) {
            self.count(table, ended);
        }
    }

    fn count(&mut self, table: &TableWriter, run: RunSum<usize>) {
        self.objects = self.objects.wrapping_add(run.objects);
        self.bytes = self.bytes.wrapping_add(run.bytes);
        let row = table.type_row(run.of);
        row.add(of_type::OBJECTS, run.objects);
        row.add(of_type::BYTES, run.bytes);
    }

    fn end(mut self, table: &TableWriter) {
        let last = core::mem::take(&mut self.run);
        self.count(table, last);
        table.add(head::OBJECTS, self.objects);
        table.add(head::OBJECT_BYTES, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::{AllocationEntry, CHUNK_ENTRIES, Chunks};
    use crate::exact::table::TableWriter;
    use crate::region::lasting;
    use profiler_protocol::exact::{TABLE_WORDS, head};

    #[test]
    fn an_entry_keeps_what_it_was_made_of() {
        let entry = AllocationEntry::new(0x7fff_ffff_fff8, 16_383, 3, 0xffff_fffe);
        assert_eq!(
            (entry.address(), entry.row(), entry.bytes(), entry.born_ms()),
            (0x7fff_ffff_fff8, 16_383, 24, 0xffff_fffe)
        );
        let moved = entry.moved_to(0x10);
        assert_eq!((moved.address(), moved.row(), moved.bytes()), (0x10, 16_383, 24));
        assert_eq!(AllocationEntry::new(8, 0, 1 << 40, 0).bytes(), u64::from(u32::MAX) * 8);
    }

    #[test]
    fn each_object_is_counted_once_whenever_that_is() {
        let table =
            TableWriter::new(lasting::shared(c"perfusion-test", TABLE_WORDS, TABLE_WORDS).unwrap());
        let chunks = Chunks::new().unwrap();
        let (first, second) = (chunks.slot(0x1000).unwrap(), chunks.slot(0x2000).unwrap());
        let push = |slot, n: usize| {
            for at in 0..n {
                assert!(chunks.push(slot, AllocationEntry::new(0x10_0000 + at * 24, 5, 3, 0)));
            }
        };
        push(first, 10);
        chunks.count_all(&table);
        push(first, CHUNK_ENTRIES);
        push(second, 3);
        chunks.count_all(&table);
        push(second, 4);
        let mut taken = 0;
        chunks.take_all(&table, |_| taken += 1);
        let all = CHUNK_ENTRIES + 17;
        assert_eq!(taken, all);
        assert_eq!(table.get(head::OBJECTS), all as u64);
        assert_eq!(table.get(head::OBJECT_BYTES), all as u64 * 24);
        chunks.take_all(&table, |_| panic!("all were taken"));
        push(first, 1);
        chunks.count_all(&table);
        assert_eq!(table.get(head::OBJECTS), all as u64 + 1);
    }
}
