//! The table of processes: fed by events, or by /proc for those that were there before, and asked
//! for finished stacks.
//!
//! A process is (pid, start time, exec count). Its mappings are kept by epoch: whatever is mapped
//! over code takes the old code's rules and methods with it. An unmapping alone is not reported and
//! harmless: no thread can run there.

use super::ProcessError;
use super::budget::{CommonBudget, cpu_time};
use super::container::{ContainerIdentity, home};
use super::counters::ProcessTableCounters;
use super::image::ExecutableImage;
use super::images::{ImageCache, ParentFallback};
use super::live::{CodeView, LiveProcess, ProgramLayout, RulePush, read_maps};
use super::mapping::{FileKey, Mapping, MappingKind, Mappings, Replaced};
use super::name::ProcessName;
use super::published;
use super::rule_update::{RuleUpdate, RuleUpdates};
use super::thread_contexts::ThreadContextLookup;
use super::thread_variable::ThreadVariable;
use crate::process::handle::ProcessHandle;
use crate::system_limits::share_of_open_files;
use ebpf_common::key::{
    SPAN_DESCRIPTOR, SPAN_DISTANCE, SPAN_INDEX, SPAN_MODULE, SPAN_STATIC, SpanPlace,
};
use foldhash::{HashMap, HashMapExt as _};
use perfusion_model::backoff::Backoff;
use perfusion_model::event::{Event, EventKind, MonotonicNs, ShimEvent, UserContext, WalkEnd};
use perfusion_model::frame::{ImageId, Marker, ProcessId};
use perfusion_unwind::rule::Rule;
use perfusion_unwind::unwinder::{UnwindLimits, UnwoundStack, walk_traced};
use serde::{Deserialize, Serialize};
use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most live processes.
const MAX_PROCESSES: usize = 16_384;
/// Most processes, dead or alive, whose name and pid are remembered.
const MAX_INFOS: usize = 65_536;
/// A table for so many is never made smaller.
const FEW: usize = 256;
/// How long an exited process is kept for samples that come late.
const KEEP_EXITED: Duration = Duration::from_secs(10);
/// Shortest time between two times that all processes are read anew: a process that makes mappings
/// without end can fill perf's rings. It doubles while that goes on, and is short again once
/// nothing was lost for as long as the longest.
const DOUBT_INTERVAL: Duration = Duration::from_secs(1);
const LONGEST_DOUBT_INTERVAL: Duration = Duration::from_secs(16);

/// See [`DOUBT_INTERVAL`].
#[derive(Debug)]
struct DoubtInterval(Backoff);

impl Default for DoubtInterval {
    fn default() -> Self {
        Self(Backoff::new(DOUBT_INTERVAL, LONGEST_DOUBT_INTERVAL))
    }
}

/// Shortest time between two searches for processes that are gone, when the table is full.
const SEARCH_INTERVAL: Duration = Duration::from_secs(5);
/// Most memory the mappings of all processes take, bytes: of a thousand with three hundred each.
const MAX_MAPPING_BYTES: usize = 32 << 20;
/// Most `/proc/PID/mem` kept open.
const MAX_MEMORIES: usize = 128;
/// Stacks between two looks at how many are open: a look is at all processes.
const MEMORIES_LOOK: u32 = 64;
/// Most steps and method bodies remembered of all processes together, about 25 MB.
const MAX_CACHED: usize = 1 << 18;

/// No process has this pid.
const NOBODY: u32 = u32::MAX;
/// Most files a forked process takes over as its parent's; one with more looks for each when it is
/// needed. Copies of very many, in very many children, would be gigabytes.
const MAX_INHERITED: usize = 256;

/// Who a process is; stays known after it is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Pid in the initial pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot, when it was read from /proc.
    pub start_ticks: Option<u64>,
    /// How many `execve` were seen.
    pub exec_count: u32,
    /// Its name ([`super::name`]).
    pub name: ProcessName,
    /// Its container and pod.
    pub home: ContainerIdentity,
    /// True when it runs a CLR.
    pub is_clr: bool,
}

/// How a process that is profiled stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Its pid in the initial pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot, when it is known.
    pub start_ticks: Option<u64>,
    /// True when it runs a CLR.
    pub is_clr: bool,
    /// User stacks walked since it became this program.
    pub stacks: u64,
    /// Of them, those that did not reach the thread's start.
    pub stacks_broken: u64,
    /// Milliseconds of CPU time spent on its files and rules.
    pub lookup_ms: u64,
    /// What the probes, the kernel and its shims have told of it, in records.
    #[serde(default)]
    pub records: u64,
    /// Microseconds of CPU time of the daemon for it: all of these records, look-ups included.
    #[serde(default)]
    pub cpu_us: u64,
    /// Milliseconds since the daemon has known it: what to divide by. 0 from a daemon that does not
    /// say.
    #[serde(default)]
    pub known_for_ms: u64,
    /// The service whose profile has it, where services are told apart.
    #[serde(default)]
    pub service: Option<String>,
}

impl ProcessTableCounters {
    fn count(&mut self, finished: &UnwoundStack) {
        self.stacks += 1;
        self.stacks_of_gone_processes +=
            u64::from(finished.broken == Some(Marker::TruncatedProcessGone));
        self.stacks_stale += u64::from(finished.broken == Some(Marker::TruncatedStale));
        self.stacks_exiting += u64::from(finished.is_exiting());
        self.stacks_broken += u64::from(finished.is_broken());
        self.stacks_guessed += u64::from(finished.reached_thread_start && finished.guessed > 0);
    }
}

/// A table is as large as it ever was, here after a storm of short-lived processes, unless it is
/// made smaller: a quarter is to be in use at least.
fn fit<K: Eq + Hash, V>(table: &mut HashMap<K, V>) {
    if table.capacity() > 4 * table.len().max(FEW) {
        table.shrink_to(2 * table.len());
    }
}

/// All processes of a run.
#[derive(Debug, Default)]
pub struct ProcessTable {
    pub(super) live: HashMap<u32, LiveProcess>,
    infos: HashMap<ProcessId, ProcessIdentity>,
    next_id: u32,
    /// Exited, by time.
    exited: VecDeque<(MonotonicNs, ProcessId, u32)>,
    pub(super) images: ImageCache,
    pub(super) rules: HashSet<Arc<Rule>>,
    /// At least the number of steps and bodies remembered.
    cached: usize,
    /// At least the memory all mappings take.
    mapping_bytes: usize,
    pub(super) lessons: RuleUpdates,
    /// The probes walk nothing, so there is nobody to be taught.
    copies_only: bool,
    pub(super) common: CommonBudget,
    /// Records of processes were lost.
    in_doubt: bool,
    /// When all was last doubted because of that, and how long not to do that again.
    doubted: Option<Instant>,
    doubt_interval: DoubtInterval,
    /// Stacks since open memory files were counted.
    stacks_since_look: u32,
    /// When processes that are gone were looked for.
    searched: Option<Instant>,
    pub(super) counters: ProcessTableCounters,
}

