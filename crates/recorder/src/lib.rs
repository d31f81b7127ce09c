//! Joins the steps into one recording: events, order, stacks, names, values, windows.
//!
//! [`Recording`] owns the two threads of a recording: [`collector`] drains the sources,
//! [`processor`] does the rest. `processor::cut` closes a window. docs/architecture.md says why
//! there are two threads. `record`, `dump`, `leaks` and the daemon use this crate alike.

pub mod backlog;
pub mod collector;
pub mod commands;
mod cost_attribution;
pub mod counter_values;
pub mod counters;
pub mod follow;
pub mod heartbeat;
pub mod names;
mod naming;
mod pre_attach_names;
pub mod processor;
mod question_times;
mod rate_controller;
mod retired_programs;
mod starts;
pub mod trim;

use backlog::EventBacklog;
use collector::{CollectorBatch, EventCollector, KernelTotals};
use commands::CommandSender;
use commands::{CollectorCommand, CollectorStatus};
use heartbeat::{Heartbeat, HeartbeatMonitor};
use perfusion_aggregate::window::Window;
use perfusion_host::pods::Pods;
use perfusion_host::process::table::ProcessStatus;
use perfusion_host::process::{self, ProcessTable};
use perfusion_model::event::{MonotonicNs, ThreadSnapshot};
use perfusion_sources::SourceRates;
use perfusion_sources::kernel::KernelSource;
use perfusion_sources::kernel::rules::RuleCache;
use perfusion_sources::kernel::span_map::SpanMap;
use perfusion_sources::kernel::threads::{ConfirmedThreads, ThreadScan as ThreadLook, ThreadTable};
use perfusion_sources::shim::ShimSource;
use perfusion_symbolize::kernel::{ReadAhead, WakeSites};
use processor::cut::WindowEstimates;
use processor::{Processor, Questions};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// Batches on their way to the processor.
const BATCHES: usize = 256;
/// Commands on their way to the collector, which takes all of them every round.
const COMMANDS: usize = 1_024;
/// How long the processor waits for a batch, while the recording goes on, and while names are
/// waited for.
const PAUSE: Duration = Duration::from_millis(100);
const SHORT_PAUSE: Duration = Duration::from_millis(20);
/// Answers about the processes that may be asked for at once.
const MOST_WISHES: usize = 8;
/// How long the shims are given for the last names.
const LAST_NAMES: Duration = Duration::from_secs(2);
/// And no longer than this after the last answer came: what does not answer any more is not waited
/// for.
const NO_ANSWERS: Duration = Duration::from_millis(400);
/// How long shims are given to leave at the end of a recording that somebody waits for.
const LEAVE_SOON: Duration = Duration::from_millis(500);
/// A question whose answer did not come is asked again after this.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// How often free memory is given back.
const TRIM_EVERY: Duration = Duration::from_secs(10);
/// How often the processor says how it stands, and how long the collector, which answers at once,
/// is given to.
const SAY_EVERY: Duration = Duration::from_secs(1);
/// How often it says which processes run a CLR, whoever loads shims waits for it; and how full the
/// window is, which may have to end.
const SAY_MANAGED_EVERY: Duration = Duration::from_millis(250);
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// A window that is over and has its names.
pub struct ClosedWindow<'a> {
    /// Stacks, names and the process table.
    pub processor: &'a Processor,
    /// The values.
    pub window: &'a Window,
    /// All counters of all stages since the recording began: name and value.
    pub counters: Vec<(String, u64)>,
    /// When it began and ended.
    pub began: MonotonicNs,
    /// When it ended.
    pub ended: MonotonicNs,
    /// The same by the wall clock.
    pub ended_wall: SystemTime,
    /// The rates it was recorded at.
    pub rates: SourceRates,
    /// None follows: the recording ends.
    pub is_last: bool,
}

