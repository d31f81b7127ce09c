//! Times of all threads at one moment, in two steps. [`ThreadTable::look`] reads the probes' map at
//! once. [`ThreadTable::confirm`] later asks /proc about threads without recent events. That takes
//! a hundred times as long, and the thread that drains rings must not wait for it.
//!
//! Events do not tell all. The kernel hides some switches (seen on 6.18 guests). A thread that
//! leaves the selection, because its process becomes another program or goes to another cgroup, has
//! no more events, not even its end. A selected process is forgotten when its first thread is
//! reaped, and others may still be on their way off the CPU.

use super::counters::ReceiveCounters;
use super::rule_set::RuleSetFilter;
use super::{KernelError, KernelSelection};
use aya::maps::{HashMap as BpfHashMap, Map, MapData};
use ebpf_common::counter::Counter;
use ebpf_common::key::{
    STATE_BLOCKED, STATE_DEAD, STATE_ON_CPU, STATE_RUNNABLE, STATE_RUNNING_OR_RUNNABLE,
    SchedulerAccount, WAIT_KEPT, WAIT_NEW, WAIT_WOKEN_THROTTLED,
};
use perfusion_host::process::{hierarchy, seed};
use perfusion_model::event::{
    Event, EventKind, MonotonicNs, ThreadId, ThreadProgress, ThreadSnapshot, ThreadTimes,
};
use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd as _;
use std::sync::Arc;

/// A torn read of a thread's times is repeated at most this often.
const REREADS: u32 = 8;

/// A thread that was in one state for longer may be another than it seems; ten times the
/// scheduler's longest slice.
const LONG_NS: u64 = 30_000_000;

/// The scheduler's account of a running thread may lag by its clock's tick: 10 ms at the slowest
/// (CONFIG_HZ=100).
const TICK_NS: u64 = 10_000_000;

/// The probes' map `THREADS`.
#[derive(Debug)]
pub struct ThreadTable {
    pub(super) map: BpfHashMap<MapData, u32, SchedulerAccount>,
    counts: Arc<ReceiveCounters>,
}

/// All threads as the probes know them.
#[derive(Debug)]
pub struct ThreadScan {
    threads: Vec<(SchedulerAccount, ThreadSnapshot)>,
    /// Of threads that wait, /proc is asked when they have done so since before this.
    asks_before: u64,
    /// The recording was over: what /proc says now came later.
    frozen: bool,
    selection: KernelSelection,
}

/// What /proc adds to that.
#[derive(Debug, Default)]
pub struct ConfirmedThreads {
    /// All threads. Of one whose end is among the events: until the last that is known of it.
    pub threads: Vec<ThreadSnapshot>,
    /// Ends of threads that went unseen, told as of now.
    pub ends: Vec<Event>,
}

impl ThreadTable {
    /// Two handles to the map, for two threads.
    pub(super) fn pair(map: Map, counts: &Arc<ReceiveCounters>) -> Result<[Self; 2], KernelError> {
        let failed = |source| KernelError::Map { name: "THREADS", source };
        let Map::HashMap(data) = map else { return Err(KernelError::Object { name: "THREADS" }) };
        let again = data
            .fd()
            .as_fd()
            .try_clone_to_owned()
            .map_err(|source| failed(aya::maps::MapError::IoError(source)))?;
        let of = |data| -> Result<Self, KernelError> {
            let map = BpfHashMap::try_from(Map::HashMap(data)).map_err(failed)?;
            Ok(Self { map, counts: Arc::clone(counts) })
        };
        Ok([of(MapData::from_fd(again).map_err(failed)?)?, of(data)?])
    }

