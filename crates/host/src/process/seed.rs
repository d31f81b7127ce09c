//! Threads that existed before the recording, from /proc: those no event tells about (sleepers, and
//! threads that never leave their CPU).

use ebpf_common::key::{STATE_BLOCKED, STATE_RUNNING_OR_RUNNABLE};
use rustix::fs::{CWD, OFlags, openat};
use std::collections::HashSet;
use std::fs;
use std::io::{self, Read as _};

/// A thread and its state (`STATE_`) as /proc shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadSeed {
    /// The thread.
    pub tid: u32,
    /// What it does.
    pub state: u32,
}

/// Numbers among the names of a directory of /proc; none when it is gone.
pub fn numbers(directory: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Living threads of `tgid`.
pub fn threads(tgid: u32) -> Vec<ThreadSeed> {
    let tids = numbers(&format!("/proc/{tgid}/task"));
    tids.into_iter().filter_map(|tid| Some(ThreadSeed { tid, state: state(tgid, tid)? })).collect()
}

/// State of a thread; `None` when it is gone, dead or unreadable.
pub fn state(tgid: u32, tid: u32) -> Option<u32> {
    look_at(tgid, tid).ok().flatten()
}

/// State of a thread; `None` when it is surely gone or dead.
pub fn look_at(tgid: u32, tid: u32) -> io::Result<Option<u32>> {
    // One page holds more than the name (15 bytes) and the state behind it.
    let path = format!("/proc/{tgid}/task/{tid}/stat");
    let mut line = [0; 128];
    let read = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| fs::File::from(file).read(&mut line));
    let len = match read {
        // One that ends while it is read is no such process.
        Err(error) if is_gone(&error) => return Ok(None),
        read => read?,
    };
    // `pid (name) state …`; the name may hold anything, also `)`.
    let line = line.get(..len).unwrap_or_default();
    let close = line.iter().rposition(|&byte| byte == b')');
    match close.and_then(|close| line.get(close + 2)) {
        Some(b'R') => Ok(Some(STATE_RUNNING_OR_RUNNABLE)),
        Some(b'Z' | b'X' | b'x') => Ok(None),
        Some(_) => Ok(Some(STATE_BLOCKED)),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Whether an error of `/proc/PID` means that the process or thread does not exist. Other errors,
/// such as EMFILE, say nothing about it.
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

/// The threads of `tgid`, dead ones too; none when it is gone. Some may be missing while others
/// end.
pub fn tasks(tgid: u32) -> io::Result<HashSet<u32>> {
    let mut tasks = HashSet::new();
    let entries = match fs::read_dir(format!("/proc/{tgid}/task")) {
        Err(error) if is_gone(&error) => return Ok(tasks),
        entries => entries?,
    };
    for entry in entries {
        match entry {
            Ok(entry) => {
                tasks.extend(entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()))
            }
            Err(error) if is_gone(&error) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(tasks)
}

/// Whether /proc can be read at all at this moment: descriptors may have run out.
pub fn is_readable() -> bool {
    fs::File::open("/proc/self/stat").is_ok()
}

/// How long a thread ran so far, by the scheduler's account as of the last tick; `None` when it is
/// gone, or the kernel keeps no such file.
pub fn ran_ns(tgid: u32, tid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{tgid}/task/{tid}/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Whether a thread that was blocked when it had run for `exec_ns` has not run since.
pub(crate) fn still_sleeps(tgid: u32, tid: u32, exec_ns: u64) -> bool {
    // What a thread runs is on its account once it has left its CPU, and this file is not written
    // for one that has not (fs/proc/base.c, `proc_pid_syscall`, which waits for that): it says
    // `running`. So the account is asked for last.
    let place = fs::read(format!("/proc/{tgid}/task/{tid}/syscall"));
    place.is_ok_and(|place| !place.starts_with(b"running")) && ran_ns(tgid, tid) == Some(exec_ns)
}

#[cfg(test)]
mod tests {
    use super::{STATE_RUNNING_OR_RUNNABLE, ThreadSeed, state, threads};

    #[test]
    fn the_thread_that_asks_is_running() {
        let (pid, tid) = (std::process::id(), rustix::thread::gettid().as_raw_pid().unsigned_abs());
        assert_eq!(state(pid, tid), Some(STATE_RUNNING_OR_RUNNABLE));
        assert!(threads(pid).contains(&ThreadSeed { tid, state: STATE_RUNNING_OR_RUNNABLE }));
    }

    #[test]
    fn a_thread_that_runs_or_has_run_since_does_not_sleep_still() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let asleep = || super::ran_ns(pid, pid).filter(|ran| super::still_sleeps(pid, pid, *ran));
        let ran = std::iter::repeat_with(asleep)
            .take_while(|_| std::time::Instant::now() < deadline)
            .flatten()
            .next();
        let since = ran.map(|ran| super::still_sleeps(pid, pid, ran - 1));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(since, Some(false));
        assert!(!super::still_sleeps(pid, pid, ran.unwrap()), "it is gone");
        // Of one that runs, the account is behind.
        let (tell, told) = std::sync::mpsc::channel();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let (own, tid) = (std::process::id(), told.recv().unwrap().cast_unsigned());
            let sleeps = (0..100).any(|_| {
                super::ran_ns(own, tid).is_some_and(|ran| super::still_sleeps(own, tid, ran))
            });
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(!sleeps);
        });
    }

    #[test]
    fn a_thread_that_is_gone_has_no_state() {
        assert_eq!(state(u32::MAX, u32::MAX), None);
    }
}