/// Takes each window of a recording that has several, on the processor's thread: no longer than it
/// takes to encode it.
pub type TakeWindow = Box<dyn FnMut(ClosedWindow<'_>) + Send>;

/// One recording in progress.
pub struct Recording {
    collector: JoinHandle<()>,
    processor: JoinHandle<Option<RecordingResult>>,
    commands: CommandSender,
    said: Arc<Mutex<RecordingState>>,
    wishes: Arc<Mutex<ProcessorRequests>>,
    watch: HeartbeatMonitors,
}

/// Looks at both threads of a recording.
#[derive(Debug)]
pub struct HeartbeatMonitors {
    processor: HeartbeatMonitor,
    collector: HeartbeatMonitor,
}

impl HeartbeatMonitors {
    /// Which thread has not moved for a minute. To be asked now and then.
    #[must_use]
    pub fn hanging(&mut self, now: Instant) -> Option<&'static str> {
        // Both are asked each time: that is how they are watched.
        let (processor, collector) = (self.processor.hangs(now), self.collector.hangs(now));
        processor.then_some("processor").or(collector.then_some("collector"))
    }
}

/// A recording that has ended.
pub struct RecordingResult {
    /// Stacks, names and the process table.
    pub processor: Processor,
    /// The values of the last window.
    pub window: Window,
    /// All counters of all stages: name and value.
    pub counters: Vec<(String, u64)>,
    /// When the kernel source was frozen.
    pub ended: MonotonicNs,
}

/// A process that runs a CLR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagedProcess {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
    /// The service it belongs to; its command name where services are not told apart.
    pub service: Arc<str>,
    /// False while it is so young that it may still name itself otherwise.
    pub is_named: bool,
}

/// What the processor says of itself, a moment old.
#[derive(Default)]
struct RecordingState {
    counters: Vec<(String, u64)>,
    managed: Vec<ManagedProcess>,
    /// How much of the room for stacks the window in progress has taken, from 0 to 1.
    stacks_fill: f64,
}

/// What the processor is asked for that must not wait for all that is on its way to it.
#[derive(Default)]
struct ProcessorRequests {
    shed: bool,
    /// Bytes that the stacks of a window may take.
    stacks: Option<u64>,
    standings: Vec<SyncSender<Vec<ProcessStatus>>>,
    /// Whether the shims of a process are asked for names.
    names: HashMap<u32, bool>,
}

/// Lets other threads speak with the collector: tell it of processes that a shim was loaded into,
/// ask how it stands.
#[derive(Clone)]
pub struct RecordingHandle {
    commands: CommandSender,
    said: Arc<Mutex<RecordingState>>,
    wishes: Arc<Mutex<ProcessorRequests>>,
}

impl RecordingHandle {
    /// Of a recording that never answers.
    ///
    /// # Errors
    /// When there is no pipe for it.
    pub fn of_nobody() -> io::Result<Self> {
        Ok(Self { commands: commands::channel(1)?.0, said: Arc::default(), wishes: Arc::default() })
    }

    /// A shim was loaded into `pid`.
    pub fn watch(&self, pid: u32) {
        // Fails only when the recording is over.
        self.commands.send(CollectorCommand::Watch(pid)).ok();
    }

    /// The shim is to leave `pid`.
    pub fn leave(&self, pid: u32) {
        // Fails only when the recording is over, and then it leaves anyway.
        self.commands.send(CollectorCommand::Leave(pid)).ok();
    }

    /// The shim of `pid` is to tell this, and is asked for names if so said.
    pub fn wish(&self, pid: u32, wishes: perfusion_sources::shim::Subscriptions, names: bool) {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner).names.insert(pid, names);
        // Fails only when the recording is over.
        self.commands.send(CollectorCommand::Wish(pid, wishes, names)).ok();
    }

    /// The processes that run a CLR, of those that were seen at work or asleep.
    #[must_use]
    pub fn managed(&self) -> Vec<ManagedProcess> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).managed.clone()
    }

    /// How the processes stand; `None` when the recording is over or too busy to say.
    #[must_use]
    pub fn standings(&self) -> Option<Vec<ProcessStatus>> {
        let (answer, answered) = sync_channel(1);
        let mut wishes = self.wishes.lock().unwrap_or_else(PoisonError::into_inner);
        if wishes.standings.len() >= MOST_WISHES {
            return None;
        }
        wishes.standings.push(answer);
        drop(wishes);
        answered.recv_timeout(LOOK_TIMEOUT).ok()
    }

    /// How all stages stand; `None` when the recording is over or too busy to say.
    #[must_use]
    pub fn look(&self) -> Option<CollectorStatus> {
        let (answer, answered) = sync_channel(1);
        self.commands.try_send(CollectorCommand::Look(answer)).ok()?;
        let mut look = answered.recv_timeout(LOOK_TIMEOUT).ok()?;
        look.counters.extend(
            self.said.lock().unwrap_or_else(PoisonError::into_inner).counters.iter().cloned(),
        );
        Some(look)
    }
}

