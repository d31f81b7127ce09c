//! Guarded I/O: calls that a profiled process can block for ever, made by threads that can be
//! abandoned.
//!
//! A page of a file comes from its file system, which may be a process too (FUSE) and need not
//! answer. A thread that waits for such a page cannot be woken, not even by SIGKILL. It may hold
//! the lock of the page's address space. Then every reader of that process's mappings or command
//! line waits too. So a thread with other work never makes such a call. A worker thread makes it,
//! and the caller waits for a moment. After that the worker is abandoned, and the next call gets
//! another one. The process or file system is not asked again until the worker has ended, nor for a
//! minute. The minute does not apply if the call did not sleep, because a busy machine delays calls
//! too. Each abandoned call shortens the time that the next ones may take.
//!
//! A server that answers just in time delays the daemon as well. So the time that calls have slept
//! is accounted. When all calls of a minute together have slept for [`MAX_HELD`], the process or
//! file system with the most of it is not asked for a minute either. The more of them are avoided,
//! the less it takes. So one file system delays the daemon by a few seconds a minute, and all that
//! may be avoided together by half of the time at most. Time that a call computes, or waits for a
//! CPU, does not count here: each process has a share of that work (`budget`).

use crate::abandoned::AbandonedThreads;
use std::cell::{Cell, OnceCell};
use std::collections::{HashMap, HashSet};
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a call may sleep when none is held up. Pages that are swapped out take milliseconds.
const SLEEP_LIMIT: Duration = Duration::from_millis(500);
/// How many times that a call is waited for that does not sleep: it computes (the list of 65,000
/// mappings), or has no CPU to do so.
const AT_WORK: u32 = 10;
/// How long whoever held a call up is not asked again.
const BARRED: Duration = Duration::from_secs(60);
/// Most threads abandoned; with so many, whatever can be held up is not done any more.
const MAX_ABANDONED: usize = 256;
/// How much time all calls of a minute together may have slept while nobody is avoided.
const MAX_HELD: Duration = Duration::from_secs(5);
/// How long an account goes on.
const ACCOUNT: Duration = Duration::from_secs(60);
/// Less than this is in no account, and most of those who have one.
const LEAST_HELD: Duration = Duration::from_micros(100);
const MAX_ACCOUNTS: usize = 4096;
/// Idle threads kept.
const MAX_IDLE: usize = 4;
/// A thread does nothing but one system call.
const STACK_BYTES: usize = 128 << 10;

/// Who can hold a call up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoPeer {
    /// A process, by its pid: its memory, its mappings, or a file that is not open yet.
    Process(u32),
    /// The server of a file system, by its device number.
    Device(u64),
}

type IoTask = Box<dyn FnOnce() + Send>;

/// What the callers share.
struct WaitLimit {
    /// Made when the first asks.
    threads: Mutex<Option<IoThreads>>,
    // Counts, which no other memory depends on.
    given_up: AtomicU64,
    not_made: AtomicU64,
    barred_slow: AtomicU64,
}

/// That of all callers; tests of how it works have their own, since whoever holds up one test's
/// calls shortens the timeout of all.
static OF_ALL: WaitLimit = WaitLimit::new();

#[derive(Default)]
struct IoThreads {
    /// Threads that wait for work.
    idle: Vec<IoThread>,
    /// Those at calls that were given up.
    abandoned: AbandonedThreads<IoPeer>,
    /// Who held calls up is not asked again before this moment, nor before its threads have ended.
    barred: HashMap<IoPeer, Instant>,
    accounts: PeerDelays,
}

/// A thread that does what it is handed. It ends when nobody can hand it anything any more.
struct IoThread {
    tasks: Sender<IoTask>,
    thread: JoinHandle<()>,
}

/// How long the calls of the others have slept.
#[derive(Default)]
struct PeerDelays {
    since: Option<Instant>,
    held: HashMap<IoPeer, Duration>,
    /// All of them.
    sum: Duration,
}

impl PeerDelays {
    /// A call of `holder` has slept for so long. Who is to be avoided, when so many are already.
    fn add(
        &mut self,
        holder: IoPeer,
        held: Duration,
        barred: usize,
        now: Instant,
    ) -> Option<IoPeer> {
        if held < LEAST_HELD {
            return None;
        }
        if self.since.is_none_or(|since| now.duration_since(since) >= ACCOUNT) {
            *self = Self { since: Some(now), ..Self::default() };
        }
        if self.held.len() >= MAX_ACCOUNTS
            && !self.held.contains_key(&holder)
            && let Some(least) =
                self.held.iter().min_by_key(|(_, held)| **held).map(|(holder, _)| *holder)
        {
            self.close(least);
        }
        *self.held.entry(holder).or_default() += held;
        self.sum += held;
        if self.sum < share(MAX_HELD, barred) {
            return None;
        }
        let most = self.held.iter().max_by_key(|(_, held)| **held).map(|(holder, _)| *holder)?;
        self.close(most);
        Some(most)
    }

