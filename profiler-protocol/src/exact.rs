//! The exact table: what `record --exact` knows of every object of a process, in a memfd of its own
//! beside the region. The shim counts into it in place; the daemon opens it while the process
//! starts and reads it whenever it likes, also when the process is long gone, so nothing can be
//! lost on the way. Described byte by byte in `docs/shim-protocol.md`.

use crate::load::CLASS_ID;

/// Class id under which the runtime loads the shim as its main profiler.
pub const EXACT_CLASS_ID: [u8; 16] = {
    let mut id = CLASS_ID;
    // The last letter of the text the id ends with.
    id[15] = b'X';
    id
};

/// First word of a table that is ready to be read: `PERFEXAC`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PERFEXAC");
/// Version of this layout.
pub const VERSION: u64 = 2;
/// Name given to `memfd_create`.
pub const TABLE_NAME: &core::ffi::CStr = c"perfusion-exact";
/// How such a mapping reads in `/proc/PID/maps`.
pub const MAPS_NAME: &str = "/memfd:perfusion-exact (deleted)";

/// Words of the header.
pub const HEADER_WORDS: usize = 512;
/// Most types told apart; row 0 stands for all others.
pub const MOST_TYPES: usize = 16_384;
/// Words of one type's row.
pub const TYPE_WORDS: usize = 64;
/// Bytes of names.
pub const NAME_BYTES: usize = 4 << 20;
/// Most collections with a row of their own.
pub const MOST_COLLECTIONS: usize = 65_536;
/// Words of one collection's row.
pub const COLLECTION_WORDS: usize = 32;
/// Most entries that say what of one type survived one collection.
pub const MOST_SURVIVALS: usize = 1 << 20;
/// Words of such an entry: collection (low half) and type, objects, bytes, moved objects.
pub const SURVIVAL_WORDS: usize = 4;

/// First word of the types.
pub const TYPES_AT: usize = HEADER_WORDS;
/// First word of the names.
pub const NAMES_AT: usize = TYPES_AT + MOST_TYPES * TYPE_WORDS;
/// First word of the collections.
pub const COLLECTIONS_AT: usize = NAMES_AT + NAME_BYTES / 8;
/// First word of the survivals.
pub const SURVIVALS_AT: usize = COLLECTIONS_AT + MOST_COLLECTIONS * COLLECTION_WORDS;
/// Words of the table. Only what is used has memory.
pub const TABLE_WORDS: usize = SURVIVALS_AT + MOST_SURVIVALS * SURVIVAL_WORDS;
/// Bytes of the table.
pub const TABLE_BYTES: usize = TABLE_WORDS * 8;

/// What the daemon says in [`head::READER`]; 0 until it has found the table.
pub mod reader {
    /// It has the table open: count.
    pub const OPENED: u64 = 1;
    /// It has as many as it can have: go on without.
    pub const DECLINED: u64 = 2;
}

/// Words of the header, by number. All but [`head::READER`] and [`head::ASKED`] are written by the
/// shim.
pub mod head {
    /// [`super::MAGIC`], written last.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`].
    pub const VERSION: usize = 1;
    /// [`super::TABLE_BYTES`].
    pub const BYTES: usize = 2;
    /// The recorder it was made for.
    pub const OWNER: usize = 3;
    /// The process as it sees itself.
    pub const PID: usize = 4;
    /// [`crate::layout::pack_runtime`].
    pub const RUNTIME: usize = 5;
    /// When counting began.
    pub const STARTED_NS: usize = 6;
    /// [`super::state`].
    pub const STATE: usize = 7;
    /// When the counts were last brought up to date.
    pub const COUNTED_NS: usize = 8;
    /// Odd while numbers that belong together are being changed.
    pub const SEQUENCE: usize = 9;
    /// Type rows in use, row 0 included.
    pub const TYPES: usize = 10;
    /// Bytes of names in use.
    pub const NAMES: usize = 11;
    /// Collections that ended.
    pub const COLLECTIONS: usize = 12;
    /// Survival entries in use.
    pub const SURVIVALS: usize = 13;
    /// All objects allocated.
    pub const OBJECTS: usize = 14;
    /// Their bytes.
    pub const OBJECT_BYTES: usize = 15;
    /// Nanoseconds that exact mode added to collections.
    pub const OWN_NS: usize = 16;
    /// Place of the collection after which somebody looked who holds what, plus one; 0 before.
    pub const LOOKED_AT: usize = 17;
    /// Nanoseconds that took, the runtime's part included.
    pub const LOOKED_NS: usize = 18;
    /// Objects among all that no callback told of: they were found in generation 0, by a collection
    /// or at the end.
    pub const UNSEEN: usize = 19;
    /// 1 when the process has ended and those of its last moments were looked for, too.
    pub const LOOKED_LAST: usize = 20;
    /// CPU time of what exact mode added to collections, nanoseconds: [`OWN_NS`] has also what the
    /// thread waited for a CPU, and the runtime's part of a look.
    pub const OWN_CPU_NS: usize = 21;
    /// Why the process is not counted ([`super::reason`]).
    pub const REASON: usize = 22;
    /// First of the losses ([`super::LOSSES`]).
    pub const LOSSES: usize = 24;
    /// Written by the daemon, and waited for: [`super::reader`].
    pub const READER: usize = 64;
    /// Written by the daemon: with every change the shim brings the counts up to date, and repeats
    /// the word in [`ANSWERED`].
    pub const ASKED: usize = 65;
    /// The last [`ASKED`] that was obeyed.
    pub const ANSWERED: usize = 72;
}

