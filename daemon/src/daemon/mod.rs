//! `perfusion daemon`: the pipeline of `record`, from window to window, for as long as it is
//! wanted.
//!
//! This thread only looks at clocks, signals and files: the work is the collector's, the
//! processor's and the sinks' threads.

pub mod attach_coverage;
pub mod attacher;
mod backlog_trend;
pub mod cgroup_limits;
pub mod control;
pub mod cost;
mod end_losses;
pub mod families;
pub mod http;
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
pub mod retry;
pub mod schedule;
pub mod sink_worker;
pub mod sinks;
pub mod state;
pub mod switch;
pub mod windows;

use crate::cli::ConfigSourceArgs;
use crate::config::load::ValueSources;
use crate::config::{Config, RecordingConfig as What};
use crate::end_signals::EndSignals;
use crate::error::Error;
use crate::kubernetes::api::PodWatch;
use crate::kubernetes::logs::PodLogs;
use crate::kubernetes::{KubernetesConfig, PodSource};
use crate::select::SelectionConfig as Selected;
use crate::select::cgroups::Cgroups;
use crate::select::cgroups::cgroup_id;
use attacher::{AttachHistory, Attacher};
use cgroup_limits::CgroupLimits;
use control::Control;
use cost::CpuTime;
use http::HttpServer;
use log::DaemonLog;
use memory_budget::{MemoryBudget, Relief};
use mode::ResourceMode;
use notify::Notify;
use perfusion_dotnet::attach;
use perfusion_dotnet::attach::helper::{self, Helper};
use perfusion_host::pods::ShownPodLabels;
use perfusion_host::priority;
use perfusion_host::process::ProcessTable;
use perfusion_host::system_limits::raise_open_files;
use perfusion_recorder::{Recording, RecordingHandle, WindowOptions, trim};
use perfusion_sources::kernel::rule_set::RuleSet;
use perfusion_sources::kernel::{KernelError, KernelOptions, KernelSelection, KernelSource};
use perfusion_sources::shim::ShimSettings;
use perfusion_sources::shim::ShimSource;
use rate_controller::CpuRateController;
use retry::{Retry, RetryStep};
use rustix::fs::{FlockOperation, Mode as FileMode, OFlags, flock, open};
use rustix::io::Errno;
use schedule::Schedule;
use sinks::{END_WITHIN, SinkOpener, Sinks};
use state::DaemonState;
use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime};
use switch::Switch;
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use windows::WindowEncoder;

/// How often clocks and files are looked at, at least.
const LOOK: Duration = Duration::from_secs(1);
/// How often cgroups are looked for, where rules look at them: until then a new one is not
/// recorded.
const SCAN: Duration = Duration::from_secs(2);

/// How long sinks may take to open when the daemon starts, on a host that may just be starting
/// itself.
const FIRST_SINKS_OPEN: Duration = Duration::from_secs(30);
/// The same of those of another configuration: nothing else is looked at meanwhile.
const SINKS_OPEN: Duration = Duration::from_secs(5);
/// A sink that is at one thing for so long is said to be.
const SINK_HANGS: Duration = Duration::from_secs(30);

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
    let helper = helper::part().map_err(internal("starting the helper that attaches"))?;
    log.write().map_err(internal("starting a thread"))?;
    let mut signals = Signals::listen(log.clone())?;
    let lock = config.limits.kill_switch.parent();
    let _lock = lock.map(hold).transpose()?;
    perfusion_sources::kernel::features::check().map_err(KernelError::from)?;
    for limit in
        perfusion_sources::kernel::features::limits(perfusion_dotnet::attach::helper::has_it())
            .into_iter()
            .filter_map(|(_, result)| result.err())
    {
        tracing::warn!(%limit, "limited");
    }
    attach::shim_copy::begin_sweep();
    let settings = ShimSettings::new(config.recording.wishes())
        .map_err(|source| Error::Internal { what: "random number", source: source.into() })?;
    raise_open_files();
    let mut opener = SinkOpener::default();
    let sinks = opener.open(&config, FIRST_SINKS_OPEN)?;
    let sinks = Sinks::start(sinks).map_err(internal("starting a thread"))?;
    let (confines, host_cpus) = (
        CgroupLimits::read(),
        perfusion_host::cpus::online().map_err(KernelError::from)?.len() as f64,
    );
    let mode = ResourceMode::of(&config, &confines, host_cpus);
    for remark in mode.remarks(&config.recording) {
        tracing::warn!("{remark}");
    }
    let state = Arc::new(DaemonState::new(config, mode));
    let server = listen(&state, &sinks)?;
    let control = control(&state, &sinks);
    let mut daemon = Daemon {
        cgroups: Cgroups::default(),
        knowledge: PodNames::None,
        scanned: Instant::now(),
        pods_changed: 0,
        sources,
        settings,
        schedule: Schedule::begin(
            state.config().windows.clone(),
            Instant::now(),
            SystemTime::now(),
        ),
        state,
        opener,
        sinks,
        notify: Notify::from_environment(),
        server,
        control,
        recording: None,
        retry: Retry::default(),
        is_ready: false,
        helper,
        hangs: false,
        told_lowest: false,
        switched_off: false,
        counting: None,
        confines,
        host_cpus,
        pace: CpuRateController::begin(Instant::now(), CpuTime::default()),
        room: MemoryBudget::default(),
        alive_at: Instant::now(),
        attaches: AttachHistory::default(),
        hanging_sinks: BTreeSet::new(),
        log: log.clone(),
    };
    daemon.learn_of_pods(&daemon.state.config());
    daemon.follow_switch()?;
    daemon.is_ready = true;
    daemon.notify.ready(&daemon.status());
    tracing::info!("{}", daemon.what_runs());
    tracing::info!(status = daemon.status(), "ready");
    let told = daemon.until_told(&mut signals);
    log.begin_anew();
    daemon.notify.stopping();
    daemon.stop(*told.as_ref().unwrap_or(&Instant::now()))?;
    told.map(|_| 0)
}

