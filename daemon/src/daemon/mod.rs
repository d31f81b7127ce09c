//! `perfusion daemon`: the pipeline of `record`, from window to window, for as long as it is
//! wanted.
//!
//! This thread only looks at clocks, signals and files: the work is the collector's, the
//! processor's and the sinks' threads.

pub mod attach_coverage;
mod attach_report;
pub mod attacher;
mod backlog_trend;
pub mod cgroup_limits;
pub mod control;
pub mod cost;
mod end_losses;
mod endpoints;
pub mod families;
pub mod http;
mod liveness;
mod lock;
mod log;
pub mod memory_budget;
pub mod metrics;
pub mod mode;
mod nonblocking_writer;
pub mod notify;
pub mod pipeline;
pub mod processes;
pub mod queue;
pub mod rate_controller;
mod rates;
mod recording;
mod recording_watch;
mod reload;
pub mod retry;
pub mod schedule;
mod selector;
mod signals;
mod sink_control;
pub mod sink_worker;
pub mod sinks;
pub mod state;
mod stop;
pub mod switch;
pub mod symbol_requests;
mod window_timer;
pub mod windows;

use crate::cli::ConfigSourceArgs;
use crate::config::load::ValueSources;
use crate::config::{Config, RecordingConfig as What};
use crate::error::Error;
use crate::kubernetes::KubernetesConfig;
use crate::select::SelectionConfig as Selected;
use endpoints::Endpoints;
use liveness::Liveness;
use log::DaemonLog;
use mode::HostLimits;
use perfusion_dotnet::attach;
use perfusion_dotnet::attach::helper::{self, Helper};
use perfusion_host::priority;
use perfusion_host::system_limits::raise_open_files;
use perfusion_recorder::trim;
use perfusion_sources::kernel::{KernelError, features};
use perfusion_sources::shim::ShimSettings;
use recording::{ActiveRecording, RecordingStarter};
use retry::{Retry, RetryStep};
use selector::Selector;
use signals::{SignalEvent, Signals};
use sink_control::SinkControl;
use state::DaemonState;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switch::Switch;
use window_timer::WindowTimer;

/// How often clocks and files are looked at, at least.
const LOOK: Duration = Duration::from_secs(1);

/// Runs until it is told to end. `logs_at` is the level of its log, where a flag says so.
///
/// # Errors
/// See [`Error`]. What goes wrong while it runs is logged and does not end it, unless a recording
/// in progress fails.
pub fn daemon(sources: &ConfigSourceArgs, logs_at: Option<&str>) -> Result<u8, Error> {
    let mut sources = sources.sources();
    // Before all others: who says both means the longer one.
    sources.flags.splice(0..0, logs_at.map(|level| format!("log.level={level}")));
    let loaded = sources.load()?;
    let log = log::start(&loaded.config.log, sources.flags_say("log.level"));
    loaded.warn();
    let ended = run(sources, loaded.config, &log);
    Ok(log.end(ended))
}

fn run(sources: ValueSources, config: Config, log: &DaemonLog) -> Result<u8, Error> {
    if config.limits.lower_priority {
        // The helper and all threads have it from who makes them, and there is only this one yet.
        priority::step_back();
    }
    trim::prepare();
    // Before there is any other thread: each would have the capability for itself.
    let helper = helper::start().map_err(Error::internal("starting the helper that attaches"))?;
    log.write().map_err(Error::internal("starting a thread"))?;
    let mut signals = Signals::listen(log.clone())?;
    let lock = config.limits.kill_switch.parent();
    let _lock = lock.map(lock::hold).transpose()?;
    let mut daemon = Daemon::start(sources, config, helper, log)?;
    let told = daemon.until_told(&mut signals);
    log.begin_anew();
    daemon.liveness.manager().stopping();
    daemon.stop(*told.as_ref().unwrap_or(&Instant::now()))?;
    told.map(|_| 0)
}

/// What of a configuration says what is recorded, and of whom.
#[derive(Clone, Debug, PartialEq)]
struct RecordingRequest {
    recording: What,
    selection: Selected,
    kubernetes: KubernetesConfig,
}

impl RecordingRequest {
    fn of(config: &Config) -> Self {
        Self {
            recording: config.recording.clone(),
            selection: config.selection.clone(),
            kubernetes: config.kubernetes.clone(),
        }
    }
}

