//! What exact mode does while the world stands still: before a collection, in it and at its end.

use super::Exact;
use super::chunks::AllocationEntry;
use super::classes::ClassLookup;
use super::survey;
use super::unseen::HeapObject;
use crate::machine::thread_block;
use crate::runtime::info::{Info, Mask, Provider};
use crate::syscall;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use profiler_protocol::exact::{head, loss, of_type};

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

/// What is known of the collection in progress beside the survey.
pub(super) struct CurrentCollection {
    /// When the suspension in progress began.
    suspending_ns: AtomicU64,
    /// The runtime's event about it: number plus one, and reason and kind.
    event_number: AtomicU64,
    event_what: AtomicU64,
    /// [`walk`].
    walk: AtomicU32,
    /// 1 while it is one whose beginning no callback has told.
    unannounced: AtomicU32,
}

impl CurrentCollection {
    pub(super) const fn new() -> Self {
        Self {
            suspending_ns: AtomicU64::new(0),
            event_number: AtomicU64::new(0),
            event_what: AtomicU64::new(0),
            walk: AtomicU32::new(walk::NEEDED),
            unannounced: AtomicU32::new(0),
        }
    }
}

/// When the objects that a look finds count as born; the class of the last one, and its row.
pub(super) struct Finds {
    pub(super) born_ms: u64,
    class: usize,
    row: usize,
}

impl Exact {
    /// The runtime begins to suspend threads, for a collection or something else.
    pub(crate) fn suspending(&self) {
        self.current.suspending_ns.store(syscall::now_ns(), Ordering::Relaxed);
    }

    /// Threads run again.
    pub(crate) fn resumed(&self) {
        self.current.suspending_ns.store(0, Ordering::Relaxed);
        if self.is_counting() {
            self.survey.resumed(&self.table, syscall::now_ns());
        }
    }

    /// A collection of the generations up to `condemned` begins: the world has stopped. `name` is
    /// told of classes that are to be named.
    pub(crate) fn collection_starts(&self, condemned: u8, induced: bool, name: impl Fn(usize)) {
        let Some(info) = self.info().filter(|_| self.is_counting()) else { return };
        let (began_ns, began_cpu_ns) = (syscall::now_ns(), syscall::thread_cpu_ns());
        self.take_lock();
        self.current.unannounced.store(0, Ordering::Relaxed);
        self.survey.begin(
            condemned,
            induced,
            began_ns,
            self.current.suspending_ns.swap(0, Ordering::Relaxed),
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
        if self.current.walk.load(Ordering::Relaxed) == walk::SKIPPABLE {
            let is_skipped = info.set_mask(Mask::EXACT_WITHOUT_GC).is_ok();
            self.current
                .walk
                .store(if is_skipped { walk::SKIPPED } else { walk::NEEDED }, Ordering::Relaxed);
        }
        // What we do before and after it, and a look at all counts that is waited for, is no part
        // of the collection.
        let ready_ns = syscall::now_ns();
        self.survey.own(ready_ns.wrapping_sub(began_ns));
        self.own_cpu_since(began_cpu_ns);
        self.survey.goes_on(ready_ns);
    }

    pub(super) fn finds(&self) -> Finds {
        Finds { born_ms: self.tick.load(Ordering::Relaxed).wrapping_sub(1), class: 0, row: 0 }
    }

    /// Notes an object of generation 0 that no callback told of. When it was born is not known: now
    /// at the latest.
    #[inline(never)]
    pub(super) fn found(
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
    pub(super) fn give_up_looking(&self) {
        if self.unseen.give_up() {
            self.table.count(head::LOSSES + loss::LOOKS);
        }
    }

    /// Survivors of the collection in progress: where they were, where they are, how many bytes.
    pub(crate) fn survived(&self, ranges: impl ExactSizeIterator<Item = (usize, usize, usize)>) {
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
    pub(crate) fn waits_for_finalizer(&self, object: usize) {
        if self.survey.is_open() && !self.survey.waits_for_finalizer(object) {
            self.table.count(head::LOSSES + loss::RANGES);
        }
    }

    /// What holds living objects from outside the heap, after a collection: object, kind, flags.
    pub(crate) fn rooted(&self, roots: impl Iterator<Item = (usize, u32, u32)>) {
        if let Some(info) = self.info().filter(|_| self.holders.is_open()) {
            self.holders.told(&self.table, syscall::now_ns);
            self.holders.roots(&self.classes, &info, roots);
        }
    }

    /// A living object after a collection, and those it refers to. False: no more is wanted.
    #[inline]
    pub(crate) fn alive(&self, class: usize, to: &[usize]) -> bool {
        let Some(info) = self.info().filter(|_| self.holders.is_open()) else { return false };
        self.holders.told(&self.table, syscall::now_ns);
        self.holders.object(&self.classes, &info, class, to);
        true
    }

    /// The collection is over; the world still stands.
    pub(crate) fn collection_ends(&self) {
        let Some(info) = self.info().filter(|_| self.survey.is_open()) else { return };
        if self.current.unannounced.swap(0, Ordering::Relaxed) != 0 {
            self.take_lock();
        }
        let (mut ended_ns, ended_cpu_ns) = (syscall::now_ns(), syscall::thread_cpu_ns());
        if self.current.walk.load(Ordering::Relaxed) == walk::SKIPPED {
            // The event that was relied on did not come (somebody ended our session): nobody told
            // of survivors.
            self.table.count(head::LOSSES + loss::RANGES);
            info.set_mask(Mask::EXACT).ok();
            self.current.walk.store(walk::NEEDED, Ordering::Relaxed);
        }
        let now_ms = self.milliseconds(ended_ns);
        let event = (
            self.current.event_number.swap(0, Ordering::Relaxed),
            self.current.event_what.swap(0, Ordering::Relaxed),
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
    pub(super) fn own_cpu_since(&self, before_ns: u64) {
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

    /// An event of the runtime's, of whomever's session it is. Only the number and reason of
    /// collections matter.
    pub(crate) fn event(&self, provider: usize, id: u32, data: &[u8]) {
        const GC_START: u32 = 1;
        let is_runtimes = || self.providers.kind(provider, &self.info) == Provider::Runtime;
        if !self.is_counting() || !is_runtimes() || id != GC_START {
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
            let is_skipped = self.current.walk.load(Ordering::Relaxed) == walk::SKIPPED;
            if !is_skipped || info.set_mask(Mask::EXACT).is_ok() {
                self.current.walk.store(walk::SKIPPABLE, Ordering::Relaxed);
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
            self.current.unannounced.store(1, Ordering::Relaxed);
        }
        self.current.event_number.store(number.wrapping_add(1), Ordering::Relaxed);
        self.current
            .event_what
            .store((reason & 0xff) << 16 | (kind & 0xff) << 24, Ordering::Relaxed);
    }
}
