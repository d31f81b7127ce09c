//! One sink on a thread of its own, with windows that wait for it: a disk or mount that does not
//! answer holds up nobody else's profiles.

use super::backlog_trend::{self, BacklogChange, BacklogTrend};
use super::end_losses::EndLosses;
use super::queue::{NoWindow, WindowProfiles, WindowQueue};
use perfusion_export::deliver::SpoolBacklog;
use perfusion_export::failure_states::{self, DeliveryEvent, Ends, States, counted};
use perfusion_export::file::FileError;
use perfusion_export::parts::SinkSignals;
use perfusion_export::{FinishedProfile, Sink, SinkError};
use perfusion_host::priority;
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A sink has put all windows away so long after the daemon was told to end.
const WINDOWS_WITHIN: Duration = Duration::from_millis(2800);
/// A sink has at least this long for the last window, however late the recording hands it over.
const LAST_WINDOWS: Duration = Duration::from_secs(2);
/// How long requests are made of the last window. The rest of it waits in the spool, for the next
/// daemon.
const LAST_PARTS: Duration = Duration::from_millis(700);
/// How long what is to be sent is sent then, from the same moment on.
const LAST: Duration = Duration::from_millis(1500);
/// So long after the daemon was told to end no more requests are made, whatever the recording's end
/// took.
const PARTS_WITHIN: Duration = Duration::from_millis(1600);
/// The same of sending: the daemon ends within three seconds.
const SENT_WITHIN: Duration = Duration::from_millis(2400);
/// What a sink counts between two windows, such as what a receiver took or refused, is published so
/// often.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// Where no windows come, such as while recording is switched off, a sink has its moment so often:
/// what is too old goes then, too.
const NO_WINDOW: Duration = Duration::from_secs(60);
/// The same of one that waits for memory which others have.
const SHORT_OF_MEMORY: Duration = Duration::from_secs(1);

/// Why profiles are lost for which no time was left.
const LATE: &str = "no time was left for them before the end: the disk or the machine is very busy";

/// What is said when a sink panics; the panic's own message has been printed.
const PANICKED: &str = "it panicked: a fault of this program; please report it";

/// How a sink stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SinkStatus {
    /// What messages call it.
    pub sink: String,
    /// Name and value of each of its counters.
    pub counters: Vec<(&'static str, u64)>,
    /// What waits to be sent, of one that has a spool.
    pub backlog: Option<SpoolBacklog>,
    /// Profiles it was too busy for.
    pub dropped: u64,
    /// Profiles that are lost because the daemon ends.
    pub lost_at_end: u64,
    /// Profiles that wait for it, without those of the window it is at.
    pub waiting: usize,
    /// How long it has been at work on the present window.
    pub busy: Duration,
    /// How long nothing of that has gone on, as where a disk does not answer.
    pub still: Duration,
}

impl SinkStatus {
    /// Name and value of each counter and gauge.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let of_worker = [
            ("profiles_dropped", self.dropped),
            ("profiles_lost_at_end", self.lost_at_end),
            ("busy_seconds", self.busy.as_secs()),
        ];
        let of_sink =
            self.counters.iter().copied().chain(self.backlog.iter().flat_map(SpoolBacklog::gauges));
        of_sink.chain(of_worker)
    }
}

/// A sink, and those that took its place one after the other: what waits and what they counted is
/// of them all.
pub struct SinkWorker {
    name: String,
    place: PathBuf,
    shared: Arc<WorkerShared>,
    /// The sink until it is at work: it waits for the one before to end.
    next: PendingSink,
    thread: Option<WorkerThread>,
    /// Another one of its name goes on, in another place.
    is_replaced: bool,
}

type PendingSink = Arc<Mutex<Option<Box<dyn Sink>>>>;

/// A sink's thread. It returns its work where another thread is to go on with it.
pub type WorkerThread = JoinHandle<Option<SinkThread>>;

/// What the thread of a sink begins with.
struct WorkerStart {
    shared: Arc<WorkerShared>,
    turn: u64,
    next: PendingSink,
    before: Option<WorkerThread>,
}

/// What a sink takes over.
pub enum PreviousWorker {
    /// Nothing.
    None,
    /// All, of one that works in the same place, when that has done what it is doing.
    Here(SinkWorker),
    /// What waits for one of its name that works in another place, and what that has counted. The
    /// two are at work at once: a disk that does not answer is abandoned.
    Elsewhere(SinkWorker),
}

struct WorkerShared {
    queue: WindowQueue,
    state: Mutex<WorkerState>,
    signals: SinkSignals,
}

impl Default for WorkerShared {
    fn default() -> Self {
        let signals = SinkSignals::default();
        Self { queue: WindowQueue::with(signals.waits()), state: Mutex::default(), signals }
    }
}

