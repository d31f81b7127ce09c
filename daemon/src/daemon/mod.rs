//! `perfusion daemon`: the pipeline of `record`, from window to window, for as long as it is wanted.
//!
//! This thread only looks at clocks, signals and files: the work is the collector's, the processor's and the sinks' threads.

pub mod attacher;
pub mod cost;
pub mod http;
mod log;
pub mod metrics;
pub mod notify;
pub mod schedule;
pub mod sinks;
pub mod state;
pub mod windows;

use crate::attach::{self, Settings};
use crate::cli::ConfigSources;
use crate::config::load::Sources;
use crate::config::{Config, Recording as What};
use crate::error::Error;
use crate::process::ProcessTable;
use crate::record::{cgroup_id, raise_open_files};
use crate::run::{Recording, Watcher};
use crate::source::kernel::{KernelError, KernelOptions, KernelSource, Selection};
use crate::source::shim::ShimSource;
use attacher::Attacher;
use http::Server;
use notify::Notify;
use rustix::fs::{FlockOperation, flock};
use schedule::Schedule;
use sinks::Sinks;
use state::State;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use windows::Encoder;

/// How often clocks and files are looked at, at least.
const LOOK: Duration = Duration::from_secs(1);

/// Runs until it is told to end.
///
/// # Errors
/// See [`Error`]. What goes wrong while it runs is logged and does not end it, unless the kernel source fails.
pub fn daemon(sources: &ConfigSources) -> Result<u8, Error> {
    let sources = sources.sources();
    let loaded = sources.load()?;
    log::start(&loaded.config.log);
    let mut signals = Signals::listen()?;
    let lock = loaded.config.limits.kill_switch.parent();
    let _lock = lock.map(hold).transpose()?;
    crate::kernel_features::check().map_err(KernelError::from)?;
    for limit in crate::kernel_features::limits().into_iter().filter_map(|(_, result)| result.err()) {
        tracing::warn!(%limit, "limited");
    }
    let _sweeping = attach::place::Sweeping::begin();
    let owner = crate::leftover::random()
        .map_err(|source| Error::Internal { what: "random number", source: source.into() })?;
    raise_open_files();
    let sinks = sinks::open(&loaded.config)?;
    if sinks.is_empty() {
        tracing::warn!("no sink is configured: profiles are made and dropped (set files.directory)");
    }
    let sinks = Sinks::start(sinks).map_err(internal("starting a thread"))?;
    let state = Arc::new(State::new(loaded.config));
    let server = listen(&state, &sinks)?;
    let mut daemon = Daemon {
        sources,
        settings: Settings { owner },
        schedule: Schedule::begin(state.config().windows.clone(), Instant::now(), SystemTime::now()),
        state,
        sinks,
        notify: Notify::from_environment(),
        server,
        recording: None,
        switched_off: false,
        counting: None,
        alive_at: Instant::now(),
    };
    daemon.follow_switch()?;
    daemon.notify.ready(daemon.status());
    tracing::info!(status = daemon.status(), "ready");
    let ended = daemon.until_told(&mut signals);
    daemon.notify.stopping();
    daemon.stop(&mut signals)?;
    ended.map(|()| 0)
}

/// The server for metrics and health, if one is configured.
fn listen(state: &Arc<State>, sinks: &Sinks) -> Result<Option<Server>, Error> {
    let Some(listen) = state.config().telemetry.listen else { return Ok(None) };
    let server = Server::start(listen, Arc::clone(state), sinks.watcher());
    server.map(Some).map_err(|source| Error::Listen { listen, source })
}

fn internal(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Internal { what, source }
}

/// Holds the file that only one daemon can hold.
fn hold(directory: &Path) -> Result<File, Error> {
    let path = directory.join("daemon.lock");
    let failed = |source| Error::Internal { what: "the daemon's lock file", source };
    DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).open(&path);
    let mut file = open.map_err(failed)?;
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
    interrupt: Signal,
    terminate: Signal,
    reload: Signal,
    off: Signal,
    on: Signal,
}

enum Told {
    End,
    Reload,
    Off,
    On,
    Nothing,
}

