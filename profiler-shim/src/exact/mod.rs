//! Exact mode: the main profiler of a process that was started for it. It is told of every object
//! (ObjectAllocated) and of what each collection did with all of them (MONITOR_GC), and keeps the
//! sums per type in a table that the daemon reads (`profiler_protocol::exact`).
//!
//! What an object costs its thread is one entry of 16 bytes in that thread's [`chunks`]: address,
//! type, size, time. All else is done for all of them at once while the world is stopped
//! ([`survey`]): an object whose address is in no range that survived is dead, one that is goes to
//! the list of its generation. A thread that allocates cannot be stopped inside the callback (it is
//! in cooperative mode), so a collection never meets a half-written entry.

pub mod chance;
pub mod chunks;
pub mod classes;
pub mod holders;
pub mod ranges;
pub mod survey;
pub mod table;
pub mod unseen;

use crate::com::info::{Info, Mask, Provider};
use crate::machine::thread_block;
use crate::method::{NameText, Namer};
use crate::recorder;
use crate::region::lasting;
use crate::syscall;
use chunks::{AllocationEntry, Chunks};
use classes::{ClassLookup, Classes};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use holders::HolderScan;
use profiler_protocol::exact::{
    HEADER_WORDS, TABLE_NAME, TABLE_WORDS, head, loss, of_collection as row, of_type, reader,
    reason, state,
};
use profiler_protocol::layout::pack_runtime;
use survey::CollectionSurvey;
use table::TableWriter;
use unseen::{HeapObject, Unseen};

/// The first runtime that makes objects and tells nobody ([`unseen`]).
const FIRST_WITH_UNSEEN: u16 = 10;

/// How often the counts are brought up to date between collections, and the clock of lifetimes
/// ticks.
const COUNT_NS: u64 = 1_000_000_000;
const TICK_NS: u64 = 1_000_000;

/// At the start of a collection the runtime goes through all that was allocated since the last, to
/// tell how many objects of each class (ObjectsAllocatedByClass): 50 ns an object, half of all the
/// cost, for something that is known better here. It does so when MONITOR_GC is set once
/// GarbageCollectionStarted has returned, and asks again, for survivors, much later; the event
/// GCStart comes in between, on the same thread. So the flag is taken away in the callback and
/// given back in the event, once a collection has shown that it comes.
mod walk {
    /// The event was not seen inside the last collection: the flag stays.
    pub(super) const NEEDED: u32 = 0;
    /// It was: the flag can be taken away.
    pub(super) const SKIPPABLE: u32 = 1;
    /// It is away.
    pub(super) const SKIPPED: u32 = 2;
}

/// What is asked of the runtime while objects are counted.
pub trait RuntimeHeap {
    /// Bytes of an object, not rounded up.
    fn size(&self, object: usize) -> Option<u64>;
    /// True for an object that no collection looks at (the frozen heap, .NET 8+).
    fn is_frozen(&self, object: usize) -> bool;
    /// Writes where the generations lie, four words each: generation (low half), first address,
    /// bytes in use, bytes reserved. Answers how many.
    fn generations(&self, to: &[AtomicU64]) -> usize;
    /// A number that tells a class from another one at the same address later, not 0; and whether
    /// it is an array.
    fn identity(&self, class: usize) -> (u64, bool);
    /// The word at an address in an object or at the beginning of its class, which is its method
    /// table. While nothing can free either.
    fn word(&self, address: usize) -> u64;
}

/// What is left to be done about an object that was counted, in this order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocated {
    /// When chance has chosen it, to be told of with its stack: its bytes, and how many chance had
    /// to choose from.
    pub chosen: Option<(u64, u64)>,
    /// Its type was met for the first time.
    pub first: Option<FirstObject>,
}

/// The first object of a type: its row, and its size.
#[derive(Clone, Copy, Debug)]
pub struct FirstObject {
    row: usize,
    size_words: u64,
}