    fn close(&mut self, holder: IoPeer) {
        self.sum = self.sum.saturating_sub(self.held.remove(&holder).unwrap_or_default());
    }
}

/// What there is of something when so many are avoided.
fn share(whole: Duration, barred: usize) -> Duration {
    whole / u32::try_from(barred).unwrap_or(u32::MAX).saturating_add(1)
}

/// What a thread has had so far.
struct CallTimes {
    at: Instant,
    cpu: Duration,
    /// It could run but had no CPU.
    queued: Duration,
}

impl CallTimes {
    fn now() -> Self {
        Self { at: Instant::now(), cpu: thread_time(), queued: queued_time().unwrap_or_default() }
    }

    /// Since then: CPU time, and time asleep.
    fn since(&self) -> (Duration, Duration) {
        let now = Self::now();
        let cpu = now.cpu.saturating_sub(self.cpu);
        let queued = now.queued.saturating_sub(self.queued);
        (cpu, now.at.duration_since(self.at).saturating_sub(cpu + queued))
    }
}

/// CPU time of this thread.
pub(super) fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// How long this thread has waited for a CPU: the second number of `schedstat`, which counts when
/// it gets one.
fn queued_time() -> Option<Duration> {
    thread_local!(static STATS: OnceCell<Option<File>> = const { OnceCell::new() });
    let mut text = [0; 64];
    let length = STATS.with(|stats| {
        let stats = stats.get_or_init(|| File::open("/proc/thread-self/schedstat").ok());
        stats.as_ref()?.read_at(&mut text, 0).ok()
    })?;
    let [_, queued] = times_in(std::str::from_utf8(text.get(..length)?).ok()?)?;
    Some(queued)
}

/// Time on a CPU and time in a queue for one, as a `schedstat` of /proc has them first.
fn times_in(schedstat: &str) -> Option<[Duration; 2]> {
    let mut fields = schedstat.split(' ').map(|ns| ns.parse().ok().map(Duration::from_nanos));
    Some([fields.next()??, fields.next()??])
}

thread_local!(static OTHERS: Cell<Duration> = const { Cell::new(Duration::ZERO) });

/// CPU time of the calls that this thread has waited for.
pub(super) fn time_of_others() -> Duration {
    OTHERS.get()
}

/// Calls given up, and calls not made because one of the same holder was.
#[must_use]
pub fn counts() -> (u64, u64) {
    OF_ALL.counts()
}

/// How far a call is.
enum CallProgress<T> {
    Made,
    /// With the CPU time it took, and how long it slept.
    Answered(T, (Duration, Duration)),
    GivenUp,
}

/// Where a call is done, for who waits for it. All is 0 until it has begun; each word is looked at
/// for itself.
#[derive(Default)]
struct Worker {
    tid: AtomicU32,
    /// What the thread had had of CPUs, and of queues for them, when the call began.
    had_ns: AtomicU64,
}

impl Worker {
    /// Pairs with the loads of [`Self::is_at_work`].
    fn begins(&self, had: &CallTimes) {
        let had = (had.cpu + had.queued).as_nanos();
        self.had_ns.store(u64::try_from(had).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.tid.store(
            rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs(),
            Ordering::Relaxed,
        );
    }

    /// Whether the call has slept for less than that of the time since `began`.
    fn is_at_work(&self, began: Instant, timeout: Duration) -> bool {
        let tid = self.tid.load(Ordering::Relaxed);
        if tid == 0 {
            return true;
        }
        let of = |file: &str| {
            std::fs::read_to_string(format!("/proc/self/task/{tid}/{file}")).unwrap_or_default()
        };
        // Whether it runs or is in the queue comes first: what it waits for a CPU now is counted
        // when it gets one.
        let is_runnable =
            of("stat").rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'));
        let had = times_in(&of("schedstat")).map_or(Duration::ZERO, |[ran, queued]| ran + queued);
        let worked = had.saturating_sub(Duration::from_nanos(self.had_ns.load(Ordering::Relaxed)));
        is_runnable || began.elapsed().saturating_sub(worked) < timeout
    }
}

/// Does `work` and answers what it does; `None` when `holder` holds it up, or did before and still
/// does.
pub fn wait_for<T: Send + 'static>(
    holder: IoPeer,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    OF_ALL.wait_for(holder, work)
}