/// What a recording needs that goes on from window to window.
pub struct WindowOptions {
    /// Tells pods' services.
    pub pods: Arc<Pods>,
    /// Bytes that the stacks of a window may take ([`Recording::allow_stacks`]).
    pub stacks: u64,
    /// Takes them.
    pub take: TakeWindow,
}

impl Recording {
    /// Starts both threads, for a recording with one window.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn start(
        kernel: KernelSource,
        shims: ShimSource,
        processes: ProcessTable,
    ) -> io::Result<Self> {
        Self::spawn(kernel, shims, Processor::new(processes).with_lock_owners(), None)
    }

    /// Starts both threads, for a recording that goes on from window to window and tells services
    /// apart.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn start_windows(
        kernel: KernelSource,
        shims: ShimSource,
        processes: ProcessTable,
        windows: WindowOptions,
    ) -> io::Result<Self> {
        let began = kernel.started();
        let mut processor = Processor::new(processes).by_service(windows.pods);
        // Before the first event: what a busy machine has for it may be most of a window.
        processor.allow_stacks(windows.stacks);
        Self::spawn(kernel, shims, processor, Some((windows.take, began)))
    }

    fn spawn(
        mut kernel: KernelSource,
        shims: ShimSource,
        processor: Processor,
        take: Option<(TakeWindow, MonotonicNs)>,
    ) -> io::Result<Self> {
        let (rules, spans, threads) =
            (kernel.take_rules(), kernel.take_spans(), kernel.take_threads());
        let pulse = Heartbeat::default();
        let mut processor =
            processor.with_waker_stacks(kernel.has_waker_stacks()).with_spans(kernel.has_spans());
        processor.expect(shims.limits());
        if rules.is_none() {
            processor.processes.teach_nobody();
        }
        let backlog = EventBacklog::of_ring(kernel.ring_bytes());
        let (batches, from_collector) = sync_channel(BATCHES);
        let (commands, obeyed) = commands::channel(COMMANDS)?;
        let of_collector = Heartbeat::default();
        let watch = HeartbeatMonitors { processor: pulse.watch(), collector: of_collector.watch() };
        let mut collector =
            EventCollector::new(kernel, shims, backlog.clone(), batches, obeyed, of_collector);
        if take.is_none() {
            collector = collector.leaving_within(LEAVE_SOON);
        }
        let said = Arc::new(Mutex::new(RecordingState::default()));
        let wishes = Arc::new(Mutex::new(ProcessorRequests::default()));
        let mut run = ProcessorThread {
            wishes: Arc::clone(&wishes),
            backlog,
            commands: commands.clone(),
            said: Arc::clone(&said),
            processor,
            rules,
            spans,
            threads,
            pulse,
            take,
            announced: None,
            naming: None,
            of_windows: Vec::new(),
        };
        // The kernel's symbols take 50 ms to read, in which a program that ends soon could be asked
        // for no names.
        let wake_sites = Arc::clone(&run.processor.wake_sites);
        let read_names = run.take.is_none().then(|| {
            let (ahead, read_names) = ReadAhead::new();
            run.processor.symbolizer.read_ahead(ahead);
            read_names
        });
        let read = move || {
            wake_sites.get_or_init(WakeSites::read);
            if let Some(read_names) = read_names {
                read_names();
            }
        };
        std::thread::Builder::new().name("symbols".into()).spawn(read)?;
        Ok(Self {
            collector: std::thread::Builder::new()
                .name("collector".into())
                .spawn(move || collector.run())?,
            processor: std::thread::Builder::new().name("processor".into()).spawn(move || {
                let totals = run.until_closed(&from_collector)?;
                Some(run.finish(totals))
            })?,
            commands,
            said,
            wishes,
            watch,
        })
    }

    /// A handle for those who load shims or want to know how it goes.
    #[must_use]
    pub fn watcher(&self) -> RecordingHandle {
        let (commands, said) = (self.commands.clone(), Arc::clone(&self.said));
        RecordingHandle { commands, said, wishes: Arc::clone(&self.wishes) }
    }

    /// True while both threads run; they end early only by a fault of this program.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.collector.is_finished() && !self.processor.is_finished()
    }

    /// Looks whether its threads move.
    #[must_use]
    pub fn watch(&self) -> HeartbeatMonitors {
        HeartbeatMonitors {
            processor: self.watch.processor.again(),
            collector: self.watch.collector.again(),
        }
    }

    /// Which of its threads has not moved for a minute. To be asked now and then.
    #[must_use]
    pub fn hanging(&mut self) -> Option<&'static str> {
        self.watch.hanging(Instant::now())
    }

    /// Ends a window and begins the next, at these rates if they are to be others.
    pub fn cut(&self, rates: Option<SourceRates>) {
        // Fails only when the collector has failed, which `stop` reports.
        self.commands.send(CollectorCommand::Cut(rates)).ok();
    }

    /// These cgroups there are now, with what rules say of them.
    /// False when it is over or too busy to be told.
    #[must_use]
    pub fn select_cgroups(&self, cgroups: HashMap<u64, u32>) -> bool {
        self.commands.try_send(CollectorCommand::Cgroups(cgroups)).is_ok()
    }

    /// From now on the stacks of a window may take so many bytes; those beyond are one stack, and
    /// counted.
    pub fn allow_stacks(&self, bytes: u64) {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner).stacks = Some(bytes);
    }

    /// How much of that the window in progress has taken, a moment ago: 1 is all of it, and more
    /// where more was allowed before.
    #[must_use]
    pub fn stacks_fill(&self) -> f64 {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).stacks_fill
    }

    /// Memory is short: what is only remembered to be quick is dropped, between two batches.
    pub fn shed(&self) {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner).shed = true;
    }

    /// Ends the recording as far as the kernel goes: from here on only names are waited for.
    pub fn close(&self) {
        // Fails only when the collector has failed, which `stop` reports.
        self.commands.send(CollectorCommand::CloseKernel).ok();
    }

    /// Ends the recording and waits for the last names and the result; `None` when a thread has
    /// failed, and with it the truth.
    #[must_use]
    pub fn stop(self) -> Option<RecordingResult> {
        self.close();
        drop(self.commands);
        let recorded = self.processor.join().ok();
        self.collector.join().ok()?;
        recorded.flatten()
    }
}

