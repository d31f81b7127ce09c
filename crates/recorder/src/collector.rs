//! The quick half of the pipeline: drains every source in rounds, merges by time, hands batches on.
//! It never waits for the processor: when too much is on its way it holds what it has, drains no
//! more, and the rings count what they drop.

use super::backlog::EventBacklog;
use super::commands::CommandReceiver;
use super::commands::{CollectorCommand, CollectorStatus};
use super::heartbeat::Heartbeat;
use super::rate_controller::{DrainRateController, Due, RoundResult};
use perfusion_model::event::RuntimeEventCounts;
use perfusion_model::event::{Event, MonotonicNs, ThreadSnapshot};
use perfusion_sources::SourceRates;
use perfusion_sources::kernel::KernelSource;
use perfusion_sources::kernel::threads::ThreadScan as ThreadLook;
use perfusion_sources::order::EventOrder;
use perfusion_sources::shim::{RUNTIME_EVENT_COUNTERS, ShimLimits, ShimSource};
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{SyncSender, TryRecvError, TrySendError};
use std::time::{Duration, Instant, SystemTime};

/// Rounds in which the shims' last words are read at the end, at most: each takes a bounded number
/// of bytes.
const LAST_ROUNDS: usize = 16;
/// How long shims are given to leave at the end, unless somebody waits for it: a collection in
/// progress holds one up.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// What the collector hands on.
#[derive(Debug)]
pub(crate) enum CollectorBatch {
    /// Events in time order, and what they take of the backlog.
    Events(Vec<Event>, usize),
    /// A window ends: the threads' times. Events of the time before may still follow.
    Cut(KernelTotals<ThreadLook>),
    /// All events from here on belong to the new window.
    CutReached,
    /// No more kernel events come.
    KernelClosed(KernelTotals<Vec<ThreadSnapshot>>),
    /// Nothing more comes.
    End {
        /// Counters of the shims and of the merge: name and value.
        counters: Vec<(String, u64)>,
    },
}

/// What the kernel source knew at a window's end.
#[derive(Debug)]
pub(crate) struct KernelTotals<T> {
    /// A moment before it ended: who waits in `threads` waited then, or began to later.
    pub(crate) before: MonotonicNs,
    /// When it ended.
    pub(crate) at: MonotonicNs,
    /// The same by the wall clock.
    pub(crate) wall: SystemTime,
    /// The rates in force until then.
    pub(crate) rates: SourceRates,
    /// Every living thread's exact times; at the end of a window before /proc is asked about them.
    pub(crate) threads: T,
    /// Counters of the probes and of perf's rings: name and value.
    pub(crate) counters: Vec<(String, u64)>,
    /// Exceptions and contentions that the runtimes have counted.
    pub(crate) runtime_events: Vec<RuntimeEventCounts>,
}

/// The collector's state; [`EventCollector::run`] is its thread.
pub(crate) struct EventCollector {
    kernel: Option<KernelSource>,
    shims: ShimSource,
    order: EventOrder,
    held: VecDeque<CollectorBatch>,
    backlog: EventBacklog,
    paused_rounds: u64,
    rate_controller: DrainRateController,
    finishes: bool,
    out: SyncSender<CollectorBatch>,
    commands: CommandReceiver,
    /// When the last thread was looked at for a cut whose events are still on their way.
    cut_until: Option<MonotonicNs>,
    /// A cut that was asked for meanwhile, with its rates: it follows.
    cut_next: Option<Option<SourceRates>>,
    heartbeat: Heartbeat,
    /// Counters of exceptions and contentions when the kernel was closed: the profile covers no
    /// more.
    of_runtime_events: Vec<(String, u64)>,
    /// How long shims are given to leave at the end.
    leave_within: Duration,
}

impl EventCollector {
    /// Joins the sources to the two channels.
    #[must_use]
    pub(super) fn new(
        kernel: KernelSource,
        shims: ShimSource,
        backlog: EventBacklog,
        out: SyncSender<CollectorBatch>,
        commands: CommandReceiver,
        heartbeat: Heartbeat,
    ) -> Self {
        Self {
            kernel: Some(kernel),
            shims,
            order: EventOrder::default(),
            held: VecDeque::new(),
            backlog,
            paused_rounds: 0,
            rate_controller: DrainRateController::new(Instant::now()),
            finishes: false,
            out,
            commands,
            cut_until: None,
            cut_next: None,
            heartbeat,
            of_runtime_events: Vec::new(),
            leave_within: LEAVE_WITHIN,
        }
    }

    /// Waits so long at the end for shims to leave.
    pub(crate) fn leaving_within(self, most: Duration) -> Self {
        Self { leave_within: most, ..self }
    }