impl WaitLimit {
    const fn new() -> Self {
        Self {
            threads: Mutex::new(None),
            given_up: AtomicU64::new(0),
            not_made: AtomicU64::new(0),
            barred_slow: AtomicU64::new(0),
        }
    }

    /// As [`counts`].
    fn counts(&self) -> (u64, u64) {
        (self.given_up.load(Ordering::Relaxed), self.not_made.load(Ordering::Relaxed))
    }

    fn with_threads<T>(&self, act: impl FnOnce(&mut IoThreads) -> T) -> T {
        act(self.threads.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
    }

    /// As [`wait_for`].
    fn wait_for<T: Send + 'static>(
        &'static self,
        holder: IoPeer,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let ready = self.with_threads(|threads| {
            if !threads.barred.is_empty() {
                let now = Instant::now();
                let held: HashSet<IoPeer> = threads.abandoned.holders().copied().collect();
                threads.barred.retain(|holder, until| *until > now || held.contains(holder));
            }
            let barred = threads.barred.len();
            if threads.barred.contains_key(&holder) || barred >= MAX_ABANDONED {
                return None;
            }
            Some((threads.idle.pop(), share(SLEEP_LIMIT, barred)))
        });
        let Some((worker, timeout)) = ready else {
            self.not_made.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let worker = worker.or_else(|| start().ok())?;
        let call = Arc::new((Mutex::new(CallProgress::Made), Condvar::new(), Worker::default()));
        let made = Arc::clone(&call);
        let job: IoTask = Box::new(move || {
            let begin = CallTimes::now();
            made.2.begins(&begin);
            let answer = work();
            let spent = begin.since();
            let (state, answered, _) = &*made;
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if matches!(*state, CallProgress::GivenUp) {
                self.with_threads(|threads| {
                    let calls = threads.abandoned.holders().filter(|other| **other == holder);
                    // It had much to do, or no CPU to do it: that is not its holder's doing. This
                    // call's thread has not ended yet.
                    if calls.count() == 1 && spent.1 < timeout {
                        threads.barred.insert(holder, Instant::now());
                    }
                });
            } else {
                *state = CallProgress::Answered(answer, spent);
                answered.notify_one();
            }
        });
        worker.tasks.send(job).ok()?;
        let (state, answered, at) = &*call;
        let began = Instant::now();
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let waits = |state: &mut CallProgress<T>| matches!(state, CallProgress::Made);
            let waited = answered.wait_timeout_while(state, timeout, waits);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let is_long = began.elapsed() >= timeout * AT_WORK;
            if !matches!(*state, CallProgress::Made) || is_long || !at.is_at_work(began, timeout) {
                break;
            }
        }
        match std::mem::replace(&mut *state, CallProgress::GivenUp) {
            CallProgress::Answered(answer, (cpu, slept)) => {
                OTHERS.set(OTHERS.get() + cpu);
                let barred = self.with_threads(|threads| {
                    if threads.idle.len() < MAX_IDLE {
                        threads.idle.push(worker);
                    }
                    let now = Instant::now();
                    let slow = threads.accounts.add(holder, slept, threads.barred.len(), now)?;
                    threads.barred.entry(slow).or_insert(now + BARRED);
                    Some(slow)
                });
                if let Some(holder) = barred
                    && self.barred_slow.fetch_add(1, Ordering::Relaxed) == 0
                {
                    tracing::warn!(
                        ?holder,
                        "reading memory or files of a profiled process has taken seconds of the \
                         last minute: a file system answers late. It is left alone for a \
                         minute, and what it would have told is missing; so it goes with others \
                         that do so"
                    );
                }
                Some(answer)
            }
            // Noted before the other thread can see that it was given up: `state` is still locked.
            CallProgress::Made | CallProgress::GivenUp => {
                let until = Instant::now() + BARRED;
                let IoThread { tasks, thread } = worker;
                drop(tasks);
                self.with_threads(|threads| {
                    threads.barred.entry(holder).or_insert(until);
                    threads.abandoned.add(holder, thread);
                });
                if self.given_up.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::warn!(
                        ?holder,
                        "reading memory or a file of a profiled process takes too long: a file \
                         system does not answer. It is left alone until it does, for a \
                         minute at least, and what it would have told is missing; so it goes with \
                         others that do so"
                    );
                }
                None
            }
        }
    }
}

