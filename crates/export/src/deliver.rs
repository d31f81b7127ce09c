//! The way from a spool to a receiver that may be away: one thread that sends, waits when it is
//! told to, longer each time, and never in the way of the profiler. A request that waits is passed
//! by others; [`request_scheduler`](super::request_scheduler) chooses the next one. Every request
//! ends as one of: sent, given up and counted by its cause, lost in the spool, split into smaller
//! ones, or still waiting.

use super::accepted_sizes::{AcceptedSizes, RequestSize, SHORT_BYTES};
use super::age::Now;
use super::failure_states::{self, CauseSum, DeliveryEvent, Ends, States};
use super::file::FileError;
use super::request_scheduler::{
    FailureCause, LengthClass, NextSend, RequestScheduler, SendFailure, wait,
};
use super::spool::{self, Item, ItemKind, Spool, SpoolLimits, Taken, group_of};
use perfusion_host::locked_files;
use perfusion_host::priority;
use perfusion_pprof::split::PartBounds;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// That what waits is lost is told again so often.
const TELL_AGAIN: Duration = Duration::from_secs(3600);
/// So often a long request is tried again that a receiver refuses which has taken none yet.
const FIRST_REFUSALS: u32 = 2;
/// Services whose names are remembered. Of more a name is read from the request.
const MOST_NAMES: usize = 4096;

/// What became of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// Taken.
    Accepted {
        /// So many of the profiles in it the receiver refused. They are not sent again.
        rejected: u64,
        /// What it says of that.
        remark: Option<String>,
    },
    /// It will never be taken, for its own sake.
    Refused(String),
    /// It is longer than the receiver takes.
    TooLarge(String),
    /// It is not taken, and no other would be: a token has run out, a path is gone.
    Denied(String),
    /// The receiver failed, of its own fault or on this request each time.
    Failed(String),
    /// It may be taken later.
    Later {
        /// What the receiver asked for, where it did.
        after: Option<Duration>,
        /// Why not now.
        reason: String,
    },
    /// Nobody was there to answer.
    Unreached(String),
}

/// A receiver.
pub trait Remote: Send + 'static {
    /// Sends one request and waits for the answer, at most until `deadline`, which may come nearer
    /// meanwhile.
    fn send(&mut self, payload: &[u8], deadline: &dyn Fn() -> Instant) -> SendOutcome;

    /// Whose profile is in a request; empty where that is not known.
    fn service(&self, _payload: &[u8]) -> String {
        String::new()
    }

    /// Bytes of a request before compression.
    fn raw_bytes(&self, payload: &[u8]) -> usize {
        payload.len()
    }

    /// The same in smaller requests; none where it is of one sample, or cannot be split.
    fn split(&self, _payload: &[u8]) -> Vec<Vec<u8>> {
        Vec::new()
    }
}

/// What a delivery did; each grows only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeliveryCounters {
    /// Requests taken.
    pub sent: u64,
    /// Their bytes, as they went over the wire.
    pub sent_bytes: u64,
    /// Requests that were not taken and will not be.
    pub refused: u64,
    /// Of those, given up because they are longer than the receiver takes.
    pub too_large: u64,
    /// Of those, given up after their number of tries.
    pub tries_over: u64,
    /// Requests, and windows that waited in the spool, of which others were made.
    pub split: u64,
    /// Requests made of other requests.
    pub parts: u64,
    /// Profiles that the receiver dropped from requests it took.
    pub rejected_profiles: u64,
    /// Attempts to send that are to be repeated.
    pub retries: u64,
    /// Attempts to read from the spool that are to be repeated.
    pub reads_failed: u64,
    /// Lost in the spool, see [`spool::SpoolLosses`].
    pub lost: spool::SpoolLosses,
}