#[derive(Default)]
struct WorkerState {
    /// Work on the present window began then.
    busy: Option<Instant>,
    /// The same of one of its profiles.
    at_one: Option<Instant>,
    /// What is left of the present window, the smallest profile last.
    window: WindowProfiles,
    /// Another thread takes over, because the daemon ends.
    hands_over: bool,
    /// The daemon ends: what is not put by then is lost.
    closing: Option<Instant>,
    /// So many profiles were lost by that.
    lost_at_end: u64,
    /// The same, and what is not sent by then waits for the next one.
    last: Option<Instant>,
    /// What those before counted: one that takes another's place goes on from there, since counters
    /// grow only.
    previous: BTreeMap<&'static str, u64>,
    counters: Vec<(&'static str, u64)>,
    backlog: Option<SpoolBacklog>,
}

impl WorkerShared {
    fn state(&self) -> MutexGuard<'_, WorkerState> {
        lock(&self.state)
    }

    /// Those that were published, and what was counted since. Each grows only, so that the larger
    /// value is the newer.
    fn counters(&self, state: &WorkerState) -> Vec<(&'static str, u64)> {
        let mut counters = state.counters.clone();
        for (name, value) in self.signals.reported().counters {
            let value = value + state.previous.get(name).copied().unwrap_or_default();
            match counters.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = value.max(*known),
                None => counters.push((name, value)),
            }
        }
        counters
    }

    /// Of a sink that goes on elsewhere.
    fn after(before: &Self) -> Self {
        let this = Self::default();
        this.queue.take_over(&before.queue);
        let counters = before.counters(&before.state());
        // Until it has said anything itself.
        let state = WorkerState {
            previous: counters.iter().copied().collect(),
            counters,
            ..WorkerState::default()
        };
        Self { state: Mutex::new(state), ..this }
    }
}

impl SinkWorker {
    /// Puts a sink to work. The second worker is the previous one, where there is one and it ends
    /// now.
    ///
    /// # Errors
    /// When the thread cannot be made. The previous one goes on as it was.
    pub fn start(
        sink: Box<dyn Sink>,
        previous: PreviousWorker,
    ) -> Result<(Self, Option<Self>), (io::Error, PreviousWorker)> {
        let (previous, sink) = match previous {
            PreviousWorker::Here(worker) => match worker.exchange(sink) {
                // Its thread is there and waits: however often that happens there is one.
                None => return Ok((worker, None)),
                Some(sink) => (PreviousWorker::Here(worker), sink),
            },
            previous => (previous, sink),
        };
        let (hand, handed) = channel::<WorkerStart>();
        let spawned = std::thread::Builder::new().name("sink".into()).spawn(move || {
            priority::wait_for_others();
            handed.recv().ok().and_then(WorkerStart::run)
        });
        let thread = match spawned {
            Ok(thread) => thread,
            Err(error) => return Err((error, previous)),
        };
        let (name, place) = (sink.name().to_owned(), sink.place().to_owned());
        let (shared, before, ended) = match previous {
            PreviousWorker::None => (Arc::default(), None, None),
            PreviousWorker::Here(worker) => (worker.shared, worker.thread, None),
            PreviousWorker::Elsewhere(mut worker) => {
                worker.is_replaced = true;
                (Arc::new(WorkerShared::after(&worker.shared)), None, Some(worker))
            }
        };
        let (turn, next) = (shared.queue.take_turn(), Arc::new(Mutex::new(Some(sink))));
        let begin =
            WorkerStart { shared: Arc::clone(&shared), turn, next: Arc::clone(&next), before };
        // It waits for nothing else.
        hand.send(begin).ok();
        Ok((Self { name, place, shared, next, thread: Some(thread), is_replaced: false }, ended))
    }

    /// Puts a sink in the place of one that is not at work yet; gives it back where that is.
    fn exchange(&self, sink: Box<dyn Sink>) -> Option<Box<dyn Sink>> {
        let mut next = lock(&self.next);
        if next.is_none() {
            return Some(sink);
        }
        self.shared.queue.open();
        *next = Some(sink);
        None
    }

    /// What messages call the sink.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The directory that it works in.
    #[must_use]
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// True when another one of its name goes on.
    #[must_use]
    pub fn is_replaced(&self) -> bool {
        self.is_replaced
    }

    /// True when no window waits for it, but the one that it is at.
    #[must_use]
    pub fn none_waits(&self) -> bool {
        self.shared.queue.waiting() == 0
    }