/// The profiler of exact mode.
pub struct Exact {
    table: TableWriter,
    /// Milliseconds since the start plus one while objects are counted; 0 before, after, and in a
    /// forked child.
    tick: &'static AtomicU64,
    chunks: Chunks,
    classes: Classes,
    survey: CollectionSurvey,
    holders: HolderScan,
    unseen: Unseen,
    /// Address of the newest ICorProfilerInfo, and its number.
    info: AtomicUsize,
    info_level: AtomicU32,
    began_ns: AtomicU64,
    /// 1 while somebody counts or a collection is under way. Taken with acquire (`take_lock`), put
    /// back with release (`release_lock`).
    lock: AtomicU32,
    /// When the suspension in progress began.
    suspending_ns: AtomicU64,
    /// The runtime's event about the collection in progress: number plus one, and reason and kind.
    event_number: AtomicU64,
    event_what: AtomicU64,
    runtime_provider: AtomicUsize,
    other_provider: AtomicUsize,
    /// [`walk`].
    walk: AtomicU32,
    /// 1 while a collection is in progress whose beginning no callback has told.
    unannounced: AtomicU32,
    /// Losses of objects' lives that are known of.
    lost_lives: AtomicU64,
    /// 1 when the process ends: written in `end`, looked at by the clock's thread (`keep_time`),
    /// which then touches nothing more.
    over: AtomicU32,
}

impl Exact {
    /// A profiler with all its memory; `None` when there is none to be had.
    #[must_use]
    pub fn new() -> Option<Self> {
        // Who is not counted says so in the header.
        let mapped = if lasting::is_scarce() { HEADER_WORDS } else { TABLE_WORDS };
        let table = TableWriter::new(lasting::shared(TABLE_NAME, TABLE_WORDS, mapped)?);
        Some(Self {
            table,
            tick: lasting::guard()?.first()?,
            chunks: Chunks::new()?,
            classes: Classes::new()?,
            survey: CollectionSurvey::new()?,
            holders: HolderScan::new()?,
            unseen: Unseen::new(),
            info: AtomicUsize::new(0),
            info_level: AtomicU32::new(0),
            began_ns: AtomicU64::new(0),
            lock: AtomicU32::new(0),
            suspending_ns: AtomicU64::new(0),
            event_number: AtomicU64::new(0),
            event_what: AtomicU64::new(0),
            runtime_provider: AtomicUsize::new(0),
            other_provider: AtomicUsize::new(0),
            walk: AtomicU32::new(walk::NEEDED),
            unannounced: AtomicU32::new(0),
            lost_lives: AtomicU64::new(0),
            over: AtomicU32::new(0),
        })
    }

    /// Shows the table, waits until somebody has opened it, and begins to count. False: nobody
    /// came, or the runtime refuses.
    pub fn set_up(&self, info: Info) -> bool {
        let (major, minor, build, clr) = info.runtime();
        let began_ns = syscall::now_ns();
        self.began_ns.store(began_ns, Ordering::Relaxed);
        self.info_level.store(info.level(), Ordering::Relaxed);
        // Release: pairs with the acquire in `info`; the level is set before.
        self.info.store(info.address(), Ordering::Release);
        let has_room = self.chunks.has_room() && self.survey.has_room();
        self.table.set(head::REASON, if has_room { 0 } else { reason::ADDRESS_SPACE });
        self.table.publish(
            info.owner_in_environment(),
            pack_runtime(major, minor, build, clr),
            began_ns,
        );
        // One whose recorder is gone, or declines, runs on as if nothing were.
        let is_read = has_room
            && recorder::wait_at_start(info, &|| self.table.get(head::READER)) == reader::OPENED;
        if !is_read || info.set_mask(Mask::EXACT).is_err() {
            self.table.set(head::STATE, state::DECLINED);
            return false;
        }
        if major >= FIRST_WITH_UNSEEN {
            self.unseen.want();
        }
        self.table.set(head::STATE, state::COUNTING);
        self.tick.store(1, Ordering::Relaxed);
        true
    }

