//! Reads one process's table (`profiler_protocol::exact`). Every number may be a lie: all are
//! bounded, and names are made printable.

use super::{
    Ending, ExactCollection, ExactCount, ExactProcess, ExactType, HolderScanSummary, Lifetime,
    Survival,
};
use perfusion_aggregate::collections::reason_name;
use perfusion_model::labels::UNKNOWN_TYPE;
use perfusion_sources::shim::{ExactTable, ExactTableRegion};
use perfusion_symbolize::types::{MOST_CONTEXTS, TypeName};
use profiler_protocol::exact::{
    COLLECTION_BUCKETS, COLLECTION_WORDS, COLLECTIONS_AT, LEAST_ADDRESS_SPACE, LOSSES, MAGIC,
    MOST_COLLECTIONS, MOST_SURVIVALS, MOST_TYPES, NAME_BYTES, NAMES_AT, SURVIVAL_WORDS,
    SURVIVALS_AT, TABLE_BYTES, TIME_BUCKETS, TYPE_WORDS, TYPES_AT, VERSION, head, loss,
    of_collection as row, of_type, reason, state,
};
use profiler_protocol::layout::unpack_runtime;
use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

/// How long a process is given to bring its counts up to date: it looks every millisecond.
const ANSWER: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);
/// How long all processes of a recording are given together.
const ALL_ANSWERS: Duration = Duration::from_secs(30);
/// Tries to read numbers that belong together.
const TRIES: usize = 50;
/// Bytes of names, types (up to 2 KB each with their lifetimes), collections and entries of
/// survivors, of all processes of a recording together.
const ALL_NAME_BYTES: usize = 64 << 20;
const ALL_TYPES: usize = 1 << 17;
const ALL_COLLECTIONS: usize = 1 << 18;
const ALL_SURVIVALS: usize = 8 << 20;

/// What the processes of a recording share: how long they may take, and how much they may have to
/// tell.
pub(super) struct TableBudget {
    until: Instant,
    name_bytes: usize,
    types: usize,
    collections: usize,
    survivals: usize,
}

/// Takes up to `wanted` of what is left, and says how many it could not have.
fn take(left: &mut usize, wanted: usize) -> (usize, u64) {
    let taken = wanted.min(*left);
    *left -= taken;
    (taken, (wanted - taken) as u64)
}

impl TableBudget {
    /// All of it.
    pub(super) fn new() -> Self {
        Self {
            until: Instant::now() + ALL_ANSWERS,
            name_bytes: ALL_NAME_BYTES,
            types: ALL_TYPES,
            collections: ALL_COLLECTIONS,
            survivals: ALL_SURVIVALS,
        }
    }
}

/// Why a table cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// A read failed.
    #[error("its table cannot be read: {0}")]
    Read(#[from] io::Error),
    /// Something else.
    #[error("its table has {what} {found:#x}, expected {expected:#x}")]
    NotATable {
        /// Which word.
        what: &'static str,
        /// What it should be.
        expected: u64,
        /// What it is.
        found: u64,
    },
}

/// Words read from a table at once.
struct TableWords(Vec<u64>);

impl TableWords {
    fn read(table: &ExactTableRegion, at: usize, count: usize) -> Result<Self, io::Error> {
        let mut bytes = vec![0; count.saturating_mul(8)];
        table.read(at, &mut bytes)?;
        let words = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        Ok(Self(words.collect()))
    }

    fn get(&self, at: usize) -> u64 {
        self.0.get(at).copied().unwrap_or(0)
    }

    fn rows(&self, words: usize) -> impl Iterator<Item = TableWords> {
        self.0.chunks_exact(words).map(|row| TableWords(row.to_vec()))
    }
}

/// All parts of a table as they were at one moment.
struct TableCopy {
    head: TableWords,
    types: TableWords,
    names: TableWords,
    collections: TableWords,
    survivals: TableWords,
    /// False where they were being changed meanwhile: some of the numbers may not belong together.
    is_whole: bool,
}