/// The server for metrics and health, if one is configured.
fn listen(state: &Arc<DaemonState>, sinks: &Sinks) -> Result<Option<HttpServer>, Error> {
    let Some(listen) = state.config().telemetry.listen else { return Ok(None) };
    let server = HttpServer::start(listen, Arc::clone(state), sinks.watcher());
    server.map(Some).map_err(|source| Error::Listen { listen, source })
}

/// Listens where the configuration says, if that is elsewhere than before. Where it cannot, all
/// stays as it was, in the configuration as well: so the next reload tries again.
fn listen_anew(
    server: &mut Option<HttpServer>,
    before: &Config,
    state: &Arc<DaemonState>,
    sinks: &Sinks,
) {
    let (old, new) = (before.telemetry.listen, state.config().telemetry.listen);
    if old == new && server.is_some() == new.is_some() {
        return;
    }
    let mut listened = listen(state, sinks);
    // The same port of another address: the old one may be what is in the way.
    if listened.is_err() && old.zip(new).is_some_and(|(old, new)| old.port() == new.port()) {
        *server = None;
        listened = listen(state, sinks);
    }
    match listened {
        Ok(listened) => *server = listened,
        Err(error) => {
            let mut config = Config::clone(&state.config());
            config.telemetry = before.telemetry.clone();
            state.set_config(config);
            if server.is_none() {
                *server = listen(state, sinks).ok().flatten();
            }
            let stays = server
                .as_ref()
                .map_or_else(|| "nowhere".to_owned(), |server| server.address().to_string());
            tracing::error!(%error, "metrics are to be had where they were, at {stays}; the next \
                 reload tries the new address again");
        }
    }
}

/// The control socket. Without it profiles are made all the same.
fn control(state: &Arc<DaemonState>, sinks: &Sinks) -> Option<Control> {
    let path = control::path(&state.config().limits.kill_switch);
    let started = Control::start(path.clone(), Arc::clone(state), sinks.watcher());
    started
        .inspect_err(|error| tracing::warn!(path = %path.display(), %error, "no control socket"))
        .ok()
}

fn internal(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Internal { what, source }
}