    /// Has events about collections delivered: reasons, and what [`walk`] needs. Runs managed code,
    /// so the tables are ready by now. Without it both are missing, no more.
    pub fn start_session(&self) {
        const GC: u64 = 1;
        const INFORMATIONAL: u32 = 4;
        if let Some(info) = self.info() {
            info.start_session(GC, INFORMATIONAL, false).ok();
        }
    }

    /// The runtime's interface; `None` before it is set up.
    pub fn info(&self) -> Option<Info> {
        Info::from_address(
            self.info.load(Ordering::Acquire),
            self.info_level.load(Ordering::Relaxed),
        )
    }

    fn is_counting(&self) -> bool {
        self.tick.load(Ordering::Relaxed) != 0
    }

    /// Notes an object of the type that this thread met last, if nothing else is to be done: so it
    /// is with most, and this is all that they cost. False: nothing was done, [`Self::allocated`]
    /// is to do it. Like that, for the thread that has just allocated the object.
    #[inline(always)]
    pub fn noted(&self, object: usize, class: usize) -> bool {
        let tick = self.tick.load(Ordering::Relaxed);
        let Some(slot) = self.chunks.first_slot(thread_block()).filter(|_| tick != 0) else {
            return false;
        };
        let Some(known) = slot.known(class, self.classes.epoch()) else { return false };
        let Some(size_words) = known.fixed_size_words() else { return false };
        let Some(place) = self.chunks.place(slot) else { return false };
        if slot.chance().is_near(size_words.wrapping_mul(8).wrapping_add(known.silent_bytes())) {
            return false;
        }
        place.fill(AllocationEntry::new(object, known.row(), size_words, tick.wrapping_sub(1)));
        true
    }

    /// An object was allocated by this thread, which is in cooperative mode: no collection begins
    /// before this returns.
    pub fn allocated(&self, object: usize, class: usize) -> Allocated {
        let tick = self.tick.load(Ordering::Relaxed);
        if tick == 0 {
            return Allocated::default();
        }
        let thread = thread_block();
        let Some(slot) = self.chunks.slot(thread) else {
            self.table.count(head::LOSSES + loss::THREADS);
            return Allocated::default();
        };
        let known = slot.known(class, self.classes.epoch());
        let found = match known {
            Some(class) => classes::ClassLookup { class, is_new: false },
            None => {
                let Some(info) = self.info() else { return Allocated::default() };
                let found = self.classes.find(class, &self.table, &info);
                slot.remember(class, found.class, self.classes.epoch());
                found
            }
        };
        let size_words = match found.class.fixed_size_words() {
            Some(words) => words,
            None => match self.info().and_then(|info| info.size(object)) {
                Some(bytes) => bytes.div_ceil(8),
                None => {
                    self.table.count(head::LOSSES + loss::SIZES);
                    0
                }
            },
        };
        if found.is_new && self.unseen.is_wanted() {
            // Whether objects are as they are read there; this one stays where it is until this
            // thread lets a collection in.
            let is_as_read =
                self.info().and_then(|info| unseen::meet(&info, object)).is_some_and(|met| {
                    met.class == class
                        && (met.bytes == size_words.wrapping_mul(8) || size_words == 0)
                });
            if !is_as_read {
                self.give_up_looking();
            }
        }
        let entry =
            AllocationEntry::new(object, found.class.row(), size_words, tick.wrapping_sub(1));
        if !self.chunks.push(slot, entry) {
            self.table.count(head::LOSSES + loss::MEMORY);
        }
        let (chance, bytes) = (slot.chance(), size_words.wrapping_mul(8));
        let stands_for = bytes.wrapping_add(found.class.silent_bytes());
        let is_chosen = chance.is_near(stands_for)
            && chance.chooses(stands_for, thread as u64 ^ self.began_ns.load(Ordering::Relaxed));
        Allocated {
            chosen: is_chosen.then_some((bytes, stands_for)),
            first: found.is_new.then_some(FirstObject { row: found.class.row(), size_words }),
        }
    }