impl Signals {
    fn listen() -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(internal("tokio runtime"))?;
        let listen = |kind| signal(kind).map_err(internal("signal handler"));
        let inside = runtime.enter();
        let interrupt = listen(SignalKind::interrupt())?;
        let terminate = listen(SignalKind::terminate())?;
        let reload = listen(SignalKind::hangup())?;
        let off = listen(SignalKind::user_defined1())?;
        let on = listen(SignalKind::user_defined2())?;
        drop(inside);
        Ok(Self { runtime, interrupt, terminate, reload, off, on })
    }

    /// Waits for the first of them, not longer than this.
    fn wait(&mut self, at_most: Duration) -> Told {
        let Self { runtime, interrupt, terminate, reload, off, on } = self;
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => Told::End,
                _ = terminate.recv() => Told::End,
                _ = reload.recv() => Told::Reload,
                _ = off.recv() => Told::Off,
                _ = on.recv() => Told::On,
                () = tokio::time::sleep(at_most) => Told::Nothing,
            }
        })
    }
}

/// A recording and who watches it.
struct Active {
    recording: Recording,
    attacher: Option<Attacher>,
    watcher: Watcher,
}

struct Daemon {
    sources: Sources,
    settings: Settings,
    state: Arc<State>,
    sinks: Sinks,
    notify: Notify,
    server: Option<Server>,
    schedule: Schedule,
    recording: Option<Active>,
    /// By signal.
    switched_off: bool,
    /// The kernel counts the probes' run time as long as this is open.
    counting: Option<OwnedFd>,
    alive_at: Instant,
}

impl Daemon {
    /// Goes on until a signal ends it.
    fn until_told(&mut self, signals: &mut Signals) -> Result<(), Error> {
        loop {
            let left = self.schedule.left(Instant::now(), SystemTime::now());
            // A little more than what is left, so that the window is over then.
            match signals.wait((left + Duration::from_millis(1)).min(LOOK)) {
                Told::End => return Ok(()),
                Told::Reload => self.reload()?,
                Told::Off => self.switched_off = true,
                Told::On => self.switched_off = false,
                Told::Nothing => {}
            }
            self.state.beat();
            self.follow_switch()?;
            if self.schedule.is_over(Instant::now(), SystemTime::now())
                && let Some(active) = &self.recording
            {
                active.recording.cut();
            }
            if self.recording.as_ref().is_some_and(|active| !active.recording.is_running()) {
                return Err(Error::Failed);
            }
            self.look();
        }
    }

