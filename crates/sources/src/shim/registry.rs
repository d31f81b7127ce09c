//! Which process has which regions, and which of them are ours to read: looks for new ones, takes
//! them, beats, gives them up.
//!
//! A region is read by one recorder at a time; the lock on its memfd says by whom
//! (docs/shim-protocol.md). A region made for us is taken at once. One that was made for another
//! recorder is left alone while that one lives; when it has been silent for long enough, the
//! instance is taken over, or told to leave where we have an instance of our own.

use super::ShimLimits;
use super::counters::ReaderTotals;
use super::exact::ExactTableRegion;
use super::exact::ExactTables;
use super::finder::{self, FoundRegions};
use super::lock_owners::{LockOwners, ThreadLists};
use super::names_memory::NamesMemory;
use super::namespace::{NamespaceThreads, monotonic_offset};
use super::read_round::ReadRound;
use super::reader::{DrainContext, ReadEnd, RegionReader};
use super::region::{RegionKey, ShimRegion};
use super::runtime_event_counts::MAX_FINISHED;
use super::start_hold::HoldStarts;
use crate::shim::Subscriptions;
use perfusion_host::process::budget::cpu_time;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::system_limits::explain;
use perfusion_model::event::RuntimeEventCounts;
use perfusion_model::event::{Event, MonotonicNs, RegionId};
use profiler_protocol::consumer::{Consumer, ConsumerError, LeaseWords};
use profiler_protocol::layout::InstanceState;
use profiler_protocol::load;
use profiler_protocol::request::Request;
use rustix::io::Errno;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Longer than a shim's own timeout (`lease::SILENCE_NS`), so that it has gone quiet and starts
/// anew with the next beat.
const SILENT_FOR: Duration = Duration::from_millis(2500);
/// Regions read in all; each costs two descriptors at most and its share of every round.
const REGIONS: usize = 4096;
/// Regions read of one process: a process has a CLR or two, and may offer as many things that look
/// like regions as it likes.
const READERS: usize = 4;
/// Other recorders' regions kept an eye on in one process: each is an open descriptor.
const UNCLAIMED: usize = 8;
/// Region-like things of one process remembered as not ours to read.
const REFUSED: usize = 64;

/// A region that is not ours (yet).
struct UnclaimedRegion {
    consumer: Consumer<ShimRegion>,
    lease: Option<LeaseWords>,
    since: Instant,
}

/// One watched process.
pub(super) struct WatchedProcess {
    pub(super) target: ProcessHandle,
    watched_since: Instant,
    next_look: Instant,
    pub(super) readers: Vec<RegionReader>,
    unclaimed: Vec<UnclaimedRegion>,
    refused: HashSet<RegionKey>,
    /// A mapping that cannot be opened is met at every look, and counted once.
    told_refusal: bool,
    threads: NamespaceThreads,
    pub(super) owners: LockOwners,
    pub(super) ended: bool,
    /// The recorder's number in this process, where it has other subscriptions here than elsewhere.
    owner: Option<u64>,
    /// Those: a shim that knows nothing of them tells the rest all the same.
    subscriptions: Option<Subscriptions>,
    /// Names are not asked for.
    nameless: bool,
}

/// How long to wait after a look that took so much CPU time: one at a process with 65,000 mappings
/// takes some 30 ms, and may come as often as others' only up to a twentieth of our time.
fn next_look(interval: Duration, took: Duration) -> Duration {
    interval.max(took * 20)
}

/// What became of a request to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DetachStage {
    /// It still works.
    Working,
    /// It has said its last; the runtime has yet to unload it.
    Leaving,
    /// Nothing of it is left.
    Gone,
}

/// What the processes share.
pub(super) struct RecorderState {
    pub(super) owner: u64,
    /// What each region is asked for at most.
    pub(super) limits: ShimLimits,
    /// Where tables of exact mode are laid, if that was asked for.
    pub(super) exact: Option<ExactTables>,
    /// What opens event sessions for runtimes that wait for one, if that was asked for.
    pub(super) counts: Option<Box<dyn HoldStarts>>,
    /// What tells who owns locks.
    pub(super) lists: Option<Box<dyn ThreadLists>>,
    pub(super) next_id: u32,
    pub(super) regions: usize,
    /// For what all of them make remembered.
    pub(super) room: NamesMemory,
    pub(super) scratch: Vec<u8>,
    pub(super) turns: ReadRound,
    pub(super) totals: ReaderTotals,
    /// Counters of shims whose region was given up.
    pub(super) finished: Vec<u64>,
    /// What their runtimes had told of, since that was last asked.
    pub(super) finished_counts: Vec<RuntimeEventCounts>,
}

