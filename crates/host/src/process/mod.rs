//! A live view of processes: their epochs, mappings and mapped files. It finishes the stacks of
//! their threads with the crate `unwind`. No symbols here.

mod address_space;
pub mod budget;
mod byte_source;
mod cached_bodies;
mod cached_steps;
mod code_cache;
mod code_view;
pub mod container;
mod counters;
mod elf;
pub mod elf_symbol;
mod elf_unwind;
pub mod explain;
pub mod guarded_io;
pub mod handle;
pub mod headroom;
pub mod hierarchy;
mod image;
pub mod images;
mod interned_rules;
mod live;
pub mod managed_thread;
pub mod mapped_file;
pub mod mapping;
pub mod memory;
mod memory_images;
pub mod name;
mod pe;
mod proc_maps;
mod published;
mod pushed_rules;
mod rule_update;
pub mod seed;
pub mod service;
pub mod survival;
pub mod table;
pub mod thread_contexts;
mod thread_variable;
mod walked_stacks;

pub use counters::ProcessTableCounters;
pub use elf::find_build_id;
pub use handle::open_regular;
pub use image::{ExecutableImage, ImageError};
pub use rule_update::RuleUpdate;
pub use table::{ProcessIdentity, ProcessTable};

use procfs::ProcError;
use procfs::process::Stat;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Start time of a process in clock ticks since boot: with the pid, it tells a process from a later
/// one with the same pid. `None` when there is no such process.
#[must_use]
pub fn start_ticks(pid: u32) -> Option<u64> {
    stat(pid).map(|stat| stat.starttime)
}

/// The [`start_ticks`] of a process that began so long ago.
#[must_use]
pub fn ticks_before_now(ago: Duration) -> u64 {
    let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(boot.tv_sec).unwrap_or(0);
    let up = Duration::new(seconds, u32::try_from(boot.tv_nsec).unwrap_or(0));
    let ticks = up.saturating_sub(ago).as_millis()
        * u128::from(rustix::param::clock_ticks_per_second())
        / 1000;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}

/// What the kernel says of a process in `/proc/PID/stat`; `None` when there is no such process, or
/// it cannot be read.
#[must_use]
pub fn stat(pid: u32) -> Option<Stat> {
    read_stat(pid).ok().flatten()
}

/// What the kernel says of a process in `/proc/PID/stat`; `None` when there is no such process.
///
/// # Errors
/// When that cannot be known: EMFILE, or a `/proc` that hides the processes of others.
pub fn read_stat(pid: u32) -> io::Result<Option<Stat>> {
    let Ok(number) = i32::try_from(pid) else { return Ok(None) };
    match procfs::process::Process::new(number).and_then(|process| process.stat()) {
        Ok(stat) => Ok(Some(stat)),
        Err(ProcError::NotFound(_)) if is_hidden(pid) => Err(Errno::ACCESS.into()),
        Err(ProcError::NotFound(_)) => Ok(None),
        Err(ProcError::PermissionDenied(_)) => Err(Errno::ACCESS.into()),
        Err(ProcError::Io(error, _)) if seed::is_gone(&error) => Ok(None),
        Err(ProcError::Io(error, _)) => Err(error),
        Err(error) => Err(io::Error::other(error.to_string())),
    }
}

/// True for a process that exists, though `/proc` does not show it to this user (its mount option
/// `hidepid`). The kernel makes a pidfd of any process without asking who wants it.
#[must_use]
pub fn is_hidden(pid: u32) -> bool {
    let is_shown = || match std::fs::metadata(format!("/proc/{pid}")) {
        Ok(_) => true,
        Err(error) => !seed::is_gone(&error),
    };
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    !is_shown()
        && raw.is_some_and(|pid| pidfd_open(pid, PidfdFlags::empty()).is_ok())
        && !is_shown()
}

