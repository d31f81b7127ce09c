//! The way from a spool to a receiver that may be away: one thread that sends the oldest, waits when it is told to, longer each time, and never
//! in the way of the profiler. A receiver that refuses one payload after the other (a token that ran out, a path that is gone) is asked ever more
//! rarely, too, so that it does not empty the spool. Every payload ends as one of: sent, refused by the receiver, lost in the spool, or still waiting.

use super::age::Now;
use super::file::FileError;
use super::spool::{self, Limits, Spool};
use crate::daemon::neighbour;
use crate::leftover;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// First wait after a failure; each further one doubles it.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait of our own choice. A receiver may ask for more, within [`MOST_ASKED`].
const LONGEST_WAIT: Duration = Duration::from_secs(300);
const MOST_ASKED: Duration = Duration::from_secs(3600);
/// So often a receiver may fail on one payload before that is taken for the payload's fault. It takes 18 minutes: a receiver that is away and says just this
/// costs one payload by then, and one in each hour that follows.
const MOST_FAILURES: u32 = 12;
/// A trouble that lasts is told again so often.
const TELL_AGAIN: Duration = Duration::from_secs(3600);

/// What became of one payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Taken; of the profiles in it the receiver refused so many.
    Accepted {
        /// Not to be sent again either.
        rejected: u64,
    },
    /// It will never be taken.
    Refused(String),
    /// The receiver failed, of its own fault or on this payload each time.
    Failed(String),
    /// It may be taken later.
    Later {
        /// What the receiver asked for, where it did.
        after: Option<Duration>,
        /// Why not now.
        reason: String,
    },
}

/// A receiver.
pub trait Remote: Send + 'static {
    /// Sends one payload and waits for the answer, at most until `deadline`, which may come nearer meanwhile.
    fn send(&mut self, payload: &[u8], deadline: &dyn Fn() -> Instant) -> Verdict;
}

/// What a delivery did; each grows only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Payloads taken.
    pub sent: u64,
    /// Their bytes, as they went over the wire.
    pub sent_bytes: u64,
    /// Payloads that were not taken and will not be.
    pub refused: u64,
    /// Profiles that the receiver dropped from payloads it took.
    pub rejected_profiles: u64,
    /// Attempts to send that are to be repeated.
    pub retries: u64,
    /// Attempts to read from the spool that are to be repeated.
    pub reads_failed: u64,
    /// Lost in the spool, see [`spool::Lost`].
    pub lost: spool::Lost,
}

impl Figures {
    /// What each sink over a network counts, by the names its metrics have; `made` requests were put.
    #[must_use]
    pub fn counters(&self, made: u64) -> [(&'static str, u64); 10] {
        [
            ("requests_made", made),
            ("requests_sent", self.sent),
            ("sent_bytes", self.sent_bytes),
            ("requests_refused", self.refused),
            ("requests_evicted", self.lost.evicted),
            ("requests_expired", self.lost.expired),
            ("requests_not_spooled", self.lost.refused),
            ("requests_spool_lost", self.lost.gone),
            ("retries", self.retries),
            ("spool_reads_failed", self.reads_failed),
        ]
    }
}

/// What waits to be sent, now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Payloads.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Why the last attempt failed; none after one that did not.
    pub trouble: Option<String>,
}

impl Backlog {
    /// What of it is a number, by the names of [`super::counts::SINK_GAUGES`].
    #[must_use]
    pub fn gauges(&self) -> [(&'static str, u64); 2] {
        [("requests_waiting", self.requests), ("waiting_bytes", self.bytes)]
    }
}

/// Why the last attempt failed.
struct Trouble {
    reason: String,
    /// What becomes of the payload.
    then: &'static str,
    /// When it was last told.
    told: Instant,
}

/// True when the log is to have it: it is another trouble than before, or has lasted for long since it was told.
fn is_news(before: Option<&Trouble>, reason: &str, then: &str, now: Instant) -> bool {
    before.is_none_or(|before| {
        (before.reason.as_str(), before.then) != (reason, then)
            || now.duration_since(before.told) >= TELL_AGAIN
    })
}

struct State {
    spool: Spool,
    figures: Figures,
    /// None after an attempt that did not fail.
    trouble: Option<Trouble>,
    /// When it was last told that what waits is lost, until nothing waits.
    told_lost: Option<Instant>,
    /// No more is to be sent after this moment.
    closing: Option<Instant>,
}

impl State {
    /// One payload more waits. That others are lost by it is told, and hourly while it goes on.
    fn put(&mut self, sink: &str, at: SystemTime, payload: &[u8]) -> Result<(), FileError> {
        let lost = |spool: &Spool| spool.lost().evicted.saturating_add(spool.lost().expired);
        let (before, now) = (lost(&self.spool), Instant::now());
        let put = self.spool.put(at, payload);
        if self.spool.len() <= 1 {
            self.told_lost = None;
        } else if lost(&self.spool) > before
            && self.told_lost.is_none_or(|told| now.duration_since(told) >= TELL_AGAIN)
        {
            self.told_lost = Some(now);
            tracing::warn!(
                sink,
                "of what waits the oldest is lost, as spool.max_size, max_age and keep_free have it: requests_evicted and requests_expired count it"
            );
        }
        put
    }