impl WatchedProcess {
    pub(super) fn new(target: ProcessHandle, now: Instant) -> Self {
        Self {
            target,
            watched_since: now,
            next_look: now,
            readers: Vec::new(),
            unclaimed: Vec::new(),
            refused: HashSet::new(),
            told_refusal: false,
            threads: NamespaceThreads::default(),
            owners: LockOwners::default(),
            ended: false,
            owner: None,
            subscriptions: None,
            nameless: false,
        }
    }

    /// The recorder's number here.
    pub(super) fn owner(&self, shared: &RecorderState) -> u64 {
        self.owner.unwrap_or(shared.owner)
    }

    /// From now on the recorder has this number here, and these subscriptions.
    pub(super) fn subscribe(&mut self, owner: u64, subscriptions: Subscriptions, names: bool) {
        (self.owner, self.subscriptions, self.nameless) =
            (Some(owner), Some(subscriptions), !names);
    }

    /// Looks often again: a shim is expected.
    pub(super) fn expect(&mut self, now: Instant) {
        self.watched_since = now;
        self.next_look = now;
    }

    /// It called exec: nothing known of its threads and code holds any more, and nobody writes into
    /// its regions. That was at `at`, and may be told of only now: a region found since then is the
    /// new program's.
    pub(super) fn became_another(&mut self, at: MonotonicNs, now: Instant) {
        self.threads = NamespaceThreads::default();
        self.owners = LockOwners::default();
        (self.owner, self.subscriptions, self.nameless) = (None, None, false);
        for reader in &mut self.readers {
            reader.left_behind |= reader.found < at;
        }
        self.expect(now);
    }

    /// How long to wait between looks: a program that starts has its region within a tenth of a
    /// second, one that runs gets a new one only when somebody attaches.
    fn look_interval(&self, now: Instant) -> Duration {
        match now.saturating_duration_since(self.watched_since).as_millis() {
            0..1000 => Duration::from_millis(20),
            1000..5000 => Duration::from_millis(100),
            // Somebody else's: whose end is to be noticed.
            _ if !self.unclaimed.is_empty() || self.readers.iter().any(|reader| !reader.ours) => {
                Duration::from_secs(2)
            }
            _ => Duration::from_secs(10),
        }
    }

    /// Looks for regions when it is time, and at those of others.
    pub(super) fn look(&mut self, now: Instant, time: MonotonicNs, shared: &mut RecorderState) {
        if self.ended {
            return;
        }
        if now >= self.next_look {
            let before = cpu_time();
            let known = |key| {
                self.refused.contains(&key)
                    || self.readers.iter().any(|reader| reader.key == key)
                    || self.unclaimed.iter().any(|other| other.consumer.memory().key() == key)
            };
            match finder::find(&self.target, &known) {
                Ok(FoundRegions { regions, tables, refused }) => {
                    if let Some(error) = refused.first().filter(|_| !self.told_refusal) {
                        if error.is_lack_of_files() {
                            let why = explain(error);
                            tracing::warn!("a shim's region cannot be opened for now: {why}");
                        } else {
                            tracing::debug!(%error, "not a region");
                        }
                        shared.totals.regions_refused += 1;
                        self.told_refusal = true;
                    }
                    for region in regions {
                        self.meet(region, now, time, shared);
                    }
                    for table in tables {
                        self.meet_table(table, shared);
                    }
                }
                Err(_) => self.ended = !self.target.is_alive(),
            }
            self.next_look =
                now + next_look(self.look_interval(now), cpu_time().saturating_sub(before));
        }
        self.watch_unclaimed(now, time, shared);
    }

    /// A region seen for the first time.
    fn meet(
        &mut self,
        region: ShimRegion,
        now: Instant,
        time: MonotonicNs,
        shared: &mut RecorderState,
    ) {
        let (key, bytes) = (region.key(), region.bytes());
        // The magic word is written last: without it the shim is still at work, and the next look
        // finds the region again.
        let Some(owner) = region.owner() else { return };
        match Consumer::open(region, bytes) {
            Ok(consumer) => {
                // A child made by fork without exec shows its parent's region; the parent is the
                // one it belongs to.
                let made_by = consumer.identity().pid;
                if self.target.namespace_pid().is_ok_and(|pid| u64::from(pid) != made_by) {
                    self.refuse(key);
                    shared.totals.regions_refused += 1;
                } else if load::is_same(owner, shared.owner) {
                    self.take(consumer, true, time, shared);
                } else if self.unclaimed.len() >= UNCLAIMED {
                    shared.totals.regions_too_many += 1;
                    self.refuse(key);
                } else {
                    self.unclaimed.push(UnclaimedRegion { consumer, lease: None, since: now });
                }
            }
            Err(error) => {
                let pid = self.target.pid();
                if let ConsumerError::Version { .. } = error {
                    tracing::warn!(
                        pid,
                        %error,
                        "the library of another version of perfusion is in this process: it is \
                         left alone; ten minutes after its recorder it leaves"
                    );
                } else {
                    tracing::warn!(pid, %error, "a region cannot be read");
                }
                shared.totals.regions_refused += 1;
                self.refuse(key);
            }
        }
    }