    /// Names a type that was met for the first time. Its first object keeps its module loaded
    /// meanwhile, and may be elsewhere afterwards: this can let a collection in.
    #[cold]
    #[inline(never)]
    pub fn describe(&self, class: usize, FirstObject { row, size_words }: FirstObject) {
        let Some(info) = self.info() else { return };
        let (mut name, mut module) = (NameText::new(), NameText::new());
        let module_id = Namer::new(info).class(class, &mut name, &mut module);
        // Strings are the one kind of object that has no fixed size and is no array.
        let is_string = name.as_str() == "string";
        self.classes.described(class, size_words, is_string, &info);
        self.name(row, module_id.unwrap_or(0), name.as_str(), module.as_str());
    }

    /// Names a type that has no name yet. Whoever reads the table counts those that never get one.
    fn name(&self, row: usize, module_id: usize, name: &str, module: &str) {
        if !self.table.is_named(row) {
            self.table.type_row(row).set(of_type::MODULE, module_id as u64);
            self.table.name(row, name, module);
        }
    }

    /// A module goes away: from now on a class may be another one at the same address.
    pub fn module_unloads(&self) {
        self.classes.next_epoch();
    }

    /// The runtime begins to suspend threads, for a collection or something else.
    pub fn suspending(&self) {
        self.suspending_ns.store(syscall::now_ns(), Ordering::Relaxed);
    }

    /// Threads run again.
    pub fn resumed(&self) {
        self.suspending_ns.store(0, Ordering::Relaxed);
        if self.is_counting() {
            self.survey.resumed(&self.table, syscall::now_ns());
        }
    }

    /// A collection of the generations up to `condemned` begins: the world has stopped. `name` is
    /// told of classes that are to be named.
    pub fn collection_starts(&self, condemned: u8, induced: bool, name: impl Fn(usize)) {
        let Some(info) = self.info().filter(|_| self.is_counting()) else { return };
        let (began_ns, began_cpu_ns) = (syscall::now_ns(), syscall::thread_cpu_ns());
        self.take_lock();
        self.unannounced.store(0, Ordering::Relaxed);
        self.survey.begin(
            condemned,
            induced,
            began_ns,
            self.suspending_ns.swap(0, Ordering::Relaxed),
            &info,
        );
        if self.unseen.is_wanted() {
            let look = self.unseen.look(&self.survey, &self.chunks, &info, true);
            let mut finds = self.finds();
            let is_class = |class| self.classes.row(class) != 0 || syscall::readable(class);
            let is_whole = look.go_through(&info, is_class, |object, met| {
                self.found(&info, object, met, &mut finds, &name);
            });
            if !is_whole {
                self.table.count(head::LOSSES + loss::LOOKS);
            }
            look.end();
        }
        if condemned >= survey::OLDEST {
            self.holders.begin(began_ns);
        }
        if self.walk.load(Ordering::Relaxed) == walk::SKIPPABLE {
            let is_skipped = info.set_mask(Mask::EXACT_WITHOUT_GC).is_ok();
            self.walk
                .store(if is_skipped { walk::SKIPPED } else { walk::NEEDED }, Ordering::Relaxed);
        }
        // What we do before and after it, and a look at all counts that is waited for, is no part
        // of the collection.
        let ready_ns = syscall::now_ns();
        self.survey.own(ready_ns.wrapping_sub(began_ns));
        self.own_cpu_since(began_cpu_ns);
        self.survey.goes_on(ready_ns);
    }

    fn finds(&self) -> Finds {
        Finds { born_ms: self.tick.load(Ordering::Relaxed).wrapping_sub(1), class: 0, row: 0 }
    }

