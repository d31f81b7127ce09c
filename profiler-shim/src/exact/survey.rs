//! What a collection did with all objects. The runtime tells which ranges of addresses survived,
//! and where they are now; whatever else lay in the generations it collected is dead. Everything
//! here but [`CollectionSurvey::note`] and [`CollectionSurvey::waits_for_finalizer`], which the
//! threads of a server collector call at once, is one thread's, while the world stands still.

use super::SUMS;
use super::chunks::Chunks;
use super::living::{Living, LivingList};
use super::ranges::{RangeCursor, Ranges};
use super::table::{RunSum, TableWriter};
use crate::region::lasting;
use crate::runtime::heap::RuntimeHeap;
use core::sync::atomic::{AtomicU64, Ordering};
use profiler_protocol::exact::{
    COLLECTION_BUCKETS, COLLECTION_WORDS, COLLECTIONS_AT, MOST_COLLECTIONS, MOST_SURVIVALS,
    MOST_TYPES, SURVIVAL_WORDS, SURVIVALS_AT, TIME_BUCKETS, bucket, head, loss,
    of_collection as row, of_type,
};

/// Lists of living objects: generations 0 to 2, the large object heap (3), the pinned one (4).
const LISTS: usize = 5;
/// The generation that is collected with all others.
pub(crate) const OLDEST: u8 = 2;
const LARGE: u8 = 3;
const PINNED: u8 = 4;

/// Room for ranges, generations' regions, objects that wait for finalizers: most and, with little
/// address space, least.
const MOST_RANGES: usize = 1 << 28;
const LEAST_RANGES: usize = 1 << 18;
const MOST_REGIONS: usize = 1 << 20;
const LEAST_REGIONS: usize = 1 << 14;
const FIRST_REGIONS: usize = 1 << 10;

/// In an object's third word, above the number of collections before its birth: it has survived
/// one; it is known to wait for its finalizer.
const SURVIVED: u64 = 1 << 32;
const QUEUED: u64 = 1 << 33;

/// Surviving ranges: old address, bytes, new address.
type Survivors = Ranges<3, 0, 1>;
/// Where generations lie, as `Runtime::generations` has it, found by what is reserved for them.
pub(crate) type Generations = Ranges<4, 1, 3>;
/// Objects that wait for their finalizer: address and 1.
type PendingFinalizers = Ranges<2, 0, 1>;

/// The state of the collection in progress and of all living objects.
pub(crate) struct CollectionSurvey {
    survivors: Survivors,
    waiting: PendingFinalizers,
    before: Generations,
    after: Generations,
    lists: [LivingList; LISTS],
    /// Objects that came down to a generation whose list was still to be gone through.
    demoted: LivingList,
    /// Of each type, survivors of this collection: objects, bytes, moved.
    here: &'static [AtomicU64],
    /// Highest generation of the collection in progress plus one, 0 for none; and whether it was
    /// induced.
    condemned: AtomicU64,
    induced: AtomicU64,
    began_ns: AtomicU64,
    suspending_ns: AtomicU64,
    own_ns: AtomicU64,
    /// The row in the making, by its words.
    row: [AtomicU64; COLLECTION_WORDS],
    /// Collections that ended.
    collections: AtomicU64,
    counted: CountedObjects,
}

/// Objects of all collections so far.
struct CountedObjects {
    /// Of all objects, counted so far.
    objects: AtomicU64,
    bytes: AtomicU64,
    /// Bytes of those alive, without frozen ones.
    alive_bytes: AtomicU64,
}

/// What the dead have in common who are counted together: row of the type, milliseconds from the
/// start to the birth, collections that had ended then.
type Dead = (usize, u32, u32);

/// What a collection knows while it goes through the objects.
struct CollectionWalk<'a> {
    survey: &'a CollectionSurvey,
    table: &'a TableWriter,
    condemned: u8,
    now_ms: u32,
    collections: u64,
    survivors: RangeCursor<'a, 3, 0, 1>,
    after: RangeCursor<'a, 4, 1, 3>,
    waiting: RangeCursor<'a, 2, 0, 1>,
    /// Words SURVIVED to RESURRECTED of the row.
    sums: [u64; SUMS],
    unfollowed: u64,
    /// Bytes of new objects in the frozen heap, which is no part of the heap that collections look
    /// at.
    frozen_bytes: u64,
    dead: RunSum<Dead>,
}