/// The daemon at work: one recording after the other, as configuration and kill switch say.
struct Daemon {
    sources: ValueSources,
    state: Arc<DaemonState>,
    host: HostLimits,
    selector: Selector,
    sinks: SinkControl,
    endpoints: Endpoints,
    liveness: Liveness,
    window_timer: WindowTimer,
    starter: RecordingStarter,
    recording: Option<ActiveRecording>,
    /// What is done when none can begin.
    retry: Retry<RecordingRequest>,
    /// It has started: from then on a recording that cannot begin does not end it.
    is_ready: bool,
    /// By signal.
    switched_off: bool,
    log: DaemonLog,
}

impl Daemon {
    /// Puts all that is configured to work, the first recording last.
    fn start(
        sources: ValueSources,
        config: Config,
        helper: Option<Helper>,
        log: &DaemonLog,
    ) -> Result<Self, Error> {
        features::check().map_err(KernelError::from)?;
        for limit in
            features::limits(helper::is_used()).into_iter().filter_map(|(_, result)| result.err())
        {
            tracing::warn!(%limit, "limited");
        }
        attach::shim_copy::begin_sweep();
        let settings = ShimSettings::new(config.recording.subscriptions())
            .map_err(|source| Error::internal("random number")(source.into()))?;
        raise_open_files();
        let sinks = SinkControl::start(&config)?;
        let host = HostLimits::read().map_err(KernelError::from)?;
        let mode = host.mode(&config);
        for remark in mode.remarks(&config.recording) {
            tracing::warn!("{remark}");
        }
        let state = Arc::new(DaemonState::new(config, mode));
        let endpoints = Endpoints::start(&state, sinks.sinks())?;
        let mut daemon = Self {
            sources,
            host,
            selector: Selector::new(Arc::clone(&state)),
            sinks,
            endpoints,
            liveness: Liveness::new(Arc::clone(&state), helper),
            window_timer: WindowTimer::begin(Arc::clone(&state)),
            starter: RecordingStarter::new(Arc::clone(&state), settings),
            recording: None,
            retry: Retry::default(),
            is_ready: false,
            switched_off: false,
            log: log.clone(),
            state,
        };
        daemon.selector.follow_pods(&daemon.state.config());
        daemon.follow_switch()?;
        daemon.is_ready = true;
        daemon.liveness.manager().ready(&daemon.status());
        tracing::info!("{}", daemon.what_runs());
        tracing::info!(status = daemon.status(), "ready");
        Ok(daemon)
    }

    /// Goes on until a signal ends it, and returns when that came.
    fn until_told(&mut self, signals: &mut Signals) -> Result<Instant, Error> {
        loop {
            // A little more than what is left, so that the window is over then.
            match signals.wait((self.window_timer.left() + Duration::from_millis(1)).min(LOOK)) {
                SignalEvent::End(at) => {
                    tracing::info!(
                        "told to end: the last window is being written; a second signal gives it \
                         up"
                    );
                    return Ok(at);
                }
                SignalEvent::Reload => self.reload()?,
                SignalEvent::Off => self.switched_off = true,
                SignalEvent::On => self.switched_off = false,
                SignalEvent::Nothing => {}
            }
            self.liveness.beat(self.recording.as_mut());
            self.follow_switch()?;
            if self.window_timer.is_over()
                && let Some(active) = &mut self.recording
            {
                self.window_timer.window_over(active);
            }
            if self.recording.as_ref().is_some_and(|active| !active.recording().is_running()) {
                return Err(Error::Failed);
            }
            self.look();
        }
    }

    /// Of what program and configuration this is, in one line.
    fn what_runs(&self) -> String {
        let config = self.state.config();
        let file = self
            .sources
            .file
            .as_ref()
            .map_or_else(|| "defaults".into(), |file| file.display().to_string());
        let files = config
            .files
            .directory
            .as_ref()
            .map_or_else(|| "none".into(), |path| path.display().to_string());
        let receivers = config.receivers();
        let listen = self.endpoints.address();
        format!(
            "perfusion {}, configuration: {file}; windows of {}, files: {files}, receivers: \
             {receivers}, attach.policy: {}, metrics: {listen}",
            env!("CARGO_PKG_VERSION"),
            config.windows.length,
            config.attach.policy.name(),
        )
    }

    fn status(&self) -> String {
        match (&self.recording, &self.state.mode().reduced) {
            (None, _) => self.state.idle().unwrap_or_else(|| "switched off".to_owned()),
            (Some(_), Some(_)) => "recording in reduced mode: its cgroup allows little".to_owned(),
            (Some(_), None) => "recording".to_owned(),
        }
    }

