//! Joins the stages: the only folder that knows all of them. [`Recording`] owns the two threads of one recording; see
//! docs/architecture.md for why there are two.

mod asked;
pub mod backlog;
pub mod collector;
mod former;
pub mod loss;
pub mod names;
pub mod processor;

use crate::aggregate::window::Window;
use crate::process::ProcessTable;
use crate::source::MonotonicNs;
use crate::source::kernel::KernelSource;
use crate::source::kernel::rules::RuleCache;
use crate::source::shim::ShimSource;
use backlog::Backlog;
use collector::{Batch, Collector, Command, KernelTotals};
use processor::{Closing, Processor};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Batches on their way to the processor.
const BATCHES: usize = 256;
/// Commands on their way to the collector, which takes all of them every round.
const COMMANDS: usize = 1_024;
/// How long the shims are given for the last names.
const LAST_NAMES: Duration = Duration::from_secs(2);
/// A question whose answer did not come is asked again after this.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// One recording in progress.
pub struct Recording {
    collector: JoinHandle<()>,
    processor: JoinHandle<Option<Recorded>>,
    commands: SyncSender<Command>,
}

/// A recording that has ended.
pub struct Recorded {
    /// Stacks, names and the process table.
    pub processor: Processor,
    /// The values.
    pub window: Window,
    /// All counters of all stages: name and value.
    pub counters: Vec<(String, u64)>,
    /// When the kernel source was frozen.
    pub ended: MonotonicNs,
}

/// Lets other threads tell the collector of processes that a shim was loaded into.
#[derive(Clone)]
pub struct Watcher(SyncSender<Command>);

impl Watcher {
    /// A shim was loaded into `pid`.
    pub fn watch(&self, pid: u32) {
        // Fails only when the recording is over.
        self.0.send(Command::Watch(pid)).ok();
    }
}

impl Recording {
    /// Starts both threads.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn start(mut kernel: KernelSource, shims: ShimSource, processes: ProcessTable) -> io::Result<Self> {
        let rules = kernel.take_rules();
        let backlog = Backlog::default();
        let (batches, from_collector) = sync_channel(BATCHES);
        let (commands, obeyed) = sync_channel(COMMANDS);
        let collector = Collector::new(kernel, shims, backlog.clone(), batches, obeyed);
        let asking = commands.clone();
        Ok(Self {
            collector: std::thread::Builder::new().name("collector".into()).spawn(move || collector.run())?,
            processor: std::thread::Builder::new().name("processor".into()).spawn(move || {
                process(&from_collector, &backlog, &asking, Processor::new(processes), rules)
            })?,
            commands,
        })
    }

    /// A handle for those who load shims.
    #[must_use]
    pub fn watcher(&self) -> Watcher {
        Watcher(self.commands.clone())
    }

    /// True while both threads run; they end early only by a fault of this program.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.collector.is_finished() && !self.processor.is_finished()
    }

    /// Ends the recording as far as the kernel goes: from here on only names are waited for.
    pub fn close(&self) {
        // Fails only when the collector has failed, which `stop` reports.
        self.commands.send(Command::CloseKernel).ok();
    }

    /// Ends the recording and waits for the last names and the result; `None` when a thread has failed, and with it the truth.
    #[must_use]
    pub fn stop(self) -> Option<Recorded> {
        self.close();
        drop(self.commands);
        let recorded = self.processor.join().ok();
        self.collector.join().ok()?;
        recorded.flatten()
    }
}

fn process(
    batches: &Receiver<Batch>,
    backlog: &Backlog,
    commands: &SyncSender<Command>,
    mut processor: Processor,
    mut rules: Option<RuleCache>,
) -> Option<Recorded> {
    let mut totals: Option<KernelTotals> = None;
    let mut deadline = None;
    let mut asked = Instant::now();
    let mut counters = Vec::new();
    loop {
        match batches.recv_timeout(Duration::from_millis(20)) {
            Ok(Batch::Events(events, bytes)) => {
                for event in events {
                    processor.event(event);
                }
                backlog.take(bytes);
                let lessons = processor.processes.take_lessons();
                if let Some(rules) = &mut rules {
                    rules.teach(lessons);
                }
                ask(commands, processor.take_requests());
            }
            Ok(Batch::KernelClosed(closed)) => {
                processor.close_at(closed.at);
                totals = Some(closed);
                deadline = Some(Instant::now() + LAST_NAMES);
            }
            Ok(Batch::End { counters: last }) => {
                counters = last;
                break;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        // A question may find no shim yet, or no room; while its code was just seen running it may be repeated.
        let repeat = asked.elapsed() > ASK_AGAIN;
        if repeat || deadline.is_some() {
            let open = processor.unanswered(MonotonicNs::now());
            if deadline.is_some_and(|until| open.is_empty() || Instant::now() >= until) {
                // Fails only when the collector is gone, and then the channel ends.
                commands.send(Command::Finish).ok();
                deadline = None;
            } else if repeat {
                asked = Instant::now();
                ask(commands, open);
            }
        }
    }
    let KernelTotals { at, threads, counters: kernel } = totals?;
    let window = processor.close(Closing { now: at, detailed: true }, &threads);
    let mut all = kernel;
    all.append(&mut counters);
    all.extend(loss::daemon_counters(&processor, &window));
    all.push(("lessons_lost".to_owned(), rules.map_or(0, |rules| rules.refused())));
    Some(Recorded { processor, window, counters: all, ended: at })
}

/// Asks for names; a question that finds no room is asked again at the end.
fn ask(commands: &SyncSender<Command>, requests: Vec<processor::NameRequest>) {
    if !requests.is_empty() {
        match commands.try_send(Command::Ask(requests)) {
            Ok(()) | Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {}
        }
    }
}
