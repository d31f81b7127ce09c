//! The processor's thread: events in, windows out.

use crate::backlog::EventBacklog;
use crate::collector::{CollectorBatch, KernelTotals};
use crate::commands::{CollectorCommand, CommandSender};
use crate::counter_values;
use crate::heartbeat::Heartbeat;
use crate::last_names::LastNames;
use crate::mailbox::{ProcessorMailbox, ProcessorRequests};
use crate::probe_tables::ProbeTables;
use crate::processor::{Processor, Questions, WindowEstimates};
use crate::read_names::NameReader;
use crate::trim;
use perfusion_aggregate::window::Window;
use perfusion_model::event::{Event, MonotonicNs, ThreadSnapshot};
use perfusion_sources::SourceRates;
use perfusion_sources::kernel::threads::ThreadScan;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TrySendError};
use std::time::{Duration, Instant, SystemTime};

/// How long the processor waits for a batch.
const PAUSE: Duration = Duration::from_millis(100);
/// How long it waits for a batch while names are waited for.
const SHORT_PAUSE: Duration = Duration::from_millis(20);
/// How long the shims are given for the last names of a window.
const LAST_NAMES: Duration = Duration::from_secs(2);
/// A question whose answer did not come is asked again after this.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// How often free memory is given back.
const TRIM_EVERY: Duration = Duration::from_secs(10);
/// How often the processor publishes its counters.
const PUBLISH_COUNTERS_EVERY: Duration = Duration::from_secs(1);
/// How often it publishes which processes run a CLR, and how full the window is. Whoever loads
/// shims waits for the former; a full window may have to end.
const PUBLISH_EVERY: Duration = Duration::from_millis(250);

/// A window that is over and has its names.
pub struct ClosedWindow<'a> {
    /// Stacks, names and the process table.
    pub processor: &'a Processor,
    /// The values.
    pub window: &'a Window,
    /// All counters of all stages since the recording began: name and value.
    pub counters: Vec<(String, u64)>,
    /// When it began.
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

impl RecordingResult {
    /// Looks up names that were forgotten or are missing, and counts anew what has none.
    pub fn name_again(&mut self) {
        let Processor { symbolizer, processes, .. } = &mut self.processor;
        symbolizer.resolve(self.window.frames(), processes);
        let counted = symbolizer.counters();
        self.counters.retain(|(name, _)| {
            !name.starts_with("symbolize_") && counted.iter().all(|(known, _)| known != name)
        });
        self.counters.extend(counted.into_iter().map(|(name, count)| (name.to_owned(), count)));
    }
}

/// A window that waits for its last names.
struct UnnamedWindow {
    estimates: WindowEstimates,
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

/// Who takes windows, and when the one in progress began.
pub(crate) struct WindowReceiver {
    pub(crate) take: TakeWindow,
    pub(crate) began: MonotonicNs,
}

/// Something that is done now and then.
struct Timer {
    every: Duration,
    last: Instant,
}

impl Timer {
    fn new(every: Duration) -> Self {
        Self { every, last: Instant::now() }
    }

    fn is_due(&self) -> bool {
        self.last.elapsed() > self.every
    }

    fn restart(&mut self) {
        self.last = Instant::now();
    }
}

/// What the thread does now and then.
struct Timers {
    trim: Timer,
    publish_counters: Timer,
    publish: Timer,
    ask_again: Timer,
}

/// State of the thread.
pub(crate) struct ProcessorThread {
    processor: Processor,
    probes: ProbeTables,
    reader: NameReader,
    backlog: EventBacklog,
    commands: CommandSender,
    mailbox: Arc<ProcessorMailbox>,
    heartbeat: Heartbeat,
    windows: Option<WindowReceiver>,
    timers: Timers,
    announced: Option<WindowTotals>,
    unnamed: Option<UnnamedWindow>,
    /// What windows could not keep apart, all of them together.
    window_counters: Vec<(String, u64)>,
    /// The kernel's last word.
    closed: Option<KernelTotals<Vec<ThreadSnapshot>>>,
    /// The last names are waited for.
    last_names: Option<LastNames>,
}

impl ProcessorThread {
    /// Joins the processor to the others. Without `windows` the recording has only one window.
    pub(crate) fn new(
        processor: Processor,
        (probes, reader): (ProbeTables, NameReader),
        backlog: EventBacklog,
        commands: CommandSender,
        mailbox: Arc<ProcessorMailbox>,
        heartbeat: Heartbeat,
        windows: Option<WindowReceiver>,
    ) -> Self {
        Self {
            processor,
            probes,
            reader,
            backlog,
            commands,
            mailbox,
            heartbeat,
            windows,
            timers: Timers {
                trim: Timer::new(TRIM_EVERY),
                publish_counters: Timer::new(PUBLISH_COUNTERS_EVERY),
                publish: Timer::new(PUBLISH_EVERY),
                ask_again: Timer::new(ASK_AGAIN),
            },
            announced: None,
            unnamed: None,
            window_counters: Vec::new(),
            closed: None,
            last_names: None,
        }
    }