impl ProcessTable {
    /// An empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes up what an event says about processes and code; ignores all others.
    pub fn observe(&mut self, event: &Event) {
        match &event.kind {
            EventKind::Exec { pid, comm } => {
                let old = self.remove(*pid);
                let (exec_count, start_ticks) = match &old {
                    Some(old) => {
                        (self.info(old.id).map_or(0, |i| i.exec_count) + 1, old.start_ticks)
                    }
                    None => (1, None),
                };
                // Read anew: runtimes move their child into the container's cgroup just before they
                // let it become the program.
                let home = home(*pid);
                let name = ProcessName::of(*pid, comm);
                let new = self.insert(*pid, start_ticks, exec_count, name, home, Arc::default());
                if let (Ok(_), Some(new)) = (new, self.live.get_mut(pid)) {
                    // All its mappings are about to be reported; what is in none of them is an
                    // address of the program before.
                    new.refreshed = Some(Instant::now());
                    if let Some(old) = old {
                        (new.share, new.elsewhere) = (old.share, old.elsewhere);
                    }
                }
            }
            EventKind::Fork { parent, thread } if parent.pid != thread.pid => {
                // A fork of a process never seen is read from /proc when its first sample comes.
                if let Some(from) = self.live.get(&parent.pid) {
                    let in_doubt = from.in_doubt;
                    let mappings = Arc::clone(&from.mappings);
                    let few = from.images.len() <= MAX_INHERITED;
                    let images = if few { from.images.clone() } else { HashMap::new() };
                    let info = self.infos.get(&from.id);
                    let name = info.map(|i| i.name.clone()).unwrap_or_default();
                    let home = info.map(|i| i.home.clone()).unwrap_or_default();
                    if self.insert(thread.pid, None, 0, name, home, mappings).is_ok()
                        && let Some(process) = self.live.get_mut(&thread.pid)
                    {
                        process.images = images;
                        process.elsewhere =
                            Some(ParentFallback { parent: parent.pid, at: event.time });
                        process.in_doubt = in_doubt;
                    }
                } else {
                    self.remove(thread.pid);
                }
            }
            EventKind::Exit { thread } if thread.tid == thread.pid => {
                if let Some(process) = self.live.get(&thread.pid) {
                    self.exited.push_back((event.time, process.id, thread.pid));
                }
            }
            EventKind::Comm { thread, comm } if thread.tid == thread.pid => {
                if let Some(info) =
                    self.live.get(&thread.pid).and_then(|p| self.infos.get_mut(&p.id))
                {
                    info.name.renamed(thread.pid, comm);
                }
            }
            EventKind::Mmap(mmap) => {
                let Some(mapping) = Mapping::new(mmap) else { return };
                let Some(process) = self.live.get_mut(&mmap.pid) else { return };
                // Its own paths are those of its files, which all processes share.
                let mapping = self.images.share_path(mapping);
                let shared = Arc::strong_count(&process.mappings) > 1;
                let before = if shared { 0 } else { process.mappings.held_bytes() };
                // Opened while the process is most likely there, and always: the inode may be
                // another file's by now.
                if mapping.region == MappingKind::File {
                    let key = mapping.file();
                    process.refill(&mut self.common, Instant::now());
                    if self.common.has_time(&process.share) {
                        let before = cpu_time();
                        let elsewhere = process
                            .elsewhere
                            .map(|elsewhere| ParentFallback { at: event.time, ..elsewhere });
                        let known = process.images.get(&key).copied().flatten();
                        let image = self.images.resolve(mmap.pid, &mapping, elsewhere).ok();
                        // It may be gone or out of reach by now, and is the one that was known
                        // while nobody wrote to that.
                        let image = image.or(known.filter(|id| self.images.is_unchanged(*id)));
                        process.set_image(key, image);
                        self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
                    } else {
                        // Looked for when a stack needs it.
                        self.counters.budget_refusals += 1;
                        if process.images.remove(&key).flatten().is_some() {
                            process.forget_file(key);
                        }
                    }
                }
                process.map(mapping, &mut self.counters);
                process.take_back(&mut self.lessons);
                self.mapping_bytes += process.mappings.held_bytes().saturating_sub(before);
                if let Some(info) = self.infos.get_mut(&process.id) {
                    info.is_clr = process.is_clr;
                }
                self.evict_mappings(MAX_MAPPING_BYTES, mmap.pid);
            }
            EventKind::ProcessRecordsLost => self.in_doubt = true,
            EventKind::Shim { pid, event: ShimEvent::CodeUnloaded { ranges }, .. } => {
                if let Some(process) = self.live.get_mut(pid) {
                    for (start, length) in ranges {
                        process.forget(&(*start..start.saturating_add(*length)));
                    }
                    process.take_back(&mut self.lessons);
                }
            }
            _ => {}
        }
        if self.in_doubt
            && self.doubted.is_none_or(|at| at.elapsed() >= self.doubt_interval.0.delay())
        {
            self.doubt_all();
        }
        self.drop_exited(event.time);
    }

    /// Doubts all processes: an exec, a fork, a mapping or the end of any of them may be unknown,
    /// so each is read anew from /proc when its next stack comes.
    fn doubt_all(&mut self) {
        let quiet = self.doubted.is_none_or(|at| {
            at.elapsed() >= self.doubt_interval.0.delay() + LONGEST_DOUBT_INTERVAL
        });
        if quiet {
            self.doubt_interval.0.reset();
        } else {
            self.doubt_interval.0.failed();
        }
        self.counters.doubts += 1;
        (self.in_doubt, self.doubted) = (false, Some(Instant::now()));
        for process in self.live.values_mut() {
            process.in_doubt = true;
        }
    }

    /// Reads a process anew of which records may be lost. What is known of it stays where it is
    /// still so, and so does what was spent on it.
    fn settle(&mut self, pid: u32) {
        let Some(process) = self.live.get_mut(&pid).filter(|process| process.in_doubt) else {
            return;
        };
        process.refill(&mut self.common, Instant::now());
        if !self.common.has_time(&process.share) {
            self.counters.budget_refusals += 1;
            return;
        }
        // One that has ended, or whose first thread has, stays as it was: there is nothing to be
        // read any more.
        let Some(stat) = super::stat(pid).filter(|stat| stat.state != 'Z') else { return };
        let program = ProgramLayout::of(&stat);
        let same = program.is_told()
            && process.program == Some(program)
            && process.start_ticks == Some(stat.starttime);
        let before = cpu_time();
        if !same {
            let Some(old) = self.remove(pid) else { return };
            // What it has used up stays so, whoever it is: else a process that has records lost
            // would have its share anew.
            if self.adopt(pid).is_ok()
                && let Some(process) = self.live.get_mut(&pid)
            {
                process.share = old.share;
            }
        } else if let Ok(seen) = read_maps(pid) {
            process.in_doubt = false;
            let (held, images) = (process.mappings.held_bytes(), &self.images);
            process.remap(
                seen.into_iter().map(|m| images.share_path(m)).collect(),
                &mut self.counters,
            );
            self.mapping_bytes += process.mappings.held_bytes().saturating_sub(held);
            let changed = |(key, id): (&FileKey, &Option<ImageId>)| {
                id.is_some_and(|id| !images.is_unchanged(id)).then_some(*key)
            };
            let changed: Vec<FileKey> = process.images.iter().filter_map(changed).collect();
            for key in changed {
                process.images.remove(&key);
                process.forget_file(key);
            }
            process.take_back(&mut self.lessons);
            if let Some(info) = self.infos.get_mut(&process.id) {
                info.is_clr = process.is_clr;
            }
        }
        if let Some(process) = self.live.get_mut(&pid) {
            self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
        }
    }

    fn drop_exited(&mut self, now: MonotonicNs) {
        let keep = u64::try_from(KEEP_EXITED.as_nanos()).unwrap_or(u64::MAX);
        for _ in 0..self.exited.len() {
            let Some((at, id, pid)) = self.exited.front().copied() else { break };
            let crowded = self.live.len() >= MAX_PROCESSES || self.exited.len() > MAX_PROCESSES;
            if now.0.saturating_sub(at.0) < keep && !crowded {
                break;
            }
            self.exited.pop_front();
            let Some(process) = self.live.get(&pid).filter(|p| p.id == id) else { continue };
            // Only the main thread may have ended: the others go on until they end too.
            if !crowded && has_threads(pid, process.start_ticks) {
                self.exited.push_back((now, id, pid));
            } else {
                self.remove(pid);
            }
        }
    }

    fn remove(&mut self, pid: u32) -> Option<LiveProcess> {
        let mut process = self.live.remove(&pid);
        if let Some(process) = &mut process {
            process.close_space(&mut self.lessons);
        }
        process
    }