    /// A table of exact mode, for as long as its process waits for somebody to open it, and once.
    fn meet_table(&mut self, table: ShimRegion, shared: &RecorderState) {
        let key = table.key();
        let (Some(tables), Ok(pid)) = (&shared.exact, self.target.namespace_pid()) else {
            return self.refuse(key);
        };
        // Without a magic word the shim is still at work: the next look finds the table again.
        let Some(table) = ExactTableRegion::new(table, shared.owner, pid.into()) else { return };
        let pid = self.target.pid();
        // What could not be remembered would be laid there again at every look.
        if self.refused.len() >= REFUSED {
            return tables.decline(&table);
        }
        tables.put(pid, table);
        self.refuse(key);
    }

    fn refuse(&mut self, key: RegionKey) {
        if self.refused.len() < REFUSED {
            self.refused.insert(key);
        }
    }

    fn watch_unclaimed(&mut self, now: Instant, time: MonotonicNs, shared: &mut RecorderState) {
        let mut index = 0;
        while let Some(other) = self.unclaimed.get_mut(index) {
            let Ok(lease) = other.consumer.lease() else {
                let other = self.unclaimed.swap_remove(index);
                self.refuse(other.consumer.memory().key());
                continue;
            };
            if other.lease != Some(lease) {
                other.lease = Some(lease);
                other.since = now;
            }
            let free_from_the_start = other.consumer.identity().owner == 0 && lease.listener == 0;
            let silent = now.saturating_duration_since(other.since) >= SILENT_FOR;
            if !(free_from_the_start || silent) || !other.consumer.memory().lock() {
                index += 1;
                continue;
            }
            let mut other = self.unclaimed.swap_remove(index);
            let working = other.consumer.refresh().is_ok_and(|status| {
                matches!(status.state, InstanceState::Starting | InstanceState::Ready)
            });
            if !working {
                self.refuse(other.consumer.memory().key());
            } else if self.readers.iter().any(|reader| reader.ours) {
                // Two instances of one runtime deliver every event twice: with one of our own, a
                // stray one goes.
                let made_for_somebody = other.consumer.identity().owner != 0;
                if made_for_somebody && matches!(other.consumer.request(&[Request::Detach]), Ok(1))
                {
                    shared.totals.regions_cleaned += 1;
                }
                self.refuse(other.consumer.memory().key());
            } else {
                self.take(other.consumer, false, time, shared);
            }
        }
    }

    fn take(
        &mut self,
        consumer: Consumer<ShimRegion>,
        ours: bool,
        time: MonotonicNs,
        shared: &mut RecorderState,
    ) {
        let key = consumer.memory().key();
        if !consumer.memory().lock() {
            self.refuse(key);
            return;
        }
        if shared.regions >= REGIONS {
            shared.totals.regions_too_many += 1;
            self.refuse(key);
            return;
        }
        if ours {
            // What was taken over before is not needed any more.
            for mut reader in std::mem::take(&mut self.readers) {
                if reader.ours {
                    self.readers.push(reader);
                } else {
                    reader.release();
                    self.refuse(reader.key);
                    shared.finish(&mut reader);
                }
            }
        }
        if self.readers.len() >= READERS {
            shared.totals.regions_too_many += 1;
            self.refuse(key);
            return;
        }
        let id = RegionId(shared.next_id);
        shared.next_id += 1;
        shared.regions += 1;
        shared.totals.regions_adopted += 1;
        let offset = monotonic_offset(&self.target);
        let mut reader = RegionReader::new(id, consumer, ours, offset, time, &shared.room);
        if let Some(starts) = shared.counts.as_ref().filter(|_| reader.waits_at_start()) {
            reader.hold_up(starts.begin(self.target.pid(), reader.age(time)));
        }
        // Said first: it holds from the first object on.
        let told = reader.tell_limits(shared.limits);
        if told.and_then(|()| reader.beat(self.owner(shared), time)).is_ok() {
            self.readers.push(reader);
        } else {
            shared.finish(&mut reader);
        }
    }