    /// The services of all profiles that it has not put away.
    #[must_use]
    pub fn unfinished(&self) -> Vec<Arc<str>> {
        let mut services = self.shared.queue.services();
        let state = self.shared.state();
        services.extend(state.window.iter().map(|finished| Arc::clone(&finished.service)));
        services
    }

    /// Hands a window over, see [`WindowQueue::give`].
    pub fn give(&self, window: &WindowProfiles, limit: u64) -> bool {
        self.shared.queue.give(window, limit)
    }

    /// How the sink stands, as of the last window or second.
    #[must_use]
    pub fn standing(&self) -> SinkStatus {
        let signals = &self.shared.signals;
        let state = self.shared.state();
        let since = |began: Option<Instant>, later: Option<Instant>| {
            began
                .map(|began| later.map_or(began, |later| began.max(later)).elapsed())
                .unwrap_or_default()
        };
        SinkStatus {
            sink: self.name.clone(),
            counters: self.shared.counters(&state),
            backlog: signals.reported().backlog.or_else(|| state.backlog.clone()),
            dropped: self.shared.queue.dropped(),
            lost_at_end: state.lost_at_end,
            waiting: self.shared.queue.waiting(),
            busy: since(state.busy, signals.began()),
            // A window of many parts is many writes.
            still: since(state.at_one, signals.last_step()),
        }
    }

    /// Tells it that nothing more comes: no configuration has it any more.
    pub fn leave(&self) {
        self.shared.queue.close();
    }

    /// True while the sink, or one whose place it takes, is at work.
    pub fn is_at_work(&mut self) -> bool {
        self.thread = self.thread.take().filter(|thread| !thread.is_finished());
        self.thread.is_some()
    }

    /// The daemon was told to end at `told`, and its recording ends now: a new thread goes on in
    /// place of the present one. That has a low priority, which it cannot raise again, so on a busy
    /// machine it would not come to put the windows away.
    pub fn hasten(&mut self, told: Instant) {
        self.shared.signals.end_at_the_latest(told + PARTS_WITHIN);
        let Some(before) = self.thread.take_if(|thread| !thread.is_finished()) else { return };
        let (hand, handed) = channel::<(WorkerThread, u64)>();
        let spawned = std::thread::Builder::new().name("sink".into()).spawn(move || {
            let (before, turn) = handed.recv().ok()?;
            // One that panicked has said so.
            let work = before.join().ok().flatten()?;
            SinkThread { turn, ..work }.until_over()
        });
        self.thread = Some(match spawned {
            Ok(thread) => {
                self.shared.state().hands_over = true;
                // It waits for nothing else.
                hand.send((before, self.shared.queue.take_turn())).ok();
                thread
            }
            // The present one goes on.
            Err(_) => before,
        });
    }

    /// Tells it that nothing more comes, and not to take long over the rest, since the daemon was
    /// told to end at `told`. Its end is to be waited for.
    pub fn close(&mut self, told: Instant) -> Option<WorkerThread> {
        let now = Instant::now();
        self.shared.signals.end_by((now + LAST_PARTS).min(told + PARTS_WITHIN));
        {
            let mut state = self.shared.state();
            let last = (now + LAST).min(told + SENT_WITHIN);
            let closing = (now + LAST_WINDOWS).max(told + WINDOWS_WITHIN);
            (state.closing, state.last) = (Some(closing), Some(last));
        }
        self.shared.queue.close();
        self.thread.take()
    }
}

impl WorkerStart {
    fn run(self) -> Option<SinkThread> {
        // One that panicked has said so.
        if let Some(Ok(Some(before))) = self.before.map(JoinHandle::join) {
            before.end();
        }
        let sink = lock(&self.next).take()?;
        SinkThread::new(sink, self.shared, self.turn).until_over()
    }
}

/// Nothing panics while it is held.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A sink at work on its thread.
pub struct SinkThread {
    sink: Box<dyn Sink>,
    shared: Arc<WorkerShared>,
    turn: u64,
    /// Profiles of the present window that it did not take.
    failed: usize,
    /// What is lost because the daemon ends.
    losses: EndLosses,
    /// What is said of how it fails.
    states: States,
    /// Whether its receiver keeps up.
    trend: BacklogTrend,
    /// When what it counts is published next, where no window comes before.
    publish_at: Instant,
    /// When the sink has its moment next, likewise.
    moment_at: Instant,
}

impl SinkThread {
    fn new(mut sink: Box<dyn Sink>, shared: Arc<WorkerShared>, turn: u64) -> Self {
        let now = Instant::now();
        sink.hurries(shared.signals.clone());
        Self {
            sink,
            shared,
            turn,
            failed: 0,
            losses: EndLosses::default(),
            states: States::default(),
            trend: BacklogTrend::default(),
            publish_at: now,
            moment_at: now + NO_WINDOW,
        }
    }

