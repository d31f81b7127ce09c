//! Brings the shim into every .NET process of a recording: those that exist at its start, and those
//! that begin later, such as children. The processor recognises them by their mappings. This runs
//! on one thread beside the recording and looks a few times a second.

use super::RecordingHandle;
use perfusion_dotnet::attach::policy::{AttachObstacle, DetectedRuntime, Inspection, inspect};
use perfusion_dotnet::attach::shim_copy;
use perfusion_dotnet::attach::workers;
use perfusion_dotnet::attach::{AttachError, attach_until};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::{start_ticks, ticks_before_now};
use perfusion_host::system_limits::explain;
use perfusion_sources::shim::ShimSettings;
use perfusion_sources::shim::finder;
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks for new processes; as often the pipeline says which there are.
const LOOK: Duration = Duration::from_millis(250);
/// A program has this long from its start until its runtime is there and listens; then it counts as
/// what it is.
pub const GROWS_UP: Duration = Duration::from_secs(5);

/// A thread that a runtime has once profilers of its environment are loaded ("This must happen
/// before Thread::HasStarted() that fires profiler notifications is called on the finalizer
/// thread", `EEStartupHelper`, src/coreclr/vm/ceemain.cpp of dotnet/runtime). Before that it may
/// wait for a tool for ever (`DOTNET_DiagnosticPorts` with `suspend`).
const STARTED: &str = ".NET Finalizer";
/// Threads among which it is looked for: it is one of the first.
const THREADS: usize = 1024;

/// Whose .NET processes get the shim.
#[derive(Clone, Debug)]
pub enum AttachTargets {
    /// These, and the children they make while they are recorded.
    Named(Vec<u32>),
    /// A program that was started with the shim in its environment, and its children: those that
    /// did not load it get it.
    Started(u32),
    /// The processes of this cgroup v2 directory itself.
    Cgroup(PathBuf),
    /// Every process of the host.
    All,
}

/// What happens to a process.
#[derive(Debug)]
pub enum AttachEvent<'a> {
    /// The shim is about to be loaded.
    Attaching {
        /// The process.
        pid: u32,
    },
    /// That attach ended before the runtime was asked to load anything.
    NotAsked {
        /// The process.
        pid: u32,
    },
    /// The shim is in.
    Attached {
        /// The process.
        pid: u32,
        /// Version of its runtime.
        runtime: &'a str,
        /// How long it took.
        took: Duration,
    },
    /// It is not, and will not be, or not for a while.
    Refused {
        /// The process.
        pid: u32,
        /// True for a process that was named, or that is a .NET one.
        expected: bool,
        /// Why.
        reason: String,
    },
}

/// Who has not answered for two seconds is asked again after as many.
const BUSY: Duration = Duration::from_secs(2);

/// The thread. Dropping it, or [`Follower::stop`], ends it.
pub struct Follower {
    thread: Option<JoinHandle<()>>,
    stop: Option<Sender<()>>,
    give_up: Arc<AtomicBool>,
    complete: Arc<OnceLock<Instant>>,
    reasons: Arc<Mutex<Vec<String>>>,
}

impl Follower {
    /// Begins, beside the recording of `watcher`. `tell` hears on the thread what happens.
    pub fn start(
        whom: AttachTargets,
        settings: ShimSettings,
        watcher: RecordingHandle,
        tell: impl Fn(AttachEvent<'_>) + Send + 'static,
    ) -> Self {
        let (stop, stopped) = channel();
        let complete = Arc::new(OnceLock::new());
        let reasons = Arc::new(Mutex::new(Vec::new()));
        let give_up = Arc::new(AtomicBool::new(false));
        let mut work = FollowerThread {
            give_up: Arc::clone(&give_up),
            looked_at: HashMap::new(),
            settings,
            watcher,
            tell: Box::new(tell),
            reasons: Arc::clone(&reasons),
            whom,
        };
        let done = Arc::clone(&complete);
        let thread = std::thread::spawn(move || work.run(&stopped, &done));
        Self { thread: Some(thread), stop: Some(stop), give_up, complete, reasons }
    }

    /// When all processes that were there at the start had been looked at; `None` as long as they
    /// have not.
    #[must_use]
    pub fn complete_since(&self) -> Option<Instant> {
        self.complete.get().copied()
    }

    /// Says that no further process is worth the effort, and that a runtime which has not answered
    /// is not waited for any longer.
    pub fn cease(&mut self) {
        // Pairs with the loads in `ipc`; nothing else is told by it.
        self.give_up.store(true, Ordering::Relaxed);
        self.stop = None;
    }

    /// Waits a while for the thread to end; answers why expected processes have no shim.
    #[must_use]
    pub fn stop(mut self) -> Vec<String> {
        self.cease();
        if let Some(thread) = self.thread.take() {
            workers::join(thread);
        }
        self.reasons.lock().map(|mut reasons| std::mem::take(&mut *reasons)).unwrap_or_default()
    }
}

/// A program in a process: another one after each exec.
pub type ProgramId = (u32, u64, u64, u64);

struct FollowerThread {
    /// Raised when nobody waits for an attach any more.
    give_up: Arc<AtomicBool>,
    whom: AttachTargets,
    settings: ShimSettings,
    watcher: RecordingHandle,
    tell: Box<dyn Fn(AttachEvent<'_>) + Send>,
    reasons: Arc<Mutex<Vec<String>>>,
    looked_at: HashMap<ProgramId, AttachProgress>,
}

/// When a program was seen first.
#[derive(Clone, Copy, Debug)]
struct FirstSight {
    at: Instant,
    /// The process ran another program before, as this thread has seen.
    is_exec: bool,
}

impl FirstSight {
    fn is_recent(self) -> bool {
        self.at.elapsed() < GROWS_UP
    }