    /// Reads the map, each state closed at `at`, or when it is read; that of a thread that had an
    /// event since, with this event.
    pub(super) fn look(
        &self,
        at: Option<u64>,
        most: usize,
        selection: &KernelSelection,
        asks_before: u64,
        frozen: bool,
    ) -> ThreadScan {
        let mut tids = HashSet::new();
        // A key removed during the walk makes it start again: bounded by the map's size.
        tids.extend(self.map.keys().take(2 * most).filter_map(Result::ok));
        let mut threads = Vec::with_capacity(tids.len());
        for tid in tids {
            let mut read = None;
            for _ in 0..REREADS {
                let Ok(thread) = self.map.get(&tid, 0) else { break };
                let now = at.unwrap_or_else(|| MonotonicNs::now().0);
                read = Some(snapshot(tid, &thread, now).map(|snapshot| (thread, snapshot)));
                if matches!(read, Some(Some(_))) {
                    break;
                }
            }
            match read {
                Some(Some(both)) => threads.push(both),
                Some(None) => self.counts.add(Counter::ThreadTorn, 1),
                None => {}
            }
        }
        ThreadScan { threads, asks_before, frozen, selection: selection.clone() }
    }

    /// Asks /proc about threads whose last event is long ago. What went unseen leaves the map,
    /// unless there was an event of it meanwhile.
    pub fn confirm(&mut self, look: &ThreadScan) -> ConfirmedThreads {
        let mut confirmed = ConfirmedThreads::default();
        confirmed.threads.reserve(look.threads.len());
        let mut proc =
            ProcScan { holder: ProcessFilter::of(&look.selection), tasks: HashMap::new() };
        for (entry, snapshot) in &look.threads {
            let open = snapshot.at.0.saturating_sub(entry.since_ns);
            if open <= LONG_NS || entry.state == STATE_DEAD {
                confirmed.threads.push(*snapshot);
            } else if !look.frozen && proc.is_gone(entry, snapshot, look.asks_before) {
                self.bury(entry, snapshot, &mut confirmed);
            } else if may_run(entry) {
                confirmed.threads.push(self.running(entry, snapshot, open));
            } else {
                confirmed.threads.push(*snapshot);
            }
        }
        confirmed
    }

    /// The thread is no more, or not one to record: its time ends with its last event.
    fn bury(
        &mut self,
        entry: &SchedulerAccount,
        snapshot: &ThreadSnapshot,
        confirmed: &mut ConfirmedThreads,
    ) {
        let tid = snapshot.times.thread.tid;
        // A thread with the same id can come only after this one has gone, and not in the
        // microsecond between the two calls: ids are given in turn.
        if !self.is_unchanged(tid, entry) || self.map.remove(&tid).is_err() {
            // It speaks for itself.
            confirmed.threads.push(*snapshot);
            return;
        }
        self.counts.add(Counter::ThreadsLeft, 1);
        confirmed.threads.extend(self::snapshot(tid, entry, entry.since_ns));
        let kind = EventKind::ThreadEnd(closed_times(tid, entry));
        confirmed.ends.push(Event { time: MonotonicNs::now(), kind });
    }

    /// A thread that seems to run, or to want a CPU since before the recording: it may sleep, when
    /// its switch-out was not reported, and its CPU may have been taken from it.
    fn running(
        &self,
        entry: &SchedulerAccount,
        snapshot: &ThreadSnapshot,
        open: u64,
    ) -> ThreadSnapshot {
        let thread = snapshot.times.thread;
        let Ok(Some(state)) = seed::look_at(thread.pid, thread.tid) else { return *snapshot };
        let ran = (entry.exec_ns != u64::MAX)
            .then(|| seed::ran_ns(thread.pid, thread.tid))
            .flatten()
            .map(|ran| ran.saturating_sub(entry.exec_ns));
        // Asked in this order: what /proc says is of the same stretch.
        if !self.is_unchanged(thread.tid, entry) {
            return *snapshot;
        }
        let mut snapshot = *snapshot;
        match (state, ran) {
            (STATE_BLOCKED, ran) => {
                self.counts.add(Counter::ThreadMisjudged, 1);
                asleep(&mut snapshot, open, ran.unwrap_or(0).min(open));
            }
            (_, Some(ran)) => take_stolen(&mut snapshot.times, open, ran),
            // Seeding does not say how long it had run: what it read would be of a moment after the
            // recording's begin.
            (_, None) => {}
        }
        snapshot
    }