/// A loss of the reader's: name, and what it means.
pub const TORN: (&str, &str) =
    ("torn", "read while they were being changed: a part of the numbers may be of another moment");

fn bounded(number: u64, most: usize) -> usize {
    usize::try_from(number).unwrap_or(most).min(most)
}

fn copy(table: &ExactTableRegion) -> Result<TableCopy, TableError> {
    let head = TableWords::read(table, 0, head::READER)?;
    let expect = |what, at, expected: u64| match head.get(at) {
        found if found == expected => Ok(()),
        found => Err(TableError::NotATable { what, expected, found }),
    };
    expect("magic", head::MAGIC, MAGIC)?;
    expect("version", head::VERSION, VERSION)?;
    expect("size", head::BYTES, u64::try_from(TABLE_BYTES).unwrap_or(0))?;
    let types = bounded(head.get(head::TYPES), MOST_TYPES);
    let names = bounded(head.get(head::NAMES), NAME_BYTES).div_ceil(8);
    let collections = bounded(head.get(head::COLLECTIONS), MOST_COLLECTIONS);
    let survivals = bounded(head.get(head::SURVIVALS), MOST_SURVIVALS);
    Ok(TableCopy {
        types: TableWords::read(table, TYPES_AT, types * TYPE_WORDS)?,
        names: TableWords::read(table, NAMES_AT, names)?,
        collections: TableWords::read(table, COLLECTIONS_AT, collections * COLLECTION_WORDS)?,
        survivals: TableWords::read(table, SURVIVALS_AT, survivals * SURVIVAL_WORDS)?,
        is_whole: false,
        head,
    })
}

/// A copy whose sequence word was even and the same before and after; the last try, whatever that
/// was, for a process that never rests or was killed in the midst of a change. It says which.
fn copy_whole(table: &ExactTableRegion, until: Instant) -> Result<TableCopy, TableError> {
    let mut tries = 0;
    loop {
        let mut copied = copy(table)?;
        tries += 1;
        let sequence = copied.head.get(head::SEQUENCE);
        copied.is_whole = sequence % 2 == 0 && table.word(head::SEQUENCE)? == sequence;
        if copied.is_whole || tries >= TRIES || Instant::now() >= until {
            return Ok(copied);
        }
        std::thread::sleep(LOOK);
    }
}

/// Reads what one process has counted so far; brings it up to date first when the process runs.
pub(super) fn read(
    source: &ExactTable,
    room: &mut TableBudget,
) -> Result<ExactProcess, TableError> {
    let table = &source.table;
    if source.is_running() && table.word(head::STATE)? == state::COUNTING {
        let asked = table.word(head::ASKED)?.wrapping_add(1);
        table.set(head::ASKED, asked)?;
        let until = room.until.min(Instant::now() + ANSWER);
        while table.word(head::ANSWERED)? != asked && Instant::now() < until && source.is_running()
        {
            std::thread::sleep(LOOK);
        }
    }
    let copied = copy_whole(table, room.until)?;
    Ok(ExactProcess {
        name: source.name.clone(),
        ..account(&copied, source.pid, source.is_running(), room)
    })
}