    /// Begins or ends the recording as the kill switch says.
    fn follow_switch(&mut self) -> Result<(), Error> {
        let config = self.state.config();
        let switch = Switch {
            // A directory was not put there to say so.
            file: config.limits.kill_switch.metadata().is_ok_and(|found| !found.is_dir()),
            signal: self.switched_off,
            config: config.limits.switched_off,
        };
        let before = self.state.set_switch(switch);
        if switch != before
            && let Some(off) = self.state.switched_off()
        {
            tracing::warn!("{off}: nothing is recorded");
        }
        if switch.is_off() {
            self.try_anew();
        }
        match (switch.is_off(), self.recording.take()) {
            (true, Some(active)) => {
                active.end()?;
                self.liveness.manager().ready(&self.status());
            }
            (true, None) if switch != before => self.liveness.manager().ready(&self.status()),
            (false, None) if self.retry.is_due(Instant::now()) => self.begin_or_wait(&config)?,
            (_, recording) => self.recording = recording,
        }
        Ok(())
    }

    /// A recording that could not begin may begin now: it was switched off, or the configuration is
    /// another.
    fn try_anew(&mut self) {
        self.retry.anew();
        self.state.set_failure(None);
    }

    /// Begins a recording; where the host refuses what the configuration asks for, as before, and
    /// where that is refused, too, later. Only a daemon that has not started yet ends by it.
    fn begin_or_wait(&mut self, config: &Config) -> Result<(), Error> {
        let asked = RecordingRequest::of(config);
        let error = match self.begin(config) {
            Ok(active) => {
                self.recording = Some(active);
                self.retry.begun(asked);
                self.state.set_failure(None);
                tracing::info!("a recording begins");
                self.liveness.manager().ready(&self.status());
                return Ok(());
            }
            Err(error) if !self.is_ready => return Err(error),
            Err(error) => error,
        };
        match self.retry.failed(&asked, Instant::now()) {
            RetryStep::As(before) => {
                self.state.counters.reloads_failed.add(1);
                tracing::error!(%error, "what is recorded stays as it was; the rest of the \
                     configuration is the new one");
                self.ask_for(before);
                self.begin_or_wait(&self.state.config())?;
                if self.recording.is_some() {
                    self.liveness.manager().ready(
                        "recording as before: this host refuses what the new configuration \
                             asks for",
                    );
                }
            }
            RetryStep::In(pause) => {
                tracing::error!(%error, "no recording can begin: it is tried again in {pause:?}");
                self.state.set_failure(Some(format!("no recording can begin: {error}")));
                self.liveness.manager().ready(&self.status());
            }
        }
        Ok(())
    }

    /// Puts this in force, with the rest of the configuration as it is.
    fn ask_for(&mut self, asked: RecordingRequest) {
        let RecordingRequest { recording, selection, kubernetes } = asked;
        let config =
            Config { recording, selection, kubernetes, ..Config::clone(&self.state.config()) };
        self.state.set_mode(self.host.mode(&config));
        self.selector.follow_pods(&config);
        self.state.set_config(config);
    }

    /// Begins to record what this configuration asks for.
    fn begin(&mut self, config: &Config) -> Result<ActiveRecording, Error> {
        let what = self.state.mode().recording(&config.recording);
        let rules = self.selector.rules(config);
        let selection = self.selector.for_kernel(config, rules.as_ref(), what.cgroup.as_deref())?;
        self.state.set_selection(rules);
        let active = self.starter.start(&what, selection, self.sinks.sinks().out())?;
        self.window_timer.restart(&config.windows);
        Ok(active)
    }

    /// Looks at how it goes, and says that it lives while it does.
    fn look(&mut self) {
        let now = Instant::now();
        self.sinks.look();
        self.state.counters.log_lines_lost.add(self.log.look(now));
        let is_alive = match &mut self.recording {
            Some(_) if self.liveness.hangs() => false,
            Some(active) => active.look_at_cost(now),
            None => true,
        };
        self.liveness.look_at_helper();
        if let Some(active) = &mut self.recording {
            active.look_at_memory(now);
        }
        self.selector.look(now, self.recording.as_ref().map(ActiveRecording::recording));
        if is_alive {
            self.liveness.tell_manager(now);
        }
    }
}