    /// Forgets processes that are gone, except these, to which those still there are added; and
    /// that files but these stand in stacks.
    pub fn forget_gone(&mut self, images: &HashSet<ImageId>, processes: &mut HashSet<ProcessId>) {
        self.remove_gone();
        processes.extend(self.live.values().map(|process| process.id));
        self.infos.retain(|id, _| processes.contains(id));
        fit(&mut self.live);
        fit(&mut self.infos);
        self.images.keep_only(images);
    }

    /// Removes processes whose end was not reported: the pid is free, or another's. Of one that was
    /// forked and never sampled only the pid is known.
    fn remove_gone(&mut self) {
        let exited: HashSet<ProcessId> = self.exited.iter().map(|(_, id, _)| *id).collect();
        let gone = |process: &&LiveProcess| {
            let there = super::start_ticks(process.pid);
            (there.is_none() || process.start_ticks.is_some() && process.start_ticks != there)
                && !exited.contains(&process.id)
        };
        let gone: Vec<u32> = self.live.values().filter(gone).map(|process| process.pid).collect();
        for pid in gone {
            self.remove(pid);
        }
    }

    /// The kernel cannot walk: every stack comes as a copy, and the probes are taught nothing.
    pub fn teach_nobody(&mut self) {
        self.copies_only = true;
    }

    /// Has the probes learn and forget what they are to, by `write`. Stacks that they walk after
    /// that are walked by these rules.
    pub fn teach(&mut self, write: impl FnOnce(Vec<RuleUpdate>)) {
        let (lessons, touched) = self.lessons.take();
        write(lessons);
        let now = MonotonicNs::now();
        for pid in touched {
            if let Some(process) = self.live.get_mut(&pid) {
                process.lessons_arrived(now);
            }
        }
    }

    /// Takes up a process that was there before the recording, from /proc. Known ones are left as
    /// they are.
    ///
    /// # Errors
    /// [`ProcessError`] when it is gone, unreadable or the table is full.
    pub fn adopt(&mut self, pid: u32) -> Result<ProcessId, ProcessError> {
        if let Some(process) = self.live.get(&pid) {
            return Ok(process.id);
        }
        // Asked before anything is read: it is asked at each stack of a process that finds no room.
        self.find_room(pid)?;
        let stat = super::stat(pid).ok_or(ProcessError::Gone { pid })?;
        let program = ProgramLayout::of(&stat);
        let before = cpu_time();
        let mut mappings = Mappings::default();
        let mut refused = 0;
        for mapping in read_maps(pid)? {
            refused +=
                u64::from(mappings.insert(self.images.share_path(mapping)) == Replaced::Refused);
        }
        self.counters.mappings_refused += refused;
        let held = mappings.held_bytes();
        let name = ProcessName::of(pid, &stat.comm);
        let id = self.insert(pid, Some(stat.starttime), 0, name, home(pid), Arc::new(mappings))?;
        if let Some(process) = self.live.get_mut(&pid) {
            let parent = u32::try_from(stat.ppid).ok();
            process.elsewhere =
                parent.map(|parent| ParentFallback { parent, at: MonotonicNs::now() });
            process.program = Some(program);
            self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
        }
        self.mapping_bytes += held;
        self.evict_mappings(MAX_MAPPING_BYTES, pid);
        Ok(id)
    }

    /// Makes sure there is room for a process; answers what follows the next number.
    fn find_room(&mut self, pid: u32) -> Result<u32, ProcessError> {
        if self.has_no_room(pid) && self.searched.is_none_or(|at| at.elapsed() >= SEARCH_INTERVAL) {
            self.searched = Some(Instant::now());
            self.remove_gone();
        }
        let full = self.has_no_room(pid);
        self.next_id.checked_add(1).filter(|_| !full).ok_or_else(|| {
            self.counters.processes_refused += 1;
            ProcessError::Full { pid, limit: MAX_PROCESSES }
        })
    }

    fn has_no_room(&self, pid: u32) -> bool {
        self.live.len() >= MAX_PROCESSES && !self.live.contains_key(&pid)
    }

    fn insert(
        &mut self,
        pid: u32,
        start_ticks: Option<u64>,
        exec_count: u32,
        name: ProcessName,
        home: ContainerIdentity,
        mappings: Arc<Mappings>,
    ) -> Result<ProcessId, ProcessError> {
        let next = self.find_room(pid)?;
        let id = ProcessId(self.next_id);
        self.next_id = next;
        // A pid that is used again.
        self.remove(pid);
        let process = LiveProcess::new(id, pid, start_ticks, mappings);
        if self.infos.len() >= MAX_INFOS {
            let live: HashSet<ProcessId> = self.live.values().map(|p| p.id).collect();
            self.infos.retain(|id, _| live.contains(id));
        }
        let is_clr = process.is_clr;
        self.infos.insert(id, ProcessIdentity { pid, start_ticks, exec_count, name, home, is_clr });
        self.live.insert(pid, process);
        Ok(id)
    }

    /// The process that has `pid` now, if it is known.
    #[must_use]
    pub fn id(&self, pid: u32) -> Option<ProcessId> {
        self.live.get(&pid).map(|p| p.id)
    }

    /// The processes that run a CLR, with when they started.
    pub fn managed(&self) -> impl Iterator<Item = (u32, u64)> {
        let managed = self.live.values().filter(|process| process.is_clr);
        managed.filter_map(|process| Some((process.pid, process.start_ticks?)))
    }

    /// How each of them stands.
    #[must_use]
    pub fn standings(&self) -> Vec<ProcessStatus> {
        let whole = |number: u128| u64::try_from(number).unwrap_or(u64::MAX);
        let standing = |process: &LiveProcess| {
            let (records, cpu, since) = process.share.cost();
            ProcessStatus {
                pid: process.pid,
                start_ticks: process.start_ticks,
                is_clr: process.is_clr,
                stacks: process.stacks,
                stacks_broken: process.stacks_broken,
                lookup_ms: whole(process.share.time().as_millis()),
                records,
                cpu_us: whole(cpu.as_micros()),
                known_for_ms: whole(since.elapsed().as_millis()),
                service: None,
            }
        };
        self.live.values().map(standing).collect()
    }

    /// CPU time spent on look-ups for `pid`.
    pub fn lookup_time(&self, pid: u32) -> Duration {
        self.live.get(&pid).map(|process| process.share.time()).unwrap_or_default()
    }

    /// A record of `pid` was handled, which took so much CPU time beside look-ups. One of a process
    /// that is not known is nobody's.
    pub fn handled(&mut self, pid: u32, time: Duration) {
        if let Some(process) = self.live.get_mut(&pid) {
            process.share.handled(time);
        }
    }

    /// Who `id` is or was.
    #[must_use]
    pub fn info(&self, id: ProcessId) -> Option<&ProcessIdentity> {
        self.infos.get(&id)
    }

    /// The executable mappings of `pid`, by address.
    pub fn mappings(&self, pid: u32) -> impl Iterator<Item = &Mapping> {
        self.live.get(&pid).into_iter().flat_map(|p| p.mappings.iter())
    }

    /// A mapped file; `None` for an id of another run.
    #[must_use]
    pub fn image(&self, id: ImageId) -> Option<&ExecutableImage> {
        self.images.get(id)
    }