fn account(copied: &TableCopy, pid: u32, is_running: bool, room: &mut TableBudget) -> ExactProcess {
    let head = |at: usize| copied.head.get(at);
    let (major, minor, build, _) = unpack_runtime(head(head::RUNTIME));
    let began_ns = head(head::STARTED_NS);
    let mut losses: Vec<(String, u64)> = LOSSES
        .iter()
        .map(|(word, name, _)| ((*name).to_owned(), head(head::LOSSES + word)))
        .collect();
    // Row 0 has the objects of types beyond the table.
    if let Some((_, types)) = losses.get_mut(loss::TYPES) {
        *types = copied.types.get(of_type::OBJECTS);
    }
    let types = types(copied, room, &mut losses);
    let (collections, lost) =
        take(&mut room.collections, copied.collections.0.len() / COLLECTION_WORDS);
    if let Some((_, rows)) = losses.get_mut(loss::ROWS) {
        *rows = rows.saturating_add(lost);
    }
    losses.push((TORN.0.to_owned(), u64::from(!copied.is_whole)));
    ExactProcess {
        pid,
        name: String::new(),
        runtime: format!("{major}.{minor}.{build}"),
        ending: match head(head::STATE) {
            state::ENDED => Ending::Ended,
            state::COUNTING if is_running => Ending::Running,
            state::COUNTING => Ending::Killed,
            _ => Ending::Declined,
        },
        why: (head(head::REASON) == reason::ADDRESS_SPACE).then(|| {
            format!(
                "too little address space (`ulimit -v`, LimitAS= of its service); expected {} GiB \
                 or more, or unlimited",
                LEAST_ADDRESS_SPACE >> 30
            )
        }),
        counted_ns: head(head::COUNTED_NS).saturating_sub(began_ns),
        objects: head(head::OBJECTS),
        bytes: head(head::OBJECT_BYTES),
        cpu_ns: None,
        own_ns: head(head::OWN_NS),
        own_cpu_ns: Some(head(head::OWN_CPU_NS)).filter(|ns| *ns > 0),
        // A collection in progress has found some that are not counted yet.
        unseen: head(head::UNSEEN).min(head(head::OBJECTS)),
        // `CastHelpers.Box` and others take `RuntimeTypeHandle.InternalAllocNoChecks_FastPath`
        // since .NET 10, which never looks whether somebody wants to know.
        untold: major >= 10 && head(head::LOOKED_LAST) == 0,
        losses: losses.into_iter().filter(|(_, count)| *count > 0).collect(),
        types,
        collections: copied
            .collections
            .rows(COLLECTION_WORDS)
            .take(collections)
            .enumerate()
            .map(|(index, words)| collection(index, &words, began_ns))
            .collect(),
        looked: head(head::LOOKED_AT).checked_sub(1).map(|collection| HolderScanSummary {
            collection: u32::try_from(collection).unwrap_or(u32::MAX),
            took_ns: head(head::LOOKED_NS),
        }),
    }
}

fn count(words: &TableWords, objects: usize, bytes: usize) -> ExactCount {
    ExactCount { objects: words.get(objects), bytes: words.get(bytes) }
}

fn collection(index: usize, words: &TableWords, began_ns: u64) -> ExactCollection {
    let [generation, is_known, reason, _, induced, ..] = words.get(row::WHAT).to_le_bytes();
    let is_known = is_known != 0;
    let told = is_known.then(|| reason_name(reason)).flatten();
    let own_ns = words.get(row::OWN_NS);
    let between = |from: usize, to: usize, own_ns: u64| {
        words.get(to).saturating_sub(words.get(from)).saturating_sub(own_ns)
    };
    let dead = count(words, row::DEAD, row::DEAD_BYTES);
    let objects_after = words.get(row::OBJECTS_AFTER);
    let pause_known = words.get(row::SUSPENDING_NS) != 0 && words.get(row::RESUMED_NS) != 0;
    ExactCollection {
        index: u32::try_from(index).unwrap_or(u32::MAX),
        number: is_known.then(|| u32::try_from(words.get(row::NUMBER)).unwrap_or(u32::MAX)),
        generation: generation.min(2),
        reason: match (told, induced) {
            (Some(word), _) => word.to_owned(),
            (None, 1) => "induced".to_owned(),
            (None, _) => "other".to_owned(),
        },
        began_ns: words.get(row::BEGAN_NS).saturating_sub(began_ns),
        pause_ns: pause_known.then(|| between(row::SUSPENDING_NS, row::RESUMED_NS, own_ns)),
        took_ns: between(row::BEGAN_NS, row::ENDED_NS, 0),
        own_ns,
        allocated: count(words, row::NEW_OBJECTS, row::NEW_BYTES),
        survived: count(words, row::SURVIVED, row::SURVIVED_BYTES),
        dead,
        moved: count(words, row::MOVED, row::MOVED_BYTES),
        promoted_to_1: words.get(row::PROMOTED_1),
        promoted_to_2: words.get(row::PROMOTED_2),
        finalizable: words.get(row::FINALIZABLE),
        resurrected: words.get(row::RESURRECTED),
        heap_before: words.get(row::HEAP_BEFORE),
        heap_after: words.get(row::HEAP_AFTER),
        objects_before: objects_after.saturating_add(dead.bytes),
        objects_after,
    }
}