/// Asks the runtime where its generations lie, with room for more and more of them.
fn fill(generations: &Generations, runtime: &impl RuntimeHeap) {
    let mut rows = FIRST_REGIONS;
    loop {
        let has_room = generations.makes_room(rows);
        let found = runtime.generations(generations.memory());
        generations.set_len(found);
        if found < rows || !has_room {
            return;
        }
        rows = rows.wrapping_mul(2);
    }
}

impl CollectionSurvey {
    /// Without objects.
    #[must_use]
    pub(crate) fn new() -> Option<Self> {
        Some(Self {
            survivors: Survivors::new(MOST_RANGES, LEAST_RANGES)?,
            waiting: PendingFinalizers::new(MOST_RANGES, LEAST_RANGES)?,
            before: Generations::new(MOST_REGIONS, LEAST_REGIONS)?,
            after: Generations::new(MOST_REGIONS, LEAST_REGIONS)?,
            lists: [
                LivingList::new(),
                LivingList::new(),
                LivingList::new(),
                LivingList::new(),
                LivingList::new(),
            ],
            demoted: LivingList::new(),
            here: lasting::whole(MOST_TYPES * SURVIVAL_WORDS)?,
            condemned: AtomicU64::new(0),
            induced: AtomicU64::new(0),
            began_ns: AtomicU64::new(0),
            suspending_ns: AtomicU64::new(0),
            own_ns: AtomicU64::new(0),
            row: [const { AtomicU64::new(0) }; COLLECTION_WORDS],
            collections: AtomicU64::new(0),
            counted: CountedObjects {
                objects: AtomicU64::new(0),
                bytes: AtomicU64::new(0),
                alive_bytes: AtomicU64::new(0),
            },
        })
    }

    /// False where there was no address space.
    #[must_use]
    pub(crate) fn has_room(&self) -> bool {
        self.demoted.words.most() != 0
    }

    /// True between the beginning and the end of a collection.
    #[must_use]
    pub(crate) fn is_open(&self) -> bool {
        self.condemned.load(Ordering::Relaxed) != 0
    }

    /// Collections that have ended.
    #[must_use]
    pub(crate) fn collections(&self) -> u64 {
        self.collections.load(Ordering::Relaxed)
    }

    /// A collection begins.
    pub(crate) fn begin(
        &self,
        condemned: u8,
        induced: bool,
        began_ns: u64,
        suspending_ns: u64,
        runtime: &impl RuntimeHeap,
    ) {
        self.survivors.clear();
        self.waiting.clear();
        self.began_ns.store(began_ns, Ordering::Relaxed);
        self.suspending_ns.store(suspending_ns, Ordering::Relaxed);
        self.own_ns.store(0, Ordering::Relaxed);
        self.induced.store(u64::from(induced), Ordering::Relaxed);
        self.locate(runtime);
        self.condemned.store(u64::from(condemned.min(OLDEST)).wrapping_add(1), Ordering::Relaxed);
    }

    /// Looks where the generations lie.
    pub(crate) fn locate(&self, runtime: &impl RuntimeHeap) {
        fill(&self.before, runtime);
        self.before.sort();
    }

    /// Where the generations were when somebody looked.
    #[must_use]
    pub(crate) fn generations(&self) -> &Generations {
        &self.before
    }

    /// Calls `each` with every object that an earlier collection has left in generation 0, and its
    /// bytes.
    pub(crate) fn each_youngest(&self, mut each: impl FnMut(usize, u64)) {
        let [youngest, ..] = &self.lists;
        for living in (0..youngest.len()).map_while(|at| youngest.read(at)) {
            each(living.entry.address(), living.entry.bytes());
        }
    }