fn start() -> io::Result<IoThread> {
    let (tasks, works) = channel::<IoTask>();
    let builder = std::thread::Builder::new().name("timeout".into()).stack_size(STACK_BYTES);
    let thread = builder.spawn(move || works.iter().for_each(|work| work()))?;
    Ok(IoThread { tasks, thread })
}

/// Types of file systems that no process serves, `f_type` of statfs(2): ext4, xfs, btrfs, tmpfs,
/// squashfs, erofs, ramfs, f2fs, zfs, memfds' and the kernel's own.
const LOCAL: [u64; 11] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x7371_7368,
    0xe0f5_e1e2,
    0x8584_58f6,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0x9fa0,
    0x9584_58f6,
];

/// An open file of a profiled process.
#[derive(Clone, Debug)]
pub struct ForeignFile {
    file: Arc<File>,
    /// Who may hold up its reading, if anybody can.
    holder: Option<IoPeer>,
}

impl ForeignFile {
    /// A file of ours.
    #[must_use]
    pub fn own(file: File) -> Self {
        Self { file: Arc::new(file), holder: None }
    }

    /// A file below the `/proc/PID` of this process.
    #[must_use]
    pub fn of_process(file: File, pid: u32) -> Self {
        Self { file: Arc::new(file), holder: Some(IoPeer::Process(pid)) }
    }

    /// Reads it from its beginning on.
    #[must_use]
    pub fn reader(self) -> ForeignReader {
        ForeignReader { file: self, at: 0 }
    }

    /// A file just opened. To be called by [`wait_for`].
    ///
    /// # Errors
    /// The system's.
    pub fn opened(file: File) -> io::Result<Self> {
        let kind = rustix::fs::fstatfs(&file)?.f_type;
        let is_local = u64::try_from(kind).is_ok_and(|kind| LOCAL.contains(&kind));
        let holder = if is_local { None } else { Some(IoPeer::Device(file.metadata()?.dev())) };
        Ok(Self { file: Arc::new(file), holder })
    }

    /// Reads at `offset`, as the file does.
    ///
    /// # Errors
    /// The system's, and `TimedOut` when the file's server does not answer.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let Some(holder) = self.holder else { return self.file.read_at(into, offset) };
        let (file, length) = (Arc::clone(&self.file), into.len());
        let read = wait_for(holder, move || {
            let mut bytes = vec![0; length];
            file.read_at(&mut bytes, offset).map(|length| {
                bytes.truncate(length);
                bytes
            })
        });
        let bytes = read.ok_or(ErrorKind::TimedOut)??;
        into.iter_mut().zip(&bytes).for_each(|(to, from)| *to = *from);
        Ok(bytes.len())
    }

    /// Reads all of `into` at `offset`.
    ///
    /// # Errors
    /// As [`ForeignFile::read_at`], and `UnexpectedEof` where the file ends.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.read_at(rest, offset.saturating_add(done as u64)) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What the file system says of it now.
    ///
    /// # Errors
    /// As [`ForeignFile::read_at`].
    pub fn metadata(&self) -> io::Result<Metadata> {
        let Some(holder) = self.holder else { return self.file.metadata() };
        let file = Arc::clone(&self.file);
        wait_for(holder, move || file.metadata()).ok_or(ErrorKind::TimedOut)?
    }
}

/// Reads a file from its beginning on.
#[derive(Debug)]
pub struct ForeignReader {
    file: ForeignFile,
    at: u64,
}