    /// Notes an object of generation 0 that no callback told of. When it was born is not known: now
    /// at the latest.
    #[inline(never)]
    fn found(
        &self,
        info: &Info,
        object: usize,
        met: HeapObject,
        finds: &mut Finds,
        name: &impl Fn(usize),
    ) {
        if finds.class != met.class {
            let ClassLookup { class, is_new } = self.classes.find(met.class, &self.table, info);
            (finds.class, finds.row) = (met.class, class.row());
            if is_new {
                self.classes.described(met.class, met.bytes / 8, false, info);
            }
            // Here nobody may be asked for a name: who holds the lock that it takes may be standing
            // still. Once more when an unload, or another type in its place, has the wish
            // forgotten.
            if finds.row != 0 && !self.table.is_named(finds.row) {
                name(met.class);
            }
        }
        let entry = AllocationEntry::new(object, finds.row, met.bytes / 8, finds.born_ms);
        if self.chunks.slot(thread_block()).is_some_and(|slot| self.chunks.push(slot, entry)) {
            self.table.add(head::UNSEEN, 1);
            self.table.type_row(finds.row).add(of_type::UNSEEN, 1);
        } else {
            // What was told of and found no room is among them.
            self.give_up_looking();
        }
    }

    /// Nobody looks any more for objects that nobody told of; that is counted once.
    #[cold]
    fn give_up_looking(&self) {
        if self.unseen.give_up() {
            self.table.count(head::LOSSES + loss::LOOKS);
        }
    }

    /// What `collection_starts` and `end` asked for: the name of a class that may have been met in
    /// the heap only.
    pub fn named(&self, class: usize, module_id: usize, name: &str, module: &str) {
        let row = self.classes.row(class);
        if row != 0 {
            self.name(row, module_id, name, module);
        }
    }

    /// Survivors of the collection in progress: where they were, where they are, how many bytes.
    pub fn survived(&self, ranges: impl ExactSizeIterator<Item = (usize, usize, usize)>) {
        // Never in a forked child, which has none of the memory.
        if !self.survey.is_open() {
            return;
        }
        let asked = ranges.len() as u64;
        let noted = self.survey.note(ranges);
        if noted < asked {
            self.table.count_more(head::LOSSES + loss::RANGES, asked.wrapping_sub(noted));
        }
    }

    /// An object waits for its finalizer, since this collection or an earlier one.
    pub fn waits_for_finalizer(&self, object: usize) {
        if self.survey.is_open() && !self.survey.waits_for_finalizer(object) {
            self.table.count(head::LOSSES + loss::RANGES);
        }
    }

    /// What holds living objects from outside the heap, after a collection: object, kind, flags.
    pub fn rooted(&self, roots: impl Iterator<Item = (usize, u32, u32)>) {
        if let Some(info) = self.info().filter(|_| self.holders.is_open()) {
            self.holders.told(&self.table, syscall::now_ns);
            self.holders.roots(&self.classes, &info, roots);
        }
    }

    /// A living object after a collection, and those it refers to. False: no more is wanted.
    #[inline]
    pub fn alive(&self, class: usize, to: &[usize]) -> bool {
        let Some(info) = self.info().filter(|_| self.holders.is_open()) else { return false };
        self.holders.told(&self.table, syscall::now_ns);
        self.holders.object(&self.classes, &info, class, to);
        true
    }

    /// The collection is over; the world still stands.
    pub fn collection_ends(&self) {
        let Some(info) = self.info().filter(|_| self.survey.is_open()) else { return };
        if self.unannounced.swap(0, Ordering::Relaxed) != 0 {
            self.take_lock();
        }
        let (mut ended_ns, ended_cpu_ns) = (syscall::now_ns(), syscall::thread_cpu_ns());
        if self.walk.load(Ordering::Relaxed) == walk::SKIPPED {
            // The event that was relied on did not come (somebody ended our session): nobody told
            // of survivors.
            self.table.count(head::LOSSES + loss::RANGES);
            info.set_mask(Mask::EXACT).ok();
            self.walk.store(walk::NEEDED, Ordering::Relaxed);
        }
        let now_ms = self.milliseconds(ended_ns);
        let event = (
            self.event_number.swap(0, Ordering::Relaxed),
            self.event_what.swap(0, Ordering::Relaxed),
        );
        self.table.change(|table| {
            // The runtime's going through all objects is no part of the collection.
            ended_ns =
                self.holders.end(table, self.survey.collections(), ended_ns).unwrap_or(ended_ns);
            self.survey.finish(table, &self.chunks, &info, now_ms, event);
            table.set(head::COUNTED_NS, ended_ns);
            let lost = [loss::UNFOLLOWED, loss::RANGES].map(|word| table.get(head::LOSSES + word));
            let lost = lost.into_iter().fold(0, u64::wrapping_add);
            if self.lost_lives.swap(lost, Ordering::Relaxed) != lost {
                // Objects that were counted may be in generation 0 and in no list.
                self.give_up_looking();
            }
            if self.unseen.is_wanted() {
                self.weigh();
            }
            let own_ns = syscall::now_ns().wrapping_sub(ended_ns);
            self.survey.write(table, ended_ns, own_ns);
        });
        self.own_cpu_since(ended_cpu_ns);
        self.release_lock();
    }

