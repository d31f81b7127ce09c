//! The way from a spool to a receiver that may be away: one thread that sends, waits when it is
//! told to, longer each time, and never in the way of the profiler. A request that waits is passed
//! by others; [`request_scheduler`](super::request_scheduler) chooses the next one. Every request
//! ends as one of: sent, given up and counted by its cause, lost in the spool, split into smaller
//! ones, or still waiting.
//!
//! [`Delivery`] is the spool with its thread, `state` judges each answer.

mod figures;
mod lazy;
mod remote;
mod state;

pub use self::figures::{DeliveryCounters, SpoolBacklog};
pub use self::lazy::LazyDelivery;
pub use self::remote::{Remote, SendOutcome};

use self::state::{Answered, DeliveryState};
use super::age::Now;
use super::failure_states::{self, DeliveryEvent};
use super::file::FileError;
use super::spool::{Item, ItemKind, Spool, SpoolLimits, Taken};
use perfusion_host::priority;
use perfusion_pprof::split::PartBounds;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

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

    /// What is said of what happened.
    #[cfg(test)]
    fn reasons(&self) -> Vec<String> {
        self.shared.lock().states.reasons()
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
    use crate::spool;
    use std::sync::mpsc::Receiver;

    pub(super) const LIMITS: SpoolLimits =
        SpoolLimits { bytes: 1 << 20, age: Duration::from_secs(3600), free_bytes: 0 };

    /// Answers as told, and tells what it was sent.
    pub(super) struct ScriptedReceiver {
        answers: Receiver<SendOutcome>,
        seen: Sender<Vec<u8>>,
    }

    impl Remote for ScriptedReceiver {
        fn send(&mut self, payload: &[u8], _: &dyn Fn() -> Instant) -> SendOutcome {
            self.seen.send(payload.to_vec()).unwrap();
            self.answers
                .recv()
                .unwrap_or(SendOutcome::Later { after: None, reason: "nobody answers".to_owned() })
        }
    }

    pub(super) fn scripted() -> (ScriptedReceiver, Sender<SendOutcome>, Receiver<Vec<u8>>) {
        let (answer, answers) = channel();
        let (seen, saw) = channel();
        (ScriptedReceiver { answers, seen }, answer, saw)
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
        let (remote, answer, saw) = scripted();
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
        let (remote, answer, saw) = scripted();
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
    fn a_long_wait_that_a_receiver_asks_for_is_told_at_once_with_the_one_it_gets() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = scripted();
        let mut delivery = started(directory.path(), remote);
        delivery.put(SystemTime::now(), ItemKind::Request, "web", b"one").unwrap();
        let after = Some(Duration::from_secs(5 * 3600));
        answer.send(SendOutcome::Later { after, reason: "answer 503".to_owned() }).unwrap();
        saw.recv().unwrap();
        while delivery.figures().retries < 1 {
            std::thread::yield_now();
        }
        let trouble = "answer 503; it asks for a wait of 5 h 0 min; 1 h 0 min are waited, the most \
                       there is";
        let backlog = delivery.backlog();
        assert_eq!(backlog.trouble.as_deref(), Some(trouble));
        delivery.close(Instant::now());
    }

    #[test]
    fn a_receiver_that_refuses_everything_does_not_empty_the_spool() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = scripted();
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
        let (remote, _answer, saw) = scripted();
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
        let (remote, answer, saw) = scripted();
        let mut delivery = started(directory.path(), remote);
        delivery.put(SystemTime::now(), ItemKind::Request, "web", b"kept").unwrap();
        saw.recv().unwrap();
        // Nobody answers: the close does not wait for a receiver that is away.
        drop(answer);
        delivery.close(Instant::now() + Duration::from_secs(3600));
        assert_eq!((delivery.backlog().requests, delivery.figures().sent), (1, 0));

        let (remote, answer, saw) = scripted();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        let mut next = started(directory.path(), remote);
        assert_eq!(saw.recv().unwrap(), b"kept");
        next.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((next.backlog().requests, next.figures().sent), (0, 1));
    }

    #[test]
    fn an_outage_that_fills_the_spool_costs_the_oldest_but_the_one_on_its_way() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = scripted();
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
    fn a_payload_that_a_receiver_fails_on_waits_and_is_passed_over_in_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let (remote, answer, saw) = scripted();
        let mut delivery = started(directory.path(), remote);
        delivery.put(SystemTime::now(), ItemKind::Request, "web", b"odd").unwrap();
        answer.send(SendOutcome::Failed("internal".to_owned())).unwrap();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        assert_eq!((saw.recv().unwrap(), saw.recv().unwrap()), (b"odd".to_vec(), b"odd".to_vec()));
        delivery.close(Instant::now() + Duration::from_secs(60));
        let figures = delivery.figures();
        assert_eq!((figures.sent, figures.retries, figures.refused), (1, 1, 0));
    }
}
