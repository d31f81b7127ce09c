//! Objects that no callback tells of. Since .NET 10 values are boxed (`CastHelpers.Box`), what
//! reflection answers is made and delegates are combined by a function of the runtime's that takes
//! memory from the thread's buffer (`RuntimeTypeHandle.InternalAllocNoChecks_FastPath`) and does
//! not look whether a profiler wants to know. They are found while the world stands still and the
//! buffers' rests are filled: whatever lies in generation 0, where all that is new is born but
//! large objects, and is not known is one of them. Arrays and strings are always told of.
//!
//! The runtime itself can go through generation 0 right after GarbageCollectionStarted
//! (`DiagGCStart`, for ObjectsAllocatedByClass), so each object there begins where the one before
//! it ends.

use super::chunks::Chunks;
use super::ranges::RangeCursor;
use super::survey::{CollectionSurvey, Generations};
use crate::region::lasting::GrowableWords;
use crate::runtime::heap::RuntimeHeap;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

/// Words of the bitmap: for 256 GiB of generation 0 or, where address space is counted, 2 GiB.
const MOST_WORDS: usize = 1 << 29;
const LEAST_WORDS: usize = 1 << 22;
/// What objects begin at multiples of (`DATA_ALIGNMENT`).
const ALIGNMENT: u64 = 8;
/// No object is shorter (`MIN_OBJECT_SIZE`).
const LEAST_BYTES: u64 = 24;
/// In a method table's first word: its objects have components (arrays, strings, free space), of so
/// many bytes as the low half of these bits says (`enum_flag_HasComponentSize`); the upper half is
/// what an object has without any (`m_BaseSize`).
const HAS_COMPONENTS: u64 = 1 << 31;
/// The lower half of a row's first word; here the upper one is the part's first word of the bitmap.
const GENERATION: u64 = 0xffff_ffff;
/// Words of a row: bytes in use and bytes reserved.
const IN_USE: usize = 2;
const RESERVED: usize = 3;
/// Bits of an object's first word that are not its method table's address.
const FLAGS: u64 = 7;

/// Bytes of heap that a word of the bitmap is for.
const WORD_BYTES: u64 = 64 * ALIGNMENT;

/// Whether to look for such objects, and the edges of runs of known ones.
pub(crate) struct Unseen {
    /// One bit where a run of known objects begins and one where it ends; none where two runs
    /// touch. The parts of generation 0 have their words one behind the other.
    edges: GrowableWords,
    /// 1 in a runtime that makes such objects, while its method tables are as they are read here.
    wanted: AtomicU32,
}

/// An object that was met in the heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeapObject {
    /// Its class.
    pub(crate) class: usize,
    /// Its bytes, rounded up.
    pub(crate) bytes: u64,
    /// It is an array, a string or free space.
    pub(crate) has_components: bool,
}

/// A look at the heap.
pub(crate) struct HeapScan<'a> {
    edges: &'a GrowableWords,
    generations: &'a Generations,
    cursor: RangeCursor<'a, 4, 1, 3>,
    /// Which word of a generation's row tells how long it is.
    length: usize,
    /// The last run of known objects.
    run: (u64, u64),
    /// How far [`HeapScan::is_unseen`] has come, where the next edge is, and whether what is before
    /// that is known.
    at: u64,
    next: u64,
    is_known: bool,
}

/// A part of generation 0.
#[derive(Clone, Copy)]
struct YoungRange {
    /// Its place, from the first address to the one behind the last.
    first: u64,
    end: u64,
    /// Its first word of the bitmap.
    word: u64,
}

impl YoungRange {
    /// Number of the bit for an address, or for its end.
    #[inline]
    fn bit(self, address: u64) -> u64 {
        self.word.wrapping_mul(64).wrapping_add(address.wrapping_sub(self.first) / ALIGNMENT)
    }
}

#[inline]
fn class_of(runtime: &impl RuntimeHeap, object: usize) -> usize {
    (runtime.word(object) & !FLAGS) as usize
}

/// Meets the object at an address; `None` where there is none.
#[inline(never)]
pub(crate) fn meet(runtime: &impl RuntimeHeap, object: usize) -> Option<HeapObject> {
    let class = class_of(runtime, object);
    let about = if class == 0 { 0 } else { runtime.word(class) };
    let has_components = about & HAS_COMPONENTS != 0;
    let components =
        if has_components { runtime.word(object.wrapping_add(8)) & 0xffff_ffff } else { 0 };
    let bytes = (about >> 32).wrapping_add((about & 0xffff).wrapping_mul(components));
    let bytes = bytes.next_multiple_of(ALIGNMENT);
    (bytes >= LEAST_BYTES).then_some(HeapObject { class, bytes, has_components })
}

