//! ClassIDs → rows of the table. Any thread finds and adds without a lock. After an unload a class
//! may be another one at the same address: each is then compared with what it was when it is met
//! again.

use super::table::TableWriter;
use crate::region::lasting;
use crate::repeat::mix;
use crate::runtime::heap::RuntimeHeap;
use core::sync::atomic::{AtomicU64, Ordering};

const SLOTS: usize = 65_536;
/// Words of a slot: ClassID, [`PackedClass`], the epoch it was known to be the same in, its
/// identity.
const SLOT_WORDS: usize = 4;
const PROBES: u64 = 64;

/// What the allocation callback needs of a class, in one word: row (19 bits), flags (3), bytes that
/// an object stands for beyond its own (10), size / 8 (upper half). 0: nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedClass(u64);

/// Set always, so that no class is 0.
const IS_CLASS: u64 = 1 << 19;
/// All is known of it.
const DESCRIBED: u64 = 1 << 20;
/// All its objects are of one size.
const FIXED: u64 = 1 << 21;
/// Where [`PackedClass::silent_bytes`] are.
const SILENT: u32 = 22;
const SILENT_BITS: u64 = 0x3ff << SILENT;
/// What an object stands for beyond itself at most: one in 200 gets a stack then. What code does
/// changes, and how many it tells of is known only after the next collection.
const MOST_SILENT_BYTES: u64 = 512;

impl PackedClass {
    fn new(row: usize) -> Self {
        Self(row as u64 & (IS_CLASS - 1) | IS_CLASS)
    }

    /// From its word.
    #[inline]
    #[must_use]
    pub(crate) fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Its word.
    #[inline]
    #[must_use]
    pub(crate) fn word(self) -> u64 {
        self.0
    }

    /// Row in the table.
    #[inline]
    #[must_use]
    pub(crate) fn row(self) -> usize {
        (self.0 & (IS_CLASS - 1)) as usize
    }

    /// True when nothing about it will change.
    #[inline]
    #[must_use]
    pub(crate) fn is_described(self) -> bool {
        self.0 & DESCRIBED != 0
    }

    /// Bytes of objects that nobody was told of ([`super::unseen`]) for each object of this class
    /// that somebody was told of, as far as chance takes them for that object's: else hardly any
    /// would have a stack.
    #[inline]
    #[must_use]
    pub(crate) fn silent_bytes(self) -> u64 {
        self.0 >> SILENT & (SILENT_BITS >> SILENT)
    }

    fn with_silent_bytes(self, bytes: u64) -> Self {
        Self(self.0 & !SILENT_BITS | bytes.min(MOST_SILENT_BYTES) << SILENT)
    }

    /// Size of its objects / 8, if they all have the same.
    #[inline]
    #[must_use]
    pub(crate) fn fixed_size_words(self) -> Option<u64> {
        (self.0 & FIXED != 0).then_some(self.0 >> 32)
    }
}

/// What a look for a class found.
#[derive(Clone, Copy)]
pub(crate) struct ClassLookup {
    /// The class.
    pub(crate) class: PackedClass,
    /// It is met for the first time, and the finder is to describe it.
    pub(crate) is_new: bool,
}

/// All classes.
pub(crate) struct Classes {
    slots: &'static [AtomicU64],
    epoch: AtomicU64,
}

impl Classes {
    /// None.
    #[must_use]
    pub(crate) fn new() -> Option<Self> {
        Some(Self { slots: lasting::whole(SLOTS * SLOT_WORDS)?, epoch: AtomicU64::new(1) })
    }

