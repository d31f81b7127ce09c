//! A recording: its two threads, from start to end.

use crate::backlog::EventBacklog;
use crate::collector::EventCollector;
use crate::commands::{self, CollectorCommand, CommandSender};
use crate::handle::RecordingHandle;
use crate::heartbeat::{Heartbeat, HeartbeatMonitor};
use crate::mailbox::ProcessorMailbox;
use crate::probe_tables::ProbeTables;
use crate::processor::Processor;
use crate::processor_thread::{ProcessorThread, RecordingResult, TakeWindow, WindowReceiver};
use crate::read_names::NameReader;
use perfusion_dotnet::thread_list::RuntimeThreadLists;
use perfusion_host::pods::Pods;
use perfusion_host::process::ProcessTable;
use perfusion_sources::SourceRates;
use perfusion_sources::kernel::KernelSource;
use perfusion_sources::shim::ShimSource;
use perfusion_symbolize::SymbolNews;
use perfusion_symbolize::kernel::{ReadAhead, WakeSites};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Batches on their way to the processor.
const BATCHES: usize = 256;
/// Commands on their way to the collector, which takes all of them every round.
const COMMANDS: usize = 1_024;
/// How long shims are given to leave at the end of a recording that somebody waits for.
const LEAVE_SOON: Duration = Duration::from_millis(500);

/// One recording in progress.
pub struct Recording {
    collector: JoinHandle<()>,
    processor: JoinHandle<Option<RecordingResult>>,
    commands: CommandSender,
    mailbox: Arc<ProcessorMailbox>,
    monitors: HeartbeatMonitors,
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

/// What a recording needs that goes on from window to window.
pub struct WindowOptions {
    /// Tells pods' services.
    pub pods: Arc<Pods>,
    /// Bytes that the stacks of a window may take ([`Recording::allow_stacks`]).
    pub stacks: u64,
    /// What others tell of native symbols.
    pub symbols: Arc<SymbolNews>,
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
        processor.symbolizer.follow(windows.symbols);
        let receiver = WindowReceiver { take: windows.take, began };
        Self::spawn(kernel, shims, processor, Some(receiver))
    }

    fn spawn(
        mut kernel: KernelSource,
        shims: ShimSource,
        processor: Processor,
        windows: Option<WindowReceiver>,
    ) -> io::Result<Self> {
        let shims = shims.with_thread_lists(Box::new(RuntimeThreadLists));
        let probes = ProbeTables::take(&mut kernel);
        let mut processor =
            processor.with_waker_stacks(kernel.has_waker_stacks()).with_spans(kernel.has_spans());
        processor = processor.with_lines(shims.has_il_maps());
        processor.expect(shims.limits());
        if !probes.have_rules() {
            processor.processes.push_no_rules();
        }
        read_symbols(&mut processor, windows.is_none())?;

        let backlog = EventBacklog::of_ring(kernel.ring_bytes());
        let (batches, from_collector) = sync_channel(BATCHES);
        let (commands, obeyed) = commands::channel(COMMANDS)?;
        let (of_processor, of_collector) = (Heartbeat::default(), Heartbeat::default());
        let monitors =
            HeartbeatMonitors { processor: of_processor.watch(), collector: of_collector.watch() };
        let mut collector =
            EventCollector::new(kernel, shims, backlog.clone(), batches, obeyed, of_collector);
        if windows.is_none() {
            collector = collector.leaving_within(LEAVE_SOON);
        }
        let mailbox = Arc::new(ProcessorMailbox::default());
        let processor = ProcessorThread::new(
            processor,
            (probes, NameReader::start()?),
            backlog,
            commands.clone(),
            Arc::clone(&mailbox),
            of_processor,
            windows,
        );
        Ok(Self {
            collector: std::thread::Builder::new()
                .name("collector".into())
                .spawn(move || collector.run())?,
            processor: std::thread::Builder::new()
                .name("processor".into())
                .spawn(move || processor.run(&from_collector))?,
            commands,
            mailbox,
            monitors,
        })
    }

    /// A handle for those who load shims or want to know how it goes.
    #[must_use]
    pub fn watcher(&self) -> RecordingHandle {
        RecordingHandle { commands: self.commands.clone(), mailbox: Arc::clone(&self.mailbox) }
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
            processor: self.monitors.processor.again(),
            collector: self.monitors.collector.again(),
        }
    }

    /// Which of its threads has not moved for a minute. To be asked now and then.
    #[must_use]
    pub fn hanging(&mut self) -> Option<&'static str> {
        self.monitors.hanging(Instant::now())
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
        self.mailbox.request_stacks(bytes);
    }

    /// How much of that the window in progress has taken, a moment ago: 1 is all of it, and more
    /// where more was allowed before.
    #[must_use]
    pub fn stacks_fill(&self) -> f64 {
        self.mailbox.stacks_fill()
    }

    /// Memory is short: what is only remembered to be quick is dropped, between two batches.
    pub fn shed(&self) {
        self.mailbox.request_shed();
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

/// Reads the kernel's symbols on a thread of their own. That takes 50 ms, in which a program that
/// ends soon could be asked for no names. `ahead`: also reads the names that samples will need.
fn read_symbols(processor: &mut Processor, ahead: bool) -> io::Result<()> {
    let wake_sites = processor.wake_sites();
    let read_names = ahead.then(|| {
        let (ahead, read_names) = ReadAhead::new();
        processor.symbolizer.read_ahead(ahead);
        read_names
    });
    let read = move || {
        wake_sites.get_or_init(WakeSites::read);
        if let Some(read_names) = read_names {
            read_names();
        }
    };
    std::thread::Builder::new().name("symbols".into()).spawn(read)?;
    Ok(())
}