    fn status(&self) -> &'static str {
        if self.recording.is_some() { "recording" } else { "switched off" }
    }

    /// Begins or ends the recording as the kill switch says.
    fn follow_switch(&mut self) -> Result<(), Error> {
        let config = self.state.config();
        let off = self.switched_off || config.limits.kill_switch.exists();
        match (off, self.recording.take()) {
            (true, Some(active)) => {
                tracing::warn!("switched off: nothing is recorded");
                self.end(active)?;
                self.notify.ready(self.status());
            }
            (false, None) => {
                self.recording = Some(self.begin(&config)?);
                self.notify.ready(self.status());
            }
            (_, recording) => self.recording = recording,
        }
        Ok(())
    }

    fn begin(&mut self, config: &Config) -> Result<Active, Error> {
        let kernel = KernelSource::start(&kernel_options(&config.recording)?)?;
        self.state.set_frequency(config.recording.frequency);
        self.state.counters.recordings.add(1);
        self.schedule = Schedule::begin(config.windows.clone(), Instant::now(), SystemTime::now());
        let mut encoder = Encoder::new(Arc::clone(&self.state), self.sinks.out());
        let shims = ShimSource::new(self.settings.owner, config.recording.live_objects);
        let take = Box::new(move |over: crate::run::Over<'_>| encoder.take(over));
        let recording = Recording::start_windows(kernel, shims, ProcessTable::new(), take)
            .map_err(internal("starting a thread"))?;
        let watcher = recording.watcher();
        self.state.set_watcher(Some(watcher.clone()));
        // A shim whose region cannot be opened would only be a burden to its process.
        let attacher = match crate::kernel_features::mapped_files() {
            Ok(()) => {
                let attacher = Attacher::start(Arc::clone(&self.state), watcher.clone(), self.settings);
                Some(attacher.map_err(internal("starting a thread"))?)
            }
            Err(_) => None,
        };
        Ok(Active { attacher, recording, watcher })
    }

    /// Ends a recording; its last window goes to the sinks.
    fn end(&mut self, active: Active) -> Result<(), Error> {
        self.state.set_watcher(None);
        if let Some(attacher) = active.attacher {
            attacher.stop();
        }
        drop(active.watcher);
        active.recording.stop().map(drop).ok_or(Error::Failed)
    }

    /// Reads the configuration again. One that cannot be used changes nothing.
    fn reload(&mut self) -> Result<(), Error> {
        self.notify.reloading();
        let before = self.state.config();
        let read = self.sources.load().map_err(Error::from).and_then(|loaded| {
            let new =
                sinks::differ(&before, &loaded.config).then(|| sinks::open(&loaded.config)).transpose()?;
            Ok((loaded.config, new))
        });
        let (config, new_sinks) = match read {
            Ok(new) => new,
            Err(error) => {
                self.state.counters.reloads_failed.add(1);
                tracing::error!(%error, "the configuration stays as it was");
                self.notify.ready("recording with the configuration as it was: the new one cannot be used");
                return Ok(());
            }
        };
        let anew = before.recording != config.recording;
        if before.windows != config.windows {
            self.schedule = Schedule::begin(config.windows.clone(), Instant::now(), SystemTime::now());
        }
        if before.log != config.log {
            tracing::warn!("log takes effect when the daemon starts again");
        }
        self.state.set_config(config);
        if let Some(sinks) = new_sinks {
            self.sinks.replace(sinks);
        }
        if before.telemetry != self.state.config().telemetry {
            // The old address is free before the new one is taken: they may be the same port.
            self.server = None;
            match listen(&self.state, &self.sinks) {
                Ok(server) => self.server = server,
                Err(error) => tracing::error!(%error, "no metrics until the next reload"),
            }
        }
        if anew && let Some(active) = self.recording.take() {
            self.end(active)?;
        }
        self.follow_switch()?;
        self.state.counters.reloads.add(1);
        tracing::info!("the configuration was read again");
        self.notify.ready(self.status());
        Ok(())
    }

    /// Looks at how it goes, and says that it lives while it does.
    fn look(&mut self) {
        let now = Instant::now();
        let alive = match &self.recording {
            Some(active) if self.state.cost.wants_look(now) => match active.watcher.look() {
                Some(look) => {
                    let count = self.state.cost.observe(&look, now);
                    // Where the kernel does not count, the probes' cost is not known, and said to be zero.
                    self.counting = if count { count_probes() } else { None };
                    true
                }
                None => false,
            },
            _ => true,
        };
        if alive && self.notify.alive_every().is_some_and(|every| now >= self.alive_at + every) {
            self.alive_at = now;
            self.notify.alive();
        }
    }

    /// Ends the recording and waits for the sinks; a second signal ends the daemon at once.
    fn stop(mut self, signals: &mut Signals) -> Result<(), Error> {
        let recording = self.recording.take();
        let (done, wait) = std::sync::mpsc::channel();
        let ending = std::thread::spawn(move || {
            let ended = recording.map_or(Ok(()), |active| self.end(active));
            self.sinks.close();
            // Fails only when nobody waits any more.
            done.send(ended).ok();
        });
        loop {
            if let Told::End = signals.wait(Duration::from_millis(50)) {
                std::process::exit(130);
            }
            match wait.try_recv() {
                Ok(ended) => return ended,
                Err(_) if ending.is_finished() => return Err(Error::Failed),
                Err(_) => {}
            }
        }
    }
}

fn kernel_options(what: &What) -> Result<KernelOptions, Error> {
    let bytes = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
    Ok(KernelOptions {
        frequency_hz: what.frequency,
        selection: match &what.cgroup {
            Some(path) => Selection::Cgroup(cgroup_id(path)?),
            None => Selection::All,
        },
        stack_copy_bytes: bytes(what.stack_copy.0),
        wait_stack_budget_bytes_per_s: what.wait_stacks.0,
        waker_stacks: what.waker_stacks,
        ring_bytes: bytes(what.ring.0),
        ..KernelOptions::default()
    })
}

/// Has the kernel count the run time of eBPF programs for as long as the answer is open (BPF_ENABLE_STATS, since Linux 5.8).
fn count_probes() -> Option<OwnedFd> {
    aya::sys::enable_stats(aya::sys::Stats::RunTime).ok()
}
