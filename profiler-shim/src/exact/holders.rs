//! Who holds what: the roots and references of each type as a full collection has left them. At its
//! end, when MONITOR_GC is set, the runtime goes through all roots and then through all living
//! objects, unless the profiler refuses. That takes longer than the collection, so it is let do so
//! only after full collections, and only as often as keeps it a twentieth of the time. One
//! thread's, while the world stands still.

use super::classes::Classes;
use super::table::TableWriter;
use crate::region::lasting;
use crate::runtime::heap::Objects;
use core::sync::atomic::{AtomicU64, Ordering};
use profiler_protocol::exact::{HELD_WORDS, MOST_TYPES, ROOT_KINDS, head, of_type};

/// So many times as long as a look took nobody looks again.
const REST: u64 = 20;
/// COR_PRF_GC_ROOT_WEAKREF: it holds nothing.
const WEAK: u32 = 2;

/// The look in progress, and when there may be another one.
pub(crate) struct HolderScan {
    /// Words `of_type::ALIVE` on of each type.
    sums: &'static [AtomicU64],
    /// 1 from the beginning of a full collection that is to be looked at to its end.
    open: AtomicU64,
    /// When the runtime began to tell, 0 before.
    began_ns: AtomicU64,
    not_before_ns: AtomicU64,
}

impl HolderScan {
    /// Nobody has looked.
    #[must_use]
    pub(crate) fn new() -> Option<Self> {
        Some(Self {
            sums: lasting::whole(MOST_TYPES * HELD_WORDS)?,
            open: AtomicU64::new(0),
            began_ns: AtomicU64::new(0),
            not_before_ns: AtomicU64::new(0),
        })
    }

    /// A full collection begins; it is looked at when it is time.
    pub(crate) fn begin(&self, now_ns: u64) {
        let is_time = now_ns >= self.not_before_ns.load(Ordering::Relaxed);
        self.open.store(u64::from(is_time), Ordering::Relaxed);
        self.began_ns.store(0, Ordering::Relaxed);
    }