    /// An attempt failed.
    fn fail(&mut self, sink: &str, reason: String, then: &'static str) {
        let (before, now) = (self.trouble.take(), Instant::now());
        let is_news = is_news(before.as_ref(), &reason, then, now);
        if is_news {
            tracing::warn!(sink, "sending a profile: {reason}; {then}");
        }
        let told = before.filter(|_| !is_news).map_or(now, |before| before.told);
        self.trouble = Some(Trouble { reason, then, told });
    }
}

struct Shared {
    /// What messages call the sink.
    sink: String,
    state: Mutex<State>,
    changed: Condvar,
}

/// A spool with its thread. Dropping it ends the thread; what waits then stays on the disk.
pub struct Delivery {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Delivery {
    /// Opens the spool and starts the thread, which waits for the remote that it is sent, and begins with what an earlier daemon left. `sink` is what
    /// messages call it, `timeout` bounds one attempt. Whoever cannot have a delivery keeps the remote for another time.
    ///
    /// # Errors
    /// When the spool's directory cannot be used or no thread be started.
    pub fn start(
        sink: &str,
        directory: &Path,
        limits: Limits,
        timeout: Duration,
    ) -> Result<(Self, Sender<Box<dyn Remote>>), FileError> {
        let spool = Spool::open(directory, limits)?;
        let state =
            State { spool, figures: Figures::default(), trouble: None, told_lost: None, closing: None };
        let sink = sink.to_owned();
        let shared = Arc::new(Shared { sink, state: Mutex::new(state), changed: Condvar::new() });
        let other = Arc::clone(&shared);
        let (employ, employed) = channel::<Box<dyn Remote>>();
        let thread = std::thread::Builder::new()
            .name("perfusion-send".to_owned())
            .spawn(move || {
                neighbour::wait_for_others();
                if let Ok(mut remote) = employed.recv() {
                    other.run(timeout, &mut *remote);
                }
            })
            .map_err(|source| FileError { path: directory.to_owned(), step: "start its thread", source })?;
        Ok((Self { shared, thread: Some(thread) }, employ))
    }

    /// Puts what was made at `at` into the spool.
    ///
    /// # Errors
    /// When it is lost.
    pub fn put(&self, at: SystemTime, payload: &[u8]) -> Result<(), FileError> {
        let put = self.shared.lock().put(&self.shared.sink, at, payload);
        self.shared.changed.notify_all();
        put
    }

    /// What it did so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let state = self.shared.lock();
        Figures { lost: state.spool.lost(), ..state.figures }
    }

    /// What waits.
    #[must_use]
    pub fn backlog(&self) -> Backlog {
        let state = self.shared.lock();
        Backlog {
            requests: u64::try_from(state.spool.len()).unwrap_or(u64::MAX),
            bytes: state.spool.bytes(),
            trouble: state.trouble.as_ref().map(|trouble| trouble.reason.clone()),
        }
    }

    /// Sends what can be sent before `deadline`, without waiting for a receiver that is away; the rest stays.
    pub fn close(&mut self, deadline: Instant) {
        self.shared.lock().closing = Some(deadline);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panics only with a fault of this program, which the panic's message has told.
            thread.join().ok();
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.close(Instant::now());
    }
}

/// A delivery that begins when it is first needed: until then the one whose place it takes may still be at work in the same spool. One that cannot begin
/// is tried again with each payload: what is in its way, such as a disk that is full or read-only, may pass.
pub struct Lazy {
    /// What messages call the sink.
    sink: String,
    directory: PathBuf,
    limits: Limits,
    timeout: Duration,
    /// There until the delivery begins.
    remote: Option<Box<dyn Remote>>,
    delivery: Option<Delivery>,
    /// Payloads lost because it could not begin.
    lost: u64,
    /// Why it could not.
    trouble: Option<String>,
}

impl Lazy {
    /// See [`Delivery::start`].
    #[must_use]
    pub fn new(
        sink: &str,
        directory: PathBuf,
        limits: Limits,
        timeout: Duration,
        remote: impl Remote,
    ) -> Self {
        let (sink, remote): (_, Option<Box<dyn Remote>>) = (sink.to_owned(), Some(Box::new(remote)));
        Self { sink, directory, limits, timeout, remote, delivery: None, lost: 0, trouble: None }
    }

