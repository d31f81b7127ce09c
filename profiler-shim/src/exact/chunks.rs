//! What threads have allocated since the last collection: entries in chunks, each of which one thread fills. All chunks are free again
//! after a collection, which has then sorted their objects into the dead and the living.

use super::chance::Chance;
use super::table::Table;
use crate::exact::classes::Class;
use crate::region::lasting;
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
pub struct Entry {
    /// Address / 8, and the type's row.
    place: u64,
    /// Size / 8, and milliseconds from the start to its birth.
    what: u64,
}

impl Entry {
    /// An object. A size of 32 GiB and more is one word less than that.
    #[inline]
    #[must_use]
    pub fn new(address: usize, row: usize, size_words: u64, born_ms: u64) -> Self {
        let size = if size_words > u64::from(u32::MAX) { u64::from(u32::MAX) } else { size_words };
        Self {
            place: (address as u64) >> 3 << ROW_BITS | row as u64 & ((1 << ROW_BITS) - 1),
            what: size << 32 | born_ms & 0xffff_ffff,
        }
    }

    /// From its words.
    #[inline]
    #[must_use]
    pub fn from_words([place, what]: [u64; 2]) -> Self {
        Self { place, what }
    }

    /// Its words.
    #[inline]
    #[must_use]
    pub fn words(self) -> [u64; 2] {
        [self.place, self.what]
    }

    /// Address.
    #[inline]
    #[must_use]
    pub fn address(self) -> usize {
        (self.place >> ROW_BITS << 3) as usize
    }

    /// The same object at another address.
    #[inline]
    #[must_use]
    pub fn moved_to(self, address: usize) -> Self {
        let row = self.place & ((1 << ROW_BITS) - 1);
        Self { place: (address as u64) >> 3 << ROW_BITS | row, what: self.what }
    }

    /// The type's row.
    #[inline]
    #[must_use]
    pub fn row(self) -> usize {
        (self.place & ((1 << ROW_BITS) - 1)) as usize
    }

    /// Bytes.
    #[inline]
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.what >> 32 << 3
    }

    /// Milliseconds from the start to its birth.
    #[inline]
    #[must_use]
    pub fn born_ms(self) -> u32 {
        self.what as u32
    }
}

/// All chunks and who fills which.
pub struct Chunks {
    slots: &'static [AtomicU64],
    words: &'static [AtomicU64],
    /// Chunks in use.
    used: AtomicU64,
    /// Moves on with each collection: chunks of earlier epochs are not the threads' any more.
    epoch: AtomicU64,
}