    /// True while what the runtime tells is noted.
    #[inline]
    #[must_use]
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed) != 0
    }

    /// The runtime begins to tell, or has begun.
    #[inline(never)]
    pub(crate) fn told(&self, table: &TableWriter, now_ns: fn() -> u64) {
        if self.began_ns.load(Ordering::Relaxed) == 0 {
            self.began_ns.store(now_ns().max(1), Ordering::Relaxed);
            let types = (table.get(head::TYPES) as usize).saturating_mul(HELD_WORDS);
            self.sums.iter().take(types).for_each(|sum| sum.store(0, Ordering::Relaxed));
        }
    }

    #[inline(never)]
    fn add(&self, row: usize, word: usize, by: u64) {
        let at = row.wrapping_mul(HELD_WORDS).wrapping_add(word.wrapping_sub(of_type::ALIVE));
        if let Some(sum) = self.sums.get(at) {
            sum.store(sum.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
        }
    }

    /// Roots: object, COR_PRF_GC_ROOT_KIND, COR_PRF_GC_ROOT_FLAGS.
    pub(crate) fn roots(
        &self,
        classes: &Classes,
        runtime: &impl Objects,
        roots: impl Iterator<Item = (usize, u32, u32)>,
    ) {
        for (object, kind, _) in
            roots.filter(|(object, _, flags)| *object != 0 && flags & WEAK == 0)
        {
            let kind = if (kind as usize) < ROOT_KINDS { kind as usize } else { 0 };
            let row = runtime.class_of(object).map_or(0, |class| classes.row(class));
            self.add(row, of_type::ROOTS.wrapping_add(kind), 1);
        }
    }

    /// A living object, and those its fields or elements refer to.
    #[inline]
    pub(crate) fn object(
        &self,
        classes: &Classes,
        runtime: &impl Objects,
        class: usize,
        to: &[usize],
    ) {
        let row = classes.row(class);
        self.add(row, of_type::ALIVE, 1);
        self.add(row, of_type::REFERENCES, to.len() as u64);
        // Elements of an array are mostly of one class.
        let mut last = (0, 0);
        for object in to {
            let class = runtime.class_of(*object).unwrap_or(0);
            if class != last.0 {
                last = (class, classes.row(class));
            }
            self.add(last.1, of_type::REFERENCED, 1);
        }
    }

    /// The collection is over: writes what was told, if anything was, as that of collection
    /// `index`. Answers when the runtime began to tell.
    pub(crate) fn end(&self, table: &TableWriter, index: u64, now_ns: u64) -> Option<u64> {
        let began_ns = self.began_ns.swap(0, Ordering::Relaxed);
        if self.open.swap(0, Ordering::Relaxed) == 0 || began_ns == 0 {
            return None;
        }
        for (row, sums) in
            self.sums.chunks_exact(HELD_WORDS).take(table.get(head::TYPES) as usize).enumerate()
        {
            let of = table.type_row(row);
            for (word, sum) in sums.iter().enumerate() {
                of.set(of_type::ALIVE.wrapping_add(word), sum.load(Ordering::Relaxed));
            }
        }
        let took_ns = now_ns.saturating_sub(began_ns);
        table.set(head::LOOKED_AT, index.wrapping_add(1));
        table.set(head::LOOKED_NS, took_ns);
        self.not_before_ns
            .store(now_ns.saturating_add(took_ns.saturating_mul(REST)), Ordering::Relaxed);
        Some(began_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::{HolderScan, REST};
    use crate::exact::classes::Classes;
    use crate::exact::table::TableWriter;
    use crate::region::lasting;
    use crate::runtime::heap::{Objects, RuntimeHeap};
    use core::sync::atomic::{AtomicU64, Ordering};
    use profiler_protocol::exact::{TABLE_WORDS, TYPE_WORDS, TYPES_AT, head, of_type};

    /// An object's class is its address without the last hundred.
    struct Hundreds;

    impl Objects for Hundreds {
        fn class_of(&self, object: usize) -> Option<usize> {
            Some(object / 100 * 100)
        }
    }

    impl RuntimeHeap for Hundreds {
        fn size(&self, _: usize) -> Option<u64> {
            None
        }
        fn is_frozen(&self, _: usize) -> bool {
            false
        }
        fn generations(&self, _: &[AtomicU64]) -> usize {
            0
        }
        fn identity(&self, class: usize) -> (u64, bool) {
            (class as u64, false)
        }
        fn word(&self, _: usize) -> u64 {
            0
        }
    }

    static BEGAN: AtomicU64 = AtomicU64::new(0);

    #[test]
    fn a_look_sums_roots_and_references_and_none_follows_at_once() {
        let table =
            TableWriter::new(lasting::shared(c"perfusion-test", TABLE_WORDS, TABLE_WORDS).unwrap());
        table.publish(1, 0, 0);
        let (classes, holders) = (Classes::new().unwrap(), HolderScan::new().unwrap());
        let rows = [100, 200].map(|class| classes.find(class, &table, &Hundreds).class.row());
        let of = |row: usize, word: usize| table.get(TYPES_AT + row * TYPE_WORDS + word);
        for (round, now_ns) in [1000, 1000 + (REST + 1) * 10].into_iter().enumerate() {
            holders.begin(now_ns);
            assert!(holders.is_open());
            BEGAN.store(now_ns, Ordering::Relaxed);
            holders.told(&table, || BEGAN.load(Ordering::Relaxed));
            // A handle, a weak one, a root of a kind nobody knows, and none.
            holders.roots(
                &classes,
                &Hundreds,
                [(101, 3, 0), (101, 3, 2), (201, 9, 0), (0, 1, 0)].into_iter(),
            );
            holders.object(&classes, &Hundreds, 100, &[201, 202, 101, 900]);
            holders.object(&classes, &Hundreds, 200, &[]);
            assert_eq!(holders.end(&table, 7 + round as u64, now_ns + 10), Some(now_ns));
            assert_eq!(
                (table.get(head::LOOKED_AT), table.get(head::LOOKED_NS)),
                (8 + round as u64, 10)
            );
            let all: Vec<u64> =
                (of_type::ALIVE..=of_type::REFERENCED).map(|word| of(rows[0], word)).collect();
            assert_eq!(all, [1, 0, 0, 0, 1, 4, 1]);
            let all: Vec<u64> =
                (of_type::ALIVE..=of_type::REFERENCED).map(|word| of(rows[1], word)).collect();
            assert_eq!(all, [1, 1, 0, 0, 0, 0, 2]);
            assert_eq!(of(0, of_type::REFERENCED), 1, "of a type nobody allocated");
        }
        // So soon after the last one nobody looks, and what is known stays.
        holders.begin(1000 + (REST + 1) * 10 + 20);
        assert!(!holders.is_open());
        assert_eq!(holders.end(&table, 9, 2000), None);
        assert_eq!(table.get(head::LOOKED_AT), 9);
        // Nor is anything written when the runtime tells nothing.
        holders.begin(1 << 40);
        assert_eq!((holders.is_open(), holders.end(&table, 9, 2 << 40)), (true, None));
    }
}