    /// True while there was no event of the thread since it was looked at.
    fn is_unchanged(&self, tid: u32, entry: &SchedulerAccount) -> bool {
        let now = self.map.get(&tid, 0);
        now.is_ok_and(|now| (now.entered_ns, now.since_ns) == (entry.entered_ns, entry.since_ns))
    }

    /// Puts what was counted since into counters read before.
    pub fn amend(&self, counters: &mut [(String, u64)]) {
        for counter in [Counter::ThreadsLeft, Counter::ThreadMisjudged] {
            let name =
                Counter::ALL.iter().find(|info| info.id == counter.id()).map(|info| info.name);
            for (_, value) in counters.iter_mut().filter(|(known, _)| Some(known.as_str()) == name)
            {
                *value = self.counts.get(counter.id());
            }
        }
    }
}

/// What /proc says of threads, at one look.
struct ProcScan<'a> {
    holder: Option<ProcessFilter<'a>>,
    /// The threads of each process that was asked about; `None` when that cannot be read.
    tasks: HashMap<u32, Option<HashSet<u32>>>,
}

impl ProcScan<'_> {
    /// Whether the thread is surely no more, or not one to record.
    fn is_gone(
        &mut self,
        entry: &SchedulerAccount,
        snapshot: &ThreadSnapshot,
        asks_before: u64,
    ) -> bool {
        let ThreadId { pid, tid } = snapshot.times.thread;
        if self.holder.as_mut().is_some_and(|holder| !holder.holds(pid)) {
            // Not for want of descriptors.
            return seed::is_readable();
        }
        // One that waits cannot end; unless all it did since was hidden it is there.
        if entry.state == STATE_BLOCKED && entry.since_ns >= asks_before {
            return false;
        }
        if let ThreadProgress::Waiting { .. } = snapshot.progress {
            // One list for all of a process: a tenth of the price of asking for each.
            let tasks = self.tasks.entry(pid).or_insert_with(|| seed::tasks(pid).ok());
            if tasks.as_ref().is_none_or(|tasks| tasks.contains(&tid)) {
                return false;
            }
        }
        seed::look_at(pid, tid).is_ok_and(|state| state.is_none())
    }
}

/// Tells which processes a selection holds that is not by pid.
pub(super) enum ProcessFilter<'a> {
    Cgroup(hierarchy::CgroupFilter),
    Rules(RuleSetFilter<'a>),
}

impl<'a> ProcessFilter<'a> {
    /// `None` when it holds all there are.
    pub(super) fn of(selection: &'a KernelSelection) -> Option<Self> {
        match selection {
            KernelSelection::Cgroup(id) => Some(Self::Cgroup(hierarchy::CgroupFilter::new(*id))),
            KernelSelection::Rules(rules) => Some(Self::Rules(RuleSetFilter::new(rules))),
            KernelSelection::All | KernelSelection::Pids(_) => None,
        }
    }

    pub(super) fn holds(&mut self, pid: u32) -> bool {
        match self {
            Self::Cgroup(cgroup) => cgroup.holds(pid),
            Self::Rules(rules) => rules.holds(pid),
        }
    }
}

/// A thread's times up to its last event.
pub(super) fn closed_times(tid: u32, thread: &SchedulerAccount) -> ThreadTimes {
    ThreadTimes {
        thread: ThreadId { pid: thread.tgid, tid },
        oncpu_ns: thread.oncpu_ns,
        runnable_ns: thread.runnable_ns,
        stolen_ns: thread.stolen_ns,
        blocked_ns: thread.blocked_ns,
        since: MonotonicNs(thread.entered_ns),
        left_out: thread.left_out,
    }
}