    /// Drains in rounds until told to finish.
    pub(crate) fn run(mut self) {
        loop {
            self.heartbeat.beat();
            let mut found = RoundResult::default();
            if self.backlog.is_full() {
                self.paused_rounds += 1;
                self.shims.beat();
                self.rate_controller.news(Instant::now());
            } else {
                found = self.round();
            }
            if self.finishes {
                return self.finish();
            }
            if !self.pass_on() {
                return;
            }
            let due = self.rate_controller.next(found, Instant::now());
            // Nobody listens any more: the recording was given up.
            if self.obey(due).is_err() {
                return;
            }
        }
    }

    /// Takes commands until the next round is due. An error means that the other side is gone.
    fn obey(&mut self, due: Due) -> Result<(), TryRecvError> {
        let began = Instant::now();
        let (soonest, mut latest) = (began + due.soonest, began + due.latest);
        loop {
            match self.commands.next() {
                Ok(command) => {
                    if self.carry_out(command) {
                        self.rate_controller.news(Instant::now());
                        latest = soonest;
                    }
                }
                Err(TryRecvError::Disconnected) => return Err(TryRecvError::Disconnected),
                Err(TryRecvError::Empty) => {
                    // Until then, perf's records are of no interest.
                    let early = Instant::now() < soonest;
                    let bell = self.kernel.as_ref().filter(|_| !early).map(KernelSource::bell);
                    if self.commands.wait(bell, if early { soonest } else { latest }) {
                        return Ok(());
                    }
                }
            }
            // Whoever asks without end does not keep the rings from being drained.
            if Instant::now() >= latest {
                return Ok(());
            }
        }
    }

    /// Answers whether something may follow that should be seen soon.
    fn carry_out(&mut self, command: CollectorCommand) -> bool {
        match command {
            CollectorCommand::Ask(questions) => {
                questions.put_to(&mut self.shims);
                self.shims.send_questions();
                // They are on their way, and the answers are in no hurry.
                return false;
            }
            CollectorCommand::Watch(pid) => self.shims.watch(pid),
            CollectorCommand::Leave(pid) => self.shims.leave(pid),
            CollectorCommand::Subscribe(pid, subscriptions, names) => {
                self.shims.subscribe(pid, subscriptions, names);
            }
            CollectorCommand::Cut(rates) => self.cut(rates),
            CollectorCommand::Cgroups(cgroups) => self.select(cgroups),
            CollectorCommand::Look(answer) => {
                // Fails only when nobody waits for the answer any more.
                answer.try_send(self.look()).ok();
                return false;
            }
            CollectorCommand::CloseKernel => self.close_kernel(),
            CollectorCommand::Finish => self.finishes = true,
        }
        true
    }

    /// Drains all sources once.
    fn round(&mut self) -> RoundResult {
        let start = MonotonicNs::now();
        let mut found = RoundResult::default();
        let (order, shims) = (&mut self.order, &mut self.shims);
        if let Some(kernel) = &mut self.kernel {
            kernel.drain(&mut |event| {
                found.change |= event.is_change();
                shims.observe(&event);
                order.push(event);
            });
            found.kernel = kernel.filled();
        }
        shims.drain(&mut |event| {
            found.change |= event.is_change();
            found.withheld |= event.is_withheld();
            order.push(event);
        });
        (found.shims, found.waited_for) = (shims.fullest(), shims.is_waited_for());
        let mut events = Vec::new();
        self.order.end_round(start, &mut events);
        if !events.is_empty() {
            self.hold(events);
        }
        if self.cut_until.is_some_and(|until| self.order.released() > until) {
            self.cut_until = None;
            self.held.push_back(CollectorBatch::CutReached);
            if let Some(next) = self.cut_next.take() {
                self.cut(next);
            }
        }
        found
    }

    fn select(&mut self, cgroups: HashMap<u64, u32>) {
        if let Some(kernel) = &mut self.kernel
            && let Err(error) = kernel.select_cgroups(cgroups)
        {
            tracing::warn!(%error, "the selection of cgroups is out of date");
        }
    }

    /// Announces the end of a window. One that is asked for before the last is through follows it;
    /// of several the last.
    fn cut(&mut self, next: Option<SourceRates>) {
        if self.cut_until.is_some() {
            self.cut_next = Some(next);
            return;
        }
        let Some(kernel) = &mut self.kernel else { return };
        let at = MonotonicNs::now();
        let wall = at.on_wall_clock();
        let rates = rates(kernel, &self.shims);
        let threads = kernel.look_at_threads(at);
        self.cut_until = Some(MonotonicNs::now());
        if let Some(next) = next.filter(|next| *next != rates) {
            kernel.set_rates(next.kernel);
            let ShimLimits { live_objects, .. } = self.shims.limits();
            self.shims.set_limits(ShimLimits {
                live_objects,
                allocation_samples: next.allocation_samples,
            });
        }
        let runtime_events = self.shims.runtime_events();
        let counters = self.counters();
        let totals =
            KernelTotals { before: at, at, wall, rates, threads, counters, runtime_events };
        self.held.push_back(CollectorBatch::Cut(totals));
    }

