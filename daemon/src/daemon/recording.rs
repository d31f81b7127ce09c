//! A recording of the daemon, from its start to its end: what records, what attaches, and what it
//! costs meanwhile.

use super::attacher::{AttachHistory, Attacher};
use super::cost::count_probes;
use super::memory_budget::{self, MemoryBudget, Relief};
use super::mode::ResourceMode;
use super::rate_controller::CpuRateController;
use super::sinks::WindowSender;
use super::state::DaemonState;
use super::windows::WindowEncoder;
use crate::config::RecordingConfig as What;
use crate::error::Error;
use perfusion_host::process::ProcessTable;
use perfusion_recorder::{Recording, RecordingHandle, WindowOptions, trim};
use perfusion_sources::kernel::{self, KernelOptions, KernelSelection, KernelSource};
use perfusion_sources::shim::{ShimSettings, ShimSource};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

/// Starts recordings, one after the other. What they have in common outlives each.
pub(super) struct RecordingStarter {
    state: Arc<DaemonState>,
    settings: ShimSettings,
    /// What attaches of all recordings came to.
    attaches: AttachHistory,
}

impl RecordingStarter {
    pub(super) fn new(state: Arc<DaemonState>, settings: ShimSettings) -> Self {
        Self { state, settings, attaches: AttachHistory::default() }
    }

    /// Begins to record `what`; profiles go to `out`.
    ///
    /// # Errors
    /// When the kernel refuses it, or there is no thread for it.
    pub(super) fn start(
        &mut self,
        what: &What,
        selection: KernelSelection,
        out: WindowSender,
    ) -> Result<ActiveRecording, Error> {
        let (state, mode) = (&self.state, self.state.mode());
        let kernel = KernelSource::start(&kernel_options(what, &mode, selection))?;
        state.rates.set(what.frequency, 0);
        state.set_remarks(mode.remarks(&state.config().recording));
        state.cost.look_at_memory(true);
        state.cost.recording_begins();
        let rates = CpuRateController::begin(Instant::now(), state.cost.spent());
        state.counters.recordings.add(1);
        state.symbols.news.look_in(state.config().symbols.places());
        let mut encoder = WindowEncoder::new(Arc::clone(state), out);
        self.settings = self.settings.subscribing(what.subscriptions());
        let shims = ShimSource::new(self.settings.owner, what.limits());
        let windows = WindowOptions {
            pods: Arc::clone(&state.pods),
            stacks: memory_budget::for_stacks(mode.memory),
            symbols: Arc::clone(&state.symbols.news),
            take: Box::new(move |over| encoder.take(over)),
        };
        let recording = Recording::start_windows(kernel, shims, ProcessTable::new(), windows)
            .map_err(Error::internal("starting a thread"))?;
        let watcher = recording.watcher();
        state.recording.begun(watcher.clone());
        let mut active = ActiveRecording {
            state: Arc::clone(state),
            recording,
            attacher: None,
            watcher,
            rates,
            budget: MemoryBudget::default(),
            counting: None,
        };
        // A shim whose region cannot be opened would only be a burden to its process.
        if kernel::features::mapped_files().is_ok() {
            let (state, memory) = (Arc::clone(state), self.attaches.clone());
            match Attacher::start(state, active.watcher.clone(), self.settings, memory) {
                Ok(attacher) => active.attacher = Some(attacher),
                Err(source) => {
                    active.end()?;
                    return Err(Error::internal("starting a thread")(source));
                }
            }
        }
        Ok(active)
    }
}

/// A recording in progress.
pub(super) struct ActiveRecording {
    state: Arc<DaemonState>,
    recording: Recording,
    attacher: Option<Attacher>,
    watcher: RecordingHandle,
    /// The rates of the next window.
    rates: CpuRateController,
    budget: MemoryBudget,
    /// The kernel counts the probes' run time as long as this is open.
    counting: Option<OwnedFd>,
}

impl ActiveRecording {
    /// What records.
    pub(super) fn recording(&self) -> &Recording {
        &self.recording
    }

    /// The thread of the recording that has not moved for a minute, if there is one.
    pub(super) fn hanging(&mut self) -> Option<&'static str> {
        self.recording.hanging()
    }

    /// What the rates of the next window are chosen by.
    pub(super) fn rates(&mut self) -> &mut CpuRateController {
        &mut self.rates
    }

    /// Ends the window in progress; the next one is recorded at the rates now due.
    pub(super) fn cut(&self) {
        let config = self.state.config();
        let what = self.state.mode().recording(&config.recording);
        let rates = self.rates.rates(what.rates());
        self.recording.cut(Some(rates));
        self.state.rates.set(rates.kernel.frequency_hz, self.rates.steps());
    }

    /// Looks at what the recording costs where that is due; false when it does not answer.
    pub(super) fn look_at_cost(&mut self, now: Instant) -> bool {
        let cost = &self.state.cost;
        if !cost.wants_look(now) {
            return true;
        }
        let Some(look) = self.watcher.look() else { return false };
        let known = cost.probes_cpu().is_some();
        self.counting = if cost.observe(&look, now) { count_probes() } else { None };
        if known && cost.probes_cpu().is_none() {
            tracing::warn!(
                "the probes' CPU time is not known, and not part of limits.cpu: {}",
                kernel::features::PROBES_COUNTED
            );
        }
        cost.look_at_memory(true);
        true
    }

    /// Has caches dropped, or the window ended, when there is too much memory.
    pub(super) fn look_at_memory(&mut self, now: Instant) {
        let (memory, bound) = (self.state.cost.look_at_memory(false), self.state.mode().memory);
        let fill = self.recording.stacks_fill();
        let relief = self.budget.look(now, memory.total(), bound, fill);
        if relief.is_some() {
            tracing::warn!(
                ?relief,
                "{} MiB of memory, of {}: {} resident, {} of maps, {} of rings; the window's \
                 stacks take {:.0} % of their room",
                memory.total() >> 20,
                bound >> 20,
                memory.resident >> 20,
                memory.maps >> 20,
                memory.rings >> 20,
                100.0 * fill
            );
        }
        match relief {
            None => {}
            Some(Relief::Shed) => {
                self.state.counters.memory_shed.add(1);
                self.recording.shed();
            }
            Some(Relief::Cut) => {
                self.state.counters.memory_cuts.add(1);
                self.rates.slower();
                self.cut();
            }
        }
    }

    /// Ends it; its last window goes to the sinks.
    ///
    /// # Errors
    /// When a thread of the recording has panicked.
    pub(super) fn end(self) -> Result<(), Error> {
        self.state.recording.ended();
        if let Some(attacher) = self.attacher {
            attacher.stop();
        }
        drop(self.watcher);
        // Its programs go, and with them what they cost.
        drop(self.counting);
        self.state.cost.recording_ended(Instant::now());
        let ended = self.recording.stop().map(drop).ok_or(Error::Failed);
        // What it held lies scattered between what stays.
        trim::give_back();
        ended
    }
}

fn kernel_options(what: &What, mode: &ResourceMode, selection: KernelSelection) -> KernelOptions {
    let (max_threads, max_places) = mode.tables();
    let bytes = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
    KernelOptions {
        frequency_hz: what.frequency,
        selection,
        stack_copy_bytes: bytes(what.stack_copy.0),
        wait_stack_budget_bytes_per_s: what.wait_stacks.0,
        waker_stacks: what.waker_stacks,
        spans: what.spans,
        ring_bytes: bytes(what.ring.0),
        max_threads,
        max_places,
        ..KernelOptions::default()
    }
}