/// Calls `each` with every object of a gap. False: it does not end where the last of them does, or
/// there is something that is no object.
fn gap(
    runtime: &impl RuntimeHeap,
    is_class: impl Fn(usize) -> bool,
    gap: Range<u64>,
    mut each: impl FnMut(usize, HeapObject),
) -> bool {
    let (mut at, mut last) = (gap.start, 0);
    while at < gap.end {
        let class = class_of(runtime, at as usize);
        if class != last && !is_class(class) {
            return false;
        }
        last = class;
        let Some(met) = meet(runtime, at as usize) else { return false };
        each(at as usize, met);
        at = at.saturating_add(met.bytes);
    }
    at == gap.end
}

/// Whether a row whose first word this is is about generation 0.
#[inline]
fn is_youngest(about: u64) -> bool {
    about & GENERATION == 0
}

impl Default for Unseen {
    fn default() -> Self {
        Self::new()
    }
}

impl Unseen {
    /// Nothing is looked for.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self { edges: GrowableWords::new(MOST_WORDS, LEAST_WORDS), wanted: AtomicU32::new(0) }
    }

    /// From now on it is looked for them. Relaxed, as all of this word: nothing else hangs on it.
    pub(crate) fn want(&self) {
        self.wanted.store(1, Ordering::Relaxed);
    }

    /// It is never looked for them again. False: nor was it before.
    pub(crate) fn give_up(&self) -> bool {
        self.wanted.swap(0, Ordering::Relaxed) != 0
    }

    /// True when it is looked for them.
    #[must_use]
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed) != 0
    }

    /// Begins a look at what is in generation 0 now: all that is known there is noted. `survey`
    /// knows where the generations are, and also how far they are in use if a collection is about
    /// to begin.
    #[must_use]
    pub(crate) fn look<'a>(
        &'a self,
        survey: &'a CollectionSurvey,
        chunks: &Chunks,
        runtime: &impl RuntimeHeap,
        collects: bool,
    ) -> HeapScan<'a> {
        let generations = survey.generations();
        let mut word = 0u64;
        for row in 0..generations.len() {
            let Some(of_row) = generations.memory().get(row.wrapping_mul(4)) else { break };
            let generation = of_row.load(Ordering::Relaxed) & GENERATION;
            // Whoever has no place there in 32 bits has none in the bitmap.
            of_row.store(
                generation | word.min(GENERATION) << GENERATION.count_ones(),
                Ordering::Relaxed,
            );
            if generation == 0 {
                word =
                    word.wrapping_add(generations.word(row, RESERVED) / WORD_BYTES).wrapping_add(1);
            }
        }
        let (run, at, next, is_known) = ((0, 0), 0, 0, false);
        let length = if collects { IN_USE } else { RESERVED };
        let cursor = generations.cursor();
        let mut look =
            HeapScan { edges: &self.edges, generations, cursor, length, run, at, next, is_known };
        chunks.each_object(|object, bytes| look.know(runtime, object, bytes));
        survey.each_youngest(|object, bytes| look.know(runtime, object, bytes));
        // The last run ends where there is no object.
        look.next_run(runtime, 0, 0);
        look
    }
}

