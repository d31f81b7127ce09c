//! Which request goes next, and when: what one receiver answered to the requests of which service.
//! Times are handed in, so that hours can be tested in a moment.
//!
//! A failure may be the receiver's or the request's own. It is taken for the request's until two
//! services in a row have failed; then for the receiver's, until one request is taken. What fails
//! for its own sake waits by itself, and all others pass it. Each has its number of tries.

use super::spool::{Item, ItemKind, Items};
use perfusion_model::backoff::{Backoff, spread};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// First wait after a failure; each further one doubles it.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait of our own choice. A receiver may ask for more, within [`MOST_ASKED`].
const LONGEST_WAIT: Duration = Duration::from_secs(300);
/// Longest wait that a receiver gets, whatever it asks for.
pub(super) const MOST_ASKED: Duration = Duration::from_secs(3600);
/// A receiver that fails is asked so often at least while there is a service whose requests it has
/// not failed on: the failures may be those services' own.
const UNTRIED_WAIT: Duration = Duration::from_secs(10);
/// So often requests of a service may fail while the receiver takes others, and for [`LEAST_TIME`]:
/// then they have one try each.
const MOST_TRIES: u32 = 4;
/// No request is given up by its tries before its service has failed for so long, and before it is
/// so old itself: a part of a receiver that starts again is back by then.
const LEAST_TIME: Duration = Duration::from_secs(60);
/// So often requests of a service fail before one that may be too long is split: that loses
/// nothing.
const TRIES_TO_SPLIT: u32 = 2;
/// The same where nothing else shows that the receiver takes anything: there may be one service
/// only.
const FAILURES_TO_SPLIT: u32 = 4;
/// The same of a service that has failed along with another: that may have been the receiver's
/// fault.
const MOST_SHARED_TRIES: u32 = 8;
/// Services that are remembered without a request that waits.
const MOST_SERVICES: usize = 4096;
/// So often a receiver may fail on one request of its own fault, by what it says, before that is
/// taken for the request's. It takes 18 minutes: a receiver that is away and says just this costs
/// one request by then, and one in each hour that follows.
pub const MOST_FAILURES: u32 = 12;

/// What is sent next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextSend {
    /// This one, by its sequence number.
    Send(u64),
    /// None before this moment.
    Wait(Instant),
    /// None waits.
    Nothing,
}

/// What a failure is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// It may be the request's or the receiver's: the request waits.
    Request,
    /// The receiver's: all wait.
    Receiver,
    /// Perhaps its length: it is to be split. Where it cannot be, say so by
    /// [`RequestScheduler::is_whole`].
    Length,
    /// The request's length, and it cannot be split: it has come to its end.
    TooLong,
    /// The request's, after so many tries: it has come to its end.
    Ended {
        /// How often it was tried.
        tries: u32,
    },
}

/// What is known of the length of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LengthClass {
    /// As long ones, or longer ones, were taken; or it is short.
    #[default]
    Usual,
    /// Longer than any that was taken, if any was.
    Long,
    /// So is it, and one that was no longer has been split for failing.
    AsRefused,
}

/// How a request was not taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendFailure {
    /// The receiver asks to be asked no sooner.
    pub asked: Option<Duration>,
    /// The answer is about this request in any case.
    pub counts: bool,
    /// Of the request.
    pub length: LengthClass,
    /// Of what is in the request.
    pub age: Duration,
}

#[derive(Clone, Copy, Debug)]
struct ServiceRetries {
    /// When the first of those in a row was.
    since: Instant,
    /// In a row.
    failures: u32,
    /// Those of them between which the receiver took others.
    tries: u32,
    /// Its requests wait until then.
    until: Instant,
    last: Instant,
    /// How many the receiver had taken by then.
    taken_before: u64,
    /// It failed when the receiver was found to.
    is_shared: bool,
    /// One of its requests came to its end, and none was taken since: the next has one try.
    is_suspect: bool,
    /// One failed that is no longer than others that are taken: it is not for their length.
    fails_short: bool,
}