/// Most bytes of address space (RLIMIT_AS) with which a process is not counted: exact mode would
/// reserve a noticeable part.
pub const LEAST_ADDRESS_SPACE: usize = 8 << 30;

/// Values of [`head::REASON`]. 0: none, or the recorder's.
pub mod reason {
    /// There is too little address space: RLIMIT_AS is below [`super::LEAST_ADDRESS_SPACE`], or the
    /// kernel refused.
    pub const ADDRESS_SPACE: u64 = 1;
}

/// Values of [`head::STATE`].
pub mod state {
    // 0: the process waits for somebody to open the table.
    /// Counting.
    pub const COUNTING: u64 = 1;
    /// The process has ended of its own accord, and all of it is counted.
    pub const ENDED: u64 = 2;
    /// Nobody came, or the runtime refused: this process is not counted.
    pub const DECLINED: u64 = 3;
}

/// Words of a type's row.
pub mod of_type {
    /// The runtime's ClassID.
    pub const CLASS: usize = 0;
    /// Where its name is: offset u32, bytes of the name u16, bytes of the module's name behind it
    /// u16. 0 while it has none.
    pub const NAME: usize = 1;
    /// Objects allocated.
    pub const OBJECTS: usize = 2;
    /// Bytes allocated.
    pub const BYTES: usize = 3;
    /// Bytes of the dead.
    pub const DEAD_BYTES: usize = 4;
    /// Survivors of collections: an object counts for each that looked at it and left it alive.
    pub const SURVIVALS: usize = 5;
    /// Their bytes.
    pub const SURVIVAL_BYTES: usize = 6;
    /// Objects that survived at least one collection.
    pub const SURVIVORS: usize = 7;
    /// Their bytes.
    pub const SURVIVOR_BYTES: usize = 8;
    /// Times an object was moved.
    pub const MOVES: usize = 9;
    /// Bytes moved.
    pub const MOVED_BYTES: usize = 10;
    /// Objects that came to generation 1.
    pub const PROMOTED_1: usize = 11;
    /// Objects that came to generation 2.
    pub const PROMOTED_2: usize = 12;
    /// Times an object was queued for its finalizer.
    pub const FINALIZABLE: usize = 13;
    /// Times an object was alive when it had left that queue.
    pub const RESURRECTED: usize = 14;
    /// The runtime's ModuleID of its module; 0 when it did not tell.
    pub const MODULE: usize = 15;
    /// First of the dead by collections lived through.
    pub const BY_COLLECTIONS: usize = 16;
    /// First of the dead by time lived.
    pub const BY_TIME: usize = 32;
    /// Living objects when somebody looked who holds what ([`super::head::LOOKED_AT`]).
    pub const ALIVE: usize = 56;
    /// First of the roots that held them then, by COR_PRF_GC_ROOT_KIND: other, stack, finalizer,
    /// handle. Weak ones hold nothing.
    pub const ROOTS: usize = 57;
    /// References that they had to others.
    pub const REFERENCES: usize = 61;
    /// References that others had to them.
    pub const REFERENCED: usize = 62;
    /// Objects among the allocated that no callback told of.
    pub const UNSEEN: usize = 63;
}

/// Buckets of lifetimes in collections: 0, 1, 2 to 3, 4 to 7, …; the last one has no end.
pub const COLLECTION_BUCKETS: usize = 16;
/// Buckets of lifetimes in time: less than 1 ms, 1 ms, 2 to 3 ms, 4 to 7 ms, …; the last one has no
/// end.
pub const TIME_BUCKETS: usize = 24;

/// Kinds of roots.
pub const ROOT_KINDS: usize = 4;
/// Words of a type's row that say who holds its objects.
pub const HELD_WORDS: usize = of_type::REFERENCED - of_type::ALIVE + 1;

/// The bucket of `number`, of so many.
#[must_use]
pub const fn bucket(number: u32, buckets: usize) -> usize {
    let bits = (u32::BITS - number.leading_zeros()) as usize;
    let last = buckets.saturating_sub(1);
    if bits > last { last } else { bits }
}