    /// The spool's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Begins with what an earlier daemon left, if it has not begun and there is any. Where that cannot be, it is told once.
    pub fn take_up(&mut self) {
        if self.delivery.is_some() || !spool::holds_any(&self.directory) {
            return;
        }
        let before = self.trouble.take();
        let begun = self.started().map(drop);
        if let Err(error) = begun
            && before.is_none_or(|before| before != error.to_string())
        {
            tracing::warn!(sink = self.sink, %error, "what an earlier daemon left is not sent; it is tried again every minute");
        }
    }

    /// See [`Delivery::put`]; begins, if it has not.
    ///
    /// # Errors
    /// When the payload is lost, which is counted.
    pub fn put(&mut self, at: SystemTime, payload: &[u8]) -> Result<(), FileError> {
        match self.started() {
            Ok(delivery) => delivery.put(at, payload),
            Err(error) => {
                self.lost += 1;
                Err(error)
            }
        }
    }

    fn started(&mut self) -> Result<&Delivery, FileError> {
        let delivery = match self.delivery.take() {
            Some(delivery) => delivery,
            None => {
                let start = Delivery::start(&self.sink, &self.directory, self.limits, self.timeout);
                let (delivery, employ) = start.inspect_err(|error| self.trouble = Some(error.to_string()))?;
                if let Some(remote) = self.remote.take() {
                    // The thread waits for it.
                    employ.send(remote).ok();
                }
                delivery
            }
        };
        Ok(self.delivery.insert(delivery))
    }

    /// See [`Delivery::figures`].
    #[must_use]
    pub fn figures(&self) -> Figures {
        let mut figures = self.delivery.as_ref().map(Delivery::figures).unwrap_or_default();
        figures.lost.refused += self.lost;
        figures
    }

    /// See [`Delivery::backlog`]. Of one that has not begun nothing is known but why.
    #[must_use]
    pub fn backlog(&self) -> Backlog {
        let unknown = || Backlog { trouble: self.trouble.clone(), ..Backlog::default() };
        self.delivery.as_ref().map_or_else(unknown, Delivery::backlog)
    }