impl Read for ForeignReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at = self.at.saturating_add(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        ACCOUNT, AT_WORK, BARRED, CallTimes, IoPeer, MAX_HELD, PeerDelays, SLEEP_LIMIT, WaitLimit,
        thread_time,
    };
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    #[test]
    fn who_answers_just_in_time_again_and_again_is_left_alone() {
        let (slow, other) = (IoPeer::Device(1), IoPeer::Device(2));
        let (mut accounts, now, late) =
            (PeerDelays::default(), Instant::now(), Duration::from_millis(450));
        let calls = (1..).find(|_| {
            assert_eq!(accounts.add(other, Duration::from_millis(1), 0, now), None);
            accounts.add(slow, late, 0, now) == Some(slow)
        });
        assert_eq!(calls, Some(12), "five seconds of it");
        // When more are, it takes less.
        let calls = (1..).find(|_| accounts.add(slow, late, 4, now) == Some(slow));
        assert_eq!(calls, Some(3));
        // Slowly over hours is no harm.
        for minute in 1..100 {
            assert_eq!(accounts.add(slow, MAX_HELD / 2, 0, now + minute * ACCOUNT), None);
        }
    }

    #[test]
    fn many_that_are_a_little_slow_hold_nobody_up_for_long() {
        let (mut accounts, now, mut barred) = (PeerDelays::default(), Instant::now(), Vec::new());
        let mut held = Duration::ZERO;
        // Each time another process, as far as they are not barred, and one that is nearly always
        // quick.
        for pid in (0..100_000).map(|call| call % 250) {
            for (holder, slept) in [
                (IoPeer::Process(pid), Duration::from_millis(10)),
                (IoPeer::Device(1), Duration::from_micros(101)),
            ] {
                if !barred.contains(&holder) {
                    held += slept;
                    barred.extend(accounts.add(holder, slept, barred.len(), now));
                }
            }
        }
        assert!(held < Duration::from_secs(30), "{held:?}");
    }

    #[test]
    fn sleeping_is_told_from_computing() {
        let (busy, asleep) = (Duration::from_millis(5), Duration::from_millis(20));
        let begin = CallTimes::now();
        while thread_time() - begin.cpu < busy {}
        assert!(begin.since().0 >= busy);
        let begin = CallTimes::now();
        std::thread::sleep(asleep);
        let (cpu, slept) = begin.since();
        assert!(slept >= asleep / 2 && cpu < asleep, "{cpu:?} {slept:?}");
    }

    #[test]
    fn a_call_that_sleeps_is_on_its_holders_account() {
        static OWN: WaitLimit = WaitLimit::new();
        let (holder, asleep) = (IoPeer::Process(1), Duration::from_millis(20));
        assert_eq!(OWN.wait_for(holder, move || std::thread::sleep(asleep)), Some(()));
        let held = OWN.with_threads(|threads| threads.accounts.held.get(&holder).copied());
        assert!(held.is_some_and(|held| held >= asleep / 2), "{held:?}");
    }

    #[test]
    fn a_call_that_computes_is_waited_for_longer_than_one_that_sleeps() {
        static OWN: WaitLimit = WaitLimit::new();
        let work = || {
            let begin = CallTimes::now();
            while thread_time() - begin.cpu < SLEEP_LIMIT * 2 {}
        };
        assert_eq!(OWN.wait_for(IoPeer::Process(1), work), Some(()));
        assert_eq!(OWN.counts(), (0, 0));
    }

    #[test]
    fn a_call_that_is_held_up_is_given_up_and_its_holder_left_alone() {
        static OWN: WaitLimit = WaitLimit::new();
        let (holder, other) = (IoPeer::Process(1), IoPeer::Process(2));
        assert_eq!(OWN.wait_for(holder, || 5), Some(5));
        let ((began, begins), (release, released), (over, is_over)) =
            (channel(), channel::<()>(), channel());
        let held = move || {
            began.send(Instant::now()).ok();
            released.recv().ok();
            over.send(()).ok();
        };
        assert_eq!(OWN.wait_for(holder, held), None);
        assert_eq!(OWN.wait_for(holder, || 6), None, "not before the first is over");
        assert_eq!(OWN.wait_for(other, || 7), Some(7));
        // A busy machine may have begun it late: it is to sleep for as long as it would be waited
        // for.
        let slept = begins.recv().unwrap().elapsed();
        std::thread::sleep((2 * SLEEP_LIMIT).saturating_sub(slept));
        release.send(()).unwrap();
        is_over.recv().unwrap();
        assert_eq!(
            OWN.wait_for(holder, || 8),
            None,
            "nor at once after that: it would hold up the next call as well"
        );
        assert_eq!(OWN.counts(), (1, 2));
    }

    #[test]
    fn nobody_is_left_alone_for_a_call_that_only_computes_for_long() {
        static OWN: WaitLimit = WaitLimit::new();
        let (holder, begin) = (IoPeer::Process(1), Instant::now());
        let computes = move || while begin.elapsed() < SLEEP_LIMIT * (AT_WORK + 2) {};
        assert_eq!(OWN.wait_for(holder, computes), None);
        while OWN.wait_for(holder, || 5).is_none() {
            assert!(begin.elapsed() < BARRED / 2, "it is left alone");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