    /// Looks whether the threads of `pid` publish what they work for, and teaches the probes where.
    /// It comes out of the process's share of work, as far as that goes: what a process maps
    /// decides how much there is to look at.
    pub fn find_spans(&mut self, pid: u32) -> ThreadContextLookup {
        // The access models of thread-local variables are those of x86-64.
        if !cfg!(target_arch = "x86_64") {
            return ThreadContextLookup::Nothing;
        }
        let publishes = |_: &mut Self| {
            let published =
                ProcessHandle::open(pid).ok().and_then(|target| published::read(&target));
            published.is_some_and(|published| published.threads)
        };
        match self.within_share(pid, publishes) {
            None => return ThreadContextLookup::PutOff,
            Some(false) => return ThreadContextLookup::Nothing,
            Some(true) => {}
        }
        match self.thread_pointers(pid) {
            None => ThreadContextLookup::PutOff,
            Some(None) => ThreadContextLookup::Nothing,
            Some(Some(place)) => {
                self.lessons.push(RuleUpdate::Spans { pid, place });
                ThreadContextLookup::There
            }
        }
    }

    /// Where the threads of `pid` have the variable that points to what they publish, if one of its
    /// files defines it; `None` when its share of work is used up before that is known. What was
    /// found out until then need not be found out again.
    fn thread_pointers(&mut self, pid: u32) -> Option<Option<SpanPlace>> {
        let mappings: Vec<Mapping> = self
            .mappings(pid)
            .filter(|mapping| mapping.region == MappingKind::File)
            .cloned()
            .collect();
        // Debian's musl is called by the C library's name, of which its loader's is a link.
        let is_musl = |path: &str| path.contains("/ld-musl") || path.contains("-linux-musl/");
        let entry_bytes =
            if mappings.iter().any(|mapping| is_musl(&mapping.path)) { 8 } else { 16 };
        for mapping in mappings {
            let found = self.within_share(pid, |table| table.thread_pointer_in(pid, &mapping))?;
            if let Some(place) = found {
                return Some(Some(SpanPlace { entry_bytes, ..place }));
            }
        }
        Some(None)
    }

    /// The same by one of its mappings.
    fn thread_pointer_in(&mut self, pid: u32, mapping: &Mapping) -> Option<SpanPlace> {
        let process = self.live.get_mut(&pid)?;
        let key = mapping.file();
        let asked = match process.images.get(&key) {
            // It could not be opened.
            Some(None) => return None,
            Some(Some(id)) if self.images.is_asked(*id) => Some(*id),
            _ => None,
        };
        let id = match asked {
            Some(id) => id,
            None => {
                let id = self.images.resolve(pid, mapping, process.elsewhere).ok()?;
                process.set_image(key, Some(id));
                id
            }
        };
        let variable = self.images.thread_variable(id)?;
        let image = self.images.get(id)?;
        let bias = mapping.range.start.wrapping_sub(image.mapped_address(mapping.file_offset)?);
        let at = |address: u64| bias.wrapping_add(address);
        let (kind, address, offset) = match variable {
            ThreadVariable::Static(offset) => (SPAN_STATIC, 0, offset.cast_unsigned()),
            ThreadVariable::Distance(address) => (SPAN_DISTANCE, at(address), 0),
            ThreadVariable::Descriptor(address) => (SPAN_DESCRIPTOR, at(address), 0),
            ThreadVariable::Index(address) => (SPAN_INDEX, at(address), 0),
            ThreadVariable::Module(address, offset) => (SPAN_MODULE, at(address), offset),
        };
        Some(SpanPlace { address, offset, kind, entry_bytes: 0 })
    }

    /// Does what the process's share of work has room for.
    fn within_share<T>(&mut self, pid: u32, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let process = self.live.get_mut(&pid)?;
        process.refill(&mut self.common, Instant::now());
        if !self.common.has_time(&process.share) {
            self.counters.budget_refusals += 1;
            return None;
        }
        let before = cpu_time();
        let done = work(self);
        if let Some(process) = self.live.get_mut(&pid) {
            self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
        }
        Some(done)
    }

    /// The threads of `pid` are gone, or publish nothing any more.
    pub fn forget_spans(&mut self, pid: u32) {
        self.lessons.push(RuleUpdate::NoSpans { pid });
    }

    /// The program `pid` runs: the file mapped at its lowest address, where the kernel puts the
    /// executable.
    #[must_use]
    pub fn main_image(&self, pid: u32) -> Option<ImageId> {
        let process = self.live.get(&pid)?;
        let first = process.mappings.iter().find(|mapping| mapping.region == MappingKind::File)?;
        process.images.get(&(first.device, first.inode)).copied().flatten()
    }

    /// What was lost so far.
    #[must_use]
    pub fn counters(&self) -> ProcessTableCounters {
        self.counters
    }

    /// Times unwind data of an image was dropped to stay within memory.
    #[must_use]
    pub fn image_evictions(&self) -> u64 {
        self.images.evictions
    }

    /// Times a mapped file was not opened because this process may have no more open.
    #[must_use]
    pub fn descriptors_short(&self) -> u64 {
        self.images.descriptors_short
    }

    /// Mapped files that were forgotten to make room for others; no stack has a frame in them.
    #[must_use]
    pub fn images_evicted(&self) -> u64 {
        self.images.evicted
    }

    /// Times a mapped file was not taken up because there were too many.
    #[must_use]
    pub fn images_refused(&self) -> u64 {
        self.images.refused
    }

    /// Walks a context of a thread of `pid` to the thread's start. A process not seen before is
    /// taken up from /proc.
    pub fn finish(
        &mut self,
        pid: u32,
        context: &UserContext,
        limits: UnwindLimits,
    ) -> UnwoundStack {
        self.close_memories();
        let adopted = self.adopt(pid);
        self.settle(pid);
        self.fill_start(pid);
        let finished = match adopted {
            Err(ProcessError::Full { .. }) => {
                UnwoundStack::default().broken(Marker::TruncatedNotKnown)
            }
            _ => self.walk_in(pid, context, limits),
        };
        self.evict_caches(MAX_CACHED);
        self.counters.count(&finished);
        if let Some(process) = self.live.get_mut(&pid) {
            process.stacks += 1;
            process.stacks_broken += u64::from(finished.is_broken());
        }
        finished
    }

    fn walk_in(&mut self, pid: u32, context: &UserContext, limits: UnwindLimits) -> UnwoundStack {
        let Some(process) = self.live.get_mut(&pid) else {
            return UnwoundStack::default().broken(Marker::TruncatedProcessGone);
        };
        if let Some(probed) = &context.walk
            && probed.space != process.space.unwrap_or(0)
        {
            if !probed.frames.is_empty() && !process.knows_space(probed.space) {
                return UnwoundStack::default().broken(Marker::TruncatedStale);
            }
            if let Some(space) = process.space {
                // Just given and not there yet, or lost.
                self.lessons.push(RuleUpdate::Space { pid, space });
            }
        }
        let (now, before) = (Instant::now(), process.cached());
        process.used = now;
        let whole = context.walk.as_ref().filter(|probed| probed.end == WalkEnd::ThreadStart);
        let copied = self.copies_only || context.walk.is_none();
        let seen = match whole {
            Some(probed) => process.walked_before(probed, now),
            None if copied => process.copied_before(context, now),
            None => None,
        };
        if let Some(frames) = seen {
            return UnwoundStack {
                frames: frames.to_vec(),
                reached_thread_start: true,
                seen_before: true,
                ..UnwoundStack::default()
            };
        }
        let teaching = if copied { RulePush::Off } else { RulePush::Again };
        let mut view = CodeView {
            process,
            images: &mut self.images,
            rules: &mut self.rules,
            counters: &mut self.counters,
            lessons: &mut self.lessons,
            common: &mut self.common,
            now,
            teaching,
            asleep: context.asleep,
        };
        let (finished, trace) = walk_traced(context, &mut view, limits);
        view.process.take_back(view.lessons);
        if finished.reached_thread_start {
            match whole {
                Some(probed) => view.process.remember_walk(probed, &finished.frames, now),
                None if copied && finished.guessed == 0 && trace.is_whole() => {
                    view.process.remember_copy(context, trace, &finished.frames, now);
                }
                None => {}
            }
        }
        self.cached += view.process.cached().saturating_sub(before);
        finished
    }