/// Holds the file that only one daemon can hold.
fn hold(directory: &Path) -> Result<File, Error> {
    let path = directory.join("daemon.lock");
    let failed = |source| Error::LockFile { path: path.clone(), source };
    DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
    // Where others may write, one may lay a link or a pipe there: what it leads to is not ours to
    // touch.
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut file = match open(&path, flags, FileMode::RUSR | FileMode::WUSR) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP) => {
            return Err(failed(io::Error::other("it is a symbolic link: remove it")));
        }
        Err(error) => return Err(failed(error.into())),
    };
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() || found.nlink() != 1 || found.uid() != rustix::process::geteuid().as_raw()
    {
        return Err(failed(io::Error::other("it is not a file of this daemon's own: remove it")));
    }
    // Whoever may read it could take the lock; one that is there already may be anybody's to read.
    file.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut pid = String::new();
        // Its pid is for people; without it the message is still right.
        (&mut file).take(16).read_to_string(&mut pid).ok();
        return Err(Error::AlreadyRuns { pid: pid.trim().to_owned(), path });
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// What the daemon is told from outside.
struct Signals {
    runtime: Runtime,
    end: UnboundedReceiver<Instant>,
    reload: Signal,
    off: Signal,
    on: Signal,
}

enum SignalEvent {
    /// At this moment.
    End(Instant),
    Reload,
    Off,
    On,
    Nothing,
}

impl Signals {
    fn listen(log: DaemonLog) -> Result<Self, Error> {
        let of_end = EndSignals::listen().map_err(internal("signal handler"))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(internal("tokio runtime"))?;
        let listen = |kind| signal(kind).map_err(internal("signal handler"));
        let inside = runtime.enter();
        let reload = listen(SignalKind::hangup())?;
        let off = listen(SignalKind::user_defined1())?;
        let on = listen(SignalKind::user_defined2())?;
        drop(inside);
        let (tell, end) = unbounded_channel();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || end_when_told_twice(of_end, &tell, &log))
            .map_err(internal("starting a thread"))?;
        Ok(Self { runtime, end, reload, off, on })
    }

    /// Waits for the first of them, not longer than this.
    fn wait(&mut self, at_most: Duration) -> SignalEvent {
        let Self { runtime, end, reload, off, on } = self;
        runtime.block_on(async {
            tokio::select! {
                Some(at) = end.recv() => SignalEvent::End(at),
                _ = reload.recv() => SignalEvent::Reload,
                _ = off.recv() => SignalEvent::Off,
                _ = on.recv() => SignalEvent::On,
                () = tokio::time::sleep(at_most) => SignalEvent::Nothing,
            }
        })
    }
}

/// Passes the first signal to end on. The second ends the process, whatever its other threads wait
/// for.
fn end_when_told_twice(mut signals: EndSignals, tell: &UnboundedSender<Instant>, log: &DaemonLog) {
    signals.wait();
    // The daemon may be ending by itself.
    tell.send(Instant::now()).ok();
    signals.wait();
    log.exit(130);
}

/// A recording and who watches it.
struct ActiveRecording {
    recording: Recording,
    attacher: Option<Attacher>,
    watcher: RecordingHandle,
}