/// Of `open` ns that a snapshot counts as run, or runnable, the thread ran only the first `ran`: it
/// sleeps since.
fn asleep(snapshot: &mut ThreadSnapshot, open: u64, ran: u64) {
    let times = &mut snapshot.times;
    let (since, column) = match snapshot.progress {
        ThreadProgress::OnCpu { since } => (since, &mut times.oncpu_ns),
        ThreadProgress::Waiting { start, .. } => (start, &mut times.runnable_ns),
    };
    let blocked = open.saturating_sub(ran);
    *column = column.saturating_sub(blocked);
    times.blocked_ns = times.blocked_ns.saturating_add(blocked);
    // As the probe will find it out at the thread's next switch.
    let start = MonotonicNs(since.0.saturating_add(ran));
    snapshot.progress = ThreadProgress::Waiting {
        start,
        blocked_ns: blocked,
        runnable_ns: 0,
        kept: false,
        new_thread: false,
        woken_throttled: false,
    };
}

/// Of `open` ns on a CPU that a snapshot counts as run, the thread ran only `ran` by the
/// scheduler's account: the rest was stolen.
fn take_stolen(times: &mut ThreadTimes, open: u64, ran: u64) {
    let stolen = open.saturating_sub(ran);
    if stolen > TICK_NS {
        times.oncpu_ns = times.oncpu_ns.saturating_sub(stolen);
        times.runnable_ns = times.runnable_ns.saturating_add(stolen);
        times.stolen_ns = times.stolen_ns.saturating_add(stolen);
    }
}

/// Whether the thread's state may be another than it seems without an event: one that runs, or
/// could at the recording's begin.
fn may_run(thread: &SchedulerAccount) -> bool {
    matches!(thread.state, STATE_ON_CPU | STATE_RUNNING_OR_RUNNABLE)
}

/// Of a thread that ran or wanted a CPU when it entered the recording: whether the task iterator
/// has met it without one. It has had none since then, for no switch has told of it.
fn was_off_cpu(thread: &SchedulerAccount) -> bool {
    thread.scanned_start_ns == thread.wait_start_ns
}

/// A thread's times closed at `now_ns`; `None` when it was read in the middle of an update: its law
/// does not hold.
pub(super) fn snapshot(tid: u32, thread: &SchedulerAccount, now_ns: u64) -> Option<ThreadSnapshot> {
    let known = thread.since_ns.checked_sub(thread.entered_ns)?;
    let sum = thread.oncpu_ns.checked_add(thread.runnable_ns)?.checked_add(thread.blocked_ns)?;
    if sum != known {
        return None;
    }
    // The thread may have had an event after `now_ns` was taken; of a dead one there is none to
    // come.
    let at = if thread.state == STATE_DEAD { thread.since_ns } else { now_ns.max(thread.since_ns) };
    let open = at - thread.since_ns;
    let mut times = closed_times(tid, thread);
    let waiting = |blocked_ns: u64| ThreadProgress::Waiting {
        start: MonotonicNs(thread.wait_start_ns),
        blocked_ns,
        runnable_ns: at.saturating_sub(thread.wait_start_ns).saturating_sub(blocked_ns),
        kept: thread.wait_flags & WAIT_KEPT != 0,
        new_thread: thread.wait_flags & WAIT_NEW != 0,
        woken_throttled: thread.wait_flags & WAIT_WOKEN_THROTTLED != 0,
    };
    let progress = match thread.state {
        STATE_RUNNING_OR_RUNNABLE if was_off_cpu(thread) => {
            times.runnable_ns += open;
            waiting(0)
        }
        STATE_ON_CPU | STATE_RUNNING_OR_RUNNABLE | STATE_DEAD => {
            times.oncpu_ns += open;
            ThreadProgress::OnCpu { since: MonotonicNs(thread.since_ns) }
        }
        STATE_RUNNABLE => {
            times.runnable_ns += open;
            waiting(thread.wait_blocked_ns)
        }
        _ => {
            times.blocked_ns += open;
            waiting(at.saturating_sub(thread.wait_start_ns))
        }
    };
    Some(ThreadSnapshot { times, at: MonotonicNs(at), progress })
}

