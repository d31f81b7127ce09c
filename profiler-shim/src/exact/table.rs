//! The shared table: the only words the daemon sees. Changed by one thread at a time (the lock of
//! exact mode), but for losses, names and modules.

use core::sync::atomic::{AtomicU64, Ordering, fence};
use profiler_protocol::exact::{
    COLLECTIONS_AT, MAGIC, MOST_TYPES, NAME_BYTES, NAMES_AT, SURVIVALS_AT, TABLE_BYTES, TYPE_WORDS,
    TYPES_AT, VERSION, head, of_type,
};

use crate::region::lasting::{GrowableWords, TableMemory};
use crate::syscall;

/// The table's words. Collections and what survived each take most of it, and few programs have
/// many: those words are opened in steps.
pub(crate) struct TableWriter {
    words: &'static [AtomicU64],
    collections: GrowableWords,
    survivals: GrowableWords,
}

impl TableWriter {
    /// Over fresh memory.
    #[must_use]
    pub(crate) fn new(memory: TableMemory) -> Self {
        let (words, collections, survivals) = memory.in_parts(COLLECTIONS_AT, SURVIVALS_AT);
        Self { words, collections, survivals }
    }

    /// The word at this place; `None` behind the last, or where there is no memory for it.
    #[inline]
    fn word(&self, at: usize) -> Option<&'static AtomicU64> {
        match self.words.get(at) {
            Some(word) => Some(word),
            None => self.later_word(at),
        }
    }

    #[cold]
    #[inline(never)]
    fn later_word(&self, at: usize) -> Option<&'static AtomicU64> {
        let (room, at) = match at.checked_sub(SURVIVALS_AT) {
            Some(at) => (&self.survivals, at),
            None => (&self.collections, at.wrapping_sub(COLLECTIONS_AT)),
        };
        if room.opens(at.wrapping_add(1)) { room.words().get(at) } else { None }
    }

    /// Writes the header; the magic comes last, with release ordering, which pairs with the
    /// daemon's first read.
    pub(crate) fn publish(&self, owner: u64, runtime: u64, began_ns: u64) {
        for (at, value) in [
            (head::VERSION, VERSION),
            (head::BYTES, TABLE_BYTES as u64),
            (head::OWNER, owner),
            (head::PID, u64::from(syscall::process_id())),
            (head::RUNTIME, runtime),
            (head::STARTED_NS, began_ns),
            // Row 0 is there from the start.
            (head::TYPES, 1),
        ] {
            self.set(at, value);
        }
        if let Some(word) = self.words.get(head::MAGIC) {
            word.store(MAGIC, Ordering::Release);
        }
    }

    /// A word.
    #[must_use]
    pub(crate) fn get(&self, at: usize) -> u64 {
        self.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Sets a word.
    pub(crate) fn set(&self, at: usize, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Adds to a word that one thread at a time changes.
    #[inline]
    pub(crate) fn add(&self, at: usize, by: u64) {
        if let Some(word) = self.word(at) {
            word.store(word.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
        }
    }

    /// Adds one to a word that any thread may change.
    pub(crate) fn count(&self, at: usize) {
        self.count_more(at, 1);
    }

    /// The same of several.
    pub(crate) fn count_more(&self, at: usize, by: u64) {
        if let Some(word) = self.word(at) {
            word.fetch_add(by, Ordering::Relaxed);
        }
    }

    /// The row of a type.
    #[inline]
    #[must_use]
    pub(crate) fn type_row(&self, row: usize) -> RowWriter<'_> {
        let at = TYPES_AT.wrapping_add((row % MOST_TYPES).wrapping_mul(TYPE_WORDS));
        let words = self.words.get(at..at.wrapping_add(TYPE_WORDS));
        RowWriter(words.and_then(|words| words.first_chunk()))
    }

    /// A row for another type; 0 when there is none left.
    pub(crate) fn new_type(&self, class: usize) -> usize {
        let Some(types) = self.words.get(head::TYPES) else { return 0 };
        let mut next = types.load(Ordering::Relaxed);
        while (next as usize) < MOST_TYPES {
            match types.compare_exchange(
                next,
                next.wrapping_add(1),
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    self.type_row(next as usize).set(of_type::CLASS, class as u64);
                    return next as usize;
                }
                Err(now) => next = now,
            }
        }
        0
    }

    /// True when a type has its name.
    pub(crate) fn is_named(&self, row: usize) -> bool {
        self.type_row(row).get(of_type::NAME) != 0
    }

    /// Names a type. False when there is no room.
    pub(crate) fn name(&self, row: usize, name: &str, module: &str) -> bool {
        let bytes = name.len().wrapping_add(module.len());
        let padded = bytes.next_multiple_of(8);
        let Some(used) = self.words.get(head::NAMES) else { return false };
        let at = used.fetch_add(padded as u64, Ordering::Relaxed) as usize;
        if name.is_empty() || at.saturating_add(padded) > NAME_BYTES {
            return false;
        }
        let mut text = name.bytes().chain(module.bytes());
        for word in
            self.words.get(NAMES_AT.wrapping_add(at / 8)..).unwrap_or(&[]).iter().take(padded / 8)
        {
            let mut value = [0; 8];
            for (to, from) in value.iter_mut().zip(&mut text) {
                *to = from;
            }
            word.store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
        let word = at as u64 | (name.len() as u64) << 32 | (module.len() as u64) << 48;
        // Release, so that whoever sees it sees the text.
        if let Some(place) = self.type_row(row).0.and_then(|row| row.get(of_type::NAME)) {
            place.store(word, Ordering::Release);
        }
        true
    }

    /// Makes changes that a reader is to see together: the sequence word is odd meanwhile.
    pub(crate) fn change(&self, make: impl FnOnce(&Self)) {
        self.add(head::SEQUENCE, 1);
        fence(Ordering::Release);
        make(self);
        if let Some(word) = self.words.get(head::SEQUENCE) {
            word.fetch_add(1, Ordering::Release);
        }
    }
}

/// A type's row.
#[derive(Clone, Copy)]
pub(crate) struct RowWriter<'a>(Option<&'a [AtomicU64; TYPE_WORDS]>);