    /// Works until no window comes any more. Returns what another thread is to go on with.
    fn until_over(mut self) -> Option<Self> {
        // The rest of the window that the thread before was at.
        self.go_on();
        while !self.hands_over() {
            match self.shared.queue.next(self.turn, self.publish_at.min(self.moment_at)) {
                Ok(window) => self.put(window),
                Err(NoWindow::Yet) => {
                    if Instant::now() >= self.moment_at {
                        self.window_over();
                    }
                    self.publish();
                }
                Err(NoWindow::Over) if self.hands_over() => break,
                Err(NoWindow::Over) => {
                    self.end();
                    return None;
                }
            }
        }
        Some(self)
    }

    /// True when another thread goes on.
    fn hands_over(&self) -> bool {
        self.shared.state().hands_over && !self.shared.queue.has_turn(self.turn)
    }

    /// The sink's last moment.
    fn end(mut self) {
        let last = self.shared.state().last;
        let deadline = last.unwrap_or_else(|| Instant::now() + LAST);
        self.states.close(Instant::now());
        failure_states::say(self.sink.name(), self.states.lines());
        self.losses.say(self.sink.name());
        self.timed(|sink| sink.close(deadline));
        self.publish();
        let mut state = self.shared.state();
        state.previous = state.counters.iter().copied().collect();
    }

    fn put(&mut self, mut window: WindowProfiles) {
        let profiles = window.len();
        // What takes long is in the way of nothing else.
        window.sort_by_key(|finished| finished.profile.bytes().len());
        window.reverse();
        {
            let mut state = self.shared.state();
            (state.busy, state.window) = (Some(Instant::now()), window);
        }
        self.look_at_backlog(profiles);
        self.go_on();
    }

    /// Goes on with the present window, if there is one.
    fn go_on(&mut self) {
        if self.shared.state().busy.is_none() {
            return;
        }
        // One after the other is let go.
        loop {
            if self.hands_over() {
                return;
            }
            let Some(finished) = self.shared.state().window.pop() else { break };
            if self.closing().is_some_and(|closing| Instant::now() >= closing) {
                self.lost(&finished, LATE);
            } else {
                let put = self.timed(|sink| sink.put(&finished));
                let put =
                    put.unwrap_or_else(|| Err(SinkError::Refused { reason: PANICKED.to_owned() }));
                if let Err(error) = put {
                    self.failed(&finished, &error);
                }
            }
            self.shared.queue.done(&finished);
            if Instant::now() >= self.publish_at {
                self.publish();
            }
        }
        let sink = self.sink.name();
        self.states.look(Instant::now());
        failure_states::say(sink, self.states.lines());
        tracing::debug!(sink, failed = self.failed, "window handed over");
        self.failed = 0;
        self.window_over();
        self.publish();
        self.shared.state().busy = None;
    }

    /// The sink did not take a profile.
    fn failed(&mut self, finished: &FinishedProfile, error: &SinkError) {
        self.failed += 1;
        let (reason, detail) = match error {
            // A path names the service.
            SinkError::File(FileError { path, step, source }) => {
                (format!("cannot {step}: {source}"), path.display().to_string())
            }
            _ => (error.to_string(), finished.service.to_string()),
        };
        let event = DeliveryEvent {
            service: "",
            reason: &reason,
            detail: &detail,
            then: "a profile is lost",
            count: 1,
            unit: "profiles",
            ends: Ends::WhenQuiet,
        };
        self.states.event(event, Instant::now());
        if self.closing().is_some() {
            self.lost(finished, &reason);
        }
    }

    /// A profile is lost because this is the end.
    fn lost(&mut self, finished: &FinishedProfile, cause: &str) {
        self.losses.add(cause, &finished.service);
        self.shared.state().lost_at_end += 1;
    }

    /// Says when ever more waits for its receiver, and when that is over.
    fn look_at_backlog(&mut self, profiles: usize) {
        let Some(Some(SpoolBacklog { requests, bytes, .. })) = self.timed(|sink| sink.backlog())
        else {
            return;
        };
        let sink = self.sink.name();
        match self.trend.window(u64::try_from(profiles).unwrap_or(u64::MAX), requests) {
            None => {}
            Some(BacklogChange::FallsBehind) => tracing::warn!(
                target: failure_states::SAID,
                sink,
                "falls behind: what waits for it has grown for {} windows, to {}, {bytes} bytes in \
                 all",
                backlog_trend::WINDOWS,
                counted(requests, "requests")
            ),
            Some(BacklogChange::CaughtUp) => tracing::info!(
                target: failure_states::SAID,
                sink,
                "has caught up: {} still waiting, {bytes} bytes in all",
                counted(requests, "requests")
            ),
        }
    }

