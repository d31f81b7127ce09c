//! One sink on a thread of its own, with windows that wait for it: a disk or mount that does not answer holds up nobody else's profiles.

use super::neighbour;
use super::queue::{Empty, Queue, Window};
use crate::sink::Sink;
use crate::sink::deliver::Backlog;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a sink is given for the windows that wait for it when the daemon ends, the last one too.
const LAST_WINDOWS: Duration = Duration::from_secs(10);
/// How long it is given then for what is to be sent.
const LAST: Duration = Duration::from_secs(5);
/// What a sink counts between two windows, such as what a receiver took or refused, is published so often.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// Where no windows come, such as while recording is switched off, a sink has its moment so often: what is too old goes then, too.
const NO_WINDOW: Duration = Duration::from_secs(60);
/// A sink that fails is reported so often at most.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// How a sink stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What messages call it.
    pub sink: String,
    /// Name and value of each of its counters.
    pub counters: Vec<(&'static str, u64)>,
    /// What waits to be sent, of one that has a spool.
    pub backlog: Option<Backlog>,
    /// Profiles it was too busy for.
    pub dropped: u64,
    /// How long it has been at one thing.
    pub busy: Duration,
}

impl Standing {
    /// Name and value of each counter and gauge.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let of_lane = [("profiles_dropped", self.dropped), ("busy_seconds", self.busy.as_secs())];
        let of_sink = self.counters.iter().copied().chain(self.backlog.iter().flat_map(Backlog::gauges));
        of_sink.chain(of_lane)
    }
}

/// A sink, and those that took its place one after the other: what waits and what they counted is of them all.
pub struct Lane {
    name: String,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    queue: Queue,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What it is doing began then.
    busy: Option<Instant>,
    /// The daemon ends: what is not put by then is lost.
    closing: Option<Instant>,
    /// What those before counted: one that takes another's place goes on from there, since counters grow only.
    former: BTreeMap<&'static str, u64>,
    counters: Vec<(&'static str, u64)>,
    backlog: Option<Backlog>,
}

impl Shared {
    /// Nothing panics while it is held.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    /// Puts a sink to work: in the place of the one that had its name, when that has done what it is doing.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(sink: Box<dyn Sink>, former: Option<Self>) -> io::Result<Self> {
        let name = sink.name().to_owned();
        let (shared, before) = former.map(|former| (former.shared, former.thread)).unwrap_or_default();
        let work = Work::new(sink, Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("sink".into()).spawn(move || {
            neighbour::wait_for_others();
            // One that panicked has said so.
            before.map(JoinHandle::join);
            work.until_over();
        })?;
        Ok(Self { name, shared, thread: Some(thread) })
    }

    /// What messages call the sink.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Hands a window over, see [`Queue::give`].
    pub fn give(&self, window: &Window, room: u64) -> bool {
        self.shared.queue.give(window, room)
    }

    /// How the sink stands, as of the last window or second.
    #[must_use]
    pub fn standing(&self) -> Standing {
        let state = self.shared.state();
        Standing {
            sink: self.name.clone(),
            counters: state.counters.clone(),
            backlog: state.backlog.clone(),
            dropped: self.shared.queue.dropped(),
            busy: state.busy.map(|since| since.elapsed()).unwrap_or_default(),
        }
    }

    /// Tells the sink to end with what it is doing: no configuration has it any more.
    pub fn leave(&self) {
        self.shared.queue.abandon();
    }

    /// True while the sink, or one whose place it takes, is at work.
    pub fn is_at_work(&mut self) -> bool {
        self.thread = self.thread.take().filter(|thread| !thread.is_finished());
        self.thread.is_some()
    }

    /// Tells it that nothing more comes, and not to take long over the rest.
    pub fn close(&self) {
        self.shared.state().closing = Some(Instant::now() + LAST_WINDOWS);
        self.shared.queue.close();
    }