/// Who tells of pods.
enum PodNames {
    None,
    Logs(PodLogs),
    Api(PodWatch),
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

struct Daemon {
    sources: ValueSources,
    settings: ShimSettings,
    state: Arc<DaemonState>,
    opener: SinkOpener,
    sinks: Sinks,
    notify: Notify,
    server: Option<HttpServer>,
    control: Option<Control>,
    schedule: Schedule,
    recording: Option<ActiveRecording>,
    /// What is done when none can begin.
    retry: Retry<RecordingRequest>,
    /// It has started: from then on a recording that cannot begin does not end it.
    is_ready: bool,
    /// While it lives.
    helper: Option<Helper>,
    /// A thread of the recording does not move.
    hangs: bool,
    /// That rates are at their lowest and cost too much all the same was said.
    told_lowest: bool,
    /// By signal.
    switched_off: bool,
    /// The kernel counts the probes' run time as long as this is open.
    counting: Option<OwnedFd>,
    /// What this process's cgroup allows, and the CPUs there are.
    confines: CgroupLimits,
    host_cpus: f64,
    pace: CpuRateController,
    room: MemoryBudget,
    /// Looked at where rules do.
    cgroups: Cgroups,
    knowledge: PodNames,
    /// When cgroups and pods were last looked at, and how often pods had changed by then.
    scanned: Instant,
    pods_changed: u64,
    alive_at: Instant,
    /// What attaches of all recordings came to.
    attaches: AttachHistory,
    /// Those that hang now.
    hanging_sinks: BTreeSet<String>,
    log: DaemonLog,
}

impl Daemon {
    /// Goes on until a signal ends it, and returns when that came.
    fn until_told(&mut self, signals: &mut Signals) -> Result<Instant, Error> {
        loop {
            let left = self.schedule.left(Instant::now(), SystemTime::now());
            // A little more than what is left, so that the window is over then.
            match signals.wait((left + Duration::from_millis(1)).min(LOOK)) {
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
            self.beat();
            self.follow_switch()?;
            if self.schedule.is_over(Instant::now(), SystemTime::now()) && self.recording.is_some()
            {
                self.window_over();
            }
            if self.recording.as_ref().is_some_and(|active| !active.recording.is_running()) {
                return Err(Error::Failed);
            }
            self.look();
        }
    }

    /// Says that all is well, for health checks and the service's manager, unless a thread of the
    /// recording hangs: then only another daemon can help.
    fn beat(&mut self) {
        let hanging = self.recording.as_mut().and_then(|active| active.recording.hanging());
        if let Some(thread) = hanging.filter(|_| !self.hangs) {
            tracing::error!(
                "the {thread} has not moved for a minute: this daemon is no longer alive"
            );
        }
        if self.hangs && hanging.is_none() {
            tracing::warn!(
                "it moves again: this daemon is alive. The window in progress is as much longer"
            );
        }
        self.hangs = hanging.is_some();
        if !self.hangs {
            self.state.beat();
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
        let listen = self
            .server
            .as_ref()
            .map_or_else(|| "nowhere".into(), |server| server.address().to_string());
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

    /// A window ends; the next has the rates that the CPU time of this one suggests.
    fn window_over(&mut self) {
        let before = self.pace.steps();
        let budget = self.state.mode().cpus;
        let took = self.pace.window_over(Instant::now(), self.state.cost.spent(), budget);
        if took > budget {
            self.state.counters.windows_over_cpu.add(1);
        }
        let steps = self.pace.steps();
        self.cut();
        let is_lowest = steps == rate_controller::STEPS;
        let too_much = is_lowest && steps == before && took > budget;
        let hertz = self.state.frequency();
        let what = format!("the last window took {took:.3} CPUs, limits.cpu is {budget:.3}");
        if steps < before {
            tracing::info!(
                steps,
                "{what}: the next is recorded at {hertz} samples a second and CPU again"
            );
        } else if steps > before {
            tracing::warn!(
                steps,
                "{what}: the next is recorded at {hertz} samples a second and CPU"
            );
        } else if too_much && !self.told_lowest {
            tracing::warn!(
                steps,
                "{what}, and rates do not go below {hertz} samples a second and CPU: what it costs \
                 to follow this node's threads and processes is more than that"
            );
        }
        // Said anew only after a step up.
        self.told_lowest = is_lowest && (self.told_lowest || too_much);
    }

    /// Ends the window in progress; the next one is recorded at the rates now due.
    fn cut(&mut self) {
        let config = self.state.config();
        let what = self.state.mode().recording(&config.recording);
        let rates = self.pace.rates(what.rates());
        if let Some(active) = &self.recording {
            active.recording.cut(Some(rates));
            self.state.set_frequency(rates.kernel.frequency_hz, self.pace.steps());
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
                self.end(active)?;
                self.notify.ready(&self.status());
            }
            (true, None) if switch != before => self.notify.ready(&self.status()),
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
                self.notify.ready(&self.status());
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
                    self.notify.ready(
                        "recording as before: this host refuses what the new configuration \
                             asks for",
                    );
                }
            }
            RetryStep::In(pause) => {
                tracing::error!(%error, "no recording can begin: it is tried again in {pause:?}");
                self.state.set_failure(Some(format!("no recording can begin: {error}")));
                self.notify.ready(&self.status());
            }
        }
        Ok(())
    }

    /// Puts this in force, with the rest of the configuration as it is.
    fn ask_for(&mut self, asked: RecordingRequest) {
        let RecordingRequest { recording, selection, kubernetes } = asked;
        let config =
            Config { recording, selection, kubernetes, ..Config::clone(&self.state.config()) };
        self.state.set_mode(ResourceMode::of(&config, &self.confines, self.host_cpus));
        self.learn_of_pods(&config);
        self.state.set_config(config);
    }