    /// Reads the start time of a process that was forked or executed since the recording began: its
    /// record does not tell.
    fn fill_start(&mut self, pid: u32) {
        let Some(process) = self.live.get_mut(&pid).filter(|p| p.program.is_none()) else { return };
        let Some(stat) = super::stat(pid) else { return };
        process.program = Some(ProgramLayout::of(&stat));
        process.start_ticks = process.start_ticks.or(Some(stat.starttime));
        if let Some(info) = self.infos.get_mut(&process.id) {
            info.start_ticks = process.start_ticks;
        }
    }

    /// Drops the mappings of the processes sampled longest ago until all take at most `limit`
    /// bytes; never those of `keep`. They are read anew when a stack needs them.
    fn evict_mappings(&mut self, limit: usize, keep: u32) {
        if self.mapping_bytes <= limit {
            return;
        }
        // Forked processes have their parent's until either maps something.
        let (mut seen, mut bytes) = (HashSet::new(), 0);
        for process in self.live.values() {
            if seen.insert(Arc::as_ptr(&process.mappings)) {
                bytes += process.mappings.held_bytes();
            }
        }
        self.mapping_bytes = bytes;
        let mut oldest: Vec<(Instant, u32)> = self
            .live
            .values()
            .filter(|process| process.pid != keep && !process.mappings.is_empty())
            .map(|process| (process.used, process.pid))
            .collect();
        oldest.sort_unstable();
        for (_, pid) in oldest {
            // A good deal at once: this looks at all processes.
            if self.mapping_bytes <= limit / 4 * 3 {
                return;
            }
            let Some(process) = self.live.get_mut(&pid) else { continue };
            if Arc::strong_count(&process.mappings) == 1 {
                self.mapping_bytes =
                    self.mapping_bytes.saturating_sub(process.mappings.held_bytes());
            }
            process.drop_mappings(&mut self.lessons);
            self.counters.mappings_evicted += 1;
        }
    }

    /// Drops what is remembered of the processes sampled longest ago, until at most `limit` steps
    /// and bodies are left.
    fn evict_caches(&mut self, limit: usize) {
        if self.cached <= limit {
            return;
        }
        self.cached = self.live.values().map(LiveProcess::cached).sum();
        while self.cached > limit {
            let holders = self.live.values_mut().filter(|p| p.cached() > 0);
            let Some(oldest) = holders.min_by_key(|p| p.used) else { return };
            self.cached = self.cached.saturating_sub(oldest.cached());
            oldest.clear_caches(&mut self.lessons);
            self.counters.caches_evicted += 1;
        }
    }

    /// Memory is short: forgets half of what is remembered of walks, and all that was read of files
    /// and can be read again.
    pub fn shed(&mut self) {
        self.evict_caches(self.cached / 2);
        self.evict_mappings(self.mapping_bytes / 2, NOBODY);
        self.live.shrink_to_fit();
        self.images.shed();
        // Of the rules that all processes share, those nobody has any more.
        self.rules.retain(|rule| Arc::strong_count(rule) > 1);
        self.rules.shrink_to_fit();
    }

    /// Bounds the number of open memory files: all are closed when there are too many, and reopen
    /// when needed.
    fn close_memories(&mut self) {
        self.stacks_since_look += 1;
        if self.stacks_since_look < MEMORIES_LOOK {
            return;
        }
        self.stacks_since_look = 0;
        let most = share_of_open_files(MAX_MEMORIES);
        if self.live.len() > most
            && self.live.values().filter(|p| p.memory.is_some()).count() > most
        {
            for process in self.live.values_mut() {
                process.memory = None;
            }
        }
    }
}

/// True when threads other than the main one are left of the process that started at `start_ticks`.
fn has_threads(pid: u32, start_ticks: Option<u64>) -> bool {
    let tasks = || std::fs::read_dir(format!("/proc/{pid}/task")).ok();
    let main = pid.to_string();
    tasks().is_some_and(|tasks| tasks.flatten().any(|task| task.file_name() != *main))
        && start_ticks.is_none_or(|ticks| super::start_ticks(pid) == Some(ticks))
}

#[cfg(test)]
mod tests {
    use super::super::live::CachedBody;
    use super::super::thread_variable::tests::library;
    use super::*;
    use perfusion_model::event::{Mmap, ProbeWalk, RegionId, ThreadId, UserRegs};
    use perfusion_model::frame::FrameKey;
    use perfusion_unwind::managed::JitBody;
    use std::io::Write as _;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::process::{Child, Command, Stdio};

    fn event(kind: EventKind) -> Event {
        Event { time: MonotonicNs(1), kind }
    }

    fn at(seconds: u64, kind: EventKind) -> Event {
        Event { time: MonotonicNs(seconds * 1_000_000_000), kind }
    }

    fn thread(pid: u32) -> ThreadId {
        ThreadId { pid, tid: pid }
    }

    fn mmap(pid: u32, start: u64, len: u64, path: &str) -> EventKind {
        let inode = u64::from(path.starts_with('/'));
        EventKind::Mmap(Mmap {
            pid,
            start,
            len,
            file_offset: 0,
            device: (0, 1),
            inode,
            path: path.into(),
        })
    }

    /// A pid no process can have (kernel limit 2^22), and so have those that follow.
    const NOBODY: u32 = 5_000_000;