    /// See [`Delivery::close`].
    pub fn close(&mut self, deadline: Instant) {
        if let Some(delivery) = &mut self.delivery {
            delivery.close(deadline);
        }
    }
}

impl Shared {
    /// Nothing of the state is left half-changed by code that can panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, timeout: Duration, remote: &mut dyn Remote) {
        // In a row.
        let (mut failures, mut refusals) = (0, 0_u32);
        let mut failed = Failed::default();
        loop {
            let (oldest, due) = {
                let mut state = self.lock();
                loop {
                    if state.closing.is_some_and(|closing| Instant::now() >= closing) {
                        return;
                    }
                    if let Some(oldest) = state.spool.oldest(Now::read()).transpose() {
                        break (oldest, Instant::now() + timeout);
                    }
                    if state.closing.is_some() {
                        return;
                    }
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            // The end may come while it is on its way.
            let deadline = || self.lock().closing.map_or(due, |closing| closing.min(due));
            let answered = oldest.map(|oldest| (remote.send(&oldest.payload, &deadline), oldest));
            let mut state = self.lock();
            let pause = match answered {
                Err(error) => {
                    state.figures.reads_failed += 1;
                    state.fail(&self.sink, error.to_string(), "it is tried again");
                    failures += 1;
                    Some((failures, None))
                }
                Ok((Verdict::Later { after, reason }, _)) => {
                    state.spool.later();
                    state.figures.retries += 1;
                    state.fail(&self.sink, reason, "it waits in the spool");
                    failures += 1;
                    Some((failures, after))
                }
                Ok((Verdict::Failed(reason), oldest)) => {
                    failures += 1;
                    if failed.again(oldest.sequence) < MOST_FAILURES {
                        state.spool.later();
                        state.figures.retries += 1;
                        state.fail(&self.sink, reason, "it waits in the spool");
                    } else {
                        state.spool.done(oldest.sequence);
                        state.figures.refused += 1;
                        state.fail(&self.sink, reason, "it is dropped, since that was the answer each time");
                    }
                    Some((failures, None))
                }
                Ok((Verdict::Accepted { rejected }, oldest)) => {
                    if state.trouble.take().is_some() {
                        tracing::info!(sink = self.sink, "sending profiles works again");
                    }
                    (failures, refusals) = (0, 0);
                    state.figures.sent += 1;
                    state.figures.sent_bytes += u64::try_from(oldest.payload.len()).unwrap_or(u64::MAX);
                    state.figures.rejected_profiles += rejected;
                    state.spool.done(oldest.sequence);
                    None
                }
                Ok((Verdict::Refused(reason), oldest)) => {
                    state.fail(&self.sink, reason, "it is dropped");
                    (failures, refusals) = (0, refusals.saturating_add(1));
                    state.figures.refused += 1;
                    state.spool.done(oldest.sequence);
                    // One alone may be the payload's own fault.
                    (refusals > 1).then(|| (refusals - 1, None))
                }
            };
            let Some((times, after)) = pause else { continue };
            let until = Instant::now() + wait(times, after, leftover::random().unwrap_or_default());
            while state.closing.is_none() && Instant::now() < until {
                let left = until.saturating_duration_since(Instant::now());
                (state, _) = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
            }
            if state.closing.is_some() {
                return;
            }
        }
    }
}

/// The payload that a receiver failed on last, by its sequence number, and how often.
#[derive(Default)]
struct Failed {
    last: Option<u64>,
    times: u32,
}

impl Failed {
    /// It failed on this one: how often by now.
    fn again(&mut self, sequence: u64) -> u32 {
        self.times = if self.last.replace(sequence) == Some(sequence) { self.times + 1 } else { 1 };
        self.times
    }
}

/// Doubles with each failure and is spread by up to a fifth, so that the daemons of a cluster do not come back all at once. `chance` is any
/// number.
fn wait(failures: u32, asked: Option<Duration>, chance: u64) -> Duration {
    let doubled =
        FIRST_WAIT.saturating_mul(1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX));
    let chosen = doubled.min(LONGEST_WAIT).max(asked.unwrap_or_default().min(MOST_ASKED));
    let spread = u32::try_from(chance % 200).unwrap_or_default();
    chosen + chosen / 1000 * spread
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::Receiver;

    const LIMITS: Limits = Limits { bytes: 1 << 20, age: Duration::from_secs(3600), free_bytes: 0 };

    /// Answers as told, and tells what it was sent.
    struct Told {
        answers: Receiver<Verdict>,
        seen: Sender<Vec<u8>>,
    }

    impl Remote for Told {
        fn send(&mut self, payload: &[u8], _: &dyn Fn() -> Instant) -> Verdict {
            self.seen.send(payload.to_vec()).unwrap();
            self.answers.recv().unwrap_or(Verdict::Later { after: None, reason: "nobody answers".to_owned() })
        }
    }

    fn told() -> (Told, Sender<Verdict>, Receiver<Vec<u8>>) {
        let (answer, answers) = channel();
        let (seen, saw) = channel();
        (Told { answers, seen }, answer, saw)
    }

    fn started(directory: &Path, remote: impl Remote) -> Delivery {
        let (delivery, employ) = Delivery::start("test", directory, LIMITS, Duration::from_secs(1)).unwrap();
        employ.send(Box::new(remote)).unwrap();
        delivery
    }

    #[test]
    fn each_payload_is_sent_in_order_and_counted_by_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        for payload in [b"one", b"two", b"six"] {
            delivery.put(SystemTime::now(), payload).unwrap();
        }
        answer
            .send(Verdict::Later { after: Some(Duration::from_millis(1)), reason: "busy".to_owned() })
            .unwrap();
        answer.send(Verdict::Accepted { rejected: 2 }).unwrap();
        answer.send(Verdict::Refused("too bad".to_owned())).unwrap();
        answer.send(Verdict::Accepted { rejected: 0 }).unwrap();
        let seen: Vec<Vec<u8>> = (0..4).map(|_| saw.recv().unwrap()).collect();
        assert_eq!(seen, [b"one", b"one", b"two", b"six"]);
        delivery.close(Instant::now() + Duration::from_secs(60));
        let figures = delivery.figures();
        assert_eq!((figures.sent, figures.refused, figures.retries, figures.rejected_profiles), (2, 1, 1, 2));
        assert_eq!((delivery.backlog(), figures.sent_bytes), (Backlog::default(), 6));
    }

