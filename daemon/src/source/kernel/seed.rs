//! Threads that existed before the recording, from /proc: those no event tells about (sleepers, and threads that never leave their
//! CPU).

use ebpf_common::key::{STATE_BLOCKED, STATE_RUNNING_OR_RUNNABLE};
use rustix::fs::{CWD, OFlags, openat};
use std::fs;
use std::io::Read as _;

/// A thread and its state (`STATE_`) as /proc shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seed {
    pub(super) tid: u32,
    pub(super) state: u32,
}

/// Numbers among the names of a directory of /proc; none when it is gone.
pub(super) fn numbers(directory: &str) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Living threads of `tgid`.
pub(super) fn threads(tgid: u32) -> Vec<Seed> {
    let tids = numbers(&format!("/proc/{tgid}/task"));
    tids.into_iter().filter_map(|tid| Some(Seed { tid, state: state(tgid, tid)? })).collect()
}

/// State of a thread; `None` when it is gone, dead or unreadable.
pub(super) fn state(tgid: u32, tid: u32) -> Option<u32> {
    // One page holds more than the name (15 bytes) and the state behind it.
    let path = format!("/proc/{tgid}/task/{tid}/stat");
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty()).ok()?;
    let mut line = [0; 128];
    let len = fs::File::from(file).read(&mut line).ok()?;
    let line = line.get(..len)?;
    // `pid (name) state …`; the name may hold anything, also `)`.
    let close = line.iter().rposition(|&byte| byte == b')')?;
    match line.get(close + 2)? {
        b'R' => Some(STATE_RUNNING_OR_RUNNABLE),
        b'Z' | b'X' | b'x' => None,
        _ => Some(STATE_BLOCKED),
    }
}

/// How long a thread ran so far, by the scheduler's account as of the last tick; `None` when it is gone, or the kernel keeps no such file.
pub(super) fn ran_ns(tgid: u32, tid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{tgid}/task/{tid}/schedstat")).ok()?;
    text.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{STATE_RUNNING_OR_RUNNABLE, Seed, state, threads};

    #[test]
    fn the_thread_that_asks_is_running() {
        let (pid, tid) = (std::process::id(), rustix::thread::gettid().as_raw_pid().unsigned_abs());
        assert_eq!(state(pid, tid), Some(STATE_RUNNING_OR_RUNNABLE));
        assert!(threads(pid).contains(&Seed { tid, state: STATE_RUNNING_OR_RUNNABLE }));
    }

    #[test]
    fn a_thread_that_is_gone_has_no_state() {
        assert_eq!(state(u32::MAX, u32::MAX), None);
    }
}