    /// This thread has worked for exact mode since its CPU time was that.
    #[inline(never)]
    fn own_cpu_since(&self, before_ns: u64) {
        self.table.add(head::OWN_CPU_NS, syscall::thread_cpu_ns().wrapping_sub(before_ns));
    }

    /// Notes of each class how much nobody was told of for each object that somebody was told of.
    fn weigh(&self) {
        let mut changed = false;
        for row in 1..self.table.get(head::TYPES) as usize {
            let of = self.table.type_row(row);
            let [unseen, objects, bytes, class] =
                [of_type::UNSEEN, of_type::OBJECTS, of_type::BYTES, of_type::CLASS]
                    .map(|word| of.get(word));
            let told = objects.saturating_sub(unseen);
            if unseen != 0 && told != 0 {
                let silent_bytes = (bytes / objects.max(1)).saturating_mul(unseen) / told;
                changed |= self.classes.stands_for(class as usize, row, silent_bytes);
            }
        }
        // Threads remember what they know of a class until then.
        if changed {
            self.classes.next_epoch();
        }
    }

    fn milliseconds(&self, now_ns: u64) -> u32 {
        let lived_ns = now_ns.saturating_sub(self.began_ns.load(Ordering::Relaxed));
        u32::try_from(lived_ns / 1_000_000).unwrap_or(u32::MAX)
    }

    /// An event of the runtime's, of whomever's session it is. Only the number and reason of
    /// collections matter.
    pub fn event(&self, provider: usize, id: u32, data: &[u8]) {
        const GC_START: u32 = 1;
        if !self.is_counting() || !self.is_runtime_provider(provider) || id != GC_START {
            return;
        }
        let word = |at: usize| {
            let bytes = data.get(at..)?.first_chunk::<4>()?;
            Some(u64::from(u32::from_le_bytes(*bytes)))
        };
        let (Some(number), Some(depth), Some(reason), Some(kind)) =
            (word(0), word(4), word(8), word(12))
        else {
            return;
        };
        let Some(info) = self.info() else { return };
        if self.survey.is_open() {
            let is_skipped = self.walk.load(Ordering::Relaxed) == walk::SKIPPED;
            if !is_skipped || info.set_mask(Mask::EXACT).is_ok() {
                self.walk.store(walk::SKIPPABLE, Ordering::Relaxed);
            }
        } else {
            // Where memory is short a full collection may follow another one at once, and nothing
            // else tells of its beginning (provisional mode, `garbage_collect_pm_full_gc`); of
            // survivors and its end it is told as ever.
            self.survey.begin(
                u8::try_from(depth).unwrap_or(survey::OLDEST),
                false,
                syscall::now_ns(),
                0,
                &info,
            );
            self.unannounced.store(1, Ordering::Relaxed);
        }
        self.event_number.store(number.wrapping_add(1), Ordering::Relaxed);
        self.event_what.store((reason & 0xff) << 16 | (kind & 0xff) << 24, Ordering::Relaxed);
    }

    fn is_runtime_provider(&self, provider: usize) -> bool {
        if self.runtime_provider.load(Ordering::Relaxed) == provider {
            return true;
        }
        if self.other_provider.load(Ordering::Relaxed) == provider {
            return false;
        }
        let Some(of) = self.info().and_then(|info| info.provider(provider)) else { return false };
        let is_runtimes = of == Provider::Runtime;
        let known = if is_runtimes { &self.runtime_provider } else { &self.other_provider };
        known.store(provider, Ordering::Relaxed);
        is_runtimes
    }