impl DeliveryCounters {
    /// What each sink over a network counts, by the names its metrics have; `made` requests were
    /// put.
    #[must_use]
    pub fn counters(&self, made: u64) -> [(&'static str, u64); 13] {
        [
            ("requests_made", made + self.parts),
            ("requests_sent", self.sent),
            ("sent_bytes", self.sent_bytes),
            ("requests_refused", self.refused),
            ("requests_too_large", self.too_large),
            ("requests_tries_over", self.tries_over),
            ("requests_split", self.split),
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
pub struct SpoolBacklog {
    /// Requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Why the last attempt failed; none after one that did not.
    pub trouble: Option<String>,
    /// What was not taken lately, or not at once, by service and cause.
    pub causes: Vec<CauseSum>,
}

impl SpoolBacklog {
    /// What of it is a number, by the names of [`super::counts::SINK_GAUGES`].
    #[must_use]
    pub fn gauges(&self) -> [(&'static str, u64); 2] {
        [("requests_waiting", self.requests), ("waiting_bytes", self.bytes)]
    }
}

/// Why a request is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DropCause {
    Refused,
    Denied,
    TooLarge,
    Tries,
}

struct DeliveryState {
    spool: Spool,
    figures: DeliveryCounters,
    turns: RequestScheduler,
    states: States,
    sizes: AcceptedSizes,
    /// Services by the [`group_of`] their names.
    names: HashMap<u64, Arc<str>>,
    /// When it was last told that what waits is lost, until nothing waits.
    told_lost: Option<Instant>,
    /// Reads from the spool that failed, in a row, and until when none is tried.
    unread: (u32, Option<Instant>),
    /// No more is to be sent after this moment.
    closing: Option<Instant>,
}

impl DeliveryState {
    fn new(spool: Spool) -> Self {
        Self {
            spool,
            figures: DeliveryCounters::default(),
            turns: RequestScheduler::default(),
            states: States::default(),
            sizes: AcceptedSizes::default(),
            names: HashMap::new(),
            told_lost: None,
            unread: (0, None),
            closing: None,
        }
    }

    /// One more waits. That others are lost by it is told, and hourly while it goes on.
    fn put(
        &mut self,
        sink: &str,
        at: SystemTime,
        kind: ItemKind,
        group: u64,
        payload: &[u8],
    ) -> Result<(), FileError> {
        let lost = |spool: &Spool| spool.lost().evicted.saturating_add(spool.lost().expired);
        let (before, now) = (lost(&self.spool), Instant::now());
        let put = self.spool.put_as(at, kind, group, payload);
        if self.spool.len() <= 1 {
            self.told_lost = None;
        } else if lost(&self.spool) > before
            && self.told_lost.is_none_or(|told| now.duration_since(told) >= TELL_AGAIN)
        {
            self.told_lost = Some(now);
            tracing::warn!(
                sink,
                "of what waits the oldest is lost, as spool.max_size, max_age and keep_free have \
                 it: requests_evicted and requests_expired count it"
            );
        }
        put
    }

    /// True when nothing more is to be sent.
    fn is_over(&self) -> bool {
        self.closing.is_some_and(|closing| Instant::now() >= closing)
    }

    fn backlog(&self) -> SpoolBacklog {
        SpoolBacklog {
            requests: u64::try_from(self.spool.len()).unwrap_or(u64::MAX),
            bytes: self.spool.bytes(),
            trouble: self.states.trouble().map(str::to_owned),
            causes: self.states.sums().collect(),
        }
    }

    fn know(&mut self, service: &str) -> u64 {
        let group = group_of(service);
        if self.names.len() < MOST_NAMES {
            self.names.entry(group).or_insert_with(|| service.into());
        }
        group
    }

    /// Whose request it is, where that is known by its group. A service has one name as long as
    /// there is room for it: what a request says may be another way to write it, and a state ends
    /// under the name that it began with.
    fn known_name(&self, item: Item) -> Option<Arc<str>> {
        self.names.get(&item.group).map(Arc::clone)
    }

    /// This is whose request it is.
    fn remember_name(&mut self, item: Item, service: &Arc<str>) {
        // Requests of earlier versions are of one group, whosever they are.
        if item.group != 0 && self.names.len() < MOST_NAMES {
            self.names.entry(item.group).or_insert_with(|| Arc::clone(service));
        }
    }

    fn event(&mut self, sink: &str, event: DeliveryEvent<'_>) {
        self.states.event(event, Instant::now());
        failure_states::say(sink, self.states.lines());
    }

    /// What is to be sent now, or until when there is nothing; for ever where that is none.
    fn next(&mut self, sink: &str) -> Result<Taken, Option<Instant>> {
        let now = Instant::now();
        if let Some(until) = self.unread.1.filter(|until| now < *until) {
            return Err(Some(until));
        }
        let (turns, mut wait_until) = (&self.turns, None);
        let taken = self.spool.take(Now::read(), |items| {
            wait_until = None;
            match turns.next(items, now) {
                NextSend::Send(sequence) => Some(sequence),
                NextSend::Wait(until) => {
                    wait_until = Some(until);
                    None
                }
                NextSend::Nothing => None,
            }
        });
        self.turns.forget(self.spool.items());
        match taken {
            Ok(Some(taken)) => {
                self.unread = (0, None);
                Ok(taken)
            }
            Ok(None) => Err(wait_until),
            Err(error) => {
                self.figures.reads_failed += 1;
                let failures = self.unread.0.saturating_add(1);
                let until = now + wait(failures, None, locked_files::random().unwrap_or_default());
                self.unread = (failures, Some(until));
                let (reason, ends) = (error.to_string(), Ends::WhenTaken);
                let then = "it is tried again";
                self.event(
                    sink,
                    DeliveryEvent {
                        service: "",
                        reason: &reason,
                        detail: "",
                        then,
                        count: 1,
                        unit: "attempts",
                        ends,
                    },
                );
                Err(Some(until))
            }
        }
    }

    /// Takes what the receiver answered. Returns the split that is to be tried.
    fn answered(&mut self, sink: &str, answered: &Answered, verdict: SendOutcome) -> Option<Split> {
        let Answered { taken: Taken { item, .. }, service, size } = answered;
        let (now, chance) = (Instant::now(), locked_files::random().unwrap_or_default());
        self.remember_name(*item, service);
        let failure = SendFailure { age: age(*item), ..SendFailure::default() };
        let (failure, reason) = match verdict {
            SendOutcome::Accepted { rejected, remark } => {
                self.accepted(sink, answered, rejected, remark);
                return None;
            }
            SendOutcome::TooLarge(reason) => {
                self.turns.judged(*item);
                // Where longer ones are taken, more and shorter ones would be refused all the same.
                if size.raw <= SHORT_BYTES && self.sizes.has_taken(size.raw) {
                    self.give_up(sink, *item, service, &reason, DropCause::Refused);
                    return None;
                }
                self.sizes.refused(*size, true, now);
                return Some(Split { reason, cause: SplitCause::TooLarge });
            }
            // Whether its length is the reason shows when shorter ones are taken.
            SendOutcome::Refused(reason)
                if self.sizes.has_taken_none()
                    && !self.sizes.has_refused()
                    && self.turns.attempts(*item) < FIRST_REFUSALS
                    && size.raw > SHORT_BYTES =>
            {
                (failure, reason)
            }
            SendOutcome::Refused(reason) => {
                self.turns.judged(*item);
                let is_long = self.sizes.of(*size) != LengthClass::Usual;
                if !is_long {
                    // A receiver that refuses short ones, too, does not refuse them for their
                    // length.
                    self.turns.fails_short(*item, now);
                    self.sizes.doubt();
                }
                if is_long && !self.turns.has_failed_short(*item) {
                    return Some(Split { reason, cause: SplitCause::Refused });
                }
                self.give_up(sink, *item, service, &reason, DropCause::Refused);
                return None;
            }
            SendOutcome::Denied(reason) => {
                match self.turns.failed(*item, failure, now, chance) {
                    // It would be refused whatever it held, so it is kept.
                    FailureCause::Receiver => self.waits(sink, "", &reason, Ends::WhenTaken),
                    FailureCause::Request
                    | FailureCause::Length
                    | FailureCause::TooLong
                    | FailureCause::Ended { .. } => {
                        self.give_up(sink, *item, service, &reason, DropCause::Denied);
                    }
                }
                return None;
            }
            SendOutcome::Failed(reason) => {
                (SendFailure { counts: true, length: self.sizes.of(*size), ..failure }, reason)
            }
            SendOutcome::Later { after, reason } => {
                (SendFailure { asked: after, length: self.sizes.of(*size), ..failure }, reason)
            }
            SendOutcome::Unreached(reason) => {
                self.turns.unreached(now, chance);
                self.waits(sink, "", &reason, Ends::WhenTaken);
                return None;
            }
        };
        match self.turns.failed(*item, failure, now, chance) {
            FailureCause::Request => self.waits(sink, service, &reason, Ends::WhenWhoseIsSeen),
            FailureCause::Receiver => self.waits(sink, "", &reason, Ends::WhenTaken),
            FailureCause::Length => return Some(Split { reason, cause: SplitCause::Length }),
            FailureCause::TooLong => {
                self.give_up(sink, *item, service, &reason, DropCause::TooLarge)
            }
            // What may be too long has been split before, where it can be.
            FailureCause::Ended { .. } => {
                self.give_up(sink, *item, service, &reason, DropCause::Tries)
            }
        }
        None
    }

    /// The receiver took a request.
    fn accepted(&mut self, sink: &str, answered: &Answered, rejected: u64, remark: Option<String>) {
        let Answered { taken: Taken { item, .. }, service, size } = answered;
        let now = Instant::now();
        self.figures.sent += 1;
        self.figures.sent_bytes += item.length;
        self.figures.rejected_profiles += rejected;
        self.spool.done(item.sequence);
        self.turns.taken(*item);
        self.sizes.taken(*size, now);
        if rejected > 0 || remark.is_some() {
            let reason = remark.unwrap_or_else(|| "it gives no reason".to_owned());
            let reason = match rejected {
                0 => format!("the receiver says of profiles that it took: {reason}"),
                _ => format!("the receiver drops profiles of requests that it takes: {reason}"),
            };
            let event = DeliveryEvent {
                service,
                reason: &reason,
                detail: "",
                then: "they are not sent again",
                count: rejected.max(1),
                unit: if rejected > 0 { "profiles" } else { "requests" },
                ends: Ends::WhenQuiet,
            };
            self.states.event(event, now);
        }
        self.states.taken(service, now);
        failure_states::say(sink, self.states.lines());
    }

    /// A request that was not taken waits for another attempt.
    fn waits(&mut self, sink: &str, service: &str, reason: &str, ends: Ends) {
        self.spool.later();
        self.figures.retries += 1;
        let event = DeliveryEvent {
            service,
            reason,
            detail: "",
            then: "it waits in the spool",
            count: 1,
            unit: "attempts",
            ends,
        };
        self.event(sink, event);
    }

    /// Puts smaller requests in the place of one; where it could not be split, it waits or is given
    /// up.
    fn replace(&mut self, sink: &str, answered: &Answered, split: &Split, parts: &[Vec<u8>]) {
        let Answered { taken: Taken { item, .. }, service, size } = answered;
        let (Split { reason, cause }, now) = (split, Instant::now());
        if parts.len() < 2 {
            match cause {
                SplitCause::TooLarge => {
                    self.give_up(sink, *item, service, reason, DropCause::TooLarge)
                }
                SplitCause::Refused => {
                    self.give_up(sink, *item, service, reason, DropCause::Refused)
                }
                SplitCause::Length
                    if self.turns.is_whole(*item, age(*item), now) == FailureCause::TooLong =>
                {
                    self.give_up(sink, *item, service, reason, DropCause::TooLarge);
                }
                SplitCause::Length => self.waits(sink, service, reason, Ends::WhenWhoseIsSeen),
            }
            return;
        }
        if *cause != SplitCause::TooLarge {
            // It was perhaps not for its length.
            self.sizes.refused(*size, false, now);
        }
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(item.at);
        self.figures.split += 1;
        self.figures.parts += u64::try_from(parts.len()).unwrap_or_default();
        for part in parts {
            // What the spool does not take it has counted.
            if let Err(error) = self.put(sink, at, ItemKind::Request, item.group, part) {
                tracing::warn!(sink, %service, %error, "a part of a request that is too large is \
                     lost");
            }
        }
        self.spool.done(item.sequence);
        let then = "it is sent in smaller parts";
        let ends = Ends::WhenQuiet;
        self.event(
            sink,
            DeliveryEvent { service, reason, detail: "", then, count: 1, unit: "requests", ends },
        );
    }

    fn give_up(&mut self, sink: &str, item: Item, service: &str, reason: &str, end: DropCause) {
        self.figures.refused += 1;
        let (then, ends) = match end {
            DropCause::Refused => ("it is dropped", Ends::WhenQuiet),
            DropCause::Denied => ("it is dropped", Ends::WhenServiceTaken),
            DropCause::TooLarge => {
                self.figures.too_large += 1;
                ("it is one stack, or cannot be split, and is dropped", Ends::WhenQuiet)
            }
            DropCause::Tries => {
                self.figures.tries_over += 1;
                ("it is dropped, since that was the answer each time", Ends::WhenQuiet)
            }
        };
        self.spool.done(item.sequence);
        self.event(
            sink,
            DeliveryEvent { service, reason, detail: "", then, count: 1, unit: "requests", ends },
        );
    }
}

/// A request that the receiver has answered.
struct Answered {
    taken: Taken,
    /// Whose it is.
    service: Arc<str>,
    size: RequestSize,
}

impl Answered {
    /// Reads of the request what `known` does not tell, which takes time.
    fn of(taken: Taken, known: Option<Arc<str>>, remote: &dyn Remote) -> Self {
        let packed = usize::try_from(taken.item.length).unwrap_or(usize::MAX);
        let size = RequestSize { raw: remote.raw_bytes(&taken.payload), packed };
        let service = known.unwrap_or_else(|| remote.service(&taken.payload).into());
        Self { taken, service, size }
    }
}

/// A request is to be split.
struct Split {
    /// What the receiver said of it.
    reason: String,
    cause: SplitCause,
}

/// Why a request is to be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SplitCause {
    /// The receiver says that it is too long.
    TooLarge,
    /// It is refused, perhaps for its length.
    Refused,
    /// It fails again and again, perhaps for its length.
    Length,
}

/// How old that is which is in a request; nothing where the clock does not tell.
fn age(item: Item) -> Duration {
    let (now, at) = (Now::read(), SystemTime::UNIX_EPOCH + Duration::from_secs(item.at));
    if now.tells_age { now.wall.duration_since(at).unwrap_or_default() } else { Duration::ZERO }
}

struct DeliveryShared {
    /// What messages call the sink.
    sink: String,
    state: Mutex<DeliveryState>,
    changed: Condvar,
}

/// A spool with its thread. Dropping it ends the thread; what waits then stays on the disk.
pub struct Delivery {
    shared: Arc<DeliveryShared>,
    thread: Option<JoinHandle<()>>,
}

impl Delivery {
    /// Opens the spool and starts the thread, which waits for the remote that it is sent, and
    /// begins with what an earlier daemon left. `sink` is what messages call it, `timeout` bounds
    /// one attempt. Whoever cannot have a delivery keeps the remote for another time.
    ///
    /// # Errors
    /// When the spool's directory cannot be used or no thread be started.
    pub fn start(
        sink: &str,
        directory: &Path,
        limits: SpoolLimits,
        timeout: Duration,
    ) -> Result<(Self, Sender<Box<dyn Remote>>), FileError> {
        let spool = Spool::open(directory, limits)?;
        let (sink, state) = (sink.to_owned(), Mutex::new(DeliveryState::new(spool)));
        let shared = Arc::new(DeliveryShared { sink, state, changed: Condvar::new() });
        let other = Arc::clone(&shared);
        let (employ, employed) = channel::<Box<dyn Remote>>();
        let thread = std::thread::Builder::new()
            .name("perfusion-send".to_owned())
            .spawn(move || {
                priority::wait_for_others();
                if let Ok(mut remote) = employed.recv() {
                    other.run(timeout, &mut *remote);
                }
            })
            .map_err(|source| FileError {
                path: directory.to_owned(),
                step: "start its thread",
                source,
            })?;
        Ok((Self { shared, thread: Some(thread) }, employ))
    }

    /// Puts what was made of a service at `at` into the spool.
    ///
    /// # Errors
    /// When it is lost.
    pub fn put(
        &self,
        at: SystemTime,
        kind: ItemKind,
        service: &str,
        payload: &[u8],
    ) -> Result<(), FileError> {
        let mut state = self.shared.lock();
        let group = state.know(service);
        let put = state.put(&self.shared.sink, at, kind, group, payload);
        drop(state);
        self.shared.changed.notify_all();
        put
    }

    /// A window that waits to be made into requests. It stays until [`done`](Self::done).
    #[must_use]
    pub fn window(&self) -> Option<Taken> {
        self.shared.lock().spool.window(Now::read())
    }

    /// True when a window waits to be made into requests.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        self.shared.lock().spool.items().values().any(|item| item.kind == ItemKind::Window)
    }

    /// Requests were made of this window.
    pub fn done(&self, window: Item) {
        let mut state = self.shared.lock();
        // It may have been evicted meanwhile, which is its end then.
        if state.spool.items().contains_key(&window.sequence) {
            state.figures.split += 1;
            state.spool.drop_item(window.sequence);
        }
    }

    /// How long new requests may be, of which the receiver is said to take `most` bytes.
    #[must_use]
    pub fn bounds(&self, most: usize) -> PartBounds {
        self.shared.lock().sizes.bounds(most, Instant::now())
    }

    /// Says what happened while requests were made.
    pub fn event(&self, event: DeliveryEvent<'_>) {
        self.shared.lock().event(&self.shared.sink, event);
    }

    /// What it did so far.
    #[must_use]
    pub fn figures(&self) -> DeliveryCounters {
        let mut state = self.shared.lock();
        state.states.look(Instant::now());
        failure_states::say(&self.shared.sink, state.states.lines());
        DeliveryCounters { lost: state.spool.lost(), ..state.figures }
    }

    /// What waits.
    #[must_use]
    pub fn backlog(&self) -> SpoolBacklog {
        self.shared.lock().backlog()
    }

    /// The same two as they are now; none while somebody else has them, who may be waiting for a
    /// disk.
    #[must_use]
    pub fn glance(&self) -> Option<(DeliveryCounters, SpoolBacklog)> {
        let state = match self.shared.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some((DeliveryCounters { lost: state.spool.lost(), ..state.figures }, state.backlog()))
    }

    /// Sends what can be sent before `deadline`, without waiting for a receiver that is away; the
    /// rest stays.
    pub fn close(&mut self, deadline: Instant) {
        self.shared.lock().closing = Some(deadline);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It panics only with a fault of this program, which the panic's message has told.
            thread.join().ok();
            let mut state = self.shared.lock();
            state.states.close(Instant::now());
            failure_states::say(&self.shared.sink, state.states.lines());
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.close(Instant::now());
    }
}

/// A delivery that begins when it is first needed: until then the one whose place it takes may
/// still be at work in the same spool. One that cannot begin is tried again with each payload: what
/// is in its way, such as a disk that is full or read-only, may pass.
pub struct LazyDelivery {
    /// What messages call the sink.
    sink: String,
    directory: PathBuf,
    limits: SpoolLimits,
    timeout: Duration,
    /// There until the delivery begins.
    remote: Option<Box<dyn Remote>>,
    delivery: Option<Delivery>,
    /// Payloads lost because it could not begin.
    lost: u64,
    /// Why it could not.
    trouble: Option<String>,
}

impl LazyDelivery {
    /// See [`Delivery::start`].
    #[must_use]
    pub fn new(
        sink: &str,
        directory: PathBuf,
        limits: SpoolLimits,
        timeout: Duration,
        remote: impl Remote,
    ) -> Self {
        let (sink, remote): (_, Option<Box<dyn Remote>>) =
            (sink.to_owned(), Some(Box::new(remote)));
        Self { sink, directory, limits, timeout, remote, delivery: None, lost: 0, trouble: None }
    }

    /// The spool's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Begins with what an earlier daemon left, if it has not begun and there is any. Where that
    /// cannot be, it is told once.
    pub fn take_up(&mut self) {
        if self.delivery.is_some() || !spool::holds_any(&self.directory) {
            return;
        }
        let before = self.trouble.take();
        let begun = self.started().map(drop);
        if let Err(error) = begun
            && before.is_none_or(|before| before != error.to_string())
        {
            tracing::warn!(sink = self.sink, %error, "what an earlier daemon left is not sent; it \
                 is tried again every minute");
        }
    }

    /// See [`Delivery::put`]; begins, if it has not.
    ///
    /// # Errors
    /// When the payload is lost, which is counted.
    pub fn put(
        &mut self,
        at: SystemTime,
        kind: ItemKind,
        service: &str,
        payload: &[u8],
    ) -> Result<(), FileError> {
        match self.started() {
            Ok(delivery) => delivery.put(at, kind, service, payload),
            Err(error) => {
                self.lost += 1;
                Err(error)
            }
        }
    }

    /// See [`Delivery::window`]; none of one that has not begun.
    #[must_use]
    pub fn window(&self) -> Option<Taken> {
        self.delivery.as_ref().and_then(Delivery::window)
    }

    /// See [`Delivery::has_windows`]; false of one that has not begun.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        self.delivery.as_ref().is_some_and(Delivery::has_windows)
    }

    /// See [`Delivery::glance`]; none of one that has not begun.
    #[must_use]
    pub fn glance(&self) -> Option<(DeliveryCounters, SpoolBacklog)> {
        let (mut figures, backlog) = self.delivery.as_ref()?.glance()?;
        figures.lost.refused += self.lost;
        Some((figures, backlog))
    }

    /// See [`Delivery::done`].
    pub fn done(&self, window: Item) {
        if let Some(delivery) = &self.delivery {
            delivery.done(window);
        }
    }

    /// See [`Delivery::bounds`].
    #[must_use]
    pub fn bounds(&self, most: usize) -> PartBounds {
        let all = PartBounds { samples: usize::MAX, bytes: most, lone_bytes: most };
        self.delivery.as_ref().map_or(all, |delivery| delivery.bounds(most))
    }

    /// See [`Delivery::event`]; begins, if it has not.
    pub fn event(&mut self, event: DeliveryEvent<'_>) {
        // What is in its way is told with the next request.
        if let Ok(delivery) = self.started() {
            delivery.event(event);
        }
    }

    fn started(&mut self) -> Result<&Delivery, FileError> {
        let delivery = match self.delivery.take() {
            Some(delivery) => delivery,
            None => {
                let start = Delivery::start(&self.sink, &self.directory, self.limits, self.timeout);
                let (delivery, employ) =
                    start.inspect_err(|error| self.trouble = Some(error.to_string()))?;
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
    pub fn figures(&self) -> DeliveryCounters {
        let mut figures = self.delivery.as_ref().map(Delivery::figures).unwrap_or_default();
        figures.lost.refused += self.lost;
        figures
    }

    /// See [`Delivery::backlog`]. Of one that has not begun nothing is known but why.
    #[must_use]
    pub fn backlog(&self) -> SpoolBacklog {
        let unknown = || SpoolBacklog { trouble: self.trouble.clone(), ..SpoolBacklog::default() };
        self.delivery.as_ref().map_or_else(unknown, Delivery::backlog)
    }

    /// What is said of what happened.
    #[cfg(test)]
    pub fn reasons(&self) -> Vec<String> {
        let reasons = |delivery: &Delivery| delivery.shared.lock().states.reasons();
        self.delivery.as_ref().map(reasons).unwrap_or_default()
    }

    /// See [`Delivery::close`].
    pub fn close(&mut self, deadline: Instant) {
        if let Some(delivery) = &mut self.delivery {
            delivery.close(deadline);
        }
    }
}

impl DeliveryShared {
    /// Nothing of the state is left half-changed by code that can panic.
    fn lock(&self) -> MutexGuard<'_, DeliveryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, timeout: Duration, remote: &mut dyn Remote) {
        loop {
            let (taken, due) = {
                let mut state = self.lock();
                loop {
                    let now = Instant::now();
                    if state.is_over() {
                        return;
                    }
                    let until = match state.next(&self.sink) {
                        Ok(taken) => break (taken, now + timeout),
                        Err(until) => until,
                    };
                    if state.closing.is_some() {
                        // What cannot be sent now stays.
                        return;
                    }
                    state = match until {
                        None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                        Some(until) => {
                            let left = until.saturating_duration_since(now);
                            self.changed
                                .wait_timeout(state, left)
                                .unwrap_or_else(PoisonError::into_inner)
                                .0
                        }
                    };
                }
            };
            // The end may come while it is on its way.
            let deadline = || self.lock().closing.map_or(due, |closing| closing.min(due));
            let verdict = remote.send(&taken.payload, &deadline);
            let known = self.lock().known_name(taken.item);
            // To read a request and to split it may take seconds: nobody waits for it.
            let answered = Answered::of(taken, known, &*remote);
            let mut state = self.lock();
            if state.is_over() && !matches!(verdict, SendOutcome::Accepted { .. }) {
                // It was cut short by the end, which says nothing of the receiver.
                state.spool.later();
                return;
            }
            let Some(split) = state.answered(&self.sink, &answered, verdict) else { continue };
            if state.closing.is_some() {
                // There is no time for it: the next daemon splits it.
                state.spool.later();
                return;
            }
            drop(state);
            let parts = remote.split(&answered.taken.payload);
            let mut state = self.lock();
            if state.is_over() {
                state.spool.later();
                return;
            }
            state.replace(&self.sink, &answered, &split, &parts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::Receiver;

    const LIMITS: SpoolLimits =
        SpoolLimits { bytes: 1 << 20, age: Duration::from_secs(3600), free_bytes: 0 };

    /// Answers as told, and tells what it was sent.
    struct Told {
        answers: Receiver<SendOutcome>,
        seen: Sender<Vec<u8>>,
    }

    impl Remote for Told {
        fn send(&mut self, payload: &[u8], _: &dyn Fn() -> Instant) -> SendOutcome {
            self.seen.send(payload.to_vec()).unwrap();
            self.answers
                .recv()
                .unwrap_or(SendOutcome::Later { after: None, reason: "nobody answers".to_owned() })
        }
    }

    fn told() -> (Told, Sender<SendOutcome>, Receiver<Vec<u8>>) {
        let (answer, answers) = channel();
        let (seen, saw) = channel();
        (Told { answers, seen }, answer, saw)
    }

    fn started(directory: &Path, remote: impl Remote) -> Delivery {
        let (delivery, employ) =
            Delivery::start("test", directory, LIMITS, Duration::from_secs(1)).unwrap();
        employ.send(Box::new(remote)).unwrap();
        delivery
    }

    #[test]
    fn a_payload_that_waits_is_passed_by_others_and_each_is_counted_by_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        for payload in [b"one", b"two", b"six"] {
            delivery.put(SystemTime::now(), ItemKind::Request, "web", payload).unwrap();
        }
        answer
            .send(SendOutcome::Later {
                after: Some(Duration::from_secs(1)),
                reason: "busy".to_owned(),
            })
            .unwrap();
        answer.send(SendOutcome::Accepted { rejected: 2, remark: None }).unwrap();
        answer.send(SendOutcome::Refused("too bad".to_owned())).unwrap();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        let seen: Vec<Vec<u8>> = (0..4).map(|_| saw.recv().unwrap()).collect();
        assert_eq!(seen, [b"one", b"two", b"six", b"one"]);
        delivery.close(Instant::now() + Duration::from_secs(60));
        let figures = delivery.figures();
        assert_eq!(
            (figures.sent, figures.refused, figures.retries, figures.rejected_profiles),
            (2, 1, 1, 2)
        );
        assert_eq!((delivery.backlog().requests, figures.sent_bytes), (0, 6));
    }

    #[test]
    fn what_a_silent_receiver_does_not_take_is_told_of_no_service() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        for service in ["web", "shop"] {
            delivery
                .put(SystemTime::now(), ItemKind::Request, service, service.as_bytes())
                .unwrap();
            answer
                .send(SendOutcome::Later { after: None, reason: "no answer in time".to_owned() })
                .unwrap();
        }
        assert_eq!((saw.recv().unwrap(), saw.recv().unwrap()), (b"web".to_vec(), b"shop".to_vec()));
        while delivery.figures().retries < 2 {
            std::thread::yield_now();
        }
        let causes = delivery.backlog().causes;
        let found: Vec<_> =
            causes.iter().map(|sum| (sum.service.as_str(), sum.count, sum.lasts)).collect();
        assert_eq!(found, [("", 2, true)]);
        drop(answer);
        delivery.close(Instant::now());
    }

    #[test]
    fn a_receiver_that_refuses_everything_does_not_empty_the_spool() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        for number in 0..20_u8 {
            delivery.put(SystemTime::now(), ItemKind::Request, "web", &[number]).unwrap();
        }
        // Not before all are written, which takes as long as the disk takes.
        for _ in 0..20 {
            answer.send(SendOutcome::Denied("who are you?".to_owned())).unwrap();
        }
        // A refusal is followed by a second of silence, in which the end comes.
        assert_eq!(saw.recv().unwrap(), vec![0]);
        while delivery.backlog().trouble.is_none() {
            std::thread::yield_now();
        }
        delivery.close(Instant::now() + Duration::from_secs(60));
        let (figures, backlog) = (delivery.figures(), delivery.backlog());
        assert_eq!((figures.sent, figures.refused), (0, 1));
        assert_eq!((backlog.requests, backlog.trouble.as_deref()), (19, Some("who are you?")));
    }

    #[test]
    fn a_payload_that_cannot_be_read_is_waited_for_and_costs_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), LIMITS).unwrap();
        spool.put(SystemTime::now(), b"one").unwrap();
        let found = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
        let first =
            found.into_iter().find(|path| path.to_str().unwrap().ends_with(".spooled")).unwrap();
        spool.put(SystemTime::now(), b"two").unwrap();
        drop(spool);
        let mut delivery =
            Delivery::start("test", directory.path(), LIMITS, Duration::from_secs(1)).unwrap();
        std::fs::remove_file(&first).and_then(|()| std::fs::create_dir(&first)).unwrap();
        let (remote, _answer, saw) = told();
        delivery.1.send(Box::new(remote)).unwrap();
        while delivery.0.backlog().trouble.is_none() {
            std::thread::yield_now();
        }
        // The first failure is followed by a second of silence, in which the end comes.
        delivery.0.close(Instant::now() + Duration::from_secs(60));
        let figures = delivery.0.figures();
        assert_eq!(
            (figures.reads_failed, figures.retries, delivery.0.backlog().requests),
            (1, 0, 2)
        );
        assert_eq!(figures.lost, spool::SpoolLosses::default());
        assert!(saw.try_recv().is_err());
    }