impl HeapScan<'_> {
    /// The part of generation 0 that this row is about. `None`: it is about another generation, or
    /// the bitmap ends before it does.
    #[inline]
    fn part(&self, row: usize) -> Option<YoungRange> {
        let [about, first, bytes] =
            [0, 1, self.length].map(|word| self.generations.word(row, word));
        let part = YoungRange {
            first,
            end: first.saturating_add(bytes),
            word: about >> GENERATION.count_ones(),
        };
        let words = usize::try_from(part.bit(part.end) / 64).ok()?.checked_add(1)?;
        (is_youngest(about) && self.edges.opens(words)).then_some(part)
    }

    #[inline]
    fn find(&mut self, object: u64) -> Option<YoungRange> {
        self.cursor.find(object as usize).and_then(|row| self.part(row))
    }

    /// Notes an object that is known. They come one behind the other, as their threads made them.
    #[inline]
    fn know(&mut self, runtime: &impl RuntimeHeap, object: usize, bytes: u64) {
        let (_, end) = &mut self.run;
        if *end == object as u64 && bytes != 0 {
            *end = end.wrapping_add(bytes);
            return;
        }
        self.next_run(runtime, object, bytes);
    }

    /// Notes the run that has ended, and begins another one.
    #[inline(never)]
    fn next_run(&mut self, runtime: &impl RuntimeHeap, object: usize, bytes: u64) {
        let (first, end) = core::mem::take(&mut self.run);
        // What does not lie in it in whole is no object of its.
        if let Some(part) = self.find(first).filter(|part| end <= part.end) {
            for bit in [first, end].map(|address| part.bit(address)) {
                if let Some(word) = self.edges.words().get(bit as usize / 64) {
                    // One thread's: no other looks meanwhile.
                    word.store(word.load(Ordering::Relaxed) ^ 1 << (bit % 64), Ordering::Relaxed);
                }
            }
        }
        if self.find(object as u64).is_some() {
            // Without bytes it is one whose size the runtime did not tell.
            let bytes =
                if bytes == 0 { meet(runtime, object).map_or(0, |met| met.bytes) } else { bytes };
            self.run = (object as u64, (object as u64).wrapping_add(bytes));
        }
    }

    /// The first edge at `from` or behind it; the part's end when there is none before that.
    #[inline(never)]
    fn next_edge(&self, part: YoungRange, from: u64) -> u64 {
        let (first, last) = (part.bit(from), part.bit(part.end));
        let mut mask = u64::MAX << (first % 64);
        let words = self
            .edges
            .words()
            .iter()
            .enumerate()
            .take(last as usize / 64 + 1)
            .skip(first as usize / 64);
        for (at, word) in words {
            let bits = word.load(Ordering::Relaxed) & core::mem::replace(&mut mask, u64::MAX);
            if bits != 0 {
                let bit =
                    (at as u64).wrapping_mul(64).wrapping_add(u64::from(bits.trailing_zeros()));
                let bytes = bit.wrapping_sub(part.bit(part.first)).wrapping_mul(ALIGNMENT);
                return part.end.min(part.first.wrapping_add(bytes));
            }
        }
        part.end
    }

    /// Goes through all of generation 0 and calls `each` with every object that no callback told
    /// of. `is_class` answers whether a class can be read. False: a part of it was left out, or
    /// nobody knows where it is.
    pub(crate) fn go_through(
        &self,
        runtime: &impl RuntimeHeap,
        is_class: impl Fn(usize) -> bool,
        mut each: impl FnMut(usize, HeapObject),
    ) -> bool {
        let (mut is_anywhere, mut is_whole) = (false, true);
        for row in
            (0..self.generations.len()).filter(|row| is_youngest(self.generations.word(*row, 0)))
        {
            is_anywhere = true;
            let Some(part) = self.part(row) else {
                is_whole = false;
                continue;
            };
            // Each gap ends where what is known begins, and that where the next one begins.
            let (mut at, mut known) = (part.first, self.next_edge(part, part.first));
            while at < part.end {
                // First to see that it is a gap: that its last object ends where it does.
                if !gap(runtime, &is_class, at..known, |_, _| {}) {
                    break;
                }
                gap(
                    runtime,
                    |_| true,
                    at..known,
                    |object, met| {
                        if !met.has_components {
                            each(object, met);
                        }
                    },
                );
                at = self.next_edge(part, known.saturating_add(ALIGNMENT));
                known = self.next_edge(part, at.saturating_add(ALIGNMENT));
            }
            is_whole &= at == part.end;
        }
        is_anywhere && is_whole
    }

    /// True for an object in generation 0 that no callback told of; `None` when nobody knows where
    /// it is. Quick when they come in the order of their addresses.
    pub(crate) fn is_unseen(&mut self, object: usize) -> Option<bool> {
        let row = self.cursor.find(object)?;
        if !is_youngest(self.generations.word(row, 0)) {
            return Some(false);
        }
        let part = self.part(row)?;
        let address = object as u64;
        if !(part.first..=address).contains(&self.at) {
            (self.next, self.is_known) = (self.next_edge(part, part.first), false);
        }
        while self.next <= address && self.next < part.end {
            self.is_known = !self.is_known;
            self.next = self.next_edge(part, self.next.wrapping_add(ALIGNMENT));
        }
        self.at = address;
        Some(!self.is_known)
    }

    /// Forgets what is known.
    pub(crate) fn end(self) {
        for part in (0..self.generations.len()).filter_map(|row| self.part(row)) {
            let words = self.edges.words().iter().take(part.bit(part.end) as usize / 64 + 1);
            for word in words.skip(part.word as usize) {
                // To read a word that was never written takes no memory; to write 0 would.
                if word.load(Ordering::Relaxed) != 0 {
                    word.store(0, Ordering::Relaxed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{HAS_COMPONENTS, HeapObject, Unseen};
    use crate::exact::chunks::{AllocationEntry, Chunks};
    use crate::exact::survey::CollectionSurvey;
    use crate::exact::table::TableWriter;
    use crate::region::lasting::{self, GrowableWords};
    use crate::runtime::heap::RuntimeHeap;
    use core::sync::atomic::{AtomicU64, Ordering};
    use profiler_protocol::exact::TABLE_WORDS;
    use std::collections::HashMap;

    const CELL: usize = 0x100;
    const PAIR: usize = 0x200;
    const BYTES: usize = 0x300;

    /// A heap of words, and where its generations are: generation, first address, bytes in use.
    struct Heap {
        words: HashMap<usize, u64>,
        generations: Vec<[u64; 3]>,
    }

    impl Heap {
        fn new(generations: Vec<[u64; 3]>) -> Self {
            let classes =
                [(CELL, 24 << 32), (PAIR, 29 << 32), (BYTES, 24 << 32 | HAS_COMPONENTS | 1)];
            Self { words: HashMap::from(classes), generations }
        }

        fn put(&mut self, address: usize, class: usize) {
            // A flag of the collector's.
            self.words.insert(address, class as u64 | 1);
        }

        fn put_bytes(&mut self, address: usize, count: u64) {
            self.put(address, BYTES);
            // The upper half is the array's first bytes.
            self.words.insert(address + 8, 7 << 32 | count);
        }
    }

    impl RuntimeHeap for Heap {
        fn size(&self, _: usize) -> Option<u64> {
            None
        }
        fn is_frozen(&self, _: usize) -> bool {
            false
        }
        fn generations(&self, to: &[AtomicU64]) -> usize {
            for (row, [generation, first, bytes]) in to.chunks(4).zip(&self.generations) {
                for (word, value) in row.iter().zip([*generation, *first, *bytes, 0x1000]) {
                    word.store(value, Ordering::Relaxed);
                }
            }
            self.generations.len()
        }
        fn identity(&self, class: usize) -> (u64, bool) {
            (class as u64, false)
        }
        fn word(&self, address: usize) -> u64 {
            self.words.get(&address).copied().unwrap_or(0)
        }
    }

    fn found(
        unseen: &Unseen,
        survey: &CollectionSurvey,
        chunks: &Chunks,
        heap: &Heap,
    ) -> (bool, Vec<(usize, HeapObject)>) {
        let mut all = Vec::new();
        let look = unseen.look(survey, chunks, heap, true);
        let whole =
            look.go_through(heap, |class| class != 0, |object, met| all.push((object, met)));
        look.end();
        (whole, all)
    }

    #[test]
    fn what_is_in_generation_0_and_nobody_told_of_is_found() {
        let table =
            TableWriter::new(lasting::shared(c"perfusion-test", TABLE_WORDS, TABLE_WORDS).unwrap());
        let (unseen, survey, chunks) =
            (Unseen::new(), CollectionSurvey::new().unwrap(), Chunks::new().unwrap());
        let tell = |address| {
            assert!(
                chunks.push(chunks.slot(0x1000).unwrap(), AllocationEntry::new(address, 1, 3, 0))
            )
        };
        // The third region is generation 2's: of what is there everybody was told.
        let mut heap =
            Heap::new(vec![[0, 0x9_0000, 0], [2, 0x4_0000, 24], [0xf << 32, 0x1_0000, 0]]);
        heap.put(0x4_0000, CELL);
        // A collection leaves one object in generation 0.
        tell(0x9_0000);
        survey.begin(0, false, 1, 0, &heap);
        assert_eq!(survey.note([(0x9_0000, 0x9_0000, 24)].into_iter()), 1);
        survey.finish(&table, &chunks, &heap, 0, (0, 0));
        heap.put(0x9_0000, CELL);
        heap.put(0x9_0018, PAIR);
        heap.generations[0][2] = 24 + 32;
        // Free space, and an array that nobody was told of, which cannot be.
        heap.put(0x1_0000, CELL);
        heap.put_bytes(0x1_0018, 39);
        heap.put(0x1_0058, CELL);
        heap.put(0x1_0070, CELL);
        heap.generations[2][2] = 0x88;
        tell(0x1_0000);
        tell(0x1_0070);
        survey.begin(0, false, 2, 0, &heap);
        let met = |class, bytes| HeapObject { class, bytes, has_components: false };
        let expected = vec![(0x1_0058, met(CELL, 24)), (0x9_0018, met(PAIR, 32))];
        assert_eq!(found(&unseen, &survey, &chunks, &heap), (true, expected.clone()));
        assert_eq!(
            found(&unseen, &survey, &chunks, &heap),
            (true, expected),
            "each look marks anew"
        );
        chunks.take_all(&table, |_| {});
        let (_, all) = found(&unseen, &survey, &chunks, &heap);
        let all: Vec<usize> = all.into_iter().map(|(object, _)| object).collect();
        assert_eq!(all, [0x1_0000, 0x1_0058, 0x1_0070, 0x9_0018], "no mark is left");
        // Where an object should be is none: what is known to be in that gap is nothing, and that
        // is said.
        heap.words.remove(&0x1_0018);
        let (whole, all) = found(&unseen, &survey, &chunks, &heap);
        assert_eq!((whole, all.len()), (false, 1));
    }

    #[test]
    fn a_walk_through_the_whole_heap_finds_the_same() {
        let (unseen, survey, chunks) =
            (Unseen::new(), CollectionSurvey::new().unwrap(), Chunks::new().unwrap());
        // What is in use has changed since somebody looked where the generations are.
        let heap = Heap::new(vec![[2, 0x4_0000, 24], [0, 0x9_0000, 0], [0, 0x1_0000, 24]]);
        let known = [0x9_0000, 0x9_0018, 0x9_0060, 0x1_0030];
        for address in known {
            assert!(
                chunks.push(chunks.slot(0x1000).unwrap(), AllocationEntry::new(address, 1, 3, 0))
            );
        }
        survey.locate(&heap);
        let mut look = unseen.look(&survey, &chunks, &heap, false);
        // Also back to a part that was there before, and back in it.
        let order = [
            0x4_0000, 0x1_0000, 0x1_0018, 0x1_0030, 0x1_0048, 0x9_0000, 0x9_0018, 0x9_0030,
            0x9_0060, 0x9_0ff8, 0x1_0000, 0x1_0030, 0x9_0ff8, 0x9_0018,
        ];
        for address in order {
            let is_new = address != 0x4_0000 && !known.contains(&address);
            assert_eq!(look.is_unseen(address), Some(is_new), "{address:#x}");
        }
        assert_eq!(look.is_unseen(0x5_0000), None, "nobody knows of which generation it is");
    }

    #[test]
    fn what_the_bitmap_is_too_small_for_is_said_to_be_left_out() {
        let (survey, chunks) = (CollectionSurvey::new().unwrap(), Chunks::new().unwrap());
        let unseen = Unseen { edges: GrowableWords::new(9, 9), wanted: 1.into() };
        let mut heap = Heap::new(vec![[0, 0x1_0000, 24], [0, 0x9_0000, 24]]);
        heap.put(0x1_0000, CELL);
        heap.put(0x9_0000, CELL);
        for address in [0x1_0000, 0x9_0000] {
            assert!(
                chunks.push(chunks.slot(0x1000).unwrap(), AllocationEntry::new(address, 1, 3, 0))
            );
        }
        survey.locate(&heap);
        // 9 words a part: the second one has none.
        assert_eq!(found(&unseen, &survey, &chunks, &heap), (false, Vec::new()));
        let mut look = unseen.look(&survey, &chunks, &heap, false);
        assert_eq!((look.is_unseen(0x1_0000), look.is_unseen(0x9_0000)), (Some(false), None));
        heap.generations.clear();
        survey.locate(&heap);
        assert_eq!(
            found(&unseen, &survey, &chunks, &heap),
            (false, Vec::new()),
            "no part is known"
        );
    }
}