    /// The life of the clock's thread: lifetimes are told by a clock that ticks every millisecond,
    /// since reading one costs as much as all else that is done for an object; and the counts are
    /// brought up to date.
    pub fn keep_time(&self) {
        syscall::name_thread(c"perfusion-exact");
        let mut counted_ns = 0;
        while self.over.load(Ordering::Acquire) == 0 {
            let before = self.tick.load(Ordering::Relaxed);
            if before == 0 {
                break;
            }
            let now_ns = syscall::now_ns();
            let tick = u64::from(self.milliseconds(now_ns)).wrapping_add(1);
            // Not when the process has ended meanwhile.
            self.tick.compare_exchange(before, tick, Ordering::Relaxed, Ordering::Relaxed).ok();
            let asked = self.table.get(head::ASKED);
            if asked != self.table.get(head::ANSWERED)
                || now_ns.saturating_sub(counted_ns) >= COUNT_NS
            {
                counted_ns = now_ns;
                self.count(now_ns);
                self.table.set(head::ANSWERED, asked);
            }
            syscall::sleep_ns(TICK_NS);
        }
    }

    /// Counts what was allocated since the last time.
    fn count(&self, now_ns: u64) {
        self.take_lock();
        self.table.change(|table| {
            self.chunks.count_all(table);
            table.set(head::COUNTED_NS, now_ns);
        });
        self.release_lock();
    }

    /// The process ends: the last objects are counted, and no more.
    pub fn end(&self, name: impl Fn(usize)) {
        if self.is_counting() && self.over.swap(1, Ordering::AcqRel) == 0 {
            let has_looked = self.unseen.is_wanted()
                && self.info().is_some_and(|info| self.look_at_all(info, name))
                && self.unseen.is_wanted();
            self.tick.store(0, Ordering::Relaxed);
            // Whoever counts is a native thread, and a collection in progress ends.
            self.count(syscall::now_ns());
            self.table.set(head::LOOKED_LAST, u64::from(has_looked));
            self.table.set(head::STATE, state::ENDED);
        }
    }

    /// Looks for objects that no callback told of when no collection will. The runtime stops the
    /// world for that and goes through the whole heap. False: it does not.
    fn look_at_all(&self, info: Info, name: impl Fn(usize)) -> bool {
        let (mut look, mut finds, mut whole) = (None, self.finds(), true);
        let told = info.each_object(|object| {
            let look = look.get_or_insert_with(|| {
                // Whoever has the lock is a native thread, which does not stand still.
                self.take_lock();
                // From here on nothing is counted, and no collection looks: the edges stay.
                self.tick.store(0, Ordering::Relaxed);
                self.survey.locate(&info);
                self.unseen.look(&self.survey, &self.chunks, &info, false)
            });
            match look.is_unseen(object) {
                Some(true) => {
                    if let Some(met) = unseen::meet(&info, object).filter(|met| !met.has_components)
                    {
                        self.found(&info, object, met, &mut finds, &name);
                    }
                }
                Some(false) => {}
                // The frozen heap is in no generation.
                None => whole &= info.is_frozen(object),
            }
        });
        if look.is_some() {
            self.release_lock();
        }
        told && whole
    }

    fn take_lock(&self) {
        // Whoever holds it does so for a count, a whole collection or the last look, and never
        // waits for managed code.
        while self.lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            syscall::sleep_ns(50_000);
        }
    }

    fn release_lock(&self) {
        self.lock.store(0, Ordering::Release);
    }
}

/// When the objects that a look finds count as born; the class of the last one, and its row.
struct Finds {
    born_ms: u64,
    class: usize,
    row: usize,
}

/// The words of a collection's row that sum over its objects, in order.
const SUMS: usize = row::RESURRECTED - row::SURVIVED + 1;