    fn begin(&mut self, config: &Config) -> Result<ActiveRecording, Error> {
        let mode = self.state.mode();
        let what = mode.recording(&config.recording);
        let rules = self.rules(config);
        let of_kernel = rules.as_ref().and_then(|rules| self.of_kernel(config, rules));
        let selection = match (of_kernel, &what.cgroup) {
            (Some(rules), _) => KernelSelection::Rules(rules),
            (None, Some(path)) => KernelSelection::Cgroup(cgroup_id(path)?),
            (None, None) => KernelSelection::All,
        };
        self.state.set_selection(rules);
        let kernel = KernelSource::start(&kernel_options(&what, &mode, selection))?;
        self.state.set_frequency(what.frequency, 0);
        self.state.set_remarks(mode.remarks(&config.recording));
        self.state.cost.look_at_memory(true);
        self.state.cost.recording_begins();
        self.pace = CpuRateController::begin(Instant::now(), self.state.cost.spent());
        self.room = MemoryBudget::default();
        self.state.counters.recordings.add(1);
        self.schedule = Schedule::begin(config.windows.clone(), Instant::now(), SystemTime::now());
        let mut encoder = WindowEncoder::new(Arc::clone(&self.state), self.sinks.out());
        self.settings = self.settings.wishing(what.wishes());
        let shims = ShimSource::new(self.settings.owner, what.limits());
        let windows = WindowOptions {
            pods: Arc::clone(&self.state.pods),
            stacks: memory_budget::for_stacks(mode.memory),
            take: Box::new(move |over| encoder.take(over)),
        };
        let recording = Recording::start_windows(kernel, shims, ProcessTable::new(), windows)
            .map_err(internal("starting a thread"))?;
        let watcher = recording.watcher();
        self.state.set_watcher(Some(watcher.clone()));
        // A shim whose region cannot be opened would only be a burden to its process.
        let attacher = match perfusion_sources::kernel::features::mapped_files() {
            Ok(()) => {
                let (state, memory) = (Arc::clone(&self.state), self.attaches.clone());
                match Attacher::start(state, watcher.clone(), self.settings, memory) {
                    Ok(attacher) => Some(attacher),
                    Err(source) => {
                        self.end(ActiveRecording { attacher: None, recording, watcher })?;
                        return Err(internal("starting a thread")(source));
                    }
                }
            }
            Err(_) => None,
        };
        Ok(ActiveRecording { attacher, recording, watcher })
    }

    /// The rules of a configuration, with the cgroups there are now.
    fn rules(&mut self, config: &Config) -> Option<RuleSet> {
        let source = config.kubernetes.pods;
        // Pods that the API server tells of can except themselves, where the probes can tell them
        // by their cgroups.
        let any =
            !config.selection.is_all() || (source == PodSource::Api && self.cgroups.are_known());
        let frequency = self.state.mode().recording(&config.recording).frequency;
        any.then(|| config.selection.rules(&mut self.cgroups, &self.state.pods, source, frequency))
    }

    /// Of these rules, what the probes are told; `None` when they do not matter to them.
    fn of_kernel(&self, config: &Config, rules: &RuleSet) -> Option<RuleSet> {
        let (selection, source) = (config.selection.of_kernel(), config.kubernetes.pods);
        let any = !selection.is_all() || (source == PodSource::Api && self.cgroups.are_known());
        any.then(|| rules.of_kernel(selection.looks_at_cgroups(source)))
    }

    /// Begins to learn of pods, as this configuration says.
    fn learn_of_pods(&mut self, config: &Config) {
        if let PodNames::Api(watch) = std::mem::replace(&mut self.knowledge, PodNames::None) {
            watch.stop();
        }
        let options = &config.kubernetes;
        let (labels, annotations) = (options.labels.clone(), options.annotations.clone());
        self.state
            .pods
            .show(ShownPodLabels { labels: labels.clone(), annotations: annotations.clone() });
        self.knowledge = match options.pods {
            PodSource::Logs => {
                let mut logs = PodLogs::of(options.pod_logs.clone());
                logs.read(&self.state.pods, config.selection.names_pods());
                PodNames::Logs(logs)
            }
            PodSource::Api => {
                if !self.cgroups.are_known() {
                    tracing::warn!(
                        "no cgroup v2 hierarchy: pods that want no profile are recorded, and not \
                         attached to"
                    );
                }
                let mut wanted = config.selection.wanted();
                wanted.labels.extend(labels);
                wanted.annotations.extend(annotations);
                let (pods, counters) =
                    (Arc::clone(&self.state.pods), Arc::clone(&self.state.counters));
                match PodWatch::start(options, wanted.with(), pods, counters) {
                    Ok(watch) => PodNames::Api(watch),
                    Err(error) => {
                        tracing::error!(%error, "nothing is known of pods, and none is recorded");
                        PodNames::None
                    }
                }
            }
        };
    }