/// A window that waits for its last names.
struct UnnamedWindow {
    cut: WindowEstimates,
    totals: WindowTotals,
    until: Instant,
}

/// What the collector's side said when a window ended.
struct WindowTotals {
    at: MonotonicNs,
    wall: SystemTime,
    rates: SourceRates,
    counters: Vec<(String, u64)>,
}

/// The recording's end, as the collector told it.
struct RecordingEnd {
    totals: KernelTotals<Vec<ThreadSnapshot>>,
    counters: Vec<(String, u64)>,
}

/// The processor's thread.
struct ProcessorThread {
    backlog: EventBacklog,
    commands: CommandSender,
    said: Arc<Mutex<RecordingState>>,
    wishes: Arc<Mutex<ProcessorRequests>>,
    processor: Processor,
    rules: Option<RuleCache>,
    spans: Option<SpanMap>,
    /// The probes' threads, which are confirmed here.
    threads: Option<ThreadTable>,
    pulse: Heartbeat,
    /// Who takes windows, and when the one in progress began.
    take: Option<(TakeWindow, MonotonicNs)>,
    announced: Option<WindowTotals>,
    naming: Option<UnnamedWindow>,
    /// What windows could not keep apart, all of them together.
    of_windows: Vec<(String, u64)>,
}

impl ProcessorThread {
    /// Works until nothing more comes; `None` when the collector failed.
    fn until_closed(&mut self, batches: &Receiver<CollectorBatch>) -> Option<RecordingEnd> {
        let mut totals = None;
        let mut deadline: Option<Instant> = None;
        // How many answers are lacking at the end, and since when there have been so many.
        let mut lacking = (usize::MAX, Instant::now());
        let mut asked = Instant::now();
        let (mut said, mut said_managed, mut trimmed) = (asked, asked, asked);
        loop {
            self.pulse.beat();
            let pause =
                if deadline.is_some() || self.naming.is_some() { SHORT_PAUSE } else { PAUSE };
            match batches.recv_timeout(pause) {
                Ok(CollectorBatch::Events(events, bytes)) => {
                    for event in events {
                        self.processor.event(event);
                        self.pulse.beat();
                    }
                    self.backlog.take(bytes);
                    self.teach();
                    ask(&self.commands, self.processor.take_questions());
                }
                Ok(CollectorBatch::Cut(totals)) => self.begin_cut(totals),
                Ok(CollectorBatch::CutReached) => self.cut(),
                Ok(CollectorBatch::KernelClosed(closed)) => {
                    self.processor.close_at(closed.at);
                    self.processor.still_there(&closed.threads, closed.before);
                    ask(&self.commands, self.processor.take_questions());
                    ask(&self.commands, self.processor.withheld().into());
                    totals = Some(closed);
                    deadline = Some(Instant::now() + LAST_NAMES);
                    tracing::debug!("the kernel is closed");
                }
                Ok(CollectorBatch::End { counters }) => {
                    return totals.map(|totals| RecordingEnd { totals, counters });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
            if trimmed.elapsed() > TRIM_EVERY {
                trimmed = Instant::now();
                trim::give_back();
            }
            self.grant();
            if self.take.is_some() && said.elapsed() > SAY_EVERY {
                said = Instant::now();
                let counters = [self.own_counters(), self.of_windows.clone()].concat();
                self.say(|said| said.counters = counters);
            }
            if said_managed.elapsed() > SAY_MANAGED_EVERY {
                said_managed = Instant::now();
                let (managed, fill) = (self.processor.managed(), self.processor.stacks_fill());
                self.say(|said| (said.managed, said.stacks_fill) = (managed, fill));
            }
            // A question may find no shim yet, or no room; while its code was just seen running it
            // may be repeated.
            let repeat = asked.elapsed() > ASK_AGAIN;
            if repeat || deadline.is_some() {
                let open = self.processor.unanswered(MonotonicNs::now());
                if self
                    .naming
                    .as_ref()
                    .is_some_and(|n| open.is_empty() || Instant::now() >= n.until)
                {
                    self.named();
                }
                // Of those that have ended no answers come but those that are in their rings, and
                // these are read anyway.
                let asked_of = || open.iter().map(|request| request.pid).collect::<BTreeSet<u32>>();
                let lives = |pid| process::is_running(pid, process::start_ticks(pid));
                if deadline.is_some() && open.len() != lacking.0 {
                    lacking = (open.len(), Instant::now());
                }
                let is_late = |until| Instant::now() >= until || lacking.1.elapsed() >= NO_ANSWERS;
                if deadline
                    .is_some_and(|until| is_late(until) || !asked_of().into_iter().any(lives))
                {
                    tracing::debug!(unanswered = open.len(), "the last names are here");
                    // Fails only when the collector is gone, and then the channel ends.
                    self.commands.send(CollectorCommand::Finish).ok();
                    deadline = None;
                    // While the shims leave, which takes runtimes a third of a second.
                    self.processor.name_early();
                } else if repeat {
                    asked = Instant::now();
                    ask(&self.commands, open.into());
                }
            }
        }
    }

    /// Brings to the probes what was learnt for them.
    fn teach(&mut self) {
        let mut refused = Vec::new();
        self.processor.processes.teach(|lessons| {
            if let Some(spans) = &mut self.spans {
                refused = spans.teach(&lessons);
            }
            if let Some(rules) = &mut self.rules {
                rules.teach(lessons);
            }
        });
        for pid in refused {
            self.processor.spans_refused(pid);
        }
    }

    /// Does what was asked for between two batches.
    fn grant(&mut self) {
        let ProcessorRequests { shed, stacks, standings, names } =
            std::mem::take(&mut *self.wishes.lock().unwrap_or_else(PoisonError::into_inner));
        if shed {
            self.processor.shed();
        }
        if let Some(bytes) = stacks {
            self.processor.allow_stacks(bytes);
        }
        for (pid, names) in names {
            self.processor.name(pid, names);
        }
        for answer in standings {
            // Fails only when nobody waits for the answer any more.
            answer.try_send(self.processor.standings()).ok();
        }
    }

    /// A window ends. What went unseen of its threads is asked for here: it takes its time, and the
    /// rings must not wait.
    fn begin_cut(&mut self, totals: KernelTotals<ThreadLook>) {
        let KernelTotals { at, wall, rates, threads, mut counters, incidents, .. } = totals;
        self.processor.incident_totals.count(&incidents);
        let mut confirmed = ConfirmedThreads::default();
        if let Some(table) = &mut self.threads {
            confirmed = table.confirm(&threads);
            table.amend(&mut counters);
        }
        self.processor.begin_cut(at, confirmed.threads);
        for end in confirmed.ends {
            self.processor.event(end);
        }
        self.announced = Some(WindowTotals { at, wall, rates, counters });
    }

    /// All of the announced window is here.
    fn cut(&mut self) {
        // One that still waits for names has waited for a whole window.
        self.named();
        ask(&self.commands, self.processor.withheld().into());
        if let (Some(cut), Some(totals)) = (self.processor.end_cut(), self.announced.take()) {
            self.naming = Some(UnnamedWindow { cut, totals, until: Instant::now() + LAST_NAMES });
        }
    }

    /// Hands on the window that waits for names, if there is one, with those it has.
    fn named(&mut self) {
        let Some(UnnamedWindow { cut, totals, .. }) = self.naming.take() else { return };
        let (window, gone) = self.processor.window(cut);
        self.hand_on(&window, totals, false);
        self.processor.forget(&gone);
    }

    fn hand_on(&mut self, window: &Window, totals: WindowTotals, is_last: bool) {
        let WindowTotals { at: ended, wall: ended_wall, rates, mut counters } = totals;
        counters.extend(self.own_counters());
        let of_window = counter_values::window_counters(window);
        counter_values::add(&mut self.of_windows, &of_window);
        counters.extend(of_window);
        if let Some((take, began)) = &mut self.take {
            let began = std::mem::replace(began, ended);
            let processor = &self.processor;
            take(ClosedWindow {
                processor,
                window,
                counters,
                began,
                ended,
                ended_wall,
                rates,
                is_last,
            });
        }
    }

    fn own_counters(&self) -> Vec<(String, u64)> {
        let mut counters = counter_values::daemon_counters(&self.processor);
        let lost = self.rules.as_ref().map_or(0, RuleCache::refused)
            + self.spans.as_ref().map_or(0, SpanMap::refused);
        counters.push(("lessons_lost".to_owned(), lost));
        counters
    }

    fn say(&self, what: impl FnOnce(&mut RecordingState)) {
        what(&mut self.said.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn finish(mut self, RecordingEnd { totals, mut counters }: RecordingEnd) -> RecordingResult {
        self.named();
        let KernelTotals { at, wall, rates, threads, counters: kernel, incidents, .. } = totals;
        self.processor.incident_totals.count(&incidents);
        let window = self.processor.close(at, &threads);
        let mut all = kernel;
        all.append(&mut counters);
        self.hand_on(&window, WindowTotals { at, wall, rates, counters: all.clone() }, true);
        all.extend(self.own_counters());
        all.extend(counter_values::window_counters(&window));
        RecordingResult { processor: self.processor, window, counters: all, ended: at }
    }
}

/// Asks shims; a name that finds no room is asked for again at the end, and a shim that is not told
/// that it was heard waits its time.
fn ask(commands: &CommandSender, questions: Questions) {
    if !questions.is_empty() {
        match commands.try_send(CollectorCommand::Ask(questions)) {
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}