    /// Works until nothing more comes; `None` when the collector failed.
    pub(crate) fn run(mut self, batches: &Receiver<CollectorBatch>) -> Option<RecordingResult> {
        loop {
            self.heartbeat.beat();
            match batches.recv_timeout(self.pause()) {
                Ok(CollectorBatch::Events(events, bytes)) => self.process(events, bytes),
                Ok(CollectorBatch::Cut(totals)) => self.announce_cut(totals),
                Ok(CollectorBatch::CutReached) => self.cut(),
                Ok(CollectorBatch::KernelClosed(totals)) => self.close_kernel(totals),
                Ok(CollectorBatch::End { counters }) => return self.finish(counters),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
            self.give_back_memory();
            self.answer_requests();
            self.publish();
            self.processor.learn_read(self.reader.take());
            self.await_names();
        }
    }

    fn pause(&self) -> Duration {
        let awaits_names = self.last_names.is_some() || self.unnamed.is_some();
        if awaits_names { SHORT_PAUSE } else { PAUSE }
    }

    /// Takes events up to the values, and tells the probes and the shims what follows from them.
    fn process(&mut self, events: Vec<Event>, bytes: usize) {
        for event in events {
            self.processor.event(event);
            self.heartbeat.beat();
        }
        self.backlog.take(bytes);
        self.probes.push(&mut self.processor);
        let questions = self.processor.take_questions();
        self.ask(questions);
    }

    /// Asks shims, and has the names read that no shim tells. A name that finds no room is asked
    /// for again at the end, and a shim that is not told that it was heard waits its time.
    fn ask(&mut self, questions: Questions) {
        self.reader.want(self.processor.unread(&questions));
        if !questions.is_empty() {
            match self.commands.try_send(CollectorCommand::Ask(questions)) {
                Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
            }
        }
    }

    /// A window ends. What went unseen of its threads is asked for here: it takes its time, and the
    /// rings must not wait.
    fn announce_cut(&mut self, totals: KernelTotals<ThreadScan>) {
        let KernelTotals { at, wall, rates, threads, mut counters, runtime_events, .. } = totals;
        self.processor.count_runtime_events(&runtime_events);
        let confirmed = self.probes.confirm(&threads, &mut counters);
        self.processor.begin_cut(at, confirmed.threads);
        for end in confirmed.ends {
            self.processor.event(end);
        }
        self.announced = Some(WindowTotals { at, wall, rates, counters });
    }

    /// All of the announced window is here.
    fn cut(&mut self) {
        // One that still waits for names has waited for a whole window.
        self.hand_on_unnamed();
        self.ask(self.processor.withheld().into());
        if let (Some(estimates), Some(totals)) = (self.processor.end_cut(), self.announced.take()) {
            let until = Instant::now() + LAST_NAMES;
            self.unnamed = Some(UnnamedWindow { estimates, totals, until });
        }
    }

    /// The kernel tells nothing more: from here on only names are waited for.
    fn close_kernel(&mut self, totals: KernelTotals<Vec<ThreadSnapshot>>) {
        self.processor.close_at(totals.at);
        self.processor.still_there(&totals.threads, totals.before);
        let questions = self.processor.take_questions();
        self.ask(questions);
        self.ask(self.processor.withheld().into());
        self.closed = Some(totals);
        self.last_names = Some(LastNames::begin(LAST_NAMES));
        tracing::debug!("the kernel is closed");
    }

    fn give_back_memory(&mut self) {
        if self.timers.trim.is_due() {
            self.timers.trim.restart();
            trim::give_back();
        }
    }

    /// Does what was asked for between two batches.
    fn answer_requests(&mut self) {
        let ProcessorRequests { shed, stacks, standings, names } = self.mailbox.take_requests();
        if shed {
            self.processor.shed();
        }
        if let Some(bytes) = stacks {
            self.processor.allow_stacks(bytes);
        }
        for (pid, names) in names {
            self.processor.ask_for_names(pid, names);
        }
        for answer in standings {
            // Fails only when nobody waits for the answer any more.
            answer.try_send(self.processor.standings()).ok();
        }
    }

    /// Publishes how the recording stands.
    fn publish(&mut self) {
        if self.windows.is_some() && self.timers.publish_counters.is_due() {
            self.timers.publish_counters.restart();
            let counters = [self.own_counters(), self.window_counters.clone()].concat();
            self.mailbox.publish_counters(counters);
        }
        if self.timers.publish.is_due() {
            self.timers.publish.restart();
            let managed = self.processor.managed();
            self.mailbox.publish(managed, self.processor.stacks_fill());
        }
    }

    /// Hands on what waits for names when they are here or their time is over. A question may find
    /// no shim yet, or no room; while its code was just seen running it may be repeated.
    fn await_names(&mut self) {
        let repeat = self.timers.ask_again.is_due();
        if !repeat && self.last_names.is_none() {
            return;
        }
        let open = self.processor.unanswered(MonotonicNs::now());
        let are_read = self.reader.pending() == 0;
        let is_over =
            |window: &UnnamedWindow| open.is_empty() && are_read || Instant::now() >= window.until;
        if self.unnamed.as_ref().is_some_and(is_over) {
            self.hand_on_unnamed();
        }
        let is_over = |names: &mut LastNames| names.is_late() || are_read && names.is_over(&open);
        if self.last_names.as_mut().is_some_and(is_over) {
            tracing::debug!(unanswered = open.len(), "the last names are here");
            // Fails only when the collector is gone, and then the channel ends.
            self.commands.send(CollectorCommand::Finish).ok();
            self.last_names = None;
            // While the shims leave, which takes runtimes a third of a second.
            self.processor.name_early();
        } else if repeat {
            self.timers.ask_again.restart();
            self.ask(open.into());
        }
    }

    /// Hands on the window that waits for names, if there is one, with those it has.
    fn hand_on_unnamed(&mut self) {
        let Some(UnnamedWindow { estimates, totals, .. }) = self.unnamed.take() else { return };
        let (window, liveness) = self.processor.window(estimates);
        self.hand_on(&window, totals, false);
        self.processor.forget(&liveness);
    }

    fn hand_on(&mut self, window: &Window, totals: WindowTotals, is_last: bool) {
        let WindowTotals { at: ended, wall: ended_wall, rates, mut counters } = totals;
        counters.extend(self.own_counters());
        let of_window = counter_values::window_counters(window);
        counter_values::add(&mut self.window_counters, &of_window);
        counters.extend(of_window);
        if let Some(windows) = &mut self.windows {
            let began = std::mem::replace(&mut windows.began, ended);
            let processor = &self.processor;
            (windows.take)(ClosedWindow {
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
        counters.push(("rules_lost".to_owned(), self.probes.refused()));
        let read = self.reader.counters().list();
        counters.extend(read.map(|(name, count)| (name.to_owned(), count)));
        counters
    }

    /// Nothing more comes; `None` when the kernel was never closed.
    fn finish(mut self, mut counters: Vec<(String, u64)>) -> Option<RecordingResult> {
        let totals = self.closed.take()?;
        self.hand_on_unnamed();
        let KernelTotals { at, wall, rates, threads, counters: kernel, runtime_events, .. } =
            totals;
        self.processor.count_runtime_events(&runtime_events);
        let window = self.processor.close(at, &threads);
        let mut all = kernel;
        all.append(&mut counters);
        self.hand_on(&window, WindowTotals { at, wall, rates, counters: all.clone() }, true);
        all.extend(self.own_counters());
        all.extend(counter_values::window_counters(&window));
        Some(RecordingResult { processor: self.processor, window, counters: all, ended: at })
    }
}
