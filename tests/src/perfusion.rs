//! Runs the `perfusion` binary: short commands to their end, recordings in the background.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use profiler_protocol::counter::Counter;

use crate::app::App;
use crate::environment::perfusion_bin;
use crate::profile::Profile;
use crate::schedstat::sleeps;
use crate::{region, wait};

/// Time beyond a recording's own length that it may take to start, to resolve names and to write
/// its file: on a slow machine that is busy with other things. No promise, only the end of waiting
/// in vain.
pub const SLACK: Duration = Duration::from_secs(120);

/// How a command ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Exit status.
    pub status: ExitStatus,
    /// Data.
    pub stdout: String,
    /// Progress and errors.
    pub stderr: String,
}

impl Outcome {
    /// Exit code; -1 when a signal ended it.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or(-1)
    }
}

/// A `perfusion` command with these arguments.
///
/// # Panics
/// Without `PERFUSION_BIN`: the test should have said `Need::Perfusion`.
pub fn command<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(perfusion_bin().unwrap_or_default());
    command.args(args);
    command
}

/// Runs a command to its end.
///
/// # Errors
/// When it cannot be started or passes the deadline (it is killed then).
pub fn run(command: &mut Command, deadline: Duration) -> anyhow::Result<Outcome> {
    Recording::spawn(command)?.finish(deadline)
}

/// A `perfusion` that runs in the background. Dropping it kills it.
#[derive(Debug)]
pub struct Recording {
    child: Child,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<()>>,
    progress: Arc<Mutex<String>>,
}

impl Recording {
    /// Starts `perfusion record` on a process into `output`, with further arguments.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn of_pid(pid: u32, output: &Path, args: &[&str]) -> anyhow::Result<Self> {
        let mut command = command(["record", "--pid"]);
        command.arg(pid.to_string()).arg("-o").arg(output).args(args);
        Self::spawn(&mut command)
    }

    /// Starts a command.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let mut out = child.stdout.take().context("stdout was not piped")?;
        let err = child.stderr.take().context("stderr was not piped")?;
        let progress = Arc::new(Mutex::new(String::new()));
        let seen = Arc::clone(&progress);
        let stdout = thread::spawn(move || {
            let mut bytes = Vec::new();
            // A read error ends the text early; the assertions on it will say so.
            out.read_to_end(&mut bytes).ok();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let stderr = thread::spawn(move || {
            for line in BufReader::new(err).lines() {
                let Ok(line) = line else { return };
                let mut text = seen.lock().unwrap_or_else(PoisonError::into_inner);
                text.push_str(&line);
                text.push('\n');
            }
        });
        Ok(Self { child, stdout: Some(stdout), stderr: Some(stderr), progress })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How often a thread of its has gone to sleep; `None` when there is none of that name.
    pub fn sleeps_of(&self, thread: &str) -> Option<u64> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).ok()?;
        let tids = tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok());
        let named = |tid: &u32| {
            let comm = std::fs::read_to_string(format!("/proc/{}/task/{tid}/comm", self.pid()));
            comm.is_ok_and(|comm| comm.trim_end() == thread)
        };
        sleeps(self.pid(), tids.into_iter().find(named)?)
    }

    /// Waits until the runtime of an app that it records tells its shim of events.
    ///
    /// # Errors
    /// When it does not; with what it said.
    pub fn await_session(&self, app: &App) -> anyhow::Result<()> {
        wait::wait_until("a session in the app", SLACK, || {
            (region::counted(&region::regions(app), Counter::SessionsStarted) > 0).then_some(())
        })
        .with_context(|| self.progress())
    }

    /// What it has said on stderr so far.
    pub fn progress(&self) -> String {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until stderr contains `text`.
    ///
    /// # Errors
    /// When it ends or stays silent; with what it said.
    pub fn await_progress(&mut self, text: &str, deadline: Duration) -> anyhow::Result<()> {
        let progress = Arc::clone(&self.progress);
        let child = &mut self.child;
        let found = wait::wait_until(&format!("`{text}` on perfusion's stderr"), deadline, || {
            if progress.lock().unwrap_or_else(PoisonError::into_inner).contains(text) {
                return Some(true);
            }
            child.try_wait().ok().flatten().map(|_| false)
        });
        ensure!(
            found.is_ok_and(|found| found),
            "perfusion never said `{text}`:\n{}",
            self.progress()
        );
        Ok(())
    }

    /// Sends a signal to it.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: rustix::process::Signal) -> anyhow::Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal)
            .with_context(|| format!("kill perfusion {}", self.child.id()))
    }

    /// SIGKILL, and wait until it is gone.
    ///
    /// # Errors
    /// When it was gone already.
    pub fn kill(mut self) -> anyhow::Result<()> {
        ensure!(
            self.child.try_wait()?.is_none(),
            "perfusion ended by itself:\n{}",
            self.progress()
        );
        wait::kill(&mut self.child).context("cannot kill perfusion")
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it passes the deadline (it is killed then); with what it said.
    pub fn finish(mut self, deadline: Duration) -> anyhow::Result<Outcome> {
        let status = wait::wait_for_exit(&mut self.child, deadline)
            .with_context(|| format!("perfusion:\n{}", self.progress()))?;
        let stdout = self.stdout.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        if let Some(thread) = self.stderr.take() {
            thread.join().ok();
        }
        Ok(Outcome { status, stdout, stderr: self.progress() })
    }

    /// Waits for its end, which must be a good one.
    ///
    /// # Errors
    /// As [`finish`](Self::finish), and when the exit code is not 0.
    pub fn finish_well(self, deadline: Duration) -> anyhow::Result<Outcome> {
        let outcome = self.finish(deadline)?;
        ensure!(
            outcome.status.success(),
            "perfusion ended with {}:\n{}",
            outcome.status,
            outcome.stderr
        );
        Ok(outcome)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Already dead is fine.
        wait::kill(&mut self.child).ok();
    }
}