    /// Waits until it has ended.
    pub fn join(self) {
        self.thread.map(JoinHandle::join);
    }
}

struct Work {
    sink: Box<dyn Sink>,
    shared: Arc<Shared>,
    turn: u64,
    /// When it last said that it fails.
    reported: Option<Instant>,
    /// When what it counts is published next, where no window comes before.
    publish_at: Instant,
    /// When the sink has its moment next, likewise.
    moment_at: Instant,
}

impl Work {
    fn new(sink: Box<dyn Sink>, shared: Arc<Shared>) -> Self {
        let turn = shared.queue.take_turn();
        let now = Instant::now();
        Self { sink, shared, turn, reported: None, publish_at: now, moment_at: now + NO_WINDOW }
    }

    fn until_over(mut self) {
        loop {
            match self.shared.queue.next(self.turn, self.publish_at.min(self.moment_at)) {
                Ok(window) => self.put(window),
                Err(Empty::Yet) => {
                    if Instant::now() >= self.moment_at {
                        self.window_over();
                    }
                    self.publish();
                }
                Err(Empty::Over) => break,
            }
        }
        let deadline = Instant::now() + LAST;
        self.timed(|sink| sink.close(deadline));
        self.publish();
        let mut state = self.shared.state();
        state.former = state.counters.iter().copied().collect();
    }

    fn put(&mut self, window: Window) {
        let profiles = window.len();
        let (mut failed, mut late) = (0, 0);
        // One after the other is let go.
        for finished in window {
            if self.closing().is_some_and(|closing| Instant::now() >= closing) {
                late += 1;
                continue;
            }
            if let Err(error) = self.timed(|sink| sink.put(&finished)) {
                failed += 1;
                if self.reported.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                    self.reported = Some(Instant::now());
                    let (sink, service) = (self.sink.name(), &finished.service);
                    tracing::error!(sink, service = %service, %error, "a profile is lost");
                }
            }
            self.shared.queue.done(&finished);
        }
        let sink = self.sink.name();
        tracing::debug!(sink, profiles, failed, "window handed over");
        // Whatever was said of earlier ones.
        if failed > 0 && self.closing().is_some() {
            tracing::error!(sink, profiles = failed, "lost: it did not take them, and this is the end");
        }
        if late > 0 {
            tracing::error!(
                sink,
                profiles = late,
                "lost: it was not done with the last windows within {LAST_WINDOWS:?}; its disk is very busy or does not answer"
            );
        }
        self.window_over();
        self.publish();
    }

    fn window_over(&mut self) {
        self.moment_at = Instant::now() + NO_WINDOW;
        self.timed(|sink| sink.window_over());
    }

    fn publish(&mut self) {
        self.publish_at = Instant::now() + PUBLISH_EVERY;
        // It may have to wait for its spool.
        let (mut counters, backlog) = self.timed(|sink| (sink.counters(), sink.backlog()));
        let mut state = self.shared.state();
        for (counter, value) in &mut counters {
            *value += state.former.get(counter).copied().unwrap_or_default();
        }
        (state.counters, state.backlog) = (counters, backlog);
    }

    /// Until when there is time, where the daemon ends.
    fn closing(&self) -> Option<Instant> {
        self.shared.state().closing
    }

    /// Has the sink do something, and says so meanwhile.
    fn timed<T>(&mut self, work: impl FnOnce(&mut dyn Sink) -> T) -> T {
        self.shared.state().busy = Some(Instant::now());
        let done = work(&mut *self.sink);
        self.shared.state().busy = None;
        done
    }
}

