//! What one delivery knows: its spool, whose turn it is, what the receiver takes and refuses. Each
//! answer of the receiver is judged here.

use super::figures::{DeliveryCounters, SpoolBacklog};
use super::remote::{Remote, SendOutcome};
use crate::accepted_sizes::{AcceptedSizes, RequestSize, SHORT_BYTES};
use crate::age::Now;
use crate::failure_states::{self, DeliveryEvent, Ends, SEEN_WITHIN, States, span};
use crate::file::FileError;
use crate::request_scheduler::{
    FailureCause, LengthClass, MOST_ASKED, NextSend, RequestScheduler, SendFailure, wait,
};
use crate::spool::{Item, ItemKind, Spool, Taken, group_of};
use perfusion_host::locked_files;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// That what waits is lost is told again so often.
const TELL_AGAIN: Duration = Duration::from_secs(3600);
/// So often a long request is tried again that a receiver refuses which has taken none yet.
const FIRST_REFUSALS: u32 = 2;
/// Services whose names are remembered. Of more a name is read from the request.
const MOST_NAMES: usize = 4096;

/// Why a request is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DropCause {
    Refused,
    Denied,
    TooLarge,
    Tries,
}

pub(super) struct DeliveryState {
    pub(super) spool: Spool,
    pub(super) figures: DeliveryCounters,
    turns: RequestScheduler,
    pub(super) states: States,
    pub(super) sizes: AcceptedSizes,
    /// Services by the [`group_of`] their names.
    names: HashMap<u64, Arc<str>>,
    /// When it was last told that what waits is lost, until nothing waits.
    told_lost: Option<Instant>,
    /// Reads from the spool that failed, in a row, and until when none is tried.
    unread: (u32, Option<Instant>),
    /// No more is to be sent after this moment.
    pub(super) closing: Option<Instant>,
}

impl DeliveryState {
    pub(super) fn new(spool: Spool) -> Self {
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
    pub(super) fn put(
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
    pub(super) fn is_over(&self) -> bool {
        self.closing.is_some_and(|closing| Instant::now() >= closing)
    }

    pub(super) fn backlog(&self) -> SpoolBacklog {
        SpoolBacklog {
            requests: u64::try_from(self.spool.len()).unwrap_or(u64::MAX),
            bytes: self.spool.bytes(),
            trouble: self.states.trouble().map(str::to_owned),
            causes: self.states.sums().collect(),
        }
    }

    pub(super) fn know(&mut self, service: &str) -> u64 {
        let group = group_of(service);
        if self.names.len() < MOST_NAMES {
            self.names.entry(group).or_insert_with(|| service.into());
        }
        group
    }

    /// Whose request it is, where that is known by its group. A service has one name as long as
    /// there is room for it: what a request says may be another way to write it, and a state ends
    /// under the name that it began with.
    pub(super) fn known_name(&self, item: Item) -> Option<Arc<str>> {
        self.names.get(&item.group).map(Arc::clone)
    }

    /// This is whose request it is.
    fn remember_name(&mut self, item: Item, service: &Arc<str>) {
        // Requests of earlier versions are of one group, whosever they are.
        if item.group != 0 && self.names.len() < MOST_NAMES {
            self.names.entry(item.group).or_insert_with(|| Arc::clone(service));
        }
    }

    pub(super) fn event(&mut self, sink: &str, event: DeliveryEvent<'_>) {
        self.states.event(event, Instant::now());
        failure_states::say(sink, self.states.lines());
    }

    /// What is to be sent now, or until when there is nothing; for ever where that is none.
    pub(super) fn next(&mut self, sink: &str) -> Result<Taken, Option<Instant>> {
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
    pub(super) fn answered(
        &mut self,
        sink: &str,
        answered: &Answered,
        verdict: SendOutcome,
    ) -> Option<Split> {
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
                let reason = match after {
                    Some(asked) if asked >= SEEN_WITHIN => with_wait(&reason, asked),
                    _ => reason,
                };
                (SendFailure { asked: after, length: self.sizes.of(*size), ..failure }, reason)
            }
            SendOutcome::Unreached(reason) => {
                self.turns.unreached(now, chance);
                self.waits(sink, "", &reason, Ends::WhenTaken);
                return None;
            }
        };
        match self.turns.failed(*item, failure, now, chance) {
            // Nothing is sent meanwhile that would show whose fault it is.
            FailureCause::Request if failure.asked.is_some_and(|asked| asked >= SEEN_WITHIN) => {
                self.waits(sink, service, &reason, Ends::WhenServiceTaken);
            }
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
    pub(super) fn replace(
        &mut self,
        sink: &str,
        answered: &Answered,
        split: &Split,
        parts: &[Vec<u8>],
    ) {
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
pub(super) struct Answered {
    pub(super) taken: Taken,
    /// Whose it is.
    service: Arc<str>,
    size: RequestSize,
}

impl Answered {
    /// Reads of the request what `known` does not tell, which takes time.
    pub(super) fn of(taken: Taken, known: Option<Arc<str>>, remote: &dyn Remote) -> Self {
        let packed = usize::try_from(taken.item.length).unwrap_or(usize::MAX);
        let size = RequestSize { raw: remote.raw_bytes(&taken.payload), packed };
        let service = known.unwrap_or_else(|| remote.service(&taken.payload).into());
        Self { taken, service, size }
    }
}

/// A request is to be split.
pub(super) struct Split {
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

/// A reason with the wait that a receiver asks for, and with the wait that it gets.
fn with_wait(reason: &str, asked: Duration) -> String {
    let wait = match asked.min(MOST_ASKED) {
        most if most < asked => format!("; {} are waited, the most there is", span(most)),
        _ => String::new(),
    };
    format!("{reason}; it asks for a wait of {}{wait}", span(asked))
}

/// How old that is which is in a request; nothing where the clock does not tell.
fn age(item: Item) -> Duration {
    let (now, at) = (Now::read(), SystemTime::UNIX_EPOCH + Duration::from_secs(item.at));
    if now.tells_age { now.wall.duration_since(at).unwrap_or_default() } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::super::tests::LIMITS;
    use super::*;

    #[test]
    fn the_line_of_a_long_wait_is_not_put_off() {
        let directory = tempfile::tempdir().unwrap();
        let mut state = DeliveryState::new(Spool::open(directory.path(), LIMITS).unwrap());
        let (at, group) = (SystemTime::now(), group_of("web"));
        state.put("test", at, ItemKind::Request, group, b"one").unwrap();
        let taken = state.next("test").unwrap();
        let size = RequestSize { raw: 3, packed: 3 };
        let answered = Answered { taken, service: "web".into(), size };
        let later = SendOutcome::Later { after: Some(SEEN_WITHIN), reason: "busy".to_owned() };
        assert!(state.answered("test", &answered, later).is_none());
        assert_eq!(state.states.unsaid(), 0);
    }

    #[test]
    fn a_wait_is_told_with_the_most_that_is_waited() {
        let (first, short) = (with_wait("x", SEEN_WITHIN), with_wait("x", MOST_ASKED));
        assert_eq!(first, "x; it asks for a wait of 2 min 0 s");
        assert_eq!(short, "x; it asks for a wait of 1 h 0 min");
        assert!(with_wait("x", Duration::from_secs(u64::MAX)).contains("1 h 0 min are waited"));
    }
}