    /// Looks which pods and cgroups there are, now and then.
    fn look_around(&mut self, now: Instant) {
        // A pod that opts out is not to wait for the next scan.
        let changes = self.state.pods.changes();
        if now < self.scanned + SCAN && changes == self.pods_changed {
            return;
        }
        (self.scanned, self.pods_changed) = (now, changes);
        if let PodNames::Logs(logs) = &mut self.knowledge {
            logs.read(&self.state.pods, self.state.config().selection.names_pods());
        }
        self.look_at_cgroups();
    }

    /// Tells the probes of cgroups that came and went.
    fn look_at_cgroups(&mut self) {
        let Some(known) = self.state.selection().filter(|rules| rules.cgroups.is_some()) else {
            return;
        };
        let config = self.state.config();
        let Some(rules) = self.rules(&config).filter(|rules| *rules != *known) else { return };
        let cgroups = self.of_kernel(&config, &rules).and_then(|of_kernel| of_kernel.cgroups);
        if let Some(active) = &self.recording
            && cgroups.is_none_or(|cgroups| active.recording.select_cgroups(cgroups))
        {
            self.state.set_selection(Some(rules));
        }
    }

    /// Ends a recording; its last window goes to the sinks.
    fn end(&mut self, active: ActiveRecording) -> Result<(), Error> {
        self.state.set_watcher(None);
        if let Some(attacher) = active.attacher {
            attacher.stop();
        }
        drop(active.watcher);
        // Its programs go, and with them what they cost.
        self.counting = None;
        self.state.cost.recording_ended(Instant::now());
        let ended = active.recording.stop().map(drop).ok_or(Error::Failed);
        // What it held lies scattered between what stays.
        trim::give_back();
        ended
    }

    /// Reads the configuration again. One that cannot be used changes nothing.
    fn reload(&mut self) -> Result<(), Error> {
        self.notify.reloading();
        let before = self.state.config();
        let read = self.sources.load().map_err(Error::from).and_then(|loaded| {
            loaded.warn();
            // Asked now: the recording in progress ends only for one that can begin.
            if loaded.config.recording.cgroup != before.recording.cgroup {
                loaded.config.recording.cgroup.as_deref().map(cgroup_id).transpose()?;
            }
            let other = sinks::differ(&before, &loaded.config) || self.sinks.is_incomplete();
            let new = other.then(|| self.opener.open(&loaded.config, SINKS_OPEN)).transpose()?;
            Ok((loaded.config, new))
        });
        let (config, new_sinks) = match read {
            Ok(new) => new,
            Err(error) => {
                self.state.counters.reloads_failed.add(1);
                tracing::error!(%error, "the configuration stays as it was");
                self.notify.ready(
                    "recording with the configuration as it was: the new one cannot be used",
                );
                return Ok(());
            }
        };
        let mode = ResourceMode::of(&config, &self.confines, self.host_cpus);
        if before.limits.kill_switch != config.limits.kill_switch {
            // The lock stays where it is.
            tracing::warn!("the control socket moves when the daemon starts again");
        }
        let anew = self.state.mode().recording(&before.recording)
            != mode.recording(&config.recording)
            || before.selection.of_kernel() != config.selection.of_kernel()
            || before.kubernetes.pods != config.kubernetes.pods;
        let other_pods = before.kubernetes != config.kubernetes
            || before.selection.wanted() != config.selection.wanted();
        if let Some(active) = &self.recording {
            active.recording.allow_stacks(memory_budget::for_stacks(mode.memory));
        }
        self.state.set_mode(mode);
        if before.windows != config.windows {
            self.schedule =
                Schedule::begin(config.windows.clone(), Instant::now(), SystemTime::now());
        }
        if before.log != config.log {
            tracing::warn!("log takes effect when the daemon starts again");
        }
        if before.limits.lower_priority != config.limits.lower_priority {
            tracing::warn!("limits.lower_priority takes effect when the daemon starts again");
        }
        self.state.set_config(config);
        if other_pods {
            self.learn_of_pods(&self.state.config());
        }
        if let Some(sinks) = new_sinks
            && let Err(error) = self.sinks.replace(sinks)
        {
            tracing::error!(%error, "no thread for a sink: it is as it was until the configuration \
                 is read again");
        }
        listen_anew(&mut self.server, &before, &self.state, &self.sinks);
        if !anew && before.selection != self.state.config().selection {
            // What shims do changes within the recording.
            let rules = self.rules(&self.state.config());
            self.state.set_selection(rules);
        }
        if anew && let Some(active) = self.recording.take() {
            self.end(active)?;
        }
        self.try_anew();
        let new = self.state.config();
        self.follow_switch()?;
        if !Arc::ptr_eq(&new, &self.state.config()) {
            // What is recorded is what it was before, and that was said.
            return Ok(());
        }
        if self.recording.is_some() {
            // Not all that changes takes a new recording.
            self.retry.begun(RecordingRequest::of(&new));
        }
        self.state.counters.reloads.add(1);
        tracing::info!("the configuration was read again");
        self.notify.ready(&self.status());
        Ok(())
    }

