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
pub mod mapping;
pub mod memory;
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
pub use image::{ExecutableImage, ImageError};
pub use rule_update::RuleUpdate;
pub use table::{ProcessIdentity, ProcessTable};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
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

/// What the kernel says of a process in `/proc/PID/stat`; `None` when there is no such process.
#[must_use]
pub fn stat(pid: u32) -> Option<procfs::process::Stat> {
    let pid = i32::try_from(pid).ok()?;
    procfs::process::Process::new(pid).and_then(|process| process.stat()).ok()
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
    let lives = |tid: &u32| seed::state(pid, *tid).is_some();
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
/// that waits for its parent.
#[must_use]
pub fn is_running(pid: u32, start_ticks: Option<u64>) -> bool {
    let lives = |state| !matches!(state, 'Z' | 'X') || living_thread(pid).is_some();
    stat(pid).is_some_and(|stat| Some(stat.starttime) == start_ticks && lives(stat.state))
}

/// A process whose end is waited for by asking again and again. What `/proc` says of it costs the
/// kernel a look at each of its threads (`do_task_stat`, fs/proc/array.c); its pidfd tells at once
/// that it has not ended.
pub struct ExitPoller {
    pid: u32,
    start_ticks: Option<u64>,
    /// `None` where the kernel gives none.
    pidfd: Option<OwnedFd>,
}

impl ExitPoller {
    /// The process that has `pid` now.
    pub fn new(pid: u32) -> Self {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = raw.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { pid, start_ticks: start_ticks(pid), pidfd }
    }

    /// As [`is_running`].
    pub fn is_running(&self) -> bool {
        let lives = |pidfd: &OwnedFd| {
            let none = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&none)) == Ok(0)
        };
        // Where it tells of an end it may be too early: that of a first thread whose place another
        // one takes in `execve` (kernels before 6.15).
        self.pidfd.as_ref().is_some_and(lives) || is_running(self.pid, self.start_ticks)
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
    use super::{ExitPoller, all_pids, is_running, start_ticks, stat};
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