    fn window_over(&mut self) {
        let short = self.timed(|sink| {
            sink.window_over();
            sink.is_short_of_memory()
        });
        self.moment_at =
            Instant::now() + if short == Some(true) { SHORT_OF_MEMORY } else { NO_WINDOW };
    }

    fn publish(&mut self) {
        self.publish_at = Instant::now() + PUBLISH_EVERY;
        // It may have to wait for its spool.
        let Some((mut counters, backlog)) = self.timed(|sink| (sink.counters(), sink.backlog()))
        else {
            return;
        };
        let mut state = self.shared.state();
        for (counter, value) in &mut counters {
            *value += state.previous.get(counter).copied().unwrap_or_default();
        }
        (state.counters, state.backlog) = (counters, backlog);
        self.shared.signals.is_reported();
    }

    /// Until when there is time, where the daemon ends.
    fn closing(&self) -> Option<Instant> {
        self.shared.state().closing
    }

    /// Has the sink do something, and says so meanwhile; `None` when it panicked, which costs no
    /// more than what it was at.
    fn timed<T>(&mut self, work: impl FnOnce(&mut dyn Sink) -> T) -> Option<T> {
        let is_own = {
            let (mut state, now) = (self.shared.state(), Some(Instant::now()));
            state.at_one = now;
            let is_own = state.busy.is_none();
            state.busy = state.busy.or(now);
            is_own
        };
        let sink = &mut *self.sink;
        // A sink keeps no promise of memory across its calls, and what it counts may be off by what
        // it was at.
        let done = catch_unwind(AssertUnwindSafe(|| work(sink)));
        {
            let mut state = self.shared.state();
            state.at_one = None;
            state.busy = state.busy.filter(|_| !is_own);
        }
        if done.is_err() {
            tracing::error!(sink = self.sink.name(), "{PANICKED}");
        }
        done.ok()
    }
}

/// Sinks of tests.
#[cfg(test)]
pub mod tests {
    use super::*;
    use perfusion_export::parts::SinkReport;
    use perfusion_pprof::proto::Profile;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::SystemTime;

    /// What one service did.
    pub fn finished(service: &str) -> Arc<FinishedProfile> {
        Arc::new(FinishedProfile {
            service: service.into(),
            labels: BTreeMap::new(),
            start: SystemTime::now(),
            duration: Duration::from_secs(60),
            profile: perfusion_export::Packed::new(
                perfusion_pprof::pack(&Profile::default()).unwrap(),
            ),
        })
    }

    /// Waits for a moment that comes sooner or later.
    pub fn until(mut what: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !what() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    }

    struct Broken;

    impl Sink for Broken {
        fn name(&self) -> &str {
            "broken"
        }

        fn place(&self) -> &Path {
            Path::new("")
        }