#[cfg(test)]
mod tests {
    use super::{ProcScan, SchedulerAccount, ThreadProgress, asleep, snapshot, take_stolen};
    use ebpf_common::key::{
        STATE_BLOCKED, STATE_DEAD, STATE_ON_CPU, STATE_RUNNABLE, STATE_RUNNING_OR_RUNNABLE,
        WAIT_KEPT, WAIT_WAS_BLOCKED, WAIT_WOKEN_THROTTLED,
    };
    use perfusion_model::event::MonotonicNs;
    use std::collections::HashMap;

    fn thread(state: u32) -> SchedulerAccount {
        SchedulerAccount {
            entered_ns: 100,
            since_ns: 160,
            oncpu_ns: 10,
            runnable_ns: 20,
            blocked_ns: 30,
            wait_start_ns: 150,
            wait_blocked_ns: 4,
            state,
            wait_flags: WAIT_KEPT | WAIT_WAS_BLOCKED,
            ..SchedulerAccount::default()
        }
    }

    #[test]
    fn a_snapshot_closes_the_state_in_progress() {
        for state in [STATE_ON_CPU, STATE_RUNNABLE, STATE_BLOCKED] {
            let times = snapshot(1, &thread(state), 200).unwrap().times;
            assert_eq!(times.oncpu_ns + times.runnable_ns + times.blocked_ns, 100, "state {state}");
        }
        let waiting = snapshot(1, &thread(STATE_RUNNABLE), 200).unwrap().progress;
        assert!(
            matches!(
                waiting,
                ThreadProgress::Waiting { blocked_ns: 4, runnable_ns: 46, kept: true, .. }
            ),
            "{waiting:?}"
        );
    }

    /// /proc says `R` of both; seeded threads have had no event.
    #[test]
    fn a_thread_met_without_a_cpu_has_wanted_one_since_it_entered_the_recording() {
        let seeded = SchedulerAccount {
            entered_ns: 100,
            since_ns: 100,
            wait_start_ns: 100,
            state: STATE_RUNNING_OR_RUNNABLE,
            exec_ns: u64::MAX,
            ..SchedulerAccount::default()
        };
        let runs = snapshot(1, &seeded, 150).unwrap();
        assert_eq!((runs.times.oncpu_ns, runs.times.runnable_ns), (50, 0));
        assert_eq!(runs.progress, ThreadProgress::OnCpu { since: MonotonicNs(100) });
        let mut wants =
            snapshot(1, &SchedulerAccount { scanned_start_ns: 100, ..seeded }, 150).unwrap();
        assert_eq!((wants.times.oncpu_ns, wants.times.runnable_ns), (0, 50));
        assert!(
            matches!(
                wants.progress,
                ThreadProgress::Waiting {
                    start: MonotonicNs(100),
                    blocked_ns: 0,
                    runnable_ns: 50,
                    ..
                }
            ),
            "{wants:?}"
        );
        // Unless /proc says that it sleeps: its switches were hidden.
        asleep(&mut wants, 50, 0);
        assert_eq!((wants.times.runnable_ns, wants.times.blocked_ns), (0, 50));
        assert!(
            matches!(
                wants.progress,
                ThreadProgress::Waiting { blocked_ns: 50, runnable_ns: 0, .. }
            ),
            "{wants:?}"
        );
    }

    #[test]
    fn one_that_was_woken_under_its_cgroups_limit_waits_for_that() {
        let of = |wait_flags| {
            snapshot(1, &SchedulerAccount { wait_flags, ..thread(STATE_RUNNABLE) }, 200)
                .unwrap()
                .progress
        };
        let throttled =
            |progress| matches!(progress, ThreadProgress::Waiting { woken_throttled: true, .. });
        assert!(
            throttled(of(WAIT_WAS_BLOCKED | WAIT_WOKEN_THROTTLED))
                && !throttled(of(WAIT_WAS_BLOCKED))
        );
    }