    /// Exact mode has done what it does before a collection.
    pub(crate) fn goes_on(&self, now_ns: u64) {
        self.began_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Counts time as exact mode's own.
    pub(crate) fn own(&self, ns: u64) {
        self.own_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Notes survivors: (old address, new address, bytes). Any thread. Answers for how many there
    /// was room.
    pub(crate) fn note(&self, ranges: impl ExactSizeIterator<Item = (usize, usize, usize)>) -> u64 {
        self.survivors.add(ranges.map(|(old, new, bytes)| [old as u64, bytes as u64, new as u64]))
    }

    /// Notes an object that waits for its finalizer. Any thread. False: there was no room.
    pub(crate) fn waits_for_finalizer(&self, object: usize) -> bool {
        self.waiting.add([[object as u64, 1]].into_iter()) != 0
    }

    /// Sorts all objects of the collected generations into the dead and the living.
    pub(crate) fn finish(
        &self,
        table: &TableWriter,
        chunks: &Chunks,
        runtime: &impl RuntimeHeap,
        now_ms: u32,
        (event_number, event_what): (u64, u64),
    ) {
        self.survivors.sort();
        self.waiting.sort();
        fill(&self.after, runtime);
        self.after.sort();
        let condemned =
            u8::try_from(self.condemned.swap(0, Ordering::Relaxed).saturating_sub(1)).unwrap_or(0);
        let mut walk = CollectionWalk {
            survey: self,
            table,
            condemned,
            now_ms,
            collections: self.collections.load(Ordering::Relaxed),
            survivors: self.survivors.cursor(),
            after: self.after.cursor(),
            waiting: self.waiting.cursor(),
            sums: [0; SUMS],
            unfollowed: 0,
            frozen_bytes: 0,
            dead: RunSum::default(),
        };
        // From the oldest on, so that whoever is promoted comes to a list that was gone through.
        for list in (0..=condemned).rev() {
            walk.list(list);
        }
        if condemned == OLDEST {
            walk.list(LARGE);
            walk.list(PINNED);
        }
        walk.young(chunks, runtime);
        walk.place_demoted();
        let last = core::mem::take(&mut walk.dead);
        walk.count_dead(last);
        self.tell(table, &walk.sums, walk.frozen_bytes);
        table.add(head::LOSSES.wrapping_add(loss::UNFOLLOWED), walk.unfollowed);
        self.set(
            row::WHAT,
            u64::from(condemned)
                | u64::from(event_number != 0) << 8
                | event_what
                | self.induced.load(Ordering::Relaxed) << 32,
        );
        self.set(row::NUMBER, event_number.saturating_sub(1));
        self.set(row::HEAP_BEFORE, self.heap_bytes(&self.before));
        self.set(row::HEAP_AFTER, self.heap_bytes(&self.after));
        self.tell_survivals(table);
    }

    fn set(&self, word: usize, value: u64) {
        if let Some(place) = self.row.get(word) {
            place.store(value, Ordering::Relaxed);
        }
    }

    /// Bytes in use, of all generations.
    fn heap_bytes(&self, generations: &Generations) -> u64 {
        (0..generations.len()).fold(0, |sum: u64, at| sum.saturating_add(generations.word(at, 2)))
    }

    fn tell(&self, table: &TableWriter, sums: &[u64; SUMS], frozen_bytes: u64) {
        let (objects, bytes) = (table.get(head::OBJECTS), table.get(head::OBJECT_BYTES));
        self.set(
            row::NEW_OBJECTS,
            objects.wrapping_sub(self.counted.objects.swap(objects, Ordering::Relaxed)),
        );
        let new_bytes = bytes.wrapping_sub(self.counted.bytes.swap(bytes, Ordering::Relaxed));
        self.set(row::NEW_BYTES, new_bytes);
        for (at, sum) in sums.iter().enumerate() {
            self.set(row::SURVIVED.wrapping_add(at), *sum);
        }
        let dead = sums.get(row::DEAD_BYTES - row::SURVIVED).copied().unwrap_or(0);
        let gone = dead.wrapping_add(frozen_bytes);
        let alive = self
            .counted
            .alive_bytes
            .load(Ordering::Relaxed)
            .wrapping_add(new_bytes)
            .wrapping_sub(gone);
        self.counted.alive_bytes.store(alive, Ordering::Relaxed);
        self.set(row::OBJECTS_AFTER, alive);
    }

    /// Writes what survived of each type.
    fn tell_survivals(&self, table: &TableWriter) {
        let collection = self.collections.load(Ordering::Relaxed);
        let types = table.get(head::TYPES) as usize;
        for (number, words) in self.here.chunks_exact(SURVIVAL_WORDS).take(types).enumerate() {
            let [objects, bytes, moved, _] = words else { continue };
            let objects = objects.swap(0, Ordering::Relaxed);
            if objects == 0 {
                continue;
            }
            let (bytes, moved) =
                (bytes.swap(0, Ordering::Relaxed), moved.swap(0, Ordering::Relaxed));
            let at = table.get(head::SURVIVALS) as usize;
            if at >= MOST_SURVIVALS {
                table.count(head::LOSSES.wrapping_add(loss::ROWS));
                continue;
            }
            let begin = SURVIVALS_AT.wrapping_add(at.wrapping_mul(SURVIVAL_WORDS));
            let name = collection & 0xffff_ffff | (number as u64) << 32;
            for (word, value) in [name, objects, bytes, moved].into_iter().enumerate() {
                table.set(begin.wrapping_add(word), value);
            }
            table.add(head::SURVIVALS, 1);
        }
    }

    /// Writes the collection's row, and that it is over.
    pub(crate) fn write(&self, table: &TableWriter, ended_ns: u64, own_ns: u64) {
        self.own(own_ns);
        let own_ns = self.own_ns.load(Ordering::Relaxed);
        self.set(row::SUSPENDING_NS, self.suspending_ns.load(Ordering::Relaxed));
        self.set(row::BEGAN_NS, self.began_ns.load(Ordering::Relaxed));
        self.set(row::ENDED_NS, ended_ns);
        self.set(row::RESUMED_NS, 0);
        self.set(row::OWN_NS, own_ns);
        table.add(head::OWN_NS, own_ns);
        let number = self.collections.load(Ordering::Relaxed) as usize;
        if number < MOST_COLLECTIONS {
            let begin = COLLECTIONS_AT.wrapping_add(number.wrapping_mul(COLLECTION_WORDS));
            for (at, word) in self.row.iter().enumerate() {
                table.set(begin.wrapping_add(at), word.load(Ordering::Relaxed));
            }
        } else {
            table.count(head::LOSSES.wrapping_add(loss::ROWS));
        }
        let collections = (number as u64).wrapping_add(1);
        self.collections.store(collections, Ordering::Relaxed);
        table.set(head::COLLECTIONS, collections);
    }

    /// Threads run again: so ends the pause of the last collection, unless that is known already.
    pub(crate) fn resumed(&self, table: &TableWriter, now_ns: u64) {
        let Some(number) = self.collections.load(Ordering::Relaxed).checked_sub(1) else { return };
        let begin = COLLECTIONS_AT.wrapping_add((number as usize).wrapping_mul(COLLECTION_WORDS));
        let at = begin.wrapping_add(row::RESUMED_NS);
        if (number as usize) < MOST_COLLECTIONS && table.get(at) == 0 {
            table.set(at, now_ns);
        }
    }
}

impl CollectionWalk<'_> {
    fn add(&mut self, word: usize, by: u64) {
        if let Some(sum) = self.sums.get_mut(word.wrapping_sub(row::SURVIVED)) {
            *sum = sum.wrapping_add(by);
        }
    }

    /// Goes through the living objects of a generation that was collected.
    fn list(&mut self, from: u8) {
        let Some(list) = self.survey.lists.get(usize::from(from)) else { return };
        let mut kept = 0usize;
        for at in 0..list.len() {
            let Some(living) = list.read(at) else { break };
            let Some((living, to)) = self.judge(living, from) else { continue };
            if to == from {
                list.write(kept, living);
                kept = kept.wrapping_add(1);
            } else if to < from {
                // Its list is still to be gone through, where it would be looked for at its old
                // address.
                self.follow(Some(&self.survey.demoted), living);
            } else {
                self.follow(self.survey.lists.get(usize::from(to)), living);
            }
        }
        list.count.store(kept as u64, Ordering::Relaxed);
    }

    fn follow(&mut self, list: Option<&LivingList>, living: Living) {
        if !list.is_some_and(|list| list.push(living)) {
            self.unfollowed = self.unfollowed.wrapping_add(1);
        }
    }

    /// Goes through what was allocated since the last collection.
    fn young(&mut self, chunks: &Chunks, runtime: &impl RuntimeHeap) {
        let table = self.table;
        let mut before = self.survey.before.cursor();
        chunks.take_all(table, |entry| {
            let generation = before.find(entry.address()).map_or(OLDEST, |row| {
                u8::try_from(self.survey.before.word(row, 0) & 0xffff_ffff).unwrap_or(OLDEST)
            });
            // Nothing is born into generation 2 but what lies in the frozen heap.
            if generation == OLDEST && runtime.is_frozen(entry.address()) {
                self.frozen_bytes = self.frozen_bytes.wrapping_add(entry.bytes());
                return;
            }
            let heap = if generation > OLDEST { generation.min(PINNED) } else { 0 };
            let living = Living { entry, history: self.collections };
            if heap > OLDEST && self.condemned < OLDEST {
                self.follow(self.survey.lists.get(usize::from(heap)), living);
            } else if let Some((living, to)) = self.judge(living, heap) {
                self.follow(self.survey.lists.get(usize::from(to)), living);
            }
        });
    }

    /// All lists were gone through.
    fn place_demoted(&mut self) {
        let demoted = &self.survey.demoted;
        for at in 0..demoted.len() {
            let Some(living) = demoted.read(at) else { break };
            let to = self.generation_of(living.entry.address()).unwrap_or(0);
            self.follow(self.survey.lists.get(usize::from(to)), living);
        }
        demoted.count.store(0, Ordering::Relaxed);
    }

    /// Generation 0 to 2 that an address lies in after the collection.
    fn generation_of(&mut self, address: usize) -> Option<u8> {
        let row = self.after.find(address)?;
        u8::try_from(self.survey.after.word(row, 0) & 0xffff_ffff)
            .ok()
            .filter(|generation| *generation <= OLDEST)
    }

    fn count_dead(
        &mut self,
        RunSum { of: (number, born_ms, born_at), objects, bytes }: RunSum<Dead>,
    ) {
        let lived = (self.collections as u32).wrapping_sub(born_at);
        let lived_ms = self.now_ms.saturating_sub(born_ms);
        let of = self.table.type_row(number);
        of.add(of_type::DEAD_BYTES, bytes);
        of.add(of_type::BY_COLLECTIONS.wrapping_add(bucket(lived, COLLECTION_BUCKETS)), objects);
        of.add(of_type::BY_TIME.wrapping_add(bucket(lived_ms, TIME_BUCKETS)), objects);
        self.add(row::DEAD, objects);
        self.add(row::DEAD_BYTES, bytes);
    }

    /// What became of an object: `None` when it is dead, else as it is now, and its generation.
    #[inline]
    fn judge(&mut self, living: Living, from: u8) -> Option<(Living, u8)> {
        let (address, bytes) = (living.entry.address(), living.entry.bytes());
        let Some(range) = self.survivors.find(address) else {
            let alike = (living.entry.row(), living.entry.born_ms(), living.history as u32);
            if let Some(ended) = self.dead.add(alike, bytes) {
                self.count_dead(ended);
            }
            return None;
        };
        let of = self.table.type_row(living.entry.row());
        let survey = self.survey;
        let moved_by =
            survey.survivors.word(range, 2).wrapping_sub(survey.survivors.word(range, 0));
        let now_at = address.wrapping_add(moved_by as usize);
        let mut history = living.history | SURVIVED;
        of.add(of_type::SURVIVALS, 1);
        of.add(of_type::SURVIVAL_BYTES, bytes);
        if living.history & SURVIVED == 0 {
            of.add(of_type::SURVIVORS, 1);
            of.add(of_type::SURVIVOR_BYTES, bytes);
        }
        self.add(row::SURVIVED, 1);
        self.add(row::SURVIVED_BYTES, bytes);
        let here = living.entry.row().wrapping_mul(SURVIVAL_WORDS);
        let count_here = |word: usize, by: u64| {
            if let Some(word) = survey.here.get(here.wrapping_add(word)) {
                word.store(word.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
            }
        };
        count_here(0, 1);
        count_here(1, bytes);
        if moved_by != 0 {
            of.add(of_type::MOVES, 1);
            of.add(of_type::MOVED_BYTES, bytes);
            self.add(row::MOVED, 1);
            self.add(row::MOVED_BYTES, bytes);
            count_here(2, 1);
        }
        if self.waiting.find(address).is_some() {
            if history & QUEUED == 0 {
                history |= QUEUED;
                of.add(of_type::FINALIZABLE, 1);
                self.add(row::FINALIZABLE, 1);
            }
        } else if history & QUEUED != 0 {
            // Its finalizer has run, or runs, and it is still alive. It may be queued again
            // (GC.ReRegisterForFinalize).
            history &= !QUEUED;
            of.add(of_type::RESURRECTED, 1);
            self.add(row::RESURRECTED, 1);
        }
        let to = match from {
            LARGE.. => from,
            _ => self.generation_of(now_at).unwrap_or(from.wrapping_add(1).min(OLDEST)),
        };
        if to == 1 && from == 0 {
            of.add(of_type::PROMOTED_1, 1);
            self.add(row::PROMOTED_1, 1);
        } else if to == OLDEST && from < OLDEST {
            of.add(of_type::PROMOTED_2, 1);
            self.add(row::PROMOTED_2, 1);
        }
        Some((Living { entry: living.entry.moved_to(now_at), history }, to))
    }
}

#[cfg(test)]
mod tests {
    use super::CollectionSurvey;

    #[test]
    fn a_finalizable_object_without_room_is_said_not_to_be_noted() {
        let survey = CollectionSurvey::new().unwrap();
        assert!(survey.waits_for_finalizer(0x1000));
        survey.waiting.set_len(1 << 40);
        assert!(!survey.waits_for_finalizer(0x2000));
    }
}