/// Words of a collection's row.
pub mod of_collection {
    /// Generation; in the second byte 1 when the runtime's event about it was seen, in the third
    /// its reason, in the fourth its kind, in the fifth 1 when the profiling interface calls it
    /// induced.
    pub const WHAT: usize = 0;
    /// The runtime's number of it, if its event was seen.
    pub const NUMBER: usize = 1;
    /// When the runtime began to suspend threads, 0 if unknown.
    pub const SUSPENDING_NS: usize = 2;
    /// When it began.
    pub const BEGAN_NS: usize = 3;
    /// When it ended, exact mode's own work not included.
    pub const ENDED_NS: usize = 4;
    /// When the threads ran again, 0 while they do not.
    pub const RESUMED_NS: usize = 5;
    /// Nanoseconds of that which were exact mode's.
    pub const OWN_NS: usize = 6;
    /// Objects allocated since the one before.
    pub const NEW_OBJECTS: usize = 7;
    /// Their bytes.
    pub const NEW_BYTES: usize = 8;
    /// Objects it looked at and left alive.
    pub const SURVIVED: usize = 9;
    /// Their bytes.
    pub const SURVIVED_BYTES: usize = 10;
    /// Objects it found dead.
    pub const DEAD: usize = 11;
    /// Their bytes.
    pub const DEAD_BYTES: usize = 12;
    /// Survivors it moved.
    pub const MOVED: usize = 13;
    /// Their bytes.
    pub const MOVED_BYTES: usize = 14;
    /// Survivors it put into generation 1.
    pub const PROMOTED_1: usize = 15;
    /// Survivors it put into generation 2.
    pub const PROMOTED_2: usize = 16;
    /// Objects it queued for their finalizer.
    pub const FINALIZABLE: usize = 17;
    /// Objects that had left that queue and are alive.
    pub const RESURRECTED: usize = 18;
    /// Bytes of the heap in use before it, free space between objects included.
    pub const HEAP_BEFORE: usize = 19;
    /// The same after it.
    pub const HEAP_AFTER: usize = 20;
    /// Bytes of the objects alive after it, as far as anybody knows: the dead of generations it did
    /// not look at included, frozen ones not.
    pub const OBJECTS_AFTER: usize = 21;
}

/// What could not be counted as it should be: word behind [`head::LOSSES`], name, what it means.
pub const LOSSES: [(usize, &str, &str); 9] = [
    (loss::THREADS, "threads", "objects not counted: too many threads at a time"),
    (loss::MEMORY, "memory", "objects not counted: no memory to note them"),
    (
        loss::UNFOLLOWED,
        "unfollowed",
        "objects counted whose life was not followed: no memory for it",
    ),
    (
        loss::RANGES,
        "ranges",
        "survivors' ranges, or finalizable objects, not noted: they are too few from there on",
    ),
    (loss::TYPES, "types", "objects counted as `[other types]`: too many types"),
    (
        loss::NAMES,
        "names",
        "types without a name: the runtime did not tell, was not asked in time, or too many names",
    ),
    (loss::SIZES, "sizes", "objects counted without bytes: the runtime did not tell their size"),
    (
        loss::ROWS,
        "rows",
        "collections, or survivors of one, without a row of their own: too many; the sums have \
         them",
    ),
    (
        loss::LOOKS,
        "looks",
        "times when objects that no profiler is told of were not all looked for: values boxed \
         before are missing",
    ),
];

/// Words behind [`head::LOSSES`].
pub mod loss {
    /// No slot for the thread.
    pub const THREADS: usize = 0;
    /// No chunk.
    pub const MEMORY: usize = 1;
    /// No place in the list of living objects.
    pub const UNFOLLOWED: usize = 2;
    /// No place for a range.
    pub const RANGES: usize = 3;
    /// No row for the type.
    pub const TYPES: usize = 4;
    /// No name.
    pub const NAMES: usize = 5;
    /// No size.
    pub const SIZES: usize = 6;
    /// No row for a collection, or no survival entry.
    pub const ROWS: usize = 7;
    /// Generation 0 could not be gone through.
    pub const LOOKS: usize = 8;
}

const _: () = {
    assert!(of_type::BY_COLLECTIONS + COLLECTION_BUCKETS <= of_type::BY_TIME);
    assert!(of_type::BY_TIME + TIME_BUCKETS <= of_type::ALIVE);
    assert!(
        of_type::ROOTS + ROOT_KINDS == of_type::REFERENCES && of_type::REFERENCED < of_type::UNSEEN
    );
    assert!(of_type::UNSEEN < TYPE_WORDS);
    assert!(of_collection::OBJECTS_AFTER < COLLECTION_WORDS);
    assert!(head::LOSSES + LOSSES.len() <= head::READER);
};

#[cfg(test)]
mod tests {
    use super::{COLLECTION_BUCKETS, EXACT_CLASS_ID, LOSSES, bucket};

    #[test]
    fn lifetimes_have_buckets_of_powers_of_two() {
        let of = |n| bucket(n, COLLECTION_BUCKETS);
        assert_eq!([0, 1, 2, 3, 4, 7, 8].map(of), [0, 1, 2, 2, 3, 3, 4]);
        assert_eq!(of(u32::MAX), COLLECTION_BUCKETS - 1);
    }

    #[test]
    fn losses_stand_in_order_and_the_class_is_another() {
        assert!(LOSSES.iter().enumerate().all(|(at, (word, ..))| at == *word));
        assert_ne!(EXACT_CLASS_ID, crate::load::CLASS_ID);
    }
}
