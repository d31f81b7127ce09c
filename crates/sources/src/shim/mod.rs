//! Shims as a source of events: the rings of many processes, found in `/proc`, taken and given up
//! as processes come and go. `finder` finds regions, `region` is the only access to one, `registry`
//! says which are ours, `reader` turns records into events.

pub mod counters;
mod exact;
pub mod finder;
mod heartbeat;
mod lock_owners;
mod name_questions;
mod names;
mod names_memory;
mod namespace;
mod read_round;
mod reader;
mod record_decoder;
mod region;
mod registry;
mod runtime_event_counts;
mod start_hold;
mod subscriptions;
mod type_names;
mod watched_objects;

use self::counters::ReaderTotals;
use self::heartbeat::BEAT_EVERY;
use self::names_memory::NamesMemory;
use self::read_round::ReadRound;
use self::reader::RegionReader;
use self::registry::{DetachStage, RecorderState, WatchedProcess};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::memory::ProcessMemory;
use perfusion_model::event::{Event, EventKind, MonotonicNs, RegionId};
use profiler_protocol::consumer::SCRATCH_BYTES;
use profiler_protocol::{counter, load};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub use self::exact::ExactTableRegion;
pub use self::exact::{ExactTable, ExactTables, OF_ONE_PROCESS, TABLES};
pub use self::lock_owners::{ManagedThread, ThreadList, ThreadLists};
pub use self::region::RegionError;
pub use self::runtime_event_counts::RUNTIME_EVENT_COUNTERS;
pub use self::start_hold::{HoldStarts, StartHold};
pub use self::subscriptions::{
    AS_ASKED, COLUMNS, NOT_ALL_RECORDED, NOT_RECORDED, ShimSettings, Subscriptions,
};
pub use self::watched_objects::{WatchedObject, same};

/// Live objects that are watched unless told otherwise.
pub const LIVE_OBJECTS: u32 = 4_096;
/// Samples of allocations in a second of which a shim tells of all, unless told otherwise.
pub const ALLOCATION_SAMPLES: u32 = 512;

/// What each shim is asked for at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShimLimits {
    /// Sampled objects watched at a time.
    pub live_objects: u32,
    /// Samples of allocations in a second that are all told of; of more, chance chooses.
    pub allocation_samples: u32,
}

impl Default for ShimLimits {
    fn default() -> Self {
        Self { live_objects: LIVE_OBJECTS, allocation_samples: ALLOCATION_SAMPLES }
    }
}
/// Processes watched at once.
const PROCESSES: usize = 32_768;
/// How often ended processes are noticed, and overdue answers asked for again.
const CARE_EVERY: Duration = Duration::from_millis(100);
/// An instance that is told to leave ends its session first, which waits for a collection in
/// progress.
const DETACH_TIMEOUT: Duration = Duration::from_secs(5);
/// Then the runtime unloads the library when no thread is inside a callback: it looks after 0.3 s,
/// and else again after 5 s, which nobody has to wait for.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How a process whose shim is read stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShimStatus {
    /// Its pid.
    pub pid: u32,
    /// Records its shims had no room for, of all kinds.
    pub dropped: u64,
}

/// All regions of one recorder.
pub struct ShimSource {
    processes: BTreeMap<u32, WatchedProcess>,
    shared: RecorderState,
    next_beat: Instant,
    next_care: Instant,
    /// Where the next round begins, so that no process is always the last one.
    turn: u32,
}

impl ShimSource {
    /// A source for the recorder with this number (`crate::shim::Settings::owner`), which is not 0.
    #[must_use]
    pub fn new(owner: u64, limits: ShimLimits) -> Self {
        let now = Instant::now();
        Self {
            processes: BTreeMap::new(),
            shared: RecorderState {
                owner,
                limits,
                exact: None,
                counts: None,
                lists: None,
                next_id: 0,
                regions: 0,
                room: NamesMemory::default(),
                scratch: vec![0; SCRATCH_BYTES],
                turns: ReadRound::new(0),
                totals: ReaderTotals::default(),
                finished: vec![0; counter::ALL.len()],
                finished_counts: Vec::new(),
            },
            next_beat: now,
            next_care: now,
            turn: 0,
        }
    }

