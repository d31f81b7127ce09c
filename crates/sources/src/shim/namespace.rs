//! Thread ids and times as a process sees them → as the initial namespaces do.

use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::backoff::Backoff;
use perfusion_model::event::MonotonicNs;
use profiler_protocol::request::NEVER_SEEN;
use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::io::Read as _;
use std::time::{Duration, Instant};

/// Most threads remembered for one process, and looked at; the kernel's own limit per user is
/// usually lower.
const THREADS: usize = 65_536;
/// Threads whose ids are read in one look, each from a file of its own. The next look goes on.
const READ_AT_ONCE: usize = 1_024;
/// A process that names threads it does not have makes us look no more often than this at first,
/// ...
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(20);
/// ... then less and less often up to this, and never for more than this part of the time: whoever
/// looks has other processes to serve.
const LOOK_AGAIN_AT_LAST: Duration = Duration::from_millis(160);
const PART_OF_TIME: u32 = 20;
/// Ids are used again: what is known is read anew, but no more often than this, when a thread is
/// not found.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// The threads of one process by the ids it uses itself. Ended ones are remembered, for their last
/// records come late.
pub(super) struct NamespaceThreads {
    /// Inner tid → tid in the initial namespace.
    outer: HashMap<u32, u32>,
    /// Tids of the initial namespace whose inner ones have been read.
    read: HashSet<u32>,
    /// Whether the process lives in a pid namespace of its own, which never changes.
    nested: Option<bool>,
    next_look: Option<Instant>,
    pause: Backoff,
    read_again: Option<Instant>,
}

impl Default for NamespaceThreads {
    fn default() -> Self {
        Self {
            outer: HashMap::new(),
            read: HashSet::new(),
            nested: None,
            next_look: None,
            pause: Backoff::new(LOOK_AGAIN_AFTER, LOOK_AGAIN_AT_LAST),
            read_again: None,
        }
    }
}

impl NamespaceThreads {
    /// The id in the initial namespace of the thread the process calls `tid`; `None` when it has no
    /// such thread, so that a process can speak for no thread but its own.
    pub(super) fn outer(&mut self, target: &ProcessHandle, tid: u32) -> Option<u32> {
        if let Some(&outer) = self.outer.get(&tid) {
            return Some(outer);
        }
        if self.outer.len() >= THREADS {
            self.outer.clear();
            self.read.clear();
        }
        if !*self.nested.get_or_insert_with(|| target.is_in_pid_namespace()) {
            statat(target.directory(), format!("task/{tid}"), AtFlags::empty()).ok()?;
            self.outer.insert(tid, tid);
            return Some(tid);
        }
        let began = Instant::now();
        if self.next_look.is_some_and(|next| began < next) {
            return None;
        }
        let complete = self.look(target, &mut |outer| target.namespace_tid(outer));
        let found = self.outer.get(&tid).copied();
        let now = Instant::now();
        if found.is_none() && complete {
            self.pause.failed();
        } else {
            self.pause.reset();
        }
        let took = now.saturating_duration_since(began);
        self.next_look = Some(now + self.pause.delay().max(took * PART_OF_TIME));
        if complete && found.is_none() && self.read_again.is_none_or(|at| now >= at) {
            self.read_again = Some(now + READ_AGAIN_AFTER);
            self.read.clear();
        }
        found
    }

    /// Looks at the threads there are; what is known of one is not read again. False when there
    /// were too many for one look.
    fn look(
        &mut self,
        target: &ProcessHandle,
        inner_id: &mut dyn FnMut(u32) -> Option<u32>,
    ) -> bool {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(tasks) = openat(target.directory(), "task", flags, Mode::empty()) else {
            return true;
        };
        let Ok(entries) = Dir::read_from(&tasks) else { return true };
        let ids = entries
            .map_while(Result::ok)
            .take(THREADS)
            .filter_map(|entry| entry.file_name().to_str().ok()?.parse::<u32>().ok());
        let mut read = 0;
        for outer in ids {
            if self.read.contains(&outer) {
                continue;
            }
            if read == READ_AT_ONCE {
                return false;
            }
            read += 1;
            // One that has ended meanwhile is not there at the next look.
            if let Some(inner) = inner_id(outer) {
                self.outer.insert(inner, outer);
                self.read.insert(outer);
            }
        }
        true
    }
}

/// How a process's CLOCK_MONOTONIC differs from the initial time namespace's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ClockOffset {
    /// What to subtract, in nanoseconds.
    pub(super) ns: i64,
    /// False when it could not be found out.
    pub(super) known: bool,
}