/// Rows of the same name and module are one type: two threads met it at once. Of one file there may
/// be several modules, in load contexts of their own or loaded anew; beyond some they count as one.
fn types(
    copied: &TableCopy,
    room: &mut TableBudget,
    losses: &mut [(String, u64)],
) -> Vec<ExactType> {
    let mut lost = |at: usize, more: u64| {
        if let Some((_, count)) = losses.get_mut(at) {
            *count = count.saturating_add(more);
        }
    };
    let names: Vec<u8> = copied.names.0.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut types: Vec<ExactType> = Vec::new();
    let mut places: HashMap<(String, String, u64), usize> = HashMap::new();
    let mut modules: HashMap<(String, String), Vec<u64>> = HashMap::new();
    let mut of_row = Vec::new();
    // Each name has its own place: whoever lets them overlap does not have more of them for that.
    let mut left = names.len().min(room.name_bytes);
    for (number, words) in copied.types.rows(TYPE_WORDS).enumerate() {
        let is_other = number == 0 || {
            let (_, refused) = take(&mut room.types, usize::from(words.get(of_type::OBJECTS) > 0));
            lost(loss::TYPES, refused.saturating_mul(words.get(of_type::OBJECTS)));
            refused > 0
        };
        let (name, module) = match is_other {
            true => ("[other types]".to_owned(), String::new()),
            false => name(&names, words.get(of_type::NAME), &mut left).unwrap_or_else(|| {
                // One that was just met has no object yet.
                lost(loss::NAMES, u64::from(words.get(of_type::OBJECTS) > 0));
                (UNKNOWN_TYPE.to_owned(), String::new())
            }),
        };
        let mut module_id = if is_other { 0 } else { words.get(of_type::MODULE) };
        let known = modules.entry((name.clone(), module.clone())).or_default();
        match known.last() {
            _ if known.contains(&module_id) => {}
            Some(last) if known.len() >= MOST_CONTEXTS => module_id = *last,
            _ => known.push(module_id),
        }
        let place = *places.entry((name.clone(), module.clone(), module_id)).or_insert(types.len());
        if place == types.len() {
            let TypeName { shown, raw, .. } = TypeName::of(&name);
            types.push(ExactType {
                name: shown.to_string(),
                type_raw: raw.map(|raw| raw.to_string()),
                module,
                module_id,
                class: words.get(of_type::CLASS),
                ..ExactType::default()
            });
        }
        of_row.push(place);
        if let Some(of) = types.get_mut(place) {
            add(of, &words);
        }
    }
    room.name_bytes = room.name_bytes.saturating_sub(names.len());
    let (told, refused) = take(&mut room.survivals, copied.survivals.0.len() / SURVIVAL_WORDS);
    lost(loss::ROWS, refused);
    for entry in copied.survivals.rows(SURVIVAL_WORDS).take(told) {
        let [collection, row] = [entry.get(0) & 0xffff_ffff, entry.get(0) >> 32];
        let place = usize::try_from(row).ok().and_then(|row| of_row.get(row));
        let Some(of) = place.and_then(|&place| types.get_mut(place)) else { continue };
        let collection = u32::try_from(collection).unwrap_or(u32::MAX);
        let more = Survival {
            collection,
            objects: entry.get(1),
            bytes: entry.get(2),
            moved: entry.get(3),
        };
        match of.per_collection.last_mut().filter(|last| last.collection == collection) {
            Some(last) => {
                last.objects = last.objects.saturating_add(more.objects);
                last.bytes = last.bytes.saturating_add(more.bytes);
                last.moved = last.moved.saturating_add(more.moved);
            }
            None => of.per_collection.push(more),
        }
    }
    for of in &mut types {
        of.left = of.allocated.less(of.dead);
    }
    types.retain(|of| of.allocated.objects > 0);
    types.sort_by(|a, b| {
        let names = |of: &ExactType| (of.name.clone(), of.type_raw.clone());
        b.allocated.bytes.cmp(&a.allocated.bytes).then_with(|| names(a).cmp(&names(b)))
    });
    types
}