    /// Has tables of exact mode opened, too, and kept in `tables`.
    #[must_use]
    pub fn with_exact(mut self, tables: ExactTables) -> Self {
        self.shared.exact = Some(tables);
        self
    }

    /// Has event sessions opened for runtimes that wait for one at their start.
    #[must_use]
    pub fn with_counts(mut self, starts: Box<dyn HoldStarts>) -> Self {
        self.shared.counts = Some(starts);
        self
    }

    /// Has the owners of locks told by the runtimes' own lists of threads, where their events do
    /// not.
    #[must_use]
    pub fn with_thread_lists(mut self, lists: Box<dyn ThreadLists>) -> Self {
        self.shared.lists = Some(lists);
        self
    }

    /// Whether it subscribes to what the lines of managed code need: whether lines are wanted.
    #[must_use]
    pub fn has_il_maps(&self) -> bool {
        load::subscriptions(self.shared.owner) & load::WITH_IL_MAPS != 0
    }

    /// Looks for regions in this process from now on, often at first. To be called for each process
    /// of the recording, and again after an attach.
    pub fn watch(&mut self, pid: u32) {
        let now = Instant::now();
        if let Some(process) = self.processes.get_mut(&pid)
            && process.target.is_alive()
        {
            process.expect(now);
            return;
        }
        if self.processes.len() >= PROCESSES {
            self.shared.totals.processes_too_many += 1;
            return;
        }
        if let Ok(target) = ProcessHandle::open(pid) {
            // A pid that is used again: what is left of the process before it is given up.
            if let Some(mut before) = self.processes.insert(pid, WatchedProcess::new(target, now)) {
                before.readers.iter_mut().for_each(|reader| self.shared.finish(reader));
            }
        }
    }

    /// What each shim is asked for at most.
    #[must_use]
    pub fn limits(&self) -> ShimLimits {
        self.shared.limits
    }

    /// Asks all shims for other limits from now on.
    pub fn set_limits(&mut self, limits: ShimLimits) {
        self.shared.limits = limits;
        for reader in self.processes.values_mut().flat_map(|process| &mut process.readers) {
            // One that cannot be told is gone: the next drain meets the same error and gives the
            // region up. One with a full ring of requests is told later.
            reader.tell_limits(limits).ok();
        }
    }

    /// From now on the recorder subscribes to this in `pid`, whose shims are told with the next
    /// beat, and for names if so said.
    pub fn subscribe(&mut self, pid: u32, subscriptions: Subscriptions, names: bool) {
        self.watch_if_new(pid);
        if let Some(process) = self.processes.get_mut(&pid) {
            process.subscribe(
                ShimSettings { owner: self.shared.owner, force: false }
                    .subscribing(subscriptions)
                    .owner,
                subscriptions,
                names,
            );
            // Said at once.
            self.next_beat = Instant::now();
        }
    }

    fn watch_if_new(&mut self, pid: u32) {
        if !self.processes.get(&pid).is_some_and(|process| process.target.is_alive()) {
            self.watch(pid);
        }
    }

    /// Follows the life of watched processes: their children and what they become by exec are
    /// watched too.
    pub fn observe(&mut self, event: &Event) {
        match &event.kind {
            EventKind::Fork { parent, thread }
                if thread.pid != parent.pid && self.processes.contains_key(&parent.pid) =>
            {
                self.watch(thread.pid);
            }
            EventKind::Fork { parent, thread } if thread.pid == parent.pid => {
                if let Some(process) = self.processes.get_mut(&thread.pid) {
                    process.owners.started(thread.tid, event.time);
                }
            }
            EventKind::Exit { thread } => {
                if let Some(process) = self.processes.get_mut(&thread.pid) {
                    process.owners.ended(thread.tid, event.time);
                }
            }
            EventKind::Exec { pid, .. } => {
                if let Some(process) = self.processes.get_mut(pid) {
                    process.became_another(event.time, Instant::now());
                    if let Some(tables) = &self.shared.exact {
                        tables.became_another(*pid, event.time);
                    }
                }
            }
            _ => {}
        }
    }