    #[test]
    fn what_was_not_sent_waits_for_the_next_daemon() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        delivery.put(SystemTime::now(), ItemKind::Request, "web", b"kept").unwrap();
        saw.recv().unwrap();
        // Nobody answers: the close does not wait for a receiver that is away.
        drop(answer);
        delivery.close(Instant::now() + Duration::from_secs(3600));
        assert_eq!((delivery.backlog().requests, delivery.figures().sent), (1, 0));

        let (remote, answer, saw) = told();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
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
        delivery.put(SystemTime::now(), ItemKind::Request, "web", &profile(0)).unwrap();
        assert_eq!(saw.recv().unwrap(), profile(0));
        for number in 1..40 {
            delivery.put(SystemTime::now(), ItemKind::Request, "web", &profile(number)).unwrap();
        }
        // Ten find room.
        assert_eq!((delivery.backlog().requests, delivery.backlog().bytes), (10, 1_000_000));
        for _ in 0..10 {
            answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        }
        delivery.close(Instant::now() + Duration::from_secs(60));
        assert!(saw.try_iter().eq((31..40).map(profile)));
        let figures = delivery.figures();
        assert_eq!((figures.sent, figures.lost.evicted, delivery.backlog().requests), (10, 30, 0));
    }

    #[test]
    fn what_an_earlier_daemon_left_is_sent_without_a_new_profile() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("spool");
        let (remote, answer, saw) = told();
        let mut lazy =
            LazyDelivery::new("test", directory.clone(), LIMITS, Duration::from_secs(1), remote);
        lazy.take_up();
        assert!(lazy.delivery.is_none() && !directory.exists(), "there is nothing to begin for");
        let mut former = Spool::open(&directory, LIMITS).unwrap();
        lazy.take_up();
        assert!(lazy.delivery.is_none(), "an empty one is nothing to begin for either");
        former.put(SystemTime::now(), b"left").unwrap();
        drop(former);
        let lock = directory.join(crate::lock::NAME);
        std::fs::remove_file(&lock).and_then(|()| std::fs::create_dir(&lock)).unwrap();
        lazy.take_up();
        let trouble = lazy.backlog().trouble.unwrap();
        assert!(trouble.contains(lock.to_str().unwrap()), "{trouble}");
        std::fs::remove_dir(&lock).unwrap();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        lazy.take_up();
        assert_eq!(saw.recv().unwrap(), b"left");
        lazy.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((lazy.figures().sent, lazy.backlog().requests), (1, 0));
    }

    #[test]
    fn a_payload_that_a_receiver_fails_on_waits_and_is_passed_over_in_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = told();
        let mut delivery = started(directory.path(), remote);
        delivery.put(SystemTime::now(), ItemKind::Request, "web", b"odd").unwrap();
        answer.send(SendOutcome::Failed("internal".to_owned())).unwrap();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        assert_eq!((saw.recv().unwrap(), saw.recv().unwrap()), (b"odd".to_vec(), b"odd".to_vec()));
        delivery.close(Instant::now() + Duration::from_secs(60));
        let figures = delivery.figures();
        assert_eq!((figures.sent, figures.retries, figures.refused), (1, 1, 0));
    }

    #[test]
    fn a_spool_that_cannot_be_opened_is_tried_again_and_what_is_lost_meanwhile_counted() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("spool");
        std::fs::write(&directory, "in the way").unwrap();
        let (remote, answer, saw) = told();
        let mut lazy =
            LazyDelivery::new("test", directory.clone(), LIMITS, Duration::from_secs(1), remote);
        for _ in 0..2 {
            let error = lazy
                .put(SystemTime::now(), ItemKind::Request, "web", b"lost")
                .unwrap_err()
                .to_string();
            assert!(error.contains(directory.to_str().unwrap()), "{error}");
            assert_eq!(lazy.backlog().trouble, Some(error));
        }
        assert_eq!(lazy.figures().lost.refused, 2);
        std::fs::remove_file(&directory).unwrap();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        lazy.put(SystemTime::now(), ItemKind::Request, "web", b"sent").unwrap();
        assert_eq!(saw.recv().unwrap(), b"sent");
        lazy.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((lazy.figures().sent, lazy.figures().lost.refused), (1, 2));
    }
}