    /// Says when a sink takes long over one thing, and when it goes on.
    fn look_at_sinks(&mut self) {
        self.sinks.look();
        let standing = self.sinks.watcher().standing();
        let hangs: BTreeSet<String> = standing
            .into_iter()
            .filter(|standing| standing.still >= SINK_HANGS)
            .map(|standing| standing.sink)
            .collect();
        for sink in hangs.difference(&self.hanging_sinks) {
            tracing::error!(
                sink,
                "does not come back from one write for {SINK_HANGS:?}: its disk or mount does not \
                 answer, and its profiles wait for it"
            );
        }
        for sink in self.hanging_sinks.difference(&hangs) {
            tracing::warn!(sink, "goes on");
        }
        self.hanging_sinks = hangs;
    }

    /// Looks at how it goes, and says that it lives while it does.
    fn look(&mut self) {
        let now = Instant::now();
        self.look_at_sinks();
        self.state.counters.log_lines_lost.add(self.log.look(now));
        let alive = match &self.recording {
            Some(_) if self.hangs => false,
            Some(active) if self.state.cost.wants_look(now) => match active.watcher.look() {
                Some(look) => {
                    let known = self.state.cost.probes_cpu().is_some();
                    let count = self.state.cost.observe(&look, now);
                    self.counting = if count { count_probes() } else { None };
                    if known && self.state.cost.probes_cpu().is_none() {
                        tracing::warn!(
                            "the probes' CPU time is not known, and not part of limits.cpu: {}",
                            perfusion_sources::kernel::features::PROBES_COUNTED
                        );
                    }
                    self.state.cost.look_at_memory(true);
                    true
                }
                None => false,
            },
            _ => true,
        };
        self.look_at_helper();
        self.look_at_room(now);
        self.look_around(now);
        if alive && self.notify.alive_every().is_some_and(|every| now >= self.alive_at + every) {
            self.alive_at = now;
            self.notify.alive();
        }
    }

    /// Says once that the helper has ended. There is nobody who could start another one.
    fn look_at_helper(&mut self) {
        if let Some(status) = self.helper.as_mut().and_then(Helper::ended) {
            self.helper = None;
            self.state.counters.helpers_ended.add(1);
            tracing::error!(
                %status,
                "the helper that attaches has ended: .NET processes of other users are not \
                 attached to until the daemon starts again"
            );
        }
    }