    /// Queues a question with every region of the process. False when it was dropped.
    pub(super) fn ask(&mut self, address: u64, seen: MonotonicNs) -> bool {
        if self.nameless {
            return true;
        }
        // Nothing is kept for a region that comes later: by then the code may be gone. What is seen
        // again is asked about again.
        let mut all = !self.readers.is_empty();
        for reader in &mut self.readers {
            all &= reader.ask(address, seen);
        }
        all
    }

    /// One round: questions out, records in.
    pub(super) fn drain(
        &mut self,
        now: Instant,
        time: MonotonicNs,
        shared: &mut RecorderState,
        sink: &mut dyn FnMut(Event),
    ) {
        let pid = self.target.pid();
        let (mut index, owner) = (0, self.owner(shared));
        while let Some(reader) = self.readers.get_mut(index) {
            let mut context = DrainContext {
                target: &self.target,
                threads: &mut self.threads,
                owners: &mut self.owners,
                lists: shared.lists.as_deref(),
                scratch: &mut shared.scratch,
                turns: &mut shared.turns,
                now: time,
                subscriptions: self.subscriptions,
                totals: &mut shared.totals,
            };
            let sent = if self.ended { Ok(()) } else { reader.send_questions(now) };
            let let_go = if self.ended { Ok(()) } else { reader.let_go(owner, time) };
            let result = sent
                .and(let_go)
                .map_err(ReadEnd::Disabled)
                .and_then(|()| reader.drain(&mut context, self.ended, sink));
            let Err(end) = result else {
                index += 1;
                continue;
            };
            if let ReadEnd::Disabled(error) = end {
                tracing::warn!(pid, %error, "a shim's region broke the protocol and is not read \
                     any more");
                shared.totals.regions_disabled += 1;
                reader.release();
            }
            reader.say_bye(pid, time, sink);
            let mut reader = self.readers.swap_remove(index);
            self.refuse(reader.key);
            shared.finish(&mut reader);
        }
        if !self.ended {
            self.owners.look(shared.lists.as_deref(), &mut self.threads, &self.target);
        }
    }

    /// How far our instances in it are on their way out.
    pub(super) fn stage(&mut self) -> DetachStage {
        if self.ended || !self.target.is_alive() {
            return DetachStage::Gone;
        }
        let mut keys = Vec::new();
        for reader in self.readers.iter_mut().filter(|reader| reader.ours) {
            // An unreadable region counts as gone: there is nothing to wait for.
            if reader.refresh().is_ok() && !reader.is_over() {
                return DetachStage::Working;
            }
            keys.push(reader.key);
        }
        if self.maps_one_of(&keys).unwrap_or(false) {
            DetachStage::Leaving
        } else {
            DetachStage::Gone
        }
    }

    /// True while the process has mapped a region that is read. One that cannot be looked at has.
    pub(super) fn is_mapped(&self) -> bool {
        let keys: Vec<RegionKey> = self.readers.iter().map(|reader| reader.key).collect();
        self.maps_one_of(&keys).unwrap_or(true)
    }

    fn maps_one_of(&self, keys: &[RegionKey]) -> Result<bool, Errno> {
        if keys.is_empty() {
            return Ok(false);
        }
        let FoundRegions { regions, .. } = finder::find(&self.target, &|_| false)?;
        Ok(regions.iter().any(|region| keys.contains(&region.key())))
    }

    /// True when nothing of the process is left to read.
    pub(super) fn is_over(&self) -> bool {
        self.ended && self.readers.is_empty()
    }
}

impl RecorderState {
    /// Keeps the counters of a region that is given up.
    pub(super) fn finish(&mut self, reader: &mut RegionReader) {
        if self.finished_counts.len() < MAX_FINISHED {
            self.finished_counts.push(reader.runtime_events());
        }
        self.regions = self.regions.saturating_sub(1);
        for (sum, value) in self.finished.iter_mut().zip(reader.counted()) {
            *sum = sum.saturating_add(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::next_look;
    use std::time::Duration;

    #[test]
    fn costly_looks_are_rare() {
        let ms = Duration::from_millis;
        assert_eq!(next_look(ms(20), Duration::from_micros(300)), ms(20));
        assert_eq!(next_look(ms(20), ms(30)), ms(600));
        assert_eq!(next_look(ms(10_000), ms(30)), ms(10_000));
    }
}