impl RowWriter<'_> {
    /// Adds to a word.
    #[inline]
    pub(crate) fn add(self, at: usize, by: u64) {
        if let Some(word) = self.0.and_then(|row| row.get(at)) {
            word.store(word.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
        }
    }

    /// A word.
    pub(crate) fn get(self, at: usize) -> u64 {
        self.0.and_then(|row| row.get(at)).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Sets a word.
    pub(crate) fn set(self, at: usize, value: u64) {
        if let Some(word) = self.0.and_then(|row| row.get(at)) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// The sum over objects that come one after the other and are alike: programs make many of a kind
/// at a time, and the table changes once for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunSum<K> {
    /// What they are.
    pub(crate) of: K,
    /// How many.
    pub(crate) objects: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
}

impl<K: Copy + Default + PartialEq> RunSum<K> {
    /// One more. If it is unlike the others, those are answered, and the sum begins with it.
    #[inline]
    pub(crate) fn add(&mut self, of: K, bytes: u64) -> Option<Self> {
        if of == self.of {
            self.objects = self.objects.wrapping_add(1);
            self.bytes = self.bytes.wrapping_add(bytes);
            return None;
        }
        Some(core::mem::replace(self, Self { of, objects: 1, bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::{RunSum, TableWriter};
    use crate::region::lasting;
    use profiler_protocol::exact::TABLE_WORDS;

    #[test]
    fn what_several_threads_count_at_once_is_all_there() {
        let table =
            TableWriter::new(lasting::shared(c"perfusion-test", TABLE_WORDS, TABLE_WORDS).unwrap());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100_000).for_each(|_| table.count_more(0, 3)));
            }
        });
        assert_eq!(table.get(0), 1_200_000);
    }
    #[test]
    fn a_run_ends_with_the_first_that_is_unlike() {
        let mut run = RunSum::default();
        let ended: Vec<RunSum<usize>> = [(7, 24), (7, 32), (9, 8), (0, 1)]
            .into_iter()
            .filter_map(|(of, bytes)| run.add(of, bytes))
            .collect();
        let run_of = |of, objects, bytes| RunSum { of, objects, bytes };
        assert_eq!(ended, [run_of(0, 0, 0), run_of(7, 2, 56), run_of(9, 1, 8)]);
        assert_eq!(run, run_of(0, 1, 1));
    }
}