    /// Changes with every unload, and when objects stand for more or less than before.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Something was unloaded.
    pub(crate) fn next_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// The slot of `class`, or a free one near its place.
    fn slot(&self, class: usize) -> Option<&[AtomicU64; SLOT_WORDS]> {
        let start = mix(class as u64);
        for probe in 0..PROBES {
            let begin = (start.wrapping_add(probe) as usize % SLOTS) * SLOT_WORDS;
            let slot: &[AtomicU64; SLOT_WORDS] = self.slots.get(begin..)?.first_chunk()?;
            let [id, ..] = slot;
            match id.compare_exchange(0, class as u64, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(slot),
                Err(there) if there == class as u64 => return Some(slot),
                Err(_) => {}
            }
        }
        None
    }

    /// Row of a class that objects were allocated of; 0 for another one.
    #[inline(never)]
    #[must_use]
    pub(crate) fn row(&self, class: usize) -> usize {
        let start = mix(class as u64);
        for probe in 0..PROBES {
            let begin = (start.wrapping_add(probe) as usize % SLOTS) * SLOT_WORDS;
            let Some([id, info, ..]) = self.slots.get(begin..) else { return 0 };
            match id.load(Ordering::Acquire) {
                0 => return 0,
                there if there == class as u64 => {
                    return PackedClass(info.load(Ordering::Acquire)).row();
                }
                _ => {}
            }
        }
        0
    }

    /// Finds a class, or adds it.
    #[inline(never)]
    pub(crate) fn find(
        &self,
        class: usize,
        table: &TableWriter,
        runtime: &impl RuntimeHeap,
    ) -> ClassLookup {
        let others = PackedClass::new(0);
        let Some([_, info, epoch, identity]) = self.slot(class) else {
            return ClassLookup { class: others, is_new: false };
        };
        let now = self.epoch();
        let mut found = info.load(Ordering::Acquire);
        while found != 0 {
            let known = identity.load(Ordering::Acquire);
            // Without an identity it is being described, by whoever met it first.
            let is_same = epoch.load(Ordering::Acquire) == now
                || known == 0
                || runtime.identity(class).0 == known;
            if !is_same {
                break;
            }
            // What made it look the same may be of another class that somebody has just put in its
            // place: these stores are behind that of the word.
            let again = info.load(Ordering::Acquire);
            if again == found {
                epoch.store(now, Ordering::Release);
                return ClassLookup { class: PackedClass(found), is_new: false };
            }
            found = again;
        }
        let new = PackedClass::new(table.new_type(class));
        // Two threads that meet it at once have a row each, of the same name; the later one is used
        // from then on.
        info.store(new.word(), Ordering::Release);
        identity.store(0, Ordering::Release);
        epoch.store(now, Ordering::Release);
        ClassLookup { class: new, is_new: true }
    }

