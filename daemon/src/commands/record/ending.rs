//! The end of a recording: what it is waited for, and who may not wait for it.

use super::StatusLines;
use super::attaching::LONG_ATTACH;
use crate::cli::{RecordArgs, exit};
use crate::end_signals::{EndSignal, EndSignals};
use crate::error::Error;
use crate::memory_guard::{AttachedProcesses, Growing};
use indicatif::{ProgressBar, ProgressStyle};
use perfusion_host::process::ExitPoller;
use perfusion_recorder::Recording;
use perfusion_recorder::follow::Follower;
use std::io::IsTerminal as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How often ended targets are looked for; nothing reports the end of a process that is not a child
/// without its help.
const LOOK: Duration = Duration::from_millis(100);

/// The exit code of a program that the kernel has ended for want of memory (SIGKILL), and of a
/// shell that ran one.
const KILLED: u8 = 128 + 9;

/// The time of a recording begins when the named processes have the shim, and no later than this
/// after the recording did: a runtime that does not answer holds up nobody.
const LONGEST_ATTACH: Duration = LONG_ATTACH;

/// Why a recording ended.
pub(super) enum RecordEnd {
    /// The program it started has ended.
    Child(ExitStatus),
    /// Its time was over.
    Time,
    /// All targets were gone.
    Gone,
    /// Ctrl-C, which a started program got from its terminal too.
    Interrupted,
    /// SIGTERM, or the end of the terminal: a started program goes on.
    Terminated,
}

impl From<EndSignal> for RecordEnd {
    fn from(signal: EndSignal) -> Self {
        match signal {
            EndSignal::Interrupt => Self::Interrupted,
            EndSignal::Terminate => Self::Terminated,
        }
    }
}

/// A recording in progress, to be waited for.
#[derive(Clone, Copy)]
pub(super) struct EndWatch<'a> {
    pub(super) options: &'a RecordArgs,
    pub(super) recording: &'a Recording,
    pub(super) began: Instant,
    pub(super) follower: Option<&'a Follower>,
    pub(super) attached: &'a AttachedProcesses,
    pub(super) say: StatusLines,
}

impl EndWatch<'_> {
    /// Waits for the time to be over, for a signal to end, or for all targets to end. Gives back
    /// the child unless it has ended.
    pub(super) fn wait(
        &self,
        mut child: Option<Child>,
        signals: &mut EndSignals,
    ) -> Result<(RecordEnd, Option<Child>), Error> {
        let Self { options, recording, began, follower, attached, say } = *self;
        let bar = progress(options, say);
        let grows = options.exact || options.alloc_counts.is_some();
        let growing =
            child.as_ref().filter(|_| grows).map(|child| Growing::of(child.id(), options.force));
        let end = signals.run(async |received| {
        let mut look = tokio::time::interval(LOOK);
        let targets: Vec<ExitPoller> =
            options.pid.iter().map(|&pid| ExitPoller::new(pid)).collect();
        loop {
            tokio::select! {
                signal = received.next() => return Ok(signal.into()),
                _ = look.tick() => {}
            }
            if let Some(bar) = &bar {
                bar.set_position(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
            }
            if let Some(child) = &mut child
                && let Some(status) =
                    child.try_wait().map_err(Error::internal("waiting for the program"))?
            {
                if exit_code(status) == KILLED
                    && let Some(cgroup) = growing.as_ref().and_then(Growing::killed_in)
                {
                    crate::error::say(&format!(
                        "the program was killed: the kernel has killed for want of memory in its \
                         cgroup {} meanwhile (oom_kill). \
                         What the recording made the program use may be the cause",
                        cgroup.display()
                    ));
                }
                return Ok::<_, Error>(RecordEnd::Child(status));
            }
            attached.look();
            if let Some(why) = growing.as_ref().and_then(Growing::is_too_much) {
                crate::error::say(&why);
                return Ok(RecordEnd::Time);
            }
            // A zombie has ended, however long its parent takes to ask for it.
            if !targets.is_empty() && !targets.iter().any(ExitPoller::is_running) {
                return Ok(RecordEnd::Gone);
            }
            // An attach can take as long as a short recording: the time counts from when the named
            // processes have been seen to.
            let since = match follower {
                Some(follower) if !options.pid.is_empty() => {
                    let latest = began + LONGEST_ATTACH;
                    follower.complete_since().map_or(latest, |complete| complete.min(latest))
                }
                _ => began,
            };
            let is_over = options.duration.is_some_and(|time| Instant::now() >= since + time);
            if is_over || !recording.is_running() {
                return Ok(RecordEnd::Time);
            }
        }
    })?;
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        Ok((end, child))
    }
}

fn progress(options: &RecordArgs, say: StatusLines) -> Option<ProgressBar> {
    let duration = options.duration.filter(|_| !say.0 && std::io::stderr().is_terminal())?;
    let bar = ProgressBar::new(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    let style = ProgressStyle::with_template("{bar:40} {elapsed} / {eta} left").ok()?;
    bar.set_style(style);
    Some(bar)
}

/// From the end of the recording on, one more Ctrl-C, SIGTERM or SIGHUP ends this program at once,
/// but not while it holds the returned lock: a file is written whole or not at all. (tokio's
/// handlers stay in place when their runtime is gone, so somebody must listen.)
pub(super) fn leave_on_second_signal() -> Arc<Mutex<()>> {
    let writing = Arc::new(Mutex::new(()));
    let held = Arc::clone(&writing);
    std::thread::spawn(move || {
        let Ok(mut signals) = EndSignals::listen_at_terminal() else { return };
        signals.wait();
        let _held = held.lock();
        std::process::exit(exit::INTERRUPTED.into());
    });
    writing
}

pub(super) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(exit::OTHER)
}