    fn counters(&self) -> Vec<(String, u64)> {
        let kernel = self.kernel.iter().flat_map(KernelSource::counters);
        let mut all: Vec<(String, u64)> =
            kernel.map(|(info, value)| (info.name.to_owned(), value)).collect();
        all.append(&mut self.shims.counters());
        all.push(("order_late".to_owned(), self.order.late()));
        all.push(("collector_paused_rounds".to_owned(), self.paused_rounds));
        all
    }

    fn look(&self) -> CollectorStatus {
        CollectorStatus {
            counters: self.counters(),
            costs: self.kernel.as_ref().map(KernelSource::costs).unwrap_or_default(),
            shims: self.shims.looks(),
        }
    }

    fn close_kernel(&mut self) {
        let Some(mut kernel) = self.kernel.take() else { return };
        let order = &mut self.order;
        kernel.scan_last(&mut |event| order.push(event));
        // Finds threads whose end went unseen, for the drain below.
        drop(kernel.thread_times());
        let before = MonotonicNs::now();
        // Frozen first, so that no thread ends and nothing is counted between the totals and the
        // last records.
        let at = kernel.freeze();
        let runtime_events = self.shims.runtime_events();
        self.of_runtime_events = self.shims.counters();
        self.of_runtime_events.retain(|(name, _)| RUNTIME_EVENT_COUNTERS.contains(&name.as_str()));
        let (wall, rates) = (at.on_wall_clock(), rates(&kernel, &self.shims));
        let threads = kernel.thread_times();
        let order = &mut self.order;
        kernel.drain(&mut |event| order.push(event));
        for _ in 0..LAST_ROUNDS {
            if !self.shims.drain(&mut |event| order.push(event)) {
                break;
            }
        }
        let counters = kernel
            .counters()
            .into_iter()
            .map(|(info, value)| (info.name.to_owned(), value))
            .collect();
        drop(kernel);
        let mut events = Vec::new();
        self.order.finish(&mut events);
        self.hold(events);
        if self.cut_until.take().is_some() {
            self.held.push_back(CollectorBatch::CutReached);
        }
        // The end is a cut, too.
        self.cut_next = None;
        let totals = KernelTotals { before, at, wall, rates, threads, counters, runtime_events };
        self.held.push_back(CollectorBatch::KernelClosed(totals));
    }

    fn hold(&mut self, events: Vec<Event>) {
        let bytes = self.backlog.add(&events);
        self.held.push_back(CollectorBatch::Events(events, bytes));
    }

    /// Hands on what the channel takes; false when nobody listens.
    fn pass_on(&mut self) -> bool {
        while let Some(batch) = self.held.pop_front() {
            match self.out.try_send(batch) {
                Ok(()) => {}
                Err(TrySendError::Full(batch)) => {
                    self.held.push_front(batch);
                    return true;
                }
                Err(TrySendError::Disconnected(_)) => return false,
            }
        }
        true
    }

    fn finish(mut self) {
        // From here on it waits for the processor, which has a heartbeat of its own.
        drop(std::mem::take(&mut self.heartbeat));
        self.close_kernel();
        let began = Instant::now();
        let staying = self.shims.detach_all_within(self.leave_within);
        tracing::debug!(took = ?began.elapsed(), "shims have left");
        if !staying.is_empty() {
            tracing::warn!(pids = ?staying, "the shim has not left these processes yet; it will \
                 when its lease runs out");
        }
        // What was left behind by a round is read in the next: never all at once, and not for ever
        // from one that goes on writing.
        for _ in 0..LAST_ROUNDS {
            let order = &mut self.order;
            let more = self.shims.drain(&mut |event| order.push(event));
            let mut events = Vec::new();
            self.order.finish(&mut events);
            self.hold(events);
            if !self.send_all() {
                return;
            }
            if !more {
                break;
            }
        }
        let mut counters = self.shims.counters();
        for (name, value) in &mut counters {
            let at_end = self.of_runtime_events.iter().find(|(of, _)| of == name);
            *value = at_end.map_or(*value, |(_, at_end)| *at_end);
        }
        counters.push(("order_late".to_owned(), self.order.late()));
        counters.push(("collector_paused_rounds".to_owned(), self.paused_rounds));
        self.held.push_back(CollectorBatch::End { counters });
        // Fails only when nobody listens any more.
        self.send_all();
    }

    /// Hands everything on; false when nobody listens. Waiting is right here: the kernel is not
    /// drained any more, and the processor only has to empty the channel.
    fn send_all(&mut self) -> bool {
        let held = std::mem::take(&mut self.held);
        held.into_iter().all(|batch| self.out.send(batch).is_ok())
    }
}

/// The rates in force.
fn rates(kernel: &KernelSource, shims: &ShimSource) -> SourceRates {
    SourceRates { kernel: kernel.rates(), allocation_samples: shims.limits().allocation_samples }
}
