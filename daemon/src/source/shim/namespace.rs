//! Thread ids and times as a process sees them → as the initial namespaces do.

use crate::attach::target::Target;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};
use std::collections::HashMap;
use std::io::Read as _;
use std::time::{Duration, Instant};

/// Most threads remembered for one process; the kernel's own limit per user is usually lower.
const THREADS: usize = 65_536;
/// A process that names threads it does not have makes us look no more often than this.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(20);

/// The threads of one process by the ids it uses itself. Ended ones are remembered, for their last records come late.
#[derive(Default)]
pub(super) struct Threads {
    /// Inner tid → tid in the initial namespace.
    outer: HashMap<u32, u32>,
    looked: Option<Instant>,
}

impl Threads {
    /// The id in the initial namespace of the thread the process calls `tid`; `None` when it has no such thread, so that a process
    /// can speak for no thread but its own.
    pub(super) fn outer(&mut self, target: &Target, tid: u32) -> Option<u32> {
        if let Some(&outer) = self.outer.get(&tid) {
            return Some(outer);
        }
        if self.looked.is_some_and(|at| at.elapsed() < LOOK_AGAIN_AFTER) {
            return None;
        }
        self.looked = Some(Instant::now());
        self.look(target);
        self.outer.get(&tid).copied()
    }

    fn look(&mut self, target: &Target) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(tasks) = openat(target.directory(), "task", flags, Mode::empty()) else { return };
        let Ok(entries) = Dir::read_from(&tasks) else { return };
        if self.outer.len() >= THREADS {
            self.outer.clear();
        }
        let nested = target.is_in_pid_namespace();
        for entry in entries.map_while(Result::ok).take(THREADS) {
            let Some(outer) = entry.file_name().to_str().ok().and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            let inner = if nested { target.namespace_tid(outer) } else { Some(outer) };
            if let Some(inner) = inner {
                self.outer.insert(inner, outer);
            }
        }
    }
}

/// What to subtract from the process's CLOCK_MONOTONIC to get the initial time namespace's, in nanoseconds.
pub(super) fn monotonic_offset_ns(target: &Target) -> i64 {
    let same = |name: &str| {
        let flags = AtFlags::empty();
        let theirs = statat(target.directory(), format!("ns/{name}"), flags);
        let ours = statat(rustix::fs::CWD, format!("/proc/self/ns/{name}"), flags);
        matches!((theirs, ours), (Ok(a), Ok(b)) if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
    };
    // No time namespaces in this kernel, or the same one: most processes.
    if readlinkat(target.directory(), "ns/time", Vec::new()).is_err() || same("time") {
        return 0;
    }
    let mut text = String::new();
    let read = target.file("timens_offsets").map(|file| file.take(4096).read_to_string(&mut text));
    if !matches!(read, Ok(Ok(_))) {
        return 0;
    }
    parse_monotonic_offset(&text).unwrap_or(0)
}

/// Reads `monotonic   -1234   5678` (seconds, nanoseconds) of time_namespaces(7).
fn parse_monotonic_offset(text: &str) -> Option<i64> {
    let mut fields = text.lines().find_map(|line| line.strip_prefix("monotonic"))?.split_ascii_whitespace();
    let seconds: i64 = fields.next()?.parse().ok()?;
    let nanos: i64 = fields.next()?.parse().ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::{Threads, monotonic_offset_ns, parse_monotonic_offset};
    use crate::attach::target::Target;

    #[test]
    fn a_process_has_its_own_threads_and_no_others() {
        let me = Target::open(std::process::id()).unwrap();
        let mine = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        let mut threads = Threads::default();
        let inner = me.namespace_tid(mine).unwrap();
        assert_eq!(threads.outer(&me, inner), Some(mine));
        // No thread of this process has the id of its parent.
        assert_eq!(threads.outer(&me, std::os::unix::process::parent_id()), None);
        assert_eq!(monotonic_offset_ns(&me), 0);
    }

    #[test]
    fn offsets_are_read_as_the_kernel_prints_them() {
        assert_eq!(
            parse_monotonic_offset("monotonic           -5         250\nboottime 0 0\n"),
            Some(-4_999_999_750)
        );
        assert_eq!(parse_monotonic_offset("monotonic 99999999999999999 0"), None);
        assert_eq!(parse_monotonic_offset(""), None);
    }
}