    #[test]
    fn a_dead_threads_times_are_final() {
        let times = snapshot(1, &thread(STATE_DEAD), 200).unwrap().times;
        assert_eq!((times.oncpu_ns, times.runnable_ns, times.blocked_ns), (10, 20, 30));
    }

    #[test]
    fn time_on_a_cpu_that_did_not_run_the_thread_was_stolen() {
        let before = snapshot(1, &thread(STATE_ON_CPU), 100_000_160).unwrap().times;
        let mut times = before;
        take_stolen(&mut times, 100_000_000, 95_000_000);
        assert_eq!(times, before, "the account may lag by a tick");
        take_stolen(&mut times, 100_000_000, 60_000_000);
        assert_eq!(
            (times.oncpu_ns, times.runnable_ns, times.stolen_ns),
            (60_000_010, 40_000_020, 40_000_000)
        );
    }

    #[test]
    fn a_torn_read_is_refused() {
        let torn = SchedulerAccount { oncpu_ns: 11, ..thread(STATE_ON_CPU) };
        assert_eq!(snapshot(1, &torn, 200), None);
        let backwards = SchedulerAccount { since_ns: 50, ..thread(STATE_ON_CPU) };
        assert_eq!(snapshot(1, &backwards, 200), None);
    }

    /// What was left of a thread whose last switch went unseen, whatever state it was in.
    #[test]
    fn a_thread_is_gone_when_proc_says_so_and_its_zombie_when_it_seems_to_run() {
        let is_gone = |pid: u32, state| {
            let entry = SchedulerAccount { tgid: pid, ..thread(state) };
            let found = snapshot(pid, &entry, 100_000_160).unwrap();
            ProcScan { holder: None, tasks: HashMap::new() }.is_gone(&entry, &found, u64::MAX)
        };
        let states = [STATE_ON_CPU, STATE_RUNNABLE, STATE_BLOCKED];
        let own = std::process::id();
        assert_eq!(states.map(|state| is_gone(own, state)), [false; 3]);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let exited =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(
            rustix::process::WaitId::Pid(rustix::process::Pid::from_child(&child)),
            exited,
        )
        .unwrap();
        assert_eq!(
            states.map(|state| is_gone(child.id(), state)),
            [true, false, false],
            "a zombie"
        );
        child.wait().unwrap();
        assert_eq!(states.map(|state| is_gone(child.id(), state)), [true; 3], "reaped");
    }

    #[test]
    fn one_that_waits_is_asked_about_only_when_it_has_for_a_whole_window() {
        let entry = SchedulerAccount { tgid: u32::MAX, ..thread(STATE_BLOCKED) };
        let found = snapshot(u32::MAX, &entry, 100_000_160).unwrap();
        let mut proc = ProcScan { holder: None, tasks: HashMap::new() };
        assert!(!proc.is_gone(&entry, &found, 160));
        assert!(proc.is_gone(&entry, &found, 161));
    }

    #[test]
    fn a_thread_found_asleep_ran_for_what_the_scheduler_says_and_slept_since() {
        let mut found = snapshot(1, &thread(STATE_ON_CPU), 100_000_160).unwrap();
        asleep(&mut found, 100_000_000, 60_000_000);
        assert_eq!((found.times.oncpu_ns, found.times.blocked_ns), (60_000_010, 40_000_030));
        let start = MonotonicNs(60_000_160);
        let waiting = ThreadProgress::Waiting {
            start,
            blocked_ns: 40_000_000,
            runnable_ns: 0,
            kept: false,
            new_thread: false,
            woken_throttled: false,
        };
        assert_eq!(found.progress, waiting);
    }
}