/// Sinks of tests.
#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::pprof::proto::Profile;
    use crate::sink::{Finished, SinkError};
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::SystemTime;

    /// What one service did.
    pub fn finished(service: &str) -> Arc<Finished> {
        Arc::new(Finished {
            service: service.into(),
            labels: BTreeMap::new(),
            start: SystemTime::now(),
            duration: Duration::from_secs(60),
            profile: Profile::default().into(),
        })
    }

    /// Waits for a moment that comes sooner or later.
    pub fn until(what: impl Fn() -> bool) {
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

        fn put(&mut self, _: &Finished) -> Result<(), SinkError> {
            Err(SinkError::Refused { reason: "it is broken".to_owned() })
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn a_sink_that_fails_is_reported_once_in_a_while() {
        let shared = Arc::<Shared>::default();
        let mut work = Work::new(Box::new(Broken), Arc::clone(&shared));
        let put = |work: &mut Work, profiles: &[&str]| {
            assert!(shared.queue.give(&profiles.iter().copied().map(finished).collect(), 0));
            work.put(shared.queue.next(work.turn, Instant::now()).unwrap());
        };
        put(&mut work, &["web", "shop"]);
        let first = work.reported;
        assert!(first.is_some());
        put(&mut work, &["web"]);
        assert_eq!(work.reported, first);
        work.reported = first.and_then(|first| first.checked_sub(REPORT_EVERY));
        put(&mut work, &["web"]);
        assert!(work.reported > first);
    }

    /// Says what it was given, and comes to the end of its time with the second.
    struct Late(Sender<Arc<str>>, Arc<Shared>);

    impl Sink for Late {
        fn name(&self) -> &str {
            "late"
        }

        fn put(&mut self, finished: &Finished) -> Result<(), SinkError> {
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
        let ((tell, told), shared) = (channel(), Arc::<Shared>::default());
        let work = Work::new(Box::new(Late(tell, Arc::clone(&shared))), Arc::clone(&shared));
        assert!(shared.queue.give(&["a", "b", "c"].map(finished).to_vec(), u64::MAX));
        assert!(shared.queue.give(&vec![finished("d")], u64::MAX));
        shared.queue.close();
        work.until_over();
        assert_eq!(told.into_iter().collect::<Vec<_>>(), ["a".into(), "b".into()]);
    }

    struct Moments(Sender<()>);

    impl Sink for Moments {
        fn name(&self) -> &str {
            "moments"
        }

        fn put(&mut self, _: &Finished) -> Result<(), SinkError> {
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
        let ((tell, moments), shared) = (channel(), Arc::<Shared>::default());
        let mut work = Work::new(Box::new(Moments(tell)), Arc::clone(&shared));
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

        fn put(&mut self, _: &Finished) -> Result<(), SinkError> {
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
        let lane = Lane::start(Box::new(Counting("a", Arc::clone(&count))), None).unwrap();
        for value in [3, 4] {
            count.store(value, Ordering::Relaxed);
            until(|| lane.standing().counters == [("requests_sent", value)]);
        }
        lane.close();
        lane.join();
    }

    /// Says what it was given, and is at it until it is told to go on.
    pub struct Slow {
        /// Its name.
        pub name: &'static str,
        /// Hears of each profile.
        pub given: Sender<Arc<str>>,
        /// Lets it go on, for good when nobody is there.
        pub go_on: Receiver<()>,
    }

    impl Sink for Slow {
        fn name(&self) -> &str {
            self.name
        }

        fn put(&mut self, finished: &Finished) -> Result<(), SinkError> {
            self.given.send(Arc::clone(&finished.service)).ok();
            self.go_on.recv().ok();
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn what_waits_is_for_the_sink_that_takes_the_place_when_the_one_before_is_done() {
        let slow = || {
            let ((given, heard), (go_on, told)) = (channel(), channel());
            (Slow { name: "slow", given, go_on: told }, heard, go_on)
        };
        let ((first, first_heard, first_goes_on), (second, second_heard, second_goes_on)) = (slow(), slow());
        let lane = Lane::start(Box::new(first), None).unwrap();
        let window = |service: &str| vec![finished(service)];
        assert!(lane.give(&window("a"), u64::MAX) && lane.give(&window("b"), u64::MAX));
        assert_eq!(&*first_heard.recv().unwrap(), "a");
        until(|| lane.standing().busy > Duration::ZERO);
        let lane = Lane::start(Box::new(second), Some(lane)).unwrap();
        assert!(lane.standing().busy > Duration::ZERO, "it is said of whose place is taken");
        assert!(!lane.give(&window("c"), 0));
        assert_eq!(lane.standing().dropped, 1);
        assert!(second_heard.try_recv().is_err());
        drop((first_goes_on, second_goes_on));
        assert_eq!(&*second_heard.recv().unwrap(), "b");
        lane.close();
        lane.join();
        assert!(first_heard.recv().is_err() && second_heard.recv().is_err());
    }
}