    /// Has caches dropped, or the window ended, when there is too much memory.
    fn look_at_room(&mut self, now: Instant) {
        let Some(active) = &self.recording else { return };
        let (memory, bound) = (self.state.cost.look_at_memory(false), self.state.mode().memory);
        let fill = active.recording.stacks_fill();
        let relief = self.room.look(now, memory.total(), bound, fill);
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
                active.recording.shed();
            }
            Some(Relief::Cut) => {
                self.state.counters.memory_cuts.add(1);
                self.pace.slower();
                self.cut();
            }
        }
    }

    /// Ends the recording and waits for the sinks, but not for a processor that hangs.
    fn stop(mut self, told: Instant) -> Result<(), Error> {
        self.state.ends();
        self.sinks.hasten(told);
        // From here on there is nothing to tell.
        drop(self.control.take());
        let sinks = self.sinks.watcher();
        if let PodNames::Api(watch) = std::mem::replace(&mut self.knowledge, PodNames::None) {
            watch.stop();
        }
        let recording = self.recording.take();
        let mut watch = recording.as_ref().map(|active| active.recording.watch());
        let (done, wait) = std::sync::mpsc::channel();
        let ending = std::thread::Builder::new().name("ending".into()).spawn(move || {
            let ended = recording.map_or(Ok(()), |active| self.end(active));
            // Fails only when nobody waits any more.
            done.send(None).ok();
            self.sinks.close(told);
            done.send(Some(ended)).ok();
        });
        // Without the thread what it was given is gone, the last window too.
        ending.map_err(internal("starting a thread"))?;
        let mut sinks_until = None;
        loop {
            let now = Instant::now();
            match wait.recv_timeout(Duration::from_millis(50)) {
                Ok(Some(ended)) => return ended,
                Ok(None) => sinks_until = Some(now + END_WITHIN),
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Failed),
                Err(RecvTimeoutError::Timeout) if sinks_until.is_some_and(|until| now >= until) => {
                    sinks.give_up();
                    return Err(Error::SinksHang(END_WITHIN));
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(thread) = watch.as_mut().and_then(|watch| watch.hanging(now)) {
                        tracing::error!(
                            "the {thread} has not moved for a minute: the last window is lost"
                        );
                        return Err(Error::Failed);
                    }
                }
            }
        }
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

/// Has the kernel count the run time of eBPF programs for as long as the answer is open
/// (BPF_ENABLE_STATS, since Linux 5.8).
fn count_probes() -> Option<OwnedFd> {
    aya::sys::enable_stats(aya::sys::Stats::RunTime).ok()
}

#[cfg(test)]
mod tests {
    use super::{Config, DaemonState, Sinks, listen_anew};
    use crate::daemon::sinks::OpenedSinks;
    use rustix::fs::{CWD, FileType, Mode};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    #[test]
    fn an_address_that_cannot_be_had_costs_nobody_the_old_one_and_is_tried_again() {
        let with = |listen: Option<SocketAddr>| {
            let mut config = Config::default();
            config.telemetry.listen = listen;
            config
        };
        let none = with(None);
        let state = Arc::new(DaemonState::of(with(Some(([127, 0, 0, 1], 0).into()))));
        let sinks = Sinks::start(OpenedSinks::default()).unwrap();
        let mut server = None;
        listen_anew(&mut server, &none, &state, &sinks);
        let old = server.as_ref().unwrap().address();

        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let before = with(Some(old));
        state.set_config(with(Some(address)));
        listen_anew(&mut server, &before, &state, &sinks);
        assert_eq!(server.as_ref().map(super::HttpServer::address), Some(old));
        assert_eq!(
            state.config().telemetry.listen,
            Some(old),
            "so the next reload finds a difference"
        );
        TcpStream::connect(old).unwrap();

        drop(taken);
        // As after a reload that could have neither: the value is the same.
        server = None;
        state.set_config(with(Some(address)));
        listen_anew(&mut server, &with(Some(address)), &state, &sinks);
        TcpStream::connect(address).unwrap();
        state.set_config(none);
        listen_anew(&mut server, &with(Some(address)), &state, &sinks);
        assert!(server.is_none() && TcpStream::connect(address).is_err());
        sinks.close(std::time::Instant::now());
    }

    #[test]
    fn the_file_that_one_daemon_holds_is_nobody_elses_to_open() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("daemon.lock");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let first = super::hold(directory.path()).unwrap();
        assert_eq!(mode(), 0o600);
        let error = super::hold(directory.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        // What others have laid there is left alone, wherever it leads.
        let secret = directory.path().join("secret");
        std::fs::write(&secret, "kept").unwrap();
        let refused = |lay: &dyn Fn()| {
            std::fs::remove_file(&path).unwrap();
            lay();
            let error = super::hold(directory.path()).unwrap_err();
            let why = std::error::Error::source(&error).unwrap().to_string();
            assert!(why.contains("remove it"), "{error}: {why}");
            assert_eq!(std::fs::read_to_string(&secret).unwrap(), "kept");
        };
        refused(&|| std::os::unix::fs::symlink(&secret, &path).unwrap());
        refused(&|| std::fs::hard_link(&secret, &path).unwrap());
        refused(&|| rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap());
        std::fs::remove_file(&path).unwrap();
        drop(super::hold(directory.path()).unwrap());
        // Of a daemon that was not so careful.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        super::hold(directory.path()).unwrap();
        assert_eq!(mode(), 0o600);
    }
}
