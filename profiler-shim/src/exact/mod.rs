//! Exact mode: the main profiler of a process that was started for it. It is told of every object
//! (ObjectAllocated) and of what each collection did with all of them (MONITOR_GC), and keeps the
//! sums per type in a table that the daemon reads (`profiler_protocol::exact`).
//!
//! What an object costs its thread is one entry of 16 bytes in that thread's [`chunks`]: address,
//! type, size, time. All else is done for all of them at once while the world is stopped
//! ([`survey`]): an object whose address is in no range that survived is dead, one that is goes to
//! the list of its generation. A thread that allocates cannot be stopped inside the callback (it is
//! in cooperative mode), so a collection never meets a half-written entry.

pub(crate) mod chance;
pub(crate) mod chunks;
pub(crate) mod classes;
mod clock;
mod collection;
pub(crate) mod holders;
mod living;
pub(crate) mod ranges;
pub(crate) mod survey;
pub(crate) mod table;
pub(crate) mod unseen;

use crate::machine::thread_block;
use crate::method::Namer;
use crate::recorder;
use crate::region::lasting;
use crate::runtime::heap::RuntimeHeap;
use crate::runtime::info::{Info, InfoCell, Mask, ProviderCache};
use crate::syscall;
use crate::type_name::NameText;
use chunks::{AllocationEntry, Chunks};
use classes::Classes;
use collection::CurrentCollection;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use holders::HolderScan;
use profiler_protocol::exact::{
    HEADER_WORDS, TABLE_NAME, TABLE_WORDS, head, loss, of_collection as row, of_type, reader,
    reason, state,
};
use profiler_protocol::layout::pack_runtime;
use survey::CollectionSurvey;
use table::TableWriter;
use unseen::Unseen;

/// The first runtime that makes objects and tells nobody ([`unseen`]).
const FIRST_WITH_UNSEEN: u16 = 10;

/// What is left to be done about an object that was counted, in this order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Allocated {
    /// When chance has chosen it, to be told of with its stack: its bytes, and how many chance had
    /// to choose from.
    pub(crate) chosen: Option<(u64, u64)>,
    /// Its type was met for the first time.
    pub(crate) first: Option<FirstObject>,
}

/// The first object of a type: its row, and its size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstObject {
    row: usize,
    size_words: u64,
}

/// The profiler of exact mode.
pub(crate) struct Exact {
    table: TableWriter,
    /// Milliseconds since the start plus one while objects are counted; 0 before, after, and in a
    /// forked child.
    tick: &'static AtomicU64,
    chunks: Chunks,
    classes: Classes,
    survey: CollectionSurvey,
    holders: HolderScan,
    unseen: Unseen,
    /// The newest ICorProfilerInfo.
    info: InfoCell,
    providers: ProviderCache,
    began_ns: AtomicU64,
    /// 1 while somebody counts or a collection is under way. Taken with acquire (`take_lock`), put
    /// back with release (`release_lock`).
    lock: AtomicU32,
    current: CurrentCollection,
    /// Losses of objects' lives that are known of.
    lost_lives: AtomicU64,
    /// 1 when the process ends: written in `end`, looked at by the clock's thread (`keep_time`),
    /// which then touches nothing more.
    over: AtomicU32,
}

impl Exact {
    /// A profiler with all its memory; `None` when there is none to be had.
    #[must_use]
    pub(crate) fn new() -> Option<Self> {
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
            info: InfoCell::new(),
            providers: ProviderCache::new(),
            began_ns: AtomicU64::new(0),
            lock: AtomicU32::new(0),
            current: CurrentCollection::new(),
            lost_lives: AtomicU64::new(0),
            over: AtomicU32::new(0),
        })
    }

    /// Shows the table, waits until somebody has opened it, and begins to count. False: nobody
    /// came, or the runtime refuses.
    pub(crate) fn set_up(&self, info: Info) -> bool {
        let (major, minor, build, clr) = info.runtime();
        let began_ns = syscall::now_ns();
        self.began_ns.store(began_ns, Ordering::Relaxed);
        self.info.set(info);
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

    /// Has events about collections delivered: reasons, and what the walk of the heap needs. Runs
    /// managed code, so the tables are ready by now. Without it both are missing, no more.
    pub(crate) fn start_session(&self) {
        const GC: u64 = 1;
        const INFORMATIONAL: u32 = 4;
        if let Some(info) = self.info() {
            info.start_session(GC, INFORMATIONAL, false).ok();
        }
    }

    /// The runtime's interface; `None` before it is set up.
    pub(crate) fn info(&self) -> Option<Info> {
        self.info.get()
    }

    fn is_counting(&self) -> bool {
        self.tick.load(Ordering::Relaxed) != 0
    }

    /// Notes an object of the type that this thread met last, if nothing else is to be done: so it
    /// is with most, and this is all that they cost. False: nothing was done, [`Self::allocated`]
    /// is to do it. Like that, for the thread that has just allocated the object.
    #[inline(always)]
    pub(crate) fn noted(&self, object: usize, class: usize) -> bool {
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
    pub(crate) fn allocated(&self, object: usize, class: usize) -> Allocated {
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
    pub(crate) fn describe(&self, class: usize, FirstObject { row, size_words }: FirstObject) {
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
    pub(crate) fn module_unloads(&self) {
        self.classes.next_epoch();
    }

    /// What `collection_starts` and `end` asked for: the name of a class that may have been met in
    /// the heap only.
    pub(crate) fn named(&self, class: usize, module_id: usize, name: &str, module: &str) {
        let row = self.classes.row(class);
        if row != 0 {
            self.name(row, module_id, name, module);
        }
    }
}

/// The words of a collection's row that sum over its objects, in order.
const SUMS: usize = row::RESURRECTED - row::SURVIVED + 1;