    #[test]
    fn a_receiver_that_refuses_everything_does_not_empty_the_spool() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        for number in 0..20_u8 {
            delivery.put(SystemTime::now(), &[number]).unwrap();
        }
        // Not before all are written, which takes as long as the disk takes.
        for _ in 0..20 {
            answer.send(Verdict::Refused("who are you?".to_owned())).unwrap();
        }
        // The second refusal in a row is followed by a second of silence, in which the end comes.
        assert_eq!((saw.recv().unwrap(), saw.recv().unwrap()), (vec![0], vec![1]));
        delivery.close(Instant::now() + Duration::from_secs(60));
        let (figures, backlog) = (delivery.figures(), delivery.backlog());
        assert_eq!((figures.sent, figures.refused), (0, 2));
        let trouble = Some("who are you?".to_owned());
        assert_eq!(backlog, Backlog { requests: 18, bytes: 18, trouble });
    }

    #[test]
    fn a_payload_that_cannot_be_read_is_waited_for_and_costs_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), LIMITS).unwrap();
        spool.put(SystemTime::now(), b"one").unwrap();
        let found = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
        let first = found.into_iter().find(|path| path.to_str().unwrap().ends_with(".spooled")).unwrap();
        spool.put(SystemTime::now(), b"two").unwrap();
        drop(spool);
        let mut delivery = Delivery::start("test", directory.path(), LIMITS, Duration::from_secs(1)).unwrap();
        std::fs::remove_file(&first).and_then(|()| std::fs::create_dir(&first)).unwrap();
        let (remote, _answer, saw) = told();
        delivery.1.send(Box::new(remote)).unwrap();
        while delivery.0.backlog().trouble.is_none() {
            std::thread::yield_now();
        }
        // The first failure is followed by a second of silence, in which the end comes.
        delivery.0.close(Instant::now() + Duration::from_secs(60));
        let figures = delivery.0.figures();
        assert_eq!((figures.reads_failed, figures.retries, delivery.0.backlog().requests), (1, 0, 2));
        assert_eq!(figures.lost, spool::Lost::default());
        assert!(saw.try_recv().is_err());
    }

    #[test]
    fn what_was_not_sent_waits_for_the_next_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        delivery.put(SystemTime::now(), b"kept").unwrap();
        saw.recv().unwrap();
        // Nobody answers: the close does not wait for a receiver that is away.
        drop(answer);
        delivery.close(Instant::now() + Duration::from_secs(3600));
        assert_eq!((delivery.backlog().requests, delivery.figures().sent), (1, 0));

        let (remote, answer, saw) = told();
        answer.send(Verdict::Accepted { rejected: 0 }).unwrap();
        let mut next = started(directory.path(), remote);
        assert_eq!(saw.recv().unwrap(), b"kept");
        next.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((next.backlog().requests, next.figures().sent), (0, 1));
    }

    #[test]
    fn an_outage_that_fills_the_spool_costs_the_oldest_but_the_one_on_its_way() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        let profile = |number: u8| vec![number; 100_000];
        delivery.put(SystemTime::now(), &profile(0)).unwrap();
        assert_eq!(saw.recv().unwrap(), profile(0));
        for number in 1..40 {
            delivery.put(SystemTime::now(), &profile(number)).unwrap();
        }
        // Ten find room.
        assert_eq!((delivery.backlog().requests, delivery.backlog().bytes), (10, 1_000_000));
        for _ in 0..10 {
            answer.send(Verdict::Accepted { rejected: 0 }).unwrap();
        }
        delivery.close(Instant::now() + Duration::from_secs(60));
        assert!(saw.try_iter().eq((31..40).map(profile)));
        let figures = delivery.figures();
        assert_eq!((figures.sent, figures.lost.evicted, delivery.backlog()), (10, 30, Backlog::default()));
    }

    #[test]
    fn what_an_earlier_daemon_left_is_sent_without_a_new_profile() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("spool");
        let (remote, answer, saw) = told();
        let mut lazy = Lazy::new("test", directory.clone(), LIMITS, Duration::from_secs(1), remote);
        lazy.take_up();
        assert!(lazy.delivery.is_none() && !directory.exists(), "there is nothing to begin for");
        let mut former = Spool::open(&directory, LIMITS).unwrap();
        lazy.take_up();
        assert!(lazy.delivery.is_none(), "an empty one is nothing to begin for either");
        former.put(SystemTime::now(), b"left").unwrap();
        drop(former);
        let lock = directory.join(crate::sink::lock::NAME);
        std::fs::remove_file(&lock).and_then(|()| std::fs::create_dir(&lock)).unwrap();
        lazy.take_up();
        let trouble = lazy.backlog().trouble.unwrap();
        assert!(trouble.contains(lock.to_str().unwrap()), "{trouble}");
        std::fs::remove_dir(&lock).unwrap();
        answer.send(Verdict::Accepted { rejected: 0 }).unwrap();
        lazy.take_up();
        assert_eq!(saw.recv().unwrap(), b"left");
        lazy.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((lazy.figures().sent, lazy.backlog()), (1, Backlog::default()));
    }

    #[test]
    fn a_payload_that_a_receiver_fails_on_waits_and_is_passed_over_in_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        delivery.put(SystemTime::now(), b"odd").unwrap();
        answer.send(Verdict::Failed("internal".to_owned())).unwrap();
        answer.send(Verdict::Accepted { rejected: 0 }).unwrap();
        assert_eq!((saw.recv().unwrap(), saw.recv().unwrap()), (b"odd".to_vec(), b"odd".to_vec()));
        delivery.close(Instant::now() + Duration::from_secs(60));
        let figures = delivery.figures();
        assert_eq!((figures.sent, figures.retries, figures.refused), (1, 1, 0));

        let mut failed = Failed::default();
        let times: Vec<u32> = [7, 7, 8, 8, 8, 7].into_iter().map(|sequence| failed.again(sequence)).collect();
        assert_eq!(times, [1, 2, 1, 2, 3, 1]);
        // As long as its constant's comment says.
        let waits: Duration = (1..MOST_FAILURES).map(|failures| wait(failures, None, 0)).sum();
        assert_eq!(waits.as_secs() / 60, 18);
    }

    #[test]
    fn a_trouble_is_told_when_it_begins_changes_or_lasts() {
        let told = Instant::now();
        let away = Trouble { reason: "no route".to_owned(), then: "it waits in the spool", told };
        let is_news = |reason, then, after| is_news(Some(&away), reason, then, told + after);
        let second = Duration::from_secs(1);
        assert!(super::is_news(None, "no route", "it waits in the spool", told));
        assert!(!is_news("no route", "it waits in the spool", TELL_AGAIN - second));
        assert!(is_news("no route", "it waits in the spool", TELL_AGAIN));
        assert!(is_news("no route", "it is dropped", second));
        assert!(is_news("who are you?", "it waits in the spool", second));
    }

    #[test]
    fn a_spool_that_cannot_be_opened_is_tried_again_and_what_is_lost_meanwhile_counted() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("spool");
        std::fs::write(&directory, "in the way").unwrap();
        let (remote, answer, saw) = told();
        let mut lazy = Lazy::new("test", directory.clone(), LIMITS, Duration::from_secs(1), remote);
        for _ in 0..2 {
            let error = lazy.put(SystemTime::now(), b"lost").unwrap_err().to_string();
            assert!(error.contains(directory.to_str().unwrap()), "{error}");
            assert_eq!(lazy.backlog().trouble, Some(error));
        }
        assert_eq!(lazy.figures().lost.refused, 2);
        std::fs::remove_file(&directory).unwrap();
        answer.send(Verdict::Accepted { rejected: 0 }).unwrap();
        lazy.put(SystemTime::now(), b"sent").unwrap();
        assert_eq!(saw.recv().unwrap(), b"sent");
        lazy.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((lazy.figures().sent, lazy.figures().lost.refused), (1, 2));
    }

    #[test]
    fn waits_double_up_to_a_limit_and_obey_the_receiver() {
        assert_eq!(wait(1, None, 0), Duration::from_secs(1));
        assert_eq!(wait(4, None, 0), Duration::from_secs(8));
        assert_eq!(wait(400, None, 0), LONGEST_WAIT);
        assert_eq!(wait(1, Some(Duration::from_secs(900)), 0), Duration::from_secs(900));
        assert_eq!(wait(1, Some(Duration::MAX), 0), MOST_ASKED);
        assert!(
            wait(1, None, 199) < Duration::from_millis(1200)
                && wait(1, None, 199) > Duration::from_millis(1150)
        );
    }
}
