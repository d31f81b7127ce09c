//! The kernel's own account of how long each thread of a process was on a CPU, or waited for one,
//! to compare profiles with.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use crate::wait::let_pass;

/// What the kernel says of one thread; ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// It was on a CPU.
    pub oncpu: i64,
    /// It waited on a run queue, by the waits for a CPU that are over.
    pub delayed: i64,
}

/// The account of each thread, by /proc/PID/task/TID/schedstat; without the threads that are gone.
pub fn schedstat(pid: u32) -> BTreeMap<u32, Account> {
    let mut times = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let path = entry.path();
        let tid =
            path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
        let account = fs::read_to_string(path.join("schedstat")).ok().and_then(|text| {
            let mut values = text.split(' ').map(|value| value.parse().ok());
            Some(Account { oncpu: values.next()??, delayed: values.next()?? })
        });
        if let (Some(tid), Some(account)) = (tid, account) {
            times.insert(tid, account);
        }
    }
    times
}

/// How often a thread has gone to sleep by itself; `None` when it is gone.
pub fn sleeps(pid: u32, tid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line?.trim().parse().ok()
}

/// Now, as profiles state times.
fn wall_clock_ns() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// One look at schedstat of every thread.
#[derive(Debug)]
struct Look {
    /// Wall-clock time before it and after it; ns.
    taken: (i64, i64),
    accounts: BTreeMap<u32, Account>,
}

/// What schedstat said of every thread from time to time. Kept in the background, so that any
/// interval can be cut out later.
#[derive(Debug)]
pub struct Log {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Looks>,
}

/// The looks of a [`Log`], oldest first.
#[derive(Debug, Default)]
pub struct Looks(Vec<Look>);

impl Log {
    /// Begins to look at a process every 10 ms.
    pub fn start(pid: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut log = Vec::new();
            loop {
                // Asked before the last look, so that one comes after everything the caller did.
                let last = stopping.load(Ordering::Relaxed);
                let begin = wall_clock_ns();
                let accounts = schedstat(pid);
                log.push(Look { taken: (begin, wall_clock_ns()), accounts });
                if last {
                    return Looks(log);
                }
                let_pass(Duration::from_millis(10));
            }
        });
        Self { stop, thread }
    }

    /// Ends it.
    pub fn stop(self) -> Looks {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

impl Looks {
    /// Least and most time a thread can have had on a CPU until a moment: what the last look before
    /// it and the first after it said. `None` without such looks or when the thread was not there.
    pub fn oncpu_at(&self, tid: u32, moment: i64) -> Option<(i64, i64)> {
        let before = self.0.iter().rfind(|look| look.taken.1 <= moment)?;
        let after = self.0.iter().find(|look| look.taken.0 >= moment)?;
        Some((before.accounts.get(&tid)?.oncpu, after.accounts.get(&tid)?.oncpu))
    }

    /// Least and most time a thread can have had on a CPU between two moments.
    pub fn oncpu_between(&self, tid: u32, begin: i64, end: i64) -> Option<(i64, i64)> {
        let (from, to) = (self.oncpu_at(tid, begin)?, self.oncpu_at(tid, end)?);
        Some(((to.0 - from.1).max(0), to.1 - from.0))
    }

    /// Most time a thread can have had or wanted a CPU between two moments. That it waits for one
    /// is noted only when it gets it: so this is taken until the last look.
    pub fn wanted_cpu_between(&self, tid: u32, begin: i64, end: i64) -> Option<i64> {
        let (_, most) = self.oncpu_between(tid, begin, end)?;
        let before = self.0.iter().rfind(|look| look.taken.1 <= begin)?.accounts.get(&tid)?;
        Some(most + self.0.last()?.accounts.get(&tid)?.delayed - before.delayed)
    }
}