    /// Notes how many bytes there are that nobody was told of for each object of a class that
    /// somebody was told of, if it is still that of this row. True when that is another number than
    /// before.
    pub(crate) fn stands_for(&self, class: usize, row: usize, silent_bytes: u64) -> bool {
        let Some([_, info, ..]) = self.slot(class) else { return false };
        let known = PackedClass(info.load(Ordering::Acquire));
        let before = known.silent_bytes();
        let silent_bytes = silent_bytes.min(MOST_SILENT_BYTES);
        if known.row() != row
            || !known.is_described()
            || silent_bytes.abs_diff(before) <= before / 4
        {
            return false;
        }
        let now = known.with_silent_bytes(silent_bytes).word();
        info.compare_exchange(known.word(), now, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Notes what is known of a class by now; `size_words` is that of one of its objects.
    pub(crate) fn described(
        &self,
        class: usize,
        size_words: u64,
        is_string: bool,
        runtime: &impl RuntimeHeap,
    ) {
        let Some([_, info, _, identity]) = self.slot(class) else { return };
        let (is, is_array) = runtime.identity(class);
        let row = PackedClass(info.load(Ordering::Acquire)).row();
        let fixed = !is_array && !is_string && size_words != 0 && size_words <= u64::from(u32::MAX);
        let size = if fixed { FIXED | size_words << 32 } else { 0 };
        identity.store(is, Ordering::Release);
        info.store(PackedClass::new(row).word() | DESCRIBED | size, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::Classes;
    use crate::exact::table::TableWriter;
    use crate::region::lasting;
    use crate::runtime::heap::RuntimeHeap;
    use core::cell::Cell;
    use core::sync::atomic::AtomicU64;
    use profiler_protocol::exact::{MOST_TYPES, TABLE_WORDS};

    /// The identity that every class has.
    struct Known(Cell<u64>);

    impl RuntimeHeap for Known {
        fn size(&self, _: usize) -> Option<u64> {
            None
        }
        fn is_frozen(&self, _: usize) -> bool {
            false
        }
        fn generations(&self, _: &[AtomicU64]) -> usize {
            0
        }
        fn identity(&self, _: usize) -> (u64, bool) {
            (self.0.get(), false)
        }
        fn word(&self, _: usize) -> u64 {
            0
        }
    }

    #[test]
    fn a_class_keeps_its_row_until_another_one_has_its_address() {
        let table =
            TableWriter::new(lasting::shared(c"perfusion-test", TABLE_WORDS, TABLE_WORDS).unwrap());
        table.publish(1, 0, 0);
        let (classes, runtime) = (Classes::new().unwrap(), Known(Cell::new(7)));
        let find = |class| classes.find(class, &table, &runtime);
        let first = find(0x1000);
        assert!(first.is_new && !find(0x1000).is_new && find(0x2000).is_new);
        assert_eq!((classes.row(0x1000), classes.row(0x3000)), (first.class.row(), 0));
        assert_eq!(first.class.fixed_size_words(), None);
        classes.described(0x1000, 4, false, &runtime);
        let known = find(0x1000);
        assert_eq!(
            (known.class.fixed_size_words(), known.class.row()),
            (Some(4), first.class.row())
        );
        classes.next_epoch();
        assert!(!find(0x1000).is_new);
        classes.next_epoch();
        runtime.0.set(8);
        let other = find(0x1000);
        assert!(other.is_new && other.class.row() != first.class.row());
    }

    #[test]
    fn an_object_stands_for_those_that_nobody_was_told_of() {
        let table =
            TableWriter::new(lasting::shared(c"perfusion-test", TABLE_WORDS, TABLE_WORDS).unwrap());
        table.publish(1, 0, 0);
        let (classes, runtime) = (Classes::new().unwrap(), Known(Cell::new(7)));
        let row = classes.find(0x1000, &table, &runtime).class.row();
        assert!(!classes.stands_for(0x1000, row, 8192), "nobody has described it yet");
        classes.described(0x1000, 3, false, &runtime);
        for (bytes, noted) in [
            (0, false),
            (24, true),
            (29, false),
            (8184, true),
            (8192, false),
            (400, false),
            (380, true),
        ] {
            assert_eq!(classes.stands_for(0x1000, row, bytes), noted, "{bytes}");
            let class = classes.find(0x1000, &table, &runtime).class;
            assert_eq!((class.row(), class.fixed_size_words()), (row, Some(3)));
            assert!(!noted || class.silent_bytes() == bytes.min(512), "{class:?}");
        }
        assert!(!classes.stands_for(0x1000, row + 1, 24), "another class by now");
    }

    #[test]
    fn types_beyond_the_table_share_its_first_row() {
        let table =
            TableWriter::new(lasting::shared(c"perfusion-test", TABLE_WORDS, TABLE_WORDS).unwrap());
        table.publish(1, 0, 0);
        let (classes, runtime) = (Classes::new().unwrap(), Known(Cell::new(7)));
        let rows: Vec<usize> = (1..=MOST_TYPES + 1)
            .map(|n| classes.find(n << 6, &table, &runtime).class.row())
            .collect();
        assert_eq!(&rows[..3], &[1, 2, 3]);
        assert_eq!(&rows[MOST_TYPES - 1..], &[0, 0]);
    }
}
