//! Exact mode (`record --exact`): the tables in which started processes count every object of
//! theirs. `table` reads one as hostile input, [`ExactAccount`] is what came of it and the JSON
//! file,
//! `report::exact_summary` prints that for a person, `report::exact_merge` puts it into the
//! profile. `sources::shim` opens the tables and keeps them as [`ExactTables`].

pub mod table;

use perfusion_sources::shim::{ExactTables, OF_ONE_PROCESS, TABLES};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Version of the JSON file.
pub const VERSION: u32 = 1;

/// Reads all tables of a recording.
#[must_use]
pub fn read(tables: &ExactTables, command: &[String]) -> ExactAccount {
    let mut account =
        ExactAccount { version: VERSION, command: command.to_vec(), ..ExactAccount::default() };
    let mut room = table::TableBudget::new();
    account.left_out = tables.visit(&mut |source| match table::read(source, &mut room) {
        Ok(process) => account.processes.push(process),
        Err(error) => account.unreadable.push(format!("pid {}: {error}", source.pid)),
    });
    account
}

/// The JSON file beside a profile: `app.pb.gz` has `app.exact.json`.
#[must_use]
pub fn path_beside(profile: &Path) -> PathBuf {
    let mut name: OsString = profile.file_name().unwrap_or_default().to_owned();
    let text = name.to_string_lossy().into_owned();
    let known = [".pb.gz", ".pprof.gz", ".pprof", ".pb", ".gz"];
    if let Some(stem) =
        known.iter().find_map(|end| text.strip_suffix(end)).filter(|stem| !stem.is_empty())
    {
        name = stem.into();
    }
    name.push(".exact.json");
    profile.with_file_name(name)
}

impl ExactAccount {
    /// What is said of processes that were too many.
    pub fn left_out(&self) -> Option<String> {
        let counted = self.processes.len() + self.unreadable.len();
        (self.left_out > 0).then(|| {
            format!(
                "not counted: {} .NET programs beside these {counted}: at most {TABLES} can be, \
                 and {OF_ONE_PROCESS} that one process becomes in turn",
                self.left_out
            )
        })
    }
}

/// What exact mode knows of one recording.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExactAccount {
    /// [`VERSION`].
    pub version: u32,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Each .NET process, in the order they started.
    pub processes: Vec<ExactProcess>,
    /// Processes whose table made no sense, and why.
    pub unreadable: Vec<String>,
    /// .NET processes that were not counted, because there were too many.
    #[serde(default)]
    pub left_out: u64,
}

/// How the counting of a process ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It ended of its own accord: all of it is counted.
    #[default]
    Ended,
    /// It still ran when the recording ended.
    Running,
    /// It was killed, crashed or became another program by exec: what it allocated after
    /// `counted_until_ns` is not counted, a second at most.
    Killed,
    /// Not counted: its table was not opened in time, or the runtime refused.
    Declined,
}

/// One process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExactProcess {
    /// Its pid.
    pub pid: u32,
    /// Its name, as `ps` has it.
    #[serde(default)]
    pub name: String,
    /// Version of its runtime.
    pub runtime: String,
    /// How it ended.
    pub ending: Ending,
    /// Why it was not counted, where the process itself knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Nanoseconds from the first instruction that was counted to the last.
    pub counted_ns: u64,
    /// Objects allocated.
    pub objects: u64,
    /// Their bytes: header included, rounded up to 8.
    pub bytes: u64,
    /// CPU time of the process, user and system, if it could be read.
    pub cpu_ns: Option<u64>,
    /// Nanoseconds that exact mode added to collections.
    pub own_ns: u64,
    /// CPU time of that, without the runtime's part of a look at who holds what, where it is known.
    #[serde(default)]
    pub own_cpu_ns: Option<u64>,
    /// What could not be counted as it should be: name and number of each; empty when nothing.
    pub losses: BTreeMap<String, u64>,
    /// Of the objects, those that the runtime told no profiler of: found in the heap by the next
    /// collection, or at the end.
    #[serde(default)]
    pub unseen: u64,
    /// Such objects are missing, those made since the last collection at least (`UNTOLD` of the
    /// report): the process did not end of its own accord, or could not be looked through (loss
    /// `looks`).
    #[serde(default)]
    pub untold: bool,
    /// Its types, most bytes first.
    pub types: Vec<ExactType>,
    /// Its collections, in order.
    pub collections: Vec<ExactCollection>,
    /// When somebody looked who holds what; nobody, without a full collection.
    #[serde(default)]
    pub looked: Option<HolderScanSummary>,
}

/// Objects and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExactCount {
    /// Objects.
    pub objects: u64,
    /// Bytes.
    pub bytes: u64,
}

impl ExactCount {
    /// Adds another count to it.
    pub fn add(&mut self, other: Self) {
        self.objects = self.objects.saturating_add(other.objects);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }

    /// What is left of it without another count.
    #[must_use]
    pub fn less(self, other: Self) -> Self {
        Self {
            objects: self.objects.saturating_sub(other.objects),
            bytes: self.bytes.saturating_sub(other.bytes),
        }
    }
}