impl ClockOffset {
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
pub(super) fn monotonic_offset(target: &ProcessHandle) -> ClockOffset {
    let inode = |name: &str| {
        let found =
            statat(target.directory(), target.in_common(&format!("ns/{name}")), AtFlags::empty())
                .ok()?;
        Some((found.st_dev, found.st_ino))
    };
    let ours = statat(rustix::fs::CWD, "/proc/self/ns/time", AtFlags::empty());
    // No time namespaces in this kernel, or the same one: most processes.
    if readlinkat(target.directory(), target.in_common("ns/time"), Vec::new()) == Err(Errno::NOENT)
        || ours.is_ok_and(|ours| inode("time") == Some((ours.st_dev, ours.st_ino)))
    {
        return ClockOffset { ns: 0, known: true };
    }
    // The file tells of the namespace that children get (fs/proc/base.c,
    // `proc_timens_show_offsets`).
    let own = inode("time").is_some() && inode("time") == inode("time_for_children");
    let mut text = String::new();
    let read = target.file("timens_offsets").map(|file| file.take(4096).read_to_string(&mut text));
    let found = matches!(read, Ok(Ok(_))).then(|| parse_monotonic_offset(&text)).flatten();
    ClockOffset { ns: found.unwrap_or(0), known: own && found.is_some() }
}

/// Reads `monotonic   -1234   5678` (seconds, nanoseconds) of time_namespaces(7).
fn parse_monotonic_offset(text: &str) -> Option<i64> {
    let mut fields =
        text.lines().find_map(|line| line.strip_prefix("monotonic"))?.split_ascii_whitespace();
    let seconds: i64 = fields.next()?.parse().ok()?;
    let nanos: i64 = fields.next()?.parse().ok()?;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::{
        ClockOffset, MonotonicNs, NEVER_SEEN, NamespaceThreads, monotonic_offset,
        parse_monotonic_offset,
    };
    use perfusion_host::process::handle::ProcessHandle;

    #[test]
    fn a_process_has_its_own_threads_and_no_others() {
        let me = ProcessHandle::open(std::process::id()).unwrap();
        let mine = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        let mut threads = NamespaceThreads::default();
        let inner = me.namespace_tid(mine).unwrap();
        assert_eq!(threads.outer(&me, inner), Some(mine));
        // No thread of this process has the id of its parent.
        assert_eq!(threads.outer(&me, std::os::unix::process::parent_id()), None);
        assert_eq!(monotonic_offset(&me), ClockOffset { ns: 0, known: true });
    }

    /// As for a process in a pid namespace, where every thread's file must be read.
    #[test]
    fn a_thread_is_read_once_and_one_that_is_not_there_is_not_looked_for_all_the_time() {
        let me = ProcessHandle::open(std::process::id()).unwrap();
        let mut threads = NamespaceThreads { nested: Some(true), ..NamespaceThreads::default() };
        let mut read = Vec::new();
        threads.look(&me, &mut |outer| {
            read.push(outer);
            me.namespace_tid(outer)
        });
        let mine = u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        assert!(read.contains(&mine));
        let (tell, told) = std::sync::mpsc::channel();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let new = std::thread::spawn(move || {
            tell.send(u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap())
                .unwrap();
            stopped.recv().ok();
        });
        let new_one = told.recv().unwrap();
        let mut read_now = Vec::new();
        threads.look(&me, &mut |outer| {
            read_now.push(outer);
            me.namespace_tid(outer)
        });
        // Other tests' threads come and go.
        assert!(read_now.contains(&new_one) && !read_now.contains(&mine), "{read_now:?}");
        assert_eq!(threads.outer(&me, new_one), Some(new_one));

        let nobody = std::os::unix::process::parent_id();
        let begin = std::time::Instant::now();
        let mut looks = Vec::new();
        while looks.len() < 4 {
            let before = threads.next_look;
            assert_eq!(threads.outer(&me, nobody), None);
            if threads.next_look != before {
                looks.push(begin.elapsed().as_millis());
            }
            assert!(begin.elapsed().as_secs() < 60, "{looks:?}");
        }
        // At 0, 40, 120, 280 ms; later where the machine is busy.
        assert!(looks.iter().zip([0, 40, 120, 280]).all(|(look, due)| *look >= due), "{looks:?}");
        drop(stop);
        new.join().unwrap();
    }

    #[test]
    fn what_cannot_be_told_is_told_as_never_and_not_told_again() {
        let offset = ClockOffset { ns: -5, known: true };
        assert_eq!((offset.told(MonotonicNs(0)), offset.told(MonotonicNs(100))), (NEVER_SEEN, 95));
        assert_eq!((offset.seen(NEVER_SEEN), offset.seen(95)), (MonotonicNs(0), MonotonicNs(100)));
        assert_eq!(offset.seen(0), MonotonicNs(u64::MAX), "a shim that takes no times");
        let unknown = ClockOffset { ns: 5, known: false };
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