    /// Asks the shims of a process for the method at `address`, which was last on a stack for sure
    /// at `seen` (0: not known). The answer comes as an event; an address is asked about once.
    pub fn ask(&mut self, pid: u32, address: u64, seen: MonotonicNs) {
        let asked = self.processes.get_mut(&pid).is_some_and(|process| process.ask(address, seen));
        self.shared.totals.names_dropped += u64::from(!asked);
    }

    /// A mark of this region has been looked at, and what that asks for is queued.
    pub fn heard(&mut self, region: RegionId) {
        let readers = self.processes.values_mut().flat_map(|process| &mut process.readers);
        readers.filter(|reader| reader.id == region).for_each(RegionReader::heard);
    }

    /// Sends what was asked, without waiting for the next [`ShimSource::drain`].
    pub fn send_questions(&mut self) {
        let now = Instant::now();
        for process in self.processes.values_mut().filter(|process| !process.ended) {
            for reader in &mut process.readers {
                if let Err(error) = reader.send_questions(now) {
                    // The next drain meets the same error and gives the region up.
                    tracing::debug!(%error, "no questions");
                }
            }
        }
    }

    /// True when a shim of this process is being read.
    #[must_use]
    pub fn has_region(&self, pid: u32) -> bool {
        self.processes.get(&pid).is_some_and(|process| !process.readers.is_empty())
    }

    /// False when the process has mapped no region any more that is read of it: it has become
    /// another program by exec, or its library has left.
    #[must_use]
    pub fn is_mapped(&self, pid: u32) -> bool {
        self.processes.get(&pid).is_some_and(WatchedProcess::is_mapped)
    }

    /// The weak handles with which this recorder's library watches objects in the process now;
    /// `None` where that cannot be read.
    #[must_use]
    pub fn watched(&self, pid: u32) -> Option<Vec<WatchedObject>> {
        let process = self.processes.get(&pid)?;
        let memory = ProcessMemory::open(pid, process.target.start_ticks().ok()?)?;
        let slots = process.readers.iter().filter_map(|reader| Some((reader.slots()?, reader.id)));
        let most = self.shared.limits.live_objects;
        let read: Vec<Vec<WatchedObject>> = slots
            .map(|(at, region)| watched_objects::read(&memory, at, most, region))
            .collect::<Option<_>>()?;
        (!read.is_empty()).then(|| read.concat())
    }

    /// How much of the fullest ring the last [`ShimSource::drain`] found used, in 1/256.
    #[must_use]
    pub fn fullest(&self) -> u64 {
        self.shared.turns.fullest
    }

    /// One round: looks for regions where it is time to, sends questions, reads records. To be
    /// called at least every 100 ms. It takes a bounded number of bytes; true when something was
    /// left for the next round.
    pub fn drain(&mut self, sink: &mut dyn FnMut(Event)) -> bool {
        let now = Instant::now();
        self.beat();
        if now >= self.next_care {
            self.next_care = now + CARE_EVERY;
            self.care(now);
        }
        let later: Vec<u32> = self.processes.range(self.turn..).map(|(&pid, _)| pid).collect();
        let earlier: Vec<u32> = self.processes.range(..self.turn).map(|(&pid, _)| pid).collect();
        self.turn = later.get(1).copied().unwrap_or(0);
        self.shared.turns = ReadRound::new(self.shared.regions);
        let mut missed = None;
        for pid in later.into_iter().chain(earlier) {
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            let time = MonotonicNs::now();
            process.look(now, time, &mut self.shared);
            if self.shared.turns.is_over() && !process.readers.is_empty() {
                missed.get_or_insert(pid);
            }
            process.drain(now, time, &mut self.shared, sink);
            if process.is_over() {
                self.processes.remove(&pid);
            }
        }
        self.turn = missed.unwrap_or(self.turn);
        self.shared.turns.more
    }

    /// True while a process waits with its end for last questions, as last read: the next rounds
    /// should come soon.
    pub fn is_waited_for(&mut self) -> bool {
        self.processes
            .values_mut()
            .flat_map(|process| &mut process.readers)
            .any(RegionReader::is_waited_for)
    }