/// Output files of one test, removed with it.
#[derive(Debug)]
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    /// A fresh directory.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self { dir: tempfile::Builder::new().prefix("perfusion-test").tempdir()? })
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Memory of a process in MiB, by a line of `/proc/PID/status` such as `VmRSS` or `VmHWM`; 0 when
/// it is gone.
pub fn memory(pid: u32, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = |text: &str| {
        text.strip_prefix(line)?.strip_prefix(':')?.trim().strip_suffix(" kB")?.parse().ok()
    };
    status.lines().find_map(kib).map_or(0, |kib: u64| kib / 1024)
}

/// Records a process for `duration` and reads the profile.
///
/// # Errors
/// When the recording fails or its file cannot be read.
pub fn record_pid(
    pid: u32,
    duration: Duration,
    args: &[&str],
) -> anyhow::Result<(Profile, Outcome)> {
    let scratch = Scratch::new()?;
    let file = scratch.path("profile.pb.gz");
    let length = format!("{}ms", duration.as_millis());
    let mut all = vec!["--duration", length.as_str()];
    all.extend(args);
    let outcome = Recording::of_pid(pid, &file, &all)?.finish_well(duration + SLACK)?;
    Ok((Profile::read(&file)?, outcome))
}

/// What recordings heard of an app that allocates all the time, and what it allocated meanwhile by
/// its own account.
#[derive(Debug)]
pub struct Heard {
    /// Of each recording, and what it said.
    pub profiles: Vec<(Profile, Outcome)>,
    /// While all of them surely listened.
    pub least_bytes: f64,
    /// From when the first of them listened until after all had ended.
    pub most_bytes: f64,
}

impl Heard {
    /// Holds bytes of a profile to the app's own account; `picture` is shown where they are others.
    /// Samples that found the ring full, as on a machine that leaves the recorder no CPU, are
    /// counted by the profile and count here.
    ///
    /// # Panics
    /// When they are.
    pub fn assert_holds(&self, profile: &Profile, bytes: f64, picture: impl Display) {
        let Self { least_bytes, most_bytes, .. } = self;
        let counter = |name: &str| profile.counter(name).unwrap_or(0) as f64;
        let stored = counter("events_allocations");
        let bytes = bytes * (stored + counter("shim_allocations_dropped_full")) / stored;
        // Thousands of samples: 1 % by chance. A doubled event stream gives 2.
        assert!(
            bytes > 0.8 * least_bytes && bytes < 1.25 * most_bytes,
            "{bytes:.0} of the app's own {least_bytes:.0} to {most_bytes:.0} bytes:\n{picture}"
        );
    }
}

/// Makes so many recordings of an app at once, for `duration` from the moment on when all of them
/// hear of its allocations: how long a machine takes to get there is nobody's concern.
///
/// # Errors
/// When a recording fails, hears nothing, or its file cannot be read.
pub fn record_allocations(
    app: &mut App,
    recorders: usize,
    duration: Duration,
) -> anyhow::Result<Heard> {
    record_allocations_beside(app, 0, recorders, duration)
}

/// The same where so many others, such as a daemon, hear of them already.
///
/// # Errors
/// As [`record_allocations`].
pub fn record_allocations_beside(
    app: &mut App,
    others: usize,
    recorders: usize,
    duration: Duration,
) -> anyhow::Result<Heard> {
    let scratch = Scratch::new()?;
    let files: Vec<PathBuf> =
        (0..recorders).map(|number| scratch.path(&format!("{number}.pb.gz"))).collect();
    let mut counted = BTreeMap::new();
    wait::wait_until("those who listen already", SLACK, || {
        (region::counting(app, &mut counted).len() == others).then_some(())
    })?;
    let mut recordings = Vec::new();
    for file in &files {
        recordings.push(Recording::of_pid(app.pid(), file, &[])?);
    }
    let mut first = None;
    let counting = wait::wait_until("allocations to be heard of", SLACK, || {
        let counting = region::counting(app, &mut counted);
        if counting.len() > others && first.is_none() {
            first = Some(app.mark());
        }
        (counting.len() == others + recorders).then_some(counting)
    })
    .with_context(|| recordings.iter().map(Recording::progress).collect::<String>())?;
    let first = first.context("nobody was first")??;
    // On a machine that stands still a recorder finds its region seconds after the library began to
    // count.
    let written: Vec<_> = counting.iter().map(|region| (region, region::written(region))).collect();
    wait::wait_until("what was counted to be read", SLACK, || {
        written.iter().all(|(region, written)| region::read(region) >= *written).then_some(())
    })?;
    let from = app.mark()?;
    wait::let_pass(duration);
    let to = app.mark()?;
    for recording in &recordings {
        recording.signal(rustix::process::Signal::INT)?;
    }
    let mut profiles = Vec::new();
    for (recording, file) in recordings.into_iter().zip(&files) {
        let outcome = recording.finish_well(SLACK)?;
        profiles.push((Profile::read(file)?, outcome));
    }
    // Not before they have ended: on a machine that stands still they hear of what comes after the
    // signal, too.
    let last = app.mark()?;
    Ok(Heard {
        profiles,
        least_bytes: to.allocated_bytes - from.allocated_bytes,
        most_bytes: last.allocated_bytes - first.allocated_bytes,
    })
}