/// What is known of one thread: its control block, chunk and the epoch of that, the class it met last, what is known of it and in which epoch; its
/// countdown to the next stack. Its words are its thread's alone.
#[derive(Clone, Copy)]
pub struct Slot(&'static [AtomicU64; SLOT_WORDS]);

impl Slot {
    /// The class this thread met last, if it is this one.
    #[inline]
    #[must_use]
    pub fn known(self, class: usize, epoch: u64) -> Option<Class> {
        let [_, _, _, last, info, at, ..] = self.0;
        let same = last.load(Ordering::Relaxed) == class as u64 && at.load(Ordering::Relaxed) == epoch;
        same.then(|| Class::from_word(info.load(Ordering::Relaxed)))
    }

    /// Its countdown.
    #[inline]
    #[must_use]
    pub fn chance(&self) -> Chance<'_> {
        let [.., left, state] = self.0;
        Chance { left, state }
    }

    /// Remembers it, once all is known of it.
    #[inline]
    pub fn remember(self, class: usize, info: Class, epoch: u64) {
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
    pub fn new() -> Option<Self> {
        Some(Self {
            slots: lasting::room(SLOTS * SLOT_WORDS, SLOTS * SLOT_WORDS)?,
            words: lasting::room(MOST_WORDS, LEAST_WORDS)?,
            used: AtomicU64::new(0),
            // Slots begin with 0: no thread has a chunk.
            epoch: AtomicU64::new(1),
        })
    }

    /// The slot of the thread with this control block; `None` when there is none left near its place.
    #[inline]
    pub fn slot(&self, thread: usize) -> Option<Slot> {
        // Control blocks are 64 bytes and more apart.
        let mut at = ((thread as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as usize;
        for _ in 0..PROBES {
            let begin = (at % SLOTS) * SLOT_WORDS;
            let slot: &[AtomicU64; SLOT_WORDS] = self.slots.get(begin..)?.first_chunk()?;
            let [key, ..] = slot;
            let found = key.load(Ordering::Relaxed);
            if found == thread as u64 {
                return Some(Slot(slot));
            }
            if found == 0
                && key.compare_exchange(0, thread as u64, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                return Some(Slot(slot));
            }
            at = at.wrapping_add(1);
        }
        None
    }

    /// Notes an object. False when there is no memory.
    #[inline]
    pub fn push(&self, slot: Slot, entry: Entry) -> bool {
        let [_, chunk, epoch, ..] = slot.0;
        // Relaxed: epochs change while this thread stands.
        if epoch.load(Ordering::Relaxed) == self.epoch.load(Ordering::Relaxed)
            && self.push_into(chunk.load(Ordering::Relaxed) as usize, entry)
        {
            return true;
        }
        self.push_into_new(slot, entry)
    }

    #[inline]
    fn push_into(&self, chunk: usize, entry: Entry) -> bool {
        let begin = chunk.wrapping_mul(CHUNK_WORDS);
        let Some(words) = self.words.get(begin..).and_then(|w| w.first_chunk::<CHUNK_WORDS>()) else {
            return false;
        };
        let [count, ..] = words;
        let used = count.load(Ordering::Relaxed) as usize;
        if used >= CHUNK_ENTRIES {
            return false;
        }
        let at = used.wrapping_mul(2).wrapping_add(2);
        let (Some(first), Some(second)) = (words.get(at), words.get(at.wrapping_add(1))) else {
            return false;
        };
        let [place, what] = entry.words();
        first.store(place, Ordering::Relaxed);
        second.store(what, Ordering::Relaxed);
        // Release: pairs with the acquire in `each`, which runs beside this thread when it counts only.
        count.store(used.wrapping_add(1) as u64, Ordering::Release);
        true
    }

    #[cold]
    fn push_into_new(&self, slot: Slot, entry: Entry) -> bool {
        let [_, chunk, epoch, ..] = slot.0;
        let new = self.used.fetch_add(1, Ordering::Relaxed);
        if !self.push_into(new as usize, entry) {
            return false;
        }
        chunk.store(new, Ordering::Relaxed);
        epoch.store(self.epoch.load(Ordering::Relaxed), Ordering::Relaxed);
        true
    }

    /// Calls `each` with every entry, and whether it was counted before; counts them.
    #[inline]
    fn each_entry(&self, from_counted: bool, mut each: impl FnMut(Entry, bool)) {
        let chunks = self.words.chunks_exact(CHUNK_WORDS).take(self.used.load(Ordering::Acquire) as usize);
        for chunk in chunks {
            let Some(chunk) = chunk.first_chunk::<CHUNK_WORDS>() else { continue };
            let [count, counted, entries @ ..] = chunk;
            let used = (count.load(Ordering::Acquire) as usize).min(CHUNK_ENTRIES);
            let before = (counted.load(Ordering::Relaxed) as usize).min(used);
            let skip = if from_counted { before } else { 0 };
            for (at, pair) in entries.chunks_exact(2).enumerate().take(used).skip(skip) {
                let [place, what] = pair else { continue };
                let words = [place.load(Ordering::Relaxed), what.load(Ordering::Relaxed)];
                each(Entry::from_words(words), at < before);
            }
            counted.store(used as u64, Ordering::Relaxed);
        }
    }

    /// Counts what is not counted yet. Beside running threads: what they note meanwhile is counted the next time.
    pub fn count_all(&self, table: &Table) {
        let (mut objects, mut bytes) = (0u64, 0u64);
        self.each_entry(true, |entry, _| {
            objects = objects.wrapping_add(1);
            bytes = bytes.wrapping_add(entry.bytes());
            count(table, entry);
        });
        table.add(head::OBJECTS, objects);
        table.add(head::OBJECT_BYTES, bytes);
    }

    /// Counts what is not counted yet, hands every object to `each`, and forgets them all. While the world stands still.
    pub fn take_all(&self, table: &Table, mut each: impl FnMut(Entry)) {
        let (mut objects, mut bytes) = (0u64, 0u64);
        self.each_entry(false, |entry, is_counted| {
            if !is_counted {
                objects = objects.wrapping_add(1);
                bytes = bytes.wrapping_add(entry.bytes());
                count(table, entry);
            }
            each(entry);
        });
        table.add(head::OBJECTS, objects);
        table.add(head::OBJECT_BYTES, bytes);
        for chunk in self.words.chunks_exact(CHUNK_WORDS).take(self.used.swap(0, Ordering::Relaxed) as usize)
        {
            for word in chunk.iter().take(2) {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }
}

#[inline]
fn count(table: &Table, entry: Entry) {
    let row = table.type_row(entry.row());
    row.add(of_type::OBJECTS, 1);
    row.add(of_type::BYTES, entry.bytes());
}

#[cfg(test)]
mod tests {
    use super::{CHUNK_ENTRIES, Chunks, Entry};
    use crate::exact::table::Table;
    use crate::region::lasting;
    use profiler_protocol::exact::{TABLE_WORDS, head};

    #[test]
    fn an_entry_keeps_what_it_was_made_of() {
        let entry = Entry::new(0x7fff_ffff_fff8, 16_383, 3, 0xffff_fffe);
        assert_eq!(
            (entry.address(), entry.row(), entry.bytes(), entry.born_ms()),
            (0x7fff_ffff_fff8, 16_383, 24, 0xffff_fffe)
        );
        let moved = entry.moved_to(0x10);
        assert_eq!((moved.address(), moved.row(), moved.bytes()), (0x10, 16_383, 24));
        assert_eq!(Entry::new(8, 0, 1 << 40, 0).bytes(), u64::from(u32::MAX) * 8);
    }

    #[test]
    fn each_object_is_counted_once_whenever_that_is() {
        let table = Table::new(lasting::shared(c"perfusion-test", TABLE_WORDS).unwrap());
        let chunks = Chunks::new().unwrap();
        let (first, second) = (chunks.slot(0x1000).unwrap(), chunks.slot(0x2000).unwrap());
        let push = |slot, n: usize| {
            for at in 0..n {
                assert!(chunks.push(slot, Entry::new(0x10_0000 + at * 24, 5, 3, 0)));
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