    /// Says "somebody listens" in every region when it is time to. [`ShimSource::drain`] does it
    /// too.
    pub fn beat(&mut self) {
        self.beat_where(|_| true);
    }

    fn beat_where(&mut self, which: impl Fn(&RegionReader) -> bool) {
        let now = Instant::now();
        if now < self.next_beat {
            return;
        }
        self.next_beat = now + BEAT_EVERY;
        let time = MonotonicNs::now();
        for process in self.processes.values_mut() {
            let owner = process.owner(&self.shared);
            for reader in process.readers.iter_mut().filter(|reader| which(reader)) {
                let told = reader.tell_limits(self.shared.limits);
                if let Err(error) = told.and_then(|()| reader.beat(owner, time)) {
                    // The next drain meets the same error and gives the region up.
                    tracing::debug!(%error, "no beat");
                }
            }
        }
    }

    fn care(&mut self, now: Instant) {
        for process in self.processes.values_mut() {
            process.ended = process.ended || !process.target.is_alive();
            for reader in &mut process.readers {
                reader.repeat_questions(now, &mut self.shared.totals);
            }
        }
    }

    /// Asks the instances made for this recorder to leave and waits until they have, and leaves the
    /// others to the next recorder. What they sent last is there for one more
    /// [`ShimSource::drain`]. Answers the pids of instances that did not obey.
    pub fn detach_all(&mut self) -> Vec<u32> {
        self.detach_all_within(DETACH_TIMEOUT)
    }

    /// The same, and waits no longer than `most` for all of it: one that does not get to it leaves
    /// when its lease runs out.
    pub fn detach_all_within(&mut self, most: Duration) -> Vec<u32> {
        for reader in self.processes.values_mut().flat_map(|process| &mut process.readers) {
            reader.leave();
        }
        let begin = Instant::now();
        let mut obeyed = None;
        loop {
            self.beat_where(|reader| reader.ours);
            let mut working = Vec::new();
            let mut loaded = false;
            for process in self.processes.values_mut() {
                match process.stage() {
                    DetachStage::Working => working.push(process.target.pid()),
                    DetachStage::Leaving => loaded = true,
                    DetachStage::Gone => {}
                }
            }
            if working.is_empty() {
                let since = *obeyed.get_or_insert_with(Instant::now);
                if !loaded || since.elapsed() >= UNLOAD_TIMEOUT || begin.elapsed() >= most {
                    return working;
                }
            } else if begin.elapsed() >= most {
                return working;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Asks the instances in this process that were made for this recorder to leave; what they say
    /// last is read as it comes.
    pub fn leave(&mut self, pid: u32) {
        for reader in
            self.processes.get_mut(&pid).into_iter().flat_map(|process| &mut process.readers)
        {
            reader.leave();
        }
    }

    /// The processes whose shims are read.
    #[must_use]
    pub fn looks(&self) -> Vec<ShimStatus> {
        let full =
            counter::ALL.iter().position(|(_, name, _)| *name == "shim_records_dropped_full");
        let dropped = |process: &WatchedProcess| {
            let of = |reader: &RegionReader| {
                full.and_then(|full| reader.counted().nth(full)).unwrap_or(0)
            };
            process.readers.iter().map(of).sum()
        };
        let read = self.processes.iter().filter(|(_, process)| !process.readers.is_empty());
        read.map(|(&pid, process)| ShimStatus { pid, dropped: dropped(process) }).collect()
    }

    /// Name and value of every counter: the shims' own, summed, then this side's.
    #[must_use]
    pub fn counters(&self) -> Vec<(String, u64)> {
        let mut sums = self.shared.finished.clone();
        for reader in self.processes.values().flat_map(|process| &process.readers) {
            for (sum, value) in sums.iter_mut().zip(reader.counted()) {
                *sum = sum.saturating_add(value);
            }
        }
        let mut all: Vec<(String, u64)> = counter::ALL
            .iter()
            .zip(sums)
            .map(|((_, name, _), value)| ((*name).to_owned(), value))
            .collect();
        all.extend(self.shared.totals.list());
        all
    }
}