    /// A program of a process that started so many ticks after the boot may still become a .NET
    /// program that listens. The start of a process says nothing about a program that it executes
    /// later.
    fn is_young(self, start_ticks: u64) -> bool {
        start_ticks > ticks_before_now(GROWS_UP) || self.is_exec && self.is_recent()
    }
}

/// Where a program stands.
enum AttachProgress {
    /// It is looked at again: it may become a .NET program that listens. `noted` is why it has no
    /// shim so far. That is in the file's comments, and is told when the recording ends.
    Pending { seen: FirstSight, noted: Option<String> },
    /// It has not answered: when it is asked again, and what was said of it.
    Busy { seen: FirstSight, again: Instant, said: String },
    /// Dealt with.
    Done,
}

impl FollowerThread {
    fn run(&mut self, stopped: &Receiver<()>, complete: &OnceLock<Instant>) {
        self.look_until_stopped(stopped, complete);
        for (program, progress) in std::mem::take(&mut self.looked_at) {
            self.tell_noted(program.0, progress);
        }
    }

    fn look_until_stopped(&mut self, stopped: &Receiver<()>, complete: &OnceLock<Instant>) {
        loop {
            let pids = self.candidates();
            let mut present = HashSet::new();
            for pid in pids {
                if !matches!(stopped.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout)) {
                    return;
                }
                if let Some(program) = program(pid) {
                    present.insert(program);
                    self.look_after(program);
                }
            }
            complete.get_or_init(Instant::now);
            shim_copy::remove_copies_of_ended_processes();
            // The pipeline forgets for a while whatever it is not sure of.
            let is_gone =
                |known: ProgramId| !present.contains(&known) && program(known.0) != Some(known);
            let gone: Vec<ProgramId> =
                self.looked_at.keys().copied().filter(|known| is_gone(*known)).collect();
            for known in gone {
                let progress = self.looked_at.remove(&known);
                // Of others that ended so soon, the comments say enough.
                if let Some(progress) = progress.filter(|_| self.is_named(known.0)) {
                    self.tell_noted(known.0, progress);
                }
            }
            match stopped.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Processes that are named, and those in which the recording has seen a CLR: it follows
    /// children from their fork on.
    fn candidates(&self) -> Vec<u32> {
        let managed = self.watcher.managed().into_iter().map(|process| process.pid);
        match &self.whom {
            AttachTargets::All | AttachTargets::Started(_) => managed.collect(),
            // Of all others it is told what they map, too: the kernel's records do not say whose
            // they are.
            AttachTargets::Cgroup(path) => {
                let text = std::fs::read_to_string(path.join("cgroup.procs")).unwrap_or_default();
                let inside: HashSet<u32> =
                    text.lines().filter_map(|line| line.parse().ok()).collect();
                managed.filter(|pid| inside.contains(pid)).collect()
            }
            AttachTargets::Named(pids) => {
                let others = managed.filter(|pid| !pids.contains(pid));
                pids.iter().copied().chain(others).collect()
            }
        }
    }

    fn look_after(&mut self, program: ProgramId) {
        let pid = program.0;
        let now = Instant::now();
        let (seen, noted, said) = match self.looked_at.get(&program) {
            None => {
                let seen = FirstSight { at: now, is_exec: self.has_replaced_another(program) };
                self.looked_at.insert(program, AttachProgress::Pending { seen, noted: None });
                (seen, None, None)
            }
            Some(AttachProgress::Done) => return,
            Some(AttachProgress::Busy { again, .. }) if now < *again => return,
            Some(AttachProgress::Busy { seen, said, .. }) => (*seen, None, Some(said.clone())),
            Some(AttachProgress::Pending { seen, noted }) => (*seen, noted.clone(), None),
        };
        let (named, is_started) =
            (self.is_named(pid), matches!(self.whom, AttachTargets::Started(_)));
        let is_young = seen.is_young(program.1) || is_started && seen.is_recent();
        let Ok(target) = ProcessHandle::open(pid) else { return };
        let Ok(Inspection { runtime, why_not, .. }) = inspect(&target, None) else { return };
        let is_dotnet =
            matches!(runtime, DetectedRuntime::CoreClr { .. } | DetectedRuntime::SingleFile { .. });
        let has_ours = || {
            let found = finder::find(&target, &|_| false);
            found.is_ok_and(|found| {
                found.regions.iter().any(|region| region.owner() == Some(self.settings.owner))
            })
        };
        let is_starting = || target.threads_called(STARTED, THREADS).is_empty();
        match why_not {
            // It may still become one, or begin to listen. A runtime that is still at its start may
            // be one of an old process that has just executed it. The recording may end before the
            // program is asked again: then this is the reason.
            Some(why @ (AttachObstacle::NotDotnet | AttachObstacle::NoSocket(_)))
                if is_young || is_dotnet && seen.is_recent() && is_starting() =>
            {
                let is_expected = (is_dotnet || named) && !is_started && !has_ours();
                self.unsay(said);
                let reason = is_expected.then(|| format!("process {pid}: {why}"));
                if reason != noted {
                    self.unsay(noted);
                    reason.iter().for_each(|reason| self.note(reason));
                }
                self.looked_at.insert(program, AttachProgress::Pending { seen, noted: reason });
            }
            // It loads the shim by itself, if it has the program's environment: a second one would
            // tell all of it once more.
            None if is_started && (is_young || is_starting()) && !has_ours() => {
                // Nobody looks often for the region of one that has not had any for so long.
                if !is_young {
                    self.watcher.watch(pid);
                }
            }
            Some(why) => {
                self.looked_at.insert(program, AttachProgress::Done);
                self.unsay(said.or(noted));
                // Of a program that was started, most children are native, and so may it be itself.
                let expected = is_dotnet || named && !is_started;
                self.refuse(pid, expected, format!("process {pid}: {why}"));
            }
            None => {
                self.looked_at.insert(program, AttachProgress::Done);
                self.unsay(noted);
                if has_ours() {
                    return self.unsay(said);
                }
                (self.tell)(AttachEvent::Attaching { pid });
                let attached = attach_until(pid, self.settings, &self.give_up);
                if attached.as_ref().is_err_and(|error| !error.is_after_the_request()) {
                    (self.tell)(AttachEvent::NotAsked { pid });
                }
                match attached {
                    Ok(attached) => {
                        self.unsay(said);
                        let (runtime, took) = (&*attached.info.runtime_version, attached.took);
                        (self.tell)(AttachEvent::Attached { pid, runtime, took });
                    }
                    Err(AttachError::Busy(error)) => {
                        let said = said.unwrap_or_else(|| {
                            let reason = format!("{error}; it is asked again");
                            self.refuse(pid, is_dotnet || named, reason.clone());
                            reason
                        });
                        let again = Instant::now() + BUSY;
                        self.looked_at.insert(program, AttachProgress::Busy { seen, again, said });
                    }
                    Err(AttachError::Ended { .. } | AttachError::NoSuchProcess { .. })
                        if !named => {}
                    Err(error) => {
                        self.unsay(said);
                        self.refuse(pid, is_dotnet || named, explain(&error));
                    }
                }
            }
        }
    }

    /// One of the processes that the command line names.
    fn is_named(&self, pid: u32) -> bool {
        match &self.whom {
            AttachTargets::Named(pids) => pids.contains(&pid),
            AttachTargets::Started(root) => *root == pid,
            AttachTargets::Cgroup(_) | AttachTargets::All => false,
        }
    }

    /// Whether the process ran another program when it was looked at last. The reason that was
    /// noted for that one is forgotten.
    fn has_replaced_another(&mut self, program: ProgramId) -> bool {
        let is_earlier = |known: &ProgramId| (known.0, known.1) == (program.0, program.1);
        let earlier: Vec<ProgramId> =
            self.looked_at.keys().copied().filter(|known| is_earlier(known)).collect();
        for known in &earlier {
            if let Some(AttachProgress::Pending { noted, .. }) = self.looked_at.remove(known) {
                self.unsay(noted);
            }
        }
        !earlier.is_empty()
    }

    /// Tells the reason that is only in the comments so far.
    fn tell_noted(&self, pid: u32, progress: AttachProgress) {
        if let AttachProgress::Pending { noted: Some(reason), .. } = progress {
            (self.tell)(AttachEvent::Refused { pid, expected: true, reason });
        }
    }

    fn note(&self, reason: &str) {
        if let Ok(mut reasons) = self.reasons.lock()
            && reasons.len() < 64
        {
            reasons.push(reason.to_owned());
        }
    }

    /// What was noted is not so any more.
    fn unsay(&self, said: Option<String>) {
        if let (Some(said), Ok(mut reasons)) = (said, self.reasons.lock()) {
            reasons.retain(|reason| *reason != said);
        }
    }

    fn refuse(&self, pid: u32, expected: bool, reason: String) {
        if expected {
            self.note(&reason);
        }
        (self.tell)(AttachEvent::Refused { pid, expected, reason });
    }
}

/// The program a process runs: pid, start time, and its executable's device and inode.
pub fn program(pid: u32) -> Option<ProgramId> {
    let start = start_ticks(pid)?;
    // A thread of the kernel has none.
    let file = std::fs::metadata(format!("/proc/{pid}/exe")).ok()?;
    Some((pid, start, file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use super::program;

    #[test]
    fn a_process_is_known_by_its_start_and_its_executable() {
        let me = std::process::id();
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let (mine, theirs) = (program(me).unwrap(), program(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_ne!(Some(mine), theirs);
        assert_eq!(program(child.id()), None);
    }
}