/// A type's name and its module's, if there is room left for both.
fn name(names: &[u8], word: u64, left: &mut usize) -> Option<(String, String)> {
    let half = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let (at, bytes, module) =
        (half(word & 0xffff_ffff), half(word >> 32 & 0xffff), half(word >> 48));
    let text = |from: usize, bytes: usize| {
        let end = from.saturating_add(bytes);
        perfusion_model::text::printable(&String::from_utf8_lossy(
            names.get(from..end).unwrap_or(&[]),
        ))
    };
    if bytes == 0 {
        return None;
    }
    *left = left.checked_sub(bytes + module)?;
    Some((text(at, bytes), text(at.saturating_add(bytes), module)))
}

fn add(of: &mut ExactType, words: &TableWords) {
    let unseen = words.get(of_type::UNSEEN).min(words.get(of_type::OBJECTS));
    of.unseen = of.unseen.saturating_add(unseen);
    of.allocated.add(count(words, of_type::OBJECTS, of_type::BYTES));
    of.survivals.add(count(words, of_type::SURVIVALS, of_type::SURVIVAL_BYTES));
    of.survivors.add(count(words, of_type::SURVIVORS, of_type::SURVIVOR_BYTES));
    of.moves.add(count(words, of_type::MOVES, of_type::MOVED_BYTES));
    for (sum, at) in [
        (&mut of.promoted_to_1, of_type::PROMOTED_1),
        (&mut of.promoted_to_2, of_type::PROMOTED_2),
        (&mut of.finalizable, of_type::FINALIZABLE),
        (&mut of.resurrected, of_type::RESURRECTED),
        (&mut of.dead.bytes, of_type::DEAD_BYTES),
        (&mut of.holders.alive, of_type::ALIVE),
        (&mut of.holders.other_roots, of_type::ROOTS),
        (&mut of.holders.stack_roots, of_type::ROOTS + 1),
        (&mut of.holders.finalizer_roots, of_type::ROOTS + 2),
        (&mut of.holders.handle_roots, of_type::ROOTS + 3),
        (&mut of.holders.references, of_type::REFERENCES),
        (&mut of.holders.referenced, of_type::REFERENCED),
    ] {
        *sum = sum.saturating_add(words.get(at));
    }
    lifetimes(&mut of.died_after_collections, words, of_type::BY_COLLECTIONS, COLLECTION_BUCKETS);
    lifetimes(&mut of.died_after_ms, words, of_type::BY_TIME, TIME_BUCKETS);
    let dead = of.died_after_collections.iter().map(|lifetime| lifetime.objects);
    of.dead.objects = dead.fold(0, u64::saturating_add);
}