/// One type.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExactType {
    /// Its readable name, with type arguments.
    pub name: String,
    /// The name the runtime has for it, where that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub type_raw: Option<String>,
    /// Its module's file name, with `#2` and so on for further modules of that name (of a generic
    /// type of the core library: its first argument's from elsewhere).
    pub module: String,
    /// The runtime's ModuleID of that, and its ClassID of the type: they mean something while the
    /// process lives.
    #[serde(skip)]
    pub module_id: u64,
    /// See there.
    #[serde(skip)]
    pub class: u64,
    /// Allocated.
    pub allocated: ExactCount,
    /// Of these, objects that the runtime told no profiler of ([`ExactProcess::unseen`]).
    #[serde(default)]
    pub unseen: u64,
    /// Found dead by collections.
    pub dead: ExactCount,
    /// Not found dead: alive, or not looked at since.
    pub left: ExactCount,
    /// Objects that survived at least one collection.
    pub survivors: ExactCount,
    /// An object counts for each collection that looked at it and left it alive.
    pub survivals: ExactCount,
    /// Times an object was moved.
    pub moves: ExactCount,
    /// Objects that came to generation 1.
    pub promoted_to_1: u64,
    /// Objects that came to generation 2.
    pub promoted_to_2: u64,
    /// Times an object was queued for its finalizer.
    pub finalizable: u64,
    /// Times an object was still alive when it had left that queue.
    pub resurrected: u64,
    /// Who held its objects when somebody looked ([`ExactProcess::looked`]).
    #[serde(default)]
    pub holders: ExactHolders,
    /// The dead by the number of collections they lived through.
    pub died_after_collections: Vec<Lifetime>,
    /// The dead by the milliseconds they lived.
    pub died_after_ms: Vec<Lifetime>,
    /// What survived each collection that anything survived.
    pub per_collection: Vec<Survival>,
}

/// What held the living objects of a type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExactHolders {
    /// Living objects.
    pub alive: u64,
    /// Roots that held one of them: locals of threads' stacks.
    pub stack_roots: u64,
    /// Handles; those that are weak hold nothing.
    pub handle_roots: u64,
    /// The queue of finalizers.
    pub finalizer_roots: u64,
    /// Others of the runtime's.
    pub other_roots: u64,
    /// References that fields and elements of living objects had to them.
    pub referenced: u64,
    /// References that they had to objects.
    pub references: u64,
}

/// When somebody looked who holds what: after the last full collection that left time for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderScanSummary {
    /// Place of the collection in the list.
    pub collection: u32,
    /// How long it took, the runtime's part included.
    pub took_ns: u64,
}

/// Dead objects of about the same lifetime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lifetime {
    /// Shortest.
    pub from: u32,
    /// Longest; absent for the last bucket, which has no end.
    pub to: Option<u32>,
    /// How many.
    pub objects: u64,
}

/// What of a type survived one collection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survival {
    /// Place of the collection in the list.
    pub collection: u32,
    /// Objects.
    pub objects: u64,
    /// Bytes.
    pub bytes: u64,
    /// Of the objects, those that were moved.
    pub moved: u64,
}

/// One collection.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExactCollection {
    /// Its place in the list.
    pub index: u32,
    /// The runtime's number of it, where its event was seen.
    pub number: Option<u32>,
    /// Highest generation it collected.
    pub generation: u8,
    /// Why: the runtime's word, or `induced` and `other` where its event was not seen.
    pub reason: String,
    /// When it began, nanoseconds since the start of the counting.
    pub began_ns: u64,
    /// From the suspension of the threads until they ran again, exact mode's own work taken away;
    /// absent where one of the two is not known.
    pub pause_ns: Option<u64>,
    /// Of the collection itself, exact mode's own work taken away.
    pub took_ns: u64,
    /// Exact mode's own work in it.
    pub own_ns: u64,
    /// Allocated since the one before.
    pub allocated: ExactCount,
    /// Looked at and left alive.
    pub survived: ExactCount,
    /// Found dead.
    pub dead: ExactCount,
    /// Survivors that were moved.
    pub moved: ExactCount,
    /// Survivors that came to generation 1.
    pub promoted_to_1: u64,
    /// Survivors that came to generation 2.
    pub promoted_to_2: u64,
    /// Objects queued for their finalizer.
    pub finalizable: u64,
    /// Objects that had left that queue and are alive.
    pub resurrected: u64,
    /// Bytes of the heap in use before it, free space between objects included.
    pub heap_before: u64,
    /// The same after it.
    pub heap_after: u64,
    /// Bytes of objects not known to be dead before it; what is missing to `heap_before` is
    /// fragmentation.
    pub objects_before: u64,
    /// Bytes of objects not known to be dead after it; what is missing to `heap_after` is
    /// fragmentation.
    pub objects_after: u64,
}

#[cfg(test)]
mod tests {
    use super::path_beside;
    use std::path::Path;

    #[test]
    fn the_account_lies_beside_its_profile() {
        for (profile, beside) in [
            ("perfusion.pb.gz", "perfusion.exact.json"),
            ("/a/b.c/x.pprof", "/a/b.c/x.exact.json"),
            ("plain", "plain.exact.json"),
            (".pb.gz", ".pb.gz.exact.json"),
        ] {
            assert_eq!(path_beside(Path::new(profile)), Path::new(beside));
        }
    }
}