    /// Kills and reaps.
    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().ok();
            self.0.wait().ok();
        }
    }

    /// A child that waits in a system call, and its context: stack pointer and PC as /proc states
    /// them, stack from its memory.
    fn sleeper() -> (Sleeper, UserContext) {
        let child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id();
        let child = Sleeper(child);
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let line = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
            let fields: Vec<&str> = line.split_whitespace().collect();
            let number = |s: &str| u64::from_str_radix(s.trim_start_matches("0x"), 16).unwrap();
            // clock_nanosleep: it got to the end of its start-up.
            if let ["230", .., sp, pc] = fields[..] {
                let mut regs = UserRegs { ip: number(pc), known: 1 << 7, ..UserRegs::default() };
                regs.gpr[7] = number(sp);
                let mut stack = vec![0; 16 << 10];
                let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
                let length = memory.read_at(&mut stack, regs.gpr[7]).unwrap();
                stack.truncate(length);
                return (child, UserContext { regs, stack, ..UserContext::default() });
            }
            assert!(Instant::now() < deadline, "sleep never slept: {line}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_sleeping_process_is_walked_to_its_start_by_files_found_through_its_mappings() {
        let (child, context) = sleeper();
        let mut table = ProcessTable::new();
        let id = table.adopt(child.0.id()).unwrap();
        let done = table.finish(child.0.id(), &context, UnwindLimits::default());
        assert!(done.reached_thread_start, "{done:?}");
        assert_eq!((done.guessed, done.broken), (0, None));
        let paths: Vec<String> = done
            .frames
            .iter()
            .map(|frame| match frame {
                FrameKey::Native { image, .. } => table.image(*image).unwrap().path.to_string(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(paths.first().unwrap().contains("libc"), "{paths:?}");
        assert!(!paths.last().unwrap().contains("libc"), "{paths:?}");
        assert_eq!(table.info(id).unwrap().name.as_str(), "sleep");
        let FrameKey::Native { image, .. } = done.frames[0] else { unreachable!() };
        assert!(table.image(image).unwrap().build_id.is_some());
    }

    #[test]
    fn probes_that_walk_nothing_are_taught_nothing_and_a_copy_of_theirs_is_walked_once() {
        let (child, mut context) = sleeper();
        let pid = child.0.id();
        // As on a kernel before 5.17: no rules, so no frames either.
        context.walk = Some(ProbeWalk {
            time: MonotonicNs::now(),
            space: 0,
            frames: Vec::new(),
            end: WalkEnd::HandedOver { exact: true },
        });
        let mut table = ProcessTable::new();
        table.teach_nobody();
        let first = table.finish(pid, &context, UnwindLimits::default());
        assert!(first.reached_thread_start && !first.seen_before, "{first:?}");
        let second = table.finish(pid, &context, UnwindLimits::default());
        assert!(second.seen_before && second.frames == first.frames, "{second:?}");
        assert_eq!((table.counters().lessons, table.lessons.take().0.len()), (0, 0));
        // Where they could walk, the same context is what they have no rules for yet.
        let mut table = ProcessTable::new();
        assert_eq!(
            table.finish(pid, &context, UnwindLimits::default()).frames.len(),
            first.frames.len()
        );
        assert!(table.counters().lessons > 0);
    }

    #[test]
    fn a_look_for_spans_ends_with_the_processs_share_of_work() {
        let (child, _) = sleeper();
        let pid = child.0.id();
        let mut table = ProcessTable::new();
        table.adopt(pid).unwrap();
        assert_eq!(table.thread_pointers(pid), Some(None), "nothing has it");
        let known = |table: &ProcessTable| {
            let ids: Vec<ImageId> = table.live[&pid].images.values().copied().flatten().collect();
            assert!(!ids.is_empty() && ids.iter().all(|id| table.images.is_asked(*id)));
        };
        known(&table);
        // One of its libraries has, mapped where nothing else is.
        let own = (0x3000, object::elf::R_X86_64_TLSDESC, 1, 0);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&library(published::THREAD_VARIABLE, &[own], &[])).unwrap();
        let meta = file.as_file().metadata().unwrap();
        let start = 0x10_0000;
        table.observe(&event(EventKind::Mmap(Mmap {
            pid,
            start,
            len: 0x1000,
            file_offset: 0,
            device: (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev())),
            inode: meta.ino(),
            path: file.path().to_str().unwrap().to_owned(),
        })));
        let place = SpanPlace {
            address: start + 0x3000,
            offset: 0,
            kind: SPAN_DESCRIPTOR,
            entry_bytes: 16,
        };
        assert_eq!(table.thread_pointers(pid), Some(Some(place)));
        let process = table.live.get_mut(&pid).unwrap();
        table.common.spend(&mut process.share, Duration::from_secs(60));
        assert_eq!((table.thread_pointers(pid), table.counters().budget_refusals), (None, 1));
        if cfg!(target_arch = "x86_64") {
            assert_eq!(
                (table.find_spans(pid), table.counters().budget_refusals),
                (ThreadContextLookup::PutOff, 2)
            );
        }
    }

    #[test]
    fn a_stack_of_a_process_that_is_gone_says_so() {
        let mut table = ProcessTable::new();
        let done = table.finish(NOBODY, &UserContext::default(), UnwindLimits::default());
        assert_eq!(done.broken, Some(Marker::TruncatedProcessGone));
        assert_eq!(table.counters().stacks_of_gone_processes, 1);
    }

    #[test]
    fn exec_makes_a_new_process_with_no_mappings() {
        let (child, _) = sleeper();
        let pid = child.0.id();
        let mut table = ProcessTable::new();
        let before = table.adopt(pid).unwrap();
        assert!(table.mappings(pid).next().is_some());
        table.observe(&event(EventKind::Exec { pid, comm: "other".into() }));
        let after = table.id(pid).unwrap();
        assert_ne!(before, after);
        assert!(table.mappings(pid).next().is_none());
        assert_eq!(
            (table.info(after).unwrap().exec_count, table.info(after).unwrap().name.as_str()),
            (1, "other")
        );
        assert_eq!(table.info(before).unwrap().name.as_str(), "sleep", "what was is still known");
    }

    #[test]
    fn a_fork_inherits_mappings_and_a_new_thread_is_no_process() {
        let mut table = ProcessTable::new();
        table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "parent".into() }));
        table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "//anon")));
        let (parent, child) = (thread(NOBODY), thread(NOBODY + 1));
        table.observe(&event(EventKind::Fork { parent, thread: child }));
        assert_eq!(table.mappings(child.pid).count(), 1);
        let same = ThreadId { pid: NOBODY, tid: NOBODY + 2 };
        table.observe(&event(EventKind::Fork { parent, thread: same }));
        assert_eq!(table.id(NOBODY + 2), None);
        table.observe(&event(mmap(NOBODY, 0x5000, 0x1000, "//anon")));
        assert_eq!((table.mappings(NOBODY).count(), table.mappings(child.pid).count()), (2, 1));
    }

    /// Of a process that was there before us and has never been seen in them.
    #[test]
    fn files_of_a_fork_that_is_gone_are_found_with_its_parent() {
        let found = |forked: MonotonicNs| {
            let mut table = ProcessTable::new();
            let (parent, child) = (thread(std::process::id()), thread(NOBODY));
            table.adopt(parent.pid).unwrap();
            let kind = EventKind::Fork { parent, thread: child };
            table.observe(&Event { time: forked, kind });
            let regs =
                UserRegs { ip: home as *const () as u64, known: u16::MAX, ..UserRegs::default() };
            table.finish(
                child.pid,
                &UserContext { regs, ..UserContext::default() },
                UnwindLimits::default(),
            );
            table.main_image(child.pid)
        };
        assert!(found(MonotonicNs::now()).is_some());
        assert_eq!(
            found(MonotonicNs(0)),
            None,
            "changed since: it may be another file under the same number"
        );
    }

    #[test]
    fn after_lost_records_running_processes_are_read_anew() {
        let (child, context) = sleeper();
        let pid = child.0.id();
        let mut table = ProcessTable::new();
        // As if its exec record, and the mappings after it, had been lost.
        table.observe(&event(EventKind::Exec { pid, comm: "before".into() }));
        table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "ended".into() }));
        let (before, ended) = (table.id(pid), table.id(NOBODY));
        table.common.spend(&mut table.live.get_mut(&pid).unwrap().share, Duration::from_millis(3));
        table.observe(&event(EventKind::ProcessRecordsLost));
        let done = table.finish(pid, &context, UnwindLimits::default());
        assert!(done.reached_thread_start, "{done:?}");
        assert_ne!(table.id(pid), before);
        assert_eq!(table.id(NOBODY), ended);
        assert!(
            table.live[&pid].share.time() >= Duration::from_millis(3),
            "what it has used up stays so"
        );
        table.observe(&event(EventKind::ProcessRecordsLost));
        assert_eq!(table.counters().doubts, 1, "not twice a second");
    }

    #[test]
    fn what_is_known_of_a_process_outlives_lost_records_where_it_is_still_so() {
        let (child, context) = sleeper();
        let pid = child.0.id();
        let mut table = ProcessTable::new();
        let id = table.adopt(pid).unwrap();
        let whole = table.finish(pid, &context, UnwindLimits::default());
        let mapped: Vec<Mapping> = table.mappings(pid).cloned().collect();
        // As if the record of one that covers code had been lost, and of another that was taken
        // away again.
        table.observe(&event(mmap(pid, 0x1_0000, 0x1000, "/somewhere")));
        table.observe(&event(mmap(pid, mapped[0].range.start, 0x1000, "/elsewhere")));
        let steps = table.live[&pid].cached();
        table.observe(&event(EventKind::ProcessRecordsLost));
        assert!(table.live[&pid].in_doubt);
        assert_eq!(table.finish(pid, &context, UnwindLimits::default()).frames, whole.frames);
        assert_eq!(table.id(pid), Some(id));
        assert!(!table.live[&pid].in_doubt && table.live[&pid].cached() >= steps && steps > 0);
        assert_eq!(table.mappings(pid).cloned().collect::<Vec<_>>(), mapped);
    }

    #[test]
    fn losses_that_go_on_are_not_made_up_for_every_second() {
        let mut table = ProcessTable::new();
        let mut intervals = Vec::new();
        for _ in 0..6 {
            table.observe(&event(EventKind::ProcessRecordsLost));
            intervals.push(table.doubt_interval.0.delay().as_secs());
            table.doubted = Instant::now().checked_sub(table.doubt_interval.0.delay());
        }
        assert_eq!(intervals, [1, 2, 4, 8, 16, 16]);
        table.doubted = Instant::now().checked_sub(3 * LONGEST_DOUBT_INTERVAL);
        table.observe(&event(EventKind::ProcessRecordsLost));
        assert_eq!(table.doubt_interval.0.delay(), DOUBT_INTERVAL);
    }

    #[test]
    fn a_file_that_is_rewritten_and_mapped_again_is_another_one() {
        let pid = std::process::id();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap().join("plugin.so");
        std::fs::write(&path, "the first").unwrap();
        let meta = path.metadata().unwrap();
        let device = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
        let path_text = path.to_str().unwrap().to_owned();
        let map = |start: u64| {
            let (inode, path) = (meta.ino(), path_text.clone());
            EventKind::Mmap(Mmap { pid, start, len: 0x1000, file_offset: 0, device, inode, path })
        };
        let mut table = ProcessTable::new();
        table.observe(&event(EventKind::Exec { pid, comm: "host".into() }));
        for start in [0x1000, 0x5000] {
            table.observe(&event(map(start)));
        }
        let steps = |table: &mut ProcessTable| {
            for ip in [0x1010, 0x5010] {
                let regs = UserRegs { ip, known: 0, ..UserRegs::default() };
                let context = UserContext { regs, ..UserContext::default() };
                table.finish(pid, &context, UnwindLimits::default());
            }
            table.live[&pid].steps.len()
        };
        assert_eq!(steps(&mut table), 2);
        table.observe(&event(map(0x1000)));
        assert_eq!(table.live[&pid].steps.len(), 2, "the same file at the same place");
        let first = table.main_image(pid).unwrap();
        std::fs::write(&path, "the second one").unwrap();
        assert_eq!(path.metadata().unwrap().ino(), meta.ino());
        table.observe(&event(map(0x1000)));
        assert_eq!(table.live[&pid].steps.len(), 0, "wherever it is mapped");
        assert_ne!(table.main_image(pid).unwrap(), first);
        // And when nobody has time to look at it.
        assert_eq!(steps(&mut table), 2);
        table.common.spend(&mut table.live.get_mut(&pid).unwrap().share, Duration::from_secs(60));
        table.observe(&event(map(0x1000)));
        assert_eq!(table.live[&pid].steps.len(), 0);
    }

    #[test]
    fn the_end_of_processes_that_was_not_reported_is_found_out() {
        let mut table = ProcessTable::new();
        let parent = thread(std::process::id());
        table.adopt(parent.pid).unwrap();
        for child in 1..=u32::try_from(MAX_PROCESSES).unwrap() + 5 {
            table.observe(&event(EventKind::Fork { parent, thread: thread(NOBODY + child) }));
        }
        assert_eq!(
            (table.live.len(), table.counters().processes_refused),
            (7, 0),
            "when the table is full"
        );
        table
            .observe(&event(EventKind::Exit { thread: thread(NOBODY + MAX_PROCESSES as u32 + 1) }));
        let capacities = |table: &ProcessTable| [table.live.capacity(), table.infos.capacity()];
        assert!(capacities(&table).into_iter().all(|capacity| capacity >= MAX_PROCESSES));
        table.forget_gone(&HashSet::new(), &mut HashSet::new());
        assert_eq!(table.live.len(), 2, "one whose end was reported is kept for late stacks");
        assert!(
            capacities(&table).into_iter().all(|capacity| capacity < 4 * FEW),
            "{:?}",
            capacities(&table)
        );
    }

    #[test]
    fn mappings_of_all_processes_are_bounded_and_read_anew_when_they_are_needed() {
        let (child, context) = sleeper();
        let pid = child.0.id();
        let mut table = ProcessTable::new();
        let id = table.adopt(pid).unwrap();
        let whole = table.finish(pid, &context, UnwindLimits::default());
        assert!(whole.reached_thread_start);
        let long = "x".repeat(4000);
        for other in 0..12 {
            table.observe(&event(EventKind::Exec { pid: NOBODY + other, comm: "greedy".into() }));
            for file in 0..1000u64 {
                let path = format!("/{file}{long}");
                table.observe(&event(mmap(NOBODY + other, file * 0x2000, 0x1000, &path)));
            }
        }
        let held: usize = table.live.values().map(|process| process.mappings.held_bytes()).sum();
        assert!(held <= MAX_MAPPING_BYTES && held > MAX_MAPPING_BYTES / 2, "{held}");
        assert!(table.counters().mappings_evicted > 1);
        assert!(table.live[&pid].mappings.is_empty(), "it was sampled longest ago");
        assert_eq!(table.finish(pid, &context, UnwindLimits::default()).frames, whole.frames);
        assert_eq!(table.id(pid), Some(id));
    }

    #[test]
    fn files_that_are_mapped_no_more_are_forgotten() {
        let mut table = ProcessTable::new();
        table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "loads".into() }));
        for inode in 1..10_000 {
            table.observe(&event(EventKind::Mmap(Mmap {
                pid: NOBODY,
                start: 0x1000,
                len: 0x1000,
                file_offset: 0,
                device: (0, 1),
                inode,
                path: "/plugin".into(),
            })));
        }
        assert!(table.live[&NOBODY].images.len() < 100);
    }

    #[test]
    fn the_files_of_a_parent_are_copied_only_when_they_are_few() {
        for (files, inherited) in [(MAX_INHERITED, MAX_INHERITED), (MAX_INHERITED + 1, 0)] {
            let mut table = ProcessTable::new();
            table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "parent".into() }));
            let parent = table.live.get_mut(&NOBODY).unwrap();
            parent
                .images
                .extend((0..files as u64).map(|inode| (((0, 1), inode), Some(ImageId(0)))));
            let fork = EventKind::Fork { parent: thread(NOBODY), thread: thread(NOBODY + 1) };
            table.observe(&event(fork));
            assert_eq!(table.live[&(NOBODY + 1)].images.len(), inherited);
        }
    }

    #[test]
    fn an_exited_process_is_kept_for_late_samples_and_then_dropped() {
        let mut table = ProcessTable::new();
        table.observe(&at(1, EventKind::Exec { pid: NOBODY, comm: "short".into() }));
        table.observe(&at(2, EventKind::Exit { thread: thread(NOBODY) }));
        let id = table.id(NOBODY).unwrap();
        table.observe(&at(13, EventKind::Exit { thread: thread(NOBODY + 9) }));
        assert_eq!(table.id(NOBODY), None);
        assert_eq!(table.info(id).unwrap().name.as_str(), "short");
    }

    #[test]
    fn a_process_whose_main_thread_ended_is_kept_while_others_run() {
        let mut table = ProcessTable::new();
        let (own, (stop, stopped)) = (std::process::id(), std::sync::mpsc::channel::<()>());
        let other = std::thread::spawn(move || stopped.recv());
        table.adopt(own).unwrap();
        table.observe(&at(2, EventKind::Exit { thread: thread(own) }));
        table.observe(&at(13, EventKind::Exit { thread: thread(NOBODY) }));
        assert!(table.id(own).is_some());
        assert_eq!(table.exited.len(), 1, "looked at again later");
        drop(stop);
        assert!(other.join().unwrap().is_err());
    }

    #[test]
    fn the_start_of_a_forked_process_is_filled_in() {
        let (child, context) = sleeper();
        let pid = child.0.id();
        let mut table = ProcessTable::new();
        table.observe(&event(EventKind::Exec { pid, comm: "sleep".into() }));
        let id = table.id(pid).unwrap();
        assert_eq!(table.info(id).unwrap().start_ticks, None);
        // As if that were a while ago, and a mapping had not been reported.
        table.live.get_mut(&pid).unwrap().refreshed = None;
        let done = table.finish(pid, &context, UnwindLimits::default());
        assert!(done.reached_thread_start, "by maps read again: {done:?}");
        assert_eq!(table.info(id).unwrap().start_ticks, super::super::start_ticks(pid));
    }

    #[test]
    fn caches_of_all_processes_are_bounded_and_the_longest_unused_goes_first() {
        let mut table = ProcessTable::new();
        for (pid, start) in [(NOBODY, 0x1000u64), (NOBODY + 1, 0x2000)] {
            table.observe(&event(EventKind::Exec { pid, comm: String::new() }));
            let process = table.live.get_mut(&pid).unwrap();
            let body = JitBody::without_entries(start..start + 0x100, 1);
            process.bodies.insert(
                start,
                CachedBody { body, generation: 0, checked: Instant::now(), is_used: false },
            );
        }
        table.live.get_mut(&NOBODY).unwrap().used += Duration::from_secs(1);
        table.cached = 2;
        table.evict_caches(1);
        assert_eq!((table.live[&NOBODY].cached(), table.live[&(NOBODY + 1)].cached()), (1, 0));
        assert_eq!((table.cached, table.counters().caches_evicted), (1, 1));
    }

    #[test]
    fn stacks_walked_by_rules_that_were_dropped_for_want_of_room_are_kept() {
        let mut table = ProcessTable::new();
        table.observe(&event(EventKind::Exec { pid: NOBODY, comm: String::new() }));
        table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "//anon")));
        let process = table.live.get_mut(&NOBODY).unwrap();
        process.space = Some(7);
        process.clear_caches(&mut table.lessons);
        table.teach(|lessons| assert_eq!(lessons, [RuleUpdate::NoSpace { pid: NOBODY }]));
        let walk = |space, time| {
            let frames = vec![0x1010 << 1 | 1, 0x1020 << 1];
            let walk = ProbeWalk { time, space, frames, end: WalkEnd::ThreadStart };
            UserContext { walk: Some(walk), ..UserContext::default() }
        };
        let mut finish =
            |space, time| table.finish(NOBODY, &walk(space, time), UnwindLimits::default());
        let now = MonotonicNs::now();
        assert_eq!(finish(7, now).frames.len(), 2);
        assert_eq!(finish(6, now).broken, Some(Marker::TruncatedStale), "another program's");
        // Code that is replaced while the probes may still walk by what was there.
        table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "/code")));
        let mut finish =
            |space, time| table.finish(NOBODY, &walk(space, time), UnwindLimits::default());
        assert_eq!(finish(7, MonotonicNs::now()).broken, Some(Marker::TruncatedStale));
        let later = MonotonicNs(MonotonicNs::now().0 + 10_000_000_000);
        assert_eq!(finish(7, later).broken, None);
    }

    #[test]
    fn the_number_of_processes_is_bounded() {
        let mut table = ProcessTable::new();
        // As if all of them were there.
        table.searched = Instant::now().checked_add(Duration::from_secs(600));
        for pid in 0..u32::try_from(MAX_PROCESSES).unwrap() + 5 {
            table.observe(&event(EventKind::Exec { pid: NOBODY + pid, comm: String::new() }));
        }
        assert_eq!(table.counters().processes_refused, 5);
    }

    #[test]
    fn a_stack_of_a_process_that_finds_no_room_says_so_and_reads_nothing() {
        let mut table = ProcessTable::new();
        table.searched = Instant::now().checked_add(Duration::from_secs(600));
        for pid in 0..u32::try_from(MAX_PROCESSES).unwrap() {
            table.observe(&event(EventKind::Exec { pid: NOBODY + pid, comm: String::new() }));
        }
        let done =
            table.finish(std::process::id(), &UserContext::default(), UnwindLimits::default());
        assert_eq!(done.broken, Some(Marker::TruncatedNotKnown));
        assert_eq!(
            (table.counters().processes_refused, table.counters().stacks_of_gone_processes),
            (1, 0)
        );
        // Of one that is not there it would be found that it is gone, if anything were asked.
        assert!(matches!(table.adopt(NOBODY - 1), Err(ProcessError::Full { .. })));
    }

    #[test]
    fn a_clr_is_known_by_its_runtime_or_its_code_memory() {
        let mut table = ProcessTable::new();
        table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "app".into() }));
        let id = table.id(NOBODY).unwrap();
        assert!(!table.info(id).unwrap().is_clr);
        table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "/memfd:doublemapper (deleted)")));
        assert!(table.info(id).unwrap().is_clr);
    }

    #[test]
    fn unloaded_code_gets_a_new_generation_when_its_place_is_used_again() {
        let mut process = LiveProcess::new(ProcessId(0), NOBODY, None, Arc::default());
        let mut counters = ProcessTableCounters::default();
        let mut images = ImageCache::default();
        let mut rules = HashSet::new();
        let mut learn = |process: &mut LiveProcess, start: u64, method: u64| {
            let body = JitBody::without_entries(start..start + 0x100, method);
            let (images, rules, counters) = (&mut images, &mut rules, &mut counters);
            let (lessons, common) = (&mut RuleUpdates::default(), &mut CommonBudget::default());
            let (now, teaching) = (Instant::now(), RulePush::Off);
            CodeView {
                process,
                images,
                rules,
                counters,
                lessons,
                common,
                now,
                teaching,
                asleep: None,
            }
            .learn(body);
            process.bodies[&start].generation
        };
        assert_eq!(learn(&mut process, 0x1000, 1), 0);
        process.forget(&(0x10f0..0x10f1));
        assert!(process.bodies.is_empty());
        assert_eq!(learn(&mut process, 0x1000, 1), 1);
        // What was dropped to save room is the same code when it is there again,
        process.clear_caches(&mut RuleUpdates::default());
        assert_eq!(learn(&mut process, 0x1000, 1), 1);
        // unless it was unloaded meanwhile,
        process.clear_caches(&mut RuleUpdates::default());
        process.forget(&(0x1000..0x1010));
        assert_eq!(learn(&mut process, 0x1000, 1), 2);
        // or it is another method's, or was covered by one.
        process.clear_caches(&mut RuleUpdates::default());
        assert_eq!(learn(&mut process, 0x1000, 2), 3);
        process.clear_caches(&mut RuleUpdates::default());
        assert_eq!(learn(&mut process, 0xf80, 3), 0);
        assert_eq!(learn(&mut process, 0x1000, 2), 4);
        // Not even when very many were dropped.
        for start in 1..40_000 {
            learn(&mut process, 0x1_0000 + start * 0x100, 1);
        }
        assert!(learn(&mut process, 0x1000, 5) > 4);
    }

    #[test]
    fn a_shims_notice_of_unloaded_code_is_taken_for_its_own_process_only() {
        let mut table = ProcessTable::new();
        for pid in [NOBODY, NOBODY + 1] {
            table.observe(&event(EventKind::Exec { pid, comm: String::new() }));
            let process = table.live.get_mut(&pid).unwrap();
            let known = CachedBody {
                body: JitBody::without_entries(0x1000..0x1100, 1),
                generation: 0,
                checked: Instant::now(),
                is_used: false,
            };
            process.bodies.insert(0x1000, known);
        }
        let unloaded =
            ShimEvent::CodeUnloaded { ranges: vec![(0x1000, 0x10), (u64::MAX, u64::MAX)] };
        table.observe(&event(EventKind::Shim {
            pid: NOBODY,
            region: RegionId(0),
            event: unloaded,
        }));
        assert!(table.live[&NOBODY].bodies.is_empty());
        assert_eq!(table.live[&(NOBODY + 1)].bodies.len(), 1);
    }
}