impl ServiceRetries {
    fn new(now: Instant) -> Self {
        Self {
            since: now,
            failures: 0,
            tries: 0,
            until: now,
            last: now,
            taken_before: 0,
            is_shared: false,
            is_suspect: false,
            fails_short: false,
        }
    }

    /// Its requests may be given up.
    fn is_over(&self, taken: u64, now: Instant) -> bool {
        let most = if self.is_shared { MOST_SHARED_TRIES } else { MOST_TRIES };
        let has_failed_long = now.saturating_duration_since(self.since) >= LEAST_TIME;
        if self.is_suspect { taken > 0 } else { self.tries >= most && has_failed_long }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct RequestTries {
    attempts: u32,
    /// Those of them by which the receiver says that it fails on this request.
    failures: u32,
    /// It cannot be split.
    is_whole: bool,
}

/// Turns of one receiver's requests.
#[derive(Debug, Default)]
pub struct RequestScheduler {
    /// Requests that the receiver took.
    taken: u64,
    /// Times that the receiver was found to fail, in a row.
    failures: u32,
    /// Until then nothing is sent.
    until: Option<Instant>,
    /// When it was found to fail last.
    since: Option<Instant>,
    /// The receiver has asked for it, or nobody was there: no service is tried sooner.
    is_certain: bool,
    /// The service that failed last, since a request was taken.
    failed_last: Option<u64>,
    /// Services that failed since a request was taken.
    tried: HashSet<u64>,
    services: HashMap<u64, ServiceRetries>,
    requests: HashMap<u64, RequestTries>,
    /// What is known of requests that are long and cannot be split.
    lone: Option<LoneSamples>,
}

/// Long requests that cannot be split and are not taken. Once they were tried for their time, each
/// has one try, until one so long is taken.
#[derive(Clone, Copy, Debug)]
struct LoneSamples {
    /// When the first failed.
    since: Instant,
    tries: u32,
    /// Bytes of the shortest.
    least: u64,
}

impl LoneSamples {
    fn is_over(&self, now: Instant) -> bool {
        self.tries >= MOST_TRIES && now.saturating_duration_since(self.since) >= LEAST_TIME
    }
}

impl RequestScheduler {
    /// What is sent next of those that wait.
    #[must_use]
    pub fn next(&self, items: &Items, now: Instant) -> NextSend {
        let mut requests = items.values().filter(|item| item.kind == ItemKind::Request).peekable();
        if requests.peek().is_none() {
            return NextSend::Nothing;
        }
        if let Some(until) = self.until.filter(|until| now < *until) {
            // What is not the receiver's fault is found out by who has not tried.
            let sooner = self.since.filter(|_| !self.is_certain).map(|since| since + UNTRIED_WAIT);
            return match sooner.filter(|sooner| *sooner < until) {
                None => NextSend::Wait(until),
                Some(sooner) => match requests.find(|item| !self.tried.contains(&item.group)) {
                    None => NextSend::Wait(until),
                    Some(_) if now < sooner => NextSend::Wait(sooner),
                    Some(untried) => NextSend::Send(untried.sequence),
                },
            };
        }
        // Services that fail are for when there is nothing else to do.
        let is_untroubled = |item: &Item| {
            self.services
                .get(&item.group)
                .is_none_or(|service| service.failures == 0 && !service.is_suspect)
                && !self.tried.contains(&item.group)
                && !self.requests.contains_key(&item.sequence)
        };
        let (mut best, mut soonest) = (None, None::<Instant>);
        for item in requests {
            if is_untroubled(item) {
                return NextSend::Send(item.sequence);
            }
            let service = self.services.get(&item.group);
            let until = service.map_or(now, |service| service.until);
            if until > now {
                soonest = Some(soonest.map_or(until, |soonest| soonest.min(until)));
                continue;
            }
            // A short one shows whether it is for the length. What is to be given up goes by its
            // age.
            let is_over = service.is_some_and(|service| service.is_over(self.taken, now));
            // Of those that cannot be split the shortest is the most likely to be taken.
            let request = self.requests.get(&item.sequence).filter(|request| !request.is_whole);
            let attempts = request.map_or(0, |request| request.attempts);
            let rank = (
                self.tried.contains(&item.group),
                service.map(|service| service.last),
                if is_over { (0, 0) } else { (attempts, item.length) },
                item.sequence,
            );
            if best.is_none_or(|best| rank < best) {
                best = Some(rank);
            }
        }
        match (best, soonest) {
            (Some((.., sequence)), _) => NextSend::Send(sequence),
            (None, Some(soonest)) => NextSend::Wait(soonest),
            (None, None) => NextSend::Nothing,
        }
    }

    /// The receiver took it.
    pub fn taken(&mut self, item: Item) {
        self.taken += 1;
        self.lone = self.lone.filter(|lone| item.length < lone.least);
        self.services.remove(&item.group);
        self.requests.remove(&item.sequence);
        self.answered();
    }

    /// The receiver has said of one request that it is of no use: it works.
    pub fn judged(&mut self, item: Item) {
        self.requests.remove(&item.sequence);
        self.answered();
    }

    fn answered(&mut self) {
        (self.failures, self.until, self.since, self.failed_last) = (0, None, None, None);
        self.is_certain = false;
        self.tried.clear();
    }

    /// Nobody was there to answer.
    pub fn unreached(&mut self, now: Instant, chance: u64) {
        self.is_certain = true;
        self.receiver_fails(now, None, chance);
    }

    /// It failed. `chance` is any number.
    pub fn failed(
        &mut self,
        item: Item,
        failure: SendFailure,
        now: Instant,
        chance: u64,
    ) -> FailureCause {
        let SendFailure { asked, counts, length, age } = failure;
        let request = self.requests.entry(item.sequence).or_default();
        request.attempts += 1;
        request.failures += u32::from(counts);
        let request = *request;
        let taken = self.taken;
        let service = self.services.entry(item.group).or_insert_with(|| ServiceRetries::new(now));
        if service.failures == 0 && service.tries == 0 {
            service.since = now;
        }
        // Only while the receiver takes others is it the service's requests that are tried.
        let counts_as_try = service.taken_before < taken;
        service.tries += u32::from(counts_as_try);
        service.fails_short |= counts_as_try && length == LengthClass::Usual;
        service.taken_before = taken;
        service.failures += 1;
        service.last = now;
        service.until = now + wait(service.failures, asked, chance);
        // It is tried when its time is over, and not half a minute later.
        let time_is_over = service.since + LEAST_TIME;
        if asked.is_none() && service.tries + 1 >= MOST_TRIES && time_is_over > now {
            service.until = service.until.min(time_is_over);
        }
        let is_over = service.is_over(taken, now) && age >= LEAST_TIME;
        self.tried.insert(item.group);
        let other = self.failed_last.is_some_and(|before| before != item.group);
        if other || self.failures > 0 {
            self.failed_last = Some(item.group);
            self.receiver_fails(now, asked, chance);
            if request.failures < MOST_FAILURES {
                return FailureCause::Receiver;
            }
        } else {
            let may_be_length =
                length != LengthClass::Usual && !request.is_whole && !service.fails_short;
            let tries = if length == LengthClass::AsRefused { 1 } else { TRIES_TO_SPLIT };
            if may_be_length && service.tries >= tries {
                // Its parts are requests that were not tried.
                service.failures = 1;
                service.until = now + wait(1, asked, chance);
                return FailureCause::Length;
            }
            if may_be_length
                && (service.failures >= FAILURES_TO_SPLIT || request.failures >= MOST_FAILURES)
            {
                return FailureCause::Length;
            }
            if length != LengthClass::Usual && request.is_whole && self.is_too_long(item, age, now)
            {
                return FailureCause::TooLong;
            }
            if !is_over {
                self.failed_last = Some(item.group);
                if request.failures < MOST_FAILURES {
                    return FailureCause::Request;
                }
            }
        }
        // A service that is over by its tries says nothing of the receiver, and has no more waits.
        // One request that is over by its failures says nothing of the next one.
        self.requests.remove(&item.sequence);
        if is_over && let Some(service) = self.services.get_mut(&item.group) {
            (service.is_suspect, service.until) = (true, now);
        }
        FailureCause::Ended { tries: request.attempts }
    }

    /// A short one of its service is not taken, so that long ones are not for their length.
    pub fn fails_short(&mut self, item: Item, now: Instant) {
        self.services.entry(item.group).or_insert_with(|| ServiceRetries::new(now)).fails_short =
            true;
    }

    /// True when that was so since one of its service was taken.
    #[must_use]
    pub fn has_failed_short(&self, item: Item) -> bool {
        self.services.get(&item.group).is_some_and(|service| service.fails_short)
    }

    /// It cannot be split: it waits, or has come to its end as others like it.
    pub fn is_whole(&mut self, item: Item, age: Duration, now: Instant) -> FailureCause {
        if self.is_too_long(item, age, now) {
            return FailureCause::TooLong;
        }
        self.requests.entry(item.sequence).or_default().is_whole = true;
        FailureCause::Request
    }

    /// A long request that cannot be split has failed. It has come to its end when such were tried
    /// for their time, and shorter ones of the same service were taken meanwhile; or none was, and
    /// the service's own time is over.
    fn is_too_long(&mut self, item: Item, age: Duration, now: Instant) -> bool {
        let lone =
            self.lone.get_or_insert(LoneSamples { since: now, tries: 0, least: item.length });
        let is_over = lone.is_over(now) && item.length >= lone.least / 2;
        lone.tries = lone.tries.saturating_add(1);
        lone.least = lone.least.min(item.length);
        let (since, taken) = (lone.since, self.taken);
        let Some(service) = self.services.get_mut(&item.group).filter(|of| {
            is_over && (of.since > since || of.is_over(taken, now) && age >= LEAST_TIME)
        }) else {
            return false;
        };
        service.until = now;
        self.requests.remove(&item.sequence);
        true
    }

    /// What was said of its services may have been the receiver's fault: they wait no longer than
    /// it does. Their tries count on, since two services that are never taken fail along with each
    /// other.
    fn receiver_fails(&mut self, now: Instant, asked: Option<Duration>, chance: u64) {
        self.failures = self.failures.saturating_add(1);
        self.is_certain |= asked.is_some();
        self.since = Some(now);
        self.until = Some(now + wait(self.failures, asked, chance));
        for service in self.services.values_mut() {
            (service.failures, service.until, service.is_shared) = (0, now, true);
        }
    }

    /// How often a request was tried.
    #[must_use]
    pub fn attempts(&self, item: Item) -> u32 {
        self.requests.get(&item.sequence).map_or(0, |request| request.attempts)
    }

    /// Forgets what waits no more.
    pub fn forget(&mut self, items: &Items) {
        if self.requests.len() > 64 {
            self.requests.retain(|sequence, _| items.contains_key(sequence));
        }
        if self.services.len() > MOST_SERVICES {
            let waiting: HashSet<u64> = items.values().map(|item| item.group).collect();
            self.services.retain(|group, _| waiting.contains(group));
        }
    }
}

/// How long to wait after so many failures in a row, of a receiver that has asked for as long.
/// `chance` is any number.
pub fn wait(failures: u32, asked: Option<Duration>, chance: u64) -> Duration {
    let doubled = Backoff::new(FIRST_WAIT, LONGEST_WAIT).after(failures.saturating_sub(1));
    spread(doubled.max(asked.unwrap_or_default().min(MOST_ASKED)), chance)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTS: SendFailure =
        SendFailure { counts: true, asked: None, length: LengthClass::Usual, age: Duration::ZERO };

    fn items(all: &[(u64, u64)]) -> Items {
        let item = |&(sequence, group): &(u64, u64)| {
            let item =
                Item { sequence, group, kind: ItemKind::Request, at: 0, length: 1, bytes: 1 };
            (sequence, item)
        };
        all.iter().map(item).collect()
    }

    /// A receiver that `takes` some of the services, and what waits for it.
    struct Run<'a> {
        turns: RequestScheduler,
        items: Items,
        /// When each was put, seconds after the beginning; all others at it.
        put: HashMap<u64, u64>,
        now: Instant,
        began: Instant,
        takes: &'a dyn Fn(u64, Duration) -> bool,
        sent: Vec<(u64, u64)>,
        ended: Vec<u64>,
    }

    impl<'a> Run<'a> {
        fn new(all: &[(u64, u64)], takes: &'a dyn Fn(u64, Duration) -> bool) -> Self {
            let now = Instant::now();
            Self {
                turns: RequestScheduler::default(),
                items: items(all),
                put: HashMap::new(),
                now,
                began: now,
                takes,
                sent: Vec::new(),
                ended: Vec::new(),
            }
        }

        fn put(&mut self, all: &[(u64, u64)]) {
            let seconds = self.seconds();
            self.put.extend(all.iter().map(|(sequence, _)| (*sequence, seconds)));
            self.items.extend(items(all));
        }

        fn failure(&self, item: Item) -> SendFailure {
            let put = self.put.get(&item.sequence).copied().unwrap_or_default();
            SendFailure { age: Duration::from_secs(self.seconds() - put), ..SendFailure::default() }
        }

        fn seconds(&self) -> u64 {
            (self.now - self.began).as_secs()
        }

        fn until(&mut self, seconds: u64) {
            let end = self.began + Duration::from_secs(seconds);
            while self.now < end {
                match self.turns.next(&self.items, self.now) {
                    NextSend::Nothing => self.now = end,
                    NextSend::Wait(until) => self.now = until.min(end),
                    NextSend::Send(sequence) => {
                        let item = self.items[&sequence];
                        if (self.takes)(item.group, self.now - self.began) {
                            self.turns.taken(item);
                            self.items.remove(&sequence);
                            self.sent.push((self.seconds(), sequence));
                        } else if let FailureCause::Ended { .. } =
                            self.turns.failed(item, self.failure(item), self.now, 0)
                        {
                            self.items.remove(&sequence);
                            self.ended.push(sequence);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_service_that_is_never_taken_holds_up_no_other_and_comes_to_an_end() {
        // Requests 1, 4, 7, … are of service 7, which fails.
        let all: Vec<(u64, u64)> =
            (1..=60).map(|number| (number, if number % 3 == 1 { 7 } else { number % 3 })).collect();
        let mut run = Run::new(&all, &|group, _| group != 7);
        run.until(1);
        assert_eq!(run.sent.len(), 40, "{:?}", run.sent);
        // While others come now and then, it is tried as often as it may be.
        for number in 61..120 {
            run.put(&[(number, 2)]);
            run.until(number - 59);
        }
        assert_eq!((run.sent.len(), run.ended.len(), run.items.len()), (99, 0, 20));
        for number in 120..140 {
            run.put(&[(number, 2)]);
            run.until(number - 59);
        }
        assert_eq!((run.sent.len(), run.ended.len(), run.items.len()), (119, 20, 0));
    }

    #[test]
    fn a_part_of_a_receiver_that_starts_again_costs_its_services_nothing() {
        // Of service 7, whose part is away, a window waits from each of the last minutes.
        let backlog: Vec<(u64, u64)> = (1..=30).map(|number| (number, 7)).collect();
        let mut run = Run::new(&backlog, &|group, passed| group != 7 || passed.as_secs() >= 45);
        for number in 100..300 {
            run.put(&[(number, 2)]);
            run.until(number - 99);
        }
        assert_eq!((run.sent.len(), run.ended.len(), run.items.len()), (230, 0, 0));
    }

    #[test]
    fn a_new_request_of_a_service_that_is_never_taken_has_its_own_time() {
        let mut run =
            Run::new(&[(1, 7), (2, 7)], &|group, passed| group != 7 || passed.as_secs() > 200);
        for number in 100..500 {
            run.put(&[(number, 2)]);
            if number == 150 {
                run.put(&[(3, 7)]);
            }
            run.until(number - 99);
        }
        assert_eq!((run.ended.as_slice(), run.items.len()), (&[1, 2][..], 0));
    }

    #[test]
    fn what_may_be_too_long_is_split_soon_and_not_where_short_ones_fail_too() {
        let (all, now) = (items(&[(1, 1), (2, 1), (3, 2)]), Instant::now());
        let long = SendFailure { length: LengthClass::Long, ..SendFailure::default() };
        let mut turns = RequestScheduler::default();
        let fails = |turns: &mut RequestScheduler, failure| {
            turns.taken(all[&3]);
            turns.failed(all[&1], failure, now, 0)
        };
        assert_eq!(fails(&mut turns, long), FailureCause::Request);
        assert_eq!(fails(&mut turns, long), FailureCause::Length);
        assert_eq!(
            turns.next(&items(&[(4, 1)]), now),
            NextSend::Wait(now + FIRST_WAIT),
            "no longer than that"
        );
        // Of one that cannot be split it is not asked again.
        assert_eq!(turns.is_whole(all[&1], Duration::ZERO, now), FailureCause::Request);
        assert_eq!(fails(&mut turns, long), FailureCause::Request);
        let mut turns = RequestScheduler::default();
        let as_refused = SendFailure { length: LengthClass::AsRefused, ..SendFailure::default() };
        assert_eq!(fails(&mut turns, as_refused), FailureCause::Length);
        assert_eq!(fails(&mut turns, SendFailure::default()), FailureCause::Request);
        assert_eq!(
            fails(&mut turns, as_refused),
            FailureCause::Request,
            "a short one has failed as well"
        );
    }

    #[test]
    fn lone_stacks_that_are_too_long_have_one_try_once_one_was_tried_for_its_time() {
        // 1 and 2 cannot be split; 3 is short and of the same service, as one in each ten seconds
        // is.
        let (all, began) = (items(&[(1, 1), (2, 1), (3, 1)]), Instant::now());
        let long = SendFailure { length: LengthClass::Long, ..SendFailure::default() };
        let (mut turns, mut now, mut tries) = (RequestScheduler::default(), began, 0);
        turns.taken(all[&3]);
        let ended = loop {
            let passed = (now - began).as_secs();
            match turns.next(&items(&[(1, 1)]), now) {
                NextSend::Send(sequence) => {
                    tries += 1;
                    let item = Item { length: 9, ..all[&sequence] };
                    let blame = match turns.failed(item, long, now, 0) {
                        FailureCause::Length => turns.is_whole(item, Duration::ZERO, now),
                        blame => blame,
                    };
                    if blame == FailureCause::TooLong {
                        break passed;
                    }
                }
                NextSend::Wait(until) => now = until,
                NextSend::Nothing => panic!(),
            }
            if (now - began).as_secs() / 10 > passed / 10 {
                turns.taken(all[&3]);
            }
        };
        assert!(
            (60..80).contains(&ended) && (8..40).contains(&tries),
            "{tries} tries in {ended} s"
        );
        let next = Item { length: 9, ..all[&2] };
        let as_refused = SendFailure { length: LengthClass::AsRefused, ..SendFailure::default() };
        turns.taken(all[&3]);
        assert_eq!(turns.failed(next, as_refused, now, 0), FailureCause::Length);
        assert_eq!(turns.is_whole(next, Duration::ZERO, now), FailureCause::TooLong);
        assert_eq!(turns.next(&all, now), NextSend::Send(1), "the next one does not wait");
        // One that is much shorter is tried, and so is each again once one so long was taken.
        let shorter = Item { length: 3, ..next };
        assert_eq!(turns.is_whole(shorter, Duration::ZERO, now), FailureCause::Request);
        turns.taken(next);
        assert_eq!(turns.is_whole(next, Duration::ZERO, now), FailureCause::Request);
    }

    #[test]
    fn lone_stacks_of_a_service_that_is_never_taken_end_with_one_try_each_when_its_time_is_over() {
        let (all, began) = (items(&[(1, 1), (2, 1), (3, 2)]), Instant::now());
        let short = Item { length: 0, ..all[&3] };
        let old =
            SendFailure { length: LengthClass::Long, age: LEAST_TIME, ..SendFailure::default() };
        let (mut turns, mut now) = (RequestScheduler::default(), began);
        while (now - began) < LEAST_TIME {
            turns.taken(short);
            if turns.failed(all[&1], old, now, 0) == FailureCause::Length {
                assert_eq!(turns.is_whole(all[&1], LEAST_TIME, now), FailureCause::Request);
            }
            let NextSend::Wait(until) = turns.next(&items(&[(1, 1)]), now) else { panic!() };
            now = until;
        }
        assert_eq!(now - began, LEAST_TIME, "it is tried at that moment");
        turns.taken(short);
        assert!(matches!(turns.failed(all[&1], old, now, 0), FailureCause::Ended { .. }));
        // That of stacks which cannot be split began with the first that was seen to be one.
        now += Duration::from_secs(5);
        assert_eq!(turns.failed(all[&2], old, now, 0), FailureCause::Length);
        assert_eq!(
            turns.is_whole(all[&2], Duration::ZERO, now),
            FailureCause::Request,
            "it is young"
        );
        assert_eq!(turns.is_whole(all[&2], LEAST_TIME, now), FailureCause::TooLong);
    }

    #[test]
    fn one_service_alone_with_long_requests_has_them_split_in_the_end() {
        let (all, now) = (items(&[(1, 1)]), Instant::now());
        let (mut turns, long) = (
            RequestScheduler::default(),
            SendFailure { length: LengthClass::Long, ..SendFailure::default() },
        );
        for _ in 1..FAILURES_TO_SPLIT {
            assert_eq!(turns.failed(all[&1], long, now, 0), FailureCause::Request);
        }
        assert_eq!(turns.failed(all[&1], long, now, 0), FailureCause::Length);
    }

    #[test]
    fn a_receiver_that_is_away_costs_nothing_and_is_asked_ever_more_rarely() {
        let all: Vec<(u64, u64)> = (1..=200).map(|number| (number, number % 50)).collect();
        let mut run = Run::new(&all, &|_, passed| passed.as_secs() > 3600);
        run.until(3600);
        assert_eq!((run.items.len(), run.ended.len()), (200, 0));
        run.until(3600 + 301);
        assert_eq!((run.items.len(), run.ended.len()), (0, 0));
    }

    #[test]
    fn two_services_that_fail_hold_up_a_third_for_some_seconds_at_most() {
        let mut run = Run::new(&[(1, 1), (2, 2), (3, 1), (4, 2)], &|group, _| group == 3);
        run.until(1000);
        let before = run.seconds();
        run.put(&[(9, 3)]);
        run.until(before + 11);
        assert_eq!(run.sent.iter().map(|(_, sequence)| *sequence).collect::<Vec<_>>(), [9]);
    }

    #[test]
    fn two_services_that_are_never_taken_come_to_an_end_while_others_are_taken() {
        let mut run = Run::new(&[(1, 1), (2, 2), (3, 1), (4, 2)], &|group, _| group == 3);
        for number in 5..205 {
            run.put(&[(number, 3)]);
            run.until((number - 4) * 10);
        }
        run.ended.sort_unstable();
        assert_eq!((run.sent.len(), run.items.len(), run.ended), (200, 0, vec![1, 2, 3, 4]));
    }

    #[test]
    fn a_request_that_is_over_by_its_failures_says_nothing_of_the_next_one() {
        let (all, now) = (items(&[(1, 1), (2, 1)]), Instant::now());
        let mut turns = RequestScheduler::default();
        turns.taken(Item { sequence: 0, ..all[&1] });
        for _ in 1..MOST_FAILURES {
            assert_eq!(turns.failed(all[&1], COUNTS, now, 0), FailureCause::Request);
        }
        assert_eq!(
            turns.failed(all[&1], COUNTS, now, 0),
            FailureCause::Ended { tries: MOST_FAILURES }
        );
        assert_eq!(turns.next(&items(&[(2, 1)]), now), NextSend::Wait(now + LONGEST_WAIT));
        assert_eq!(turns.failed(all[&2], COUNTS, now, 0), FailureCause::Request);
    }

    #[test]
    fn one_service_alone_waits_for_a_receiver_that_fails() {
        let mut run = Run::new(&[(1, 1), (2, 1)], &|_, passed| passed.as_secs() >= 600);
        run.until(599);
        assert_eq!((run.items.len(), run.ended.len()), (2, 0));
        run.until(1200);
        assert_eq!((run.items.len(), run.sent.len()), (0, 2));
    }

    #[test]
    fn a_small_request_passes_a_large_one_of_its_own_service() {
        let mut turns = RequestScheduler::default();
        let (all, now) = (items(&[(1, 1), (2, 1)]), Instant::now());
        assert_eq!(turns.failed(all[&1], SendFailure::default(), now, 0), FailureCause::Request);
        assert_eq!(turns.next(&all, now), NextSend::Wait(now + Duration::from_secs(1)));
        assert_eq!(turns.next(&all, now + Duration::from_secs(1)), NextSend::Send(2));
    }

    #[test]
    fn what_a_receiver_asks_for_is_granted_and_nobody_who_is_there_is_asked_by_the_clock() {
        let (all, now) = (items(&[(1, 1), (2, 2), (3, 3)]), Instant::now());
        let (minute, second) = (Duration::from_secs(60), Duration::from_secs(1));
        let asked = SendFailure { asked: Some(minute), ..SendFailure::default() };
        let mut turns = RequestScheduler::default();
        turns.failed(all[&1], asked, now, 0);
        assert_eq!(turns.next(&all, now), NextSend::Send(2));
        assert_eq!(turns.failed(all[&2], asked, now, 0), FailureCause::Receiver);
        assert_eq!(turns.next(&all, now + second), NextSend::Wait(now + minute));
        let mut away = RequestScheduler::default();
        away.unreached(now, 0);
        assert_eq!(away.next(&all, now), NextSend::Wait(now + second));
        away.taken(all[&1]);
        assert_eq!(away.next(&items(&[(2, 2)]), now), NextSend::Send(2));
    }

    #[test]
    fn what_a_receiver_fails_on_by_its_own_account_is_passed_over_in_the_end() {
        let (all, now) = (items(&[(1, 1)]), Instant::now());
        let mut turns = RequestScheduler::default();
        for _ in 1..MOST_FAILURES {
            assert_eq!(turns.failed(all[&1], COUNTS, now, 0), FailureCause::Request);
        }
        assert_eq!(
            turns.failed(all[&1], COUNTS, now, 0),
            FailureCause::Ended { tries: MOST_FAILURES }
        );
        // As long as its constant's comment says.
        let waits: Duration = (1..MOST_FAILURES).map(|failures| wait(failures, None, 0)).sum();
        assert_eq!(waits.as_secs() / 60, 18);
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
