//! Thread ids and times as a process sees them → as the initial namespaces do.

use crate::attach::target::Target;
use crate::source::MonotonicNs;
use profiler_protocol::request::NEVER_SEEN;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};
use rustix::io::Errno;
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

/// How a process's CLOCK_MONOTONIC differs from the initial time namespace's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Offset {
    /// What to subtract, in nanoseconds.
    pub(super) ns: i64,
    /// False when it could not be found out.
    pub(super) known: bool,
}

impl Offset {
    /// A time as a question tells it to the process.
    pub(super) fn told(self, seen: MonotonicNs) -> u64 {
        let told = seen.0.wrapping_add_signed(self.ns);
        if self.known && seen.0 != 0 { told.max(NEVER_SEEN) } else { NEVER_SEEN }
    }

    /// The time that was told so; later than all others when it could not be told.
    pub(super) fn seen(self, told: u64) -> MonotonicNs {
        match (self.known, told) {
            (true, NEVER_SEEN) => MonotonicNs(0),
            (true, 1..) => MonotonicNs(told.wrapping_sub(self.ns.cast_unsigned())),
            _ => MonotonicNs(u64::MAX),
        }
    }
}

/// Finds out.
pub(super) fn monotonic_offset(target: &Target) -> Offset {
    let inode = |name: &str| {
        let found = statat(target.directory(), format!("ns/{name}"), AtFlags::empty()).ok()?;
        Some((found.st_dev, found.st_ino))
    };
    let ours = statat(rustix::fs::CWD, "/proc/self/ns/time", AtFlags::empty());
    // No time namespaces in this kernel, or the same one: most processes.
    if readlinkat(target.directory(), "ns/time", Vec::new()) == Err(Errno::NOENT)
        || ours.is_ok_and(|ours| inode("time") == Some((ours.st_dev, ours.st_ino)))
    {
        return Offset { ns: 0, known: true };
    }
    // The file tells of the namespace that children get (fs/proc/base.c, `proc_timens_show_offsets`).
    let own = inode("time").is_some() && inode("time") == inode("time_for_children");
    let mut text = String::new();
    let read = target.file("timens_offsets").map(|file| file.take(4096).read_to_string(&mut text));
    let found = matches!(read, Ok(Ok(_))).then(|| parse_monotonic_offset(&text)).flatten();
    Offset { ns: found.unwrap_or(0), known: own && found.is_some() }
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
    use super::{MonotonicNs, NEVER_SEEN, Offset, Threads, monotonic_offset, parse_monotonic_offset};
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
        assert_eq!(monotonic_offset(&me), Offset { ns: 0, known: true });
    }

    #[test]
    fn what_cannot_be_told_is_told_as_never_and_not_told_again() {
        let offset = Offset { ns: -5, known: true };
        assert_eq!((offset.told(MonotonicNs(0)), offset.told(MonotonicNs(100))), (NEVER_SEEN, 95));
        assert_eq!((offset.seen(NEVER_SEEN), offset.seen(95)), (MonotonicNs(0), MonotonicNs(100)));
        assert_eq!(offset.seen(0), MonotonicNs(u64::MAX), "a shim that takes no times");
        let unknown = Offset { ns: 5, known: false };
        assert_eq!(unknown.told(MonotonicNs(100)), NEVER_SEEN);
        assert_eq!(unknown.seen(NEVER_SEEN), MonotonicNs(u64::MAX));
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