/// The pids of all processes.
///
/// # Errors
/// When `/proc` cannot be listed.
pub fn all_pids() -> io::Result<Vec<u32>> {
    let entries = std::fs::read_dir("/proc")?.map_while(Result::ok);
    Ok(entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// A thread of the process that has not ended: its first one, where that lives. It may end before
/// the others (`pthread_exit` in `main`), and is a zombie until the last of them has: so is a
/// process all of whose threads have.
#[must_use]
pub fn living_thread(pid: u32) -> Option<u32> {
    let lives = |tid: &u32| !matches!(seed::look_at(pid, *tid), Ok(None));
    let others = || seed::numbers(&format!("/proc/{pid}/task")).into_iter();
    Some(pid).filter(lives).or_else(|| others().find(lives))
}

/// Where /proc shows what the threads of a process have in common while they live, its memory and
/// its root: a thread that has ended has none of it any more (`do_exit`, kernel/exit.c).
pub fn in_common(pid: u32) -> String {
    match living_thread(pid) {
        Some(other) if other != pid => format!("/proc/{pid}/task/{other}"),
        _ => format!("/proc/{pid}"),
    }
}

/// True while the process that began at `start_ticks` runs: not gone, not replaced, not a zombie
/// that waits for its parent. One that cannot be looked at is not known to have ended, so it runs.
#[must_use]
pub fn is_running(pid: u32, start_ticks: Option<u64>) -> bool {
    runs(pid, |found| Some(found) == start_ticks)
}

fn runs(pid: u32, is_it: impl Fn(u64) -> bool) -> bool {
    let lives = |state| !matches!(state, 'Z' | 'X') || living_thread(pid).is_some();
    match read_stat(pid) {
        Ok(Some(stat)) => is_it(stat.starttime) && lives(stat.state),
        Ok(None) => false,
        Err(_) => true,
    }
}

/// A process whose end is waited for by asking again and again. What `/proc` says of it costs the
/// kernel a look at each of its threads (`do_task_stat`, fs/proc/array.c); its pidfd tells at once
/// that it has not ended.
pub struct ExitPoller {
    pid: u32,
    /// An error where it could not be read.
    start_ticks: io::Result<Option<u64>>,
    /// `None` where the kernel gives none.
    pidfd: Option<OwnedFd>,
}

impl ExitPoller {
    /// The process that has `pid` now.
    pub fn new(pid: u32) -> Self {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = raw.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let start_ticks = read_stat(pid).map(|stat| stat.map(|stat| stat.starttime));
        Self { pid, start_ticks, pidfd }
    }

    /// As [`is_running`].
    pub fn is_running(&self) -> bool {
        let lives = |pidfd: &OwnedFd| {
            let none = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&none)) == Ok(0)
        };
        // Where it tells of an end it may be too early: that of a first thread whose place another
        // one takes in `execve` (kernels before 6.15).
        self.pidfd.as_ref().is_some_and(lives)
            || runs(self.pid, |found| match self.start_ticks {
                Ok(began) => began == Some(found),
                Err(_) => true,
            })
    }
}

/// Why a process could not be taken up.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// There is no such process.
    #[error("pid {pid}: no such process; `perfusion ps` lists what there is")]
    Gone {
        /// The pid.
        pid: u32,
    },
    /// Its mappings could not be read.
    #[error("pid {pid}: cannot read {path}: {source}{}", advice(source))]
    Read {
        /// The pid.
        pid: u32,
        /// The file in /proc.
        path: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The table is full.
    #[error("pid {pid}: more than {limit} processes")]
    Full {
        /// The pid.
        pid: u32,
        /// Most processes there may be.
        limit: usize,
    },
}

/// What to do about it, where that is known.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; it is another user's, or has privileges of its own: run perfusion as root"
        }
        io::ErrorKind::TimedOut => "; whoever serves its memory does not answer: try again",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::handle::ProcessHandle;
    use super::{
        ExitPoller, ProcessError, ProcessTable, all_pids, is_hidden, is_running, living_thread,
        read_stat, start_ticks, stat,
    };
    use rustix::io::Errno;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::fs::File;
    use std::process::{Command, Stdio};

    #[test]
    fn this_process_is_among_those_that_run() {
        let me = std::process::id();
        assert!(all_pids().unwrap().contains(&me));
        let stat = stat(me).unwrap();
        assert_eq!(u32::try_from(stat.ppid), Ok(std::os::unix::process::parent_id()));
        assert_eq!(Some(stat.starttime), start_ticks(me));
        assert!(is_running(me, Some(stat.starttime)) && !is_running(me, Some(stat.starttime + 1)));
    }

    /// Runs one test of this file in a program of its own, whose limits are no other test's.
    fn alone(test: &str) -> String {
        const VARIABLE: &str = "PERFUSION_TEST_ALONE";
        if std::env::var_os(VARIABLE).is_some() {
            return String::new();
        }
        let path = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
        let run = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &path, "--nocapture"])
            .env(VARIABLE, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stdout).into_owned();
        assert!(run.status.success(), "{said}{}", String::from_utf8_lossy(&run.stderr));
        said
    }

    #[test]
    fn a_process_that_cannot_be_looked_at_is_not_taken_to_have_ended() {
        let said = alone("a_process_that_cannot_be_looked_at_is_not_taken_to_have_ended");
        if !said.is_empty() {
            assert!(said.contains("1 passed"), "{said}");
            return;
        }
        let me = std::process::id();
        let (handle, ticks) = (ProcessHandle::open(me).unwrap(), start_ticks(me));
        let limit = Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) };
        setrlimit(Resource::Nofile, limit).unwrap();
        let held: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        let errno = read_stat(me).unwrap_err().raw_os_error();
        assert!(handle.is_alive() && is_running(me, ticks) && living_thread(me).is_some());
        let poller = ExitPoller::new(me);
        assert!(poller.pidfd.is_none() && poller.is_running() && !is_hidden(me));
        let adopted = ProcessTable::new().adopt(me);
        drop(held);
        // Of one that began while nothing could be read, the start is not known.
        assert!(poller.is_running());
        assert_eq!(errno, Some(Errno::MFILE.raw_os_error()));
        assert!(matches!(adopted, Err(ProcessError::Read { .. })), "{adopted:?}");
    }

    #[test]
    fn a_process_is_over_when_it_has_ended_and_not_before() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let awaited = ExitPoller::new(child.id());
        assert!(awaited.pidfd.is_some() && awaited.is_running());
        drop(child.stdin.take());
        // A zombie has ended, however long nobody asks for it.
        while awaited.is_running() {
            std::thread::yield_now();
        }
        assert!(stat(child.id()).is_some_and(|stat| stat.state == 'Z'));
        child.wait().unwrap();
        assert!(!awaited.is_running());
    }
}