        fn put(&mut self, _: &FinishedProfile) -> Result<(), SinkError> {
            Err(SinkError::Refused { reason: "it is broken".to_owned() })
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn a_sink_that_fails_is_reported_once_with_all_it_cost() {
        let shared = Arc::<WorkerShared>::default();
        let mut work = SinkThread::new(Box::new(Broken), Arc::clone(&shared), 0);
        for _ in 0..3 {
            let window = ["web", "shop"].into_iter().map(finished).collect();
            assert!(shared.queue.give(&window, 0));
            work.put(shared.queue.next(work.turn, Instant::now()).unwrap());
        }
        let sums: Vec<(String, u64)> =
            work.states.sums().map(|sum| (sum.cause, sum.count)).collect();
        assert_eq!(sums, [("it is broken; a profile is lost".to_owned(), 6)]);
    }

    /// Says what it was given, and comes to the end of its time with the second.
    struct Late(Sender<Arc<str>>, Arc<WorkerShared>);

    impl Sink for Late {
        fn name(&self) -> &str {
            "late"
        }

        fn place(&self) -> &Path {
            Path::new("")
        }

        fn put(&mut self, finished: &FinishedProfile) -> Result<(), SinkError> {
            self.0.send(Arc::clone(&finished.service)).unwrap();
            if &*finished.service == "b" {
                self.1.state().closing = Some(Instant::now());
            }
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn the_end_waits_for_no_more_than_is_done_in_its_time() {
        let ((tell, told), shared) = (channel(), Arc::<WorkerShared>::default());
        let work =
            SinkThread::new(Box::new(Late(tell, Arc::clone(&shared))), Arc::clone(&shared), 0);
        assert!(shared.queue.give(&["a", "b", "c"].map(finished).to_vec(), u64::MAX));
        assert!(shared.queue.give(&vec![finished("d")], u64::MAX));
        shared.queue.close();
        assert!(work.until_over().is_none());
        assert_eq!(told.into_iter().collect::<Vec<_>>(), ["a".into(), "b".into()]);
        assert_eq!(shared.state().lost_at_end, 2, "of c and d");
    }

    #[test]
    fn a_profile_that_fails_at_the_end_is_counted_as_lost_by_service_and_cause() {
        let shared = Arc::<WorkerShared>::default();
        let mut work = SinkThread::new(Box::new(Broken), Arc::clone(&shared), 0);
        let put = |work: &mut SinkThread, window: WindowProfiles| {
            assert!(shared.queue.give(&window, u64::MAX));
            work.put(shared.queue.next(work.turn, Instant::now()).unwrap());
        };
        put(&mut work, window("before"));
        assert_eq!(shared.state().lost_at_end, 0, "the sink counts it");
        shared.state().closing = Some(Instant::now() + Duration::from_secs(60));
        put(&mut work, ["web", "shop"].map(finished).to_vec());
        assert_eq!(shared.state().lost_at_end, 2);
        assert_eq!(work.losses.sums(), [("it is broken", 2, "1 of shop, 1 of web".to_owned())]);
    }

    #[test]
    fn another_thread_goes_on_in_the_middle_of_a_window_when_the_daemon_ends() {
        let (sink, heard, goes_on) = slow("/a");
        let mut worker = started(sink, PreviousWorker::None).0;
        assert!(worker.give(&["a", "b"].map(finished).to_vec(), u64::MAX));
        assert!(worker.give(&window("c"), u64::MAX));
        assert_eq!(&*heard.recv().unwrap(), "a");
        let before = worker.thread.as_ref().unwrap().thread().id();
        assert_eq!(worker.unfinished().len(), 2);
        worker.hasten(Instant::now());
        assert_ne!(worker.thread.as_ref().unwrap().thread().id(), before);
        assert!(worker.standing().busy > Duration::ZERO && heard.try_recv().is_err());
        assert!(worker.give(&window("d"), u64::MAX), "the recording's end comes later");
        let thread = worker.close(Instant::now()).unwrap();
        drop(goes_on);
        assert!(thread.join().unwrap().is_none());
        assert!(heard.iter().eq(["b", "c", "d"].map(Arc::from)));
        assert_eq!((worker.standing().lost_at_end, worker.standing().waiting), (0, 0));
        // Nobody is at work any more.
        worker.hasten(Instant::now());
        assert!(!worker.is_at_work());
    }

    /// Says what it counts while it is at work, and goes on when it is told to.
    struct Reports(SinkSignals, Receiver<u64>, u64);

    impl Sink for Reports {
        fn name(&self) -> &str {
            "reports"
        }

        fn place(&self) -> &Path {
            Path::new("")
        }

        fn hurries(&mut self, signals: SinkSignals) {
            self.0 = signals;
        }

        fn put(&mut self, _: &FinishedProfile) -> Result<(), SinkError> {
            if let Ok(value) = self.1.recv() {
                let backlog = Some(SpoolBacklog { requests: value, ..SpoolBacklog::default() });
                std::thread::sleep(Duration::from_millis(600));
                self.0.report(|| {
                    Some(SinkReport { counters: vec![("requests_made", value)], backlog })
                });
                self.1.recv().unwrap();
                self.2 = value;
            }
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            vec![("requests_made", self.2)]
        }
    }

    #[test]
    fn numbers_move_while_a_window_is_made_and_busy_is_since_it_began() {
        let (tell, told) = channel();
        let mut worker =
            started(Box::new(Reports(SinkSignals::default(), told, 0)), PreviousWorker::None).0;
        let began = Instant::now();
        assert!(worker.give(&["a", "b", "c"].map(finished).to_vec(), u64::MAX));
        for value in [3, 4] {
            tell.send(value).unwrap();
            until(|| {
                worker.standing().values().any(|value_of| value_of == ("requests_made", value))
            });
            assert_eq!(worker.standing().backlog.map(|backlog| backlog.requests), Some(value));
            // It goes on with the next profile of the same window.
            tell.send(0).unwrap();
        }
        let (passed, standing) = (began.elapsed(), worker.standing());
        assert!(
            standing.busy >= Duration::from_millis(1200) && standing.busy <= began.elapsed(),
            "{passed:?}"
        );
        drop(tell);
        until(|| worker.standing().busy.is_zero());
        // What it says itself is the last word.
        until(|| {
            worker.standing().counters == [("requests_made", 4)]
                && worker.standing().backlog.is_none()
        });
        worker.close(Instant::now()).unwrap().join().unwrap();
    }

    /// Says until when it may send.
    struct Sends(Sender<(Instant, SinkSignals)>, SinkSignals);

    impl Sink for Sends {
        fn name(&self) -> &str {
            "sends"
        }

        fn place(&self) -> &Path {
            Path::new("")
        }

        fn hurries(&mut self, signals: SinkSignals) {
            self.1 = signals;
        }

        fn put(&mut self, _: &FinishedProfile) -> Result<(), SinkError> {
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }

        fn close(&mut self, deadline: Instant) {
            self.0.send((deadline, self.1.clone())).unwrap();
        }
    }

    #[test]
    fn the_end_is_measured_from_when_the_daemon_was_told_to() {
        for (recording_took, sends, makes) in
            [(0, 1500, true), (1900, 500, false), (9000, 0, false)]
        {
            let (tell, heard) = channel();
            let mut worker =
                started(Box::new(Sends(tell, SinkSignals::default())), PreviousWorker::None).0;
            let now = Instant::now();
            let told = now.checked_sub(Duration::from_millis(recording_took)).unwrap();
            let thread = worker.close(told).unwrap();
            let (deadline, signals) = heard.recv().unwrap();
            let left = deadline.saturating_duration_since(now);
            // Whatever passed between the two looks at the clock.
            let most = Duration::from_millis(sends) + now.elapsed();
            assert!(
                left <= most && left >= Duration::from_millis(sends),
                "{recording_took}: {left:?}"
            );
            assert_eq!(signals.is_over(), !makes, "{recording_took}");
            thread.join().unwrap();
        }
    }

    struct Moments(Sender<()>);

    impl Sink for Moments {
        fn name(&self) -> &str {
            "moments"
        }

        fn place(&self) -> &Path {
            Path::new("")
        }

        fn put(&mut self, _: &FinishedProfile) -> Result<(), SinkError> {
            Ok(())
        }

        fn window_over(&mut self) {
            self.0.send(()).unwrap();
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn a_sink_has_its_moment_where_no_window_comes() {
        let ((tell, moments), shared) = (channel(), Arc::<WorkerShared>::default());
        let mut work = SinkThread::new(Box::new(Moments(tell)), Arc::clone(&shared), 0);
        work.moment_at = Instant::now();
        let at_work = std::thread::spawn(move || work.until_over());
        moments.recv_timeout(NO_WINDOW).unwrap();
        assert!(moments.try_recv().is_err(), "the next one is a minute later");
        shared.queue.close();
        at_work.join().unwrap();
    }

    /// Counts what it is told, and one more when it is closed.
    pub struct Counting(pub &'static str, pub Arc<AtomicU64>);

    impl Sink for Counting {
        fn name(&self) -> &str {
            self.0
        }

        fn place(&self) -> &Path {
            Path::new("")
        }

        fn put(&mut self, _: &FinishedProfile) -> Result<(), SinkError> {
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            vec![("requests_sent", self.1.load(Ordering::Relaxed))]
        }

        fn close(&mut self, _: Instant) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn counters_are_published_without_a_window() {
        let count = Arc::new(AtomicU64::new(0));
        let mut worker =
            started(Box::new(Counting("a", Arc::clone(&count))), PreviousWorker::None).0;
        for value in [3, 4] {
            count.store(value, Ordering::Relaxed);
            until(|| worker.standing().counters == [("requests_sent", value)]);
        }
        worker.close(Instant::now()).unwrap().join().unwrap();
    }

    fn started(sink: Box<dyn Sink>, previous: PreviousWorker) -> (SinkWorker, Option<SinkWorker>) {
        SinkWorker::start(sink, previous).map_err(|(error, _)| error).unwrap()
    }

    /// Says what it was given, and is at it until it is told to go on.
    pub struct Slow {
        /// Its name.
        pub name: &'static str,
        /// The directory it works in.
        pub place: &'static str,
        /// Hears of each profile.
        pub given: Sender<Arc<str>>,
        /// Lets it go on, for good when nobody is there.
        pub go_on: Receiver<()>,
    }

    impl Sink for Slow {
        fn name(&self) -> &str {
            self.name
        }

        fn place(&self) -> &Path {
            Path::new(self.place)
        }

        fn put(&mut self, finished: &FinishedProfile) -> Result<(), SinkError> {
            self.given.send(Arc::clone(&finished.service)).ok();
            self.go_on.recv().ok();
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    fn slow(place: &'static str) -> (Box<Slow>, Receiver<Arc<str>>, Sender<()>) {
        let ((given, heard), (go_on, told)) = (channel(), channel());
        (Box::new(Slow { name: "slow", place, given, go_on: told }), heard, go_on)
    }

    fn window(service: &str) -> WindowProfiles {
        vec![finished(service)]
    }

    /// One that is at "a" and goes on when it is told to, and for which "b" waits.
    fn hanging() -> (SinkWorker, Receiver<Arc<str>>, Sender<()>) {
        let (sink, heard, goes_on) = slow("/a");
        let worker = started(sink, PreviousWorker::None).0;
        assert!(worker.give(&window("a"), u64::MAX) && worker.give(&window("b"), u64::MAX));
        assert_eq!(&*heard.recv().unwrap(), "a");
        until(|| worker.standing().busy > Duration::ZERO);
        (worker, heard, goes_on)
    }

    #[test]
    fn what_waits_is_for_the_sink_that_takes_the_place_when_the_one_before_is_done() {
        let (worker, first_heard, first_goes_on) = hanging();
        let ((second, second_heard, second_goes_on), (third, third_heard, third_goes_on)) =
            (slow("/a"), slow("/a"));
        let (worker, previous) = started(second, PreviousWorker::Here(worker));
        assert!(previous.is_none());
        assert!(worker.standing().busy > Duration::ZERO, "it is said of whose place is taken");
        assert!(!worker.give(&window("c"), 0));
        assert_eq!((worker.standing().dropped, worker.standing().waiting), (1, 1));
        // One waits for its turn, however many there are.
        worker.leave();
        let (mut worker, previous) = started(third, PreviousWorker::Here(worker));
        assert!(previous.is_none() && second_heard.recv().is_err(), "it is gone");
        assert!(worker.give(&window("d"), u64::MAX), "windows come again");
        assert!(third_heard.try_recv().is_err());
        drop((first_goes_on, second_goes_on, third_goes_on));
        assert_eq!((&*third_heard.recv().unwrap(), &*third_heard.recv().unwrap()), ("b", "d"));
        worker.close(Instant::now()).unwrap().join().unwrap();
        assert!(first_heard.recv().is_err() && third_heard.recv().is_err());
    }

    #[test]
    fn a_sink_that_works_elsewhere_does_not_wait_for_the_one_before() {
        let (worker, first_heard, first_goes_on) = hanging();
        assert!(!worker.give(&window("c"), 0));
        let (second, second_heard, second_goes_on) = slow("/b");
        drop(second_goes_on);
        let (mut worker, previous) = started(second, PreviousWorker::Elsewhere(worker));
        let mut previous = previous.unwrap();
        assert!(previous.is_replaced() && previous.standing().busy > Duration::ZERO);
        assert_eq!(&*second_heard.recv().unwrap(), "b", "what waited");
        assert_eq!(worker.standing().dropped, 1);
        assert!(worker.give(&window("d"), u64::MAX));
        assert_eq!(&*second_heard.recv().unwrap(), "d");
        assert!(first_heard.try_recv().is_err());
        worker.close(Instant::now()).unwrap().join().unwrap();
        drop(first_goes_on);
        previous.close(Instant::now()).unwrap().join().unwrap();
        assert!(first_heard.recv().is_err());
    }

    #[test]
    fn what_waits_for_a_sink_that_is_to_go_it_has_yet() {
        let (mut worker, heard, goes_on) = hanging();
        worker.leave();
        assert!(!worker.give(&window("c"), u64::MAX));
        drop(goes_on);
        assert_eq!(&*heard.recv().unwrap(), "b");
        assert!(heard.recv().is_err(), "it has ended");
        worker.close(Instant::now()).unwrap().join().unwrap();
        assert!(!worker.is_at_work());
    }

    /// Panics where it is given "b".
    struct Panics(Sender<Arc<str>>);

    impl Sink for Panics {
        fn name(&self) -> &str {
            "panics"
        }

        fn place(&self) -> &Path {
            Path::new("")
        }

        fn put(&mut self, finished: &FinishedProfile) -> Result<(), SinkError> {
            assert_ne!(&*finished.service, "b");
            self.0.send(Arc::clone(&finished.service)).unwrap();
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn a_sink_that_panics_loses_what_it_was_at_and_goes_on() {
        let (tell, told) = channel();
        let mut worker = started(Box::new(Panics(tell)), PreviousWorker::None).0;
        assert!(worker.give(&["a", "b", "c"].map(finished).to_vec(), u64::MAX));
        assert_eq!((&*told.recv().unwrap(), &*told.recv().unwrap()), ("a", "c"));
        until(|| worker.standing().busy.is_zero());
        // All of the window's room is free again.
        until(|| worker.give(&window("d"), 0));
        assert_eq!(&*told.recv().unwrap(), "d");
        worker.close(Instant::now()).unwrap().join().unwrap();
    }
}