/// Adds the buckets that have anything in them.
fn lifetimes(sums: &mut Vec<Lifetime>, words: &TableWords, first: usize, buckets: usize) {
    for bucket in 0..buckets {
        let objects = words.get(first + bucket);
        if objects == 0 {
            continue;
        }
        let from = bucket.checked_sub(1).map_or(0, |power| 1u32 << power);
        let to = (bucket + 1 < buckets).then(|| from.saturating_mul(2).saturating_sub(1).max(from));
        match sums.binary_search_by_key(&from, |lifetime| lifetime.from) {
            Ok(at) => {
                if let Some(sum) = sums.get_mut(at) {
                    sum.objects = sum.objects.saturating_add(objects);
                }
            }
            Err(at) => sums.insert(at, Lifetime { from, to, objects }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{TableBudget, TableCopy, TableWords, UNKNOWN_TYPE, account};
    use crate::exact::{ExactAccount, ExactCount, Lifetime, Survival};
    use profiler_protocol::exact::{
        COLLECTION_WORDS, NAME_BYTES, SURVIVAL_WORDS, TYPE_WORDS, head, of_type,
    };

    fn row(words: &[(usize, u64)]) -> Vec<u64> {
        let mut row = vec![0; TYPE_WORDS];
        words.iter().for_each(|&(at, value)| row[at] = value);
        row
    }

    #[test]
    fn rows_of_one_name_are_one_type_and_lies_do_no_harm() {
        let name = |at: u64, bytes: u64, module: u64| at | bytes << 32 | module << 48;
        let mut types = row(&[(of_type::OBJECTS, 5)]);
        let dead = of_type::BY_COLLECTIONS;
        types.extend(row(&[
            (of_type::NAME, name(0, 3, 5)),
            (of_type::OBJECTS, 7),
            (of_type::BYTES, 70),
            (dead, 4),
        ]));
        types.extend(row(&[
            (of_type::NAME, name(8, 3, 5)),
            (of_type::OBJECTS, 3),
            (of_type::BYTES, 30),
            (dead + 2, 1),
        ]));
        types.extend(row(&[
            (of_type::NAME, name(4_000_000_000, 60_000, 60_000)),
            (of_type::OBJECTS, u64::MAX),
        ]));
        let mut head = vec![0; head::READER];
        head[head::STARTED_NS] = u64::MAX;
        let copied = TableCopy {
            head: TableWords(head),
            types: TableWords(types),
            names: TableWords(vec![u64::from_le_bytes(*b"A.Bm.dll"); 2]),
            collections: TableWords(vec![u64::MAX; 32]),
            is_whole: false,
            survivals: TableWords(vec![1 << 32, 2, 20, 1, 2 << 32, 1, 10, 0, u64::MAX, 9, 9, 9]),
        };
        let process = account(&copied, 1, false, &mut TableBudget::new());
        assert_eq!(process.losses.get("torn"), Some(&1));
        let of = process.types.iter().find(|of| of.name == "A.B").unwrap();
        assert_eq!(
            (of.module.as_str(), of.allocated),
            ("m.dll", ExactCount { objects: 10, bytes: 100 })
        );
        assert_eq!((of.dead.objects, of.left.objects), (5, 5));
        assert_eq!(
            of.died_after_collections,
            [
                Lifetime { from: 0, to: Some(0), objects: 4 },
                Lifetime { from: 2, to: Some(3), objects: 1 }
            ]
        );
        assert_eq!(
            of.per_collection,
            [Survival { collection: 0, objects: 3, bytes: 30, moved: 1 }]
        );
        assert_eq!(process.losses.get("types"), Some(&5));
        assert_eq!(process.types.len(), 3);
        assert!(process.types.iter().any(|of| of.name == UNKNOWN_TYPE));
        assert_eq!(process.losses.get("names"), Some(&1));
        assert_eq!(process.collections[0].generation, 2);
    }

    /// Each of 16,384 rows can claim 128 KiB of the 4 MiB of names, from another byte on.
    #[test]
    fn names_that_overlap_have_no_more_room_than_others() {
        let words = NAME_BYTES / 8;
        let names = TableWords(
            (0..words as u64)
                .map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15) & !0x8080_8080_8080_8080)
                .collect(),
        );
        let mut types = row(&[]);
        for number in 1..1000 {
            types.extend(row(&[
                (of_type::NAME, number | 0xffff << 32 | 0xffff << 48),
                (of_type::OBJECTS, 1),
            ]));
        }
        let survivals = TableWords(vec![1; SURVIVAL_WORDS * 8]);
        let copied = TableCopy {
            head: TableWords(vec![0; head::READER]),
            types: TableWords(types),
            names,
            collections: TableWords(Vec::new()),
            survivals,
            is_whole: true,
        };
        let mut room = TableBudget { survivals: 10, ..TableBudget::new() };
        let told: Vec<_> = (1..3).map(|pid| account(&copied, pid, false, &mut room)).collect();
        for process in &told {
            let bytes: usize = process.types.iter().map(|of| of.module.len()).sum();
            assert!(bytes <= 3 * NAME_BYTES, "{bytes}");
            assert_eq!(process.losses.get("names"), Some(&(999 - NAME_BYTES as u64 / 0x1_fffe)));
        }
        assert_eq!(
            (told[0].losses.get("rows"), told[1].losses.get("rows"), room.survivals),
            (None, Some(&6), 0)
        );
    }

    #[test]
    fn all_processes_together_have_so_many_types_and_collections() {
        let mut types = row(&[]);
        for number in 0..100 {
            types.extend(row(&[(of_type::NAME, (number * 2) | 2 << 32), (of_type::OBJECTS, 3)]));
        }
        let copied = TableCopy {
            head: TableWords(vec![0; head::READER]),
            types: TableWords(types),
            names: TableWords((0..25).map(|at| 0x4161_4161_4161_4161 + at * 0x0101).collect()),
            collections: TableWords(vec![1; COLLECTION_WORDS * 3]),
            survivals: TableWords(Vec::new()),
            is_whole: true,
        };
        let mut room = TableBudget { types: 150, collections: 5, ..TableBudget::new() };
        let told: Vec<_> = (1..3).map(|pid| account(&copied, pid, false, &mut room)).collect();
        let lost = |at: usize, what| told[at].losses.get(what).copied();
        assert_eq!((lost(0, "types"), lost(0, "rows")), (None, None));
        assert_eq!((lost(1, "types"), lost(1, "rows")), (Some(150), Some(1)));
        let other = told[1].types.iter().find(|of| of.name == "[other types]").unwrap();
        assert_eq!((other.allocated.objects, told[1].collections.len()), (150, 2));
        for process in &told {
            assert_eq!(
                process.types.iter().map(|of| of.allocated.objects).sum::<u64>(),
                300,
                "none is lost"
            );
        }
    }

    #[test]
    fn types_of_two_load_contexts_are_two() {
        const NAMED: &[u8; 32] = b"N.T.<>c__DisplayClass1_0m.dll\0\0\0";
        let name = 24 << 32 | 5 << 48;
        let mut types = row(&[]);
        for (at, module, objects) in [(0, 0x100, 5), (32, 0x200, 7), (64, 0x100, 3)] {
            types.extend(row(&[
                (of_type::NAME, at | name),
                (of_type::MODULE, module),
                (of_type::CLASS, module + objects),
                (of_type::OBJECTS, objects),
                (of_type::BYTES, objects * 24),
            ]));
        }
        let names = NAMED.repeat(3);
        let names = names.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let copied = TableCopy {
            head: TableWords(vec![0; head::READER]),
            types: TableWords(types),
            names: TableWords(names.collect()),
            collections: TableWords(Vec::new()),
            survivals: TableWords(Vec::new()),
            is_whole: true,
        };
        let both = ExactAccount {
            processes: vec![account(&copied, 1, false, &mut TableBudget::new())],
            ..ExactAccount::default()
        };
        let told: Vec<_> = both.processes[0].types.iter().collect();
        assert!(told.iter().all(|of| of.name == "N.T+closure"), "{told:?}");
        assert!(
            told.iter().all(|of| of.type_raw.as_deref() == Some("N.T.<>c__DisplayClass1_0")),
            "{told:?}"
        );
        assert!(
            told.iter().all(|of| of.module == "m.dll") && told[0].module_id != told[1].module_id,
            "{told:?}"
        );
    }
}
